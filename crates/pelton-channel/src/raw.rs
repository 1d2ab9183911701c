//! The lower interface of both endpoints: what calls, flush, the C library, the Tokio types and the bridge use, and
//! nothing else does. Values instead of borrows, one record at a time. Not stable, and no part of the documented
//! interface.
//!
//! - A sender: [`Sender::reserve_fast`] or [`Sender::reserve_space`], then the payload, then [`Sender::commit_space`];
//!   a space that is not committed is aborted.
//! - A receiver: [`Receiver::peek_fast`] or [`Receiver::find`], then the payload, then [`Receiver::release_record`].
//!   Between the two the receiver is used for nothing else.
//! - A subscriber: [`Subscriber::try_receive`], [`Delivery::keep`], then [`Subscriber::kept_delivery`], whose drop
//!   releases it. Between the two the subscriber is used for nothing else.
//! - `*_before_check` of either endpoint does that in the common case. If it says so, [`Sender::check_receiver`] or
//!   [`Receiver::check_sender`] comes next: without it, a peer that sleeps would sleep on.
//! - Chunks of a receiver: [`Receiver::take_chunk`], then [`Receiver::release_chunks`].
//! - Copies of many messages, which are released one by one: [`Receiver::read_ahead`], [`Receiver::release_ahead`].
//! - Waiting: `arm`, [`Sender::arm_for_space`], and the trait [`crate::wait::Side`].

pub use crate::connect::{Connecting, Duplex, RETRY, connect_duplex, start_duplex, start_duplex_later};
pub use crate::doorbells::Doorbells;
use crate::endpoint::Departure;
pub use crate::error::failure;
use crate::error::{Error, Result};
pub use crate::gather::{gather, gather_with};
pub use crate::handshake::Replies;
use crate::lane_id::LaneId;
use crate::lanes::Lane;
pub use crate::lanes::{Polls, ReplyLane};
pub use crate::memory::{Budget, Kept, LINK_BYTES_MIN, Share};
pub use crate::name::Name;
pub use crate::opening::{Waiter, in_call};
pub use crate::packet::TRACED_REQUESTS;
pub use crate::receiver::{Ahead, Item};
use crate::receiver::{Batch, Held, Message, Receiver};
use crate::sender::{FreeSpace, Sender, WaitCondition};
pub use crate::settings::{HANDSHAKE_TIMEOUT, Settings};
#[cfg(doc)]
use crate::subscriber::{Delivery, Subscriber};
use crate::traceparent::Traceparent;
pub use crate::transport::SharedLiveness;
use crate::wait::Deadline;
pub use crate::wait::{BUSY_POLL, Polled, Side, Spin, busy_poll, wait};
pub use pelton_lane::{COPY_INLINE_MAX, LastRing, Record, ReservedSpace, append, copy};
use pelton_lane::{Chunk, Wake};
use pelton_os::Peer;
use std::ptr::NonNull;
use std::sync::Arc;

#[doc(hidden)]
impl Sender {
    /// Sends in the common case: the handle is in use, and there is space at the tail. Returns false in any other.
    #[inline(always)]
    pub fn send_fast(&mut self, payload: &[u8]) -> bool {
        let sent = self.send_before_check(payload);
        if sent == Some(true) {
            self.check_receiver();
        }
        sent.is_some()
    }

    /// As [`Sender::send_fast`], but only returns whether [`Sender::check_receiver`] is due; `None`: nothing is sent.
    /// Does not panic.
    #[inline(always)]
    #[must_use = "true: call `check_receiver`, or the receiver sleeps on, or its end is missed"]
    pub fn send_before_check(&mut self, payload: &[u8]) -> Option<bool> {
        if !self.endpoint.owner.is_current() {
            return None;
        }
        let must_check = self.parts.lane.send_fast(payload)?;
        Some(self.must_check_receiver(must_check))
    }

    /// As [`Sender::commit_space`], if the space is at the tail, but only returns whether [`Sender::check_receiver`] is
    /// due; `None`: nothing is sent. Does not panic.
    ///
    /// # Safety
    /// As for [`Sender::commit_space`].
    #[inline(always)]
    #[must_use = "true: call `check_receiver`, or the receiver sleeps on, or its end is missed"]
    pub unsafe fn commit_before_check(&mut self, space: ReservedSpace, bytes: usize) -> Option<bool> {
        if self.endpoint.owner.is_forked() {
            return None;
        }
        let must_check = self.parts.lane.publish_fast(space, bytes as u64)?;
        Some(self.must_check_receiver(must_check))
    }

    /// Reserves space in the common case: the handle is in use, and there is space at the tail.
    #[inline(always)]
    pub fn reserve_fast(&mut self, bytes: usize) -> Option<ReservedSpace> {
        if !self.endpoint.owner.is_current() {
            return None;
        }
        self.parts.lane.reserve_fast(bytes as u64)
    }

    /// Reserves space, waiting for it as long as `deadline` states.
    ///
    /// # Errors
    /// As [`Sender::send`].
    pub fn reserve_space(&mut self, bytes: usize, deadline: Deadline) -> Result<Option<ReservedSpace>> {
        self.find_space(bytes, deadline)
    }

    /// As [`Sender::reserve_space`], for a message with a traceparent: see [`Sender::send_traced`].
    ///
    /// # Errors
    /// As [`Sender::send`].
    pub fn reserve_traced_space(
        &mut self,
        bytes: usize,
        traceparent: Traceparent,
        deadline: Deadline,
    ) -> Result<Option<ReservedSpace>> {
        self.find_traced_space(bytes, traceparent, deadline)
    }

    /// Where the payload of a reserved space begins. `space.bytes` bytes may be written there until the commit.
    #[inline(always)]
    pub fn payload(&self, space: ReservedSpace) -> NonNull<u8> {
        self.parts.lane.payload(space)
    }

    /// Copies `bytes` into a reserved space, from `offset` on.
    #[inline(always)]
    pub fn copy_in_at(&mut self, offset: usize, space: ReservedSpace, bytes: &[u8]) {
        self.parts.lane.copy_in_at(offset as u64, space, bytes);
    }

    /// Publishes the first `bytes` of a reserved space. Returns false if it has fewer, or in a forked child: then
    /// nothing is sent.
    ///
    /// # Safety
    /// `space` was reserved last of this sender, and is committed once.
    #[inline(always)]
    pub unsafe fn commit_space(&mut self, space: ReservedSpace, bytes: usize) -> bool {
        let fits = bytes as u64 <= space.bytes && !self.endpoint.owner.is_forked();
        if fits {
            self.publish(space, bytes);
        }
        fits
    }

    /// As [`Sender::commit_space`] of what fits, but does not check whether the receiver is alive when the receiver
    /// sleeps: the other lane of a link reports its end.
    #[inline(always)]
    pub fn commit_unchecked(&mut self, space: ReservedSpace, bytes: usize) {
        let must_check = self.parts.lane.publish(space, bytes as u64);
        if !self.must_check_receiver(must_check) {
            return;
        }
        match self.parts.lane.check_peer() {
            Wake::Ring => {
                let lane = &self.parts.lane;
                self.parts.link.wake_peer(|processor, at| lane.note_ring(processor, at));
            }
            Wake::None if !self.is_liveness_due() => {}
            wake => self.after_publishing(wake),
        }
    }

    /// Announces a wait for space for `bytes`, without draining the doorbells. Returns false if there is space.
    ///
    /// # Errors
    /// As [`Sender::arm`].
    pub fn arm_for_space(&mut self, bytes: usize) -> Result<bool> {
        if !self.endpoint.owner.is_current() {
            return Err(self.not_usable());
        }
        FreeSpace { sender: self, want: WaitCondition::Message(bytes as u64, 0) }.arm()
    }

    /// Whether a wait for space is still announced: a reservation that succeeds ends it.
    #[inline(always)]
    pub fn is_armed(&self) -> bool {
        self.parts.lane.is_armed()
    }

    /// Whether a wait for space needs a bound of a millisecond.
    pub fn needs_timed_wait(&self) -> bool {
        self.parts.lane.needs_timed_wait()
    }

    /// Whether there may be space by now: a hint, by one load.
    pub fn may_be_ready(&self) -> bool {
        self.parts.lane.may_be_ready()
    }

    /// The receiver's last ring, for space.
    pub fn last_ring(&self) -> LastRing {
        self.parts.lane.consumer_page().last_ring()
    }

    /// Whether the receiver has closed on purpose.
    pub fn has_receiver_closed(&self) -> bool {
        self.parts.lane.has_consumer_closed()
    }

    /// The handle that proves the receiver's end, for a thread that waits while another uses the sender.
    pub fn shared_liveness(&self) -> Option<SharedLiveness> {
        self.parts.link.shared_liveness()
    }

    /// The doorbells that wake this sender.
    pub fn doorbells(&self) -> &Doorbells {
        &self.endpoint.doorbells
    }

    /// Whether this process is a fork of the one that made the handle.
    pub fn is_forked(&self) -> bool {
        self.endpoint.owner.is_forked()
    }

    /// Whether a message of `bytes` would extend beyond the part of the lane that this sender fills before a flush.
    pub fn is_past_window(&self, bytes: usize) -> bool {
        self.parts.lane.is_past_window(bytes as u64)
    }
}

#[doc(hidden)]
impl Sender {
    /// The lane's identity, the same after a restart of either side; by path without the part that its receiver adds
    /// for the boot.
    pub fn lane_id(&self) -> LaneId {
        LaneId(self.parts.memory.data.identity())
    }

    /// The number of the lane's senders so far.
    pub fn generation(&self) -> u64 {
        self.parts.lane.producer_page().generation()
    }
}

#[doc(hidden)]
impl Receiver {
    /// The next record in the common case: the handle is in use, a message is at the cursor of a lane that is not
    /// paused, nothing is held, and the receiver does not sleep.
    #[inline(always)]
    pub fn peek_fast(&mut self) -> Option<Record> {
        if self.is_usual() { self.lanes.current.consumer.peek_fast() } else { None }
    }

    /// Polls for a record for less than a microsecond, where the next one comes from the same lane.
    #[inline(always)]
    pub fn peek_soon(&mut self) -> Option<Record> {
        if self.slow_path_reasons == 0 && self.comes_soon() { self.peek_fast() } else { None }
    }

    /// As [`Receiver::peek_fast`], for a lane that is not paused and whose sender has not left. Also returns the first
    /// three words of the payload, each loaded once.
    #[inline(always)]
    pub fn peek_words_fast(&mut self) -> Option<(Record, [u64; 3])> {
        let record = self.peek_fast()?;
        let lane = &self.lanes.current;
        if lane.end.is_some() || lane.is_paused {
            return None;
        }
        self.words(&record).map(|words| (record, words))
    }

    /// The next record or membership event, waiting for it as long as `deadline` states. It stays the next until
    /// [`Receiver::release_record`] or [`Receiver::pass_event`].
    ///
    /// # Errors
    /// As [`Receiver::receive`].
    #[inline(always)]
    pub fn find(&mut self, deadline: Deadline) -> Result<Option<Item>> {
        match self.peek_fast() {
            Some(record) if !self.lanes.current.is_stalled() => Ok(Some(Item::Record(record))),
            _ => self.find_slow(deadline),
        }
    }

    /// A record's payload: where it begins, and its bytes. It stays readable until the record is released.
    #[inline(always)]
    pub fn payload(&self, record: &Record) -> (NonNull<u8>, usize) {
        (self.lanes.current.consumer.payload(record), record.bytes as usize)
    }

    /// The first three words of a record's payload, each loaded once; `None` if it is shorter.
    #[inline(always)]
    pub fn words(&self, record: &Record) -> Option<[u64; 3]> {
        if record.bytes < size_of::<[u64; 3]>() as u64 {
            return None;
        }
        let payload = self.lanes.current.consumer.payload(record).cast::<u64>();
        // SAFETY: the lane checked that so many bytes lie in the data; a payload begins at a multiple of 8.
        Some(std::array::from_fn(|index| unsafe { payload.add(index).read_volatile() }))
    }

    /// Copies `N` bytes of a record's payload, from offset `at` on; `None` if it is shorter.
    pub fn copy<const N: usize>(&self, record: &Record, at: usize) -> Option<[u8; N]> {
        if record.bytes < (at + N) as u64 {
            return None;
        }
        let mut bytes = [0; N];
        let payload = self.lanes.current.consumer.payload(record);
        // SAFETY: the lane checked that so many bytes lie in the data. A peer that writes meanwhile changes bytes, for
        // which any value is valid.
        unsafe { payload.add(at).copy_to_nonoverlapping(std::ptr::NonNull::from(&mut bytes).cast(), N) };
        Some(bytes)
    }

    /// Appends a record's payload, without its first `skip` bytes, to `buffer`.
    #[inline(always)]
    pub fn append(&self, record: &Record, skip: usize, buffer: &mut Vec<u8>) {
        let bytes = record.bytes as usize - skip;
        buffer.reserve(bytes);
        // SAFETY: the lane checked that the record lies in the data; the vector has the space, and is not in a lane. A
        // peer that writes meanwhile changes bytes, for which any value is valid.
        unsafe {
            let target = buffer.as_mut_ptr().add(buffer.len());
            self.lanes.current.consumer.copy_out_from(skip as u64, record, target);
            buffer.set_len(buffer.len() + bytes);
        }
    }

    /// Copies the next message out and releases it, in the common case of [`Receiver::peek_fast`]. `target` returns
    /// where to copy so many bytes to. Returns how many, and whether [`Receiver::check_sender`] is due; `None`: nothing
    /// is taken, also if `target` returned none. Panics only if `target` does.
    ///
    /// # Safety
    /// `target` has space for so many bytes, and is not in a lane.
    #[inline(always)]
    #[must_use = "true: call `check_sender`, or the sender sleeps on, or other lanes wait"]
    pub unsafe fn copy_before_check(
        &mut self,
        target: impl FnOnce(usize) -> Option<NonNull<u8>>,
    ) -> Option<(usize, bool)> {
        if !self.is_usual() {
            return None;
        }
        // SAFETY: the caller guarantees the target.
        let received = unsafe { self.lanes.current.consumer.receive_fast(|bytes| target(bytes as usize)) };
        received.map(|(record, must_check)| (record.bytes as usize, self.must_check_sender(record.seq, must_check)))
    }

    /// As [`Receiver::release_record`], in the process that created the handle and in the common case, but only returns
    /// whether [`Receiver::check_sender`] is due; `None`: nothing is released. Does not panic.
    #[inline(always)]
    #[must_use = "true: call `check_sender`, or the sender sleeps on, or other lanes wait"]
    pub fn release_before_check(&mut self, record: &Record) -> Option<bool> {
        if record.descriptors != 0 {
            return None;
        }
        let must_check = self.lanes.current.consumer.release_fast(record)?;
        Some(self.must_check_sender(record.seq, must_check))
    }

    /// Releases the next record, in the process that created the handle. Takes the record by reference. To move it
    /// right after narrow stores would need a wide load, which the store buffer cannot forward: the processor stalls.
    #[inline(always)]
    pub fn release_record(&mut self, record: &Record) {
        self.release(record);
    }

    /// The next record as a message.
    #[inline(always)]
    pub fn message(&mut self, record: Record) -> Message<'_> {
        self.found = record;
        Message { receiver: self }
    }

    /// Marks the membership event that [`Receiver::find`] returned as delivered.
    #[cold]
    pub fn pass_event(&mut self) {
        self.pass();
    }

    /// Takes one more message, or the first, of a batch, after `with` has read it; [`Receiver::release_batch`] releases
    /// the batch. Returns false without a message, at the end of the lane's quantum, and for a message with
    /// descriptors, which the caller must receive alone.
    ///
    /// # Errors
    /// As [`Receiver::try_receive`].
    #[inline]
    pub fn take_for_batch(&mut self, is_first: bool, with: impl FnOnce(&Message<'_>)) -> Result<bool> {
        if self.endpoint.owner.is_forked() {
            return Err(Error::Forked);
        }
        if self.is_quantum_over && !is_first {
            return Ok(false);
        }
        let record = match self.lanes.current.consumer.peek() {
            Ok(Some(record)) if record.descriptors == 0 => record,
            Ok(_) => return Ok(false),
            Err(error) => return self.failed_in_batch(error).map(|()| false),
        };
        with(&std::mem::ManuallyDrop::new(self.message(record)));
        self.lanes.current.consumer.take(&record);
        self.count_to_quantum(record.seq);
        Ok(true)
    }

    /// Releases the messages that [`Receiver::take_for_batch`] has taken.
    pub fn release_batch(&mut self) {
        drop(Batch::new(self));
    }

    /// Whether this process is a fork of the one that made the handle.
    pub fn is_forked(&self) -> bool {
        self.endpoint.owner.is_forked()
    }

    /// Whether a message waits, as far as that is visible without taking it: a hint.
    pub fn has_messages(&self) -> bool {
        self.lanes.may_be_ready()
    }

    /// The next record or membership event, as [`Receiver::find`] without a wait, of the lanes that `polls` includes.
    ///
    /// # Errors
    /// As [`Receiver::receive`].
    #[inline(always)]
    pub fn find_now(&mut self, polls: Polls) -> Result<Option<Item>> {
        match self.peek_fast() {
            Some(record) if !self.lanes.current.is_stalled() => Ok(Some(Item::Record(record))),
            _ => self.peek(polls),
        }
    }

    /// The limit of the memory for all senders, if there is one.
    pub fn budget(&self) -> Option<Arc<Budget>> {
        self.registry.as_ref().and_then(|registry| registry.budget())
    }

    /// The doorbells that wake this receiver.
    pub fn doorbells(&self) -> &Doorbells {
        &self.endpoint.doorbells
    }

    /// The number of the current lane.
    pub fn lane(&self) -> u32 {
        self.lanes.current.number
    }

    /// The index that the user of this receiver keeps with the current lane.
    #[inline(always)]
    pub fn lane_user(&self) -> usize {
        self.lanes.current.user
    }

    /// Hands out the reply lane to each sender that has joined since the last call, with the number of its lane;
    /// `adopt` returns the index to keep.
    pub fn adopt_replies(&mut self, mut adopt: impl FnMut(ReplyLane, u32) -> usize) {
        for lane in self.lanes.iter_mut() {
            if let Some(reply) = lane.reply.take() {
                lane.user = adopt(*reply, lane.number);
            }
        }
    }

    /// Pauses a lane, or resumes it: nothing is received from a paused lane whose sender is there.
    pub fn set_paused(&mut self, number: u32, is_paused: bool) {
        if let Some(lane) = self.lanes.find(number) {
            lane.is_paused = is_paused;
        }
    }

    /// Accepts no more senders; the name becomes free.
    pub fn stop_listening(&mut self) {
        if let Some(registry) = &mut self.registry {
            registry.stop_listening(&self.endpoint.doorbells);
        }
    }

    /// Whether the current lane's sender is known to be gone.
    pub fn is_sender_gone(&self) -> bool {
        self.lanes.current.end.is_some()
    }

    /// The current lane's sender has violated the rules that this receiver's user sets for records: it leaves, and
    /// nothing more is received from it.
    pub fn end_lane(&mut self) {
        self.lanes.current.end = Some(Departure::Corrupt);
        // Otherwise the fast path would continue with it.
        self.end_quantum();
    }

    /// Ends receiving: the caller receives nothing more.
    pub fn retire(&mut self) {
        self.endpoint.owner.retire();
    }

    /// The current lane's page of this side, for a test to damage it.
    pub fn consumer_page(&self) -> NonNull<u8> {
        self.lanes.current.memory.consumer.base()
    }

    /// The descriptors that report the sender's end when they are polled.
    pub fn liveness(&self) -> [Option<std::os::fd::BorrowedFd<'_>>; 2] {
        self.lanes.current.link.liveness()
    }
}

#[doc(hidden)]
impl Message<'_> {
    /// The record.
    pub fn record(&self) -> Record {
        self.receiver.found
    }

    /// Where the bytes are: makes no slice of memory that another process can write.
    #[inline(always)]
    pub fn raw_parts(&self) -> (NonNull<u8>, usize) {
        self.receiver.payload(&self.receiver.found)
    }

    /// As [`Receiver::append`].
    #[inline(always)]
    pub fn append_to(&self, skip: usize, buffer: &mut Vec<u8>) {
        self.receiver.append(&self.receiver.found, skip, buffer);
    }
}

#[doc(hidden)]
impl Held {
    /// Whether this process is a fork of the one that made the handle.
    pub fn is_forked(&self) -> bool {
        self.returned.owner.is_forked()
    }
}

/// A chunk of records that was taken from a receiver.
#[derive(Clone, Copy, Debug)]
pub struct TakenChunk {
    /// Number of the lane.
    pub lane: u32,
    /// Identity of the lane.
    pub id: LaneId,
    /// The sender.
    pub peer: Option<Peer>,
    /// The records.
    pub chunk: Chunk,
    /// In the lane's data.
    start: NonNull<u8>,
    /// A quarter of the lane: its sender may need the space soon.
    quarter: u64,
}

// SAFETY: the pointer is into shared memory, which belongs to no thread.
unsafe impl Send for TakenChunk {}

impl TakenChunk {
    fn new(lane: &Lane, chunk: Chunk) -> TakenChunk {
        let (start, quarter) = (lane.consumer.chunk_bytes(&chunk).cast(), lane.consumer.capacity() / 4);
        TakenChunk { lane: lane.number, id: lane.id, peer: lane.link.peer(), chunk, start, quarter }
    }

    /// Appends a chunk that was taken later. Returns false if it does not follow directly.
    pub fn join(&mut self, next: &TakenChunk) -> bool {
        self.lane == next.lane && self.peer == next.peer && self.chunk.join(&next.chunk)
    }

    /// Bytes of its lane.
    pub fn capacity(&self) -> u64 {
        4 * self.quarter
    }

    /// Whether its sender may need the space soon.
    pub fn is_large(&self) -> bool {
        self.chunk.bytes >= self.quarter
    }
}

#[doc(hidden)]
impl Receiver {
    /// Takes about `bytes` of records of the current lane, or of the next lane that has any. `None`: no lane has any.
    /// Does not take records up to the number that `last_written` returns, but releases them immediately.
    ///
    /// # Errors
    /// As [`Receiver::try_receive`].
    pub fn take_chunk(
        &mut self,
        bytes: u64,
        last_written: impl Fn(LaneId) -> Option<u32>,
    ) -> Result<Option<TakenChunk>> {
        while let Some(item) = self.peek(Polls::All)? {
            let Item::Record(record) = item else {
                self.pass();
                continue;
            };
            let Some(taken) = self.take_here(record, bytes, &last_written) else { continue };
            if self.many {
                self.end_quantum();
            }
            return Ok(Some(taken));
        }
        Ok(None)
    }

    /// Takes the current lane's next record and those that follow. Releases a record that is written already.
    fn take_here(
        &mut self,
        record: Record,
        bytes: u64,
        last_written: impl Fn(LaneId) -> Option<u32>,
    ) -> Option<TakenChunk> {
        let lane = &mut *self.lanes.current;
        if !lane.is_compared {
            // Limit of the messages in a lane.
            let most = (lane.consumer.capacity() / 8) as u32;
            let is_written = |last: u32| last.wrapping_sub(record.seq) < most;
            if lane.id != LaneId::NONE && last_written(lane.id).is_some_and(is_written) {
                self.release(&record);
                return None;
            }
            lane.is_compared = true;
        }
        if record.descriptors != 0 {
            // A sink takes bytes only.
            let _ = self.receive_descriptors(record.seq, record.descriptors);
        }
        let lane = &mut *self.lanes.current;
        let chunk = lane.consumer.take_chunk(&record, bytes);
        Some(TakenChunk::new(lane, chunk))
    }

    /// The number of each lane, also of senders that have just joined, and the number after its last message.
    ///
    /// # Errors
    /// As [`Receiver::try_receive`].
    pub fn ends_of_lanes(&mut self) -> Result<Vec<(u32, u32)>> {
        if !self.endpoint.owner.is_current() {
            return Err(self.not_usable());
        }
        self.find_lanes()?;
        let end = |lane: &Lane| (lane.number, lane.consumer.producer_page().tail_and_floor().0.seq);
        Ok(self.lanes.iter().map(end).collect())
    }

    /// As [`Receiver::take_chunk`], but only from lane `number`, and only records before message `end`.
    ///
    /// # Errors
    /// As [`Receiver::try_receive`].
    pub fn take_chunk_before(
        &mut self,
        (number, end): (u32, u32),
        bytes: u64,
        last_written: impl Fn(LaneId) -> Option<u32>,
    ) -> Result<Option<TakenChunk>> {
        if !self.lanes.turn_to(number) {
            return Ok(None);
        }
        loop {
            let record = match self.lanes.current.consumer.peek() {
                Ok(Some(record)) => record,
                Ok(None) => return Ok(None),
                // The lane's next quantum reports it.
                Err(error) => return self.failed_in_batch(error).map(|()| None),
            };
            // A sender that states a wrong end and continues to send must not prevent this from returning.
            if end.wrapping_sub(record.seq).wrapping_sub(1) >= (self.lanes.current.consumer.capacity() / 8) as u32 {
                return Ok(None);
            }
            if let Some(taken) = self.take_here(record, bytes, &last_written) {
                return Ok(Some(taken));
            }
        }
    }

    /// Takes all records of the lane of `sender`. That sender belongs to this process, and its lane is rewound after
    /// the flush.
    ///
    /// # Errors
    /// As [`Receiver::try_receive`].
    pub fn take_all_of(&mut self, sender: &Sender) -> Result<Option<TakenChunk>> {
        if self.registry.as_ref().is_some_and(|registry| registry.may_be_ready()) {
            self.find_lanes()?;
        }
        let Some(lane) = self.lanes.find(sender.parts.link.lane_number()) else { return Ok(None) };
        let Some(first) = lane.consumer.peek()? else { return Ok(None) };
        let chunk = lane.consumer.take_chunk_to(&first, sender.parts.lane.tail());
        Ok(Some(TakenChunk::new(lane, chunk)))
    }

    /// Call this once everything in the lane of `sender` is released: moves both sides back to the front of the lane.
    pub fn rewind(&mut self, sender: &mut Sender) {
        if let Some(lane) = self.lanes.find(sender.parts.link.lane_number()) {
            sender.parts.lane.rewind(&mut lane.consumer);
        }
    }

    /// Whether all senders are gone, and only taken records remain.
    pub fn have_all_gone(&self) -> bool {
        self.registry.as_ref().is_some_and(|registry| registry.is_shut())
            && self.lanes.iter().all(|lane| lane.end.is_some())
    }

    /// The bytes of a chunk that was taken from this receiver and is not released.
    pub fn bytes_of<'a>(&'a self, taken: &'a TakenChunk) -> &'a [u8] {
        // SAFETY: the lane checked that the records lie in its data, and keeps them until they are released, for which
        // this receiver is borrowed mutably. A peer that writes meanwhile changes bytes, for which any value is valid.
        unsafe { std::slice::from_raw_parts(taken.start.as_ptr(), taken.chunk.bytes as usize) }
    }

    /// Releases all chunks.
    pub fn release_chunks(&mut self) {
        for lane in self.lanes.iter_mut() {
            if lane.consumer.has_taken() && lane.consumer.release_taken() == Wake::Ring {
                lane.wake_sender();
            }
        }
    }

    /// Whether a sender has announced a wait for space that taken chunks occupy.
    pub fn is_space_wanted(&mut self) -> bool {
        self.lanes.iter_mut().any(|lane| lane.consumer.has_taken() && lane.consumer.is_producer_waiting())
    }

    /// The end of the channel as an error, if it has ended and nothing is left.
    ///
    /// # Errors
    /// As [`Receiver::try_receive`].
    pub fn check_end(&mut self) -> Result<()> {
        self.peek(Polls::All).map(|_| ())
    }

    /// Waits until there is a message, as long as `deadline` states.
    ///
    /// # Errors
    /// As [`Receiver::receive`].
    #[cold]
    #[inline(never)]
    pub fn wait_for_message(&mut self, deadline: Deadline) -> Result<()> {
        self.find_record(deadline).map(|_| ())
    }
}
