//! `pelton recv`: a channel to standard output.
//!
//! While messages flow, each is copied into one output buffer, which is written when it is large or the lane is empty. A message
//! is released when it is in that buffer. While none come, one poll waits for the channel, the signals and the going of standard
//! output's reader.
//!
//! Writing must not outlast a Ctrl-C when the reader of a pipe has stopped reading, so a pipe or terminal is opened anew without
//! blocking (the flag on the one that was inherited would be everybody's).

use crate::{
    ChannelArgs, WaitArg,
    failure::Failure,
    progress::Progress,
    report::{Ended, Report},
    signals::{SLICE, Signals},
};
use clap::Args;
use pelton::{Options, Receiver};
use rustix::{
    event::PollFlags,
    fs::{FileType, Mode, OFlags},
    io::Errno,
    net::SendFlags,
};
use std::{
    io::{IsTerminal as _, Write as _},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

/// Write when so much has gathered. Large enough that a write's cost vanishes, small enough to stay in the cache. A guess.
const WRITE_BYTES: usize = 256 * 1024;
/// How long an empty lane is watched before what has gathered is written: a sender about as fast as this receiver would else
/// cost a write per message. Nobody sees the delay. A guess.
const LINGER: Duration = Duration::from_micros(20);
/// How long waiting is left to the library before the signals are polled as well. Longer than it spins, too short to be noticed.
const FIRST_WAIT: Duration = Duration::from_millis(1);

/// Options of `pelton recv`.
#[derive(Args)]
pub struct RecvArgs {
    #[command(flatten)]
    channel: ChannelArgs,
    /// Connect to a `send --listen` instead of listening
    #[arg(long)]
    connect: bool,
    /// Close after so many messages
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
}

/// Runs `pelton recv`.
pub fn run(args: &RecvArgs) -> Result<(), Failure> {
    let signals = Signals::install()?;
    let mut receiver = appear(args, &signals)?;
    let started = Instant::now();
    let mut output = Output::new();
    let mut received = Passed::default();
    let done = stream(args, &mut receiver, &mut output, &mut received, &signals);
    let counters = receiver.counters();
    // what could go wrong with it would change nothing: the sender is told by it, or by our end
    let _ = receiver.close();
    let seconds = started.elapsed().as_secs_f64();

    let (ended, unreleased, result) = match done {
        Ok(ended) => (ended, 0, Ok(())),
        Err(Stop::Channel(pelton::Error::PeerDied { unreleased })) => {
            let text = format!(
                "the sender on `{}` died after {} messages, without closing",
                args.channel.name, received.messages
            );
            (Ended::PeerDied, unreleased, Err(Failure::Peer(text)))
        }
        Err(Stop::Channel(error)) => (Ended::Failed, 0, Err(error.into())),
        Err(Stop::Other(failure)) => (Ended::by(&failure), 0, Err(failure)),
    };
    if args.channel.json {
        let error = result.as_ref().err().and_then(Failure::text);
        let (messages, bytes, counters) = (received.messages, received.bytes, counters.into());
        let report = Report {
            command: "recv",
            name: &args.channel.name,
            messages,
            bytes,
            seconds,
            ended,
            error,
            unreleased,
            counters,
        };
        let _ = std::io::stderr().write_all(report.line().as_bytes());
    }
    result
}

/// Listens, or connects, until the sender is there.
fn appear(args: &RecvArgs, signals: &Signals) -> Result<Receiver, Failure> {
    let ChannelArgs { name, wait, .. } = &args.channel;
    let options = Options::new().wait((*wait).into());
    let until = args.channel.appear_by();
    let listener = if args.connect { None } else { Some(options.listen(name)?) };
    loop {
        let now = Instant::now();
        let slice = until.map_or(now + SLICE, |until| until.min(now + SLICE));
        if let Some(listener) = &listener {
            if let Some(receiver) = listener.accept_receiver_until(slice)? {
                return Ok(receiver);
            }
        } else {
            match options.clone().connect_deadline(slice).connect_receiver(name) {
                Err(pelton::Error::TimedOut(_)) => {}
                done => return Ok(done?),
            }
        }
        signals.check()?;
        if until.is_some_and(|until| until <= now) {
            return Err(args.channel.nobody(if args.connect { "listening sender" } else { "sender" }));
        }
    }
}

/// What has come.
#[derive(Default)]
struct Passed {
    messages: u64,
    bytes: u64,
}

/// Why receiving stopped before the sender closed.
enum Stop {
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

/// Writes every message until the sender closes or enough have come, and then what is left in the buffer, whatever the end was.
fn stream(
    args: &RecvArgs,
    receiver: &mut Receiver,
    output: &mut Output,
    received: &mut Passed,
    signals: &Signals,
) -> Result<Ended, Stop> {
    let done = receive_all(args, receiver, output, received, signals);
    match done {
        Err(Stop::Other(Failure::Signal(_))) => output.write_what_goes(),
        Err(Stop::Other(_)) => {}
        Ok(_) | Err(Stop::Channel(_)) => output.write(signals)?,
    }
    done
}

fn receive_all(
    args: &RecvArgs,
    receiver: &mut Receiver,
    output: &mut Output,
    received: &mut Passed,
    signals: &Signals,
) -> Result<Ended, Stop> {
    let mut progress = Progress::new(None, std::io::stdout().is_terminal());
    let mut waiting = Waiting::Not;
    loop {
        let next = match waiting {
            Waiting::Not => receiver.try_receive(),
            Waiting::Linger => receiver.receive_until(Instant::now() + LINGER),
            Waiting::First if args.channel.wait == WaitArg::Spin => receiver.receive_until(Instant::now() + SLICE),
            Waiting::First => receiver.receive_until(Instant::now() + FIRST_WAIT),
        };
        // `map`: what is received is released before anything else is done
        let came = next.map(|message| {
            let message = message?;
            received.messages += 1;
            received.bytes += message.len() as u64;
            args.channel.frame.write(&message, &mut output.buffer);
            Some(())
        });
        let came = match came {
            Ok(came) => came.is_some(),
            Err(pelton::Error::Closed { .. }) => return Ok(Ended::Closed),
            Err(error) => return Err(error.into()),
        };
        if came {
            waiting = Waiting::Not;
            if output.buffer.len() >= WRITE_BYTES {
                output.write(signals)?;
                progress.at(received.messages, received.bytes);
            }
            if args.count == Some(received.messages) {
                return Ok(Ended::Counted);
            }
        } else {
            match waiting {
                Waiting::Not if output.buffer.is_empty() => waiting = Waiting::First,
                Waiting::Not => waiting = Waiting::Linger,
                Waiting::Linger => {
                    output.write(signals)?;
                    waiting = Waiting::First;
                }
                Waiting::First => {
                    idle(args.channel.wait, receiver, output, signals)?;
                    waiting = Waiting::Not;
                }
            }
        }
        signals.check()?;
    }
}

/// How the next message is waited for: each time none comes, one step further.
#[derive(Clone, Copy)]
enum Waiting {
    /// Messages flow.
    Not,
    /// The lane was empty; the output is not written yet.
    Linger,
    /// The output is written; the library waits as it knows best.
    First,
}

/// Sleeps until a message comes or somebody goes; when spinning, only looks whether somebody has gone.
fn idle(wait: WaitArg, receiver: &mut Receiver, output: &Output, signals: &Signals) -> Result<(), Stop> {
    let timeout = (wait == WaitArg::Spin).then_some(Duration::ZERO);
    if !receiver.arm()? {
        return Ok(());
    }
    // no events asked for: only an error, or that nobody reads any more
    let polled = signals.poll([(receiver.as_fd(), PollFlags::IN), (output.as_fd(), PollFlags::empty())], timeout);
    receiver.disarm();
    match polled?[1] {
        true => Err(Failure::OutputClosed.into()),
        false => Ok(()),
    }
}

/// Standard output, and what has gathered for it.
struct Output {
    buffer: Vec<u8>,
    /// the pipe or terminal opened anew
    opened: Option<OwnedFd>,
    is_socket: bool,
    may_block: bool,
}

impl Output {
    fn new() -> Output {
        let stdout = rustix::stdio::stdout();
        let file_type = rustix::fs::fstat(stdout).map(|stat| FileType::from_raw_mode(stat.st_mode));
        let opened = match file_type {
            // where this is not allowed, writing blocks, and a second Ctrl-C ends it
            Ok(FileType::Fifo | FileType::CharacterDevice) => rustix::fs::open(
                "/proc/self/fd/1",
                OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC,
                Mode::empty(),
            )
            .ok(),
            _ => None,
        };
        let is_socket = file_type == Ok(FileType::Socket);
        let may_block = opened.is_none() && !is_socket && file_type != Ok(FileType::RegularFile);
        Output { buffer: Vec::with_capacity(2 * WRITE_BYTES), opened, is_socket, may_block }
    }

    /// Writes all that has gathered.
    fn write(&mut self, signals: &Signals) -> Result<(), Failure> {
        let mut written = 0;
        while written < self.buffer.len() {
            match self.write_once(&self.buffer[written..]) {
                Ok(bytes) => written += bytes,
                Err(Errno::AGAIN) => _ = signals.poll([(self.as_fd(), PollFlags::OUT)], None)?,
                Err(Errno::INTR) => signals.check()?,
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(Failure::OutputClosed),
                Err(error) => return Err(Failure::system("standard output", error)),
            }
        }
        self.buffer.clear();
        Ok(())
    }

    /// Writes what can be written without waiting: these messages are released, nobody else will deliver them.
    fn write_what_goes(&mut self) {
        let mut written = 0;
        while !self.may_block && written < self.buffer.len() {
            match self.write_once(&self.buffer[written..]) {
                Ok(bytes) => written += bytes,
                Err(_) => break,
            }
        }
        self.buffer.clear();
    }

    fn write_once(&self, bytes: &[u8]) -> rustix::io::Result<usize> {
        if self.is_socket {
            return rustix::net::send(self, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
        rustix::io::write(self, bytes)
    }
}

impl AsFd for Output {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.opened.as_ref().map_or(rustix::stdio::stdout(), OwnedFd::as_fd)
    }
}
