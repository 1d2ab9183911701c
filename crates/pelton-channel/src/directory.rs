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
//!
//! Here is who has which role; its files are in `directory/files.rs`, what they say in `pages.rs`, how it comes to be in `making.rs`.

mod files;
mod making;
mod pages;

use crate::error::{Error, Result};
use files::{
    BELL, CONSUMER, DATA, Known, LIFE, PRODUCER, Place, RECEIVER, RECEIVER_BELL, RECEIVER_LIFE, and_so_on, descriptor,
    known, of_lane, remove_known,
};
use making::{Parent, make};
use pages::{CHANNEL, DAMAGED, Header, LANES_AT, RECOVERED_BYTES, array_at, boot_id, check_preamble, u32_at, u64_at};
use pelton_lane::{MAGIC_CONSUMER, MAGIC_PRODUCER, MAGIC_RECEIVER, Preamble, ProducerPage, SEGMENT_BYTES, failpoint};
use pelton_os::lock::{self, Lock};
use pelton_os::{Descriptor, Doorbell, Segment, write_at};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use std::mem::offset_of;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Where a page says which process its writer is (spec/layout.md), for messages to people.
const PRODUCER_PID_AT: u64 = 388;
const CONSUMER_PID_AT: u64 = 260;

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
    pub(crate) doorbell: Doorbell,
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
    pub(crate) doorbell: Doorbell,
    pub(crate) receiver_doorbell: Doorbell,
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
    pub(crate) doorbell: Doorbell,
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
        let page = place.open_mapped(CHANNEL, SEGMENT_BYTES, false)?;
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

    /// The boot that it was made, or recovered, in.
    pub(crate) fn boot_id(&self) -> [u8; 16] {
        self.header.boot_id
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
        self.claim_receiver_until(None)
    }

    /// As [`Directory::claim_receiver`]. Waits for the role until `deadline`.
    ///
    /// # Errors
    /// As [`Directory::claim_receiver`].
    pub(crate) fn claim_receiver_until(&self, deadline: Option<Instant>) -> Result<ReceiverRole> {
        let lock = waiting_a_moment(deadline, || Ok((self.try_role(RECEIVER)?, true)))?;
        let Some(lock) = lock else { return Err(self.receiver_taken()) };
        Ok(ReceiverRole {
            lock,
            page: self.control(RECEIVER, MAGIC_RECEIVER, true)?,
            doorbell: self.doorbell(RECEIVER_BELL)?,
            life: self.hold(RECEIVER_LIFE)?,
        })
    }

    /// Becomes the sender of the first lane that has none, or of a new one.
    ///
    /// # Errors
    /// [`Error::RoleTaken`] when there are no more lanes to be had, [`Error::NoSpace`], and of any check.
    #[cfg(test)]
    pub(crate) fn claim_sender(&self) -> Result<SenderRole> {
        self.claim_sender_until(None)
    }

    /// As [`Directory::claim_sender`]. Waits for a lane until `deadline`.
    ///
    /// # Errors
    /// As [`Directory::claim_sender`].
    pub(crate) fn claim_sender_until(&self, deadline: Option<Instant>) -> Result<SenderRole> {
        let free =
            waiting_a_moment(deadline, || Ok((self.claim_free_lane()?, self.lanes()? == self.header.lanes_max)))?;
        if let Some(role) = free {
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
            failpoint("growth: counted");
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
            doorbell: self.doorbell(&of_lane(number, BELL))?,
            receiver_doorbell: self.doorbell(RECEIVER_BELL)?,
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
            doorbell: self.doorbell(&of_lane(number, BELL))?,
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
            failpoint("recovery: noted in a page");
            lane.page.sync().map_err(Error::system("syncing a producer's page"))?;
        }
        let growth = self.lock_growth()?;
        write_at(growth.as_fd(), &header.encode()[..RECOVERED_BYTES], 0).map_err(failed)?;
        failpoint("recovery: noted in channel");
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
            Known::ReceivedFd => true,
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
        failpoint("removal: renamed");
        let cleared = remove_known(self.place.fd.as_fd(), names);
        cleared.map_err(|errno| self.failed("removing the files of", "", errno))?;
        let removed = rustix::fs::unlinkat(&parent.fd, &aside, AtFlags::REMOVEDIR);
        failpoint("removal: directory removed");
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
        failpoint("role: locked, or not");
        taken.map(|lock| self.still_there(lock, name)).transpose()
    }

    /// Waits for the lock under which lanes are added, and the channel removed. It is held for as long as five files take.
    fn lock_growth(&self) -> Result<Lock> {
        let fd = self.place.open_alone(CHANNEL, FileType::RegularFile, OFlags::RDWR)?;
        let lock = lock::lock(fd).map_err(|error| self.cannot_lock(CHANNEL, error))?;
        failpoint("growth: locked");
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

    fn doorbell(&self, name: &str) -> Result<Doorbell> {
        let fd = self.place.open_file(name, FileType::Fifo, OFlags::RDWR)?;
        Doorbell::fifo(fd).map_err(Error::system("keeping a doorbell"))
    }

    /// Shows that this process is alive, as long as the descriptor is kept. Only for who has the role's lock.
    fn hold(&self, name: &str) -> Result<Descriptor> {
        let life = self.place.open_alone(name, FileType::Fifo, OFlags::RDONLY);
        failpoint("life: held");
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
        self.place.open_mapped(name, bytes, writable)
    }
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

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// How long an opener waits for a role without a deadline. A process that was killed keeps its locks until the kernel
/// has ended it, and its successor may be started before that. A guess.
const ROLE_TIMEOUT: Duration = Duration::from_millis(200);

/// Repeats `attempt` until it finds something, or reports that waiting is useless: until the deadline, but for at least
/// [`ROLE_TIMEOUT`]. A wait for a lock has no deadline, so this polls, at first once a millisecond and later every ten.
fn waiting_a_moment<T>(
    deadline: Option<Instant>,
    mut attempt: impl FnMut() -> Result<(Option<T>, bool)>,
) -> Result<Option<T>> {
    let soon = Instant::now() + ROLE_TIMEOUT;
    let deadline = deadline.map_or(soon, |deadline| deadline.max(soon));
    loop {
        let (found, may_help) = attempt()?;
        let now = Instant::now();
        if found.is_some() || !may_help || now >= deadline {
            return Ok(found);
        }
        let interval = if now < soon { Duration::from_millis(1) } else { Duration::from_millis(10) };
        std::thread::sleep(interval.min(deadline - now));
    }
}

#[cfg(test)]
mod tests;
