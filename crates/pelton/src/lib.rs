//! Messages at memory speed between the threads and processes of one machine.
//!
//! A **channel** is a [`Sender`] and a [`Receiver`] over a *lane*: a ring of variable-size messages in shared memory,
//! with one producer and one consumer. While both sides are awake, a message costs no system call, lock or fence. There
//! are three kinds: *connect*, between two processes, by a name; *path*, in a directory that outlives both sides;
//! and between *threads*.
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
//! # Guarantees
//! - No message is ever torn, and none is dropped silently. While the lane is full, `send` waits and `try_send` returns
//!   [`Sent::Full`].
//! - If a process ends without closing, its peer gets [`Error::PeerDied`]. The proof is its socket, its pidfd or its
//!   lock, never a timeout: a stopped process counts as alive. The survivor keeps the lane, and `resume` offers all
//!   unreleased messages to the successor.
//! - Each word from the other process is checked before use: the result is [`Error::Corrupt`], never an access out of
//!   bounds. Receiving in place trusts the sender not to write after the commit; [`Receiver::receive_into`] copies and
//!   is safe against any peer.
//! - In a forked child the inherited handles return [`Error::Forked`], and dropping them does nothing.
//!
//! # In a directory
//! A *path* channel is a directory ([`Options::create_sender`], [`Options::open_receiver`]; [`inspect`] shows one from
//! outside). Either side may start first, and both may die and restart: all committed, unreleased messages are kept.
//! - Each endpoint reports its peer's end once, by [`Error::Closed`] or [`Error::PeerDied`], and stays usable. A sender
//!   fills the lane for the next receiver; a receiver waits for the next sender. `resume` waits for the other side.
//! - A sender's successor continues after the last committed message ([`Sender::next_seq`]). A receiver's successor
//!   begins at the oldest unreleased message; [`Message::is_redelivered`] marks those that its predecessor may have
//!   seen.
//! - With [`Options::lanes`] several senders have a lane each. One receiver serves the lanes round-robin, at most 64
//!   messages of one at a time. It reports the end after the last sender has left and its messages are received.
//! - A process that may write the directory's files is trusted not to damage them.
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
//! [`Options::gather_at`] creates a receiver of up to 1,024 senders, which connect under one name. Each has its own
//! lane: no sender waits for another, and the end of one affects no other. One wait and one descriptor serve all of
//! them. A message has its sender's lane and process ([`Message::lane`], [`Message::peer`]). With
//! [`Options::membership_events`] the receiver also reports when a sender joins or leaves. Lanes are served
//! round-robin, at most 64 messages of one at a time. Before a message of a lane that was idle come at most 64 messages
//! of each busy lane, and 64 more for each 8 idle lanes.
//! [`Options::gather`] does the same for threads, which make their senders by [`Senders`].
//!
//! # Publish and subscribe
//! A [`Publisher`] sends each message to up to 64 [`Subscriber`]s, which join and leave at any time. The message is in
//! memory once. Each subscriber chooses what happens when it falls behind ([`Policy`]): the publisher waits for it, or
//! it misses messages and learns exactly how many ([`Delivery::missed`]), or it receives the newest message only. It
//! begins with the next message, or with earlier ones ([`StartFrom`]).
//!
//! # Whole buffers
//! `Flush` hands the messages of a receiver to a [`Sink`], a buffer at a time, without a copy, and then releases
//! them. A sink is a closure, another channel ([`Forward`]), or a [`RecordFile`], which [`RecordReader`] and `pelton
//! cat` read. Of a path channel each message is in the file once, also if the process is killed at any point and
//! restarted. `Appenders` do the same for threads. Each thread appends to its own buffer, and flushes it when it is
//! full.
//!
//! # Calls
//! A [`Client`] sends requests to a [`Service`] in another process or thread: [`Client::call`] waits for the reply. Up
//! to 1,024 calls are in flight at a time and complete in any order ([`Client::submit`], [`Client::completion`]): by a
//! reply, by parts and an end, or by a failure with a code ([`Outcome`]). The service takes requests of up to 1,024
//! clients, in a loop of its own ([`Service::receive`]) or on several threads ([`Service::run`]), and replies from any
//! thread ([`Responder`]).
//! - A call that the service fails is `Ok` with [`Outcome::Failed`]; [`Completion::ok`] turns it into an error.
//! - The death of a service fails its calls immediately. It is unknown whether the service carried them out, so the
//!   client repeats none, unless [`Client::mark_idempotent`] allows it.
//! - Several processes may serve one short name. A client sends each call to the least busy. A new version takes over
//!   while calls run, by [`Stopper::drain`] in the old one: no call fails, and none is done twice.
//! - A client that does not read its replies delays only itself. One that does not read a stream also keeps the threads
//!   that wait for it, unless they use [`Responder::part_until`]. When both lanes are full, neither side blocks the
//!   other.
//! - Requests and replies may have up to [`Options::call_bytes_max`] bytes; large ones travel in pieces.
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
//! assert_eq!(&*client.call(b"41")?.ok()?, b"42");
//! assert_eq!(client.call(b"forty-one")?.outcome(), pelton::Outcome::Failed(1));
//! stopper.stop();
//! # serving.join().unwrap()
//! # }
//! ```
//!
//! # Files
//! The module [`mod@file`] has an engine for file operations, which never blocks an event loop.
//!
//! # Log
//! The crate [`log`](https://docs.rs/log) receives, with the target `pelton` and the level `Warn`, peers that were
//! refused, with process, user and reason, and fallbacks where the system refuses membarrier or io_uring. Refused peers
//! have at most one line per second, which counts those before it without a line; at the end of a listener, a last line
//! counts the rest. Nothing is logged for each message.
//! Without a logger there is no log. The logger runs within a call, which may hold locks: it must use no endpoint.
//!
//! # In an event loop
//! Both endpoints are `AsFd`. Use the descriptor like a level-triggered one, between one `arm` and the next:
//! 1. *arm*: [`Receiver::arm`] or [`Sender::arm`] returns [`Armed::Waiting`]: return to the loop. Or it returns
//!    [`Armed::Ready`]: go to 2.
//! 2. *check*: when the descriptor is readable, call [`Receiver::try_receive`] until it returns `None`, or as often as
//!    the loop can afford: the descriptor stays readable. Then arm again.
//! 3. *disarm*: before a method that waits, or when the loop loses interest.
//!
//! A peer that answers within microseconds costs less if the loop first calls [`Receiver::busy_poll`] or
//! [`Sender::busy_poll`], and arms only if that returns false. [`Client`], [`Service`] and [`file::Engine`] have the
//! same four methods. Connecting and opening a path without waiting: [`Opening`]. Waiting for a successor without
//! waiting in a call: [`Resuming`].
//!
//! # How a side waits
//! A side that finds nothing polls its peer's memory, for 50 µs. It does not poll if the peer last woke it from the
//! processor on which it runs itself, where the peer could not run meanwhile, and rarely if polling was useless lately.
//! If both processes may use only one and the same processor, it yields once instead. Then it announces that it sleeps,
//! checks once more, and sleeps in the kernel until the peer wakes it, the peer dies, or the time is over; where the
//! kernel has membarrier, no timer runs, so an idle channel costs nothing. An event loop follows the same rule, in all
//! languages: `busy_poll` polls, `arm` announces and checks, and the loop's own epoll sleeps.
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
//! | `zstd` | no | compressed record files: `RecordFileOptions::compress_zstd`; with `flush` |
//!
//! `docs/decisions/0035-features.md` has what each costs a build.
//!
//! # Threads
//! Handles are `Send` and not `Sync`: one thread at a time. Each thread makes its own sender. [`Senders`], `Appenders`,
//! [`Listener`], `Stopper` and `AsyncClient` are `Sync`.

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
    BorrowedResponder, CallId, Client, Completion, Loss, Outcome, ReplyReservation, Request, RequestReservation,
    Responder, Service, Stopper,
};
#[doc(inline)]
pub use pelton_channel::{
    Armed, Batch, BatchReservation, CallFailure, ConnectDeadline, Counters, Deadline, Delivery, Departure, Error,
    Event, Held, LaneId, Listener, Member, Message, Messages, Opening, Options, Peer, Policy, Publisher, Receiver,
    Reservation, Result, Resuming, Sender, Senders, Sent, StartFrom, Subscriber, SubscriberEvent, SubscriberSet,
    SubscriberState, Traceparent, Wait, inspect, observe, options,
};
#[cfg(feature = "flush")]
#[cfg_attr(docsrs, doc(cfg(feature = "flush")))]
#[doc(inline)]
pub use pelton_flush::{
    Appender, Appenders, Chunk, FileChange, FileChunk, Flush, Forward, Record, RecordFile, RecordFileOptions,
    RecordReader, Records, Sink,
};
#[cfg(feature = "_failpoints")]
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
