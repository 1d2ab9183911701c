//! What a receiver returns: a message, a batch of them, and held messages.

use super::{QUANTUM, Receiver};
use crate::endpoint::Departure;
use crate::error::{Error, Result};
use crossbeam_queue::SegQueue;
use pelton_lane::{Cursor, Record, Ticket, Wake};
use pelton_os::Peer;
use pelton_os::{LocalWake, Owner, ReceivedFd, Segment};
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

/// What a receiver of several senders receives: see [`Receiver::receive_event`].
#[derive(Debug)]
pub enum Event<'a> {
    /// A message.
    Message(Message<'a>),
    /// A sender has joined. Its messages follow.
    Joined(Member),
    /// A sender has left, and all that it had committed was received.
    Left(Member, Departure),
}

impl Event<'_> {
    /// The sender of the message, or the one that joined or left.
    pub fn member(&self) -> Member {
        match self {
            Event::Message(message) => Member { lane: message.lane(), peer: message.peer() },
            Event::Joined(member) | Event::Left(member, _) => *member,
        }
    }
}

/// A sender of a receiver that has several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Member {
    /// The lane of its messages: see [`Message::lane`].
    pub lane: u32,
    /// Its process.
    pub peer: Option<Peer>,
}

/// What is next in the lane that is served: see [`crate::raw`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Item {
    /// A message.
    Record(Record),
    /// The lane's sender has joined.
    Joined,
    /// The lane's sender has left.
    Left(Departure),
}

/// A message in the lane. Dropping it releases its space; the receiver can do nothing else meanwhile.
#[must_use = "dropping a message releases it: it is then received"]
#[derive(Debug)]
pub struct Message<'a> {
    pub(crate) receiver: &'a mut Receiver,
    pub(crate) record: Record,
}

impl Message<'_> {
    /// The message's number in the lane: one more for each, modulo 2^32, never 0.
    pub fn seq(&self) -> u32 {
        self.record.seq
    }

    /// The process that sent it. [`Message::lane`] distinguishes several senders.
    pub fn peer(&self) -> Option<Peer> {
        self.receiver.lanes.current.link.peer()
    }

    /// Whether an earlier receiver may have received this message: true of all unreleased messages in the lane when
    /// this receiver came, unless it is the lane's first. How far the earlier one had read is not known.
    pub fn is_redelivered(&self) -> bool {
        self.receiver.lanes.current.is_redelivering()
    }

    /// The number of the lane that it came by: 0, unless there are several senders. Messages of one lane come in order.
    /// A receiver of several senders gives each that joins the next number, from 1 on.
    pub fn lane(&self) -> u32 {
        self.receiver.lanes.current.number
    }

    /// How many descriptors came with the message and have not been taken.
    pub fn descriptors(&self) -> usize {
        self.record.descriptors as usize
    }

    /// The descriptors that came with the message, once; none when there are none, or they have been taken. Those not
    /// taken are closed when the message is released.
    ///
    /// # Errors
    /// [`Error::DescriptorsLost`] when this process had too few free descriptors; [`Error::Corrupt`].
    pub fn take_descriptors(&mut self) -> Result<Vec<OwnedFd>> {
        match std::mem::take(&mut self.record.descriptors) {
            0 => Ok(Vec::new()),
            _ if self.receiver.endpoint.owner.is_forked() => Err(Error::Forked),
            count => {
                let fds = self.receiver.receive_descriptors(self.record.seq, count)?;
                Ok(fds.into_iter().map(ReceivedFd::into_owned).collect())
            }
        }
    }

    /// Keeps the message, without a copy, for as long as the [`Held`] lives, on any thread; the receiver continues.
    /// Space is released in order, so a message that is held long delays the release of everything after it.
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
        // The message is not dropped: its record moves into the ticket.
        let mut message = std::mem::ManuallyDrop::new(self);
        let record = message.record;
        let receiver = &mut *message.receiver;
        // A forked child changes nothing shared.
        let forked = receiver.endpoint.owner.is_forked();
        let lane = &receiver.lanes.current;
        let (payload, number, data) = (lane.consumer.payload(&record), lane.number, lane.memory.data.clone());
        if record.descriptors != 0 && !forked {
            receiver.drop_descriptors(&record);
        }
        receiver.slow_path_reasons += 1;
        receiver.count_to_quantum(&record);
        let ticket = (number, receiver.lanes.current.consumer.hold(&record));
        let (bytes, seq, returned) = (record.bytes as usize, record.seq, receiver.returned.clone());
        Held { payload, bytes, seq, ticket, _data: data, returned }
    }
}

impl Deref for Message<'_> {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        let payload = self.receiver.lanes.current.consumer.payload(&self.record);
        // SAFETY: the lane checked that the record lies in the data. The sender does not write it before it is
        // released, which the borrow prevents. A sender that writes nevertheless must not be received from in place, as
        // the crate's documentation says.
        unsafe { std::slice::from_raw_parts(payload.as_ptr(), self.record.bytes as usize) }
    }
}

impl Drop for Message<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        // A child that inherited the message releases nothing of its parent's.
        if self.receiver.endpoint.owner.is_forked() {
            return;
        }
        self.receiver.release(&self.record);
    }
}

/// Messages taken together. Dropping it releases by one store what [`Batch::next`] returned; if it is forgotten
/// instead, they may come again.
#[derive(Debug)]
pub struct Batch<'a> {
    receiver: &'a mut Receiver,
    /// After what was returned, and its bytes: the lane gets both when the batch is dropped.
    cursor: Cursor,
    bytes: u64,
    /// The lane's quantum is over, where there are several.
    is_over: bool,
}

impl<'a> Batch<'a> {
    #[inline(always)]
    pub(crate) fn new(receiver: &'a mut Receiver) -> Batch<'a> {
        let cursor = receiver.lanes.current.consumer.cursor();
        Batch { receiver, cursor, bytes: 0, is_over: false }
    }
}

impl Batch<'_> {
    /// The next message that is there, in place, valid until the next call; `None` when there is none now.
    ///
    /// # Errors
    /// As [`Receiver::try_receive`]; the end of the channel is returned by the receiver's next call, not here.
    #[allow(clippy::should_implement_trait)] // an iterator's items would outlive the next call
    #[inline(always)]
    pub fn next(&mut self) -> Result<Option<&[u8]>> {
        if self.receiver.endpoint.owner.is_forked() {
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
                // By value: a variable with an address is in no register.
                let found = self.receiver.take_slow(self.cursor, self.bytes);
                (self.cursor, self.bytes) = (self.receiver.lanes.current.consumer.cursor(), 0);
                match found {
                    Ok(Some(record)) => record,
                    Ok(None) => return Ok(None),
                    Err(error) => return Err(error),
                }
            }
        };
        self.is_over = self.receiver.many && record.seq.is_multiple_of(QUANTUM);
        let payload = self.receiver.lanes.current.consumer.payload(&record);
        // SAFETY: the lane checked that the record lies in the data. The record is not released before the batch is
        // dropped, after this borrow of the batch.
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
    /// No message is at a batch's cursor, or one with marks: the lane's own cursor moves there, and behind that
    /// message.
    #[cold]
    #[inline(never)]
    fn take_slow(&mut self, cursor: Cursor, bytes: u64) -> Result<Option<Record>> {
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

    /// Releases what a batch has returned.
    #[inline]
    fn release_to(&mut self, cursor: Cursor, bytes: u64) {
        if self.endpoint.owner.is_forked() {
            return;
        }
        let lane = &mut self.lanes.current;
        lane.consumer.take_to(cursor, bytes);
        if lane.consumer.release_taken() == Wake::Ring {
            lane.link.ring_peer();
        }
        if self.many {
            self.end_quantum();
        }
    }
}

/// A message kept in the lane; see [`Message::hold`]. It stays readable after the receiver is dropped, but its bytes
/// are then kept only until the sender has found a successor: drop it, or copy it, before closing.
#[derive(Debug)]
pub struct Held {
    payload: NonNull<u8>,
    bytes: usize,
    seq: u32,
    ticket: (u32, Ticket),
    _data: Arc<Segment>,
    pub(crate) returned: Arc<Returned>,
}

// SAFETY: the bytes are read-only as long as this lives, and the mapping is kept by `_data`.
unsafe impl Send for Held {}
// SAFETY: shared references only read the bytes, which `_data` keeps mapped.
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
        // SAFETY: the lane checked that the record lies in the data; the ticket keeps the record from being released.
        unsafe { std::slice::from_raw_parts(self.payload.as_ptr(), self.bytes) }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.returned.owner.is_forked() {
            return;
        }
        self.returned.tickets.push(self.ticket);
        // The receiver may be asleep while the sender waits for this space.
        self.returned.local_wake.ring();
    }
}

/// Tickets of held messages that were dropped, on any thread.
#[derive(Debug)]
pub(crate) struct Returned {
    /// Each with its lane's number. No lock: a thread that drops a message never waits for the receiver.
    pub(super) tickets: SegQueue<(u32, Ticket)>,
    /// The receiver's own: it may sleep with a lane full of held messages.
    pub(super) local_wake: Arc<LocalWake>,
    pub(crate) owner: Owner,
}
