//! `pelton-bridge serve`: a local service as a service of NATS.
//!
//! It is in the queue group only while the local service is there, so callers elsewhere learn at once that nobody
//! replies. A call that the local service did not begin is returned, and the caller's bridge asks another one.

use crate::{
    calls::{
        CALL, CALLS_MAX, DEADLINE, DRAIN_TIME, HEADER_BYTES, Inbox, Inboxes, LocalService, SIGN_INTERVAL, WINDOW,
        header, reply_header,
    },
    nats::ServerArgs,
    report,
    stop::Stop,
};
use async_nats::{
    Client, HeaderMap, Subject,
    service::{Request, ServiceExt as _, error::Error as ServiceError},
};
use bytes::Bytes;
use clap::Args;
use futures_util::StreamExt as _;
use pelton::{Error, Outcome, tokio::AsyncCall, tokio::OwnedCompletion};
use pelton_cli::failure::{Failure, printable};
use std::{sync::Arc, time::Duration};
use tokio::{
    sync::Notify,
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval},
};

/// A caller that acknowledges no part for so long is gone.
const ACK_WAIT: Duration = Duration::from_secs(30);
/// How long a server that does not answer is waited for.
const FLUSH_TIME: Duration = Duration::from_secs(2);
/// The longest text of a failure in a header.
const TEXT_CHARS_MAX: usize = 200;

/// Options of `pelton-bridge serve`.
#[derive(Args)]
pub struct ServeArgs {
    /// The local service
    service: String,
    /// The subject of its calls
    #[arg(long, value_name = "SUBJECT")]
    subject: String,
    /// Its name for `nats service` [default: the subject, with - for each .]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// The queue group: each call goes to one of its members
    #[arg(long, value_name = "NAME", default_value = "q")]
    queue_group: String,
    #[command(flatten)]
    servers: ServerArgs,
}

struct Shared {
    client: Client,
    inboxes: Inboxes,
    local: LocalService,
    /// The local service did not take a call.
    is_gone: Notify,
}

/// Runs `pelton-bridge serve`.
pub async fn run(args: &ServeArgs, stop: &Stop) -> Result<(), Failure> {
    let (client, _) = args.servers.connect(stop).await?;
    let refused = |error: async_nats::Error| Failure::Refused(format!("the service of NATS: {error}"));
    let shared = Arc::new(Shared {
        inboxes: Inboxes::new(&client).await?,
        local: LocalService::new(&args.service),
        client: client.clone(),
        is_gone: Notify::new(),
    });
    let name = args.name.clone().unwrap_or_else(|| args.subject.replace('.', "-"));
    let service = client
        .service_builder()
        .description(format!("{} of pelton", args.service))
        .queue_group(&args.queue_group)
        .start(name, env!("CARGO_PKG_VERSION"))
        .await
        .map_err(refused)?;
    let mut calls = JoinSet::new();
    let failure = loop {
        if shared.local.client().await.is_none() {
            report(format_args!("serve: waiting for the service {}", args.service));
            while shared.local.client().await.is_none() {
                stop.pause(Duration::from_millis(20)).await?;
            }
        }
        let mut endpoint = service.endpoint(&args.subject).await.map_err(refused)?;
        // The server has the subscription: a call after the report arrives.
        flush(&client).await;
        report(format_args!("serve: {} as {}", args.service, args.subject));
        let failure = loop {
            tokio::select! {
                request = endpoint.next() => match request {
                    Some(request) if calls.len() < 2 * CALLS_MAX => {
                        let shared = shared.clone();
                        calls.spawn(async move { Call::new(&shared, request).run().await });
                    }
                    Some(request) => Call::new(&shared, request).give_back("has too many calls").await,
                    None => break None,
                },
                Some(_) = calls.join_next(), if !calls.is_empty() => {}
                () = shared.is_gone.notified() => break None,
                failure = stop.requested() => break Some(failure),
            }
        };
        // A request that comes just now gets no reply: its caller's deadline ends it.
        let _ = endpoint.stop().await;
        if let Some(failure) = failure {
            break failure;
        }
        shared.local.forget().await;
    };
    flush(&client).await;
    report(format_args!("serve: takes no more calls; {} are in flight", calls.len()));
    let _ = tokio::time::timeout(DRAIN_TIME, async { while calls.join_next().await.is_some() {} }).await;
    let _ = service.stop().await;
    flush(&client).await;
    Err(failure)
}

/// Waits until the server has everything that was said, if it answers in time.
async fn flush(client: &Client) {
    let _ = tokio::time::timeout(FLUSH_TIME, client.flush()).await;
}

/// One call.
struct Call<'a> {
    shared: &'a Shared,
    request: Request,
    /// Of a bridge; it reads `Pelton-Reply`.
    is_bridged: bool,
    deadline: Option<Instant>,
    parts: u64,
}

impl Call<'_> {
    fn new(shared: &Shared, request: Request) -> Call<'_> {
        let headers = request.message.headers.as_ref();
        let left = header(headers, DEADLINE).and_then(|text| text.parse().ok()).map(Duration::from_millis);
        Call {
            is_bridged: header(headers, CALL).is_some(),
            deadline: left.and_then(|left| Instant::now().checked_add(left)),
            parts: 0,
            shared,
            request,
        }
    }

    async fn run(mut self) {
        let Some(reply) = self.request.message.reply.clone() else { return self.notify().await };
        let mut control = None;
        if self.is_bridged {
            let inbox = self.shared.inboxes.open();
            let sent = self.shared.client.publish_with_reply_and_headers(
                reply.clone(),
                inbox.subject.clone(),
                reply_header("begun"),
                Bytes::new(),
            );
            let _ = sent.await;
            control = Some(inbox);
        }
        let Some(local) = self.shared.local.client().await else {
            return self.give_back("has lost its service").await;
        };
        let submitted = async {
            match self.deadline {
                Some(deadline) => local.submit_by(&self.request.message.payload, deadline.into_std()).await,
                None => local.submit(&self.request.message.payload).await,
            }
        };
        // Waits for space, in the service or in the table of calls.
        let submitted = tokio::select! {
            submitted = submitted => submitted,
            () = until(self.deadline) => return self.fail(504, "the deadline has passed").await,
        };
        match submitted {
            Ok(call) => self.relay(call, &reply, control).await,
            Err(Error::TooLarge { .. }) => self.fail(413, "the request is too large for the service").await,
            Err(_) => {
                self.shared.is_gone.notify_one();
                self.give_back("has lost its service").await;
            }
        }
    }

    /// A message without a reply subject wants no reply.
    async fn notify(&self) {
        if let Some(local) = self.shared.local.client().await
            && local.notify(&self.request.message.payload).await.is_err()
        {
            self.shared.is_gone.notify_one();
        }
    }

    async fn relay(&mut self, mut call: AsyncCall, reply: &Subject, mut control: Option<Inbox>) {
        let (mut acknowledged, mut last_sign) = (0, Instant::now());
        let mut signs = interval(SIGN_INTERVAL);
        signs.set_missed_tick_behavior(MissedTickBehavior::Delay);
        signs.reset();
        loop {
            let is_open = control.is_none() || self.parts - acknowledged < WINDOW;
            let said = async {
                match &mut control {
                    Some(inbox) => inbox.messages.recv().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                said = said => match said.as_ref().map(|message| &message.payload[..]) {
                    // Dropped, the call is cancelled.
                    None | Some(b"cancel") => return,
                    Some(text) => {
                        let text = std::str::from_utf8(text).ok();
                        let number = text.and_then(|text| text.strip_prefix("ack ")?.parse().ok());
                        acknowledged = number.filter(|number| *number <= self.parts).unwrap_or(acknowledged);
                        last_sign = Instant::now();
                    }
                },
                completion = call.next(), if is_open => {
                    if self.take(completion, reply).await {
                        return;
                    }
                }
                _ = signs.tick() => {
                    if !is_open && last_sign.elapsed() > ACK_WAIT {
                        return;
                    }
                    if control.is_some() {
                        self.send(reply, "working", Bytes::new()).await;
                    }
                }
                () = until(self.deadline) => return self.fail(504, "the deadline has passed").await,
            }
        }
    }

    /// Sends a completion. Returns whether it was the last one.
    async fn take(&mut self, completion: pelton::Result<Option<OwnedCompletion>>, reply: &Subject) -> bool {
        let OwnedCompletion { outcome, bytes } = match completion {
            Ok(Some(completion)) => completion,
            Ok(None) => return true,
            Err(error) => {
                // A draining service has not begun it; any other end may have come in the middle.
                match error {
                    Error::Refused(_) => self.give_back("has lost its service").await,
                    error => self.end_with(502, &error.to_string(), Some("lost")).await,
                }
                self.shared.is_gone.notify_one();
                return true;
            }
        };
        let limit = self.shared.client.server_info().max_payload.saturating_sub(HEADER_BYTES);
        if bytes.len() > limit {
            let text = format!("the reply has {} bytes, and the server takes at most {limit}", bytes.len());
            self.fail(413, &text).await;
            return true;
        }
        match outcome {
            Outcome::Part => {
                self.send(reply, &format!("part {}", self.parts), bytes.into()).await;
                self.parts += 1;
                return false;
            }
            Outcome::Reply => self.respond(Ok(bytes.into()), HeaderMap::new()).await,
            Outcome::End => self.respond(Ok(Bytes::new()), reply_header(&format!("end {}", self.parts))).await,
            Outcome::Failed(code) => {
                let text = String::from_utf8_lossy(&bytes).into_owned();
                if self.is_bridged && !bytes.is_empty() {
                    self.send(reply, "error", bytes.into()).await;
                }
                self.end_with(code as usize, &text, None).await;
            }
            // `next` returns the second as an error.
            Outcome::Abandoned | Outcome::Lost(_) => {
                self.end_with(500, "the service dropped the call without a reply", Some("abandoned")).await;
            }
        }
        true
    }

    async fn send(&self, reply: &Subject, what: &str, body: Bytes) {
        let _ = self.shared.client.publish_with_headers(reply.clone(), reply_header(what), body).await;
    }

    async fn respond(&self, response: Result<Bytes, ServiceError>, headers: HeaderMap) {
        // An error means that the client is closed.
        let _ = self.request.respond_with_headers(response, headers).await;
    }

    async fn fail(&self, code: usize, text: &str) {
        self.end_with(code, text, None).await;
    }

    /// Not begun.
    async fn give_back(&self, why: &str) {
        if self.request.message.reply.is_some() {
            self.end_with(503, &format!("this bridge {why}"), Some("returned")).await;
        }
    }

    async fn end_with(&self, code: usize, text: &str, what: Option<&str>) {
        // A header is one line.
        let status: String = printable(text).chars().filter(|c| !c.is_control()).take(TEXT_CHARS_MAX).collect();
        self.respond(Err(ServiceError { status, code }), what.map(reply_header).unwrap_or_default()).await;
    }
}

/// Waits for the deadline; without one, for ever.
pub async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
