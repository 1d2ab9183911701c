//! Cancellation, for the code that performs an operation.

use rustix::event::PollFlags;
use rustix::io::{Errno, Result};
use std::os::fd::BorrowedFd;

/// The cancelled state of an operation, and a wait that a cancel ends.
pub(crate) trait Interrupt {
    /// Whether it can be cancelled at all.
    fn can_cancel(&self) -> bool;

    /// Whether it is cancelled.
    fn is_cancelled(&self) -> bool;

    /// # Errors
    /// ECANCELED after a cancel.
    fn check(&self) -> Result<()> {
        if self.is_cancelled() { Err(Errno::CANCELED) } else { Ok(()) }
    }

    /// Waits until a stream is ready, or the operation is cancelled.
    fn wait_for(&self, stream: BorrowedFd<'_>, event: PollFlags) -> Result<()>;
}
