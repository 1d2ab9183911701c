//! `pelton send`: standard input to a channel.
//!
//! While input and room are there, a message costs no system call beyond its share of reading the input. Waiting for input polls
//! standard input, the signals and the channel (a receiver that goes is noticed while nothing is typed); waiting for room leaves
//! the first moment to the library, which spins as it knows best, then polls the signals and the channel.

use crate::{
    ChannelArgs, WaitArg,
    failure::Failure,
    frame::Splitter,
    progress::Progress,
    report::{Ended, Report},
    signals::{SLICE, Signals},
};
use clap::Args;
use pelton::{Options, Sender, Sent};
use rustix::event::PollFlags;
use std::{
    io::{IsTerminal as _, Write as _},
    os::fd::AsFd as _,
    time::{Duration, Instant},
};

/// Read at once: large enough that a read's cost vanishes, small enough to stay in the cache. A guess.
const READ_BYTES: usize = 256 * 1024;
/// How long waiting is left to the library before the signals are polled as well. Longer than it spins, too short to be noticed.
const FIRST_WAIT: Duration = Duration::from_millis(1);

/// Options of `pelton send`.
#[derive(Args)]
pub struct SendArgs {
    #[command(flatten)]
    channel: ChannelArgs,
    /// Wait for `recv --connect` instead of connecting to a listening `recv`
    #[arg(long)]
    listen: bool,
    /// Size of the channel's memory, with K, M or G; a message has at most half of it less 32 bytes [default: 64M]
    #[arg(long, value_name = "BYTES", value_parser = crate::bytes)]
    capacity: Option<u64>,
}

/// Runs `pelton send`.
pub fn run(args: &SendArgs) -> Result<(), Failure> {
    let signals = Signals::install()?;
    let mut sender = appear(args, &signals)?;
    let started = Instant::now();
    let mut sent = Passed::default();
    let mut done = stream(args, &mut sender, &mut sent, &signals);
    let mut unreleased = sender.unreleased();
    let counters = sender.counters();
    // after an error it may be the same one again; the first says more
    let closed = sender.close();
    if done.is_ok() {
        done = closed.map_err(Stop::Channel);
    }
    let seconds = started.elapsed().as_secs_f64();

    let (ended, result) = match done {
        Ok(()) => (Ended::Closed, Ok(())),
        // it took everything, then closed first: nothing is missing
        Err(Stop::Channel(pelton::Error::Closed { unreleased: 0 })) if sent.all_sent => (Ended::Closed, Ok(())),
        Err(Stop::Channel(pelton::Error::Closed { unreleased: left })) => {
            unreleased = left;
            (Ended::PeerClosed, Err(sent.failure("closed", &args.channel.name, left)))
        }
        Err(Stop::Channel(pelton::Error::PeerDied { unreleased: left })) => {
            unreleased = left;
            (Ended::PeerDied, Err(sent.failure("died", &args.channel.name, left)))
        }
        Err(Stop::Channel(error)) => (Ended::Failed, Err(error.into())),
        Err(Stop::Other(failure)) => (Ended::by(&failure), Err(failure)),
    };
    if args.channel.json {
        let error = result.as_ref().err().and_then(Failure::text);
        let (messages, bytes, counters) = (sent.messages, sent.bytes, counters.into());
        let report = Report {
            command: "send",
            name: &args.channel.name,
            messages,
            bytes,
            seconds,
            ended,
            error,
            unreleased,
            counters,
        };
        // if nobody reads it, nobody misses it
        let _ = std::io::stdout().write_all(report.line().as_bytes());
    }
    result
}

/// Connects, or listens, until the receiver is there.
fn appear(args: &SendArgs, signals: &Signals) -> Result<Sender, Failure> {
    let ChannelArgs { name, wait, .. } = &args.channel;
    let mut options = Options::new().wait((*wait).into());
    if let Some(capacity) = args.capacity {
        options = options.capacity(capacity);
    }
    let until = args.channel.appear_by();
    let listener = if args.listen { Some(options.listen(name)?) } else { None };
    loop {
        let now = Instant::now();
        let slice = until.map_or(now + SLICE, |until| until.min(now + SLICE));
        if let Some(listener) = &listener {
            if let Some(sender) = listener.accept_sender_until(slice)? {
                return Ok(sender);
            }
        } else {
            match options.clone().connect_deadline(slice).connect_sender(name) {
                Err(pelton::Error::TimedOut(_)) => {}
                done => return Ok(done?),
            }
        }
        signals.check()?;
        if until.is_some_and(|until| until <= now) {
            return Err(args.channel.nobody(if args.listen { "receiver" } else { "listening receiver" }));
        }
    }
}

/// What has gone.
#[derive(Default)]
struct Passed {
    messages: u64,
    bytes: u64,
    all_sent: bool,
}

impl Passed {
    /// The receiver `went`; says what of the input has not reached it.
    fn failure(&self, went: &str, name: &str, unreleased: u64) -> Failure {
        let rest = if self.all_sent { "" } else { ", and the input was not sent to its end" };
        let count = format!("{unreleased} of {} messages were not released", self.messages);
        Failure::Peer(format!("the receiver on `{name}` {went}: {count}{rest}"))
    }
}

/// Why sending stopped early.
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

/// Sends all of standard input and waits until the receiver has released it.
fn stream(args: &SendArgs, sender: &mut Sender, sent: &mut Passed, signals: &Signals) -> Result<(), Stop> {
    let stdin = std::io::stdin();
    let metadata = rustix::fs::fstat(&stdin).map_err(|error| Failure::system("standard input", error))?;
    let is_file = rustix::fs::FileType::from_raw_mode(metadata.st_mode).is_file();
    let mut progress = Progress::new(is_file.then_some(metadata.st_size as u64), stdin.is_terminal());
    // a len32 length cannot say more
    let bytes_max = sender.message_bytes_max().min(u32::MAX.into());
    let mut splitter = Splitter::new(args.channel.frame, bytes_max, READ_BYTES);
    loop {
        while let Some(message) = splitter.next().map_err(|error| Failure::Input(larger(&error)))? {
            signals.check()?;
            send(sender, message, args.channel.wait, signals)?;
            sent.messages += 1;
            sent.bytes += message.len() as u64;
        }
        if splitter.ended() {
            break;
        }
        progress.at(sent.messages, splitter.offset());
        readable(sender, is_file, signals)?;
        let bytes = match rustix::io::read(&stdin, splitter.space()) {
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => continue,
            read => read.map_err(|error| Failure::system("standard input", error))?,
        };
        splitter.filled(bytes);
    }
    sent.all_sent = true;
    while !sender.drain_until(Instant::now() + SLICE)? {
        signals.check()?;
    }
    Ok(())
}

/// The sentence for a frame that is no message, with the way out where there is one.
fn larger(error: &crate::frame::FrameError) -> String {
    match error {
        crate::frame::FrameError::TooLarge { .. } => {
            format!("standard input: {error} (a larger --capacity allows more)")
        }
        crate::frame::FrameError::Truncated { .. } => format!("standard input: {error}"),
    }
}

/// Sends one message, waiting for room.
fn send(sender: &mut Sender, message: &[u8], wait: WaitArg, signals: &Signals) -> Result<(), Stop> {
    if sender.try_send(message)? == Sent::Sent {
        return Ok(());
    }
    loop {
        let first = if wait == WaitArg::Spin { SLICE } else { FIRST_WAIT };
        if sender.send_until(message, Instant::now() + first)? == Sent::Sent {
            return Ok(());
        }
        signals.check()?;
        if wait == WaitArg::Block && sender.arm(message.len())? {
            let polled = signals.poll([(sender.as_fd(), PollFlags::IN)], None);
            sender.disarm();
            polled?;
        }
    }
}

/// Waits until standard input has something to read, or has ended; fails when the receiver goes meanwhile.
fn readable(sender: &mut Sender, is_file: bool, signals: &Signals) -> Result<(), Stop> {
    if is_file {
        return Ok(());
    }
    let stdin = std::io::stdin();
    let mut told_of_room = 0;
    loop {
        let input = (stdin.as_fd(), PollFlags::IN);
        // a ring for room that was waited for earlier may be left over; more than that would keep this loop busy
        let channel = if told_of_room < 3 { PollFlags::IN } else { PollFlags::empty() };
        let [input, channel] = signals.poll([input, (sender.as_fd(), channel)], None)?;
        if channel {
            // fails when the receiver has gone; else the descriptor told of room, which nobody waits for here
            sender.arm(0)?;
            sender.disarm();
            told_of_room += 1;
        }
        if input {
            return Ok(());
        }
    }
}
