//! A lane: a ring of variable-size records between exactly one producer and one consumer, over memory that
//! somebody else owns. `no_std`, no dependencies; it makes no system call and never waits.
//!
//! What the bytes mean is written in `spec/layout.md`, who does what when in `spec/protocol.md`; the names of the
//! synchronisation edges (`[publish]`, `[release]`, `[sleep]`, `[close]`) are the same there, in the code and in the tests.
//!
//! - [`Producer`] reserves room, commits or aborts; [`Consumer`] peeks, releases, holds.
//! - [`Sleeper`] and [`Waker`] are the two ends of a sleep: who is about to sleep arms the first, who has published asks
//!   the second whether to ring.
//! - Every word that the peer writes is loaded once, checked against this side's own copy of the bounds, and only the
//!   copy is used; a violation is [`LaneError::Corrupt`], never an access out of bounds.
//!
//! Most users want the crate `pelton`, which brings the memory, the waiting and the names. This one is for those who
//! have memory and a way to sleep of their own.

#![cfg_attr(not(any(loom, test)), no_std)]

extern crate alloc;

mod consumer;
mod edges;
#[cfg(all(feature = "failpoints", not(loom)))]
#[doc(hidden)]
pub mod failpoints;
mod layout;
mod memory;
mod producer;
mod sleep;

pub use consumer::{Chunk, Consumer, Cursor, Record, Scan, Ticket, find_end, scan, truncate};
#[doc(hidden)]
pub use edges::failpoint;
#[cfg(loom)]
pub use edges::model_membarrier;
/// For the crate `pelton`, whose edges are modelled with this one's.
#[doc(hidden)]
pub mod sync {
    pub use crate::edges::{AtomicBool, AtomicU32, AtomicU64, Edge};
}
pub use layout::{
    CAPACITY_MAX, CAPACITY_MIN, ChannelPage, ConsumerPage, LANES_MAX, LAYOUT_SIGNATURE, LAYOUT_TEXT, MAGIC_CHANNEL,
    MAGIC_CONSUMER, MAGIC_PRODUCER, MAGIC_RECEIVER, Position, Preamble, ProducerPage, ReceiverPage, SEGMENT_BYTES,
    State, WINDOW, WIRE_VERSION, capacity_is_valid, fnv1a, message_bytes_limit, record_bytes, seq_after,
};
#[cfg(loom)]
pub use memory::Slot;
pub use memory::{Data, Memory};
pub use producer::{Batch, Producer, ReservedSpace};
pub use sleep::{Sleeper, Wake, Waker};

/// What a lane refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LaneError {
    /// The message is larger than the lane's limit. Send less, or create the lane with twice the capacity.
    TooLarge {
        /// The size asked for.
        bytes: u64,
        /// The largest that this lane takes.
        bytes_max: u64,
    },
    /// A word that the peer writes breaks the rules of the layout. The lane is not to be used further.
    Corrupt {
        /// Which word.
        what: &'static str,
        /// The value found there.
        found: u64,
        /// The bound or value that it breaks.
        wanted: u64,
    },
    /// The consumer has closed: nobody will read what is sent now.
    Closed,
    /// The data needs memory behind its first so many bytes: allocate it, say so with [`Producer::set_backed`], try again.
    Unbacked {
        /// At least so many, from the start of the data.
        bytes: u64,
    },
}

impl core::fmt::Display for LaneError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            LaneError::TooLarge { bytes, bytes_max } => {
                write!(f, "message of {bytes} bytes is larger than this lane's limit of {bytes_max}")
            }
            LaneError::Corrupt { what, found, wanted } => {
                write!(f, "the peer broke the lane's rules: {what} is {found:#x}, wanted {wanted:#x}")
            }
            LaneError::Closed => write!(f, "the consumer has closed the lane"),
            LaneError::Unbacked { bytes } => write!(f, "the lane needs {bytes} bytes of its data allocated"),
        }
    }
}

impl core::error::Error for LaneError {}
