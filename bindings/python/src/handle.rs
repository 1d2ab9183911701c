//! A handle that one thread at a time uses, and how its waits end: by a result, a deadline, a signal, or a close.
//!
//! Each wait runs without the GIL, in slices. Between two slices the waiting thread handles signals (Ctrl-C raises
//! `KeyboardInterrupt`), and detects that another thread has closed the handle.

use crate::error::{self, raise};
use crate::log;
use pelton::Deadline;
use pyo3::prelude::*;
use std::ops::{Deref, DerefMut};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// Signals and closes are noticed within 50 ms, of which this leaves some for the scheduler. A waiting thread runs 33
/// times a second, for some microseconds.
const SLICE: Duration = Duration::from_millis(30);

/// A value that one thread at a time uses. Any thread may close it.
pub struct Handle<T> {
    value: Mutex<Option<T>>,
    /// Relaxed: it publishes nothing, and the waiting thread reads it again within a slice.
    is_closing: AtomicBool,
    /// Whether the value is lent. It changes under the lock.
    is_lent: AtomicBool,
    process: u32,
    /// What it is, for errors.
    noun: &'static str,
}

impl<T> Handle<T> {
    pub fn new(noun: &'static str, value: T) -> Handle<T> {
        let process = std::process::id();
        let (is_closing, is_lent) = (AtomicBool::new(false), AtomicBool::new(false));
        Handle { value: Mutex::new(Some(value)), is_closing, is_lent, process, noun }
    }

    /// Begins to use the value. Does not wait.
    ///
    /// # Errors
    /// `ClosedHandle`; `Busy` while another thread uses it.
    #[inline]
    pub fn take(&self, py: Python<'_>) -> PyResult<Using<'_, T>> {
        // Without the lock: an error is a Python object, and other threads may run while it is made.
        let problem = match self.value.try_lock() {
            Ok(guard) if guard.is_some() => return Ok(Using { guard, handle: self }),
            Ok(_) => Ok(()),
            Err(error) => Err(matches!(error, TryLockError::Poisoned(_))),
        };
        match problem {
            Ok(()) if self.is_lent.load(Ordering::Relaxed) && std::process::id() != self.process => {
                Err(raise(py, pelton::Error::Forked))
            }
            Ok(()) if self.is_lent.load(Ordering::Relaxed) && !self.is_closing() => {
                let text = match self.noun {
                    "subscriber" => "a SubscriberSet has this subscriber: remove it there first".to_owned(),
                    noun => format!("this {noun} waits for a successor of its peer: end that wait first"),
                };
                Err(error::named(py, "Busy", text))
            }
            Ok(()) => Err(self.closed(py)),
            Err(true) => {
                Err(error::internal(py, format!("a call with this {} has panicked: report this bug", self.noun)))
            }
            // In a child of fork, the thread that held the lock does not exist.
            Err(false) if std::process::id() != self.process => Err(raise(py, pelton::Error::Forked)),
            Err(false) => Err(error::named(
                py,
                "Busy",
                format!("another thread is in a call with this {0}: give each thread a {0} of its own", self.noun),
            )),
        }
    }

    /// Closes it now, or within 50 ms if another thread waits in it: that thread gets `ClosedHandle`.
    pub fn close(&self) {
        match self.value.try_lock() {
            Ok(mut guard) => {
                if self.is_lent.load(Ordering::Relaxed) {
                    self.is_closing.store(true, Ordering::Relaxed);
                }
                drop(guard.take());
            }
            Err(_) => self.is_closing.store(true, Ordering::Relaxed),
        }
    }

    pub fn is_closed(&self) -> bool {
        let is_empty = |value: MutexGuard<'_, Option<T>>| value.is_none() && !self.is_lent.load(Ordering::Relaxed);
        self.is_closing() || self.value.try_lock().is_ok_and(is_empty)
    }

    /// Whether it was closed while something used its value.
    pub fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::Relaxed)
    }

    /// Takes the value out. Until `give_back` the handle is `Busy`.
    pub fn lend(&self, py: Python<'_>) -> PyResult<T> {
        let mut using = self.take(py)?;
        self.is_lent.store(true, Ordering::Relaxed);
        Ok(using.guard.take().expect("a handle in use is open"))
    }

    /// Ends `lend`; closes the value if the handle was closed meanwhile.
    pub fn give_back(&self, value: T) {
        let mut guard = self.value.lock().unwrap_or_else(PoisonError::into_inner);
        self.is_lent.store(false, Ordering::Relaxed);
        if !self.is_closing() {
            *guard = Some(value);
        }
    }

    #[cold]
    pub fn closed(&self, py: Python<'_>) -> PyErr {
        error::named(py, "ClosedHandle", format!("this {} is closed: open another one", self.noun))
    }
}

/// The value, while this thread uses it.
pub struct Using<'a, T> {
    guard: MutexGuard<'a, Option<T>>,
    handle: &'a Handle<T>,
}

impl<T> Deref for Using<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        self.guard.as_ref().expect("a handle in use is open")
    }
}

impl<T> DerefMut for Using<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        self.guard.as_mut().expect("a handle in use is open")
    }
}

impl<T> Drop for Using<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if self.handle.is_closing.load(Ordering::Relaxed) {
            self.guard.take();
        }
    }
}

impl<T: Send> Using<'_, T> {
    /// Repeats `attempt`, until a deadline that is at most one slice away, until it returns something. `None` once
    /// `deadline` has passed. Waits without the GIL.
    pub fn wait<R: Send>(
        &mut self,
        py: Python<'_>,
        deadline: Deadline,
        mut attempt: impl FnMut(&mut T, Deadline) -> pelton::Result<Option<R>> + Send,
    ) -> PyResult<Option<R>> {
        if deadline == Deadline::Now {
            let found = attempt(self, deadline);
            log::deliver(py);
            return found.map_err(|error| raise(py, error));
        }
        in_slices(py, deadline, |until| {
            if self.handle.is_closing.load(Ordering::Relaxed) {
                return Err(self.handle.closed(py));
            }
            let value: &mut T = self;
            py.detach(|| attempt(value, until.into())).map_err(|error| raise(py, error))
        })
    }

    /// Takes a step that may wait a little, without the GIL.
    pub fn step<R: Send>(
        &mut self,
        py: Python<'_>,
        step: impl FnOnce(&mut T) -> pelton::Result<R> + Send,
    ) -> PyResult<R> {
        let value: &mut T = self;
        let found = py.detach(|| step(value));
        log::deliver(py);
        found.map_err(|error| raise(py, error))
    }

    /// Waits until the descriptor that `fd` returns is readable. Returns false once `deadline` has passed.
    pub fn wait_readable(
        &mut self,
        py: Python<'_>,
        deadline: Deadline,
        fd: impl Fn(&T) -> BorrowedFd<'_> + Send + Sync,
    ) -> PyResult<bool> {
        let found = self.wait(py, deadline, |value, until| Ok(is_readable(fd(value), until)?.then_some(())))?;
        Ok(found.is_some())
    }
}

/// Repeats `attempt`, until a deadline that is at most one slice away, until it returns something; hands over the log
/// and handles signals between. `None` once `deadline` has passed.
pub fn in_slices<R>(
    py: Python<'_>,
    deadline: Deadline,
    mut attempt: impl FnMut(Instant) -> PyResult<Option<R>>,
) -> PyResult<Option<R>> {
    loop {
        let found = attempt(slice(deadline));
        log::deliver(py);
        if let Some(found) = found? {
            return Ok(Some(found));
        }
        py.check_signals()?;
        if has_passed(deadline) {
            return Ok(None);
        }
    }
}

/// The end of a slice of a wait until `deadline`.
fn slice(deadline: Deadline) -> Instant {
    let now = Instant::now();
    match deadline {
        Deadline::Now => now,
        Deadline::At(end) => end.min(now + SLICE),
        Deadline::Never => now + SLICE,
    }
}

/// Whether the deadline has passed.
fn has_passed(deadline: Deadline) -> bool {
    match deadline {
        Deadline::Now => true,
        Deadline::At(end) => Instant::now() >= end,
        Deadline::Never => false,
    }
}

/// Waits until the descriptor is readable; false at the deadline, or when a signal arrived.
pub fn is_readable(fd: BorrowedFd<'_>, until: Deadline) -> pelton::Result<bool> {
    use rustix::event::{PollFd, PollFlags, poll};
    let left = until.instant().map_or(SLICE, |end| end.saturating_duration_since(Instant::now()));
    let timeout = rustix::time::Timespec { tv_sec: left.as_secs() as _, tv_nsec: left.subsec_nanos() as _ };
    match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(errno) => Err(pelton::Error::System { what: "waiting for a descriptor".to_owned(), error: errno.into() }),
    }
}

/// A timeout of Python: seconds, or `None` for no limit. 0, and less, is not to wait.
pub fn deadline(timeout: Option<f64>) -> PyResult<Deadline> {
    match timeout {
        None => Ok(Deadline::Never),
        Some(seconds) if seconds.is_nan() => {
            Err(pyo3::exceptions::PyValueError::new_err("timeout is nan, wanted seconds, or None for no limit"))
        }
        Some(seconds) if seconds <= 0.0 => Ok(Deadline::Now),
        Some(seconds) => Ok(Duration::try_from_secs_f64(seconds).map_or(Deadline::Never, Deadline::from)),
    }
}
