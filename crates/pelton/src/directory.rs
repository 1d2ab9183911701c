//! A path channel's directory: which files it has, who may have made them, who has which role.
//!
//! Invariants:
//! - What stands at the path is whole: a channel is made aside and renamed into place, a lane exists once it is counted.
//! - Nothing is used before it has been checked, and of what was checked the copy is used.
//! - A role is a lock, on a file description of its own: it ends with its holder's process, whatever a forked child keeps.
//! - What is not a channel's file is never removed.
//!
//! Synchronisation points are the kernel's: the rename publishes the channel, the store of `lanes` under the growth lock a
//! lane, the locks the roles. A life, a FIFO that its holder has open for reading, tells who watches it of the end.

use crate::error::{Error, Result};
use crate::os::lock::{self, Lock};
use crate::os::{Bell, Descriptor, Segment, allocate, can_allocate, check_file_size, write_at};
use pelton_lane::{
    ChannelPage, ConsumerPage, LANES_MAX, LAYOUT_SIGNATURE, MAGIC_CHANNEL, MAGIC_CONSUMER, MAGIC_PRODUCER,
    MAGIC_RECEIVER, Position, Preamble, ProducerPage, ReceiverPage, SEGMENT_BYTES, WINDOW, WIRE_VERSION,
    capacity_is_valid, fnv1a, message_bytes_limit, step,
};
use rustix::fs::{AtFlags, Dir, FileType, Gid, Mode, OFlags, RenameFlags, Stat};
use rustix::io::Errno;
use std::ffi::{CStr, OsStr, OsString};
use std::io::ErrorKind;
use std::mem::offset_of;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

const CHANNEL: &str = "channel";
const RECEIVER: &str = "receiver";
const RECEIVER_BELL: &str = "receiver.bell";
const RECEIVER_LIFE: &str = "receiver.life";

/// The files of a lane, each `N.` and this.
const PRODUCER: &str = "producer";
const CONSUMER: &str = "consumer";
const DATA: &str = "data";
const BELL: &str = "bell";
const LIFE: &str = "life";
const OF_A_LANE: [&str; 5] = [PRODUCER, CONSUMER, DATA, BELL, LIFE];

/// Bytes of the channel's file that are read and checked: up to the count of lanes.
const HEADER_BYTES: usize = 120;
const LANES_AT: usize = offset_of!(ChannelPage, lanes);

/// Where a page says which process its writer is (spec/layout.md), for messages to people.
const PRODUCER_PID_AT: u64 = 388;
const CONSUMER_PID_AT: u64 = 260;

/// What to do about a file that cannot be right.
const DAMAGED: &str = "it is damaged: restore it, or remove the channel and make it anew";

/// Who may have made the files, and what they may permit.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    /// Users besides this process's own.
    pub(crate) uids: Vec<u32>,
    /// The widest permission bits of the directory; of one that is made, its permission bits.
    pub(crate) mode: u32,
}

/// An open channel.
#[derive(Debug)]
pub(crate) struct Directory {
    place: Place,
    header: Header,
    page: Segment,
    is_from_this_boot: bool,
}

/// The receiver, as long as `lock` is kept.
#[derive(Debug)]
pub(crate) struct ReceiverRole {
    pub(crate) lock: Lock,
    /// Writable.
    pub(crate) page: Segment,
    pub(crate) bell: Bell,
    pub(crate) life: Descriptor,
}

/// The sender of a lane, as long as `lock` is kept.
#[derive(Debug)]
pub(crate) struct SenderRole {
    pub(crate) number: u32,
    pub(crate) lock: Lock,
    /// Writable.
    pub(crate) page: Segment,
    /// Writable.
    pub(crate) data: Segment,
    pub(crate) consumer: Segment,
    pub(crate) receiver: Segment,
    /// Its own.
    pub(crate) bell: Bell,
    pub(crate) receiver_bell: Bell,
    pub(crate) life: Descriptor,
}

/// What a receiver has of a lane.
#[derive(Debug)]
pub(crate) struct LaneForReceiver {
    pub(crate) producer: Segment,
    pub(crate) data: Segment,
    /// Writable.
    pub(crate) consumer: Segment,
    /// Of the sender.
    pub(crate) bell: Bell,
}

/// A lane of which nothing can be written.
#[derive(Debug)]
pub(crate) struct LaneToLookAt {
    pub(crate) producer: Segment,
    pub(crate) consumer: Segment,
    pub(crate) data: Segment,
}

impl Directory {
    /// Opens the channel at `path` after checking it. `None`: nothing is there.
    pub(crate) fn open(path: &Path, access: &Access) -> Result<Option<Directory>> {
        match Directory::open_any_boot(path, access)? {
            Some(directory) if !directory.is_from_this_boot => {
                Err(Error::Rebooted { path: directory.place.path.display().to_string() })
            }
            found => Ok(found),
        }
    }

    /// Opens it even when it was made before the last reboot: for recovery, and for looking on.
    pub(crate) fn open_any_boot(path: &Path, access: &Access) -> Result<Option<Directory>> {
        let path = absolute(path)?;
        loop {
            match Directory::open_what_is_there(&path, access) {
                // Removed while it was opened: there may be another by now, or none.
                Err(Error::NoChannel { .. }) => {}
                opened => return opened,
            }
        }
    }

    fn open_what_is_there(path: &Path, access: &Access) -> Result<Option<Directory>> {
        let Some(mut place) = Place::open(path, access)? else { return Ok(None) };
        // What its files may permit is not known before the first of them is read.
        place.bits = 0o7777;
        if place.look(CHANNEL, FileType::RegularFile)?.is_none() {
            return Err(match place.missing(CHANNEL) {
                Error::NotAChannel { .. } => place.refuse(place.what_else_is_there()),
                gone => gone,
            });
        }
        let fd = place.open_file(CHANNEL, FileType::RegularFile, OFlags::RDONLY)?;
        let page = place.map(fd, CHANNEL, SEGMENT_BYTES, false)?;
        let header = place.read(page.as_fd(), CHANNEL)?;
        let header = Header::decode(&header).map_err(|problem| place.refuse(format!("its file {problem}")))?;
        if header.mode & !access.mode != 0 {
            return Err(place.refuse(format!(
                "it was made with mode {:o}, this side permits at most {:o}: allow more in the options",
                header.mode, access.mode
            )));
        }
        place.bits = header.mode & 0o666;
        let found = rustix::fs::fstat(&page).map_err(|errno| place.failed("looking at", CHANNEL, 0, errno))?;
        place.check(CHANNEL, FileType::RegularFile, &found)?;
        let is_from_this_boot = header.boot_id == boot_id()?;
        let directory = Directory { place, header, page, is_from_this_boot };
        directory.lanes()?;
        Ok(Some(directory))
    }

    /// Makes it; where there is one already, opens that, whatever its sizes.
    pub(crate) fn create(
        path: &Path,
        access: &Access,
        capacity: u64,
        message_bytes_max: u64,
        lanes_max: u32,
    ) -> Result<Directory> {
        let header = Header { capacity, message_bytes_max, lanes_max, mode: access.mode, boot_id: boot_id()? };
        header.check_wanted()?;
        let path = absolute(path)?;
        loop {
            if let Some(directory) = Directory::open(&path, access)? {
                return Ok(directory);
            }
            let parent = Parent::open(&path)?;
            parent.sweep();
            // Whether it is this one or another maker's that stands there now, it is opened as anybody would.
            make(&parent, &path, access, &header)?;
        }
    }

    /// Where it is, from the root.
    pub(crate) fn path(&self) -> &Path {
        &self.place.path
    }

    /// Bytes of data of each lane.
    pub(crate) fn capacity(&self) -> u64 {
        self.header.capacity
    }

    /// The largest message, in bytes.
    pub(crate) fn message_bytes_max(&self) -> u64 {
        self.header.message_bytes_max
    }

    /// The most lanes.
    pub(crate) fn lanes_max(&self) -> u32 {
        self.header.lanes_max
    }

    /// Whether the machine has not been started since it was made, or recovered.
    pub(crate) fn is_from_this_boot(&self) -> bool {
        self.is_from_this_boot
    }

    /// Lanes that exist by now.
    pub(crate) fn lanes(&self) -> Result<u32> {
        // Relaxed: what is done with a lane begins with opening its files, which the kernel orders after the count.
        let lanes = self.page.word(LANES_AT).load(Ordering::Relaxed);
        if lanes == 0 || lanes > self.header.lanes_max {
            let most = self.header.lanes_max;
            return Err(self.refuse(format!("its file channel counts {lanes} lanes, wanted 1 to {most}: {DAMAGED}")));
        }
        Ok(lanes)
    }

    /// Becomes the receiver.
    ///
    /// # Errors
    /// [`Error::RoleTaken`], and of any check.
    pub(crate) fn claim_receiver(&self) -> Result<ReceiverRole> {
        let Some(lock) = self.try_role(RECEIVER)? else { return Err(self.receiver_taken()) };
        Ok(ReceiverRole {
            lock,
            page: self.control(RECEIVER, MAGIC_RECEIVER, true)?,
            bell: self.bell(RECEIVER_BELL)?,
            life: self.hold(RECEIVER_LIFE)?,
        })
    }

    /// Becomes the sender of the first lane that has none, or of a new one.
    ///
    /// # Errors
    /// [`Error::RoleTaken`] when there are no more lanes to be had, [`Error::NoSpace`], and of any check.
    pub(crate) fn claim_sender(&self) -> Result<SenderRole> {
        if let Some(role) = self.claim_free_lane()? {
            return Ok(role);
        }
        if self.lanes()? < self.header.lanes_max {
            let growth = self.lock_growth()?;
            // Others may have added lanes while this one waited, and left some.
            if let Some(role) = self.claim_free_lane()? {
                return Ok(role);
            }
            let lanes = self.lanes()?;
            if lanes < self.header.lanes_max {
                return self.add_lane(&growth, lanes);
            }
        }
        Err(self.senders_taken()?)
    }

    /// Becomes the sender of this very lane.
    ///
    /// # Errors
    /// As [`Directory::claim_sender`].
    pub(crate) fn claim_lane(&self, number: u32) -> Result<SenderRole> {
        self.check_number(number)?;
        match self.try_role(&of_lane(number, PRODUCER))? {
            Some(lock) => self.sender(number, lock),
            None => Err(self.taken("sender".to_owned(), self.sender_pid(number))),
        }
    }

    fn claim_free_lane(&self) -> Result<Option<SenderRole>> {
        for number in 0..self.lanes()? {
            if let Some(lock) = self.try_role(&of_lane(number, PRODUCER))? {
                return self.sender(number, lock).map(Some);
            }
        }
        Ok(None)
    }

    /// Makes lane `number`, one more than there are, for this process. Only under the growth lock.
    fn add_lane(&self, growth: &Lock, number: u32) -> Result<SenderRole> {
        // A predecessor that died here has left files, which nobody can be using: they were never counted.
        self.place.remove_lane(number)?;
        let add = || {
            self.place.make_lane(number, &self.header)?;
            // The role before the count, so that nobody else finds the lane free.
            let lock = self.try_role(&of_lane(number, PRODUCER))?;
            let lock =
                lock.ok_or_else(|| self.refuse(format!("somebody has locked its new lane {number}: see lsof")))?;
            let role = self.sender(number, lock)?;
            write_at(growth.as_fd(), &(number + 1).to_le_bytes(), LANES_AT as u64)
                .map_err(|errno| self.place.failed("counting lanes in", CHANNEL, 4, errno))?;
            step("growth: counted");
            Ok(role)
        };
        add().inspect_err(|_| {
            let _ = self.place.remove_lane(number);
        })
    }

    /// Everything that a sender has of its lane, whose role is `lock`.
    fn sender(&self, number: u32, lock: Lock) -> Result<SenderRole> {
        Ok(SenderRole {
            number,
            lock,
            page: self.producer(number, true)?,
            data: self.data(number, true)?,
            consumer: self.control(&of_lane(number, CONSUMER), MAGIC_CONSUMER, false)?,
            receiver: self.control(RECEIVER, MAGIC_RECEIVER, false)?.without_descriptor(),
            bell: self.bell(&of_lane(number, BELL))?,
            receiver_bell: self.bell(RECEIVER_BELL)?,
            life: self.hold(&of_lane(number, LIFE))?,
        })
    }

    /// What the receiver maps of lane `number`. Only for who has that role.
    pub(crate) fn lane_for_receiver(&self, number: u32) -> Result<LaneForReceiver> {
        self.check_number(number)?;
        Ok(LaneForReceiver {
            // Looked at only: a receiver of many lanes does without their descriptors.
            producer: self.producer(number, false)?.without_descriptor(),
            data: self.data(number, false)?.without_descriptor(),
            consumer: self.control(&of_lane(number, CONSUMER), MAGIC_CONSUMER, true)?,
            bell: self.bell(&of_lane(number, BELL))?,
        })
    }

    /// Lane `number`, to look at.
    pub(crate) fn lane_to_look_at(&self, number: u32) -> Result<LaneToLookAt> {
        self.check_number(number)?;
        Ok(LaneToLookAt {
            producer: self.producer(number, false)?,
            consumer: self.control(&of_lane(number, CONSUMER), MAGIC_CONSUMER, false)?,
            data: self.data(number, false)?,
        })
    }

    /// The receiver's life: poll answers an error on it once that receiver has gone, and as long as no successor holds
    /// it. `None`: there is no receiver.
    pub(crate) fn watch_receiver(&self) -> Result<Option<Descriptor>> {
        self.watch(RECEIVER_LIFE)
    }

    /// As [`Directory::watch_receiver`], of the sender of lane `number`.
    pub(crate) fn watch_sender(&self, number: u32) -> Result<Option<Descriptor>> {
        self.check_number(number)?;
        self.watch(&of_lane(number, LIFE))
    }

    /// Says that the channel is good in this boot: its lanes' pages first, which the caller has the roles of, then its own.
    pub(crate) fn note_recovered(&self, lanes: &[SenderRole]) -> Result<()> {
        let header = Header { boot_id: boot_id()?, ..self.header.clone() };
        let failed = |errno| self.failed("noting the recovery in", CHANNEL, errno);
        for lane in lanes {
            write_at(lane.page.as_fd(), &header.boot_id, offset_of!(ProducerPage, boot_id) as u64).map_err(failed)?;
            step("recovery: noted in a page");
            lane.page.sync().map_err(Error::system("syncing a producer's page"))?;
        }
        let growth = self.lock_growth()?;
        write_at(growth.as_fd(), &header.encode()[..HEADER_BYTES], 0).map_err(failed)?;
        step("recovery: noted in channel");
        rustix::fs::fdatasync(growth.as_fd()).map_err(failed)
    }

    /// Permission bits of its directory.
    pub(crate) fn mode(&self) -> u32 {
        self.header.mode
    }

    /// The user that owns it.
    pub(crate) fn owner(&self) -> u32 {
        self.place.uid
    }

    /// Waits until its files, and that they are there, are on the disk.
    pub(crate) fn sync(&self) -> Result<()> {
        let failed = |name: &'static str| move |errno| self.failed("syncing", name, errno);
        for name in [CHANNEL, RECEIVER] {
            let fd = self.place.open_file(name, FileType::RegularFile, OFlags::RDONLY)?;
            rustix::fs::fsync(&fd).map_err(failed(name))?;
        }
        let parent = Parent::open(&self.place.path)?;
        for fd in [self.place.fd.as_fd(), parent.fd.as_fd()] {
            // What it was opened with is for names only.
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let readable = rustix::fs::openat(fd, ".", flags, Mode::empty()).map_err(failed(""))?;
            rustix::fs::fsync(readable).map_err(failed(""))?;
        }
        Ok(())
    }

    /// Whether there is a receiver. Takes nothing.
    pub(crate) fn is_receiver_held(&self) -> Result<bool> {
        self.is_held(RECEIVER)
    }

    /// Whether lane `number` has a sender. Takes nothing.
    pub(crate) fn is_sender_held(&self, number: u32) -> Result<bool> {
        self.check_number(number)?;
        self.is_held(&of_lane(number, PRODUCER))
    }

    /// Removes the channel, if nobody uses it and nothing but its files is in it.
    ///
    /// # Errors
    /// [`Error::RoleTaken`], [`Error::NotAChannel`] with the foreign files: nothing has been removed then.
    pub(crate) fn remove(self) -> Result<()> {
        let path = &self.place.path;
        let _growth = self.lock_growth()?;
        let lanes = self.lanes()?;
        // Nothing is added to them under the growth lock. To read them later would want a descriptor when it is too late to fail.
        let names = self.place.names()?;
        let foreign = names.iter().filter(|name| match known(name) {
            // What cannot be unlinked must not be found only when the rest is gone.
            _ if self.place.is_directory(name) => true,
            Known::Channel => false,
            // The first that is not counted may be there, of a sender that died adding it.
            Known::Lane(number) => number > lanes,
            Known::Foreign => true,
        });
        let foreign: Vec<String> = foreign.map(|name| format!("{name:?}")).collect();
        if !foreign.is_empty() {
            let problem = format!("{} in it is not of the channel: move that away first", and_so_on(&foreign));
            return Err(self.refuse(problem));
        }
        let mut roles = Vec::new();
        let senders = (0..lanes).map(|number| (Some(number), of_lane(number, PRODUCER)));
        for (number, name) in [(None, RECEIVER.to_owned())].into_iter().chain(senders) {
            // Of a damaged channel it may be missing, and then nobody has the role.
            if self.place.look(&name, FileType::RegularFile)?.is_none() {
                continue;
            }
            match (self.try_role(&name)?, number) {
                (Some(role), _) => roles.push(role),
                (None, None) => return Err(self.receiver_taken()),
                (None, Some(number)) => return Err(self.taken("sender".to_owned(), self.sender_pid(number))),
            }
        }
        let parent = Parent::open(path)?;
        if !self.place.is_at(path)? {
            return Err(Error::NoChannel { path: path.display().to_string() });
        }
        // Aside first, so that at the path there is always a whole channel or none. It is as if it were being made: a
        // later creator removes what a remover that dies leaves.
        let aside = loop {
            let aside = parent.aside_name();
            match rustix::fs::renameat_with(&parent.fd, &parent.name, &parent.fd, &aside, RenameFlags::NOREPLACE) {
                Err(Errno::EXIST) => {}
                done => break done.map(|()| aside).map_err(|errno| self.failed("renaming", "", errno))?,
            }
        };
        step("removal: renamed");
        let cleared = remove_known(self.place.fd.as_fd(), names);
        cleared.map_err(|errno| self.failed("removing the files of", "", errno))?;
        let removed = rustix::fs::unlinkat(&parent.fd, &aside, AtFlags::REMOVEDIR);
        step("removal: directory removed");
        match removed {
            // A creator that swept has just done it.
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => {
                let aside = path.with_file_name(aside);
                Err(Error::System { what: format!("removing {}", aside.display()), source: errno.into() })
            }
        }
    }

    fn refuse(&self, problem: String) -> Error {
        self.place.refuse(problem)
    }

    fn failed(&self, doing: &str, name: &str, errno: Errno) -> Error {
        self.place.failed(doing, name, 0, errno)
    }

    /// There is no space, or no permission, for so many bytes of a lane's data.
    pub(crate) fn cannot_allocate(&self, number: u32, bytes: u64, source: std::io::Error) -> Error {
        let errno = Errno::from_io_error(&source).unwrap_or(Errno::IO);
        self.place.failed("allocating", &of_lane(number, DATA), bytes, errno)
    }

    fn check_number(&self, number: u32) -> Result<()> {
        let lanes = self.lanes()?;
        if number < lanes {
            return Ok(());
        }
        Err(self.refuse(format!("it has {lanes} lanes, wanted number {number}: wait until a sender adds it")))
    }

    /// A file locked through a description of the lock's own; `None` while somebody else has it.
    fn try_role(&self, name: &str) -> Result<Option<Lock>> {
        let fd = self.place.open_alone(name, FileType::RegularFile, OFlags::RDWR)?;
        let taken = lock::try_lock(fd).map_err(|error| self.cannot_lock(name, error))?;
        step("role: locked, or not");
        taken.map(|lock| self.still_there(lock, name)).transpose()
    }

    /// Waits for the lock under which lanes are added, and the channel removed. It is held for as long as five files take.
    fn lock_growth(&self) -> Result<Lock> {
        let fd = self.place.open_alone(CHANNEL, FileType::RegularFile, OFlags::RDWR)?;
        let lock = lock::lock(fd).map_err(|error| self.cannot_lock(CHANNEL, error))?;
        step("growth: locked");
        self.still_there(lock, CHANNEL)
    }

    fn cannot_lock(&self, name: &str, source: std::io::Error) -> Error {
        Error::System { what: format!("locking {}", self.place.file(name).display()), source }
    }

    /// Who removes the channel has all locks; what is locked after that is nobody's file.
    fn still_there(&self, lock: Lock, name: &str) -> Result<Lock> {
        let found = rustix::fs::fstat(&lock).map_err(|errno| self.failed("looking at", name, errno))?;
        if found.st_nlink == 0 {
            return Err(Error::NoChannel { path: self.place.path.display().to_string() });
        }
        Ok(lock)
    }

    fn is_held(&self, name: &str) -> Result<bool> {
        let fd = self.place.open_file(name, FileType::RegularFile, OFlags::RDONLY)?;
        lock::is_locked(fd.as_fd()).map_err(|error| self.cannot_lock(name, error))
    }

    fn taken(&self, role: String, pid: u32) -> Error {
        Error::RoleTaken { role, path: self.place.path.display().to_string(), pid }
    }

    fn receiver_taken(&self) -> Error {
        // The receiver's own page has no room for it; the page of the first lane is the receiver's, too.
        self.taken("receiver".to_owned(), self.pid(&of_lane(0, CONSUMER), CONSUMER_PID_AT))
    }

    fn senders_taken(&self) -> Result<Error> {
        let lanes = self.lanes()?;
        let pids: Vec<u32> = (0..lanes).map(|number| self.sender_pid(number)).collect();
        let role = match pids.len() {
            1 => "sender".to_owned(),
            lanes => {
                let known: Vec<String> = pids.iter().filter(|pid| **pid != 0).map(u32::to_string).collect();
                format!("sender on all {lanes} lanes (processes {})", and_so_on(&known))
            }
        };
        Ok(self.taken(role, pids[0]))
    }

    fn sender_pid(&self, number: u32) -> u32 {
        self.pid(&of_lane(number, PRODUCER), PRODUCER_PID_AT)
    }

    /// What a page says about its writer's process; 0 where it cannot be read. For people only.
    fn pid(&self, name: &str, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        let file = self.place.open_file(name, FileType::RegularFile, OFlags::RDONLY);
        let read = file.map(|fd| rustix::io::pread(fd, &mut bytes, offset));
        if matches!(read, Ok(Ok(4))) { u32::from_le_bytes(bytes) } else { 0 }
    }

    fn bell(&self, name: &str) -> Result<Bell> {
        let fd = self.place.open_file(name, FileType::Fifo, OFlags::RDWR)?;
        Bell::fifo(fd).map_err(Error::system("keeping a bell"))
    }

    /// Shows that this process is alive, as long as the descriptor is kept. Only for who has the role's lock.
    fn hold(&self, name: &str) -> Result<Descriptor> {
        let life = self.place.open_alone(name, FileType::Fifo, OFlags::RDONLY);
        step("life: held");
        life
    }

    fn watch(&self, name: &str) -> Result<Option<Descriptor>> {
        self.place.try_open_file(name, FileType::Fifo, OFlags::WRONLY)?.map(descriptor).transpose()
    }

    fn data(&self, number: u32, writable: bool) -> Result<Segment> {
        self.segment(&of_lane(number, DATA), self.header.capacity, writable)
    }

    /// A page whose beginning is what it must be.
    fn control(&self, name: &str, magic: u64, writable: bool) -> Result<Segment> {
        let segment = self.segment(name, SEGMENT_BYTES, writable)?;
        let bytes: [u8; size_of::<Preamble>()] = self.place.read(segment.as_fd(), name)?;
        check_preamble(&bytes, magic).map_err(|problem| self.refuse(format!("its file {name} {problem}")))?;
        Ok(segment)
    }

    /// A producer's page that agrees with the channel's.
    fn producer(&self, number: u32, writable: bool) -> Result<Segment> {
        let name = of_lane(number, PRODUCER);
        let segment = self.control(&name, MAGIC_PRODUCER, writable)?;
        let bytes: [u8; 128] = self.place.read(segment.as_fd(), &name)?;
        let found = (
            u64_at(&bytes, offset_of!(ProducerPage, capacity)),
            u64_at(&bytes, offset_of!(ProducerPage, message_bytes_max)),
            u32_at(&bytes, offset_of!(ProducerPage, cursors)),
        );
        let wanted = (self.header.capacity, self.header.message_bytes_max, 1);
        if found != wanted {
            return Err(self.refuse(format!(
                "its file {name} says capacity {}, limit {}, cursors {}, wanted {}, {} and {}: {DAMAGED}",
                found.0, found.1, found.2, wanted.0, wanted.1, wanted.2
            )));
        }
        let boot: [u8; 16] = array_at(&bytes, offset_of!(ProducerPage, boot_id));
        // Of another boot anything goes: a recovery writes the lanes' pages before the channel's, and may have been cut off.
        if self.is_from_this_boot && boot != self.header.boot_id {
            return Err(self.refuse(format!(
                "its file {name} is of boot {}, the channel of boot {}: {DAMAGED}",
                hex(&boot),
                hex(&self.header.boot_id)
            )));
        }
        Ok(segment)
    }

    fn segment(&self, name: &str, bytes: u64, writable: bool) -> Result<Segment> {
        let flags = if writable { OFlags::RDWR } else { OFlags::RDONLY };
        let fd = self.place.open_file(name, FileType::RegularFile, flags)?;
        self.place.map(fd, name, bytes, writable)
    }
}

/// What the channel's file says, once.
#[derive(Clone, Debug)]
struct Header {
    capacity: u64,
    message_bytes_max: u64,
    lanes_max: u32,
    mode: u32,
    boot_id: [u8; 16],
}

impl Header {
    /// The file's beginning, of a channel with one lane.
    fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; page_bytes(size_of::<ChannelPage>())];
        let mut put = |offset: usize, value: &[u8]| bytes[offset..offset + value.len()].copy_from_slice(value);
        put(offset_of!(ChannelPage, preamble.magic), &MAGIC_CHANNEL.to_le_bytes());
        put(offset_of!(ChannelPage, preamble.wire_version), &WIRE_VERSION.to_le_bytes());
        put(offset_of!(ChannelPage, preamble.segment_bytes), &(SEGMENT_BYTES as u32).to_le_bytes());
        put(offset_of!(ChannelPage, preamble.layout_signature), &LAYOUT_SIGNATURE.to_le_bytes());
        put(offset_of!(ChannelPage, capacity), &self.capacity.to_le_bytes());
        put(offset_of!(ChannelPage, message_bytes_max), &self.message_bytes_max.to_le_bytes());
        put(offset_of!(ChannelPage, lanes_max), &self.lanes_max.to_le_bytes());
        put(offset_of!(ChannelPage, mode), &self.mode.to_le_bytes());
        put(offset_of!(ChannelPage, boot_id), &self.boot_id);
        put(LANES_AT, &1u32.to_le_bytes());
        let checksum = fnv1a(&bytes[..ChannelPage::CHECKED_BYTES]);
        bytes[offset_of!(ChannelPage, checksum)..][..8].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; HEADER_BYTES]) -> std::result::Result<Header, String> {
        check_preamble(bytes, MAGIC_CHANNEL).map_err(|problem| format!("{CHANNEL} {problem}"))?;
        let found = u64_at(bytes, offset_of!(ChannelPage, checksum));
        let wanted = fnv1a(&bytes[..ChannelPage::CHECKED_BYTES]);
        if found != wanted {
            return Err(format!("{CHANNEL} has checksum {found:#018x}, its bytes come to {wanted:#018x}: {DAMAGED}"));
        }
        let header = Header {
            capacity: u64_at(bytes, offset_of!(ChannelPage, capacity)),
            message_bytes_max: u64_at(bytes, offset_of!(ChannelPage, message_bytes_max)),
            lanes_max: u32_at(bytes, offset_of!(ChannelPage, lanes_max)),
            mode: u32_at(bytes, offset_of!(ChannelPage, mode)),
            boot_id: array_at(bytes, offset_of!(ChannelPage, boot_id)),
        };
        match header.problem() {
            Some((what, found, wanted)) => Err(format!("{CHANNEL} says {what} {found}, wanted {wanted}: {DAMAGED}")),
            None => Ok(header),
        }
    }

    /// Of options, before anything is made of them.
    fn check_wanted(&self) -> Result<()> {
        match self.problem() {
            Some((option, found, wanted)) => Err(Error::Option { option, found, wanted }),
            None => Ok(()),
        }
    }

    fn problem(&self) -> Option<(&'static str, u64, String)> {
        let limit = message_bytes_limit(self.capacity);
        if !capacity_is_valid(self.capacity) {
            return Some(("capacity", self.capacity, "a multiple of 64 from 4096 to 16 GiB".to_owned()));
        }
        if self.message_bytes_max > limit {
            return Some(("message_bytes_max", self.message_bytes_max, format!("at most {limit}")));
        }
        if self.lanes_max == 0 || self.lanes_max > LANES_MAX {
            return Some(("lanes_max", self.lanes_max.into(), format!("1 to {LANES_MAX}")));
        }
        if self.mode & !0o777 != 0 || self.mode & 0o700 != 0o700 {
            return Some(("mode", self.mode.into(), format!("{} (0o700) to {} (0o777)", 0o700, 0o777)));
        }
        None
    }
}

/// A directory that is a channel's, or is to be, and what its files must be like.
#[derive(Debug)]
struct Place {
    /// Where it is, or will be.
    path: PathBuf,
    fd: Descriptor,
    uid: u32,
    gid: u32,
    /// Who may have made the files.
    owners: Vec<u32>,
    /// The widest permission bits of the files.
    bits: u32,
}

impl Place {
    /// Opens a directory whose files have not been looked at. `None`: nothing is at the path.
    fn open(path: &Path, access: &Access) -> Result<Option<Place>> {
        use rustix::fs::{CWD, openat, statat};
        let refuse = |problem| Err(Error::NotAChannel { path: path.display().to_string(), problem });
        let failed = |errno: Errno| Error::System { what: format!("opening {}", path.display()), source: errno.into() };
        let check = |found: &Stat| {
            let own = rustix::process::geteuid().as_raw();
            let (kind, mode) = (FileType::from_raw_mode(found.st_mode), found.st_mode & 0o7777);
            if kind != FileType::Directory {
                return Err(format!("it is {}, wanted a directory: name a directory itself", in_words(kind)));
            }
            if found.st_uid != own && !access.uids.contains(&found.st_uid) {
                return Err(format!(
                    "it belongs to uid {}, wanted {}: allow that uid in the options, or choose another path",
                    found.st_uid,
                    uids_in_words(own, &access.uids)
                ));
            }
            if mode & !access.mode != 0 {
                return Err(format!(
                    "its mode is {mode:o}, this side permits at most {:o}: `chmod {:o} {}`, or allow more in the options",
                    access.mode,
                    mode & access.mode,
                    path.display()
                ));
            }
            Ok(())
        };
        // By name first: the kernel has fewer words for what is no directory.
        match statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(None),
            Err(Errno::NOTDIR) => return refuse("a directory above it is none: choose another path".to_owned()),
            Err(Errno::ACCESS) => {
                let own = rustix::process::geteuid().as_raw();
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
        Place::new(path, fd, &found, access).map(Some)
    }

    fn new(path: &Path, fd: OwnedFd, found: &Stat, access: &Access) -> Result<Place> {
        let mut owners = vec![rustix::process::geteuid().as_raw(), found.st_uid];
        owners.extend(&access.uids);
        let (path, fd) = (path.to_owned(), descriptor(fd)?);
        Ok(Place { path, fd, uid: found.st_uid, gid: found.st_gid, owners, bits: access.mode & 0o666 })
    }

    fn file(&self, name: &str) -> PathBuf {
        if name.is_empty() { self.path.clone() } else { self.path.join(name) }
    }

    fn refuse(&self, problem: String) -> Error {
        Error::NotAChannel { path: self.path.display().to_string(), problem }
    }

    /// Puts what the system said about a file that wants `bytes` into words.
    fn failed(&self, doing: &str, name: &str, bytes: u64, errno: Errno) -> Error {
        let path = self.file(name).display().to_string();
        failure(format!("{doing} {path}"), path, bytes, errno)
    }

    /// Whether this directory still stands at `path`.
    fn is_at(&self, path: &Path) -> Result<bool> {
        let failed = |errno| self.failed("looking at", "", 0, errno);
        let own = rustix::fs::fstat(&self.fd).map_err(failed)?;
        match rustix::fs::lstat(path) {
            Err(Errno::NOENT) => Ok(false),
            found => Ok(found.map(|found| (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)).map_err(failed)?),
        }
    }

    fn names(&self) -> Result<Vec<OsString>> {
        names(self.fd.as_fd()).map_err(|errno| self.failed("reading", "", 0, errno))
    }

    fn is_directory(&self, name: &OsStr) -> bool {
        let found = rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW);
        found.is_ok_and(|found| FileType::from_raw_mode(found.st_mode) == FileType::Directory)
    }

    /// Of a directory without a channel's file.
    fn what_else_is_there(&self) -> String {
        let names: Vec<String> = self.names().unwrap_or_default().iter().map(|name| format!("{name:?}")).collect();
        match names.len() {
            0 => "it is an empty directory, wanted a channel's: remove it, so that a channel can be made there"
                .to_owned(),
            _ => format!("it has no file {CHANNEL} but {}: choose another path", and_so_on(&names)),
        }
    }

    /// Checks a file by its name. `None`: it is not there.
    fn look(&self, name: &str, kind: FileType) -> Result<Option<()>> {
        match rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => Ok(None),
            found => {
                let found = found.map_err(|errno| self.failed("looking at", name, 0, errno))?;
                self.check(name, kind, &found).map(Some)
            }
        }
    }

    fn check(&self, name: &str, kind: FileType, found: &Stat) -> Result<()> {
        let (found_kind, mode) = (FileType::from_raw_mode(found.st_mode), found.st_mode & 0o7777);
        if found_kind != kind {
            return Err(self.refuse(format!(
                "its file {name} is {}, wanted {}: {DAMAGED}",
                in_words(found_kind),
                in_words(kind)
            )));
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

    /// Opens a file that is of the kind, the owner and the mode that it must be of.
    fn open_file(&self, name: &str, kind: FileType, access: OFlags) -> Result<OwnedFd> {
        let opened = self.try_open_file(name, kind, access)?;
        opened.ok_or_else(|| self.failed("opening", name, 0, Errno::NXIO))
    }

    /// As [`Place::open_file`], with no child forked meanwhile that keeps a copy: what it locks, or lives by, ends with this
    /// process.
    fn open_alone(&self, name: &str, kind: FileType, access: OFlags) -> Result<Descriptor> {
        let opened = Descriptor::opened(|| self.open_file(name, kind, access));
        opened.map_err(Error::system("keeping a descriptor"))?
    }

    /// `None`: a FIFO that nobody has open for reading, and that is to be written.
    fn try_open_file(&self, name: &str, kind: FileType, access: OFlags) -> Result<Option<OwnedFd>> {
        let missing = || self.missing(name);
        // By name first: opening some devices does something.
        self.look(name, kind)?.ok_or_else(missing)?;
        // Not waiting, should it be a FIFO all the same.
        let flags = access | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let fd = match rustix::fs::openat(&self.fd, name, flags, Mode::empty()) {
            Err(Errno::NXIO) => return Ok(None),
            Err(Errno::NOENT) => return Err(missing()),
            Err(Errno::ACCESS) => return Err(self.no_permission(name, access)),
            opened => opened.map_err(|errno| self.failed("opening", name, 0, errno))?,
        };
        let found = rustix::fs::fstat(&fd).map_err(|errno| self.failed("looking at", name, 0, errno))?;
        self.check(name, kind, &found)?;
        Ok(Some(fd))
    }

    fn missing(&self, name: &str) -> Error {
        match self.is_at(&self.path) {
            Ok(true) => self.refuse(format!("it has no file {name}: {DAMAGED}")),
            // Removed since it was opened: not even the directory is there.
            _ => Error::NoChannel { path: self.path.display().to_string() },
        }
    }

    fn no_permission(&self, name: &str, access: OFlags) -> Error {
        let own = rustix::process::geteuid().as_raw();
        let what = if access == OFlags::RDONLY { "read" } else { "write" };
        let (owner, gid, mode) = match rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(found) => (found.st_uid.to_string(), found.st_gid.to_string(), format!("{:o}", found.st_mode & 0o7777)),
            Err(_) => ("unknown".to_owned(), "unknown".to_owned(), "unknown".to_owned()),
        };
        self.refuse(format!(
            "its file {name} belongs to uid {owner}, gid {gid}, has mode {mode}, and does not let uid {own} {what} it: make the channel with a mode that does"
        ))
    }

    fn map(&self, fd: OwnedFd, name: &str, bytes: u64, writable: bool) -> Result<Segment> {
        Segment::open_file(fd, &format!("its file {name}"), bytes, writable).map_err(|error| match error.kind() {
            ErrorKind::InvalidData => self.refuse(format!("{error}: {DAMAGED}")),
            _ => Error::System { what: format!("mapping {}", self.file(name).display()), source: error },
        })
    }

    /// One copy of a file's first bytes.
    fn read<const N: usize>(&self, fd: BorrowedFd<'_>, name: &str) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        let read = rustix::io::retry_on_intr(|| rustix::io::pread(fd, &mut bytes, 0));
        match read.map_err(|errno| self.failed("reading", name, 0, errno))? {
            read if read == N => Ok(bytes),
            read => Err(self.refuse(format!("its file {name} has {read} bytes, wanted {SEGMENT_BYTES}: {DAMAGED}"))),
        }
    }

    /// Makes everything of a channel but its directory and its own file.
    fn make_receiver_and_first_lane(&self, header: &Header) -> Result<()> {
        self.make_file(RECEIVER, SEGMENT_BYTES, &bytes_of(ReceiverPage::new()))?;
        self.make_fifo(RECEIVER_BELL)?;
        self.make_fifo(RECEIVER_LIFE)?;
        self.make_lane(0, header)
    }

    /// Makes the files of a lane, none of which is there.
    fn make_lane(&self, number: u32, header: &Header) -> Result<()> {
        let mut page = ProducerPage::new(header.capacity, header.message_bytes_max, 0, 0);
        page.boot_id = header.boot_id;
        self.make_file(&of_lane(number, PRODUCER), SEGMENT_BYTES, &bytes_of(page))?;
        let page = ConsumerPage::new(Position::START, 0, 0);
        self.make_file(&of_lane(number, CONSUMER), SEGMENT_BYTES, &bytes_of(page))?;
        let name = of_lane(number, DATA);
        let data = self.make_file(&name, header.capacity, &[])?;
        // What a lane whose reader keeps up uses. The rest is for the sender to ask for, before it first goes there.
        let first = header.capacity.min(WINDOW);
        if !can_allocate(&data) {
            return Err(self.refuse(format!(
                "the file system of {} cannot allocate space ahead: use tmpfs, ext4 or xfs",
                self.path.display()
            )));
        }
        let errno = |error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
        allocate(&data, 0, first).map_err(|error| self.failed("allocating", &name, first, errno(error)))?;
        step("make a lane: allocated");
        self.make_fifo(&of_lane(number, BELL))?;
        self.make_fifo(&of_lane(number, LIFE))
    }

    fn make_file(&self, name: &str, bytes: u64, contents: &[u8]) -> Result<OwnedFd> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let make = || {
            let fd = rustix::fs::openat(&self.fd, name, flags, Mode::from_raw_mode(0o600))?;
            step("make a file: made");
            // So that a group that the directory lets in gets at the files of all its members. Not allowed is no harm:
            // then the files say whom they let in.
            if rustix::fs::fstat(&fd)?.st_gid != self.gid {
                let _ = rustix::fs::fchown(&fd, None, Some(Gid::from_raw(self.gid)));
            }
            rustix::fs::fchmod(&fd, Mode::from_raw_mode(self.bits))?;
            step("make a file: permissions");
            check_file_size(bytes)?;
            rustix::fs::ftruncate(&fd, bytes)?;
            step("make a file: size");
            // Written, not mapped: then the page has its place on the disk, and no store to it can fail.
            write_at(fd.as_fd(), contents, 0)?;
            step("make a file: written");
            Ok(fd)
        };
        make().map_err(|errno| self.failed("making", name, contents.len() as u64, errno))
    }

    fn make_fifo(&self, name: &str) -> Result<()> {
        let make = || {
            rustix::fs::mkfifoat(&self.fd, name, Mode::from_raw_mode(0o600))?;
            step("make a FIFO: made");
            let found = rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW)?;
            if found.st_gid != self.gid {
                let gid = Some(Gid::from_raw(self.gid));
                let _ = rustix::fs::chownat(&self.fd, name, None, gid, AtFlags::SYMLINK_NOFOLLOW);
            }
            rustix::fs::chmodat(&self.fd, name, Mode::from_raw_mode(self.bits), AtFlags::empty())?;
            step("make a FIFO: permissions");
            Ok(())
        };
        make().map_err(|errno| self.failed("making", name, 0, errno))
    }

    /// Removes what is there of a lane that does not exist.
    fn remove_lane(&self, number: u32) -> Result<()> {
        for name in OF_A_LANE.map(|kind| of_lane(number, kind)) {
            let removed = rustix::fs::unlinkat(&self.fd, &name, AtFlags::empty());
            step("growth: a leftover removed, or none");
            match removed {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(errno) => return Err(self.failed("removing the leftover", &name, 0, errno)),
            }
        }
        Ok(())
    }
}

/// Puts into words what the system said of `path`, which wants `bytes`, or just a name.
fn failure(what: String, path: String, bytes: u64, errno: Errno) -> Error {
    let source = errno.into();
    match errno {
        // A name costs a block too, more or less.
        Errno::NOSPC | Errno::DQUOT => Error::NoSpace { path, bytes: bytes.max(4096), source },
        Errno::FBIG => Error::System { what: format!("{what}: raise this process's RLIMIT_FSIZE"), source },
        _ => Error::System { what, source },
    }
}

/// Makes a channel aside and renames it into place, if nothing is there by then.
fn make(parent: &Parent, path: &Path, access: &Access, header: &Header) -> Result<()> {
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
    step("creation: directory made");
    let made = make_aside(parent, &aside, path, access, header);
    match made {
        Ok(Some((place, _lock))) => {
            let flags = RenameFlags::NOREPLACE;
            let placed = rustix::fs::renameat_with(&parent.fd, &aside, &parent.fd, &parent.name, flags);
            if placed.is_ok() {
                step("creation: renamed");
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
    step("creation: directory its own");
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
        step("creation: locked, or not");
        let Some(lock) = lock else { return Ok(None) };
        if rustix::fs::fstat(&lock).map_err(failed)?.st_nlink == 0 {
            return Ok(None);
        }
        let contents = header.encode();
        write_at(lock.as_fd(), &contents, 0)
            .map_err(|errno| place.failed("writing", CHANNEL, contents.len() as u64, errno))?;
        step("creation: channel written");
        place.make_receiver_and_first_lane(header)?;
        rustix::fs::fchmod(&place.fd, Mode::from_raw_mode(header.mode)).map_err(failed)?;
        step("creation: mode");
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
struct Parent {
    fd: OwnedFd,
    /// The channel's name in it.
    name: OsString,
}

impl Parent {
    fn open(path: &Path) -> Result<Parent> {
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
    fn aside_name(&self) -> OsString {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let mut name = self.aside_prefix();
        name.extend(format!("{}-{count}", std::process::id()).bytes());
        OsString::from_vec(name)
    }

    /// Removes what makers and removers of this channel that have died left. What cannot be removed does no harm.
    fn sweep(&self) {
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

    fn sweep_opened(&self, aside: &OsStr, directory: BorrowedFd<'_>) -> std::io::Result<()> {
        use rustix::fs::{fstat, openat, statat, unlinkat};
        let found = fstat(directory)?;
        if found.st_uid != rustix::process::geteuid().as_raw() {
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
                    step("sweep: locked");
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
        step("sweep: directory removed, or not");
        Ok(removed?)
    }
}

/// Removes a channel's files from its directory, `channel` last: its lock says that somebody is at it.
fn clear(directory: BorrowedFd<'_>) -> std::result::Result<(), Errno> {
    remove_known(directory, names(directory)?)
}

/// As [`clear`], of these names.
fn remove_known(directory: BorrowedFd<'_>, names: Vec<OsString>) -> std::result::Result<(), Errno> {
    let mut known: Vec<OsString> = names.into_iter().filter(|name| !matches!(known(name), Known::Foreign)).collect();
    known.sort_by_key(|name| name == CHANNEL);
    for name in known {
        let removed = rustix::fs::unlinkat(directory, &name, AtFlags::empty());
        step("clear: a file removed");
        match removed {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Which file of a channel a name is.
enum Known {
    Channel,
    Lane(u32),
    Foreign,
}

fn known(name: &OsStr) -> Known {
    let Some(name) = name.to_str() else { return Known::Foreign };
    if [CHANNEL, RECEIVER, RECEIVER_BELL, RECEIVER_LIFE].contains(&name) {
        return Known::Channel;
    }
    let Some((number, kind)) = name.split_once('.') else { return Known::Foreign };
    match number.parse::<u32>() {
        Ok(lane) if lane.to_string() == number && lane < LANES_MAX && OF_A_LANE.contains(&kind) => Known::Lane(lane),
        _ => Known::Foreign,
    }
}

/// The file of lane `number`.
fn of_lane(number: u32, kind: &str) -> String {
    format!("{number}.{kind}")
}

fn names(directory: BorrowedFd<'_>) -> std::result::Result<Vec<OsString>, Errno> {
    let mut names = Vec::new();
    // Anew: through a descriptor opened as a mere path nothing can be read.
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

/// The path from the root, with a last component that is a name: the channel stays the same when the process goes elsewhere.
fn absolute(path: &Path) -> Result<PathBuf> {
    let refuse = |problem: String| Error::NotAChannel { path: path.display().to_string(), problem };
    let absolute = std::path::absolute(path)
        .map_err(|error| refuse(format!("it is no path ({error}): name a directory")))?
        // Without a slash at the end, which would lead through a symbolic link.
        .components()
        .collect::<PathBuf>();
    if absolute.file_name().is_none() {
        return Err(refuse("it does not end in a name: name a directory".to_owned()));
    }
    Ok(absolute)
}

/// The number of the machine's last start.
fn boot_id() -> Result<[u8; 16]> {
    const FILE: &str = "/proc/sys/kernel/random/boot_id";
    let text = std::fs::read_to_string(FILE).map_err(Error::system(format!("reading {FILE}, which tells reboots")))?;
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    let digit = |i: usize| (digits[i] as char).to_digit(16).unwrap_or(0) as u8;
    if digits.len() != 32 {
        let source =
            std::io::Error::new(ErrorKind::Unsupported, format!("found {text:?}, wanted 32 hexadecimal digits"));
        return Err(Error::System { what: format!("reading {FILE}"), source });
    }
    Ok(std::array::from_fn(|i| digit(2 * i) << 4 | digit(2 * i + 1)))
}

/// Checks that a page is one, of this version.
fn check_preamble(bytes: &[u8], magic: u64) -> std::result::Result<(), String> {
    let found = u64_at(bytes, offset_of!(Preamble, magic));
    if found != magic {
        let text = |magic: u64| magic.to_le_bytes().escape_ascii().to_string();
        return Err(format!("begins with \"{}\", wanted \"{}\": {DAMAGED}", text(found), text(magic)));
    }
    let found =
        (u32_at(bytes, offset_of!(Preamble, wire_version)), u64_at(bytes, offset_of!(Preamble, layout_signature)));
    if found != (WIRE_VERSION, LAYOUT_SIGNATURE) {
        return Err(format!(
            "is of wire version {} with layout {:#018x}, wanted {WIRE_VERSION} with {LAYOUT_SIGNATURE:#018x}: read it to its end with the version of pelton that made it, then make it anew",
            found.0, found.1
        ));
    }
    let found = u32_at(bytes, offset_of!(Preamble, segment_bytes));
    if u64::from(found) != SEGMENT_BYTES {
        return Err(format!("says that it has {found} bytes, wanted {SEGMENT_BYTES}: {DAMAGED}"));
    }
    Ok(())
}

/// A fresh page as it is in its file.
fn bytes_of<Page>(page: Page) -> Vec<u8> {
    let mut bytes = vec![0; page_bytes(size_of::<Page>())];
    // SAFETY: the vector is at least as long as the page, which is words without padding between them.
    unsafe { bytes.as_mut_ptr().cast::<Page>().write_unaligned(page) };
    bytes
}

/// Whole pages of the machine's, so that none that is written to later is without its place on the disk.
fn page_bytes(bytes: usize) -> usize {
    bytes.next_multiple_of(rustix::param::page_size()).min(SEGMENT_BYTES as usize)
}

fn descriptor(fd: OwnedFd) -> Result<Descriptor> {
    Descriptor::new(fd).map_err(Error::system("keeping a descriptor"))
}

fn array_at<const N: usize>(bytes: &[u8], offset: usize) -> [u8; N] {
    std::array::from_fn(|i| bytes[offset + i])
}

fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, offset))
}

fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, offset))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
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

/// The first few of a list.
fn and_so_on(texts: &[String]) -> String {
    const MOST: usize = 8;
    let more = if texts.len() > MOST { format!(" and {} more", texts.len() - MOST) } else { String::new() };
    texts[..texts.len().min(MOST)].join(", ") + &more
}

#[cfg(test)]
mod tests;
