//! The files of a broadcast in a directory, and the roles of its publisher and its subscribers.
//!
//! - The publisher's role is the lock of the file `publisher`. A subscriber's is the lock of a byte of the file
//!   `cursors`, one for each slot.
//! - A slot is assigned by its lock alone. Only a process that has the growth lock names one, so a durable name has one
//!   slot.

use super::files::{
    ChannelDir, DATA, DOORBELL_FILE, LIVENESS_FILE, PUBLISHER, PUBLISHER_DOORBELL_FILE, PUBLISHER_LIVENESS_FILE, TABLE,
    of_lane,
};
use super::pages::{DAMAGED, Header, boot_id, bytes_of, check_preamble_of, u32_at, u64_at};
use super::{Access, CHANNEL, Directory, PRODUCER_PID_AT, retry_until};
use crate::error::{Error, Result, process};
use crate::opening::{Waiter, in_call};
use pelton_lane::{
    BroadcastPage, CURSORS_MAX, CursorTable, LaneError, MAGIC_BROADCAST, Policy, Preamble, ProducerPage, SEGMENT_BYTES,
    TableSlot, broadcast_preamble, failpoint,
};
use pelton_os::lock::{self, Lock};
use pelton_os::{Descriptor, Doorbell, Segment, allocate, own_uid};
use rustix::fs::{AtFlags, FileType, OFlags};
use rustix::io::Errno;
use std::mem::offset_of;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The publisher's role and its files. The role lasts as long as `lock`.
#[derive(Debug)]
pub(crate) struct PublisherRole {
    /// Dropped before the lock.
    pub(crate) limit: HoldLimit,
    pub(crate) lock: Lock,
    /// Writable, as are the next two.
    pub(crate) page: Segment,
    pub(crate) data: Segment,
    pub(crate) table: Arc<Segment>,
    pub(crate) doorbell: Doorbell,
    pub(crate) liveness: Descriptor,
}

/// The limit of a publisher that begins. Unless it is kept, its drop stores the former one. The publisher's role lasts
/// longer.
#[derive(Debug)]
pub(crate) struct HoldLimit {
    table: Arc<Segment>,
    former_ns: Option<u64>,
}

impl HoldLimit {
    /// The publisher has begun.
    pub(crate) fn keep(&mut self) {
        self.former_ns = None;
    }
}

impl Drop for HoldLimit {
    fn drop(&mut self) {
        if let Some(former_ns) = self.former_ns {
            table_of(&self.table).limit_holds(former_ns);
        }
    }
}

/// A subscriber's role and its files. The role lasts as long as `lock`.
#[derive(Debug)]
pub(crate) struct SubscriberRole {
    pub(crate) slot: u32,
    pub(crate) lock: Lock,
    pub(crate) page: Segment,
    pub(crate) data: Segment,
    /// Writable.
    pub(crate) table: Segment,
    pub(crate) doorbell: Doorbell,
    pub(crate) publisher_doorbell: Doorbell,
    pub(crate) liveness: Descriptor,
}

/// A slot of the table, its words, and whether a process has its lock.
pub(crate) type FoundSlot = (u32, TableSlot, bool);

/// The table that a segment maps.
pub(crate) fn table_of(segment: &Segment) -> &CursorTable {
    // SAFETY: the segment maps the bytes of a table, for as long as it lives. All its words are atomic, but for the
    // preamble, which was written before it was shared.
    unsafe { segment.base().cast::<CursorTable>().as_ref() }
}

impl ChannelDir {
    /// Creates all files of a broadcast except `channel`.
    pub(super) fn make_broadcast(&self, header: &Header) -> Result<()> {
        let mut page = BroadcastPage::new(header.capacity, header.message_bytes_max, 0, 0);
        page.producer.boot_id = header.boot_id;
        self.make_file(PUBLISHER, SEGMENT_BYTES, &bytes_of(page))?;
        let table = self.make_file(TABLE, CursorTable::BYTES as u64, &CursorTable::first_bytes())?;
        // The entries too. A subscriber allocates its cursor before it first writes there.
        let bytes = CursorTable::CURSORS_AT as u64;
        let errno = |error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
        allocate(&table, 0, bytes).map_err(|error| self.failed("allocating", TABLE, bytes, errno(error)))?;
        self.make_data(DATA, header)?;
        self.make_fifo(PUBLISHER_DOORBELL_FILE)?;
        self.make_fifo(PUBLISHER_LIVENESS_FILE)
    }

    /// Creates a slot's FIFO, unless it exists. The caller has the slot's lock.
    fn ensure_fifo(&self, name: &str) -> Result<()> {
        match rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => self.make_fifo(name),
            // A process died while it made it.
            Ok(found)
                if found.st_uid == own_uid()
                    && FileType::from_raw_mode(found.st_mode) == FileType::Fifo
                    && found.st_mode & 0o777 != self.bits =>
            {
                self.open_up_fifo(name)
            }
            _ => Ok(()),
        }
    }
}

impl Directory {
    /// Creates the broadcast. Opens an existing one, whatever its sizes.
    pub(crate) fn create_broadcast(
        path: &Path,
        access: &Access,
        capacity: u64,
        message_bytes_max: u64,
    ) -> Result<Directory> {
        let (mode, boot_id) = (access.mode, boot_id()?);
        let header =
            Header { capacity, message_bytes_max, lanes_max: 1, mode, boot_id, is_traced: false, is_broadcast: true };
        Directory::create_by(path, access, &header)
    }

    /// Checks the broadcast at `path` and opens it. Returns `None` if nothing exists at the path.
    pub(crate) fn open_broadcast(path: &Path, access: &Access) -> Result<Option<Directory>> {
        Directory::open_kind(path, access, true)
    }

    /// Claims the role of the publisher, and limits how long a subscriber may hold it up; `u64::MAX`: without a limit.
    /// Waits until `deadline` for the role, and for subscribers beyond the limit to leave. A killed one does that once
    /// the kernel has ended it.
    ///
    /// # Errors
    /// [`Error::RoleTaken`]; [`Error::Refused`] if there is a subscriber beyond the limit; the errors of the checks.
    pub(crate) async fn claim_publisher_until(
        &self,
        hold_max_ns: u64,
        deadline: Option<Instant>,
        waiter: &Waiter,
    ) -> Result<PublisherRole> {
        let table = Arc::new(self.table(true)?);
        let mut refusal = None;
        // It has the role during an attempt only: another publisher may admit what this one does not.
        let attempt = || {
            refusal = None;
            let Some(lock) = self.try_role(PUBLISHER)? else { return Ok((None, true)) };
            match self.limit_holds(&table, hold_max_ns) {
                Ok(limit) => return Ok((Some((lock, limit)), true)),
                Err(error @ Error::Refused(_)) => refusal = Some(error),
                Err(error) => return Err(error),
            }
            Ok((None, true))
        };
        let claimed = retry_until(deadline, waiter, attempt).await?;
        let Some((lock, limit)) = claimed else { return Err(refusal.unwrap_or_else(|| self.publisher_taken())) };
        Ok(PublisherRole {
            limit,
            lock,
            page: self.publisher_page(true)?,
            data: self.segment(DATA, self.header.capacity, true)?,
            table,
            doorbell: self.doorbell(PUBLISHER_DOORBELL_FILE)?,
            liveness: self.open_liveness(PUBLISHER_LIVENESS_FILE)?,
        })
    }

    /// Limits how long a subscriber may hold the publisher up; `u64::MAX`: without a limit. The caller has the
    /// publisher's role. The error, if there is a subscriber beyond the limit: nothing has changed then.
    fn limit_holds(&self, table: &Arc<Segment>, hold_max_ns: u64) -> Result<HoldLimit> {
        // First without a store: subscribers must not find the limit of a publisher that does not begin.
        self.check_holds(table, hold_max_ns)?;
        let former_ns = Some(table_of(table).hold_max_ns());
        let limit = HoldLimit { table: table.clone(), former_ns };
        table_of(table).limit_holds(hold_max_ns);
        self.check_holds(table, hold_max_ns)?;
        Ok(limit)
    }

    fn check_holds(&self, segment: &Segment, hold_max_ns: u64) -> Result<()> {
        let (table, path, most) = (table_of(segment), self.dir.path.display(), Duration::from_nanos(hold_max_ns));
        for slot in table.longer_holders(hold_max_ns) {
            // The lock first: once it is free, what its process has stored is visible.
            let (is_held, name) = (self.is_slot_held(segment, slot)?, table.slot(slot).durable().map(str::to_owned));
            let user = if is_held { process(table.cursor(slot).pid()) } else { "no process".to_owned() };
            match name {
                Some(name) if is_held || table.has_begun(slot) => {
                    return Err(Error::Refused(format!(
                        "the durable subscription {name:?} of {path}, which {user} uses, may hold the publisher up for longer than {most:?}: raise hold_max, or continue the subscription by lag, or with a lag_after of at most {most:?}, or remove it (`pelton rm {path} --durable {name}`)"
                    )));
                }
                None if is_held => {
                    return Err(Error::Refused(format!(
                        "a subscriber of {path}, {user}, may hold the publisher up for longer than {most:?}: raise hold_max, or end it"
                    )));
                }
                // It is dead, and the publisher will remove it.
                _ => {}
            }
        }
        Ok(())
    }

    /// Claims a slot: that of the durable name, or any other. Waits for it until `deadline`.
    ///
    /// # Errors
    /// [`Error::RoleTaken`] if another process uses the name; [`Error::Refused`] without a free slot, or if the
    /// publisher does not admit the policy; the errors of the checks.
    pub(crate) async fn claim_subscriber_until(
        &self,
        durable: Option<&str>,
        policy: Policy,
        deadline: Option<Instant>,
        waiter: &Waiter,
    ) -> Result<SubscriberRole> {
        let table = self.table(true)?;
        let mut is_growing = false;
        let attempt = || {
            // Before any store. It may come while this waits.
            policy.check_hold(table_of(&table).hold_max_ns()).map_err(|refused| self.refuse_hold(refused))?;
            let Some(name) = durable else { return Ok((self.claim_free_slot(table_of(&table))?, true)) };
            // Not by a wait for the lock, because a stopped process may hold it, and this may run in an event loop.
            let growth = self.try_role(CHANNEL)?;
            is_growing = growth.is_none();
            let found = if is_growing { None } else { self.claim_durable(table_of(&table), name)? };
            Ok((found, true))
        };
        let Some((slot, lock)) = retry_until(deadline, waiter, attempt).await? else {
            if is_growing {
                return Err(self.names_are_locked());
            }
            return Err(match durable.and_then(|name| self.durable_slot(table_of(&table), name)) {
                Some(slot) => self.slot_taken(table_of(&table), slot),
                None => Error::Refused(format!(
                    "{} has {CURSORS_MAX} subscribers and durable subscriptions, as many as a lane takes: close one, or remove one",
                    self.dir.path.display()
                )),
            });
        };
        let cursor = (CursorTable::CURSORS_AT + slot as usize * CursorTable::CURSOR_BYTES) as u64;
        let allocated = table.allocate(cursor, cursor + CursorTable::CURSOR_BYTES as u64);
        allocated.map_err(|error| {
            let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
            self.dir.failed("allocating", TABLE, CursorTable::CURSOR_BYTES as u64, errno)
        })?;
        let (doorbell, liveness) = self.subscriber_fifos(slot)?;
        Ok(SubscriberRole {
            slot,
            lock,
            page: self.publisher_page(false)?,
            data: self.segment(DATA, self.header.capacity, false)?,
            table,
            doorbell,
            publisher_doorbell: self.doorbell(PUBLISHER_DOORBELL_FILE)?,
            liveness,
        })
    }

    /// The doorbell and the liveness handle of a slot. The caller has its lock.
    fn subscriber_fifos(&self, slot: u32) -> Result<(Doorbell, Descriptor)> {
        let (doorbell, life) = (of_lane(slot, DOORBELL_FILE), of_lane(slot, LIVENESS_FILE));
        self.dir.ensure_fifo(&doorbell)?;
        self.dir.ensure_fifo(&life)?;
        Ok((self.doorbell(&doorbell)?, self.open_liveness(&life)?))
    }

    fn claim_free_slot(&self, table: &CursorTable) -> Result<Option<(u32, Lock)>> {
        let mut refused = None;
        for slot in 0..CURSORS_MAX as u32 {
            let is_named = || table.slot(slot).name[0] != 0;
            if is_named() {
                continue;
            }
            if let Some(lock) = self.try_slot(slot)?
                // Another process may have named it, and may have ended, before this one had the lock.
                && !is_named()
            {
                if table.slot(slot).is_counted {
                    // Its process has died. The publisher may not have noticed that, and must not take this one's life
                    // for the dead one's.
                    table.detach(slot);
                    self.doorbell(PUBLISHER_DOORBELL_FILE)?.ring();
                }
                match self.subscriber_fifos(slot) {
                    Ok(_) => return Ok(Some((slot, lock))),
                    // They belong to a user whom this side does not permit, or to one whose process was killed while
                    // it made them.
                    Err(error @ Error::NotAChannel { .. }) => _ = refused.get_or_insert(error),
                    Err(error) => return Err(error),
                }
            }
        }
        refused.map_or(Ok(None), Err)
    }

    /// The error of a subscriber that may hold the publisher up for too long.
    pub(crate) fn refuse_hold(&self, refused: LaneError) -> Error {
        Error::Refused(format!("{}: {refused}", self.dir.path.display()))
    }

    /// Frees the name of a durable subscription that has not begun. The caller has the slot's lock. If another process
    /// keeps the lock of the growth, the name stays, for the next one that opens or removes it.
    pub(crate) async fn forget_durable(&self, table: &CursorTable, slot: u32, waiter: &Waiter) {
        let growth = retry_until(None, waiter, || Ok((self.try_role(CHANNEL)?, true))).await;
        if let Ok(Some(_growth)) = growth
            && !table.has_begun(slot)
        {
            table.name(slot, "");
        }
    }

    /// The caller has the lock of the growth.
    fn claim_durable(&self, table: &CursorTable, name: &str) -> Result<Option<(u32, Lock)>> {
        if let Some(slot) = self.durable_slot(table, name) {
            return Ok(self.try_slot(slot)?.map(|lock| (slot, lock)));
        }
        let Some((slot, lock)) = self.claim_free_slot(table)? else { return Ok(None) };
        // A subscriber of before may have died here. The publisher must not take its cursor for the durable one's.
        table.detach(slot);
        table.name(slot, name);
        Ok(Some((slot, lock)))
    }

    fn durable_slot(&self, table: &CursorTable, name: &str) -> Option<u32> {
        (0..CURSORS_MAX as u32).find(|slot| table.slot(*slot).durable() == Some(name))
    }

    /// Bytes of memory, or of disk, of the data.
    pub(crate) fn allocated_bytes(&self) -> Result<u64> {
        let data = self.segment(DATA, self.header.capacity, false)?;
        data.allocated_bytes().map_err(Error::system("reading the size of a lane's data"))
    }

    /// The subscriptions: the slot and the words of each, and whether a process uses it. Without those whose process
    /// has died, unless they are durable.
    pub(crate) fn subscriptions(&self) -> Result<(Segment, Vec<FoundSlot>)> {
        let table = self.table(false)?;
        let mut found = Vec::new();
        for slot in 0..CURSORS_MAX as u32 {
            let words = table_of(&table).slot(slot);
            if !words.is_counted && words.durable().is_none() {
                continue;
            }
            let held = self.is_slot_held(&table, slot)?;
            if held || words.durable().is_some() {
                found.push((slot, words, held));
            }
        }
        Ok((table, found))
    }

    /// Removes a durable subscription that no process uses. Returns false if there is none of the name.
    ///
    /// # Errors
    /// [`Error::RoleTaken`]; [`Error::TimedOut`]; the errors of the checks.
    pub(crate) fn remove_durable(&self, name: &str) -> Result<bool> {
        let segment = self.table(true)?;
        let table = table_of(&segment);
        let publisher = self.doorbell(PUBLISHER_DOORBELL_FILE)?;
        // As an opening, because a stopped process may hold the lock.
        let growth = in_call(retry_until(None, &Waiter::Thread, || Ok((self.try_role(CHANNEL)?, true))))?;
        let Some(_growth) = growth else { return Err(self.names_are_locked()) };
        let Some(slot) = self.durable_slot(table, name) else { return Ok(false) };
        let Some(_lock) = self.try_slot(slot)? else { return Err(self.slot_taken(table, slot)) };
        // First: an unnamed subscriber may claim the slot once it has no name. And a process that is killed here leaves
        // the name, so that the next one removes it, and rings.
        table.detach(slot);
        publisher.ring();
        table.name(slot, "");
        Ok(true)
    }

    /// Opens the publisher's liveness handle for polling: as [`Directory::watch_receiver`].
    pub(crate) fn watch_publisher(&self) -> Result<Option<Descriptor>> {
        self.watch(PUBLISHER_LIVENESS_FILE)
    }

    /// As [`Directory::watch_publisher`], for the subscriber of a slot.
    pub(crate) fn watch_subscriber(&self, slot: u32) -> Result<Option<Descriptor>> {
        self.watch(&of_lane(slot, LIVENESS_FILE))
    }

    /// The doorbell of the subscriber of a slot.
    pub(crate) fn subscriber_doorbell(&self, slot: u32) -> Result<Doorbell> {
        self.doorbell(&of_lane(slot, DOORBELL_FILE))
    }

    /// Whether there is a publisher. Claims nothing.
    pub(crate) fn is_publisher_held(&self) -> Result<bool> {
        self.is_held(PUBLISHER)
    }

    /// Claims all roles of a broadcast, for its removal.
    pub(super) fn broadcast_roles(&self) -> Result<Vec<Lock>> {
        let mut roles = Vec::new();
        // A damaged broadcast may lack a file; then no process has its roles. Only the error needs the table's words.
        let is_there = |name| Ok::<_, Error>(self.dir.check_named(name, FileType::RegularFile)?.is_some());
        if is_there(PUBLISHER)? {
            roles.push(self.try_role(PUBLISHER)?.ok_or_else(|| self.publisher_taken())?);
        }
        let slots = if is_there(TABLE)? { CURSORS_MAX as u32 } else { 0 };
        for slot in 0..slots {
            let role = self.try_slot(slot)?.ok_or_else(|| match self.table(false) {
                Ok(table) => self.slot_taken(table_of(&table), slot),
                Err(_) => self.taken("subscriber".to_owned(), 0),
            });
            roles.push(role?);
        }
        Ok(roles)
    }

    fn publisher_taken(&self) -> Error {
        self.taken("publisher".to_owned(), self.pid(PUBLISHER, PRODUCER_PID_AT))
    }

    fn names_are_locked(&self) -> Error {
        let path = self.dir.path.display();
        Error::TimedOut(format!("waiting for a process that opens or removes a durable subscription of {path}"))
    }

    fn slot_taken(&self, table: &CursorTable, slot: u32) -> Error {
        let role = match table.slot(slot).durable() {
            Some(name) => format!("subscriber of the durable name {name:?}"),
            None => "subscriber".to_owned(),
        };
        self.taken(role, table.cursor(slot).pid())
    }

    fn is_slot_held(&self, table: &Segment, slot: u32) -> Result<bool> {
        lock::is_byte_locked(table.as_fd(), slot).map_err(|error| self.cannot_lock(TABLE, error))
    }

    /// Locks the byte of a slot, as [`Directory::try_role`] locks a file.
    fn try_slot(&self, slot: u32) -> Result<Option<Lock>> {
        let fd = self.dir.open_unshared(TABLE, FileType::RegularFile, OFlags::RDWR)?;
        let taken = lock::try_lock_byte(fd, slot).map_err(|error| self.cannot_lock(TABLE, error))?;
        failpoint("role: locked, or not");
        taken.map(|lock| self.check_not_removed(lock, TABLE)).transpose()
    }

    /// Maps the publisher's page and checks that it agrees with the channel's.
    pub(crate) fn publisher_page(&self, writable: bool) -> Result<Segment> {
        let segment = self.segment(PUBLISHER, SEGMENT_BYTES, writable)?;
        let bytes: [u8; 128] = self.dir.read(segment.as_fd(), PUBLISHER)?;
        let checked = check_preamble_of(&bytes, broadcast_preamble(MAGIC_BROADCAST));
        checked.map_err(|problem| self.refuse(format!("its file {PUBLISHER} {problem}")))?;
        let found = (
            u64_at(&bytes, offset_of!(ProducerPage, capacity)),
            u64_at(&bytes, offset_of!(ProducerPage, message_bytes_max)),
            u32_at(&bytes, offset_of!(ProducerPage, cursors)),
        );
        let wanted = (self.header.capacity, self.header.message_bytes_max, CURSORS_MAX as u32);
        if found != wanted {
            return Err(self.refuse(format!(
                "its file {PUBLISHER} says capacity {}, limit {}, cursors {}, wanted {}, {} and {}: {DAMAGED}",
                found.0, found.1, found.2, wanted.0, wanted.1, wanted.2
            )));
        }
        Ok(segment)
    }

    fn table(&self, writable: bool) -> Result<Segment> {
        let segment = self.segment(TABLE, CursorTable::BYTES as u64, writable)?;
        let bytes: [u8; size_of::<Preamble>()] = self.dir.read(segment.as_fd(), TABLE)?;
        let checked = check_preamble_of(&bytes, CursorTable::preamble());
        checked.map_err(|problem| self.refuse(format!("its file {TABLE} {problem}")))?;
        Ok(segment)
    }
}
