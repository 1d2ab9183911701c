//! How processes join a receiver of several senders, or a publisher. Their handshakes run concurrently; none waits for
//! another.

use crate::doorbells::Doorbells;
use crate::error::{Error, Result};
use crate::handshake::{Handshake, Pace, lacks_descriptors, no_descriptor_left, turn_away};
use crate::listener::Listener;
use crate::opening::Steps;
use pelton_lane::failpoint;
use pelton_os::socket::{accept_at, first_readable};
use pelton_os::{Descriptor, Timer};
use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// Accepts processes for an endpoint with several peers. Each handshake continues when its peer has sent the next
/// packet, and ends with a `T`; the endpoint waits for none of them.
#[derive(Debug)]
pub(crate) struct Acceptor<T> {
    listener: Listener,
    /// In the order of their connection, the oldest first.
    pending: VecDeque<PendingHandshake<T>>,
    /// The last number given to a handshake; 0 is the listener itself.
    number: u32,
    /// Since when no connection could be accepted. Until one is accepted, the receiver does not poll the listener, and
    /// the timer triggers each attempt.
    paused_since: Option<Instant>,
    /// Created in advance: the process needs it when it has no descriptors left.
    timer: Timer,
    /// A spare descriptor. If no descriptor is free, this is closed, so that a connection can be accepted and refused
    /// with the reason.
    reserve: Option<Descriptor>,
}

/// A process that has connected, and its handshake.
struct PendingHandshake<T> {
    number: u32,
    lane: u32,
    future: Steps<'static, T>,
}

impl<T> std::fmt::Debug for PendingHandshake<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "handshake {} of lane {}", self.number, self.lane)
    }
}

/// Limit of the pending handshakes. At this limit, or at the limit of senders, a new connection ends the oldest pending
/// handshake: a peer that follows the protocol finishes long before.
const PENDING_MAX: usize = 64;
/// Connections accepted in one call. A process that connects repeatedly must not prevent the receiver from receiving.
const ACCEPTS: usize = 16;
/// Descriptors that one more peer needs, including those of its handshake.
const OF_ONE_PEER: u64 = 8;
/// An eighth of all descriptors is left to the program itself, but at most this number.
const OWN_MAX: u64 = 64;
/// Interval of the attempts to accept while descriptors or memory are missing.
const TRY_AGAIN: Duration = Duration::from_millis(20);
/// After this time without a free descriptor, waiting connections are refused with the reason.
const PAUSE_MAX: Duration = Duration::from_secs(1);

impl<T> Acceptor<T> {
    pub(crate) fn new(listener: Listener, doorbells: &Doorbells) -> Result<Acceptor<T>> {
        let timer = Timer::new().map_err(Error::system("making a timer"))?;
        let reserve = Some(spare().map_err(Error::system("keeping a descriptor in reserve"))?);
        doorbells.watch_connecting(listener.inner.bound.as_fd(), 0).map_err(Error::system("watching the listener"))?;
        doorbells.watch_connecting(timer.as_fd(), 0).map_err(Error::system("watching a timer"))?;
        Ok(Acceptor { listener, pending: VecDeque::new(), number: 0, paused_since: None, timer, reserve })
    }

    /// Polls the listener again, after a lane has left or a connection was accepted.
    pub(crate) fn listen_again(&mut self, doorbells: &Doorbells) -> Result<()> {
        if self.paused_since.is_some() {
            doorbells
                .pause_connecting(self.listener.inner.bound.as_fd(), 0, false)
                .map_err(Error::system("watching the listener"))?;
            self.paused_since = None;
        }
        Ok(())
    }

    /// Whether enough descriptors are left for one more peer, and for the program's own work for the present peers.
    /// Checks the number of a new descriptor, because the kernel gives it the lowest free number.
    fn has_descriptors(&self) -> bool {
        let Some(most) = rustix::process::getrlimit(rustix::process::Resource::Nofile).current else { return true };
        let lowest = self.reserve.as_ref().and_then(|reserve| rustix::io::fcntl_dupfd_cloexec(reserve, 0).ok());
        lowest.is_some_and(|fd| fd.as_raw_fd() as u64 + OF_ONE_PEER + (most / 8).min(OWN_MAX) <= most)
    }

    /// Pauses the listener while descriptors or memory are missing, and retries after a timeout. The present peers are
    /// not affected, and the waiting connection stays in the backlog.
    fn pause_listening(&mut self, doorbells: &Doorbells) -> Result<()> {
        let listener = [self.listener.inner.bound.as_fd()];
        let waiting = first_readable(&listener, Some(Instant::now())).map_err(Error::system("polling the listener"))?;
        if waiting.is_none() {
            return self.listen_again(doorbells);
        }
        if self.paused_since.is_none() {
            let paused = doorbells.pause_connecting(self.listener.inner.bound.as_fd(), 0, true);
            paused.map_err(Error::system("watching the listener"))?;
            self.paused_since = Some(Instant::now());
        }
        self.timer.set(TRY_AGAIN).map_err(Error::system("setting a timer"))
    }

    /// Continues handshake `number`, or accepts connections. `admit` returns a number for one more lane, or the reason
    /// for a refusal; `begin` returns the steps of that lane's handshake. `done` gets the result of a finished
    /// handshake, or the number of a failed one.
    pub(crate) fn attend(
        &mut self,
        number: u32,
        doorbells: &Doorbells,
        mut admit: impl FnMut() -> Result<u32>,
        mut begin: impl FnMut(Handshake, u32) -> Steps<'static, T>,
        mut done: impl FnMut(std::result::Result<T, u32>),
    ) -> Result<()> {
        if number != 0 {
            if let Some(index) = self.pending.iter().position(|handshake| handshake.number == number) {
                self.continue_handshake(index, &mut done);
            }
            return Ok(());
        }
        self.timer.has_passed();
        if self.reserve.is_none() {
            self.reserve = spare().ok();
        }
        // Handshakes from before this call: only those may be ended for a new one.
        let mut before = self.pending.len();
        for _ in 0..ACCEPTS {
            let mut is_short = !self.has_descriptors();
            if is_short && self.paused_since.is_none_or(|since| since.elapsed() < PAUSE_MAX) {
                return self.pause_listening(doorbells);
            }
            if is_short {
                self.reserve = None;
            }
            let accepted = accept_at(self.listener.inner.bound.socket());
            if is_short {
                self.reserve = spare().ok();
                // Other descriptors may have become free.
                is_short = !self.has_descriptors();
            }
            let socket = match accepted {
                Ok(Some(socket)) => socket,
                Ok(None) => return self.listen_again(doorbells),
                Err(error) if is_shortage(&error) => return self.pause_listening(doorbells),
                Err(error) => {
                    // Returns the error only once, and retries.
                    let was_paused = self.paused_since.is_some();
                    self.pause_listening(doorbells)?;
                    return if was_paused { Ok(()) } else { Err(Error::system("accepting a connection")(error)) };
                }
            };
            if is_short {
                turn_away(&socket, &no_descriptor_left());
                continue;
            }
            self.listen_again(doorbells)?;
            failpoint("connect: accepted");
            let inner = &self.listener.inner;
            let begun = Handshake::new(socket, Pace::Polled(None), &inner.options, inner.bound.name());
            let Ok(handshake) = begun else { continue };
            let mut admitted = admit();
            if admitted.is_err() && before > 0 {
                before -= 1;
                self.give_up_oldest(&mut done);
                admitted = admit();
            }
            let lane = match admitted {
                Ok(lane) => lane,
                Err(Error::Refused(why)) => {
                    handshake.refuse(why);
                    continue;
                }
                Err(error) => {
                    handshake.refuse(error.to_string());
                    continue;
                }
            };
            if self.pending.len() == PENDING_MAX {
                before = before.saturating_sub(1);
                self.give_up_oldest(&mut done);
            }
            self.number = self.number.checked_add(1).unwrap_or(1);
            match handshake.add_to(doorbells, self.number) {
                Ok(()) => {
                    let future = begin(handshake, lane);
                    self.pending.push_back(PendingHandshake { number: self.number, lane, future });
                    self.continue_handshake(self.pending.len() - 1, &mut done);
                }
                Err(_) => done(Err(lane)),
            }
        }
        match self.paused_since {
            None => doorbells.keep_readable(),
            Some(_) => self.pause_listening(doorbells)?,
        }
        Ok(())
    }

    /// Stops listening. Calls `give_back` with the number of each pending handshake.
    pub(crate) fn leave(mut self, doorbells: &Doorbells, mut give_back: impl FnMut(u32)) {
        doorbells.forget(self.listener.inner.bound.as_fd());
        doorbells.forget(self.timer.as_fd());
        while !self.pending.is_empty() {
            self.give_up_oldest(&mut |given_up| {
                if let Err(number) = given_up {
                    give_back(number);
                }
            });
        }
    }

    fn give_up_oldest(&mut self, done: &mut impl FnMut(std::result::Result<T, u32>)) {
        if let Some(oldest) = self.pending.pop_front() {
            done(Err(oldest.lane));
        }
    }

    /// Continues the pending handshake at `index`.
    fn continue_handshake(&mut self, index: usize, done: &mut impl FnMut(std::result::Result<T, u32>)) {
        let handshake = &mut self.pending[index];
        let Poll::Ready(shaken) = handshake.future.as_mut().poll(&mut Context::from_waker(Waker::noop())) else {
            return;
        };
        let number = handshake.lane;
        self.pending.remove(index);
        // After a failure, the peer has received the reason already.
        done(shaken.map_err(|_| number));
    }
}

/// Creates a descriptor to close when another one is needed.
fn spare() -> std::io::Result<Descriptor> {
    Descriptor::opened(|| rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC))?.map_err(Into::into)
}

/// Whether the error is a temporary lack of resources.
fn is_shortage(error: &std::io::Error) -> bool {
    lacks_descriptors(error) || matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::ENOBUFS))
}
