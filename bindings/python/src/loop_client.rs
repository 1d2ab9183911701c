//! `pelton.LoopClient`: a client in an event loop of any kind. `pelton.aio.Client` is asyncio's.

use crate::bytes::{Payload, empty_list, to_bytes};
use crate::client::Properties;
use crate::error::raise;
use crate::handle::Handle;
use crate::number::{number, number_or_none};
use crate::open::{self, CLIENT, Opening, Started, options};
use pelton::{Armed, CallId, Outcome, Sent};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyList, PyType};
use std::ops::{Deref, DerefMut};
use std::os::fd::AsRawFd;

/// A client of calls for an event loop: nothing waits. One thread at a time; `pelton.aio.Client` has it in asyncio.
///
/// Take completions until there are none; then, if calls are in flight, `arm()`: if it returns True, return to the
/// loop until `fileno()` is readable. Every method may raise `ClosedHandle`, `Forked` and `Busy`; after the last
/// completion, if the only service has ended, `Closed` or `PeerDied`.
///
/// Example:
///     call = client.try_submit(b"tea")
///     for call, is_final, reply in client.completions():
///         print(call, reply)
#[pyclass(frozen, module = "pelton", weakref)]
pub struct LoopClient(Handle<State>);

struct State {
    client: pelton::Client,
    /// A completion that was taken when Python had no memory for it. The next one.
    kept: Option<Kept>,
}

struct Kept {
    call: CallId,
    outcome: Outcome,
    bytes: Vec<u8>,
}

impl Deref for State {
    type Target = pelton::Client;
    fn deref(&self) -> &pelton::Client {
        &self.client
    }
}

impl DerefMut for State {
    fn deref_mut(&mut self) -> &mut pelton::Client {
        &mut self.client
    }
}

impl LoopClient {
    pub fn new(client: pelton::Client) -> LoopClient {
        LoopClient(Handle::new("client", State { client, kept: None }))
    }
}

/// Appends a tuple of a completion to a list. Raises MemoryError, where a conversion of the tuple panics.
fn append(list: &Bound<'_, PyList>, call: CallId, is_final: bool, value: Bound<'_, PyAny>) -> PyResult<()> {
    let py = list.py();
    // SAFETY: the tuple has three places, and `PyTuple_SetItem` takes the references over. An error of Python is
    // returned as one.
    let entry = unsafe {
        let entry = Bound::from_owned_ptr_or_err(py, ffi::PyTuple_New(3))?;
        let call = Bound::from_owned_ptr_or_err(py, ffi::PyLong_FromUnsignedLongLong(call.to_bits()))?;
        let is_final = PyBool::new(py, is_final).to_owned().into_any();
        for (index, item) in [call, is_final, value].into_iter().enumerate() {
            ffi::PyTuple_SetItem(entry.as_ptr(), index as isize, item.into_ptr());
        }
        entry
    };
    list.append(entry)
}

impl Kept {
    /// What `completions` returns of it.
    fn value<'py>(&self, py: Python<'py>, client: &pelton::Client) -> PyResult<Bound<'py, PyAny>> {
        let error = match self.outcome {
            Outcome::Reply | Outcome::Part => return Ok(to_bytes(py, &self.bytes)?.into_any()),
            Outcome::End => return Ok(py.None().into_bound(py)),
            Outcome::Lost(loss) => client.loss_error(loss),
            outcome => outcome.error(|| self.bytes.clone()).expect("every other outcome is an error"),
        };
        Ok(raise(py, error).into_value(py).into_bound(py).into_any())
    }
}

#[pymethods]
impl LoopClient {
    /// As `Client.connect`, with the same options.
    #[classmethod]
    #[pyo3(
        signature = (name, **given),
        text_signature = "($cls, name, *, timeout=0.0, capacity=None, message_bytes_max=None, call_bytes_max=None, \
            memory_bytes_max=None, allow_uids=None, spin=False)"
    )]
    fn connect(cls: &Bound<'_, PyType>, name: &str, given: Option<&Bound<'_, PyDict>>) -> PyResult<LoopClient> {
        let started = pelton::Client::start_connect(name, &options(given, CLIENT)?.cast());
        Ok(LoopClient::new(open::finish(cls.py(), started)?))
    }

    /// As `connect`, but does not wait: returns an `Opening` for the event loop.
    #[classmethod]
    #[pyo3(
        signature = (name, **given),
        text_signature = "($cls, name, *, timeout=0.0, capacity=None, message_bytes_max=None, call_bytes_max=None, \
            memory_bytes_max=None, allow_uids=None, spin=False)"
    )]
    fn start_connect(cls: &Bound<'_, PyType>, name: &str, given: Option<&Bound<'_, PyDict>>) -> PyResult<Opening> {
        let started = pelton::Client::start_connect(name, &options(given, CLIENT)?.cast());
        Ok(Opening::new(Started::Client(started.map_err(|error| raise(cls.py(), error))?)))
    }

    /// Submits a request, and returns the number of the call; None if there is no space, or 1,024 calls are in flight:
    /// take completions, or `arm`, and try again.
    ///
    /// The service sees that the client waits for `timeout` seconds; here nothing ends by it. With `idempotent`, the
    /// call may be executed more than once. Raises `TooLarge`.
    #[pyo3(signature = (request, timeout=None, *, idempotent=false, traceparent=None))]
    fn try_submit(
        &self,
        request: &Bound<'_, PyAny>,
        timeout: Option<f64>,
        idempotent: bool,
        traceparent: Option<&str>,
    ) -> PyResult<Option<u64>> {
        let py = request.py();
        let payload = Payload::of(request)?;
        let mut client = self.0.take(py)?;
        let submitted = Properties::new(timeout, idempotent, traceparent)?.try_submit(&mut client, payload.as_slice());
        let submitted = submitted.map_err(|error| raise(py, error))?;
        if let Some(call) = submitted
            && idempotent
        {
            client.mark_idempotent(call).map_err(|error| raise(py, error))?;
        }
        Ok(submitted.map(CallId::to_bits))
    }

    /// Sends a message that gets no reply; False if there is no space.
    fn try_notify(&self, message: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = message.py();
        let payload = Payload::of(message)?;
        let sent = self.0.take(py)?.try_notify(payload.as_slice()).map_err(|error| raise(py, error))?;
        Ok(sent == Sent::Sent)
    }

    /// Up to `most` completions that have come, as tuples: the number of the call; whether it has ended; and the bytes
    /// of a reply or of a part, None for the end of a streaming reply, or the exception of a call that has failed.
    /// A MemoryError loses none of them.
    #[pyo3(signature = (most=None), text_signature = "($self, most=256)")]
    fn completions<'py>(&self, py: Python<'py>, most: Option<&Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyList>> {
        let most = number_or_none("most", most)?.unwrap_or(256);
        let list = empty_list(py)?;
        let mut using = self.0.take(py)?;
        let State { client, kept } = &mut *using;
        while list.len() < most {
            if kept.is_none() {
                let completion = match client.try_completion() {
                    Ok(Some(completion)) => completion,
                    Ok(None) => break,
                    Err(error) if list.is_empty() => return Err(raise(py, error)),
                    // The next call returns it again.
                    Err(_) => break,
                };
                let (call, outcome) = (completion.call_id(), completion.outcome());
                if matches!(outcome, Outcome::Reply | Outcome::Part) {
                    let reply = to_bytes(py, &completion);
                    if reply.and_then(|reply| append(&list, call, outcome.is_final(), reply.into_any())).is_ok() {
                        continue;
                    }
                }
                *kept = Some(Kept { call, outcome, bytes: completion.into_vec() });
            }
            if let Some(found) = kept {
                let value = found.value(py, client);
                match value.and_then(|value| append(&list, found.call, found.outcome.is_final(), value)) {
                    Ok(()) => *kept = None,
                    Err(error) if list.is_empty() => return Err(error),
                    // The next call begins with it.
                    Err(_) => break,
                }
            }
        }
        Ok(list)
    }

    /// Cancels a call: its service is notified, and no completion of it comes any more.
    fn cancel(&self, call: &Bound<'_, PyAny>) -> PyResult<bool> {
        let (py, call) = (call.py(), CallId::from_bits(number("call", call)?));
        self.0.take(py)?.cancel(call).map_err(|error| raise(py, error))
    }

    /// Before `arm`: polls for a completion for some microseconds, less if that was useless lately. Returns whether
    /// there is one.
    fn busy_poll(&self, py: Python<'_>) -> PyResult<bool> {
        self.0.take(py)?.step(py, |state| Ok(state.kept.is_some() || state.client.busy_poll()?))
    }

    /// Makes the descriptor readable when a completion comes, space for the request that found none, or a service
    /// leaves.
    ///
    /// Returns False if something has come already: take completions, or submit again, instead of watching the
    /// descriptor.
    fn arm(&self, py: Python<'_>) -> PyResult<bool> {
        let mut client = self.0.take(py)?;
        let armed = client.arm().map_err(|error| raise(py, error))?;
        Ok(client.kept.is_none() && armed == Armed::Waiting)
    }

    /// Undoes `arm`. Call it when the loop loses interest.
    fn disarm(&self, py: Python<'_>) -> PyResult<()> {
        self.0.take(py)?.disarm();
        Ok(())
    }

    /// The descriptor to watch for readability: see `arm`.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        Ok(self.0.take(py)?.as_raw_fd())
    }

    /// Calls whose last completion has not come, cancelled ones included.
    #[getter]
    fn in_flight(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.0.take(py)?.in_flight())
    }

    /// Services that this client uses at present.
    #[getter]
    fn services(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.0.take(py)?.service_count())
    }

    /// Whether a large request or a cancel waits for space: `arm`, also when no call is in flight.
    #[getter]
    fn has_queued(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.0.take(py)?.has_queued_messages())
    }

    /// The largest reply that it takes, in bytes.
    #[getter]
    fn call_bytes_max(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.0.take(py)?.reply_bytes_max())
    }

    /// Closes it: the services of calls in flight are notified.
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
