//! The operations of an [`Engine`](super::Engine), and their outputs.

use crate::file::{File, Root};
use crate::pump::{Channel, Pump};
use crate::transfer::{Pieces, Position, Transfer};
use io_uring::opcode;
use pelton_channel::Error;
use pelton_channel::Receiver;
use pelton_channel::Sender;
use pelton_os::Buffer;
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags, Statx};
use rustix::io::Errno;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

/// How a file is opened. Its descriptor closes on exec.
///
/// ```
/// use pelton::file::Open;
/// let how = Open::for_writing().create(0o640).truncate();
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Open {
    pub(crate) flags: OFlags,
    pub(crate) mode: Mode,
    resolve: ResolveFlags,
}

impl Open {
    /// For reading; also for directories, to list them.
    pub fn for_reading() -> Open {
        Open { flags: OFlags::RDONLY | OFlags::CLOEXEC, mode: Mode::empty(), resolve: ResolveFlags::empty() }
    }

    /// For writing.
    pub fn for_writing() -> Open {
        Open { flags: OFlags::WRONLY | OFlags::CLOEXEC, ..Open::for_reading() }
    }

    /// For reading and writing.
    pub fn for_both() -> Open {
        Open { flags: OFlags::RDWR | OFlags::CLOEXEC, ..Open::for_reading() }
    }

    /// Creates the file if it does not exist, with these permission bits, less the umask.
    #[must_use]
    pub fn create(mut self, mode: u32) -> Open {
        self.mode = Mode::from_raw_mode(mode);
        self.with(OFlags::CREATE)
    }

    /// As [`Open::create`], but fails with EEXIST if the file exists.
    #[must_use]
    pub fn create_new(self, mode: u32) -> Open {
        self.create(mode).with(OFlags::EXCL)
    }

    /// Truncates it to 0 bytes.
    #[must_use]
    pub fn truncate(self) -> Open {
        self.with(OFlags::TRUNC)
    }

    /// Each write goes to its end.
    #[must_use]
    pub fn append(self) -> Open {
        self.with(OFlags::APPEND)
    }

    /// Bypasses the page cache (O_DIRECT): buffers, offsets and lengths must be multiples of the disk's block size,
    /// often 512 or 4,096 ([`Buffer::aligned`]).
    #[must_use]
    pub fn direct(self) -> Open {
        self.with(OFlags::DIRECT)
    }

    /// Each write is on the disk before it completes (O_DSYNC).
    #[must_use]
    pub fn sync_writes(self) -> Open {
        self.with(OFlags::DSYNC)
    }

    /// Fails with ENOTDIR unless it is a directory.
    #[must_use]
    pub fn directory(self) -> Open {
        self.with(OFlags::DIRECTORY)
    }

    /// Fails with ELOOP if the last part of the path is a symbolic link.
    #[must_use]
    pub fn no_follow(self) -> Open {
        self.with(OFlags::NOFOLLOW)
    }

    /// Fails with ELOOP if any part of the path is a symbolic link.
    #[must_use]
    pub fn no_symlinks(mut self) -> Open {
        self.resolve |= ResolveFlags::NO_SYMLINKS;
        self
    }

    /// Fails with EXDEV if the path leads into another mount.
    #[must_use]
    pub fn one_mount(mut self) -> Open {
        self.resolve |= ResolveFlags::NO_XDEV;
        self
    }

    /// With the flags of open(2) and openat2(2). For FFI.
    #[doc(hidden)]
    pub fn from_raw(flags: u32, mode: u32, resolve: u64) -> Open {
        let flags = OFlags::from_bits_retain(flags) | OFlags::CLOEXEC;
        // Without these flags the mode has no meaning, and openat2 refuses it.
        let makes = flags.intersects(OFlags::CREATE) || flags.contains(OFlags::TMPFILE);
        let mode = if makes { Mode::from_raw_mode(mode & 0o7777) } else { Mode::empty() };
        Open { flags, mode, resolve: ResolveFlags::from_bits_retain(resolve) }
    }

    /// How a path is resolved, with the restrictions of a root.
    pub(crate) fn resolve(&self, root: Option<&Root>) -> ResolveFlags {
        self.resolve | root.map_or(ResolveFlags::empty(), |_| Root::RESOLVE)
    }

    fn with(mut self, flags: OFlags) -> Open {
        self.flags |= flags;
        self
    }
}

/// One operation on files, for [`Engine::run`](super::Engine::run), [`Engine::try_submit`](super::Engine::try_submit)
/// or [`Engine::try_submit_chain`](super::Engine::try_submit_chain). It owns its paths, its memory, and a handle of
/// each file, so nothing of that is closed or freed before it has ended.
#[derive(Debug)]
pub struct Operation(pub(super) Work);

/// How an operation ends.
pub(crate) type Outcome = Result<Output, Errno>;

/// An operation with its progress.
#[derive(Debug)]
pub(crate) enum Work {
    Transfer(Transfer),
    OnFile(File, OnFile),
    OnPath(PathBuf, OnPath),
    Close { file: Option<File>, path: PathBuf },
    Copy(Box<Copy>),
    Pump(Box<Pump>),
}

/// An operation on an open file.
#[derive(Debug)]
pub(crate) enum OnFile {
    Sync { data_only: bool },
    Truncate { bytes: u64 },
    Allocate { offset: u64, bytes: u64 },
    Stat,
    List,
}

/// An operation on the file at a path.
#[derive(Debug)]
pub(crate) enum OnPath {
    Open(Open),
    Stat { follows: bool },
    Times { accessed: Option<SystemTime>, modified: Option<SystemTime> },
    Unlink { directory: bool },
    Rename { to: PathBuf },
    Link { to: PathBuf },
    Symlink { target: PathBuf },
    ReadLink,
    MakeDirectory { mode: u32 },
}

/// What every operation has: see [`Work::action`].
pub(crate) struct Action {
    /// For error texts.
    name: &'static str,
    /// Whether it may make a file longer.
    pub(crate) grows: bool,
    /// The code of io_uring; `None`: only threads perform it.
    pub(crate) code: Option<u8>,
}

#[derive(Debug)]
pub(crate) struct Copy {
    pub(crate) from: File,
    pub(crate) from_offset: u64,
    pub(crate) to: File,
    pub(crate) to_offset: u64,
    pub(crate) bytes: u64,
    pub(crate) done: u64,
    /// As in [`Transfer`].
    pub(crate) cut_short_by: Option<Errno>,
}

impl Operation {
    /// Opens a file: [`Output::File`]. Opening a FIFO waits for a process that opens the other side; opening a terminal
    /// may wait for its line. A cancelled one completes immediately; a thread remains, waits, and closes the file.
    /// With 256 such threads in the process, opening a FIFO or a terminal fails with EMFILE.
    pub fn open(path: impl Into<PathBuf>, how: Open) -> Operation {
        Operation(Work::OnPath(path.into(), OnPath::Open(how)))
    }

    /// Closes a file, and returns the system's error. EBUSY if other handles to it exist, or operations in flight: the
    /// last of these closes it. Dropping the last handle closes it too, in the dropping thread, and ignores errors. If
    /// an operation has the last handle, a thread of the engine closes the file, also if the operation is cancelled
    /// before it begins.
    pub fn close(file: File) -> Operation {
        let path = file.path().to_owned();
        Operation(Work::Close { file: Some(file), path })
    }

    /// Fills `buffer` from the file's own position, and advances that. [`Output::Count`] is less than its length only
    /// at the end of the file, or if the file is not regular. Two concurrent reads of one file, or of two handles to
    /// it, share the position.
    pub fn read(file: &File, buffer: impl Into<Buffer>) -> Operation {
        Operation::transfer(file, Pieces::One(buffer.into()), Position::Current, false)
    }

    /// Fills `buffer` from `offset` on. [`Output::Count`] is less than its length only at the end of the file.
    pub fn read_at(file: &File, buffer: impl Into<Buffer>, offset: u64) -> Operation {
        Operation::transfer(file, Pieces::One(buffer.into()), Position::At(offset), false)
    }

    /// As [`Operation::read_at`], into several buffers in order.
    pub fn read_vectored_at(file: &File, buffers: Vec<Buffer>, offset: u64) -> Operation {
        Operation::transfer(file, Pieces::Many(buffers), Position::At(offset), false)
    }

    /// Writes all of `buffer` at the file's own position, and advances that. [`Output::Count`] is less than its length
    /// if an error came after some bytes: writing the rest returns that error.
    pub fn write(file: &File, buffer: impl Into<Buffer>) -> Operation {
        Operation::transfer(file, Pieces::One(buffer.into()), Position::Current, true)
    }

    /// Writes all of `buffer` at `offset`; counts as [`Operation::write`] does.
    pub fn write_at(file: &File, buffer: impl Into<Buffer>, offset: u64) -> Operation {
        Operation::transfer(file, Pieces::One(buffer.into()), Position::At(offset), true)
    }

    /// As [`Operation::write_at`], from several buffers in order.
    pub fn write_vectored_at(file: &File, buffers: Vec<Buffer>, offset: u64) -> Operation {
        Operation::transfer(file, Pieces::Many(buffers), Position::At(offset), true)
    }

    /// Writes all of `buffer` at the end that the file has then; counts as [`Operation::write`] does. For many small
    /// writes from many threads see [`Tail`](super::Tail).
    pub fn append(file: &File, buffer: impl Into<Buffer>) -> Operation {
        Operation::transfer(file, Pieces::One(buffer.into()), Position::End, true)
    }

    /// Several buffers at the file's own position, or at its end. For FFI.
    #[doc(hidden)]
    pub fn vectored(file: &File, buffers: Vec<Buffer>, is_end: bool, writes: bool) -> Operation {
        let position = if is_end { Position::End } else { Position::Current };
        Operation::transfer(file, Pieces::Many(buffers), position, writes)
    }

    fn transfer(file: &File, memory: Pieces, position: Position, writes: bool) -> Operation {
        let file = file.clone();
        let (done, cut_short_by, is_async) = (0, None, false);
        Operation(Work::Transfer(Transfer { file, memory, position, writes, done, cut_short_by, is_async }))
    }

    /// Brings everything that was written to the file to the disk, with all its metadata (fsync).
    pub fn sync(file: &File) -> Operation {
        Operation(Work::OnFile(file.clone(), OnFile::Sync { data_only: false }))
    }

    /// Brings everything that was written to the file to the disk, with the metadata that reading it needs (fdatasync).
    pub fn sync_data(file: &File) -> Operation {
        Operation(Work::OnFile(file.clone(), OnFile::Sync { data_only: true }))
    }

    /// Sets the file's length to `bytes`: it cuts the file, or appends zeros.
    pub fn truncate(file: &File, bytes: u64) -> Operation {
        Operation(Work::OnFile(file.clone(), OnFile::Truncate { bytes }))
    }

    /// Allocates disk space for a range, and extends the file to its end.
    pub fn allocate(file: &File, offset: u64, bytes: u64) -> Operation {
        Operation(Work::OnFile(file.clone(), OnFile::Allocate { offset, bytes }))
    }

    /// Reads the properties of the file at `path`: [`Output::Stat`]. Follows a symbolic link.
    pub fn stat(path: impl Into<PathBuf>) -> Operation {
        Operation(Work::OnPath(path.into(), OnPath::Stat { follows: true }))
    }

    /// As [`Operation::stat`], but of a symbolic link itself (lstat).
    pub fn stat_link(path: impl Into<PathBuf>) -> Operation {
        Operation(Work::OnPath(path.into(), OnPath::Stat { follows: false }))
    }

    /// As [`Operation::stat`], of an open file (fstat).
    pub fn stat_file(file: &File) -> Operation {
        Operation(Work::OnFile(file.clone(), OnFile::Stat))
    }

    /// Sets the times of its last read and its last change; `None` leaves one (utimensat).
    pub fn set_times(
        path: impl Into<PathBuf>,
        accessed: Option<SystemTime>,
        modified: Option<SystemTime>,
    ) -> Operation {
        Operation(Work::OnPath(path.into(), OnPath::Times { accessed, modified }))
    }

    /// Removes a name of a file that is not a directory.
    pub fn unlink(path: impl Into<PathBuf>) -> Operation {
        Operation(Work::OnPath(path.into(), OnPath::Unlink { directory: false }))
    }

    /// Removes an empty directory.
    pub fn remove_directory(path: impl Into<PathBuf>) -> Operation {
        Operation(Work::OnPath(path.into(), OnPath::Unlink { directory: true }))
    }

    /// Renames a file, and replaces a file at `to`.
    pub fn rename(from: impl Into<PathBuf>, to: impl Into<PathBuf>) -> Operation {
        Operation(Work::OnPath(from.into(), OnPath::Rename { to: to.into() }))
    }

    /// Creates a second name for a file; for a symbolic link, of the link itself.
    pub fn link(from: impl Into<PathBuf>, to: impl Into<PathBuf>) -> Operation {
        Operation(Work::OnPath(from.into(), OnPath::Link { to: to.into() }))
    }

    /// Creates a symbolic link to `target` at `path`.
    pub fn symlink(target: impl Into<PathBuf>, path: impl Into<PathBuf>) -> Operation {
        Operation(Work::OnPath(path.into(), OnPath::Symlink { target: target.into() }))
    }

    /// Reads the target of a symbolic link: [`Output::Path`].
    pub fn read_link(path: impl Into<PathBuf>) -> Operation {
        Operation(Work::OnPath(path.into(), OnPath::ReadLink))
    }

    /// Creates a directory, with these permission bits, less the umask.
    pub fn make_directory(path: impl Into<PathBuf>, mode: u32) -> Operation {
        Operation(Work::OnPath(path.into(), OnPath::MakeDirectory { mode }))
    }

    /// Reads the next entries of an open directory, some hundreds: [`Output::Entries`], empty at the end. It advances
    /// the directory's position, so list each handle by one operation at a time.
    pub fn list(directory: &File) -> Operation {
        Operation(Work::OnFile(directory.clone(), OnFile::List))
    }

    /// Copies `bytes` from one file to another in the kernel, which shares blocks if the file system can.
    /// [`Output::Count`] is less at the end of `from`, or if an error or a cancel came after some bytes.
    pub fn copy(from: &File, from_offset: u64, to: &File, to_offset: u64, bytes: u64) -> Operation {
        let (from, to) = (from.clone(), to.clone());
        Operation(Work::Copy(Box::new(Copy { from, from_offset, to, to_offset, bytes, done: 0, cut_short_by: None })))
    }

    /// Sends up to `bytes` of a file from `offset` on, as messages of `message_bytes`; the last one has the rest. It
    /// reads them straight into the channel's memory. [`Output::Count`], the bytes sent, is less at the end of the
    /// file, or if an error or a cancel came after some. Without free space it waits for the receiver, in a thread of
    /// its own.
    ///
    /// The sender stays the caller's; the operation locks it while it runs. EBUSY: it was locked already. EINVAL:
    /// messages of 0 bytes. ESPIPE: a file without offsets, such as a pipe or a FIFO. From a device with offsets, such
    /// as the kernel's log, each read becomes a message, and the operation waits for more.
    /// An error of the channel, such as [`Error::Closed`](pelton_channel::Error::Closed), is returned unchanged.
    ///
    /// ```
    /// # fn main() -> pelton::Result<()> {
    /// # let directory = tempfile::tempdir().unwrap();
    /// # let path = directory.path().join("page");
    /// # std::fs::write(&path, b"a page").unwrap();
    /// use pelton::file::{Engine, Open, Operation};
    /// use std::sync::{Arc, Mutex};
    /// let (sender, mut receiver) = pelton::Options::new().threads()?;
    /// let sender = Arc::new(Mutex::new(sender));
    /// let mut engine = Engine::new()?;
    /// let file = engine.run(Operation::open(&path, Open::for_reading()))?.into_file()?;
    /// let sent = engine.run(Operation::send(&file, 0, u64::MAX, &sender, 64 << 10))?;
    /// assert_eq!((sent.count(), &*receiver.receive()?), (6, &b"a page"[..]));
    /// # Ok(())
    /// # }
    /// ```
    pub fn send(file: &File, offset: u64, bytes: u64, sender: &Arc<Mutex<Sender>>, message_bytes: usize) -> Operation {
        Operation(Work::Pump(Box::new(Pump::new(file, offset, bytes, Channel::To(sender.clone(), message_bytes)))))
    }

    /// Writes the messages of a receiver to a file, from `offset` on, back to back, straight from the channel's memory,
    /// and releases them. It ends when `bytes` have been written; before a message that is larger than the rest, which
    /// stays in the channel; or when the sender has closed. [`Output::Count`]: the bytes written, of complete messages.
    ///
    /// Without a message it waits for the sender, in a thread of its own. The receiver stays the caller's: see
    /// [`Operation::send`]. It does not release a message that it could not write. It costs a system call per message:
    /// for many small ones see [`Tail`](super::Tail).
    pub fn receive(file: &File, offset: u64, bytes: u64, receiver: &Arc<Mutex<Receiver>>) -> Operation {
        Operation(Work::Pump(Box::new(Pump::new(file, offset, bytes, Channel::From(receiver.clone())))))
    }

    /// Returns its memory, for an operation that was not begun.
    pub fn into_buffers(self) -> Vec<Buffer> {
        match self.0.into_parts().0 {
            Pieces::One(buffer) if buffer.is_empty() => Vec::new(),
            Pieces::One(buffer) => vec![buffer],
            Pieces::Many(buffers) => buffers,
        }
    }
}

impl Work {
    /// The table of all operations.
    pub(crate) fn action(&self) -> Action {
        let row = |name, grows, code| Action { name, grows, code };
        match self {
            Work::Transfer(Transfer { memory, writes, .. }) => match (memory, writes) {
                (Pieces::One(_), false) => row("reading", false, Some(opcode::Read::CODE)),
                (Pieces::Many(_), false) => row("reading", false, Some(opcode::Readv::CODE)),
                (Pieces::One(_), true) => row("writing", true, Some(opcode::Write::CODE)),
                (Pieces::Many(_), true) => row("writing", true, Some(opcode::Writev::CODE)),
            },
            Work::OnFile(_, what) => match what {
                OnFile::Sync { .. } => row("syncing", false, Some(opcode::Fsync::CODE)),
                OnFile::Truncate { .. } => row("truncating", true, Some(opcode::Ftruncate::CODE)),
                OnFile::Allocate { .. } => row("allocating", true, Some(opcode::Fallocate::CODE)),
                OnFile::Stat => row("examining", false, Some(opcode::Statx::CODE)),
                OnFile::List => row("listing", false, None),
            },
            Work::OnPath(_, what) => match what {
                // The call that begins an opening would wait for a file server, and would not wait for the other side
                // of a FIFO; or one of the kernel's few threads would wait.
                OnPath::Open(_) => row("opening", false, None),
                OnPath::Stat { .. } => row("examining", false, Some(opcode::Statx::CODE)),
                OnPath::Times { .. } => row("setting the times of", false, None),
                OnPath::Unlink { .. } => row("removing", false, Some(opcode::UnlinkAt::CODE)),
                OnPath::Rename { .. } => row("renaming", false, Some(opcode::RenameAt::CODE)),
                OnPath::Link { .. } => row("linking", false, Some(opcode::LinkAt::CODE)),
                OnPath::Symlink { .. } => row("linking symbolically", false, Some(opcode::SymlinkAt::CODE)),
                OnPath::ReadLink => row("reading the link", false, None),
                OnPath::MakeDirectory { .. } => row("creating the directory", false, Some(opcode::MkDirAt::CODE)),
            },
            Work::Close { .. } => row("closing", false, None),
            Work::Copy(_) => row("copying", true, None),
            Work::Pump(pump) => match pump.channel {
                Channel::To(..) => row("sending", false, None),
                Channel::From(_) => row("receiving into", true, None),
            },
        }
    }

    /// The files that it uses.
    pub(crate) fn files(&self) -> [Option<&File>; 2] {
        match self {
            Work::Transfer(transfer) => [Some(&transfer.file), None],
            Work::OnFile(file, _) => [Some(file), None],
            Work::OnPath(..) => [None, None],
            Work::Close { file, .. } => [file.as_ref(), None],
            Work::Copy(copy) => [Some(&copy.from), Some(&copy.to)],
            Work::Pump(pump) => [Some(&pump.file), None],
        }
    }

    /// The paths that it resolves, in the order of the system calls' arguments.
    pub(crate) fn paths(&self) -> [Option<&Path>; 2] {
        match self {
            Work::OnPath(from, OnPath::Rename { to } | OnPath::Link { to }) => [Some(from), Some(to)],
            Work::OnPath(path, OnPath::Symlink { target }) => [Some(target), Some(path)],
            Work::OnPath(path, _) => [Some(path), None],
            _ => [None, None],
        }
    }

    /// The error that the caller gets for an errno.
    pub(crate) fn error(&mut self, errno: Errno) -> Error {
        if let Work::Pump(pump) = self
            && let Some(channel_error) = pump.channel_error.take()
        {
            return channel_error;
        }
        let at = |path: &Path| path.display().to_string();
        let two = |from: &Path, to: &Path| format!("{} to {}", from.display(), to.display());
        let path = match self {
            Work::OnPath(from, OnPath::Rename { to } | OnPath::Link { to }) => two(from, to),
            Work::OnPath(path, OnPath::Symlink { target }) => two(path, target),
            Work::OnPath(path, _) | Work::Close { path, .. } => at(path),
            Work::Transfer(Transfer { file, .. }) | Work::OnFile(file, _) => at(file.path()),
            Work::Copy(copy) => two(copy.from.path(), copy.to.path()),
            Work::Pump(pump) => at(pump.file.path()),
        };
        Error::file(self.action().name, path, errno)
    }

    /// The outcome after an error: after some bytes, their count.
    pub(crate) fn failed(&mut self, error: Errno) -> Outcome {
        match self {
            Work::Transfer(transfer) => transfer.failed(error).map(Output::Count),
            Work::Pump(pump) => pump.failed(error).map(Output::Count),
            _ => Err(error),
        }
    }

    /// The error that ended it after some bytes.
    pub(crate) fn cut_short_by(&self) -> Option<Errno> {
        match self {
            Work::Transfer(transfer) => transfer.cut_short_by,
            Work::Copy(copy) => copy.cut_short_by,
            Work::Pump(pump) => pump.cut_short_by,
            _ => None,
        }
    }

    /// Its memory, and its handles of files.
    pub(crate) fn into_parts(self) -> (Pieces, [Option<File>; 2]) {
        let files = match self {
            Work::Transfer(transfer) => return (transfer.memory, [Some(transfer.file), None]),
            Work::OnFile(file, _) => [Some(file), None],
            Work::OnPath(..) => [None, None],
            Work::Close { file, .. } => [file, None],
            Work::Copy(copy) => [Some(copy.from), Some(copy.to)],
            Work::Pump(pump) => [Some(pump.file), None],
        };
        (Pieces::One(Buffer::default()), files)
    }
}

/// The output of a successful operation.
#[derive(Debug)]
#[non_exhaustive]
pub enum Output {
    /// No output.
    Done,
    /// So many bytes were read, written or copied.
    Count(usize),
    /// The file is open.
    File(File),
    /// The properties of a file.
    Stat(Box<Stat>),
    /// Some entries of a directory; none at its end.
    Entries(Vec<Entry>),
    /// The target of a symbolic link.
    Path(PathBuf),
}

/// The kind of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A FIFO or a pipe.
    Fifo,
    /// A socket.
    Socket,
    /// A character device, such as a terminal.
    Character,
    /// A block device.
    Block,
    /// Another kind, or the file system does not report it.
    Unknown,
}

impl From<FileType> for Kind {
    fn from(kind: FileType) -> Kind {
        match kind {
            FileType::RegularFile => Kind::File,
            FileType::Directory => Kind::Directory,
            FileType::Symlink => Kind::Symlink,
            FileType::Fifo => Kind::Fifo,
            FileType::Socket => Kind::Socket,
            FileType::CharacterDevice => Kind::Character,
            FileType::BlockDevice => Kind::Block,
            FileType::Unknown => Kind::Unknown,
        }
    }
}

/// The properties of a file.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Stat {
    /// Its kind.
    pub kind: Kind,
    /// The twelve permission bits.
    pub mode: u32,
    /// Its length.
    pub bytes: u64,
    /// The bytes that it occupies on its disk.
    pub allocated_bytes: u64,
    /// The number of its names.
    pub links: u64,
    /// Its owner.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Device and inode identify the file.
    pub device: (u32, u32),
    /// See `device`.
    pub inode: u64,
    /// The time of the last read, as far as the file system records it.
    pub accessed: SystemTime,
    /// The time of the last change of its bytes.
    pub modified: SystemTime,
    /// The time of the last change of its bytes or properties.
    pub changed: SystemTime,
    /// The time of its creation, if the file system records it.
    pub created: Option<SystemTime>,
}

impl Stat {
    pub(crate) fn of(found: &Statx) -> Stat {
        let time = |seconds: i64, nanoseconds: u32| {
            let whole = Duration::from_secs(seconds.unsigned_abs());
            let time = match seconds {
                0.. => SystemTime::UNIX_EPOCH.checked_add(whole),
                _ => SystemTime::UNIX_EPOCH.checked_sub(whole),
            };
            time.and_then(|time| time.checked_add(Duration::from_nanos(nanoseconds.into())))
                .unwrap_or(SystemTime::UNIX_EPOCH)
        };
        let created = (found.stx_mask & rustix::fs::StatxFlags::BTIME.bits() != 0)
            .then(|| time(found.stx_btime.tv_sec, found.stx_btime.tv_nsec));
        Stat {
            kind: FileType::from_raw_mode(found.stx_mode.into()).into(),
            mode: u32::from(found.stx_mode) & 0o7777,
            bytes: found.stx_size,
            allocated_bytes: found.stx_blocks * 512,
            links: found.stx_nlink.into(),
            uid: found.stx_uid,
            gid: found.stx_gid,
            device: (found.stx_dev_major, found.stx_dev_minor),
            inode: found.stx_ino,
            accessed: time(found.stx_atime.tv_sec, found.stx_atime.tv_nsec),
            modified: time(found.stx_mtime.tv_sec, found.stx_mtime.tv_nsec),
            changed: time(found.stx_ctime.tv_sec, found.stx_ctime.tv_nsec),
            created,
        }
    }
}

/// A name in a directory; never `.` or `..`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Entry {
    /// The name.
    pub name: OsString,
    /// Its kind, as far as the directory records it.
    pub kind: Kind,
    /// Its number in the file system.
    pub inode: u64,
}
