//! The answering side of calls.

use crate::calling::{PART, REPLY, check_committed};
use crate::code::{self, Answer, came};
use crate::flushing::numbers;
use crate::handle::{Handle, Object, beside, call, catch, close, enter, number, take};
use crate::making::{give, text};
use crate::options::{self, COptions, Info, Until};
use crate::sending::{answer, bytes, fits};
use pelton::{Counters, RawReplyRoom, RawRequest, Request, Responder, Service, Stopper};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::fd::AsRawFd;

/// A service behind a handle.
pub struct Serving {
    service: Service,
    stopper: Stopper,
    /// Taken and not released: meanwhile the service is used for nothing else.
    current: Option<RawRequest>,
}

impl Serving {
    /// The service, for calls that would move what was taken.
    fn free(&mut self) -> Answer<&mut Service> {
        match self.current {
            None => Ok(&mut self.service),
            Some(_) => Err(code::plain(code::NOT_RELEASED)),
        }
    }
}

impl Object for Serving {
    const FREE: u32 = 0x7372_7600;
    const KIND: &'static str = "service";

    fn is_forked(&self) -> bool {
        self.service.is_forked()
    }

    fn is_free(&self) -> bool {
        true
    }
}

type Handled = *mut Handle<Serving>;

/// `pelton_request`.
#[repr(C)]
pub struct CRequest {
    data: *const c_void,
    size: usize,
    responder: *mut Handle<Answering>,
    deadline_ns: i64,
    pid: u32,
    uid: u32,
}

const _: () = assert!(size_of::<CRequest>() == 40);

impl CRequest {
    /// Without what answers it.
    fn of(request: &Request<'_>) -> CRequest {
        let ((data, size), (pid, uid)) = (request.raw_parts(), numbers(request.peer()));
        CRequest { data: data.as_ptr().cast(), size, responder: std::ptr::null_mut(), deadline_ns: i64::MAX, pid, uid }
    }

    /// With it, unless there is nothing to answer.
    fn answered_by(self, responder: Responder, is_notification: bool) -> CRequest {
        if is_notification {
            return self;
        }
        let deadline_ns = match responder.deadline_ns() {
            0 => i64::MAX,
            ns => i64::try_from(ns).unwrap_or(i64::MAX),
        };
        CRequest { responder: Handle::boxed(Answering { responder, room: None }), deadline_ns, ..self }
    }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_service_listen(
    name: *const c_char,
    options: *const COptions,
    out: *mut *mut Handle<Serving>,
) -> c_int {
    let listen = || {
        if name.is_null() {
            return Err(code::null("name"));
        }
        // SAFETY: the caller's promises.
        let (name, (options, _)) = unsafe { (CStr::from_ptr(name), options::of(options)?) };
        let service = options.listen_service(text(name)?).map_err(|error| code::of(&error))?;
        Ok(Serving { stopper: service.stopper(), service, current: None })
    };
    // SAFETY: the caller's promises.
    number(catch(|| unsafe { give(out, listen) }))
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_service_receive(service: Handled, deadline_ns: i64, out: *mut CRequest) -> c_int {
    let receive = |serving: &mut Serving| {
        serving.free()?;
        if out.is_null() {
            return Err(code::null("out"));
        }
        let Serving { service, current, .. } = serving;
        let found = match Until::of(deadline_ns) {
            Until::Now => service.try_receive(),
            Until::Deadline(instant) => service.receive_until(instant),
            Until::Forever => service.receive().map(Some),
        };
        let request = found.map_err(|error| code::of(&error))?.ok_or(code::AGAIN)?;
        let (shown, is_notification) = (CRequest::of(&request), request.is_notification());
        let (raw, responder) = request.into_raw_parts();
        *current = Some(raw);
        // SAFETY: the caller's promise.
        unsafe { out.write(shown.answered_by(responder, is_notification)) };
        Ok(())
    };
    // SAFETY: the caller's promises.
    unsafe { call(service, receive) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_service_release(service: Handled) -> c_int {
    let release = |serving: &mut Serving| {
        let raw = serving.current.take().ok_or_else(|| code::plain(code::NOT_RECEIVED))?;
        // SAFETY: taken last.
        unsafe { serving.service.release_raw(raw) };
        Ok(())
    };
    // SAFETY: the caller's promises.
    unsafe { call(service, release) }
}

/// `pelton_handler`.
type Handler = unsafe extern "C" fn(*mut c_void, *const CRequest);

/// A function of the caller's.
struct Callback {
    handler: Handler,
    context: *mut c_void,
}

// SAFETY: the header says that any of the pool's threads call it, at once.
unsafe impl Sync for Callback {}

impl Callback {
    fn handle(&self, request: Request<'_>) {
        let (shown, is_notification) = (CRequest::of(&request), request.is_notification());
        // The bytes are a copy, in the pool's own memory, which stays until this returns.
        let shown = shown.answered_by(request.into_responder(), is_notification);
        // SAFETY: the caller's function, called as the header says.
        unsafe { (self.handler)(self.context, &shown) };
    }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_service_run(
    service: Handled,
    threads: u32,
    handler: Option<Handler>,
    context: *mut c_void,
) -> c_int {
    let run = |serving: &mut Serving| {
        let service = serving.free()?;
        let Some(handler) = handler else { return Err(code::null("handler")) };
        let callback = Callback { handler, context };
        service.run(threads as usize, |request| callback.handle(request)).map_err(|error| code::of(&error))
    };
    // SAFETY: the caller's promises.
    unsafe { call(service, run) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_service_stop(service: *const Handle<Serving>) -> c_int {
    // SAFETY: the caller's promises; the place of a field.
    unsafe { beside(service, |serving| &raw const (*serving).stopper, Stopper::stop) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_service_drain(service: *const Handle<Serving>) -> c_int {
    // SAFETY: the caller's promises; the place of a field.
    unsafe { beside(service, |serving| &raw const (*serving).stopper, Stopper::drain) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_service_fd(service: *const Handle<Serving>) -> c_int {
    // SAFETY: the caller's promises.
    unsafe { enter(service.cast_mut(), |serving| Ok(serving.service.as_raw_fd())) }.unwrap_or_else(|code| code)
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_service_arm(service: Handled) -> c_int {
    // SAFETY: the caller's promises.
    unsafe { call(service, |serving| came(serving.free()?.arm().map(|armed| !armed))) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_service_disarm(service: Handled) -> c_int {
    let disarm = |serving: &mut Serving| {
        serving.service.disarm();
        Ok(())
    };
    // SAFETY: the caller's promises.
    unsafe { call(service, disarm) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_service_info(service: Handled, out: *mut Info) -> c_int {
    let info = |serving: &mut Serving| {
        if out.is_null() {
            return Err(code::null("out"));
        }
        let mut info = Info::new(None, Counters::default());
        info.dropped = serving.service.dropped();
        info.corrupt = serving.service.corrupt_clients();
        // SAFETY: the caller's promise.
        unsafe { info.write(out) }
    };
    // SAFETY: the caller's promises.
    unsafe { call(service, info) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_service_close(service: Handled) -> c_int {
    // SAFETY: the caller's promises.
    unsafe { close(service) }
}

/// A responder behind a handle.
pub struct Answering {
    /// Reserved, with its size: meanwhile nothing else is answered, and only by this thread. Before the responder, which keeps what
    /// this has locked: that is the order in which they go where a forked child closes this.
    room: Option<(RawReplyRoom, usize)>,
    responder: Responder,
}

impl Object for Answering {
    const FREE: u32 = 0x616e_7300;
    const KIND: &'static str = "responder";

    fn is_forked(&self) -> bool {
        self.responder.is_forked()
    }

    fn is_free(&self) -> bool {
        true
    }
}

impl Answering {
    /// Whether an answer of so many bytes can be given.
    fn check(&self, size: usize) -> Answer {
        match self.room {
            None => self.responder.check_answer(size).map_err(|error| code::of(&error)),
            Some(_) => Err(code::plain(code::RESERVED)),
        }
    }

    /// Whether what is reserved, if anything, is this thread's.
    fn check_thread(&self) -> Answer {
        if self.room.is_none() || self.responder.has_room_here() {
            return Ok(());
        }
        Err(code::tell(
            code::WRONG_THREAD,
            "another thread has reserved room for this reply: it is to commit or abort it",
        ))
    }

    fn give_room_back(&mut self) {
        if let Some((raw, _)) = self.room.take() {
            // SAFETY: kept since it was reserved, and this is the thread, as was checked.
            drop(unsafe { self.responder.room_from_raw(raw) });
        }
    }

    /// Publishes what is reserved.
    fn commit(&mut self, outcome: u32, size: usize) -> Answer {
        let (_, reserved) = self.room.as_ref().ok_or_else(|| code::plain(code::NOT_RESERVED))?;
        check_committed(size, *reserved)?;
        self.check_thread()?;
        let (raw, _) = self.room.take().expect("it was just there");
        // SAFETY: as above.
        let room = unsafe { self.responder.room_from_raw(raw) };
        let done = if outcome == PART { room.part(size) } else { room.reply(size) };
        done.map_err(|error| code::of(&error))
    }
}

type Responding = *mut Handle<Answering>;

/// Gives the last answer, which closes the handle.
///
/// # Safety
/// As for [`enter`] and [`bytes`].
unsafe fn last(
    responder: Responding,
    data: *const c_void,
    size: usize,
    give: impl FnOnce(Responder, &[u8]) -> pelton::Result<()>,
) -> c_int {
    number(catch(|| {
        let sure = |answering: &mut Answering| {
            answering.check(size)?;
            // SAFETY: the caller's promise.
            unsafe { bytes(data, size) }
        };
        // SAFETY: the caller's promises.
        let (answering, payload) = unsafe { take(responder, sure)? };
        give(answering.responder, payload).map_err(|error| code::of(&error))
    }))
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_reply(responder: Responding, data: *const c_void, size: usize) -> c_int {
    // SAFETY: the caller's promises.
    unsafe { last(responder, data, size, Responder::reply) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_reply_fail(
    responder: Responding,
    code: u32,
    data: *const c_void,
    size: usize,
) -> c_int {
    // SAFETY: the caller's promises.
    unsafe { last(responder, data, size, |responder, payload| responder.fail(code, payload)) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_reply_end(responder: Responding) -> c_int {
    // SAFETY: the caller's promises.
    unsafe { last(responder, std::ptr::null(), 0, |responder, _| responder.end()) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_reply_part(
    responder: Responding,
    data: *const c_void,
    size: usize,
    deadline_ns: i64,
) -> c_int {
    let part = |answering: &mut Answering| {
        answering.check(size)?;
        // SAFETY: the caller's promise.
        let payload = unsafe { bytes(data, size)? };
        let responder = &mut answering.responder;
        answer(match Until::of(deadline_ns) {
            Until::Now => responder.try_part(payload),
            Until::Deadline(instant) => responder.part_until(payload, instant),
            Until::Forever => responder.part(payload).map(|()| pelton::Sent::Sent),
        })
    };
    // SAFETY: the caller's promises.
    unsafe { call(responder, part) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_reply_reserve(responder: Responding, size: usize, out: *mut *mut c_void) -> c_int {
    let reserve = |answering: &mut Answering| {
        if out.is_null() {
            return Err(code::null("out"));
        }
        answering.check_thread()?;
        answering.give_room_back();
        fits(size)?;
        let Answering { responder, room } = answering;
        let mut reserved = responder.try_reserve(size).map_err(|error| code::of(&error))?.ok_or(code::AGAIN)?;
        let at = reserved.raw_parts().0;
        // SAFETY: it is taken back before the responder goes: by committing, aborting, and closing.
        *room = Some((unsafe { reserved.into_raw() }, size));
        // SAFETY: the caller's promise.
        unsafe { out.write(at.as_ptr().cast()) };
        Ok(())
    };
    // SAFETY: the caller's promises.
    unsafe { call(responder, reserve) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_reply_commit(responder: Responding, outcome: u32, size: usize) -> c_int {
    match outcome {
        // SAFETY: the caller's promises.
        PART => unsafe { call(responder, |answering| answering.commit(PART, size)) },
        REPLY => {
            // SAFETY: the caller's promises. What is left of it is dropped.
            number(catch(|| unsafe { take(responder, |answering| answering.commit(REPLY, size)) }.map(|_| ())))
        }
        found => options::wrong("outcome", found, "PELTON_REPLY (1) or PELTON_PART (2)"),
    }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_reply_abort(responder: Responding) -> c_int {
    let abort = |answering: &mut Answering| {
        if answering.room.is_none() {
            return Err(code::plain(code::NOT_RESERVED));
        }
        answering.check_thread()?;
        answering.give_room_back();
        Ok(())
    };
    // SAFETY: the caller's promises.
    unsafe { call(responder, abort) }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_responder_is_cancelled(responder: *const Handle<Answering>) -> c_int {
    let asked = |answering: &mut Answering| Ok(answering.responder.is_cancelled().into());
    // SAFETY: the caller's promises.
    unsafe { enter(responder.cast_mut(), asked) }.unwrap_or_else(|code| code)
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_responder_close(responder: Responding) -> c_int {
    if responder.is_null() {
        return 0;
    }
    let give_back = |answering: &mut Answering| {
        answering.check_thread()?;
        answering.give_room_back();
        Ok(())
    };
    // SAFETY: the caller's promises. A broken or forked one is closed too, and its lock with it.
    unsafe {
        match call(responder, give_back) {
            code::WRONG_THREAD => code::WRONG_THREAD,
            _ => close(responder),
        }
    }
}
