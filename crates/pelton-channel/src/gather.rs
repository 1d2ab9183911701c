//! Receivers of several senders, and the handles by which threads of the receiver's process create senders.

use crate::acceptor::Acceptor;
use crate::counters::Counters;
use crate::doorbells::Doorbells;
use crate::error::{Error, Result};
use crate::handshake::{ReceiverSide, Replies, make_consumer_page, make_data, make_producer_page, make_receiver_page};
use crate::lanes::{Lane, LaneMemory, ReceiverParts, receiver_sleeper};
use crate::link::{Link, UNKNOWN_PEER, this_process};
use crate::listener::Listener;
use crate::memory::Budget;
use crate::observe;
use crate::options::{Options, maker};
use crate::receiver::Receiver;
use crate::registry::{Registry, SharedRegistry, State, ToRegistry};
use crate::sender::{Sender, SenderMemory, SenderParts, Sent};
use crate::settings::Settings;
use crate::transport::{NoTransport, Queue, ThreadTransport};
use crate::wait::Deadline;
use pelton_lane::{CAPACITY_MIN, Position};
use pelton_os::{Owner, membarrier};
use std::cell::RefCell;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

/// Makes receivers of several senders.
impl Options<maker::Gather> {
    /// Creates a receiver for threads of this process, and the [`Senders`] by which threads make their senders. Does
    /// not wait. Each sender has a lane with these options. The receiver serves the lanes round-robin, at most 64
    /// messages of one at a time.
    ///
    /// # Errors
    /// [`Error::Option`], [`Error::System`].
    pub fn gather(&self) -> Result<(Senders, Receiver)> {
        let receiver = gather(self.settings(), None)?;
        Ok((receiver.senders()?, receiver))
    }
}

impl Options<maker::GatherAt> {
    /// Creates a receiver of several senders, which connect under `name`, a short name or `unix:PATH`, or are threads
    /// of this process ([`Receiver::senders`]). Does not wait. Each call that receives also continues the handshakes of
    /// new senders, and waits for none of them. The end of one sender does not affect the others.
    ///
    /// # Errors
    /// As [`Listener::bind`].
    pub fn gather_at(&self, name: &str) -> Result<Receiver> {
        self.settings().check_memory(1)?;
        gather(self.settings(), Some(Listener::with_settings(name, self.settings())?))
    }
}

impl Receiver {
    /// The [`Senders`] by which threads of this process make senders, of a receiver that [`Options::gather`] or
    /// [`Options::gather_at`] created. Does not wait.
    ///
    /// # Errors
    /// [`Error::Refused`] for a receiver of one sender, and of a path channel; [`Error::Closed`] after this receiver
    /// has returned that; [`Error::Forked`].
    pub fn senders(&self) -> Result<Senders> {
        if self.endpoint.owner.is_forked() {
            return Err(Error::Forked);
        }
        match &self.registry {
            // The receiver has ended.
            Some(_) if self.endpoint.departure.is_some() => Err(Error::Closed { unreleased: 0 }),
            Some(registry) => {
                let mut state = registry.shared.state();
                state.handles += 1;
                Ok(Senders { shared: registry.shared.clone(), round: state.round })
            }
            None => Err(Error::Refused("this channel has its senders: make a receiver by gather".to_owned())),
        }
    }
}

/// Creates a receiver of several senders; without a name, of threads of this process only.
pub fn gather(options: &Settings, listener: Option<Listener>) -> Result<Receiver> {
    gather_with(options, listener, None)
}

/// As [`gather`]; with `replies`, each sender gets a reply lane.
pub fn gather_with(options: &Settings, listener: Option<Listener>, replies: Option<Replies>) -> Result<Receiver> {
    options.checked_sizes()?;
    options.checked_senders()?;
    let budget = options.memory.map(Budget::new);
    let can_barrier = membarrier::register();
    let make = || -> std::io::Result<_> {
        let (name, kind) = match (&listener, &replies) {
            (None, _) => ("", observe::Kind::Threads),
            (Some(listener), None) => (listener.inner.bound.name(), observe::Kind::Gather),
            (Some(listener), Some(_)) => (listener.inner.bound.name(), observe::Kind::Service),
        };
        let receiver = Arc::new(make_receiver_page(kind, name)?);
        let data = make_data(CAPACITY_MIN, 0, "")?;
        // A lane without a sender, so that a receiver always has a current lane.
        let memory = LaneMemory {
            page: Arc::new(make_producer_page(CAPACITY_MIN, 0, 1, &data, "")?.without_descriptor()),
            consumer: Arc::new(make_consumer_page(Position::START, &data, &receiver, "")?.without_descriptor()),
            data: Arc::new(data.without_descriptor()),
            receiver,
        };
        Ok(memory)
    };
    let doorbells = Doorbells::new()?;
    let memory = make().map_err(Error::system("making a receiver"))?;
    let owner = Owner::current().map_err(Error::system("looking whose handle this is"))?;
    let shared = Arc::new(SharedRegistry {
        state: Mutex::default(),
        is_notified: AtomicBool::new(false),
        receiver_side: ReceiverSide {
            page: memory.receiver.clone(),
            doorbell: doorbells.doorbell().clone(),
            doorbells: doorbells.clone(),
            can_barrier,
            lane: 0,
            replies,
            budget,
        },
        local_wake: doorbells.local_wake().clone(),
        options: options.clone(),
        owner,
    });
    let sleeper = receiver_sleeper(&memory.receiver, can_barrier);
    let empty_lane = Lane::new(
        memory.attach(0, can_barrier)?,
        Link::new(doorbells.doorbell().clone(), NoTransport, UNKNOWN_PEER),
        0,
        0,
        memory,
    );
    let acceptor = listener.map(|listener| Acceptor::new(listener, &doorbells)).transpose()?;
    let registry = Registry { shared, acceptor, parted: Counters::default() };
    Receiver::gathering(ReceiverParts { lane: empty_lane, sleeper, doorbells }, options, registry)
}

/// Creates senders for threads of the receiver's process. `Clone`, `Send` and `Sync`.
///
/// [`Senders::sender`] returns a sender to keep, which costs least. [`Senders::send`] is for code that cannot keep one
/// for each thread: it uses the calling thread's own sender, created at its first use and closed when the thread ends.
/// Either way each thread has a lane of its own, and never waits for another thread.
///
/// After all these handles and all senders are dropped, the receiver returns [`Error::Closed`]. A receiver with a name
/// continues to listen.
///
/// ```
/// # fn main() -> pelton::Result<()> {
/// let (senders, mut receiver) = pelton::Options::new().capacity(1 << 20).gather()?;
/// std::thread::scope(|scope| {
///     for n in 0..4u8 {
///         let senders = &senders;
///         scope.spawn(move || senders.send(&[n]));
///     }
/// });
/// drop(senders);
/// let mut sum = 0;
/// loop {
///     match receiver.receive() {
///         Ok(message) => sum += message[0],
///         Err(error) if error.is_closed() => break,
///         Err(error) => return Err(error),
///     }
/// }
/// assert_eq!(sum, 6);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Senders {
    shared: Arc<SharedRegistry>,
    /// A thread's own sender belongs to the handles of one round, which ends with the last of these handles.
    round: u64,
}

impl Clone for Senders {
    fn clone(&self) -> Senders {
        // A forked child does not count its clone: a thread that exists only in the parent may hold the lock.
        if !self.shared.owner.is_forked() {
            self.shared.state().handles += 1;
        }
        Senders { shared: self.shared.clone(), round: self.round }
    }
}

impl Drop for Senders {
    fn drop(&mut self) {
        // In a forked child, a thread that exists only in the parent may hold the lock.
        if self.shared.owner.is_forked() {
            return;
        }
        let mut state = self.shared.state();
        state.handles -= 1;
        if state.handles == 0 {
            state.round += 1;
            // No handle is left that could use the threads' own senders.
            let State { gone, of_threads, .. } = &mut *state;
            gone.append(of_threads);
            drop(state);
            self.shared.notify();
        }
    }
}

/// A thread's own sender, and the handles that it belongs to.
struct Own {
    shared: Arc<SharedRegistry>,
    round: u64,
    sender: Sender,
}

thread_local! {
    static OWN: RefCell<Vec<Own>> = const { RefCell::new(Vec::new()) };
}

impl Senders {
    /// Whether this process is a fork of the process that created the handle. For FFI.
    #[doc(hidden)]
    pub fn is_forked(&self) -> bool {
        self.shared.owner.is_forked()
    }

    /// Creates a sender with a lane of its own. Does not wait.
    ///
    /// # Errors
    /// [`Error::Closed`] when the receiver is dropped; [`Error::Refused`] when it has as many senders as
    /// [`Options::lanes`] permits; [`Error::System`], [`Error::Forked`].
    pub fn sender(&self) -> Result<Sender> {
        self.make().map(|(sender, _)| sender)
    }

    fn make(&self) -> Result<(Sender, u32)> {
        let shared = &self.shared;
        if shared.owner.is_forked() {
            return Err(Error::Forked);
        }
        let number = shared.take_number()?;
        let made = self.make_lane(number).inspect_err(|_| shared.give_back_number(number))?;
        let (sender, lane) = made;
        let mut state = shared.state();
        if state.is_closed {
            return Err(Error::Closed { unreleased: 0 });
        }
        state.arrived.push(lane);
        drop(state);
        shared.notify();
        Ok((sender, number))
    }

    fn make_lane(&self, number: u32) -> Result<(Sender, Lane)> {
        let shared = &self.shared;
        let can_barrier = membarrier::register();
        let (capacity, limit) = shared.options.checked_sizes()?;
        let make = || -> std::io::Result<_> {
            // `trim` releases memory by the data's descriptor.
            let data = make_data(capacity, 0, "")?;
            let page = make_producer_page(capacity, limit, 1, &data, "")?.without_descriptor();
            let consumer = make_consumer_page(Position::START, &data, &shared.receiver_side.page, "")?;
            Ok((Arc::new(page), Arc::new(data), Arc::new(consumer.without_descriptor())))
        };
        let (page, data, consumer) = make().map_err(Error::system("making a lane"))?;
        let (doorbells, queue) = (Doorbells::new()?, Queue::default());
        let to_sender = Link::new(doorbells.doorbell().clone(), ThreadTransport(queue.clone()), this_process());
        let to_registry = ToRegistry { queue, shared: shared.clone(), number };
        let to_receiver = Link::new(shared.doorbell().clone(), to_registry, this_process());
        let memory = SenderMemory {
            page: page.clone(),
            data: data.clone(),
            consumer: consumer.clone(),
            receiver: shared.receiver_side.page.clone(),
            is_moved: false,
        };
        let producer = memory.attach(Position::START, Position::START, 0, can_barrier)?;
        let parts = SenderParts { lane: producer, link: to_receiver, memory };
        let memory = LaneMemory { page, data, consumer, receiver: shared.receiver_side.page.clone() };
        let mut lane = Lane::new(memory.attach(limit, can_barrier)?, to_sender, 0, number, memory);
        lane.is_announced = false;
        Ok((Sender::new(parts, doorbells, &shared.options)?, lane))
    }

    /// Calls `with` with the calling thread's own sender, which the first call creates. The sender closes when the
    /// thread ends, or when this handle and all its clones are dropped. Waits as `with` does.
    ///
    /// # Errors
    /// As [`Senders::sender`]; [`Error::Refused`] in a thread that is ending and has closed its own sender, and from
    /// within `with`.
    pub fn with<T>(&self, with: impl FnOnce(&mut Sender) -> T) -> Result<T> {
        let with_own = |own: &RefCell<Vec<Own>>| {
            let Ok(mut own) = own.try_borrow_mut() else {
                let why = "this thread is just using its own sender: use one made for what is done meanwhile";
                return Err(Error::Refused(why.to_owned()));
            };
            let own = &mut *own;
            let index = own.iter().position(|own| Arc::ptr_eq(&own.shared, &self.shared) && own.round == self.round);
            let index = match index {
                Some(index) => index,
                None => self.make_own(own)?,
            };
            Ok(with(&mut own[index].sender))
        };
        OWN.try_with(with_own).unwrap_or_else(|_| {
            Err(Error::Refused(
                "this thread is ending, and its own sender is closed: send earlier, or by a sender made for it"
                    .to_owned(),
            ))
        })
    }

    #[cold]
    fn make_own(&self, own: &mut Vec<Own>) -> Result<usize> {
        own.retain(|own| own.shared.owner.is_forked() || own.shared.state().round == own.round);
        let (sender, number) = self.make()?;
        self.shared.state().of_threads.push(number);
        own.push(Own { shared: self.shared.clone(), round: self.round, sender });
        Ok(own.len() - 1)
    }

    /// Copies a message into the calling thread's own lane. Waits for space there, without a limit.
    ///
    /// # Errors
    /// As [`Sender::send`] and [`Senders::sender`].
    pub fn send(&self, payload: &[u8]) -> Result<()> {
        self.with(|sender| sender.send(payload))?
    }

    /// As [`Senders::send`], if there is space now.
    ///
    /// # Errors
    /// As [`Senders::send`].
    pub fn try_send(&self, payload: &[u8]) -> Result<Sent> {
        self.with(|sender| sender.try_send(payload))?
    }

    /// As [`Senders::send`], until `deadline`: [`Sent::TimedOut`] when it passes.
    ///
    /// # Errors
    /// As [`Senders::send`].
    pub fn send_until(&self, payload: &[u8], deadline: impl Into<Deadline>) -> Result<Sent> {
        self.with(|sender| sender.send_until(payload, deadline))?
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::Departure;
    use crate::lanes::Polls;

    #[test]
    fn progress_counts_each_message_once_whatever_lane_is_current() {
        let (senders, mut receiver) = Options::new().capacity(1 << 16).gather().unwrap();
        let mut kept: Vec<_> = (0..3).map(|_| senders.sender().unwrap()).collect();
        let first = receiver.lanes.progress();
        let mut received = 0;
        for round in 0..200 {
            // Runs of several lengths, so that lanes are left empty, at the end of a quantum, and when they leave.
            for (n, sender) in kept.iter_mut().enumerate() {
                (0..=round % (30 * n + 1)).for_each(|_| sender.send(&[0; 8]).unwrap());
            }
            if round == 150 {
                kept.remove(0);
            }
            while receiver.try_receive().unwrap().is_some() {
                received += 1;
                assert_eq!(receiver.lanes.progress().wrapping_sub(first), received);
            }
            let other = receiver.lanes.iter().last().unwrap().number;
            assert!(receiver.lanes.turn_to(other));
            assert_eq!(receiver.lanes.progress().wrapping_sub(first), received);
        }
    }

    /// `count` senders with the numbers of their lanes, which are idle in this order; but the first one is current.
    fn idle(count: usize) -> (Vec<Sender>, Vec<u32>, Receiver) {
        let (senders, mut receiver) = Options::new().capacity(1 << 16).gather().unwrap();
        let mut kept: Vec<_> = (0..count).map(|_| senders.sender().unwrap()).collect();
        let numbers = numbers(&mut kept, &mut receiver);
        (kept, numbers, receiver)
    }

    /// The numbers of their lanes, by a message of each.
    fn numbers(senders: &mut [Sender], receiver: &mut Receiver) -> Vec<u32> {
        let mut numbers = Vec::new();
        for sender in senders {
            send(sender);
            numbers.push(receive(receiver).unwrap());
        }
        assert_eq!(receive(receiver), None);
        numbers
    }

    fn send(sender: &mut Sender) {
        sender.send(&[1]).unwrap();
    }

    /// Receives a message, and returns its lane's number.
    fn receive(receiver: &mut Receiver) -> Option<u32> {
        receiver.try_receive().unwrap().map(|message| message.lane())
    }

    #[test]
    fn the_polls_of_a_wait_find_lanes_that_were_busy_lately_at_once_and_each_other_one_in_turn() {
        let (mut senders, _, mut receiver) = idle(200);
        assert!((0..100).all(|_| !receiver.lanes.may_be_ready_in_turn()));
        // The 16 that became idle last.
        for recent in &mut senders[184..] {
            send(recent);
            assert!(receiver.lanes.may_be_ready_in_turn());
            assert!(receiver.peek(Polls::InTurn).unwrap().is_some());
            assert!(receive(&mut receiver).is_some());
        }
        let mut most = 0;
        for other in senders[..184].iter_mut().rev() {
            send(other);
            let calls = (1..=100).find(|_| receiver.lanes.may_be_ready_in_turn());
            most = most.max(calls.expect("each lane has its turn"));
            assert!(receive(&mut receiver).is_some());
        }
        assert!((2..=184usize.div_ceil(8)).contains(&most), "{most} calls, at most");
    }

    /// Each of `busy` senders sends again once the message after its own is received, so the receiver is never empty.
    /// Returns how many messages of each were received in `rounds`, and how many before that of an idle lane.
    fn alternating(idle_lanes: usize, busy: usize, rounds: usize) -> (Vec<usize>, usize) {
        let (mut senders, numbers, mut receiver) = idle(idle_lanes + busy);
        senders[idle_lanes..].iter_mut().for_each(send);
        let (mut counts, mut before, mut due) = (vec![0; busy], None, None);
        for round in 0..rounds {
            if round == rounds / 2 {
                send(&mut senders[0]);
            }
            let lane = receive(&mut receiver);
            match numbers.iter().position(|number| Some(*number) == lane).unwrap().checked_sub(idle_lanes) {
                Some(index) => {
                    counts[index] += 1;
                    if let Some(index) = due.replace(index) {
                        send(&mut senders[idle_lanes + index]);
                    }
                }
                None => before = Some(round - rounds / 2),
            }
        }
        (counts, before.expect("the message of the idle lane comes too"))
    }

    #[test]
    fn lanes_with_a_message_at_a_time_are_served_in_turn_and_delay_no_idle_one_for_long() {
        for (idle_lanes, busy) in [(1, 2), (1, 3), (1, 8), (100, 2), (300, 8), (100, 40)] {
            let (counts, before) = alternating(idle_lanes, busy, 6000);
            let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
            // Those beyond 16 are polled in turn only.
            let limit = if busy <= 16 { least + 1 } else { 2 * least };
            assert!(*most <= limit, "{busy} busy lanes had {counts:?} messages");
            let bound = 64 * (idle_lanes + busy).div_ceil(8) + busy;
            assert!(before <= bound, "{before} messages came before that of an idle lane, at most {bound}");
        }
    }

    #[test]
    fn a_flood_delays_no_idle_lane_beyond_the_bound() {
        let mut most = 0;
        for waiting in [0, 90, 180] {
            let (mut senders, numbers, mut receiver) = idle(200);
            (0..10).for_each(|_| send(&mut senders[199]));
            send(&mut senders[waiting]);
            let mut before = 0;
            while receive(&mut receiver) != Some(numbers[waiting]) {
                before += 1;
                assert!(before <= 64 * (200usize.div_ceil(8) + 1), "so many messages came before that of {waiting}");
                send(&mut senders[199]);
            }
            most = most.max(before);
        }
        assert!(most > 64, "{most}: a lane that has been idle for long waits for its turn");
    }

    #[test]
    fn a_sender_that_joins_waits_for_a_bounded_number_of_messages_though_no_quantum_ends() {
        let (senders, mut receiver) = Options::new().capacity(1 << 16).gather().unwrap();
        let mut kept: Vec<_> = (0..40).map(|_| senders.sender().unwrap()).collect();
        let numbers = numbers(&mut kept, &mut receiver);
        kept.iter_mut().for_each(send);
        let mut joined = senders.sender().unwrap();
        send(&mut joined);
        let (mut before, mut due) = (0, None);
        loop {
            let lane = receive(&mut receiver);
            let Some(index) = numbers.iter().position(|number| Some(*number) == lane) else { break };
            before += 1;
            assert!(before <= 16 * 64 + 64 * 6 + 64, "so many messages came before that of the new sender");
            if let Some(index) = due.replace(index) {
                send(&mut kept[index]);
            }
        }
    }

    #[test]
    fn a_lane_that_broke_the_rules_seems_ready_only_when_its_end_can_be_reported() {
        let (mut senders, numbers, mut receiver) = idle(40);
        // Two messages, of which the receiver has taken one.
        for (sender, number) in senders[20..].iter_mut().zip(&numbers[20..]) {
            (0..2).for_each(|_| send(sender));
            let lane = receiver.lanes.find(*number).unwrap();
            let record = lane.consumer.peek().unwrap().unwrap();
            lane.consumer.take_chunk(&record, 1);
            lane.end = Some(Departure::Corrupt);
        }
        assert!((0..100).all(|_| !receiver.lanes.may_be_ready_in_turn()));
        send(&mut senders[1]);
        assert_eq!(receive(&mut receiver), Some(numbers[1]));
        assert_eq!(receive(&mut receiver), None);
        let _ = receiver.lanes.find(numbers[30]).unwrap().consumer.release_taken();
        assert!((0..100).any(|_| receiver.lanes.may_be_ready_in_turn()));
    }

    #[test]
    fn lane_numbers_wrap_and_skip_those_in_use() {
        let (senders, mut receiver) = Options::new().capacity(1 << 16).membership_events(true).gather().unwrap();
        let mut kept = vec![senders.sender().unwrap()];
        senders.shared.state().number = u32::MAX - 1;
        kept.extend((0..3).map(|_| senders.sender().unwrap()));
        let mut lanes: Vec<_> = (0..4).map(|_| receiver.receive_event().unwrap().member().lane).collect();
        lanes.sort_unstable();
        assert_eq!(lanes, [1, 2, 3, u32::MAX]);
    }
}
