//! What can be asked of an [`Engine`](super::Engine), and what comes of it.

use crate::file::{File, Root};
use crate::pump::{Channel, Pump};
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

/// How a file is opened. Descriptors are closed on exec.
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
    /// To read what is there. Also for directories, to list them.
    pub fn for_reading() -> Open {
        Open { flags: OFlags::RDONLY | OFlags::CLOEXEC, mode: Mode::empty(), resolve: ResolveFlags::empty() }
    }

    /// To write.
    pub fn for_writing() -> Open {
        Open { flags: OFlags::WRONLY | OFlags::CLOEXEC, ..Open::for_reading() }
    }

    /// To read and to write.
    pub fn for_both() -> Open {
        Open { flags: OFlags::RDWR | OFlags::CLOEXEC, ..Open::for_reading() }
    }

    /// Makes the file, with these bits of permission less the umask, if it is not there.
    #[must_use]
    pub fn create(mut self, mode: u32) -> Open {
        self.mode = Mode::from_raw_mode(mode);
        self.with(OFlags::CREATE)
    }

    /// As [`Open::create`], but the file must not be there: EEXIST.
    #[must_use]
    pub fn create_new(self, mode: u32) -> Open {
        self.create(mode).with(OFlags::EXCL)
    }

    /// Cuts it to nothing.
    #[must_use]
    pub fn truncate(self) -> Open {
        self.with(OFlags::TRUNC)
    }

    /// All writes go to its end.
    #[must_use]
    pub fn append(self) -> Open {
        self.with(OFlags::APPEND)
    }

    /// Past the page cache (O_DIRECT): buffers, offsets and lengths have to be multiples of what the disk wants, often 512 or 4,096
    /// ([`Buffer::aligned`]).
    #[must_use]
    pub fn direct(self) -> Open {
        self.with(OFlags::DIRECT)
    }

    /// Each write is on the disk before it completes (O_DSYNC).
    #[must_use]
    pub fn sync_writes(self) -> Open {
        self.with(OFlags::DSYNC)
    }

    /// It must be a directory: ENOTDIR.
    #[must_use]
    pub fn directory(self) -> Open {
        self.with(OFlags::DIRECTORY)
    }

    /// The last part of the path must not be a symbolic link: ELOOP.
    #[must_use]
    pub fn no_follow(self) -> Open {
        self.with(OFlags::NOFOLLOW)
    }

    /// No part of the path may be a symbolic link: ELOOP.
    #[must_use]
    pub fn no_symlinks(mut self) -> Open {
        self.resolve |= ResolveFlags::NO_SYMLINKS;
        self
    }

    /// The path may not lead into another mount: EXDEV.
    #[must_use]
    pub fn one_mount(mut self) -> Open {
        self.resolve |= ResolveFlags::NO_XDEV;
        self
    }

    /// By the words of open(2) and openat2(2). For bindings.
    #[doc(hidden)]
    pub fn from_raw(flags: u32, mode: u32, resolve: u64) -> Open {
        let flags = OFlags::from_bits_retain(flags) | OFlags::CLOEXEC;
        // Otherwise it says nothing, and openat2 does not take it.
        let makes = flags.intersects(OFlags::CREATE) || flags.contains(OFlags::TMPFILE);
        let mode = if makes { Mode::from_raw_mode(mode & 0o7777) } else { Mode::empty() };
        Open { flags, mode, resolve: ResolveFlags::from_bits_retain(resolve) }
    }

    /// How a path is to be resolved, also for the sake of a root.
    pub(crate) fn resolve(&self, root: Option<&Root>) -> ResolveFlags {
        self.resolve | root.map_or(ResolveFlags::empty(), |_| Root::RESOLVE)
    }

    fn with(mut self, flags: OFlags) -> Open {
        self.flags |= flags;
        self
    }
}

/// One thing to do with files: made here, given to [`Engine::run`](super::Engine::run), [`Engine::try_submit`](super::Engine::try_submit) or
/// [`Engine::try_submit_chain`](super::Engine::try_submit_chain). It owns what it needs: paths, memory, and a share of each file, so nothing
/// of that is closed or freed before it has ended.
#[derive(Debug)]
pub struct Operation(pub(super) Work);

/// The same from the inside: also how far it has come.
#[derive(Debug)]
pub(crate) enum Work {
    Open { path: PathBuf, how: Open },
    Close { file: Option<File>, path: PathBuf },
    Transfer(Transfer),
    Sync { file: File, data_only: bool },
    Truncate { file: File, bytes: u64 },
    Allocate { file: File, offset: u64, bytes: u64 },
    Stat { path: PathBuf, follows: bool },
    StatFile(File),
    Times { path: PathBuf, accessed: Option<SystemTime>, modified: Option<SystemTime> },
    Unlink { path: PathBuf, directory: bool },
    Rename { from: PathBuf, to: PathBuf },
    Link { from: PathBuf, to: PathBuf },
    Symlink { target: PathBuf, path: PathBuf },
    ReadLink { path: PathBuf },
    MakeDirectory { path: PathBuf, mode: u32 },
    List { directory: File },
    Copy(Box<Copy>),
    Pump(Box<Pump>),
}

/// Bytes from a file into memory, or the other way.
#[derive(Debug)]
pub(crate) struct Transfer {
    pub(crate) file: File,
    pub(crate) memory: Pieces,
    pub(crate) place: Place,
    pub(crate) writes: bool,
    /// Bytes that have gone.
    pub(crate) done: usize,
    /// What was the end, after some bytes.
    pub(crate) cut_short_by: Option<Errno>,
    /// Whether it is not to be copied by the call that begins it.
    pub(crate) is_apart: bool,
}

#[derive(Debug)]
pub(crate) enum Pieces {
    One(Buffer),
    Many(Vec<Buffer>),
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    At(u64),
    /// The file's own position, which it moves.
    Current,
    End,
}

#[derive(Debug)]
pub(crate) struct Copy {
    pub(crate) from: File,
    pub(crate) from_offset: u64,
    pub(crate) to: File,
    pub(crate) to_offset: u64,
    pub(crate) bytes: u64,
    pub(crate) done: u64,
    /// As of a transfer.
    pub(crate) cut_short_by: Option<Errno>,
}

impl Operation {
    /// Opens a file: [`Output::File`]. Opening a FIFO waits until somebody opens its other end. Cancelled, it completes at once, and a thread is left to
    /// wait until that happens, and to close it; so is one of a terminal that waits for its line. With 256 threads of the process
    /// left so, opening what may wait is EMFILE.
    pub fn open(path: impl Into<PathBuf>, how: Open) -> Operation {
        Operation(Work::Open { path: path.into(), how })
    }

    /// Closes a file, and tells what the system says of that. EBUSY when there are other handles to it, or operations in flight: it is
    /// closed with the last of these. Dropping the last handle closes it too, in the dropping thread, without a word; of an operation that has the
    /// last handle a thread of the engine's closes it, as it does where this is cancelled before it begins.
    pub fn close(file: File) -> Operation {
        let path = file.path().to_owned();
        Operation(Work::Close { file: Some(file), path })
    }

    /// Fills `buffer` from the file's own position on, which moves: [`Output::Count`] is less than its length at the end of the file only, or
    /// of what is no regular file. Two at a time of one file, or of two handles to it, share the position.
    pub fn read(file: &File, buffer: impl Into<Buffer>) -> Operation {
        Operation::transfer(file, Pieces::One(buffer.into()), Place::Current, false)
    }

    /// Fills `buffer` from `offset` on: [`Output::Count`] is less than its length at the end of the file only.
    pub fn read_at(file: &File, buffer: impl Into<Buffer>, offset: u64) -> Operation {
        Operation::transfer(file, Pieces::One(buffer.into()), Place::At(offset), false)
    }

    /// As [`Operation::read_at`], into several buffers, one after the other.
    pub fn read_vectored_at(file: &File, buffers: Vec<Buffer>, offset: u64) -> Operation {
        Operation::transfer(file, Pieces::Many(buffers), Place::At(offset), false)
    }

    /// Writes all of `buffer` at the file's own position, which moves. [`Output::Count`] is less than its length where an error came after some
    /// bytes had been written: writing the rest tells which.
    pub fn write(file: &File, buffer: impl Into<Buffer>) -> Operation {
        Operation::transfer(file, Pieces::One(buffer.into()), Place::Current, true)
    }

    /// Writes all of `buffer` at `offset`; counts as [`Operation::write`] does.
    pub fn write_at(file: &File, buffer: impl Into<Buffer>, offset: u64) -> Operation {
        Operation::transfer(file, Pieces::One(buffer.into()), Place::At(offset), true)
    }

    /// As [`Operation::write_at`], from several buffers, one after the other.
    pub fn write_vectored_at(file: &File, buffers: Vec<Buffer>, offset: u64) -> Operation {
        Operation::transfer(file, Pieces::Many(buffers), Place::At(offset), true)
    }

    /// Writes all of `buffer` at the end of the file, wherever that is by then; counts as [`Operation::write`] does. For many small ones from many
    /// threads see [`Tail`](super::Tail).
    pub fn append(file: &File, buffer: impl Into<Buffer>) -> Operation {
        Operation::transfer(file, Pieces::One(buffer.into()), Place::End, true)
    }

    /// Several buffers at the file's own position, or at its end. For bindings.
    #[doc(hidden)]
    pub fn vectored(file: &File, buffers: Vec<Buffer>, is_end: bool, writes: bool) -> Operation {
        let place = if is_end { Place::End } else { Place::Current };
        Operation::transfer(file, Pieces::Many(buffers), place, writes)
    }

    fn transfer(file: &File, memory: Pieces, place: Place, writes: bool) -> Operation {
        let file = file.clone();
        Operation(Work::Transfer(Transfer {
            file,
            memory,
            place,
            writes,
            done: 0,
            cut_short_by: None,
            is_apart: false,
        }))
    }

    /// Has everything that was written to the file, and all that is known of it, on the disk (fsync).
    pub fn sync(file: &File) -> Operation {
        Operation(Work::Sync { file: file.clone(), data_only: false })
    }

    /// Has what was written to the file on the disk, and as much as is needed to read it again (fdatasync).
    pub fn sync_data(file: &File) -> Operation {
        Operation(Work::Sync { file: file.clone(), data_only: true })
    }

    /// Makes the file `bytes` long: cut, or with zeros behind what it has.
    pub fn truncate(file: &File, bytes: u64) -> Operation {
        Operation(Work::Truncate { file: file.clone(), bytes })
    }

    /// Sets disk aside for a range, and makes the file as long as that.
    pub fn allocate(file: &File, offset: u64, bytes: u64) -> Operation {
        Operation(Work::Allocate { file: file.clone(), offset, bytes })
    }

    /// What is known of what is at `path`: [`Output::Stat`]. Of a symbolic link, what it leads to.
    pub fn stat(path: impl Into<PathBuf>) -> Operation {
        Operation(Work::Stat { path: path.into(), follows: true })
    }

    /// As [`Operation::stat`], of a symbolic link itself (lstat).
    pub fn stat_link(path: impl Into<PathBuf>) -> Operation {
        Operation(Work::Stat { path: path.into(), follows: false })
    }

    /// As [`Operation::stat`], of an open file (fstat).
    pub fn stat_file(file: &File) -> Operation {
        Operation(Work::StatFile(file.clone()))
    }

    /// Sets when it was read and changed last; `None` leaves it (utimensat).
    pub fn set_times(
        path: impl Into<PathBuf>,
        accessed: Option<SystemTime>,
        modified: Option<SystemTime>,
    ) -> Operation {
        Operation(Work::Times { path: path.into(), accessed, modified })
    }

    /// Removes a name of what is no directory.
    pub fn unlink(path: impl Into<PathBuf>) -> Operation {
        Operation(Work::Unlink { path: path.into(), directory: false })
    }

    /// Removes an empty directory.
    pub fn remove_directory(path: impl Into<PathBuf>) -> Operation {
        Operation(Work::Unlink { path: path.into(), directory: true })
    }

    /// Renames, and replaces what is at `to`.
    pub fn rename(from: impl Into<PathBuf>, to: impl Into<PathBuf>) -> Operation {
        Operation(Work::Rename { from: from.into(), to: to.into() })
    }

    /// A second name for a file. Of a symbolic link, for the link itself.
    pub fn link(from: impl Into<PathBuf>, to: impl Into<PathBuf>) -> Operation {
        Operation(Work::Link { from: from.into(), to: to.into() })
    }

    /// A symbolic link at `path` that says `target`.
    pub fn symlink(target: impl Into<PathBuf>, path: impl Into<PathBuf>) -> Operation {
        Operation(Work::Symlink { target: target.into(), path: path.into() })
    }

    /// What a symbolic link says: [`Output::Path`].
    pub fn read_link(path: impl Into<PathBuf>) -> Operation {
        Operation(Work::ReadLink { path: path.into() })
    }

    /// Makes a directory, with these bits of permission less the umask.
    pub fn make_directory(path: impl Into<PathBuf>, mode: u32) -> Operation {
        Operation(Work::MakeDirectory { path: path.into(), mode })
    }

    /// The next entries of an open directory, some hundreds: [`Output::Entries`]. None: that was all. The directory's position moves, so
    /// one at a time of each handle.
    pub fn list(directory: &File) -> Operation {
        Operation(Work::List { directory: directory.clone() })
    }

    /// Copies `bytes` from one file to another, in the kernel, sharing blocks where the file system can. [`Output::Count`] is less at the end of
    /// `from`, or where an error or a cancel came after some bytes.
    pub fn copy(from: &File, from_offset: u64, to: &File, to_offset: u64, bytes: u64) -> Operation {
        let (from, to) = (from.clone(), to.clone());
        Operation(Work::Copy(Box::new(Copy { from, from_offset, to, to_offset, bytes, done: 0, cut_short_by: None })))
    }

    /// Sends up to `bytes` of a file from `offset` on, as messages of `message_bytes`, the last of what is left. They are read straight into the channel's
    /// memory. [`Output::Count`], of bytes sent, is less at the end of the file, or where an error or a cancel came after some. While there is no room it
    /// waits for the receiver, in a thread of its own. The sender stays the caller's: it is locked while this is at work. EBUSY: it was locked already. EINVAL:
    /// messages of 0 bytes. ESPIPE: a file that has no places, as a pipe or a FIFO; of a device that has, as the kernel's log, each read is a
    /// message, and it waits for more.
    /// What the channel says instead, as [`Error::Closed`](pelton_channel::Error::Closed), is told as it is.
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

    /// Writes what a receiver receives to a file, from `offset` on, a message behind the other, straight from the channel's memory, and releases it. It ends when
    /// `bytes` have been written, or the next message is larger than what is left of them, which then is still to be received; or when the sender has
    /// closed. [`Output::Count`]: the bytes written, of whole messages. While there is no message it waits for the sender, in a thread of its
    /// own. The receiver stays the caller's: see [`Operation::send`]. A message that could not be written is not released. It costs a system
    /// call for each message: of many small ones see [`Tail`](super::Tail).
    pub fn receive(file: &File, offset: u64, bytes: u64, receiver: &Arc<Mutex<Receiver>>) -> Operation {
        Operation(Work::Pump(Box::new(Pump::new(file, offset, bytes, Channel::From(receiver.clone())))))
    }

    /// The memory that it has: for one that was not begun.
    pub fn into_buffers(self) -> Vec<Buffer> {
        match self.0.into_memory() {
            Pieces::One(buffer) if buffer.is_empty() => Vec::new(),
            Pieces::One(buffer) => vec![buffer],
            Pieces::Many(buffers) => buffers,
        }
    }
}

impl Work {
    /// The files that it is about.
    pub(crate) fn files(&self) -> [Option<&File>; 2] {
        match self {
            Work::Close { file, .. } => [file.as_ref(), None],
            Work::StatFile(file) | Work::List { directory: file } => [Some(file), None],
            Work::Sync { file, .. } | Work::Truncate { file, .. } | Work::Allocate { file, .. } => [Some(file), None],
            Work::Transfer(transfer) => [Some(&transfer.file), None],
            Work::Copy(copy) => [Some(&copy.from), Some(&copy.to)],
            Work::Pump(pump) => [Some(&pump.file), None],
            Work::Open { .. }
            | Work::Stat { .. }
            | Work::Times { .. }
            | Work::Unlink { .. }
            | Work::Rename { .. }
            | Work::Link { .. }
            | Work::Symlink { .. }
            | Work::ReadLink { .. }
            | Work::MakeDirectory { .. } => [None, None],
        }
    }

    /// The paths that it looks up, in the order that system calls take them.
    pub(crate) fn paths(&self) -> [Option<&Path>; 2] {
        match self {
            Work::Open { path, .. }
            | Work::Stat { path, .. }
            | Work::Times { path, .. }
            | Work::Unlink { path, .. }
            | Work::ReadLink { path }
            | Work::MakeDirectory { path, .. } => [Some(path), None],
            Work::Rename { from, to } | Work::Link { from, to } => [Some(from), Some(to)],
            Work::Symlink { target, path } => [Some(target), Some(path)],
            _ => [None, None],
        }
    }

    /// Whether a path has a zero in it, which no call takes.
    pub(crate) fn has_nul(&self) -> bool {
        self.paths().into_iter().flatten().any(|path| path.as_os_str().as_encoded_bytes().contains(&0))
    }

    /// Whether it may make a file longer.
    pub(crate) fn grows(&self) -> bool {
        match self {
            Work::Transfer(transfer) => transfer.writes,
            Work::Truncate { .. } | Work::Allocate { .. } | Work::Copy(_) => true,
            Work::Pump(pump) => matches!(pump.channel, Channel::From(_)),
            _ => false,
        }
    }

    /// What it was about, in words, and where.
    fn describe(&self) -> (&'static str, String) {
        let at = |path: &Path| path.display().to_string();
        let two = |from: &Path, to: &Path| format!("{} to {}", from.display(), to.display());
        match self {
            Work::Open { path, .. } => ("opening", at(path)),
            Work::Close { path, .. } => ("closing", at(path)),
            Work::Transfer(transfer) if transfer.writes => ("writing", at(transfer.file.path())),
            Work::Transfer(transfer) => ("reading", at(transfer.file.path())),
            Work::Sync { file, .. } => ("syncing", at(file.path())),
            Work::Truncate { file, .. } => ("truncating", at(file.path())),
            Work::Allocate { file, .. } => ("allocating", at(file.path())),
            Work::Stat { path, .. } => ("asking about", at(path)),
            Work::StatFile(file) => ("asking about", at(file.path())),
            Work::Times { path, .. } => ("setting the times of", at(path)),
            Work::Unlink { path, .. } => ("removing", at(path)),
            Work::Rename { from, to } => ("renaming", two(from, to)),
            Work::Link { from, to } => ("linking", two(from, to)),
            Work::Symlink { target, path } => ("linking symbolically", two(path, target)),
            Work::ReadLink { path } => ("reading the link", at(path)),
            Work::MakeDirectory { path, .. } => ("making the directory", at(path)),
            Work::List { directory } => ("listing", at(directory.path())),
            Work::Copy(copy) => ("copying", two(copy.from.path(), copy.to.path())),
            Work::Pump(pump) => match pump.channel {
                Channel::To(..) => ("sending", at(pump.file.path())),
                Channel::From(_) => ("writing what is received to", at(pump.file.path())),
            },
        }
    }

    /// What the caller is told of an errno.
    pub(crate) fn error(&mut self, errno: Errno) -> Error {
        if let Work::Pump(pump) = self
            && let Some(told) = pump.told.take()
        {
            return told;
        }
        let (what, path) = self.describe();
        Error::file(what, path, errno)
    }

    /// How it ends by an error: of what has moved some bytes, with their number.
    pub(crate) fn failed(&mut self, error: Errno) -> Result<Output, Errno> {
        match self {
            Work::Transfer(transfer) => transfer.failed(error),
            Work::Pump(pump) => pump.failed(error).map(Output::Count),
            _ => Err(error),
        }
    }

    /// What ended it before all of it was done, after some bytes.
    pub(crate) fn cut_short_by(&self) -> Option<Errno> {
        match self {
            Work::Transfer(transfer) => transfer.cut_short_by,
            Work::Copy(copy) => copy.cut_short_by,
            Work::Pump(pump) => pump.cut_short_by,
            _ => None,
        }
    }

    pub(crate) fn into_memory(self) -> Pieces {
        self.into_parts().0
    }

    /// The memory that it has, and its shares of files.
    pub(crate) fn into_parts(self) -> (Pieces, [Option<File>; 2]) {
        let files = match self {
            Work::Transfer(transfer) => return (transfer.memory, [Some(transfer.file), None]),
            Work::Close { file, .. } => [file, None],
            Work::StatFile(file) | Work::List { directory: file } => [Some(file), None],
            Work::Sync { file, .. } | Work::Truncate { file, .. } | Work::Allocate { file, .. } => [Some(file), None],
            Work::Copy(copy) => [Some(copy.from), Some(copy.to)],
            Work::Pump(pump) => [Some(pump.file), None],
            _ => [None, None],
        };
        (Pieces::One(Buffer::default()), files)
    }
}

impl Transfer {
    /// The bytes that are to go.
    pub(crate) fn bytes(&self) -> usize {
        match &self.memory {
            Pieces::One(buffer) => buffer.len(),
            Pieces::Many(buffers) => buffers.iter().map(|buffer| buffer.len()).sum(),
        }
    }

    /// Where the rest goes, as system calls want it: the current position and the end have no number.
    pub(crate) fn offset(&self) -> u64 {
        match self.place {
            // What is no offset stays none, and does not become the current position.
            Place::At(offset) => offset.saturating_add(self.done as u64).min(1 << 63),
            Place::Current => u64::MAX,
            Place::End => 0,
        }
    }

    /// So many bytes more have gone. Answers what there is to say when that is all: the count.
    pub(crate) fn went(&mut self, bytes: usize) -> Option<Output> {
        self.done += bytes;
        let all = self.done == self.bytes() || bytes == 0 || (!self.writes && self.file.is_stream());
        all.then_some(Output::Count(self.done))
    }

    /// Whether it is for the ring. What writes to a stream is for a thread, where no signal is raised; so is what has a place there, as only system calls
    /// refuse that.
    pub(crate) fn is_for_ring(&self) -> bool {
        !self.file.is_stream() || (!self.writes && matches!(self.place, Place::Current))
    }

    /// What an error means after some bytes have gone: a count, and who goes on is told.
    pub(crate) fn failed(&mut self, error: Errno) -> Result<Output, Errno> {
        if self.done == 0 {
            return Err(error);
        }
        self.cut_short_by = Some(error);
        Ok(Output::Count(self.done))
    }
}

/// What came of an operation that succeeded.
#[derive(Debug)]
#[non_exhaustive]
pub enum Output {
    /// There is nothing to say.
    Done,
    /// So many bytes were read, written or copied.
    Count(usize),
    /// The file is open.
    File(File),
    /// What is known of it.
    Stat(Box<Stat>),
    /// Some entries of a directory; none when there are no more.
    Entries(Vec<Entry>),
    /// What a symbolic link says.
    Path(PathBuf),
}

/// What something in a file system is.
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
    /// A device of characters, as a terminal is.
    Character,
    /// A device of blocks.
    Block,
    /// The file system does not say, or it is something else.
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

/// What is known of a file.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Stat {
    /// What it is.
    pub kind: Kind,
    /// The twelve bits of permission.
    pub mode: u32,
    /// Its length.
    pub bytes: u64,
    /// What it takes on its disk.
    pub allocated_bytes: u64,
    /// How many names it has.
    pub links: u64,
    /// Whose it is.
    pub uid: u32,
    /// Which group's.
    pub gid: u32,
    /// The device that it is on, and its number there: together, which file it is.
    pub device: (u32, u32),
    /// See `device`.
    pub inode: u64,
    /// When it was read last, as far as that is noted.
    pub accessed: SystemTime,
    /// When its bytes were changed last.
    pub modified: SystemTime,
    /// When anything of it was changed last.
    pub changed: SystemTime,
    /// When it was made, where the file system knows.
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

/// A name in a directory; `.` and `..` are left out.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Entry {
    /// The name.
    pub name: OsString,
    /// What it is, as far as the directory says.
    pub kind: Kind,
    /// Its number in the file system.
    pub inode: u64,
}
