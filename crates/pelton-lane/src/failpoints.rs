//! The hook of the failpoints (see `edges::failpoint`), for tests that end a process at each of them.

use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, Ordering};

/// The hook that each failpoint calls, a `fn(&'static str)`.
static HOOK: AtomicPtr<()> = AtomicPtr::new(null_mut());

/// Sets the `hook` of this process. Each failpoint calls it with its name, on the thread that reaches the failpoint.
pub fn set(hook: fn(&'static str)) {
    HOOK.store(hook as *mut (), Ordering::Release);
}

/// Calls the hook, if there is one.
#[inline(never)]
pub fn failpoint(name: &'static str) {
    let hook = HOOK.load(Ordering::Acquire);
    if !hook.is_null() {
        // SAFETY: only `set` stores a value other than null, and its type is this function's.
        unsafe { core::mem::transmute::<*mut (), fn(&'static str)>(hook)(name) };
    }
}
