//! `pelton.Client`, which threads share, and its calls.
//!
//! One of the threads that wait, the *leader*, receives the completions of all: it stores those of other calls, and
//! unparks their threads. While it sleeps, it has the client armed and does not hold the lock, so that others submit.
//! When it leaves, it unparks another waiting thread, which leads then.
//!
//! The lock is taken without the GIL alone: no thread waits for the GIL while it holds the lock, and none for the lock
//! while it holds the GIL.

use crate::bytes::{self, Payload, to_bytes};
use crate::error::{self, raise, timed_out};
use crate::handle::{deadline, in_slices, is_readable};
use crate::open::{CLIENT, finish, options};
use pelton::{Armed, CallId, Deadline, Error, Outcome, Sent, Traceparent};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyType};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{self, Thread};
use std::time::Instant;

/// Completions that the leader takes before it checks its own call.
const COMPLETIONS: usize = 128;

/// Calls the services of a name. Threads may share it: each waits for its own calls.
///
/// Under a short name several processes may serve: each call goes to the one with the fewest of this client's calls in
/// flight, and the client continues when services come and go. By `unix:PATH` there is one service; when it has ended,
/// every method raises `Closed` or `PeerDied`: connect again. Up to 1,024 calls are in flight; more wait.
///
/// Where a method waits, `timeout` is in seconds; None is no limit. A wait ends for Ctrl-C within 50 ms. Every method
/// may raise `ClosedHandle`, `Forked` in a forked child, and `Corrupt` if a service breaks the rules.
///
/// Example:
///     with pelton.Client.connect("prices", timeout=10) as client:
///         print(client.call(b"tea", timeout=1))
#[pyclass(frozen, module = "pelton", weakref)]
pub struct Client {
    state: Mutex<State>,
    process: u32,
    reply_bytes_max: u64,
}

struct State {
    /// `None` once it is closed.
    client: Option<pelton::Client>,
    is_closing: bool,
    /// Completions that no thread has taken yet, and the bytes of those that are parts.
    stored: HashMap<CallId, VecDeque<Completion>>,
    part_bytes: u64,
    is_led: bool,
    /// The leader waits for the client's descriptor, without the lock.
    is_asleep: bool,
    /// Parked threads: of calls, and those that wait for space, by a number of each.
    awaiting: BTreeMap<CallId, Thread>,
    for_space: BTreeMap<u64, Thread>,
    number: u64,
}

/// A completion, copied.
struct Completion {
    outcome: Outcome,
    bytes: Vec<u8>,
}

impl Completion {
    /// What it counts for if it is a part: its memory, also when it has no bytes.
    fn part_bytes(&self) -> u64 {
        if self.outcome == Outcome::Part { (self.bytes.len() + size_of::<Completion>()) as u64 } else { 0 }
    }
}

/// Why an operation failed.
enum Failure {
    Library(Error),
    ClosedHandle,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Library(error)
    }
}

impl Failure {
    #[cold]
    fn raise(self, py: Python<'_>) -> PyErr {
        match self {
            Failure::Library(error) => raise(py, error),
            Failure::ClosedHandle => error::named(py, "ClosedHandle", "this client is closed: open another one"),
        }
    }
}

type Result<T> = std::result::Result<T, Failure>;

impl State {
    fn client(&mut self) -> Result<&mut pelton::Client> {
        match &mut self.client {
            Some(client) if !self.is_closing => Ok(client),
            _ => Err(Failure::ClosedHandle),
        }
    }

    /// Whether more parts are stored than may be. Until some are taken, nothing is received.
    fn is_full(&mut self) -> Result<bool> {
        Ok(self.part_bytes > self.client()?.reply_bytes_max())
    }

    /// Receives completions, and unparks the threads that wait for them. Returns whether one has come.
    fn receive(&mut self) -> Result<bool> {
        let mut has_received = false;
        for _ in 0..COMPLETIONS {
            if self.is_full()? {
                break;
            }
            let completion = match self.client()?.try_completion() {
                Ok(Some(completion)) => completion,
                Ok(None) => break,
                // The error comes again, after the completions before it.
                Err(_) if has_received => break,
                Err(error) => return Err(error.into()),
            };
            has_received = true;
            let (call, outcome) = (completion.call_id(), completion.outcome());
            let completion = Completion { outcome, bytes: completion.into_vec_in(bytes::buffer) };
            self.part_bytes += completion.part_bytes();
            self.stored.entry(call).or_default().push_back(completion);
            if let Some(thread) = self.awaiting.get(&call) {
                thread.unpark();
            }
        }
        Ok(has_received)
    }

    /// Takes the oldest completion of a call.
    fn take(&mut self, call: CallId) -> Option<Completion> {
        let queue = self.stored.get_mut(&call)?;
        let completion = queue.pop_front()?;
        if queue.is_empty() {
            self.stored.remove(&call);
        }
        self.part_bytes -= completion.part_bytes();
        Some(completion)
    }

    /// There may be space, or a free slot.
    fn unpark_for_space(&mut self) {
        if !self.for_space.is_empty() {
            self.for_space.values().for_each(Thread::unpark);
            if let Some(client) = &mut self.client {
                client.cancel_wanted_space();
            }
        }
    }

    /// Another thread leads from now on, if one waits.
    fn unpark_a_leader(&self) {
        if !self.is_led
            && let Some(thread) = self.awaiting.values().chain(self.for_space.values()).next()
        {
            thread.unpark();
        }
    }

    fn submit(&mut self, request: &[u8], properties: Properties) -> Result<Option<CallId>> {
        let client = self.client()?;
        let submitted = properties.try_submit(client, request)?;
        if let Some(call) = submitted
            && properties.is_idempotent
        {
            client.mark_idempotent(call)?;
        }
        self.arm_to_write()?;
        Ok(submitted)
    }

    /// Has the leader wake up when there is space for a message that is queued. It has armed without that.
    fn arm_to_write(&mut self) -> Result<()> {
        let is_asleep = self.is_asleep;
        let client = self.client()?;
        if is_asleep && client.has_queued_messages() {
            // If there is space already, it rings the leader's doorbell itself.
            let _ready_or_waiting = client.arm()?;
        }
        Ok(())
    }

    /// Cancels a call. An error is that of the client's end, which the next function returns.
    fn cancel(&mut self, call: CallId) {
        // A thread that waits for it must not do so for ever.
        if let Some(thread) = self.awaiting.get(&call) {
            thread.unpark();
        }
        let dropped = self.stored.remove(&call).into_iter().flatten();
        self.part_bytes -= dropped.map(|completion| completion.part_bytes()).sum::<u64>();
        if let Ok(client) = self.client() {
            let _ = client.cancel(call);
            let _ = self.arm_to_write();
        }
    }

    /// Drops the client, if it is to be closed and no thread uses its descriptor.
    fn close_if_unused(&mut self) {
        if self.is_closing && !self.is_asleep {
            self.client = None;
            self.awaiting.values().chain(self.for_space.values()).for_each(Thread::unpark);
        }
    }
}

/// The properties of one call.
#[derive(Clone, Copy)]
pub struct Properties {
    pub deadline: Deadline,
    pub is_idempotent: bool,
    pub traceparent: Option<Traceparent>,
}

impl Properties {
    /// A `traceparent` that is not valid by W3C's rules is as none.
    pub fn new(timeout: Option<f64>, is_idempotent: bool, traceparent: Option<&str>) -> PyResult<Properties> {
        let traceparent = traceparent.and_then(Traceparent::parse);
        Ok(Properties { deadline: deadline(timeout)?, is_idempotent, traceparent })
    }

    /// Submits a request, if there is space now. The service gets the deadline.
    pub fn try_submit(self, client: &mut pelton::Client, request: &[u8]) -> pelton::Result<Option<CallId>> {
        match (self.traceparent, self.deadline) {
            (Some(traceparent), deadline) => client.try_submit_traced_by(request, traceparent, deadline),
            (None, Deadline::At(end)) => client.try_submit_by(request, end),
            (None, _) => client.try_submit(request),
        }
    }
}

/// What a thread waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Completion(CallId),
    Space,
}

impl Client {
    fn new(client: pelton::Client) -> Client {
        let reply_bytes_max = client.reply_bytes_max();
        let state = State {
            client: Some(client),
            is_closing: false,
            stored: HashMap::new(),
            part_bytes: 0,
            is_led: false,
            is_asleep: false,
            awaiting: BTreeMap::new(),
            for_space: BTreeMap::new(),
            number: 0,
        };
        Client { state: Mutex::new(state), process: std::process::id(), reply_bytes_max }
    }

    /// The state. The caller does not hold the GIL.
    fn lock(&self) -> Result<MutexGuard<'_, State>> {
        match self.state.try_lock() {
            Ok(state) => Ok(state),
            // In a child of fork, the thread that held the lock does not exist.
            Err(TryLockError::WouldBlock) if std::process::id() != self.process => Err(Error::Forked.into()),
            Err(_) => Ok(self.state.lock().unwrap_or_else(PoisonError::into_inner)),
        }
    }

    /// Repeats `attempt` until it returns something; `None` at the deadline. The caller does not hold the GIL.
    fn wait<R>(
        &self,
        wanted: Wanted,
        until: Instant,
        mut attempt: impl FnMut(&mut State) -> Result<Option<R>>,
    ) -> Result<Option<R>> {
        let mut state = self.lock()?;
        // Once at least, also when the deadline has passed: a completion may have come.
        let mut has_polled = false;
        let done = loop {
            match attempt(&mut state) {
                Ok(None) if !has_polled || Instant::now() < until => has_polled = true,
                done => break done,
            }
            // The leader of a forked process does not exist in its child.
            match state.client() {
                Ok(client) if client.is_forked() => break Err(Error::Forked.into()),
                Ok(_) => {}
                Err(error) => break Err(error),
            }
            // Threads that were unparked take parts; if there are none, nobody may.
            let is_full = match state.is_full() {
                Ok(true) if !state.awaiting.keys().any(|call| state.stored.contains_key(call)) => {
                    let text = "the parts of other calls that wait here are more than call_bytes_max: take them, \
                                cancel those calls, or raise call_bytes_max";
                    break Err(Error::Refused(text.to_owned()).into());
                }
                Ok(is_full) => is_full,
                Err(error) => break Err(error),
            };
            match state.is_led || is_full {
                false => {
                    state.is_led = true;
                    let (returned, led) = self.lead(state, until);
                    state = returned;
                    state.is_led = false;
                    state.close_if_unused();
                    if let Err(error) = led {
                        break Err(error);
                    }
                }
                true => match self.park(state, wanted, until) {
                    (returned, Ok(())) => state = returned,
                    (returned, Err(error)) => {
                        state = returned;
                        break Err(error);
                    }
                },
            }
        };
        state.unpark_a_leader();
        done
    }

    /// Receives for all threads, or sleeps until something has come, or the deadline has passed.
    fn lead<'a>(&'a self, mut state: MutexGuard<'a, State>, until: Instant) -> (MutexGuard<'a, State>, Result<()>) {
        let armed = |state: &mut State| {
            if state.receive()? {
                state.unpark_for_space();
                return Ok(None);
            }
            if Instant::now() >= until {
                return Ok(None);
            }
            // It holds the lock, so not while others want it.
            let is_alone = state.awaiting.is_empty() && state.for_space.is_empty();
            let client = state.client()?;
            if is_alone && client.busy_poll()? {
                return Ok(None);
            }
            if client.arm()? == Armed::Waiting {
                return Ok(Some(client.as_fd().as_raw_fd()));
            }
            state.unpark_for_space();
            Ok(None)
        };
        let fd = match armed(&mut state) {
            Ok(Some(fd)) => fd,
            Ok(None) => return (state, Ok(())),
            Err(error) => return (state, Err(error)),
        };
        state.is_asleep = true;
        drop(state);
        // SAFETY: while `is_asleep`, nobody drops the client, and with it the descriptor.
        let rung = is_readable(unsafe { BorrowedFd::borrow_raw(fd) }, Deadline::At(until));
        // This process is the one that has locked it before.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.is_asleep = false;
        (state, rung.map(drop).map_err(Failure::from))
    }

    /// Waits until the leader unparks this thread, or the deadline has passed.
    fn park<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        wanted: Wanted,
        until: Instant,
    ) -> (MutexGuard<'a, State>, Result<()>) {
        state.number += 1;
        let number = state.number;
        match wanted {
            Wanted::Completion(call) => _ = state.awaiting.insert(call, thread::current()),
            Wanted::Space => {
                // The leader has armed before, not for this space.
                let armed = state.client().and_then(|client| Ok(client.arm()?));
                match armed {
                    Ok(Armed::Waiting) => {}
                    Ok(Armed::Ready) => return (state, Ok(())),
                    Err(error) => return (state, Err(error)),
                }
                state.for_space.insert(number, thread::current());
            }
        }
        drop(state);
        thread::park_timeout(until.saturating_duration_since(Instant::now()));
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match wanted {
            Wanted::Completion(call) => _ = state.awaiting.remove(&call),
            Wanted::Space => _ = state.for_space.remove(&number),
        }
        (state, Ok(()))
    }

    /// Repeats a step, until a deadline that is at most one slice away, until it returns something. `None` once
    /// `deadline` has passed. Without the GIL.
    fn wait_in_slices<R: Send>(
        &self,
        py: Python<'_>,
        deadline: Deadline,
        mut step: impl FnMut(&Client, Instant) -> Result<Option<R>> + Send,
    ) -> PyResult<Option<R>> {
        in_slices(py, deadline, |until| py.detach(|| step(self, until)).map_err(|failure| failure.raise(py)))
    }

    fn submit_until(&self, request: &[u8], properties: Properties, until: Instant) -> Result<Option<CallId>> {
        let call = self.wait(Wanted::Space, until, |state| state.submit(request, properties))?;
        Ok(call)
    }

    /// The next completion of a call. A call that was lost is an error.
    fn next(&self, call: CallId, until: Instant) -> Result<Option<Completion>> {
        self.wait(Wanted::Completion(call), until, |state| match state.take(call) {
            Some(Completion { outcome: Outcome::Lost(loss), .. }) => Err(state.client()?.loss_error(loss).into()),
            found => Ok(found),
        })
    }

    fn cancel(&self, call: CallId) {
        if let Ok(mut state) = self.lock() {
            state.cancel(call);
        }
    }
}

/// A call of a client: `Client.submit` and `Client.stream` return it. One thread at a time.
///
/// `result()` waits for the whole reply; iterating gives the parts of a streaming reply as they come. A call that is
/// dropped, or whose `with` block ends, before its last part is cancelled, and its service notified.
///
/// Example:
///     with client.stream(b"all of it") as parts:
///         for part in parts:
///             print(part)
#[pyclass(frozen, module = "pelton", weakref)]
pub struct Call {
    client: Py<Client>,
    call: CallId,
    deadline: Deadline,
    is_over: AtomicBool,
    is_in_use: AtomicBool,
    /// The parts of the whole reply that have come, joined. They stay for the next call when `result` times out.
    begun: Mutex<Option<Vec<u8>>>,
}

impl Call {
    fn begun(&self) -> MutexGuard<'_, Option<Vec<u8>>> {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next completion. `None` after the last one.
    fn next(&self, py: Python<'_>, deadline: Deadline) -> PyResult<Option<Vec<u8>>> {
        if self.is_over.load(Ordering::Acquire) {
            return Ok(None);
        }
        if self.is_in_use.swap(true, Ordering::AcqRel) {
            return Err(error::named(py, "Busy", "another thread waits for this call: one at a time may"));
        }
        let found = self.client.get().wait_in_slices(py, deadline, |client, until| {
            if self.is_over.load(Ordering::Acquire) {
                return Err(Error::Refused("another thread has cancelled this call".to_owned()).into());
            }
            client.next(self.call, until)
        });
        self.is_in_use.store(false, Ordering::Release);
        let completion = match found {
            Ok(Some(completion)) => completion,
            // The call stays in flight.
            Ok(None) => return Err(no_reply_in_time(py)),
            Err(error) => {
                self.cancel(py);
                return Err(error);
            }
        };
        if completion.outcome.is_final() {
            self.is_over.store(true, Ordering::Release);
        }
        let Completion { outcome, bytes } = completion;
        match outcome {
            Outcome::End => Ok(None),
            Outcome::Reply | Outcome::Part => Ok(Some(bytes)),
            outcome => Err(raise(py, outcome.error(|| bytes).expect("every other outcome is an error"))),
        }
    }

    /// The deadline of a wait of this many seconds, which does not pass that of the call.
    fn deadline(&self, timeout: Option<f64>) -> PyResult<Deadline> {
        Ok(match (deadline(timeout)?, self.deadline) {
            (Deadline::Never, own) => own,
            (Deadline::At(end), Deadline::At(own)) => Deadline::At(end.min(own)),
            (given, _) => given,
        })
    }

    /// Waits for the whole reply: a streaming one in one piece. Cancels one that is larger than a reply may be.
    fn whole(&self, py: Python<'_>, deadline: Deadline) -> PyResult<Vec<u8>> {
        let most = self.client.get().reply_bytes_max;
        while let Some(mut part) = self.next(py, deadline)? {
            let bytes = match &mut *self.begun() {
                Some(reply) => {
                    reply.append(&mut part);
                    reply.len() as u64
                }
                none => none.insert(part).len() as u64,
            };
            if bytes > most {
                self.cancel(py);
                let text = format!(
                    "the parts of this reply have {bytes} bytes so far, and call_bytes_max is {most}: take them one by \
                     one, by `stream`, or raise it"
                );
                return Err(error::named(py, "TooLarge", text));
            }
        }
        Ok(self.begun().take().unwrap_or_default())
    }

    /// The bytes as an object of Python. They stay for the next call when there is no memory for it.
    fn object<'py>(&self, py: Python<'py>, bytes: Vec<u8>) -> PyResult<Bound<'py, PyBytes>> {
        match to_bytes(py, &bytes) {
            Ok(object) => {
                bytes::put_back(bytes);
                Ok(object)
            }
            Err(error) => {
                *self.begun() = Some(bytes);
                Err(error)
            }
        }
    }
}

#[cold]
fn no_reply_in_time(py: Python<'_>) -> PyErr {
    timed_out(py, "waiting for the reply")
}

#[pymethods]
impl Call {
    /// The whole reply; of a streaming one all parts in one piece. Waits up to `timeout` seconds.
    ///
    /// Raises `TimedOut`, after which the call is still in flight, and what has come of its reply is kept; `Failed`
    /// with the service's code and text; `Abandoned` if the service dropped it; `TooLarge`, and cancels, if its parts
    /// exceed `call_bytes_max`; `PeerDied`, `Closed` or `Refused` if it was lost.
    #[pyo3(signature = (timeout=None))]
    fn result<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> PyResult<Bound<'py, PyBytes>> {
        if self.is_over.load(Ordering::Acquire) && self.begun().is_none() {
            return Err(raise(py, Error::Refused("the reply of this call was taken, or it was cancelled".to_owned())));
        }
        let whole = self.whole(py, self.deadline(timeout)?)?;
        self.object(py, whole)
    }

    /// Cancels the call: its handler is notified, and its reply dropped. Does not wait.
    fn cancel(&self, py: Python<'_>) {
        *self.begun() = None;
        if !self.is_over.swap(true, Ordering::AcqRel) {
            py.detach(|| self.client.get().cancel(self.call));
        }
    }

    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        // What a `result` that timed out has taken comes first.
        let begun = self.begun().take();
        let part = if begun.is_some() { begun } else { self.next(py, self.deadline)? };
        part.map(|part| self.object(py, part)).transpose()
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _type: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) {
        self.cancel(py);
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if !self.is_over.load(Ordering::Acquire) {
            // The interpreter may be ending; then the client ends too.
            let _ = Python::try_attach(|py| self.cancel(py));
        }
    }
}

#[pymethods]
impl Client {
    /// Connects to the services that listen under `name`: a short name, or `unix:PATH`.
    ///
    /// `timeout` is how long to wait for one; 0, the default, fails immediately. `call_bytes_max` is the largest reply
    /// that it takes (64 MiB); `capacity`, `message_bytes_max`, `memory_bytes_max`, `allow_uids` and `spin` as of
    /// `Sender.connect`. Raises `NoListener`, `Refused`, `BadName`, `BadOption`.
    #[classmethod]
    #[pyo3(
        signature = (name, **given),
        text_signature = "($cls, name, *, timeout=0.0, capacity=None, message_bytes_max=None, call_bytes_max=None, \
            memory_bytes_max=None, allow_uids=None, spin=False)"
    )]
    fn connect(cls: &Bound<'_, PyType>, name: &str, given: Option<&Bound<'_, PyDict>>) -> PyResult<Client> {
        let started = pelton::Client::start_connect(name, &options(given, CLIENT)?.cast());
        Ok(Client::new(finish(cls.py(), started)?))
    }

    /// Calls the service, and returns its whole reply. Waits up to `timeout` seconds, then cancels: `TimedOut`.
    ///
    /// The service sees the deadline. A streaming reply comes in one piece, up to `call_bytes_max`. With `idempotent`,
    /// the call may be executed more than once: if its service dies, another of the name gets it. `traceparent` is the
    /// header of W3C Trace Context, for `Request.traceparent`; one that is not valid is as none. Raises `Failed` with
    /// the service's code and text; `Abandoned`; `TooLarge`; `PeerDied` or `Closed` if the service ended: it is unknown
    /// whether it executed the call.
    #[pyo3(signature = (request, timeout=None, *, idempotent=false, traceparent=None))]
    fn call<'py>(
        this: &Bound<'py, Self>,
        request: &Bound<'py, PyAny>,
        timeout: Option<f64>,
        idempotent: bool,
        traceparent: Option<&str>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let call = Client::submit(this, request, timeout, idempotent, traceparent)?;
        let whole = call.whole(this.py(), call.deadline)?;
        call.object(this.py(), whole)
    }

    /// Calls the service, and returns a `Call`: iterating it gives the parts of the reply. Waits for space alone.
    ///
    /// `timeout` is of the whole call: when it has passed, the next part raises `TimedOut`. Otherwise as `call`.
    #[pyo3(signature = (request, timeout=None, *, idempotent=false, traceparent=None))]
    fn stream(
        this: &Bound<'_, Self>,
        request: &Bound<'_, PyAny>,
        timeout: Option<f64>,
        idempotent: bool,
        traceparent: Option<&str>,
    ) -> PyResult<Call> {
        Client::submit(this, request, timeout, idempotent, traceparent)
    }

    /// As `stream`: submits a call, whose `result()` is to be awaited later. Waits for space alone.
    #[pyo3(signature = (request, timeout=None, *, idempotent=false, traceparent=None))]
    fn submit(
        this: &Bound<'_, Self>,
        request: &Bound<'_, PyAny>,
        timeout: Option<f64>,
        idempotent: bool,
        traceparent: Option<&str>,
    ) -> PyResult<Call> {
        let (py, properties) = (this.py(), Properties::new(timeout, idempotent, traceparent)?);
        let (deadline, payload) = (properties.deadline, Payload::of(request)?);
        let bytes = payload.as_slice();
        let submit = |client: &Client, until| client.submit_until(bytes, properties, until);
        let call = this.get().wait_in_slices(py, deadline, submit)?;
        let call = call.ok_or_else(|| timed_out(py, "waiting for space for a request"))?;
        let (is_over, is_in_use) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Call { client: this.clone().unbind(), call, deadline, is_over, is_in_use, begun: Mutex::new(None) })
    }

    /// Sends a message that gets no reply. Waits for space up to `timeout` seconds. Nothing reports whether a service
    /// has taken it.
    #[pyo3(signature = (message, timeout=None))]
    fn notify(&self, message: &Bound<'_, PyAny>, timeout: Option<f64>) -> PyResult<()> {
        let py = message.py();
        let payload = Payload::of(message)?;
        let bytes = payload.as_slice();
        let notify = |state: &mut State| {
            let sent = (state.client()?.try_notify(bytes)? == Sent::Sent).then_some(());
            state.arm_to_write()?;
            Ok(sent)
        };
        let sent =
            self.wait_in_slices(py, deadline(timeout)?, |client, until| client.wait(Wanted::Space, until, notify))?;
        sent.ok_or_else(|| timed_out(py, "waiting for space for a notification"))
    }

    /// Calls whose last completion has not come, cancelled ones included. Does not wait.
    #[getter]
    fn in_flight(&self, py: Python<'_>) -> PyResult<usize> {
        self.read(py, |client| client.in_flight())
    }

    /// Services that this client uses at present. Does not wait.
    #[getter]
    fn services(&self, py: Python<'_>) -> PyResult<usize> {
        self.read(py, |client| client.service_count())
    }

    /// Closes it: calls in flight raise `ClosedHandle` within 50 ms, and their services are notified. Does not wait.
    fn close(&self, py: Python<'_>) {
        py.detach(|| {
            if let Ok(mut state) = self.lock() {
                state.is_closing = true;
                state.close_if_unused();
            }
        });
    }

    /// Whether this handle is closed.
    #[getter]
    fn closed(&self, py: Python<'_>) -> bool {
        py.detach(|| self.lock().is_ok_and(|mut state| state.client().is_err()))
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _type: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) {
        self.close(py);
    }
}

impl Client {
    fn read<R: Send>(&self, py: Python<'_>, read: fn(&pelton::Client) -> R) -> PyResult<R> {
        py.detach(|| Ok(read(self.lock()?.client()?))).map_err(|failure: Failure| failure.raise(py))
    }
}
