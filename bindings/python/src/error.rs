//! The library's errors as exceptions of Python. `python/pelton/_errors.py` has the classes.

use pelton::Error;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyModule;
use std::path::Path;

/// An exception of the class `name` in `pelton._errors`, with a text.
#[cold]
pub fn named(py: Python<'_>, name: &str, text: impl Into<String>) -> PyErr {
    let text = text.into();
    instance(py, name, text).map_or_else(|error| error, PyErr::from_value)
}

/// An exception for a bug.
#[cold]
pub fn internal(py: Python<'_>, text: impl Into<String>) -> PyErr {
    named(py, "Internal", text)
}

/// The exception when a wait's timeout has passed.
#[cold]
pub fn timed_out(py: Python<'_>, what: &str) -> PyErr {
    named(py, "TimedOut", format!("timed out while {what}: wait longer, or see whether the other side runs"))
}

/// Whether it is the ordinary end of a channel.
#[cold]
pub fn is_end(py: Python<'_>, error: &PyErr) -> bool {
    errors(py)
        .and_then(|errors| errors.getattr("Closed"))
        .is_ok_and(|closed| error.matches(py, closed).unwrap_or(false))
}

fn errors(py: Python<'_>) -> PyResult<&Bound<'_, PyModule>> {
    static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    ERRORS
        .get_or_try_init(py, || PyModule::import(py, "pelton._errors").map(Bound::unbind))
        .map(|module| module.bind(py))
}

fn instance<'py>(py: Python<'py>, name: &str, text: String) -> PyResult<Bound<'py, PyAny>> {
    errors(py)?.getattr(name)?.call1((text,))
}

/// The exception for an error of the library.
#[cold]
pub fn raise(py: Python<'_>, error: Error) -> PyErr {
    with_fields(py, error).map_or_else(|error| error, PyErr::from_value)
}

/// The exception for an error about a file, whose name it has as Python's own errors have it.
#[cold]
pub fn raise_of_file(py: Python<'_>, error: Error, path: &Path) -> PyErr {
    let error = raise(py, error);
    if error.is_instance_of::<PyOSError>(py) {
        let _ = error.value(py).setattr("filename", path.as_os_str());
    }
    error
}

fn with_fields(py: Python<'_>, error: Error) -> PyResult<Bound<'_, PyAny>> {
    let name = match &error {
        Error::Closed { .. } => "Closed",
        Error::PeerDied { .. } => "PeerDied",
        Error::TooLarge { .. } => "TooLarge",
        Error::TooManyDescriptors { .. } => "TooManyDescriptors",
        Error::DescriptorsLost { .. } => "DescriptorsLost",
        Error::Corrupt(_) => "Corrupt",
        Error::Forked => "Forked",
        Error::NoListener { .. } => "NoListener",
        Error::InUse { .. } => "InUse",
        Error::Name { .. } => "BadName",
        Error::NoChannel { .. } => "NoChannel",
        Error::NotAChannel { .. } => "NotAChannel",
        Error::RoleTaken { .. } => "RoleTaken",
        Error::NotARecordFile { .. } => "NotARecordFile",
        Error::Damaged { .. } => "Damaged",
        Error::NoSpace { .. } => "NoSpace",
        Error::Rebooted { .. } => "Rebooted",
        Error::Memory { .. } | Error::Refused(_) => "Refused",
        Error::HungUp => "HungUp",
        Error::TimedOut(_) => "TimedOut",
        Error::Option { .. } => "BadOption",
        Error::CallFailed(_) => "Failed",
        Error::CallAbandoned => "Abandoned",
        _ => "Internal",
    };
    if let Error::CallFailed(failure) = error {
        let bytes = pyo3::types::PyBytes::new(py, &failure.bytes);
        return errors(py)?.getattr(name)?.call1((failure.code, bytes));
    }
    let raised = match &error {
        // Also of Python's class for this errno, such as FileNotFoundError.
        Error::System { error: cause, .. } | Error::File { error: cause, .. } => {
            errors(py)?.getattr("system")?.call1((cause.raw_os_error(), error.to_string()))?
        }
        _ => instance(py, name, error.to_string())?,
    };
    match error {
        Error::Damaged { offset, next, .. } => {
            raised.setattr("offset", offset)?;
            raised.setattr("next_offset", next)?;
        }
        Error::Closed { unreleased } | Error::PeerDied { unreleased } => raised.setattr("unreleased", unreleased)?,
        Error::NoSpace { error, .. } => raised.setattr("errno", error.raw_os_error())?,
        _ => {}
    }
    Ok(raised)
}
