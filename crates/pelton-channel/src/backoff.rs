//! Adaptive backoff of a polling receiver.
//!
//! A receiver that is as fast as its sender polls each header just before the sender writes it. Each such poll takes
//! the ownership of a cache line that the sender is about to write. The sender has to fetch the line back, which limits
//! it to one message per transfer latency. A pause after an empty poll can raise the throughput by half and more. The
//! receiver cannot compute whether it does, so it tries: it keeps a backoff only if that brings more messages.

use pelton_os as os;

/// The levels of backoff: pauses (some 10 to 40 ns each) after an empty poll, and the empty polls of one measurement.
const LEVELS: [(u32, u32); 5] = [(0, 128), (8, 64), (32, 32), (128, 16), (512, 16)];
/// Between two trials, the measurement's number of empty polls times this. Each failed trial doubles it.
const REST: u32 = 4;
/// The most doublings, without and with a backoff.
const DOUBLINGS_MAX: [u32; 2] = [8, 4];
/// After backing off, the receiver must find at least this many messages; otherwise the backoff has no benefit. One
/// failure after a success may be chance, because the sender was delayed. Two in a row end the backoff.
const RUN_MIN: u32 = 2;
/// A lap of as many bytes is in a larger window, half of the second smallest, or of a backlog. In the smallest one a
/// backoff of 20 µs makes laps of some 700 KB, at 20 GB/s.
const LONG_LAP: u64 = 2 << 20;
/// Polls do not delay a sender that takes longer than this for a message.
const SLOW_NS: u64 = 2_000;

/// The backoff of one receiver, and the state of its trials.
#[derive(Debug)]
pub(crate) struct Backoff {
    level: usize,
    phase: Phase,
    /// Empty polls left in this phase.
    left: u32,
    /// Failed trials in a row, at most `DOUBLINGS_MAX`.
    doublings: u32,
    /// The next message's number at the last empty poll, and whether fewer than `RUN_MIN` messages came before it.
    last: u32,
    was_short: bool,
    /// The level of the last trial.
    tried: usize,
    /// The next message's offset in the lane at the last empty poll, and whether the last lap was a long one.
    offset: u64,
    was_long_lap: bool,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    Rest,
    /// Measures the rate at the current level.
    Measuring(Moment),
    /// Uses a shorter backoff than at `from`, and does not measure yet: at first it still finds as many messages as the
    /// longer one.
    Settling {
        from: usize,
        before: Rate,
    },
    /// Measures the rate at another level than `from`, for comparison with `before`.
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
    /// Whether it is higher by more than an eighth.
    fn is_better_than(self, other: Rate) -> bool {
        self.messages as u128 * other.ns as u128 * 8 > other.messages as u128 * self.ns as u128 * 9
    }
}

impl Backoff {
    pub(crate) fn new() -> Backoff {
        Backoff {
            level: 0,
            phase: Phase::Rest,
            left: LEVELS[0].1,
            doublings: 0,
            last: 0,
            was_short: false,
            tried: 0,
            offset: 0,
            was_long_lap: false,
        }
    }

    /// Call this after an empty poll. `seq` counts the messages so far, of all lanes; its start does not matter.
    /// `offset`: where the next message will be in its lane; 0 for several lanes. Returns the number of pauses before
    /// the next poll.
    #[inline(always)]
    pub(crate) fn next_pauses(&mut self, seq: u32, offset: u64) -> u32 {
        self.next_pauses_at(seq, offset, os::monotonic_ns)
    }

    #[inline(always)]
    fn next_pauses_at(&mut self, seq: u32, offset: u64, now: impl FnOnce() -> u64) -> u32 {
        let run = seq.wrapping_sub(self.last);
        if run == 0 {
            // The second empty poll of one wait: the backoff was too short for the message. It is not applied twice.
            return 0;
        }
        self.last = seq;
        if offset < self.offset {
            self.end_lap();
        }
        self.offset = offset;
        self.left -= 1;
        let is_short = self.level > 0 && run < RUN_MIN;
        let has_failed =
            is_short && (self.was_short || matches!(self.phase, Phase::Settling { .. } | Phase::Trying { .. }));
        self.was_short = is_short;
        if self.left == 0 || has_failed {
            self.end_phase(has_failed, Moment { seq, ns: now() });
        }
        LEVELS[self.level].0
    }

    /// The lane begins again at its front. If the sender tries a larger window, the receiver tries a backoff soon,
    /// however seldom it did before: some windows are faster only with one. After a backlog it does so too.
    #[cold]
    #[inline(never)]
    fn end_lap(&mut self) {
        let is_long = self.offset >= LONG_LAP;
        if is_long && !self.was_long_lap {
            if let Phase::Settling { from, .. } | Phase::Trying { from, .. } = self.phase {
                (self.level, self.was_short) = (from, false);
            }
            (self.phase, self.left, self.tried) = (Phase::Rest, LEVELS[self.level].1, 0);
        }
        self.was_long_lap = is_long;
    }

    #[cfg(test)]
    pub(crate) fn is_after_long_lap(&self) -> bool {
        self.was_long_lap
    }

    #[cold]
    #[inline(never)]
    fn end_phase(&mut self, has_failed: bool, now: Moment) {
        if has_failed {
            let (level, has_paid) = match self.phase {
                Phase::Settling { from, .. } | Phase::Trying { from, .. } => (from, false),
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
            Phase::Settling { from, before } => self.begin(Phase::Trying { since: now, from, before }),
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

    /// Begins a trial of the next level, in turn from the longest.
    fn try_another(&mut self, before: Rate, since: Moment) {
        let next = |level: usize| (level + LEVELS.len() - 1) % LEVELS.len();
        self.tried = next(self.tried);
        if self.tried == self.level {
            self.tried = next(self.tried);
        }
        let from = std::mem::replace(&mut self.level, self.tried);
        self.begin(match from > self.level {
            true => Phase::Settling { from, before },
            false => Phase::Trying { since, from, before },
        });
    }

    fn rest(&mut self, has_paid: bool) {
        let most = DOUBLINGS_MAX[usize::from(self.level > 0)];
        self.doublings = if has_paid { 0 } else { (self.doublings + 1).min(most) };
        self.phase = Phase::Rest;
        self.left = (LEVELS[self.level].1 * REST) << self.doublings;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The approximate duration of a pause.
    const PAUSE_NS: u64 = 28;

    /// Simulates `times` empty polls. `sender` returns for a number of pauses the messages that follow, and their
    /// nanoseconds. Returns the nanoseconds in all, and those of the pauses.
    fn run(backoff: &mut Backoff, seq: &mut u32, times: u32, sender: impl Fn(u32) -> (u32, u64)) -> (u64, u64) {
        let (mut now, mut paused) = (0, 0);
        for _ in 0..times {
            let pauses = backoff.next_pauses_at(*seq, 0, || now);
            let (messages, ns) = sender(pauses);
            *seq = seq.wrapping_add(messages);
            now += ns;
            paused += u64::from(pauses) * PAUSE_NS;
        }
        (now, paused)
    }

    /// A sender that takes 15 ns for a message, and 120 ns after a poll.
    fn delayed_by_polls(pauses: u32) -> (u32, u64) {
        let ns = u64::from(pauses) * PAUSE_NS;
        ((1 + ns / 15) as u32, 120 + ns)
    }

    #[test]
    fn a_sender_that_polls_delay_gets_a_receiver_that_backs_off() {
        for first in [0, u32::MAX - 100] {
            let (mut backoff, mut seq) = (Backoff::new(), first);
            run(&mut backoff, &mut seq, 20_000, delayed_by_polls);
            let before = seq;
            let (ns, _) = run(&mut backoff, &mut seq, 20_000, delayed_by_polls);
            let each = ns as f64 / f64::from(seq.wrapping_sub(before));
            assert!(each < 20.0, "{each} ns a message: level {}", backoff.level);
        }
    }

    #[test]
    fn a_failed_trial_keeps_the_backoff_that_has_paid() {
        let (mut backoff, mut seq) = (Backoff::new(), 0);
        // With the shortest backoff, this sender has only one message ready.
        let polls_without_pause = std::cell::Cell::new(0);
        let sender = |pauses: u32| {
            polls_without_pause.set(polls_without_pause.get() + u32::from(pauses == 0));
            if pauses == LEVELS[1].0 { (1, 300) } else { delayed_by_polls(pauses) }
        };
        run(&mut backoff, &mut seq, 20_000, sender);
        polls_without_pause.set(0);
        run(&mut backoff, &mut seq, 20_000, sender);
        // The trials without a backoff take that many polls.
        assert!(polls_without_pause.get() < 3_000, "{} of 20000", polls_without_pause.get());
        // The failure of the trial does not count against the level that the receiver returns to.
        let (since, before) = (Moment { seq, ns: 0 }, Rate { messages: 1, ns: 1 });
        backoff.begin(Phase::Trying { since, from: 3, before });
        (backoff.level, backoff.was_short, backoff.last) = (1, false, seq);
        for _ in 0..2 {
            seq = seq.wrapping_add(1);
            backoff.next_pauses_at(seq, 0, || 0);
            assert_eq!(backoff.level, 3);
        }
    }

    #[test]
    fn a_shorter_backoff_is_measured_after_the_receiver_has_caught_up() {
        let (mut backoff, mut seq) = (Backoff::new(), 0);
        // The sender has gone ahead while the receiver paused. So the next 100 polls without a pause find as much.
        let (ahead, slow_polls) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
        let sender = |pauses: u32| {
            ahead.set(if pauses > 0 { 100 } else { ahead.get() - i32::from(ahead.get() > 0) });
            slow_polls.set(slow_polls.get() + u32::from(ahead.get() == 0));
            if ahead.get() > 0 { delayed_by_polls(LEVELS[2].0) } else { (1, 200) }
        };
        run(&mut backoff, &mut seq, 20_000, sender);
        slow_polls.set(0);
        run(&mut backoff, &mut seq, 20_000, sender);
        assert!(slow_polls.get() < 2_000, "{} of 20000", slow_polls.get());
    }

    /// An empty poll, after a message, at `offset` of the lane. Returns the pauses.
    fn poll_at(backoff: &mut Backoff, offset: u64) -> u32 {
        backoff.next_pauses_at(backoff.last.wrapping_add(1), offset, || 0)
    }

    fn end_lap_at(backoff: &mut Backoff, offset: u64) {
        poll_at(backoff, offset);
        poll_at(backoff, 0);
    }

    #[test]
    fn the_first_long_lap_begins_a_trial_of_the_longest_backoff_soon() {
        let mut backoff = Backoff::new();
        backoff.rest(false);
        backoff.tried = 2;
        // The usual window, and a backlog in it.
        end_lap_at(&mut backoff, LONG_LAP - 1);
        assert!(backoff.left > 2 * LEVELS[0].1);
        end_lap_at(&mut backoff, LONG_LAP);
        let pauses: Vec<u32> = (0..2 * LEVELS[0].1).map(|_| poll_at(&mut backoff, 0)).collect();
        assert_eq!(pauses.iter().find(|pauses| **pauses > 0), Some(&LEVELS[4].0));
        // The second long lap changes nothing, the first one after a short one does.
        backoff.rest(false);
        end_lap_at(&mut backoff, LONG_LAP);
        assert!(backoff.left > 2 * LEVELS[0].1);
        end_lap_at(&mut backoff, LONG_LAP - 1);
        end_lap_at(&mut backoff, LONG_LAP);
        assert!(backoff.left <= LEVELS[0].1);
    }

    #[test]
    fn a_trial_that_a_long_lap_ends_leads_back() {
        let (since, before) = (Moment { seq: 0, ns: 0 }, Rate { messages: 1, ns: 1 });
        for (from, level, phase) in [
            (0, 4, Phase::Trying { since, from: 0, before }),
            (4, 0, Phase::Settling { from: 4, before }),
            (4, 0, Phase::Trying { since, from: 4, before }),
        ] {
            let mut backoff = Backoff::new();
            backoff.level = level;
            backoff.begin(phase);
            backoff.offset = LONG_LAP;
            backoff.last = u32::MAX - 100;
            backoff.next_pauses_at(0, 0, || 0);
            assert!(backoff.level == from && backoff.left < LEVELS[from].1 && matches!(backoff.phase, Phase::Rest));
        }
    }

    #[test]
    fn a_slow_sender_gets_a_receiver_without_backoff() {
        for interval in [150, 1_000, 50_000] {
            let (mut backoff, mut seq) = (Backoff::new(), 0);
            let sender = |pauses: u32| {
                let messages = (u64::from(pauses) * PAUSE_NS).div_ceil(interval).max(1);
                (messages as u32, messages * interval)
            };
            run(&mut backoff, &mut seq, 10_000, sender);
            let (ns, paused) = run(&mut backoff, &mut seq, 200_000, sender);
            assert!(paused * 50 < ns, "one message each {interval} ns: paused {paused} of {ns}");
        }
    }

    #[test]
    fn a_round_trip_is_not_made_longer() {
        let (mut backoff, mut seq) = (Backoff::new(), 0);
        let (ns, paused) = run(&mut backoff, &mut seq, 100_000, |pauses| (1, 150 + u64::from(pauses) * PAUSE_NS));
        // The trials pause 512, 128, 32, 8, 512, 128 and 32 times.
        assert!(paused * 300 < ns, "paused {paused} of {ns}");
    }

    #[test]
    fn a_second_poll_in_one_wait_or_one_short_run_does_not_end_the_backoff() {
        let (mut backoff, mut seq) = (Backoff::new(), 0);
        run(&mut backoff, &mut seq, 20_000, delayed_by_polls);
        let poll_twice = |backoff: &mut Backoff, seq: u32| {
            assert_ne!(backoff.next_pauses_at(seq, 0, || 0), 0);
            assert_eq!(backoff.next_pauses_at(seq, 0, || 0), 0);
        };
        // Fewer polls than until the next trial.
        backoff.rest(true);
        for _ in 0..20 {
            seq = seq.wrapping_add(1);
            poll_twice(&mut backoff, seq);
            seq = seq.wrapping_add(100);
            poll_twice(&mut backoff, seq);
        }
        assert!(backoff.level > 0);
    }

    #[test]
    fn a_backoff_ends_when_the_sender_becomes_slow() {
        let (mut backoff, mut seq) = (Backoff::new(), 0);
        run(&mut backoff, &mut seq, 20_000, delayed_by_polls);
        assert!(backoff.level > 0);
        let (_, paused) = run(&mut backoff, &mut seq, 1_000, |_| (1, 100_000));
        assert!(paused <= 3 * u64::from(LEVELS[4].0) * PAUSE_NS, "paused {paused}");
        assert_eq!(backoff.level, 0);
    }
}
