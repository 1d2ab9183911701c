//! What both sides of a call over NATS have: their headers, inboxes, and the local service.
//!
//! A call is a request of NATS, so any program can ask, and any service of NATS can reply. Between two bridges:
//!
//! | message | headers | body |
//! |---|---|---|
//! | request | `Pelton-Call`, `Pelton-Deadline`: milliseconds left, `traceparent` | the request |
//! | reply | none | the reply: the end |
//! | | `Pelton-Reply: begun`, `working` | none; both have the inbox for `cancel` and `ack N` as their reply subject |
//! | | `Pelton-Reply: part N` | part N, from 0 on |
//! | | `Pelton-Reply: end N` | none: the end, after N parts |
//! | | `Pelton-Reply: error` | the bytes of the failure that follows |
//! | | `Nats-Service-Error`, `Nats-Service-Error-Code` | none: the end, a failure |
//! | | ... and `Pelton-Reply: abandoned` | the service dropped the call |
//! | | ... and `Pelton-Reply: lost` | the service is gone |
//! | | ... and `Pelton-Reply: returned` | nobody has begun the call |
//!
//! At most `WINDOW` parts are in flight: the caller acknowledges them. A lost message leaves a gap, which ends the
//! call. A caller that waits no more replies to `begun` and `working` by `cancel`; for one that is gone the server
//! does so, with status 503.

use crate::nats::is_subject_of;
use async_nats::{Client, HeaderMap, Message, Subject, connection::State};
use futures_util::{FutureExt as _, StreamExt as _};
use pelton::{
    Deadline, Error, Traceparent,
    tokio::{AsyncCall, AsyncClient},
};
use pelton_cli::failure::Failure;
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
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
/// Space of an inbox for the parts in flight, and the few messages beside them. As much again is for signs.
const INBOX_PARTS: usize = WINDOW as usize + 8;
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
/// The pause between two attempts to connect to a service that is away.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Inboxes below one subscription.
pub struct Inboxes {
    prefix: String,
    /// Of the calls.
    service: String,
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
    /// Inboxes for calls of the service with this subject.
    pub async fn new(client: &Client, service: &str) -> Result<Inboxes, Failure> {
        let prefix = client.new_inbox();
        let mut all = client
            .subscribe(format!("{prefix}.*"))
            .await
            .map_err(|error| Failure::System(format!("subscribing to the inboxes: {error}")))?;
        let open = Open::default();
        let (shared, client, service) = (open.clone(), client.clone(), service.to_owned());
        let inboxes = Inboxes { prefix, service: service.clone(), next: AtomicU64::new(0), open };
        tokio::spawn(async move {
            // Never waits: one call's messages do not delay another's.
            while let Some(message) = all.next().await {
                let number = message.subject.rsplit('.').next().and_then(|text| text.parse::<u64>().ok());
                let Some(number) = number else { continue };
                let word = header(message.headers.as_ref(), REPLY);
                let mut open = shared.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(inbox) = open.get(&number) {
                    // The space that is left belongs to parts; signs come again.
                    let is_surplus = word == Some("working") && inbox.capacity() < INBOX_PARTS;
                    if !is_surplus && inbox.try_send(message).is_err() {
                        open.remove(&number);
                    }
                } else if matches!(word, Some("begun" | "working"))
                    && let Some(control) = &message.reply
                    && may_reply(control, &service)
                {
                    // If there is no space now, the next sign brings it again.
                    let _ = say(&client, control, "cancel".to_owned()).now_or_never();
                }
            }
        });
        Ok(inboxes)
    }

    /// Whether a peer may name `subject` as the place of a reply.
    pub fn may_reply(&self, subject: &str) -> bool {
        may_reply(subject, &self.service)
    }

    pub fn open(&self) -> Inbox {
        // Relaxed: only the number matters.
        let number = self.next.fetch_add(1, Relaxed);
        let (send, messages) = mpsc::channel(INBOX_PARTS * 2);
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
    state: Mutex<Connection>,
}

#[derive(Default)]
struct Connection {
    /// The client, if there is one, is of this connection.
    number: u64,
    client: Option<AsyncClient>,
    tried: Option<Instant>,
}

impl LocalService {
    pub fn new(name: &str) -> LocalService {
        LocalService { name: name.to_owned(), state: Mutex::default() }
    }

    /// A client of it, and the number of its connection; `None` while nobody listens, or another task connects.
    pub async fn client(&self) -> Option<(AsyncClient, u64)> {
        {
            let mut state = self.state();
            if let Some(client) = &state.client {
                return Some((client.clone(), state.number));
            }
            if state.tried.is_some_and(|tried| tried.elapsed() < RETRY_INTERVAL) {
                return None;
            }
            state.tried = Some(Instant::now());
        }
        let client = AsyncClient::connect(&self.name).await.ok()?;
        let mut state = self.state();
        if state.client.is_none() {
            state.number += 1;
        }
        let number = state.number;
        Some((state.client.get_or_insert(client).clone(), number))
    }

    /// This connection did not take a call: the next one connects again, unless one has done so.
    pub fn forget(&self, number: u64) {
        let mut state = self.state();
        if state.number == number {
            state.client = None;
        }
    }

    fn state(&self) -> MutexGuard<'_, Connection> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Submits a request, with its traceparent if it has one.
pub async fn submit(
    client: &AsyncClient,
    request: &[u8],
    traceparent: Option<Traceparent>,
    deadline: Option<std::time::Instant>,
) -> pelton::Result<AsyncCall> {
    match (traceparent, deadline) {
        (Some(traceparent), deadline) => {
            client.submit_traced(request, traceparent, deadline.map_or(Deadline::Never, Deadline::At)).await
        }
        (None, Some(deadline)) => client.submit_by(request, deadline).await,
        (None, None) => client.submit(request).await,
    }
}

/// Whether no service has begun the call that failed so. Any other end may have come in the middle of it.
pub fn is_not_begun(error: &Error) -> bool {
    // Of a draining service; by a short name, of one that ended, without another one.
    matches!(error, Error::Refused(_) | Error::NoListener { .. })
}

/// Whether a message may go where a peer wants it: not into the server, and not to the service itself, which would
/// take it for a call.
fn may_reply(subject: &str, service: &str) -> bool {
    !subject.starts_with('$') && !is_subject_of(subject, service)
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

/// Publishes; whether the server has it is not known, as for everything in a call. Without a connection it is too late:
/// then this does nothing, instead of waiting.
pub async fn say(client: &Client, to: &Subject, text: String) {
    if client.connection_state() == State::Connected {
        let _ = client.publish(to.clone(), text.into()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_goes_neither_into_the_server_nor_to_the_service_itself() {
        assert!(may_reply("_INBOX.x.1", "svc.a") && may_reply("svc.b", "svc.a") && may_reply("svc", "svc.>"));
        assert!(may_reply("svc.a.b", "svc.*") && may_reply("svc.a.b", "svc.a") && may_reply("svc", "svc.a"));
        for (subject, service) in [
            ("$JS.API.STREAM.DELETE.S", "svc.a"),
            ("$SRV.PING", "svc.a"),
            ("svc.a", "svc.a"),
            ("svc.a", "svc.*"),
            ("svc.a.b", "svc.>"),
        ] {
            assert!(!may_reply(subject, service), "{subject} {service}");
        }
    }
}
