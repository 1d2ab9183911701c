//! The client: submits requests, and waits for completions.
//!
//! [`Client`] is the public interface, and waits. Beneath it nothing waits: `balancer.rs` chooses between connections
//! (`connection.rs`) and finds more of them (`discovery.rs`); `../calls.rs` is the table of calls in flight;
//! `../inbox.rs` stores completions that came while something else was awaited. `submitting.rs`, `receiving.rs` and
//! `waiting.rs` connect these.

use super::frame::{Clock, Header, Kind, Size};
use crate::body::Body;
use crate::calls::{CallId, Calls, Loss, Outcome, State};
use crate::inbox::{Inbox, StoredCompletion};
use crate::outbox::FrameSender as _;
use pelton_channel::options::{Options, maker};
use pelton_channel::raw::{Polled, Settings, Side, Waiter, busy_poll, in_call, wait};
use pelton_channel::{Armed, Deadline, Error, Opening, Result, Sent};
use pelton_lane::{Record, ReservedSpace};
use pelton_os::Peer;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::{Duration, Instant};

mod balancer;
mod connection;
mod discovery;
mod receiving;
mod submitting;
mod waiting;

use balancer::{Balancer, is_end};
use connection::Connection;
use waiting::Waiting;

/// Calls a [`crate::Service`]. `Send`, not `Sync`: one thread at a time.
///
/// [`Client::call`] submits a request and awaits its completion. [`Client::submit`] submits without waiting, and
/// [`Client::completion`] returns the next completion of any of up to 1,024 calls in flight, in whatever order they
/// come. A completion is read in place, and released when the [`Completion`] is dropped.
///
/// By `unix:PATH` it has one service. When that ends, every call in flight has failed: the client still receives the
/// replies sent before, and then each method returns [`Error::PeerDied`], or [`Error::Closed`] if the service ended on
/// purpose. Connect again then.
///
/// Under a short name several processes may listen, each a service, of which a client uses at most 64. The client
/// submits to the least busy one: that with the fewest of this client's calls in flight, round-robin between equals. It
/// discovers new ones when a known one leaves, once in some hundred submissions, when there is no space, and while it
/// waits for space; in an event loop when it tries again. The calls of one that dies are [`Outcome::Lost`], unless
/// [`Client::mark_idempotent`] allows the client to submit them to another. Calls that a draining service had not begun
/// ([`crate::Stopper::drain`]) the client submits to another in any case. The client stays usable when services end.
/// For that it keeps a copy of each request until its final completion.
///
/// Dropping it closes: the service drops the requests that it has not taken, and nobody awaits the others.
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
///     assert_eq!(&*answer, if answer.call_id() == one { b"ONE" } else { assert_eq!(answer.call_id(), two); b"TWO" });
/// }
/// stopper.stop();
/// # serving.join().unwrap()
/// # }
/// ```
pub struct Client {
    pub(super) balancer: Balancer,
    calls: Calls,
    /// Completions of other calls than the one that was awaited when they came.
    inbox: Inbox,
    /// What a wait has found, for the function that waited.
    found: Option<Found>,
    /// A message that found no space, for [`Client::arm`].
    wanted: Option<Wanted>,
    reply_bytes_max: u64,
    clock: Clock,
    busy_poll: Duration,
    /// Messages and bytes submitted until the last busy-poll, and the mean size of the last of them.
    sent: (u64, u64),
    request_bytes: u64,
    completions_dropped: u64,
}

/// A completion of a call. Dropping it releases its space; until then the client can do nothing else.
///
/// Its bytes are in memory that the service wrote, unless they came in pieces or while something else was awaited. To
/// read them in place, trust the service not to write after it has replied. [`Completion::copy_into`] is safe against
/// any service.
#[must_use = "check `outcome`: a failed call is a completion too"]
pub struct Completion<'a> {
    pub(super) call: CallId,
    pub(super) outcome: Outcome,
    pub(super) body: Body<'a>,
    /// Index of the connection of a body in place.
    pub(super) at: usize,
}

impl Completion<'_> {
    /// Its call.
    pub fn call_id(&self) -> CallId {
        self.call
    }

    /// What it means.
    pub fn outcome(&self) -> Outcome {
        self.outcome
    }

    /// The completion, unless its call has failed: [`Client::call`] returns `Ok` for that too.
    ///
    /// # Errors
    /// [`Error::CallFailed`] with the service's code and bytes; [`Error::CallAbandoned`]; for a call that was lost,
    /// [`Error::PeerDied`], [`Error::Closed`] or [`Error::Corrupt`], and [`Error::Refused`] if a draining service
    /// returned it.
    #[inline]
    pub fn ok(self) -> Result<Self> {
        match self.outcome.error(|| self.body.bytes().to_vec()) {
            None => Ok(self),
            Some(error) => Err(error),
        }
    }

    /// Copies the bytes into `buffer`, whose contents they replace.
    #[inline]
    pub fn copy_into(&self, buffer: &mut Vec<u8>) {
        self.body.copy_into(buffer);
    }

    /// A copy of the bytes.
    pub fn into_vec(self) -> Vec<u8> {
        self.body.into_vec()
    }

    /// As [`Completion::into_vec`]. If a copy has to be made, `buffer` makes the memory for so many bytes.
    #[doc(hidden)]
    pub fn into_vec_in(self, buffer: impl FnOnce(usize) -> Vec<u8>) -> Vec<u8> {
        self.body.into_vec_in(buffer)
    }
}

impl std::ops::Deref for Completion<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.body.bytes()
    }
}

impl AsRef<[u8]> for Completion<'_> {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl std::fmt::Debug for Completion<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Completion")
            .field("call_id", &self.call)
            .field("outcome", &self.outcome)
            .field("bytes", &self.len())
            .finish_non_exhaustive()
    }
}

/// What a poll has found.
enum Found {
    /// In the lane of replies of the connection of that index, next at the cursor.
    InPlace(Record, CallId, Outcome, usize),
    Owned(StoredCompletion),
    /// There may be space.
    Space,
}

impl Found {
    fn call(&self) -> Option<CallId> {
        match self {
            Found::InPlace(_, call, ..) | Found::Owned(StoredCompletion { call, .. }) => Some(*call),
            Found::Space => None,
        }
    }
}

/// A message that found no space.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    size: Size,
    /// [`Client::arm`] has reported space for it.
    is_reported: bool,
}

impl Wanted {
    fn of(size: Size) -> Wanted {
        Wanted { size, is_reported: false }
    }
}

/// The condition of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Condition {
    /// A completion of any call.
    Any,
    /// A completion of this call.
    Of(CallId),
    /// Space for a request of this size, and a free slot if it `is_call`.
    Space { size: Size, is_call: bool },
    /// All queued messages are in the lane of the connection of that number.
    Written(u32),
}

impl Condition {
    fn is_completion(self) -> bool {
        matches!(self, Condition::Any | Condition::Of(_))
    }
}

impl Client {
    /// Connects to the service that listens under `name` (a short name, or `unix:PATH`) with default [`Options`]. Fails
    /// immediately when nobody listens; waits at most some seconds for a listening service to accept. Of a short name
    /// it connects to any service first, and to another when that one does not reply; it fails when none does. It
    /// connects to the others while it is used.
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
    pub fn connect_with(name: &str, options: &Options<maker::Client>) -> Result<Client> {
        in_call(Client::open(name.to_owned(), options.settings().clone(), Waiter::Thread))
    }

    /// As [`Client::connect_with`], but does not wait: the caller's event loop continues it. Under a short name it is
    /// open once it has connected to one service.
    ///
    /// # Errors
    /// As [`Options::start_connect_sender`].
    pub fn start_connect(name: &str, options: &Options<maker::Client>) -> Result<Opening<Client>> {
        let settings = options.settings().begun();
        Opening::new(|waiter| Client::open(name.to_owned(), settings, waiter))
    }

    async fn open(name: String, options: Settings, waiter: Waiter) -> Result<Client> {
        let options = options.of_link()?;
        options.checked_sizes()?;
        Ok(Client {
            balancer: Balancer::connect(&name, &options, &waiter).await?,
            calls: Calls::default(),
            inbox: Inbox::default(),
            found: None,
            wanted: None,
            reply_bytes_max: options.call_bytes_max,
            clock: Clock::new(),
            busy_poll: options.busy_poll,
            sent: (0, 0),
            request_bytes: 0,
            completions_dropped: 0,
        })
    }

    /// Submits a request and awaits its completion. The [`Outcome`] says whether that is a reply, the first part of one
    /// (then [`Client::completion_of`] returns the others), or a failure by the service. That is `Ok` here:
    /// [`Completion::ok`] turns it into an error. Completions of other calls that come meanwhile are stored.
    ///
    /// ```
    /// # fn main() -> pelton::Result<()> {
    /// # let name = format!("unix:{}/ok-doc-{}", std::env::temp_dir().display(), std::process::id());
    /// let mut service = pelton::Service::listen(&name)?;
    /// # let stopper = service.stopper();
    /// // Usually another process:
    /// let serving = std::thread::spawn(move || service.run(1, |request| _ = request.fail(7, b"not today")));
    ///
    /// let mut client = pelton::Client::connect(&name)?;
    /// match client.call(b"now")?.ok() {
    ///     Ok(reply) => println!("{} bytes", reply.len()),
    ///     Err(pelton::Error::CallFailed(failure)) => assert_eq!(failure.code, 7),
    ///     Err(error) => return Err(error),
    /// }
    /// # stopper.stop();
    /// # serving.join().unwrap()
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Client::submit`] and [`Client::completion_of`]. The call has ended then, or is cancelled.
    #[inline(always)]
    pub fn call(&mut self, request: &[u8]) -> Result<Completion<'_>> {
        let call = self.submit(request)?;
        match self.await_reply_fast(Some(call)) {
            Some(reply) => Ok(self.give_fast(reply)),
            None => self.call_slow(call),
        }
    }

    #[cold]
    #[inline(never)]
    fn call_slow(&mut self, call: CallId) -> Result<Completion<'_>> {
        match self.find_of(call, Deadline::Never) {
            Ok(found) => Ok(self.give(found.expect("without a deadline it does not pass"))),
            Err(error) => Err(self.cancel_after(call, error)),
        }
    }

    /// As [`Client::call`], until `deadline` on the monotonic clock, which goes to the service too; `None` when it
    /// passes: the call is cancelled then.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn call_until(&mut self, request: &[u8], deadline: impl Into<Deadline>) -> Result<Option<Completion<'_>>> {
        let deadline = deadline.into();
        let Some(call) = self.submit_until(request, deadline)? else { return Ok(None) };
        match self.find_of(call, deadline) {
            Ok(Some(found)) => Ok(Some(self.give(found))),
            Ok(None) => {
                self.cancel(call)?;
                Ok(None)
            }
            Err(error) => Err(self.cancel_after(call, error)),
        }
    }

    /// The user never got the id of this call, so it must not stay in flight.
    #[cold]
    fn cancel_after(&mut self, call: CallId, error: Error) -> Error {
        let _ = self.cancel(call);
        error
    }

    /// Submits a request, if there is space now, fewer than 1,024 calls are in flight, and not too many completions are
    /// stored; `None` otherwise: take completions, or use [`Client::submit`]. What finds no space of a request larger
    /// than the lane's largest message is copied, and written as space comes, whenever this client is used. Never
    /// waits.
    ///
    /// # Errors
    /// [`Error::TooLarge`] for more than the service takes ([`Client::request_bytes_max`]); [`Error::Closed`] and
    /// [`Error::PeerDied`] once the only service has ended; [`Error::NoListener`] while no service listens under a
    /// short name; [`Error::Corrupt`], [`Error::Forked`], [`Error::System`]. Nothing was submitted then.
    #[inline(always)]
    pub fn try_submit(&mut self, request: &[u8]) -> Result<Option<CallId>> {
        match self.submit_fast(request) {
            Some(call) => Ok(Some(call)),
            None => self.submit_now(request, 0),
        }
    }

    /// As [`Client::try_submit`], but waits for space. Completions that come meanwhile are stored.
    ///
    /// # Errors
    /// As [`Client::try_submit`]; [`Error::Refused`] when 1,024 final completions, or more than
    /// [`Options::call_bytes_max`] of bytes, are stored: take them by [`Client::completion`], since waiting would not
    /// help.
    #[inline(always)]
    pub fn submit(&mut self, request: &[u8]) -> Result<CallId> {
        match self.submit_fast(request) {
            Some(call) => Ok(call),
            None => self.submit_slow(request),
        }
    }

    #[cold]
    #[inline(never)]
    fn submit_slow(&mut self, request: &[u8]) -> Result<CallId> {
        match self.submit_now(request, 0)? {
            Some(call) => Ok(call),
            None => Ok(self.submit_waiting(request, Deadline::Never, 0)?.expect("without a deadline it does not pass")),
        }
    }

    /// As [`Client::submit`], until `deadline`; `None` when it passes. The deadline goes to the service, which need not
    /// reply after it.
    ///
    /// # Errors
    /// As [`Client::submit`].
    pub fn submit_until(&mut self, request: &[u8], deadline: impl Into<Deadline>) -> Result<Option<CallId>> {
        let deadline = deadline.into();
        let ns = deadline.instant().map_or(0, |instant| self.clock.ns_of(instant));
        match self.submit_now(request, ns)? {
            Some(call) => Ok(Some(call)),
            None => self.submit_waiting(request, deadline, ns),
        }
    }

    /// As [`Client::try_submit`], with a deadline for the service.
    #[doc(hidden)]
    pub fn try_submit_by(&mut self, request: &[u8], deadline: Instant) -> Result<Option<CallId>> {
        let ns = self.clock.ns_of(deadline);
        self.submit_now(request, ns)
    }

    /// Reserves space for a request of `bytes`, to be written in place; `None` when there is none now, or 1,024 calls
    /// are in flight. The service sees nothing of it before it is submitted; dropping it aborts. Never waits.
    ///
    /// # Errors
    /// As [`Client::try_submit`]; [`Error::TooLarge`] also for more than the lane's largest message less 24 bytes:
    /// larger requests travel in pieces, by [`Client::submit`].
    pub fn try_reserve(&mut self, bytes: usize) -> Result<Option<RequestReservation<'_>>> {
        self.balancer.check(bytes)?;
        let Some(call) = self.next_call() else { return Ok(None) };
        Ok(self.reserve_now(bytes)?.map(|(at, space)| RequestReservation { client: self, call, at, space }))
    }

    /// As [`Client::try_reserve`], but waits for space. Completions that come meanwhile are stored.
    ///
    /// # Errors
    /// As [`Client::try_reserve`] and [`Client::submit`].
    pub fn reserve(&mut self, bytes: usize) -> Result<RequestReservation<'_>> {
        Ok(self.reserve_waiting(bytes, Deadline::Never)?.expect("without a deadline it does not pass"))
    }

    /// As [`Client::reserve`], until `deadline`; `None` when it passes.
    ///
    /// # Errors
    /// As [`Client::reserve`].
    pub fn reserve_until(
        &mut self,
        bytes: usize,
        deadline: impl Into<Deadline>,
    ) -> Result<Option<RequestReservation<'_>>> {
        self.reserve_waiting(bytes, deadline.into())
    }

    fn reserve_waiting(&mut self, bytes: usize, deadline: Deadline) -> Result<Option<RequestReservation<'_>>> {
        loop {
            self.balancer.check(bytes)?;
            if let Some(call) = self.next_call()
                && let Some((at, space)) = self.reserve_now(bytes)?
            {
                return Ok(Some(RequestReservation { client: self, call, at, space }));
            }
            let condition = Condition::Space { size: Size::untraced(bytes), is_call: true };
            if self.find(condition, deadline)?.is_none() {
                return Ok(None);
            }
        }
    }

    /// The next completion of any call, if there is one now. Never waits.
    ///
    /// # Errors
    /// After the last completion: [`Error::Closed`] when the only service has closed, [`Error::PeerDied`] when it died;
    /// every call in flight has failed then. [`Error::Corrupt`] when it breaks the rules, [`Error::Forked`].
    #[inline(always)]
    pub fn try_completion(&mut self) -> Result<Option<Completion<'_>>> {
        if let Some(reply) = self.reply_fast(None) {
            return Ok(Some(self.give_fast(reply)));
        }
        self.completion_slow(Condition::Any, Deadline::Now)
    }

    /// The next completion of any call. Waits as the [`Wait`](pelton_channel::Wait) of the options says, without a
    /// bound.
    ///
    /// # Errors
    /// As [`Client::try_completion`]; [`Error::Refused`] when no call is in flight.
    #[inline(always)]
    pub fn completion(&mut self) -> Result<Completion<'_>> {
        if let Some(reply) = self.await_reply_fast(None) {
            return Ok(self.give_fast(reply));
        }
        Ok(self.completion_slow(Condition::Any, Deadline::Never)?.expect("without a deadline it does not pass"))
    }

    /// As [`Client::completion`], until `deadline`; `None` when it passes, and the calls stay in flight.
    ///
    /// # Errors
    /// As [`Client::completion`].
    pub fn completion_until(&mut self, deadline: impl Into<Deadline>) -> Result<Option<Completion<'_>>> {
        self.completion_slow(Condition::Any, deadline.into())
    }

    /// The next completion of this call. Waits for it; completions of other calls that come meanwhile are stored.
    ///
    /// # Errors
    /// As [`Client::completion`]; [`Error::Refused`] when this call is not in flight, and when more than
    /// [`Options::call_bytes_max`] of parts of other calls' replies are stored. By a short name, the cause of
    /// [`Outcome::Lost`] is an error here: [`Error::PeerDied`], [`Error::Closed`], [`Error::Corrupt`],
    /// [`Error::NoListener`]; the client stays usable.
    #[inline(always)]
    pub fn completion_of(&mut self, call: CallId) -> Result<Completion<'_>> {
        if let Some(reply) = self.await_reply_fast(Some(call)) {
            return Ok(self.give_fast(reply));
        }
        Ok(self.completion_slow(Condition::Of(call), Deadline::Never)?.expect("without a deadline it does not pass"))
    }

    /// As [`Client::completion_of`], if there is one now; `None` otherwise. Never waits.
    ///
    /// # Errors
    /// As [`Client::completion_of`].
    pub fn try_completion_of(&mut self, call: CallId) -> Result<Option<Completion<'_>>> {
        self.completion_slow(Condition::Of(call), Deadline::Now)
    }

    /// As [`Client::completion_of`], until `deadline`; `None` when it passes, and the call stays in flight.
    ///
    /// # Errors
    /// As [`Client::completion_of`].
    pub fn completion_of_until(
        &mut self,
        call: CallId,
        deadline: impl Into<Deadline>,
    ) -> Result<Option<Completion<'_>>> {
        self.completion_slow(Condition::Of(call), deadline.into())
    }

    #[cold]
    #[inline(never)]
    fn completion_slow(&mut self, condition: Condition, deadline: Deadline) -> Result<Option<Completion<'_>>> {
        let found = match condition {
            Condition::Of(call) => self.find_of(call, deadline)?,
            _ => self.find(condition, deadline)?,
        };
        if found.is_none() {
            // The user submits next, and so asks again. A loop that has dropped its request would never sleep.
            self.wanted = self.wanted.filter(|wanted| !wanted.is_reported);
        }
        Ok(found.map(|found| self.give(found)))
    }

    /// As [`Client::find`], of one call: its loss is an error.
    fn find_of(&mut self, call: CallId, deadline: Deadline) -> Result<Option<Found>> {
        match self.find(Condition::Of(call), deadline)? {
            Some(Found::Owned(StoredCompletion { outcome: Outcome::Lost(loss), .. })) => Err(self.loss_error(loss)),
            found => Ok(found),
        }
    }

    /// The error for a caller that awaits a call which was lost.
    #[doc(hidden)]
    #[cold]
    pub fn loss_error(&self, loss: Loss) -> Error {
        match loss {
            Loss::Returned if self.balancer.has_many() => self.balancer.no_listener(),
            loss => loss.error(),
        }
    }

    /// Sends the service a message that gets no reply. Waits for space; completions that come meanwhile are stored. A
    /// notification that a service had not taken when it ended is lost, and nothing reports that: to know, make a call.
    ///
    /// # Errors
    /// As [`Client::submit`].
    pub fn notify(&mut self, message: &[u8]) -> Result<()> {
        self.notify_waiting(message, Deadline::Never).map(drop)
    }

    /// As [`Client::notify`], until `deadline`: [`Sent::TimedOut`] when it passes, and nothing was sent. A message
    /// larger than the lane's largest that the client has begun to write by then is [`Sent::Sent`]: see
    /// [`Client::try_notify`].
    ///
    /// # Errors
    /// As [`Client::submit`].
    pub fn notify_until(&mut self, message: &[u8], deadline: impl Into<Deadline>) -> Result<Sent> {
        self.notify_waiting(message, deadline.into())
    }

    fn notify_waiting(&mut self, message: &[u8], deadline: Deadline) -> Result<Sent> {
        let at = loop {
            if let Some(at) = self.notify_now(message)? {
                break at;
            }
            let condition = Condition::Space { size: Size::untraced(message.len()), is_call: false };
            if self.find(condition, deadline)?.is_none() {
                return Ok(if deadline == Deadline::Now { Sent::Full } else { Sent::TimedOut });
            }
        };
        // No completion will come that the user could await. So all of a large message is in the lane before this
        // returns.
        let connection = self.balancer.connections.get(at);
        if let Some(connection) = connection.filter(|connection| !connection.outbox.is_empty()) {
            self.find(Condition::Written(connection.number), deadline)?;
        }
        Ok(Sent::Sent)
    }

    /// As [`Client::notify`], if there is space now; [`Sent::Full`] otherwise. Never waits: what finds no space of a
    /// message larger than the lane's largest is copied, and written as space comes, whenever this client is used. A
    /// service that ends, or drains, may not have taken it.
    ///
    /// # Errors
    /// As [`Client::try_submit`].
    pub fn try_notify(&mut self, message: &[u8]) -> Result<Sent> {
        Ok(if self.notify_now(message)?.is_some() { Sent::Sent } else { Sent::Full })
    }

    /// Cancels a call: the client returns none of its completions any more, and drops those that have come. The service
    /// is notified, and may stop working; until it has ended the call, the call counts as in flight. Does not wait.
    /// Returns false if the call was not in flight, or cancelled already.
    ///
    /// # Errors
    /// As [`Client::try_submit`].
    pub fn cancel(&mut self, call: CallId) -> Result<bool> {
        self.balancer.check(0)?;
        self.store_found();
        let dropped = self.inbox.forget(call);
        self.completions_dropped += dropped as u64;
        let number = match self.calls.state(call) {
            State::Awaited(number) => number,
            State::Unrouted(_) => {
                self.balancer.unrouted.retain(|unrouted| *unrouted != call);
                self.calls.end(call);
                return Ok(true);
            }
            State::Free | State::Cancelled(_) => return Ok(dropped > 0),
        };
        self.calls.cancel(call, number);
        let connections = &mut self.balancer.connections;
        let at = connections.iter().position(|connection| connection.number == number);
        let at = at.expect("the calls of a connection leave it before it is removed");
        let header = Header::new(Kind::Cancel, call.0);
        let connection = &mut connections[at];
        match connection.write(header, &[]) {
            Ok(true) => {}
            Ok(false) => connection.outbox.push(header, &[]),
            // A service that has left needs no cancel, and the lane of replies reports its end.
            Err(error) if is_end(&error) => {}
            Err(error) if self.balancer.has_many() => self.connection_failed(at, error)?,
            Err(error) => return Err(self.balancer.write_failed(error, &mut self.calls, &mut self.inbox)),
        }
        Ok(true)
    }

    /// Marks a call in flight as one that may be executed more than once. If its service dies or closes before a first
    /// part or a reply has come, the client submits it again to another service of the name, under the same [`CallId`].
    /// It does so three times at most, so that one request cannot crash all services; then it is [`Outcome::Lost`].
    /// Does not wait. Returns false if it is not in flight. Without effect on a client by `unix:PATH`, which has one
    /// service.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn mark_idempotent(&mut self, call: CallId) -> Result<bool> {
        if self.balancer.owner.is_forked() {
            return Err(Error::Forked);
        }
        let is_in_flight = self.calls.is_awaited(call);
        if is_in_flight {
            self.calls.set_idempotent(call);
        }
        Ok(is_in_flight)
    }

    /// Services that this client uses at present: of a short name all processes that listen under it, as far as it has
    /// discovered them, and that do not drain; by `unix:PATH` one.
    pub fn service_count(&self) -> usize {
        self.balancer.usable().count()
    }

    /// Calls whose final completion has not come, cancelled ones included.
    pub fn in_flight(&self) -> usize {
        self.calls.count()
    }

    /// Completions of cancelled calls that came and were dropped.
    pub fn completions_dropped(&self) -> u64 {
        self.completions_dropped
    }

    /// How often this side has rung a doorbell: of a service that slept, or that waited for space. Of the services that
    /// it uses at present.
    pub fn wakes_sent(&self) -> u64 {
        let connections = self.balancer.connections.iter();
        connections.map(|connection| connection.outbox.sender.counters().wakes_sent).sum()
    }

    /// The largest request, in bytes, that the service takes; of several, that any of them takes, which then gets the
    /// request.
    pub fn request_bytes_max(&self) -> u64 {
        self.balancer.request_bytes_max()
    }

    /// The process of the service; of several, of one of them.
    pub fn peer(&self) -> Option<Peer> {
        self.balancer.peer()
    }

    /// For an event loop: asks that the descriptor become readable when a completion comes, when there is space for the
    /// message that found none at the last attempt, when a queued message can be written, or when a service leaves.
    /// When it is ready, take completions, or submit again. Does not wait; see [`Client::busy_poll`].
    ///
    /// # Errors
    /// As [`Client::try_completion`].
    pub fn arm(&mut self) -> Result<Armed> {
        let mut side = Waiting { client: self, condition: Condition::Any, wanted: None };
        side.poll()?;
        // Of both lanes of all connections. The same system call reports a service that is gone.
        let is_any_gone = side.client.balancer.doorbells.drain()?;
        side.wanted = side.client.wanted.map(|wanted| wanted.size);
        let mut armed = side.arm()?;
        if armed && is_any_gone {
            side.disarm();
            // The end is reported after the last reply.
            let _ = side.poll()? || side.end()?;
            armed = false;
        }
        armed &= self.found.is_none() && self.inbox.is_empty();
        let wanted = self.wanted.map(|wanted| wanted.size);
        if !armed || (Waiting { client: self, condition: Condition::Any, wanted }).needs_timed_wait() {
            self.balancer.doorbells.local_wake().ring();
        }
        Ok(Armed::waiting_if(armed))
    }

    /// For an event loop, before [`Client::arm`]: polls for a completion for as long as [`Options::busy_poll`] says,
    /// longer after large requests, and returns whether there is one. Polls for less if that was useless lately, and
    /// only once if no call is in flight. With one processor it yields once instead. Neither sleeps nor arms.
    ///
    /// # Errors
    /// As [`Client::try_completion`].
    pub fn busy_poll(&mut self) -> Result<bool> {
        let most = if self.calls.awaited() > 0 { self.busy_poll } else { Duration::ZERO };
        let bytes = self.request_bytes();
        busy_poll(&mut Waiting { client: self, condition: Condition::Any, wanted: None }, most, bytes)
    }

    /// The mean bytes of the messages submitted between the last two calls of this that found new ones.
    fn request_bytes(&mut self) -> u64 {
        let sent = |connection: &Connection| connection.outbox.sender.counters();
        let sent = self.balancer.connections.iter().map(sent);
        let (messages, bytes) = sent.fold((0u64, 0u64), |(messages, bytes), lane| {
            (messages.wrapping_add(lane.messages), bytes.wrapping_add(lane.bytes))
        });
        // Fewer than before: a connection has ended.
        if let Some(new @ 1..) = messages.checked_sub(self.sent.0) {
            self.request_bytes = bytes.saturating_sub(self.sent.1) / new;
        }
        self.sent = (messages, bytes);
        self.request_bytes
    }

    /// Withdraws the wish for space of a message that found none.
    #[doc(hidden)]
    pub fn cancel_wanted_space(&mut self) {
        self.wanted = None;
    }

    /// Whether a message is queued, for whose space [`Client::arm`] has to be called.
    #[doc(hidden)]
    pub fn has_queued_messages(&self) -> bool {
        let Balancer { connections, unrouted, .. } = &self.balancer;
        connections.iter().any(|connection| !connection.outbox.is_empty()) || !unrouted.is_empty()
    }

    /// The largest reply that this side takes, in bytes.
    #[doc(hidden)]
    pub fn reply_bytes_max(&self) -> u64 {
        self.reply_bytes_max
    }

    /// Withdraws [`Client::arm`].
    pub fn disarm(&mut self) {
        for connection in &mut self.balancer.connections {
            connection.replies.disarm();
            connection.outbox.sender.disarm();
        }
    }

    /// As [`Client::poll`], waiting until the deadline.
    fn find(&mut self, condition: Condition, deadline: Deadline) -> Result<Option<Found>> {
        if let Some(found) = self.poll(condition)? {
            return Ok(Some(found));
        }
        let Some(deadline) = deadline.until() else { return Ok(None) };
        if condition.is_completion() {
            self.check_awaited(condition)?;
        }
        while wait(&mut Waiting { client: self, condition, wanted: None }, deadline)? {
            // The sleep may have ended for another completion.
            if let Some(found) = self.poll(condition)? {
                return Ok(Some(found));
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(None);
            }
        }
        Ok(None)
    }

    /// Checks that there is a call to wait for.
    #[inline(always)]
    fn check_awaited(&self, condition: Condition) -> Result<()> {
        let is_awaited = match condition {
            Condition::Of(call) => self.calls.is_awaited(call),
            _ => self.calls.awaited() > 0,
        };
        if is_awaited { Ok(()) } else { Err(not_in_flight()) }
    }

    #[inline(always)]
    fn give_fast(&mut self, (record, call): (Record, CallId)) -> Completion<'_> {
        let body = Body::InPlace(self.balancer.connections[0].replies.message(record));
        Completion { call, outcome: Outcome::Reply, body, at: 0 }
    }

    fn give(&mut self, found: Found) -> Completion<'_> {
        match found {
            Found::InPlace(record, call, outcome, at) => {
                if outcome == Outcome::Part {
                    self.calls.note_part(call);
                }
                let body = Body::InPlace(self.balancer.connections[at].replies.message(record));
                Completion { call, outcome, body, at }
            }
            Found::Owned(StoredCompletion { call, outcome, bytes }) => {
                Completion { call, outcome, body: Body::Owned(bytes), at: 0 }
            }
            Found::Space => unreachable!("a completion was awaited"),
        }
    }
}

#[cold]
fn not_in_flight() -> Error {
    Error::Refused("no such call is in flight: nothing would ever come of waiting".to_owned())
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client")
            .field("peer", &self.peer())
            .field("in_flight", &self.in_flight())
            .field("service_count", &self.service_count())
            .finish_non_exhaustive()
    }
}

impl AsRawFd for Client {
    /// As [`AsFd`], for runtimes that take the number.
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl AsFd for Client {
    /// The descriptor for an event loop: see [`Client::arm`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.balancer.doorbells.as_fd()
    }
}

/// Reserved space for a request, to be written in place; see [`Client::try_reserve`]. Dropping it aborts: nothing is
/// submitted.
#[must_use = "dropping it aborts: nothing is submitted"]
pub struct RequestReservation<'a> {
    pub(super) client: &'a mut Client,
    pub(super) call: CallId,
    /// Index of its connection.
    pub(super) at: usize,
    pub(super) space: ReservedSpace,
}

impl RequestReservation<'_> {
    /// Submits all of the space as the request. Does not wait.
    ///
    /// # Errors
    /// [`Error::Forked`]. The next call returns that a service has ended.
    pub fn submit(self) -> Result<CallId> {
        let bytes = self.len();
        self.submit_bytes(bytes)
    }

    /// Submits the first `bytes` of the space as the request.
    ///
    /// # Errors
    /// [`Error::TooLarge`] when `bytes` is more than was reserved, [`Error::Forked`]; nothing is submitted then.
    pub fn submit_bytes(self, bytes: usize) -> Result<CallId> {
        let RequestReservation { client, call, at, space } = self;
        if client.balancer.has_many() {
            let sender = &client.balancer.connections[at].outbox.sender;
            let kept = sender.body(space).get(..bytes).unwrap_or_default().to_vec();
            client.publish(call, at, space, bytes)?;
            client.calls.keep(call, Header::new(Kind::Request, call.0), &kept);
            client.balancer.count_submission();
            return Ok(call);
        }
        client.publish(call, at, space, bytes)?;
        Ok(call)
    }
}

impl Client {
    #[inline(always)]
    fn publish(&mut self, call: CallId, at: usize, space: ReservedSpace, bytes: usize) -> Result<()> {
        let sender = &mut self.balancer.connections[at].outbox.sender;
        sender.publish_body(space, Header::new(Kind::Request, call.0).words(), bytes)?;
        self.begin(call, at);
        Ok(())
    }
}

impl std::ops::Deref for RequestReservation<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.client.balancer.connections[self.at].outbox.sender.body(self.space)
    }
}

impl std::ops::DerefMut for RequestReservation<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.client.balancer.connections[self.at].outbox.sender.body_mut(self.space)
    }
}

impl AsRef<[u8]> for RequestReservation<'_> {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl std::fmt::Debug for RequestReservation<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RequestReservation").field("bytes", &self.len()).finish_non_exhaustive()
    }
}
