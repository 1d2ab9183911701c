//! The synchronisation edges, each with its name, and the two halves of the asymmetric barrier.
//!
//! [publish]  producer: store header at its tail  ->  consumer: load header at its cursor
//!            the record's bytes, a jump's target and the cleared header after the record are visible
//! [release]  consumer: store head                ->  producer: load head
//!            the consumer has finished reading; the producer may overwrite the space
//! [close]    either: store state                 ->  other: load state
//!            everything committed (producer) or released (consumer) before closing is visible
//! [sleep]    sleeper: store sleep word, barrier, poll  <->  waker: store header or head, barrier, load sleep word
//!            store buffering: at least one of them observes the other's store. So the sleeper finds the message, or
//!            the waker finds the sleeper. The same holds for `room_seq`, which the sleeper stores before its word. The
//!            waker's barrier is a compiler fence while the sleeper's is a `membarrier`.
//!            The same edge orders a waker that stops fencing against a sleeper that may rely on its fences:
//!            waker: store fenced = 0, fence, load sleep word  <->  sleeper: store sleep word, fence, load fenced
//! [fenced]   waker: store fenced = 1              ->  sleeper: load fenced, after its fence
//!            everything published (or released) earlier without a fence is visible to a sleeper that omits its barrier
//! [keep]     broadcast producer: store `kept`, fence, write data  ->  lagging consumer: read data, fence, load `kept`
//!            a consumer that has read one byte written over a record also loads a `kept` above that record's number
//! [keep]     broadcast producer: store the place of `kept`  ->  lagging consumer: load it before it reads from there
//!            the cleared header or the records there are visible
//! [last]     broadcast producer: store `last`     ->  consumer of the newest message: load it
//!            the record there is visible
//! [join]     joining consumer: store its number and its join word, fence, load `kept`
//!            <->  broadcast producer: store `kept`, fence, load the join words
//!            store buffering: at least one of them observes the other's store. So the consumer begins again at a later
//!            number, or the producer counts it before it overwrites anything
//! [join]     joining consumer: store its policy and its join word, fence, load `hold_limit`
//!            <->  broadcast producer that begins: store `hold_limit`, fence, load the join words and the policies
//!            store buffering: at least one of them observes the other's store. So the consumer gives up, or the
//!            producer does not begin
//! [join]     joining consumer: store its join word  ->  broadcast producer: load it
//!            the consumer's policy is visible; everything that its predecessor read, it has read
//! [join]     joining consumer: store its policy     ->  broadcast producer: load it
//!            the slack and the time of this policy are visible, or later ones
//!
//! Under loom, `PELTON_WEAKEN=publish` weakens the edge of that name: a model must fail without it.

use core::sync::atomic::Ordering;

#[cfg(not(loom))]
pub use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
#[cfg(loom)]
pub use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

/// A named pair of a releasing store and an acquiring load. Public for the crate `pelton`: the loom models here include
/// its edges.
#[derive(Debug)]
pub struct Edge {
    #[cfg(loom)]
    name: &'static str,
}

pub(crate) const PUBLISH: Edge = Edge::named("publish");
pub(crate) const RELEASE: Edge = Edge::named("release");
pub(crate) const CLOSE: Edge = Edge::named("close");
pub(crate) const FENCED: Edge = Edge::named("fenced");
pub(crate) const KEEP: Edge = Edge::named("keep");
pub(crate) const LAST: Edge = Edge::named("last");
pub(crate) const JOIN: Edge = Edge::named("join");

#[cfg(not(loom))]
impl Edge {
    /// The edge of this name.
    pub const fn named(_name: &'static str) -> Edge {
        Edge {}
    }
    /// The ordering of its store.
    #[inline(always)]
    pub const fn store(&self) -> Ordering {
        Ordering::Release
    }
    /// The ordering of its load.
    #[inline(always)]
    pub const fn load(&self) -> Ordering {
        Ordering::Acquire
    }
}

#[cfg(loom)]
impl Edge {
    /// The edge of this name.
    pub const fn named(name: &'static str) -> Edge {
        Edge { name }
    }
    /// The ordering of its store.
    pub fn store(&self) -> Ordering {
        if weakened(self.name) { Ordering::Relaxed } else { Ordering::Release }
    }
    /// The ordering of its load.
    pub fn load(&self) -> Ordering {
        if weakened(self.name) { Ordering::Relaxed } else { Ordering::Acquire }
    }
}

/// Whether this loom run leaves out the edge, or the rule, of this name.
#[cfg(loom)]
pub(crate) fn weakened(name: &str) -> bool {
    static WEAKENED: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    WEAKENED.get_or_init(|| std::env::var("PELTON_WEAKEN").unwrap_or_default()) == name
}

/// `[sleep]` The waker's half while the sleeper calls `membarrier`. The compiler must not move the load of the sleep
/// word above the store before it. The processor may, as the sleeper's `membarrier` orders both.
#[inline(always)]
pub(crate) fn light_barrier() {
    #[cfg(not(loom))]
    core::sync::atomic::compiler_fence(Ordering::SeqCst);
    // The sleeper's `membarrier` is the heavy barrier, the waker's compiler fence the light one. Together they order
    // like two full fences (C++ P1202); without the heavy one, the light one has no effect. Loom has no `membarrier`.
    // So in models whose `membarrier` reaches the waker, a full fence replaces the light barrier. Other models have
    // nothing here: a fence would hide a missing edge, or a missing fence.
    #[cfg(loom)]
    if MEMBARRIER.get() && !weakened("light") && !weakened("heavy") {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }
}

#[cfg(loom)]
std::thread_local! {
    /// Loom runs all threads of a model on one system thread.
    static MEMBARRIER: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Sets whether the model on this thread has a sleeper whose membarrier reaches the waker.
#[cfg(loom)]
pub fn model_membarrier(yes: bool) {
    MEMBARRIER.set(yes);
}

/// `[sleep]` A full fence. Loom weakens it by its `name`:
///
/// - `fence`: the waker's half while it cannot rely on the sleeper's `membarrier`, or while the sleeper relies on the
///   waker's fences. SeqCst: the store of the header (or head) must not pass the load of the sleep word. Otherwise the
///   sleeper could sleep for ever while a message is ready.
/// - `own`: the sleeper's half against wakers that fence. SeqCst: the store of its word must not pass the load of
///   `fenced`, nor the following poll.
/// - `joiner`, `admit`: of a consumer that joins by itself, and of the producer that may overwrite what it wants: see
///   `[join]`.
/// - `limit`: of a producer that begins with a limit. SeqCst: the store of `hold_limit` must not pass the loads of the
///   join words and the policies. Otherwise a consumer of which the producer does not know could have loaded the former
///   limit, and hold it up for longer. `joiner` is the consumer's half.
/// - `stop`: of a waker that stops fencing. SeqCst: the store of `fenced` must not pass the load of the sleep word.
///
/// Public as [`Edge`] is: Python's queue names fences of its own.
#[inline]
#[cfg_attr(not(loom), allow(unused_variables, reason = "only loom uses the name"))]
pub fn full_fence(name: &'static str) {
    #[cfg(not(loom))]
    core::sync::atomic::fence(Ordering::SeqCst);
    #[cfg(loom)]
    if !weakened(name) {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }
}

/// `[keep]` The producer's fence, between the store of `kept` and whatever it then writes over. Loom leaves it out as
/// `lap`.
#[inline(always)]
pub(crate) fn fence_before_overwriting() {
    #[cfg(not(loom))]
    core::sync::atomic::fence(Ordering::Release);
    #[cfg(loom)]
    if !weakened("lap") {
        loom::sync::atomic::fence(Ordering::Release);
    }
}

/// `[keep]` The consumer's fence, between its loads of the data and its load of `kept`. Loom leaves it out as
/// `overrun`.
#[inline(always)]
pub(crate) fn fence_after_reading() {
    #[cfg(not(loom))]
    core::sync::atomic::fence(Ordering::Acquire);
    #[cfg(loom)]
    if !weakened("overrun") {
        loom::sync::atomic::fence(Ordering::Acquire);
    }
}

/// A failpoint: a point between two changes of shared memory. Another process can see the state between them, and a
/// test may end this process there. Without the feature `_failpoints`, and under loom, this function is empty.
#[cfg(any(not(feature = "_failpoints"), loom))]
#[doc(hidden)]
#[inline(always)]
pub fn failpoint(_name: &'static str) {}
#[cfg(all(feature = "_failpoints", not(loom)))]
pub use crate::failpoints::failpoint;
