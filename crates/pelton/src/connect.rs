//! Connecting: who listens and who connects, how a survivor finds the successor of its peer, and the ends of a channel
//! between threads. What the two sides then say to each other is in `handshake.rs`.

use crate::doorbells::Doorbells;
use crate::error::{Error, Result};
use crate::handshake::turn_away;
use crate::handshake::{
    LinkParts, Pace, Reception, Shake, again, in_call, lacks_descriptors, make_consumer_page, make_data,
    make_producer_page, make_receiver_page, new_caller, new_client, new_receiver, new_sender, no_descriptor_left,
    receiver_of_one, surviving_receiver, surviving_sender,
};
use crate::lanes::{Lane, LaneMemory, receiver_sleeper};
use crate::link::{Link, this_process};
use crate::name::{Bound, Name};
use crate::options::Options;
use crate::path::Place;
use crate::receiver::{Receiver, ReceiverParts};
use crate::sender::{Sender, SenderMemory, SenderParts};
use crate::transport::{Queue, ThreadTransport};
use pelton_lane::{Position, failpoint};
use pelton_os::socket::{accept_at, first_readable};
use pelton_os::{Descriptor, Timer, locked, membarrier};
use rustix::event::epoll::{self, EventFlags};
use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// How long the whole hand-shake may take, unless the caller gave a later deadline.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
/// How long a peer that has connected may take to say the first word.
const GREETING: Duration = Duration::from_millis(500);
/// How many who have connected are waited for at a time to say it.
const GREETED_MAX: usize = 64;
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
    /// Who has connected and has some time yet to say the first word, of whom a call had no need any more.
    connected: Mutex<VecDeque<Connected>>,
    /// Readable while somebody waits to be accepted, or of those one has said it.
    readable: Descriptor,
}

/// One who has connected, and how long it may take to say the first word.
type Connected = (Shake, Instant);

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
        let readable =
            Descriptor::opened(|| epoll::create(epoll::CreateFlags::CLOEXEC)).map(|made| made.map_err(Into::into));
        let readable = readable.flatten().map_err(Error::system("making an epoll"))?;
        let bound = Name::parse(name)?.listen(is_shared)?;
        let added = epoll::add(&readable, bound.as_fd(), epoll::EventData::new_u64(0), EventFlags::IN);
        added.map_err(|errno| Error::system("watching the listener")(errno.into()))?;
        let inner = Inner { bound, options: options.clone(), connected: Mutex::default(), readable };
        Ok(Listener { inner: Arc::new(inner) })
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
    fn accept<T>(&self, deadline: Option<Instant>, shake: impl FnMut(Shake) -> Result<T>) -> Result<Option<T>> {
        let Inner { bound, connected, readable, .. } = &*self.inner;
        if bound.is_forked() {
            return Err(Error::Forked);
        }
        let mut waiting = std::mem::take(&mut *locked(connected));
        waiting.iter().for_each(|(shake, _)| _ = epoll::delete(readable, shake.socket()));
        let accepted = self.accept_of(&mut waiting, deadline, shake);
        // They are for the next call.
        let event = epoll::EventData::new_u64(0);
        waiting.retain(|(shake, _)| epoll::add(readable, shake.socket(), event, EventFlags::IN).is_ok());
        locked(connected).append(&mut waiting);
        accepted
    }

    /// Of those `connected`, and who connects. Each that may has some time to say the first word; several at once, so that who does not keeps
    /// nobody waiting who does.
    fn accept_of<T>(
        &self,
        connected: &mut VecDeque<Connected>,
        deadline: Option<Instant>,
        mut shake: impl FnMut(Shake) -> Result<T>,
    ) -> Result<Option<T>> {
        let bound = &self.inner.bound;
        loop {
            if bound.is_forked() {
                return Err(Error::Forked);
            }
            let now = Instant::now();
            // Before one is taken, or greeted, who would have to be hung up on.
            if deadline.is_some_and(|deadline| now >= deadline) {
                return Ok(None);
            }
            let listener = (connected.len() < GREETED_MAX).then(|| bound.as_fd());
            let first_silent = connected.front().map(|(_, until)| *until);
            let until = [deadline, first_silent].into_iter().flatten().min();
            let fds: Vec<_> = connected.iter().map(|(shake, _)| shake.socket()).chain(listener).collect();
            let ready = first_readable(&fds, until).map_err(Error::system("waiting for a connection"))?;
            let Some(place) = ready else {
                let now = Instant::now();
                connected.retain(|(_, until)| now < *until);
                continue;
            };
            if let Some((mut greeting, _)) = connected.remove(place) {
                let patience = deadline.map_or(now + PATIENCE, |deadline| deadline.min(now + PATIENCE));
                greeting.wait_until(patience);
                match shake(greeting) {
                    Ok(done) => return Ok(Some(done)),
                    // The system's trouble is ours; anything else was the peer's, who has been told.
                    Err(error @ Error::System { .. }) => return Err(error),
                    Err(_) => continue,
                }
            }
            let accepted = accept_at(bound.socket()).map_err(Error::system("accepting a connection"))?;
            let Some(socket) = accepted else { continue };
            failpoint("connect: accepted");
            match Shake::new(socket, Pace::Polled, &self.inner.options) {
                Ok(shake) => connected.push_back((shake, Instant::now() + GREETING)),
                // As above.
                Err(error @ Error::System { .. }) => return Err(error),
                Err(_) => {}
            }
        }
    }
}

impl AsFd for Listener {
    /// Readable while a connection waits to be accepted.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.readable.as_fd()
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
    /// Since when connections could not be accepted. They are not told meanwhile; the timer says when to try again.
    is_deaf: Option<Instant>,
    /// Made at the beginning, since when it is needed nothing can be made.
    timer: Timer,
    /// To be closed when none is left, so that who waits can be taken, and told.
    reserve: Option<Descriptor>,
}

/// One who has connected, in the middle of the hand-shake.
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

/// Hand-shakes that go on at a time. For one more, or for one who would be refused because of it, the oldest is given up: who is in
/// earnest has finished before.
const VISITORS_MAX: usize = 64;
/// Connections taken at a time: one who connects again and again is not to keep the receiver from receiving.
const ACCEPTS: usize = 16;
/// Descriptors that one more peer costs, those of its hand-shake included.
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

    /// Goes on with the hand-shake of the visitor at `place`.
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
        parts.lane.refresh_head()?;
        self.resume(deadline, |shake, listens| in_call(surviving_sender(shake, parts, listens)))
    }

    pub(crate) fn resume_receiver(
        &self,
        lane: &mut Lane,
        bells: &Doorbells,
        deadline: Option<Instant>,
    ) -> Result<bool> {
        // What the dead sender sent along is still in its socket.
        lane.link.drain_descriptors()?;
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

/// The client's endpoints of a link of two lanes.
#[derive(Debug)]
pub struct Duplex {
    pub sender: Sender,
    pub receiver: Receiver,
    /// The largest request that the service takes.
    pub bytes_max: u64,
}

impl Duplex {
    fn new(parts: LinkParts, options: &Options) -> Result<Duplex> {
        let LinkParts { requests, replies, bytes_max } = parts;
        let sender = Sender::new(requests, options, Origin::Threads)?;
        Ok(Duplex { sender, receiver: Receiver::new(replies, options, Origin::Threads)?, bytes_max })
    }
}

/// A handshake that continues when it is polled, after its descriptor was readable. `None`: nobody listens there.
pub(crate) type Connecting = Pin<Box<dyn Future<Output = Result<Option<Duplex>>> + Send>>;

/// Connects to the service that listens under `name`, whose doorbells are `bells`.
pub(crate) fn connect_duplex(name: &Name, options: &Options, bells: &Doorbells) -> Result<Duplex> {
    let parts = reach(name, options, Reach::of(options), |shake| in_call(new_client(shake, options, bells)))?;
    Duplex::new(parts, options)
}

/// Starts to connect to the service at `path`: `bells` report [`Event::Connecting`] with `number` when there is
/// something to do. `None`: nobody listens there.
pub(crate) fn start_duplex(
    name: &Name,
    path: &Path,
    options: &Options,
    bells: &Doorbells,
    number: u32,
) -> Result<Option<Connecting>> {
    let Some(socket) = name.connect_to(path)? else { return Ok(None) };
    let shake = Shake::new(socket, Pace::Polled, options)?;
    bells.watch_connecting(shake.socket(), number).map_err(Error::system("watching a connection"))?;
    let (options, bells) = (options.clone(), bells.clone());
    Ok(Some(Box::pin(async move { finish_duplex(shake, &options, &bells).await.map(Some) })))
}

/// As [`start_duplex`], after a pause.
pub(crate) fn start_duplex_later(
    name: &Name,
    path: &Path,
    options: &Options,
    bells: &Doorbells,
    number: u32,
) -> Result<Connecting> {
    let timer = Timer::after(RETRY).map_err(Error::system("making a timer"))?;
    bells.watch_connecting(timer.as_fd(), number).map_err(Error::system("watching a timer"))?;
    let (name, path, options, bells) = (name.clone(), path.to_owned(), options.clone(), bells.clone());
    Ok(Box::pin(async move {
        while !timer.has_passed() {
            again().await;
        }
        drop(timer);
        let Some(socket) = name.connect_to(&path)? else { return Ok(None) };
        let shake = Shake::new(socket, Pace::Polled, &options)?;
        bells.watch_connecting(shake.socket(), number).map_err(Error::system("watching a connection"))?;
        finish_duplex(shake, &options, &bells).await.map(Some)
    }))
}

async fn finish_duplex(shake: Shake, options: &Options, bells: &Doorbells) -> Result<Duplex> {
    let duplex = Duplex::new(new_client(shake, options, bells).await?, options)?;
    if let [Some(socket), _] = duplex.receiver.liveness() {
        bells.finish_connecting(socket, 0)?;
    }
    Ok(duplex)
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
            failpoint("connect: connected");
            let patience = match reach {
                Reach::Now => Instant::now() + options.handshake,
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
        ))
    };
    let (page, data, consumer, receiver) =
        make().map_err(Error::system("making a channel of memfds, eventfds and epolls"))?;
    let (bells, receiver_bells, queue) = (Doorbells::new()?, Doorbells::new()?, Queue::default());
    let link = |peer: &Doorbells| Link::new(peer.doorbell().clone(), ThreadTransport(queue.clone()), this_process());
    let (to_receiver, to_sender) = (link(&receiver_bells), link(&bells));
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
