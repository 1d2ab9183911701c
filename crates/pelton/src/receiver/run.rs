//! Runs of messages, as the bytes they are: what a flush takes of a receiver.

use super::{Kind, Receiver};
use crate::error::Result;
use crate::flush::LaneId;
use crate::lanes::Lane;
use crate::sender::Sender;
use crate::wait::Patience;
use pelton_lane::{Chunk, Record, Wake};
use pelton_os::Peer;
use std::ptr::NonNull;

/// A run that has been taken: of which lane, and whose messages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    pub(crate) lane: u32,
    pub(crate) id: LaneId,
    pub(crate) peer: Option<Peer>,
    pub(crate) run: Chunk,
    /// In the lane's data.
    start: NonNull<u8>,
    /// So much of the lane makes its sender want room before long.
    plenty: u64,
}

// SAFETY: the pointer is into shared memory, which is no thread's own.
unsafe impl Send for Taken {}

impl Taken {
    fn new(lane: &Lane, run: Chunk) -> Taken {
        let (start, plenty) = (lane.consumer.chunk_bytes(&run).cast(), lane.consumer.capacity() / 4);
        Taken { lane: lane.number, id: lane.id, peer: lane.link.peer(), run, start, plenty }
    }

    /// Adds what was taken later. False: it does not stand right behind this.
    pub(crate) fn join(&mut self, next: &Taken) -> bool {
        self.lane == next.lane && self.peer == next.peer && self.run.join(&next.run)
    }

    /// Bytes of its lane.
    pub(crate) fn capacity(&self) -> u64 {
        4 * self.plenty
    }

    /// Whether its sender may want room before long.
    pub(crate) fn is_plenty(&self) -> bool {
        self.run.bytes >= self.plenty
    }
}

impl Receiver {
    /// Takes messages of the lane whose turn it is, or of the next one that has any, about `bytes` of them. `None`: nothing is
    /// there. They are released by [`Receiver::release_runs`]. What came up to the message that `last` answers is not taken, but
    /// released at once.
    pub(crate) fn take_run(&mut self, bytes: u64, last: impl Fn(LaneId) -> Option<u32>) -> Result<Option<Taken>> {
        while let Some(record) = self.peek()? {
            if Kind::told_by(&record).is_some() {
                self.pass();
                continue;
            }
            let Some(taken) = self.take_here(record, bytes, &last) else { continue };
            if self.many {
                self.end_turn();
            }
            return Ok(Some(taken));
        }
        Ok(None)
    }

    /// Takes the current lane's next message, and what follows it; unless it is an old one, which is released.
    fn take_here(&mut self, record: Record, bytes: u64, last: impl Fn(LaneId) -> Option<u32>) -> Option<Taken> {
        let lane = &mut *self.lanes.current;
        if !lane.is_compared {
            // A lane has no more messages than this.
            let most = (lane.consumer.capacity() / 8) as u32;
            if lane.id != LaneId::NONE && last(lane.id).is_some_and(|last| last.wrapping_sub(record.seq) < most) {
                self.release(&record);
                return None;
            }
            lane.is_compared = true;
        }
        if record.descriptors != 0 {
            // They do not go where the bytes go.
            let _ = self.receive_descriptors(record.seq, record.descriptors);
        }
        let lane = &mut *self.lanes.current;
        let run = lane.consumer.take_chunk(&record, bytes);
        Some(Taken::new(lane, run))
    }

    /// Which lanes there are now, also of senders that have just come, and behind which message each one's last is.
    pub(crate) fn ends_of_lanes(&mut self) -> Result<Vec<(u32, u32)>> {
        if !self.owner.is_current() {
            return Err(self.not_usable());
        }
        self.find_lanes()?;
        let end = |lane: &Lane| (lane.number, lane.consumer.producer_page().tail_and_floor().0.seq);
        Ok(self.lanes.iter().map(end).collect())
    }

    /// As [`Receiver::take_run`], of that lane alone, and only what came before message `end`.
    pub(crate) fn take_run_before(
        &mut self,
        (number, end): (u32, u32),
        bytes: u64,
        last: impl Fn(LaneId) -> Option<u32>,
    ) -> Result<Option<Taken>> {
        if !self.lanes.turn_to(number) {
            return Ok(None);
        }
        loop {
            let record = match self.lanes.current.consumer.peek() {
                Ok(Some(record)) => record,
                Ok(None) => return Ok(None),
                // Its next turn tells so.
                Err(error) => return self.failed_in_batch(error).map(|()| None),
            };
            // Also a sender that says what is not so, and goes on sending, keeps nobody here for long.
            if end.wrapping_sub(record.seq).wrapping_sub(1) >= (self.lanes.current.consumer.capacity() / 8) as u32 {
                return Ok(None);
            }
            if let Some(taken) = self.take_here(record, bytes, &last) {
                return Ok(Some(taken));
            }
        }
    }

    /// As [`Receiver::take_run`], all there is of a sender's lane, by that sender: one that has everything flushed before it goes
    /// back to the front.
    pub(crate) fn take_run_of(&mut self, sender: &Sender) -> Result<Option<Taken>> {
        if self.gate.as_ref().is_some_and(|gate| gate.may_be_ready()) {
            self.find_lanes()?;
        }
        let Some(lane) = self.lanes.find(sender.lane()) else { return Ok(None) };
        let Some(first) = lane.consumer.peek()? else { return Ok(None) };
        let run = lane.consumer.take_chunk_to(&first, sender.tail());
        Ok(Some(Taken::new(lane, run)))
    }

    /// What a sender's lane had is released: it begins at its front again.
    pub(crate) fn rewind(&mut self, sender: &mut Sender) {
        if let Some(lane) = self.lanes.find(sender.lane()) {
            sender.rewind(&mut lane.consumer);
        }
    }

    /// Whether all senders have gone, and what is left is what is taken.
    pub(crate) fn have_all_gone(&self) -> bool {
        self.gate.as_ref().is_some_and(|gate| gate.is_shut()) && self.lanes.iter().all(|lane| lane.end.is_some())
    }

    /// The bytes of a run that was taken of this receiver and is not released yet.
    pub(crate) fn bytes_of<'a>(&'a self, taken: &'a Taken) -> &'a [u8] {
        // SAFETY: the lane checked that the records lie in its data, and stays with it until they are released, for which this
        // receiver is wanted mutably. A peer that writes meanwhile changes bytes, which any value is good for.
        unsafe { std::slice::from_raw_parts(taken.start.as_ptr(), taken.run.bytes as usize) }
    }

    /// Releases all that was taken.
    pub(crate) fn release_runs(&mut self) {
        for lane in self.lanes.iter_mut() {
            if lane.consumer.has_taken() && lane.consumer.release_taken() == Wake::Ring {
                lane.link.ring_peer();
            }
        }
    }

    /// Whether a sender waits for room that is taken, as far as it has said so.
    pub(crate) fn is_room_wanted(&mut self) -> bool {
        self.lanes.iter_mut().any(|lane| lane.consumer.has_taken() && lane.consumer.is_producer_waiting())
    }

    /// The end of the channel, if that has come and nothing is there.
    pub(crate) fn tell_end(&mut self) -> Result<()> {
        self.peek().map(|_| ())
    }

    /// Until there is something to take, as long as `patience` says.
    #[cold]
    #[inline(never)]
    pub(crate) fn wait_for_run(&mut self, patience: Patience) -> Result<()> {
        self.find_record(patience, false).map(|_| ())
    }
}
