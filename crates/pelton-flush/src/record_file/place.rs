//! A record file at its path: opening, locking, creating under a temporary name, renaming, and checking that it still is the file at that path.
//!
//! - **A temporary file is created, never reused** (`O_EXCL`, `O_NOFOLLOW`): no symbolic link is followed, and no other process has it
//!   open. A leftover is removed.
//! - **A file is the one at its path** if device and inode agree; the sink's own descriptor keeps that inode from being used again.

use super::format::{Chunks, FileHeader, HEADER};
use super::lanes::Lanes;
use super::{TRIES, begin_file, failed};
use pelton_channel::{Error, Result};
use pelton_lane::failpoint;
use pelton_os::lock::{self, Lock};
use pelton_os::{Descriptor, own_uid, sync};
use rustix::fs::{CWD, FileType, Mode, OFlags, RenameFlags, Stat};
use rustix::io::Errno;
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// As is usual for logs.
const MODE: Mode = Mode::from_raw_mode(0o640);
/// The kernel gives the lock of a killed process back when it has taken the process apart, which takes longer the more memory that has.
/// Far more than was ever seen; a guess.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// Which file it is, wherever it is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    device: u64,
    inode: u64,
}

impl Identity {
    pub(super) fn of(found: &Stat) -> Identity {
        Identity { device: found.st_dev, inode: found.st_ino }
    }
}

/// Where a file is.
pub(super) enum There {
    /// At its path, with so many bytes.
    Bytes(u64),
    /// At another path.
    Moved,
    /// Nowhere.
    Deleted,
}

/// Where the file is now that was at `path`. One system call while it is there.
pub(super) fn find(file: &Lock, identity: Identity, path: &Path) -> Result<There> {
    let own = || rustix::fs::fstat(file).map_err(failed("reading", path, 0));
    let moved = || Ok(if own()?.st_nlink == 0 { There::Deleted } else { There::Moved });
    match rustix::fs::lstat(path) {
        Ok(found) if Identity::of(&found) == identity => Ok(There::Bytes(found.st_size as u64)),
        Ok(_) => moved(),
        Err(Errno::NOENT | Errno::NOTDIR) if path.parent().is_some_and(Path::is_dir) => moved(),
        // The process may not search the directory any more, as it has given up its rights. Or the directory is not at its path, as it was renamed,
        // or this process has another root or other mounts: no file can be created at the path.
        Err(_) => match own()? {
            found if found.st_nlink == 0 => Ok(There::Deleted),
            found => Ok(There::Bytes(found.st_size as u64)),
        },
    }
}

/// Without symbolic links, so that a rotation renames the file and not a link to it, and good in any working directory.
pub(super) fn absolute(path: &Path) -> Result<PathBuf> {
    match std::fs::canonicalize(path) {
        Ok(path) => Ok(path),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            std::path::absolute(path).map_err(Error::system(format!("finding {}", path.display())))
        }
        Err(error) => Err(Error::system(format!("finding {}", path.display()))(error)),
    }
}

/// The name with something at its end.
fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    PathBuf::from(name)
}

/// The temporary name of the next file.
pub(super) fn aside(path: &Path) -> PathBuf {
    beside(path, ".pelton-next")
}

pub(super) fn numbered(path: &Path, number: u64) -> PathBuf {
    beside(path, &format!(".{number:06}"))
}

/// The highest number that a file of the rotation has; 0 if there is none.
pub(super) fn highest_number(path: &Path) -> Result<u64> {
    let directory = path.parent().unwrap_or(path);
    let what = || format!("reading the directory {}", directory.display());
    let mut highest = 0;
    for entry in std::fs::read_dir(directory).map_err(Error::system(what()))? {
        let name = entry.map_err(Error::system(what()))?.file_name();
        let ours = path.file_name().and_then(|ours| name.as_bytes().strip_prefix(ours.as_bytes()));
        let digits = ours.and_then(|rest| rest.strip_prefix(b".")).filter(|digits| digits.len() >= 6);
        let number = digits.and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok());
        // Nothing of ours has so many before it that it could not be counted.
        highest = number.filter(|number| *number < u64::from(u32::MAX)).map_or(highest, |number| highest.max(number));
    }
    Ok(highest)
}

/// Never over anything.
pub(super) fn rename(from: &Path, to: &Path) -> rustix::io::Result<()> {
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // A file system that cannot: nobody else gives files such names.
        Err(Errno::INVAL | Errno::NOSYS) if std::fs::symlink_metadata(to).is_err() => rustix::fs::rename(from, to),
        done => done,
    }
}

/// All writes go to the end, wherever that is by then: a file that is truncated just before a write has no zeros before it.
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

/// Takes the lock. While another process has it, tries again for so long.
fn lock(file: Descriptor, path: &Path, timeout: Duration) -> Result<Lock> {
    let locked = lock::lock_until(file, Instant::now() + timeout);
    locked.map_err(Error::system(format!("locking {}", path.display())))?.ok_or_else(|| {
        let path = path.display().to_string();
        Error::RoleTaken { role: "writer".to_owned(), path, pid: 0 }
    })
}

/// Whether `file` is what is at `path`.
pub(super) fn is_at(file: &Lock, path: &Path) -> Result<bool> {
    let own = rustix::fs::fstat(file).map_err(failed("reading", path, 0))?;
    Ok(rustix::fs::lstat(path).is_ok_and(|found| Identity::of(&found) == Identity::of(&own)))
}

fn is_regular(file: &Descriptor, path: &Path) -> Result<bool> {
    let found = rustix::fs::fstat(file).map_err(failed("reading", path, 0))?;
    Ok(FileType::from_raw_mode(found.st_mode) == FileType::RegularFile)
}

/// Opens the file at a path, for its only writer. `None`: nothing is there.
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
        // Its owner may have renamed, or removed, it before the lock was had.
        if is_at(&file, path)? {
            return Ok(Some(file));
        }
    }
    Err(nothing_at(path))
}

/// Creates the temporary file, and locks it. One that a killed process left is removed first; what no writer can have left, too.
pub(super) fn create_aside(aside: &Path, mode: Option<Mode>) -> Result<Lock> {
    for _ in 0..TRIES {
        match open(aside, OFlags::CREATE | OFlags::EXCL, MODE)? {
            Ok(file) => {
                failpoint("record file: aside created");
                if let Some(mode) = mode {
                    rustix::fs::fchmod(&file, mode).map_err(failed("setting the mode of", aside, 0))?;
                }
                let file = lock(file, aside, LOCK_TIMEOUT)?;
                // Another writer may have taken it for a leftover before it was locked.
                if is_at(&file, aside)? {
                    return Ok(file);
                }
            }
            Err(Errno::EXIST) => remove_leftover(aside)?,
            Err(errno) => return Err(failed("creating", aside, 0)(errno)),
        }
    }
    Err(nothing_at(aside))
}

fn remove_leftover(aside: &Path) -> Result<()> {
    // One that cannot be opened is not this user's, or a symbolic link: no writer that this one could work beside is using it.
    let _lock = match open(aside, OFlags::empty(), Mode::empty())? {
        Ok(file) if is_regular(&file, aside)? => {
            let file = lock(file, aside, LOCK_TIMEOUT)?;
            // By now it may be the log itself, or removed.
            if !is_at(&file, aside)? {
                return Ok(());
            }
            Some(file)
        }
        _ => None,
    };
    match rustix::fs::unlink(aside) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(failed("removing the leftover", aside, 0)(errno)),
    }
}

pub(super) fn nothing_at(path: &Path) -> Error {
    let problem = format!("it was another file at each of {TRIES} attempts: let one process at a time write to it");
    Error::NotARecordFile { path: path.display().to_string(), problem }
}

/// What a file that is begun has to carry on.
pub(super) struct Before {
    /// The least number that it can have.
    pub(super) number: u64,
    /// `None`: as is usual.
    pub(super) mode: Option<Mode>,
    /// The last numbers, as a chunk has them.
    pub(super) lanes: Vec<u8>,
}

impl Before {
    /// Of a writer that begins: what the last file of the rotation says, as long as that is this user's. Then a writer was killed between
    /// the two renames of a rotation, or somebody has taken the file away.
    fn found(path: &Path, number: u64) -> Before {
        let mut before = Before { number: 0, mode: None, lanes: Vec::new() };
        let numbered = numbered(path, number);
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let Ok(file) = rustix::fs::open(&numbered, flags, Mode::empty()) else { return before };
        let Ok(found) = rustix::fs::fstat(&file) else { return before };
        if found.st_uid != own_uid() {
            return before;
        }
        before.mode = Some(Mode::from_raw_mode(found.st_mode & 0o777));
        let (fd, end) = (file.as_fd(), found.st_size as u64);
        // What is broken is for whoever reads it.
        let Ok(mut chunks) = Chunks::of(fd, &numbered) else { return before };
        let (mut at, mut lanes) = (HEADER, Lanes::default());
        while at < end
            && let Ok(Ok(header)) = chunks.chunk(fd, at, end, end - at <= super::VERIFIED)
            && lanes.note_chunk(&mut chunks, fd, at, &header).is_ok()
        {
            at += header.all_bytes();
        }
        before.lanes = lanes.bytes();
        before
    }
}

/// The file at a path, for its only writer. Where there is none, it is begun. `before`: of a writer that has a file already.
pub(super) fn open_or_begin(path: &Path, syncs: bool, before: Option<&Before>) -> Result<Lock> {
    let aside = aside(path);
    // A write does not wait for another writer: it may be retried for ever.
    let timeout = if before.is_some() { Duration::ZERO } else { LOCK_TIMEOUT };
    for _ in 0..TRIES {
        let opened = lock_at(path, timeout)?;
        if let Some(file) = &opened {
            // Who has this lock is the only one to make anything aside, but before there was a file.
            let _ = std::fs::remove_file(&aside);
            if rustix::fs::fstat(file).map_err(failed("reading", path, 0))?.st_size > 0 {
                return Ok(opened.expect("it is there"));
            }
        }
        let highest = highest_number(path)?;
        let found;
        let before = match before {
            Some(before) => before,
            None => {
                found = Before::found(path, highest);
                &found
            }
        };
        let header = FileHeader::new((highest + 1).max(before.number));
        if let Some(file) = opened {
            begin_file(&file, path, &header, &before.lanes)?;
            return Ok(file);
        }
        let created = create_aside(&aside, before.mode)?;
        begin_file(&created, &aside, &header, &before.lanes)?;
        failpoint("record file: first made aside");
        if syncs {
            sync(&created).map_err(failed("syncing", &aside, 0))?;
        }
        match rename(&aside, path) {
            Ok(()) if is_at(&created, path)? => {
                failpoint("record file: first renamed into place");
                if syncs {
                    sync_directory(path)?;
                }
                return Ok(created);
            }
            Ok(()) => {}
            // Another writer, or somebody who rotates, was first.
            Err(Errno::EXIST | Errno::NOENT) => _ = std::fs::remove_file(&aside),
            Err(error) => return Err(failed("renaming", &aside, 0)(error)),
        }
    }
    Err(nothing_at(path))
}

/// The names in the directory of a file are on the disk after it.
pub(super) fn sync_directory(path: &Path) -> Result<()> {
    let directory = path.parent().unwrap_or(path);
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let synced = rustix::fs::open(directory, flags, Mode::empty()).and_then(rustix::fs::fsync);
    synced.map_err(failed("syncing the directory", directory, 0))
}
