//! The sending endpoint of a broadcast: one lane, which each subscriber reads by a cursor of its own. It admits
//! subscribers, and detects their ends, within its own calls only.

use crate::acceptor::Acceptor;
use crate::broadcast_role::PublisherPath;
use crate::counters::Counters;
use crate::doorbells::Doorbells;
use crate::endpoint::Endpoint;
use crate::error::{Error, Result};
use crate::handshake::broadcast::{
    Joining, PublisherSide, make_broadcast_data, make_broadcast_page, make_cursor_page, new_subscription,
};
use crate::link::{Link, UNKNOWN_PEER, this_process};
use crate::listener::Listener;
use crate::options::{Options, maker};
use crate::sender::{LEAD, LEAD_PAUSE, Sent};
use crate::settings::{Policy, Settings};
use crate::subscriber::{Subscriber, SubscriberMemory, SubscriberParts, broadcast_memory};
use crate::transport::{Queue, ThreadTransport};
use crate::wait::{self, Armed, BUSY_POLL, Deadline, Polled, Side, Spin};
use crate::window::{Keeps, Window};
use pelton_lane::{
    BroadcastProducer, CURSORS_MAX, CursorLoss, CursorPage, Joined, LaneError, LastRing, ReservedSpace, StartFrom,
    failpoint,
};
use pelton_os::{self as os, Event, Peer, Ready, Segment, Timer, membarrier};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval of the checks for subscribers that join or leave, of a publisher that never waits.
const CHECK_INTERVAL_NS: u64 = 10_000_000;
/// A publisher whose messages are closer than this reads the coarse clock with each eighth message only. Not with later
/// ones: after a burst, the first subscriber may have to wait for so many messages. The reading costs some 5 ns.
const READING_NS: u64 = 1_000_000;
const READING_AFTER: u32 = 8;
/// What the timer for a subscriber that holds the publisher up is reported as.
const HOLD_TIMER: u32 = u32::MAX;

/// The sending endpoint of a broadcast: one publisher, up to 64 subscribers. `Send`, not `Sync`: one thread at a time.
///
/// [`Options::publish_at`] publishes to other processes under a name, [`Options::publisher`] to threads of this process
/// alone. Each message is copied into the lane once, whatever the number of subscribers. Without subscribers, messages
/// are overwritten by later ones.
///
/// Subscribers join, and their ends are detected, **within the publisher's calls**: a call that sends does that if
/// 10 ms have passed since the last time; after a burst, one of the first eight calls does. A publisher that sends
/// rarely calls [`Publisher::admit`] when its descriptor is readable.
///
/// A subscriber with [`Policy::Gate`] holds the publisher up when it is behind by the whole capacity: then
/// [`Publisher::send`] waits, and [`Publisher::try_send`] returns [`Sent::Full`]. [`Publisher::subscribers`] shows the
/// one that does. A killed subscriber holds nothing up, a stopped one does. [`Options::hold_max`] refuses such
/// subscribers.
///
/// If the slowest subscriber gates on the processor of the publisher, [`Publisher::send`] also pauses once 2 MiB are
/// unreleased, until it has released half of its messages, but at most 10 ms: otherwise that one would not run. Then
/// the rest of the capacity is used. Not with [`Options::history`], or while a subscriber may lag.
///
/// ```
/// # fn main() -> pelton::Result<()> {
/// let name = format!("unix:{}/publisher-doc-{}", std::env::temp_dir().display(), std::process::id());
/// let mut publisher = pelton::Options::new().publish_at(&name)?;
/// // Usually another process:
/// let receiving = std::thread::spawn(move || -> pelton::Result<Vec<u8>> {
///     let mut subscriber = pelton::Subscriber::connect(&name)?;
///     Ok(subscriber.receive()?.to_vec())
/// });
/// publisher.wait_subscribers_until(1, pelton::Deadline::Never)?;
/// publisher.send(b"hello")?;
/// assert_eq!(receiving.join().unwrap()?, b"hello");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Publisher {
    /// Dropped before the memory that it points into: `side`, and the cursors of `subscriptions`.
    pub(crate) lane: BroadcastProducer,
    pub(crate) endpoint: Endpoint<()>,
    /// By their slots.
    pub(crate) subscriptions: [Option<Box<Subscription>>; CURSORS_MAX],
    side: PublisherSide,
    acceptor: Option<Acceptor<Joining>>,
    window: Window,
    /// The next message when it last slept within the lead: see [`Publisher::find_nearby`].
    paused_at: u64,
    /// In a directory: its role there.
    pub(crate) path: Option<PublisherPath>,
    /// The last number given to a subscriber of another process.
    pub(crate) number: u32,
    /// Messages until the clock is read, and from one reading to the next.
    left: u32,
    interval: u32,
    last_reading_ns: u64,
    last_check_ns: u64,
    /// The subscriber (`Subscription::join`) that held the publisher up at its last check, until it is held up no more.
    holder: Option<u64>,
    /// Subscribers that were removed because their cursor broke the rules.
    pub(crate) corrupt: u64,
    /// An event loop waits: the last [`Publisher::arm`] has returned [`Armed::Waiting`].
    is_awaited: bool,
    /// For an event loop: when a subscriber will have held the publisher up for long enough.
    pub(crate) timer: Timer,
}

/// A lane with its memory: the beginning of a publisher.
#[derive(Debug)]
pub(crate) struct PublisherParts {
    pub(crate) lane: BroadcastProducer,
    pub(crate) page: Arc<Segment>,
    pub(crate) data: Arc<Segment>,
    pub(crate) message_bytes_max: u64,
    pub(crate) doorbells: Doorbells,
}

/// A subscriber, as its publisher knows it.
#[derive(Debug)]
pub(crate) struct Subscription {
    pub(crate) join: u64,
    /// 0 for a thread.
    pub(crate) number: u32,
    pub(crate) policy: pelton_lane::Policy,
    /// Since when the publisher has waited for it, with its cursor then, if it has been the slowest since the last
    /// message found space.
    pub(crate) held: Option<(Instant, u64)>,
    pub(crate) link: Link,
    /// The lane uses it until the subscriber is removed.
    pub(crate) cursor: Arc<Segment>,
    /// Where its page begins in that segment.
    pub(crate) at: usize,
}

impl Subscription {
    fn page(&self) -> &CursorPage {
        // SAFETY: the segment holds the page there, and lives as long as `self`. All its words are atomic, but for the
        // preamble, which was written before it was shared.
        unsafe { self.cursor.base().byte_add(self.at).cast().as_ref() }
    }
}

/// A subscriber, as [`Publisher::subscribers`] shows it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SubscriberState {
    /// Its process; for a thread, this one; pid 0: a durable one that no process uses.
    pub peer: Peer,
    /// The name of its durable subscription.
    pub durable: Option<String>,
    /// Its policy.
    pub policy: Policy,
    /// With [`Policy::Gate`]: how long it may hold the publisher up.
    pub lag_after: Option<Duration>,
    /// Whether it may be passed now: always with [`Policy::Lag`] and [`Policy::Latest`], and while a subscriber that
    /// gates has held the publisher up for too long.
    pub lags: bool,
    /// Messages sent and not released by it.
    pub behind: u64,
    /// Messages that it says to have received.
    pub messages: u64,
    /// Messages that it says to have missed.
    pub missed: u64,
    /// How long it has been holding the publisher up, if it does: the lane is full, or the publisher waits until
    /// everything is released, and it is the slowest.
    pub holds: Option<Duration>,
}

impl Options<maker::Publish> {
    /// Creates a publisher for threads of this process, which subscribe by [`Publisher::subscriber`]. Does not wait.
    ///
    /// # Errors
    /// [`Error::Option`], [`Error::System`].
    pub fn publisher(&self) -> Result<Publisher> {
        Publisher::new(self.settings(), None)
    }
}

impl Options<maker::PublishAt> {
    /// Creates a publisher to which other processes subscribe under `name`, a short name or `unix:PATH`, and threads of
    /// this process by [`Publisher::subscriber`]. Does not wait.
    ///
    /// # Errors
    /// As [`Listener::bind`]; [`Error::Option`].
    pub fn publish_at(&self, name: &str) -> Result<Publisher> {
        Publisher::new(self.settings(), Some(Listener::with_settings(name, self.settings())?))
    }
}

impl Publisher {
    fn new(options: &Settings, listener: Option<Listener>) -> Result<Publisher> {
        let can_barrier = membarrier::register();
        let (capacity, limit) = options.checked_sizes()?;
        let name = listener.as_ref().map_or("", |listener| listener.inner.bound.name());
        let make = || -> std::io::Result<_> {
            let data = make_broadcast_data(capacity, name)?;
            let page = make_broadcast_page(capacity, limit, &data, name)?;
            Ok((Arc::new(page), Arc::new(data)))
        };
        let (page, data) = make().map_err(Error::system("making a lane"))?;
        let doorbells = Doorbells::new()?;
        let acceptor = listener.map(|listener| Acceptor::new(listener, &doorbells)).transpose()?;
        // SAFETY: the segments are new, of the sizes in the page, and outlive the lane: see the order of the fields.
        let lane = unsafe { BroadcastProducer::attach(broadcast_memory(&page, &data), 1, can_barrier) };
        let mut publisher =
            Publisher::of_parts(PublisherParts { lane, page, data, message_bytes_max: limit, doorbells }, options)?;
        publisher.acceptor = acceptor;
        Ok(publisher)
    }

    /// The publisher of a lane, which no subscriber can reach yet.
    pub(crate) fn of_parts(parts: PublisherParts, options: &Settings) -> Result<Publisher> {
        let PublisherParts { mut lane, page, data, message_bytes_max, doorbells } = parts;
        let timer = Timer::new().map_err(Error::system("making a timer"))?;
        doorbells.watch_connecting(timer.as_fd(), HOLD_TIMER).map_err(Error::system("watching a timer"))?;
        lane.set_history(options.history);
        let window = Window::of(options, lane.capacity(), lane.sent_bytes());
        lane.set_window(window.bytes());
        Ok(Publisher {
            lane,
            endpoint: Endpoint::new(doorbells.clone(), options.wait, None)?,
            subscriptions: [const { None }; CURSORS_MAX],
            side: PublisherSide { page, data, message_bytes_max, doorbells, hold_max_ns: options.hold_max_ns },
            acceptor: None,
            window,
            paused_at: 0,
            path: None,
            number: 0,
            left: 1,
            interval: 1,
            last_reading_ns: 0,
            last_check_ns: 0,
            holder: None,
            corrupt: 0,
            is_awaited: false,
            timer,
        })
    }

    /// Publishes under `name` (a short name, or `unix:PATH`) with default [`Options`]. Does not wait.
    ///
    /// # Errors
    /// As [`Options::publish_at`].
    pub fn bind(name: &str) -> Result<Publisher> {
        Options::new().publish_at(name)
    }

    /// A subscriber for a thread of this process, which has joined already. Does not wait. Makes the descriptor
    /// readable: an event loop that waits arms again.
    ///
    /// ```
    /// # fn main() -> pelton::Result<()> {
    /// use pelton::{Options, Policy};
    /// let mut publisher = Options::new().capacity(1 << 20).publisher()?;
    /// let mut all = publisher.subscriber(&Options::new())?;
    /// let mut newest = publisher.subscriber(&Options::new().policy(Policy::Latest))?;
    /// for line in ["one", "two", "three"] {
    ///     publisher.send(line.as_bytes())?;
    /// }
    /// assert_eq!(&*all.receive()?, b"one");
    /// let message = newest.receive()?;
    /// assert_eq!((&*message, message.missed()), (&b"three"[..], 2));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Refused`] if the publisher has 64 subscribers, or does not take the policy, or is of a directory;
    /// [`Error::Forked`]; [`Error::System`].
    pub fn subscriber(&mut self, options: &Options<maker::Subscribe>) -> Result<Subscriber> {
        self.endpoint.check_owner()?;
        let subscriber = self.attend().and_then(|()| self.subscriber_here(options));
        // An event loop may wait for a subscriber, too.
        self.endpoint.doorbells.local_wake().ring();
        subscriber
    }

    fn subscriber_here(&mut self, options: &Options<maker::Subscribe>) -> Result<Subscriber> {
        if self.path.is_some() {
            let text = "subscribers of a broadcast in a directory join by themselves: use open_subscriber";
            return Err(Error::Refused(text.to_owned()));
        }
        let (options, can_barrier) = (options.settings(), membarrier::register());
        let policy = options.lane_policy();
        policy.check_hold(self.side.hold_max_ns)?;
        let PublisherSide { page, data, .. } = self.side.clone();
        let cursor = Arc::new(make_cursor_page(policy, &data, "").map_err(Error::system("making a cursor"))?);
        let doorbells = Doorbells::new()?;
        let link = |doorbells: &Doorbells| {
            Link::new(doorbells.doorbell().clone(), ThreadTransport(Queue::default()), this_process())
        };
        let (to_subscriber, to_publisher) = (link(&doorbells), link(&self.endpoint.doorbells));
        let Some(joined) = self.join(&cursor, policy, options.start_from) else { return Err(Error::Refused(full())) };
        let number = 0;
        self.subscriptions[joined.slot as usize] = Some(Box::new(Subscription {
            join: joined.join,
            number,
            policy,
            held: None,
            link: to_subscriber,
            cursor: cursor.clone(),
            at: 0,
        }));
        let memory = SubscriberMemory { page, data, cursor };
        let (lane, sleeper) = memory.attach(policy, joined, self.side.message_bytes_max, can_barrier)?;
        Subscriber::new(SubscriberParts { lane, sleeper, link: to_publisher, _memory: memory }, doorbells, options)
    }

    /// The lane's data, for tests that act as a hostile publisher.
    #[cfg(test)]
    pub(crate) fn data(&self) -> &Segment {
        &self.side.data
    }

    fn join(&mut self, cursor: &Segment, policy: pelton_lane::Policy, from: StartFrom) -> Option<Joined> {
        // SAFETY: the segment maps 64 KiB, which hold the page. `subscriptions` keeps it until `part` has removed it.
        unsafe { self.lane.join(cursor.base().cast(), policy, from) }
    }

    /// Copies a message into the lane, if there is space now. Never waits.
    ///
    /// # Errors
    /// [`Error::TooLarge`]; [`Error::Forked`]; [`Error::System`]. The end of a subscriber is no error.
    #[inline]
    pub fn try_send(&mut self, payload: &[u8]) -> Result<Sent> {
        self.send_until(payload, Deadline::Now)
    }

    /// Copies a message into the lane. Waits while a subscriber that gates holds the lane full, without a limit.
    ///
    /// # Errors
    /// As [`Publisher::try_send`].
    #[inline]
    pub fn send(&mut self, payload: &[u8]) -> Result<()> {
        self.send_until(payload, Deadline::Never).map(|_| ())
    }

    /// As [`Publisher::send`], until `deadline`.
    ///
    /// # Errors
    /// As [`Publisher::try_send`].
    #[inline]
    pub fn send_until(&mut self, payload: &[u8], deadline: impl Into<Deadline>) -> Result<Sent> {
        if self.endpoint.owner.is_current()
            && let Some(space) = self.lane.reserve_fast(payload.len() as u64)
        {
            self.fill(space, payload);
            return Ok(Sent::Sent);
        }
        self.send_slow(payload, deadline.into())
    }

    #[cold]
    #[inline(never)]
    fn send_slow(&mut self, payload: &[u8], deadline: Deadline) -> Result<Sent> {
        let found = self.find_space(payload.len() as u64, deadline);
        let is_sent = found.map(|space| space.map(|space| self.fill(space, payload)).is_some());
        self.renew_wait();
        Ok(match is_sent? {
            true => Sent::Sent,
            false if deadline == Deadline::Now => Sent::Full,
            false => Sent::TimedOut,
        })
    }

    /// After a call that may have ended the announced sleep: an event loop that waits for its ring has to arm again.
    fn renew_wait(&mut self) {
        if self.is_awaited && !self.lane.is_armed() {
            self.wake_loop();
        }
    }

    /// Has an event loop that waits arm again: this call may have taken what it waits for.
    fn wake_loop(&mut self) {
        if std::mem::take(&mut self.is_awaited) {
            self.endpoint.doorbells.local_wake().ring();
        }
    }

    fn find_space(&mut self, bytes: u64, deadline: Deadline) -> Result<Option<ReservedSpace>> {
        self.endpoint.check_owner()?;
        self.find_window();
        if let Some(space) = self.find_nearby(bytes, deadline)? {
            return Ok(Some(space));
        }
        loop {
            if let Some(space) = self.reserve(bytes)? {
                return Ok(Some(space));
            }
            let Some(until) = deadline.until() else {
                // The one that holds it up may have died.
                self.attend()?;
                return self.reserve(bytes);
            };
            self.lane.count_wait();
            if !wait::wait(&mut Space { publisher: self, want: Want::Message(bytes) }, until)? {
                return Ok(None);
            }
        }
    }

    /// Adapts the window to the throughput, as a sender does. The memory outside of it stays: see decision 0044. Not by
    /// path, where each trial would have to allocate.
    fn find_window(&mut self) {
        let sent = self.lane.sent_bytes();
        if !self.window.is_due(sent) || self.path.is_some() {
            return;
        }
        let receivers = match self.lane.backlog_bytes() {
            0 => Keeps::Waiting,
            bytes if bytes > self.lane.window() => Keeps::Behind,
            _ => Keeps::Up,
        };
        let bytes = self.window.sample(sent, receivers, os::monotonic_ns());
        if bytes != self.lane.window() {
            self.lane.set_window(bytes);
        }
    }

    /// As `Sender::find_nearby`, if the slowest subscriber shares this side's processor. Not while the lane keeps
    /// messages for others than those that gate: within the lead they would have to give way too early.
    fn find_nearby(&mut self, bytes: u64, deadline: Deadline) -> Result<Option<ReservedSpace>> {
        let Some(until) = deadline.until() else { return Ok(None) };
        let bound = LEAD.max(self.lane.window());
        let is_done =
            bound >= self.lane.capacity() || self.lane.is_beyond(bound) || self.paused_at == self.lane.number();
        if bytes > LEAD / 4 || is_done || self.lane.keeps_for_others() {
            return Ok(None);
        }
        let ring = Space { publisher: self, want: Want::Message(bytes) }.last_ring();
        if !ring.is_some_and(|ring| self.endpoint.spin.shares_processor_with(ring)) {
            return Ok(None);
        }
        self.lane.set_bound(bound);
        let found = self.reserve(bytes).and_then(|space| {
            if space.is_some() {
                return Ok(space);
            }
            self.lane.count_wait();
            self.paused_at = self.lane.number();
            let end = Instant::now() + LEAD_PAUSE;
            let end = until.map_or(end, |until| until.min(end));
            match wait::wait(&mut Space { publisher: self, want: Want::Message(bytes) }, Some(end))? {
                true => self.reserve(bytes),
                false => Ok(None),
            }
        });
        self.lane.set_bound(self.lane.capacity());
        found
    }

    /// Reserves, also by passing a subscriber that has held the publisher up for too long.
    fn reserve(&mut self, bytes: u64) -> Result<Option<ReservedSpace>> {
        loop {
            let space = match (self.lane.try_reserve(bytes), &self.path) {
                (Err(LaneError::Unbacked { bytes }), Some(path)) => {
                    path.back(&mut self.lane, &self.side.data, bytes)?;
                    continue;
                }
                (reserved, _) => reserved?,
            };
            if space.is_some() {
                self.forget_holders();
                return Ok(space);
            }
            if !self.pass_holder(Want::Message(bytes)) {
                return Ok(None);
            }
        }
    }

    fn forget_holders(&mut self) {
        if self.holder.take().is_some() {
            self.subscriptions.iter_mut().flatten().for_each(|subscription| subscription.held = None);
        }
    }

    /// Somebody is behind. Notes which subscriber that is, and since when; lets it lag if that is long enough. Returns
    /// whether it did.
    fn pass_holder(&mut self, want: Want) -> bool {
        let Some(holder) = self.lane.holder() else { return false };
        // The next reservation has to find that the lane is not full any more.
        self.lane.end_fast_path();
        // One that has just joined by itself: the publisher meets it before it sleeps.
        let subscription = self.subscriptions[holder.slot as usize].as_mut();
        let Some(subscription) = subscription.filter(|found| found.join == holder.join) else { return false };
        let (now, mut noted) = (Instant::now(), subscription.held);
        if matches!(want, Want::Released) {
            // All that it has to release may take longer than one message's space: one that goes on is waited for.
            noted = noted.filter(|(_, number)| *number == holder.number);
        }
        subscription.held = Some(noted.unwrap_or((now, holder.number)));
        self.holder = Some(holder.join);
        let is_over = self.lag_at().is_some_and(|at| now >= at);
        if is_over && let Some(subscription) = &mut self.subscriptions[holder.slot as usize] {
            self.lane.let_lag(holder.join);
            subscription.held = None;
        }
        is_over
    }

    /// When the subscriber that holds the publisher up begins to lag.
    fn lag_at(&self) -> Option<Instant> {
        let join = self.holder?;
        let holder = self.subscriptions.iter().flatten().find(|subscription| subscription.join == join)?;
        match (holder.held, holder.policy.holds_ns()) {
            (None, _) | (_, u64::MAX) => None,
            (Some((since, _)), ns) => since.checked_add(Duration::from_nanos(ns)),
        }
    }

    #[inline]
    fn fill(&mut self, space: ReservedSpace, payload: &[u8]) {
        self.lane.copy_in(space, payload);
        let asleep = self.lane.commit(space, payload.len() as u64);
        self.left -= 1;
        if asleep != 0 || self.left == 0 {
            self.after_sending(asleep);
        }
    }

    /// Rings sleeping subscribers. At intervals it also admits new ones and detects ends.
    #[cold]
    #[inline(never)]
    fn after_sending(&mut self, mut asleep: u64) {
        let now_ns = if asleep != 0 { os::monotonic_ns() } else { os::coarse_monotonic_ns() };
        if asleep != 0 {
            self.lane.note_ring(os::processor(), now_ns);
        }
        while asleep != 0 {
            let slot = asleep.trailing_zeros() as usize;
            asleep &= asleep - 1;
            match &self.subscriptions[slot] {
                Some(subscription) => subscription.link.ring_peer(),
                // It has joined by itself: this rings it. What fails here, the next call repeats.
                None => _ = self.attend(),
            }
        }
        let since_reading = now_ns.saturating_sub(self.last_reading_ns);
        self.interval = if since_reading < READING_NS { (self.interval * 2).min(READING_AFTER) } else { 1 };
        (self.left, self.last_reading_ns) = (self.interval, now_ns);
        if now_ns.saturating_sub(self.last_check_ns) >= CHECK_INTERVAL_NS {
            // This message is sent. The next call repeats what fails here.
            let _ = self.attend();
        }
    }

    /// Admits subscribers that have connected, and lets go those that have ended. Does not wait. Returns how many there
    /// are. Call it when the descriptor is readable, if there is nothing to send. While an event loop waits after
    /// [`Publisher::arm`], this makes the descriptor readable: it arms again.
    ///
    /// # Errors
    /// [`Error::Forked`]; [`Error::System`], for instance when descriptors run out.
    pub fn admit(&mut self) -> Result<usize> {
        self.endpoint.check_owner()?;
        self.endpoint.doorbells.drain()?;
        let attended = self.attend();
        self.wake_loop();
        attended.map(|()| self.subscriber_count())
    }

    /// Subscribers that this publisher has removed so far because their cursor broke the rules of the layout. Each then
    /// reports that the publisher has ended. In a directory, one that gates reports [`Error::Corrupt`] once its
    /// messages are overwritten, and those whose files this side does not accept count too.
    pub fn corrupt_subscribers(&self) -> u64 {
        self.corrupt
    }

    /// The subscribers that joined and, as far as this side knows, have not left. Does not admit others.
    pub fn subscriber_count(&self) -> usize {
        self.subscriptions.iter().flatten().count()
    }

    /// Waits until the publisher has at least `count` subscribers, or `deadline`; false when it passes.
    ///
    /// # Errors
    /// As [`Publisher::admit`].
    pub fn wait_subscribers_until(&mut self, count: usize, deadline: impl Into<Deadline>) -> Result<bool> {
        let deadline = deadline.into().instant();
        loop {
            if self.admit()? >= count {
                return Ok(true);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(false);
            }
            self.endpoint.doorbells.sleep(deadline)?;
        }
    }

    /// All subscribers, with how far each is behind, and which one holds the publisher up. Does not wait.
    pub fn subscribers(&mut self) -> Vec<SubscriberState> {
        if self.endpoint.owner.is_forked() {
            return Vec::new();
        }
        let (holder, next) = (self.holder, self.lane.number());
        self.lane.is_released();
        let absent = if self.path.is_some() { UNKNOWN_PEER } else { this_process() };
        let state = |slot: usize, subscription: &Subscription| {
            let page = subscription.page();
            let (policy, lag_after) = Policy::of_lane(subscription.policy);
            SubscriberState {
                peer: subscription.link.peer().unwrap_or(absent),
                durable: self.path.as_ref().and_then(|path| path.durable(slot as u32)),
                policy,
                lag_after,
                lags: self.lane.lags(subscription.join),
                behind: self.lane.cursor_of(subscription.join).map_or(0, |cursor| next - cursor),
                messages: page.messages(),
                missed: page.missed(),
                holds: subscription
                    .held
                    .filter(|_| holder == Some(subscription.join))
                    .map(|(since, _)| since.elapsed()),
            }
        };
        // In a directory, one that was removed stays until the next call that admits.
        let is_counted = |subscription: &Subscription| {
            self.path.is_none() || self.lane.joined().any(|(_, join, _)| join == subscription.join)
        };
        let all = self.subscriptions.iter().enumerate();
        let all = all.filter_map(|(slot, subscription)| Some((slot, subscription.as_deref()?)));
        all.filter(|(_, subscription)| is_counted(subscription)).map(|(slot, found)| state(slot, found)).collect()
    }

    /// Waits until every subscriber that gates has released every message, or `deadline`; false when it passes. One
    /// with [`Options::lag_after`] that releases nothing for so long lags from then on: it is not waited for.
    ///
    /// # Errors
    /// As [`Publisher::admit`].
    pub fn wait_released_until(&mut self, deadline: impl Into<Deadline>) -> Result<bool> {
        self.endpoint.check_owner()?;
        let released = self.attend().and_then(|()| self.await_released(deadline.into()));
        self.renew_wait();
        released
    }

    fn await_released(&mut self, deadline: Deadline) -> Result<bool> {
        let mut released = Space { publisher: self, want: Want::Released };
        while !released.poll()? {
            let Some(until) = deadline.until() else { return Ok(false) };
            if !wait::wait(&mut released, until)? {
                return Ok(false);
            }
            // The wait ends too when it could not arm, for subscribers that overtake each other.
        }
        Ok(true)
    }

    /// For an event loop: makes the descriptor readable when there is space for a message of `bytes`. It is readable
    /// too while a subscriber waits to be admitted, or has ended: this method does both. Does not wait. A call that
    /// sends, or admits, meanwhile ends this, and makes the descriptor readable: arm again.
    ///
    /// # Errors
    /// As [`Publisher::try_send`].
    pub fn arm(&mut self, bytes: usize) -> Result<Armed> {
        self.endpoint.check_owner()?;
        self.check_size(bytes)?;
        self.arm_for(Want::Message(bytes as u64))
    }

    /// As [`Publisher::arm`], for [`Publisher::wait_released_until`]: once that returns true without a wait. Arm again
    /// whenever the descriptor is readable.
    ///
    /// # Errors
    /// As [`Publisher::admit`].
    pub fn arm_released(&mut self) -> Result<Armed> {
        self.endpoint.check_owner()?;
        self.arm_for(Want::Released)
    }

    fn arm_for(&mut self, want: Want) -> Result<Armed> {
        self.endpoint.doorbells.drain()?;
        failpoint("publisher arms: drained");
        self.attend()?;
        let armed = Space { publisher: self, want }.arm()?;
        self.is_awaited = armed;
        if !armed || self.lane.needs_timed_wait() {
            // As in `Sender::arm`.
            self.endpoint.doorbells.local_wake().ring();
        } else if let Some(at) = self.lag_at() {
            let left = at.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1));
            self.timer.set(left).map_err(Error::system("setting a timer"))?;
        }
        Ok(Armed::waiting_if(armed))
    }

    /// For an event loop, before [`Publisher::arm`]: polls for space for a message of `bytes` for some microseconds,
    /// and returns whether there is space. Neither sleeps nor arms.
    ///
    /// # Errors
    /// As [`Publisher::try_send`].
    pub fn busy_poll(&mut self, bytes: usize) -> Result<bool> {
        self.endpoint.check_owner()?;
        self.check_size(bytes)?;
        let bytes = bytes as u64;
        let found = wait::busy_poll(&mut Space { publisher: self, want: Want::Message(bytes) }, BUSY_POLL, bytes);
        self.renew_wait();
        found
    }

    fn check_size(&self, bytes: usize) -> Result<()> {
        match self.message_bytes_max() {
            bytes_max if bytes as u64 > bytes_max => Err(Error::TooLarge { bytes: bytes as u64, bytes_max }),
            _ => Ok(()),
        }
    }

    /// Undoes [`Publisher::arm`].
    pub fn disarm(&mut self) {
        if self.endpoint.owner.is_current() {
            self.is_awaited = false;
            self.lane.disarm();
        }
    }

    /// Whether this process is a forked child of the publisher's: see [`crate::raw`].
    #[doc(hidden)]
    pub fn is_forked(&self) -> bool {
        self.endpoint.owner.is_forked()
    }

    /// The number of the next message, from 1 on.
    pub fn next_number(&self) -> u64 {
        self.lane.number()
    }

    /// Bytes of the lane's data.
    pub fn capacity(&self) -> u64 {
        self.lane.capacity()
    }

    /// The largest message, in bytes.
    pub fn message_bytes_max(&self) -> u64 {
        self.lane.message_bytes_max()
    }

    /// Counters of this side.
    pub fn counters(&self) -> Counters {
        if self.endpoint.owner.is_forked() {
            return Counters::default();
        }
        let page = self.lane.producer_page();
        Counters {
            messages: page.messages(),
            bytes: page.bytes(),
            waits: page.waits(),
            sleeps: page.sleeps(),
            wakes_sent: page.wakes_sent(),
            depth_max: page.depth_max(),
        }
    }

    /// Closes the broadcast. The subscribers receive all messages that the lane still has for them, and then return
    /// [`Error::Closed`]. Does not wait; dropping the publisher does the same.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn close(self) -> Result<()> {
        self.endpoint.check_owner()
    }

    /// Handles everything that the doorbells report, and subscribers that have closed.
    fn attend(&mut self) -> Result<()> {
        self.last_check_ns = os::monotonic_ns();
        while let Some((join, loss)) = self.lane.lost() {
            self.part(join, Some(loss));
        }
        let mut events = Vec::new();
        self.endpoint.doorbells.take_events(&mut events)?;
        // Handles ends first: they free slots for new subscribers.
        events.sort_by_key(|event| matches!(event, Event::Connecting(_)));
        let mut result = Ok(());
        for event in events {
            match event {
                Event::Gone(number) => {
                    let gone = self.subscriptions.iter().flatten().find(|subscription| subscription.number == number);
                    if let Some(join) = gone.map(|subscription| subscription.join) {
                        self.lose(join);
                    }
                }
                Event::Connecting(HOLD_TIMER) => _ = self.timer.has_passed(),
                Event::Connecting(number) => result = result.and(self.attend_acceptor(number)),
            }
        }
        result.and(self.meet_subscribers())
    }

    fn attend_acceptor(&mut self, number: u32) -> Result<()> {
        let Some(mut acceptor) = self.acceptor.take() else { return Ok(()) };
        let mut joining = Vec::new();
        let (subscriptions, last) = (&self.subscriptions, &mut self.number);
        let admit = || {
            if subscriptions.iter().all(Option::is_some) {
                return Err(Error::Refused(full()));
            }
            // Numbers of handshakes may be given twice after 2^32 of them: those of present subscribers are not.
            loop {
                *last = last.wrapping_add(1);
                let is_taken = subscriptions.iter().flatten().any(|subscription| subscription.number == *last);
                if *last != 0 && !is_taken {
                    return Ok(*last);
                }
            }
        };
        let side = &self.side;
        let begin = |handshake, number| -> crate::opening::Steps<'static, Joining> {
            Box::pin(new_subscription(handshake, side.clone(), number))
        };
        let attended = acceptor.attend(number, &self.endpoint.doorbells, admit, begin, |done| joining.extend(done));
        self.acceptor = Some(acceptor);
        for joining in joining {
            // After a failure, it has received the reason, or has gone.
            let _ = self.let_join(joining);
        }
        attended
    }

    fn let_join(&mut self, joining: Joining) -> Result<()> {
        let (cursor, policy, number) = (joining.cursor.clone(), joining.policy, joining.number);
        let Some(joined) = self.join(&cursor, policy, joining.from) else {
            joining.refuse(full());
            return Ok(());
        };
        failpoint("publisher: joined");
        let doorbells = self.endpoint.doorbells.clone();
        let admitted = doorbells.finish_connecting(joining.socket(), number).and_then(|()| joining.admit(joined));
        let link = admitted.inspect_err(|_| self.lane.remove(joined.join))?;
        self.endpoint.spin.set_peer(link.peer());
        self.subscriptions[joined.slot as usize] =
            Some(Box::new(Subscription { join: joined.join, number, policy, held: None, link, cursor, at: 0 }));
        Ok(())
    }

    /// Removes a subscriber: it has closed, its cursor is corrupt, or (`None`) its end is proved.
    pub(crate) fn part(&mut self, join: u64, loss: Option<CursorLoss>) {
        self.lane.remove(join);
        let slot = self.subscriptions.iter_mut().find(|slot| slot.as_ref().is_some_and(|found| found.join == join));
        let Some(mut subscription) = slot.and_then(Option::take) else { return };
        subscription.link.lose_peer(&self.endpoint.doorbells);
        if let Some(CursorLoss::Corrupt(_)) = loss {
            self.corrupt += 1;
            // It may be alive, and detects this.
            subscription.link.ring_peer();
        }
        subscription.link.shutdown();
        if let Some(acceptor) = &mut self.acceptor {
            // The next call repeats what fails here.
            let _ = acceptor.listen_again(&self.endpoint.doorbells);
        }
    }
}

fn full() -> String {
    format!("the publisher has {CURSORS_MAX} subscribers, as many as a lane takes: close one")
}

/// What a publisher waits for.
#[derive(Clone, Copy, Debug)]
enum Want {
    /// Space for a message of so many bytes.
    Message(u64),
    /// That no subscriber that gates has unreleased messages.
    Released,
}

struct Space<'a> {
    publisher: &'a mut Publisher,
    want: Want,
}

impl Polled for Space<'_> {
    fn poll(&mut self) -> Result<bool> {
        match self.want {
            Want::Message(bytes) => Ok(self.publisher.reserve(bytes)?.is_some()),
            Want::Released => loop {
                if self.publisher.lane.is_released() {
                    self.publisher.forget_holders();
                    return Ok(true);
                }
                if !self.publisher.pass_holder(self.want) {
                    return Ok(false);
                }
            },
        }
    }

    fn may_be_ready(&mut self) -> bool {
        self.publisher.lane.may_be_ready()
    }

    fn spin(&mut self) -> &mut Spin {
        &mut self.publisher.endpoint.spin
    }

    fn last_ring(&self) -> Option<LastRing> {
        let holder = self.publisher.lane.holder()?;
        self.publisher.subscriptions[holder.slot as usize].as_ref().map(|subscription| subscription.page().last_ring())
    }
}

impl Side for Space<'_> {
    fn arm(&mut self) -> Result<bool> {
        let bytes = match self.want {
            Want::Message(bytes) => Some(bytes),
            Want::Released => None,
        };
        loop {
            let mut everywhere = true;
            let lane = &mut self.publisher.lane;
            let armed = lane.arm(bytes, || everywhere &= membarrier::barrier());
            if !everywhere {
                lane.request_fencing();
            }
            if !armed {
                return Ok(false);
            }
            let holder = self.publisher.lane.holder().map(|holder| holder.join);
            // A subscriber that the lane counts no more would not ring.
            if self.poll()? {
                self.disarm();
                return Ok(false);
            }
            // The end of one that has joined by itself, and that this side has not met, would wake nobody.
            let publisher = &mut *self.publisher;
            let is_unknown = publisher.lane.holder().is_some_and(|holder| {
                publisher.subscriptions[holder.slot as usize].as_ref().is_none_or(|found| found.join != holder.join)
            });
            if is_unknown {
                self.disarm();
                self.publisher.attend()?;
                return Ok(false);
            }
            // The poll ends the sleep when it lets the holder lag, and may have loaded that another one is the slowest
            // by now: the next slowest would not ring.
            if self.publisher.lane.is_armed() {
                if self.publisher.lane.holder().map(|holder| holder.join) == holder {
                    return Ok(true);
                }
                self.disarm();
            }
        }
    }

    fn disarm(&mut self) {
        self.publisher.lane.disarm();
    }

    fn end(&mut self) -> Result<bool> {
        // A subscriber has ended, which may make space, and ends nothing else.
        self.publisher.attend()?;
        self.poll()
    }

    fn needs_timed_wait(&self) -> bool {
        self.publisher.lane.needs_timed_wait()
    }

    fn sleep(&mut self, deadline: Option<Instant>) -> Result<Ready> {
        let until = [deadline, self.publisher.lag_at()].into_iter().flatten().min();
        self.publisher.endpoint.doorbells.sleep(until)
    }

    fn rung(&mut self, alone: bool) -> Result<bool> {
        self.publisher.endpoint.doorbells.drain_after_sleep(alone)?;
        failpoint("publisher rung: drained");
        self.publisher.attend()?;
        Ok(false)
    }

    fn is_peer_known_gone(&mut self) -> Result<bool> {
        if os::monotonic_ns().saturating_sub(self.publisher.last_check_ns) >= 1_000_000 {
            self.publisher.attend()?;
        }
        Ok(false)
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        if self.endpoint.owner.is_forked() {
            return;
        }
        if let Some(acceptor) = self.acceptor.take() {
            acceptor.leave(&self.endpoint.doorbells, |_| ());
        }
        self.lane.close();
        // The order: the closed flag, the ring, the hang-up, as in `Sender`.
        for subscription in self.subscriptions.iter().flatten() {
            subscription.link.ring_peer();
            subscription.link.shutdown();
        }
        failpoint("publisher closes: hung up");
    }
}

impl AsFd for Publisher {
    /// The descriptor for an event loop: see [`Publisher::arm`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.endpoint.doorbells.as_fd()
    }
}

impl AsRawFd for Publisher {
    /// As [`AsFd`], for runtimes that need the number.
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static MESSAGE: [u8; 60_000] = [0; 60_000];

    /// Runs `body` with a subscriber that has last slept on this thread's processor, the only one of this thread.
    fn on_one_processor(history: u64, body: impl FnOnce(Publisher, Subscriber) + Send) {
        let run = || {
            let processor = os::processor().unwrap();
            let mut only = rustix::thread::CpuSet::new();
            only.set(processor as usize);
            rustix::thread::sched_setaffinity(None, &only).unwrap();
            let mut publisher = Options::new().capacity(4 * LEAD).history(history).publisher().unwrap();
            let mut subscriber = publisher.subscriber(&Options::new()).unwrap();
            let _ = subscriber.arm().unwrap();
            subscriber.disarm();
            // Drains the wake for an event loop, which would end the first sleep.
            assert_eq!(publisher.admit().unwrap(), 1);
            body(publisher, subscriber);
        };
        std::thread::scope(|scope| scope.spawn(run).join()).unwrap();
    }

    #[test]
    fn a_stopped_subscriber_makes_a_publisher_pause_once_and_costs_no_capacity() {
        on_one_processor(0, |mut publisher, mut subscriber| {
            let messages = 3 * LEAD / 60_008;
            (0..messages).for_each(|_| publisher.send(&MESSAGE).unwrap());
            assert_eq!((publisher.counters().waits, publisher.counters().sleeps), (1, 1));
            let mut more = 0;
            while publisher.try_send(&MESSAGE).unwrap() == Sent::Sent {
                more += 1;
            }
            assert!(messages + more >= 4 * LEAD / 60_008 - 1, "{messages} and {more}");
            assert_eq!(publisher.counters().waits, 1);
            drop(publisher);
            assert_eq!((0..).take_while(|_| subscriber.receive().is_ok()).count() as u64, messages + more);
        });
    }

    #[test]
    fn a_publisher_with_history_does_not_pause() {
        on_one_processor(10, |mut publisher, _subscriber| {
            (0..3 * LEAD / 60_008).for_each(|_| publisher.send(&MESSAGE).unwrap());
            assert_eq!((publisher.counters().waits, publisher.counters().sleeps), (0, 0));
        });
    }

    /// A subscriber that joins by itself while the publisher is about to sleep, and ends before it rings.
    #[test]
    fn a_publisher_that_sleeps_knows_the_subscriber_that_holds_it_up() {
        use crate::directory::{Access, Directory};
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("b");
        let mut publisher = Options::new().capacity(1 << 16).create_publisher(&path).unwrap();
        let directory = Directory::open_broadcast(&path, &Access { uids: Vec::new(), mode: 0o700 }).unwrap().unwrap();
        let policy = pelton_lane::Policy::Gate;
        let claimed = directory.claim_subscriber_until(None, policy, None, &crate::opening::Waiter::Thread);
        let role = crate::opening::in_call(claimed).unwrap();
        let from = StartFrom::Now;
        let joining = pelton_lane::JoinByPath { slot: role.slot, policy, from, continues: false, pid: 1 };
        let (page, data) = (Arc::new(role.page), Arc::new(role.data));
        let (memory, table) = (broadcast_memory(&page, &data), role.table.base().cast());
        // SAFETY: the segments live until the end of this function, as do the locks of both roles.
        let joined = unsafe { pelton_lane::BroadcastConsumer::join_by_path(memory, table, joining, 1024, true) };
        let _joined = joined.unwrap();
        // No check at an interval finds it.
        publisher.last_check_ns = u64::MAX;
        while publisher.try_reserve_and_send() {}
        publisher.last_check_ns = u64::MAX;
        while !(Space { publisher: &mut publisher, want: Want::Message(1000) }).arm().unwrap() {}
        assert!(publisher.subscriptions[role.slot as usize].is_some());
        // Its life ends. The lock stays, so nothing else joins there.
        drop(role.liveness);
        let end = Instant::now() + Duration::from_secs(20);
        assert!(publisher.endpoint.doorbells.sleep(Some(end)).unwrap() != Ready::TimedOut);
        publisher.disarm();
        assert_eq!(publisher.try_send(&MESSAGE[..1000]).unwrap(), Sent::Sent);
    }

    impl Publisher {
        /// Sends, if there is space, without the check of a send that finds none.
        fn try_reserve_and_send(&mut self) -> bool {
            let Some(space) = self.reserve(1000).unwrap() else { return false };
            self.lane.copy_in(space, &MESSAGE[..1000]);
            let _ = self.lane.commit(space, 1000);
            true
        }
    }

    #[test]
    fn resident_max_bounds_the_window() {
        let publisher = Options::new().resident_max(100_000).publisher().unwrap();
        assert_eq!(publisher.lane.window(), 100_000);
    }
}
