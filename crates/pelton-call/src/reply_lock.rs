//! The lock of a session's lane of replies, with its three uncommon uses in one type: without the lock, with a guard
//! that outlives its borrow, and a guard that is never released.
//!
//! - The service's loop omits the lock while nobody else can take it ([`ReplyLock::unlocked`]).
//! - A thread that has reserved space keeps the lock until it publishes or drops the reservation. The guard stays
//!   inside the lock ([`Guard::keep`], [`Contents::take_kept`]), so that a reservation is one pointer.
//! - A reservation that is leaked leaves the lock taken for ever.
//!
//! Why not a `Mutex<ReplyPath>`: an uncontended lock and unlock are two locked instructions for each reply, and a
//! reservation of several words stalls its reader (`docs/decisions/0016` and `0023`). The benchmark `./run bench call`
//! shows both.

use pelton_os::{locked, wait_on};
use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Condvar, Mutex, MutexGuard, TryLockError};
use std::time::Duration;

/// A mutex whose contents are also accessed without it.
#[derive(Debug)]
pub(crate) struct ReplyLock<T> {
    mutex: Mutex<()>,
    contents: UnsafeCell<Contents<T>>,
}

// SAFETY: the contents are accessed under the mutex, or as the caller of an unsafe function here guarantees: never by
// two threads at a time. A kept guard is taken on the thread that kept it, as `Contents::take_kept` requires.
unsafe impl<T: Send> Sync for ReplyLock<T> {}
// SAFETY: as for `Sync`. A kept guard whose reservation was leaked is never dropped, so no other thread unlocks it.
unsafe impl<T: Send> Send for ReplyLock<T> {}

/// What the lock protects, with the guard of a thread that keeps it locked.
#[derive(Debug)]
pub(crate) struct Contents<T> {
    value: T,
    /// `None`: nobody keeps a guard, or somebody keeps one without the mutex.
    kept: ManuallyDrop<Option<MutexGuard<'static, ()>>>,
}

/// Access to the contents, with the lock or without.
#[derive(Debug)]
pub(crate) struct Guard<'a, T> {
    /// No reference: a function that drops the guard would hold it while another thread already has the lock.
    contents: NonNull<Contents<T>>,
    lock: Option<MutexGuard<'a, ()>>,
    of_lock: PhantomData<&'a mut Contents<T>>,
}

impl<T> ReplyLock<T> {
    pub(crate) fn new(value: T) -> ReplyLock<T> {
        let contents = UnsafeCell::new(Contents { value, kept: ManuallyDrop::new(None) });
        ReplyLock { mutex: Mutex::new(()), contents }
    }

    /// Takes the lock, if it is free.
    #[inline(always)]
    pub(crate) fn try_lock(&self) -> Option<Guard<'_, T>> {
        match self.mutex.try_lock() {
            Ok(lock) => Some(self.guard(Some(lock))),
            // A thread that panicked while it wrote into a reservation has left nothing half changed.
            Err(TryLockError::Poisoned(lock)) => Some(self.guard(Some(lock.into_inner()))),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Takes the lock. Waits for it.
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        self.guard(Some(locked(&self.mutex)))
    }

    /// Releases the lock until `condition` is notified, or `left` has passed, or spuriously, and takes it again. A
    /// guard without the lock waits for nothing: no other thread could notify it.
    pub(crate) fn wait_on<'a>(
        &'a self,
        condition: &Condvar,
        guard: Guard<'a, T>,
        left: Option<Duration>,
    ) -> Guard<'a, T> {
        match guard.lock {
            Some(lock) => self.guard(Some(wait_on(condition, &self.mutex, lock, left))),
            None => self.lock(),
        }
    }

    #[inline(always)]
    fn guard<'a>(&'a self, lock: Option<MutexGuard<'a, ()>>) -> Guard<'a, T> {
        // SAFETY: the address of a field is not null.
        let contents = unsafe { NonNull::new_unchecked(self.contents.get()) };
        Guard { contents, lock, of_lock: PhantomData }
    }

    /// Access without the lock.
    ///
    /// # Safety
    /// No other thread can take the lock, and this one has no guard, until the result and what it keeps have ended.
    #[inline(always)]
    pub(crate) unsafe fn unlocked(&self) -> Guard<'_, T> {
        self.guard(None)
    }

    /// The contents, for a thread that has kept a guard ([`Guard::keep`]): until it takes the guard, it may dereference
    /// this pointer.
    #[inline(always)]
    pub(crate) fn kept(&self) -> *mut Contents<T> {
        self.contents.get()
    }
}

impl<'a, T> Guard<'a, T> {
    pub(crate) fn is_locked(&self) -> bool {
        self.lock.is_some()
    }

    /// Ends the borrow, and keeps the lock until [`Contents::take_kept`].
    #[inline(always)]
    pub(crate) fn keep(self) {
        let Guard { mut contents, lock, of_lock: _ } = self;
        // SAFETY: only the lifetime changes. The guard lies in the same allocation as its mutex, and is never dropped
        // there: either `take_kept` moves it out, with the lifetime of a borrow of this lock, or it is leaked with the
        // reservation.
        let lock = lock.map(|lock| unsafe { std::mem::transmute::<MutexGuard<'a, ()>, MutexGuard<'static, ()>>(lock) });
        // SAFETY: as in `deref_mut`; `kept` will have the lock.
        unsafe { contents.as_mut() }.kept = ManuallyDrop::new(lock);
    }
}

impl<T> Contents<T> {
    /// Whether a guard is kept that has the lock.
    #[inline(always)]
    pub(crate) fn is_kept(&self) -> bool {
        self.kept.is_some()
    }

    /// Takes the guard that this thread has kept. The caller drops it last, and while it borrows the lock.
    #[inline(always)]
    pub(crate) fn take_kept(&mut self) -> Option<MutexGuard<'_, ()>> {
        self.kept.take()
    }
}

impl<T> Deref for Contents<T> {
    type Target = T;
    #[inline(always)]
    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Contents<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: while this lives, its thread has the mutex, or `unlocked`'s caller excludes other threads. The
        // reference borrows this guard.
        unsafe { self.contents.as_ref() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`, and this guard is borrowed uniquely.
        unsafe { self.contents.as_mut() }
    }
}
