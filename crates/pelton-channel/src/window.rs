//! Adaptive window: how many bytes of its lane a sender uses before it wraps to the front, while the receiver keeps up.
//!
//! A small window stays in the caches of the two cores. But a cache line that is modified in the other core's cache is
//! the slowest to access. With a larger window, lines have been evicted to the shared cache before either side needs
//! them again. On some processors that is several times as fast, on others it is slower. It is always slower if the
//! receiver does not read the payload. So the sender measures: it keeps a larger window only if the throughput is
//! higher (docs/decisions/0031-window-sizes.md).

use crate::settings::{RESIDENT_MAX, Settings};
use pelton_lane::{CAPACITY_MIN, WINDOW};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The window sizes. They are far apart: on some processors a size between two of these gains nothing, and the next one
/// doubles the throughput.
const LEVELS: [u64; 3] = [WINDOW, 4 << 20, 16 << 20];
const _: () = assert!(LEVELS[LEVELS.len() - 1] == RESIDENT_MAX);
/// Limit for all senders of a process together: the bytes of their windows beyond the minimum, summed up.
const PROCESS_MAX: u64 = 64 << 20;
/// The part of `PROCESS_MAX` that is in use.
static IN_USE: AtomicU64 = AtomicU64::new(0);

/// Bytes sent per sample.
const SAMPLE: u64 = WINDOW;
/// A measurement is the median of this many samples.
const SAMPLES: usize = 8;
/// After a change, the sender completes two laps of the new window and this many samples before it measures. The first
/// lap causes page faults.
const SETTLE: u32 = 16;
/// A sample that took longer means that the stream is not saturated.
const SATURATED_NS: u64 = 1_000_000;
/// The same, with the smallest window, if the receiver has emptied the lane, as at each request of a serial call. Below
/// a gigabyte a second the copies are a small part of the time. Above, the sender may spend most of it to take the
/// cache lines of its next message from the receiver's core: 100 KiB took 26 µs there and back, in 4 MiB 10 µs.
const WAITING_NS: u64 = 250_000;
/// After this many unsaturated samples in a row, or one pause this long, the window shrinks to its minimum.
const UNSATURATED: u32 = 4;
const PAUSE_NS: u64 = 100_000_000;
/// Samples between two trials, by the number of failed trials in a row.
const RESTS: [u32; 5] = [128, 512, 2048, 8192, 32768];
/// Samples before the first trial, and after a pause.
const FIRST_REST: u32 = 4;
/// Failed trials in a row before a window above `LEVELS[1]` is tried, some 15,000 samples after the smaller one was
/// found: its page faults take 12 to 17 ms, and it seldom pays (docs/decisions/0031-window-sizes.md).
const FAILED_BEFORE_LARGEST: usize = 3;
/// Samples between a failed trial and the release of the memory outside the window. The release is late, because the
/// next trial would need milliseconds to allocate the memory again. After a pause, or if the stream is no longer
/// saturated, the release follows `EXCESS_OF_A_PAUSE` samples later.
const EXCESS: u32 = 8192;
const EXCESS_OF_A_PAUSE: u32 = 8;

/// The window of one sender, and the state of its trials.
#[derive(Debug)]
pub(crate) struct Window {
    /// Limits of `bytes`; equal for a fixed window.
    bytes_min: u64,
    bytes_max: u64,
    bytes: u64,
    /// This sender's part of the process's limit, held until the memory is released.
    taken: u64,
    in_use: &'static AtomicU64,
    phase: Phase,
    /// Samples left in this phase.
    left: u32,
    /// Failed trials in a row, as an index of `RESTS`.
    failed_trials: usize,
    tries_larger: bool,
    unsaturated: u32,
    /// Samples until the memory outside the window is released, plus one; 0: nothing to release.
    excess: u32,
    /// Bytes sent and the time at the last sample.
    sent: u64,
    ns: u64,
    samples: [u64; SAMPLES],
}

/// The receiver's state as the sender sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keeps {
    /// The lane is empty.
    Waiting,
    /// The lane holds messages, all within the window.
    Up,
    /// The lane holds messages outside the window.
    Behind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Rest,
    /// Measures the current window.
    Measuring,
    /// Uses another window than `from`, which took `before` nanoseconds per MiB, and does not measure yet.
    Settling {
        from: u64,
        before: u64,
    },
    Trying {
        from: u64,
        before: u64,
    },
}

impl Window {
    /// As `options` determine, in a lane of `capacity`. `sent`: bytes sent so far.
    pub(crate) fn of(options: &Settings, capacity: u64, sent: u64) -> Window {
        let (least, most) = options.window.map_or((WINDOW, options.resident_max), |bytes| (bytes, bytes));
        let most = most.clamp(CAPACITY_MIN, capacity);
        Window::new(least.min(most), most, sent)
    }

    /// The window to use now.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    fn new(bytes_min: u64, bytes_max: u64, sent: u64) -> Window {
        Window::with(&IN_USE, bytes_min, bytes_max, sent)
    }

    fn with(in_use: &'static AtomicU64, bytes_min: u64, bytes_max: u64, sent: u64) -> Window {
        Window {
            bytes_min,
            bytes_max,
            bytes: bytes_min,
            taken: 0,
            in_use,
            phase: Phase::Rest,
            left: FIRST_REST,
            failed_trials: 0,
            tries_larger: false,
            unsaturated: 0,
            // A predecessor in a path channel may have left memory allocated.
            excess: EXCESS_OF_A_PAUSE,
            sent,
            ns: 0,
            samples: [0; SAMPLES],
        }
    }

    /// Whether a pause has begun that no sample has detected: the last sample is older than `PAUSE_NS`. Only for a
    /// window above its minimum, or with memory outside of it that is not released yet.
    pub(crate) fn is_pause_overdue(&self, now: impl FnOnce() -> u64) -> bool {
        self.taken > 0 && now().saturating_sub(self.ns) > PAUSE_NS
    }

    /// Whether a sample is due.
    #[inline(always)]
    pub(crate) fn is_due(&self, sent: u64) -> bool {
        self.bytes_since_sample(sent) >= SAMPLE
    }

    /// Bytes sent since the last sample.
    #[inline(always)]
    pub(crate) fn bytes_since_sample(&self, sent: u64) -> u64 {
        sent.wrapping_sub(self.sent)
    }

    /// Takes a sample and returns the window to use.
    pub(crate) fn sample(&mut self, sent: u64, receiver: Keeps, now: u64) -> u64 {
        let (bytes, ns) = (sent.wrapping_sub(self.sent), now.saturating_sub(self.ns));
        (self.sent, self.ns) = (sent, now);
        if self.excess > 1 {
            self.excess -= 1;
        }
        if self.bytes_max == self.bytes_min {
            return self.bytes;
        }
        // The first sample too: its interval begins at time 0.
        // Page faults slow a larger window's first lap, so it needs less to be kept than to be tried.
        let is_serial = receiver == Keeps::Waiting && self.bytes == self.bytes_min;
        if ns > if is_serial { WAITING_NS } else { SATURATED_NS } {
            self.unsaturated += 1;
            if ns > PAUSE_NS || self.unsaturated >= UNSATURATED {
                self.shrink();
                if ns > PAUSE_NS {
                    self.excess = self.excess.min(1);
                }
            }
            return self.bytes;
        }
        self.unsaturated = 0;
        if receiver == Keeps::Behind && matches!(self.phase, Phase::Rest | Phase::Measuring) {
            // The lane already extends beyond its window, so another window would change nothing.
            self.begin(Phase::Rest, self.left.max(FIRST_REST));
            return self.bytes;
        }
        if receiver == Keeps::Behind && matches!(self.phase, Phase::Trying { from, .. } if from > self.bytes) {
            // The smaller window is not in effect, so its throughput cannot be measured.
            self.fail_trial();
            return self.bytes;
        }
        self.left -= 1;
        if let Phase::Measuring | Phase::Trying { .. } = self.phase {
            self.samples[self.left as usize] = (u128::from(ns) << 20).div_euclid(bytes.into()) as u64;
        }
        if self.left == 0 {
            self.end_phase();
        }
        self.bytes
    }

    /// Returns true once after the window has shrunk, when the memory outside it (the excess) is to be released.
    pub(crate) fn take_excess(&mut self) -> bool {
        // Not `excess -= u32::from(is_due)`: rustc 1.95.0 drops that store when it inlines this function.
        let is_due = self.excess == 1;
        if is_due {
            self.excess = 0;
            let less = self.taken - self.taken.min(self.bytes - self.bytes_min);
            self.in_use.fetch_sub(less, Relaxed);
            self.taken -= less;
        }
        is_due
    }

    /// Limits the window to `bytes` for good: the system has no memory for a larger one.
    pub(crate) fn refuse(&mut self, bytes: u64) {
        // A fixed window has equal limits.
        (self.bytes_min, self.bytes_max) = (self.bytes_min.min(bytes), bytes);
        self.use_window(bytes);
        self.rest(RESTS[RESTS.len() - 1]);
    }

    /// Shrinks the window to its minimum and starts over. Returns it.
    pub(crate) fn shrink(&mut self) -> u64 {
        // A trial of a larger window that is cut short fails: otherwise short bursts would pay its page faults again
        // and again, and never measure it.
        if let Phase::Settling { from, .. } | Phase::Trying { from, .. } = self.phase
            && from < self.bytes
        {
            self.failed_trials = (self.failed_trials + 1).min(RESTS.len() - 1);
        }
        self.use_window(self.bytes_min);
        self.excess = self.excess.min(EXCESS_OF_A_PAUSE);
        self.rest(if self.failed_trials == 0 { FIRST_REST } else { RESTS[self.failed_trials] });
        self.bytes
    }

    /// Fixes the window at `bytes`.
    #[cfg(test)]
    pub(crate) fn fix(&mut self, bytes: u64) {
        if bytes < self.bytes {
            self.excess = EXCESS;
        }
        (self.bytes, self.bytes_min, self.bytes_max) = (bytes, bytes, bytes);
    }

    fn end_phase(&mut self) {
        match self.phase {
            Phase::Rest => self.begin(Phase::Measuring, SAMPLES as u32),
            Phase::Measuring => {
                let (from, before) = (self.bytes, self.median());
                match self.use_another() {
                    true => self.begin(Phase::Settling { from, before }, (2 * self.bytes / SAMPLE) as u32 + SETTLE),
                    false => self.rest(RESTS[2]),
                }
            }
            Phase::Settling { from, before } => self.begin(Phase::Trying { from, before }, SAMPLES as u32),
            Phase::Trying { from, before } => {
                let after = self.median();
                // A larger window has to be faster by a sixteenth; a smaller one must not be slower by more than that.
                let pays = match from < self.bytes {
                    true => after * 17 < before * 16,
                    false => after * 16 < before * 17,
                };
                if !pays {
                    return self.fail_trial();
                }
                self.failed_trials = 0;
                self.rest(RESTS[0]);
            }
        }
    }

    fn begin(&mut self, phase: Phase, samples: u32) {
        (self.phase, self.left) = (phase, samples);
    }

    fn rest(&mut self, samples: u32) {
        self.unsaturated = 0;
        self.begin(Phase::Rest, samples);
    }

    fn fail_trial(&mut self) {
        if let Phase::Trying { from, .. } = self.phase {
            // If the process's limit does not permit `from` any more, the window stays at the smaller size.
            self.use_window(from);
        }
        self.failed_trials = (self.failed_trials + 1).min(RESTS.len() - 1);
        self.rest(RESTS[self.failed_trials]);
    }

    fn median(&mut self) -> u64 {
        *self.samples.select_nth_unstable(SAMPLES / 2).1
    }

    /// Switches to the next larger or the next smaller window, alternately. Returns false if neither is possible, or if
    /// the larger one's trial has to wait.
    fn use_another(&mut self) -> bool {
        for _ in 0..2 {
            self.tries_larger = !self.tries_larger;
            let levels = LEVELS.iter().map(|bytes| (*bytes).clamp(self.bytes_min, self.bytes_max));
            let other = match self.tries_larger {
                true => levels.clone().find(|bytes| *bytes > self.bytes),
                false => levels.rev().find(|bytes| *bytes < self.bytes),
            };
            if self.failed_trials < FAILED_BEFORE_LARGEST
                && other.is_some_and(|bytes| bytes > LEVELS[1].max(self.bytes))
            {
                return false;
            }
            if other.is_some_and(|bytes| self.use_window(bytes)) {
                return true;
            }
        }
        false
    }

    /// Returns false if the process's limit does not permit it.
    fn use_window(&mut self, bytes: u64) -> bool {
        if bytes > self.bytes {
            // Memory that is not released yet is counted already.
            let more = (bytes - self.bytes_min).saturating_sub(self.taken);
            // Relaxed: a counter that publishes nothing.
            let taken =
                self.in_use.try_update(Relaxed, Relaxed, |used| Some(used + more).filter(|&used| used <= PROCESS_MAX));
            if taken.is_err() {
                return false;
            }
            self.taken += more;
        } else if bytes < self.bytes {
            self.excess = EXCESS;
        }
        self.bytes = bytes;
        true
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        self.in_use.fetch_sub(self.taken, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pelton_testkit::Random;

    /// A sender with a simulated clock.
    struct Simulated {
        window: Window,
        random: Random,
        sent: u64,
        ns: u64,
    }

    impl Simulated {
        fn new(bytes_max: u64) -> Simulated {
            Simulated::with(Box::leak(Box::default()), bytes_max)
        }

        fn with(in_use: &'static AtomicU64, bytes_max: u64) -> Simulated {
            let mut random = Random::new(bytes_max);
            let sent = random.word();
            Simulated { window: Window::with(in_use, WINDOW, bytes_max, sent), random, sent, ns: 1 << 40 }
        }

        /// Takes samples. `cost` returns the mean duration in ns for a window; each sample deviates randomly by up to a
        /// third, and one in ten takes three times as long. Returns bytes per nanosecond.
        fn run(&mut self, samples: u64, cost: impl Fn(u64) -> u64) -> f64 {
            let (sent, ns) = (self.sent, self.ns);
            for _ in 0..samples {
                let cost = cost(self.window.bytes);
                let odd = if self.random.below(10) == 0 { 3 } else { 1 };
                self.ns += odd * (cost * 2 / 3 + self.random.below(cost * 2 / 3 + 1));
                self.sent = self.sent.wrapping_add(SAMPLE + self.random.below(1000));
                assert!(self.window.is_due(self.sent));
                let bytes = self.window.sample(self.sent, Keeps::Up, self.ns);
                assert!((WINDOW..=self.window.bytes_max).contains(&bytes), "{bytes}");
            }
            self.sent.wrapping_sub(sent) as f64 / (self.ns - ns) as f64
        }
    }

    /// Bytes per nanosecond of the best fixed window.
    fn best(bytes_max: u64, cost: impl Fn(u64) -> u64) -> f64 {
        let mut fixed = LEVELS.map(|bytes| {
            let mut sender = Simulated::new(WINDOW);
            sender.run(10_000, |_| cost(bytes.min(bytes_max)))
        });
        fixed.sort_by(f64::total_cmp);
        fixed[LEVELS.len() - 1]
    }

    #[test]
    fn the_window_with_the_highest_throughput_is_found_and_kept() {
        for costs in [[90, 30, 60], [60, 50, 30], [40, 60, 90], [50, 50, 50], [60, 40, 30], [300, 100, 100]] {
            for bytes_max in [1 << 20, 4 << 20, 5 << 20, 16 << 20, 1 << 30] {
                let cost = |bytes: u64| 1000 * costs[if bytes > 5 << 20 { 2 } else { usize::from(bytes > WINDOW) }];
                let mut sender = Simulated::new(bytes_max);
                let before = sender.ns;
                while sender.window.failed_trials == 0 && sender.ns < before + 20_000_000 {
                    sender.run(1, cost);
                }
                // A trial of the largest one that fails by chance is repeated after 32,768 samples.
                sender.run(120_000, cost);
                let (found, best) = (sender.run(20_000, cost), best(bytes_max, cost));
                assert!(
                    found > 0.9 * best,
                    "{costs:?}, up to {bytes_max}: {found} of {best} at {}",
                    sender.window.bytes
                );
            }
        }
    }

    #[test]
    fn a_window_worth_twice_the_rate_is_found_within_20_ms() {
        for ns in [30_000, 100_000, 200_000] {
            let mut sender = Simulated::new(RESIDENT_MAX);
            let begun = sender.ns;
            while sender.ns < begun + 20_000_000 {
                sender.run(1, |bytes| if bytes > WINDOW { ns / 2 } else { ns });
            }
            let found = sender.run(200, |bytes| if bytes > WINDOW { 1 } else { 1000 });
            assert!(sender.window.bytes > WINDOW && found > 1.0, "{ns} ns: {found}");
        }
    }

    #[test]
    fn a_stream_that_is_not_saturated_keeps_the_small_window() {
        let mut sender = Simulated::new(RESIDENT_MAX);
        // A slow sample, and then one whose receiver has emptied the lane.
        for _ in 0..10_000 {
            sender.sent += SAMPLE;
            sender.ns += 1_500_000;
            assert_eq!(sender.window.sample(sender.sent, Keeps::Up, sender.ns), WINDOW);
            sender.sent += SAMPLE;
            sender.ns += WAITING_NS + 1;
            assert_eq!(sender.window.sample(sender.sent, Keeps::Waiting, sender.ns), WINDOW);
        }
    }

    #[test]
    fn serial_calls_use_the_window_that_makes_them_faster() {
        for (larger_ns, is_faster) in [(WAITING_NS / 3, true), (WAITING_NS, false)] {
            let mut sender = Simulated::new(4 << 20);
            let (mut tried, mut new, mut at_larger) = (false, 16u32, 0);
            for _ in 0..4_000 {
                // The pages of the larger window are new at first: slower than the bound of the small window.
                new = if sender.window.bytes > WINDOW { new.saturating_sub(1) } else { 16 };
                let larger_ns = if new > 0 { 3 * WAITING_NS } else { larger_ns };
                sender.sent += SAMPLE;
                sender.ns += if sender.window.bytes > WINDOW { larger_ns } else { WAITING_NS / 2 };
                let bytes = sender.window.sample(sender.sent, Keeps::Waiting, sender.ns);
                tried |= bytes > WINDOW;
                at_larger += u32::from(bytes > WINDOW);
            }
            assert!(tried && (at_larger > 2_000) == is_faster, "{at_larger} of 4,000 samples with the larger window");
        }
    }

    #[test]
    fn a_pause_or_a_slower_stream_shrinks_the_window() {
        let larger_is_better = |bytes: u64| if bytes > WINDOW { 30_000 } else { 90_000 };
        let mut sender = Simulated::new(RESIDENT_MAX);
        for interval in [PAUSE_NS + 1, 5_000_000] {
            sender.run(1_000, larger_is_better);
            assert!(sender.window.bytes > WINDOW);
            for _ in 0..if interval > PAUSE_NS { 1 } else { UNSATURATED } {
                sender.ns += interval;
                sender.sent += SAMPLE;
                sender.window.sample(sender.sent, Keeps::Up, sender.ns);
            }
            assert_eq!(sender.window.bytes, WINDOW);
        }
    }

    #[test]
    fn memory_outside_the_window_is_released_once_per_use() {
        let mut sender = Simulated::new(RESIDENT_MAX);
        // Memory that a predecessor may have left.
        let first = (0..EXCESS_OF_A_PAUSE).filter(|_| {
            sender.run(1, |_| 50_000);
            sender.window.take_excess()
        });
        assert_eq!(first.count(), 1);
        let (mut shrunk, mut given_back, mut before) = (0, 0, sender.window.bytes);
        for n in 0..300_000 {
            sender.run(1, |_| 50_000);
            shrunk += u32::from(sender.window.bytes < before);
            before = sender.window.bytes;
            // Trials in quick succession cause only one release.
            given_back += u32::from(sender.window.take_excess());
            assert!(!sender.window.take_excess() && given_back <= shrunk, "{n}");
        }
        assert!((2..shrunk).contains(&given_back), "{given_back} of {shrunk}");
        // After a pause, the next sample releases it.
        while sender.window.bytes == WINDOW {
            sender.run(1, |_| 50_000);
        }
        assert!(!sender.window.is_pause_overdue(|| sender.ns + PAUSE_NS));
        sender.ns += PAUSE_NS;
        assert!(sender.window.is_pause_overdue(|| sender.ns + 1));
        sender.run(1, |_| 50_000);
        assert!(sender.window.take_excess() && sender.window.bytes == WINDOW && sender.window.taken == 0);
    }

    #[test]
    fn a_smaller_window_is_not_judged_while_the_lane_extends_beyond_it() {
        let mut sender = Simulated::new(4 << 20);
        let larger_is_better = |bytes: u64| if bytes > WINDOW { 30_000 } else { 90_000 };
        sender.run(1_000, larger_is_better);
        while sender.window.bytes > WINDOW {
            sender.run(1, larger_is_better);
        }
        // As fast as before, because the smaller window is not in effect yet.
        let samples = (1..100).find(|_| {
            sender.sent += SAMPLE;
            sender.ns += 30_000;
            sender.window.sample(sender.sent, Keeps::Behind, sender.ns) > WINDOW
        });
        assert!(samples.is_some_and(|samples| samples <= SETTLE + 4), "{samples:?}");
    }

    #[test]
    fn the_largest_window_is_tried_only_in_a_long_stream() {
        let larger_is_better = |bytes: u64| 100_000_000_000 / bytes;
        let mut sender = Simulated::new(RESIDENT_MAX);
        sender.run(10_000, |bytes| {
            assert!(bytes <= LEVELS[1]);
            larger_is_better(bytes)
        });
        sender.run(30_000, larger_is_better);
        assert_eq!(sender.window.bytes, RESIDENT_MAX);
    }

    #[test]
    fn a_refused_window_is_not_tried_again() {
        let mut sender = Simulated::new(RESIDENT_MAX);
        while sender.window.bytes == WINDOW {
            sender.run(1, |_| 50_000);
        }
        sender.window.refuse(WINDOW);
        sender.run(100_000, |bytes| {
            assert_eq!(bytes, WINDOW);
            50_000
        });
        // Refused at a larger window: the window can still shrink.
        let mut sender = Simulated::new(RESIDENT_MAX);
        while sender.window.bytes < RESIDENT_MAX {
            sender.run(1, |bytes| 100_000_000_000 / bytes);
        }
        sender.window.refuse(4 << 20);
        sender.run(1_000, |bytes| {
            assert!(bytes <= 4 << 20);
            50_000
        });
        assert_eq!(sender.window.shrink(), WINDOW);
    }

    #[test]
    fn all_senders_of_a_process_together_are_bounded_until_their_memory_is_released() {
        let in_use: &AtomicU64 = Box::leak(Box::default());
        let larger_is_better = |bytes: u64| 100_000_000_000 / bytes;
        let mut senders: Vec<_> = (0..40).map(|_| Simulated::with(in_use, RESIDENT_MAX)).collect();
        for sender in &mut senders {
            sender.run(2_000, larger_is_better);
        }
        let sum: u64 = senders.iter().map(|sender| sender.window.bytes - WINDOW).sum();
        assert!(sum <= PROCESS_MAX && sum > PROCESS_MAX - RESIDENT_MAX, "{sum}");
        assert_eq!(in_use.load(Relaxed), sum);
        for sender in &mut senders {
            assert_eq!(sender.window.shrink(), WINDOW);
        }
        assert_eq!(in_use.load(Relaxed), sum);
        let released = senders.iter_mut().filter(|sender| sender.window.taken > 0);
        for sender in released {
            while !sender.window.take_excess() {
                sender.run(1, |_| 50_000);
            }
        }
        let left: u64 = senders.iter().map(|sender| sender.window.taken).sum();
        assert_eq!((in_use.load(Relaxed), left), (0, 0));
        let mut after = Simulated::with(in_use, RESIDENT_MAX);
        after.run(40_000, larger_is_better);
        assert_eq!(after.window.bytes, RESIDENT_MAX);
        assert_eq!(in_use.load(Relaxed), RESIDENT_MAX - WINDOW);
        drop((senders, after));
        assert_eq!(in_use.load(Relaxed), 0);
    }
}
