//! Calls for bindings, whose languages know no borrows: what is reserved, or has come, is kept beside the client, as long as that is
//! used for nothing that would move it. No part of the documented interface.

use super::{CallId, Client, Completion, Outcome, RequestRoom};
use crate::call::{Body, RawBody};
use pelton_lane::ReservedSpace;
use std::ptr::NonNull;

/// An answer without its borrow of the client: see [`Completion::into_raw`].
#[doc(hidden)]
#[derive(Debug)]
pub struct RawCompletion {
    call: CallId,
    outcome: Outcome,
    body: RawBody,
    /// By which link it came, if it is in place.
    at: usize,
}

/// Room for a request without its borrow of the client: see [`RequestRoom::into_raw`].
#[doc(hidden)]
#[derive(Debug)]
pub struct RawRequestRoom {
    call: CallId,
    at: usize,
    space: ReservedSpace,
}

impl CallId {
    /// The call as a number, never 0: for bindings.
    #[doc(hidden)]
    pub fn to_bits(self) -> u64 {
        self.0
    }

    /// The call of a number: for bindings. Of a number that is no call's, nothing comes.
    #[doc(hidden)]
    pub fn from_bits(bits: u64) -> CallId {
        CallId(bits)
    }
}

impl Client {
    /// The answer again that [`Completion::into_raw`] took from its borrow. For bindings.
    ///
    /// # Safety
    /// It was this client's, which was used for nothing else since.
    #[doc(hidden)]
    pub unsafe fn completion_from_raw(&mut self, raw: RawCompletion) -> Completion<'_> {
        let RawCompletion { call, outcome, body, at } = raw;
        let body = match body {
            // SAFETY: the caller's promise.
            RawBody::InPlace(message) => Body::InPlace(unsafe { self.links[at].replies.message_from_raw(message) }),
            RawBody::Apart(bytes) => Body::Apart(bytes),
        };
        Completion { call, outcome, body, at }
    }

    /// The room again that [`RequestRoom::into_raw`] took from its borrow. For bindings.
    ///
    /// # Safety
    /// As for [`Client::completion_from_raw`].
    #[doc(hidden)]
    pub unsafe fn request_room_from_raw(&mut self, raw: RawRequestRoom) -> RequestRoom<'_> {
        let RawRequestRoom { call, at, space } = raw;
        RequestRoom { client: self, call, at, space }
    }

    /// Whether this process is a fork of the one that made the handle. For bindings.
    #[doc(hidden)]
    pub fn is_forked(&self) -> bool {
        self.owner.is_forked()
    }
}

impl Completion<'_> {
    /// The answer without its borrow, not released. [`Client::completion_from_raw`] takes it back. For bindings.
    #[doc(hidden)]
    pub fn into_raw(self) -> RawCompletion {
        RawCompletion { call: self.call, outcome: self.outcome, body: self.body.into_raw(), at: self.at }
    }

    /// Where the bytes are, for bindings: a slice of what another process can write is made only where it is wanted.
    #[doc(hidden)]
    pub fn raw_parts(&self) -> (NonNull<u8>, usize) {
        self.body.raw_parts()
    }
}

impl RequestRoom<'_> {
    /// The room without its borrow. [`Client::request_room_from_raw`] takes it back. For bindings.
    #[doc(hidden)]
    pub fn into_raw(self) -> RawRequestRoom {
        RawRequestRoom { call: self.call, at: self.at, space: self.space }
    }

    /// The room's bytes. For bindings.
    #[doc(hidden)]
    pub fn raw_parts(&mut self) -> (NonNull<u8>, usize) {
        let bytes = self.len();
        (NonNull::from(&mut **self).cast(), bytes)
    }
}
