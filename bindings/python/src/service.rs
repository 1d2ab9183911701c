//! `pelton.Service`, of which threads take requests, and the requests.
//!
//! One thread at a time waits in the service, without the lock. The others wait until it has left, or until a handler
//! that checks for a cancel has taken requests ahead for them.
//!
//! No thread waits for the GIL while it holds a lock.

use crate::bytes::{self, Payload, WITHOUT_GIL, to_bytes};
use crate::error::{self, named, raise, timed_out};
use crate::handle::{deadline, in_slices};
use crate::log;
use crate::number::number;
use crate::open::{SERVICE, options};
use pelton::{Armed, Deadline, Error, Responder, Result, Sent, Stopper};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyType};
use std::collections::VecDeque;
use std::os::fd::AsRawFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Instant;

/// Requests that a handler takes ahead when it checks for a cancel, as in Rust; and their bytes, as much as the largest
/// request may have by default.
const AHEAD_MAX: usize = 1024;
const AHEAD_BYTES_MAX: usize = 64 << 20;

/// Takes the requests of all clients that connect under its name, and replies. Threads may share it.
///
/// `run` calls a function for each request on several threads; or a loop of your own takes them, by `receive` or by
/// iterating, and replies by `Request.reply`, on any thread. Closing it fails the calls in flight at their clients.
/// `drain` ends it without failing any.
///
/// Where a method waits, `timeout` is in seconds; None is no limit. A wait ends for Ctrl-C within 50 ms. Every method
/// may raise `ClosedHandle`, and `Forked` in a forked child.
///
/// Example:
///     with pelton.Service.listen("prices") as service:
///         service.run(lambda request: request.data.upper(), threads=4)
#[pyclass(frozen, module = "pelton", weakref)]
pub struct Service {
    state: Mutex<State>,
    /// A thread has left the service, requests were taken ahead, or it is closed.
    changed: Condvar,
    process: u32,
}

struct State {
    /// `None` while a thread is in it, and once it is closed.
    service: Option<Box<pelton::Service>>,
    /// `None` once it is closed.
    stopper: Option<Stopper>,
    ahead: Ahead,
}

/// Requests that handlers have taken when they checked for a cancel.
#[derive(Default)]
struct Ahead {
    requests: VecDeque<Taken>,
    bytes: usize,
}

impl Ahead {
    fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    fn is_full(&self) -> bool {
        self.requests.len() >= AHEAD_MAX || self.bytes > AHEAD_BYTES_MAX
    }

    fn push(&mut self, taken: Taken) {
        self.bytes += taken.bytes.len();
        self.requests.push_back(taken);
    }

    fn pop(&mut self) -> Option<Taken> {
        let taken = self.requests.pop_front()?;
        self.bytes -= taken.bytes.len();
        Some(taken)
    }
}

/// A request, copied, and its responder; `None` of a notification.
struct Taken {
    bytes: Vec<u8>,
    responder: Option<Responder>,
    peer: Option<pelton::Peer>,
    deadline_ns: u64,
}

impl Taken {
    fn new(request: pelton::Request<'_>) -> Taken {
        let (is_notification, peer) = (request.is_notification(), request.peer());
        let (bytes, responder) = request.into_parts_in(bytes::buffer);
        let deadline_ns = responder.deadline_ns();
        Taken { bytes, responder: (!is_notification).then_some(responder), peer, deadline_ns }
    }
}

/// What a step of a wait for a request has found.
enum Found {
    Request(Taken),
    Nothing,
    ClosedHandle,
}

impl Service {
    /// The state. It is never held while its thread waits for anything.
    fn lock(&self) -> Result<MutexGuard<'_, State>> {
        match self.state.try_lock() {
            Ok(state) => Ok(state),
            // In a child of fork, the thread that held the lock does not exist.
            Err(TryLockError::WouldBlock) if std::process::id() != self.process => Err(Error::Forked),
            Err(_) => Ok(self.state.lock().unwrap_or_else(PoisonError::into_inner)),
        }
    }

    /// Puts the service back after a thread was in it. Returns whether it is still open.
    fn put_back(&self, service: Box<pelton::Service>) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let is_open = state.stopper.is_some();
        // Dropped after the lock, if it is closed.
        let dropped = if is_open { state.service.replace(service) } else { Some(service) };
        drop(state);
        drop(dropped);
        self.changed.notify_one();
        is_open
    }

    /// Waits for a request until the deadline. Without the GIL.
    fn find(&self, until: Deadline) -> Result<Found> {
        let mut state = self.lock()?;
        loop {
            if let Some(taken) = state.ahead.pop() {
                return Ok(Found::Request(taken));
            }
            if state.stopper.is_none() {
                return Ok(Found::ClosedHandle);
            }
            if let Some(mut service) = state.service.take() {
                drop(state);
                let found = service.receive_until(until).map(|request| request.map(Taken::new));
                return match (self.put_back(service), found) {
                    (false, Err(_)) => Ok(Found::ClosedHandle),
                    (_, found) => Ok(found?.map_or(Found::Nothing, Found::Request)),
                };
            }
            if std::process::id() != self.process {
                return Err(Error::Forked);
            }
            let left = match until {
                Deadline::Now => return Ok(Found::Nothing),
                Deadline::At(end) => Some(end.saturating_duration_since(Instant::now())),
                Deadline::Never => None,
            };
            state = match left {
                Some(left) if left.is_zero() => return Ok(Found::Nothing),
                Some(left) => self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// The next request, until the deadline.
    fn receive_until(&self, py: Python<'_>, deadline: Deadline) -> PyResult<Option<Taken>> {
        // Signals are handled in the main thread alone. Stopping, draining and closing wake the others.
        let is_main = rustix::thread::gettid() == rustix::process::getpid();
        in_slices(py, deadline, |until| {
            let until = if is_main && deadline != Deadline::Now { until.into() } else { deadline };
            match py.detach(|| self.find(until)).map_err(|error| raise(py, error))? {
                Found::Request(taken) => Ok(Some(taken)),
                Found::Nothing => Ok(None),
                Found::ClosedHandle => Err(closed_handle(py)),
            }
        })
    }

    fn with_stopper(&self, py: Python<'_>, use_it: fn(&Stopper)) {
        py.detach(|| {
            if let Ok(state) = self.lock()
                && let Some(stopper) = &state.stopper
            {
                use_it(stopper);
            }
        });
    }

    /// Without waiting: uses the service, which no thread is in.
    fn with<R: Send>(
        &self,
        py: Python<'_>,
        use_it: impl FnOnce(&mut pelton::Service, &mut Ahead) -> Result<R> + Send,
    ) -> PyResult<R> {
        let used = py.detach(|| {
            let mut state = self.lock()?;
            if state.stopper.is_none() {
                return Ok(None);
            }
            let State { service, ahead, .. } = &mut *state;
            match service {
                Some(service) => use_it(service, ahead).map(Some),
                None if std::process::id() != self.process => Err(Error::Forked),
                None => Err(Error::Refused(
                    "another thread receives from this service: an event loop uses it alone".to_owned(),
                )),
            }
        });
        used.map_err(|error| raise(py, error))?.ok_or_else(|| closed_handle(py))
    }

    /// Takes requests ahead, and with them cancels, if no thread is in the service. Returns whether it did.
    fn poll_ahead(&self) -> bool {
        let Ok(mut state) = self.lock() else { return false };
        let State { service: Some(service), ahead, .. } = &mut *state else { return false };
        loop {
            let found = if ahead.is_full() { service.try_receive_none() } else { service.try_receive() };
            // The thread that waits for a request gets the error.
            let Ok(Some(request)) = found else { break };
            ahead.push(Taken::new(request));
        }
        if !ahead.is_empty() {
            self.changed.notify_all();
        }
        true
    }
}

#[cold]
fn closed_handle(py: Python<'_>) -> PyErr {
    named(py, "ClosedHandle", "this service is closed: listen again")
}

/// The request of a taken one.
fn request(this: &Bound<'_, Service>, taken: Taken) -> PyResult<Request> {
    let Taken { bytes, responder, peer, deadline_ns } = taken;
    let data = to_bytes(this.py(), &bytes)?.unbind();
    bytes::put_back(bytes);
    let is_notification = responder.is_none();
    let responder = Mutex::new(responder);
    Ok(Request { service: this.clone().unbind(), data, responder, is_notification, peer, deadline_ns })
}

#[pymethods]
impl Service {
    /// Listens under `name`: a short name, or `unix:PATH`. Does not wait.
    ///
    /// Several services may listen under a short name, in several processes: clients spread their calls over them.
    /// `lanes` is how many clients it takes (1,024), `call_bytes_max` the largest request (64 MiB); `capacity`,
    /// `message_bytes_max`, `memory_bytes_max`, `allow_uids` and `spin` as of `Sender.connect`. Raises `InUse`,
    /// `BadName`, `BadOption`.
    #[classmethod]
    #[pyo3(
        signature = (name, **given),
        text_signature = "($cls, name, *, capacity=None, message_bytes_max=None, call_bytes_max=None, \
            memory_bytes_max=None, allow_uids=None, spin=False, lanes=None)"
    )]
    fn listen(cls: &Bound<'_, PyType>, name: &str, given: Option<&Bound<'_, PyDict>>) -> PyResult<Service> {
        let listened = pelton::Service::listen_with(name, &options(given, SERVICE)?.cast());
        let service = listened.map_err(|error| raise(cls.py(), error))?;
        let state =
            State { stopper: Some(service.stopper()), service: Some(Box::new(service)), ahead: Ahead::default() };
        Ok(Service { state: Mutex::new(state), changed: Condvar::new(), process: std::process::id() })
    }

    /// Calls `handler(request)` for each request, on `threads` threads, this one among them. Waits until `stop` is
    /// called, or until `drain` has ended.
    ///
    /// What the handler returns is the reply: a bytes-like object; or an iterable of such, as a generator is, whose
    /// items are the parts of a streaming reply; or None, if it has answered by `Request.reply` and the like. A
    /// generator of a cancelled call is closed before its next part. What the handler raises fails the call: `Failed`
    /// with its own code and text, any other exception with code 1, its class and its text, and the logger `pelton`
    /// gets the traceback. After KeyboardInterrupt or SystemExit the call is abandoned, and `run` stops and raises it.
    #[pyo3(signature = (handler, threads=1))]
    fn run(this: &Bound<'_, Self>, handler: &Bound<'_, PyAny>, threads: i64) -> PyResult<()> {
        let serve = PyModule::import(this.py(), "pelton._serve")?;
        serve.getattr("run")?.call1((this, handler, threads)).map(drop)
    }

    /// The next request. Waits up to `timeout` seconds; raises `TimedOut` when they have passed.
    ///
    /// Raises `Closed` after `stop`, and after `drain` once everything is answered.
    #[pyo3(signature = (timeout=None))]
    fn receive(this: &Bound<'_, Self>, timeout: Option<f64>) -> PyResult<Request> {
        let py = this.py();
        match this.get().receive_until(py, deadline(timeout)?)? {
            Some(taken) => request(this, taken),
            None => Err(timed_out(py, "waiting for a request")),
        }
    }

    /// As `receive`, but does not wait: None if there is no request. For an event loop, which uses the service alone.
    ///
    /// With `pause`, it takes no request; it handles cancels and writes replies that wait, and pauses clients that have
    /// sent more requests until it is called without.
    #[pyo3(signature = (*, pause=false))]
    fn try_receive(this: &Bound<'_, Self>, pause: bool) -> PyResult<Option<Request>> {
        let found = this.get().with(this.py(), |service, ahead| {
            let found = match pause {
                true => service.try_receive_none(),
                false if !ahead.is_empty() => return Ok(ahead.pop()),
                false => service.try_receive(),
            };
            found.map(|request| request.map(Taken::new))
        })?;
        found.map(|taken| request(this, taken)).transpose()
    }

    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __next__(this: &Bound<'_, Self>) -> PyResult<Option<Request>> {
        match Service::receive(this, None) {
            Ok(request) => Ok(Some(request)),
            Err(error) if error::is_end(this.py(), &error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// From now on `receive` raises `Closed`, and `run` returns once the handlers have. Does not wait.
    ///
    /// Calls that are not answered by the time of `close` fail at their clients. To replace a service: `drain`.
    fn stop(&self, py: Python<'_>) {
        self.with_stopper(py, Stopper::stop);
    }

    /// Answers the requests that it has taken, and takes no more. Does not wait.
    ///
    /// Requests that come from now on go to another service of the name: no call fails or is executed twice. `receive`
    /// raises `Closed`, and `run` returns, once every call has ended: close the service then.
    fn drain(&self, py: Python<'_>) {
        self.with_stopper(py, Stopper::drain);
    }

    /// Closes it, within 50 ms if another thread waits in it. Calls that are not answered fail at their clients with
    /// `Closed`.
    fn close(&self, py: Python<'_>) {
        py.detach(|| {
            let Ok(mut state) = self.lock() else { return };
            let Some(stopper) = state.stopper.take() else { return };
            let (service, ahead) = (state.service.take(), std::mem::take(&mut state.ahead));
            drop(state);
            // A thread in it leaves, and drops it.
            stopper.stop();
            self.changed.notify_all();
            // In this order: a client then gets the end of the service, as for the requests that are not taken.
            drop(service);
            drop(ahead);
        });
    }

    /// Whether this handle is closed.
    #[getter]
    fn closed(&self, py: Python<'_>) -> bool {
        py.detach(|| self.lock().is_ok_and(|state| state.stopper.is_none()))
    }

    /// Replies to clients that had left. Does not wait.
    #[getter]
    fn replies_dropped(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, |service, _| Ok(service.replies_dropped()))
    }

    /// Clients that broke the rules, and were disconnected. Does not wait.
    #[getter]
    fn corrupt_clients(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, |service, _| Ok(service.corrupt_clients()))
    }

    /// For an event loop: how many cancels, and departures of clients, have come. When it changes, check
    /// `Request.is_cancelled` of the open requests. Does not wait.
    #[getter]
    fn cancels(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, |service, _| Ok(service.cancels()))
    }

    /// The descriptor for an event loop: see `arm`.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        self.with(py, |service, _| Ok(service.as_raw_fd()))
    }

    /// For an event loop, before `arm`: polls for a request for some microseconds. Returns whether there is one.
    fn busy_poll(&self, py: Python<'_>) -> PyResult<bool> {
        self.with(py, |service, ahead| Ok(!ahead.is_empty() || service.busy_poll()?))
    }

    /// For an event loop: makes the descriptor readable when a request or a cancel comes, or space for a part that
    /// found none in `Request.try_part`.
    ///
    /// Does not wait. Returns False if something has come already: take requests, and try the parts again, instead of
    /// watching the descriptor.
    fn arm(&self, py: Python<'_>) -> PyResult<bool> {
        let armed = self.with(py, |service, ahead| Ok(ahead.is_empty() && service.arm()? == Armed::Waiting));
        log::deliver(py);
        armed
    }

    /// Undoes `arm`. Call it when the loop loses interest.
    fn disarm(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |service, _| {
            service.disarm();
            Ok(())
        })
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

/// A client's request: answer it once, by `reply` or `fail`, or by `part` and then `end` or `reply`, on any thread.
///
/// Dropped without an answer, the call fails with `Abandoned`. Each method that answers raises `Closed` or `PeerDied`
/// if the client has left, `Refused` if it is answered already, or a notification.
///
/// Example:
///     for request in service:
///         request.reply(request.data.upper())
#[pyclass(frozen, module = "pelton", weakref)]
pub struct Request {
    service: Py<Service>,
    data: Py<PyBytes>,
    responder: Mutex<Option<Responder>>,
    is_notification: bool,
    peer: Option<pelton::Peer>,
    deadline_ns: u64,
}

impl Request {
    fn responder(&self) -> MutexGuard<'_, Option<Responder>> {
        self.responder.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers with so many bytes, and ends the call. After an error of the size, the call is still open.
    fn answer(
        &self,
        py: Python<'_>,
        bytes: usize,
        answer: impl FnOnce(Responder) -> Result<()> + Send,
    ) -> PyResult<()> {
        // An exception is made without the lock: Python may run other threads then.
        let checked = self.responder().as_ref().map(|open| open.check_answer(bytes));
        checked.transpose().map_err(|error| raise(py, error))?;
        let responder = self.responder().take();
        let responder = responder.ok_or_else(|| self.answered(py))?;
        let answered = if bytes < WITHOUT_GIL { answer(responder) } else { py.detach(|| answer(responder)) };
        answered.map_err(|error| raise(py, error))
    }

    #[cold]
    fn answered(&self, py: Python<'_>) -> PyErr {
        let text = match self.is_notification {
            true => "a notification is not answered",
            false => "the call is answered, or another thread sends a part of its reply",
        };
        raise(py, Error::Refused(text.to_owned()))
    }
}

#[pymethods]
impl Request {
    /// The request.
    #[getter]
    fn data(&self, py: Python<'_>) -> Py<PyBytes> {
        self.data.clone_ref(py)
    }

    /// Whether it is a notification, which is not answered.
    #[getter]
    fn is_notification(&self) -> bool {
        self.is_notification
    }

    /// Whether it was answered, or is a notification.
    #[getter]
    fn is_answered(&self) -> bool {
        self.responder().is_none()
    }

    /// When the client stops waiting, in seconds of `time.monotonic()`, or None. Nothing ends by it here.
    #[getter]
    fn deadline(&self) -> Option<f64> {
        (self.deadline_ns > 0).then_some(self.deadline_ns as f64 / 1e9)
    }

    /// The header `traceparent` with which the client has submitted it: the span that is the parent of this service's.
    /// None if it came without a valid one, and once it was answered.
    #[getter]
    fn traceparent(&self) -> Option<String> {
        self.responder().as_ref()?.traceparent().map(|traceparent| traceparent.to_string())
    }

    /// The process of the client, if it is known.
    #[getter]
    fn peer_pid(&self) -> Option<u32> {
        self.peer.map(|peer| peer.pid)
    }

    /// The user of the client, if it is known.
    #[getter]
    fn peer_uid(&self) -> Option<u32> {
        self.peer.map(|peer| peer.uid)
    }

    /// Whether nobody waits for the reply any more: the client has cancelled, or left. Does not wait.
    fn is_cancelled(&self, py: Python<'_>) -> bool {
        let is_cancelled = || self.responder().as_ref().is_some_and(Responder::is_cancelled);
        // Without a thread that receives, nobody else finds the cancel.
        is_cancelled() || (py.detach(|| self.service.get().poll_ahead()) && is_cancelled())
    }

    /// Replies, and ends the call. Does not wait: what the client has no space for is kept.
    ///
    /// Raises `TooLarge` for more than the client takes; the call is still open then.
    fn reply(&self, data: &Bound<'_, PyAny>) -> PyResult<()> {
        let payload = Payload::of(data)?;
        let bytes = payload.as_slice();
        self.answer(data.py(), bytes.len(), |responder| responder.reply(bytes))
    }

    /// Fails the call with a code of your own, from 0 to 4,294,967,295, and a text or bytes. Does not wait.
    ///
    /// The client raises `Failed` with them.
    #[pyo3(signature = (code, text=None))]
    fn fail(&self, code: &Bound<'_, PyAny>, text: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let (py, code) = (code.py(), number("code", code)?);
        match text.map(|text| text.extract::<String>().map_err(|_| text)) {
            None => self.answer(py, 0, |responder| responder.fail(code, b"")),
            Some(Ok(text)) => self.answer(py, text.len(), |responder| responder.fail(code, text.as_bytes())),
            Some(Err(data)) => {
                let payload = Payload::of(data)?;
                let bytes = payload.as_slice();
                self.answer(py, bytes.len(), |responder| responder.fail(code, bytes))
            }
        }
    }

    /// Ends a reply that was sent in parts. Does not wait.
    fn end(&self, py: Python<'_>) -> PyResult<()> {
        self.answer(py, 0, Responder::end)
    }

    /// Sends a part of the reply. Waits up to `timeout` seconds until the client has space for it; `TimedOut` then.
    ///
    /// If the call is cancelled meanwhile, the part is dropped. `TooLarge` for more than the client takes.
    #[pyo3(signature = (data, timeout=None))]
    fn part(&self, data: &Bound<'_, PyAny>, timeout: Option<f64>) -> PyResult<()> {
        match self.send_part(data, deadline(timeout)?)? {
            true => Ok(()),
            false => Err(timed_out(data.py(), "waiting for space for a part of a reply")),
        }
    }

    /// As `part`, but does not wait: False if there is no space. `Service.arm` then reports when there is.
    fn try_part(&self, data: &Bound<'_, PyAny>) -> PyResult<bool> {
        self.send_part(data, Deadline::Now)
    }

    /// Drops the call: its client gets `Abandoned`. Does not wait. Without effect if it is answered.
    fn abandon(&self) {
        let responder = self.responder().take();
        drop(responder);
    }
}

impl Request {
    fn send_part(&self, data: &Bound<'_, PyAny>, deadline: Deadline) -> PyResult<bool> {
        let py = data.py();
        let payload = Payload::of(data)?;
        let bytes = payload.as_slice();
        // Without the lock: a part may wait.
        let responder = self.responder().take();
        let mut responder = responder.ok_or_else(|| self.answered(py))?;
        let sent = in_slices(py, deadline, |until| {
            let until = if deadline == Deadline::Now { deadline } else { until.into() };
            match py.detach(|| responder.part_until(bytes, until)).map_err(|error| raise(py, error))? {
                Sent::Sent => return Ok(Some(())),
                _ if deadline == Deadline::Now => return Ok(None),
                _ => {}
            }
            py.detach(|| self.service.get().poll_ahead());
            Ok(responder.is_cancelled().then_some(()))
        });
        *self.responder() = Some(responder);
        Ok(sent?.is_some())
    }
}
