//! The consumer's side of a broadcast lane: a cursor that is a number, and a check of `kept` after each copy.

use super::pages::{BroadcastPage, CURSORS_MAX, CursorPage, NUMBER_MAX, Policy, seq_of};
use super::producer::{BroadcastMemory, Joined};
use super::table::CursorTable;
use crate::consumer::{Record, record_at};
use crate::edges::{CLOSE, LAST, PUBLISH, RELEASE, failpoint};
use crate::error::LaneError;
use crate::layout::{LastRing, Position, State, WINDOW, record_bytes, seq_after};
use crate::memory::{Data, field};
use crate::sleep::{PeerState, Sleeper, Wake, Waker};
use alloc::vec::Vec;
use core::ptr::NonNull;
use core::sync::atomic::Ordering::Relaxed;

/// The most messages that a consumer passes over in a lane of this capacity when it joins: those between two waypoints.
/// With more, a hostile producer could keep it busy.
fn skip_max(capacity: u64) -> u64 {
    capacity / 256 / 8 + 1
}

/// A consumer counts as behind once the fast path has found this many bytes without a break. One that is not behind may
/// read directly after the producer, and a prefetch would take a line that the producer is about to write.
const BEHIND: u64 = WINDOW;
/// A consumer that is behind prefetches the header this many records ahead, assuming that they are as long as the last
/// one. A record's place is known only from the header before it, so without a prefetch it waits for each in turn
/// (docs/decisions/0050-prefetch-headers.md).
const PREFETCH_RECORDS: u64 = 4;
/// After larger messages a prefetch showed no gain.
const HEADER_PREFETCH_BYTES_MAX: u64 = 1024;

/// What [`BroadcastConsumer::copy`] has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copied {
    /// The next message, whose payload is in the buffer.
    Message,
    /// The producer has passed this consumer, which missed so many messages. The next one is the oldest that the lane
    /// still has. For *latest* always 0: the newest message was overwritten during the copy, and there is a newer one.
    Missed(u64),
}

/// A receiving side of a broadcast lane.
#[derive(Debug)]
pub struct BroadcastConsumer {
    pub(super) page: NonNull<CursorPage>,
    pub(super) producer: NonNull<BroadcastPage>,
    pub(super) data: Data,
    pub(super) policy: Policy,
    pub(super) slot: u32,
    pub(super) join: u64,
    /// The place of the next message, unless the policy is *latest*, and its number.
    pub(super) cursor: u64,
    pub(super) seq: u32,
    pub(super) number: u64,
    pub(super) bytes_max: u64,
    /// Messages that it passes over, because it joined in the middle of them.
    pub(super) skip: u64,
    pub(super) waker: Waker,
    pub(super) messages: u64,
    pub(super) bytes: u64,
    /// `bytes` when the fast path last failed: no message, a lap's end, or marks before the record.
    pub(super) fast_since: u64,
    pub(super) missed: u64,
    /// By path: the table that its page is in.
    pub(super) table: Option<NonNull<CursorTable>>,
}

// SAFETY: the pointers are to shared memory that outlives this (the caller of `attach` guarantees it). They are not
// tied to a thread, and nothing else writes the cursor's page.
unsafe impl Send for BroadcastConsumer {}

impl BroadcastConsumer {
    /// Attaches where the producer has let this consumer join. `message_bytes_max` is the lane's, as checked when it
    /// was opened, at most [`crate::message_bytes_limit`] of the capacity. `can_barrier` as for
    /// [`crate::Sleeper::of_receiver`].
    ///
    /// # Errors
    /// [`LaneError::Corrupt`] if the place lies outside the data, the slot does not exist, or more messages are to be
    /// passed over than a lane can have.
    ///
    /// # Safety
    /// `memory` and `page` stay mapped, the page writable, as long as this and its sleeper live. Nothing else writes
    /// the page. The policy is the one that this side has written there.
    pub unsafe fn attach(
        memory: BroadcastMemory,
        page: NonNull<CursorPage>,
        policy: Policy,
        joined: Joined,
        message_bytes_max: u64,
        can_barrier: bool,
    ) -> Result<BroadcastConsumer, LaneError> {
        let wanted = skip_max(memory.data.capacity());
        if joined.skip > wanted {
            return Err(LaneError::Corrupt { what: "messages to pass over", found: joined.skip, wanted });
        }
        // SAFETY: as the caller guarantees.
        let consumer = unsafe { BroadcastConsumer::at(memory, page, policy, joined, message_bytes_max, can_barrier)? };
        failpoint("broadcast consumer attaches: before");
        consumer.page().number.store(consumer.number, RELEASE.store());
        failpoint("broadcast consumer attaches: number");
        Ok(consumer)
    }

    /// The consumer where it has joined.
    ///
    /// # Safety
    /// As for [`BroadcastConsumer::attach`].
    pub(super) unsafe fn at(
        memory: BroadcastMemory,
        page: NonNull<CursorPage>,
        policy: Policy,
        joined: Joined,
        message_bytes_max: u64,
        can_barrier: bool,
    ) -> Result<BroadcastConsumer, LaneError> {
        let Joined { slot, join, number, place, skip } = joined;
        place.check("place of the first message", memory.data.capacity())?;
        let is_number = number > 0 && number <= NUMBER_MAX && place.seq == seq_of(number);
        if slot as usize >= CURSORS_MAX || !is_number {
            return Err(LaneError::Corrupt { what: "slot or number", found: slot.into(), wanted: place.seq.into() });
        }
        Ok(BroadcastConsumer {
            page,
            producer: memory.producer,
            data: memory.data,
            policy,
            slot,
            join,
            cursor: place.offset,
            seq: place.seq,
            number,
            bytes_max: message_bytes_max,
            skip,
            // SAFETY: the caller guarantees that the pages are mapped; both words are fields of them.
            waker: unsafe {
                Waker::new(
                    field(memory.producer, |p| &raw mut (*p).producer.sleep),
                    field(page, |p| &raw mut (*p).fenced),
                    can_barrier,
                )
            },
            messages: 0,
            bytes: 0,
            fast_since: 0,
            missed: 0,
            table: None,
        })
    }

    /// The sleeper of this consumer, one at a time. `can_barrier` as for [`crate::Sleeper::of_receiver`].
    ///
    /// # Safety
    /// The page stays mapped writable as long as the sleeper lives.
    pub unsafe fn sleeper(&self, can_barrier: bool) -> Sleeper {
        // SAFETY: the caller guarantees the mapping; `attach` has checked the slot.
        Sleeper::new(unsafe { field(self.page, |p| &raw mut (*p).sleep[self.slot as usize].word) }, can_barrier)
    }

    #[inline(always)]
    pub(super) fn page(&self) -> &CursorPage {
        // SAFETY: `attach`'s caller guarantees that the page is mapped.
        unsafe { self.page.as_ref() }
    }

    #[inline(always)]
    pub(super) fn producer(&self) -> &BroadcastPage {
        // SAFETY: `attach`'s caller guarantees that the page is mapped.
        unsafe { self.producer.as_ref() }
    }

    fn place(&self) -> Position {
        Position { offset: self.cursor, seq: self.seq }
    }

    /// The next message, or `None`; never waits. Returns the same message until the caller takes it.
    ///
    /// # Errors
    /// [`LaneError::Corrupt`].
    ///
    /// # Panics
    /// If the consumer may lag: it must copy.
    #[inline]
    pub fn peek(&mut self) -> Result<Option<Record>, LaneError> {
        assert!(self.policy.reads_in_place(), "a consumer that may lag must copy");
        match self.peek_fast() {
            Some(record) => Ok(Some(record)),
            None => self.peek_slow(),
        }
    }

    /// As [`BroadcastConsumer::peek`], in the usual case: the consumer gates, and the next record is at the cursor.
    /// `None`: call that.
    #[inline(always)]
    pub fn peek_fast(&self) -> Option<Record> {
        let Position { offset, seq } = self.place();
        let word = self.data.header(offset).load(PUBLISH.load()); // [publish]
        let bytes = word & 0xffff_ffff;
        let found = (word >> 32) as u32 == seq
            && bytes <= self.bytes_max
            && offset + record_bytes(bytes) + 8 <= self.data.capacity()
            && self.skip == 0
            && self.policy.reads_in_place();
        found.then_some(Record { offset, bytes, seq, descriptors: 0 })
    }

    #[cold]
    #[inline(never)]
    fn peek_slow(&mut self) -> Result<Option<Record>, LaneError> {
        self.store_counters();
        self.fast_since = self.bytes;
        if let Some(table) = self.table {
            // A producer that counts this consumer holds for it. One that has refused its files, or its cursor, does
            // not.
            // SAFETY: `join_by_path`'s caller keeps the table mapped.
            let held = unsafe { table.as_ref() }.held();
            if held > self.number {
                return Err(LaneError::Corrupt {
                    what: "held, beyond a cursor that gates",
                    found: held,
                    wanted: self.number,
                });
            }
        }
        loop {
            match record_at(&self.data, self.bytes_max, self.place())? {
                Some((record, _)) if self.skip > 0 => self.pass(&record),
                found => return Ok(found.map(|(record, _)| record)),
            }
        }
    }

    /// Moves past a record that the caller did not want.
    fn pass(&mut self, record: &Record) {
        self.advance(record);
        self.skip -= 1;
    }

    #[inline(always)]
    fn advance(&mut self, record: &Record) {
        self.cursor = record.offset + record_bytes(record.bytes);
        // Fails only for a record of another lane.
        assert!(self.cursor + 8 <= self.data.capacity());
        self.seq = seq_after(self.seq);
        self.number += 1;
    }

    /// Moves past the record that [`BroadcastConsumer::peek`] last returned. [`BroadcastConsumer::release`] gives its
    /// space back.
    #[inline(always)]
    pub fn take(&mut self, record: &Record) {
        debug_assert_eq!(record.seq, self.seq, "a record is taken once, in order");
        self.count(record);
        if self.bytes > self.fast_since + BEHIND && record.bytes <= HEADER_PREFETCH_BYTES_MAX {
            self.data.prefetch_to_read(self.cursor + PREFETCH_RECORDS * record_bytes(record.bytes));
        }
    }

    /// Moves past a record that the caller receives.
    #[inline(always)]
    fn count(&mut self, record: &Record) {
        self.advance(record);
        self.messages += 1;
        self.bytes += record.bytes;
    }

    /// Stores the statistics in the page. On the fast path they would cost stores per message.
    pub fn store_counters(&self) {
        let page = self.page();
        // Relaxed: statistics.
        page.messages.store(self.messages, Relaxed);
        page.bytes.store(self.bytes, Relaxed);
        page.missed.store(self.missed, Relaxed);
    }

    /// The address of the payload of a record that [`BroadcastConsumer::peek`] returned, valid until its release.
    #[cfg(not(loom))]
    #[inline(always)]
    pub fn payload(&self, record: &Record) -> NonNull<u8> {
        self.data.payload(record.offset + 8, record.bytes)
    }

    /// Copies the payload of a record of [`BroadcastConsumer::peek`] to `target`, under loom.
    #[cfg(loom)]
    pub fn copy_out(&self, record: &Record, target: &mut [u8]) {
        self.data.copy_out_words(record.offset + 8, target);
    }

    /// Copies the next message into `buffer` and moves past it; never waits. `None`: there is none. For each policy.
    /// After [`Copied::Missed`], the buffer has no meaning.
    ///
    /// # Errors
    /// [`LaneError::Corrupt`].
    pub fn copy(&mut self, buffer: &mut Vec<u8>) -> Result<Option<Copied>, LaneError> {
        if self.policy == Policy::Latest {
            return self.copy_latest(buffer);
        }
        loop {
            let found = record_at(&self.data, self.bytes_max, self.place());
            if let Ok(Some((record, _))) = &found
                && self.skip == 0
            {
                self.data.copy_out_racing(record.offset + 8, record.bytes, buffer);
            }
            // Before the copy counts, and before *empty* and *corrupt* do: all may come from later messages.
            if self.producer().kept_after_reading() > self.number {
                match self.rejoin()? {
                    0 => continue,
                    missed => return Ok(Some(Copied::Missed(missed))),
                }
            }
            let Some((record, _)) = found? else {
                self.store_counters();
                return Ok(None);
            };
            if self.skip > 0 {
                self.pass(&record);
                continue;
            }
            self.count(&record);
            return Ok(Some(Copied::Message));
        }
    }

    /// The producer has passed this consumer: continues with the oldest message that the lane still has. Returns how
    /// many messages it missed.
    #[cold]
    #[inline(never)]
    fn rejoin(&mut self) -> Result<u64, LaneError> {
        let (kept, place) = self.kept_and_place()?;
        // `kept` only grows.
        if kept <= self.number {
            return Err(LaneError::Corrupt { what: "kept", found: kept, wanted: self.number });
        }
        let passed = kept - self.number;
        // It did not want those that it would have passed over.
        let missed = passed.saturating_sub(self.skip);
        self.skip = self.skip.saturating_sub(passed);
        (self.cursor, self.seq, self.number) = (place.offset, place.seq, kept);
        self.missed += missed;
        self.store_counters();
        Ok(missed)
    }

    /// The oldest message that the lane still has, and its place: also of a producer that has stopped, or died, while
    /// it stored them.
    pub(super) fn kept_and_place(&self) -> Result<(u64, Position), LaneError> {
        self.producer().oldest(self.data.capacity())
    }

    fn copy_latest(&mut self, buffer: &mut Vec<u8>) -> Result<Option<Copied>, LaneError> {
        let capacity = self.data.capacity();
        let word = self.producer().last.load(LAST.load()); // [last]
        // 0: no message since the first consumer of this policy joined, and none before that was still there.
        if word == 0 {
            return Ok(None);
        }
        let last = Position::unpack(word);
        last.check("last", capacity)?;
        let (kept, place) = self.kept_and_place()?;
        // `kept` is at most the number after the newest. A distance that no lane has is -1: the producer needed that
        // message's space.
        let ahead = last.since(place);
        let is_newest = || self.producer().last.load(Relaxed) == word;
        // If this side was stopped between the two loads, the distance may be that of a later lap of the seqs.
        if is_newest() && ahead <= capacity / 8 {
            let (number, next) = (kept + ahead, self.number());
            if number < next {
                return Ok(None);
            }
            let found = record_at(&self.data, self.bytes_max, last);
            if let Ok(Some((record, _))) = &found {
                self.data.copy_out_racing(record.offset + 8, record.bytes, buffer);
            }
            if self.producer().kept_after_reading() <= number {
                let Some((record, _)) = found? else {
                    return Err(LaneError::Corrupt { what: "last", found: word, wanted: number });
                };
                self.missed += number - next;
                (self.number, self.skip) = (number + 1, 0);
                self.messages += 1;
                self.bytes += record.bytes;
                self.store_counters();
                return Ok(Some(Copied::Message));
            }
        }
        // A message that was overwritten is followed by another one, which `last` may show already.
        Ok(if is_newest() { None } else { Some(Copied::Missed(0)) })
    }

    /// Whether a message may be there: a cheap hint for a spinning caller.
    #[inline(always)]
    pub fn may_be_ready(&self) -> bool {
        // Relaxed: the caller's next operation loads it again.
        match self.policy {
            Policy::Latest => {
                let last = Position::unpack(self.producer().last.load(Relaxed));
                last.seq != 0 && seq_after(last.seq) != seq_of(self.number.max(1))
            }
            _ => self.data.header(self.cursor).load(Relaxed) != 0,
        }
    }

    /// Releases everything taken or copied. Returns whether to ring the producer.
    #[inline(always)]
    pub fn release(&mut self) -> Wake {
        failpoint("broadcast release: before");
        self.page().number.store(self.number, RELEASE.store()); // [release]
        failpoint("broadcast release: after");
        if self.waker.must_check() { self.check_peer() } else { Wake::None }
    }

    /// Whether to ring the producer: if it waits for this consumer, which has released enough.
    #[cold]
    #[inline(never)]
    fn check_peer(&mut self) -> Wake {
        let PeerState::Asleep(epoch) = self.waker.peer_state() else { return Wake::None };
        // Relaxed: after a stale load of either, the producer has not polled since it armed, so its poll finds this
        // release. [sleep]
        let producer = self.producer();
        if producer.holder.load(Relaxed) != self.slot || self.number < producer.producer.room_seq.load(Relaxed) {
            return Wake::None;
        }
        self.waker.count_ring(epoch, seq_of(self.number));
        let page = self.page();
        page.wakes_sent.store(page.wakes_sent.load(Relaxed).wrapping_add(1), Relaxed);
        failpoint("broadcast consumer finds a sleeper: counted");
        Wake::Ring
    }

    /// Whether the producer fences each publication.
    pub fn is_producer_fencing(&self) -> bool {
        self.producer().producer.is_fenced()
    }

    /// Whether the producer has closed. If true, call [`BroadcastConsumer::peek`] or [`BroadcastConsumer::copy`] once
    /// more: everything committed before is visible then.
    pub fn has_producer_closed(&self) -> bool {
        self.producer().producer.is_closed()
    }

    /// The generation and the process of the last producer of a lane by path.
    pub fn publisher(&self) -> (u64, u32) {
        let page = &self.producer().producer;
        (page.generation(), page.pid())
    }

    /// Counts a receive that found no message and will wait.
    pub fn count_wait(&self) {
        let page = self.page();
        page.waits.store(page.waits.load(Relaxed).wrapping_add(1), Relaxed);
    }

    /// Counts a sleep.
    pub fn count_sleep(&self) {
        let page = self.page();
        page.sleeps.store(page.sleeps.load(Relaxed).wrapping_add(1), Relaxed);
    }

    /// Notes a ring in the page, for the producer's next wait.
    pub fn note_ring(&self, processor: Option<u32>, at_ns: u64) {
        self.page().last_ring.note(processor, at_ns);
    }

    /// Notes the processor of this thread, if known, without a ring.
    pub fn note_processor(&self, processor: Option<u32>) {
        self.page().last_ring.note_processor(processor);
    }

    /// Messages that it missed; for *latest*, that it skipped.
    pub fn missed(&self) -> u64 {
        self.missed
    }

    /// The producer's last ring.
    pub fn producer_last_ring(&self) -> LastRing {
        self.producer().producer.last_ring()
    }

    /// The lane's capacity.
    pub fn capacity(&self) -> u64 {
        self.data.capacity()
    }

    /// The largest message, in bytes.
    pub fn message_bytes_max(&self) -> u64 {
        self.bytes_max
    }

    /// The number of the next message, or for *latest* the number after the newest one received.
    pub fn number(&self) -> u64 {
        self.number + self.skip
    }

    /// Whether it has moved past messages without taking them since its last release. When there is no message, release
    /// them: otherwise the producer may wait for a consumer that waits for it.
    pub fn has_passed(&self) -> bool {
        // Relaxed: only this side stores it.
        self.page().number.load(Relaxed) != self.number
    }

    /// The bytes of the messages that it has taken.
    pub fn taken_bytes(&self) -> u64 {
        self.bytes
    }

    /// Its slot.
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// As [`Joined::join`].
    pub fn join(&self) -> u64 {
        self.join
    }

    /// Its policy.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// Its own page.
    pub fn cursor_page(&self) -> &CursorPage {
        self.page()
    }

    /// Leaves for good. The caller closes the sleeper and rings the producer afterwards.
    pub fn close(&mut self) {
        self.store_counters();
        failpoint("broadcast consumer closes: before");
        self.page().state.store(State::Closed as u32, CLOSE.store()); // [close]
        failpoint("broadcast consumer closes: state");
        if let Some(table) = self.table {
            // SAFETY: `join_by_path`'s caller keeps the table mapped.
            unsafe { table.as_ref() }.detach(self.slot);
        }
    }
}
