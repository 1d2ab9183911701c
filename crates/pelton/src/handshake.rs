//! The hand-shake of two processes that have a socket between them: each side makes its segments, shows them to the other,
//! and checks the other's. `spec/protocol.md` has the packets and their order.
//!
//! Whatever comes over the socket is copied once, checked, and only the copy is used. The last READY decides: whoever
//! sends it has mapped and attached everything, and so has who receives it.

use crate::error::{Error, Result};
use crate::link::{Bells, Link, Peer};
use crate::options::Options;
use crate::os::socket::{Socket, wait_for};
use crate::os::{Bell, Kind, Segment, membarrier};
use crate::receiver::{Lane, LaneMemory, ReceiverParts, receiver_sleeper};
use crate::sender::{SenderMemory, SenderParts};
use pelton_lane::{
    ConsumerPage, LAYOUT_SIGNATURE, MAGIC_CONSUMER, MAGIC_PRODUCER, MAGIC_RECEIVER, Position, Preamble, ProducerPage,
    ReceiverPage, SEGMENT_BYTES, WIRE_VERSION, capacity_is_valid, message_bytes_limit, step,
};
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

/// Bytes of the largest packet.
pub(crate) const PACKET_BYTES: usize = 512;
const FIXED_BYTES: usize = 80;

const HELLO: u32 = 1;
const PRODUCER: u32 = 2;
const CONSUMER: u32 = 3;
const READY: u32 = 4;
const REFUSED: u32 = 5;
const DESCRIPTORS: u32 = 6;

/// Which end of the lane a side is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Sender = 1,
    Receiver = 2,
}

/// A packet of the hand-shake. Fields that a kind does not use are 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Packet {
    kind: u32,
    wire_version: u32,
    layout_signature: u64,
    role: u32,
    holds: u32,
    capacity: u64,
    message_bytes_max: u64,
    generation: u64,
    head: u64,
    tail: u64,
    floor: u64,
    seq: u32,
}

impl Packet {
    fn new(kind: u32) -> Packet {
        Packet {
            kind,
            wire_version: WIRE_VERSION,
            layout_signature: LAYOUT_SIGNATURE,
            role: 0,
            holds: 0,
            capacity: 0,
            message_bytes_max: 0,
            generation: 0,
            head: 0,
            tail: 0,
            floor: 0,
            seq: 0,
        }
    }

    /// The same about the lane, as another kind.
    fn as_kind(&self, kind: u32) -> Packet {
        Packet { kind, ..*self }
    }

    fn encode(&self) -> [u8; FIXED_BYTES] {
        let mut bytes = [0; FIXED_BYTES];
        let mut put = |offset: usize, value: &[u8]| bytes[offset..offset + value.len()].copy_from_slice(value);
        put(0, &self.kind.to_le_bytes());
        put(4, &self.wire_version.to_le_bytes());
        put(8, &self.layout_signature.to_le_bytes());
        put(16, &self.role.to_le_bytes());
        put(20, &self.holds.to_le_bytes());
        put(24, &self.capacity.to_le_bytes());
        put(32, &self.message_bytes_max.to_le_bytes());
        put(40, &self.generation.to_le_bytes());
        put(48, &self.head.to_le_bytes());
        put(56, &self.tail.to_le_bytes());
        put(64, &self.floor.to_le_bytes());
        put(72, &self.seq.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Packet> {
        let bytes: &[u8; FIXED_BYTES] = bytes.first_chunk()?;
        let u32_at = |offset: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[offset + i]));
        let u64_at = |offset: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[offset + i]));
        Some(Packet {
            kind: u32_at(0),
            wire_version: u32_at(4),
            layout_signature: u64_at(8),
            role: u32_at(16),
            holds: u32_at(20),
            capacity: u64_at(24),
            message_bytes_max: u64_at(32),
            generation: u64_at(40),
            head: u64_at(48),
            tail: u64_at(56),
            floor: u64_at(64),
            seq: u32_at(72),
        })
    }
}

/// The packet that descriptors of message `seq` travel with.
pub(crate) fn descriptors_packet(seq: u32) -> [u8; FIXED_BYTES] {
    Packet { seq, ..Packet::new(DESCRIPTORS) }.encode()
}

/// The message that a packet of descriptors is for.
pub(crate) fn descriptors_of(packet: &[u8]) -> Option<u32> {
    Packet::decode(packet).filter(|packet| packet.kind == DESCRIPTORS).map(|packet| packet.seq)
}

/// A connection during the hand-shake.
pub(crate) struct Shake {
    socket: Socket,
    peer: Peer,
    deadline: Instant,
}

impl Shake {
    /// Begins with a peer that this side wants to deal with.
    pub(crate) fn new(socket: Socket, deadline: Instant, options: &Options) -> Result<Shake> {
        let peer = socket.peer().map_err(Error::system("asking who the peer is"))?;
        let shake = Shake { socket, peer, deadline };
        let own = rustix::process::geteuid().as_raw();
        if peer.uid == own || options.uids.contains(&peer.uid) {
            return Ok(shake);
        }
        Err(shake.refuse(format!(
            "the peer is uid {}, this side takes uid {own}{}: allow the other's uid in the options of both sides",
            peer.uid,
            options.uids.iter().map(|uid| format!(" or {uid}")).collect::<String>()
        )))
    }

    fn send(&self, packet: &Packet, fds: &[BorrowedFd<'_>]) -> Result<()> {
        let sent = self.socket.try_send(&packet.encode(), fds);
        step("hand-shake: packet sent");
        let sent = match sent {
            Err(error) if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
                return Err(Error::HungUp);
            }
            sent => sent.map_err(Error::system("greeting the peer"))?,
        };
        if sent { Ok(()) } else { Err(Error::TimedOut("greeting a peer that does not read".to_owned())) }
    }

    /// Says why not; the peer's next read finds it, even after this side has closed.
    fn refuse(&self, why: String) -> Error {
        let mut bytes = Packet::new(REFUSED).encode().to_vec();
        bytes.extend(why.bytes().take(PACKET_BYTES - FIXED_BYTES));
        let _ = self.socket.try_send(&bytes, &[]);
        Error::Refused(why)
    }

    /// The next packet, which must be of `kind`, with `fds` descriptors.
    fn receive<const N: usize>(&self, kind: u32) -> Result<(Packet, [OwnedFd; N])> {
        let mut bytes = [0; PACKET_BYTES];
        loop {
            let got = self.socket.try_receive(&mut bytes).map_err(Error::system("hearing from the peer"))?;
            let Some((len, fds, truncated)) = got else {
                let waited = wait_for(self.socket.as_fd(), None, false, Some(self.deadline));
                if !waited.map_err(Error::system("hearing from the peer"))? {
                    return Err(Error::TimedOut("waiting for the peer to answer: is it accepting?".to_owned()));
                }
                continue;
            };
            if len == 0 {
                return Err(Error::HungUp);
            }
            let packet = Packet::decode(&bytes[..len])
                .ok_or_else(|| self.refuse(format!("a packet of {len} bytes came, wanted at least {FIXED_BYTES}")))?;
            if packet.kind == REFUSED {
                let text = String::from_utf8_lossy(&bytes[FIXED_BYTES..len]);
                // Somebody else's words, which may go to a terminal.
                return Err(Error::Refused(text.chars().filter(|c| !c.is_control()).collect()));
            }
            if (packet.wire_version, packet.layout_signature) != (WIRE_VERSION, LAYOUT_SIGNATURE) {
                return Err(self.refuse(format!(
                    "one side speaks wire version {} with layout {:#018x}, the other {WIRE_VERSION} with {LAYOUT_SIGNATURE:#018x}: run the same version of pelton on both sides",
                    packet.wire_version, packet.layout_signature
                )));
            }
            if packet.kind != kind {
                return Err(self.refuse(format!("packet of kind {} came, wanted {kind}", packet.kind)));
            }
            if truncated {
                return Err(self.refuse("this process cannot take the descriptors: raise its RLIMIT_NOFILE".to_owned()));
            }
            let found = fds.len();
            step("hand-shake: packet received");
            let fds = fds
                .try_into()
                .map_err(|_| self.refuse(format!("{found} descriptors came with packet {kind}, wanted {N}")))?;
            return Ok((packet, fds));
        }
    }

    /// Both sides say who they are; answers whether the peer holds a lane.
    fn greet(&self, role: Role, holds: bool, listens: bool) -> Result<bool> {
        let own = Packet { role: role as u32, holds: holds.into(), ..Packet::new(HELLO) };
        if !listens {
            self.send(&own, &[])?;
        }
        let (peer, []) = self.receive::<0>(HELLO)?;
        if peer.role == role as u32 {
            let side = if role == Role::Sender { "sender" } else { "receiver" };
            return Err(self.refuse(format!("both sides are the {side}: one must be the other")));
        }
        if peer.holds != 0 && holds {
            return Err(self.refuse(
                "both sides hold a lane whose peer died: one of them must give its own up and make a new handle"
                    .to_owned(),
            ));
        }
        if listens {
            self.send(&own, &[])?;
        }
        Ok(peer.holds != 0)
    }

    /// Both sides have mapped everything. The last to say so decides: a survivor, lest a lane get two successors; else
    /// the listener.
    fn ready(&self, last: bool) -> Result<()> {
        if last {
            self.receive::<0>(READY)?;
        }
        self.send(&Packet::new(READY), &[])?;
        if !last {
            self.receive::<0>(READY)?;
        }
        Ok(())
    }

    /// Maps a control segment of the peer's and checks its preamble.
    fn open_control(&self, fd: OwnedFd, what: &str, magic: u64) -> Result<Segment> {
        let opened = Segment::open(fd, what, Kind::Control, SEGMENT_BYTES, false);
        let segment = opened.map_err(Error::system(format!("mapping the peer's {what} segment")));
        let segment = segment.map_err(|error| self.refused_for(error))?;
        // SAFETY: 64 KiB are mapped, and any bytes are a preamble.
        let found = unsafe { segment.base().cast::<Preamble>().read_volatile() };
        let wanted = Preamble::new(magic);
        if found != wanted {
            return Err(self.refuse(format!("the {what} segment begins with {found:x?}, wanted {wanted:x?}")));
        }
        Ok(segment)
    }

    /// Tells the peer too why this side gives up.
    fn refused_for(&self, error: Error) -> Error {
        self.refuse(error.to_string());
        error
    }

    fn open_data(&self, fd: OwnedFd, capacity: u64, writable: bool) -> Result<Segment> {
        if !capacity_is_valid(capacity) {
            return Err(self.refuse(format!("the lane has a capacity of {capacity} bytes, which cannot be")));
        }
        Segment::open(fd, "data", Kind::Data, capacity, writable)
            .map_err(Error::system("mapping the lane's data"))
            .map_err(|error| self.refused_for(error))
    }

    fn check_limit(&self, packet: &Packet) -> Result<()> {
        if packet.message_bytes_max > message_bytes_limit(packet.capacity) {
            return Err(self.refuse(format!(
                "the lane has a message limit of {} bytes, more than its capacity of {} allows",
                packet.message_bytes_max, packet.capacity
            )));
        }
        Ok(())
    }

    fn open_bell(&self, fd: OwnedFd) -> Result<Bell> {
        Bell::from_peer(fd).map_err(Error::system("taking the peer's bell")).map_err(|error| self.refused_for(error))
    }

    /// Puts a failure of this side's into words, for both sides.
    fn told(&self, what: &'static str) -> impl FnOnce(std::io::Error) -> Error + '_ {
        move |error| self.refused_for(Error::system(what)(error))
    }

    /// Maps the producer's segment and checks that it says what the packet said.
    fn open_producer(&self, fd: OwnedFd, packet: &Packet) -> Result<Segment> {
        let segment = self.open_control(fd, "producer", MAGIC_PRODUCER)?;
        // SAFETY: 64 KiB are mapped; these two fields are plain words, written before the segment was shared.
        let (capacity, limit, cursors) = unsafe {
            let page = segment.base().cast::<ProducerPage>().as_ptr();
            let read = |field: *const u64| field.read_volatile();
            (
                read(&raw const (*page).capacity),
                read(&raw const (*page).message_bytes_max),
                (&raw const (*page).cursors).read_volatile(),
            )
        };
        if (capacity, limit, cursors) != (packet.capacity, packet.message_bytes_max, 1) {
            return Err(self.refuse(format!(
                "the producer's page says capacity {capacity}, limit {limit}, {cursors} cursors; its packet {}, {}, wanted 1",
                packet.capacity, packet.message_bytes_max
            )));
        }
        Ok(segment)
    }

    fn into_link(self, own: &Bells, peer_bell: Bell) -> Result<Link> {
        Link::over_socket(own, peer_bell, self.socket, self.peer).map_err(Error::system("watching the peer"))
    }

    fn reconnect(self, link: &mut Link, own: &Bells, peer_bell: Bell) -> Result<()> {
        link.reconnect(own, peer_bell, self.socket, self.peer).map_err(Error::system("watching the peer"))
    }
}

/// The bells of a new handle.
fn own_bells() -> Result<Bells> {
    Bells::new().map_err(Error::system("making eventfds and an epoll"))
}

/// A producer's segments, fresh or taken over.
pub(crate) fn make_producer_page(capacity: u64, limit: u64, generation: u64) -> std::io::Result<Segment> {
    Segment::create("pelton-producer", Kind::Control, SEGMENT_BYTES, |base| {
        // SAFETY: 64 KiB, mapped writable and shared with nobody yet.
        unsafe { base.cast().write(ProducerPage::new(capacity, limit, generation, std::process::id())) }
    })
}

pub(crate) fn make_data(capacity: u64) -> std::io::Result<Segment> {
    Segment::create("pelton-data", Kind::Data, capacity, |_| ())
}

/// A consumer's segments.
pub(crate) fn make_consumer_pages(head: Position) -> std::io::Result<(Segment, Segment)> {
    let consumer = Segment::create("pelton-consumer", Kind::Control, SEGMENT_BYTES, |base| {
        // SAFETY: as in `make_producer_page`.
        unsafe { base.cast().write(ConsumerPage::new(head, 1, std::process::id())) }
    })?;
    let receiver = Segment::create("pelton-receiver", Kind::Control, SEGMENT_BYTES, |base| {
        // SAFETY: as in `make_producer_page`.
        unsafe { base.cast().write(ReceiverPage::new()) }
    })?;
    Ok((consumer, receiver))
}

/// What a sender has of its peer after the hand-shake's middle.
struct ConsumerSide {
    consumer: Segment,
    receiver: Segment,
    bell: Bell,
}

impl ConsumerSide {
    fn open(shake: &Shake, consumer: OwnedFd, receiver: OwnedFd, bell: OwnedFd) -> Result<ConsumerSide> {
        Ok(ConsumerSide {
            consumer: shake.open_control(consumer, "consumer", MAGIC_CONSUMER)?,
            receiver: shake.open_control(receiver, "receiver", MAGIC_RECEIVER)?,
            bell: shake.open_bell(bell)?,
        })
    }
}

/// The hand-shake of a new sender: with a fresh lane, or with the lane of a receiver that survived its sender.
pub(crate) fn new_sender(shake: Shake, options: &Options, listens: bool) -> Result<SenderParts> {
    let can_barrier = membarrier::register();
    let own = own_bells()?;
    let (page, data, peer, tail, head, floor);
    let takes_over = shake.greet(Role::Sender, false, listens)?;
    if takes_over {
        let (packet, [consumer_fd, receiver_fd, bell_fd, data_fd]) = shake.receive::<4>(CONSUMER)?;
        data = shake.open_data(data_fd, packet.capacity, true)?;
        shake.check_limit(&packet)?;
        let (most, _) = options.checked_sizes().map_err(|error| shake.refused_for(error))?;
        if packet.capacity > most {
            return Err(shake.refuse(format!(
                "the lane to take over has {} bytes, this sender's capacity is {most}: raise it to at least as much",
                packet.capacity
            )));
        }
        peer = ConsumerSide::open(&shake, consumer_fd, receiver_fd, bell_fd)?;
        // Above 1: this is not the lane's first producer, and marks its first message so.
        let generation = packet.generation.saturating_add(1).max(2);
        let made = make_producer_page(packet.capacity, packet.message_bytes_max, generation);
        page = made.map_err(shake.told("making the producer's segment"))?;
        shake.send(&Packet { generation, ..packet.as_kind(PRODUCER) }, &[page.as_fd(), own.bell().as_fd()])?;
        (tail, head, floor) = (Position::unpack(packet.tail), Position::unpack(packet.head), packet.floor);
    } else {
        let (capacity, limit) = options.checked_sizes().map_err(|error| shake.refused_for(error))?;
        page = make_producer_page(capacity, limit, 1).map_err(shake.told("making the producer's segment"))?;
        data = make_data(capacity).map_err(shake.told("making the lane's data"))?;
        (tail, head, floor) = (Position::START, Position::START, 0);
        let packet = Packet { generation: 1, ..lane_packet(PRODUCER, capacity, limit, tail, head) };
        shake.send(&packet, &[page.as_fd(), own.bell().as_fd(), data.as_fd()])?;
        let (_, [consumer_fd, receiver_fd, bell_fd]) = shake.receive::<3>(CONSUMER)?;
        peer = ConsumerSide::open(&shake, consumer_fd, receiver_fd, bell_fd)?;
    }
    let [page, data, consumer, receiver] = [page, data, peer.consumer, peer.receiver].map(Arc::new);
    let memory = SenderMemory { page, data, consumer, receiver };
    let lane = memory.attach(tail, head, floor, can_barrier).map_err(|error| shake.refused_for(error))?;
    step("hand-shake: lane attached");
    shake.ready(listens && !takes_over)?;
    let link = shake.into_link(&own, peer.bell)?;
    Ok(SenderParts { lane, bells: own, link, memory })
}

/// The hand-shake of a sender whose receiver died: it offers its lane.
pub(crate) fn surviving_sender(shake: Shake, parts: &mut SenderParts, listens: bool) -> Result<()> {
    let can_barrier = membarrier::register();
    shake.greet(Role::Sender, true, listens)?;
    let lane = &mut parts.lane;
    lane.look_at_head()?;
    let (tail, head, limit) = (lane.tail(), lane.head(), lane.message_bytes_max());
    let generation = lane.producer_page().generation();
    let packet = Packet { generation, ..lane_packet(PRODUCER, lane.capacity(), limit, tail, head) };
    let memory = &mut parts.memory;
    shake.send(&packet, &[memory.page.as_fd(), parts.bells.bell().as_fd(), memory.data.as_fd()])?;
    let (_, [consumer_fd, receiver_fd, bell_fd]) = shake.receive::<3>(CONSUMER)?;
    let peer = ConsumerSide::open(&shake, consumer_fd, receiver_fd, bell_fd)?;
    let (consumer, receiver) = (memory.consumer.clone(), memory.receiver.clone());
    memory
        .attach_consumer(lane, Arc::new(peer.consumer), Arc::new(peer.receiver), can_barrier)
        .map_err(|error| shake.refused_for(error))?;
    step("hand-shake: consumer attached");
    if let Err(error) = shake.ready(true) {
        // As if this one had never been: nobody looks at its page any more, whatever it writes there.
        memory.attach_consumer(lane, consumer, receiver, can_barrier)?;
        return Err(error);
    }
    shake.reconnect(&mut parts.link, &parts.bells, peer.bell)?;
    step("hand-shake: survivor goes on");
    Ok(())
}

/// The hand-shake of a new receiver: of a fresh lane, or of the lane of a sender that survived its receiver.
pub(crate) fn new_receiver(shake: Shake, listens: bool) -> Result<ReceiverParts> {
    let can_barrier = membarrier::register();
    let own = own_bells()?;
    let takes_over = shake.greet(Role::Receiver, false, listens)?;
    let (packet, [page_fd, bell_fd, data_fd]) = shake.receive::<3>(PRODUCER)?;
    let data = shake.open_data(data_fd, packet.capacity, false)?;
    shake.check_limit(&packet)?;
    let page = shake.open_producer(page_fd, &packet)?;
    let peer_bell = shake.open_bell(bell_fd)?;
    let head = Position::unpack(packet.head);
    let redelivered = Position::unpack(packet.tail).since(head);
    if redelivered > packet.capacity / 8 {
        return Err(shake.refuse(format!(
            "{redelivered} messages are said to wait in a lane of {} bytes, wanted at most {}",
            packet.capacity,
            packet.capacity / 8
        )));
    }
    let (consumer, receiver) = make_consumer_pages(head).map_err(shake.told("making the consumer's segments"))?;
    let [page, data, consumer, receiver] = [page, data, consumer, receiver].map(Arc::new);
    let memory = LaneMemory { page, data, consumer, receiver };
    let attached = memory.attach(packet.message_bytes_max, can_barrier);
    let consumer = attached.map_err(|error| shake.refused_for(error))?;
    let sleeper = receiver_sleeper(&memory.receiver, can_barrier);
    let fds = [memory.consumer.as_fd(), memory.receiver.as_fd(), own.bell().as_fd()];
    shake.send(&Packet::new(CONSUMER), &fds)?;
    shake.ready(listens && !takes_over)?;
    let link = shake.into_link(&own, peer_bell)?;
    Ok(ReceiverParts { lane: Lane::new(consumer, link, redelivered, 0, memory), sleeper, bells: own })
}

/// The hand-shake of a receiver whose sender died: it offers the lane, and says where the dead one's records end.
pub(crate) fn surviving_receiver(shake: Shake, survivor: &mut Lane, bells: &Bells, listens: bool) -> Result<()> {
    let can_barrier = membarrier::register();
    shake.greet(Role::Receiver, true, listens)?;
    let lane = &mut survivor.consumer;
    let (tail, _) = lane.end_of_committed()?;
    let (capacity, limit) = (lane.capacity(), lane.message_bytes_max());
    let page = lane.producer_page();
    let packet = Packet {
        generation: page.generation(),
        floor: page.tail_and_floor().1,
        ..lane_packet(CONSUMER, capacity, limit, tail, lane.head())
    };
    let memory = &mut survivor.memory;
    let bell = bells.bell().as_fd();
    shake.send(&packet, &[memory.consumer.as_fd(), memory.receiver.as_fd(), bell, memory.data.as_fd()])?;
    let (answer, [page_fd, bell_fd]) = shake.receive::<2>(PRODUCER)?;
    if (answer.capacity, answer.message_bytes_max) != (capacity, limit) {
        return Err(shake.refuse(format!("the successor speaks of {} bytes, the lane has {capacity}", answer.capacity)));
    }
    let page = shake.open_producer(page_fd, &answer)?;
    let peer_bell = shake.open_bell(bell_fd)?;
    // Only now is the successor's page complete: had it died before, the dead one's would still be needed.
    shake.ready(true)?;
    memory.attach_producer(lane, Arc::new(page), can_barrier);
    step("hand-shake: producer attached");
    // What came for messages that the dead sender committed is here; the rest was for messages that never were.
    survivor.link.forget_descriptors_from(tail.seq);
    shake.reconnect(&mut survivor.link, bells, peer_bell)?;
    step("hand-shake: survivor goes on");
    Ok(())
}

fn lane_packet(kind: u32, capacity: u64, message_bytes_max: u64, tail: Position, head: Position) -> Packet {
    Packet { capacity, message_bytes_max, head: head.pack(), tail: tail.pack(), ..Packet::new(kind) }
}

#[cfg(test)]
mod tests;
