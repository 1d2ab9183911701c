//! The sending end.

use crate::code::{self, Answer, came};
use crate::handle::{Handle, ONE, Object, call, close, enter, share};
use crate::options::{Info, Until};
use pelton::{RawReservation, Reservation, Sender, Senders, Sent};
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd};

/// A sender behind a handle.
pub struct Sending {
    sender: Sender,
    open: Open,
}

/// What is reserved. While it is not nothing the sender is used for nothing else.
pub enum Open {
    Nothing,
    Message(RawReservation, usize),
    Batch,
}

impl Open {
    /// Whether the sender may be used for something else.
    pub fn check_nothing(&self) -> Answer {
        match self {
            Open::Nothing => Ok(()),
            _ => Err(code::plain(code::RESERVED)),
        }
    }
}

/// What has a sender, and may have reserved room in its lane.
pub trait Sends: Object {
    fn parts(&mut self) -> (&mut Sender, &mut Open);
}

impl Sending {
    pub fn new(sender: Sender) -> Sending {
        Sending { sender, open: Open::Nothing }
    }

    /// The sender, for calls that would move what is reserved.
    fn free(&mut self) -> Answer<&mut Sender> {
        self.open.check_nothing().map(|()| &mut self.sender)
    }
}

impl Sends for Sending {
    #[inline(always)]
    fn parts(&mut self) -> (&mut Sender, &mut Open) {
        (&mut self.sender, &mut self.open)
    }
}

impl Object for Sending {
    const FREE: u32 = 0x7365_6e00;
    const KIND: &'static str = "sender";

    fn is_forked(&self) -> bool {
        self.sender.is_forked()
    }

    fn is_free(&self) -> bool {
        matches!(self.open, Open::Nothing)
    }

    fn has_one(&self) -> bool {
        matches!(self.open, Open::Message(..))
    }
}

type Handled = *mut Handle<Sending>;

/// The caller's bytes.
///
/// # Safety
/// `size` bytes can be read at `data`, unless it is NULL.
pub unsafe fn bytes<'a>(data: *const c_void, size: usize) -> Answer<&'a [u8]> {
    match (data.is_null(), size) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(code::null("data")),
        (false, _) => {
            fits(size)?;
            // SAFETY: the caller's promise; no longer than a slice may be.
            Ok(unsafe { std::slice::from_raw_parts(data.cast(), size) })
        }
    }
}

/// Whether a size may be asked for at all.
pub fn fits(size: usize) -> Answer {
    if size <= isize::MAX as usize {
        return Ok(());
    }
    Err(code::tell(code::TOO_LARGE, format!("a size of {size} bytes: less than 2 GiB is possible")))
}

/// Whether it was sent.
pub fn answer(sent: pelton::Result<Sent>) -> Answer {
    match sent {
        Ok(Sent::Sent) => Ok(()),
        Ok(Sent::Full | Sent::TimedOut) => Err(code::AGAIN),
        Err(error) => Err(code::of(&error)),
    }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_send(sender: Handled, data: *const c_void, size: usize, deadline_ns: i64) -> c_int {
    // SAFETY: the caller's promises.
    unsafe {
        match send_at_once(sender, data, size) {
            Some(answer) => answer,
            None => send_slowly(sender, data, size, deadline_ns),
        }
    }
}

/// Sends in the common case.
///
/// # Safety
/// As for [`Handle::object_at`] and [`bytes`].
#[inline(always)]
pub unsafe fn send_at_once<T: Sends>(handle: *mut Handle<T>, data: *const c_void, size: usize) -> Option<c_int> {
    // SAFETY: the caller's promises.
    let sends = unsafe { Handle::object_at(handle, T::FREE) }?;
    if data.is_null() || size > u32::MAX as usize {
        return None;
    }
    // SAFETY: the caller's promise; no longer than a slice may be.
    let payload = unsafe { std::slice::from_raw_parts(data.cast(), size) };
    // SAFETY: the gate was open.
    match unsafe { Handle::briefly(handle, || sends.parts().0.send_at_once(payload)) } {
        Ok(true) => Some(0),
        Ok(false) => None,
        Err(code) => Some(code),
    }
}

/// Sends, waiting as long as is said.
fn send(sender: &mut Sender, payload: &[u8], deadline_ns: i64) -> pelton::Result<Sent> {
    match Until::of(deadline_ns) {
        Until::Now => sender.try_send(payload),
        Until::Deadline(instant) => sender.send_until(payload, instant),
        Until::Forever => sender.send(payload).map(|()| Sent::Sent),
    }
}

#[cold]
#[inline(never)]
unsafe fn send_slowly(sender: Handled, data: *const c_void, size: usize, deadline_ns: i64) -> c_int {
    let send = |sending: &mut Sending| {
        let sender = sending.free()?;
        // SAFETY: the caller's promise.
        let payload = unsafe { bytes(data, size)? };
        answer(send(sender, payload, deadline_ns))
    };
    // SAFETY: the caller's promises.
    unsafe { call(sender, send) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_reserve(
    sender: Handled,
    size: usize,
    deadline_ns: i64,
    out: *mut *mut c_void,
) -> c_int {
    // SAFETY: the caller's promises.
    if unsafe { reserve_at_once(sender, size, out) } {
        return 0;
    }
    let wait = |sending: &mut Sending| {
        let sender = &mut sending.sender;
        let reserved = match Until::of(deadline_ns) {
            Until::Now => sender.try_reserve(size),
            Until::Deadline(instant) => sender.reserve_until(size, instant),
            Until::Forever => sender.reserve(size).map(Some),
        };
        reserved.map_err(|error| code::of(&error))?.map(Reservation::into_raw).ok_or(code::AGAIN)
    };
    // SAFETY: the caller's promises.
    unsafe { reserve_slowly(sender, size, out, wait) }
}

/// Reserves in the common case; false in another.
///
/// # Safety
/// As for [`Handle::object_at`]; `out` is NULL, or may be written.
#[inline(always)]
pub unsafe fn reserve_at_once<T: Sends>(handle: *mut Handle<T>, size: usize, out: *mut *mut c_void) -> bool {
    // SAFETY: the caller's promises.
    if let Some(sends) = unsafe { Handle::object_at(handle, T::FREE) }
        && !out.is_null()
        && let (sender, open) = sends.parts()
        && let Some(mut room) = sender.reserve_at_once(size)
    {
        // SAFETY: the caller's promise; the gate was open.
        unsafe {
            out.write(room.as_mut_ptr().cast());
            *open = Open::Message(room.into_raw(), size);
            Handle::set_gate(handle, T::FREE + ONE);
        }
        return true;
    }
    false
}

/// Reserves by `reserve`, which may wait.
///
/// # Safety
/// As for [`reserve_at_once`].
#[cold]
#[inline(never)]
pub unsafe fn reserve_slowly<T: Sends>(
    handle: *mut Handle<T>,
    size: usize,
    out: *mut *mut c_void,
    reserve: impl FnOnce(&mut T) -> Answer<RawReservation>,
) -> c_int {
    let reserve = |sends: &mut T| {
        if out.is_null() {
            return Err(code::null("out"));
        }
        *sends.parts().1 = Open::Nothing;
        fits(size)?;
        let raw = reserve(sends)?;
        let (sender, open) = sends.parts();
        // SAFETY: just reserved.
        let mut room = unsafe { sender.reservation_from_raw(raw) };
        let at = room.as_mut_ptr();
        *open = Open::Message(room.into_raw(), size);
        // SAFETY: the caller's promise.
        unsafe { out.write(at.cast()) };
        Ok(())
    };
    // SAFETY: the caller's promises.
    unsafe { call(handle, reserve) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_commit(sender: Handled, size: usize) -> c_int {
    // SAFETY: the caller's promises.
    unsafe { commit(sender, size) }
}

/// Commits what is reserved.
///
/// # Safety
/// As for [`Handle::object_at`].
#[inline(always)]
pub unsafe fn commit<T: Sends>(handle: *mut Handle<T>, size: usize) -> c_int {
    // SAFETY: the caller's promises.
    if let Some(sends) = unsafe { Handle::object_at(handle, T::FREE + ONE) }
        && let (sender, open) = sends.parts()
        && let Open::Message(raw, _) = &*open
    {
        // SAFETY: kept since it was reserved, and the sender not used meanwhile; the gate was found as it is then.
        match unsafe { Handle::briefly(handle, || sender.commit_raw(raw, size)) } {
            Ok(true) => {
                *open = Open::Nothing;
                // SAFETY: as above.
                unsafe { Handle::set_gate(handle, T::FREE) };
                return 0;
            }
            Ok(false) => {}
            Err(code) => {
                *open = Open::Nothing;
                return code;
            }
        }
    }
    // SAFETY: the caller's promises.
    unsafe { commit_slowly(handle, size) }
}

#[cold]
#[inline(never)]
unsafe fn commit_slowly<T: Sends>(handle: *mut Handle<T>, size: usize) -> c_int {
    let commit = |sends: &mut T| {
        let (sender, open) = sends.parts();
        match std::mem::replace(open, Open::Nothing) {
            Open::Message(raw, reserved) if size > reserved => {
                *open = Open::Message(raw, reserved);
                Err(code::tell(
                    code::TOO_LARGE,
                    format!("{size} bytes committed of {reserved} reserved: commit at most those"),
                ))
            }
            Open::Message(raw, _) => {
                // SAFETY: kept since it was reserved, and the sender not used meanwhile.
                let reservation = unsafe { sender.reservation_from_raw(raw) };
                reservation.commit_bytes(size).map_err(|error| code::of(&error))
            }
            other => {
                *open = other;
                Err(code::plain(code::NOT_RESERVED))
            }
        }
    };
    // SAFETY: the caller's promises.
    unsafe { call(handle, commit) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_abort(sender: Handled) -> c_int {
    // SAFETY: the caller's promises.
    unsafe { abort(sender) }
}

/// Gives back what is reserved.
///
/// # Safety
/// As for [`call`].
pub unsafe fn abort<T: Sends>(handle: *mut Handle<T>) -> c_int {
    let abort = |sends: &mut T| match std::mem::replace(sends.parts().1, Open::Nothing) {
        Open::Nothing => Err(code::plain(code::NOT_RESERVED)),
        _ => Ok(()),
    };
    // SAFETY: the caller's promises.
    unsafe { call(handle, abort) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_batch_begin(
    sender: Handled,
    count: usize,
    bytes_total: usize,
    deadline_ns: i64,
) -> c_int {
    /// A record's header, and what rounding up to it may cost.
    const RECORD: usize = 8 + 7;
    let begin = |sending: &mut Sending| {
        sending.open = Open::Nothing;
        // As one message that takes as much room as all of them at most do.
        let size = count.saturating_mul(RECORD).saturating_add(bytes_total).saturating_sub(8);
        fits(size)?;
        let until = Until::of(deadline_ns);
        let sender = &mut sending.sender;
        loop {
            if sender.try_reserve_batch([size]).map_err(|error| code::of(&error))?.is_some() {
                sending.open = Open::Batch;
                return Ok(());
            }
            match until {
                Until::Now => return Err(code::AGAIN),
                Until::Deadline(instant) => {
                    sender.reserve_until(size, instant).map_err(|error| code::of(&error))?.ok_or(code::AGAIN)?.abort()
                }
                Until::Forever => sender.reserve(size).map_err(|error| code::of(&error))?.abort(),
            }
        }
    };
    // SAFETY: the caller's promises.
    unsafe { call(sender, begin) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_batch_push(sender: Handled, data: *const c_void, size: usize) -> c_int {
    let push = |sending: &mut Sending| {
        let Open::Batch = sending.open else { return Err(code::plain(code::NOT_RESERVED)) };
        // SAFETY: the caller's promise.
        let payload = unsafe { bytes(data, size)? };
        // SAFETY: begun, and the sender not used meanwhile.
        match unsafe { sending.sender.batch_again() }.push(payload) {
            true => Ok(()),
            false => Err(code::AGAIN),
        }
    };
    // SAFETY: the caller's promises.
    unsafe { call(sender, push) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_batch_commit(sender: Handled) -> c_int {
    let commit = |sending: &mut Sending| {
        let Open::Batch = sending.open else { return Err(code::plain(code::NOT_RESERVED)) };
        sending.open = Open::Nothing;
        // SAFETY: begun, and the sender not used meanwhile.
        unsafe { sending.sender.batch_again() }.commit().map_err(|error| code::of(&error))
    };
    // SAFETY: the caller's promises.
    unsafe { call(sender, commit) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_send_descriptors(
    sender: Handled,
    data: *const c_void,
    size: usize,
    fds: *const c_int,
    count: usize,
    deadline_ns: i64,
) -> c_int {
    let send = |sending: &mut Sending| {
        let sender = sending.free()?;
        // SAFETY: the caller's promise.
        let payload = unsafe { bytes(data, size)? };
        if count > 0 && fds.is_null() {
            return Err(code::null("fds"));
        }
        // Far more than can go: pelton says how many do.
        let count = count.min(1 << 16);
        let numbers = match count {
            0 => &[][..],
            // SAFETY: the caller's promise.
            _ => unsafe { std::slice::from_raw_parts(fds, count) },
        };
        if let Some(bad) = numbers.iter().find(|fd| **fd < 0) {
            return Err(code::system(libc::EBADF, &format!("sending descriptor {bad}")));
        }
        // SAFETY: not negative; one that is not open is refused when it is duplicated.
        let fds: Vec<_> = numbers.iter().map(|fd| unsafe { BorrowedFd::borrow_raw(*fd) }).collect();
        answer(match Until::of(deadline_ns).instant() {
            Some(instant) => sender.send_with_descriptors_until(payload, &fds, instant),
            None => sender.send_with_descriptors(payload, &fds).map(|()| Sent::Sent),
        })
    };
    // SAFETY: the caller's promises.
    unsafe { call(sender, send) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_drain(sender: Handled, deadline_ns: i64) -> c_int {
    let drain = |sending: &mut Sending| {
        let sender = sending.free()?;
        came(match Until::of(deadline_ns).instant() {
            Some(instant) => sender.drain_until(instant),
            None => sender.drain().map(|()| true),
        })
    };
    // SAFETY: the caller's promises.
    unsafe { call(sender, drain) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_trim(sender: Handled) -> c_int {
    // SAFETY: the caller's promises.
    unsafe { call(sender, |sending| sending.free()?.trim().map_err(|error| code::of(&error))) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_sender_fd(sender: *const Handle<Sending>) -> c_int {
    // SAFETY: the caller's promises.
    unsafe { enter(sender.cast_mut(), |sending| Ok(sending.sender.as_raw_fd())) }.unwrap_or_else(|code| code)
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_sender_arm(sender: Handled, size: usize) -> c_int {
    let arm = |sending: &mut Sending| {
        let sender = sending.free()?;
        fits(size)?;
        came(sender.arm(size).map(|armed| !armed))
    };
    // SAFETY: the caller's promises.
    unsafe { call(sender, arm) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_sender_arm_for_end(sender: Handled) -> c_int {
    // SAFETY: the caller's promises.
    unsafe { call(sender, |sending| sending.free()?.arm_for_end().map_err(|error| code::of(&error))) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_sender_disarm(sender: Handled) -> c_int {
    let disarm = |sending: &mut Sending| {
        sending.sender.disarm();
        Ok(())
    };
    // SAFETY: the caller's promises.
    unsafe { call(sender, disarm) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_sender_resume(sender: Handled, deadline_ns: i64) -> c_int {
    let resume = |sending: &mut Sending| {
        let sender = sending.free()?;
        came(match Until::of(deadline_ns).instant() {
            Some(instant) => sender.resume_until(instant),
            None => sender.resume().map(|()| true),
        })
    };
    // SAFETY: the caller's promises.
    unsafe { call(sender, resume) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_sender_sync(sender: Handled) -> c_int {
    // SAFETY: the caller's promises.
    unsafe { call(sender, |sending| sending.free()?.sync().map_err(|error| code::of(&error))) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_sender_info(sender: Handled, out: *mut Info) -> c_int {
    let info = |sending: &mut Sending| {
        if out.is_null() {
            return Err(code::null("out"));
        }
        let sender = &mut sending.sender;
        let mut info = Info::new(sender.peer(), sender.counters());
        info.next_seq = sender.next_seq();
        info.capacity = sender.capacity();
        info.message_bytes_max = sender.message_bytes_max();
        info.unreleased = sender.unreleased();
        // SAFETY: the caller's promise.
        unsafe { info.write(out) }
    };
    // SAFETY: the caller's promises.
    unsafe { call(sender, info) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_sender_close(sender: Handled) -> c_int {
    // SAFETY: the caller's promises.
    unsafe { close(sender) }
}

/// What makes senders for threads, behind a handle.
pub struct Gathering(pub Senders);

impl Object for Gathering {
    const FREE: u32 = 0x7365_7300;
    const KIND: &'static str = "senders";

    fn is_forked(&self) -> bool {
        self.0.is_forked()
    }

    fn is_free(&self) -> bool {
        true
    }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_senders_open(senders: *mut Handle<Gathering>, out: *mut Handled) -> c_int {
    let open = |gathering: &Gathering| {
        if out.is_null() {
            return Err(code::null("out"));
        }
        let sender = gathering.0.sender().map_err(|error| code::of(&error))?;
        // SAFETY: the caller's promise.
        unsafe { out.write(Handle::boxed(Sending::new(sender))) };
        Ok(())
    };
    // SAFETY: the caller's promises.
    unsafe { share(senders, open) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_senders_send(
    senders: *mut Handle<Gathering>,
    data: *const c_void,
    size: usize,
    deadline_ns: i64,
) -> c_int {
    let send = |gathering: &Gathering| {
        // SAFETY: the caller's promise.
        let payload = unsafe { bytes(data, size)? };
        answer(gathering.0.with(|sender| send(sender, payload, deadline_ns)).flatten())
    };
    // SAFETY: the caller's promises.
    unsafe { share(senders, send) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_senders_close(senders: *mut Handle<Gathering>) -> c_int {
    // SAFETY: the caller's promises.
    unsafe { close(senders) }
}
