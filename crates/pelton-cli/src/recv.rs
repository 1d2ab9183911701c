//! `pelton recv`: a channel to standard output.
//!
//! While messages flow, each is copied into one output buffer, which is written when it is large or the lane is empty. A message
//! is released when it is in that buffer; those of a channel in a directory, which another receiver can still get, when they are
//! written, a batch at a time. While none come, one poll waits for the channel, the signals and the going of standard
//! output's reader.

use crate::{
    channel::{Notice, Passed, ReceiveArgs, Stop, WaitArg},
    failure::{Failure, say},
    frame::Framing,
    output::{Output, WRITE_BYTES},
    progress::Progress,
    report::Ended,
    signals::{SLICE, Signals},
};
use clap::Args;
use pelton::{Kind, Receiver};
use rustix::event::PollFlags;
use std::{
    io::IsTerminal as _,
    os::fd::AsFd as _,
    time::{Duration, Instant},
};

/// How long an empty lane is watched before what has gathered is written: a sender about as fast as this receiver would else
/// cost a write per message. Nobody sees the delay. A guess.
const LINGER: Duration = Duration::from_micros(20);
/// How long waiting is left to the library before the signals are polled as well. Longer than it spins, too short to be noticed.
const FIRST_WAIT: Duration = Duration::from_millis(1);

/// Options of `pelton recv`.
#[derive(Args)]
pub struct RecvArgs {
    #[command(flatten)]
    receive: ReceiveArgs,
    /// How messages are told apart in the stream of bytes
    #[arg(long, value_enum, default_value_t = Framing::Lines)]
    frame: Framing,
    /// Close after so many messages
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
}

/// Runs `pelton recv`.
pub fn run(args: &RecvArgs) -> Result<(), Failure> {
    let place = args.receive.place()?;
    let signals = Signals::install()?;
    // First: nobody is to connect to what cannot write.
    let output = Output::new()?;
    let receiver = args.receive.appear(&place, &signals, args.receive.channel.options().announce(true))?;
    let started = Instant::now();
    let mut receiving = Receiving {
        args,
        keeps: place.keeps(),
        appear_by: args.receive.appear_by(&place),
        notice: args.receive.channel.notice("messages"),
        receiver,
        output,
        received: Passed::default(),
        signals: &signals,
    };
    let done = receiving.stream();
    let Receiving { receiver, received, .. } = receiving;
    let counters = receiver.counters();
    // what could go wrong with it would change nothing: the sender is told by it, or by our end
    let _ = receiver.close();
    let seconds = started.elapsed().as_secs_f64();
    args.receive.finish("recv", done, &received, seconds, counters)
}

/// The receiver at work.
struct Receiving<'a> {
    args: &'a RecvArgs,
    /// Whether the channel keeps what is not released, for the next receiver.
    keeps: bool,
    /// Until a sender, or a message, has appeared: when to give up.
    appear_by: Option<Instant>,
    /// Until a sender, or a message, has appeared.
    notice: Notice,
    receiver: Receiver,
    output: Output,
    received: Passed,
    signals: &'a Signals,
}

impl Receiving<'_> {
    /// Writes every message until the sender closes or enough have come, and then what is left in the buffer, whatever the end was.
    fn stream(&mut self) -> Result<Ended, Stop> {
        let done = self.receive_all();
        match done {
            Err(Stop::Other(Failure::Signal(_))) => match self.output.write_what_goes() {
                0 => {}
                left => say(format!("nobody reads the output: the last {left} bytes of what was received are lost")),
            },
            Err(Stop::Other(_)) => {}
            Ok(_) | Err(Stop::Channel(_)) => self.output.write(self.signals)?,
        }
        done
    }

    fn receive_all(&mut self) -> Result<Ended, Stop> {
        let mut progress = Progress::new(None, std::io::stdout().is_terminal());
        let mut waiting = Waiting::Not;
        loop {
            match self.step(&mut waiting, &mut progress) {
                Ok(None) => {}
                Ok(Some(ended)) => return Ok(ended),
                Err(Stop::Channel(pelton::Error::Closed { .. })) if self.args.receive.follow => self.appear_by = None,
                Err(Stop::Channel(pelton::Error::PeerDied { .. })) if self.args.receive.follow => {
                    self.appear_by = None;
                    self.say_that_one("died");
                }
                Err(Stop::Channel(pelton::Error::Closed { .. })) => return Ok(Ended::Closed),
                Err(stop) => return Err(stop),
            }
            self.signals.check()?;
        }
    }

    /// Takes what is there, or waits one step further; answers how it ended, if it has.
    fn step(&mut self, waiting: &mut Waiting, progress: &mut Progress) -> Result<Option<Ended>, Stop> {
        let came = if self.keeps { self.take_batch(*waiting)? } else { self.take_one(*waiting)? };
        if came {
            *waiting = Waiting::Not;
            if self.keeps || self.output.buffer.len() >= WRITE_BYTES {
                self.output.write(self.signals)?;
                progress.at(self.received.messages, self.received.bytes);
            }
            return Ok((self.args.count == Some(self.received.messages)).then_some(Ended::Counted));
        }
        match waiting {
            Waiting::Not if self.output.buffer.is_empty() => *waiting = Waiting::First,
            Waiting::Not => *waiting = Waiting::Linger,
            Waiting::Linger => {
                self.output.write(self.signals)?;
                *waiting = Waiting::First;
            }
            Waiting::First => {
                self.give_up_waiting()?;
                self.idle()?;
                *waiting = Waiting::Not;
            }
        }
        Ok(None)
    }

    /// Takes the next message into the buffer and releases it.
    fn take_one(&mut self, waiting: Waiting) -> Result<bool, Stop> {
        let Receiving { args, receiver, output, received, .. } = self;
        let message = match waiting {
            Waiting::Not => receiver.try_receive(),
            Waiting::Linger => receiver.receive_until(Instant::now() + LINGER),
            Waiting::First if args.receive.channel.wait == WaitArg::Spin => {
                receiver.receive_until(Instant::now() + SLICE)
            }
            Waiting::First => receiver.receive_until(Instant::now() + FIRST_WAIT),
        }?;
        let found = message.map(|message| {
            if message.kind() == Kind::Message {
                received.count(&message);
                args.frame.write(&message, &mut output.buffer);
            }
            message.kind()
        });
        let Some(kind) = found else { return Ok(false) };
        match kind {
            Kind::Message => return Ok(true),
            Kind::PeerDied => self.say_that_one("died"),
            Kind::Corrupt => self.say_that_one("broke the rules of the layout"),
            Kind::Joined | Kind::Closed => {}
        }
        self.appear_by = None;
        self.notice.cancel();
        Ok(false)
    }

    fn say_that_one(&self, went: &str) {
        let name = &self.args.receive.channel.name;
        say(format!("a sender on `{name}` {went}, waiting for the next one"));
    }

    /// Takes what messages there are, as far as they go into one write, and releases them once they are written: one that is lost
    /// on the way is the next receiver's.
    fn take_batch(&mut self, waiting: Waiting) -> Result<bool, Stop> {
        let Receiving { args, receiver, output, received, signals, .. } = self;
        if !matches!(waiting, Waiting::Not) {
            let until = Instant::now() + if args.receive.channel.wait == WaitArg::Spin { SLICE } else { LINGER };
            while receiver.try_receive_batch()?.is_none() && Instant::now() < until {
                std::hint::spin_loop();
            }
        }
        let Some(mut batch) = receiver.try_receive_batch()? else { return Ok(false) };
        let done = loop {
            match batch.next() {
                Ok(Some(message)) => {
                    received.count(message);
                    args.frame.write(message, &mut output.buffer);
                }
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            }
            if output.buffer.len() >= WRITE_BYTES || args.count == Some(received.messages) {
                break Ok(());
            }
        };
        if let Err(failure) = output.write(signals) {
            let interrupted = matches!(failure, Failure::Signal(_));
            if !(interrupted && output.write_what_goes() == 0) {
                output.buffer.clear();
                // Not dropped: that would release what nobody has got.
                std::mem::forget(batch);
            }
            return Err(failure.into());
        }
        drop(batch);
        Ok(done.map(|()| true)?)
    }

    /// Fails when neither a sender nor a message has appeared in a directory by the time for it.
    fn give_up_waiting(&mut self) -> Result<(), Stop> {
        if self.received.messages > 0 {
            self.notice.cancel();
        }
        self.notice.check();
        if self.received.messages > 0 {
            self.appear_by = None;
        } else if self.appear_by.is_some_and(|by| by <= Instant::now()) {
            if !self.keeps || !self.receiver.resume_until(Instant::now())? {
                return Err(self.args.receive.channel.nobody("sender").into());
            }
            self.appear_by = None;
        }
        Ok(())
    }

    /// Sleeps until a message comes or somebody goes; when spinning, only looks whether somebody has gone.
    fn idle(&mut self) -> Result<(), Stop> {
        let next = self.appear_by.into_iter().chain(self.notice.due).min();
        let timeout = match (self.args.receive.channel.wait, next) {
            (WaitArg::Spin, _) => Some(Duration::ZERO),
            (WaitArg::Block, by) => by.map(|by| by.saturating_duration_since(Instant::now()).min(SLICE)),
        };
        if !self.receiver.arm()? {
            return Ok(());
        }
        // no events asked for: only an error, or that nobody reads any more
        let channel = (self.receiver.as_fd(), PollFlags::IN);
        let polled = self.signals.poll([channel, (self.output.as_fd(), PollFlags::empty())], timeout);
        self.receiver.disarm();
        match polled?[1] {
            true => Err(Failure::OutputClosed.into()),
            false => Ok(()),
        }
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
