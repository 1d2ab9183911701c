//! How a handler reaches the pool that it runs in. The replies need not know that pool.

use super::session::ServiceShared;
use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::Arc;

/// A function that polls for requests in a handler, and its first argument.
type Poll = (NonNull<()>, fn(NonNull<()>, &Arc<ServiceShared>) -> bool);

thread_local! {
    /// Of the pool in whose handler this thread is.
    static POLL: Cell<Option<Poll>> = const { Cell::new(None) };
}

/// In a handler: polls for requests and cancels, if no other thread of the pool does. Returns whether it did.
pub(super) fn poll_ahead(shared: &Arc<ServiceShared>) -> bool {
    POLL.get().is_some_and(|(pool, poll)| poll(pool, shared))
}

/// While it lives, this thread is in a handler of that pool; perhaps within a handler of another.
pub(super) struct Inside(Option<Poll>);

impl Inside {
    pub(super) fn new(pool: NonNull<()>, poll: fn(NonNull<()>, &Arc<ServiceShared>) -> bool) -> Inside {
        Inside(POLL.replace(Some((pool, poll))))
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        POLL.set(self.0);
    }
}
