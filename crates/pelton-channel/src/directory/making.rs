//! Making a channel aside and putting it into place; removing what makers that died have left.

use super::Access;
use super::files::{Place, clear, descriptor, names};
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

/// Makes a channel aside and renames it into place, if nothing is there by then.
pub(super) fn make(parent: &Parent, path: &Path, access: &Access, header: &Header) -> Result<()> {
    let system = |doing: &'static str| {
        move |errno| failure(format!("{doing} {}", path.display()), path.display().to_string(), 0, errno)
    };
    let aside = loop {
        let aside = parent.aside_name();
        match rustix::fs::mkdirat(&parent.fd, &aside, Mode::from_raw_mode(0o700)) {
            Err(Errno::EXIST) => {}
            Err(Errno::NAMETOOLONG) => {
                let (found, most) = (parent.name.len(), 220);
                let problem = format!("its name has {found} bytes, wanted at most {most}: choose a shorter one");
                return Err(Error::NotAChannel { path: path.display().to_string(), problem });
            }
            made => break made.map(|()| aside).map_err(system("making"))?,
        }
    };
    failpoint("creation: directory made");
    let made = make_aside(parent, &aside, path, access, header);
    match made {
        Ok(Some((place, _lock))) => {
            let flags = RenameFlags::NOREPLACE;
            let placed = rustix::fs::renameat_with(&parent.fd, &aside, &parent.fd, &parent.name, flags);
            if placed.is_ok() {
                failpoint("creation: renamed");
                return Ok(());
            }
            let _ = clear(place.fd.as_fd());
            let _ = rustix::fs::unlinkat(&parent.fd, &aside, AtFlags::REMOVEDIR);
            match placed {
                // Somebody was first.
                Err(Errno::EXIST) => Ok(()),
                Err(Errno::INVAL | Errno::NOSYS) => Err(Error::NotAChannel {
                    path: path.display().to_string(),
                    problem: "its file system cannot rename without replacing: use tmpfs, ext4 or xfs".to_owned(),
                }),
                placed => placed.map_err(system("putting into place")),
            }
        }
        // Without a channel: another creator took it for a dead one's and removed it. Then once more.
        other => {
            let _ = rustix::fs::unlinkat(&parent.fd, &aside, AtFlags::REMOVEDIR);
            other.map(|_| ())
        }
    }
}

/// The whole channel in the directory `aside`, and the lock that says that its maker lives. `None`: swept away meanwhile.
/// Otherwise the directory is empty again.
fn make_aside(
    parent: &Parent,
    aside: &OsStr,
    path: &Path,
    access: &Access,
    header: &Header,
) -> Result<Option<(Place, Lock)>> {
    let failed = |errno| failure(format!("making {}", path.display()), path.display().to_string(), 0, errno);
    let swept = |found: std::result::Result<OwnedFd, Errno>| match found {
        Err(Errno::NOENT) => Ok(None),
        found => found.map(Some).map_err(failed),
    };
    // A umask may have left its own maker out.
    match rustix::fs::chmodat(&parent.fd, aside, Mode::from_raw_mode(0o700), AtFlags::empty()) {
        Err(Errno::NOENT) => return Ok(None),
        changed => changed.map_err(failed)?,
    }
    failpoint("creation: directory its own");
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let Some(fd) = swept(rustix::fs::openat(&parent.fd, aside, flags, Mode::empty()))? else { return Ok(None) };
    let found = rustix::fs::fstat(&fd).map_err(failed)?;
    let place = Place::new(path, fd, &found, access)?;
    let make = || {
        // Empty and locked before anything else is there: from now on no creator removes it.
        let lock = match place.make_file(CHANNEL, SEGMENT_BYTES, &[]) {
            Err(Error::System { source, .. }) if source.kind() == ErrorKind::NotFound => return Ok(None),
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
            .map_err(|errno| place.failed("writing", CHANNEL, contents.len() as u64, errno))?;
        failpoint("creation: channel written");
        place.make_receiver_and_first_lane(header)?;
        rustix::fs::fchmod(&place.fd, Mode::from_raw_mode(header.mode)).map_err(failed)?;
        failpoint("creation: mode");
        Ok(Some(lock))
    };
    match make() {
        Ok(Some(lock)) => Ok(Some((place, lock))),
        other => {
            // Also of what a sweeper is removing at this moment: then both do.
            let _ = clear(place.fd.as_fd());
            other.map(|_| None)
        }
    }
}

/// The directory in which the channel's stands.
#[derive(Debug)]
pub(super) struct Parent {
    pub(super) fd: OwnedFd,
    /// The channel's name in it.
    pub(super) name: OsString,
}

impl Parent {
    pub(super) fn open(path: &Path) -> Result<Parent> {
        let (parent, name) = (path.parent().unwrap_or(path), path.file_name().unwrap_or_default().to_owned());
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(parent, flags, Mode::empty()).map_err(|errno| match errno {
            Errno::NOENT | Errno::NOTDIR => Error::NotAChannel {
                path: path.display().to_string(),
                problem: format!("the directory {} is not there: make it first", parent.display()),
            },
            _ => Error::System { what: format!("opening {}", parent.display()), source: errno.into() },
        })?;
        Ok(Parent { fd, name })
    }

    /// What makes a name one of a channel that is being made, or removed.
    fn aside_prefix(&self) -> Vec<u8> {
        [b".", self.name.as_bytes(), b".pelton-"].concat()
    }

    /// Another one each time.
    pub(super) fn aside_name(&self) -> OsString {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let mut name = self.aside_prefix();
        name.extend(format!("{}-{count}", std::process::id()).bytes());
        OsString::from_vec(name)
    }

    /// Removes what makers and removers of this channel that have died left. What cannot be removed does no harm.
    pub(super) fn sweep(&self) {
        let prefix = self.aside_prefix();
        for name in names(self.fd.as_fd()).unwrap_or_default() {
            let rest = name.as_bytes().strip_prefix(&prefix[..]).and_then(|rest| std::str::from_utf8(rest).ok());
            let numbers = rest.and_then(|rest| rest.split_once('-'));
            let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            if numbers.is_some_and(|(pid, count)| is_number(pid) && is_number(count)) {
                let _ = self.sweep_one(&name);
            }
        }
    }

    fn sweep_one(&self, aside: &OsStr) -> std::io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = rustix::fs::openat(&self.fd, aside, flags, Mode::empty())?;
        self.sweep_opened(aside, directory.as_fd())
    }

    pub(super) fn sweep_opened(&self, aside: &OsStr, directory: BorrowedFd<'_>) -> std::io::Result<()> {
        use rustix::fs::{fstat, openat, statat, unlinkat};
        let found = fstat(directory)?;
        if found.st_uid != own_uid() {
            return Ok(());
        }
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let _lock = match openat(directory, CHANNEL, flags, Mode::empty()) {
            // Empty, then, or not to be removed. A maker that has come no further begins anew.
            Err(Errno::NOENT) => None,
            Err(errno) => return Err(errno.into()),
            Ok(fd) => match lock::try_lock(Descriptor::new(fd)?)? {
                None => return Ok(()),
                Some(lock) => {
                    failpoint("sweep: locked");
                    // It may have been put into place before it was locked here; then it is the channel.
                    let now = statat(&self.fd, aside, AtFlags::SYMLINK_NOFOLLOW)?;
                    if (now.st_dev, now.st_ino) != (found.st_dev, found.st_ino) {
                        return Ok(());
                    }
                    clear(directory)?;
                    Some(lock)
                }
            },
        };
        let removed = unlinkat(&self.fd, aside, AtFlags::REMOVEDIR);
        failpoint("sweep: directory removed, or not");
        Ok(removed?)
    }
}
