//! Reserved space in the lane, for one message or for a batch.

use super::Sender;
use crate::error::{Error, Result};
use pelton_lane::{Batch, ReservedSpace};
use std::ops::{Deref, DerefMut};

/// Space in the lane for one message, to be written in place. Dropping it aborts: nothing is sent.
#[must_use = "dropping it aborts: nothing is sent"]
pub struct Reservation<'a> {
    pub(super) sender: &'a mut Sender,
    pub(super) space: ReservedSpace,
}

impl Reservation<'_> {
    /// Publishes the whole space as the message. Does not wait.
    ///
    /// # Errors
    /// [`Error::Forked`]. If the channel has ended, the next call returns that.
    pub fn commit(self) -> Result<()> {
        let bytes = self.space.bytes as usize;
        self.commit_bytes(bytes)
    }

    /// Publishes the first `bytes` of the space as the message.
    ///
    /// # Errors
    /// [`Error::TooLarge`] when `bytes` is more than was reserved, [`Error::Forked`]; nothing is sent then. If the
    /// channel has ended, the next call returns that.
    pub fn commit_bytes(self, bytes: usize) -> Result<()> {
        if bytes as u64 > self.space.bytes {
            return Err(Error::TooLarge { bytes: bytes as u64, bytes_max: self.space.bytes });
        }
        if self.sender.endpoint.owner.is_forked() {
            return Err(Error::Forked);
        }
        self.sender.publish(self.space, bytes);
        Ok(())
    }

    /// Releases the space. Dropping does the same.
    pub fn abort(self) {}
}

impl Deref for Reservation<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        let at = self.sender.parts.lane.payload(self.space);
        // SAFETY: the space is reserved for this sender and lies in the data. Shared memory is initialised, and the
        // borrow keeps the reservation.
        unsafe { std::slice::from_raw_parts(at.as_ptr(), self.space.bytes as usize) }
    }
}

impl DerefMut for Reservation<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        let at = self.sender.parts.lane.payload(self.space);
        // SAFETY: the space is reserved for this sender, lies in the data, and only this sender writes there. Shared
        // memory is initialised, and the unique borrow keeps the reservation.
        unsafe { std::slice::from_raw_parts_mut(at.as_ptr(), self.space.bytes as usize) }
    }
}

impl AsRef<[u8]> for Reservation<'_> {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl std::fmt::Debug for Reservation<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reservation").field("bytes", &self.len()).finish_non_exhaustive()
    }
}

/// Space in the lane for several messages. The receiver gets all of them or none. Dropping it aborts: nothing is sent.
#[must_use = "dropping it aborts: nothing is sent"]
pub struct BatchReservation<'a> {
    pub(super) sender: &'a mut Sender,
    pub(super) batch: Batch,
}

impl BatchReservation<'_> {
    /// Reserves the batch's space for its next message. Returns `None` when the space is used up.
    #[inline(always)]
    pub fn reserve(&mut self, bytes: usize) -> Option<&mut [u8]> {
        let space = self.next(bytes)?;
        // SAFETY: the space is reserved for this sender, lies in the data, and shared memory is initialised. The
        // mutable borrow ends before the next call.
        Some(unsafe { std::slice::from_raw_parts_mut(self.sender.parts.lane.payload(space).as_ptr(), bytes) })
    }

    #[inline(always)]
    fn next(&mut self, bytes: usize) -> Option<ReservedSpace> {
        match self.sender.endpoint.owner.is_forked() {
            true => None,
            false => self.sender.parts.lane.batch_message(&mut self.batch, bytes as u64),
        }
    }

    /// Copies the batch's next message. Returns false, and copies nothing, when the batch's space is used up.
    #[must_use = "a message that did not fit is still yours"]
    #[inline(always)]
    pub fn push(&mut self, payload: &[u8]) -> bool {
        match self.next(payload.len()) {
            Some(space) => {
                self.sender.parts.lane.copy_in(space, payload);
                true
            }
            None => false,
        }
    }

    /// Publishes the messages. Does not wait.
    ///
    /// # Errors
    /// [`Error::Forked`]. If the channel has ended, the next call returns that.
    #[inline(always)]
    pub fn commit(self) -> Result<()> {
        let BatchReservation { sender, batch } = self;
        if sender.endpoint.owner.is_forked() {
            return Err(Error::Forked);
        }
        sender.publish_batch(batch);
        Ok(())
    }
}

impl std::fmt::Debug for BatchReservation<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BatchReservation").finish_non_exhaustive()
    }
}
