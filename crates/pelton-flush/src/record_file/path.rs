//! A record file at its path: opening, locking, creating under a temporary name, renaming, and checking that it is
//! still the file at that path.
//!
//! - **A temporary file is created, never reused** (`O_EXCL`, `O_NOFOLLOW`): no symbolic link is followed, and no other
//!   process has it open. A leftover is removed.
//! - **A file is the one at its path** if device and inode agree; the sink's own descriptor keeps that inode from being
//!   reused.

use super::format::{FileHeader, HEADER, Scanner};
use super::lanes::Lanes;
use super::{TRIES, begin_file, failed};
use pelton_channel::{Error, Result};
use pelton_lane::failpoint;
use pelton_os::lock::{self, Lock};
use pelton_os::{Descriptor, own_uid, sync};
use rustix::fs::{CWD, FileType, Mode, OFlags, RenameFlags, Stat};
use rustix::io::Errno;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The usual mode of logs.
const MODE: Mode = Mode::from_raw_mode(0o640);
/// The kernel frees the lock of a killed process when it has freed its memory, which takes longer the more it has. Far
/// longer than any observed delay; a guess.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// Device and inode, which identify a file independently of its path.
pub(super) type Identity = (u64, u64);

pub(super) fn identity(found: &Stat) -> Identity {
    (found.st_dev, found.st_ino)
}

pub(super) fn stat(file: impl AsFd, path: &Path) -> Result<Stat> {
    rustix::fs::fstat(file).map_err(failed("reading", path, 0))
}

/// Where a file is.
pub(super) enum Location {
    /// At its path, with so many bytes.
    Bytes(u64),
    /// At another path.
    Moved,
    /// Nowhere.
    Deleted,
}

/// Where the file that was at `path` is now. One system call while it is still there.
pub(super) fn locate(file: &Lock, wanted: Identity, path: &Path) -> Result<Location> {
    let moved = || Ok(if stat(file, path)?.st_nlink == 0 { Location::Deleted } else { Location::Moved });
    match rustix::fs::lstat(path) {
        Ok(found) if identity(&found) == wanted => Ok(Location::Bytes(found.st_size as u64)),
        Ok(_) => moved(),
        Err(Errno::NOENT | Errno::NOTDIR) if path.parent().is_some_and(Path::is_dir) => moved(),
        // The process may have dropped the right to search the directory; or the directory was renamed, or this process
        // has another root or other mounts. No file can be created at the path then.
        Err(_) => match stat(file, path)? {
            found if found.st_nlink == 0 => Ok(Location::Deleted),
            found => Ok(Location::Bytes(found.st_size as u64)),
        },
    }
}

/// Without symbolic links, so that a rotation renames the file instead of a link; absolute, so that it holds in any
/// working directory.
pub(super) fn absolute(path: &Path) -> Result<PathBuf> {
    match std::fs::canonicalize(path) {
        Ok(path) => Ok(path),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            std::path::absolute(path).map_err(Error::system(format!("finding {}", path.display())))
        }
        Err(error) => Err(Error::system(format!("finding {}", path.display()))(error)),
    }
}

/// The path with a suffix.
fn with_suffix(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    PathBuf::from(name)
}

/// The temporary name of the next file.
pub(super) fn temporary_path(path: &Path) -> PathBuf {
    with_suffix(path, ".pelton-next")
}

pub(super) fn numbered(path: &Path, number: u64) -> PathBuf {
    with_suffix(path, &format!(".{number:06}"))
}

/// The highest number of a rotated file; 0 if there is none.
pub(super) fn highest_number(path: &Path) -> Result<u64> {
    let directory = path.parent().unwrap_or(path);
    let what = || format!("reading the directory {}", directory.display());
    let mut highest = 0;
    for entry in std::fs::read_dir(directory).map_err(Error::system(what()))? {
        let name = entry.map_err(Error::system(what()))?.file_name();
        let ours = path.file_name().and_then(|ours| name.as_bytes().strip_prefix(ours.as_bytes()));
        let digits = ours.and_then(|rest| rest.strip_prefix(b".")).filter(|digits| digits.len() >= 6);
        let number = digits.and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok());
        // No rotation reaches such a number.
        highest = number.filter(|number| *number < u64::from(u32::MAX)).map_or(highest, |number| highest.max(number));
    }
    Ok(highest)
}

/// Renames, and never replaces a file.
pub(super) fn rename(from: &Path, to: &Path) -> rustix::io::Result<()> {
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // The file system lacks that flag: no other program uses such names.
        Err(Errno::INVAL | Errno::NOSYS) if std::fs::symlink_metadata(to).is_err() => rustix::fs::rename(from, to),
        done => done,
    }
}

/// Each write goes to the current end: after a truncation just before it, the file has no gap of zeros.
const FLAGS: OFlags = OFlags::RDWR
    .union(OFlags::APPEND)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::NONBLOCK)
    .union(OFlags::CLOEXEC)
    .union(OFlags::NOCTTY);

fn open(path: &Path, more: OFlags, mode: Mode) -> Result<rustix::io::Result<Descriptor>> {
    let opened = Descriptor::opened(|| rustix::fs::open(path, FLAGS | more, mode));
    opened.map_err(Error::system(format!("opening {}", path.display())))
}

/// Takes the lock. While another process has it, retries until the timeout.
fn lock(file: Descriptor, path: &Path, timeout: Duration) -> Result<Lock> {
    let locked = lock::lock_until(file, Instant::now() + timeout);
    locked.map_err(Error::system(format!("locking {}", path.display())))?.ok_or_else(|| {
        let path = path.display().to_string();
        Error::RoleTaken { role: "writer".to_owned(), path, pid: 0 }
    })
}

/// Whether `file` is what is at `path`.
pub(super) fn is_at(file: &Lock, path: &Path) -> Result<bool> {
    let own = stat(file, path)?;
    Ok(rustix::fs::lstat(path).is_ok_and(|found| identity(&found) == identity(&own)))
}

fn is_regular(file: &Descriptor, path: &Path) -> Result<bool> {
    Ok(FileType::from_raw_mode(stat(file, path)?.st_mode) == FileType::RegularFile)
}

/// Opens and locks the file at a path. `None`: no file is there.
fn lock_at(path: &Path, timeout: Duration) -> Result<Option<Lock>> {
    for _ in 0..TRIES {
        let file = match open(path, OFlags::empty(), Mode::empty())? {
            Err(Errno::NOENT) => return Ok(None),
            file => file.map_err(failed("opening", path, 0))?,
        };
        if !is_regular(&file, path)? {
            let problem = "it is not a regular file".to_owned();
            return Err(Error::NotARecordFile { path: path.display().to_string(), problem });
        }
        let file = lock(file, path, timeout)?;
        // Its owner may have renamed or removed it before this process got the lock.
        if is_at(&file, path)? {
            return Ok(Some(file));
        }
    }
    Err(unstable_at(path))
}

/// Creates and locks the temporary file. It removes an existing one first, whether a killed writer left it or not.
pub(super) fn create_temporary(temporary: &Path, mode: Option<Mode>) -> Result<Lock> {
    for _ in 0..TRIES {
        match open(temporary, OFlags::CREATE | OFlags::EXCL, MODE)? {
            Ok(file) => {
                failpoint("record file: temporary file created");
                if let Some(mode) = mode {
                    rustix::fs::fchmod(&file, mode).map_err(failed("setting the mode of", temporary, 0))?;
                }
                let file = lock(file, temporary, LOCK_TIMEOUT)?;
                // Another writer may have removed it as a leftover before it was locked.
                if is_at(&file, temporary)? {
                    return Ok(file);
                }
            }
            Err(Errno::EXIST) => remove_leftover(temporary)?,
            Err(errno) => return Err(failed("creating", temporary, 0)(errno)),
        }
    }
    Err(unstable_at(temporary))
}

fn remove_leftover(temporary: &Path) -> Result<()> {
    // A file that cannot be opened belongs to another user, or is a symbolic link: no writer of this user uses it.
    let _lock = match open(temporary, OFlags::empty(), Mode::empty())? {
        Ok(file) if is_regular(&file, temporary)? => {
            let file = lock(file, temporary, LOCK_TIMEOUT)?;
            // Meanwhile it may have become the log itself, or been removed.
            if !is_at(&file, temporary)? {
                return Ok(());
            }
            Some(file)
        }
        _ => None,
    };
    match rustix::fs::unlink(temporary) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(failed("removing the leftover", temporary, 0)(errno)),
    }
}

pub(super) fn unstable_at(path: &Path) -> Error {
    let problem = format!("it was another file at each of {TRIES} attempts: let one process at a time write to it");
    Error::NotARecordFile { path: path.display().to_string(), problem }
}

/// What a new file takes over from its predecessor.
pub(super) struct Predecessor {
    /// The least number of the new file.
    pub(super) number: u64,
    /// `None`: the usual one.
    pub(super) mode: Option<Mode>,
    /// The encoded last numbers of lanes.
    pub(super) lanes: Vec<u8>,
}

impl Predecessor {
    /// For a new writer: reads the last rotated file, if this user owns it. It is the predecessor if a writer was
    /// killed between the two renames of a rotation, or another program has taken the file away.
    fn found(path: &Path, number: u64) -> Predecessor {
        let mut predecessor = Predecessor { number: 0, mode: None, lanes: Vec::new() };
        let numbered = numbered(path, number);
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let Ok(file) = rustix::fs::open(&numbered, flags, Mode::empty()) else { return predecessor };
        let Ok(found) = rustix::fs::fstat(&file) else { return predecessor };
        if found.st_uid != own_uid() {
            return predecessor;
        }
        predecessor.mode = Some(Mode::from_raw_mode(found.st_mode & 0o777));
        let end = found.st_size as u64;
        // Damage there concerns its readers only.
        let Ok(mut scanner) = Scanner::of(file, &numbered) else { return predecessor };
        let (mut at, mut lanes) = (HEADER, Lanes::default());
        while at < end
            && let Ok(Ok(header)) = scanner.chunk(at, end, |_| end - at <= super::VERIFIED_BYTES)
            && lanes.note_chunk(&mut scanner, at, &header).is_ok()
        {
            at += header.all_bytes();
        }
        predecessor.lanes = lanes.bytes();
        predecessor
    }
}

/// Opens and locks the file at a path, or creates it. `predecessor`: of a writer that has a file already.
pub(super) fn open_or_begin(path: &Path, syncs: bool, predecessor: Option<&Predecessor>) -> Result<Lock> {
    let temporary = temporary_path(path);
    // A write does not wait for another writer: its caller may retry for ever.
    let timeout = if predecessor.is_some() { Duration::ZERO } else { LOCK_TIMEOUT };
    for _ in 0..TRIES {
        let opened = lock_at(path, timeout)?;
        if let Some(file) = &opened {
            // The holder of this lock is the only one that creates the temporary file, except before a first file
            // exists.
            let _ = std::fs::remove_file(&temporary);
            if stat(file, path)?.st_size > 0 {
                return Ok(opened.expect("just opened"));
            }
        }
        let highest = highest_number(path)?;
        let found = predecessor.is_none().then(|| Predecessor::found(path, highest));
        let predecessor = predecessor.or(found.as_ref()).expect("found if not given");
        let header = FileHeader::new((highest + 1).max(predecessor.number));
        if let Some(file) = opened {
            begin_file(&file, path, &header, &predecessor.lanes)?;
            return Ok(file);
        }
        let created = create_temporary(&temporary, predecessor.mode)?;
        begin_file(&created, &temporary, &header, &predecessor.lanes)?;
        failpoint("record file: first file complete");
        if syncs {
            sync(&created).map_err(failed("syncing", &temporary, 0))?;
        }
        match rename(&temporary, path) {
            Ok(()) if is_at(&created, path)? => {
                failpoint("record file: first renamed into place");
                if syncs {
                    sync_directory(path)?;
                }
                return Ok(created);
            }
            Ok(()) => {}
            // Another writer, or a program that rotates, was first.
            Err(Errno::EXIST | Errno::NOENT) => _ = std::fs::remove_file(&temporary),
            Err(error) => return Err(failed("renaming", &temporary, 0)(error)),
        }
    }
    Err(unstable_at(path))
}

/// Brings the names in the file's directory to the disk.
pub(super) fn sync_directory(path: &Path) -> Result<()> {
    let directory = path.parent().unwrap_or(path);
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let synced = rustix::fs::open(directory, flags, Mode::empty()).and_then(rustix::fs::fsync);
    synced.map_err(failed("syncing the directory", directory, 0))
}
