//! Calls: the second verb. A *link* is two lanes, one each way, that one handshake creates. A *client* writes requests
//! into one lane and reads replies from the other. A *service* gathers the requests of all its clients, as any receiver
//! of many senders does, and has a lane of replies to each. `spec/call.md` defines the records.
//!
//! - `frame.rs`: the header before each request and reply, every check of a peer's, and messages cut into pieces;
//! - `outbox.rs`: records into one lane, and the queue of those that wait for space; `body.rs`: the bytes of a message;
//! - the service: `service.rs`, with a session for each client (`session.rs`, `sessions.rs`). `session_ref.rs` has the
//!   references to one, `reply_lock.rs` its lock, `edges.rs` what threads share without a lock. `request.rs` (in memory
//!   of `placed.rs`) and `responder.rs` are what the user has; `pool.rs` and `leader.rs` are threads;
//! - the client: `client.rs` and `client/`, with `calls.rs` (the table of calls in flight) and `inbox.rs` (completions
//!   that wait for their caller);
//! - `raw.rs`, in several places: for FFI.
//!
//! Invariants:
//! - A side that waits for space in one lane of a link keeps reading the other, so two full lanes never wait for each
//!   other.
//! - A service's loop waits neither for a client's space nor for a lock of a replying thread.
//! - A call's slot becomes free only once its final reply is known; at the service, before that reply is published.
//! - A call is with one service at a time. Another service gets it only after the first has reported that it did not
//!   begin it, or is gone and the call is idempotent.

mod body;
mod calls;
mod client;
mod edges;
mod frame;
mod inbox;
mod leader;
mod outbox;
mod placed;
mod pool;
#[doc(hidden)]
pub mod raw;
mod reply_lock;
mod request;
mod responder;
mod service;
mod session;
mod session_ref;
mod sessions;
#[cfg(test)]
mod tests;

pub use calls::{CallId, Loss, Outcome};
pub use client::{Client, Completion, RequestReservation};
pub use request::Request;
pub use responder::{BorrowedResponder, ReplyReservation, Responder};
pub use service::{Service, Stopper};
