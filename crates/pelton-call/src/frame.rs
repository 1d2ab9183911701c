//! What stands before each request and each reply in its record: the bytes of `spec/call.md`. A peer's header is checked here
//! as far as it can be without knowing what calls there are.

use pelton_channel::raw::Kept;
use pelton_channel::{Error, Result};
use pelton_os::monotonic_ns;
use std::time::{Duration, Instant};

/// Calls that a client has in flight at most.
pub(crate) const CALLS_MAX: u32 = 1024;
pub(crate) const HEADER_BYTES: usize = 24;
/// The message goes on in a later record.
const MORE: u64 = 1 << 8;
/// The message began in an earlier record.
const CONTINUED: u64 = 1 << 9;
/// What a large message is cut into. A guess: so many bytes are written while the other side still reads the ones before, and all
/// of it stays in a cache.
const PIECE_BYTES: usize = 64 << 10;
/// Code of a Failed that is the library's: the service's memory for clients is full.
pub(crate) const FAILED_MEMORY: u32 = 0xffff_0001;

/// What a record is.
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

/// Who has written it.
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
    /// The handler's, of Failed.
    pub(crate) code: u32,
    /// Nanoseconds of CLOCK_MONOTONIC, of a request; 0: none.
    pub(crate) deadline: u64,
}

impl Kind {
    /// Whether nothing of its call comes after it.
    pub(crate) fn is_final(self) -> bool {
        matches!(self, Kind::Reply | Kind::End | Kind::Failed | Kind::Abandoned | Kind::Returned)
    }

    fn by(self) -> By {
        if matches!(self, Kind::Request | Kind::Notify | Kind::Cancel) { By::Client } else { By::Service }
    }

    fn has_payload(self) -> bool {
        !matches!(self, Kind::Cancel | Kind::End | Kind::Abandoned | Kind::Draining | Kind::Returned | Kind::Drained)
    }

    /// Whether it is of a call, and not of the link.
    fn has_id(self) -> bool {
        !matches!(self, Kind::Notify | Kind::Draining | Kind::Drained)
    }
}

/// The place of a call's id among those in flight.
pub(crate) fn slot_of(id: u64) -> u32 {
    id as u32
}

pub(crate) fn generation_of(id: u64) -> u32 {
    (id >> 32) as u32
}

impl Header {
    pub(crate) fn new(kind: Kind, id: u64) -> Header {
        Header { id, kind, more: false, continued: false, code: 0, deadline: 0 }
    }

    pub(crate) fn words(&self) -> [u64; 3] {
        let flags = if self.more { MORE } else { 0 } | if self.continued { CONTINUED } else { 0 };
        [self.id, self.kind as u64 | flags | u64::from(self.code) << 32, self.deadline]
    }

    /// Whether these words are those of a whole message of that kind, as most are, of a call that may be. No: ask [`Header::read`].
    #[inline(always)]
    pub(crate) fn is_plain(words: &[u64; 3], kind: Kind) -> bool {
        let [id, word, deadline] = *words;
        word == kind as u64
            && slot_of(id) < CALLS_MAX
            && generation_of(id) != 0
            && (deadline == 0 || kind == Kind::Request)
    }

    /// A header of the peer's, before a payload of so many bytes; or which rule it breaks.
    pub(crate) fn read(words: [u64; 3], payload_bytes: u64, by: By) -> std::result::Result<Header, &'static str> {
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
        let (more, continued) = (word & MORE != 0, word & CONTINUED != 0);
        let header = Header { id, kind, more, continued, code: (word >> 32) as u32, deadline };
        if kind.by() != by {
            return Err("kind");
        }
        if word & 0xffff_ff00 & !(MORE | CONTINUED) != 0 {
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
        // What goes on has something to go on with, and so ends.
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

/// A message of which some has come.
#[derive(Debug)]
pub(crate) struct Assembly {
    pub(crate) header: Header,
    pub(crate) bytes: Vec<u8>,
    /// Bytes that have come, kept or not.
    pub(crate) length: u64,
    /// Of the memory for these bytes, if that has a limit.
    pub(crate) kept: Option<Kept>,
    /// That memory was full: the bytes are not kept.
    pub(crate) is_dropped: bool,
}

impl Assembly {
    pub(crate) fn new(header: Header, kept: Option<Kept>) -> Assembly {
        Assembly { header, bytes: Vec::new(), length: 0, kept, is_dropped: false }
    }

    /// So many bytes more have come. False: they are not to be kept.
    pub(crate) fn grow(&mut self, bytes: u64) -> bool {
        self.length += bytes;
        self.is_dropped |= !self.kept.as_mut().is_none_or(|kept| kept.grow(bytes));
        if self.is_dropped {
            (self.bytes, self.kept) = (Vec::new(), None);
        }
        !self.is_dropped
    }

    /// Whether a record with this header may come now: each side writes one message in pieces at a time.
    pub(crate) fn check(this: &Option<Assembly>, header: &Header) -> std::result::Result<(), &'static str> {
        match this {
            Some(of) if header.continued && (of.header.id, of.header.kind) != (header.id, header.kind) => Err("piece"),
            None if header.continued => Err("piece"),
            Some(_) if header.more && !header.continued => Err("piece"),
            _ => Ok(()),
        }
    }
}

/// A message on its way into a lane.
#[derive(Debug)]
pub(crate) struct Outgoing {
    header: Header,
    bytes: Vec<u8>,
    written: usize,
    /// Of the memory for what waits, if that has a limit.
    _kept: Option<Kept>,
}

impl Outgoing {
    pub(crate) fn new(header: Header, bytes: Vec<u8>, kept: Option<Kept>) -> Outgoing {
        Outgoing { header, bytes, written: 0, _kept: kept }
    }

    /// Bytes of the payload of the next record, in a lane whose largest message is so large.
    pub(crate) fn next_bytes(&self, message_bytes_max: u64) -> usize {
        let left = self.bytes.len() - self.written;
        let most = (message_bytes_max as usize).saturating_sub(HEADER_BYTES).max(1);
        if left <= most && self.written == 0 { left } else { left.min(most).min(PIECE_BYTES) }
    }

    /// The next record, once it is to be `bytes` long.
    pub(crate) fn next(&self, bytes: usize) -> ([u64; 3], &[u8]) {
        let (continued, more) = (self.written > 0, self.written + bytes < self.bytes.len());
        let header = match continued {
            true => Header::new(self.header.kind, self.header.id),
            false => self.header,
        };
        (Header { more, continued, ..header }.words(), &self.bytes[self.written..self.written + bytes])
    }

    /// So many have been written. True: that was all.
    pub(crate) fn advance(&mut self, bytes: usize) -> bool {
        self.written += bytes;
        self.written == self.bytes.len()
    }
}

/// Checks a message against the most that its receiver takes.
pub(crate) fn check_size(bytes: usize, bytes_max: u64) -> Result<()> {
    match bytes as u64 > bytes_max {
        true => Err(Error::TooLarge { bytes: bytes as u64, bytes_max }),
        false => Ok(()),
    }
}

/// A moment by both of its names: what deadlines say between processes, without asking the clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    instant: Instant,
    ns: u64,
}

impl Clock {
    pub(crate) fn new() -> Clock {
        Clock { instant: Instant::now(), ns: monotonic_ns() }
    }

    /// Never 0, which is no deadline.
    pub(crate) fn ns_of(&self, deadline: Instant) -> u64 {
        let ns = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        let later = ns(deadline.saturating_duration_since(self.instant));
        let earlier = ns(self.instant.saturating_duration_since(deadline));
        self.ns.saturating_add(later).saturating_sub(earlier).max(1)
    }

    /// `None` for none, and for one further away than a clock can say.
    pub(crate) fn instant_of(&self, ns: u64) -> Option<Instant> {
        match ns {
            0 => None,
            ns if ns >= self.ns => self.instant.checked_add(Duration::from_nanos(ns - self.ns)),
            ns => self.instant.checked_sub(Duration::from_nanos(self.ns - ns)),
        }
    }
}
