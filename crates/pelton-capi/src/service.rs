//! A service: its requests, and the threads that handle them.

use crate::c::{Info, New, Options, Out, Parameter, Raw, Text, sized_structures, structures, text};
use crate::code::{self, Answer, armed, done, found, is_done};
use crate::entries::entries;
use crate::handle::{Kind, Object};
use crate::options::ServiceOptions;
use crate::receiver::numbers;
use crate::responder::Responder;
use pelton::raw::RawRequest;
use pelton::{Deadline, Request, Stopper};
use std::ffi::c_void;
use std::os::fd::AsRawFd;

pub struct Service {
    inner: pelton::Service,
    /// Never written, so that any thread may use it.
    stopper: Stopper,
    /// Received and not released: meanwhile the service is used for nothing else.
    received: Option<RawRequest>,
}

impl Service {
    /// The service, for calls that would move what was received.
    fn released(&mut self) -> Answer<&mut pelton::Service> {
        match self.received {
            None => Ok(&mut self.inner),
            Some(_) => Err(code::plain(code::NOT_RELEASED)),
        }
    }
}

impl Object for Service {
    const KIND: Kind = Kind::Service;

    fn is_forked(&self) -> bool {
        self.inner.is_forked()
    }
}

structures! {
    "pelton_request" CRequest {
        data: *const c_void,
        size: usize,
        responder: Raw<Responder>,
        deadline_ns: i64,
        pid: u32,
        uid: u32,
    }
}

impl CRequest {
    /// Without the responder.
    fn of(request: &Request<'_>) -> CRequest {
        let ((data, size), (pid, uid)) = (request.raw_parts(), numbers(request.peer()));
        CRequest { data: data.as_ptr().cast(), size, responder: Raw::NULL, deadline_ns: i64::MAX, pid, uid }
    }

    /// With the responder, unless it is a notification.
    fn with_responder(self, responder: pelton::Responder, is_notification: bool) -> CRequest {
        if is_notification {
            return self;
        }
        let deadline_ns = match responder.deadline_ns() {
            0 => i64::MAX,
            ns => i64::try_from(ns).unwrap_or(i64::MAX),
        };
        CRequest { responder: Raw::new(Responder::new(responder)), deadline_ns, ..self }
    }
}

/// `pelton_handler`.
type Handler = unsafe extern "C" fn(*mut c_void, *const CRequest);

impl Parameter for Handler {
    type C = Option<Handler>;
    type Given = (Option<Handler>,);
    type Value<'a> = Handler;

    unsafe fn checked(given: &(Option<Handler>,), name: &'static str) -> Answer<Handler> {
        given.0.ok_or_else(|| code::null(name))
    }
}

/// The caller's function, with its context.
struct Callback {
    handler: Handler,
    context: *mut c_void,
}

// SAFETY: `pelton.h` says that several threads call it at the same time.
unsafe impl Sync for Callback {}

impl Callback {
    fn handle(&self, request: Request<'_>) {
        let (shown, is_notification) = (CRequest::of(&request), request.is_notification());
        // The bytes are a copy in the thread's own memory, valid until this returns.
        let shown = shown.with_responder(request.into_responder(), is_notification);
        // SAFETY: the C caller passed this function for these calls.
        unsafe { (self.handler)(self.context, &shown) };
    }
}

sized_structures! {
    "pelton_service_info" ServiceInfo {
        reserved: u32,
        dropped: u64,
        corrupt: u64,
    }
}

/// Uses the stopper, also while another thread receives.
fn stop(service: Raw<Service>, how: impl FnOnce(&Stopper)) -> Answer {
    // SAFETY: it is the address of a field that nothing writes.
    unsafe { service.share_part(|service| &raw const (*service).stopper, how) }
}

entries! {
    fn pelton_service_open(name: Text, options: Options<ServiceOptions>, out: New<Service>) {
        let inner = done(pelton::Service::listen_with(text(name)?, &options.build()?))?;
        out.give(Service { stopper: inner.stopper(), inner, received: None })
    }

    fn pelton_service_receive(service: &mut Service, deadline_ns: Deadline, out: Out<CRequest>) {
        let inner = service.released()?;
        let request = match deadline_ns {
            Deadline::Now => found(inner.try_receive()),
            Deadline::At(deadline) => found(inner.receive_until(deadline)),
            Deadline::Never => done(inner.receive()),
        }?;
        let (shown, is_notification) = (CRequest::of(&request), request.is_notification());
        let (received, responder) = request.into_raw_parts();
        service.received = Some(received);
        out.write(shown.with_responder(responder, is_notification));
        Ok(())
    }

    fn pelton_service_release(service: &mut Service) {
        let received = service.received.take().ok_or_else(|| code::plain(code::NOT_RECEIVED))?;
        // SAFETY: it is the request that was received last.
        unsafe { service.inner.release_raw(received) };
        Ok(())
    }

    fn pelton_service_run(service: &mut Service, threads: u32, handler: Handler, context: *mut c_void) {
        let callback = Callback { handler, context };
        done(service.released()?.run(threads as usize, |request| callback.handle(request)))
    }

    fn pelton_service_stop(service: Raw<Service>) {
        stop(service, Stopper::stop)
    }

    fn pelton_service_drain(service: Raw<Service>) {
        stop(service, Stopper::drain)
    }

    fn pelton_service_fd(service: &mut Service) {
        Ok(service.inner.as_raw_fd())
    }

    fn pelton_service_poll(service: &mut Service) {
        is_done(service.released()?.busy_poll())
    }

    fn pelton_service_arm(service: &mut Service) {
        armed(service.released()?.arm())
    }

    fn pelton_service_disarm(service: &mut Service) {
        service.inner.disarm();
        Ok(())
    }

    fn pelton_service_get_info(service: &mut Service, out: Info<ServiceInfo>) {
        out.write(ServiceInfo {
            struct_bytes: 0,
            reserved: 0,
            dropped: service.inner.replies_dropped(),
            corrupt: service.inner.corrupt_clients(),
        })
    }
}
