//! Files, without ever keeping an event loop waiting: the third verb.
//!
//! An [`Engine`] does [`Operation`]s. What the page cache has is answered within the call that asks; everything else goes to io_uring, or, where
//! that is refused, to some threads. Each operation can be done in two ways:
//! - [`Engine::run`] waits for it, [`Engine::run_until`] not beyond a deadline;
//! - [`Engine::try_submit`] asks, with a token of the caller's; [`Engine::completion`] brings the token back, with what came of it and the memory that
//!   went in. The engine has one descriptor for an event loop, and [`Engine::arm`] and [`Engine::disarm`] mean what they mean for a
//!   [`Receiver`](pelton_channel::Receiver), so one loop serves channels and files.
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
//! - A read is filled up to the end of the file, and a write is written whole; if an error comes after some bytes, the count says so, and the
//!   next operation tells the error. EINTR and EAGAIN are never seen.
//! - An error is an [`Error::File`](pelton_channel::Error::File): what was done, its path, the name of the errno.
//! - A buffer belongs to its operation until that has ended: it comes back with the completion, also of one that failed or was cancelled. Dropping
//!   an engine cancels what is in flight, does not wait, and frees each buffer only when the kernel is done with it.
//! - An [`Error::System`](pelton_channel::Error::System) of a call that begins or takes operations ([`Engine::start`], [`Engine::arm`], [`Engine::try_completion`] and others: the
//!   kernel has no memory, or no threads, for now) concerns no operation. Each one that was submitted stays in flight, and completes once, with its
//!   token, by a later call; the engine's descriptor is readable until a call succeeds. So a caller that goes on after such an error
//!   has a token of its own for each operation, and compares it. To give an operation up: [`Engine::cancel`], and take its completion.
//! - At most [`EngineOptions::in_flight_max`] operations are in flight; what is beyond comes back to the caller.
//! - The rooted engine ([`EngineOptions::root`]) opens nothing outside its directory, whatever the paths and the links there say.
//! - A forked child owns nothing of an engine's: [`Error::Forked`](pelton_channel::Error::Forked).
//!
//! # Invariant
//! - Memory that the kernel may write belongs to the ring: an operation enters `os/ring.rs` whole, and leaves it only with
//!   its completion.

mod engine;
#[cfg(feature = "failpoints")]
#[doc(hidden)]
pub mod faults;
#[cfg(not(feature = "failpoints"))]
mod faults;
mod file;
mod interrupt;
mod operation;
mod perform;
mod pool;
mod pump;
mod ring;
#[cfg(feature = "flush")]
mod tail;

pub use engine::{Completion, Engine, EngineOptions, Submitted};
pub use file::File;
pub use operation::{Entry, Kind, Open, Operation, Output, Stat};
pub use pelton_os::Buffer;
#[cfg(feature = "flush")]
pub use tail::Tail;
