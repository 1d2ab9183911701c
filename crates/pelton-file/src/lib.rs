//! Files for event loops: an engine whose calls do not block.
//!
//! An [`Engine`] performs [`Operation`]s. It serves what the page cache has inside the call. Everything else goes to
//! io_uring, or, where the system refuses that, to threads. A caller has two ways:
//! - [`Engine::run`] performs an operation and waits for it, [`Engine::run_until`] up to a deadline;
//! - [`Engine::try_submit`] submits one with a token of the caller's choice. [`Engine::completion`] returns the token,
//!   the outcome, and the operation's memory. The engine has one descriptor for an event loop. [`Engine::arm`] and
//!   [`Engine::disarm`] work as those of a [`Receiver`](pelton_channel::Receiver), so one loop serves channels and
//!   files.
//!
//! ```
//! # fn main() -> pelton::Result<()> {
//! # let directory = tempfile::tempdir().unwrap();
//! # let path = directory.path().join("notes");
//! use pelton::file::{Engine, Open, Operation};
//!
//! let mut engine = Engine::new()?;
//! let file = engine.run(Operation::open(&path, Open::for_both().create(0o644)))?.into_file()?;
//!
//! // Waits for each:
//! engine.run(Operation::write_at(&file, "hello, file", 0))?;
//! let done = engine.run(Operation::read_at(&file, vec![0; 5], 0))?;
//! assert_eq!(done.bytes(), b"hello");
//!
//! // Many at a time, in any order:
//! for (token, offset) in [(1, 0), (2, 7)] {
//!     assert!(engine.try_submit(token, Operation::read_at(&file, vec![0; 4], offset))?.is_submitted());
//! }
//! while engine.in_flight() > 0 {
//!     let done = engine.completion()?;
//!     match &done.outcome {
//!         Ok(_) => println!("{}: {}", done.token, String::from_utf8_lossy(done.bytes())),
//!         Err(error) => println!("{}: {error}", done.token),
//!     }
//! }
//!
//! // One after the other, until one fails:
//! let chain = [(3, Operation::write_at(&file, "HELLO", 0)), (4, Operation::sync_data(&file))];
//! assert!(engine.try_submit_chain(chain)?.is_submitted());
//! engine.close()
//! # }
//! ```
//!
//! # What is promised
//! - Operations are independent, and end in any order, unless they are a chain.
//! - A read fills its buffer unless the file ends, and a write writes everything. If an error comes after some bytes,
//!   the count shows that, and the next operation reports the error. No caller sees EINTR or EAGAIN.
//! - An error is an [`Error::File`](pelton_channel::Error::File): the action, the path, the name of the errno.
//! - A buffer belongs to its operation until that has ended. Each completion returns it, also of an operation that
//!   failed or was cancelled.
//! - Dropping an engine cancels operations in flight, does not wait for them, and frees each buffer only when the
//!   kernel no longer uses it. It may close files, and a file server can delay that: see [`Engine`].
//! - An [`Error::System`](pelton_channel::Error::System) of a call that begins or takes operations ([`Engine::start`],
//!   [`Engine::arm`], [`Engine::try_completion`] and others) concerns no operation: the kernel lacks memory or threads
//!   at the moment. Each submitted operation stays in flight, and completes once, with its token, in a later call. The
//!   engine's descriptor is readable until a call succeeds. A caller that continues after such an error therefore uses
//!   a unique token per operation. To give an operation up, call [`Engine::cancel`] and take its completion.
//! - At most [`EngineOptions::in_flight_max`] operations are in flight; the engine returns further ones to the caller.
//! - An engine with a root ([`EngineOptions::root`]) opens nothing outside that directory, whatever paths and links
//!   contain.
//! - A forked child owns nothing of an engine: [`Error::Forked`](pelton_channel::Error::Forked).
//!
//! # Invariant
//! - Memory that the kernel may write belongs to the ring: an operation moves into `ring.rs` completely, and leaves it
//!   only with its completion.

// Where things are:
// - `operation`: the operations, and the table of all of them; `transfer`: reads and writes; `completion`: their ends.
// - `engine`: owns what is in flight, and chooses: inline (`transfer`), io_uring (`ring`), or threads (`pool`).
// - `perform`: the system calls of a thread; `cancel`: what interrupts it; `pump`: from files to channels and back.
// - `file`: an open file, and the root of an engine; `tail`: a plain file as a sink; `faults`: for tests.
mod cancel;
mod completion;
mod engine;
#[cfg(feature = "_failpoints")]
#[doc(hidden)]
pub mod faults;
#[cfg(not(feature = "_failpoints"))]
mod faults;
mod file;
mod operation;
mod perform;
mod pool;
mod pump;
mod ring;
#[cfg(feature = "flush")]
mod tail;
mod transfer;

pub use completion::{Completion, Submitted};
pub use engine::{Engine, EngineOptions};
pub use file::File;
pub use operation::{Entry, Kind, Open, Operation, Output, Stat};
pub use pelton_os::Buffer;
#[cfg(feature = "flush")]
pub use tail::Tail;
