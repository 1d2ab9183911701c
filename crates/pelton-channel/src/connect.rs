//! Connecting: endpoints by a name, by a listener, and between threads; and how a survivor reaches its peer's
//! successor. `handshake.rs` has the packets that the two sides exchange.

use crate::doorbells::Doorbells;
use crate::error::{Error, Result};
use crate::handshake::broadcast::new_subscriber;
use crate::handshake::{
    Handshake, LinkParts, Pace, make_consumer_page, make_data, make_producer_page, make_receiver_page, new_client,
    new_sender, receiver_of_one, surviving_receiver, surviving_sender,
};
use crate::lanes::{Lane, LaneMemory, ReceiverParts, receiver_sleeper};
use crate::link::{Link, this_process};
use crate::listener::Listener;
use crate::name::Name;
use crate::observe;
use crate::opening::{Opening, Resume, Steps, Waiter, again, in_call};
use crate::options::{Options, maker};
use crate::receiver::{self, Receiver};
use crate::sender::{self, Sender, SenderMemory, SenderParts};
use crate::settings::{HANDSHAKE_TIMEOUT, Settings};
use crate::subscriber::{Subscriber, SubscriberParts};
use crate::transport::{Queue, ThreadTransport};
use crate::wait::{ConnectDeadline, Deadline};
use pelton_lane::{Position, failpoint};
use pelton_os::socket::{Socket, first_readable};
use pelton_os::{Timer, membarrier};
use std::os::fd::AsFd;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval of attempts to connect.
pub const RETRY: Duration = Duration::from_millis(10);

/// Creates endpoints.
impl Options<maker::ConnectSender> {
    /// Connects to a receiver that listens under `name`, a short name or `unix:PATH`.
    ///
    /// # Errors
    /// [`Error::NoListener`], [`Error::TimedOut`], [`Error::Refused`] with the other side's reason, [`Error::Name`],
    /// [`Error::Option`], [`Error::Corrupt`] when the other side violates the protocol, [`Error::System`].
    pub fn connect_sender(&self, name: &str) -> Result<Sender> {
        in_call(connect_sender(name.to_owned(), self.settings().clone(), Waiter::Thread))
    }

    /// As [`Options::connect_sender`], but does not wait: the caller's event loop continues it.
    ///
    /// # Errors
    /// [`Error::System`]; [`Opening::try_finish`] returns the others.
    pub fn start_connect_sender(&self, name: &str) -> Result<Opening<Sender>> {
        let settings = self.settings().begun();
        Opening::new(|waiter| connect_sender(name.to_owned(), settings, waiter))
    }
}

impl Options<maker::ConnectReceiver> {
    /// Connects to a sender that listens under `name`.
    ///
    /// # Errors
    /// As [`Options::connect_sender`].
    pub fn connect_receiver(&self, name: &str) -> Result<Receiver> {
        in_call(connect_receiver(name.to_owned(), self.settings().clone(), Waiter::Thread))
    }

    /// As [`Options::connect_receiver`], but does not wait: the caller's event loop continues it.
    ///
    /// # Errors
    /// As [`Options::start_connect_sender`].
    pub fn start_connect_receiver(&self, name: &str) -> Result<Opening<Receiver>> {
        let settings = self.settings().begun();
        Opening::new(|waiter| connect_receiver(name.to_owned(), settings, waiter))
    }
}

impl Options<maker::Listen> {
    /// Listens under `name`. Does not wait. Each accepted peer gets a lane with these options.
    ///
    /// # Errors
    /// As [`Listener::bind`].
    pub fn listen(&self, name: &str) -> Result<Listener> {
        Listener::with_settings(name, self.settings())
    }
}

impl Options<maker::Threads> {
    /// Creates both endpoints of a channel between threads of this process.
    ///
    /// # Errors
    /// [`Error::Option`], [`Error::System`].
    pub fn threads(&self) -> Result<(Sender, Receiver)> {
        threads(self.settings())
    }
}

impl Options<maker::Subscribe> {
    /// Connects to the publisher that listens under `name`, a short name or `unix:PATH`. The publisher admits it within
    /// its next call: see [`Publisher::admit`](crate::Publisher::admit).
    ///
    /// # Errors
    /// As [`Options::connect_receiver`]; [`Error::Refused`] also if the publisher does not take the policy, or has 64
    /// subscribers.
    pub fn connect_subscriber(&self, name: &str) -> Result<Subscriber> {
        in_call(connect_subscriber(Name::parse(name)?, self.settings().clone(), Waiter::Thread))
    }

    /// As [`Options::connect_subscriber`], but does not wait: the caller's event loop continues it.
    ///
    /// # Errors
    /// [`Error::Name`], [`Error::System`]; [`Opening::try_finish`] returns the others.
    pub fn start_connect_subscriber(&self, name: &str) -> Result<Opening<Subscriber>> {
        let (name, settings) = (Name::parse(name)?, self.settings().begun());
        Opening::new(|waiter| connect_subscriber(name, settings, waiter))
    }
}

impl Subscriber {
    /// Connects to the publisher that listens under `name` (a short name, or `unix:PATH`) with default [`Options`]: it
    /// gates, from now on. Fails immediately when no process listens. Waits at most some seconds to be admitted.
    ///
    /// # Errors
    /// As [`Options::connect_subscriber`].
    pub fn connect(name: &str) -> Result<Subscriber> {
        Options::new().connect_subscriber(name)
    }

    /// After [`Error::PeerDied`] or [`Error::Closed`]: waits for the publisher's successor under the same name, and
    /// joins it with the same options. Its lane is a new one, whose messages count from 1; in a directory the lane and
    /// its numbers continue. All messages of the former publisher were received before. The descriptor stays the same.
    ///
    /// Returns false at `deadline`. A successor that has answered by then may count this subscriber: the next call
    /// continues there, so call it again, or drop the subscriber. [`Deadline::Now`] does not wait, and takes one step;
    /// a publisher answers within its calls, twice.
    ///
    /// # Errors
    /// [`Error::Refused`] between threads, and while the publisher is there; as [`Options::connect_subscriber`].
    pub fn resume_until(&mut self, deadline: impl Into<Deadline>) -> Result<bool> {
        self.endpoint.check_owner()?;
        if self.path.is_some() || self.reconnect.is_some() {
            if self.endpoint.departure.is_none() {
                return Err(Error::Refused("the publisher is alive: there is nobody to succeed it".to_owned()));
            }
            if self.path.is_some() {
                return self.resume_by_path(deadline.into().instant());
            }
        }
        let Some((name, options)) = self.reconnect.clone() else {
            return Err(Error::Refused("a broadcast between threads has no successor: make a new one".to_owned()));
        };
        let (deadline, doorbells) = (deadline.into().instant(), &self.endpoint.doorbells);
        let mut joining = match self.joining.take() {
            Some(joining) => joining,
            None => {
                let options = Settings { connect_deadline: ConnectDeadline::At(Deadline::Never), ..options.clone() };
                let (name, doorbells) = (name.clone(), doorbells.clone());
                Opening::new(|waiter| async move { join(&name, &options, &doorbells, &waiter).await })?
            }
        };
        let parts = loop {
            if let Some(parts) = joining.try_finish()? {
                break parts;
            }
            let readable = first_readable(&[joining.as_fd()], deadline);
            if readable.map_err(Error::system("waiting for a publisher"))?.is_none() {
                self.joining = Some(joining);
                return Ok(false);
            }
        };
        self.parts.link.lose_peer(doorbells);
        let mut successor = Subscriber::new(parts, doorbells.clone(), &options)?;
        (successor.missed, successor.reconnect) = (self.missed, Some((name, options)));
        *self = successor;
        Ok(true)
    }
}

impl Sender {
    /// Connects to a receiver that listens under `name` (a short name, or `unix:PATH`) with default [`Options`]. Fails
    /// immediately when no receiver listens. Waits at most some seconds for a listener to accept.
    ///
    /// # Errors
    /// As [`Options::connect_sender`].
    pub fn connect(name: &str) -> Result<Sender> {
        Options::new().connect_sender(name)
    }
}

impl Receiver {
    /// Connects to a sender that listens under `name` (a short name, or `unix:PATH`) with default [`Options`]. Fails
    /// immediately when no sender listens. Waits at most some seconds for a listener to accept.
    ///
    /// # Errors
    /// As [`Options::connect_sender`].
    pub fn connect(name: &str) -> Result<Receiver> {
        Options::new().connect_receiver(name)
    }
}

impl Listener {
    /// Waits until a receiver connects, and returns the sender to it. A refused peer (another uid, another version, the
    /// wrong role) receives the reason, and does not end the wait.
    ///
    /// # Errors
    /// [`Error::Forked`]; [`Error::System`], for instance when descriptors run out.
    pub fn accept_sender(&self) -> Result<Sender> {
        Ok(in_call(self.sender(None, &Waiter::Thread))?.expect(NO_DEADLINE))
    }

    /// As [`Listener::accept_sender`], until `deadline`; `None` when it passes.
    ///
    /// # Errors
    /// As [`Listener::accept_sender`].
    pub fn accept_sender_until(&self, deadline: impl Into<Deadline>) -> Result<Option<Sender>> {
        in_call(self.sender(deadline.into().instant(), &Waiter::Thread))
    }

    /// Waits until a sender connects, and returns the receiver from it. Otherwise as [`Listener::accept_sender`].
    ///
    /// # Errors
    /// As [`Listener::accept_sender`].
    pub fn accept_receiver(&self) -> Result<Receiver> {
        Ok(in_call(self.receiver(None, &Waiter::Thread))?.expect(NO_DEADLINE))
    }

    /// As [`Listener::accept_receiver`], until `deadline`; `None` when it passes.
    ///
    /// # Errors
    /// As [`Listener::accept_sender`].
    pub fn accept_receiver_until(&self, deadline: impl Into<Deadline>) -> Result<Option<Receiver>> {
        in_call(self.receiver(deadline.into().instant(), &Waiter::Thread))
    }

    /// As [`Listener::accept_sender`], but does not wait: the caller's event loop continues it, until it is dropped. A
    /// drop may refuse a peer whose handshake has begun; keep the opening to accept that peer later.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn start_accept_sender(&self) -> Result<Opening<Sender>> {
        let listener = self.clone();
        Opening::new(|waiter| async move { Ok(listener.sender(None, &waiter).await?.expect(NO_DEADLINE)) })
    }

    /// As [`Listener::accept_receiver`], but does not wait. Otherwise as [`Listener::start_accept_sender`].
    ///
    /// # Errors
    /// [`Error::System`].
    ///
    /// ```
    /// # fn main() -> pelton::Result<()> {
    /// use std::os::fd::AsFd;
    /// let name = format!("unix:{}/accepting-doc-{}", std::env::temp_dir().display(), std::process::id());
    /// let listener = pelton::Listener::bind(&name)?;
    /// // Both in one thread: neither waits for the other.
    /// let (mut accepting, mut connecting) =
    ///     (listener.start_accept_receiver()?, pelton::Options::new().start_connect_sender(&name)?);
    /// let (mut sender, mut receiver) = (None, None);
    /// while sender.is_none() || receiver.is_none() {
    ///     // Your event loop waits instead, until one of the two descriptors is readable.
    ///     let watched = |fd| rustix::event::PollFd::from_borrowed_fd(fd, rustix::event::PollFlags::IN);
    ///     rustix::event::poll(&mut [watched(accepting.as_fd()), watched(connecting.as_fd())], None).unwrap();
    ///     if sender.is_none() {
    ///         sender = connecting.try_finish()?;
    ///     }
    ///     if receiver.is_none() {
    ///         receiver = accepting.try_finish()?;
    ///     }
    /// }
    /// sender.unwrap().send(b"hello")?;
    /// assert_eq!(&*receiver.unwrap().receive()?, b"hello");
    /// # Ok(())
    /// # }
    /// ```
    pub fn start_accept_receiver(&self) -> Result<Opening<Receiver>> {
        let listener = self.clone();
        Opening::new(|waiter| async move { Ok(listener.receiver(None, &waiter).await?.expect(NO_DEADLINE)) })
    }

    async fn sender(&self, deadline: Option<Instant>, waiter: &Waiter) -> Result<Option<Sender>> {
        let options = &self.inner.options;
        let accepted = self.accept(deadline, waiter, |handshake| new_sender(handshake, options, true)).await?;
        let Some((parts, doorbells)) = accepted else { return Ok(None) };
        let mut sender = Sender::new(parts, doorbells, options)?;
        sender.endpoint.set_reconnect(Arc::new(self.clone()));
        Ok(Some(sender))
    }

    async fn receiver(&self, deadline: Option<Instant>, waiter: &Waiter) -> Result<Option<Receiver>> {
        let accepted = self.accept(deadline, waiter, |handshake| receiver_of_one(handshake, true)).await?;
        let Some(parts) = accepted else { return Ok(None) };
        let mut receiver = Receiver::new(parts, &self.inner.options)?;
        receiver.endpoint.set_reconnect(Arc::new(self.clone()));
        Ok(Some(receiver))
    }
}

const NO_DEADLINE: &str = "without a deadline it does not pass";

/// Reconnects by the name that an endpoint had connected to.
#[derive(Debug)]
struct ByName {
    name: Name,
    options: Settings,
}

/// What survives its peer: the lane's part of a sender or a receiver.
trait Survivor: Send {
    /// The handshake with a candidate. Dropping the future cancels, and leaves the lane as it was.
    fn offer<'a>(&'a mut self, handshake: Handshake, doorbells: &'a Doorbells, listens: bool) -> Steps<'a, ()>;
}

impl Survivor for SenderParts {
    fn offer<'a>(&'a mut self, handshake: Handshake, doorbells: &'a Doorbells, listens: bool) -> Steps<'a, ()> {
        Box::pin(surviving_sender(handshake, self, doorbells, listens))
    }
}

impl Survivor for Lane {
    fn offer<'a>(&'a mut self, handshake: Handshake, doorbells: &'a Doorbells, listens: bool) -> Steps<'a, ()> {
        Box::pin(surviving_receiver(handshake, self, doorbells, listens))
    }
}

impl ByName {
    async fn resumed<S: Survivor>(&self, survivor: &mut S, resuming: Resume<'_>) -> Result<bool> {
        let Resume { doorbells, deadline, waiter } = resuming;
        let mut reach = Reach { name: &self.name, options: &self.options, until: Until::Then(deadline), waiter };
        loop {
            let error = match reach.begun().await {
                Ok((handshake, is_last)) => match survivor.offer(handshake, doorbells, false).await {
                    Ok(()) => return Ok(true),
                    Err(error) => reach.failed(error, is_last).await,
                },
                Err(error) => Err(error),
            };
            match error {
                Err(Error::TimedOut(_)) if deadline.is_some() => return Ok(false),
                next => next?,
            }
        }
    }
}

impl sender::Reconnect for ByName {
    fn resume<'a>(&'a self, parts: &'a mut SenderParts, resuming: Resume<'a>) -> Steps<'a, bool> {
        Box::pin(self.resumed(parts, resuming))
    }
}

impl receiver::Reconnect for ByName {
    fn resume<'a>(&'a self, lane: &'a mut Lane, resuming: Resume<'a>) -> Steps<'a, bool> {
        Box::pin(self.resumed(lane, resuming))
    }
}

impl Listener {
    async fn resumed<S: Survivor>(&self, survivor: &mut S, resuming: Resume<'_>) -> Result<bool> {
        let Resume { doorbells, deadline, waiter } = resuming;
        while let Some(handshake) = self.begun(deadline, waiter).await? {
            if Listener::done(survivor.offer(handshake, doorbells, true).await)?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Reconnects by the listener that had accepted the peer: it accepts the successor.
impl sender::Reconnect for Listener {
    fn resume<'a>(&'a self, parts: &'a mut SenderParts, resuming: Resume<'a>) -> Steps<'a, bool> {
        Box::pin(self.resumed(parts, resuming))
    }
}

impl receiver::Reconnect for Listener {
    fn resume<'a>(&'a self, lane: &'a mut Lane, resuming: Resume<'a>) -> Steps<'a, bool> {
        Box::pin(self.resumed(lane, resuming))
    }
}

async fn connect_sender(name: String, options: Settings, waiter: Waiter) -> Result<Sender> {
    options.checked_sizes()?;
    let name = Name::parse(&name)?;
    let handshake = |handshake| new_sender(handshake, &options, false);
    let (parts, doorbells) = reach(&name, &options, &waiter, handshake).await?;
    let mut sender = Sender::new(parts, doorbells, &options)?;
    sender.endpoint.set_reconnect(Arc::new(ByName { name, options }));
    Ok(sender)
}

async fn connect_receiver(name: String, options: Settings, waiter: Waiter) -> Result<Receiver> {
    let name = Name::parse(&name)?;
    let handshake = |handshake| receiver_of_one(handshake, false);
    let parts = reach(&name, &options, &waiter, handshake).await?;
    let mut receiver = Receiver::new(parts, &options)?;
    receiver.endpoint.set_reconnect(Arc::new(ByName { name, options }));
    Ok(receiver)
}

/// The client's endpoints of a link of two lanes.
#[derive(Debug)]
pub struct Duplex {
    /// Sends requests.
    pub sender: Sender,
    /// Receives replies.
    pub receiver: Receiver,
    /// The largest request that the service accepts.
    pub bytes_max: u64,
    /// The features that the service offers.
    pub features: u64,
}

impl Duplex {
    fn new(parts: LinkParts, options: &Settings) -> Result<Duplex> {
        let LinkParts { requests, replies, bytes_max, features } = parts;
        let sender = Sender::new(requests, replies.doorbells.clone(), options)?;
        Ok(Duplex { sender, receiver: Receiver::new(replies, options)?, bytes_max, features })
    }
}

/// A pending handshake: poll the future after the handshake's descriptor was readable. It returns `None` if no service
/// listens there.
pub type Connecting = Pin<Box<dyn Future<Output = Result<Option<Duplex>>> + Send>>;

/// Connects a client with the given `doorbells` to the service that listens under `name`.
pub async fn connect_duplex(name: &Name, options: &Settings, doorbells: &Doorbells, waiter: &Waiter) -> Result<Duplex> {
    let handshake = |handshake| new_client(handshake, options, doorbells);
    Duplex::new(reach(name, options, waiter, handshake).await?, options)
}

/// Starts to connect to the service at `path`. `doorbells` report `Event::Connecting` with `number` when the handshake
/// can continue. Returns `None` if no service listens there.
pub fn start_duplex(
    name: &Name,
    path: &Path,
    options: &Settings,
    doorbells: &Doorbells,
    number: u32,
) -> Result<Option<Connecting>> {
    let Some(socket) = name.connect_to(path)? else { return Ok(None) };
    let handshake = Handshake::new(socket, Pace::Polled(None), options, name.text())?;
    doorbells.watch_connecting(handshake.socket().as_fd(), number).map_err(Error::system("watching a connection"))?;
    let (options, doorbells) = (options.clone(), doorbells.clone());
    Ok(Some(Box::pin(async move { finish_duplex(handshake, &options, &doorbells).await.map(Some) })))
}

/// As [`start_duplex`], after a pause.
pub fn start_duplex_later(
    name: &Name,
    path: &Path,
    options: &Settings,
    doorbells: &Doorbells,
    number: u32,
) -> Result<Connecting> {
    let timer = Timer::after(RETRY).map_err(Error::system("making a timer"))?;
    doorbells.watch_connecting(timer.as_fd(), number).map_err(Error::system("watching a timer"))?;
    let (name, path, options, doorbells) = (name.clone(), path.to_owned(), options.clone(), doorbells.clone());
    Ok(Box::pin(async move {
        while !timer.has_passed() {
            again().await;
        }
        drop(timer);
        let Some(socket) = name.connect_to(&path)? else { return Ok(None) };
        let handshake = Handshake::new(socket, Pace::Polled(None), &options, name.text())?;
        doorbells
            .watch_connecting(handshake.socket().as_fd(), number)
            .map_err(Error::system("watching a connection"))?;
        finish_duplex(handshake, &options, &doorbells).await.map(Some)
    }))
}

async fn finish_duplex(handshake: Handshake, options: &Settings, doorbells: &Doorbells) -> Result<Duplex> {
    let duplex = Duplex::new(new_client(handshake, options, doorbells).await?, options)?;
    if let [Some(socket), _] = duplex.receiver.liveness() {
        doorbells.finish_connecting(socket, 0)?;
    }
    Ok(duplex)
}

/// How long to wait for a listener.
#[derive(Clone, Copy)]
enum Until {
    /// Not at all: try once.
    Now,
    /// Until a process listens, or the deadline.
    Then(Option<Instant>),
}

impl Until {
    fn of(options: &Settings) -> Until {
        options.connect_deadline.from_now().map_or(Until::Now, |deadline| Until::Then(Some(deadline)))
    }
}

/// Attempts to connect to the process that listens under a name.
struct Reach<'a> {
    name: &'a Name,
    options: &'a Settings,
    until: Until,
    waiter: &'a Waiter,
}

impl Reach<'_> {
    /// Begins a handshake with the process that listens. Also returns whether it is the last attempt.
    async fn begun(&mut self) -> Result<(Handshake, bool)> {
        let Reach { name, options, until, waiter } = *self;
        loop {
            let is_last = match until {
                Until::Now => true,
                Until::Then(deadline) => deadline.is_some_and(|deadline| Instant::now() >= deadline),
            };
            let Some(socket) = name.connect()? else {
                self.pause(is_last).await?;
                continue;
            };
            failpoint("connect: connected");
            let deadline = match until {
                Until::Now => Instant::now() + options.handshake,
                Until::Then(deadline) => deadline.unwrap_or_else(|| Instant::now() + HANDSHAKE_TIMEOUT),
            };
            match begin_handshake(socket, deadline, options, name.text(), waiter) {
                Ok(handshake) => return Ok((handshake, is_last)),
                Err(error) => self.failed(error, is_last).await?,
            }
        }
    }

    /// After a failed handshake: returns its error, or pauses before the next attempt.
    async fn failed(&mut self, error: Error, is_last: bool) -> Result<()> {
        match error {
            // The peer closed during the handshake, as a service does that begins to drain: another process may listen.
            // Also after the last attempt: a caller that waits in slices continues after a timeout alone. Without a
            // deadline, a slow peer is not an error either.
            Error::HungUp if matches!(self.until, Until::Then(_)) => self.pause(is_last).await,
            Error::TimedOut(_) if matches!(self.until, Until::Then(None)) => self.pause(is_last).await,
            error => Err(error),
        }
    }

    /// Waits until the next attempt.
    async fn pause(&self, is_last: bool) -> Result<()> {
        match self.until {
            Until::Now if is_last => Err(Error::NoListener { name: self.name.with_place() }),
            Until::Then(_) if is_last => {
                Err(Error::TimedOut(format!("waiting for somebody to listen at {}", self.name.with_place())))
            }
            _ => self.waiter.pause(Instant::now() + RETRY).await,
        }
    }
}

/// Connects to the process that listens under the name.
async fn reach<T, F: Future<Output = Result<T>>>(
    name: &Name,
    options: &Settings,
    waiter: &Waiter,
    mut handshake: impl FnMut(Handshake) -> F,
) -> Result<T> {
    let mut reach = Reach { name, options, until: Until::of(options), waiter };
    loop {
        let (begun, is_last) = reach.begun().await?;
        match handshake(begun).await {
            Err(error) => reach.failed(error, is_last).await?,
            done => return done,
        }
    }
}

fn begin_handshake(
    socket: Socket,
    deadline: Instant,
    options: &Settings,
    name: &str,
    waiter: &Waiter,
) -> Result<Handshake> {
    match waiter {
        Waiter::Thread => Handshake::new(socket, Pace::Until(deadline), options, name),
        Waiter::Loop(watch) => {
            let handshake = Handshake::new(socket, Pace::Polled(Some(deadline)), options, name)?;
            let watched = watch.add_socket(handshake.socket()).and_then(|()| watch.wake_at(Some(deadline)));
            watched.map_err(Error::system("watching a connection")).map(|()| handshake)
        }
    }
}

async fn connect_subscriber(name: Name, options: Settings, waiter: Waiter) -> Result<Subscriber> {
    options.checked_sizes()?;
    let doorbells = Doorbells::new()?;
    let parts = join(&name, &options, &doorbells, &waiter).await?;
    let mut subscriber = Subscriber::new(parts, doorbells, &options)?;
    subscriber.reconnect = Some((name, options));
    Ok(subscriber)
}

/// Joins the publisher that listens under the name.
async fn join(name: &Name, options: &Settings, doorbells: &Doorbells, waiter: &Waiter) -> Result<SubscriberParts> {
    reach(name, options, waiter, |handshake| new_subscriber(handshake, options, doorbells)).await
}

/// Creates both endpoints of a channel between threads.
fn threads(options: &Settings) -> Result<(Sender, Receiver)> {
    let can_barrier = membarrier::register();
    let (capacity, limit) = options.checked_sizes()?;
    let make = || -> std::io::Result<_> {
        let (data, receiver) = (make_data(capacity, 0, "")?, make_receiver_page(observe::Kind::Threads, "")?);
        let page = make_producer_page(capacity, limit, 1, &data, "")?;
        let consumer = make_consumer_page(Position::START, &data, &receiver, "")?;
        Ok((page, data, consumer, receiver))
    };
    let (page, data, consumer, receiver) =
        make().map_err(Error::system("making a channel of memfds, eventfds and epolls"))?;
    let (doorbells, receiver_doorbells, queue) = (Doorbells::new()?, Doorbells::new()?, Queue::default());
    let link = |peer: &Doorbells| Link::new(peer.doorbell().clone(), ThreadTransport(queue.clone()), this_process());
    let (to_receiver, to_sender) = (link(&receiver_doorbells), link(&doorbells));
    let [page, consumer, receiver, data] = [page, consumer, receiver, data].map(Arc::new);
    let memory = SenderMemory {
        page: page.clone(),
        data: data.clone(),
        consumer: consumer.clone(),
        receiver: receiver.clone(),
        is_moved: false,
    };
    let lane = memory.attach(Position::START, Position::START, 0, can_barrier)?;
    let sender = Sender::new(SenderParts { lane, link: to_receiver, memory }, doorbells, options)?;
    let memory = LaneMemory { page, data, consumer, receiver };
    let consumer = memory.attach(limit, can_barrier)?;
    let sleeper = receiver_sleeper(&memory.receiver, can_barrier);
    let parts =
        ReceiverParts { lane: Lane::new(consumer, to_sender, 0, 0, memory), sleeper, doorbells: receiver_doorbells };
    Ok((sender, Receiver::new(parts, options)?))
}
