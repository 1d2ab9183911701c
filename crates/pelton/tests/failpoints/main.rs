//! Tests that need the feature `_failpoints`, and no program of their own: files on a failing system, a writer of
//! record files that is killed at every step, and a hostile process between the steps of a join.

mod broadcast;
mod file_faults;
mod record_file;
#[path = "../support/mod.rs"]
mod support;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The hooks are global to the process, so one test at a time runs.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
