//! A lane: a single-producer single-consumer ring of variable-size records, over memory that the caller owns. `no_std`,
//! no dependencies; it makes no system call and never waits.
//!
//! `spec/layout.md` defines the bytes, `spec/protocol.md` the steps of each side. The synchronisation edges
//! (`[publish]`, `[release]`, `[sleep]`, `[close]`, `[fenced]`, `[keep]`) have the same names there, in the code and in
//! the tests.
//!
//! - [`Producer`] reserves, commits or aborts; [`Consumer`] peeks, releases, holds. To commit is to publish, and to
//!   check whether the peer sleeps. [`Producer::publish`] and the `*_fast` functions of both leave the check to the
//!   caller.
//! - [`Sleeper`] and [`Waker`] are the two ends of a sleep: a side arms its sleeper before it sleeps, and the peer's
//!   waker returns after each publication whether to ring.
//! - [`BroadcastProducer`] and [`BroadcastConsumer`] are the sides of a lane with up to 64 consumers, each with a
//!   cursor and a policy of its own (`spec/broadcast.md`).
//! - Each side loads a word of its peer once, checks the copy against its own bounds, and uses only the copy. A
//!   violation is [`LaneError::Corrupt`], never an access out of bounds.
//!
//! Most users want the crate `pelton`, which provides memory, waiting and names. Use this crate if you have your own
//! memory and your own way to sleep.

#![cfg_attr(not(any(loom, test)), no_std)]

extern crate alloc;

mod broadcast;
mod consumer;
mod edges;
mod error;
#[cfg(all(feature = "_failpoints", not(loom)))]
#[doc(hidden)]
pub mod failpoints;
mod layout;
mod memory;
mod producer;
mod sleep;

pub use broadcast::{
    BROADCAST_SIGNATURE, BROADCAST_TEXT, BroadcastConsumer, BroadcastMemory, BroadcastPage, BroadcastProducer,
    CURSORS_MAX, Copied, CursorLoss, CursorPage, CursorTable, DURABLE_BYTES_MAX, Holder, JoinByPath, Joined,
    MAGIC_BROADCAST, MAGIC_CURSOR, MAGIC_TABLE, Policy, StartFrom, TABLE_SIGNATURE, TABLE_TEXT, TableSlot,
    broadcast_preamble, seq_of,
};
pub use consumer::{Chunk, Consumer, Cursor, Record, Scan, Ticket, find_end, scan, truncate};
#[doc(hidden)]
pub use edges::failpoint;
#[cfg(loom)]
pub use edges::model_membarrier;
/// For the crate `pelton` and for Python's queue: the loom models here include their edges.
#[doc(hidden)]
pub mod sync {
    pub use crate::edges::{AtomicBool, AtomicU32, AtomicU64, Edge, full_fence};
}
pub use error::LaneError;
pub use layout::{
    CAPACITY_MAX, CAPACITY_MIN, ChannelPage, ConsumerPage, LANES_MAX, LAYOUT_SIGNATURE, LAYOUT_TEXT, LastRing,
    MAGIC_CHANNEL, MAGIC_CONSUMER, MAGIC_PRODUCER, MAGIC_RECEIVER, Position, Preamble, ProducerPage, ReceiverPage,
    SEGMENT_BYTES, State, TRACE_BYTES, WINDOW, WIRE_VERSION, capacity_is_valid, fnv1a, message_bytes_limit,
    record_bytes, seq_after, traced_message_bytes_limit,
};
#[cfg(loom)]
pub use memory::LoomWord;
#[cfg(not(loom))]
pub use memory::{COPY_INLINE_MAX, append, copy};
pub use memory::{Data, Memory};
pub use producer::{Batch, Producer, ReservedSpace};
pub use sleep::{Sleeper, Wake, Waker};
