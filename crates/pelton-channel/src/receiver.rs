//! The receiving endpoint of a channel. `receiver/message.rs` has what it returns.

mod distance;
mod message;
mod messages;

pub use message::{Batch, Event, Held, Item, Member, Message};
pub use messages::Messages;

use crate::counters::Counters;
use crate::doorbells::Doorbells;
use crate::endpoint::{Departure, Endpoint};
use crate::error::{Error, Result};
use crate::lanes::{Lane, Lanes, Next, ReceiverParts};
use crate::options::Options;
use crate::registry::Registry;
use crate::role::RoleClaim;
use crate::wait::{self, Deadline, Side, Spin};
use crossbeam_queue::SegQueue;
use distance::Distance;
use message::Returned;
use pelton_lane::{LaneError, Record, Sleeper, Wake, failpoint};
use pelton_os as os;
use pelton_os::Peer;
use pelton_os::{Ready, ReceivedFd};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::Instant;

/// The receiving endpoint of a channel. `Send`, not `Sync`: one thread at a time.
///
/// Messages are received in place ([`Receiver::receive`]: no copy, the space is released when the [`Message`] is
/// dropped), copied out ([`Receiver::receive_into`]: safe against a sender that goes on writing), by the batch
/// ([`Receiver::try_receive_batch`]), or held ([`Message::hold`]).
///
/// The short name, [`Receiver::receive`], is that of receiving in place, because not copying is what a lane is for, and
/// because between processes of one program the sender is trusted. It is sound for a sender that keeps the protocol. A
/// sender that writes after it has committed can change the message while the receiver reads it, between a check and
/// the use of what was checked; to Rust that is a data race, as with any file mapped into memory. So receive by copy
/// from a sender that is not trusted, as one of another user: [`Receiver::receive_into`] into a buffer that is kept,
/// [`Receiver::receive_vec`] or [`Receiver::messages`] into a new one. After the copy, nothing reads the shared bytes
/// again.
///
/// Dropping it closes: the sender returns [`Error::Closed`] with the number of unreleased messages.
#[derive(Debug)]
pub struct Receiver {
    pub(crate) lanes: Lanes,
    pub(crate) sleeper: Sleeper,
    pub(crate) endpoint: Endpoint<dyn Reconnect>,
    /// Reasons not to take the fast path: held messages, whose tickets may come back; the end of a quantum; a pending
    /// membership event.
    pub(crate) slow_path_reasons: usize,
    pub(crate) is_quantum_over: bool,
    /// Whether there are several lanes, or may be.
    pub(crate) many: bool,
    /// How senders join and leave, of a receiver that has several; and whether it reports that.
    pub(crate) registry: Option<Box<Registry>>,
    reports_events: bool,
    /// Whether it has returned an event that is not passed yet.
    is_event_pending: bool,
    /// Quanta so far, to check the registry at intervals.
    quanta: u32,
    returned: Arc<Returned>,
    distance: Distance,
    empties: u32,
}

/// Where there are several lanes, a lane's quantum ends at multiples of this number of messages. A guess: the cost of a
/// switch is low against so many messages.
const QUANTUM: u32 = 64;
/// Quanta between two checks of the registry, by a receiver that always has messages.
const QUANTA_PER_CHECK: u32 = 16;

/// How a receiver reaches a successor of its sender.
pub(crate) trait Reconnect: std::fmt::Debug + Send + Sync {
    /// Offers the receiver's lane to a successor of its sender. Returns false at the deadline.
    fn resume(&self, lane: &mut Lane, doorbells: &Doorbells, deadline: Option<Instant>) -> Result<bool>;
}

/// Space for `bytes`, outside of the fast path. The old contents are not needed.
#[cold]
#[inline(never)]
fn grow(buffer: &mut Vec<u8>, bytes: usize) {
    buffer.clear();
    buffer.reserve(bytes);
}

impl Receiver {
    pub(crate) fn new(parts: ReceiverParts, options: &Options) -> Result<Receiver> {
        let ReceiverParts { lane, sleeper, doorbells } = parts;
        let endpoint = Endpoint::new(doorbells, options.wait, lane.link.peer())?;
        let local_wake = endpoint.doorbells.local_wake().clone();
        let returned = Arc::new(Returned { tickets: SegQueue::new(), local_wake, owner: endpoint.owner });
        Ok(Receiver {
            lanes: Lanes::of_one(lane),
            registry: None,
            reports_events: false,
            is_event_pending: false,
            quanta: 0,
            sleeper,
            endpoint,
            slow_path_reasons: 0,
            is_quantum_over: false,
            many: false,
            returned,
            distance: Distance::new(),
            empties: 0,
        })
    }

    /// A receiver in that role of a path channel.
    pub(crate) fn with_role(mut self, role: Arc<RoleClaim>) -> Receiver {
        self.many = role.directory.lanes_max() > 1;
        self.endpoint.role = Some(role);
        self
    }

    /// A receiver of several senders, which join by `registry`. `parts` belong to the lane without a sender.
    pub(crate) fn gathering(parts: ReceiverParts, options: &Options, registry: Registry) -> Result<Receiver> {
        let mut receiver = Receiver::new(parts, options)?;
        receiver.many = true;
        receiver.registry = Some(Box::new(registry));
        receiver.reports_events = options.announces;
        receiver.lanes.let_leave();
        Ok(receiver)
    }

    /// The next message, in place; `None` when the lane is empty. Never waits.
    ///
    /// # Errors
    /// After the last message: [`Error::Closed`] when the sender has closed, [`Error::PeerDied`] when it died; then
    /// `resume` may continue with a successor. A path channel returns it once, and then continues with the next sender.
    /// [`Error::Corrupt`], [`Error::Forked`].
    #[inline]
    pub fn try_receive(&mut self) -> Result<Option<Message<'_>>> {
        match self.peek_fast() {
            Some(record) => Ok(Some(Message { receiver: self, record })),
            None => self.receive_slow(Deadline::Now),
        }
    }

    /// The next message, in place. Waits as [`crate::Wait`] of the options determines, without a limit.
    ///
    /// # Errors
    /// As [`Receiver::try_receive`]; a wait ends at once when the sender leaves.
    #[inline]
    pub fn receive(&mut self) -> Result<Message<'_>> {
        match self.peek_fast() {
            Some(record) => Ok(Message { receiver: self, record }),
            None => match self.peek_soon() {
                Some(record) => Ok(Message { receiver: self, record }),
                None => Ok(self.receive_slow(Deadline::Never)?.expect("without a deadline it does not pass")),
            },
        }
    }

    /// As [`Receiver::receive`], until `deadline` on the monotonic clock; `None` when it passes.
    ///
    /// # Errors
    /// As [`Receiver::receive`].
    #[inline]
    pub fn receive_until(&mut self, deadline: Instant) -> Result<Option<Message<'_>>> {
        match self.peek_fast() {
            Some(record) => Ok(Some(Message { receiver: self, record })),
            None => self.receive_slow(Deadline::At(deadline)),
        }
    }

    /// As [`Receiver::try_receive`]; if [`Options::announce`] requests it, reports also which senders join and leave.
    ///
    /// # Errors
    /// As [`Receiver::try_receive`].
    pub fn try_receive_event(&mut self) -> Result<Option<Event<'_>>> {
        Ok(self.find(Deadline::Now)?.map(|item| self.event(item)))
    }

    /// As [`Receiver::receive`]; if [`Options::announce`] requests it, reports also which senders join and leave.
    ///
    /// # Errors
    /// As [`Receiver::receive`].
    pub fn receive_event(&mut self) -> Result<Event<'_>> {
        let item = self.find(Deadline::Never)?.expect("a wait without a deadline finds something");
        Ok(self.event(item))
    }

    /// As [`Receiver::receive_event`], until `deadline`; `None` when it passes.
    ///
    /// # Errors
    /// As [`Receiver::receive`].
    pub fn receive_event_until(&mut self, deadline: Instant) -> Result<Option<Event<'_>>> {
        Ok(self.find(Deadline::At(deadline))?.map(|item| self.event(item)))
    }

    fn event(&mut self, item: Item) -> Event<'_> {
        let member = Member { lane: self.lanes.current.number, peer: self.lanes.current.link.peer() };
        match item {
            Item::Record(record) => Event::Message(Message { receiver: self, record }),
            Item::Joined => {
                self.pass();
                Event::Joined(member)
            }
            Item::Left(departure) => {
                self.pass();
                Event::Left(member, departure)
            }
        }
    }

    /// Copies the next message into `buffer`, whose contents it replaces, and releases it. Returns its length, or
    /// `None` when the lane is empty. Never waits. Safe against any peer: nothing reads the shared bytes after the
    /// copy.
    ///
    /// # Errors
    /// As [`Receiver::try_receive`].
    #[inline]
    pub fn try_receive_into(&mut self, buffer: &mut Vec<u8>) -> Result<Option<usize>> {
        match self.peek_fast() {
            Some(record) => Ok(Some(self.copy_out(record, buffer))),
            None => self.copy_slow(buffer, Deadline::Now),
        }
    }

    /// As [`Receiver::try_receive_into`], but waits for a message.
    ///
    /// # Errors
    /// As [`Receiver::receive`].
    #[inline]
    pub fn receive_into(&mut self, buffer: &mut Vec<u8>) -> Result<usize> {
        match self.peek_fast() {
            Some(record) => Ok(self.copy_out(record, buffer)),
            None => match self.peek_soon() {
                Some(record) => Ok(self.copy_out(record, buffer)),
                None => Ok(self.copy_slow(buffer, Deadline::Never)?.expect("without a deadline it does not pass")),
            },
        }
    }

    /// As [`Receiver::receive_into`], until `deadline`; `None` when it passes.
    ///
    /// # Errors
    /// As [`Receiver::receive`].
    #[inline]
    pub fn receive_into_until(&mut self, buffer: &mut Vec<u8>, deadline: Instant) -> Result<Option<usize>> {
        match self.peek_fast() {
            Some(record) => Ok(Some(self.copy_out(record, buffer))),
            None => self.copy_slow(buffer, Deadline::At(deadline)),
        }
    }

    /// All messages that are there, or as many as the caller takes. One store releases their space when the batch is
    /// dropped. `None` when the lane is empty. Never waits.
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
    #[inline(always)]
    pub fn try_receive_batch(&mut self) -> Result<Option<Batch<'_>>> {
        let is_there = self.peek_fast().is_some() || self.find_record(Deadline::Now)?.is_some();
        Ok(is_there.then(|| Batch::new(self)))
    }

    /// As [`Receiver::try_receive_batch`], but waits until there is a message.
    ///
    /// # Errors
    /// As [`Receiver::receive`].
    #[inline(always)]
    pub fn receive_batch(&mut self) -> Result<Batch<'_>> {
        if self.peek_fast().is_none() && self.peek_soon().is_none() {
            self.wait_for_message(Deadline::Never)?;
        }
        Ok(Batch::new(self))
    }

    /// The common wait: the next message comes soon. Polls for it some times before any call that costs more than the
    /// message. Not inlined, so that the loop is not unrolled into every caller.
    #[inline(never)]
    #[doc(hidden)]
    pub fn comes_soon(&mut self) -> bool {
        if self.endpoint.spin.first_looks() > 0 && !self.many {
            for _ in 0..self.distance.found_nothing(self.lanes.current.consumer.head().seq) {
                os::relax();
            }
        }
        for _ in 0..self.endpoint.spin.first_looks() {
            os::relax();
            if self.lanes.current.consumer.may_be_ready() {
                return true;
            }
        }
        false
    }

    #[cold]
    #[inline(never)]
    fn receive_slow(&mut self, deadline: Deadline) -> Result<Option<Message<'_>>> {
        Ok(self.find_record(deadline)?.map(|record| Message { receiver: self, record }))
    }

    #[cold]
    #[inline(never)]
    fn copy_slow(&mut self, buffer: &mut Vec<u8>, deadline: Deadline) -> Result<Option<usize>> {
        Ok(self.find_record(deadline)?.map(|record| self.copy_out(record, buffer)))
    }

    /// The next message, waiting for it as long as `deadline` states. Membership events are skipped.
    pub(crate) fn find_record(&mut self, deadline: Deadline) -> Result<Option<Record>> {
        loop {
            match self.find_slow(deadline)? {
                Some(Item::Record(record)) => return Ok(Some(record)),
                Some(_) => self.pass(),
                None => return Ok(None),
            }
        }
    }

    /// The next message or membership event, waiting for it as long as `deadline` states.
    pub(crate) fn find_slow(&mut self, deadline: Deadline) -> Result<Option<Item>> {
        let Some(deadline) = deadline.until() else { return self.peek() };
        // The header was polled just now. Each poll takes the ownership of its cache line from the sender, which may be
        // about to write there.
        let is_usual = self.endpoint.owner.is_current()
            && self.slow_path_reasons == 0
            && !self.sleeper.is_armed()
            && self.lanes.is_one();
        if !is_usual && let Some(item) = self.peek()? {
            return Ok(Some(item));
        }
        self.lanes.current.consumer.count_wait();
        while wait::wait(self, deadline)? {
            // A hostile sender may have withdrawn what the wait found.
            if let Some(item) = self.peek()? {
                return Ok(Some(item));
            }
        }
        Ok(None)
    }

    pub(crate) fn peek(&mut self) -> Result<Option<Item>> {
        if self.slow_path_reasons != 0 && !self.endpoint.owner.is_forked() {
            self.take_back();
            if std::mem::take(&mut self.is_quantum_over) {
                self.slow_path_reasons -= 1;
                self.quanta = self.quanta.wrapping_add(1);
                if self.registry.is_none() || self.quanta.is_multiple_of(QUANTA_PER_CHECK) {
                    self.find_lanes()?;
                }
                self.lanes.end_turn();
            }
        }
        if !self.endpoint.owner.is_current() {
            return Err(self.not_usable());
        }
        match self.peek_in_turn()? {
            Some(item) => {
                // Awake: the senders need not check further. The descriptor stays readable until the next `arm`.
                self.sleeper.disarm();
                Ok(Some(item))
            }
            None => self.peek_when_empty(),
        }
    }

    /// The next record of the lane that is served, or of the next one that has any; or a membership event.
    fn peek_in_turn(&mut self) -> Result<Option<Item>> {
        loop {
            let event = match self.lanes.peek() {
                Ok(Next::Record(record)) => return Ok(Some(Item::Record(record))),
                Ok(Next::Nothing) => return Ok(None),
                Ok(Next::Joined) => Item::Joined,
                Ok(Next::Left(departure)) => Item::Left(departure),
                Err(error) => return Err(self.failed(error)),
            };
            if self.reports_events {
                // Also for the next call, before anything else of that lane.
                if !std::mem::replace(&mut self.is_event_pending, true) {
                    self.slow_path_reasons += 1;
                }
                return Ok(Some(event));
            }
            self.pass();
        }
    }

    /// A membership event is delivered, or skipped.
    #[cold]
    pub(crate) fn pass(&mut self) {
        if std::mem::take(&mut self.is_event_pending) {
            self.slow_path_reasons -= 1;
        }
        if let Some(lane) = self.lanes.pass()
            && let Some(registry) = &mut self.registry
        {
            // An error concerns the pending handshakes: the next check reports it.
            let _ = registry.part_with(*lane, &self.endpoint.doorbells);
            self.check_newcomer();
        }
    }

    /// The fast path sees only messages: the arrival of a lane's sender is reported before them.
    fn check_newcomer(&mut self) {
        if !self.lanes.current.is_announced {
            self.end_quantum();
        }
    }

    /// All lanes are empty: the channel may have ended.
    fn peek_when_empty(&mut self) -> Result<Option<Item>> {
        // A caller may poll again and again without waiting: whether the senders are alive is checked at intervals.
        self.empties = self.empties.wrapping_add(1);
        if let Some(registry) = &self.registry {
            let due =
                registry.may_be_ready() || (self.empties.is_multiple_of(16) && self.lanes.current.link.is_check_due());
            return if due { self.peek_at_the_gate() } else { self.nothing_or_end() };
        }
        let closed = self.lanes.is_one()
            && self.lanes.current.is_sender_here()
            && self.lanes.current.consumer.has_producer_closed();
        // A departure that was noted while messages were still there is reported now.
        let due = self.empties.is_multiple_of(16) && self.lanes.current.link.is_check_overdue();
        let perhaps = closed || self.found_end().is_some() || (due && self.is_peer_known_gone()?);
        if !perhaps || self.look_for_ends()?.is_none() {
            return Ok(None);
        }
        // What was committed before the end is visible now. [close]
        match self.peek_in_turn()? {
            Some(record) => Ok(Some(record)),
            None => self.nothing_or_end(),
        }
    }

    /// As [`Receiver::peek_in_turn`], after a check of the registry.
    fn peek_at_the_gate(&mut self) -> Result<Option<Item>> {
        self.lanes.current.link.note_check();
        self.find_lanes()?;
        match self.peek_in_turn()? {
            Some(record) => {
                // A sender that joins or leaves may not have rung, and the descriptor stays readable until the next
                // `arm`.
                if self.sleeper.is_armed() {
                    self.endpoint.doorbells.local_wake().ring();
                }
                Ok(Some(record))
            }
            None => self.nothing_or_end(),
        }
    }

    /// No message waits: the channel may have ended.
    fn nothing_or_end(&mut self) -> Result<Option<Item>> {
        if self.found_end().is_none() {
            return Ok(None);
        }
        self.note_end();
        Err(self.not_usable())
    }

    /// Notes which senders have left; returns how the channel ended, if that was the last of them.
    fn look_for_ends(&mut self) -> Result<Option<Departure>> {
        if self.registry.is_some() {
            self.find_lanes()?;
            return Ok(self.found_end());
        }
        for lane in self.lanes.iter_mut() {
            lane.look_for_end(&self.endpoint.doorbells)?;
        }
        Ok(self.found_end())
    }

    /// As [`Receiver::look_for_ends`], by one system call for any number of lanes.
    fn ends_now(&mut self) -> Result<Option<Departure>> {
        if self.registry.is_some() {
            // Checked a moment ago; later departures ring.
            return Ok(self.found_end());
        }
        let one = self.lanes.is_one();
        if one || self.lanes.iter().any(|lane| lane.is_sender_here() && lane.consumer.has_producer_closed()) {
            return self.look_for_ends();
        }
        match self.endpoint.doorbells.is_any_gone()? {
            true => self.look_for_ends(),
            false => Ok(self.found_end()),
        }
    }

    /// How the channel ended: no sender is here, and the departure of one is not reported yet.
    fn found_end(&self) -> Option<Departure> {
        if let Some(registry) = &self.registry {
            return (self.lanes.count() == 0 && registry.is_shut()).then_some(Departure::Closed);
        }
        if self.lanes.iter().any(Lane::is_sender_here) {
            return None;
        }
        let ends = || self.lanes.iter().filter_map(|lane| lane.end);
        ends().find(|end| *end == Departure::PeerDied).or_else(|| ends().next())
    }

    /// Finds new lanes, for which a busy receiver is not rung; with a registry, also which senders have left.
    pub(crate) fn find_lanes(&mut self) -> Result<()> {
        if let Some(registry) = &mut self.registry {
            let attended = registry.attend(&mut self.lanes, &self.endpoint.doorbells, &mut self.endpoint.spin);
            // Also if a sender joined before an error.
            self.check_newcomer();
            return attended;
        }
        let Some(role) = &self.endpoint.role else { return Ok(()) };
        for number in self.lanes.count() as u32..role.directory.lanes()? {
            let mut lane = Lane::open(&role.directory, number, self.lanes.current.memory.receiver.clone())?;
            let met = lane.meet(&self.endpoint.doorbells, &mut self.endpoint.spin);
            // Kept even if its sender cannot be checked now: to open it again would look like another receiver.
            self.lanes.add(Box::new(lane));
            met?;
        }
        Ok(())
    }

    /// As [`Receiver::find_lanes`], and for new senders of old lanes.
    fn find_senders(&mut self) -> Result<()> {
        if self.registry.is_some() {
            return self.find_lanes();
        }
        let mut done = Ok(());
        for lane in self.lanes.iter_mut() {
            done = done.and(lane.find_sender(&self.endpoint.doorbells, &mut self.endpoint.spin));
        }
        // What could not be checked, for instance because descriptors are missing, is checked again: the ring that
        // announced it may be drained already.
        done.and_then(|()| self.find_lanes()).inspect_err(|_| self.endpoint.doorbells.local_wake().ring())
    }

    #[inline(always)]
    fn copy_out(&mut self, record: Record, buffer: &mut Vec<u8>) -> usize {
        let bytes = record.bytes as usize;
        if buffer.capacity() < bytes {
            grow(buffer, bytes);
        }
        // SAFETY: the lane checked that the record lies in the data; the vector has the space. The two do not overlap,
        // because no safe code has a vector over a lane. A peer that writes meanwhile changes bytes, for which any
        // value is valid.
        unsafe {
            self.lanes.current.consumer.copy_out(&record, buffer.as_mut_ptr());
            buffer.set_len(bytes);
        }
        self.release(&record);
        bytes
    }

    #[inline(always)]
    pub(crate) fn release(&mut self, record: &Record) {
        if record.descriptors != 0 {
            self.drop_descriptors(record);
        }
        if self.lanes.current.consumer.release(record) == Wake::Ring {
            self.lanes.current.link.ring_peer();
        }
        self.count_to_quantum(record);
    }

    #[inline(always)]
    pub(crate) fn count_to_quantum(&mut self, record: &Record) {
        if record.seq.is_multiple_of(QUANTUM) && self.many {
            self.end_quantum();
        }
    }

    /// The next message is searched in the next lane first.
    #[cold]
    #[inline(never)]
    pub(crate) fn end_quantum(&mut self) {
        if !self.is_quantum_over {
            self.is_quantum_over = true;
            self.slow_path_reasons += 1;
        }
    }

    /// Closes the descriptors of a message that the program did not take.
    #[cold]
    fn drop_descriptors(&mut self, record: &Record) {
        let _ = self.receive_descriptors(record.seq, record.descriptors);
    }

    /// The descriptors of the current lane's next message, which is not released yet.
    pub(crate) fn receive_descriptors(&mut self, seq: u32, count: u32) -> Result<Vec<ReceivedFd>> {
        let lane = &mut *self.lanes.current;
        let received = lane.take_descriptors(seq, count);
        if self.registry.is_some() && matches!(received, Err(Error::Corrupt(_))) {
            // It concerns only that sender, and must not delay others again.
            lane.end = Some(Departure::Corrupt);
        }
        received
    }

    /// Releases held messages that have been dropped.
    #[cold]
    fn take_back(&mut self) {
        while let Some((number, ticket)) = self.returned.tickets.pop() {
            self.slow_path_reasons -= 1;
            // A lane that has left needs nothing back.
            if let Some(lane) = self.lanes.find(number)
                && lane.consumer.release_held(ticket) == Wake::Ring
            {
                lane.link.ring_peer();
            }
        }
    }

    /// Why the handle is not usable. A path channel's receiver is usable again after that.
    #[cold]
    pub(crate) fn not_usable(&mut self) -> Error {
        let held = || self.lanes.iter().map(|lane| lane.consumer.held() as u64).sum();
        let error = self.endpoint.error(held);
        if self.endpoint.departure.is_some() && self.endpoint.is_path() && !self.endpoint.owner.is_forked() {
            self.go_on_alone();
        }
        error
    }

    #[cold]
    fn failed(&mut self, error: LaneError) -> Error {
        self.endpoint.owner.retire();
        error.into()
    }

    /// One of several senders has broken the rules: the lane's next quantum reports that.
    #[cold]
    pub(crate) fn failed_in_batch(&mut self, error: LaneError) -> Result<()> {
        if self.registry.is_none() {
            return Err(self.failed(error));
        }
        self.lanes.current.end = Some(Departure::Corrupt);
        Ok(())
    }

    /// The senders have left and their last message is received: the next call returns that, and, except for a path
    /// channel, each later one.
    fn note_end(&mut self) {
        self.endpoint.departure = self.found_end();
        self.endpoint.owner.retire();
    }

    /// The departure of a path channel's senders is reported: the lanes wait for the next ones.
    fn go_on_alone(&mut self) {
        for lane in self.lanes.iter_mut() {
            lane.end = None;
        }
        self.endpoint.reinstate();
    }

    /// For an event loop: makes the descriptor readable when a message comes, or the sender leaves. Returns true if
    /// there is no message now: return to the loop. Returns false if there is one: receive it. Does not wait.
    ///
    /// # Errors
    /// As [`Receiver::try_receive`]: here a loop detects that the sender has left.
    pub fn arm(&mut self) -> Result<bool> {
        if !self.endpoint.owner.is_current() {
            return Err(self.not_usable());
        }
        self.endpoint.doorbells.drain()?;
        failpoint("receiver arms: drained");
        self.find_senders()?;
        failpoint("receiver arms: looked");
        let armed = Side::arm(self)?;
        if armed && self.ends_now()?.is_some() {
            Side::disarm(self);
            return if self.look()? { Ok(false) } else { Side::end(self).map(|there| !there) };
        }
        if !armed || Side::needs_timed_wait(self) {
            // Readable exactly while a message waits, also for a caller that returns to the loop regardless; and as
            // long as the sender is not known to fence, so that its ring is not missed.
            self.endpoint.doorbells.local_wake().ring();
            failpoint("receiver arms: nudged");
        }
        Ok(armed)
    }

    /// Undoes [`Receiver::arm`].
    pub fn disarm(&mut self) {
        if self.endpoint.owner.is_current() {
            self.sleeper.disarm();
        }
    }

    /// After [`Error::PeerDied`]: waits for the sender's successor and offers it the lane, to continue after the last
    /// committed message. A receiver that had connected connects under the name again; one that a [`crate::Listener`]
    /// accepted accepts the successor there. On a path channel it waits until a sender is there, which receiving does
    /// not need.
    ///
    /// # Errors
    /// [`Error::Refused`] when the channel has not lost its peer (not on a path), or is one between threads;
    /// [`Error::Corrupt`], [`Error::Forked`], [`Error::System`]. It can be called again after an error.
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
        self.endpoint.check_owner()?;
        if self.endpoint.is_path() {
            return self.wait_for_peer(deadline);
        }
        if self.registry.is_some() {
            return Err(Error::Refused("a receiver that gathers takes in successors by itself".to_owned()));
        }
        if self.endpoint.departure.is_none()
            && !(self.endpoint.owner.is_current() && self.lanes.current.link.is_peer_gone()?)
        {
            return Err(Error::Refused("the sender is alive: there is nobody to succeed it".to_owned()));
        }
        let reconnect = self.endpoint.reconnect()?;
        let lane = &mut *self.lanes.current;
        // What the dead sender sent is still in its socket.
        lane.link.drain_descriptors()?;
        // A broken lane is no fault of a successor.
        lane.consumer.end_of_committed()?;
        if !reconnect.resume(lane, &self.endpoint.doorbells, deadline)? {
            return Ok(false);
        }
        self.endpoint.reinstate();
        self.lanes.current.end = None;
        Ok(true)
    }

    /// Finds the senders of a path channel that was just opened, and rings them.
    pub(crate) fn meet(&mut self) -> Result<()> {
        self.lanes.current.meet(&self.endpoint.doorbells, &mut self.endpoint.spin)?;
        self.find_lanes()
    }

    /// Waits until a path channel has a sender. Returns false at the deadline.
    pub(crate) fn wait_for_peer(&mut self, deadline: Option<Instant>) -> Result<bool> {
        loop {
            if self.endpoint.departure.is_some() || self.look_for_ends()?.is_some() {
                self.go_on_alone();
            } else if !self.endpoint.owner.is_current() {
                return Err(self.not_usable());
            }
            self.endpoint.doorbells.drain()?;
            failpoint("receiver waits for its peer: drained");
            self.find_senders()?;
            failpoint("receiver waits for its peer: looked");
            if self.lanes.iter().any(Lane::is_sender_here) {
                return Ok(true);
            }
            // Not determined by what ended the sleep: a doorbell that always rings must not keep this from returning.
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(false);
            }
            self.endpoint.doorbells.sleep(deadline)?;
        }
    }

    /// Writes what was released so far to the disk under a path channel, and waits for that, so that it is not
    /// delivered again even after a reboot. Takes as long as the disk does: milliseconds and more.
    ///
    /// # Errors
    /// [`Error::Refused`] for a channel that is not a path's; [`Error::System`], [`Error::Forked`].
    pub fn sync(&mut self) -> Result<()> {
        self.endpoint.role_to_sync()?;
        self.lanes
            .iter()
            .try_for_each(|lane| lane.memory.consumer.sync())
            .map_err(Error::system("syncing a consumer's page"))
    }

    /// Counters of this side.
    pub fn counters(&self) -> Counters {
        if self.endpoint.owner.is_forked() {
            return Counters::default();
        }
        let mut sum = self.registry.as_ref().map_or(Counters::default(), |registry| registry.parted());
        for lane in self.lanes.iter() {
            lane.add_to(&mut sum);
        }
        sum
    }

    /// The generation of the lane's producer that sent the last received message: 1 for the first, one more for each
    /// successor.
    pub fn generation(&self) -> u32 {
        self.lanes.current.consumer.generation()
    }

    /// Bytes of the lane.
    pub fn capacity(&self) -> u64 {
        self.lanes.current.consumer.capacity()
    }

    /// The largest message, in bytes.
    pub fn message_bytes_max(&self) -> u64 {
        self.lanes.current.consumer.message_bytes_max()
    }

    /// The sender's process; of several senders, that of the last received message. `None` while a path channel has no
    /// sender that this side knows of.
    pub fn peer(&self) -> Option<Peer> {
        self.lanes.current.link.peer()
    }

    /// Closes: the sender returns [`Error::Closed`] with the number of unreleased messages. Does not wait. Dropping
    /// does the same.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn close(self) -> Result<()> {
        self.endpoint.check_owner()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        if self.endpoint.owner.is_forked() {
            return;
        }
        if self.slow_path_reasons != 0 {
            self.take_back();
        }
        if let Some(registry) = &mut self.registry {
            registry.shut(&mut self.lanes);
        }
        self.lanes.iter_mut().for_each(|lane| lane.consumer.close());
        self.sleeper.close();
        // First the closed flags, then the ring, last the hang-up: a sender that detects one of the later finds the
        // earlier.
        for lane in self.lanes.iter() {
            lane.hang_up();
            failpoint("receiver closes: hung up");
        }
    }
}

impl AsRawFd for Receiver {
    /// As [`AsFd`], for runtimes that need the number.
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl AsFd for Receiver {
    /// The descriptor for an event loop: see [`Receiver::arm`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.endpoint.doorbells.as_fd()
    }
}

impl Side for Receiver {
    fn look(&mut self) -> Result<bool> {
        Ok(self.peek()?.is_some())
    }

    fn may_be_ready(&self) -> bool {
        self.has_messages()
    }

    fn arm(&mut self) -> Result<bool> {
        let mut everywhere = true;
        // A sender that joins later rings first.
        let do_fence = || self.lanes.iter().all(|lane| !lane.is_sender_here() || lane.consumer.is_producer_fencing());
        self.sleeper.arm(|| everywhere = do_fence() || os::membarrier::barrier());
        if !everywhere {
            self.sleeper.request_fencing();
        }
        let there = self.look();
        if !matches!(there, Ok(false)) {
            self.sleeper.disarm();
        } else {
            self.lanes.current.consumer.count_sleep();
        }
        Ok(!there?)
    }

    fn disarm(&mut self) {
        self.sleeper.disarm();
    }

    fn end(&mut self) -> Result<bool> {
        if self.look_for_ends()?.is_none() {
            return Ok(false);
        }
        // What the last of them committed before it left. [close]
        if self.peek_in_turn()?.is_some() {
            return Ok(true);
        }
        self.note_end();
        Err(self.not_usable())
    }

    fn needs_timed_wait(&self) -> bool {
        self.lanes.iter().any(|lane| lane.is_sender_here() && lane.consumer.needs_timed_wait(&self.sleeper))
    }

    fn sleep(&mut self, deadline: Option<Instant>) -> Result<Ready> {
        self.endpoint.doorbells.sleep(deadline)
    }

    fn rung(&mut self, alone: bool) -> Result<bool> {
        self.endpoint.doorbells.drain()?;
        failpoint("receiver rung: drained");
        // A sender that joins or leaves reports that itself, until it is processed.
        if alone && self.registry.as_ref().is_some_and(|registry| !registry.may_be_ready()) {
            return Ok(false);
        }
        self.find_senders()?;
        failpoint("receiver rung: looked");
        // A sender may have come, sent everything, and left since the last check.
        if self.found_end().is_some() { Side::end(self) } else { Ok(false) }
    }

    fn is_peer_known_gone(&mut self) -> Result<bool> {
        if !self.lanes.current.link.is_check_due() {
            return Ok(false);
        }
        self.find_senders()?;
        if self.registry.is_some() {
            self.lanes.current.link.note_check();
            return Ok(self.found_end().is_some());
        }
        // One system call for any number of lanes.
        let gone = self.lanes.current.link.is_peer_gone()? || self.found_end().is_some();
        Ok(gone || (!self.lanes.is_one() && self.endpoint.doorbells.is_any_gone()?))
    }

    fn spin(&mut self) -> &mut Spin {
        &mut self.endpoint.spin
    }
}
