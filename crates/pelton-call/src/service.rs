//! The answering side: requests of all clients by one wait, replies from any thread.
//!
//! A client that does not read its replies is *clogged*: what does not fit into its lane waits in memory, and none of its
//! requests is taken meanwhile, so that this is no more than what it had asked before. The service writes it as room comes,
//! whenever it looks for requests; so does every thread that answers that client.

#[cfg(doc)]
use super::Responder;
use super::caller::{Back, Backs, Caller, Desk};
use super::frame::{Assembly, By, HEADER_BYTES, Header, Kind};
use super::hold::Hold;
use super::responder::{Answering, Place, Request};
use crate::body::{Body, Flag, LOOKS};
use pelton_channel::{Error, Result};

use pelton_channel::Deadline;
use pelton_channel::Listener;
use pelton_channel::Receiver;
use pelton_channel::raw::Item;
use pelton_channel::raw::Settings;
use pelton_channel::raw::wait;
use pelton_channel::raw::{Replies, gather_with};
use pelton_channel::raw::{Side, Spin};
use pelton_channel::{Options, options::maker};
use pelton_lane::Record;
use pelton_os::{LocalWake, Ready, locked};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

/// Answers requests of all who connect under its name, up to 1,024 clients. `Send`, not `Sync`: one thread at a time takes
/// requests; they are answered on any.
///
/// The caller's own loop takes requests by [`Service::receive`], in turn from all clients, or [`Service::run`] does it with a pool
/// of threads. Each request is answered once, by its [`Answering`].
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
#[derive(Debug)]
pub struct Service {
    pub(super) requests: Receiver,
    /// After the receiver: a client finds its requests closed before its replies.
    clients: Backs,
    desk: Arc<Desk>,
    /// Clients that do not read their replies, or for a part to whom there was no room.
    clogged: Vec<Arc<Caller>>,
    /// Clients whose lanes of requests are paused.
    paused: Vec<Arc<Caller>>,
    /// Of the request that is given out.
    place: Place<'static>,
    /// Found by a wait, for who waited: taken before anything else is asked of the lanes, since of a record in place it says
    /// nothing of whose it is.
    found: Option<Found>,
    corrupt: u64,
    /// It has been told to drain, and so have been its clients.
    is_draining: bool,
}

/// What a look came upon, of the current lane.
#[derive(Debug)]
enum Found {
    InPlace(Record, Header),
    Apart(Vec<u8>, Header),
}

impl Drop for Service {
    fn drop(&mut self) {
        if !self.desk.owner.is_forked() {
            // They have it, and it would have them.
            let _ = locked(&self.desk.arrived).take();
        }
    }
}

impl Service {
    /// Listens under `name` (a short name, or `unix:PATH`) with default [`Options`]; does not wait. Clients come in whenever this
    /// service looks for requests, and none of them keeps it waiting. Several services may listen under a short name, of one process or
    /// of several: clients spread their calls over them. A [`Listener`] that is no service has its name alone: beside services it is refused,
    /// and clients pass it over if services come beside it.
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
        Service::with(name, &options.settings().of_link()?)
    }

    fn with(name: &str, options: &Settings) -> Result<Service> {
        options.check_memory(2)?;
        let listener = Listener::beside_others(name, options)?;
        let null_wake = Arc::new(LocalWake::new().map_err(Error::system("making an eventfd"))?);
        let replies =
            Replies { options: options.clone(), bytes_max: options.call_bytes_max, null_wake: null_wake.clone() };
        let requests = gather_with(&Settings { announces: true, ..options.clone() }, Some(listener), Some(replies))?;
        let desk = Arc::new(Desk::new(options, &requests, null_wake)?);
        Ok(Service {
            requests,
            clients: Backs::default(),
            desk,
            clogged: Vec::new(),
            paused: Vec::new(),
            place: MaybeUninit::uninit(),
            found: None,
            corrupt: 0,
            is_draining: false,
        })
    }

    /// The client whose request was found.
    #[inline(always)]
    fn client(&mut self) -> Option<&mut Back> {
        self.clients.get(self.requests.lane_user())
    }

    /// Takes in the clients that have joined.
    #[cold]
    fn add_clients(&mut self) {
        let Service { requests, clients, desk, clogged, is_draining, .. } = self;
        requests.adopt_replies(|reply, lane| {
            let index = clients.add(reply, lane, desk);
            if *is_draining && let Some(back) = clients.get(index) {
                back.caller.begin_drain();
                clogged.push(Arc::clone(&back.caller));
            }
            index
        });
    }

    /// The client whose lane of requests has just been served to its end is gone.
    #[cold]
    fn remove_client(&mut self) {
        let index = self.requests.lane_user();
        self.requests.pass_event();
        if let Some(back) = self.clients.remove(index) {
            // The client has the doorbell too, so its close here would not end the polling.
            self.requests.doorbells().forget(back.caller.doorbell().as_fd());
        }
    }

    /// The next request, in place. Waits as the [`Wait`](pelton_channel::Wait) of the options says, for ever if need be; clients come and go
    /// meanwhile.
    ///
    /// # Errors
    /// [`Error::Closed`] once [`Stopper::stop`] was called, or everything is answered after [`Stopper::drain`]; [`Error::Forked`]; [`Error::System`], after which it can be
    /// tried again. That descriptors run out is none: who connects then is refused.
    #[inline(always)]
    pub fn receive(&mut self) -> Result<Request<'_>> {
        let plain = match self.plain_request() {
            None if self.requests.comes_soon() => self.plain_request(),
            plain => plain,
        };
        if let Some((record, id, deadline)) = plain {
            return Ok(self.plain(record, id, deadline));
        }
        Ok(self.receive_slowly(Deadline::Never)?.expect("without a deadline it does not pass"))
    }

    /// As [`Service::receive`], if there is one now; `None` otherwise. Never waits.
    ///
    /// # Errors
    /// As [`Service::receive`].
    #[inline(always)]
    pub fn try_receive(&mut self) -> Result<Option<Request<'_>>> {
        if let Some((record, id, deadline)) = self.plain_request() {
            return Ok(Some(self.plain(record, id, deadline)));
        }
        self.receive_slowly(Deadline::Now)
    }

    /// As [`Service::receive`], until `deadline` on the monotonic clock; `None` when it passes.
    ///
    /// # Errors
    /// As [`Service::receive`].
    pub fn receive_until(&mut self, deadline: Instant) -> Result<Option<Request<'_>>> {
        self.receive_slowly(Deadline::At(deadline))
    }

    pub(super) fn desk(&self) -> &Arc<Desk> {
        &self.desk
    }

    /// What ends this service's waits from another thread, or from a handler.
    pub fn stopper(&self) -> Stopper {
        Stopper { desk: self.desk.clone() }
    }

    /// For an event loop: asks that the descriptor become readable when a request comes, or when there is room for a part for which
    /// [`Responder::try_part`] found none, on whatever thread. True: there is neither now, go back to the loop. False: there is one, take
    /// it, or try the parts again; of room this is said once. Does not wait. The loop is woken now and then for clients that come, go, or
    /// read their replies.
    ///
    /// # Errors
    /// As [`Service::receive`].
    pub fn arm(&mut self) -> Result<bool> {
        // Nothing is to be found before: to arm may give another lane the turn.
        self.tend()?;
        let mut armed = self.requests.arm()?;
        armed = self.clogged.iter().fold(armed, |armed, caller| armed & caller.arm());
        armed &= !self.desk.stirred.is_set();
        if !armed || self.clogged.iter().any(|caller| caller.needs_timed_wait()) {
            self.desk.local_wake.ring();
        }
        Ok(armed)
    }

    /// Takes [`Service::arm`] back.
    pub fn disarm(&mut self) {
        self.requests.disarm();
        self.clogged.iter().for_each(|caller| caller.disarm());
    }

    /// Clients that broke the rules, and were sent away.
    pub fn corrupt_clients(&self) -> u64 {
        self.corrupt
    }

    /// Replies to clients that had gone.
    pub fn dropped(&self) -> u64 {
        self.desk.dropped.load(Relaxed)
    }

    /// The common case: a whole request stands at the cursor, and there is nothing else to look after. It has been taken then; `None`:
    /// ask [`Service::find`]. Apart, so that it stays in registers.
    #[inline(always)]
    fn plain_request(&mut self) -> Option<(Record, u64, u64)> {
        if self.found.is_some() || self.is_draining || !self.clogged.is_empty() || self.desk.stirred.is_set() {
            return None;
        }
        let (record, words) = self.requests.peek_words_fast()?;
        let is_plain = Header::is_plain(&words, Kind::Request)
            && record.bytes - HEADER_BYTES as u64 <= self.desk.options.call_bytes_max;
        let [id, _, deadline] = words;
        (is_plain && self.client()?.caller.begin(id)).then_some((record, id, deadline))
    }

    #[inline(always)]
    fn plain(&mut self, record: Record, id: u64, deadline: u64) -> Request<'_> {
        let caller = self.lend();
        let (requests, place) = self.place();
        let body = Body::InPlace(requests.message(record));
        Request::put(place, body, Answering { caller, id, deadline, is_answered: Flag::No })
    }

    /// The current client, for as long as this is borrowed.
    #[inline(always)]
    fn lend<'a>(&mut self) -> Hold<'a> {
        let back = self.client().expect("a request is a client's");
        // SAFETY: whoever calls this ends what it lends before the service is used again, and so before any lane is given up.
        unsafe { Hold::lent(&back.caller) }
    }

    /// Where requests come from, and where the one is that is given out, for as long as this is borrowed.
    #[inline(always)]
    fn place(&mut self) -> (&mut Receiver, &mut Place<'_>) {
        // SAFETY: only the time is another. What is written there is for the request that has the borrow, and nothing is read or dropped
        // there without one.
        (&mut self.requests, unsafe { &mut *(&raw mut self.place).cast() })
    }

    #[cold]
    #[inline(never)]
    fn receive_slowly(&mut self, deadline: Deadline) -> Result<Option<Request<'_>>> {
        Ok(self.find(deadline)?.map(|found| self.request(found)))
    }

    fn find(&mut self, deadline: Deadline) -> Result<Option<Found>> {
        if let Some(found) = self.look_for()? {
            return Ok(Some(found));
        }
        let Some(deadline) = deadline.until() else { return Ok(None) };
        while wait(self, deadline)? {
            if let Some(found) = self.look_for()? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    fn request(&mut self, found: Found) -> Request<'_> {
        let caller = self.lend();
        let (requests, place) = self.place();
        let (body, header) = match found {
            Found::InPlace(record, header) => (Body::InPlace(requests.message(record)), header),
            Found::Apart(bytes, header) => (Body::Apart(bytes), header),
        };
        let is_answered = if header.kind == Kind::Notify { Flag::Yes } else { Flag::No };
        Request::put(place, body, Answering { caller, id: header.id, deadline: header.deadline, is_answered })
    }

    /// The next request, if there is one now.
    fn look_for(&mut self) -> Result<Option<Found>> {
        if self.found.is_some() {
            return Ok(self.found.take());
        }
        for _ in 0..LOOKS {
            if !self.clogged.is_empty() || self.desk.stirred.is_set() {
                self.tend()?;
            }
            let record = match self.requests.find(Deadline::Now)? {
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
            match read.and_then(|header| self.sort(&record, header)) {
                Ok(Some(found)) => return Ok(Some(found)),
                Ok(None) => {}
                // That client's affair alone.
                Err(_) => {
                    self.corrupt += 1;
                    self.requests.end_lane();
                }
            }
        }
        Ok(None)
    }

    /// What the next record asks, if it asks something and is whole; else it has been released. An error is the rule that it
    /// breaks.
    fn sort(&mut self, record: &Record, header: Header) -> std::result::Result<Option<Found>, &'static str> {
        if record.bytes - HEADER_BYTES as u64 > self.desk.options.call_bytes_max {
            return Err("size");
        }
        let is_gone = self.requests.is_sender_gone();
        let Some(back) = self.clients.get(self.requests.lane_user()) else { return Err("lane") };
        if header.kind == Kind::Request && !header.continued && !back.caller.begin(header.id) {
            return Err("id");
        }
        if header.more || header.continued {
            return self.assemble(record, header, is_gone);
        }
        if header.kind == Kind::Cancel {
            back.caller.cancel(header.id);
            self.requests.release_record(record);
            return Ok(None);
        }
        // Nobody awaits the answer.
        if is_gone && header.kind == Kind::Request {
            self.requests.release_record(record);
            return Ok(None);
        }
        if self.is_draining && header.kind == Kind::Request {
            back.caller.give_back(header.id);
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
        let most = self.desk.options.call_bytes_max;
        let Some(back) = self.clients.get(self.requests.lane_user()) else { return Err("lane") };
        Assembly::check(&back.assembly, &header)?;
        let caller = Arc::clone(&back.caller);
        let mut assembly = back.assembly.take().unwrap_or_else(|| Assembly::new(header, caller.kept.take(0)));
        let bytes = record.bytes - HEADER_BYTES as u64;
        if assembly.length + bytes > most {
            return Err("size");
        }
        if assembly.grow(bytes) {
            self.requests.append(record, HEADER_BYTES, &mut assembly.bytes);
        }
        if header.more
            && let Some(back) = self.client()
        {
            back.assembly = Some(assembly);
            self.requests.release_record(record);
            return Ok(None);
        }
        self.requests.release_record(record);
        let is_request = header.kind == Kind::Request;
        if is_request && self.is_draining && !is_gone {
            caller.give_back(header.id);
        }
        let is_wanted = !is_request || !(is_gone || self.is_draining);
        if assembly.is_dropped {
            match is_request {
                true if is_wanted => caller.fail_for_memory(header.id, assembly.length),
                true => {}
                false => _ = self.desk.dropped.fetch_add(1, Relaxed),
            }
            return Ok(None);
        }
        Ok(is_wanted.then_some(Found::Apart(assembly.bytes, assembly.header)))
    }

    /// Looks after clients that do not read their replies, and whether to stop or drain.
    #[cold]
    fn tend(&mut self) -> Result<()> {
        if self.requests.is_forked() {
            return Err(Error::Forked);
        }
        let mut changed = std::mem::take(&mut self.paused);
        if self.desk.stirred.take() {
            let mut arrived = locked(&self.desk.arrived);
            // One that was clogged, was not, and is again may be here already.
            for new in arrived.iter_mut().flat_map(|arrived| arrived.drain(..)) {
                if !self.clogged.iter().any(|old| Arc::ptr_eq(old, &new)) {
                    self.clogged.push(new);
                }
            }
        }
        changed.extend(self.clogged.iter().cloned());
        let is_over = match self.desk.is_draining.load(Relaxed) {
            true => self.drain(&mut changed),
            false => {
                self.clogged.retain(|caller| caller.tend());
                false
            }
        };
        for caller in changed {
            if self.clients.update_pause(&caller, &mut self.requests)
                && !self.paused.iter().any(|old| Arc::ptr_eq(old, &caller))
            {
                self.paused.push(caller);
            }
        }
        if is_over || self.desk.is_stopped.load(Relaxed) {
            // To be seen again by the next call.
            self.desk.stirred.set();
            return Err(Error::Closed { unreleased: 0 });
        }
        Ok(())
    }

    /// Tells clients to go elsewhere, and each when all its calls are answered. True: all have been told.
    #[cold]
    fn drain(&mut self, changed: &mut Vec<Arc<Caller>>) -> bool {
        if !std::mem::replace(&mut self.is_draining, true) {
            self.requests.stop_listening();
            self.add_clients();
            for back in self.clients.iter() {
                back.caller.begin_drain();
                if !self.clogged.iter().any(|old| Arc::ptr_eq(old, &back.caller)) {
                    self.clogged.push(Arc::clone(&back.caller));
                }
            }
        }
        // A client is looked at when it has read something, or a call of its was answered.
        let mut looked_at = std::mem::take(&mut self.clogged);
        changed.extend(looked_at.iter().cloned());
        let mut are_all = true;
        for back in self.clients.iter() {
            let caller = &back.caller;
            let place = looked_at.iter().position(|of| Arc::ptr_eq(of, caller));
            let Some(place) = place else {
                are_all &= caller.is_drained();
                continue;
            };
            let assembly = back.assembly.as_ref().filter(|assembly| assembly.header.kind == Kind::Request);
            let is_said = caller.end_drain(assembly.map(|assembly| assembly.header.id));
            are_all &= is_said == Some(true);
            let caller = looked_at.swap_remove(place);
            if is_said.is_none() || caller.tend() {
                self.clogged.push(caller);
            }
        }
        are_all
    }
}

impl AsRawFd for Service {
    /// As [`AsFd`], for runtimes that ask for the number.
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl AsFd for Service {
    /// The descriptor for an event loop: see [`Service::arm`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.requests.as_fd()
    }
}

/// A service that waits: for requests as any receiver does, and for room for the replies of clients that are clogged.
impl Side for Service {
    fn poll(&mut self) -> Result<bool> {
        if self.found.is_none() {
            self.found = self.look_for()?;
        }
        Ok(self.found.is_some())
    }

    fn may_be_ready(&self) -> bool {
        self.requests.has_messages() || self.desk.stirred.is_set()
    }

    fn arm(&mut self) -> Result<bool> {
        if !Side::arm(&mut self.requests)? {
            return Ok(false);
        }
        let armed = self.clogged.iter().fold(true, |armed, caller| armed & caller.arm());
        // Who stirs from now on rings.
        let armed = armed && !self.desk.stirred.is_set();
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
        Side::needs_timed_wait(&self.requests) || self.clogged.iter().any(|caller| caller.needs_timed_wait())
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

    fn spin(&mut self) -> &mut Spin {
        Side::spin(&mut self.requests)
    }
}

/// Ends a service's waits; see [`Service::stopper`]. `Clone`, `Send` and `Sync`.
#[derive(Clone, Debug)]
pub struct Stopper {
    desk: Arc<Desk>,
}

impl Stopper {
    /// From now on the service's methods that take requests say [`Error::Closed`], and [`Service::run`] returns. Clients are not
    /// told before the service is dropped; all calls that it had not answered by then have failed. Does not wait. To replace a
    /// service whose clients connect to a short name use [`Stopper::drain`].
    pub fn stop(&self) {
        self.desk.is_stopped.store(true, Relaxed);
        self.desk.stir();
    }

    /// Has the service answer what it has taken, and take no more: requests that come from now on are given back, and their clients
    /// submit them to another service of the name, without a call failing or being carried out twice. Its name is free at once
    /// for a successor; start that one before. The service goes on taking notifications and cancels by the methods that take requests, which say
    /// [`Error::Closed`] once every client has been told that everything it had asked is answered; [`Service::run`] returns
    /// then. Drop the service after that. Does not wait.
    ///
    /// A client that does not read its replies holds this up; [`Stopper::stop`] ends it all the same.
    pub fn drain(&self) {
        self.desk.is_draining.store(true, Relaxed);
        self.desk.stir();
    }
}
