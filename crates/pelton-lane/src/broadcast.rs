//! A broadcast lane: one producer, and up to 64 consumers with a cursor each. `spec/broadcast.md` defines its bytes and
//! steps.
//!
//! Records, marks, jumps and the window are those of a plain lane, and a plain [`crate::Producer`] places them. Its
//! head is a word of its own: the broadcast producer moves it to the place of `kept`, the oldest message that it must
//! not overwrite. It finds that number from the numbers in the consumers' pages, and the place from waypoints of its
//! own.
//!
//! - B1. The producer writes no byte of a record numbered `kept` or later.
//! - B2. `kept` only grows, and is stored before the first byte of a record below it is overwritten. `[keep]`
//! - B3. The producer takes no place from a consumer's page, only numbers.
//! - B4. The producer never passes a cursor that gates, while it is joined.

mod by_path;
mod consumer;
mod pages;
mod producer;
mod table;

pub use by_path::JoinByPath;
pub use consumer::{BroadcastConsumer, Copied};
pub use pages::{
    BROADCAST_SIGNATURE, BROADCAST_TEXT, BroadcastPage, CURSORS_MAX, CursorPage, MAGIC_BROADCAST, MAGIC_CURSOR, Policy,
    broadcast_preamble, seq_of,
};
pub use producer::{BroadcastMemory, BroadcastProducer, CursorLoss, Holder, Joined, StartFrom};
pub use table::{CursorTable, DURABLE_BYTES_MAX, MAGIC_TABLE, TABLE_SIGNATURE, TABLE_TEXT, TableSlot};
