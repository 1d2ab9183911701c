//! The asking side of calls.

use crate::code::{self, Answer, came};
use crate::handle::{Handle, Object, call, catch, close, enter, number};
use crate::making::{give, text};
use crate::options::{self, COptions, Info, Until};
use crate::sending::{bytes, fits};
use pelton::{CallId, Client, Completion, Counters, Loss, Outcome, RawCompletion, RawRequestRoom, RequestRoom};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::fd::AsRawFd;

/// A client behind a handle.
pub struct Calling {
    client: Client,
    /// Taken and not released: meanwhile no other answer is looked for.
    current: Option<RawCompletion>,
    /// Reserved, with its size: meanwhile nothing else is asked.
    room: Option<(RawRequestRoom, usize)>,
}

impl Calling {
    /// The client, for what would move what is reserved or was taken: of several services, one that has gone takes its lanes with it.
    fn free(&mut self) -> Answer<&mut Client> {
        match (&self.room, &self.current) {
            (Some(_), _) => Err(code::plain(code::RESERVED)),
            (None, Some(_)) => Err(code::plain(code::NOT_RELEASED)),
            (None, None) => Ok(&mut self.client),
        }
    }
}

impl Object for Calling {
    const FREE: u32 = 0x636c_6900;
    const KIND: &'static str = "client";

    fn is_forked(&self) -> bool {
        self.client.is_forked()
    }

    fn is_free(&self) -> bool {
        true
    }
}

type Handled = *mut Handle<Calling>;

/// `pelton_completion`.
#[repr(C)]
pub struct CCompletion {
    call: u64,
    data: *const c_void,
    size: usize,
    outcome: u32,
    code: u32,
}

const _: () = assert!(size_of::<CCompletion>() == 32);

/// PELTON_REPLY.
pub const REPLY: u32 = 1;
/// PELTON_PART.
pub const PART: u32 = 2;

impl CCompletion {
    fn of(completion: &Completion<'_>) -> CCompletion {
        let (data, size) = completion.raw_parts();
        let (outcome, code) = match completion.outcome() {
            Outcome::Reply => (REPLY, 0),
            Outcome::Part => (PART, 0),
            Outcome::End => (3, 0),
            Outcome::Failed(code) => (4, code),
            Outcome::Abandoned => (5, 0),
            Outcome::Lost(loss) => (6, why(loss) as u32),
        };
        CCompletion { call: completion.call().to_bits(), data: data.as_ptr().cast(), size, outcome, code }
    }
}

/// The code of a call that was lost.
fn why(loss: Loss) -> c_int {
    match loss {
        Loss::PeerDied => code::PEER_DIED,
        Loss::Closed => code::CLOSED,
        Loss::Corrupt => code::CORRUPT,
        Loss::Returned => code::AGAIN,
    }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_client_open(
    name: *const c_char,
    options: *const COptions,
    out: *mut *mut Handle<Calling>,
) -> c_int {
    let open = || {
        if name.is_null() {
            return Err(code::null("name"));
        }
        // SAFETY: the caller's promises.
        let (name, (options, _)) = unsafe { (CStr::from_ptr(name), options::of(options)?) };
        let client = options.connect_client(text(name)?).map_err(|error| code::of(&error))?;
        Ok(Calling { client, current: None, room: None })
    };
    // SAFETY: the caller's promises.
    number(catch(|| unsafe { give(out, open) }))
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_call(
    client: Handled,
    data: *const c_void,
    size: usize,
    deadline_ns: i64,
    out: *mut CCompletion,
) -> c_int {
    let ask = |calling: &mut Calling| {
        calling.free()?;
        if out.is_null() {
            return Err(code::null("out"));
        }
        // SAFETY: the caller's promise.
        let request = unsafe { bytes(data, size)? };
        let Calling { client, current, .. } = calling;
        let answer = match Until::of(deadline_ns).instant() {
            Some(instant) => client.call_until(request, instant),
            None => client.call(request).map(Some),
        };
        let completion = answer.map_err(|error| code::of(&error))?.ok_or(code::AGAIN)?;
        // SAFETY: the caller's promise.
        unsafe { out.write(CCompletion::of(&completion)) };
        *current = Some(completion.into_raw());
        Ok(())
    };
    // SAFETY: the caller's promises.
    unsafe { call(client, ask) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_submit(
    client: Handled,
    data: *const c_void,
    size: usize,
    deadline_ns: i64,
    out_call: *mut u64,
) -> c_int {
    let submit = |calling: &mut Calling| {
        let client = calling.free()?;
        if out_call.is_null() {
            return Err(code::null("out_call"));
        }
        // SAFETY: the caller's promise.
        let request = unsafe { bytes(data, size)? };
        let submitted = match Until::of(deadline_ns) {
            Until::Now => client.try_submit(request),
            Until::Deadline(instant) => client.submit_until(request, instant),
            Until::Forever => client.submit(request).map(Some),
        };
        let call = submitted.map_err(|error| code::of(&error))?.ok_or(code::AGAIN)?;
        // SAFETY: the caller's promise.
        unsafe { out_call.write(call.to_bits()) };
        Ok(())
    };
    // SAFETY: the caller's promises.
    unsafe { call(client, submit) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_submit_reserve(
    client: Handled,
    size: usize,
    deadline_ns: i64,
    out: *mut *mut c_void,
) -> c_int {
    let reserve = |calling: &mut Calling| {
        if out.is_null() {
            return Err(code::null("out"));
        }
        // To give it back is to forget it.
        calling.room = None;
        fits(size)?;
        calling.free()?;
        let Calling { client, room, .. } = calling;
        let reserved = match Until::of(deadline_ns) {
            Until::Now => client.try_reserve(size),
            Until::Deadline(instant) => client.reserve_until(size, instant),
            Until::Forever => client.reserve(size).map(Some),
        };
        let mut reserved = reserved.map_err(|error| code::of(&error))?.ok_or(code::AGAIN)?;
        let at = reserved.raw_parts().0;
        *room = Some((reserved.into_raw(), size));
        // SAFETY: the caller's promise.
        unsafe { out.write(at.as_ptr().cast()) };
        Ok(())
    };
    // SAFETY: the caller's promises.
    unsafe { call(client, reserve) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_submit_commit(client: Handled, size: usize, out_call: *mut u64) -> c_int {
    let commit = |calling: &mut Calling| {
        if out_call.is_null() {
            return Err(code::null("out_call"));
        }
        let Calling { client, room, .. } = calling;
        let (_, reserved) = room.as_ref().ok_or_else(|| code::plain(code::NOT_RESERVED))?;
        check_committed(size, *reserved)?;
        let (raw, _) = room.take().expect("it was just there");
        // SAFETY: kept since it was reserved, and nothing else was asked since.
        let submitted = RequestRoom::submit_bytes(unsafe { client.request_room_from_raw(raw) }, size);
        // SAFETY: the caller's promise.
        unsafe { out_call.write(submitted.map_err(|error| code::of(&error))?.to_bits()) };
        Ok(())
    };
    // SAFETY: the caller's promises.
    unsafe { call(client, commit) }
}

/// Whether no more is committed than was reserved.
pub fn check_committed(size: usize, reserved: usize) -> Answer {
    if size <= reserved {
        return Ok(());
    }
    let detail = format!("{size} bytes committed of {reserved} reserved: commit at most those");
    Err(code::tell(code::TOO_LARGE, detail))
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_submit_abort(client: Handled) -> c_int {
    let abort = |calling: &mut Calling| match calling.room.take() {
        Some(_) => Ok(()),
        None => Err(code::plain(code::NOT_RESERVED)),
    };
    // SAFETY: the caller's promises.
    unsafe { call(client, abort) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_notify(client: Handled, data: *const c_void, size: usize, deadline_ns: i64) -> c_int {
    let notify = |calling: &mut Calling| {
        let client = calling.free()?;
        // SAFETY: the caller's promise.
        let message = unsafe { bytes(data, size)? };
        came(match Until::of(deadline_ns) {
            Until::Now => client.try_notify(message),
            Until::Deadline(instant) => client.notify_until(message, instant),
            Until::Forever => client.notify(message).map(|()| true),
        })
    };
    // SAFETY: the caller's promises.
    unsafe { call(client, notify) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_cancel(client: Handled, which: u64) -> c_int {
    // SAFETY: the caller's promises.
    unsafe { call(client, |calling| came(calling.free()?.cancel(CallId::from_bits(which)))) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_mark_idempotent(client: Handled, which: u64) -> c_int {
    // SAFETY: the caller's promises.
    unsafe { call(client, |calling| came(calling.free()?.mark_idempotent(CallId::from_bits(which)))) }
}

/// The next answer, to any call if `which` is 0, waiting as long as is said.
fn next(client: &mut Client, which: u64, deadline_ns: i64) -> Answer<Completion<'_>> {
    let call = CallId::from_bits(which);
    let found = match (which, Until::of(deadline_ns)) {
        (0, Until::Now) => client.try_completion(),
        (0, Until::Deadline(instant)) => client.completion_until(instant),
        (0, Until::Forever) => client.completion().map(Some),
        (_, Until::Now) => client.try_completion_of(call),
        (_, Until::Deadline(instant)) => client.completion_of_until(call, instant),
        (_, Until::Forever) => client.completion_of(call).map(Some),
    };
    found.map_err(|error| code::of(&error))?.ok_or(code::AGAIN)
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_await(client: Handled, which: u64, deadline_ns: i64, out: *mut CCompletion) -> c_int {
    let take = |calling: &mut Calling| {
        calling.free()?;
        if out.is_null() {
            return Err(code::null("out"));
        }
        let Calling { client, current, .. } = calling;
        let completion = next(client, which, deadline_ns)?;
        // SAFETY: the caller's promise.
        unsafe { out.write(CCompletion::of(&completion)) };
        *current = Some(completion.into_raw());
        Ok(())
    };
    // SAFETY: the caller's promises.
    unsafe { call(client, take) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_await_copy(
    client: Handled,
    which: u64,
    buffer: *mut c_void,
    capacity: usize,
    deadline_ns: i64,
    out: *mut CCompletion,
) -> c_int {
    let take = |calling: &mut Calling| {
        let client = calling.free()?;
        if out.is_null() || (buffer.is_null() && capacity > 0) {
            return Err(code::null("buffer or out"));
        }
        let completion = next(client, which, deadline_ns)?;
        let (data, size) = completion.raw_parts();
        // SAFETY: the caller's promise.
        unsafe { out.write(CCompletion { data: buffer, ..CCompletion::of(&completion) }) };
        if size > capacity {
            let raw = completion.into_raw();
            // SAFETY: taken last.
            unsafe { client.put_back(raw) };
            let detail = format!("an answer of {size} bytes waits, the buffer has {capacity}");
            return Err(code::tell(code::TOO_SMALL, detail));
        }
        if size > 0 {
            // SAFETY: so many bytes are there, and nothing looks at them after the copy; the caller promises the buffer, which is
            // not NULL with a capacity.
            unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), buffer.cast(), size) };
        }
        Ok(())
    };
    // SAFETY: the caller's promises.
    unsafe { call(client, take) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_client_release(client: Handled) -> c_int {
    let release = |calling: &mut Calling| {
        let raw = calling.current.take().ok_or_else(|| code::plain(code::NOT_RECEIVED))?;
        // SAFETY: taken last.
        drop(unsafe { calling.client.completion_from_raw(raw) });
        Ok(())
    };
    // SAFETY: the caller's promises.
    unsafe { call(client, release) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_client_fd(client: *const Handle<Calling>) -> c_int {
    // SAFETY: the caller's promises.
    unsafe { enter(client.cast_mut(), |calling| Ok(calling.client.as_raw_fd())) }.unwrap_or_else(|code| code)
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_client_arm(client: Handled) -> c_int {
    // SAFETY: the caller's promises.
    unsafe { call(client, |calling| came(calling.free()?.arm().map(|armed| !armed))) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_client_disarm(client: Handled) -> c_int {
    let disarm = |calling: &mut Calling| {
        calling.client.disarm();
        Ok(())
    };
    // SAFETY: the caller's promises.
    unsafe { call(client, disarm) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_client_info(client: Handled, out: *mut Info) -> c_int {
    let info = |calling: &mut Calling| {
        if out.is_null() {
            return Err(code::null("out"));
        }
        let client = &calling.client;
        let mut info = Info::new(client.peer(), Counters::default());
        info.message_bytes_max = client.request_bytes_max();
        info.calls = client.in_flight() as u64;
        info.dropped = client.late();
        info.services = client.services() as u64;
        // SAFETY: the caller's promise.
        unsafe { info.write(out) }
    };
    // SAFETY: the caller's promises.
    unsafe { call(client, info) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_client_close(client: Handled) -> c_int {
    // SAFETY: the caller's promises.
    unsafe { close(client) }
}
