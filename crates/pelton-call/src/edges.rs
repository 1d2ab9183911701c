//! Words that replying threads and the service's loop share without a lock.
//!
//! [return]  replying thread: remove itself from [`DetachedCount`]  ->  the loop: load the count
//!           what the thread wrote to the lane of replies under the lock is visible to the loop, which omits the lock
//!           while nothing is detached; and to the side that frees the session
//! [notify]  any thread: set [`NotifyFlag`]  ->  the loop: take it
//!           the reason is visible: a session's flags, or that the service is to stop or drain
//!
//! Everything else that they share is under a lock, or is a flag that guards no other memory and is announced by
//! [notify]. This file is also a part of the models, `pelton-lane/tests/loom/calls.rs`, where each edge is weakened
//! once (`./run loom`).

use pelton_lane::sync::{AtomicBool, AtomicU64, Edge};
use std::sync::atomic::Ordering::Relaxed;

const RETURN: Edge = Edge::named("return");
const NOTIFY: Edge = Edge::named("notify");

/// How many references to a session are detached from the service's loop. While there is none, the loop alone accesses
/// the session. The last of the loop and the detached references frees the session.
#[derive(Debug)]
pub(crate) struct DetachedCount(pub(super) AtomicU64);

/// The loop has released the session. Larger than any count of references, leaked ones included.
const RELEASED: u64 = 1 << 63;

impl DetachedCount {
    pub(crate) fn new() -> DetachedCount {
        DetachedCount(AtomicU64::new(0))
    }

    /// For the loop: detaches one more reference. Relaxed: the loop gives the reference to the other thread by
    /// something that orders this.
    pub(crate) fn add(&self) {
        self.0.fetch_add(1, Relaxed);
    }

    /// For the loop: whether nothing is detached. That stays true until the loop itself detaches a reference.
    #[inline(always)]
    pub(crate) fn is_zero(&self) -> bool {
        self.0.load(RETURN.load()) == 0 // [return]
    }

    /// A detached reference ends, and does not access the session any more. Returns true if it was the last one and
    /// the loop has released the session: then the caller frees it.
    pub(crate) fn remove(&self) -> bool {
        let is_last = self.0.fetch_sub(1, RETURN.store()) == RELEASED | 1; // [return]
        if is_last {
            self.0.load(RETURN.load()); // [return]
        }
        is_last
    }

    /// The loop releases the session. Returns true if nothing is detached: then the loop frees it.
    pub(crate) fn release(&self) -> bool {
        let is_last = self.0.fetch_or(RELEASED, RETURN.store()) == 0; // [return]
        if is_last {
            self.0.load(RETURN.load()); // [return]
        }
        is_last
    }
}

/// Whether a thread has something for the loop besides the lanes.
#[derive(Debug)]
pub(crate) struct NotifyFlag(AtomicBool);

impl NotifyFlag {
    pub(crate) fn new() -> NotifyFlag {
        NotifyFlag(AtomicBool::new(false))
    }

    /// Notifies the loop. A swap: the loop must see the reasons of all threads that have set it since the loop took it
    /// last, and a store would hide the earlier ones.
    pub(crate) fn set(&self) {
        self.0.swap(true, NOTIFY.store()); // [notify]
    }

    /// For the loop: a hint, by one load. Relaxed: the reasons are read after [`NotifyFlag::take`].
    #[inline(always)]
    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Relaxed)
    }

    /// For the loop: takes the flag. Returns whether it was set.
    pub(crate) fn take(&self) -> bool {
        self.0.swap(false, NOTIFY.load()) // [notify]
    }
}
