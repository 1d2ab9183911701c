//! The C interface of pelton: the implementation of the promises in `include/pelton.h`.
//!
//! A function has a fast path, inlined from `pelton`, behind one comparison of the handle's gate. Every other case takes the
//! slow path through `handle::enter`, where every mistake gets its code.
//!
//! Invariants:
//! - No panic crosses into C. The slow paths run under `handle::catch`, and a caught panic closes the handle for every
//!   function but `pelton_close`. Fast paths that could panic do the same; a panic in any other would end the process.
//! - A gate is FREE only while nothing is reserved or received, the handle is alive, and threads need not be checked.
//! - Only `any.rs` determines a handle's kind, and only from the gate.
//! - A raw message or reservation is kept only while its sender or receiver has no other use: the functions that would use
//!   it otherwise refuse before that.
//! - Closing an engine waits, without bound, while the kernel or a thread may use memory that has no release function, or
//!   a channel's endpoint (`files.rs`). Closing the last appenders handle flushes and syncs its sink.

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
