//! What may end an operation before it is done, for the code that performs it.

use rustix::event::PollFlags;
use rustix::io::{Errno, Result};
use std::os::fd::BorrowedFd;

/// Whether an operation is cancelled, and a wait that ends when it is.
pub(crate) trait Interrupt {
    /// Whether it can be cancelled at all.
    fn can_cancel(&self) -> bool;

    /// Whether it is cancelled.
    fn is_cancelled(&self) -> bool;

    /// # Errors
    /// ECANCELED once it is cancelled.
    fn check(&self) -> Result<()> {
        if self.is_cancelled() { Err(Errno::CANCELED) } else { Ok(()) }
    }

    /// Waits until a stream is ready, or the operation is cancelled.
    fn wait_for(&self, stream: BorrowedFd<'_>, event: PollFlags) -> Result<()>;
}
