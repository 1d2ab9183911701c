//! The files of a channel: their names, and the checks of each before its first use.

use super::Access;
use super::pages::{CHANNEL, DAMAGED, Header, bytes_of};
use crate::error::{Error, Result, failure};
use pelton_lane::{
    CURSORS_MAX, ConsumerPage, LANES_MAX, Position, ProducerPage, ReceiverPage, SEGMENT_BYTES, WINDOW, failpoint,
};
use pelton_os::{
    Descriptor, Segment, allocate, ambiguous_uid_text, can_allocate, check_file_size, is_ambiguous_uid, own_uid,
    write_at,
};
use rustix::fs::{AtFlags, Dir, FileType, Gid, Mode, OFlags, Stat};
use rustix::io::Errno;
use std::ffi::{CStr, OsStr, OsString};
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

pub(super) const RECEIVER: &str = "receiver";
pub(super) const RECEIVER_DOORBELL_FILE: &str = "receiver.bell";
pub(super) const RECEIVER_LIVENESS_FILE: &str = "receiver.life";

/// The files of a broadcast. Its subscribers have two FIFOs each, named as those of a lane.
pub(super) const PUBLISHER: &str = "publisher";
pub(super) const PUBLISHER_DOORBELL_FILE: &str = "publisher.bell";
pub(super) const PUBLISHER_LIVENESS_FILE: &str = "publisher.life";
pub(super) const TABLE: &str = "cursors";

/// The suffixes of a lane's files: lane 0 has `0.producer`, and so on.
pub(super) const PRODUCER: &str = "producer";
pub(super) const CONSUMER: &str = "consumer";
pub(super) const DATA: &str = "data";
pub(super) const DOORBELL_FILE: &str = "bell";
pub(super) const LIVENESS_FILE: &str = "life";
const OF_A_LANE: [&str; 5] = [PRODUCER, CONSUMER, DATA, DOORBELL_FILE, LIVENESS_FILE];

/// The directory of a channel, existing or being created, and the requirements on its files.
#[derive(Debug)]
pub(super) struct ChannelDir {
    /// Its path, or its later path.
    pub(super) path: PathBuf,
    pub(super) fd: Descriptor,
    pub(super) uid: u32,
    pub(super) gid: u32,
    /// The permitted owners of the files.
    owners: Vec<u32>,
    /// The widest permission bits of the files.
    pub(super) bits: u32,
    is_overlay: bool,
}

/// OVERLAYFS_SUPER_MAGIC.
const OVERLAY: u64 = 0x794c_7630;

impl ChannelDir {
    /// Opens a directory without checking its files. Returns `None` if nothing exists at the path.
    pub(super) fn open(path: &Path, access: &Access) -> Result<Option<ChannelDir>> {
        use rustix::fs::{CWD, openat, statat};
        let refuse = |problem| Err(Error::NotAChannel { path: path.display().to_string(), problem });
        let failed = |errno: Errno| Error::System { what: format!("opening {}", path.display()), error: errno.into() };
        let check = |found: &Stat| {
            let own = own_uid();
            let (kind, mode) = (FileType::from_raw_mode(found.st_mode), found.st_mode & 0o7777);
            if kind != FileType::Directory {
                return Err(format!("it is {}, wanted a directory: name a directory itself", in_words(kind)));
            }
            if is_ambiguous_uid(found.st_uid) {
                return Err(format!("its owner is not known: {}", ambiguous_uid_text(found.st_uid)));
            }
            if found.st_uid != own && !access.uids.contains(&found.st_uid) {
                return Err(format!(
                    "it belongs to uid {}, wanted {}: allow that uid in the options, or choose another path",
                    found.st_uid,
                    uids_in_words(own, &access.uids)
                ));
            }
            if mode & !access.mode != 0 {
                // Without a channel in it, the caller should not change the directory's mode.
                if matches!(statat(CWD, path.join(CHANNEL), AtFlags::SYMLINK_NOFOLLOW), Err(Errno::NOENT)) {
                    return Err(format!("it is a directory of mode {mode:o} without a channel: choose another path"));
                }
                return Err(format!(
                    "its mode is {mode:o}, this side permits at most {:o}: `chmod {:o} {}`, or allow more in the options",
                    access.mode,
                    mode & access.mode,
                    path.display()
                ));
            }
            Ok(())
        };
        // By name first: `openat` has fewer error numbers for a path that is not a directory.
        match statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(None),
            Err(Errno::NOTDIR) => return refuse("a directory above it is none: choose another path".to_owned()),
            Err(Errno::ACCESS) => {
                let own = own_uid();
                return refuse(format!("a directory above it does not let uid {own} through: change its mode"));
            }
            Err(errno) => return Err(failed(errno)),
            Ok(found) => {
                if let Err(problem) = check(&found) {
                    return refuse(problem);
                }
            }
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = match openat(CWD, path, flags, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(None),
            Err(Errno::ACCESS) => return refuse("its mode does not let this user read it: `chmod` it".to_owned()),
            opened => opened.map_err(failed)?,
        };
        let found = rustix::fs::fstat(&fd).map_err(failed)?;
        if let Err(problem) = check(&found) {
            return refuse(problem);
        }
        ChannelDir::new(path, fd, &found, access).map(Some)
    }

    pub(super) fn new(path: &Path, fd: OwnedFd, found: &Stat, access: &Access) -> Result<ChannelDir> {
        let mut owners = vec![own_uid(), found.st_uid];
        owners.extend(&access.uids);
        let is_overlay = rustix::fs::fstatfs(&fd).is_ok_and(|system| system.f_type as u64 == OVERLAY);
        let (path, fd) = (path.to_owned(), descriptor(fd)?);
        Ok(ChannelDir { path, fd, uid: found.st_uid, gid: found.st_gid, owners, bits: access.mode & 0o666, is_overlay })
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        if name.is_empty() { self.path.clone() } else { self.path.join(name) }
    }

    pub(super) fn refuse(&self, problem: String) -> Error {
        Error::NotAChannel { path: self.path.display().to_string(), problem }
    }

    /// The error for a failed system call on a file; `bytes` is the size that it needs.
    pub(super) fn failed(&self, doing: &str, name: &str, bytes: u64, errno: Errno) -> Error {
        let path = self.file(name).display().to_string();
        failure(format!("{doing} {path}"), path, bytes, errno)
    }

    /// Whether `path` still leads to this directory.
    pub(super) fn is_at(&self, path: &Path) -> Result<bool> {
        let failed = |errno| self.failed("checking", "", 0, errno);
        let own = rustix::fs::fstat(&self.fd).map_err(failed)?;
        match rustix::fs::lstat(path) {
            Err(Errno::NOENT) => Ok(false),
            found => Ok(found.map(|found| (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)).map_err(failed)?),
        }
    }

    pub(super) fn names(&self) -> Result<Vec<OsString>> {
        names(self.fd.as_fd()).map_err(|errno| self.failed("reading", "", 0, errno))
    }

    pub(super) fn is_directory(&self, name: &OsStr) -> bool {
        let found = rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW);
        found.is_ok_and(|found| FileType::from_raw_mode(found.st_mode) == FileType::Directory)
    }

    /// The problem text for a directory without the file `channel`.
    pub(super) fn problem_without_channel_file(&self) -> String {
        let names: Vec<String> = self.names().unwrap_or_default().iter().map(|name| format!("{name:?}")).collect();
        match names.len() {
            0 => "it is an empty directory, wanted a channel's: remove it, so that a channel can be made there"
                .to_owned(),
            _ => format!("it has no file {CHANNEL} but {}: choose another path", first_few(&names)),
        }
    }

    /// Checks a file by its name. Returns `None` if it does not exist.
    pub(super) fn check_named(&self, name: &str, kind: FileType) -> Result<Option<()>> {
        match rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => Ok(None),
            found => {
                let found = found.map_err(|errno| self.failed("checking", name, 0, errno))?;
                self.check(name, kind, &found).map(Some)
            }
        }
    }

    pub(super) fn check(&self, name: &str, kind: FileType, found: &Stat) -> Result<()> {
        let (found_kind, mode) = (FileType::from_raw_mode(found.st_mode), found.st_mode & 0o7777);
        if found_kind != kind {
            return Err(self.refuse(format!(
                "its file {name} is {}, wanted {}: {DAMAGED}",
                in_words(found_kind),
                in_words(kind)
            )));
        }
        if is_ambiguous_uid(found.st_uid) {
            let problem = format!("the owner of its file {name} is not known: {}", ambiguous_uid_text(found.st_uid));
            return Err(self.refuse(problem));
        }
        if !self.owners.contains(&found.st_uid) {
            return Err(self.refuse(format!(
                "its file {name} belongs to uid {}, wanted {}: allow that uid in the options, or choose another path",
                found.st_uid,
                uids_in_words(self.owners[0], &self.owners[1..])
            )));
        }
        if mode & !self.bits != 0 {
            return Err(self.refuse(format!(
                "its file {name} has mode {mode:o}, the channel permits at most {:o}: `chmod {:o} {}`",
                self.bits,
                mode & self.bits,
                self.file(name).display()
            )));
        }
        Ok(())
    }

    /// Opens a file and checks its kind, its owner and its mode.
    pub(super) fn open_file(&self, name: &str, kind: FileType, access: OFlags) -> Result<OwnedFd> {
        let opened = self.try_open_file(name, kind, access)?;
        opened.ok_or_else(|| self.failed("opening", name, 0, Errno::NXIO))
    }

    /// As [`ChannelDir::open_file`], but no child that is forked meanwhile gets a copy of the descriptor. So its lock,
    /// or its proof of liveness, ends with this process.
    pub(super) fn open_unshared(&self, name: &str, kind: FileType, access: OFlags) -> Result<Descriptor> {
        let opened = Descriptor::opened(|| self.open_file(name, kind, access));
        opened.map_err(Error::system("keeping a descriptor"))?
    }

    /// As [`ChannelDir::open_file`]. Returns `None` for a FIFO to be written that no process has open for reading.
    pub(super) fn try_open_file(&self, name: &str, kind: FileType, access: OFlags) -> Result<Option<OwnedFd>> {
        let missing = || self.missing(name);
        // By name first: to open a device can have an effect.
        self.check_named(name, kind)?.ok_or_else(missing)?;
        // `NONBLOCK` for a FIFO that replaced the file after the check.
        let flags = access | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let fd = match rustix::fs::openat(&self.fd, name, flags, Mode::empty()) {
            Err(Errno::NXIO) => return Ok(None),
            Err(Errno::NOENT) => return Err(missing()),
            Err(Errno::ACCESS) => return Err(self.no_permission(name, access)),
            opened => opened.map_err(|errno| self.failed("opening", name, 0, errno))?,
        };
        let found = rustix::fs::fstat(&fd).map_err(|errno| self.failed("checking", name, 0, errno))?;
        self.check(name, kind, &found)?;
        Ok(Some(fd))
    }

    pub(super) fn missing(&self, name: &str) -> Error {
        match self.is_at(&self.path) {
            Ok(true) => self.refuse(format!("it has no file {name}: {DAMAGED}")),
            // The channel was removed with its directory after this side opened it.
            _ => Error::NoChannel { path: self.path.display().to_string() },
        }
    }

    fn no_permission(&self, name: &str, access: OFlags) -> Error {
        let own = own_uid();
        let what = if access == OFlags::RDONLY { "read" } else { "write" };
        let (owner, gid, mode) = match rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(found) => (found.st_uid.to_string(), found.st_gid.to_string(), format!("{:o}", found.st_mode & 0o7777)),
            Err(_) => ("unknown".to_owned(), "unknown".to_owned(), "unknown".to_owned()),
        };
        self.refuse(format!(
            "its file {name} belongs to uid {owner}, gid {gid}, has mode {mode}, and does not let uid {own} {what} it: make the channel with a mode that does"
        ))
    }

    /// Opens a file and maps it.
    ///
    /// An overlay file system copies a file of a lower layer when a process first opens it for writing. A mapping from
    /// before that shows the lower file for ever, without the other side's writes. So there the file is always opened
    /// for writing.
    pub(super) fn open_mapped(&self, name: &str, bytes: u64, writable: bool) -> Result<Segment> {
        let open = |access| self.open_file(name, FileType::RegularFile, access);
        let fd = match (writable, self.is_overlay) {
            (true, _) => open(OFlags::RDWR)?,
            (false, false) => open(OFlags::RDONLY)?,
            (false, true) => match open(OFlags::RDWR) {
                // A read-only overlay copies nothing, and no process writes.
                Err(Error::System { error: source, .. }) if source.kind() == ErrorKind::ReadOnlyFilesystem => {
                    open(OFlags::RDONLY)?
                }
                opened => opened?,
            },
        };
        self.map(fd, name, bytes, writable)
    }

    fn map(&self, fd: OwnedFd, name: &str, bytes: u64, writable: bool) -> Result<Segment> {
        Segment::open_file(fd, &format!("its file {name}"), bytes, writable).map_err(|error| match error.kind() {
            ErrorKind::InvalidData => self.refuse(format!("{error}: {DAMAGED}")),
            _ => Error::System { what: format!("mapping {}", self.file(name).display()), error },
        })
    }

    /// One copy of a file's first bytes.
    pub(super) fn read<const N: usize>(&self, fd: BorrowedFd<'_>, name: &str) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        let read = rustix::io::retry_on_intr(|| rustix::io::pread(fd, &mut bytes, 0));
        match read.map_err(|errno| self.failed("reading", name, 0, errno))? {
            read if read == N => Ok(bytes),
            read => Err(self.refuse(format!("its file {name} has {read} bytes, wanted {SEGMENT_BYTES}: {DAMAGED}"))),
        }
    }

    /// Creates all files of a channel except `channel`.
    pub(super) fn make_receiver_and_first_lane(&self, header: &Header) -> Result<()> {
        self.make_file(RECEIVER, SEGMENT_BYTES, &bytes_of(ReceiverPage::new()))?;
        self.make_fifo(RECEIVER_DOORBELL_FILE)?;
        self.make_fifo(RECEIVER_LIVENESS_FILE)?;
        self.make_lane(0, header)
    }

    /// Creates the files of a lane. None of them exists.
    pub(super) fn make_lane(&self, number: u32, header: &Header) -> Result<()> {
        let mut page = ProducerPage::new(header.capacity, header.message_bytes_max, 0, 0);
        page.boot_id = header.boot_id;
        self.make_file(&of_lane(number, PRODUCER), SEGMENT_BYTES, &bytes_of(page))?;
        let page = ConsumerPage::new(Position::START, 0, 0);
        self.make_file(&of_lane(number, CONSUMER), SEGMENT_BYTES, &bytes_of(page))?;
        self.make_data(&of_lane(number, DATA), header)?;
        self.make_fifo(&of_lane(number, DOORBELL_FILE))?;
        self.make_fifo(&of_lane(number, LIVENESS_FILE))
    }

    /// Creates the file of a lane's data.
    pub(super) fn make_data(&self, name: &str, header: &Header) -> Result<()> {
        let data = self.make_file(name, header.capacity, &[])?;
        // The part that a sender uses while its receiver keeps up. The sender allocates more before it first writes
        // there.
        let first = header.capacity.min(WINDOW);
        if !can_allocate(&data) {
            return Err(self.refuse(format!(
                "the file system of {} cannot allocate space ahead: use tmpfs, ext4 or xfs",
                self.path.display()
            )));
        }
        let errno = |error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
        allocate(&data, 0, first).map_err(|error| self.failed("allocating", name, first, errno(error)))?;
        failpoint("make a lane: allocated");
        Ok(())
    }

    pub(super) fn make_file(&self, name: &str, bytes: u64, contents: &[u8]) -> Result<OwnedFd> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let make = || {
            let fd = rustix::fs::openat(&self.fd, name, flags, Mode::from_raw_mode(0o600))?;
            failpoint("make a file: made");
            // The directory's group, so that each member of it can open the files of every other member. A failure is
            // harmless: the owner and the mode of the files still apply.
            if rustix::fs::fstat(&fd)?.st_gid != self.gid {
                let _ = rustix::fs::fchown(&fd, None, Some(Gid::from_raw(self.gid)));
            }
            rustix::fs::fchmod(&fd, Mode::from_raw_mode(self.bits))?;
            failpoint("make a file: permissions");
            check_file_size(bytes)?;
            rustix::fs::ftruncate(&fd, bytes)?;
            failpoint("make a file: size");
            // `write` and not a mapping: it allocates the block on the disk, so that no later store can fail.
            write_at(fd.as_fd(), contents, 0)?;
            failpoint("make a file: written");
            Ok(fd)
        };
        make().map_err(|errno| self.failed("making", name, contents.len() as u64, errno))
    }

    pub(super) fn make_fifo(&self, name: &str) -> Result<()> {
        let make = || {
            rustix::fs::mkfifoat(&self.fd, name, Mode::from_raw_mode(0o600))?;
            failpoint("make a FIFO: made");
            Ok(())
        };
        make().map_err(|errno| self.failed("making", name, 0, errno))?;
        self.open_up_fifo(name)
    }

    /// Gives a FIFO that this user has made its group and its mode. By a descriptor: a name may lead to another file by
    /// now.
    pub(super) fn open_up_fifo(&self, name: &str) -> Result<()> {
        let fifo = self.open_unshared(name, FileType::Fifo, OFlags::RDONLY)?;
        let change = || {
            let found = rustix::fs::fstat(&fifo)?;
            if found.st_uid != own_uid() {
                return Err(Errno::PERM);
            }
            if found.st_gid != self.gid {
                let _ = rustix::fs::fchown(&fifo, None, Some(Gid::from_raw(self.gid)));
            }
            rustix::fs::fchmod(&fifo, Mode::from_raw_mode(self.bits))
        };
        change().map_err(|errno| self.failed("changing the mode of", name, 0, errno))?;
        failpoint("make a FIFO: permissions");
        Ok(())
    }

    /// Removes the leftover files of a lane that does not exist.
    pub(super) fn remove_lane(&self, number: u32) -> Result<()> {
        for name in OF_A_LANE.map(|kind| of_lane(number, kind)) {
            let removed = rustix::fs::unlinkat(&self.fd, &name, AtFlags::empty());
            failpoint("growth: a leftover removed, or none");
            match removed {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(errno) => return Err(self.failed("removing the leftover", &name, 0, errno)),
            }
        }
        Ok(())
    }
}

/// Removes a channel's files from its directory. Removes `channel` last: its lock excludes other processes.
pub(super) fn clear(directory: BorrowedFd<'_>) -> std::result::Result<(), Errno> {
    remove_known(directory, names(directory)?)
}

/// As [`clear`], for these names only.
pub(super) fn remove_known(directory: BorrowedFd<'_>, names: Vec<OsString>) -> std::result::Result<(), Errno> {
    // The sweep does not know the kind of what it finds, whose name it has made: so the files of both.
    let is_foreign =
        |name: &OsString| [false, true].map(|kind| matches!(known(name, kind), Known::Foreign)) == [true; 2];
    let mut known: Vec<OsString> = names.into_iter().filter(|name| !is_foreign(name)).collect();
    known.sort_by_key(|name| name == CHANNEL);
    for name in known {
        let removed = rustix::fs::unlinkat(directory, &name, AtFlags::empty());
        failpoint("clear: a file removed");
        match removed {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// The kind of a name in a channel's directory.
pub(super) enum Known {
    Channel,
    Lane(u32),
    /// Not a file of a channel.
    Foreign,
}

/// The kind of a name in the directory of a broadcast, or of a channel with a receiver.
pub(super) fn known(name: &OsStr, is_broadcast: bool) -> Known {
    let Some(name) = name.to_str() else { return Known::Foreign };
    let of_broadcast = [CHANNEL, PUBLISHER, PUBLISHER_DOORBELL_FILE, PUBLISHER_LIVENESS_FILE, TABLE, DATA];
    let of_channel = [CHANNEL, RECEIVER, RECEIVER_DOORBELL_FILE, RECEIVER_LIVENESS_FILE];
    // What each lane, or each subscriber, has.
    let (whole, kinds, most): (&[&str], &[&str], u32) = match is_broadcast {
        true => (&of_broadcast, &[DOORBELL_FILE, LIVENESS_FILE], CURSORS_MAX as u32),
        false => (&of_channel, &OF_A_LANE, LANES_MAX),
    };
    if whole.contains(&name) {
        return Known::Channel;
    }
    let Some((number, kind)) = name.split_once('.') else { return Known::Foreign };
    match number.parse::<u32>() {
        Ok(lane) if lane.to_string() == number && lane < most && kinds.contains(&kind) => Known::Lane(lane),
        _ => Known::Foreign,
    }
}

/// The name of a file of lane `number`.
pub(super) fn of_lane(number: u32, kind: &str) -> String {
    format!("{number}.{kind}")
}

pub(super) fn names(directory: BorrowedFd<'_>) -> std::result::Result<Vec<OsString>, Errno> {
    let mut names = Vec::new();
    // Opens the directory again: a descriptor opened with `O_PATH` cannot be read.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    for entry in Dir::new(rustix::fs::openat(directory, c".", flags, Mode::empty())?)? {
        let entry = entry?;
        let name: &CStr = entry.file_name();
        if name != c"." && name != c".." {
            names.push(OsStr::from_bytes(name.to_bytes()).to_owned());
        }
    }
    names.sort();
    Ok(names)
}

pub(super) fn descriptor(fd: OwnedFd) -> Result<Descriptor> {
    Descriptor::new(fd).map_err(Error::system("keeping a descriptor"))
}

fn in_words(kind: FileType) -> &'static str {
    match kind {
        FileType::RegularFile => "a regular file",
        FileType::Directory => "a directory",
        FileType::Symlink => "a symbolic link",
        FileType::Fifo => "a FIFO",
        FileType::Socket => "a socket",
        FileType::CharacterDevice => "a character device",
        FileType::BlockDevice => "a block device",
        _ => "of a kind of its own",
    }
}

fn uids_in_words(own: u32, others: &[u32]) -> String {
    let mut text = format!("uid {own}");
    let mut said = vec![own];
    for uid in others {
        if !said.contains(uid) {
            text.push_str(&format!(" or {uid}"));
            said.push(*uid);
        }
    }
    text
}

/// The first eight texts of a list, and the number of the others.
pub(super) fn first_few(texts: &[String]) -> String {
    const MOST: usize = 8;
    let more = if texts.len() > MOST { format!(" and {} more", texts.len() - MOST) } else { String::new() };
    texts[..texts.len().min(MOST)].join(", ") + &more
}
