//! One descriptor for an operation that the caller's event loop continues, whatever the operation waits for.

use crate::descriptor::Descriptor;
use crate::mutex::locked;
use crate::socket::Socket;
use crate::timer::Timer;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Readable while a descriptor that was added is, or once its timer has expired. The operation checks all of them each
/// time it continues, so nothing reads the events.
#[derive(Debug)]
pub struct Watch {
    epoll: Arc<Descriptor>,
    timer: Timer,
    /// The numbers of the descriptors that were added.
    added: Mutex<BTreeSet<RawFd>>,
}

impl Watch {
    /// Readable at once, so that the event loop begins the operation.
    pub fn new() -> std::io::Result<Watch> {
        let epoll = Descriptor::opened(|| epoll::create(epoll::CreateFlags::CLOEXEC))??;
        let watch = Watch { epoll: Arc::new(epoll), timer: Timer::new()?, added: Mutex::default() };
        watch.add(watch.timer.as_fd())?;
        watch.wake_at(Some(Instant::now()))?;
        Ok(watch)
    }

    /// Sets the timer anew; `None`: it does not expire.
    pub fn wake_at(&self, at: Option<Instant>) -> std::io::Result<()> {
        // A time of zero would stop the timer.
        let left = |at: Instant| at.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1));
        self.timer.set(at.map_or(Duration::ZERO, left))
    }

    /// Also readable while this descriptor is, until it is closed. A descriptor may be added again.
    pub fn add(&self, fd: BorrowedFd<'_>) -> std::io::Result<()> {
        match epoll::add(&*self.epoll, fd, EventData::new_u64(0), EventFlags::IN) {
            Err(Errno::EXIST) => Ok(()),
            added => {
                added?;
                locked(&self.added).insert(fd.as_raw_fd());
                Ok(())
            }
        }
    }

    /// Undoes [`Watch::add`].
    pub fn remove(&self, fd: BorrowedFd<'_>) {
        locked(&self.added).remove(&fd.as_raw_fd());
        // It may not have been added.
        let _ = epoll::delete(&*self.epoll, fd);
    }

    /// The operation has ended: not readable any more.
    pub fn end(&self) {
        for fd in std::mem::take(&mut *locked(&self.added)) {
            // SAFETY: changes only this epoll. A number that was closed since, or belongs to another file now, is not
            // in the epoll, and the system call fails.
            unsafe { libc::epoll_ctl(self.epoll.as_fd().as_raw_fd(), libc::EPOLL_CTL_DEL, fd, std::ptr::null_mut()) };
        }
    }

    /// As [`Watch::add`]. The socket leaves the epoll before its close, which may block.
    pub fn add_socket(&self, socket: &Socket) -> std::io::Result<()> {
        socket.add_epoll(&self.epoll);
        self.add(socket.as_fd())
    }
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::socket::first_readable;

    fn is_readable(watch: &Watch) -> bool {
        first_readable(&[watch.as_fd()], Some(Instant::now())).unwrap().is_some()
    }

    #[test]
    fn a_closed_socket_is_reported_no_more_though_another_process_may_have_it() {
        let watch = Watch::new().unwrap();
        assert!(is_readable(&watch), "the operation has not begun");
        watch.wake_at(None).unwrap();
        assert!(!is_readable(&watch));
        let (socket, other_end) = Socket::pair(crate::own_uid()).unwrap();
        watch.add_socket(&socket).unwrap();
        assert!(!is_readable(&watch));
        // As an inherited descriptor does, this one keeps the socket open.
        let _copy = socket.as_fd().try_clone_to_owned().unwrap();
        drop(other_end);
        assert!(is_readable(&watch));
        drop(socket);
        assert!(!is_readable(&watch));
    }

    #[test]
    fn after_its_end_nothing_makes_it_readable() {
        let watch = Watch::new().unwrap();
        let (socket, other_end) = Socket::pair(crate::own_uid()).unwrap();
        watch.add_socket(&socket).unwrap();
        watch.end();
        assert!(!is_readable(&watch), "the timer has expired");
        drop(other_end);
        assert!(!is_readable(&watch));
    }

    #[test]
    fn the_timer_can_be_set_to_a_time_that_has_passed_and_set_anew() {
        let watch = Watch::new().unwrap();
        for _ in 0..2 {
            watch.wake_at(Some(Instant::now() + Duration::from_secs(3600))).unwrap();
            assert!(!is_readable(&watch));
            watch.wake_at(Some(Instant::now())).unwrap();
            first_readable(&[watch.as_fd()], None).unwrap();
        }
    }
}
