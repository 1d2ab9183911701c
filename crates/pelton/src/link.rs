//! What ties a handle to its peer: the bells, the socket that tells a death, and the descriptor for the caller's loop.

use crate::error::{Error, Result};
use crate::os::socket::{Socket, wait_for};
use crate::os::{Bell, Descriptor, Nudge, Pollable, Ready, poll_until};
use std::collections::VecDeque;
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Who is at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its process when it connected.
    pub pid: u32,
    /// Its user, as the kernel vouches for.
    pub uid: u32,
}

/// Descriptors on their way between threads, by the number of their message.
type Local = Arc<Mutex<VecDeque<(u32, Vec<OwnedFd>)>>>;

#[derive(Debug)]
enum Way {
    Socket { socket: Socket, process: Option<Descriptor> },
    Threads(Local),
}

/// The connection of one handle.
#[derive(Debug)]
pub(crate) struct Link {
    /// Rung by the peer.
    bell: Bell,
    /// Rung by this process alone: the peer has no descriptor of it, and cannot make ringing it wait.
    nudge: Arc<Nudge>,
    peer_bell: Bell,
    way: Way,
    peer: Peer,
    pollable: Pollable,
    looked: Instant,
    /// Descriptors received ahead of the message that they belong to.
    received: VecDeque<(u32, Vec<OwnedFd>)>,
}

/// How often an operation that finds no reason to sleep may look whether the peer is alive.
const LOOK_EVERY: Duration = Duration::from_millis(1);

impl Link {
    /// A link over a socket. `bells` are this side's, and stay the same for a successor.
    pub(crate) fn over_socket(bells: Bells, peer_bell: Bell, socket: Socket, peer: Peer) -> std::io::Result<Link> {
        let Bells { bell, nudge, pollable } = bells;
        let way = watch(&pollable, socket)?;
        Ok(Link {
            bell,
            nudge: Arc::new(nudge),
            peer_bell,
            way,
            peer,
            pollable,
            looked: Instant::now(),
            received: VecDeque::new(),
        })
    }

    /// Two links between threads.
    pub(crate) fn between_threads() -> std::io::Result<[Link; 2]> {
        let local = Local::default();
        let peer = Peer { pid: std::process::id(), uid: rustix::process::geteuid().as_raw() };
        let (left, right) = (Bells::new()?, Bells::new()?);
        let link = |bells: Bells, peer_bell: OwnedFd| -> std::io::Result<Link> {
            let Bells { bell, nudge, pollable } = bells;
            let peer_bell = Bell::from_peer(peer_bell)?;
            Ok(Link {
                bell,
                nudge: Arc::new(nudge),
                peer_bell,
                way: Way::Threads(local.clone()),
                peer,
                pollable,
                looked: Instant::now(),
                received: VecDeque::new(),
            })
        };
        let for_left = right.bell.as_fd().try_clone_to_owned()?;
        let for_right = left.bell.as_fd().try_clone_to_owned()?;
        Ok([link(left, for_left)?, link(right, for_right)?])
    }

    pub(crate) fn peer(&self) -> Peer {
        self.peer
    }

    /// Goes on with the peer's successor: the bell and the pollable descriptor stay.
    pub(crate) fn reconnect(&mut self, peer_bell: Bell, socket: Socket, peer: Peer) -> std::io::Result<()> {
        if let Way::Socket { socket, process } = &self.way {
            self.pollable.forget(socket.as_fd(), process.as_ref().map(|process| process.as_fd()));
        }
        self.way = watch(&self.pollable, socket)?;
        (self.peer_bell, self.peer) = (peer_bell, peer);
        Ok(())
    }

    /// The bell that the peer is given.
    pub(crate) fn bell(&self) -> &Bell {
        &self.bell
    }

    /// The bell for this side's own reasons.
    pub(crate) fn nudge(&self) -> &Arc<Nudge> {
        &self.nudge
    }

    /// Silences both bells, before announcing a sleep.
    pub(crate) fn drain(&self) {
        self.bell.drain();
        self.nudge.drain();
    }

    pub(crate) fn ring_peer(&self) {
        self.peer_bell.ring();
    }

    fn life(&self) -> [Option<BorrowedFd<'_>>; 2] {
        match &self.way {
            Way::Socket { socket, process } => [Some(socket.as_fd()), process.as_ref().map(|p| p.as_fd())],
            Way::Threads(_) => [None, None],
        }
    }

    /// Sleeps until the peer rings or goes, or the deadline.
    pub(crate) fn sleep(&self, deadline: Option<Instant>) -> Result<Ready> {
        poll_until(&[self.bell.as_fd(), self.nudge.as_fd()], self.life(), deadline)
            .map_err(Error::system("waiting for the peer"))
    }

    /// Whether the peer has gone, by one system call.
    pub(crate) fn is_peer_gone(&mut self) -> Result<bool> {
        self.looked = Instant::now();
        if let Way::Threads(_) = self.way {
            return Ok(false);
        }
        let ready = poll_until(&[], self.life(), Some(self.looked)).map_err(Error::system("looking at the peer"))?;
        Ok(ready == Ready::Gone)
    }

    /// As [`Link::is_peer_gone`], but looks only once in a millisecond: for those who ask often.
    pub(crate) fn is_peer_known_gone(&mut self) -> Result<bool> {
        if self.looked.elapsed() < LOOK_EVERY {
            return Ok(false);
        }
        self.is_peer_gone()
    }

    /// Ends the connection from this side.
    pub(crate) fn shutdown(&self) {
        match &self.way {
            Way::Socket { socket, .. } => socket.shutdown(),
            Way::Threads(_) => {}
        }
    }

    /// Sends the descriptors of message `seq`. False: there is no room for them now.
    pub(crate) fn try_send_descriptors(&self, seq: u32, fds: &[BorrowedFd<'_>]) -> Result<bool> {
        match &self.way {
            Way::Socket { socket, .. } => match socket.try_send(&crate::handshake::descriptors_packet(seq), fds) {
                // Gone, which the wait for room tells; or too many on their way in all of this user's sockets.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
                Err(error) if error.raw_os_error() == Some(libc::ETOOMANYREFS) => {
                    std::thread::sleep(LOOK_EVERY);
                    Ok(false)
                }
                sent => sent.map_err(Error::system("sending descriptors")),
            },
            Way::Threads(local) => {
                let owned = fds.iter().map(|fd| fd.try_clone_to_owned()).collect::<std::io::Result<Vec<_>>>();
                let owned = owned.map_err(Error::system("duplicating descriptors"))?;
                local.lock().unwrap_or_else(PoisonError::into_inner).push_back((seq, owned));
                Ok(true)
            }
        }
    }

    /// Waits until descriptors may be sent again, or the peer goes. False: the deadline.
    pub(crate) fn wait_for_descriptor_room(&self, deadline: Option<Instant>) -> Result<bool> {
        match &self.way {
            Way::Socket { socket, process } => {
                let process = process.as_ref().map(|process| process.as_fd());
                wait_for(socket.as_fd(), process, true, deadline)
                    .map_err(Error::system("waiting for room for descriptors"))
            }
            Way::Threads(_) => Ok(true),
        }
    }

    /// The descriptors of message `seq`, which were sent before it was committed, or are being sent again by a sender
    /// that survived: waits for these.
    pub(crate) fn receive_descriptors(&mut self, seq: u32, count: u32) -> Result<Vec<OwnedFd>> {
        let deadline = Instant::now() + Duration::from_secs(1);
        let mut cut_off = false;
        let mut fds = Vec::new();
        while let Some((of, came, truncated)) = self.next_descriptors(deadline)? {
            match of.wrapping_sub(seq) as i32 {
                0 => {
                    (fds, cut_off) = (came, truncated);
                    break;
                }
                // Of a message that was released, with its descriptors, by a predecessor.
                ..0 => {}
                _ => return Err(Error::Corrupt(format!("descriptors of message {of} came before those of {seq}"))),
            }
        }
        if fds.len() == count as usize {
            Ok(fds)
        } else if cut_off {
            Err(Error::DescriptorsLost { seq, sent: count as usize, received: fds.len() })
        } else {
            Err(Error::Corrupt(format!("message {seq} came with {} descriptors, said {count}", fds.len())))
        }
    }

    /// What descriptors come next, of which message, and whether some were cut off. `None`: none do.
    fn next_descriptors(&mut self, deadline: Instant) -> Result<Option<(u32, Vec<OwnedFd>, bool)>> {
        if let Some((seq, fds)) = self.received.pop_front() {
            return Ok(Some((seq, fds, false)));
        }
        match &self.way {
            Way::Threads(local) => {
                let next = local.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                Ok(next.map(|(seq, fds)| (seq, fds, false)))
            }
            Way::Socket { socket, process } => loop {
                if let Some(found) = receive_packet(socket)? {
                    return Ok(found);
                }
                let process = process.as_ref().map(|process| process.as_fd());
                let waited = wait_for(socket.as_fd(), process, false, Some(deadline));
                if !waited.map_err(Error::system("waiting for descriptors"))? {
                    return Ok(None);
                }
            },
        }
    }

    /// Takes in what a sender that died has sent along; its successor does not.
    pub(crate) fn take_in(&mut self) -> Result<()> {
        let Way::Socket { socket, .. } = &self.way else { return Ok(()) };
        while let Some(Some((seq, fds, _))) = receive_packet(socket)? {
            self.received.push_back((seq, fds));
            if self.received.len() > 1024 {
                return Err(Error::Corrupt("descriptors came for more than 1024 messages".to_owned()));
            }
        }
        Ok(())
    }

    /// Forgets descriptors of message `seq` and later ones: their sender died before it committed them.
    pub(crate) fn forget_descriptors_from(&mut self, seq: u32) {
        self.received.retain(|(of, _)| (of.wrapping_sub(seq) as i32) < 0);
    }
}

/// The next packet of descriptors. `None`: nothing there now; `Some(None)`: nor ever.
#[allow(clippy::type_complexity)] // named nowhere else
fn receive_packet(socket: &Socket) -> Result<Option<Option<(u32, Vec<OwnedFd>, bool)>>> {
    let mut packet = [0; crate::handshake::PACKET_BYTES];
    let got = socket.try_receive(&mut packet).map_err(Error::system("receiving descriptors"))?;
    let Some((bytes, fds, truncated)) = got else { return Ok(None) };
    if bytes == 0 {
        return Ok(Some(None));
    }
    match crate::handshake::descriptors_of(&packet[..bytes]) {
        Some(seq) => Ok(Some(Some((seq, fds, truncated)))),
        None => Err(Error::Corrupt(format!("a packet of {bytes} bytes came, wanted descriptors"))),
    }
}

/// What a handle keeps, whoever its peer is.
#[derive(Debug)]
pub(crate) struct Bells {
    pub(crate) bell: Bell,
    nudge: Nudge,
    pollable: Pollable,
}

impl Bells {
    pub(crate) fn new() -> std::io::Result<Bells> {
        let (bell, nudge) = (Bell::new()?, Nudge::new()?);
        let pollable = Pollable::new(&bell, &nudge)?;
        Ok(Bells { bell, nudge, pollable })
    }
}

/// Has the pollable descriptor tell the end of the peer at this socket. A former peer's descriptors left it when they
/// were closed.
fn watch(pollable: &Pollable, socket: Socket) -> std::io::Result<Way> {
    let process = socket.peer_process()?;
    pollable.watch(socket.as_fd(), process.as_ref().map(|process| process.as_fd()))?;
    Ok(Way::Socket { socket, process })
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pollable.as_fd()
    }
}
