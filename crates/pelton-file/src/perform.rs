//! Performs an operation in a thread that may wait.

use crate::cancel::Cancel;
use crate::faults::Fault;
use crate::file::{File, Root};
use crate::operation::{Copy, Entry, OnFile, OnPath, Open, Output, Stat, Work};
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, Mode, OFlags, RawDir, ResolveFlags, Statx, StatxFlags, Timespec, Timestamps,
};
use rustix::io::{Errno, Result, retry_on_intr};
use rustix::path::Arg;
use std::ffi::{OsStr, OsString};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::Path;
use std::time::SystemTime;

/// The buffer for entries of a directory, as large as the C library's.
const LIST_BYTES: usize = 32 << 10;
/// Bytes that a copy moves between two checks for a cancel: some milliseconds.
const COPY_BYTES: u64 = 8 << 20;
/// How often to resolve a path below a root while others rename its directories: each attempt fails only after such a
/// rename.
const RESOLVE_TRIES: usize = 1000;

/// Performs an operation, and waits as long as the system takes. If it would wait for another process, for instance at
/// a pipe, it does so only if `waits`; else it returns `None`, and a later call can continue. A cancelled operation
/// ends early if it can.
pub(crate) fn perform(work: &mut Work, root: Option<&Root>, cancel: &Cancel, waits: bool) -> Result<Option<Output>> {
    if cancel.is_cancelled() {
        return work.failed(Errno::CANCELED).map(Some);
    }
    match work {
        Work::Transfer(transfer) => return Ok(transfer.run(cancel, waits, false)?.map(Output::Count)),
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
    // Even calls that do not follow links follow a name with a slash behind it, which must be a directory.
    let has_trailing_slash = path.as_os_str().as_bytes().ends_with(b"/");
    if root.is_some() && has_trailing_slash && matches!(what, OnPath::ReadLink | OnPath::Link { .. }) {
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

fn copy_all(copy: &mut Copy, cancel: &Cancel) -> Result<Output> {
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
