//! The service: requests of all clients by one wait, replies from any thread.
//!
//! A client that does not read its replies is *backpressured*: a reply for which its lane has no space waits in memory,
//! and its requests are paused meanwhile, so that no more waits than it had asked for before. The service writes the
//! replies when there is space, at each poll for requests. So does every thread that replies to that client.

#[cfg(doc)]
use super::Responder;
use super::frame::{Assembly, By, HEADER_BYTES, Header, Kind};
use super::request::{Request, RequestStorage};
use super::responder::BorrowedResponder;
use super::session::{ServiceShared, Session};
use super::sessions::{SessionSlot, Sessions};
use crate::body::{Body, Flag, RECORDS_PER_POLL};
use pelton_channel::options::{Options, maker};
use pelton_channel::raw::{
    BUSY_POLL, Item, LastRing, Polled, Polls, Replies, Settings, Side, Spin, busy_poll, gather_with, wait,
};
use pelton_channel::{Armed, Deadline, Error, Listener, Receiver, Result, Traceparent};
use pelton_lane::Record;
use pelton_os::{LocalWake, Ready, locked};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

/// Replies to requests of all clients that connect under its name, up to 1,024 clients. `Send`, not `Sync`: one thread
/// at a time takes requests; any thread may reply.
///
/// The user's own loop takes requests by [`Service::receive`], round-robin from all clients, or [`Service::run`] does
/// it with a pool of threads. Each request is answered once, by its [`BorrowedResponder`].
///
/// Dropping it closes: all calls in flight fail with [`Error::Closed`] at their clients.
///
/// ```
/// # fn main() -> pelton::Result<()> {
/// let name = format!("unix:{}/service-doc-{}", std::env::temp_dir().display(), std::process::id());
/// let mut service = pelton::Service::listen(&name)?;
/// // Usually another process:
/// let asking = std::thread::spawn(move || -> pelton::Result<Vec<u8>> {
///     let mut client = pelton::Client::connect(&name)?;
///     Ok(client.call(b"2 + 2")?.into_vec())
/// });
///
/// let request = service.receive()?;
/// assert_eq!(&*request, b"2 + 2");
/// request.reply(b"4")?;
/// assert_eq!(asking.join().unwrap()?, b"4");
/// # Ok(())
/// # }
/// ```
pub struct Service {
    pub(super) requests: Receiver,
    /// After the receiver: a client then finds the lane of requests closed before its replies.
    pub(super) sessions: Sessions,
    shared: Arc<ServiceShared>,
    /// Sessions that the loop polls: with replies or a part that wait for space, or changed while the service drains.
    polled: Vec<Arc<Session>>,
    /// Sessions whose lanes of requests are paused.
    paused: Vec<Arc<Session>>,
    /// Of the request that the user has.
    storage: RequestStorage,
    /// A request that a wait has found. It is taken before the lanes are used in any other way, since a record in place
    /// does not say whose it is.
    found: Option<Found>,
    corrupt: u64,
    /// Cancels and departures so far.
    cancels: u64,
    /// Lanes are paused because the user takes no requests: see [`Service::try_receive_none`].
    is_full: bool,
    /// The drain has begun, and the clients have been notified.
    is_draining: bool,
}

/// A request that a poll has found in the current lane.
enum Found {
    InPlace(Record, Header),
    Owned(Vec<u8>, Header),
}

impl Drop for Service {
    fn drop(&mut self) {
        if !self.shared.owner.is_forked() {
            // The sessions own the shared state, and this list in it would own them.
            let _ = locked(&self.shared.attention).take();
        }
    }
}

impl Service {
    /// Listens under `name` (a short name, or `unix:PATH`) with default [`Options`]; does not wait. Clients connect
    /// whenever this service polls for requests, and none of them makes it wait. Several services may listen under a
    /// short name, in one process or in several: clients spread their calls over them. A [`Listener`] of a plain
    /// receiver cannot share the name: beside services it is refused, and clients skip it if services come beside it.
    ///
    /// # Errors
    /// As [`Listener::bind`].
    pub fn listen(name: &str) -> Result<Service> {
        Service::listen_with(name, &Options::new())
    }

    /// Listens under `name`, a short name or `unix:PATH`, as [`Service::listen`] does. It takes as many clients as
    /// [`Options::lanes`] says.
    ///
    /// # Errors
    /// As [`Listener::bind`].
    pub fn listen_with(name: &str, options: &Options<maker::Service>) -> Result<Service> {
        let options = &options.settings().of_link()?;
        options.check_memory(2)?;
        let listener = Listener::beside_others(name, options)?;
        let null_wake = Arc::new(LocalWake::new().map_err(Error::system("making an eventfd"))?);
        let replies =
            Replies { options: options.clone(), bytes_max: options.call_bytes_max, null_wake: null_wake.clone() };
        let requests =
            gather_with(&Settings { membership_events: true, ..options.clone() }, Some(listener), Some(replies))?;
        let shared = Arc::new(ServiceShared::new(options, &requests, null_wake)?);
        Ok(Service {
            requests,
            sessions: Sessions::default(),
            shared,
            polled: Vec::new(),
            paused: Vec::new(),
            storage: RequestStorage::new(),
            found: None,
            corrupt: 0,
            cancels: 0,
            is_full: false,
            is_draining: false,
        })
    }

    /// The session of the client whose request was found.
    #[inline(always)]
    fn current(&mut self) -> Option<&mut SessionSlot> {
        self.sessions.get(self.requests.lane_user())
    }

    /// Creates sessions for the clients that have joined.
    #[cold]
    fn add_clients(&mut self) {
        let Service { requests, sessions, shared, polled, is_draining, .. } = self;
        requests.adopt_replies(|reply, lane| {
            let index = sessions.add(reply, lane, shared);
            if *is_draining && let Some(slot) = sessions.get(index) {
                slot.session.begin_drain();
                polled.push(Arc::clone(&slot.session));
            }
            index
        });
    }

    /// The client of the current lane has left, and the lane is empty.
    #[cold]
    fn remove_client(&mut self) {
        let index = self.requests.lane_user();
        self.requests.pass_event();
        if let Some(slot) = self.sessions.remove(index) {
            self.cancels += 1;
            // The client has the doorbell too, so its close here would not end the polling.
            self.requests.doorbells().forget(slot.session.doorbell().as_fd());
        }
    }

    /// The next request, in place. Waits as the [`Wait`](pelton_channel::Wait) of the options says, without a bound;
    /// clients connect and leave meanwhile.
    ///
    /// # Errors
    /// [`Error::Closed`] once [`Stopper::stop`] was called, or everything is answered after [`Stopper::drain`];
    /// [`Error::Forked`]; [`Error::System`], after which it can be tried again. Running out of descriptors is no error:
    /// the service refuses clients that connect then.
    #[inline(always)]
    pub fn receive(&mut self) -> Result<Request<'_>> {
        let found = match self.request_fast() {
            None if self.requests.comes_soon() => self.request_fast(),
            found => found,
        };
        if let Some((record, id, deadline)) = found {
            return Ok(self.give_fast(record, id, deadline));
        }
        Ok(self.receive_slow(Deadline::Never)?.expect("without a deadline it does not pass"))
    }

    /// As [`Service::receive`], if there is one now; `None` otherwise. Never waits.
    ///
    /// # Errors
    /// As [`Service::receive`].
    #[inline(always)]
    pub fn try_receive(&mut self) -> Result<Option<Request<'_>>> {
        if let Some((record, id, deadline)) = self.request_fast() {
            return Ok(Some(self.give_fast(record, id, deadline)));
        }
        self.receive_slow(Deadline::Now)
    }

    /// As [`Service::receive`], until `deadline` on the monotonic clock; `None` when it passes.
    ///
    /// # Errors
    /// As [`Service::receive`].
    pub fn receive_until(&mut self, deadline: impl Into<Deadline>) -> Result<Option<Request<'_>>> {
        self.receive_slow(deadline.into())
    }

    /// As [`Service::try_receive`], for a user that takes no requests now. It writes replies that wait, handles cancels
    /// and departures, and pauses each lane whose next message is a request or notification. [`Service::arm`] ignores
    /// paused lanes until the user takes requests again. The lane of a client that has left is not paused, so that the
    /// service can remove it. Only a notification from such a lane is returned.
    ///
    /// # Errors
    /// As [`Service::receive`].
    #[doc(hidden)]
    pub fn try_receive_none(&mut self) -> Result<Option<Request<'_>>> {
        Ok(self.find_now(false, Polls::All)?.map(|found| self.give(found)))
    }

    pub(super) fn shared(&self) -> &Arc<ServiceShared> {
        &self.shared
    }

    /// Ends this service's waits from another thread, or from a handler.
    pub fn stopper(&self) -> Stopper {
        Stopper { shared: self.shared.clone() }
    }

    /// For an event loop: asks that the descriptor become readable when a request comes, or when there is space for a
    /// part that found none in [`Responder::try_part`], on whatever thread. When it is ready, take requests and try the
    /// parts again; it reports space once. Does not wait. The loop also wakes from time to time when clients connect,
    /// leave, or read their replies.
    ///
    /// # Errors
    /// As [`Service::receive`].
    pub fn arm(&mut self) -> Result<Armed> {
        // Finds no request before it arms: to arm may make another lane the current one.
        self.poll_sessions()?;
        let mut armed = self.requests.arm()?.is_waiting();
        armed = self.polled.iter().fold(armed, |armed, session| armed & session.arm());
        armed &= !self.shared.notified.is_set();
        if !armed || self.polled.iter().any(|session| session.needs_timed_wait()) {
            self.shared.local_wake.ring();
        }
        Ok(Armed::waiting_if(armed))
    }

    /// For an event loop, before [`Service::arm`]: polls for a request for some microseconds, and returns whether there
    /// is one. Otherwise as [`Receiver::busy_poll`].
    ///
    /// # Errors
    /// As [`Service::receive`].
    pub fn busy_poll(&mut self) -> Result<bool> {
        busy_poll(self, BUSY_POLL, 0)
    }

    /// Withdraws [`Service::arm`].
    pub fn disarm(&mut self) {
        self.requests.disarm();
        self.polled.iter().for_each(|session| session.disarm());
    }

    /// Clients that broke the rules, and were disconnected.
    pub fn corrupt_clients(&self) -> u64 {
        self.corrupt
    }

    /// How many calls in flight were cancelled, and how many clients have left. While the number stays the same, no
    /// call of an event loop needs [`BorrowedResponder::is_cancelled`]. A client cannot raise it by cancels of calls
    /// that have ended, or by cancelling a call again.
    #[doc(hidden)]
    pub fn cancels(&self) -> u64 {
        self.cancels
    }

    /// Replies to clients that had left.
    pub fn replies_dropped(&self) -> u64 {
        self.shared.dropped.load(Relaxed)
    }

    /// Takes a whole request at the cursor, while the loop has nothing else to do. `None`: use [`Service::find`]. Its
    /// result stays in registers.
    #[inline(always)]
    fn request_fast(&mut self) -> Option<(Record, u64, u64)> {
        if self.found.is_some() || self.is_draining || !self.polled.is_empty() || self.shared.notified.is_set() {
            return None;
        }
        let (record, words) = self.requests.peek_words_fast()?;
        let is_plain = Header::is_plain(&words, Kind::Request)
            && record.bytes - HEADER_BYTES as u64 <= self.shared.options.call_bytes_max;
        let [id, _, deadline] = words;
        (is_plain && self.current()?.session.begin(id)).then_some((record, id, deadline))
    }

    #[inline(always)]
    fn give_fast(&mut self, record: Record, id: u64, deadline: u64) -> Request<'_> {
        let Service { requests, sessions, storage, .. } = self;
        let slot = sessions.get(requests.lane_user()).expect("a request is a client's");
        // SAFETY: the reference goes into the result, which borrows the whole service for as long as the reference
        // lives.
        let session = unsafe { slot.session.lend() };
        let body = Body::InPlace(requests.message(record));
        storage.put(body, BorrowedResponder { session, id, deadline, is_answered: Flag::No })
    }

    #[cold]
    #[inline(never)]
    fn receive_slow(&mut self, deadline: Deadline) -> Result<Option<Request<'_>>> {
        Ok(self.find(deadline)?.map(|found| self.give(found)))
    }

    fn find(&mut self, deadline: Deadline) -> Result<Option<Found>> {
        let deadline = deadline.until();
        // A few lanes only, if a wait follows that begins with a busy-poll.
        let busy_polls = deadline.is_some() && Polled::spin(self).first_polls() > 0;
        if let Some(found) = self.find_now(true, if busy_polls { Polls::InTurn } else { Polls::All })? {
            return Ok(Some(found));
        }
        let Some(deadline) = deadline else { return Ok(None) };
        while wait(self, deadline)? {
            if let Some(found) = self.find_now(true, Polls::All)? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    fn give(&mut self, found: Found) -> Request<'_> {
        let Service { requests, sessions, storage, .. } = self;
        let slot = sessions.get(requests.lane_user()).expect("a request is a client's");
        // SAFETY: as in `give_fast`.
        let session = unsafe { slot.session.lend() };
        let (body, header) = match found {
            Found::InPlace(record, header) if header.traced => (Body::Traced(requests.message(record)), header),
            Found::InPlace(record, header) => (Body::InPlace(requests.message(record)), header),
            Found::Owned(bytes, header) => (Body::Owned(bytes), header),
        };
        let is_answered = if header.kind == Kind::Notify { Flag::Yes } else { Flag::No };
        storage.put(body, BorrowedResponder { session, id: header.id, deadline: header.deadline, is_answered })
    }

    /// The next request, if there is one now and the user takes it.
    fn find_now(&mut self, takes: bool, polls: Polls) -> Result<Option<Found>> {
        if self.found.is_some() {
            return Ok(self.found.take());
        }
        if takes && std::mem::take(&mut self.is_full) {
            self.paused.iter().for_each(|session| session.set_full(false));
            self.poll_sessions()?;
        }
        for _ in 0..RECORDS_PER_POLL {
            if !self.polled.is_empty() || self.shared.notified.is_set() {
                self.poll_sessions()?;
            }
            let record = match self.requests.find_now(polls)? {
                Some(Item::Record(record)) => record,
                Some(Item::Joined) => {
                    self.add_clients();
                    self.requests.pass_event();
                    continue;
                }
                Some(Item::Left(_)) => {
                    self.remove_client();
                    continue;
                }
                None => return Ok(None),
            };
            let read = match self.requests.words(&record) {
                Some(words) => Header::read(words, record.bytes - HEADER_BYTES as u64, By::Client),
                None => Err("length"),
            };
            if !takes && read.is_ok_and(|header| self.pause_before(header)) {
                continue;
            }
            match read.and_then(|header| self.sort(&record, header)) {
                Ok(Some(found)) => return Ok(Some(found)),
                Ok(None) => {}
                // It concerns that client alone.
                Err(_) => {
                    self.corrupt += 1;
                    self.requests.end_lane();
                }
            }
        }
        Ok(None)
    }

    /// Pauses the current lane if its next record, of this header, is for a user that takes nothing now. Returns
    /// whether it does.
    fn pause_before(&mut self, header: Header) -> bool {
        let is_for_user = match header.kind {
            Kind::Request => !self.is_draining,
            kind => kind == Kind::Notify,
        };
        if !is_for_user || self.requests.is_sender_gone() {
            return false;
        }
        let Some(slot) = self.current() else { return false };
        let session = Arc::clone(&slot.session);
        session.set_full(true);
        self.is_full = true;
        self.sessions.update_pause(&session, &mut self.requests);
        add(&mut self.paused, session);
        true
    }

    /// Returns the record if it is a whole message for the user; releases it otherwise. An error is the rule that the
    /// record breaks.
    fn sort(&mut self, record: &Record, header: Header) -> std::result::Result<Option<Found>, &'static str> {
        if record.bytes - HEADER_BYTES as u64 - header.prefix_bytes() as u64 > self.shared.options.call_bytes_max {
            return Err("size");
        }
        let is_gone = self.requests.is_sender_gone();
        let Some(slot) = self.sessions.get(self.requests.lane_user()) else { return Err("lane") };
        if header.kind == Kind::Request && !header.continued && !slot.session.begin(header.id) {
            return Err("id");
        }
        if header.traced {
            let traceparent = self.requests.copy(record, HEADER_BYTES).as_ref().and_then(Traceparent::decode);
            slot.session.set_traceparent(header.id, traceparent);
        }
        if header.more || header.continued {
            return self.assemble(record, header, is_gone);
        }
        if header.kind == Kind::Cancel {
            self.cancels += u64::from(slot.session.cancel(header.id));
            self.requests.release_record(record);
            return Ok(None);
        }
        // Nobody awaits the reply.
        if is_gone && header.kind == Kind::Request {
            self.requests.release_record(record);
            return Ok(None);
        }
        if self.is_draining && header.kind == Kind::Request {
            slot.session.return_request(header.id);
            self.requests.release_record(record);
            return Ok(None);
        }
        Ok(Some(Found::InPlace(*record, header)))
    }

    #[cold]
    fn assemble(
        &mut self,
        record: &Record,
        header: Header,
        is_gone: bool,
    ) -> std::result::Result<Option<Found>, &'static str> {
        let most = self.shared.options.call_bytes_max;
        let Some(slot) = self.sessions.get(self.requests.lane_user()) else { return Err("lane") };
        Assembly::check(&slot.assembly, &header)?;
        let session = Arc::clone(&slot.session);
        let mut assembly = match slot.assembly.take() {
            Some(assembly) => assembly,
            None => Assembly::new(header, session.memory.take(0), slot.assembled),
        };
        let skip = HEADER_BYTES + header.prefix_bytes();
        let bytes = record.bytes - skip as u64;
        if assembly.length + bytes > most {
            return Err("size");
        }
        if assembly.grow(bytes) {
            self.requests.append(record, skip, &mut assembly.bytes);
        }
        if header.more
            && let Some(slot) = self.current()
        {
            slot.assembly = Some(assembly);
            self.requests.release_record(record);
            return Ok(None);
        }
        self.requests.release_record(record);
        if let Some(slot) = self.current() {
            slot.assembled = assembly.bytes.len();
        }
        let is_request = header.kind == Kind::Request;
        if is_request && self.is_draining && !is_gone {
            session.return_request(header.id);
        }
        let is_wanted = !is_request || !(is_gone || self.is_draining);
        if assembly.is_dropped {
            match is_request {
                true if is_wanted => session.fail_for_memory(header.id, assembly.length),
                true => {}
                false => _ = self.shared.dropped.fetch_add(1, Relaxed),
            }
            return Ok(None);
        }
        let header = assembly.header;
        Ok(is_wanted.then(|| Found::Owned(assembly.into_bytes(), header)))
    }

    /// Takes notifications, writes queued replies, pauses and resumes lanes, and checks whether to stop or drain.
    #[cold]
    fn poll_sessions(&mut self) -> Result<()> {
        if self.requests.is_forked() {
            return Err(Error::Forked);
        }
        let mut changed = std::mem::take(&mut self.paused);
        if self.shared.notified.take() {
            let mut attention = locked(&self.shared.attention);
            // A session whose backpressure ended and began again may be here already.
            for session in attention.iter_mut().flat_map(|attention| attention.drain(..)) {
                add(&mut self.polled, session);
            }
        }
        changed.extend(self.polled.iter().cloned());
        let is_over = match self.shared.is_draining.load(Relaxed) {
            true => self.drain(&mut changed),
            false => {
                self.polled.retain(|session| session.poll());
                false
            }
        };
        for session in changed {
            if self.sessions.update_pause(&session, &mut self.requests) {
                add(&mut self.paused, session);
            }
        }
        if is_over || self.shared.is_stopped.load(Relaxed) {
            // For the next call.
            self.shared.notified.set();
            return Err(Error::Closed { unreleased: 0 });
        }
        Ok(())
    }

    /// Continues a drain: notifies the clients once, and each again when all its calls have ended. Returns whether all
    /// have been notified of their end.
    #[cold]
    fn drain(&mut self, changed: &mut Vec<Arc<Session>>) -> bool {
        if !self.is_draining {
            self.requests.stop_listening();
            // Before `is_draining`: it would notify the new clients, and the loop below notifies all of them.
            self.add_clients();
            self.is_draining = true;
            for slot in self.sessions.iter() {
                slot.session.begin_drain();
                add(&mut self.polled, Arc::clone(&slot.session));
            }
        }
        // Only sessions whose client has read something, or of which a call has ended, can have changed.
        let mut candidates = std::mem::take(&mut self.polled);
        changed.extend(candidates.iter().cloned());
        let mut are_all = true;
        for slot in self.sessions.iter() {
            let session = &slot.session;
            let Some(index) = candidates.iter().position(|of| Arc::ptr_eq(of, session)) else {
                are_all &= session.is_drained();
                continue;
            };
            let assembly = slot.assembly.as_ref().filter(|assembly| assembly.header.kind == Kind::Request);
            let ended = session.end_drain(assembly.map(|assembly| assembly.header.id));
            are_all &= ended == Some(true);
            let session = candidates.swap_remove(index);
            if ended.is_none() || session.poll() {
                self.polled.push(session);
            }
        }
        are_all
    }
}

/// Adds a session to a list that has each once.
fn add(list: &mut Vec<Arc<Session>>, session: Arc<Session>) {
    if !list.iter().any(|other| Arc::ptr_eq(other, &session)) {
        list.push(session);
    }
}

impl AsRawFd for Service {
    /// As [`AsFd`], for runtimes that take the number.
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Service").field("is_draining", &self.is_draining).finish_non_exhaustive()
    }
}

impl AsFd for Service {
    /// The descriptor for an event loop: see [`Service::arm`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.requests.as_fd()
    }
}

/// A service that waits: for requests as any receiver does, and for space for queued replies.
impl Polled for Service {
    fn poll(&mut self) -> Result<bool> {
        if self.found.is_none() {
            self.found = self.find_now(true, Polls::All)?;
        }
        Ok(self.found.is_some())
    }

    fn poll_in_turn(&mut self) -> Result<bool> {
        if self.found.is_none() {
            self.found = self.find_now(true, Polls::InTurn)?;
        }
        Ok(self.found.is_some())
    }

    fn may_be_ready(&mut self) -> bool {
        Polled::may_be_ready(&mut self.requests) || self.shared.notified.is_set()
    }

    fn spin(&mut self) -> &mut Spin {
        Polled::spin(&mut self.requests)
    }

    fn last_ring(&self) -> Option<LastRing> {
        self.requests.last_ring()
    }
}

impl Side for Service {
    fn arm(&mut self) -> Result<bool> {
        if !Side::arm(&mut self.requests)? {
            return Ok(false);
        }
        let armed = self.polled.iter().fold(true, |armed, session| armed & session.arm());
        // A thread that notifies after this load also rings.
        let armed = armed && !self.shared.notified.is_set();
        if !armed {
            Side::disarm(self);
        }
        Ok(armed)
    }

    fn disarm(&mut self) {
        Service::disarm(self);
    }

    fn end(&mut self) -> Result<bool> {
        Side::end(&mut self.requests)
    }

    fn needs_timed_wait(&self) -> bool {
        Side::needs_timed_wait(&self.requests) || self.polled.iter().any(|session| session.needs_timed_wait())
    }

    fn sleep(&mut self, deadline: Option<Instant>) -> Result<Ready> {
        Side::sleep(&mut self.requests, deadline)
    }

    fn rung(&mut self, alone: bool) -> Result<bool> {
        Side::rung(&mut self.requests, alone)
    }

    fn is_peer_known_gone(&mut self) -> Result<bool> {
        Side::is_peer_known_gone(&mut self.requests)
    }
}

/// Ends a service's waits; see [`Service::stopper`]. `Clone`, `Send` and `Sync`.
#[derive(Clone, Debug)]
pub struct Stopper {
    shared: Arc<ServiceShared>,
}

impl Stopper {
    /// From now on the service's methods that take requests return [`Error::Closed`], and [`Service::run`] returns.
    /// Clients are notified when the service is dropped; all calls that it has not answered by then have failed. Does
    /// not wait. To replace a service whose clients connect to a short name use [`Stopper::drain`].
    pub fn stop(&self) {
        self.shared.is_stopped.store(true, Relaxed);
        self.shared.notify();
    }

    /// Has the service answer the requests that it has taken, and take no more. Requests that come from now on are
    /// returned, and their clients submit them to another service of the name: no call fails or is executed twice. The
    /// name is free at once for a successor; start that one before. The methods that take requests still return
    /// notifications and take cancels. They return [`Error::Closed`] once every client has been notified that all its
    /// calls have ended; [`Service::run`] returns then. Drop the service after that. Does not wait.
    ///
    /// A client that does not read its replies delays this; [`Stopper::stop`] ends it all the same.
    pub fn drain(&self) {
        self.shared.is_draining.store(true, Relaxed);
        self.shared.notify();
    }
}
