//! Messages at memory speed between the threads and processes of one machine.
//!
//! A **channel** is a [`Sender`] and a [`Receiver`] over a *lane*: a ring of variable-size messages in shared memory with
//! one producer and one consumer. While both sides are awake a message costs no system call, no lock and no fence. A
//! channel is made by *connect*, between two processes that find each other under a name, or between *threads*.
//!
//! ```
//! # fn main() -> pelton::Result<()> {
//! let name = format!("unix:{}/pelton-doc-{}", std::env::temp_dir().display(), std::process::id());
//! let listener = pelton::Listener::bind(&name)?;
//!
//! // Usually another process:
//! let sending = std::thread::spawn(move || -> pelton::Result<()> {
//!     let mut sender = pelton::Sender::connect(&name)?;
//!     for line in ["one", "two", "three"] {
//!         sender.send(line.as_bytes())?;
//!     }
//!     sender.close()
//! });
//!
//! let mut receiver = listener.accept_receiver()?;
//! loop {
//!     match receiver.receive() {
//!         Ok(message) => println!("{}", String::from_utf8_lossy(&message)),
//!         Err(error) if error.is_closed() => break,
//!         Err(error) => return Err(error),
//!     }
//! }
//! # sending.join().unwrap()
//! # }
//! ```
//!
//! # What is promised
//! - No message is ever torn, and none is dropped silently: a full lane makes `send` wait and `try_send` answer
//!   [`Sent::Full`].
//! - A side that ends without closing is told to the other as [`Error::PeerDied`], by proof (its socket, its pidfd), never
//!   by a timeout: a stopped process is not a dead one. The survivor keeps the lane, and `resume` offers everything
//!   unreleased to the successor.
//! - What the other process writes is checked before it is used: [`Error::Corrupt`], never an access out of bounds.
//!   Receiving in place trusts the sender not to write after it has committed; [`Receiver::receive_into`] copies and is
//!   safe against any peer.
//! - A forked child's inherited handles answer [`Error::Forked`] and do nothing when dropped.
//!
//! # In an event loop
//! Both ends are `AsFd`. The descriptor is level-triggered in meaning, between `arm` and the next `arm`:
//! 1. *arm*: [`Receiver::arm`] (or [`Sender::arm`]) answers `true` when nothing is there: go back to the loop.
//!    `false`: something is there already, go to 2 (the descriptor is readable too, so going back loses nothing).
//! 2. *check*: when the descriptor is readable, take messages with [`Receiver::try_receive`] until `None`, or as many as
//!    the loop can afford (it stays readable), then arm again.
//! 3. *disarm*: before using the waiting methods, or when the loop loses interest.
//!
//! # Threads
//! Handles are `Send` and not `Sync`: one thread at a time. For many threads make many senders.

mod connect;
mod directory;
mod error;
mod handshake;
mod link;
mod name;
mod options;
mod os;
mod path;
mod receiver;
mod sender;
#[cfg(feature = "tokio")]
pub mod tokio;
mod wait;

pub use connect::Listener;
pub use error::{Error, Result};
pub use link::Peer;
pub use options::Options;
pub use receiver::{Batch, Held, Message, Receiver};
pub use sender::{Reservation, Sender, Sent, SentBatch};
pub use wait::Wait;

/// Figures of one side of a channel, since it was made. They cost nothing to keep: each side writes its own page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Messages sent or released.
    pub messages: u64,
    /// Their payload bytes.
    pub bytes: u64,
    /// Times that there was no room, or no message, and the operation waited or said so.
    pub waits: u64,
    /// Times that this side went to sleep, or armed its descriptor.
    pub sleeps: u64,
    /// Times that this side rang the other.
    pub wakes_sent: u64,
    /// The most messages in the lane that the sender noticed when it looked; 0 for a receiver.
    pub depth_max: u64,
}
