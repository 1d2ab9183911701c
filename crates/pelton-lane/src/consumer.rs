//! The consumer's side: which record is next, and when its space goes back.
//!
//! The cursor is where the next record is looked for; the head is up to where everything is released. What lies between
//! is taken and not yet released: at most one record while its reader looks at it, plus those that are held.
//!
//! Invariants:
//! - a header is loaded once per look and judged by that copy alone;
//! - `cursor + 8 <= capacity`: a record is accepted only if the header after it lies inside the data;
//! - the head moves in order, whatever order records are released in.

use crate::edges::{CLOSE, PUBLISH, RELEASE, failpoint};
use crate::layout::{
    ConsumerPage, MARK, MARK_DESCRIPTORS, MARK_GENERATION, MARK_JUMP, Position, ProducerPage, State, record_bytes,
    seq_after,
};
use crate::memory::{Data, Memory};
use crate::producer::{check_position, field};
use crate::sleep::{Attention, Wake, Waker};
use crate::{LaneError, layout};
use alloc::collections::VecDeque;
use core::ptr::NonNull;
use core::sync::atomic::Ordering::Relaxed;

/// The receiving side of a lane.
#[derive(Debug)]
pub struct Consumer {
    memory: Memory,
    /// Where the next record is, and its number.
    cursor: u64,
    seq: u32,
    capacity: u64,
    bytes_max: u64,
    messages: u64,
    bytes: u64,
    waker: Waker,
    /// Records taken and not all released, oldest first; empty unless somebody holds one.
    held: VecDeque<Held>,
    /// The ticket of `held`'s first.
    first_ticket: u64,
    generation: u32,
}

#[derive(Clone, Copy, Debug)]
struct Held {
    end: Position,
    released: bool,
}

/// A record at the consumer's cursor: what its header said when it was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    pub(crate) offset: u64,
    /// Bytes of payload.
    pub bytes: u64,
    /// The message's number.
    pub seq: u32,
    /// Descriptors that travel with the message, over the socket.
    pub descriptors: u32,
}

impl Record {
    /// A record of nothing that was sent, for who tells other things by the same way: its seq is 0, which no message has.
    pub const fn placeholder(descriptors: u32) -> Record {
        Record { offset: 0, bytes: 0, seq: 0, descriptors }
    }
}

/// How far a reader of several messages has come, behind those that it has taken. In its hands, and not in the consumer, so that what changes
/// with each message stays in registers, until [`Consumer::take_to`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursor(Position);

/// Records that were taken as the bytes they are: whole ones, each behind the other, with nothing between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    offset: u64,
    /// Bytes of the records: of each a header of 8, the payload, and what fills that up to a multiple of 8.
    pub bytes: u64,
    /// The first message's number.
    pub first_seq: u32,
    /// How many there are, at least one.
    pub messages: u32,
}

impl Chunk {
    /// Makes it one with `next`, of the same lane, if that stands right behind it.
    pub fn join(&mut self, next: &Chunk) -> bool {
        // The numbering skips 0.
        let (seq, wrapped) = self.first_seq.overflowing_add(self.messages);
        let follows = self.offset + self.bytes == next.offset && seq + u32::from(wrapped) == next.first_seq;
        if follows {
            self.bytes += next.bytes;
            self.messages += next.messages;
        }
        follows
    }
}

/// What a held record is released by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(u64);

// SAFETY: the pointers in `memory` are to shared memory that outlives this (see `Data::new`), and a consumer is one
// owner wherever it is.
unsafe impl Send for Consumer {}

impl Consumer {
    /// The consumer of a lane whose oldest unreleased record is, or will be, at the head in its own page.
    /// `can_barrier` as for [`crate::Sleeper`].
    ///
    /// # Errors
    /// [`LaneError::Corrupt`] when that position lies outside the data.
    ///
    /// # Safety
    /// `memory` stays mapped, the consumer's page writable, as long as this lives; nobody else is this lane's consumer;
    /// `message_bytes_max` is at most [`crate::message_bytes_limit`] of the capacity.
    pub unsafe fn attach(memory: Memory, message_bytes_max: u64, can_barrier: bool) -> Result<Consumer, LaneError> {
        // SAFETY: the caller promises the mapping.
        let page = unsafe { memory.consumer.as_ref() };
        let head = page.head();
        check_position("head", head, memory.data.capacity())?;
        let consumer = Consumer {
            memory,
            cursor: head.offset,
            seq: head.seq,
            capacity: memory.data.capacity(),
            bytes_max: message_bytes_max,
            // A successor counts on in the page that it takes over.
            messages: page.messages.load(Relaxed),
            bytes: page.bytes.load(Relaxed),
            // SAFETY: as above.
            waker: unsafe { waker_of(&memory, can_barrier) },
            held: VecDeque::new(),
            first_ticket: 0,
            // Until a mark says otherwise.
            // SAFETY: as above.
            generation: unsafe { memory.producer.as_ref() }.generation() as u32 & 0x0fff_ffff,
        };
        page.state.store(State::Open as u32, CLOSE.store());
        failpoint("consumer attaches: state");
        Ok(consumer)
    }

    /// Goes on with another producer after the first died. What the dead one committed must have been taken over by the
    /// successor, whose tail is [`Consumer::end_of_committed`].
    ///
    /// # Safety
    /// As for [`Consumer::attach`], for the new page; the old one may be unmapped afterwards.
    pub unsafe fn attach_producer(&mut self, producer: NonNull<ProducerPage>, can_barrier: bool) {
        self.memory.producer = producer;
        // SAFETY: the caller promises the mapping.
        self.waker = unsafe { waker_of(&self.memory, can_barrier) };
    }

    #[inline(always)]
    fn page(&self) -> &ConsumerPage {
        // SAFETY: `attach`'s caller promises the mapping.
        unsafe { self.memory.consumer.as_ref() }
    }

    #[inline(always)]
    fn data(&self) -> &Data {
        &self.memory.data
    }

    /// The next message, if it is there; never waits. Looking again before it is released or held finds the same.
    ///
    /// # Errors
    /// [`LaneError::Corrupt`].
    #[inline]
    pub fn peek(&mut self) -> Result<Option<Record>, LaneError> {
        match self.peek_fast() {
            Some(record) => Ok(Some(record)),
            None => self.peek_slow(),
        }
    }

    /// The common case of [`Consumer::peek`]: a message without marks stands at the cursor. `None`: ask `peek`. Apart so
    /// that a caller can keep it in registers, and everything else out of the way.
    #[inline(always)]
    pub fn peek_fast(&self) -> Option<Record> {
        self.peek_at(self.cursor().0)
    }

    /// `place` lies inside the data, as what this has found before does.
    #[inline(always)]
    fn peek_at(&self, place: Position) -> Option<Record> {
        let Position { offset, seq } = place;
        let word = self.data().header(offset).load(PUBLISH.load()); // [publish]
        let bytes = word & 0xffff_ffff;
        // One comparison each: a mark is larger than any limit; the header after the record lies inside the data.
        let found =
            (word >> 32) as u32 == seq && bytes <= self.bytes_max && offset + record_bytes(bytes) + 8 <= self.capacity;
        found.then_some(Record { offset, bytes, seq, descriptors: 0 })
    }

    /// Where the next message is, for who takes several: [`Consumer::take_at`], and then [`Consumer::take_to`].
    #[inline(always)]
    pub fn cursor(&self) -> Cursor {
        Cursor(Position { offset: self.cursor, seq: self.seq })
    }

    /// As [`Consumer::peek_fast`], at a cursor of this consumer's, which then goes behind what was found. The consumer stays where it is.
    ///
    /// # Panics
    /// When the cursor is of a longer lane.
    #[inline(always)]
    pub fn take_at(&self, cursor: &mut Cursor) -> Option<Record> {
        assert!(cursor.0.offset + 8 <= self.capacity);
        let record = self.peek_at(cursor.0)?;
        cursor.0 = Position { offset: record.offset + record_bytes(record.bytes), seq: seq_after(record.seq) };
        Some(record)
    }

    /// Moves the consumer to a cursor that it has answered since it moved last, and that has come behind messages with so many `bytes` of
    /// payload. Nothing is released yet: that does [`Consumer::release_taken`].
    ///
    /// # Panics
    /// When the cursor is of a longer lane.
    #[inline(always)]
    pub fn take_to(&mut self, cursor: Cursor, bytes: u64) {
        assert!(cursor.0.offset + 8 <= self.capacity);
        let messages = cursor.0.since(self.cursor().0);
        (self.cursor, self.seq) = (cursor.0.offset, cursor.0.seq);
        // The first may be what a page that was taken over says: any number.
        self.messages = self.messages.wrapping_add(messages);
        self.bytes = self.bytes.wrapping_add(bytes);
    }

    #[cold]
    #[inline(never)]
    fn peek_slow(&mut self) -> Result<Option<Record>, LaneError> {
        // Here for others to see: once a lap, and whenever the lane is found empty.
        self.store_counters();
        let found = record_at(self.data(), self.bytes_max, Position { offset: self.cursor, seq: self.seq })?;
        Ok(found.map(|(record, marks)| {
            self.generation = marks.generation.unwrap_or(self.generation);
            record
        }))
    }

    /// Whether something stands at the cursor: a hint for who spins, to be followed by [`Consumer::peek`].
    #[inline(always)]
    pub fn may_be_ready(&self) -> bool {
        // Relaxed: `peek` loads it again.
        self.data().header(self.cursor).load(Relaxed) != 0
    }

    /// Where the payload is. It stays there until the record is released.
    #[cfg(not(loom))]
    #[inline(always)]
    pub fn payload(&self, record: &Record) -> NonNull<u8> {
        self.data().payload(record.offset + 8, record.bytes)
    }

    /// Copies the payload of a record to `target`.
    ///
    /// # Safety
    /// `record.bytes` may be written at `target`, which is not in a lane.
    #[cfg(not(loom))]
    #[inline(always)]
    pub unsafe fn copy_out(&self, record: &Record, target: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { self.copy_out_from(0, record, target) };
    }

    /// As [`Consumer::copy_out`], but for the first `skip` bytes.
    ///
    /// # Panics
    /// When the payload is shorter.
    ///
    /// # Safety
    /// As for [`Consumer::copy_out`], of as many bytes less.
    #[cfg(not(loom))]
    #[inline(always)]
    pub unsafe fn copy_out_from(&self, skip: u64, record: &Record, target: *mut u8) {
        assert!(skip <= record.bytes);
        // SAFETY: the caller's promise.
        unsafe { self.data().copy_out(record.offset + 8 + skip, record.bytes - skip, target) };
    }

    /// Copies the payload of a record out, under loom.
    #[cfg(loom)]
    pub fn copy_out(&self, record: &Record, target: &mut [u8]) {
        self.data().copy_out_slots(record.offset + 8, target);
    }

    /// Moves the cursor behind the record that [`Consumer::peek`] answered last, without releasing it yet: for a batch,
    /// which [`Consumer::release_taken`] releases whole.
    #[inline(always)]
    pub fn take(&mut self, record: &Record) {
        debug_assert_eq!(record.seq, self.seq, "a record is taken once, in order");
        self.cursor = record.offset + record_bytes(record.bytes);
        // Only a record of another lane could say otherwise.
        assert!(self.cursor + 8 <= self.capacity);
        self.seq = seq_after(self.seq);
        // The first may be what a page that was taken over says: any number.
        self.messages = self.messages.wrapping_add(1);
        self.bytes = self.bytes.wrapping_add(record.bytes);
    }

    /// Takes the record that [`Consumer::peek`] answered last, and those behind it without marks, until they are at least
    /// `bytes_wanted` long or nothing more is there. They stay where they are until [`Consumer::release_taken`].
    pub fn take_chunk(&mut self, first: &Record, bytes_wanted: u64) -> Chunk {
        let messages = self.messages;
        self.take(first);
        while self.cursor - first.offset < bytes_wanted
            && let Some(next) = self.peek_fast()
        {
            self.take(&next);
        }
        self.chunk_from(first, self.messages.wrapping_sub(messages))
    }

    /// As [`Consumer::take_chunk`], for who knows where it ends: the lane's producer itself, at whose tail that is, and which has
    /// put no marks behind `first`, as one does that is rewound whenever its window is full. Nothing is looked at.
    ///
    /// # Panics
    /// When `end` is not behind `first`.
    pub fn take_chunk_to(&mut self, first: &Record, end: Position) -> Chunk {
        assert!(first.offset < end.offset && end.offset + 8 <= self.capacity);
        let messages = end.since(Position { offset: first.offset, seq: first.seq });
        (self.cursor, self.seq) = (end.offset, end.seq);
        self.messages = self.messages.wrapping_add(messages);
        // Relaxed: for people, and of who asks.
        self.bytes = self.producer_page().bytes.load(Relaxed);
        self.chunk_from(first, messages)
    }

    /// What was taken from `first` on.
    fn chunk_from(&self, first: &Record, messages: u64) -> Chunk {
        let bytes = self.cursor - first.offset;
        debug_assert!(messages >= 1 && messages * 8 <= bytes);
        Chunk { offset: first.offset, bytes, first_seq: first.seq, messages: messages as u32 }
    }

    /// The bytes of a run that is not released yet.
    ///
    /// # Panics
    /// When the run is of a longer lane.
    #[cfg(not(loom))]
    pub fn chunk_bytes(&self, run: &Chunk) -> NonNull<[u8]> {
        assert!(run.offset + run.bytes <= self.capacity);
        NonNull::slice_from_raw_parts(self.data().payload(run.offset, run.bytes), run.bytes as usize)
    }

    /// Whether the producer has announced that it sleeps until there is more room. It may just be about to.
    pub fn is_producer_waiting(&mut self) -> bool {
        matches!(self.waker.attention(), Attention::Sleeps(_))
    }

    /// Whether something is taken and neither released nor held.
    pub fn has_taken(&self) -> bool {
        let released = self.held.back().map_or(self.head(), |newest| newest.end);
        released != Position { offset: self.cursor, seq: self.seq }
    }

    /// The consumer's part of [`crate::Producer::rewind`]. False: not everything before `tail` is taken and released.
    pub(crate) fn rewind(&mut self, tail: Position) -> bool {
        let is_empty =
            self.held.is_empty() && self.head() == tail && (self.cursor, self.seq) == (tail.offset, tail.seq);
        if is_empty {
            self.cursor = 0;
            self.page().head.store(Position { offset: 0, ..tail }.pack(), RELEASE.store());
        }
        is_empty
    }

    /// Gives back the space of everything taken and not held. Answers whether to ring the sender.
    #[inline(always)]
    pub fn release_taken(&mut self) -> Wake {
        let end = Position { offset: self.cursor, seq: self.seq };
        if self.held.is_empty() { self.move_head(end) } else { self.release_behind_held(end) }
    }

    /// Apart, so that what is rare costs the usual release no registers.
    #[cold]
    #[inline(never)]
    fn release_behind_held(&mut self, end: Position) -> Wake {
        // Otherwise nothing was taken since.
        if self.held.back().is_none_or(|newest| newest.end != end) {
            self.held.push_back(Held { end, released: true });
        }
        Wake::None
    }

    /// Takes and releases the record that [`Consumer::peek`] answered last. Answers whether to ring the sender.
    #[inline(always)]
    pub fn release(&mut self, record: &Record) -> Wake {
        self.take(record);
        self.release_taken()
    }

    /// Takes the record that [`Consumer::peek`] answered last and keeps its space until its ticket is given back, in any
    /// order.
    pub fn hold(&mut self, record: &Record) -> Ticket {
        self.take(record);
        let ticket = Ticket(self.first_ticket + self.held.len() as u64);
        self.held.push_back(Held { end: Position { offset: self.cursor, seq: self.seq }, released: false });
        ticket
    }

    /// Releases a held record. The space comes back in order: with the oldest held one. Answers whether to ring the sender.
    ///
    /// # Panics
    /// When the ticket has been given back before.
    pub fn release_held(&mut self, ticket: Ticket) -> Wake {
        let place = ticket.0.checked_sub(self.first_ticket).expect("a ticket is given back once");
        let held = self.held.get_mut(place as usize).expect("a ticket is of this consumer");
        assert!(!held.released, "a ticket is given back once");
        held.released = true;
        let mut end = None;
        while let Some(oldest) = self.held.front().copied().filter(|oldest| oldest.released) {
            self.held.pop_front();
            self.first_ticket += 1;
            end = Some(oldest.end);
        }
        end.map_or(Wake::None, |end| self.move_head(end))
    }

    /// Records held.
    pub fn held(&self) -> usize {
        self.held.iter().filter(|held| !held.released).count()
    }

    #[inline(always)]
    fn move_head(&mut self, end: Position) -> Wake {
        failpoint("release: before");
        self.page().head.store(end.pack(), RELEASE.store()); // [release]
        failpoint("release: after");
        match self.waker.attention() {
            Attention::None => Wake::None,
            attention => self.attend(attention),
        }
    }

    /// Rings a producer that waits for room once the head's seq has reached what it asked for. That the lane is empty is
    /// the same rule: it never asks for more than its tail.
    #[cold]
    #[inline(never)]
    fn attend(&mut self, attention: Attention) -> Wake {
        let Attention::Sleeps(epoch) = attention else { return Wake::None };
        // Relaxed: if this look is stale, so the producer has not yet looked again, and will see this release. [sleep]
        let target = self.producer_page().room_seq.load(Relaxed) as u32;
        if (self.head().seq.wrapping_sub(target) as i32) < 0 {
            return Wake::None;
        }
        self.waker.rang(epoch, self.seq);
        let page = self.page();
        page.wakes_sent.store(page.wakes_sent.load(Relaxed).wrapping_add(1), Relaxed);
        failpoint("consumer finds a sleeper: counted");
        Wake::Ring
    }

    /// Writes the counters of messages and bytes to the page. On the way of a message two stores would be felt.
    pub fn store_counters(&self) {
        let page = self.page();
        // Relaxed: for people.
        page.messages.store(self.messages, Relaxed);
        failpoint("consumer shows: messages");
        page.bytes.store(self.bytes, Relaxed);
        failpoint("consumer shows: bytes");
    }

    /// Counts a receive that found nothing and is going to wait.
    pub fn count_wait(&self) {
        let page = self.page();
        page.waits.store(page.waits.load(Relaxed).wrapping_add(1), Relaxed);
        failpoint("consumer waits: counted");
    }

    /// Counts a sleep.
    pub fn count_sleep(&self) {
        let page = self.page();
        page.sleeps.store(page.sleeps.load(Relaxed).wrapping_add(1), Relaxed);
        failpoint("consumer sleeps: counted");
    }

    /// Whether the producer fences, so that a sleeper need not have its barrier reach it: see [`crate::Sleeper::arm`].
    pub fn is_producer_fencing(&self) -> bool {
        self.producer_page().is_fenced()
    }

    /// Whether a sleep may last only a millisecond, because the producer is not yet known to fence.
    pub fn needs_timed_wait(&self, sleeper: &crate::Sleeper) -> bool {
        sleeper.needs_fenced_wakers() && !self.is_producer_fencing()
    }

    /// Whether the producer has closed. Look at [`Consumer::peek`] once more after this says yes: what it committed
    /// before closing is visible then.
    #[inline]
    pub fn has_producer_closed(&self) -> bool {
        self.producer_page().is_closed()
    }

    /// Walks over everything committed from the cursor on: the place where a dead producer's successor goes on, and how
    /// many messages lie before it.
    ///
    /// # Errors
    /// [`LaneError::Corrupt`].
    pub fn end_of_committed(&self) -> Result<(Position, u64), LaneError> {
        find_end(self.data(), self.bytes_max, Position { offset: self.cursor, seq: self.seq })
    }

    /// Up to where everything is released.
    pub fn head(&self) -> Position {
        // Relaxed: nobody else writes it.
        Position::unpack(self.page().head.load(Relaxed))
    }

    /// Messages taken by this consumer and its predecessors in its page.
    pub fn taken(&self) -> u64 {
        self.messages
    }

    /// The generation of the producer whose message was looked at last, modulo 2^28; before the first, of the producer that
    /// this consumer was attached to.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// The largest message.
    #[inline]
    pub fn message_bytes_max(&self) -> u64 {
        self.bytes_max
    }

    /// Bytes of data.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// The consumer's own page.
    pub fn consumer_page(&self) -> &ConsumerPage {
        self.page()
    }

    /// The producer's page.
    pub fn producer_page(&self) -> &ProducerPage {
        // SAFETY: `attach`'s caller promises the mapping.
        unsafe { self.memory.producer.as_ref() }
    }

    /// Says for good that nothing more will be read. The sender is to be rung afterwards.
    pub fn close(&mut self) {
        self.store_counters();
        failpoint("consumer closes: before");
        self.page().state.store(State::Closed as u32, CLOSE.store()); // [close]
        failpoint("consumer closes: state");
    }
}

impl crate::Sleeper {
    /// The sleeper of a receiver, which all its lanes' producers ring. `can_barrier` as in the type's own words.
    ///
    /// # Safety
    /// The page stays mapped writable as long as this lives; nobody else writes it.
    pub unsafe fn of_receiver(receiver: NonNull<layout::ReceiverPage>, can_barrier: bool) -> crate::Sleeper {
        // SAFETY: the caller's promise.
        crate::Sleeper::new(unsafe { field(receiver, |p| &raw mut (*p).sleep) }, can_barrier)
    }
}

/// Rank of each kind of mark before one message: jump, generation, descriptors, and then those that a reader may skip. 0: corrupt.
const MARK_RANKS: [u32; 8] = [1, 3, 2, 0, 4, 5, 6, 7];

/// What lies in a lane from some place on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scan {
    /// Behind the last record that is whole, where the next one goes.
    pub end: Position,
    /// Messages before it.
    pub messages: u64,
    /// The floor that a producer whose tail is there needs: where the last jump forward leads, 0 after one to the front.
    pub floor: u64,
    /// Why no more are counted, if not because nothing is published there.
    pub problem: Option<LaneError>,
}

/// Walks over at most `most` messages from `start` on, where a record stands or will. What is found is checked as a consumer
/// does.
pub fn scan(data: &Data, message_bytes_max: u64, start: Position, most: u64) -> Scan {
    let mut found = Scan { end: start, messages: 0, floor: 0, problem: None };
    // Also when nothing is to be counted: who asks may write at the end.
    if let Err(problem) = check_position("start of a walk", start, data.capacity()) {
        return Scan { problem: Some(problem), ..found };
    }
    while found.messages < most {
        let (record, jump) = match record_at(data, message_bytes_max, found.end) {
            Ok(Some((record, marks))) => (record, marks.jump),
            Ok(None) => break,
            Err(problem) => {
                found.problem = Some(problem);
                break;
            }
        };
        match jump {
            Some(target) if target > found.end.offset => found.floor = target,
            Some(_) => found.floor = 0,
            None => {}
        }
        found.end = Position { offset: record.offset + record_bytes(record.bytes), seq: seq_after(found.end.seq) };
        found.messages += 1;
    }
    found
}

/// Walks over everything committed from `start` on: the place behind it, and how many messages lie between.
///
/// # Errors
/// [`LaneError::Corrupt`].
pub fn find_end(data: &Data, message_bytes_max: u64, start: Position) -> Result<(Position, u64), LaneError> {
    let most = data.capacity() / 8;
    let found = scan(data, message_bytes_max, start, most + 1);
    match found.problem {
        Some(problem) => Err(problem),
        None if found.messages > most => {
            Err(LaneError::Corrupt { what: "records in the lane", found: found.messages, wanted: most })
        }
        None => Ok((found.end, found.messages)),
    }
}

/// Makes what lies behind `found` as if it had never been committed.
///
/// # Safety
/// The data is mapped writable, the page is its producer's, no producer or consumer of the lane lives, and `found` is of a
/// [`scan`] of this data whose start was a place in it.
pub unsafe fn truncate(data: &Data, page: &ProducerPage, found: &Scan) {
    // Relaxed: nobody else is there.
    failpoint("cut: before");
    data.header(found.end.offset).store(0, Relaxed);
    failpoint("cut: header");
    page.tail.store(found.end.pack(), Relaxed);
    failpoint("cut: tail");
    page.floor.store(found.floor, Relaxed);
    failpoint("cut: floor");
}

/// What the marks before a message say besides its descriptors: where they lead, and which generation is the first.
#[derive(Clone, Copy, Default)]
struct Marks {
    jump: Option<u64>,
    generation: Option<u32>,
}

/// The message at `place`, following the marks before it, and what they say; checked against the bounds
/// as for any reader of somebody else's bytes. `None`: nothing is published there.
fn record_at(data: &Data, bytes_max: u64, place: Position) -> Result<Option<(Record, Marks)>, LaneError> {
    let (mut offset, mut descriptors, mut marks, mut rank_seen) = (place.offset, 0, Marks::default(), 0u32);
    loop {
        // What a mark leads to was written before the mark, or one before it, was published.
        let word = data.header(offset).load(PUBLISH.load()); // [publish]
        if word == 0 && rank_seen == 0 {
            return Ok(None);
        }
        let (seq, low) = ((word >> 32) as u32, word as u32);
        if seq != place.seq {
            return Err(LaneError::Corrupt { what: "seq of a record", found: seq.into(), wanted: place.seq.into() });
        }
        if low & MARK == 0 {
            let bytes = u64::from(low);
            if bytes > bytes_max {
                return Err(LaneError::Corrupt { what: "length of a record", found: bytes, wanted: bytes_max });
            }
            let end = offset + record_bytes(bytes);
            if end + 8 > data.capacity() {
                return Err(LaneError::Corrupt { what: "end of a record", found: end, wanted: data.capacity() - 8 });
            }
            return Ok(Some((Record { offset, bytes, seq, descriptors }, marks)));
        }
        let (kind, value) = (low >> 28 & 7, low & 0x0fff_ffff);
        // Ranks rise: a hostile producer cannot lead round in circles.
        let rank = MARK_RANKS[kind as usize];
        if rank <= rank_seen {
            return Err(LaneError::Corrupt { what: "mark", found: low.into(), wanted: MARK.into() });
        }
        rank_seen = rank;
        offset += 8;
        match kind {
            MARK_JUMP => {
                offset = u64::from(value) * 64;
                marks.jump = Some(offset);
            }
            MARK_DESCRIPTORS => descriptors = value,
            MARK_GENERATION => marks.generation = Some(value),
            // Information of a later version.
            _ => {}
        }
        if offset + 16 > data.capacity() {
            return Err(LaneError::Corrupt { what: "place after a mark", found: offset, wanted: data.capacity() - 16 });
        }
    }
}

/// # Safety
/// All pages of `memory` are mapped.
unsafe fn waker_of(memory: &Memory, can_barrier: bool) -> Waker {
    // SAFETY: the caller's promise.
    unsafe {
        Waker::new(
            field(memory.producer, |p| &raw mut (*p).sleep),
            field(memory.consumer, |p| &raw mut (*p).fenced),
            can_barrier,
        )
    }
}
