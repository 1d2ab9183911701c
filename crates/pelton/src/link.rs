//! What ties a handle to its peers: the bells and the descriptor for the caller's loop, which are the handle's own, and a link
//! to each peer: whom to ring, and what tells its end.

use crate::directory::Directory;
use crate::error::{Error, Result};
use crate::gather::{Hall, this_process};
use pelton_lane::failpoint;
use pelton_os::socket::{DESCRIPTORS_MAX, Socket, wait_for};
use pelton_os::{
    Descriptor, Doorbell, Event, LocalWake, Peer, Pollable, Ready, ReceivedFd, locked, own_uid, poll_until,
};
use rustix::event::epoll::EventFlags;
use std::collections::VecDeque;
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Descriptors on their way between threads, by the number of their message.
type Local = Arc<Mutex<VecDeque<(u32, Vec<ReceivedFd>)>>>;

/// Descriptors that have come: of which message, and whether some were cut off.
type Received = (u32, Vec<ReceivedFd>, bool);

/// How the peer is reached.
#[derive(Debug)]
enum Way {
    Socket {
        socket: Arc<Socket>,
        process: Option<Arc<Descriptor>>,
    },
    Threads(Local),
    /// To a receiver of many, which is told by its hall that this sender's lane has ended.
    Hall {
        local: Local,
        hall: Arc<Hall>,
        number: u32,
    },
    Nobody,
    /// Through a directory, where it may come and go.
    Path {
        directory: Arc<Directory>,
        whom: Whom,
        /// While it is there.
        life: Option<Descriptor>,
        /// Its generation, and that of the last one of which it is known that it has gone.
        met: u64,
        gone: u64,
    },
}

/// A socket and the process at its other end.
pub(crate) type SharedLife = (Arc<Socket>, Option<Arc<Descriptor>>);

impl Way {
    fn over(socket: Socket, process: Option<Descriptor>) -> Way {
        Way::Socket { socket: Arc::new(socket), process: process.map(Arc::new) }
    }

    fn shared(&self) -> Option<SharedLife> {
        match self {
            Way::Socket { socket, process } => Some((socket.clone(), process.clone())),
            _ => None,
        }
    }
}

/// What came of looking for the peer of a path channel's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// Nobody new: it is there already, or none has come.
    Nothing,
    /// It has come.
    Peer,
    /// One has come and gone since the last look.
    Passed,
}

/// The peer of a path channel's end.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Whom {
    Receiver,
    SenderOf(u32),
}

/// The connection to one peer.
#[derive(Debug)]
pub(crate) struct Link {
    peer_bell: Arc<Doorbell>,
    /// What the peer rings, if it is not what all peers do: it is given up with this.
    _own_bell: Option<Arc<Doorbell>>,
    way: Way,
    peer: Peer,
    looked: Instant,
    /// Descriptors received ahead of the message that they belong to.
    received: VecDeque<Received>,
    /// Descriptors that were waited for did not come, and none have since.
    is_silent: bool,
}

/// How often an operation that finds no reason to sleep may look whether the peer is alive.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// How often who does not wait does so: it has other things to do, and with a loop, which is told.
const LOOK_SELDOM: Duration = Duration::from_millis(10);

/// How many peers of a path channel's end that have come and gone one look passes over. There is hardly ever more than one; a
/// page whose generation never stands still is not to keep anybody looking.
pub(crate) const PASSED_MAX: u32 = 8;

/// The most packets of descriptors that are for other messages than the one asked for: far above what a socket holds.
const PACKETS_MAX: usize = 1024;

impl Link {
    fn new(peer_bell: impl Into<Arc<Doorbell>>, way: Way, peer: Peer) -> Link {
        let (peer_bell, received) = (peer_bell.into(), VecDeque::new());
        Link { peer_bell, _own_bell: None, way, peer, looked: Instant::now(), received, is_silent: false }
    }

    /// A link over a socket that [`Doorbells::watch`] watches, with the process that it said.
    pub(crate) fn over_socket(
        peer_bell: Doorbell,
        own_bell: Arc<Doorbell>,
        socket: Socket,
        process: Option<Descriptor>,
        peer: Peer,
    ) -> Link {
        Link { _own_bell: Some(own_bell), ..Link::new(peer_bell, Way::over(socket, process), peer) }
    }

    /// The same of two lanes there and back: one socket carries the descriptors of both, and tells the peer's end to both.
    pub(crate) fn two_over_socket(
        peer_bells: [Doorbell; 2],
        own_bell: Arc<Doorbell>,
        socket: Socket,
        process: Option<Descriptor>,
        peer: Peer,
    ) -> [Link; 2] {
        let way = Way::over(socket, process);
        let [there, back] = peer_bells;
        let Some((socket, process)) = way.shared() else { unreachable!("it was made over a socket") };
        let first = Link { _own_bell: Some(own_bell.clone()), ..Link::new(there, way, peer) };
        let second = Link::new(back, Way::Socket { socket, process }, peer);
        [first, Link { _own_bell: Some(own_bell), ..second }]
    }

    /// What tells the peer's end, for who waits while the link is somebody else's to use.
    pub(crate) fn shared_life(&self) -> Option<SharedLife> {
        self.way.shared()
    }

    /// The two links of a lane that a thread makes to a receiver of many: to the thread, whose bell that is, and to the hall.
    pub(crate) fn of_thread(bell: Arc<Doorbell>, hall: &Arc<Hall>, number: u32) -> (Link, Link) {
        let local = Local::default();
        let to_hall = Way::Hall { local: local.clone(), hall: hall.clone(), number };
        (Link::new(bell, Way::Threads(local), this_process()), Link::new(hall.bell().clone(), to_hall, this_process()))
    }

    /// Which of the hall's lanes it is of; 0 of a link to elsewhere.
    pub(crate) fn number(&self) -> u32 {
        match self.way {
            Way::Hall { number, .. } => number,
            _ => 0,
        }
    }

    /// To nobody, ever.
    pub(crate) fn to_nobody(bell: Arc<Doorbell>) -> Link {
        Link::new(bell, Way::Nobody, Peer { pid: 0, uid: 0 })
    }

    /// Two links between threads, and the bells of their handles.
    pub(crate) fn between_threads() -> std::io::Result<[(Doorbells, Link); 2]> {
        let local = Local::default();
        let (left, right) = (Doorbells::new()?, Doorbells::new()?);
        let link = |peer: &Doorbells| Link::new(peer.bell.clone(), Way::Threads(local.clone()), this_process());
        let (to_right, to_left) = (link(&right), link(&left));
        Ok([(left, to_right), (right, to_left)])
    }

    /// A link to whoever has, or will have, that end of a path channel.
    pub(crate) fn through_directory(directory: Arc<Directory>, whom: Whom, peer_bell: Doorbell) -> Link {
        Link::new(peer_bell, Way::Path { directory, whom, life: None, met: 0, gone: 0 }, Peer { pid: 0, uid: 0 })
    }

    /// Who is at the other end, if somebody is.
    pub(crate) fn peer(&self) -> Option<Peer> {
        match &self.way {
            Way::Path { life: None, .. } | Way::Nobody => None,
            _ => Some(self.peer),
        }
    }

    /// Goes on with the peer's successor, as [`Link::over_socket`] would.
    pub(crate) fn reconnect(
        &mut self,
        bells: &Doorbells,
        peer_bell: Doorbell,
        own_bell: Arc<Doorbell>,
        socket: Socket,
        process: Option<Descriptor>,
        peer: Peer,
    ) {
        bells.pollable.forget(self.life());
        self.way = Way::over(socket, process);
        (self.peer_bell, self.peer, self.is_silent) = (peer_bell.into(), peer, false);
        self._own_bell = Some(own_bell);
    }

    /// Whether the peer comes and goes without this side's doing anything about it: a path channel's.
    pub(crate) fn is_path(&self) -> bool {
        matches!(self.way, Way::Path { .. })
    }

    /// Looks whether the peer of a path channel's end has come, and watches it from then on. `says` is what its page says of
    /// its generation and process. Life comes before generation: who sees a new one and finds nobody alive, knows that it
    /// has gone.
    pub(crate) fn find_peer(&mut self, bells: &Doorbells, says: impl Fn() -> (u64, u32)) -> Result<Found> {
        let Way::Path { directory, whom, life, met, gone } = &mut self.way else { return Ok(Found::Nothing) };
        let (generation, _) = says();
        if life.is_some() && generation != *met {
            // Its successor holds the life by now, which so tells nothing: the next look finds that one.
            self.lose_peer(bells);
            return Ok(Found::Passed);
        }
        if life.is_some() || generation == *gone {
            return Ok(Found::Nothing);
        }
        let found = match whom {
            Whom::Receiver => directory.watch_receiver()?,
            Whom::SenderOf(lane) => directory.watch_sender(*lane)?,
        };
        let Some(found) = found else {
            *gone = generation;
            return Ok(Found::Passed);
        };
        let lane = if let Whom::SenderOf(lane) = *whom { lane } else { 0 };
        let watched = bells.pollable.watch([Some((found.as_fd(), EventFlags::empty())), None], Event::Gone(lane));
        watched.map_err(Error::system("watching the peer"))?;
        *life = Some(found);
        // Another may have taken its place meanwhile.
        let (generation, pid) = says();
        *met = generation;
        self.peer = Peer { pid, uid: directory.owner() };
        Ok(Found::Peer)
    }

    /// The peer has gone: nothing more is heard of it. To a path channel's end another may come.
    pub(crate) fn lose_peer(&mut self, bells: &Doorbells) {
        bells.pollable.forget(self.life());
        if let Way::Path { life, met, gone, .. } = &mut self.way
            && life.take().is_some()
        {
            *gone = *met;
        }
    }

    /// There is no space for a path lane's first `bytes`.
    pub(crate) fn no_space(&self, bytes: u64, source: std::io::Error) -> Error {
        let path = match &self.way {
            Way::Path { directory, .. } => directory.path().display().to_string(),
            _ => String::new(),
        };
        Error::NoSpace { path, bytes, source }
    }

    /// Apart, so that no system call lies on the way of a message that rings nobody.
    #[cold]
    #[inline(never)]
    pub(crate) fn ring_peer(&self) {
        failpoint("ring: before");
        self.peer_bell.ring();
        failpoint("ring: after");
    }

    /// What tells the peer's end.
    pub(crate) fn life(&self) -> [Option<BorrowedFd<'_>>; 2] {
        match &self.way {
            Way::Socket { socket, process } => [Some(socket.as_fd()), process.as_ref().map(|p| p.as_fd())],
            Way::Threads(_) | Way::Hall { .. } | Way::Nobody => [None, None],
            Way::Path { life, .. } => [life.as_ref().map(|life| life.as_fd()), None],
        }
    }

    /// Whether the peer has gone, by one system call. Of a path channel: not, if it has not come.
    pub(crate) fn is_peer_gone(&mut self) -> Result<bool> {
        self.looked = Instant::now();
        if self.life()[0].is_none() {
            return Ok(false);
        }
        let ready = poll_until(&[], self.life(), Some(self.looked)).map_err(Error::system("looking at the peer"))?;
        Ok(ready == Ready::Gone)
    }

    /// What there was to look at has been looked at.
    pub(crate) fn note_look(&mut self) {
        self.looked = Instant::now();
    }

    /// Whether those who ask often may look again: once in a millisecond.
    pub(crate) fn is_look_due(&self) -> bool {
        self.looked.elapsed() >= LOOK_EVERY
    }

    /// Whether those may who ask often, and do not wait: once in ten milliseconds.
    pub(crate) fn is_look_overdue(&self) -> bool {
        self.looked.elapsed() >= LOOK_SELDOM
    }

    /// Ends the connection from this side.
    pub(crate) fn shutdown(&self) {
        match &self.way {
            Way::Socket { socket, .. } => socket.shutdown(),
            Way::Hall { hall, number, .. } => hall.note_gone(*number),
            Way::Threads(_) | Way::Path { .. } | Way::Nobody => {}
        }
    }

    /// Sends the descriptors of message `seq`. False: there is no room for them now.
    pub(crate) fn try_send_descriptors(&self, seq: u32, fds: &[BorrowedFd<'_>]) -> Result<bool> {
        match &self.way {
            Way::Socket { socket, .. } => match socket.try_send(&crate::handshake::descriptors_packet(seq), fds) {
                // Gone, which the wait for room tells: reset if it left something unread. Or too many on their way in all of
                // this user's sockets.
                Err(error) if [ErrorKind::BrokenPipe, ErrorKind::ConnectionReset].contains(&error.kind()) => Ok(false),
                Err(error) if error.raw_os_error() == Some(libc::ETOOMANYREFS) => {
                    std::thread::sleep(LOOK_EVERY);
                    Ok(false)
                }
                sent => sent.map_err(Error::system("sending descriptors")),
            },
            Way::Threads(local) | Way::Hall { local, .. } => {
                let owned = fds
                    .iter()
                    .map(|fd| ReceivedFd::of_thread(fd.try_clone_to_owned()?))
                    .collect::<std::io::Result<Vec<_>>>();
                let owned = owned.map_err(Error::system("duplicating descriptors"))?;
                locked(local).push_back((seq, owned));
                Ok(true)
            }
            Way::Path { .. } | Way::Nobody => unreachable!("a path channel's sender has refused them"),
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
            _ => Ok(true),
        }
    }

    /// The descriptors of message `seq`, which were sent before it was committed, or, if it `may_be_late`, are being sent
    /// again by a sender that survived: waits for these, a second at most, and not again once that was in vain.
    pub(crate) fn receive_descriptors(&mut self, seq: u32, count: u32, may_be_late: bool) -> Result<Vec<ReceivedFd>> {
        let waits = may_be_late && !self.is_silent;
        let deadline = waits.then(|| Instant::now() + Duration::from_secs(1));
        let mut cut_off = false;
        let mut fds = Vec::new();
        for passed in 0.. {
            let Some((of, came, truncated)) = self.next_descriptors(deadline)? else {
                self.is_silent |= waits;
                break;
            };
            match of.wrapping_sub(seq) as i32 {
                0 => {
                    (fds, cut_off, self.is_silent) = (came, truncated, false);
                    break;
                }
                // Of a message that was released, with its descriptors, by a predecessor.
                ..0 if passed < PACKETS_MAX => {}
                ..0 => return Err(Error::Corrupt(format!("descriptors of messages before {seq} come without end"))),
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

    /// What descriptors come next. `None`: none do.
    fn next_descriptors(&mut self, deadline: Option<Instant>) -> Result<Option<Received>> {
        if let Some(received) = self.received.pop_front() {
            return Ok(Some(received));
        }
        match &self.way {
            Way::Threads(local) => {
                let next = locked(local).pop_front();
                Ok(next.map(|(seq, fds)| (seq, fds, false)))
            }
            Way::Path { .. } | Way::Hall { .. } | Way::Nobody => Ok(None),
            Way::Socket { socket, process } => loop {
                if let Some(found) = receive_packet(socket)? {
                    return Ok(found);
                }
                if deadline.is_none() {
                    return Ok(None);
                }
                let process = process.as_ref().map(|process| process.as_fd());
                let waited = wait_for(socket.as_fd(), process, false, deadline);
                if !waited.map_err(Error::system("waiting for descriptors"))? {
                    return Ok(None);
                }
            },
        }
    }

    /// Takes in what a sender that died has sent along; its successor does not.
    pub(crate) fn take_in(&mut self) -> Result<()> {
        let Way::Socket { socket, .. } = &self.way else { return Ok(()) };
        while let Some(Some(received)) = receive_packet(socket)? {
            self.received.push_back(received);
            if self.received.len() > PACKETS_MAX {
                return Err(Error::Corrupt(format!("descriptors came for more than {PACKETS_MAX} messages")));
            }
        }
        Ok(())
    }

    /// Forgets descriptors of message `seq` and later ones: their sender died before it committed them.
    pub(crate) fn forget_descriptors_from(&mut self, seq: u32) {
        self.received.retain(|(of, ..)| (of.wrapping_sub(seq) as i32) < 0);
    }
}

/// The next packet of descriptors. `None`: nothing there now; `Some(None)`: nor ever.
fn receive_packet(socket: &Socket) -> Result<Option<Option<Received>>> {
    let mut packet = [0; crate::handshake::PACKET_BYTES];
    let got = socket.try_receive(&mut packet).map_err(Error::system("receiving descriptors"))?;
    let Some((bytes, fds, truncated)) = got else { return Ok(None) };
    if bytes == 0 {
        return Ok(Some(None));
    }
    let found = fds.len();
    if found > DESCRIPTORS_MAX {
        return Err(Error::Corrupt(format!(
            "{found} descriptors came with a packet, wanted at most {DESCRIPTORS_MAX}"
        )));
    }
    if let Some(waiting) = fds.first().and_then(ReceivedFd::overdue) {
        return Err(Error::Corrupt(format!(
            "descriptors came while {waiting} of that user's wait to be closed for long"
        )));
    }
    match crate::handshake::descriptors_of(&packet[..bytes]) {
        Some(seq) => Ok(Some(Some((seq, fds, truncated)))),
        None => Err(Error::Corrupt(format!("a packet of {bytes} bytes came, wanted descriptors"))),
    }
}

/// What a handle has for itself, whoever its peers are.
#[derive(Clone, Debug)]
pub(crate) struct Doorbells {
    /// Rung by the peers.
    bell: Arc<Doorbell>,
    /// Rung by this process alone: no peer has a descriptor of it, and none can make ringing it wait.
    nudge: Arc<LocalWake>,
    pollable: Arc<Pollable>,
}

impl Doorbells {
    pub(crate) fn new() -> std::io::Result<Doorbells> {
        Doorbells::with(Doorbell::shared()?)
    }

    pub(crate) fn with(bell: Doorbell) -> std::io::Result<Doorbells> {
        let nudge = LocalWake::new()?;
        let pollable = Arc::new(Pollable::new(&bell, &nudge)?);
        Ok(Doorbells { bell: Arc::new(bell), nudge: Arc::new(nudge), pollable })
    }

    /// For one lane of many that a handle sends by: a bell of its own, which the handle's descriptor tells of once
    /// [`Doorbells::add_bell`] has been asked to. The `mute` nudge is nobody's to hear.
    pub(crate) fn of_one_lane(&self, mute: &Arc<LocalWake>, peer: Peer) -> std::io::Result<Doorbells> {
        let bell = if peer.uid == own_uid() { Doorbell::shared()? } else { Doorbell::pair(peer.uid)? };
        Ok(Doorbells { bell: Arc::new(bell), nudge: mute.clone(), pollable: self.pollable.clone() })
    }

    /// The bell of threads, and of peers of this process's user.
    pub(crate) fn bell(&self) -> &Arc<Doorbell> {
        &self.bell
    }

    /// The bell to give to that peer. Whoever is not this user has one alone, lest it rings for others, or silences them.
    pub(crate) fn bell_for(&self, peer: Peer) -> std::io::Result<Arc<Doorbell>> {
        if peer.uid == own_uid() {
            return Ok(self.bell.clone());
        }
        let bell = Arc::new(Doorbell::pair(peer.uid)?);
        self.pollable.add_doorbell(&bell)?;
        Ok(bell)
    }

    /// Also hears a bell that only one peer is given, and that others wait for besides.
    pub(crate) fn add_bell(&self, bell: &Doorbell) -> std::io::Result<()> {
        self.pollable.add_bell(bell)
    }

    /// Also hears of connections to a listener, or of what else is a reason to look at it.
    pub(crate) fn add_visits(&self, fd: BorrowedFd<'_>, visit: u32) -> std::io::Result<()> {
        self.pollable.watch([Some((fd, EventFlags::IN)), None], Event::Visit(visit))
    }

    /// Also hears of packets of one who visits.
    pub(crate) fn add_visitor(&self, socket: &Socket, visit: u32) -> std::io::Result<()> {
        self.pollable.watch_socket(socket, EventFlags::IN, Event::Visit(visit))
    }

    /// Whether connections to a listener, or packets of those who visit it, are told.
    pub(crate) fn heed_visits(&self, fd: BorrowedFd<'_>, visit: u32, heeds: bool) -> std::io::Result<()> {
        let events = if heeds { EventFlags::IN } else { EventFlags::empty() };
        self.pollable.change(fd, events, Event::Visit(visit))
    }

    /// Hears no more of that descriptor. Closing it would not do for a bell, which its peer has too.
    pub(crate) fn forget(&self, fd: BorrowedFd<'_>) {
        self.pollable.forget([Some(fd), None]);
    }

    /// The visitor is the peer of the lane of that number from now on, of which only its end is told. Needs nothing that could
    /// be wanting.
    pub(crate) fn end_visit(&self, fd: BorrowedFd<'_>, lane: u32) -> std::io::Result<()> {
        self.pollable.change(fd, EventFlags::RDHUP, Event::Gone(lane))
    }

    /// What there is to hear now, but for bells; those of only one peer are silenced.
    pub(crate) fn hear(&self, events: &mut Vec<Event>) -> Result<()> {
        if self.pollable.events(events).map_err(Error::system("listening to the peers"))? {
            self.hear_again();
        }
        Ok(())
    }

    /// There is more than was heard now, which a caller's loop that hears edges alone would not be told again; or something was
    /// heard that the loop is to be told of until [`Doorbells::drain`].
    pub(crate) fn hear_again(&self) {
        self.nudge.ring();
    }

    /// The bell for this side's own reasons.
    pub(crate) fn nudge(&self) -> &Arc<LocalWake> {
        &self.nudge
    }

    /// Has the pollable descriptor tell the end of the peer at this socket, of the lane of that number, and of its process,
    /// which it answers. When the two are closed they leave it.
    pub(crate) fn watch(&self, socket: &Socket, lane: u32) -> std::io::Result<Option<Descriptor>> {
        let process = socket.peer_process()?;
        let of_process = process.as_ref().map(|process| (process.as_fd(), EventFlags::IN));
        self.pollable.watch([None, of_process], Event::Gone(lane))?;
        match self.pollable.watch_socket(socket, EventFlags::RDHUP, Event::Gone(lane)) {
            // A visitor's, which [`Doorbells::end_visit`] sees to.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(process),
            watched => watched.map(|()| process),
        }
    }

    /// Silences both bells, before announcing a sleep.
    pub(crate) fn drain(&self) -> Result<()> {
        self.bell.drain();
        self.nudge.drain();
        self.pollable.drain().map_err(Error::system("listening to the peers"))
    }

    /// Sleeps until a peer rings or goes, or the deadline.
    pub(crate) fn sleep(&self, deadline: Option<Instant>) -> Result<Ready> {
        self.pollable.wait(deadline).map_err(Error::system("waiting for the peers"))
    }

    /// Whether a peer has gone. What rang meanwhile goes on ringing.
    pub(crate) fn is_any_gone(&self) -> Result<bool> {
        let ready = self.sleep(Some(Instant::now()))?;
        if ready != Ready::TimedOut {
            self.hear_again();
        }
        Ok(ready == Ready::Gone)
    }
}

impl AsFd for Doorbells {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pollable.as_fd()
    }
}
