//! Waiting for doorbells and for the ends of peers.

use crate::descriptor::Descriptor;
use crate::doorbell::{Doorbell, LocalWake};
use crate::mutex::locked;
use crate::socket::Socket;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

/// What ended a poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ready {
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
pub fn poll_until(
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
pub enum Event {
    /// The peer of the lane of that number has gone.
    Gone(u32),
    /// Somebody who is not a peer yet has something to say; who, is a number of the caller's.
    Connecting(u32),
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
const CONNECTING: u64 = 2 << 32;

impl Event {
    fn data(self) -> EventData {
        EventData::new_u64(match self {
            Event::Gone(lane) => GONE | u64::from(lane),
            Event::Connecting(number) => CONNECTING | u64::from(number),
        })
    }

    fn of(data: u64) -> Option<Event> {
        match data & !0xffff_ffff {
            GONE => Some(Event::Gone(data as u32)),
            CONNECTING => Some(Event::Connecting(data as u32)),
            _ => None,
        }
    }
}

const _: () = assert!(size_of::<epoll::Event>() == size_of::<libc::epoll_event>());

/// One descriptor that is readable while any of several is: for the caller's own loop.
#[derive(Debug)]
pub struct Pollable {
    epoll: Arc<Descriptor>,
    /// Those of peers of other users, by their number.
    doorbells: Mutex<Vec<Weak<Doorbell>>>,
}

impl Pollable {
    /// Readable once the bell has rung, until [`Pollable::drain`] or a wait, and while the nudge does.
    pub fn new(bell: &Doorbell, nudge: &LocalWake) -> std::io::Result<Pollable> {
        let epoll = Arc::new(Descriptor::new(epoll::create(epoll::CreateFlags::CLOEXEC)?)?);
        let pollable = Pollable { epoll, doorbells: Mutex::default() };
        let data = if bell.events().contains(EventFlags::ET) { BELL } else { RINGING };
        epoll::add(&*pollable.epoll, bell, EventData::new_u64(data), bell.events())?;
        epoll::add(&*pollable.epoll, nudge, EventData::new_u64(RINGING), EventFlags::IN)?;
        // An eventfd between processes is reported once at the beginning.
        pollable.poll(&mut [NO_EVENT; 2])?;
        Ok(pollable)
    }

    /// For who waits beside others: readable once the bell has rung, until a wait says so.
    pub fn of_one_wait(
        bell: &Doorbell,
        nudge: &LocalWake,
        life: [Option<BorrowedFd<'_>>; 2],
    ) -> std::io::Result<Pollable> {
        let pollable = Pollable::new(bell, nudge)?;
        let [socket, process] = life;
        let life = [socket.map(|fd| (fd, EventFlags::RDHUP)), process.map(|fd| (fd, EventFlags::IN))];
        pollable.watch(life, Event::Gone(0))?;
        Ok(pollable)
    }

    /// Also readable once that bell of a peer of another user has rung, until [`Pollable::drain`], for as long as there is one.
    pub fn add_doorbell(&self, bell: &Arc<Doorbell>) -> std::io::Result<()> {
        bell.set_epoll(&self.epoll);
        let mut doorbells = locked(&self.doorbells);
        let free = doorbells.iter().position(|bell| bell.strong_count() == 0);
        let number = free.unwrap_or(doorbells.len());
        let data = EventData::new_u64(DOORBELL | number as u64);
        epoll::add(&*self.epoll, &**bell, data, bell.events())?;
        match free {
            Some(number) => doorbells[number] = Arc::downgrade(bell),
            None => doorbells.push(Arc::downgrade(bell)),
        }
        Ok(())
    }

    /// Makes the bells silent until they ring again.
    pub fn drain(&self) -> std::io::Result<()> {
        let mut events = [NO_EVENT; 64];
        // What is left of more makes it readable for a turn, as a ring does that came too late.
        let count = self.poll(&mut events)?;
        for data in events[..count].iter().map(|event| event.data.u64()) {
            if data & !0xffff_ffff == DOORBELL {
                let bell = locked(&self.doorbells).get(data as u32 as usize).and_then(Weak::upgrade);
                if let Some(bell) = bell.filter(|bell| !bell.drain()) {
                    let _ = epoll::delete(&*self.epoll, &*bell);
                }
            }
        }
        Ok(())
    }

    /// Also readable while this descriptor is.
    pub fn add(&self, fd: impl AsFd) -> std::io::Result<()> {
        Ok(epoll::add(&*self.epoll, fd, EventData::new_u64(RINGING), EventFlags::IN)?)
    }

    /// Also readable once this bell of one peer has rung, until [`Pollable::events`] or a wait says so.
    pub fn add_bell(&self, bell: &Doorbell) -> std::io::Result<()> {
        let data = EventData::new_u64(BELL_OF_ONE);
        Ok(epoll::add(&*self.epoll, bell, data, bell.events() | EventFlags::ET)?)
    }

    /// No more because of a former peer, whose descriptors a stray process may have kept open.
    pub fn forget(&self, life: [Option<BorrowedFd<'_>>; 2]) {
        for fd in life.into_iter().flatten() {
            let _ = epoll::delete(&*self.epoll, fd);
        }
    }

    /// Also readable once the peer is gone, as these descriptors tell by these events.
    pub fn watch(&self, life: [Option<(BorrowedFd<'_>, EventFlags)>; 2], event: Event) -> std::io::Result<()> {
        for (fd, events) in life.into_iter().flatten() {
            epoll::add(&*self.epoll, fd, event.data(), events)?;
        }
        Ok(())
    }

    /// As [`Pollable::watch`], by these events of a socket alone.
    pub fn watch_socket(&self, socket: &Socket, events: EventFlags, event: Event) -> std::io::Result<()> {
        socket.set_epoll(&self.epoll);
        self.watch([Some((socket.as_fd(), events)), None], event)
    }

    /// Of a descriptor that is watched: by these events, as this one, from now on.
    pub fn change(&self, fd: BorrowedFd<'_>, events: EventFlags, event: Event) -> std::io::Result<()> {
        Ok(epoll::modify(&*self.epoll, fd, event.data(), events)?)
    }

    /// What there is now, without waiting: some of it, if it is much, and other the next time. Answers whether there is
    /// something of which it may not be readable any more: what is left, or a ring.
    pub fn events(&self, found: &mut Vec<Event>) -> std::io::Result<bool> {
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
    pub fn wait(&self, deadline: Option<Instant>) -> std::io::Result<Ready> {
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
