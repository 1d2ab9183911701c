//! Receiving for bindings, whose languages know no borrows: what is received is kept beside the receiver, as long as that is used
//! for nothing else. No part of the documented interface.

use super::{Batch, Held, Message, Receiver};
use crate::error::{Error, Result};
use pelton_lane::Record;
use std::ptr::NonNull;

/// A message without its borrow of the receiver: see [`Message::into_raw`].
#[doc(hidden)]
#[derive(Debug)]
pub struct RawMessage(Record);

impl Receiver {
    /// The next message in the common case: there at once. For bindings, which keep every other case out of the way.
    #[doc(hidden)]
    #[inline(always)]
    pub fn receive_at_once(&mut self) -> Option<Message<'_>> {
        let record = self.peek_at_once()?;
        Some(Message { receiver: self, record })
    }

    /// As [`Receiver::receive_at_once`], for a message that is on its way: looks some times, which takes less than a
    /// microsecond.
    #[doc(hidden)]
    #[inline(always)]
    pub fn receive_soon(&mut self) -> Option<Message<'_>> {
        let record = self.peek_soon()?;
        Some(Message { receiver: self, record })
    }

    /// Copies the next message out and releases it in the common case: there at once, or, if it `may_look_again`, on its way, and
    /// not larger than `capacity`. For bindings.
    ///
    /// # Safety
    /// `capacity` bytes can be written at `target`, which is not in a lane.
    #[doc(hidden)]
    #[inline(always)]
    pub unsafe fn copy_at_once(&mut self, target: *mut u8, capacity: usize, may_look_again: bool) -> Option<usize> {
        let record = match self.peek_at_once() {
            Some(record) => record,
            None if may_look_again => self.peek_soon()?,
            None => return None,
        };
        if record.bytes > capacity as u64 {
            return None;
        }
        // SAFETY: the caller's promise.
        unsafe { self.lanes.current.consumer.copy_out(&record, target) };
        self.release(&record);
        Some(record.bytes as usize)
    }

    /// Releases the message that [`Message::into_raw`] took from its borrow, from where it is kept: moved whole, its words
    /// would be loaded by pairs just after they were stored one by one, which makes a processor wait. For bindings.
    ///
    /// # Safety
    /// As for [`Receiver::message_from_raw`]; it is released once.
    #[doc(hidden)]
    #[inline(always)]
    pub unsafe fn release_raw(&mut self, raw: &RawMessage) {
        if !self.owner.is_forked() {
            self.release(&raw.0);
        }
    }

    /// The message again that [`Message::into_raw`] took from its borrow. For bindings.
    ///
    /// # Safety
    /// It was this receiver's, which was not used since.
    #[doc(hidden)]
    #[inline(always)]
    pub unsafe fn message_from_raw(&mut self, raw: RawMessage) -> Message<'_> {
        Message { receiver: self, record: raw.0 }
    }

    /// Takes one more message, or the first, of a batch that [`Receiver::release_batch`] releases, after `look` has seen it. False:
    /// none is there now, or one that came with descriptors, which is to be received alone, or the lane's turn has ended, where
    /// there are several. For bindings.
    #[doc(hidden)]
    #[inline]
    pub fn take_for_batch(&mut self, is_first: bool, look: impl FnOnce(&Message<'_>)) -> Result<bool> {
        if self.owner.is_forked() {
            return Err(Error::Forked);
        }
        if self.turn_over && !is_first {
            return Ok(false);
        }
        let record = match self.lanes.current.consumer.peek() {
            Ok(Some(record)) if record.descriptors == 0 => record,
            Ok(_) => return Ok(false),
            Err(error) => return self.failed_in_batch(error).map(|()| false),
        };
        look(&std::mem::ManuallyDrop::new(Message { receiver: self, record }));
        self.lanes.current.consumer.take(&record);
        self.count_to_turn(&record);
        Ok(true)
    }

    /// Releases what [`Receiver::take_for_batch`] has taken. For bindings.
    #[doc(hidden)]
    pub fn release_batch(&mut self) {
        drop(Batch::new(self));
    }

    /// Whether this process is a fork of the one that made the handle. For bindings.
    #[doc(hidden)]
    pub fn is_forked(&self) -> bool {
        self.owner.is_forked()
    }
}

impl Message<'_> {
    /// The message without its borrow, not released: for bindings, whose languages know no borrows.
    /// [`Receiver::message_from_raw`] takes it back.
    #[doc(hidden)]
    #[inline(always)]
    pub fn into_raw(self) -> RawMessage {
        RawMessage(std::mem::ManuallyDrop::new(self).record)
    }

    /// Where the bytes are, for bindings: a slice of what another process can write is made only where it is wanted.
    #[doc(hidden)]
    #[inline(always)]
    pub fn raw_parts(&self) -> (NonNull<u8>, usize) {
        (self.receiver.lanes.current.consumer.payload(&self.record), self.record.bytes as usize)
    }
}

impl Held {
    /// Whether this process is a fork of the one that made the handle. For bindings.
    #[doc(hidden)]
    pub fn is_forked(&self) -> bool {
        self.returned.owner.is_forked()
    }
}
