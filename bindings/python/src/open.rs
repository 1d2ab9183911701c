//! How endpoints come into being: options, `Listener`, `Opening`, and the functions of the module.

use crate::broadcast::{Publisher, Subscriber, policy, seconds, start_from};
use crate::error::{raise, timed_out};
use crate::handle::{Handle, Using, deadline, in_slices, is_readable};
use crate::loop_client::LoopClient;
use crate::number::{option, wrong_type};
use crate::receiver::Receiver;
use crate::sender::Sender;
use pelton::{Deadline, Options, Wait};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

/// The options of what connects, listens, gathers, opens or creates a path, and of threads.
pub const CONNECT: &[&str] = &["timeout", "capacity", "message_bytes_max", "allow_uids", "spin"];
pub const CONNECT_SENDER: &[&str] = &["timeout", "capacity", "message_bytes_max", "allow_uids", "spin", "traced"];
const LISTEN: &[&str] = &["capacity", "message_bytes_max", "allow_uids", "spin", "traced"];
const GATHER: &[&str] = &["capacity", "message_bytes_max", "allow_uids", "spin", "lanes"];
const THREADS: &[&str] = &["capacity", "message_bytes_max", "spin", "traced"];
pub const OPEN: &[&str] = &["timeout", "allow_uids", "mode", "spin"];
pub const CREATE: &[&str] =
    &["timeout", "allow_uids", "mode", "spin", "capacity", "message_bytes_max", "lanes", "traced"];

/// The options of publishers and subscribers.
pub const PUBLISH: &[&str] = &["capacity", "message_bytes_max", "history", "hold_max", "allow_uids", "spin"];
pub const SUBSCRIBE: &[&str] =
    &["timeout", "policy", "lag_after", "slack", "start_from", "capacity", "message_bytes_max", "allow_uids", "spin"];
pub const PUBLISH_PATH: &[&str] =
    &["timeout", "capacity", "message_bytes_max", "history", "hold_max", "mode", "allow_uids", "spin"];
pub const SUBSCRIBE_PATH: &[&str] =
    &["timeout", "durable", "policy", "lag_after", "slack", "start_from", "mode", "allow_uids", "spin"];
pub const SUBSCRIBE_THREAD: &[&str] = &["policy", "lag_after", "slack", "start_from", "spin"];

/// The options of clients and services of calls.
pub const CLIENT: &[&str] =
    &["timeout", "capacity", "message_bytes_max", "call_bytes_max", "memory_bytes_max", "allow_uids", "spin"];
pub const SERVICE: &[&str] =
    &["capacity", "message_bytes_max", "call_bytes_max", "memory_bytes_max", "allow_uids", "spin", "lanes"];

/// The options of the keyword arguments, of which `taken` can be given.
pub fn options(given: Option<&Bound<'_, PyDict>>, taken: &[&str]) -> PyResult<Options> {
    let mut options = Options::new();
    for (name, value) in given.into_iter().flatten() {
        let name: String = name.extract()?;
        if !taken.contains(&name.as_str()) {
            let wanted = taken.join(", ");
            return Err(PyTypeError::new_err(format!("{name} is no option of this function, wanted one of {wanted}")));
        }
        // None is the default, except of a timeout, where it is no limit.
        if value.is_none() && name != "timeout" {
            continue;
        }
        options = match name.as_str() {
            "timeout" => {
                let seconds =
                    value.extract().map_err(|_| wrong_type(&name, &value, "seconds, or None for no limit"))?;
                options.connect_deadline(deadline(seconds)?)
            }
            "capacity" => options.capacity(option(&name, &value)?),
            "message_bytes_max" => options.message_bytes_max(option(&name, &value)?),
            "allow_uids" => {
                let uids = value.try_iter().map_err(|_| wrong_type(&name, &value, "a list of user ids"))?;
                options.allow_uids(&uids.map(|uid| option::<u32>(&name, &uid?)).collect::<PyResult<Vec<_>>>()?)
            }
            "spin" => options.wait(if value.is_truthy()? { Wait::Spin } else { Wait::Block }),
            "traced" => options.traced(value.is_truthy()?),
            "lanes" => options.lanes(option(&name, &value)?),
            "mode" => options.mode(option(&name, &value)?),
            "history" => options.history(option(&name, &value)?),
            "hold_max" => options.hold_max(seconds(&name, &value)?),
            "policy" => options.policy(policy(&name, &value)?),
            "lag_after" => options.lag_after(seconds(&name, &value)?),
            "slack" => options.slack(option(&name, &value)?),
            "start_from" => options.start_from(start_from(&name, &value)?),
            "durable" => options.durable(&value.extract::<String>().map_err(|_| wrong_type(&name, &value, "a name"))?),
            "call_bytes_max" => options.call_bytes_max(option(&name, &value)?),
            "memory_bytes_max" => options.memory(option(&name, &value)?),
            other => unreachable!("{other} is in a list of options"),
        };
    }
    Ok(options)
}

/// Continues an opening until it has ended.
pub fn finish<T: Send>(py: Python<'_>, started: pelton::Result<pelton::Opening<T>>) -> PyResult<T> {
    let opening = Handle::new("opening", started.map_err(|error| raise(py, error))?);
    let mut using = opening.take(py)?;
    loop {
        // A step may wait a little, for a lock of a directory.
        if let Some(opened) = using.step(py, pelton::Opening::try_finish)? {
            return Ok(opened);
        }
        using.wait_readable(py, Deadline::Never, AsFd::as_fd)?;
        // Retries may make it readable in each slice.
        crate::log::deliver_and_check_signals(py)?;
    }
}

/// An endpoint that is being opened, or waits for a successor of its peer, for an event loop.
///
/// Whenever `fileno()` is readable, call `try_finish()`. Closing it cancels.
#[pyclass(frozen, module = "pelton", weakref)]
pub struct Opening(Handle<Started>);

/// An opening of either endpoint, of one with the listener that accepts it, or of a client.
pub enum Started {
    Sender(pelton::Opening<pelton::Sender>, Option<pelton::Listener>),
    Receiver(pelton::Opening<pelton::Receiver>, Option<pelton::Listener>),
    Client(pelton::Opening<pelton::Client>),
    Publisher(pelton::Opening<pelton::Publisher>),
    Subscriber(pelton::Opening<pelton::Subscriber>),
    ResumedSender(Resuming<pelton::Sender>),
    ResumedReceiver(Resuming<pelton::Receiver>),
}

/// An endpoint that waits for a successor of its peer, lent by its handle. Dropping it returns the endpoint.
pub struct Resuming<T: Send + 'static> {
    /// `None` once the endpoint is returned.
    steps: Option<pelton::Resuming<T>>,
    give_back: Option<Box<dyn FnOnce(T) + Send>>,
    /// Python's object of the endpoint.
    object: Py<PyAny>,
}

impl<T: Send + 'static> Resuming<T> {
    pub fn new(
        started: std::result::Result<pelton::Resuming<T>, Box<(T, pelton::Error)>>,
        object: Py<PyAny>,
        give_back: impl FnOnce(T) + Send + 'static,
    ) -> pelton::Result<Resuming<T>> {
        match started {
            Ok(steps) => Ok(Resuming { steps: Some(steps), give_back: Some(Box::new(give_back)), object }),
            Err(failed) => {
                let (endpoint, error) = *failed;
                give_back(endpoint);
                Err(error)
            }
        }
    }

    /// Continues. Once there is a successor, and after an error, the endpoint is returned to its handle.
    fn try_finish(&mut self) -> pelton::Result<Option<()>> {
        let resumed = self.steps()?.try_finish();
        if !matches!(resumed, Ok(false)) {
            self.end();
        }
        resumed.map(|resumed| resumed.then_some(()))
    }

    fn steps(&mut self) -> pelton::Result<&mut pelton::Resuming<T>> {
        let ended = || pelton::Error::Refused("this wait has ended: start another one".to_owned());
        self.steps.as_mut().ok_or_else(ended)
    }

    /// Waits until there is a successor; `None` once the deadline has passed. `handle` is that of the endpoint.
    pub fn wait<H: Send>(&mut self, py: Python<'_>, deadline: Deadline, handle: &Handle<H>) -> PyResult<Option<()>> {
        in_slices(py, deadline, |until| {
            if handle.is_closing() {
                return Err(handle.closed(py));
            }
            let step = || {
                if self.try_finish()?.is_some() {
                    return Ok(Some(()));
                }
                is_readable(self.steps()?.as_fd(), until.into())?;
                self.try_finish()
            };
            py.detach(step).map_err(|error| raise(py, error))
        })
    }

    fn end(&mut self) {
        if let (Some(steps), Some(give_back)) = (self.steps.take(), self.give_back.take()) {
            give_back(steps.cancel());
        }
    }
}

impl Opening {
    pub fn new(started: Started) -> Opening {
        Opening(Handle::new("opening", started))
    }
}

#[pymethods]
impl Opening {
    /// Continues, and returns the endpoint once it is open, or has its successor; None before. Does not wait.
    fn try_finish(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        let mut using = self.0.take(py)?;
        let failed = |error| raise(py, error);
        Ok(match &mut *using {
            Started::Sender(opening, listener) => match opening.try_finish().map_err(failed)? {
                Some(sender) => Some(Py::new(py, Sender::new(sender, listener.take()))?.into_any()),
                None => None,
            },
            Started::Receiver(opening, listener) => match opening.try_finish().map_err(failed)? {
                Some(receiver) => Some(Py::new(py, Receiver::new(receiver, listener.take()))?.into_any()),
                None => None,
            },
            Started::Client(opening) => match opening.try_finish().map_err(failed)? {
                Some(client) => Some(Py::new(py, LoopClient::new(client))?.into_any()),
                None => None,
            },
            Started::Publisher(opening) => match opening.try_finish().map_err(failed)? {
                Some(publisher) => Some(Py::new(py, Publisher::new(publisher))?.into_any()),
                None => None,
            },
            Started::Subscriber(opening) => match opening.try_finish().map_err(failed)? {
                Some(subscriber) => Some(Py::new(py, Subscriber::new(subscriber))?.into_any()),
                None => None,
            },
            // It may copy a whole lane.
            Started::ResumedSender(it) => {
                py.detach(|| it.try_finish()).map_err(failed)?.map(|()| it.object.clone_ref(py))
            }
            Started::ResumedReceiver(it) => {
                py.detach(|| it.try_finish()).map_err(failed)?.map(|()| it.object.clone_ref(py))
            }
        })
    }

    /// The descriptor to watch for readability.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        let failed = |error| raise(py, error);
        Ok(match &mut *self.0.take(py)? {
            Started::Sender(opening, _) => opening.as_raw_fd(),
            Started::Receiver(opening, _) => opening.as_raw_fd(),
            Started::Client(opening) => opening.as_raw_fd(),
            Started::Publisher(opening) => opening.as_raw_fd(),
            Started::Subscriber(opening) => opening.as_raw_fd(),
            Started::ResumedSender(it) => it.steps().map_err(failed)?.as_raw_fd(),
            Started::ResumedReceiver(it) => it.steps().map_err(failed)?.as_raw_fd(),
        })
    }

    /// Closes it. Does not wait.
    fn close(&self) {
        self.0.close();
    }

    /// Whether this handle is closed.
    #[getter]
    fn closed(&self) -> bool {
        self.0.is_closed()
    }
}

impl<T: Send + 'static> Drop for Resuming<T> {
    fn drop(&mut self) {
        self.end();
    }
}

/// Accepts peers under a name, one after another: see `listen`.
#[pyclass(frozen, module = "pelton", weakref)]
pub struct Listener(Handle<pelton::Listener>);

/// How long a peer that has connected has for its handshake if the caller does not wait.
const GRACE: Duration = Duration::from_secs(1);

/// The deadline of a wait for a peer that connects to the listener. Without one, a caller that repeats an attempt of 0
/// seconds would disconnect each peer in its handshake.
pub fn with_grace(py: Python<'_>, listener: &pelton::Listener, deadline: Deadline) -> PyResult<Deadline> {
    let has_peer = || is_readable(listener.as_fd(), Deadline::Now).map_err(|error| raise(py, error));
    Ok(if deadline == Deadline::Now && has_peer()? { GRACE.into() } else { deadline })
}

/// Accepts a peer; `None` once the deadline has passed. The handshake continues from slice to slice.
fn accept<T: Send>(
    py: Python<'_>,
    using: &mut Using<'_, pelton::Listener>,
    deadline: Deadline,
    start: impl FnOnce(&pelton::Listener) -> pelton::Result<pelton::Opening<T>>,
) -> PyResult<Option<T>> {
    let deadline = with_grace(py, using, deadline)?;
    let mut opening = start(using).map_err(|error| raise(py, error))?;
    using.wait(py, deadline, |_, until| {
        if let Some(accepted) = opening.try_finish()? {
            return Ok(Some(accepted));
        }
        is_readable(opening.as_fd(), until)?;
        opening.try_finish()
    })
}

#[pymethods]
impl Listener {
    /// Waits up to `timeout` seconds for a receiver to connect, and returns the sender for it.
    #[pyo3(signature = (timeout=None))]
    fn accept_sender(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Sender> {
        let mut using = self.0.take(py)?;
        let accepted = accept(py, &mut using, deadline(timeout)?, pelton::Listener::start_accept_sender)?;
        let sender = accepted.ok_or_else(|| timed_out(py, "waiting for a receiver to connect"))?;
        Ok(Sender::new(sender, Some(using.clone())))
    }

    /// Waits up to `timeout` seconds for a sender to connect, and returns the receiver for it.
    #[pyo3(signature = (timeout=None))]
    fn accept_receiver(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Receiver> {
        let mut using = self.0.take(py)?;
        let accepted = accept(py, &mut using, deadline(timeout)?, pelton::Listener::start_accept_receiver)?;
        let receiver = accepted.ok_or_else(|| timed_out(py, "waiting for a sender to connect"))?;
        Ok(Receiver::new(receiver, Some(using.clone())))
    }

    /// As `accept_sender`, but does not wait: returns an `Opening` for an event loop, which begins anew by another one.
    ///
    /// Closing the opening may disconnect a receiver that has connected: keep it to accept that one later.
    fn start_accept_sender(&self, py: Python<'_>) -> PyResult<Opening> {
        let using = self.0.take(py)?;
        let started = using.start_accept_sender().map_err(|error| raise(py, error))?;
        Ok(Opening::new(Started::Sender(started, Some(using.clone()))))
    }

    /// As `accept_receiver`, but does not wait. Otherwise as `start_accept_sender`.
    fn start_accept_receiver(&self, py: Python<'_>) -> PyResult<Opening> {
        let using = self.0.take(py)?;
        let started = using.start_accept_receiver().map_err(|error| raise(py, error))?;
        Ok(Opening::new(Started::Receiver(started, Some(using.clone()))))
    }

    /// The descriptor to watch for readability: a peer has connected.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        Ok(self.0.take(py)?.as_fd().as_raw_fd())
    }

    /// Stops listening, once the accepted endpoints are closed too. Does not wait.
    fn close(&self) {
        self.0.close();
    }

    /// Whether this handle is closed.
    #[getter]
    fn closed(&self) -> bool {
        self.0.is_closed()
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __exit__(&self, _type: &Bound<'_, PyAny>, _value: &Bound<'_, PyAny>, _traceback: &Bound<'_, PyAny>) {
        self.0.close();
    }
}

/// Listens under `name`, a short name or `unix:PATH`, for peers to accept. Does not wait.
///
/// Options as of `Sender.connect`. Raises `InUse`, `BadName`, `BadOption`.
#[pyfunction]
#[pyo3(
    signature = (name, **given),
    text_signature = "(name, *, capacity=None, message_bytes_max=None, allow_uids=None, spin=False, \
        traced=False)"
)]
pub fn listen(py: Python<'_>, name: &str, given: Option<&Bound<'_, PyDict>>) -> PyResult<Listener> {
    let listener = options(given, LISTEN)?.cast().listen(name).map_err(|error| raise(py, error))?;
    Ok(Listener(Handle::new("listener", listener)))
}

/// A receiver of up to `lanes` senders (1,024), which connect under `name`. Does not wait.
///
/// Each sender has a lane of its own, so none waits for another; `capacity` is of each. `Message.lane` is the
/// number of a message's.
#[pyfunction]
#[pyo3(
    signature = (name, **given),
    text_signature = "(name, *, capacity=None, message_bytes_max=None, allow_uids=None, spin=False, \
        lanes=None)"
)]
pub fn gather(py: Python<'_>, name: &str, given: Option<&Bound<'_, PyDict>>) -> PyResult<Receiver> {
    let receiver = options(given, GATHER)?.cast().gather_at(name).map_err(|error| raise(py, error))?;
    Ok(Receiver::new(receiver, None))
}

/// A sender and a receiver for two threads of this process.
#[pyfunction]
#[pyo3(signature = (**given), text_signature = "(*, capacity=None, message_bytes_max=None, spin=False, traced=False)")]
pub fn threads(py: Python<'_>, given: Option<&Bound<'_, PyDict>>) -> PyResult<(Sender, Receiver)> {
    let (sender, receiver) = options(given, THREADS)?.cast().threads().map_err(|error| raise(py, error))?;
    Ok((Sender::new(sender, None), Receiver::new(receiver, None)))
}

/// What is known about an endpoint: see `Sender.info`.
///
/// `messages` and `bytes` were sent or released; `waits` found no space or no message; `sleeps` and `wakes_sent` are
/// wake-ups.
#[pyclass(frozen, get_all, module = "pelton")]
pub struct Info {
    pub capacity: u64,
    pub message_bytes_max: u64,
    pub unreleased: Option<u64>,
    pub peer_pid: Option<u32>,
    pub peer_uid: Option<u32>,
    pub messages: u64,
    pub bytes: u64,
    pub waits: u64,
    pub sleeps: u64,
    pub wakes_sent: u64,
}

impl Info {
    pub fn new(capacity: u64, message_bytes_max: u64, peer: Option<pelton::Peer>, counters: pelton::Counters) -> Info {
        let pelton::Counters { messages, bytes, waits, sleeps, wakes_sent, .. } = counters;
        let (peer_pid, peer_uid) = (peer.map(|peer| peer.pid), peer.map(|peer| peer.uid));
        Info {
            capacity,
            message_bytes_max,
            unreleased: None,
            peer_pid,
            peer_uid,
            messages,
            bytes,
            waits,
            sleeps,
            wakes_sent,
        }
    }
}

#[pymethods]
impl Info {
    fn __repr__(&self) -> String {
        let Info { capacity, message_bytes_max, messages, bytes, waits, sleeps, wakes_sent, .. } = self;
        let (unreleased, pid, uid) = (or_none(self.unreleased), or_none(self.peer_pid), or_none(self.peer_uid));
        format!(
            "Info(capacity={capacity}, message_bytes_max={message_bytes_max}, unreleased={unreleased}, peer_pid={pid}, \
             peer_uid={uid}, messages={messages}, bytes={bytes}, waits={waits}, sleeps={sleeps}, \
             wakes_sent={wakes_sent})"
        )
    }
}

fn or_none(number: Option<impl ToString>) -> String {
    number.map_or_else(|| "None".to_owned(), |number| number.to_string())
}
