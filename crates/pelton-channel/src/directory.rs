//! A path channel's directory: its files, their permitted owners, and the holders of its roles.
//!
//! Invariants:
//! - A channel at its path is complete: it is created under a temporary name and renamed. A lane exists once the count
//!   of lanes includes it.
//! - The code uses no value of a file before it has checked it, and it uses the copy that it checked.
//! - A role is a lock on an open file description that no other process shares. So the role ends with its holder's
//!   process, even if a forked child lives on.
//! - Files that do not belong to the channel are never removed.
//!
//! The kernel synchronises. The rename publishes the channel; the store of `lanes`, under the growth lock, publishes a
//! lane; a lock claims a role. A liveness handle is a FIFO that the role's holder keeps open for reading: its close
//! notifies every process that polls the other end.
//!
//! This file claims and checks roles. `directory/files.rs` checks the files, `pages.rs` reads their contents,
//! `making.rs` creates a channel.

mod broadcast;
mod files;
mod making;
mod pages;

use crate::error::{Error, Result};
use crate::opening::{Waiter, in_call};
use crate::settings::HANDSHAKE_TIMEOUT;
pub(crate) use broadcast::{HoldLimit, PublisherRole, SubscriberRole, table_of};
use files::{
    CONSUMER, ChannelDir, DATA, DOORBELL_FILE, Known, LIVENESS_FILE, PRODUCER, PUBLISHER, RECEIVER,
    RECEIVER_DOORBELL_FILE, RECEIVER_LIVENESS_FILE, TABLE, descriptor, first_few, known, of_lane, remove_known,
};
use making::{ParentDir, make};
use pages::{
    CHANNEL, DAMAGED, Header, LANES_AT, RECOVERED_BYTES, array_at, boot_id, check_preamble, check_preamble_of, u32_at,
    u64_at,
};
use pelton_lane::{
    CursorTable, MAGIC_BROADCAST, MAGIC_CONSUMER, MAGIC_PRODUCER, MAGIC_RECEIVER, Preamble, ProducerPage,
    SEGMENT_BYTES, broadcast_preamble, failpoint,
};
use pelton_os::lock::{self, Lock};
use pelton_os::{Descriptor, Doorbell, Segment, write_at};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use std::ffi::OsString;
use std::fs::File;
use std::mem::offset_of;
use std::os::fd::AsFd;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Offsets of the writer's pid in its page (spec/layout.md). Only error messages use it.
const PRODUCER_PID_AT: u64 = 388;
const CONSUMER_PID_AT: u64 = 260;

/// The owners and the permission bits that this side accepts.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    /// Users besides this process's own.
    pub(crate) uids: Vec<u32>,
    /// The widest permission bits of an existing directory; the permission bits of a new one.
    pub(crate) mode: u32,
}

/// An open channel.
#[derive(Debug)]
pub(crate) struct Directory {
    dir: ChannelDir,
    header: Header,
    page: Segment,
    is_from_this_boot: bool,
}

/// The receiver's role and its files. The role lasts as long as `lock`.
#[derive(Debug)]
pub(crate) struct ReceiverRole {
    pub(crate) lock: Lock,
    /// Writable.
    pub(crate) page: Segment,
    pub(crate) doorbell: Doorbell,
    pub(crate) liveness: Descriptor,
}

/// A sender's role and the files of its lane. The role lasts as long as `lock`.
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
    /// Rung by the receiver.
    pub(crate) doorbell: Doorbell,
    pub(crate) receiver_doorbell: Doorbell,
    pub(crate) liveness: Descriptor,
}

/// The files of a lane as the receiver maps them.
#[derive(Debug)]
pub(crate) struct LaneForReceiver {
    pub(crate) producer: Segment,
    pub(crate) data: Segment,
    /// Writable.
    pub(crate) consumer: Segment,
    /// Rung by this receiver; wakes the sender.
    pub(crate) doorbell: Doorbell,
}

/// A lane whose files are mapped read-only.
#[derive(Debug)]
pub(crate) struct ReadOnlyLane {
    pub(crate) producer: Segment,
    pub(crate) consumer: Segment,
    pub(crate) data: Segment,
}

/// The files of a channel, open for reading and not mapped: for an observer without a role.
#[derive(Debug)]
pub(crate) struct Unmapped {
    pub(crate) path: PathBuf,
    pub(crate) is_from_this_boot: bool,
    pub(crate) channel: File,
    pub(crate) sides: UnmappedSides,
}

/// The files of the sides of a channel, open for reading and not mapped.
#[derive(Debug)]
pub(crate) enum UnmappedSides {
    Channel {
        /// Its lock is the receiver's role.
        receiver: File,
        lanes: Vec<UnmappedLane>,
    },
    Broadcast {
        /// Its lock is the publisher's role.
        publisher: File,
        /// The lock of a byte is the role of the subscriber in that slot.
        table: File,
    },
}

/// The files of a lane, open for reading and not mapped.
#[derive(Debug)]
pub(crate) struct UnmappedLane {
    /// Its lock is the sender's role.
    pub(crate) producer: File,
    pub(crate) consumer: File,
    pub(crate) data: File,
}

impl Unmapped {
    /// Opens the channel at `path`, of any owner and mode: the kernel checks the permissions of this process.
    pub(crate) fn open(path: &Path) -> Result<Unmapped> {
        use std::os::unix::fs::MetadataExt as _;
        let path = absolute(path)?;
        let none = || Error::NoChannel { path: path.display().to_string() };
        let owner = std::fs::symlink_metadata(&path).map_err(|_| none())?.uid();
        let dir = ChannelDir::open(&path, &Access { uids: vec![owner], mode: 0o777 })?.ok_or_else(none)?;
        Unmapped::of(dir)
    }

    /// The same of a directory that is open, and was found at `path`.
    pub(crate) fn open_at(path: &Path, directory: OwnedFd) -> Result<Unmapped> {
        let failed = |errno: Errno| Error::System { what: format!("opening {}", path.display()), error: errno.into() };
        let found = rustix::fs::fstat(&directory).map_err(failed)?;
        let access = Access { uids: vec![found.st_uid], mode: 0o777 };
        Unmapped::of(ChannelDir::new(path, directory, &found, &access)?)
    }

    fn of(mut dir: ChannelDir) -> Result<Unmapped> {
        let path = dir.path.clone();
        dir.bits = 0o7777;
        let open = |dir: &ChannelDir, name: &str, preamble: Option<Preamble>| -> Result<File> {
            let file = dir.open_file(name, FileType::RegularFile, OFlags::RDONLY)?;
            if let Some(wanted) = preamble {
                let bytes: [u8; size_of::<Preamble>()] = dir.read(file.as_fd(), name)?;
                let checked = check_preamble_of(&bytes, wanted);
                checked.map_err(|problem| dir.refuse(format!("its file {name} {problem}")))?;
            }
            Ok(file.into())
        };
        let channel = open(&dir, CHANNEL, None)?;
        let header = dir.read(channel.as_fd(), CHANNEL)?;
        let lanes = u32_at(&header, LANES_AT);
        let header = Header::decode(&header).map_err(|problem| dir.refuse(format!("its file {problem}")))?;
        dir.bits = header.mode & 0o666;
        if lanes == 0 || lanes > header.lanes_max {
            let most = header.lanes_max;
            return Err(dir.refuse(format!("its file channel counts {lanes} lanes, wanted 1 to {most}: {DAMAGED}")));
        }
        let lane = |number| -> Result<UnmappedLane> {
            Ok(UnmappedLane {
                producer: open(&dir, &of_lane(number, PRODUCER), Some(Preamble::new(MAGIC_PRODUCER)))?,
                consumer: open(&dir, &of_lane(number, CONSUMER), Some(Preamble::new(MAGIC_CONSUMER)))?,
                data: open(&dir, &of_lane(number, DATA), None)?,
            })
        };
        let sides = match header.is_broadcast {
            true => UnmappedSides::Broadcast {
                publisher: open(&dir, PUBLISHER, Some(broadcast_preamble(MAGIC_BROADCAST)))?,
                table: open(&dir, TABLE, Some(CursorTable::preamble()))?,
            },
            false => UnmappedSides::Channel {
                receiver: open(&dir, RECEIVER, Some(Preamble::new(MAGIC_RECEIVER)))?,
                lanes: (0..lanes).map(lane).collect::<Result<_>>()?,
            },
        };
        Ok(Unmapped { is_from_this_boot: header.boot_id == boot_id()?, channel, sides, path })
    }
}

impl Directory {
    /// Checks the channel at `path` and opens it. Returns `None` if nothing exists at the path.
    pub(crate) fn open(path: &Path, access: &Access) -> Result<Option<Directory>> {
        Directory::open_kind(path, access, false)
    }

    /// As [`Directory::open`], for a broadcast if `is_broadcast`.
    fn open_kind(path: &Path, access: &Access, is_broadcast: bool) -> Result<Option<Directory>> {
        let Some(directory) = Directory::open_any_boot(path, access)? else { return Ok(None) };
        directory.check_kind(is_broadcast)?;
        if !directory.is_from_this_boot {
            return Err(Error::Rebooted { path: directory.dir.path.display().to_string() });
        }
        Ok(Some(directory))
    }

    /// Refuses a broadcast where a channel with a receiver is wanted, and the reverse.
    pub(crate) fn check_kind(&self, is_broadcast: bool) -> Result<()> {
        match (self.header.is_broadcast, is_broadcast) {
            (true, false) => Err(self.refuse("it is a broadcast: open it as a publisher or a subscriber".to_owned())),
            (false, true) => Err(self.refuse("it is no broadcast: open it as a sender or a receiver".to_owned())),
            _ => Ok(()),
        }
    }

    /// As [`Directory::open`], but accepts a channel from before the last reboot: for recovery and inspection.
    pub(crate) fn open_any_boot(path: &Path, access: &Access) -> Result<Option<Directory>> {
        let path = absolute(path)?;
        loop {
            match Directory::open_existing(&path, access) {
                // Another process removed it meanwhile. There may be a new channel at the path, or none.
                Err(Error::NoChannel { .. }) => {}
                opened => return opened,
            }
        }
    }

    fn open_existing(path: &Path, access: &Access) -> Result<Option<Directory>> {
        let Some(mut dir) = ChannelDir::open(path, access)? else { return Ok(None) };
        // The file `channel` states the permitted bits, so it is opened before they are known.
        dir.bits = 0o7777;
        if dir.check_named(CHANNEL, FileType::RegularFile)?.is_none() {
            return Err(match dir.missing(CHANNEL) {
                Error::NotAChannel { .. } => dir.refuse(dir.problem_without_channel_file()),
                gone => gone,
            });
        }
        let page = dir.open_mapped(CHANNEL, SEGMENT_BYTES, false)?;
        let header = dir.read(page.as_fd(), CHANNEL)?;
        let header = Header::decode(&header).map_err(|problem| dir.refuse(format!("its file {problem}")))?;
        if header.mode & !access.mode != 0 {
            return Err(dir.refuse(format!(
                "it was made with mode {:o}, this side permits at most {:o}: allow more in the options",
                header.mode, access.mode
            )));
        }
        dir.bits = header.mode & 0o666;
        let found = rustix::fs::fstat(&page).map_err(|errno| dir.failed("checking", CHANNEL, 0, errno))?;
        dir.check(CHANNEL, FileType::RegularFile, &found)?;
        let is_from_this_boot = header.boot_id == boot_id()?;
        let directory = Directory { dir, header, page, is_from_this_boot };
        directory.lanes()?;
        Ok(Some(directory))
    }

    /// Creates the channel. Opens an existing one, whatever its sizes.
    pub(crate) fn create(
        path: &Path,
        access: &Access,
        capacity: u64,
        message_bytes_max: u64,
        lanes_max: u32,
        is_traced: bool,
    ) -> Result<Directory> {
        let (mode, boot_id) = (access.mode, boot_id()?);
        let header = Header { capacity, message_bytes_max, lanes_max, mode, boot_id, is_traced, is_broadcast: false };
        Directory::create_by(path, access, &header)
    }

    fn create_by(path: &Path, access: &Access, header: &Header) -> Result<Directory> {
        header.check_wanted()?;
        let path = absolute(path)?;
        loop {
            if let Some(directory) = Directory::open_kind(&path, access, header.is_broadcast)? {
                return Ok(directory);
            }
            let parent = ParentDir::open(&path)?;
            parent.sweep();
            // The next round opens the channel, and checks it, whether this process or another one has created it.
            make(&parent, &path, access, header)?;
        }
    }

    /// The absolute path of the directory.
    pub(crate) fn path(&self) -> &Path {
        &self.dir.path
    }

    /// Bytes of data of each lane.
    pub(crate) fn capacity(&self) -> u64 {
        self.header.capacity
    }

    /// The boot in which it was created or recovered.
    pub(crate) fn boot_id(&self) -> [u8; 16] {
        self.header.boot_id
    }

    /// Whether its messages may carry a traceparent.
    pub(crate) fn is_traced(&self) -> bool {
        self.header.is_traced
    }

    /// The largest message, in bytes.
    pub(crate) fn message_bytes_max(&self) -> u64 {
        self.header.message_bytes_max
    }

    /// The most lanes.
    pub(crate) fn lanes_max(&self) -> u32 {
        self.header.lanes_max
    }

    /// Whether it was created, or recovered, since the machine last started.
    pub(crate) fn is_from_this_boot(&self) -> bool {
        self.is_from_this_boot
    }

    /// The number of lanes at present.
    pub(crate) fn lanes(&self) -> Result<u32> {
        // Relaxed: every use of a lane opens its files first, and the kernel orders that after the count.
        let lanes = self.page.word(LANES_AT).load(Ordering::Relaxed);
        if lanes == 0 || lanes > self.header.lanes_max {
            let most = self.header.lanes_max;
            return Err(self.refuse(format!("its file channel counts {lanes} lanes, wanted 1 to {most}: {DAMAGED}")));
        }
        Ok(lanes)
    }

    /// Claims the role of the receiver.
    ///
    /// # Errors
    /// [`Error::RoleTaken`], and the errors of the checks.
    pub(crate) fn claim_receiver(&self) -> Result<ReceiverRole> {
        in_call(self.claim_receiver_until(None, &Waiter::Thread))
    }

    /// As [`Directory::claim_receiver`]. Waits for the role until `deadline`.
    ///
    /// # Errors
    /// As [`Directory::claim_receiver`].
    pub(crate) async fn claim_receiver_until(
        &self,
        deadline: Option<Instant>,
        waiter: &Waiter,
    ) -> Result<ReceiverRole> {
        let lock = retry_until(deadline, waiter, || Ok((self.try_role(RECEIVER)?, true))).await?;
        let Some(lock) = lock else { return Err(self.receiver_taken()) };
        Ok(ReceiverRole {
            lock,
            page: self.control(RECEIVER, MAGIC_RECEIVER, true)?,
            doorbell: self.doorbell(RECEIVER_DOORBELL_FILE)?,
            liveness: self.open_liveness(RECEIVER_LIVENESS_FILE)?,
        })
    }

    /// Claims the role of a sender: of the first lane without one, otherwise of a new lane.
    ///
    /// # Errors
    /// [`Error::RoleTaken`] if every lane has a sender and the channel has its maximum of lanes; [`Error::NoSpace`];
    /// the errors of the checks.
    #[cfg(test)]
    pub(crate) fn claim_sender(&self) -> Result<SenderRole> {
        in_call(self.claim_sender_until(None, &Waiter::Thread))
    }

    /// As [`Directory::claim_sender`]. Waits for a lane until `deadline`.
    ///
    /// # Errors
    /// As [`Directory::claim_sender`].
    pub(crate) async fn claim_sender_until(&self, deadline: Option<Instant>, waiter: &Waiter) -> Result<SenderRole> {
        let attempt = || Ok((self.claim_free_lane()?, self.lanes()? == self.header.lanes_max));
        let free = retry_until(deadline, waiter, attempt).await?;
        if let Some(role) = free {
            return Ok(role);
        }
        if self.lanes()? < self.header.lanes_max {
            let growth = match waiter {
                Waiter::Thread => self.lock_growth()?,
                Waiter::Loop(_) => self.growth_in_loop(deadline, waiter).await?,
            };
            // While this process waited for the lock, others may have added lanes, and released some.
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

    /// Claims the role of the sender of lane `number`.
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

    /// Creates lane `number`, the next one, for this process. The caller holds the growth lock.
    fn add_lane(&self, growth: &Lock, number: u32) -> Result<SenderRole> {
        // A process that died here has left files. No process can be using them: they were never counted.
        self.dir.remove_lane(number)?;
        let add = || {
            self.dir.make_lane(number, &self.header)?;
            // Claims the role before it counts the lane: otherwise another process could claim it first.
            let lock = self.try_role(&of_lane(number, PRODUCER))?;
            let lock =
                lock.ok_or_else(|| self.refuse(format!("somebody has locked its new lane {number}: see lsof")))?;
            let role = self.sender(number, lock)?;
            write_at(growth.as_fd(), &(number + 1).to_le_bytes(), LANES_AT as u64)
                .map_err(|errno| self.dir.failed("counting lanes in", CHANNEL, 4, errno))?;
            failpoint("growth: counted");
            Ok(role)
        };
        add().inspect_err(|_| {
            let _ = self.dir.remove_lane(number);
        })
    }

    /// Maps and opens the files of a sender's lane. `lock` is its role.
    fn sender(&self, number: u32, lock: Lock) -> Result<SenderRole> {
        Ok(SenderRole {
            number,
            lock,
            page: self.producer(number, true)?,
            data: self.data(number, true)?,
            consumer: self.control(&of_lane(number, CONSUMER), MAGIC_CONSUMER, false)?,
            receiver: self.control(RECEIVER, MAGIC_RECEIVER, false)?.without_descriptor(),
            doorbell: self.doorbell(&of_lane(number, DOORBELL_FILE))?,
            receiver_doorbell: self.doorbell(RECEIVER_DOORBELL_FILE)?,
            liveness: self.open_liveness(&of_lane(number, LIVENESS_FILE))?,
        })
    }

    /// Maps the files of lane `number` for the receiver. The caller has that role.
    pub(crate) fn lane_for_receiver(&self, number: u32) -> Result<LaneForReceiver> {
        self.check_number(number)?;
        Ok(LaneForReceiver {
            // Only reads: a receiver of many lanes saves their descriptors.
            producer: self.producer(number, false)?.without_descriptor(),
            data: self.data(number, false)?.without_descriptor(),
            consumer: self.control(&of_lane(number, CONSUMER), MAGIC_CONSUMER, true)?,
            doorbell: self.doorbell(&of_lane(number, DOORBELL_FILE))?,
        })
    }

    /// Maps lane `number` read-only, without a role.
    pub(crate) fn lane_read_only(&self, number: u32) -> Result<ReadOnlyLane> {
        self.check_number(number)?;
        Ok(ReadOnlyLane {
            producer: self.producer(number, false)?,
            consumer: self.control(&of_lane(number, CONSUMER), MAGIC_CONSUMER, false)?,
            data: self.data(number, false)?,
        })
    }

    /// Opens the receiver's liveness handle for polling. `poll` reports an error on it after that receiver has gone,
    /// until a successor opens it. Returns `None` without a receiver.
    pub(crate) fn watch_receiver(&self) -> Result<Option<Descriptor>> {
        self.watch(RECEIVER_LIVENESS_FILE)
    }

    /// As [`Directory::watch_receiver`], for the sender of lane `number`.
    pub(crate) fn watch_sender(&self, number: u32) -> Result<Option<Descriptor>> {
        self.check_number(number)?;
        self.watch(&of_lane(number, LIVENESS_FILE))
    }

    /// Marks the channel as valid in this boot: first the pages of its lanes, then its own. The caller has the role of
    /// every lane.
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

    /// The permission bits of the directory.
    pub(crate) fn mode(&self) -> u32 {
        self.header.mode
    }

    /// The uid of the directory's owner.
    pub(crate) fn owner(&self) -> u32 {
        self.dir.uid
    }

    /// Waits until its files and their directory entries are durable.
    pub(crate) fn sync(&self) -> Result<()> {
        let failed = |name: &'static str| move |errno| self.failed("syncing", name, errno);
        for name in [CHANNEL, RECEIVER] {
            let fd = self.dir.open_file(name, FileType::RegularFile, OFlags::RDONLY)?;
            rustix::fs::fsync(&fd).map_err(failed(name))?;
        }
        let parent = ParentDir::open(&self.dir.path)?;
        for fd in [self.dir.fd.as_fd(), parent.fd.as_fd()] {
            // Both descriptors were opened for names only, and such a one cannot be synced.
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let readable = rustix::fs::openat(fd, ".", flags, Mode::empty()).map_err(failed(""))?;
            rustix::fs::fsync(readable).map_err(failed(""))?;
        }
        Ok(())
    }

    /// Whether there is a receiver. Claims nothing.
    pub(crate) fn is_receiver_held(&self) -> Result<bool> {
        self.is_held(RECEIVER)
    }

    /// Whether lane `number` has a sender. Claims nothing.
    pub(crate) fn is_sender_held(&self, number: u32) -> Result<bool> {
        self.check_number(number)?;
        self.is_held(&of_lane(number, PRODUCER))
    }

    /// Removes the channel, if no process uses it and the directory contains only its files.
    ///
    /// # Errors
    /// [`Error::RoleTaken`]; [`Error::NotAChannel`] with the foreign files. Nothing has been removed then.
    pub(crate) fn remove(self) -> Result<()> {
        let _growth = self.lock_growth()?;
        let lanes = self.lanes()?;
        // No process adds a file while this one holds the growth lock. Reads the names now, because that needs a
        // descriptor: after the rename it is too late to fail.
        let names = self.dir.names()?;
        let is_broadcast = self.header.is_broadcast;
        let foreign = names.iter().filter(|name| match known(name, is_broadcast) {
            // A directory cannot be unlinked. Detects it before any file is removed.
            _ if self.dir.is_directory(name) => true,
            Known::Channel => false,
            // A sender that died while it added a lane left files of the first uncounted one.
            Known::Lane(number) => number > lanes && !is_broadcast,
            Known::Foreign => true,
        });
        let foreign: Vec<String> = foreign.map(|name| format!("{name:?}")).collect();
        if !foreign.is_empty() {
            let problem = format!("{} in it is not of the channel: move that away first", first_few(&foreign));
            return Err(self.refuse(problem));
        }
        if is_broadcast {
            let roles = self.broadcast_roles()?;
            return self.remove_files(names, roles);
        }
        let mut roles = Vec::new();
        let senders = (0..lanes).map(|number| (Some(number), of_lane(number, PRODUCER)));
        for (number, name) in [(None, RECEIVER.to_owned())].into_iter().chain(senders) {
            // A damaged channel may lack the file; then no process has the role.
            if self.dir.check_named(&name, FileType::RegularFile)?.is_none() {
                continue;
            }
            match (self.try_role(&name)?, number) {
                (Some(role), _) => roles.push(role),
                (None, None) => return Err(self.receiver_taken()),
                (None, Some(number)) => return Err(self.taken("sender".to_owned(), self.sender_pid(number))),
            }
        }
        self.remove_files(names, roles)
    }

    /// Removes the channel's directory. The caller has the growth lock and all roles.
    fn remove_files(&self, names: Vec<OsString>, _roles: Vec<Lock>) -> Result<()> {
        let path = &self.dir.path;
        let parent = ParentDir::open(path)?;
        if !self.dir.is_at(path)? {
            return Err(Error::NoChannel { path: path.display().to_string() });
        }
        // Renames it first, so that the path always has a complete channel or none. The temporary name is one as for
        // creation: if this process dies, a later creator removes the rest.
        let temporary = loop {
            let temporary = parent.temporary_name();
            match rustix::fs::renameat_with(&parent.fd, &parent.name, &parent.fd, &temporary, RenameFlags::NOREPLACE) {
                Err(Errno::EXIST) => {}
                done => break done.map(|()| temporary).map_err(|errno| self.failed("renaming", "", errno))?,
            }
        };
        failpoint("removal: renamed");
        let cleared = remove_known(self.dir.fd.as_fd(), names);
        cleared.map_err(|errno| self.failed("removing the files of", "", errno))?;
        let removed = rustix::fs::unlinkat(&parent.fd, &temporary, AtFlags::REMOVEDIR);
        failpoint("removal: directory removed");
        match removed {
            // A creator that removes leftovers has just removed it.
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => {
                let left = path.with_file_name(temporary);
                Err(Error::System { what: format!("removing {}", left.display()), error: errno.into() })
            }
        }
    }

    fn refuse(&self, problem: String) -> Error {
        self.dir.refuse(problem)
    }

    fn failed(&self, doing: &str, name: &str, errno: Errno) -> Error {
        self.dir.failed(doing, name, 0, errno)
    }

    /// The error for `bytes` of a lane's data that the file system does not allocate.
    pub(crate) fn cannot_allocate(&self, number: u32, bytes: u64, source: std::io::Error) -> Error {
        let errno = Errno::from_io_error(&source).unwrap_or(Errno::IO);
        self.dir.failed("allocating", &of_lane(number, DATA), bytes, errno)
    }

    fn check_number(&self, number: u32) -> Result<()> {
        let lanes = self.lanes()?;
        if number < lanes {
            return Ok(());
        }
        Err(self.refuse(format!("it has {lanes} lanes, wanted number {number}: wait until a sender adds it")))
    }

    /// Opens the file and locks it, through an open file description that nothing else uses. Returns `None` while
    /// another process has the lock.
    fn try_role(&self, name: &str) -> Result<Option<Lock>> {
        let fd = self.dir.open_unshared(name, FileType::RegularFile, OFlags::RDWR)?;
        let taken = lock::try_lock(fd).map_err(|error| self.cannot_lock(name, error))?;
        failpoint("role: locked, or not");
        taken.map(|lock| self.check_not_removed(lock, name)).transpose()
    }

    /// Waits for the lock that a process needs to add a lane or to remove the channel. A holder keeps it while it
    /// creates five files, or removes all.
    fn lock_growth(&self) -> Result<Lock> {
        let fd = self.dir.open_unshared(CHANNEL, FileType::RegularFile, OFlags::RDWR)?;
        let lock = lock::lock(fd).map_err(|error| self.cannot_lock(CHANNEL, error))?;
        failpoint("growth: locked");
        self.check_not_removed(lock, CHANNEL)
    }

    /// As [`Directory::lock_growth`], for an event loop. A stopped process may hold the lock, so this waits no longer
    /// than until `deadline`, or, without one, as long as a handshake may take.
    async fn growth_in_loop(&self, deadline: Option<Instant>, waiter: &Waiter) -> Result<Lock> {
        let deadline = deadline.unwrap_or_else(|| Instant::now() + HANDSHAKE_TIMEOUT);
        loop {
            if let Some(lock) = self.try_role(CHANNEL)? {
                return Ok(lock);
            }
            if Instant::now() >= deadline {
                let path = self.dir.path.display();
                return Err(Error::TimedOut(format!(
                    "waiting for a process that adds a lane to {path}, or removes it"
                )));
            }
            waiter.pause(Instant::now() + Duration::from_millis(1)).await?;
        }
    }

    fn cannot_lock(&self, name: &str, source: std::io::Error) -> Error {
        Error::System { what: format!("locking {}", self.dir.file(name).display()), error: source }
    }

    /// Fails if the locked file was removed. A remover holds all locks, so a later lock is one of a removed file.
    fn check_not_removed(&self, lock: Lock, name: &str) -> Result<Lock> {
        let found = rustix::fs::fstat(&lock).map_err(|errno| self.failed("checking", name, errno))?;
        if found.st_nlink == 0 {
            return Err(Error::NoChannel { path: self.dir.path.display().to_string() });
        }
        Ok(lock)
    }

    fn is_held(&self, name: &str) -> Result<bool> {
        let fd = self.dir.open_file(name, FileType::RegularFile, OFlags::RDONLY)?;
        lock::is_locked(fd.as_fd()).map_err(|error| self.cannot_lock(name, error))
    }

    fn taken(&self, role: String, pid: u32) -> Error {
        Error::RoleTaken { role, path: self.dir.path.display().to_string(), pid }
    }

    fn receiver_taken(&self) -> Error {
        // The receiver's own page has no field for the pid. The consumer page of the first lane has one, and the
        // receiver writes that page too.
        self.taken("receiver".to_owned(), self.pid(&of_lane(0, CONSUMER), CONSUMER_PID_AT))
    }

    fn senders_taken(&self) -> Result<Error> {
        let lanes = self.lanes()?;
        let pids: Vec<u32> = (0..lanes).map(|number| self.sender_pid(number)).collect();
        let role = match pids.len() {
            1 => "sender".to_owned(),
            lanes => {
                let known: Vec<String> = pids.iter().filter(|pid| **pid != 0).map(u32::to_string).collect();
                format!("sender on all {lanes} lanes (processes {})", first_few(&known))
            }
        };
        Ok(self.taken(role, pids[0]))
    }

    fn sender_pid(&self, number: u32) -> u32 {
        self.pid(&of_lane(number, PRODUCER), PRODUCER_PID_AT)
    }

    /// The pid that the writer of a page has stored; 0 if it cannot be read. Only error messages use it.
    fn pid(&self, name: &str, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        let file = self.dir.open_file(name, FileType::RegularFile, OFlags::RDONLY);
        let read = file.map(|fd| rustix::io::pread(fd, &mut bytes, offset));
        if matches!(read, Ok(Ok(4))) { u32::from_le_bytes(bytes) } else { 0 }
    }

    fn doorbell(&self, name: &str) -> Result<Doorbell> {
        let fd = self.dir.open_file(name, FileType::Fifo, OFlags::RDWR)?;
        Doorbell::fifo(fd).map_err(Error::system("keeping a doorbell"))
    }

    /// Opens the liveness handle of a role: this process proves by it that it lives. The caller has the role's lock.
    fn open_liveness(&self, name: &str) -> Result<Descriptor> {
        let liveness = self.dir.open_unshared(name, FileType::Fifo, OFlags::RDONLY);
        failpoint("life: held");
        liveness
    }

    fn watch(&self, name: &str) -> Result<Option<Descriptor>> {
        self.dir.try_open_file(name, FileType::Fifo, OFlags::WRONLY)?.map(descriptor).transpose()
    }

    fn data(&self, number: u32, writable: bool) -> Result<Segment> {
        self.segment(&of_lane(number, DATA), self.header.capacity, writable)
    }

    /// Maps a control page and checks its preamble.
    fn control(&self, name: &str, magic: u64, writable: bool) -> Result<Segment> {
        let segment = self.segment(name, SEGMENT_BYTES, writable)?;
        let bytes: [u8; size_of::<Preamble>()] = self.dir.read(segment.as_fd(), name)?;
        check_preamble(&bytes, magic).map_err(|problem| self.refuse(format!("its file {name} {problem}")))?;
        Ok(segment)
    }

    /// Maps a producer's page and checks that it agrees with the channel's.
    fn producer(&self, number: u32, writable: bool) -> Result<Segment> {
        let name = of_lane(number, PRODUCER);
        let segment = self.control(&name, MAGIC_PRODUCER, writable)?;
        let bytes: [u8; 128] = self.dir.read(segment.as_fd(), &name)?;
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
        // A channel of another boot may have pages of any boot: a recovery writes the lanes' pages before the
        // channel's, and may have been interrupted.
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
        self.dir.open_mapped(name, bytes, writable)
    }
}

/// The absolute path, whose last component is a name. So the handle keeps its channel if the process changes its
/// working directory.
fn absolute(path: &Path) -> Result<PathBuf> {
    let refuse = |problem: String| Error::NotAChannel { path: path.display().to_string(), problem };
    let absolute = std::path::absolute(path)
        .map_err(|error| refuse(format!("it is no path ({error}): name a directory")))?
        // Without a slash at the end: with it the kernel would follow a symbolic link.
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

/// Repeats `attempt` until it finds something, or reports that waiting is useless: until the deadline, once if that has
/// passed, and without one for [`ROLE_TIMEOUT`]. A wait for a lock has no deadline, so this polls, at first once a
/// millisecond and later every ten.
async fn retry_until<T>(
    deadline: Option<Instant>,
    waiter: &Waiter,
    mut attempt: impl FnMut() -> Result<(Option<T>, bool)>,
) -> Result<Option<T>> {
    let soon = Instant::now() + ROLE_TIMEOUT;
    let deadline = deadline.unwrap_or(soon);
    loop {
        let (found, may_help) = attempt()?;
        let now = Instant::now();
        if found.is_some() || !may_help || now >= deadline {
            return Ok(found);
        }
        let interval = if now < soon { Duration::from_millis(1) } else { Duration::from_millis(10) };
        waiter.pause(deadline.min(now + interval)).await?;
    }
}

#[cfg(test)]
mod tests;
