//! The header before each request and each reply in its record: the bytes of `spec/call.md`. The checks of a peer's
//! header that need no table of calls are here too.

use pelton_channel::raw::{Kept, LINK_BYTES_MIN};
use pelton_channel::{Error, Result};
use pelton_os::monotonic_ns;
use std::time::{Duration, Instant};

/// Calls that a client has in flight at most.
pub(crate) const CALLS_MAX: u32 = 1024;
pub(crate) const HEADER_BYTES: usize = 24;
/// The message continues in a later record.
const MORE: u64 = 1 << 8;
/// The message began in an earlier record.
const CONTINUED: u64 = 1 << 9;
/// A traceparent is before the payload.
const TRACED: u64 = 1 << 10;
/// Its bytes.
pub(crate) const TRACEPARENT_BYTES: usize = 32;
// The first piece of a request has at least a byte after the traceparent, in the smallest lane too.
const _: () = assert!(LINK_BYTES_MIN as usize > HEADER_BYTES + TRACEPARENT_BYTES);
/// The size of a piece of a large message. A guess: this side writes one piece while the other still reads the piece
/// before, and both stay in a cache.
const PIECE_BYTES: usize = 64 << 10;
/// Most bytes that are reserved for a message of which one piece has come.
const EXPECTED_MAX: usize = 16 << 20;
/// The library's code of a FAILED: the service's memory for clients is full.
pub(crate) const FAILED_MEMORY: u32 = 0xffff_0001;

/// The kind of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Request = 1,
    Notify = 2,
    Cancel = 3,
    Reply = 16,
    Part = 17,
    End = 18,
    Failed = 19,
    Abandoned = 20,
    Draining = 21,
    Returned = 22,
    Drained = 23,
}

/// The side that has written a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    Client,
    Service,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) id: u64,
    pub(crate) kind: Kind,
    pub(crate) more: bool,
    pub(crate) continued: bool,
    /// A traceparent is before the payload.
    pub(crate) traced: bool,
    /// Of FAILED: the handler's code.
    pub(crate) code: u32,
    /// Of REQUEST: nanoseconds of CLOCK_MONOTONIC; 0: none.
    pub(crate) deadline: u64,
}

impl Kind {
    /// Whether it ends its call.
    pub(crate) fn is_final(self) -> bool {
        matches!(self, Kind::Reply | Kind::End | Kind::Failed | Kind::Abandoned | Kind::Returned)
    }

    fn by(self) -> By {
        if matches!(self, Kind::Request | Kind::Notify | Kind::Cancel) { By::Client } else { By::Service }
    }

    fn has_payload(self) -> bool {
        !matches!(self, Kind::Cancel | Kind::End | Kind::Abandoned | Kind::Draining | Kind::Returned | Kind::Drained)
    }

    /// Whether it belongs to a call, and not to the link.
    fn has_id(self) -> bool {
        !matches!(self, Kind::Notify | Kind::Draining | Kind::Drained)
    }
}

/// The slot of a call, which is a part of its id.
pub(crate) fn slot_of(id: u64) -> u32 {
    id as u32
}

pub(crate) fn generation_of(id: u64) -> u32 {
    (id >> 32) as u32
}

impl Header {
    pub(crate) fn new(kind: Kind, id: u64) -> Header {
        Header { id, kind, more: false, continued: false, traced: false, code: 0, deadline: 0 }
    }

    pub(crate) fn words(&self) -> [u64; 3] {
        let flag = |is_set: bool, flag: u64| if is_set { flag } else { 0 };
        let flags = flag(self.more, MORE) | flag(self.continued, CONTINUED) | flag(self.traced, TRACED);
        [self.id, self.kind as u64 | flags | u64::from(self.code) << 32, self.deadline]
    }

    /// Bytes between this header and the payload.
    pub(crate) fn prefix_bytes(&self) -> usize {
        if self.traced { TRACEPARENT_BYTES } else { 0 }
    }

    /// The size of the message with this header; `body` is what follows the header.
    pub(crate) fn size_of(&self, body: &[u8]) -> Size {
        Size { bytes: body.len() - self.prefix_bytes(), is_traced: self.traced }
    }

    /// Whether these words are a valid header of a whole message of that kind, as most are. If not: [`Header::read`].
    #[inline(always)]
    pub(crate) fn is_plain(words: &[u64; 3], kind: Kind) -> bool {
        let [id, word, deadline] = *words;
        word == kind as u64
            && slot_of(id) < CALLS_MAX
            && generation_of(id) != 0
            && (deadline == 0 || kind == Kind::Request)
    }

    /// Checks a header of the peer's, before so many bytes: a traceparent and a payload. An error is the rule that it
    /// breaks.
    pub(crate) fn read(words: [u64; 3], bytes: u64, by: By) -> std::result::Result<Header, &'static str> {
        let [id, word, deadline] = words;
        let kind = match word as u8 {
            1 => Kind::Request,
            2 => Kind::Notify,
            3 => Kind::Cancel,
            16 => Kind::Reply,
            17 => Kind::Part,
            18 => Kind::End,
            19 => Kind::Failed,
            20 => Kind::Abandoned,
            21 => Kind::Draining,
            22 => Kind::Returned,
            23 => Kind::Drained,
            _ => return Err("kind"),
        };
        let (more, continued, traced) = (word & MORE != 0, word & CONTINUED != 0, word & TRACED != 0);
        let header = Header { id, kind, more, continued, traced, code: (word >> 32) as u32, deadline };
        if kind.by() != by {
            return Err("kind");
        }
        let may_be_traced = kind == Kind::Request && !continued;
        if word & 0xffff_ff00 & !(MORE | CONTINUED | TRACED) != 0 || traced && !may_be_traced {
            return Err("flags");
        }
        let is_id = if kind.has_id() { slot_of(id) < CALLS_MAX && generation_of(id) != 0 } else { id == 0 };
        if !is_id {
            return Err("id");
        }
        if header.code != 0 && (kind != Kind::Failed || continued) {
            return Err("code");
        }
        if deadline != 0 && (kind != Kind::Request || continued) {
            return Err("deadline");
        }
        let Some(payload_bytes) = bytes.checked_sub(header.prefix_bytes() as u64) else { return Err("length") };
        // Each piece has a byte of payload, so that a message in pieces ends.
        let fits = match kind.has_payload() {
            true => payload_bytes > 0 || !(more || continued),
            false => payload_bytes == 0 && !more && !continued,
        };
        if !fits {
            return Err("length");
        }
        Ok(header)
    }
}

/// The size of a request or a notification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size {
    /// Of the payload, which alone counts towards the largest request.
    pub(crate) bytes: usize,
    /// A traceparent is before the payload, for a service that takes one.
    pub(crate) is_traced: bool,
}

impl Size {
    pub(crate) fn untraced(bytes: usize) -> Size {
        Size { bytes, is_traced: false }
    }
}

/// A message of which some pieces have come.
#[derive(Debug)]
pub(crate) struct Assembly {
    pub(crate) header: Header,
    pub(crate) bytes: Vec<u8>,
    /// Bytes that have come, stored or not.
    pub(crate) length: u64,
    /// Those that `kept` counts, which are at least as many.
    counted: u64,
    /// Its part of the memory, if that has a limit.
    pub(crate) kept: Option<Kept>,
    /// The memory was full: the bytes are not stored.
    pub(crate) is_dropped: bool,
}

impl Assembly {
    /// `expected` is the size of the message before it: a guess. If there is memory for four times as much, it is
    /// reserved and counted, since otherwise each piece may move those before it.
    pub(crate) fn new(header: Header, kept: Option<Kept>, expected: usize) -> Assembly {
        let mut assembly = Assembly { header, bytes: Vec::new(), length: 0, counted: 0, kept, is_dropped: false };
        let expected = expected.min(EXPECTED_MAX);
        if assembly.kept.as_mut().is_none_or(|kept| kept.grow_if_ample(expected as u64)) {
            assembly.counted = expected as u64;
            // If it fails, the pieces that come decide.
            let _ = assembly.bytes.try_reserve(expected);
        }
        assembly
    }

    /// Counts the bytes of the next piece. Returns whether to store them.
    pub(crate) fn grow(&mut self, bytes: u64) -> bool {
        self.length += bytes;
        let more = self.length.saturating_sub(self.counted);
        self.is_dropped |= !self.kept.as_mut().is_none_or(|kept| kept.grow(more));
        self.counted += more;
        if self.is_dropped {
            (self.bytes, self.kept) = (Vec::new(), None);
        }
        !self.is_dropped
    }

    /// The whole message, without much memory beyond it.
    pub(crate) fn into_bytes(mut self) -> Vec<u8> {
        if self.bytes.capacity() / 2 > self.bytes.len() {
            self.bytes.shrink_to_fit();
        }
        self.bytes
    }

    /// Checks whether a record with this header may come now: each side writes one message in pieces at a time.
    pub(crate) fn check(this: &Option<Assembly>, header: &Header) -> std::result::Result<(), &'static str> {
        match this {
            Some(of) if header.continued && (of.header.id, of.header.kind) != (header.id, header.kind) => Err("piece"),
            None if header.continued => Err("piece"),
            Some(_) if header.more && !header.continued => Err("piece"),
            _ => Ok(()),
        }
    }
}

/// What is still to be written of a message, in one record or in several.
#[derive(Debug)]
pub(crate) struct Pieces<'a> {
    header: Header,
    left: &'a [u8],
    /// A record of it was written.
    is_begun: bool,
}

impl<'a> Pieces<'a> {
    pub(crate) fn new(header: Header, payload: &'a [u8]) -> Pieces<'a> {
        Pieces { header, left: payload, is_begun: false }
    }

    /// The size of the next record's payload, in a lane with this largest message.
    pub(crate) fn next_bytes(&self, message_bytes_max: u64) -> usize {
        let most = (message_bytes_max as usize).saturating_sub(HEADER_BYTES).max(1);
        if self.left.len() <= most && !self.is_begun {
            self.left.len()
        } else {
            self.left.len().min(most).min(PIECE_BYTES)
        }
    }

    /// The next record, with a payload of `bytes`.
    pub(crate) fn next(&self, bytes: usize) -> ([u64; 3], &'a [u8]) {
        let (continued, more) = (self.is_begun, bytes < self.left.len());
        let header = match continued {
            true => Header::new(self.header.kind, self.header.id),
            false => self.header,
        };
        (Header { more, continued, ..header }.words(), &self.left[..bytes])
    }

    pub(crate) fn is_begun(&self) -> bool {
        self.is_begun
    }

    /// The record with these bytes was written. Returns whether it was the last.
    pub(crate) fn advance(&mut self, bytes: usize) -> bool {
        self.left = &self.left[bytes..];
        self.is_begun = true;
        self.left.is_empty()
    }
}

/// A message that waits for space in a lane, or the rest of one.
#[derive(Debug)]
pub(crate) struct Outgoing {
    header: Header,
    bytes: Vec<u8>,
    written: usize,
    is_begun: bool,
    /// Its part of the memory, if that has a limit.
    _kept: Option<Kept>,
}

impl Outgoing {
    pub(crate) fn new(header: Header, bytes: Vec<u8>, kept: Option<Kept>) -> Outgoing {
        Outgoing { header, bytes, written: 0, is_begun: false, _kept: kept }
    }

    /// A copy of the rest of a message.
    pub(crate) fn of_rest(rest: &Pieces<'_>, kept: Option<Kept>) -> Outgoing {
        Outgoing { is_begun: rest.is_begun, ..Outgoing::new(rest.header, rest.left.to_vec(), kept) }
    }

    pub(crate) fn rest(&self) -> Pieces<'_> {
        Pieces { header: self.header, left: &self.bytes[self.written..], is_begun: self.is_begun }
    }

    /// The record with these bytes was written. Returns whether it was the last.
    pub(crate) fn advance(&mut self, bytes: usize) -> bool {
        self.written += bytes;
        self.is_begun = true;
        self.written == self.bytes.len()
    }
}

/// Checks a message against the largest that its receiver takes.
pub(crate) fn check_size(bytes: usize, bytes_max: u64) -> Result<()> {
    match bytes as u64 > bytes_max {
        true => Err(Error::TooLarge { bytes: bytes as u64, bytes_max }),
        false => Ok(()),
    }
}

/// One moment on both clocks. It converts deadlines between processes without reading a clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    instant: Instant,
    ns: u64,
}

impl Clock {
    pub(crate) fn new() -> Clock {
        Clock { instant: Instant::now(), ns: monotonic_ns() }
    }

    /// Never 0, which means no deadline.
    pub(crate) fn ns_of(&self, deadline: Instant) -> u64 {
        let ns = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        let later = ns(deadline.saturating_duration_since(self.instant));
        let earlier = ns(self.instant.saturating_duration_since(deadline));
        self.ns.saturating_add(later).saturating_sub(earlier).max(1)
    }

    /// `None` for no deadline, and for one that an `Instant` cannot represent.
    pub(crate) fn instant_of(&self, ns: u64) -> Option<Instant> {
        match ns {
            0 => None,
            ns if ns >= self.ns => self.instant.checked_add(Duration::from_nanos(ns - self.ns)),
            ns => self.instant.checked_sub(Duration::from_nanos(self.ns - ns)),
        }
    }
}
