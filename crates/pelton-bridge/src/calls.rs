//! What both sides of a call over NATS have: their headers, inboxes, and the local service.
//!
//! A call is a request of NATS, so any program can ask, and any service of NATS can reply. Between two bridges:
//!
//! | message | headers | body |
//! |---|---|---|
//! | request | `Pelton-Call`, `Pelton-Deadline`: milliseconds left | the request |
//! | reply | none | the reply: the end |
//! | | `Pelton-Reply: begun`, `working` | none; the first has the inbox for `cancel` and `ack N` |
//! | | `Pelton-Reply: part N` | part N, from 0 on |
//! | | `Pelton-Reply: end N` | none: the end, after N parts |
//! | | `Pelton-Reply: error` | the bytes of the failure that follows |
//! | | `Nats-Service-Error`, `Nats-Service-Error-Code` | none: the end, a failure |
//! | | ... and `Pelton-Reply: abandoned` | the service dropped the call |
//! | | ... and `Pelton-Reply: lost` | the service is gone |
//! | | ... and `Pelton-Reply: returned` | nobody has begun the call |
//!
//! At most `WINDOW` parts are in flight: the caller acknowledges them. A lost message leaves a gap, which ends the
//! call.

use async_nats::{Client, HeaderMap, Message, Subject};
use futures_util::StreamExt as _;
use pelton::tokio::AsyncClient;
use pelton_cli::failure::Failure;
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{sync::mpsc, time::Instant};

/// A bridge asks: it understands `REPLY`.
pub const CALL: &str = "Pelton-Call";
/// Milliseconds until the deadline, because two machines have two clocks.
pub const DEADLINE: &str = "Pelton-Deadline";
pub const REPLY: &str = "Pelton-Reply";
/// Parts in flight.
pub const WINDOW: u64 = 64;
/// Calls in flight: as many as a client of pelton has.
pub const CALLS_MAX: usize = 1024;
/// How often a call in progress gives a sign of life.
pub const SIGN_INTERVAL: Duration = Duration::from_secs(1);
/// A call without a sign of life for so long is lost: a network has no proof of a death.
pub const SILENCE_MAX: Duration = Duration::from_secs(5);
/// Bytes of the headers of a request or a reply, at most.
pub const HEADER_BYTES: usize = 512;
/// How long the calls in flight may take to end after a signal.
pub const DRAIN_TIME: Duration = Duration::from_secs(10);
/// A service that is not there is looked for after this time.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Inboxes below one subscription.
pub struct Inboxes {
    prefix: String,
    next: AtomicU64,
    open: Open,
}

type Open = Arc<Mutex<HashMap<u64, mpsc::Sender<Message>>>>;

/// An inbox; dropped, it takes nothing more.
pub struct Inbox {
    pub subject: String,
    /// Ends if more comes than was asked for.
    pub messages: mpsc::Receiver<Message>,
    number: u64,
    open: Open,
}

impl Inboxes {
    pub async fn new(client: &Client) -> Result<Inboxes, Failure> {
        let prefix = client.new_inbox();
        let mut all = client
            .subscribe(format!("{prefix}.*"))
            .await
            .map_err(|error| Failure::System(format!("subscribing to the inboxes: {error}")))?;
        let open = Open::default();
        let shared = open.clone();
        tokio::spawn(async move {
            while let Some(message) = all.next().await {
                let number = message.subject.rsplit('.').next().and_then(|text| text.parse::<u64>().ok());
                let Some(number) = number else { continue };
                let mut open = shared.lock().unwrap_or_else(PoisonError::into_inner);
                // Never waits: one call's messages do not delay another's.
                if open.get(&number).is_some_and(|inbox| inbox.try_send(message).is_err()) {
                    open.remove(&number);
                }
            }
        });
        Ok(Inboxes { prefix, next: AtomicU64::new(0), open })
    }

    pub fn open(&self) -> Inbox {
        // Relaxed: only the number matters.
        let number = self.next.fetch_add(1, Relaxed);
        // The parts in flight, and the few messages beside them.
        let (send, messages) = mpsc::channel(WINDOW as usize * 2);
        self.open.lock().unwrap_or_else(PoisonError::into_inner).insert(number, send);
        Inbox { subject: format!("{}.{number}", self.prefix), messages, number, open: self.open.clone() }
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.number);
    }
}

/// A local service: connected to when it is needed.
pub struct LocalService {
    name: String,
    state: tokio::sync::Mutex<Connection>,
}

#[derive(Default)]
struct Connection {
    client: Option<AsyncClient>,
    tried: Option<Instant>,
}

impl LocalService {
    pub fn new(name: &str) -> LocalService {
        LocalService { name: name.to_owned(), state: tokio::sync::Mutex::default() }
    }

    /// A client of it; `None` while nobody listens.
    pub async fn client(&self) -> Option<AsyncClient> {
        let mut state = self.state.lock().await;
        if state.client.is_none() && state.tried.is_none_or(|tried| tried.elapsed() >= RETRY_INTERVAL) {
            state.client = AsyncClient::connect(&self.name).await.ok();
            state.tried = Some(Instant::now());
        }
        state.client.clone()
    }

    /// It did not take a call: the next one connects again.
    pub async fn forget(&self) {
        self.state.lock().await.client = None;
    }
}

pub fn reply_header(text: &str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(REPLY, text);
    headers
}

/// The text of a header.
pub fn header<'a>(headers: Option<&'a HeaderMap>, name: &'static str) -> Option<&'a str> {
    headers?.get(name).map(|value| value.as_str())
}

/// Publishes; whether the server has it is not known, as for everything in a call.
pub async fn say(client: &Client, to: &Subject, text: String) {
    let _ = client.publish(to.clone(), text.into()).await;
}
