//! `pelton flush`: writes the messages of a channel to a record file, or to standard output, one buffer at a time. It
//! releases a message once it is written.
//!
//! The library takes messages in ticks (`Flush::tick`). Between two of them, one poll waits for the channel, the
//! signals and the next deadline.

use crate::{
    channel::{ReceiveArgs, StreamError, Traffic, WaitArg},
    failure::{Failure, print_stderr},
    frame::Framing,
    output,
    progress::{self, Progress},
    report::Ended,
    signals::{SLICE, Signals},
};
use clap::Args;
use pelton::{Chunk, Error, Flush, LaneId, RecordFile, RecordFileOptions, Sink};
use rustix::event::PollFlags;
use std::{
    io::ErrorKind,
    os::fd::AsFd,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// How long the library waits before the command polls the signals too.
const LIBRARY_WAIT: Duration = Duration::from_millis(1);

/// Options of `pelton flush`.
#[derive(Args)]
pub struct FlushArgs {
    #[command(flatten)]
    receive: ReceiveArgs,
    /// The record file, which is created or appended to; `pelton cat FILE` prints it. With -, standard output
    file: PathBuf,
    /// How messages are separated on standard output [default: lines]
    #[arg(long, value_enum)]
    frame: Option<Framing>,
    #[command(flatten)]
    writes: WriteArgs,
}

/// When `flush` and `record` write.
#[derive(Args)]
pub struct WriteArgs {
    /// Write when that much has arrived, with K, M or G
    #[arg(long, value_name = "BYTES", value_parser = crate::bytes, default_value = "1M")]
    buffer: u64,
    /// Write that long after a message arrived, if --buffer is not reached before
    #[arg(long, value_name = "SECONDS", value_parser = crate::seconds, default_value = "0.1")]
    interval: Duration,
    /// Start a new file before this one exceeds that size (10M), or once it has that age (30s, 10min, 1h, 1d); it is
    /// renamed to FILE.000001 and so on
    #[arg(long, value_name = "SIZE|TIME", value_parser = rotation)]
    rotate: Option<Rotation>,
    /// Compress what is written; `pelton cat` and `pelton replay` read it. A larger --buffer and a longer --interval
    /// compress better
    #[arg(long, value_enum)]
    compress: Option<Compression>,
    /// Sync to disk each time that much is written; 0: before each write counts
    #[arg(long, value_name = "BYTES", value_parser = crate::bytes)]
    sync: Option<u64>,
    /// Sync to disk that long after a write
    #[arg(long, value_name = "SECONDS", value_parser = crate::seconds)]
    sync_interval: Option<Duration>,
}

/// How a record file is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Compression {
    /// In frames of about 1 MiB
    Zstd,
}

/// When a new file starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rotation {
    Bytes(u64),
    Age(Duration),
}

fn rotation(text: &str) -> Result<Rotation, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let seconds: u64 = match &text[digits.len()..] {
        "s" => 1,
        "min" => 60,
        "h" => 3600,
        "d" => 86_400,
        _ => {
            let bytes =
                crate::bytes(text).map_err(|error| format!("{error}; or a time, such as 30s, 10min, 1h or 1d"))?;
            return Ok(Rotation::Bytes(bytes));
        }
    };
    let number: u64 = digits.parse().map_err(|error| format!("{error}: want a time, such as 30s, 10min, 1h or 1d"))?;
    match number.checked_mul(seconds) {
        Some(0) | None => Err("want a time of at least 1s, and less than 2^64 s".to_owned()),
        Some(seconds) => Ok(Rotation::Age(Duration::from_secs(seconds))),
    }
}

/// Runs `pelton flush`.
pub fn run(args: &FlushArgs) -> Result<(), Failure> {
    flush_channel("flush", &args.receive, &args.writes, false, || args.sink())
}

/// Flushes a channel into a sink; with `notes_arrivals`, with the time at which each message arrived.
pub fn flush_channel(
    command: &'static str,
    receive: &ReceiveArgs,
    writes: &WriteArgs,
    notes_arrivals: bool,
    open_sink: impl FnOnce() -> Result<Box<dyn Sink>, Failure>,
) -> Result<(), Failure> {
    let transport = receive.transport()?;
    let signals = Signals::install()?;
    // First: no sender connects to a receiver that cannot write.
    let sink = open_sink()?;
    let receiver = receive.open_receiver(&transport, &signals, receive.channel.options())?;
    let started = Instant::now();
    let options = receive.channel.options().flush_bytes(writes.buffer).flush_interval(Some(writes.interval));
    let mut flush = Flush::new(&options.cast(), receiver, sink)?;
    if notes_arrivals {
        flush.note_arrivals();
    }
    let done = flush_all(receive, &mut flush, receive.peer_deadline(&transport), &signals);
    // Whatever the reason for the end: received messages are in the file and synced before the sender detects it.
    let done = match (done, flush.sync()) {
        (done, Ok(()) | Err(Error::Closed { .. } | Error::PeerDied { .. })) => done,
        (Ok(_), Err(error)) => Err(StreamError::Channel(error)),
        (done, Err(_)) => done,
    };
    let done = done.map_err(|stop| match stop {
        StreamError::Channel(Error::System { error: source, .. }) if source.kind() == ErrorKind::BrokenPipe => {
            StreamError::Other(Failure::OutputClosed)
        }
        stop => stop,
    });
    let counters = flush.counters();
    drop(flush);
    let seconds = started.elapsed().as_secs_f64();
    let traffic = Traffic { messages: counters.messages, bytes: counters.bytes };
    receive.finish(command, done, &traffic, seconds, counters)
}

impl FlushArgs {
    fn sink(&self) -> Result<Box<dyn Sink>, Failure> {
        let file_options = [
            ("--rotate", self.writes.rotate.is_some()),
            ("--compress", self.writes.compress.is_some()),
            ("--sync", self.writes.sync.is_some()),
            ("--sync-interval", self.writes.sync_interval.is_some()),
        ];
        let is_file = self.file.as_os_str() != "-";
        let wrong = match is_file {
            true => self.frame.map(|_| ("--frame", "a record file, which separates messages itself")),
            false => file_options.iter().find(|(_, is_used)| *is_used).map(|(name, _)| (*name, "standard output")),
        };
        if let Some((option, what)) = wrong {
            return Err(Failure::Input(format!("{option} does not apply to {what}: leave it out")));
        }
        if !is_file {
            output::check()?;
            return Ok(Box::new(Stdout {
                frame: self.frame.unwrap_or(Framing::Lines),
                buffer: Vec::new(),
                written: 0,
            }));
        }
        self.writes.open(&self.file)
    }
}

impl WriteArgs {
    /// Opens the record file.
    pub fn open(&self, path: &Path) -> Result<Box<dyn Sink>, Failure> {
        let mut options = RecordFileOptions::new();
        match self.rotate {
            Some(Rotation::Bytes(bytes)) => options = options.rotate_bytes(bytes),
            Some(Rotation::Age(age)) => options = options.rotate_interval(age),
            None => {}
        }
        if self.compress == Some(Compression::Zstd) {
            options = options.compress_zstd();
        }
        if let Some(bytes) = self.sync {
            options = options.sync_bytes(bytes);
        }
        if let Some(interval) = self.sync_interval {
            options = options.sync_interval(interval);
        }
        let file = options.open(path).map_err(Failure::of_file)?;
        if file.cut_bytes() > 0 {
            let (bytes, path) = (file.cut_bytes(), path.display());
            print_stderr(format!("removed {bytes} bytes of a torn write, by a killed writer, from the end of {path}"));
        }
        Ok(Box::new(Log(file)))
    }
}

/// A record file. It reports changes by other programs on standard error.
struct Log(RecordFile);

impl Sink for Log {
    fn write(&mut self, runs: &[Chunk<'_>]) -> pelton::Result<()> {
        let written = self.0.write(runs);
        if let Some(change) = self.0.take_change() {
            print_stderr(format!("{} {change}", self.0.path().display()));
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

/// Standard output as a sink. After a failed write, it continues behind the written bytes.
struct Stdout {
    frame: Framing,
    buffer: Vec<u8>,
    written: usize,
}

impl Sink for Stdout {
    fn write(&mut self, runs: &[Chunk<'_>]) -> pelton::Result<()> {
        if self.written == 0 {
            self.buffer.clear();
            runs.iter().flat_map(Chunk::payloads).for_each(|payload| self.frame.write(payload, &mut self.buffer));
        }
        while self.written < self.buffer.len() {
            let left = &self.buffer[self.written..];
            match rustix::io::retry_on_intr(|| rustix::io::write(rustix::stdio::stdout(), left)) {
                Ok(bytes) => self.written += bytes,
                Err(error) => {
                    return Err(Error::System { what: "writing to standard output".to_owned(), error: error.into() });
                }
            }
        }
        self.written = 0;
        Ok(())
    }
}

/// Flushes until the sender closes, or without end.
fn flush_all(
    receive: &ReceiveArgs,
    flush: &mut Flush,
    mut peer_deadline: Option<Instant>,
    signals: &Signals,
) -> Result<Ended, StreamError> {
    let mut progress = Progress::after(progress::DELAY);
    let mut notice = receive.channel.notice("messages");
    // Longer than the library spins, and too short to delay a signal noticeably.
    let library_wait = match receive.channel.wait {
        WaitArg::Spin => SLICE,
        WaitArg::Block => LIBRARY_WAIT,
    };
    loop {
        signals.check()?;
        let polled = match flush.run_until(Instant::now() + library_wait) {
            Ok(true) => Err(Error::Closed { unreleased: 0 }),
            Ok(false) => flush.tick(),
            Err(error) => Err(error),
        };
        let due = match polled {
            Ok(due) => due,
            Err(Error::Closed { .. }) if !receive.follow => return Ok(Ended::Closed),
            Err(Error::Closed { .. } | Error::PeerDied { .. }) if receive.follow => continue,
            Err(error) => return Err(error.into()),
        };
        let traffic = flush.counters();
        progress.update(|seconds| {
            format!("{}, {} messages", progress::amount(traffic.bytes, None, seconds), traffic.messages)
        });
        peer_deadline = peer_deadline.filter(|_| traffic.messages == 0);
        if traffic.messages > 0 {
            notice.cancel();
        }
        notice.check();
        if peer_deadline.is_some_and(|by| by <= Instant::now()) {
            return Err(receive.channel.no_peer("sender").into());
        }
        let next = due.into_iter().chain(peer_deadline).chain(notice.due).min();
        let left = next.map(|next| next.saturating_duration_since(Instant::now()));
        if receive.channel.wait == WaitArg::Block && left != Some(Duration::ZERO) && flush.arm().is_waiting() {
            signals.poll([(flush.as_fd(), PollFlags::IN)], left.map(|left| left.min(SLICE)))?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rotation_is_by_size_or_by_age() {
        assert_eq!(rotation("10M"), Ok(Rotation::Bytes(10 << 20)));
        assert_eq!(rotation("10min"), Ok(Rotation::Age(Duration::from_secs(600))));
        assert_eq!(rotation("30s"), Ok(Rotation::Age(Duration::from_secs(30))));
        assert_eq!(rotation("2d"), Ok(Rotation::Age(Duration::from_secs(172_800))));
        for bad in ["", "s", "0s", "1.5h", "1w", "99999999999999999999d", "999999999999999999d"] {
            assert!(rotation(bad).is_err(), "{bad}");
        }
    }
}
