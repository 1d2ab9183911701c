//! `pelton.Publisher` and `pelton.Subscriber`: one sends, many receive.

use crate::bytes::{Payload, to_bytes};
use crate::error::{named, raise, timed_out};
use crate::handle::{Handle, Using, deadline};
use crate::log;
use crate::number::{number_or_none, option, wrong_type};
use crate::open::{
    self, Info, Opening, PUBLISH, PUBLISH_PATH, SUBSCRIBE, SUBSCRIBE_PATH, SUBSCRIBE_THREAD, Started, options,
};
use pelton::{Deadline, Options, Policy, Sent, StartFrom};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyType};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::time::Duration;

/// The policies by their names.
const POLICIES: [(&str, Policy); 3] = [("gate", Policy::Gate), ("lag", Policy::Lag), ("latest", Policy::Latest)];

fn bad(value: &Bound<'_, PyAny>, name: &str, wanted: &str) -> PyErr {
    named(value.py(), "BadOption", format!("{name} is {value}, wanted {wanted}"))
}

/// The policy of that name.
pub fn policy(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Policy> {
    let wanted = "\"gate\", \"lag\" or \"latest\"";
    let found = value.extract::<String>().map_err(|_| wrong_type(name, value, wanted))?;
    let known = POLICIES.iter().find(|(known, _)| *known == found);
    known.map(|(_, policy)| *policy).ok_or_else(|| bad(value, name, wanted))
}

/// Where a subscriber begins: "now", "oldest", or so many messages before now.
pub fn start_from(name: &str, value: &Bound<'_, PyAny>) -> PyResult<StartFrom> {
    match value.extract::<String>().as_deref() {
        Ok("now") => Ok(StartFrom::Now),
        Ok("oldest") => Ok(StartFrom::Oldest),
        Ok(_) => Err(bad(value, name, "\"now\", \"oldest\" or a number of messages")),
        Err(_) => option(name, value).map(StartFrom::Last),
    }
}

/// A duration in seconds.
pub fn seconds(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Duration> {
    let seconds = value.extract::<f64>().map_err(|_| wrong_type(name, value, "seconds"))?;
    Duration::try_from_secs_f64(seconds).map_err(|_| bad(value, name, "seconds, 0 or more"))
}

/// The sending endpoint of a broadcast. One thread at a time.
///
/// Up to 64 subscribers receive each message, which is in memory once. They join, and their ends are noticed, within
/// this publisher's calls: `send` does that if 10 ms have passed since the last time. A publisher that sends rarely
/// calls `admit` when `fileno()` is readable. After a close, also by `with`, each subscriber receives what the lane has
/// for it, and then the end. The end of a subscriber is no error. Where a method waits, `timeout` is in seconds; None
/// is no limit, 0 is not to wait. A wait ends for Ctrl-C within 50 ms. Every method may raise `Forked` in a forked
/// child; `ClosedHandle`; `Busy` while another thread waits in it.
///
/// Example:
///     with pelton.publish("prices", history=100) as publisher:
///         publisher.wait_subscribers(1, timeout=10)
///         publisher.send(b"17")
///         publisher.wait_released(timeout=10)
#[pyclass(frozen, module = "pelton", weakref)]
pub struct Publisher(Handle<pelton::Publisher>);

/// Publishes under `name`, a short name or `unix:PATH`; without a name, to threads of this process. Does not wait.
///
/// `capacity` is the lane's bytes (64 MiB), `message_bytes_max` the largest message's. `history` messages are kept for
/// subscribers that join later, as far as they fit into half the capacity. `hold_max` is how many seconds one
/// subscriber may hold the publisher up at one message: one that could do so for longer is refused, so with 0 each must
/// lag. Raises `InUse`, `BadName`, `BadOption`.
#[pyfunction]
#[pyo3(
    signature = (name=None, **given),
    text_signature = "(name=None, *, capacity=None, message_bytes_max=None, history=None, hold_max=None, \
        allow_uids=None, spin=False)"
)]
pub fn publish(py: Python<'_>, name: Option<&str>, given: Option<&Bound<'_, PyDict>>) -> PyResult<Publisher> {
    let options = options(given, PUBLISH)?;
    let publisher = match name {
        Some(name) => options.cast().publish_at(name),
        None => options.cast().publisher(),
    };
    Ok(Publisher::new(publisher.map_err(|error| raise(py, error))?))
}

/// Removes the durable subscription `durable` of the broadcast in `directory`, and so what it holds up.
///
/// No process may use it: raises `RoleTaken`. Returns whether there was one. Waits for at most 0.2 s, while another
/// process opens or removes one there; then it raises `TimedOut`. Raises `NoChannel`, `NotAChannel`.
#[pyfunction]
pub fn remove_subscription(py: Python<'_>, directory: PathBuf, durable: &str) -> PyResult<bool> {
    py.detach(|| pelton::inspect::remove_durable(directory, durable)).map_err(|error| raise(py, error))
}

impl Publisher {
    pub fn new(publisher: pelton::Publisher) -> Publisher {
        Publisher(Handle::new("publisher", publisher))
    }

    fn send_until(&self, py: Python<'_>, payload: &Payload<'_>, deadline: Deadline) -> PyResult<bool> {
        let mut using = self.0.take(py)?;
        let sent = using.try_send(payload.as_slice());
        log::deliver(py);
        match sent.map_err(|error| raise(py, error))? {
            Sent::Sent => return Ok(true),
            _ if deadline == Deadline::Now => return Ok(false),
            _ => {}
        }
        // Other threads of Python run while it waits, and may change the buffer.
        let payload = payload.as_slice().to_vec();
        let sent = using.wait(py, deadline, |publisher, until| {
            Ok((publisher.send_until(&payload, until)? == Sent::Sent).then_some(()))
        })?;
        Ok(sent.is_some())
    }
}

#[pymethods]
impl Publisher {
    /// Publishes in a directory, which keeps the lane: creates the broadcast, or continues as its publisher.
    ///
    /// Subscribers join by `Subscriber.open_path`, also while there is no publisher; a durable one keeps its place.
    /// An existing broadcast keeps its sizes. `history` and `hold_max` as of `publish`; the limit stays until the next
    /// publisher begins. `mode` is the permission bits of a new directory, 0o700; one that exists may not have more.
    /// `timeout` is how long to wait while another publisher is alive, or a subscriber is beyond `hold_max`; 0, the
    /// default, is 200 ms, which the kernel may take to end a process. Raises `RoleTaken`, `NotAChannel`, `NoSpace`,
    /// `Corrupt`, `BadOption`; `Refused` if a subscription may hold it up for longer than `hold_max`, also one that no
    /// process uses; `Rebooted`: remove the directory.
    #[classmethod]
    #[pyo3(
        signature = (directory, **given),
        text_signature = "($cls, directory, *, timeout=0.0, capacity=None, message_bytes_max=None, history=None, \
            hold_max=None, mode=None, allow_uids=None, spin=False)"
    )]
    fn open_path(
        cls: &Bound<'_, PyType>,
        directory: PathBuf,
        given: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Publisher> {
        let started = options(given, PUBLISH_PATH)?.cast().start_create_publisher(directory);
        Ok(Publisher::new(open::finish(cls.py(), started)?))
    }

    /// As `open_path`, but does not wait: returns an `Opening` for an event loop.
    #[classmethod]
    #[pyo3(
        signature = (directory, **given),
        text_signature = "($cls, directory, *, timeout=0.0, capacity=None, message_bytes_max=None, history=None, \
            hold_max=None, mode=None, allow_uids=None, spin=False)"
    )]
    fn start_open_path(
        cls: &Bound<'_, PyType>,
        directory: PathBuf,
        given: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Opening> {
        let started = options(given, PUBLISH_PATH)?.cast().start_create_publisher(directory);
        Ok(Opening::new(Started::Publisher(started.map_err(|error| raise(cls.py(), error))?)))
    }

    /// Copies a bytes-like object into the lane. Waits while a subscriber that gates holds the lane full.
    ///
    /// Raises `TimedOut` after `timeout` seconds, and `TooLarge`; then nothing is sent.
    #[pyo3(signature = (data, timeout=None))]
    fn send(&self, data: &Bound<'_, PyAny>, timeout: Option<f64>) -> PyResult<()> {
        match self.send_until(data.py(), &Payload::of(data)?, deadline(timeout)?)? {
            true => Ok(()),
            false => Err(timed_out(data.py(), "waiting for a subscriber to release its messages")),
        }
    }

    /// As `send`, but does not wait: returns whether the message is sent.
    fn try_send(&self, data: &Bound<'_, PyAny>) -> PyResult<bool> {
        self.send_until(data.py(), &Payload::of(data)?, Deadline::Now)
    }

    /// A subscriber for a thread of this process, which has joined already. Does not wait.
    ///
    /// `policy`, `lag_after`, `slack` and `start_from` as of `Subscriber.connect`. Raises `Refused` if there are 64
    /// subscribers, or if it could hold the publisher up for longer than `hold_max`; of a publisher in a directory:
    /// threads use `Subscriber.open_path` there, too.
    #[pyo3(
        signature = (**given),
        text_signature = "($self, *, policy=\"gate\", lag_after=None, slack=None, start_from=\"now\", spin=False)"
    )]
    fn subscriber(&self, py: Python<'_>, given: Option<&Bound<'_, PyDict>>) -> PyResult<Subscriber> {
        let options = checked(py, options(given, SUBSCRIBE_THREAD)?, given)?;
        let subscriber = self.0.take(py)?.subscriber(&options.cast());
        Ok(Subscriber::new(subscriber.map_err(|error| raise(py, error))?))
    }

    /// Admits subscribers that have connected, and lets go those that have ended. Returns how many there are.
    ///
    /// Does not wait. For an event loop: call it when the descriptor is readable and there is nothing to send.
    fn admit(&self, py: Python<'_>) -> PyResult<usize> {
        let admitted = self.0.take(py)?.admit();
        log::deliver(py);
        admitted.map_err(|error| raise(py, error))
    }

    /// Waits up to `timeout` seconds until there are `count` subscribers. Raises `TimedOut`.
    #[pyo3(signature = (count, timeout=None))]
    fn wait_subscribers(&self, py: Python<'_>, count: usize, timeout: Option<f64>) -> PyResult<()> {
        let found = self.0.take(py)?.wait(py, deadline(timeout)?, |publisher, until| {
            Ok(publisher.wait_subscribers_until(count, until)?.then_some(()))
        })?;
        found.ok_or_else(|| timed_out(py, "waiting for subscribers"))
    }

    /// Waits up to `timeout` seconds until each subscriber that gates has released every message. Raises `TimedOut`.
    ///
    /// One with `lag_after` that releases nothing for so long lags from then on, and is not waited for.
    #[pyo3(signature = (timeout=None))]
    fn wait_released(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let released = self
            .0
            .take(py)?
            .wait(py, deadline(timeout)?, |publisher, until| Ok(publisher.wait_released_until(until)?.then_some(())))?;
        released.ok_or_else(|| timed_out(py, "waiting for subscribers to release their messages"))
    }

    /// The subscribers that have joined, and how far each is behind. Does not wait.
    fn subscribers(&self, py: Python<'_>) -> PyResult<Vec<SubscriberState>> {
        let mut using = self.0.take(py)?;
        if using.is_forked() {
            return Err(raise(py, pelton::Error::Forked));
        }
        Ok(using.subscribers().iter().map(SubscriberState::of).collect())
    }

    /// The lane's sizes, and counters since the creation. Does not wait.
    fn info(&self, py: Python<'_>) -> PyResult<Info> {
        let using = self.0.take(py)?;
        if using.is_forked() {
            return Err(raise(py, pelton::Error::Forked));
        }
        Ok(Info::new(using.capacity(), using.message_bytes_max(), None, using.counters()))
    }

    /// The descriptor for an event loop: see `arm` and `admit`.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        Ok(self.0.take(py)?.as_raw_fd())
    }

    /// For an event loop: makes the descriptor readable when there is space for a message of `bytes`. Admits.
    ///
    /// Does not wait. Returns False if there is space, as usually: send, instead of watching the descriptor.
    #[pyo3(signature = (bytes=None))]
    fn arm(&self, py: Python<'_>, bytes: Option<&Bound<'_, PyAny>>) -> PyResult<bool> {
        let bytes = number_or_none("bytes", bytes)?.unwrap_or(0);
        let armed = self.0.take(py)?.arm(bytes);
        log::deliver(py);
        armed.map(|armed| armed.is_waiting()).map_err(|error| raise(py, error))
    }

    /// As `arm`, for `wait_released`: makes the descriptor readable when more is released. Then arm again.
    ///
    /// Returns False if each subscriber that gates has released every message.
    fn arm_released(&self, py: Python<'_>) -> PyResult<bool> {
        let armed = self.0.take(py)?.arm_released();
        log::deliver(py);
        armed.map(|armed| armed.is_waiting()).map_err(|error| raise(py, error))
    }

    /// Undoes `arm`.
    fn disarm(&self, py: Python<'_>) -> PyResult<()> {
        self.0.take(py)?.disarm();
        Ok(())
    }

    /// Closes the broadcast. Does not wait. A thread that waits in this publisher gets `ClosedHandle` within 50 ms.
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

/// A subscriber, as `Publisher.subscribers` shows it.
///
/// `pid` and `uid` are of its process; pid 0 is a durable subscription that no process uses. `durable` is its name, or
/// None. `policy` is "gate", "lag" or "latest", and `lag_after` its seconds. `lags` says whether the publisher goes on
/// without it now. `behind` counts messages that it has not released; `messages` and `missed` are what it says to have
/// received and missed. `holds` is for how many seconds it has been holding the publisher up, or None.
#[pyclass(frozen, get_all, module = "pelton")]
pub struct SubscriberState {
    pid: u32,
    uid: u32,
    durable: Option<String>,
    policy: &'static str,
    lag_after: Option<f64>,
    lags: bool,
    behind: u64,
    messages: u64,
    missed: u64,
    holds: Option<f64>,
}

impl SubscriberState {
    fn of(state: &pelton::SubscriberState) -> SubscriberState {
        let name = POLICIES.iter().find(|(_, policy)| *policy == state.policy).expect("all have a name").0;
        SubscriberState {
            pid: state.peer.pid,
            uid: state.peer.uid,
            durable: state.durable.clone(),
            policy: name,
            lag_after: state.lag_after.map(|time| time.as_secs_f64()),
            lags: state.lags,
            behind: state.behind,
            messages: state.messages,
            missed: state.missed,
            holds: state.holds.map(|time| time.as_secs_f64()),
        }
    }
}

/// A received message: `data`, its `number`, and how many messages were `missed` directly before it.
///
/// Each publisher counts its messages from 1; in a directory it continues its predecessor's count.
#[pyclass(frozen, get_all, module = "pelton")]
pub struct Delivery {
    data: Py<PyBytes>,
    number: u64,
    missed: u64,
}

/// Options that need each other.
fn checked(py: Python<'_>, options: Options, given: Option<&Bound<'_, PyDict>>) -> PyResult<Options> {
    let get = |name: &str| -> PyResult<Option<Bound<'_, PyAny>>> {
        let value = given.map(|given| given.get_item(name)).transpose()?.flatten();
        Ok(value.filter(|value| !value.is_none()))
    };
    let policy = get("policy")?.map_or(Ok(Policy::Gate), |value| policy("policy", &value))?;
    let lag_after = get("lag_after")?;
    if let Some(value) = &lag_after
        && policy != Policy::Gate
    {
        return Err(bad(value, "lag_after", "None, or the policy \"gate\""));
    }
    if let Some(value) = get("slack")?
        && (policy == Policy::Latest || policy == Policy::Gate && lag_after.is_none())
    {
        return Err(named(
            py,
            "BadOption",
            format!("slack is {value}, wanted None, the policy \"lag\", or \"gate\" with lag_after"),
        ));
    }
    Ok(options)
}

/// A receiving endpoint of a broadcast. One thread at a time.
///
/// `for delivery in subscriber` gives each `Delivery` until the publisher has closed. A close, also by `with`, leaves
/// the broadcast. Where a method waits, `timeout` is in seconds; None is no limit, 0 is not to wait. A wait ends for
/// Ctrl-C within 50 ms. After the last message every method that receives raises `Closed` if the publisher has closed,
/// and `PeerDied` if its process ended otherwise. Besides: `Corrupt`, `Forked`, `ClosedHandle`, `Busy` while another
/// thread waits in it.
///
/// Example:
///     with pelton.Subscriber.connect("prices", timeout=10, policy="lag") as subscriber:
///         for delivery in subscriber:
///             print(delivery.data, delivery.missed)
#[pyclass(frozen, module = "pelton", weakref)]
pub struct Subscriber(pub Handle<pelton::Subscriber>);

/// A message that was found, and that the subscriber keeps.
pub struct Found {
    number: u64,
    missed: u64,
}

impl Found {
    pub fn of(delivery: pelton::Delivery<'_>) -> Found {
        let found = Found { number: delivery.number(), missed: delivery.missed() };
        delivery.keep();
        found
    }

    /// Copies the message, and releases it. After an error of Python the next call finds it again.
    pub fn taken(self, py: Python<'_>, delivery: pelton::Delivery<'_>) -> PyResult<Delivery> {
        match to_bytes(py, &delivery) {
            Ok(data) => Ok(Delivery { data: data.unbind(), number: self.number, missed: self.missed }),
            Err(error) => {
                delivery.keep();
                Err(error)
            }
        }
    }
}

impl Subscriber {
    pub fn new(subscriber: pelton::Subscriber) -> Subscriber {
        Subscriber(Handle::new("subscriber", subscriber))
    }

    fn recv_until(&self, py: Python<'_>, deadline: Deadline) -> PyResult<Option<Delivery>> {
        let mut using = self.0.take(py)?;
        let mut found = find(py, &mut using, Deadline::Now)?;
        if found.is_none() && deadline != Deadline::Now {
            found = find(py, &mut using, deadline)?;
        }
        found.map(|found| found.taken(py, using.kept_delivery())).transpose()
    }
}

fn find(py: Python<'_>, using: &mut Using<'_, pelton::Subscriber>, deadline: Deadline) -> PyResult<Option<Found>> {
    using.wait(py, deadline, |subscriber, until| Ok(subscriber.receive_until(until)?.map(Found::of)))
}

#[pymethods]
impl Subscriber {
    /// Subscribes to the publisher under `name`: a short name, or `unix:PATH`.
    ///
    /// `policy` is what the publisher does when this subscriber falls behind. With "gate" it waits: nothing is lost;
    /// with `lag_after` for so many seconds, then the subscriber lags until it has caught up. With "lag" it goes on:
    /// messages are missed, and counted; `slack` is by how many bytes the subscriber may be behind before (256 KiB).
    /// With "latest" the subscriber receives the newest message only. `start_from` is the first message: "now",
    /// "oldest", or a number of messages before now. `timeout` is how long to wait for a publisher; 0, the default,
    /// fails immediately. `message_bytes_max` is the largest message that it accepts: of another user 1 MiB. Raises
    /// `NoListener`, `TimedOut`, `Refused`, `BadName`, `BadOption`.
    #[classmethod]
    #[pyo3(
        signature = (name, **given),
        text_signature = "($cls, name, *, timeout=0.0, policy=\"gate\", lag_after=None, slack=None, \
            start_from=\"now\", capacity=None, message_bytes_max=None, allow_uids=None, spin=False)"
    )]
    fn connect(cls: &Bound<'_, PyType>, name: &str, given: Option<&Bound<'_, PyDict>>) -> PyResult<Subscriber> {
        let started = checked(cls.py(), options(given, SUBSCRIBE)?, given)?.cast().start_connect_subscriber(name);
        Ok(Subscriber::new(open::finish(cls.py(), started)?))
    }

    /// As `connect`, but does not wait: returns an `Opening` for an event loop.
    #[classmethod]
    #[pyo3(
        signature = (name, **given),
        text_signature = "($cls, name, *, timeout=0.0, policy=\"gate\", lag_after=None, slack=None, \
            start_from=\"now\", capacity=None, message_bytes_max=None, allow_uids=None, spin=False)"
    )]
    fn start_connect(cls: &Bound<'_, PyType>, name: &str, given: Option<&Bound<'_, PyDict>>) -> PyResult<Opening> {
        let started = checked(cls.py(), options(given, SUBSCRIBE)?, given)?.cast().start_connect_subscriber(name);
        Ok(Opening::new(Started::Subscriber(started.map_err(|error| raise(cls.py(), error))?)))
    }

    /// Subscribes to the broadcast in a directory, with or without a publisher.
    ///
    /// `durable`: the subscription keeps its place under this name, over restarts of both sides. While no process uses
    /// the name it counts by its policy: "gate" holds the publisher up once the lane is full, until it returns, or
    /// `remove_subscription`. A message that `recv` has returned is received. `policy`, `lag_after`, `slack` and
    /// `start_from` as of `connect`; "latest" cannot be durable, and `start_from` is for the first of the name alone.
    /// `mode` is the permission bits that the directory may have, 0o700. `timeout` is how long to wait for the
    /// directory, and for a name that another process uses; 0, the default, is 200 ms for the name. Raises `NoChannel`,
    /// `RoleTaken`, `Refused`, `NotAChannel`, `NoSpace`, `Rebooted`, `Corrupt`, `BadName`, `BadOption`.
    #[classmethod]
    #[pyo3(
        signature = (directory, **given),
        text_signature = "($cls, directory, *, timeout=0.0, durable=None, policy=\"gate\", lag_after=None, slack=None, \
            start_from=\"now\", mode=None, allow_uids=None, spin=False)"
    )]
    fn open_path(
        cls: &Bound<'_, PyType>,
        directory: PathBuf,
        given: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Subscriber> {
        let options = checked(cls.py(), options(given, SUBSCRIBE_PATH)?, given)?;
        let started = options.cast().start_open_subscriber(directory);
        Ok(Subscriber::new(open::finish(cls.py(), started)?))
    }

    /// As `open_path`, but does not wait: returns an `Opening` for an event loop.
    #[classmethod]
    #[pyo3(
        signature = (directory, **given),
        text_signature = "($cls, directory, *, timeout=0.0, durable=None, policy=\"gate\", lag_after=None, slack=None, \
            start_from=\"now\", mode=None, allow_uids=None, spin=False)"
    )]
    fn start_open_path(
        cls: &Bound<'_, PyType>,
        directory: PathBuf,
        given: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Opening> {
        let options = checked(cls.py(), options(given, SUBSCRIBE_PATH)?, given)?;
        let started = options.cast().start_open_subscriber(directory);
        Ok(Opening::new(Started::Subscriber(started.map_err(|error| raise(cls.py(), error))?)))
    }

    /// The next message, copied. Waits up to `timeout` seconds; raises `TimedOut` when they have passed.
    #[pyo3(signature = (timeout=None))]
    fn recv(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Delivery> {
        self.recv_until(py, deadline(timeout)?)?.ok_or_else(|| timed_out(py, "waiting for a message"))
    }

    /// As `recv`, but does not wait: None if there is no message.
    fn try_recv(&self, py: Python<'_>) -> PyResult<Option<Delivery>> {
        self.recv_until(py, Deadline::Now)
    }

    /// After `PeerDied` or `Closed`: waits up to `timeout` seconds for the publisher's successor under the same name.
    ///
    /// Joins it with the same options; its messages count from 1, in a directory they continue. `fileno` stays the
    /// same. Raises `TimedOut`: the next call continues, so call it again, or close the subscriber, which a successor
    /// may count already. Raises `Refused` while the publisher is alive, and for a subscriber of a thread.
    #[pyo3(signature = (timeout=None))]
    fn resume(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let resumed = self
            .0
            .take(py)?
            .wait(py, deadline(timeout)?, |subscriber, until| Ok(subscriber.resume_until(until)?.then_some(())))?;
        resumed.ok_or_else(|| timed_out(py, "waiting for the publisher's successor"))
    }

    /// Messages missed so far, also at the very end of a broadcast; with the policy "latest", those skipped.
    #[getter]
    fn missed(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.0.take(py)?.missed())
    }

    /// Whether it continues a durable subscription, and did not begin it.
    #[getter]
    fn continues(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.0.take(py)?.continues())
    }

    /// The lane's sizes, the publisher, and counters since the creation. Does not wait.
    fn info(&self, py: Python<'_>) -> PyResult<Info> {
        let using = self.0.take(py)?;
        if using.is_forked() {
            return Err(raise(py, pelton::Error::Forked));
        }
        Ok(Info::new(using.capacity(), using.message_bytes_max(), using.peer(), using.counters()))
    }

    /// The descriptor for an event loop: see `arm`.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        Ok(self.0.take(py)?.as_raw_fd())
    }

    /// For an event loop: makes the descriptor readable when a message arrives, or the publisher leaves.
    ///
    /// Does not wait. Returns False if there is a message already: receive, instead of watching the descriptor.
    fn arm(&self, py: Python<'_>) -> PyResult<bool> {
        let armed = self.0.take(py)?.arm();
        log::deliver(py);
        armed.map(|armed| armed.is_waiting()).map_err(|error| raise(py, error))
    }

    /// Undoes `arm`. Call it before a method that waits, and when the loop loses interest.
    fn disarm(&self, py: Python<'_>) -> PyResult<()> {
        self.0.take(py)?.disarm();
        Ok(())
    }

    /// Leaves the broadcast. Does not wait. A thread that waits in this subscriber gets `ClosedHandle` within 50 ms.
    fn close(&self) {
        self.0.close();
    }

    /// Whether this handle is closed.
    #[getter]
    fn closed(&self) -> bool {
        self.0.is_closed()
    }

    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Delivery>> {
        match self.recv_until(py, Deadline::Never) {
            Err(error) if crate::error::is_end(py, &error) => Ok(None),
            found => found,
        }
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __exit__(&self, _type: &Bound<'_, PyAny>, _value: &Bound<'_, PyAny>, _traceback: &Bound<'_, PyAny>) {
        self.0.close();
    }
}
