//! The lanes that a receiver serves, round-robin, each with its sender. A quantum is a lane's turn: the messages that
//! the receiver takes from it before it serves the next lane.

use crate::counters::Counters;
use crate::directory::Directory;
use crate::doorbells::Doorbells;
use crate::endpoint::Departure;
use crate::error::Result;
use crate::lane_id::LaneId;
use crate::link::{Link, PASSED_MAX, UNKNOWN_PEER};
use crate::memory::Part;
use crate::sender::Sender;
use crate::transport::{Found, PathTransport, PeerRole};
use crate::wait::Spin;
use pelton_lane::{Consumer, LaneError, Record, Sleeper, failpoint};
use pelton_os::{self as os, ReceivedFd, Segment, membarrier};
use std::collections::VecDeque;
use std::sync::Arc;

/// All lanes of a receiver: the current one; busy ones in the order of their quanta; idle ones. The end of each quantum
/// polls a few idle lanes.
#[derive(Debug)]
pub(crate) struct Lanes {
    /// The current lane.
    pub(crate) current: Box<Lane>,
    /// Other lanes that had messages lately, in the order of their quanta.
    busy: VecDeque<Box<Lane>>,
    /// Other lanes that were empty at the end of their last quantum, in the order in which they became idle, except
    /// after [`Lanes::turn_to`].
    #[expect(clippy::vec_box, reason = "a lane moves between these lists as a pointer")]
    idle: Vec<Box<Lane>>,
    /// Index of the next idle lane to poll: they are polled in turn.
    next_idle: usize,
    /// Whether a lane is removed after its sender has left: true in a receiver of several senders.
    leave: bool,
    /// The lane that never has a sender. It is stored here while another lane is current, and is current if there is no
    /// other.
    placeholder: Option<Box<Lane>>,
    /// See [`Lanes::progress`]: without the messages of the current lane.
    progress: u64,
    /// The progress at the last poll of idle lanes, in turn.
    polled: u64,
}

/// Which idle lanes a poll includes. That of an idle lane takes some 30 ns where there are a thousand, because it loads
/// from a page of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polls {
    /// All, until one has a message.
    All,
    /// The lanes that became idle last, and a few others, in turn.
    InTurn,
}

/// With several lanes, a lane's quantum ends at multiples of this number of messages. A guess: compared with the cost
/// of so many messages, a switch is cheap.
pub(crate) const QUANTUM: u32 = 64;
/// For a poll in turn: the lanes that became idle last, and the number of others.
const RECENT: usize = 16;
const OTHERS: usize = 8;

/// The next item of all lanes. Each call returns the same event until [`Lanes::pass`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    Nothing,
    /// A message of the current lane.
    Record(Record),
    /// The current lane's sender has joined.
    Joined,
    /// The current lane's sender has left and all its messages were received; or it violated the protocol.
    Left(Departure),
}

impl Lanes {
    pub(crate) fn of_one(lane: Lane) -> Lanes {
        Lanes {
            current: Box::new(lane),
            busy: VecDeque::new(),
            idle: Vec::new(),
            next_idle: 0,
            leave: false,
            placeholder: None,
            progress: 0,
            polled: 0,
        }
    }

    /// From now on, lanes join and leave with their senders. The present lane, which has no sender, is the placeholder.
    pub(crate) fn let_leave(&mut self) {
        self.leave = true;
    }

    /// Whether the current lane is the only one.
    pub(crate) fn is_one(&self) -> bool {
        self.busy.is_empty() && self.idle.is_empty()
    }

    /// Whether there is another lane that had messages at the end of its last quantum.
    pub(crate) fn is_any_busy(&self) -> bool {
        !self.busy.is_empty()
    }

    /// A count of the messages taken from all lanes, modulo 2^64. Only its differences mean anything.
    pub(crate) fn progress(&self) -> u64 {
        self.progress.wrapping_add(self.current.consumer.taken())
    }

    /// Makes `next` the current lane, and returns the one before.
    fn make_current(&mut self, next: Box<Lane>) -> Box<Lane> {
        let progress = self.progress();
        let before = std::mem::replace(&mut self.current, next);
        self.progress = progress.wrapping_sub(self.current.consumer.taken());
        before
    }

    /// The number of lanes with a sender.
    pub(crate) fn count(&self) -> usize {
        1 + self.busy.len() + self.idle.len() - usize::from(self.is_empty())
    }

    /// Whether there is no lane with a sender: the placeholder is current.
    fn is_empty(&self) -> bool {
        self.leave && self.placeholder.is_none()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Lane> {
        std::iter::once(&self.current).chain(&self.busy).chain(&self.idle).map(|lane| &**lane)
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Lane> {
        std::iter::once(&mut self.current).chain(&mut self.busy).chain(&mut self.idle).map(|lane| &mut **lane)
    }

    /// Finds the lane of that number. Returns `None` after its sender has left.
    pub(crate) fn find(&mut self, number: u32) -> Option<&mut Lane> {
        self.iter_mut().find(|lane| lane.number == number)
    }

    /// Adds a lane.
    pub(crate) fn add(&mut self, lane: Box<Lane>) {
        if self.is_empty() {
            self.placeholder = Some(self.make_current(lane));
        } else {
            self.busy.push_back(lane);
        }
    }

    /// Whether a lane may have a message: a hint.
    pub(crate) fn may_be_ready(&self) -> bool {
        self.iter().any(|lane| lane.consumer.may_be_ready())
    }

    /// Returns the next record or event of the current lane, or of the next lane that has one.
    pub(crate) fn peek(&mut self, polls: Polls) -> std::result::Result<Next, LaneError> {
        // The lanes that were empty here, the last ones of `idle`: none is visited twice, because a hostile sender may
        // clear the header that made its lane ready, and set it again.
        let mut empty = 0;
        loop {
            match self.current.peek(self.leave) {
                Ok(Next::Nothing) if self.switch(polls, empty) => empty += 1,
                // Ends only that sender's lane.
                Err(_) if self.leave => self.current.end = Some(Departure::Corrupt),
                found => return found,
            }
        }
    }

    /// As [`Lanes::may_be_ready`], but of the idle lanes it polls a few only, in turn. Also true if a sender has joined
    /// or left; it ignores lanes that are paused.
    pub(crate) fn may_be_ready_in_turn(&mut self) -> bool {
        let leaves = self.leave;
        self.current.may_be_ready(leaves)
            || self.busy.iter().any(|lane| lane.may_be_ready(leaves))
            || self.find_idle(&mut { OTHERS }, self.idle.len()).is_some()
    }

    /// Returns the index of an idle lane that may be ready, among the first `count`. Polls the last `RECENT` of these,
    /// the longest idle first, then at most `others` of the others, in turn, and subtracts them from `others`.
    fn find_idle(&mut self, others: &mut usize, count: usize) -> Option<usize> {
        let recent = count.saturating_sub(RECENT);
        if let Some(index) = (recent..count).find(|index| self.idle[*index].may_be_ready(self.leave)) {
            return Some(index);
        }
        for _ in 0..(*others).min(recent) {
            *others -= 1;
            if self.next_idle >= recent {
                self.next_idle = 0;
            }
            // A lane that is found remains the next one, so that the call that switches to it finds it at once.
            if self.idle[self.next_idle].may_be_ready(self.leave) {
                return Some(self.next_idle);
            }
            self.next_idle += 1;
        }
        None
    }

    /// Switches from the empty current lane to another that may be ready; not to the last `empty` idle ones. Returns
    /// false if there is none.
    fn switch(&mut self, polls: Polls, empty: usize) -> bool {
        // As at the end of a quantum: idle lanes would otherwise wait while others have a message at a time.
        if self.progress().wrapping_sub(self.polled) >= QUANTUM.into() {
            self.poll_idle(self.idle.len() - empty);
        }
        let mut others = if polls == Polls::All { usize::MAX } else { OTHERS };
        let next = match self.busy.pop_front() {
            Some(next) => next,
            None => match self.find_idle(&mut others, self.idle.len() - empty) {
                Some(index) => self.remove_idle(index),
                None => return false,
            },
        };
        let before = self.make_current(next);
        self.idle.push(before);
        true
    }

    /// Removes an idle lane, and keeps the order of the others and their turns.
    fn remove_idle(&mut self, index: usize) -> Box<Lane> {
        self.next_idle -= usize::from(index < self.next_idle);
        self.idle.remove(index)
    }

    /// Polls the first `count` idle lanes, in turn. Those that may be ready become busy; for each of them, one more is
    /// among those that became idle last.
    fn poll_idle(&mut self, mut count: usize) {
        self.polled = self.progress();
        let mut others = OTHERS;
        while let Some(index) = self.find_idle(&mut others, count) {
            let ready = self.remove_idle(index);
            self.busy.push_back(ready);
            count -= 1;
        }
    }

    /// Switches to lane `number`. Returns false if it does not exist.
    pub(crate) fn turn_to(&mut self, number: u32) -> bool {
        if self.current.number == number {
            return true;
        }
        let progress = self.progress();
        let others = self.busy.iter_mut().chain(&mut self.idle);
        let found = others.into_iter().find(|lane| lane.number == number);
        let turns = found.map(|lane| std::mem::swap(&mut self.current, lane)).is_some();
        self.progress = progress.wrapping_sub(self.current.consumer.taken());
        turns
    }

    /// Ends the current lane's quantum: polls some idle lanes, and switches to the next busy one.
    pub(crate) fn end_quantum(&mut self) {
        self.poll_idle(self.idle.len());
        if let Some(next) = self.busy.pop_front() {
            let before = self.make_current(next);
            self.busy.push_back(before);
        }
    }

    /// Ends the event that [`Lanes::peek`] returned. If the event was a departure, returns that sender's lane.
    pub(crate) fn pass(&mut self) -> Option<Box<Lane>> {
        if !std::mem::replace(&mut self.current.is_announced, true) {
            return None;
        }
        let next = self.busy.pop_front().or_else(|| self.idle.pop()).or_else(|| self.placeholder.take());
        next.map(|next| self.make_current(next))
    }
}

/// The result of a receiver's handshake.
#[derive(Debug)]
pub(crate) struct ReceiverParts {
    pub(crate) lane: Lane,
    pub(crate) sleeper: Sleeper,
    pub(crate) doorbells: Doorbells,
}

/// For a link: the reply lane, which leads back to the peer, and the largest message that the peer accepts.
#[derive(Debug)]
pub struct ReplyLane {
    /// The sender of the reply lane.
    pub sender: Sender,
    /// The largest message that the peer accepts.
    pub bytes_max: u64,
}

/// A consumer with its memory and the link to its producer.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) consumer: Consumer,
    pub(crate) link: Link,
    /// The last message that a predecessor may have received, as a number in the consumer page's count of messages.
    pub(crate) redelivered: u64,
    /// The lane's number in its channel.
    pub(crate) number: u32,
    /// How its sender left; `None` again after that is reported.
    pub(crate) end: Option<Departure>,
    /// Whether the arrival of its sender is reported.
    pub(crate) is_announced: bool,
    /// Whether a sender of the lane has required [`TRACED_MESSAGES`](crate::packet::TRACED_MESSAGES): messages in it
    /// may carry a traceparent, so its next sender, and that one's receivers, must have the feature too.
    pub(crate) is_traced: bool,
    /// The lane's identity, the same after a restart of either side.
    pub(crate) id: LaneId,
    /// Whether a flush has compared the lane with the contents of its sink.
    pub(crate) is_compared: bool,
    /// The receiver's user applies backpressure to the sender: the receiver does not serve this lane now.
    pub(crate) is_paused: bool,
    /// An index that the receiver's user assigns to this lane.
    pub(crate) user: usize,
    /// The reply lane, until the receiver's user takes it.
    pub(crate) reply: Option<Box<ReplyLane>>,
    /// The memory that this lane takes from the budget of the receiver's peers.
    pub(crate) _part: Option<Part>,
    /// Dropped after the consumer, which points into it.
    pub(crate) memory: LaneMemory,
}

impl Lane {
    pub(crate) fn new(consumer: Consumer, link: Link, redelivered: u64, number: u32, memory: LaneMemory) -> Lane {
        // Successors share the data segment, so it identifies the lane.
        let id = LaneId(memory.data.identity());
        Lane {
            consumer,
            link,
            redelivered,
            number,
            end: None,
            is_announced: true,
            is_traced: false,
            id,
            is_compared: false,
            is_paused: false,
            user: 0,
            reply: None,
            _part: None,
            memory,
        }
    }

    /// Opens a path channel's lane for its receiver, which continues after the messages that its predecessor released.
    pub(crate) fn open(directory: &Arc<Directory>, number: u32, receiver: Arc<Segment>) -> Result<Lane> {
        let files = directory.lane_for_receiver(number)?;
        let [page, data, consumer] = [files.producer, files.data, files.consumer].map(Arc::new);
        let memory = LaneMemory { page, data, consumer, receiver };
        let (consumer, redelivered) = memory.take_over(directory.message_bytes_max(), membarrier::register())?;
        let transport = PathTransport::new(directory.clone(), PeerRole::SenderOf(number));
        let link = Link::new(files.doorbell, transport, UNKNOWN_PEER);
        let mut lane = Lane::new(consumer, link, redelivered, number, memory);
        // After a reboot, the numbers of messages that were not durable are used again, so the boot belongs to the
        // identity.
        lane.id = lane.id.since_boot(directory.boot_id());
        Ok(lane)
    }

    /// Returns the next record of this lane. If the lane `leaves` (is removed) with its sender, also returns the
    /// sender's arrival and departure.
    fn peek(&mut self, leaves: bool) -> std::result::Result<Next, LaneError> {
        if !leaves {
            return Ok(self.consumer.peek()?.map_or(Next::Nothing, Next::Record));
        }
        if !self.is_announced {
            return Ok(Next::Joined);
        }
        // Reports the departure only after a flush has released its chunks.
        let left = |consumer: &Consumer, end| if consumer.has_taken() { Next::Nothing } else { Next::Left(end) };
        if self.end == Some(Departure::Corrupt) {
            return Ok(left(&self.consumer, Departure::Corrupt));
        }
        if self.is_stalled() {
            return Ok(Next::Nothing);
        }
        // All messages that were committed before the departure was noted are visible. [close]
        Ok(match (self.consumer.peek()?, self.end) {
            (Some(record), _) => Next::Record(record),
            (None, Some(end)) => left(&self.consumer, end),
            (None, None) => Next::Nothing,
        })
    }

    /// Whether [`Lane::peek`] may return something.
    fn may_be_ready(&self, leaves: bool) -> bool {
        if leaves && (!self.is_announced || (self.end.is_some() && !self.consumer.has_taken())) {
            return true;
        }
        let is_corrupt = leaves && self.end == Some(Departure::Corrupt);
        self.consumer.may_be_ready() && !self.is_stalled() && !is_corrupt
    }

    /// Whether the receiver does not serve this lane now. After the sender has left, it serves the remaining messages.
    #[inline(always)]
    pub(crate) fn is_stalled(&self) -> bool {
        self.is_paused && self.end.is_none()
    }

    /// Closes the lane. Its sender detects that.
    pub(crate) fn close(&mut self) {
        self.consumer.close();
        self.hang_up();
    }

    /// Rings the sender and hangs up. Call it after the closed flags are stored.
    pub(crate) fn hang_up(&self) {
        self.link.ring_peer();
        self.link.shutdown();
    }

    /// Whether a predecessor may have received the message at the cursor.
    pub(crate) fn is_redelivering(&self) -> bool {
        self.consumer.taken() < self.redelivered
    }

    /// Receives the descriptors of the message at the cursor.
    pub(crate) fn take_descriptors(&mut self, seq: u32, count: u32) -> Result<Vec<ReceivedFd>> {
        let may_be_late = self.is_redelivering();
        self.link.receive_descriptors(seq, count, may_be_late)
    }

    /// Publishes the lane's counters, and adds them to `sum`.
    pub(crate) fn add_to(&self, sum: &mut Counters) {
        self.consumer.store_counters();
        let page = self.consumer.consumer_page();
        // On a path channel other processes have written the counters, so they may have any value.
        sum.messages = sum.messages.wrapping_add(page.messages());
        sum.bytes = sum.bytes.wrapping_add(page.bytes());
        sum.waits = sum.waits.wrapping_add(page.waits());
        sum.sleeps = sum.sleeps.wrapping_add(page.sleeps());
        sum.wakes_sent = sum.wakes_sent.wrapping_add(page.wakes_sent());
    }

    /// Whether the lane has a live sender, as far as this side knows.
    pub(crate) fn has_sender(&self) -> bool {
        self.end.is_none() && self.link.peer().is_some()
    }

    /// Rings the sender, which waits for space.
    #[cold]
    #[inline(never)]
    pub(crate) fn wake_sender(&self) {
        self.link.wake_peer(|processor, at| self.consumer.note_ring(processor, at));
    }

    /// Finds the sender of a lane that this side has just opened, and rings it. Does not report an earlier sender that
    /// has gone and has left no message.
    pub(crate) fn find_and_ring_sender(&mut self, doorbells: &Doorbells, spin: &mut Spin) -> Result<()> {
        let found = self.find_sender(doorbells, spin);
        if !self.consumer.may_be_ready() {
            self.end = None;
        }
        failpoint("receiver meets: looked");
        // Rings even if the check failed.
        self.link.ring_peer();
        found
    }

    /// Finds the sender of a path channel's lane that has none.
    pub(crate) fn find_sender(&mut self, doorbells: &Doorbells, spin: &mut Spin) -> Result<()> {
        for _ in 0..=PASSED_MAX {
            let page = self.consumer.producer_page();
            match self.link.find_peer(doorbells, || (page.generation(), page.pid()))? {
                Found::Nothing => return Ok(()),
                // It has closed, but its liveness handle is still open for a moment, for instance in a child before
                // exec.
                Found::Peer(_) if self.consumer.has_producer_closed() => self.note_end(doorbells),
                Found::Peer(_) => {
                    self.end = None;
                    spin.set_peer(self.link.peer());
                    return Ok(());
                }
                // Its successor may have opened the channel already.
                Found::Passed => self.note_end(doorbells),
            }
        }
        // Checks again after the other lanes.
        doorbells.local_wake().ring();
        Ok(())
    }

    /// Checks whether the sender has left. Returns true if it just has.
    pub(crate) fn check_end(&mut self, doorbells: &Doorbells) -> Result<bool> {
        let gone = self.has_sender() && (self.consumer.has_producer_closed() || self.link.is_peer_gone()?);
        if gone {
            self.note_end(doorbells);
        }
        Ok(gone)
    }

    pub(crate) fn note_end(&mut self, doorbells: &Doorbells) {
        self.end = Some(if self.consumer.has_producer_closed() { Departure::Closed } else { Departure::PeerDied });
        self.link.lose_peer(doorbells);
    }
}

/// The segments of a consumer's lane.
#[derive(Debug)]
pub(crate) struct LaneMemory {
    pub(crate) page: Arc<Segment>,
    pub(crate) data: Arc<Segment>,
    pub(crate) consumer: Arc<Segment>,
    pub(crate) receiver: Arc<Segment>,
}

impl LaneMemory {
    pub(crate) fn attach(&self, message_bytes_max: u64, can_barrier: bool) -> Result<Consumer> {
        let memory = os::lane_memory(&self.page, &self.consumer, &self.receiver, &self.data);
        // SAFETY: the sizes of the segments were checked, and the segments are kept beside the lane until it is
        // dropped. This process created the consumer's page, or has the lock on its role, so it is the lane's only
        // consumer.
        Ok(unsafe { Consumer::attach(memory, message_bytes_max, can_barrier)? })
    }

    /// Continues in the previous consumer's page, after the messages that the previous consumer had released. This
    /// process has that consumer's role. Also returns the last message that the previous consumer may have received, by
    /// the page's count.
    pub(crate) fn take_over(&self, message_bytes_max: u64, can_barrier: bool) -> Result<(Consumer, u64)> {
        let memory = os::lane_memory(&self.page, &self.consumer, &self.receiver, &self.data);
        // SAFETY: the segment maps the page, for as long as `self` lives.
        let page = unsafe { memory.consumer.as_ref() };
        let consumer = self.attach(message_bytes_max, can_barrier)?;
        // A predecessor may have received every message that was committed before now. The stored tail is no bound:
        // while the sender lives, its stores are not ordered with those of the messages.
        let redelivered = match page.generation() {
            0 => 0,
            _ => consumer.taken().wrapping_add(consumer.end_of_committed()?.1),
        };
        // The last step, because a process that fails to attach has received nothing.
        page.start_generation(std::process::id());
        Ok((consumer, redelivered))
    }

    /// Closes the descriptors and keeps the mappings: a thousand lanes have many descriptors. For a lane that is
    /// offered to no successor.
    pub(crate) fn forget_descriptors(&mut self) {
        for segment in [&mut self.page, &mut self.data, &mut self.consumer] {
            if let Some(segment) = Arc::get_mut(segment) {
                segment.forget_descriptor();
            }
        }
    }

    pub(crate) fn attach_producer(&mut self, lane: &mut Consumer, page: Arc<Segment>, can_barrier: bool) {
        let memory = os::lane_memory(&page, &self.consumer, &self.receiver, &self.data);
        // SAFETY: the handshake checked the size of the new segment. The old one lives until the assignment below
        // replaces it.
        unsafe { lane.attach_producer(memory.producer, can_barrier) };
        self.page = page;
    }
}

/// Takes over a receiver's page. Each of its lanes keeps the page alive.
pub(crate) fn receiver_sleeper(page: &Segment, can_barrier: bool) -> Sleeper {
    // SAFETY: a receiver's page is mapped and writable. This process created it, or has the lock on its role; the lanes
    // keep it.
    unsafe { Sleeper::of_receiver(page.base().cast(), can_barrier) }
}
