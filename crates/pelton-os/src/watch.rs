//! One descriptor for an operation that the caller's event loop continues, whatever the operation waits for.

use crate::descriptor::Descriptor;
use crate::socket::Socket;
use crate::timer::Timer;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Readable while a descriptor that was added is, or once its timer has expired. The operation checks all of them each
/// time it continues, so nothing reads the events.
#[derive(Debug)]
pub struct Watch {
    epoll: Arc<Descriptor>,
    timer: Timer,
}

impl Watch {
    /// Readable at once, so that the event loop begins the operation.
    pub fn new() -> std::io::Result<Watch> {
        let epoll = Descriptor::opened(|| epoll::create(epoll::CreateFlags::CLOEXEC))??;
        let watch = Watch { epoll: Arc::new(epoll), timer: Timer::new()? };
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
            added => Ok(added?),
        }
    }

    /// As [`Watch::add`]. The socket leaves the epoll before its close begins, which may take long.
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
