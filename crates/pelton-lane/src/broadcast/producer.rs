//! The producer's side of a broadcast lane: which messages it keeps, for whom, and whom it rings.

use super::pages::{BroadcastPage, CURSORS_MAX, CursorPage, Policy, seq_of};
use super::table::ByPath;
use crate::edges::{AtomicU64, FENCED, LAST, failpoint, full_fence, light_barrier};
use crate::error::LaneError;
use crate::layout::{ConsumerPage, Position, ProducerPage, ReceiverPage, WINDOW};
use crate::memory::{Data, Memory, field};
use crate::producer::{Producer, ReservedSpace};
use crate::sleep::{ARMED, CLOSED, FLAGS, UNBARRIERED};
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::ptr::NonNull;
use core::sync::atomic::Ordering::Relaxed;

/// Waypoints are at least this many bytes apart, or a 256th of the capacity if that is less. So the producer gives up
/// at most this much too little, and a full lane of 64 MiB has 1,024 of them.
const WAYPOINT_BYTES: u64 = 64 * 1024;

/// The distance of waypoints in a lane of this capacity.
pub(super) fn waypoint_bytes(capacity: u64) -> u64 {
    WAYPOINT_BYTES.min(capacity / 256)
}

/// How often the producer arms again because another consumer has become the slowest meanwhile. A guess: once is rare.
/// Without a bound, consumers that overtake each other could keep it here.
const ARM_TRIES: u32 = 8;

/// The producer's page and the data of one broadcast lane. The caller maps them.
#[derive(Clone, Copy, Debug)]
pub struct BroadcastMemory {
    /// The producer's page.
    pub producer: NonNull<BroadcastPage>,
    /// The data.
    pub data: Data,
}

/// Where a consumer begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartFrom {
    /// With the next message.
    Now,
    /// With the oldest message that the lane still has.
    Oldest,
    /// With the last so many messages, as far as the lane still has them.
    Last(u64),
}

/// What a consumer needs to know to attach: its slot, and its first message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Joined {
    /// Which of the lane's consumers it is. The producer names it in the mask of consumers to ring.
    pub slot: u32,
    /// Names this consumer to its producer for good. A slot is given again, this number never.
    pub join: u64,
    /// A message number, and its place.
    pub number: u64,
    /// Where that message is, or will be.
    pub place: Position,
    /// How many messages from there on the consumer passes over.
    pub skip: u64,
}

/// The consumer that holds the producer up: the slowest one that gates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its slot.
    pub slot: u32,
    /// As [`Joined::join`].
    pub join: u64,
    /// Its cursor, as last loaded.
    pub number: u64,
}

/// Why the producer no longer counts a consumer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CursorLoss {
    /// It has closed.
    Closed,
    /// Its cursor broke the rules.
    Corrupt(LaneError),
}

/// A joined consumer.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) slot: u32,
    pub(super) join: u64,
    pub(super) page: NonNull<CursorPage>,
    pub(super) policy: Policy,
    /// Where it joined, or, by path, may join.
    pub(super) joined: u64,
    /// Its cursor as last loaded and checked.
    pub(super) seen: u64,
    /// It has held the producer up for too long when this was the next message, and lags until it has got there and
    /// has caught up; 0: it does not lag.
    pub(super) lags_to: u64,
    /// The epoch in which it was rung.
    pub(super) rung_epoch: u64,
    pub(super) lost: Option<CursorLoss>,
}

impl Slot {
    fn page(&self) -> &CursorPage {
        // SAFETY: `join`'s caller keeps the page mapped until `remove`.
        unsafe { self.page.as_ref() }
    }

    pub(super) fn gates(&self) -> bool {
        self.lost.is_none()
            && match self.policy {
                Policy::Gate => true,
                Policy::GateUntil { .. } => self.lags_to == 0,
                Policy::Lag { .. } | Policy::Latest => false,
            }
    }
}

/// Where a message is, or will be: known to this side alone.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waypoint {
    pub(super) number: u64,
    pub(super) place: Position,
    /// Committed bytes before it.
    pub(super) sent_bytes: u64,
}

/// The words that the plain producer takes for its peer's: nothing but this broadcast producer writes them, and nothing
/// ever sleeps there.
#[derive(Debug)]
pub(super) struct OwnPages {
    consumer: ConsumerPage,
    receiver: ReceiverPage,
    /// 0: see [`BroadcastProducer::changes`].
    pub(super) zero: AtomicU64,
}

/// Where a producer begins: the positions of a lane that is new, or that a predecessor has left.
#[derive(Debug)]
pub(super) struct Start {
    pub(super) number: u64,
    pub(super) tail: Position,
    pub(super) held: u64,
    pub(super) head: Position,
    pub(super) floor: u64,
}

/// The sending side of a broadcast lane.
#[derive(Debug)]
pub struct BroadcastProducer {
    pub(super) inner: Producer,
    pub(super) page: NonNull<BroadcastPage>,
    pub(super) own: NonNull<OwnPages>,
    /// Of the next message.
    pub(super) number: u64,
    /// The place of the message before it, as a word; 0 before the first.
    pub(super) newest: u64,
    /// The sleep words of the consumers, in the order of `slots`.
    pub(super) sleep_words: Vec<NonNull<AtomicU64>>,
    pub(super) slots: Vec<Slot>,
    /// Consumers that have joined so far.
    pub(super) joins: u64,
    /// A full fence follows each publication: this process is not registered for `membarrier`, or a consumer asks for
    /// it. For good, because a consumer may rely on it.
    pub(super) fences: bool,
    /// Consumers that may be passed while they read.
    pub(super) racing: u32,
    /// Consumers with the policy *latest*.
    pub(super) latest: u32,
    /// The last so many messages are kept for later consumers, as long as that costs nobody space.
    pub(super) history: u64,
    pub(super) kept: u64,
    /// The producer overwrites nothing from this number on; at most `kept`. By path, a consumer may have joined before
    /// `kept` while the producer moved it. Otherwise it is `kept`.
    pub(super) held: u64,
    /// In the order of their numbers. The first is at `held`.
    pub(super) waypoints: VecDeque<Waypoint>,
    pub(super) waypoint_bytes: u64,
    /// By path: consumers that join by themselves.
    pub(super) by_path: Option<ByPath>,
    /// How often consumers have joined or left by themselves; a word of `own` if they cannot. [join]
    pub(super) changes: NonNull<AtomicU64>,
    pub(super) changes_seen: u64,
}

// SAFETY: the pointers are to shared memory that outlives this (the callers of `attach` and `join` guarantee it), and
// to `own`, which this owns. They are not tied to a thread, and this is the lane's only producer.
unsafe impl Send for BroadcastProducer {}

impl Drop for BroadcastProducer {
    fn drop(&mut self) {
        // SAFETY: `attach` made it from a box; only this frees it, and `inner` does not use it when it is dropped.
        drop(unsafe { Box::from_raw(self.own.as_ptr()) });
    }
}

impl BroadcastProducer {
    /// Creates the producer of a new lane without consumers, whose first message has this `number`, at least 1.
    /// `can_barrier` as for [`crate::Sleeper::of_receiver`].
    ///
    /// # Safety
    /// `memory` stays mapped writable as long as this lives. The lane has no other producer. The page's capacity and
    /// limit are valid and equal to `memory`'s. The data is zero.
    pub unsafe fn attach(memory: BroadcastMemory, number: u64, can_barrier: bool) -> BroadcastProducer {
        assert!(number > 0);
        let tail = Position { offset: 0, seq: seq_of(number) };
        let start = Start { number, tail, held: number, head: tail, floor: 0 };
        // SAFETY: as the caller guarantees.
        let mut producer =
            unsafe { BroadcastProducer::at(memory, &start, can_barrier) }.expect("the start lies inside the data");
        producer.waypoints.push_back(Waypoint { number, place: tail, sent_bytes: producer.inner.sent_bytes() });
        producer.page().keep(number, tail);
        producer
    }

    /// The producer at `start`, without waypoints: the caller adds one at `held`.
    ///
    /// # Safety
    /// As for [`BroadcastProducer::attach`], but for the data: it has records from the start's head to its tail.
    pub(super) unsafe fn at(
        memory: BroadcastMemory,
        start: &Start,
        can_barrier: bool,
    ) -> Result<BroadcastProducer, LaneError> {
        let consumer = ConsumerPage::new(start.head, 1, 0);
        let own = OwnPages { consumer, receiver: ReceiverPage::new(), zero: AtomicU64::new(0) };
        let own = NonNull::from(Box::leak(Box::new(own)));
        // SAFETY: all four are fields of pages that stay mapped, as the caller and `own` guarantee.
        let (inner, changes) = unsafe {
            let plain = Memory {
                producer: field(memory.producer, |p| &raw mut (*p).producer),
                consumer: field(own, |p| &raw mut (*p).consumer),
                receiver: field(own, |p| &raw mut (*p).receiver),
                data: memory.data,
            };
            let inner = Producer::attach(plain, start.tail, start.head, start.floor, can_barrier);
            (inner, field(own, |p| &raw mut (*p).zero))
        };
        let inner = inner.inspect_err(|_| {
            // SAFETY: made from a box above, and nothing uses it.
            drop(unsafe { Box::from_raw(own.as_ptr()) });
        })?;
        Ok(BroadcastProducer {
            inner,
            page: memory.producer,
            own,
            number: start.number,
            newest: 0,
            sleep_words: Vec::new(),
            slots: Vec::new(),
            joins: 0,
            fences: !can_barrier,
            racing: 0,
            latest: 0,
            history: 0,
            kept: start.number.min(start.held),
            held: start.held,
            waypoints: VecDeque::new(),
            waypoint_bytes: waypoint_bytes(memory.data.capacity()),
            by_path: None,
            changes,
            changes_seen: 0,
        })
    }

    #[inline(always)]
    pub(super) fn page(&self) -> &BroadcastPage {
        // SAFETY: `attach`'s caller guarantees that the page is mapped.
        unsafe { self.page.as_ref() }
    }

    /// Keeps the last `messages` for consumers that join later, as long as they take no space that a message needs.
    /// Initially 0: a consumer that joins from the oldest finds what happens not to be overwritten yet.
    pub fn set_history(&mut self, messages: u64) {
        self.history = messages;
    }

    /// Lets a consumer join, whose page its side has just created. `None`: the lane has [`CURSORS_MAX`] consumers.
    /// `policy` is the page's, as the caller has loaded and accepted it: the page is not asked again. More slack than
    /// half the capacity counts as that, so that a consumer that lags has to catch up.
    /// Abort a reservation that is written in place before: the consumer may read that space.
    ///
    /// # Safety
    /// `page` stays mapped until [`BroadcastProducer::remove`] of this join, or as long as this lives.
    ///
    /// # Panics
    /// If consumers join by themselves: [`BroadcastProducer::take_over`].
    pub unsafe fn join(&mut self, page: NonNull<CursorPage>, policy: Policy, from: StartFrom) -> Option<Joined> {
        assert!(self.by_path.is_none(), "consumers join this lane by themselves");
        let policy = policy.within(self.inner.capacity());
        let taken = |slot| self.slots.iter().any(|other| other.slot == slot);
        let slot = (0..CURSORS_MAX as u32).find(|slot| !taken(*slot))?;
        self.joins += 1;
        let join = self.joins;
        let oldest = self.waypoints[0];
        let (number, place, skip) = match from {
            StartFrom::Now | StartFrom::Last(0) => (self.number, self.inner.tail(), 0),
            StartFrom::Oldest => (oldest.number, oldest.place, 0),
            StartFrom::Last(messages) => {
                let first = self.number.saturating_sub(messages).max(oldest.number);
                let waypoint = self.waypoint_before(first);
                (waypoint.number, waypoint.place, first - waypoint.number)
            }
        };
        // SAFETY: the caller guarantees that the page is mapped; the slot is below CURSORS_MAX.
        unsafe { self.count(slot, join, page, policy, number) };
        if policy == Policy::Latest {
            // A consumer that does not join from now finds the newest message, if the lane still has it. Otherwise it
            // must not find an older one, whose seq may have come round.
            self.store_last(if self.kept < self.number { self.newest } else { 0 });
        }
        Some(Joined { slot, join, number, place, skip })
    }

    /// Counts a consumer from now on.
    ///
    /// # Safety
    /// As for [`BroadcastProducer::join`]; the slot is below CURSORS_MAX.
    pub(super) unsafe fn count(
        &mut self,
        slot: u32,
        join: u64,
        page: NonNull<CursorPage>,
        policy: Policy,
        joined: u64,
    ) {
        self.racing += u32::from(!policy.reads_in_place());
        self.latest += u32::from(policy == Policy::Latest);
        let seen = joined;
        self.slots.push(Slot { slot, join, page, policy, joined, seen, lags_to: 0, rung_epoch: 0, lost: None });
        // SAFETY: the caller guarantees that the page is mapped, and the slot.
        self.sleep_words.push(unsafe { field(page, |p| &raw mut (*p).sleep[slot as usize].word) });
    }

    /// Removes a consumer that has closed, is corrupt or is proved to be dead: from now on the producer does not wait
    /// for it. The caller may unmap its page afterwards. Ends an announced sleep: this consumer may be the one that
    /// would have rung.
    pub fn remove(&mut self, join: u64) {
        let Some(index) = self.slots.iter().position(|other| other.join == join) else { return };
        self.inner.disarm();
        let removed = self.slots.swap_remove(index);
        self.sleep_words.swap_remove(index);
        self.racing -= u32::from(!removed.policy.reads_in_place());
        self.latest -= u32::from(removed.policy == Policy::Latest);
    }

    /// A consumer that the producer no longer counts, and why. The caller then calls [`BroadcastProducer::remove`].
    pub fn lost(&mut self) -> Option<(u64, CursorLoss)> {
        self.discover();
        for slot in &mut self.slots {
            if slot.lost.is_none() && slot.page().is_closed() {
                slot.lost = Some(CursorLoss::Closed);
            }
        }
        self.slots.iter().find_map(|slot| Some((slot.join, slot.lost?)))
    }

    /// The slots of all consumers, as a mask.
    pub fn slots(&self) -> u64 {
        self.slots.iter().fold(0, |mask, slot| mask | 1 << slot.slot)
    }

    /// The cursor of a consumer, as last loaded.
    pub fn cursor_of(&self, join: u64) -> Option<u64> {
        self.slots.iter().find(|other| other.join == join).map(|slot| slot.seen)
    }

    /// Whether this consumer lags now: always, or because of [`BroadcastProducer::let_lag`].
    pub fn lags(&self, join: u64) -> bool {
        self.slots.iter().any(|slot| slot.join == join && !slot.gates())
    }

    /// The slowest consumer that gates, by its cursor as last loaded, unless it has released everything.
    pub fn holder(&self) -> Option<Holder> {
        let gating = self.slots.iter().filter(|slot| slot.gates() && slot.seen < self.number);
        gating.min_by_key(|slot| slot.seen).map(|slot| Holder { slot: slot.slot, join: slot.join, number: slot.seen })
    }

    /// The consumer with [`Policy::GateUntil`] has held the producer up for too long: it lags until it has caught up.
    /// Does nothing for other policies. Otherwise it ends an announced sleep: this consumer would have rung, and need
    /// not any more.
    pub fn let_lag(&mut self, join: u64) {
        let Some(slot) = self.slots.iter_mut().find(|other| other.join == join) else { return };
        if matches!(slot.policy, Policy::GateUntil { .. }) {
            slot.lags_to = self.number;
            self.inner.disarm();
        }
    }

    /// Reserves space for one message of `bytes`; never waits. `None`: a consumer that gates holds the lane full:
    /// [`BroadcastProducer::holder`]. A new reservation replaces an earlier one that was not committed.
    ///
    /// # Errors
    /// [`LaneError::TooLarge`], [`LaneError::Unbacked`].
    #[inline(always)]
    pub fn try_reserve(&mut self, bytes: u64) -> Result<Option<ReservedSpace>, LaneError> {
        match self.reserve_fast(bytes) {
            Some(space) => Ok(Some(space)),
            None => self.reserve_slow(bytes),
        }
    }

    /// As [`BroadcastProducer::try_reserve`], if the space is known already. `None`: call that.
    #[inline(always)]
    pub fn reserve_fast(&mut self, bytes: u64) -> Option<ReservedSpace> {
        self.inner.reserve_fast(bytes)
    }

    #[cold]
    #[inline(never)]
    fn reserve_slow(&mut self, bytes: u64) -> Result<Option<ReservedSpace>, LaneError> {
        if bytes > self.inner.message_bytes_max() {
            return Err(LaneError::TooLarge { bytes, bytes_max: self.inner.message_bytes_max() });
        }
        self.note_waypoint();
        // While the message fits in the window, the producer needs no cursor.
        if !self.inner.fits_in_window(bytes) {
            self.load_cursors();
            self.keep_for(true);
        }
        let mut space = self.inner.try_reserve(bytes)?;
        if space.is_none() {
            // Only consumers that gate may hold the producer up.
            self.load_cursors();
            self.keep_for(false);
            space = self.inner.try_reserve(bytes)?;
        }
        // To where the next waypoint is due.
        let since = self.inner.sent_bytes().wrapping_sub(self.waypoints.back().expect("one is at `kept`").sent_bytes);
        self.inner.shorten_fast_path(self.waypoint_bytes.saturating_sub(since));
        Ok(space)
    }

    fn note_waypoint(&mut self) {
        let sent_bytes = self.inner.sent_bytes();
        let newest = self.waypoints.back().expect("one is at `kept`");
        if self.number > newest.number && sent_bytes.wrapping_sub(newest.sent_bytes) >= self.waypoint_bytes {
            self.waypoints.push_back(Waypoint { number: self.number, place: self.inner.tail(), sent_bytes });
        }
    }

    /// The newest waypoint not after `number`, which is not below `kept`.
    pub(super) fn waypoint_before(&self, number: u64) -> Waypoint {
        // Mostly the first or the second: the slowest consumer is near it, and the search would load cold memory.
        let near = self.waypoints.iter().take(4).take_while(|waypoint| waypoint.number <= number).count();
        let after = match near {
            4 => self.waypoints.partition_point(|waypoint| waypoint.number <= number),
            near => near,
        };
        self.waypoints[after - 1]
    }

    /// The oldest message that is at most `slack` bytes old, as far as waypoints show it.
    fn newer_than(&self, slack: u64) -> u64 {
        let end = self.inner.sent_bytes();
        let after = self.waypoints.partition_point(|waypoint| end.wrapping_sub(waypoint.sent_bytes) > slack);
        self.waypoints.get(after).map_or(self.number, |waypoint| waypoint.number)
    }

    /// The newest message before which a waypoint shows `slack` bytes or more to the end: that many are kept at least,
    /// and less than a waypoint's distance more.
    fn behind_by(&self, slack: u64) -> u64 {
        let end = self.inner.sent_bytes();
        let after = self.waypoints.partition_point(|waypoint| end.wrapping_sub(waypoint.sent_bytes) >= slack);
        self.waypoints.get(after.saturating_sub(1)).map_or(self.number, |waypoint| waypoint.number)
    }

    /// Moves `kept` to the oldest message that counts, by the cursors as last loaded. `lenient`: history and consumers
    /// that lag count too, within their slack.
    fn keep_for(&mut self, lenient: bool) {
        // Where each gates, and nothing else counts, the searches among the waypoints are not needed.
        let counts_others = lenient && self.keeps_for_others();
        let half = if counts_others { self.newer_than(self.inner.capacity() / 2) } else { self.number };
        // A consumer of the newest message finds it until a later one needs its space.
        let history = self.history.max(u64::from(self.latest > 0));
        let mut oldest = self.number.saturating_sub(history).max(half).min(self.number);
        // For consumers that lag too: otherwise a producer of messages larger than their slack passes them each time.
        let newest = (self.number - 1).max(half);
        for slot in self.slots.iter().filter(|slot| slot.lost.is_none()) {
            let counted = match slot.policy {
                _ if slot.gates() => slot.seen,
                Policy::Lag { slack } | Policy::GateUntil { slack, .. } if lenient => {
                    slot.seen.max(self.behind_by(slack).max(half).min(newest))
                }
                _ => continue,
            };
            oldest = oldest.min(counted);
        }
        self.keep(oldest);
    }

    pub(super) fn load_cursors(&mut self) {
        self.discover();
        let end = self.number;
        for index in 0..self.slots.len() {
            let slot = &mut self.slots[index];
            if slot.lost.is_some() {
                continue;
            }
            if slot.page().is_closed() {
                slot.lost = Some(CursorLoss::Closed);
                continue;
            }
            let number = slot.page().number(); // [release]
            // 0: it has not attached yet, and stands where it joined. By path, one that joins by itself stores numbers
            // until none is below `kept`.
            let is_joining = number == 0 || self.by_path.is_some() && slot.seen == slot.joined && number < slot.joined;
            if !is_joining && !(slot.seen..=end).contains(&number) {
                if self.by_path.as_ref().is_some_and(|by_path| by_path.has_changed(slot.slot)) {
                    // The number is its successor's.
                    slot.lost = Some(CursorLoss::Closed);
                    continue;
                }
                let problem = LaneError::Corrupt { what: "number of a cursor", found: number, wanted: end };
                slot.lost = Some(CursorLoss::Corrupt(problem));
                continue;
            }
            slot.seen = slot.seen.max(number);
            let (seen, lags_to) = (slot.seen, slot.lags_to);
            if let (Policy::GateUntil { slack, .. }, true) = (slot.policy, lags_to > 0) {
                // Not by its slack alone: one that is stopped may be within it, and would hold the lane again.
                let caught_up = seen >= lags_to.max(self.kept).max(self.newer_than(slack));
                self.slots[index].lags_to = if caught_up { 0 } else { lags_to };
            }
        }
    }

    /// Moves `kept` to `oldest`, or to the newest waypoint before it.
    fn keep(&mut self, oldest: u64) {
        let sent_bytes = self.inner.sent_bytes();
        if oldest == self.number && self.waypoints.back().is_none_or(|newest| newest.number < oldest) {
            self.waypoints.push_back(Waypoint { number: oldest, place: self.inner.tail(), sent_bytes });
        }
        let Waypoint { number, place, .. } = self.waypoint_before(oldest.max(self.kept));
        if number > self.kept {
            self.page().keep(number, place); // [keep]
            self.kept = number;
        }
        let Waypoint { number, place, .. } = match self.by_path {
            None => self.waypoint_before(self.kept),
            Some(_) => self.hold(),
        };
        if number == self.held {
            return;
        }
        self.held = number;
        while self.waypoints[0].number < number {
            self.waypoints.pop_front();
        }
        // SAFETY: `own` lives as long as this, and nothing else writes it.
        let head = unsafe { &self.own.as_ref().consumer.head };
        // Relaxed: only this thread uses it.
        head.store(place.pack(), Relaxed);
    }

    /// Copies `payload` into the reserved space. It may be shorter than the space.
    #[inline(always)]
    pub fn copy_in(&mut self, space: ReservedSpace, payload: &[u8]) {
        if self.racing == 0 {
            self.inner.copy_in(space, payload);
        } else {
            self.inner.copy_in_racing(space, payload);
        }
    }

    /// The address of the reserved space, for writing in place until commit. `None` while a consumer may lag: it could
    /// read the space at the same time, so only [`BroadcastProducer::copy_in`] may write it.
    #[cfg(not(loom))]
    #[inline(always)]
    pub fn payload(&self, space: ReservedSpace) -> Option<NonNull<u8>> {
        (self.racing == 0).then(|| self.inner.payload(space))
    }

    /// Publishes the reserved message with the first `bytes` of its space as its payload. Returns the mask of the slots
    /// to ring.
    ///
    /// # Panics
    /// If `bytes` exceeds the reservation, or the space is not this lane's.
    #[inline(always)]
    #[must_use = "sleeping consumers must be rung"]
    pub fn commit(&mut self, space: ReservedSpace, bytes: u64) -> u64 {
        let seq = self.inner.tail().seq;
        // Nothing sleeps on the plain producer's receiver: it is `own`.
        let _ = self.inner.commit(space, bytes);
        self.number += 1;
        self.newest = Position { offset: space.offset - 8, seq }.pack();
        if self.latest > 0 {
            self.store_last(self.newest);
        }
        if self.fences {
            full_fence("fence"); // [sleep]
        } else {
            light_barrier(); // [sleep]
        }
        // Relaxed: the barrier orders them.
        // SAFETY: `join`'s caller keeps the pages mapped until `remove`, and that of `take_over` the table.
        let (flags, changes) = unsafe {
            let flags = self.sleep_words.iter().fold(0, |flags, word| flags | word.as_ref().load(Relaxed));
            (flags, self.changes.as_ref().load(Relaxed))
        };
        let is_quiet = flags & FLAGS == 0 || self.fences && flags & (ARMED | CLOSED) == 0;
        if is_quiet && changes == self.changes_seen { 0 } else { self.find_sleepers() }
    }

    pub(super) fn store_last(&self, place: u64) {
        // With release: a consumer that loads it finds the header. [last]
        self.page().last.store(place, LAST.store());
        failpoint("broadcast: last");
    }

    #[cold]
    #[inline(never)]
    fn find_sleepers(&mut self) -> u64 {
        // A consumer that joined by itself may sleep. [join], [sleep]
        self.discover();
        // SAFETY: `join`'s caller keeps the pages mapped until `remove`.
        let load = |word: &NonNull<AtomicU64>| unsafe { word.as_ref() }.load(Relaxed);
        if !self.fences && self.sleep_words.iter().any(|word| load(word) & UNBARRIERED != 0) {
            self.fences = true;
            self.page().producer.fenced.store(1, FENCED.store()); // [fenced]
            failpoint("broadcast: fenced");
            full_fence("fence"); // [sleep]
        }
        let mut asleep = 0u64;
        for (slot, word) in self.slots.iter_mut().zip(&self.sleep_words) {
            // Relaxed: the fence above, or that of the caller, orders it.
            let word = load(word);
            if word & (ARMED | CLOSED) == ARMED && word & !FLAGS != slot.rung_epoch {
                slot.rung_epoch = word & !FLAGS;
                asleep |= 1 << slot.slot;
            }
        }
        let wakes = &self.page().producer.wakes_sent;
        wakes.store(wakes.load(Relaxed).wrapping_add(u64::from(asleep.count_ones())), Relaxed);
        failpoint("broadcast finds sleepers: counted");
        asleep
    }

    /// Announces a sleep until the lane has space for a message of `bytes`, or, for `None`, until no consumer that
    /// gates has unreleased messages. Returns whether to sleep; false: the condition already holds, or the consumers
    /// overtake each other so often that the caller has to try again. `barrier` as for [`crate::Sleeper::arm`]; it may
    /// run several times.
    pub fn arm(&mut self, bytes: Option<u64>, mut barrier: impl FnMut()) -> bool {
        for _ in 0..ARM_TRIES {
            if self.is_ready(bytes) {
                break;
            }
            let Some(holder) = self.holder() else { break };
            // As in a plain lane: half of what it has to release. Only the slowest consumer rings, as the others'
            // releases give no space.
            let depth = self.number - holder.number;
            let wanted = if bytes.is_some() { depth.div_ceil(2) } else { depth };
            // Relaxed for both: the barrier below orders them. [sleep]
            self.page().holder.store(holder.slot, Relaxed);
            failpoint("broadcast arms: holder");
            self.page().producer.room_seq.store(holder.number + wanted, Relaxed);
            failpoint("broadcast arms: room_seq");
            self.inner.sleeper().arm(&mut barrier);
            if self.is_ready(bytes) {
                break;
            }
            // If another one is the slowest now, this one may never ring.
            if self.holder().is_some_and(|now| now.slot == holder.slot) {
                let sleeps = &self.page().producer.sleeps;
                // Relaxed: a statistic.
                sleeps.store(sleeps.load(Relaxed).wrapping_add(1), Relaxed);
                return true;
            }
        }
        self.inner.disarm();
        false
    }

    /// Whether there is space for a message of `bytes`, or, for `None`, no consumer that gates has unreleased messages.
    fn is_ready(&mut self, bytes: Option<u64>) -> bool {
        let Some(bytes) = bytes else { return self.is_released() };
        // As a reservation does: history and consumers that lag lose nothing as long as there is space.
        let mut has_space = self.inner.has_space(bytes);
        if !has_space {
            self.load_cursors();
            has_space = [true, false].into_iter().any(|lenient| {
                self.keep_for(lenient);
                self.inner.has_space(bytes)
            });
        }
        self.end_fast_path();
        has_space
    }

    /// The next reservation takes the slow path, which notes waypoints and finds space that consumers have released.
    pub fn end_fast_path(&mut self) {
        self.inner.shorten_fast_path(0);
    }

    /// Whether a sleep is announced.
    pub fn is_armed(&self) -> bool {
        self.inner.is_armed()
    }

    /// Counts a send that found no free space and will wait.
    pub fn count_wait(&self) {
        self.inner.count_wait();
    }

    /// Ends the announced sleep.
    pub fn disarm(&mut self) {
        self.inner.disarm();
    }

    /// Whether a sleep needs a time-out of a millisecond, because the consumer that should ring does not fence yet.
    pub fn needs_timed_wait(&self) -> bool {
        let holder = self.holder();
        let is_fenced = |slot: &Slot| holder.is_none_or(|holder| holder.slot != slot.slot) || slot.page().is_fenced();
        // No consumer ever fences in `own`, so this is whether any has to.
        self.inner.needs_timed_wait() && !self.slots.iter().all(is_fenced)
    }

    /// Whether a consumer that gates may have released something since its cursor was loaded: a cheap hint.
    pub fn may_be_ready(&self) -> bool {
        // Relaxed: the caller's next operation loads it again.
        self.slots.iter().any(|slot| slot.gates() && slot.page().number.load(Relaxed) > slot.seen)
    }

    /// Bytes that the slowest consumer that gates has not released, as far as waypoints show it. Loads all cursors.
    pub fn backlog_bytes(&mut self) -> u64 {
        self.load_cursors();
        let sent_bytes = self.inner.sent_bytes();
        self.holder().map_or(0, |holder| sent_bytes.wrapping_sub(self.waypoint_before(holder.number).sent_bytes).max(1))
    }

    /// Committed bytes including headers: see [`Producer::sent_bytes`].
    pub fn sent_bytes(&self) -> u64 {
        self.inner.sent_bytes()
    }

    /// The window, in bytes: see [`Producer::set_window`].
    pub fn window(&self) -> u64 {
        self.inner.window()
    }

    /// See [`Producer::set_bound`].
    pub fn set_bound(&mut self, bytes: u64) {
        self.inner.set_bound(bytes);
    }

    /// Whether the next message's place is after the first `bytes` of the data.
    pub fn is_beyond(&self, bytes: u64) -> bool {
        self.inner.tail().offset > bytes
    }

    /// Whether the lane keeps messages also for others than consumers that gate, as long as that takes no space that a
    /// message needs: for later ones, or for consumers that may be passed.
    pub fn keeps_for_others(&self) -> bool {
        self.history > 0 || self.racing > 0
    }

    /// Whether no consumer that gates has unreleased messages. Loads all cursors.
    pub fn is_released(&mut self) -> bool {
        self.load_cursors();
        self.holder().is_none()
    }

    /// Notes a ring in the page, for the consumers' next wait.
    pub fn note_ring(&self, processor: Option<u32>, at_ns: u64) {
        self.inner.note_ring(processor, at_ns);
    }

    /// The producer's words that a plain lane has too.
    pub fn producer_page(&self) -> &ProducerPage {
        &self.page().producer
    }

    /// The lane's capacity.
    pub fn capacity(&self) -> u64 {
        self.inner.capacity()
    }

    /// Requires the consumers to fence, because the kernel has refused `membarrier`.
    pub fn request_fencing(&mut self) {
        self.inner.request_fencing();
    }

    /// The number of the next message.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The number of the oldest message that the producer has not given up.
    pub fn kept(&self) -> u64 {
        self.kept
    }

    /// The largest message.
    pub fn message_bytes_max(&self) -> u64 {
        self.inner.message_bytes_max()
    }

    /// Sets the window: see [`Producer::set_window`]. Initially [`WINDOW`].
    pub fn set_window(&mut self, bytes: u64) {
        self.inner.set_window(bytes);
    }

    /// The slack of a consumer that names none: the window.
    pub const SLACK: u64 = WINDOW;

    /// Sets how many bytes of the data have memory behind them: see [`Producer::set_backed`].
    pub fn set_backed(&mut self, bytes: u64) {
        self.inner.set_backed(bytes);
    }

    /// Bytes of the data with memory behind them: see [`Producer::set_backed`].
    pub fn backed(&self) -> u64 {
        self.inner.backed()
    }

    /// Closes the producer for good. The caller must ring all consumers afterwards.
    pub fn close(&mut self) {
        self.inner.close();
    }
}
