//! What the pages of a lane say. An observer reads a page by one `pread`, and never maps it: a load from a mapping
//! would allocate memory for a hole. Each word is checked or clamped: a page that lies yields wrong numbers for its own
//! lane, and nothing else.

use crate::counters::Counters;
use crate::settings::Policy;
use pelton_lane::{CAPACITY_MAX, CURSORS_MAX, Position, Preamble, State, TableSlot, record_bytes, seq_of};
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

/// The bytes of the pages that the layout names, but for sleep words.
const PAGE_BYTES: usize = 768;
/// The bit of a sleep word that says that its side is about to sleep, or sleeps.
const ARMED: u64 = 1;

/// What a lane's pages said at one moment.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Reading {
    /// Bytes of the lane's data.
    pub capacity: u64,
    /// The largest message, in bytes.
    pub message_bytes_max: u64,
    /// Where the sender writes the next record.
    pub tail: Place,
    /// The oldest record that the receiver has not released.
    pub head: Place,
    /// Messages sent and not released.
    pub waiting_messages: u64,
    /// Bytes of the lane that they occupy; an estimate while the receiver is at work.
    pub waiting_bytes: u64,
    /// The sender's counters. After a sender's successor connected, they count from that connection.
    pub sent: Counters,
    /// The receiver's counters, likewise.
    pub received: Counters,
    /// The sender's process, as it says.
    pub sender_pid: u32,
    /// The receiver's process, as it says.
    pub receiver_pid: u32,
    /// 1 for the first sender, one more for each successor; 0 before the first.
    pub sender_generation: u64,
    /// 1 for the first receiver, one more for each successor; 0 before the first.
    pub receiver_generation: u64,
    /// Whether the sender closed.
    pub is_sender_closed: bool,
    /// Whether the receiver closed.
    pub is_receiver_closed: bool,
    /// Whether the sender waits for free space.
    pub is_sender_waiting: bool,
    /// Messages that a subscriber missed, or skipped, as it says.
    pub missed: u64,
    /// What the publisher does when this subscriber falls behind; `None`: it is no subscriber.
    pub policy: Option<Policy>,
    /// With [`Policy::Gate`]: how long the subscriber may hold the publisher up, if it has set a limit.
    pub lag_after: Option<Duration>,
}

/// A place in a lane's data, and the number of the record there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Bytes from the start of the data.
    pub offset: u64,
    /// The number of the record: 1 and up, modulo 2^32 without 0.
    pub seq: u32,
}

impl From<Position> for Place {
    fn from(position: Position) -> Place {
        Place { offset: position.offset, seq: position.seq }
    }
}

struct Page([u8; PAGE_BYTES]);

impl Page {
    fn read(file: &File, offset: u64) -> io::Result<Page> {
        let mut bytes = [0; PAGE_BYTES];
        file.read_exact_at(&mut bytes, offset)?;
        Ok(Page(bytes))
    }

    fn u64(&self, offset: usize) -> u64 {
        u64::from_le_bytes(self.0[offset..offset + 8].try_into().expect("eight bytes"))
    }

    fn u32(&self, offset: usize) -> u32 {
        u32::from_le_bytes(self.0[offset..offset + 4].try_into().expect("four bytes"))
    }

    fn position(&self, offset: usize) -> Position {
        Position::unpack(self.u64(offset))
    }

    /// The counters of a sender's page.
    fn sent(&self) -> Counters {
        Counters {
            messages: self.u64(152),
            bytes: self.u64(160),
            waits: self.u64(168),
            sleeps: self.u64(176),
            wakes_sent: self.u64(184),
            depth_max: self.u64(192),
        }
    }

    /// The counters of a receiver's page, or a subscriber's.
    fn received(&self) -> Counters {
        Counters {
            messages: self.u64(136),
            bytes: self.u64(144),
            waits: self.u64(152),
            sleeps: self.u64(160),
            wakes_sent: self.u64(168),
            depth_max: 0,
        }
    }
}

/// Reads the pages of a lane. The offsets are those of spec/layout.md, as pelton-lane asserts them.
pub(super) fn read(producer: &File, consumer: &File) -> io::Result<Reading> {
    // The tail before the head. In between the head can only grow, so the number of messages is never too large.
    let (producer, consumer) = (Page::read(producer, 0)?, Page::read(consumer, 0)?);
    let capacity = producer.u64(64).min(CAPACITY_MAX);
    let (tail, head) = (producer.position(128), consumer.position(128));
    if capacity == 0 || tail.seq == 0 || head.seq == 0 || tail.offset > capacity || head.offset > capacity {
        let text = format!("its pages say capacity {capacity}, tail {tail:?}, head {head:?}, which cannot be");
        return Err(io::Error::new(ErrorKind::InvalidData, text));
    }
    // No more records fit than headers. A head that passed the tail in between makes none.
    let is_behind = tail.seq.wrapping_sub(head.seq) as i32 > 0;
    let waiting_messages = if is_behind { tail.since(head).min(capacity / 8) } else { 0 };
    let (sent, mut received) = (producer.sent(), consumer.received());
    // The receiver stores its counters when it finds the lane empty; the positions are always up to date.
    let is_exact = sent.messages.wrapping_sub(received.messages) == waiting_messages;
    let mean = sent.bytes.checked_div(sent.messages).unwrap_or(0);
    // The bytes of so many messages of mean size.
    let share = |messages: u64| {
        let bytes = u128::from(sent.bytes) * u128::from(messages.min(sent.messages)) / u128::from(sent.messages.max(1));
        bytes as u64
    };
    let span = match tail.offset.checked_sub(head.offset) {
        Some(bytes) => bytes,
        None => capacity - head.offset + tail.offset,
    };
    let mean_waiting = match waiting_messages {
        0 => 0,
        waiting if is_exact => sent.bytes.wrapping_sub(received.bytes) / waiting,
        _ => mean,
    };
    let waiting_bytes = record_bytes(mean_waiting.min(capacity)).saturating_mul(waiting_messages);
    received.messages = received.messages.max(sent.messages.saturating_sub(waiting_messages));
    received.bytes = received.bytes.max(share(received.messages));
    Ok(Reading {
        capacity,
        message_bytes_max: producer.u64(72).min(capacity),
        tail: tail.into(),
        head: head.into(),
        waiting_messages,
        waiting_bytes: waiting_bytes.min(span),
        sent,
        received,
        sender_pid: producer.u32(388),
        receiver_pid: consumer.u32(260),
        sender_generation: producer.u64(144),
        receiver_generation: consumer.u64(176),
        is_sender_closed: producer.u32(384) == State::Closed as u32,
        is_receiver_closed: consumer.u32(256) == State::Closed as u32,
        is_sender_waiting: producer.u64(256) & ARMED != 0,
        missed: 0,
        policy: None,
        lag_after: None,
    })
}

/// Reads the pages of a publisher and of one of its subscribers, whose cursor page begins at `cursor_at` of its file;
/// `None`: there is none. The offsets are those of spec/broadcast.md.
pub(super) fn read_broadcast(publisher: &File, cursor: &File, cursor_at: Option<u64>) -> io::Result<Reading> {
    // The publisher's page first: in between, the cursor can only grow.
    let publisher = Page::read(publisher, 0)?;
    let capacity = publisher.u64(64).min(CAPACITY_MAX);
    let (tail, kept, sent) = (publisher.position(128), publisher.u64(512), publisher.sent());
    let reading = Reading {
        capacity,
        message_bytes_max: publisher.u64(72).min(capacity),
        tail: tail.into(),
        sent,
        sender_pid: publisher.u32(388),
        sender_generation: publisher.u64(144),
        is_sender_closed: publisher.u32(384) == State::Closed as u32,
        ..Reading::default()
    };
    let Some(cursor_at) = cursor_at else { return Ok(reading) };
    let cursor = Page::read(cursor, cursor_at)?;
    let number = cursor.u64(128);
    // The tail may be older than `kept`: then it is as far as this load knows.
    let ahead = tail.since(Position { offset: 0, seq: seq_of(kept.max(1)) });
    let next = kept.saturating_add(if ahead <= capacity / 8 { ahead } else { 0 });
    // Messages count from 1; 0: the subscriber is joining.
    let behind = if number == 0 { 0 } else { next.saturating_sub(number) };
    let waiting_messages = behind.min(capacity / 8);
    let mean = sent.bytes.checked_div(sent.messages).unwrap_or(0).min(capacity);
    let (policy, lag_after) = match cursor.u32(64) {
        4 => (Policy::Gate, Some(Duration::from_nanos(cursor.u64(80)))),
        3 => (Policy::Latest, None),
        2 => (Policy::Lag, None),
        _ => (Policy::Gate, None),
    };
    Ok(Reading {
        waiting_messages,
        waiting_bytes: record_bytes(mean).saturating_mul(waiting_messages).min(capacity),
        received: cursor.received(),
        receiver_pid: cursor.u32(260),
        receiver_generation: 1,
        is_receiver_closed: cursor.u32(256) == State::Closed as u32,
        // It waits until its slowest gate has released the messages below this number.
        is_sender_waiting: policy == Policy::Gate && publisher.u64(256) & ARMED != 0 && publisher.u64(264) > number,
        missed: cursor.u64(176),
        policy: Some(policy),
        lag_after,
        ..reading
    })
}

/// The slots of the table of a broadcast in a directory, in order.
pub(super) fn slots(table: &File) -> io::Result<Vec<TableSlot>> {
    const ENTRY_BYTES: usize = 128;
    let mut bytes = [0; CURSORS_MAX * ENTRY_BYTES];
    table.read_exact_at(&mut bytes, 8192)?;
    Ok(bytes.chunks_exact(ENTRY_BYTES).map(TableSlot::of_bytes).collect())
}

/// Whether the file begins as a page with this preamble does.
pub(super) fn check(file: &File, wanted: Preamble) -> io::Result<()> {
    let page = Page::read(file, 0)?;
    let Preamble { magic, wire_version, layout_signature, .. } = wanted;
    if (page.u64(0), page.u32(8), page.u64(16)) == (magic, wire_version, layout_signature) {
        return Ok(());
    }
    let text = format!(
        "begins with \"{}\", version {} and layout {:#x}, wanted \"{}\", {} and {:#x}: use the pelton tool of its version",
        page.0[..8].escape_ascii(),
        page.u32(8),
        page.u64(16),
        magic.to_le_bytes().escape_ascii(),
        wire_version,
        layout_signature
    );
    Err(io::Error::new(ErrorKind::InvalidData, text))
}
