//! How a side waits: it busy-polls briefly, then sleeps on its doorbell and on the liveness of its peer.

use crate::error::Result;
use pelton_lane::{LastRing, failpoint};
use pelton_os::{self as os, Ready};
use probe::probe;
use std::time::{Duration, Instant};

/// How an operation waits. For the third way, the caller's own event loop, use the `try_` methods and `arm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Wait {
    /// Polls without sleeping. Has the lowest latency and occupies a whole processor; on a machine with one processor
    /// use `Block`. With either value, a receiver that keeps up with its sender may back off: it pauses for up to some
    /// 15 µs while that helps throughput.
    Spin,
    /// Busy-polls for 50 µs, then sleeps. Does not busy-poll if that was useless lately, or if the peer shares
    /// this side's processor.
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
    /// As [`Polled::poll`], but with many idle peers it may check a few of them only, in turn. For a busy-poll, which
    /// calls it again and again.
    fn poll_in_turn(&mut self) -> Result<bool> {
        self.poll()
    }
    /// Whether the condition may hold: a cheap hint. With many idle peers as [`Polled::poll_in_turn`].
    fn may_be_ready(&mut self) -> bool;
    /// The adaptive spin before a sleep.
    fn spin(&mut self) -> &mut Spin;
    /// The last ring of the peer that this side waits for, if there is one.
    fn last_ring(&self) -> Option<LastRing>;
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

/// Loads between two checks of the clock and of other reasons to end a wait, which cost as much as several loads.
const LOADS_PER_CLOCK: u32 = 32;

/// A busy-poll lasts this long, one and a half to three times a wake-up on the virtual machines measured. It is worth
/// more than one wake-up: a side that does not sleep also spares its peer the ring.
pub const BUSY_POLL: Duration = Duration::from_micros(50);
/// A large message takes longer, because each side copies it: the time is a nanosecond longer for this number of bytes.
/// At 100 KiB the sides of a call copied for some 20 µs each.
const BYTES_PER_NS: u64 = 4;
/// But not beyond this time: a sleep then costs little beside the copies.
const BUSY_POLL_LARGE: Duration = Duration::from_micros(100);

/// From this score on, each wait busy-polls. Below it, only some do, as probes.
const SCORE_GOOD: u8 = 4;
/// The score at first, and after a probe that paid.
const SCORE_FIRST: u8 = 10;
const SCORE_MAX: u8 = 16;
/// The waits from one probe to the next, at first. Each probe that fails doubles them, up to `PROBE_LAST`.
const PROBE_FIRST: u16 = 8;
const PROBE_LAST: u16 = 64;

/// On one processor, a thread yields before it sleeps, so that its peer finishes its work. A sleep instead would let
/// the wake-up interrupt the peer at each message. But the kernel may give the yielded processor to an unrelated thread
/// for milliseconds, where a woken sleeper would run first. A yield that takes longer than this limit shows that.
const YIELD_MAX: Duration = Duration::from_micros(500);
/// After such a long yield, this number of waits do not yield. Each further long yield doubles the number.
const YIELD_REST: u32 = 1024;
/// At most this many doublings of `YIELD_REST`.
const YIELD_DOUBLINGS_MAX: u32 = 6;

/// Whether a side busy-polls before it sleeps: not where that was useless lately, nor if its peer shares its processor.
/// docs/decisions/0037-busy-machine.md.
#[derive(Debug)]
pub struct Spin {
    wait: Wait,
    /// This process and the peer have only one processor.
    one_processor: bool,
    /// At the last wait, the peer's last ring came from this processor: the peer cannot run while this side polls.
    shares_processor: bool,
    /// The time of the ring that showed it. Each ring counts for one wait: an old one says nothing about now.
    shared_at_ns: u64,
    /// How useful busy-polls were lately.
    score: u8,
    /// Waits without a busy-poll since the last probe, and from one probe to the next.
    skipped: u16,
    interval: u16,
    /// The waits left that do not yield, and the doublings of their number.
    rest: u32,
    doublings: u32,
}

impl Spin {
    /// Creates the spin of a side that waits for `peer` in the way `wait`.
    pub fn new(wait: Wait, peer: Option<pelton_os::Peer>) -> Spin {
        let mut spin = Spin {
            wait,
            one_processor: false,
            shares_processor: false,
            shared_at_ns: 0,
            score: SCORE_FIRST,
            skipped: 0,
            interval: PROBE_FIRST,
            rest: 0,
            doublings: 0,
        };
        spin.set_peer(peer);
        spin
    }

    /// Counts the processors that this process and the peer may use: with only one, spinning is useless.
    pub fn set_peer(&mut self, peer: Option<pelton_os::Peer>) {
        if let Some(peer) = peer {
            self.one_processor = !os::has_two_processors(peer.pid);
        }
    }

    /// Whether this wait busy-polls. `ring`: the peer's last one. Call this once per wait.
    fn must_busy_poll(&mut self, ring: Option<LastRing>) -> bool {
        let rung_from_here = ring.filter(|ring| ring.at_ns != self.shared_at_ns && self.shares_processor_with(*ring));
        self.shared_at_ns = rung_from_here.map_or(self.shared_at_ns, |ring| ring.at_ns);
        self.shares_processor = self.one_processor || rung_from_here.is_some();
        if self.shares_processor {
            return false;
        }
        if self.score < SCORE_GOOD {
            self.skipped += 1;
            if self.skipped < self.interval {
                return false;
            }
            self.skipped = 0;
        }
        true
    }

    /// Whether this side may sleep, and its peer was on this processor at its last ring or sleep. `ring`: its last one.
    pub fn shares_processor_with(&self, ring: LastRing) -> bool {
        let is_here = || ring.processor.is_some() && ring.processor == os::processor();
        // A side that only polls is never rung, so what it reads is of an earlier peer.
        self.wait == Wait::Block && (self.one_processor || is_here())
    }

    fn has_paid(&mut self) {
        if self.score < SCORE_GOOD {
            (self.score, self.interval) = (SCORE_FIRST, PROBE_FIRST);
        } else {
            self.score = (self.score + 1).min(SCORE_MAX);
        }
    }

    fn has_failed(&mut self) {
        if self.score >= SCORE_GOOD {
            self.score -= 2;
        } else {
            self.interval = (self.interval * 2).min(PROBE_LAST);
        }
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
        if self.one_processor || self.shares_processor { 0 } else { LOADS_PER_CLOCK }
    }
}

/// Waits until the condition of `side` holds. Returns false at the deadline.
#[cold]
pub fn wait(side: &mut impl Side, deadline: Option<Instant>) -> Result<bool> {
    let ring = side.last_ring();
    let time = if side.spin().must_busy_poll(ring) { BUSY_POLL } else { Duration::ZERO };
    let spins_only = side.spin().wait == Wait::Spin;
    let one_processor = side.spin().one_processor;
    if spins_only || !side.spin().shares_processor {
        let mut until = None;
        loop {
            if poll_repeatedly(side)? {
                return Ok(true);
            }
            // Reads the clock late: most waits end before.
            let now = Instant::now();
            let is_over = deadline.is_some_and(|deadline| now >= deadline);
            if spins_only {
                if is_over {
                    return side.poll();
                }
                if side.is_peer_known_gone()? && (side.poll()? || side.end()?) {
                    return Ok(true);
                }
                if one_processor {
                    std::thread::yield_now();
                }
                continue;
            }
            let is_first = until.is_none();
            if is_over || now >= *until.get_or_insert(now + time) {
                let holds = side.poll()?;
                if holds {
                    side.spin().has_paid();
                } else if !is_first {
                    // The first polls alone say nothing.
                    side.spin().has_failed();
                }
                if holds || is_over {
                    return Ok(holds);
                }
                break;
            }
        }
    } else if one_processor && yield_once(side)? {
        return Ok(true);
    } else if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
        return side.poll();
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
        probe!(pelton, sleep);
        let ready = side.sleep(until);
        failpoint("wait: woken");
        side.disarm();
        let ready = ready?;
        probe!(pelton, wake, ready as u32);
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

/// Loads the hint `LOADS_PER_CLOCK` times, or until it is set; then checks the condition, in turn: the caller ends with
/// a check of all.
#[inline(always)]
fn poll_repeatedly(side: &mut impl Polled) -> Result<bool> {
    for _ in 0..LOADS_PER_CLOCK {
        os::relax();
        if side.may_be_ready() {
            break;
        }
    }
    let holds = side.poll_in_turn()?;
    if holds {
        side.spin().has_paid();
    }
    Ok(holds)
}

/// Busy-polls for a message of about `bytes`, before the caller's event loop arms: for `most`, or longer if there are
/// many bytes. Returns whether the condition holds. Polls only once if `most` is zero, if polling was useless lately,
/// or if the peer shares this processor. Neither sleeps nor arms.
pub fn busy_poll(side: &mut impl Polled, most: Duration, bytes: u64) -> Result<bool> {
    if side.poll()? {
        return Ok(true);
    }
    if most.is_zero() {
        return Ok(false);
    }
    let ring = side.last_ring();
    if !side.spin().must_busy_poll(ring) {
        return if side.spin().one_processor { yield_once(side) } else { Ok(false) };
    }
    // A day at most, which the clock can represent.
    let time = most.min(Duration::from_secs(86_400));
    let time = time.max((time + Duration::from_nanos(bytes / BYTES_PER_NS)).min(BUSY_POLL_LARGE));
    let mut until = None;
    loop {
        if poll_repeatedly(side)? {
            return Ok(true);
        }
        let now = Instant::now();
        // The condition may hold in the first polls, so the clock is read after them.
        if now >= *until.get_or_insert(now + time) {
            let holds = side.poll()?;
            if holds {
                side.spin().has_paid();
            } else {
                side.spin().has_failed();
            }
            return Ok(holds);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// A ring at another time than the one before.
    fn ring(processor: Option<u32>) -> Option<LastRing> {
        static AT_NS: AtomicU64 = AtomicU64::new(1);
        Some(LastRing { processor, at_ns: AT_NS.fetch_add(1, Ordering::Relaxed) })
    }

    #[test]
    fn for_a_slow_peer_only_rare_probes_remain_until_one_succeeds() {
        let mut spin = Spin::new(Wait::Block, None);
        let mut polls = Vec::new();
        for _ in 0..10_000 {
            let polled = spin.must_busy_poll(None);
            polls.push(polled);
            if polled {
                spin.has_failed();
            }
        }
        let count = polls.iter().filter(|polled| **polled).count();
        assert!(count < 180, "{count} busy-polls in 10,000 waits");
        assert!(polls[9_900..].contains(&true), "the probes never cease");
        while !spin.must_busy_poll(None) {}
        spin.has_paid();
        assert!((0..3).all(|_| spin.must_busy_poll(None)));
    }

    #[test]
    fn nobody_polls_for_a_peer_on_the_same_processor() {
        let mut spin = Spin::new(Wait::Block, None);
        let own = os::processor();
        assert!(own.is_some());
        // The kernel may move this thread between the two.
        assert!((0..100).any(|_| !spin.must_busy_poll(ring(os::processor()))));
        assert!(spin.must_busy_poll(ring(Some(u32::MAX - 1))));
        assert_eq!(spin.first_polls(), LOADS_PER_CLOCK);
        // The same ring counts once, and a side that only polls is never rung.
        assert!(spin.must_busy_poll(Some(LastRing { processor: os::processor(), at_ns: spin.shared_at_ns })));
        let mut polls_only = Spin::new(Wait::Spin, None);
        assert!((0..100).all(|_| polls_only.must_busy_poll(ring(os::processor()))));
        assert!(spin.must_busy_poll(ring(None)));
        spin.one_processor = true;
        assert!(!spin.must_busy_poll(ring(None)));
        assert_eq!(spin.first_polls(), 0);
    }

    #[test]
    fn a_ring_is_noted_in_the_page_of_the_side_that_rings() {
        let (mut sender, mut receiver) = crate::Options::new().capacity(65536).threads().unwrap();
        let noted_since = |ring: Option<LastRing>, since| {
            let ring = ring.unwrap();
            ring.processor.is_some() && (since..=os::monotonic_ns()).contains(&ring.at_ns)
        };
        let since = os::monotonic_ns();
        assert!(receiver.arm().unwrap().is_waiting());
        assert!(!noted_since(Polled::last_ring(&receiver), since));
        sender.send(&[1]).unwrap();
        assert!(noted_since(Polled::last_ring(&receiver), since));
        assert!(!noted_since(Some(sender.last_ring()), since));
        receiver.disarm();

        while sender.try_send(&[1; 1000]).unwrap() == crate::Sent::Sent {}
        assert!(sender.arm(1000).unwrap().is_waiting());
        while receiver.try_receive().unwrap().is_some() {}
        assert!(noted_since(Some(sender.last_ring()), since));
    }

    /// A condition that holds from the poll of that number on, and counts the polls. It is never found in turn, if it
    /// `hides`.
    struct Counted {
        polls: u64,
        holds_from: u64,
        hides: bool,
        spin: Spin,
        ring: Option<LastRing>,
    }

    impl Polled for Counted {
        fn poll(&mut self) -> Result<bool> {
            self.polls += 1;
            Ok(self.polls >= self.holds_from)
        }

        fn poll_in_turn(&mut self) -> Result<bool> {
            if self.hides { Ok(false) } else { self.poll() }
        }

        fn may_be_ready(&mut self) -> bool {
            false
        }

        fn spin(&mut self) -> &mut Spin {
            &mut self.spin
        }

        fn last_ring(&self) -> Option<LastRing> {
            self.ring
        }
    }

    fn counted(holds_from: u64, one_processor: bool) -> Counted {
        let spin = Spin { one_processor, ..Spin::new(Wait::Block, None) };
        Counted { polls: 0, holds_from, hides: false, spin, ring: None }
    }

    impl Side for Counted {
        fn arm(&mut self) -> Result<bool> {
            Ok(!self.poll()?)
        }
        fn disarm(&mut self) {}
        fn end(&mut self) -> Result<bool> {
            Ok(false)
        }
        fn needs_timed_wait(&self) -> bool {
            false
        }
        fn sleep(&mut self, _deadline: Option<Instant>) -> Result<Ready> {
            unreachable!("the deadline has passed, or the condition holds")
        }
        fn rung(&mut self, _alone: bool) -> Result<bool> {
            Ok(false)
        }
        fn is_peer_known_gone(&mut self) -> Result<bool> {
            Ok(false)
        }
    }

    #[test]
    fn every_busy_poll_ends_with_a_check_of_all_peers() {
        let soon = || Some(Instant::now() + Duration::from_micros(1));
        for kind in [Wait::Spin, Wait::Block] {
            let mut side = Counted { hides: true, ..counted(1, false) };
            side.spin.wait = kind;
            assert!(wait(&mut side, soon()).unwrap(), "{kind:?} at the deadline");
            assert!(side.spin.score >= SCORE_FIRST);
            let mut side = Counted { hides: true, ..counted(2, false) };
            side.spin.wait = kind;
            assert!(!wait(&mut side, soon()).unwrap());
        }
        let mut side = Counted { hides: true, ..counted(1, false) };
        assert!(wait(&mut side, None).unwrap(), "it polls all before it sleeps");
        assert_eq!(side.spin.score, SCORE_FIRST + 1);
        let mut side = Counted { hides: true, ..counted(2, false) };
        assert!(busy_poll(&mut side, Duration::from_nanos(1), 0).unwrap());
        assert_eq!(side.spin.score, SCORE_FIRST + 1);
    }

    #[test]
    fn a_busy_poll_finds_what_comes_and_gives_up_otherwise() {
        // Longer than any pause of this thread, so only the polls end it.
        let hour = Duration::from_secs(3600);
        let mut side = counted(1000, false);
        assert!(busy_poll(&mut side, hour, 0).unwrap());
        assert_eq!((side.polls, side.spin.score), (1000, SCORE_FIRST + 1));
        let mut side = counted(u64::MAX, false);
        assert!(!busy_poll(&mut side, BUSY_POLL, u64::MAX).unwrap());
        assert_eq!(side.spin.score, SCORE_FIRST - 2);
    }

    #[test]
    fn no_time_is_worth_one_poll() {
        let mut side = counted(u64::MAX, false);
        assert!(!busy_poll(&mut side, Duration::ZERO, 1 << 30).unwrap());
        assert_eq!((side.polls, side.spin.score), (1, SCORE_FIRST));
        // With one processor it yields, and polls once more.
        let mut side = counted(u64::MAX, true);
        assert!(!busy_poll(&mut side, BUSY_POLL, 1 << 30).unwrap());
        assert_eq!((side.polls, side.spin.score), (2, SCORE_FIRST));
        // The peer rang from this processor: one that sleeps may run elsewhere, so this side does not yield.
        let mut side = counted(u64::MAX, false);
        let shared = |side: &mut Counted| {
            side.ring = ring(os::processor());
            let before = side.polls;
            assert!(!busy_poll(side, BUSY_POLL, 0).unwrap());
            side.polls - before == 1
        };
        // The kernel may move this thread between the two.
        assert!((0..100).any(|_| shared(&mut side)));
        // After failures, too, until the next probe.
        let mut side = counted(u64::MAX, false);
        side.spin.score = 0;
        assert!(!busy_poll(&mut side, BUSY_POLL, 0).unwrap());
        assert_eq!(side.polls, 1);
    }
}
