//! `pelton.RecordFile` and `pelton.RecordReader`: messages in a file.

use crate::bytes::{Payload, WITHOUT_GIL, to_bytes};
use crate::error::{named, raise, raise_of_file};
use crate::handle::Handle;
use crate::number::number_or_none;
use pelton::{Appender, Appenders, Options, RecordFileOptions};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Messages appended to a file, which `RecordReader` and `pelton cat` read. Any number of threads may share it.
///
/// Messages are collected in a buffer of `flush_bytes` (1 MiB), which goes to the file when it is full, and after
/// `flush_interval` seconds (0.1; None: only when it is full). In the file they survive the process; a failure of the
/// machine only after `sync`, or after each `sync_bytes` bytes (0: after each write), or `sync_interval` seconds.
/// `rotate_bytes` begins a new file before this one is larger: FILE becomes FILE.000001.
///
/// Opening creates the file, or cuts off the torn end that a killed writer left (`cut_bytes`), and waits up to a
/// second while another writer has it. Raises `RoleTaken` if that one still writes, `NotARecordFile`, `Damaged`,
/// `System`. Any method may raise `NoSpace` or `System` of the disk: then the messages stay in the buffer, and the next
/// call retries; `Forked` in a forked child; `ClosedHandle`.
///
/// Example:
///     with pelton.RecordFile("events.records") as file:
///         file.append(b"hello")
#[pyclass(frozen, module = "pelton", weakref)]
pub struct RecordFile {
    open: Mutex<Option<Open>>,
    process: u32,
    #[pyo3(get)]
    cut_bytes: u64,
}

/// One buffer for all threads: they take turns by the GIL anyway, and the file has their messages in that order.
struct Open {
    appender: Appender,
    appenders: Appenders,
}

fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value)
        .map_err(|_| PyValueError::new_err(format!("{name} is {value}, wanted seconds, which are not negative")))
}

impl RecordFile {
    /// Runs `work` on the open file, without the GIL. Other threads wait for it.
    fn with<T: Send>(&self, py: Python<'_>, work: impl FnOnce(&mut Open) -> pelton::Result<T> + Send) -> PyResult<T> {
        self.check(py)?;
        let done = py.detach(|| self.lock().as_mut().map(work));
        done.ok_or_else(|| closed(py))?.map_err(|error| raise(py, error))
    }

    /// In a forked child, the thread that held the lock may not exist.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        match std::process::id() == self.process {
            true => Ok(()),
            false => Err(raise(py, pelton::Error::Forked)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends without waiting. `None` if it would wait for another thread or for the file, or the file is closed.
    ///
    /// The caller makes the exception: that may run code which appends to this file.
    fn try_append(&self, payload: &[u8]) -> Option<pelton::Result<()>> {
        let mut open = self.open.try_lock().ok()?;
        let appender = &mut open.as_mut()?.appender;
        (!appender.sender().is_past_window(payload.len())).then(|| appender.append(payload))
    }
}

impl Drop for RecordFile {
    /// Writes and syncs what was appended, as `close` does.
    fn drop(&mut self) {
        let open = self.open.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if open.is_some() {
            // Waits for the disk, so without the GIL. Of an interpreter that is ending, this thread may have none.
            Python::try_attach(|py| py.detach(|| drop(open)));
        }
    }
}

#[cold]
fn closed(py: Python<'_>) -> PyErr {
    named(py, "ClosedHandle", "this record file is closed: open it again")
}

#[pymethods]
impl RecordFile {
    #[new]
    #[pyo3(
        signature = (
            path, *, rotate_bytes=None, sync_bytes=None, sync_interval=None, flush_bytes=None, flush_interval=Some(0.1)
        ),
        text_signature = "(path, *, rotate_bytes=None, sync_bytes=None, sync_interval=None, flush_bytes=None, \
            flush_interval=0.1)"
    )]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        rotate_bytes: Option<&Bound<'_, PyAny>>,
        sync_bytes: Option<&Bound<'_, PyAny>>,
        sync_interval: Option<f64>,
        flush_bytes: Option<&Bound<'_, PyAny>>,
        flush_interval: Option<f64>,
    ) -> PyResult<RecordFile> {
        let mut file = RecordFileOptions::new();
        if let Some(bytes) = number_or_none("rotate_bytes", rotate_bytes)? {
            file = file.rotate_bytes(bytes);
        }
        if let Some(bytes) = number_or_none("sync_bytes", sync_bytes)? {
            file = file.sync_bytes(bytes);
        }
        if let Some(interval) = sync_interval {
            file = file.sync_interval(seconds("sync_interval", interval)?);
        }
        let interval = flush_interval.map(|interval| seconds("flush_interval", interval)).transpose()?;
        let mut options = Options::new().flush_interval(interval);
        if let Some(bytes) = number_or_none("flush_bytes", flush_bytes)? {
            options = options.flush_bytes(bytes);
        }
        let opened = py.detach(|| {
            let file = file.open(&path)?;
            let cut_bytes = file.cut_bytes();
            let appenders = Appenders::new(&options, file)?;
            Ok((Open { appender: appenders.appender()?, appenders }, cut_bytes))
        });
        let (open, cut_bytes) = opened.map_err(|error| raise_of_file(py, error, &path))?;
        Ok(RecordFile { open: Mutex::new(Some(open)), process: std::process::id(), cut_bytes })
    }

    /// Appends a message, copied from a bytes-like object. Waits for the file when the buffer is full.
    ///
    /// Raises `TooLarge` for a message that is larger than the buffer.
    fn append(&self, data: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = data.py();
        let payload = Payload::of(data)?;
        let payload = payload.as_slice();
        if payload.len() < WITHOUT_GIL
            && let Some(appended) = self.try_append(payload)
        {
            return appended.map_err(|error| raise(py, error));
        }
        self.with(py, |open| open.appender.append(payload))
    }

    /// Writes all messages to the file. Waits for the system, not for the disk.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |open| open.appenders.flush())
    }

    /// Writes all messages to the file, and waits until they are on the disk.
    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |open| open.appenders.sync())
    }

    /// As `sync`, and closes the file, also if that fails.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if std::process::id() != self.process {
            return Ok(());
        }
        let synced = py.detach(|| self.lock().take().map(|open| open.appenders.sync()));
        synced.unwrap_or(Ok(())).map_err(|error| raise(py, error))
    }

    /// Whether this handle is closed.
    #[getter]
    fn closed(&self, py: Python<'_>) -> bool {
        // In a forked child, the thread that held the lock may not exist, and nobody else has closed it.
        std::process::id() == self.process && py.detach(|| self.lock().is_none())
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

/// The messages of a record file, as `bytes`, from the first to the last one that is complete. One thread at a time.
///
/// A writer may append meanwhile: after the last message, `next` raises StopIteration, and continues when there are
/// more. Raises `NotARecordFile`; `System`; and `Damaged` where the bytes violate the format: then `next` continues
/// after the damage, if `error.next_offset` is not None.
///
/// Example:
///     for message in pelton.RecordReader("events.records"):
///         print(message)
#[pyclass(frozen, module = "pelton", weakref)]
pub struct RecordReader(Handle<Reading>);

struct Reading {
    reader: pelton::RecordReader,
    /// The rest of a chunk.
    messages: VecDeque<Py<PyBytes>>,
}

#[pymethods]
impl RecordReader {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<RecordReader> {
        let reader = py.detach(|| pelton::RecordReader::open(&path));
        let reader = reader.map_err(|error| raise_of_file(py, error, &path))?;
        Ok(RecordReader(Handle::new("record reader", Reading { reader, messages: VecDeque::new() })))
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

    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Py<PyBytes>>> {
        let mut using = self.0.take(py)?;
        while using.messages.is_empty() {
            let Reading { reader, messages } = &mut *using;
            let chunk = py.detach(|| reader.next_chunk()).map_err(|error| raise(py, error))?;
            let Some(chunk) = chunk else { return Ok(None) };
            // All of them, or none: an error must not leave a part of the chunk out.
            let payloads = chunk.payloads().map(|payload| Ok(to_bytes(py, payload)?.unbind()));
            *messages = payloads.collect::<PyResult<_>>()?;
        }
        Ok(using.messages.pop_front())
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __exit__(&self, _type: &Bound<'_, PyAny>, _value: &Bound<'_, PyAny>, _traceback: &Bound<'_, PyAny>) {
        self.0.close();
    }
}
