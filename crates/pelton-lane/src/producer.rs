//! The producer's side: where the next record goes, and how it becomes visible.
//!
//! The free space excludes the unreleased records and the cleared header after the last record. A lap is one pass of
//! the tail from the front (offset 0) to the end `E` of its last record. There a jump, a mark with a target offset,
//! continues elsewhere. `t` is the producer's tail, `h` the head as last loaded, `C` the capacity, `E` that of the
//! previous lap:
//!
//! ```text
//! t >= h   0......h=========t........C    free: from t to C, or, after a wrap, from 0 to h
//! t <  h   0===t......h========E.....C    free: from t to h; once that is used up, after E, by a jump
//! jumped   0====-.....h========E.===t.C   free: after t only, until h has passed the floor (the jump's target)
//! ```
//! The third state keeps an early wrap safe. If the consumer stops right after the wrap, the producer still uses the
//! space after E.
//!
//! Invariants:
//! - a record and the cleared header after it end at or before `limit` (fast path), or where `find_space` allows;
//! - `limit <= capacity`: `send_fast` writes up to the limit without another check;
//! - the header at the tail is cleared, so that no consumer mistakes old bytes for a record;
//! - the producer writes marks and the records of a batch before the one release store at the tail that publishes them;
//! - the producer never reads the data, so a hostile consumer that overwrites it harms only itself.

use crate::consumer::Consumer;
use crate::edges::{CLOSE, PUBLISH, failpoint};
use crate::error::LaneError;
use crate::layout::{
    ConsumerPage, MARK_DESCRIPTORS, MARK_GENERATION, MARK_JUMP, MARK_TRACE, Position, ProducerPage, ReceiverPage,
    State, TRACE_BYTES, TRACE_MARK_BYTES, WINDOW, header, mark, record_bytes, seq_after, traced_message_bytes_limit,
};
use crate::memory::{Data, Memory, field};
use crate::sleep::{PeerState, Sleeper, Wake, Waker};
use core::ptr::NonNull;
use core::sync::atomic::Ordering::Relaxed;

/// Past the window, the producer polls the head once per this many bytes, not per record. The consumer owns the head's
/// cache line, and its transfer costs as much as a message.
const HEAD_POLL_BYTES: u64 = 16 * 1024;

/// Within the window, the fast path reserves at most this many bytes before it takes the slow path again. The
/// producer's owner measures the throughput on the slow path.
const FAST_PATH_BYTES_MAX: u64 = WINDOW;

/// How far ahead of the tail the producer prefetches cache lines, in bytes. The consumer owned them one lap ago.
/// Without a prefetch their transfer, one by one at each store, is the largest cost of a message. A multiple of 64.
/// Measured with `./run bench stream --size 256`, and 16: docs/decisions/0005-prefetch.md, 0029-small-messages.md.
const PREFETCH_AHEAD: u64 = 1024;

/// Larger messages gain nothing by the prefetch: the instructions that copy them prefetch by themselves.
const PREFETCH_BYTES_MAX: u64 = 4096;

/// Smaller messages share cache lines, and the producer prefetches each line once. At 16 bytes, a prefetch per message
/// was slower than none. Larger messages are 3 to 10 % faster if it prefetches the line between two records twice
/// (docs/decisions/0028-call-stores.md).
const SHARED_LINE_BYTES: u64 = 128;

/// Reserved space for the payload of one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservedSpace {
    /// Bytes from the start of the data.
    pub(crate) offset: u64,
    /// Its length.
    pub bytes: u64,
}

/// The sending side of a lane.
#[derive(Debug)]
pub struct Producer {
    memory: Memory,
    /// The offset of the next record, and its number.
    tail: u64,
    seq: u32,
    /// Records may be placed at the tail up to here without another poll of the head. At most the capacity:
    /// [`Producer::send_fast`] relies on that.
    limit: u64,
    /// The header's offset of a record that the slow path reserved, or of a batch's first record.
    header_at: u64,
    capacity: u64,
    bytes_max: u64,
    /// That of the lane: [`Producer::permit_traced`] may lower the former.
    lane_bytes_max: u64,
    window: u64,
    /// Reservations end before this offset: see [`Producer::set_bound`].
    bound: u64,
    waker: Waker,

    /// The jump and the marks between the tail and the header of the current reservation.
    jump: Option<u64>,
    marks: [u32; 2],
    mark_count: usize,
    /// The position in a trace, in a mark after those.
    trace: Option<[u8; TRACE_BYTES]>,

    head: Position,
    floor: u64,
    /// Where the previous lap ended, while the tail is before the head.
    lap_end: u64,
    generation_due: Option<u32>,
    consumer_gone: bool,
    /// The caller knows that the consumer has closed, and continues without one.
    without_consumer: bool,
    is_traced: bool,
    /// Bytes of the data, from its start, that have memory or disk behind them.
    backed: u64,
    sleeper: Sleeper,
}

/// An open batch: no part of it is visible before [`Producer::commit_batch`]. The caller holds it, not the producer, so
/// the values that change with each message stay in registers.
#[derive(Debug)]
pub struct Batch {
    /// The offset of its first record, and the end of its last.
    start: u64,
    end: u64,
    /// The end of its reserved space.
    limit: u64,
    seq: u32,
    next_seq: u32,
    /// Bytes of its first message, whose header the producer writes last.
    first: u32,
    bytes: u64,
}

// SAFETY: the pointers in `memory` are to shared memory that outlives this (the caller of `attach` guarantees it). They
// are not tied to a thread, and this is the lane's only producer.
unsafe impl Send for Producer {}

impl Producer {
    /// Creates the producer of a lane whose next record goes to `tail`; the consumer has released everything before
    /// `head`. `floor` is 0 for a new lane, otherwise the predecessor's. `can_barrier` as for [`Sleeper::of_receiver`].
    /// If the page's generation is above 1, a mark with the generation precedes the first message.
    ///
    /// # Errors
    /// [`LaneError::Corrupt`] if a position lies outside the data, or `tail` before `head`.
    ///
    /// # Safety
    /// `memory` stays mapped, the producer's page and the data writable, as long as this lives. The lane has no other
    /// producer. The page's capacity and limit are valid and equal to `memory`'s.
    pub unsafe fn attach(
        memory: Memory,
        tail: Position,
        head: Position,
        floor: u64,
        can_barrier: bool,
    ) -> Result<Producer, LaneError> {
        let capacity = memory.data.capacity();
        // SAFETY: the caller guarantees that the page is mapped, and that nothing else writes it.
        let page = unsafe { memory.producer.as_ref() };
        for (what, position) in [("tail", tail), ("head", head)] {
            position.check(what, capacity)?;
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
            header_at: tail.offset,
            capacity,
            bytes_max: page.message_bytes_max,
            lane_bytes_max: page.message_bytes_max,
            window: WINDOW.min(capacity),
            bound: capacity,
            // SAFETY: the caller guarantees that the pages are mapped.
            waker: unsafe { waker_of(&memory, can_barrier) },
            jump: None,
            marks: [0; 2],
            mark_count: 0,
            trace: None,
            head,
            // A floor is valid only up to the tail. A crash between the stores of floor and tail leaves a floor after
            // the tail.
            floor: if floor <= tail.offset { floor } else { 0 },
            lap_end: capacity,
            generation_due: if generation > 1 { Some(generation as u32) } else { None },
            consumer_gone: false,
            without_consumer: false,
            is_traced: false,
            backed: capacity,
            // SAFETY: the caller guarantees that the page is mapped; `sleep` is a field of it.
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

    /// Continues with a successor of the consumer. `consumer` and `receiver` are the successor's pages; its head must
    /// equal the dead consumer's. Returns how many messages the lane delivers again.
    ///
    /// # Errors
    /// [`LaneError::Corrupt`] if the successor's head differs.
    ///
    /// # Safety
    /// As for [`Producer::attach`], for the new pages. The caller may unmap the old ones afterwards.
    pub unsafe fn attach_consumer(
        &mut self,
        consumer: NonNull<ConsumerPage>,
        receiver: NonNull<ReceiverPage>,
        can_barrier: bool,
    ) -> Result<u64, LaneError> {
        // SAFETY: the caller guarantees that the page is mapped.
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
        // SAFETY: the caller guarantees that the pages are mapped.
        self.waker = unsafe { waker_of(&self.memory, can_barrier) };
        Ok(self.unreleased())
    }

    /// Permits [`Producer::try_reserve_traced`]: the lane's consumers know the mark with a trace position. From now on
    /// the largest message has at most [`traced_message_bytes_limit`], so that an empty lane has space for the mark.
    pub fn permit_traced(&mut self) {
        self.is_traced = true;
        self.bytes_max = self.bytes_max.min(traced_message_bytes_limit(self.capacity));
    }

    /// Whether [`Producer::permit_traced`] was called.
    pub fn is_traced(&self) -> bool {
        self.is_traced
    }

    /// Sets the window: how many bytes of the lane the producer uses while the consumer keeps up. Initially [`WINDOW`],
    /// at most the capacity. Only this producer uses it.
    pub fn set_window(&mut self, bytes: u64) {
        self.window = bytes.min(self.capacity);
        self.limit = 0;
    }

    /// The window, in bytes: see [`Producer::set_window`].
    pub fn window(&self) -> u64 {
        self.window
    }

    /// Sets how many bytes of the data, from its start, the following reservations may use, as if that were the
    /// capacity; initially all. Space that the fast path has already found stays usable.
    pub fn set_bound(&mut self, bytes: u64) {
        self.bound = bytes.min(self.capacity);
    }

    /// Bytes of the lane from the head, as last loaded, to the tail.
    pub fn backlog_bytes(&self) -> u64 {
        let wrapped = if self.tail < self.head.offset { self.lap_end } else { 0 };
        // The head is the consumer's word, checked only for being inside the lane.
        (self.tail + wrapped).saturating_sub(self.head.offset)
    }

    /// Committed bytes including headers, modulo 2^64. The count continues from the page's value, which may be any
    /// number.
    pub fn sent_bytes(&self) -> u64 {
        let page = self.page();
        // Relaxed: only this producer stores them.
        page.bytes.load(Relaxed).wrapping_add(page.messages.load(Relaxed).wrapping_mul(8))
    }

    /// Whether a message of `bytes` at the tail would end after the window.
    pub fn is_past_window(&self, bytes: u64) -> bool {
        self.tail + record_bytes(bytes.min(self.bytes_max)) + 8 > self.window
    }

    /// Moves both sides of an empty lane to its front, without a mark. Only for the owner of both sides, and only if no
    /// other process reads the data. Does nothing if the lane is not empty.
    pub fn rewind(&mut self, consumer: &mut Consumer) {
        if !consumer.rewind(self.tail()) {
            return;
        }
        // Relaxed for each store here: the owner of both sides orders them when it hands the sides to a later consumer.
        self.data().header(0).store(0, Relaxed);
        self.tail = 0;
        self.head = self.tail();
        (self.floor, self.limit, self.lap_end) = (0, 0, self.capacity);
        let page = self.page();
        page.floor.store(0, Relaxed);
        page.tail.store(self.tail().pack(), Relaxed);
    }

    /// Sets how many bytes of the data, from its start, have memory or disk behind them; initially all. A reservation
    /// that needs more fails with [`LaneError::Unbacked`].
    pub fn set_backed(&mut self, bytes: u64) {
        self.backed = bytes.min(self.capacity);
        self.limit = 0;
    }

    /// The bytes with memory or disk behind them: see [`Producer::set_backed`].
    pub fn backed(&self) -> u64 {
        self.backed
    }

    /// Sets where the previous lap ended, which a predecessor has noted before it published the jump to the front. A
    /// producer that attaches while its tail is before the head does not know it, and would not use the space after it.
    pub fn set_lap_end(&mut self, offset: u64) {
        self.lap_end = offset.min(self.capacity);
        self.limit = 0;
    }

    /// Acknowledges that the consumer may have closed, and continues to send for its successor while the lane has
    /// space. Only a later close is [`LaneError::Closed`].
    pub fn continue_without_consumer(&mut self) {
        self.consumer_gone = false;
        self.without_consumer = self.has_consumer_closed();
        self.limit = 0;
    }

    /// Continues in other memory, to which the caller has copied the lane's records: all bytes outside
    /// [`Producer::idle`].
    ///
    /// # Safety
    /// As for [`Producer::attach`]: `data` has the lane's capacity, and no other lane. There is no consumer. The caller
    /// may unmap the old data afterwards.
    pub unsafe fn move_to(&mut self, data: Data) {
        self.memory.data = data;
    }

    /// Whether the consumer has closed, acknowledged or not.
    pub fn has_consumer_closed(&self) -> bool {
        // If the lane was created after the receiver had closed, only the receiver's sleep word shows the close.
        self.consumer_page().is_closed() || self.waker.is_closed()
    }

    #[inline(always)]
    fn page(&self) -> &ProducerPage {
        // SAFETY: `attach`'s caller guarantees that the page is mapped.
        unsafe { self.memory.producer.as_ref() }
    }

    #[inline(always)]
    fn data(&self) -> &Data {
        &self.memory.data
    }

    /// Reserves space for one message of `bytes`; never waits. `None`: the lane is full. A new reservation replaces an
    /// earlier one that was not committed.
    ///
    /// # Errors
    /// [`LaneError::TooLarge`]; [`LaneError::Closed`] if the consumer has closed; [`LaneError::Corrupt`];
    /// [`LaneError::Unbacked`].
    #[inline]
    pub fn try_reserve(&mut self, bytes: u64) -> Result<Option<ReservedSpace>, LaneError> {
        match self.reserve_fast(bytes) {
            Some(space) => Ok(Some(space)),
            None => self.reserve_slow(bytes, 0, None),
        }
    }

    /// The fast path of [`Producer::try_reserve`]: the space is at the tail, below the limit. `None`: call
    /// `try_reserve`. It is separate so that a caller can inline it and keep its values in registers.
    #[inline(always)]
    pub fn reserve_fast(&mut self, bytes: u64) -> Option<ReservedSpace> {
        // Checks `bytes` before any addition, so no sum overflows.
        if bytes <= self.bytes_max && self.tail + record_bytes(bytes) + 8 <= self.limit {
            Some(ReservedSpace { offset: self.tail + 8, bytes })
        } else {
            None
        }
    }

    /// As [`Producer::try_reserve`], for a message that `descriptors` accompany: a mark before it contains their
    /// number. 0: no mark.
    ///
    /// # Errors
    /// As [`Producer::try_reserve`].
    #[cold]
    pub fn try_reserve_with_descriptors(
        &mut self,
        bytes: u64,
        descriptors: u32,
    ) -> Result<Option<ReservedSpace>, LaneError> {
        self.reserve_slow(bytes, descriptors, None)
    }

    /// As [`Producer::try_reserve`], for a message with this position in a trace, in a mark before it.
    ///
    /// # Errors
    /// As [`Producer::try_reserve`].
    ///
    /// # Panics
    /// Without [`Producer::permit_traced`].
    #[cold]
    pub fn try_reserve_traced(
        &mut self,
        bytes: u64,
        trace: &[u8; TRACE_BYTES],
    ) -> Result<Option<ReservedSpace>, LaneError> {
        assert!(self.is_traced);
        self.reserve_slow(bytes, 0, Some(trace))
    }

    #[cold]
    #[inline(never)]
    fn reserve_slow(
        &mut self,
        bytes: u64,
        descriptors: u32,
        trace: Option<&[u8; TRACE_BYTES]>,
    ) -> Result<Option<ReservedSpace>, LaneError> {
        if bytes > self.bytes_max {
            return Err(LaneError::TooLarge { bytes, bytes_max: self.bytes_max });
        }
        if !self.plan_reservation(record_bytes(bytes), descriptors, trace)? {
            return Ok(None);
        }
        Ok(Some(ReservedSpace { offset: self.header_at + 8, bytes }))
    }

    /// Plans records of `records` bytes: sets `header_at`, the marks and the jump. Returns false if the lane is full.
    fn plan_reservation(
        &mut self,
        records: u64,
        descriptors: u32,
        trace: Option<&[u8; TRACE_BYTES]>,
    ) -> Result<bool, LaneError> {
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
        self.trace = trace.copied();
        // Plus the cleared header after the last record, where the next jump may be written.
        let need = self.marks_bytes() + records + 8;
        let Some(start) = self.find_space(need)? else { return Ok(false) };
        // The producer is awake, so the consumer need not ring.
        self.sleeper.disarm();
        self.jump = (start != self.tail).then_some(start);
        self.header_at = start + self.marks_bytes();
        Ok(true)
    }

    /// Bytes of the current reservation's marks, without a jump.
    fn marks_bytes(&self) -> u64 {
        8 * self.mark_count as u64 + if self.trace.is_some() { TRACE_MARK_BYTES } else { 0 }
    }

    /// Returns the offset of `need` contiguous bytes, and sets `limit` for the records after them. `None`: the lane is
    /// full.
    fn find_space(&mut self, need: u64) -> Result<Option<u64>, LaneError> {
        let window = self.window;
        let mut polled = false;
        loop {
            let (tail, head) = (self.tail, self.head.offset);
            let past_window = tail + need > window;
            let end = if tail >= head { self.bound } else { head.min(self.bound) };
            let fits = tail + need <= end;
            // Wrapped records must end before the head, and the head must be on the tail's lap.
            let front = tail >= head && need <= head && head >= self.floor;
            if front && (past_window || !fits) {
                self.limit = 0;
                return self.check_backed(0, need);
            }
            if fits && !past_window {
                self.limit = self.fast_limit(end.min(window).min(tail + need + FAST_PATH_BYTES_MAX));
                return self.check_backed(tail, need);
            }
            // From here the reservation either goes past the window or finds the lane full. Both need the current head.
            if polled {
                if fits {
                    self.limit = self.fast_limit(end.min(tail + need + HEAD_POLL_BYTES));
                    return self.check_backed(tail, need);
                }
                // A jump's target is a multiple of 64. The word at the lap's end holds the jump to the front.
                let after = (self.lap_end + 8).next_multiple_of(64);
                if tail < head && after + need <= self.bound {
                    self.limit = 0;
                    return self.check_backed(after, need);
                }
                return Ok(None);
            }
            self.poll_consumer()?;
            polled = true;
        }
    }

    /// Whether a message of `bytes`, with a generation mark, fits at the tail, inside the window and by the head as
    /// last loaded.
    pub(crate) fn fits_in_window(&self, bytes: u64) -> bool {
        let need = 8 + record_bytes(bytes) + 8;
        let end = if self.tail >= self.head.offset { self.bound } else { self.head.offset.min(self.bound) };
        self.tail + need <= end.min(self.window)
    }

    /// Makes the fast path end at most `bytes` after the tail.
    pub(crate) fn shorten_fast_path(&mut self, bytes: u64) {
        self.limit = self.limit.min(self.tail + bytes);
    }

    /// The sleeper of this producer.
    pub(crate) fn sleeper(&mut self) -> &mut Sleeper {
        &mut self.sleeper
    }

    /// Returns `offset` if `need` bytes there have memory behind them.
    fn check_backed(&mut self, offset: u64, need: u64) -> Result<Option<u64>, LaneError> {
        if offset + need > self.backed {
            self.limit = 0;
            return Err(LaneError::Unbacked { bytes: offset + need });
        }
        self.limit = self.limit.min(self.backed);
        Ok(Some(offset))
    }

    /// The limit of the fast path: 0 while the next message needs a mark with the generation.
    fn fast_limit(&self, limit: u64) -> u64 {
        if self.generation_due.is_some() { 0 } else { limit }
    }

    /// Polls the consumer: fails if it has closed, and loads its head.
    fn poll_consumer(&mut self) -> Result<(), LaneError> {
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
            head.check("head", self.capacity)?;
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
            failpoint("head loaded: depth_max");
        }
        Ok(())
    }

    /// Copies `payload` into the reserved space. It may be shorter than the space.
    #[inline(always)]
    pub fn copy_in(&mut self, space: ReservedSpace, payload: &[u8]) {
        self.copy_in_at(0, space, payload);
    }

    /// As [`Producer::copy_in`], after the first `skip` bytes of the space.
    #[inline(always)]
    pub fn copy_in_at(&mut self, skip: u64, space: ReservedSpace, payload: &[u8]) {
        assert!(skip + payload.len() as u64 <= space.bytes && space.offset + space.bytes <= self.capacity);
        failpoint("copy: before");
        self.data().copy_in(space.offset + skip, payload);
        failpoint("copy: after");
    }

    /// As [`Producer::copy_in`], for a broadcast lane: a consumer that lags may read the space at the same time.
    #[cold]
    #[inline(never)]
    pub(crate) fn copy_in_racing(&mut self, space: ReservedSpace, payload: &[u8]) {
        assert!(payload.len() as u64 <= space.bytes && space.offset + space.bytes <= self.capacity);
        failpoint("copy racing: before");
        self.data().copy_in_racing(space.offset, payload);
        // Under loom, the payload of a consumer that reads in place is in another cell.
        #[cfg(loom)]
        self.data().copy_in(space.offset, payload);
        failpoint("copy racing: after");
    }

    /// The address of the reserved space, for writing in place until commit.
    #[cfg(not(loom))]
    #[inline(always)]
    pub fn payload(&self, space: ReservedSpace) -> NonNull<u8> {
        assert!(space.offset + space.bytes <= self.capacity);
        self.data().payload(space.offset, space.bytes)
    }

    /// Publishes the reserved message with the first `bytes` of its space as its payload. Returns whether to ring the
    /// receiver.
    ///
    /// # Panics
    /// If `bytes` exceeds the reservation, or the space is not this lane's.
    #[inline(always)]
    pub fn commit(&mut self, space: ReservedSpace, bytes: u64) -> Wake {
        if self.publish(space, bytes) { self.check_peer() } else { Wake::None }
    }

    /// As [`Producer::commit`], but returns false if the consumer is awake, the usual case, and otherwise true: then
    /// the caller must call [`Producer::check_peer`].
    ///
    /// # Panics
    /// As [`Producer::commit`].
    #[inline(always)]
    #[must_use = "true: call `check_peer`, or the peer sleeps on, or its end is missed"]
    pub fn publish(&mut self, space: ReservedSpace, bytes: u64) -> bool {
        assert!(bytes <= space.bytes);
        let at = space.offset - 8;
        let end = at + record_bytes(bytes);
        // Fails only for the space of another lane, or of an earlier reservation.
        assert!(end + 8 <= self.capacity);
        if at == self.tail {
            return self.publish_at_tail(self.memory.data, end, bytes);
        }
        self.publish_marked(at, end, header(self.seq, bytes as u32));
        prefetch_ahead(self.memory.data, end, bytes);
        self.advance(end, seq_after(self.seq), 1, bytes)
    }

    /// As [`Producer::publish`], if the space is at the tail. `None` if it is not, or if [`Producer::publish`] would
    /// panic; then nothing is published.
    #[inline(always)]
    #[must_use = "true: call `check_peer`, or the peer sleeps on, or its end is missed"]
    pub fn publish_fast(&mut self, space: ReservedSpace, bytes: u64) -> Option<bool> {
        if space.offset != self.tail + 8 || bytes > space.bytes || bytes > self.bytes_max {
            return None;
        }
        let end = self.tail + record_bytes(bytes);
        (end + 8 <= self.capacity).then(|| self.publish_at_tail(self.memory.data, end, bytes))
    }

    /// Copies a message in and publishes it, in the fast path: as [`Producer::reserve_fast`], [`Producer::copy_in`] and
    /// [`Producer::publish`], but without the checks of a space that may be another lane's. `None`: nothing is sent, it
    /// needs those three.
    #[inline(always)]
    #[must_use = "true: call `check_peer`, or the peer sleeps on, or its end is missed"]
    pub fn send_fast(&mut self, payload: &[u8]) -> Option<bool> {
        let space = self.reserve_fast(payload.len() as u64)?;
        debug_assert!(self.limit <= self.capacity);
        // A copy, which the compiler keeps in a register over the call of `memcpy`.
        let data = self.memory.data;
        failpoint("copy: before");
        data.copy_in(space.offset, payload);
        failpoint("copy: after");
        Some(self.publish_at_tail(data, space.offset - 8 + record_bytes(space.bytes), space.bytes))
    }

    /// Publishes the record from the tail to `end`. The caller has checked that `end + 8 <= capacity`. Returns as
    /// [`Producer::publish`].
    #[inline(always)]
    fn publish_at_tail(&mut self, data: Data, end: u64, bytes: u64) -> bool {
        clear(data, end);
        failpoint("publish: before");
        data.header(self.tail).store(header(self.seq, bytes as u32), PUBLISH.store()); // [publish]
        failpoint("publish: after");
        // After publishing, as the receiver may be waiting for this message.
        prefetch_ahead(data, end, bytes);
        self.advance(end, seq_after(self.seq), 1, bytes)
    }

    /// Publishes a record that ends at `end`, with the marks and the jump before it. It writes the record first, then
    /// its marks. The last store, at the tail, makes all of it visible.
    #[cold]
    #[inline(never)]
    fn publish_marked(&mut self, at: u64, end: u64, word: u64) {
        let start = self.header_at - self.marks_bytes();
        let jump = self.jump.take();
        // Fails only for a space that is not of the current reservation.
        assert!(at == self.header_at && start == jump.unwrap_or(self.tail));
        clear(self.memory.data, end);
        failpoint("marked: before");
        self.data().header(at).store(word, Relaxed);
        failpoint("marked: record");
        let publish_mark = |offset, low| {
            let order = if offset == self.tail { PUBLISH.store() } else { Relaxed };
            self.data().header(offset).store(header(self.seq, low), order); // [publish]
            failpoint("marked: mark");
        };
        if let Some(trace) = &self.trace {
            let offset = at - TRACE_MARK_BYTES;
            self.data().copy_in(offset + 8, trace);
            failpoint("marked: trace");
            publish_mark(offset, mark(MARK_TRACE, TRACE_BYTES as u32));
        }
        for i in (0..self.mark_count).rev() {
            publish_mark(start + 8 * i as u64, self.marks[i]);
        }
        if let Some(target) = jump {
            if target > self.tail {
                // Store the floor before the jump: otherwise a successor could treat the front as free.
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

    /// Moves the tail past the published records. Returns as [`Producer::publish`].
    #[inline(always)]
    fn advance(&mut self, end: u64, next_seq: u32, messages: u32, bytes: u64) -> bool {
        self.seq = next_seq;
        self.tail = end;
        let page = self.page();
        // Relaxed for all three stores. A successor detects this producer's death by a system call, and scans from the
        // tail. The other two are statistics; they continue from the predecessor's values, which may be any number.
        // Only the page holds them: a private copy would add stores per message. Each store occupies a slot of the
        // store buffer until its cache line arrives.
        page.tail.store(Position { offset: end, seq: self.seq }.pack(), Relaxed);
        failpoint("advance: tail");
        page.messages.store(page.messages.load(Relaxed).wrapping_add(messages.into()), Relaxed);
        failpoint("advance: messages");
        page.bytes.store(page.bytes.load(Relaxed).wrapping_add(bytes), Relaxed);
        failpoint("advance: bytes");
        self.waker.must_check()
    }

    /// After [`Producer::publish`]: whether to ring the receiver.
    #[cold]
    #[inline(never)]
    pub fn check_peer(&mut self) -> Wake {
        match self.waker.peer_state() {
            PeerState::Asleep(epoch) => {
                self.waker.count_ring(epoch, self.seq);
                let page = self.page();
                page.wakes_sent.store(page.wakes_sent.load(Relaxed).wrapping_add(1), Relaxed);
                failpoint("producer finds a sleeper: counted");
                Wake::Ring
            }
            PeerState::Closed if self.without_consumer => Wake::None,
            // The next reservation fails with `Closed`.
            PeerState::Closed => {
                self.limit = 0;
                self.consumer_gone = true;
                Wake::None
            }
            PeerState::Rung => Wake::Rung,
            PeerState::Awake => Wake::None,
        }
    }

    /// Begins a batch whose records take up to `records` bytes (the sum of [`record_bytes`]); never waits. `None`: the
    /// lane is full. Dropping the batch aborts it.
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

    /// The fast path of [`Producer::try_begin_batch`], as [`Producer::reserve_fast`] for one message.
    #[inline(always)]
    pub fn begin_batch_fast(&mut self, records: u64) -> Option<Batch> {
        // Checks `records` before any addition, so no sum overflows.
        if records <= record_bytes(self.bytes_max) && self.tail + records + 8 <= self.limit {
            self.header_at = self.tail;
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
        Ok(self.plan_reservation(records, 0, None)?.then(|| self.begin_batch(records)))
    }

    #[inline(always)]
    fn begin_batch(&self, records: u64) -> Batch {
        let (start, seq) = (self.header_at, self.seq);
        Batch { start, end: start, limit: start + records, seq, next_seq: seq, first: 0, bytes: 0 }
    }

    /// The space of the batch's next message; `None` if the rest of the batch is too small.
    ///
    /// # Panics
    /// If the batch is of a larger lane.
    #[inline(always)]
    pub fn batch_message(&self, batch: &mut Batch, bytes: u64) -> Option<ReservedSpace> {
        assert!(batch.limit + 8 <= self.capacity);
        let offset = batch.end;
        // Checks `bytes` before any addition, so no sum overflows.
        if bytes > self.bytes_max || offset + record_bytes(bytes) > batch.limit {
            return None;
        }
        batch.end = offset + record_bytes(bytes);
        batch.bytes += bytes;
        if offset == batch.start {
            batch.first = bytes as u32;
        } else {
            // Relaxed: the store of the batch's first header publishes it. [publish]
            self.data().header(offset).store(header(batch.next_seq, bytes as u32), Relaxed);
            failpoint("batch: header");
        }
        batch.next_seq = seq_after(batch.next_seq);
        prefetch_ahead(self.memory.data, batch.end, bytes);
        Some(ReservedSpace { offset: offset + 8, bytes })
    }

    /// Publishes all messages of the batch by one store. Returns whether to ring the receiver.
    ///
    /// # Panics
    /// If the producer has made another commit or reservation since the batch began.
    #[inline]
    pub fn commit_batch(&mut self, batch: Batch) -> Wake {
        if batch.end == batch.start {
            return Wake::None;
        }
        assert!((batch.start, batch.seq) == (self.header_at, self.seq) && batch.end + 8 <= self.capacity);
        let word = header(self.seq, batch.first);
        if self.header_at == self.tail {
            clear(self.memory.data, batch.end);
            failpoint("publish a batch: before");
            self.data().header(self.tail).store(word, PUBLISH.store()); // [publish]
            failpoint("publish a batch: after");
        } else {
            self.publish_marked(self.header_at, batch.end, word);
        }
        let messages = Position { offset: batch.end, seq: batch.next_seq }.since(self.tail());
        let must_check = self.advance(batch.end, batch.next_seq, messages as u32, batch.bytes);
        if must_check { self.check_peer() } else { Wake::None }
    }

    /// Announces a sleep until the lane has space for a message of `bytes`, or, for `None`, until it is empty. Returns
    /// whether to sleep; false: the condition already holds. `barrier` as for [`Sleeper::arm`]; it does not run while
    /// the consumer fences.
    ///
    /// # Errors
    /// [`LaneError::Closed`] and [`LaneError::Corrupt`]: do not sleep.
    pub fn arm(&mut self, bytes: Option<u64>, barrier: impl FnOnce()) -> Result<bool, LaneError> {
        self.poll_consumer()?;
        // The consumer rings once it has released half of the unreleased messages. With an earlier target it would ring
        // for each message; with a later one the producer would start late. An empty lane always satisfies the rule.
        let depth = self.unreleased();
        let wanted = if bytes.is_some() { depth.div_ceil(2) } else { depth };
        let mut target = self.head.seq.wrapping_add(wanted as u32);
        if target < self.head.seq {
            target = seq_after(target); // the numbers skip 0
        }
        failpoint("room_seq: before");
        self.page().room_seq.store(target.into(), Relaxed); // the barrier below orders it [sleep]
        failpoint("room_seq: after");
        // SAFETY: `attach`'s caller guarantees that the page is mapped.
        let consumer = unsafe { self.memory.consumer.as_ref() };
        self.sleeper.arm(|| {
            if !consumer.is_fenced() {
                barrier();
            }
        });
        let polled = self.poll_consumer();
        let ready = polled.is_err()
            || match bytes {
                Some(bytes) => self.has_space(bytes),
                None => self.unreleased() == 0,
            };
        if ready {
            self.sleeper.disarm();
        } else {
            let page = self.page();
            page.sleeps.store(page.sleeps.load(Relaxed).wrapping_add(1), Relaxed);
            failpoint("producer arms: counted");
        }
        polled.map(|()| !ready)
    }

    /// Counts a send that found no free space and will wait.
    pub fn count_wait(&self) {
        let page = self.page();
        page.waits.store(page.waits.load(Relaxed).wrapping_add(1), Relaxed);
        failpoint("producer waits: counted");
    }

    /// Whether the lane has space for a message of `bytes` and its marks. If only the message without marks fits, this
    /// returns false. No wake-up is lost: the consumer rings at a release, and an empty lane has space for both.
    pub(crate) fn has_space(&mut self, bytes: u64) -> bool {
        let marks = if self.is_traced { 16 + TRACE_MARK_BYTES } else { 16 };
        let found = self.find_space(marks + record_bytes(bytes.min(self.bytes_max)) + 8);
        // The reservation reports `Unbacked`.
        matches!(found, Ok(Some(_)) | Err(LaneError::Unbacked { .. }))
    }

    /// Ends the announced sleep.
    pub fn disarm(&mut self) {
        self.sleeper.disarm();
    }

    /// Whether a sleep is announced.
    pub fn is_armed(&self) -> bool {
        self.sleeper.is_armed()
    }

    /// Whether a sleep needs a time-out of a millisecond, because the consumer does not fence yet and may miss the
    /// sleep.
    pub fn needs_timed_wait(&self) -> bool {
        // SAFETY: `attach`'s caller guarantees that the page is mapped.
        self.sleeper.needs_fenced_wakers() && !unsafe { self.memory.consumer.as_ref() }.is_fenced()
    }

    /// Requires the consumer to fence, because the kernel has refused `membarrier`: see [`Sleeper::request_fencing`].
    pub fn request_fencing(&mut self) {
        self.sleeper.request_fencing();
    }

    /// Messages committed and not released, by the head as last loaded. [`Producer::refresh_head`] loads it.
    #[inline]
    pub fn unreleased(&self) -> u64 {
        self.tail().since(self.head)
    }

    /// Whether the head has moved since the last load: a cheap hint for a spinning caller.
    #[inline(always)]
    pub fn may_be_ready(&self) -> bool {
        // Relaxed: the caller's next operation loads it again.
        self.consumer_page().head.load(Relaxed) != self.head.pack()
    }

    /// Loads the head, even if the consumer has closed. Returns the number of unreleased messages.
    ///
    /// # Errors
    /// [`LaneError::Corrupt`].
    pub fn refresh_head(&mut self) -> Result<u64, LaneError> {
        self.load_head()?;
        Ok(self.unreleased())
    }

    /// Whether the consumer has closed, and [`Producer::continue_without_consumer`] has not acknowledged it.
    pub fn has_unacknowledged_close(&self) -> bool {
        !self.without_consumer && self.consumer_page().is_closed()
    }

    /// The position of the next record.
    pub fn tail(&self) -> Position {
        Position { offset: self.tail, seq: self.seq }
    }

    /// The consumer's head as last loaded.
    pub fn head(&self) -> Position {
        self.head
    }

    /// Returns the ranges of the data that contain no record. The producer does not write them before the tail arrives
    /// there, so the caller can return their memory to the system. Two ranges of `(offset, bytes)`; either may be
    /// empty. The head is the consumer's word: a hostile consumer can make the ranges too small.
    pub fn idle(&self) -> [(u64, u64); 2] {
        let (tail, head) = (self.tail + 8, self.head.offset);
        if self.tail >= head {
            let front = if head >= self.floor { head } else { 0 };
            [(0, front), (tail, self.capacity - tail)]
        } else {
            let after = (self.lap_end + 8).min(self.capacity);
            [(tail, head.saturating_sub(tail)), (after, self.capacity - after)]
        }
    }

    /// The largest message.
    #[inline]
    pub fn message_bytes_max(&self) -> u64 {
        self.bytes_max
    }

    /// The largest message of the lane, as its next consumer has to know it. [`Producer::message_bytes_max`] may be
    /// lower.
    pub fn lane_message_bytes_max(&self) -> u64 {
        self.lane_bytes_max
    }

    /// Bytes of data.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// The consumer's page.
    pub fn consumer_page(&self) -> &ConsumerPage {
        // SAFETY: `attach`'s caller guarantees that the page is mapped.
        unsafe { self.memory.consumer.as_ref() }
    }

    /// The producer's own page.
    pub fn producer_page(&self) -> &ProducerPage {
        self.page()
    }

    /// Call this before a ring of the receiver: notes the processor of this thread, if known, and the time on the
    /// monotonic clock, as hints for the receiver's next wait.
    pub fn note_ring(&self, processor: Option<u32>, at_ns: u64) {
        self.page().last_ring.note(processor, at_ns);
    }

    /// Closes the producer for good. The caller must ring the receiver afterwards.
    pub fn close(&mut self) {
        failpoint("producer closes: before");
        self.page().state.store(State::Closed as u32, CLOSE.store()); // [close]
        failpoint("producer closes: state");
        self.sleeper.close();
    }
}

/// After a record that ends at `end`: prefetches the cache lines for the next one of that size.
#[inline(always)]
fn prefetch_ahead(data: Data, end: u64, bytes: u64) {
    let from = end + PREFETCH_AHEAD;
    let to = from + record_bytes(bytes);
    if bytes < SHARED_LINE_BYTES {
        // The record before has prefetched the line up to here.
        let last = from | 63;
        if last < to {
            data.prefetch_to_write(last + 1, to);
        }
    } else if bytes <= PREFETCH_BYTES_MAX {
        // Up to the line's end: the steps begin anywhere in a line.
        data.prefetch_to_write(from, to | 63);
    }
}

/// Clears the header after the last record, before the record is published.
#[inline(always)]
fn clear(data: Data, end: u64) {
    #[cfg(loom)]
    if crate::edges::weakened("clear") {
        return;
    }
    // Relaxed: the later release store, which publishes the record, orders it. [publish]
    failpoint("clear: before");
    data.header(end).store(0, Relaxed);
    failpoint("clear: after");
}

/// # Safety
/// All pages of `memory` are mapped.
unsafe fn waker_of(memory: &Memory, can_barrier: bool) -> Waker {
    // SAFETY: the caller guarantees that the pages are mapped; both words are fields of them.
    unsafe {
        Waker::new(
            field(memory.receiver, |p| &raw mut (*p).sleep),
            field(memory.producer, |p| &raw mut (*p).fenced),
            can_barrier,
        )
    }
}
