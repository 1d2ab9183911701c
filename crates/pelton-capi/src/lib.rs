//! The C interface of pelton: the implementation of `include/pelton.h` and the headers below it.
//!
//! An exported function is an entry of the macro in `entries.rs`, which checks handles and pointers, and catches
//! panics. The functions for each message have a fast path, inlined from `pelton`, behind one comparison of the
//! handle's gate. It catches the panics of the functions that it calls; one in its own code, a bug, would abort the
//! process.
//!
//! Invariants:
//! - No panic crosses into C. A panic that was caught makes a handle unusable, except for `pelton_close`.
//! - A gate is free only while nothing is reserved or received, the handle is open, and threads need not be checked.
//! - A record, or a reservation, is kept by its handle only while that uses its endpoint for nothing else.
//! - Closing an engine waits while an operation uses memory without a release function, or an endpoint. Closing the
//!   last handle of appenders flushes and syncs their sink.

mod broadcast;
mod c;
mod client;
mod code;
mod engine;
mod entries;
mod file;
mod flush;
mod handle;
mod log;
mod opening;
mod operation;
mod options;
mod receiver;
mod records;
mod responder;
mod sender;
mod service;
mod subscriber_set;
mod writer;

use std::ffi::{c_char, c_int, c_void};

/// See `pelton.h`.
#[unsafe(no_mangle)]
pub extern "C" fn pelton_version() -> u32 {
    code::VERSION_MAJOR * 1_000_000 + code::VERSION_MINOR * 1000 + code::VERSION_PATCH
}

/// See `pelton.h`.
#[unsafe(no_mangle)]
pub extern "C" fn pelton_code_text(code: c_int) -> *const c_char {
    code::text(code).as_ptr()
}

/// See `pelton.h`.
#[unsafe(no_mangle)]
pub extern "C" fn pelton_error_detail() -> *const c_char {
    code::detail()
}

/// See `pelton.h`.
#[unsafe(no_mangle)]
pub extern "C" fn pelton_deadline(timeout_ns: i64) -> i64 {
    // At least 1: 0 is PELTON_NO_WAIT.
    c::now().saturating_add(timeout_ns).max(1)
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_set_log(log: Option<log::Function>, context: *mut c_void) {
    log::set(log, context);
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_close(handle: *mut c_void) -> c_int {
    // SAFETY: the C caller guarantees that it is NULL or a handle, and that no other thread uses it.
    unsafe { handle::close_any(handle) }
}
