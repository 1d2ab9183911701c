//! Messages at memory speed between the threads and processes of one machine.
//!
//! A **channel** is a [`Sender`] and a [`Receiver`] over a *lane*: a ring of variable-size messages in shared memory with
//! one producer and one consumer. While both sides are awake a message costs no system call, no lock and no fence. A
//! channel is made by *connect*, between two processes that find each other under a name; by *path*, in a directory that
//! outlives both sides; or between *threads*.
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
//! - A side that ends without closing is told to the other as [`Error::PeerDied`], by proof (its socket, its pidfd, its hold on a directory), never
//!   by a timeout: a stopped process is not a dead one. The survivor keeps the lane, and `resume` offers everything
//!   unreleased to the successor.
//! - What the other process writes is checked before it is used: [`Error::Corrupt`], never an access out of bounds.
//!   Receiving in place trusts the sender not to write after it has committed; [`Receiver::receive_into`] copies and is
//!   safe against any peer.
//! - A forked child's inherited handles answer [`Error::Forked`] and do nothing when dropped.
//!
//! # In a directory
//! A *path* channel is a directory ([`Options::create_sender`], [`Options::open_receiver`]; [`inspect`] looks at one from
//! outside). Either side may come first, both may die and restart: everything committed and not released is kept.
//! - The other side's end is told once, by [`Error::Closed`] or [`Error::PeerDied`], and then the handle goes on: a sender fills
//!   the lane for the next receiver, a receiver waits for the next sender. `resume` waits until the other side is there.
//! - A sender's successor goes on behind the last committed message ([`Sender::next_seq`] says where that is); a receiver's
//!   begins with the oldest unreleased one, and [`Message::is_redelivered`] says what may have been seen before.
//! - With [`Options::lanes`] several senders have a lane each, and one receiver serves them by turns, at most 64 messages of
//!   one at a time. It is told the end once the last of them has gone; also if that was before it came, after the messages
//!   that they left.
//! - Whoever may write the directory's files is trusted not to damage them.
//!
//! ```
//! # fn main() -> pelton::Result<()> {
//! let directory = std::env::temp_dir().join(format!("pelton-path-doc-{}", std::process::id()));
//! let mut sender = pelton::Options::new().capacity(1 << 20).create_sender(&directory)?;
//! sender.send(b"kept")?;
//! drop(sender);
//! let mut receiver = pelton::Options::new().open_receiver(&directory)?;
//! assert_eq!(&*receiver.receive()?, b"kept");
//! drop(receiver);
//! pelton::inspect::remove(&directory)?;
//! # Ok(())
//! # }
//! ```
//!
//! # Many senders
//! [`Options::gather_at`] makes a receiver that takes in every sender that connects under a name, up to 1,024, each with a
//! lane of its own: no sender waits for another, or is harmed by its end. One wait and one descriptor are for all, also for
//! those who come and go; a message says whose it is ([`Message::lane`], [`Message::peer`]), and with [`Options::announce`]
//! also that a sender has come or gone. They are served by turns, at most 64 messages of one at a time; one that has been idle
//! waits at most another turn for each 32 idle ones. [`Options::gather`] does the same for threads, which make their senders
//! by [`Senders`].
//!
//! # Whole buffers
//! `Flush::new` takes what a receiver receives to a [`Sink`]: a closure, another channel ([`Forward`]), or a [`RecordFile`], which
//! [`RecordReader`] and `pelton cat` read. It gets a bufferful at a time, uncopied, and what it took is released. Of a path channel each
//! message is in the file once, also if the process is killed at any point and started again. `Appenders::new` does the same
//! for threads that append, each to a buffer of its own, which it flushes itself when it is full.
//!
//! # Calls
//! A [`Client`] asks a [`Service`] in another process or thread, and awaits the answer: [`Client::call`]. Up to 1,024 calls are in
//! flight at a time, and are answered in any order ([`Client::submit`], [`Client::completion`]), by replies, by parts and an
//! end, or by a failure with a code ([`Outcome`]); the service takes the requests of up to 1,024 clients in turn, in a loop of
//! its own ([`Service::receive`]) or on several threads ([`Service::run`]), and answers from any thread ([`Responder`]).
//! - A service that dies fails its calls at once. Whether it had carried them out nobody knows: a call is not repeated, unless
//!   [`Client::mark_idempotent`] allows it.
//! - Several processes may serve one short name. A client spreads its calls to the least busy; a new version takes over while calls
//!   run, by [`Stopper::drain`] in the old one: no call fails, and none is done twice.
//! - A client that does not read its replies stalls itself alone; one that does not read a stream also keeps the threads that wait
//!   for it, unless they do so by [`Responder::part_until`]. Two full lanes never wait for each other.
//! - Requests and replies of up to [`Options::call_bytes_max`] travel, in pieces if need be.
//!
//! ```
//! # fn main() -> pelton::Result<()> {
//! let name = format!("unix:{}/calls-doc-{}", std::env::temp_dir().display(), std::process::id());
//! let mut service = pelton::Service::listen(&name)?;
//! let stopper = service.stopper();
//! let serving = std::thread::spawn(move || {
//!     service.run(2, |request| {
//!         let _ = match std::str::from_utf8(&request).ok().and_then(|text| text.parse::<u64>().ok()) {
//!             Some(number) => request.reply((number + 1).to_string().as_bytes()),
//!             None => request.fail(1, b"no number"),
//!         };
//!     })
//! });
//! let mut client = pelton::Client::connect(&name)?;
//! assert_eq!(&*client.call(b"41")?, b"42");
//! assert_eq!(client.call(b"forty-one")?.outcome(), pelton::Outcome::Failed(1));
//! stopper.stop();
//! # serving.join().unwrap()
//! # }
//! ```
//!
//! # Files
//! The module [`mod@file`] has an engine for operations on files, which never keeps an event loop waiting.
//!
//! # In an event loop
//! Both ends are `AsFd`. The descriptor is level-triggered in meaning, between `arm` and the next `arm`:
//! 1. *arm*: [`Receiver::arm`] (or [`Sender::arm`]) answers `true` when nothing is there: go back to the loop.
//!    `false`: something is there already, go to 2 (the descriptor is readable too, so going back loses nothing).
//! 2. *check*: when the descriptor is readable, take messages with [`Receiver::try_receive`] until `None`, or as many as
//!    the loop can afford (it stays readable), then arm again.
//! 3. *disarm*: before using the waiting methods, or when the loop loses interest.
//!
//! [`Client`], [`Service`] and [`file::Engine`] have the same three.
//!
//! # Copies, iterators, values
//! [`Receiver::receive`] borrows a message in place. [`Receiver::receive_vec`] and the iterator [`Receiver::messages`]
//! return copies, which no sender can change. The module `values` (feature `zerocopy`) sends a value's bytes, and reads
//! them in place; `encoded` (feature `postcard`) sends any value with serde, by messages and by calls.
//!
//! # Features
//! | feature | on by default | content |
//! |---|---|---|
//! | `call` | yes | [`Client`], [`Service`] |
//! | `file` | yes | the module [`mod@file`] |
//! | `flush` | yes | `Flush`, `Appenders`, record files |
//! | `tokio` | no | the module `tokio`: endpoints, streams, sinks, clients, services, files; with `call` and `file` |
//! | `postcard` | no | the module `encoded` |
//! | `zerocopy` | no | the module `values` |
//!
//! `docs/decisions/0035-features.md` has what each costs a build.
//!
//! # Threads
//! Handles are `Send` and not `Sync`: one thread at a time. For many threads make many senders; [`Senders`] is for all.

#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "file")]
#[cfg_attr(docsrs, doc(cfg(feature = "file")))]
#[doc(inline)]
pub use pelton_file as file;
#[cfg(feature = "postcard")]
#[cfg_attr(docsrs, doc(cfg(feature = "postcard")))]
pub mod encoded;
#[cfg(feature = "tokio")]
#[cfg_attr(docsrs, doc(cfg(feature = "tokio")))]
pub mod tokio;
#[cfg(feature = "zerocopy")]
#[cfg_attr(docsrs, doc(cfg(feature = "zerocopy")))]
pub mod values;

#[cfg(feature = "call")]
#[cfg_attr(docsrs, doc(cfg(feature = "call")))]
#[doc(inline)]
pub use pelton_call::{
    Answering, CallId, Client, Completion, Loss, Outcome, ReplyReservation, Request, RequestReservation, Responder,
    Service, Stopper,
};
#[doc(inline)]
pub use pelton_channel::{
    Armed, Batch, Counters, Deadline, Departure, Error, Event, Held, LaneId, Listener, Member, Message, Messages,
    Options, Peer, Receiver, Reservation, Result, Sender, Senders, Sent, SentBatch, Wait, inspect, options,
};
#[cfg(feature = "flush")]
#[cfg_attr(docsrs, doc(cfg(feature = "flush")))]
#[doc(inline)]
pub use pelton_flush::{
    Appender, Appenders, Chunk, FileChange, FileChunk, Flush, Forward, Record, RecordFile, RecordFileOptions,
    RecordReader, Records, Sink,
};
#[cfg(feature = "failpoints")]
#[doc(hidden)]
pub use pelton_lane::failpoints;

/// For FFI, and for the crates of this project: not stable.
#[doc(hidden)]
pub mod raw {
    #[cfg(feature = "call")]
    pub use pelton_call::raw::{
        Inbox, RawCompletion, RawReplyReservation, RawRequest, RawRequestReservation, StoredCompletion,
    };
    pub use pelton_channel::raw::*;
}
