//! The common part of `send`, `recv` and `flush`: the channel and its options, waiting for the other side, the report.
//! Also how `call` and `ping` connect to a service.

use crate::{
    descriptors,
    failure::{Failure, print_stderr},
    notify::{self, notify},
    report::{Ended, Lateness, Report},
    signals::{SLICE, Signals},
};
use clap::{Args, ValueEnum};
use pelton::{Client, Counters, Error, Listener, Options, Receiver};
use rustix::event::PollFlags;
use std::{
    io::{IsTerminal as _, Write as _},
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// Longer than a handshake on a busy machine, and about as long as a Ctrl-C may take. A guess.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(1);
/// After this wait, a user at a terminal reads what the command waits for. A guess.
const NOTICE_DELAY: Duration = Duration::from_secs(1);
/// Between two attempts to connect, as in the library.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Options of `send`, `recv` and `flush`.
#[derive(Args)]
pub struct ChannelArgs {
    /// The channel: a short name, unix:PATH for a socket at PATH, or path:DIR for a directory that keeps it
    pub name: String,
    /// Fail if the other side has not appeared after this time [default: wait without limit]
    ///
    /// For path:DIR, also the time to wait for another process that has the same role to end [default: 0.2 s].
    #[arg(long, value_name = "SECONDS", value_parser = crate::seconds)]
    timeout: Option<Duration>,
    /// How to wait for the other side once connected
    #[arg(long, value_enum, default_value_t = WaitArg::Block)]
    pub wait: WaitArg,
    /// Size of the channel's memory, with K, M or G; a message has at most half of it less 32 bytes [default: 64M]
    ///
    /// For path:DIR, the side that creates the channel sets it. By another name the sender sets it, and `recv`, `flush`
    /// and `record` refuse the option: they limit all senders together by --memory.
    #[arg(long, value_name = "BYTES", value_parser = crate::bytes)]
    pub capacity: Option<u64>,
    /// Permission bits of the directory path:DIR, which restrict its users [default: 700]
    #[arg(long, value_name = "OCTAL", value_parser = octal)]
    mode: Option<u32>,
    /// Limit of senders at a time: for path:DIR, set by the side which creates it [default: 1]; for recv --follow NAME
    /// [default: 1024]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub lanes: Option<u32>,
    /// Another user whose processes may be the other side; repeatable. Both sides need the option.
    #[arg(long = "uid", value_name = "UID")]
    uids: Vec<u32>,
    /// Report one JSON object at the end
    #[arg(long)]
    pub json: bool,
}

/// Options of `recv` and `flush`.
#[derive(Args)]
pub struct ReceiveArgs {
    #[command(flatten)]
    pub channel: ChannelArgs,
    /// Connect to a `send --listen` instead of listening
    #[arg(long)]
    connect: bool,
    /// Accept every sender until interrupted; with path:DIR, wait for the next one after the last has left
    #[arg(long)]
    pub follow: bool,
    /// Limit of the memory of all senders' lanes together, with K, M or G [default: none; for another user's sender
    /// 64M]
    ///
    /// A new sender is offered a sixteenth of the remaining memory, and is refused if that is less than 64K. For
    /// path:DIR, and without --follow, a larger lane is refused.
    #[arg(long, value_name = "BYTES", value_parser = crate::bytes)]
    memory: Option<u64>,
}

impl ReceiveArgs {
    /// The transport of the channel.
    pub fn transport(&self) -> Result<Transport, Failure> {
        let lanes = self.channel.lanes.is_some() && !self.follow;
        let path_options = [("--lanes", lanes), ("--capacity", self.channel.capacity.is_some())];
        let transport = self.channel.transport(&[("--connect", self.connect)], &path_options)?;
        if self.connect && self.follow {
            return Err(Failure::Input("--follow takes senders in as they connect: leave --connect out".to_owned()));
        }
        Ok(transport)
    }

    /// Listens, or connects, until the sender has connected. A path channel needs no sender to be opened.
    pub fn open_receiver(
        &self,
        transport: &Transport,
        signals: &Signals,
        options: Options,
    ) -> Result<Receiver, Failure> {
        let channel = &self.channel;
        let options = self.memory.into_iter().fold(options, Options::memory);
        let receiver = match transport {
            Transport::Path(directory) => channel.claim(signals, || options.cast().create_receiver(directory))?,
            Transport::Connect if self.connect => channel.connect("listening sender", signals, |limit| {
                options.cast().handshake(limit).connect_receiver(&channel.name)
            })?,
            Transport::Connect if self.follow => {
                descriptors::raise("senders", 3);
                options.cast().gather_at(&channel.name)?
            }
            Transport::Connect => {
                let listener = options.cast().listen(&channel.name)?;
                notify(notify::READY);
                return channel
                    .accept("sender", signals, &listener, |deadline| listener.accept_receiver_until(deadline));
            }
        };
        notify(notify::READY);
        Ok(receiver)
    }

    /// When the wait for a sender ends, if the receiver was opened without one: a path channel, or `--follow`.
    pub fn peer_deadline(&self, transport: &Transport) -> Option<Instant> {
        if transport.keeps_messages() || self.follow { self.channel.peer_deadline() } else { None }
    }

    /// The result of the command, and the report of `--json`.
    pub fn finish(
        &self,
        command: &'static str,
        done: Result<Ended, StreamError>,
        traffic: &Traffic,
        seconds: f64,
        counters: Counters,
    ) -> Result<(), Failure> {
        let name = &self.channel.name;
        let (ended, unreleased, result) = match done {
            Ok(ended) => (ended, 0, Ok(())),
            Err(StreamError::Channel(pelton::Error::PeerDied { unreleased })) => {
                let text = format!("the sender on `{name}` died after {} messages, without closing", traffic.messages);
                (Ended::PeerDied, unreleased, Err(Failure::Peer(text)))
            }
            Err(StreamError::Channel(error)) => (Ended::Failed, 0, Err(error.into())),
            Err(StreamError::Other(failure)) => (Ended::by(&failure), 0, Err(failure)),
        };
        if self.channel.json {
            let end = Ending { ended, result: &result, unreleased, seconds, lateness_ns: None, missed: None };
            let report = self.channel.report(command, traffic, end, counters);
            let _ = std::io::stderr().write_all(report.as_bytes());
        }
        result
    }
}

/// How the two sides of a channel find each other.
pub enum Transport {
    /// A short name or `unix:PATH`, which the library parses: one side listens, the other connects.
    Connect,
    /// `path:DIR`: a directory has the channel, and either side may start first.
    Path(PathBuf),
}

impl Transport {
    /// Whether messages outlive both sides.
    pub fn keeps_messages(&self) -> bool {
        matches!(self, Transport::Path(_))
    }
}

/// An option, and whether the command line has it.
pub type OptionUse = (&'static str, bool);

impl ChannelArgs {
    /// The transport of the channel. Fails if an option does not fit it: `connect_options` with a path channel,
    /// `path_options` with another.
    pub fn transport(&self, connect_options: &[OptionUse], path_options: &[OptionUse]) -> Result<Transport, Failure> {
        let first_used = |options: &[OptionUse]| options.iter().find(|(_, is_used)| *is_used).map(|(name, _)| *name);
        match self.name.strip_prefix("path:") {
            Some("") => Err(Failure::Refused("\"path:\" has no directory: write path:DIR".to_string())),
            Some(directory) => match first_used(connect_options) {
                Some(option) => Err(Failure::Input(format!(
                    "{option} does not apply to `{}`, where either side may start first: leave it out",
                    self.name
                ))),
                None => Ok(Transport::Path(PathBuf::from(directory))),
            },
            None => match first_used(&[("--mode", self.mode.is_some())]).or_else(|| first_used(path_options)) {
                Some(option) => Err(Failure::Input(format!(
                    "{option} is only for a channel in a directory, found `{}`: leave it out, or write path:DIR",
                    self.name
                ))),
                None => Ok(Transport::Connect),
            },
        }
    }

    /// As [`ChannelArgs::transport`], for a broadcast, which `--lanes` does not fit either.
    pub fn broadcast_transport(&self, path_options: &[OptionUse]) -> Result<Transport, Failure> {
        if self.lanes.is_some() {
            let text = "--lanes does not apply to a broadcast, which has one publisher: leave it out";
            return Err(Failure::Input(text.to_string()));
        }
        self.transport(&[], path_options)
    }

    /// The options for the library.
    pub fn options(&self) -> Options {
        let mut options = Options::new().wait(self.wait.into()).allow_uids(&self.uids);
        if let Some(bytes) = self.capacity {
            options = options.capacity(bytes);
        }
        if let Some(bits) = self.mode {
            options = options.mode(bits);
        }
        if let Some(lanes) = self.lanes {
            options = options.lanes(lanes);
        }
        options
    }

    /// When the wait for the other side ends, counted from now; `None`: never.
    pub fn peer_deadline(&self) -> Option<Instant> {
        self.timeout.and_then(|timeout| Instant::now().checked_add(timeout))
    }

    /// Calls `poll_peer` with deadlines one [`SLICE`] apart until it returns a value. Between two calls, a signal ends
    /// the wait.
    pub fn wait_for_peer<T>(
        &self,
        peer_name: &str,
        signals: &Signals,
        mut poll_peer: impl FnMut(Instant) -> pelton::Result<Option<T>>,
    ) -> Result<T, Failure> {
        let until = self.peer_deadline();
        let mut notice = self.notice(&format!("a {peer_name}"));
        loop {
            notice.check();
            let now = Instant::now();
            let slice = until.map_or(now + SLICE, |until| until.min(now + SLICE));
            if let Some(done) = poll_peer(slice)? {
                return Ok(done);
            }
            signals.check()?;
            if until.is_some_and(|until| until <= now) {
                return Err(self.no_peer(peer_name));
            }
        }
    }

    /// Waits for a connection. A signal does not interrupt a handshake: the other side may have completed it, and would
    /// take this process for dead.
    pub fn accept<T>(
        &self,
        peer_name: &str,
        signals: &Signals,
        listener: &Listener,
        mut accept: impl FnMut(Instant) -> pelton::Result<Option<T>>,
    ) -> Result<T, Failure> {
        let until = self.peer_deadline();
        let mut notice = self.notice(&format!("a {peer_name}"));
        loop {
            notice.check();
            let next = until.into_iter().chain(notice.due).min();
            let left = next.map(|next| next.saturating_duration_since(Instant::now()));
            // Bounded, so that it fits the `timespec` of `poll`.
            let left = left.map(|left| left.min(Duration::from_secs(3600)));
            let [connects] = signals.poll([(listener.as_fd(), PollFlags::IN)], left)?;
            if connects && let Some(done) = accept(Instant::now() + HANDSHAKE_TIMEOUT)? {
                return Ok(done);
            }
            if until.is_some_and(|until| until <= Instant::now()) {
                return Err(self.no_peer(peer_name));
            }
        }
    }

    /// Connects once another process listens. `connect` gets the limit of its handshake, which a signal does not
    /// interrupt: see [`ChannelArgs::accept`].
    pub fn connect<T>(
        &self,
        peer_name: &str,
        signals: &Signals,
        mut connect: impl FnMut(Duration) -> pelton::Result<T>,
    ) -> Result<T, Failure> {
        let until = self.peer_deadline();
        let mut notice = self.notice(&format!("a {peer_name}"));
        loop {
            notice.check();
            let left = until.map_or(HANDSHAKE_TIMEOUT, |until| until.saturating_duration_since(Instant::now()));
            match connect(left.min(HANDSHAKE_TIMEOUT)) {
                // No process listens yet, or the listener has stopped or is slow.
                Err(Error::NoListener { .. } | Error::NoChannel { .. } | Error::HungUp | Error::TimedOut(_)) => {}
                done => return Ok(done?),
            }
            if until.is_some_and(|until| until <= Instant::now()) {
                return Err(self.no_peer(peer_name));
            }
            signals.poll([], Some(RETRY_INTERVAL))?;
        }
    }

    /// Opens a path channel. With `--timeout` it waits that long for a role that another process has; between two
    /// attempts, a signal ends the wait. Without it, each attempt waits for the end of a process that was killed.
    pub fn claim<T>(&self, signals: &Signals, open: impl FnMut() -> pelton::Result<T>) -> Result<T, Failure> {
        self.claim_while(signals, |error| matches!(error, Error::RoleTaken { .. }), open)
    }

    /// As [`ChannelArgs::claim`], for errors that may pass.
    pub fn claim_while<T>(
        &self,
        signals: &Signals,
        may_pass: impl Fn(&Error) -> bool,
        mut open: impl FnMut() -> pelton::Result<T>,
    ) -> Result<T, Failure> {
        let until = self.peer_deadline();
        let mut notice = self.notice("its role");
        loop {
            match open() {
                Err(error) if may_pass(&error) && until.is_some_and(|until| Instant::now() < until) => {
                    notice.check();
                    signals.poll([], Some(RETRY_INTERVAL))?;
                }
                done => return Ok(done?),
            }
        }
    }

    /// The line that a user at a terminal reads if the other side does not appear.
    pub fn notice(&self, what: &str) -> Notice {
        let due = std::io::stderr().is_terminal().then(|| Instant::now() + NOTICE_DELAY);
        Notice { text: format!("waiting for {what} on `{}`; Ctrl-C ends the wait", self.name), due }
    }

    /// The failure if the other side has not appeared in time.
    pub fn no_peer(&self, peer_name: &str) -> Failure {
        Failure::TimedOut(format!(
            "no {peer_name} appeared on `{}` within {} s: start one, or wait longer with --timeout",
            self.name,
            self.timeout.unwrap_or_default().as_secs_f64()
        ))
    }

    /// The object of `--json`, as one line.
    pub fn report(&self, command: &'static str, traffic: &Traffic, end: Ending<'_>, counters: Counters) -> String {
        let Ending { ended, result, unreleased, seconds, lateness_ns, missed } = end;
        let error = result.as_ref().err().and_then(Failure::text);
        let error = error.as_deref();
        let (messages, bytes, counters) = (traffic.messages, traffic.bytes, counters.into());
        let name = &self.name;
        Report { command, name, messages, bytes, seconds, ended, error, unreleased, counters, lateness_ns, missed }
            .line()
    }
}

/// A line on the terminal that names what the command waits for. Without it, a wait looks like a hang.
pub struct Notice {
    text: String,
    /// When to print it; `None` once it is printed, or not needed.
    pub due: Option<Instant>,
}

impl Notice {
    /// Prints the line once it is due.
    pub fn check(&mut self) {
        if self.due.is_some_and(|due| due <= Instant::now()) {
            self.due = None;
            print_stderr(&self.text);
        }
    }

    /// The other side has appeared, so the line is not printed.
    pub fn cancel(&mut self) {
        self.due = None;
    }
}

/// How a command ended.
pub struct Ending<'a> {
    pub ended: Ended,
    pub result: &'a Result<(), Failure>,
    pub unreleased: u64,
    pub seconds: f64,
    pub lateness_ns: Option<Lateness>,
    /// Of a subscriber.
    pub missed: Option<u64>,
}

/// Messages sent or received so far.
#[derive(Default)]
pub struct Traffic {
    pub messages: u64,
    pub bytes: u64,
}

impl Traffic {
    /// Counts one message.
    pub fn count(&mut self, message: &[u8]) {
        self.messages += 1;
        self.bytes += message.len() as u64;
    }
}

/// Why a stream of messages failed.
pub enum StreamError {
    Channel(pelton::Error),
    Other(Failure),
}

impl From<pelton::Error> for StreamError {
    fn from(error: pelton::Error) -> StreamError {
        StreamError::Channel(error)
    }
}

impl From<Failure> for StreamError {
    fn from(failure: Failure) -> StreamError {
        StreamError::Other(failure)
    }
}

/// Connects to a service. Waits until it listens, without `timeout` for ever. A signal ends the wait.
pub(crate) fn connect_client(
    name: &str,
    uids: &[u32],
    timeout: Option<Duration>,
    signals: &Signals,
) -> Result<Client, Failure> {
    let options = Options::new().allow_uids(uids);
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        let now = Instant::now();
        let slice = deadline.map_or(now + SLICE, |deadline| deadline.min(now + SLICE));
        if let Some(client) = none_if_timed_out(Client::connect_with(name, &options.clone().connect_deadline(slice)))? {
            return Ok(client);
        }
        signals.check()?;
        if deadline.is_some_and(|deadline| deadline <= now) {
            return Err(Failure::TimedOut(format!(
                "no service appeared on `{name}` within {} s (a receiver is none): start one, or wait longer with \
                 --timeout",
                timeout.unwrap_or_default().as_secs_f64()
            )));
        }
    }
}

/// Turns a timeout, after which the caller connects again, into `None`.
fn none_if_timed_out<T>(done: pelton::Result<T>) -> pelton::Result<Option<T>> {
    match done {
        Err(pelton::Error::TimedOut(_)) => Ok(None),
        done => done.map(Some),
    }
}

/// Values of `--wait`.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WaitArg {
    /// Keep a core busy: the lowest latency
    Spin,
    /// Spin briefly, then sleep
    Block,
}

impl From<WaitArg> for pelton::Wait {
    fn from(wait: WaitArg) -> pelton::Wait {
        match wait {
            WaitArg::Spin => pelton::Wait::Spin,
            WaitArg::Block => pelton::Wait::Block,
        }
    }
}

/// Parses permission bits.
fn octal(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(bits @ ..=0o777) => Ok(bits),
        _ => Err("want permission bits in octal, such as 700 or 770".to_string()),
    }
}

/// The directory in an argument DIR or path:DIR.
pub fn directory(text: &str) -> &Path {
    Path::new(text.strip_prefix("path:").unwrap_or(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permission_bits_are_octal() {
        assert_eq!(octal("700"), Ok(0o700));
        assert_eq!(octal("0770"), Ok(0o770));
        for bad in ["", "1777", "8", "rwx", "-1"] {
            assert!(octal(bad).is_err(), "{bad}");
        }
    }
}
