//! How endpoints come into being: options, `Opening`, `Listener`, and the functions of the addon.

use crate::broadcast::{Publisher, Subscriber};
use crate::client::Client;
use crate::endpoint::deadline;
use crate::error::{named, raise};
use crate::receiver::{Receiver, Receiving};
use crate::sender::{Sender, Sending};
use crate::watch::{Cancel, Step, Watch};
use napi::bindgen_prelude::*;
use napi_derive::napi;
use pelton::{ConnectDeadline, Deadline, Options, Policy, StartFrom, Wait};
use rustix::event::{PollFd, PollFlags, poll};
use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The options. `lib/check.js` has checked their types, and which of them a function takes.
#[napi(object)]
#[derive(Default)]
pub struct Given {
    pub timeout: Option<f64>,
    pub capacity: Option<f64>,
    pub message_bytes_max: Option<f64>,
    pub allow_uids: Option<Vec<u32>>,
    pub spin: Option<bool>,
    pub lanes: Option<u32>,
    pub mode: Option<u32>,
    pub call_bytes_max: Option<f64>,
    pub memory_bytes_max: Option<f64>,
    pub traced: Option<bool>,
    pub history: Option<f64>,
    pub hold_max: Option<f64>,
    pub policy: Option<String>,
    pub lag_after: Option<f64>,
    pub slack: Option<f64>,
    /// Messages before now; below 0: the oldest.
    pub start_from: Option<f64>,
    pub durable: Option<String>,
}

impl Given {
    pub fn options(&self) -> Options {
        let mut options = Options::new();
        if let Some(timeout) = self.timeout {
            options = match deadline(Some(timeout)) {
                Deadline::At(end) => options.connect_deadline(end),
                other => options.connect_deadline(ConnectDeadline::At(other)),
            };
        }
        let apply = |options: Options, value: Option<f64>, set: fn(Options, u64) -> Options| match value {
            Some(value) => set(options, value as u64),
            None => options,
        };
        options = apply(options, self.capacity, Options::capacity);
        options = apply(options, self.message_bytes_max, Options::message_bytes_max);
        options = apply(options, self.call_bytes_max, Options::call_bytes_max);
        options = apply(options, self.memory_bytes_max, Options::memory);
        options = apply(options, self.history, Options::history);
        options = apply(options, self.slack, Options::slack);
        let duration = |ms: f64| Duration::try_from_secs_f64(ms / 1e3).unwrap_or(Duration::MAX);
        if let Some(ms) = self.hold_max {
            options = options.hold_max(duration(ms));
        }
        if let Some(ms) = self.lag_after {
            options = options.lag_after(duration(ms));
        }
        options = match self.policy.as_deref() {
            Some("lag") => options.policy(Policy::Lag),
            Some("latest") => options.policy(Policy::Latest),
            _ => options,
        };
        options = match self.start_from {
            Some(messages) if messages < 0.0 => options.start_from(StartFrom::Oldest),
            Some(messages) if messages > 0.0 => options.start_from(StartFrom::Last(messages as u64)),
            _ => options,
        };
        if let Some(durable) = &self.durable {
            options = options.durable(durable);
        }
        if let Some(uids) = &self.allow_uids {
            options = options.allow_uids(uids);
        }
        if self.spin == Some(true) {
            options = options.wait(Wait::Spin);
        }
        if self.traced == Some(true) {
            options = options.traced(true);
        }
        if let Some(lanes) = self.lanes {
            options = options.lanes(lanes);
        }
        if let Some(mode) = self.mode {
            options = options.mode(mode);
        }
        options
    }
}

/// An endpoint that is being opened.
#[napi]
pub struct Opening {
    // Before what has the descriptor.
    watch: Option<Watch>,
    started: Option<Started>,
}

enum Started {
    Sender(pelton::Opening<pelton::Sender>),
    Receiver(pelton::Opening<pelton::Receiver>),
    Client(pelton::Opening<pelton::Client>),
    Publisher(pelton::Opening<pelton::Publisher>),
    Subscriber(pelton::Opening<pelton::Subscriber>),
}

#[napi]
impl Opening {
    /// Has the loop watch the descriptor: see `Endpoint::watch`.
    #[napi]
    pub fn watch(&mut self, env: Env, callback: Function<'_, (), ()>) -> Result<()> {
        let fd = match &self.started {
            Some(Started::Sender(opening)) => opening.as_raw_fd(),
            Some(Started::Receiver(opening)) => opening.as_raw_fd(),
            Some(Started::Client(opening)) => opening.as_raw_fd(),
            Some(Started::Publisher(opening)) => opening.as_raw_fd(),
            Some(Started::Subscriber(opening)) => opening.as_raw_fd(),
            None => return Err(named("closed_handle", "this opening has ended")),
        };
        self.watch = Some(Watch::new(&env, fd, callback.raw())?);
        Ok(())
    }

    /// Continues, and returns the endpoint once it is open. Null before; then the callback is called.
    #[napi]
    pub fn try_finish(&mut self) -> Result<Option<Either5<Sender, Receiver, Client, Publisher, Subscriber>>> {
        let finished = match &mut self.started {
            Some(Started::Sender(opening)) => {
                opening.try_finish().map(|it| it.map(|it| Either5::A(Sender::new(it, None))))
            }
            Some(Started::Receiver(opening)) => {
                opening.try_finish().map(|it| it.map(|it| Either5::B(Receiver::new(it, None))))
            }
            Some(Started::Client(opening)) => opening.try_finish().map(|it| it.map(|it| Either5::C(Client::new(it)))),
            Some(Started::Publisher(opening)) => {
                opening.try_finish().map(|it| it.map(|it| Either5::D(Publisher::new(it))))
            }
            Some(Started::Subscriber(opening)) => {
                opening.try_finish().map(|it| it.map(|it| Either5::E(Subscriber::new(it))))
            }
            None => return Err(named("closed_handle", "this opening has ended")),
        };
        match (&finished, &self.watch) {
            (Ok(None), Some(watch)) => watch.start(),
            (Ok(None), None) => {}
            _ => self.close(),
        }
        finished.map_err(raise)
    }

    /// Cancels it.
    #[napi]
    pub fn close(&mut self) {
        self.watch = None;
        self.started = None;
    }
}

fn opening(started: pelton::Result<Started>) -> Result<Opening> {
    Ok(Opening { watch: None, started: Some(started.map_err(raise)?) })
}

/// Begins to connect a sender.
#[napi]
pub fn connect_sender(name: String, given: Given) -> Result<Opening> {
    opening(given.options().cast().start_connect_sender(&name).map(Started::Sender))
}

/// Begins to connect a receiver.
#[napi]
pub fn connect_receiver(name: String, given: Given) -> Result<Opening> {
    opening(given.options().cast().start_connect_receiver(&name).map(Started::Receiver))
}

/// Begins to connect a client.
#[napi]
pub fn connect_client(name: String, given: Given) -> Result<Opening> {
    opening(pelton::Client::start_connect(&name, &given.options().cast()).map(Started::Client))
}

/// Begins to subscribe.
#[napi]
pub fn connect_subscriber(name: String, given: Given) -> Result<Opening> {
    opening(given.options().cast().start_connect_subscriber(&name).map(Started::Subscriber))
}

/// Begins to publish in a directory.
#[napi]
pub fn open_publisher(directory: String, given: Given) -> Result<Opening> {
    opening(given.options().cast().start_create_publisher(directory).map(Started::Publisher))
}

/// Begins to subscribe in a directory.
#[napi]
pub fn open_subscriber(directory: String, given: Given) -> Result<Opening> {
    opening(given.options().cast().start_open_subscriber(directory).map(Started::Subscriber))
}

/// Removes a durable subscription; false if there is none.
#[napi]
pub fn remove_subscription(directory: String, durable: String) -> Result<bool> {
    pelton::inspect::remove_durable(directory, &durable).map_err(raise)
}

/// Begins to open the sender of a path channel.
#[napi]
pub fn open_sender(directory: String, creates: bool, given: Given) -> Result<Opening> {
    let started = match creates {
        true => given.options().cast().start_create_sender(directory),
        false => given.options().cast().start_open_sender(directory),
    };
    opening(started.map(Started::Sender))
}

/// Begins to open the receiver of a path channel.
#[napi]
pub fn open_receiver(directory: String, creates: bool, given: Given) -> Result<Opening> {
    let started = match creates {
        true => given.options().cast().start_create_receiver(directory),
        false => given.options().cast().start_open_receiver(directory),
    };
    opening(started.map(Started::Receiver))
}

/// Listens under a name for any number of senders.
#[napi]
pub fn gather(name: String, given: Given) -> Result<Receiver> {
    Ok(Receiver::new(given.options().cast().gather_at(&name).map_err(raise)?, None))
}

/// Listens under a name.
#[napi]
pub fn listen(name: String, given: Given) -> Result<Listener> {
    let listener = given.options().cast().listen(&name).map_err(raise)?;
    Ok(Listener { watch: None, step: None, listener: Some(listener) })
}

/// A channel between two threads of this process.
#[napi]
pub fn threads(given: Given) -> Result<(Sender, Receiver)> {
    let (sender, receiver) = given.options().cast().threads().map_err(raise)?;
    Ok((Sender::new(sender, None), Receiver::new(receiver, None)))
}

/// An endpoint on its way to another thread.
pub enum Token {
    Sender(Box<Sending>),
    Receiver(Box<Receiving>),
}

/// The endpoints on their way, by number.
#[derive(Default)]
pub struct Tokens {
    last: u64,
    kept: Option<HashMap<u64, Token>>,
}

pub fn tokens() -> MutexGuard<'static, Tokens> {
    static TOKENS: Mutex<Tokens> = Mutex::new(Tokens { last: 0, kept: None });
    TOKENS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Tokens {
    pub fn keep(&mut self, token: Token) -> f64 {
        self.last += 1;
        self.kept.get_or_insert_default().insert(self.last, token);
        self.last as f64
    }

    fn take(&mut self, number: f64) -> Result<Token> {
        let token = self.kept.as_mut().and_then(|kept| kept.remove(&(number as u64)));
        let text = "no endpoint of this process waits under this token: it was attached already, or is another's";
        token.ok_or_else(|| named("closed_handle", text))
    }
}

/// Takes over the endpoint that another thread has detached.
#[napi]
pub fn attach(number: f64) -> Result<Either<Sender, Receiver>> {
    Ok(match tokens().take(number)? {
        Token::Sender(it) => Either::A(Sender::new(it.sender, it.listener)),
        Token::Receiver(it) => Either::B(Receiver::new(it.receiver, it.listener)),
    })
}

/// How long an attempt to accept may take once a peer has connected: its handshake, and its first packet.
const ATTEMPT: Duration = Duration::from_secs(1);

/// Waits until the listener has a peer, and accepts it by `accept`. Not in slices: one would end a handshake that has
/// begun.
pub fn accepting(
    listener: &pelton::Listener,
    deadline: Deadline,
    cancel: &Cancel<'_>,
    mut accept: impl FnMut(Deadline) -> pelton::Result<bool>,
) -> pelton::Result<bool> {
    // At first without waiting: it is refused while the peer is alive.
    if accept(Deadline::Now)? {
        return Ok(true);
    }
    cancel.wait(deadline, |until| {
        let left = until.saturating_duration_since(Instant::now());
        let timeout = rustix::time::Timespec { tv_sec: left.as_secs() as _, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(&listener.as_fd(), PollFlags::IN)], Some(&timeout)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(false),
            Ok(_) => {}
            Err(errno) => {
                return Err(pelton::Error::System { what: "waiting for a peer".to_owned(), error: errno.into() });
            }
        }
        let attempt = Instant::now() + ATTEMPT;
        accept(Deadline::At(match deadline {
            Deadline::At(end) => end.min(attempt),
            _ => attempt,
        }))
    })
}

/// What a listener accepts.
enum Accepted {
    Sender(Box<pelton::Sender>),
    Receiver(Box<pelton::Receiver>),
}

/// Accepts peers under a name, one after another.
#[napi]
pub struct Listener {
    // Before the listener, whose descriptor it watches.
    watch: Option<Watch>,
    step: Option<Step<pelton::Result<Option<Accepted>>>>,
    listener: Option<pelton::Listener>,
}

impl Listener {
    fn open(&self) -> Result<&pelton::Listener> {
        self.listener.as_ref().ok_or_else(|| named("closed_handle", "this listener is closed: open another one"))
    }
}

#[napi]
impl Listener {
    /// Has the loop watch the descriptor: see `Endpoint::watch`.
    #[napi]
    pub fn watch(&mut self, env: Env, callback: Function<'_, (), ()>) -> Result<()> {
        self.watch = Some(Watch::new(&env, self.open()?.as_fd().as_raw_fd(), callback.raw())?);
        Ok(())
    }

    /// Waits for a peer.
    #[napi]
    pub fn wait(&self) -> Result<()> {
        self.open()?;
        if let Some(watch) = &self.watch {
            watch.start();
        }
        Ok(())
    }

    /// Ends the wait.
    #[napi]
    pub fn stop(&self) {
        if let Some(watch) = &self.watch {
            watch.stop();
        }
    }

    /// See `Watch::set_ref`.
    #[napi]
    pub fn set_ref(&self, is_ref: bool) {
        if let Some(watch) = &self.watch {
            watch.set_ref(is_ref);
        }
        if let Some(step) = &self.step {
            step.set_ref(is_ref);
        }
    }

    /// Begins to accept a peer that has connected, of which the handshake takes a second at most: a step.
    #[napi]
    pub fn start_accept(&mut self, env: Env, accepts_sender: bool, callback: Function<'_, (), ()>) -> Result<()> {
        let is_ref = self.watch.as_ref().is_none_or(Watch::is_ref);
        let mut listener = Some(self.open()?.clone());
        self.step = Some(Step::start(&env, callback.raw(), is_ref, &mut listener, move |listener, _| {
            Ok(match accepts_sender {
                true => listener.accept_sender_until(ATTEMPT)?.map(|it| Accepted::Sender(Box::new(it))),
                false => listener.accept_receiver_until(ATTEMPT)?.map(|it| Accepted::Receiver(Box::new(it))),
            })
        })?);
        Ok(())
    }

    /// The endpoint; null if the peer was none of pelton, or none of the wanted role.
    #[napi]
    pub fn finish_accept(&mut self) -> Result<Option<Either<Sender, Receiver>>> {
        let listener = self.open()?.clone();
        let Some(accepted) = self.step.take().and_then(|step| step.take()) else { return Ok(None) };
        Ok(accepted.map_err(raise)?.map(|accepted| match accepted {
            Accepted::Sender(sender) => Either::A(Sender::new(*sender, Some(listener))),
            Accepted::Receiver(receiver) => Either::B(Receiver::new(*receiver, Some(listener))),
        }))
    }

    /// Stops listening, once the accepted endpoints are closed too.
    #[napi]
    pub fn close(&mut self) {
        self.watch = None;
        self.listener = None;
        self.step = None;
    }

    /// Whether it is closed.
    #[napi(getter)]
    pub fn closed(&self) -> bool {
        self.listener.is_none()
    }
}

/// What is known about an endpoint.
#[napi(object)]
pub struct Info {
    pub capacity: f64,
    pub message_bytes_max: f64,
    pub unreleased: Option<f64>,
    pub peer_pid: Option<u32>,
    pub peer_uid: Option<u32>,
    pub messages: f64,
    pub bytes: f64,
    pub waits: f64,
    pub sleeps: f64,
    pub wakes_sent: f64,
}

impl Info {
    pub fn new(capacity: u64, message_bytes_max: u64, peer: Option<pelton::Peer>, counters: pelton::Counters) -> Info {
        let pelton::Counters { messages, bytes, waits, sleeps, wakes_sent, .. } = counters;
        Info {
            capacity: capacity as f64,
            message_bytes_max: message_bytes_max as f64,
            unreleased: None,
            peer_pid: peer.map(|peer| peer.pid),
            peer_uid: peer.map(|peer| peer.uid),
            messages: messages as f64,
            bytes: bytes as f64,
            waits: waits as f64,
            sleeps: sleeps as f64,
            wakes_sent: wakes_sent as f64,
        }
    }
}
