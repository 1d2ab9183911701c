//! The receiving endpoint of a channel. `receiver/message.rs` has the messages and events that it returns.

mod ahead;
mod message;
mod messages;

pub use ahead::Ahead;
pub use message::{Batch, Event, Held, Item, Member, Message};
pub use messages::Messages;

use crate::backoff::Backoff;
use crate::counters::Counters;
use crate::endpoint::{Departure, Endpoint};
use crate::error::{Error, Result};
use crate::lanes::{Lane, Lanes, Next, Polls, QUANTUM, ReceiverParts};
use crate::lockstep::Lockstep;
use crate::opening::{Resume, Resuming, Steps, Waiter, in_call};
#[cfg(doc)]
use crate::options::Options;
use crate::registry::Registry;
use crate::role::RoleClaim;
use crate::settings::Settings;
use crate::traceparent::Traceparent;
use crate::wait::{self, Armed, BUSY_POLL, Deadline, Polled, Side, Spin};
use crossbeam_queue::SegQueue;
use message::Returned;
use pelton_lane::{LaneError, LastRing, Record, Sleeper, Wake, failpoint};
use pelton_os as os;
use pelton_os::Peer;
use pelton_os::{Ready, ReceivedFd};
use probe::probe;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

/// The receiving endpoint of a channel. `Send`, not `Sync`: one thread at a time.
///
/// Messages are received in place ([`Receiver::receive`]: no copy, the space is released when the [`Message`] is
/// dropped), copied out ([`Receiver::receive_into`]: safe against a sender that still writes), in batches
/// ([`Receiver::try_receive_batch`]), or held ([`Message::hold`]).
///
/// [`Receiver::receive`] has the short name because it does not copy, the purpose of a lane, and because processes of
/// one program trust their sender. Receiving in place is sound if the sender keeps the protocol. A sender that writes
/// after its commit can change the message between the receiver's check of a value and its use. To Rust that is a data
/// race, as with any file mapped into memory. Receive by copy from a sender that you do not trust, such as one of
/// another user. [`Receiver::receive_into`] copies into a buffer that you keep; [`Receiver::receive_vec`] and
/// [`Receiver::messages`] copy into a new one. After the copy, nothing reads the shared bytes again.
///
/// Dropping it closes the channel: the sender returns [`Error::Closed`] with the number of unreleased messages. A path
/// channel's role is free once the last [`Held`] message is dropped too.
#[derive(Debug)]
pub struct Receiver {
    pub(crate) lanes: Lanes,
    pub(crate) sleeper: Sleeper,
    pub(crate) endpoint: Endpoint<dyn Reconnect>,
    /// The number of reasons for the slow path: held messages, which the program may drop on any thread; the end of a
    /// quantum; a pending membership event.
    pub(crate) slow_path_reasons: usize,
    pub(crate) is_quantum_over: bool,
    /// Whether there are, or may be, several lanes.
    pub(crate) many: bool,
    /// For a receiver of several senders: how they join and leave, and whether the receiver reports that.
    pub(crate) registry: Option<Box<Registry>>,
    reports_events: bool,
    /// Whether it has returned a membership event that [`Receiver::pass`] has not ended yet.
    is_event_pending: bool,
    /// The number of quanta so far: the registry is checked at intervals of it.
    quanta: u32,
    /// [`Lanes::progress`] when the registry was checked because of that.
    checked: u64,
    returned: Arc<Returned>,
    /// `None` in a receiver of requests: see decision 0021.
    backoff: Option<Backoff>,
    lockstep: Lockstep,
    empties: u32,
    /// The record of the [`Message`] that lives, or of the last one: decision 0049. Only a message reads it.
    pub(crate) found: Record,
}

/// Quanta between two checks of the registry, while the receiver always has messages.
const QUANTA_PER_CHECK: u32 = 16;

/// How a receiver reaches a successor of its sender.
pub(crate) trait Reconnect: Send + Sync {
    /// Offers the receiver's lane to a successor of its sender. Returns false at the deadline. Dropping the future
    /// cancels, and leaves the lane as it was.
    fn resume<'a>(&'a self, lane: &'a mut Lane, resuming: Resume<'a>) -> Steps<'a, bool>;
}

// Not a supertrait: each implementation's, with those of all its fields, would be in every program.
impl std::fmt::Debug for dyn Reconnect {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Reconnect")
    }
}

/// Enlarges the buffer to `bytes` and discards its contents; outside of the fast path.
#[cold]
#[inline(never)]
fn grow(buffer: &mut Vec<u8>, bytes: usize) {
    buffer.clear();
    buffer.reserve(bytes);
}

impl Receiver {
    pub(crate) fn new(parts: ReceiverParts, options: &Settings) -> Result<Receiver> {
        let ReceiverParts { lane, sleeper, doorbells } = parts;
        let endpoint = Endpoint::new(doorbells, options.wait, lane.link.peer())?;
        let local_wake = endpoint.doorbells.local_wake().clone();
        let returned = Arc::new(Returned { tickets: SegQueue::new(), local_wake, owner: endpoint.owner, role: None });
        Ok(Receiver {
            lanes: Lanes::of_one(lane),
            registry: None,
            reports_events: false,
            is_event_pending: false,
            quanta: 0,
            checked: 0,
            sleeper,
            endpoint,
            slow_path_reasons: 0,
            is_quantum_over: false,
            many: false,
            returned,
            backoff: Some(Backoff::new()),
            lockstep: Lockstep::default(),
            empties: 0,
            found: Record::placeholder(0),
        })
    }

    /// Gives the receiver its role in a path channel.
    pub(crate) fn with_role(mut self, role: RoleClaim) -> Receiver {
        self.many = role.directory.lanes_max() > 1;
        Arc::get_mut(&mut self.returned).expect("a new receiver holds no message").role = Some(role.lock.clone());
        self.endpoint.role = Some(role);
        self
    }

    /// Creates a receiver of several senders, which join by `registry`. `parts` belong to the placeholder: a lane that
    /// never has a sender.
    pub(crate) fn gathering(parts: ReceiverParts, options: &Settings, registry: Registry) -> Result<Receiver> {
        let mut receiver = Receiver::new(parts, options)?;
        receiver.many = true;
        // A request's answer goes out before the next request comes: a pause would only delay it.
        if registry.replies() {
            receiver.backoff = None;
        }
        receiver.registry = Some(Box::new(registry));
        receiver.reports_events = options.membership_events;
        receiver.lanes.let_leave();
        Ok(receiver)
    }

    /// Returns the next message in place, or `None` when the lane is empty. Never waits.
    ///
    /// # Errors
    /// After the last message: [`Error::Closed`] when the sender has closed, [`Error::PeerDied`] when it died; then
    /// `resume` may continue with a successor. A path channel returns it once, and then continues with the next sender.
    /// [`Error::Corrupt`], [`Error::Forked`].
    #[inline(always)]
    pub fn try_receive(&mut self) -> Result<Option<Message<'_>>> {
        self.receive_until(Deadline::Now)
    }

    /// Returns the next message in place. Waits as [`crate::Wait`] of the options determines, without a limit.
    ///
    /// # Errors
    /// As [`Receiver::try_receive`]. A wait ends immediately when the sender leaves.
    #[inline(always)]
    pub fn receive(&mut self) -> Result<Message<'_>> {
        match self.peek_fast() {
            Some(record) => self.found = record,
            None => match self.peek_soon() {
                Some(record) => self.found = record,
                None => assert!(self.receive_slow(Deadline::Never)?, "without a deadline it does not pass"),
            },
        }
        Ok(Message { receiver: self })
    }

    /// As [`Receiver::receive`], until `deadline` on the monotonic clock; `None` when it passes.
    ///
    /// # Errors
    /// As [`Receiver::receive`].
    #[inline(always)]
    pub fn receive_until(&mut self, deadline: impl Into<Deadline>) -> Result<Option<Message<'_>>> {
        match self.peek_fast() {
            Some(record) => self.found = record,
            None if self.receive_slow(deadline.into())? => {}
            None => return Ok(None),
        }
        Ok(Some(Message { receiver: self }))
    }

    /// As [`Receiver::try_receive`]. With [`Options::membership_events`], also returns which senders join and leave.
    ///
    /// # Errors
    /// As [`Receiver::try_receive`].
    pub fn try_receive_event(&mut self) -> Result<Option<Event<'_>>> {
        Ok(self.find(Deadline::Now)?.map(|item| self.event(item)))
    }

    /// As [`Receiver::receive`]. With [`Options::membership_events`], also returns which senders join and leave.
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
    pub fn receive_event_until(&mut self, deadline: impl Into<Deadline>) -> Result<Option<Event<'_>>> {
        Ok(self.find(deadline.into())?.map(|item| self.event(item)))
    }

    fn event(&mut self, item: Item) -> Event<'_> {
        let member = Member { lane: self.lanes.current.number, peer: self.lanes.current.link.peer() };
        match item {
            Item::Record(record) => Event::Message(self.message(record)),
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
        match self.copy_fast(buffer, false) {
            Some(bytes) => Ok(Some(bytes)),
            None => self.copy_slow(buffer, Deadline::Now),
        }
    }

    /// As [`Receiver::try_receive_into`], but waits for a message.
    ///
    /// # Errors
    /// As [`Receiver::receive`].
    #[inline(always)]
    pub fn receive_into(&mut self, buffer: &mut Vec<u8>) -> Result<usize> {
        match self.copy_fast(buffer, true) {
            Some(bytes) => Ok(bytes),
            None => Ok(self.copy_slow(buffer, Deadline::Never)?.expect("without a deadline it does not pass")),
        }
    }

    /// As [`Receiver::receive_into`], until `deadline`; `None` when it passes.
    ///
    /// # Errors
    /// As [`Receiver::receive`].
    #[inline]
    pub fn receive_into_until(&mut self, buffer: &mut Vec<u8>, deadline: impl Into<Deadline>) -> Result<Option<usize>> {
        match self.copy_fast(buffer, false) {
            Some(bytes) => Ok(Some(bytes)),
            None => self.copy_slow(buffer, deadline.into()),
        }
    }

    /// As [`Message::traceparent`], of the message that this receiver copied out last:
    /// [`Receiver::receive_into`], [`Receiver::receive_vec`]. Call it before the next function that receives, polls or
    /// arms: each of these may go on to another lane.
    ///
    /// ```
    /// # fn main() -> pelton::Result<()> {
    /// let (mut sender, mut receiver) = pelton::Options::new().traced(true).threads()?;
    /// let text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    /// let span = pelton::Traceparent::parse(text).unwrap();
    /// let _ = sender.send_traced(b"hello", span, pelton::Deadline::Never)?;
    /// assert_eq!(receiver.receive_vec()?, b"hello");
    /// assert_eq!(receiver.traceparent(), Some(span));
    /// # Ok(())
    /// # }
    /// ```
    pub fn traceparent(&self) -> Option<Traceparent> {
        self.traceparent_of(self.lanes.current.consumer.cursor().seq_before())
    }

    /// That of message `seq` of the current lane, which was peeked or taken last.
    #[doc(hidden)]
    pub fn traceparent_of(&self, seq: u32) -> Option<Traceparent> {
        Traceparent::decode(self.lanes.current.consumer.trace_of(seq)?)
    }

    /// Returns a batch of the messages in the lane; the caller takes as many as it needs. Dropping the batch releases
    /// their space by one store. Returns `None` when the lane is empty. Never waits.
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
        let has_message = self.peek_fast().is_some() || self.find_record(Deadline::Now)?.is_some();
        Ok(has_message.then(|| Batch::new(self)))
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

    /// As [`Receiver::receive_batch`], until `deadline`; `None` when it passes.
    ///
    /// # Errors
    /// As [`Receiver::receive`].
    #[inline]
    pub fn receive_batch_until(&mut self, deadline: impl Into<Deadline>) -> Result<Option<Batch<'_>>> {
        let has_message = self.peek_fast().is_some() || self.find_record(deadline.into())?.is_some();
        Ok(has_message.then(|| Batch::new(self)))
    }

    /// Polls several times for the next message, before any call that costs more than a message: most waits end here.
    /// Not inlined, so that the compiler does not unroll the loop into every caller.
    #[inline(never)]
    #[doc(hidden)]
    pub fn comes_soon(&mut self) -> bool {
        if self.lanes.is_any_busy() {
            return false;
        }
        if self.endpoint.spin.first_polls() > 0
            && let Some(backoff) = &mut self.backoff
        {
            let offset = if self.many { 0 } else { self.lanes.current.consumer.offset() };
            for _ in 0..backoff.next_pauses(self.lanes.progress() as u32, offset) {
                os::relax();
            }
        }
        for _ in 0..self.endpoint.spin.first_polls() {
            os::relax();
            if self.lanes.current.consumer.may_be_ready() {
                return true;
            }
        }
        false
    }

    /// Whether it has found a message until `deadline`, which is then `found`.
    #[cold]
    #[inline(never)]
    fn receive_slow(&mut self, deadline: Deadline) -> Result<bool> {
        let Some(record) = self.find_record(deadline)? else { return Ok(false) };
        self.found = record;
        Ok(true)
    }

    #[cold]
    #[inline(never)]
    fn copy_slow(&mut self, buffer: &mut Vec<u8>, deadline: Deadline) -> Result<Option<usize>> {
        Ok(self.find_record(deadline)?.map(|record| self.copy_out(record, buffer)))
    }

    /// Returns the next message. Waits until `deadline`. Skips membership events.
    #[doc(hidden)]
    pub fn find_record(&mut self, deadline: Deadline) -> Result<Option<Record>> {
        loop {
            match self.find_slow(deadline)? {
                Some(Item::Record(record)) => return Ok(Some(record)),
                Some(_) => self.pass(),
                None => return Ok(None),
            }
        }
    }

    /// Returns the next message or membership event. Waits until `deadline`.
    pub(crate) fn find_slow(&mut self, deadline: Deadline) -> Result<Option<Item>> {
        let page = self.lanes.current.consumer.consumer_page();
        probe!(pelton, receive, page.messages(), page.bytes());
        let Some(deadline) = deadline.until() else { return self.peek(Polls::All) };
        // One that has passed is no wait, so it has no part in the policy of waits.
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return self.peek(Polls::All);
        }
        // The fast path has just polled the header. Another poll would take the ownership of its cache line from the
        // sender, which may be about to write there. Polls a few lanes only, if the wait then begins with a busy-poll.
        let polls = if self.endpoint.spin.first_polls() > 0 { Polls::InTurn } else { Polls::All };
        if !(self.is_usual() && self.lanes.is_one())
            && let Some(item) = self.peek(polls)?
        {
            return Ok(Some(item));
        }
        self.lanes.current.consumer.count_wait();
        // A yield may take a time slice, so none with a deadline.
        if deadline.is_none() && self.must_yield() {
            let begun = Instant::now();
            std::thread::yield_now();
            let found = self.peek(Polls::All)?;
            self.lockstep.has_yielded(begun.elapsed(), found.is_some());
            if found.is_some() {
                return Ok(found);
            }
        }
        while wait::wait(self, deadline)? {
            // A hostile sender may have cleared the header that ended the wait.
            if let Some(item) = self.peek(Polls::All)? {
                return Ok(Some(item));
            }
        }
        Ok(None)
    }

    /// Whether to let the sender run before this wait, because both sides share a processor.
    fn must_yield(&mut self) -> bool {
        let consumer = &self.lanes.current.consumer;
        self.lanes.is_one()
            && self.endpoint.spin.shares_processor_with(consumer.producer_page().last_ring())
            && self.lockstep.must_yield(consumer.head().seq, consumer.taken_bytes())
    }

    pub(crate) fn peek(&mut self, polls: Polls) -> Result<Option<Item>> {
        if self.slow_path_reasons != 0 && !self.endpoint.owner.is_forked() {
            self.release_returned();
            if std::mem::take(&mut self.is_quantum_over) {
                self.slow_path_reasons -= 1;
                self.quanta = self.quanta.wrapping_add(1);
                if self.registry.is_none() || self.quanta.is_multiple_of(QUANTA_PER_CHECK) {
                    self.find_lanes()?;
                }
                self.lanes.end_quantum();
            }
        }
        // No quantum ends while each of many lanes has a message at a time.
        let progress = self.lanes.progress();
        if progress.wrapping_sub(self.checked) >= u64::from(QUANTA_PER_CHECK * QUANTUM)
            && self.registry.is_some()
            && !self.endpoint.owner.is_forked()
        {
            self.checked = progress;
            self.find_lanes()?;
        }
        if !self.endpoint.owner.is_current() {
            return Err(self.not_usable());
        }
        match self.peek_lanes(polls)? {
            Some(item) => {
                // This side is awake, so the senders need not ring. The descriptor stays readable until the next `arm`.
                self.sleeper.disarm();
                Ok(Some(item))
            }
            None => self.peek_when_empty(),
        }
    }

    /// Returns the next record of the current lane, or of the next lane that has one; or a membership event.
    fn peek_lanes(&mut self, polls: Polls) -> Result<Option<Item>> {
        loop {
            let event = match self.lanes.peek(polls) {
                Ok(Next::Record(record)) => return Ok(Some(Item::Record(record))),
                Ok(Next::Nothing) => return Ok(None),
                Ok(Next::Joined) => Item::Joined,
                Ok(Next::Left(departure)) => Item::Left(departure),
                Err(error) => return Err(self.failed(error)),
            };
            if self.reports_events {
                // Until `pass`, each call returns this event, before anything else of that lane.
                if !std::mem::replace(&mut self.is_event_pending, true) {
                    self.slow_path_reasons += 1;
                }
                return Ok(Some(event));
            }
            self.pass();
        }
    }

    /// Ends a membership event that was delivered or skipped.
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
            self.check_unannounced();
        }
    }

    /// Ends the quantum if the arrival of the lane's sender is not reported yet: the fast path returns only messages.
    fn check_unannounced(&mut self) {
        if !self.lanes.current.is_announced {
            self.end_quantum();
        }
    }

    /// Checks for the end of the channel, after no message was found. Polls all lanes before it reports an end.
    fn peek_when_empty(&mut self) -> Result<Option<Item>> {
        // A caller may poll for ever without waiting. So this checks at intervals whether the senders are alive.
        self.empties = self.empties.wrapping_add(1);
        if let Some(registry) = &self.registry {
            let due =
                registry.may_be_ready() || (self.empties.is_multiple_of(16) && self.lanes.current.link.is_check_due());
            return if due { self.check_registry_and_peek() } else { self.none_or_end() };
        }
        let closed =
            self.lanes.is_one() && self.lanes.current.has_sender() && self.lanes.current.consumer.has_producer_closed();
        // Reports a departure now if it was noted before the caller received the last message.
        let due = self.empties.is_multiple_of(16) && self.lanes.current.link.is_check_overdue();
        let may_have_ended = closed || self.found_end().is_some() || (due && self.is_peer_known_gone()?);
        if !may_have_ended || self.check_ends()?.is_none() {
            return Ok(None);
        }
        // All messages that were committed before the end are visible now. [close]
        match self.peek_lanes(Polls::All)? {
            Some(record) => Ok(Some(record)),
            None => self.none_or_end(),
        }
    }

    /// As [`Receiver::peek_lanes`], but first checks the registry.
    fn check_registry_and_peek(&mut self) -> Result<Option<Item>> {
        self.lanes.current.link.note_check();
        self.find_lanes()?;
        match self.peek_lanes(Polls::All)? {
            Some(record) => {
                // A sender that joins or leaves may not have rung. This ring keeps the descriptor readable until the
                // next `arm`.
                if self.sleeper.is_armed() {
                    self.endpoint.doorbells.local_wake().ring();
                }
                Ok(Some(record))
            }
            None => self.none_or_end(),
        }
    }

    /// Returns nothing, or the error if the channel has ended.
    fn none_or_end(&mut self) -> Result<Option<Item>> {
        if self.found_end().is_none() {
            return Ok(None);
        }
        self.note_end();
        Err(self.not_usable())
    }

    /// Notes which senders have left. Returns how the channel ended, if the last one has left.
    fn check_ends(&mut self) -> Result<Option<Departure>> {
        if self.registry.is_some() {
            self.find_lanes()?;
            return Ok(self.found_end());
        }
        for lane in self.lanes.iter_mut() {
            lane.check_end(&self.endpoint.doorbells)?;
        }
        Ok(self.found_end())
    }

    /// As [`Receiver::check_ends`], by one system call for any number of lanes.
    fn ends_now(&mut self) -> Result<Option<Departure>> {
        if self.registry.is_some() {
            // `find_senders` has just checked it. Senders that leave later ring.
            return Ok(self.found_end());
        }
        let one = self.lanes.is_one();
        if one || self.lanes.iter().any(|lane| lane.has_sender() && lane.consumer.has_producer_closed()) {
            return self.check_ends();
        }
        match self.endpoint.doorbells.is_any_gone()? {
            true => self.check_ends(),
            false => Ok(self.found_end()),
        }
    }

    /// Returns how the channel ended, if it has no sender and the departure of the last one is not reported yet.
    fn found_end(&self) -> Option<Departure> {
        if let Some(registry) = &self.registry {
            return (self.lanes.count() == 0 && registry.is_shut()).then_some(Departure::Closed);
        }
        if self.lanes.iter().any(Lane::has_sender) {
            return None;
        }
        let ends = || self.lanes.iter().filter_map(|lane| lane.end);
        ends().find(|end| *end == Departure::PeerDied).or_else(|| ends().next())
    }

    /// Finds new lanes: their senders do not ring a busy receiver. With a registry, also notes which senders have left.
    pub(crate) fn find_lanes(&mut self) -> Result<()> {
        if let Some(registry) = &mut self.registry {
            let attended = registry.attend(&mut self.lanes, &self.endpoint.doorbells, &mut self.endpoint.spin);
            // Also if a sender joined before an error.
            self.check_unannounced();
            return attended;
        }
        let Some(role) = &self.endpoint.role else { return Ok(()) };
        for number in self.lanes.count() as u32..role.directory.lanes()? {
            let mut lane = Lane::open(&role.directory, number, self.lanes.current.memory.receiver.clone())?;
            let found = lane.find_and_ring_sender(&self.endpoint.doorbells, &mut self.endpoint.spin);
            // Keeps the lane even if the check of its sender fails: a second open would begin another generation.
            self.lanes.add(Box::new(lane));
            found?;
        }
        Ok(())
    }

    /// As [`Receiver::find_lanes`]; also finds new senders of old lanes.
    fn find_senders(&mut self) -> Result<()> {
        if self.registry.is_some() {
            return self.find_lanes();
        }
        let mut done = Ok(());
        for lane in self.lanes.iter_mut() {
            done = done.and(lane.find_sender(&self.endpoint.doorbells, &mut self.endpoint.spin));
        }
        // A check may fail, for instance without a free descriptor. Then the local wake causes another one, because the
        // sender's ring may be drained already.
        done.and_then(|()| self.find_lanes()).inspect_err(|_| self.endpoint.doorbells.local_wake().ring())
    }

    /// Whether the fast path may be used: the handle is in use, no reason for the slow path exists, and the receiver
    /// does not sleep.
    #[inline(always)]
    pub(crate) fn is_usual(&self) -> bool {
        self.endpoint.owner.is_current() && self.slow_path_reasons == 0 && !self.sleeper.is_armed()
    }

    /// Copies the next message into `buffer` in the common case; if `may_poll`, also if it arrives soon.
    #[inline(always)]
    fn copy_fast(&mut self, buffer: &mut Vec<u8>, may_poll: bool) -> Option<usize> {
        let mut copy = |receiver: &mut Receiver| {
            let target = |bytes| {
                if buffer.capacity() < bytes {
                    grow(buffer, bytes);
                }
                NonNull::new(buffer.as_mut_ptr())
            };
            // SAFETY: the vector has enough capacity, and is not in a lane, because no safe code has a vector over one.
            // If the peer writes meanwhile, it changes only bytes, and every value of a byte is valid.
            unsafe {
                let (bytes, must_check) = receiver.copy_before_check(target)?;
                buffer.set_len(bytes);
                Some((bytes, must_check))
            }
        };
        let (bytes, must_check) = match copy(self) {
            None if may_poll && self.slow_path_reasons == 0 && self.comes_soon() => copy(self)?,
            copied => copied?,
        };
        if must_check {
            self.check_sender();
        }
        Some(bytes)
    }

    fn copy_out(&mut self, record: Record, buffer: &mut Vec<u8>) -> usize {
        let bytes = record.bytes as usize;
        if buffer.capacity() < bytes {
            grow(buffer, bytes);
        }
        // SAFETY: as in `copy_fast`; the lane checked that the record lies in the data.
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
            self.drop_descriptors(record.seq, record.descriptors);
        }
        let wake = self.lanes.current.consumer.release(record);
        self.released(record.seq, wake);
    }

    /// After the release of message `seq`: whether the sender may sleep, as the lane has found, or the lane's quantum
    /// is over.
    #[inline(always)]
    pub(crate) fn must_check_sender(&self, seq: u32, lane_must_check: bool) -> bool {
        lane_must_check || (self.many && seq.is_multiple_of(QUANTUM))
    }

    /// After a release, if [`Receiver::must_check_sender`]: rings the sender if it waits, and ends the lane's quantum
    /// if it is over.
    #[cold]
    #[inline(never)]
    #[doc(hidden)]
    pub fn check_sender(&mut self) {
        let consumer = &mut self.lanes.current.consumer;
        let wake = consumer.check_peer();
        let seq = consumer.cursor().seq_before();
        self.released(seq, wake);
    }

    /// Call this after the release of each message.
    #[inline(always)]
    fn released(&mut self, seq: u32, wake: Wake) {
        if wake == Wake::Ring {
            self.lanes.current.wake_sender();
        }
        self.count_to_quantum(seq);
    }

    /// As [`Receiver::release`], of `found`. Apart from that, so that nothing copies the record.
    #[inline(always)]
    pub(crate) fn release_found(&mut self) {
        let Record { seq, descriptors, .. } = self.found;
        if descriptors != 0 {
            self.drop_descriptors(seq, descriptors);
        }
        let wake = self.lanes.current.consumer.release(&self.found);
        self.released(seq, wake);
    }

    #[inline(always)]
    pub(crate) fn count_to_quantum(&mut self, seq: u32) {
        if self.many && seq.is_multiple_of(QUANTUM) {
            self.end_quantum();
        }
    }

    /// Ends the current lane's quantum: the next call continues with the next lane.
    #[cold]
    #[inline(never)]
    pub(crate) fn end_quantum(&mut self) {
        if !self.is_quantum_over {
            self.is_quantum_over = true;
            self.slow_path_reasons += 1;
        }
    }

    /// Closes the descriptors of a message, which the program did not take.
    #[cold]
    fn drop_descriptors(&mut self, seq: u32, count: u32) {
        let _ = self.receive_descriptors(seq, count);
    }

    /// Receives the descriptors of the current lane's next message, which is not released yet.
    pub(crate) fn receive_descriptors(&mut self, seq: u32, count: u32) -> Result<Vec<ReceivedFd>> {
        let lane = &mut *self.lanes.current;
        let received = lane.take_descriptors(seq, count);
        if self.registry.is_some() && matches!(received, Err(Error::Corrupt(_))) {
            // Ends only that sender's lane, so that it cannot delay the others again.
            lane.end = Some(Departure::Corrupt);
        }
        received
    }

    /// Releases held messages that have been dropped.
    #[cold]
    fn release_returned(&mut self) {
        while let Some((number, ticket)) = self.returned.tickets.pop() {
            self.slow_path_reasons -= 1;
            // A lane whose sender has left is closed: its space needs no release.
            if let Some(lane) = self.lanes.find(number)
                && lane.consumer.release_held(ticket) == Wake::Ring
            {
                lane.wake_sender();
            }
        }
    }

    /// Returns the reason why the handle is not usable. A path channel's receiver is usable again after that.
    #[cold]
    pub(crate) fn not_usable(&mut self) -> Error {
        let held = || self.lanes.iter().map(|lane| lane.consumer.held() as u64).sum();
        let error = self.endpoint.error(held);
        if self.endpoint.departure.is_some() && self.endpoint.is_path() && !self.endpoint.owner.is_forked() {
            self.continue_without_peer();
        }
        error
    }

    #[cold]
    fn failed(&mut self, error: LaneError) -> Error {
        self.endpoint.owner.retire();
        error.into()
    }

    /// Notes that one of several senders has violated the protocol: the next quantum of its lane reports that.
    #[cold]
    pub(crate) fn failed_in_batch(&mut self, error: LaneError) -> Result<()> {
        if self.registry.is_none() {
            return Err(self.failed(error));
        }
        self.lanes.current.end = Some(Departure::Corrupt);
        Ok(())
    }

    /// Notes that the senders have left and that their last message was received. The next call returns that as an
    /// error; later calls too, except on a path channel.
    fn note_end(&mut self) {
        self.endpoint.departure = self.found_end();
        self.endpoint.owner.retire();
    }

    /// Prepares the lanes of a path channel for new senders, after the departure of the last ones was reported.
    fn continue_without_peer(&mut self) {
        for lane in self.lanes.iter_mut() {
            lane.end = None;
        }
        self.endpoint.reinstate();
    }

    /// For an event loop: makes the descriptor readable when a message arrives, or the sender leaves. Does not
    /// wait.
    ///
    /// # Errors
    /// As [`Receiver::try_receive`]: here a loop detects that the sender has left.
    pub fn arm(&mut self) -> Result<Armed> {
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
            let is_ready = self.poll()? || Side::end(self)?;
            return Ok(Armed::waiting_if(!is_ready));
        }
        if !armed || Side::needs_timed_wait(self) {
            // The descriptor is readable while the lane has a message, even if the caller returns to the loop
            // regardless. It is also readable until the sender is known to fence, because its ring may be missed.
            self.endpoint.doorbells.local_wake().ring();
            failpoint("receiver arms: nudged");
        }
        Ok(Armed::waiting_if(armed))
    }

    /// For an event loop, before [`Receiver::arm`]: polls for a message for some microseconds, and returns whether
    /// there is one. To arm and sleep costs more, if the next message comes soon. Polls for less if that was useless
    /// lately. With one processor it yields once instead. Neither sleeps nor arms.
    ///
    /// ```
    /// # fn main() -> pelton::Result<()> {
    /// let (mut sender, mut receiver) = pelton::Options::new().threads()?;
    /// assert!(!receiver.busy_poll()?);
    /// sender.send(b"hello")?;
    /// assert!(receiver.busy_poll()?);
    /// assert_eq!(receiver.try_receive()?.as_deref(), Some(&b"hello"[..]));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Receiver::try_receive`].
    pub fn busy_poll(&mut self) -> Result<bool> {
        wait::busy_poll(self, BUSY_POLL, 0)
    }

    /// Undoes [`Receiver::arm`].
    pub fn disarm(&mut self) {
        if self.endpoint.owner.is_current() {
            self.sleeper.disarm();
        }
    }

    /// After [`Error::PeerDied`]: waits for the sender's successor and offers it the lane, to continue after the last
    /// committed message. If this receiver had connected, it connects under the same name again. If a
    /// [`crate::Listener`] had accepted it, that listener accepts the successor. On a path channel, `resume` waits for
    /// a sender, or a message, as a sender may have left again; receiving needs neither.
    ///
    /// # Errors
    /// [`Error::Refused`] between threads, and while the channel has not lost its peer (except on a path);
    /// [`Error::Corrupt`], [`Error::Forked`], [`Error::System`]. You can call it again after an error.
    pub fn resume(&mut self) -> Result<()> {
        in_call(self.resumed(None, &Waiter::Thread)).map(|_| ())
    }

    /// As [`Receiver::resume`], until `deadline`; false when it passes.
    ///
    /// # Errors
    /// As [`Receiver::resume`].
    pub fn resume_until(&mut self, deadline: impl Into<Deadline>) -> Result<bool> {
        in_call(self.resumed(deadline.into().instant(), &Waiter::Thread))
    }

    /// As [`Receiver::resume`], but does not wait: the caller's event loop continues it. [`Resuming::cancel`] returns
    /// the receiver, whenever it is called.
    ///
    /// # Errors
    /// [`Error::System`], with the receiver; [`Resuming::try_finish`] returns the others.
    pub fn start_resume(self) -> std::result::Result<Resuming<Receiver>, Box<(Receiver, Error)>> {
        Resuming::new(self, |receiver, waiter| Box::pin(receiver.resumed(None, waiter)))
    }

    async fn resumed(&mut self, deadline: Option<Instant>, waiter: &Waiter) -> Result<bool> {
        self.endpoint.check_owner()?;
        if self.endpoint.is_path() {
            return self.wait_for_peer(deadline, waiter).await;
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
        // The dead sender's descriptors are still in its socket.
        lane.link.drain_descriptors()?;
        // Fails here if the lane is corrupt, so that no successor is blamed for it.
        lane.consumer.end_of_committed()?;
        if !reconnect.resume(lane, Resume { doorbells: &self.endpoint.doorbells, deadline, waiter }).await? {
            return Ok(false);
        }
        self.endpoint.reinstate();
        self.lanes.current.end = None;
        Ok(true)
    }

    /// Finds the senders of a path channel that this side has just opened, and rings them.
    pub(crate) fn find_and_ring_senders(&mut self) -> Result<()> {
        self.lanes.current.find_and_ring_sender(&self.endpoint.doorbells, &mut self.endpoint.spin)?;
        self.find_lanes()
    }

    /// Waits until a path channel has a sender, or a message: its sender may have left again before this side wakes.
    /// Returns false at the deadline.
    pub(crate) async fn wait_for_peer(&mut self, deadline: Option<Instant>, waiter: &Waiter) -> Result<bool> {
        loop {
            if self.endpoint.departure.is_some() {
                self.continue_without_peer();
            } else if self.check_ends()?.is_some() {
                // The end of that sender is reported after its messages.
                if self.has_messages() {
                    return Ok(true);
                }
                self.continue_without_peer();
            } else if !self.endpoint.owner.is_current() {
                return Err(self.not_usable());
            }
            self.endpoint.doorbells.drain()?;
            failpoint("receiver waits for its peer: drained");
            self.find_senders()?;
            failpoint("receiver waits for its peer: looked");
            if self.lanes.iter().any(Lane::has_sender) || self.has_messages() {
                return Ok(true);
            }
            // Checks the clock after each sleep: otherwise a doorbell that always rings would delay the return for
            // ever.
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(false);
            }
            waiter.sleep(&self.endpoint.doorbells, deadline).await?;
        }
    }

    /// Makes all releases so far durable, on a path channel: the messages are not delivered again even after a reboot.
    /// Waits for the disk: milliseconds and more.
    ///
    /// # Errors
    /// [`Error::Refused`] for a channel that is not a path's; [`Error::Forked`]; [`Error::System`]. After the last one,
    /// a crash of the machine may have messages delivered again even if the next call succeeds: the kernel
    /// reports a failed write once.
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

    /// The generation of the producer that sent the last received message: 1 for the lane's first producer, one more
    /// for each successor.
    pub fn generation(&self) -> u32 {
        self.lanes.current.consumer.generation()
    }

    /// Bytes of the lane's data.
    pub fn capacity(&self) -> u64 {
        self.lanes.current.consumer.capacity()
    }

    /// The largest message, in bytes.
    pub fn message_bytes_max(&self) -> u64 {
        self.lanes.current.consumer.message_bytes_max()
    }

    /// The sender's process; with several senders, that of the last received message. `None` while this side knows of
    /// no sender, on a path channel.
    pub fn peer(&self) -> Option<Peer> {
        self.lanes.current.link.peer()
    }

    /// Closes the channel. The sender returns [`Error::Closed`] with the number of unreleased messages. Does not wait.
    /// Dropping the receiver does the same.
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
            self.release_returned();
        }
        if let Some(registry) = &mut self.registry {
            registry.shut(&mut self.lanes);
        }
        self.lanes.iter_mut().for_each(|lane| lane.consumer.close());
        self.sleeper.close();
        // The order: the closed flags, the ring, the hang-up. A sender that detects one of them finds the earlier ones
        // done.
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

impl Polled for Receiver {
    fn poll(&mut self) -> Result<bool> {
        Ok(self.peek(Polls::All)?.is_some())
    }

    fn poll_in_turn(&mut self) -> Result<bool> {
        Ok(self.peek(Polls::InTurn)?.is_some())
    }

    fn may_be_ready(&mut self) -> bool {
        self.lanes.may_be_ready_in_turn()
    }

    fn spin(&mut self) -> &mut Spin {
        &mut self.endpoint.spin
    }

    /// With several senders, the ring of the one that was served last.
    fn last_ring(&self) -> Option<LastRing> {
        Some(self.lanes.current.consumer.producer_page().last_ring())
    }
}

impl Side for Receiver {
    fn arm(&mut self) -> Result<bool> {
        let mut everywhere = true;
        // A sender that joins later rings the doorbell.
        let do_fence = || self.lanes.iter().all(|lane| !lane.has_sender() || lane.consumer.is_producer_fencing());
        self.sleeper.arm(|| everywhere = do_fence() || os::membarrier::barrier());
        if !everywhere {
            self.sleeper.request_fencing();
        }
        let found = self.poll();
        if !matches!(found, Ok(false)) {
            self.sleeper.disarm();
        } else {
            let consumer = &self.lanes.current.consumer;
            consumer.count_sleep();
            // A sender that runs far ahead may not have needed a ring for a long time.
            consumer.note_processor(os::processor());
        }
        Ok(!found?)
    }

    fn disarm(&mut self) {
        self.sleeper.disarm();
    }

    fn end(&mut self) -> Result<bool> {
        if self.check_ends()?.is_none() {
            return Ok(false);
        }
        // The last sender may have committed messages before it left. [close]
        if self.peek_lanes(Polls::All)?.is_some() {
            return Ok(true);
        }
        self.note_end();
        Err(self.not_usable())
    }

    fn needs_timed_wait(&self) -> bool {
        self.lanes.iter().any(|lane| lane.has_sender() && lane.consumer.needs_timed_wait(&self.sleeper))
    }

    fn sleep(&mut self, deadline: Option<Instant>) -> Result<Ready> {
        self.endpoint.doorbells.sleep(deadline)
    }

    fn rung(&mut self, alone: bool) -> Result<bool> {
        self.endpoint.doorbells.drain_after_sleep(alone)?;
        failpoint("receiver rung: drained");
        // A sender that joins or leaves sets the registry's flag or has an event of its own. A ring without either
        // needs no check.
        if alone && self.registry.as_ref().is_some_and(|registry| !registry.may_be_ready()) {
            return Ok(false);
        }
        self.find_senders()?;
        failpoint("receiver rung: looked");
        // Since the last check, a sender may have opened the channel, sent its messages, and left.
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
        // Needs one system call for any number of lanes.
        let gone = self.lanes.current.link.is_peer_gone()? || self.found_end().is_some();
        Ok(gone || (!self.lanes.is_one() && self.endpoint.doorbells.is_any_gone()?))
    }
}

#[cfg(test)]
mod tests {
    use crate::Options;

    #[test]
    fn the_backoff_learns_of_a_long_lap() {
        let (mut sender, mut receiver) = Options::new().threads().unwrap();
        if receiver.endpoint.spin.first_polls() == 0 {
            return eprintln!("SKIPPED: with one processor, no receiver backs off");
        }
        // Beyond the window, then at the front again.
        for count in [48, 1] {
            for _ in 0..count {
                sender.send(&[0; 65536]).unwrap();
            }
            while receiver.try_receive().unwrap().is_some() {}
            assert!(!receiver.comes_soon());
        }
        assert!(receiver.backoff.as_ref().is_some_and(|backoff| backoff.is_after_long_lap()));
    }
}
