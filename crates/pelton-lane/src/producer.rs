//! The producer's side: where the next record goes, and how it becomes visible.
//!
//! The free room is what is neither unreleased nor needed for the cleared header after the last record. Seen from the
//! producer's tail `t`, with the head `h` as last looked at:
//!
//! ```text
//! t >= h   0......h=========t........C    room behind t up to C, or, wrapped, from 0 up to h
//! t <  h   0===t......h========E.....C    room from t up to h; when that is used up, a jump behind E, where the lap ended
//! jumped   0====-.....h========E.===t.C   room behind t only, until h has come past the floor (the jump's target)
//! ```
//! The last line is why wrapping early is safe for a reader that stops right after: what lies behind E is not lost to it.
//!
//! Invariants:
//! - a record ends, and the cleared header after it fits, at or before `limit` (fast path) or as `place` decides;
//! - the header at the tail is cleared, so that no reader takes old bytes for a record;
//! - marks and the records of a batch are written before the one release store at the tail that publishes them all;
//! - bytes of the data are never read while the lane runs: a hostile consumer that scribbles there deceives itself.

use crate::consumer::Consumer;
use crate::edges::{CLOSE, PUBLISH, failpoint};
use crate::layout::{
    MARK_DESCRIPTORS, MARK_GENERATION, MARK_JUMP, Position, ProducerPage, State, WINDOW, header, mark, record_bytes,
    seq_after,
};
use crate::memory::{Data, Memory};
use crate::sleep::{Attention, Sleeper, Wake, Waker};
use crate::{LaneError, layout};
use core::ptr::NonNull;
use core::sync::atomic::Ordering::Relaxed;

/// While the reader is behind and the lane stretches, the head is looked at once per this many bytes, not per record:
/// the line that holds it is the consumer's, and fetching it costs as much as a message.
const LOOK_AGAIN: u64 = 16 * 1024;

/// Within the window, the fast path reserves at most this many bytes before it takes the slow path again. The owner of the producer measures
/// the throughput there.
const FAST_PATH_BYTES_MAX: u64 = WINDOW;

/// How far ahead of the tail the producer asks for cache lines, in bytes. They were the consumer's a lap ago; fetching them
/// back one by one, as the stores get there, is what a message costs most. A multiple of 64. Measured with
/// `./run bench stream --size 256`, and 16: docs/decisions/0005-prefetch.md, 0029-small-messages.md.
const PREFETCH_AHEAD: u64 = 1024;

/// Larger messages gain nothing by it: they are copied by instructions that fetch ahead themselves.
const PREFETCHED_MAX: u64 = 4096;

/// Smaller ones share lines, and ask for each once: at 16 bytes, to ask for every message's was slower than not to ask. What is larger is
/// faster by asking for the line between two records twice, by 3 to 10 % (docs/decisions/0028-what-a-call-stores.md).
const SHARES_LINES: u64 = 128;

/// Room that has been reserved: where its payload goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservedSpace {
    /// Bytes from the start of the data.
    pub(crate) offset: u64,
    /// Bytes that may be written there.
    pub bytes: u64,
}

/// The sending side of a lane.
#[derive(Debug)]
pub struct Producer {
    memory: Memory,
    /// The place of the next record, and its number.
    tail: u64,
    seq: u32,
    /// Up to here records may be placed at the tail without looking again.
    limit: u64,
    /// Where the header goes of a record that was not reserved at the tail, or of a batch's first.
    at: u64,
    capacity: u64,
    bytes_max: u64,
    window: u64,
    waker: Waker,

    /// Of the reservation under way: what comes between the tail and its header.
    jump: Option<u64>,
    marks: [u32; 2],
    mark_count: usize,

    head: Position,
    floor: u64,
    /// Where the lap before this one ended, while the tail is behind the head.
    lap_end: u64,
    generation_due: Option<u32>,
    consumer_gone: bool,
    /// The caller knows that the consumer has closed, and goes on without.
    without_consumer: bool,
    /// Bytes of the data, from its start, that are known to have memory, or disk, behind them.
    backed: u64,
    sleeper: Sleeper,
}

/// A batch under way: nothing of it is seen before [`Producer::commit_batch`]. In the hands of who fills it, and not in the producer, so that what
/// changes with each message stays in registers.
#[derive(Debug)]
pub struct Batch {
    /// Where its first record goes, and the end of those it has.
    start: u64,
    end: u64,
    /// Up to where it has room.
    limit: u64,
    seq: u32,
    next_seq: u32,
    /// Bytes of its first message, whose header is the last to be written.
    first: u32,
    bytes: u64,
}

// SAFETY: the pointers in `memory` are to shared memory that outlives this (see `Data::new`), and a producer is one
// owner wherever it is.
unsafe impl Send for Producer {}

impl Producer {
    /// The producer of a lane whose records begin, or go on, at `tail`, with everything before `head` released.
    /// `floor` is 0 for a fresh lane, else the dead producer's. `can_barrier` as for [`Sleeper`].
    /// A `generation` above 1 is marked at its first message.
    ///
    /// # Errors
    /// [`LaneError::Corrupt`] when a position lies outside the data or `tail` before `head`.
    ///
    /// # Safety
    /// `memory` stays mapped, the producer's page and the data writable, as long as this lives; nobody else is this
    /// lane's producer; the page's capacity and limit are valid and equal to `memory`'s.
    pub unsafe fn attach(
        memory: Memory,
        tail: Position,
        head: Position,
        floor: u64,
        can_barrier: bool,
    ) -> Result<Producer, LaneError> {
        let capacity = memory.data.capacity();
        // SAFETY: the caller promises the mapping and that nobody else writes it.
        let page = unsafe { memory.producer.as_ref() };
        for (what, position) in [("tail", tail), ("head", head)] {
            check_position(what, position, capacity)?;
        }
        if tail.since(head) > capacity / 8 {
            return Err(LaneError::Corrupt {
                what: "records between head and tail",
                found: tail.since(head),
                wanted: capacity / 8,
            });
        }
        let generation = page.generation.load(Relaxed);
        let producer = Producer {
            memory,
            tail: tail.offset,
            seq: tail.seq,
            limit: 0,
            at: tail.offset,
            capacity,
            bytes_max: page.message_bytes_max,
            window: WINDOW.min(capacity),
            // SAFETY: the caller promises the mappings.
            waker: unsafe { waker_of(&memory, can_barrier) },
            jump: None,
            marks: [0; 2],
            mark_count: 0,
            head,
            // A floor is meant for a tail past it; a crash between the two stores leaves one that is not.
            floor: if floor <= tail.offset { floor } else { 0 },
            lap_end: capacity,
            generation_due: if generation > 1 { Some(generation as u32) } else { None },
            consumer_gone: false,
            without_consumer: false,
            backed: capacity,
            // SAFETY: as above.
            sleeper: Sleeper::new(unsafe { field(memory.producer, |p| &raw mut (*p).sleep) }, can_barrier),
        };
        page.floor.store(producer.floor, Relaxed);
        failpoint("producer attaches: floor");
        page.tail.store(tail.pack(), Relaxed);
        failpoint("producer attaches: tail");
        page.state.store(State::Open as u32, CLOSE.store());
        failpoint("producer attaches: state");
        Ok(producer)
    }

    /// Goes on with another consumer after the first died. `consumer` and `receiver` are the successor's pages, whose
    /// head must be where the dead one's was. Answers how many messages are delivered again.
    ///
    /// # Errors
    /// [`LaneError::Corrupt`] when the successor's head is somewhere else.
    ///
    /// # Safety
    /// As for [`Producer::attach`], for the new pages; the old ones may be unmapped afterwards.
    pub unsafe fn attach_consumer(
        &mut self,
        consumer: NonNull<layout::ConsumerPage>,
        receiver: NonNull<layout::ReceiverPage>,
        can_barrier: bool,
    ) -> Result<u64, LaneError> {
        // SAFETY: the caller promises the mapping.
        let head = unsafe { consumer.as_ref() }.head();
        if head != self.head {
            return Err(LaneError::Corrupt {
                what: "the successor's head",
                found: head.pack(),
                wanted: self.head.pack(),
            });
        }
        self.memory.consumer = consumer;
        self.memory.receiver = receiver;
        self.consumer_gone = false;
        self.limit = 0;
        // SAFETY: the caller promises the mappings.
        self.waker = unsafe { waker_of(&self.memory, can_barrier) };
        Ok(self.unreleased())
    }

    /// How much of the lane a reader that keeps up leaves in use, in bytes: [`WINDOW`] at first, or the capacity if that is
    /// less. The producer's own choice, which no other party needs to know.
    pub fn set_window(&mut self, bytes: u64) {
        self.window = bytes.min(self.capacity);
        self.limit = 0;
    }

    /// The window, in bytes: see [`Producer::set_window`].
    pub fn window(&self) -> u64 {
        self.window
    }

    /// Bytes of the lane from the head, as last loaded, to the tail.
    pub fn backlog_bytes(&self) -> u64 {
        let wrapped = if self.tail < self.head.offset { self.lap_end } else { 0 };
        // The head is the consumer's word, checked only for being inside the lane.
        (self.tail + wrapped).saturating_sub(self.head.offset)
    }

    /// Committed bytes including headers, modulo 2^64. The count continues from the value in the page, which may be any number.
    pub fn sent_bytes(&self) -> u64 {
        let page = self.page();
        // Relaxed: only this producer stores them.
        page.bytes.load(Relaxed).wrapping_add(page.messages.load(Relaxed).wrapping_mul(8))
    }

    /// Whether a message of `bytes`, at the tail, would end behind the window.
    pub fn is_past_window(&self, bytes: u64) -> bool {
        self.tail + record_bytes(bytes.min(self.bytes_max)) + 8 > self.window
    }

    /// Has both sides of an empty lane go on at its front, without a mark: for who is both, as nobody else looks at the data.
    /// Does nothing when something is there.
    pub fn rewind(&mut self, consumer: &mut Consumer) {
        if !consumer.rewind(self.tail()) {
            return;
        }
        // Relaxed, all of it: whoever is the consumer later has that from who is both now.
        self.data().header(0).store(0, Relaxed);
        self.tail = 0;
        self.head = self.tail();
        (self.floor, self.limit, self.lap_end) = (0, 0, self.capacity);
        let page = self.page();
        page.floor.store(0, Relaxed);
        page.tail.store(self.tail().pack(), Relaxed);
    }

    /// Says how many bytes of the data, from its start, have memory or disk behind them; all of it at first. A reservation
    /// that needs more answers [`LaneError::Unbacked`].
    pub fn set_backed(&mut self, bytes: u64) {
        self.backed = bytes.min(self.capacity);
        self.limit = 0;
    }

    /// What [`Producer::set_backed`] said.
    pub fn backed(&self) -> u64 {
        self.backed
    }

    /// Goes on whether or not the consumer has closed, for its successor: there is room as long as the lane has some. Only a
    /// close after this is [`LaneError::Closed`].
    pub fn continue_without_consumer(&mut self) {
        self.consumer_gone = false;
        self.without_consumer = self.has_consumer_closed();
        self.limit = 0;
    }

    /// Whether the consumer has closed, told or not.
    pub fn has_consumer_closed(&self) -> bool {
        // A lane made after the receiver closed has nothing but the receiver's word for it.
        self.consumer_page().is_closed() || self.waker.is_closed()
    }

    #[inline(always)]
    fn page(&self) -> &ProducerPage {
        // SAFETY: `attach`'s caller promises the mapping.
        unsafe { self.memory.producer.as_ref() }
    }

    #[inline(always)]
    fn data(&self) -> &Data {
        &self.memory.data
    }

    /// Reserves room for one message of `bytes`, never waiting. `None`: the lane is full. A reservation not committed is
    /// as if it had never been; the next one replaces it.
    ///
    /// # Errors
    /// [`LaneError::TooLarge`]; [`LaneError::Closed`] when the consumer has closed; [`LaneError::Corrupt`].
    #[inline]
    pub fn try_reserve(&mut self, bytes: u64) -> Result<Option<ReservedSpace>, LaneError> {
        match self.reserve_fast(bytes) {
            Some(space) => Ok(Some(space)),
            None => self.reserve_slow(bytes, 0),
        }
    }

    /// The common case of [`Producer::try_reserve`]: room is known to be at the tail. `None`: ask `try_reserve`. Apart so
    /// that a caller can keep it in registers, and everything else out of the way.
    #[inline(always)]
    pub fn reserve_fast(&mut self, bytes: u64) -> Option<ReservedSpace> {
        // `bytes` is bounded before it is added to anything.
        if bytes <= self.bytes_max && self.tail + record_bytes(bytes) + 8 <= self.limit {
            Some(ReservedSpace { offset: self.tail + 8, bytes })
        } else {
            None
        }
    }

    /// As [`Producer::try_reserve`], with a mark before the message that `descriptors` travel with it; none if 0.
    ///
    /// # Errors
    /// As [`Producer::try_reserve`].
    #[cold]
    pub fn try_reserve_with_descriptors(
        &mut self,
        bytes: u64,
        descriptors: u32,
    ) -> Result<Option<ReservedSpace>, LaneError> {
        self.reserve_slow(bytes, descriptors)
    }

    #[cold]
    #[inline(never)]
    fn reserve_slow(&mut self, bytes: u64, descriptors: u32) -> Result<Option<ReservedSpace>, LaneError> {
        if bytes > self.bytes_max {
            return Err(LaneError::TooLarge { bytes, bytes_max: self.bytes_max });
        }
        if !self.make_room(record_bytes(bytes), descriptors)? {
            return Ok(None);
        }
        Ok(Some(ReservedSpace { offset: self.at + 8, bytes }))
    }

    /// Sets `at`, and what comes before it, for records of `records` bytes; false when there is no room.
    fn make_room(&mut self, records: u64, descriptors: u32) -> Result<bool, LaneError> {
        if self.consumer_gone {
            return Err(LaneError::Closed);
        }
        self.mark_count = 0;
        if let Some(generation) = self.generation_due {
            self.marks[0] = mark(MARK_GENERATION, generation);
            self.mark_count = 1;
        }
        if descriptors > 0 {
            self.marks[self.mark_count] = mark(MARK_DESCRIPTORS, descriptors);
            self.mark_count += 1;
        }
        // The cleared header after the last record, which is also where the next jump goes.
        let need = 8 * self.mark_count as u64 + records + 8;
        let Some(start) = self.place(need)? else { return Ok(false) };
        // Awake: the consumer need not look further.
        self.sleeper.disarm();
        self.jump = (start != self.tail).then_some(start);
        self.at = start + 8 * self.mark_count as u64;
        Ok(true)
    }

    /// Finds `need` contiguous bytes, and sets `limit` for the records after them.
    fn place(&mut self, need: u64) -> Result<Option<u64>, LaneError> {
        let window = self.window;
        let mut looked = false;
        loop {
            let (tail, head) = (self.tail, self.head.offset);
            let past_window = tail + need > window;
            let end = if tail >= head { self.capacity } else { head };
            let fits = tail + need <= end;
            // Wrapped records must end before the head, and the head be on the lap that the tail is on.
            let front = tail >= head && need <= head && head >= self.floor;
            if front && (past_window || !fits) {
                self.limit = 0;
                return self.backed_for(0, need);
            }
            if fits && !past_window {
                self.limit = self.allow(end.min(window).min(tail + need + FAST_PATH_BYTES_MAX));
                return self.backed_for(tail, need);
            }
            // What follows stretches the lane, or finds it full: not before having looked.
            if looked {
                if fits {
                    self.limit = self.allow(end.min(tail + need + LOOK_AGAIN));
                    return self.backed_for(tail, need);
                }
                // Units of 64 bytes is what a jump can name; the place at the lap's end holds the jump to the front.
                let behind = (self.lap_end + 8).next_multiple_of(64);
                if tail < head && behind + need <= self.capacity {
                    self.limit = 0;
                    return self.backed_for(behind, need);
                }
                return Ok(None);
            }
            self.look()?;
            looked = true;
        }
    }

    /// The place, if there is memory behind it.
    fn backed_for(&mut self, place: u64, need: u64) -> Result<Option<u64>, LaneError> {
        if place + need > self.backed {
            self.limit = 0;
            return Err(LaneError::Unbacked { bytes: place + need });
        }
        self.limit = self.limit.min(self.backed);
        Ok(Some(place))
    }

    /// Up to where messages may be placed without asking again: nowhere while the next one needs its generation's mark.
    fn allow(&self, limit: u64) -> u64 {
        if self.generation_due.is_some() { 0 } else { limit }
    }

    /// Looks at the consumer: whether it has closed, and how far it has released.
    fn look(&mut self) -> Result<(), LaneError> {
        if self.has_unacknowledged_close() {
            return Err(LaneError::Closed);
        }
        self.without_consumer = self.without_consumer && self.has_consumer_closed();
        self.load_head()
    }

    /// Loads the consumer's head, checks it, keeps the copy.
    fn load_head(&mut self) -> Result<(), LaneError> {
        let head = self.consumer_page().head(); // [release]
        if head != self.head {
            check_position("head", head, self.capacity)?;
            let tail = self.tail();
            if head.since(self.head) > tail.since(self.head) {
                return Err(LaneError::Corrupt {
                    what: "seq at the head",
                    found: head.seq.into(),
                    wanted: tail.seq.into(),
                });
            }
            self.head = head;
        }
        let depth = self.unreleased();
        let page = self.page();
        if depth > page.depth_max.load(Relaxed) {
            page.depth_max.store(depth, Relaxed);
            failpoint("look: depth_max");
        }
        Ok(())
    }

    /// Copies `payload` into the reserved room. Shorter than reserved is fine.
    #[inline(always)]
    pub fn copy_in(&mut self, space: ReservedSpace, payload: &[u8]) {
        self.copy_in_at(0, space, payload);
    }

    /// As [`Producer::copy_in`], behind the first `skip` bytes of the room.
    #[inline(always)]
    pub fn copy_in_at(&mut self, skip: u64, space: ReservedSpace, payload: &[u8]) {
        assert!(skip + payload.len() as u64 <= space.bytes && space.offset + space.bytes <= self.capacity);
        failpoint("copy: before");
        self.data().copy_in(space.offset + skip, payload);
        failpoint("copy: after");
    }

    /// Where the reserved room's bytes are, for writing in place until commit.
    #[cfg(not(loom))]
    #[inline(always)]
    pub fn payload(&self, space: ReservedSpace) -> NonNull<u8> {
        assert!(space.offset + space.bytes <= self.capacity);
        self.data().payload(space.offset, space.bytes)
    }

    /// Publishes the reserved message, with the first `bytes` of its room as its payload. Answers whether to
    /// ring the receiver.
    ///
    /// # Panics
    /// When `bytes` is more than was reserved, or the room is not this lane's.
    #[inline(always)]
    pub fn commit(&mut self, space: ReservedSpace, bytes: u64) -> Wake {
        assert!(bytes <= space.bytes);
        let at = space.offset - 8;
        let end = at + record_bytes(bytes);
        // Only a space of another lane, or of an earlier reservation, could say otherwise.
        assert!(end + 8 <= self.capacity);
        let word = header(self.seq, bytes as u32);
        if at == self.tail {
            self.clear(end);
            failpoint("publish: before");
            self.data().header(self.tail).store(word, PUBLISH.store()); // [publish]
            failpoint("publish: after");
        } else {
            self.publish_marked(at, end, word);
        }
        // After publishing: the receiver may be waiting for just this message.
        self.prefetch_ahead(end, bytes);
        self.advance(end, seq_after(self.seq), 1, bytes)
    }

    /// Behind a record that ends there: asks for the lines that one like it will need.
    #[inline(always)]
    fn prefetch_ahead(&self, end: u64, bytes: u64) {
        if bytes <= PREFETCHED_MAX {
            let from = end + PREFETCH_AHEAD;
            let to = from + record_bytes(bytes);
            self.data().prefetch_to_write(from / 64 + u64::from(bytes < SHARES_LINES)..to / 64 + 1);
        }
    }

    /// The header after the last record, before the record is published.
    #[inline(always)]
    fn clear(&self, end: u64) {
        #[cfg(loom)]
        if crate::edges::weakened("clear") {
            return;
        }
        // Relaxed: the release store that publishes the record comes after it. [publish]
        failpoint("clear: before");
        self.data().header(end).store(0, Relaxed);
        failpoint("clear: after");
    }

    /// Writes a record, up to `end`, with what comes before it: first the record, then its marks, then the one store that makes
    /// all of it visible, at the tail.
    #[cold]
    #[inline(never)]
    fn publish_marked(&mut self, at: u64, end: u64, word: u64) {
        let start = self.at - 8 * self.mark_count as u64;
        let jump = self.jump.take();
        // As for the end of a record: only a space of the reservation under way stands where that has planned it.
        assert!(at == self.at && start == jump.unwrap_or(self.tail));
        self.clear(end);
        failpoint("marked: before");
        self.data().header(at).store(word, Relaxed);
        failpoint("marked: record");
        for i in (0..self.mark_count).rev() {
            let offset = start + 8 * i as u64;
            let order = if offset == self.tail { PUBLISH.store() } else { Relaxed };
            self.data().header(offset).store(header(self.seq, self.marks[i]), order); // [publish]
            failpoint("marked: mark");
        }
        if let Some(target) = jump {
            if target > self.tail {
                // Before the jump: a successor must not take the front for free.
                self.floor = target;
                self.page().floor.store(target, Relaxed);
                failpoint("jump: floor");
            }
            let low = mark(MARK_JUMP, (target / 64) as u32);
            self.data().header(self.tail).store(header(self.seq, low), PUBLISH.store()); // [publish]
            failpoint("jump: published");
            if target < self.tail {
                self.floor = 0;
                self.page().floor.store(0, Relaxed);
                failpoint("wrap: floor");
                self.lap_end = self.tail;
            }
        }
        self.generation_due = None;
    }

    /// Moves the tail behind what was just published, and asks whether to ring.
    #[inline(always)]
    fn advance(&mut self, end: u64, next_seq: u32, messages: u32, bytes: u64) -> Wake {
        self.seq = next_seq;
        self.tail = end;
        let page = self.page();
        // Relaxed, all three: the tail is for a successor, who learns of the death by a system call and walks on from
        // here; the others are for people, and begin at what a page that was taken over says, any number. They are kept nowhere
        // else: each store of a message takes a place among those that wait for the other side's lines.
        page.tail.store(Position { offset: end, seq: self.seq }.pack(), Relaxed);
        failpoint("advance: tail");
        page.messages.store(page.messages.load(Relaxed).wrapping_add(messages.into()), Relaxed);
        failpoint("advance: messages");
        page.bytes.store(page.bytes.load(Relaxed).wrapping_add(bytes), Relaxed);
        failpoint("advance: bytes");
        match self.waker.attention() {
            Attention::None => Wake::None,
            attention => self.attend(attention),
        }
    }

    #[cold]
    #[inline(never)]
    fn attend(&mut self, attention: Attention) -> Wake {
        match attention {
            Attention::Sleeps(epoch) => {
                self.waker.rang(epoch, self.seq);
                let page = self.page();
                page.wakes_sent.store(page.wakes_sent.load(Relaxed).wrapping_add(1), Relaxed);
                failpoint("producer finds a sleeper: counted");
                Wake::Ring
            }
            Attention::Closed if self.without_consumer => Wake::None,
            // The next reservation says so.
            Attention::Closed => {
                self.limit = 0;
                self.consumer_gone = true;
                Wake::None
            }
            Attention::Rung => Wake::Rung,
            Attention::None => Wake::None,
        }
    }

    /// Begins a batch of messages whose records take up to `records` bytes ([`record_bytes`] of each, added up), never
    /// waiting; `None` when there is no room. A batch not committed is as if it had never been.
    ///
    /// # Errors
    /// As [`Producer::try_reserve`]; the limit is `record_bytes(message_bytes_max)`.
    #[inline]
    pub fn try_begin_batch(&mut self, records: u64) -> Result<Option<Batch>, LaneError> {
        match self.begin_batch_fast(records) {
            Some(batch) => Ok(Some(batch)),
            None => self.begin_batch_slow(records),
        }
    }

    /// The common case of [`Producer::try_begin_batch`], as [`Producer::reserve_fast`] is of a message's.
    #[inline(always)]
    pub fn begin_batch_fast(&mut self, records: u64) -> Option<Batch> {
        // `records` is bounded before it is added to anything.
        if records <= record_bytes(self.bytes_max) && self.tail + records + 8 <= self.limit {
            self.at = self.tail;
            Some(self.begin_batch(records))
        } else {
            None
        }
    }

    #[cold]
    #[inline(never)]
    fn begin_batch_slow(&mut self, records: u64) -> Result<Option<Batch>, LaneError> {
        let records_max = record_bytes(self.bytes_max);
        if records > records_max {
            return Err(LaneError::TooLarge { bytes: records, bytes_max: records_max });
        }
        Ok(self.make_room(records, 0)?.then(|| self.begin_batch(records)))
    }

    #[inline(always)]
    fn begin_batch(&self, records: u64) -> Batch {
        let (start, seq) = (self.at, self.seq);
        Batch { start, end: start, limit: start + records, seq, next_seq: seq, first: 0, bytes: 0 }
    }

    /// Room for the batch's next message; `None` when the batch's room is used up.
    ///
    /// # Panics
    /// When the batch is of a longer lane.
    #[inline(always)]
    pub fn batch_message(&self, batch: &mut Batch, bytes: u64) -> Option<ReservedSpace> {
        assert!(batch.limit + 8 <= self.capacity);
        let offset = batch.end;
        // `bytes` is bounded before it is added to anything.
        if bytes > self.bytes_max || offset + record_bytes(bytes) > batch.limit {
            return None;
        }
        batch.end = offset + record_bytes(bytes);
        batch.bytes += bytes;
        if offset == batch.start {
            batch.first = bytes as u32;
        } else {
            // Relaxed: not reachable before the batch's first header is published. [publish]
            self.data().header(offset).store(header(batch.next_seq, bytes as u32), Relaxed);
            failpoint("batch: header");
        }
        batch.next_seq = seq_after(batch.next_seq);
        self.prefetch_ahead(batch.end, bytes);
        Some(ReservedSpace { offset: offset + 8, bytes })
    }

    /// Publishes the batch's messages, all of them by one store. Answers whether to ring the receiver.
    ///
    /// # Panics
    /// When something has been committed since it was begun, or room reserved elsewhere.
    #[inline]
    pub fn commit_batch(&mut self, batch: Batch) -> Wake {
        if batch.end == batch.start {
            return Wake::None;
        }
        assert!((batch.start, batch.seq) == (self.at, self.seq) && batch.end + 8 <= self.capacity);
        let word = header(self.seq, batch.first);
        if self.at == self.tail {
            self.clear(batch.end);
            failpoint("publish a batch: before");
            self.data().header(self.tail).store(word, PUBLISH.store()); // [publish]
            failpoint("publish a batch: after");
        } else {
            self.publish_marked(self.at, batch.end, word);
        }
        let messages = Position { offset: batch.end, seq: batch.next_seq }.since(self.tail());
        self.advance(batch.end, batch.next_seq, messages as u32, batch.bytes)
    }

    /// Announces that the producer is about to sleep until there is room for a message of `bytes`, or, for `None`, until
    /// the lane is empty. True: it still is not so, sleep. False: it is, do not. `barrier` as for [`Sleeper::arm`]; it is not run
    /// while the consumer fences.
    ///
    /// # Errors
    /// [`LaneError::Closed`] and [`LaneError::Corrupt`]: do not sleep either.
    pub fn arm(&mut self, bytes: Option<u64>, barrier: impl FnOnce()) -> Result<bool, LaneError> {
        self.look()?;
        // A good part: half of the messages that wait. Woken at the first one, the producer would be woken for each; at
        // the last one, it would start late. That the lane is empty is the same rule, met at the latest.
        let depth = self.unreleased();
        let wanted = if bytes.is_some() { depth.div_ceil(2) } else { depth };
        let mut target = self.head.seq.wrapping_add(wanted as u32);
        if target < self.head.seq {
            target = seq_after(target); // the numbering skips 0
        }
        failpoint("room_seq: before");
        self.page().room_seq.store(target.into(), Relaxed); // ordered by the barrier below [sleep]
        failpoint("room_seq: after");
        // SAFETY: `attach`'s caller promises the mapping.
        let consumer = unsafe { self.memory.consumer.as_ref() };
        self.sleeper.arm(|| {
            if !consumer.is_fenced() {
                barrier();
            }
        });
        let looked = self.look();
        let there = looked.is_err()
            || match bytes {
                Some(bytes) => self.has_room(bytes),
                None => self.unreleased() == 0,
            };
        if there {
            self.sleeper.disarm();
        } else {
            let page = self.page();
            page.sleeps.store(page.sleeps.load(Relaxed).wrapping_add(1), Relaxed);
            failpoint("producer arms: counted");
        }
        looked.map(|()| !there)
    }

    /// Counts a send that found no room and is going to wait.
    pub fn count_wait(&self) {
        let page = self.page();
        page.waits.store(page.waits.load(Relaxed).wrapping_add(1), Relaxed);
        failpoint("producer waits: counted");
    }

    /// Whether a message of `bytes` would find room now, even with marks before it. Saying no to one that fits only
    /// without is sound: an empty lane has room for both, and until it is empty there are releases to ring at.
    fn has_room(&mut self, bytes: u64) -> bool {
        let marks = 16;
        let place = self.place(marks + record_bytes(bytes.min(self.bytes_max)) + 8);
        // Whether it can be had is for the reservation to find.
        matches!(place, Ok(Some(_)) | Err(LaneError::Unbacked { .. }))
    }

    /// Says that the producer is awake again.
    pub fn disarm(&mut self) {
        self.sleeper.disarm();
    }

    /// Whether a sleep is announced.
    pub fn is_armed(&self) -> bool {
        self.sleeper.is_armed()
    }

    /// Whether a sleep may last only a millisecond, because the consumer is not yet known to fence.
    pub fn needs_timed_wait(&self) -> bool {
        // SAFETY: `attach`'s caller promises the mapping.
        self.sleeper.needs_fenced_wakers() && !unsafe { self.memory.consumer.as_ref() }.is_fenced()
    }

    /// Asks the consumer to fence from now on, because `membarrier` has been refused: see [`Sleeper::request_fencing`].
    pub fn request_fencing(&mut self) {
        self.sleeper.request_fencing();
    }

    /// Messages committed and not released, as the head was last looked at; [`Producer::refresh_head`] looks.
    #[inline]
    pub fn unreleased(&self) -> u64 {
        self.tail().since(self.head)
    }

    /// Whether the head has moved since it was last looked at: a hint for who spins.
    #[inline(always)]
    pub fn may_be_ready(&self) -> bool {
        // Relaxed: what follows loads it again.
        self.consumer_page().head.load(Relaxed) != self.head.pack()
    }

    /// Looks at the head, even if the consumer has closed, and answers how many messages are not released.
    ///
    /// # Errors
    /// [`LaneError::Corrupt`].
    pub fn refresh_head(&mut self) -> Result<u64, LaneError> {
        self.load_head()?;
        Ok(self.unreleased())
    }

    /// Whether the consumer has closed, and the caller does not know yet.
    pub fn has_unacknowledged_close(&self) -> bool {
        !self.without_consumer && self.consumer_page().is_closed()
    }

    /// The place of the next record.
    pub fn tail(&self) -> Position {
        Position { offset: self.tail, seq: self.seq }
    }

    /// Where the consumer had released to when last looked.
    pub fn head(&self) -> Position {
        self.head
    }

    /// The part of the data that holds no record and will not be written before the tail comes there again: what can be
    /// given back to the system. Two ranges of `(offset, bytes)`, either may be empty.
    pub fn idle(&self) -> [(u64, u64); 2] {
        let (tail, head) = (self.tail + 8, self.head.offset);
        if self.tail >= head {
            let front = if head >= self.floor { head } else { 0 };
            [(0, front), (tail, self.capacity - tail)]
        } else {
            let behind = (self.lap_end + 8).min(self.capacity);
            [(tail, head.saturating_sub(tail)), (behind, self.capacity - behind)]
        }
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

    /// The consumer's page.
    pub fn consumer_page(&self) -> &layout::ConsumerPage {
        // SAFETY: `attach`'s caller promises the mapping.
        unsafe { self.memory.consumer.as_ref() }
    }

    /// The producer's own page.
    pub fn producer_page(&self) -> &ProducerPage {
        self.page()
    }

    /// Says for good that no more will come. The receiver is to be rung afterwards.
    pub fn close(&mut self) {
        failpoint("producer closes: before");
        self.page().state.store(State::Closed as u32, CLOSE.store()); // [close]
        failpoint("producer closes: state");
        self.sleeper.close();
    }
}

pub(crate) fn check_position(what: &'static str, position: Position, capacity: u64) -> Result<(), LaneError> {
    if position.offset + 8 > capacity {
        return Err(LaneError::Corrupt { what, found: position.offset, wanted: capacity - 8 });
    }
    if position.seq == 0 {
        return Err(LaneError::Corrupt { what, found: position.pack(), wanted: 1 << 32 });
    }
    Ok(())
}

/// The address of a field of a shared page.
///
/// # Safety
/// `page` is mapped, and `pick` answers an address inside it.
pub(crate) unsafe fn field<P, F>(page: NonNull<P>, pick: impl FnOnce(*mut P) -> *mut F) -> NonNull<F> {
    // SAFETY: the caller's promise; an address inside a page is not null.
    unsafe { NonNull::new_unchecked(pick(page.as_ptr())) }
}

/// # Safety
/// All pages of `memory` are mapped.
unsafe fn waker_of(memory: &Memory, can_barrier: bool) -> Waker {
    // SAFETY: the caller's promise.
    unsafe {
        Waker::new(
            field(memory.receiver, |p| &raw mut (*p).sleep),
            field(memory.producer, |p| &raw mut (*p).fenced),
            can_barrier,
        )
    }
}
