//! What a receiver gives out: a message, a batch of them, and messages held.

use super::{Receiver, TURN};
use crate::error::{Error, Result};
use crate::sender::End;
use crossbeam_queue::SegQueue;
use pelton_lane::{Cursor, Record, Ticket, Wake};
use pelton_os::Peer;
use pelton_os::{LocalWake, Owner, ReceivedFd, Segment};
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

/// What is received: a message, or, where [`crate::Options::announce`] asks for it, what became of a sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A message.
    Message,
    /// A sender has come. Its messages follow.
    Joined,
    /// A sender has closed, and all its messages were received.
    Closed,
    /// A sender has died, and all that it had committed was received.
    PeerDied,
    /// A sender has broken the rules of the layout: nothing more of it is received.
    Corrupt,
}

impl Kind {
    /// What is no message, in the order of their marks.
    const TOLD: [Kind; 4] = [Kind::Joined, Kind::Closed, Kind::PeerDied, Kind::Corrupt];
    /// More descriptors than a record can say that it has.
    const MARK: u32 = 1 << 28;

    pub(super) fn of(end: End) -> Kind {
        match end {
            End::Closed => Kind::Closed,
            End::PeerDied => Kind::PeerDied,
            End::Corrupt => Kind::Corrupt,
        }
    }

    /// A record that tells it.
    pub(super) fn record(self) -> Record {
        let place = Kind::TOLD.iter().position(|kind| *kind == self).expect("a message has a record of its own");
        Record::placeholder(Kind::MARK + place as u32)
    }

    /// What a record tells, if it is of no message.
    pub(super) fn told_by(record: &Record) -> Option<Kind> {
        Kind::TOLD.get(record.descriptors.checked_sub(Kind::MARK)? as usize).copied()
    }
}

/// A message in the lane. Dropping it releases its space; the receiver can do nothing else meanwhile.
#[must_use = "dropping a message releases it: it is then received"]
#[derive(Debug)]
pub struct Message<'a> {
    pub(super) receiver: &'a mut Receiver,
    pub(super) record: Record,
}

impl Message<'_> {
    /// The message's number in the lane: one more for each, modulo 2^32, never 0.
    pub fn seq(&self) -> u32 {
        self.record.seq
    }

    /// Whether it is a message, or tells what became of a sender: then it has 0 bytes, and seq is 0.
    pub fn kind(&self) -> Kind {
        Kind::told_by(&self.record).unwrap_or(Kind::Message)
    }

    /// Who sent it, or of whom it tells. Where many send, [`Message::lane`] tells one from another.
    pub fn peer(&self) -> Option<Peer> {
        self.receiver.lanes.current.link.peer()
    }

    /// Whether a receiver before this one may have seen this message: true of whatever was in the lane, and not released, when
    /// this one came, unless it is the lane's first. How far that one had looked nobody knows.
    pub fn is_redelivered(&self) -> bool {
        self.kind() == Kind::Message && self.receiver.lanes.current.is_redelivering()
    }

    /// Which of the channel's lanes it came by: 0, unless there are several senders. Messages of one lane come in order. A
    /// receiver that gathers gives each sender that comes the next number, from 1 on.
    pub fn lane(&self) -> u32 {
        self.receiver.lanes.current.number
    }

    /// How many descriptors came with the message and have not been taken.
    pub fn descriptors(&self) -> usize {
        if self.kind() == Kind::Message { self.record.descriptors as usize } else { 0 }
    }

    /// The descriptors that came with the message, once; none when there are none, or they have been taken. Those not
    /// taken are closed when the message is released.
    ///
    /// # Errors
    /// [`Error::DescriptorsLost`] when this process had no room for all of them; [`Error::Corrupt`].
    pub fn take_descriptors(&mut self) -> Result<Vec<OwnedFd>> {
        if self.kind() != Kind::Message {
            return Ok(Vec::new());
        }
        match std::mem::take(&mut self.record.descriptors) {
            0 => Ok(Vec::new()),
            _ if self.receiver.owner.is_forked() => Err(Error::Forked),
            count => {
                let fds = self.receiver.receive_descriptors(self.record.seq, count)?;
                Ok(fds.into_iter().map(ReceivedFd::into_owned).collect())
            }
        }
    }

    /// Keeps the message, without a copy, for as long as the [`Held`] lives, on any thread; the receiver goes on. Space
    /// comes back in order, so a message held long keeps everything after it from being released too.
    ///
    /// ```
    /// # fn main() -> pelton::Result<()> {
    /// let (mut sender, mut receiver) = pelton::Options::new().threads()?;
    /// sender.send(b"first")?;
    /// sender.send(b"second")?;
    /// let first = receiver.receive()?.hold();
    /// assert_eq!(&*receiver.receive()?, b"second");
    /// std::thread::spawn(move || assert_eq!(&*first, b"first")).join().unwrap();
    /// # Ok(())
    /// # }
    /// ```
    pub fn hold(self) -> Held {
        // The message is not dropped: its record moves on into the ticket.
        let mut message = std::mem::ManuallyDrop::new(self);
        let record = message.record;
        let receiver = &mut *message.receiver;
        // In a forked child this is the child's own affair: nothing shared is touched.
        let forked = receiver.owner.is_forked();
        let lane = &receiver.lanes.current;
        let (payload, number, data) = (lane.consumer.payload(&record), lane.number, lane.memory.data.clone());
        let is_message = record.descriptors == 0 || forked || receiver.drop_descriptors(&record);
        let ticket = is_message.then(|| {
            receiver.detours += 1;
            receiver.count_to_turn(&record);
            (number, receiver.lanes.current.consumer.hold(&record))
        });
        let (bytes, seq, returned) = (record.bytes as usize, record.seq, receiver.returned.clone());
        Held { payload, bytes, seq, ticket, _data: data, returned }
    }
}

impl Deref for Message<'_> {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        let payload = self.receiver.lanes.current.consumer.payload(&self.record);
        // SAFETY: the lane checked that the record lies in the data. The sender does not write it before it is released,
        // which the borrow keeps from happening; a sender that does so nevertheless is one not to be received from in
        // place, as the crate's documentation says.
        unsafe { std::slice::from_raw_parts(payload.as_ptr(), self.record.bytes as usize) }
    }
}

impl Drop for Message<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        // A child that inherited the message releases nothing of its parent's.
        if self.receiver.owner.is_forked() {
            return;
        }
        self.receiver.release(&self.record);
    }
}

/// Messages taken together. Dropping it releases those that [`Batch::next`] gave out, by one store; of one that is forgotten instead they may come
/// again.
#[derive(Debug)]
pub struct Batch<'a> {
    receiver: &'a mut Receiver,
    /// Behind what was given out, and the bytes of that: the lane is told when the batch is dropped.
    cursor: Cursor,
    bytes: u64,
    /// The lane's turn has ended, where there are several.
    is_over: bool,
}

impl<'a> Batch<'a> {
    #[inline(always)]
    pub(super) fn new(receiver: &'a mut Receiver) -> Batch<'a> {
        let cursor = receiver.lanes.current.consumer.cursor();
        Batch { receiver, cursor, bytes: 0, is_over: false }
    }
}

impl Batch<'_> {
    /// The next message that is there, in place, good until the next call; `None` when there is none now.
    ///
    /// # Errors
    /// As [`Receiver::try_receive`]; the end of the channel too is told by the receiver's next call, not here.
    #[allow(clippy::should_implement_trait)] // an iterator's items would outlive the next call
    #[inline(always)]
    pub fn next(&mut self) -> Result<Option<&[u8]>> {
        if self.receiver.owner.is_forked() {
            return Err(Error::Forked);
        }
        if self.is_over {
            return Ok(None);
        }
        let record = match self.receiver.lanes.current.consumer.take_at(&mut self.cursor) {
            Some(record) => {
                self.bytes += record.bytes;
                record
            }
            None => {
                // By value: what has an address is in no register.
                let found = self.receiver.take_slowly(self.cursor, self.bytes);
                (self.cursor, self.bytes) = (self.receiver.lanes.current.consumer.cursor(), 0);
                match found {
                    Ok(Some(record)) => record,
                    Ok(None) => return Ok(None),
                    Err(error) => return Err(error),
                }
            }
        };
        self.is_over = self.receiver.many && record.seq.is_multiple_of(TURN);
        let payload = self.receiver.lanes.current.consumer.payload(&record);
        // SAFETY: as for a message; not released before the batch is dropped, after this borrow of it.
        Ok(Some(unsafe { std::slice::from_raw_parts(payload.as_ptr(), record.bytes as usize) }))
    }
}

impl Drop for Batch<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.receiver.release_to(self.cursor, self.bytes);
    }
}

impl Receiver {
    /// At a batch's cursor no message stands, or one with marks: the lane's own cursor goes there, and behind that one.
    #[cold]
    #[inline(never)]
    fn take_slowly(&mut self, cursor: Cursor, bytes: u64) -> Result<Option<Record>> {
        let lane = &mut self.lanes.current.consumer;
        lane.take_to(cursor, bytes);
        match lane.peek() {
            Ok(Some(record)) => {
                if record.descriptors != 0 {
                    self.drop_descriptors(&record);
                }
                self.lanes.current.consumer.take(&record);
                Ok(Some(record))
            }
            Ok(None) => Ok(None),
            Err(error) => self.failed_in_batch(error).map(|()| None),
        }
    }

    /// Releases what a batch has given out.
    #[inline]
    fn release_to(&mut self, cursor: Cursor, bytes: u64) {
        if self.owner.is_forked() {
            return;
        }
        let lane = &mut self.lanes.current;
        lane.consumer.take_to(cursor, bytes);
        if lane.consumer.release_taken() == Wake::Ring {
            lane.link.ring_peer();
        }
        if self.many {
            self.end_turn();
        }
    }
}

/// A message kept in the lane; see [`Message::hold`]. It stays readable after the receiver is gone, but its bytes are
/// then kept only until the sender has found a successor: drop it, or copy it, before closing.
#[derive(Debug)]
pub struct Held {
    payload: NonNull<u8>,
    bytes: usize,
    seq: u32,
    /// Of what is no message there is none.
    ticket: Option<(u32, Ticket)>,
    _data: Arc<Segment>,
    pub(super) returned: Arc<Returned>,
}

// SAFETY: the bytes are read-only as long as this lives, and the mapping is kept by `_data`.
unsafe impl Send for Held {}
// SAFETY: as above.
unsafe impl Sync for Held {}

impl Held {
    /// The message's number in the lane.
    pub fn seq(&self) -> u32 {
        self.seq
    }
}

impl Deref for Held {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: as for a message; the ticket keeps it from being released.
        unsafe { std::slice::from_raw_parts(self.payload.as_ptr(), self.bytes) }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.returned.owner.is_forked() {
            return;
        }
        let Some(ticket) = self.ticket else { return };
        self.returned.tickets.push(ticket);
        // The receiver may be asleep while the sender waits for this very space.
        self.returned.nudge.ring();
    }
}

/// Tickets of held messages that have been dropped, on whatever thread.
#[derive(Debug)]
pub(super) struct Returned {
    /// Each with its lane's number. No lock: whoever drops a message never waits for the receiver.
    pub(super) tickets: SegQueue<(u32, Ticket)>,
    /// The receiver's own: it may sleep with a lane full of held messages.
    pub(super) nudge: Arc<LocalWake>,
    pub(super) owner: Owner,
}
