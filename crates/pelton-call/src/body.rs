//! The bytes of a request or a response, wherever they are.

use crate::frame::HEADER_BYTES;
use pelton_channel::Message;

/// Records that are no answer to who looks, and are passed over in one look: who floods the lane with such is not to keep the
/// other side's loop. The next look goes on.
pub(crate) const LOOKS: usize = 1024;

/// Yes or no, as large as a word. A request is copied on its way to who answers it, and one with single bytes in it in odd pieces: to read
/// such a piece back, larger than it was written, takes until all that was written before is out, and that is the reply before, whose
/// lines the client has.
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

/// The bytes of a request, or of an answer.
#[derive(Debug)]
pub(crate) enum Body<'a> {
    /// In the lane, behind the header.
    InPlace(Message<'a>),
    /// In somebody's buffer.
    Lent(&'a [u8]),
    Apart(Vec<u8>),
}

impl Body<'_> {
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Body::InPlace(message) => &message[HEADER_BYTES..],
            Body::Lent(bytes) => bytes,
            Body::Apart(bytes) => bytes,
        }
    }

    #[inline]
    pub(crate) fn copy_into(&self, buffer: &mut Vec<u8>) {
        buffer.clear();
        match self {
            Body::InPlace(message) => message.append_to(HEADER_BYTES, buffer),
            body => buffer.extend_from_slice(body.bytes()),
        }
    }

    pub(crate) fn into_vec(self) -> Vec<u8> {
        match self {
            Body::Apart(bytes) => bytes,
            body => body.bytes().to_vec(),
        }
    }
}
