//! What calls need of a sender: a header before each payload, and the parts of waiting for room.

use super::{LOOK_AFTER, Room, Sender, Want};
use crate::error::{Error, Result};
use crate::transport::SharedLiveness;
use crate::wait::{Patience, Side};
use pelton_lane::{ReservedSpace, Wake};

/// Bytes of a header, which is three words.
const HEADER_BYTES: usize = size_of::<[u64; 3]>();

impl Sender {
    /// Writes a message of a header and a payload, if there is room now.
    #[inline(always)]
    pub(crate) fn try_write(&mut self, header: [u64; 3], payload: &[u8]) -> Result<bool> {
        if self.write_at_once(header, payload) {
            return Ok(true);
        }
        let Some(space) = self.find_space(payload.len() + HEADER_BYTES, Patience::None)? else { return Ok(false) };
        self.write_there(space, header, payload);
        Ok(true)
    }

    /// The common case of [`Sender::try_write`]: there is room at the tail. False: ask that.
    #[inline(always)]
    pub(crate) fn write_at_once(&mut self, header: [u64; 3], payload: &[u8]) -> bool {
        let Some(space) = self.room_at_once(payload.len()) else { return false };
        self.write_there(space, header, payload);
        true
    }

    #[inline(always)]
    fn write_there(&mut self, space: ReservedSpace, header: [u64; 3], payload: &[u8]) {
        self.parts.lane.copy_in_at(HEADER_BYTES as u64, space, payload);
        self.write_header(space, header);
        self.publish_message(space, payload.len() + HEADER_BYTES);
    }

    /// Room for a header and `bytes` to be written in place, if there is now.
    #[inline(always)]
    pub(crate) fn try_room(&mut self, bytes: usize) -> Result<Option<ReservedSpace>> {
        match self.room_at_once(bytes) {
            Some(space) => Ok(Some(space)),
            None => self.find_space(bytes.saturating_add(HEADER_BYTES), Patience::None),
        }
    }

    /// The common case of [`Sender::try_room`]. `None`: ask that.
    #[inline(always)]
    pub(crate) fn room_at_once(&mut self, bytes: usize) -> Option<ReservedSpace> {
        if !self.owner.is_current() {
            return None;
        }
        self.parts.lane.reserve_fast(bytes.saturating_add(HEADER_BYTES) as u64)
    }

    /// What is to be written behind the header.
    #[inline(always)]
    pub(crate) fn room(&mut self, space: ReservedSpace) -> &mut [u8] {
        let target = self.parts.lane.payload(space).as_ptr();
        // SAFETY: so many bytes are reserved there, for this sender, none fewer than a header's; shared memory is initialised, and the
        // borrow keeps it from being published meanwhile.
        unsafe { std::slice::from_raw_parts_mut(target.add(HEADER_BYTES), space.bytes as usize - HEADER_BYTES) }
    }

    /// The same, to look at.
    #[inline(always)]
    pub(crate) fn room_read(&self, space: ReservedSpace) -> &[u8] {
        let target = self.parts.lane.payload(space).as_ptr();
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(target.add(HEADER_BYTES), space.bytes as usize - HEADER_BYTES) }
    }

    /// Publishes room with the first `bytes` of what was written there.
    #[inline(always)]
    pub(crate) fn publish_room(&mut self, space: ReservedSpace, header: [u64; 3], bytes: usize) -> Result<()> {
        if self.owner.is_forked() {
            return Err(Error::Forked);
        }
        let most = space.bytes as usize - HEADER_BYTES;
        if bytes > most {
            return Err(Error::TooLarge { bytes: bytes as u64, bytes_max: most as u64 });
        }
        self.write_header(space, header);
        self.publish_message(space, bytes + HEADER_BYTES);
        Ok(())
    }

    /// As [`Sender::publish`], but does not look whether the receiver is alive because it sleeps: that of a call is told by the other
    /// lane, and who is rung in vain is looked at with the next message.
    #[inline(always)]
    fn publish_message(&mut self, space: ReservedSpace, bytes: usize) {
        match self.parts.lane.commit(space, bytes as u64) {
            Wake::None if !self.parts.lane.tail().seq.is_multiple_of(LOOK_AFTER) => {}
            Wake::Ring => self.parts.link.ring_peer(),
            wake => self.after_publishing(wake),
        }
    }

    #[inline(always)]
    fn write_header(&mut self, space: ReservedSpace, header: [u64; 3]) {
        let target = self.parts.lane.payload(space).cast::<u64>();
        // SAFETY: at least so many bytes are reserved there; a payload begins at a multiple of 8.
        header.into_iter().enumerate().for_each(|(place, word)| unsafe { target.add(place).write(word) });
    }

    /// Announces a wait for room for a header and `bytes`, without draining the bells: false if there is room.
    pub(crate) fn arm_for_room(&mut self, bytes: usize) -> Result<bool> {
        if !self.owner.is_current() {
            return Err(self.not_usable());
        }
        Room { sender: self, want: Want::Message((bytes + HEADER_BYTES) as u64, 0) }.arm()
    }

    /// Whether a wait for room is announced still: to find some takes that back.
    #[inline(always)]
    pub(crate) fn is_armed(&self) -> bool {
        self.parts.lane.is_armed()
    }

    /// Whether a wait for room may last only a millisecond.
    pub(crate) fn needs_timed_wait(&self) -> bool {
        self.parts.lane.needs_timed_wait()
    }

    /// Whether there may be room by now.
    pub(crate) fn may_be_ready(&self) -> bool {
        self.parts.lane.may_be_ready()
    }

    /// Whether the receiver has closed on purpose.
    pub(crate) fn has_receiver_closed(&self) -> bool {
        self.parts.lane.has_consumer_closed()
    }

    pub(crate) fn shared_liveness(&self) -> Option<SharedLiveness> {
        self.parts.link.shared_liveness()
    }
}
