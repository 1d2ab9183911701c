//! Calls for FFI: what is reserved, or has come, is kept beside its handle without a borrow, as long as the handle is
//! used for nothing that would move it. Not stable, and no part of the documented interface.

use super::calls::{CallId, Outcome};
use super::client::{Client, Completion, RequestReservation};
pub use super::inbox::{Inbox, StoredCompletion};
use super::request::Request;
use super::responder::{BorrowedResponder, ReplyReservation, Responder};
use super::service::Service;
use crate::body::Body;
use crate::frame::{HEADER_BYTES, TRACEPARENT_BYTES};
use pelton_channel::Result;
use pelton_channel::{Message, Receiver};
use pelton_lane::{Record, ReservedSpace};
use std::marker::PhantomData;
use std::mem::forget;
use std::ptr::NonNull;

/// A body without its borrow of the lane.
#[derive(Debug)]
enum RawBody {
    InPlace(Record),
    /// With a traceparent before it: a request's.
    Traced(Record),
    Owned(Vec<u8>),
}

impl RawBody {
    /// # Safety
    /// A body in place is `receiver`'s, which has received nothing since.
    unsafe fn with(self, receiver: &mut Receiver) -> Body<'_> {
        match self {
            RawBody::InPlace(record) => Body::InPlace(receiver.message(record)),
            RawBody::Traced(record) => Body::Traced(receiver.message(record)),
            RawBody::Owned(bytes) => Body::Owned(bytes),
        }
    }
}

impl Body<'_> {
    fn into_raw(self) -> RawBody {
        match self {
            Body::InPlace(message) => {
                let record = message.record();
                forget(message);
                RawBody::InPlace(record)
            }
            Body::Traced(message) => {
                let record = message.record();
                forget(message);
                RawBody::Traced(record)
            }
            body => RawBody::Owned(body.into_vec()),
        }
    }

    /// Makes no slice of memory that another process can write.
    fn raw_parts(&self) -> (NonNull<u8>, usize) {
        let after = |message: &Message<'_>, skip: usize| {
            let (data, bytes) = message.raw_parts();
            // SAFETY: the message has so many bytes: every record with less than a header and its prefix is refused
            // before a body is created.
            (unsafe { data.add(skip) }, bytes - skip)
        };
        match self {
            Body::InPlace(message) => after(message, HEADER_BYTES),
            Body::Traced(message) => after(message, HEADER_BYTES + TRACEPARENT_BYTES),
            Body::Borrowed(bytes) => (NonNull::from(*bytes).cast(), bytes.len()),
            Body::Owned(bytes) => (NonNull::from(&bytes[..]).cast(), bytes.len()),
        }
    }
}

/// A completion without its borrow of the client: see [`Completion::into_raw`].
#[derive(Debug)]
pub struct RawCompletion {
    call: CallId,
    outcome: Outcome,
    body: RawBody,
    /// Index of the connection of a body in place.
    at: usize,
}

/// Space for a request without its borrow of the client: see [`RequestReservation::into_raw`].
#[derive(Debug)]
pub struct RawRequestReservation {
    call: CallId,
    at: usize,
    space: ReservedSpace,
}

/// A request's bytes without their borrow of the service: see [`Request::into_raw_parts`].
#[derive(Debug)]
pub struct RawRequest(RawBody);

/// Space for a reply without its borrow of the responder: see [`ReplyReservation::into_raw`].
#[derive(Debug)]
pub struct RawReplyReservation {
    /// It stays on its thread, as the space does.
    of_thread: PhantomData<*mut ()>,
}

#[doc(hidden)]
impl CallId {
    /// The call as a number, never 0.
    pub fn to_bits(self) -> u64 {
        self.0
    }

    /// The call of a number. A number that belongs to no call gets no completion.
    pub fn from_bits(bits: u64) -> CallId {
        CallId(bits)
    }
}

#[doc(hidden)]
impl Client {
    /// Reverses [`Completion::into_raw`].
    ///
    /// # Safety
    /// It was this client's, which was not used since.
    pub unsafe fn completion_from_raw(&mut self, raw: RawCompletion) -> Completion<'_> {
        let RawCompletion { call, outcome, body, at } = raw;
        let body = match body {
            RawBody::Owned(bytes) => Body::Owned(bytes),
            // SAFETY: the caller guarantees that the client has done nothing since.
            body => unsafe { body.with(&mut self.balancer.connections[at].replies) },
        };
        Completion { call, outcome, body, at }
    }

    /// Reverses [`RequestReservation::into_raw`].
    ///
    /// # Safety
    /// As for [`Client::completion_from_raw`].
    pub unsafe fn request_reservation_from_raw(&mut self, raw: RawRequestReservation) -> RequestReservation<'_> {
        let RawRequestReservation { call, at, space } = raw;
        RequestReservation { client: self, call, at, space }
    }

    /// Whether this process is a fork of the one that created the handle.
    pub fn is_forked(&self) -> bool {
        self.balancer.owner.is_forked()
    }
}

#[doc(hidden)]
impl Completion<'_> {
    /// The completion without its borrow, not released. [`Client::completion_from_raw`] reverses it.
    pub fn into_raw(self) -> RawCompletion {
        RawCompletion { call: self.call, outcome: self.outcome, body: self.body.into_raw(), at: self.at }
    }

    /// The address and size of the bytes.
    pub fn raw_parts(&self) -> (NonNull<u8>, usize) {
        self.body.raw_parts()
    }
}

#[doc(hidden)]
impl RequestReservation<'_> {
    /// The space without its borrow. [`Client::request_reservation_from_raw`] reverses it.
    pub fn into_raw(self) -> RawRequestReservation {
        RawRequestReservation { call: self.call, at: self.at, space: self.space }
    }

    /// The address and size of the bytes to write.
    pub fn raw_parts(&mut self) -> (NonNull<u8>, usize) {
        let bytes = self.len();
        (NonNull::from(&mut **self).cast(), bytes)
    }
}

#[doc(hidden)]
impl Service {
    /// Releases the bytes that [`Request::into_raw_parts`] took.
    ///
    /// # Safety
    /// They are this service's, and it has received no other request since.
    pub unsafe fn release_raw(&mut self, raw: RawRequest) {
        // SAFETY: the caller guarantees that the bytes are this service's, and that it has received no other request.
        drop(unsafe { raw.0.with(&mut self.requests) });
    }

    /// Whether this process is a fork of the one that created the handle.
    pub fn is_forked(&self) -> bool {
        self.requests.is_forked()
    }
}

#[doc(hidden)]
impl Request<'_> {
    /// The address and size of the bytes.
    pub fn raw_parts(&self) -> (NonNull<u8>, usize) {
        self.contents().body.raw_parts()
    }

    /// The bytes without their borrow, not released, and the responder. [`Service::release_raw`] releases the bytes.
    pub fn into_raw_parts(self) -> (RawRequest, Responder) {
        let (body, responder) = self.into_halves();
        (RawRequest(body.into_raw()), responder.detach())
    }
}

#[doc(hidden)]
impl BorrowedResponder<'_> {
    /// Whether a reply of `bytes` is possible: what [`Responder::reply`] checks before it consumes the responder.
    ///
    /// # Errors
    /// As [`Responder::reply`].
    pub fn check_answer(&self, bytes: usize) -> Result<()> {
        self.check(bytes)
    }

    /// The call's deadline in nanoseconds of CLOCK_MONOTONIC, or 0.
    pub fn deadline_ns(&self) -> u64 {
        self.deadline
    }

    /// Whether this process is a fork of the one that created the handle.
    pub fn is_forked(&self) -> bool {
        self.session.is_forked()
    }

    /// Whether this thread has space reserved for a reply to this client.
    pub fn has_reservation_here(&self) -> bool {
        self.session.is_reserved_here()
    }

    /// Reverses [`ReplyReservation::into_raw`].
    ///
    /// # Safety
    /// It was this responder's, which has replied nothing since, and this is the same thread.
    pub unsafe fn reservation_from_raw(&mut self, raw: RawReplyReservation) -> ReplyReservation<'_> {
        let RawReplyReservation { of_thread: _ } = raw;
        self.reservation()
    }
}

#[doc(hidden)]
impl ReplyReservation<'_> {
    /// The space without its borrow. [`Responder::reservation_from_raw`] reverses it; until then the client's lane
    /// stays locked.
    ///
    /// # Safety
    /// It is reversed before the responder is dropped.
    pub unsafe fn into_raw(self) -> RawReplyReservation {
        // The session keeps the space and the lock.
        forget(self);
        RawReplyReservation { of_thread: PhantomData }
    }

    /// The address and size of the bytes to write.
    pub fn raw_parts(&mut self) -> (NonNull<u8>, usize) {
        let bytes = self.len();
        (NonNull::from(&mut **self).cast(), bytes)
    }
}
