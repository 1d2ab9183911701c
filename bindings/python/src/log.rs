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
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

/// Records that wait for a thread with the GIL, at most; further ones are dropped. A guess.
const QUEUED_MAX: usize = 256;

/// The records of one process. A forked child makes its own: the parent delivers the records of this one, and another
/// thread of the parent may have locked it at the fork.
struct Queue {
    process: u32,
    /// Locked for a push or a pop only.
    records: Mutex<VecDeque<(Level, String)>>,
    /// Whether a thread hands records over. Relaxed: only threads with the GIL use it.
    is_delivering: AtomicBool,
}

/// Null, or a queue, which is never freed.
static QUEUE: AtomicPtr<Queue> = AtomicPtr::new(null_mut());
/// Relaxed: a hint, the lock orders the records.
static HAS_RECORDS: AtomicBool = AtomicBool::new(false);

impl Queue {
    /// This process's queue.
    fn of_this_process() -> &'static Queue {
        let process = std::process::id();
        let found = QUEUE.load(Ordering::Acquire);
        // SAFETY: this function stores initialized queues only, and nobody frees one or has a mutable reference.
        if let Some(queue) = unsafe { found.as_ref() }
            && queue.process == process
        {
            return queue;
        }
        let (records, is_delivering) = (Mutex::default(), AtomicBool::new(false));
        let made = Box::into_raw(Box::new(Queue { process, records, is_delivering }));
        match QUEUE.compare_exchange(found, made, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: as above; it is stored from now on.
            Ok(_) => unsafe { &*made },
            Err(other) => {
                // SAFETY: it comes from the box above, and no other thread has seen it.
                drop(unsafe { Box::from_raw(made) });
                // SAFETY: as above; only null and a queue of the parent are ever replaced.
                unsafe { &*other }
            }
        }
    }

    fn push(&self, level: Level, text: String) {
        let mut records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        if records.len() < QUEUED_MAX {
            records.push_back((level, text));
            HAS_RECORDS.store(true, Ordering::Relaxed);
        }
    }

    fn pop(&self) -> Option<(Level, String)> {
        let mut records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        let record = records.pop_front();
        if record.is_none() {
            HAS_RECORDS.store(false, Ordering::Relaxed);
        }
        record
    }
}

/// Begins to collect the library's log.
pub fn start() {
    // Fails only if it is done already.
    if log::set_logger(&ToQueue).is_ok() {
        log::set_max_level(LevelFilter::Info);
    }
}

/// Hands what was logged to `logging`. An error of a handler ends no call: it is reported as unraisable.
#[inline]
pub fn deliver(py: Python<'_>) {
    if HAS_RECORDS.load(Ordering::Relaxed)
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

/// Takes one record at a time: after an exception of a handler, the next call continues with the others.
#[cold]
fn deliver_all(py: Python<'_>) -> PyResult<()> {
    let queue = Queue::of_this_process();
    // A handler may use the library, and release the GIL: that call, and other threads, leave the records to this one.
    if queue.is_delivering.swap(true, Ordering::Relaxed) {
        return Ok(());
    }
    let mut delivered = Ok(());
    // Checks the process again each time: a handler may fork.
    while delivered.is_ok()
        && let Some((level, text)) = Queue::of_this_process().pop()
    {
        delivered = deliver_one(py, level, &text);
    }
    queue.is_delivering.store(false, Ordering::Relaxed);
    delivered
}

fn deliver_one(py: Python<'_>, level: Level, text: &str) -> PyResult<()> {
    let method = match level {
        Level::Error => "error",
        Level::Warn => "warning",
        Level::Info | Level::Debug | Level::Trace => "info",
    };
    let logger = py.import("logging")?.call_method1("getLogger", ("pelton",))?;
    logger.call_method1(method, ("%s", text)).map(|_| ())
}

struct ToQueue;

impl Log for ToQueue {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "pelton"
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            // Formats it before it locks the queue.
            let text = record.args().to_string();
            Queue::of_this_process().push(record.level(), text);
        }
    }

    fn flush(&self) {}
}
