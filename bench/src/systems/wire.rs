//! A descriptor and how to wait for it: the common part of pipes and sockets.

use std::{
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use anyhow::{Context, Result};
use rustix::{
    buffer::{Buffer, spare_capacity},
    event::{Timespec, epoll},
    fs::{OFlags, fcntl_getfl, fcntl_setfl},
    io::Errno,
};

use crate::parameters::Wait;

/// An epoll instance that watches descriptors, level-triggered, as a caller's own event loop would.
pub struct Watch(OwnedFd);

impl Watch {
    /// Watches these for `flags`; their numbers are from 0.
    pub fn new(fds: impl IntoIterator<Item = impl AsFd>, flags: epoll::EventFlags) -> Result<Watch> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).context("making an epoll instance")?;
        for (number, fd) in fds.into_iter().enumerate() {
            epoll::add(&epoll, fd, epoll::EventData::new_u64(number as u64), flags)
                .context("adding to the epoll instance")?;
        }
        Ok(Watch(epoll))
    }

    /// Watches one for reading, if the side waits in epoll.
    pub fn of(wait: Wait, fd: impl AsFd) -> Result<Option<Watch>> {
        (wait == Wait::Epoll).then(|| Watch::new([fd], epoll::EventFlags::IN)).transpose()
    }

    /// Watches the one of that number for other `flags`.
    pub fn change(&self, number: usize, fd: impl AsFd, flags: epoll::EventFlags) -> Result<()> {
        epoll::modify(&self.0, fd, epoll::EventData::new_u64(number as u64), flags)
            .context("changing what is waited for")
    }

    /// Sleeps until a descriptor is ready.
    pub fn sleep(&self) -> Result<()> {
        self.wait(&mut [MaybeUninit::<epoll::Event>::uninit(); 1], None)
    }

    /// Appends those that are ready to `ready`, as far as its capacity allows; waits for one, unless `spins`.
    pub fn poll(&self, ready: &mut Vec<epoll::Event>, spins: bool) -> Result<()> {
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        self.wait(spare_capacity(ready), spins.then_some(&at_once))
    }

    fn wait(&self, ready: impl Buffer<epoll::Event>, timeout: Option<&Timespec>) -> Result<()> {
        match epoll::wait(&self.0, ready, timeout) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error).context("waiting in epoll"),
        }
    }
}

impl AsFd for Wire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// One direction of a pipe or socket.
pub struct Wire {
    fd: OwnedFd,
    watch: Option<Watch>,
}

impl Wire {
    /// For writing or sending.
    pub fn outgoing(fd: OwnedFd, wait: Wait) -> Result<Wire> {
        Wire::new(fd, wait, epoll::EventFlags::OUT)
    }

    /// For reading or receiving.
    pub fn incoming(fd: OwnedFd, wait: Wait) -> Result<Wire> {
        Wire::new(fd, wait, epoll::EventFlags::IN)
    }

    fn new(fd: OwnedFd, wait: Wait, flags: epoll::EventFlags) -> Result<Wire> {
        let own = fcntl_getfl(&fd).context("reading the descriptor's flags")?;
        fcntl_setfl(&fd, if wait == Wait::Block { own - OFlags::NONBLOCK } else { own | OFlags::NONBLOCK })
            .context("setting the descriptor's flags")?;
        let watch = (wait == Wait::Epoll).then(|| Watch::new([&fd], flags)).transpose()?;
        Ok(Wire { fd, watch })
    }

    /// Repeats the call until it is not interrupted; `None` where it would have to wait, if the descriptor does not.
    #[inline]
    pub fn try_once<T>(&self, mut call: impl FnMut(BorrowedFd<'_>) -> rustix::io::Result<T>) -> Result<Option<T>> {
        loop {
            match call(self.fd.as_fd()) {
                Ok(value) => return Ok(Some(value)),
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// As [`Wire::try_once`], but waits as the job says.
    #[inline]
    pub fn retry<T>(&self, mut call: impl FnMut(BorrowedFd<'_>) -> rustix::io::Result<T>) -> Result<T> {
        loop {
            match (self.try_once(&mut call)?, &self.watch) {
                (Some(value), _) => return Ok(value),
                (None, Some(watch)) => watch.sleep()?,
                (None, None) => std::hint::spin_loop(),
            }
        }
    }
}
