//! The lanes that a receiver serves, round-robin, each with its sender.

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

/// All lanes of a receiver: one that is served, busy ones in the order of their quanta, and idle ones, which are polled
/// now and then.
#[derive(Debug)]
pub(crate) struct Lanes {
    /// The lane that is served.
    pub(crate) current: Box<Lane>,
    /// Others that had messages lately, in the order of their quanta.
    busy: VecDeque<Box<Lane>>,
    /// Others that were empty when they were served last.
    #[expect(clippy::vec_box, reason = "a lane goes from turn to turn as a pointer")]
    idle: Vec<Box<Lane>>,
    /// Index of the idle lane that is polled next.
    next_idle: usize,
    /// Whether a lane leaves with its sender: where senders join and leave.
    leave: bool,
    /// Served when there is no other lane: it has no sender, ever.
    nobody: Option<Box<Lane>>,
}

/// Idle lanes that are polled at the end of a quantum: few, so that a thousand of them cost busy lanes next to nothing.
const IDLE_LOOKS: usize = 32;

/// What is next, of all lanes. What is not a message stays next until [`Lanes::pass`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    Nothing,
    /// A message of the current lane.
    Record(Record),
    /// The current lane's sender has joined.
    Joined,
    /// The current lane's sender has left, and all its messages were received; or it broke the rules.
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
            nobody: None,
        }
    }

    /// From now on lanes join and leave with their senders; the present lane has no sender.
    pub(crate) fn let_leave(&mut self) {
        self.leave = true;
    }

    /// Whether there is no lane but the current one.
    pub(crate) fn is_one(&self) -> bool {
        self.busy.is_empty() && self.idle.is_empty()
    }

    /// The number of lanes with a sender.
    pub(crate) fn count(&self) -> usize {
        1 + self.busy.len() + self.idle.len() - usize::from(self.has_nobody())
    }

    /// Whether the lane without a sender is served.
    fn has_nobody(&self) -> bool {
        self.leave && self.nobody.is_none()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Lane> {
        std::iter::once(&self.current).chain(&self.busy).chain(&self.idle).map(|lane| &**lane)
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Lane> {
        std::iter::once(&mut self.current).chain(&mut self.busy).chain(&mut self.idle).map(|lane| &mut **lane)
    }

    /// The lane of that number, unless its sender has left.
    pub(crate) fn find(&mut self, number: u32) -> Option<&mut Lane> {
        self.iter_mut().find(|lane| lane.number == number)
    }

    /// Adds a lane.
    pub(crate) fn add(&mut self, lane: Box<Lane>) {
        if self.has_nobody() {
            self.nobody = Some(std::mem::replace(&mut self.current, lane));
        } else {
            self.busy.push_back(lane);
        }
    }

    /// Whether a message waits: a hint.
    pub(crate) fn may_be_ready(&self) -> bool {
        self.iter().any(|lane| lane.consumer.may_be_ready())
    }

    /// What is next: of the current lane, or of the next one that has anything.
    pub(crate) fn peek(&mut self) -> std::result::Result<Next, LaneError> {
        // A hostile sender may withdraw what made its lane ready.
        for _ in 0..=self.count() {
            match self.current.peek(self.leave) {
                Ok(Next::Nothing) if self.go_on() => {}
                // It concerns only that sender.
                Err(_) if self.leave => self.current.end = Some(Departure::Corrupt),
                found => return found,
            }
        }
        Ok(Next::Nothing)
    }

    /// The current lane is empty: switches to another that may be ready. Returns false if there is none.
    fn go_on(&mut self) -> bool {
        if let Some(next) = self.busy.pop_front() {
            let empty = std::mem::replace(&mut self.current, next);
            self.idle.push(empty);
            return true;
        }
        match self.idle.iter().position(|lane| lane.may_be_ready(self.leave)) {
            Some(index) => {
                std::mem::swap(&mut self.current, &mut self.idle[index]);
                true
            }
            None => false,
        }
    }

    /// Switches to that lane. Returns false if there is none.
    pub(crate) fn turn_to(&mut self, number: u32) -> bool {
        if self.current.number == number {
            return true;
        }
        let others = self.busy.iter_mut().chain(&mut self.idle);
        let found = others.into_iter().find(|lane| lane.number == number);
        found.map(|lane| std::mem::swap(&mut self.current, lane)).is_some()
    }

    /// The current lane's quantum is over.
    pub(crate) fn end_turn(&mut self) {
        for _ in 0..IDLE_LOOKS.min(self.idle.len()) {
            if self.next_idle >= self.idle.len() {
                self.next_idle = 0;
            }
            match self.idle[self.next_idle].may_be_ready(self.leave) {
                true => self.busy.push_back(self.idle.swap_remove(self.next_idle)),
                false => self.next_idle += 1,
            }
        }
        if let Some(next) = self.busy.pop_front() {
            self.busy.push_back(std::mem::replace(&mut self.current, next));
        }
    }

    /// The event that [`Lanes::peek`] returned is delivered. Returns the lane, if it has left.
    pub(crate) fn pass(&mut self) -> Option<Box<Lane>> {
        if !std::mem::replace(&mut self.current.is_announced, true) {
            return None;
        }
        let next = self.busy.pop_front().or_else(|| self.idle.pop()).or_else(|| self.nobody.take());
        next.map(|next| std::mem::replace(&mut self.current, next))
    }
}

/// What a handshake makes for a receiver.
#[derive(Debug)]
pub(crate) struct ReceiverParts {
    pub(crate) lane: Lane,
    pub(crate) sleeper: Sleeper,
    pub(crate) doorbells: Doorbells,
}

/// Of a link of two lanes: the lane back to the sender, and the largest message that the sender takes.
#[derive(Debug)]
pub struct ReplyLane {
    /// The lane back.
    pub sender: Sender,
    /// The largest message that the peer takes.
    pub bytes_max: u64,
}

/// A consumer with its memory and the link to its producer.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) consumer: Consumer,
    pub(crate) link: Link,
    /// Messages up to this one, in the count of the consumer's page, may have been delivered to a predecessor.
    pub(crate) redelivered: u64,
    /// The lane's number in its channel.
    pub(crate) number: u32,
    /// How its sender left, until that is reported.
    pub(crate) end: Option<Departure>,
    /// Whether the arrival of its sender is reported.
    pub(crate) is_announced: bool,
    /// Distinguishes it from every other lane, also after a restart of either side.
    pub(crate) id: LaneId,
    /// Whether a flush has compared the lane with what its sink has.
    pub(crate) is_compared: bool,
    /// Nothing of this lane is served for now, because the receiver's user applies backpressure to its sender.
    pub(crate) is_paused: bool,
    /// What the receiver's user keeps of this lane: an index of its own.
    pub(crate) user: usize,
    /// The lane back, until the receiver's user takes it.
    pub(crate) reply: Option<Box<ReplyLane>>,
    /// Its part of the receiver's memory for its peers.
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
            id,
            is_compared: false,
            is_paused: false,
            user: 0,
            reply: None,
            _part: None,
            memory,
        }
    }

    /// The receiver's part of a path channel's lane: it continues where its predecessor had released to.
    pub(crate) fn open(directory: &Arc<Directory>, number: u32, receiver: Arc<Segment>) -> Result<Lane> {
        let files = directory.lane_for_receiver(number)?;
        let [page, data, consumer] = [files.producer, files.data, files.consumer].map(Arc::new);
        let memory = LaneMemory { page, data, consumer, receiver };
        let (consumer, redelivered) = memory.take_over(directory.message_bytes_max(), membarrier::register())?;
        let transport = PathTransport::new(directory.clone(), PeerRole::SenderOf(number));
        let link = Link::new(files.doorbell, transport, UNKNOWN_PEER);
        let mut lane = Lane::new(consumer, link, redelivered, number, memory);
        // After a reboot, numbers may come again, of messages that were not on the disk.
        lane.id = lane.id.since_boot(directory.boot_id());
        Ok(lane)
    }

    /// What is next in this lane. If it `leaves` with its sender, that includes the sender's arrival and departure.
    fn peek(&mut self, leaves: bool) -> std::result::Result<Next, LaneError> {
        if !leaves {
            return Ok(self.consumer.peek()?.map_or(Next::Nothing, Next::Record));
        }
        if !self.is_announced {
            return Ok(Next::Joined);
        }
        // The flush releases its chunks first.
        let left = |consumer: &Consumer, end| if consumer.has_taken() { Next::Nothing } else { Next::Left(end) };
        if self.end == Some(Departure::Corrupt) {
            return Ok(left(&self.consumer, Departure::Corrupt));
        }
        if self.is_stalled() {
            return Ok(Next::Nothing);
        }
        // What was committed before the departure was noted is visible. [close]
        Ok(match (self.consumer.peek()?, self.end) {
            (Some(record), _) => Next::Record(record),
            (None, Some(end)) => left(&self.consumer, end),
            (None, None) => Next::Nothing,
        })
    }

    /// Whether [`Lane::peek`] may return something.
    fn may_be_ready(&self, leaves: bool) -> bool {
        let goes = self.end.is_some() && !self.consumer.has_taken();
        (self.consumer.may_be_ready() && !self.is_stalled()) || (leaves && (goes || !self.is_announced))
    }

    /// Whether nothing is served of this lane now. After its sender has left, what remains is served.
    #[inline(always)]
    pub(crate) fn is_stalled(&self) -> bool {
        self.is_paused && self.end.is_none()
    }

    /// Closes the lane for its sender.
    pub(crate) fn close(&mut self) {
        self.consumer.close();
        self.hang_up();
    }

    /// After the closed flags are stored.
    pub(crate) fn hang_up(&self) {
        self.link.ring_peer();
        self.link.shutdown();
    }

    /// Whether a predecessor may have seen the message at the cursor.
    pub(crate) fn is_redelivering(&self) -> bool {
        self.consumer.taken() < self.redelivered
    }

    /// The descriptors of the message at the cursor.
    pub(crate) fn take_descriptors(&mut self, seq: u32, count: u32) -> Result<Vec<ReceivedFd>> {
        let may_be_late = self.is_redelivering();
        self.link.receive_descriptors(seq, count, may_be_late)
    }

    /// Adds the lane's counters, and publishes them.
    pub(crate) fn add_to(&self, sum: &mut Counters) {
        self.consumer.store_counters();
        let page = self.consumer.consumer_page();
        // On a path channel other processes have written them: they may have any value.
        sum.messages = sum.messages.wrapping_add(page.messages());
        sum.bytes = sum.bytes.wrapping_add(page.bytes());
        sum.waits = sum.waits.wrapping_add(page.waits());
        sum.sleeps = sum.sleeps.wrapping_add(page.sleeps());
        sum.wakes_sent = sum.wakes_sent.wrapping_add(page.wakes_sent());
    }

    pub(crate) fn is_sender_here(&self) -> bool {
        self.end.is_none() && self.link.peer().is_some()
    }

    /// Finds the sender of a lane that was just opened, and rings it. A sender that left before, and left no message,
    /// is not reported.
    pub(crate) fn meet(&mut self, doorbells: &Doorbells, spin: &mut Spin) -> Result<()> {
        let looked = self.find_sender(doorbells, spin);
        if !self.consumer.may_be_ready() {
            self.end = None;
        }
        failpoint("receiver meets: looked");
        // Also if the check failed.
        self.link.ring_peer();
        looked
    }

    /// Finds the sender of a path channel's lane that has none.
    pub(crate) fn find_sender(&mut self, doorbells: &Doorbells, spin: &mut Spin) -> Result<()> {
        for _ in 0..=PASSED_MAX {
            let page = self.consumer.producer_page();
            match self.link.find_peer(doorbells, || (page.generation(), page.pid()))? {
                Found::Nothing => return Ok(()),
                // Its liveness handle may outlive it for a moment, for instance in a child before exec.
                Found::Peer(_) if self.consumer.has_producer_closed() => self.note_end(doorbells),
                Found::Peer(_) => {
                    self.end = None;
                    spin.set_peer(self.link.peer());
                    return Ok(());
                }
                // Its successor may be here already.
                Found::Passed => self.note_end(doorbells),
            }
        }
        // To be checked again, after the other lanes.
        doorbells.local_wake().ring();
        Ok(())
    }

    /// Checks whether the sender has left. Returns true if it just has.
    pub(crate) fn look_for_end(&mut self, doorbells: &Doorbells) -> Result<bool> {
        let gone = self.is_sender_here() && (self.consumer.has_producer_closed() || self.link.is_peer_gone()?);
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

    /// Continues in the page of the previous consumer, whose role this process has, after the messages that it had
    /// released. Also returns up to which message, in the count of the page, that consumer may have received some.
    pub(crate) fn take_over(&self, message_bytes_max: u64, can_barrier: bool) -> Result<(Consumer, u64)> {
        let memory = os::lane_memory(&self.page, &self.consumer, &self.receiver, &self.data);
        // SAFETY: the page is mapped.
        let page = unsafe { memory.consumer.as_ref() };
        let consumer = self.attach(message_bytes_max, can_barrier)?;
        // A predecessor may have received everything that was committed before now. The stored tail is no bound: while
        // the sender lives, it is in no order with the messages.
        let redelivered = match page.generation() {
            0 => 0,
            _ => consumer.taken().wrapping_add(consumer.end_of_committed()?.1),
        };
        // Last: a process that fails to attach has received nothing.
        page.start_generation(std::process::id());
        Ok((consumer, redelivered))
    }

    /// Keeps only the mappings, of a lane that is offered to no successor: a thousand lanes have many descriptors.
    pub(crate) fn forget_descriptors(&mut self) {
        for segment in [&mut self.page, &mut self.data, &mut self.consumer] {
            if let Some(segment) = Arc::get_mut(segment) {
                segment.forget_descriptor();
            }
        }
    }

    pub(crate) fn attach_producer(&mut self, lane: &mut Consumer, page: Arc<Segment>, can_barrier: bool) {
        let memory = os::lane_memory(&page, &self.consumer, &self.receiver, &self.data);
        // SAFETY: the size of the new segment was checked; it replaces the old one right after, which is kept until
        // then.
        unsafe { lane.attach_producer(memory.producer, can_barrier) };
        self.page = page;
    }
}

/// Takes over a receiver's page, which is kept as long as any of its lanes.
pub(crate) fn receiver_sleeper(page: &Segment, can_barrier: bool) -> Sleeper {
    // SAFETY: a receiver's page is mapped and writable. This process created it, or has the lock on its role; the lanes
    // keep it.
    unsafe { Sleeper::of_receiver(page.base().cast(), can_barrier) }
}
