//! What a sender and an appender have in common: messages written into a lane, by copy or in reserved space.

use crate::c::check_size;
use crate::code::{self, Answer};
use crate::handle::{Handle, Object, State};
use pelton::Error;
use pelton::raw::{COPY_INLINE_MAX, ReservedSpace};
use std::ffi::{c_int, c_void};

/// The reserved space, and its size. While there is one, the sender is used for nothing else.
pub type Reserved = Option<(ReservedSpace, usize)>;

pub trait Writer: Object {
    fn parts(&mut self) -> (&mut pelton::Sender, &mut Reserved);

    /// The sender, for calls that would move what is reserved.
    fn unreserved(&mut self) -> Answer<&mut pelton::Sender> {
        match self.parts() {
            (sender, None) => Ok(sender),
            _ => Err(code::plain(code::RESERVED)),
        }
    }

    /// Reserves what `find` finds. An earlier reservation is dropped, which aborts it.
    fn reserve(
        &mut self,
        size: usize,
        find: impl FnOnce(&mut Self) -> pelton::Result<Option<ReservedSpace>>,
    ) -> Answer<*mut c_void> {
        *self.parts().1 = None;
        check_size(size)?;
        let space = code::found(find(self))?;
        let (sender, reserved) = self.parts();
        *reserved = Some((space, size));
        Ok(sender.payload(space).as_ptr().cast())
    }

    fn commit(&mut self, size: usize) -> Answer {
        let (sender, reserved) = self.parts();
        let (space, reserved_size) = reserved.take().ok_or_else(|| code::plain(code::NOT_RESERVED))?;
        if let Err(code) = check_used(size, reserved_size) {
            *reserved = Some((space, reserved_size));
            return Err(code);
        }
        // SAFETY: it was reserved last of this sender, which was not used since; it is no longer in `reserved`.
        match unsafe { sender.commit_space(space, size) } {
            true => Ok(()),
            false => Err(code::of(&Error::Forked)),
        }
    }

    fn abort(&mut self) -> Answer {
        self.parts().1.take().map(drop).ok_or_else(|| code::plain(code::NOT_RESERVED))
    }
}

/// Whether no more is used than was reserved.
pub fn check_used(size: usize, reserved: usize) -> Answer {
    if size <= reserved {
        return Ok(());
    }
    Err(code::tell(code::TOO_LARGE, format!("{size} bytes used of {reserved} reserved: use at most those")))
}

/// As [`send_fast`], of a message that is copied without a call.
///
/// # Safety
/// As for [`send_fast`].
#[inline(always)]
pub unsafe fn send_short<T: Writer>(handle: *mut Handle<T>, data: *const c_void, size: usize) -> Option<c_int> {
    // SAFETY: the caller guarantees it.
    if size <= COPY_INLINE_MAX { unsafe { send_fast(handle, data, size) } } else { None }
}

/// Sends, if there is space and the handle is free.
///
/// # Safety
/// As for [`Handle::object_in`]; `size` bytes can be read at `data`, unless it is NULL.
#[inline(always)]
pub unsafe fn send_fast<T: Writer>(handle: *mut Handle<T>, data: *const c_void, size: usize) -> Option<c_int> {
    // SAFETY: the caller guarantees the handle.
    let writer = unsafe { Handle::object_in(handle, State::Free) }?;
    if data.is_null() || size > u32::MAX as usize {
        return None;
    }
    // SAFETY: the caller guarantees the bytes; so few are no longer than a slice may be.
    let payload = unsafe { std::slice::from_raw_parts(data.cast(), size) };
    let must_check = writer.parts().0.send_before_check(payload)?;
    // SAFETY: the object was found.
    Some(if must_check { unsafe { finish_send(handle) } } else { 0 })
}

/// What remains to be done after a message, in the rare case.
///
/// # Safety
/// [`Handle::object_in`] has found the object.
#[cold]
#[inline(never)]
unsafe fn finish_send<T: Writer>(handle: *mut Handle<T>) -> c_int {
    // SAFETY: the caller guarantees it: so the gate has the state that a message leaves.
    unsafe {
        let Some(writer) = Handle::object_in(handle, State::Free) else { return code::INTERNAL };
        Handle::run_fast(handle, || writer.parts().0.check_receiver()).err().unwrap_or(0)
    }
}

/// Reserves, if there is space and the handle is free.
///
/// # Safety
/// As for [`Handle::object_in`]; `out` is NULL or writable.
#[inline(always)]
pub unsafe fn reserve_fast<T: Writer>(handle: *mut Handle<T>, size: usize, out: *mut *mut c_void) -> Option<c_int> {
    // SAFETY: the caller guarantees the handle.
    let writer = unsafe { Handle::object_in(handle, State::Free) }?;
    if out.is_null() {
        return None;
    }
    let (sender, reserved) = writer.parts();
    let space = sender.reserve_fast(size)?;
    // SAFETY: the caller guarantees `out`; the object was found.
    unsafe {
        out.write(sender.payload(space).as_ptr().cast());
        *reserved = Some((space, size));
        Handle::set_state(handle, State::One);
    }
    Some(0)
}

/// Commits what is reserved, if it is not less.
///
/// # Safety
/// As for [`Handle::object_in`].
#[inline(always)]
pub unsafe fn commit_fast<T: Writer>(handle: *mut Handle<T>, size: usize) -> Option<c_int> {
    // SAFETY: the caller guarantees the handle.
    let writer = unsafe { Handle::object_in(handle, State::One) }?;
    let (sender, reserved) = writer.parts();
    let (space, _) = (*reserved)?;
    // SAFETY: it was reserved last of this sender, which was not used since; the object was found.
    unsafe {
        let must_check = sender.commit_before_check(space, size)?;
        *reserved = None;
        Handle::set_state(handle, State::Free);
        Some(if must_check { finish_send(handle) } else { 0 })
    }
}

/// As [`commit_fast`], also of a message with marks before it.
///
/// # Safety
/// As for [`commit_fast`].
pub unsafe fn commit_marked<T: Writer>(handle: *mut Handle<T>, size: usize) -> Option<c_int> {
    // SAFETY: the caller guarantees the handle.
    let writer = unsafe { Handle::object_in(handle, State::One) }?;
    let (sender, reserved) = writer.parts();
    let (space, _) = (*reserved)?;
    // SAFETY: it was reserved last of this sender, which was not used since; the object was found.
    match unsafe { Handle::run_fast(handle, || sender.commit_space(space, size)) } {
        Ok(true) => {
            *reserved = None;
            // SAFETY: the object was found.
            unsafe { Handle::set_state(handle, State::Free) };
            Some(0)
        }
        Ok(false) => None,
        Err(code) => {
            *reserved = None;
            Some(code)
        }
    }
}
