//! The asking side of a link.

use super::crowd::{Crowd, Link};
use super::frame::{Clock, Header, Kind};
use crate::body::Body;
use crate::calls::{CallId, Calls, Loss, Outcome, State};
use crate::outbox::FrameSender as _;
use pelton_channel::Deadline;
use pelton_channel::Options;
use pelton_channel::raw::Doorbells;
use pelton_channel::raw::Name;
use pelton_channel::raw::{Side, Spin};
use pelton_channel::raw::{connect_duplex, linger, wait};
use pelton_channel::{Error, Result};
use pelton_lane::{Record, ReservedSpace};
use pelton_os::Owner;
use pelton_os::Peer;
use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

mod asking;
mod awaiting;
mod hearing;

use asking::Written;
use awaiting::Awaiting;

/// Asks a [`crate::Service`] and awaits its answers. `Send`, not `Sync`: one thread at a time.
///
/// [`Client::call`] does both. [`Client::submit`] asks without awaiting, and [`Client::completion`] is the next answer to any
/// of up to 1,024 calls in flight, in whatever order they come. An answer is read in place, and is had when the [`Completion`]
/// is dropped.
///
/// By `unix:PATH` it has one service. When that ends, every call in flight has failed: what it had answered is still received, and
/// then each method says [`Error::PeerDied`], or [`Error::Closed`] if it ended on purpose. Connect anew then.
///
/// Under a short name several processes may listen, each a service: the client asks the least busy, the one with the fewest of
/// this client's calls in flight, or by turns; it has at most 64. It finds those that come later when one it knows goes, in the course of
/// some hundred submissions, and when there is no room, or it waits for some; in an event loop when it tries again. The calls of one that dies are [`Outcome::Lost`], unless [`Client::mark_idempotent`] allows them to be
/// submitted to another; those that a draining one had not begun ([`crate::Stopper::drain`]) are submitted to another by
/// themselves. The client goes on as long as it is used. A copy of each request is kept for that until its answer has come.
///
/// Dropping it closes: the service drops what this client has asked and nobody awaits any more.
///
/// ```
/// # fn main() -> pelton::Result<()> {
/// let name = format!("unix:{}/client-doc-{}", std::env::temp_dir().display(), std::process::id());
/// let mut service = pelton::Service::listen(&name)?;
/// let stopper = service.stopper();
/// // Usually another process:
/// let serving = std::thread::spawn(move || {
///     service.run(1, |request| {
///         let answer = request.to_ascii_uppercase();
///         let _ = request.reply(&answer);
///     })
/// });
///
/// let mut client = pelton::Client::connect(&name)?;
/// assert_eq!(&*client.call(b"hello")?, b"HELLO");
///
/// let (one, two) = (client.submit(b"one")?, client.submit(b"two")?);
/// for _ in 0..2 {
///     let answer = client.completion()?;
///     assert_eq!(&*answer, if answer.call() == one { b"ONE" } else { assert_eq!(answer.call(), two); b"TWO" });
/// }
/// stopper.stop();
/// # serving.join().unwrap()
/// # }
/// ```
#[derive(Debug)]
pub struct Client {
    /// Of a name of many services any number, else one.
    pub(super) links: Vec<Link>,
    /// Of a name of many services.
    crowd: Option<Crowd>,
    calls: Calls,
    /// Calls that are submitted by no link, and are to be.
    homeless: VecDeque<CallId>,
    /// Answers to other calls than the one that was awaited when they came.
    aside: VecDeque<Answer>,
    /// What they come to in memory, and parts alone; and how many are last ones.
    aside_bytes: u64,
    part_bytes: u64,
    aside_last: usize,
    /// Found by a wait, for who waited.
    found: Option<Found>,
    /// The link to look at first, so that none is heard more than others.
    turn: usize,
    /// The link to think of first for the next request.
    next_open: usize,
    /// Bytes of a message for which there was no room, for [`Client::arm`].
    wanted: Option<usize>,
    pub(super) owner: Owner,
    doorbells: Doorbells,
    spin: Spin,
    reply_bytes_max: u64,
    clock: Clock,
    hold: Duration,
    late: u64,
    /// Of the one service.
    fate: Option<Fate>,
}

/// An answer to a call. Dropping it gives its space back; the client can do nothing else meanwhile.
///
/// Its bytes are in memory that the service wrote, unless they came in pieces or while something else was awaited: reading
/// them in place trusts the service not to write after it has answered. [`Completion::copy_into`] is safe against any service.
#[derive(Debug)]
pub struct Completion<'a> {
    pub(super) call: CallId,
    pub(super) outcome: Outcome,
    pub(super) body: Body<'a>,
    /// By which link it came, if it is in place.
    pub(super) at: usize,
}

impl Completion<'_> {
    /// Which call it is of.
    pub fn call(&self) -> CallId {
        self.call
    }

    /// What came of it.
    pub fn outcome(&self) -> Outcome {
        self.outcome
    }

    /// Copies the bytes into `buffer`, whose contents they replace.
    #[inline]
    pub fn copy_into(&self, buffer: &mut Vec<u8>) {
        self.body.copy_into(buffer);
    }

    /// The bytes, on their own.
    pub fn into_vec(self) -> Vec<u8> {
        self.body.into_vec()
    }
}

impl std::ops::Deref for Completion<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.body.bytes()
    }
}

/// An answer in this side's own memory.
#[derive(Debug)]
struct Answer {
    call: CallId,
    outcome: Outcome,
    bytes: Vec<u8>,
}

impl Answer {
    /// What it costs, also when it has no bytes.
    fn cost(&self) -> u64 {
        (self.bytes.len() + size_of::<Answer>()) as u64
    }
}

/// How the link ended, once the lane of replies has told it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// With so many requests not taken.
    Closed(u64),
    Died(u64),
    /// The service broke the rules.
    Broken,
}

/// What a look came upon.
#[derive(Debug)]
enum Found {
    /// In the lane of replies of the link at that place, the next there.
    InPlace(Record, CallId, Outcome, usize),
    Apart(Answer),
    /// Room was wanted, and perhaps there is.
    Room,
}

impl Found {
    fn call(&self) -> Option<CallId> {
        match self {
            Found::InPlace(_, call, ..) | Found::Apart(Answer { call, .. }) => Some(*call),
            Found::Room => None,
        }
    }
}

/// What is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Want {
    Any,
    Of(CallId),
    /// Room for a request of so many bytes, and a place among the calls if it `is_call`.
    Room {
        bytes: usize,
        is_call: bool,
    },
    /// That all messages are in the lane of the link of that number.
    Written(u32),
}

impl Client {
    /// Connects to the service that listens under `name` (a short name, or `unix:PATH`) with default [`Options`]. Fails at once
    /// when nobody does; waits some seconds at most for one that listens to accept. Of a short name it begins with any one, and comes to
    /// another when that one does not answer; it fails when none does. To the others it connects in the course of being used.
    ///
    /// # Errors
    /// As [`Options::connect_sender`].
    pub fn connect(name: &str) -> Result<Client> {
        Client::connect_with(name, &Options::new())
    }

    /// Connects to the service that listens under `name`, a short name or `unix:PATH`, as [`Client::connect`] does.
    ///
    /// # Errors
    /// As [`Options::connect_sender`].
    pub fn connect_with(name: &str, options: &Options) -> Result<Client> {
        Client::with(name, &options.of_link()?)
    }

    fn with(name: &str, options: &Options) -> Result<Client> {
        options.checked_sizes()?;
        let (name, doorbells) = (Name::parse(name)?, Doorbells::new()?);
        let (mut links, mut crowd) = (Vec::new(), None);
        match name.is_of_many() {
            true => crowd = Some(Crowd::new(name, options)),
            false => {
                let duplex = connect_duplex(&name, options, &doorbells)?;
                links.push(Link::new(duplex, PathBuf::new(), 1));
            }
        }
        let mut client = Client {
            spin: Spin::new(options.wait, links.first().and_then(Link::peer)),
            crowd,
            links,
            calls: Calls::default(),
            homeless: VecDeque::new(),
            aside: VecDeque::new(),
            aside_bytes: 0,
            part_bytes: 0,
            aside_last: 0,
            found: None,
            turn: 0,
            next_open: 1,
            wanted: None,
            owner: Owner::current().map_err(Error::system("looking whose handle this is"))?,
            doorbells,
            reply_bytes_max: options.call_bytes_max,
            clock: Clock::new(),
            hold: options.hold,
            late: 0,
            fate: None,
        };
        if client.crowd.is_some() {
            client.find_first(options.connect_deadline)?;
        }
        Ok(client)
    }

    /// Asks and awaits the answer: its [`Outcome`] says whether it is a reply, the first part of one (then
    /// [`Client::completion_of`] brings the others), or a failure. Answers to other calls that come meanwhile are kept for
    /// later.
    ///
    /// # Errors
    /// As [`Client::submit`] and [`Client::completion_of`]. The call is over then, or cancelled.
    #[inline(always)]
    pub fn call(&mut self, request: &[u8]) -> Result<Completion<'_>> {
        let call = self.submit(request)?;
        match self.plain_reply_soon(Some(call)) {
            Some(plain) => Ok(self.replied(plain)),
            None => self.call_slowly(call),
        }
    }

    #[cold]
    #[inline(never)]
    fn call_slowly(&mut self, call: CallId) -> Result<Completion<'_>> {
        match self.find_of(call, Deadline::Never) {
            Ok(found) => Ok(self.completed(found.expect("without a deadline it does not pass"))),
            Err(error) => Err(self.gave_up(call, error)),
        }
    }

    /// As [`Client::call`], until `deadline` on the monotonic clock, of which the service is told too; `None` when it passes: the
    /// call is cancelled then.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn call_until(&mut self, request: &[u8], deadline: Instant) -> Result<Option<Completion<'_>>> {
        let Some(call) = self.submit_until(request, deadline)? else { return Ok(None) };
        match self.find_of(call, Deadline::At(deadline)) {
            Ok(Some(found)) => Ok(Some(self.completed(found))),
            Ok(None) => {
                self.cancel(call)?;
                Ok(None)
            }
            Err(error) => Err(self.gave_up(call, error)),
        }
    }

    /// Nobody knows the call but this method, and it is not to stay in flight.
    #[cold]
    fn gave_up(&mut self, call: CallId, error: Error) -> Error {
        let _ = self.cancel(call);
        error
    }

    /// Asks, if there is room for the request now, fewer than 1,024 calls are in flight, and not too many answers wait in memory to
    /// be taken; `None` otherwise: take completions, or [`Client::submit`]. A request larger than the lane's largest message is copied, and written as room comes, whenever
    /// this client is used. Never waits.
    ///
    /// # Errors
    /// [`Error::TooLarge`] for more than the service takes ([`Client::request_bytes_max`]); [`Error::Closed`] and
    /// [`Error::PeerDied`] once the one service is gone; [`Error::NoListener`] while nobody serves a name of many;
    /// [`Error::Corrupt`], [`Error::Forked`], [`Error::System`]. Nothing was asked then.
    #[inline(always)]
    pub fn try_submit(&mut self, request: &[u8]) -> Result<Option<CallId>> {
        match self.submit_plainly(request) {
            Some(call) => Ok(Some(call)),
            None => self.submit_at_once(request, 0),
        }
    }

    /// As [`Client::try_submit`], but waits for room. Answers that come meanwhile are kept for later.
    ///
    /// # Errors
    /// As [`Client::try_submit`]; [`Error::Refused`] when 1,024 answers, or more than [`Options::call_bytes_max`] of them, wait in
    /// memory to be taken by [`Client::completion`]: waiting would not help.
    #[inline(always)]
    pub fn submit(&mut self, request: &[u8]) -> Result<CallId> {
        match self.submit_plainly(request) {
            Some(call) => Ok(call),
            None => self.submit_patiently(request),
        }
    }

    #[cold]
    #[inline(never)]
    fn submit_patiently(&mut self, request: &[u8]) -> Result<CallId> {
        match self.submit_at_once(request, 0)? {
            Some(call) => Ok(call),
            None => Ok(self.submit_slowly(request, Deadline::Never, 0)?.expect("without a deadline it does not pass")),
        }
    }

    /// As [`Client::submit`], until `deadline`; `None` when it passes. The service is told of it, and need not answer what
    /// it comes to later.
    ///
    /// # Errors
    /// As [`Client::submit`].
    pub fn submit_until(&mut self, request: &[u8], deadline: Instant) -> Result<Option<CallId>> {
        let ns = self.clock.ns_of(deadline);
        match self.submit_at_once(request, ns)? {
            Some(call) => Ok(Some(call)),
            None => self.submit_slowly(request, Deadline::At(deadline), ns),
        }
    }

    /// Reserves room for a request of `bytes`, to be written in place; `None` when there is none now, or 1,024 calls are in flight.
    /// Until it is submitted nothing is seen of it; dropping it gives the room back. Never waits.
    ///
    /// # Errors
    /// As [`Client::try_submit`]; [`Error::TooLarge`] also for more than the lane's largest message less 24 bytes: what is
    /// larger travels in pieces, by [`Client::submit`].
    pub fn try_reserve(&mut self, bytes: usize) -> Result<Option<RequestReservation<'_>>> {
        self.check(bytes)?;
        let Some(call) = self.next_call() else { return Ok(None) };
        Ok(self.room(bytes)?.map(|(at, space)| RequestReservation { client: self, call, at, space }))
    }

    /// As [`Client::try_reserve`], but waits for room. Answers that come meanwhile are kept for later.
    ///
    /// # Errors
    /// As [`Client::try_reserve`] and [`Client::submit`].
    pub fn reserve(&mut self, bytes: usize) -> Result<RequestReservation<'_>> {
        Ok(self.reserve_slowly(bytes, Deadline::Never)?.expect("without a deadline it does not pass"))
    }

    /// As [`Client::reserve`], until `deadline`; `None` when it passes.
    ///
    /// # Errors
    /// As [`Client::reserve`].
    pub fn reserve_until(&mut self, bytes: usize, deadline: Instant) -> Result<Option<RequestReservation<'_>>> {
        self.reserve_slowly(bytes, Deadline::At(deadline))
    }

    fn reserve_slowly(&mut self, bytes: usize, deadline: Deadline) -> Result<Option<RequestReservation<'_>>> {
        loop {
            self.check(bytes)?;
            if let Some(call) = self.next_call()
                && let Some((at, space)) = self.room(bytes)?
            {
                return Ok(Some(RequestReservation { client: self, call, at, space }));
            }
            if self.find(Want::Room { bytes, is_call: true }, deadline)?.is_none() {
                return Ok(None);
            }
        }
    }

    /// The next answer to any call, if there is one now. Never waits.
    ///
    /// # Errors
    /// After the last answer: [`Error::Closed`] when the service has closed, [`Error::PeerDied`] when it died; every call in
    /// flight has failed then. [`Error::Corrupt`] when it breaks the rules, [`Error::Forked`].
    #[inline(always)]
    pub fn try_completion(&mut self) -> Result<Option<Completion<'_>>> {
        if let Some(plain) = self.plain_reply(None) {
            return Ok(Some(self.replied(plain)));
        }
        self.completion_slowly(Want::Any, Deadline::Now)
    }

    /// The next answer to any call. Waits as the [`Wait`](pelton_channel::Wait) of the options says, for ever if need be.
    ///
    /// # Errors
    /// As [`Client::try_completion`]; [`Error::Refused`] when no call is in flight.
    #[inline(always)]
    pub fn completion(&mut self) -> Result<Completion<'_>> {
        if let Some(plain) = self.plain_reply_soon(None) {
            return Ok(self.replied(plain));
        }
        Ok(self.completion_slowly(Want::Any, Deadline::Never)?.expect("without a deadline it does not pass"))
    }

    /// As [`Client::completion`], until `deadline`; `None` when it passes, and the calls stay in flight.
    ///
    /// # Errors
    /// As [`Client::completion`].
    pub fn completion_until(&mut self, deadline: Instant) -> Result<Option<Completion<'_>>> {
        self.completion_slowly(Want::Any, Deadline::At(deadline))
    }

    /// The next answer to this call. Waits for it; answers to other calls that come meanwhile are kept for later.
    ///
    /// # Errors
    /// As [`Client::completion`]; [`Error::Refused`] when this call is not in flight, and when more than
    /// [`Options::call_bytes_max`] of parts of other calls' replies wait to be taken. Of a name of many services what
    /// [`Outcome::Lost`] says is an error here: [`Error::PeerDied`], [`Error::Closed`], [`Error::Corrupt`], [`Error::NoListener`];
    /// the client goes on.
    #[inline(always)]
    pub fn completion_of(&mut self, call: CallId) -> Result<Completion<'_>> {
        if let Some(plain) = self.plain_reply_soon(Some(call)) {
            return Ok(self.replied(plain));
        }
        Ok(self.completion_slowly(Want::Of(call), Deadline::Never)?.expect("without a deadline it does not pass"))
    }

    /// As [`Client::completion_of`], if there is one now; `None` otherwise. Never waits.
    ///
    /// # Errors
    /// As [`Client::completion_of`].
    pub fn try_completion_of(&mut self, call: CallId) -> Result<Option<Completion<'_>>> {
        self.completion_slowly(Want::Of(call), Deadline::Now)
    }

    /// As [`Client::completion_of`], until `deadline`; `None` when it passes, and the call stays in flight.
    ///
    /// # Errors
    /// As [`Client::completion_of`].
    pub fn completion_of_until(&mut self, call: CallId, deadline: Instant) -> Result<Option<Completion<'_>>> {
        self.completion_slowly(Want::Of(call), Deadline::At(deadline))
    }

    #[cold]
    #[inline(never)]
    fn completion_slowly(&mut self, want: Want, deadline: Deadline) -> Result<Option<Completion<'_>>> {
        let found = match want {
            Want::Of(call) => self.find_of(call, deadline)?,
            _ => self.find(want, deadline)?,
        };
        Ok(found.map(|found| self.completed(found)))
    }

    /// As [`Client::find`], of one call: that it was lost is an error.
    fn find_of(&mut self, call: CallId, deadline: Deadline) -> Result<Option<Found>> {
        match self.find(Want::Of(call), deadline)? {
            Some(Found::Apart(Answer { outcome: Outcome::Lost(loss), .. })) => Err(self.lost(loss)),
            found => Ok(found),
        }
    }

    /// What is said of a call that was lost to who awaits that one.
    #[doc(hidden)]
    #[cold]
    pub fn lost(&self, loss: Loss) -> Error {
        match loss {
            Loss::PeerDied => Error::PeerDied { unreleased: 0 },
            Loss::Closed => Error::Closed { unreleased: 0 },
            Loss::Corrupt => Error::Corrupt("the service broke the rules of calls".to_owned()),
            Loss::Returned if self.crowd.is_some() => self.nobody(),
            Loss::Returned => {
                Error::Refused("the service gave the call back, as it drains: ask its successor".to_owned())
            }
        }
    }

    /// Tells the service something that it does not answer. Waits for room; answers that come meanwhile are kept for later. What a
    /// service had not taken when it ended is lost, and nothing says so: who must know, calls.
    ///
    /// # Errors
    /// As [`Client::submit`].
    pub fn notify(&mut self, message: &[u8]) -> Result<()> {
        self.notify_slowly(message, Deadline::Never).map(|_| ())
    }

    /// As [`Client::notify`], until `deadline`; false when it passes, and nothing was told. What is larger than the lane's largest
    /// message and has begun to be written by then is told all the same: see [`Client::try_notify`].
    ///
    /// # Errors
    /// As [`Client::submit`].
    pub fn notify_until(&mut self, message: &[u8], deadline: Instant) -> Result<bool> {
        self.notify_slowly(message, Deadline::At(deadline))
    }

    fn notify_slowly(&mut self, message: &[u8], deadline: Deadline) -> Result<bool> {
        let at = loop {
            if let Some(at) = self.notify_at_once(message)? {
                break at;
            }
            if self.find(Want::Room { bytes: message.len(), is_call: false }, deadline)?.is_none() {
                return Ok(false);
            }
        };
        // Nothing will come of it that could be waited for: what is large is all in the lane before this returns.
        if let Some(link) = self.links.get(at).filter(|link| !link.outbox.is_empty()) {
            self.find(Want::Written(link.number), deadline)?;
        }
        Ok(true)
    }

    /// As [`Client::notify`], if there is room now; false otherwise. Never waits: of what is larger than the lane's largest
    /// message a copy is written as room comes, whenever this client is used. A service that ends, also one that drains, may not have
    /// taken it.
    ///
    /// # Errors
    /// As [`Client::try_submit`].
    pub fn try_notify(&mut self, message: &[u8]) -> Result<bool> {
        Ok(self.notify_at_once(message)?.is_some())
    }

    /// The link that took it is at that place.
    fn notify_at_once(&mut self, message: &[u8]) -> Result<Option<usize>> {
        self.check(message.len())?;
        let header = Header::new(Kind::Notify, 0);
        let written = match self.crowd.is_some() {
            true => {
                self.hear_ends()?;
                match self.write_to_any(header, message)? {
                    Written::By(at) => Some(at),
                    Written::Full => {
                        self.look_around_now_and_then();
                        None
                    }
                    Written::Nobody => return Err(self.nobody()),
                }
            }
            false => self.links[0].write(header, message).map_err(|error| self.not_written(error))?.then_some(0),
        };
        self.wanted = if written.is_some() { None } else { Some(message.len()) };
        if written.is_some() {
            self.count_submission();
        }
        Ok(written)
    }

    /// Gives a call up: none of its answers is received any more, also of those that have come. The service is told, and may
    /// leave its work; until it has let go of the call, this counts as in flight. Does not wait. False: the call was not in flight,
    /// or given up already.
    ///
    /// # Errors
    /// As [`Client::try_submit`].
    pub fn cancel(&mut self, call: CallId) -> Result<bool> {
        self.check(0)?;
        self.keep_found();
        let before = self.aside.len();
        for place in (0..before).rev().filter(|place| self.aside[*place].call == call).collect::<Vec<_>>() {
            self.remove_aside(place);
        }
        self.late += (before - self.aside.len()) as u64;
        if self.calls.state(call.0) != State::Waiting {
            return Ok(before > self.aside.len());
        }
        let number = self.calls.link(call);
        let Some(at) = self.links.iter().position(|link| link.number == number) else {
            // No service has it.
            self.homeless.retain(|homeless| *homeless != call);
            self.calls.end(call.0);
            return Ok(true);
        };
        self.calls.give_up(call);
        let header = Header::new(Kind::Cancel, call.0);
        let link = &mut self.links[at];
        match link.write(header, &[]) {
            Ok(true) => {}
            Ok(false) => link.outbox.push(header, &[]),
            // Who has gone need not be told, and the lane of replies tells of it.
            Err(error) if is_end(&error) => {}
            Err(error) if self.crowd.is_none() => return Err(self.not_written(error)),
            Err(error) => self.link_failed(at, error)?,
        }
        Ok(true)
    }

    /// Marks a call in flight as one that may be carried out more than once: if its service dies or closes before a first part or an
    /// answer has come, it is submitted again to another service of the name, under the same [`CallId`]; three times at most, lest
    /// one request end all services, and then it is [`Outcome::Lost`]. Does not wait. False: it is not in
    /// flight. Of no effect on a client by `unix:PATH`, which has one service.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn mark_idempotent(&mut self, call: CallId) -> Result<bool> {
        if self.owner.is_forked() {
            return Err(Error::Forked);
        }
        let is_in_flight = self.calls.state(call.0) == State::Waiting;
        if is_in_flight {
            self.calls.set_idempotent(call);
        }
        Ok(is_in_flight)
    }

    /// Services that this client asks at the moment: of a short name all processes that listen under it, as far as it has found
    /// them, and that do not drain; by `unix:PATH` one.
    pub fn services(&self) -> usize {
        self.links.iter().filter(|link| self.crowd.is_none() || link.is_open()).count()
    }

    /// Calls whose last answer has not come, also those given up.
    pub fn in_flight(&self) -> usize {
        self.calls.count()
    }

    /// Answers that came to calls that had been given up, and were dropped.
    pub fn late(&self) -> u64 {
        self.late
    }

    /// How often this side has rung a service that slept, or a service that waited for room. Of those that it asks at the moment.
    pub fn wakes_sent(&self) -> u64 {
        self.links.iter().map(|link| link.outbox.sender.counters().wakes_sent).sum()
    }

    /// The largest request, in bytes, as the service says; of several the most that one of them takes, which is asked then.
    pub fn request_bytes_max(&self) -> u64 {
        let is_one = self.crowd.is_none();
        let of = self.links.iter().filter(|link| is_one || link.is_open()).map(|link| link.request_bytes_max);
        of.max().unwrap_or(u64::MAX)
    }

    /// Who serves; of several, one of them.
    pub fn peer(&self) -> Option<Peer> {
        self.links.first().and_then(Link::peer)
    }

    /// For an event loop: asks that the descriptor become readable when an answer comes, when there is room for what found none at
    /// the last attempt, when what waits to be written can be, or when a service goes. True: there is nothing now, go back to the
    /// loop. False: there is an answer, or room; take completions, or submit again. Holds the loop for as long as [`Options::hold`]
    /// says while answers have lately come so soon.
    ///
    /// # Errors
    /// As [`Client::try_completion`].
    pub fn arm(&mut self) -> Result<bool> {
        let hold = if self.calls.waiting() > 0 { self.hold } else { Duration::ZERO };
        let mut side = Awaiting { client: self, want: Want::Any, wanted: None };
        linger(&mut side, hold)?;
        // Of both lanes of all links.
        side.client.doorbells.drain()?;
        side.wanted = side.client.wanted;
        let mut armed = side.arm()?;
        if armed && side.client.doorbells.is_any_gone()? {
            side.disarm();
            // Told after what was answered.
            let _ = side.look()? || side.end()?;
            armed = false;
        }
        armed &= self.found.is_none() && self.aside.is_empty();
        if !armed || (Awaiting { wanted: self.wanted, client: self, want: Want::Any }).needs_timed_wait() {
            self.doorbells.local_wake().ring();
        }
        Ok(armed)
    }

    /// Nobody wants the room any more that there was not.
    #[doc(hidden)]
    pub fn forget_room(&mut self) {
        self.wanted = None;
    }

    /// Whether something waits for room that was asked for, and so is to be armed for.
    #[doc(hidden)]
    pub fn has_unwritten(&self) -> bool {
        self.links.iter().any(|link| !link.outbox.is_empty()) || !self.homeless.is_empty()
    }

    /// The largest reply that this side takes, in bytes.
    #[doc(hidden)]
    pub fn reply_bytes_max(&self) -> u64 {
        self.reply_bytes_max
    }

    /// Takes [`Client::arm`] back.
    pub fn disarm(&mut self) {
        for link in &mut self.links {
            link.replies.disarm();
            link.outbox.sender.disarm();
        }
    }

    /// As [`Client::look_for`], waiting for as long as `deadline` says.
    fn find(&mut self, want: Want, deadline: Deadline) -> Result<Option<Found>> {
        if let Some(found) = self.look_for(want)? {
            return Ok(Some(found));
        }
        let Some(deadline) = deadline.until() else { return Ok(None) };
        if matches!(want, Want::Any | Want::Of(_)) {
            self.check_awaited(want)?;
        }
        while wait(&mut Awaiting { client: self, want, wanted: None }, deadline)? {
            // A sleep may have ended for something else that came.
            if let Some(found) = self.look_for(want)? {
                return Ok(Some(found));
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(None);
            }
        }
        Ok(None)
    }

    /// Whether there is anything to wait for.
    #[inline(always)]
    fn check_awaited(&self, want: Want) -> Result<()> {
        let is_awaited = match want {
            Want::Of(call) => self.calls.state(call.0) == State::Waiting,
            _ => self.calls.waiting() > 0,
        };
        if is_awaited { Ok(()) } else { Err(not_in_flight()) }
    }

    #[inline(always)]
    fn replied(&mut self, (record, call): (Record, CallId)) -> Completion<'_> {
        let body = Body::InPlace(self.links[0].replies.message(record));
        Completion { call, outcome: Outcome::Reply, body, at: 0 }
    }

    fn completed(&mut self, found: Found) -> Completion<'_> {
        match found {
            Found::InPlace(record, call, outcome, at) => {
                if outcome == Outcome::Part {
                    self.calls.note_part(call);
                }
                Completion { call, outcome, body: Body::InPlace(self.links[at].replies.message(record)), at }
            }
            Found::Apart(Answer { call, outcome, bytes }) => {
                Completion { call, outcome, body: Body::Owned(bytes), at: 0 }
            }
            Found::Room => unreachable!("a completion was wanted"),
        }
    }
}

fn is_end(error: &Error) -> bool {
    error.is_closed() || error.is_peer_died()
}

#[cold]
fn not_in_flight() -> Error {
    Error::Refused("no such call is in flight: nothing would ever come of waiting".to_owned())
}

impl AsRawFd for Client {
    /// As [`AsFd`], for runtimes that ask for the number.
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl AsFd for Client {
    /// The descriptor for an event loop: see [`Client::arm`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.doorbells.as_fd()
    }
}

/// Room for a request, to be written in place; see [`Client::try_reserve`].
#[derive(Debug)]
pub struct RequestReservation<'a> {
    pub(super) client: &'a mut Client,
    pub(super) call: CallId,
    /// By which of its links.
    pub(super) at: usize,
    pub(super) space: ReservedSpace,
}

impl RequestReservation<'_> {
    /// Asks with all of the room. Does not wait.
    ///
    /// # Errors
    /// [`Error::Forked`]. A service that has gone is told by the next call.
    pub fn submit(self) -> Result<CallId> {
        let bytes = self.len();
        self.submit_bytes(bytes)
    }

    /// Asks with the first `bytes` of the room.
    ///
    /// # Errors
    /// [`Error::TooLarge`] when `bytes` is more than was reserved, [`Error::Forked`]; nothing is asked then.
    pub fn submit_bytes(self, bytes: usize) -> Result<CallId> {
        let RequestReservation { client, call, at, space } = self;
        if client.crowd.is_some() {
            let sender = &client.links[at].outbox.sender;
            let kept = sender.body(space).get(..bytes).unwrap_or_default().to_vec();
            client.publish(call, at, space, bytes)?;
            client.calls.keep(call, 0, &kept);
            client.count_submission();
            return Ok(call);
        }
        client.publish(call, at, space, bytes)?;
        Ok(call)
    }
}

impl Client {
    #[inline(always)]
    fn publish(&mut self, call: CallId, at: usize, space: ReservedSpace, bytes: usize) -> Result<()> {
        self.links[at].outbox.sender.publish_body(space, Header::new(Kind::Request, call.0).words(), bytes)?;
        self.begin(call, at);
        Ok(())
    }
}

impl std::ops::Deref for RequestReservation<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.client.links[self.at].outbox.sender.body(self.space)
    }
}

impl std::ops::DerefMut for RequestReservation<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.client.links[self.at].outbox.sender.body_mut(self.space)
    }
}
