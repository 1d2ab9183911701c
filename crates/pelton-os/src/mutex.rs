//! Locks and condition variables, which ThreadSanitizer can follow.

#[cfg(not(thread_sanitizer))]
use std::sync::PoisonError;
#[cfg(thread_sanitizer)]
use std::sync::TryLockError;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// Takes a lock, also one whose holder panicked: nothing that this crate keeps under a lock is left half done by that.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // ThreadSanitizer does not see what a thread waits for inside the standard library, which comes without it, and takes what is
    // done under the lock for a race. What is tried is compiled here, where it sees it.
    #[cfg(thread_sanitizer)]
    loop {
        match mutex.try_lock() {
            Ok(guard) => return guard,
            Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => std::thread::yield_now(),
        }
    }
    #[cfg(not(thread_sanitizer))]
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Gives a lock up until somebody has said that there may be something, or as much time has passed as is left, and takes it again; or for
/// nothing. What the others did meanwhile is seen by the lock alone, which they gave back: `said` only wakes, and says nothing of memory.
pub fn wait_on<'a, T>(
    said: &Condvar,
    mutex: &'a Mutex<T>,
    guard: MutexGuard<'a, T>,
    left: Option<Duration>,
) -> MutexGuard<'a, T> {
    // As above: that the lock was given up, and taken again, is seen only of what is compiled here.
    #[cfg(thread_sanitizer)]
    {
        let _ = said;
        drop(guard);
        std::thread::sleep(left.unwrap_or(Duration::MAX).min(Duration::from_millis(1)));
        locked(mutex)
    }
    #[cfg(not(thread_sanitizer))]
    {
        let _ = mutex;
        match left {
            None => said.wait(guard).unwrap_or_else(PoisonError::into_inner),
            Some(left) => said.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0,
        }
    }
}
