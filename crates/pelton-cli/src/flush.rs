//! `pelton flush`: a channel to a record file, or to standard output, a bufferful at a time, each message released once it is there.
//!
//! What comes is taken by turns of the library's; between two of them one poll waits for the channel, the signals, and the time
//! at which something is due.

use crate::{
    channel::{Passed, ReceiveArgs, Stop, WaitArg},
    failure::{Failure, say},
    frame::Framing,
    output,
    progress::Progress,
    report::Ended,
    signals::{SLICE, Signals},
};
use clap::Args;
use pelton::{Error, Flush, LaneId, RecordFile, RecordFileOptions, Run, Sink};
use rustix::event::PollFlags;
use std::{
    io::ErrorKind,
    os::fd::AsFd,
    path::PathBuf,
    time::{Duration, Instant},
};

/// How long waiting is left to the library before the signals are polled as well.
const FIRST_WAIT: Duration = Duration::from_millis(1);

/// Options of `pelton flush`.
#[derive(Args)]
pub struct FlushArgs {
    #[command(flatten)]
    receive: ReceiveArgs,
    /// The record file: begun, or gone on with; `pelton cat FILE` writes out what is in it. With -, standard output
    file: PathBuf,
    /// How messages are told apart on standard output [default: lines]
    #[arg(long, value_enum)]
    frame: Option<Framing>,
    /// Write when so much has come, with K, M or G
    #[arg(long, value_name = "BYTES", value_parser = crate::bytes, default_value = "1M")]
    buffer: u64,
    /// Write so long after something came, if there is not enough before
    #[arg(long, value_name = "SECONDS", value_parser = crate::seconds, default_value = "0.1")]
    interval: Duration,
    /// Begin a new file before this one grows larger than that; it is renamed to FILE.000001 and so on
    #[arg(long, value_name = "BYTES", value_parser = crate::bytes)]
    rotate: Option<u64>,
    /// Have it on the disk each time so much has been written; 0: before each write counts
    #[arg(long, value_name = "BYTES", value_parser = crate::bytes)]
    sync: Option<u64>,
    /// Have it on the disk so long after it was written
    #[arg(long, value_name = "SECONDS", value_parser = crate::seconds)]
    sync_interval: Option<Duration>,
}

/// Runs `pelton flush`.
pub fn run(args: &FlushArgs) -> Result<(), Failure> {
    let place = args.receive.place()?;
    let signals = Signals::install()?;
    // First: nobody is to connect to what cannot write.
    let sink = args.sink()?;
    let receiver = args.receive.appear(&place, &signals, args.receive.channel.options())?;
    let started = Instant::now();
    let options = args.receive.channel.options().flush_bytes(args.buffer).flush_interval(Some(args.interval));
    let mut flush = options.flush(receiver, sink)?;
    let done = flush_all(args, &mut flush, args.receive.appear_by(&place), &signals);
    // Whatever ended it: what is here is to be in the file, and the file on the disk, before anybody is told.
    let done = match (done, flush.sync()) {
        (done, Ok(()) | Err(Error::Closed { .. } | Error::PeerDied { .. })) => done,
        (Ok(_), Err(error)) => Err(Stop::Channel(error)),
        (done, Err(_)) => done,
    };
    let done = done.map_err(|stop| match stop {
        Stop::Channel(Error::System { source, .. }) if source.kind() == ErrorKind::BrokenPipe => {
            Stop::Other(Failure::OutputClosed)
        }
        stop => stop,
    });
    let counters = flush.counters();
    drop(flush);
    let seconds = started.elapsed().as_secs_f64();
    let passed = Passed { messages: counters.messages, bytes: counters.bytes };
    args.receive.finish("flush", done, &passed, seconds, counters)
}

impl FlushArgs {
    fn sink(&self) -> Result<Box<dyn Sink>, Failure> {
        let of_files = [
            ("--rotate", self.rotate.is_some()),
            ("--sync", self.sync.is_some()),
            ("--sync-interval", self.sync_interval.is_some()),
        ];
        let is_file = self.file.as_os_str() != "-";
        let wrong = match is_file {
            true => self.frame.map(|_| ("--frame", "a record file, which keeps messages apart by itself")),
            false => of_files.iter().find(|(_, given)| *given).map(|(name, _)| (*name, "standard output")),
        };
        if let Some((option, what)) = wrong {
            return Err(Failure::Input(format!("{option} means nothing for {what}: leave it out")));
        }
        if !is_file {
            output::check()?;
            return Ok(Box::new(Stdout {
                frame: self.frame.unwrap_or(Framing::Lines),
                buffer: Vec::new(),
                written: 0,
            }));
        }
        let mut options = RecordFileOptions::new();
        if let Some(bytes) = self.rotate {
            options = options.rotate_bytes(bytes);
        }
        if let Some(bytes) = self.sync {
            options = options.sync_bytes(bytes);
        }
        if let Some(interval) = self.sync_interval {
            options = options.sync_interval(interval);
        }
        let file = options.open(&self.file)?;
        if file.cut_bytes() > 0 {
            let (bytes, path) = (file.cut_bytes(), self.file.display());
            say(format!("cut {bytes} bytes from the end of {path}, which a killed writer left torn"));
        }
        Ok(Box::new(Log(file)))
    }
}

/// A record file, and a line on standard error when another program has done something to it.
struct Log(RecordFile);

impl Sink for Log {
    fn write(&mut self, runs: &[Run<'_>]) -> pelton::Result<()> {
        let written = self.0.write(runs);
        if let Some(change) = self.0.take_change() {
            say(format!("{} {change}", self.0.path().display()));
        }
        written
    }

    fn sync(&mut self) -> pelton::Result<()> {
        self.0.sync()
    }

    fn due(&self) -> Option<Instant> {
        self.0.due()
    }

    fn last_seq(&self, lane: LaneId) -> Option<u32> {
        self.0.last_seq(lane)
    }
}

/// Standard output as a sink. What was written of what it refused is not written again.
struct Stdout {
    frame: Framing,
    buffer: Vec<u8>,
    written: usize,
}

impl Sink for Stdout {
    fn write(&mut self, runs: &[Run<'_>]) -> pelton::Result<()> {
        if self.written == 0 {
            self.buffer.clear();
            runs.iter().flat_map(Run::payloads).for_each(|payload| self.frame.write(payload, &mut self.buffer));
        }
        while self.written < self.buffer.len() {
            let left = &self.buffer[self.written..];
            match rustix::io::retry_on_intr(|| rustix::io::write(rustix::stdio::stdout(), left)) {
                Ok(bytes) => self.written += bytes,
                Err(error) => {
                    return Err(Error::System { what: "writing to standard output".to_owned(), source: error.into() });
                }
            }
        }
        self.written = 0;
        Ok(())
    }
}

/// Until the sender closes, or for ever.
fn flush_all(
    args: &FlushArgs,
    flush: &mut Flush,
    mut appear_by: Option<Instant>,
    signals: &Signals,
) -> Result<Ended, Stop> {
    let mut progress = Progress::new(None, false);
    let mut notice = args.receive.channel.notice("messages");
    // Until there was a sender, or a message of one.
    // Longer than the library spins, too short to keep a signal waiting.
    let first_wait = match args.receive.channel.wait {
        WaitArg::Spin => SLICE,
        WaitArg::Block => FIRST_WAIT,
    };
    loop {
        signals.check()?;
        let turned = match flush.run_until(Instant::now() + first_wait) {
            Ok(true) => Err(Error::Closed { unreleased: 0 }),
            Ok(false) => flush.turn(),
            Err(error) => Err(error),
        };
        let due = match turned {
            Ok(due) => due,
            Err(Error::Closed { .. }) if !args.receive.follow => return Ok(Ended::Closed),
            Err(Error::Closed { .. } | Error::PeerDied { .. }) if args.receive.follow => continue,
            Err(error) => return Err(error.into()),
        };
        let passed = flush.counters();
        progress.at(passed.messages, passed.bytes);
        appear_by = appear_by.filter(|_| passed.messages == 0);
        if passed.messages > 0 {
            notice.cancel();
        }
        notice.check();
        if appear_by.is_some_and(|by| by <= Instant::now()) {
            return Err(args.receive.channel.nobody("sender").into());
        }
        let next = due.into_iter().chain(appear_by).chain(notice.due).min();
        let left = next.map(|next| next.saturating_duration_since(Instant::now()));
        if args.receive.channel.wait == WaitArg::Block && left != Some(Duration::ZERO) && flush.arm() {
            signals.poll([(flush.as_fd(), PollFlags::IN)], left.map(|left| left.min(SLICE)))?;
        }
    }
}
