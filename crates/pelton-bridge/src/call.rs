//! `pelton-bridge call`: a service of NATS as a local service.
//!
//! A call goes to one member of the service's queue group. It goes to another one only if the first has returned it
//! without beginning it, or if --idempotent says that calls may be executed more than once.

use crate::{
    calls::{
        CALL, CALLS_MAX, DEADLINE, DRAIN_TIME, HEADER_BYTES, Inboxes, LocalService, REPLY, SIGN_INTERVAL, SILENCE_MAX,
        WINDOW, header, is_not_begun, say, submit,
    },
    checked_name,
    nats::{ServerArgs, seconds},
    report,
    serve::until,
    status::Status,
    stop::Stop,
    wire::TRACEPARENT,
};
use async_nats::{
    Client, HeaderMap, Message, StatusCode, Subject,
    client::PublishError,
    connection::State,
    service::{NATS_SERVICE_ERROR, NATS_SERVICE_ERROR_CODE},
};
use bytes::Bytes;
use clap::Args;
use pelton::{
    Error, Outcome, Service, Traceparent,
    tokio::{AsyncRequest, AsyncService},
};
use pelton_cli::failure::Failure;
use std::{sync::Arc, time::Duration};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};

/// How often a call is sent.
const ATTEMPTS_MAX: usize = 3;
/// The pauses between them: a member that has lost its service has left by then. A guess.
const PAUSES: [Duration; ATTEMPTS_MAX - 1] = [Duration::from_millis(20), Duration::from_millis(100)];
/// How often a call without a connection checks whether there is one again.
const CONNECTION_INTERVAL: Duration = Duration::from_millis(10);
/// How often a call in flight is checked for its cancellation.
const CANCEL_INTERVAL: Duration = Duration::from_millis(50);

const PASSED: &str = "the deadline has passed";

/// Options of `pelton-bridge call`.
#[derive(Args)]
pub struct CallArgs {
    /// The subject of the service
    subject: String,
    /// The name under which this bridge listens as a service
    pub name: String,
    /// Each call may be executed more than once: it is repeated if a service is lost with it
    #[arg(long)]
    idempotent: bool,
    /// Calls go to this local service while there is one
    #[arg(long, value_name = "NAME")]
    prefer_local: Option<String>,
    /// A call to which nothing replies for so long has failed, unless its own deadline comes first
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "60")]
    timeout: Duration,
    #[command(flatten)]
    pub servers: ServerArgs,
}

impl CallArgs {
    /// Checks the options.
    pub fn validate(&self) -> Result<(), Failure> {
        if self.prefer_local.as_ref() == Some(&self.name) {
            return Err(Failure::Input(format!(
                "{} is the name of this bridge, which would call itself: give it another name than the local service has",
                self.name
            )));
        }
        checked_name(&self.name)?;
        self.prefer_local.as_deref().map_or(Ok(()), checked_name)?;
        self.servers.validate()
    }
}

struct Shared {
    client: Client,
    status: Arc<Status>,
    inboxes: Inboxes,
    local: Option<LocalService>,
    subject: String,
    is_idempotent: bool,
    timeout: Duration,
}

/// How an attempt ended.
enum End {
    Reply(Bytes),
    /// The end of a reply in parts.
    Parts,
    Failed(u32, Bytes),
    Abandoned,
    /// Nobody has begun it.
    Returned(String),
    /// It may have been executed.
    Lost(String),
    /// Nobody waits any more.
    Cancelled,
}

/// Runs `pelton-bridge call`.
pub async fn run(args: &CallArgs, stop: &Stop, status: &Arc<Status>) -> Result<(), Failure> {
    let (client, _) = args.servers.connect(stop).await?;
    let shared = Arc::new(Shared {
        inboxes: Inboxes::new(&client, &args.subject).await?,
        client: client.clone(),
        status: status.clone(),
        local: args.prefer_local.as_deref().map(LocalService::new),
        subject: args.subject.clone(),
        is_idempotent: args.idempotent,
        timeout: args.timeout,
    });
    let mut service = AsyncService::new(Service::listen(&args.name)?)?;
    status.up(&client);
    report(format_args!("call: {} as {}", args.subject, args.name));
    let stopper = service.stopper();
    let serving = service.run(CALLS_MAX, move |request| forward(shared.clone(), request));
    tokio::pin!(serving);
    let failure = tokio::select! {
        done = &mut serving => return Ok(done?),
        failure = stop.requested() => failure,
    };
    stopper.drain();
    let _ = tokio::time::timeout(DRAIN_TIME, serving).await;
    Err(failure)
}

async fn forward(shared: Arc<Shared>, mut request: AsyncRequest) {
    let mut parts = 0;
    shared.status.messages.add(1);
    shared.status.bytes.add(request.len() as u64);
    if let Some(end) = shared.ask_local(&mut request, &mut parts).await {
        return finish(request, end);
    }
    let mut pauses = PAUSES.into_iter();
    let end = loop {
        let end = shared.ask(&mut request, &mut parts).await;
        let may_repeat = match &end {
            End::Returned(_) => true,
            End::Lost(_) => shared.is_idempotent && parts == 0,
            _ => false,
        };
        let Some(pause) = pauses.next().filter(|_| may_repeat) else { break end };
        if let Err(end) = while_wanted(&request, sleep(pause)).await {
            break end;
        }
    };
    finish(request, end);
}

fn finish(request: AsyncRequest, end: End) {
    // An error means that the client is gone.
    let _ = match end {
        End::Reply(bytes) => request.reply(&bytes),
        End::Parts => request.end(),
        End::Failed(code, bytes) => request.fail(code, &bytes),
        End::Returned(text) => request.fail(503, text.as_bytes()),
        End::Lost(text) => request.fail(502, text.as_bytes()),
        // Dropped, the call is abandoned.
        End::Abandoned | End::Cancelled => Ok(()),
    };
}

/// Waits for the work until the call's deadline passes or its client cancels it.
async fn while_wanted<T>(request: &AsyncRequest, work: impl Future<Output = T>) -> Result<T, End> {
    let deadline = request.responder().deadline().map(Instant::from_std);
    let mut checks = interval(CANCEL_INTERVAL);
    tokio::pin!(work);
    loop {
        tokio::select! {
            done = &mut work => return Ok(done),
            _ = checks.tick() => if request.responder().is_cancelled() {
                return Err(End::Cancelled);
            },
            () = until(deadline) => return Err(End::Failed(504, PASSED.into())),
        }
    }
}

/// Gives the client a part, when it has space for it. Until then, `sign` says how many parts it has.
async fn give_part(request: &mut AsyncRequest, part: &[u8], sign: Option<(&Progress<'_>, u64)>) -> Option<End> {
    let deadline = request.responder().deadline().map(Instant::from_std);
    let (mut checks, mut last_sign) = (interval(CANCEL_INTERVAL), Instant::now());
    loop {
        tokio::select! {
            given = request.part(part) => return given.is_err().then_some(End::Cancelled),
            _ = checks.tick() => {
                if request.responder().is_cancelled() {
                    return Some(End::Cancelled);
                }
                if let Some((progress, parts)) = sign
                    && last_sign.elapsed() >= SIGN_INTERVAL
                {
                    progress.acknowledge(parts).await;
                    last_sign = Instant::now();
                }
            }
            () = until(deadline) => return Some(End::Failed(504, PASSED.into())),
        }
    }
}

impl Shared {
    /// Asks the preferred local service. `None`: it has not begun the call.
    async fn ask_local(&self, request: &mut AsyncRequest, parts: &mut u64) -> Option<End> {
        let local = self.local.as_ref()?;
        let (client, number) = match while_wanted(request, local.client()).await {
            Ok(found) => found?,
            Err(end) => return Some(end),
        };
        let submitting = submit(&client, request, request.responder().traceparent(), request.responder().deadline());
        let mut call = match while_wanted(request, submitting).await {
            Ok(Ok(call)) => call,
            Ok(Err(Error::TooLarge { .. })) => {
                return Some(End::Failed(413, "the request is too large for the service".into()));
            }
            Ok(Err(_)) => {
                local.forget(number);
                return None;
            }
            Err(end) => return Some(end),
        };
        loop {
            let completion = match while_wanted(request, call.next()).await {
                Ok(completion) => completion,
                Err(end) => return Some(end),
            };
            let completion = match completion {
                Ok(Some(completion)) => completion,
                Ok(None) => return Some(End::Parts),
                Err(error) => {
                    local.forget(number);
                    let is_free = is_not_begun(&error) || self.is_idempotent && *parts == 0;
                    return (!is_free).then(|| End::Lost(error.to_string()));
                }
            };
            match completion.outcome {
                Outcome::Reply => return Some(End::Reply(completion.bytes.into())),
                Outcome::Part => {
                    if let Some(end) = give_part(request, &completion.bytes, None).await {
                        return Some(end);
                    }
                    *parts += 1;
                }
                Outcome::End => return Some(End::Parts),
                Outcome::Failed(code) => return Some(End::Failed(code, completion.bytes.into())),
                Outcome::Abandoned | Outcome::Lost(_) => return Some(End::Abandoned),
            }
        }
    }

    /// Sends a request once there is a connection: without one the client would keep it, with a deadline that is
    /// wrong when it is sent.
    async fn send(
        &self,
        inbox: String,
        body: Bytes,
        traceparent: Option<Traceparent>,
        deadline: Option<Instant>,
    ) -> Result<(), PublishError> {
        while self.client.connection_state() != State::Connected {
            sleep(CONNECTION_INTERVAL).await;
        }
        let mut headers = HeaderMap::new();
        headers.insert(CALL, "1");
        if let Some(deadline) = deadline {
            let left = deadline.saturating_duration_since(Instant::now());
            headers.insert(DEADLINE, left.as_millis().to_string());
        }
        if let Some(traceparent) = traceparent {
            headers.insert(TRACEPARENT, traceparent.to_string());
        }
        self.client.publish_with_reply_and_headers(self.subject.clone(), inbox, headers, body).await
    }

    /// Sends the call, and takes what comes back.
    async fn ask(&self, request: &mut AsyncRequest, parts: &mut u64) -> End {
        let limit = self.client.server_info().max_payload.saturating_sub(HEADER_BYTES);
        if request.len() > limit {
            let text = format!("the request has {} bytes, and the server takes at most {limit}", request.len());
            return End::Failed(413, text.into());
        }
        let deadline = request.responder().deadline().map(Instant::from_std);
        let mut inbox = self.inboxes.open();
        let body = Bytes::copy_from_slice(request);
        let sending = self.send(inbox.subject.clone(), body, request.responder().traceparent(), deadline);
        tokio::pin!(sending);
        let mut is_sent = false;
        let mut progress = Progress { shared: self, control: None, errors: Bytes::new() };
        let mut last_sign = Instant::now();
        let mut checks = interval(CANCEL_INTERVAL);
        checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                sent = &mut sending, if !is_sent => {
                    if let Err(error) = sent {
                        return End::Returned(format!("the request was not sent: {error}"));
                    }
                    (is_sent, last_sign) = (true, Instant::now());
                }
                message = inbox.messages.recv() => {
                    let Some(message) = message else { return End::Lost("more parts came than may".to_owned()) };
                    if let Some(end) = progress.take(message, request, parts).await {
                        return end;
                    }
                    last_sign = Instant::now();
                }
                _ = checks.tick() => {
                    if request.responder().is_cancelled() {
                        progress.cancel().await;
                        return End::Cancelled;
                    }
                    let limit = if progress.control.is_some() { SILENCE_MAX } else { self.timeout };
                    if last_sign.elapsed() > limit && !is_sent {
                        return End::Failed(503, format!("no connection to NATS for {limit:?}").into());
                    }
                    if last_sign.elapsed() > limit {
                        progress.cancel().await;
                        return End::Lost(format!("no reply and no sign of life of {} for {limit:?}", self.subject));
                    }
                }
                () = until(deadline) => {
                    progress.cancel().await;
                    return End::Failed(504, PASSED.into());
                }
            }
        }
    }
}

/// What is known of a call in flight.
struct Progress<'a> {
    shared: &'a Shared,
    /// The inbox of the bridge that has begun it.
    control: Option<Subject>,
    /// The bytes of the failure that follows.
    errors: Bytes,
}

impl Progress<'_> {
    async fn cancel(&self) {
        if let Some(control) = &self.control {
            say(&self.shared.client, control, "cancel".to_owned()).await;
        }
    }

    async fn acknowledge(&self, parts: u64) {
        if let Some(control) = &self.control {
            say(&self.shared.client, control, format!("ack {parts}")).await;
        }
    }

    /// Takes one message. Returns the call's end, if it is that.
    async fn take(&mut self, message: Message, request: &mut AsyncRequest, parts: &mut u64) -> Option<End> {
        if message.status == Some(StatusCode::NO_RESPONDERS) {
            return Some(End::Failed(503, format!("no service replies on {}", self.shared.subject).into()));
        }
        let headers = message.headers.as_ref();
        let said = header(headers, REPLY).unwrap_or_default();
        let (word, number) = said.split_once(' ').unwrap_or((said, ""));
        let code = header(headers, NATS_SERVICE_ERROR_CODE).map(|code| code.parse().unwrap_or(500));
        let text = header(headers, NATS_SERVICE_ERROR).unwrap_or_default().to_owned();
        match word {
            "begun" => self.control = message.reply.filter(|control| self.shared.inboxes.may_reply(control)),
            "working" => {}
            "error" => self.errors = message.payload,
            "part" if number.parse() == Ok(*parts) => {
                // Backpressure: the service waits for acknowledgements.
                if let Some(end) = give_part(request, &message.payload, Some((self, *parts))).await {
                    self.cancel().await;
                    return Some(end);
                }
                *parts += 1;
                if parts.is_multiple_of(WINDOW / 4) {
                    self.acknowledge(*parts).await;
                }
            }
            "end" if number.parse() == Ok(*parts) => return Some(End::Parts),
            "part" | "end" => {
                self.cancel().await;
                return Some(End::Lost(format!("part {parts} of the reply was lost")));
            }
            "returned" => return Some(End::Returned(text)),
            "lost" => return Some(End::Lost(text)),
            "abandoned" => return Some(End::Abandoned),
            _ => {
                return Some(match code {
                    None => End::Reply(message.payload),
                    Some(code) if self.errors.is_empty() => End::Failed(code, text.into()),
                    Some(code) => End::Failed(code, std::mem::take(&mut self.errors)),
                });
            }
        }
        None
    }
}
