//! A descriptor that a forked child closes at once, and that closes itself in the process that opened it.

use crate::fork::{self, Owner};
use rustix::io::Errno;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// A descriptor of this crate's.
#[derive(Debug)]
pub struct Descriptor {
    fd: ManuallyDrop<OwnedFd>,
    owner: Owner,
    /// Whether it is a file of somebody's, which may take long to close, and whose copy in a child does no harm.
    is_file: bool,
}

impl Descriptor {
    /// Takes over an open descriptor.
    pub fn new(fd: OwnedFd) -> std::io::Result<Descriptor> {
        Descriptor::opened(|| Ok(fd))?
    }

    /// A file of somebody's, of which nobody is told by its being closed.
    pub fn of_file(fd: OwnedFd) -> std::io::Result<Descriptor> {
        let mut file = Descriptor::new(fd)?;
        file.is_file = true;
        Ok(file)
    }

    /// What `opens` opens, of which no child forked meanwhile keeps a copy. It must not make a `Descriptor` itself.
    pub fn opened<E>(opens: impl FnOnce() -> Result<OwnedFd, E>) -> std::io::Result<Result<Descriptor, E>> {
        let owner = Owner::current()?;
        Ok(fork::opening(opens).map(|fd| Descriptor { fd: ManuallyDrop::new(fd), owner, is_file: false }))
    }

    /// Closes it, and says what the system does: to whom its bytes matter, that may be the first to tell that they are lost. It is
    /// closed whatever is said.
    pub fn close(self) -> rustix::io::Result<()> {
        let mut this = ManuallyDrop::new(self);
        if !this.owner.is_current() {
            return Ok(());
        }
        // SAFETY: taken once, here; what is not dropped any more does not take it again.
        match fork::close_and_tell(unsafe { ManuallyDrop::take(&mut this.fd) }) {
            // On Linux it is closed then, and its number may be somebody else's.
            Err(Errno::INTR) => Ok(()),
            closed => closed,
        }
    }

    /// The descriptor alone, if this is the process that opened it. From here on a child that is forked keeps a copy.
    pub(crate) fn into_owned(self) -> Option<OwnedFd> {
        let mut this = ManuallyDrop::new(self);
        this.owner.is_current().then(|| {
            // SAFETY: taken once, here; what is not dropped any more does not take it again.
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
        // In a child the number may be somebody else's by now.
        if self.owner.is_current() {
            // SAFETY: taken once, here.
            let fd = unsafe { ManuallyDrop::take(&mut self.fd) };
            if self.is_file {
                let _ = fork::close_and_tell(fd);
            } else {
                fork::close(fd);
            }
        }
    }
}
