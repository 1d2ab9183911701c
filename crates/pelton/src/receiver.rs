//! The receiving end of a channel.

use crate::connect::Origin;
use crate::error::{Error, Result};
use crate::link::{Link, Peer};
use crate::options::Options;
use crate::os::{Nudge, Owner, Segment};
use crate::sender::End;
use crate::wait::{self, Patience, Side, Spin};
use crate::{Counters, os};
use pelton_lane::{Consumer, LaneError, Record, Sleeper, Ticket, Wake};
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// The receiving end of a channel. `Send`, not `Sync`: one thread at a time.
///
/// Messages are received in place ([`Receiver::receive`]: no copy, the space is released when the [`Message`] is dropped),
/// copied out ([`Receiver::receive_into`]: safe against a sender that goes on writing), by the batch
/// ([`Receiver::try_receive_batch`]), or held ([`Message::hold`]).
///
/// Dropping it closes: the sender is told [`Error::Closed`] with the number of messages that were not released.
#[derive(Debug)]
pub struct Receiver {
    /// First for its place: the first words are what each message touches.
    parts: ReceiverParts,
    owner: Owner,
    end: Option<End>,
    /// Messages held, on which tickets may come back.
    holding: usize,
    returned: Arc<Returned>,
    spin: Spin,
    empties: u32,
    origin: Origin,
}

/// A consumer with its memory and its link, as the hand-shake makes it.
#[derive(Debug)]
pub(crate) struct ReceiverParts {
    pub(crate) lane: Consumer,
    pub(crate) sleeper: Sleeper,
    pub(crate) link: Link,
    /// So many of the first messages may have been delivered to this one's predecessor.
    pub(crate) redelivered: u64,
    /// After the lane, which points into it.
    pub(crate) memory: ReceiverMemory,
}

/// The segments that a consumer's lane lies in.
#[derive(Debug)]
pub(crate) struct ReceiverMemory {
    pub(crate) page: Arc<Segment>,
    pub(crate) data: Arc<Segment>,
    pub(crate) consumer: Arc<Segment>,
    pub(crate) receiver: Arc<Segment>,
}

impl ReceiverMemory {
    pub(crate) fn attach(&self, message_bytes_max: u64, can_barrier: bool) -> Result<(Consumer, Sleeper)> {
        let memory = os::lane_memory(&self.page, &self.consumer, &self.receiver, &self.data);
        // SAFETY: the segments were checked for size and sealed, and are kept beside the lane until it is gone; this
        // process made the consumer's and the receiver's pages, and is the lane's one consumer by the hand-shake.
        unsafe {
            let lane = Consumer::attach(memory, message_bytes_max, can_barrier)?;
            Ok((lane, Sleeper::of_receiver(memory.receiver, can_barrier)))
        }
    }

    pub(crate) fn attach_producer(&mut self, lane: &mut Consumer, page: Arc<Segment>, can_barrier: bool) {
        let memory = os::lane_memory(&page, &self.consumer, &self.receiver, &self.data);
        // SAFETY: as above; the new segment replaces the old one right after.
        unsafe { lane.attach_producer(memory.producer, can_barrier) };
        self.page = page;
    }
}

/// Room for `bytes`, apart from the way of a message that has it. What was there is not wanted any more.
#[cold]
#[inline(never)]
fn grow(buffer: &mut Vec<u8>, bytes: usize) {
    buffer.clear();
    buffer.reserve(bytes);
}

/// Tickets of held messages that have been dropped, on whatever thread.
#[derive(Debug)]
struct Returned {
    tickets: Mutex<Vec<Ticket>>,
    /// The receiver's own: it may sleep with a lane full of held messages.
    nudge: Arc<Nudge>,
    owner: Owner,
}

impl Receiver {
    pub(crate) fn new(parts: ReceiverParts, options: &Options, origin: Origin) -> Result<Receiver> {
        let owner = Owner::current().map_err(Error::system("looking whose handle this is"))?;
        let returned = Arc::new(Returned { tickets: Mutex::default(), nudge: parts.link.nudge().clone(), owner });
        let spin = Spin::new(options.wait, parts.link.peer());
        Ok(Receiver { parts, owner, end: None, holding: 0, returned, spin, empties: 0, origin })
    }

    /// Connects to a sender that listens under `name` (a short name, or `unix:PATH`) with default [`Options`]. Fails at
    /// once when nobody does; waits some seconds at most for one that listens to accept.
    ///
    /// # Errors
    /// As [`Options::connect_sender`].
    pub fn connect(name: &str) -> Result<Receiver> {
        Options::new().connect_receiver(name)
    }

    /// The next message, in place; `None` when the lane is empty. Never waits.
    ///
    /// # Errors
    /// After the last message: [`Error::Closed`] when the sender has closed, [`Error::PeerDied`] when it died; `resume`
    /// may go on then. [`Error::Corrupt`], [`Error::Forked`].
    #[inline]
    pub fn try_receive(&mut self) -> Result<Option<Message<'_>>> {
        match self.peek_at_once() {
            Some(record) => Ok(Some(Message { receiver: self, record })),
            None => self.receive_slowly(Patience::None),
        }
    }

    /// The next message, in place. Waits as the [`crate::Wait`] of the options says, for ever if need be.
    ///
    /// # Errors
    /// As [`Receiver::try_receive`]; a wait ends at once when the sender goes.
    #[inline]
    pub fn receive(&mut self) -> Result<Message<'_>> {
        match self.peek_at_once() {
            Some(record) => Ok(Message { receiver: self, record }),
            None => match self.peek_soon() {
                Some(record) => Ok(Message { receiver: self, record }),
                None => Ok(self.receive_slowly(Patience::Endless)?.expect("without a deadline it does not pass")),
            },
        }
    }

    /// As [`Receiver::receive`], until `deadline` on the monotonic clock; `None` when it passes.
    ///
    /// # Errors
    /// As [`Receiver::receive`].
    #[inline]
    pub fn receive_until(&mut self, deadline: Instant) -> Result<Option<Message<'_>>> {
        match self.peek_at_once() {
            Some(record) => Ok(Some(Message { receiver: self, record })),
            None => self.receive_slowly(Patience::Until(deadline)),
        }
    }

    /// Copies the next message into `buffer`, whose contents it replaces, and releases it; answers its length, or `None`
    /// when the lane is empty. Never waits. Safe against any peer: nothing looks at the shared bytes after the copy.
    ///
    /// # Errors
    /// As [`Receiver::try_receive`].
    #[inline]
    pub fn try_receive_into(&mut self, buffer: &mut Vec<u8>) -> Result<Option<usize>> {
        match self.peek_at_once() {
            Some(record) => Ok(Some(self.copy_out(record, buffer))),
            None => self.copy_slowly(buffer, Patience::None),
        }
    }

    /// As [`Receiver::try_receive_into`], but waits for a message.
    ///
    /// # Errors
    /// As [`Receiver::receive`].
    #[inline]
    pub fn receive_into(&mut self, buffer: &mut Vec<u8>) -> Result<usize> {
        match self.peek_at_once() {
            Some(record) => Ok(self.copy_out(record, buffer)),
            None => match self.peek_soon() {
                Some(record) => Ok(self.copy_out(record, buffer)),
                None => Ok(self.copy_slowly(buffer, Patience::Endless)?.expect("without a deadline it does not pass")),
            },
        }
    }

    /// As [`Receiver::receive_into`], until `deadline`; `None` when it passes.
    ///
    /// # Errors
    /// As [`Receiver::receive`].
    #[inline]
    pub fn receive_into_until(&mut self, buffer: &mut Vec<u8>, deadline: Instant) -> Result<Option<usize>> {
        match self.peek_at_once() {
            Some(record) => Ok(Some(self.copy_out(record, buffer))),
            None => self.copy_slowly(buffer, Patience::Until(deadline)),
        }
    }

    /// All messages that are there, or as many as the caller takes; their space is released at once when the batch is
    /// dropped, by one store. `None` when the lane is empty. Never waits.
    ///
    /// ```
    /// # fn main() -> pelton::Result<()> {
    /// let (mut sender, mut receiver) = pelton::Options::new().threads()?;
    /// sender.send(b"one")?;
    /// sender.send(b"two")?;
    /// let mut batch = receiver.try_receive_batch()?.expect("two messages wait");
    /// while let Some(message) = batch.next()? {
    ///     println!("{} bytes", message.len());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Receiver::try_receive`].
    pub fn try_receive_batch(&mut self) -> Result<Option<Batch<'_>>> {
        Ok(self.find_record(Patience::None)?.map(|_| Batch { receiver: self }))
    }

    /// As [`Receiver::try_receive_batch`], but waits until there is a message.
    ///
    /// # Errors
    /// As [`Receiver::receive`].
    pub fn receive_batch(&mut self) -> Result<Batch<'_>> {
        self.find_record(Patience::Endless)?;
        Ok(Batch { receiver: self })
    }

    /// The common case: the handle is in use, a message stands at the cursor, and nobody holds one or sleeps.
    #[inline(always)]
    fn peek_at_once(&mut self) -> Option<Record> {
        if !self.owner.is_current() || self.holding != 0 || self.parts.sleeper.is_armed() {
            return None;
        }
        self.parts.lane.peek_at_cursor()
    }

    /// The message that was not there at once, if it is on its way.
    #[inline(always)]
    fn peek_soon(&mut self) -> Option<Record> {
        if self.comes_soon() { self.peek_at_once() } else { None }
    }

    /// The common wait: the next message is on its way. Looks for it some times before anything is called that costs more
    /// than the message. A function of its own, lest the loop be unrolled into every caller and keep the common case from
    /// being inlined there.
    #[inline(never)]
    fn comes_soon(&self) -> bool {
        for _ in 0..self.spin.first_looks() {
            os::relax();
            if self.parts.lane.stirs() {
                return true;
            }
        }
        false
    }

    #[cold]
    #[inline(never)]
    fn receive_slowly(&mut self, patience: Patience) -> Result<Option<Message<'_>>> {
        Ok(self.find_record(patience)?.map(|record| Message { receiver: self, record }))
    }

    #[cold]
    #[inline(never)]
    fn copy_slowly(&mut self, buffer: &mut Vec<u8>, patience: Patience) -> Result<Option<usize>> {
        Ok(self.find_record(patience)?.map(|record| self.copy_out(record, buffer)))
    }

    /// The next message, waiting for it as long as `patience` says.
    fn find_record(&mut self, patience: Patience) -> Result<Option<Record>> {
        let Some(deadline) = patience.deadline() else { return self.peek() };
        // The header was looked at just now; each look takes its line from the sender, who may be about to write there.
        let usual = self.owner.is_current() && self.holding == 0 && !self.parts.sleeper.is_armed();
        if !usual && let Some(record) = self.peek()? {
            return Ok(Some(record));
        }
        self.parts.lane.count_wait();
        while wait::wait(self, deadline)? {
            // A hostile sender may have taken back what the wait saw.
            if let Some(record) = self.peek()? {
                return Ok(Some(record));
            }
        }
        Ok(None)
    }

    fn peek(&mut self) -> Result<Option<Record>> {
        if self.holding != 0 && !self.owner.is_forked() {
            self.take_back();
        }
        if !self.owner.is_current() {
            return Err(self.not_usable());
        }
        match self.parts.lane.peek() {
            Ok(Some(record)) => {
                // Awake: the sender need not look further. The descriptor stays readable until the next `arm`.
                self.parts.sleeper.disarm();
                Ok(Some(record))
            }
            Ok(None) => self.peek_when_empty(),
            Err(error) => Err(self.failed(error)),
        }
    }

    /// The lane is empty: perhaps for good.
    fn peek_when_empty(&mut self) -> Result<Option<Record>> {
        // Now and then, for who asks again and again without waiting, whether the sender is alive.
        self.empties = self.empties.wrapping_add(1);
        let gone = self.parts.lane.producer_closed()
            || (self.empties.is_multiple_of(16) && self.parts.link.is_peer_known_gone()?);
        if !gone {
            return Ok(None);
        }
        // What was committed before the end is visible now. [close]
        match self.parts.lane.peek() {
            Ok(Some(record)) => Ok(Some(record)),
            Ok(None) => {
                self.note_end();
                Err(self.not_usable())
            }
            Err(error) => Err(self.failed(error)),
        }
    }

    #[inline(always)]
    fn copy_out(&mut self, record: Record, buffer: &mut Vec<u8>) -> usize {
        let bytes = record.bytes as usize;
        if buffer.capacity() < bytes {
            grow(buffer, bytes);
        }
        // SAFETY: the lane checked that the record lies in the data; the vector has room; the two do not overlap, as no
        // safe code has a vector over a lane. A peer that writes meanwhile changes bytes, which any value is good for.
        unsafe {
            self.parts.lane.copy_out(&record, buffer.as_mut_ptr());
            buffer.set_len(bytes);
        }
        self.release(&record);
        bytes
    }

    #[inline(always)]
    fn release(&mut self, record: &Record) {
        if record.descriptors != 0 {
            self.drop_descriptors(record);
        }
        if self.parts.lane.release(record) == Wake::Ring {
            self.parts.link.ring_peer();
        }
    }

    /// Descriptors of a message that nobody took.
    #[cold]
    fn drop_descriptors(&mut self, record: &Record) {
        let _ = self.parts.link.receive_descriptors(record.seq, record.descriptors);
    }

    /// Releases what has been dropped of the messages held.
    #[cold]
    fn take_back(&mut self) {
        let tickets = std::mem::take(&mut *self.returned.tickets.lock().unwrap_or_else(PoisonError::into_inner));
        for ticket in tickets {
            self.holding -= 1;
            if self.parts.lane.release_held(ticket) == Wake::Ring {
                self.parts.link.ring_peer();
            }
        }
    }

    #[cold]
    fn not_usable(&mut self) -> Error {
        if self.owner.is_forked() {
            return Error::Forked;
        }
        match self.end {
            Some(end) => end.error(self.parts.lane.held() as u64),
            None => Error::Corrupt("the lane failed before".to_owned()),
        }
    }

    #[cold]
    fn failed(&mut self, error: LaneError) -> Error {
        self.owner.retire();
        error.into()
    }

    /// The sender is gone and its last message read: from now on each call says so.
    fn note_end(&mut self) {
        let closed = self.parts.lane.producer_closed();
        self.end = Some(if closed { End::Closed } else { End::PeerDied });
        self.owner.retire();
    }

    /// For an event loop: asks that the descriptor become readable when a message comes, or the sender goes. True: there
    /// is none now, go back to the loop. False: there is one, take it. Does not wait.
    ///
    /// # Errors
    /// As [`Receiver::try_receive`]: this is where a loop learns that the sender is gone.
    pub fn arm(&mut self) -> Result<bool> {
        if !self.owner.is_current() {
            return Err(self.not_usable());
        }
        self.parts.link.drain();
        let armed = Side::arm(self)?;
        if armed && self.parts.link.is_peer_gone()? {
            Side::disarm(self);
            return if self.look()? { Ok(false) } else { Side::end(self) };
        }
        if !armed || Side::must_nap(self) {
            // Readable exactly while a message waits, also for who goes back to the loop regardless; and as long as the
            // sender is not known to fence, lest its ring be missed.
            self.parts.link.nudge().ring();
        }
        Ok(armed)
    }

    /// Takes [`Receiver::arm`] back.
    pub fn disarm(&mut self) {
        if self.owner.is_current() {
            self.parts.sleeper.disarm();
        }
    }

    /// After [`Error::PeerDied`]: waits for the sender's successor and offers it the lane, to go on where the dead one
    /// committed last. A receiver that had connected connects under the name again; one that a [`crate::Listener`]
    /// accepted accepts the successor there.
    ///
    /// # Errors
    /// [`Error::Refused`] when the channel has not lost its peer, or is one between threads; [`Error::Corrupt`],
    /// [`Error::Forked`], [`Error::System`]. After an error it can be tried again.
    pub fn resume(&mut self) -> Result<()> {
        self.resumed(None).map(|_| ())
    }

    /// As [`Receiver::resume`], until `deadline`; false when it passes.
    ///
    /// # Errors
    /// As [`Receiver::resume`].
    pub fn resume_until(&mut self, deadline: Instant) -> Result<bool> {
        self.resumed(Some(deadline))
    }

    fn resumed(&mut self, deadline: Option<Instant>) -> Result<bool> {
        if self.owner.is_forked() {
            return Err(Error::Forked);
        }
        if self.end.is_none() && !(self.owner.is_current() && self.parts.link.is_peer_gone()?) {
            return Err(Error::Refused("the sender is alive: there is nobody to succeed it".to_owned()));
        }
        if !self.origin.clone().resume_receiver(&mut self.parts, deadline)? {
            return Ok(false);
        }
        self.owner = Owner::current().map_err(Error::system("looking whose handle this is"))?;
        self.end = None;
        Ok(true)
    }

    /// Figures of this side.
    pub fn counters(&self) -> Counters {
        if self.owner.is_forked() {
            return Counters::default();
        }
        self.parts.lane.show_counters();
        let page = self.parts.lane.consumer_page();
        Counters {
            messages: page.messages(),
            bytes: page.bytes(),
            waits: page.waits(),
            sleeps: page.sleeps(),
            wakes_sent: page.wakes_sent(),
            depth_max: 0,
        }
    }

    /// Which producer of the lane sent the message received last: 1 for the first, one more for each successor.
    pub fn generation(&self) -> u32 {
        self.parts.lane.generation()
    }

    /// Bytes of the lane.
    pub fn capacity(&self) -> u64 {
        self.parts.lane.capacity()
    }

    /// The largest message, in bytes.
    pub fn message_bytes_max(&self) -> u64 {
        self.parts.lane.message_bytes_max()
    }

    /// Who sends.
    pub fn peer(&self) -> Peer {
        self.parts.link.peer()
    }

    /// Closes: the sender is told [`Error::Closed`] with the number of messages not released. Does not wait. Dropping
    /// does the same.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn close(self) -> Result<()> {
        if self.owner.is_forked() { Err(Error::Forked) } else { Ok(()) }
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        if self.owner.is_forked() {
            return;
        }
        if self.holding != 0 {
            self.take_back();
        }
        self.parts.lane.close();
        self.parts.sleeper.close();
        // The words first, the ring next, the hang-up last: whoever hears one of the later finds the earlier.
        self.parts.link.ring_peer();
        self.parts.link.shutdown();
    }
}

impl AsRawFd for Receiver {
    /// As [`AsFd`], for runtimes that ask for the number.
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl AsFd for Receiver {
    /// The descriptor for an event loop: see [`Receiver::arm`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.parts.link.as_fd()
    }
}

impl Side for Receiver {
    fn look(&mut self) -> Result<bool> {
        Ok(self.peek()?.is_some())
    }

    fn stirs(&self) -> bool {
        self.parts.lane.stirs()
    }

    fn arm(&mut self) -> Result<bool> {
        let mut everywhere = true;
        self.parts.sleeper.arm(|| everywhere = os::membarrier::barrier());
        if !everywhere {
            self.parts.sleeper.lose_barrier();
        }
        let there = self.look();
        if !matches!(there, Ok(false)) {
            self.parts.sleeper.disarm();
        } else {
            self.parts.lane.count_sleep();
        }
        Ok(!there?)
    }

    fn disarm(&mut self) {
        self.parts.sleeper.disarm();
    }

    fn end(&mut self) -> Result<bool> {
        self.note_end();
        Err(self.not_usable())
    }

    fn must_nap(&self) -> bool {
        self.parts.lane.must_nap(&self.parts.sleeper)
    }

    fn link(&mut self) -> &mut Link {
        &mut self.parts.link
    }

    fn spin(&mut self) -> &mut Spin {
        &mut self.spin
    }
}

/// A message in the lane. Dropping it releases its space; the receiver can do nothing else meanwhile.
#[must_use = "dropping a message releases it: it is then received"]
#[derive(Debug)]
pub struct Message<'a> {
    receiver: &'a mut Receiver,
    record: Record,
}

impl Message<'_> {
    /// The message's number in the lane: one more for each, modulo 2^32, never 0.
    pub fn seq(&self) -> u32 {
        self.record.seq
    }

    /// Whether a receiver that died may have seen this message before: it was not released then.
    pub fn is_redelivered(&self) -> bool {
        self.receiver.parts.lane.taken() < self.receiver.parts.redelivered
    }

    /// The descriptors that came with the message, once; none when there are none, or they have been taken. Those not
    /// taken are closed when the message is released.
    ///
    /// # Errors
    /// [`Error::DescriptorsLost`] when this process had no room for all of them; [`Error::Corrupt`].
    pub fn take_descriptors(&mut self) -> Result<Vec<OwnedFd>> {
        match std::mem::take(&mut self.record.descriptors) {
            0 => Ok(Vec::new()),
            _ if self.receiver.owner.is_forked() => Err(Error::Forked),
            count => self.receiver.parts.link.receive_descriptors(self.record.seq, count),
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
        if record.descriptors != 0 && !receiver.owner.is_forked() {
            receiver.drop_descriptors(&record);
        }
        let ticket = receiver.parts.lane.hold(&record);
        receiver.holding += 1;
        Held {
            payload: receiver.parts.lane.payload(&record),
            bytes: record.bytes as usize,
            seq: record.seq,
            ticket,
            _data: receiver.parts.memory.data.clone(),
            returned: receiver.returned.clone(),
        }
    }
}

impl Deref for Message<'_> {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        let payload = self.receiver.parts.lane.payload(&self.record);
        // SAFETY: the lane checked that the record lies in the data. The sender does not write it before it is released,
        // which the borrow keeps from happening; a sender that does so nevertheless is one not to be received from in
        // place, as the crate's documentation says.
        unsafe { std::slice::from_raw_parts(payload.as_ptr(), self.record.bytes as usize) }
    }
}

impl Drop for Message<'_> {
    #[inline]
    fn drop(&mut self) {
        // A child that inherited the message releases nothing of its parent's.
        if self.receiver.owner.is_forked() {
            return;
        }
        self.receiver.release(&self.record);
    }
}

/// Messages taken together. Dropping it releases those that [`Batch::next`] gave out, by one store.
#[derive(Debug)]
pub struct Batch<'a> {
    receiver: &'a mut Receiver,
}

impl Batch<'_> {
    /// The next message that is there, in place, good until the next call; `None` when there is none now.
    ///
    /// # Errors
    /// As [`Receiver::try_receive`]; the end of the channel too is told by the receiver's next call, not here.
    #[allow(clippy::should_implement_trait)] // an iterator's items would outlive the next call
    #[inline]
    pub fn next(&mut self) -> Result<Option<&[u8]>> {
        if self.receiver.owner.is_forked() {
            return Err(Error::Forked);
        }
        let lane = &mut self.receiver.parts.lane;
        let record = match lane.peek() {
            Ok(Some(record)) => record,
            Ok(None) => return Ok(None),
            Err(error) => return Err(self.receiver.failed(error)),
        };
        lane.take(&record);
        let payload = lane.payload(&record);
        if record.descriptors != 0 {
            self.receiver.drop_descriptors(&record);
        }
        // SAFETY: as for a message; not released before the batch is dropped, after this borrow of it.
        Ok(Some(unsafe { std::slice::from_raw_parts(payload.as_ptr(), record.bytes as usize) }))
    }
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        if !self.receiver.owner.is_forked() && self.receiver.parts.lane.release_taken() == Wake::Ring {
            self.receiver.parts.link.ring_peer();
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
    ticket: Ticket,
    _data: Arc<Segment>,
    returned: Arc<Returned>,
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
        self.returned.tickets.lock().unwrap_or_else(PoisonError::into_inner).push(self.ticket);
        // The receiver may be asleep while the sender waits for this very space.
        self.returned.nudge.ring();
    }
}
