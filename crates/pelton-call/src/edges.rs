//! What threads that answer and the service's loop tell each other without a lock.
//!
//! [home]  who answers: count itself out of [`Away`]  ->  the loop: load the count
//!         what it did to the client's lane under the lock is visible to the loop, which does without the lock while nobody is
//!         away; and to whoever frees the client
//! [stir]  whoever: set [`Stirred`]  ->  the loop: take it
//!         why the loop is to look is visible: the flags of a client, that it is to stop or drain
//!
//! Everything else that they share is under a lock, or is a flag that says nothing of other memory and is told by [stir]. This file
//! is also a part of the models, `pelton-lane/tests/loom/calls.rs`, where each edge is weakened once (`./run loom`).

use pelton_lane::sync::{AtomicBool, AtomicU64, Edge};
use std::sync::atomic::Ordering::Relaxed;

const HOME: Edge = Edge::named("home");
const STIR: Edge = Edge::named("stir");

/// Who may do something to a client besides the service's loop: those that have been given a responder to take away. The last to go
/// frees the client, be it the loop or one of them.
#[derive(Debug)]
pub(crate) struct Away(pub(super) AtomicU64);

/// The loop has let go of the client. More than can ever go, also of those that are forgotten and so never come back.
const LEFT: u64 = 1 << 63;

impl Away {
    pub(crate) fn new() -> Away {
        Away(AtomicU64::new(0))
    }

    /// For the loop: one more goes. Relaxed: it has from the loop whatever it has.
    pub(crate) fn go(&self) {
        self.0.fetch_add(1, Relaxed);
    }

    /// For the loop: whether nobody is away, nor can be before it sends somebody.
    #[inline(always)]
    pub(crate) fn is_nobody(&self) -> bool {
        self.0.load(HOME.load()) == 0 // [home]
    }

    /// One comes back, and touches nothing of the client any more. True: it was the last, the loop has left, and it is to free the client.
    pub(crate) fn come_back(&self) -> bool {
        let is_last = self.0.fetch_sub(1, HOME.store()) == LEFT | 1; // [home]
        if is_last {
            self.0.load(HOME.load()); // [home]
        }
        is_last
    }

    /// The loop lets go of the client. True: nobody is away, and it is to free the client.
    pub(crate) fn leave(&self) -> bool {
        let is_last = self.0.fetch_or(LEFT, HOME.store()) == 0; // [home]
        if is_last {
            self.0.load(HOME.load()); // [home]
        }
        is_last
    }
}

/// Whether there is anything for the loop to look at besides its lanes.
#[derive(Debug)]
pub(crate) struct Stirred(AtomicBool);

impl Stirred {
    pub(crate) fn new() -> Stirred {
        Stirred(AtomicBool::new(false))
    }

    /// There is. A swap: the loop is to see what each has said who has set it since it last looked, and a store would hide the one
    /// before.
    pub(crate) fn set(&self) {
        self.0.swap(true, STIR.store()); // [stir]
    }

    /// For the loop: a hint, by one load. Relaxed: what is to be seen is seen behind [`Stirred::take`].
    #[inline(always)]
    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Relaxed)
    }

    /// For the loop: whether there was. It looks now.
    pub(crate) fn take(&self) -> bool {
        self.0.swap(false, STIR.load()) // [stir]
    }
}
