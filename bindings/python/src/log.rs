//! What the library logs, for the logger `pelton` of Python's `logging`.
//!
//! A thread that logs may hold locks of the library. It must not wait for the GIL, because the thread with the GIL may
//! wait for such a lock. So the record goes into a queue. The next thread that has the GIL after a step of the library,
//! or between two slices of a wait, hands it to `logging`.

use log::{Level, LevelFilter, Log, Metadata, Record};
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::ffi;
use pyo3::prelude::*;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// Records that wait for a thread with the GIL, at most; further ones are dropped. A guess.
const QUEUED_MAX: usize = 256;

struct Queue {
    records: Mutex<VecDeque<(Level, String)>>,
    /// Relaxed: a hint, the lock orders the records.
    has_records: AtomicBool,
}

static QUEUE: Queue = Queue { records: Mutex::new(VecDeque::new()), has_records: AtomicBool::new(false) };

/// Begins to collect the library's log.
pub fn start() {
    // Fails only if it is done already.
    if log::set_logger(&QUEUE).is_ok() {
        log::set_max_level(LevelFilter::Info);
    }
}

/// Hands what was logged to `logging`. An error of a handler ends no call: it is reported as unraisable.
#[inline]
pub fn deliver(py: Python<'_>) {
    if QUEUE.has_records.load(Ordering::Relaxed)
        && let Err(error) = deliver_all(py)
    {
        match error.is_instance_of::<PyKeyboardInterrupt>(py) {
            // Again, as soon as this thread handles signals: the call may have a result.
            // SAFETY: this thread has the GIL.
            true => unsafe { ffi::PyErr_SetInterrupt() },
            false => error.write_unraisable(py, None),
        }
    }
}

/// Between two slices of a wait: hands over the log, and handles signals.
pub fn deliver_and_check_signals(py: Python<'_>) -> PyResult<()> {
    deliver(py);
    py.check_signals()
}

#[cold]
fn deliver_all(py: Python<'_>) -> PyResult<()> {
    let records = {
        let mut records = QUEUE.records.lock().unwrap_or_else(PoisonError::into_inner);
        QUEUE.has_records.store(false, Ordering::Relaxed);
        std::mem::take(&mut *records)
    };
    let logger = py.import("logging")?.call_method1("getLogger", ("pelton",))?;
    for (level, text) in records {
        let method = match level {
            Level::Error => "error",
            Level::Warn => "warning",
            Level::Info | Level::Debug | Level::Trace => "info",
        };
        logger.call_method1(method, ("%s", text))?;
    }
    Ok(())
}

impl Log for Queue {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "pelton"
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let mut records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        if records.len() < QUEUED_MAX {
            records.push_back((record.level(), record.args().to_string()));
            self.has_records.store(true, Ordering::Relaxed);
        }
    }

    fn flush(&self) {}
}
