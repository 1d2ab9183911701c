//! The sending endpoint of a channel. `sender/reservation.rs` has the reservations that it returns.

mod memory;
mod reservation;

pub use reservation::{BatchReservation, Reservation};

use crate::counters::Counters;
use crate::doorbells::Doorbells;
use crate::endpoint::{Departure, Endpoint};
use crate::error::{Error, Result};
use crate::link::{Link, PASSED_MAX};
use crate::opening::{Resume, Resuming, Steps, Waiter, in_call};
#[cfg(doc)]
use crate::options::Options;
use crate::settings::Settings;
use crate::traceparent::{self, Traceparent};
use crate::transport::Found;
use crate::wait::{self, Armed, BUSY_POLL, Deadline, Polled, Side, Spin};
use crate::window::Window;
use pelton_lane::{
    LaneError, LastRing, Memory, Position, Producer, ReservedSpace, Wake, failpoint, find_end, record_bytes,
};
use pelton_os as os;
use pelton_os::Peer;
use pelton_os::socket::DESCRIPTORS_MAX;
use pelton_os::{Ready, Segment};
use probe::probe;
use std::collections::VecDeque;
use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The result of sending: full and timed out are results, not errors.
#[must_use = "a message that was not sent is still yours"]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// The message is in the lane.
    Sent,
    /// The lane had no space; nothing was sent.
    Full,
    /// The deadline passed before there was space; nothing was sent.
    TimedOut,
}

/// The sending endpoint of a channel. `Send`, not `Sync`: one thread at a time.
///
/// The method determines what happens when the lane is full: [`Sender::send`] waits, [`Sender::send_until`] waits
/// with a deadline, [`Sender::try_send`] returns [`Sent::Full`]. Nothing is ever dropped. Where both sides share a
/// processor, a method that waits also sleeps for up to 10 ms once 2 MiB are unreleased, so that the receiver can
/// run; then it uses the rest of the capacity.
///
/// Dropping it closes the channel: the receiver receives all messages, and then returns [`Error::Closed`].
#[derive(Debug)]
pub struct Sender {
    /// The first field: the first words of `parts`, which each message uses, share cache lines.
    pub(crate) parts: SenderParts,
    pub(crate) endpoint: Endpoint<dyn Reconnect>,
    /// Descriptors of messages that are not released yet. A successor of the receiver gets them again.
    descriptors: VecDeque<(u32, Vec<OwnedFd>)>,
    /// The number of entries, counted from the back, that the successor has not received yet.
    unsent: usize,
    window: Window,
    /// The number of the next message at the last pause for a receiver on the same processor.
    paused_at: Option<u32>,
    /// An event loop waits: the last [`Sender::arm`] has returned [`Armed::Waiting`].
    is_awaited: bool,
}

/// How a sender reaches a successor of its receiver.
pub(crate) trait Reconnect: Send + Sync {
    /// Offers the sender's lane to a successor of its receiver. Returns false at the deadline. Dropping the future
    /// cancels, and leaves the lane as it was.
    fn resume<'a>(&'a self, parts: &'a mut SenderParts, resuming: Resume<'a>) -> Steps<'a, bool>;
}

// Not a supertrait: each implementation's, with those of all its fields, would be in every program.
impl std::fmt::Debug for dyn Reconnect {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Reconnect")
    }
}

/// A producer with its memory and its link: the result of a sender's handshake.
#[derive(Debug)]
pub(crate) struct SenderParts {
    pub(crate) lane: Producer,
    pub(crate) link: Link,
    /// Dropped after the lane, which points into it.
    pub(crate) memory: SenderMemory,
}

/// A path channel allocates memory, or disk blocks, for a lane's data in steps of this size, by one system call each.
const STEP: u64 = 1 << 20;

/// After this number of messages without a wait, the sender reads the clock: a liveness check may be overdue.
pub(crate) const CHECK_AFTER: u32 = 256;

/// On a processor that both sides share, a sender that waits for space uses this many bytes of its lane like a smaller
/// lane. More leave the caches, and the kernel runs the receiver too late. Measured, 256 B on one processor, million
/// messages/s by lane: 512 KiB 28, 1 MiB 31, 2 MiB 35, 4 MiB 35 (10 to 37 beside load), 8 MiB 22, 64 MiB 8.
pub(crate) const LEAD: u64 = 2 << 20;
/// The longest sleep before the sender uses the rest of the lane. A receiver that has to wait for the time slices of
/// two or three other threads has released half by then; a stopped one delays a burst by only this. A guess.
pub(crate) const LEAD_PAUSE: Duration = Duration::from_millis(10);

impl SenderParts {
    /// Allocates memory for the first `bytes` of the data, so that a write there cannot fail.
    fn back(&mut self, bytes: u64) -> Result<()> {
        let (from, most) = (self.lane.backed(), self.lane.capacity());
        let data = &self.memory.data;
        // If a whole step fails, tries to allocate only the required bytes.
        let mut refused = None;
        for to in [bytes.next_multiple_of(STEP).min(most), bytes.next_multiple_of(os::PIECE).min(most)] {
            match data.allocate(from, to) {
                Ok(()) => {
                    failpoint("lane: allocated");
                    self.lane.set_backed(to);
                    return Ok(());
                }
                Err(error) => refused = Some(error),
            }
        }
        let error = refused.expect("an attempt failed");
        Err(match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => self.link.no_space(bytes, error),
            ErrorKind::FileTooLarge => Error::system("stretching the lane: raise this process's RLIMIT_FSIZE")(error),
            _ => Error::system("allocating space for the lane")(error),
        })
    }
}

/// The segments of a producer's lane.
#[derive(Debug)]
pub(crate) struct SenderMemory {
    pub(crate) page: Arc<Segment>,
    pub(crate) data: Arc<Segment>,
    pub(crate) consumer: Arc<Segment>,
    pub(crate) receiver: Arc<Segment>,
    /// Whether no receiver can hold a message in the data: it is new, and no handshake has completed with it.
    pub(crate) is_moved: bool,
}

impl SenderMemory {
    pub(crate) fn attach(
        &self,
        tail: Position,
        head: Position,
        floor: u64,
        can_barrier: bool,
    ) -> std::result::Result<Producer, Error> {
        let memory = os::lane_memory(&self.page, &self.consumer, &self.receiver, &self.data);
        // SAFETY: the handshake checked the sizes of the segments and sealed them; `SenderParts` drops them after the
        // lane. This process created the page, and the handshake made it the lane's only producer.
        Ok(unsafe { Producer::attach(memory, tail, head, floor, can_barrier)? })
    }

    /// Continues in the previous producer's page, after the last message that the previous producer committed. This
    /// process has that producer's role.
    pub(crate) fn take_over(&self, message_bytes_max: u64, can_barrier: bool) -> Result<Producer> {
        let memory = os::lane_memory(&self.page, &self.consumer, &self.receiver, &self.data);
        // SAFETY: both segments map a whole page, for as long as `self` lives.
        let (page, consumer) = unsafe { (memory.producer.as_ref(), memory.consumer.as_ref()) };
        let (stored, floor) = page.tail_and_floor();
        let (tail, _) = find_end(&memory.data, message_bytes_max, stored)?;
        page.start_generation(std::process::id());
        self.attach(tail, consumer.head(), floor, can_barrier)
    }

    /// Closes the descriptors and keeps the mappings. For a lane that is offered to no successor.
    pub(crate) fn forget_descriptors(&mut self) {
        for segment in [&mut self.page, &mut self.data, &mut self.consumer, &mut self.receiver] {
            if let Some(segment) = Arc::get_mut(segment) {
                segment.forget_descriptor();
            }
        }
    }

    /// Moves the lane into new data, which the caller has just created with the lane's capacity.
    pub(crate) fn move_to(&mut self, lane: &mut Producer, data: Segment) -> std::io::Result<()> {
        let [first, second] = lane.idle();
        for (from, to) in [(0, first.0), (first.0 + first.1, second.0), (second.0 + second.1, lane.capacity())] {
            self.data.copy_to(&data, from, to)?;
        }
        let memory = os::lane_memory(&self.page, &self.consumer, &self.receiver, &data);
        // SAFETY: the data is new, as long as the lane, and has its records. The old data lives until the assignment
        // below replaces it.
        unsafe { lane.move_to(memory.data) };
        self.data = Arc::new(data);
        self.is_moved = true;
        Ok(())
    }

    pub(crate) fn attach_consumer(
        &mut self,
        lane: &mut Producer,
        consumer: Arc<Segment>,
        receiver: Arc<Segment>,
        can_barrier: bool,
    ) -> Result<()> {
        let memory: Memory = os::lane_memory(&self.page, &consumer, &receiver, &self.data);
        // SAFETY: the handshake checked the sizes of the new segments. The old ones live until the assignment below
        // replaces them.
        unsafe { lane.attach_consumer(memory.consumer, memory.receiver, can_barrier)? };
        (self.consumer, self.receiver) = (consumer, receiver);
        Ok(())
    }
}

impl Sender {
    pub(crate) fn new(mut parts: SenderParts, doorbells: Doorbells, options: &Settings) -> Result<Sender> {
        let endpoint = Endpoint::new(doorbells, options.wait, parts.link.peer())?;
        let window = Window::of(options, parts.lane.capacity(), parts.lane.sent_bytes());
        parts.lane.set_window(window.bytes());
        if options.traced {
            parts.lane.permit_traced();
        }
        Ok(Sender {
            parts,
            endpoint,
            descriptors: VecDeque::new(),
            unsent: 0,
            window,
            paused_at: None,
            is_awaited: false,
        })
    }

    /// Copies a message into the lane, if there is space now. Never waits.
    ///
    /// # Errors
    /// [`Error::TooLarge`], in any state of the lane. [`Error::Closed`] and [`Error::PeerDied`] after the receiver has
    /// left, with the number of messages that it has not released; some calls may still succeed after it has left, and
    /// their messages count as unreleased. After any error, this call has sent nothing. A path channel returns the end
    /// of a receiver once: send the message again, to the next receiver. [`Error::NoSpace`] when its file system is
    /// full: the call can be repeated. [`Error::Corrupt`], [`Error::Forked`].
    #[inline(always)]
    pub fn try_send(&mut self, payload: &[u8]) -> Result<Sent> {
        match self.send_fast(payload) {
            true => Ok(Sent::Sent),
            false => self.send_slow(payload, Deadline::Now),
        }
    }

    /// Copies a message into the lane. Waits for space as [`crate::Wait`] of the options determines, without a limit.
    ///
    /// # Errors
    /// As [`Sender::try_send`]. A wait ends immediately when the receiver leaves.
    #[inline(always)]
    pub fn send(&mut self, payload: &[u8]) -> Result<()> {
        match self.send_fast(payload) {
            true => Ok(()),
            false => self.send_slow(payload, Deadline::Never).map(|_| ()),
        }
    }

    /// Copies a message into the lane. Waits for space until `deadline`, on the monotonic clock.
    ///
    /// # Errors
    /// As [`Sender::send`].
    #[inline]
    pub fn send_until(&mut self, payload: &[u8], deadline: impl Into<Deadline>) -> Result<Sent> {
        match self.send_fast(payload) {
            true => Ok(Sent::Sent),
            false => self.send_slow(payload, deadline.into()),
        }
    }

    /// As [`Sender::send_until`], for a receiver that reads [`Message::traceparent`](crate::Message::traceparent). With
    /// [`Deadline::Now`] it does not wait. On a channel without [`Options::traced`] the message goes without
    /// `traceparent`: its lack fails no message. Takes 40 bytes more of the lane than [`Sender::send`].
    ///
    /// ```
    /// # fn main() -> pelton::Result<()> {
    /// let (mut sender, mut receiver) = pelton::Options::new().traced(true).threads()?;
    /// let text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    /// let span = pelton::Traceparent::parse(text).unwrap();
    /// let _ = sender.send_traced(b"hello", span, pelton::Deadline::Never)?;
    /// sender.send(b"and no trace")?;
    /// let message = receiver.receive()?;
    /// assert_eq!((&*message, message.traceparent()), (&b"hello"[..], Some(span)));
    /// drop(message);
    /// assert_eq!(receiver.receive()?.traceparent(), None);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Sender::send`].
    pub fn send_traced(
        &mut self,
        payload: &[u8],
        traceparent: Traceparent,
        deadline: impl Into<Deadline>,
    ) -> Result<Sent> {
        let deadline = deadline.into();
        match self.find_traced_space(payload.len(), traceparent, deadline)? {
            Some(space) => {
                self.fill(space, payload);
                Ok(Sent::Sent)
            }
            None if deadline == Deadline::Now => Ok(Sent::Full),
            None => Ok(Sent::TimedOut),
        }
    }

    /// The slow path.
    #[cold]
    #[inline(never)]
    fn send_slow(&mut self, payload: &[u8], deadline: Deadline) -> Result<Sent> {
        match self.find_space(payload.len(), deadline)? {
            Some(space) => {
                self.fill(space, payload);
                Ok(Sent::Sent)
            }
            None if deadline == Deadline::Now => Ok(Sent::Full),
            None => Ok(Sent::TimedOut),
        }
    }

    /// Reserves space for a message of `bytes`. Waits until `deadline`.
    pub(crate) fn find_space(&mut self, bytes: usize, deadline: Deadline) -> Result<Option<ReservedSpace>> {
        let bytes = bytes as u64;
        self.find(WaitCondition::Message(bytes, 0), deadline, |lane| lane.try_reserve(bytes))
    }

    /// Reserves space for a message of `bytes` with a traceparent, if the channel has them. Waits until `deadline`.
    pub(crate) fn find_traced_space(
        &mut self,
        bytes: usize,
        traceparent: Traceparent,
        deadline: Deadline,
    ) -> Result<Option<ReservedSpace>> {
        if !self.parts.lane.is_traced() {
            return self.find_space(bytes, deadline);
        }
        let (bytes, trace) = (bytes as u64, traceparent.encode());
        self.find(WaitCondition::Traced(bytes), deadline, |lane| lane.try_reserve_traced(bytes, &trace))
    }

    /// Reserves by `reserve`. Waits for `want` until `deadline`.
    fn find<T>(
        &mut self,
        want: WaitCondition,
        deadline: Deadline,
        reserve: impl FnMut(&mut Producer) -> std::result::Result<Option<T>, LaneError>,
    ) -> Result<Option<T>> {
        if !self.endpoint.owner.is_current() {
            return Err(self.not_usable());
        }
        let found = self.find_or_wait(want, deadline, reserve);
        self.renew_wait();
        found
    }

    /// After a call that may have ended the announced sleep: an event loop that waits for its ring has to arm again.
    fn renew_wait(&mut self) {
        if self.is_awaited && !self.parts.lane.is_armed() {
            self.is_awaited = false;
            self.endpoint.doorbells.local_wake().ring();
        }
    }

    fn find_or_wait<T>(
        &mut self,
        want: WaitCondition,
        deadline: Deadline,
        mut reserve: impl FnMut(&mut Producer) -> std::result::Result<Option<T>, LaneError>,
    ) -> Result<Option<T>> {
        self.find_window();
        if let Some(space) = self.find_nearby(want, deadline, &mut reserve)? {
            return Ok(Some(space));
        }
        loop {
            let space = self.with_memory(&mut reserve)?;
            if space.is_none() {
                probe!(pelton, full, self.parts.lane.unreleased());
            }
            if space.is_none() && self.is_peer_known_gone()? {
                self.note_end();
                return Err(self.not_usable());
            }
            let Some(deadline) = deadline.until().filter(|_| space.is_none()) else { return Ok(space) };
            self.parts.lane.count_wait();
            if !wait::wait(&mut FreeSpace { sender: self, want }, deadline)? {
                return Ok(None);
            }
        }
    }

    /// If both sides share a processor, reserves by `reserve` within the first `LEAD` bytes of the lane, or within
    /// the window if that is larger. Once they are used up, sleeps until the receiver has released half of its
    /// messages, but no longer than `LEAD_PAUSE`: the receiver runs meanwhile. `None`: use the rest of the lane. So
    /// the sender sleeps once, and then not again before it has returned to the front.
    fn find_nearby<T>(
        &mut self,
        want: WaitCondition,
        deadline: Deadline,
        mut reserve: impl FnMut(&mut Producer) -> std::result::Result<Option<T>, LaneError>,
    ) -> Result<Option<T>> {
        let Some(until) = deadline.until() else { return Ok(None) };
        // An empty lane has space for a message of a quarter, wherever its tail is. So the wake-up for an empty lane,
        // if no earlier one, ends the sleep.
        let is_small = matches!(
            want,
            WaitCondition::Message(bytes, _) | WaitCondition::Traced(bytes) if bytes <= LEAD / 4
        );
        let lane = &mut self.parts.lane;
        let bound = LEAD.max(lane.window());
        let is_done = bound >= lane.capacity() || lane.tail().offset > bound || self.paused_at == Some(lane.tail().seq);
        if !is_small || is_done || self.parts.link.peer().is_none() {
            return Ok(None);
        }
        if !self.endpoint.spin.shares_processor_with(lane.consumer_page().last_ring()) {
            return Ok(None);
        }
        lane.set_bound(bound);
        let found = self.with_memory(&mut reserve).and_then(|space| {
            if space.is_some() {
                return Ok(space);
            }
            self.parts.lane.count_wait();
            self.paused_at = Some(self.parts.lane.tail().seq);
            let end = Instant::now() + LEAD_PAUSE;
            let end = until.map_or(end, |until| until.min(end));
            match wait::wait(&mut FreeSpace { sender: self, want }, Some(end))? {
                true => self.with_memory(&mut reserve),
                false => Ok(None),
            }
        });
        self.parts.lane.set_bound(self.parts.lane.capacity());
        found
    }

    /// Calls `reserve`. If the lane lacks memory there, allocates it and repeats the call.
    fn with_memory<T>(
        &mut self,
        mut reserve: impl FnMut(&mut Producer) -> std::result::Result<T, LaneError>,
    ) -> Result<T> {
        loop {
            match reserve(&mut self.parts.lane) {
                Err(LaneError::Unbacked { bytes }) => self.parts.back(bytes)?,
                result => return result.map_err(|error| self.failed(error)),
            }
        }
    }

    #[inline(always)]
    pub(crate) fn fill(&mut self, space: ReservedSpace, payload: &[u8]) {
        self.parts.lane.copy_in(space, payload);
        self.publish(space, payload.len());
    }

    #[inline(always)]
    pub(crate) fn publish(&mut self, space: ReservedSpace, bytes: usize) {
        let must_check = self.parts.lane.publish(space, bytes as u64);
        if self.must_check_receiver(must_check) {
            self.check_receiver();
        }
    }

    /// After a message: whether the receiver may sleep, as the lane has found, or the message is one of those after
    /// which the sender checks whether the receiver is alive.
    #[inline(always)]
    pub(crate) fn must_check_receiver(&self, lane_must_check: bool) -> bool {
        lane_must_check || self.is_liveness_due()
    }

    #[inline(always)]
    pub(crate) fn is_liveness_due(&self) -> bool {
        self.parts.lane.tail().seq.is_multiple_of(CHECK_AFTER)
    }

    /// After a message, if [`Sender::must_check_receiver`]: rings the receiver if it sleeps, and checks at intervals
    /// whether it is alive.
    #[cold]
    #[inline(never)]
    #[doc(hidden)]
    pub fn check_receiver(&mut self) {
        match self.parts.lane.check_peer() {
            Wake::None if !self.is_liveness_due() => {}
            wake => self.after_publishing(wake),
        }
    }

    #[inline(always)]
    fn publish_batch(&mut self, batch: pelton_lane::Batch) {
        let before = self.parts.lane.tail().seq;
        match self.parts.lane.commit_batch(batch) {
            Wake::None if self.parts.lane.tail().seq / CHECK_AFTER == before / CHECK_AFTER => {}
            wake => self.after_publishing(wake),
        }
    }

    /// Rings a sleeping receiver. At intervals it also checks whether the receiver is alive: a sender that never waits
    /// would not detect its end.
    #[cold]
    #[inline(never)]
    pub(crate) fn after_publishing(&mut self, wake: Wake) {
        let page = self.parts.lane.producer_page();
        probe!(pelton, send, page.messages(), page.bytes());
        if wake == Wake::Ring {
            let lane = &self.parts.lane;
            self.parts.link.wake_peer(|processor, at| lane.note_ring(processor, at));
        }
        if self.window.is_pause_overdue(os::monotonic_ns) {
            self.sample_window(self.parts.lane.sent_bytes());
        }
        // This message is sent, so the next call reports an error.
        if self.parts.link.is_check_overdue()
            && let Ok(true) = self.is_peer_gone()
        {
            self.note_end();
        }
    }

    /// On a path channel without a known receiver, finds one. Returns true if a receiver has opened it and left
    /// meanwhile.
    fn find_peer(&mut self) -> Result<bool> {
        let SenderParts { lane, link, .. } = &mut self.parts;
        let doorbells = &self.endpoint.doorbells;
        let page = lane.consumer_page();
        let found = link.find_peer(doorbells, || (page.generation(), page.pid()))?;
        let is_found = matches!(found, Found::Peer(_));
        if is_found && lane.has_consumer_closed() {
            // It has closed, but its liveness handle is still open for a moment, for instance in a child before exec.
            link.lose_peer(doorbells);
            return Ok(true);
        }
        if is_found {
            // From now on, a closed flag belongs to this receiver.
            lane.continue_without_consumer();
            self.endpoint.spin.set_peer(link.peer());
        }
        Ok(found == Found::Passed)
    }

    /// Checks by one or two system calls whether the receiver has gone.
    fn is_peer_gone(&mut self) -> Result<bool> {
        Ok(self.find_peer()? || self.parts.link.is_peer_gone()?)
    }

    /// As [`Sender::is_peer_gone`], but makes the system calls only at intervals.
    fn is_peer_known_gone(&mut self) -> Result<bool> {
        Ok(self.parts.link.is_check_due() && self.is_peer_gone()?)
    }

    /// Returns the reason why the handle is not usable. A path channel's sender is usable again after that.
    #[cold]
    pub(crate) fn not_usable(&mut self) -> Error {
        let unreleased = self.unreleased();
        let error = self.endpoint.error(|| unreleased);
        if self.endpoint.departure.is_some() && self.endpoint.is_path() && !self.endpoint.owner.is_forked() {
            self.continue_without_peer();
        }
        error
    }

    /// Prepares a path channel for its next receiver, after the end of the last one was reported. The next one may have
    /// opened the channel already.
    fn continue_without_peer(&mut self) {
        self.parts.link.lose_peer(&self.endpoint.doorbells);
        self.parts.lane.continue_without_consumer();
        self.endpoint.reinstate();
        if self.find_next_peer().is_err() {
            // The next wait checks again.
            self.endpoint.doorbells.local_wake().ring();
        }
    }

    /// Finds the present receiver, and skips those that have opened the channel and left.
    fn find_next_peer(&mut self) -> Result<()> {
        for _ in 0..=PASSED_MAX {
            if !self.find_peer()? {
                return Ok(());
            }
        }
        self.endpoint.doorbells.local_wake().ring();
        Ok(())
    }

    #[cold]
    fn failed(&mut self, error: LaneError) -> Error {
        match error {
            LaneError::Closed => {
                self.endpoint.leave(Departure::Closed);
                self.not_usable()
            }
            LaneError::TooLarge { .. } => error.into(),
            error => {
                self.endpoint.owner.retire();
                error.into()
            }
        }
    }

    /// Notes that the receiver has left. The next call returns that as an error; later calls too, except on a path
    /// channel.
    fn note_end(&mut self) {
        let closed = self.parts.lane.has_consumer_closed();
        self.endpoint.leave(if closed { Departure::Closed } else { Departure::PeerDied });
    }

    /// Reserves space for a message of `bytes`, to be written in place. Never waits; returns `None` when the lane is
    /// full. Nothing is sent until it is committed; dropping it aborts.
    ///
    /// ```
    /// # fn main() -> pelton::Result<()> {
    /// let (mut sender, mut receiver) = pelton::Options::new().threads()?;
    /// if let Some(mut space) = sender.try_reserve(100)? {
    ///     space[..5].copy_from_slice(b"hello");
    ///     space.commit_bytes(5)?;
    /// }
    /// assert_eq!(&*receiver.receive()?, b"hello");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Sender::try_send`].
    pub fn try_reserve(&mut self, bytes: usize) -> Result<Option<Reservation<'_>>> {
        let space = self.find_space(bytes, Deadline::Now)?;
        Ok(space.map(|space| Reservation { sender: self, space }))
    }

    /// As [`Sender::try_reserve`], but waits for space.
    ///
    /// # Errors
    /// As [`Sender::send`].
    pub fn reserve(&mut self, bytes: usize) -> Result<Reservation<'_>> {
        let space = self.find_space(bytes, Deadline::Never)?.expect("without a deadline it does not pass");
        Ok(Reservation { sender: self, space })
    }

    /// As [`Sender::reserve`], until `deadline`; `None` when it passes.
    ///
    /// # Errors
    /// As [`Sender::send`].
    pub fn reserve_until(&mut self, bytes: usize, deadline: impl Into<Deadline>) -> Result<Option<Reservation<'_>>> {
        let space = self.find_space(bytes, deadline.into())?;
        Ok(space.map(|space| Reservation { sender: self, space }))
    }

    /// As [`Sender::reserve_until`], for a message with a traceparent: see [`Sender::send_traced`]. With
    /// [`Deadline::Now`] it does not wait.
    ///
    /// # Errors
    /// As [`Sender::send`].
    pub fn reserve_traced(
        &mut self,
        bytes: usize,
        traceparent: Traceparent,
        deadline: impl Into<Deadline>,
    ) -> Result<Option<Reservation<'_>>> {
        let space = self.find_traced_space(bytes, traceparent, deadline.into())?;
        Ok(space.map(|space| Reservation { sender: self, space }))
    }

    /// Begins a batch: one reservation for several messages. The receiver gets all of them or none. They carry no
    /// traceparent. `lens` are upper limits of the messages' bytes. Never waits; returns `None` when the lane has no
    /// space for all of them.
    ///
    /// ```
    /// # fn main() -> pelton::Result<()> {
    /// let (mut sender, mut receiver) = pelton::Options::new().threads()?;
    /// let mut batch = sender.try_reserve_batch([3, 3])?.expect("an empty lane has space");
    /// assert!(batch.push(b"one") && batch.push(b"two"));
    /// batch.commit()?;
    /// assert_eq!(&*receiver.receive()?, b"one");
    /// assert_eq!(&*receiver.receive()?, b"two");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Sender::try_send`]; [`Error::TooLarge`] when the messages together take more space than the largest
    /// message.
    #[inline(always)]
    pub fn try_reserve_batch(&mut self, lens: impl IntoIterator<Item = usize>) -> Result<Option<BatchReservation<'_>>> {
        self.reserve_batch_until(lens, Deadline::Now)
    }

    /// As [`Sender::try_reserve_batch`], but waits for space for the whole batch.
    ///
    /// # Errors
    /// As [`Sender::try_reserve_batch`].
    #[inline(always)]
    pub fn reserve_batch(&mut self, lens: impl IntoIterator<Item = usize>) -> Result<BatchReservation<'_>> {
        Ok(self.reserve_batch_until(lens, Deadline::Never)?.expect("without a deadline it does not pass"))
    }

    /// As [`Sender::reserve_batch`], until `deadline`; `None` when it passes.
    ///
    /// # Errors
    /// As [`Sender::try_reserve_batch`].
    #[inline(always)]
    pub fn reserve_batch_until(
        &mut self,
        lens: impl IntoIterator<Item = usize>,
        deadline: impl Into<Deadline>,
    ) -> Result<Option<BatchReservation<'_>>> {
        // Each length is limited to 2^31, above the largest message, so the sum wraps only for 2^33 messages. Even then
        // a batch never returns more space than it has. For messages of one size the compiler computes this sum without
        // a loop.
        let records = lens.into_iter().map(|len| record_bytes((len as u64).min(1 << 31))).fold(0, u64::wrapping_add);
        if self.endpoint.owner.is_current()
            && let Some(batch) = self.parts.lane.begin_batch_fast(records)
        {
            return Ok(Some(BatchReservation { sender: self, batch }));
        }
        Ok(self.find_batch(records, deadline.into())?.map(|batch| BatchReservation { sender: self, batch }))
    }

    /// The slow path.
    #[cold]
    #[inline(never)]
    fn find_batch(&mut self, records: u64, deadline: Deadline) -> Result<Option<pelton_lane::Batch>> {
        // A message that takes the same space as the batch.
        let bytes = records.saturating_sub(record_bytes(0)).min(self.message_bytes_max());
        self.find(WaitCondition::Message(bytes, 0), deadline, |lane| lane.try_begin_batch(records))
    }

    /// Sends a message together with descriptors, which the receiver takes by [`crate::Message::take_descriptors`].
    /// Waits for space. This sender keeps duplicates, to send them again to a successor, until it detects that the
    /// message was released: when it next sends descriptors, or in [`Sender::unreleased`].
    ///
    /// # Errors
    /// As [`Sender::send`]; [`Error::TooManyDescriptors`] above 64; [`Error::System`] when they cannot be duplicated.
    pub fn send_with_descriptors(&mut self, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.send_and_pass(payload, fds, None).map(|_| ())
    }

    /// As [`Sender::send_with_descriptors`], until `deadline`.
    ///
    /// # Errors
    /// As [`Sender::send_with_descriptors`].
    pub fn send_with_descriptors_until(
        &mut self,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
        deadline: impl Into<Deadline>,
    ) -> Result<Sent> {
        self.send_and_pass(payload, fds, deadline.into().instant())
    }

    fn send_and_pass(&mut self, payload: &[u8], fds: &[BorrowedFd<'_>], deadline: Option<Instant>) -> Result<Sent> {
        if !self.endpoint.owner.is_current() {
            return Err(self.not_usable());
        }
        if fds.len() > DESCRIPTORS_MAX {
            return Err(Error::TooManyDescriptors { found: fds.len(), wanted: DESCRIPTORS_MAX });
        }
        if fds.is_empty() {
            return self.send_slow(payload, deadline.map_or(Deadline::Never, Deadline::At));
        }
        if self.endpoint.is_path() {
            return Err(Error::Refused(
                "descriptors cannot go through a path channel: connect by a socket to send them".to_owned(),
            ));
        }
        self.unreleased();
        self.find_window();
        let kept = fds.iter().map(|fd| fd.try_clone_to_owned()).collect::<std::io::Result<Vec<_>>>();
        let kept = kept.map_err(Error::system("duplicating descriptors"))?;
        let seq = self.parts.lane.tail().seq;
        loop {
            let count = fds.len() as u32;
            let space = self.parts.lane.try_reserve_with_descriptors(payload.len() as u64, count);
            let Some(space) = space.map_err(|error| self.failed(error))? else {
                self.parts.lane.count_wait();
                let want = WaitCondition::Message(payload.len() as u64, count);
                if !wait::wait(&mut FreeSpace { sender: self, want }, deadline)? {
                    return Ok(Sent::TimedOut);
                }
                continue;
            };
            // Sends the descriptors before the message, so that the receiver has them when it gets the message. First
            // those that a successor has not got yet.
            if self.send_owed_descriptors()? && self.parts.link.try_send_descriptors(seq, fds)? {
                self.fill(space, payload);
                self.descriptors.push_back((seq, kept));
                return Ok(Sent::Sent);
            }
            if !self.wait_for_descriptor_space(deadline)? {
                return Ok(Sent::TimedOut);
            }
        }
    }

    /// Sends descriptors again that a successor of the receiver has not got yet. Returns false if the socket has no
    /// space for all of them now.
    fn send_owed_descriptors(&mut self) -> Result<bool> {
        while self.unsent > 0 {
            let (seq, fds) = &self.descriptors[self.descriptors.len() - self.unsent];
            let fds: Vec<BorrowedFd<'_>> = fds.iter().map(|fd| fd.as_fd()).collect();
            if !self.parts.link.try_send_descriptors(*seq, &fds)? {
                return Ok(false);
            }
            self.unsent -= 1;
        }
        Ok(true)
    }

    /// Waits until the socket may have space for descriptors. Returns false at the deadline.
    fn wait_for_descriptor_space(&mut self, deadline: Option<Instant>) -> Result<bool> {
        let has_space = self.parts.link.wait_for_descriptor_space(deadline)?;
        if self.is_peer_gone()? {
            self.note_end();
            return Err(self.not_usable());
        }
        // The socket may have had space all the time, but too many of this user's descriptors were in flight.
        Ok(has_space && deadline.is_none_or(|deadline| Instant::now() < deadline))
    }

    /// Messages sent and not yet released by the receiver. Reads the receiver's page; does not wait.
    pub fn unreleased(&mut self) -> u64 {
        if self.endpoint.owner.is_forked() {
            return 0;
        }
        let lane = &mut self.parts.lane;
        // The next send reports an invalid head. Until then the last valid one counts.
        let _ = lane.refresh_head();
        let head = lane.head().seq;
        while self.descriptors.front().is_some_and(|(seq, _)| (seq.wrapping_sub(head) as i32) < 0) {
            self.descriptors.pop_front();
            self.unsent = self.unsent.min(self.descriptors.len());
        }
        lane.unreleased()
    }

    /// Waits until the receiver has released every message.
    ///
    /// # Errors
    /// As [`Sender::send`]: [`Error::Closed`] and [`Error::PeerDied`] have the number of unreleased messages.
    pub fn wait_released(&mut self) -> Result<()> {
        self.wait_released_to(None).map(|_| ())
    }

    /// As [`Sender::wait_released`], until `deadline`; false when it passes.
    ///
    /// # Errors
    /// As [`Sender::wait_released`].
    pub fn wait_released_until(&mut self, deadline: impl Into<Deadline>) -> Result<bool> {
        self.wait_released_to(deadline.into().instant())
    }

    fn wait_released_to(&mut self, deadline: Option<Instant>) -> Result<bool> {
        if !self.endpoint.owner.is_current() {
            return if self.endpoint.departure.is_some() && self.unreleased() == 0 {
                Ok(true)
            } else {
                Err(self.not_usable())
            };
        }
        if self.unreleased() == 0 {
            return Ok(true);
        }
        let found = wait::wait(&mut FreeSpace { sender: self, want: WaitCondition::Empty }, deadline);
        self.renew_wait();
        found
    }

    /// For an event loop: makes the descriptor readable when there is space for a message of `bytes`, or the receiver
    /// leaves. Does not wait. A call that sends meanwhile ends this, and makes the descriptor readable: arm again.
    ///
    /// # Errors
    /// As [`Sender::try_send`]: here a loop detects that the receiver has left.
    pub fn arm(&mut self, bytes: usize) -> Result<Armed> {
        self.check_wait_for(bytes)?;
        self.endpoint.doorbells.drain()?;
        failpoint("sender arms: drained");
        let armed = FreeSpace { sender: self, want: WaitCondition::Message(bytes as u64, 0) }.arm()?;
        self.is_awaited = armed;
        if self.is_peer_gone()? {
            self.note_end();
            return Err(self.not_usable());
        }
        if !armed || self.parts.lane.needs_timed_wait() {
            // The descriptor is readable while there is space, even if the caller returns to the loop regardless. It is
            // also readable until the receiver is known to fence, because its ring may be missed.
            self.endpoint.doorbells.local_wake().ring();
            failpoint("sender arms: nudged");
        }
        Ok(Armed::waiting_if(armed))
    }

    /// For an event loop, in place of [`Sender::wait_released`]: makes the descriptor readable when the receiver has
    /// released every message, or leaves. Does not wait. [`Armed::Ready`]: every message is released.
    ///
    /// ```
    /// # fn main() -> pelton::Result<()> {
    /// let (mut sender, mut receiver) = pelton::Options::new().threads()?;
    /// assert!(!sender.arm_released()?.is_waiting());
    /// sender.send(b"hello")?;
    /// assert!(sender.arm_released()?.is_waiting());
    /// receiver.receive()?;
    /// // Your event loop waits for the sender's descriptor before it does this again:
    /// assert!(!sender.arm_released()?.is_waiting());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Sender::wait_released`].
    pub fn arm_released(&mut self) -> Result<Armed> {
        if self.wait_released_until(Deadline::Now)? {
            return Ok(Armed::Ready);
        }
        self.endpoint.doorbells.drain()?;
        let armed = FreeSpace { sender: self, want: WaitCondition::Empty }.arm()?;
        self.is_awaited = armed;
        if self.is_peer_gone()? {
            self.note_end();
            return self.wait_released_until(Deadline::Now).map(|_| Armed::Ready);
        }
        if !armed || self.parts.lane.needs_timed_wait() {
            // As in `arm`.
            self.endpoint.doorbells.local_wake().ring();
        }
        Ok(Armed::waiting_if(armed))
    }

    /// For an event loop, before [`Sender::arm`]: polls for space for a message of `bytes` for some microseconds,
    /// longer for a large message, and returns whether there is space. Polls for less if that was useless lately.
    /// With one processor it yields once instead. Neither sleeps nor arms.
    ///
    /// # Errors
    /// As [`Sender::try_send`].
    pub fn busy_poll(&mut self, bytes: usize) -> Result<bool> {
        self.check_wait_for(bytes)?;
        let want = WaitCondition::Message(bytes as u64, 0);
        let found = wait::busy_poll(&mut FreeSpace { sender: self, want }, BUSY_POLL, bytes as u64);
        self.renew_wait();
        found
    }

    /// Checks that the sender can be used, and that there can ever be space for a message of `bytes`.
    fn check_wait_for(&mut self, bytes: usize) -> Result<()> {
        if !self.endpoint.owner.is_current() {
            return Err(self.not_usable());
        }
        match self.message_bytes_max() {
            bytes_max if bytes as u64 > bytes_max => Err(Error::TooLarge { bytes: bytes as u64, bytes_max }),
            _ => Ok(()),
        }
    }

    /// For an event loop that has nothing to send: makes the descriptor readable only when the receiver leaves, except
    /// for one or two spurious wake-ups. Undoes [`Sender::arm`]. Does not wait.
    ///
    /// # Errors
    /// As [`Sender::try_send`]: here such a loop detects that the receiver has left.
    pub fn arm_for_end(&mut self) -> Result<()> {
        // `arm` checks for the end. Drains only this side's own wake: a later ring stays readable.
        let _ = self.arm(0)?;
        self.disarm();
        self.endpoint.doorbells.local_wake().drain();
        Ok(())
    }

    /// Undoes [`Sender::arm`].
    pub fn disarm(&mut self) {
        if self.endpoint.owner.is_current() {
            self.is_awaited = false;
            self.parts.lane.disarm();
        }
    }

    /// After [`Error::PeerDied`]: waits for the receiver's successor and offers it the lane with all unreleased
    /// messages. If this sender had connected, it connects under the same name again. If a [`crate::Listener`] had
    /// accepted it, that listener accepts the successor. Then this sender can send again, and the successor receives
    /// all unreleased messages again.
    ///
    /// On a path channel, `resume` waits for a receiver; sending needs none.
    ///
    /// # Errors
    /// [`Error::Refused`] between threads, and while the channel has not lost its peer (except on a path);
    /// [`Error::Corrupt`], [`Error::Forked`], [`Error::System`]. You can call it again after an error.
    pub fn resume(&mut self) -> Result<()> {
        in_call(self.resumed(None, &Waiter::Thread)).map(|_| ())
    }

    /// As [`Sender::resume`], until `deadline`; false when it passes. May exceed the deadline: once a successor has
    /// connected, and if the receiver had closed, this copies all unreleased messages.
    ///
    /// # Errors
    /// As [`Sender::resume`].
    pub fn resume_until(&mut self, deadline: impl Into<Deadline>) -> Result<bool> {
        in_call(self.resumed(deadline.into().instant(), &Waiter::Thread))
    }

    /// As [`Sender::resume`], but does not wait: the caller's event loop continues it. [`Resuming::cancel`] returns the
    /// sender, whenever it is called. If the receiver had closed, [`Resuming::try_finish`] copies all unreleased
    /// messages, once a successor has connected.
    ///
    /// # Errors
    /// [`Error::System`], with the sender; [`Resuming::try_finish`] returns the others.
    pub fn start_resume(self) -> std::result::Result<Resuming<Sender>, Box<(Sender, Error)>> {
        Resuming::new(self, |sender, waiter| Box::pin(sender.resumed(None, waiter)))
    }

    async fn resumed(&mut self, deadline: Option<Instant>, waiter: &Waiter) -> Result<bool> {
        self.endpoint.check_owner()?;
        if self.endpoint.is_path() {
            return self.wait_for_peer(deadline, waiter).await;
        }
        if self.endpoint.departure.is_none() && self.endpoint.owner.is_current() && self.parts.link.is_peer_gone()? {
            self.note_end();
        }
        if self.endpoint.departure.is_none() {
            return Err(Error::Refused("the receiver is alive: there is nobody to succeed it".to_owned()));
        }
        // Fails here if the lane is corrupt, so that no successor is blamed for it.
        self.parts.lane.refresh_head()?;
        let reconnect = self.endpoint.reconnect()?;
        if !reconnect.resume(&mut self.parts, Resume { doorbells: &self.endpoint.doorbells, deadline, waiter }).await? {
            return Ok(false);
        }
        self.endpoint.reinstate();
        self.unreleased();
        self.unsent = self.descriptors.len();
        // Descriptors that are not sent by the deadline go before those of the next message. Even if the successor dies
        // meanwhile, the lane has been resumed: the next call reports its end.
        while !self.send_owed_descriptors()? {
            // The same holds for an event loop, which does not wait for them.
            let deadline = if let Waiter::Loop(_) = waiter { Some(Instant::now()) } else { deadline };
            match self.wait_for_descriptor_space(deadline) {
                Ok(true) => {}
                Ok(false) => break,
                Err(_) if self.endpoint.departure.is_some() => break,
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Finds the receiver of a path channel that this side has just opened, and rings it. Does not report a receiver
    /// that left before.
    pub(crate) fn find_and_ring_peer(&mut self) -> Result<()> {
        self.find_peer()?;
        failpoint("sender meets: looked");
        self.parts.link.ring_peer();
        Ok(())
    }

    /// Waits until a path channel has a receiver. Returns false at the deadline.
    pub(crate) async fn wait_for_peer(&mut self, deadline: Option<Instant>, waiter: &Waiter) -> Result<bool> {
        loop {
            let closed = self.parts.link.peer().is_some() && self.parts.lane.has_consumer_closed();
            if self.endpoint.departure.is_some() || closed || self.parts.link.is_peer_gone()? {
                self.continue_without_peer();
            } else if !self.endpoint.owner.is_current() {
                return Err(self.not_usable());
            }
            self.endpoint.doorbells.drain()?;
            failpoint("sender waits for its peer: drained");
            // A receiver that has left may have a successor already.
            self.find_next_peer()?;
            failpoint("sender waits for its peer: looked");
            if self.parts.link.peer().is_some() {
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

    /// Makes all messages sent so far durable, on a path channel: they survive a crash of the machine, and `pelton
    /// recover` keeps those that the receiver had not released. A crash of processes needs no sync. Waits for the disk:
    /// milliseconds and more. On a tmpfs it takes no time, and promises nothing.
    ///
    /// # Errors
    /// [`Error::Refused`] for a channel that is not a path's; [`Error::Forked`]; [`Error::System`]. After the last one,
    /// a crash of the machine may lose messages even if the next call succeeds: the kernel reports a failed write once.
    pub fn sync(&mut self) -> Result<()> {
        let role = self.endpoint.role_to_sync()?;
        let (lane, memory) = (&self.parts.lane, &self.parts.memory);
        let tail = lane.tail();
        // The order: the directory, once; then the messages; then the tail and the head.
        role.sync_directory()?;
        memory.data.sync().map_err(Error::system("syncing the lane"))?;
        failpoint("sync: data");
        lane.producer_page().set_synced(tail);
        memory.page.sync().map_err(Error::system("syncing the lane's page"))?;
        memory.consumer.sync().map_err(Error::system("syncing the receiver's page"))
    }

    /// Counters of this side.
    pub fn counters(&self) -> Counters {
        if self.endpoint.owner.is_forked() {
            return Counters::default();
        }
        let page = self.parts.lane.producer_page();
        Counters {
            messages: page.messages(),
            bytes: page.bytes(),
            waits: page.waits(),
            sleeps: page.sleeps(),
            wakes_sent: page.wakes_sent(),
            depth_max: page.depth_max(),
        }
    }

    /// The number of the next message, as [`crate::Message::seq`] returns it: 1 in a new lane, then one more for each
    /// message, modulo 2^32, never 0. On a path channel it shows a successor how many messages the lane has had.
    pub fn next_seq(&self) -> u32 {
        self.parts.lane.tail().seq
    }

    /// Bytes of the lane's data.
    pub fn capacity(&self) -> u64 {
        self.parts.lane.capacity()
    }

    /// The largest message, in bytes.
    pub fn message_bytes_max(&self) -> u64 {
        self.parts.lane.message_bytes_max()
    }

    /// The receiver's process; `None` while this side knows of no receiver, on a path channel.
    pub fn peer(&self) -> Option<Peer> {
        self.parts.link.peer()
    }

    /// Closes the channel. The receiver receives all messages and then returns [`Error::Closed`]. Does not wait; see
    /// [`Sender::wait_released`]. Dropping the sender does the same.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn close(self) -> Result<()> {
        self.endpoint.check_owner()
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        if self.endpoint.owner.is_forked() {
            return;
        }
        self.parts.lane.close();
        // The order: the closed flag, the ring, the hang-up. A receiver that detects one finds the earlier ones done.
        self.parts.link.ring_peer();
        self.parts.link.shutdown();
        failpoint("sender closes: hung up");
    }
}

impl AsRawFd for Sender {
    /// As [`AsFd`], for runtimes that need the number.
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl AsFd for Sender {
    /// The descriptor for an event loop: see [`Sender::arm`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.endpoint.doorbells.as_fd()
    }
}

/// A waiting sender: for space, or until the lane is empty.
pub(crate) struct FreeSpace<'a> {
    pub(crate) sender: &'a mut Sender,
    pub(crate) want: WaitCondition,
}

/// The condition that a sender waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitCondition {
    /// Space for a message of this number of bytes and descriptors.
    Message(u64, u32),
    /// Space for a message of this number of bytes, with a traceparent.
    Traced(u64),
    /// The receiver has released every message.
    Empty,
}

impl Polled for FreeSpace<'_> {
    fn poll(&mut self) -> Result<bool> {
        if self.sender.parts.lane.has_unacknowledged_close() {
            return self.end();
        }
        let want = self.want;
        self.sender.with_memory(|lane| match want {
            WaitCondition::Message(bytes, 0) => lane.try_reserve(bytes).map(|space| space.is_some()),
            WaitCondition::Message(bytes, count) => {
                lane.try_reserve_with_descriptors(bytes, count).map(|space| space.is_some())
            }
            WaitCondition::Traced(bytes) => {
                lane.try_reserve_traced(bytes, &[0; traceparent::BYTES]).map(|space| space.is_some())
            }
            WaitCondition::Empty => lane.refresh_head().map(|unreleased| unreleased == 0),
        })
    }

    fn may_be_ready(&mut self) -> bool {
        self.sender.parts.lane.may_be_ready()
    }

    fn spin(&mut self) -> &mut Spin {
        &mut self.sender.endpoint.spin
    }

    fn last_ring(&self) -> Option<LastRing> {
        Some(self.sender.last_ring())
    }
}

impl Side for FreeSpace<'_> {
    fn arm(&mut self) -> Result<bool> {
        let mut everywhere = true;
        let lane = &mut self.sender.parts.lane;
        let bytes = match self.want {
            WaitCondition::Message(bytes, _) | WaitCondition::Traced(bytes) => Some(bytes),
            WaitCondition::Empty => None,
        };
        let armed = lane.arm(bytes, || everywhere = os::membarrier::barrier());
        if !everywhere {
            lane.request_fencing();
        }
        match armed {
            // The receiver has closed, and may have released every message before.
            Err(LaneError::Closed) => self.end().map(|_| false),
            armed => armed.map_err(|error| self.sender.failed(error)),
        }
    }

    fn disarm(&mut self) {
        self.sender.parts.lane.disarm();
    }

    fn end(&mut self) -> Result<bool> {
        self.sender.note_end();
        let unreleased = self.sender.unreleased();
        if self.want == WaitCondition::Empty && unreleased == 0 { Ok(true) } else { Err(self.sender.not_usable()) }
    }

    fn needs_timed_wait(&self) -> bool {
        self.sender.parts.lane.needs_timed_wait()
    }

    fn sleep(&mut self, deadline: Option<Instant>) -> Result<Ready> {
        self.sender.endpoint.doorbells.sleep(deadline)
    }

    fn rung(&mut self, alone: bool) -> Result<bool> {
        self.sender.endpoint.doorbells.drain_after_sleep(alone)?;
        failpoint("sender rung: drained");
        // A receiver may have opened the channel and left since the last check. If the check fails, the next wait
        // repeats it.
        let passed = self.sender.find_peer().inspect_err(|_| self.sender.endpoint.doorbells.local_wake().ring())?;
        if passed { self.end() } else { Ok(false) }
    }

    fn is_peer_known_gone(&mut self) -> Result<bool> {
        let gone = self.sender.is_peer_known_gone()?;
        if gone {
            // Notes the departure now: `find_peer` reports it only once, and new space may end this wait first.
            self.sender.note_end();
        }
        Ok(gone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Options;
    use crate::wait::Wait;

    /// Not a test: the receiver process of the next test. It ends without closing.
    #[test]
    fn child() {
        let Some(directory) = std::env::var_os("PELTON_DIRECTORY") else { return };
        let mut receiver = Options::new().open_receiver(directory).unwrap();
        while let Some(message) = receiver.try_receive().unwrap() {
            drop(message);
        }
        std::process::exit(0);
    }

    #[test]
    fn a_receiver_that_drains_the_lane_and_dies_between_two_checks_is_reported() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("c");
        let mut sender = Options::new().capacity(1 << 16).wait(Wait::Spin).create_sender(&directory).unwrap();
        while sender.try_send(&[0; 1000]).unwrap() == Sent::Sent {}
        // The steps of a sender that spins for space. The receiver runs after the first step.
        let mut waiting = FreeSpace { sender: &mut sender, want: WaitCondition::Message(1000, 0) };
        assert!(!waiting.poll().unwrap());
        let mut receiver = pelton_testkit::this_program();
        receiver.args(["--exact", "sender::tests::child"]).env("PELTON_DIRECTORY", &directory);
        assert!(receiver.output().unwrap().status.success());
        let deadline = Instant::now() + Duration::from_secs(60);
        while !waiting.is_peer_known_gone().unwrap() {
            assert!(Instant::now() < deadline, "the check is never due");
        }
        assert!(waiting.poll().unwrap(), "the receiver has released messages");
        let result = sender.try_send(&[0; 1000]).and_then(|_| sender.try_send(&[0; 1000]));
        assert!(matches!(result, Err(Error::PeerDied { .. })), "{result:?}");
    }

    /// A lane of that capacity, both of whose sides are on the one processor of this thread, as the sender knows.
    fn on_one_processor(capacity: u64, body: impl FnOnce(Sender, crate::Receiver) + Send) {
        // A thread of its own, because it stays there.
        let run = || {
            let processor = os::processor().unwrap();
            let mut only = rustix::thread::CpuSet::new();
            only.set(processor as usize);
            rustix::thread::sched_setaffinity(None, &only).unwrap();
            let (sender, receiver) = Options::new().capacity(capacity).threads().unwrap();
            receiver.lanes.current.consumer.note_processor(Some(processor));
            body(sender, receiver);
        };
        std::thread::scope(|scope| scope.spawn(run).join()).unwrap();
    }

    #[test]
    fn a_stopped_receiver_makes_a_sender_pause_once_and_costs_no_capacity() {
        on_one_processor(4 * LEAD, |mut sender, _receiver| {
            let message = [0; 60_000];
            let messages = 3 * LEAD / 60_008;
            (0..messages).for_each(|_| sender.send(&message).unwrap());
            assert_eq!((sender.counters().waits, sender.counters().sleeps), (1, 1));
            let mut more = 0;
            while sender.try_send(&message).unwrap() == Sent::Sent {
                more += 1;
            }
            assert!(messages + more >= 4 * LEAD / 60_008 - 1, "{messages} and {more}");
            assert_eq!(sender.counters().waits, 1);
        });
    }

    #[test]
    fn a_message_that_does_not_fit_into_the_lead_is_sent_without_a_pause() {
        on_one_processor(8 * LEAD, |mut sender, mut receiver| {
            sender.send(&vec![1; LEAD as usize]).unwrap();
            assert_eq!(receiver.receive().unwrap().len(), LEAD as usize);
            assert_eq!(sender.counters().waits, 0);
        });
    }

    #[test]
    fn a_sender_that_must_not_wait_does_not_pause() {
        on_one_processor(4 * LEAD, |mut sender, _receiver| {
            while sender.try_send(&[0; 1000]).unwrap() == Sent::Sent {}
            let counters = sender.counters();
            assert!(counters.bytes > 4 * LEAD - (16 << 10) - 8 * counters.messages, "{counters:?}");
            assert_eq!((counters.waits, counters.sleeps), (0, 0));
        });
    }

    #[test]
    fn a_deadline_before_the_end_of_the_pause_leaves_the_rest_of_the_lane_usable() {
        on_one_processor(4 * LEAD, |mut sender, _receiver| {
            for _ in 0..2 * LEAD / 60_008 {
                assert_eq!(sender.send_until(&[0; 60_000], Instant::now()).unwrap(), Sent::Sent);
            }
        });
    }
}
