//! `pelton pub`: publishes standard input to all subscribers of a name, or of a directory.
//!
//! While there is input and free space, a message costs no system call beyond its share of a read. Every wait polls the
//! publisher too, which admits subscribers within its calls.

use crate::{
    channel::{ChannelArgs, Ending, StreamError, Traffic, Transport, WaitArg},
    descriptors,
    failure::Failure,
    frame::{Framing, Splitter},
    notify::{self, notify},
    report::Ended,
    signals::{SLICE, Signals},
};
use clap::Args;
use pelton::{Error, Options, Publisher, Sent};
use rustix::event::PollFlags;
use std::{
    io::Write as _,
    os::fd::AsFd as _,
    time::{Duration, Instant},
};

/// Bytes per read, as `send` has them.
const READ_BYTES: usize = 256 * 1024;
/// How long the library waits before the command polls the signals too, as in `send`.
const LIBRARY_WAIT: Duration = Duration::from_millis(1);

/// Options of `pelton pub`.
#[derive(Args)]
pub struct PubArgs {
    #[command(flatten)]
    channel: ChannelArgs,
    /// Wait for this number of subscribers before the first message [default: 0]
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true,
        value_parser = clap::value_parser!(u64).range(..=64))]
    subscribers: u64,
    /// Keep the last N messages for `sub -n` and `sub --from oldest`, as far as half the capacity takes them
    #[arg(long, value_name = "N", default_value_t = 0)]
    history: u64,
    /// Refuse a subscriber that could hold this command up for longer; 0 admits only those that lag
    #[arg(long, value_name = "SECONDS", value_parser = crate::seconds)]
    hold_max: Option<Duration>,
    /// How messages are separated in the stream of bytes
    #[arg(long, value_enum, default_value_t = Framing::Lines)]
    frame: Framing,
}

/// Runs `pelton pub`.
pub fn run(args: &PubArgs) -> Result<(), Failure> {
    let transport = args.channel.broadcast_transport(&[])?;
    let signals = Signals::install()?;
    descriptors::raise("subscribers", 3);
    let mut options: Options = args.channel.options().history(args.history);
    if let Some(time) = args.hold_max {
        options = options.hold_max(time);
    }
    let publisher = match &transport {
        Transport::Connect => options.cast().publish_at(&args.channel.name)?,
        Transport::Path(directory) => {
            let options = options.cast::<pelton::options::maker::CreatePublisher>();
            // Refused: by a subscriber beyond --hold-max, which may leave.
            let may_pass = |error: &Error| matches!(error, Error::RoleTaken { .. } | Error::Refused(_));
            args.channel.claim_while(&signals, may_pass, || options.create_publisher(directory))?
        }
    };
    notify(notify::READY);
    let started = Instant::now();
    let keeps_messages = transport.keeps_messages();
    let traffic = Traffic::default();
    let mut publishing = Publishing { args, publisher, signals: &signals, traffic, keeps_messages };
    let done = publishing.publish_all();
    let Publishing { publisher, traffic, .. } = publishing;
    let counters = publisher.counters();
    let closed = publisher.close().map_err(StreamError::Channel);
    let (ended, result) = match done.and(closed) {
        Ok(()) => (Ended::Closed, Ok(())),
        Err(StreamError::Channel(error)) => (Ended::Failed, Err(error.into())),
        Err(StreamError::Other(failure)) => (Ended::by(&failure), Err(failure)),
    };
    if args.channel.json {
        let seconds = started.elapsed().as_secs_f64();
        let end = Ending { ended, result: &result, unreleased: 0, seconds, lateness_ns: None, missed: None };
        let report = args.channel.report("pub", &traffic, end, counters);
        // A failed write has no other consequence.
        let _ = std::io::stdout().write_all(report.as_bytes());
    }
    result
}

struct Publishing<'a> {
    args: &'a PubArgs,
    publisher: Publisher,
    signals: &'a Signals,
    traffic: Traffic,
    /// Subscribers receive what the directory has after this command has ended.
    keeps_messages: bool,
}

impl Publishing<'_> {
    /// Publishes standard input to its end, and waits until every subscriber that gates has received it, unless a
    /// directory keeps it.
    fn publish_all(&mut self) -> Result<(), StreamError> {
        let (publisher, wanted) = (&mut self.publisher, self.args.subscribers as usize);
        self.args.channel.wait_for_peer("subscriber", self.signals, |slice| {
            Ok(publisher.wait_subscribers_until(wanted, slice)?.then_some(()))
        })?;
        let stdin = std::io::stdin();
        // The largest length of a len32 frame.
        let bytes_max = self.publisher.message_bytes_max().min(u32::MAX.into());
        let mut splitter = Splitter::new(self.args.frame, bytes_max, READ_BYTES);
        loop {
            let input_error = |error| Failure::Input(format!("standard input: {error}"));
            while let Some(message) = splitter.next().map_err(input_error)? {
                self.publish(message)?;
            }
            if splitter.ended() {
                break;
            }
            loop {
                // Subscribers join while there is no input.
                self.publisher.admit()?;
                let waits = [(self.publisher.as_fd(), PollFlags::IN), (stdin.as_fd(), PollFlags::IN)];
                if let [_, true] = self.signals.poll(waits, None)? {
                    break;
                }
            }
            match rustix::io::read(&stdin, splitter.space()) {
                Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
                read => splitter.filled(read.map_err(|error| Failure::system("standard input", error))?),
            }
        }
        while !self.keeps_messages && !self.publisher.wait_released_until(Instant::now() + SLICE)? {
            self.signals.check()?;
        }
        Ok(())
    }

    /// Publishes one message, and waits for free space.
    fn publish(&mut self, message: &[u8]) -> Result<(), StreamError> {
        self.signals.check()?;
        let wait = self.args.channel.wait;
        while self.publisher.try_send(message)? != Sent::Sent {
            let library_wait = if wait == WaitArg::Spin { SLICE } else { LIBRARY_WAIT };
            if self.publisher.send_until(message, Instant::now() + library_wait)? == Sent::Sent {
                break;
            }
            self.signals.check()?;
            if wait == WaitArg::Block && self.publisher.arm(message.len())?.is_waiting() {
                let polled = self.signals.poll([(self.publisher.as_fd(), PollFlags::IN)], None);
                self.publisher.disarm();
                polled?;
            }
        }
        self.traffic.count(message);
        Ok(())
    }
}
