//! A client's connection to one service: the two lanes of a link, and what has been said by them.

use crate::frame::{Assembly, By, HEADER_BYTES, Header, Size, TRACEPARENT_BYTES};
use crate::outbox::Outbox;
use pelton_channel::raw::{Duplex, TRACED_REQUESTS};
use pelton_channel::{Error, Receiver, Result};
use pelton_lane::Record;
use pelton_os::Peer;
use std::path::{Path, PathBuf};

#[derive(Debug)]
pub(crate) struct Connection {
    /// Before the replies: when it is dropped, the service reads what was submitted, and that the lane was closed.
    pub(crate) outbox: Outbox,
    pub(crate) replies: Receiver,
    pub(super) assembly: Option<Assembly>,
    /// The size of the last message that came in pieces; 0 if it was not stored.
    assembled: usize,
    /// Identifies it among all connections that this client ever has. Never 0.
    pub(super) number: u32,
    /// Where the service listens, or did.
    path: PathBuf,
    /// The largest request that the service takes.
    pub(super) request_bytes_max: u64,
    /// Whether it takes requests with a traceparent.
    pub(crate) takes_traced: bool,
    /// Calls that were submitted by it, and whose final completion has not come.
    pub(super) in_flight: usize,
    pub(super) state: State,
    /// Nobody reads requests there any more. The lane of replies reports the end, after the last reply.
    pub(super) has_left: bool,
}

/// What the service has said about further requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Open,
    /// DRAINING: it returns requests.
    Draining,
    /// DRAINED: it takes nothing more.
    Drained,
}

impl Connection {
    pub(super) fn new(duplex: Duplex, path: PathBuf, number: u32) -> Connection {
        let Duplex { sender, receiver, bytes_max, features } = duplex;
        Connection {
            outbox: Outbox::new(sender),
            replies: receiver,
            assembly: None,
            assembled: 0,
            number,
            path,
            request_bytes_max: bytes_max,
            takes_traced: features & TRACED_REQUESTS != 0,
            in_flight: 0,
            state: State::Open,
            has_left: false,
        }
    }

    /// Whether a request may be submitted by it.
    pub(super) fn is_open(&self) -> bool {
        // Of a close, the lane of replies reports the cause, after the last reply.
        self.state == State::Open && !self.has_left && !self.outbox.sender.has_receiver_closed()
    }

    /// Whether a request of this size may be submitted by it.
    pub(super) fn takes(&self, size: Size) -> bool {
        self.is_open() && size.bytes as u64 <= self.request_bytes_max
    }

    /// Bytes of the record that [`Connection::write`] needs space for, without its header; `None` for a message in
    /// pieces.
    pub(super) fn whole_bytes(&self, size: Size) -> Option<usize> {
        let prefix_bytes = if size.is_traced && self.takes_traced { TRACEPARENT_BYTES } else { 0 };
        Some(size.bytes + prefix_bytes).filter(|bytes| self.outbox.is_whole(*bytes))
    }

    pub(super) fn is_to(&self, path: &Path) -> bool {
        self.path == path
    }

    pub(super) fn peer(&self) -> Option<Peer> {
        self.replies.peer()
    }

    /// Writes a message; of one that is cut into pieces, what there is space for, and queues the rest. Returns false if
    /// there is no space. A service that takes no traceparent gets the request without.
    #[inline(always)]
    pub(super) fn write(&mut self, mut header: Header, mut payload: &[u8]) -> Result<bool> {
        if header.traced && !self.takes_traced {
            payload = &payload[header.prefix_bytes()..];
            header.traced = false;
        }
        if self.outbox.is_whole(payload.len()) {
            return match self.outbox.try_write(header, payload)? {
                true => Ok(true),
                false if self.outbox.is_empty() => Ok(false),
                false => Ok(self.outbox.flush()? && self.outbox.try_write(header, payload)?),
            };
        }
        if !self.outbox.is_empty() && !self.outbox.flush()? {
            return Ok(false);
        }
        self.outbox.write_or_queue(header, payload, None)?;
        Ok(true)
    }

    /// The checked header of the next record, whose payload is at most `bytes_max`.
    pub(super) fn header(&self, record: &Record, bytes_max: u64) -> Result<Header> {
        let payload_bytes = record.bytes.saturating_sub(HEADER_BYTES as u64);
        let read = match self.replies.words(record) {
            Some(words) => Header::read(words, payload_bytes, By::Service),
            None => Err("length"),
        };
        match read {
            Ok(_) if payload_bytes > bytes_max => Err(broken("size", record)),
            read => read.map_err(|rule| broken(rule, record)),
        }
    }

    /// Takes a piece of a message, and releases its record. Returns the message after its last piece. An unwanted
    /// message is not stored, but the client has to detect its end.
    pub(super) fn assemble(
        &mut self,
        record: &Record,
        header: Header,
        is_wanted: bool,
        bytes_max: u64,
    ) -> Result<Option<Assembly>> {
        Assembly::check(&self.assembly, &header).map_err(|rule| broken(rule, record))?;
        let expected = if is_wanted { self.assembled } else { 0 };
        let mut assembly = self.assembly.take().unwrap_or_else(|| Assembly::new(header, None, expected));
        if assembly.bytes.len() as u64 + record.bytes - HEADER_BYTES as u64 > bytes_max {
            return Err(broken("size", record));
        }
        match is_wanted {
            true => self.replies.append(record, HEADER_BYTES, &mut assembly.bytes),
            false => assembly.bytes.clear(),
        }
        self.replies.release_record(record);
        if header.more {
            self.assembly = Some(assembly);
            return Ok(None);
        }
        self.assembled = assembly.bytes.len();
        Ok(Some(assembly))
    }

    /// Whether some pieces of a message of this call have come.
    pub(super) fn has_piece_of(&self, id: u64) -> bool {
        self.assembly.as_ref().is_some_and(|of| of.header.id == id)
    }
}

#[cold]
pub(super) fn broken(rule: &str, record: &Record) -> Error {
    Error::Corrupt(format!("the service's message {} breaks the rule {rule:?} of calls", record.seq))
}
