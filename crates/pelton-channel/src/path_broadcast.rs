//! A broadcast in a directory: subscribers join by themselves, days after a message or before the first one, and a
//! durable one keeps its place while no process uses it. `directory/broadcast.rs` has the files.

use crate::broadcast_role::{BroadcastRole, PublisherPath, check_durable};
use crate::directory::{Access, Directory, PublisherRole, SubscriberRole, table_of};
use crate::doorbells::Doorbells;
use crate::error::{Error, Result};
use crate::link::{Link, PASSED_MAX, UNKNOWN_PEER};
use crate::opening::{Opening, Waiter, in_call};
use crate::options::{Options, maker};
use crate::path::{check_size, directory_or_wait};
use crate::publisher::{Publisher, PublisherParts, Subscription};
use crate::settings::Settings;
use crate::subscriber::{Subscriber, SubscriberMemory, SubscriberParts, broadcast_memory};
use crate::transport::{Found, PathTransport, PeerRole};
use pelton_lane::{BroadcastConsumer, BroadcastProducer, CursorTable, JoinByPath, LaneError, failpoint};
use pelton_os::membarrier;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

impl Options<maker::CreatePublisher> {
    /// Creates the broadcast `directory`, or opens an existing one with the sizes that it was created with, as its
    /// publisher. Continues after the last message of its predecessor, whose subscribers continue too. Needs no
    /// subscriber: without one, later messages overwrite earlier ones, but [`Options::history`] keeps the last ones.
    ///
    /// Waits while another publisher is alive: until [`Options::connect_deadline`], and without one for 200 ms, because
    /// a killed process keeps its role until the kernel has ended it. It also waits for subscribers to leave that may
    /// hold it up for longer than [`Options::hold_max`].
    ///
    /// ```
    /// # fn main() -> pelton::Result<()> {
    /// let directory = std::env::temp_dir().join(format!("pelton-broadcast-doc-{}", std::process::id()));
    /// let mut publisher = pelton::Options::new().history(100).create_publisher(&directory)?;
    /// publisher.send(b"before anybody subscribed")?;
    /// drop(publisher);
    /// // Another process, days later:
    /// let options = pelton::Options::new().start_from(pelton::StartFrom::Oldest);
    /// let mut subscriber = options.open_subscriber(&directory)?;
    /// assert_eq!(&*subscriber.receive()?, b"before anybody subscribed");
    /// # drop(subscriber);
    /// # pelton::inspect::remove(&directory)
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::RoleTaken`] when another publisher is alive after that wait; [`Error::Refused`] if a subscriber, or a
    /// durable subscription, may hold it up for longer than [`Options::hold_max`]; [`Error::NotAChannel`] if something
    /// else exists at the path, or a check fails; [`Error::NoSpace`]; [`Error::Rebooted`]: remove the broadcast, which
    /// cannot be recovered; [`Error::Corrupt`]; [`Error::Option`], [`Error::System`].
    pub fn create_publisher(&self, directory: impl AsRef<Path>) -> Result<Publisher> {
        in_call(create_publisher(directory.as_ref().to_owned(), self.settings().clone(), Waiter::Thread))
    }

    /// As [`Options::create_publisher`], but does not wait: the caller's event loop continues it. A relative path is
    /// resolved when the loop does so.
    ///
    /// # Errors
    /// As [`Options::start_connect_sender`].
    pub fn start_create_publisher(&self, directory: impl AsRef<Path>) -> Result<Opening<Publisher>> {
        let (path, settings) = (directory.as_ref().to_owned(), self.settings().begun());
        Opening::new(|waiter| create_publisher(path, settings, waiter))
    }
}

impl Options<maker::OpenSubscriber> {
    /// Subscribes to the broadcast `directory`, with or without a publisher. Waits until [`Options::connect_deadline`]
    /// for the broadcast to be created, and for a durable name that another process uses; without one for 200 ms.
    ///
    /// # Errors
    /// [`Error::NoChannel`]; [`Error::RoleTaken`] if another process uses the name of [`Options::durable`];
    /// [`Error::Refused`] if the broadcast has 64 subscribers, or its publisher, also the last one before now, takes
    /// none that may hold it up for so long ([`Options::hold_max`]); [`Error::Corrupt`]; [`Error::Option`];
    /// [`Error::NotAChannel`], [`Error::NoSpace`], [`Error::Rebooted`], [`Error::System`].
    pub fn open_subscriber(&self, directory: impl AsRef<Path>) -> Result<Subscriber> {
        in_call(open_subscriber(directory.as_ref().to_owned(), self.settings().clone(), Waiter::Thread))
    }

    /// As [`Options::open_subscriber`], but does not wait: the caller's event loop continues it. A relative path is
    /// resolved when the loop does so.
    ///
    /// # Errors
    /// As [`Options::start_connect_sender`].
    pub fn start_open_subscriber(&self, directory: impl AsRef<Path>) -> Result<Opening<Subscriber>> {
        let (path, settings) = (directory.as_ref().to_owned(), self.settings().begun());
        Opening::new(|waiter| open_subscriber(path, settings, waiter))
    }
}

async fn create_publisher(path: PathBuf, options: Settings, waiter: Waiter) -> Result<Publisher> {
    let can_barrier = membarrier::register();
    let (capacity, limit) = options.checked_sizes()?;
    let access = Access { uids: options.uids.clone(), mode: options.mode };
    let directory = Arc::new(Directory::create_broadcast(&path, &access, capacity, limit)?);
    let deadline = options.connect_deadline.from_now();
    let role = directory.claim_publisher_until(options.hold_max_ns, deadline, &waiter).await?;
    failpoint("publisher: claimed");
    let PublisherRole { limit, lock, page, data, table, doorbell, liveness } = role;
    let [page, data] = [page, data].map(Arc::new);
    let role = BroadcastRole {
        directory: directory.clone(),
        liveness,
        lock,
        is_durable: false,
        continues: false,
        past: 0,
        is_gone: false,
    };
    let path = PublisherPath { limit, table: table.clone(), role };
    let doorbells = Doorbells::with(doorbell).map_err(Error::system("making an eventfd and an epoll"))?;
    let memory = broadcast_memory(&page, &data);
    // SAFETY: the segments have the sizes in the page, which the directory has checked; the publisher keeps them until
    // it has dropped the lane. This process has the lock of the publisher, so the lane has no other one.
    let lane = unsafe { BroadcastProducer::take_over(memory, table.base().cast(), std::process::id(), can_barrier) };
    let mut lane = lane.map_err(|problem| Error::Corrupt(format!("{}: {problem}", directory.path().display())))?;
    failpoint("publisher: taken over");
    // How much of the memory is allocated is unknown.
    lane.set_backed(0);
    let limit = directory.message_bytes_max();
    let parts = PublisherParts { lane, page, data, message_bytes_max: limit, doorbells };
    let mut publisher = Publisher::of_parts(parts, &options)?;
    publisher.path = Some(path);
    publisher.admit()?;
    publisher.path.iter_mut().for_each(|path| path.limit.keep());
    failpoint("publisher: met");
    Ok(publisher)
}

/// When a publisher in an event loop tries again to meet a subscriber, for instance after descriptors have run out. A
/// guess.
const MEET_AGAIN: Duration = Duration::from_millis(20);

/// Where a slot's cursor page is in the table.
pub(crate) fn cursor_at(slot: u32) -> usize {
    CursorTable::CURSORS_AT + slot as usize * CursorTable::CURSOR_BYTES
}

impl Publisher {
    /// Finds the processes of the subscribers that have joined by themselves. An unnamed one without a process is dead,
    /// and is removed, as is one whose files this side does not accept. After another failure it goes on with the
    /// others.
    pub(crate) fn meet_subscribers(&mut self) -> Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        let is_known = |slot: u32, join| {
            self.subscriptions[slot as usize].as_ref().is_some_and(|subscription| subscription.join == join)
        };
        let joined: Vec<_> = self.lane.joined().filter(|(slot, join, _)| !is_known(*slot, *join)).collect();
        let (mut away, mut result) = (Vec::new(), Ok(()));
        for (slot, join, joins) in joined {
            // Numbers may be given twice after 2^32 joins: those of present subscribers are not.
            self.number = loop {
                let next = self.number.wrapping_add(1);
                self.number = next;
                let is_taken = self.subscriptions.iter().flatten().any(|subscription| subscription.number == next);
                if next != 0 && !is_taken {
                    break next;
                }
            };
            let (link, cursor) = match path.meet(slot, self.number, joins, &self.endpoint.doorbells) {
                Ok(met) => met,
                Err(Error::NotAChannel { .. }) => {
                    // Its files are of an owner whom this side does not permit, or are lost. It must not hold up the
                    // others, and finds out that it is passed.
                    self.lane.remove(join);
                    self.corrupt += 1;
                    continue;
                }
                Err(error) => {
                    // The next call repeats it. The timer has an event loop make that call, since the subscriber may
                    // sleep and is rung by nothing else.
                    let _ = self.timer.set(MEET_AGAIN);
                    result = Err(error);
                    continue;
                }
            };
            if link.peer().is_none() {
                away.push(join);
            }
            let policy = self.lane.policy_of(join).unwrap_or(pelton_lane::Policy::Gate);
            let number = self.number;
            self.endpoint.spin.set_peer(link.peer());
            self.subscriptions[slot as usize] =
                Some(Box::new(Subscription { join, number, policy, held: None, link, cursor, at: cursor_at(slot) }));
            failpoint("publisher: met a subscriber");
        }
        away.into_iter().for_each(|join| self.lose(join));
        result
    }

    /// The process of a subscriber has gone. One without a durable name is removed.
    pub(crate) fn lose(&mut self, join: u64) {
        let path = self.path.as_ref();
        let slot = self.subscriptions.iter().position(|slot| slot.as_ref().is_some_and(|found| found.join == join));
        match (slot, path) {
            (Some(slot), Some(path)) if path.is_durable(slot as u32) => {
                self.lane.set_away(join);
                if let Some(subscription) = &mut self.subscriptions[slot] {
                    subscription.link.lose_peer(&self.endpoint.doorbells);
                }
            }
            _ => self.part(join, None),
        }
    }
}

async fn open_subscriber(path: PathBuf, options: Settings, waiter: Waiter) -> Result<Subscriber> {
    if let Some(name) = &options.durable {
        check_durable(name)?;
        if options.policy == crate::settings::Policy::Latest {
            let text = "a durable subscription keeps its place, and latest has none: subscribe by gate or lag";
            return Err(Error::Refused(text.to_owned()));
        }
    }
    let can_barrier = membarrier::register();
    let access = Access { uids: options.uids.clone(), mode: options.mode };
    let deadline = options.connect_deadline.from_now();
    let opened = || Directory::open_broadcast(&path, &access);
    let directory = Arc::new(directory_or_wait(&path, deadline, &waiter, opened).await?);
    check_size(&directory, &options)?;
    let role =
        directory.claim_subscriber_until(options.durable.as_deref(), options.lane_policy(), deadline, &waiter).await?;
    failpoint("subscriber: claimed");
    let SubscriberRole { slot, lock, page, data, table, doorbell, publisher_doorbell, liveness } = role;
    let [page, data, table] = [page, data, table].map(Arc::new);
    let doorbells = Doorbells::with(doorbell).map_err(Error::system("making an eventfd and an epoll"))?;
    let joining = JoinByPath {
        slot,
        policy: options.lane_policy(),
        from: options.start_from,
        continues: options.durable.is_some(),
        pid: std::process::id(),
    };
    let (memory, limit) = (broadcast_memory(&page, &data), directory.message_bytes_max());
    let corrupt = |problem| Error::Corrupt(format!("{}: {problem}", directory.path().display()));
    let former = options.durable.as_ref().map_or(Ok(None), |_| table_of(&table).continued_policy(slot));
    let continues = !matches!(former, Ok(None));
    if let Some(name) = &options.durable
        && joining.policy.reads_in_place()
        && let Some(former) = former.map_err(corrupt)?
        && !former.reads_in_place()
    {
        let (path, by) =
            (directory.path().display(), if former.holds_ns() == 0 { "lag" } else { "gate with lag_after" });
        return Err(Error::Refused(format!(
            "the durable subscription {name:?} of {path} is by {by}, and may have missed messages: subscribe by that again, or remove it (`pelton rm {path} --durable {name}`) to begin anew by gate"
        )));
    }
    // SAFETY: the segments have the sizes in the page, which the directory has checked; `SubscriberParts` drops them
    // after the lane and the sleeper. This process has the lock of the slot until then.
    let lane = unsafe { BroadcastConsumer::join_by_path(memory, table.base().cast(), joining, limit, can_barrier) };
    let lane = match lane {
        // A publisher begins, and may have counted this side.
        Err(refused @ LaneError::HoldTooLong { .. }) => {
            publisher_doorbell.ring();
            directory.forget_durable(table_of(&table), slot, &waiter).await;
            return Err(directory.refuse_hold(refused));
        }
        joined => joined.map_err(corrupt)?,
    };
    failpoint("subscriber: joined");
    // SAFETY: as above.
    let sleeper = unsafe { lane.sleeper(can_barrier) };
    let transport = PathTransport::new(directory.clone(), PeerRole::Publisher);
    let link = Link::new(publisher_doorbell, transport, UNKNOWN_PEER);
    let memory = SubscriberMemory { page, data, cursor: table };
    let parts = SubscriberParts { lane, sleeper, link, _memory: memory };
    let mut subscriber = Subscriber::new(parts, doorbells, &options)?;
    let is_durable = options.durable.is_some();
    let (past, _) = subscriber.parts.lane.publisher();
    subscriber.path = Some(BroadcastRole { directory, liveness, lock, is_durable, continues, past, is_gone: false });
    subscriber.find_publisher()?;
    // So that it finds this process, and its end.
    subscriber.parts.link.ring_peer();
    failpoint("subscriber: met");
    Ok(subscriber)
}

impl Subscriber {
    /// Checks for a publisher in the directory: it may have come, or gone, since the last check.
    pub(crate) fn find_publisher(&mut self) -> Result<()> {
        let Some(path) = &mut self.path else { return Ok(()) };
        let SubscriberParts { lane, link, .. } = &mut self.parts;
        for _ in 0..PASSED_MAX {
            let stated = || lane.publisher();
            let (generation, _) = stated();
            match link.find_peer(&self.endpoint.doorbells, stated)? {
                Found::Nothing => break,
                Found::Peer(peer) => {
                    path.is_gone = false;
                    // Otherwise it is a successor that has not begun, and the page is still its predecessor's.
                    if !lane.has_producer_closed() {
                        path.past = 0;
                    }
                    self.endpoint.spin.set_peer(Some(peer));
                    break;
                }
                Found::Passed => path.is_gone = generation != path.past,
            }
        }
        Ok(())
    }

    /// Whether the publisher has closed.
    pub(crate) fn has_publisher_closed(&self) -> bool {
        self.closed_generation().is_some()
    }

    /// The generation of a publisher that has closed, unless that is reported already.
    pub(crate) fn closed_generation(&self) -> Option<u64> {
        // The generation first: when it was stored, its page was open. The other way round, a successor that begins
        // between the two loads would count as closed. [close]
        let (generation, _) = self.parts.lane.publisher();
        let is_new = self.path.as_ref().is_none_or(|path| path.past != generation);
        (self.parts.lane.has_producer_closed() && is_new).then_some(generation)
    }

    /// Whether the publisher is known to have gone.
    pub(crate) fn is_publisher_gone(&mut self) -> Result<bool> {
        self.find_publisher()?;
        let is_gone = self.parts.link.is_peer_gone()?;
        if is_gone && let Some(path) = &mut self.path {
            path.is_gone = true;
        }
        Ok(is_gone || self.path.as_ref().is_some_and(|path| path.is_gone))
    }

    /// As [`Subscriber::resume_until`], for a broadcast in a directory, whose lane stays.
    pub(crate) fn resume_by_path(&mut self, deadline: Option<Instant>) -> Result<bool> {
        self.parts.link.lose_peer(&self.endpoint.doorbells);
        if let Some(path) = &mut self.path {
            path.is_gone = false;
        }
        loop {
            self.endpoint.doorbells.drain()?;
            self.find_publisher()?;
            // A successor may have come, and left again, meanwhile: the next call reports that.
            let is_there = self.parts.link.peer().is_some() || self.has_publisher_closed();
            let was_there = self.path.as_ref().is_some_and(|path| path.is_gone);
            if is_there || was_there || self.has_found() || self.parts.lane.may_be_ready() {
                self.endpoint.reinstate();
                return Ok(true);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(false);
            }
            self.endpoint.doorbells.sleep(deadline)?;
        }
    }

    /// Leaves a durable subscription, which keeps its place: the publisher need not ring it.
    pub(crate) fn pause(&mut self) {
        self.parts.lane.store_counters();
        self.parts.sleeper.disarm();
        failpoint("subscriber pauses: disarmed");
    }
}

#[cfg(test)]
mod tests {
    use crate::Options;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

    #[test]
    fn a_publisher_that_begins_has_not_closed() {
        const ROUNDS: u64 = 10_000;
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("b");
        let publisher = Options::new().capacity(1 << 16).create_publisher(&directory).unwrap();
        let mut subscriber = Options::new().open_subscriber(&directory).unwrap();
        // What a successor stores. The addresses are those of spec/layout.md.
        let page = publisher.lane.producer_page();
        let base = std::ptr::from_ref(page).cast::<u8>().cast_mut();
        // SAFETY: both lie in the mapped, writable page, and every side uses them as atomic words.
        let (generation, state) =
            unsafe { (AtomicU64::from_ptr(base.add(144).cast()), AtomicU32::from_ptr(base.add(384).cast())) };
        let (open, closed) = (state.load(Relaxed), 2);
        let begins = Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..ROUNDS {
                    begins.wait();
                    state.store(open, Release);
                    generation.fetch_add(1, Release);
                }
            });
            let mut counted_as_closed = 0;
            for _ in 0..ROUNDS {
                state.store(closed, Relaxed);
                let past = generation.load(Acquire);
                subscriber.path.as_mut().unwrap().past = past;
                begins.wait();
                while generation.load(Relaxed) == past {
                    counted_as_closed += u32::from(subscriber.has_publisher_closed());
                    std::thread::yield_now();
                }
            }
            assert_eq!(counted_as_closed, 0);
        });
        assert_eq!(page.generation(), ROUNDS + 1);
    }
}
