//! What pelton requests of the operating system: memory, descriptors, sockets, doorbells, locks, barriers, and state
//! after a fork. An internal crate: its interface is not stable.
//!
//! Nearly all `unsafe` of system calls and mappings is here. `crates/pelton/src/lib.rs` lists the other places.

mod buffer;
mod descriptor;
mod doorbell;
mod errno;
mod foreign;
pub mod fork;
mod inherited;
pub mod lock;
pub mod membarrier;
mod mutex;
mod poll;
mod received_fd;
mod segment;
pub mod socket;
mod syncer;
mod thread;
mod timer;
mod user;
mod watch;

/// The target of every log record of the libraries.
pub const LOG_TARGET: &str = "pelton";

pub use buffer::Buffer;
pub use descriptor::Descriptor;
pub use doorbell::{Doorbell, LocalWake};
pub use errno::errno_name;
pub use foreign::{Credentials, ForeignFile, NotOpened, open_memfds};
pub use fork::Owner;
pub use inherited::Inherited;
pub use mutex::{locked, wait_on};
pub use poll::{Event, Pollable, Ready, poll_until};
pub use received_fd::{ReceivedFd, overdue};
pub use segment::{Kind, PIECE, Segment, allocate, can_allocate, check_file_size, lane_memory, write_at};
pub use socket::Peer;
pub use syncer::{Syncer, sync};
pub use thread::{block_signals, has_two_processors, processor, relax};
pub use timer::{Timer, coarse_monotonic_ns, monotonic_ns};
pub use user::{ambiguous_uid_text, is_ambiguous_uid, own_uid};
pub use watch::Watch;
