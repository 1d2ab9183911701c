//! The library's errors as `PeltonError`s. `lib/errors.js` has the class.

use napi::bindgen_prelude::*;
use napi::sys;
use pelton::Error as PeltonError;
use std::cell::Cell;
use std::ptr;

/// JavaScript's function that makes an error, with its environment.
#[derive(Clone, Copy)]
struct Maker {
    env: sys::napi_env,
    function: sys::napi_ref,
}

thread_local! {
    // Node has one environment per thread: that of the process, and one of each worker.
    static MAKER: Cell<Option<Maker>> = const { Cell::new(None) };
}

/// Sets the function that makes errors in this thread's environment: `(code, text, first, second, bytes)`.
pub fn set_maker(env: &Env, function: &Function<'_, FnArgs<(Unknown<'_>,)>, Unknown<'_>>) -> Result<()> {
    let mut reference = ptr::null_mut();
    // SAFETY: both belong to the environment that calls.
    let status = unsafe { sys::napi_create_reference(env.raw(), function.raw(), 1, &mut reference) };
    if status != sys::Status::napi_ok {
        return Err(Error::from_reason("Node refuses a reference"));
    }
    MAKER.set(Some(Maker { env: env.raw(), function: reference }));
    Ok(())
}

/// What an error has besides its code and text.
#[derive(Default)]
struct Fields<'a> {
    first: Option<f64>,
    second: Option<f64>,
    bytes: Option<&'a [u8]>,
}

fn made(code: &str, text: &str, fields: &Fields<'_>) -> Option<sys::napi_value> {
    let Maker { env, function } = MAKER.get()?;
    let mut result = ptr::null_mut();
    // SAFETY: this is the thread of `env`; every value is made by it, and the pointers are those of live locals.
    let status = unsafe {
        let string = |text: &str| {
            let mut value = ptr::null_mut();
            sys::napi_create_string_utf8(env, text.as_ptr().cast(), text.len() as isize, &mut value);
            value
        };
        let mut undefined = ptr::null_mut();
        sys::napi_get_undefined(env, &mut undefined);
        let number = |number: Option<f64>| {
            let mut value = undefined;
            if let Some(number) = number {
                sys::napi_create_double(env, number, &mut value);
            }
            value
        };
        let mut bytes = undefined;
        if let Some(found) = fields.bytes {
            let mut data = ptr::null_mut();
            sys::napi_create_buffer_copy(env, found.len(), found.as_ptr().cast(), &mut data, &mut bytes);
        }
        let mut callee = ptr::null_mut();
        sys::napi_get_reference_value(env, function, &mut callee);
        let arguments = [string(code), string(text), number(fields.first), number(fields.second), bytes];
        sys::napi_call_function(env, undefined, callee, arguments.len(), arguments.as_ptr(), &mut result)
    };
    (status == sys::Status::napi_ok).then_some(result)
}

fn with_fields(code: &str, text: &str, fields: &Fields<'_>) -> Error {
    match (made(code, text, fields), MAKER.get()) {
        // SAFETY: the value was just made in that environment.
        (Some(value), Some(maker)) => Error::from(unsafe { Unknown::from_raw_unchecked(maker.env, value) }),
        _ => Error::from_reason(format!("{code}: {text}")),
    }
}

/// A `PeltonError` with a code and a text.
#[cold]
pub fn named(code: &str, text: &str) -> Error {
    with_fields(code, text, &Fields::default())
}

/// The `PeltonError` of an error of the library.
#[cold]
pub fn raise(error: PeltonError) -> Error {
    let text = error.to_string();
    let mut fields = Fields::default();
    let code = match &error {
        PeltonError::Closed { unreleased } | PeltonError::PeerDied { unreleased } => {
            fields.first = Some(*unreleased as f64);
            if matches!(error, PeltonError::Closed { .. }) { "closed" } else { "peer_died" }
        }
        PeltonError::TooLarge { .. } => "too_large",
        PeltonError::TooManyDescriptors { .. } => "too_many_descriptors",
        PeltonError::DescriptorsLost { .. } => "descriptors_lost",
        PeltonError::Corrupt(_) => "corrupt",
        PeltonError::Forked => "forked",
        PeltonError::NoListener { .. } => "no_listener",
        PeltonError::InUse { .. } => "in_use",
        PeltonError::Name { .. } => "name",
        PeltonError::NoChannel { .. } => "no_channel",
        PeltonError::NotAChannel { .. } => "not_a_channel",
        PeltonError::RoleTaken { .. } => "role_taken",
        PeltonError::NotARecordFile { .. } => "not_a_record_file",
        PeltonError::Damaged { offset, next, .. } => {
            (fields.first, fields.second) = (Some(*offset as f64), next.map(|next| next as f64));
            "damaged"
        }
        PeltonError::NoSpace { error, .. } => {
            fields.first = error.raw_os_error().map(f64::from);
            "no_space"
        }
        PeltonError::System { error, .. } | PeltonError::File { error, .. } => {
            fields.first = error.raw_os_error().map(f64::from);
            "system"
        }
        PeltonError::Rebooted { .. } => "rebooted",
        PeltonError::Memory { .. } | PeltonError::Refused(_) => "refused",
        PeltonError::HungUp => "hung_up",
        PeltonError::TimedOut(_) => "timed_out",
        PeltonError::Option { .. } => "option",
        PeltonError::CallFailed(failure) => {
            (fields.first, fields.bytes) = (Some(f64::from(failure.code)), Some(failure.bytes.as_slice()));
            "failed"
        }
        PeltonError::CallAbandoned => "abandoned",
        _ => "internal",
    };
    with_fields(code, &text, &fields)
}
