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
pub struct Budget {
    most: u64,
    // Relaxed throughout: a count; nothing is read through it.
    taken: AtomicU64,
}

impl Budget {
    /// A limit of `most` bytes, of which nothing is taken.
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

    /// Takes a part, until it is dropped; `None` if less is left.
    pub(crate) fn take(self: &Arc<Budget>, bytes: u64) -> Option<Part> {
        self.take_leaving(bytes, || 0).then(|| Part { budget: self.clone(), bytes })
    }

    /// Takes so many bytes if as many as `others` says are left after that.
    fn take_leaving(&self, bytes: u64, others: impl Fn() -> u64) -> bool {
        let within = |taken: u64| {
            let left = self.most.checked_sub(taken)?.checked_sub(bytes)?;
            (left >= others()).then_some(taken + bytes)
        };
        self.taken.fetch_update(Relaxed, Relaxed, within).is_ok()
    }

    fn give_back(&self, bytes: u64) {
        self.taken.fetch_sub(bytes, Relaxed);
    }
}

/// Of a [`Budget`]; dropped, it is given back.
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

/// One client's share of a [`Budget`]: it grows only while the budget has at least as much left as the share has then.
///
/// So one client alone has at most half, two that hold all they can have a third each, and one more client always finds as much as the
/// largest share has. No number has to be chosen, and a client that is alone does not pay for many that may come. A fixed fraction
/// that protects the others of a thousand clients would be too small for one large reply.
#[derive(Debug)]
pub struct Share {
    budget: Arc<Budget>,
    /// Relaxed: a count. Threads that answer one client at the same time may exceed its share by what they add in that moment; the
    /// budget is never exceeded.
    taken: AtomicU64,
}

impl Share {
    /// A client's share of `budget`, of which nothing is taken.
    pub fn new(budget: &Arc<Budget>) -> Arc<Share> {
        Arc::new(Share { budget: budget.clone(), taken: AtomicU64::new(0) })
    }

    /// Of the budget in all.
    pub fn most(&self) -> u64 {
        self.budget.most()
    }

    /// By how much it may grow now.
    pub fn left(&self) -> u64 {
        self.budget.left().saturating_sub(self.taken.load(Relaxed)) / 2
    }

    /// Takes a part, until it is dropped; `None` if the share may not grow so far.
    pub fn take(self: &Arc<Share>, bytes: u64) -> Option<Kept> {
        let mut kept = Kept { share: self.clone(), bytes: 0 };
        kept.grow(bytes).then_some(kept)
    }

    fn grow(&self, bytes: u64) -> bool {
        if bytes == 0 {
            // Also while newcomers' lanes have left less than the share has.
            return true;
        }
        let count = |taken: u64| taken.checked_add(bytes);
        // First, so that a take that fails is in nobody else's way.
        let is_counted = self.taken.fetch_update(Relaxed, Relaxed, count).is_ok();
        let grown = is_counted && self.budget.take_leaving(bytes, || self.taken.load(Relaxed));
        if is_counted && !grown {
            self.taken.fetch_sub(bytes, Relaxed);
        }
        grown
    }
}

/// Bytes that are kept for one client; dropped, they are given back to its [`Share`].
#[derive(Debug)]
pub struct Kept {
    share: Arc<Share>,
    bytes: u64,
}

impl Kept {
    /// Takes more; false if the share may not grow so far.
    pub fn grow(&mut self, bytes: u64) -> bool {
        let grown = self.share.grow(bytes);
        self.bytes += if grown { bytes } else { 0 };
        grown
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        // The share last: until then it counts too much, never too little.
        self.share.budget.give_back(self.bytes);
        self.share.taken.fetch_sub(self.bytes, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_is_given_back_and_never_more_than_there_is() {
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
        // Each finds half of what the ones before have left.
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
