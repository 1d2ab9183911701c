//! `pelton send`: sends standard input to a channel.
//!
//! While there is input and free space, a message costs no system call beyond its share of a read. The wait for input
//! polls standard input, the signals and the channel, so the sender detects a departed receiver without input. The wait
//! for free space starts in the library, which spins; then it polls the signals and the channel.

use crate::{
    channel::{ChannelArgs, Ending, StreamError, Traffic, Transport, WaitArg},
    failure::{Failure, print_stderr},
    frame::{Framing, Splitter},
    progress::{self, Progress},
    report::{Ended, Lateness},
    signals::{SLICE, Signals},
};
use clap::Args;
use pelton::{Armed, Sender, Sent};
use rustix::event::PollFlags;
use std::{
    io::{IsTerminal as _, Write as _},
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::fs::MetadataExt as _,
    },
    time::{Duration, Instant},
};

/// Bytes per read: enough to amortise it, and small enough to stay in the cache. A guess.
const READ_BYTES: usize = 256 * 1024;
/// How long the library waits before the command polls the signals too: longer than it spins, and too short to be
/// noticed.
const LIBRARY_WAIT: Duration = Duration::from_millis(1);

/// Options of `pelton send`.
#[derive(Args)]
pub struct SendArgs {
    #[command(flatten)]
    sender: SenderArgs,
    /// How messages are separated in the stream of bytes
    #[arg(long, value_enum, default_value_t = Framing::Lines)]
    frame: Framing,
}

/// Options of `send` and `replay`.
#[derive(Args)]
pub struct SenderArgs {
    #[command(flatten)]
    pub channel: ChannelArgs,
    /// Wait for `recv --connect` instead of connecting to a listening `recv`
    #[arg(long)]
    listen: bool,
    /// With path:DIR: at the end of the input, wait until every message is received, instead of leaving them in the
    /// channel
    #[arg(long)]
    drain: bool,
}

/// Runs `pelton send`.
pub fn run(args: &SendArgs) -> Result<(), Failure> {
    send_all("send", &args.sender, |send_loop| send_loop.send_input(args.frame))
}

/// Opens the sender, sends what `stream` sends, waits until everything is released, unless the channel keeps it, and
/// reports the end.
pub fn send_all(
    command: &'static str,
    args: &SenderArgs,
    stream: impl FnOnce(&mut SendLoop<'_>) -> Result<(), StreamError>,
) -> Result<(), Failure> {
    let transport = args.channel.transport(
        &[("--listen", args.listen)],
        &[("--lanes", args.channel.lanes.is_some()), ("--drain", args.drain)],
    )?;
    let signals = Signals::install()?;
    let sender = open_sender(args, &transport, &signals)?;
    let directory_at_start = directory_id(&transport);
    let started = Instant::now();
    let keeps_messages = transport.keeps_messages();
    let traffic = Traffic::default();
    let mut send_loop =
        SendLoop { args, keeps_messages, sender, signals: &signals, traffic, all_sent: false, lateness_ns: None };
    let mut done = stream(&mut send_loop).and_then(|()| send_loop.drain());
    let SendLoop { mut sender, traffic, all_sent, lateness_ns, .. } = send_loop;
    let mut unreleased = sender.unreleased();
    let counters = sender.counters();
    // After an error, the close may fail with the same one; the first has more detail.
    let closed = sender.close();
    if done.is_ok() {
        done = closed.map_err(StreamError::Channel);
    }
    let seconds = started.elapsed().as_secs_f64();

    let receiver_left = |event: &str, left: u64| {
        let rest = if all_sent { "" } else { ", and the input was not sent to its end" };
        let count = format!("{left} of {} messages were not released", traffic.messages);
        Failure::Peer(format!("the receiver on `{}` {event}: {count}{rest}", args.channel.name))
    };
    let (mut ended, mut result) = match done {
        Ok(()) => (Ended::Closed, Ok(())),
        // The receiver released everything and then closed first: nothing is lost.
        Err(StreamError::Channel(pelton::Error::Closed { unreleased: 0 })) if all_sent => (Ended::Closed, Ok(())),
        Err(StreamError::Channel(pelton::Error::Closed { unreleased: left })) => {
            unreleased = left;
            (Ended::PeerClosed, Err(receiver_left("closed", left)))
        }
        Err(StreamError::Channel(pelton::Error::PeerDied { unreleased: left })) => {
            unreleased = left;
            (Ended::PeerDied, Err(receiver_left("died", left)))
        }
        Err(StreamError::Channel(error)) => (Ended::Failed, Err(error.into())),
        Err(StreamError::Other(failure)) => (Ended::by(&failure), Err(failure)),
    };
    if keeps_messages && result.is_ok() && unreleased > 0 {
        let name = &args.channel.name;
        if directory_id(&transport) == directory_at_start {
            print_stderr(format!("{unreleased} messages wait in `{name}` for a receiver"));
        } else {
            let text = format!("{unreleased} messages are lost: another program removed or replaced `{name}`");
            (ended, result) = (Ended::Failed, Err(Failure::System(text)));
        }
    }
    if args.channel.json {
        let end = Ending { ended, result: &result, unreleased, seconds, lateness_ns, missed: None };
        let report = args.channel.report(command, &traffic, end, counters);
        // A failed write has no other consequence.
        let _ = std::io::stdout().write_all(report.as_bytes());
    }
    result
}

/// The device and the inode of the directory of a path channel. `None` without one.
fn directory_id(transport: &Transport) -> Option<(u64, u64)> {
    let Transport::Path(directory) = transport else { return None };
    std::fs::metadata(directory).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

/// Connects, or listens, until the receiver has connected. A path channel needs no receiver, unless `--timeout` is
/// given.
fn open_sender(args: &SenderArgs, transport: &Transport, signals: &Signals) -> Result<Sender, Failure> {
    let (channel, options) = (&args.channel, args.channel.options());
    match transport {
        Transport::Path(directory) => {
            let mut sender = channel.claim(signals, || options.cast().create_sender(directory))?;
            if channel.peer_deadline().is_some() {
                channel.wait_for_peer("receiver", signals, |slice| Ok(sender.resume_until(slice)?.then_some(())))?;
            }
            Ok(sender)
        }
        Transport::Connect if args.listen => {
            let listener = options.cast().listen(&channel.name)?;
            channel.accept("receiver", signals, &listener, |deadline| listener.accept_sender_until(deadline))
        }
        Transport::Connect => {
            let peer_name = "receiver that listens and has no sender yet (`recv --follow` takes many)";
            channel.connect(peer_name, signals, |limit| options.cast().handshake(limit).connect_sender(&channel.name))
        }
    }
}

/// The sender of a command.
pub struct SendLoop<'a> {
    args: &'a SenderArgs,
    /// The channel keeps messages of a departed receiver for the next one.
    keeps_messages: bool,
    sender: Sender,
    signals: &'a Signals,
    traffic: Traffic,
    all_sent: bool,
    /// For the report.
    pub lateness_ns: Option<Lateness>,
}

impl SendLoop<'_> {
    /// Sends standard input to its end.
    fn send_input(&mut self, frame: Framing) -> Result<(), StreamError> {
        let stdin = std::io::stdin();
        let metadata = rustix::fs::fstat(&stdin).map_err(|error| Failure::system("standard input", error))?;
        let is_file = rustix::fs::FileType::from_raw_mode(metadata.st_mode).is_file();
        let bytes_total = is_file.then_some(metadata.st_size as u64);
        let mut progress = if stdin.is_terminal() { Progress::never() } else { Progress::after(progress::DELAY) };
        // The largest length of a len32 frame.
        let bytes_max = self.sender.message_bytes_max().min(u32::MAX.into());
        let mut splitter = Splitter::new(frame, bytes_max, READ_BYTES);
        loop {
            while let Some(message) = splitter.next().map_err(|error| Failure::Input(frame_error_text(&error)))? {
                self.send(message)?;
            }
            if splitter.ended() {
                break;
            }
            progress.update(|seconds| {
                let amount = progress::amount(splitter.offset(), bytes_total, seconds);
                format!("{amount}, {} messages", self.traffic.messages)
            });
            if !is_file {
                self.wait_for_input()?;
            }
            let bytes = match rustix::io::read(&stdin, splitter.space()) {
                Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => continue,
                read => read.map_err(|error| Failure::system("standard input", error))?,
            };
            splitter.filled(bytes);
        }
        Ok(())
    }

    /// Waits until everything is released, unless the channel keeps it.
    fn drain(&mut self) -> Result<(), StreamError> {
        self.all_sent = true;
        if self.keeps_messages && !self.args.drain {
            return Ok(());
        }
        loop {
            let drained = self.sender.wait_released_until(Instant::now() + SLICE);
            if self.unless_kept(drained)? == Some(true) {
                return Ok(());
            }
            self.signals.check()?;
        }
    }

    /// Turns the receiver's departure into `None` if the channel keeps its messages. The library reports it once, and
    /// the sender continues.
    fn unless_kept<T>(&self, done: pelton::Result<T>) -> pelton::Result<Option<T>> {
        match done {
            Err(pelton::Error::Closed { .. }) if self.keeps_messages => Ok(None),
            Err(pelton::Error::PeerDied { unreleased }) if self.keeps_messages => {
                let name = &self.args.channel.name;
                let text = format!("the receiver on `{name}` died; {unreleased} messages wait for the next one");
                print_stderr(text);
                Ok(None)
            }
            done => done.map(Some),
        }
    }

    /// Sends one message, and waits for free space.
    pub fn send(&mut self, message: &[u8]) -> Result<(), StreamError> {
        self.signals.check()?;
        let sent = self.sender.try_send(message);
        if self.unless_kept(sent)? != Some(Sent::Sent) {
            self.send_waiting(message)?;
        }
        self.traffic.count(message);
        Ok(())
    }

    fn send_waiting(&mut self, message: &[u8]) -> Result<(), StreamError> {
        let wait = self.args.channel.wait;
        loop {
            let library_wait = if wait == WaitArg::Spin { SLICE } else { LIBRARY_WAIT };
            let sent = self.sender.send_until(message, Instant::now() + library_wait);
            if self.unless_kept(sent)? == Some(Sent::Sent) {
                return Ok(());
            }
            self.signals.check()?;
            if wait == WaitArg::Spin {
                continue;
            }
            let armed = self.sender.arm(message.len());
            if self.unless_kept(armed)? == Some(Armed::Waiting) {
                let polled = self.signals.poll([(self.sender.as_fd(), PollFlags::IN)], None);
                self.sender.disarm();
                polled?;
            }
        }
    }

    /// Waits until standard input is readable; fails if the receiver leaves meanwhile.
    fn wait_for_input(&mut self) -> Result<(), StreamError> {
        self.wait(Some(std::io::stdin().as_fd()), None)
    }

    /// Waits until a time; fails if the receiver leaves meanwhile.
    pub fn wait_until(&mut self, until: Instant) -> Result<(), StreamError> {
        self.wait(None, Some(until))
    }

    fn wait(&mut self, input: Option<BorrowedFd<'_>>, until: Option<Instant>) -> Result<(), StreamError> {
        let mut wakes_for_space = 0;
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                self.signals.check()?;
                return Ok(());
            }
            // Bounded, so that it fits the `timespec` of `poll`.
            let left = left.map(|left| left.min(Duration::from_secs(3600)));
            // An earlier wait for free space may leave a wake-up behind. More of them would make this loop busy.
            let channel = if wakes_for_space < 3 { PollFlags::IN } else { PollFlags::empty() };
            let waits = [(self.sender.as_fd(), channel)].into_iter().chain(input.map(|input| (input, PollFlags::IN)));
            let ready = self.signals.poll_all(waits, left)?;
            if ready[0] {
                // Fails if the receiver has left. Otherwise the doorbell reported free space, which this loop does not
                // need.
                let armed = self.sender.arm(0);
                self.unless_kept(armed)?;
                self.sender.disarm();
                wakes_for_space += 1;
            }
            if ready.get(1) == Some(&true) {
                return Ok(());
            }
        }
    }
}

/// The text for an invalid frame, with advice if there is any.
fn frame_error_text(error: &crate::frame::FrameError) -> String {
    match error {
        crate::frame::FrameError::TooLarge { .. } => {
            format!("standard input: {error} (a larger --capacity allows more)")
        }
        crate::frame::FrameError::Truncated { .. } => format!("standard input: {error}"),
    }
}
