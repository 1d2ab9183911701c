//! Creates a channel under a temporary name and renames it. Removes what dead creators and removers have left.

use super::Access;
use super::files::{ChannelDir, clear, descriptor, names};
use super::pages::{CHANNEL, Header};
use crate::error::{Error, Result, failure};
use pelton_lane::{SEGMENT_BYTES, failpoint};
use pelton_os::lock::{self, Lock};
use pelton_os::{Descriptor, own_uid, write_at};
use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

/// Creates a channel under a temporary name and renames it to `path`, unless something exists there by then.
pub(super) fn make(parent: &ParentDir, path: &Path, access: &Access, header: &Header) -> Result<()> {
    let system = |doing: &'static str| {
        move |errno| failure(format!("{doing} {}", path.display()), path.display().to_string(), 0, errno)
    };
    let temporary = loop {
        let temporary = parent.temporary_name();
        match rustix::fs::mkdirat(&parent.fd, &temporary, Mode::from_raw_mode(0o700)) {
            Err(Errno::EXIST) => {}
            Err(Errno::NAMETOOLONG) => {
                let (found, most) = (parent.name.len(), 220);
                let problem = format!("its name has {found} bytes, wanted at most {most}: choose a shorter one");
                return Err(Error::NotAChannel { path: path.display().to_string(), problem });
            }
            made => break made.map(|()| temporary).map_err(system("making"))?,
        }
    };
    failpoint("creation: directory made");
    let made = make_in_temporary(parent, &temporary, path, access, header);
    match made {
        Ok(Some((dir, _lock))) => {
            let flags = RenameFlags::NOREPLACE;
            let placed = rustix::fs::renameat_with(&parent.fd, &temporary, &parent.fd, &parent.name, flags);
            if placed.is_ok() {
                failpoint("creation: renamed");
                return Ok(());
            }
            let _ = clear(dir.fd.as_fd());
            let _ = rustix::fs::unlinkat(&parent.fd, &temporary, AtFlags::REMOVEDIR);
            match placed {
                // Another creator was first.
                Err(Errno::EXIST) => Ok(()),
                Err(Errno::INVAL | Errno::NOSYS) => Err(Error::NotAChannel {
                    path: path.display().to_string(),
                    problem: "its file system cannot rename without replacing: use tmpfs, ext4 or xfs".to_owned(),
                }),
                placed => placed.map_err(system("renaming the new channel to")),
            }
        }
        // `None`: another creator removed it as a leftover of a dead process. The caller tries again.
        other => {
            let _ = rustix::fs::unlinkat(&parent.fd, &temporary, AtFlags::REMOVEDIR);
            other.map(|_| ())
        }
    }
}

/// Creates the complete channel in the directory `temporary`. Returns it with the lock that proves that its creator
/// lives. Returns `None` if another creator has removed it meanwhile. On a failure the directory is empty again.
fn make_in_temporary(
    parent: &ParentDir,
    temporary: &OsStr,
    path: &Path,
    access: &Access,
    header: &Header,
) -> Result<Option<(ChannelDir, Lock)>> {
    let failed = |errno| failure(format!("making {}", path.display()), path.display().to_string(), 0, errno);
    let swept = |found: std::result::Result<OwnedFd, Errno>| match found {
        Err(Errno::NOENT) => Ok(None),
        found => found.map(Some).map_err(failed),
    };
    // The umask may have removed the permissions of the creator itself.
    match rustix::fs::chmodat(&parent.fd, temporary, Mode::from_raw_mode(0o700), AtFlags::empty()) {
        Err(Errno::NOENT) => return Ok(None),
        changed => changed.map_err(failed)?,
    }
    failpoint("creation: directory its own");
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let Some(fd) = swept(rustix::fs::openat(&parent.fd, temporary, flags, Mode::empty()))? else { return Ok(None) };
    let found = rustix::fs::fstat(&fd).map_err(failed)?;
    let dir = ChannelDir::new(path, fd, &found, access)?;
    let make = || {
        // The first file, empty and locked: from now on no creator removes the directory.
        let lock = match dir.make_file(CHANNEL, SEGMENT_BYTES, &[]) {
            Err(Error::System { error: source, .. }) if source.kind() == ErrorKind::NotFound => return Ok(None),
            made => lock::try_lock(descriptor(made?)?)
                .map_err(Error::system(format!("locking {}", path.join(CHANNEL).display())))?,
        };
        failpoint("creation: locked, or not");
        let Some(lock) = lock else { return Ok(None) };
        if rustix::fs::fstat(&lock).map_err(failed)?.st_nlink == 0 {
            return Ok(None);
        }
        let contents = header.encode();
        write_at(lock.as_fd(), &contents, 0)
            .map_err(|errno| dir.failed("writing", CHANNEL, contents.len() as u64, errno))?;
        failpoint("creation: channel written");
        if header.is_broadcast {
            dir.make_broadcast(header)?;
        } else {
            dir.make_receiver_and_first_lane(header)?;
        }
        rustix::fs::fchmod(&dir.fd, Mode::from_raw_mode(header.mode)).map_err(failed)?;
        failpoint("creation: mode");
        Ok(Some(lock))
    };
    match make() {
        Ok(Some(lock)) => Ok(Some((dir, lock))),
        other => {
            // Another creator may be removing the same files now. That is harmless.
            let _ = clear(dir.fd.as_fd());
            other.map(|_| None)
        }
    }
}

/// The parent of the channel's directory.
#[derive(Debug)]
pub(super) struct ParentDir {
    pub(super) fd: OwnedFd,
    /// The name of the channel's directory in it.
    pub(super) name: OsString,
}

impl ParentDir {
    pub(super) fn open(path: &Path) -> Result<ParentDir> {
        let (parent, name) = (path.parent().unwrap_or(path), path.file_name().unwrap_or_default().to_owned());
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(parent, flags, Mode::empty()).map_err(|errno| match errno {
            Errno::NOENT | Errno::NOTDIR => Error::NotAChannel {
                path: path.display().to_string(),
                problem: format!("the directory {} is not there: make it first", parent.display()),
            },
            _ => Error::System { what: format!("opening {}", parent.display()), error: errno.into() },
        })?;
        Ok(ParentDir { fd, name })
    }

    /// The prefix of a channel's name while it is being created or removed.
    fn temporary_prefix(&self) -> Vec<u8> {
        [b".", self.name.as_bytes(), b".pelton-"].concat()
    }

    /// A temporary name, a different one at each call.
    pub(super) fn temporary_name(&self) -> OsString {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let mut name = self.temporary_prefix();
        name.extend(format!("{}-{count}", std::process::id()).bytes());
        OsString::from_vec(name)
    }

    /// Removes what dead creators and removers of this channel have left. If that fails, the leftovers do no harm.
    pub(super) fn sweep(&self) {
        let prefix = self.temporary_prefix();
        for name in names(self.fd.as_fd()).unwrap_or_default() {
            let rest = name.as_bytes().strip_prefix(&prefix[..]).and_then(|rest| std::str::from_utf8(rest).ok());
            let numbers = rest.and_then(|rest| rest.split_once('-'));
            let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            if numbers.is_some_and(|(pid, count)| is_number(pid) && is_number(count)) {
                let _ = self.sweep_one(&name);
            }
        }
    }

    fn sweep_one(&self, temporary: &OsStr) -> std::io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = rustix::fs::openat(&self.fd, temporary, flags, Mode::empty())?;
        self.sweep_opened(temporary, directory.as_fd())
    }

    /// Removes the channel in `directory`, if `temporary` is still its name and its creator is dead.
    pub(super) fn sweep_opened(&self, temporary: &OsStr, directory: BorrowedFd<'_>) -> std::io::Result<()> {
        use rustix::fs::{fstat, openat, statat, unlinkat};
        let found = fstat(directory)?;
        if found.st_uid != own_uid() {
            return Ok(());
        }
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let _lock = match openat(directory, CHANNEL, flags, Mode::empty()) {
            // It is empty, or `unlinkat` below fails. A living creator that has got no further starts again.
            Err(Errno::NOENT) => None,
            Err(errno) => return Err(errno.into()),
            Ok(fd) => match lock::try_lock(Descriptor::new(fd)?)? {
                None => return Ok(()),
                Some(lock) => {
                    failpoint("sweep: locked");
                    // Its creator may have renamed it before this lock; then it is the channel.
                    let now = statat(&self.fd, temporary, AtFlags::SYMLINK_NOFOLLOW)?;
                    if (now.st_dev, now.st_ino) != (found.st_dev, found.st_ino) {
                        return Ok(());
                    }
                    clear(directory)?;
                    Some(lock)
                }
            },
        };
        let removed = unlinkat(&self.fd, temporary, AtFlags::REMOVEDIR);
        failpoint("sweep: directory removed, or not");
        Ok(removed?)
    }
}
