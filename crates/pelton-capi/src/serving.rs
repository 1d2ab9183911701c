//! The answering side of calls.

use crate::calling::Room;
use crate::code::{self, Answer, came};
use crate::flushing::numbers;
use crate::handle::give;
use crate::handle::{Handle, Object, beside, call, catch, enter, number, take};
use crate::options::text;
use crate::options::{self, COptions, Info, deadline, wrong};
use crate::sending::{answer, bytes, fits};
use pelton::Deadline;
use pelton::raw::{RawReplyReservation, RawRequest};
use pelton::{Counters, ReplyReservation, Request, Responder, Service, Stopper};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::fd::{AsRawFd, RawFd};

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

    pub fn fd(&self) -> RawFd {
        self.service.as_raw_fd()
    }

    pub fn arm(&mut self) -> Answer {
        came(self.free()?.arm().map(|armed| !armed.is_waiting()))
    }

    pub fn disarm(&mut self) -> Answer {
        self.service.disarm();
        Ok(())
    }

    pub fn info(&self) -> Info {
        let mut info = Info::new(None, Counters::default());
        info.dropped = self.service.replies_dropped();
        info.corrupt = self.service.corrupt_clients();
        info
    }

    pub fn release(&mut self) -> Answer {
        let raw = self.current.take().ok_or_else(|| code::plain(code::NOT_RECEIVED))?;
        // SAFETY: taken last.
        unsafe { self.service.release_raw(raw) };
        Ok(())
    }
}

impl Object for Serving {
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
        let service = Service::listen_with(text(name)?, &options.cast()).map_err(|error| code::of(&error))?;
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
        let found = match deadline(deadline_ns) {
            Deadline::Now => service.try_receive(),
            Deadline::At(instant) => service.receive_until(instant),
            Deadline::Never => service.receive().map(Some),
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
pub unsafe extern "C" fn pelton_service_stop(service: *const Handle<Serving>, how: u32) -> c_int {
    let stop = match how {
        0 => Stopper::stop,
        1 => Stopper::drain,
        found => return wrong("how", found, "PELTON_STOP_NOW (0) or PELTON_STOP_DRAIN (1)"),
    };
    // SAFETY: the caller's promises; the place of a field.
    unsafe { beside(service, |serving| &raw const (*serving).stopper, stop) }
}

/// A responder behind a handle.
pub struct Answering {
    /// Meanwhile nothing else is answered, and only by this thread.
    room: Option<Room<RawReplyReservation>>,
    responder: Responder,
}

impl Object for Answering {
    const KIND: &'static str = "responder";

    fn is_forked(&self) -> bool {
        self.responder.is_forked()
    }

    fn is_free(&self) -> bool {
        true
    }

    fn before_closing(&mut self) -> Answer {
        self.give_room_back()
    }
}

impl Answering {
    /// Whether what is reserved, if anything, is this thread's.
    fn check_thread(&self) -> Answer {
        if self.room.is_none() || self.responder.has_reservation_here() {
            return Ok(());
        }
        Err(code::tell(code::WRONG_THREAD, "another thread has reserved room for this reply: it is to use or abort it"))
    }

    fn give_room_back(&mut self) -> Answer {
        self.check_thread()?;
        if let Some(room) = self.room.take() {
            // SAFETY: kept since it was reserved, and this is the thread.
            drop(unsafe { self.responder.reservation_from_raw(room.raw) });
        }
        Ok(())
    }

    pub fn reserve(&mut self, size: usize) -> Answer<*mut c_void> {
        self.give_room_back()?;
        fits(size)?;
        let reserved = self.responder.try_reserve(size).map_err(|error| code::of(&error))?;
        let mut reserved = reserved.ok_or(code::AGAIN)?;
        let at = reserved.raw_parts().0.as_ptr().cast();
        // SAFETY: it is taken back before the responder goes: by using, aborting, and closing.
        self.room = Some(Room { raw: unsafe { reserved.into_raw() }, at, size });
        Ok(at)
    }

    pub fn abort(&mut self) -> Answer {
        match self.room {
            Some(_) => self.give_room_back(),
            None => Err(code::plain(code::NOT_RESERVED)),
        }
    }

    /// The bytes to be sent, if nothing is reserved and they can be.
    ///
    /// # Safety
    /// As for [`bytes`].
    unsafe fn copied<'a>(&self, data: *const c_void, size: usize) -> Answer<&'a [u8]> {
        if self.room.is_some() {
            return Err(code::plain(code::RESERVED));
        }
        self.responder.check_answer(size).map_err(|error| code::of(&error))?;
        // SAFETY: the caller's promise.
        unsafe { bytes(data, size) }
    }

    /// Sends from what is reserved, if these are its bytes; else they are still to be sent.
    ///
    /// # Safety
    /// As for [`bytes`].
    unsafe fn placed<'a>(
        &mut self,
        data: *const c_void,
        size: usize,
        send: impl FnOnce(ReplyReservation<'_>, usize) -> pelton::Result<()>,
    ) -> Answer<Option<&'a [u8]>> {
        if !Room::is_of(&self.room, data, size)? {
            // SAFETY: the caller's promise.
            return unsafe { self.copied(data, size) }.map(Some);
        }
        self.check_thread()?;
        let room = self.room.take().expect("it was just there");
        // SAFETY: kept since it was reserved, and this is the thread.
        let room = unsafe { self.responder.reservation_from_raw(room.raw) };
        send(room, size).map_err(|error| code::of(&error)).map(|()| None)
    }
}

type Responding = *mut Handle<Answering>;

/// Gives the last answer, which closes the handle: `sure` says what is to be sent still.
///
/// # Safety
/// As for [`enter`].
unsafe fn last<'a>(
    responder: Responding,
    sure: impl FnOnce(&mut Answering) -> Answer<Option<&'a [u8]>>,
    give: impl FnOnce(Responder, &[u8]) -> pelton::Result<()>,
) -> c_int {
    number(catch(|| {
        // SAFETY: the caller's promise.
        match unsafe { take(responder, sure)? } {
            (answering, Some(payload)) => give(answering.responder, payload).map_err(|error| code::of(&error)),
            (_, None) => Ok(()),
        }
    }))
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_reply(responder: Responding, data: *const c_void, size: usize) -> c_int {
    // SAFETY: the caller's promises.
    unsafe {
        last(responder, |answering| answering.placed(data, size, |room, size| room.reply_bytes(size)), Responder::reply)
    }
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
    unsafe {
        last(
            responder,
            |answering| answering.copied(data, size).map(Some),
            |responder, payload| responder.fail(code, payload),
        )
    }
}

/// See `pelton.h`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pelton_reply_end(responder: Responding) -> c_int {
    let sure = |answering: &mut Answering| {
        // SAFETY: none to be read.
        unsafe { answering.copied(std::ptr::null(), 0) }.map(Some)
    };
    // SAFETY: the caller's promises.
    unsafe { last(responder, sure, |responder, _| responder.end()) }
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
        // SAFETY: the caller's promise.
        let Some(payload) = (unsafe { answering.placed(data, size, |room, size| room.part_bytes(size))? }) else {
            return Ok(());
        };
        let responder = &mut answering.responder;
        answer(match deadline(deadline_ns) {
            Deadline::Now => responder.try_part(payload),
            Deadline::At(instant) => responder.part_until(payload, instant),
            Deadline::Never => responder.part(payload).map(|()| pelton::Sent::Sent),
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
pub unsafe extern "C" fn pelton_responder_is_cancelled(responder: *const Handle<Answering>) -> c_int {
    let asked = |answering: &mut Answering| Ok(answering.responder.is_cancelled().into());
    // SAFETY: the caller's promises.
    unsafe { enter(responder.cast_mut(), asked) }.unwrap_or_else(|code| code)
}
