//! The two processes of one run of the demo: the sending stage reads the file and sends its lines, the receiving stage compresses
//! them, or only looks at them. Each measures itself from the connection to its end; the parent puts the two together.
//!
//! The lines are what lies between newlines, so a file that ends with a newline has an empty one after it; writing a newline
//! *between* the lines gives back the file, whether it ends with one or not.
//!
//! Both transports do the same with the same bytes; what differs is in `Outgoing` and `Incoming`, and nowhere else.

use crate::{
    failure::Failure,
    frame::{FrameError, Framing, Splitter},
};
use clap::{Args, ValueEnum};
use pelton::{Options, Receiver, Sender, Wait};
use perf_event::{Builder, Counter, events::Tracepoint};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::{
    fs::File,
    io::{BufWriter, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// The capacity of the demo's channel: the library's default, stated because the limit below follows from it.
const CAPACITY: u64 = 64 << 20;
/// The largest line, for all transports alike: half the capacity less 32 bytes.
pub const LINE_BYTES_MAX: u64 = CAPACITY / 2 - 32;
/// The file is read in blocks of this size.
const READ_BYTES: usize = 256 * 1024;
/// What the socket's receiver reads at once, and its batching sender writes at once.
const SOCKET_BYTES: usize = 64 * 1024;
/// Lines gather to this before zstd is called, whose calls cost more than lines do.
const ZSTD_BYTES: usize = 64 * 1024;
/// The compression level: zstd's own default.
pub const ZSTD_LEVEL: i32 = 3;
/// The receiver is there before the sender is started, so this passes only when something is badly wrong.
const CONNECT_WITHIN: Duration = Duration::from_secs(30);

/// What carries the lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum System {
    /// A pelton channel, each line published at once, both sides blocking
    Pelton,
    /// A Unix stream socket, a 4-byte length before each line, one write per line
    SockStream,
    /// The same through a buffer of 64 KiB on the sending side
    SockStreamBatched,
}

impl System {
    /// Its name on the command line.
    pub fn name(self) -> String {
        self.to_possible_value().expect("none is hidden").get_name().to_string()
    }

    /// Its name in the table.
    pub fn label(self) -> &'static str {
        match self {
            System::Pelton => "pelton",
            System::SockStream => "socket, a write per line",
            System::SockStreamBatched => "socket, 64 KiB batches",
        }
    }
}

/// How the parent tells a stage what to do; the sender's file is its standard input.
#[derive(Args)]
pub struct StageArgs {
    /// What carries the lines
    #[arg(long)]
    pub system: System,
    /// The directory of the run's socket
    #[arg(long)]
    pub directory: PathBuf,
    /// Compress into this file, which exists
    #[arg(long)]
    pub output: Option<PathBuf>,
    /// Count system calls, which slows each of them down
    #[arg(long)]
    pub count_calls: bool,
}

impl StageArgs {
    fn channel(&self) -> String {
        format!("unix:{}", self.socket().display())
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("demo")
    }
}

/// What a stage tells the parent at its end, as JSON on standard output.
#[derive(Debug, Serialize, Deserialize)]
pub struct Measured {
    /// Monotonic clock at the connection.
    pub began_ns: u64,
    /// Monotonic clock when all was done.
    pub ended_ns: u64,
    /// CPU time between the two, user and system, all threads.
    pub cpu_ns: u64,
    /// System calls between the two, if asked for.
    pub system_calls: Option<u64>,
    /// Lines received; of the sender, nothing.
    pub lines: u64,
    /// Their bytes, without newlines.
    pub bytes: u64,
    /// The digest's value.
    pub digest: u64,
}

/// The line that the receiving stage writes when it listens.
pub const LISTENING: &[u8] = b"listening\n";

/// Runs the sending process.
pub fn send_stage(args: &StageArgs) -> Result<(), Failure> {
    die_with_parent()?;
    let mut out = Outgoing::connect(args)?;
    let meter = Meter::start(args.count_calls)?;
    each_line(std::io::stdin().lock(), |line| out.send(line))?;
    out.finish()?;
    report(&meter.stop(&Digest::default())?)
}

/// Runs the receiving process.
pub fn receive_stage(args: &StageArgs) -> Result<(), Failure> {
    die_with_parent()?;
    let mut incoming = Incoming::accept(args)?;
    let meter = Meter::start(args.count_calls)?;
    let mut digest = Digest::default();
    match &args.output {
        None => incoming.each(|line| {
            digest.add(line);
            Ok(())
        })?,
        Some(path) => {
            let failed = |error| Failure::system(format_args!("writing `{}`", path.display()), error);
            // it exists already, and is nobody else's
            let file = File::options().write(true).open(path).map_err(failed)?;
            let encoder = zstd::Encoder::new(file, ZSTD_LEVEL).map_err(failed)?;
            let mut encoder = BufWriter::with_capacity(ZSTD_BYTES, encoder);
            incoming.each(|line| {
                if digest.lines > 0 {
                    encoder.write_all(b"\n").map_err(failed)?;
                }
                digest.count(line);
                encoder.write_all(line).map_err(failed)
            })?;
            let encoder = encoder.into_inner().map_err(|error| failed(error.into_error()))?;
            encoder.finish().map_err(failed)?;
        }
    }
    report(&meter.stop(&digest)?)
}

/// A parent that is killed takes its stages along.
fn die_with_parent() -> Result<(), Failure> {
    let signal = Some(rustix::process::Signal::KILL);
    rustix::process::set_parent_process_death_signal(signal).map_err(|error| Failure::system("prctl", error))
}

fn report(measured: &Measured) -> Result<(), Failure> {
    let line = serde_json::to_string(measured).expect("numbers and text");
    writeln!(std::io::stdout(), "{line}").map_err(|error| Failure::system("standard output", error))
}

/// Calls `f` with every line of `input`: what lies between newlines.
pub fn each_line(mut input: impl Read, mut f: impl FnMut(&[u8]) -> Result<(), Failure>) -> Result<(), Failure> {
    let mut splitter = Splitter::new(Framing::Lines, LINE_BYTES_MAX, READ_BYTES);
    let mut last = None;
    loop {
        while let Some(line) = splitter.next().map_err(line_failure)? {
            f(line)?;
        }
        if splitter.ended() {
            break;
        }
        let space = splitter.space();
        let bytes = input.read(space).map_err(|error| Failure::system("reading the file", error))?;
        last = space[..bytes].last().copied().or(last);
        splitter.filled(bytes);
    }
    if last == Some(b'\n') { f(b"") } else { Ok(()) }
}

fn line_failure(error: FrameError) -> Failure {
    Failure::Input(format!("{error}: the demo sends each line as one message, so FILE must have shorter ones"))
}

/// The sending end of a transport.
enum Outgoing {
    Pelton(Box<Sender>),
    SockStream { stream: UnixStream, frame: Vec<u8> },
    SockStreamBatched(BufWriter<UnixStream>),
}

impl Outgoing {
    fn connect(args: &StageArgs) -> Result<Outgoing, Failure> {
        if args.system == System::Pelton {
            let options =
                Options::new().capacity(CAPACITY).wait(Wait::Block).connect_deadline(Instant::now() + CONNECT_WITHIN);
            return Ok(Outgoing::Pelton(Box::new(options.connect_sender(&args.channel())?)));
        }
        let stream =
            UnixStream::connect(args.socket()).map_err(|error| Failure::system("connecting the socket", error))?;
        Ok(match args.system {
            System::SockStreamBatched => Outgoing::SockStreamBatched(BufWriter::with_capacity(SOCKET_BYTES, stream)),
            _ => Outgoing::SockStream { stream, frame: Vec::new() },
        })
    }

    fn send(&mut self, line: &[u8]) -> Result<(), Failure> {
        let written = match self {
            Outgoing::Pelton(sender) => return Ok(sender.send(line)?),
            Outgoing::SockStream { stream, frame } => {
                frame.clear();
                Framing::Len32.write(line, frame);
                stream.write_all(frame)
            }
            Outgoing::SockStreamBatched(stream) => {
                let length = (line.len() as u32).to_le_bytes();
                stream.write_all(&length).and_then(|()| stream.write_all(line))
            }
        };
        written.map_err(socket_failure)
    }

    fn finish(self) -> Result<(), Failure> {
        match self {
            Outgoing::Pelton(sender) => Ok(sender.close()?),
            Outgoing::SockStream { .. } => Ok(()),
            Outgoing::SockStreamBatched(mut stream) => stream.flush().map_err(socket_failure),
        }
    }
}

/// The receiving end of a transport.
enum Incoming {
    Pelton(Box<Receiver>),
    Socket(UnixStream),
}

impl Incoming {
    /// Listens, says so on standard output, and waits for the sender.
    fn accept(args: &StageArgs) -> Result<Incoming, Failure> {
        let say = || std::io::stdout().write_all(LISTENING).map_err(|error| Failure::system("standard output", error));
        if args.system == System::Pelton {
            let listener = Options::new().wait(Wait::Block).listen(&args.channel())?;
            say()?;
            let receiver = listener.accept_receiver_until(Instant::now() + CONNECT_WITHIN)?;
            return receiver
                .map(|receiver| Incoming::Pelton(Box::new(receiver)))
                .ok_or_else(|| Failure::TimedOut("the sending process did not connect".to_string()));
        }
        let listener =
            UnixListener::bind(args.socket()).map_err(|error| Failure::system("listening on the socket", error))?;
        say()?;
        let (stream, _) = listener.accept().map_err(|error| Failure::system("accepting the socket", error))?;
        Ok(Incoming::Socket(stream))
    }

    /// Calls `f` with every line until the sender closes.
    fn each(&mut self, mut f: impl FnMut(&[u8]) -> Result<(), Failure>) -> Result<(), Failure> {
        match self {
            Incoming::Pelton(receiver) => loop {
                match receiver.receive() {
                    Ok(line) => f(&line)?,
                    Err(pelton::Error::Closed { .. }) => return Ok(()),
                    Err(error) => return Err(error.into()),
                }
            },
            Incoming::Socket(stream) => {
                let mut splitter = Splitter::new(Framing::Len32, LINE_BYTES_MAX, SOCKET_BYTES);
                loop {
                    while let Some(line) = splitter.next().map_err(|error| Failure::Peer(error.to_string()))? {
                        f(line)?;
                    }
                    if splitter.ended() {
                        return Ok(());
                    }
                    let bytes = stream.read(splitter.space()).map_err(socket_failure)?;
                    splitter.filled(bytes);
                }
            }
        }
    }
}

fn socket_failure(error: std::io::Error) -> Failure {
    Failure::Peer(format!("the socket: {error}"))
}

/// What a receiver keeps of the lines, cheap enough (two multiplications for 16 bytes) not to hide the transport, and touching
/// every byte, so that a transport which only maps them gains nothing. For noticing differences, not for security.
#[derive(Debug, PartialEq, Eq)]
pub struct Digest {
    /// How many.
    pub lines: u64,
    /// Their bytes.
    pub bytes: u64,
    a: u64,
    b: u64,
}

impl Default for Digest {
    fn default() -> Digest {
        // not zero, which zeros would not change
        Digest { lines: 0, bytes: 0, a: 1, b: 2 }
    }
}

impl Digest {
    const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;

    /// Counts a line and takes in its bytes.
    pub fn add(&mut self, line: &[u8]) {
        self.count(line);
        self.mix(line.len() as u64, 0);
        let (pairs, rest) = line.as_chunks::<16>();
        for pair in pairs {
            let (a, b) = (pair[..8].try_into().expect("8 bytes"), pair[8..].try_into().expect("8 bytes"));
            self.mix(u64::from_le_bytes(a), u64::from_le_bytes(b));
        }
        let mut last = [0; 16];
        last[..rest.len()].copy_from_slice(rest);
        self.mix(
            u64::from_le_bytes(last[..8].try_into().expect("8 bytes")),
            u64::from_le_bytes(last[8..].try_into().expect("8 bytes")),
        );
    }

    /// Only counts a line.
    fn count(&mut self, line: &[u8]) {
        self.lines += 1;
        self.bytes += line.len() as u64;
    }

    fn mix(&mut self, a: u64, b: u64) {
        self.a = (self.a ^ a).wrapping_mul(Self::MULTIPLIER).rotate_left(29);
        self.b = (self.b ^ b).wrapping_mul(Self::MULTIPLIER).rotate_left(31);
    }

    /// The digest of the lines so far, their order and their limits.
    pub fn value(&self) -> u64 {
        self.a ^ self.b.rotate_left(32)
    }
}

/// Time, CPU time and system calls of this process from here on.
struct Meter {
    began_ns: u64,
    cpu_ns: u64,
    counter: Option<Counter>,
}

impl Meter {
    fn start(count_calls: bool) -> Result<Meter, Failure> {
        let counter = if count_calls { Some(count_system_calls().map_err(Failure::System)?) } else { None };
        Ok(Meter { began_ns: clock_ns(ClockId::Monotonic), cpu_ns: clock_ns(ClockId::ProcessCPUTime), counter })
    }

    fn stop(self, digest: &Digest) -> Result<Measured, Failure> {
        let read = |mut counter: Counter| counter.read().map_err(|error| Failure::system("reading the counter", error));
        let system_calls = self.counter.map(read).transpose()?;
        Ok(Measured {
            began_ns: self.began_ns,
            ended_ns: clock_ns(ClockId::Monotonic),
            cpu_ns: clock_ns(ClockId::ProcessCPUTime) - self.cpu_ns,
            // the read is one itself
            system_calls: system_calls.map(|calls| calls.saturating_sub(1)),
            lines: digest.lines,
            bytes: digest.bytes,
            digest: digest.value(),
        })
    }
}

fn clock_ns(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Counts what enters the kernel by the tracepoint for it, all threads of this process; commonly allowed to root only.
pub fn count_system_calls() -> Result<Counter, String> {
    let read = |root: &str| std::fs::read_to_string(Path::new(root).join("events/raw_syscalls/sys_enter/id"));
    // where debugfs has it is the older place: of the two errors the first says more
    let id = read("/sys/kernel/tracing")
        .or_else(|error| read("/sys/kernel/debug/tracing").map_err(|_| error))
        .map_err(|error| format!("no access to tracepoints: {error}"))?;
    let id = id.trim().parse().map_err(|_| format!("the tracepoint's id is `{}`", id.trim()))?;
    let mut counter = Builder::new(Tracepoint::with_id(id))
        .include_kernel()
        .inherit(true)
        .build()
        .map_err(|error| format!("perf_event_open: {error}"))?;
    counter.enable().map_err(|error| format!("enabling the counter: {error}"))?;
    Ok(counter)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(input: &[u8]) -> Vec<Vec<u8>> {
        let mut lines = Vec::new();
        each_line(input, |line| {
            lines.push(line.to_vec());
            Ok(())
        })
        .unwrap();
        lines
    }

    #[test]
    fn lines_joined_by_newlines_are_the_file() {
        let files: [&[u8]; 8] =
            [b"a", b"a\n", b"\n", b"\n\n\na", b"a\r\nb\r\n", b"a\n\nb", &[255, 10, 0, 254], &[b'x'; 700_000]];
        for file in files {
            assert_eq!(lines(file).join(&b'\n'), file);
        }
        assert_eq!(lines(b"a\nb\n"), [b"a".to_vec(), b"b".to_vec(), b"".to_vec()]);
    }

    #[test]
    fn a_digest_tells_bytes_order_and_limits_of_lines() {
        let digest = |lines: &[&[u8]]| {
            let mut digest = Digest::default();
            lines.iter().for_each(|line| digest.add(line));
            digest.value()
        };
        let all: [&[&[u8]]; 8] = [
            &[],
            &[b""],
            &[b"", b""],
            &[b"ab"],
            &[b"a", b"b"],
            &[b"b", b"a"],
            &[b"ab\0"],
            &[b"0123456789abcdef0123456789abcdef"],
        ];
        let values: std::collections::HashSet<u64> = all.iter().map(|lines| digest(lines)).collect();
        assert_eq!(values.len(), all.len());
    }

    #[test]
    fn a_socket_carries_lines_either_way_of_writing() {
        let text: Vec<u8> =
            (0..3000u32).flat_map(|i| format!("{i} {}\n", "x".repeat(i as usize % 301)).into_bytes()).collect();
        for batched in [false, true] {
            let (here, there) = UnixStream::pair().unwrap();
            let mut out = match batched {
                true => Outgoing::SockStreamBatched(BufWriter::with_capacity(SOCKET_BYTES, here)),
                false => Outgoing::SockStream { stream: here, frame: Vec::new() },
            };
            let mut received = Vec::new();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    each_line(&text[..], |line| out.send(line)).unwrap();
                    out.finish().unwrap();
                });
                let keep = |line: &[u8]| {
                    received.push(line.to_vec());
                    Ok(())
                };
                Incoming::Socket(there).each(keep).unwrap();
            });
            assert_eq!(received.join(&b'\n'), text);
        }
    }
}
