//! Calls: the second verb. A *link* is two lanes, there and back, that one handshake makes; a *client* writes requests into the
//! one and reads replies from the other; a *service* gathers the requests of all its clients as any receiver of many senders
//! does, and has for each the lane back. `spec/call.md` has what is in the records.
//!
//! - `frame.rs`: the header before each request and reply, every check of a peer's, and messages cut into pieces;
//! - `outbox.rs`: the way into one lane, and what waits for room there;
//! - `raw.rs`, in several places: for bindings;
//! - `service.rs`, with `caller.rs` (each of its clients), `hold.rs` (one in the hands of who answers), `edges.rs` (what threads tell
//!   each other without a lock), `responder.rs` (requests and what answers them) and `pool.rs` (threads);
//! - `client.rs` and `client/`, with `calls.rs` (those in flight) and `crowd.rs` (its links, and how it finds services): the other
//!   side.
//!
//! Invariants:
//! - A side that waits for space in one lane of a link keeps reading the other, so two full lanes never wait for each other.
//! - A service's loop waits neither for a client's space nor for a lock of a replying thread.
//! - A call's slot becomes free only once its final reply is known; at the service, before that reply is published.
//! - A call is with one service at a time. Another service gets it only after the first has reported that it did not begin
//!   it, or is gone and the call is idempotent.

mod body;
mod caller;
mod calls;
mod client;
mod crowd;
mod edges;
mod frame;
mod hold;
mod leader;
mod outbox;
mod pool;
#[doc(hidden)]
pub mod raw;
mod responder;
mod service;
#[cfg(test)]
mod tests;

pub use calls::{CallId, Loss, Outcome};
pub use client::{Client, Completion, RequestRoom};
pub use responder::{Answering, ReplyRoom, Request, Responder};
pub use service::{Service, Stopper};
