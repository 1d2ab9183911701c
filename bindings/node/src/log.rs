//! What the library logs, for one function of JavaScript.

use ::log::{Level, LevelFilter, Log, Metadata, Record};
use napi::bindgen_prelude::*;
use napi::threadsafe_function::{ThreadsafeFunction, ThreadsafeFunctionCallMode};
use napi_derive::napi;
use std::sync::{PoisonError, RwLock};

/// Records that wait for the loop, at most; further ones are dropped. A guess.
const QUEUED_MAX: usize = 256;

/// Weak: it does not keep the process alive. Any thread may call it, and does not wait for the loop.
type Function =
    ThreadsafeFunction<FnArgs<(String, String)>, (), FnArgs<(String, String)>, Status, false, true, QUEUED_MAX>;

static FUNCTION: RwLock<Option<Function>> = RwLock::new(None);

/// Sets the function `(level, text)` of this process, or none.
#[napi]
pub fn set_log(function: Option<napi::bindgen_prelude::Function<'_, FnArgs<(String, String)>, ()>>) -> Result<()> {
    let function = match function {
        Some(function) => {
            Some(function.build_threadsafe_function().weak::<true>().max_queue_size::<QUEUED_MAX>().build()?)
        }
        None => None,
    };
    // Fails if it is set already: then it stays.
    let _ = ::log::set_logger(&ToFunction);
    ::log::set_max_level(if function.is_some() { LevelFilter::Info } else { LevelFilter::Off });
    *FUNCTION.write().unwrap_or_else(PoisonError::into_inner) = function;
    Ok(())
}

struct ToFunction;

impl Log for ToFunction {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        // `set_log` is replacing the function: neither of them receives this.
        let Ok(function) = FUNCTION.try_read() else { return };
        let Some(function) = &*function else { return };
        let level = match record.level() {
            Level::Error => "error",
            Level::Warn => "warn",
            Level::Info | Level::Debug | Level::Trace => "info",
        };
        // If the queue is full, or the function's thread has ended, the record is dropped.
        function.call((level.to_owned(), record.args().to_string()).into(), ThreadsafeFunctionCallMode::NonBlocking);
    }

    fn flush(&self) {}
}
