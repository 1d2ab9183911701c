//! The lines about refused peers in the log: at most one per second, because a peer that connects in a loop would fill
//! the log.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Shortest time between two lines. A guess.
const INTERVAL_NS: u64 = 1_000_000_000;

/// Which refusals have a line.
pub(super) struct Refusals {
    /// Earliest time of the next line, on CLOCK_MONOTONIC. Relaxed: it publishes no other memory.
    next_ns: AtomicU64,
    /// Refusals without a line since the last one. Relaxed: a count.
    left_out: AtomicU64,
}

impl Refusals {
    pub(super) const fn new() -> Refusals {
        Refusals { next_ns: AtomicU64::new(0), left_out: AtomicU64::new(0) }
    }

    /// Whether a refusal at this time has a line: if so, the number of refusals before it that had none.
    pub(super) fn admit(&self, now_ns: u64) -> Option<u64> {
        let next = self.next_ns.load(Relaxed);
        if now_ns >= next
            && self.next_ns.compare_exchange(next, now_ns.saturating_add(INTERVAL_NS), Relaxed, Relaxed).is_ok()
        {
            return Some(self.left_out.swap(0, Relaxed));
        }
        self.left_out.fetch_add(1, Relaxed);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_has_one_line_and_the_next_line_counts_the_others() {
        let refusals = Refusals::new();
        let times = [5, 5, 6, INTERVAL_NS + 4, INTERVAL_NS + 5, 9 * INTERVAL_NS];
        assert_eq!(times.map(|now| refusals.admit(now)), [Some(0), None, None, None, Some(3), Some(0)]);
    }

    #[test]
    fn of_threads_at_the_same_time_one_has_the_line_and_each_refusal_counts_once() {
        let refusals = Refusals::new();
        let (lines, counted) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for second in 1..=1000 {
                        if let Some(left_out) = refusals.admit(second * INTERVAL_NS) {
                            lines.fetch_add(1, Relaxed);
                            counted.fetch_add(left_out, Relaxed);
                        }
                    }
                });
            }
        });
        let lines = lines.into_inner();
        assert!((1..=1000).contains(&lines), "{lines} lines");
        assert_eq!(lines + counted.into_inner() + refusals.left_out.into_inner(), 4000);
    }
}
