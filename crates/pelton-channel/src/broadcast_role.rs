//! The roles of a publisher and a subscriber in the directory of a broadcast.

use crate::directory::{Directory, HoldLimit, table_of};
use crate::doorbells::Doorbells;
use crate::error::{Error, Result};
use crate::link::{Link, UNKNOWN_PEER};
use crate::transport::{PathTransport, PeerRole};
use pelton_lane::{BroadcastProducer, DURABLE_BYTES_MAX};
use pelton_os::lock::Lock;
use pelton_os::{self as os, Descriptor, Segment};
use std::io::ErrorKind;
use std::sync::Arc;

/// How much more of the data is allocated at a time, as for a sender.
const STEP: u64 = 1 << 20;

/// A role in the directory of a broadcast, for as long as its handle lives.
#[derive(Debug)]
pub(crate) struct BroadcastRole {
    pub(crate) directory: Arc<Directory>,
    /// Held open: its close proves to the other sides that this one is gone.
    #[expect(dead_code, reason = "held")]
    pub(crate) liveness: Descriptor,
    /// Dropped after the liveness handle, so that a successor finds this one gone.
    #[expect(dead_code, reason = "held")]
    pub(crate) lock: Lock,
    /// Of a subscriber: it keeps its place.
    pub(crate) is_durable: bool,
    /// Of a subscriber: an earlier process has begun its durable subscription.
    pub(crate) continues: bool,
    /// Of a subscriber: the generation of the last publisher whose end is no news; 0: none. It left before this side
    /// subscribed, or this side has reported it.
    pub(crate) past: u64,
    /// Of a subscriber: a later publisher has gone.
    pub(crate) is_gone: bool,
}

/// Checks the name of a durable subscription.
pub(crate) fn check_durable(name: &str) -> Result<()> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if !name.is_empty() && name.len() <= DURABLE_BYTES_MAX && name.chars().all(fits) {
        return Ok(());
    }
    Err(Error::Name {
        name: name.to_owned(),
        problem: format!("is no durable name: use 1 to {DURABLE_BYTES_MAX} letters, digits, '.', '_' or '-'"),
    })
}

/// A publisher's part of a broadcast in a directory.
#[derive(Debug)]
pub(crate) struct PublisherPath {
    /// Dropped before the role.
    pub(crate) limit: HoldLimit,
    /// Dropped after the lane, which points into it.
    pub(crate) table: Arc<Segment>,
    pub(crate) role: BroadcastRole,
}

impl PublisherPath {
    /// Allocates memory for the first `bytes` of the data, so that a write there cannot fail.
    pub(crate) fn back(&self, lane: &mut BroadcastProducer, data: &Segment, bytes: u64) -> Result<()> {
        let (from, most) = (lane.backed(), lane.capacity());
        let mut refused = None;
        // If a whole step fails, tries to allocate only the required bytes.
        for to in [bytes.next_multiple_of(STEP).min(most), bytes.next_multiple_of(os::PIECE).min(most)] {
            match data.allocate(from, to) {
                Ok(()) => {
                    lane.set_backed(to);
                    return Ok(());
                }
                Err(error) => refused = Some(error),
            }
        }
        let error = refused.expect("an attempt failed");
        let path = self.role.directory.path().display().to_string();
        Err(match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Error::NoSpace { path, bytes, error },
            _ => Error::system("allocating space for the lane")(error),
        })
    }

    /// Finds the process of a subscriber that has joined by itself, and rings it: it may have fallen asleep before this
    /// side knew its doorbell. `None` in the link's peer: no process uses it now.
    pub(crate) fn meet(
        &self,
        slot: u32,
        number: u32,
        joins: u64,
        doorbells: &Doorbells,
    ) -> Result<(Link, Arc<Segment>)> {
        let directory = &self.role.directory;
        let doorbell = directory.subscriber_doorbell(slot)?;
        let role = PeerRole::Subscriber { slot, number };
        let mut link = Link::new(doorbell, PathTransport::new(directory.clone(), role), UNKNOWN_PEER);
        let pid = table_of(&self.table).cursor(slot).pid();
        link.find_peer(doorbells, || (joins, pid))?;
        link.ring_peer();
        Ok((link, self.table.clone()))
    }

    /// The name of the durable subscription of a slot. Hostile bytes are none.
    pub(crate) fn durable(&self, slot: u32) -> Option<String> {
        let slot = table_of(&self.table).slot(slot);
        slot.durable().filter(|name| check_durable(name).is_ok()).map(str::to_owned)
    }

    /// Whether the subscriber of a slot, whose process has gone, keeps its place: it has a name, and has begun.
    pub(crate) fn is_durable(&self, slot: u32) -> bool {
        let table = table_of(&self.table);
        table.slot(slot).durable().is_some() && table.has_begun(slot)
    }
}
