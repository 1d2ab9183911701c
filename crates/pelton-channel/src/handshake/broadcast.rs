//! The handshake of a publisher with a subscriber: the publisher sends its lane, the subscriber its cursor, and the
//! publisher's READY has the place where the subscriber begins. `spec/broadcast.md`, "By connect".

use super::{Handshake, lane_packet, make_segment};
use crate::doorbells::Doorbells;
use crate::error::{Error, Result};
use crate::link::Link;
use crate::memory::Limits;
use crate::packet::{CONSUMER, PRODUCER, Packet, READY, Role};
use crate::settings::Settings;
use crate::subscriber::{SubscriberMemory, SubscriberParts};
use pelton_lane::{
    BroadcastPage, CURSORS_MAX, CursorPage, Joined, MAGIC_BROADCAST, MAGIC_CURSOR, Policy, Position, StartFrom,
    broadcast_preamble, capacity_is_valid, failpoint,
};
use pelton_os::{Descriptor, Doorbell, Kind, Segment, membarrier};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// The publisher's part of a handshake.
#[derive(Clone, Debug)]
pub(crate) struct PublisherSide {
    pub(crate) page: Arc<Segment>,
    pub(crate) data: Arc<Segment>,
    pub(crate) message_bytes_max: u64,
    pub(crate) doorbells: Doorbells,
    pub(crate) hold_max_ns: u64,
}

/// A subscriber that has sent its cursor, and that the publisher may let join.
#[derive(Debug)]
pub(crate) struct Joining {
    handshake: Handshake,
    pub(crate) cursor: Arc<Segment>,
    pub(crate) policy: Policy,
    pub(crate) from: StartFrom,
    /// The number that the doorbells report with its end.
    pub(crate) number: u32,
    process: Option<Descriptor>,
    peer_doorbell: Doorbell,
    own_doorbell: Arc<Doorbell>,
}

/// A broadcast lane's page, for the lane with this data.
pub(crate) fn make_broadcast_page(capacity: u64, limit: u64, data: &Segment, name: &str) -> std::io::Result<Segment> {
    let label = format!("pelton-broadcast {} {name}", data.inode());
    make_segment(&label, BroadcastPage::new(capacity, limit, 1, std::process::id()))
}

/// A broadcast lane's data. No other process can ever write it: a subscriber could forge messages for the others.
pub(crate) fn make_broadcast_data(capacity: u64, name: &str) -> std::io::Result<Segment> {
    Segment::create(&format!("pelton-published {name}"), Kind::Control, capacity, |_| ())
}

/// A subscriber's page, for the lane with this data.
pub(crate) fn make_cursor_page(policy: Policy, data: &Segment, name: &str) -> std::io::Result<Segment> {
    let label = format!("pelton-cursor {} {name}", data.inode());
    make_segment(&label, CursorPage::new(policy, std::process::id()))
}

// What a subscriber wants to begin with, in the fields `seq` and `tail` of its CONSUMER.
const FROM_NOW: u32 = 0;
const FROM_OLDEST: u32 = 1;
const FROM_LAST: u32 = 2;

/// The publisher's side, up to the subscriber's cursor.
pub(crate) async fn new_subscription(handshake: Handshake, side: PublisherSide, number: u32) -> Result<Joining> {
    let limits = Limits { lane_bytes: side.data.bytes(), message_bytes: side.message_bytes_max };
    handshake.greet(Role::Publisher, false, true, || Ok(limits)).await?;
    let own_doorbell = handshake.doorbell_for_peer(&side.doorbells)?;
    let start = Position::START;
    let packet =
        Packet { generation: 1, ..lane_packet(PRODUCER, limits.lane_bytes, limits.message_bytes, start, start) };
    handshake.send(&packet, &[side.page.as_fd(), own_doorbell.given(), side.data.as_fd()])?;
    let (packet, [cursor_fd, doorbell_fd]) = handshake.receive::<2>(CONSUMER).await?;
    let cursor = handshake.open_control_with(cursor_fd, "cursor", broadcast_preamble(MAGIC_CURSOR))?;
    let peer_doorbell = handshake.open_doorbell(doorbell_fd)?;
    // SAFETY: the segment maps 64 KiB, which hold the page, and lives as long as `cursor`.
    let policy = unsafe { cursor.base().cast::<CursorPage>().as_ref() }.policy();
    let policy = policy.map_err(|error| handshake.refused_for(error.into()))?;
    policy.check_hold(side.hold_max_ns).map_err(|refused| handshake.refuse(refused.to_string()))?;
    let from = match packet.seq {
        FROM_NOW => StartFrom::Now,
        FROM_OLDEST => StartFrom::Oldest,
        FROM_LAST => StartFrom::Last(packet.tail),
        other => return Err(handshake.refuse(format!("the subscriber begins at {other}, wanted 0 to {FROM_LAST}"))),
    };
    let process = handshake.watch(&side.doorbells, number)?;
    Ok(Joining { handshake, cursor: Arc::new(cursor), policy, from, number, process, peer_doorbell, own_doorbell })
}

impl Joining {
    /// Sends the subscriber the place where it begins. The publisher counts it already, so that nothing there is
    /// overwritten.
    pub(crate) fn admit(self, joined: Joined) -> Result<Link> {
        let ready = Packet {
            seq: joined.slot,
            generation: joined.join,
            floor: joined.number,
            head: joined.place.pack(),
            tail: joined.skip,
            ..Packet::new(READY)
        };
        self.handshake.send(&ready, &[])?;
        failpoint("handshake: subscriber admitted");
        Ok(self.handshake.into_link(self.process, self.peer_doorbell, self.own_doorbell))
    }

    /// The socket of its handshake.
    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.handshake.socket().as_fd()
    }

    /// Refuses it.
    pub(crate) fn refuse(&self, why: String) {
        self.handshake.refuse(why);
    }
}

/// The subscriber's side. One that had another publisher keeps its doorbells.
pub(crate) async fn new_subscriber(
    handshake: Handshake,
    options: &Settings,
    doorbells: &Doorbells,
) -> Result<SubscriberParts> {
    let can_barrier = membarrier::register();
    handshake.greet(Role::Subscriber, false, false, || Ok(handshake.takes)).await?;
    let own_doorbell = handshake.doorbell_for_peer(doorbells)?;
    let (packet, [page_fd, doorbell_fd, data_fd]) = handshake.receive::<3>(PRODUCER).await?;
    handshake.check_size(Role::Publisher, &packet, handshake.limited(handshake.takes))?;
    if !capacity_is_valid(packet.capacity) {
        return Err(handshake.refuse(format!("the lane has a capacity of {} bytes, which cannot be", packet.capacity)));
    }
    handshake.check_limit(&packet)?;
    let data = Segment::open(data_fd, "data", Kind::Control, packet.capacity, false);
    let data = data.map_err(Error::system("mapping the lane's data")).map_err(|error| handshake.refused_for(error))?;
    let preamble = broadcast_preamble(MAGIC_BROADCAST);
    let page = handshake.open_producer_with(page_fd, &packet, "broadcast", preamble, CURSORS_MAX as u32)?;
    let peer_doorbell = handshake.open_doorbell(doorbell_fd)?;
    let policy = options.lane_policy();
    let cursor = make_cursor_page(policy, &data, &handshake.name);
    let cursor = cursor.map_err(handshake.refused_by("making the cursor's segment"))?;
    let (from, last) = match options.start_from {
        StartFrom::Now => (FROM_NOW, 0),
        StartFrom::Oldest => (FROM_OLDEST, 0),
        StartFrom::Last(messages) => (FROM_LAST, messages),
    };
    let process = handshake.watch(doorbells, 0)?;
    let packet_back = Packet { seq: from, tail: last, ..Packet::new(CONSUMER) };
    handshake.send(&packet_back, &[cursor.as_fd(), own_doorbell.given()])?;
    let (ready, []) = handshake.receive::<0>(READY).await?;
    let joined = Joined {
        slot: ready.seq,
        join: ready.generation,
        number: ready.floor,
        place: Position::unpack(ready.head),
        skip: ready.tail,
    };
    let memory = SubscriberMemory { page: Arc::new(page), data: Arc::new(data), cursor: Arc::new(cursor) };
    let (lane, sleeper) = memory.attach(policy, joined, packet.message_bytes_max, can_barrier)?;
    failpoint("handshake: subscriber attached");
    let link = handshake.into_link(process, peer_doorbell, own_doorbell);
    Ok(SubscriberParts { lane, sleeper, link, _memory: memory })
}
