//! The asking side of calls.

use crate::code::{self, Answer, came};
use crate::handle::give;
use crate::handle::{Handle, Object, call, catch, number};
use crate::options::text;
use crate::options::{self, COptions, Info, deadline, wrong};
use crate::sending::{answer, bytes, check_committed, fits};
use pelton::Deadline;
use pelton::raw::{RawCompletion, RawRequestReservation};
use pelton::{CallId, Client, Completion, Counters, Loss, Outcome, Sent};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::fd::{AsRawFd, RawFd};

/// A client behind a handle.
pub struct Calling {
    client: Client,
    /// Taken and not released: meanwhile no other answer is looked for.
    current: Option<RawCompletion>,
    /// Meanwhile nothing else is asked.
    room: Option<Room<RawRequestReservation>>,
}

/// Room that is used by giving its own pointer to what sends it.
pub struct Room<R> {
    pub raw: R,
    pub at: *mut c_void,
    pub size: usize,
}

impl<R> Room<R> {
    /// Whether these bytes are to be sent from the room, if there is one: then there is nothing else that can be sent.
    pub fn is_of(room: &Option<Room<R>>, data: *const c_void, size: usize) -> Answer<bool> {
        match room {
            None => Ok(false),
            Some(room) if room.at.cast_const() == data => check_committed(size, room.size).map(|()| true),
            Some(_) => Err(code::plain(code::RESERVED)),
        }
    }
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

    pub fn fd(&self) -> RawFd {
        self.client.as_raw_fd()
    }

    pub fn arm(&mut self) -> Answer {
        let client = self.free()?;
        came(client.busy_poll().and_then(|_| client.arm()).map(|armed| !armed.is_waiting()))
    }

    pub fn disarm(&mut self) -> Answer {
        self.client.disarm();
        Ok(())
    }

    pub fn info(&self) -> Info {
        let client = &self.client;
        let mut counters = Counters::default();
        counters.wakes_sent = client.wakes_sent();
        let mut info = Info::new(client.peer(), counters);
        info.message_bytes_max = client.request_bytes_max();
        info.calls = client.in_flight() as u64;
        info.dropped = client.completions_dropped();
        info.services = client.service_count() as u64;
        info
    }

    pub fn release(&mut self) -> Answer {
        let raw = self.current.take().ok_or_else(|| code::plain(code::NOT_RECEIVED))?;
        // SAFETY: taken last.
        drop(unsafe { self.client.completion_from_raw(raw) });
        Ok(())
    }

    pub fn reserve(&mut self, size: usize, deadline_ns: i64) -> Answer<*mut c_void> {
        self.room = None;
        fits(size)?;
        let client = self.free()?;
        let reserved = match deadline(deadline_ns) {
            Deadline::Now => client.try_reserve(size),
            Deadline::At(instant) => client.reserve_until(size, instant),
            Deadline::Never => client.reserve(size).map(Some),
        };
        let mut reserved = reserved.map_err(|error| code::of(&error))?.ok_or(code::AGAIN)?;
        let at = reserved.raw_parts().0.as_ptr().cast();
        self.room = Some(Room { raw: reserved.into_raw(), at, size });
        Ok(at)
    }

    /// To give it back is to forget it.
    pub fn abort(&mut self) -> Answer {
        self.room.take().map(|_| ()).ok_or_else(|| code::plain(code::NOT_RESERVED))
    }

    /// Asks from what is reserved.
    fn submit_room(&mut self, size: usize) -> Answer<CallId> {
        let room = self.room.take().expect("it was just there");
        // SAFETY: kept since it was reserved, and nothing else was asked since.
        let room = unsafe { self.client.request_reservation_from_raw(room.raw) };
        room.submit_bytes(size).map_err(|error| code::of(&error))
    }
}

impl Object for Calling {
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

impl CCompletion {
    fn of(completion: &Completion<'_>) -> CCompletion {
        let (data, size) = completion.raw_parts();
        let (outcome, code) = match completion.outcome() {
            Outcome::Reply => (1, 0),
            Outcome::Part => (2, 0),
            Outcome::End => (3, 0),
            Outcome::Failed(code) => (4, code),
            Outcome::Abandoned => (5, 0),
            Outcome::Lost(loss) => (6, why(loss) as u32),
        };
        CCompletion { call: completion.call_id().to_bits(), data: data.as_ptr().cast(), size, outcome, code }
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
        let client = Client::connect_with(text(name)?, &options.cast()).map_err(|error| code::of(&error))?;
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
        let answer = match deadline(deadline_ns).instant() {
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

/// PELTON_NOTIFY.
const NOTIFY: u32 = 1;
/// PELTON_IDEMPOTENT.
const IDEMPOTENT: u32 = 2;

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_submit(
    client: Handled,
    data: *const c_void,
    size: usize,
    flags: u32,
    deadline_ns: i64,
    out_call: *mut u64,
) -> c_int {
    let submit = |calling: &mut Calling| {
        let is_of_room = Room::is_of(&calling.room, data, size)?;
        let call = match flags {
            0 | IDEMPOTENT if out_call.is_null() => return Err(code::null("out_call")),
            0 | IDEMPOTENT if is_of_room => calling.submit_room(size)?,
            // SAFETY: the caller's promise.
            0 | IDEMPOTENT => submit(calling.free()?, unsafe { bytes(data, size)? }, deadline_ns)?,
            NOTIFY if is_of_room => {
                return Err(wrong("flags", flags, "0 or PELTON_IDEMPOTENT (2) of what was reserved"));
            }
            // SAFETY: the caller's promise.
            NOTIFY => return notify(calling.free()?, unsafe { bytes(data, size)? }, deadline_ns),
            found => return Err(wrong("flags", found, "0, PELTON_NOTIFY (1) or PELTON_IDEMPOTENT (2)")),
        };
        if flags == IDEMPOTENT {
            // False: it is lost already, which its completion tells.
            calling.client.mark_idempotent(call).map_err(|error| code::of(&error))?;
        }
        // SAFETY: the caller's promise.
        unsafe { out_call.write(call.to_bits()) };
        Ok(())
    };
    // SAFETY: the caller's promises.
    unsafe { call(client, submit) }
}

fn submit(client: &mut Client, request: &[u8], deadline_ns: i64) -> Answer<CallId> {
    let submitted = match deadline(deadline_ns) {
        Deadline::Now => client.try_submit(request),
        Deadline::At(instant) => client.submit_until(request, instant),
        Deadline::Never => client.submit(request).map(Some),
    };
    submitted.map_err(|error| code::of(&error))?.ok_or(code::AGAIN)
}

fn notify(client: &mut Client, message: &[u8], deadline_ns: i64) -> Answer {
    answer(match deadline(deadline_ns) {
        Deadline::Now => client.try_notify(message),
        Deadline::At(instant) => client.notify_until(message, instant),
        Deadline::Never => client.notify(message).map(|()| Sent::Sent),
    })
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

/// The next answer, to any call if `which` is 0, waiting as long as is said.
fn next(client: &mut Client, which: u64, deadline_ns: i64) -> Answer<Completion<'_>> {
    let call = CallId::from_bits(which);
    let found = match (which, deadline(deadline_ns)) {
        (0, Deadline::Now) => client.try_completion(),
        (0, Deadline::At(instant)) => client.completion_until(instant),
        (0, Deadline::Never) => client.completion().map(Some),
        (_, Deadline::Now) => client.try_completion_of(call),
        (_, Deadline::At(instant)) => client.completion_of_until(call, instant),
        (_, Deadline::Never) => client.completion_of(call).map(Some),
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
