//! Descriptors that come from Python, and that go there.

use crate::error::raise;
use pelton::Error;
use pyo3::ffi;
use pyo3::prelude::*;
use std::os::fd::{BorrowedFd, IntoRawFd, OwnedFd};

/// Duplicates of the descriptors of an iterable: of numbers, or of objects with `fileno()`.
pub fn duplicated(objects: &Bound<'_, PyAny>) -> PyResult<Vec<OwnedFd>> {
    objects
        .try_iter()?
        .map(|object| {
            let object = object?;
            // SAFETY: the object is alive. An error of Python is returned as one.
            let number = unsafe { ffi::PyObject_AsFileDescriptor(object.as_ptr()) };
            if number < 0 {
                return Err(PyErr::fetch(object.py()));
            }
            // SAFETY: the number is not negative. Of a closed descriptor the system returns EBADF.
            let duplicate = unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned();
            let failed = |error| Error::System { what: format!("duplicating descriptor {number}"), error };
            duplicate.map_err(|error| raise(object.py(), failed(error)))
        })
        .collect()
}

/// The numbers of descriptors, which the caller owns from now on.
pub fn numbers(fds: Vec<OwnedFd>) -> Vec<i32> {
    fds.into_iter().map(IntoRawFd::into_raw_fd).collect()
}
