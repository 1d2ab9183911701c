//! An open file, and the directory that confines an engine.

use pelton_channel::{Error, Result};
use pelton_os::Descriptor;
use rustix::fs::{FileType, OFlags, ResolveFlags};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

/// The largest inline transfer, even if the page cache has it: copying more would block a loop for longer than some 50
/// us.
pub(crate) const INLINE_BYTES_MAX: usize = 256 << 10;
/// The budget of bytes that calls copy inline, before the caller returns to its loop: some 200 us of copying.
pub(crate) const INLINE_BYTES_PER_TICK: usize = 1 << 20;

/// An open file. A clone is the same file with the same position. The last handle closes it; an operation has a handle
/// too. If an operation has the last one, a thread of the engine closes the file; otherwise the dropping thread does,
/// and a file server can delay that. Dropping ignores errors: see [`Operation::close`](super::Operation::close).
///
/// Threads: any number may share it.
#[derive(Clone, Debug)]
pub struct File(pub(crate) Arc<Opened>);

#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) fd: Descriptor,
    pub(crate) path: PathBuf,
    pub(crate) reads: InlineMode,
    pub(crate) writes: InlineMode,
    pub(crate) is_direct: bool,
    pub(crate) is_stream: bool,
}

impl File {
    /// Takes over an open descriptor of any kind. It reads the kind from the system, which may wait for a file server.
    /// `path` is for error texts. Writing by `Engine::run` to a pipe without a reader raises SIGPIPE, as usual; a
    /// submitted write raises no signal.
    ///
    /// # Errors
    /// [`Error::System`] when the system does not report its kind.
    pub fn from_fd(fd: OwnedFd, path: impl Into<PathBuf>) -> Result<File> {
        let failed = |errno: Errno| Error::system("examining a descriptor")(errno.into());
        let flags = rustix::fs::fcntl_getfl(&fd).map_err(failed)?;
        File::opened(fd, path.into(), flags).map_err(failed)
    }

    /// The path with which it was opened.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Reads the file's properties. It may wait, for instance for a file server, so a loop must not call it.
    pub(crate) fn opened(fd: OwnedFd, path: PathBuf, flags: OFlags) -> rustix::io::Result<File> {
        const TMPFS_MAGIC: i64 = 0x0102_1994;
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode);
        let is_memory =
            || kind == FileType::RegularFile && rustix::fs::fstatfs(&fd).is_ok_and(|on| on.f_type == TMPFS_MAGIC);
        // Direct I/O reads the disk inside the call: never inline.
        let is_direct = flags.contains(OFlags::DIRECT);
        let reads = match is_direct {
            true => InlineMode::NEVER,
            false if is_memory() => InlineMode::MEMORY,
            false => InlineMode::NOWAIT,
        };
        // Not for tmpfs: a write would wait for other processes that write to the file, or allocate memory for it.
        let writes = match reads {
            InlineMode::NOWAIT if !flags.intersects(OFlags::DSYNC | OFlags::SYNC) => InlineMode::NOWAIT,
            _ => InlineMode::NEVER,
        };
        Ok(File(Arc::new(Opened {
            fd: Descriptor::of_file(fd).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::NOMEM))?,
            path,
            reads: InlineMode(AtomicU8::new(reads)),
            writes: InlineMode(AtomicU8::new(writes)),
            is_direct,
            is_stream: !matches!(kind, FileType::RegularFile | FileType::BlockDevice),
        })))
    }

    /// The file itself, from its last handle. Of two concurrent drops exactly one is the last.
    pub(crate) fn into_last(self) -> Option<Opened> {
        Arc::into_inner(self.0)
    }

    /// Whether this process opened it. For FFI.
    #[doc(hidden)]
    pub fn is_own(&self) -> bool {
        self.0.fd.is_own()
    }

    #[inline]
    pub(crate) fn inline_mode(&self, writes: bool) -> &InlineMode {
        if writes { &self.0.writes } else { &self.0.reads }
    }

    /// Whether it bypasses the page cache.
    pub(crate) fn is_direct(&self) -> bool {
        self.0.is_direct
    }

    /// Whether a short count does not mean the end, and whether a reader or a writer may wait for ever.
    pub(crate) fn is_stream(&self) -> bool {
        self.0.is_stream
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }
}

/// How a file can be read or written without waiting, learned by trying.
#[derive(Debug)]
pub(crate) struct InlineMode(AtomicU8);

impl InlineMode {
    /// With RWF_NOWAIT: the kernel refuses what would wait.
    pub(crate) const NOWAIT: u8 = 0;
    /// Without a flag, because it is in memory: tmpfs refuses RWF_NOWAIT.
    pub(crate) const MEMORY: u8 = 1;
    pub(crate) const NEVER: u8 = 2;

    /// Relaxed: each value is correct at any time, only more or less fast.
    #[inline]
    pub(crate) fn get(&self) -> u8 {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn set(&self, mode: u8) {
        self.0.store(mode, Ordering::Relaxed);
    }
}

/// The directory that confines all paths of an engine.
#[derive(Debug)]
pub(crate) struct Root(Descriptor);

impl Root {
    /// No path leads out of it: no `..`, no absolute path or link, no link of /proc.
    pub(crate) const RESOLVE: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_MAGICLINKS);

    pub(crate) fn open(path: &Path) -> Result<Root> {
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
