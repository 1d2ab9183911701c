//! Messages in chunks to a sink, without a copy: from a receiver ([`Flush`]), or from threads that append
//! ([`Appenders`]).

use pelton_channel::options::{Options, maker};
use pelton_channel::raw::{ReservedSpace, Settings, TakenChunk, gather};
use pelton_channel::{Armed, Counters, Deadline, Error, LaneId, Receiver, Reservation, Result, Sender, Senders, Sent};
use pelton_lane::{SEGMENT_BYTES, failpoint, seq_after};
use pelton_os::Peer;
use pelton_os::{self as os, Doorbell, Owner, Ready, locked, poll_until};
use std::cell::RefCell;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

/// Consecutive records of one lane, as a sink receives them. Each record is a header, the payload, and up to seven
/// padding bytes of any value, so that the next record begins at a multiple of eight. The header is a little-endian
/// u64, `seq << 32 | bytes`.
///
/// ```
/// # fn main() -> pelton::Result<()> {
/// use pelton::{Chunk, Options};
/// let (mut sender, receiver) = Options::new().threads()?;
/// sender.send(b"one")?;
/// sender.send(b"two")?;
/// drop(sender);
/// let (give, take) = std::sync::mpsc::channel();
/// let sink = move |chunks: &[Chunk<'_>]| {
///     for chunk in chunks {
///         give.send((chunk.first_seq(), chunk.last_seq(), chunk.message_count())).unwrap();
///     }
///     Ok(())
/// };
/// pelton::Flush::new(&Options::new(), receiver, sink)?.run()?;
/// assert_eq!(take.recv(), Ok((1, 2, 2)));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy)]
pub struct Chunk<'a> {
    lane: LaneId,
    peer: Option<Peer>,
    first_seq: u32,
    messages: u32,
    bytes: &'a [u8],
    /// Nanoseconds since 1970.
    arrived: Option<u64>,
}

impl<'a> Chunk<'a> {
    /// For tests of sinks, which check `bytes` themselves.
    #[doc(hidden)]
    pub fn new(lane: LaneId, peer: Option<Peer>, first_seq: u32, messages: u32, bytes: &'a [u8]) -> Chunk<'a> {
        Chunk { lane, peer, first_seq, messages, bytes, arrived: None }
    }

    /// The lane of these messages.
    pub fn lane(&self) -> LaneId {
        self.lane
    }

    /// The process that sent them. `None` if the sender of a path channel died before this receiver opened the channel.
    pub fn peer(&self) -> Option<Peer> {
        self.peer
    }

    /// When the flush found these messages in the lane, if it notes that: see [`Flush::note_arrivals`].
    pub fn arrived_at(&self) -> Option<SystemTime> {
        self.arrived.map(|ns| SystemTime::UNIX_EPOCH + Duration::from_nanos(ns))
    }

    pub(crate) fn arrived_ns(&self) -> Option<u64> {
        self.arrived
    }

    pub(crate) fn with_arrival(self, arrived: Option<u64>) -> Chunk<'a> {
        Chunk { arrived, ..self }
    }

    /// The first message's sequence number. The others follow, modulo 2^32, without 0.
    pub fn first_seq(&self) -> u32 {
        self.first_seq
    }

    /// The last message's sequence number, as the last of [`Chunk::records`] has it if all are valid. A sink that
    /// stores it can return it from [`Sink::last_seq`] after a restart.
    pub fn last_seq(&self) -> u32 {
        last_seq(self.first_seq, self.messages)
    }

    /// The number of messages, at least one.
    pub fn message_count(&self) -> u32 {
        self.messages
    }

    /// The records. A hostile sender in another process can change them at any time, even while the sink reads them.
    /// Check what they contain where it matters, as [`Chunk::records`] does.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The messages' payloads, in order: [`Chunk::records`] without the numbers.
    pub fn payloads(&self) -> impl Iterator<Item = &'a [u8]> {
        self.records().map(|record| record.payload())
    }

    /// The messages, in order. It ends early at an invalid record, which only a hostile sender causes: compare the
    /// number of records with [`Chunk::message_count`].
    pub fn records(&self) -> Records<'a> {
        Records { rest: self.bytes, seq: self.first_seq, left: self.messages }
    }
}

impl fmt::Debug for Chunk<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Chunk")
            .field("lane", &self.lane)
            .field("first_seq", &self.first_seq)
            .field("messages", &self.messages)
            .field("bytes", &self.bytes.len())
            .finish_non_exhaustive()
    }
}

/// Iterates over the records of a [`Chunk`].
#[derive(Clone)]
pub struct Records<'a> {
    rest: &'a [u8],
    /// The next record's number.
    seq: u32,
    left: u32,
}

impl<'a> Iterator for Records<'a> {
    type Item = Record<'a>;

    #[inline]
    fn next(&mut self) -> Option<Record<'a>> {
        self.left = self.left.checked_sub(1)?;
        let (header, behind) = self.rest.split_first_chunk::<8>()?;
        let header = u64::from_le_bytes(*header);
        let bytes = header as u32 as usize;
        if (header >> 32) as u32 != self.seq || bytes > behind.len() {
            self.left = 0;
            return None;
        }
        self.rest = behind.get(bytes.next_multiple_of(8)..).unwrap_or_default();
        let record = Record { seq: self.seq, payload: &behind[..bytes] };
        self.seq = seq_after(self.seq);
        Some(record)
    }
}

impl fmt::Debug for Records<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Records")
            .field("next_seq", &self.seq)
            .field("left", &self.left)
            .field("bytes", &self.rest.len())
            .finish_non_exhaustive()
    }
}

/// A message in a [`Chunk`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Record<'a> {
    seq: u32,
    payload: &'a [u8],
}

impl<'a> Record<'a> {
    /// Its sequence number in its lane.
    pub fn seq(&self) -> u32 {
        self.seq
    }

    /// The message's bytes.
    pub fn payload(&self) -> &'a [u8] {
        self.payload
    }
}

impl AsRef<[u8]> for Record<'_> {
    fn as_ref(&self) -> &[u8] {
        self.payload
    }
}

impl fmt::Debug for Record<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Record").field("seq", &self.seq).field("bytes", &self.payload.len()).finish_non_exhaustive()
    }
}

/// The last of `messages` consecutive sequence numbers, at least one: 1 follows 2^32 - 1.
pub(crate) fn last_seq(first_seq: u32, messages: u32) -> u32 {
    let last = u64::from(first_seq) + u64::from(messages) - 1;
    (if last > u64::from(u32::MAX) { last - u64::from(u32::MAX) } else { last }) as u32
}

/// The destination of a flush. A closure that takes chunks is a sink. A flush calls it with some thousand messages at a
/// time, and releases them after a success.
pub trait Sink: Send {
    /// Takes all of `chunks`, in order, or none of them. After an error the next call gets the same chunks again,
    /// before any others. When it returns, the chunks are as durable as the sink makes them.
    ///
    /// # Errors
    /// Any; [`Error::Sink`] is for a sink's own. After an error no message of `chunks` is released.
    fn write(&mut self, chunks: &[Chunk<'_>]) -> Result<()>;

    /// Brings everything that was written before to the disk, if the sink has one. Waits.
    ///
    /// # Errors
    /// As [`Sink::write`].
    fn sync(&mut self) -> Result<()> {
        Ok(())
    }

    /// When the flush has to call [`Sink::write`] again, even without chunks. A sink that syncs a fixed time after a
    /// write needs this.
    fn due(&self) -> Option<Instant> {
        None
    }

    /// The number of the last message of a lane that the sink has. A sink that outlives its process returns it: after a
    /// kill between write and release, the flush does not write messages up to that number again.
    fn last_seq(&self, lane: LaneId) -> Option<u32> {
        let _ = lane;
        None
    }
}

impl Sink for Box<dyn Sink> {
    fn write(&mut self, chunks: &[Chunk<'_>]) -> Result<()> {
        (**self).write(chunks)
    }

    fn sync(&mut self) -> Result<()> {
        (**self).sync()
    }

    fn due(&self) -> Option<Instant> {
        (**self).due()
    }

    fn last_seq(&self, lane: LaneId) -> Option<u32> {
        (**self).last_seq(lane)
    }
}

impl<F: FnMut(&[Chunk<'_>]) -> Result<()> + Send> Sink for F {
    fn write(&mut self, chunks: &[Chunk<'_>]) -> Result<()> {
        self(chunks)
    }
}

/// Another channel as a sink: it sends each message on, one by one, and waits for free space there. If a hostile sender
/// has damaged a chunk, the sink forwards the valid messages and returns [`Error::Corrupt`] once.
#[derive(Debug)]
pub struct Forward {
    sender: Sender,
    /// The number of chunks that were sent before an error, and the number of messages of the next one.
    sent: (usize, usize),
    /// The damage to report.
    damage: Option<String>,
}

impl Forward {
    /// Sends each message through `sender`.
    pub fn new(sender: Sender) -> Forward {
        Forward { sender, sent: (0, 0), damage: None }
    }
}

impl Sink for Forward {
    fn write(&mut self, chunks: &[Chunk<'_>]) -> Result<()> {
        for chunk in &chunks[self.sent.0.min(chunks.len())..] {
            for payload in chunk.payloads().skip(self.sent.1) {
                self.sender.send(payload)?;
                self.sent.1 += 1;
            }
            if self.sent.1 != chunk.messages as usize {
                self.damage = Some(format!(
                    "{} of {} messages are valid: their sender wrote into committed messages",
                    self.sent.1, chunk.messages
                ));
            }
            self.sent = (self.sent.0 + 1, 0);
        }
        if let Some(damage) = self.damage.take() {
            return Err(Error::Corrupt(damage));
        }
        self.sent = (0, 0);
        Ok(())
    }
}

/// Hands what a receiver receives to a sink. `Send`, not `Sync`.
///
/// The flush copies nothing, and releases a message when the sink has it. The sink gets each committed message once, in
/// its sender's order, also those that a sender committed before it died. If the sink reports what it has
/// ([`Sink::last_seq`]), that holds even after this process was killed at any point. The flush closes descriptors that
/// come with messages.
///
/// Dropping a flush does not wait, and calls no method of its sink: the sink gets no more messages, and no
/// [`Sink::sync`]. Messages that were not written stay unreleased, for the next receiver of a path channel.
/// [`Flush::sync`] first, if they matter.
///
/// ```
/// # fn main() -> pelton::Result<()> {
/// use pelton::{Chunk, Options};
/// let (senders, receiver) = Options::new().capacity(1 << 20).gather()?;
/// senders.send(b"one")?;
/// senders.send(b"two")?;
/// drop(senders);
/// let mut lines = Vec::new();
/// let (give, take) = std::sync::mpsc::channel();
/// let sink = move |chunks: &[Chunk<'_>]| {
///     chunks.iter().flat_map(Chunk::payloads).for_each(|payload| give.send(payload.to_vec()).unwrap());
///     Ok(())
/// };
/// pelton::Flush::new(&Options::new(), receiver, sink)?.run()?;
/// lines.extend(take);
/// assert_eq!(lines, [b"one", b"two"]);
/// # Ok(())
/// # }
/// ```
pub struct Flush {
    receiver: Receiver,
    sink: Box<dyn Sink>,
    bytes: u64,
    interval: Option<Duration>,
    /// Chunks that were taken and not released, in order of arrival.
    taken: Vec<Held>,
    taken_bytes: u64,
    /// When the oldest of them was taken.
    since: Option<Instant>,
    /// Whether the sink has refused the taken chunks: it gets exactly those again.
    is_refused: bool,
    /// The end of the channel, reported once everything is written.
    end: Option<Error>,
    /// An error of the flushing thread, for the next caller.
    unreported: Option<Error>,
    /// When a sender's wait for free space last caused a write.
    space_wanted_at: Option<Instant>,
    /// Empty: its allocation is reused.
    chunks: Vec<Chunk<'static>>,
    /// Set if the flush notes arrivals.
    clock: Option<ArrivalClock>,
}

/// A taken chunk, and when it arrived, if the flush notes that.
#[derive(Debug)]
struct Held {
    taken: TakenChunk,
    arrived: Option<u64>,
}

/// The time since 1970 at one moment, continued by the monotonic clock. So the times of a flush never decrease, and
/// keep their distances when somebody sets the system's clock.
#[derive(Clone, Copy, Debug)]
struct ArrivalClock {
    base_ns: u64,
    base: Instant,
}

impl ArrivalClock {
    fn new() -> ArrivalClock {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        ArrivalClock { base_ns: since.as_nanos() as u64, base: Instant::now() }
    }

    fn now(&self) -> u64 {
        self.base_ns + self.base.elapsed().as_nanos() as u64
    }
}

/// Chunks of one lane that arrive within this time become one, with the time of the first. With one chunk per arrival,
/// the headers of a stream of millions of messages would be larger than the messages. A guess: a tenth of the error of
/// a wake-up.
const ARRIVAL_STEP_NS: u64 = 10_000;

/// How often a flush that holds chunks which are not due checks whether a sender sleeps for want of free space: no
/// event reports that.
const RECHECK_INTERVAL: Duration = Duration::from_millis(10);

/// The number of taken chunks, newest first, that an arriving chunk may continue. With more concurrent senders there
/// are more chunks.
const JOINED_MAX: usize = 64;

impl Flush {
    /// Checks the options of a flush. For FFI, which keeps the receiver if they are wrong.
    #[doc(hidden)]
    pub fn check_options(options: &Options<maker::Flush>) -> Result<()> {
        checked_bytes(options.settings()).map(drop)
    }

    /// Whether this process is a fork of the handle's creator. For FFI.
    #[doc(hidden)]
    pub fn is_forked(&self) -> bool {
        self.receiver.is_forked()
    }

    /// Hands what `receiver` receives to `sink`, by [`Flush::run`]. Does not wait.
    ///
    /// # Errors
    /// [`Error::Option`].
    pub fn new(options: &Options<maker::Flush>, receiver: Receiver, sink: impl Sink + 'static) -> Result<Flush> {
        let (options, sink) = (options.settings(), Box::new(sink));
        Ok(Flush {
            receiver,
            sink,
            bytes: checked_bytes(options)?,
            interval: options.flush_interval,
            taken: Vec::new(),
            taken_bytes: 0,
            since: None,
            is_refused: false,
            end: None,
            unreported: None,
            space_wanted_at: None,
            chunks: Vec::new(),
            clock: None,
        })
    }

    /// Notes when each message arrives, for [`Chunk::arrived_at`]: the time at which this flush found it in the lane,
    /// exact to 10 µs plus the time that the flush takes to wake up, or to write the messages before. Chunks become
    /// smaller: messages that arrive at different times are in different chunks.
    pub fn note_arrivals(&mut self) {
        self.clock = Some(ArrivalClock::new());
    }

    /// Flushes until no sender is left, and syncs the sink then. A receiver with a name keeps listening, so more
    /// senders can always come. On a path channel this returns after the last present sender, and the caller can call
    /// it again. Waits as the receiver's options say.
    ///
    /// # Errors
    /// Those of the sink, and of [`Receiver::receive`] except [`Error::Closed`]. The sink has every message that came
    /// before such an error. After any error the caller can call again.
    pub fn run(&mut self) -> Result<()> {
        self.run_until(Deadline::Never).map(|_| ())
    }

    /// As [`Flush::run`], until `deadline`; false when it passes. The flush may then hold chunks that are not due: see
    /// [`Flush::flush`].
    ///
    /// # Errors
    /// As [`Flush::run`].
    pub fn run_until(&mut self, deadline: impl Into<Deadline>) -> Result<bool> {
        let deadline = deadline.into().instant();
        loop {
            let due = match self.tick() {
                Ok(due) => due,
                Err(error) if error.is_closed() => return self.sync_sink().map(|()| true),
                Err(error) => return Err(error),
            };
            let now = Instant::now();
            // Also under a steady stream of messages.
            if deadline.is_some_and(|deadline| deadline <= now) {
                return Ok(false);
            }
            if due.is_some_and(|due| due <= now) {
                continue;
            }
            let until = due.into_iter().chain(deadline).min();
            if let Err(error) = self.receiver.wait_for_message(until.map_or(Deadline::Never, Deadline::At)) {
                self.end = Some(error);
            }
        }
    }

    /// One tick of an event loop: takes the available messages, up to [`Options::flush_bytes`], and hands them to the
    /// sink if they are due. Returns when to call again if the descriptor does not become readable earlier:
    /// immediately, while more messages are available. Waits only for the sink. See [`Flush::arm`].
    ///
    /// # Errors
    /// As [`Flush::flush`].
    pub fn tick(&mut self) -> Result<Option<Instant>> {
        if self.is_refused {
            self.write()?;
        }
        let drained = self.take_available();
        let is_due = self.taken_bytes >= self.bytes
            || self.end.is_some()
            || self.sink.due().is_some_and(|due| due <= Instant::now())
            || self.since.zip(self.interval).is_some_and(|(since, interval)| since.elapsed() >= interval)
            || self.taken.iter().rev().take(JOINED_MAX).any(|held| held.taken.is_large())
            || (drained && (self.interval.is_none() || self.is_space_wanted() || self.receiver.have_all_gone()));
        if is_due || self.taken.is_empty() {
            self.write()?;
        }
        if let Some(end) = self.end.take() {
            return Err(end);
        }
        if !drained {
            return Ok(Some(Instant::now()));
        }
        let due = self.since.zip(self.interval).map(|(since, interval)| since + interval);
        let recheck = (!self.taken.is_empty()).then(|| Instant::now() + RECHECK_INTERVAL);
        Ok(due.into_iter().chain(recheck).chain(self.sink_due()).min())
    }

    /// When the sink is due next. A sink that is still due just after a write waits for an event of its own.
    fn sink_due(&self) -> Option<Instant> {
        let due = self.sink.due()?;
        let now = Instant::now();
        Some(if due <= now { now + RECHECK_INTERVAL } else { due })
    }

    /// Whether a sender waits for free space that the taken chunks occupy. The chunks are so small that only a message
    /// near the maximum size needs their space. The result is rate-limited, since a write per message would be too
    /// many.
    fn is_space_wanted(&mut self) -> bool {
        let now = Instant::now();
        if self.space_wanted_at.is_some_and(|at| now - at < RECHECK_INTERVAL) || !self.receiver.is_space_wanted() {
            return false;
        }
        self.space_wanted_at = Some(now);
        true
    }

    /// Counters of the receiver. The sink has everything that the receiver has released.
    pub fn counters(&self) -> Counters {
        self.receiver.counters()
    }

    /// As [`Receiver::arm`], with the receiver's descriptor. Does not fail: the next [`Flush::tick`] reports an error,
    /// after the messages that came before it.
    pub fn arm(&mut self) -> Armed {
        self.receiver.arm().unwrap_or_else(|error| {
            self.end = Some(error);
            Armed::Ready
        })
    }

    /// Hands all available messages to the sink, now. Does not wait for messages.
    ///
    /// # Errors
    /// As [`Flush::run`]. Once everything is in the sink, the channel's end is reported too, by [`Error::Closed`].
    pub fn flush(&mut self) -> Result<()> {
        if self.is_refused {
            self.write()?;
        }
        match self.receiver.ends_of_lanes() {
            // The ends are read once: otherwise a sender that never stops would keep this from returning.
            Ok(ends) => ends.into_iter().try_for_each(|end| self.write_lane_before(end))?,
            Err(error) => self.end = Some(error),
        }
        self.write()?;
        self.end.take().map_or_else(|| self.receiver.check_end(), Err)
    }

    /// Takes and writes a lane's messages up to a given one.
    fn write_lane_before(&mut self, end: (u32, u32)) -> Result<()> {
        let mut bytes = 0;
        loop {
            let Flush { receiver, sink, .. } = self;
            match receiver.take_chunk_before(end, self.bytes, |lane| sink.last_seq(lane)) {
                Ok(Some(taken)) => {
                    bytes += taken.chunk.bytes;
                    let is_all = bytes > taken.capacity();
                    self.add(taken);
                    // A lane holds no more than its capacity, whatever its sender writes into the headers.
                    if is_all {
                        return Ok(());
                    }
                }
                Ok(None) => return Ok(()),
                Err(error) => {
                    self.end = Some(error);
                    return Ok(());
                }
            }
            if self.taken_bytes >= self.bytes {
                self.write()?;
            }
        }
    }

    /// As [`Flush::flush`], and syncs the sink.
    ///
    /// # Errors
    /// As [`Flush::flush`].
    pub fn sync(&mut self) -> Result<()> {
        let done = self.flush();
        match &done {
            Err(error) if !error.is_closed() && !error.is_peer_died() => done,
            // The end of the channel is reported after the messages before it are durable.
            _ => self.sync_sink().and(done),
        }
    }

    fn sync_sink(&mut self) -> Result<()> {
        self.sink.sync().map_err(sink_error)
    }

    /// Takes available messages, up to `bytes`. True: no more are available.
    fn take_available(&mut self) -> bool {
        while self.taken_bytes < self.bytes && self.end.is_none() {
            let Flush { receiver, sink, .. } = self;
            match receiver.take_chunk(self.bytes - self.taken_bytes, |lane| sink.last_seq(lane)) {
                Ok(Some(taken)) => self.add(taken),
                Ok(None) => return true,
                Err(error) => self.end = Some(error),
            }
        }
        self.end.is_some()
    }

    fn add(&mut self, taken: TakenChunk) {
        self.taken_bytes += taken.chunk.bytes;
        if self.since.is_none() {
            self.since = self.interval.map(|_| Instant::now());
        }
        let arrived = self.clock.map(|clock| clock.now());
        let is_near = |before: &Held| match (before.arrived, arrived) {
            (Some(before), Some(now)) => now - before < ARRIVAL_STEP_NS,
            _ => true,
        };
        let mut before = self.taken.iter_mut().rev().take(JOINED_MAX);
        if !before.any(|before| is_near(before) && before.taken.join(&taken)) {
            self.taken.push(Held { taken, arrived });
        }
        failpoint("flush: taken");
    }

    /// Hands the taken chunks to the sink, and releases them.
    fn write(&mut self) -> Result<()> {
        if self.receiver.is_forked() {
            return Err(Error::Forked);
        }
        if self.taken.is_empty() {
            let wants = self.sink.due().is_some_and(|due| due <= Instant::now());
            return if wants { self.sink.write(&[]).map_err(sink_error) } else { Ok(()) };
        }
        let mut chunks = emptied(std::mem::take(&mut self.chunks));
        chunks.extend(self.taken.iter().map(|Held { taken, arrived }| Chunk {
            lane: taken.id,
            peer: taken.peer,
            first_seq: taken.chunk.first_seq,
            messages: taken.chunk.messages,
            bytes: self.receiver.bytes_of(taken),
            arrived: *arrived,
        }));
        failpoint("flush: before the sink");
        // Set before the call, for a sink that panics.
        self.is_refused = true;
        let written = self.sink.write(&chunks);
        self.chunks = emptied(chunks);
        self.is_refused = written.is_err();
        written.map_err(sink_error)?;
        failpoint("flush: written");
        self.receiver.release_chunks();
        failpoint("flush: released");
        self.taken.clear();
        (self.taken_bytes, self.since) = (0, None);
        Ok(())
    }

    /// Hands a sender's messages to the sink, after what others have left there. The sender's whole buffer is free
    /// then.
    fn flush_lane_of(&mut self, sender: &mut Sender) -> Result<()> {
        if self.is_refused {
            self.write()?;
        }
        if let Some(taken) = self.receiver.take_all_of(sender)? {
            self.add(taken);
        }
        self.write()?;
        self.receiver.rewind(sender);
        Ok(())
    }
}

impl AsFd for Flush {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.receiver.as_fd()
    }
}

impl fmt::Debug for Flush {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flush").field("receiver", &self.receiver).field("taken", &self.taken).finish_non_exhaustive()
    }
}

/// The end of a channel into which the sink sends is not the end of the flush's own channel.
fn sink_error(error: Error) -> Error {
    if error.is_closed() || error.is_peer_died() { Error::Sink(error.to_string()) } else { error }
}

/// The emptied vector, for chunks of another lifetime.
fn emptied<'b>(mut chunks: Vec<Chunk<'_>>) -> Vec<Chunk<'b>> {
    chunks.clear();
    // No element: the conversion reuses the allocation.
    chunks.into_iter().map(|chunk| Chunk { bytes: &[], ..chunk }).collect()
}

fn checked_bytes(options: &Settings) -> Result<u64> {
    const MOST: u64 = 1 << 30;
    match options.flush_bytes {
        bytes @ 1..=MOST => Ok(bytes),
        found => Err(Error::Option { option: "flush_bytes", found, wanted: format!("1 to {MOST} bytes") }),
    }
}

/// A handle by which threads of this process append: `Clone`, `Send` and `Sync`.
///
/// Each thread writes into a buffer of its own. Threads wait for each other only to flush: the thread that fills a
/// buffer hands it to the sink itself, one thread at a time. [`Appenders::appender`] creates a thread's own handle, the
/// cheapest way; [`Appenders::append`] finds the calling thread's handle. The sink gets one thread's messages in order.
/// Messages of different threads arrive in the order in which their buffers were flushed.
///
/// A sink must not append to the `Appenders` that flush to it: that returns [`Error::Refused`] as soon as it needs a
/// flush. It may append to other `Appenders`, through an [`Appender`].
///
/// **Dropping** the last of these handles and their [`Appender`]s flushes everything and syncs the sink. It waits as
/// long as the sink does: for the disk, or, with [`Forward`], for free space in the next channel. An error is lost
/// there, so call [`Appenders::sync`] first.
///
/// ```
/// # fn main() -> pelton::Result<()> {
/// use pelton::{Chunk, Options};
/// use std::sync::atomic::{AtomicU64, Ordering};
/// static MESSAGES: AtomicU64 = AtomicU64::new(0);
/// let appenders = pelton::Appenders::new(&Options::new(), |chunks: &[Chunk<'_>]| {
///     MESSAGES.fetch_add(chunks.iter().map(|chunk| u64::from(chunk.message_count())).sum(), Ordering::Relaxed);
///     Ok(())
/// })?;
/// std::thread::scope(|scope| {
///     for _ in 0..4 {
///         scope.spawn(|| {
///             let mut appender = appenders.appender().unwrap();
///             for n in 0..10_000u64 {
///                 appender.append(&n.to_le_bytes()).unwrap();
///             }
///         });
///     }
/// });
/// appenders.sync()?;
/// assert_eq!(MESSAGES.load(Ordering::Relaxed), 40_000);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Appenders {
    senders: Senders,
    shared: Arc<Shared>,
}

/// A thread's own handle, created by [`Appenders::appender`]. `Send`, not `Sync`. Dropping it may flush: see
/// [`Appenders`].
#[derive(Debug)]
pub struct Appender {
    sender: Sender,
    shared: Arc<Shared>,
}

/// What all handles share. The last of them drops it.
#[derive(Debug)]
struct Shared {
    /// `None` from the end on, which the flushing thread may detect later.
    flush: Arc<Mutex<Option<Flush>>>,
    /// Wakes the flushing thread at the end.
    end_doorbell: Arc<Doorbell>,
    owner: Owner,
}

thread_local! {
    /// What the calling thread is flushing: a flush, and others inside its sink.
    static FLUSHING: RefCell<Vec<*const Mutex<Option<Flush>>>> = const { RefCell::new(Vec::new()) };
}

/// A guard: the calling thread is flushing while it exists.
struct Flushing;

impl Flushing {
    /// Refused inside the sink of this very flush: the thread would deadlock.
    fn begin(flush: &Mutex<Option<Flush>>) -> Result<Flushing> {
        FLUSHING.with_borrow_mut(|flushing| {
            if flushing.contains(&std::ptr::from_ref(flush)) {
                let why = "a sink cannot append to, or flush, what flushes to it: append to something else there";
                return Err(Error::Refused(why.to_owned()));
            }
            flushing.push(flush);
            Ok(Flushing)
        })
    }
}

impl Drop for Flushing {
    fn drop(&mut self) {
        FLUSHING.with_borrow_mut(|flushing| flushing.pop());
    }
}

impl Shared {
    fn with_flush<T>(&self, work: impl FnOnce(&mut Flush) -> Result<T>) -> Result<T> {
        // A forked child lacks the thread that may hold the lock.
        if self.owner.is_forked() {
            return Err(Error::Forked);
        }
        let _flushing = Flushing::begin(&self.flush)?;
        let mut flush = locked(&self.flush);
        let flush = flush.as_mut().expect("`Some` until this is dropped");
        match flush.unreported.take() {
            Some(error) => Err(error),
            None => work(flush),
        }
    }

    /// Flushes the sender's buffer unless it has space for a message of `bytes`.
    #[cold]
    #[inline(never)]
    fn ensure_space(&self, sender: &mut Sender, bytes: usize) -> Result<()> {
        // The lane refuses a message that is too large.
        match sender.is_past_window(bytes) && bytes as u64 <= sender.message_bytes_max() {
            true => self.with_flush(|flush| flush.flush_lane_of(sender)),
            false => Ok(()),
        }
    }

    /// Starts the thread that flushes messages older than `interval`. It sleeps while there are none.
    fn flush_at_intervals(&self, interval: Duration) -> Result<()> {
        let (flush, end_doorbell) = (self.flush.clone(), self.end_doorbell.clone());
        let fd =
            self.with_flush(|flush| flush.receiver.as_fd().try_clone_to_owned().map_err(Error::system("duplicating")))?;
        let work = move || {
            os::block_signals();
            loop {
                let Some((idle, due)) = locked(&flush).as_mut().map(|flush| {
                    let idle = flush.arm().is_waiting() && flush.taken.is_empty();
                    (idle, flush.sink_due())
                }) else {
                    return;
                };
                // Waits without the lock.
                let due = if idle {
                    let _ = poll_until(&[fd.as_fd(), end_doorbell.as_fd()], [None; 2], due);
                    // An awake thread needs no wake-up from appending threads.
                    locked(&flush).as_mut().and_then(|flush| {
                        flush.receiver.disarm();
                        flush.sink.due()
                    })
                } else {
                    due
                };
                let until = due.into_iter().chain([Instant::now() + interval]).min();
                if let Ok(Ready::Rung) = poll_until(&[end_doorbell.as_fd()], [None; 2], until) {
                    // Still present if the sink dropped the last handle, in this thread.
                    let left = locked(&flush).take();
                    let _ = left.map(|mut flush| flush.sync());
                    return;
                }
                let _flushing = Flushing::begin(&flush);
                let mut flush = locked(&flush);
                let Some(flush) = flush.as_mut() else { return };
                let done = catch_unwind(AssertUnwindSafe(|| flush.flush()));
                // The next caller that flushes gets the error: some errors are reported only once.
                flush.unreported = match done.unwrap_or_else(|_| Err(Error::Sink("it panicked".to_owned()))) {
                    Err(error) if !error.is_closed() => Some(error),
                    _ => flush.unreported.take(),
                };
            }
        };
        std::thread::Builder::new()
            .name("pelton-flush".to_owned())
            .spawn(work)
            .map(|_| ())
            .map_err(Error::system("starting the thread that flushes"))
    }

    #[inline(always)]
    fn append(&self, sender: &mut Sender, payload: &[u8]) -> Result<()> {
        if sender.send_fast(payload) { Ok(()) } else { self.append_slow(sender, payload) }
    }

    #[cold]
    #[inline(never)]
    fn append_slow(&self, sender: &mut Sender, payload: &[u8]) -> Result<()> {
        self.ensure_space(sender, payload.len())?;
        match sender.try_send(payload)? {
            Sent::Sent => Ok(()),
            Sent::Full | Sent::TimedOut => unreachable!("a flushed buffer has space for any message"),
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.owner.is_forked() {
            return;
        }
        // Inside the sink it cannot flush: then the flushing thread, which is this one, does so on its return.
        let flush = Flushing::begin(&self.flush).ok().and_then(|_flushing| locked(&self.flush).take());
        self.end_doorbell.ring();
        let _ = flush.map(|mut flush| flush.sync());
    }
}

impl Appenders {
    /// A handle by which threads of this process append to `sink`, each in a buffer of its own of
    /// [`Options::flush_bytes`]. Does not wait.
    ///
    /// # Errors
    /// [`Error::Option`], [`Error::System`].
    pub fn new(options: &Options<maker::Appenders>, sink: impl Sink + 'static) -> Result<Appenders> {
        let (flushing, options) = (options.cast(), options.settings());
        let bytes = checked_bytes(options)?.max(SEGMENT_BYTES);
        // The window, and behind it, in an empty lane, the largest message.
        let lanes = Settings {
            capacity: Some(2 * bytes + SEGMENT_BYTES),
            message_bytes_max: Some(options.message_bytes_max_or(bytes - 16)),
            window: Some(bytes),
            ..options.clone()
        };
        let receiver = gather(&lanes, None)?;
        let senders = receiver.senders()?;
        let flush = Arc::new(Mutex::new(Some(Flush::new(&flushing, receiver, sink)?)));
        let end_doorbell = Arc::new(Doorbell::own().map_err(Error::system("creating a doorbell"))?);
        let owner = Owner::current().map_err(Error::system("checking which process this is"))?;
        let shared = Shared { flush, end_doorbell, owner };
        if let Some(interval) = options.flush_interval {
            shared.flush_at_intervals(interval)?;
        }
        Ok(Appenders { senders, shared: Arc::new(shared) })
    }

    /// Whether this process is a fork of the handle's creator. For FFI.
    #[doc(hidden)]
    pub fn is_forked(&self) -> bool {
        self.shared.owner.is_forked()
    }

    /// A new appender, with a buffer of its own. Does not wait, except for a flush if senders that have left still
    /// occupy all lanes.
    ///
    /// # Errors
    /// As [`Senders::sender`].
    pub fn appender(&self) -> Result<Appender> {
        let sender = match self.senders.sender() {
            // Senders that have left may still occupy lanes: a flush frees these.
            Err(Error::Refused(_)) => {
                self.flush()?;
                self.senders.sender()?
            }
            sender => sender?,
        };
        Ok(Appender { sender, shared: self.shared.clone() })
    }

    /// Appends a message to the calling thread's own buffer, which the first use creates. Waits as
    /// [`Appender::append`].
    ///
    /// # Errors
    /// As [`Appender::append`] and [`Senders::with`].
    pub fn append(&self, payload: &[u8]) -> Result<()> {
        let append = |sender: &mut Sender| self.shared.append(sender, payload);
        match self.senders.with(append) {
            Err(Error::Refused(_)) => {
                self.flush()?;
                self.senders.with(append)?
            }
            appended => appended?,
        }
    }

    /// Hands the messages of all threads to the sink. When it returns, the sink has every message whose append returned
    /// before. Waits for the sink, and for other threads that flush.
    ///
    /// # Errors
    /// The sink's; [`Error::Forked`].
    pub fn flush(&self) -> Result<()> {
        self.shared.with_flush(Flush::flush)
    }

    /// As [`Appenders::flush`], and syncs the sink.
    ///
    /// # Errors
    /// As [`Appenders::flush`].
    pub fn sync(&self) -> Result<()> {
        self.shared.with_flush(Flush::sync)
    }
}

impl Appender {
    /// Whether this process is a fork of the handle's creator. For FFI.
    #[doc(hidden)]
    pub fn is_forked(&self) -> bool {
        self.shared.owner.is_forked()
    }

    /// Its sender. For FFI: it sends and reserves on the fast path, and commits reservations.
    #[doc(hidden)]
    #[inline(always)]
    pub fn sender(&mut self) -> &mut Sender {
        &mut self.sender
    }

    /// Appends a message. It hands a full buffer to the sink, and waits for that and for other threads that flush;
    /// otherwise it does not wait.
    ///
    /// # Errors
    /// [`Error::TooLarge`] when the message is larger than the buffer. The sink's: this message is not appended, those
    /// before it are kept, and the caller can retry. [`Error::Forked`].
    #[inline(always)]
    pub fn append(&mut self, payload: &[u8]) -> Result<()> {
        self.shared.append(&mut self.sender, payload)
    }

    /// Reserves space for a message of `bytes`, written in place and appended by [`Reservation::commit`]. Waits as
    /// [`Appender::append`].
    ///
    /// # Errors
    /// As [`Appender::append`].
    pub fn reserve(&mut self, bytes: usize) -> Result<Reservation<'_>> {
        self.shared.ensure_space(&mut self.sender, bytes)?;
        Ok(self.sender.try_reserve(bytes)?.expect("a flushed buffer has space for any message"))
    }

    /// As [`Appender::reserve`], without a borrow. For FFI.
    ///
    /// # Errors
    /// As [`Appender::append`].
    #[doc(hidden)]
    pub fn reserve_space(&mut self, bytes: usize) -> Result<ReservedSpace> {
        self.shared.ensure_space(&mut self.sender, bytes)?;
        let space = self.sender.reserve_space(bytes, Deadline::Now)?;
        Ok(space.expect("a flushed buffer has space for any message"))
    }

    /// As [`Appenders::flush`].
    ///
    /// # Errors
    /// As [`Appenders::flush`].
    pub fn flush(&mut self) -> Result<()> {
        self.shared.with_flush(Flush::flush)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_number_of_a_chunk_skips_zero_where_numbers_wrap() {
        let last = |first_seq, messages| Chunk::new(LaneId([1, 2]), None, first_seq, messages, &[]).last_seq();
        assert_eq!((last(7, 1), last(7, 3)), (7, 9));
        assert_eq!((last(u32::MAX - 1, 2), last(u32::MAX, 1)), (u32::MAX, u32::MAX));
        assert_eq!((last(u32::MAX, 2), last(u32::MAX - 1, 4)), (1, 2));
        assert_eq!(last(u32::MAX, 2), seq_after(u32::MAX), "as the records count");
    }

    #[test]
    fn the_records_of_a_chunk_end_early_at_an_invalid_header() {
        let record = |seq: u64, payload: &[u8; 8]| [&(seq << 32 | 8).to_le_bytes()[..], payload].concat();
        let bytes = [record(5, b"payload5"), record(6, b"payload6"), record(9, b"payload9")].concat();
        let chunk = Chunk::new(LaneId([1, 2]), None, 5, 3, &bytes);
        let found: Vec<_> = chunk.records().map(|record| (record.seq(), record.payload())).collect();
        assert_eq!(found, [(5, &b"payload5"[..]), (6, b"payload6")]);
        assert_eq!(chunk.payloads().count(), 2);
        assert_eq!(chunk.last_seq(), 7, "by the count that the channel gave");
    }
}
