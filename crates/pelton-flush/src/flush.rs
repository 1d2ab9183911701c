//! Messages as the bytes they are, handed to a sink a bufferful at a time: what a receiver takes in ([`Flush`]), or what threads
//! append ([`Appenders`]).

use pelton_channel::Counters;
use pelton_channel::Deadline;
use pelton_channel::LaneId;
use pelton_channel::Receiver;
use pelton_channel::Senders;
use pelton_channel::raw::Settings;
use pelton_channel::raw::gather;
use pelton_channel::raw::{ReservedSpace, TakenChunk};
use pelton_channel::{Error, Result};
use pelton_channel::{Options, options::maker};
use pelton_channel::{Reservation, Sender, Sent};
use pelton_lane::{SEGMENT_BYTES, failpoint, seq_after};
use pelton_os::Peer;
use pelton_os::{self as os, Doorbell, Owner, Ready, locked, poll_until};
use std::cell::RefCell;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A run of whole records of one lane, as the bytes they are: for each message a header, a little-endian u64 of
/// `seq << 32 | bytes`; the payload; and up to seven bytes, of any value, so that the next begins at a multiple of eight.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    lane: LaneId,
    peer: Option<Peer>,
    first_seq: u32,
    messages: u32,
    bytes: &'a [u8],
}

impl<'a> Run<'a> {
    /// For tests of sinks: `bytes` are what they are to be, or the sink is to find out.
    #[doc(hidden)]
    pub fn new(lane: LaneId, peer: Option<Peer>, first_seq: u32, messages: u32, bytes: &'a [u8]) -> Run<'a> {
        Run { lane, peer, first_seq, messages, bytes }
    }

    /// Whose messages they are.
    pub fn lane(&self) -> LaneId {
        self.lane
    }

    /// Who sent them, if that is known: of a path channel's sender that the receiver has not met, as it had gone before, it is not.
    pub fn peer(&self) -> Option<Peer> {
        self.peer
    }

    /// The first message's number. The others follow, modulo 2^32 and leaving out 0.
    pub fn first_seq(&self) -> u32 {
        self.first_seq
    }

    /// How many messages, at least one.
    pub fn messages(&self) -> u32 {
        self.messages
    }

    /// The records. A sender in another process that breaks the rules can change them at any time, also while they are looked
    /// at: what they say is to be checked where it matters, and [`Run::payloads`] does.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The messages' payloads, in order. Ends early where a record is not what it must be, which only a sender's breaking the
    /// rules can cause: compare the number of them with [`Run::messages`].
    pub fn payloads(&self) -> impl Iterator<Item = &'a [u8]> {
        let (mut rest, mut seq, mut left) = (self.bytes, self.first_seq, self.messages);
        std::iter::from_fn(move || {
            left = left.checked_sub(1)?;
            let (header, behind) = rest.split_first_chunk::<8>()?;
            let header = u64::from_le_bytes(*header);
            let bytes = header as u32 as usize;
            if (header >> 32) as u32 != seq || bytes > behind.len() {
                return None;
            }
            rest = behind.get(bytes.next_multiple_of(8)..).unwrap_or_default();
            seq = seq_after(seq);
            Some(&behind[..bytes])
        })
    }
}

/// Where messages are flushed to. A closure that takes runs is one: it is called with some thousand messages at a time, and what
/// it returned for is released.
pub trait Sink: Send {
    /// Takes all of `runs`, in order, or none of them: after an error the same come again, before any others.
    /// When it returns, they are as safe as the sink makes them.
    ///
    /// # Errors
    /// Any; [`Error::Sink`] is for one's own. Nothing of `runs` is released then.
    fn write(&mut self, runs: &[Run<'_>]) -> Result<()>;

    /// Has everything that was written before on the disk, where there is one. Waits.
    ///
    /// # Errors
    /// As [`Sink::write`].
    fn sync(&mut self) -> Result<()> {
        Ok(())
    }

    /// When it wants to be written to again, if only nothing: one that has the disk sync so long after it was written, for instance.
    fn due(&self) -> Option<Instant> {
        None
    }

    /// The number of the last message of a lane that the sink has, if it may have some from before: its process may have been
    /// killed after writing and before releasing, and what came up to that message is not to be written again.
    fn last_seq(&self, lane: LaneId) -> Option<u32> {
        let _ = lane;
        None
    }
}

impl Sink for Box<dyn Sink> {
    fn write(&mut self, runs: &[Run<'_>]) -> Result<()> {
        (**self).write(runs)
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

impl<F: FnMut(&[Run<'_>]) -> Result<()> + Send> Sink for F {
    fn write(&mut self, runs: &[Run<'_>]) -> Result<()> {
        self(runs)
    }
}

/// Another channel as a sink: each message is sent on, by itself. Waits for room there. Of a run that is not what it must be, which is
/// its sender's doing, what is whole is sent, and that is told once, by [`Error::Corrupt`].
#[derive(Debug)]
pub struct Forward {
    sender: Sender,
    /// Of the runs to be written, those that are sent already, since an error; and messages of the next.
    sent: (usize, usize),
    /// What is to be told of them.
    broken: Option<String>,
}

impl Forward {
    /// Sends on by `sender`.
    pub fn new(sender: Sender) -> Forward {
        Forward { sender, sent: (0, 0), broken: None }
    }
}

impl Sink for Forward {
    fn write(&mut self, runs: &[Run<'_>]) -> Result<()> {
        for run in &runs[self.sent.0.min(runs.len())..] {
            for payload in run.payloads().skip(self.sent.1) {
                self.sender.send(payload)?;
                self.sent.1 += 1;
            }
            if self.sent.1 != run.messages as usize {
                self.broken = Some(format!(
                    "{} of {} messages are whole: their sender wrote behind them",
                    self.sent.1, run.messages
                ));
            }
            self.sent = (self.sent.0 + 1, 0);
        }
        if let Some(broken) = self.broken.take() {
            return Err(Error::Corrupt(broken));
        }
        self.sent = (0, 0);
        Ok(())
    }
}

/// Takes what a receiver receives to a sink: made by `Flush::new`. `Send`, not `Sync`.
///
/// Nothing is copied on the way, and a message is released when the sink has it. Everything that was committed comes to the sink
/// once and in the order of its sender: also what a sender committed before it died, and, if the sink can say what it has
/// ([`Sink::last_seq`]), also after this process was killed at any point. Descriptors that come with messages are closed.
///
/// ```
/// # fn main() -> pelton::Result<()> {
/// use pelton::{Options, Run};
/// let (senders, receiver) = Options::new().capacity(1 << 20).gather()?;
/// senders.send(b"one")?;
/// senders.send(b"two")?;
/// drop(senders);
/// let mut lines = Vec::new();
/// let (give, take) = std::sync::mpsc::channel();
/// let sink = move |runs: &[Run<'_>]| {
///     runs.iter().flat_map(Run::payloads).for_each(|payload| give.send(payload.to_vec()).unwrap());
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
    /// What is taken and not released, in the order in which it came.
    taken: Vec<TakenChunk>,
    taken_bytes: u64,
    /// Since when there is something.
    since: Option<Instant>,
    /// Whether the sink has refused what is taken: it gets just that again.
    is_refused: bool,
    /// How the channel ended, to be told once everything is written.
    end: Option<Error>,
    /// What nobody has been told of yet.
    untold: Option<Error>,
    /// When a sender was last believed that it wants room.
    believed: Option<Instant>,
    /// Empty: kept for its memory.
    runs: Vec<Run<'static>>,
}

/// While something is taken that is not due, it is looked so often whether a sender sleeps for want of that room: nothing
/// tells of it.
const NAP: Duration = Duration::from_millis(10);

/// So many runs are looked at, newest first, for the one that what comes next follows on. With more senders than that at a time
/// there are more runs.
const RUNS_LOOKED_AT: usize = 64;

impl Flush {
    /// Whether a flush can be made with these options. For bindings, whose receiver stays where it is if not.
    #[doc(hidden)]
    pub fn check_options(options: &Options<maker::Flush>) -> Result<()> {
        checked_bytes(options.settings()).map(drop)
    }

    /// Whether this process is a fork of the one that made the handle. For bindings.
    #[doc(hidden)]
    pub fn is_forked(&self) -> bool {
        self.receiver.is_forked()
    }

    /// Takes what `receiver` receives to `sink`, by [`Flush::run`]. Does not wait.
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
            untold: None,
            believed: None,
            runs: Vec::new(),
        })
    }

    /// Flushes until there are no more senders, and has the sink sync then. A receiver with a name, which goes on listening,
    /// has always some to come; on a path channel the end is that of the last sender there is, and it can be called again.
    /// Waits as the receiver's options say.
    ///
    /// # Errors
    /// Those of the sink, and [`Receiver::receive`]'s, but for [`Error::Closed`]. What came before such an error is in the sink.
    /// After any it can be called again.
    pub fn run(&mut self) -> Result<()> {
        self.run_to(None).map(|_| ())
    }

    /// As [`Flush::run`], until `deadline`; false when it passes. Something may be taken then that is not due yet: see
    /// [`Flush::now`].
    ///
    /// # Errors
    /// As [`Flush::run`].
    pub fn run_until(&mut self, deadline: Instant) -> Result<bool> {
        self.run_to(Some(deadline))
    }

    fn run_to(&mut self, deadline: Option<Instant>) -> Result<bool> {
        loop {
            let due = match self.turn() {
                Ok(due) => due,
                Err(error) if error.is_closed() => return self.sync_sink().map(|()| true),
                Err(error) => return Err(error),
            };
            let now = Instant::now();
            // Also while there is always more.
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

    /// For an event loop: takes what is there, up to a bufferful, and hands it to the sink if it is due. Answers when to call
    /// again, if the descriptor does not become readable before; at once, while there is more. Waits for the sink alone. See
    /// [`Flush::arm`].
    ///
    /// # Errors
    /// As [`Flush::now`].
    pub fn turn(&mut self) -> Result<Option<Instant>> {
        if self.is_refused {
            self.write()?;
        }
        let drained = self.take();
        let is_due = self.taken_bytes >= self.bytes
            || self.end.is_some()
            || self.sink.due().is_some_and(|due| due <= Instant::now())
            || self.since.zip(self.interval).is_some_and(|(since, interval)| since.elapsed() >= interval)
            || self.taken.iter().rev().take(RUNS_LOOKED_AT).any(TakenChunk::is_large)
            || (drained && (self.interval.is_none() || self.is_room_wanted() || self.receiver.have_all_gone()));
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
        let nap = (!self.taken.is_empty()).then(|| Instant::now() + NAP);
        Ok(due.into_iter().chain(nap).chain(self.sink_due()).min())
    }

    /// When the sink is to be written to again. One that was, just now, and is due still, waits for something itself.
    fn sink_due(&self) -> Option<Instant> {
        let due = self.sink.due()?;
        let now = Instant::now();
        Some(if due <= now { now + NAP } else { due })
    }

    /// Whether a sender waits for room that is taken. So little as is taken of its lane it needs for a message nearly as large as can
    /// be, and not often: one that says so with every message is believed once in a while, lest each be a write.
    fn is_room_wanted(&mut self) -> bool {
        let now = Instant::now();
        if self.believed.is_some_and(|at| now - at < NAP) || !self.receiver.is_space_wanted() {
            return false;
        }
        self.believed = Some(now);
        true
    }

    /// Figures of the receiver: what it has released, the sink has.
    pub fn counters(&self) -> Counters {
        self.receiver.counters()
    }

    /// As [`Receiver::arm`], whose descriptor this has: true, go back to the loop. Does not fail: what is wrong is told by the next
    /// [`Flush::turn`], after what came before.
    pub fn arm(&mut self) -> bool {
        self.receiver.arm().unwrap_or_else(|error| {
            self.end = Some(error);
            false
        })
    }

    /// Hands everything that is there to the sink, now. Does not wait for messages.
    ///
    /// # Errors
    /// As [`Flush::run`]; the end of the channel, once everything is in the sink, by [`Error::Closed`] too.
    pub fn now(&mut self) -> Result<()> {
        if self.is_refused {
            self.write()?;
        }
        match self.receiver.ends_of_lanes() {
            // What comes meanwhile is not waited for, lest a sender that never stops keep this from returning.
            Ok(ends) => ends.into_iter().try_for_each(|end| self.lane_before(end))?,
            Err(error) => self.end = Some(error),
        }
        self.write()?;
        self.end.take().map_or_else(|| self.receiver.check_end(), Err)
    }

    /// Takes, and writes, what came by a lane before some message of it.
    fn lane_before(&mut self, end: (u32, u32)) -> Result<()> {
        let mut bytes = 0;
        loop {
            let Flush { receiver, sink, .. } = self;
            match receiver.take_chunk_before(end, self.bytes, |lane| sink.last_seq(lane)) {
                Ok(Some(taken)) => {
                    bytes += taken.chunk.bytes;
                    let is_all = bytes > taken.capacity();
                    self.add(taken);
                    // No more than a lane can have had, whatever its sender says.
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

    /// As [`Flush::now`], and has the sink sync.
    ///
    /// # Errors
    /// As [`Flush::now`].
    pub fn sync(&mut self) -> Result<()> {
        let done = self.now();
        match &done {
            Err(error) if !error.is_closed() && !error.is_peer_died() => done,
            // The end of the channel is told after what came before it is safe.
            _ => self.sync_sink().and(done),
        }
    }

    fn sync_sink(&mut self) -> Result<()> {
        self.sink.sync().map_err(of_sink)
    }

    /// Takes what is there, up to a bufferful. True: nothing more is.
    fn take(&mut self) -> bool {
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
        if !self.taken.iter_mut().rev().take(RUNS_LOOKED_AT).any(|before| before.join(&taken)) {
            self.taken.push(taken);
        }
        failpoint("flush: taken");
    }

    /// Hands what is taken to the sink, and releases it.
    fn write(&mut self) -> Result<()> {
        if self.receiver.is_forked() {
            return Err(Error::Forked);
        }
        if self.taken.is_empty() {
            let wants = self.sink.due().is_some_and(|due| due <= Instant::now());
            return if wants { self.sink.write(&[]).map_err(of_sink) } else { Ok(()) };
        }
        let mut runs = emptied(std::mem::take(&mut self.runs));
        runs.extend(self.taken.iter().map(|taken| Run {
            lane: taken.id,
            peer: taken.peer,
            first_seq: taken.chunk.first_seq,
            messages: taken.chunk.messages,
            bytes: self.receiver.bytes_of(taken),
        }));
        failpoint("flush: before the sink");
        // Also of one that panics.
        self.is_refused = true;
        let written = self.sink.write(&runs);
        self.runs = emptied(runs);
        self.is_refused = written.is_err();
        written.map_err(of_sink)?;
        failpoint("flush: written");
        self.receiver.release_chunks();
        failpoint("flush: released");
        self.taken.clear();
        (self.taken_bytes, self.since) = (0, None);
        Ok(())
    }

    /// Hands a sender's messages to the sink, and what was left of others'. All of its buffer is free then.
    fn lane_of(&mut self, sender: &mut Sender) -> Result<()> {
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

/// The end of a channel that the sink sends to is not that of the flush's own.
fn of_sink(error: Error) -> Error {
    if error.is_closed() || error.is_peer_died() { Error::Sink(error.to_string()) } else { error }
}

/// The vector without what was in it, for runs that live shorter or longer.
fn emptied<'b>(mut runs: Vec<Run<'_>>) -> Vec<Run<'b>> {
    runs.clear();
    // Collected in place, from nothing.
    runs.into_iter().map(|run| Run { bytes: &[], ..run }).collect()
}

fn checked_bytes(options: &Settings) -> Result<u64> {
    const MOST: u64 = 1 << 30;
    match options.flush_bytes {
        bytes @ 1..=MOST => Ok(bytes),
        found => Err(Error::Option { option: "flush_bytes", found, wanted: format!("1 to {MOST} bytes") }),
    }
}

/// Makes what threads of this process append by: made by `Appenders::new`. `Clone`, `Send` and `Sync`.
///
/// Each thread writes into a buffer of its own, and no thread waits for another but to flush: when its buffer is full, a thread hands
/// that to the sink itself, one thread at a time. [`Appenders::appender`] makes what a thread keeps, which costs least;
/// [`Appenders::append`] finds the calling thread's own. In the sink the messages of one thread are in order; those of different
/// threads are in whatever order their buffers were flushed.
///
/// A sink that appends to what is flushed to it is refused ([`Error::Refused`]) once that would have to be flushed; to other
/// `Appenders` it appends by an [`Appender`].
///
/// When the last of these and of the [`Appender`]s is dropped, everything is flushed; an error would be lost there, so call
/// [`Appenders::sync`] before.
///
/// ```
/// # fn main() -> pelton::Result<()> {
/// use pelton::{Options, Run};
/// use std::sync::atomic::{AtomicU64, Ordering};
/// static MESSAGES: AtomicU64 = AtomicU64::new(0);
/// let appenders = pelton::Appenders::new(&Options::new(), |runs: &[Run<'_>]| {
///     MESSAGES.fetch_add(runs.iter().map(|run| u64::from(run.messages())).sum(), Ordering::Relaxed);
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

/// What one thread appends by: made by [`Appenders::appender`]. `Send`, not `Sync`.
#[derive(Debug)]
pub struct Appender {
    sender: Sender,
    shared: Arc<Shared>,
}

/// What all who append share. Ends with the last of them.
#[derive(Debug)]
struct Shared {
    /// Until the end, which the thread that flushes at intervals may not have heard of yet.
    flush: Arc<Mutex<Option<Flush>>>,
    /// Rung at the end.
    ends: Arc<Doorbell>,
    owner: Owner,
}

thread_local! {
    /// What the calling thread is flushing, one from within the sink of the other.
    static FLUSHING: RefCell<Vec<*const Mutex<Option<Flush>>>> = const { RefCell::new(Vec::new()) };
}

/// While it lives, the calling thread is flushing.
struct Flushing;

impl Flushing {
    /// Refused in the sink of this very flush: the thread would wait for itself.
    fn begin(flush: &Mutex<Option<Flush>>) -> Result<Flushing> {
        FLUSHING.with_borrow_mut(|flushing| {
            if flushing.contains(&std::ptr::from_ref(flush)) {
                let why =
                    "a sink cannot append to, or flush, what is being flushed to it: append to something else there";
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
    fn with<T>(&self, with: impl FnOnce(&mut Flush) -> Result<T>) -> Result<T> {
        // A forked child does not have the thread that may hold the lock.
        if self.owner.is_forked() {
            return Err(Error::Forked);
        }
        let _flushing = Flushing::begin(&self.flush)?;
        let mut flush = locked(&self.flush);
        let flush = flush.as_mut().expect("it is there until this ends");
        match flush.untold.take() {
            Some(error) => Err(error),
            None => with(flush),
        }
    }

    /// Flushes the sender's buffer, unless a message of `bytes` has room there.
    #[cold]
    #[inline(never)]
    fn make_room(&self, sender: &mut Sender, bytes: usize) -> Result<()> {
        // One that is too large is for the lane to refuse.
        match sender.is_past_window(bytes) && bytes as u64 <= sender.message_bytes_max() {
            true => self.with(|flush| flush.lane_of(sender)),
            false => Ok(()),
        }
    }

    /// Has a thread of its own flush what has waited for so long. It sleeps while there is nothing.
    fn flush_at_intervals(&self, interval: Duration) -> Result<()> {
        let (flush, ends) = (self.flush.clone(), self.ends.clone());
        let fd =
            self.with(|flush| flush.receiver.as_fd().try_clone_to_owned().map_err(Error::system("duplicating")))?;
        let work = move || {
            os::block_signals();
            loop {
                let Some((idle, due)) = locked(&flush).as_mut().map(|flush| {
                    let idle = flush.arm() && flush.taken.is_empty();
                    (idle, flush.sink_due())
                }) else {
                    return;
                };
                // Without the lock.
                let due = if idle {
                    let _ = poll_until(&[fd.as_fd(), ends.as_fd()], [None; 2], due);
                    // Until the next sleep nobody need look whether this one does.
                    locked(&flush).as_mut().and_then(|flush| {
                        flush.receiver.disarm();
                        flush.sink.due()
                    })
                } else {
                    due
                };
                let until = due.into_iter().chain([Instant::now() + interval]).min();
                if let Ok(Ready::Rung) = poll_until(&[ends.as_fd()], [None; 2], until) {
                    // It is there still if the last handle was dropped by the sink, in this thread.
                    let left = locked(&flush).take();
                    let _ = left.map(|mut flush| flush.sync());
                    return;
                }
                let _flushing = Flushing::begin(&flush);
                let mut flush = locked(&flush);
                let Some(flush) = flush.as_mut() else { return };
                let done = catch_unwind(AssertUnwindSafe(|| flush.now()));
                // Whoever flushes next is told: some errors are told only once.
                flush.untold = match done.unwrap_or_else(|_| Err(Error::Sink("it panicked".to_owned()))) {
                    Err(error) if !error.is_closed() => Some(error),
                    _ => flush.untold.take(),
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
        if sender.send_fast(payload) { Ok(()) } else { self.append_slowly(sender, payload) }
    }

    #[cold]
    #[inline(never)]
    fn append_slowly(&self, sender: &mut Sender, payload: &[u8]) -> Result<()> {
        self.make_room(sender, payload.len())?;
        match sender.try_send(payload)? {
            Sent::Sent => Ok(()),
            Sent::Full | Sent::TimedOut => unreachable!("a buffer just flushed has room for any message"),
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.owner.is_forked() {
            return;
        }
        // In the sink: then the thread that flushes does this, which is the one that is here.
        let flush = Flushing::begin(&self.flush).ok().and_then(|_flushing| locked(&self.flush).take());
        self.ends.ring();
        let _ = flush.map(|mut flush| flush.sync());
    }
}

impl Appenders {
    /// Makes what many threads of this process append to `sink` by, each in a buffer of its own of
    /// [`Options::flush_bytes`]. Does not wait.
    ///
    /// # Errors
    /// [`Error::Option`], [`Error::System`].
    pub fn new(options: &Options<maker::Appenders>, sink: impl Sink + 'static) -> Result<Appenders> {
        let (flushing, options) = (options.cast(), options.settings());
        let bytes = checked_bytes(options)?.max(SEGMENT_BYTES);
        // Up to the window, and behind it, in an empty lane, the largest message.
        let lanes = Settings {
            capacity: Some(2 * bytes + SEGMENT_BYTES),
            message_bytes_max: Some(options.message_bytes_max_or(bytes - 16)),
            window: Some(bytes),
            ..options.clone()
        };
        let receiver = gather(&lanes, None)?;
        let senders = receiver.senders()?;
        let flush = Arc::new(Mutex::new(Some(Flush::new(&flushing, receiver, sink)?)));
        let ends = Arc::new(Doorbell::own().map_err(Error::system("making a bell"))?);
        let owner = Owner::current().map_err(Error::system("looking whose handle this is"))?;
        let shared = Shared { flush, ends, owner };
        if let Some(interval) = options.flush_interval {
            shared.flush_at_intervals(interval)?;
        }
        Ok(Appenders { senders, shared: Arc::new(shared) })
    }

    /// Whether this process is a fork of the one that made the handle. For bindings.
    #[doc(hidden)]
    pub fn is_forked(&self) -> bool {
        self.shared.owner.is_forked()
    }

    /// A new appender, with a buffer of its own. Does not wait.
    ///
    /// # Errors
    /// As [`Senders::sender`].
    pub fn appender(&self) -> Result<Appender> {
        let sender = match self.senders.sender() {
            // Perhaps only those that have gone are too many.
            Err(Error::Refused(_)) => {
                self.flush()?;
                self.senders.sender()?
            }
            sender => sender?,
        };
        Ok(Appender { sender, shared: self.shared.clone() })
    }

    /// Appends a message to the calling thread's own buffer, which is made at its first use.
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

    /// Hands to the sink what any thread has appended. Everything whose append had returned before is there when this returns.
    ///
    /// # Errors
    /// The sink's; [`Error::Forked`].
    pub fn flush(&self) -> Result<()> {
        self.shared.with(Flush::now)
    }

    /// As [`Appenders::flush`], and has the sink sync.
    ///
    /// # Errors
    /// As [`Appenders::flush`].
    pub fn sync(&self) -> Result<()> {
        self.shared.with(Flush::sync)
    }
}

impl Appender {
    /// Whether this process is a fork of the one that made the handle. For bindings.
    #[doc(hidden)]
    pub fn is_forked(&self) -> bool {
        self.shared.owner.is_forked()
    }

    /// Its sender. For bindings, which send and reserve by it what has room at once, and commit what they reserved.
    #[doc(hidden)]
    #[inline(always)]
    pub fn sender(&mut self) -> &mut Sender {
        &mut self.sender
    }

    /// Appends a message. Hands a full buffer to the sink, which takes as long as that takes and as long as other threads do that;
    /// else it waits for nothing.
    ///
    /// # Errors
    /// [`Error::TooLarge`] when the message is larger than the buffer; the sink's, which took nothing: this message is not
    /// appended, those before it are kept, and it can be tried again. [`Error::Forked`].
    #[inline(always)]
    pub fn append(&mut self, payload: &[u8]) -> Result<()> {
        self.shared.append(&mut self.sender, payload)
    }

    /// Room for a message of `bytes`, to be written in place: appended by [`Reservation::commit`]. Waits as [`Appender::append`].
    ///
    /// # Errors
    /// As [`Appender::append`].
    pub fn reserve(&mut self, bytes: usize) -> Result<Reservation<'_>> {
        self.shared.make_room(&mut self.sender, bytes)?;
        Ok(self.sender.try_reserve(bytes)?.expect("a buffer just flushed has room for any message"))
    }

    /// As [`Appender::reserve`], without a borrow. For FFI.
    ///
    /// # Errors
    /// As [`Appender::append`].
    #[doc(hidden)]
    pub fn reserve_space(&mut self, bytes: usize) -> Result<ReservedSpace> {
        self.shared.make_room(&mut self.sender, bytes)?;
        let space = self.sender.reserve_space(bytes, Deadline::Now)?;
        Ok(space.expect("a buffer just flushed has space for any message"))
    }

    /// As [`Appenders::flush`].
    ///
    /// # Errors
    /// As [`Appenders::flush`].
    pub fn flush(&mut self) -> Result<()> {
        self.shared.with(Flush::now)
    }
}
