//! `pelton send`: standard input to a channel.
//!
//! While input and room are there, a message costs no system call beyond its share of reading the input. Waiting for input polls
//! standard input, the signals and the channel (a receiver that goes is noticed while nothing is typed); waiting for room leaves
//! the first moment to the library, which spins as it knows best, then polls the signals and the channel.

use crate::{
    channel::{ChannelArgs, End, Passed, Place, Stop, WaitArg},
    failure::{Failure, say},
    frame::{Framing, Splitter},
    progress::Progress,
    report::Ended,
    signals::{SLICE, Signals},
};
use clap::Args;
use pelton::{Sender, Sent};
use rustix::event::PollFlags;
use std::{
    io::{IsTerminal as _, Write as _},
    os::{fd::AsFd as _, unix::fs::MetadataExt as _},
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
    /// How messages are told apart in the stream of bytes
    #[arg(long, value_enum, default_value_t = Framing::Lines)]
    frame: Framing,
    /// Wait for `recv --connect` instead of connecting to a listening `recv`
    #[arg(long)]
    listen: bool,
    /// With path:DIR: wait at the end of the input until everything was received, instead of leaving it in the channel
    #[arg(long)]
    drain: bool,
}

/// Runs `pelton send`.
pub fn run(args: &SendArgs) -> Result<(), Failure> {
    let place = args
        .channel
        .place(&[("--listen", args.listen)], &[("--lanes", args.channel.lanes.is_some()), ("--drain", args.drain)])?;
    let signals = Signals::install()?;
    let sender = appear(args, &place, &signals)?;
    let stood = identity(&place);
    let started = Instant::now();
    let keeps = place.keeps();
    let mut sending = Sending { args, keeps, sender, signals: &signals, sent: Passed::default(), all_sent: false };
    let mut done = sending.stream();
    let Sending { mut sender, sent, all_sent, .. } = sending;
    let mut unreleased = sender.unreleased();
    let counters = sender.counters();
    // after an error it may be the same one again; the first says more
    let closed = sender.close();
    if done.is_ok() {
        done = closed.map_err(Stop::Channel);
    }
    let seconds = started.elapsed().as_secs_f64();

    let went = |went: &str, left: u64| {
        let rest = if all_sent { "" } else { ", and the input was not sent to its end" };
        let count = format!("{left} of {} messages were not released", sent.messages);
        Failure::Peer(format!("the receiver on `{}` {went}: {count}{rest}", args.channel.name))
    };
    let (mut ended, mut result) = match done {
        Ok(()) => (Ended::Closed, Ok(())),
        // it took everything, then closed first: nothing is missing
        Err(Stop::Channel(pelton::Error::Closed { unreleased: 0 })) if all_sent => (Ended::Closed, Ok(())),
        Err(Stop::Channel(pelton::Error::Closed { unreleased: left })) => {
            unreleased = left;
            (Ended::PeerClosed, Err(went("closed", left)))
        }
        Err(Stop::Channel(pelton::Error::PeerDied { unreleased: left })) => {
            unreleased = left;
            (Ended::PeerDied, Err(went("died", left)))
        }
        Err(Stop::Channel(error)) => (Ended::Failed, Err(error.into())),
        Err(Stop::Other(failure)) => (Ended::by(&failure), Err(failure)),
    };
    if keeps && result.is_ok() && unreleased > 0 {
        let name = &args.channel.name;
        if identity(&place) == stood {
            say(format!("{unreleased} messages wait in `{name}` for a receiver"));
        } else {
            let text = format!("{unreleased} messages are lost: another program removed or replaced `{name}`");
            (ended, result) = (Ended::Failed, Err(Failure::System(text)));
        }
    }
    if args.channel.json {
        let report = args.channel.report("send", &sent, End { ended, result: &result, unreleased, seconds }, counters);
        // if nobody reads it, nobody misses it
        let _ = std::io::stdout().write_all(report.as_bytes());
    }
    result
}

/// Which directory stands at the channel's path: the device and the inode. `None` without one.
fn identity(place: &Place) -> Option<(u64, u64)> {
    let Place::Directory(directory) = place else { return None };
    std::fs::metadata(directory).ok().map(|found| (found.dev(), found.ino()))
}

/// Connects, or listens, until the receiver is there; a channel in a directory needs none, unless --timeout asks for it.
fn appear(args: &SendArgs, place: &Place, signals: &Signals) -> Result<Sender, Failure> {
    let (channel, options) = (&args.channel, args.channel.options());
    match place {
        Place::Directory(directory) => {
            let mut sender = options.create_sender(directory)?;
            if channel.appear_by().is_some() {
                channel.appear("receiver", signals, |slice| Ok(sender.resume_until(slice)?.then_some(())))?;
            }
            Ok(sender)
        }
        Place::Socket if args.listen => {
            let listener = options.listen(&channel.name)?;
            channel.accept("receiver", signals, &listener, |deadline| listener.accept_sender_until(deadline))
        }
        Place::Socket => {
            let wanted = "receiver that listens and has no sender yet (`recv --follow` takes many)";
            channel.connect(wanted, signals, |limit| options.clone().handshake(limit).connect_sender(&channel.name))
        }
    }
}

/// The sender at work.
struct Sending<'a> {
    args: &'a SendArgs,
    /// Whether the channel keeps its messages when the receiver goes, for the next one.
    keeps: bool,
    sender: Sender,
    signals: &'a Signals,
    sent: Passed,
    all_sent: bool,
}

impl Sending<'_> {
    /// Sends all of standard input and, unless the channel keeps it, waits until the receiver has released it.
    fn stream(&mut self) -> Result<(), Stop> {
        let stdin = std::io::stdin();
        let metadata = rustix::fs::fstat(&stdin).map_err(|error| Failure::system("standard input", error))?;
        let is_file = rustix::fs::FileType::from_raw_mode(metadata.st_mode).is_file();
        let mut progress = Progress::new(is_file.then_some(metadata.st_size as u64), stdin.is_terminal());
        // a len32 length cannot say more
        let bytes_max = self.sender.message_bytes_max().min(u32::MAX.into());
        let mut splitter = Splitter::new(self.args.frame, bytes_max, READ_BYTES);
        loop {
            while let Some(message) = splitter.next().map_err(|error| Failure::Input(larger(&error)))? {
                self.signals.check()?;
                self.send(message)?;
                self.sent.count(message);
            }
            if splitter.ended() {
                break;
            }
            progress.at(self.sent.messages, splitter.offset());
            if !is_file {
                self.await_input()?;
            }
            let bytes = match rustix::io::read(&stdin, splitter.space()) {
                Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => continue,
                read => read.map_err(|error| Failure::system("standard input", error))?,
            };
            splitter.filled(bytes);
        }
        self.all_sent = true;
        if self.keeps && !self.args.drain {
            return Ok(());
        }
        loop {
            let drained = self.sender.drain_until(Instant::now() + SLICE);
            if self.unless_kept(drained)? == Some(true) {
                return Ok(());
            }
            self.signals.check()?;
        }
    }

    /// A receiver that goes is a failure, and `None` where the channel keeps what it left: the library says it once, and goes on.
    fn unless_kept<T>(&self, done: pelton::Result<T>) -> pelton::Result<Option<T>> {
        match done {
            Err(pelton::Error::Closed { .. }) if self.keeps => Ok(None),
            Err(pelton::Error::PeerDied { unreleased }) if self.keeps => {
                let name = &self.args.channel.name;
                let text = format!("the receiver on `{name}` died, {unreleased} messages wait for the next one");
                say(text);
                Ok(None)
            }
            done => done.map(Some),
        }
    }

    /// Sends one message, waiting for room.
    fn send(&mut self, message: &[u8]) -> Result<(), Stop> {
        let sent = self.sender.try_send(message);
        if self.unless_kept(sent)? == Some(Sent::Sent) {
            return Ok(());
        }
        let wait = self.args.channel.wait;
        loop {
            let first = if wait == WaitArg::Spin { SLICE } else { FIRST_WAIT };
            let sent = self.sender.send_until(message, Instant::now() + first);
            if self.unless_kept(sent)? == Some(Sent::Sent) {
                return Ok(());
            }
            self.signals.check()?;
            if wait == WaitArg::Spin {
                continue;
            }
            let armed = self.sender.arm(message.len());
            if self.unless_kept(armed)? == Some(true) {
                let polled = self.signals.poll([(self.sender.as_fd(), PollFlags::IN)], None);
                self.sender.disarm();
                polled?;
            }
        }
    }

    /// Waits until standard input has something to read, or has ended; fails when the receiver goes meanwhile.
    fn await_input(&mut self) -> Result<(), Stop> {
        let stdin = std::io::stdin();
        let mut told_of_room = 0;
        loop {
            let input = (stdin.as_fd(), PollFlags::IN);
            // a ring for room that was waited for earlier may be left over; more than that would keep this loop busy
            let channel = if told_of_room < 3 { PollFlags::IN } else { PollFlags::empty() };
            let [input, channel] = self.signals.poll([input, (self.sender.as_fd(), channel)], None)?;
            if channel {
                // fails when the receiver has gone; else the descriptor told of room, which nobody waits for here
                let armed = self.sender.arm(0);
                self.unless_kept(armed)?;
                self.sender.disarm();
                told_of_room += 1;
            }
            if input {
                return Ok(());
            }
        }
    }
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
