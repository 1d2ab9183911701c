//! Ringing and sleeping: doorbells, and waiting for them.

use super::socket::{Socket, is_shut_down, is_unix_seqpacket};
use super::{Descriptor, Foreign, locked};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::{Errno, ReadWriteFlags};
use rustix::net::{SendFlags, send};
use std::io::IoSliceMut;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

/// A doorbell: rung by one side, waited for by the other. `spec/protocol.md`, "Doorbells", says why no peer can make either block.
#[derive(Debug)]
pub(crate) struct Bell(Form);

/// What a bell is made of.
#[derive(Debug)]
enum Form {
    /// An eventfd that only this process has: readable from a ring until it is drained.
    Own(Descriptor),
    /// An eventfd between processes of one user. It is rung by adding 0, which has room whatever the counter is, and reported by an epoll that is told
    /// of every write; so it is never drained.
    Shared(Descriptor),
    /// Has a name in a directory, so that a successor finds it.
    Fifo(Descriptor),
    /// Both ends of a socket pair: the owner waits at the near one, and gives the far one to a peer of another user.
    Pair { near: Socket, far: Descriptor },
    /// The far end, as a peer gave it.
    Far(Descriptor),
}

impl Bell {
    /// For this process alone.
    pub(crate) fn own() -> std::io::Result<Bell> {
        let fd = new_eventfd()?;
        // Where that is refused it would ring for ever: said now, as nobody could say it then.
        drain_eventfd(&fd).map_err(|errno| {
            let error = std::io::Error::from(errno);
            std::io::Error::new(error.kind(), format!("reading an eventfd by preadv2: {error}"))
        })?;
        Ok(Bell(Form::Own(fd)))
    }

    /// For peers of this process's user, and threads.
    pub(crate) fn shared() -> std::io::Result<Bell> {
        Ok(Bell(Form::Shared(new_eventfd()?)))
    }

    /// For one peer, of another user.
    pub(crate) fn pair(peer_uid: u32) -> std::io::Result<Bell> {
        let (near, far) = Socket::pair(peer_uid)?;
        Ok(Bell(Form::Pair { near, far: Descriptor::new(far)? }))
    }

    /// A FIFO, opened by this process for reading and writing, without waiting. Both, so that it has a reader whatever
    /// the other side does: ringing then never raises SIGPIPE, and there is never a hang-up on it.
    pub(crate) fn fifo(fd: OwnedFd) -> std::io::Result<Bell> {
        Ok(Bell(Form::Fifo(Descriptor::new(fd)?)))
    }

    /// The peer's, as it came over the socket.
    pub(crate) fn from_peer(fd: Foreign, is_own_user: bool) -> std::io::Result<Bell> {
        use rustix::fs::{AtFlags, StatxFlags, statx};
        // As far as is known without asking a file's server, which may not answer.
        let asked = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let kind = u32::from(statx(&fd, c"", asked, StatxFlags::TYPE)?.stx_mode) & libc::S_IFMT;
        let unusable = |text: String| std::io::Error::new(std::io::ErrorKind::InvalidData, text);
        match kind {
            libc::S_IFSOCK if is_unix_seqpacket(&fd)? => Ok(Bell(Form::Far(Descriptor::new(fd.into_owned())?))),
            // An eventfd is of no file type.
            0 if is_own_user => {
                // Non-blocking, whatever the peer made of it.
                let set = rustix::fs::fcntl_setfl(&fd, rustix::fs::OFlags::NONBLOCK);
                set.map_err(|error| unusable(format!("the peer's bell cannot be used: {error}")))?;
                Ok(Bell(Form::Shared(Descriptor::new(fd.into_owned())?)))
            }
            0 => Err(unusable("the peer's bell is no socket, which a peer of another user must give".to_owned())),
            kind => Err(unusable(format!(
                "the peer's bell is of file type {kind:#o}, wanted an eventfd or a seqpacket Unix socket"
            ))),
        }
    }

    /// Wakes who waits for it. Never blocks; a bell that is full rings already.
    pub(crate) fn ring(&self) {
        let (count, bytes) = match self.0 {
            Form::Own(_) => (1u64, 8),
            Form::Shared(_) => (0, 8),
            Form::Fifo(_) | Form::Pair { .. } | Form::Far(_) => (1, 1),
        };
        let bytes = &count.to_ne_bytes()[..bytes];
        loop {
            let rung = match &self.0 {
                Form::Pair { far, .. } | Form::Far(far) => {
                    send(far, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).map(|_| ())
                }
                Form::Own(fd) | Form::Shared(fd) | Form::Fifo(fd) => rustix::io::write(fd, bytes).map(|_| ()),
            };
            if rung != Err(Errno::INTR) {
                return;
            }
        }
    }

    /// Makes it silent until it is rung again. Never waits, whatever the peer did to shared flags. False: nobody can ring it any more.
    pub(crate) fn drain(&self) -> bool {
        match &self.0 {
            Form::Own(fd) => _ = drain_eventfd(fd),
            Form::Shared(_) | Form::Far(_) => {}
            Form::Fifo(fd) => drain_fifo(fd),
            Form::Pair { near, .. } => return drain_socket(near),
        }
        true
    }

    /// What the peer is given.
    pub(crate) fn given(&self) -> BorrowedFd<'_> {
        match &self.0 {
            Form::Pair { far, .. } => far.as_fd(),
            _ => self.as_fd(),
        }
    }

    /// By what an epoll is told of a ring.
    fn events(&self) -> EventFlags {
        match self.0 {
            // One of the two holds at every value of the counter.
            Form::Shared(_) => EventFlags::IN | EventFlags::OUT | EventFlags::ET,
            _ => EventFlags::IN,
        }
    }
}

fn new_eventfd() -> std::io::Result<Descriptor> {
    Descriptor::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

fn drain_eventfd(fd: &Descriptor) -> rustix::io::Result<()> {
    let mut count = [0u8; 8];
    loop {
        let mut slice = [IoSliceMut::new(&mut count)];
        match rustix::io::preadv2(fd, &mut slice, u64::MAX, ReadWriteFlags::NOWAIT) {
            Err(Errno::INTR) => {}
            Ok(_) | Err(Errno::AGAIN) => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

fn drain_fifo(fd: &Descriptor) {
    // Rings without a sleeper to drain them add up to the FIFO's 64 KiB at most. Who rings faster than this drains has
    // it ring on, which costs a turn of whoever waits, and no more.
    let mut rings = [0u8; 1024];
    for _ in 0..64 {
        match rustix::io::read(fd, &mut rings[..]) {
            Err(Errno::INTR) => {}
            // A short read has emptied it. What came since rings anew.
            Ok(count) if count == rings.len() => {}
            _ => return,
        }
    }
}

/// False: the peer has shut it down.
fn drain_socket(near: &Socket) -> bool {
    // As for a FIFO.
    for _ in 0..64 {
        match near.try_receive(&mut [0; 8]) {
            // A packet of no bytes, or the end.
            Ok(Some((0, ..))) if is_shut_down(near) => return false,
            Ok(Some(_)) => {}
            Ok(None) => return true,
            Err(_) => return false,
        }
    }
    true
}

impl AsFd for Bell {
    /// What the owner waits at, or the peer rings.
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.0 {
            Form::Own(fd) | Form::Shared(fd) | Form::Fifo(fd) | Form::Far(fd) => fd.as_fd(),
            Form::Pair { near, .. } => near.as_fd(),
        }
    }
}

/// A bell that only this process rings: it knows whether there is anything to drain.
#[derive(Debug)]
pub(crate) struct Nudge {
    bell: Bell,
    rung: AtomicBool,
}

impl Nudge {
    pub(crate) fn new() -> std::io::Result<Nudge> {
        Ok(Nudge { bell: Bell::own()?, rung: AtomicBool::new(false) })
    }

    /// Wakes who polls it.
    pub(crate) fn ring(&self) {
        // The bell before the flag: a drain that comes between the two finds the bell ringing once more, at worst, and
        // the flag with it then. The other way round it would never be silenced.
        self.bell.ring();
        self.rung.store(true, Ordering::Release);
    }

    /// Makes it silent until it is rung again.
    pub(crate) fn drain(&self) {
        if self.rung.swap(false, Ordering::Acquire) {
            self.bell.drain();
        }
    }
}

impl AsFd for Nudge {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

/// What ended a poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ready {
    /// The deadline.
    TimedOut,
    /// Something else than the bell: the peer went.
    Gone,
    /// The bell.
    Rung,
    /// The bell, and nothing else that is watched.
    RungAlone,
}

/// Polls until one of `bells` rings, a descriptor of `life` tells the peer's end, or the deadline; for ever without one.
pub(crate) fn poll_until(
    bells: &[BorrowedFd<'_>],
    life: [Option<BorrowedFd<'_>>; 2],
    deadline: Option<Instant>,
) -> std::io::Result<Ready> {
    let mut fds = Vec::with_capacity(4);
    fds.extend(bells.iter().map(|fd| PollFd::new(fd, PollFlags::IN)));
    let [socket, process] = &life;
    fds.extend(socket.iter().map(|fd| PollFd::new(fd, PollFlags::RDHUP)));
    fds.extend(process.iter().map(|fd| PollFd::new(fd, PollFlags::IN)));
    loop {
        let timeout = deadline.map(|deadline| {
            let left = deadline.saturating_duration_since(Instant::now());
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
        });
        match poll(&mut fds, timeout.as_ref()) {
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            Ok(0) => return Ok(Ready::TimedOut),
            Ok(_) => {
                // An end first: whoever still has a dead peer's bell cannot hide the death by ringing.
                let gone = fds[bells.len()..].iter().any(|fd| !fd.revents().is_empty());
                return Ok(if gone { Ready::Gone } else { Ready::Rung });
            }
        }
    }
}

/// What a [`Pollable`] may tell besides that a bell rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// The peer of the lane of that number has gone.
    Gone(u32),
    /// Somebody who is not a peer yet has something to say; who, is a number of the caller's.
    Visit(u32),
}

/// Told once for each ring.
const BELL: u64 = 0;
/// Told for as long as it has not been drained.
const RINGING: u64 = 5 << 32;
/// A bell that only one of several peers rings, and that another thread may wait for too. Whoever waits drains it.
const BELL_OF_ONE: u64 = 3 << 32;
/// One that is drained with the others.
const DOORBELL: u64 = 4 << 32;
const NO_EVENT: epoll::Event = epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(BELL) };
const GONE: u64 = 1 << 32;
const VISIT: u64 = 2 << 32;

impl Event {
    fn data(self) -> EventData {
        EventData::new_u64(match self {
            Event::Gone(lane) => GONE | u64::from(lane),
            Event::Visit(visit) => VISIT | u64::from(visit),
        })
    }

    fn of(data: u64) -> Option<Event> {
        match data & !0xffff_ffff {
            GONE => Some(Event::Gone(data as u32)),
            VISIT => Some(Event::Visit(data as u32)),
            _ => None,
        }
    }
}

const _: () = assert!(size_of::<epoll::Event>() == size_of::<libc::epoll_event>());

/// One descriptor that is readable while any of several is: for the caller's own loop.
#[derive(Debug)]
pub(crate) struct Pollable {
    epoll: Descriptor,
    /// Those of peers of other users, by their number.
    doorbells: Mutex<Vec<Weak<Bell>>>,
}

impl Pollable {
    /// Readable once the bell has rung, until [`Pollable::drain`] or a wait, and while the nudge does.
    pub(crate) fn new(bell: &Bell, nudge: &Nudge) -> std::io::Result<Pollable> {
        let epoll = Descriptor::new(epoll::create(epoll::CreateFlags::CLOEXEC)?)?;
        let pollable = Pollable { epoll, doorbells: Mutex::default() };
        let data = if bell.events().contains(EventFlags::ET) { BELL } else { RINGING };
        epoll::add(&pollable.epoll, bell, EventData::new_u64(data), bell.events())?;
        epoll::add(&pollable.epoll, nudge, EventData::new_u64(RINGING), EventFlags::IN)?;
        // An eventfd between processes is reported once at the beginning.
        pollable.poll(&mut [NO_EVENT; 2])?;
        Ok(pollable)
    }

    /// For who waits beside others: readable once the bell has rung, until a wait says so.
    pub(crate) fn of_one_wait(
        bell: &Bell,
        nudge: &Nudge,
        life: [Option<BorrowedFd<'_>>; 2],
    ) -> std::io::Result<Pollable> {
        let pollable = Pollable::new(bell, nudge)?;
        let [socket, process] = life;
        let life = [socket.map(|fd| (fd, EventFlags::RDHUP)), process.map(|fd| (fd, EventFlags::IN))];
        pollable.watch(life, Event::Gone(0))?;
        Ok(pollable)
    }

    /// Also readable once that bell of a peer of another user has rung, until [`Pollable::drain`], for as long as there is one.
    pub(crate) fn add_doorbell(&self, bell: &Arc<Bell>) -> std::io::Result<()> {
        let mut doorbells = locked(&self.doorbells);
        let free = doorbells.iter().position(|bell| bell.strong_count() == 0);
        let number = free.unwrap_or(doorbells.len());
        let data = EventData::new_u64(DOORBELL | number as u64);
        epoll::add(&self.epoll, &**bell, data, bell.events())?;
        match free {
            Some(number) => doorbells[number] = Arc::downgrade(bell),
            None => doorbells.push(Arc::downgrade(bell)),
        }
        Ok(())
    }

    /// Makes the bells silent until they ring again.
    pub(crate) fn drain(&self) -> std::io::Result<()> {
        let mut events = [NO_EVENT; 64];
        // What is left of more makes it readable for a turn, as a ring does that came too late.
        let count = self.poll(&mut events)?;
        for data in events[..count].iter().map(|event| event.data.u64()) {
            if data & !0xffff_ffff == DOORBELL {
                let bell = locked(&self.doorbells).get(data as u32 as usize).and_then(Weak::upgrade);
                if let Some(bell) = bell.filter(|bell| !bell.drain()) {
                    let _ = epoll::delete(&self.epoll, &*bell);
                }
            }
        }
        Ok(())
    }

    /// Also readable while this descriptor is.
    pub(crate) fn add(&self, fd: impl AsFd) -> std::io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(RINGING), EventFlags::IN)?)
    }

    /// Also readable once this bell of one peer has rung, until [`Pollable::events`] or a wait says so.
    pub(crate) fn add_bell(&self, bell: &Bell) -> std::io::Result<()> {
        let data = EventData::new_u64(BELL_OF_ONE);
        Ok(epoll::add(&self.epoll, bell, data, bell.events() | EventFlags::ET)?)
    }

    /// No more because of a former peer, whose descriptors a stray process may have kept open.
    pub(crate) fn forget(&self, life: [Option<BorrowedFd<'_>>; 2]) {
        for fd in life.into_iter().flatten() {
            let _ = epoll::delete(&self.epoll, fd);
        }
    }

    /// Also readable once the peer is gone, as these descriptors tell by these events.
    pub(crate) fn watch(&self, life: [Option<(BorrowedFd<'_>, EventFlags)>; 2], event: Event) -> std::io::Result<()> {
        for (fd, events) in life.into_iter().flatten() {
            epoll::add(&self.epoll, fd, event.data(), events)?;
        }
        Ok(())
    }

    /// As [`Pollable::watch`], by these events of a socket alone.
    pub(crate) fn watch_socket(
        self: &Arc<Pollable>,
        socket: &Socket,
        events: EventFlags,
        event: Event,
    ) -> std::io::Result<()> {
        socket.note_watcher(self);
        self.watch([Some((socket.as_fd(), events)), None], event)
    }

    /// Of a descriptor that is watched: by these events, as this one, from now on.
    pub(crate) fn change(&self, fd: BorrowedFd<'_>, events: EventFlags, event: Event) -> std::io::Result<()> {
        Ok(epoll::modify(&self.epoll, fd, event.data(), events)?)
    }

    /// What there is now, without waiting: some of it, if it is much, and other the next time. Answers whether there is
    /// something of which it may not be readable any more: what is left, or a ring.
    pub(crate) fn events(&self, found: &mut Vec<Event>) -> std::io::Result<bool> {
        let mut events = [NO_EVENT; 64];
        let count = self.poll(&mut events)?;
        found.extend(events[..count].iter().filter_map(|event| Event::of(event.data.u64())));
        Ok(count == events.len() || events[..count].iter().any(|event| [BELL, BELL_OF_ONE].contains(&event.data.u64())))
    }

    fn poll(&self, events: &mut [epoll::Event]) -> std::io::Result<usize> {
        self.wait_for_events(events, 0)
    }

    /// The C library's call: rustix makes epoll_pwait without its last parameter, which valgrind objects to.
    fn wait_for_events(&self, events: &mut [epoll::Event], milliseconds: libc::c_int) -> std::io::Result<usize> {
        let (fd, room) = (self.epoll.as_fd().as_raw_fd(), events.len() as libc::c_int);
        loop {
            // SAFETY: the kernel writes at most so many events, which are as it has them in both libraries.
            let found = unsafe { libc::epoll_wait(fd, events.as_mut_ptr().cast(), room, milliseconds) };
            match found {
                0.. => return Ok(found as usize),
                _ if std::io::Error::last_os_error().raw_os_error() == Some(libc::EINTR) => {}
                _ => return Err(std::io::Error::last_os_error()),
            }
        }
    }

    /// Waits until it is readable, and says why.
    pub(crate) fn wait(&self, deadline: Option<Instant>) -> std::io::Result<Ready> {
        let mut events = [NO_EVENT; 8];
        let found = match deadline {
            None => self.wait_for_events(&mut events, -1)?,
            // To the nanosecond, which epoll is not before Linux 5.11.
            Some(_) if poll_until(&[self.epoll.as_fd()], [None, None], deadline)? == Ready::TimedOut => {
                return Ok(Ready::TimedOut);
            }
            Some(_) => self.poll(&mut events)?,
        };
        // An end first, as in `poll_until`.
        let gone = events[..found].iter().any(|event| matches!(Event::of(event.data.u64()), Some(Event::Gone(_))));
        let is_alone = found < events.len()
            && events[..found]
                .iter()
                .all(|event| [BELL, RINGING, DOORBELL].contains(&(event.data.u64() & !0xffff_ffff)));
        Ok(match gone {
            true => Ready::Gone,
            false if is_alone => Ready::RungAlone,
            false => Ready::Rung,
        })
    }
}

impl AsFd for Pollable {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
