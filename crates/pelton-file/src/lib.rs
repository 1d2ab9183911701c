//! Files, without ever keeping an event loop waiting: the third verb.
//!
//! An [`Engine`] does [`Operation`]s. What the page cache has is answered within the call that asks; everything else goes to io_uring, or, where
//! that is refused, to some threads. Each operation can be done in two ways:
//! - [`Engine::run`] waits for it, [`Engine::run_until`] not beyond a deadline;
//! - [`Engine::try_submit`] asks, with a token of the caller's; [`Engine::completion`] brings the token back, with what came of it and the memory that
//!   went in. The engine has one descriptor for an event loop, and [`Engine::arm`] and [`Engine::disarm`] mean what they mean for a
//!   [`Receiver`](crate::Receiver), so one loop serves channels and files.
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
//! - An error is an [`Error::File`]: what was done, its path, the name of the errno.
//! - A buffer belongs to its operation until that has ended: it comes back with the completion, also of one that failed or was cancelled. Dropping
//!   an engine cancels what is in flight, does not wait, and frees each buffer only when the kernel is done with it.
//! - An [`Error::System`] of a call that begins or takes operations ([`Engine::start`], [`Engine::arm`], [`Engine::try_completion`] and others: the
//!   kernel has no memory, or no threads, for now) concerns no operation. Each one that was submitted stays in flight, and completes once, with its
//!   token, by a later call; the engine's descriptor is readable until a call succeeds. So a caller that goes on after such an error
//!   has a token of its own for each operation, and compares it. To give an operation up: [`Engine::cancel`], and take its completion.
//! - At most [`EngineOptions::in_flight_max`] operations are in flight; what is beyond comes back to the caller.
//! - The rooted engine ([`EngineOptions::root`]) opens nothing outside its directory, whatever the paths and the links there say.
//! - A forked child owns nothing of an engine's: [`Error::Forked`].
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
mod operation;
mod perform;
mod pool;
mod pump;
mod ring;
#[cfg(feature = "flush")]
mod tail;

pub use engine::{Completion, Engine, EngineOptions, Submitted};
pub(crate) use faults::Fault;
pub use operation::{Entry, Kind, Open, Operation, Output, Stat};
pub(crate) use operation::{Pieces, Place, Transfer, Work};
pub use pelton_os::Buffer;
pub(crate) use perform::{STATX, rest_of};
#[cfg(feature = "flush")]
pub use tail::Tail;

use pelton_channel::{Error, Result};
use pelton_os::Descriptor;
use rustix::fs::{FileType, OFlags, ResolveFlags};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

/// What is larger is not answered at once, even if the page cache has it: the copying alone would keep a loop for longer than some 50 us.
pub(crate) const INLINE_BYTES_MAX: usize = 256 << 10;
/// As much as is answered at once, or may be copied by the call that begins it, before the caller goes back to its loop: some 200 us of copying.
pub(crate) const INLINE_BYTES_OF_A_TURN: usize = 1 << 20;

/// An open file. A clone is the same file, with the same position. Closed with the last handle to it, which is that of the last
/// operation too.
///
/// Threads: any number may have it.
#[derive(Clone, Debug)]
pub struct File(Arc<Opened>);

#[derive(Debug)]
struct Opened {
    fd: Descriptor,
    path: PathBuf,
    reads: Answers,
    writes: Answers,
    is_direct: bool,
    is_stream: bool,
}

impl File {
    /// Takes over an open descriptor, of whatever kind, and asks what kind that is, which may wait for a file server. `path` is for messages. Writing
    /// by [`Engine::run`] to a pipe that nobody reads any more raises SIGPIPE, as it does otherwise; what is submitted raises none.
    ///
    /// # Errors
    /// [`Error::System`] when the system does not say what it is.
    pub fn from_fd(fd: OwnedFd, path: impl Into<PathBuf>) -> Result<File> {
        let asked = |errno: Errno| Error::system("asking about a descriptor")(errno.into());
        let flags = rustix::fs::fcntl_getfl(&fd).map_err(asked)?;
        File::opened(fd, path.into(), flags).map_err(asked)
    }

    /// Where it was when it was opened, as that was said.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Asks what there is to know of it, which may wait, as for a file server's answer: not for the loop.
    pub(crate) fn opened(fd: OwnedFd, path: PathBuf, flags: OFlags) -> rustix::io::Result<File> {
        const TMPFS_MAGIC: i64 = 0x0102_1994;
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode);
        let is_memory =
            || kind == FileType::RegularFile && rustix::fs::fstatfs(&fd).is_ok_and(|on| on.f_type == TMPFS_MAGIC);
        // The disk itself is asked, in the call: never at once.
        let is_direct = flags.contains(OFlags::DIRECT);
        let reads = match is_direct {
            true => Answers::NEVER,
            false if is_memory() => Answers::MEMORY,
            false => Answers::NOWAIT,
        };
        // Not of memory either: a write would wait for whoever else writes to the file, or allocates for it.
        let writes = match reads {
            Answers::NOWAIT if !flags.intersects(OFlags::DSYNC | OFlags::SYNC) => Answers::NOWAIT,
            _ => Answers::NEVER,
        };
        Ok(File(Arc::new(Opened {
            fd: Descriptor::of_file(fd).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::NOMEM))?,
            path,
            reads: Answers(AtomicU8::new(reads)),
            writes: Answers(AtomicU8::new(writes)),
            is_direct,
            is_stream: !matches!(kind, FileType::RegularFile | FileType::BlockDevice),
        })))
    }

    /// The file itself, of the last handle to it. Of two that are given up at a time one is the last.
    fn into_last(self) -> Option<Opened> {
        Arc::into_inner(self.0)
    }

    /// Whether this is the process that opened it. For bindings.
    #[doc(hidden)]
    pub fn is_own(&self) -> bool {
        self.0.fd.is_own()
    }

    #[inline]
    fn answers(&self, writes: bool) -> &Answers {
        if writes { &self.0.writes } else { &self.0.reads }
    }

    /// Whether it goes past the page cache.
    pub(crate) fn is_direct(&self) -> bool {
        self.0.is_direct
    }

    /// Whether a short count may be all there is now, without being the end; and whether it may keep who reads or writes it waiting for ever.
    pub(crate) fn is_stream(&self) -> bool {
        self.0.is_stream
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }
}

/// Whether a file can be read, or written, without waiting; found out by trying.
#[derive(Debug)]
pub(crate) struct Answers(AtomicU8);

impl Answers {
    /// By asking the system to refuse what would wait.
    const NOWAIT: u8 = 0;
    /// By asking plainly: it is memory. tmpfs refuses to be asked otherwise.
    const MEMORY: u8 = 1;
    const NEVER: u8 = 2;

    /// Relaxed: any of these is right at any time, only more or less quick.
    #[inline]
    fn get(&self) -> u8 {
        self.0.load(Ordering::Relaxed)
    }

    fn set(&self, answer: u8) {
        self.0.store(answer, Ordering::Relaxed);
    }
}

/// The directory that all paths of an engine are in.
#[derive(Debug)]
pub(crate) struct Root(Descriptor);

impl Root {
    /// Nothing leads out of it: no `..`, no absolute path or link, no link of /proc.
    pub(crate) const RESOLVE: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_MAGICLINKS);

    fn open(path: &Path) -> Result<Root> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = || rustix::fs::open(path, flags, rustix::fs::Mode::empty());
        let fd = rustix::io::retry_on_intr(open)
            .map_err(|errno| Error::file("opening the root", path.display().to_string(), errno))?;
        Descriptor::new(fd).map(Root).map_err(Error::system("noting a descriptor"))
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
