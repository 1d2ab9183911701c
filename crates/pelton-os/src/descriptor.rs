//! A descriptor that a forked child closes at once, and that is closed only in the process that opened it.

use crate::fork::{self, Owner};
use rustix::io::Errno;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// A descriptor of this crate's.
#[derive(Debug)]
pub struct Descriptor {
    fd: ManuallyDrop<OwnedFd>,
    owner: Owner,
    /// Whether it is a user's file, whose close may take long, and whose copy in a child does no harm.
    is_file: bool,
}

impl Descriptor {
    /// Takes over an open descriptor.
    pub fn new(fd: OwnedFd) -> std::io::Result<Descriptor> {
        Descriptor::opened(|| Ok(fd))?
    }

    /// A user's file: its close is no signal to a peer.
    pub fn of_file(fd: OwnedFd) -> std::io::Result<Descriptor> {
        let mut file = Descriptor::new(fd)?;
        file.is_file = true;
        Ok(file)
    }

    /// Opens a descriptor by `opens`; no child that is forked meanwhile keeps a copy. `opens` must not make a
    /// `Descriptor` itself.
    pub fn opened<E>(opens: impl FnOnce() -> Result<OwnedFd, E>) -> std::io::Result<Result<Descriptor, E>> {
        let owner = Owner::current()?;
        Ok(fork::opening(opens).map(|fd| Descriptor { fd: ManuallyDrop::new(fd), owner, is_file: false }))
    }

    /// Closes it, and returns the system's result, which may be the first report of lost data. It is closed in any
    /// case.
    pub fn close(self) -> rustix::io::Result<()> {
        let mut this = ManuallyDrop::new(self);
        if !this.owner.is_current() {
            return Ok(());
        }
        // SAFETY: taken once, here; `this` is not dropped, so nothing takes it again.
        match fork::close_with_result(unsafe { ManuallyDrop::take(&mut this.fd) }) {
            // On Linux it is closed then, and its number may belong to another file.
            Err(Errno::INTR) => Ok(()),
            closed => closed,
        }
    }

    /// The descriptor alone, if this is the process that opened it. From now on a forked child keeps a copy.
    pub(crate) fn into_owned(self) -> Option<OwnedFd> {
        let mut this = ManuallyDrop::new(self);
        this.owner.is_current().then(|| {
            // SAFETY: taken once, here; `this` is not dropped, so nothing takes it again.
            let fd = unsafe { ManuallyDrop::take(&mut this.fd) };
            fork::forget(&fd);
            fd
        })
    }

    /// Whether this is the process that opened it, not a forked child of that.
    pub fn is_own(&self) -> bool {
        self.owner.is_current()
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // In a child the number may belong to another file by now.
        if self.owner.is_current() {
            // SAFETY: taken once, here.
            let fd = unsafe { ManuallyDrop::take(&mut self.fd) };
            if self.is_file {
                let _ = fork::close_with_result(fd);
            } else {
                fork::close(fd);
            }
        }
    }
}
