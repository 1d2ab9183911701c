//! `pelton demo`: the main use on real input, checked and measured.
//!
//! One process streams a file line by line, another compresses the lines with zstd; the output must decompress to the
//! file. Then the same over a Unix socket, and for each transport the lines alone, without zstd, to measure the
//! transport. Both processes are this program (`pipeline`); this one starts, watches and compares them.

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

/// Runs of the lines alone, with the transports taking turns; the report has the run of median time. Fewer would leave
/// the ratio to chance, more would take users too long.
const ROUNDS: usize = 3;
/// A file of fewer lines and fewer bytes takes a fast transport under 4 ms. Half a millisecond of that is the start of
/// two processes, and three runs differ by a factor of two: such times say nothing about the transport.
const TIMED_LINES_MIN: u64 = 100_000;
const TIMED_BYTES_MIN: u64 = 16 << 20;
/// Block size of reads outside the measured runs.
const BLOCK_BYTES: usize = 128 * 1024;

/// Options of `pelton demo`.
#[derive(Args)]
pub struct DemoArgs {
    /// The file to stream, line by line [default: 200 MiB of JSON lines, generated once into the cache directory]
    file: Option<PathBuf>,
    /// Keep the compressed lines here
    #[arg(long, value_name = "OUT")]
    output: Option<PathBuf>,
    /// The transports; OUT is the output of the first
    #[arg(long, value_enum, value_delimiter = ',', default_value = "pelton,sock-stream,sock-stream-batched")]
    systems: Vec<System>,
    /// Report one JSON object
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
        .map_err(|error| Failure::system("cannot create a temporary directory", error))?;
    let mut output_file = args.output.as_deref().map(|path| OutputFile::create(path, &input)).transpose()?;

    // If this process cannot count, the stages cannot. The counter is dropped: it would slow this process.
    let countable = pipeline::count_system_calls().map(drop);
    let calls = |system, output: Option<&Path>| match countable {
        Ok(()) => Run::of(system, &input, output, true, &directory, &signals).map(|run| run.system_calls),
        Err(_) => Ok(None),
    };

    let mut results = Vec::new();
    let mut output_bytes = 0;
    for &system in &args.systems {
        let scratch = NamedTempFile::new_in(&directory)
            .map_err(|error| Failure::system("cannot create a temporary file", error))?;
        let calls = calls(system, Some(scratch.path()))?;
        let output_file = output_file.take();
        let output = output_file.as_ref().map_or(scratch.path(), |output_file| output_file.temporary.path());
        let run = Run::of(system, &input, Some(output), false, &directory, &signals)?;
        let size = verify(&input, output, system, &signals)?;
        if results.is_empty() {
            output_bytes = size;
        }
        results.push(Outcome::of(system, Job::Zstd, vec![run], calls, &input));
        output_file.map(OutputFile::rename).transpose()?;
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
        too_small_to_time: input.lines() < TIMED_LINES_MIN && input.bytes < TIMED_BYTES_MIN,
        syscalls_not_measured: countable.err(),
        results,
    };
    let text = if args.json { summary.json() } else { summary.table() };
    // Removed before the report is printed, so a reader of the report finds no directory.
    drop(directory);
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Err(Failure::OutputClosed),
        done => done.map_err(|error| Failure::system("standard output", error)),
    }
}

/// The file to stream, and the results of a first reading.
struct Input {
    path: PathBuf,
    bytes: u64,
    /// Its lines, as `each_line` splits them.
    digest: Digest,
    longest: u64,
    ends_with_newline: bool,
}

impl Input {
    /// Reads the whole file, in which every line must fit a message.
    fn open(path: &Path, signals: &Signals) -> Result<Input, Failure> {
        let shown = path.display();
        let bad = |why: String| Failure::Input(format!("`{shown}` {why}"));
        let hint = "give a readable file of lines, or none for the default one";
        // Checked before the open: opening a FIFO would wait for its writer.
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
        each_line(MonitoredReader { file: &file, bar: &bar, signals }, |line| {
            input.digest.add(line);
            input.longest = input.longest.max(line.len() as u64);
            input.ends_with_newline = line.is_empty();
            Ok(())
        })
        .map_err(|failure| match failure {
            Failure::Input(text) => bad(format!("cannot be streamed: {text}")),
            Failure::System(text) => Failure::System(format!("`{shown}`: {text}")),
            // A signal ended the read.
            other => signals.check().err().unwrap_or(other),
        })?;
        signals.check()?;
        bar.finish_and_clear();
        // Newlines are between the lines.
        input.bytes = input.digest.bytes + input.digest.lines - 1;
        Ok(input)
    }

    /// The number of lines, without an empty one after the last newline.
    fn lines(&self) -> u64 {
        self.digest.lines - u64::from(self.ends_with_newline)
    }
}

/// The default file, generated if it is missing or damaged.
fn default_input(signals: &Signals) -> Result<Input, Failure> {
    let path = corpus::cache_directory()?.join(corpus::NAME);
    let is_intact = |input: &Input| (input.bytes, input.digest.value()) == corpus::EXPECTED;
    if path.exists() {
        match Input::open(&path, signals) {
            Ok(input) if is_intact(&input) => return Ok(input),
            Ok(_) | Err(Failure::Input(_)) => eprintln!("pelton: `{}` is damaged, generating it again", path.display()),
            Err(failure) => return Err(failure),
        }
    }
    let bar = phase(corpus::BYTES_MIN, "generating the default file");
    corpus::create(&path, |bytes| {
        bar.set_position(bytes);
        signals.check()
    })?;
    bar.finish_and_clear();
    let input = Input::open(&path, signals)?;
    if !is_intact(&input) {
        let created = (input.bytes, input.digest.value());
        let text = format!(
            "`{}` was generated as {created:?}, expected {:?} (bytes, digest)",
            path.display(),
            corpus::EXPECTED
        );
        return Err(Failure::System(format!("{text}: a fault of memory, disk or this program")));
    }
    Ok(input)
}

/// A reader of a file that updates a bar, and ends after a signal.
struct MonitoredReader<'a> {
    file: &'a File,
    bar: &'a ProgressBar,
    signals: &'a Signals,
}

impl Read for MonitoredReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if self.signals.check().is_err() {
            // The end of the file: the caller checks the signals.
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

/// OUT, written under a temporary name beside it.
struct OutputFile {
    temporary: NamedTempFile,
    path: PathBuf,
}

impl OutputFile {
    fn create(path: &Path, input: &Input) -> Result<OutputFile, Failure> {
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
        let temporary = tempfile::Builder::new()
            .prefix(".pelton-demo-")
            // As an ordinary new file; the umask applies.
            .permissions(fs::Permissions::from_mode(0o666))
            .tempfile_in(directory)
            .map_err(|error| bad(format!("cannot be written: {error}")))?;
        Ok(OutputFile { temporary, path: path.to_path_buf() })
    }

    fn rename(self) -> Result<(), Failure> {
        let path = self.path;
        let failed = |error: tempfile::PersistError| {
            Failure::system(format_args!("cannot rename to `{}`", path.display()), error.error)
        };
        self.temporary.persist(&path).map_err(failed).map(drop)
    }
}

/// Checks that `output` decompresses to the input; returns its size.
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
    let mut original = MonitoredReader { file: &original, bar: &bar, signals };
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

/// Fills `buffer`, or reads to the end of the file.
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

/// The measurements of one run of both processes.
struct Run {
    seconds: f64,
    cpu_sender: f64,
    cpu_receiver: f64,
    system_calls: Option<u64>,
    digest: u64,
}

impl Run {
    /// Runs the pipeline once, with compression into `output` if there is one. The figures are from the connection to
    /// the end of the receiver. Counting slows every system call (a write per line takes twice the time), so the timed
    /// runs do not count.
    fn of(
        system: System,
        input: &Input,
        output: Option<&Path>,
        count_calls: bool,
        directory: &TempDir,
        signals: &Signals,
    ) -> Result<Run, Failure> {
        let run_directory = TempDir::with_prefix_in("run-", directory)
            .map_err(|error| Failure::system("cannot create a temporary directory", error))?;
        let file = File::open(&input.path)
            .map_err(|error| Failure::system(format_args!("`{}`", input.path.display()), error))?;
        let share = || file.try_clone().map_err(|error| Failure::system("cannot duplicate a descriptor", error));

        let mut receiver = Stage::start("receive", system, run_directory.path(), output, count_calls, Stdio::null())?;
        receiver.wait_until_listening(signals)?;
        // The sender reads from the same open file, so this process can read its file position.
        let mut sender = Stage::start("send", system, run_directory.path(), None, count_calls, share()?.into())?;
        let job = if output.is_some() { "zstd" } else { "lines" };
        let bar = phase(input.bytes, format!("{}, {job}", system.label()));
        let refresh_interval = std::io::stderr().is_terminal().then_some(Duration::from_millis(100));
        while receiver.status.is_none() || sender.status.is_none() {
            // If one has ended, both polls are for the other.
            let first = if receiver.status.is_none() { &receiver } else { &sender };
            let second = if sender.status.is_none() { &sender } else { &receiver };
            signals.poll([(first.exit_fd(), PollFlags::IN), (second.exit_fd(), PollFlags::IN)], refresh_interval)?;
            let failed =
                [receiver.poll_exit()?, sender.poll_exit()?].into_iter().flatten().any(|status| !status.success());
            if failed {
                // The other one cannot continue; its error would only be a consequence.
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
                // An error about the other stage, or a kill because of it, is only a consequence.
                let consequence_rank = |failure: &Failure| match failure {
                    Failure::Signal(_) => 2,
                    Failure::Peer(_) => 1,
                    _ => 0,
                };
                return Err(failures.min_by_key(consequence_rank).expect("one failed"));
            }
        };
        if (received.lines, received.bytes) != (input.digest.lines, input.digest.bytes) {
            return Err(Failure::Peer(format!(
                "{}: {} lines of {} bytes arrived, the file has {} of {}; did the file change meanwhile?",
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

/// A process of the pipeline; dropping it kills it.
struct Stage {
    what: &'static str,
    child: Child,
    pidfd: Option<OwnedFd>,
    stdout_bytes: Vec<u8>,
    stderr_file: File,
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
        // A file, not a pipe, which would need a reader.
        let stderr_file = tempfile::tempfile_in(directory).map_err(failed)?;
        let mut command = Command::new(program);
        command.arg(format!("demo-{what}")).arg("--system").arg(system.name()).arg("--directory").arg(directory);
        if let Some(output) = output {
            command.arg("--output").arg(output);
        }
        if count_calls {
            command.arg("--count-calls");
        }
        command.stdin(stdin).stdout(Stdio::piped()).stderr(stderr_file.try_clone().map_err(failed)?);
        // A group of its own: a Ctrl-C on the terminal is for this process, which kills the stages. Otherwise the
        // stages would report the ends of each other.
        command.process_group(0);
        let child = command.spawn().map_err(failed)?;
        let mut stage =
            Stage { what, child, pidfd: None, stdout_bytes: Vec::new(), stderr_file, status: None, killed: false };
        let pid = rustix::process::Pid::from_child(&stage.child);
        stage.pidfd =
            Some(rustix::process::pidfd_open(pid, PidfdFlags::empty()).map_err(|error| failed(error.into()))?);
        Ok(stage)
    }

    /// Readable once the process has ended.
    fn exit_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_ref().expect("set by start").as_fd()
    }

    /// Reads standard output until the stage listens or ends.
    fn wait_until_listening(&mut self, signals: &Signals) -> Result<(), Failure> {
        let stdout = self.child.stdout.as_mut().expect("piped");
        loop {
            if signals.poll([(stdout.as_fd(), PollFlags::IN)], None)?[0] {
                let mut some = [0; 64];
                let bytes =
                    stdout.read(&mut some).map_err(|error| Failure::system("reading a stage's output", error))?;
                self.stdout_bytes.extend_from_slice(&some[..bytes]);
                if bytes == 0 || self.stdout_bytes.ends_with(LISTENING) {
                    return Ok(());
                }
            }
        }
    }

    /// The exit status, once it has ended.
    fn poll_exit(&mut self) -> Result<Option<ExitStatus>, Failure> {
        if self.status.is_none() {
            self.status = self.child.try_wait().map_err(|error| Failure::system("waiting for a stage", error))?;
        }
        Ok(self.status)
    }

    fn kill(&mut self) {
        if self.status.is_none() {
            // Fails only if it has ended.
            self.killed = self.child.kill().is_ok();
        }
    }

    /// Its measurements, or why it failed. The stage must have ended.
    fn result(&mut self) -> Result<Measured, Failure> {
        let failed = |error| Failure::system("reading a stage's report", error);
        let status = self.status.expect("it has ended");
        self.child.stdout.as_mut().expect("piped").read_to_end(&mut self.stdout_bytes).map_err(failed)?;
        if status.success() {
            let report = self.stdout_bytes.strip_prefix(LISTENING).unwrap_or(&self.stdout_bytes);
            return serde_json::from_slice(report).map_err(|error| failed(error.into()));
        }
        if self.killed {
            return Err(Failure::Signal(9));
        }
        let mut stderr_text = String::new();
        self.stderr_file.rewind().and_then(|()| self.stderr_file.read_to_string(&mut stderr_text)).map_err(failed)?;
        let stderr_text = stderr_text.trim();
        let text = match status.code() {
            Some(_) => {
                format!("the {} process: {}", self.what, stderr_text.strip_prefix("pelton: ").unwrap_or(stderr_text))
            }
            None => format!("the {} process ended by {status} {stderr_text}", self.what),
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

/// The work of the receiving stage.
#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Job {
    /// Compressed and written.
    Zstd,
    /// Read and counted.
    Lines,
}

/// The figures of one transport at one job.
#[derive(Serialize)]
struct Outcome {
    system: System,
    job: Job,
    /// From the run of median time.
    seconds: f64,
    cpu_seconds: f64,
    cpu_seconds_sender: f64,
    cpu_seconds_receiver: f64,
    messages_per_second: f64,
    bytes_per_second: f64,
    /// Of both sides; null if they could not be counted.
    syscalls_per_message: Option<f64>,
    /// The seconds of each run, in order.
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

/// The report of the demo.
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
    /// Always true: otherwise the demo fails.
    verified: bool,
    /// See `TIMED_LINES_MIN`.
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
                "The file is too small for meaningful times. Give a file of at least {} lines or {} MiB, or none for the default file.",
                grouped(TIMED_LINES_MIN),
                TIMED_BYTES_MIN >> 20
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
