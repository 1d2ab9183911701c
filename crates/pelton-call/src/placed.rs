//! A value in memory that its owner borrows, behind one pointer: a box without an allocation.
//!
//! A request is given to the user by value. Were it a struct of many words, each move would copy what was written just
//! before, in other pieces, and the processor would stall until its store buffer drains (`docs/decisions/0023`). The
//! benchmark `./run bench call` shows the difference.

use std::marker::PhantomData;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Memory for one value at a time, of the size and alignment of a `T`. It never drops what is in it.
pub(crate) struct Storage<T>(MaybeUninit<T>);

/// Owns the value that it points at, in a [`Storage`] that is borrowed for `'a`.
pub(crate) struct Placed<'a, T> {
    value: NonNull<T>,
    owns: PhantomData<(T, &'a mut ())>,
}

// SAFETY: it owns its value alone, as a `Box` does, so it can be sent where the value can.
unsafe impl<T: Send> Send for Placed<'_, T> {}

impl<T> Storage<T> {
    pub(crate) fn new() -> Storage<T> {
        Storage(MaybeUninit::uninit())
    }

    /// Moves a value in: a `T`, perhaps with another lifetime.
    #[inline(always)]
    pub(crate) fn put<U>(&mut self, value: U) -> Placed<'_, U> {
        const { assert!(size_of::<U>() == size_of::<T>() && align_of::<U>() == align_of::<T>()) };
        let target = NonNull::from(&mut self.0).cast::<U>();
        // SAFETY: the memory is valid for a `U`, by the assertion, and this borrow has it alone. It holds no value that
        // is to be dropped: a `Placed` before this has ended, since it had the borrow, or was leaked.
        unsafe { target.write(value) };
        Placed { value: target, owns: PhantomData }
    }
}

impl<T> Placed<'_, T> {
    /// Moves the value out.
    #[inline(always)]
    pub(crate) fn into_inner(self) -> T {
        let this = ManuallyDrop::new(self);
        // SAFETY: `Storage::put` wrote it, and this owns it. It is moved out once, since this is not dropped.
        unsafe { this.value.read() }
    }
}

impl<T> Deref for Placed<'_, T> {
    type Target = T;
    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: `Storage::put` wrote it, and this owns it until it is dropped.
        unsafe { self.value.as_ref() }
    }
}

impl<T> DerefMut for Placed<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`, and this is borrowed uniquely.
        unsafe { self.value.as_mut() }
    }
}

impl<T> Drop for Placed<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: `Storage::put` wrote it, and this owns it. Nothing reads it after this.
        unsafe { self.value.drop_in_place() };
    }
}
