//! The hook of the steps (see `edges::failpoint`), for tests that end a process at each of them.

use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, Ordering};

/// What is called at each step, a `fn(&'static str)`.
static HOOK: AtomicPtr<()> = AtomicPtr::new(null_mut());

/// Has `hook` called at each step of this process, with the step's name, on the thread that takes it.
pub fn set(hook: fn(&'static str)) {
    HOOK.store(hook as *mut (), Ordering::Release);
}

/// A step.
#[inline(never)]
pub fn failpoint(name: &'static str) {
    let hook = HOOK.load(Ordering::Acquire);
    if !hook.is_null() {
        // SAFETY: only `set` stores anything but null, and that a function of this type.
        unsafe { core::mem::transmute::<*mut (), fn(&'static str)>(hook)(name) };
    }
}
