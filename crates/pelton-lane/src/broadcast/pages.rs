//! The two pages of a broadcast lane, byte for byte as `spec/broadcast.md` defines them.

use crate::edges::{
    AtomicU32, AtomicU64, JOIN, KEEP, RELEASE, failpoint, fence_after_reading, fence_before_overwriting,
};
use crate::error::LaneError;
use crate::layout::{LAYOUT_SIGNATURE, LastRing, Position, Preamble, ProducerPage, RingNote, State, fnv1a};
use core::sync::atomic::Ordering::Relaxed;

/// First word of a broadcast producer's segment: "pelton-B" in memory order.
pub const MAGIC_BROADCAST: u64 = u64::from_le_bytes(*b"pelton-B");
/// First word of a broadcast consumer's segment.
pub const MAGIC_CURSOR: u64 = u64::from_le_bytes(*b"pelton-S");

/// The most consumers of one broadcast lane.
pub const CURSORS_MAX: usize = if cfg!(loom) { 2 } else { 64 };

/// The largest message number: at 50 million messages a second, a lane takes thousands of years to get there.
pub(super) const NUMBER_MAX: u64 = 1 << 62;

/// How often a consumer loads the oldest number and its place, or joins there, again because the producer has changed
/// them meanwhile. A guess: twice in a row is rare. Without a bound, a hostile process could keep it here.
pub(super) const KEPT_TRIES: u32 = 10_000;

/// The layout of a broadcast lane in one line, beside that of a plain lane, whose records it has. The pages contain its
/// hash.
pub const BROADCAST_TEXT: &str = "plain=3704e993d4074093;\
broadcast:kept@512:u64,kept_place@520:position,holder@528:u32,last@640:position;\
cursor:policy@64:u32,slack@72:u64,lag_after_ns@80:u64,number@128:u64,messages@136:u64,bytes@144:u64,waits@152:u64,sleeps@160:u64,wakes_sent@168:u64,missed@176:u64,\
state@256:u32,pid@260:u32,fenced@264:u32,sleep@4096+64*slot:u64";

/// FNV-1a 64 of [`BROADCAST_TEXT`].
pub const BROADCAST_SIGNATURE: u64 = fnv1a(BROADCAST_TEXT.as_bytes());

// The text above names the plain layout by its signature.
const _: () = assert!(LAYOUT_SIGNATURE == 0x3704e993d4074093);

/// The seq of message `number`, which counts from 1: the headers count modulo 2^32 and skip 0.
#[inline]
pub const fn seq_of(number: u64) -> u32 {
    (1 + number.wrapping_sub(1) % 0xffff_ffff) as u32
}

/// The preamble of a broadcast lane's segment of this magic.
pub fn broadcast_preamble(magic: u64) -> Preamble {
    Preamble { layout_signature: BROADCAST_SIGNATURE, ..Preamble::new(magic) }
}

/// The segment of a broadcast lane's producer. Only the producer writes it; the consumers map it read-only.
///
/// | offset | type | field | meaning |
/// |---|---|---|---|
/// | 0 | 512 bytes | producer | as [`ProducerPage`], with magic `pelton-B`; `cursors`: the most consumers |
/// | 264 | u64 | room_seq | of that page: while the producer sleeps, the number that the holder's cursor must reach |
/// | 512 | u64 | kept | the producer writes no byte of this message, nor of a later one |
/// | 520 | position | kept_place | where that message is, or will be |
/// | 528 | u32 | holder | while the producer sleeps: the slot of the consumer that rings it |
/// | 640 | position | last | of the newest message, while a consumer has the policy *latest*; 0 before |
#[repr(C, align(128))]
#[derive(Debug)]
pub struct BroadcastPage {
    /// The words that a broadcast lane's producer has in common with a plain lane's.
    pub producer: ProducerPage,
    kept: AtomicU64,
    kept_place: AtomicU64,
    pub(super) holder: AtomicU32,
    _zero0: [u8; 108],
    pub(super) last: AtomicU64,
    _zero1: [u8; 120],
}

/// Loom's threads have small stacks.
const PADDING: usize = if cfg!(loom) { 32 } else { 3808 };

/// The segment of a broadcast lane's consumer. Only that consumer writes it; the producer maps it read-only.
///
/// | offset | type | field | meaning |
/// |---|---|---|---|
/// | 0 | 24 bytes | preamble | written once, before sharing, as are the next three fields |
/// | 64 | u32 | policy | 1 gate, 2 lag, 3 latest, 4 gate until |
/// | 72 | u64 | slack | bytes that a consumer which lags may be behind before the producer passes it |
/// | 80 | u64 | lag_after_ns | gate until: how long it may hold the producer up before it lags |
/// | 128 | u64 | number | every message below it is released; 0: not attached yet |
/// | 136.. | u64 | messages, bytes, waits, sleeps, wakes_sent, missed | statistics, never acted upon |
/// | 256 | u32 | state | [`State`] |
/// | 260 | u32 | pid | for diagnostics only |
/// | 264 | u32 | fenced | 1: a full fence lies between each release and the load of the producer's sleep word |
/// | 272 | u32, u64 | last_ring | as in a plain consumer's page |
/// | 4096 + 64 slot | sleep word | sleep | of this consumer; the slots' words are in different sets of a cache |
#[repr(C, align(128))]
#[derive(Debug)]
pub struct CursorPage {
    /// The kind and version of this segment.
    pub preamble: Preamble,
    _zero0: [u8; 40],
    policy: AtomicU32,
    _zero1: [u8; 4],
    slack: AtomicU64,
    lag_after_ns: AtomicU64,
    _zero2: [u8; 40],
    pub(super) number: AtomicU64,
    pub(super) messages: AtomicU64,
    pub(super) bytes: AtomicU64,
    pub(super) waits: AtomicU64,
    pub(super) sleeps: AtomicU64,
    pub(super) wakes_sent: AtomicU64,
    pub(super) missed: AtomicU64,
    _zero3: [u8; 72],
    pub(super) state: AtomicU32,
    pid: AtomicU32,
    pub(super) fenced: AtomicU32,
    _zero4: [u8; 4],
    pub(super) last_ring: RingNote,
    _zero5: [u8; PADDING],
    pub(super) sleep: [SleepLine; CURSORS_MAX],
}

/// A sleep word on a cache line of its own.
#[repr(C, align(64))]
#[derive(Debug)]
pub(super) struct SleepLine {
    pub(super) word: AtomicU64,
    _zero: [u8; 56],
}

#[cfg(not(loom))]
const _: () = {
    use core::mem::{offset_of, size_of};
    assert!(size_of::<BroadcastPage>() == 768);
    assert!(offset_of!(BroadcastPage, kept) == 512);
    assert!(offset_of!(BroadcastPage, kept_place) == 520);
    assert!(offset_of!(BroadcastPage, holder) == 528);
    assert!(offset_of!(BroadcastPage, last) == 640);
    assert!(size_of::<CursorPage>() == 8192);
    assert!(offset_of!(CursorPage, policy) == 64);
    assert!(offset_of!(CursorPage, slack) == 72);
    assert!(offset_of!(CursorPage, lag_after_ns) == 80);
    assert!(offset_of!(CursorPage, number) == 128);
    assert!(offset_of!(CursorPage, messages) == 136);
    assert!(offset_of!(CursorPage, bytes) == 144);
    assert!(offset_of!(CursorPage, waits) == 152);
    assert!(offset_of!(CursorPage, sleeps) == 160);
    assert!(offset_of!(CursorPage, wakes_sent) == 168);
    assert!(offset_of!(CursorPage, missed) == 176);
    assert!(offset_of!(CursorPage, state) == 256);
    assert!(offset_of!(CursorPage, pid) == 260);
    assert!(offset_of!(CursorPage, fenced) == 264);
    assert!(offset_of!(CursorPage, last_ring) == 272);
    assert!(offset_of!(CursorPage, sleep) == 4096);
    assert!(size_of::<SleepLine>() == 64);
};

/// What the producer does when a consumer falls behind. The consumer chooses it when it joins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// The producer waits for this consumer, which receives every message and may read it in place.
    Gate,
    /// The producer does not wait. It overwrites messages that are more than `slack` bytes old. The consumer copies
    /// each message, and learns exactly how many it missed.
    Lag {
        /// In bytes of the lane.
        slack: u64,
    },
    /// The consumer copies the newest message only.
    Latest,
    /// As [`Policy::Gate`], until this consumer has held the producer up for so long; then as [`Policy::Lag`] until it
    /// has caught up. The consumer copies.
    GateUntil {
        /// In bytes of the lane.
        slack: u64,
        /// In nanoseconds, by the producer's clock. The lane has no clock: see
        /// [`crate::BroadcastProducer::let_lag`].
        lag_after_ns: u64,
    },
}

impl Policy {
    /// As the words of the page: policy, slack, lag_after_ns.
    pub(super) fn words(self) -> (u32, u64, u64) {
        match self {
            Policy::Gate => (1, 0, 0),
            Policy::Lag { slack } => (2, slack, 0),
            Policy::Latest => (3, 0, 0),
            Policy::GateUntil { slack, lag_after_ns } => (4, slack, lag_after_ns),
        }
    }

    /// How long the consumer may hold the producer up, in nanoseconds; `u64::MAX`: without a limit.
    pub fn holds_ns(self) -> u64 {
        match self {
            Policy::Gate => u64::MAX,
            Policy::Lag { .. } | Policy::Latest => 0,
            Policy::GateUntil { lag_after_ns, .. } => lag_after_ns,
        }
    }

    /// Checks that the consumer may hold the producer up for at most `hold_max_ns`; `u64::MAX`: without a limit.
    ///
    /// # Errors
    /// [`LaneError::HoldTooLong`].
    pub fn check_hold(self, hold_max_ns: u64) -> Result<(), LaneError> {
        let holds_ns = self.holds_ns();
        if holds_ns > hold_max_ns { Err(LaneError::HoldTooLong { holds_ns, hold_max_ns }) } else { Ok(()) }
    }

    /// The policy, if the consumer may hold the producer up for at most so long.
    pub(super) fn holding_at_most(self, hold_max_ns: u64) -> Policy {
        match self {
            Policy::Gate if hold_max_ns != u64::MAX => Policy::GateUntil { slack: 0, lag_after_ns: hold_max_ns },
            Policy::GateUntil { slack, lag_after_ns } => {
                Policy::GateUntil { slack, lag_after_ns: lag_after_ns.min(hold_max_ns) }
            }
            policy => policy,
        }
    }

    /// The policy in a lane of this capacity, whose half is the most slack.
    pub(super) fn within(self, capacity: u64) -> Policy {
        let most = capacity / 2;
        match self {
            Policy::Lag { slack } => Policy::Lag { slack: slack.min(most) },
            Policy::GateUntil { slack, lag_after_ns } => Policy::GateUntil { slack: slack.min(most), lag_after_ns },
            policy => policy,
        }
    }

    /// Whether the consumer may read in place: the producer never passes it.
    pub fn reads_in_place(self) -> bool {
        self == Policy::Gate
    }
}

impl BroadcastPage {
    /// A new page, not yet shared: see [`ProducerPage::new`].
    pub fn new(capacity: u64, message_bytes_max: u64, generation: u64, pid: u32) -> BroadcastPage {
        let mut producer = ProducerPage::new(capacity, message_bytes_max, generation, pid);
        producer.preamble = broadcast_preamble(MAGIC_BROADCAST);
        producer.cursors = CURSORS_MAX as u32;
        BroadcastPage {
            producer,
            kept: AtomicU64::new(1),
            kept_place: AtomicU64::new(Position::START.pack()),
            holder: AtomicU32::new(0),
            _zero0: [0; 108],
            last: AtomicU64::new(0),
            _zero1: [0; 120],
        }
    }

    /// Stores `kept`, before the caller writes over anything below it.
    pub(super) fn keep(&self, number: u64, place: Position) {
        store_bound(&self.kept, &self.kept_place, number, place, ["keep: before", "keep: place", "keep: number"]);
    }

    /// `kept`, after the loads that it guards.
    #[inline(always)]
    pub(super) fn kept_after_reading(&self) -> u64 {
        fence_after_reading(); // [keep]
        self.kept.load(Relaxed)
    }

    /// A message below which the producer has given up, with its place: `kept`, or the next one, which the producer is
    /// about to store. `None`: it has changed `kept` meanwhile.
    ///
    /// # Errors
    /// [`LaneError::Corrupt`] if the place lies outside data of this `capacity`, or the number is too large.
    pub(super) fn kept_and_place(&self, capacity: u64) -> Result<Option<(u64, Position)>, LaneError> {
        load_bound("kept", &self.kept, &self.kept_place, capacity)
    }

    /// As [`BroadcastPage::kept_and_place`], as often as it takes.
    ///
    /// # Errors
    /// [`LaneError::Corrupt`].
    pub(super) fn oldest(&self, capacity: u64) -> Result<(u64, Position), LaneError> {
        for _ in 0..KEPT_TRIES {
            if let Some(found) = self.kept_and_place(capacity)? {
                return Ok(found);
            }
        }
        Err(self.changing())
    }

    /// The error after [`KEPT_TRIES`].
    pub(super) fn changing(&self) -> LaneError {
        LaneError::Corrupt { what: "kept, which changes at each load", found: self.kept(), wanted: 0 }
    }

    /// The number of the oldest message that the producer has not given up, and that of the next one: approximate while
    /// the producer runs. For inspection.
    ///
    /// # Errors
    /// [`LaneError::Corrupt`].
    pub fn numbers(&self, capacity: u64) -> Result<(u64, u64), LaneError> {
        let (kept, place) = self.oldest(capacity)?;
        let ahead = self.producer.tail_and_floor().0.since(place);
        Ok((kept, kept + if ahead <= capacity / 8 { ahead } else { 0 }))
    }

    /// The number of the oldest message that the producer has not given up, unchecked.
    pub fn kept(&self) -> u64 {
        self.kept.load(KEEP.load())
    }
}

/// Stores a number that only grows with its place, before the caller writes over anything below it.
pub(super) fn store_bound(
    number_word: &AtomicU64,
    place_word: &AtomicU64,
    number: u64,
    place: Position,
    failpoints: [&'static str; 3],
) {
    failpoint(failpoints[0]);
    // Both with release: a consumer that loads the same number before and after the place has the place of that
    // number, and sees the records before it. [keep]
    place_word.store(place.pack(), KEEP.store());
    failpoint(failpoints[1]);
    number_word.store(number, KEEP.store());
    failpoint(failpoints[2]);
    fence_before_overwriting(); // [keep]
}

/// Such a number with its place, or the next one, which the producer is about to store. `None`: it has changed
/// meanwhile.
///
/// # Errors
/// [`LaneError::Corrupt`] if the place lies outside data of this `capacity`, or the number is too large.
pub(super) fn load_bound(
    what: &'static str,
    number_word: &AtomicU64,
    place_word: &AtomicU64,
    capacity: u64,
) -> Result<Option<(u64, Position)>, LaneError> {
    let number = number_word.load(KEEP.load()); // [keep]
    let place = Position::unpack(place_word.load(KEEP.load())); // [keep]
    // The producer stores a place before its number, so the place is this number's or the next one's to be stored,
    // and valid in both cases: the producer writes nothing at or after this number.
    if number_word.load(Relaxed) != number {
        return Ok(None);
    }
    place.check("place of the oldest message", capacity)?;
    let ahead = place.since(Position { offset: 0, seq: seq_of(number) });
    // A lane has no more messages than that.
    if number == 0 || number > NUMBER_MAX || ahead > capacity / 8 {
        return Err(LaneError::Corrupt { what, found: number, wanted: place.seq.into() });
    }
    Ok(Some((number + ahead, place)))
}

impl CursorPage {
    /// Makes a page that the producer does not count ready for its next consumer.
    pub(super) fn begin(&self, policy: Policy, pid: u32) {
        let (policy, slack, lag_after_ns) = policy.words();
        // Relaxed: the policy publishes them to a producer that begins, and the join word to any. [join]
        self.slack.store(slack, Relaxed);
        self.lag_after_ns.store(lag_after_ns, Relaxed);
        self.policy.store(policy, JOIN.store());
        for counter in [&self.messages, &self.bytes, &self.waits, &self.sleeps, &self.wakes_sent, &self.missed] {
            counter.store(0, Relaxed);
        }
        self.pid.store(pid, Relaxed);
        self.state.store(State::Open as u32, Relaxed);
    }

    /// A new page, not yet shared.
    pub fn new(policy: Policy, pid: u32) -> CursorPage {
        let (policy, slack, lag_after_ns) = policy.words();
        CursorPage {
            preamble: broadcast_preamble(MAGIC_CURSOR),
            _zero0: [0; 40],
            policy: AtomicU32::new(policy),
            _zero1: [0; 4],
            slack: AtomicU64::new(slack),
            lag_after_ns: AtomicU64::new(lag_after_ns),
            _zero2: [0; 40],
            number: AtomicU64::new(0),
            messages: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            waits: AtomicU64::new(0),
            sleeps: AtomicU64::new(0),
            wakes_sent: AtomicU64::new(0),
            missed: AtomicU64::new(0),
            _zero3: [0; 72],
            state: AtomicU32::new(State::Open as u32),
            pid: AtomicU32::new(pid),
            fenced: AtomicU32::new(0),
            _zero4: [0; 4],
            last_ring: RingNote::new(),
            _zero5: [0; PADDING],
            sleep: core::array::from_fn(|_| SleepLine { word: AtomicU64::new(0), _zero: [0; 56] }),
        }
    }

    /// The policy that the consumer has chosen.
    ///
    /// # Errors
    /// [`LaneError::Corrupt`] if it is none.
    pub fn policy(&self) -> Result<Policy, LaneError> {
        // The policy first: see `begin`. A hostile consumer may change them later, so the caller keeps this copy.
        let policy = self.policy.load(JOIN.load());
        let (slack, lag_after_ns) = (self.slack.load(Relaxed), self.lag_after_ns.load(Relaxed));
        match policy {
            1 => Ok(Policy::Gate),
            2 => Ok(Policy::Lag { slack }),
            3 => Ok(Policy::Latest),
            4 => Ok(Policy::GateUntil { slack, lag_after_ns }),
            other => Err(LaneError::Corrupt { what: "policy of a cursor", found: other.into(), wanted: 4 }),
        }
    }

    /// The cursor, unchecked: every message below this number is released; 0: not attached yet.
    pub fn number(&self) -> u64 {
        self.number.load(RELEASE.load()) // [release]
    }

    /// Its process, for diagnostics only.
    pub fn pid(&self) -> u32 {
        self.pid.load(Relaxed)
    }

    /// Its last ring.
    pub fn last_ring(&self) -> LastRing {
        self.last_ring.load()
    }

    /// Messages that it missed (a statistic).
    pub fn missed(&self) -> u64 {
        self.missed.load(Relaxed)
    }

    /// Messages that it received (a statistic, as are the next four).
    pub fn messages(&self) -> u64 {
        self.messages.load(Relaxed)
    }

    /// Payload bytes that it received.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Receives that found no message and waited.
    pub fn waits(&self) -> u64 {
        self.waits.load(Relaxed)
    }

    /// Times that it went to sleep.
    pub fn sleeps(&self) -> u64 {
        self.sleeps.load(Relaxed)
    }

    /// Times that it rang the producer.
    pub fn wakes_sent(&self) -> u64 {
        self.wakes_sent.load(Relaxed)
    }

    /// Whether the consumer has closed.
    pub fn is_closed(&self) -> bool {
        self.state.load(crate::edges::CLOSE.load()) == State::Closed as u32 // [close]
    }

    /// Whether the consumer fences each release.
    pub fn is_fenced(&self) -> bool {
        self.fenced.load(crate::edges::FENCED.load()) == 1 // [fenced]
    }
}
