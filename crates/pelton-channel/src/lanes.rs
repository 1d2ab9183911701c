//! The lanes that a receiver serves: each with its sender, and whose turn it is.

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

/// All lanes of a receiver. One has the turn; the others wait for theirs, or are idle, and are looked at now and then.
#[derive(Debug)]
pub(crate) struct Lanes {
    /// The lane whose turn it is.
    pub(crate) current: Box<Lane>,
    /// Others that had something lately, in the order of their turns.
    busy: VecDeque<Box<Lane>>,
    /// Others that had nothing when it was their turn.
    #[expect(clippy::vec_box, reason = "a lane goes from turn to turn as a pointer")]
    idle: Vec<Box<Lane>>,
    /// Where among the idle ones the next look begins.
    next_idle: usize,
    /// Whether a lane leaves with its sender: of a channel that takes senders in as they come.
    leave: bool,
    /// Has the turn when there is no other: nobody ever sends here.
    nobody: Option<Box<Lane>>,
}

/// Idle lanes that are looked at when a turn ends: few, so that a thousand of them cost those that are busy next to nothing.
const IDLE_LOOKS: usize = 32;

/// What comes next, of all lanes. What is not a message stays so until [`Lanes::pass`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    Nothing,
    /// The current lane's.
    Record(Record),
    /// The current lane's sender has come.
    Joined,
    /// The current lane's sender has gone, and everything it sent was received; or it broke the rules.
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

    /// From now on lanes come and go with their senders; the one that is there is nobody's.
    pub(crate) fn let_leave(&mut self) {
        self.leave = true;
    }

    /// Whether there is no lane but the current one.
    pub(crate) fn is_one(&self) -> bool {
        self.busy.is_empty() && self.idle.is_empty()
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        1 + self.busy.len() + self.idle.len() - usize::from(self.has_nobody())
    }

    /// Whether it is nobody's turn.
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

    /// Takes one more in.
    pub(crate) fn add(&mut self, lane: Box<Lane>) {
        if self.has_nobody() {
            self.nobody = Some(std::mem::replace(&mut self.current, lane));
        } else {
            self.busy.push_back(lane);
        }
    }

    /// Whether a message waits, as far as can be seen without taking it.
    pub(crate) fn may_be_ready(&self) -> bool {
        self.iter().any(|lane| lane.consumer.may_be_ready())
    }

    /// What comes next: of the lane whose turn it is, or of the next one that has anything.
    pub(crate) fn peek(&mut self) -> std::result::Result<Next, LaneError> {
        // A hostile sender may take back what made its lane's turn come.
        for _ in 0..=self.count() {
            match self.current.peek(self.leave) {
                Ok(Next::Nothing) if self.go_on() => {}
                // It is that sender's affair alone.
                Err(_) if self.leave => self.current.end = Some(Departure::Corrupt),
                found => return found,
            }
        }
        Ok(Next::Nothing)
    }

    /// The current lane has nothing: goes to another that may have something. False: there is none.
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

    /// Gives that lane the turn. False: there is none.
    pub(crate) fn turn_to(&mut self, number: u32) -> bool {
        if self.current.number == number {
            return true;
        }
        let others = self.busy.iter_mut().chain(&mut self.idle);
        let found = others.into_iter().find(|lane| lane.number == number);
        found.map(|lane| std::mem::swap(&mut self.current, lane)).is_some()
    }

    /// The current lane has had its turn.
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

    /// What [`Lanes::peek`] answered, and is no message, has been told. Answers the lane that has left, if one has.
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
    /// Messages up to this one, counted as the consumer's page does, may have been delivered to a predecessor.
    pub(crate) redelivered: u64,
    /// Which of its channel's lanes.
    pub(crate) number: u32,
    /// How its sender went, until that is told.
    pub(crate) end: Option<Departure>,
    /// Whether it has been told that the sender is here.
    pub(crate) is_announced: bool,
    /// Tells it from every other lane, also after a restart of either side.
    pub(crate) id: LaneId,
    /// Whether a flush has looked what its sink has of this lane.
    pub(crate) is_compared: bool,
    /// Nothing of this lane is served for now, because the receiver's user applies backpressure to its sender.
    pub(crate) is_paused: bool,
    /// What the receiver's user keeps of this lane: an index of its own.
    pub(crate) user: usize,
    /// The lane back, until the receiver's user takes it.
    pub(crate) reply: Option<Box<ReplyLane>>,
    /// Of the receiver's memory for its peers.
    pub(crate) _part: Option<Part>,
    /// After the consumer, which points into it.
    pub(crate) memory: LaneMemory,
}

impl Lane {
    pub(crate) fn new(consumer: Consumer, link: Link, redelivered: u64, number: u32, memory: LaneMemory) -> Lane {
        // Its data all share who succeed one another.
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
        // After a reboot numbers may come again, of messages that were not on the disk.
        lane.id = lane.id.since_boot(directory.boot_id());
        Ok(lane)
    }

    /// What comes next of this lane. If it is one that `leaves` with its sender, that sender's coming and going too.
    fn peek(&mut self, leaves: bool) -> std::result::Result<Next, LaneError> {
        if !leaves {
            return Ok(self.consumer.peek()?.map_or(Next::Nothing, Next::Record));
        }
        if !self.is_announced {
            return Ok(Next::Joined);
        }
        // What a flush has taken is to be released first.
        let left = |consumer: &Consumer, end| if consumer.has_taken() { Next::Nothing } else { Next::Left(end) };
        if self.end == Some(Departure::Corrupt) {
            return Ok(left(&self.consumer, Departure::Corrupt));
        }
        if self.is_stalled() {
            return Ok(Next::Nothing);
        }
        // What was committed before the end was noted is visible. [close]
        Ok(match (self.consumer.peek()?, self.end) {
            (Some(record), _) => Next::Record(record),
            (None, Some(end)) => left(&self.consumer, end),
            (None, None) => Next::Nothing,
        })
    }

    /// Whether [`Lane::peek`] may find something.
    fn may_be_ready(&self, leaves: bool) -> bool {
        let goes = self.end.is_some() && !self.consumer.has_taken();
        (self.consumer.may_be_ready() && !self.is_stalled()) || (leaves && (goes || !self.is_announced))
    }

    /// Whether nothing is served of this lane now. After its sender has left, what remains is served.
    #[inline(always)]
    pub(crate) fn is_stalled(&self) -> bool {
        self.is_paused && self.end.is_none()
    }

    /// Tells the sender that nothing more is received.
    pub(crate) fn close(&mut self) {
        self.consumer.close();
        self.hang_up();
    }

    /// The last of it, after the words that say so.
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

    /// Adds its figures, which are also shown to others now.
    pub(crate) fn add_to(&self, sum: &mut Counters) {
        self.consumer.store_counters();
        let page = self.consumer.consumer_page();
        // On a path other processes have written them, whatever they are.
        sum.messages = sum.messages.wrapping_add(page.messages());
        sum.bytes = sum.bytes.wrapping_add(page.bytes());
        sum.waits = sum.waits.wrapping_add(page.waits());
        sum.sleeps = sum.sleeps.wrapping_add(page.sleeps());
        sum.wakes_sent = sum.wakes_sent.wrapping_add(page.wakes_sent());
    }

    pub(crate) fn is_sender_here(&self) -> bool {
        self.end.is_none() && self.link.peer().is_some()
    }

    /// Looks for the sender of a lane just opened, and tells it that the receiver has come. Who has gone before and left nothing
    /// is no news.
    pub(crate) fn meet(&mut self, doorbells: &Doorbells, spin: &mut Spin) -> Result<()> {
        let looked = self.find_sender(doorbells, spin);
        if !self.consumer.may_be_ready() {
            self.end = None;
        }
        failpoint("receiver meets: looked");
        // Also by one that could not look now.
        self.link.ring_peer();
        looked
    }

    /// Looks for the sender of a path channel's lane that has none.
    pub(crate) fn find_sender(&mut self, doorbells: &Doorbells, spin: &mut Spin) -> Result<()> {
        for _ in 0..=PASSED_MAX {
            let page = self.consumer.producer_page();
            match self.link.find_peer(doorbells, || (page.generation(), page.pid()))? {
                Found::Nothing => return Ok(()),
                // Its life outlives it for a moment, in a child on its way to exec for instance.
                Found::Peer(_) if self.consumer.has_producer_closed() => self.note_end(doorbells),
                Found::Peer(_) => {
                    self.end = None;
                    spin.meet(self.link.peer());
                    return Ok(());
                }
                // And perhaps its successor is here.
                Found::Passed => self.note_end(doorbells),
            }
        }
        // To be looked at again, after the other lanes.
        doorbells.local_wake().ring();
        Ok(())
    }

    /// Looks whether the sender has gone. True: it just has.
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

/// The segments that a consumer's lane lies in.
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
        // SAFETY: the segments were checked for size, and are kept beside the lane until it is gone; this process made the
        // consumer's page, or has the lock on its role, and so is the lane's one consumer.
        Ok(unsafe { Consumer::attach(memory, message_bytes_max, can_barrier)? })
    }

    /// Goes on in the page of the consumer before, whose role this process has, where it had released to.
    /// Answers also up to which message, as the page counts them, that one may have seen some.
    pub(crate) fn take_over(&self, message_bytes_max: u64, can_barrier: bool) -> Result<(Consumer, u64)> {
        let memory = os::lane_memory(&self.page, &self.consumer, &self.receiver, &self.data);
        // SAFETY: the page is mapped.
        let page = unsafe { memory.consumer.as_ref() };
        let consumer = self.attach(message_bytes_max, can_barrier)?;
        // What a predecessor may have seen: everything that was committed before now. Not from the stored tail on, which is
        // in no order with the messages while the sender lives.
        let redelivered = match page.generation() {
            0 => 0,
            _ => consumer.taken().wrapping_add(consumer.end_of_committed()?.1),
        };
        // Last: who failed to attach has seen nothing.
        page.start_generation(std::process::id());
        Ok((consumer, redelivered))
    }

    /// Keeps the mappings alone, of a lane that is offered to no successor: a thousand lanes are many descriptors.
    pub(crate) fn forget_descriptors(&mut self) {
        for segment in [&mut self.page, &mut self.data, &mut self.consumer] {
            if let Some(segment) = Arc::get_mut(segment) {
                segment.forget_descriptor();
            }
        }
    }

    pub(crate) fn attach_producer(&mut self, lane: &mut Consumer, page: Arc<Segment>, can_barrier: bool) {
        let memory = os::lane_memory(&page, &self.consumer, &self.receiver, &self.data);
        // SAFETY: as above; the new segment replaces the old one right after.
        unsafe { lane.attach_producer(memory.producer, can_barrier) };
        self.page = page;
    }
}

/// Takes over a receiver's page, which is to be kept as long as any of its lanes.
pub(crate) fn receiver_sleeper(page: &Segment, can_barrier: bool) -> Sleeper {
    // SAFETY: a receiver's page is mapped, writable, and this process made it or has the lock on its role; the lanes keep it.
    unsafe { Sleeper::of_receiver(page.base().cast(), can_barrier) }
}
