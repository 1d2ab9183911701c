//! Functions of any handle: what each means for each kind.
//!
//! A kind joins by a line in `kinds!`, and one in each function that it has.

use crate::calling::Calling;
use crate::code::{self, Answer};
use crate::files::{Filing, Opened};
use crate::flushing::{Appending, Flushing, Making};
use crate::handle::{self, Handle, Object, enter, number, share};
use crate::making::Listening;
use crate::options::{Info, deadline};
use crate::receiving::{self, Holding, Receiving};
use crate::records::Reading;
use crate::sending::{self, Gathering, Sending, Sends};
use crate::serving::{Answering, Serving};
use std::ffi::{c_int, c_void};

macro_rules! kinds {
    ($($kind:ty),+ $(,)?) => {
        /// See `pelton.h`.
        ///
        /// # Safety
        /// As there.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn pelton_close(handle: *mut c_void) -> c_int {
            if handle.is_null() {
                return 0;
            }
            // SAFETY: the caller's promises; it is of this kind.
            unsafe {
                match handle::kind(handle).0 {
                    $(<$kind as Object>::FREE => handle::close::<$kind>(handle.cast()),)+
                    _ => handle::stray(handle, &[]),
                }
            }
        }
    };
}

kinds!(
    Sending, Receiving, Listening, Gathering, Holding, Flushing, Making, Appending, Reading, Calling, Serving,
    Answering, Filing, Opened,
);

/// What the function of the handle's kind answers: `how` is [`enter`] or [`share`].
macro_rules! by_kind {
    ($handle:expr; $($how:ident $kind:ty => $act:expr),+ $(,)?) => {
        // SAFETY: the caller's promises; it is of this kind.
        unsafe {
            match handle::kind($handle).0 {
                $(<$kind as Object>::FREE => $how::<$kind, _>($handle.cast::<Handle<$kind>>(), $act),)+
                _ => Err(handle::stray($handle, &[$(<$kind as Object>::KIND),+])),
            }
        }
    };
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_fd(handle: *const c_void) -> c_int {
    let handle = handle.cast_mut();
    let fd = by_kind!(handle;
        enter Sending => |sending| Ok(sending.fd()),
        enter Receiving => |receiving| Ok(receiving.fd()),
        enter Listening => |listening| Ok(listening.fd()),
        enter Calling => |calling| Ok(calling.fd()),
        enter Serving => |serving| Ok(serving.fd()),
        enter Filing => |filing| Ok(filing.fd()),
        share Opened => |file| Ok(file.fd()),
    );
    fd.unwrap_or_else(|code| code)
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_arm(handle: *mut c_void) -> c_int {
    number(by_kind!(handle;
        enter Sending => Sending::arm,
        enter Receiving => Receiving::arm,
        enter Calling => Calling::arm,
        enter Serving => Serving::arm,
        enter Filing => Filing::arm,
    ))
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_disarm(handle: *mut c_void) -> c_int {
    number(by_kind!(handle;
        enter Sending => Sending::disarm,
        enter Receiving => Receiving::disarm,
        enter Calling => Calling::disarm,
        enter Serving => Serving::disarm,
        enter Filing => Filing::disarm,
    ))
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_get_info(handle: *mut c_void, out: *mut Info) -> c_int {
    if out.is_null() {
        return code::null("out");
    }
    let info = by_kind!(handle;
        enter Sending => |sending| Ok(sending.info()),
        enter Receiving => |receiving| Ok(receiving.info()),
        enter Calling => |calling| Ok(calling.info()),
        enter Serving => |serving| Ok(serving.info()),
        enter Filing => |filing| Ok(filing.info()),
    );
    // SAFETY: the caller's promise.
    number(info.and_then(|info| unsafe { info.write(out) }))
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_resume(handle: *mut c_void, deadline_ns: i64) -> c_int {
    let until = deadline(deadline_ns);
    number(by_kind!(handle;
        enter Sending => |sending| sending.resume(until),
        enter Receiving => |receiving| receiving.resume(until),
    ))
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_sync(handle: *mut c_void) -> c_int {
    number(by_kind!(handle;
        enter Sending => Sending::sync,
        enter Receiving => Receiving::sync,
        enter Flushing => Flushing::sync,
        share Making => Making::sync,
    ))
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_flush_now(handle: *mut c_void) -> c_int {
    number(by_kind!(handle;
        enter Flushing => Flushing::now,
        share Making => Making::now,
    ))
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_drain(handle: *mut c_void, deadline_ns: i64) -> c_int {
    let until = deadline(deadline_ns);
    number(by_kind!(handle;
        enter Sending => |sending| sending.drain(until),
        enter Filing => |filing| filing.drain(until),
    ))
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_release(handle: *mut c_void) -> c_int {
    // SAFETY: the caller's promises.
    unsafe { receiving::release(handle.cast(), || release_slowly(handle)) }
}

#[cold]
#[inline(never)]
unsafe fn release_slowly(handle: *mut c_void) -> c_int {
    number(by_kind!(handle;
        enter Receiving => Receiving::release,
        enter Calling => Calling::release,
        enter Serving => Serving::release,
    ))
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_reserve(
    handle: *mut c_void,
    size: usize,
    deadline_ns: i64,
    out: *mut *mut c_void,
) -> c_int {
    // SAFETY: the caller's promises.
    unsafe {
        sending::reserve::<Sending>(handle.cast(), size, out, || reserve_of_others(handle, size, deadline_ns, out))
    }
}

/// Apart, as what is inlined would cost the sender's way registers.
#[inline(never)]
unsafe fn reserve_of_others(handle: *mut c_void, size: usize, deadline_ns: i64, out: *mut *mut c_void) -> c_int {
    // SAFETY: the caller's promises.
    unsafe {
        sending::reserve::<Appending>(handle.cast(), size, out, || reserve_slowly(handle, size, deadline_ns, out))
    }
}

#[cold]
#[inline(never)]
unsafe fn reserve_slowly(handle: *mut c_void, size: usize, deadline_ns: i64, out: *mut *mut c_void) -> c_int {
    if out.is_null() {
        return code::null("out");
    }
    let reserved = by_kind!(handle;
        enter Sending => |sending| sending.reserve(size, deadline_ns),
        enter Appending => |appending| appending.reserve(size, deadline_ns),
        enter Calling => |calling| calling.reserve(size, deadline_ns),
        enter Answering => |answering| answering.reserve(size),
    );
    // SAFETY: the caller's promise.
    number(reserved.map(|at| unsafe { out.write(at) }))
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_commit(handle: *mut c_void, size: usize) -> c_int {
    // SAFETY: the caller's promises.
    unsafe { sending::commit::<Sending>(handle.cast(), size, || commit_of_others(handle, size)) }
}

#[inline(never)]
unsafe fn commit_of_others(handle: *mut c_void, size: usize) -> c_int {
    // SAFETY: the caller's promises.
    unsafe { sending::commit::<Appending>(handle.cast(), size, || commit_slowly(handle, size)) }
}

#[cold]
#[inline(never)]
unsafe fn commit_slowly(handle: *mut c_void, size: usize) -> c_int {
    let used_otherwise = |by: &str| -> Answer {
        let detail = format!("what this reserves is not committed: give its pointer to {by}");
        Err(code::tell(code::CLOSED_HANDLE, detail))
    };
    number(by_kind!(handle;
        enter Sending => |sending| sending.commit(size),
        enter Appending => |appending| appending.commit(size),
        enter Calling => |_| used_otherwise("pelton_submit"),
        enter Answering => |_| used_otherwise("pelton_reply or pelton_reply_part"),
    ))
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_abort(handle: *mut c_void) -> c_int {
    number(by_kind!(handle;
        enter Sending => Sending::abort,
        enter Appending => Appending::abort,
        enter Calling => Calling::abort,
        enter Answering => Answering::abort,
    ))
}
