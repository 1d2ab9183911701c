//! What `pelton.files` is made of: an engine of file operations for one event loop, and open files.
//!
//! A read goes into the `bytes` object that the caller gets, and a write comes from one: the operation's memory holds a
//! reference to it, which the kernel, or a thread without Python, may be the last to drop.

use crate::bytes::{Payload, WITHOUT_GIL, to_bytes};
use crate::error::{internal, named, raise};
use crate::handle::{Handle, Using};
use crate::number::{number, number_or_none};
use pelton::file::{Buffer, Completion, Engine as Operations, File as Opened, Open, Operation, Output, Submitted};
use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyEllipsis, PyList};
use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::ptr;
use std::sync::Mutex;

/// Operations of one event loop. Each method that begins one returns its result if the page cache has it, otherwise
/// Ellipsis: then `completions` returns it with its token.
#[pyclass(frozen, module = "pelton._pelton", weakref)]
pub struct Engine(Handle<State>);

struct State {
    operations: Operations,
    /// By token: the objects into which operations in flight read.
    targets: HashMap<u64, Py<PyBytes>>,
    /// Operations for which the engine has no space yet.
    waiting: VecDeque<(u64, Operation)>,
    /// Completions that another operation's beginning found.
    found: Vec<Completion>,
}

/// An open file of an engine.
#[pyclass(frozen, module = "pelton._pelton", weakref)]
pub struct File(Mutex<Option<Opened>>);

impl File {
    fn opened(&self, py: Python<'_>) -> PyResult<Opened> {
        let opened = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        opened.ok_or_else(|| named(py, "ClosedHandle", "this file is closed: open it again"))
    }
}

#[pymethods]
impl File {
    /// Its descriptor.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        Ok(self.opened(py)?.as_fd().as_raw_fd())
    }

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).is_none()
    }
}

impl State {
    /// Begins an operation. Returns its completion if it has ended within the call.
    fn begin(&mut self, token: u64, operation: Operation) -> pelton::Result<Option<Completion>> {
        match self.operations.try_submit(token, operation)? {
            Submitted::Submitted => {}
            Submitted::Full(operation) => self.waiting.push_back((token, operation)),
        }
        while let Some(completion) = self.operations.try_completion()? {
            if completion.token == token {
                return Ok(Some(completion));
            }
            self.found.push(completion);
        }
        Ok(None)
    }

    /// The next completion. Begins the operations for which there is space then.
    fn completion(&mut self) -> pelton::Result<Option<Completion>> {
        let completion = match self.found.pop() {
            None => self.operations.try_completion()?,
            found => found,
        };
        while self.operations.has_free_slots(1)
            && let Some((token, operation)) = self.waiting.pop_front()
        {
            let Submitted::Submitted = self.operations.try_submit(token, operation)? else {
                unreachable!("there was a free slot");
            };
        }
        Ok(completion)
    }
}

/// Begins an operation, without the GIL if it may copy much.
fn begin(
    py: Python<'_>,
    mut using: Using<'_, State>,
    token: u64,
    operation: Operation,
    bytes: usize,
    target: Option<Py<PyBytes>>,
) -> PyResult<Py<PyAny>> {
    let completion = match bytes < WITHOUT_GIL {
        true => using.begin(token, operation).map_err(|error| raise(py, error))?,
        false => using.step(py, move |state| state.begin(token, operation))?,
    };
    match completion {
        Some(completion) => result(py, completion, target),
        None => {
            if let Some(target) = target {
                using.targets.insert(token, target);
            }
            Ok(PyEllipsis::get(py).to_owned().into_any().unbind())
        }
    }
}

/// What the caller of an operation gets.
fn result(py: Python<'_>, completion: Completion, target: Option<Py<PyBytes>>) -> PyResult<Py<PyAny>> {
    let Completion { outcome, cut_short_by, .. } = completion;
    Ok(match outcome.map_err(|error| raise(py, error))? {
        Output::Done => py.None(),
        Output::Count(count) => match target {
            // Of a read that an error has cut short, the next one raises the error.
            Some(target) if target.as_bytes(py).len() == count => target.into_any(),
            Some(target) => to_bytes(py, &target.as_bytes(py)[..count])?.into_any().unbind(),
            None => match cut_short_by {
                Some(error) => return Err(raise(py, *error)),
                None => count.into_pyobject(py)?.into_any().unbind(),
            },
        },
        Output::File(file) => Py::new(py, File(Mutex::new(Some(file))))?.into_any(),
        Output::Stat(stat) => stat.bytes.into_pyobject(py)?.into_any().unbind(),
        Output::Entries(entries) => PyList::new(py, entries.into_iter().map(|entry| entry.name))?.into_any().unbind(),
        other => return Err(internal(py, format!("found {other:?}, which no operation of this module returns"))),
    })
}

/// Memory of a `bytes` object, with a reference to it.
fn memory(py: Python<'_>, object: &Py<PyBytes>) -> Buffer {
    /// Any thread calls it, also one that has no part in Python: then the reference is dropped later.
    unsafe extern "C" fn release(context: *mut c_void) {
        // SAFETY: `context` is the box that was leaked below, and this is called once.
        drop(unsafe { Box::from_raw(context.cast::<Py<PyBytes>>()) });
    }
    let bytes = object.as_bytes(py);
    let context = Box::into_raw(Box::new(object.clone_ref(py)));
    // SAFETY: the reference keeps the memory until `release`. No code writes an object that Python code has. An
    // operation that writes has a new object of `space`, which Python code gets when the operation has ended.
    unsafe { Buffer::foreign(bytes.as_ptr().cast_mut(), bytes.len(), Some(release), context.cast()) }
}

/// A new object, for an operation that writes it.
fn space(py: Python<'_>, bytes: usize) -> PyResult<Py<PyBytes>> {
    let bytes = isize::try_from(bytes).map_err(|_| PyValueError::new_err("most is larger than 2^63 - 1 bytes"))?;
    // SAFETY: a NULL source makes bytes of that size, of any value. An error of Python is returned as one.
    unsafe {
        let made = ffi::PyBytes_FromStringAndSize(ptr::null(), bytes);
        Ok(Bound::from_owned_ptr_or_err(py, made)?.cast_into_unchecked::<PyBytes>().unbind())
    }
}

#[pymethods]
impl Engine {
    #[new]
    fn new(py: Python<'_>) -> PyResult<Engine> {
        let operations = Operations::new().map_err(|error| raise(py, error))?;
        let state = State { operations, targets: HashMap::new(), waiting: VecDeque::new(), found: Vec::new() };
        Ok(Engine(Handle::new("engine", state)))
    }

    /// Opens a file with the flags of `os.open`: a `File`.
    fn open(&self, token: u64, path: PathBuf, flags: u32, permissions: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let (py, permissions) = (permissions.py(), number("permissions", permissions)?);
        let operation = Operation::open(path, Open::from_raw(flags, permissions, 0));
        begin(py, self.0.take(py)?, token, operation, 0, None)
    }

    /// Reads up to `most` bytes, at the file's own position if `offset` is None.
    #[pyo3(signature = (token, file, most, offset))]
    fn read(
        &self,
        token: u64,
        file: &File,
        most: &Bound<'_, PyAny>,
        offset: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let (py, bytes) = (most.py(), number("most", most)?);
        let (using, file, target) = (self.0.take(py)?, file.opened(py)?, space(py, bytes)?);
        let buffer = memory(py, &target);
        let operation = match number_or_none("offset", offset)? {
            Some(offset) => Operation::read_at(&file, buffer, offset),
            None => Operation::read(&file, buffer),
        };
        begin(py, using, token, operation, bytes, Some(target))
    }

    /// Writes all of a bytes-like object, at the file's own position if `offset` is None. Only `bytes` are not copied.
    #[pyo3(signature = (token, file, data, offset))]
    fn write(
        &self,
        token: u64,
        file: &File,
        data: &Bound<'_, PyAny>,
        offset: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let py = data.py();
        let data = match Payload::of(data)? {
            Payload::Bytes(bytes) => bytes,
            buffer => to_bytes(py, buffer.as_slice())?,
        };
        let (using, file, bytes) = (self.0.take(py)?, file.opened(py)?, data.as_bytes().len());
        let buffer = memory(py, &data.unbind());
        let operation = match number_or_none("offset", offset)? {
            Some(offset) => Operation::write_at(&file, buffer, offset),
            None => Operation::write(&file, buffer),
        };
        begin(py, using, token, operation, bytes, None)
    }

    /// Brings the file to the disk.
    fn sync(&self, py: Python<'_>, token: u64, file: &File, data_only: bool) -> PyResult<Py<PyAny>> {
        let (using, file) = (self.0.take(py)?, file.opened(py)?);
        let operation = if data_only { Operation::sync_data(&file) } else { Operation::sync(&file) };
        begin(py, using, token, operation, 0, None)
    }

    /// The file's length.
    fn size(&self, py: Python<'_>, token: u64, file: &File) -> PyResult<Py<PyAny>> {
        let (using, file) = (self.0.take(py)?, file.opened(py)?);
        begin(py, using, token, Operation::stat_file(&file), 0, None)
    }

    /// The next names in a directory; none at its end.
    fn list(&self, py: Python<'_>, token: u64, directory: &File) -> PyResult<Py<PyAny>> {
        let (using, directory) = (self.0.take(py)?, directory.opened(py)?);
        begin(py, using, token, Operation::list(&directory), 0, None)
    }

    /// Copies a file to another, both from their beginning: the number of bytes.
    fn copy(&self, py: Python<'_>, token: u64, source: &File, target: &File) -> PyResult<Py<PyAny>> {
        let (using, from, to) = (self.0.take(py)?, source.opened(py)?, target.opened(py)?);
        begin(py, using, token, Operation::copy(&from, 0, &to, 0, u64::MAX), 0, None)
    }

    /// Closes the file, once the operations on it have ended.
    fn close_file(&self, py: Python<'_>, token: u64, file: &File) -> PyResult<Py<PyAny>> {
        let using = self.0.take(py)?;
        let opened = file.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        match opened {
            Some(opened) => begin(py, using, token, Operation::close(opened), 0, None),
            None => Ok(py.None()),
        }
    }

    /// The operations that have ended: each token, with the result or the exception. Does not wait.
    fn completions(&self, py: Python<'_>) -> PyResult<Vec<(u64, Py<PyAny>)>> {
        let mut using = self.0.take(py)?;
        let mut ended = Vec::new();
        loop {
            let completion = match using.completion() {
                Ok(Some(completion)) => completion,
                Ok(None) => break,
                Err(error) if ended.is_empty() => return Err(raise(py, error)),
                // The next call returns it again: what has ended comes first.
                Err(_) => break,
            };
            let token = completion.token;
            let target = using.targets.remove(&token);
            let ended_as = result(py, completion, target);
            ended.push((token, ended_as.unwrap_or_else(|error| error.into_value(py).into_any())));
        }
        Ok(ended)
    }

    /// Whether `completions` has some that the descriptor does not report.
    #[getter]
    fn has_found(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(!self.0.take(py)?.found.is_empty())
    }

    /// Cancels an operation. It may still take effect.
    fn cancel(&self, py: Python<'_>, token: u64) -> PyResult<()> {
        let mut using = self.0.take(py)?;
        match using.waiting.iter().position(|(waiting, _)| *waiting == token) {
            Some(index) => {
                using.waiting.remove(index);
                using.targets.remove(&token);
            }
            None => {
                using.operations.cancel(token).map_err(|error| raise(py, error))?;
            }
        }
        Ok(())
    }

    /// The descriptor for an event loop: see `arm`.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        Ok(self.0.take(py)?.operations.as_raw_fd())
    }

    /// Makes the descriptor readable when an operation ends. Returns False if one has ended already.
    fn arm(&self, py: Python<'_>) -> PyResult<bool> {
        let mut using = self.0.take(py)?;
        if !using.found.is_empty() {
            return Ok(false);
        }
        using.operations.arm().map(|armed| armed.is_waiting()).map_err(|error| raise(py, error))
    }

    /// Undoes `arm`.
    fn disarm(&self, py: Python<'_>) -> PyResult<()> {
        self.0.take(py)?.operations.disarm();
        Ok(())
    }

    /// Cancels what is in flight, and does not wait for it.
    fn close(&self) {
        self.0.close();
    }
}
