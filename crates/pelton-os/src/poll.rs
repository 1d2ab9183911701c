//! Waiting for doorbells and for the ends of peers.

use crate::descriptor::Descriptor;
use crate::doorbell::{Doorbell, LocalWake};
use crate::mutex::locked;
use crate::socket::{Socket, poll_by};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

/// Why a poll ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ready {
    /// The deadline.
    TimedOut,
    /// The peer's end.
    Gone,
    /// A doorbell.
    Rung,
    /// A doorbell, and nothing else: all that rang is silent again.
    RungAlone,
}

/// Polls until one of `doorbells` rings, a descriptor of `liveness` reports the peer's end, or the deadline; without a
/// deadline, for ever.
pub fn poll_until(
    doorbells: &[BorrowedFd<'_>],
    liveness: [Option<BorrowedFd<'_>>; 2],
    deadline: Option<Instant>,
) -> std::io::Result<Ready> {
    let mut fds = Vec::with_capacity(4);
    fds.extend(doorbells.iter().map(|fd| PollFd::new(fd, PollFlags::IN)));
    let [socket, process] = &liveness;
    fds.extend(socket.iter().map(|fd| PollFd::new(fd, PollFlags::RDHUP)));
    fds.extend(process.iter().map(|fd| PollFd::new(fd, PollFlags::IN)));
    if !poll_by(&mut fds, deadline)? {
        return Ok(Ready::TimedOut);
    }
    // The end first: a process that still has a dead peer's doorbell cannot hide the death by ringing.
    let gone = fds[doorbells.len()..].iter().any(|fd| !fd.revents().is_empty());
    Ok(if gone { Ready::Gone } else { Ready::Rung })
}

/// What a [`Pollable`] reports besides rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The peer of the lane of that number is gone.
    Gone(u32),
    /// A listener, a timer or a handshake is ready: its number, which the caller chose.
    Connecting(u32),
}

/// Reported once for each ring.
const RING: u64 = 0;
/// Reported until it is drained.
const RINGING: u64 = 5 << 32;
/// A doorbell that only one of several peers rings, and for which another thread may wait too. Each of the two drains
/// it.
const RING_OF_ONE: u64 = 3 << 32;
/// One that is drained with the others.
const RING_OF_PEER: u64 = 4 << 32;
const NO_EVENT: epoll::Event = epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(RING) };
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

/// One descriptor that is readable while any of several is: for the caller's event loop.
#[derive(Debug)]
pub struct Pollable {
    epoll: Arc<Descriptor>,
    /// Those of peers of other users, by their number.
    doorbells: Mutex<Vec<Weak<Doorbell>>>,
}

impl Pollable {
    /// Readable once the doorbell has rung, until [`Pollable::drain`] or a wait, and while the local wake rings.
    pub fn new(doorbell: &Doorbell, local_wake: &LocalWake) -> std::io::Result<Pollable> {
        let epoll = Arc::new(Descriptor::new(epoll::create(epoll::CreateFlags::CLOEXEC)?)?);
        let pollable = Pollable { epoll, doorbells: Mutex::default() };
        let data = if doorbell.events().contains(EventFlags::ET) { RING } else { RINGING };
        epoll::add(&*pollable.epoll, doorbell, EventData::new_u64(data), doorbell.events())?;
        epoll::add(&*pollable.epoll, local_wake, EventData::new_u64(RINGING), EventFlags::IN)?;
        // The epoll reports an eventfd between processes once at the beginning.
        pollable.epoll_wait(&mut [NO_EVENT; 2], 0)?;
        Ok(pollable)
    }

    /// For a thread that waits beside others: readable once the doorbell has rung, until a wait reports it.
    pub fn of_one_wait(
        doorbell: &Doorbell,
        local_wake: &LocalWake,
        liveness: [Option<BorrowedFd<'_>>; 2],
    ) -> std::io::Result<Pollable> {
        let pollable = Pollable::new(doorbell, local_wake)?;
        let [socket, process] = liveness;
        let liveness = [socket.map(|fd| (fd, EventFlags::RDHUP)), process.map(|fd| (fd, EventFlags::IN))];
        pollable.watch(liveness, Event::Gone(0))?;
        Ok(pollable)
    }

    /// Also readable once that doorbell of a peer of another user has rung, until [`Pollable::drain`], as long as the
    /// doorbell exists.
    pub fn add_doorbell(&self, doorbell: &Arc<Doorbell>) -> std::io::Result<()> {
        doorbell.add_epoll(&self.epoll);
        let mut doorbells = locked(&self.doorbells);
        let free = doorbells.iter().position(|doorbell| doorbell.strong_count() == 0);
        let number = free.unwrap_or(doorbells.len());
        let data = EventData::new_u64(RING_OF_PEER | number as u64);
        epoll::add(&*self.epoll, &**doorbell, data, doorbell.events())?;
        match free {
            Some(number) => doorbells[number] = Arc::downgrade(doorbell),
            None => doorbells.push(Arc::downgrade(doorbell)),
        }
        Ok(())
    }

    /// Silences the doorbells until they ring again. Returns whether a peer is gone.
    pub fn drain(&self) -> std::io::Result<bool> {
        let mut events = [NO_EVENT; 64];
        // If there are more, it stays readable for one iteration, like after a ring that came too late.
        let count = self.epoll_wait(&mut events, 0)?;
        self.drain_peers(&events[..count]);
        Ok(has_gone(&events[..count]))
    }

    fn drain_peers(&self, events: &[epoll::Event]) {
        for data in events.iter().map(|event| event.data.u64()) {
            if data & !0xffff_ffff == RING_OF_PEER {
                let doorbell = locked(&self.doorbells).get(data as u32 as usize).and_then(Weak::upgrade);
                if let Some(doorbell) = doorbell.filter(|doorbell| !doorbell.drain()) {
                    let _ = epoll::delete(&*self.epoll, &*doorbell);
                }
            }
        }
    }

    /// Also readable while this descriptor is.
    pub fn add(&self, fd: impl AsFd) -> std::io::Result<()> {
        Ok(epoll::add(&*self.epoll, fd, EventData::new_u64(RINGING), EventFlags::IN)?)
    }

    /// Also readable once this doorbell of one peer has rung, until [`Pollable::events`] or a wait reports it.
    pub fn add_shared_doorbell(&self, doorbell: &Doorbell) -> std::io::Result<()> {
        let data = EventData::new_u64(RING_OF_ONE);
        Ok(epoll::add(&*self.epoll, doorbell, data, doorbell.events() | EventFlags::ET)?)
    }

    /// Stops polling the descriptors of a former peer, which another process may have kept open.
    pub fn forget(&self, liveness: [Option<BorrowedFd<'_>>; 2]) {
        for fd in liveness.into_iter().flatten() {
            let _ = epoll::delete(&*self.epoll, fd);
        }
    }

    /// Also readable once the peer is gone, as these descriptors report by these events.
    pub fn watch(&self, liveness: [Option<(BorrowedFd<'_>, EventFlags)>; 2], event: Event) -> std::io::Result<()> {
        for (fd, events) in liveness.into_iter().flatten() {
            epoll::add(&*self.epoll, fd, event.data(), events)?;
        }
        Ok(())
    }

    /// As [`Pollable::watch`], by these events of one socket.
    pub fn watch_socket(&self, socket: &Socket, events: EventFlags, event: Event) -> std::io::Result<()> {
        socket.add_epoll(&self.epoll);
        self.watch([Some((socket.as_fd(), events)), None], event)
    }

    /// Changes the events of a descriptor that is polled, and what they are reported as.
    pub fn change(&self, fd: BorrowedFd<'_>, events: EventFlags, event: Event) -> std::io::Result<()> {
        Ok(epoll::modify(&*self.epoll, fd, event.data(), events)?)
    }

    /// The present events, without waiting: at most 64 of them, others in the next call. Returns whether there may be
    /// more for which it is not readable any more: further events, or a ring.
    pub fn events(&self, found: &mut Vec<Event>) -> std::io::Result<bool> {
        let mut events = [NO_EVENT; 64];
        let count = self.epoll_wait(&mut events, 0)?;
        found.extend(events[..count].iter().filter_map(|event| Event::of(event.data.u64())));
        Ok(count == events.len() || events[..count].iter().any(|event| [RING, RING_OF_ONE].contains(&event.data.u64())))
    }

    /// Waits until it is readable, and returns why. Silences the doorbells that it reports, as [`Pollable::drain`]
    /// does.
    pub fn wait(&self, deadline: Option<Instant>) -> std::io::Result<Ready> {
        let mut events = [NO_EVENT; 8];
        let found = match deadline {
            None => self.epoll_wait(&mut events, -1)?,
            // To the nanosecond, which epoll supports only since Linux 5.11.
            Some(_) if poll_until(&[self.epoll.as_fd()], [None, None], deadline)? == Ready::TimedOut => {
                return Ok(Ready::TimedOut);
            }
            Some(_) => self.epoll_wait(&mut events, 0)?,
        };
        self.drain_peers(&events[..found]);
        // The end first, as in `poll_until`.
        let gone = has_gone(&events[..found]);
        let is_alone = found < events.len()
            && events[..found]
                .iter()
                .all(|event| [RING, RINGING, RING_OF_PEER].contains(&(event.data.u64() & !0xffff_ffff)));
        Ok(match gone {
            true => Ready::Gone,
            false if is_alone => Ready::RungAlone,
            false => Ready::Rung,
        })
    }

    /// A call of the C library: rustix passes epoll_pwait without its last parameter, to which valgrind objects.
    fn epoll_wait(&self, events: &mut [epoll::Event], milliseconds: libc::c_int) -> std::io::Result<usize> {
        let (fd, room) = (self.epoll.as_fd().as_raw_fd(), events.len() as libc::c_int);
        loop {
            // SAFETY: the kernel writes at most this number of events, which have the same layout in both libraries.
            let found = unsafe { libc::epoll_wait(fd, events.as_mut_ptr().cast(), room, milliseconds) };
            match found {
                0.. => return Ok(found as usize),
                _ if std::io::Error::last_os_error().raw_os_error() == Some(libc::EINTR) => {}
                _ => return Err(std::io::Error::last_os_error()),
            }
        }
    }
}

fn has_gone(events: &[epoll::Event]) -> bool {
    events.iter().any(|event| matches!(Event::of(event.data.u64()), Some(Event::Gone(_))))
}

impl AsFd for Pollable {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
