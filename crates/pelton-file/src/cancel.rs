//! The cancelled state of an operation, for the code that performs it, and a wait that a cancel ends.

use pelton_os::{Doorbell, locked};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{Errno, Result, retry_on_intr};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

/// Without a lock for operations that are never cancelled.
#[derive(Debug)]
pub(crate) struct Cancel(Option<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    is_cancelled: bool,
    /// Created by a thread that waits for a stream, which may never become ready.
    doorbell: Option<Arc<Doorbell>>,
}

impl Cancel {
    pub(crate) fn new() -> Cancel {
        Cancel(Some(Mutex::default()))
    }

    /// For operations that are never cancelled.
    pub(crate) const NEVER: Cancel = Cancel(None);

    pub(crate) fn set(&self) {
        if let Some(mut state) = self.0.as_ref().map(locked) {
            state.is_cancelled = true;
            if let Some(doorbell) = &state.doorbell {
                doorbell.ring();
            }
        }
    }

    /// Whether it can be cancelled at all.
    pub(crate) fn can_cancel(&self) -> bool {
        self.0.is_some()
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.0.as_ref().is_some_and(|state| locked(state).is_cancelled)
    }

    /// # Errors
    /// ECANCELED after a cancel.
    pub(crate) fn check(&self) -> Result<()> {
        if self.is_cancelled() { Err(Errno::CANCELED) } else { Ok(()) }
    }

    /// Waits until a stream is ready, or the operation is cancelled.
    pub(crate) fn wait_for(&self, stream: BorrowedFd<'_>, event: PollFlags) -> Result<()> {
        let doorbell = match self.0.as_ref().map(locked) {
            Some(state) if state.is_cancelled => return Ok(()),
            Some(mut state) => {
                if state.doorbell.is_none() {
                    // If no descriptor is available, a cancel cannot wake the thread: the next bytes do.
                    state.doorbell = Doorbell::own().ok().map(Arc::new);
                }
                state.doorbell.clone()
            }
            None => None,
        };
        let mut fds = vec![PollFd::from_borrowed_fd(stream, event)];
        fds.extend(doorbell.iter().map(|doorbell| PollFd::new(doorbell, PollFlags::IN)));
        retry_on_intr(|| poll(&mut fds, None)).map(drop)
    }
}
