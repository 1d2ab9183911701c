//! The packets of the handshake, and the packet that carries descriptors. `spec/protocol.md` has their layout.

use crate::error::Error;
use crate::memory::Limits;
use pelton_lane::{LAYOUT_SIGNATURE, WIRE_VERSION};

/// Bytes of the largest packet.
pub(crate) const PACKET_BYTES: usize = 512;
pub(crate) const FIXED_BYTES: usize = 80;

pub(crate) const HELLO: u32 = 1;
pub(crate) const PRODUCER: u32 = 2;
pub(crate) const CONSUMER: u32 = 3;
pub(crate) const READY: u32 = 4;
pub(crate) const REFUSED: u32 = 5;
pub(crate) const DESCRIPTORS: u32 = 6;

/// The role of a side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Sender = 1,
    Receiver = 2,
    /// The client of a link of two lanes: sends requests, receives replies.
    Client = 3,
    Service = 4,
    /// One sender of many receivers.
    Publisher = 5,
    Subscriber = 6,
}

impl Role {
    /// The role that the peer must have.
    pub(crate) fn other(self) -> Role {
        match self {
            Role::Sender => Role::Receiver,
            Role::Receiver => Role::Sender,
            Role::Client => Role::Service,
            Role::Service => Role::Client,
            Role::Publisher => Role::Subscriber,
            Role::Subscriber => Role::Publisher,
        }
    }

    pub(crate) fn word(role: u32) -> String {
        match role {
            1 => "sender".to_owned(),
            2 => "receiver".to_owned(),
            3 => "client".to_owned(),
            4 => "service".to_owned(),
            5 => "publisher".to_owned(),
            6 => "subscriber".to_owned(),
            role => format!("peer of role {role}"),
        }
    }
}

/// A packet of the handshake. Fields that a kind does not use are 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packet {
    pub(crate) kind: u32,
    pub(crate) wire_version: u32,
    pub(crate) layout_signature: u64,
    pub(crate) role: u32,
    pub(crate) holds: u32,
    pub(crate) capacity: u64,
    pub(crate) message_bytes_max: u64,
    pub(crate) generation: u64,
    pub(crate) head: u64,
    pub(crate) tail: u64,
    pub(crate) floor: u64,
    pub(crate) seq: u32,
}

impl Packet {
    pub(crate) fn new(kind: u32) -> Packet {
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

    pub(crate) fn hello(role: Role, holds: bool, takes: Limits) -> Packet {
        let Limits { lane_bytes: capacity, message_bytes: message_bytes_max } = takes;
        Packet { role: role as u32, holds: holds.into(), capacity, message_bytes_max, ..Packet::new(HELLO) }
    }

    /// In HELLO: the features that the side requires, as bits.
    pub(crate) fn required(&self) -> u64 {
        self.floor
    }

    /// In HELLO: the features that the side has, as bits.
    pub(crate) fn offered(&self) -> u64 {
        self.tail
    }

    /// In HELLO: the side's limits for the other.
    pub(crate) fn takes(&self) -> Limits {
        Limits { lane_bytes: self.capacity, message_bytes: self.message_bytes_max }
    }

    /// The same fields about the lane, in a packet of another kind.
    pub(crate) fn as_kind(&self, kind: u32) -> Packet {
        Packet { kind, ..*self }
    }

    pub(crate) fn encode(&self) -> [u8; FIXED_BYTES] {
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

    pub(crate) fn decode(bytes: &[u8]) -> Option<Packet> {
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

/// The feature that a request may begin with a traceparent.
pub const TRACED_REQUESTS: u64 = 1 << 0;
/// The feature that a message of a channel may come with a traceparent. A sender with the option `traced` requires it.
pub(crate) const TRACED_MESSAGES: u64 = 1 << 1;
/// The feature that a channel in a directory is a broadcast. Only its file `channel` requires it.
pub(crate) const BROADCAST_CHANNEL: u64 = 1 << 2;
/// Bits of the features that this version has in packets.
pub(crate) const FEATURES: u64 = TRACED_REQUESTS | TRACED_MESSAGES;

/// This version, in packets and texts.
pub(crate) const VERSION_TEXT: &str = concat!("pelton ", env!("CARGO_PKG_VERSION"));
pub(crate) const ENTRY_VERSION: u16 = 1;
/// Types from here on must be known to the peer.
pub(crate) const ENTRY_REQUIRED: u16 = 0x8000;

pub(crate) fn entry(kind: u16, value: &[u8]) -> Vec<u8> {
    let mut bytes = [kind.to_le_bytes(), (value.len() as u16).to_le_bytes()].concat();
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// The entries of a HELLO that this version knows.
#[derive(Debug, Default)]
pub(crate) struct Entries {
    version: Option<String>,
    pub(crate) problem: Option<String>,
}

impl Entries {
    /// Reads all entries before it returns the first problem, because the text of the problem has the peer's version.
    pub(crate) fn read(mut bytes: &[u8]) -> Entries {
        let mut found = Entries::default();
        while !bytes.is_empty() {
            let word = |at: usize| bytes.get(at..at + 2).map(|two| u16::from_le_bytes([two[0], two[1]]));
            let (Some(kind), Some(len)) = (word(0), word(2)) else {
                found.note(format!("half an entry came: {} bytes, wanted at least 4", bytes.len()));
                break;
            };
            let end = 4 + usize::from(len).next_multiple_of(4);
            let Some(value) = bytes.get(4..end).map(|padded| &padded[..usize::from(len)]) else {
                found.note(format!("entry {kind} needs {end} bytes, {} are left of the packet", bytes.len()));
                break;
            };
            match kind {
                ENTRY_VERSION if found.version.is_some() => found.note(format!("entry {kind} came twice")),
                ENTRY_VERSION => found.version = Some(printable(value)),
                ENTRY_REQUIRED.. => found.note(format!("entry {kind:#06x} is not known to {VERSION_TEXT}")),
                _ => {}
            }
            bytes = &bytes[end..];
        }
        found
    }

    pub(crate) fn note(&mut self, problem: String) {
        self.problem.get_or_insert(problem);
    }

    pub(crate) fn version(&self) -> &str {
        self.version.as_deref().unwrap_or("a version that it does not say")
    }
}

/// The packet that carries the descriptors of message `seq`.
pub(crate) fn descriptors_packet(seq: u32) -> [u8; FIXED_BYTES] {
    Packet { seq, ..Packet::new(DESCRIPTORS) }.encode()
}

/// The message that a packet of descriptors is for.
pub(crate) fn descriptors_of(packet: &[u8]) -> Option<u32> {
    Packet::decode(packet).filter(|packet| packet.kind == DESCRIPTORS).map(|packet| packet.seq)
}

/// The reason in a refusal.
pub(crate) fn refusal(bytes: &[u8]) -> Option<Error> {
    let packet = Packet::decode(bytes).filter(|packet| packet.kind == REFUSED);
    packet.map(|_| Error::Refused(printable(&bytes[FIXED_BYTES..])))
}

/// A peer's text, made safe for a terminal.
pub(crate) fn printable(text: &[u8]) -> String {
    String::from_utf8_lossy(text).chars().filter(|c| !c.is_control()).collect()
}
