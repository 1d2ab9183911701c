//! Performs an operation in the calling thread: inline, if nothing has to wait; or to its end, in a thread that may
//! wait.

use crate::faults::Fault;
use crate::file::{File, INLINE_BYTES_MAX, InlineMode, Root};
use crate::interrupt::Interrupt;
use crate::operation::{Copy, Entry, OnFile, OnPath, Open, Output, Pieces, Position, Stat, Transfer, Work};
use rustix::event::PollFlags;
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, Mode, OFlags, RawDir, ResolveFlags, Statx, StatxFlags, Timespec, Timestamps,
};
use rustix::io::{Errno, ReadWriteFlags, Result, retry_on_intr};
use rustix::path::Arg;
use std::ffi::{OsStr, OsString};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::Path;
use std::time::SystemTime;

/// The most buffers of one vectored system call.
pub(crate) const IOV_MAX: usize = 1024;
/// The buffer for entries of a directory, as large as the C library's.
const LIST_BYTES: usize = 32 << 10;
/// Bytes that a copy moves between two checks for a cancel: some milliseconds.
const COPY_BYTES: u64 = 8 << 20;
/// How often a file that is not a stream may return EAGAIN, which it should never do.
const TRIES: usize = 1000;
/// How often to resolve a path below a root while others rename its directories: each attempt fails only after such a
/// rename.
const RESOLVE_TRIES: usize = 1000;

/// Performs as much of a transfer as needs no waiting. `None`: the rest would, or may, wait.
#[inline]
pub(crate) fn try_inline(transfer: &mut Transfer) -> Option<Result<Output>> {
    // Inline writes to a stream could raise a signal.
    if transfer.bytes() > INLINE_BYTES_MAX || (transfer.writes && transfer.file.is_stream()) {
        return None;
    }
    loop {
        let mode = transfer.file.inline_mode(transfer.writes).get();
        let flags = match mode {
            InlineMode::NOWAIT => ReadWriteFlags::NOWAIT,
            InlineMode::MEMORY => ReadWriteFlags::empty(),
            _ => return None,
        };
        match step(transfer, flags, usize::MAX) {
            // Linux 5.9 and 5.10 also return 0 for bytes outside the page cache (preadv2(2), BUGS).
            Ok(0) if mode == InlineMode::NOWAIT && transfer.done < transfer.bytes() => return None,
            Ok(bytes) => {
                if let Some(output) = transfer.advance(bytes) {
                    return Some(Ok(output));
                }
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return None,
            // Tried once per file.
            Err(Errno::OPNOTSUPP) if mode == InlineMode::NOWAIT => {
                transfer.file.inline_mode(transfer.writes).set(InlineMode::NEVER);
            }
            Err(error) => return Some(transfer.failed(error)),
        }
    }
}

/// The fast path for the most frequent operation: a read that waits like the plain system call, from a file that is not
/// a stream. `None`: the rest is for [`perform`].
#[inline]
pub(crate) fn read_fast(transfer: &mut Transfer) -> Option<Result<Output>> {
    if transfer.writes || transfer.file.is_stream() {
        return None;
    }
    match step(transfer, ReadWriteFlags::empty(), usize::MAX) {
        Ok(bytes) => transfer.advance(bytes).map(Ok),
        Err(Errno::INTR | Errno::AGAIN) => None,
        Err(error) => Some(transfer.failed(error)),
    }
}

/// One system call of a transfer, which moves at most so many bytes.
#[inline]
fn step(transfer: &mut Transfer, flags: ReadWriteFlags, most: usize) -> Result<usize> {
    let most = match Fault::next() {
        Some(Fault::Error(errno)) => return Err(errno),
        Some(Fault::Short(bytes)) => most.min(bytes),
        None => most,
    };
    let (offset, done) = (transfer.offset(), transfer.done);
    let fd = transfer.file.as_fd();
    let flags = if matches!(transfer.position, Position::End) { flags | ReadWriteFlags::APPEND } else { flags };
    let is_plain = flags.is_empty() && matches!(transfer.position, Position::At(_));
    // The most frequent case first.
    if let (Pieces::One(buffer), false, usize::MAX) = (&mut transfer.memory, transfer.writes, most) {
        let rest = &mut buffer[done..];
        // The plain calls are some tens of nanoseconds faster than those with flags.
        return match is_plain {
            true => rustix::io::pread(fd, rest, offset),
            false => rustix::io::preadv2(fd, &mut [IoSliceMut::new(rest)], offset, flags),
        };
    }
    step_slow(transfer, flags, most)
}

/// Any other system call of a transfer.
#[inline(never)]
fn step_slow(transfer: &mut Transfer, flags: ReadWriteFlags, most: usize) -> Result<usize> {
    let (offset, done) = (transfer.offset(), transfer.done);
    let fd = transfer.file.as_fd();
    let is_plain = flags.is_empty() && matches!(transfer.position, Position::At(_));
    // A limited call moves bytes of one buffer only.
    let count = if most < usize::MAX { 1 } else { IOV_MAX };
    match (&mut transfer.memory, transfer.writes) {
        (Pieces::One(buffer), false) => {
            let bytes = &mut buffer[done..];
            let most = most.min(bytes.len());
            rustix::io::preadv2(fd, &mut [IoSliceMut::new(&mut bytes[..most])], offset, flags)
        }
        (Pieces::One(buffer), true) => {
            let bytes = &buffer[done..];
            let bytes = &bytes[..most.min(bytes.len())];
            match is_plain {
                true => rustix::io::pwrite(fd, bytes, offset),
                false => rustix::io::pwritev2(fd, &[IoSlice::new(bytes)], offset, flags),
            }
        }
        (Pieces::Many(buffers), false) => {
            let mut skipped = done;
            let mut slices: Vec<IoSliceMut<'_>> = (buffers.iter_mut())
                .filter_map(|buffer| {
                    let skip = skipped.min(buffer.len());
                    skipped -= skip;
                    (skip < buffer.len()).then(|| IoSliceMut::new(&mut buffer[skip..]))
                })
                .take(count)
                .collect();
            rustix::io::preadv2(fd, &mut slices, offset, flags)
        }
        (Pieces::Many(buffers), true) => {
            let rest = rest_of(buffers, done).take(count).map(|bytes| &bytes[..most.min(bytes.len())]);
            let slices: Vec<IoSlice<'_>> = rest.map(IoSlice::new).collect();
            rustix::io::pwritev2(fd, &slices, offset, flags)
        }
    }
}

/// The bytes after the first `done`, as many buffers as one call takes.
pub(crate) fn rest_of(buffers: &[pelton_os::Buffer], mut done: usize) -> impl Iterator<Item = &[u8]> {
    (buffers.iter())
        .filter_map(move |buffer| {
            let skip = done.min(buffer.len());
            done -= skip;
            (skip < buffer.len()).then(|| &buffer[skip..])
        })
        .take(IOV_MAX)
}

/// Performs an operation, and waits as long as the system takes. If it would wait for another process, for instance at
/// a pipe, it does so only if `waits`; else it returns `None`, and a later call can continue. A cancelled operation
/// ends early if it can.
pub(crate) fn perform(
    work: &mut Work,
    root: Option<&Root>,
    cancel: &dyn Interrupt,
    waits: bool,
) -> Result<Option<Output>> {
    if cancel.is_cancelled() {
        return work.failed(Errno::CANCELED).map(Some);
    }
    match work {
        Work::Transfer(transfer) => return transfer_all(transfer, cancel, waits, false),
        Work::Pump(pump) if waits => return pump.run(cancel).map(|bytes| Some(Output::Count(bytes))),
        Work::Pump(_) => return Ok(None),
        Work::OnPath(path, OnPath::Open(how)) if !waits && may_wait_for_others(root, path, *how) => return Ok(None),
        _ => {}
    }
    if let Some(errno) = Fault::error() {
        return Err(errno);
    }
    let output = match work {
        Work::OnFile(file, what) => on_file(file, what)?,
        Work::OnPath(path, what) => on_path(root, path, what)?,
        Work::Close { file, .. } => {
            let last = file.take().and_then(File::into_last).ok_or(Errno::BUSY)?;
            last.fd.close()?;
            Output::Done
        }
        Work::Copy(copy) => copy_all(copy, cancel)?,
        Work::Transfer(_) | Work::Pump(_) => unreachable!("handled above"),
    };
    Ok(Some(output))
}

fn on_file(file: &File, what: &OnFile) -> Result<Output> {
    match what {
        OnFile::Sync { data_only: true } => retry_on_intr(|| rustix::fs::fdatasync(file))?,
        OnFile::Sync { data_only: false } => retry_on_intr(|| rustix::fs::fsync(file))?,
        OnFile::Truncate { bytes } => retry_on_intr(|| rustix::fs::ftruncate(file, *bytes))?,
        OnFile::Allocate { offset, bytes } => {
            retry_on_intr(|| rustix::fs::fallocate(file, FallocateFlags::empty(), *offset, *bytes))?;
        }
        OnFile::Stat => return stat_of(file, c"", AtFlags::EMPTY_PATH).map(stat_output),
        OnFile::List => return list(file).map(Output::Entries),
    }
    Ok(Output::Done)
}

/// Waits only for the system; to open a file may wait for another process.
fn on_path(root: Option<&Root>, path: &Path, what: &OnPath) -> Result<Output> {
    // Below a root, a call that does not follow links would follow a name with a slash behind it.
    if root.is_some() && has_trailing_slash(path) && matches!(what, OnPath::ReadLink | OnPath::Link { .. }) {
        open_path_only(root, path, true)?;
        return Err(if matches!(what, OnPath::ReadLink) { Errno::INVAL } else { Errno::PERM });
    }
    match what {
        OnPath::Open(how) => return open_file(root, path, *how).map(Output::File),
        OnPath::Stat { follows } => return stat(root, path, *follows).map(stat_output),
        OnPath::Times { accessed, modified } => {
            let times = Timestamps { last_access: time(*accessed)?, last_modification: time(*modified)? };
            let opened = root.map(|root| open_path_only(Some(root), path, true)).transpose()?;
            retry_on_intr(|| match &opened {
                None => rustix::fs::utimensat(CWD, path, &times, AtFlags::empty()),
                Some(opened) => rustix::fs::utimensat(opened, "", &times, AtFlags::EMPTY_PATH),
            })?;
        }
        OnPath::Unlink { directory } => {
            let flags = if *directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
            let parent = Parent::of(root, path)?;
            retry_on_intr(|| rustix::fs::unlinkat(parent.fd(), parent.name, flags))?;
        }
        OnPath::Rename { to } => {
            let (from, to) = (Parent::of(root, path)?, Parent::of(root, to)?);
            retry_on_intr(|| rustix::fs::renameat(from.fd(), from.name, to.fd(), to.name))?;
        }
        OnPath::Link { to } => {
            let (from, to) = (Parent::of(root, path)?, Parent::of(root, to)?);
            retry_on_intr(|| rustix::fs::linkat(from.fd(), from.name, to.fd(), to.name, AtFlags::empty()))?;
        }
        OnPath::Symlink { target } => {
            let parent = Parent::of(root, path)?;
            retry_on_intr(|| rustix::fs::symlinkat(target, parent.fd(), parent.name))?;
        }
        OnPath::ReadLink => {
            let parent = Parent::of(root, path)?;
            let target = retry_on_intr(|| rustix::fs::readlinkat(parent.fd(), parent.name, Vec::new()))?;
            return Ok(Output::Path(OsString::from_vec(target.into_bytes()).into()));
        }
        OnPath::MakeDirectory { mode } => {
            let parent = Parent::of(root, path)?;
            retry_on_intr(|| rustix::fs::mkdirat(parent.fd(), parent.name, Mode::from_raw_mode(*mode)))?;
        }
    }
    Ok(Output::Done)
}

fn stat_output(found: Statx) -> Output {
    Output::Stat(Box::new(Stat::of(&found)))
}

pub(crate) const STATX: StatxFlags = StatxFlags::BASIC_STATS.union(StatxFlags::BTIME);

pub(crate) fn open_file(root: Option<&Root>, path: &Path, how: Open) -> Result<File> {
    File::opened(open(root, path, how.flags, how.mode, how.resolve(root))?, path.to_owned(), how.flags)
}

/// Whether opening may wait for another process: at a FIFO for the other side, at a terminal for its line. It cannot
/// see a file that replaces this one at this moment.
fn may_wait_for_others(root: Option<&Root>, path: &Path, how: Open) -> bool {
    let never = how.flags.intersects(OFlags::DIRECTORY | OFlags::NONBLOCK | OFlags::PATH)
        || how.flags.contains(OFlags::CREATE | OFlags::EXCL);
    let kind = |found: Statx| FileType::from_raw_mode(found.stx_mode.into());
    let follows = !how.flags.contains(OFlags::NOFOLLOW);
    !never
        && stat(root, path, follows)
            .is_ok_and(|found| matches!(kind(found), FileType::Fifo | FileType::CharacterDevice))
}

fn stat(root: Option<&Root>, path: &Path, follows: bool) -> Result<Statx> {
    match root {
        None if follows => stat_of(CWD, path, AtFlags::empty()),
        None => stat_of(CWD, path, AtFlags::SYMLINK_NOFOLLOW),
        Some(_) => stat_of(open_path_only(root, path, follows)?, c"", AtFlags::EMPTY_PATH),
    }
}

fn stat_of(directory: impl AsFd, path: impl Arg + std::marker::Copy, flags: AtFlags) -> Result<Statx> {
    retry_on_intr(|| rustix::fs::statx(&directory, path, flags, STATX))
}

/// Transfers all bytes. A call on a stream does not wait, because a cancel could not interrupt it: other readers or
/// writers may be faster. The thread waits for the stream and for the cancel together. If `is_nonblocking`, the file's
/// own flag does that, and calls need no flag.
fn transfer_all(
    transfer: &mut Transfer,
    cancel: &dyn Interrupt,
    waits: bool,
    is_nonblocking: bool,
) -> Result<Option<Output>> {
    let is_stream = transfer.file.is_stream();
    let event = if transfer.writes { PollFlags::OUT } else { PollFlags::IN };
    let (mut flags, mut most) = match is_stream && !is_nonblocking {
        true => (ReadWriteFlags::NOWAIT, usize::MAX),
        false => (ReadWriteFlags::empty(), usize::MAX),
    };
    let mut tries = TRIES;
    loop {
        // Without RWF_NOWAIT: a stream that reports readiness has at least this much space.
        if is_stream && flags.is_empty() && !is_nonblocking {
            if !waits {
                return Ok(None);
            }
            cancel.wait_for(transfer.file.as_fd(), event)?;
            most = if transfer.writes { libc::PIPE_BUF } else { usize::MAX };
        }
        if cancel.is_cancelled() {
            return transfer.failed(Errno::CANCELED).map(Some);
        }
        match step(transfer, flags, most) {
            Ok(bytes) => {
                if let Some(output) = transfer.advance(bytes) {
                    return Ok(Some(output));
                }
            }
            Err(Errno::OPNOTSUPP) if !flags.is_empty() => {
                if waits
                    && cancel.can_cancel()
                    && let Some(reopened) = reopened_nonblocking(transfer)
                {
                    let file = std::mem::replace(&mut transfer.file, reopened);
                    let result = transfer_all(transfer, cancel, waits, true);
                    transfer.file = file;
                    return result;
                }
                flags = ReadWriteFlags::empty();
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) if is_stream && !waits => return Ok(None),
            Err(Errno::AGAIN) if is_stream => cancel.wait_for(transfer.file.as_fd(), event)?,
            // No event says when to retry.
            Err(Errno::AGAIN) if tries > 0 => tries -= 1,
            Err(error) => return transfer.failed(error).map(Some),
        }
    }
}

/// A FIFO does not support RWF_NOWAIT, so this opens it once more with O_NONBLOCK. Otherwise a faster reader could
/// leave this thread blocked in a call, which no cancel interrupts. `None`: it is no FIFO, has no reader, or may not be
/// opened.
#[cold]
fn reopened_nonblocking(transfer: &Transfer) -> Option<File> {
    let file = &transfer.file;
    let kind = FileType::from_raw_mode(rustix::fs::fstat(file).ok()?.st_mode);
    if kind != FileType::Fifo {
        return None;
    }
    let access = if transfer.writes { OFlags::WRONLY } else { OFlags::RDONLY };
    let flags = access | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let itself = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    File::opened(rustix::fs::open(itself, flags, Mode::empty()).ok()?, file.path().to_owned(), flags).ok()
}

fn time(time: Option<SystemTime>) -> Result<Timespec> {
    let Some(time) = time else { return Ok(Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT }) };
    let (seconds, nanoseconds) = match time.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(since) => (i64::try_from(since.as_secs()), since.subsec_nanos()),
        // Before 1970 the seconds are negative, and the nanoseconds count upwards from them.
        Err(before) => {
            let before = before.duration();
            let up = u64::from(before.subsec_nanos() > 0);
            let seconds = i64::try_from(before.as_secs() + up).map(|seconds| -seconds);
            (seconds, (1_000_000_000 - before.subsec_nanos()) % 1_000_000_000)
        }
    };
    Ok(Timespec { tv_sec: seconds.map_err(|_| Errno::INVAL)?, tv_nsec: nanoseconds.into() })
}

/// Opens a path, below the root if there is one.
fn open(root: Option<&Root>, path: &Path, flags: OFlags, mode: Mode, resolve: ResolveFlags) -> Result<OwnedFd> {
    if resolve.is_empty() {
        return retry_on_intr(|| rustix::fs::openat(CWD, path, flags, mode));
    }
    let directory = root.map_or(CWD, Root::as_fd);
    for _ in 0..RESOLVE_TRIES {
        match rustix::fs::openat2(directory, path, flags, mode, resolve) {
            Err(Errno::INTR) => {}
            // Another process renamed a directory of the path meanwhile.
            Err(Errno::AGAIN) => std::thread::yield_now(),
            opened => return opened,
        }
    }
    Err(Errno::XDEV)
}

/// Opens a path below the root with O_PATH.
fn open_path_only(root: Option<&Root>, path: &Path, follows: bool) -> Result<OwnedFd> {
    let no_follow = if follows { OFlags::empty() } else { OFlags::NOFOLLOW };
    open(root, path, OFlags::PATH | OFlags::CLOEXEC | no_follow, Mode::empty(), Root::RESOLVE)
}

/// Whether a path ends with a slash. Then even calls that do not follow links follow the last name, which must be a
/// directory.
fn has_trailing_slash(path: &Path) -> bool {
    path.as_os_str().as_bytes().ends_with(b"/")
}

/// A directory, and a name in it.
struct Parent<'a> {
    directory: Option<OwnedFd>,
    name: &'a Path,
}

impl<'a> Parent<'a> {
    /// Below a root this opens the directory first, so that the name is directly in that directory.
    fn of(root: Option<&Root>, path: &'a Path) -> Result<Parent<'a>> {
        if root.is_none() {
            return Ok(Parent { directory: None, name: path });
        }
        let bytes = path.as_os_str().as_bytes();
        let end = bytes.iter().rposition(|byte| *byte != b'/').map_or(0, |last| last + 1);
        let begin = bytes[..end].iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
        let parent = match begin {
            0 => Path::new("."),
            _ => Path::new(OsStr::from_bytes(&bytes[..begin])),
        };
        // One trailing slash stays: it means that the name is a directory's.
        let name = &bytes[begin..bytes.len().min(end + 1)];
        if end == 0 {
            return Err(if bytes.is_empty() { Errno::NOENT } else { Errno::XDEV });
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = open(root, parent, flags, Mode::empty(), Root::RESOLVE)?;
        Ok(Parent { directory: Some(directory), name: Path::new(OsStr::from_bytes(name)) })
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.directory.as_ref().map_or(CWD, AsFd::as_fd)
    }
}

fn list(directory: &File) -> Result<Vec<Entry>> {
    let mut buffer = vec![MaybeUninit::uninit(); LIST_BYTES];
    let mut found = RawDir::new(directory.as_fd(), &mut buffer);
    let mut entries = Vec::new();
    while let Some(entry) = found.next() {
        match entry {
            Ok(entry) if matches!(entry.file_name().to_bytes(), b"." | b"..") => {}
            Ok(entry) => entries.push(Entry {
                name: OsStr::from_bytes(entry.file_name().to_bytes()).to_owned(),
                kind: entry.file_type().into(),
                inode: entry.ino(),
            }),
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error),
        }
        // A buffer with only `.` and `..` is not the end.
        if found.is_buffer_empty() && !entries.is_empty() {
            break;
        }
    }
    Ok(entries)
}

fn copy_all(copy: &mut Copy, cancel: &dyn Interrupt) -> Result<Output> {
    let mut in_kernel = true;
    let count = |copy: &Copy| Ok(Output::Count(copy.done as usize));
    while copy.done < copy.bytes {
        let moved = match (cancel.is_cancelled(), Fault::error()) {
            (true, _) => Err(Errno::CANCELED),
            (false, Some(errno)) => Err(errno),
            (false, _) if in_kernel => copy_in_kernel(copy),
            (false, _) => copy_in_user_space(copy),
        };
        match moved {
            Ok(0) => break,
            Ok(bytes) => copy.done += bytes as u64,
            Err(Errno::INTR) => {}
            // The two file systems do not support it together, or one not at all.
            Err(Errno::XDEV | Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS | Errno::PERM)
                if in_kernel && !is_same_file(copy)? =>
            {
                in_kernel = false;
            }
            Err(error) if copy.done > 0 => {
                copy.cut_short_by = Some(error);
                return count(copy);
            }
            Err(error) => return Err(error),
        }
    }
    count(copy)
}

/// Whether both are the same file, in which an overlap is an error.
fn is_same_file(copy: &Copy) -> Result<bool> {
    let (from, to) = (rustix::fs::fstat(&copy.from)?, rustix::fs::fstat(&copy.to)?);
    Ok((from.st_dev, from.st_ino) == (to.st_dev, to.st_ino))
}

fn copy_in_kernel(copy: &Copy) -> Result<usize> {
    let (mut from, mut to) = (copy.from_offset + copy.done, copy.to_offset + copy.done);
    let bytes = (copy.bytes - copy.done).min(COPY_BYTES) as usize;
    let moved = rustix::fs::copy_file_range(&copy.from, Some(&mut from), &copy.to, Some(&mut to), bytes)?;
    // Generated files, as below /proc, report a length of 0.
    if moved == 0 && copy.done == 0 && !is_same_file(copy)? { Err(Errno::INVAL) } else { Ok(moved) }
}

fn copy_in_user_space(copy: &Copy) -> Result<usize> {
    let mut bytes = vec![0; (copy.bytes - copy.done).min(128 << 10) as usize];
    let read = rustix::io::pread(&copy.from, &mut bytes[..], copy.from_offset + copy.done)?;
    let mut written = 0;
    while written < read {
        match rustix::io::pwrite(&copy.to, &bytes[written..read], copy.to_offset + copy.done + written as u64) {
            Ok(more) => written += more,
            Err(Errno::INTR) => {}
            Err(_) if written > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(written)
}
