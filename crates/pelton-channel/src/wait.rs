//! How a side waits: it spins briefly, then sleeps in poll on its doorbell and on the liveness of its peer.

use crate::error::Result;
use pelton_lane::failpoint;
use pelton_os::{self as os, Ready};
use std::time::{Duration, Instant};

/// How an operation waits. For the third way, the caller's own event loop, use the `try_` methods and `arm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Wait {
    /// Polls without sleeping. Has the lowest latency and occupies a whole processor; on a machine with one processor
    /// use `Block`. With either value, a receiver that keeps up with its sender may back off: it pauses for up to some
    /// 15 µs while that helps throughput.
    Spin,
    /// Spins for some microseconds, then sleeps. Spins less if spinning was useless lately. With one processor it
    /// yields once instead.
    #[default]
    Block,
}

/// How long an operation may wait. The methods `*_until` take it, or an [`Instant`] on the monotonic clock, or a
/// [`Duration`] from now.
///
/// ```
/// # fn main() -> pelton::Result<()> {
/// use std::time::{Duration, Instant};
/// let (_sender, mut receiver) = pelton::Options::new().threads()?;
/// assert!(receiver.receive_until(Duration::from_millis(1))?.is_none());
/// assert!(receiver.receive_until(Instant::now() + Duration::from_millis(1))?.is_none());
/// assert!(receiver.receive_until(pelton::Deadline::Now)?.is_none());
/// # Ok(())
/// # }
/// ```
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
    /// The deadline for a function that takes an instant or `None`. For [`Deadline::Now`] it is the present instant.
    pub fn instant(self) -> Option<Instant> {
        match self {
            Deadline::Now => Some(Instant::now()),
            Deadline::At(instant) => Some(instant),
            Deadline::Never => None,
        }
    }

    /// Returns `None` for a call that does not wait, otherwise the instant, if there is one.
    #[doc(hidden)]
    pub fn until(self) -> Option<Option<Instant>> {
        match self {
            Deadline::Now => None,
            Deadline::At(deadline) => Some(Some(deadline)),
            Deadline::Never => Some(None),
        }
    }
}

impl From<Instant> for Deadline {
    fn from(instant: Instant) -> Deadline {
        Deadline::At(instant)
    }
}

impl From<Duration> for Deadline {
    /// `time` counts from now. Beyond the clock's range, the result is [`Deadline::Never`].
    fn from(time: Duration) -> Deadline {
        Instant::now().checked_add(time).map_or(Deadline::Never, Deadline::At)
    }
}

/// The value of `Options::connect_deadline`: made from an [`Instant`], a [`Duration`] or a [`Deadline`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectDeadline {
    /// This long after each use of the options.
    After(Duration),
    /// The same for all uses.
    At(Deadline),
}

impl ConnectDeadline {
    /// The deadline of a use that begins now. Returns `None` if it does not wait.
    #[doc(hidden)]
    pub fn from_now(self) -> Option<Instant> {
        let after = match self {
            ConnectDeadline::After(time) => time,
            ConnectDeadline::At(Deadline::Now) => return None,
            ConnectDeadline::At(Deadline::At(instant)) => return Some(instant),
            ConnectDeadline::At(Deadline::Never) => Duration::MAX,
        };
        // Ten years at most, which the clock can represent.
        Some(Instant::now() + after.min(Duration::from_secs(315_360_000)))
    }
}

impl From<Duration> for ConnectDeadline {
    fn from(time: Duration) -> ConnectDeadline {
        ConnectDeadline::After(time)
    }
}

impl From<Instant> for ConnectDeadline {
    fn from(instant: Instant) -> ConnectDeadline {
        ConnectDeadline::At(instant.into())
    }
}

impl From<Deadline> for ConnectDeadline {
    fn from(deadline: Deadline) -> ConnectDeadline {
        ConnectDeadline::At(deadline)
    }
}

/// What `arm` found.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Armed {
    /// Nothing is ready: return to the event loop. The descriptor becomes readable.
    Waiting,
    /// Something is ready: take it. The descriptor is readable too, so returning to the loop loses nothing.
    Ready,
}

impl Armed {
    #[doc(hidden)]
    pub fn waiting_if(is_waiting: bool) -> Armed {
        if is_waiting { Armed::Waiting } else { Armed::Ready }
    }

    /// Whether the loop may sleep.
    pub fn is_waiting(self) -> bool {
        self == Armed::Waiting
    }
}

/// A condition that can be polled.
pub trait Polled {
    /// Returns whether the condition holds. An error ends the wait, and the end of the channel is an error.
    fn poll(&mut self) -> Result<bool>;
    /// Whether the condition may hold: a cheap hint, by one load.
    fn may_be_ready(&self) -> bool;
    /// The adaptive spin before a sleep.
    fn spin(&mut self) -> &mut Spin;
}

/// One side of a channel and the condition that it waits for.
pub trait Side: Polled {
    /// Announces a sleep. Returns false if the condition holds after all, and withdraws the announcement.
    fn arm(&mut self) -> Result<bool>;
    /// Withdraws the announcement.
    fn disarm(&mut self);
    /// Call this after a peer has gone and [`Polled::poll`] has returned false since. Returns an error if the channel
    /// has ended, true if the condition holds after all, and false to continue the wait.
    fn end(&mut self) -> Result<bool>;
    /// Whether a sleep must end after a millisecond, because a wake-up may be missed.
    fn needs_timed_wait(&self) -> bool;
    /// Sleeps until a doorbell rings, a peer is gone, or the deadline.
    fn sleep(&mut self, deadline: Option<Instant>) -> Result<Ready>;
    /// Handles a ring of the doorbell. Returns as [`Side::end`] does. `alone`: no other polled descriptor had an event.
    fn rung(&mut self, alone: bool) -> Result<bool>;
    /// Whether a peer has gone; checks that at intervals.
    fn is_peer_known_gone(&mut self) -> Result<bool>;
}

/// A sleep costs some microseconds, and a wake-up costs about as much. A longer spin cannot pay.
const SPIN_MAX: Duration = Duration::from_micros(10);
/// Loads between two checks of the clock and of other reasons to end a wait, which cost as much as several loads.
const LOADS_PER_CLOCK: u32 = 32;
/// Each failed spin halves the next ones, at most this many times: down to 1/16.
const SHORTEST: u32 = 4;
/// After these numbers of failed spins, one long spin follows: long enough for a sleeping peer to wake up and reply.
/// Without it, two sides that wait for each other would never spin again after both have slept. The first long spin
/// follows the first failure; later ones are so rare that they cost 0.2 µs per sleep.
const LONG_AFTER: [u32; 2] = [1, 256];
/// After this number of failed spins, a wait polls only once, until the next long spin. Even the longest ordinary spin
/// is too short for this peer.
const NONE_AFTER: u32 = 16;
const SPIN_LONG: Duration = Duration::from_micros(50);

/// How long an event loop busy-polls before it arms and sleeps. That costs it more than a blocking wait: it arms,
/// returns to its loop, sleeps in epoll, and disarms. On a virtual machine these take 25 to 40 µs of processor time.
pub const BUSY_POLL: Duration = Duration::from_micros(20);
/// A large message takes longer, because each side copies it: the time is a nanosecond longer for this number of bytes.
/// At 100 KiB the sides of a call copied for some 20 µs each.
const BYTES_PER_NS: u64 = 4;
/// But at most this number of times as long. Beyond it, a sleep costs little beside the copies.
const BUSY_POLL_TIMES: u32 = 5;

/// On one processor, a thread yields before it sleeps, so that its peer finishes its work. A sleep instead would let
/// the wake-up interrupt the peer at each message. But the kernel may give the yielded processor to an unrelated thread
/// for milliseconds, where a woken sleeper would run first. A yield that takes longer than this limit shows that.
const YIELD_MAX: Duration = Duration::from_micros(500);
/// After such a long yield, this number of waits do not yield. Each further long yield doubles the number.
const YIELD_REST: u32 = 1024;
/// At most this many doublings of `YIELD_REST`.
const YIELD_DOUBLINGS_MAX: u32 = 6;

/// Adaptive spinning before a sleep: it is longer if spinning was useful lately.
#[derive(Debug)]
pub struct Spin {
    wait: Wait,
    one_processor: bool,
    /// Failed spins since the last useful or long one.
    failed: u32,
    /// The waits left that do not yield, and the doublings of their number.
    rest: u32,
    doublings: u32,
}

impl Spin {
    /// Creates the spin of a side that waits for `peer` in the way `wait`.
    pub fn new(wait: Wait, peer: Option<pelton_os::Peer>) -> Spin {
        let mut spin = Spin { wait, one_processor: false, failed: 0, rest: 0, doublings: 0 };
        spin.set_peer(peer);
        spin
    }

    /// Counts the processors that this process and the peer may use: with only one, spinning is useless.
    pub fn set_peer(&mut self, peer: Option<pelton_os::Peer>) {
        if let Some(peer) = peer {
            self.one_processor = !os::has_two_processors(peer.pid);
        }
    }

    fn longest(&self) -> Duration {
        self.time(SPIN_MAX, SPIN_LONG)
    }

    /// The time of the next spin, by the outcomes of the last ones.
    fn time(&self, usual: Duration, long: Duration) -> Duration {
        match self.failed {
            failed if LONG_AFTER.contains(&failed) => long,
            NONE_AFTER.. => Duration::ZERO,
            failed => usual / (1 << failed.min(SHORTEST)),
        }
    }

    /// The time of the next busy-poll. A long one takes no longer than the usual: the user may have set that limit.
    fn busy_poll_time(&self, most: Duration, bytes: u64) -> Duration {
        let longer = most.saturating_add(Duration::from_nanos(bytes / BYTES_PER_NS));
        // A day at most, which the clock can represent.
        let most = longer.min(most.saturating_mul(BUSY_POLL_TIMES)).min(Duration::from_secs(86_400));
        self.time(most, most)
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
            self.rest = YIELD_REST << self.doublings;
            self.doublings = (self.doublings + 1).min(YIELD_DOUBLINGS_MAX);
        } else {
            self.doublings = self.doublings.saturating_sub(1);
        }
    }

    /// Polls before the actual wait.
    #[inline(always)]
    pub fn first_polls(&self) -> u32 {
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
            if poll_repeatedly(side)? {
                return Ok(true);
            }
            // Reads the clock late: most waits end before.
            let now = Instant::now();
            if deadline.is_some_and(|deadline| now >= deadline) {
                return Ok(false);
            }
            if spins_only {
                if side.is_peer_known_gone()? && (side.poll()? || side.end()?) {
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
    } else if yield_once(side)? {
        return Ok(true);
    }
    loop {
        if !side.arm()? {
            return Ok(true);
        }
        failpoint("wait: armed");
        let limit = side.needs_timed_wait().then(|| Instant::now() + Duration::from_millis(1));
        let until = match (deadline, limit) {
            (Some(deadline), Some(limit)) => Some(deadline.min(limit)),
            (deadline, limit) => deadline.or(limit),
        };
        let ready = side.sleep(until);
        failpoint("wait: woken");
        side.disarm();
        let ready = ready?;
        if matches!(ready, Ready::Rung | Ready::RungAlone) && side.rung(ready == Ready::RungAlone)? {
            return Ok(true);
        }
        if side.poll()? || (ready == Ready::Gone && side.end()?) {
            return Ok(true);
        }
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Ok(false);
        }
    }
}

/// With one processor: lets the peer run once, unless that was useless lately. Returns whether the condition holds.
fn yield_once(side: &mut impl Polled) -> Result<bool> {
    if !side.spin().may_yield() {
        return Ok(false);
    }
    let begun = Instant::now();
    std::thread::yield_now();
    let holds = side.poll()?;
    side.spin().has_yielded(begun.elapsed());
    Ok(holds)
}

/// Loads the hint `LOADS_PER_CLOCK` times, or until it is set; then checks the condition.
#[inline(always)]
fn poll_repeatedly(side: &mut impl Polled) -> Result<bool> {
    for _ in 0..LOADS_PER_CLOCK {
        os::relax();
        if side.may_be_ready() {
            break;
        }
    }
    let holds = side.poll()?;
    if holds {
        side.spin().has_paid();
    }
    Ok(holds)
}

/// Busy-polls for a message of about `bytes`, before the caller's event loop arms: for `most`, or longer if there are
/// many bytes. Returns whether the condition holds. Polls for less if that was useless lately, and only once
/// if `most` is zero. With one processor it yields once instead. Neither sleeps nor arms.
pub fn busy_poll(side: &mut impl Polled, most: Duration, bytes: u64) -> Result<bool> {
    if side.poll()? {
        return Ok(true);
    }
    if most.is_zero() {
        return Ok(false);
    }
    if side.spin().one_processor {
        return yield_once(side);
    }
    let time = side.spin().busy_poll_time(most, bytes);
    if time.is_zero() {
        // Recent polls were useless: more than the one above would only delay the loop.
        side.spin().has_failed();
        return Ok(false);
    }
    let mut until = None;
    loop {
        if poll_repeatedly(side)? {
            return Ok(true);
        }
        let now = Instant::now();
        // The condition may hold in the first polls, so the clock is read after them.
        if now >= *until.get_or_insert(now + time) {
            side.spin().has_failed();
            return Ok(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn for_a_slow_peer_only_rare_long_spins_remain_until_one_succeeds() {
        let mut spin = Spin::new(Wait::Block, None);
        let mut spins = Vec::new();
        for _ in 0..10_000 {
            spins.push(spin.longest());
            spin.has_failed();
        }
        // Less than a percent of a sleep and a wake-up, which take some 25 µs. The long spins never cease.
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
    fn each_success_without_a_spin_makes_the_next_spins_longer() {
        let mut spin = Spin::new(Wait::Block, None);
        (0..40).for_each(|_| spin.has_failed());
        assert_eq!(spin.longest(), Duration::ZERO);
        spin.has_paid();
        assert_eq!(spin.longest(), SPIN_MAX / 8);
        (0..3).for_each(|_| spin.has_paid());
        assert_eq!(spin.longest(), SPIN_MAX);
    }

    #[test]
    fn each_yield_that_costs_a_time_slice_makes_yields_rarer() {
        let mut spin = Spin::new(Wait::Block, None);
        let mut rests = Vec::new();
        for _ in 0..9 {
            assert!(spin.may_yield());
            spin.has_yielded(YIELD_MAX * 8);
            rests.push((1..).find(|_| spin.may_yield()).unwrap() - 1);
            // This yield only searched for the end of the rest: it did not happen.
            spin.rest = 0;
        }
        assert_eq!(rests, [1024, 2048, 4096, 8192, 16384, 32768, 65536, 65536, 65536]);
        for _ in 0..9 {
            assert!(spin.may_yield());
            spin.has_yielded(YIELD_MAX / 100);
        }
        assert_eq!((spin.rest, spin.doublings), (0, 0));
    }

    /// A condition that holds from the poll of that number on, and counts the polls.
    struct Counted {
        polls: u64,
        holds_from: u64,
        spin: Spin,
    }

    impl Polled for Counted {
        fn poll(&mut self) -> Result<bool> {
            self.polls += 1;
            Ok(self.polls >= self.holds_from)
        }

        fn may_be_ready(&self) -> bool {
            false
        }

        fn spin(&mut self) -> &mut Spin {
            &mut self.spin
        }
    }

    fn counted(holds_from: u64, one_processor: bool) -> Counted {
        let spin = Spin { one_processor, ..Spin::new(Wait::Block, None) };
        Counted { polls: 0, holds_from, spin }
    }

    #[test]
    fn a_busy_poll_finds_what_comes_and_gives_up_otherwise() {
        // Longer than any pause of this thread, so only the polls end it.
        let hour = Duration::from_secs(3600);
        let mut side = counted(1000, false);
        assert!(busy_poll(&mut side, hour, 0).unwrap());
        assert_eq!((side.polls, side.spin.failed), (1000, 0));
        let mut side = counted(u64::MAX, false);
        assert!(!busy_poll(&mut side, BUSY_POLL, 0).unwrap());
        assert_eq!(side.spin.failed, 1);
    }

    #[test]
    fn no_time_is_worth_one_poll() {
        for one_processor in [false, true] {
            let mut side = counted(u64::MAX, one_processor);
            assert!(!busy_poll(&mut side, Duration::ZERO, 1 << 30).unwrap());
            assert_eq!((side.polls, side.spin.failed), (1, 0));
        }
        // After failures that leave no time, too, until the next long one.
        let mut side = counted(u64::MAX, false);
        side.spin.failed = NONE_AFTER;
        assert!(!busy_poll(&mut side, BUSY_POLL, 0).unwrap());
        assert_eq!((side.polls, side.spin.failed), (1, NONE_AFTER + 1));
    }

    #[test]
    fn on_one_processor_a_busy_poll_yields_and_polls_once_more() {
        let mut side = counted(2, true);
        assert!(busy_poll(&mut side, BUSY_POLL, 0).unwrap());
        assert_eq!(side.polls, 2);
        // Where yields have cost time slices, it only polls.
        let mut side = counted(2, true);
        side.spin.rest = 1;
        assert!(!busy_poll(&mut side, BUSY_POLL, 0).unwrap());
        assert_eq!(side.polls, 1);
    }

    #[test]
    fn a_busy_poll_is_longer_for_many_bytes_and_shorter_after_failures() {
        let mut spin = Spin::new(Wait::Block, None);
        let time = |spin: &Spin, bytes| spin.busy_poll_time(BUSY_POLL, bytes);
        assert_eq!(time(&spin, 0), BUSY_POLL);
        assert_eq!(time(&spin, 40_000), BUSY_POLL + Duration::from_micros(10));
        assert_eq!(time(&spin, u64::MAX), BUSY_POLL * BUSY_POLL_TIMES);
        assert_eq!(spin.busy_poll_time(Duration::MAX, u64::MAX), Duration::from_secs(86_400));
        spin.has_failed();
        assert_eq!(time(&spin, 0), BUSY_POLL, "the first retry takes as long");
        spin.has_failed();
        assert_eq!(time(&spin, 0), BUSY_POLL / 4);
        let mut spent = Duration::ZERO;
        for _ in 0..10_000 {
            spent += time(&spin, 0);
            spin.has_failed();
        }
        // Less than a percent of a sleep and a wake-up, as for `longest`; but the retries never cease.
        assert!(spent < Duration::from_nanos(200) * 10_000, "{spent:?}");
        while spin.failed != LONG_AFTER[1] {
            spin.has_failed();
        }
        spin.has_paid();
        assert_eq!(time(&spin, 0), BUSY_POLL);
    }
}
