//! A handler's way to the pool that it runs in, which the replies need not know.

use super::caller::Desk;
use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::Arc;

/// What polls for requests in a handler, and what it is given.
type Poll = (NonNull<()>, fn(NonNull<()>, &Arc<Desk>) -> bool);

thread_local! {
    /// Of the pool in whose handler this thread is.
    static POLL: Cell<Option<Poll>> = const { Cell::new(None) };
}

/// In a handler: polls for requests and cancels, if no other thread of the pool does. Returns whether it did.
pub(super) fn poll_ahead(desk: &Arc<Desk>) -> bool {
    POLL.get().is_some_and(|(pool, poll)| poll(pool, desk))
}

/// While it lives, this thread is in a handler of that pool; perhaps within a handler of another.
pub(super) struct Inside(Option<Poll>);

impl Inside {
    pub(super) fn new(pool: NonNull<()>, poll: fn(NonNull<()>, &Arc<Desk>) -> bool) -> Inside {
        Inside(POLL.replace(Some((pool, poll))))
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        POLL.set(self.0);
    }
}
