//! How the senders of a receiver that gathers come in: by connecting under its name, as threads of its process, or both.

use crate::connect::{Entrance, Listener, Origin};
use crate::doorbells::Doorbells;
use crate::error::{Error, Result};
use crate::handshake::{Reception, Replies, make_consumer_page, make_data, make_producer_page, make_receiver_page};
use crate::lanes::{Lane, LaneMemory, Lanes};
use crate::link::{Link, this_process};
use crate::memory::Budget;
use crate::options::Options;
use crate::receiver::{Receiver, ReceiverParts};
use crate::sender::{Departure, Sender, SenderMemory, SenderParts, Sent};
use crate::transport::{NoTransport, Queue, ThreadTransport, Transport};
use crate::wait::Spin;
use crate::{Counters, lanes};
use pelton_lane::{CAPACITY_MIN, Position};
use pelton_os::{Doorbell, LocalWake, Owner, locked, membarrier};
use pelton_os::{Event, Peer};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// From a sender in the receiver's process to its receiver.
#[derive(Debug)]
struct ToRegistry {
    queue: Queue,
    hall: Arc<Hall>,
    number: u32,
}

impl Transport for ToRegistry {
    fn shutdown(&self) {
        self.hall.note_gone(self.number);
    }

    fn try_send_descriptors(&self, seq: u32, fds: &[BorrowedFd<'_>]) -> Result<bool> {
        self.queue.send(seq, fds)
    }

    fn lane_number(&self) -> u32 {
        self.number
    }
}

/// A receiver's side of it.
#[derive(Debug)]
pub(crate) struct Gate {
    hall: Arc<Hall>,
    /// Where processes come in.
    entrance: Option<Entrance>,
    /// Figures of the lanes that have left.
    parted: Counters,
}

/// Where threads leave the lanes that they have made, for the receiver to take in, and say that they have gone.
#[derive(Debug)]
pub(crate) struct Hall {
    state: Mutex<State>,
    /// Whether there is anything for the receiver to see in the state.
    stirred: AtomicBool,
    reception: Reception,
    nudge: Arc<LocalWake>,
    options: Options,
    owner: Owner,
}

#[derive(Debug, Default)]
struct State {
    arrived: Vec<Lane>,
    gone: Vec<u32>,
    /// Lanes of [`Senders::with`], which end with the last [`Senders`] of their round.
    of_threads: Vec<u32>,
    /// How many [`Senders`] there are.
    handles: usize,
    /// How often the last of them has gone. There may be more after that.
    round: u64,
    /// The number given last.
    number: u32,
    /// Numbers of the senders that are there, or about to be.
    present: BTreeSet<u32>,
    is_closed: bool,
}

impl Hall {
    fn state(&self) -> MutexGuard<'_, State> {
        // Each change is whole by itself.
        locked(&self.state)
    }

    /// What the receiver's senders ring.
    pub(crate) fn doorbell(&self) -> &Arc<Doorbell> {
        &self.reception.bell
    }

    /// Tells the receiver that there is something to see.
    fn stir(&self) {
        self.stirred.store(true, Ordering::Release);
        self.nudge.ring();
    }

    /// The sender of that lane has closed, or was given up.
    pub(crate) fn note_gone(&self, number: u32) {
        let mut state = self.state();
        state.of_threads.retain(|of| *of != number);
        state.gone.push(number);
        drop(state);
        self.stir();
    }

    /// A number for one more sender, if there may be one.
    fn take_number(&self) -> Result<u32> {
        let most = self.options.checked_senders()?;
        let mut state = self.state();
        if state.is_closed {
            return Err(Error::Closed { unreleased: 0 });
        }
        if state.present.len() >= most as usize {
            return Err(Error::Refused(format!(
                "the receiver has {most} senders, as many as its options take: close one, or raise lanes there"
            )));
        }
        loop {
            let number = state.number.wrapping_add(1);
            state.number = number;
            // 0 is nobody's lane. Who comes and goes for long enough uses up all others, but for those in use.
            if number != 0 && state.present.insert(number) {
                return Ok(number);
            }
        }
    }

    fn give_back_number(&self, number: u32) {
        self.state().present.remove(&number);
    }
}

impl Gate {
    pub(crate) fn senders(&self) -> Senders {
        let mut state = self.hall.state();
        state.handles += 1;
        Senders { hall: self.hall.clone(), round: state.round }
    }

    /// The limit of the memory for all senders, if there is one.
    pub(crate) fn budget(&self) -> Option<Arc<Budget>> {
        self.hall.reception.budget.clone()
    }

    /// Whether no sender can come any more.
    pub(crate) fn is_shut(&self) -> bool {
        let state = self.hall.state();
        self.entrance.is_none() && state.handles == 0 && state.arrived.is_empty()
    }

    /// Whether there is something to attend to of which who asks without waiting does not hear: a thread has come or gone.
    pub(crate) fn may_be_ready(&self) -> bool {
        self.hall.stirred.load(Ordering::Relaxed)
    }

    /// Figures of the lanes that have left.
    pub(crate) fn parted(&self) -> Counters {
        self.parted
    }

    /// A lane has left, and everything it had was received.
    pub(crate) fn part_with(&mut self, mut lane: Lane, bells: &Doorbells) -> Result<()> {
        lane.add_to(&mut self.parted);
        // For a sender that is there all the same.
        lane.close();
        self.hall.give_back_number(lane.number);
        self.entrance.as_mut().map_or(Ok(()), |entrance| entrance.listen_again(bells))
    }

    /// Takes in who has come, and notes who has gone. Does not wait.
    pub(crate) fn attend(&mut self, lanes: &mut Lanes, bells: &Doorbells, spin: &mut Spin) -> Result<()> {
        if self.hall.stirred.swap(false, Ordering::Acquire) {
            self.attend_threads(lanes, bells);
        }
        let mut events = Vec::new();
        bells.take_events(&mut events)?;
        // Who is here comes before who comes.
        events.sort_by_key(|event| *event == Event::Connecting(0));
        for event in events {
            match event {
                Event::Gone(number) => {
                    if let Some(lane) = lanes.find(number).filter(|lane| lane.end.is_none()) {
                        lane.note_end(bells);
                    }
                }
                Event::Connecting(visit) => {
                    let Some(entrance) = &mut self.entrance else { continue };
                    let hall = &self.hall;
                    let done = |lane: std::result::Result<Lane, u32>| match lane {
                        Ok(lane) => {
                            spin.meet(lane.link.peer());
                            lanes.add(Box::new(lane));
                        }
                        Err(number) => hall.give_back_number(number),
                    };
                    entrance.attend(visit, bells, &hall.reception, || hall.take_number(), done)?;
                }
            }
        }
        Ok(())
    }

    fn attend_threads(&mut self, lanes: &mut Lanes, bells: &Doorbells) {
        let mut state = self.hall.state();
        let (arrived, gone) = (std::mem::take(&mut state.arrived), std::mem::take(&mut state.gone));
        drop(state);
        arrived.into_iter().for_each(|lane| lanes.add(Box::new(lane)));
        for number in gone {
            if let Some(lane) = lanes.find(number).filter(|lane| lane.end.is_none()) {
                lane.end = Some(Departure::Closed);
                lane.link.lose_peer(bells);
            }
        }
    }

    /// Nobody comes in any more: who is on the way is hung up on, and the name is free.
    pub(crate) fn stop_listening(&mut self, bells: &Doorbells) {
        if let Some(entrance) = self.entrance.take() {
            entrance.leave(bells, |number| self.hall.give_back_number(number));
        }
    }

    /// The receiver closes: who has arrived is told too.
    pub(crate) fn shut(&mut self, lanes: &mut Lanes) {
        let mut state = self.hall.state();
        state.is_closed = true;
        for lane in std::mem::take(&mut state.arrived) {
            lanes.add(Box::new(lane));
        }
    }
}

/// Makes the receiver of many senders; without a name, of this process only.
pub(crate) fn gather(options: &Options, listener: Option<Listener>) -> Result<Receiver> {
    gather_with(options, listener, None)
}

/// As [`gather`]; with `replies`, each sender gets a lane back.
pub(crate) fn gather_with(options: &Options, listener: Option<Listener>, replies: Option<Replies>) -> Result<Receiver> {
    options.checked_sizes()?;
    options.checked_senders()?;
    let budget = options.memory.map(Budget::new);
    let can_barrier = membarrier::register();
    let make = || -> std::io::Result<_> {
        let receiver = Arc::new(make_receiver_page()?);
        // A lane like any other, that nobody sends by: the receiver's own way needs no case for having none.
        let memory = LaneMemory {
            page: Arc::new(make_producer_page(CAPACITY_MIN, 0, 1)?.without_descriptor()),
            data: Arc::new(make_data(CAPACITY_MIN)?.without_descriptor()),
            consumer: Arc::new(make_consumer_page(Position::START)?.without_descriptor()),
            receiver,
        };
        Ok(memory)
    };
    let bells = Doorbells::new()?;
    let memory = make().map_err(Error::system("making a receiver"))?;
    let owner = Owner::current().map_err(Error::system("looking whose handle this is"))?;
    let hall = Arc::new(Hall {
        state: Mutex::default(),
        stirred: AtomicBool::new(false),
        reception: Reception {
            page: memory.receiver.clone(),
            bell: bells.doorbell().clone(),
            bells: bells.clone(),
            can_barrier,
            lane: 0,
            replies,
            budget,
        },
        nudge: bells.local_wake().clone(),
        options: options.clone(),
        owner,
    });
    let sleeper = lanes::receiver_sleeper(&memory.receiver, can_barrier);
    let nobody = Lane::new(
        memory.attach(0, can_barrier)?,
        Link::new(bells.doorbell().clone(), NoTransport, Peer { pid: 0, uid: 0 }),
        0,
        0,
        memory,
    );
    let entrance = listener.map(|listener| Entrance::new(listener, &bells)).transpose()?;
    let gate = Gate { hall, entrance, parted: Counters::default() };
    Receiver::gathering(ReceiverParts { lane: nobody, sleeper, bells }, options, gate)
}

/// Makes senders for threads of the receiver's process. `Clone`, `Send` and `Sync`.
///
/// [`Senders::sender`] makes one to keep, which is what costs least. [`Senders::send`] is for code that cannot keep one for each
/// thread: it uses the calling thread's own, made at its first use and closed when the thread ends. Either way each thread
/// has a lane of its own, and none waits for another.
///
/// The receiver is told [`Error::Closed`] once all of these, and all senders, are gone; one with a name goes on listening.
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
    hall: Arc<Hall>,
    /// Threads' own senders serve the handles of their round alone: with the last of those they have ended.
    round: u64,
}

impl Clone for Senders {
    fn clone(&self) -> Senders {
        // A forked child's are not counted, and the lock may be held by a thread that it does not have.
        if !self.hall.owner.is_forked() {
            self.hall.state().handles += 1;
        }
        Senders { hall: self.hall.clone(), round: self.round }
    }
}

impl Drop for Senders {
    fn drop(&mut self) {
        // As above.
        if self.hall.owner.is_forked() {
            return;
        }
        let mut state = self.hall.state();
        state.handles -= 1;
        if state.handles == 0 {
            state.round += 1;
            // Nobody has a way to use them any more.
            let State { gone, of_threads, .. } = &mut *state;
            gone.append(of_threads);
            drop(state);
            self.hall.stir();
        }
    }
}

/// A thread's own sender: of which handles.
struct Own {
    hall: Arc<Hall>,
    round: u64,
    sender: Sender,
}

thread_local! {
    static OWN: RefCell<Vec<Own>> = const { RefCell::new(Vec::new()) };
}

impl Senders {
    /// Whether this process is a fork of the one that made the handle. For bindings.
    #[doc(hidden)]
    pub fn is_forked(&self) -> bool {
        self.hall.owner.is_forked()
    }

    /// A new sender, with a lane of its own. Does not wait.
    ///
    /// # Errors
    /// [`Error::Closed`] when the receiver is gone; [`Error::Refused`] when it has as many senders as it takes, by
    /// [`Options::lanes`]; [`Error::System`], [`Error::Forked`].
    pub fn sender(&self) -> Result<Sender> {
        self.make().map(|(sender, _)| sender)
    }

    fn make(&self) -> Result<(Sender, u32)> {
        let hall = &self.hall;
        if hall.owner.is_forked() {
            return Err(Error::Forked);
        }
        let number = hall.take_number()?;
        let made = self.make_lane(number).inspect_err(|_| hall.give_back_number(number))?;
        let (sender, lane) = made;
        let mut state = hall.state();
        if state.is_closed {
            return Err(Error::Closed { unreleased: 0 });
        }
        state.arrived.push(lane);
        drop(state);
        hall.stir();
        Ok((sender, number))
    }

    fn make_lane(&self, number: u32) -> Result<(Sender, Lane)> {
        let hall = &self.hall;
        let can_barrier = membarrier::register();
        let (capacity, limit) = hall.options.checked_sizes()?;
        let make = || -> std::io::Result<_> {
            let [page, data, consumer] = [
                make_producer_page(capacity, limit, 1)?.without_descriptor(),
                // What `trim` gives back, it gives back by its descriptor.
                make_data(capacity)?,
                make_consumer_page(Position::START)?.without_descriptor(),
            ]
            .map(Arc::new);
            Ok((page, data, consumer))
        };
        let (page, data, consumer) = make().map_err(Error::system("making a lane"))?;
        let (bells, queue) = (Doorbells::new()?, Queue::default());
        let to_sender = Link::new(bells.doorbell().clone(), ThreadTransport(queue.clone()), this_process());
        let to_registry = ToRegistry { queue, hall: hall.clone(), number };
        let to_receiver = Link::new(hall.doorbell().clone(), to_registry, this_process());
        let memory = SenderMemory {
            page: page.clone(),
            data: data.clone(),
            consumer: consumer.clone(),
            receiver: hall.reception.page.clone(),
        };
        let producer = memory.attach(Position::START, Position::START, 0, can_barrier)?;
        let parts = SenderParts { lane: producer, bells, link: to_receiver, memory };
        let memory = LaneMemory { page, data, consumer, receiver: hall.reception.page.clone() };
        let mut lane = Lane::new(memory.attach(limit, can_barrier)?, to_sender, 0, number, memory);
        lane.is_announced = false;
        Ok((Sender::new(parts, &hall.options, Origin::Threads)?, lane))
    }

    /// Does something with the calling thread's own sender, which is made when there is none yet, and closed when the thread
    /// ends or when this and all its clones are gone. Waits as what it does waits.
    ///
    /// # Errors
    /// As [`Senders::sender`]; [`Error::Refused`] in a thread that is ending and has closed its own sender, and from within `with`.
    pub fn with<T>(&self, with: impl FnOnce(&mut Sender) -> T) -> Result<T> {
        let with_own = |own: &RefCell<Vec<Own>>| {
            let Ok(mut own) = own.try_borrow_mut() else {
                let why = "this thread is just using its own sender: use one made for what is done meanwhile";
                return Err(Error::Refused(why.to_owned()));
            };
            let own = &mut *own;
            let place = own.iter().position(|own| Arc::ptr_eq(&own.hall, &self.hall) && own.round == self.round);
            let place = match place {
                Some(place) => place,
                None => self.make_own(own)?,
            };
            Ok(with(&mut own[place].sender))
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
        own.retain(|own| own.hall.owner.is_forked() || own.hall.state().round == own.round);
        let (sender, number) = self.make()?;
        self.hall.state().of_threads.push(number);
        own.push(Own { hall: self.hall.clone(), round: self.round, sender });
        Ok(own.len() - 1)
    }

    /// Copies a message into the calling thread's own lane. Waits for room there, for ever if need be.
    ///
    /// # Errors
    /// As [`Sender::send`] and [`Senders::sender`].
    pub fn send(&self, payload: &[u8]) -> Result<()> {
        self.with(|sender| sender.send(payload))?
    }

    /// As [`Senders::send`], if there is room now.
    ///
    /// # Errors
    /// As [`Senders::send`].
    pub fn try_send(&self, payload: &[u8]) -> Result<Sent> {
        self.with(|sender| sender.try_send(payload))?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_begin_anew_after_the_last_and_leave_out_those_in_use() {
        let (senders, mut receiver) = Options::new().capacity(1 << 16).announce(true).gather().unwrap();
        let mut kept = vec![senders.sender().unwrap()];
        senders.hall.state().number = u32::MAX - 1;
        kept.extend((0..3).map(|_| senders.sender().unwrap()));
        let mut lanes: Vec<_> = (0..4).map(|_| receiver.receive_event().unwrap().member().lane).collect();
        lanes.sort_unstable();
        assert_eq!(lanes, [1, 2, 3, u32::MAX]);
    }
}
