//! The C interface of pelton. What each function promises is in `include/pelton.h`; here is how.
//!
//! A function has a short way, inlined from `pelton`, which one comparison of the handle's gate leads to; whatever is not usual takes
//! the long way through `handle::enter`, where every mistake gets its code.
//!
//! Invariants:
//! - no panic crosses: the long ways run under `handle::catch`, and one that was caught closes the handle for everything but
//!   closing; of the short ways those that could panic do too, and in the others it would end the process;
//! - a gate is FREE only while nothing is reserved or received, the handle is alive, and threads need not be checked;
//! - a kind of handle is found out in one place, `any.rs`, and only from the gate;
//! - a raw message or reservation is kept only while its sender or receiver is used for nothing else: what else is asked for is
//!   refused before.

mod any;
mod calling;
mod code;
mod files;
mod flushing;
mod handle;
mod making;
mod options;
mod receiving;
mod records;
mod sending;
mod serving;

use std::ffi::{c_char, c_int};

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
    // Not 0 and not less, lest a deadline that has passed be taken for another thing.
    options::now().saturating_add(timeout_ns).max(1)
}
