//! Locks and condition variables, which ThreadSanitizer can follow.

#[cfg(not(thread_sanitizer))]
use std::sync::PoisonError;
#[cfg(thread_sanitizer)]
use std::sync::TryLockError;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// Takes a lock, also one whose holder panicked: no critical section of these crates leaves a state that is half
/// changed.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // ThreadSanitizer does not see waits inside the standard library, which is not instrumented, and reports accesses
    // under the lock as races. `try_lock` is compiled here, where it sees it.
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

/// Releases a lock until `said` is notified, or `left` has passed, or spuriously, and takes it again. The lock alone
/// makes the changes of other threads visible; the notification only wakes.
pub fn wait_on<'a, T>(
    said: &Condvar,
    mutex: &'a Mutex<T>,
    guard: MutexGuard<'a, T>,
    left: Option<Duration>,
) -> MutexGuard<'a, T> {
    // ThreadSanitizer sees the release and the new acquisition only where they are compiled here.
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
