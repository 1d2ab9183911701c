//! The two processes of one run of the demo. The sending stage reads the file and sends its lines; the receiving stage
//! compresses them, or only reads them. Each stage measures itself from the connection to its end; the parent combines
//! the two.
//!
//! A line is the text between two newlines, so a file that ends with a newline has an empty line after it. Newlines
//! written *between* the lines restore the file, with or without a newline at its end.
//!
//! Each transport carries the same bytes; `Outgoing` and `Incoming` have all that differs.

use crate::calls;
use clap::ValueEnum;
use pelton::{Options, Receiver, Sender, Wait};
use pelton_cli::{
    failure::Failure,
    frame::{FrameError, Framing, Splitter},
};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::{
    fs::File,
    io::{BufWriter, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::PathBuf,
    time::{Duration, Instant},
};

/// The capacity of the demo's channel: the default of the library. The limit below follows from it.
const CAPACITY: u64 = 64 << 20;
/// The largest line, for each transport: half the capacity less 32 bytes.
pub const LINE_BYTES_MAX: u64 = CAPACITY / 2 - 32;
/// Bytes per read of the file.
const READ_BYTES: usize = 256 * 1024;
/// Bytes per read of the receiver of a socket, and per write of the batching sender.
const SOCKET_BYTES: usize = 64 * 1024;
/// Bytes of lines per call of zstd: such a call costs more than a line.
const ZSTD_BYTES: usize = 64 * 1024;
/// The compression level: the default of zstd.
pub const ZSTD_LEVEL: i32 = 3;
/// Only a defect exceeds this: the receiver listens before the sender starts.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// The transport of the lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum System {
    /// A pelton channel, each line sent on its own, both sides blocking
    Pelton,
    /// A Unix stream socket, a 4-byte length before each line, one write per line
    SockStream,
    /// The same through a buffer of 64 KiB on the sending side
    SockStreamBatched,
}

impl System {
    /// Its name in the table.
    pub fn label(self) -> &'static str {
        match self {
            System::Pelton => "pelton",
            System::SockStream => "socket, a write per line",
            System::SockStreamBatched => "socket, 64 KiB batches",
        }
    }

    /// Its name in a sentence.
    pub fn in_words(self) -> &'static str {
        match self {
            System::Pelton => "pelton",
            System::SockStream => "a socket with a write per line",
            System::SockStreamBatched => "a socket with 64 KiB batches",
        }
    }
}

/// The task of a stage.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Reads the file and sends its lines
    Send,
    /// Receives the lines
    Receive,
}

impl Role {
    /// Its name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Role::Send => "sending",
            Role::Receive => "receiving",
        }
    }
}

/// The orders of the parent to a stage; the standard input of the sender is the file.
#[derive(Serialize, Deserialize)]
pub struct Plan {
    /// Its task
    pub role: Role,
    /// The transport of the lines
    pub system: System,
    /// The directory of the run's socket
    pub directory: PathBuf,
    /// Compress into this existing file
    pub output: Option<PathBuf>,
    /// Count system calls, which slows each of them
    pub count_calls: bool,
}

impl Plan {
    fn channel(&self) -> String {
        format!("unix:{}", self.socket().display())
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("demo")
    }
}

/// The report of a stage to the parent, as JSON on standard output.
#[derive(Debug, Serialize, Deserialize)]
pub struct Measured {
    /// Monotonic clock at the connection.
    pub began_ns: u64,
    /// Monotonic clock at the end.
    pub ended_ns: u64,
    /// CPU time between the two, user and system, all threads.
    pub cpu_ns: u64,
    /// System calls between the two, if counted.
    pub system_calls: Option<u64>,
    /// Received lines; 0 for the sender.
    pub lines: u64,
    /// Their bytes, without newlines.
    pub bytes: u64,
    /// The value of the digest.
    pub digest: u64,
}

/// Runs a stage; `plan` is JSON.
pub fn run(plan: &str) -> Result<(), Failure> {
    let plan: Plan = serde_json::from_str(plan).map_err(|error| Failure::Input(format!("--stage: {error}")))?;
    die_with_parent()?;
    match plan.role {
        Role::Send => send(&plan),
        Role::Receive => receive(&plan),
    }
}

/// The output of the receiving stage once it listens.
pub const LISTENING: &[u8] = b"listening\n";

fn send(plan: &Plan) -> Result<(), Failure> {
    let mut out = Outgoing::connect(plan)?;
    let meter = Meter::start(plan.count_calls);
    each_line(std::io::stdin().lock(), |line| out.send(line))?;
    out.finish()?;
    report(&meter.stop(&Digest::default()))
}

fn receive(plan: &Plan) -> Result<(), Failure> {
    let mut incoming = Incoming::accept(plan)?;
    let meter = Meter::start(plan.count_calls);
    let mut digest = Digest::default();
    match &plan.output {
        None => incoming.each(|line| {
            digest.add(line);
            Ok(())
        })?,
        Some(path) => {
            let failed = |error| Failure::system(format_args!("writing `{}`", path.display()), error);
            // It exists, and belongs to this run.
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
    report(&meter.stop(&digest))
}

/// The kernel kills a stage when its parent dies.
fn die_with_parent() -> Result<(), Failure> {
    let signal = Some(rustix::process::Signal::KILL);
    rustix::process::set_parent_process_death_signal(signal).map_err(|error| Failure::system("prctl", error))
}

fn report(measured: &Measured) -> Result<(), Failure> {
    let line = serde_json::to_string(measured).expect("numbers and text");
    writeln!(std::io::stdout(), "{line}").map_err(|error| Failure::system("standard output", error))
}

/// Calls `f` with every line of `input`, without newlines.
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
    fn connect(plan: &Plan) -> Result<Outgoing, Failure> {
        if plan.system == System::Pelton {
            let options =
                Options::new().capacity(CAPACITY).wait(Wait::Block).connect_deadline(Instant::now() + CONNECT_TIMEOUT);
            return Ok(Outgoing::Pelton(Box::new(options.connect_sender(&plan.channel())?)));
        }
        let stream =
            UnixStream::connect(plan.socket()).map_err(|error| Failure::system("connecting the socket", error))?;
        Ok(match plan.system {
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
    /// Listens, reports that on standard output, and waits for the sender.
    fn accept(plan: &Plan) -> Result<Incoming, Failure> {
        let report_listening =
            || std::io::stdout().write_all(LISTENING).map_err(|error| Failure::system("standard output", error));
        if plan.system == System::Pelton {
            let listener = Options::new().wait(Wait::Block).listen(&plan.channel())?;
            report_listening()?;
            let receiver = listener.accept_receiver_until(Instant::now() + CONNECT_TIMEOUT)?;
            return receiver
                .map(|receiver| Incoming::Pelton(Box::new(receiver)))
                .ok_or_else(|| Failure::TimedOut("the sending process did not connect".to_string()));
        }
        let listener =
            UnixListener::bind(plan.socket()).map_err(|error| Failure::system("listening on the socket", error))?;
        report_listening()?;
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

/// A digest of received lines. It is cheap enough (two multiplications for 16 bytes) not to hide the cost of the
/// transport. It reads every byte, so a transport that only maps them has no advantage. It detects differences, and
/// gives no security.
#[derive(Debug, PartialEq, Eq)]
pub struct Digest {
    /// The number of lines.
    pub lines: u64,
    /// The bytes of the lines.
    pub bytes: u64,
    a: u64,
    b: u64,
}

impl Default for Digest {
    fn default() -> Digest {
        // Not zero: zeros in the input would not change it.
        Digest { lines: 0, bytes: 0, a: 1, b: 2 }
    }
}

impl Digest {
    const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;

    /// Counts a line, and adds its bytes to the digest.
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

    /// The digest of the lines so far: their bytes, order and boundaries.
    pub fn value(&self) -> u64 {
        self.a ^ self.b.rotate_left(32)
    }
}

/// Time, CPU time and system calls of this process since the start of the meter.
struct Meter {
    began_ns: u64,
    cpu_ns: u64,
    counts_calls: bool,
}

impl Meter {
    fn start(count_calls: bool) -> Meter {
        // First: its own system calls are not of the work.
        let counts_calls = count_calls && calls::count();
        Meter { began_ns: clock_ns(ClockId::Monotonic), cpu_ns: clock_ns(ClockId::ProcessCPUTime), counts_calls }
    }

    fn stop(self, digest: &Digest) -> Measured {
        Measured {
            system_calls: self.counts_calls.then(calls::counted),
            began_ns: self.began_ns,
            ended_ns: clock_ns(ClockId::Monotonic),
            cpu_ns: clock_ns(ClockId::ProcessCPUTime) - self.cpu_ns,
            lines: digest.lines,
            bytes: digest.bytes,
            digest: digest.value(),
        }
    }
}

fn clock_ns(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
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
    fn a_digest_depends_on_bytes_order_and_boundaries_of_lines() {
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
    fn a_socket_carries_lines_with_and_without_batches() {
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
