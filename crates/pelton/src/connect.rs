//! Connecting: who listens and who connects, how a survivor finds the successor of its peer, and the ends of a channel
//! between threads. What the two sides then say to each other is in `handshake.rs`.

use crate::error::{Error, Result};
use crate::handshake::{
    LinkParts, Pace, Reception, Shake, in_call, make_consumer_page, make_data, make_producer_page, make_receiver_page,
    new_caller, new_client, new_receiver, new_sender, receiver_of_one, surviving_receiver, surviving_sender,
};
use crate::lanes::{Lane, LaneMemory, receiver_sleeper};
use crate::link::{Bells, Link};
use crate::name::{Bound, Name};
use crate::options::Options;
use crate::os::socket::{accept_at, wait_for};
use crate::os::{Bell, membarrier};
use crate::path::Place;
use crate::receiver::{Receiver, ReceiverParts};
use crate::sender::{Sender, SenderMemory, SenderParts};
use pelton_lane::{Position, step};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// How long the whole hand-shake may take, unless the caller gave a later deadline.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
/// How long a peer that has connected may take to say the first word.
const GREETING: Duration = Duration::from_millis(500);
/// Between two looks whether somebody listens by now.
pub(crate) const RETRY: Duration = Duration::from_millis(10);

/// Waits for connections under a name. Either end may listen; one listener may accept many peers, one after another, as
/// senders or receivers.
///
/// While it, or an end that it accepted, lives, its socket stands in the file system, so that a successor of a peer finds
/// it; dropping the last of them removes it, and a socket left behind by a
/// process that died is recognised and replaced by the next who listens.
///
/// ```
/// # fn main() -> pelton::Result<()> {
/// let name = format!("unix:{}/listener-doc-{}", std::env::temp_dir().display(), std::process::id());
/// let listener = pelton::Listener::bind(&name)?;
/// let sending = std::thread::spawn(move || pelton::Sender::connect(&name)?.send(b"hello"));
/// let mut receiver = listener.accept_receiver()?;
/// assert_eq!(&*receiver.receive()?, b"hello");
/// # drop(receiver); sending.join().unwrap()
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Listener {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    bound: Bound,
    options: Options,
}

impl Listener {
    /// Listens under `name` (a short name, or `unix:PATH`) with default [`Options`]; does not wait.
    ///
    /// # Errors
    /// [`Error::InUse`] while another process listens there: stop it, or choose another name. [`Error::Name`] for a name
    /// that cannot be. [`Error::System`].
    pub fn bind(name: &str) -> Result<Listener> {
        Options::new().listen(name)
    }

    pub(crate) fn with_options(name: &str, options: &Options) -> Result<Listener> {
        Listener::bound(name, options, false)
    }

    /// As one of several processes that may listen under a short name.
    pub(crate) fn beside_others(name: &str, options: &Options) -> Result<Listener> {
        Listener::bound(name, options, true)
    }

    fn bound(name: &str, options: &Options, is_shared: bool) -> Result<Listener> {
        options.checked_sizes()?;
        let bound = Name::parse(name)?.listen(is_shared)?;
        Ok(Listener { inner: Arc::new(Inner { bound, options: options.clone() }) })
    }

    /// Waits until a receiver connects, and is its sender. Peers that are refused (another uid, another version, the
    /// wrong end) are told why and do not end the wait.
    ///
    /// # Errors
    /// [`Error::Forked`]; [`Error::System`], for instance when descriptors run out.
    pub fn accept_sender(&self) -> Result<Sender> {
        Ok(self.sender(None)?.expect("without a deadline it does not pass"))
    }

    /// As [`Listener::accept_sender`], until `deadline`; `None` when it passes.
    ///
    /// # Errors
    /// As [`Listener::accept_sender`].
    pub fn accept_sender_until(&self, deadline: Instant) -> Result<Option<Sender>> {
        self.sender(Some(deadline))
    }

    /// Waits until a sender connects, and is its receiver. Otherwise as [`Listener::accept_sender`].
    ///
    /// # Errors
    /// As [`Listener::accept_sender`].
    pub fn accept_receiver(&self) -> Result<Receiver> {
        Ok(self.receiver(None)?.expect("without a deadline it does not pass"))
    }

    /// As [`Listener::accept_receiver`], until `deadline`; `None` when it passes.
    ///
    /// # Errors
    /// As [`Listener::accept_sender`].
    pub fn accept_receiver_until(&self, deadline: Instant) -> Result<Option<Receiver>> {
        self.receiver(Some(deadline))
    }

    /// Whether this process is a fork of the one that made the handle. For bindings.
    #[doc(hidden)]
    pub fn is_forked(&self) -> bool {
        self.inner.bound.is_forked()
    }

    fn sender(&self, deadline: Option<Instant>) -> Result<Option<Sender>> {
        let options = &self.inner.options;
        let parts = self.accept(deadline, |shake| in_call(new_sender(shake, options, true)))?;
        parts.map(|parts| Sender::new(parts, options, Origin::Accepted(self.clone()))).transpose()
    }

    fn receiver(&self, deadline: Option<Instant>) -> Result<Option<Receiver>> {
        let options = &self.inner.options;
        let parts = self.accept(deadline, |shake| receiver_of_one(shake, true))?;
        parts.map(|parts| Receiver::new(parts, options, Origin::Accepted(self.clone()))).transpose()
    }

    /// Accepts until a hand-shake succeeds.
    fn accept<T>(&self, deadline: Option<Instant>, mut shake: impl FnMut(Shake) -> Result<T>) -> Result<Option<T>> {
        let bound = &self.inner.bound;
        loop {
            if bound.is_forked() {
                return Err(Error::Forked);
            }
            // Also between one bad connection and the next.
            if !wait_for(bound.as_fd(), None, false, deadline).map_err(Error::system("waiting for a connection"))? {
                return Ok(None);
            }
            // Before one is taken, who would have to be hung up on.
            let now = Instant::now();
            if deadline.is_some_and(|deadline| now >= deadline) {
                return Ok(None);
            }
            let accepted = accept_at(bound.socket()).map_err(Error::system("accepting a connection"))?;
            let Some(socket) = accepted else { continue };
            step("connect: accepted");
            // Who connects greets at once; who does not is not to keep others waiting.
            let greeted = wait_for(socket.as_fd(), None, false, Some(now + GREETING));
            if !greeted.map_err(Error::system("waiting for a greeting"))? {
                continue;
            }
            let patience = deadline.map_or(now + PATIENCE, |deadline| deadline.min(now + PATIENCE));
            let shaken = Shake::new(socket, Pace::Until(patience), &self.inner.options).and_then(&mut shake);
            match shaken {
                Ok(done) => return Ok(Some(done)),
                // The system's trouble is ours; anything else was the peer's, who has been told.
                Err(error @ Error::System { .. }) => return Err(error),
                Err(_) => {}
            }
        }
    }
}

impl AsFd for Listener {
    /// Readable while a connection waits to be accepted.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.bound.as_fd()
    }
}

/// Where processes come in to a receiver of many: their hand-shakes go on side by side, as each says its next word, and
/// nobody waits for any.
#[derive(Debug)]
pub(crate) struct Entrance {
    listener: Listener,
    /// In the order in which they came.
    visitors: VecDeque<Visitor>,
    /// The number given last; 0 is the listener itself.
    visit: u32,
    /// Not to be woken by connections, which could not be accepted last time. Each call looks again whether they can.
    is_deaf: bool,
}

/// One who has connected, in the middle of the hand-shake.
struct Visitor {
    visit: u32,
    lane: u32,
    own_bell: Option<Arc<Bell>>,
    shaking: Pin<Box<dyn Future<Output = Result<Lane>> + Send>>,
}

impl std::fmt::Debug for Visitor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "visitor {} of lane {}", self.visit, self.lane)
    }
}

/// Hand-shakes that go on at a time. For one more, or for one who would be refused because of it, the oldest is given up: who is in
/// earnest has finished before.
const VISITORS_MAX: usize = 64;
/// Connections taken at a time: one who connects again and again is not to keep the receiver from receiving.
const ACCEPTS: usize = 16;

impl Entrance {
    pub(crate) fn new(listener: Listener, bells: &Bells) -> Result<Entrance> {
        bells.add_visits(listener.as_fd(), 0).map_err(Error::system("watching the listener"))?;
        Ok(Entrance { listener, visitors: VecDeque::new(), visit: 0, is_deaf: false })
    }

    /// Whether connections have to be looked for, as nothing tells of them.
    pub(crate) fn is_deaf(&self) -> bool {
        self.is_deaf
    }

    /// Nothing speaks against accepting connections: a lane has left, or it went well.
    pub(crate) fn listen_again(&mut self, bells: &Bells) -> Result<()> {
        if self.is_deaf {
            bells.heed_visits(self.listener.as_fd(), 0, true).map_err(Error::system("watching the listener"))?;
            self.is_deaf = false;
        }
        Ok(())
    }

    /// Does what can be done now after visitor `visit` has said something. `admit` gives a number for one more lane, or says
    /// why there is none; `done` takes a lane, or the number back of one that came to nothing.
    pub(crate) fn attend(
        &mut self,
        visit: u32,
        bells: &Bells,
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
        // Who came before this call has had its turn.
        let mut before = self.visitors.len();
        for _ in 0..ACCEPTS {
            let socket = match accept_at(self.listener.inner.bound.socket()) {
                // They wait where they are. To be told of them again and again would help nobody.
                Err(_) if self.is_deaf => return Ok(()),
                Err(error) => {
                    let heeded = bells.heed_visits(self.listener.as_fd(), 0, false);
                    heeded.map_err(Error::system("watching the listener"))?;
                    self.is_deaf = true;
                    return Err(Error::system("accepting a connection")(error));
                }
                Ok(accepted) => {
                    self.listen_again(bells)?;
                    match accepted {
                        Some(socket) => socket,
                        None => return Ok(()),
                    }
                }
            };
            step("connect: accepted");
            let Ok(shake) = Shake::new(socket, Pace::Polled, &self.listener.inner.options) else { continue };
            let mut admitted = admit();
            if admitted.is_err() && before > 0 {
                before -= 1;
                self.give_up_oldest(bells, &mut done);
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
                self.give_up_oldest(bells, &mut done);
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
        bells.hear_again();
        Ok(())
    }

    /// Listens no more; answers the numbers of those who were on the way.
    pub(crate) fn leave(mut self, bells: &Bells, mut give_back: impl FnMut(u32)) {
        bells.forget(self.listener.as_fd());
        while !self.visitors.is_empty() {
            self.give_up_oldest(bells, &mut |given_up| {
                if let Err(number) = given_up {
                    give_back(number);
                }
            });
        }
    }

    fn give_up_oldest(&mut self, bells: &Bells, done: &mut impl FnMut(std::result::Result<Lane, u32>)) {
        if let Some(oldest) = self.visitors.pop_front() {
            oldest.own_bell.inspect(|bell| bells.forget(bell.as_fd()));
            done(Err(oldest.lane));
        }
    }

    fn welcome(&self, shake: Shake, lane: u32, bells: &Bells, reception: &Reception) -> Result<Visitor> {
        // Who is not this user must not be able to silence the bell for others.
        let own_bell = match shake.peer().uid == rustix::process::geteuid().as_raw() {
            true => None,
            false => {
                let bell = Bell::new().and_then(|bell| bells.add_bell(&bell).map(|()| bell));
                Some(Arc::new(bell.map_err(shake.told("making an eventfd"))?))
            }
        };
        bells.add_visits(shake.socket(), self.visit).map_err(shake.told("watching a connection"))?;
        let bell = own_bell.clone().unwrap_or_else(|| reception.bell.clone());
        let reception = Reception { bell, lane, ..reception.clone() };
        let shaking: Pin<Box<dyn Future<Output = Result<Lane>> + Send>> = match reception.desk.clone() {
            Some(desk) => Box::pin(new_caller(shake, reception, desk)),
            None => Box::pin(new_receiver(shake, reception, true)),
        };
        Ok(Visitor { visit: self.visit, lane, own_bell, shaking })
    }

    /// Goes on with the hand-shake of the visitor at `place`.
    fn go_on(&mut self, place: usize, bells: &Bells, done: &mut impl FnMut(std::result::Result<Lane, u32>)) {
        let visitor = &mut self.visitors[place];
        let Poll::Ready(shaken) = visitor.shaking.as_mut().poll(&mut Context::from_waker(Waker::noop())) else {
            return;
        };
        let (number, own_bell) = (visitor.lane, visitor.own_bell.take());
        self.visitors.remove(place);
        // Why it failed, the peer has been told.
        done(shaken.and_then(|lane| admitted(lane, own_bell.clone(), bells)).map_err(|_| {
            own_bell.inspect(|bell| bells.forget(bell.as_fd()));
            number
        }));
    }
}

fn admitted(mut lane: Lane, own_bell: Option<Arc<Bell>>, bells: &Bells) -> Result<Lane> {
    if let [Some(socket), _] = lane.link.life() {
        bells.end_visit(socket, lane.number).map_err(Error::system("watching the peer"))?;
    }
    lane.is_announced = false;
    lane.own_bell = own_bell;
    lane.memory.forget_descriptors();
    if let Some(back) = &lane.back {
        bells.add_bell(back.caller.bell()).map_err(Error::system("hearing a client's bell"))?;
    }
    Ok(lane)
}

/// How a handle found its peer, and so how it finds the peer's successor.
#[derive(Clone, Debug)]
pub(crate) enum Origin {
    Connected(Box<(Name, Options)>),
    Accepted(Listener),
    Threads,
    Path(Arc<Place>),
}

impl Origin {
    /// Offers a survivor's lane to the successor of its peer; false at the deadline.
    fn resume(&self, deadline: Option<Instant>, mut shake: impl FnMut(Shake, bool) -> Result<()>) -> Result<bool> {
        match self {
            Origin::Accepted(listener) => Ok(listener.accept(deadline, |s| shake(s, true))?.is_some()),
            Origin::Connected(by) => {
                let (name, options) = &**by;
                let found = reach(name, options, Reach::Until(deadline), |s| shake(s, false));
                match found {
                    Ok(()) => Ok(true),
                    Err(Error::TimedOut(_)) if deadline.is_some() => Ok(false),
                    Err(error) => Err(error),
                }
            }
            Origin::Threads | Origin::Path(_) => {
                Err(Error::Refused("a channel between threads has no successor: make a new one".to_owned()))
            }
        }
    }

    pub(crate) fn resume_sender(&self, parts: &mut SenderParts, deadline: Option<Instant>) -> Result<bool> {
        // If the lane itself is broken, no successor is to blame.
        parts.lane.look_at_head()?;
        self.resume(deadline, |shake, listens| in_call(surviving_sender(shake, parts, listens)))
    }

    pub(crate) fn resume_receiver(&self, lane: &mut Lane, bells: &Bells, deadline: Option<Instant>) -> Result<bool> {
        // What the dead sender sent along is still in its socket.
        lane.link.take_in()?;
        // If the lane itself is broken, no successor is to blame.
        lane.consumer.end_of_committed()?;
        self.resume(deadline, |shake, listens| in_call(surviving_receiver(shake, lane, bells, listens)))
    }
}

pub(crate) fn connect_sender(name: &str, options: &Options) -> Result<Sender> {
    options.checked_sizes()?;
    let name = Name::parse(name)?;
    let parts = reach(&name, options, Reach::of(options), |shake| in_call(new_sender(shake, options, false)))?;
    Sender::new(parts, options, Origin::Connected(Box::new((name, options.clone()))))
}

pub(crate) fn connect_receiver(name: &str, options: &Options) -> Result<Receiver> {
    let name = Name::parse(name)?;
    let parts = reach(&name, options, Reach::of(options), |shake| receiver_of_one(shake, false))?;
    Receiver::new(parts, options, Origin::Connected(Box::new((name, options.clone()))))
}

/// A link to the service that listens at a name of one.
pub(crate) fn connect_client(name: &Name, options: &Options, bells: &Bells) -> Result<LinkParts> {
    reach(name, options, Reach::of(options), |shake| in_call(new_client(shake, options, bells)))
}

/// How long to look for a listener.
#[derive(Clone, Copy)]
enum Reach {
    /// Once.
    Now,
    /// Until somebody listens, or the deadline.
    Until(Option<Instant>),
}

impl Reach {
    fn of(options: &Options) -> Reach {
        options.connect_deadline.map_or(Reach::Now, |deadline| Reach::Until(Some(deadline)))
    }
}

/// Connects to whoever listens under the name.
fn reach<T>(name: &Name, options: &Options, reach: Reach, mut shake: impl FnMut(Shake) -> Result<T>) -> Result<T> {
    loop {
        let last = match reach {
            Reach::Now => true,
            Reach::Until(deadline) => deadline.is_some_and(|deadline| Instant::now() >= deadline),
        };
        if let Some(socket) = name.connect()? {
            step("connect: connected");
            let patience = match reach {
                Reach::Now => Instant::now() + PATIENCE,
                Reach::Until(deadline) => deadline.unwrap_or_else(|| Instant::now() + PATIENCE),
            };
            match Shake::new(socket, Pace::Until(patience), options).and_then(&mut shake) {
                // It went while we greeted it: another may come. Without a deadline, slowness does not matter either.
                Err(Error::HungUp) if !last => {}
                Err(Error::TimedOut(_)) if matches!(reach, Reach::Until(None)) => {}
                done => return done,
            }
        }
        if last {
            return Err(match reach {
                Reach::Now => Error::NoListener { name: name.with_place() },
                Reach::Until(_) => Error::TimedOut(format!("waiting for somebody to listen at {}", name.with_place())),
            });
        }
        std::thread::sleep(RETRY);
    }
}

/// Both ends of a channel between threads.
pub(crate) fn threads(options: &Options) -> Result<(Sender, Receiver)> {
    let can_barrier = membarrier::register();
    let (capacity, limit) = options.checked_sizes()?;
    let make = || -> std::io::Result<_> {
        Ok((
            make_producer_page(capacity, limit, 1)?,
            make_data(capacity)?,
            make_consumer_page(Position::START)?,
            make_receiver_page()?,
            Link::between_threads()?,
        ))
    };
    let (page, data, consumer, receiver, [(bells, to_receiver), (receiver_bells, to_sender)]) =
        make().map_err(Error::system("making a channel of memfds, eventfds and epolls"))?;
    let [page, consumer, receiver, data] = [page, consumer, receiver, data].map(Arc::new);
    let memory =
        SenderMemory { page: page.clone(), data: data.clone(), consumer: consumer.clone(), receiver: receiver.clone() };
    let lane = memory.attach(Position::START, Position::START, 0, can_barrier)?;
    let sender = Sender::new(SenderParts { lane, bells, link: to_receiver, memory }, options, Origin::Threads)?;
    let memory = LaneMemory { page, data, consumer, receiver };
    let consumer = memory.attach(limit, can_barrier)?;
    let sleeper = receiver_sleeper(&memory.receiver, can_barrier);
    let parts = ReceiverParts { lane: Lane::new(consumer, to_sender, 0, 0, memory), sleeper, bells: receiver_bells };
    Ok((sender, Receiver::new(parts, options, Origin::Threads)?))
}
