//! The messages of a lane, read without being its receiver. A tap copies records by `pread`, and then checks that the
//! sender cannot have overwritten them meanwhile. It writes nothing, so neither side notices it, and nothing changes
//! when its process is killed.
//!
//! # Which copies are whole
//! For a sender that follows spec/protocol.md. A hostile one determines what its messages say in any case.
//!
//! - **Published** before the copy: the tap loads the tail, then copies records before it. On x86-64 the sender's
//!   stores become visible in their order, so the copy has what was published. Elsewhere the tail may become visible
//!   before a header. There the tap copies twice, and uses the second copy if its headers are those of the first.
//! - **Not overwritten** before the end of the copy: the sender writes to released space only (P3), and loads the head
//!   before it does [release]. The tap loads the head *after* the copy. If that head has not passed the record, then no
//!   sender had a head that had passed it while the tap copied. So the copy is proven whole: [`Tapped::is_proven`].
//!   The header does not prove it: an old header may stand while its payload is already new.
//! - A record that was **released** before the end of the copy is never proven, but probably whole if the sender
//!   committed nothing meanwhile: the tail is the same before and after the copy. Then it has written at most a part of
//!   one reservation. Of the places of the protocol, A, at the tail, and C, behind the lap's end, contain no record of
//!   this lap; B, the front, may. And the sender may have returned the space to the system. All this holds for records
//!   of the tail's own lap only. So the records of the copy must lead, one after the other, exactly to the tail. The
//!   header of an earlier lap does not suffice: it may stand in the padding of a new record.
//! - All other records count as missed: [`Tap::missed`].
//!
//! # Successors Between connected processes a receiver's successor brings a new consumer page, and the sender may
//! move to new data. Then the old head stands for ever and proves nothing. So such a head counts only if, after the
//! copy, its page is open and its process is not about to end: the sender turns to a successor later. Otherwise no
//! record is proven, and one that is not there is no damage. A new tap continues: [`Tap::continue_from`]. In a path
//! channel successors use the pages in place.
//!
//! A `pread` of an aligned word may in theory be torn. So the tap reads a position until two successive reads are
//! equal. If none are, it uses the bound on the safe side of both: the highest head, the lowest tail.

#[cfg(test)]
mod tests;

use crate::traceparent::{self, Traceparent};
use pelton_lane::{CAPACITY_MAX, Position, record_bytes, seq_after};
use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// Bytes that one copy reads at most, unless one message is larger. A guess: some microseconds.
const COPY_BYTES: u64 = 64 << 10;
/// How many bytes a copy counts as at least, so that one call makes a limited number of them.
const COPY_BYTES_MIN: u64 = 4096;
/// Larger messages count as missed, so that no sender can make the tap use more memory.
const MESSAGE_BYTES_MAX: u64 = if cfg!(test) { 512 << 10 } else { 64 << 20 };
/// Bytes that one call of [`Tap::poll`] reads, about.
const POLL_BYTES: u64 = 64 << 10;
/// A tap that is further behind does not try released records: on a stream that fast it cannot find one whole.
const RELEASED_MAX: u64 = 4096;
/// How often the tap reads a position for two equal reads.
const TRIES: usize = 16;
/// How often a record that the tail says is there may be missing before the lane counts as damaged.
const STALLED_MAX: u32 = 100;

/// Offsets in the pages (spec/layout.md).
const CAPACITY_AT: u64 = 64;
const MESSAGE_BYTES_MAX_AT: u64 = 72;
const TAIL_AT: u64 = 128;
const HEAD_AT: u64 = 128;
const CONSUMER_STATE_AT: u64 = 256;
const CLOSED: u32 = 2;
/// The flag of a process that has begun to end, and still has its descriptors (the kernel's PF_EXITING).
const EXITING: u64 = 4;

/// Reads the messages of one lane as they pass, without being its receiver. Changes nothing.
#[derive(Debug)]
pub struct Tap {
    producer: Arc<File>,
    consumer: Arc<File>,
    data: Arc<File>,
    reader: Reader,
    capacity: u64,
    message_bytes_max: u64,
    /// The next record.
    next: Position,
    missed: u64,
    /// How often in succession the next record was missing although the tail has passed it.
    stalled: u32,
    /// A copy of the data from `base` on.
    copy: Vec<u8>,
    base: u64,
    /// The records in it.
    found: Vec<Found>,
}

/// A message that a tap has copied.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Tapped<'a> {
    /// Its number in the lane.
    pub seq: u32,
    /// Its bytes.
    pub payload: &'a [u8],
    /// The position of its sender in a distributed trace: as [`Message::traceparent`](crate::Message::traceparent).
    pub traceparent: Option<Traceparent>,
    /// Whether the copy is proven to be whole. Otherwise the message was released before the end of the copy, or its
    /// receiver has ended. The copy is
    /// whole unless the sender, at that moment, had written a part of the next message there, or had returned the
    /// space to the system.
    pub is_proven: bool,
}

/// Whose the consumer page is.
#[derive(Debug)]
pub(crate) enum Reader {
    /// The role's: successors use it in place.
    Role,
    /// That of the process with this /proc/PID/stat. `None`: it cannot be seen, or has ended.
    Process(Option<File>),
}

impl Reader {
    pub(crate) fn of(pid: Option<u32>) -> Reader {
        Reader::Process(pid.and_then(|pid| File::open(format!("/proc/{pid}/stat")).ok()))
    }
}

/// Identifies the files of a lane: the device and the inode of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileIds {
    producer: (u64, u64),
    consumer: (u64, u64),
    /// `None`: no process keeps its descriptor.
    data: Option<(u64, u64)>,
    /// Where a subscriber's cursor page begins in `consumer`, which has those of others too.
    cursor_at: Option<u64>,
}

impl FileIds {
    pub(crate) fn of(producer: &File, consumer: &File, data: Option<&File>, cursor_at: Option<u64>) -> Result<FileIds> {
        let id = |file: &File| file.metadata().map(|metadata| (metadata.dev(), metadata.ino()));
        Ok(FileIds { producer: id(producer)?, consumer: id(consumer)?, data: data.map(id).transpose()?, cursor_at })
    }

    /// Of a subscriber's lane, what identifies its publisher, by [`FileIds::is_same_lane`]. `None`: the lane has one
    /// receiver, or a publisher without subscribers.
    pub fn publisher(&self) -> Option<FileIds> {
        self.cursor_at.map(|_| FileIds { cursor_at: None, ..*self })
    }

    /// Whether the files are of one lane: a successor brings some of its own, never all. The subscribers of a publisher
    /// share its page.
    pub fn is_same_lane(&self, other: &FileIds) -> bool {
        if self.cursor_at.is_some() || other.cursor_at.is_some() {
            return (self.consumer, self.cursor_at) == (other.consumer, other.cursor_at);
        }
        self.producer == other.producer
            || self.consumer == other.consumer
            || (self.data.is_some() && self.data == other.data)
    }
}

/// A record in the copy.
#[derive(Clone, Copy, Debug)]
struct Found {
    seq: u32,
    /// In the copy: where its header begins, and the bytes of its payload.
    at: usize,
    bytes: usize,
    /// In the copy: where its trace position begins.
    trace: Option<usize>,
}

/// What the tap finds at a place.
enum Parsed {
    Record {
        at: u64,
        bytes: u64,
        /// Where its trace position begins.
        trace: Option<u64>,
    },
    /// The copy does not have so many bytes there.
    Outside { at: u64, bytes: u64, rank: u32 },
    /// No record with this number.
    Missing,
}

/// Whether number `one` comes before `other`: they are less than 2^31 apart.
fn is_before(one: u32, other: u32) -> bool {
    other.wrapping_sub(one) as i32 > 0
}

impl Tap {
    /// A tap of the lane with these files. It begins with the next message, or with the oldest one that the receiver
    /// has not released.
    ///
    /// # Errors
    /// `InvalidData`: the pages are no lane's. Those of reading the files.
    pub(crate) fn new(
        producer: Arc<File>,
        consumer: Arc<File>,
        data: Arc<File>,
        reader: Reader,
        since_start: bool,
    ) -> Result<Tap> {
        let (capacity, limit) = (word(&producer, CAPACITY_AT)?, word(&producer, MESSAGE_BYTES_MAX_AT)?);
        let bytes = data.metadata()?.len();
        if capacity == 0 || capacity > bytes.min(CAPACITY_MAX) || limit > capacity {
            let text = format!("a lane of {capacity} bytes with messages up to {limit}, in a file of {bytes} bytes");
            return Err(Error::new(ErrorKind::InvalidData, text));
        }
        let (base, copy, found) = (0, Vec::new(), Vec::new());
        let (next, missed, stalled) = (Position::START, 0, 0);
        let message_bytes_max = limit;
        let mut tap = Tap {
            producer,
            consumer,
            data,
            reader,
            capacity,
            message_bytes_max,
            next,
            missed,
            stalled,
            copy,
            base,
            found,
        };
        let tail = if since_start { None } else { tap.tail()?.exact };
        tap.next = match tail {
            Some(tail) => tail,
            // Of a fast stream, whose tail no two reads agree on.
            None => tap.exact_head()?.ok_or_else(|| Error::new(ErrorKind::InvalidData, "a head that never rests"))?,
        };
        Ok(tap)
    }

    /// Messages that passed, and that this tap could not copy whole.
    pub fn missed(&self) -> u64 {
        self.missed
    }

    /// Identifies the files that it reads. Once [`Lane::file_ids`](super::Lane::file_ids) has others for the lane, a
    /// successor has come, and a new tap is due.
    ///
    /// # Errors
    /// Those of the system.
    pub fn file_ids(&self) -> Result<FileIds> {
        FileIds::of(&self.producer, &self.consumer, Some(&self.data), None)
    }

    /// Continues where `before` stopped, a tap of the same lane with files that a successor has replaced: it keeps
    /// the numbers and the places. Also takes over what that tap missed.
    pub fn continue_from(&mut self, before: &Tap) {
        (self.next, self.missed) = (before.next, before.missed);
    }

    /// Whether the head that was loaded last is that of the receiver whose releases the sender heeds: see the module.
    fn is_head_live(&self, head: Position, tail: Position) -> Result<bool> {
        // A sender that went on beyond the lane's space heeds another one.
        if is_before(head.seq, tail.seq) && tail.since(head) > self.capacity / 8 {
            return Ok(false);
        }
        let process = match &self.reader {
            Reader::Role => return Ok(true),
            Reader::Process(None) => return Ok(false),
            Reader::Process(Some(process)) => process,
        };
        let mut state = [0; 4];
        self.consumer.read_exact_at(&mut state, CONSUMER_STATE_AT)?;
        let mut stat = [0; 512];
        // An error: it has ended.
        let Ok(bytes) = process.read_at(&mut stat, 0) else { return Ok(false) };
        // The seventh field after the name, which is in parentheses, and may have some itself.
        let after = stat[..bytes].iter().rposition(|byte| *byte == b')').map_or(bytes, |at| at + 1);
        let fields = std::str::from_utf8(&stat[after..bytes]).unwrap_or_default();
        let flags = fields.split_ascii_whitespace().nth(6).and_then(|flags| flags.parse::<u64>().ok());
        Ok(u32::from_le_bytes(state) != CLOSED && flags.is_some_and(|flags| flags & EXITING == 0))
    }

    /// Copies the messages since the last call, about 64 KiB or one larger message at most, and gives them to `each`.
    /// Returns whether there are more. Does not wait.
    ///
    /// # Errors
    /// `InvalidData`: the lane contains what no sender writes. Those of reading the files, and of `each`.
    pub fn poll(&mut self, mut each: impl FnMut(Tapped<'_>) -> Result<()>) -> Result<bool> {
        let mut read = 0;
        while read < POLL_BYTES {
            let mut before = self.tail()?;
            let mut tail = before.lowest;
            if tail.seq == self.next.seq {
                // Also after the owner of both sides of an empty lane moved them to its front.
                self.next.offset = before.exact.map_or(self.next.offset, |tail| tail.offset);
                return Ok(false);
            }
            if !is_before(self.next.seq, tail.seq) {
                // The sender stores the tail after the header that publishes a record. So the receiver may already have
                // released records beyond this tail. A tail that stays lower, and not behind the head, is that of a
                // recovery, which drops messages.
                self.stalled += 1;
                if self.stalled > STALLED_MAX
                    && let Some(tail) = before.exact
                    && !is_before(tail.seq, self.head()?.highest.seq)
                {
                    (self.next, self.stalled) = (tail, 0);
                }
                return Ok(false);
            }
            if tail.since(self.next) > RELEASED_MAX && is_before(self.next.seq, self.head()?.highest.seq) {
                if !self.skip_to_head()? {
                    return Ok(true);
                }
                read += COPY_BYTES;
                // The head may be beyond the old tail.
                before = self.tail()?;
                tail = before.lowest;
                if !is_before(self.next.seq, tail.seq) {
                    continue;
                }
            }
            let begin = self.next;
            self.copy_records(tail)?;
            read += (self.copy.len() as u64).max(COPY_BYTES_MIN);
            // The copy is before the loads of head and tail. [release]
            fence(Ordering::SeqCst);
            let head = self.head()?.highest;
            let is_live = self.is_head_live(head, tail)?;
            let Some(last) = self.found.last() else {
                if self.next != begin {
                    // A message that is too large is missed.
                    self.stalled = 0;
                    continue;
                }
                if is_before(self.next.seq, head.seq) {
                    if !self.skip_to_head()? {
                        return Ok(true);
                    }
                    read += COPY_BYTES;
                    continue;
                }
                self.stalled += 1;
                if self.stalled > STALLED_MAX && is_live {
                    let Position { seq, offset } = self.next;
                    let text = format!("no message {seq} at byte {offset} of the lane, which its sender's page counts");
                    return Err(Error::new(ErrorKind::InvalidData, text));
                }
                return Ok(false);
            };
            self.stalled = 0;
            let end = self.base + last.at as u64 + record_bytes(last.bytes as u64);
            let next = Position { offset: end, seq: seq_after(last.seq) };
            let is_any_released = is_before(self.found[0].seq, head.seq);
            let is_chain = before.exact == Some(next);
            let is_tail_same = is_any_released && is_chain && self.tail()?.exact == Some(next);
            for found in &self.found {
                let Found { seq, at, bytes, trace } = *found;
                let begin = self.base + at as u64;
                let is_released = is_before(seq, head.seq);
                if is_released && !(is_tail_same && begin + record_bytes(bytes as u64) <= tail.offset) {
                    self.missed += 1;
                    continue;
                }
                let is_proven = !is_released && is_live;
                let bytes_of_trace = |at: usize| self.copy.get(at..)?.first_chunk();
                let traceparent = trace.and_then(bytes_of_trace).and_then(Traceparent::decode);
                each(Tapped { seq, payload: &self.copy[at + 8..at + 8 + bytes], traceparent, is_proven })?;
            }
            self.next = next;
        }
        Ok(true)
    }

    /// Continues at the head. Returns false if no two reads agree on it now, or it is not ahead.
    fn skip_to_head(&mut self) -> Result<bool> {
        let head = self.exact_head()?.filter(|head| is_before(self.next.seq, head.seq));
        if let Some(head) = head {
            self.missed += head.since(self.next);
            self.next = head;
            self.stalled = 0;
        }
        Ok(head.is_some())
    }

    /// Copies data from the next record on, and finds the records in it that are before the tail.
    fn copy_records(&mut self, tail: Position) -> Result<()> {
        self.found.clear();
        let contiguous = tail.offset.checked_sub(self.next.offset).filter(|bytes| *bytes > 0);
        self.read(self.next.offset, contiguous.unwrap_or(COPY_BYTES).min(COPY_BYTES))?;
        let (mut offset, mut rank, mut seq) = (self.next.offset, 0, self.next.seq);
        // A jump, and a record larger than one copy.
        let mut reads = 2;
        while seq != tail.seq {
            match self.parse(offset, rank, seq) {
                // A jump back begins the next copy: the records after it may lie where those before it were.
                Parsed::Record { at, .. } if at < offset && !self.found.is_empty() => break,
                Parsed::Record { at, bytes, trace } => {
                    let trace = trace.map(|trace| (trace - self.base) as usize);
                    self.found.push(Found { seq, at: (at - self.base) as usize, bytes: bytes as usize, trace });
                    (offset, rank, seq) = (at + record_bytes(bytes), 0, seq_after(seq));
                }
                Parsed::Outside { at, bytes, .. } if bytes > MESSAGE_BYTES_MAX => {
                    if self.found.is_empty() {
                        self.missed += 1;
                        self.next = Position { offset: at + bytes, seq: seq_after(seq) };
                    }
                    break;
                }
                Parsed::Outside { at, bytes, rank: rank_now } if self.found.is_empty() && reads > 0 => {
                    reads -= 1;
                    self.read(at, bytes.max(COPY_BYTES))?;
                    (offset, rank) = (at, rank_now);
                }
                _ => break,
            }
        }
        if cfg!(not(target_arch = "x86_64")) {
            self.confirm()?;
        }
        Ok(())
    }

    /// Copies again, and keeps the records whose headers are the same in both copies.
    fn confirm(&mut self) -> Result<()> {
        // The loads of the first copy, which found the headers, are before those of the second. [publish]
        fence(Ordering::SeqCst);
        let first = std::mem::take(&mut self.copy);
        let base = self.base;
        self.read(base, first.len() as u64)?;
        let copy = &self.copy;
        let same = self.found.iter().take_while(|found| {
            let header = found.at..found.at + 8;
            copy.len() >= found.at + 8 + found.bytes && first[header.clone()] == copy[header]
        });
        let same = same.count();
        self.found.truncate(same);
        Ok(())
    }

    /// Copies so many bytes of the data, or fewer at its end.
    fn read(&mut self, at: u64, bytes: u64) -> Result<()> {
        let bytes = bytes.min(self.capacity.saturating_sub(at)) as usize;
        self.base = at;
        self.copy.resize(bytes, 0);
        if bytes as u64 <= COPY_BYTES {
            // After a large message.
            self.copy.shrink_to(COPY_BYTES as usize);
        }
        let mut done = 0;
        while done < bytes {
            // In tests in parts, between which the sender and the receiver continue.
            let end = if cfg!(test) { bytes.min(done + 256) } else { bytes };
            #[cfg(test)]
            tests::before_part();
            match self.data.read_at(&mut self.copy[done..end], at + done as u64) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.copy.truncate(done);
        Ok(())
    }

    /// The record with number `seq` whose marks, if it has any, begin at `at`. The checks are those of a consumer.
    fn parse(&self, mut at: u64, mut rank: u32, seq: u32) -> Parsed {
        // Where a mark with a trace position begins, and the rank before it. A copy that begins later lacks it.
        let mut traced = None;
        loop {
            let (begin, rank_before) = traced.unwrap_or((at, rank));
            let outside = |bytes| Parsed::Outside { at: begin, bytes: at - begin + bytes, rank: rank_before };
            let Some(word) = self.copied(at) else { return outside(8) };
            let low = word as u32;
            if (word >> 32) as u32 != seq {
                return Parsed::Missing;
            }
            if low >> 31 == 0 {
                let bytes = u64::from(low);
                if bytes > self.message_bytes_max || at + record_bytes(bytes) + 8 > self.capacity {
                    return Parsed::Missing;
                }
                if at + 8 + bytes > self.base + self.copy.len() as u64 {
                    return outside(record_bytes(bytes));
                }
                return Parsed::Record { at, bytes, trace: traced.map(|(begin, _)| begin + 8) };
            }
            // The order of marks: jump, generation, descriptors, trace, 4 to 7.
            let (kind, value) = (low >> 28 & 7, low & 0x0fff_ffff);
            let rank_now = [1, 3, 2, 4, 5, 6, 7, 8][kind as usize];
            let is_trace = kind == 3;
            if rank_now <= rank || is_trace && value as usize != traceparent::BYTES {
                return Parsed::Missing;
            }
            if is_trace {
                traced = Some((at, rank));
                at += u64::from(value);
            }
            rank = rank_now;
            at = if kind == 0 { u64::from(value) * 64 } else { at + 8 };
            if at + 16 > self.capacity {
                return Parsed::Missing;
            }
        }
    }

    /// The word at an offset of the data.
    fn copied(&self, at: u64) -> Option<u64> {
        let at = usize::try_from(at.checked_sub(self.base)?).ok()?;
        let bytes = self.copy.get(at..at.checked_add(8)?)?;
        Some(u64::from_le_bytes(bytes.try_into().expect("eight bytes")))
    }

    fn tail(&self) -> Result<Reading> {
        #[cfg(test)]
        tests::before_tail();
        self.position(&self.producer, TAIL_AT)
    }

    fn head(&self) -> Result<Reading> {
        self.position(&self.consumer, HEAD_AT)
    }

    fn exact_head(&self) -> Result<Option<Position>> {
        for _ in 0..TRIES {
            if let Some(head) = self.head()?.exact {
                return Ok(Some(head));
            }
        }
        Ok(None)
    }

    fn position(&self, page: &File, at: u64) -> Result<Reading> {
        let mut before = word(page, at)?;
        for _ in 0..TRIES {
            let now = word(page, at)?;
            if now == before {
                let position = Position::unpack(now);
                if position.seq == 0 || position.offset + 8 > self.capacity {
                    let text = format!("a position of message {} at byte {}", position.seq, position.offset);
                    return Err(Error::new(ErrorKind::InvalidData, text));
                }
                return Ok(Reading { exact: Some(position), highest: position, lowest: position });
            }
            before = now;
        }
        let [one, other] = [before, word(page, at)?].map(|word| (word >> 32) as u32);
        let [lowest, highest] = bounds(one, other).map(|seq| Position { seq: seq.max(1), offset: 0 });
        Ok(Reading { exact: None, highest, lowest })
    }
}

/// A position, as some reads found it.
struct Reading {
    /// If two successive reads were equal.
    exact: Option<Position>,
    /// Otherwise only their numbers count.
    highest: Position,
    lowest: Position,
}

/// A lower and an upper bound of a number that grows while two reads of it may be torn: the bytes above the highest one
/// in which the reads differ are right, and those below it may be any.
fn bounds(one: u32, other: u32) -> [u32; 2] {
    let differing = (one ^ other).checked_ilog2().map_or(0, |bit| bit / 8 + 1);
    let below = u32::MAX.checked_shr(32 - 8 * differing).unwrap_or(0);
    let (low, high) = if is_before(one, other) { (one, other) } else { (other, one) };
    let below_both = below >> 8;
    [low & !below_both, high | below_both]
}

fn word(page: &File, at: u64) -> Result<u64> {
    let mut bytes = [0; 8];
    page.read_exact_at(&mut bytes, at)?;
    Ok(u64::from_le_bytes(bytes))
}
