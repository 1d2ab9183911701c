//! Limits of the memory that peers can make a handle use: lanes that they write, and messages that a service keeps.

use pelton_lane::{CAPACITY_MAX, CAPACITY_MIN, message_bytes_limit};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// The sizes that a side accepts from its peer; its HELLO contains them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// The largest lane that the peer may write.
    pub(crate) lane_bytes: u64,
    /// The largest message in that lane.
    pub(crate) message_bytes: u64,
}

impl Limits {
    /// The largest that the formats allow.
    pub(crate) const ALL: Limits =
        Limits { lane_bytes: CAPACITY_MAX, message_bytes: message_bytes_limit(CAPACITY_MAX) };
    /// The default for a peer of another user. Guess: enough for a program that sets no limit, and little compared with
    /// a machine's memory.
    pub(crate) const OF_ANOTHER_USER: Limits = Limits { lane_bytes: 64 << 20, message_bytes: 1 << 20 };
}

/// Lane sizes are multiples of this. A budget with less left accepts no more peers.
pub(crate) const GRANULE: u64 = 64 * 1024;
/// The minimum for `message_bytes` of a link's lane: space for a header and some bytes. A large
/// message travels in pieces of at most that size; in smaller pieces it would take too long.
pub const LINK_BYTES_MIN: u64 = 1024;

/// Each new peer may have this part (1/16) of the remaining budget. So the first peers get most, and many peers get
/// some.
pub(crate) const SHARES: u64 = 16;

/// The largest lane that a side may create for a peer that accepts `bytes`.
pub(crate) fn lane_within(bytes: u64) -> u64 {
    let unit = if bytes < GRANULE { CAPACITY_MIN } else { GRANULE };
    bytes / unit * unit
}

/// A number of bytes. Any thread may take parts of it and give them back.
#[derive(Debug)]
pub struct Budget {
    most: u64,
    // Relaxed throughout: a count that publishes nothing.
    taken: AtomicU64,
}

impl Budget {
    /// Creates a budget of `most` bytes.
    pub fn new(most: u64) -> Arc<Budget> {
        Arc::new(Budget { most, taken: AtomicU64::new(0) })
    }

    /// The limit.
    pub fn most(&self) -> u64 {
        self.most
    }

    /// Bytes that are not taken.
    pub fn left(&self) -> u64 {
        self.most.saturating_sub(self.taken.load(Relaxed))
    }

    /// Takes a part; dropping it gives it back. Returns `None` if less is left.
    pub(crate) fn take(self: &Arc<Budget>, bytes: u64) -> Option<Part> {
        self.take_leaving(bytes, || 0).then(|| Part { budget: self.clone(), bytes })
    }

    /// Takes `bytes`, if at least `others()` bytes are left after that.
    fn take_leaving(&self, bytes: u64, others: impl Fn() -> u64) -> bool {
        let within = |taken: u64| {
            let left = self.most.checked_sub(taken)?.checked_sub(bytes)?;
            (left >= others()).then_some(taken + bytes)
        };
        self.taken.try_update(Relaxed, Relaxed, within).is_ok()
    }

    fn give_back(&self, bytes: u64) {
        self.taken.fetch_sub(bytes, Relaxed);
    }
}

/// A part of a [`Budget`]. Dropping it gives it back.
#[derive(Debug)]
pub(crate) struct Part {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Drop for Part {
    fn drop(&mut self) {
        self.budget.give_back(self.bytes);
    }
}

/// One client's share of a [`Budget`]. It grows only if, afterwards, the budget still has at least as much left as this
/// share.
///
/// So a single client has at most half. Two clients at their limits have a third each. A further client always finds at
/// least as much left as the largest share. The rule needs no number of clients, and keeps little from a single client.
/// A fixed fraction that is safe with a thousand clients would be too small for one large reply.
#[derive(Debug)]
pub struct Share {
    budget: Arc<Budget>,
    /// Relaxed: a count. Threads that reply to one client concurrently may exceed its share, by the bytes that they add
    /// at that moment. They never exceed the budget.
    taken: AtomicU64,
}

impl Share {
    /// Creates a client's share of `budget`.
    pub fn new(budget: &Arc<Budget>) -> Arc<Share> {
        Arc::new(Share { budget: budget.clone(), taken: AtomicU64::new(0) })
    }

    /// The limit of the whole budget.
    pub fn most(&self) -> u64 {
        self.budget.most()
    }

    /// The number of bytes by which it may grow now.
    pub fn left(&self) -> u64 {
        self.budget.left().saturating_sub(self.taken.load(Relaxed)) / 2
    }

    /// Takes a part; dropping it gives it back. Returns `None` if the share may not grow by `bytes`.
    pub fn take(self: &Arc<Share>, bytes: u64) -> Option<Kept> {
        let mut kept = Kept { share: self.clone(), bytes: 0 };
        kept.grow(bytes).then_some(kept)
    }

    fn grow(&self, bytes: u64) -> bool {
        if bytes == 0 {
            // Succeeds even if, because of new peers' lanes, the budget has less left than this share.
            return true;
        }
        let count = |taken: u64| taken.checked_add(bytes);
        // Counts in the share first: a failed attempt then never reduces what other clients find in the budget.
        let is_counted = self.taken.try_update(Relaxed, Relaxed, count).is_ok();
        let grown = is_counted && self.budget.take_leaving(bytes, || self.taken.load(Relaxed));
        if is_counted && !grown {
            self.taken.fetch_sub(bytes, Relaxed);
        }
        grown
    }
}

/// Bytes kept for one client. Dropping them gives them back to its [`Share`].
#[derive(Debug)]
pub struct Kept {
    share: Arc<Share>,
    bytes: u64,
}

impl Kept {
    /// As [`Kept::grow`], but only if the share may grow by four times as much.
    pub fn grow_if_ample(&mut self, bytes: u64) -> bool {
        bytes <= self.share.left() / 4 && self.grow(bytes)
    }

    /// Takes more. Returns false if the share may not grow by `bytes`.
    pub fn grow(&mut self, bytes: u64) -> bool {
        let grown = self.share.grow(bytes);
        self.bytes += if grown { bytes } else { 0 };
        grown
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        // The share last: until then it counts too many bytes, never too few.
        self.share.budget.give_back(self.bytes);
        self.share.taken.fetch_sub(self.bytes, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_never_lends_more_than_its_limit_and_gets_all_back() {
        let budget = Budget::new(100);
        let part = budget.take(60).unwrap();
        assert!(budget.take(41).is_none() && budget.take(u64::MAX).is_none());
        let rest = budget.take(40).unwrap();
        assert_eq!(budget.left(), 0);
        drop(part);
        assert_eq!(budget.left(), 60);
        drop(rest);
        assert_eq!(budget.left(), 100);
    }

    #[test]
    fn a_share_grows_as_long_as_the_budget_has_as_much_left() {
        let budget = Budget::new(120);
        let shares = [(); 3].map(|()| Share::new(&budget));
        let mut kept: Vec<Kept> = Vec::new();
        // Each share may take half of the remaining bytes.
        for (share, bytes) in shares.iter().zip([60, 30, 15]) {
            assert_eq!(share.left(), bytes);
            assert!(share.take(bytes + 1).is_none() && share.take(u64::MAX).is_none());
            let mut part = share.take(bytes - 1).unwrap();
            assert!(!part.grow(2) && part.grow(1) && !part.grow(1) && !part.grow(u64::MAX));
            kept.push(part);
        }
        assert_eq!(budget.left(), 15);
        let lanes = budget.take(15);
        assert!(shares.iter().all(|share| share.left() == 0 && share.take(1).is_none() && share.take(0).is_some()));
        drop(lanes);
        drop(kept);
        assert_eq!((budget.left(), shares.map(|share| share.left())), (120, [60; 3]));
    }

    #[test]
    fn a_lane_is_no_larger_than_the_peer_takes() {
        let cases = [(4096, 4096), (65535, 61440), (65536, 65536), (100_000, 65536), (1 << 34, 1 << 34)];
        assert!(cases.iter().all(|(takes, makes)| lane_within(*takes) == *makes));
    }
}
