//! The senders of a receiver of several: how they join and leave, as threads of its process or by a name.

use crate::acceptor::Acceptor;
use crate::counters::Counters;
use crate::doorbells::Doorbells;
use crate::endpoint::Departure;
use crate::error::{Error, Result};
use crate::handshake::{Handshake, ReceiverSide, new_caller, new_receiver};
use crate::lanes::{Lane, Lanes};
use crate::memory::Budget;
use crate::opening::Steps;
use crate::settings::Settings;
use crate::transport::{Queue, Transport};
use crate::wait::Spin;
use pelton_os::{Doorbell, Event, LocalWake, Owner, locked};
use std::collections::BTreeSet;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// The transport from a sender in the receiver's process to its receiver.
#[derive(Debug)]
pub(crate) struct ToRegistry {
    pub(crate) queue: Queue,
    pub(crate) shared: Arc<SharedRegistry>,
    pub(crate) number: u32,
}

impl Transport for ToRegistry {
    fn shutdown(&self) {
        self.shared.note_gone(self.number);
    }

    fn try_send_descriptors(&self, seq: u32, fds: &[BorrowedFd<'_>]) -> Result<bool> {
        self.queue.send(seq, fds)
    }

    fn lane_number(&self) -> u32 {
        self.number
    }
}

/// The receiver's side of the registry.
#[derive(Debug)]
pub(crate) struct Registry {
    pub(crate) shared: Arc<SharedRegistry>,
    /// Accepts other processes; `None` without a name.
    pub(crate) acceptor: Option<Acceptor<Lane>>,
    /// Counters of the lanes that have left.
    pub(crate) parted: Counters,
}

/// The state that the receiver shares with threads that create senders. They add their lanes here, and note their ends.
#[derive(Debug)]
pub(crate) struct SharedRegistry {
    pub(crate) state: Mutex<State>,
    /// Whether the receiver has to check the state.
    pub(crate) is_notified: AtomicBool,
    pub(crate) receiver_side: ReceiverSide,
    pub(crate) local_wake: Arc<LocalWake>,
    pub(crate) options: Settings,
    pub(crate) owner: Owner,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) arrived: Vec<Lane>,
    pub(crate) gone: Vec<u32>,
    /// Lanes of [`Senders::with`]. They end when the last [`Senders`] of their round is dropped.
    pub(crate) of_threads: Vec<u32>,
    /// The number of [`Senders`].
    pub(crate) handles: usize,
    /// How often the last [`Senders`] was dropped; a round ends there. [`Receiver::senders`](crate::Receiver::senders)
    /// begins another.
    pub(crate) round: u64,
    /// The last number given to a lane.
    pub(crate) number: u32,
    /// Numbers of present and joining senders.
    pub(crate) present: BTreeSet<u32>,
    pub(crate) is_closed: bool,
}

impl SharedRegistry {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        // Each change is complete by itself.
        locked(&self.state)
    }

    /// The doorbell that the receiver's senders ring.
    pub(crate) fn doorbell(&self) -> &Arc<Doorbell> {
        &self.receiver_side.doorbell
    }

    /// Wakes the receiver to check the state.
    pub(crate) fn notify(&self) {
        self.is_notified.store(true, Ordering::Release);
        self.local_wake.ring();
    }

    /// Notes that the sender of lane `number` has closed, or failed to join.
    pub(crate) fn note_gone(&self, number: u32) {
        let mut state = self.state();
        state.of_threads.retain(|of| *of != number);
        state.gone.push(number);
        drop(state);
        self.notify();
    }

    /// Returns a number for one more sender, if the limit permits one.
    pub(crate) fn take_number(&self) -> Result<u32> {
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
            // 0 is the number of the lane without a sender. The numbers wrap around, and skip those in use.
            if number != 0 && state.present.insert(number) {
                return Ok(number);
            }
        }
    }

    pub(crate) fn give_back_number(&self, number: u32) {
        self.state().present.remove(&number);
    }
}

impl Registry {
    /// The limit of the memory for all senders, if there is one.
    pub(crate) fn budget(&self) -> Option<Arc<Budget>> {
        self.shared.receiver_side.budget.clone()
    }

    /// Whether each sender gets a reply lane.
    pub(crate) fn replies(&self) -> bool {
        self.shared.receiver_side.replies.is_some()
    }

    /// Whether no sender can join any more.
    pub(crate) fn is_shut(&self) -> bool {
        let state = self.shared.state();
        self.acceptor.is_none() && state.handles == 0 && state.arrived.is_empty()
    }

    /// Whether a thread has joined or left. Without this flag, a receiver that polls without waiting would not detect
    /// it.
    pub(crate) fn may_be_ready(&self) -> bool {
        self.shared.is_notified.load(Ordering::Relaxed)
    }

    /// Counters of the lanes that have left.
    pub(crate) fn parted(&self) -> Counters {
        self.parted
    }

    /// Closes a lane whose sender has left and whose messages were all received.
    pub(crate) fn part_with(&mut self, mut lane: Lane, doorbells: &Doorbells) -> Result<()> {
        lane.add_to(&mut self.parted);
        // A sender that violated the protocol may still be alive.
        lane.close();
        self.shared.give_back_number(lane.number);
        self.acceptor.as_mut().map_or(Ok(()), |acceptor| acceptor.listen_again(doorbells))
    }

    /// Adds the lanes of new senders, and marks the lanes of senders that have left. Does not wait.
    pub(crate) fn attend(&mut self, lanes: &mut Lanes, doorbells: &Doorbells, spin: &mut Spin) -> Result<()> {
        if self.shared.is_notified.swap(false, Ordering::Acquire) {
            self.attend_threads(lanes, doorbells);
        }
        let mut events = Vec::new();
        doorbells.take_events(&mut events)?;
        // Handles the ends of present senders first: they free numbers for new ones.
        events.sort_by_key(|event| *event == Event::Connecting(0));
        for event in events {
            match event {
                Event::Gone(number) => {
                    if let Some(lane) = lanes.find(number).filter(|lane| lane.end.is_none()) {
                        lane.note_end(doorbells);
                    }
                }
                Event::Connecting(number) => {
                    let Some(acceptor) = &mut self.acceptor else { continue };
                    let shared = &self.shared;
                    let done = |lane: std::result::Result<Lane, u32>| match lane {
                        Ok(lane) => {
                            spin.set_peer(lane.link.peer());
                            lanes.add(Box::new(lane));
                        }
                        Err(number) => shared.give_back_number(number),
                    };
                    let begin = |handshake, number| begin_handshake(handshake, number, &shared.receiver_side);
                    acceptor.attend(number, doorbells, || shared.take_number(), begin, done)?;
                }
            }
        }
        Ok(())
    }

    fn attend_threads(&mut self, lanes: &mut Lanes, doorbells: &Doorbells) {
        let mut state = self.shared.state();
        let (arrived, gone) = (std::mem::take(&mut state.arrived), std::mem::take(&mut state.gone));
        drop(state);
        arrived.into_iter().for_each(|lane| lanes.add(Box::new(lane)));
        for number in gone {
            if let Some(lane) = lanes.find(number).filter(|lane| lane.end.is_none()) {
                lane.end = Some(Departure::Closed);
                lane.link.lose_peer(doorbells);
            }
        }
    }

    /// Stops accepting senders: pending handshakes end, and the name becomes free.
    pub(crate) fn stop_listening(&mut self, doorbells: &Doorbells) {
        if let Some(acceptor) = self.acceptor.take() {
            acceptor.leave(doorbells, |number| self.shared.give_back_number(number));
        }
    }

    /// Closes the registry. Takes in the lanes of senders that have just joined, so that those detect the close too.
    pub(crate) fn shut(&mut self, lanes: &mut Lanes) {
        let mut state = self.shared.state();
        state.is_closed = true;
        for lane in std::mem::take(&mut state.arrived) {
            lanes.add(Box::new(lane));
        }
    }
}

/// The steps of the handshake with one more sender.
fn begin_handshake(handshake: Handshake, lane: u32, receiver_side: &ReceiverSide) -> Steps<'static, Lane> {
    let receiver_side = ReceiverSide { lane, ..receiver_side.clone() };
    let doorbells = receiver_side.doorbells.clone();
    Box::pin(async move {
        let lane = match receiver_side.replies.clone() {
            Some(replies) => new_caller(handshake, receiver_side, replies).await,
            None => new_receiver(handshake, receiver_side, true).await,
        };
        admitted(lane?, &doorbells)
    })
}

fn admitted(mut lane: Lane, doorbells: &Doorbells) -> Result<Lane> {
    if let [Some(socket), _] = lane.link.liveness() {
        doorbells.finish_connecting(socket, lane.number)?;
    }
    lane.is_announced = false;
    lane.memory.forget_descriptors();
    if let Some(reply) = &lane.reply {
        doorbells.add_doorbell(reply.sender.doorbells().doorbell())?;
    }
    Ok(lane)
}
