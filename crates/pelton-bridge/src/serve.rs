//! `pelton-bridge serve`: a local service as a service of NATS.
//!
//! It is in the queue group only while the local service is there, so callers elsewhere learn at once that nobody
//! replies. A call that the local service did not begin is returned, and the caller's bridge asks another one.

use crate::{
    calls::{
        CALL, CALLS_MAX, DEADLINE, DRAIN_TIME, HEADER_BYTES, Inbox, Inboxes, LocalService, SIGN_INTERVAL, WINDOW,
        header, is_not_begun, reply_header, submit,
    },
    nats::ServerArgs,
    report,
    status::Status,
    stop::Stop,
    wire::traceparent,
};
use async_nats::{
    Client, HeaderMap, StatusCode, Subject,
    connection::State,
    service::{self, Request, ServiceExt as _, endpoint::Endpoint, error::Error as ServiceError},
};
use bytes::Bytes;
use clap::Args;
use futures_util::StreamExt as _;
use pelton::{Error, Outcome, tokio::AsyncCall, tokio::OwnedCompletion};
use pelton_cli::failure::{Failure, printable};
use std::{sync::Arc, time::Duration};
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{Instant, Interval, MissedTickBehavior, interval, sleep, timeout},
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
    pub service: String,
    /// The subject of its calls
    #[arg(long, value_name = "SUBJECT")]
    pub subject: String,
    /// Its name for `nats service` [default: the subject, with - for each .]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// The queue group: each call goes to one of its members
    #[arg(long, value_name = "NAME", default_value = "q")]
    queue_group: String,
    #[command(flatten)]
    pub servers: ServerArgs,
}

struct Shared {
    client: Client,
    status: Arc<Status>,
    inboxes: Inboxes,
    local: LocalService,
    /// The number of the last connection to the local service that has failed.
    failed: watch::Sender<u64>,
    /// The queue group was left after the failure of this connection.
    left: watch::Sender<u64>,
}

impl Shared {
    /// The connection with this number has failed. Waits until the queue group is left, so that the server gives no
    /// call to this bridge a second time.
    async fn lose(&self, number: u64) {
        self.failed.send_if_modified(|failed| std::mem::replace(failed, number.max(*failed)) < number);
        let mut left = self.left.subscribe();
        let _ = left.wait_for(|left| *left >= number).await;
    }
}

/// Runs `pelton-bridge serve`.
pub async fn run(args: &ServeArgs, stop: &Stop, status: &Arc<Status>) -> Result<(), Failure> {
    let (client, _) = args.servers.connect(stop).await?;
    let refused = |error: async_nats::Error| Failure::Refused(format!("the service of NATS: {error}"));
    let shared = Arc::new(Shared {
        inboxes: Inboxes::new(&client, &args.subject).await?,
        local: LocalService::new(&args.service),
        client: client.clone(),
        status: status.clone(),
        failed: watch::Sender::new(0),
        left: watch::Sender::new(0),
    });
    let name = args.name.clone().unwrap_or_else(|| args.subject.replace('.', "-"));
    let service = client
        .service_builder()
        .description(format!("{} of pelton", args.service))
        .queue_group(&args.queue_group)
        .start(name, env!("CARGO_PKG_VERSION"))
        .await
        .map_err(refused)?;
    let (mut calls, mut endpoint) = (JoinSet::new(), None);
    let failure = tokio::select! {
        failure = serve(args, &shared, &service, &mut calls, &mut endpoint) => failure,
        failure = stop.requested() => failure,
    };
    leave(&shared, endpoint.as_mut(), u64::MAX).await;
    flush(&client).await;
    while calls.try_join_next().is_some() {}
    report(format_args!("serve: takes no more calls; {} are in flight", calls.len()));
    let _ = timeout(DRAIN_TIME, async { while calls.join_next().await.is_some() {} }).await;
    let _ = timeout(FLUSH_TIME, service.stop()).await;
    flush(&client).await;
    Err(failure)
}

/// Serves calls while there is a local service, and waits for the next one. Dropped, it leaves the calls in flight and
/// the endpoint to its caller.
async fn serve(
    args: &ServeArgs,
    shared: &Arc<Shared>,
    service: &service::Service,
    calls: &mut JoinSet<()>,
    endpoint: &mut Option<Endpoint>,
) -> Failure {
    loop {
        let mut is_waiting = false;
        let number = loop {
            if let Some((_, number)) = shared.local.client().await {
                break number;
            }
            if !std::mem::replace(&mut is_waiting, true) {
                shared.status.ended(format!("waits for the service {}", args.service));
                report(format_args!("serve: waiting for the service {}", args.service));
            }
            sleep(Duration::from_millis(20)).await;
        };
        let endpoint = match service.endpoint(&args.subject).await {
            Ok(joined) => endpoint.insert(joined),
            Err(error) => return Failure::Refused(format!("the service of NATS: {error}")),
        };
        // The server has the subscription: a call after the report arrives.
        flush(&shared.client).await;
        shared.status.up(&shared.client);
        report(format_args!("serve: {} as {}", args.service, args.subject));
        let mut failed = shared.failed.subscribe();
        loop {
            tokio::select! {
                request = endpoint.next() => match request {
                    Some(request) if calls.len() < 2 * CALLS_MAX => {
                        let shared = shared.clone();
                        calls.spawn(async move { Call::new(&shared, request).run().await });
                    }
                    Some(request) => Call::new(shared, request).give_back("has too many calls").await,
                    None => break,
                },
                Some(_) = calls.join_next(), if !calls.is_empty() => {}
                _ = failed.wait_for(|failed| *failed >= number) => break,
            }
        }
        leave(shared, Some(endpoint), number).await;
        shared.local.forget(number);
    }
}

/// Leaves the queue group after the failure of the connection with this number. What comes after it and before the
/// server knows gets no reply: the callers' deadlines end it.
async fn leave(shared: &Shared, endpoint: Option<&mut Endpoint>, number: u64) {
    if let Some(endpoint) = endpoint {
        let leaving = async {
            let _ = endpoint.stop().await;
            // What had come before. It goes to another bridge, because the server detects first that this one has left.
            while let Some(request) = endpoint.next().await {
                Call::new(shared, request).give_back("ends").await;
            }
        };
        let _ = timeout(FLUSH_TIME, leaving).await;
    }
    shared.left.send_replace(number);
}

/// Waits until the server has everything that was said, if it answers in time.
async fn flush(client: &Client) {
    let _ = timeout(FLUSH_TIME, client.flush()).await;
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
        self.shared.status.messages.add(1);
        self.shared.status.bytes.add(self.request.message.payload.len() as u64);
        let Some(reply) = self.request.message.reply.clone() else { return self.notify().await };
        if !self.shared.inboxes.may_reply(&reply) {
            return;
        }
        let mut control = self.is_bridged.then(|| Control(self.shared.inboxes.open()));
        if let Some(control) = &control {
            self.sign(&reply, control, "begun").await;
        }
        let Some((local, number)) = self.shared.local.client().await else {
            return self.give_back("has lost its service").await;
        };
        let (deadline, body) = (self.deadline, self.request.message.payload.clone());
        let traceparent = self.request.message.headers.as_ref().and_then(traceparent);
        let submitting = submit(&local, &body, traceparent, deadline.map(Instant::into_std));
        tokio::pin!(submitting);
        let mut signs = signs();
        // Waits for space, in the service or in the table of calls.
        let submitted = loop {
            tokio::select! {
                submitted = &mut submitting => break submitted,
                said = said(&mut control) => if let Said::Over = said {
                    return;
                },
                _ = signs.tick() => if let Some(control) = &control {
                    self.sign(&reply, control, "working").await;
                },
                () = until(deadline) => return self.fail(504, "the deadline has passed").await,
            }
        };
        match submitted {
            Ok(call) => self.relay(call, number, &reply, control).await,
            Err(Error::TooLarge { .. }) => self.fail(413, "the request is too large for the service").await,
            Err(_) => {
                self.shared.lose(number).await;
                self.give_back("has lost its service").await;
            }
        }
    }

    /// A message without a reply subject wants no reply.
    async fn notify(&self) {
        if let Some((local, number)) = self.shared.local.client().await
            && local.notify(&self.request.message.payload).await.is_err()
        {
            self.shared.lose(number).await;
        }
    }

    async fn relay(&mut self, mut call: AsyncCall, number: u64, reply: &Subject, mut control: Option<Control>) {
        let (mut acknowledged, mut last_sign) = (0, Instant::now());
        let mut signs = signs();
        loop {
            let is_open = control.is_none() || self.parts - acknowledged < WINDOW;
            tokio::select! {
                said = said(&mut control) => match said {
                    // Dropped, the call is cancelled.
                    Said::Over => return,
                    Said::Acknowledged(count) if count <= self.parts => {
                        acknowledged = count;
                        last_sign = Instant::now();
                    }
                    Said::Acknowledged(_) | Said::Nothing => {}
                },
                completion = call.next(), if is_open => {
                    if self.take(completion, number, reply).await {
                        return;
                    }
                }
                _ = signs.tick() => {
                    if !is_open && last_sign.elapsed() > ACK_WAIT {
                        let text = format!("the caller's bridge has acknowledged no part for {ACK_WAIT:?}");
                        return self.end_with(502, &text, Some("lost")).await;
                    }
                    if let Some(control) = &control {
                        self.sign(reply, control, "working").await;
                    }
                }
                () = until(self.deadline) => return self.fail(504, "the deadline has passed").await,
            }
        }
    }

    /// Notifies the caller's bridge that the call goes on. If that bridge is gone, the server says so in the inbox.
    async fn sign(&self, reply: &Subject, control: &Control, what: &str) {
        if self.shared.client.connection_state() == State::Connected {
            let (reply, inbox) = (reply.clone(), control.0.subject.clone());
            let header = reply_header(what);
            let _ = self.shared.client.publish_with_reply_and_headers(reply, inbox, header, Bytes::new()).await;
        }
    }

    /// Sends a completion. Returns whether it was the last one.
    async fn take(
        &mut self,
        completion: pelton::Result<Option<OwnedCompletion>>,
        number: u64,
        reply: &Subject,
    ) -> bool {
        let OwnedCompletion { outcome, bytes } = match completion {
            Ok(Some(completion)) => completion,
            Ok(None) => return true,
            Err(error) => {
                self.shared.lose(number).await;
                match is_not_begun(&error) {
                    true => self.give_back("has lost its service").await,
                    false => self.end_with(502, &error.to_string(), Some("lost")).await,
                }
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

/// The caller's bridge says here what it wants.
struct Control(Inbox);

enum Said {
    /// It has so many parts.
    Acknowledged(u64),
    /// Nobody waits for the reply any more.
    Over,
    Nothing,
}

/// Waits for what the caller's bridge says; without one, for ever. Cancel-safe.
async fn said(control: &mut Option<Control>) -> Said {
    let Some(Control(inbox)) = control else { return std::future::pending().await };
    let Some(message) = inbox.messages.recv().await else { return Said::Over };
    if message.status == Some(StatusCode::NO_RESPONDERS) || message.payload == "cancel" {
        return Said::Over;
    }
    let text = std::str::from_utf8(&message.payload).ok();
    text.and_then(|text| text.strip_prefix("ack ")?.parse().ok()).map_or(Said::Nothing, Said::Acknowledged)
}

fn signs() -> Interval {
    let mut signs = interval(SIGN_INTERVAL);
    signs.set_missed_tick_behavior(MissedTickBehavior::Delay);
    signs.reset();
    signs
}

/// Waits for the deadline; without one, for ever.
pub async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
