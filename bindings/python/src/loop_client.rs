//! `pelton.LoopClient`: a client in an event loop of any kind. `pelton.aio.Client` is asyncio's.

use crate::bytes::{Payload, to_bytes};
use crate::error::raise;
use crate::handle::{Handle, deadline};
use crate::open::{self, CLIENT, Opening, Started, options};
use pelton::{Armed, CallId, Deadline, Outcome, Sent};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyType};
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
pub struct LoopClient(Handle<pelton::Client>);

impl LoopClient {
    pub fn new(client: pelton::Client) -> LoopClient {
        LoopClient(Handle::new("client", client))
    }
}

#[pymethods]
impl LoopClient {
    /// As `Client.connect`, with the same options.
    #[classmethod]
    #[pyo3(signature = (name, **given))]
    fn connect(cls: &Bound<'_, PyType>, name: &str, given: Option<&Bound<'_, PyDict>>) -> PyResult<LoopClient> {
        let started = pelton::Client::start_connect(name, &options(given, CLIENT)?.cast());
        Ok(LoopClient::new(open::finish(cls.py(), started)?))
    }

    /// As `connect`, but does not wait: returns an `Opening` for the event loop.
    #[classmethod]
    #[pyo3(signature = (name, **given))]
    fn start_connect(cls: &Bound<'_, PyType>, name: &str, given: Option<&Bound<'_, PyDict>>) -> PyResult<Opening> {
        let started = pelton::Client::start_connect(name, &options(given, CLIENT)?.cast());
        Ok(Opening::new(Started::Client(started.map_err(|error| raise(cls.py(), error))?)))
    }

    /// Submits a request, and returns the number of the call; None if there is no space, or 1,024 calls are in flight:
    /// take completions, or `arm`, and try again.
    ///
    /// The service sees that the client waits for `timeout` seconds; here nothing ends by it. With `idempotent`, the
    /// call may be executed more than once. Raises `TooLarge`.
    #[pyo3(signature = (request, timeout=None, *, idempotent=false))]
    fn try_submit(&self, request: &Bound<'_, PyAny>, timeout: Option<f64>, idempotent: bool) -> PyResult<Option<u64>> {
        let py = request.py();
        let payload = Payload::of(request)?;
        let mut client = self.0.take(py)?;
        let submitted = match deadline(timeout)? {
            Deadline::At(end) => client.try_submit_by(payload.as_slice(), end),
            _ => client.try_submit(payload.as_slice()),
        };
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
    #[pyo3(signature = (most=256))]
    fn completions<'py>(&self, py: Python<'py>, most: usize) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(py);
        let mut client = self.0.take(py)?;
        while list.len() < most {
            let completion = match client.try_completion() {
                Ok(Some(completion)) => completion,
                Ok(None) => break,
                Err(error) if list.is_empty() => return Err(raise(py, error)),
                // The next call returns it again.
                Err(_) => break,
            };
            let (call, outcome) = (completion.call_id(), completion.outcome());
            let value = match outcome {
                Outcome::Reply | Outcome::Part => to_bytes(py, &completion)?.into_any(),
                Outcome::End => py.None().into_bound(py),
                Outcome::Lost(loss) => {
                    drop(completion);
                    raise(py, client.loss_error(loss)).into_value(py).into_bound(py).into_any()
                }
                outcome => {
                    let bytes = completion.into_vec();
                    let error = outcome.error(|| bytes).expect("every other outcome is an error");
                    raise(py, error).into_value(py).into_bound(py).into_any()
                }
            };
            list.append((call.to_bits(), outcome.is_final(), value))?;
        }
        Ok(list)
    }

    /// Cancels a call: its service is notified, and no completion of it comes any more.
    fn cancel(&self, py: Python<'_>, call: u64) -> PyResult<bool> {
        self.0.take(py)?.cancel(CallId::from_bits(call)).map_err(|error| raise(py, error))
    }

    /// Before `arm`: polls for a completion for some microseconds, less if that was useless lately. Returns whether
    /// there is one.
    fn busy_poll(&self, py: Python<'_>) -> PyResult<bool> {
        self.0.take(py)?.step(py, pelton::Client::busy_poll)
    }

    /// Makes the descriptor readable when a completion comes, space for the request that found none, or a service
    /// leaves.
    ///
    /// Returns False if something has come already: take completions, or submit again, instead of watching the
    /// descriptor.
    fn arm(&self, py: Python<'_>) -> PyResult<bool> {
        let armed = self.0.take(py)?.arm().map_err(|error| raise(py, error))?;
        Ok(armed == Armed::Waiting)
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
}
