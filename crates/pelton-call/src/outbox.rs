//! Records with headers into one lane: in order, and in memory while the lane has no space for them.

use super::frame::{HEADER_BYTES, Header, Outgoing, Pieces};
use pelton_channel::Deadline;
use pelton_channel::Sender;
use pelton_channel::raw::Kept;
use pelton_channel::{Error, Result};
use pelton_lane::ReservedSpace;
use std::collections::VecDeque;

/// A sender of records that begin with a header of three words.
pub(crate) trait FrameSender {
    /// Writes a record of a header and a payload, if there is space now.
    fn try_write(&mut self, header: [u64; 3], payload: &[u8]) -> Result<bool>;
    /// The fast path of [`FrameSender::try_write`]: there is space at the tail. Returns false in any other case.
    fn write_fast(&mut self, header: [u64; 3], payload: &[u8]) -> bool;
    /// Reserves space for a header and a body of `bytes`, if there is some now.
    fn try_reserve_body(&mut self, bytes: usize) -> Result<Option<ReservedSpace>>;
    /// The fast path of [`FrameSender::try_reserve_body`].
    fn reserve_body_fast(&mut self, bytes: usize) -> Option<ReservedSpace>;
    /// The body in a reserved space.
    fn body(&self, space: ReservedSpace) -> &[u8];
    /// The body in a reserved space, to be written.
    fn body_mut(&mut self, space: ReservedSpace) -> &mut [u8];
    /// Publishes a reserved space with the first `bytes` of its body.
    fn publish_body(&mut self, space: ReservedSpace, header: [u64; 3], bytes: usize) -> Result<()>;
    /// Announces a wait for space for a header and a body of `bytes`. Returns false if there is space.
    fn arm_for_body(&mut self, bytes: usize) -> Result<bool>;
}

#[inline(always)]
fn write_header(sender: &mut Sender, space: ReservedSpace, header: [u64; 3]) {
    let target = sender.payload(space).cast::<u64>();
    // SAFETY: this trait reserves at least the bytes of a header, and the lane places each payload at a multiple of 8.
    header.into_iter().enumerate().for_each(|(index, word)| unsafe { target.add(index).write(word) });
}

#[inline(always)]
fn write_record(sender: &mut Sender, space: ReservedSpace, header: [u64; 3], payload: &[u8]) {
    sender.copy_in_at(HEADER_BYTES, space, payload);
    write_header(sender, space, header);
    sender.commit_unchecked(space, payload.len() + HEADER_BYTES);
}

impl FrameSender for Sender {
    #[inline(always)]
    fn try_write(&mut self, header: [u64; 3], payload: &[u8]) -> Result<bool> {
        if self.write_fast(header, payload) {
            return Ok(true);
        }
        let Some(space) = self.reserve_space(payload.len() + HEADER_BYTES, Deadline::Now)? else { return Ok(false) };
        write_record(self, space, header, payload);
        Ok(true)
    }

    #[inline(always)]
    fn write_fast(&mut self, header: [u64; 3], payload: &[u8]) -> bool {
        let Some(space) = self.reserve_body_fast(payload.len()) else { return false };
        write_record(self, space, header, payload);
        true
    }

    #[inline(always)]
    fn try_reserve_body(&mut self, bytes: usize) -> Result<Option<ReservedSpace>> {
        match self.reserve_body_fast(bytes) {
            Some(space) => Ok(Some(space)),
            None => self.reserve_space(bytes.saturating_add(HEADER_BYTES), Deadline::Now),
        }
    }

    #[inline(always)]
    fn reserve_body_fast(&mut self, bytes: usize) -> Option<ReservedSpace> {
        self.reserve_fast(bytes.saturating_add(HEADER_BYTES))
    }

    #[inline(always)]
    fn body(&self, space: ReservedSpace) -> &[u8] {
        let target = self.payload(space).as_ptr();
        // SAFETY: this sender has reserved `space.bytes` bytes there, at least a header's. Shared memory is
        // initialised, and to publish the space would need a unique borrow of the sender.
        unsafe { std::slice::from_raw_parts(target.add(HEADER_BYTES), space.bytes as usize - HEADER_BYTES) }
    }

    #[inline(always)]
    fn body_mut(&mut self, space: ReservedSpace) -> &mut [u8] {
        let target = self.payload(space).as_ptr();
        // SAFETY: as in `body`. Only this sender writes into its reserved space, and it is borrowed uniquely.
        unsafe { std::slice::from_raw_parts_mut(target.add(HEADER_BYTES), space.bytes as usize - HEADER_BYTES) }
    }

    #[inline(always)]
    fn publish_body(&mut self, space: ReservedSpace, header: [u64; 3], bytes: usize) -> Result<()> {
        if self.is_forked() {
            return Err(Error::Forked);
        }
        let most = space.bytes as usize - HEADER_BYTES;
        if bytes > most {
            return Err(Error::TooLarge { bytes: bytes as u64, bytes_max: most as u64 });
        }
        write_header(self, space, header);
        self.commit_unchecked(space, bytes + HEADER_BYTES);
        Ok(())
    }

    fn arm_for_body(&mut self, bytes: usize) -> Result<bool> {
        self.arm_for_space(bytes + HEADER_BYTES)
    }
}

/// A sender, and the messages that wait for space in its lane.
#[derive(Debug)]
pub(crate) struct Outbox {
    pub(crate) sender: Sender,
    queue: VecDeque<Outgoing>,
}

impl Outbox {
    pub(crate) fn new(sender: Sender) -> Outbox {
        Outbox { sender, queue: VecDeque::new() }
    }

    /// Whether no message waits for space.
    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether a message goes into the lane as one record.
    #[inline(always)]
    pub(crate) fn is_whole(&self, bytes: usize) -> bool {
        bytes as u64 + HEADER_BYTES as u64 <= self.sender.message_bytes_max()
    }

    /// Writes a message that fits one record, if there is space now and no message waits before it.
    #[inline(always)]
    pub(crate) fn try_write(&mut self, header: Header, payload: &[u8]) -> Result<bool> {
        Ok(self.queue.is_empty() && self.sender.try_write(header.words(), payload)?)
    }

    /// Queues a message; [`Outbox::flush`] writes it.
    pub(crate) fn push(&mut self, header: Header, payload: &[u8]) {
        self.push_all(Outgoing::new(header, payload.to_vec(), None));
    }

    /// Queues a message that is counted in a memory budget; [`Outbox::flush`] writes it.
    pub(crate) fn push_all(&mut self, message: Outgoing) {
        self.queue.push_back(message);
    }

    /// Writes what there is space for of a message, if no other waits before it, and queues a copy of the rest. After
    /// an error nothing is queued: nobody reads the lane any more, or nothing was written.
    pub(crate) fn write_or_queue(&mut self, header: Header, payload: &[u8], kept: Option<Kept>) -> Result<()> {
        let mut pieces = Pieces::new(header, payload);
        let most = self.sender.message_bytes_max();
        while self.queue.is_empty() {
            let bytes = pieces.next_bytes(most);
            let (words, piece) = pieces.next(bytes);
            match self.sender.try_write(words, piece) {
                Ok(true) if pieces.advance(bytes) => return Ok(()),
                Ok(true) => {}
                Ok(false) => break,
                // What has begun must end: the next flush tries again.
                Err(Error::System { .. }) if pieces.is_begun() => break,
                Err(error) => return Err(error),
            }
        }
        self.queue.push_back(Outgoing::of_rest(&pieces, kept));
        Ok(())
    }

    /// Writes as much as there is space for. Returns whether the queue is empty.
    pub(crate) fn flush(&mut self) -> Result<bool> {
        let most = self.sender.message_bytes_max();
        while let Some(first) = self.queue.front_mut() {
            let rest = first.rest();
            let bytes = rest.next_bytes(most);
            let (words, piece) = rest.next(bytes);
            if !self.sender.try_write(words, piece)? {
                return Ok(false);
            }
            if first.advance(bytes) {
                self.queue.pop_front();
            }
        }
        Ok(true)
    }

    /// The size of the payload of the next record in the queue.
    pub(crate) fn next_bytes(&self) -> usize {
        self.queue.front().map_or(0, |first| first.rest().next_bytes(self.sender.message_bytes_max()))
    }

    /// Drops the queue: the peer has left.
    pub(crate) fn clear(&mut self) {
        self.queue.clear();
    }
}
