//! The connection to NATS: its options, its secrets, the stream and whether its settings fit.

use crate::{
    report,
    status::{Problem, Status},
    stop::Stop,
};
use async_nats::{
    Client, ConnectError, ConnectErrorKind, ConnectOptions, Event,
    jetstream::{
        self, Context, ErrorCode,
        context::{ContextBuilder, CreateStreamErrorKind, GetStreamErrorKind},
        stream::{Config, DiscardPolicy, Info, RetentionPolicy, StorageType},
    },
};
use clap::Args;
use pelton_cli::failure::Failure;
use std::{
    error::Error as _,
    hash::{BuildHasher as _, RandomState},
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::watch,
    time::Instant,
};

/// The longest pause between two attempts to connect. A guess: a server that comes back finds its bridges soon.
const RECONNECT_PAUSE_MAX: Duration = Duration::from_secs(2);
/// Limit of a request to the server. A publish without an acknowledgement is repeated after this time; a reconnection
/// repeats it earlier.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest answer of a server's monitoring that is read.
const MONITOR_BYTES_MAX: u64 = 1 << 20;
/// A stream that is not found, that finds no servers, or that has gone back, may be a server that is still starting.
pub const SETTLE_TIME: Duration = Duration::from_secs(10);

/// Options of every command: the servers, and the secrets.
#[derive(Args, Clone)]
pub struct ServerArgs {
    /// A server of NATS; repeatable, or several with commas: the bridge uses any of them
    #[arg(long = "nats", value_name = "URL", value_delimiter = ',', default_value = "nats://127.0.0.1:4222")]
    urls: Vec<String>,
    /// A credentials file of NATS: a JWT and its seed
    #[arg(long, value_name = "FILE")]
    creds: Option<PathBuf>,
    /// A file with the seed of an NKey
    #[arg(long, value_name = "FILE", conflicts_with = "creds")]
    nkey: Option<PathBuf>,
    /// A file whose first line is the user, and whose second is the password
    #[arg(long, value_name = "FILE", conflicts_with_all = ["creds", "nkey"])]
    user_file: Option<PathBuf>,
    /// A file with a token
    #[arg(long, value_name = "FILE", conflicts_with_all = ["creds", "nkey", "user_file"])]
    token_file: Option<PathBuf>,
    /// Require TLS, as each of the following options does
    #[arg(long)]
    tls: bool,
    /// Certificates of authorities to trust beside the system's, in PEM
    #[arg(long, value_name = "FILE")]
    tls_ca: Option<PathBuf>,
    /// This bridge's certificate, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The key of that certificate, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Fail if no server accepts the first connection in this time; later, the bridge connects again for ever
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "10")]
    connect_timeout: Duration,
}

/// Options of the commands that use a stream.
#[derive(Args, Clone)]
pub struct NatsArgs {
    #[command(flatten)]
    pub servers: ServerArgs,
    /// The JetStream stream
    #[arg(long, value_name = "NAME")]
    pub stream: String,
    /// Create the stream if there is none: in files, without limits, with --require-replicas replicas or one; tries for
    /// 10 seconds while the cluster has too few servers for them
    #[arg(long)]
    create: bool,
    /// The JetStream domain, behind a leaf node
    #[arg(long, value_name = "NAME")]
    domain: Option<String>,
    /// Fail unless the stream has at least this number of replicas
    #[arg(long, value_name = "N")]
    require_replicas: Option<usize>,
    /// Fail unless the server whose monitoring (`http: HOST:PORT`) is there syncs each message before it acknowledges
    /// it (`sync_interval: always`); repeatable, for each replica
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',')]
    require_sync: Vec<String>,
    /// Accept a stream whose limits remove messages; the start says what that means
    #[arg(long)]
    pub allow_limits: bool,
}

pub fn seconds(text: &str) -> Result<Duration, String> {
    text.parse()
        .ok()
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .ok_or_else(|| "want seconds, such as 10 or 0.5".to_owned())
}

/// The connection.
pub struct Nats {
    pub client: Client,
    pub jetstream: Context,
    /// The beginning of the subjects of JetStream's requests.
    pub api: String,
    pub stream: String,
    /// Counts the connections: a publish in flight when it changes is repeated.
    pub connections: watch::Receiver<u64>,
    /// The server has answered a request to JetStream: from then on, the bridge waits for it without limit.
    has_answered: bool,
    pub status: Arc<Status>,
}

/// What a bridge needs of a stream.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    Out,
    In,
}

impl NatsArgs {
    /// Whether both name the same stream of the same servers.
    pub fn is_same_stream(&self, other: &NatsArgs) -> bool {
        (&self.stream, &self.domain, &self.servers.urls) == (&other.stream, &other.domain, &other.servers.urls)
    }

    /// Connects, and checks the stream, which --create creates for `subject`. The second value has the stream as it
    /// is now.
    pub async fn connect(
        &self,
        direction: Direction,
        subject: String,
        stop: &Stop,
        status: &Arc<Status>,
    ) -> Result<(Nats, Info), Failure> {
        let mut nats = self.open(stop, status).await?;
        if self.create {
            nats.create(subject, self.require_replicas.unwrap_or(1), stop).await?;
        }
        let info = nats.info(stop).await?;
        nats.has_answered = true;
        self.check_info(&info, direction)?;
        Ok((nats, info))
    }

    /// Connects, and checks the stream, and that it takes the subject on which a bridge outwards publishes; creates
    /// nothing.
    pub async fn check(
        &self,
        direction: Direction,
        published: Option<&str>,
        stop: &Stop,
        status: &Arc<Status>,
    ) -> Result<(), Failure> {
        let nats = self.open(stop, status).await?;
        if self.create
            && let Err(error) = nats.jetstream.get_stream(&self.stream).await
            && let GetStreamErrorKind::JetStream(refused) = error.kind()
            && refused.error_code() == ErrorCode::STREAM_NOT_FOUND
        {
            return Ok(());
        }
        let info = nats.info(stop).await?;
        self.check_info(&info, direction)?;
        let subjects = &info.config.subjects;
        match published {
            Some(subject) if !subjects.iter().any(|pattern| is_subject_of(subject, pattern)) => {
                Err(Failure::Refused(format!(
                    "the stream {} does not take {subject}, only {}: name another subject or stream, or add the \
                     subject to the stream",
                    self.stream,
                    subjects.join(", ")
                )))
            }
            _ => Ok(()),
        }
    }

    async fn open(&self, stop: &Stop, status: &Arc<Status>) -> Result<Nats, Failure> {
        for monitor in &self.require_sync {
            check_sync(monitor).await?;
        }
        let (client, connections) = self.servers.connect(stop).await?;
        let context = ContextBuilder::new().timeout(REQUEST_TIMEOUT);
        let jetstream = match &self.domain {
            Some(domain) => context.domain(domain).build(client.clone()),
            None => context.build(client.clone()),
        };
        Ok(Nats {
            jetstream,
            api: self.domain.as_ref().map_or("$JS.API".to_owned(), |domain| format!("$JS.{domain}.API")),
            client,
            stream: self.stream.clone(),
            connections,
            has_answered: false,
            status: status.clone(),
        })
    }

    fn check_info(&self, info: &Info, direction: Direction) -> Result<(), Failure> {
        check_settings(&info.config, direction, self.allow_limits, self.require_replicas)
            .map_err(|problem| Failure::Refused(format!("the stream {} {problem}", self.stream)))
    }
}

impl ServerArgs {
    /// Checks the options.
    pub fn validate(&self) -> Result<(), Failure> {
        if let Some(url) = self.urls.iter().find(|url| url.contains('@')) {
            let shown = url.rsplit('@').next().unwrap_or_default();
            return Err(Failure::Input(format!(
                "the URL of {shown} has a user or a password in it, which `ps` shows to everybody: use --user-file, \
                 --token-file, --nkey or --creds"
            )));
        }
        Ok(())
    }

    /// Connects to one of the servers. The second value counts the connections.
    pub async fn connect(&self, stop: &Stop) -> Result<(Client, watch::Receiver<u64>), Failure> {
        let (connected, connections) = watch::channel(0);
        let deadline = Instant::now() + self.connect_timeout;
        loop {
            let (connected, is_failing) = (connected.clone(), Arc::new(AtomicBool::new(false)));
            let options = self.options().await?.event_callback(move |event| {
                let (connected, is_failing) = (connected.clone(), is_failing.clone());
                async move {
                    match event {
                        Event::Connected => {
                            is_failing.store(false, Relaxed);
                            connected.send_modify(|count| *count += 1);
                        }
                        // Each attempt to connect again fails so; one report is enough.
                        Event::ClientError(_) if is_failing.swap(true, Relaxed) => {}
                        Event::Disconnected => report("disconnected from NATS; the bridge connects again"),
                        Event::SlowConsumer(_) | Event::Draining | Event::Closed => {}
                        other => report(format_args!("NATS: {other}")),
                    }
                }
            });
            let connected = tokio::select! {
                connected = options.connect(&self.urls) => connected,
                failure = stop.requested() => return Err(failure),
            };
            match connected {
                Ok(client) => return Ok((client, connections)),
                Err(error) => match error.kind() {
                    ConnectErrorKind::Authentication | ConnectErrorKind::AuthorizationViolation => {
                        return Err(Failure::Refused(format!("{}: the server refused: {error}", self.servers())));
                    }
                    ConnectErrorKind::ServerParse => {
                        return Err(Failure::Input(format!("{}: {error}: write nats://HOST:PORT", self.servers())));
                    }
                    _ if is_tls(&error) => {
                        return Err(Failure::Refused(format!(
                            "{}: {error}: --tls-ca names the authority of the server's certificate, --tls-cert and \
                             --tls-key the certificate that the server wants; for a server without TLS, leave the \
                             options of TLS out",
                            self.servers()
                        )));
                    }
                    _ if Instant::now() >= deadline => {
                        return Err(Failure::TimedOut(format!(
                            "{}: no connection within {} s: {error}: start the server, or check the URL",
                            self.servers(),
                            self.connect_timeout.as_secs_f64()
                        )));
                    }
                    _ => stop.pause(Duration::from_millis(100)).await?,
                },
            }
        }
    }

    fn servers(&self) -> String {
        self.urls.join(", ")
    }

    async fn options(&self) -> Result<ConnectOptions, Failure> {
        let random = RandomState::new();
        let mut options = ConnectOptions::new()
            .name("pelton-bridge")
            .retain_servers_order()
            .connection_timeout(Duration::from_secs(5))
            .request_timeout(Some(REQUEST_TIMEOUT))
            .ping_interval(Duration::from_secs(10))
            .reconnect_delay_callback(move |attempt| {
                let pause = Duration::from_millis(50 << attempt.min(6)).min(RECONNECT_PAUSE_MAX);
                // Between half and all of it, so that many bridges do not come back at one moment.
                pause.mul_f64(0.5 + (random.hash_one(attempt) % 1000) as f64 / 2000.0)
            });
        if let Some(path) = &self.creds {
            let text = read_secret("--creds", path)?;
            options = options
                .credentials(&text)
                .map_err(|error| Failure::Input(format!("--creds {}: {error}", path.display())))?;
        } else if let Some(path) = &self.nkey {
            options = options.nkey(read_secret("--nkey", path)?.trim().to_owned());
        } else if let Some(path) = &self.user_file {
            let text = read_secret("--user-file", path)?;
            let mut lines = text.lines();
            let (Some(user), Some(password)) = (lines.next(), lines.next()) else {
                return Err(Failure::Input(format!(
                    "--user-file {} has fewer than two lines: write the user, then the password",
                    path.display()
                )));
            };
            options = options.user_and_password(user.to_owned(), password.to_owned());
        } else if let Some(path) = &self.token_file {
            options = options.token(read_secret("--token-file", path)?.trim().to_owned());
        }
        if let Some(path) = &self.tls_ca {
            options = options.add_root_certificates(path.clone());
        }
        if let (Some(cert), Some(key)) = (&self.tls_cert, &self.tls_key) {
            options = options.add_client_certificate(cert.clone(), key.clone());
        }
        let is_required = self.tls || self.tls_ca.is_some() || self.tls_cert.is_some();
        Ok(options.require_tls(is_required))
    }
}

/// Whether a certificate was refused, or cannot be read: to try again is of no use.
fn is_tls(error: &ConnectError) -> bool {
    let source = error.source().and_then(|source| source.downcast_ref::<io::Error>());
    // Rustls gives its errors this kind; nothing else of a connection has it.
    error.kind() == ConnectErrorKind::Tls || source.is_some_and(|source| source.kind() == io::ErrorKind::InvalidData)
}

/// Asks a server's monitoring whether it syncs each message.
async fn check_sync(monitor: &str) -> Result<(), Failure> {
    let exchange = async {
        let mut socket = TcpStream::connect(monitor).await?;
        // HTTP/1.0: the answer ends with the connection.
        socket.write_all(format!("GET /jsz?config=true HTTP/1.0\r\nHost: {monitor}\r\n\r\n").as_bytes()).await?;
        let mut answer = Vec::new();
        socket.take(MONITOR_BYTES_MAX).read_to_end(&mut answer).await?;
        Ok::<_, io::Error>(answer)
    };
    let what = || format!("asking the server's monitoring at {monitor} for its sync_interval");
    let answer = match tokio::time::timeout(REQUEST_TIMEOUT, exchange).await {
        Ok(answer) => answer.map_err(|error| Failure::TimedOut(format!("{}: {error}", what())))?,
        Err(_) => return Err(Failure::TimedOut(format!("{}: no answer within {REQUEST_TIMEOUT:?}", what()))),
    };
    let text = String::from_utf8_lossy(&answer);
    let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    let found: serde_json::Value = serde_json::from_str(body).map_err(|error| {
        Failure::Refused(format!("{}: {error}: {monitor} is not the `http` address of a server", what()))
    })?;
    if found["config"]["sync_always"] == true {
        return Ok(());
    }
    Err(Failure::Refused(format!(
        "the server at {monitor} does not sync each message before it acknowledges it: --require-sync wants \
         `sync_interval: always` in the jetstream block of its configuration"
    )))
}

/// In words: which limit refuses a message or a stream.
pub fn limit_text(error: &jetstream::Error, stream: &str) -> Option<String> {
    let (limit, todo) = match error.error_code() {
        ErrorCode::STREAM_STORE_FAILED => {
            (format!("the stream {stream} is full"), "remove what has been read, or raise its limit")
        }
        ErrorCode::ACCOUNT_RESOURCES_EXCEEDED => (
            "a limit of the account for JetStream is reached".to_owned(),
            "remove what has been read, or raise the limit",
        ),
        ErrorCode::STORAGE_RESOURCES_EXCEEDED
        | ErrorCode::MEMORY_RESOURCES_EXCEEDED
        | ErrorCode::INSUFFICIENT_RESOURCES => (
            "the server's JetStream has no space left, or a limit of the account is reached".to_owned(),
            "remove what has been read, or raise max_file_store or max_memory_store",
        ),
        _ => return None,
    };
    Some(format!("{limit} ({}): {todo}", error))
}

/// Whether a subject is one of those that a pattern with wildcards names.
pub fn is_subject_of(subject: &str, pattern: &str) -> bool {
    let mut tokens = subject.split('.');
    pattern.split('.').all(|wanted| match (wanted, tokens.next()) {
        (">", Some(_)) => {
            tokens.by_ref().for_each(drop);
            true
        }
        (wanted, Some(token)) => wanted == "*" || wanted == token,
        (_, None) => false,
    }) && tokens.next().is_none()
}

fn read_secret(option: &str, path: &Path) -> Result<String, Failure> {
    std::fs::read_to_string(path).map_err(|error| {
        let what = format!("reading {option} {}", path.display());
        match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied | io::ErrorKind::InvalidData => {
                Failure::Input(format!("{what}: {error}"))
            }
            _ => Failure::system(what, error),
        }
    })
}

impl Nats {
    /// Creates the stream unless there is one of that name, whatever its settings.
    async fn create(&self, subject: String, replicas: usize, stop: &Stop) -> Result<(), Failure> {
        let (name, subjects) = (self.stream.clone(), vec![subject]);
        let config = Config { name, subjects, num_replicas: replicas, ..Config::default() };
        let mut retry = Retry::new("creating the stream", &self.status);
        // A cluster that starts first has no leader, and then, for a while, too few servers.
        let mut too_few_since = None;
        loop {
            let created = tokio::select! {
                created = self.jetstream.get_or_create_stream(config.clone()) => created,
                failure = stop.requested() => return Err(failure),
            };
            match created {
                Ok(_) => return Ok(()),
                Err(error) => match error.kind() {
                    // Another bridge was quicker.
                    CreateStreamErrorKind::JetStream(refused)
                        if refused.error_code() == ErrorCode::STREAM_NAME_EXIST =>
                    {
                        return Ok(());
                    }
                    CreateStreamErrorKind::JetStream(refused)
                        if refused.error_code() == ErrorCode::CLUSTER_NO_PEERS
                            && too_few_since.get_or_insert_with(Instant::now).elapsed() < SETTLE_TIME =>
                    {
                        retry.pause(stop, &refused).await?;
                    }
                    CreateStreamErrorKind::JetStream(refused) if refused.code() != 503 => {
                        let reason = limit_text(&refused, &self.stream).unwrap_or_else(|| refused.to_string());
                        return Err(Failure::Refused(format!(
                            "the stream {} cannot be created: {reason}",
                            self.stream
                        )));
                    }
                    CreateStreamErrorKind::JetStreamUnavailable | CreateStreamErrorKind::TimedOut
                        if retry.attempts > 20 =>
                    {
                        return Err(Failure::TimedOut(format!(
                            "the server does not answer requests to JetStream: {error}: start it with --jetstream"
                        )));
                    }
                    _ => retry.pause(stop, &error).await?,
                },
            }
        }
    }

    /// The stream as it is now; asks again while the server does not answer.
    pub async fn info(&self, stop: &Stop) -> Result<Info, Failure> {
        let (mut retry, began) = (Retry::new("reading the stream's state", &self.status), Instant::now());
        loop {
            let asked = tokio::select! {
                asked = self.jetstream.get_stream(&self.stream) => asked,
                failure = stop.requested() => return Err(failure),
            };
            let error = match asked {
                Ok(stream) => return Ok(stream.cached_info().clone()),
                Err(error) => error,
            };
            if let GetStreamErrorKind::JetStream(refused) = error.kind() {
                match refused.error_code() {
                    ErrorCode::STREAM_NOT_FOUND if began.elapsed() < SETTLE_TIME && *self.connections.borrow() > 1 => {}
                    ErrorCode::STREAM_NOT_FOUND => {
                        return Err(Failure::Refused(format!(
                            "the server has no stream {}: create it, for instance `nats stream add {}`, with its \
                             defaults and the subject",
                            self.stream, self.stream
                        )));
                    }
                    ErrorCode::JETSTREAM_NOT_ENABLED | ErrorCode::JETSTREAM_NOT_ENABLED_FOR_ACCOUNT => {
                        return Err(Failure::Refused(
                            "the server has no JetStream for this account: start it with --jetstream, or enable it"
                                .to_owned(),
                        ));
                    }
                    _ => {}
                }
            }
            if !self.has_answered && began.elapsed() > SETTLE_TIME {
                return Err(Failure::TimedOut(format!(
                    "the server does not answer requests to JetStream: {error}: start it with --jetstream"
                )));
            }
            retry.pause(stop, &error).await?;
        }
    }

    /// The largest body of one message, with this number of bytes of headers.
    pub fn body_bytes_max(&self, config: &Config, header_bytes: usize) -> usize {
        let server = self.client.server_info().max_payload;
        let stream = usize::try_from(config.max_message_size).ok().filter(|bytes| *bytes > 0).unwrap_or(usize::MAX);
        server.min(stream).saturating_sub(header_bytes)
    }
}

/// Attempts with growing pauses; the second failure is reported, and is a problem of the bridge until this is dropped.
pub struct Retry {
    what: &'static str,
    attempts: u32,
    status: Arc<Status>,
    problem: Option<Problem>,
}

impl Retry {
    pub fn new(what: &'static str, status: &Arc<Status>) -> Retry {
        Retry { what, attempts: 0, status: status.clone(), problem: None }
    }

    /// What failed has succeeded.
    pub fn succeeded(&mut self) {
        if self.attempts > 0 {
            (self.attempts, self.problem) = (0, None);
        }
    }

    /// Waits before the next attempt; fails when a signal arrives.
    pub async fn pause(&mut self, stop: &Stop, error: impl std::fmt::Display) -> Result<(), Failure> {
        tokio::select! {
            failure = stop.requested() => Err(failure),
            () = self.pause_through(error) => Ok(()),
        }
    }

    /// As [`Retry::pause`], for a caller that handles signals itself.
    pub async fn pause_through(&mut self, error: impl std::fmt::Display) {
        if self.attempts == 1 {
            let text = format!("{}: {error}; trying again", self.what);
            report(&text);
            self.problem = Some(Problem::begin(&self.status, text));
        }
        let pause = Duration::from_millis(20 << self.attempts.min(5));
        self.attempts += 1;
        tokio::time::sleep(pause).await;
    }
}

/// Says in words why a stream does not fit.
fn check_settings(
    config: &Config,
    direction: Direction,
    allow_limits: bool,
    require_replicas: Option<usize>,
) -> Result<(), String> {
    match config.retention {
        RetentionPolicy::Limits => {}
        RetentionPolicy::WorkQueue => {
            return Err("is a work queue, which removes a message once a consumer has it: a restarted bridge could \
                        not find out what is stored. Use a stream with retention `limits`"
                .to_owned());
        }
        RetentionPolicy::Interest => {
            return Err("has retention `interest`, which removes messages that no consumer wants: a restarted bridge \
                        could not find out what is stored. Use a stream with retention `limits`"
                .to_owned());
        }
    }
    if let Some(wanted) = require_replicas.filter(|wanted| config.num_replicas < *wanted) {
        return Err(format!("has {} replicas, --require-replicas wants {wanted}", config.num_replicas));
    }
    if direction == Direction::Out {
        if config.no_ack {
            return Err("acknowledges nothing (no_ack), so a bridge would never know what is stored".to_owned());
        }
        if config.sealed || config.mirror.is_some() {
            return Err(
                "takes no messages: it is sealed, or a mirror. Name the stream that the mirror copies".to_owned()
            );
        }
        if config.subject_transform.is_some() {
            return Err("transforms subjects: the bridge could not find its last message again".to_owned());
        }
    }
    let limits = removing_limits(config);
    if !limits.is_empty() && !allow_limits {
        let (limits, lost) = (
            limits.join(", "),
            match direction {
                Direction::Out => "the last message of the subject, which a restarted bridge needs",
                Direction::In => "messages that were not read yet",
            },
        );
        return Err(format!(
            "has {limits}: that can remove {lost}. Remove the limit, set `discard: new`, or say --allow-limits"
        ));
    }
    Ok(())
}

/// The settings of a stream that remove messages which nobody has read.
fn removing_limits(config: &Config) -> Vec<String> {
    let mut limits = Vec::new();
    if !config.max_age.is_zero() {
        limits.push(format!("max_age {} s", config.max_age.as_secs_f64()));
    }
    if config.discard == DiscardPolicy::Old {
        for (name, value) in [("max_bytes", config.max_bytes), ("max_msgs", config.max_messages)] {
            if value > 0 {
                limits.push(format!("{name} {value} with `discard: old`"));
            }
        }
    }
    // One message for each subject stays, which is what a bridge outwards needs; a reader may miss the others.
    if config.max_messages_per_subject > 0 && !config.discard_new_per_subject {
        limits.push(format!("max_msgs_per_subject {} with `discard: old`", config.max_messages_per_subject));
    }
    limits
}

/// What an acknowledgement of this stream means.
pub fn meaning_of_ack(config: &Config) -> String {
    let replicas = config.num_replicas.max(1);
    match (config.storage, replicas) {
        (StorageType::Memory, 1) => {
            "an acknowledged message is in the memory of one server, and lost with that process".to_owned()
        }
        (StorageType::Memory, replicas) => {
            format!("an acknowledged message is in the memory of a majority of {replicas} servers")
        }
        (StorageType::File, 1) => "an acknowledged message is in a file of one server, which survives a kill of the \
                                   server; a crash of its machine loses what was not synced (by default up to two \
                                   minutes; `sync_interval: always` in the server's configuration syncs each message)"
            .to_owned(),
        (StorageType::File, replicas) => format!(
            "an acknowledged message is in files of a majority of {replicas} servers; it is lost if a majority of \
             their machines crash before they have synced"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> Config {
        Config { name: "S".to_owned(), num_replicas: 1, ..Config::default() }
    }

    #[test]
    fn streams_that_forget_are_refused_in_words() {
        let refused = |config: &Config| check_settings(config, Direction::Out, false, None).unwrap_err();
        assert_eq!(check_settings(&config(), Direction::Out, false, None), Ok(()));
        for (retention, word) in [(RetentionPolicy::WorkQueue, "work queue"), (RetentionPolicy::Interest, "interest")] {
            assert!(refused(&Config { retention, ..config() }).contains(word));
        }
        assert!(refused(&Config { no_ack: true, ..config() }).contains("no_ack"));
        for limited in [
            Config { max_age: Duration::from_secs(60), ..config() },
            Config { max_bytes: 1000, ..config() },
            Config { max_messages: 10, ..config() },
            Config { max_messages_per_subject: 1, ..config() },
        ] {
            assert!(refused(&limited).contains("--allow-limits"), "{}", refused(&limited));
            assert_eq!(check_settings(&limited, Direction::Out, true, None), Ok(()));
        }
        let full = Config { max_bytes: 1000, discard: DiscardPolicy::New, ..config() };
        assert_eq!(check_settings(&full, Direction::Out, false, None), Ok(()));
    }

    #[test]
    fn too_few_replicas_are_refused() {
        let refused = check_settings(&config(), Direction::In, false, Some(3)).unwrap_err();
        assert!(refused.contains("1 replicas") && refused.contains('3'), "{refused}");
    }
}
