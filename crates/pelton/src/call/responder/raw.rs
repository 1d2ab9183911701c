//! Answering for bindings, whose languages know no borrows: a request, or room for a reply, is kept beside the handle that gave it
//! out, as long as that is used for nothing that would move it. No part of the documented interface.

use super::{Answering, ReplyRoom, Request, Responder};
use crate::call::{Body, RawBody};
use crate::error::Result;
use crate::receiver::Receiver;
use std::marker::PhantomData;
use std::mem::forget;
use std::ptr::NonNull;

/// A request's bytes without their borrow of the service: see [`Request::into_raw_parts`].
#[doc(hidden)]
#[derive(Debug)]
pub struct RawRequest(RawBody);

/// Room for a reply without its borrow of the responder: see [`ReplyRoom::into_raw`].
#[doc(hidden)]
#[derive(Debug)]
pub struct RawReplyRoom {
    /// It stays on its thread, as the room does.
    of_thread: PhantomData<*mut ()>,
}

impl RawRequest {
    /// # Safety
    /// As for [`RawBody::with`].
    pub(in crate::call) unsafe fn into_body(self, receiver: &mut Receiver) -> Body<'_> {
        // SAFETY: the caller's promise.
        unsafe { self.0.with(receiver) }
    }
}

impl Request<'_> {
    /// Where the bytes are, for bindings: a slice of what another process can write is made only where it is wanted.
    #[doc(hidden)]
    pub fn raw_parts(&self) -> (NonNull<u8>, usize) {
        self.asked().body.raw_parts()
    }

    /// The bytes without their borrow, not given back, and what answers them. [`crate::Service::release_raw`] gives them back. For bindings.
    #[doc(hidden)]
    pub fn into_raw_parts(self) -> (RawRequest, Responder) {
        let (body, responder) = self.into_halves();
        (RawRequest(body.into_raw()), responder.away())
    }
}

impl Answering<'_> {
    /// Whether an answer of so many bytes can be given: what [`Responder::reply`] would find, before it takes the responder. For
    /// bindings.
    #[doc(hidden)]
    pub fn check_answer(&self, bytes: usize) -> Result<()> {
        self.check(bytes)
    }

    /// When the client will not await the answer any more, in nanoseconds of CLOCK_MONOTONIC, or 0. For bindings.
    #[doc(hidden)]
    pub fn deadline_ns(&self) -> u64 {
        self.deadline
    }

    /// Whether this process is a fork of the one that made the handle. For bindings.
    #[doc(hidden)]
    pub fn is_forked(&self) -> bool {
        self.caller.is_forked()
    }

    /// Whether it is this thread that has room reserved for a reply to this client. For bindings.
    #[doc(hidden)]
    pub fn has_room_here(&self) -> bool {
        self.caller.is_room_noted()
    }

    /// The room again that [`ReplyRoom::into_raw`] took from its borrow. For bindings.
    ///
    /// # Safety
    /// It was this responder's, which has answered nothing since, and this is the same thread.
    #[doc(hidden)]
    pub unsafe fn room_from_raw(&mut self, raw: RawReplyRoom) -> ReplyRoom<'_> {
        let RawReplyRoom { of_thread: _ } = raw;
        self.room()
    }
}

impl ReplyRoom<'_> {
    /// The room without its borrow. [`Responder::room_from_raw`] takes it back; until then the client's lane stays locked. For
    /// bindings.
    ///
    /// # Safety
    /// It is taken back before the responder goes.
    #[doc(hidden)]
    pub unsafe fn into_raw(self) -> RawReplyRoom {
        // What it has, the client and the responder keep.
        forget(self);
        RawReplyRoom { of_thread: PhantomData }
    }

    /// The room's bytes. For bindings.
    #[doc(hidden)]
    pub fn raw_parts(&mut self) -> (NonNull<u8>, usize) {
        let bytes = self.len();
        (NonNull::from(&mut **self).cast(), bytes)
    }
}
