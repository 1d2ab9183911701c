//! What both sides of a link have for bindings.

use super::{Body, HEADER_BYTES};
use crate::receiver::{RawMessage, Receiver};
use std::ptr::NonNull;

/// A body without its borrow of the lane that it is in.
#[derive(Debug)]
pub(super) enum RawBody {
    InPlace(RawMessage),
    Apart(Vec<u8>),
}

impl RawBody {
    /// # Safety
    /// The body is this receiver's, of which nothing was taken since.
    pub(super) unsafe fn with(self, receiver: &mut Receiver) -> Body<'_> {
        match self {
            // SAFETY: the caller's promise.
            RawBody::InPlace(message) => Body::InPlace(unsafe { receiver.message_from_raw(message) }),
            RawBody::Apart(bytes) => Body::Apart(bytes),
        }
    }
}

impl Body<'_> {
    pub(super) fn into_raw(self) -> RawBody {
        match self {
            Body::InPlace(message) => RawBody::InPlace(message.into_raw()),
            body => RawBody::Apart(body.into_vec()),
        }
    }

    /// No slice of what another process can write is made.
    pub(super) fn raw_parts(&self) -> (NonNull<u8>, usize) {
        match self {
            Body::InPlace(message) => {
                let (data, bytes) = message.raw_parts();
                // SAFETY: a record that is shorter than a header is no body.
                (unsafe { data.add(HEADER_BYTES) }, bytes - HEADER_BYTES)
            }
            Body::Lent(bytes) => (NonNull::from(*bytes).cast(), bytes.len()),
            Body::Apart(bytes) => (NonNull::from(&bytes[..]).cast(), bytes.len()),
        }
    }
}
