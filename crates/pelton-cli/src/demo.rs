//! `pelton demo`: the main job on real input, checked and measured.
//!
//! One process streams a file line by line, another compresses the lines with zstd; the output must decompress to the file. Then
//! the same over a Unix socket, and for each transport the lines alone, without zstd, so that the transport shows. The two
//! processes are this program again (`pipeline`); this one starts them, watches, and compares.

pub mod corpus;
pub mod pipeline;

use crate::{failure::Failure, progress, signals::Signals};
use clap::Args;
use indicatif::ProgressBar;
use pipeline::{Digest, LISTENING, Measured, System, ZSTD_LEVEL, each_line};
use rustix::{event::PollFlags, process::PidfdFlags};
use serde::Serialize;
use std::{
    borrow::Cow,
    fmt::Write as _,
    fs::{self, File},
    io::{IsTerminal as _, Read, Seek as _, Write as _},
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::{
            fs::{MetadataExt as _, PermissionsExt as _},
            process::CommandExt as _,
        },
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::Duration,
};
use tempfile::{NamedTempFile, TempDir};

/// The lines alone are sent so often, the transports taking turns; the run of median time is reported. Fewer would leave the
/// ratio to chance, more would make people wait.
const ROUNDS: usize = 3;
/// A file of fewer lines than the first, and fewer bytes than the second, takes under 4 ms by what is fast. Half a millisecond of it
/// is two processes that begin, and three runs differ by a factor of two: that tells nothing of what carries the lines.
const TELLING: (u64, u64) = (100_000, 16 << 20);
/// Files are read in blocks of this size where no transport is measured.
const BLOCK_BYTES: usize = 128 * 1024;

/// Options of `pelton demo`.
#[derive(Args)]
pub struct DemoArgs {
    /// The file to stream, line by line [default: 200 MiB of JSON lines, made once and kept in the cache directory]
    file: Option<PathBuf>,
    /// Keep the compressed lines here
    #[arg(long, value_name = "OUT")]
    output: Option<PathBuf>,
    /// What carries the lines; OUT is the first one's
    #[arg(long, value_enum, value_delimiter = ',', default_value = "pelton,sock-stream,sock-stream-batched")]
    systems: Vec<System>,
    /// Report as one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs `pelton demo`.
pub fn run(args: &DemoArgs) -> Result<(), Failure> {
    let signals = Signals::install()?;
    let input = match &args.file {
        Some(path) => Input::open(path, &signals)?,
        None => default_input(&signals)?,
    };
    let directory = TempDir::with_prefix("pelton-demo-")
        .map_err(|error| Failure::system("cannot make a temporary directory", error))?;
    let mut kept = args.output.as_deref().map(|path| Kept::aside(path, &input)).transpose()?;

    // what cannot be counted here cannot be counted there; the counter is not kept, it would slow this process
    let countable = pipeline::count_system_calls().map(drop);
    let calls = |system, output: Option<&Path>| match countable {
        Ok(()) => Run::of(system, &input, output, true, &directory, &signals).map(|run| run.system_calls),
        Err(_) => Ok(None),
    };

    let mut results = Vec::new();
    let mut output_bytes = 0;
    for &system in &args.systems {
        let scratch = NamedTempFile::new_in(&directory)
            .map_err(|error| Failure::system("cannot make a temporary file", error))?;
        let calls = calls(system, Some(scratch.path()))?;
        let keep = kept.take();
        let output = keep.as_ref().map_or(scratch.path(), |kept| kept.aside.path());
        let run = Run::of(system, &input, Some(output), false, &directory, &signals)?;
        let size = verify(&input, output, system, &signals)?;
        if results.is_empty() {
            output_bytes = size;
        }
        results.push(Outcome::of(system, Job::Zstd, vec![run], calls, &input));
        keep.map(Kept::rename).transpose()?;
    }
    let mut rounds: Vec<Vec<Run>> = args.systems.iter().map(|_| Vec::new()).collect();
    for _ in 0..ROUNDS {
        for (&system, runs) in args.systems.iter().zip(&mut rounds) {
            let run = Run::of(system, &input, None, false, &directory, &signals)?;
            if run.digest != input.digest.value() {
                return Err(Failure::Peer(format!(
                    "{}: the lines received are not the lines of the file",
                    system.label()
                )));
            }
            runs.push(run);
        }
    }
    for (&system, runs) in args.systems.iter().zip(rounds) {
        results.push(Outcome::of(system, Job::Lines, runs, calls(system, None)?, &input));
    }

    let summary = Summary {
        command: "demo",
        file: input.path.to_string_lossy(),
        bytes: input.bytes,
        lines: input.lines(),
        longest_line_bytes: input.longest,
        zstd_level: ZSTD_LEVEL,
        output: args.output.as_deref().map(Path::to_string_lossy),
        output_bytes,
        verified: true,
        too_small_to_time: input.lines() < TELLING.0 && input.bytes < TELLING.1,
        syscalls_not_measured: countable.err(),
        results,
    };
    let text = if args.json { summary.json() } else { summary.table() };
    // gone before anything is said: whoever reads the summary finds nothing left behind
    drop(directory);
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Err(Failure::OutputClosed),
        done => done.map_err(|error| Failure::system("standard output", error)),
    }
}

/// The file to stream, and what a first reading told of it.
struct Input {
    path: PathBuf,
    bytes: u64,
    /// its lines, as `each_line` tells them
    digest: Digest,
    longest: u64,
    ends_with_newline: bool,
}

impl Input {
    /// Reads the file through: it must be one whose every line can be a message.
    fn open(path: &Path, signals: &Signals) -> Result<Input, Failure> {
        let shown = path.display();
        let bad = |why: String| Failure::Input(format!("`{shown}` {why}"));
        let hint = "give a readable file of lines, or none for the default one";
        // looked at before it is opened: opening a FIFO would wait for its writer
        let metadata = fs::metadata(path).map_err(|error| bad(format!("cannot be opened: {error}; {hint}")))?;
        if metadata.is_dir() {
            return Err(bad(format!("is a directory; {hint}")));
        }
        if !metadata.is_file() {
            return Err(bad(
                "is not a regular file, and the demo reads it more than once; copy it into one first".to_string()
            ));
        }
        if metadata.len() == 0 {
            return Err(bad(format!("is empty, there is nothing to stream; {hint}")));
        }
        let file = File::open(path).map_err(|error| bad(format!("cannot be opened: {error}; {hint}")))?;
        let bar = phase(metadata.len(), "reading");
        let mut input = Input {
            path: path.to_path_buf(),
            bytes: 0,
            digest: Digest::default(),
            longest: 0,
            ends_with_newline: true,
        };
        each_line(Watched { file: &file, bar: &bar, signals }, |line| {
            input.digest.add(line);
            input.longest = input.longest.max(line.len() as u64);
            input.ends_with_newline = line.is_empty();
            Ok(())
        })
        .map_err(|failure| match failure {
            Failure::Input(text) => bad(format!("cannot be streamed: {text}")),
            Failure::System(text) => Failure::System(format!("`{shown}`: {text}")),
            // a read that a signal ended
            other => signals.check().err().unwrap_or(other),
        })?;
        signals.check()?;
        bar.finish_and_clear();
        // newlines lie between lines
        input.bytes = input.digest.bytes + input.digest.lines - 1;
        Ok(input)
    }

    /// How many lines a reader would say it has.
    fn lines(&self) -> u64 {
        self.digest.lines - u64::from(self.ends_with_newline)
    }
}

/// The default file, made first where it is missing or not what it should be.
fn default_input(signals: &Signals) -> Result<Input, Failure> {
    let path = corpus::cache_directory()?.join(corpus::NAME);
    let whole = |input: &Input| (input.bytes, input.digest.value()) == corpus::EXPECTED;
    if path.exists() {
        match Input::open(&path, signals) {
            Ok(input) if whole(&input) => return Ok(input),
            Ok(_) | Err(Failure::Input(_)) => eprintln!("pelton: `{}` is damaged, making it anew", path.display()),
            Err(failure) => return Err(failure),
        }
    }
    let bar = phase(corpus::BYTES_MIN, "making the default file");
    corpus::make(&path, |bytes| {
        bar.set_position(bytes);
        signals.check()
    })?;
    bar.finish_and_clear();
    let input = Input::open(&path, signals)?;
    if !whole(&input) {
        let found = (input.bytes, input.digest.value());
        let text =
            format!("`{}` was made as {found:?}, expected {:?} (bytes, digest)", path.display(), corpus::EXPECTED);
        return Err(Failure::System(format!("{text}: a fault of memory, disk or this program")));
    }
    Ok(input)
}

/// A file whose reading shows on a bar and ends when a signal comes.
struct Watched<'a> {
    file: &'a File,
    bar: &'a ProgressBar,
    signals: &'a Signals,
}

impl Read for Watched<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if self.signals.check().is_err() {
            // an end of file: whoever reads asks the signals afterwards
            return Ok(0);
        }
        let bytes = self.file.read(buffer)?;
        self.bar.inc(bytes as u64);
        Ok(bytes)
    }
}

fn phase(bytes: u64, name: impl Into<String>) -> ProgressBar {
    let bar = progress::bar(bytes);
    bar.set_message(name.into());
    bar
}

/// OUT, while it is being written beside its place.
struct Kept {
    aside: NamedTempFile,
    path: PathBuf,
}

impl Kept {
    fn aside(path: &Path, input: &Input) -> Result<Kept, Failure> {
        let bad = |why: String| Failure::Input(format!("--output `{}` {why}", path.display()));
        if let Ok(metadata) = fs::metadata(path) {
            if !metadata.is_file() {
                return Err(bad("exists and is not a regular file: name another".to_string()));
            }
            if fs::metadata(&input.path)
                .is_ok_and(|input| (input.dev(), input.ino()) == (metadata.dev(), metadata.ino()))
            {
                return Err(bad("is the input itself: name another".to_string()));
            }
        }
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let aside = tempfile::Builder::new()
            .prefix(".pelton-demo-")
            // what an ordinary new file has; the umask takes from it
            .permissions(fs::Permissions::from_mode(0o666))
            .tempfile_in(directory)
            .map_err(|error| bad(format!("cannot be written: {error}")))?;
        Ok(Kept { aside, path: path.to_path_buf() })
    }

    fn rename(self) -> Result<(), Failure> {
        let path = self.path;
        let failed = |error: tempfile::PersistError| {
            Failure::system(format_args!("cannot rename to `{}`", path.display()), error.error)
        };
        self.aside.persist(&path).map_err(failed).map(drop)
    }
}

/// Checks that `output` decompresses to the input; answers its size.
fn verify(input: &Input, output: &Path, system: System, signals: &Signals) -> Result<u64, Failure> {
    let failed = |error| Failure::system("checking the output", error);
    let differs = |at: u64, why: &str| {
        Failure::Peer(format!(
            "{}: the output does not decompress to `{}`: {why} at byte {at}",
            system.label(),
            input.path.display()
        ))
    };
    let original = File::open(&input.path).map_err(failed)?;
    let compressed = File::open(output).map_err(failed)?;
    let size = compressed.metadata().map_err(failed)?.len();
    let mut decoder = zstd::Decoder::new(compressed).map_err(failed)?;
    let bar = phase(input.bytes, format!("checking {}", system.label()));
    let mut original = Watched { file: &original, bar: &bar, signals };
    let (mut wanted, mut found) = (vec![0; BLOCK_BYTES], vec![0; BLOCK_BYTES]);
    let mut at = 0;
    loop {
        let wanted_bytes = read_full(&mut original, &mut wanted).map_err(failed)?;
        signals.check()?;
        let found_bytes = read_full(&mut decoder, &mut found).map_err(|error| differs(at, &error.to_string()))?;
        let (wanted, found) = (&wanted[..wanted_bytes], &found[..found_bytes]);
        if wanted != found {
            let same = wanted.iter().zip(found).take_while(|(wanted, found)| wanted == found).count() as u64;
            return Err(differs(
                at + same,
                if same == wanted.len().min(found.len()) as u64 { "an end" } else { "a difference" },
            ));
        }
        if wanted_bytes == 0 {
            return Ok(size);
        }
        at += wanted_bytes as u64;
    }
}

/// Fills `buffer`, or reads to the end.
fn read_full(from: &mut impl Read, buffer: &mut [u8]) -> std::io::Result<usize> {
    let mut bytes = 0;
    while bytes < buffer.len() {
        match from.read(&mut buffer[bytes..]) {
            Ok(0) => break,
            Ok(more) => bytes += more,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(bytes)
}

/// One run of both processes.
struct Run {
    seconds: f64,
    cpu_sender: f64,
    cpu_receiver: f64,
    system_calls: Option<u64>,
    digest: u64,
}

impl Run {
    /// Runs the pipeline once; with `output` it compresses. The figures are from the connection to the receiver's end. Counting
    /// slows every system call (a write per line takes twice the time), so the runs that count are not the runs that are timed.
    fn of(
        system: System,
        input: &Input,
        output: Option<&Path>,
        count_calls: bool,
        directory: &TempDir,
        signals: &Signals,
    ) -> Result<Run, Failure> {
        let run_directory = TempDir::with_prefix_in("run-", directory)
            .map_err(|error| Failure::system("cannot make a temporary directory", error))?;
        let file = File::open(&input.path)
            .map_err(|error| Failure::system(format_args!("`{}`", input.path.display()), error))?;
        let share = || file.try_clone().map_err(|error| Failure::system("cannot duplicate a descriptor", error));

        let mut receiver = Stage::start("receive", system, run_directory.path(), output, count_calls, Stdio::null())?;
        receiver.wait_until_listening(signals)?;
        // the sender reads from the same open file, so its place in the file can be seen here without asking it
        let mut sender = Stage::start("send", system, run_directory.path(), None, count_calls, share()?.into())?;
        let doing = if output.is_some() { "zstd" } else { "lines" };
        let bar = phase(input.bytes, format!("{}, {doing}", system.label()));
        let look_again = std::io::stderr().is_terminal().then_some(Duration::from_millis(100));
        while receiver.status.is_none() || sender.status.is_none() {
            // one that has ended is left out, by asking for the other twice
            let first = if receiver.status.is_none() { &receiver } else { &sender };
            let second = if sender.status.is_none() { &sender } else { &receiver };
            signals.poll([(first.end(), PollFlags::IN), (second.end(), PollFlags::IN)], look_again)?;
            let failed = [receiver.look()?, sender.look()?].into_iter().flatten().any(|status| !status.success());
            if failed {
                // the other will not get further either; what it might say is only the echo
                receiver.kill();
                sender.kill();
            }
            bar.set_position((&file).stream_position().unwrap_or_default());
        }
        bar.finish_and_clear();
        let (received, sent) = match (receiver.result(), sender.result()) {
            (Ok(received), Ok(sent)) => (received, sent),
            (received, sent) => {
                let failures = received.err().into_iter().chain(sent.err());
                // what one says of the other, or that it was killed for the other's sake, is only the echo
                let echo = |failure: &Failure| match failure {
                    Failure::Signal(_) => 2,
                    Failure::Peer(_) => 1,
                    _ => 0,
                };
                return Err(failures.min_by_key(echo).expect("one failed"));
            }
        };
        if (received.lines, received.bytes) != (input.digest.lines, input.digest.bytes) {
            return Err(Failure::Peer(format!(
                "{}: {} lines of {} bytes arrived, the file has {} of {}; did it change meanwhile?",
                system.label(),
                received.lines,
                received.bytes,
                input.digest.lines,
                input.digest.bytes
            )));
        }
        Ok(Run {
            seconds: received.ended_ns.saturating_sub(sent.began_ns) as f64 / 1e9,
            cpu_sender: sent.cpu_ns as f64 / 1e9,
            cpu_receiver: received.cpu_ns as f64 / 1e9,
            system_calls: sent.system_calls.zip(received.system_calls).map(|(sent, received)| sent + received),
            digest: received.digest,
        })
    }
}

/// A process of the pipeline; killed when dropped.
struct Stage {
    what: &'static str,
    child: Child,
    pidfd: Option<OwnedFd>,
    said: Vec<u8>,
    complaints: File,
    status: Option<ExitStatus>,
    killed: bool,
}

impl Stage {
    fn start(
        what: &'static str,
        system: System,
        directory: &Path,
        output: Option<&Path>,
        count_calls: bool,
        stdin: Stdio,
    ) -> Result<Stage, Failure> {
        let failed = |error| Failure::system(format_args!("cannot start the {what} process"), error);
        let program = std::env::current_exe().map_err(failed)?;
        // a file, not a pipe: nobody has to read it meanwhile
        let complaints = tempfile::tempfile_in(directory).map_err(failed)?;
        let mut command = Command::new(program);
        command.arg(format!("demo-{what}")).arg("--system").arg(system.name()).arg("--directory").arg(directory);
        if let Some(output) = output {
            command.arg("--output").arg(output);
        }
        if count_calls {
            command.arg("--count-calls");
        }
        command.stdin(stdin).stdout(Stdio::piped()).stderr(complaints.try_clone().map_err(failed)?);
        // a Ctrl-C on the terminal is for this process, which ends the stages: they would only complain of each other
        command.process_group(0);
        let child = command.spawn().map_err(failed)?;
        let mut stage = Stage { what, child, pidfd: None, said: Vec::new(), complaints, status: None, killed: false };
        let pid = rustix::process::Pid::from_child(&stage.child);
        stage.pidfd =
            Some(rustix::process::pidfd_open(pid, PidfdFlags::empty()).map_err(|error| failed(error.into()))?);
        Ok(stage)
    }

    /// Readable when the process has ended.
    fn end(&self) -> BorrowedFd<'_> {
        self.pidfd.as_ref().expect("set by start").as_fd()
    }

    /// Reads standard output until it says that it listens, or ends.
    fn wait_until_listening(&mut self, signals: &Signals) -> Result<(), Failure> {
        let stdout = self.child.stdout.as_mut().expect("piped");
        loop {
            if signals.poll([(stdout.as_fd(), PollFlags::IN)], None)?[0] {
                let mut some = [0; 64];
                let bytes =
                    stdout.read(&mut some).map_err(|error| Failure::system("reading a stage's output", error))?;
                self.said.extend_from_slice(&some[..bytes]);
                if bytes == 0 || self.said.ends_with(LISTENING) {
                    return Ok(());
                }
            }
        }
    }

    /// How it ended, if it has.
    fn look(&mut self) -> Result<Option<ExitStatus>, Failure> {
        if self.status.is_none() {
            self.status = self.child.try_wait().map_err(|error| Failure::system("waiting for a stage", error))?;
        }
        Ok(self.status)
    }

    fn kill(&mut self) {
        if self.status.is_none() {
            // fails only when it has ended
            self.killed = self.child.kill().is_ok();
        }
    }

    /// What it measured, or why it failed. Call it when it has ended.
    fn result(&mut self) -> Result<Measured, Failure> {
        let failed = |error| Failure::system("reading a stage's report", error);
        let status = self.status.expect("it has ended");
        self.child.stdout.as_mut().expect("piped").read_to_end(&mut self.said).map_err(failed)?;
        if status.success() {
            let report = self.said.strip_prefix(LISTENING).unwrap_or(&self.said);
            return serde_json::from_slice(report).map_err(|error| failed(error.into()));
        }
        if self.killed {
            return Err(Failure::Signal(9));
        }
        let mut complaint = String::new();
        self.complaints.rewind().and_then(|()| self.complaints.read_to_string(&mut complaint)).map_err(failed)?;
        let complaint = complaint.trim();
        let text = match status.code() {
            Some(_) => {
                format!("the {} process: {}", self.what, complaint.strip_prefix("pelton: ").unwrap_or(complaint))
            }
            None => format!("the {} process ended by {status} {complaint}", self.what),
        };
        Err(match status.code() {
            Some(2) => Failure::Input(text),
            Some(3) => Failure::Refused(text),
            Some(4) => Failure::TimedOut(text),
            Some(1) => Failure::Peer(text),
            _ => Failure::System(text),
        })
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.kill();
        let _ = self.child.wait();
    }
}

/// What was done with the lines.
#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Job {
    /// Compressed and written.
    Zstd,
    /// Only looked at.
    Lines,
}

/// The figures of one transport at one job.
#[derive(Serialize)]
struct Outcome {
    system: System,
    job: Job,
    /// of the run of median time
    seconds: f64,
    cpu_seconds: f64,
    cpu_seconds_sender: f64,
    cpu_seconds_receiver: f64,
    messages_per_second: f64,
    bytes_per_second: f64,
    /// both sides; null where they could not be counted
    syscalls_per_message: Option<f64>,
    /// each run's seconds, in order
    runs: Vec<f64>,
}

impl Outcome {
    fn of(system: System, job: Job, mut all: Vec<Run>, system_calls: Option<u64>, input: &Input) -> Outcome {
        let runs = all.iter().map(|run| run.seconds).collect();
        all.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        let Run { seconds, cpu_sender, cpu_receiver, .. } = all.swap_remove(all.len() / 2);
        let lines = input.digest.lines as f64;
        Outcome {
            system,
            job,
            seconds,
            cpu_seconds: cpu_sender + cpu_receiver,
            cpu_seconds_sender: cpu_sender,
            cpu_seconds_receiver: cpu_receiver,
            messages_per_second: lines / seconds,
            bytes_per_second: input.digest.bytes as f64 / seconds,
            syscalls_per_message: system_calls.map(|calls| calls as f64 / lines),
            runs,
        }
    }
}

/// What the demo says at its end.
#[derive(Serialize)]
struct Summary<'a> {
    command: &'static str,
    file: Cow<'a, str>,
    bytes: u64,
    lines: u64,
    longest_line_bytes: u64,
    zstd_level: i32,
    output: Option<Cow<'a, str>>,
    output_bytes: u64,
    /// true, or there would be an error instead
    verified: bool,
    /// see `TELLING`
    too_small_to_time: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    syscalls_not_measured: Option<String>,
    results: Vec<Outcome>,
}

impl Summary<'_> {
    fn json(&self) -> String {
        serde_json::to_string(self).expect("numbers and text") + "\n"
    }

    fn table(&self) -> String {
        let mut text = String::new();
        self.write_table(&mut text).expect("a String takes everything");
        text
    }

    fn write_table(&self, text: &mut String) -> std::fmt::Result {
        let Summary { bytes, lines, longest_line_bytes, output_bytes, .. } = self;
        writeln!(
            text,
            "{}: {} bytes, {} lines, the longest {} bytes",
            self.file,
            grouped(*bytes),
            grouped(*lines),
            grouped(*longest_line_bytes)
        )?;
        write!(text, "compressed to {} bytes", grouped(*output_bytes))?;
        if let Some(output) = &self.output {
            write!(text, " in {output}")?;
        }
        writeln!(text, "; decompresses to the input byte for byte, by each transport")?;
        for job in [Job::Zstd, Job::Lines] {
            let title = match job {
                Job::Zstd => format!("to zstd, level {}", self.zstd_level),
                Job::Lines => format!("the lines alone, median of {ROUNDS}"),
            };
            writeln!(
                text,
                "\n{title:<30}{:>9}{:>9}{:>12}{:>10}{:>13}",
                "seconds", "CPU s", "M lines/s", "GB/s", "calls/line"
            )?;
            for outcome in self.of(job) {
                let calls =
                    outcome.syscalls_per_message.map_or("not measured".to_string(), |calls| format!("{calls:.4}"));
                write!(text, "  {:<28}{:>9.3}{:>9.3}", outcome.system.label(), outcome.seconds, outcome.cpu_seconds)?;
                let (messages, bytes) = (outcome.messages_per_second / 1e6, outcome.bytes_per_second / 1e9);
                writeln!(text, "{messages:>12.2}{bytes:>10.3}{calls:>13}")?;
            }
        }
        writeln!(
            text,
            "\nCPU and system calls: both processes, reading the file and writing the output included; calls are counted in runs of their own."
        )?;
        if let Some(why) = &self.syscalls_not_measured {
            writeln!(text, "System calls were not measured: {why}.")?;
        }
        if self.too_small_to_time {
            return writeln!(
                text,
                "The file is too small: the times above mean nothing. Give one of {} lines or {} MiB, or none for the default one.",
                grouped(TELLING.0),
                TELLING.1 >> 20
            );
        }
        let mut alone = self.of(Job::Lines);
        if let Some(first) = alone.next() {
            for other in alone {
                let (time, cpu) = (other.seconds / first.seconds, other.cpu_seconds / first.cpu_seconds);
                let (label, first) = (other.system.label(), first.system.label());
                writeln!(
                    text,
                    "The lines alone, {label}: {time:.2} times the time and {cpu:.2} times the CPU of {first}."
                )?;
            }
        }
        Ok(())
    }

    fn of(&self, job: Job) -> impl Iterator<Item = &Outcome> {
        self.results.iter().filter(move |outcome| outcome.job == job)
    }
}

/// A number with a comma every three digits.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().map(|group| std::str::from_utf8(group).expect("digits")).collect();
    groups.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_by_three() {
        assert_eq!([0, 999, 1000, 209_715_345].map(grouped), ["0", "999", "1,000", "209,715,345"]);
    }
}
