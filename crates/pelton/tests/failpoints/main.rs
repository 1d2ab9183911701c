//! What needs the feature `failpoints`, and is no program of its own: files at which the system fails, and a writer of record files that is killed at
//! every step.

mod file_faults;
mod record_file;
#[path = "../support/mod.rs"]
mod support;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The hooks are the whole process's, so one test at a time runs.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
