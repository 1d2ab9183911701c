//! A descriptor that a forked child closes at once, and that closes itself in the process that opened it.

use super::fork::{self, Owner};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// A descriptor of this crate's.
#[derive(Debug)]
pub(crate) struct Descriptor {
    fd: ManuallyDrop<OwnedFd>,
    owner: Owner,
}

impl Descriptor {
    pub(crate) fn new(fd: OwnedFd) -> std::io::Result<Descriptor> {
        let owner = Owner::current()?;
        fork::register(fd.as_raw_fd());
        Ok(Descriptor { fd: ManuallyDrop::new(fd), owner })
    }

    /// Whether this is the process that opened it, not a forked child of that.
    pub(crate) fn is_own(&self) -> bool {
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
        // In a child the number may be somebody else's by now.
        if self.owner.is_current() {
            fork::unregister(self.fd.as_raw_fd());
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.fd) };
        }
    }
}
