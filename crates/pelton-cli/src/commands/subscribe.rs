//! `pelton sub`: writes the messages of a publisher to standard output.

use crate::{
    channel::{ChannelArgs, Ending, StreamError, Traffic, Transport, WaitArg},
    failure::{Failure, print_stderr},
    frame::Framing,
    notify::{self, notify},
    output::{Output, WRITE_BYTES},
    report::Ended,
    signals::{SLICE, Signals},
};
use clap::{Args, ValueEnum};
use pelton::{Deadline, Options, Policy, StartFrom, Subscriber};
use rustix::event::PollFlags;
use std::{
    io::Write as _,
    os::fd::AsFd as _,
    time::{Duration, Instant},
};

/// How long an empty lane is polled before a partly filled buffer is written, as in `recv`.
const SPIN_TIME: Duration = Duration::from_micros(20);
/// How long the library waits before the command polls the signals too, as in `recv`.
const LIBRARY_WAIT: Duration = Duration::from_millis(1);

/// Options of `pelton sub`.
#[derive(Args)]
pub struct SubArgs {
    #[command(flatten)]
    channel: ChannelArgs,
    /// Miss no message: the publisher waits for this command when it is behind by the whole capacity [default]
    #[arg(long, conflicts_with_all = ["lag", "latest"])]
    gate: bool,
    /// Do not hold the publisher up: miss messages when behind, and count them
    #[arg(long, conflicts_with = "latest")]
    lag: bool,
    /// Receive the newest message only, and skip those before it
    #[arg(long)]
    latest: bool,
    /// With --gate: hold the publisher up for so long at most, then lag until everything is received
    #[arg(long, value_name = "SECONDS", value_parser = crate::seconds, conflicts_with_all = ["lag", "latest"])]
    lag_after: Option<Duration>,
    /// The first message
    #[arg(long, value_enum, default_value_t = From::Now)]
    from: From,
    /// Begin with the last N messages, as far as the publisher still has them
    #[arg(short = 'n', value_name = "N", conflicts_with = "from")]
    last: Option<u64>,
    /// For path:DIR: keep the place of this subscription under a name, over restarts of this command and of the
    /// publisher. `pelton rm DIR --durable NAME` removes it
    ///
    /// One process at a time uses a name. While none does, it still counts by its policy: with --gate it holds the
    /// publisher up once the channel is full. --from and -n are for its first use. Each message is written before it
    /// counts as received.
    #[arg(long, value_name = "NAME", conflicts_with = "latest")]
    durable: Option<String>,
    /// After the publisher has left, wait for the next one
    #[arg(long)]
    follow: bool,
    /// How messages are separated in the stream of bytes
    #[arg(long, value_enum, default_value_t = Framing::Lines)]
    frame: Framing,
    /// Close after this number of messages
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
}

/// Values of `--from`.
#[derive(Clone, Copy, ValueEnum)]
enum From {
    /// The next message
    Now,
    /// The oldest message that the publisher still has
    Oldest,
}

/// Runs `pelton sub`.
pub fn run(args: &SubArgs) -> Result<(), Failure> {
    let channel = &args.channel;
    if channel.capacity.is_some() {
        let text = "--capacity does not apply to a subscriber: the publisher sets it";
        return Err(Failure::Input(text.to_string()));
    }
    let transport = channel.broadcast_transport(&[("--durable", args.durable.is_some())])?;
    let signals = Signals::install()?;
    // First: the publisher does not wait for a subscriber that cannot write.
    let output = Output::new()?;
    let options = args.options();
    let subscriber = channel.connect("publisher", &signals, |limit| match &transport {
        Transport::Connect => {
            let options = options.cast::<pelton::options::maker::Subscribe>();
            options.handshake(limit).connect_subscriber(&channel.name)
        }
        Transport::Path(directory) => {
            options.cast::<pelton::options::maker::OpenSubscriber>().open_subscriber(directory)
        }
    })?;
    notify(notify::READY);
    let started = Instant::now();
    let mut subscription = Subscription { args, subscriber, output, signals: &signals, traffic: Traffic::default() };
    let done = subscription.stream();
    let Subscription { subscriber, traffic, .. } = subscription;
    let (counters, missed) = (subscriber.counters(), subscriber.missed());
    // An error changes nothing: the publisher detects the end in any case.
    let _ = subscriber.close();
    let (ended, result) = match done {
        Ok(ended) => (ended, Ok(())),
        Err(StreamError::Channel(pelton::Error::PeerDied { .. })) => {
            let name = &channel.name;
            let text = format!("the publisher on `{name}` died after {} messages, without closing", traffic.messages);
            (Ended::PeerDied, Err(Failure::Peer(text)))
        }
        Err(StreamError::Channel(error)) => (Ended::Failed, Err(error.into())),
        Err(StreamError::Other(failure)) => (Ended::by(&failure), Err(failure)),
    };
    if missed > 0 && !args.latest {
        print_stderr(format!("missed {missed} messages on `{}`, and received {}", channel.name, traffic.messages));
    }
    if channel.json {
        let (seconds, missed) = (started.elapsed().as_secs_f64(), Some(missed));
        let end = Ending { ended, result: &result, unreleased: 0, seconds, lateness_ns: None, missed };
        let report = channel.report("sub", &traffic, end, counters);
        let _ = std::io::stderr().write_all(report.as_bytes());
    }
    result
}

impl SubArgs {
    fn options(&self) -> Options {
        let policy = match (self.lag, self.latest) {
            (true, _) => Policy::Lag,
            (_, true) => Policy::Latest,
            _ => Policy::Gate,
        };
        let from = match (self.last, self.from) {
            (Some(messages), _) => StartFrom::Last(messages),
            (None, From::Now) => StartFrom::Now,
            (None, From::Oldest) => StartFrom::Oldest,
        };
        let options = self.channel.options().policy(policy).start_from(from);
        let options = self.lag_after.into_iter().fold(options, Options::lag_after);
        self.durable.iter().fold(options, |options, name| options.durable(name))
    }
}

struct Subscription<'a> {
    args: &'a SubArgs,
    subscriber: Subscriber,
    output: Output,
    signals: &'a Signals,
    traffic: Traffic,
}

impl Subscription<'_> {
    /// Writes messages until the publisher closes or `--count` is reached, and then the rest of the buffer, whatever
    /// the reason for the end.
    fn stream(&mut self) -> Result<Ended, StreamError> {
        let done = self.receive_all();
        match done {
            Err(StreamError::Other(Failure::Signal(_))) => match self.output.write_remaining() {
                0 => {}
                left => print_stderr(format!("no process reads the output: the last {left} received bytes are lost")),
            },
            Err(StreamError::Other(_)) => {}
            Ok(_) | Err(StreamError::Channel(_)) => self.output.write(self.signals)?,
        }
        done
    }

    fn receive_all(&mut self) -> Result<Ended, StreamError> {
        loop {
            match self.receive_some() {
                Ok(None) => self.signals.check()?,
                Ok(Some(ended)) => return Ok(ended),
                Err(StreamError::Channel(pelton::Error::Closed { .. } | pelton::Error::PeerDied { .. }))
                    if self.args.follow =>
                {
                    self.output.write(self.signals)?;
                    let subscriber = &mut self.subscriber;
                    self.args.channel.wait_for_peer("publisher", self.signals, |slice| {
                        Ok(subscriber.resume_until(slice)?.then_some(()))
                    })?;
                }
                Err(StreamError::Channel(pelton::Error::Closed { .. })) => return Ok(Ended::Closed),
                Err(stop) => return Err(stop),
            }
        }
    }

    /// Takes messages until there is none for a while, or a write is due; then writes them, and sleeps.
    fn receive_some(&mut self) -> Result<Option<Ended>, StreamError> {
        let idle_wait = if self.args.channel.wait == WaitArg::Spin { SLICE } else { LIBRARY_WAIT };
        loop {
            if !self.take(None)? {
                let is_empty = self.output.buffer.is_empty();
                if !self.take(Some(if is_empty { idle_wait } else { SPIN_TIME }))? {
                    if is_empty {
                        return self.sleep().map(|()| None);
                    }
                    self.output.write(self.signals)?;
                    continue;
                }
            }
            if self.args.count == Some(self.traffic.messages) {
                return Ok(Some(Ended::Counted));
            }
            if self.output.buffer.len() >= WRITE_BYTES {
                self.output.write(self.signals)?;
                return Ok(None);
            }
        }
    }

    /// Copies the next message into the buffer. Waits for it for so long.
    fn take(&mut self, wait: Option<Duration>) -> Result<bool, StreamError> {
        let deadline = wait.map_or(Deadline::Now, Deadline::from);
        let Some(message) = self.subscriber.receive_until(deadline)? else { return Ok(false) };
        self.traffic.count(&message);
        self.args.frame.write(&message, &mut self.output.buffer);
        if self.args.durable.is_some() {
            // Before it counts as received: otherwise nobody receives it, if this process is killed.
            self.output.write(self.signals)?;
        }
        Ok(true)
    }

    /// Sleeps until a message arrives or the publisher leaves; with `--wait spin`, only checks the output.
    fn sleep(&mut self) -> Result<(), StreamError> {
        if !self.subscriber.arm()?.is_waiting() {
            return Ok(());
        }
        let timeout = (self.args.channel.wait == WaitArg::Spin).then_some(Duration::ZERO);
        // No events of the output: the poll reports an error or a hang-up of its reader.
        let channel = (self.subscriber.as_fd(), PollFlags::IN);
        let polled = self.signals.poll([channel, (self.output.as_fd(), PollFlags::empty())], timeout);
        self.subscriber.disarm();
        match polled?[1] {
            true => Err(Failure::OutputClosed.into()),
            false => Ok(()),
        }
    }
}
