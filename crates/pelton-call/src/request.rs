//! A request or a notification, as the service's user has it.

use super::frame::{Header, Kind};
use super::placed::{Placed, Storage};
use super::responder::{BorrowedResponder, Responder};
use crate::body::Body;
use pelton_channel::{Result, Traceparent};
use pelton_os::Peer;
use std::time::Instant;

/// A client's request, or its notification.
///
/// Its bytes are in memory that the client wrote, unless they came in pieces or [`crate::Service::run`] copied them. To
/// read them in place, trust the client not to write after it has submitted. [`Request::copy_into`] is safe against any
/// client.
///
/// It is one pointer, however much belongs to it: moving it costs as much as moving a number.
#[must_use = "dropping it abandons the call"]
pub struct Request<'a> {
    contents: Placed<'a, Contents<'a>>,
}

/// What belongs to a request. It stays where it was written until it is over: a wide load of it just after stores of
/// single words cannot be forwarded. It stalls until the store buffer drains, which waits for the cache lines of the
/// reply before, and the client has those (`docs/decisions/0023`).
pub(super) struct Contents<'a> {
    pub(super) body: Body<'a>,
    pub(super) responder: BorrowedResponder<'a>,
}

/// Where a request is while it lives. A service has one, and each thread of a pool another.
pub(super) struct RequestStorage(Storage<Contents<'static>>);

impl RequestStorage {
    pub(super) fn new() -> RequestStorage {
        RequestStorage(Storage::new())
    }

    #[inline(always)]
    pub(super) fn put<'a>(&'a mut self, body: Body<'a>, responder: BorrowedResponder<'a>) -> Request<'a> {
        Request { contents: self.0.put(Contents { body, responder }) }
    }
}

impl<'a> Request<'a> {
    #[inline(always)]
    pub(super) fn contents(&self) -> &Contents<'a> {
        &self.contents
    }

    /// The body and the responder, out of their storage.
    #[inline(always)]
    pub(super) fn into_halves(self) -> (Body<'a>, BorrowedResponder<'a>) {
        let Contents { body, responder } = self.contents.into_inner();
        (body, responder)
    }

    /// Replies, and ends the call. Does not wait: a reply for which the client has no space is kept until it has.
    ///
    /// # Errors
    /// As [`Responder::reply`].
    #[inline(always)]
    pub fn reply(mut self, reply: &[u8]) -> Result<()> {
        let responder = &mut self.contents.responder;
        responder.send_final(Header::new(Kind::Reply, responder.id), reply)
    }

    /// Fails the call with a code and bytes of the service's own meaning. Does not wait.
    ///
    /// # Errors
    /// As [`Responder::reply`].
    pub fn fail(mut self, code: u32, bytes: &[u8]) -> Result<()> {
        let responder = &mut self.contents.responder;
        responder.send_final(Header { code, ..Header::new(Kind::Failed, responder.id) }, bytes)
    }

    /// The responder without the bytes, which are released: to reply later, or on another thread.
    pub fn into_responder(self) -> Responder {
        let (body, responder) = self.into_halves();
        let responder = responder.detach();
        drop(body);
        responder
    }

    /// Copies the bytes into `buffer`, whose contents they replace, releases them, and returns the responder.
    pub fn copy_into(self, buffer: &mut Vec<u8>) -> Responder {
        self.contents().body.copy_into(buffer);
        self.into_responder()
    }

    /// A copy of the bytes, and the responder.
    pub fn into_parts(self) -> (Vec<u8>, Responder) {
        self.into_parts_in(|_| Vec::new())
    }

    /// As [`Request::into_parts`]. If a copy has to be made, `buffer` makes the memory for so many bytes.
    #[doc(hidden)]
    pub fn into_parts_in(self, buffer: impl FnOnce(usize) -> Vec<u8>) -> (Vec<u8>, Responder) {
        let (body, responder) = self.into_halves();
        (body.into_vec_in(buffer), responder.detach())
    }

    /// The bytes and the responder side by side: to write a reply in place while the request is read.
    #[inline]
    pub fn split(&mut self) -> (&[u8], &mut BorrowedResponder<'a>) {
        let Contents { body, responder } = &mut *self.contents;
        (body.bytes(), responder)
    }

    /// Whether it is a notification: the client awaits no reply, and a reply is an error.
    #[inline]
    pub fn is_notification(&self) -> bool {
        self.contents().responder.id == 0
    }

    /// As [`Responder::peer`].
    pub fn peer(&self) -> Option<Peer> {
        self.contents().responder.peer()
    }

    /// As [`Responder::deadline`].
    pub fn deadline(&self) -> Option<Instant> {
        self.contents().responder.deadline()
    }

    /// As [`Responder::traceparent`].
    pub fn traceparent(&self) -> Option<Traceparent> {
        self.contents().responder.traceparent()
    }

    /// As [`Responder::is_cancelled`].
    pub fn is_cancelled(&self) -> bool {
        self.contents().responder.is_cancelled()
    }
}

impl std::ops::Deref for Request<'_> {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        self.contents().body.bytes()
    }
}

impl AsRef<[u8]> for Request<'_> {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl std::fmt::Debug for Request<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Request")
            .field("peer", &self.peer())
            .field("is_notification", &self.is_notification())
            .field("bytes", &self.len())
            .finish_non_exhaustive()
    }
}
