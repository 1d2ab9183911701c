//! Connecting: who listens and who connects, how a survivor finds the successor of its peer, and the ends of a channel
//! between threads. What the two sides then say to each other is in `handshake.rs`.

use crate::error::{Error, Result};
use crate::handshake::{
    Shake, make_consumer_pages, make_data, make_producer_page, new_receiver, new_sender, surviving_receiver,
    surviving_sender,
};
use crate::link::{Bells, Link};
use crate::name::{Bound, Name};
use crate::options::Options;
use crate::os::membarrier;
use crate::os::socket::{accept_at, wait_for};
use crate::path::Place;
use crate::receiver::{Lane, LaneMemory, Receiver, ReceiverParts, receiver_sleeper};
use crate::sender::{Sender, SenderMemory, SenderParts};
use pelton_lane::{Position, step};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the whole hand-shake may take, unless the caller gave a later deadline.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a peer that has connected may take to say the first word.
const GREETING: Duration = Duration::from_millis(500);
/// Between two looks whether somebody listens by now.
const RETRY: Duration = Duration::from_millis(10);

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
        options.checked_sizes()?;
        let bound = Name::parse(name)?.listen()?;
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
        let parts = self.accept(deadline, |shake| new_sender(shake, options, true))?;
        parts.map(|parts| Sender::new(parts, options, Origin::Accepted(self.clone()))).transpose()
    }

    fn receiver(&self, deadline: Option<Instant>) -> Result<Option<Receiver>> {
        let options = &self.inner.options;
        let parts = self.accept(deadline, |shake| new_receiver(shake, true))?;
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
            let accepted = accept_at(bound.socket()).map_err(Error::system("accepting a connection"))?;
            let now = Instant::now();
            if deadline.is_some_and(|deadline| now >= deadline) {
                return Ok(None);
            }
            let Some(socket) = accepted else { continue };
            step("connect: accepted");
            // Who connects greets at once; who does not is not to keep others waiting.
            let greeted = wait_for(socket.as_fd(), None, false, Some(now + GREETING));
            if !greeted.map_err(Error::system("waiting for a greeting"))? {
                continue;
            }
            let patience = deadline.map_or(now + PATIENCE, |deadline| deadline.min(now + PATIENCE));
            let shaken = Shake::new(socket, patience, &self.inner.options).and_then(&mut shake);
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
        self.resume(deadline, |shake, listens| surviving_sender(shake, parts, listens))
    }

    pub(crate) fn resume_receiver(&self, lane: &mut Lane, bells: &Bells, deadline: Option<Instant>) -> Result<bool> {
        // What the dead sender sent along is still in its socket.
        lane.link.take_in()?;
        // If the lane itself is broken, no successor is to blame.
        lane.consumer.end_of_committed()?;
        self.resume(deadline, |shake, listens| surviving_receiver(shake, lane, bells, listens))
    }
}

pub(crate) fn connect_sender(name: &str, options: &Options) -> Result<Sender> {
    options.checked_sizes()?;
    let name = Name::parse(name)?;
    let parts = reach(&name, options, Reach::of(options), |shake| new_sender(shake, options, false))?;
    Sender::new(parts, options, Origin::Connected(Box::new((name, options.clone()))))
}

pub(crate) fn connect_receiver(name: &str, options: &Options) -> Result<Receiver> {
    let name = Name::parse(name)?;
    let parts = reach(&name, options, Reach::of(options), |shake| new_receiver(shake, false))?;
    Receiver::new(parts, options, Origin::Connected(Box::new((name, options.clone()))))
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
            match Shake::new(socket, patience, options).and_then(&mut shake) {
                // It went while we greeted it: another may come. Without a deadline, slowness does not matter either.
                Err(Error::HungUp) if !last => {}
                Err(Error::TimedOut(_)) if matches!(reach, Reach::Until(None)) => {}
                done => return done,
            }
        }
        if last {
            return Err(match reach {
                Reach::Now => Error::NoListener { name: name.text().to_owned() },
                Reach::Until(_) => Error::TimedOut(format!("waiting for somebody to listen at {}", name.text())),
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
        let (consumer, receiver) = make_consumer_pages(Position::START)?;
        Ok((
            make_producer_page(capacity, limit, 1)?,
            make_data(capacity)?,
            consumer,
            receiver,
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
