//! Ringing and sleeping: an eventfd, or a FIFO in the file system, that one side writes and the other polls.

use super::socket::Socket;
use super::{Descriptor, Foreign};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::{Errno, ReadWriteFlags};
use std::io::IoSliceMut;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Rung by one side, polled and drained by the other.
#[derive(Debug)]
pub(crate) struct Bell {
    fd: Descriptor,
    form: Form,
}

/// What a bell is made of.
#[derive(Clone, Copy, Debug)]
enum Form {
    /// Comes over a socket, and goes with the process.
    Eventfd,
    /// Has a name in a directory, so that a successor finds it.
    Fifo,
}

impl Bell {
    pub(crate) fn new() -> std::io::Result<Bell> {
        let fd = Descriptor::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)?;
        let bell = Bell { fd, form: Form::Eventfd };
        // Where that is refused it would ring for ever: said now, as nobody could say it then.
        bell.drain_eventfd().map_err(|errno| {
            let error = std::io::Error::from(errno);
            std::io::Error::new(error.kind(), format!("reading an eventfd by preadv2: {error}"))
        })?;
        Ok(bell)
    }

    /// A FIFO, opened by this process for reading and writing, without waiting. Both, so that it has a reader whatever
    /// the other side does: ringing then never raises SIGPIPE, and there is never a hang-up on it.
    pub(crate) fn fifo(fd: OwnedFd) -> std::io::Result<Bell> {
        Ok(Bell { fd: Descriptor::new(fd)?, form: Form::Fifo })
    }

    /// The peer's, as it came over the socket.
    pub(crate) fn from_peer(fd: Foreign) -> std::io::Result<Bell> {
        use rustix::fs::{AtFlags, StatxFlags, statx};
        // An eventfd is of no file type. Anything else could answer a ring with SIGPIPE, or be a file. As far as is known without asking a
        // file's server, which may not answer.
        let asked = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let kind = u32::from(statx(&fd, c"", asked, StatxFlags::TYPE)?.stx_mode) & libc::S_IFMT;
        if kind != 0 {
            let text = format!("the peer's bell is of file type {kind:#o}, wanted an eventfd");
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, text));
        }
        // Non-blocking, whatever the peer made of it: this side must not wait for a counter at its maximum.
        rustix::fs::fcntl_setfl(&fd, rustix::fs::OFlags::NONBLOCK).map_err(|error| {
            std::io::Error::new(std::io::ErrorKind::InvalidData, format!("the peer's bell cannot be used: {error}"))
        })?;
        Ok(Bell { fd: Descriptor::new(fd.into_owned())?, form: Form::Eventfd })
    }

    /// Wakes who polls it. A counter at its maximum, or a full FIFO, is a bell that rings already.
    pub(crate) fn ring(&self) {
        let count = 1u64.to_ne_bytes();
        let bytes = match self.form {
            Form::Eventfd => &count[..],
            Form::Fifo => &count[..1],
        };
        loop {
            match rustix::io::write(self.fd.as_fd(), bytes) {
                Err(Errno::INTR) => {}
                _ => return,
            }
        }
    }

    /// Makes it silent until it is rung again. Never waits, whatever the peer did to the shared flags.
    pub(crate) fn drain(&self) {
        match self.form {
            Form::Eventfd => _ = self.drain_eventfd(),
            Form::Fifo => self.drain_fifo(),
        }
    }

    fn drain_eventfd(&self) -> rustix::io::Result<()> {
        let mut count = [0u8; 8];
        loop {
            let mut slice = [IoSliceMut::new(&mut count)];
            match rustix::io::preadv2(self.fd.as_fd(), &mut slice, u64::MAX, ReadWriteFlags::NOWAIT) {
                Err(Errno::INTR) => {}
                Ok(_) | Err(Errno::AGAIN) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    fn drain_fifo(&self) {
        // Rings without a sleeper to drain them add up to the FIFO's 64 KiB at most. Who rings faster than this drains has
        // it ring on, which costs a turn of whoever waits, and no more.
        let mut rings = [0u8; 1024];
        for _ in 0..64 {
            match rustix::io::read(self.fd.as_fd(), &mut rings[..]) {
                Err(Errno::INTR) => {}
                // A short read has emptied it. What came since rings anew.
                Ok(count) if count == rings.len() => {}
                _ => return,
            }
        }
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
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
        Ok(Nudge { bell: Bell::new()?, rung: AtomicBool::new(false) })
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

const BELL: u64 = 0;
/// A bell that is silenced by hearing it.
const BELL_ONCE: u64 = 3 << 32;
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

/// One descriptor that is readable while any of several is: for the caller's own loop.
#[derive(Debug)]
pub(crate) struct Pollable(Descriptor);

impl Pollable {
    /// Readable while the bell or the nudge rings.
    pub(crate) fn new(bell: &Bell, nudge: &Nudge) -> std::io::Result<Pollable> {
        let pollable = Pollable(Descriptor::new(epoll::create(epoll::CreateFlags::CLOEXEC)?)?);
        epoll::add(&pollable.0, bell, EventData::new_u64(BELL), EventFlags::IN)?;
        epoll::add(&pollable.0, nudge, EventData::new_u64(BELL), EventFlags::IN)?;
        Ok(pollable)
    }

    /// Also readable while this descriptor is.
    pub(crate) fn add(&self, fd: impl AsFd) -> std::io::Result<()> {
        Ok(epoll::add(&self.0, fd, EventData::new_u64(BELL), EventFlags::IN)?)
    }

    /// Also readable once this bell has rung, until [`Pollable::events`] or [`Pollable::wait`] says so: its counter is left
    /// alone, as it need not be known then which of many is to be silenced.
    pub(crate) fn add_bell(&self, bell: &Bell) -> std::io::Result<()> {
        Ok(epoll::add(&self.0, bell, EventData::new_u64(BELL_ONCE), EventFlags::IN | EventFlags::ET)?)
    }

    /// No more because of a former peer, whose descriptors a stray process may have kept open.
    pub(crate) fn forget(&self, life: [Option<BorrowedFd<'_>>; 2]) {
        for fd in life.into_iter().flatten() {
            let _ = epoll::delete(&self.0, fd);
        }
    }

    /// Also readable once the peer is gone, as these descriptors tell by these events.
    pub(crate) fn watch(&self, life: [Option<(BorrowedFd<'_>, EventFlags)>; 2], event: Event) -> std::io::Result<()> {
        for (fd, events) in life.into_iter().flatten() {
            epoll::add(&self.0, fd, event.data(), events)?;
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
        Ok(epoll::modify(&self.0, fd, event.data(), events)?)
    }

    /// What there is now, without waiting: some of it, if it is much, and other the next time. Answers whether there is
    /// something of which it may not be readable any more: what is left, or a bell that was silenced.
    pub(crate) fn events(&self, found: &mut Vec<Event>) -> std::io::Result<bool> {
        let mut events = [NO_EVENT; 64];
        let count = self.poll(&mut events)?;
        found.extend(events[..count].iter().filter_map(|event| Event::of(event.data.u64())));
        Ok(count == events.len() || events[..count].iter().any(|event| event.data.u64() == BELL_ONCE))
    }

    fn poll(&self, events: &mut [epoll::Event]) -> std::io::Result<usize> {
        Ok(rustix::io::retry_on_intr(|| epoll::wait(&self.0, &mut *events, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })))?)
    }

    /// Waits until it is readable, and says why.
    pub(crate) fn wait(&self, deadline: Option<Instant>) -> std::io::Result<Ready> {
        let mut events = [NO_EVENT; 8];
        let found = match deadline {
            None => rustix::io::retry_on_intr(|| epoll::wait(&self.0, &mut events[..], None))?,
            // To the nanosecond, which epoll is not before Linux 5.11.
            Some(_) if poll_until(&[self.0.as_fd()], [None, None], deadline)? == Ready::TimedOut => {
                return Ok(Ready::TimedOut);
            }
            Some(_) => self.poll(&mut events)?,
        };
        // An end first, as in `poll_until`.
        let gone = events[..found].iter().any(|event| matches!(Event::of(event.data.u64()), Some(Event::Gone(_))));
        let is_alone = found < events.len() && events[..found].iter().all(|event| event.data.u64() == BELL);
        Ok(match gone {
            true => Ready::Gone,
            false if is_alone => Ready::RungAlone,
            false => Ready::Rung,
        })
    }
}

impl AsFd for Pollable {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
