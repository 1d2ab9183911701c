//! One lane's connection to its peer: the peer's doorbell, the transport, and when the peer's liveness was last
//! checked.

use crate::doorbells::Doorbells;
use crate::error::{Error, Result};
use crate::transport::{Arrived, Found, PACKETS_MAX, SharedLiveness, SocketTransport, Transport};
use pelton_lane::failpoint;
use pelton_os::{Doorbell, Peer, Ready, ReceivedFd, own_uid, poll_until};
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[derive(Debug)]
pub(crate) struct Link {
    peer_doorbell: Arc<Doorbell>,
    /// The doorbell that only this peer rings, if there is one. It is closed with the link.
    _own_doorbell: Option<Arc<Doorbell>>,
    transport: Box<dyn Transport>,
    peer: Peer,
    last_check: Instant,
    /// Descriptors received before their message.
    arrived: VecDeque<Arrived>,
    /// Whether a wait for descriptors has timed out, and none have arrived since.
    is_silent: bool,
}

/// Interval of liveness checks for an operation that waits without sleeping.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);
/// Interval of liveness checks for an operation that does not wait: the caller has other work, or an event loop.
const CHECK_INTERVAL_LONG: Duration = Duration::from_millis(10);
/// How long a receiver waits for descriptors that a surviving sender sends again.
const LATE_MAX: Duration = Duration::from_secs(1);

/// One check skips at most this number of peers that have opened a path channel and left. There is hardly ever more
/// than one. The limit ends the check even if a peer's page shows a new generation each time.
pub(crate) const PASSED_MAX: u32 = 8;

/// The peer of a path channel's link, until one is found.
pub(crate) const UNKNOWN_PEER: Peer = Peer { pid: 0, uid: 0 };

/// The peer of a link between threads.
pub(crate) fn this_process() -> Peer {
    Peer { pid: std::process::id(), uid: own_uid() }
}

impl Link {
    pub(crate) fn new(
        peer_doorbell: impl Into<Arc<Doorbell>>,
        transport: impl Transport + 'static,
        peer: Peer,
    ) -> Link {
        Link {
            peer_doorbell: peer_doorbell.into(),
            _own_doorbell: None,
            transport: Box::new(transport),
            peer,
            last_check: Instant::now(),
            arrived: VecDeque::new(),
            is_silent: false,
        }
    }

    /// Keeps the doorbell that only this peer rings.
    pub(crate) fn with_own_doorbell(mut self, doorbell: Arc<Doorbell>) -> Link {
        self._own_doorbell = Some(doorbell);
        self
    }

    /// The transport's liveness, for a thread that waits while another uses the link.
    pub(crate) fn shared_liveness(&self) -> Option<SharedLiveness> {
        self.transport.shared_liveness()
    }

    /// The number of the lane in a receiver of several senders in this process; otherwise 0.
    pub(crate) fn lane_number(&self) -> u32 {
        self.transport.lane_number()
    }

    /// The peer, if there is one.
    pub(crate) fn peer(&self) -> Option<Peer> {
        self.transport.has_peer().then_some(self.peer)
    }

    /// Continues with the peer's successor.
    pub(crate) fn reconnect(
        &mut self,
        doorbells: &Doorbells,
        peer_doorbell: Doorbell,
        own_doorbell: Arc<Doorbell>,
        transport: SocketTransport,
        peer: Peer,
    ) {
        doorbells.forget_liveness(self.liveness());
        self.transport = Box::new(transport);
        (self.peer_doorbell, self.peer, self.is_silent) = (peer_doorbell.into(), peer, false);
        self._own_doorbell = Some(own_doorbell);
    }

    /// As [`Transport::find_peer`].
    pub(crate) fn find_peer(&mut self, doorbells: &Doorbells, stated: impl Fn() -> (u64, u32)) -> Result<Found> {
        let found = self.transport.find_peer(doorbells, &stated)?;
        if let Found::Peer(peer) = found {
            self.peer = peer;
        }
        Ok(found)
    }

    /// After the peer has gone: stops polling its liveness. A path channel's endpoint may get another peer.
    pub(crate) fn lose_peer(&mut self, doorbells: &Doorbells) {
        doorbells.forget_liveness(self.liveness());
        self.transport.forget_peer();
    }

    /// The error of a path lane whose file system has no space for its first `bytes`.
    pub(crate) fn no_space(&self, bytes: u64, source: std::io::Error) -> Error {
        let path = self.transport.directory().map_or(String::new(), |directory| directory.path().display().to_string());
        Error::NoSpace { path, bytes, error: source }
    }

    /// Not inlined, so that the path of a message that needs no ring contains no system call.
    #[cold]
    #[inline(never)]
    pub(crate) fn ring_peer(&self) {
        failpoint("ring: before");
        self.peer_doorbell.ring();
        failpoint("ring: after");
    }

    /// Rings a peer that sleeps. `note` stores the processor and the time of the ring for the peer's next wait.
    #[cold]
    #[inline(never)]
    pub(crate) fn wake_peer(&self, note: impl FnOnce(Option<u32>, u64)) {
        note(pelton_os::processor(), pelton_os::monotonic_ns());
        self.ring_peer();
    }

    /// Descriptors that report the peer's end when they are polled.
    pub(crate) fn liveness(&self) -> [Option<BorrowedFd<'_>>; 2] {
        self.transport.liveness()
    }

    /// Checks by one system call whether the peer has gone. Returns false for a path channel that has had no peer yet.
    pub(crate) fn is_peer_gone(&mut self) -> Result<bool> {
        self.last_check = Instant::now();
        if self.liveness()[0].is_none() {
            return Ok(false);
        }
        let ready = poll_until(&[], self.liveness(), Some(self.last_check));
        Ok(ready.map_err(Error::system("polling the peer's liveness"))? == Ready::Gone)
    }

    /// Notes that the caller has checked the peer by other means.
    pub(crate) fn note_check(&mut self) {
        self.last_check = Instant::now();
    }

    /// Whether an operation that waits may check again.
    pub(crate) fn is_check_due(&self) -> bool {
        self.last_check.elapsed() >= CHECK_INTERVAL
    }

    /// Whether an operation that does not wait may check again.
    pub(crate) fn is_check_overdue(&self) -> bool {
        self.last_check.elapsed() >= CHECK_INTERVAL_LONG
    }

    /// Closes the connection from this side.
    pub(crate) fn shutdown(&self) {
        self.transport.shutdown();
    }

    /// Sends the descriptors of message `seq`. Returns false while there is no space for them.
    pub(crate) fn try_send_descriptors(&self, seq: u32, fds: &[BorrowedFd<'_>]) -> Result<bool> {
        self.transport.try_send_descriptors(seq, fds)
    }

    /// Waits until descriptors may be sent again, or the peer is gone. Returns false at the deadline.
    pub(crate) fn wait_for_descriptor_space(&self, deadline: Option<Instant>) -> Result<bool> {
        self.transport.wait_for_descriptor_space(deadline)
    }

    /// Receives the descriptors of message `seq`, which the sender sent before it committed the message. If they
    /// `may_be_late`, a surviving sender sends them again, and this waits for at most a second. After one such wait
    /// without effect, it does not wait again.
    pub(crate) fn receive_descriptors(&mut self, seq: u32, count: u32, may_be_late: bool) -> Result<Vec<ReceivedFd>> {
        let waits = may_be_late && !self.is_silent;
        let deadline = waits.then(|| Instant::now() + LATE_MAX);
        let mut is_truncated = false;
        let mut fds = Vec::new();
        for passed in 0.. {
            let next = match self.arrived.pop_front() {
                None => self.transport.next_descriptors(deadline)?,
                next => next,
            };
            let Some(next) = next else {
                self.is_silent |= waits;
                break;
            };
            match next.seq.wrapping_sub(seq) as i32 {
                0 => {
                    (fds, is_truncated, self.is_silent) = (next.fds, next.is_truncated, false);
                    break;
                }
                // Descriptors of a message that a predecessor has released.
                ..0 if passed < PACKETS_MAX => {}
                ..0 => return Err(Error::Corrupt(format!("descriptors of messages before {seq} come without end"))),
                _ => {
                    let text = format!("descriptors of message {} came before those of {seq}", next.seq);
                    return Err(Error::Corrupt(text));
                }
            }
        }
        if fds.len() == count as usize {
            Ok(fds)
        } else if is_truncated {
            Err(Error::DescriptorsLost { seq, sent: count as usize, received: fds.len() })
        } else {
            Err(Error::Corrupt(format!("message {seq} came with {} descriptors, said {count}", fds.len())))
        }
    }

    /// Receives all descriptors that a dead sender has sent, because its successor does not send them again.
    pub(crate) fn drain_descriptors(&mut self) -> Result<()> {
        self.transport.drain_descriptors(&mut self.arrived)
    }

    /// Drops descriptors of message `seq` and later ones: their sender died before it committed these messages.
    pub(crate) fn drop_descriptors_from(&mut self, seq: u32) {
        self.arrived.retain(|arrived| (arrived.seq.wrapping_sub(seq) as i32) < 0);
    }
}
