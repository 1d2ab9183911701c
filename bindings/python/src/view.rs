//! Memory of a lane as buffers of Python.

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyMemoryView, PyWeakrefMethods, PyWeakrefReference};
use std::os::raw::{c_int, c_void};
use std::ptr::NonNull;

/// Fills a view for the buffer protocol.
///
/// # Safety
/// `view` is a view that Python wants filled. So many bytes stay valid at `start` until `owner` is asked to release it.
pub unsafe fn fill_view(
    view: *mut ffi::Py_buffer,
    owner: &Bound<'_, PyAny>,
    (start, bytes): (NonNull<u8>, usize),
    is_read_only: bool,
    flags: c_int,
) -> PyResult<()> {
    let start: *mut c_void = start.as_ptr().cast();
    // SAFETY: the caller guarantees it.
    match unsafe { ffi::PyBuffer_FillInfo(view, owner.as_ptr(), start, bytes as isize, is_read_only.into(), flags) } {
        0 => Ok(()),
        _ => Err(PyErr::fetch(owner.py())),
    }
}

/// The memoryview that the `with` block of an object has. Weak: the view has a reference to the object.
pub struct EnteredView(Py<PyWeakrefReference>);

impl EnteredView {
    /// A memoryview of the object for its block.
    pub fn of<'py>(object: &Bound<'py, PyAny>) -> PyResult<(Bound<'py, PyMemoryView>, EnteredView)> {
        let view = PyMemoryView::from(object)?;
        let weak = PyWeakrefReference::new(view.as_any())?.unbind();
        Ok((view, EnteredView(weak)))
    }

    /// Whether the program still has it.
    pub fn is_alive(&self, py: Python<'_>) -> bool {
        self.0.bind(py).upgrade().is_some()
    }

    /// Makes it unusable, unless a view was made of it, as an array of NumPy is. Runs code of Python.
    pub fn release(self, py: Python<'_>) {
        if let Some(view) = self.0.bind(py).upgrade()
            && let Err(error) = view.call_method0("release")
            && !error.is_instance_of::<PyBufferError>(py)
        {
            error.write_unraisable(py, Some(view.as_any()));
        }
    }
}
