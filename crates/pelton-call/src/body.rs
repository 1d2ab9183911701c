//! The bytes of a request or of a reply, wherever they are.

use crate::frame::{HEADER_BYTES, TRACEPARENT_BYTES};
use pelton_channel::Message;

/// Most records that one poll passes over because they are no message for the user. A peer that floods the lane with
/// such records cannot keep this side's loop from its other work; the next poll continues.
pub(crate) const RECORDS_PER_POLL: usize = 1024;

/// A boolean as large as a word. A request is copied on its way to the user in pieces of a word. A wide load over a
/// just-written single byte cannot be forwarded: it stalls until the store buffer drains, which waits for the cache
/// lines of the reply before, and the client has those.
#[repr(u64)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flag {
    No,
    Yes,
}

impl Flag {
    #[inline(always)]
    pub(crate) fn is_set(self) -> bool {
        self == Flag::Yes
    }
}

/// The bytes of a request, or of a reply.
pub(crate) enum Body<'a> {
    /// In the lane, after the header.
    InPlace(Message<'a>),
    /// In the lane, after the header and a traceparent.
    Traced(Message<'a>),
    /// In a buffer of the thread that handles the request.
    Borrowed(&'a [u8]),
    Owned(Vec<u8>),
}

impl Body<'_> {
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Body::InPlace(message) => &message[HEADER_BYTES..],
            Body::Traced(message) => &message[HEADER_BYTES + TRACEPARENT_BYTES..],
            Body::Borrowed(bytes) => bytes,
            Body::Owned(bytes) => bytes,
        }
    }

    #[inline]
    pub(crate) fn copy_into(&self, buffer: &mut Vec<u8>) {
        buffer.clear();
        match self {
            Body::InPlace(message) => message.append_to(HEADER_BYTES, buffer),
            Body::Traced(message) => message.append_to(HEADER_BYTES + TRACEPARENT_BYTES, buffer),
            body => buffer.extend_from_slice(body.bytes()),
        }
    }

    pub(crate) fn into_vec(self) -> Vec<u8> {
        self.into_vec_in(|_| Vec::new())
    }

    /// As [`Body::into_vec`]. If a copy has to be made, `buffer` makes the memory for so many bytes.
    pub(crate) fn into_vec_in(self, buffer: impl FnOnce(usize) -> Vec<u8>) -> Vec<u8> {
        match self {
            Body::Owned(bytes) => bytes,
            body => {
                let mut copy = buffer(body.bytes().len());
                body.copy_into(&mut copy);
                copy
            }
        }
    }
}
