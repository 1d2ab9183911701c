//! The asking side of a link.

use super::calls::{Calls, State};
use super::crowd::{Crowd, Link};
use super::frame::{Assembly, By, CALLS_MAX, Clock, HEADER_BYTES, Header, Kind, check_size};
use super::{Body, LOOKS};
use crate::connect;
use crate::error::{Error, Result};
use crate::handshake::own_bells;
use crate::link::{Bells, Peer};
use crate::name::Name;
use crate::options::Options;
use crate::os::{Owner, Ready};
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
/// By `unix:PATH` it has one service. When that ends, every call in flight has failed: what it had answered is still received, and
/// then each method says [`Error::PeerDied`], or [`Error::Closed`] if it ended on purpose. Connect anew then.
///
/// Under a short name several processes may listen, each a service: the client asks the least busy, the one with the fewest of
/// this client's calls in flight, or by turns. It finds those that come later when one it knows goes, or in the course of some
/// hundred submissions. The calls of one that dies are [`Outcome::Lost`], unless [`Client::mark_idempotent`] allows them to be
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
    owner: Owner,
    bells: Bells,
    spin: Spin,
    reply_bytes_max: u64,
    clock: Clock,
    hold: Duration,
    late: u64,
    /// Of the one service.
    fate: Option<Fate>,
}

/// Which call: as [`Client::submit`] answers it, and as its [`Completion`]s say it. No two of a client's calls are the same in
/// 2^32 calls; then one may come again, so one that is over is not to be kept for as long as that.
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
// As large as the code of a failure: an outcome is copied on the way of each answer, and one with a byte at an odd place in pieces.
#[repr(u32)]
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
    /// That all messages are in the lane.
    Written,
}

/// What came of looking for a link to write by.
#[derive(Debug)]
enum Written {
    /// By the link at that place.
    By(usize),
    /// There is no room, or nobody yet.
    Full,
    Nobody,
}

/// What a record comes to.
enum Sorted {
    /// To somebody's answer, which is still in the lane.
    Answer(CallId, Outcome),
    /// To nothing in the lane.
    Nothing,
    /// To the end of what the service says.
    Drained,
}

/// Links that may turn out to be lost in one search for one to write by; the next search goes on.
const LINKS_LOST: usize = 16;

impl Client {
    /// Connects to the service that listens under `name` (a short name, or `unix:PATH`) with default [`Options`]. Fails at once
    /// when nobody does; waits some seconds at most for one that listens to accept. To others of a short name it connects in the
    /// course of being used.
    ///
    /// # Errors
    /// As [`Options::connect_sender`].
    pub fn connect(name: &str) -> Result<Client> {
        Options::new().connect_client(name)
    }

    pub(crate) fn with(name: &str, options: &Options) -> Result<Client> {
        options.checked_sizes()?;
        let (name, bells) = (Name::parse(name)?, own_bells()?);
        let (path, parts) = connect::connect_client(&name, options, &bells)?;
        let link = Link::new(parts, path, 1, options)?;
        let mut client = Client {
            spin: Spin::new(options.wait, link.peer()),
            crowd: name.is_of_many().then(|| Crowd::new(name, options)),
            links: vec![link],
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
            bells,
            reply_bytes_max: options.call_bytes_max,
            clock: Clock::new(),
            hold: options.hold,
            late: 0,
            fate: None,
        };
        client.look_around()?;
        Ok(client)
    }

    /// Asks and awaits the answer: its [`Outcome`] says whether it is a reply, the first part of one (then
    /// [`Client::completion_of`] brings the others), or a failure. Answers to other calls that come meanwhile are kept for
    /// later.
    ///
    /// # Errors
    /// As [`Client::submit`] and [`Client::completion_of`]. The call is over then, or cancelled.
    #[inline]
    pub fn call(&mut self, request: &[u8]) -> Result<Completion<'_>> {
        let call = self.submit(request)?;
        match self.find_of(call, Patience::Endless) {
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
        match self.find_of(call, Patience::Until(deadline)) {
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
    #[inline]
    pub fn try_submit(&mut self, request: &[u8]) -> Result<Option<CallId>> {
        self.submit_at_once(request, 0)
    }

    /// As [`Client::try_submit`], but waits for room. Answers that come meanwhile are kept for later.
    ///
    /// # Errors
    /// As [`Client::try_submit`]; [`Error::Refused`] when 1,024 answers, or more than [`Options::call_bytes_max`] of them, wait in
    /// memory to be taken by [`Client::completion`]: waiting would not help.
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
        let Some(call) = self.next_call() else { return Ok(None) };
        let header = Header { deadline, ..Header::new(Kind::Request, call.0) };
        if self.crowd.is_some() {
            return self.submit_to_any(call, header, request);
        }
        let written = match self.links[0].write(header, request) {
            Ok(written) => written,
            Err(error) => return Err(self.not_written(error)),
        };
        self.wanted = if written { None } else { Some(request.len()) };
        if written {
            self.begin(call, 0);
        }
        Ok(written.then_some(call))
    }

    #[inline(always)]
    fn next_call(&mut self) -> Option<CallId> {
        let is_place = self.aside.is_empty() || !self.is_sated();
        if is_place { self.calls.next() } else { None }
    }

    #[inline(always)]
    fn begin(&mut self, call: CallId, at: usize) {
        let link = &mut self.links[at];
        link.in_flight += 1;
        self.calls.begin(call, link.number);
    }

    /// Whether so many answers wait in memory that no more are to be asked for.
    #[cold]
    fn is_sated(&self) -> bool {
        self.aside_bytes > self.reply_bytes_max || self.aside_last >= CALLS_MAX as usize
    }

    #[inline(never)]
    fn submit_to_any(&mut self, call: CallId, header: Header, request: &[u8]) -> Result<Option<CallId>> {
        match self.write_to_any(header, request)? {
            Written::By(at) => {
                self.wanted = None;
                self.begin(call, at);
                self.calls.keep(call, header.deadline, request);
                self.count_submission();
                Ok(Some(call))
            }
            Written::Full => {
                self.wanted = Some(request.len());
                Ok(None)
            }
            Written::Nobody => Err(self.nobody()),
        }
    }

    fn count_submission(&mut self) {
        if let Some(crowd) = &mut self.crowd {
            crowd.count(&mut self.links, &self.bells);
        }
    }

    #[cold]
    fn nobody(&self) -> Error {
        let name = self.crowd.as_ref().map_or(String::new(), |crowd| crowd.name.with_place());
        Error::NoListener { name }
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

    /// Writes to the least busy service that has room.
    fn write_to_any(&mut self, header: Header, payload: &[u8]) -> Result<Written> {
        for _ in 0..=LINKS_LOST {
            let Some(best) = self.least_busy() else {
                match self.find_somebody()? {
                    Written::By(_) => continue,
                    none => return Ok(none),
                }
            };
            let takes = |link: &Link| link.is_open() && payload.len() as u64 <= link.request_bytes_max;
            let mut at = best;
            let lost = loop {
                if takes(&self.links[at]) {
                    match self.links[at].write(header, payload) {
                        Ok(true) => return Ok(Written::By(at)),
                        Ok(false) => {}
                        Err(error) if is_end(&error) => self.links[at].has_left = true,
                        Err(error) => break Some(error),
                    }
                }
                at = (at + 1) % self.links.len();
                if at == best {
                    break None;
                }
            };
            match lost {
                Some(error) => self.link_failed(at, error)?,
                None if self.links.iter().any(takes) => return Ok(Written::Full),
                // Those who are left take less than one that has gone.
                None if self.links.iter().any(Link::is_open) => check_size(payload.len(), self.request_bytes_max())?,
                None => {}
            }
        }
        Ok(Written::Full)
    }

    /// The link with the fewest calls in flight; of those the next.
    fn least_busy(&mut self) -> Option<usize> {
        let count = self.links.len();
        let turns = (0..count).map(|step| (self.next_open + step) % count);
        let best = turns.filter(|at| self.links[*at].is_open()).min_by_key(|at| self.links[*at].in_flight)?;
        self.next_open = best + 1;
        Some(best)
    }

    /// There is no link to write by: looks for others. By: there is one now.
    #[cold]
    fn find_somebody(&mut self) -> Result<Written> {
        self.look_around()?;
        let Some(crowd) = &mut self.crowd else { return Ok(Written::Nobody) };
        if self.links.iter().any(Link::is_open) {
            return Ok(Written::By(0));
        }
        if crowd.is_reaching() {
            return Ok(Written::Full);
        }
        // What those said who do not want this client.
        crowd.take_why().map_or(Ok(Written::Nobody), Err)
    }

    /// Looks who else listens under a name of many.
    #[cold]
    fn look_around(&mut self) -> Result<()> {
        let Some(crowd) = &mut self.crowd else { return Ok(()) };
        if self.owner.is_forked() {
            return Err(Error::Forked);
        }
        let looked = crowd.look(&mut self.links, &self.bells);
        self.meet();
        looked
    }

    /// Goes on with hand-shakes.
    fn attend(&mut self) {
        if let Some(crowd) = &mut self.crowd
            && crowd.is_reaching()
            && !self.owner.is_forked()
        {
            crowd.attend(&mut self.links, &self.bells);
            self.meet();
        }
    }

    fn meet(&mut self) {
        if let Some(link) = self.links.last() {
            self.spin.meet(link.peer());
        }
    }

    /// What is to be said of a write that failed, when there is one service.
    #[cold]
    fn not_written(&mut self, error: Error) -> Error {
        match error {
            Error::Corrupt(_) => self.link_failed(0, error).expect_err("there is no other"),
            // The lane of replies tells it, after what was answered.
            error => error,
        }
    }

    #[inline(always)]
    fn check(&self, bytes: usize) -> Result<()> {
        if self.fate.is_some() {
            return Err(self.ended_before());
        }
        match &self.crowd {
            None => check_size(bytes, self.links[0].request_bytes_max),
            Some(_) => self.check_of_many(bytes),
        }
    }

    #[inline(never)]
    fn check_of_many(&self, bytes: usize) -> Result<()> {
        if self.owner.is_forked() {
            return Err(Error::Forked);
        }
        check_size(bytes, self.request_bytes_max())
    }

    /// Reserves room for a request of `bytes`, to be written in place; `None` when there is none now, or 1,024 calls are in flight.
    /// Until it is submitted nothing is seen of it; dropping it gives the room back. Never waits.
    ///
    /// # Errors
    /// As [`Client::try_submit`]; [`Error::TooLarge`] also for more than the lane's largest message less 24 bytes: what is
    /// larger travels in pieces, by [`Client::submit`].
    pub fn try_reserve(&mut self, bytes: usize) -> Result<Option<RequestRoom<'_>>> {
        self.check(bytes)?;
        let Some(call) = self.next_call() else { return Ok(None) };
        Ok(self.room(bytes)?.map(|(at, space)| RequestRoom { client: self, call, at, space }))
    }

    fn room(&mut self, bytes: usize) -> Result<Option<(usize, Space)>> {
        let best = match self.crowd.is_some() {
            true => match self.least_busy() {
                Some(best) => best,
                None => match self.find_somebody()? {
                    Written::By(_) => self.least_busy().unwrap_or(0),
                    Written::Full => return Ok(None),
                    Written::Nobody => return Err(self.nobody()),
                },
            },
            false => 0,
        };
        for step in 0..self.links.len() {
            let at = (best + step) % self.links.len();
            let link = &mut self.links[at];
            if self.crowd.is_some() && !link.is_open() {
                continue;
            }
            let flushed = link.outbox.flush();
            match flushed.and_then(|all| if all { link.outbox.sender.try_room(bytes) } else { Ok(None) }) {
                Ok(Some(space)) => {
                    self.wanted = None;
                    return Ok(Some((at, space)));
                }
                Ok(None) => {}
                Err(error) if self.crowd.is_none() => return Err(self.not_written(error)),
                Err(error) if is_end(&error) => link.has_left = true,
                Err(error) => {
                    self.link_failed(at, error)?;
                    break;
                }
            }
        }
        self.wanted = Some(bytes);
        Ok(None)
    }

    /// As [`Client::try_reserve`], but waits for room. Answers that come meanwhile are kept for later.
    ///
    /// # Errors
    /// As [`Client::try_reserve`] and [`Client::submit`].
    pub fn reserve(&mut self, bytes: usize) -> Result<RequestRoom<'_>> {
        loop {
            self.check(bytes)?;
            if let Some(call) = self.next_call()
                && let Some((at, space)) = self.room(bytes)?
            {
                return Ok(RequestRoom { client: self, call, at, space });
            }
            self.find(Want::Room { bytes, is_call: true }, Patience::Endless)?;
        }
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
    /// [`Options::call_bytes_max`] of parts of other calls' replies wait to be taken. Of a name of many services what
    /// [`Outcome::Lost`] says is an error here: [`Error::PeerDied`], [`Error::Closed`], [`Error::Corrupt`], [`Error::NoListener`];
    /// the client goes on.
    #[inline]
    pub fn completion_of(&mut self, call: CallId) -> Result<Completion<'_>> {
        let found = self.find_of(call, Patience::Endless)?.expect("without a deadline it does not pass");
        Ok(self.completed(found))
    }

    /// As [`Client::completion_of`], until `deadline`; `None` when it passes, and the call stays in flight.
    ///
    /// # Errors
    /// As [`Client::completion_of`].
    pub fn completion_of_until(&mut self, call: CallId, deadline: Instant) -> Result<Option<Completion<'_>>> {
        Ok(self.find_of(call, Patience::Until(deadline))?.map(|found| self.completed(found)))
    }

    /// As [`Client::find`], of one call: that it was lost is an error.
    #[inline(always)]
    fn find_of(&mut self, call: CallId, patience: Patience) -> Result<Option<Found>> {
        match self.find(Want::Of(call), patience)? {
            Some(Found::Apart(Answer { outcome: Outcome::Lost(loss), .. })) => Err(self.lost(loss)),
            found => Ok(found),
        }
    }

    /// What is said of a call that was lost to who awaits that one.
    #[cold]
    pub(crate) fn lost(&self, loss: Loss) -> Error {
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

    /// Tells the service something that it does not answer. Waits for room; answers that come meanwhile are kept for later.
    ///
    /// # Errors
    /// As [`Client::submit`].
    pub fn notify(&mut self, message: &[u8]) -> Result<()> {
        while !self.try_notify(message)? {
            self.find(Want::Room { bytes: message.len(), is_call: false }, Patience::Endless)?;
        }
        // Nothing will come of it that could be waited for: what is large is all in the lane before this returns.
        if self.links.iter().any(|link| !link.outbox.is_empty()) {
            self.find(Want::Written, Patience::Endless)?;
        }
        Ok(())
    }

    /// As [`Client::notify`], if there is room now; false otherwise. Never waits: of what is larger than the lane's largest
    /// message a copy is written as room comes, whenever this client is used. A service that ends, also one that drains, may not have
    /// taken it.
    ///
    /// # Errors
    /// As [`Client::try_submit`].
    pub fn try_notify(&mut self, message: &[u8]) -> Result<bool> {
        self.check(message.len())?;
        let header = Header::new(Kind::Notify, 0);
        let written = match self.crowd.is_some() {
            true => match self.write_to_any(header, message)? {
                Written::By(_) => true,
                Written::Full => false,
                Written::Nobody => return Err(self.nobody()),
            },
            false => self.links[0].write(header, message).map_err(|error| self.not_written(error))?,
        };
        self.wanted = if written { None } else { Some(message.len()) };
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
        let Some(link) = self.links.iter_mut().find(|link| link.number == number) else {
            // No service has it.
            self.homeless.retain(|homeless| *homeless != call);
            self.calls.end(call.0);
            return Ok(true);
        };
        self.calls.give_up(call);
        let header = Header::new(Kind::Cancel, call.0);
        match link.write(header, &[]) {
            Ok(true) => {}
            Ok(false) => link.outbox.push(header, &[]),
            // Who has gone need not be told, and the lane of replies tells of it.
            Err(error) if is_end(&error) => {}
            Err(error) if self.crowd.is_none() => return Err(self.not_written(error)),
            Err(_) => link.has_left = true,
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
        self.links.iter().filter(|link| link.is_open()).count()
    }

    /// Calls whose last answer has not come, also those given up.
    pub fn in_flight(&self) -> usize {
        self.calls.count()
    }

    /// Answers that came to calls that had been given up, and were dropped.
    pub fn late(&self) -> u64 {
        self.late
    }

    /// The largest request, in bytes, as the service says; of several the least.
    pub fn request_bytes_max(&self) -> u64 {
        self.links.iter().map(|link| link.request_bytes_max).min().unwrap_or(u64::MAX)
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
        wait::linger(&mut side, hold)?;
        // Of both lanes of all links.
        side.client.bells.drain();
        side.wanted = side.client.wanted;
        let mut armed = side.arm()?;
        if armed && side.client.bells.sleep_for_any(Some(Instant::now()))? == Ready::Gone {
            side.disarm();
            // Told after what was answered.
            let _ = side.look()? || side.end()?;
            armed = false;
        }
        armed &= self.found.is_none() && self.aside.is_empty();
        if !armed || (Awaiting { wanted: self.wanted, client: self, want: Want::Any }).must_nap() {
            self.bells.nudge().ring();
        }
        Ok(armed)
    }

    /// Nobody wants the room any more that there was not.
    #[cfg(feature = "tokio")]
    pub(crate) fn forget_room(&mut self) {
        self.wanted = None;
    }

    /// Whether something waits for room that was asked for, and so is to be armed for.
    #[cfg(feature = "tokio")]
    pub(crate) fn has_unwritten(&self) -> bool {
        self.links.iter().any(|link| !link.outbox.is_empty()) || !self.homeless.is_empty()
    }

    #[cfg(feature = "tokio")]
    pub(crate) fn reply_bytes_max(&self) -> u64 {
        self.reply_bytes_max
    }

    /// Takes [`Client::arm`] back.
    pub fn disarm(&mut self) {
        for link in &mut self.links {
            link.replies.disarm();
            link.outbox.sender.disarm();
        }
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
            if self.links.len() == 1
                && self.links[0].replies.record_comes_soon()
                && let Some(found) = self.look_for(want)?
            {
                return Ok(Some(found));
            }
        }
        self.wait_for(want, deadline)
    }

    #[cold]
    fn wait_for(&mut self, want: Want, deadline: Option<Instant>) -> Result<Option<Found>> {
        while wait::wait(&mut Awaiting { client: self, want, wanted: None }, deadline)? {
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
            _ => self.calls.waiting() > 0,
        };
        if is_awaited { Ok(()) } else { Err(not_in_flight()) }
    }

    fn completed(&mut self, found: Found) -> Completion<'_> {
        match found {
            Found::InPlace(record, call, outcome, at) => {
                if outcome == Outcome::Part {
                    self.calls.note_part(call);
                }
                Completion { call, outcome, body: Body::InPlace(self.links[at].replies.message(record)) }
            }
            Found::Apart(Answer { call, outcome, bytes }) => Completion { call, outcome, body: Body::Apart(bytes) },
            Found::Room => unreachable!("a completion was wanted"),
        }
    }

    /// What is wanted, if it is there now: of what else has come before it, answers to other calls are put aside.
    #[inline(always)]
    fn look_for(&mut self, want: Want) -> Result<Option<Found>> {
        let usual = self.fate.is_none()
            && self.found.is_none()
            && self.aside.is_empty()
            && self.links.len() == 1
            && self.links[0].outbox.is_empty()
            && self.homeless.is_empty();
        if !usual || matches!(want, Want::Room { .. } | Want::Written) {
            return self.look_everywhere(want);
        }
        match self.look_at(0, want) {
            Err(error) => self.look_elsewhere(0, error, want),
            found => found,
        }
    }

    /// As [`Client::look_for`], when there is more than one lane of replies to look at.
    #[inline(never)]
    fn look_everywhere(&mut self, want: Want) -> Result<Option<Found>> {
        if let Some(found) = self.look_aside(want)? {
            return Ok(Some(found));
        }
        for _ in 0..self.links.len() {
            let at = if self.turn < self.links.len() { self.turn } else { 0 };
            self.turn = at + 1;
            match self.look_at(at, want) {
                Ok(None) => {}
                Ok(found) => return Ok(found),
                Err(error) => return self.look_elsewhere(at, error, want),
            }
        }
        match want {
            Want::Any | Want::Of(_) => Ok(None),
            _ => self.look_for_room(want),
        }
    }

    /// That link has failed; but of a name of many services there may be others.
    #[cold]
    fn look_elsewhere(&mut self, at: usize, error: Error, want: Want) -> Result<Option<Found>> {
        self.link_failed(at, error)?;
        match self.look_aside(want)? {
            Some(found) => Ok(Some(found)),
            // To those who want a place or room there may be some by another; and who waits looks again.
            None if matches!(want, Want::Room { .. }) => Ok(Some(Found::Room)),
            None => Ok(None),
        }
    }

    /// As [`Client::look_for`], in one link's lane of replies.
    #[inline(always)]
    fn look_at(&mut self, at: usize, want: Want) -> Result<Option<Found>> {
        for _ in 0..LOOKS {
            let Some(record) = self.links[at].replies.next_record()? else { break };
            match self.sort(at, &record)? {
                Sorted::Answer(call, outcome) if want == Want::Any || want == Want::Of(call) => {
                    return Ok(Some(Found::InPlace(record, call, outcome, at)));
                }
                Sorted::Answer(call, outcome) => {
                    self.copy_aside(at, &record, call, outcome);
                    self.check_parts(want)?;
                }
                Sorted::Nothing => {}
                Sorted::Drained => return Err(Error::Closed { unreleased: 0 }),
            }
            // Perhaps the last piece of one.
            if !self.aside.is_empty()
                && let Some(found) = self.take_aside(want)
            {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    fn look_for_room(&mut self, want: Want) -> Result<Option<Found>> {
        let Want::Room { bytes, is_call } = want else { return Ok(self.flush(want)?.then_some(Found::Room)) };
        if is_call && self.is_sated() {
            return Err(Error::Refused(format!(
                "{} answers of {} bytes in all wait: take them by completion before asking for more",
                self.aside.len(),
                self.aside_bytes
            )));
        }
        if is_call && self.calls.is_full() {
            return Ok(None);
        }
        let is_one = self.crowd.is_none();
        let mut is_somebody = false;
        for at in 0..self.links.len() {
            let link = &mut self.links[at];
            if !(is_one || link.is_open()) {
                continue;
            }
            is_somebody = true;
            let is_room = |link: &mut Link| -> Result<bool> {
                Ok(link.outbox.flush()?
                    && (!link.outbox.is_whole(bytes) || link.outbox.sender.try_room(bytes)?.is_some()))
            };
            match is_room(link) {
                Ok(true) => return Ok(Some(Found::Room)),
                Ok(false) => {}
                Err(error) if is_one => return Err(self.not_written(error)),
                // Who wants it is told by trying.
                Err(_) => return Ok(Some(Found::Room)),
            }
        }
        // As above, when nobody is on the way either.
        let is_reaching = self.crowd.as_ref().is_some_and(Crowd::is_reaching);
        Ok((!is_somebody && !is_reaching).then_some(Found::Room))
    }

    /// Writes what there is room for. True: nothing waits any more.
    fn flush(&mut self, want: Want) -> Result<bool> {
        let mut is_all = true;
        for at in 0..self.links.len() {
            let link = &mut self.links[at];
            if link.outbox.is_empty() {
                continue;
            }
            match link.outbox.flush() {
                Ok(flushed) => is_all &= flushed,
                // To who awaits an answer the lane of replies tells it, after what was answered.
                Err(error) if is_end(&error) && (self.crowd.is_some() || matches!(want, Want::Any | Want::Of(_))) => {
                    link.has_left = true;
                    link.outbox.clear();
                }
                Err(error) if self.crowd.is_none() => return Err(self.not_written(error)),
                // Its lane of requests is damaged, and is not looked at again.
                Err(_) => {
                    link.has_left = true;
                    link.outbox.clear();
                }
            }
        }
        Ok(is_all)
    }

    /// What there is to do, and to be found, apart from the lanes of replies.
    #[cold]
    fn look_aside(&mut self, want: Want) -> Result<Option<Found>> {
        if self.fate == Some(Fate::Broken) {
            return Err(self.ended_before());
        }
        match (want, self.found.take()) {
            (Want::Room { .. } | Want::Written, Some(Found::Room)) => return Ok(Some(Found::Room)),
            (Want::Any, found @ Some(Found::InPlace(..) | Found::Apart(_))) => return Ok(found),
            (Want::Of(call), Some(found)) if found.call() == Some(call) => return Ok(Some(found)),
            (_, found) => {
                self.found = found;
                self.keep_found();
            }
        }
        if self.fate.is_none() {
            self.flush(want)?;
            self.house()?;
        }
        if let Some(found) = self.take_aside(want) {
            return Ok(Some(found));
        }
        self.check_parts(want)?;
        if self.fate.is_some() { Err(self.ended_before()) } else { Ok(None) }
    }

    fn take_aside(&mut self, want: Want) -> Option<Found> {
        let place = match want {
            Want::Any => (!self.aside.is_empty()).then_some(0),
            Want::Of(call) => self.aside.iter().position(|answer| answer.call == call),
            Want::Room { .. } | Want::Written => None,
        };
        Some(Found::Apart(self.remove_aside(place?)))
    }

    fn remove_aside(&mut self, place: usize) -> Answer {
        let answer = self.aside.remove(place).expect("it was found there");
        self.aside_bytes -= answer.cost();
        match answer.outcome.is_final() {
            true => self.aside_last -= 1,
            false => self.part_bytes -= answer.cost(),
        }
        answer
    }

    /// Puts aside what was found for somebody else.
    fn keep_found(&mut self) {
        match self.found.take() {
            Some(Found::InPlace(record, call, outcome, at)) => self.copy_aside(at, &record, call, outcome),
            Some(Found::Apart(answer)) => self.put_aside(answer),
            Some(Found::Room) | None => {}
        }
    }

    #[inline(never)]
    fn copy_aside(&mut self, at: usize, record: &Record, call: CallId, outcome: Outcome) {
        let mut bytes = Vec::new();
        let replies = &mut self.links[at].replies;
        replies.append(record, HEADER_BYTES, &mut bytes);
        replies.release_record(record);
        self.put_aside(Answer { call, outcome, bytes });
    }

    /// Makes room in the lane by keeping an answer in memory.
    fn put_aside(&mut self, answer: Answer) {
        self.aside_bytes += answer.cost();
        match answer.outcome.is_final() {
            true => self.aside_last += 1,
            false => {
                self.part_bytes += answer.cost();
                self.calls.note_part(answer.call);
            }
        }
        self.aside.push_back(answer);
    }

    /// Last answers are as many as there are calls; of parts there is no end.
    #[inline(always)]
    fn check_parts(&self, want: Want) -> Result<()> {
        if want == Want::Any || self.part_bytes <= self.reply_bytes_max { Ok(()) } else { Err(self.too_many_parts()) }
    }

    #[cold]
    fn too_many_parts(&self) -> Error {
        Error::Refused(format!(
            "{} bytes of parts of other calls' replies wait: take them by completion first, or cancel their calls",
            self.part_bytes
        ))
    }

    /// What the next record is; if it is no answer that is whole, and awaited, it has been released.
    #[inline(always)]
    fn sort(&mut self, at: usize, record: &Record) -> Result<Sorted> {
        let link = &mut self.links[at];
        let payload_bytes = record.bytes.saturating_sub(HEADER_BYTES as u64);
        let read = match link.replies.header(record) {
            Some(words) => Header::read(words, payload_bytes, By::Service),
            None => Err("length"),
        };
        let header = read.map_err(|rule| broken(rule, record))?;
        if payload_bytes > self.reply_bytes_max {
            return Err(broken("size", record));
        }
        if matches!(header.kind, Kind::Draining | Kind::Drained | Kind::Returned) {
            return self.sort_of_drain(at, record, header);
        }
        let state = self.calls.state_at(header.id, link.number);
        if state == State::Free {
            return Err(broken("id", record));
        }
        if header.more || header.continued {
            return self.assemble(at, record, header).map(|()| Sorted::Nothing);
        }
        if header.kind.is_final() {
            link.in_flight -= 1;
            self.calls.end(header.id);
        }
        if state == State::GivenUp {
            self.late += 1;
            link.replies.release_record(record);
            return Ok(Sorted::Nothing);
        }
        Ok(Sorted::Answer(CallId(header.id), outcome_of(&header)))
    }

    #[cold]
    fn assemble(&mut self, at: usize, record: &Record, header: Header) -> Result<()> {
        let link = &mut self.links[at];
        Assembly::check(&link.assembly, &header).map_err(|rule| broken(rule, record))?;
        let mut assembly = link.assembly.take().unwrap_or_else(|| Assembly { header, bytes: Vec::new() });
        if assembly.bytes.len() as u64 + record.bytes - HEADER_BYTES as u64 > self.reply_bytes_max {
            return Err(broken("size", record));
        }
        let is_awaited = self.calls.state(header.id) == State::Waiting;
        // What nobody waits for is not kept, but its end is to be known.
        if is_awaited {
            link.replies.append(record, HEADER_BYTES, &mut assembly.bytes);
        } else {
            assembly.bytes.clear();
        }
        link.replies.release_record(record);
        if header.more {
            link.assembly = Some(assembly);
            return Ok(());
        }
        if header.kind.is_final() {
            link.in_flight -= 1;
            self.calls.end(header.id);
        }
        let Assembly { header, bytes } = assembly;
        match is_awaited {
            true => self.put_aside(Answer { call: CallId(header.id), outcome: outcome_of(&header), bytes }),
            false => self.late += 1,
        }
        Ok(())
    }

    /// What a service says that takes no more requests.
    #[cold]
    fn sort_of_drain(&mut self, at: usize, record: &Record, header: Header) -> Result<Sorted> {
        let link = &mut self.links[at];
        let call = CallId(header.id);
        match header.kind {
            Kind::Returned => {
                let state = self.calls.state_at(header.id, link.number);
                if state == State::Free {
                    return Err(broken("id", record));
                }
                // Nothing of it may have been carried out.
                let is_begun = self.calls.has_part(header.id)
                    || link.assembly.as_ref().is_some_and(|of| of.header.id == header.id);
                if !link.is_draining || is_begun {
                    return Err(broken("kind", record));
                }
                link.replies.release_record(record);
                link.in_flight -= 1;
                self.lose_call(call, Loss::Returned);
            }
            kind => {
                link.replies.release_record(record);
                link.is_draining = true;
                if kind == Kind::Drained {
                    link.is_drained = true;
                    return Ok(Sorted::Drained);
                }
                // Whoever listens now has perhaps come for it. Otherwise it is looked for when somebody asks.
                let _ = self.look_around();
            }
        }
        Ok(Sorted::Nothing)
    }

    /// The service of a call does not answer it.
    fn lose_call(&mut self, call: CallId, loss: Loss) {
        let is_awaited = self.calls.state(call.0) == State::Waiting;
        // Who has given a part of it had begun it, whatever it says.
        let loss = if loss == Loss::Returned && self.calls.has_part(call.0) { Loss::Corrupt } else { loss };
        if is_awaited && self.crowd.is_some() && self.calls.may_move(call, loss) {
            self.calls.unhouse(call, loss);
            self.homeless.push_back(call);
            return;
        }
        self.calls.end(call.0);
        if is_awaited {
            self.put_aside(Answer { call, outcome: Outcome::Lost(loss), bytes: Vec::new() });
        }
    }

    /// Submits calls whose service is lost to another.
    #[cold]
    fn house(&mut self) -> Result<()> {
        while let Some(call) = self.homeless.front().copied() {
            let (deadline, request) = self.calls.take_kept(call);
            let header = Header { deadline, ..Header::new(Kind::Request, call.0) };
            let written = self.write_to_any(header, &request);
            self.calls.put_back(call, request);
            match written {
                Ok(Written::By(at)) => {
                    let link = &mut self.links[at];
                    link.in_flight += 1;
                    self.calls.house(call, link.number);
                }
                Ok(Written::Full) => return Ok(()),
                Err(error @ Error::Forked) => return Err(error),
                // Those who are there do not want this client, or cannot be reached.
                Ok(Written::Nobody) | Err(_) => {
                    let loss = self.calls.loss(call);
                    self.calls.end(call.0);
                    self.put_aside(Answer { call, outcome: Outcome::Lost(loss), bytes: Vec::new() });
                }
            }
            self.homeless.pop_front();
        }
        Ok(())
    }

    /// What is to be done when the link at that place has failed: an error if there is no going on.
    #[cold]
    fn link_failed(&mut self, at: usize, error: Error) -> Result<()> {
        let link = &mut self.links[at];
        let loss = match error {
            Error::Closed { .. } | Error::PeerDied { .. } if link.is_drained => Loss::Returned,
            Error::PeerDied { .. } if !link.outbox.sender.has_receiver_closed() => Loss::PeerDied,
            Error::Closed { .. } | Error::PeerDied { .. } => Loss::Closed,
            Error::Corrupt(_) => Loss::Corrupt,
            error => return Err(error),
        };
        if self.crowd.is_none() && loss != Loss::Returned {
            let unreleased = link.outbox.sender.unreleased();
            self.fate = Some(match loss {
                Loss::PeerDied => Fate::Died(unreleased),
                Loss::Corrupt => Fate::Broken,
                _ => Fate::Closed(unreleased),
            });
            link.outbox.clear();
            link.replies.retire();
            return Err(if loss == Loss::Corrupt { error } else { self.ended_before() });
        }
        self.keep_found();
        let number = self.links[at].number;
        for call in self.calls.of_link(number) {
            self.lose_call(call, loss);
        }
        match self.crowd.is_some() {
            true => drop(self.links.swap_remove(at)),
            // There is no other, and this one takes nothing.
            false => self.fate = Some(Fate::Closed(0)),
        }
        // An error is told to who asks next, and finds nobody.
        let _ = self.look_around();
        Ok(())
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

#[cold]
fn broken(rule: &str, record: &Record) -> Error {
    Error::Corrupt(format!("the service's message {} breaks the rule {rule:?} of calls", record.seq))
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
        self.bells.as_fd()
    }
}

/// Room for a request, to be written in place; see [`Client::try_reserve`].
#[derive(Debug)]
pub struct RequestRoom<'a> {
    client: &'a mut Client,
    call: CallId,
    /// By which of its links.
    at: usize,
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
        let RequestRoom { client, call, at, space } = self;
        if client.crowd.is_some() {
            let sender = &client.links[at].outbox.sender;
            let kept = sender.room_read(space).get(..bytes).unwrap_or_default().to_vec();
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
    fn publish(&mut self, call: CallId, at: usize, space: Space, bytes: usize) -> Result<()> {
        self.links[at].outbox.sender.publish_room(space, Header::new(Kind::Request, call.0).words(), bytes)?;
        self.begin(call, at);
        Ok(())
    }
}

impl std::ops::Deref for RequestRoom<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.client.links[self.at].outbox.sender.room_read(self.space)
    }
}

impl std::ops::DerefMut for RequestRoom<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.client.links[self.at].outbox.sender.room(self.space)
    }
}

/// A client that waits, on both lanes of each link at once: replies are taken while it waits for room for a request, so that two
/// full lanes never wait for each other.
struct Awaiting<'a> {
    client: &'a mut Client,
    want: Want,
    /// Bytes of a message that there is to be room for besides.
    wanted: Option<usize>,
}

impl Awaiting<'_> {
    /// The most bytes of a record that there has to be room for in that link's lane, if there has.
    fn room(&self, link: &Link) -> Option<usize> {
        let Client { calls, homeless, crowd, .. } = &*self.client;
        if !link.outbox.is_empty() {
            return Some(link.outbox.wanted());
        }
        // The usual wait, which asks this again and again.
        if crowd.is_none() && self.wanted.is_none() && matches!(self.want, Want::Any | Want::Of(_)) {
            return None;
        }
        if crowd.is_some() && !link.is_open() {
            return None;
        }
        let whole = |bytes| if link.outbox.is_whole(bytes) { bytes } else { 0 };
        if let Some(call) = homeless.front() {
            return Some(whole(calls.kept_bytes(*call)));
        }
        match self.want {
            // A place comes by an answer.
            Want::Room { is_call: true, .. } if calls.is_full() => None,
            Want::Room { bytes, .. } => Some(whole(bytes)),
            _ => self.wanted.map(whole),
        }
    }

    fn failed(&mut self, at: usize, error: Error) -> Result<bool> {
        self.client.link_failed(at, error).map(|()| true)
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
        let stirs =
            |link: &Link| link.replies.has_messages() || (self.room(link).is_some() && link.outbox.sender.stirs());
        self.client.links.iter().any(stirs)
    }

    fn arm(&mut self) -> Result<bool> {
        self.client.attend();
        let mut armed = true;
        for at in 0..self.client.links.len() {
            let room = self.room(&self.client.links[at]);
            let link = &mut self.client.links[at];
            let done = match (Side::arm(&mut link.replies), room) {
                (Ok(true), Some(bytes)) => match link.outbox.sender.arm_for_room(bytes) {
                    Err(error) if is_end(&error) => {
                        link.has_left = true;
                        match self.want {
                            // The lane of replies tells it, after what was answered.
                            Want::Any | Want::Of(_) => Ok(true),
                            // There may be room elsewhere.
                            _ if self.client.crowd.is_some() => Ok(false),
                            _ => {
                                self.disarm();
                                return Err(error);
                            }
                        }
                    }
                    armed => armed,
                },
                (armed, _) => armed,
            };
            match done {
                Ok(true) => {}
                Ok(false) => armed = false,
                Err(error) => {
                    self.disarm();
                    return self.failed(at, error).map(|_| false);
                }
            }
        }
        if !armed {
            self.disarm();
        }
        Ok(armed)
    }

    fn disarm(&mut self) {
        self.client.disarm();
    }

    fn end(&mut self) -> Result<bool> {
        for at in 0..self.client.links.len() {
            match Side::end(&mut self.client.links[at].replies) {
                Ok(false) => {}
                Ok(true) => return Ok(true),
                Err(error) => return self.failed(at, error),
            }
        }
        Ok(false)
    }

    fn must_nap(&self) -> bool {
        let must_nap =
            |link: &Link| Side::must_nap(&link.replies) || (self.room(link).is_some() && link.outbox.sender.must_nap());
        self.client.links.iter().any(must_nap)
    }

    fn sleep(&mut self, deadline: Option<Instant>) -> Result<Ready> {
        let is_reaching = self.client.crowd.as_ref().is_some_and(Crowd::is_reaching);
        match &mut self.client.links[..] {
            [link] if !is_reaching => Side::sleep(&mut link.replies, deadline),
            _ => self.client.bells.sleep_for_any(deadline),
        }
    }

    fn rung(&mut self) -> Result<bool> {
        self.client.bells.drain();
        self.client.attend();
        Ok(false)
    }

    fn is_peer_known_gone(&mut self) -> Result<bool> {
        self.client.attend();
        for link in &mut self.client.links {
            if Side::is_peer_known_gone(&mut link.replies)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn spin(&mut self) -> &mut Spin {
        &mut self.client.spin
    }
}
