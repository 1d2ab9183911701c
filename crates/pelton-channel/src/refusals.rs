//! The lines about refused peers in the log: at most one per second, because a peer that connects in a loop would fill
//! the log. The next line counts the others, or one at the end of a listener.

use pelton_os::socket::Socket;
use pelton_os::{LOG_TARGET, Peer};
use rustix::time::{ClockId, clock_gettime};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Shortest time between two lines. A guess.
const INTERVAL_NS: u64 = 1_000_000_000;

static REFUSALS: Refusals = Refusals::new();

/// Logs that a peer was refused, or counts it for a later line.
pub(crate) fn log(socket: &Socket, why: &str) {
    if !log::log_enabled!(target: LOG_TARGET, log::Level::Warn) {
        return;
    }
    let now = clock_gettime(ClockId::Monotonic);
    let Some(left_out) = REFUSALS.admit(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64) else { return };
    let others = if left_out > 0 { format!(" (earlier refusals without a line: {left_out})") } else { String::new() };
    match socket.peer() {
        Ok(Peer { pid, uid }) => {
            log::warn!(target: LOG_TARGET, "refused the peer, process {pid} of uid {uid}: {why}{others}");
        }
        Err(error) => {
            log::warn!(target: LOG_TARGET, "refused a peer that the kernel does not name ({error}): {why}{others}");
        }
    }
}

/// At the end of a listener: logs how many refused peers had no line, because none may follow that counts them.
pub(crate) fn log_left_out() {
    let left_out = REFUSALS.left_out.swap(0, Relaxed);
    if left_out > 0 {
        log::warn!(target: LOG_TARGET, "a listener ends (earlier refusals without a line: {left_out})");
    }
}

/// Which refusals have a line.
struct Refusals {
    /// Earliest time of the next line, on CLOCK_MONOTONIC. Relaxed: it publishes no other memory.
    next_ns: AtomicU64,
    /// Refusals without a line since the last one. Relaxed: a count.
    left_out: AtomicU64,
}

impl Refusals {
    const fn new() -> Refusals {
        Refusals { next_ns: AtomicU64::new(0), left_out: AtomicU64::new(0) }
    }

    /// Whether a refusal at this time has a line: if so, the number of refusals before it that had none.
    fn admit(&self, now_ns: u64) -> Option<u64> {
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
