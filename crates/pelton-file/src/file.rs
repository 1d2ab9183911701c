//! An open file, and the directory that an engine keeps to.

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
pub struct File(pub(crate) Arc<Opened>);

#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) fd: Descriptor,
    pub(crate) path: PathBuf,
    pub(crate) reads: Answers,
    pub(crate) writes: Answers,
    pub(crate) is_direct: bool,
    pub(crate) is_stream: bool,
}

impl File {
    /// Takes over an open descriptor, of whatever kind, and asks what kind that is, which may wait for a file server. `path` is for messages. Writing
    /// by `Engine::run` to a pipe that nobody reads any more raises SIGPIPE, as it does otherwise; what is submitted raises none.
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
    pub(crate) fn into_last(self) -> Option<Opened> {
        Arc::into_inner(self.0)
    }

    /// Whether this is the process that opened it. For bindings.
    #[doc(hidden)]
    pub fn is_own(&self) -> bool {
        self.0.fd.is_own()
    }

    #[inline]
    pub(crate) fn answers(&self, writes: bool) -> &Answers {
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
    pub(crate) const NOWAIT: u8 = 0;
    /// By asking plainly: it is memory. tmpfs refuses to be asked otherwise.
    pub(crate) const MEMORY: u8 = 1;
    pub(crate) const NEVER: u8 = 2;

    /// Relaxed: any of these is right at any time, only more or less quick.
    #[inline]
    pub(crate) fn get(&self) -> u8 {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn set(&self, answer: u8) {
        self.0.store(answer, Ordering::Relaxed);
    }
}

/// The directory that all paths of an engine are in.
#[derive(Debug)]
pub(crate) struct Root(Descriptor);

impl Root {
    /// Nothing leads out of it: no `..`, no absolute path or link, no link of /proc.
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
