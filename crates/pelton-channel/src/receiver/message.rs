//! What a receiver returns: a message, a batch of them, and held messages.

use super::{QUANTUM, Receiver};
use crate::endpoint::Departure;
use crate::error::{Error, Result};
use crate::traceparent::Traceparent;
use crossbeam_queue::SegQueue;
use pelton_lane::{Cursor, Record, Ticket, Wake};
use pelton_os::lock::Lock;
use pelton_os::{LocalWake, Owner, Peer, ReceivedFd, Segment};
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

/// A message or a membership event: see [`Receiver::receive_event`].
#[derive(Debug)]
pub enum Event<'a> {
    /// A message.
    Message(Message<'a>),
    /// A sender has joined. Its messages follow.
    Joined(Member),
    /// A sender has left, and all its messages were received.
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

/// One sender of a receiver of several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Member {
    /// The lane of its messages: see [`Message::lane`].
    pub lane: u32,
    /// Its process.
    pub peer: Option<Peer>,
}

/// The next item of the current lane: see [`crate::raw`].
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
pub struct Message<'a> {
    /// Its record is the receiver's `found`: decision 0049.
    pub(crate) receiver: &'a mut Receiver,
}

const _: () = assert!(size_of::<Message<'_>>() == size_of::<usize>(), "a move is one load and one store");

impl Message<'_> {
    /// The message's number in the lane: one more for each, modulo 2^32, never 0.
    pub fn seq(&self) -> u32 {
        self.receiver.found.seq
    }

    /// The process that sent it. [`Message::lane`] distinguishes several senders.
    pub fn peer(&self) -> Option<Peer> {
        self.receiver.lanes.current.link.peer()
    }

    /// Whether an earlier receiver may have received this message. True for every message that was unreleased when this
    /// receiver took over the lane from another one: it is unknown how many of them that one had received.
    pub fn is_redelivered(&self) -> bool {
        self.receiver.lanes.current.is_redelivering()
    }

    /// The number of the message's lane: 0, unless there are several senders. Messages of one lane arrive in order. A
    /// receiver of several senders numbers them in the order in which they join, from 1.
    pub fn lane(&self) -> u32 {
        self.receiver.lanes.current.number
    }

    /// The position of its sender in a distributed trace: see [`Sender::send_traced`](crate::Sender::send_traced).
    /// `None` if the sender gave none; one that is not valid by W3C's rules is as none.
    pub fn traceparent(&self) -> Option<Traceparent> {
        self.receiver.traceparent_of(self.seq())
    }

    /// The number of descriptors of the message that were not taken yet.
    pub fn descriptor_count(&self) -> usize {
        self.receiver.found.descriptors as usize
    }

    /// Takes the descriptors of the message; empty if there are none, or if they were taken before. The release of the
    /// message closes descriptors that were not taken.
    ///
    /// # Errors
    /// [`Error::DescriptorsLost`] when this process had too few free descriptors; [`Error::Corrupt`].
    pub fn take_descriptors(&mut self) -> Result<Vec<OwnedFd>> {
        match std::mem::take(&mut self.receiver.found.descriptors) {
            0 => Ok(Vec::new()),
            _ if self.receiver.endpoint.owner.is_forked() => Err(Error::Forked),
            count => {
                let fds = self.receiver.receive_descriptors(self.seq(), count)?;
                Ok(fds.into_iter().map(ReceivedFd::into_owned).collect())
            }
        }
    }

    /// Keeps the message, without a copy, for as long as the [`Held`] lives, on any thread. The receiver continues.
    /// Space is released in order, so a message that is held long delays the release of all later ones. On a path
    /// channel it also keeps the receiver's role: see [`Held`].
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
        // Its record moves into the ticket, so the message must not be dropped.
        let mut message = std::mem::ManuallyDrop::new(self);
        let receiver = &mut *message.receiver;
        let record = receiver.found;
        // A forked child must not change shared memory.
        let forked = receiver.endpoint.owner.is_forked();
        let lane = &receiver.lanes.current;
        let (payload, number, data) = (lane.consumer.payload(&record), lane.number, lane.memory.data.clone());
        if record.descriptors != 0 && !forked {
            receiver.drop_descriptors(record.seq, record.descriptors);
        }
        let traceparent = receiver.traceparent_of(record.seq);
        receiver.slow_path_reasons += 1;
        receiver.count_to_quantum(record.seq);
        let ticket = (number, receiver.lanes.current.consumer.hold(&record));
        let (bytes, seq, returned) = (record.bytes as usize, record.seq, receiver.returned.clone());
        Held { payload, bytes, seq, traceparent, ticket, _data: data, returned }
    }
}

impl Deref for Message<'_> {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        let record = &self.receiver.found;
        let payload = self.receiver.lanes.current.consumer.payload(record);
        // SAFETY: the lane checked that the record lies in the data. The sender does not write it before its release,
        // and the borrow prevents a release. The crate's documentation forbids to receive in place from a sender that
        // may write nevertheless.
        unsafe { std::slice::from_raw_parts(payload.as_ptr(), record.bytes as usize) }
    }
}

impl AsRef<[u8]> for Message<'_> {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl std::fmt::Debug for Message<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Message")
            .field("seq", &self.seq())
            .field("lane", &self.lane())
            .field("bytes", &self.len())
            .finish_non_exhaustive()
    }
}

impl Drop for Message<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        // A child that inherited the message releases nothing of its parent's.
        if self.receiver.endpoint.owner.is_forked() {
            return;
        }
        self.receiver.release_found();
    }
}

/// Several messages of a lane. Dropping it releases, by one store, the messages that [`Batch::next`] returned. If it is
/// forgotten instead, they may be received again.
pub struct Batch<'a> {
    receiver: &'a mut Receiver,
    /// The position after the returned messages, and their bytes. The lane gets both when the batch is dropped.
    cursor: Cursor,
    bytes: u64,
    /// Whether the lane's quantum is over, with several lanes.
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
    /// As [`Message::traceparent`], of the message that [`Batch::next`] returned last; without meaning before that.
    pub fn traceparent(&self) -> Option<Traceparent> {
        self.receiver.traceparent_of(self.cursor.seq_before())
    }

    /// Returns the next message in place, valid until the next call, or `None` when there is none now.
    ///
    /// # Errors
    /// As [`Receiver::try_receive`], except the end of the channel: the receiver's next call returns that.
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
                // By value: the compiler keeps no variable in a register whose address is taken.
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
        // SAFETY: the lane checked that the record lies in the data. Dropping the batch releases the record, and this
        // borrow of the batch ends before that.
        Ok(Some(unsafe { std::slice::from_raw_parts(payload.as_ptr(), record.bytes as usize) }))
    }
}

impl std::fmt::Debug for Batch<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Batch").field("lane", &self.receiver.lanes.current.number).finish_non_exhaustive()
    }
}

impl Drop for Batch<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.receiver.release_to(self.cursor, self.bytes);
    }
}

impl Receiver {
    /// The slow path, without a message at the batch's cursor, or with marks before it: moves the lane's own cursor to
    /// the next message, and past it.
    #[cold]
    #[inline(never)]
    fn take_slow(&mut self, cursor: Cursor, bytes: u64) -> Result<Option<Record>> {
        let lane = &mut self.lanes.current.consumer;
        lane.take_to(cursor, bytes);
        match lane.peek() {
            Ok(Some(record)) => {
                if record.descriptors != 0 {
                    self.drop_descriptors(record.seq, record.descriptors);
                }
                self.lanes.current.consumer.take(&record);
                Ok(Some(record))
            }
            Ok(None) => Ok(None),
            Err(error) => self.failed_in_batch(error).map(|()| None),
        }
    }

    /// Releases the messages that a batch has returned.
    #[inline]
    pub(super) fn release_to(&mut self, cursor: Cursor, bytes: u64) {
        if self.endpoint.owner.is_forked() {
            return;
        }
        let lane = &mut self.lanes.current;
        lane.consumer.take_to(cursor, bytes);
        if lane.consumer.release_taken() == Wake::Ring {
            lane.wake_sender();
        }
        if self.many {
            self.end_quantum();
        }
    }
}

/// A message kept in the lane; see [`Message::hold`]. Its bytes stay readable and unchanged until it is dropped, also
/// after its receiver has resumed or is dropped, and after its sender has left.
///
/// A closed receiver's held messages count as unreleased, so its successor receives them again. By connect, the sender
/// copies them into new memory for that successor. On a path channel, the receiver's role stays taken until its last
/// held message is dropped: another receiver waits ([`Options::connect_deadline`](crate::Options::connect_deadline)),
/// or fails with [`Error::RoleTaken`].
///
/// In a forked child, dropping it does nothing. Do not read it there: the parent may release it.
pub struct Held {
    payload: NonNull<u8>,
    bytes: usize,
    seq: u32,
    traceparent: Option<Traceparent>,
    ticket: (u32, Ticket),
    _data: Arc<Segment>,
    pub(crate) returned: Arc<Returned>,
}

// SAFETY: `_data` keeps the mapping, and no side writes the bytes while this lives.
unsafe impl Send for Held {}
// SAFETY: shared references only read the bytes, which `_data` keeps mapped.
unsafe impl Sync for Held {}

impl Held {
    /// The message's number in the lane.
    pub fn seq(&self) -> u32 {
        self.seq
    }

    /// As [`Message::traceparent`].
    pub fn traceparent(&self) -> Option<Traceparent> {
        self.traceparent
    }
}

impl Deref for Held {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the lane checked that the record lies in the data; the ticket keeps the record from being released.
        unsafe { std::slice::from_raw_parts(self.payload.as_ptr(), self.bytes) }
    }
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl std::fmt::Debug for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Held").field("seq", &self.seq).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.returned.owner.is_forked() {
            return;
        }
        self.returned.tickets.push(self.ticket);
        // Wakes the receiver: it may sleep while the sender waits for this space.
        self.returned.local_wake.ring();
    }
}

/// What a receiver shares with its held messages: the tickets of those that were dropped, on any thread.
#[derive(Debug)]
pub(crate) struct Returned {
    /// Tickets with the numbers of their lanes. Without a lock: a thread that drops a message never waits for the
    /// receiver.
    pub(super) tickets: SegQueue<(u32, Ticket)>,
    /// The receiver's local wake: the receiver may sleep with a lane full of held messages.
    pub(super) local_wake: Arc<LocalWake>,
    pub(crate) owner: Owner,
    /// The receiver's role in a path channel. The last of the receiver and its held messages gives it up.
    pub(super) role: Option<Arc<Lock>>,
}
