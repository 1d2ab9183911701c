//! The synchronisation edges, each with its name, and the two halves of the asymmetric barrier.
//!
//! [publish]  producer: store header at its tail  ->  consumer: load header at its cursor
//!            the record's bytes, a jump's target and the cleared header behind the record are visible
//! [release]  consumer: store head                ->  producer: load head
//!            the consumer is done reading; the space may be overwritten
//! [close]    either: store state                 ->  other: load state
//!            everything committed (producer) or released (consumer) before closing is visible
//! [sleep]    sleeper: store sleep word, barrier, look again  <->  waker: store header or head, barrier, load sleep word
//!            store buffering: at least one of them sees the other's store, so either the sleeper sees the message or
//!            the waker sees the sleeper. The same holds for what the sleeper stored before its word (room_seq). The waker's
//!            barrier is a compiler fence while the sleeper's is a `membarrier`. Likewise, of a waker that stops fencing and a
//!            sleeper that may rely on it: store fenced = 0, fence, load sleep word  <->  store sleep word, fence, load fenced
//! [fenced]   waker: store fenced = 1              ->  sleeper: load fenced, behind its fence
//!            what was published (or released) before, without a fence, is visible to a sleeper that leaves its barrier out
//!
//! Under loom an edge can be weakened by name (`PELTON_WEAKEN=publish`), to show that a test fails without it.

use core::sync::atomic::Ordering;

#[cfg(not(loom))]
pub use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
#[cfg(loom)]
pub use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

/// A named pair of a releasing store and an acquiring load. Public for those of the crate `pelton`, whose models are with this one's.
#[derive(Debug)]
pub struct Edge {
    #[cfg(loom)]
    name: &'static str,
}

pub(crate) const PUBLISH: Edge = Edge::named("publish");
pub(crate) const RELEASE: Edge = Edge::named("release");
pub(crate) const CLOSE: Edge = Edge::named("close");
pub(crate) const FENCED: Edge = Edge::named("fenced");

#[cfg(not(loom))]
impl Edge {
    /// Of that name.
    pub const fn named(_name: &'static str) -> Edge {
        Edge {}
    }
    /// Of its store.
    #[inline(always)]
    pub const fn store(&self) -> Ordering {
        Ordering::Release
    }
    /// Of its load.
    #[inline(always)]
    pub const fn load(&self) -> Ordering {
        Ordering::Acquire
    }
}

#[cfg(loom)]
impl Edge {
    /// Of that name.
    pub const fn named(name: &'static str) -> Edge {
        Edge { name }
    }
    /// Of its store.
    pub fn store(&self) -> Ordering {
        if weakened(self.name) { Ordering::Relaxed } else { Ordering::Release }
    }
    /// Of its load.
    pub fn load(&self) -> Ordering {
        if weakened(self.name) { Ordering::Relaxed } else { Ordering::Acquire }
    }
}

/// Whether a loom run asked for this edge, or this rule, to be left out.
#[cfg(loom)]
pub(crate) fn weakened(name: &str) -> bool {
    static WEAKENED: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    WEAKENED.get_or_init(|| std::env::var("PELTON_WEAKEN").unwrap_or_default()) == name
}

/// [sleep] The waker's half while the sleeper calls `membarrier`: the compiler must not move the load of the sleep word
/// above the store before it; the processor may, and the sleeper's `membarrier` makes up for it.
#[inline(always)]
pub(crate) fn light_barrier() {
    #[cfg(not(loom))]
    core::sync::atomic::compiler_fence(Ordering::SeqCst);
    // Loom has no membarrier: a light and a heavy barrier together order like two full fences (C++ P1202), so that is
    // what stands in for both, in the models where a membarrier reaches the waker; in the others nothing, lest a fence hide
    // a missing edge, or a missing fence. Without the heavy one the light one is nothing, whatever else the sleeper does.
    #[cfg(loom)]
    if MEMBARRIER.get() && !weakened("light") && !weakened("heavy") {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }
}

#[cfg(loom)]
std::thread_local! {
    /// Loom runs a model's threads on one thread of the system.
    static MEMBARRIER: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Whether the model that runs on this thread has somebody sleep with a membarrier that reaches the waker.
#[cfg(loom)]
pub fn model_membarrier(yes: bool) {
    MEMBARRIER.set(yes);
}

/// [sleep] A full fence; loom knows it by its `name`:
///
/// - `fence`: the waker's half while it cannot rely on the sleeper's `membarrier`, or lets the sleeper rely on its fences. SeqCst:
///   the store of the header (or head) must not pass the load of the sleep word; if it did, the sleeper would sleep for ever on a
///   message that is there.
/// - `own`: the sleeper's, which is its half against wakers that fence. SeqCst: the store of its word must not pass the load of
///   `fenced`, nor the look that follows.
/// - `stop`: of a waker that stops fencing. SeqCst: the store of `fenced` must not pass the load of the sleep word.
#[inline]
#[cfg_attr(not(loom), allow(unused_variables, reason = "the name is for loom"))]
pub(crate) fn full_fence(name: &'static str) {
    #[cfg(not(loom))]
    core::sync::atomic::fence(Ordering::SeqCst);
    #[cfg(loom)]
    if !weakened(name) {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }
}

/// A place between two things that another process can see, the last store before it and the next one: a test may end the
/// process there. Nothing at all without the feature `failpoints`, and under loom.
#[cfg(any(not(feature = "failpoints"), loom))]
#[doc(hidden)]
#[inline(always)]
pub fn failpoint(_name: &'static str) {}
#[cfg(all(feature = "failpoints", not(loom)))]
pub use crate::failpoints::failpoint;
