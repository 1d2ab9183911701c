//! Adaptive backoff of a polling receiver.
//!
//! A receiver that is as fast as its sender polls each header just before it is written, and reads cache lines that the
//! sender is about to write. Each such poll takes the ownership of a line. The sender has to fetch it back, and becomes
//! as slow as the transfer latency. A receiver that polls later after an empty poll can make the stream faster by half
//! and more. Whether it does cannot be computed here, but it can be tried: a backoff is kept only where it brings more
//! messages.

use pelton_os as os;

/// A backoff: pauses (some 10 to 40 ns each) after an empty poll, and empty polls until its effect is known.
const LEVELS: [(u32, u32); 5] = [(0, 128), (8, 64), (32, 32), (128, 16), (512, 16)];
/// Empty polls between two trials, without a backoff, and with one; doubled after each trial that failed, at most so
/// often.
const REST: u32 = 4;
const PATIENCE_MAX: [u32; 2] = [8, 4];
/// A receiver with a backoff finds at least so many messages, or the backoff is useless. After a success one failure
/// may be chance, as when the sender was delayed itself; two in a row are not.
const RUN_MIN: u32 = 2;
/// A sender that sends nothing for so long is not delayed by polls.
const SLOW_NS: u64 = 2_000;

/// What a receiver has found out about its backoff.
#[derive(Debug)]
pub(super) struct Distance {
    level: usize,
    phase: Phase,
    /// Empty polls until the phase is over.
    left: u32,
    patience: u32,
    /// The next number at the last empty poll, and whether that came too soon after the one before.
    last: u32,
    was_short: bool,
    /// The level that was tried last.
    tried: usize,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    Rest,
    /// The present rate.
    Measuring(Moment),
    /// The rate at another level, to be compared.
    Trying {
        since: Moment,
        from: usize,
        before: Rate,
    },
}

#[derive(Clone, Copy, Debug)]
struct Moment {
    seq: u32,
    ns: u64,
}

#[derive(Clone, Copy, Debug)]
struct Rate {
    messages: u64,
    ns: u64,
}

impl Moment {
    fn rate_since(self, start: Moment) -> Rate {
        Rate { messages: self.seq.wrapping_sub(start.seq).into(), ns: self.ns.saturating_sub(start.ns) }
    }
}

impl Rate {
    /// By more than an eighth.
    fn is_better_than(self, other: Rate) -> bool {
        self.messages as u128 * other.ns as u128 * 8 > other.messages as u128 * self.ns as u128 * 9
    }
}

impl Distance {
    pub(super) fn new() -> Distance {
        Distance { level: 0, phase: Phase::Rest, left: LEVELS[0].1, patience: 0, last: 0, was_short: false, tried: 0 }
    }

    /// The lane is empty, and `seq` is the next message's number, all before it released. Returns the number of pauses
    /// before the next poll.
    #[inline(always)]
    pub(super) fn found_nothing(&mut self, seq: u32) -> u32 {
        self.found_nothing_at(seq, os::monotonic_ns)
    }

    #[inline(always)]
    fn found_nothing_at(&mut self, seq: u32, now: impl FnOnce() -> u64) -> u32 {
        let run = seq.wrapping_sub(self.last);
        if run == 0 {
            // The second empty poll of one wait, which was over too soon for the message: the backoff was applied
            // already.
            return 0;
        }
        self.last = seq;
        self.left -= 1;
        let is_short = self.level > 0 && run < RUN_MIN;
        let in_vain = is_short && (self.was_short || matches!(self.phase, Phase::Trying { .. }));
        self.was_short = is_short;
        if self.left == 0 || in_vain {
            self.turn(in_vain, Moment { seq, ns: now() });
        }
        LEVELS[self.level].0
    }

    #[cold]
    #[inline(never)]
    fn turn(&mut self, in_vain: bool, now: Moment) {
        if in_vain {
            let (level, has_paid) = match self.phase {
                Phase::Trying { from, .. } => (from, false),
                Phase::Rest | Phase::Measuring(_) => (0, true),
            };
            self.level = level;
            self.was_short = false;
            return self.rest(has_paid);
        }
        match self.phase {
            Phase::Rest => self.begin(Phase::Measuring(now)),
            Phase::Measuring(since) => {
                let before = now.rate_since(since);
                match self.level == 0 && before.ns > SLOW_NS * u64::from(LEVELS[0].1) {
                    true => self.rest(false),
                    false => self.try_another(before, now),
                }
            }
            Phase::Trying { since, from, before } => {
                let after = now.rate_since(since);
                let pays = match from < self.level {
                    true => after.is_better_than(before),
                    false => !before.is_better_than(after),
                };
                if !pays {
                    self.level = from;
                }
                self.rest(pays);
            }
        }
    }

    fn begin(&mut self, phase: Phase) {
        self.phase = phase;
        self.left = LEVELS[self.level].1;
    }

    /// Alternates.
    fn try_another(&mut self, before: Rate, since: Moment) {
        let next = |level: usize| (level + 1) % LEVELS.len();
        self.tried = next(self.tried);
        if self.tried == self.level {
            self.tried = next(self.tried);
        }
        let from = std::mem::replace(&mut self.level, self.tried);
        self.begin(Phase::Trying { since, from, before });
    }

    fn rest(&mut self, has_paid: bool) {
        let longest = PATIENCE_MAX[usize::from(self.level > 0)];
        self.patience = if has_paid { 0 } else { (self.patience + 1).min(longest) };
        self.phase = Phase::Rest;
        self.left = (LEVELS[self.level].1 * REST) << self.patience;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// About the time of a pause.
    const PAUSE_NS: u64 = 28;

    /// A receiver with this number of empty polls, beside a sender of so many messages in so many nanoseconds after so
    /// many pauses. Returns the nanoseconds in all, and those of them that were pauses.
    fn run(distance: &mut Distance, seq: &mut u32, times: u32, sender: impl Fn(u32) -> (u32, u64)) -> (u64, u64) {
        let (mut now, mut paused) = (0, 0);
        for _ in 0..times {
            let pauses = distance.found_nothing_at(*seq, || now);
            let (messages, ns) = sender(pauses);
            *seq = seq.wrapping_add(messages);
            now += ns;
            paused += u64::from(pauses) * PAUSE_NS;
        }
        (now, paused)
    }

    /// A sender that polls delay: 120 ns a message; and 15 ns without polls.
    fn held_up(pauses: u32) -> (u32, u64) {
        let ns = u64::from(pauses) * PAUSE_NS;
        ((1 + ns / 15) as u32, 120 + ns)
    }

    #[test]
    fn a_sender_that_looks_hold_up_is_left_alone() {
        for first in [0, u32::MAX - 100] {
            let (mut distance, mut seq) = (Distance::new(), first);
            run(&mut distance, &mut seq, 20_000, held_up);
            let before = seq;
            let (ns, _) = run(&mut distance, &mut seq, 20_000, held_up);
            let each = ns as f64 / f64::from(seq.wrapping_sub(before));
            assert!(each < 20.0, "{each} ns a message: level {}", distance.level);
        }
    }

    #[test]
    fn a_trial_in_vain_leaves_the_distance_that_has_paid() {
        let (mut distance, mut seq) = (Distance::new(), 0);
        // The shortest backoff is one at which this sender has only just begun.
        let looks_at_once = std::cell::Cell::new(0);
        let sender = |pauses: u32| {
            looks_at_once.set(looks_at_once.get() + u32::from(pauses == 0));
            if pauses == LEVELS[1].0 { (1, 300) } else { held_up(pauses) }
        };
        run(&mut distance, &mut seq, 20_000, sender);
        looks_at_once.set(0);
        run(&mut distance, &mut seq, 20_000, sender);
        // Trials without a backoff take that many.
        assert!(looks_at_once.get() < 3_000, "{} of 20000", looks_at_once.get());
        // What ended the trial does not count against that one either.
        let (since, before) = (Moment { seq, ns: 0 }, Rate { messages: 1, ns: 1 });
        distance.begin(Phase::Trying { since, from: 3, before });
        (distance.level, distance.was_short, distance.last) = (1, false, seq);
        for _ in 0..2 {
            seq = seq.wrapping_add(1);
            distance.found_nothing_at(seq, || 0);
            assert_eq!(distance.level, 3);
        }
    }

    #[test]
    fn a_sender_of_its_own_pace_is_answered_at_once() {
        for pace in [150, 1_000, 50_000] {
            let (mut distance, mut seq) = (Distance::new(), 0);
            let sender = |pauses: u32| {
                let messages = (u64::from(pauses) * PAUSE_NS).div_ceil(pace).max(1);
                (messages as u32, messages * pace)
            };
            run(&mut distance, &mut seq, 10_000, sender);
            let (ns, paused) = run(&mut distance, &mut seq, 200_000, sender);
            assert!(paused * 50 < ns, "one message each {pace} ns: paused {paused} of {ns}");
        }
    }

    #[test]
    fn a_round_trip_is_not_made_longer() {
        let (mut distance, mut seq) = (Distance::new(), 0);
        let (ns, paused) = run(&mut distance, &mut seq, 100_000, |pauses| (1, 150 + u64::from(pauses) * PAUSE_NS));
        assert!(paused * 500 < ns, "paused {paused} of {ns}");
    }

    #[test]
    fn who_asks_again_in_one_wait_or_finds_little_once_keeps_its_distance() {
        let (mut distance, mut seq) = (Distance::new(), 0);
        run(&mut distance, &mut seq, 20_000, held_up);
        let asked_twice = |distance: &mut Distance, seq: u32| {
            assert_ne!(distance.found_nothing_at(seq, || 0), 0);
            assert_eq!(distance.found_nothing_at(seq, || 0), 0);
        };
        // A rest is longer than this.
        distance.rest(true);
        for _ in 0..20 {
            seq = seq.wrapping_add(1);
            asked_twice(&mut distance, seq);
            seq = seq.wrapping_add(100);
            asked_twice(&mut distance, seq);
        }
        assert!(distance.level > 0);
    }

    #[test]
    fn a_distance_is_given_up_when_hardly_anything_comes() {
        let (mut distance, mut seq) = (Distance::new(), 0);
        run(&mut distance, &mut seq, 20_000, held_up);
        assert!(distance.level > 0);
        let (_, paused) = run(&mut distance, &mut seq, 1_000, |_| (1, 100_000));
        assert!(paused <= 3 * u64::from(LEVELS[4].0) * PAUSE_NS, "paused {paused}");
        assert_eq!(distance.level, 0);
    }
}
