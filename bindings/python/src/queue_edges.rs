//! How the processes of a queue order what they do, beyond the lane and the locks of its roles.
//!
//! [doorbell]  sleeper: announce, fence, check the condition  <->  ringer: change the condition, fence, load the word
//!             store buffering: at least one of the two sees the other's store. So the sleeper finds the change, or the
//!             ringer the sleeper. Its halves are [want] and [ring]. The edge is for speed alone: a sleep lasts one
//!             slice, 30 ms, so a wake-up that is lost, as when a ringer is killed before it rings, delays by that
//! [done]      consumer: put what follows from an item, fence, mark the item as done
//!             ->  `join`: read the marks, fence, read the lane's positions
//!             `join` finds an item in work, or what followed from it. Its halves are [mark] and [marked]. The marks
//!             are in files, which system calls write and read: the model has a relaxed word for each
//!
//! This file is also a part of the models, `crates/pelton-lane/tests/loom/queue.rs`, where each half is left out once
//! (`./run loom`).

use pelton_lane::sync::{AtomicU32, full_fence};
use std::sync::atomic::Ordering::Relaxed;

/// A bit of a doorbell's word: a thread sleeps, or is about to. The other bits count the rings.
const WANTED: u32 = 1;

/// Wakes the threads that wait for a condition. One word has all of it, so that no second edge must order a ring and
/// the next announcement. `queue_file.rs` has the futex.
#[derive(Default)]
#[repr(C, align(64))]
pub struct Doorbell(AtomicU32);

impl Doorbell {
    /// For the sleeper: announces a sleep. Returns the word that it has then. The caller checks its condition once
    /// more, and sleeps while the word stays the same.
    pub fn want(&self) -> u32 {
        let announced = self.0.fetch_or(WANTED, Relaxed) | WANTED;
        full_fence("want"); // [doorbell]
        announced
    }

    /// For the ringer, after it has changed the condition: whether to wake the sleepers.
    #[inline]
    pub fn ring(&self) -> bool {
        full_fence("ring"); // [doorbell]
        let word = self.0.load(Relaxed);
        // The sum clears the bit, and counts. If it fails, another ringer has rung. A sleeper that has announced since
        // then did so after this fence: its check sees the change.
        word & WANTED != 0 && self.0.compare_exchange(word, word.wrapping_add(1), Relaxed, Relaxed).is_ok()
    }

    /// A hint.
    pub fn is_wanted(&self) -> bool {
        self.0.load(Relaxed) & WANTED != 0
    }

    pub fn word(&self) -> &AtomicU32 {
        &self.0
    }
}

/// For a consumer that is about to mark an item as done.
pub fn before_mark() {
    full_fence("mark"); // [done]
}

/// For a thread in `join`, which has read the marks.
pub fn after_marks() {
    full_fence("marked"); // [done]
}
