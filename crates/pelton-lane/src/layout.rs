//! The shared pages and the record, byte for byte as `spec/layout.md` defines them. Each page has one writer.
//!
//! A record is one word `[seq: u32 | low: u32]` and its payload, 8-byte aligned, contiguous:
//!
//! ```text
//!  63            32 31 30    28 27                      0
//! +----------------+--+-------------------------------- +
//! |      seq       |0 |            length               |  a message of `length` bytes follows
//! |      seq       |1 |  kind   |        value          |  a mark: it belongs to the next message and has its seq
//! +----------------+--+---------+-----------------------+
//! ```
//! `seq` is never 0, so a cleared header is not a record.

use crate::edges::{AtomicU32, AtomicU64, failpoint};
use crate::error::LaneError;

/// The version of everything that two processes must agree on. Processes whose versions differ refuse each other.
pub const WIRE_VERSION: u32 = 2;

/// Bytes of a control segment (a page's file or memfd): a multiple of every page size in use, so offsets are the same
/// on each machine.
pub const SEGMENT_BYTES: u64 = 65536;

/// The smallest capacity of a lane's data, in bytes.
#[cfg(not(loom))]
pub const CAPACITY_MIN: u64 = 4096;
/// The smallest capacity under loom, which explores the states of every word.
#[cfg(loom)]
pub const CAPACITY_MIN: u64 = 64;

/// The largest capacity: a jump names its target in units of 64 bytes in 28 bits.
pub const CAPACITY_MAX: u64 = 1 << 34;

/// While the consumer keeps up, the producer wraps after this many bytes, so that the active part of the lane stays in
/// the L2 cache. Measured with `./run bench stream`; see docs/decisions/0003-window.md.
pub const WINDOW: u64 = 256 * 1024;

/// First word of the producer's segment: "pelton-P" in memory order.
pub const MAGIC_PRODUCER: u64 = u64::from_le_bytes(*b"pelton-P");
/// First word of the consumer's segment.
pub const MAGIC_CONSUMER: u64 = u64::from_le_bytes(*b"pelton-C");
/// First word of the receiver's segment.
pub const MAGIC_RECEIVER: u64 = u64::from_le_bytes(*b"pelton-R");
/// First word of a path channel's own segment.
pub const MAGIC_CHANNEL: u64 = u64::from_le_bytes(*b"pelton-D");
/// The most lanes of one channel.
pub const LANES_MAX: u32 = 1024;

/// The layout in one line. Each segment contains its hash, so two builds with different layouts refuse each other.
pub const LAYOUT_TEXT: &str = "record=seq:u32<<32|low:u32,align 8;mark=1<<31|kind:3|value:28,jump=0,descriptors=1,generation=2,unit=64;\
position=seq:u32<<32|offset/8:u32;sleep=epoch<<3|closed:4|unbarriered:2|armed:1;\
preamble:magic@0:u64,wire_version@8:u32,segment_bytes@12:u32,layout_signature@16:u64;\
producer:capacity@64:u64,message_bytes_max@72:u64,cursors@80:u32,boot_id@96:[u8;16],\
tail@128:u64,floor@136:u64,generation@144:u64,messages@152:u64,bytes@160:u64,waits@168:u64,sleeps@176:u64,wakes_sent@184:u64,depth_max@192:u64,synced@200:u64,\
sleep@256:u64,room_seq@264:u64,state@384:u32,pid@388:u32,fenced@392:u32;\
consumer:head@128:u64,messages@136:u64,bytes@144:u64,waits@152:u64,sleeps@160:u64,wakes_sent@168:u64,generation@176:u64,state@256:u32,pid@260:u32,fenced@264:u32;\
receiver:sleep@128:u64;\
channel:capacity@64:u64,message_bytes_max@72:u64,lanes_max@80:u32,mode@84:u32,boot_id@96:[u8;16],checksum@112:u64,lanes@128:u32";

/// FNV-1a 64 of [`LAYOUT_TEXT`].
pub const LAYOUT_SIGNATURE: u64 = fnv1a(LAYOUT_TEXT.as_bytes());

/// FNV-1a, 64 bits. The layout signature and the checksum of a channel page use it.
pub const fn fnv1a(text: &[u8]) -> u64 {
    let mut hash = 0xcbf29ce484222325u64;
    let mut i = 0;
    while i < text.len() {
        hash = (hash ^ text[i] as u64).wrapping_mul(0x100000001b3);
        i += 1;
    }
    hash
}

/// The start of each segment: its kind, and the version and layout that its creator uses. Written before the segment is
/// shared.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preamble {
    /// The kind of segment.
    pub magic: u64,
    /// [`WIRE_VERSION`] of its creator.
    pub wire_version: u32,
    /// [`SEGMENT_BYTES`].
    pub segment_bytes: u32,
    /// [`LAYOUT_SIGNATURE`] of its creator.
    pub layout_signature: u64,
}

impl Preamble {
    /// The preamble of a segment that this library creates.
    pub const fn new(magic: u64) -> Preamble {
        Preamble {
            magic,
            wire_version: WIRE_VERSION,
            segment_bytes: SEGMENT_BYTES as u32,
            layout_signature: LAYOUT_SIGNATURE,
        }
    }
}

/// A side writes these before it rings the peer's doorbell. The peer uses them only to choose how long it busy-polls:
/// any value is valid.
///
/// | offset | type | field | meaning |
/// |---|---|---|---|
/// | 0 | u32 | processor | the number of the ringing thread's processor, plus 1; 0: unknown |
/// | 8 | u64 | at_ns | the time of the ring on the monotonic clock |
#[repr(C)]
#[derive(Debug)]
pub(crate) struct RingNote {
    processor: AtomicU32,
    _zero: [u8; 4],
    at_ns: AtomicU64,
}

impl RingNote {
    pub(crate) fn new() -> RingNote {
        RingNote { processor: AtomicU32::new(0), _zero: [0; 4], at_ns: AtomicU64::new(0) }
    }

    /// Notes a ring by a thread that runs on `processor`, if known. The page is the caller's own.
    pub(crate) fn note(&self, processor: Option<u32>, at_ns: u64) {
        use core::sync::atomic::Ordering::Relaxed;
        // Relaxed for both: a hint. The doorbell's system calls lie between these stores and the peer's loads anyway.
        self.note_processor(processor);
        failpoint("ring: processor noted");
        self.at_ns.store(at_ns, Relaxed);
        failpoint("ring: time noted");
    }

    /// Notes that the page's owner runs on `processor`, without a ring.
    pub(crate) fn note_processor(&self, processor: Option<u32>) {
        // Relaxed: a hint.
        self.processor
            .store(processor.map_or(0, |number| number.wrapping_add(1)), core::sync::atomic::Ordering::Relaxed);
    }

    pub(crate) fn load(&self) -> LastRing {
        use core::sync::atomic::Ordering::Relaxed;
        LastRing { processor: self.processor.load(Relaxed).checked_sub(1), at_ns: self.at_ns.load(Relaxed) }
    }
}

/// A ring, as the ringing side has noted it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastRing {
    /// The processor of the ringing thread, if known.
    pub processor: Option<u32>,
    /// The time on the monotonic clock.
    pub at_ns: u64,
}

/// The producer's segment. Only the producer writes it; the consumer maps it read-only.
///
/// | offset | type | field | meaning |
/// |---|---|---|---|
/// | 0 | 24 bytes | preamble | written once, before sharing, as are the next four fields |
/// | 64 | u64 | capacity | bytes of data |
/// | 72 | u64 | message_bytes_max | the largest message |
/// | 80 | u32 | cursors | consumers; 1 in this version |
/// | 96 | 16 bytes | boot_id | of the boot that created it (path lanes); zero otherwise |
/// | 128 | position | tail | after the last committed record; may lag by one commit |
/// | 136 | u64 | floor | while tail >= floor, the front (the data from offset 0) is free only once head >= floor |
/// | 144 | u64 | generation | 1 for the first producer, one more for each successor |
/// | 152.. | u64 | messages, bytes, waits, sleeps, wakes_sent, depth_max | statistics, never acted upon |
/// | 200 | position | synced | everything before it is on disk (path lanes) |
/// | 256 | sleep word | sleep | of the producer that waits for free space |
/// | 264 | u64 | room_seq | while the producer sleeps: ring it when the head's seq reaches this |
/// | 384 | u32 | state | [`State`] |
/// | 388 | u32 | pid | for diagnostics only |
/// | 392 | u32 | fenced | 1: a full fence lies between each publication and the load of the peer's sleep word |
/// | 400 | u32, u64 | last_ring | [`LastRing`]: a hint for the receiver's next wait |
#[repr(C, align(128))]
#[derive(Debug)]
pub struct ProducerPage {
    /// The kind and version of this segment.
    pub preamble: Preamble,
    _zero0: [u8; 40],
    /// Bytes of data.
    pub capacity: u64,
    /// The largest message, in bytes.
    pub message_bytes_max: u64,
    /// Consumers of this lane.
    pub cursors: u32,
    _zero1: [u8; 12],
    /// The boot that created it.
    pub boot_id: [u8; 16],
    _zero2: [u8; 16],
    pub(crate) tail: AtomicU64,
    pub(crate) floor: AtomicU64,
    pub(crate) generation: AtomicU64,
    pub(crate) messages: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) waits: AtomicU64,
    pub(crate) sleeps: AtomicU64,
    pub(crate) wakes_sent: AtomicU64,
    pub(crate) depth_max: AtomicU64,
    pub(crate) synced: AtomicU64,
    _zero3: [u8; 48],
    pub(crate) sleep: AtomicU64,
    pub(crate) room_seq: AtomicU64,
    _zero4: [u8; 112],
    pub(crate) state: AtomicU32,
    pub(crate) pid: AtomicU32,
    pub(crate) fenced: AtomicU32,
    _zero5: [u8; 4],
    pub(crate) last_ring: RingNote,
    _zero6: [u8; 96],
}

/// The consumer's segment. Only the consumer writes it; the producer maps it read-only.
///
/// | offset | type | field | meaning |
/// |---|---|---|---|
/// | 0 | 24 bytes | preamble | written once, before sharing |
/// | 128 | position | head | everything before it is released |
/// | 136.. | u64 | messages, bytes, waits, sleeps, wakes_sent | statistics, never acted upon |
/// | 176 | u64 | generation | 1 for the first consumer that uses this page, one more for each successor |
/// | 256 | u32 | state | [`State`] |
/// | 260 | u32 | pid | for diagnostics only |
/// | 264 | u32 | fenced | 1: a full fence lies between each release and the load of the peer's sleep word |
/// | 272 | u32, u64 | last_ring | [`LastRing`]: a hint for the producer's next wait |
#[repr(C, align(128))]
#[derive(Debug)]
pub struct ConsumerPage {
    /// The kind and version of this segment.
    pub preamble: Preamble,
    _zero0: [u8; 104],
    pub(crate) head: AtomicU64,
    pub(crate) messages: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) waits: AtomicU64,
    pub(crate) sleeps: AtomicU64,
    pub(crate) wakes_sent: AtomicU64,
    pub(crate) generation: AtomicU64,
    _zero1: [u8; 72],
    pub(crate) state: AtomicU32,
    pub(crate) pid: AtomicU32,
    pub(crate) fenced: AtomicU32,
    _zero2: [u8; 4],
    pub(crate) last_ring: RingNote,
    _zero3: [u8; 96],
}

/// The receiver's segment: one for all lanes that one receiver serves. Only the receiver writes it.
///
/// | offset | type | field | meaning |
/// |---|---|---|---|
/// | 0 | 24 bytes | preamble | written once, before sharing |
/// | 128 | sleep word | sleep | of the receiver that waits for messages |
#[repr(C, align(128))]
#[derive(Debug)]
pub struct ReceiverPage {
    /// The kind and version of this segment.
    pub preamble: Preamble,
    _zero0: [u8; 104],
    pub(crate) sleep: AtomicU64,
    _zero1: [u8; 120],
}

/// The segment of a path channel, the file `channel` of its directory. Its creator writes it. The process that adds a
/// lane writes `lanes`, under a lock.
///
/// | offset | type | field | meaning |
/// |---|---|---|---|
/// | 0 | 24 bytes | preamble | |
/// | 64 | u64 | capacity | bytes of data of each lane |
/// | 72 | u64 | message_bytes_max | the largest message |
/// | 80 | u32 | lanes_max | the most lanes |
/// | 84 | u32 | mode | permission bits of the directory |
/// | 96 | 16 bytes | boot_id | of the boot that created or recovered it |
/// | 112 | u64 | checksum | FNV-1a of the bytes before it |
/// | 128 | u32 | lanes | number of existing lanes |
/// | 136 | u64 | features_required | bits of the features that each opener must know |
/// | 144 | u64 | features_optional | bits of the features that an opener may ignore |
#[repr(C, align(128))]
#[derive(Debug)]
pub struct ChannelPage {
    /// The kind and version of this segment.
    pub preamble: Preamble,
    _zero0: [u8; 40],
    /// Bytes of data of each lane.
    pub capacity: u64,
    /// The largest message, in bytes.
    pub message_bytes_max: u64,
    /// The most lanes.
    pub lanes_max: u32,
    /// Permission bits of the directory.
    pub mode: u32,
    _zero1: [u8; 8],
    /// The boot that created or recovered it.
    pub boot_id: [u8; 16],
    /// FNV-1a of the bytes before it.
    pub checksum: u64,
    _zero2: [u8; 8],
    /// Number of existing lanes.
    pub lanes: AtomicU32,
    _zero3: [u8; 4],
    /// Bits of the features that each opener must know.
    pub features_required: u64,
    /// Bits of the features that an opener may ignore.
    pub features_optional: u64,
    _zero4: [u8; 104],
}

impl ChannelPage {
    /// The number of bytes that the checksum covers.
    pub const CHECKED_BYTES: usize = 112;
}

/// Statistics of either side, for `pelton` to report. No code acts on them.
macro_rules! counter {
    ($page:ident: $($(#[$doc:meta])* $name:ident),* $(,)?) => {
        impl $page {
            $($(#[$doc])* pub fn $name(&self) -> u64 {
                // Relaxed: a statistic; it orders no other access.
                self.$name.load(core::sync::atomic::Ordering::Relaxed)
            })*
        }
    };
}
counter!(ProducerPage:
    /// Messages committed by this producer.
    messages,
    /// Payload bytes committed by this producer.
    bytes,
    /// Sends that found no free space and waited.
    waits,
    /// Sleeps of the producer.
    sleeps,
    /// Rings of the producer for the receiver.
    wakes_sent,
    /// The largest number of unreleased messages that the producer found when it loaded the head.
    depth_max,
);
counter!(ConsumerPage:
    /// Messages released by this consumer.
    messages,
    /// Payload bytes released by this consumer.
    bytes,
    /// Receives that found no message and waited.
    waits,
    /// Sleeps of the receiver on this lane.
    sleeps,
    /// Rings of the consumer for the producer.
    wakes_sent,
);

#[cfg(not(loom))]
const _: () = {
    use core::mem::{offset_of, size_of};
    assert!(size_of::<ProducerPage>() == 512);
    assert!(offset_of!(ProducerPage, preamble.magic) == 0);
    assert!(offset_of!(ProducerPage, preamble.wire_version) == 8);
    assert!(offset_of!(ProducerPage, preamble.segment_bytes) == 12);
    assert!(offset_of!(ProducerPage, preamble.layout_signature) == 16);
    assert!(offset_of!(ProducerPage, capacity) == 64);
    assert!(offset_of!(ProducerPage, message_bytes_max) == 72);
    assert!(offset_of!(ProducerPage, cursors) == 80);
    assert!(offset_of!(ProducerPage, boot_id) == 96);
    assert!(offset_of!(ProducerPage, tail) == 128);
    assert!(offset_of!(ProducerPage, floor) == 136);
    assert!(offset_of!(ProducerPage, generation) == 144);
    assert!(offset_of!(ProducerPage, messages) == 152);
    assert!(offset_of!(ProducerPage, bytes) == 160);
    assert!(offset_of!(ProducerPage, waits) == 168);
    assert!(offset_of!(ProducerPage, sleeps) == 176);
    assert!(offset_of!(ProducerPage, wakes_sent) == 184);
    assert!(offset_of!(ProducerPage, depth_max) == 192);
    assert!(offset_of!(ProducerPage, synced) == 200);
    assert!(offset_of!(ProducerPage, sleep) == 256);
    assert!(offset_of!(ProducerPage, room_seq) == 264);
    assert!(offset_of!(ProducerPage, state) == 384);
    assert!(offset_of!(ProducerPage, pid) == 388);
    assert!(offset_of!(ProducerPage, fenced) == 392);
    assert!(offset_of!(ProducerPage, last_ring.processor) == 400);
    assert!(offset_of!(ProducerPage, last_ring.at_ns) == 408);
    assert!(size_of::<ConsumerPage>() == 384);
    assert!(offset_of!(ConsumerPage, head) == 128);
    assert!(offset_of!(ConsumerPage, messages) == 136);
    assert!(offset_of!(ConsumerPage, bytes) == 144);
    assert!(offset_of!(ConsumerPage, waits) == 152);
    assert!(offset_of!(ConsumerPage, sleeps) == 160);
    assert!(offset_of!(ConsumerPage, wakes_sent) == 168);
    assert!(offset_of!(ConsumerPage, generation) == 176);
    assert!(offset_of!(ConsumerPage, state) == 256);
    assert!(offset_of!(ConsumerPage, pid) == 260);
    assert!(offset_of!(ConsumerPage, fenced) == 264);
    assert!(offset_of!(ConsumerPage, last_ring.processor) == 272);
    assert!(offset_of!(ConsumerPage, last_ring.at_ns) == 280);
    assert!(size_of::<ReceiverPage>() == 256);
    assert!(offset_of!(ReceiverPage, sleep) == 128);
    assert!(size_of::<ChannelPage>() == 256);
    assert!(offset_of!(ChannelPage, capacity) == 64);
    assert!(offset_of!(ChannelPage, message_bytes_max) == 72);
    assert!(offset_of!(ChannelPage, lanes_max) == 80);
    assert!(offset_of!(ChannelPage, mode) == 84);
    assert!(offset_of!(ChannelPage, boot_id) == 96);
    assert!(offset_of!(ChannelPage, checksum) == 112);
    assert!(offset_of!(ChannelPage, lanes) == 128);
    assert!(offset_of!(ChannelPage, features_required) == 136);
    assert!(offset_of!(ChannelPage, features_optional) == 144);
};

impl ProducerPage {
    /// A new page, not yet shared. The caller has checked `capacity` by [`capacity_is_valid`], and `message_bytes_max`
    /// is at most [`message_bytes_limit`].
    pub fn new(capacity: u64, message_bytes_max: u64, generation: u64, pid: u32) -> ProducerPage {
        ProducerPage {
            preamble: Preamble::new(MAGIC_PRODUCER),
            _zero0: [0; 40],
            capacity,
            message_bytes_max,
            cursors: 1,
            _zero1: [0; 12],
            boot_id: [0; 16],
            _zero2: [0; 16],
            tail: AtomicU64::new(Position::START.pack()),
            floor: AtomicU64::new(0),
            generation: AtomicU64::new(generation),
            messages: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            waits: AtomicU64::new(0),
            sleeps: AtomicU64::new(0),
            wakes_sent: AtomicU64::new(0),
            depth_max: AtomicU64::new(0),
            synced: AtomicU64::new(Position::START.pack()),
            _zero3: [0; 48],
            sleep: AtomicU64::new(0),
            room_seq: AtomicU64::new(0),
            _zero4: [0; 112],
            state: AtomicU32::new(State::Open as u32),
            pid: AtomicU32::new(pid),
            fenced: AtomicU32::new(0),
            _zero5: [0; 4],
            last_ring: RingNote::new(),
            _zero6: [0; 96],
        }
    }

    /// Starts a successor's generation in a page that its predecessor used, before the successor attaches. The caller
    /// must hold the role.
    pub fn start_generation(&self, pid: u32) {
        let relaxed = core::sync::atomic::Ordering::Relaxed;
        failpoint("producer begins: before");
        self.pid.store(pid, relaxed);
        failpoint("producer begins: pid");
        self.state.store(State::Open as u32, relaxed);
        failpoint("producer begins: state");
        // Last: a process that loads the new generation also sees the open state. [close]
        self.generation.store(self.generation.load(relaxed).wrapping_add(1), crate::edges::CLOSE.store());
        failpoint("producer begins: generation");
    }

    /// 1 for the lane's first producer, one more for each successor.
    pub fn generation(&self) -> u64 {
        self.generation.load(crate::edges::CLOSE.load()) // [close]
    }

    /// Its process, for diagnostics only.
    pub fn pid(&self) -> u32 {
        self.pid.load(core::sync::atomic::Ordering::Relaxed)
    }

    /// The position of the last [`ProducerPage::set_synced`], unchecked: everything before it is on disk.
    pub fn synced(&self) -> Position {
        Position::unpack(self.synced.load(core::sync::atomic::Ordering::Relaxed))
    }

    /// Stores that everything before `position` is on disk. The caller must hold the role.
    pub fn set_synced(&self, position: Position) {
        self.synced.store(position.pack(), core::sync::atomic::Ordering::Relaxed);
        failpoint("synced");
    }

    /// The producer's last ring.
    pub fn last_ring(&self) -> LastRing {
        self.last_ring.load()
    }

    /// Whether the producer has closed.
    pub fn is_closed(&self) -> bool {
        self.state.load(crate::edges::CLOSE.load()) == State::Closed as u32 // [close]
    }

    /// Whether the producer fences each publication. To stop, it clears `fenced`, then checks for a sleeper that relied
    /// on its fences.
    pub fn is_fenced(&self) -> bool {
        self.fenced.load(crate::edges::FENCED.load()) == 1 // [fenced]
    }

    /// The stored tail and floor, unchecked: for a successor, and for inspection.
    pub fn tail_and_floor(&self) -> (Position, u64) {
        // Relaxed: a successor detected the death by system calls, which order this load. Inspection needs no order.
        let relaxed = core::sync::atomic::Ordering::Relaxed;
        (Position::unpack(self.tail.load(relaxed)), self.floor.load(relaxed))
    }
}

impl ConsumerPage {
    /// The consumer's last ring.
    pub fn last_ring(&self) -> LastRing {
        self.last_ring.load()
    }

    /// A new page, not yet shared.
    pub fn new(head: Position, generation: u64, pid: u32) -> ConsumerPage {
        ConsumerPage {
            preamble: Preamble::new(MAGIC_CONSUMER),
            _zero0: [0; 104],
            head: AtomicU64::new(head.pack()),
            messages: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            waits: AtomicU64::new(0),
            sleeps: AtomicU64::new(0),
            wakes_sent: AtomicU64::new(0),
            generation: AtomicU64::new(generation),
            _zero1: [0; 72],
            state: AtomicU32::new(State::Open as u32),
            pid: AtomicU32::new(pid),
            fenced: AtomicU32::new(0),
            _zero2: [0; 4],
            last_ring: RingNote::new(),
            _zero3: [0; 96],
        }
    }

    /// As [`ProducerPage::start_generation`], for a consumer.
    pub fn start_generation(&self, pid: u32) {
        let relaxed = core::sync::atomic::Ordering::Relaxed;
        failpoint("consumer begins: before");
        self.pid.store(pid, relaxed);
        failpoint("consumer begins: pid");
        self.state.store(State::Open as u32, relaxed);
        failpoint("consumer begins: state");
        // Last: a process that loads the new generation also sees the open state. [close]
        self.generation.store(self.generation.load(relaxed).wrapping_add(1), crate::edges::CLOSE.store());
        failpoint("consumer begins: generation");
    }

    /// 1 for the first consumer that uses this page, one more for each successor.
    pub fn generation(&self) -> u64 {
        self.generation.load(crate::edges::CLOSE.load()) // [close]
    }

    /// Its process, for diagnostics only.
    pub fn pid(&self) -> u32 {
        self.pid.load(core::sync::atomic::Ordering::Relaxed)
    }

    /// Whether the consumer has closed.
    pub fn is_closed(&self) -> bool {
        self.state.load(crate::edges::CLOSE.load()) == State::Closed as u32 // [close]
    }

    /// Whether the consumer fences each release. To stop, it clears `fenced`, then checks for a sleeper that relied on
    /// its fences.
    pub fn is_fenced(&self) -> bool {
        self.fenced.load(crate::edges::FENCED.load()) == 1 // [fenced]
    }

    /// The head, unchecked.
    pub fn head(&self) -> Position {
        Position::unpack(self.head.load(crate::edges::RELEASE.load()))
    }
}

impl ReceiverPage {
    /// A new page, not yet shared.
    pub fn new() -> ReceiverPage {
        ReceiverPage {
            preamble: Preamble::new(MAGIC_RECEIVER),
            _zero0: [0; 104],
            sleep: AtomicU64::new(0),
            _zero1: [0; 120],
        }
    }
}

impl Default for ReceiverPage {
    fn default() -> ReceiverPage {
        ReceiverPage::new()
    }
}

/// Whether a side has closed. A peer detects an absent or dead side by its socket or lock, not by this word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum State {
    /// In use.
    Open = 1,
    /// Closed on purpose: the producer sends, or the consumer receives, no further message.
    Closed = 2,
}

/// An offset in the lane and the number of the record there: the content of tail and head. They share one word, so a
/// crash cannot separate them. `[seq: u32 | offset / 8: u32]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Bytes from the start of the data; a multiple of 8.
    pub offset: u64,
    /// The number of the record at this offset, which may still be missing.
    pub seq: u32,
}

impl Position {
    /// The start of a new lane.
    pub const START: Position = Position { offset: 0, seq: 1 };

    /// The position as a word.
    #[inline(always)]
    pub const fn pack(self) -> u64 {
        (self.seq as u64) << 32 | self.offset >> 3
    }

    /// The position that a word contains.
    #[inline(always)]
    pub const fn unpack(word: u64) -> Position {
        Position { offset: (word & 0xffff_ffff) << 3, seq: (word >> 32) as u32 }
    }

    /// Checks that the position lies inside data of this `capacity` and has a number. `what` names it in the error.
    pub(crate) fn check(self, what: &'static str, capacity: u64) -> Result<(), LaneError> {
        if self.offset + 8 > capacity {
            return Err(LaneError::Corrupt { what, found: self.offset, wanted: capacity - 8 });
        }
        if self.seq == 0 {
            return Err(LaneError::Corrupt { what, found: self.pack(), wanted: 1 << 32 });
        }
        Ok(())
    }

    /// The number of records between `earlier` and this position.
    #[inline]
    pub const fn since(self, earlier: Position) -> u64 {
        let steps = self.seq.wrapping_sub(earlier.seq);
        // Sequence numbers skip 0, so a plain difference across the wrap-around counts one record too many.
        (if self.seq < earlier.seq { steps.wrapping_sub(1) } else { steps }) as u64
    }
}

/// The number after `seq`: modulo 2^32, but never 0.
#[inline(always)]
pub const fn seq_after(seq: u32) -> u32 {
    let next = seq.wrapping_add(1);
    if next == 0 { 1 } else { next }
}

/// Bytes that a message of `bytes` occupies: its header and its payload, rounded up to 8.
#[inline(always)]
pub const fn record_bytes(bytes: u64) -> u64 {
    (bytes + 15) & !7
}

/// The largest message that an empty lane of this capacity always takes: half of the capacity less 32 bytes, and below
/// 2 GiB because the length has 31 bits.
pub const fn message_bytes_limit(capacity: u64) -> u64 {
    let half = (capacity / 2).saturating_sub(32);
    if half > 0x7fff_fff0 { 0x7fff_fff0 } else { half }
}

/// As [`message_bytes_limit`], with a mark with a trace position before the message.
pub const fn traced_message_bytes_limit(capacity: u64) -> u64 {
    message_bytes_limit(capacity.saturating_sub(2 * TRACE_MARK_BYTES))
}

/// Whether this capacity is valid: a multiple of 64 between the bounds.
pub const fn capacity_is_valid(capacity: u64) -> bool {
    capacity >= CAPACITY_MIN && capacity <= CAPACITY_MAX && capacity.is_multiple_of(64)
}

/// The flag of a mark in `low`; three bits of kind and 28 of value follow.
pub(crate) const MARK: u32 = 1 << 31;
/// The record continues at `value * 64`.
pub(crate) const MARK_JUMP: u32 = 0;
/// `value` descriptors travel with the message, over the socket.
pub(crate) const MARK_DESCRIPTORS: u32 = 1;
/// The message is the first of a new producer; `value` is its generation modulo 2^28.
pub(crate) const MARK_GENERATION: u32 = 2;

/// The message's position in a distributed trace follows: `value`, always [`TRACE_BYTES`], bytes between this header
/// and the next one.
pub(crate) const MARK_TRACE: u32 = 3;
/// Bytes of a position in a distributed trace. This crate does not interpret them.
pub const TRACE_BYTES: usize = 32;
/// Bytes of a mark with such a position: its header and the position.
pub(crate) const TRACE_MARK_BYTES: u64 = 8 + TRACE_BYTES as u64;

/// The low half of a mark's header.
pub(crate) const fn mark(kind: u32, value: u32) -> u32 {
    MARK | kind << 28 | (value & 0x0fff_ffff)
}

/// A header word.
#[inline(always)]
pub(crate) const fn header(seq: u32, low: u32) -> u64 {
    (seq as u64) << 32 | low as u64
}
