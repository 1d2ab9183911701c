//! The handshake of two processes with a socket between them: each side creates its segments, sends them to the other,
//! and checks the other's. `spec/protocol.md` has the packets and their order.
//!
//! HELLO states a side's role and limits; PRODUCER and CONSUMER carry segments; READY says that a side has mapped and
//! attached everything. Each side copies a packet once, checks the copy, and uses only that. The last READY decides:
//! when it is sent, both sides have mapped and attached everything.

use crate::doorbells::Doorbells;
use crate::error::{Error, Result};
use crate::lanes::{Lane, LaneMemory, ReceiverParts, ReplyLane, receiver_sleeper};
use crate::link::Link;
use crate::memory::{Budget, GRANULE, LINK_BYTES_MIN, Limits, Part, SHARES, lane_within};
use crate::observe;
use crate::opening::again;
#[cfg(doc)]
use crate::opening::in_call;
use crate::packet::{
    CONSUMER, ENTRY_VERSION, Entries, FEATURES, FIXED_BYTES, HELLO, PACKET_BYTES, PRODUCER, Packet, READY, REFUSED,
    Role, TRACED_MESSAGES, VERSION_TEXT, entry, refusal,
};
use crate::refusals;
use crate::sender::{Sender, SenderMemory, SenderParts};
use crate::settings::Settings;
use crate::transport::SocketTransport;
use pelton_lane::{
    CAPACITY_MIN, Consumer, ConsumerPage, LAYOUT_SIGNATURE, MAGIC_CONSUMER, MAGIC_PRODUCER, MAGIC_RECEIVER, Position,
    Preamble, Producer, ProducerPage, ReceiverPage, SEGMENT_BYTES, Sleeper, WIRE_VERSION, capacity_is_valid, failpoint,
    message_bytes_limit,
};
use pelton_os::Peer;
use pelton_os::socket::{Socket, wait_for};
use pelton_os::{
    Descriptor, Doorbell, Kind, LocalWake, ReceivedFd, Segment, ambiguous_uid_text, is_ambiguous_uid, membarrier,
    overdue, own_uid,
};
use rustix::io::Errno;
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

/// A connection during the handshake.
#[derive(Debug)]
pub(crate) struct Handshake {
    socket: Socket,
    /// The process that connected, or that created the listening socket.
    creator: Peer,
    /// Other users whose processes this side accepts.
    uids: Vec<u32>,
    pace: Pace,
    /// The limits of this side for this peer, as its HELLO states them.
    takes: Limits,
    /// The limits for another user.
    takes_of_others: Limits,
    /// The channel's name.
    name: String,
}

/// How a handshake waits for the peer's next packet.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Pace {
    /// Blocks until this deadline. So the first poll of the future completes it: run it by [`in_call`].
    Until(Instant),
    /// Does not wait. Poll the future when the socket is readable, and after the deadline, if there is one.
    Polled(Option<Instant>),
}

impl Handshake {
    /// Begins a handshake, if this side accepts the peer's user. A process of another user may have inherited a
    /// listening socket: for one that root has created, HELLO decides.
    pub(crate) fn new(socket: Socket, pace: Pace, options: &Settings, name: &str) -> Result<Handshake> {
        let creator = socket.peer().map_err(Error::system("asking who the peer is"));
        let creator = creator.inspect_err(|error| turn_away(&socket, &error.to_string()))?;
        // Root may have created a listening socket for another user, also if this process is root's.
        let may_be_other = creator.uid == 0 && socket.has_connected() && !options.uids.is_empty();
        let takes = options.takes(creator.uid == own_uid() && !may_be_other);
        let takes_of_others = options.takes(false);
        let (uids, name) = (options.uids.clone(), name.to_owned());
        let handshake = Handshake { socket, creator, uids, pace, takes, takes_of_others, name };
        if !(creator.uid == 0 && handshake.socket.has_connected()) {
            handshake.check_user()?;
        }
        handshake.socket.take_descriptors();
        Ok(handshake)
    }

    /// Whether this side accepts the peer's user.
    fn check_user(&self) -> Result<()> {
        let (uid, own) = (self.peer().uid, own_uid());
        if is_ambiguous_uid(uid) {
            return Err(self.refuse(format!("the user of the peer is not known: {}", ambiguous_uid_text(uid))));
        }
        if let Some(waiting) = overdue(uid) {
            return Err(self.refuse(format!(
                "{waiting} descriptors that uid {uid} sent wait to be closed, since closing the one before them takes so long: have that end first"
            )));
        }
        if uid == own || self.uids.contains(&uid) {
            return Ok(());
        }
        Err(self.refuse(format!(
            "the peer is uid {uid}, this side takes uid {own}{}: allow the other's uid in the options of both sides",
            self.uids.iter().map(|uid| format!(" or {uid}")).collect::<String>()
        )))
    }

    fn send(&self, packet: &Packet, fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.send_bytes(&packet.encode(), fds)
    }

    fn send_bytes(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let sent = self.socket.try_send(bytes, fds);
        failpoint("handshake: packet sent");
        let sent = match sent {
            Err(error) if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
                return Err(self.last_words());
            }
            sent => sent.map_err(Error::system("greeting the peer"))?,
        };
        if sent { Ok(()) } else { Err(Error::TimedOut("greeting a peer that does not read".to_owned())) }
    }

    /// From now on the handshake blocks, until `deadline`.
    pub(crate) fn wait_until(&mut self, deadline: Instant) {
        self.pace = Pace::Until(deadline);
    }

    /// From now on the handshake is polled, until `deadline`.
    pub(crate) fn poll_until(&mut self, deadline: Instant) {
        self.pace = Pace::Polled(Some(deadline));
    }

    /// Sends the reason of a refusal. The peer's next read finds it, even after this side has closed.
    pub(crate) fn refuse(&self, why: String) -> Error {
        turn_away(&self.socket, &why);
        Error::Refused(why)
    }

    /// Adds its socket to the epoll of `doorbells`; the socket's events carry `number`.
    pub(crate) fn add_to(&self, doorbells: &Doorbells, number: u32) -> Result<()> {
        doorbells.watch_connecting_socket(&self.socket, number).map_err(self.refused_by("watching a connection"))
    }

    /// Checks that a new lane of a link is empty.
    fn check_new(&self, waiting: u64) -> Result<()> {
        match waiting {
            0 => Ok(()),
            _ => Err(self.refuse(format!("{waiting} messages are said to wait in a lane of a new link, wanted none"))),
        }
    }

    /// The error for a closed connection: the peer's refusal, which may be in the socket before this side's first
    /// packet.
    fn last_words(&self) -> Error {
        let mut bytes = [0; PACKET_BYTES];
        let received = self.socket.try_receive(&mut bytes).ok().flatten();
        received.and_then(|(len, ..)| refusal(&bytes[..len])).unwrap_or(Error::HungUp)
    }

    /// Receives the next packet, which must be of `kind`, with `N` descriptors.
    async fn receive<const N: usize>(&self, kind: u32) -> Result<(Packet, [ReceivedFd; N])> {
        self.receive_with(kind, &mut [0; PACKET_BYTES]).await.map(|(packet, _, fds)| (packet, fds))
    }

    /// As [`Handshake::receive`]; also returns the bytes after the packet's fields.
    async fn receive_with<'a, const N: usize>(
        &self,
        kind: u32,
        bytes: &'a mut [u8; PACKET_BYTES],
    ) -> Result<(Packet, &'a [u8], [ReceivedFd; N])> {
        loop {
            let got = self.socket.try_receive(&mut bytes[..]).map_err(Error::system("hearing from the peer"))?;
            let Some((len, fds, truncated)) = got else {
                let is_in_time = match self.pace {
                    Pace::Polled(deadline) if deadline.is_none_or(|deadline| Instant::now() < deadline) => {
                        again().await;
                        true
                    }
                    Pace::Polled(_) => false,
                    Pace::Until(deadline) => wait_for(self.socket.as_fd(), None, false, Some(deadline))
                        .map_err(Error::system("hearing from the peer"))?,
                };
                if !is_in_time {
                    return Err(Error::TimedOut("waiting for the peer to accept the connection".to_owned()));
                }
                continue;
            };
            if len == 0 {
                return Err(Error::HungUp);
            }
            let packet = Packet::decode(&bytes[..len])
                .ok_or_else(|| self.refuse(format!("a packet of {len} bytes came, wanted at least {FIXED_BYTES}")))?;
            if let Some(refused) = refusal(&bytes[..len]) {
                return Err(refused);
            }
            if (packet.wire_version, packet.layout_signature) != (WIRE_VERSION, LAYOUT_SIGNATURE) {
                return Err(self.refuse(format!(
                    "one side speaks wire version {} with layout {:#018x}, the other, {VERSION_TEXT}, {WIRE_VERSION} with {LAYOUT_SIGNATURE:#018x}: use the later version of pelton on both sides",
                    packet.wire_version, packet.layout_signature
                )));
            }
            if packet.kind != kind {
                return Err(self.refuse(format!("packet of kind {} came, wanted {kind}", packet.kind)));
            }
            let found = fds.len();
            if truncated && found < N {
                // The socket reports only that descriptors were lost. One cause is possible, and it concerns this side,
                // not the peer.
                let what = "taking the peer's descriptors: raise this process's RLIMIT_NOFILE";
                return Err(self.refused_for(Error::system(what)(Errno::MFILE.into())));
            }
            failpoint("handshake: packet received");
            let fds = fds
                .try_into()
                .map_err(|_| self.refuse(format!("{found} descriptors came with packet {kind}, wanted {N}")))?;
            return Ok((packet, &bytes[FIXED_BYTES..len], fds));
        }
    }

    /// Exchanges roles and limits, and returns the peer's HELLO. A listener computes its limits by `takes` after it has
    /// received the peer's HELLO.
    async fn greet(
        &self,
        role: Role,
        holds: bool,
        listens: bool,
        takes: impl FnOnce() -> Result<Limits>,
    ) -> Result<Packet> {
        self.greet_requiring(0, role, holds, listens, takes).await
    }

    /// As [`Handshake::greet`] of the receiver of a lane whose sender died. Its messages may carry a traceparent if it
    /// is `traced`.
    async fn greet_as_survivor(&self, traced: bool, listens: bool) -> Result<Packet> {
        let requires = if traced { TRACED_MESSAGES } else { 0 };
        self.greet_requiring(requires, Role::Receiver, true, listens, || Ok(Limits::ALL)).await
    }

    /// As [`Handshake::greet`] of a sender, whose messages may carry a traceparent if it is `traced`.
    async fn greet_as_sender(&self, traced: bool, holds: bool, listens: bool) -> Result<Packet> {
        let requires = if traced { TRACED_MESSAGES } else { 0 };
        let takes = || Ok(Limits { lane_bytes: 0, message_bytes: 0 });
        self.greet_requiring(requires, Role::Sender, holds, listens, takes).await
    }

    async fn greet_requiring(
        &self,
        requires: u64,
        role: Role,
        holds: bool,
        listens: bool,
        takes: impl FnOnce() -> Result<Limits>,
    ) -> Result<Packet> {
        if !listens {
            self.say_hello(requires, role, holds, takes()?)?;
            let peer = self.hear_hello(requires, role, holds).await?;
            self.check_user()?;
            return Ok(peer);
        }
        let peer = self.hear_hello(requires, role, holds).await?;
        self.say_hello(requires, role, holds, takes()?)?;
        Ok(peer)
    }

    fn say_hello(&self, requires: u64, role: Role, holds: bool, takes: Limits) -> Result<()> {
        let hello = Packet { tail: FEATURES, floor: requires, ..Packet::hello(role, holds, takes) };
        let mut bytes = hello.encode().to_vec();
        bytes.extend(entry(ENTRY_VERSION, VERSION_TEXT.as_bytes()));
        self.send_bytes(&bytes, &[])
    }

    async fn hear_hello(&self, own_requires: u64, role: Role, holds: bool) -> Result<Packet> {
        let mut bytes = [0; PACKET_BYTES];
        let (peer, entries, []) = self.receive_with::<0>(HELLO, &mut bytes).await?;
        let entries = Entries::read(entries);
        if let Some(problem) = &entries.problem {
            return Err(self.refuse(format!("the HELLO of the peer, {}: {problem}", entries.version())));
        }
        let (offers, requires) = (peer.offered(), peer.required());
        if requires & !offers != 0 {
            let feature = (requires & !offers).trailing_zeros();
            return Err(self.refuse(format!("the peer requires feature {feature} and does not offer it itself")));
        }
        if requires & !FEATURES != 0 {
            return Err(self.refuse(format!(
                "the peer, {version}, requires feature {}, which {VERSION_TEXT} does not have: use {version} or later on both sides",
                (requires & !FEATURES).trailing_zeros(),
                version = entries.version()
            )));
        }
        if own_requires & !offers != 0 {
            return Err(self.refuse(format!(
                "the peer, {}, has no feature {}, messages with a traceparent, which {} requires: use {VERSION_TEXT} or later on both sides{}",
                entries.version(),
                (own_requires & !offers).trailing_zeros(),
                if role == Role::Sender { "the sender's option `traced`" } else { "the lane that this receiver holds" },
                if role == Role::Sender { ", or leave that option out" } else { "" }
            )));
        }
        if peer.role == role as u32 {
            let side = Role::word(peer.role);
            return Err(self.refuse(format!("both sides are the {side}: one must be the other")));
        }
        let wanted = role.other() as u32;
        if peer.role != wanted {
            return Err(self.refuse(format!(
                "one side is a {}, the other a {}: that one wants a {}",
                Role::word(peer.role),
                Role::word(role as u32),
                Role::word(wanted)
            )));
        }
        if peer.holds != 0 && matches!(role, Role::Client | Role::Service) {
            return Err(self.refuse("the lanes of a link have no successors: connect anew".to_owned()));
        }
        if peer.holds != 0 && holds {
            return Err(self.refuse(
                "both sides hold a lane whose peer died: one of them must give its own up and make a new handle"
                    .to_owned(),
            ));
        }
        if peer.role != Role::Sender as u32 && peer.capacity < CAPACITY_MIN {
            return Err(self.refuse(format!(
                "the peer takes lanes of at most {} bytes, the smallest has {CAPACITY_MIN}",
                peer.capacity
            )));
        }
        Ok(peer)
    }

    /// Exchanges READY, after both sides have mapped everything. The last READY decides. A survivor sends the last one,
    /// so that a lane never gets two successors; without a survivor, the listener does.
    async fn ready(&self, last: bool) -> Result<()> {
        if last {
            self.receive::<0>(READY).await?;
        }
        self.send(&Packet::new(READY), &[])?;
        if !last {
            self.receive::<0>(READY).await?;
        }
        Ok(())
    }

    /// Maps a control segment of the peer and checks its preamble.
    fn open_control(&self, fd: ReceivedFd, what: &str, magic: u64) -> Result<Segment> {
        self.open_control_with(fd, what, Preamble::new(magic))
    }

    fn open_control_with(&self, fd: ReceivedFd, what: &str, wanted: Preamble) -> Result<Segment> {
        let opened = Segment::open(fd, what, Kind::Control, SEGMENT_BYTES, false);
        let segment = opened.map_err(Error::system(format!("mapping the peer's {what} segment")));
        let segment = segment.map_err(|error| self.refused_for(error))?;
        // SAFETY: the segment maps 64 KiB, and every value of the bytes is a valid `Preamble`.
        let found = unsafe { segment.base().cast::<Preamble>().read_volatile() };
        if found != wanted {
            return Err(self.refuse(format!("the {what} segment begins with {found:x?}, wanted {wanted:x?}")));
        }
        Ok(segment)
    }

    /// Sends the peer the reason as well.
    fn refused_for(&self, error: Error) -> Error {
        self.refuse(match &error {
            Error::System { error: source, .. } if lacks_descriptors(source) => no_descriptor_left(),
            error => error.to_string(),
        });
        error
    }

    fn open_data(&self, fd: ReceivedFd, capacity: u64, writable: bool) -> Result<Segment> {
        if !capacity_is_valid(capacity) {
            return Err(self.refuse(format!("the lane has a capacity of {capacity} bytes, which cannot be")));
        }
        Segment::open(fd, "data", Kind::Data, capacity, writable)
            .map_err(Error::system("mapping the lane's data"))
            .map_err(|error| self.refused_for(error))
    }

    /// Checks whether this side accepts the lane that the peer offers: a new one, or a survivor's.
    /// Checks the lane of `peer`, a sender or publisher.
    fn check_size(&self, peer: Role, packet: &Packet, takes: Limits) -> Result<()> {
        let peer = Role::word(peer as u32);
        if packet.capacity > takes.lane_bytes {
            return Err(self.refuse(format!(
                "the lane has {} bytes, this side takes {}: raise its capacity or memory option, or lower the {peer}'s capacity",
                packet.capacity, takes.lane_bytes
            )));
        }
        if packet.message_bytes_max > takes.message_bytes {
            return Err(self.refuse(format!(
                "the lane allows messages of {} bytes, this side takes {}: raise its message_bytes_max option, or lower the {peer}'s",
                packet.message_bytes_max, takes.message_bytes
            )));
        }
        Ok(())
    }

    /// The limits for the peer, whose user is known by now. Before HELLO, a side that connected knows only the
    /// creator of the socket, so its HELLO may state more: a peer of another user that offers more is refused.
    fn limited(&self, takes: Limits) -> Limits {
        let others = self.takes_of_others;
        if self.peer().uid == own_uid() {
            return takes;
        }
        Limits {
            lane_bytes: takes.lane_bytes.min(others.lane_bytes),
            message_bytes: takes.message_bytes.min(others.message_bytes),
        }
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

    fn open_doorbell(&self, fd: ReceivedFd) -> Result<Doorbell> {
        Doorbell::from_peer(fd, self.peer().uid == own_uid())
            .map_err(Error::system("taking the peer's doorbell"))
            .map_err(|error| self.refused_for(error))
    }

    /// Reports an error of this side to both sides.
    pub(crate) fn refused_by(&self, what: &'static str) -> impl FnOnce(std::io::Error) -> Error + '_ {
        move |error| self.refused_for(Error::system(what)(error))
    }

    /// Maps the producer's segment and checks that it agrees with the packet.
    fn open_producer(&self, fd: ReceivedFd, packet: &Packet) -> Result<Segment> {
        self.open_producer_with(fd, packet, "producer", Preamble::new(MAGIC_PRODUCER), 1)
    }

    /// As [`Handshake::open_producer`], for a page that begins as a producer's does.
    fn open_producer_with(
        &self,
        fd: ReceivedFd,
        packet: &Packet,
        what: &str,
        wanted: Preamble,
        cursors_wanted: u32,
    ) -> Result<Segment> {
        let segment = self.open_control_with(fd, what, wanted)?;
        // SAFETY: the segment maps 64 KiB. The two fields are plain words, and the peer wrote them before it shared the
        // segment; every value of them is valid.
        let (capacity, limit, cursors) = unsafe {
            let page = segment.base().cast::<ProducerPage>().as_ptr();
            let read = |field: *const u64| field.read_volatile();
            (
                read(&raw const (*page).capacity),
                read(&raw const (*page).message_bytes_max),
                (&raw const (*page).cursors).read_volatile(),
            )
        };
        if (capacity, limit, cursors) != (packet.capacity, packet.message_bytes_max, cursors_wanted) {
            return Err(self.refuse(format!(
                "the producer's page says capacity {capacity}, limit {limit}, {cursors} cursors; its packet {}, {}, wanted {cursors_wanted}",
                packet.capacity, packet.message_bytes_max
            )));
        }
        Ok(segment)
    }

    /// Polls for the peer's end; the event carries the number of this lane. Call it before READY: a failure after READY
    /// would lose messages that the peer has sent by then.
    fn watch(&self, own: &Doorbells, lane: u32) -> Result<Option<Descriptor>> {
        own.watch(&self.socket, lane).map_err(self.refused_by("watching the peer"))
    }

    /// The peer. Until HELLO has arrived, a side that connected knows only the process that created the listening
    /// socket.
    pub(crate) fn peer(&self) -> Peer {
        self.socket.peer().unwrap_or(self.creator)
    }

    /// Readable when the peer has sent a packet.
    pub(crate) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// The doorbell to give to the peer. Call it after HELLO: only then the peer's user is known.
    fn doorbell_for_peer(&self, own: &Doorbells) -> Result<Arc<Doorbell>> {
        own.doorbell_for(self.peer()).map_err(self.refused_by("making a doorbell"))
    }

    fn into_link(self, process: Option<Descriptor>, peer_doorbell: Doorbell, own_doorbell: Arc<Doorbell>) -> Link {
        let peer = self.peer();
        let transport = SocketTransport::new(self.socket, process);
        Link::new(peer_doorbell, transport, peer).with_own_doorbell(own_doorbell)
    }

    /// Splits the connection of a link's two lanes: one socket carries the descriptors of both, and reports the peer's
    /// end to both.
    fn into_links(
        self,
        process: Option<Descriptor>,
        peer_doorbells: [Doorbell; 2],
        own_doorbell: Arc<Doorbell>,
    ) -> [Link; 2] {
        let peer = self.peer();
        let transport = SocketTransport::new(self.socket, process);
        let link = |doorbell| Link::new(doorbell, transport.clone(), peer).with_own_doorbell(own_doorbell.clone());
        peer_doorbells.map(link)
    }

    fn reconnect(
        self,
        link: &mut Link,
        own: &Doorbells,
        process: Option<Descriptor>,
        peer_doorbell: Doorbell,
        own_doorbell: Arc<Doorbell>,
    ) {
        let peer = self.peer();
        link.reconnect(own, peer_doorbell, own_doorbell, SocketTransport::new(self.socket, process), peer);
    }
}

/// Whether a system call failed because the process or the machine has no descriptors left.
pub(crate) fn lacks_descriptors(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

/// The reason for refusing a peer without a free descriptor.
pub(crate) fn no_descriptor_left() -> String {
    let most = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    format!(
        "process {} has no descriptor left for one more peer (RLIMIT_NOFILE is {}): raise it there, or connect again later",
        std::process::id(),
        most.map_or("unlimited".to_owned(), |most| most.to_string())
    )
}

/// Refuses a peer that has connected.
pub(crate) fn turn_away(socket: &Socket, why: &str) {
    let mut bytes = Packet::new(REFUSED).encode().to_vec();
    bytes.extend(why.bytes().take(PACKET_BYTES - FIXED_BYTES));
    let _ = socket.try_send(&bytes, &[]);
    // After the packet: the peer need not wait for the log.
    refusals::log(socket, why);
}

// The names of these memfds are for observers: spec/protocol.md, "Names of memfds".

/// A control segment that begins with this page.
fn make_segment<T>(label: &str, page: T) -> std::io::Result<Segment> {
    const { assert!(size_of::<T>() as u64 <= SEGMENT_BYTES) };
    Segment::create(label, Kind::Control, SEGMENT_BYTES, |base| {
        // SAFETY: the segment maps 64 KiB writable, and no other process or thread has it yet.
        unsafe { base.cast().write(page) }
    })
}

/// A producer's page, for the lane with this data.
pub(crate) fn make_producer_page(
    capacity: u64,
    limit: u64,
    generation: u64,
    data: &Segment,
    name: &str,
) -> std::io::Result<Segment> {
    let label = format!("pelton-producer {} {name}", data.inode());
    make_segment(&label, ProducerPage::new(capacity, limit, generation, std::process::id()))
}

/// A lane's data. It replaces the data of the inode `replaced`, if that is not 0.
pub(crate) fn make_data(capacity: u64, replaced: u64, name: &str) -> std::io::Result<Segment> {
    Segment::create(&format!("pelton-data {replaced} {name}"), Kind::Data, capacity, |_| ())
}

/// A consumer's page, for the lane with this data and the receiver with this page.
pub(crate) fn make_consumer_page(
    head: Position,
    data: &Segment,
    receiver: &Segment,
    name: &str,
) -> std::io::Result<Segment> {
    let label = format!("pelton-consumer {} {} {name}", data.inode(), receiver.inode());
    make_segment(&label, ConsumerPage::new(head, 1, std::process::id()))
}

/// A receiver's page, of all its lanes.
pub(crate) fn make_receiver_page(kind: observe::Kind, name: &str) -> std::io::Result<Segment> {
    let label = format!("pelton-receiver {} {name}", kind.word());
    make_segment(&label, ReceiverPage::new())
}

/// The state of a sender's handshake after it has received the peer's page.
struct ConsumerSide {
    consumer: Segment,
    receiver: Segment,
    doorbell: Doorbell,
}

impl ConsumerSide {
    fn open(
        handshake: &Handshake,
        consumer: ReceivedFd,
        receiver: ReceivedFd,
        doorbell: ReceivedFd,
    ) -> Result<ConsumerSide> {
        Ok(ConsumerSide {
            consumer: handshake.open_control(consumer, "consumer", MAGIC_CONSUMER)?,
            receiver: handshake.open_control(receiver, "receiver", MAGIC_RECEIVER)?,
            doorbell: handshake.open_doorbell(doorbell)?,
        })
    }

    /// Attaches the producer at tail, head and floor. Returns it with the peer's doorbell.
    fn attach(
        self,
        handshake: &Handshake,
        page: Segment,
        data: Segment,
        (tail, head, floor): (Position, Position, u64),
        can_barrier: bool,
    ) -> Result<(Producer, SenderMemory, Doorbell)> {
        let [page, data, consumer, receiver] = [page, data, self.consumer, self.receiver].map(Arc::new);
        let memory = SenderMemory { page, data, consumer, receiver, is_moved: false };
        let lane = memory.attach(tail, head, floor, can_barrier).map_err(|error| handshake.refused_for(error))?;
        failpoint("handshake: lane attached");
        Ok((lane, memory, self.doorbell))
    }
}

/// The handshake of a new sender: with a new lane, or with the lane of a receiver that survived its sender.
pub(crate) async fn new_sender(
    handshake: Handshake,
    options: &Settings,
    listens: bool,
) -> Result<(SenderParts, Doorbells)> {
    let can_barrier = membarrier::register();
    let own = Doorbells::new()?;
    let peer = handshake.greet_as_sender(options.traced, false, listens).await?;
    let doorbell = handshake.doorbell_for_peer(&own)?;
    let takes_over = peer.holds != 0;
    let (mut lane, memory, peer_doorbell) = if takes_over {
        let (packet, [consumer_fd, receiver_fd, doorbell_fd, data_fd]) = handshake.receive::<4>(CONSUMER).await?;
        let data = handshake.open_data(data_fd, packet.capacity, true)?;
        handshake.check_limit(&packet)?;
        let (most, _) = options.checked_sizes().map_err(|error| handshake.refused_for(error))?;
        if packet.capacity > most {
            return Err(handshake.refuse(format!(
                "the lane to take over has {} bytes, this sender's capacity is {most}: raise it to at least as much",
                packet.capacity
            )));
        }
        let peer = ConsumerSide::open(&handshake, consumer_fd, receiver_fd, doorbell_fd)?;
        // A generation above 1: this is not the lane's first producer, and it marks its first message accordingly.
        let generation = packet.generation.saturating_add(1).max(2);
        let made = make_producer_page(packet.capacity, packet.message_bytes_max, generation, &data, &handshake.name);
        let page = made.map_err(handshake.refused_by("making the producer's segment"))?;
        handshake.send(&Packet { generation, ..packet.as_kind(PRODUCER) }, &[page.as_fd(), doorbell.given()])?;
        let (tail, head) = (Position::unpack(packet.tail), Position::unpack(packet.head));
        peer.attach(&handshake, page, data, (tail, head, packet.floor), can_barrier)?
    } else {
        offer_lane(&handshake, options, peer.takes(), &doorbell, can_barrier).await?
    };
    // Messages of a predecessor may carry a traceparent, and the next receiver must know that.
    if peer.required() & TRACED_MESSAGES != 0 {
        lane.permit_traced();
    }
    let process = handshake.watch(&own, 0)?;
    handshake.ready(listens && !takes_over).await?;
    let link = handshake.into_link(process, peer_doorbell, doorbell);
    Ok((SenderParts { lane, link, memory }, own))
}

/// Creates a lane within the peer's limits. The peer becomes its consumer.
async fn offer_lane(
    handshake: &Handshake,
    options: &Settings,
    within: Limits,
    doorbell: &Doorbell,
    can_barrier: bool,
) -> Result<(Producer, SenderMemory, Doorbell)> {
    let (capacity, limit) = options.sizes_within(within).map_err(|error| handshake.refused_for(error))?;
    let data = make_data(capacity, 0, &handshake.name).map_err(handshake.refused_by("making the lane's data"))?;
    let page = make_producer_page(capacity, limit, 1, &data, &handshake.name)
        .map_err(handshake.refused_by("making the producer's segment"))?;
    let (tail, head) = (Position::START, Position::START);
    let packet = Packet { generation: 1, ..lane_packet(PRODUCER, capacity, limit, tail, head) };
    handshake.send(&packet, &[page.as_fd(), doorbell.given(), data.as_fd()])?;
    let (_, [consumer_fd, receiver_fd, doorbell_fd]) = handshake.receive::<3>(CONSUMER).await?;
    let peer = ConsumerSide::open(handshake, consumer_fd, receiver_fd, doorbell_fd)?;
    peer.attach(handshake, page, data, (tail, head, 0), can_barrier)
}

/// The handshake of a sender whose receiver died: it offers its lane.
pub(crate) async fn surviving_sender(
    handshake: Handshake,
    parts: &mut SenderParts,
    doorbells: &Doorbells,
    listens: bool,
) -> Result<()> {
    let can_barrier = membarrier::register();
    let peer = handshake.greet_as_sender(parts.lane.is_traced(), true, listens).await?;
    let lane = &mut parts.lane;
    lane.refresh_head()?;
    let (tail, head, limit) = (lane.tail(), lane.head(), lane.lane_message_bytes_max());
    if lane.capacity() > peer.capacity || limit > peer.message_bytes_max {
        return Err(handshake.refuse(format!(
            "the lane to take over has {} bytes and messages of {limit}, the receiver takes {} and {}: raise its capacity and message_bytes_max options",
            lane.capacity(), peer.capacity, peer.message_bytes_max
        )));
    }
    let generation = lane.producer_page().generation();
    let packet = Packet { generation, ..lane_packet(PRODUCER, lane.capacity(), limit, tail, head) };
    let memory = &mut parts.memory;
    // The process of a receiver that has closed may still read messages that it holds. A candidate whose handshake
    // fails holds none, so the next one gets the same data. Otherwise each candidate could keep a copy of all messages.
    if lane.has_consumer_closed() && lane.unreleased() > 0 && !memory.is_moved {
        let moved = make_data(lane.capacity(), memory.data.inode(), &handshake.name)
            .and_then(|data| memory.move_to(lane, data));
        moved.map_err(handshake.refused_by("copying the lane's data"))?;
    }
    let doorbell = handshake.doorbell_for_peer(doorbells)?;
    handshake.send(&packet, &[memory.page.as_fd(), doorbell.given(), memory.data.as_fd()])?;
    let (_, [consumer_fd, receiver_fd, doorbell_fd]) = handshake.receive::<3>(CONSUMER).await?;
    let peer = ConsumerSide::open(&handshake, consumer_fd, receiver_fd, doorbell_fd)?;
    let former = (memory.consumer.clone(), memory.receiver.clone());
    memory
        .attach_consumer(lane, Arc::new(peer.consumer), Arc::new(peer.receiver), can_barrier)
        .map_err(|error| handshake.refused_for(error))?;
    let mut candidate = Candidate { memory, lane, former: Some(former), can_barrier };
    failpoint("handshake: consumer attached");
    let process = handshake.watch(doorbells, 0)?;
    if let Err(error) = handshake.ready(true).await {
        candidate.detach()?;
        return Err(error);
    }
    candidate.former = None;
    drop(candidate);
    parts.memory.is_moved = false;
    handshake.reconnect(&mut parts.link, doorbells, process, peer.doorbell, doorbell);
    failpoint("handshake: survivor goes on");
    Ok(())
}

/// A lane whose consumer's pages are those of a candidate. Dropped before the handshake has ended, also because that is
/// cancelled, it attaches the former pages again, so that nothing reads the candidate's any more.
struct Candidate<'a> {
    memory: &'a mut SenderMemory,
    lane: &'a mut Producer,
    former: Option<(Arc<Segment>, Arc<Segment>)>,
    can_barrier: bool,
}

impl Candidate<'_> {
    fn detach(&mut self) -> Result<()> {
        let Some((consumer, receiver)) = self.former.take() else { return Ok(()) };
        self.memory.attach_consumer(self.lane, consumer, receiver, self.can_barrier)
    }
}

impl Drop for Candidate<'_> {
    fn drop(&mut self) {
        // It fails if the dead receiver's page has changed meanwhile. The next handshake replaces that page too.
        let _ = self.detach();
    }
}

/// How a service creates the reply lane to each of its clients.
#[derive(Clone, Debug)]
pub struct Replies {
    /// The options of these lanes.
    pub options: Settings,
    /// The largest request that the service accepts.
    pub bytes_max: u64,
    /// A local wake that nothing polls.
    pub null_wake: Arc<LocalWake>,
}

/// The receiver's part of a new lane.
#[derive(Clone, Debug)]
pub(crate) struct ReceiverSide {
    pub(crate) page: Arc<Segment>,
    pub(crate) doorbells: Doorbells,
    /// The doorbell that its sender rings. The handshake sets it, once the peer's user is known.
    pub(crate) doorbell: Arc<Doorbell>,
    pub(crate) can_barrier: bool,
    /// The lane's number.
    pub(crate) lane: u32,
    /// For a service: how to create the reply lane to each client.
    pub(crate) replies: Option<Replies>,
    /// Limit of all lanes together, if there is one.
    pub(crate) budget: Option<Arc<Budget>>,
}

impl ReceiverSide {
    /// The limits for one more peer with this number of lanes.
    fn share(&self, handshake: &Handshake, lanes: u64) -> Result<Limits> {
        let takes = handshake.takes;
        let Some(budget) = &self.budget else { return Ok(takes) };
        let lane_bytes = lane_within(takes.lane_bytes.min(budget.left() / SHARES / lanes));
        if lane_bytes < GRANULE {
            return Err(self.no_memory(handshake, budget));
        }
        Ok(Limits { lane_bytes, message_bytes: takes.message_bytes.min(message_bytes_limit(lane_bytes)) })
    }

    /// Takes `bytes` of the budget for the peer's lanes together. Call it after the peer has created them, so that a
    /// handshake that only began takes no memory.
    fn take_share(&self, handshake: &Handshake, bytes: u64) -> Result<Option<Part>> {
        let Some(budget) = &self.budget else { return Ok(None) };
        budget.take(bytes).map(Some).ok_or_else(|| self.no_memory(handshake, budget))
    }

    fn no_memory(&self, handshake: &Handshake, budget: &Budget) -> Error {
        handshake.refuse(format!(
            "{} of the {} bytes of memory that this side has for its peers are left, a new peer is offered a sixteenth and needs lanes of {GRANULE}: raise its memory option, or connect again later",
            budget.left(),
            budget.most()
        ))
    }
}

/// The handshake of a new receiver. It takes over a new lane, or the lane of a sender that survived its receiver.
pub(crate) async fn new_receiver(handshake: Handshake, mut receiver_side: ReceiverSide, listens: bool) -> Result<Lane> {
    let mut takes = Limits::ALL;
    let said = || receiver_side.share(&handshake, 1).inspect(|share| takes = *share);
    let sender = handshake.greet(Role::Receiver, false, listens, said).await?;
    let takes_over = sender.holds != 0;
    receiver_side.doorbell = handshake.doorbell_for_peer(&receiver_side.doorbells)?;
    let takes = handshake.limited(takes);
    let (consumer, memory, redelivered, peer_doorbell) = take_lane(&handshake, &receiver_side, takes, 0).await?;
    let part = receiver_side.take_share(&handshake, consumer.capacity())?;
    let process = handshake.watch(&receiver_side.doorbells, receiver_side.lane)?;
    handshake.ready(listens && !takes_over).await?;
    let link = handshake.into_link(process, peer_doorbell, receiver_side.doorbell);
    let is_traced = sender.required() & TRACED_MESSAGES != 0;
    Ok(Lane { _part: part, is_traced, ..Lane::new(consumer, link, redelivered, receiver_side.lane, memory) })
}

/// Receives the lane that the peer, its producer, offers. Returns it with the number of its messages that may have been
/// delivered before, and the peer's doorbell. Refuses a lane whose largest message has less than `least` bytes.
async fn take_lane(
    handshake: &Handshake,
    receiver_side: &ReceiverSide,
    takes: Limits,
    least: u64,
) -> Result<(Consumer, LaneMemory, u64, Doorbell)> {
    let (packet, [page_fd, doorbell_fd, data_fd]) = handshake.receive::<3>(PRODUCER).await?;
    handshake.check_size(Role::Sender, &packet, takes)?;
    let data = handshake.open_data(data_fd, packet.capacity, false)?;
    handshake.check_limit(&packet)?;
    let page = handshake.open_producer(page_fd, &packet)?;
    if packet.message_bytes_max < least {
        return Err(handshake.refuse(format!(
            "the lane has a largest message of {} bytes, wanted at least {least} for calls",
            packet.message_bytes_max
        )));
    }
    let peer_doorbell = handshake.open_doorbell(doorbell_fd)?;
    let head = Position::unpack(packet.head);
    let redelivered = Position::unpack(packet.tail).since(head);
    if redelivered > packet.capacity / 8 {
        return Err(handshake.refuse(format!(
            "{redelivered} messages are said to wait in a lane of {} bytes, wanted at most {}",
            packet.capacity,
            packet.capacity / 8
        )));
    }
    let consumer = make_consumer_page(head, &data, &receiver_side.page, &handshake.name)
        .map_err(handshake.refused_by("making the consumer's segment"))?;
    let [page, data, consumer] = [page, data, consumer].map(Arc::new);
    let memory = LaneMemory { page, data, consumer, receiver: receiver_side.page.clone() };
    let attached = memory.attach(packet.message_bytes_max, receiver_side.can_barrier);
    let consumer = attached.map_err(|error| handshake.refused_for(error))?;
    let fds = [memory.consumer.as_fd(), memory.receiver.as_fd(), receiver_side.doorbell.given()];
    handshake.send(&Packet::new(CONSUMER), &fds)?;
    Ok((consumer, memory, redelivered, peer_doorbell))
}

/// The handshake of a receiver of one sender.
pub(crate) async fn receiver_of_one(handshake: Handshake, listens: bool) -> Result<ReceiverParts> {
    let (receiver_side, sleeper) = receiver_side_of_one(&handshake, Doorbells::new()?, observe::Kind::Connect)?;
    let doorbells = receiver_side.doorbells.clone();
    let lane = new_receiver(handshake, receiver_side, listens).await?;
    Ok(ReceiverParts { lane, sleeper, doorbells })
}

fn receiver_side_of_one(
    handshake: &Handshake,
    doorbells: Doorbells,
    kind: observe::Kind,
) -> Result<(ReceiverSide, Sleeper)> {
    let can_barrier = membarrier::register();
    let page = make_receiver_page(kind, &handshake.name);
    let page = Arc::new(page.map_err(handshake.refused_by("making the receiver's segment"))?);
    let sleeper = receiver_sleeper(&page, can_barrier);
    let doorbell = doorbells.doorbell().clone();
    Ok((ReceiverSide { page, doorbells, doorbell, can_barrier, lane: 0, replies: None, budget: None }, sleeper))
}

/// The client's side of a link of two lanes.
#[derive(Debug)]
pub(crate) struct LinkParts {
    pub(crate) requests: SenderParts,
    pub(crate) replies: ReceiverParts,
    /// The largest request that the service accepts.
    pub(crate) bytes_max: u64,
    /// The features that the service offers.
    pub(crate) features: u64,
}

/// The handshake of a client, which connects. It offers the lane of requests and accepts the lane of replies. Both use
/// one doorbell, and one descriptor for the caller's event loop.
pub(crate) async fn new_client(handshake: Handshake, options: &Settings, doorbells: &Doorbells) -> Result<LinkParts> {
    let (mut receiver_side, sleeper) = receiver_side_of_one(&handshake, doorbells.clone(), observe::Kind::Replies)?;
    let says = || Ok(Limits { message_bytes: options.call_bytes_max, ..handshake.takes });
    let service = handshake.greet(Role::Client, false, false, says).await?;
    receiver_side.doorbell = handshake.doorbell_for_peer(doorbells)?;
    let takes = of_calls(handshake.limited(handshake.takes));
    let (bytes_max, within) = (service.message_bytes_max, of_calls(service.takes()));
    let (lane, memory, request_doorbell) =
        offer_lane(&handshake, options, within, &receiver_side.doorbell, receiver_side.can_barrier).await?;
    let (consumer, reply_memory, waiting, reply_doorbell) =
        take_lane(&handshake, &receiver_side, takes, LINK_BYTES_MIN).await?;
    handshake.check_new(waiting)?;
    let process = handshake.watch(doorbells, 0)?;
    handshake.ready(false).await?;
    let [there, back] = handshake.into_links(process, [request_doorbell, reply_doorbell], receiver_side.doorbell);
    let requests = SenderParts { lane, link: there, memory };
    let lane = Lane::new(consumer, back, 0, 0, reply_memory);
    let replies = ReceiverParts { lane, sleeper, doorbells: doorbells.clone() };
    Ok(LinkParts { requests, replies, bytes_max, features: service.offered() })
}

/// The handshake of a service, which listens. Returns the lane of requests, which contains the reply lane to its
/// client.
pub(crate) async fn new_caller(
    handshake: Handshake,
    mut receiver_side: ReceiverSide,
    replies: Replies,
) -> Result<Lane> {
    let mut takes = Limits::ALL;
    let said = || {
        takes = receiver_side.share(&handshake, 2)?;
        Ok(Limits { message_bytes: replies.bytes_max, ..takes })
    };
    let client = handshake.greet(Role::Service, false, true, said).await?;
    receiver_side.doorbell = handshake.doorbell_for_peer(&receiver_side.doorbells)?;
    takes = of_calls(takes);
    let bytes_max = client.message_bytes_max;
    let (consumer, memory, waiting, request_doorbell) =
        take_lane(&handshake, &receiver_side, takes, LINK_BYTES_MIN).await?;
    handshake.check_new(waiting)?;
    // One part of the budget covers both lanes.
    let most = if receiver_side.budget.is_some() { takes.lane_bytes } else { u64::MAX };
    let within = of_calls(Limits { lane_bytes: most.min(client.capacity), ..takes });
    let doorbells = receiver_side
        .doorbells
        .for_one_lane(&replies.null_wake, handshake.peer())
        .map_err(handshake.refused_by("making a doorbell"))?;
    let (lane, mut reply_memory, reply_doorbell) =
        offer_lane(&handshake, &replies.options, within, doorbells.doorbell(), receiver_side.can_barrier).await?;
    let part = receiver_side.take_share(&handshake, consumer.capacity() + lane.capacity())?;
    reply_memory.forget_descriptors();
    let process = handshake.watch(&receiver_side.doorbells, receiver_side.lane)?;
    handshake.ready(true).await?;
    let [there, back] =
        handshake.into_links(process, [request_doorbell, reply_doorbell], receiver_side.doorbell.clone());
    let parts = SenderParts { lane, link: back, memory: reply_memory };
    let mut lane = Lane { _part: part, ..Lane::new(consumer, there, 0, receiver_side.lane, memory) };
    let sender = Sender::new(parts, doorbells, &replies.options)?;
    lane.reply = Some(Box::new(ReplyLane { sender, bytes_max }));
    Ok(lane)
}

/// The handshake of a receiver whose sender died: it offers the lane, and the end of the dead sender's records.
pub(crate) async fn surviving_receiver(
    handshake: Handshake,
    survivor: &mut Lane,
    doorbells: &Doorbells,
    listens: bool,
) -> Result<()> {
    let can_barrier = membarrier::register();
    let successor = handshake.greet_as_survivor(survivor.is_traced, listens).await?;
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
    let doorbell = handshake.doorbell_for_peer(doorbells)?;
    let fds = [memory.consumer.as_fd(), memory.receiver.as_fd(), doorbell.given(), memory.data.as_fd()];
    handshake.send(&packet, &fds)?;
    let (answer, [page_fd, doorbell_fd]) = handshake.receive::<2>(PRODUCER).await?;
    if (answer.capacity, answer.message_bytes_max) != (capacity, limit) {
        return Err(
            handshake.refuse(format!("the successor speaks of {} bytes, the lane has {capacity}", answer.capacity))
        );
    }
    let page = handshake.open_producer(page_fd, &answer)?;
    let peer_doorbell = handshake.open_doorbell(doorbell_fd)?;
    let process = handshake.watch(doorbells, 0)?;
    // The successor's page is complete only now. Before that, the lane needs the dead sender's page, in case the
    // successor dies too.
    handshake.ready(true).await?;
    memory.attach_producer(lane, Arc::new(page), can_barrier);
    survivor.is_traced |= successor.required() & TRACED_MESSAGES != 0;
    failpoint("handshake: producer attached");
    // Keeps the descriptors of committed messages. Others belong to messages that were never committed.
    survivor.link.drop_descriptors_from(tail.seq);
    handshake.reconnect(&mut survivor.link, doorbells, process, peer_doorbell, doorbell);
    failpoint("handshake: survivor goes on");
    Ok(())
}

/// For calls the limit applies to a whole request or reply. A request or reply above the lane's message limit is sent
/// in pieces.
fn of_calls(takes: Limits) -> Limits {
    Limits { message_bytes: Limits::ALL.message_bytes, ..takes }
}

fn lane_packet(kind: u32, capacity: u64, message_bytes_max: u64, tail: Position, head: Position) -> Packet {
    Packet { capacity, message_bytes_max, head: head.pack(), tail: tail.pack(), ..Packet::new(kind) }
}

pub(crate) mod broadcast;
#[cfg(test)]
mod tests;
