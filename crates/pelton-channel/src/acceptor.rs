//! How processes join a receiver of several senders: their handshakes continue side by side, and none waits for another.

use crate::doorbells::Doorbells;
use crate::error::{Error, Result};
use crate::handshake::{
    Pace, Reception, Shake, lacks_descriptors, new_caller, new_receiver, no_descriptor_left, turn_away,
};
use crate::lanes::Lane;
use crate::listener::Listener;
use pelton_lane::failpoint;
use pelton_os::socket::{accept_at, first_readable};
use pelton_os::{Descriptor, Timer};
use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd};
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// Where processes come in to a receiver of many: their handshakes go on side by side, as each says its next word, and
/// nobody waits for any.
#[derive(Debug)]
pub(crate) struct Entrance {
    listener: Listener,
    /// In the order in which they came.
    visitors: VecDeque<Visitor>,
    /// The number given last; 0 is the listener itself.
    visit: u32,
    /// Since when connections could not be accepted. They are not told meanwhile; the timer says when to try again.
    is_deaf: Option<Instant>,
    /// Made at the beginning, since when it is needed nothing can be made.
    timer: Timer,
    /// To be closed when none is left, so that who waits can be taken, and told.
    reserve: Option<Descriptor>,
}

/// One who has connected, in the middle of the handshake.
struct Visitor {
    visit: u32,
    lane: u32,
    shaking: Pin<Box<dyn Future<Output = Result<Lane>> + Send>>,
}

impl std::fmt::Debug for Visitor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "visitor {} of lane {}", self.visit, self.lane)
    }
}

/// Handshakes that go on at a time. For one more, or for one who would be refused because of it, the oldest is given up: who is in
/// earnest has finished before.
const VISITORS_MAX: usize = 64;
/// Connections taken at a time: one who connects again and again is not to keep the receiver from receiving.
const ACCEPTS: usize = 16;
/// Descriptors that one more peer costs, those of its handshake included.
const OF_ONE_PEER: u64 = 8;
/// Of an eighth of all descriptors, the most that are left to the program itself.
const OWN_MAX: u64 = 64;
/// How soon it is tried again to accept where that failed for want of something.
const TRY_AGAIN: Duration = Duration::from_millis(20);
/// How long those who connect then wait before they are told; those who connect later, not as long.
const DEAF_MAX: Duration = Duration::from_secs(1);

impl Entrance {
    pub(crate) fn new(listener: Listener, bells: &Doorbells) -> Result<Entrance> {
        let timer = Timer::new().map_err(Error::system("making a timer"))?;
        let reserve = Some(spare().map_err(Error::system("keeping a descriptor in reserve"))?);
        bells.watch_connecting(listener.inner.bound.as_fd(), 0).map_err(Error::system("watching the listener"))?;
        bells.watch_connecting(timer.as_fd(), 0).map_err(Error::system("watching a timer"))?;
        Ok(Entrance { listener, visitors: VecDeque::new(), visit: 0, is_deaf: None, timer, reserve })
    }

    /// Nothing speaks against accepting connections: a lane has left, or it went well.
    pub(crate) fn listen_again(&mut self, bells: &Doorbells) -> Result<()> {
        if self.is_deaf.is_some() {
            bells
                .pause_connecting(self.listener.inner.bound.as_fd(), 0, false)
                .map_err(Error::system("watching the listener"))?;
            self.is_deaf = None;
        }
        Ok(())
    }

    /// Whether there are descriptors for one more peer, and some left for the program's own work, which those who are here wait for. A new one
    /// has the lowest number that is free.
    fn has_room(&self) -> bool {
        let Some(most) = rustix::process::getrlimit(rustix::process::Resource::Nofile).current else { return true };
        let lowest = self.reserve.as_ref().and_then(|reserve| rustix::io::fcntl_dupfd_cloexec(reserve, 0).ok());
        lowest.is_some_and(|fd| fd.as_raw_fd() as u64 + OF_ONE_PEER + (most / 8).min(OWN_MAX) <= most)
    }

    /// A connection cannot be accepted, for want of descriptors or memory: those who are here are not to suffer for it, nor is whoever waits to
    /// be forgotten.
    fn wait_for_room(&mut self, bells: &Doorbells) -> Result<()> {
        let listener = [self.listener.inner.bound.as_fd()];
        let waiting =
            first_readable(&listener, Some(Instant::now())).map_err(Error::system("looking at the listener"))?;
        if waiting.is_none() {
            return self.listen_again(bells);
        }
        if self.is_deaf.is_none() {
            let heeded = bells.pause_connecting(self.listener.inner.bound.as_fd(), 0, true);
            heeded.map_err(Error::system("watching the listener"))?;
            self.is_deaf = Some(Instant::now());
        }
        self.timer.set(TRY_AGAIN).map_err(Error::system("setting a timer"))
    }

    /// Does what can be done now after visitor `visit` has said something. `admit` gives a number for one more lane, or says
    /// why there is none; `done` takes a lane, or the number back of one that came to nothing.
    pub(crate) fn attend(
        &mut self,
        visit: u32,
        bells: &Doorbells,
        reception: &Reception,
        mut admit: impl FnMut() -> Result<u32>,
        mut done: impl FnMut(std::result::Result<Lane, u32>),
    ) -> Result<()> {
        if visit != 0 {
            if let Some(place) = self.visitors.iter().position(|visitor| visitor.visit == visit) {
                self.go_on(place, bells, &mut done);
            }
            return Ok(());
        }
        self.timer.has_passed();
        if self.reserve.is_none() {
            self.reserve = spare().ok();
        }
        // Who came before this call has had its turn.
        let mut before = self.visitors.len();
        for _ in 0..ACCEPTS {
            let mut is_short = !self.has_room();
            if is_short && self.is_deaf.is_none_or(|since| since.elapsed() < DEAF_MAX) {
                return self.wait_for_room(bells);
            }
            if is_short {
                self.reserve = None;
            }
            let accepted = accept_at(self.listener.inner.bound.socket());
            if is_short {
                self.reserve = spare().ok();
                // There may be some again just now.
                is_short = !self.has_room();
            }
            let socket = match accepted {
                Ok(Some(socket)) => socket,
                Ok(None) => return self.listen_again(bells),
                Err(error) if is_shortage(&error) => return self.wait_for_room(bells),
                Err(error) => {
                    // Told once, and tried again.
                    let was_deaf = self.is_deaf.is_some();
                    self.wait_for_room(bells)?;
                    return if was_deaf { Ok(()) } else { Err(Error::system("accepting a connection")(error)) };
                }
            };
            if is_short {
                turn_away(&socket, &no_descriptor_left());
                continue;
            }
            self.listen_again(bells)?;
            failpoint("connect: accepted");
            let Ok(shake) = Shake::new(socket, Pace::Polled, &self.listener.inner.options) else { continue };
            let mut admitted = admit();
            if admitted.is_err() && before > 0 {
                before -= 1;
                self.give_up_oldest(&mut done);
                admitted = admit();
            }
            let lane = match admitted {
                Ok(lane) => lane,
                Err(Error::Refused(why)) => {
                    shake.refuse(why);
                    continue;
                }
                Err(error) => {
                    shake.refuse(error.to_string());
                    continue;
                }
            };
            if self.visitors.len() == VISITORS_MAX {
                before = before.saturating_sub(1);
                self.give_up_oldest(&mut done);
            }
            self.visit = self.visit.checked_add(1).unwrap_or(1);
            match self.welcome(shake, lane, bells, reception) {
                Ok(visitor) => {
                    self.visitors.push_back(visitor);
                    self.go_on(self.visitors.len() - 1, bells, &mut done);
                }
                Err(_) => done(Err(lane)),
            }
        }
        match self.is_deaf {
            None => bells.keep_readable(),
            Some(_) => self.wait_for_room(bells)?,
        }
        Ok(())
    }

    /// Listens no more; answers the numbers of those who were on the way.
    pub(crate) fn leave(mut self, bells: &Doorbells, mut give_back: impl FnMut(u32)) {
        bells.forget(self.listener.inner.bound.as_fd());
        bells.forget(self.timer.as_fd());
        while !self.visitors.is_empty() {
            self.give_up_oldest(&mut |given_up| {
                if let Err(number) = given_up {
                    give_back(number);
                }
            });
        }
    }

    fn give_up_oldest(&mut self, done: &mut impl FnMut(std::result::Result<Lane, u32>)) {
        if let Some(oldest) = self.visitors.pop_front() {
            done(Err(oldest.lane));
        }
    }

    fn welcome(&self, shake: Shake, lane: u32, bells: &Doorbells, reception: &Reception) -> Result<Visitor> {
        let bell = bells.doorbell_for(shake.peer()).map_err(shake.told("making a bell"))?;
        shake.add_to(bells, self.visit)?;
        let reception = Reception { bell, lane, ..reception.clone() };
        let shaking: Pin<Box<dyn Future<Output = Result<Lane>> + Send>> = match reception.replies.clone() {
            Some(replies) => Box::pin(new_caller(shake, reception, replies)),
            None => Box::pin(new_receiver(shake, reception, true)),
        };
        Ok(Visitor { visit: self.visit, lane, shaking })
    }

    /// Goes on with the handshake of the visitor at `place`.
    fn go_on(&mut self, place: usize, bells: &Doorbells, done: &mut impl FnMut(std::result::Result<Lane, u32>)) {
        let visitor = &mut self.visitors[place];
        let Poll::Ready(shaken) = visitor.shaking.as_mut().poll(&mut Context::from_waker(Waker::noop())) else {
            return;
        };
        let number = visitor.lane;
        self.visitors.remove(place);
        // Why it failed, the peer has been told.
        done(shaken.and_then(|lane| admitted(lane, bells)).map_err(|_| number));
    }
}

/// A descriptor to give up for another.
fn spare() -> std::io::Result<Descriptor> {
    Descriptor::opened(|| rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC))?.map_err(Into::into)
}

/// Whether the system lacked something that it may have again.
fn is_shortage(error: &std::io::Error) -> bool {
    lacks_descriptors(error) || matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::ENOBUFS))
}

fn admitted(mut lane: Lane, bells: &Doorbells) -> Result<Lane> {
    if let [Some(socket), _] = lane.link.liveness() {
        bells.finish_connecting(socket, lane.number)?;
    }
    lane.is_announced = false;
    lane.memory.forget_descriptors();
    if let Some(reply) = &lane.reply {
        bells.add_doorbell(reply.sender.doorbells().doorbell())?;
    }
    Ok(lane)
}
