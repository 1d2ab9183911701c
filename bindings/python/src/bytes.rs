//! Bytes that come from Python, and bytes that go there.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use std::ptr;
use std::sync::Mutex;

/// From this number of bytes on, a copy runs without the GIL. A copy of 64 KiB takes some microseconds, as long as
/// taking the GIL back from another thread.
pub const WITHOUT_GIL: usize = 64 << 10;

/// Up to this number of bytes Python copies as fast as [`copy`]: pelton's copy differs from there on only.
const SMALL: usize = 2048;

/// Buffers of this size and more are used again. With the default settings of glibc, memory of a large buffer goes back
/// to the kernel as soon as that and the `bytes` made of it are freed, and the next message pays a page fault for each
/// 4 KiB of it: a call of 200 kB took seven times as long.
const REUSED_MIN: usize = 64 << 10;
/// How many bytes of buffers are kept in all, in this process.
const KEPT_MAX: usize = 8 << 20;

/// Buffers to be used again, those that were used last at the end.
static KEPT: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

/// An empty buffer for a message of so many bytes: one that was used before, if it is large. Never waits.
pub fn buffer(bytes: usize) -> Vec<u8> {
    if bytes < REUSED_MIN {
        return Vec::new();
    }
    // No wait for another thread, which may take longer than to allocate; and in a forked child, for ever.
    let Ok(mut kept) = KEPT.try_lock() else { return Vec::new() };
    // A message that is stored must not keep much more memory than it has bytes: its limits count those.
    let fitting = kept.iter().rposition(|buffer| (bytes..=bytes.saturating_mul(2)).contains(&buffer.capacity()));
    fitting.map(|index| kept.remove(index)).unwrap_or_default()
}

/// Gives a buffer back for [`buffer`]. Never waits.
pub fn put_back(mut buffer: Vec<u8>) {
    if (REUSED_MIN..=KEPT_MAX).contains(&buffer.capacity())
        && let Ok(mut kept) = KEPT.try_lock()
    {
        buffer.clear();
        kept.push(buffer);
        while kept.iter().map(Vec::capacity).sum::<usize>() > KEPT_MAX {
            kept.remove(0);
        }
    }
}

/// A bytes-like object, kept while its bytes are read.
pub enum Payload<'py> {
    Bytes(Bound<'py, PyBytes>),
    Buffer(PyUntypedBuffer),
}

impl<'py> Payload<'py> {
    #[inline]
    pub fn of(object: &Bound<'py, PyAny>) -> PyResult<Payload<'py>> {
        match object.cast_exact::<PyBytes>() {
            Ok(bytes) => Ok(Payload::Bytes(bytes.clone())),
            Err(_) => Payload::of_buffer(object),
        }
    }

    #[cold]
    fn of_buffer(object: &Bound<'py, PyAny>) -> PyResult<Payload<'py>> {
        Ok(Payload::Buffer(contiguous(object, "a message is")?))
    }

    #[inline]
    pub fn as_slice(&self) -> &[u8] {
        match self {
            Payload::Bytes(bytes) => bytes.as_bytes(),
            Payload::Buffer(buffer) if buffer.len_bytes() == 0 => &[],
            // SAFETY: the exporter keeps this many bytes readable until the buffer is dropped, which outlives the
            // borrow. Another thread of Python may write there meanwhile; any value of a byte is valid.
            Payload::Buffer(buffer) => unsafe {
                std::slice::from_raw_parts(buffer.buf_ptr().cast(), buffer.len_bytes())
            },
        }
    }
}

fn contiguous(object: &Bound<'_, PyAny>, what: &str) -> PyResult<PyUntypedBuffer> {
    let buffer = PyUntypedBuffer::get(object).map_err(|error| {
        if !error.is_instance_of::<PyTypeError>(object.py()) {
            return error;
        }
        let found = object.get_type().name().map_or_else(|_| "an object".to_owned(), |name| name.to_string());
        PyTypeError::new_err(format!("{what} {found}, wanted a bytes-like object: encode a str, pickle other objects"))
    })?;
    match buffer.is_c_contiguous() {
        true => Ok(buffer),
        false => {
            Err(PyBufferError::new_err(format!("{what} not contiguous, wanted a contiguous buffer: copy it first")))
        }
    }
}

/// A writable buffer of Python, for a message that is copied into it.
pub struct Target(PyUntypedBuffer);

impl Target {
    pub fn of(object: &Bound<'_, PyAny>) -> PyResult<Target> {
        let buffer = contiguous(object, "the target is")?;
        match buffer.readonly() {
            true => Err(PyTypeError::new_err("the target is read-only, wanted a writable buffer, such as a bytearray")),
            false => Ok(Target(buffer)),
        }
    }

    pub fn len(&self) -> usize {
        self.0.len_bytes()
    }

    /// Copies the payload to the beginning; it fits.
    pub fn fill(&self, py: Python<'_>, payload: &[u8]) {
        assert!(payload.len() <= self.len(), "the caller has compared the sizes");
        // SAFETY: the exporter keeps so many bytes writable while `self` lives, and they are in no lane of this
        // receiver that another handle could release.
        unsafe { copy(py, payload, self.0.buf_ptr().cast()) };
    }
}

/// Copies a payload to `target`, a large one without the GIL.
///
/// # Safety
/// `payload.len()` bytes can be written at `target`.
pub unsafe fn copy(py: Python<'_>, payload: &[u8], target: *mut u8) {
    let address = target as usize;
    let write = || {
        // SAFETY: the caller guarantees the space.
        unsafe { copy_maybe_overlapping(payload, address as *mut u8) }
    };
    match payload.len() < WITHOUT_GIL {
        true => write(),
        false => py.detach(write),
    }
}

/// As [`copy`], whatever the size. The two may overlap: a view of the same lane may be the source.
///
/// # Safety
/// As for [`copy`].
pub unsafe fn copy_maybe_overlapping(payload: &[u8], target: *mut u8) {
    let overlap = payload.as_ptr().addr().abs_diff(target.addr()) < payload.len();
    // SAFETY: the caller guarantees the space, and the second copy has no overlap.
    unsafe {
        match overlap {
            true => ptr::copy(payload.as_ptr(), target, payload.len()),
            false => pelton::raw::copy(payload.as_ptr(), target, payload.len()),
        }
    }
}

/// A copy of the payload as `bytes`. Raises MemoryError, where `PyBytes::new` panics.
#[inline]
pub fn to_bytes<'py>(py: Python<'py>, payload: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
    if payload.len() > SMALL {
        return large(py, payload);
    }
    // SAFETY: the source has so many bytes. An error of Python is returned as one.
    unsafe {
        let made = ffi::PyBytes_FromStringAndSize(payload.as_ptr().cast(), payload.len() as isize);
        Ok(Bound::from_owned_ptr_or_err(py, made)?.cast_into_unchecked())
    }
}

/// An empty list. Raises MemoryError, where `PyList::empty` panics.
pub fn empty_list(py: Python<'_>) -> PyResult<Bound<'_, PyList>> {
    // SAFETY: an error of Python is returned as one.
    unsafe { Ok(Bound::from_owned_ptr_or_err(py, ffi::PyList_New(0))?.cast_into_unchecked()) }
}

#[inline(never)]
fn large<'py>(py: Python<'py>, payload: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
    // SAFETY: a NULL source makes bytes of that size, which nobody else knows until they are returned: they may be
    // written. An error of Python is returned as one.
    unsafe {
        let made = ffi::PyBytes_FromStringAndSize(ptr::null(), payload.len() as isize);
        let made = Bound::from_owned_ptr_or_err(py, made)?.cast_into_unchecked::<PyBytes>();
        copy(py, payload, ffi::PyBytes_AsString(made.as_ptr()).cast());
        Ok(made)
    }
}
