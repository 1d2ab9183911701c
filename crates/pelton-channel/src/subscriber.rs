//! The receiving endpoint of a broadcast: a cursor of its own on the lane of a [`Publisher`](crate::Publisher).

use crate::backoff::Backoff;
use crate::broadcast_role::BroadcastRole;
use crate::counters::Counters;
use crate::doorbells::Doorbells;
use crate::endpoint::{Departure, Endpoint};
use crate::error::{Error, Result};
use crate::link::Link;
use crate::lockstep::Lockstep;
use crate::name::Name;
use crate::opening::Opening;
#[cfg(doc)]
use crate::options::Options;
#[cfg(doc)]
use crate::settings::Policy;
use crate::settings::Settings;
use crate::wait::{self, Armed, BUSY_POLL, Deadline, Polled, Side, Spin};
use pelton_lane::{
    BroadcastConsumer, BroadcastMemory, Copied, Data, Joined, LastRing, Record, Sleeper, Wake, failpoint,
};
use pelton_os::{self as os, Peer, Ready, Segment, membarrier};
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::Instant;

/// How many bytes of overwritten messages one call copies, plus 4096 for each, before it returns. A guess: one is rare.
const OVERTAKEN_BYTES: usize = 16 << 20;

/// The receiving endpoint of a broadcast. `Send`, not `Sync`: one thread at a time.
///
/// Made by [`Options::connect_subscriber`], or for a thread by [`Publisher::subscriber`](crate::Publisher::subscriber).
/// Each subscriber receives each message of the publisher from its beginning on, in order, or learns how many it has
/// missed. Dropping it leaves the broadcast.
#[derive(Debug)]
pub struct Subscriber {
    pub(crate) parts: SubscriberParts,
    pub(crate) endpoint: Endpoint<()>,
    /// The next message in place, if it was found. Its header is hostile, so the call that returns the message does
    /// not load it again. It stays while a [`Delivery`] lives, and if that is forgotten: only its drop clears it.
    found: Option<Record>,
    /// The next message, if the policy copies and [`Subscriber::is_copied`].
    buffer: Vec<u8>,
    is_copied: bool,
    /// The last copies found a message and lost it: the publisher was faster.
    is_overtaken: bool,
    /// Messages missed since the last one received, and those missed before.
    missed_now: u64,
    pub(crate) missed: u64,
    backoff: Backoff,
    lockstep: Lockstep,
    /// How to reach the publisher's successor; `None` between threads.
    pub(crate) reconnect: Option<(Name, Settings)>,
    /// The connection to a successor, from one [`Subscriber::resume_until`] to the next.
    pub(crate) joining: Option<Opening<SubscriberParts>>,
    /// In a directory: its role there.
    pub(crate) path: Option<BroadcastRole>,
}

/// A consumer with its memory and its link: the result of a subscriber's handshake.
#[derive(Debug)]
pub(crate) struct SubscriberParts {
    pub(crate) lane: BroadcastConsumer,
    pub(crate) sleeper: Sleeper,
    pub(crate) link: Link,
    /// Dropped after the lane and the sleeper, which point into it.
    pub(crate) _memory: SubscriberMemory,
}

/// The segments of a consumer's lane.
#[derive(Debug)]
pub(crate) struct SubscriberMemory {
    pub(crate) page: Arc<Segment>,
    pub(crate) data: Arc<Segment>,
    pub(crate) cursor: Arc<Segment>,
}

/// The lane's view of its two segments.
pub(crate) fn broadcast_memory(page: &Segment, data: &Segment) -> BroadcastMemory {
    // SAFETY: the segment's mapping is as long as its size, page-aligned, and kept by the owner of the lane.
    BroadcastMemory { producer: page.base().cast(), data: unsafe { Data::new(data.base(), data.bytes()) } }
}

impl SubscriberMemory {
    pub(crate) fn attach(
        &self,
        policy: pelton_lane::Policy,
        joined: Joined,
        message_bytes_max: u64,
        can_barrier: bool,
    ) -> Result<(BroadcastConsumer, Sleeper)> {
        let memory = broadcast_memory(&self.page, &self.data);
        let cursor = self.cursor.base().cast();
        // SAFETY: the handshake has checked the sizes of the segments and their seals, `SubscriberParts` drops them
        // after the lane and the sleeper, and this process has created the cursor's page for this consumer alone.
        unsafe {
            let lane = BroadcastConsumer::attach(memory, cursor, policy, joined, message_bytes_max, can_barrier)?;
            let sleeper = lane.sleeper(can_barrier);
            Ok((lane, sleeper))
        }
    }
}

impl Subscriber {
    pub(crate) fn new(parts: SubscriberParts, doorbells: Doorbells, options: &Settings) -> Result<Subscriber> {
        let endpoint = Endpoint::new(doorbells, options.wait, parts.link.peer())?;
        Ok(Subscriber {
            parts,
            endpoint,
            found: None,
            buffer: Vec::new(),
            is_copied: false,
            is_overtaken: false,
            missed_now: 0,
            missed: 0,
            backoff: Backoff::new(),
            lockstep: Lockstep::default(),
            reconnect: None,
            joining: None,
            path: None,
        })
    }

    /// The next message, if there is one now. Never waits.
    ///
    /// # Errors
    /// [`Error::Closed`] and [`Error::PeerDied`] after the publisher has left and all its messages were received;
    /// [`Error::Corrupt`] when it violates the protocol; [`Error::Forked`].
    #[inline(always)]
    pub fn try_receive(&mut self) -> Result<Option<Delivery<'_>>> {
        self.receive_until(Deadline::Now)
    }

    /// The next message. Waits for it as [`crate::Wait`] of the options determines, without a limit.
    ///
    /// # Errors
    /// As [`Subscriber::try_receive`].
    #[inline(always)]
    pub fn receive(&mut self) -> Result<Delivery<'_>> {
        if let Some(record) = self.peek_fast() {
            self.found = Some(record);
        } else {
            assert!(self.find_cold(Deadline::Never)?, "without a deadline it does not pass");
        }
        Ok(self.delivery())
    }

    /// As [`Subscriber::receive`], until `deadline`; `None` when it passes.
    ///
    /// # Errors
    /// As [`Subscriber::try_receive`].
    #[inline(always)]
    pub fn receive_until(&mut self, deadline: impl Into<Deadline>) -> Result<Option<Delivery<'_>>> {
        if let Some(record) = self.peek_fast() {
            self.found = Some(record);
        } else if !self.find_cold(deadline.into())? {
            return Ok(None);
        }
        Ok(Some(self.delivery()))
    }

    /// The next message in the usual case. A subscriber that gates misses nothing.
    #[inline(always)]
    fn peek_fast(&self) -> Option<Record> {
        if self.found.is_some() || !self.endpoint.owner.is_current() {
            return None;
        }
        self.parts.lane.peek_fast()
    }

    #[cold]
    #[inline(never)]
    fn find_cold(&mut self, deadline: Deadline) -> Result<bool> {
        self.find(deadline)
    }

    /// Finds the next message in the usual case: [`Subscriber::delivery`] returns it.
    #[inline(always)]
    pub(crate) fn find_fast(&mut self) -> bool {
        let record = self.peek_fast();
        if record.is_some() {
            self.found = record;
        }
        record.is_some()
    }

    /// The message that `find` has found.
    #[inline(always)]
    pub(crate) fn delivery(&mut self) -> Delivery<'_> {
        debug_assert!(self.found.is_some() != self.is_copied);
        Delivery { subscriber: self }
    }

    /// Whether there is a message; waits for it until `deadline`.
    #[inline]
    fn find(&mut self, deadline: Deadline) -> Result<bool> {
        if self.poll_if_usable()? {
            return Ok(true);
        }
        self.find_slow(deadline)
    }

    /// Whether there is a message, after the check that this handle may be used.
    #[inline]
    pub(crate) fn poll_if_usable(&mut self) -> Result<bool> {
        if self.endpoint.owner.is_current() { self.poll() } else { Err(self.not_usable()) }
    }

    /// Whether the last poll has found a message.
    pub(crate) fn has_found(&self) -> bool {
        self.found.is_some() || self.is_copied
    }

    #[cold]
    #[inline(never)]
    fn find_slow(&mut self, deadline: Deadline) -> Result<bool> {
        // As in `Receiver`: a deadline that has passed is no wait, so it has no part in the policy of waits.
        let until = deadline.until().filter(|until| until.is_none_or(|until| Instant::now() < until));
        let Some(until) = until else {
            let is_gone =
                self.has_publisher_closed() || self.parts.link.is_check_overdue() && self.is_publisher_gone()?;
            return if is_gone { Side::end(self) } else { Ok(false) };
        };
        if self.comes_soon() && self.poll()? {
            return Ok(true);
        }
        self.parts.lane.count_wait();
        // As in `Receiver`: a yield may take a time slice, so none with a deadline.
        if until.is_none() && self.must_yield() {
            let begun = Instant::now();
            std::thread::yield_now();
            let has_message = self.poll()?;
            self.lockstep.has_yielded(begun.elapsed(), has_message);
            if has_message {
                return Ok(true);
            }
        }
        while wait::wait(self, until)? {
            // Otherwise it did not sleep because it was overtaken.
            if self.has_found() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// As `Receiver::comes_soon`.
    fn comes_soon(&mut self) -> bool {
        if self.endpoint.spin.first_polls() > 0 {
            for _ in 0..self.backoff.next_pauses(self.parts.lane.number() as u32, 0) {
                os::relax();
            }
        }
        for _ in 0..self.endpoint.spin.first_polls() {
            os::relax();
            if self.parts.lane.may_be_ready() {
                return true;
            }
        }
        false
    }

    /// Whether to let the publisher run before this wait, because both share a processor.
    fn must_yield(&mut self) -> bool {
        let lane = &self.parts.lane;
        self.endpoint.spin.shares_processor_with(lane.producer_last_ring())
            && self.lockstep.must_yield(lane.number() as u32, lane.taken_bytes())
    }

    /// Whether there is a message now: the next [`Subscriber::try_receive`] returns it. Never waits.
    ///
    /// # Errors
    /// As [`Subscriber::try_receive`].
    pub fn has_message(&mut self) -> Result<bool> {
        self.find(Deadline::Now)
    }

    /// Messages that this subscriber has missed so far because it fell behind; with [`Policy::Latest`], those that it
    /// skipped. Each [`Delivery`] says how many came directly before it. Messages that were missed at the very end of a
    /// broadcast are in this count alone.
    pub fn missed(&self) -> u64 {
        self.missed
    }

    /// Whether it continues a durable subscription, and did not begin it: an earlier process has, under the same name.
    pub fn continues(&self) -> bool {
        self.path.as_ref().is_some_and(|path| path.continues)
    }

    /// The number of the next message, from 1 on, of this publisher; after a successor connects, of that one.
    pub fn next_number(&self) -> u64 {
        self.parts.lane.number() - u64::from(self.is_copied)
    }

    /// Makes the descriptor readable when there is a message, or the publisher leaves. Does not wait.
    ///
    /// # Errors
    /// As [`Subscriber::try_receive`].
    pub fn arm(&mut self) -> Result<Armed> {
        if !self.endpoint.owner.is_current() {
            return Err(self.not_usable());
        }
        self.endpoint.doorbells.drain()?;
        failpoint("subscriber arms: drained");
        let armed = Side::arm(self)?;
        if armed && self.is_publisher_gone()? {
            Side::disarm(self);
            return Ok(Armed::waiting_if(!Side::end(self)?));
        }
        if !armed || Side::needs_timed_wait(self) {
            // As in `Receiver::arm`.
            self.endpoint.doorbells.local_wake().ring();
        }
        Ok(Armed::waiting_if(armed))
    }

    /// For an event loop, before [`Subscriber::arm`]: polls for a message for some microseconds, and returns whether
    /// there is one. Neither sleeps nor arms.
    ///
    /// # Errors
    /// As [`Subscriber::try_receive`].
    pub fn busy_poll(&mut self) -> Result<bool> {
        if !self.endpoint.owner.is_current() {
            return Err(self.not_usable());
        }
        wait::busy_poll(self, BUSY_POLL, 0)
    }

    /// Undoes [`Subscriber::arm`].
    pub fn disarm(&mut self) {
        if self.endpoint.owner.is_current() {
            self.parts.sleeper.disarm();
        }
    }

    /// Counters of this side.
    pub fn counters(&self) -> Counters {
        if self.endpoint.owner.is_forked() {
            return Counters::default();
        }
        self.parts.lane.store_counters();
        let page = self.parts.lane.cursor_page();
        Counters {
            messages: page.messages(),
            bytes: page.bytes(),
            waits: page.waits(),
            sleeps: page.sleeps(),
            wakes_sent: page.wakes_sent(),
            depth_max: 0,
        }
    }

    /// Bytes of the lane's data.
    pub fn capacity(&self) -> u64 {
        self.parts.lane.capacity()
    }

    /// The largest message, in bytes.
    pub fn message_bytes_max(&self) -> u64 {
        self.parts.lane.message_bytes_max()
    }

    /// The publisher's process.
    pub fn peer(&self) -> Option<Peer> {
        self.parts.link.peer()
    }

    /// Leaves the broadcast, as dropping does. Does not wait.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn close(self) -> Result<()> {
        self.endpoint.check_owner()
    }

    /// Whether the publisher is known to have left. Without a system call.
    fn is_over(&self) -> bool {
        self.has_publisher_closed() || self.path.as_ref().is_some_and(|path| path.is_gone)
    }

    #[cold]
    fn not_usable(&mut self) -> Error {
        self.endpoint.error(|| 0)
    }

    /// Ends the delivery of a copied message.
    #[cold]
    #[inline(never)]
    fn drop_copy(&mut self) {
        if self.endpoint.owner.is_forked() {
            return;
        }
        (self.is_copied, self.missed_now) = (false, 0);
        if self.path.is_some() {
            self.release();
        }
    }

    /// Gives back the space of what was received, and rings a publisher that waits for it.
    #[inline(always)]
    fn release(&mut self) {
        if self.parts.lane.release() == Wake::Ring {
            self.ring();
        }
    }

    #[cold]
    #[inline(never)]
    fn ring(&self) {
        let lane = &self.parts.lane;
        self.parts.link.wake_peer(|processor, at| lane.note_ring(processor, at));
    }
}

impl Polled for Subscriber {
    #[inline]
    fn poll(&mut self) -> Result<bool> {
        if self.has_found() {
            return Ok(true);
        }
        let found = if self.parts.lane.policy().reads_in_place() {
            self.parts.lane.peek().map(|record| {
                self.found = record;
                self.found.is_some()
            })
        } else {
            self.copy()
        };
        // The publisher may wait for the release of messages that this side has passed over, and sends none before.
        if matches!(found, Ok(false)) && self.parts.lane.has_passed() {
            self.release();
        }
        found.map_err(|error| {
            self.endpoint.leave(Departure::Corrupt);
            error.into()
        })
    }

    fn may_be_ready(&mut self) -> bool {
        self.parts.lane.may_be_ready()
    }

    fn spin(&mut self) -> &mut Spin {
        &mut self.endpoint.spin
    }

    fn last_ring(&self) -> Option<LastRing> {
        Some(self.parts.lane.producer_last_ring())
    }
}

impl Subscriber {
    /// Copies the next message into the buffer. A publisher that overtakes each copy does not keep it here: then it
    /// sets `is_overtaken`.
    fn copy(&mut self) -> std::result::Result<bool, pelton_lane::LaneError> {
        let mut bytes = 0;
        self.is_overtaken = false;
        while bytes < OVERTAKEN_BYTES {
            let missed = self.parts.lane.missed();
            let found = self.parts.lane.copy(&mut self.buffer)?;
            let more = self.parts.lane.missed() - missed;
            (self.missed_now, self.missed) = (self.missed_now + more, self.missed + more);
            match found {
                Some(Copied::Message) => {
                    self.is_copied = true;
                    // A durable one is released when the caller is done with it: a successor receives it otherwise.
                    if self.path.as_ref().is_none_or(|path| !path.is_durable) {
                        self.release();
                    }
                    return Ok(true);
                }
                Some(Copied::Missed(_)) => bytes += 4096 + self.buffer.len(),
                None => return Ok(false),
            }
        }
        self.is_overtaken = true;
        Ok(false)
    }
}

impl Side for Subscriber {
    fn arm(&mut self) -> Result<bool> {
        let mut everywhere = true;
        let SubscriberParts { lane, sleeper, .. } = &mut self.parts;
        sleeper.arm(|| everywhere = lane.is_producer_fencing() || membarrier::barrier());
        if !everywhere {
            sleeper.request_fencing();
        }
        let mut found = self.poll();
        // A ring may have reported the end while messages were left: nothing rings again.
        if matches!(found, Ok(false)) && self.is_over() {
            found = self.end();
        }
        if matches!(found, Ok(false)) && self.is_overtaken {
            // A message may be there.
            self.parts.sleeper.disarm();
            return Ok(false);
        }
        if !matches!(found, Ok(false)) {
            self.parts.sleeper.disarm();
        } else {
            self.parts.lane.count_sleep();
            self.parts.lane.note_processor(os::processor());
        }
        Ok(!found?)
    }

    fn disarm(&mut self) {
        self.parts.sleeper.disarm();
    }

    fn end(&mut self) -> Result<bool> {
        let (generation, _) = self.parts.lane.publisher();
        let mut closed = self.closed_generation();
        if closed.is_none() {
            if !self.is_publisher_gone()? {
                return Ok(false);
            }
            // It may have closed before its process ended.
            closed = self.closed_generation();
        }
        // It may have committed messages before it left. [close]
        if self.poll()? {
            return Ok(true);
        }
        if let Some(path) = &mut self.path {
            path.past = closed.unwrap_or(generation);
        }
        self.endpoint.leave(if closed.is_some() { Departure::Closed } else { Departure::PeerDied });
        Err(self.not_usable())
    }

    fn needs_timed_wait(&self) -> bool {
        self.parts.sleeper.needs_fenced_wakers() && !self.parts.lane.is_producer_fencing()
    }

    fn sleep(&mut self, deadline: Option<Instant>) -> Result<Ready> {
        self.endpoint.doorbells.sleep(deadline)
    }

    fn rung(&mut self, alone: bool) -> Result<bool> {
        self.endpoint.doorbells.drain_after_sleep(alone)?;
        failpoint("subscriber rung: drained");
        self.find_publisher()?;
        if self.is_over() { self.end() } else { Ok(false) }
    }

    fn is_peer_known_gone(&mut self) -> Result<bool> {
        Ok(self.has_publisher_closed() || self.parts.link.is_check_due() && self.is_publisher_gone()?)
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        if self.endpoint.owner.is_forked() {
            return;
        }
        if self.path.as_ref().is_some_and(|path| path.is_durable) {
            self.pause();
            return;
        }
        self.parts.lane.close();
        self.parts.sleeper.close();
        self.parts.link.ring_peer();
        self.parts.link.shutdown();
        failpoint("subscriber closes: hung up");
    }
}

impl AsFd for Subscriber {
    /// The descriptor for an event loop: see [`Subscriber::arm`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.endpoint.doorbells.as_fd()
    }
}

impl AsRawFd for Subscriber {
    /// As [`AsFd`], for runtimes that need the number.
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

/// A received message: its bytes, by `Deref`. Dropping it releases the message: a subscriber that gates keeps its space
/// until then.
#[derive(Debug)]
pub struct Delivery<'a> {
    /// Its message is what the subscriber has found: decision 0049.
    subscriber: &'a mut Subscriber,
}

const _: () = assert!(size_of::<Delivery<'_>>() == size_of::<usize>(), "a move is one load and one store");

impl Delivery<'_> {
    /// Messages that this subscriber has missed directly before this one.
    #[expect(clippy::misnamed_getters, reason = "the subscriber's `missed` is of all messages")]
    pub fn missed(&self) -> u64 {
        self.subscriber.missed_now
    }

    /// The message's number: each publisher counts its messages from 1.
    pub fn number(&self) -> u64 {
        self.subscriber.next_number()
    }
}

impl Deref for Delivery<'_> {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        let Some(record) = &self.subscriber.found else { return &self.subscriber.buffer };
        let payload = self.subscriber.parts.lane.payload(record);
        // SAFETY: the lane has checked that the record lies in the mapped data. A subscriber that gates is never
        // passed, so the publisher does not write there before the release in `drop`, as with `Message`: no child of a
        // fork releases it either.
        unsafe { std::slice::from_raw_parts(payload.as_ptr(), record.bytes as usize) }
    }
}

impl Drop for Delivery<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        // A child that inherited it releases nothing of its parent's.
        let Subscriber { found, parts, endpoint, .. } = &mut *self.subscriber;
        if let Some(record) = found
            && !endpoint.owner.is_forked()
        {
            parts.lane.take(record);
            *found = None;
            self.subscriber.release();
        } else {
            self.subscriber.drop_copy();
        }
    }
}

/// The lower interface: see [`crate::raw`].
#[doc(hidden)]
impl Subscriber {
    /// Whether this process is a forked child of the subscriber's.
    pub fn is_forked(&self) -> bool {
        self.endpoint.owner.is_forked()
    }

    /// The delivery that [`Delivery::keep`] has kept. Between the two the subscriber is used for nothing else.
    #[inline(always)]
    pub fn kept_delivery(&mut self) -> Delivery<'_> {
        self.delivery()
    }
}

#[doc(hidden)]
impl Delivery<'_> {
    /// Ends the borrow, and releases nothing: the message stays the next one. See [`Subscriber::kept_delivery`].
    #[inline(always)]
    pub fn keep(self) {
        std::mem::forget(self);
    }
}

#[cfg(test)]
mod tests {
    use crate::{Options, Policy};
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    #[test]
    fn a_message_that_was_found_is_received_though_the_publisher_clears_its_header() {
        let mut publisher = Options::new().capacity(65536).publisher().unwrap();
        let mut subscriber = publisher.subscriber(&Options::new()).unwrap();
        publisher.send(b"first").unwrap();
        assert!(subscriber.has_message().unwrap());
        // SAFETY: the first header of the mapped data, which every side uses as an atomic word.
        unsafe { publisher.data().base().cast::<AtomicU64>().as_ref() }.store(0, Relaxed);
        assert_eq!(subscriber.try_receive().unwrap().as_deref(), Some(&b"first"[..]));
        assert!(subscriber.try_receive().unwrap().is_none());
    }

    #[test]
    fn a_message_that_is_not_taken_keeps_what_was_missed_before_it() {
        let mut publisher = Options::new().capacity(65536).publisher().unwrap();
        let mut subscriber = publisher.subscriber(&Options::new().policy(Policy::Latest)).unwrap();
        (0..3).for_each(|_| publisher.send(b"x").unwrap());
        for _ in 0..2 {
            let delivery = subscriber.try_receive().unwrap().unwrap();
            assert_eq!((delivery.number(), delivery.missed()), (3, 2));
            delivery.keep();
            subscriber.kept_delivery().keep();
        }
        subscriber.try_receive().unwrap().unwrap().keep();
        drop(subscriber.kept_delivery());
        publisher.send(b"x").unwrap();
        assert_eq!(subscriber.try_receive().unwrap().unwrap().missed(), 0);
    }
}
