//! The answering side: requests of all clients by one wait, replies from any thread.
//!
//! A client that does not read its replies is *clogged*: what does not fit into its lane waits in memory, and none of its
//! requests is taken meanwhile, so that this is no more than what it had asked before. The service writes it as room comes,
//! whenever it looks for requests; so does every thread that answers that client.

mod raw;

pub use raw::{RawReplyRoom, RawRequest};

use super::frame::{Assembly, By, CALLS_MAX, Clock, HEADER_BYTES, Header, Kind, check_size, generation_of, slot_of};
use super::outbox::Outbox;
use super::{Body, LOOKS};
use crate::connect::{Listener, Origin};
use crate::error::{Error, Result};
use crate::gather;
use crate::link::{Bells, Peer, SharedLife};
use crate::options::Options;
use crate::os::{Bell, Nudge, Owner, Ready, locked, poll_until};
use crate::receiver::Receiver;
use crate::sender::{Sender, SenderParts, Sent};
use crate::wait::{self, Patience, Side, Spin};
use pelton_lane::{Record, Space};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// Answers requests of all who connect under its name, up to 1,024 clients. `Send`, not `Sync`: one thread at a time takes
/// requests; they are answered on any.
///
/// The caller's own loop takes requests by [`Service::receive`], in turn from all clients, or [`Service::run`] does it with a pool
/// of threads. Each request is answered once, by its [`Responder`].
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
    requests: Receiver,
    desk: Arc<Desk>,
    /// Clients that do not read their replies.
    clogged: Vec<Arc<Caller>>,
    /// Found by a wait, for who waited: taken before anything else is asked of the lanes, since of a record in place it says
    /// nothing of whose it is.
    found: Option<Found>,
    corrupt: u64,
}

/// What all clients of a service have in common.
#[derive(Debug)]
pub(crate) struct Desk {
    pub(crate) options: Options,
    /// Of the clients' lanes, whose own bells are heard otherwise.
    pub(crate) mute: Arc<Nudge>,
    nudge: Arc<Nudge>,
    clock: Clock,
    /// Clients that are clogged since the service last looked; none any more when it is gone.
    arrived: Mutex<Option<Vec<Arc<Caller>>>>,
    /// Whether there is anything for the service to see here.
    is_stirred: AtomicBool,
    is_stopped: AtomicBool,
    dropped: AtomicU64,
    owner: Owner,
}

impl Desk {
    /// Has the service look at a client.
    fn look_at(&self, caller: &Arc<Caller>) {
        if let Some(arrived) = &mut *locked(&self.arrived) {
            arrived.push(caller.clone());
        }
        self.stir();
    }

    fn new(options: &Options, bells: &Bells) -> Result<Desk> {
        let mute = Nudge::new().map_err(Error::system("making an eventfd"))?;
        Ok(Desk {
            options: options.clone(),
            mute: Arc::new(mute),
            nudge: bells.nudge().clone(),
            clock: Clock::new(),
            arrived: Mutex::new(Some(Vec::new())),
            is_stirred: AtomicBool::new(false),
            is_stopped: AtomicBool::new(false),
            dropped: AtomicU64::new(0),
            owner: Owner::current().map_err(Error::system("looking whose handle this is"))?,
        })
    }

    fn stir(&self) {
        // In a forked child the descriptor is closed.
        if !self.owner.is_forked() {
            self.is_stirred.store(true, Ordering::Release);
            self.nudge.ring();
        }
    }
}

/// A request's lane has with it: whom to answer, and what of a large request has come.
#[derive(Debug)]
pub(crate) struct Back {
    pub(crate) caller: Arc<Caller>,
    assembly: Option<Assembly>,
}

impl Back {
    pub(crate) fn new(caller: Caller) -> Back {
        Back { caller: Arc::new(caller), assembly: None }
    }
}

impl Drop for Back {
    fn drop(&mut self) {
        self.caller.leave();
    }
}

/// A client, as those have it who answer.
#[derive(Debug)]
pub(crate) struct Caller {
    desk: Arc<Desk>,
    pub(super) out: Mutex<Out>,
    /// For who waits for room while another polls.
    turn: Condvar,
    is_clogged: AtomicBool,
    /// Last answers of threads that must not wait for the lock, for the service's loop to take up; and whether there are any.
    later: Mutex<Vec<(Header, Vec<u8>)>>,
    has_later: AtomicBool,
    is_gone: AtomicBool,
    /// By slot, 0 or the call in it: its generation, and what is to be known of it.
    calls: Box<[AtomicU64]>,
    bells: Bells,
    life: Option<SharedLife>,
    peer: Option<Peer>,
    /// The largest reply that the client takes.
    bytes_max: u64,
    owner: Owner,
}

/// What is behind the lock, which is held for as long as it takes to copy a reply.
#[derive(Debug)]
pub(super) struct Out {
    pub(super) outbox: Outbox,
    /// Somebody waits for room, and hears the bell.
    is_polled: bool,
    /// Room was waited for when the lock was last given back: whoever finds some ends that, and is to say so.
    is_awaited: bool,
}

const TAKEN: u64 = 1;
const CANCELLED: u64 = 2;

impl Caller {
    pub(crate) fn new(parts: SenderParts, desk: Arc<Desk>, bytes_max: u64) -> Result<Caller> {
        let (bells, owner) =
            (parts.bells.clone(), Owner::current().map_err(Error::system("looking whose handle this is"))?);
        let sender = Sender::new(parts, &desk.options, Origin::Threads)?;
        Ok(Caller {
            life: sender.shared_life(),
            peer: sender.peer(),
            out: Mutex::new(Out { outbox: Outbox::new(sender), is_polled: false, is_awaited: false }),
            desk,
            turn: Condvar::new(),
            is_clogged: AtomicBool::new(false),
            later: Mutex::default(),
            has_later: AtomicBool::new(false),
            is_gone: AtomicBool::new(false),
            calls: (0..CALLS_MAX).map(|_| AtomicU64::new(0)).collect(),
            bells,
            bytes_max,
            owner,
        })
    }

    /// What the client rings when there is room.
    pub(crate) fn bell(&self) -> &Bell {
        self.bells.bell()
    }

    /// Whether replies wait for room.
    #[inline(always)]
    pub(crate) fn is_clogged(&self) -> bool {
        self.is_clogged.load(Ordering::Acquire) || self.has_later.load(Ordering::Acquire)
    }

    /// The client has gone: what waits is nobody's.
    fn leave(&self) {
        self.is_gone.store(true, Ordering::Release);
        // Who has the lock finds out.
        if let Ok(Some(mut out)) = self.try_lock() {
            let _ = self.clear(&mut out);
        }
        self.turn.notify_all();
    }

    /// Nothing waits any more. True: something did.
    fn clear(&self, out: &mut Out) -> bool {
        let _ = self.take_later();
        out.outbox.clear();
        self.is_clogged.swap(false, Ordering::AcqRel)
    }

    fn lock(&self) -> Result<MutexGuard<'_, Out>> {
        match self.try_lock()? {
            Some(out) => Ok(out),
            // Whoever has it may have room reserved as well, and wait for this thread's.
            None if has_room() => {
                Err(Error::Refused("this thread has room reserved for another reply: send that first".to_owned()))
            }
            None => Ok(locked(&self.out)),
        }
    }

    /// The lock, if nobody has it. In a forked child a thread that it does not have may.
    #[inline(always)]
    fn try_lock(&self) -> Result<Option<MutexGuard<'_, Out>>> {
        if self.owner.is_forked() {
            return Err(Error::Forked);
        }
        match self.out.try_lock() {
            Ok(out) => Ok(Some(out)),
            // A panic there, while room was being written, was in nothing that could be left half done.
            Err(TryLockError::Poisoned(out)) => Ok(Some(out.into_inner())),
            Err(TryLockError::WouldBlock) => Ok(None),
        }
    }

    /// Takes a call in; false if that place is taken.
    fn begin(&self, id: u64) -> bool {
        let place = &self.calls[slot_of(id) as usize];
        // The client learnt by a reply that the place is free, and that reply came after the store.
        if place.load(Ordering::Acquire) != 0 {
            return false;
        }
        place.store(u64::from(generation_of(id)) << 32 | TAKEN, Ordering::Release);
        true
    }

    fn cancel(&self, id: u64) {
        let place = &self.calls[slot_of(id) as usize];
        let taken = u64::from(generation_of(id)) << 32 | TAKEN;
        // Otherwise it has been answered meanwhile.
        let _ = place.compare_exchange(taken, taken | CANCELLED, Ordering::AcqRel, Ordering::Relaxed);
    }

    fn is_cancelled(&self, id: u64) -> bool {
        self.is_gone.load(Ordering::Acquire)
            || self.calls[slot_of(id) as usize].load(Ordering::Acquire) & CANCELLED != 0
    }

    /// Writes the last of a call, or has it wait for room. Never waits.
    #[inline]
    fn send_last(self: &Arc<Caller>, header: Header, payload: &[u8]) -> Result<()> {
        let mut out = match self.try_lock()? {
            Some(out) => out,
            None if has_room() => {
                self.leave_to_the_loop(header, payload);
                return Ok(());
            }
            None => self.lock()?,
        };
        self.calls[slot_of(header.id) as usize].store(0, Ordering::Release);
        self.check_gone()?;
        if out.outbox.is_whole(payload.len())
            && out.outbox.try_write(header, payload).map_err(|error| self.went(error))?
        {
            self.pass_on(&mut out);
            return Ok(());
        }
        out.outbox.push(header, payload);
        self.flush(&mut out)
    }

    /// A last answer that is not to wait for the lock.
    #[cold]
    fn leave_to_the_loop(self: &Arc<Caller>, header: Header, payload: &[u8]) {
        self.calls[slot_of(header.id) as usize].store(0, Ordering::Release);
        let mut later = locked(&self.later);
        later.push((header, payload.to_vec()));
        self.has_later.store(true, Ordering::Release);
        drop(later);
        self.desk.look_at(self);
    }

    fn take_later(&self) -> Vec<(Header, Vec<u8>)> {
        if !self.has_later.load(Ordering::Acquire) {
            return Vec::new();
        }
        let mut later = locked(&self.later);
        self.has_later.store(false, Ordering::Release);
        std::mem::take(&mut later)
    }

    #[cold]
    fn went(&self, error: Error) -> Error {
        self.desk.dropped.fetch_add(1, Ordering::Relaxed);
        error
    }

    fn check_gone(&self) -> Result<()> {
        match self.is_gone.load(Ordering::Acquire) {
            true => Err(self.went(Error::PeerDied { unreleased: 0 })),
            false => Ok(()),
        }
    }

    /// Writes what there is room for; notes whether anything is left.
    fn flush(self: &Arc<Caller>, out: &mut Out) -> Result<()> {
        for (header, payload) in self.take_later() {
            out.outbox.push(header, &payload);
        }
        let flushed = out.outbox.flush();
        self.pass_on(out);
        if !matches!(flushed, Ok(false)) || self.is_gone.load(Ordering::Acquire) {
            if self.clear(out) {
                // Its requests may be taken again.
                self.desk.stir();
            }
            return flushed.map(|_| ());
        }
        if !self.is_clogged.swap(true, Ordering::AcqRel) {
            self.desk.look_at(self);
        }
        Ok(())
    }

    /// To write is to be awake: who waits for room has to ask for it again. Both the service's loop and who polls hear the bell.
    #[inline(always)]
    fn pass_on(&self, out: &mut Out) {
        if out.is_awaited && !out.outbox.sender.is_armed() {
            out.is_awaited = false;
            self.bell().ring();
        }
    }

    /// Writes a part of a reply, waiting for room for as long as `patience` says.
    fn send_part(self: &Arc<Caller>, header: Header, payload: &[u8], patience: Patience) -> Result<Sent> {
        let mut out = self.lock()?;
        loop {
            self.check_gone()?;
            self.flush(&mut out)?;
            if !out.outbox.is_whole(payload.len()) && out.outbox.is_empty() {
                out.outbox.push(header, payload);
                self.flush(&mut out)?;
                return Ok(Sent::Sent);
            }
            if out.outbox.try_write(header, payload).map_err(|error| self.went(error))? {
                self.pass_on(&mut out);
                return Ok(Sent::Sent);
            }
            let Some(deadline) = patience.deadline() else { return Ok(Sent::Full) };
            let now = Instant::now();
            if deadline.is_some_and(|deadline| now >= deadline) {
                return Ok(Sent::TimedOut);
            }
            out = match out.is_polled {
                true => self.wait_for_turn(out, deadline.map(|deadline| deadline - now)),
                false => self.wait_for_room(out, payload.len(), deadline)?,
            };
        }
    }

    fn wait_for_turn<'a>(&'a self, out: MutexGuard<'a, Out>, left: Option<Duration>) -> MutexGuard<'a, Out> {
        match left {
            None => self.turn.wait(out).unwrap_or_else(PoisonError::into_inner),
            Some(left) => self.turn.wait_timeout(out, left).unwrap_or_else(PoisonError::into_inner).0,
        }
    }

    /// Polls without the lock: the others answer meanwhile. Comes back when there may be room.
    fn wait_for_room<'a>(
        &'a self,
        mut out: MutexGuard<'a, Out>,
        bytes: usize,
        deadline: Option<Instant>,
    ) -> Result<MutexGuard<'a, Out>> {
        self.bells.drain();
        let bytes = if out.outbox.is_empty() { bytes } else { out.outbox.wanted() };
        if !out.outbox.sender.arm_for_room(bytes).map_err(|error| self.went(error))? {
            return Ok(out);
        }
        (out.is_polled, out.is_awaited) = (true, true);
        let nap = out.outbox.sender.must_nap().then(|| Instant::now() + Duration::from_millis(1));
        drop(out);
        let until = deadline.into_iter().chain(nap).min();
        let (socket, process) = self.life.as_ref().map_or((None, None), |(socket, process)| {
            (Some(socket.as_fd()), process.as_ref().map(|process| process.as_fd()))
        });
        let ready = poll_until(&[self.bell().as_fd(), self.desk.mute.as_fd()], [socket, process], until);
        let mut out = self.lock()?;
        (out.is_polled, out.is_awaited) = (false, false);
        out.outbox.sender.disarm();
        self.turn.notify_all();
        if self.is_clogged() {
            // The service has left it to this thread to hear the bell.
            self.desk.stir();
        }
        if ready.map_err(Error::system("waiting for a client"))? == Ready::Gone {
            self.is_gone.store(true, Ordering::Release);
        }
        Ok(out)
    }

    /// For the service's loop: writes what there is room for. False: it is not clogged any more.
    fn tend(self: &Arc<Caller>) -> bool {
        if !self.is_clogged() {
            return false;
        }
        // Who has the lock is writing.
        let Ok(Some(mut out)) = self.try_lock() else { return true };
        out.is_awaited &= out.is_polled;
        // An error is of the client's end, which its lane tells.
        let _ = self.flush(&mut out);
        self.is_clogged()
    }

    /// For the service's loop, before it sleeps: has the client ring when there is room. False: there is some.
    fn arm(&self) -> bool {
        let Some(mut out) = self.lock_clogged() else { return false };
        if self.has_later.load(Ordering::Acquire) {
            return false;
        }
        if out.is_polled {
            return true;
        }
        self.bells.bell().drain();
        let bytes = out.outbox.wanted();
        // As above.
        out.is_awaited = out.outbox.sender.arm_for_room(bytes).unwrap_or(true);
        out.is_awaited
    }

    /// The lock, which nobody has for long while replies wait: room is reserved only when none do.
    fn lock_clogged(&self) -> Option<MutexGuard<'_, Out>> {
        if self.is_clogged() { self.lock().ok() } else { None }
    }

    fn disarm(&self) {
        if let Some(mut out) = self.lock_clogged()
            && !out.is_polled
        {
            out.is_awaited = false;
            out.outbox.sender.disarm();
        }
    }

    fn must_nap(&self) -> bool {
        self.lock_clogged().is_some_and(|out| out.outbox.sender.must_nap())
    }
}

thread_local! {
    /// The caller for a reply to which this thread has room reserved, and so its lock.
    static ROOM_OF: std::cell::Cell<Option<usize>> = const { std::cell::Cell::new(None) };
}

fn has_room() -> bool {
    ROOM_OF.with(|of| of.get()).is_some()
}

/// What a look came upon, of the current lane.
#[derive(Debug)]
enum Found {
    InPlace(Record, Header, Arc<Caller>),
    Apart(Vec<u8>, Header, Arc<Caller>),
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
    /// service looks for requests, and none of them keeps it waiting.
    ///
    /// # Errors
    /// As [`Listener::bind`].
    pub fn listen(name: &str) -> Result<Service> {
        Options::new().listen_service(name)
    }

    pub(crate) fn with(name: &str, options: &Options) -> Result<Service> {
        let listener = Listener::with_options(name, options)?;
        let make = |bells: &Bells| Desk::new(options, bells).map(|desk| Some(Arc::new(desk)));
        let requests = gather::gather_with(options, Some(listener), make)?;
        let desk = requests.desk().expect("it was just made with one");
        Ok(Service { requests, desk, clogged: Vec::new(), found: None, corrupt: 0 })
    }

    /// The next request, in place. Waits as the [`crate::Wait`] of the options says, for ever if need be; clients come and go
    /// meanwhile.
    ///
    /// # Errors
    /// [`Error::Closed`] once [`Stopper::stop`] was called; [`Error::Forked`]; [`Error::System`], for instance when descriptors
    /// run out, after which it can be tried again.
    #[inline]
    pub fn receive(&mut self) -> Result<Request<'_>> {
        let found = self.find(Patience::Endless)?.expect("without a deadline it does not pass");
        Ok(self.request(found))
    }

    /// As [`Service::receive`], if there is one now; `None` otherwise. Never waits.
    ///
    /// # Errors
    /// As [`Service::receive`].
    #[inline]
    pub fn try_receive(&mut self) -> Result<Option<Request<'_>>> {
        Ok(self.find(Patience::None)?.map(|found| self.request(found)))
    }

    /// As [`Service::receive`], until `deadline` on the monotonic clock; `None` when it passes.
    ///
    /// # Errors
    /// As [`Service::receive`].
    pub fn receive_until(&mut self, deadline: Instant) -> Result<Option<Request<'_>>> {
        Ok(self.find(Patience::Until(deadline))?.map(|found| self.request(found)))
    }

    /// Answers requests on `threads` threads, each by `handler`, until [`Stopper::stop`] is called; then waits for the handlers
    /// that are at work. The threads take turns at waiting for the next request, so one of them needs no other to hand it on.
    /// The handler gets a copy of the request, which no client can change. One that panics has its call abandoned, and the
    /// thread goes on. One that waits in [`Responder::part`] for a client that does not read keeps its thread, and this from
    /// returning: [`Responder::part_until`] does not.
    ///
    /// # Errors
    /// As [`Service::receive`], but for [`Error::Closed`], which is how this ends. After an error it can be called again.
    pub fn run(&mut self, threads: usize, handler: impl Fn(Request<'_>) + Sync) -> Result<()> {
        let service = Mutex::new((self, false));
        let work = || {
            let mut buffer = Vec::new();
            loop {
                let mut turn = locked(&service);
                let (service, is_over) = &mut *turn;
                if *is_over {
                    return Ok(());
                }
                let responder = match service.receive() {
                    Ok(request) => request.copy_out(&mut buffer),
                    Err(error) => {
                        *is_over = true;
                        return if error.is_closed() { Ok(()) } else { Err(error) };
                    }
                };
                drop(turn);
                let request = Request { body: Body::Lent(&buffer), responder };
                // The responder says that it was abandoned; what else the handler has is its own affair, as in any thread that panics.
                let _ = catch_unwind(AssertUnwindSafe(|| handler(request)));
            }
        };
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
            let own = work();
            let join =
                |thread: std::thread::ScopedJoinHandle<'_, Result<()>>| thread.join().expect("panics are caught");
            others.into_iter().map(join).fold(own, |done, other| done.and(other))
        })
    }

    /// What ends this service's waits from another thread, or from a handler.
    pub fn stopper(&self) -> Stopper {
        Stopper { desk: self.desk.clone() }
    }

    /// For an event loop: asks that the descriptor become readable when a request comes. True: there is none now, go back to the
    /// loop. False: there is one, take it. Does not wait. The loop is woken now and then for clients that come, go, or read
    /// their replies.
    ///
    /// # Errors
    /// As [`Service::receive`].
    pub fn arm(&mut self) -> Result<bool> {
        // Nothing is to be found before: to arm may give another lane the turn.
        self.tend()?;
        let mut armed = self.requests.arm()?;
        for caller in &self.clogged {
            armed &= caller.arm();
        }
        armed &= !self.desk.is_stirred.load(Ordering::Acquire);
        if !armed || self.clogged.iter().any(|caller| caller.must_nap()) {
            self.desk.nudge.ring();
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
        self.desk.dropped.load(Ordering::Relaxed)
    }

    #[inline]
    fn find(&mut self, patience: Patience) -> Result<Option<Found>> {
        if let Some(found) = self.look_for()? {
            return Ok(Some(found));
        }
        let Some(deadline) = patience.deadline() else { return Ok(None) };
        if self.requests.record_comes_soon()
            && let Some(found) = self.look_for()?
        {
            return Ok(Some(found));
        }
        self.wait_for(deadline)
    }

    #[cold]
    fn wait_for(&mut self, deadline: Option<Instant>) -> Result<Option<Found>> {
        while wait::wait(self, deadline)? {
            if let Some(found) = self.look_for()? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    #[inline]
    fn request(&mut self, found: Found) -> Request<'_> {
        let (body, header, caller) = match found {
            Found::InPlace(record, header, caller) => (Body::InPlace(self.requests.message(record)), header, caller),
            Found::Apart(bytes, header, caller) => (Body::Apart(bytes), header, caller),
        };
        let is_answered = header.kind == Kind::Notify;
        Request { body, responder: Responder { caller, id: header.id, deadline: header.deadline, is_answered } }
    }

    /// The next request, if there is one now.
    #[inline(always)]
    fn look_for(&mut self) -> Result<Option<Found>> {
        if self.found.is_some() {
            return Ok(self.found.take());
        }
        for _ in 0..LOOKS {
            if !self.clogged.is_empty() || self.desk.is_stirred.load(Ordering::Relaxed) {
                self.tend()?;
            }
            let Some(record) = self.requests.next_record()? else { return Ok(None) };
            let read = match self.requests.header(&record) {
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
    #[inline(always)]
    fn sort(&mut self, record: &Record, header: Header) -> std::result::Result<Option<Found>, &'static str> {
        if record.bytes - HEADER_BYTES as u64 > self.desk.options.call_bytes_max {
            return Err("size");
        }
        let is_gone = self.requests.is_sender_gone();
        let Some(back) = self.requests.back() else { return Err("lane") };
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
        Ok(Some(Found::InPlace(*record, header, back.caller.clone())))
    }

    #[cold]
    fn assemble(
        &mut self,
        record: &Record,
        header: Header,
        is_gone: bool,
    ) -> std::result::Result<Option<Found>, &'static str> {
        let most = self.desk.options.call_bytes_max;
        let Some(back) = self.requests.back() else { return Err("lane") };
        Assembly::check(&back.assembly, &header)?;
        let caller = back.caller.clone();
        let mut assembly = back.assembly.take().unwrap_or_else(|| Assembly { header, bytes: Vec::new() });
        if assembly.bytes.len() as u64 + record.bytes - HEADER_BYTES as u64 > most {
            return Err("size");
        }
        self.requests.append(record, HEADER_BYTES, &mut assembly.bytes);
        if header.more
            && let Some(back) = self.requests.back()
        {
            back.assembly = Some(assembly);
            self.requests.release_record(record);
            return Ok(None);
        }
        self.requests.release_record(record);
        let is_wanted = !is_gone || header.kind != Kind::Request;
        Ok(is_wanted.then(|| Found::Apart(assembly.bytes, assembly.header, caller)))
    }

    /// Looks after clients that do not read their replies, and whether to stop.
    #[cold]
    fn tend(&mut self) -> Result<()> {
        if self.requests.is_forked_here() {
            return Err(Error::Forked);
        }
        if self.desk.is_stirred.swap(false, Ordering::Acquire) {
            let mut arrived = locked(&self.desk.arrived);
            // One that was clogged, was not, and is again may be here already.
            for new in arrived.iter_mut().flat_map(|arrived| arrived.drain(..)) {
                if !self.clogged.iter().any(|old| Arc::ptr_eq(old, &new)) {
                    self.clogged.push(new);
                }
            }
        }
        self.clogged.retain(|caller| caller.tend());
        match self.desk.is_stopped.load(Ordering::Acquire) {
            true => {
                // To be seen again by the next call.
                self.desk.is_stirred.store(true, Ordering::Release);
                Err(Error::Closed { unreleased: 0 })
            }
            false => Ok(()),
        }
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
    fn look(&mut self) -> Result<bool> {
        if self.found.is_none() {
            self.found = self.look_for()?;
        }
        Ok(self.found.is_some())
    }

    fn stirs(&self) -> bool {
        self.requests.has_messages() || self.desk.is_stirred.load(Ordering::Relaxed)
    }

    fn arm(&mut self) -> Result<bool> {
        if !Side::arm(&mut self.requests)? {
            return Ok(false);
        }
        let armed = self.clogged.iter().fold(true, |armed, caller| armed & caller.arm());
        // Who stirs from now on rings.
        let armed = armed && !self.desk.is_stirred.load(Ordering::Acquire);
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

    fn must_nap(&self) -> bool {
        Side::must_nap(&self.requests) || self.clogged.iter().any(|caller| caller.must_nap())
    }

    fn sleep(&mut self, deadline: Option<Instant>) -> Result<Ready> {
        Side::sleep(&mut self.requests, deadline)
    }

    fn rung(&mut self) -> Result<bool> {
        Side::rung(&mut self.requests)
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
    /// told before the service is dropped. Does not wait.
    pub fn stop(&self) {
        self.desk.is_stopped.store(true, Ordering::Release);
        self.desk.stir();
    }
}

/// What a client asks, or tells.
///
/// Its bytes are in memory that the client wrote, unless they came in pieces or [`Service::run`] copied them: reading them in
/// place trusts the client not to write after it has asked. [`Request::copy_out`] is safe against any client.
#[derive(Debug)]
pub struct Request<'a> {
    body: Body<'a>,
    pub(super) responder: Responder,
}

impl Request<'_> {
    /// Answers, and is done. Does not wait: what the client has no room for is kept until it has.
    ///
    /// # Errors
    /// As [`Responder::reply`].
    #[inline]
    pub fn reply(self, reply: &[u8]) -> Result<()> {
        self.responder.reply(reply)
    }

    /// Fails the call with a code and bytes of the service's own meaning. Does not wait.
    ///
    /// # Errors
    /// As [`Responder::reply`].
    pub fn fail(self, code: u32, bytes: &[u8]) -> Result<()> {
        self.responder.fail(code, bytes)
    }

    /// What answers it, apart from its bytes, which are given back: to answer later, or on another thread.
    pub fn into_responder(self) -> Responder {
        self.responder
    }

    /// Copies the bytes into `buffer`, whose contents they replace, and gives them back; what remains is to answer.
    pub fn copy_out(self, buffer: &mut Vec<u8>) -> Responder {
        self.body.copy_into(buffer);
        self.responder
    }

    /// Its bytes, on their own, and what answers it.
    pub fn into_parts(self) -> (Vec<u8>, Responder) {
        (self.body.into_vec(), self.responder)
    }

    /// Its bytes and what answers it, side by side: to write an answer in place while the request is read.
    pub fn split(&mut self) -> (&[u8], &mut Responder) {
        (self.body.bytes(), &mut self.responder)
    }

    /// Whether the client does not await an answer: there is nothing to reply to then.
    pub fn is_notification(&self) -> bool {
        self.responder.id == 0
    }

    /// As [`Responder::peer`].
    pub fn peer(&self) -> Option<Peer> {
        self.responder.peer()
    }

    /// As [`Responder::deadline`].
    pub fn deadline(&self) -> Option<Instant> {
        self.responder.deadline()
    }

    /// As [`Responder::is_cancelled`].
    pub fn is_cancelled(&self) -> bool {
        self.responder.is_cancelled()
    }
}

impl std::ops::Deref for Request<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.body.bytes()
    }
}

/// Answers one request, on any thread. Dropped without an answer it tells the client that the call was abandoned.
#[derive(Debug)]
pub struct Responder {
    pub(super) caller: Arc<Caller>,
    pub(super) id: u64,
    deadline: u64,
    is_answered: bool,
}

impl Responder {
    /// Answers; after parts, this is the last of them. Does not wait: what the client has no room for is kept until it has.
    ///
    /// # Errors
    /// [`Error::PeerDied`] and [`Error::Closed`] when the client has gone: the reply is dropped. [`Error::TooLarge`] for more
    /// than the client takes ([`Options::call_bytes_max`] there); the call is abandoned. [`Error::Refused`] for a notification;
    /// [`Error::Corrupt`], [`Error::Forked`].
    #[inline]
    pub fn reply(mut self, reply: &[u8]) -> Result<()> {
        self.last(Header::new(Kind::Reply, self.id), reply)
    }

    /// Fails the call with a code and bytes of the service's own meaning. Does not wait.
    ///
    /// # Errors
    /// As [`Responder::reply`].
    pub fn fail(mut self, code: u32, bytes: &[u8]) -> Result<()> {
        self.last(Header { code, ..Header::new(Kind::Failed, self.id) }, bytes)
    }

    /// Ends a reply that was given in parts, or has none. Does not wait.
    ///
    /// # Errors
    /// As [`Responder::reply`].
    pub fn end(mut self) -> Result<()> {
        self.last(Header::new(Kind::End, self.id), &[])
    }

    /// Gives a part of the reply. Waits until the client has room for it, on a thread of its own, please: as long as this
    /// waits in the loop that takes requests, no client's are taken.
    ///
    /// # Errors
    /// As [`Responder::reply`]; the call goes on after [`Error::TooLarge`].
    pub fn part(&mut self, part: &[u8]) -> Result<()> {
        self.send_part(part, Patience::Endless).map(|_| ())
    }

    /// As [`Responder::part`], if there is room now: [`Sent::Full`] otherwise. Never waits.
    ///
    /// # Errors
    /// As [`Responder::part`].
    pub fn try_part(&mut self, part: &[u8]) -> Result<Sent> {
        self.send_part(part, Patience::None)
    }

    /// As [`Responder::part`], until `deadline`: [`Sent::TimedOut`] when it passes.
    ///
    /// # Errors
    /// As [`Responder::part`].
    pub fn part_until(&mut self, part: &[u8], deadline: Instant) -> Result<Sent> {
        self.send_part(part, Patience::Until(deadline))
    }

    /// Reserves room for a reply, or a part of it, of `bytes`, to be written in place; `None` when there is none now: reply with
    /// a copy then. Write it at once: meanwhile no other reply to this client is written, and one from this very thread is
    /// refused. Never waits for the client.
    ///
    /// # Errors
    /// As [`Responder::reply`]; [`Error::TooLarge`] also for more than the lane's largest message less 24 bytes.
    pub fn try_reserve(&mut self, bytes: usize) -> Result<Option<ReplyRoom<'_>>> {
        self.check(bytes)?;
        let caller = &self.caller;
        if ROOM_OF.with(|of| of.get()).is_some() {
            return Err(Error::Refused("this thread has room reserved for another reply: send that first".to_owned()));
        }
        let mut out = caller.lock()?;
        caller.flush(&mut out)?;
        if !out.outbox.is_empty() {
            return Ok(None);
        }
        let Some(space) = out.outbox.sender.try_room(bytes).map_err(|error| caller.went(error))? else {
            return Ok(None);
        };
        ROOM_OF.with(|of| of.set(Some(Arc::as_ptr(caller) as usize)));
        let held = Held { caller, out };
        Ok(Some(ReplyRoom { held, space, id: self.id, is_answered: &mut self.is_answered }))
    }

    /// Who asked.
    pub fn peer(&self) -> Option<Peer> {
        self.caller.peer
    }

    /// When the client will not await the answer any more, if it has said so. What it says is for the service to weigh: nothing is
    /// dropped because of it.
    pub fn deadline(&self) -> Option<Instant> {
        self.caller.desk.clock.instant_of(self.deadline)
    }

    /// Whether nobody awaits the answer any more: the client has cancelled the call, or is gone. The service learns of it as
    /// it looks for requests, so on another thread, or between two. Answer all the same, in whatever way is cheapest: the client
    /// makes no other use of the call's place before.
    pub fn is_cancelled(&self) -> bool {
        self.id != 0 && self.caller.is_cancelled(self.id)
    }

    #[inline(always)]
    fn check(&self, bytes: usize) -> Result<()> {
        if self.id == 0 {
            return Err(Error::Refused("a notification is not answered".to_owned()));
        }
        if self.is_answered {
            return Err(Error::Refused("the call has been answered".to_owned()));
        }
        check_size(bytes, self.caller.bytes_max)
    }

    #[inline(always)]
    fn last(&mut self, header: Header, payload: &[u8]) -> Result<()> {
        self.check(payload.len())?;
        let sent = self.caller.send_last(header, payload);
        // Also to who has gone.
        self.is_answered = true;
        sent
    }

    fn send_part(&mut self, part: &[u8], patience: Patience) -> Result<Sent> {
        self.check(part.len())?;
        self.caller.send_part(Header::new(Kind::Part, self.id), part, patience)
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        if !self.is_answered {
            // Who has gone is not told.
            let _ = self.caller.send_last(Header::new(Kind::Abandoned, self.id), &[]);
        }
    }
}

/// The lock, and that this thread has it.
#[derive(Debug)]
struct Held<'a> {
    caller: &'a Arc<Caller>,
    out: MutexGuard<'a, Out>,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if self.caller.has_later.load(Ordering::Acquire) {
            // An error is of the client's end, which its lane tells.
            let _ = self.caller.flush(&mut self.out);
        }
        // Also when nothing was written: to reserve was to be awake.
        self.caller.pass_on(&mut self.out);
        ROOM_OF.with(|of| of.set(None));
    }
}

/// Room for a reply, to be written in place; see [`Responder::try_reserve`]. Dropping it gives the room back, and nothing is seen
/// of it. It stays on its thread.
#[derive(Debug)]
pub struct ReplyRoom<'a> {
    held: Held<'a>,
    space: Space,
    id: u64,
    is_answered: &'a mut bool,
}

impl ReplyRoom<'_> {
    /// Replies with the first `bytes` of the room, which is the last of the call. Does not wait.
    ///
    /// # Errors
    /// [`Error::TooLarge`] when `bytes` is more than was reserved, [`Error::Forked`]; nothing is sent then.
    pub fn reply(mut self, bytes: usize) -> Result<()> {
        self.publish(Kind::Reply, bytes)?;
        *self.is_answered = true;
        Ok(())
    }

    /// Gives the first `bytes` of the room as a part of the reply. Does not wait.
    ///
    /// # Errors
    /// As [`ReplyRoom::reply`].
    pub fn part(mut self, bytes: usize) -> Result<()> {
        self.publish(Kind::Part, bytes)
    }

    fn publish(&mut self, kind: Kind, bytes: usize) -> Result<()> {
        let sender = &mut self.held.out.outbox.sender;
        if bytes > self.space.bytes as usize - HEADER_BYTES {
            let bytes_max = self.space.bytes - HEADER_BYTES as u64;
            return Err(Error::TooLarge { bytes: bytes as u64, bytes_max });
        }
        if kind.is_final() {
            // Before the reply, which lets the client use the place again.
            self.held.caller.calls[slot_of(self.id) as usize].store(0, Ordering::Release);
        }
        sender.publish_room(self.space, Header::new(kind, self.id).words(), bytes)
    }
}

impl std::ops::Deref for ReplyRoom<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.held.out.outbox.sender.room_read(self.space)
    }
}

impl std::ops::DerefMut for ReplyRoom<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.held.out.outbox.sender.room(self.space)
    }
}
