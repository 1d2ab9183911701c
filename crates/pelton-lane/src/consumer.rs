//! The consumer's side: which record is next, and when the producer gets its space back.
//!
//! The consumer expects the next record at the cursor, and has released everything before the head. The records between
//! the two are *taken*: the cursor has passed them, but they are not released. They are the current record or batch,
//! and the *held* records. The caller keeps a held record and releases it later, in any order, by its ticket.
//!
//! Invariants:
//! - each peek loads a header once and checks that copy alone;
//! - `cursor + 8 <= capacity`: the consumer accepts a record only if the header after it lies inside the data;
//! - the head moves in order, whatever the order of release.

use crate::edges::{CLOSE, PUBLISH, RELEASE, failpoint};
use crate::error::LaneError;
use crate::layout::{
    ConsumerPage, MARK, MARK_DESCRIPTORS, MARK_GENERATION, MARK_JUMP, MARK_TRACE, Position, ProducerPage, State,
    TRACE_BYTES, record_bytes, seq_after,
};
use crate::memory::{Data, Memory, field};
use crate::sleep::{PeerState, Sleeper, Wake, Waker};
use alloc::collections::VecDeque;
use core::ptr::NonNull;
use core::sync::atomic::Ordering::Relaxed;

/// The receiving side of a lane.
#[derive(Debug)]
pub struct Consumer {
    memory: Memory,
    /// The offset of the next record, and its number.
    cursor: u64,
    seq: u32,
    capacity: u64,
    bytes_max: u64,
    /// Messages taken before message `counted`, the next one at the last [`Consumer::count`]. Later ones are counted by
    /// their numbers, in [`Consumer::taken`], so that the fast path counts nothing.
    messages: u64,
    counted: u32,
    bytes: u64,
    waker: Waker,
    /// From the oldest held record on: each with its end, and whether it is released. Empty unless the caller holds
    /// one.
    held: VecDeque<Held>,
    /// The ticket of the first record in `held`.
    first_ticket: u64,
    generation: u32,
    /// The number of the last message that came with a position in a trace, and that position; 0: none. The slow path
    /// sets it, which runs at least once per lap: so no later message has the same number.
    traced: (u32, [u8; TRACE_BYTES]),
}

#[derive(Clone, Copy, Debug)]
struct Held {
    end: Position,
    released: bool,
}

/// A record at the consumer's cursor: a checked copy of its header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    pub(crate) offset: u64,
    /// Bytes of payload.
    pub bytes: u64,
    /// The message's number.
    pub seq: u32,
    /// Descriptors that accompany the message, over the socket.
    pub descriptors: u32,
}

impl Record {
    /// A record without a message, for a caller that reports other events as records. Its seq is 0, which no message
    /// has.
    pub const fn placeholder(descriptors: u32) -> Record {
        Record { offset: 0, bytes: 0, seq: 0, descriptors }
    }
}

/// The position of a caller that takes several messages. The caller holds it, not the consumer, so the values that
/// change with each message stay in registers until [`Consumer::take_to`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursor(Position);

impl Cursor {
    /// The number of the message before it.
    pub fn seq_before(&self) -> u32 {
        // The numbers skip 0.
        if self.0.seq == 1 { u32::MAX } else { self.0.seq - 1 }
    }
}

/// Consecutive whole records as bytes, without marks or gaps between them. The consumer has taken them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    offset: u64,
    /// Bytes of the records: each has a header of 8 bytes and a payload padded to a multiple of 8.
    pub bytes: u64,
    /// The first message's number.
    pub first_seq: u32,
    /// The number of messages, at least one.
    pub messages: u32,
}

impl Chunk {
    /// Appends `next`, of the same lane, if it follows directly. Returns whether it did.
    pub fn join(&mut self, next: &Chunk) -> bool {
        // The numbers skip 0.
        let (seq, wrapped) = self.first_seq.overflowing_add(self.messages);
        let follows = self.offset + self.bytes == next.offset && seq + u32::from(wrapped) == next.first_seq;
        if follows {
            self.bytes += next.bytes;
            self.messages += next.messages;
        }
        follows
    }
}

/// Identifies a held record for its release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(u64);

// SAFETY: the pointers in `memory` are to shared memory that outlives this (the caller of `attach` guarantees it). They
// are not tied to a thread, and this is the lane's only consumer.
unsafe impl Send for Consumer {}

impl Consumer {
    /// The consumer of a lane whose first unreleased record is, or will be, at the head in its own page. `can_barrier`
    /// as for
    /// [`Sleeper::of_receiver`].
    ///
    /// # Errors
    /// [`LaneError::Corrupt`] if that position lies outside the data.
    ///
    /// # Safety
    /// `memory` stays mapped, the consumer's page writable, as long as this lives. The lane has no other consumer.
    /// `message_bytes_max` is at most [`crate::message_bytes_limit`] of the capacity.
    pub unsafe fn attach(memory: Memory, message_bytes_max: u64, can_barrier: bool) -> Result<Consumer, LaneError> {
        // SAFETY: the caller guarantees that the page is mapped.
        let page = unsafe { memory.consumer.as_ref() };
        let head = page.head();
        head.check("head", memory.data.capacity())?;
        let consumer = Consumer {
            memory,
            cursor: head.offset,
            seq: head.seq,
            capacity: memory.data.capacity(),
            bytes_max: message_bytes_max,
            // A successor continues the counts of the page that it takes over.
            messages: page.messages.load(Relaxed),
            counted: head.seq,
            bytes: page.bytes.load(Relaxed),
            // SAFETY: the caller guarantees that the pages are mapped.
            waker: unsafe { waker_of(&memory, can_barrier) },
            held: VecDeque::new(),
            first_ticket: 0,
            // Until a mark changes it.
            // SAFETY: the caller guarantees that the page is mapped.
            generation: unsafe { memory.producer.as_ref() }.generation() as u32 & 0x0fff_ffff,
            traced: (0, [0; TRACE_BYTES]),
        };
        page.state.store(State::Open as u32, CLOSE.store());
        failpoint("consumer attaches: state");
        Ok(consumer)
    }

    /// Continues with a successor of the producer, whose tail must be [`Consumer::end_of_committed`]: it takes over the
    /// records that its predecessor committed.
    ///
    /// # Safety
    /// As for [`Consumer::attach`], for the new page. The caller may unmap the old one afterwards.
    pub unsafe fn attach_producer(&mut self, producer: NonNull<ProducerPage>, can_barrier: bool) {
        self.memory.producer = producer;
        // SAFETY: the caller guarantees that the pages are mapped.
        self.waker = unsafe { waker_of(&self.memory, can_barrier) };
    }

    #[inline(always)]
    fn page(&self) -> &ConsumerPage {
        // SAFETY: `attach`'s caller guarantees that the page is mapped.
        unsafe { self.memory.consumer.as_ref() }
    }

    #[inline(always)]
    fn data(&self) -> &Data {
        &self.memory.data
    }

    /// The next message, or `None`; never waits. Returns the same message until the caller takes, releases or holds it.
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

    /// The fast path of [`Consumer::peek`]: a message without marks is at the cursor. `None`: call `peek`. It is
    /// separate so that a caller can inline it and keep its values in registers.
    #[inline(always)]
    pub fn peek_fast(&self) -> Option<Record> {
        self.peek_at(self.cursor().0)
    }

    /// The caller has checked that `position` lies inside the data.
    #[inline(always)]
    fn peek_at(&self, position: Position) -> Option<Record> {
        let Position { offset, seq } = position;
        let word = self.data().header(offset).load(PUBLISH.load()); // [publish]
        let bytes = word & 0xffff_ffff;
        // One comparison for the length and the mark flag: a mark exceeds every limit.
        let found =
            (word >> 32) as u32 == seq && bytes <= self.bytes_max && offset + record_bytes(bytes) + 8 <= self.capacity;
        found.then_some(Record { offset, bytes, seq, descriptors: 0 })
    }

    /// A cursor at the next message, for a caller that takes several: [`Consumer::take_at`], and then
    /// [`Consumer::take_to`].
    #[inline(always)]
    pub fn cursor(&self) -> Cursor {
        Cursor(Position { offset: self.cursor, seq: self.seq })
    }

    /// As [`Consumer::peek_fast`], at a cursor of this consumer. It moves the cursor past the message, but not the
    /// consumer.
    ///
    /// # Panics
    /// If the cursor is of a larger lane.
    #[inline(always)]
    pub fn take_at(&self, cursor: &mut Cursor) -> Option<Record> {
        assert!(cursor.0.offset + 8 <= self.capacity);
        let record = self.peek_at(cursor.0)?;
        cursor.0 = Position { offset: record.offset + record_bytes(record.bytes), seq: seq_after(record.seq) };
        Some(record)
    }

    /// Moves the consumer to `cursor`, which it has returned since its last move. `bytes` is the payload of the
    /// messages that the cursor has passed. [`Consumer::release_taken`] releases them.
    ///
    /// # Panics
    /// If the cursor is of a larger lane.
    #[inline(always)]
    pub fn take_to(&mut self, cursor: Cursor, bytes: u64) {
        assert!(cursor.0.offset + 8 <= self.capacity);
        (self.cursor, self.seq) = (cursor.0.offset, cursor.0.seq);
        // Wrapping, as the count continues from a predecessor's page, which may contain any number.
        self.bytes = self.bytes.wrapping_add(bytes);
    }

    #[cold]
    #[inline(never)]
    fn peek_slow(&mut self) -> Result<Option<Record>, LaneError> {
        // The slow path runs once per lap, and whenever the lane is empty.
        self.count();
        self.store_counters();
        let found = record_at(self.data(), self.bytes_max, Position { offset: self.cursor, seq: self.seq })?;
        Ok(found.map(|(record, marks)| {
            self.generation = marks.generation.unwrap_or(self.generation);
            self.traced.0 = 0;
            if let Some(offset) = marks.trace {
                self.traced = (record.seq, self.copy_trace(offset));
            }
            record
        }))
    }

    /// Copies a trace position, whose place `record_at` has checked.
    fn copy_trace(&self, offset: u64) -> [u8; TRACE_BYTES] {
        let mut trace = [0; TRACE_BYTES];
        #[cfg(loom)]
        self.data().copy_out_words(offset, &mut trace);
        // SAFETY: `record_at` has checked that the bytes lie in the data; `trace` has as many.
        #[cfg(not(loom))]
        unsafe {
            self.data().copy_out(offset, TRACE_BYTES as u64, trace.as_mut_ptr());
        }
        trace
    }

    /// The position in a trace of message `seq`, a copy of the producer's bytes, if the message came with one. Only for
    /// the message that the consumer peeked or took last, or that a cursor of it has just passed.
    #[inline]
    pub fn trace_of(&self, seq: u32) -> Option<&[u8; TRACE_BYTES]> {
        (self.traced.0 == seq && seq != 0).then_some(&self.traced.1)
    }

    /// Whether a header is at the cursor: a cheap hint for a spinning caller, which then calls [`Consumer::peek`].
    #[inline(always)]
    pub fn may_be_ready(&self) -> bool {
        // Relaxed: `peek` loads it again.
        self.data().header(self.cursor).load(Relaxed) != 0
    }

    /// The address of the payload, valid until the record is released.
    #[cfg(not(loom))]
    #[inline(always)]
    pub fn payload(&self, record: &Record) -> NonNull<u8> {
        self.data().payload(record.offset + 8, record.bytes)
    }

    /// Copies the payload of a record to `target`.
    ///
    /// # Safety
    /// `target` has space for `record.bytes`, and is not in a lane.
    #[cfg(not(loom))]
    #[inline(always)]
    pub unsafe fn copy_out(&self, record: &Record, target: *mut u8) {
        // SAFETY: the caller guarantees the target, for all bytes of the record.
        unsafe { self.copy_out_from(0, record, target) };
    }

    /// As [`Consumer::copy_out`], without the first `skip` bytes.
    ///
    /// # Panics
    /// If the payload is shorter than `skip`.
    ///
    /// # Safety
    /// `target` has space for `record.bytes - skip`, and is not in a lane.
    #[cfg(not(loom))]
    #[inline(always)]
    pub unsafe fn copy_out_from(&self, skip: u64, record: &Record, target: *mut u8) {
        assert!(skip <= record.bytes);
        // SAFETY: `peek` has checked the record's bounds; the caller guarantees the target.
        unsafe { self.data().copy_out(record.offset + 8 + skip, record.bytes - skip, target) };
    }

    /// Copies the payload of a record to `target`, under loom.
    #[cfg(loom)]
    pub fn copy_out(&self, record: &Record, target: &mut [u8]) {
        self.data().copy_out_words(record.offset + 8, target);
    }

    /// Moves the cursor past the record that [`Consumer::peek`] last returned, without a release.
    /// [`Consumer::release_taken`] releases everything taken.
    #[inline(always)]
    pub fn take(&mut self, record: &Record) {
        debug_assert_eq!(record.seq, self.seq, "a record is taken once, in order");
        self.cursor = record.offset + record_bytes(record.bytes);
        // Fails only for a record of another lane.
        assert!(self.cursor + 8 <= self.capacity);
        self.seq = seq_after(self.seq);
        // Wrapping, as the count continues from a predecessor's page, which may contain any number.
        self.bytes = self.bytes.wrapping_add(record.bytes);
    }

    /// Copies out and releases the next message in the fast path: as [`Consumer::peek_fast`], [`Consumer::copy_out`]
    /// and [`Consumer::release`], but without the check of a record that may be another lane's. `target` returns where
    /// to copy so many bytes to. Also returns false if the producer is awake, the usual case, and otherwise true: then
    /// the caller must call [`Consumer::check_peer`]. `None`: nothing is taken, because there is no message without
    /// marks at the cursor, one is held, or `target` returned none.
    ///
    /// # Safety
    /// `target` has space for so many bytes, and is not in a lane.
    #[cfg(not(loom))]
    #[inline(always)]
    #[must_use = "true: call `check_peer`, or the peer sleeps on, or its end is missed"]
    pub unsafe fn receive_fast(&mut self, target: impl FnOnce(u64) -> Option<NonNull<u8>>) -> Option<(Record, bool)> {
        let record = self.peek_fast().filter(|_| self.held.is_empty())?;
        let target = target(record.bytes)?;
        // SAFETY: `peek_fast` has checked the record's bounds; the caller guarantees the target.
        unsafe { self.data().copy_out(record.offset + 8, record.bytes, target.as_ptr()) };
        let must_check = self.release_to(record.offset + record_bytes(record.bytes), record.seq, record.bytes);
        Some((record, must_check))
    }

    /// As [`Consumer::release`], in the fast path: if the record is the next one, and none is held. Returns as
    /// [`Consumer::receive_fast`]; `None`: nothing is released.
    #[inline(always)]
    #[must_use = "true: call `check_peer`, or the peer sleeps on, or its end is missed"]
    pub fn release_fast(&mut self, record: &Record) -> Option<bool> {
        let is_next = (record.offset, record.seq) == (self.cursor, self.seq);
        if !is_next || record.bytes > self.bytes_max || !self.held.is_empty() {
            return None;
        }
        let end = record.offset + record_bytes(record.bytes);
        // Fails only for a record of another lane.
        (end + 8 <= self.capacity).then(|| self.release_to(end, record.seq, record.bytes))
    }

    /// Releases message `seq`, which ends at `end`: the caller has checked that the next header lies in the data.
    /// Returns as [`Consumer::receive_fast`].
    #[inline(always)]
    fn release_to(&mut self, end: u64, seq: u32, bytes: u64) -> bool {
        (self.cursor, self.seq) = (end, seq_after(seq));
        // Wrapping, as the count continues from a predecessor's page, which may contain any number.
        self.bytes = self.bytes.wrapping_add(bytes);
        self.move_head(Position { offset: end, seq: self.seq })
    }

    /// Counts the messages taken since the last call. Each lap ends in a mark, and so in a call of this: a lap has
    /// fewer messages than there are numbers.
    fn count(&mut self) {
        (self.messages, self.counted) = (self.taken(), self.seq);
    }

    /// Takes the record that [`Consumer::peek`] last returned, and the following records without marks, until they have
    /// `bytes_wanted` or the lane is empty. The records are valid until [`Consumer::release_taken`].
    pub fn take_chunk(&mut self, first: &Record, bytes_wanted: u64) -> Chunk {
        self.take(first);
        while self.cursor - first.offset < bytes_wanted
            && let Some(next) = self.peek_fast()
        {
            self.take(&next);
        }
        self.chunk_from(first)
    }

    /// As [`Consumer::take_chunk`], for a caller that owns both sides of the lane. `end` is the producer's tail. The
    /// producer has put no marks after `first`, because the caller rewinds the lane whenever the window is full. Loads
    /// no header.
    ///
    /// # Panics
    /// If `end` is not after `first`.
    pub fn take_chunk_to(&mut self, first: &Record, end: Position) -> Chunk {
        assert!(first.offset < end.offset && end.offset + 8 <= self.capacity);
        (self.cursor, self.seq) = (end.offset, end.seq);
        self.count();
        // Relaxed: a statistic, and the caller owns both sides.
        self.bytes = self.producer_page().bytes.load(Relaxed);
        self.chunk_from(first)
    }

    /// The records taken from `first` on.
    fn chunk_from(&self, first: &Record) -> Chunk {
        let bytes = self.cursor - first.offset;
        let messages = self.cursor().0.since(Position { offset: first.offset, seq: first.seq });
        debug_assert!(messages >= 1 && messages * 8 <= bytes);
        Chunk { offset: first.offset, bytes, first_seq: first.seq, messages: messages as u32 }
    }

    /// The bytes of a chunk, valid until the chunk is released.
    ///
    /// # Panics
    /// If the chunk is of a larger lane.
    #[cfg(not(loom))]
    pub fn chunk_bytes(&self, chunk: &Chunk) -> NonNull<[u8]> {
        assert!(chunk.offset + chunk.bytes <= self.capacity);
        NonNull::slice_from_raw_parts(self.data().payload(chunk.offset, chunk.bytes), chunk.bytes as usize)
    }

    /// Whether the producer has announced a sleep until the lane has more space. It may not sleep yet.
    pub fn is_producer_waiting(&mut self) -> bool {
        matches!(self.waker.peer_state(), PeerState::Asleep(_))
    }

    /// Whether the consumer has taken a record that is neither released nor held.
    pub fn has_taken(&self) -> bool {
        let released = self.held.back().map_or(self.head(), |newest| newest.end);
        released != Position { offset: self.cursor, seq: self.seq }
    }

    /// The consumer's part of [`crate::Producer::rewind`]. Returns false if it has not released everything before
    /// `tail`.
    pub(crate) fn rewind(&mut self, tail: Position) -> bool {
        let is_empty =
            self.held.is_empty() && self.head() == tail && (self.cursor, self.seq) == (tail.offset, tail.seq);
        if is_empty {
            self.cursor = 0;
            self.page().head.store(Position { offset: 0, ..tail }.pack(), RELEASE.store());
        }
        is_empty
    }

    /// Releases everything taken and not held. Returns whether to ring the sender.
    #[inline(always)]
    pub fn release_taken(&mut self) -> Wake {
        let end = Position { offset: self.cursor, seq: self.seq };
        if !self.held.is_empty() {
            return self.release_after_held(end);
        }
        if self.move_head(end) { self.check_peer() } else { Wake::None }
    }

    /// Separate, so that this rare case costs the fast path no registers.
    #[cold]
    #[inline(never)]
    fn release_after_held(&mut self, end: Position) -> Wake {
        // Equal: the consumer has taken nothing since.
        if self.held.back().is_none_or(|newest| newest.end != end) {
            self.held.push_back(Held { end, released: true });
        }
        Wake::None
    }

    /// Takes and releases the record that [`Consumer::peek`] last returned. Returns whether to ring the sender.
    #[inline(always)]
    pub fn release(&mut self, record: &Record) -> Wake {
        self.take(record);
        self.release_taken()
    }

    /// Takes the record that [`Consumer::peek`] last returned, and holds it until [`Consumer::release_held`]. Held
    /// records may be released in any order.
    pub fn hold(&mut self, record: &Record) -> Ticket {
        self.take(record);
        let ticket = Ticket(self.first_ticket + self.held.len() as u64);
        self.held.push_back(Held { end: Position { offset: self.cursor, seq: self.seq }, released: false });
        ticket
    }

    /// Releases a held record. The producer gets space back in order, once the oldest held record is released. Returns
    /// whether to ring the sender.
    ///
    /// # Panics
    /// If the ticket's record is already released.
    pub fn release_held(&mut self, ticket: Ticket) -> Wake {
        let index = ticket.0.checked_sub(self.first_ticket).expect("the ticket's record is already released");
        let held = self.held.get_mut(index as usize).expect("the ticket is not of this consumer");
        assert!(!held.released, "the ticket's record is already released");
        held.released = true;
        let mut end = None;
        while let Some(oldest) = self.held.front().copied().filter(|oldest| oldest.released) {
            self.held.pop_front();
            self.first_ticket += 1;
            end = Some(oldest.end);
        }
        match end {
            Some(end) if self.move_head(end) => self.check_peer(),
            _ => Wake::None,
        }
    }

    /// The number of held records.
    pub fn held(&self) -> usize {
        self.held.iter().filter(|held| !held.released).count()
    }

    /// Returns as [`Consumer::receive_fast`].
    #[inline(always)]
    fn move_head(&mut self, end: Position) -> bool {
        failpoint("release: before");
        self.page().head.store(end.pack(), RELEASE.store()); // [release]
        failpoint("release: after");
        self.waker.must_check()
    }

    /// Whether to ring the sender: if it waits for space, and the head's seq has reached its `room_seq`. An empty lane
    /// always satisfies the rule, as `room_seq` is at most the tail's seq.
    #[cold]
    #[inline(never)]
    pub fn check_peer(&mut self) -> Wake {
        let PeerState::Asleep(epoch) = self.waker.peer_state() else { return Wake::None };
        // Relaxed: after a stale load, the producer has not polled since it armed, so its poll finds this release.
        // [sleep]
        let target = self.producer_page().room_seq.load(Relaxed) as u32;
        if (self.head().seq.wrapping_sub(target) as i32) < 0 {
            return Wake::None;
        }
        self.waker.count_ring(epoch, self.seq);
        let page = self.page();
        page.wakes_sent.store(page.wakes_sent.load(Relaxed).wrapping_add(1), Relaxed);
        failpoint("consumer finds a sleeper: counted");
        Wake::Ring
    }

    /// Stores the counts of messages and bytes in the page. On the fast path, two stores per message would cost
    /// throughput.
    pub fn store_counters(&self) {
        let page = self.page();
        // Relaxed: statistics.
        page.messages.store(self.taken(), Relaxed);
        failpoint("consumer counters: messages");
        page.bytes.store(self.bytes, Relaxed);
        failpoint("consumer counters: bytes");
    }

    /// Counts a receive that found no message and will wait.
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

    /// Whether the producer fences, so a sleeper needs no barrier that reaches it: see [`Sleeper::arm`].
    pub fn is_producer_fencing(&self) -> bool {
        self.producer_page().is_fenced()
    }

    /// Whether a sleep needs a time-out of a millisecond, because the producer does not fence yet and may miss the
    /// sleep.
    pub fn needs_timed_wait(&self, sleeper: &Sleeper) -> bool {
        sleeper.needs_fenced_wakers() && !self.is_producer_fencing()
    }

    /// Whether the producer has closed. If true, call [`Consumer::peek`] once more: everything committed before the
    /// close is visible then.
    #[inline]
    pub fn has_producer_closed(&self) -> bool {
        self.producer_page().is_closed()
    }

    /// Scans everything committed from the cursor on. Returns the position where a dead producer's successor continues,
    /// and the number of messages before it.
    ///
    /// # Errors
    /// [`LaneError::Corrupt`].
    pub fn end_of_committed(&self) -> Result<(Position, u64), LaneError> {
        find_end(self.data(), self.bytes_max, Position { offset: self.cursor, seq: self.seq })
    }

    /// The head: everything before it is released.
    pub fn head(&self) -> Position {
        // Relaxed: only this consumer writes it.
        Position::unpack(self.page().head.load(Relaxed))
    }

    /// Messages taken by this consumer and its predecessors that used its page.
    pub fn taken(&self) -> u64 {
        // Wrapping, as the count continues from a predecessor's page, which may contain any number.
        self.messages.wrapping_add(self.cursor().0.since(Position { offset: 0, seq: self.counted }))
    }

    /// Where the next record will be: bytes after the front of the data.
    #[inline(always)]
    pub fn offset(&self) -> u64 {
        self.cursor
    }

    /// The bytes of those messages.
    pub fn taken_bytes(&self) -> u64 {
        self.bytes
    }

    /// The generation, modulo 2^28, of the producer whose message the consumer peeked last. Before the first message,
    /// the generation of the producer that this consumer attached to.
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
        // SAFETY: `attach`'s caller guarantees that the page is mapped.
        unsafe { self.memory.producer.as_ref() }
    }

    /// Call this before a ring of the producer: notes the processor of this thread, if known, and the time on the
    /// monotonic clock, as hints for the producer's next wait.
    pub fn note_ring(&self, processor: Option<u32>, at_ns: u64) {
        self.page().last_ring.note(processor, at_ns);
    }

    /// Notes the processor of this thread, if known, without a ring.
    pub fn note_processor(&self, processor: Option<u32>) {
        self.page().last_ring.note_processor(processor);
        failpoint("receiver sleeps: processor noted");
    }

    /// Closes the consumer for good. The caller must ring the sender afterwards.
    pub fn close(&mut self) {
        self.store_counters();
        failpoint("consumer closes: before");
        self.page().state.store(State::Closed as u32, CLOSE.store()); // [close]
        failpoint("consumer closes: state");
    }
}

/// The rank of a mark, by its kind. Ranks rise among the marks before one message: jump, generation, descriptors,
/// trace, then the kinds that a consumer may skip.
const MARK_RANKS: [u32; 8] = [1, 3, 2, 4, 5, 6, 7, 8];

/// The result of a scan of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scan {
    /// The position after the last whole record, where the next record goes.
    pub end: Position,
    /// Messages before it.
    pub messages: u64,
    /// The floor for a producer whose tail is at `end`: the target of the last jump forward, 0 after a jump to the
    /// front.
    pub floor: u64,
    /// The rule that the next header breaks, if the scan stopped for that reason.
    pub problem: Option<LaneError>,
}

/// Scans at most `messages_max` messages from `start`, the position of a record. It checks each record as a consumer
/// does.
pub fn scan(data: &Data, message_bytes_max: u64, start: Position, messages_max: u64) -> Scan {
    let mut found = Scan { end: start, messages: 0, floor: 0, problem: None };
    // Checks the start even if `messages_max` is 0: the caller may write at the end.
    if let Err(problem) = start.check("start of a walk", data.capacity()) {
        return Scan { problem: Some(problem), ..found };
    }
    while found.messages < messages_max {
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

/// Scans everything committed from `start` on. Returns the position after it and the number of messages.
///
/// # Errors
/// [`LaneError::Corrupt`].
pub fn find_end(data: &Data, message_bytes_max: u64, start: Position) -> Result<(Position, u64), LaneError> {
    let messages_max = data.capacity() / 8;
    let found = scan(data, message_bytes_max, start, messages_max + 1);
    match found.problem {
        Some(problem) => Err(problem),
        None if found.messages > messages_max => {
            Err(LaneError::Corrupt { what: "records in the lane", found: found.messages, wanted: messages_max })
        }
        None => Ok((found.end, found.messages)),
    }
}

/// Discards everything after `found.end`, as if it had never been committed.
///
/// # Safety
/// The data is mapped writable, and the page is its producer's. No producer or consumer of the lane lives. `found` is
/// the result of a [`scan`] of this data that began inside it.
pub unsafe fn truncate(data: &Data, page: &ProducerPage, found: &Scan) {
    // Relaxed: no other process uses the lane.
    failpoint("cut: before");
    data.header(found.end.offset).store(0, Relaxed);
    failpoint("cut: header");
    page.tail.store(found.end.pack(), Relaxed);
    failpoint("cut: tail");
    page.floor.store(found.floor, Relaxed);
    failpoint("cut: floor");
}

/// The jump, the generation, and the offset of the trace position in the marks before a message.
#[derive(Clone, Copy, Default)]
pub(crate) struct Marks {
    jump: Option<u64>,
    generation: Option<u32>,
    trace: Option<u64>,
}

/// The message at `position`, after its marks, with their contents. Checks every word, as the producer may be hostile.
/// `None`: no message is published there.
pub(crate) fn record_at(data: &Data, bytes_max: u64, position: Position) -> Result<Option<(Record, Marks)>, LaneError> {
    let (mut offset, mut descriptors, mut marks, mut rank_seen) = (position.offset, 0, Marks::default(), 0u32);
    loop {
        // One edge for all headers: the producer wrote the record and its marks before it published the first mark.
        let word = data.header(offset).load(PUBLISH.load()); // [publish]
        if word == 0 && rank_seen == 0 {
            return Ok(None);
        }
        let (seq, low) = ((word >> 32) as u32, word as u32);
        if seq != position.seq {
            return Err(LaneError::Corrupt { what: "seq of a record", found: seq.into(), wanted: position.seq.into() });
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
        // Ranks rise, so a hostile producer cannot cause an endless loop.
        let rank = MARK_RANKS[kind as usize];
        if rank <= rank_seen || kind == MARK_TRACE && value != TRACE_BYTES as u32 {
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
            MARK_TRACE => {
                marks.trace = Some(offset);
                offset += TRACE_BYTES as u64;
            }
            // A mark of a later version, which this one may skip.
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
    // SAFETY: the caller guarantees that the pages are mapped; both words are fields of them.
    unsafe {
        Waker::new(
            field(memory.producer, |p| &raw mut (*p).sleep),
            field(memory.consumer, |p| &raw mut (*p).fenced),
            can_barrier,
        )
    }
}
