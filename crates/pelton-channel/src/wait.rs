//! How a side waits: it spins briefly, then sleeps in poll on its doorbell and on the liveness of its peer.

use crate::error::Result;
use pelton_lane::failpoint;
use pelton_os::{self as os, Ready};
use std::time::{Duration, Instant};

/// How an operation waits. For the third way, the caller's own event loop, use the `try_` methods and `arm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Wait {
    /// Polls without sleeping. The lowest latency, for a whole processor; with one processor only, use `Block`. A
    /// receiver that keeps up with its sender's stream polls up to some 15 µs later while that brings more messages,
    /// with `Block` too.
    Spin,
    /// Spins for some microseconds, less when that was useless lately, then sleeps. With one processor it yields once
    /// instead.
    #[default]
    Block,
}

/// How long an operation may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deadline {
    /// Not at all.
    Now,
    /// Until then, on the monotonic clock.
    At(Instant),
    /// Without a limit.
    Never,
}

impl Deadline {
    /// For functions that take an instant or none: now, for one that does not wait.
    pub fn instant(self) -> Option<Instant> {
        match self {
            Deadline::Now => Some(Instant::now()),
            Deadline::At(instant) => Some(instant),
            Deadline::Never => None,
        }
    }

    /// `None`: not to wait. Else the instant, if there is one.
    #[doc(hidden)]
    pub fn until(self) -> Option<Option<Instant>> {
        match self {
            Deadline::Now => None,
            Deadline::At(deadline) => Some(Some(deadline)),
            Deadline::Never => Some(None),
        }
    }
}

/// One side of a channel and the condition that it waits for.
pub trait Side {
    /// Whether the condition holds. An error, the end of the channel too, ends the wait.
    fn look(&mut self) -> Result<bool>;
    /// Whether it may hold: a hint, by one load.
    fn may_be_ready(&self) -> bool;
    /// Announces a sleep. Returns false if the condition holds after all, and withdraws the announcement.
    fn arm(&mut self) -> Result<bool>;
    /// Withdraws the announcement.
    fn disarm(&mut self);
    /// A peer is gone, and [`Side::look`] was called since: an error if that is the end, true if the condition holds
    /// after all, false to go on waiting.
    fn end(&mut self) -> Result<bool>;
    /// Whether a sleep needs a bound of a millisecond.
    fn needs_timed_wait(&self) -> bool;
    /// Sleeps until a doorbell rings, a peer is gone, or the deadline.
    fn sleep(&mut self, deadline: Option<Instant>) -> Result<Ready>;
    /// A doorbell rang, for whatever reason: returns as [`Side::end`] does. `alone`: nothing else that is polled had an
    /// event.
    fn rung(&mut self, alone: bool) -> Result<bool>;
    /// Whether a peer is gone, checked at intervals.
    fn is_peer_known_gone(&mut self) -> Result<bool>;
    /// How long to spin before a sleep.
    fn spin(&mut self) -> &mut Spin;
}

/// A sleep costs some microseconds and a wake about as many: to spin for longer cannot pay.
const SPIN_MAX: Duration = Duration::from_micros(10);
/// Loads between two checks of the clock and of other reasons to end a wait, which cost as much as several loads.
const LOADS_PER_CLOCK: u32 = 32;
/// After this number of failed spins, the spins are shorter by this power of two: down to 1/16.
const SHORTEST: u32 = 4;
/// After this number of failed spins, one is long enough for a sleeping peer to wake and to reply: otherwise two sides
/// that wait for each other would go on sleeping once both slept. Soon after the first failure; later so rarely that it
/// costs 0.2 µs a sleep.
const LONG_AFTER: [u32; 2] = [1, 256];
/// After this number of failed spins, there is only one poll until the next long spin: the peer is slower than any
/// spin.
const NONE_AFTER: u32 = 16;
const SPIN_LONG: Duration = Duration::from_micros(50);

/// On one processor, a thread that yields before it sleeps lets its peer finish what it has, while a wake-up would
/// interrupt the peer at each message. But an unrelated thread then gets a time slice of milliseconds, where a woken
/// sleeper would run first. The clock shows that: after a yield that took longer, this number of waits do not yield,
/// doubled each time, up to this number of times.
const YIELD_MAX: Duration = Duration::from_micros(500);
const YIELD_REST: u32 = 1024;
const YIELD_PATIENCE_MAX: u32 = 6;

/// How long to spin before a sleep, by how useful spinning was lately.
#[derive(Debug)]
pub struct Spin {
    wait: Wait,
    one_processor: bool,
    /// Failed spins since one was useful, or was long.
    failed: u32,
    /// Waits that do not yield, and how often that was doubled.
    rest: u32,
    patience: u32,
}

impl Spin {
    /// For a side that waits so, with that peer.
    pub fn new(wait: Wait, peer: Option<pelton_os::Peer>) -> Spin {
        let mut spin = Spin { wait, one_processor: false, failed: 0, rest: 0, patience: 0 };
        spin.meet(peer);
        spin
    }

    /// The peer's processors matter too. Without a peer there is nothing to spin for.
    pub fn meet(&mut self, peer: Option<pelton_os::Peer>) {
        if let Some(peer) = peer {
            self.one_processor = !os::has_two_processors(peer.pid);
        }
    }

    fn longest(&self) -> Duration {
        match self.failed {
            failed if LONG_AFTER.contains(&failed) => SPIN_LONG,
            NONE_AFTER.. => Duration::ZERO,
            _ => self.shortened(SPIN_MAX),
        }
    }

    fn shortened(&self, most: Duration) -> Duration {
        most / (1 << self.failed.min(SHORTEST))
    }

    fn has_paid(&mut self) {
        let was_long = LONG_AFTER.contains(&self.failed);
        self.failed = if was_long { 0 } else { self.failed.min(SHORTEST).saturating_sub(1) };
    }

    fn has_failed(&mut self) {
        self.failed = if self.failed == LONG_AFTER[1] { SHORTEST } else { self.failed + 1 };
    }

    fn may_yield(&mut self) -> bool {
        let may = self.rest == 0;
        self.rest = self.rest.saturating_sub(1);
        may
    }

    fn has_yielded(&mut self, took: Duration) {
        if took > YIELD_MAX {
            self.rest = YIELD_REST << self.patience;
            self.patience = (self.patience + 1).min(YIELD_PATIENCE_MAX);
        } else {
            self.patience = self.patience.saturating_sub(1);
        }
    }

    /// Polls before the actual wait.
    #[inline(always)]
    pub fn first_looks(&self) -> u32 {
        if self.one_processor { 0 } else { LOADS_PER_CLOCK }
    }
}

/// Waits until the condition of `side` holds. Returns false at the deadline.
#[cold]
pub fn wait(side: &mut impl Side, deadline: Option<Instant>) -> Result<bool> {
    let spins_only = side.spin().wait == Wait::Spin;
    let one_processor = side.spin().one_processor;
    if spins_only || !one_processor {
        let mut until = None;
        loop {
            if look_often(side)? {
                return Ok(true);
            }
            // The clock is read late: most waits are over before.
            let now = Instant::now();
            if deadline.is_some_and(|deadline| now >= deadline) {
                return Ok(false);
            }
            if spins_only {
                if side.is_peer_known_gone()? && (side.look()? || side.end()?) {
                    return Ok(true);
                }
                if one_processor {
                    std::thread::yield_now();
                }
            } else if now >= *until.get_or_insert_with(|| now + side.spin().longest()) {
                break;
            }
        }
        side.spin().has_failed();
    } else if side.spin().may_yield() {
        let begun = Instant::now();
        std::thread::yield_now();
        let there = side.look()?;
        side.spin().has_yielded(begun.elapsed());
        if there {
            return Ok(true);
        }
    }
    loop {
        if !side.arm()? {
            return Ok(true);
        }
        failpoint("wait: armed");
        let nap = side.needs_timed_wait().then(|| Instant::now() + Duration::from_millis(1));
        let until = match (deadline, nap) {
            (Some(deadline), Some(nap)) => Some(deadline.min(nap)),
            (deadline, nap) => deadline.or(nap),
        };
        let ready = side.sleep(until);
        failpoint("wait: woken");
        side.disarm();
        let ready = ready?;
        if matches!(ready, Ready::Rung | Ready::RungAlone) && side.rung(ready == Ready::RungAlone)? {
            return Ok(true);
        }
        if side.look()? || (ready == Ready::Gone && side.end()?) {
            return Ok(true);
        }
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Ok(false);
        }
    }
}

/// Some loads, and a check.
#[inline(always)]
fn look_often(side: &mut impl Side) -> Result<bool> {
    for _ in 0..LOADS_PER_CLOCK {
        os::relax();
        if side.may_be_ready() {
            break;
        }
    }
    let there = side.look()?;
    if there {
        side.spin().has_paid();
    }
    Ok(there)
}

/// Whether the condition holds, or will so soon that the caller's loop may be delayed: at most for `most`, for less
/// when that was useless lately, and not at all with one processor.
pub fn linger(side: &mut impl Side, most: Duration) -> Result<bool> {
    if side.look()? {
        return Ok(true);
    }
    if most.is_zero() || side.spin().one_processor {
        return Ok(false);
    }
    let until = Instant::now() + side.spin().shortened(most);
    loop {
        if look_often(side)? {
            return Ok(true);
        }
        if Instant::now() >= until {
            side.spin().has_failed();
            return Ok(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_slower_than_any_spin_is_hardly_spun_for_and_found_again_when_it_is_quick() {
        let mut spin = Spin::new(Wait::Block, None);
        let mut spins = Vec::new();
        for _ in 0..10_000 {
            spins.push(spin.longest());
            spin.has_failed();
        }
        // Less than a percent of a sleep and a wake, which take some 25 µs; but the long ones never end.
        let spent: Duration = spins.iter().sum();
        assert!(spent < Duration::from_nanos(250) * 10_000, "{spent:?}");
        assert!(spins[9_000..].contains(&SPIN_LONG));
        while spin.longest() != SPIN_LONG {
            spin.has_failed();
        }
        spin.has_paid();
        assert_eq!(spin.longest(), SPIN_MAX);
    }

    #[test]
    fn who_comes_while_nobody_spins_brings_spinning_back_by_and_by() {
        let mut spin = Spin::new(Wait::Block, None);
        (0..40).for_each(|_| spin.has_failed());
        assert_eq!(spin.longest(), Duration::ZERO);
        spin.has_paid();
        assert_eq!(spin.longest(), SPIN_MAX / 8);
        (0..3).for_each(|_| spin.has_paid());
        assert_eq!(spin.longest(), SPIN_MAX);
    }

    #[test]
    fn who_has_lost_a_time_slice_by_yielding_does_so_ever_more_seldom() {
        let mut spin = Spin::new(Wait::Block, None);
        let mut rests = Vec::new();
        for _ in 0..9 {
            assert!(spin.may_yield());
            spin.has_yielded(YIELD_MAX * 8);
            rests.push((1..).find(|_| spin.may_yield()).unwrap() - 1);
            // That yield was not made.
            spin.rest = 0;
        }
        assert_eq!(rests, [1024, 2048, 4096, 8192, 16384, 32768, 65536, 65536, 65536]);
        for _ in 0..9 {
            assert!(spin.may_yield());
            spin.has_yielded(YIELD_MAX / 100);
        }
        assert_eq!((spin.rest, spin.patience), (0, 0));
    }
}
