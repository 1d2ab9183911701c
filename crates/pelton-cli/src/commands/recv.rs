//! `pelton recv`: writes the messages of a channel to standard output.
//!
//! While messages flow, they are copied into one output buffer, which is written when it is large or the lane is empty.
//! By connect, a message is released once it is copied. On a path channel another receiver may follow, so a batch
//! of messages is released once it is written. Without messages, one poll waits for the channel, the signals and the
//! hang-up of the reader of standard output.

use crate::{
    channel::{Notice, ReceiveArgs, StreamError, Traffic, WaitArg},
    failure::{Failure, print_stderr},
    frame::Framing,
    output::{Output, WRITE_BYTES},
    progress::{self, Progress},
    report::Ended,
    signals::{SLICE, Signals},
};
use clap::Args;
use pelton::{Departure, Event, Receiver};
use rustix::event::PollFlags;
use std::{
    io::IsTerminal as _,
    os::fd::AsFd as _,
    time::{Duration, Instant},
};

/// How long an empty lane is polled before a partly filled buffer is written. Without this, a sender about as fast as
/// this receiver would cost one write per message. Users do not notice the delay. A guess.
const SPIN_TIME: Duration = Duration::from_micros(20);
/// How long the library waits before the command polls the signals too: longer than it spins, and too short to be
/// noticed.
const LIBRARY_WAIT: Duration = Duration::from_millis(1);

/// Options of `pelton recv`.
#[derive(Args)]
pub struct RecvArgs {
    #[command(flatten)]
    receive: ReceiveArgs,
    /// How messages are separated in the stream of bytes
    #[arg(long, value_enum, default_value_t = Framing::Lines)]
    frame: Framing,
    /// Close after this number of messages
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
}

/// Runs `pelton recv`.
pub fn run(args: &RecvArgs) -> Result<(), Failure> {
    let transport = args.receive.transport()?;
    let signals = Signals::install()?;
    // First: no sender connects to a receiver that cannot write.
    let output = Output::new()?;
    let receiver =
        args.receive.open_receiver(&transport, &signals, args.receive.channel.options().membership_events(true))?;
    let started = Instant::now();
    let mut recv_loop = RecvLoop {
        args,
        keeps_messages: transport.keeps_messages(),
        peer_deadline: args.receive.peer_deadline(&transport),
        notice: args.receive.channel.notice("messages"),
        receiver,
        output,
        traffic: Traffic::default(),
        signals: &signals,
    };
    let done = recv_loop.stream();
    let RecvLoop { receiver, traffic, .. } = recv_loop;
    let counters = receiver.counters();
    // An error changes nothing: the sender detects the end in any case.
    let _ = receiver.close();
    let seconds = started.elapsed().as_secs_f64();
    args.receive.finish("recv", done, &traffic, seconds, counters)
}

struct RecvLoop<'a> {
    args: &'a RecvArgs,
    /// The channel keeps unreleased messages for the next receiver.
    keeps_messages: bool,
    /// When to fail, until a sender or a message has appeared.
    peer_deadline: Option<Instant>,
    /// Printed unless a sender or a message appears soon.
    notice: Notice,
    receiver: Receiver,
    output: Output,
    traffic: Traffic,
    signals: &'a Signals,
}

impl RecvLoop<'_> {
    /// Writes messages until the sender closes or `--count` is reached, and then the rest of the buffer, whatever the
    /// reason for the end.
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
        let is_shown = std::io::stdout().is_terminal();
        let mut progress = if is_shown { Progress::never() } else { Progress::after(progress::DELAY) };
        let mut stage = WaitStage::Flowing;
        loop {
            match self.step(&mut stage, &mut progress) {
                Ok(None) => {}
                Ok(Some(ended)) => return Ok(ended),
                Err(StreamError::Channel(pelton::Error::Closed { .. })) if self.args.receive.follow => {
                    self.peer_deadline = None
                }
                Err(StreamError::Channel(pelton::Error::PeerDied { .. })) if self.args.receive.follow => {
                    self.peer_deadline = None;
                    self.report_sender("died");
                }
                Err(StreamError::Channel(pelton::Error::Closed { .. })) => return Ok(Ended::Closed),
                Err(stop) => return Err(stop),
            }
            self.signals.check()?;
        }
    }

    /// Takes the available messages, or enters the next wait stage. Returns why the stream ended, if it has.
    fn step(&mut self, stage: &mut WaitStage, progress: &mut Progress) -> Result<Option<Ended>, StreamError> {
        let has_message = if self.keeps_messages { self.take_batch(*stage)? } else { self.take_one(*stage)? };
        if has_message {
            *stage = WaitStage::Flowing;
            if self.keeps_messages || self.output.buffer.len() >= WRITE_BYTES {
                self.output.write(self.signals)?;
                progress.update(|seconds| {
                    let Traffic { messages, bytes } = self.traffic;
                    format!("{}, {messages} messages", progress::amount(bytes, None, seconds))
                });
            }
            return Ok((self.args.count == Some(self.traffic.messages)).then_some(Ended::Counted));
        }
        match stage {
            WaitStage::Flowing if self.output.buffer.is_empty() => *stage = WaitStage::Library,
            WaitStage::Flowing => *stage = WaitStage::Spin,
            WaitStage::Spin => {
                self.output.write(self.signals)?;
                *stage = WaitStage::Library;
            }
            WaitStage::Library => {
                self.give_up_waiting()?;
                self.idle()?;
                *stage = WaitStage::Flowing;
            }
        }
        Ok(None)
    }

    /// Copies the next message into the buffer and releases it.
    fn take_one(&mut self, stage: WaitStage) -> Result<bool, StreamError> {
        let RecvLoop { args, receiver, output, traffic, .. } = self;
        // A block, so that the event ends its borrow.
        let departure = {
            let event = match stage {
                WaitStage::Flowing => receiver.try_receive_event(),
                WaitStage::Spin => receiver.receive_event_until(Instant::now() + SPIN_TIME),
                WaitStage::Library if args.receive.channel.wait == WaitArg::Spin => {
                    receiver.receive_event_until(Instant::now() + SLICE)
                }
                WaitStage::Library => receiver.receive_event_until(Instant::now() + LIBRARY_WAIT),
            }?;
            match event {
                None => return Ok(false),
                Some(Event::Message(message)) => {
                    traffic.count(&message);
                    args.frame.write(&message, &mut output.buffer);
                    return Ok(true);
                }
                Some(Event::Joined(_)) => None,
                Some(Event::Left(_, departure)) => Some(departure),
            }
        };
        match departure {
            Some(Departure::PeerDied) => self.report_sender("died"),
            Some(Departure::Corrupt) => self.report_sender("violated the layout"),
            _ => {}
        }
        self.peer_deadline = None;
        self.notice.cancel();
        Ok(false)
    }

    fn report_sender(&self, event: &str) {
        let name = &self.args.receive.channel.name;
        print_stderr(format!("a sender on `{name}` {event}, waiting for the next one"));
    }

    /// Takes the available messages, up to one write, and releases them once they are written. If the write fails, the
    /// next receiver gets them.
    fn take_batch(&mut self, stage: WaitStage) -> Result<bool, StreamError> {
        let RecvLoop { args, receiver, output, traffic, signals, .. } = self;
        if !matches!(stage, WaitStage::Flowing) {
            let until = Instant::now() + if args.receive.channel.wait == WaitArg::Spin { SLICE } else { SPIN_TIME };
            while receiver.try_receive_batch()?.is_none() && Instant::now() < until {
                std::hint::spin_loop();
            }
        }
        let Some(mut batch) = receiver.try_receive_batch()? else { return Ok(false) };
        let done = loop {
            match batch.next() {
                Ok(Some(message)) => {
                    traffic.count(message);
                    args.frame.write(message, &mut output.buffer);
                }
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            }
            if output.buffer.len() >= WRITE_BYTES || args.count == Some(traffic.messages) {
                break Ok(());
            }
        };
        if let Err(failure) = output.write(signals) {
            let interrupted = matches!(failure, Failure::Signal(_));
            if !(interrupted && output.write_remaining() == 0) {
                output.buffer.clear();
                // Not dropped: a drop would release unwritten messages.
                std::mem::forget(batch);
            }
            return Err(failure.into());
        }
        drop(batch);
        Ok(done.map(|()| true)?)
    }

    /// Fails if neither a sender nor a message has appeared in time.
    fn give_up_waiting(&mut self) -> Result<(), StreamError> {
        if self.traffic.messages > 0 {
            self.notice.cancel();
        }
        self.notice.check();
        if self.traffic.messages > 0 {
            self.peer_deadline = None;
        } else if self.peer_deadline.is_some_and(|by| by <= Instant::now()) {
            if !self.keeps_messages || !self.receiver.resume_until(Instant::now())? {
                return Err(self.args.receive.channel.no_peer("sender").into());
            }
            self.peer_deadline = None;
        }
        Ok(())
    }

    /// Sleeps until a message arrives or the other side leaves; with `--wait spin`, only checks for the latter.
    fn idle(&mut self) -> Result<(), StreamError> {
        let next = self.peer_deadline.into_iter().chain(self.notice.due).min();
        let timeout = match (self.args.receive.channel.wait, next) {
            (WaitArg::Spin, _) => Some(Duration::ZERO),
            (WaitArg::Block, by) => by.map(|by| by.saturating_duration_since(Instant::now()).min(SLICE)),
        };
        if !self.receiver.arm()?.is_waiting() {
            return Ok(());
        }
        // No events: the poll reports an error or a hang-up of the reader.
        let channel = (self.receiver.as_fd(), PollFlags::IN);
        let polled = self.signals.poll([channel, (self.output.as_fd(), PollFlags::empty())], timeout);
        self.receiver.disarm();
        match polled?[1] {
            true => Err(Failure::OutputClosed.into()),
            false => Ok(()),
        }
    }
}

/// How the receiver waits for the next message; each wait without one leads to the next stage.
#[derive(Clone, Copy)]
enum WaitStage {
    /// Messages arrive.
    Flowing,
    /// The lane is empty; the output is not written yet.
    Spin,
    /// The output is written; the library waits.
    Library,
}
