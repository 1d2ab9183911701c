//! What `send`, `recv` and `flush` have in common: where the channel is and how it is opened, waiting for the other side, and the report.

use crate::{
    descriptors,
    failure::{Failure, say},
    report::{Ended, Report},
    signals::{SLICE, Signals},
};
use clap::{Args, ValueEnum};
use pelton::{Counters, Error, Listener, Options, Receiver};
use rustix::event::PollFlags;
use std::{
    io::{IsTerminal as _, Write as _},
    os::fd::AsFd as _,
    path::PathBuf,
    time::{Duration, Instant},
};

/// Longer than a handshake takes on a machine that is busy with other work, and hardly longer than a Ctrl-C may take. A guess.
const HANDSHAKE: Duration = Duration::from_secs(1);
/// A user at a terminal who waits for so long asks why. A guess.
const NOTICE_DELAY: Duration = Duration::from_secs(1);
/// Between two looks whether somebody listens by now: as the library has it.
const RETRY: Duration = Duration::from_millis(10);

/// Options of `send`, `recv` and `flush`.
#[derive(Args)]
pub struct ChannelArgs {
    /// The channel: a short name, unix:PATH for a socket at PATH, or path:DIR for a directory that keeps it
    pub name: String,
    /// Give up when the other side has not appeared after so long [default: wait for ever]
    #[arg(long, value_name = "SECONDS", value_parser = crate::seconds)]
    timeout: Option<Duration>,
    /// How to wait for the other side once connected
    #[arg(long, value_enum, default_value_t = WaitArg::Block)]
    pub wait: WaitArg,
    /// Size of the channel's memory, with K, M or G; a message has at most half of it less 32 bytes [default: 64M]
    ///
    /// The lesser of what both sides say; of path:DIR whoever makes the channel decides.
    #[arg(long, value_name = "BYTES", value_parser = crate::bytes)]
    pub capacity: Option<u64>,
    /// Who may open path:DIR: the permission bits of the directory [default: 700]
    #[arg(long, value_name = "OCTAL", value_parser = octal)]
    mode: Option<u32>,
    /// The most senders that path:DIR can have at a time, said by whoever makes it [default: 1]; of recv --follow NAME
    /// [default: 1024]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub lanes: Option<u32>,
    /// A user that may be at the other end besides this one; several times for several. Both sides have to say so.
    #[arg(long = "uid", value_name = "UID")]
    uids: Vec<u32>,
    /// Report as one JSON object at the end
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
    /// Take in every sender that comes, as many as there are, until interrupted; with path:DIR, wait for the next one when
    /// the last has gone
    #[arg(long)]
    pub follow: bool,
    /// Limit of the memory of all senders' lanes together, with K, M or G [default: none; of another user's sender 64M]
    ///
    /// Each new sender is offered a sixteenth of what is left, and is refused when that is less than 64K. Of path:DIR, and without --follow, a lane that is
    /// larger is refused.
    #[arg(long, value_name = "BYTES", value_parser = crate::bytes)]
    memory: Option<u64>,
}

impl ReceiveArgs {
    /// Where the channel is.
    pub fn place(&self) -> Result<Place, Failure> {
        let lanes = self.channel.lanes.is_some() && !self.follow;
        let of_directories = [("--lanes", lanes), ("--capacity", self.channel.capacity.is_some())];
        let place = self.channel.place(&[("--connect", self.connect)], &of_directories)?;
        if self.connect && self.follow {
            return Err(Failure::Input("--follow takes senders in as they connect: leave --connect out".to_owned()));
        }
        Ok(place)
    }

    /// Listens, or connects, until the sender is there; a channel in a directory is opened whether it is or not.
    pub fn appear(&self, place: &Place, signals: &Signals, options: Options) -> Result<Receiver, Failure> {
        let channel = &self.channel;
        let options = self.memory.into_iter().fold(options, Options::memory);
        match place {
            Place::Directory(directory) => Ok(options.create_receiver(directory)?),
            Place::Socket if self.connect => channel.connect("listening sender", signals, |limit| {
                options.clone().handshake(limit).connect_receiver(&channel.name)
            }),
            Place::Socket if self.follow => {
                descriptors::raise("senders", 3);
                Ok(options.gather_at(&channel.name)?)
            }
            Place::Socket => {
                let listener = options.listen(&channel.name)?;
                channel.accept("sender", signals, &listener, |deadline| listener.accept_receiver_until(deadline))
            }
        }
    }

    /// Until when a channel in a directory, or one that takes in every sender, is to have one.
    pub fn appear_by(&self, place: &Place) -> Option<Instant> {
        if place.keeps() || self.follow { self.channel.appear_by() } else { None }
    }

    /// Tells what became of it: by the answer, and by `--json`.
    pub fn finish(
        &self,
        command: &'static str,
        done: Result<Ended, Stop>,
        passed: &Passed,
        seconds: f64,
        counters: Counters,
    ) -> Result<(), Failure> {
        let name = &self.channel.name;
        let (ended, unreleased, result) = match done {
            Ok(ended) => (ended, 0, Ok(())),
            Err(Stop::Channel(pelton::Error::PeerDied { unreleased })) => {
                let text = format!("the sender on `{name}` died after {} messages, without closing", passed.messages);
                (Ended::PeerDied, unreleased, Err(Failure::Peer(text)))
            }
            Err(Stop::Channel(error)) => (Ended::Failed, 0, Err(error.into())),
            Err(Stop::Other(failure)) => (Ended::by(&failure), 0, Err(failure)),
        };
        if self.channel.json {
            let end = End { ended, result: &result, unreleased, seconds };
            let report = self.channel.report(command, passed, end, counters);
            let _ = std::io::stderr().write_all(report.as_bytes());
        }
        result
    }
}

/// Where a channel is.
pub enum Place {
    /// A short name or `unix:PATH`, which the library reads: one side listens there, the other connects.
    Socket,
    /// `path:DIR`: a directory keeps the channel, and either side may come first.
    Directory(PathBuf),
}

impl Place {
    /// Whether the channel outlives its two sides.
    pub fn keeps(&self) -> bool {
        matches!(self, Place::Directory(_))
    }
}

/// An option, and whether it was given.
pub type Given = (&'static str, bool);

impl ChannelArgs {
    /// Where the channel is. Fails when options were given that mean nothing there: `of_sockets` in a directory, `of_directories`
    /// elsewhere.
    pub fn place(&self, of_sockets: &[Given], of_directories: &[Given]) -> Result<Place, Failure> {
        let first_given = |options: &[Given]| options.iter().find(|(_, given)| *given).map(|(name, _)| *name);
        match self.name.strip_prefix("path:") {
            Some("") => Err(Failure::Refused("\"path:\" names no directory: write path:DIR".to_string())),
            Some(directory) => match first_given(of_sockets) {
                Some(option) => Err(Failure::Input(format!(
                    "{option} means nothing for `{}`, where either side may come first: leave it out",
                    self.name
                ))),
                None => Ok(Place::Directory(PathBuf::from(directory))),
            },
            None => match first_given(&[("--mode", self.mode.is_some())]).or_else(|| first_given(of_directories)) {
                Some(option) => Err(Failure::Input(format!(
                    "{option} is only for a channel in a directory, found `{}`: leave it out, or write path:DIR",
                    self.name
                ))),
                None => Ok(Place::Socket),
            },
        }
    }

    /// What the library is to be told.
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

    /// When to stop waiting for the other side to appear, counted from now; `None` is never.
    pub fn appear_by(&self) -> Option<Instant> {
        self.timeout.and_then(|timeout| Instant::now().checked_add(timeout))
    }

    /// Looks for the other side until it is there, each time for as long as `look` is told; in between a signal is noticed.
    pub fn appear<T>(
        &self,
        wanted: &str,
        signals: &Signals,
        mut look: impl FnMut(Instant) -> pelton::Result<Option<T>>,
    ) -> Result<T, Failure> {
        let until = self.appear_by();
        let mut notice = self.notice(&format!("a {wanted}"));
        loop {
            notice.check();
            let now = Instant::now();
            let slice = until.map_or(now + SLICE, |until| until.min(now + SLICE));
            if let Some(there) = look(slice)? {
                return Ok(there);
            }
            signals.check()?;
            if until.is_some_and(|until| until <= now) {
                return Err(self.nobody(wanted));
            }
        }
    }

    /// Waits until somebody connects. A handshake that has begun is not ended to check for signals: the other side may have finished it, and would
    /// take this one for dead.
    pub fn accept<T>(
        &self,
        wanted: &str,
        signals: &Signals,
        listener: &Listener,
        mut accept: impl FnMut(Instant) -> pelton::Result<Option<T>>,
    ) -> Result<T, Failure> {
        let until = self.appear_by();
        let mut notice = self.notice(&format!("a {wanted}"));
        loop {
            notice.check();
            let next = until.into_iter().chain(notice.due).min();
            let left = next.map(|next| next.saturating_duration_since(Instant::now()));
            // The kernel takes no wait without bounds.
            let left = left.map(|left| left.min(Duration::from_secs(3600)));
            let [connects] = signals.poll([(listener.as_fd(), PollFlags::IN)], left)?;
            if connects && let Some(there) = accept(Instant::now() + HANDSHAKE)? {
                return Ok(there);
            }
            if until.is_some_and(|until| until <= Instant::now()) {
                return Err(self.nobody(wanted));
            }
        }
    }

    /// Connects, as soon as somebody listens; `connect` gets the limit of its handshake. The handshake is not ended to check for signals: see
    /// [`ChannelArgs::accept`].
    pub fn connect<T>(
        &self,
        wanted: &str,
        signals: &Signals,
        mut connect: impl FnMut(Duration) -> pelton::Result<T>,
    ) -> Result<T, Failure> {
        let until = self.appear_by();
        let mut notice = self.notice(&format!("a {wanted}"));
        loop {
            notice.check();
            let left = until.map_or(HANDSHAKE, |until| until.saturating_duration_since(Instant::now()));
            match connect(left.min(HANDSHAKE)) {
                // Nobody listens yet, or has stopped, or is slow.
                Err(Error::NoListener { .. } | Error::HungUp | Error::TimedOut(_)) => {}
                done => return Ok(done?),
            }
            if until.is_some_and(|until| until <= Instant::now()) {
                return Err(self.nobody(wanted));
            }
            signals.poll([], Some(RETRY))?;
        }
    }

    /// The line that a user at a terminal sees when the other side does not appear.
    pub fn notice(&self, what: &str) -> Notice {
        let due = std::io::stderr().is_terminal().then(|| Instant::now() + NOTICE_DELAY);
        Notice { text: format!("waiting for {what} on `{}`; Ctrl-C ends the wait", self.name), due }
    }

    /// The failure of the other side not having appeared in time.
    pub fn nobody(&self, wanted: &str) -> Failure {
        Failure::TimedOut(format!(
            "no {wanted} appeared on `{}` within {} s: start one, or wait longer with --timeout",
            self.name,
            self.timeout.unwrap_or_default().as_secs_f64()
        ))
    }

    /// The object of `--json`, on a line of its own.
    pub fn report(&self, command: &'static str, passed: &Passed, end: End<'_>, counters: Counters) -> String {
        let End { ended, result, unreleased, seconds } = end;
        let error = result.as_ref().err().and_then(Failure::text);
        let error = error.as_deref();
        let (messages, bytes, counters) = (passed.messages, passed.bytes, counters.into());
        let name = &self.name;
        Report { command, name, messages, bytes, seconds, ended, error, unreleased, counters }.line()
    }
}

/// A line on the terminal that says what the command waits for: a wait without it looks like a hang.
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
            say(&self.text);
        }
    }

    /// The other side has appeared: the line is not needed.
    pub fn cancel(&mut self) {
        self.due = None;
    }
}

/// How a command ended.
pub struct End<'a> {
    pub ended: Ended,
    pub result: &'a Result<(), Failure>,
    pub unreleased: u64,
    pub seconds: f64,
}

/// What has gone through.
#[derive(Default)]
pub struct Passed {
    pub messages: u64,
    pub bytes: u64,
}

impl Passed {
    /// One message more.
    pub fn count(&mut self, message: &[u8]) {
        self.messages += 1;
        self.bytes += message.len() as u64;
    }
}

/// Why the messages stopped early.
pub enum Stop {
    Channel(pelton::Error),
    Other(Failure),
}

impl From<pelton::Error> for Stop {
    fn from(error: pelton::Error) -> Stop {
        Stop::Channel(error)
    }
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Stop {
        Stop::Other(failure)
    }
}

/// Does not wait: lets `connect`, which has a deadline, be asked again. Its passing is no failure.
pub fn unless_timed_out<T>(done: pelton::Result<T>) -> pelton::Result<Option<T>> {
    match done {
        Err(pelton::Error::TimedOut(_)) => Ok(None),
        done => done.map(Some),
    }
}

/// `--wait`, in the words of the command line.
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

/// Permission bits.
fn octal(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(bits @ ..=0o777) => Ok(bits),
        _ => Err("want permission bits in octal, such as 700 or 770".to_string()),
    }
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
