//! `pelton.Sender`, and the space that it reserves.

use crate::bytes::{Payload, copy};
use crate::descriptors;
use crate::error::{named, raise, timed_out};
use crate::handle::{Handle, Using, deadline};
use crate::number::{number, number_or_none};
use crate::open::{self, CONNECT_SENDER, CREATE, Info, OPEN, Opening, Resuming, Started, options};
use crate::view::{EnteredView, fill_view};
use pelton::raw::ReservedSpace;
use pelton::{Deadline, Error, Listener, Result, Sent, Traceparent};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMemoryView, PyType};
use std::os::fd::AsRawFd;
use std::os::raw::c_int;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// A sender, and the listener that had accepted it.
struct Endpoint {
    sender: pelton::Sender,
    listener: Option<Listener>,
}

/// The sending endpoint of a channel. One thread at a time; each thread opens its own.
///
/// Closing it, also by `with`, ends the channel: the receiver receives every message, and then the end. Where a method
/// waits, `timeout` is in seconds; None is no limit, 0 is not to wait. A wait ends for Ctrl-C within 50 ms. Every
/// method may raise `Closed` or `PeerDied` once the receiver has left, with `unreleased` messages; `Forked` in a
/// forked child; `ClosedHandle`; `Busy` while another thread waits in it; `Reserved` while a reservation is open.
///
/// Example:
///     with pelton.Sender.connect("events", timeout=10) as sender:
///         sender.send(b"hello")
#[pyclass(frozen, module = "pelton", weakref)]
pub struct Sender {
    endpoint: Handle<Endpoint>,
    holds: Arc<Holds>,
}

/// The open reservation, and the views of it: while there is one, nothing else uses the lane.
#[derive(Default)]
struct Holds(AtomicUsize);

impl Holds {
    fn count(&self) -> usize {
        self.0.load(Ordering::Acquire)
    }

    fn add(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }

    fn remove(&self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Messages and bytes of a part of `send_many`, which is copied and published at once. A guess.
const PART_MESSAGES: usize = 256;
const PART_BYTES: usize = 256 << 10;

impl Sender {
    pub fn new(sender: pelton::Sender, listener: Option<Listener>) -> Sender {
        Sender { endpoint: Handle::new("sender", Endpoint { sender, listener }), holds: Arc::default() }
    }

    #[inline]
    fn take(&self, py: Python<'_>) -> PyResult<Using<'_, Endpoint>> {
        let using = self.endpoint.take(py)?;
        match self.holds.count() {
            0 => Ok(using),
            _ => Err(reserved(py)),
        }
    }

    fn send_until(
        &self,
        py: Python<'_>,
        payload: &[u8],
        deadline: Deadline,
        traceparent: Option<&str>,
    ) -> PyResult<bool> {
        let mut using = self.take(py)?;
        let space = find_space(py, &mut using, payload.len(), deadline, traceparent)?;
        let Some(space) = space else { return Ok(false) };
        // SAFETY: the space is reserved for this many bytes, and only this thread uses the sender until the commit.
        unsafe { copy(py, payload, using.sender.payload(space).as_ptr()) };
        commit(&mut using.sender, space, payload.len()).map_err(|error| raise(py, error))?;
        Ok(true)
    }

    /// Sends each message, a part at a time, and counts those that were sent. Returns false once the deadline has
    /// passed.
    fn send_all(&self, messages: &Bound<'_, PyAny>, deadline: Deadline, sent: &mut usize) -> PyResult<bool> {
        let py = messages.py();
        let bytes_max = self.take(py)?.sender.message_bytes_max() as usize;
        // A part takes no more space than the largest message: each message has some bytes of its own.
        let (most, bytes_most) = ((bytes_max / 64).clamp(1, PART_MESSAGES), PART_BYTES.min(bytes_max / 2));
        let mut objects = messages.try_iter()?;
        let (mut part, mut bytes) = (Vec::new(), 0);
        loop {
            // The iterator may use this sender itself: nothing is locked meanwhile.
            let next = objects.next().map(|object| object.and_then(|object| Payload::of(&object)));
            let fits = |payload: &Payload<'_>| part.len() < most && bytes + payload.as_slice().len() <= bytes_most;
            if !part.is_empty() && !matches!(&next, Some(Ok(payload)) if fits(payload)) {
                if !self.send_part(py, &part, deadline)? {
                    return Ok(false);
                }
                *sent += part.len();
                part.clear();
                bytes = 0;
            }
            let Some(payload) = next.transpose()? else { return Ok(true) };
            bytes += payload.as_slice().len();
            part.push(payload);
        }
    }

    /// Sends all of these, or none.
    fn send_part(&self, py: Python<'_>, part: &[Payload<'_>], deadline: Deadline) -> PyResult<bool> {
        if let [payload] = part {
            return self.send_until(py, payload.as_slice(), deadline, None);
        }
        let mut using = self.take(py)?;
        let lens: Vec<usize> = part.iter().map(|payload| payload.as_slice().len()).collect();
        let lens = || lens.iter().copied();
        loop {
            let batch = using.sender.try_reserve_batch(lens()).map_err(|error| raise(py, error))?;
            if let Some(mut batch) = batch {
                if !part.iter().all(|payload| batch.push(payload.as_slice())) {
                    return Err(raise(py, Error::Forked));
                }
                batch.commit().map_err(|error| raise(py, error))?;
                return Ok(true);
            }
            let space = using.wait(py, deadline, |endpoint, until| {
                Ok(endpoint.sender.reserve_batch_until(lens(), until)?.map(drop))
            })?;
            if space.is_none() {
                return Ok(false);
            }
        }
    }
}

/// Reserves space, and waits for it until the deadline.
#[inline]
fn find_space(
    py: Python<'_>,
    using: &mut Using<'_, Endpoint>,
    bytes: usize,
    deadline: Deadline,
    traceparent: Option<&str>,
) -> PyResult<Option<ReservedSpace>> {
    // One that is not valid is as none: W3C demands it.
    if let Some(traceparent) = traceparent.and_then(Traceparent::parse) {
        return using
            .wait(py, deadline, |endpoint, until| endpoint.sender.reserve_traced_space(bytes, traceparent, until));
    }
    if let Some(space) = using.sender.reserve_fast(bytes) {
        return Ok(Some(space));
    }
    let space = using.wait(py, Deadline::Now, |endpoint, now| endpoint.sender.reserve_space(bytes, now))?;
    match space {
        None if deadline != Deadline::Now => {
            using.wait(py, deadline, |endpoint, until| endpoint.sender.reserve_space(bytes, until))
        }
        found => Ok(found),
    }
}

/// Publishes the first `bytes` of the space. The caller has used the sender since it reserved it for nothing else.
#[inline]
fn commit(sender: &mut pelton::Sender, space: ReservedSpace, bytes: usize) -> Result<()> {
    // SAFETY: the space was reserved last of this sender, since the lock and `Holds` keep others out; each caller
    // commits it once.
    match unsafe { sender.commit_space(space, bytes) } {
        true => Ok(()),
        false if sender.is_forked() => Err(Error::Forked),
        false => Err(Error::TooLarge { bytes: bytes as u64, bytes_max: space.bytes }),
    }
}

#[cold]
fn reserved(py: Python<'_>) -> PyErr {
    let text = "this sender has reserved space: commit or abort the reservation, and drop every view of it, first";
    named(py, "Reserved", text)
}

fn start_open_path(
    directory: PathBuf,
    create: bool,
    given: Option<&Bound<'_, PyDict>>,
) -> PyResult<pelton::Result<pelton::Opening<pelton::Sender>>> {
    Ok(match create {
        true => options(given, CREATE)?.cast().start_create_sender(directory),
        false => options(given, OPEN)?.cast().start_open_sender(directory),
    })
}

/// Takes the sender out of its handle until there is a successor.
fn resuming(this: &Bound<'_, Sender>) -> PyResult<Resuming<pelton::Sender>> {
    let py = this.py();
    // Not while space is reserved.
    drop(this.get().take(py)?);
    let Endpoint { sender, listener } = this.get().endpoint.lend(py)?;
    let home = this.clone().unbind();
    let give_back = move |sender| home.get().endpoint.give_back(Endpoint { sender, listener });
    Resuming::new(sender.start_resume(), this.clone().into_any().unbind(), give_back).map_err(|error| raise(py, error))
}

#[pymethods]
impl Sender {
    /// Connects to a receiver that listens under `name`: a short name, or `unix:PATH`.
    ///
    /// `timeout` is how long to wait for a listener; 0, the default, fails immediately. `capacity` is the lane's bytes
    /// (64 MiB), `message_bytes_max` the largest message's. `allow_uids` are users that may be the peer, besides the
    /// own one. With `spin` waits never sleep, and occupy a processor. With `traced` messages may carry a traceparent:
    /// see `send`. Raises `NoListener`, `TimedOut`, `BadName`, `BadOption`, `Refused`.
    #[classmethod]
    #[pyo3(
        signature = (name, **given),
        text_signature = "($cls, name, *, timeout=0.0, capacity=None, message_bytes_max=None, allow_uids=None, \
            spin=False, traced=False)"
    )]
    fn connect(cls: &Bound<'_, PyType>, name: &str, given: Option<&Bound<'_, PyDict>>) -> PyResult<Sender> {
        let started = options(given, CONNECT_SENDER)?.cast().start_connect_sender(name);
        Ok(Sender::new(open::finish(cls.py(), started)?, None))
    }

    /// As `connect`, but does not wait: returns an `Opening` for an event loop.
    #[classmethod]
    #[pyo3(
        signature = (name, **given),
        text_signature = "($cls, name, *, timeout=0.0, capacity=None, message_bytes_max=None, allow_uids=None, \
            spin=False, traced=False)"
    )]
    fn start_connect(cls: &Bound<'_, PyType>, name: &str, given: Option<&Bound<'_, PyDict>>) -> PyResult<Opening> {
        let started = options(given, CONNECT_SENDER)?.cast().start_connect_sender(name);
        Ok(Opening::new(Started::Sender(started.map_err(|error| raise(cls.py(), error))?, None)))
    }

    /// Opens the channel in a directory as its sender; with `create`, creates it if it does not exist.
    ///
    /// Its messages outlive both sides. `timeout` is how long to wait for the channel, or for its role. `capacity`,
    /// `message_bytes_max`, `lanes` (how many senders it may have) and `traced` (see `send`) are for `create`. Raises
    /// `NoChannel`, `NotAChannel`, `RoleTaken`, `NoSpace`, `Rebooted`, `BadOption`.
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
    ) -> PyResult<Sender> {
        Ok(Sender::new(open::finish(cls.py(), start_open_path(directory, create, given)?)?, None))
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
        Ok(Opening::new(Started::Sender(started, None)))
    }

    /// Copies a bytes-like object into the lane. Waits for space up to `timeout` seconds.
    ///
    /// `traceparent` is the header of W3C Trace Context with this sender's span, for `Message.traceparent` and
    /// `Receiver.traceparent`. One that is not valid is as none; so is any on a channel without the option `traced`.
    /// Raises `TimedOut` when the time has passed, and `TooLarge`; then nothing is sent.
    #[pyo3(signature = (data, timeout=None, *, traceparent=None))]
    fn send(&self, data: &Bound<'_, PyAny>, timeout: Option<f64>, traceparent: Option<&str>) -> PyResult<()> {
        match self.send_until(data.py(), Payload::of(data)?.as_slice(), deadline(timeout)?, traceparent)? {
            true => Ok(()),
            false => Err(no_space_in_time(data.py())),
        }
    }

    /// As `send`, but does not wait: returns whether the message is sent.
    #[pyo3(signature = (data, *, traceparent=None))]
    fn try_send(&self, data: &Bound<'_, PyAny>, traceparent: Option<&str>) -> PyResult<bool> {
        self.send_until(data.py(), Payload::of(data)?.as_slice(), Deadline::Now, traceparent)
    }

    /// Sends each message of an iterable, and returns how many. Waits for space up to `timeout` seconds in all.
    ///
    /// Takes up to 256 messages from the iterable, and publishes them at once: use `send` where they come slowly.
    /// After an error, also of the iterable's own, `error.sent` says how many messages were sent.
    #[pyo3(signature = (messages, timeout=None))]
    fn send_many(&self, messages: &Bound<'_, PyAny>, timeout: Option<f64>) -> PyResult<usize> {
        let py = messages.py();
        let mut sent = 0;
        let error = match self.send_all(messages, deadline(timeout)?, &mut sent) {
            Ok(true) => return Ok(sent),
            Ok(false) => no_space_in_time(py),
            Err(error) => error,
        };
        // A class that takes no attribute, of an iterator's own, goes without.
        let _ = error.value(py).setattr("sent", sent);
        Err(error)
    }

    /// Sends a message with up to 64 descriptors: numbers, or objects with `fileno()`. Waits up to `timeout` seconds.
    ///
    /// The receiver gets duplicates; the own ones stay open. Not through a path channel. Raises `TooManyDescriptors`.
    #[pyo3(signature = (data, descriptors, timeout=None))]
    fn send_descriptors(
        &self,
        data: &Bound<'_, PyAny>,
        descriptors: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let py = data.py();
        // A copy, because the wait runs without the GIL, and repeats.
        let payload = Payload::of(data)?.as_slice().to_vec();
        let fds = descriptors::duplicated(descriptors)?;
        let mut using = self.take(py)?;
        let sent = using.wait(py, deadline(timeout)?, |endpoint, until| {
            let fds: Vec<_> = fds.iter().map(std::os::fd::AsFd::as_fd).collect();
            let sent = endpoint.sender.send_with_descriptors_until(&payload, &fds, until)?;
            Ok((sent == Sent::Sent).then_some(()))
        })?;
        sent.ok_or_else(|| no_space_in_time(py))
    }

    /// Reserves space for a message of `bytes`, to be written in place. Waits for space up to `timeout` seconds.
    ///
    /// `with sender.reserve(n) as view:` gives a writable memoryview; the message is sent at the end of the block, and
    /// not after an exception. Until then the sender does nothing else. To send fewer bytes, call `commit(bytes)`.
    /// `traceparent` as in `send`.
    #[pyo3(signature = (bytes, timeout=None, *, traceparent=None))]
    fn reserve(
        this: Bound<'_, Self>,
        bytes: &Bound<'_, PyAny>,
        timeout: Option<f64>,
        traceparent: Option<&str>,
    ) -> PyResult<Reservation> {
        let (py, bytes) = (this.py(), number("bytes", bytes)?);
        let sender = this.get();
        let mut using = sender.take(py)?;
        let space = find_space(py, &mut using, bytes, deadline(timeout)?, traceparent)?;
        let space = space.ok_or_else(|| no_space_in_time(py))?;
        sender.holds.add();
        drop(using);
        Ok(Reservation { sender: this.unbind(), space, is_over: AtomicBool::new(false), view: Mutex::new(None) })
    }

    /// Waits until the receiver has released every message, up to `timeout` seconds.
    #[pyo3(signature = (timeout=None))]
    fn wait_released(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let released = self.take(py)?.wait(py, deadline(timeout)?, |endpoint, until| {
            Ok(endpoint.sender.wait_released_until(until)?.then_some(()))
        })?;
        released.ok_or_else(|| timed_out(py, "waiting until the receiver has released every message"))
    }

    /// After `PeerDied` or `Closed`: waits up to `timeout` seconds for the receiver's successor.
    ///
    /// The successor gets the lane, and receives every unreleased message. Raises `Refused` while the receiver is
    /// alive.
    #[pyo3(signature = (timeout=None))]
    fn resume(this: &Bound<'_, Self>, timeout: Option<f64>) -> PyResult<()> {
        let (py, deadline) = (this.py(), deadline(timeout)?);
        let listener = this.get().endpoint.take(py)?.listener.clone();
        let deadline = listener.map_or(Ok(deadline), |listener| open::with_grace(py, &listener, deadline))?;
        let resumed = resuming(this)?.wait(py, deadline, &this.get().endpoint)?;
        resumed.ok_or_else(|| timed_out(py, "waiting for the receiver's successor"))
    }

    /// As `resume`, but does not wait: returns an `Opening` for an event loop, which returns this object.
    ///
    /// Until that has ended or is closed, the other methods raise `Busy`. If the receiver had closed, `try_finish` of
    /// the opening copies all unreleased messages, once a successor has connected; it releases the GIL.
    fn start_resume(this: &Bound<'_, Self>) -> PyResult<Opening> {
        Ok(Opening::new(Started::ResumedSender(resuming(this)?)))
    }

    /// Makes all messages sent so far durable, on a path channel. Waits for the disk. Raises `Refused` on others.
    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        self.take(py)?.step(py, |endpoint| endpoint.sender.sync())
    }

    /// The lane's sizes, the peer, `unreleased` messages, and counters since the creation. Does not wait.
    fn info(&self, py: Python<'_>) -> PyResult<Info> {
        let mut using = self.endpoint.take(py)?;
        let sender = &mut using.sender;
        if sender.is_forked() {
            return Err(raise(py, Error::Forked));
        }
        let info = Info::new(sender.capacity(), sender.message_bytes_max(), sender.peer(), sender.counters());
        Ok(Info { unreleased: Some(sender.unreleased()), ..info })
    }

    /// The descriptor for an event loop: see `arm`.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        Ok(self.endpoint.take(py)?.sender.as_raw_fd())
    }

    /// For an event loop: makes the descriptor readable when there is space for `bytes`, or the receiver leaves.
    ///
    /// Does not wait. Returns False if there is space already: send, instead of watching the descriptor.
    #[pyo3(signature = (bytes=None), text_signature = "($self, bytes=0)")]
    fn arm(&self, py: Python<'_>, bytes: Option<&Bound<'_, PyAny>>) -> PyResult<bool> {
        let bytes = number_or_none("bytes", bytes)?.unwrap_or(0);
        let armed = self.take(py)?.sender.arm(bytes);
        armed.map(|armed| armed.is_waiting()).map_err(|error| raise(py, error))
    }

    /// As `arm`, but until the receiver has released every message: in place of `wait_released`.
    ///
    /// Returns False if it has.
    fn arm_released(&self, py: Python<'_>) -> PyResult<bool> {
        let armed = self.take(py)?.sender.arm_released();
        armed.map(|armed| armed.is_waiting()).map_err(|error| raise(py, error))
    }

    /// Undoes `arm`. Call it before a method that waits, and when the loop loses interest.
    fn disarm(&self, py: Python<'_>) -> PyResult<()> {
        self.take(py)?.sender.disarm();
        Ok(())
    }

    /// Ends the channel. Does not wait. Raises `Reserved` while space is reserved.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        match self.holds.count() {
            0 => {
                self.endpoint.close();
                Ok(())
            }
            _ => Err(reserved(py)),
        }
    }

    /// Whether this handle is closed.
    #[getter]
    fn closed(&self) -> bool {
        self.endpoint.is_closed()
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        raised: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let closed = self.close(py);
        // The exception that ends the block says more than that of the close, which would replace it.
        if raised.is_none() { closed } else { Ok(()) }
    }
}

#[cold]
fn no_space_in_time(py: Python<'_>) -> PyErr {
    timed_out(py, "waiting for space in the lane")
}

/// Reserved space for one message: see `Sender.reserve`. It is a writable buffer.
#[pyclass(frozen, module = "pelton")]
pub struct Reservation {
    sender: Py<Sender>,
    space: ReservedSpace,
    is_over: AtomicBool,
    view: Mutex<Option<EnteredView>>,
}

impl Reservation {
    fn holds(&self) -> &Holds {
        &self.sender.get().holds
    }

    /// Ends the reservation. Returns false if it was over.
    fn end(&self) -> bool {
        let ends = !self.is_over.swap(true, Ordering::AcqRel);
        if ends {
            self.holds().remove();
        }
        ends
    }

    /// Makes the view of the `with` block unusable.
    fn release_view(&self, py: Python<'_>) {
        let view = self.view.lock().ok().and_then(|mut view| view.take());
        if let Some(view) = view {
            view.release(py);
        }
    }

    fn check_open(&self, py: Python<'_>) -> PyResult<()> {
        match self.is_over.load(Ordering::Acquire) {
            false => Ok(()),
            true => Err(named(py, "NotReserved", "this reservation is committed or aborted: reserve again")),
        }
    }
}

#[pymethods]
impl Reservation {
    /// Sends the first `bytes` of the space, or all. Does not wait.
    ///
    /// Raises `Reserved` if a view of the space is still in use, such as an array of NumPy; then nothing is sent.
    #[pyo3(signature = (bytes=None))]
    fn commit(&self, py: Python<'_>, bytes: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let bytes = number_or_none("bytes", bytes)?.unwrap_or(self.space.bytes as usize);
        self.check_open(py)?;
        self.release_view(py);
        if self.holds().count() > 1 {
            let text = "a view of the reserved space is still in use, and could change a message that is sent: drop \
                        arrays and memoryviews of it before the commit";
            return Err(named(py, "Reserved", text));
        }
        let mut using = self.sender.get().endpoint.take(py)?;
        commit(&mut using.sender, self.space, bytes).map_err(|error| raise(py, error))?;
        self.end();
        Ok(())
    }

    /// Releases the space: nothing is sent.
    fn abort(&self, py: Python<'_>) {
        self.release_view(py);
        self.end();
    }

    fn __enter__<'py>(this: &Bound<'py, Self>) -> PyResult<Bound<'py, PyMemoryView>> {
        let (view, entered) = EnteredView::of(this.as_any())?;
        if let Ok(mut stored) = this.get().view.lock() {
            *stored = Some(entered);
        }
        Ok(view)
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        raised: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        if self.is_over.load(Ordering::Acquire) {
            return Ok(());
        }
        let committed = if raised.is_none() { self.commit(py, None) } else { Ok(()) };
        self.abort(py);
        committed
    }

    fn __len__(&self) -> usize {
        self.space.bytes as usize
    }

    unsafe fn __getbuffer__(this: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let (py, reservation) = (this.py(), this.get());
        reservation.check_open(py)?;
        let using = reservation.sender.get().endpoint.take(py)?;
        if using.sender.is_forked() {
            return Err(raise(py, Error::Forked));
        }
        let start = using.sender.payload(reservation.space);
        // SAFETY: Python wants this view filled. While `Holds` counts it, the sender is not used, closed or dropped.
        unsafe { fill_view(view, this.as_any(), (start, reservation.space.bytes as usize), false, flags)? };
        reservation.holds().add();
        Ok(())
    }

    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        self.holds().remove();
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.end();
    }
}
