//! The asking side of a link.

mod raw;

pub use raw::{RawCompletion, RawRequestRoom};

use super::frame::{Assembly, By, CALLS_MAX, Clock, HEADER_BYTES, Header, Kind, check_size, generation_of, slot_of};
use super::outbox::Outbox;
use super::{Body, LOOKS};
use crate::connect::{self, Origin};
use crate::error::{Error, Result};
use crate::handshake::LinkParts;
use crate::link::Peer;
use crate::options::Options;
use crate::os::Ready;
use crate::receiver::Receiver;
use crate::sender::Sender;
use crate::wait::{self, Patience, Side, Spin};
use pelton_lane::{Record, Space};
use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::{Duration, Instant};

/// Asks a [`crate::Service`] and awaits its answers. `Send`, not `Sync`: one thread at a time.
///
/// [`Client::call`] does both. [`Client::submit`] asks without awaiting, and [`Client::completion`] is the next answer to any
/// of up to 1,024 calls in flight, in whatever order they come. An answer is read in place, and is had when the [`Completion`]
/// is dropped.
///
/// When the service ends, every call in flight has failed: what it had answered is still received, and then each method says
/// [`Error::PeerDied`], or [`Error::Closed`] if it ended on purpose. Connect anew then.
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
    /// Before the replies: when it is dropped, the service reads what was sent, and that it was closed.
    pub(super) outbox: Outbox,
    replies: Receiver,
    calls: Calls,
    /// Answers to other calls than the one that was awaited when they came.
    aside: VecDeque<Answer>,
    /// Bytes of parts among them.
    aside_bytes: u64,
    /// Found by a wait, for who waited.
    found: Option<Found>,
    assembly: Option<Assembly>,
    /// Most bytes of a request, as the service says, and of a reply.
    request_bytes_max: u64,
    reply_bytes_max: u64,
    clock: Clock,
    hold: Duration,
    late: u64,
    fate: Option<Fate>,
}

/// Which call: as [`Client::submit`] answers it, and as its [`Completion`]s say it. No two of a client's calls are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CallId(pub(crate) u64);

/// What came of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The reply; nothing more comes of this call.
    Reply,
    /// A part of a streaming reply. More comes.
    Part,
    /// A streaming reply has ended. It has no bytes of its own.
    End,
    /// The service failed the call, with a code and bytes of its own meaning. Nothing more comes.
    Failed(u32),
    /// The service let the call go without a reply: its handler panicked, or forgot. Nothing more comes.
    Abandoned,
    /// The service has gone, or takes no more calls, and the client goes on without it. Nothing more comes.
    Lost(Loss),
}

/// Why a call was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// The service died. Whether it had carried the call out nobody knows.
    PeerDied,
    /// The service closed without having drained. Whether it had carried the call out nobody knows.
    Closed,
    /// The service broke the rules. Whether it had carried the call out nobody knows.
    Corrupt,
    /// The service gave the call back, which it had not begun, since it drains; and no other serves the name. To ask again does
    /// no harm.
    Returned,
}

impl Outcome {
    /// Whether nothing more comes of the call.
    pub fn is_final(self) -> bool {
        self != Outcome::Part
    }
}

/// An answer to a call. Dropping it gives its space back; the client can do nothing else meanwhile.
///
/// Its bytes are in memory that the service wrote, unless they came in pieces or while something else was awaited: reading
/// them in place trusts the service not to write after it has answered. [`Completion::copy_into`] is safe against any service.
#[derive(Debug)]
pub struct Completion<'a> {
    call: CallId,
    outcome: Outcome,
    body: Body<'a>,
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
    /// In the lane, the next there.
    InPlace(Record, CallId, Outcome),
    Apart(Answer),
    /// Room was wanted, and perhaps there is.
    Room,
}

impl Found {
    fn call(&self) -> Option<CallId> {
        match self {
            Found::InPlace(_, call, _) | Found::Apart(Answer { call, .. }) => Some(*call),
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
    /// That all messages are in the lane.
    Written,
}

/// The calls in flight, each in a place of its own until its last answer has come.
#[derive(Debug, Default)]
struct Calls {
    places: Vec<Place>,
    free: Vec<u32>,
    /// Of those in flight, not given up.
    waiting: usize,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    generation: u32,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Waiting,
    /// Nobody waits for it any more; the service has not let go of it yet.
    GivenUp,
}

impl Calls {
    fn is_full(&self) -> bool {
        self.free.is_empty() && self.places.len() == CALLS_MAX as usize
    }

    fn count(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// The id of the next call, in the place used last: its memory is warm.
    fn next(&mut self) -> Option<CallId> {
        if self.is_full() {
            return None;
        }
        let slot = match self.free.last() {
            Some(slot) => *slot,
            None => {
                self.places.push(Place { generation: 0, state: State::Free });
                self.free.push(self.places.len() as u32 - 1);
                self.places.len() as u32 - 1
            }
        };
        let generation = self.places[slot as usize].generation.checked_add(1).unwrap_or(1);
        Some(CallId(u64::from(generation) << 32 | u64::from(slot)))
    }

    /// The call that [`Calls::next`] answered has been submitted.
    fn begin(&mut self, call: CallId) {
        self.free.pop();
        self.waiting += 1;
        self.places[slot_of(call.0) as usize] = Place { generation: generation_of(call.0), state: State::Waiting };
    }

    fn state(&self, id: u64) -> State {
        match self.places.get(slot_of(id) as usize) {
            Some(place) if place.generation == generation_of(id) => place.state,
            _ => State::Free,
        }
    }

    fn give_up(&mut self, call: CallId) {
        self.places[slot_of(call.0) as usize].state = State::GivenUp;
        self.waiting -= 1;
    }

    fn end(&mut self, id: u64) {
        let before = std::mem::replace(&mut self.places[slot_of(id) as usize].state, State::Free);
        self.waiting -= usize::from(before == State::Waiting);
        self.free.push(slot_of(id));
    }
}

impl Client {
    /// Connects to the service that listens under `name` (a short name, or `unix:PATH`) with default [`Options`]. Fails at once
    /// when nobody does; waits some seconds at most for one that listens to accept.
    ///
    /// # Errors
    /// As [`Options::connect_sender`].
    pub fn connect(name: &str) -> Result<Client> {
        Options::new().connect_client(name)
    }

    pub(crate) fn with(name: &str, options: &Options) -> Result<Client> {
        let bells = crate::handshake::own_bells()?;
        let (_, LinkParts { requests, replies, bytes_max }) =
            connect::connect_client(&crate::name::Name::parse(name)?, options, &bells)?;
        Ok(Client {
            outbox: Outbox::new(Sender::new(requests, options, Origin::Threads)?),
            replies: Receiver::new(replies, options, Origin::Threads)?,
            calls: Calls::default(),
            aside: VecDeque::new(),
            aside_bytes: 0,
            found: None,
            assembly: None,
            request_bytes_max: bytes_max,
            reply_bytes_max: options.call_bytes_max,
            clock: Clock::new(),
            hold: options.hold,
            late: 0,
            fate: None,
        })
    }

    /// Asks and awaits the answer: its [`Outcome`] says whether it is a reply, the first part of one (then
    /// [`Client::completion_of`] brings the others), or a failure. Answers to other calls that come meanwhile are kept for
    /// later.
    ///
    /// # Errors
    /// As [`Client::submit`] and [`Client::completion_of`].
    #[inline]
    pub fn call(&mut self, request: &[u8]) -> Result<Completion<'_>> {
        let call = self.submit(request)?;
        self.completion_of(call)
    }

    /// As [`Client::call`], until `deadline` on the monotonic clock, of which the service is told too; `None` when it passes: the
    /// call is cancelled then.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn call_until(&mut self, request: &[u8], deadline: Instant) -> Result<Option<Completion<'_>>> {
        let Some(call) = self.submit_until(request, deadline)? else { return Ok(None) };
        match self.find(Want::Of(call), Patience::Until(deadline))? {
            Some(found) => Ok(Some(self.completed(found))),
            None => {
                self.cancel(call)?;
                Ok(None)
            }
        }
    }

    /// Asks, if there is room for the request now and fewer than 1,024 calls are in flight; `None` otherwise: take completions,
    /// or [`Client::submit`]. A request larger than the lane's largest message is copied, and written as room comes, whenever
    /// this client is used. Never waits.
    ///
    /// # Errors
    /// [`Error::TooLarge`] for more than the service takes ([`Client::request_bytes_max`]); [`Error::Closed`] and
    /// [`Error::PeerDied`] once the service is gone; [`Error::Corrupt`], [`Error::Forked`]. Nothing was asked then.
    #[inline]
    pub fn try_submit(&mut self, request: &[u8]) -> Result<Option<CallId>> {
        self.submit_at_once(request, 0)
    }

    /// As [`Client::try_submit`], but waits for room. Answers that come meanwhile are kept for later.
    ///
    /// # Errors
    /// As [`Client::try_submit`]; [`Error::Refused`] when more than [`Options::call_bytes_max`] of parts of streaming replies wait
    /// to be taken by [`Client::completion`].
    #[inline]
    pub fn submit(&mut self, request: &[u8]) -> Result<CallId> {
        match self.submit_at_once(request, 0)? {
            Some(call) => Ok(call),
            None => {
                Ok(self.submit_slowly(request, Patience::Endless, 0)?.expect("without a deadline it does not pass"))
            }
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
            None => self.submit_slowly(request, Patience::Until(deadline), ns),
        }
    }

    #[inline(always)]
    fn submit_at_once(&mut self, request: &[u8], deadline: u64) -> Result<Option<CallId>> {
        self.check(request.len())?;
        let Some(call) = self.calls.next() else { return Ok(None) };
        let header = Header { deadline, ..Header::new(Kind::Request, call.0) };
        let written = self.write(header, request)?;
        if written {
            self.calls.begin(call);
        }
        Ok(written.then_some(call))
    }

    #[cold]
    fn submit_slowly(&mut self, request: &[u8], patience: Patience, deadline: u64) -> Result<Option<CallId>> {
        loop {
            if self.find(Want::Room { bytes: request.len(), is_call: true }, patience)?.is_none() {
                return Ok(None);
            }
            if let Some(call) = self.submit_at_once(request, deadline)? {
                return Ok(Some(call));
            }
        }
    }

    /// Writes a message, or, of one that is cut into pieces, what there is room for; false if it has to wait for room.
    #[inline(always)]
    fn write(&mut self, header: Header, payload: &[u8]) -> Result<bool> {
        if self.outbox.is_whole(payload.len()) {
            return match self.outbox.try_write(header, payload)? {
                true => Ok(true),
                false if self.outbox.is_empty() => Ok(false),
                false => Ok(self.outbox.flush()? && self.outbox.try_write(header, payload)?),
            };
        }
        if !self.outbox.is_empty() && !self.outbox.flush()? {
            return Ok(false);
        }
        self.outbox.push(header, payload);
        self.outbox.flush().map(|_| true)
    }

    #[inline(always)]
    fn check(&self, bytes: usize) -> Result<()> {
        if self.fate.is_some() {
            return Err(self.ended_before());
        }
        check_size(bytes, self.request_bytes_max)
    }

    /// Reserves room for a request of `bytes`, to be written in place; `None` when there is none now, or 1,024 calls are in flight.
    /// Until it is submitted nothing is seen of it; dropping it gives the room back. Never waits.
    ///
    /// # Errors
    /// As [`Client::try_submit`]; [`Error::TooLarge`] also for more than the lane's largest message less 24 bytes: what is
    /// larger travels in pieces, by [`Client::submit`].
    pub fn try_reserve(&mut self, bytes: usize) -> Result<Option<RequestRoom<'_>>> {
        self.check(bytes)?;
        let Some(call) = self.calls.next() else { return Ok(None) };
        if !self.outbox.is_empty() && !self.outbox.flush()? {
            return Ok(None);
        }
        let space = self.outbox.sender.try_room(bytes)?;
        Ok(space.map(|space| RequestRoom { client: self, call, space }))
    }

    /// As [`Client::try_reserve`], but waits for room. Answers that come meanwhile are kept for later.
    ///
    /// # Errors
    /// As [`Client::try_reserve`] and [`Client::submit`].
    pub fn reserve(&mut self, bytes: usize) -> Result<RequestRoom<'_>> {
        Ok(self.reserve_slowly(bytes, Patience::Endless)?.expect("without a deadline it does not pass"))
    }

    /// As [`Client::reserve`], until `deadline`; `None` when it passes.
    ///
    /// # Errors
    /// As [`Client::reserve`].
    pub fn reserve_until(&mut self, bytes: usize, deadline: Instant) -> Result<Option<RequestRoom<'_>>> {
        self.reserve_slowly(bytes, Patience::Until(deadline))
    }

    fn reserve_slowly(&mut self, bytes: usize, patience: Patience) -> Result<Option<RequestRoom<'_>>> {
        while self.try_reserve(bytes)?.is_none() {
            if self.find(Want::Room { bytes, is_call: true }, patience)?.is_none() {
                return Ok(None);
            }
        }
        // Once more, since a borrow cannot be given back once it is returned; the room is still there.
        Ok(Some(self.try_reserve(bytes)?.expect("nobody else uses this client")))
    }

    /// The next answer to any call, if there is one now. Never waits.
    ///
    /// # Errors
    /// After the last answer: [`Error::Closed`] when the service has closed, [`Error::PeerDied`] when it died; every call in
    /// flight has failed then. [`Error::Corrupt`] when it breaks the rules, [`Error::Forked`].
    #[inline]
    pub fn try_completion(&mut self) -> Result<Option<Completion<'_>>> {
        Ok(self.look_for(Want::Any)?.map(|found| self.completed(found)))
    }

    /// The next answer to any call. Waits as the [`crate::Wait`] of the options says, for ever if need be.
    ///
    /// # Errors
    /// As [`Client::try_completion`]; [`Error::Refused`] when no call is in flight.
    pub fn completion(&mut self) -> Result<Completion<'_>> {
        let found = self.find(Want::Any, Patience::Endless)?.expect("without a deadline it does not pass");
        Ok(self.completed(found))
    }

    /// As [`Client::completion`], until `deadline`; `None` when it passes, and the calls stay in flight.
    ///
    /// # Errors
    /// As [`Client::completion`].
    pub fn completion_until(&mut self, deadline: Instant) -> Result<Option<Completion<'_>>> {
        Ok(self.find(Want::Any, Patience::Until(deadline))?.map(|found| self.completed(found)))
    }

    /// The next answer to this call. Waits for it; answers to other calls that come meanwhile are kept for later.
    ///
    /// # Errors
    /// As [`Client::completion`]; [`Error::Refused`] when this call is not in flight, and when more than
    /// [`Options::call_bytes_max`] of parts of other calls' replies wait to be taken.
    #[inline]
    pub fn completion_of(&mut self, call: CallId) -> Result<Completion<'_>> {
        let found = self.find(Want::Of(call), Patience::Endless)?.expect("without a deadline it does not pass");
        Ok(self.completed(found))
    }

    /// As [`Client::completion_of`], if there is one now; `None` otherwise. Never waits.
    ///
    /// # Errors
    /// As [`Client::try_completion`].
    pub fn try_completion_of(&mut self, call: CallId) -> Result<Option<Completion<'_>>> {
        Ok(self.look_for(Want::Of(call))?.map(|found| self.completed(found)))
    }

    /// As [`Client::completion_of`], until `deadline`; `None` when it passes, and the call stays in flight.
    ///
    /// # Errors
    /// As [`Client::completion_of`].
    pub fn completion_of_until(&mut self, call: CallId, deadline: Instant) -> Result<Option<Completion<'_>>> {
        Ok(self.find(Want::Of(call), Patience::Until(deadline))?.map(|found| self.completed(found)))
    }

    /// Tells the service something that it does not answer. Waits for room; answers that come meanwhile are kept for later.
    ///
    /// # Errors
    /// As [`Client::submit`].
    pub fn notify(&mut self, message: &[u8]) -> Result<()> {
        self.notify_slowly(message, Patience::Endless).map(|_| ())
    }

    /// As [`Client::notify`], until `deadline`; false when it passes, and nothing was told. What is larger than the lane's largest message
    /// and has begun to be written by then is told all the same: see [`Client::try_notify`].
    ///
    /// # Errors
    /// As [`Client::submit`].
    pub fn notify_until(&mut self, message: &[u8], deadline: Instant) -> Result<bool> {
        self.notify_slowly(message, Patience::Until(deadline))
    }

    fn notify_slowly(&mut self, message: &[u8], patience: Patience) -> Result<bool> {
        while !self.try_notify(message)? {
            if self.find(Want::Room { bytes: message.len(), is_call: false }, patience)?.is_none() {
                return Ok(false);
            }
        }
        // Nothing will come of it that could be waited for: what is large is all in the lane before this returns.
        if !self.outbox.is_empty() {
            self.find(Want::Written, patience)?;
        }
        Ok(true)
    }

    /// As [`Client::notify`], if there is room now; false otherwise. Never waits: of what is larger than the lane's largest
    /// message a copy is written as room comes, whenever this client is used.
    ///
    /// # Errors
    /// As [`Client::try_submit`].
    pub fn try_notify(&mut self, message: &[u8]) -> Result<bool> {
        self.check(message.len())?;
        self.write(Header::new(Kind::Notify, 0), message)
    }

    /// Gives a call up: none of its answers is received any more, also of those that have come. The service is told, and may
    /// leave its work; until it has let go of the call, this counts as in flight. Does not wait. False: the call was not in flight,
    /// or given up already.
    ///
    /// # Errors
    /// As [`Client::try_submit`].
    pub fn cancel(&mut self, call: CallId) -> Result<bool> {
        self.check(0)?;
        if let Some(found) = self.found.take() {
            self.keep(Some(found))?;
        }
        let before = self.aside.len();
        let aside_bytes = &mut self.aside_bytes;
        self.aside.retain(|answer| {
            let stays = answer.call != call;
            if !stays && answer.outcome == Outcome::Part {
                *aside_bytes -= answer.bytes.len() as u64;
            }
            stays
        });
        self.late += (before - self.aside.len()) as u64;
        if self.calls.state(call.0) != State::Waiting {
            return Ok(before > self.aside.len());
        }
        self.calls.give_up(call);
        if !self.write(Header::new(Kind::Cancel, call.0), &[])? {
            self.outbox.push(Header::new(Kind::Cancel, call.0), &[]);
        }
        Ok(true)
    }

    /// Marks a call in flight as one that may be carried out twice: if its service dies or closes before a first part or an answer
    /// has come, it is submitted again to another service of the name, under the same [`CallId`]. Does not wait. False: it is not in
    /// flight. Of no effect on a client by `unix:PATH`, which has one service.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn mark_idempotent(&mut self, call: CallId) -> Result<bool> {
        Ok(self.calls.state(call.0) == State::Waiting)
    }

    /// Services that this client asks at the moment: of a short name all processes that listen under it, as far as it has found
    /// them, and that do not drain; by `unix:PATH` one.
    pub fn services(&self) -> usize {
        1
    }

    /// Calls whose last answer has not come, also those given up.
    pub fn in_flight(&self) -> usize {
        self.calls.count()
    }

    /// Answers that came to calls that had been given up, and were dropped.
    pub fn late(&self) -> u64 {
        self.late
    }

    /// The largest request, in bytes, as the service says.
    pub fn request_bytes_max(&self) -> u64 {
        self.request_bytes_max
    }

    /// Who serves.
    pub fn peer(&self) -> Option<Peer> {
        self.replies.peer()
    }

    /// For an event loop: asks that the descriptor become readable when an answer comes, when what waits to be written can
    /// be, or when the service goes. True: there is none now, go back to the loop. False: there is one, take it. Holds the loop
    /// for as long as [`Options::hold`] says while answers have lately come so soon.
    ///
    /// # Errors
    /// As [`Client::try_completion`].
    pub fn arm(&mut self) -> Result<bool> {
        let hold = if self.calls.waiting > 0 { self.hold } else { Duration::ZERO };
        wait::linger(&mut Awaiting { client: self, want: Want::Any }, hold)?;
        // Drains the bell of both lanes.
        let armed = self.replies.arm();
        let mut armed = armed.map_err(|error| self.ended(error))?;
        if !self.outbox.is_empty() {
            // Armed for no room: there is some, to be written to at the next look.
            let bytes = self.outbox.wanted();
            armed &= self.outbox.sender.arm_for_room(bytes)?;
        }
        armed &= self.found.is_none() && self.aside.is_empty();
        if !armed || self.outbox.sender.must_nap() {
            self.replies.bells().nudge().ring();
        }
        Ok(armed)
    }

    /// Takes [`Client::arm`] back.
    pub fn disarm(&mut self) {
        self.replies.disarm();
        self.outbox.sender.disarm();
    }

    /// As [`Client::look_for`], waiting for as long as `patience` says.
    #[inline]
    fn find(&mut self, want: Want, patience: Patience) -> Result<Option<Found>> {
        if let Some(found) = self.look_for(want)? {
            return Ok(Some(found));
        }
        let Some(deadline) = patience.deadline() else { return Ok(None) };
        if matches!(want, Want::Any | Want::Of(_)) {
            self.check_awaited(want)?;
            if self.replies.record_comes_soon()
                && let Some(found) = self.look_for(want)?
            {
                return Ok(Some(found));
            }
        }
        self.wait_for(want, deadline)
    }

    #[cold]
    fn wait_for(&mut self, want: Want, deadline: Option<Instant>) -> Result<Option<Found>> {
        while wait::wait(&mut Awaiting { client: self, want }, deadline).map_err(|error| self.ended(error))? {
            // A sleep may have ended for something else that came.
            if let Some(found) = self.look_for(want)? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Whether there is anything to wait for.
    #[inline(always)]
    fn check_awaited(&self, want: Want) -> Result<()> {
        let is_awaited = match want {
            Want::Of(call) => self.calls.state(call.0) == State::Waiting,
            _ => self.calls.waiting > 0,
        };
        if is_awaited { Ok(()) } else { Err(not_in_flight()) }
    }

    fn completed(&mut self, found: Found) -> Completion<'_> {
        match found {
            Found::InPlace(record, call, outcome) => {
                Completion { call, outcome, body: Body::InPlace(self.replies.message(record)) }
            }
            Found::Apart(Answer { call, outcome, bytes }) => Completion { call, outcome, body: Body::Apart(bytes) },
            Found::Room => unreachable!("a completion was wanted"),
        }
    }

    /// What is wanted, if it is there now: of what else has come before it, answers to other calls are put aside.
    #[inline(always)]
    fn look_for(&mut self, want: Want) -> Result<Option<Found>> {
        let usual = self.fate.is_none() && self.found.is_none() && self.aside.is_empty() && self.outbox.is_empty();
        if !usual && let Some(found) = self.look_aside(want)? {
            return Ok(Some(found));
        }
        for _ in 0..LOOKS {
            let next = self.replies.next_record().map_err(|error| self.ended(error))?;
            let Some(record) = next else { break };
            let Some((call, outcome)) = self.sort(&record)? else {
                // Perhaps the last piece of one.
                if !self.aside.is_empty()
                    && let Some(found) = self.look_aside(want)?
                {
                    return Ok(Some(found));
                }
                continue;
            };
            if want == Want::Any || want == Want::Of(call) {
                return Ok(Some(Found::InPlace(record, call, outcome)));
            }
            self.copy_aside(&record, call, outcome)?;
        }
        match want {
            Want::Any | Want::Of(_) => Ok(None),
            // Who wants it tries.
            Want::Room { bytes, is_call } => {
                let is_place = !is_call || !self.calls.is_full();
                let is_room = is_place && self.outbox.flush()? && {
                    !self.outbox.is_whole(bytes) || self.outbox.sender.try_room(bytes)?.is_some()
                };
                Ok(is_room.then_some(Found::Room))
            }
            Want::Written => Ok(self.outbox.flush()?.then_some(Found::Room)),
        }
    }

    /// What there is to do, and to be found, apart from the lane of replies.
    #[cold]
    fn look_aside(&mut self, want: Want) -> Result<Option<Found>> {
        if self.fate == Some(Fate::Broken) {
            return Err(self.ended_before());
        }
        match (want, self.found.take()) {
            (Want::Room { .. } | Want::Written, Some(Found::Room)) => return Ok(Some(Found::Room)),
            (Want::Any, found @ Some(Found::InPlace(..) | Found::Apart(_))) => return Ok(found),
            (Want::Of(call), Some(found)) if found.call() == Some(call) => return Ok(Some(found)),
            (_, found) => self.keep(found)?,
        }
        if let Err(error) = self.outbox.flush() {
            // To who awaits an answer the lane of replies tells it, after what was answered.
            if !matches!(want, Want::Any | Want::Of(_)) || !is_end(&error) {
                return Err(error);
            }
            self.outbox.clear();
        }
        let place = match want {
            Want::Any => (!self.aside.is_empty()).then_some(0),
            Want::Of(call) => self.aside.iter().position(|answer| answer.call == call),
            Want::Room { .. } | Want::Written => None,
        };
        let Some(answer) = place.and_then(|place| self.aside.remove(place)) else { return Ok(None) };
        if answer.outcome == Outcome::Part {
            self.aside_bytes -= answer.bytes.len() as u64;
        }
        Ok(Some(Found::Apart(answer)))
    }

    /// Puts aside what was found for somebody else.
    fn keep(&mut self, found: Option<Found>) -> Result<()> {
        match found {
            Some(Found::InPlace(record, call, outcome)) => self.copy_aside(&record, call, outcome),
            Some(Found::Apart(answer)) => self.put_aside(answer),
            Some(Found::Room) | None => Ok(()),
        }
    }

    fn copy_aside(&mut self, record: &Record, call: CallId, outcome: Outcome) -> Result<()> {
        let mut bytes = Vec::new();
        self.replies.append(record, HEADER_BYTES, &mut bytes);
        self.replies.release_record(record);
        self.put_aside(Answer { call, outcome, bytes })
    }

    /// Makes room in the lane by keeping an answer in memory. Last answers are as many as there are calls; of parts there is no end.
    fn put_aside(&mut self, answer: Answer) -> Result<()> {
        if answer.outcome == Outcome::Part {
            self.aside_bytes += answer.bytes.len() as u64;
        }
        self.aside.push_back(answer);
        if self.aside_bytes > self.reply_bytes_max {
            return Err(Error::Refused(format!(
                "{} bytes of parts of other calls' replies wait: take them by completion first, or cancel their calls",
                self.aside_bytes
            )));
        }
        Ok(())
    }

    /// What the next record is, if it is an answer that is whole, and awaited; else it has been released.
    #[inline(always)]
    fn sort(&mut self, record: &Record) -> Result<Option<(CallId, Outcome)>> {
        let read = match self.replies.header(record) {
            Some(words) => Header::read(words, record.bytes - HEADER_BYTES as u64, By::Service),
            None => Err("length"),
        };
        let header = read.map_err(|rule| self.broken(rule, record))?;
        if record.bytes - HEADER_BYTES as u64 > self.reply_bytes_max {
            return Err(self.broken("size", record));
        }
        let state = self.calls.state(header.id);
        if state == State::Free {
            return Err(self.broken("id", record));
        }
        if header.more || header.continued {
            return self.assemble(record, header).map(|()| None);
        }
        if header.kind.is_final() {
            self.calls.end(header.id);
        }
        if state == State::GivenUp {
            self.late += 1;
            self.replies.release_record(record);
            return Ok(None);
        }
        Ok(Some((CallId(header.id), outcome_of(&header))))
    }

    #[cold]
    fn assemble(&mut self, record: &Record, header: Header) -> Result<()> {
        Assembly::check(&self.assembly, &header).map_err(|rule| self.broken(rule, record))?;
        let mut assembly = self.assembly.take().unwrap_or_else(|| Assembly { header, bytes: Vec::new() });
        if assembly.bytes.len() as u64 + record.bytes - HEADER_BYTES as u64 > self.reply_bytes_max {
            return Err(self.broken("size", record));
        }
        let is_awaited = self.calls.state(header.id) == State::Waiting;
        // What nobody waits for is not kept, but its end is to be known.
        if is_awaited {
            self.replies.append(record, HEADER_BYTES, &mut assembly.bytes);
        } else {
            assembly.bytes.clear();
        }
        self.replies.release_record(record);
        if header.more {
            self.assembly = Some(assembly);
            return Ok(());
        }
        if header.kind.is_final() {
            self.calls.end(header.id);
        }
        match is_awaited {
            true => {
                let answer =
                    Answer { call: CallId(header.id), outcome: outcome_of(&assembly.header), bytes: assembly.bytes };
                self.put_aside(answer)
            }
            false => {
                self.late += 1;
                Ok(())
            }
        }
    }

    #[cold]
    fn broken(&mut self, rule: &str, record: &Record) -> Error {
        self.fate = Some(Fate::Broken);
        self.replies.retire();
        Error::Corrupt(format!("the service's message {} breaks the rule {rule:?} of calls", record.seq))
    }

    /// The end as the lane of replies tells it, with what the other knows.
    #[cold]
    fn ended(&mut self, error: Error) -> Error {
        let closed = match error {
            Error::PeerDied { .. } => self.outbox.sender.has_receiver_closed(),
            Error::Closed { .. } => true,
            error => return error,
        };
        let unreleased = self.outbox.sender.unreleased();
        self.fate = Some(if closed { Fate::Closed(unreleased) } else { Fate::Died(unreleased) });
        self.outbox.clear();
        self.ended_before()
    }

    #[cold]
    fn ended_before(&self) -> Error {
        match self.fate {
            Some(Fate::Closed(unreleased)) => Error::Closed { unreleased },
            Some(Fate::Died(unreleased)) => Error::PeerDied { unreleased },
            _ => Error::Corrupt("the service broke the rules before".to_owned()),
        }
    }
}

fn is_end(error: &Error) -> bool {
    error.is_closed() || error.is_peer_died()
}

fn outcome_of(header: &Header) -> Outcome {
    match header.kind {
        Kind::Part => Outcome::Part,
        Kind::End => Outcome::End,
        Kind::Failed => Outcome::Failed(header.code),
        Kind::Abandoned => Outcome::Abandoned,
        Kind::Returned => Outcome::Lost(Loss::Returned),
        _ => Outcome::Reply,
    }
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
        self.replies.as_fd()
    }
}

/// Room for a request, to be written in place; see [`Client::try_reserve`].
#[derive(Debug)]
pub struct RequestRoom<'a> {
    client: &'a mut Client,
    call: CallId,
    space: Space,
}

impl RequestRoom<'_> {
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
        let RequestRoom { client, call, space } = self;
        client.outbox.sender.publish_room(space, Header::new(Kind::Request, call.0).words(), bytes)?;
        client.calls.begin(call);
        Ok(call)
    }
}

impl std::ops::Deref for RequestRoom<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.client.outbox.sender.room_read(self.space)
    }
}

impl std::ops::DerefMut for RequestRoom<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.client.outbox.sender.room(self.space)
    }
}

/// A client that waits, on both lanes at once: replies are taken while it waits for room for a request, so that two full lanes
/// never wait for each other.
struct Awaiting<'a> {
    client: &'a mut Client,
    want: Want,
}

impl Awaiting<'_> {
    /// The most bytes of a record that there has to be room for, if there has.
    fn room(&self) -> Option<usize> {
        let Client { outbox, calls, .. } = &*self.client;
        match self.want {
            _ if !outbox.is_empty() => Some(outbox.wanted()),
            // A place comes by an answer.
            Want::Room { is_call: true, .. } if calls.is_full() => None,
            Want::Room { bytes, .. } => Some(if outbox.is_whole(bytes) { bytes } else { 0 }),
            _ => None,
        }
    }
}

impl Side for Awaiting<'_> {
    fn look(&mut self) -> Result<bool> {
        if self.client.found.is_none() {
            self.client.found = self.client.look_for(self.want)?;
        }
        Ok(self.client.found.is_some())
    }

    fn stirs(&self) -> bool {
        self.client.replies.has_messages() || (self.room().is_some() && self.client.outbox.sender.stirs())
    }

    fn arm(&mut self) -> Result<bool> {
        if !Side::arm(&mut self.client.replies)? {
            return Ok(false);
        }
        let armed = match self.room() {
            Some(bytes) => match self.client.outbox.sender.arm_for_room(bytes) {
                // The lane of replies tells it, after what was answered.
                Err(error) if matches!(self.want, Want::Any | Want::Of(_)) && is_end(&error) => Ok(true),
                armed => armed,
            },
            None => Ok(true),
        };
        if !matches!(armed, Ok(true)) {
            Side::disarm(&mut self.client.replies);
        }
        armed
    }

    fn disarm(&mut self) {
        self.client.disarm();
    }

    fn end(&mut self) -> Result<bool> {
        Side::end(&mut self.client.replies)
    }

    fn must_nap(&self) -> bool {
        Side::must_nap(&self.client.replies) || (self.room().is_some() && self.client.outbox.sender.must_nap())
    }

    fn sleep(&mut self, deadline: Option<Instant>) -> Result<Ready> {
        Side::sleep(&mut self.client.replies, deadline)
    }

    fn rung(&mut self) -> Result<bool> {
        Side::rung(&mut self.client.replies)
    }

    fn is_peer_known_gone(&mut self) -> Result<bool> {
        Side::is_peer_known_gone(&mut self.client.replies)
    }

    fn spin(&mut self) -> &mut Spin {
        Side::spin(&mut self.client.replies)
    }
}
