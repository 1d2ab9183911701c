//! A handwritten peer: packets, segments and descriptors that follow the protocol or violate it, and memory that the
//! peer continues to write.

use pelton::{Error, Held, Receiver, Sender, Traceparent};
use pelton_testkit::readable;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg, sendmsg, socket_with,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

pub const HELLO: u32 = 1;
pub const PRODUCER: u32 = 2;
pub const CONSUMER: u32 = 3;
pub const READY: u32 = 4;
pub const REFUSED: u32 = 5;
pub const DESCRIPTORS: u32 = 6;
pub const SENDER: u32 = 1;
pub const RECEIVER: u32 = 2;

/// A valid packet: kind, wire version, layout signature, role.
pub fn packet(kind: u32, role: u32) -> Vec<u8> {
    let mut bytes = vec![0; 80];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[4..8].copy_from_slice(&pelton_lane::WIRE_VERSION.to_le_bytes());
    bytes[8..16].copy_from_slice(&pelton_lane::LAYOUT_SIGNATURE.to_le_bytes());
    bytes[16..20].copy_from_slice(&role.to_le_bytes());
    if kind == HELLO {
        // The peer accepts any lane and any message.
        bytes[24..32].copy_from_slice(&pelton_lane::CAPACITY_MAX.to_le_bytes());
        bytes[32..40].copy_from_slice(&pelton_lane::message_bytes_limit(pelton_lane::CAPACITY_MAX).to_le_bytes());
    }
    bytes
}

pub fn seqpacket() -> OwnedFd {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

/// A kind of descriptor that is no doorbell.
pub fn stream_socket() -> OwnedFd {
    socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap()
}

pub fn raw_connect(path: &Path) -> OwnedFd {
    let socket = seqpacket();
    connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    socket
}

pub fn raw_send(socket: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    // Some tests need a peer that has already hung up.
    raw_try_send(socket, bytes, fds);
}

/// Returns false if the packet was not sent.
pub fn raw_try_send(socket: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(fds));
    }
    sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL).is_ok()
}

/// Returns the next packet, within the deadline: its bytes (none at the end), and its descriptors.
pub fn raw_receive(socket: &OwnedFd) -> (Vec<u8>, Vec<OwnedFd>) {
    readable(socket.as_fd());
    let mut bytes = vec![0; 1024];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let got = recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC);
    let mut fds = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    bytes.truncate(got.map_or(0, |got| got.bytes));
    (bytes, fds)
}

pub fn kind_of(bytes: &[u8]) -> u32 {
    bytes.first_chunk().map_or(0, |word| u32::from_le_bytes(*word))
}

pub const CAPACITY: u64 = 65536;

/// A packet of a producer with a lane of 64 KiB.
pub fn producer_packet() -> Vec<u8> {
    let mut bytes = packet(PRODUCER, 0);
    bytes[24..32].copy_from_slice(&CAPACITY.to_le_bytes());
    bytes[32..40].copy_from_slice(&(CAPACITY / 2 - 32).to_le_bytes());
    bytes[40..48].copy_from_slice(&1u64.to_le_bytes());
    let start = 1u64 << 32;
    bytes[48..56].copy_from_slice(&start.to_le_bytes());
    bytes[56..64].copy_from_slice(&start.to_le_bytes());
    bytes
}

pub fn memfd(bytes: u64, content: &[u8], seals: SealFlags) -> OwnedFd {
    let fd = memfd_unsealed(bytes, content);
    fcntl_add_seals(&fd, seals).unwrap();
    fd
}

fn memfd_unsealed(bytes: u64, content: &[u8]) -> OwnedFd {
    let fd = memfd_create("hostile", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&fd, bytes).unwrap();
    rustix::io::pwrite(&fd, content, 0).unwrap();
    fd
}

pub fn size_seals() -> SealFlags {
    SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL
}

pub fn control_seals() -> SealFlags {
    size_seals() | SealFlags::FUTURE_WRITE
}

/// The first bytes of a control page.
pub fn preamble(magic: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(magic.to_le_bytes());
    bytes.extend(pelton_lane::WIRE_VERSION.to_le_bytes());
    bytes.extend((pelton_lane::SEGMENT_BYTES as u32).to_le_bytes());
    bytes.extend(pelton_lane::LAYOUT_SIGNATURE.to_le_bytes());
    bytes
}

pub fn producer_page() -> Vec<u8> {
    let mut bytes = preamble(pelton_lane::MAGIC_PRODUCER);
    bytes.resize(64, 0);
    bytes.extend(CAPACITY.to_le_bytes());
    bytes.extend((CAPACITY / 2 - 32).to_le_bytes());
    bytes.extend(1u32.to_le_bytes());
    bytes.resize(144, 0);
    bytes.extend(1u64.to_le_bytes());
    bytes
}

pub fn good_page() -> OwnedFd {
    memfd(65536, &producer_page(), control_seals())
}

pub fn good_data() -> OwnedFd {
    memfd(CAPACITY, &[], size_seals())
}

pub fn good_doorbell() -> OwnedFd {
    rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap()
}

pub fn a_file() -> OwnedFd {
    tempfile::tempfile().unwrap().into()
}

pub fn a_pipe() -> OwnedFd {
    rustix::pipe::pipe().unwrap().1
}

pub fn an_o_path() -> OwnedFd {
    use rustix::fs::{Mode, OFlags};
    rustix::fs::open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap()
}

/// Memory that the peer shares and continues to write.
pub struct Shown {
    pub fd: OwnedFd,
    base: *mut u8,
    bytes: usize,
}

// SAFETY: the mapping belongs to this value, and all threads access it only by atomic loads and stores of whole
// words.
unsafe impl Send for Shown {}
// SAFETY: all access is by atomic loads and stores of whole words.
unsafe impl Sync for Shown {}

impl Shown {
    pub fn new(bytes: u64, content: &[u8], seals: SealFlags) -> Shown {
        let fd = memfd_unsealed(bytes, content);
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the address of a new mapping.
        let base = unsafe { mmap(std::ptr::null_mut(), bytes as usize, protection, MapFlags::SHARED, &fd, 0) }.unwrap();
        fcntl_add_seals(&fd, seals).unwrap();
        Shown { fd, base: base.cast(), bytes: bytes as usize }
    }

    /// A writable segment of the other side: the data of a lane.
    pub fn of(fd: OwnedFd) -> Shown {
        let bytes = rustix::fs::fstat(&fd).unwrap().st_size as usize;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the address of a new mapping.
        let base = unsafe { mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, &fd, 0) }.unwrap();
        Shown { fd, base: base.cast(), bytes }
    }

    pub fn words(&self) -> usize {
        self.bytes / 8
    }

    /// The word at an offset in bytes.
    pub fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset + 8 <= self.bytes && offset.is_multiple_of(8));
        // SAFETY: the offset is within the mapping, which lives as long as `self`, and aligned.
        unsafe { &*self.base.add(offset).cast() }
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        // SAFETY: `new` or `of` mapped it, and only this call unmaps it.
        unsafe { munmap(self.base.cast(), self.bytes) }.unwrap();
    }
}

/// A peer that has finished its handshake with a listener, and holds all it needs to violate the protocol afterwards.
pub struct RawPeer {
    pub socket: OwnedFd,
    /// The segments that this peer may write. A sender has its page and the data; a receiver has its two pages and
    /// the data.
    pub shown: Vec<Shown>,
    /// Wakes this peer.
    pub own_doorbell: OwnedFd,
    /// Wakes the other side.
    pub doorbell: OwnedFd,
}

impl RawPeer {
    /// Connects as a new sender, or as the successor of one that died.
    pub fn sender(socket: &Path) -> RawPeer {
        RawPeer::sender_with(socket, good_doorbell()).expect("it keeps to the protocol")
    }

    /// Connects with a given doorbell, possibly an invalid one; returns `None` if the listener refuses it.
    pub fn sender_with(socket: &Path, own_doorbell: OwnedFd) -> Option<RawPeer> {
        let socket = raw_connect(socket);
        raw_send(&socket, &packet(HELLO, SENDER), &[]);
        let holds = raw_receive(&socket).0[20] != 0;
        let (mut page, mut answer, data, doorbell);
        if holds {
            let (offered, mut fds) = raw_receive(&socket);
            assert_eq!((kind_of(&offered), fds.len()), (CONSUMER, 4));
            data = Shown::of(fds.remove(3));
            doorbell = fds.remove(2);
            answer = offered;
            answer[..4].copy_from_slice(&PRODUCER.to_le_bytes());
            page = producer_page();
            page[64..80].copy_from_slice(&answer[24..40]);
        } else {
            data = Shown::new(CAPACITY, &[], size_seals());
            (page, answer) = (producer_page(), producer_packet());
            doorbell = good_doorbell();
        }
        page.resize(512, 0);
        page[384..388].copy_from_slice(&1u32.to_le_bytes());
        let page = Shown::new(65536, &page, control_seals());
        let fds = [page.fd.as_fd(), own_doorbell.as_fd(), data.fd.as_fd()];
        raw_send(&socket, &answer, if holds { &fds[..2] } else { &fds });
        let doorbell = if holds {
            doorbell
        } else {
            let (answer, mut fds) = raw_receive(&socket);
            if kind_of(&answer) == REFUSED {
                return None;
            }
            assert_eq!((kind_of(&answer), fds.len()), (CONSUMER, 3));
            fds.remove(2)
        };
        raw_ready(&socket);
        Some(RawPeer { socket, shown: vec![page, data], own_doorbell, doorbell })
    }

    /// Connects as a receiver, with or without a dead predecessor.
    pub fn receiver(socket: &Path) -> RawPeer {
        let (peer, _) = RawPeer::receiver_but_for_ready(socket, 0);
        raw_ready(&peer.socket);
        peer
    }

    /// Stops before the ready packet. Also returns the sender's page, for reading.
    pub fn receiver_but_for_ready(socket: &Path, sleep: u8) -> (RawPeer, OwnedFd) {
        let socket = raw_connect(socket);
        raw_send(&socket, &packet(HELLO, RECEIVER), &[]);
        assert_eq!(kind_of(&raw_receive(&socket).0), HELLO);
        let (offered, mut fds) = raw_receive(&socket);
        assert_eq!((kind_of(&offered), fds.len()), (PRODUCER, 3));
        let (data, doorbell, page_of_sender) = (Shown::of(fds.remove(2)), fds.remove(1), fds.remove(0));
        let mut page = preamble(pelton_lane::MAGIC_CONSUMER);
        page.resize(384, 0);
        page[128..136].copy_from_slice(&offered[48..56]);
        page[176] = 1;
        page[256] = 1;
        let consumer = Shown::new(65536, &page, control_seals());
        let mut page = preamble(pelton_lane::MAGIC_RECEIVER);
        page.resize(128, 0);
        page.push(sleep);
        let receiver = Shown::new(65536, &page, control_seals());
        let own_doorbell = good_doorbell();
        raw_send(&socket, &packet(CONSUMER, 0), &[consumer.fd.as_fd(), receiver.fd.as_fd(), own_doorbell.as_fd()]);
        (RawPeer { socket, shown: vec![consumer, receiver, data], own_doorbell, doorbell }, page_of_sender)
    }

    /// Of a sender: writes the header of a message, or of a mark, into the data.
    pub fn put(&self, offset: usize, seq: u32, low: u32) {
        self.shown[1].word(offset).store(u64::from(seq) << 32 | u64::from(low), Ordering::Release);
    }

    pub fn ring(&self) {
        let _ = rustix::io::write(&self.doorbell, &0u64.to_ne_bytes());
    }
}

/// Sends the ready packet and receives the peer's. The connecting side, or a successor, sends first.
fn raw_ready(socket: &OwnedFd) {
    raw_send(socket, &packet(READY, 0), &[]);
    assert_eq!(kind_of(&raw_receive(socket).0), READY);
}

/// Returns whether the result is one that a misbehaving peer may cause.
#[track_caller]
pub fn allowed<T>(answer: pelton::Result<T>, what: &str) -> bool {
    match answer {
        Ok(_) => true,
        Err(Error::Corrupt(_) | Error::Closed { .. } | Error::PeerDied { .. }) => false,
        Err(error) => panic!("{what}: {error}"),
    }
}

/// Calls everything that a receiver offers, once or a few times.
pub fn use_receiver(receiver: &mut Receiver, held: Option<Held>, what: &str) {
    let mut buffer = Vec::new();
    for round in 0..6 {
        let now = Instant::now();
        let _ = match round % 3 {
            0 => allowed(receiver.receive_into_until(&mut buffer, now), what),
            1 => match receiver.try_receive() {
                Ok(Some(mut message)) => {
                    let _ = (message.len(), message.seq(), message.is_redelivered(), message.traceparent());
                    let _ = message.take_descriptors();
                    true
                }
                other => allowed(other, what),
            },
            _ => match receiver.try_receive_batch() {
                Ok(Some(mut batch)) => allowed(batch.next(), what),
                other => allowed(other, what),
            },
        };
        if allowed(receiver.arm(), what) {
            receiver.disarm();
        }
    }
    drop(held);
    let _ = allowed(receiver.try_receive_into(&mut buffer), what);
    assert!(
        buffer.capacity() as u64 <= 2 * receiver.message_bytes_max(),
        "{what}: it allocated more than the largest message"
    );
    let _ = (receiver.counters(), receiver.generation(), receiver.peer(), receiver.traceparent());
}

/// Calls everything that a sender offers, once or a few times.
pub fn use_sender(sender: &mut Sender, what: &str) {
    let traceparent = Traceparent::new([7; 16], [7; 8], 7).expect("no zeros");
    for bytes in [0, 100, 5000, 30_000] {
        let _ = allowed(sender.try_send(&vec![7; bytes]), what);
        let _ = allowed(sender.send_until(&vec![7; bytes], Instant::now()), what);
        let _ = allowed(sender.send_traced(&vec![7; bytes], traceparent, Instant::now()), what);
        if allowed(sender.arm(bytes), what) {
            sender.disarm();
        }
        if let Ok(Some(mut batch)) = sender.try_reserve_batch([bytes, 8]) {
            assert!(batch.push(&vec![7; bytes]) && batch.push(b"12345678"));
            let _ = allowed(batch.commit(), what);
        }
        let _ = allowed(sender.wait_released_until(Instant::now()), what);
    }
    let _ = (sender.unreleased(), sender.counters(), sender.peer(), sender.trim());
}
