//! What calls need of a receiver: records before they are messages, and the lane that they came by.

use super::{Message, Receiver};
use crate::call::{Back, Desk};
use crate::error::Result;
use crate::sender::End;
use pelton_lane::Record;
use std::sync::Arc;

impl Message<'_> {
    /// As [`Receiver::append`].
    #[inline(always)]
    pub(crate) fn append_to(&self, skip: usize, buffer: &mut Vec<u8>) {
        self.receiver.append(&self.record, skip, buffer);
    }
}

impl Receiver {
    /// The next record, which stays the next until it is released; not of a lane that is stalled. Does not wait.
    #[inline(always)]
    pub(crate) fn next_record(&mut self) -> Result<Option<Record>> {
        match self.peek_at_once() {
            Some(record) if !self.lanes.current.is_stalled() => Ok(Some(record)),
            _ => self.peek(),
        }
    }

    /// The common case of [`Receiver::next_record`]: a message stands at the cursor of a lane that is neither stalled nor has ended. Its
    /// header too, each word loaded once. `None`: ask [`Receiver::next_record`].
    #[inline(always)]
    pub(crate) fn record_at_once(&mut self) -> Option<(Record, [u64; 3])> {
        let record = self.peek_at_once()?;
        let lane = &self.lanes.current;
        if lane.end.is_some() || lane.back.as_ref().is_some_and(|back| back.caller.is_stalled()) {
            return None;
        }
        self.header(&record).map(|header| (record, header))
    }

    /// As [`Receiver::next_record`], for one that is on its way: looks some times, which takes less than a microsecond.
    #[inline(always)]
    pub(crate) fn record_comes_soon(&mut self) -> bool {
        self.comes_soon()
    }

    /// The words of a record's header, each loaded once; `None` if it is shorter.
    #[inline(always)]
    pub(crate) fn header(&self, record: &Record) -> Option<[u64; 3]> {
        if record.bytes < size_of::<[u64; 3]>() as u64 {
            return None;
        }
        let payload = self.lanes.current.consumer.payload(record).cast::<u64>();
        // SAFETY: the lane checked that so many bytes lie in the data; a payload begins at a multiple of 8.
        Some(std::array::from_fn(|place| unsafe { payload.add(place).read_volatile() }))
    }

    /// Copies what follows the first `skip` bytes of a record behind what is in `buffer`.
    #[inline(always)]
    pub(crate) fn append(&self, record: &Record, skip: usize, buffer: &mut Vec<u8>) {
        let bytes = record.bytes as usize - skip;
        buffer.reserve(bytes);
        // SAFETY: the lane checked that the record lies in the data; the vector has room, and is not in a lane. A peer that
        // writes meanwhile changes bytes, which any value is good for.
        unsafe {
            let target = buffer.as_mut_ptr().add(buffer.len());
            self.lanes.current.consumer.copy_out_from(skip as u64, record, target);
            buffer.set_len(buffer.len() + bytes);
        }
    }

    /// Has had the next record.
    #[inline(always)]
    pub(crate) fn release_record(&mut self, record: &Record) {
        self.release(record);
    }

    /// The next record as a message, to be read in place.
    #[inline(always)]
    pub(crate) fn message(&mut self, record: Record) -> Message<'_> {
        Message { receiver: self, record }
    }

    /// Whom the current lane's records are answered to.
    #[inline(always)]
    pub(crate) fn back(&mut self) -> Option<&mut Back> {
        self.lanes.current.back.as_mut()
    }

    /// Whom the records of all lanes are answered to.
    pub(crate) fn backs(&self) -> impl Iterator<Item = &Back> {
        self.lanes.iter().filter_map(|lane| lane.back.as_ref())
    }

    /// Lets nobody in any more; its name is free.
    pub(crate) fn stop_listening(&mut self) {
        if let Some(gate) = &mut self.gate {
            gate.stop_listening(&self.bells);
        }
    }

    /// Whether the current lane's sender is known to have gone.
    pub(crate) fn is_sender_gone(&self) -> bool {
        self.lanes.current.end.is_some()
    }

    /// The current lane's sender has broken the rules of what its records say: it leaves, and nothing more of it is received.
    pub(crate) fn end_lane(&mut self) {
        self.lanes.current.end = Some(End::Corrupt);
        // Lest the common way go on with it.
        self.end_turn();
    }

    /// Nothing more is to be received of the one lane: what was said by it cannot be.
    pub(crate) fn retire(&mut self) {
        self.owner.retire();
    }

    /// The current lane's page of this side's, for a test to damage it.
    #[cfg(test)]
    pub(crate) fn consumer_page(&self) -> std::ptr::NonNull<u8> {
        self.lanes.current.memory.consumer.base()
    }

    pub(crate) fn is_forked_here(&self) -> bool {
        self.owner.is_forked()
    }

    /// Of a service's.
    pub(crate) fn desk(&self) -> Option<Arc<Desk>> {
        self.gate.as_ref().and_then(|gate| gate.desk())
    }
}
