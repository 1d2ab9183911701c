//! Numbers that come from Python. The error for one that is no such number names the argument.

use crate::error::named;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

/// The number of the argument `name`.
///
/// # Errors
/// TypeError if it is no int; ValueError if it is negative, or larger than the type's largest number.
pub fn number<T: TryFrom<u64>>(name: &str, value: &Bound<'_, PyAny>) -> PyResult<T> {
    checked(name, value, PyValueError::new_err)
}

/// As [`number`]; None of Python is `None`.
pub fn number_or_none<T: TryFrom<u64>>(name: &str, value: Option<&Bound<'_, PyAny>>) -> PyResult<Option<T>> {
    value.map(|value| number(name, value)).transpose()
}

/// As [`number`], of an option: `BadOption` instead of ValueError.
pub fn option<T: TryFrom<u64>>(name: &str, value: &Bound<'_, PyAny>) -> PyResult<T> {
    checked(name, value, |text| named(value.py(), "BadOption", text))
}

fn checked<T: TryFrom<u64>>(
    name: &str,
    value: &Bound<'_, PyAny>,
    refused: impl FnOnce(String) -> PyErr,
) -> PyResult<T> {
    let found = value.extract::<u64>();
    if let Err(error) = &found
        && error.is_instance_of::<PyTypeError>(value.py())
    {
        return Err(wrong_type(name, value, "an int"));
    }
    let number = found.ok().and_then(|found| T::try_from(found).ok());
    number.ok_or_else(|| {
        let most = u64::MAX >> (u64::BITS - 8 * size_of::<T>() as u32);
        refused(format!("{name} is {value}, wanted a number from 0 to {most}"))
    })
}

/// The exception for an argument of another type.
pub fn wrong_type(name: &str, value: &Bound<'_, PyAny>, wanted: &str) -> PyErr {
    let found = value.get_type().name().map_or_else(|_| "an object".to_owned(), |name| name.to_string());
    PyTypeError::new_err(format!("{name} is {found}, wanted {wanted}"))
}
