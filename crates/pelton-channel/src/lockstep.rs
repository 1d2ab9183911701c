//! When a receiver yields before it sleeps. If it shares a processor with its sender, its wake-up preempts the
//! sender, and the receiver finds only the message that rang: two context switches per message, in lockstep. While
//! the receiver yields instead, without announcing a sleep, the sender runs and rings nobody.

use std::time::Duration;

/// The yields of one receiver.
#[derive(Debug, Default)]
pub(crate) struct Lockstep {
    /// The next message's number at the last wait, and the bytes of all before.
    last: u32,
    last_bytes: u64,
    /// The duration of the yield at the last wait, if it brought a message.
    yielded: Option<Duration>,
    /// The yields in a row that brought many messages.
    paid: u32,
    /// Waits left without a yield, and the failed yields in a row.
    rest: u32,
    failed: u32,
}

/// After so few messages since the last wait, a yield may pay.
const LOCKSTEP_RUN: u32 = 4;
/// A yield pays if the receiver finds at least this many messages, and, because beside load it may cost a time slice,
/// one more for each of this time. A paced stream does not send so many meanwhile. Large messages count as one for each
/// `YIELD_BYTES`: a sender pauses before so many of them are in the lane. Guesses.
const YIELD_RUN_MIN: u64 = 64;
const YIELD_TIME_PER_MESSAGE: Duration = Duration::from_micros(2);
const YIELD_BYTES: u64 = 4096;
/// After this many yields in a row the receiver sleeps once: the ring shows whether the sender is still here.
const YIELDS_PER_SLEEP: u32 = 64;
/// Waits without a yield after one that failed. Each further failure doubles them, at most this many times. A guess: in
/// a round trip, where each yield fails, 11 of the first 16,000 waits yield.
const YIELD_REST: u32 = 16;
const YIELD_DOUBLINGS_MAX: u32 = 10;

impl Lockstep {
    /// Whether to yield before this wait. `seq`: the number of the next message; all earlier ones are released, and had
    /// so many `bytes`.
    pub(crate) fn must_yield(&mut self, seq: u32, bytes: u64) -> bool {
        let (run, run_bytes) = (seq.wrapping_sub(self.last), bytes.wrapping_sub(self.last_bytes));
        (self.last, self.last_bytes) = (seq, bytes);
        if let Some(took) = self.yielded.take() {
            let least = took.as_nanos() / YIELD_TIME_PER_MESSAGE.as_nanos();
            let found = u64::from(run).max(run_bytes / YIELD_BYTES);
            if run > LOCKSTEP_RUN && found >= YIELD_RUN_MIN && u128::from(found) >= least {
                (self.paid, self.failed) = (self.paid + 1, 0);
            } else {
                self.has_failed();
            }
        }
        if self.rest > 0 {
            self.rest -= 1;
            return false;
        }
        if self.paid > YIELDS_PER_SLEEP {
            self.paid = 1;
            return false;
        }
        self.paid > 0 || run <= LOCKSTEP_RUN
    }

    /// The yield has taken that long. `has_message`: there was one right after it.
    pub(crate) fn has_yielded(&mut self, took: Duration, has_message: bool) {
        match has_message {
            true => self.yielded = Some(took),
            false => self.has_failed(),
        }
    }

    fn has_failed(&mut self) {
        self.paid = 0;
        self.rest = YIELD_REST << self.failed;
        self.failed = (self.failed + 1).min(YIELD_DOUBLINGS_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_micros(10);

    #[test]
    fn a_receiver_in_lockstep_yields_while_that_brings_many_messages() {
        for first in [0, u32::MAX - 1000] {
            let (mut lockstep, mut seq, mut yields) = (Lockstep::default(), first, 0);
            for _ in 0..1000 {
                let must = lockstep.must_yield(seq, 0);
                if must {
                    lockstep.has_yielded(SHORT, true);
                }
                yields += u32::from(must);
                seq = seq.wrapping_add(if must { 5000 } else { 1 });
            }
            assert!((970..1000).contains(&yields), "{yields}: it sleeps now and then");
        }
    }

    #[test]
    fn a_receiver_whose_yields_bring_nothing_seldom_yields() {
        // No message right after it; few; not many for a time slice. More come before the next wait in each case.
        for (took, has_message, run) in [(SHORT, false, 5000), (SHORT, true, 1), (Duration::from_millis(3), true, 100)]
        {
            let (mut lockstep, mut seq, mut yields) = (Lockstep::default(), 0u32, 0);
            for _ in 0..100_000 {
                let must = lockstep.must_yield(seq, 0);
                if must {
                    lockstep.has_yielded(took, has_message);
                }
                yields += u32::from(must);
                seq = seq.wrapping_add(if must { run } else { 1 });
            }
            assert!((8..30).contains(&yields), "{yields}");
            // A stream begins: after the rest, nearly each wait yields.
            let mut yields = 0;
            for wait in 0..(YIELD_REST << YIELD_DOUBLINGS_MAX) + 1000 {
                let must = lockstep.must_yield(seq, 0);
                if must {
                    lockstep.has_yielded(SHORT, true);
                }
                yields += u32::from(must && wait >= YIELD_REST << YIELD_DOUBLINGS_MAX);
                seq = seq.wrapping_add(if must { 5000 } else { 1 });
            }
            assert!(yields > 970, "{yields}");
        }
    }

    #[test]
    fn few_large_messages_count_as_many() {
        // A sender of 64 KiB that pauses after 2 MiB; then a request and its reply, by turns.
        for (run, wanted) in [(31, 970..1000), (1, 0..40)] {
            let (mut lockstep, mut seq, mut yields) = (Lockstep::default(), 0u32, 0);
            for _ in 0..1000 {
                let must = lockstep.must_yield(seq, u64::from(seq) * 65536);
                if must {
                    lockstep.has_yielded(SHORT, true);
                }
                yields += u32::from(must);
                seq += if must { run } else { 1 };
            }
            assert!(wanted.contains(&yields), "{yields} with {run}");
        }
    }
}
