//! `pelton.Receiver`, and the messages that it lends.

use crate::bytes::{Target, empty_list, to_bytes};
use crate::descriptors;
use crate::error::{internal, named, raise, timed_out};
use crate::handle::{Handle, Using, deadline};
use crate::log;
use crate::number::number;
use crate::open::{self, CONNECT, CREATE, Info, OPEN, Opening, Resuming, Started, options};
use crate::view::{EnteredView, fill_view};
use pelton::raw::Record;
use pelton::{Deadline, Error, Held, Listener, Traceparent};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyMemoryView, PyType};
use std::mem;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::raw::c_int;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard};

/// A receiver, and the listener that had accepted it.
struct Endpoint {
    receiver: pelton::Receiver,
    listener: Option<Listener>,
}

/// The receiving endpoint of a channel. One thread at a time.
///
/// `for message in receiver` gives `bytes` until the sender has closed. Closing the receiver, also by `with`, ends the
/// channel. Where a method waits, `timeout` is in seconds; None is no limit, 0 is not to wait. A wait ends for Ctrl-C
/// within 50 ms. After the last message every method that receives raises `Closed` if the sender has closed, and
/// `PeerDied` if its process ended otherwise. Besides: `Corrupt`, `Forked`, `ClosedHandle`, `Busy` while another
/// thread waits in it.
///
/// Example:
///     with pelton.Receiver.connect("events", timeout=10) as receiver:
///         print(receiver.recv(timeout=1))
#[pyclass(frozen, module = "pelton", weakref)]
pub struct Receiver {
    endpoint: Handle<Endpoint>,
}

impl Receiver {
    pub fn new(receiver: pelton::Receiver, listener: Option<Listener>) -> Receiver {
        Receiver { endpoint: Handle::new("receiver", Endpoint { receiver, listener }) }
    }

    fn recv_until<'py>(&self, py: Python<'py>, deadline: Deadline) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let mut using = self.endpoint.take(py)?;
        match find(py, &mut using, deadline)? {
            Some(record) => taken(py, using.receiver.message(record), |message| to_bytes(py, message)).map(Some),
            None => Ok(None),
        }
    }
}

/// The next message. Waits until the deadline.
#[inline]
fn find(py: Python<'_>, using: &mut Using<'_, Endpoint>, deadline: Deadline) -> PyResult<Option<Record>> {
    if let Some(record) = using.receiver.peek_fast() {
        return Ok(Some(record));
    }
    let found = using.wait(py, Deadline::Now, |endpoint, now| endpoint.receiver.find_record(now))?;
    match found {
        None if deadline != Deadline::Now => {
            using.wait(py, deadline, |endpoint, until| endpoint.receiver.find_record(until))
        }
        found => Ok(found),
    }
}

/// Reads a message by `read`, and releases it, unless that fails: then the next call gets the message again.
#[inline]
fn taken<T>(
    _py: Python<'_>,
    message: pelton::Message<'_>,
    read: impl FnOnce(&pelton::Message<'_>) -> PyResult<T>,
) -> PyResult<T> {
    let done = read(&message);
    if done.is_err() {
        mem::forget(message);
    }
    done
}

#[cold]
fn no_message_in_time(py: Python<'_>) -> PyErr {
    timed_out(py, "waiting for a message")
}

fn start_open_path(
    directory: PathBuf,
    create: bool,
    given: Option<&Bound<'_, PyDict>>,
) -> PyResult<pelton::Result<pelton::Opening<pelton::Receiver>>> {
    Ok(match create {
        true => options(given, CREATE)?.cast().start_create_receiver(directory),
        false => options(given, OPEN)?.cast().start_open_receiver(directory),
    })
}

/// Takes the receiver out of its handle until there is a successor.
fn resuming(this: &Bound<'_, Receiver>) -> PyResult<Resuming<pelton::Receiver>> {
    let py = this.py();
    let Endpoint { receiver, listener } = this.get().endpoint.lend(py)?;
    let home = this.clone().unbind();
    let give_back = move |receiver| home.get().endpoint.give_back(Endpoint { receiver, listener });
    Resuming::new(receiver.start_resume(), this.clone().into_any().unbind(), give_back)
        .map_err(|error| raise(py, error))
}

#[pymethods]
impl Receiver {
    /// Connects to a sender that listens under `name`: a short name, or `unix:PATH`.
    ///
    /// `timeout` is how long to wait for a listener; 0, the default, fails immediately. `capacity` and
    /// `message_bytes_max` limit the lane that the sender creates. Otherwise as `Sender.connect`.
    #[classmethod]
    #[pyo3(
        signature = (name, **given),
        text_signature = "($cls, name, *, timeout=0.0, capacity=None, message_bytes_max=None, allow_uids=None, \
            spin=False)"
    )]
    fn connect(cls: &Bound<'_, PyType>, name: &str, given: Option<&Bound<'_, PyDict>>) -> PyResult<Receiver> {
        let started = options(given, CONNECT)?.cast().start_connect_receiver(name);
        Ok(Receiver::new(open::finish(cls.py(), started)?, None))
    }

    /// As `connect`, but does not wait: returns an `Opening` for an event loop.
    #[classmethod]
    #[pyo3(
        signature = (name, **given),
        text_signature = "($cls, name, *, timeout=0.0, capacity=None, message_bytes_max=None, allow_uids=None, \
            spin=False)"
    )]
    fn start_connect(cls: &Bound<'_, PyType>, name: &str, given: Option<&Bound<'_, PyDict>>) -> PyResult<Opening> {
        let started = options(given, CONNECT)?.cast().start_connect_receiver(name);
        Ok(Opening::new(Started::Receiver(started.map_err(|error| raise(cls.py(), error))?, None)))
    }

    /// Opens the channel in a directory as its receiver; with `create`, creates it if it does not exist.
    ///
    /// Begins at the oldest unreleased message. Otherwise as `Sender.open_path`.
    #[classmethod]
    #[pyo3(
        signature = (directory, *, create=false, **given),
        text_signature = "($cls, directory, *, create=False, timeout=0.0, capacity=None, message_bytes_max=None, \
            lanes=None, mode=None, allow_uids=None, spin=False, traced=False)"
    )]
    fn open_path(
        cls: &Bound<'_, PyType>,
        directory: PathBuf,
        create: bool,
        given: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Receiver> {
        Ok(Receiver::new(open::finish(cls.py(), start_open_path(directory, create, given)?)?, None))
    }

    /// As `open_path`, but does not wait: returns an `Opening` for an event loop.
    #[classmethod]
    #[pyo3(
        signature = (directory, *, create=false, **given),
        text_signature = "($cls, directory, *, create=False, timeout=0.0, capacity=None, message_bytes_max=None, \
            lanes=None, mode=None, allow_uids=None, spin=False, traced=False)"
    )]
    fn start_open_path(
        cls: &Bound<'_, PyType>,
        directory: PathBuf,
        create: bool,
        given: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Opening> {
        let started = start_open_path(directory, create, given)?.map_err(|error| raise(cls.py(), error))?;
        Ok(Opening::new(Started::Receiver(started, None)))
    }

    /// The next message, copied. Waits up to `timeout` seconds; raises `TimedOut` when they have passed.
    #[pyo3(signature = (timeout=None))]
    fn recv<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> PyResult<Bound<'py, PyBytes>> {
        self.recv_until(py, deadline(timeout)?)?.ok_or_else(|| no_message_in_time(py))
    }

    /// As `recv`, but does not wait: None if there is no message.
    fn try_recv<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        self.recv_until(py, Deadline::Now)
    }

    /// Copies the next message into a writable buffer, and returns its bytes. Waits up to `timeout` seconds.
    ///
    /// Raises `TooSmall` if it does not fit; `error.bytes` is its size, and it is still the next message.
    #[pyo3(signature = (buffer, timeout=None))]
    fn recv_into(&self, buffer: &Bound<'_, PyAny>, timeout: Option<f64>) -> PyResult<usize> {
        let py = buffer.py();
        let target = Target::of(buffer)?;
        let mut using = self.endpoint.take(py)?;
        let record = find(py, &mut using, deadline(timeout)?)?.ok_or_else(|| no_message_in_time(py))?;
        let bytes = record.bytes as usize;
        if bytes > target.len() {
            let text = format!("the next message has {bytes} bytes, the buffer {}: give a larger one", target.len());
            let error = named(py, "TooSmall", text);
            error.value(py).setattr("bytes", bytes)?;
            return Err(error);
        }
        target.fill(py, &using.receiver.message(record));
        Ok(bytes)
    }

    /// Waits up to `timeout` seconds for a message, and returns up to `most` that are there, as a list.
    ///
    /// Their space is released at once. Descriptors of these messages are closed.
    #[pyo3(signature = (most, timeout=None))]
    fn recv_many<'py>(&self, most: &Bound<'py, PyAny>, timeout: Option<f64>) -> PyResult<Bound<'py, PyList>> {
        let (py, most) = (most.py(), number::<usize>("most", most)?);
        let list = empty_list(py)?;
        if most == 0 {
            return Ok(list);
        }
        let mut using = self.endpoint.take(py)?;
        find(py, &mut using, deadline(timeout)?)?.ok_or_else(|| no_message_in_time(py))?;
        let batch = using.receiver.try_receive_batch().map_err(|error| raise(py, error))?;
        let mut batch = batch.ok_or_else(|| internal(py, "a message that was found is gone"))?;
        // An error after the first message comes again at the next call.
        while list.len() < most {
            match batch.next() {
                Ok(Some(payload)) => {
                    if let Err(error) = to_bytes(py, payload).and_then(|payload| list.append(payload)) {
                        // The next call gets these messages again.
                        mem::forget(batch);
                        return Err(error);
                    }
                }
                Ok(None) => break,
                Err(error) if list.is_empty() => return Err(raise(py, error)),
                Err(_) => break,
            }
        }
        Ok(list)
    }

    /// The next message, and the descriptors that came with it, which the caller closes. Waits up to `timeout`
    /// seconds.
    ///
    /// Raises `DescriptorsLost` if this process has too few free descriptors for them; `error.message` is the message,
    /// which is released.
    #[pyo3(signature = (timeout=None))]
    fn recv_descriptors<'py>(
        &self,
        py: Python<'py>,
        timeout: Option<f64>,
    ) -> PyResult<(Bound<'py, PyBytes>, Vec<i32>)> {
        let mut using = self.endpoint.take(py)?;
        let record = find(py, &mut using, deadline(timeout)?)?.ok_or_else(|| no_message_in_time(py))?;
        let mut message = using.receiver.message(record);
        // In this order: an error of the copy takes no descriptor, and the message comes again.
        let payload = match to_bytes(py, &message) {
            Ok(payload) => payload,
            Err(error) => {
                mem::forget(message);
                return Err(error);
            }
        };
        match message.take_descriptors() {
            Ok(fds) => Ok((payload, descriptors::numbers(fds))),
            Err(error) => {
                let is_lost = matches!(error, Error::DescriptorsLost { .. });
                let error = raise(py, error);
                if is_lost {
                    error.value(py).setattr("message", payload)?;
                }
                Err(error)
            }
        }
    }

    /// The traceparent of the message that this receiver copied last, or None.
    ///
    /// That is the header of W3C Trace Context with its sender's span. `recv`, `try_recv`, `recv_into`, `recv_many` and
    /// iteration copy. Read it before the next method that receives or arms: each may go on to another lane.
    #[getter]
    fn traceparent(&self, py: Python<'_>) -> PyResult<Option<String>> {
        Ok(self.endpoint.take(py)?.receiver.traceparent().map(|traceparent| traceparent.to_string()))
    }

    /// The next message in place, without a copy. Waits up to `timeout` seconds.
    ///
    /// `with receiver.peek() as view:` gives a read-only memoryview; the message is released at the end of the block.
    /// The receiver may continue meanwhile, but space is released in order. In place means that a sender which writes
    /// after its commit can change the bytes: use `recv` if you do not trust it.
    #[pyo3(signature = (timeout=None))]
    fn peek(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Message> {
        let mut using = self.endpoint.take(py)?;
        let record = find(py, &mut using, deadline(timeout)?)?.ok_or_else(|| no_message_in_time(py))?;
        let mut message = using.receiver.message(record);
        let fds = message.take_descriptors();
        let (seq, lane, peer) = (message.seq(), message.lane(), message.peer());
        let (is_redelivered, bytes) = (message.is_redelivered(), message.len());
        let traceparent = message.traceparent();
        let state = State { held: Some(message.hold()), views: 0, is_released: false, fds, view: None };
        let peer_pid = peer.map(|peer| peer.pid);
        Ok(Message { state: Mutex::new(state), bytes, seq, lane, peer_pid, is_redelivered, traceparent })
    }

    /// After `PeerDied`: waits up to `timeout` seconds for the sender's successor.
    ///
    /// Continues after the last message. Raises `Refused` while the sender is alive.
    #[pyo3(signature = (timeout=None))]
    fn resume(this: &Bound<'_, Self>, timeout: Option<f64>) -> PyResult<()> {
        let (py, deadline) = (this.py(), deadline(timeout)?);
        let listener = this.get().endpoint.take(py)?.listener.clone();
        let deadline = listener.map_or(Ok(deadline), |listener| open::with_grace(py, &listener, deadline))?;
        let resumed = resuming(this)?.wait(py, deadline, &this.get().endpoint)?;
        resumed.ok_or_else(|| timed_out(py, "waiting for the sender's successor"))
    }

    /// As `resume`, but does not wait: returns an `Opening` for an event loop, which returns this object.
    ///
    /// Until that has ended or is closed, the other methods raise `Busy`.
    fn start_resume(this: &Bound<'_, Self>) -> PyResult<Opening> {
        Ok(Opening::new(Started::ResumedReceiver(resuming(this)?)))
    }

    /// Makes all releases so far durable, on a path channel. Waits for the disk. Raises `Refused` on others.
    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        self.endpoint.take(py)?.step(py, |endpoint| endpoint.receiver.sync())
    }

    /// The lane's sizes, the peer, and counters since the creation. Does not wait.
    fn info(&self, py: Python<'_>) -> PyResult<Info> {
        let using = self.endpoint.take(py)?;
        let receiver = &using.receiver;
        if receiver.is_forked() {
            return Err(raise(py, Error::Forked));
        }
        Ok(Info::new(receiver.capacity(), receiver.message_bytes_max(), receiver.peer(), receiver.counters()))
    }

    /// The descriptor for an event loop: see `arm`.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        Ok(self.endpoint.take(py)?.receiver.as_raw_fd())
    }

    /// For an event loop: makes the descriptor readable when a message arrives, or the sender leaves.
    ///
    /// Does not wait. Returns False if there is a message already: receive, instead of watching the descriptor.
    fn arm(&self, py: Python<'_>) -> PyResult<bool> {
        let armed = self.endpoint.take(py)?.receiver.arm();
        log::deliver(py);
        armed.map(|armed| armed.is_waiting()).map_err(|error| raise(py, error))
    }

    /// Undoes `arm`. Call it before a method that waits, and when the loop loses interest.
    fn disarm(&self, py: Python<'_>) -> PyResult<()> {
        self.endpoint.take(py)?.receiver.disarm();
        Ok(())
    }

    /// Ends the channel. Does not wait. A thread that waits in this receiver gets `ClosedHandle` within 50 ms.
    fn close(&self) {
        self.endpoint.close();
    }

    /// Whether this handle is closed.
    #[getter]
    fn closed(&self) -> bool {
        self.endpoint.is_closed()
    }

    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let mut using = self.endpoint.take(py)?;
        if let Some(record) = using.receiver.peek_fast() {
            return taken(py, using.receiver.message(record), |message| to_bytes(py, message)).map(Some);
        }
        drop(using);
        match self.recv_until(py, Deadline::Never) {
            Err(error) if crate::error::is_end(py, &error) => Ok(None),
            found => found,
        }
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __exit__(&self, _type: &Bound<'_, PyAny>, _value: &Bound<'_, PyAny>, _traceback: &Bound<'_, PyAny>) {
        self.endpoint.close();
    }
}

/// A message in place: see `Receiver.peek`. It is a read-only buffer.
///
/// `seq` is its number in the lane, `lane` its sender's lane, `peer_pid` its sender's process. `is_redelivered` says
/// whether an earlier receiver may have received it. `traceparent` is the header of W3C Trace Context with its sender's
/// span, or None.
#[pyclass(frozen, module = "pelton")]
pub struct Message {
    state: Mutex<State>,
    bytes: usize,
    #[pyo3(get)]
    seq: u32,
    #[pyo3(get)]
    lane: u32,
    #[pyo3(get)]
    peer_pid: Option<u32>,
    #[pyo3(get)]
    is_redelivered: bool,
    traceparent: Option<Traceparent>,
}

struct State {
    /// `None` once it is released and has no view.
    held: Option<Held>,
    views: usize,
    is_released: bool,
    /// The descriptors that came with it, or why they did not.
    fds: pelton::Result<Vec<OwnedFd>>,
    view: Option<EnteredView>,
}

impl State {
    fn release_if_unused(&mut self) {
        if self.is_released && self.views == 0 {
            self.held = None;
        }
    }
}

impl Message {
    /// Never held while Python runs: a call of Python may come back here.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[pymethods]
impl Message {
    /// Releases the message. A view that is still in use, such as an array of NumPy, keeps it until that is gone.
    fn release(&self, py: Python<'_>) {
        let view = {
            let mut state = self.state();
            state.is_released = true;
            state.fds = Ok(Vec::new());
            state.release_if_unused();
            state.view.take()
        };
        if let Some(view) = view {
            view.release(py);
        }
    }

    /// The descriptors that came with the message, which the caller closes; empty at the second call.
    fn take_descriptors(&self, py: Python<'_>) -> PyResult<Vec<i32>> {
        let fds = mem::replace(&mut self.state().fds, Ok(Vec::new()));
        fds.map(descriptors::numbers).map_err(|error| raise(py, error))
    }

    #[getter]
    fn traceparent(&self) -> Option<String> {
        self.traceparent.map(|traceparent| traceparent.to_string())
    }

    /// Whether it is released: then no new view of it can be made.
    #[getter]
    fn released(&self) -> bool {
        self.state().is_released
    }

    fn __len__(&self) -> usize {
        self.bytes
    }

    fn __enter__<'py>(this: &Bound<'py, Self>) -> PyResult<Bound<'py, PyMemoryView>> {
        let is_entered = this.get().state().view.as_ref().is_some_and(|view| view.is_alive(this.py()));
        if is_entered {
            return Err(named(
                this.py(),
                "Busy",
                "this message is in a `with` block already: use the view of that one",
            ));
        }
        let (view, entered) = EnteredView::of(this.as_any())?;
        this.get().state().view = Some(entered);
        Ok(view)
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _type: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) {
        self.release(py);
    }

    unsafe fn __getbuffer__(this: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let (py, message) = (this.py(), this.get());
        let parts = {
            let mut state = message.state();
            let parts = match &state.held {
                Some(held) if held.is_forked() => return Err(raise(py, Error::Forked)),
                Some(held) if !state.is_released => (NonNull::from(&**held).cast(), held.len()),
                _ => return Err(named(py, "Released", "this message is released: copy what you need before that")),
            };
            state.views += 1;
            parts
        };
        // SAFETY: Python wants this view filled. While it counts in `views`, `held` keeps the bytes, which no sender
        // that obeys the protocol writes.
        let filled = unsafe { fill_view(view, this.as_any(), parts, true, flags) };
        if filled.is_err() {
            message.state().views -= 1;
        }
        filled
    }

    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        let mut state = self.state();
        state.views -= 1;
        state.release_if_unused();
    }
}
