//! How much memory peers can make a handle use: the lanes that they write, and what a service keeps of its clients.

use pelton_lane::{CAPACITY_MAX, CAPACITY_MIN, message_bytes_limit};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// What a side takes from its peer, as its HELLO says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Of a lane that the peer writes.
    pub(crate) lane_bytes: u64,
    /// Of a message in it.
    pub(crate) message_bytes: u64,
}

impl Limits {
    /// The largest that the formats allow.
    pub(crate) const ALL: Limits =
        Limits { lane_bytes: CAPACITY_MAX, message_bytes: message_bytes_limit(CAPACITY_MAX) };
    /// The default for a peer of another user. Guess: enough for whoever did not think about it, and little next to a machine's memory.
    pub(crate) const OF_ANOTHER_USER: Limits = Limits { lane_bytes: 64 << 20, message_bytes: 1 << 20 };
}

/// Lanes are made in multiples of this. A budget of which less is left takes nobody any more.
pub(crate) const GRANULE: u64 = 64 * 1024;
/// The least that the largest message of a link's lane may be: room for a header and some bytes. In pieces of less nothing large would ever arrive.
pub(crate) const LINK_BYTES_MIN: u64 = 1024;

/// Each new peer may have this part of what is left: so the first ones get most, and there is some for very many.
pub(crate) const SHARES: u64 = 16;

/// The largest lane that a side may make for a peer that takes so many bytes.
pub(crate) fn lane_within(bytes: u64) -> u64 {
    let unit = if bytes < GRANULE { CAPACITY_MIN } else { GRANULE };
    bytes / unit * unit
}

/// A number of bytes, of which parts are taken and given back by any thread.
#[derive(Debug)]
pub(crate) struct Budget {
    most: u64,
    // Relaxed throughout: a count; nothing is read through it.
    taken: AtomicU64,
}

impl Budget {
    pub(crate) fn new(most: u64) -> Arc<Budget> {
        Arc::new(Budget { most, taken: AtomicU64::new(0) })
    }

    pub(crate) fn most(&self) -> u64 {
        self.most
    }

    pub(crate) fn left(&self) -> u64 {
        self.most.saturating_sub(self.taken.load(Relaxed))
    }

    /// Takes a part, until it is dropped; `None` if less is left.
    pub(crate) fn take(self: &Arc<Budget>, bytes: u64) -> Option<Part> {
        let mut part = Part { budget: self.clone(), bytes: 0 };
        part.grow(bytes).then_some(part)
    }
}

/// Of a [`Budget`]; dropped, it is given back.
#[derive(Debug)]
pub(crate) struct Part {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Part {
    /// Takes more; false if less is left.
    pub(crate) fn grow(&mut self, bytes: u64) -> bool {
        let within = |taken: u64| taken.checked_add(bytes).filter(|sum| *sum <= self.budget.most);
        let grown = self.budget.taken.fetch_update(Relaxed, Relaxed, within).is_ok();
        self.bytes += if grown { bytes } else { 0 };
        grown
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.budget.taken.fetch_sub(self.bytes, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_is_given_back_and_never_more_than_there_is() {
        let budget = Budget::new(100);
        let mut part = budget.take(60).unwrap();
        assert!(budget.take(41).is_none());
        assert!(!part.grow(41));
        assert!(part.grow(40));
        assert_eq!((part.bytes, budget.left()), (100, 0));
        assert!(!part.grow(u64::MAX));
        drop(part);
        assert_eq!(budget.left(), 100);
    }

    #[test]
    fn a_lane_is_no_larger_than_the_peer_takes() {
        let cases = [(4096, 4096), (65535, 61440), (65536, 65536), (100_000, 65536), (1 << 34, 1 << 34)];
        assert!(cases.iter().all(|(takes, makes)| lane_within(*takes) == *makes));
    }
}
