//! Standard output that a signal can interrupt, also if the reader of a pipe has stopped reading. A pipe or a terminal
//! is opened again, with O_NONBLOCK: the flag on the inherited descriptor would affect every process that shares it.

use crate::{failure::Failure, signals::Signals};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{FileType, Mode, OFlags},
    io::Errno,
    net::SendFlags,
};
use serde::Serialize;
use std::{
    io::Write as _,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::atomic::{AtomicBool, Ordering},
};

/// Write once this many bytes are buffered: enough to amortise a write, and small enough to stay in the cache. A guess.
pub const WRITE_BYTES: usize = 256 * 1024;

/// Initial capacity of the buffer: a write is due before it is full, unless messages are large.
const FIRST_BYTES: usize = 2 * WRITE_BYTES;

/// A larger buffer is freed after its write: messages of this size are rare. Freeing smaller buffers would cost new
/// pages for each message. A guess.
const KEEP_BYTES_MAX: usize = 16 * 1024 * 1024;

/// How long an interrupted command waits for a reader of its output. A guess: such a reader is busy and has not left.
const READER_TIMEOUT: Timespec = Timespec { tv_sec: 0, tv_nsec: 500_000_000 };

/// Whether this process started without a writable standard output.
static WAS_CLOSED: AtomicBool = AtomicBool::new(false);

/// Checks before `main`: there Rust opens /dev/null for a closed standard output, which then looks like a /dev/null
/// that the caller passed.
#[used]
// SAFETY: the loader calls each function in `.init_array` once, before any thread starts; this one makes one system
// call.
#[unsafe(link_section = ".init_array")]
static CHECK_STDOUT: extern "C" fn() = {
    extern "C" fn check_stdout() {
        let flags = rustix::fs::fcntl_getfl(rustix::stdio::stdout());
        let is_writable = flags.is_ok_and(|flags| flags & OFlags::RWMODE != OFlags::RDONLY);
        WAS_CLOSED.store(!is_writable, Ordering::Relaxed);
    }
    check_stdout
};

/// Fails if there is no standard output.
pub fn check() -> Result<(), Failure> {
    match WAS_CLOSED.load(Ordering::Relaxed) {
        false => Ok(()),
        true => Err(Failure::System(
            "standard output is closed, or open for reading only: redirect it to a file, a pipe or /dev/null"
                .to_owned(),
        )),
    }
}

/// Writes a text to standard output.
pub fn print(text: impl AsRef<[u8]>) -> Result<(), Failure> {
    check()?;
    let mut stdout = std::io::stdout();
    match stdout.write_all(text.as_ref()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Err(Failure::OutputClosed),
        done => done.map_err(|error| Failure::system("standard output", error)),
    }
}

/// `value` as one line of JSON.
pub fn json(value: &impl Serialize) -> String {
    let mut line = serde_json::to_string(value).expect("numbers and text");
    line.push('\n');
    line
}

/// Standard output, and bytes that wait for a write.
pub struct Output {
    /// Bytes to write.
    pub buffer: Vec<u8>,
    /// The pipe or terminal, opened again.
    reopened: Option<OwnedFd>,
    is_socket: bool,
    may_block: bool,
}

impl Output {
    /// Opens it again if a write to it could block. Fails if it is closed.
    pub fn new() -> Result<Output, Failure> {
        check()?;
        let stdout = rustix::stdio::stdout();
        let file_type = rustix::fs::fstat(stdout).map(|stat| FileType::from_raw_mode(stat.st_mode));
        let reopened = match file_type {
            // If the kernel refuses this open, writes block, and a second Ctrl-C ends the process.
            Ok(FileType::Fifo | FileType::CharacterDevice) => rustix::fs::open(
                "/proc/self/fd/1",
                OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC,
                Mode::empty(),
            )
            .ok(),
            _ => None,
        };
        let is_socket = file_type == Ok(FileType::Socket);
        let may_block = reopened.is_none() && !is_socket && file_type != Ok(FileType::RegularFile);
        Ok(Output { buffer: Vec::with_capacity(FIRST_BYTES), reopened, is_socket, may_block })
    }

    /// Writes the whole buffer. After a failure, the buffer holds the unwritten rest.
    pub fn write(&mut self, signals: &Signals) -> Result<(), Failure> {
        let mut written = 0;
        let done = loop {
            if written == self.buffer.len() {
                break Ok(());
            }
            let failed = match self.write_once(&self.buffer[written..]) {
                Ok(bytes) => {
                    written += bytes;
                    Ok(())
                }
                Err(Errno::AGAIN) => signals.poll([(self.as_fd(), PollFlags::OUT)], None).map(drop),
                Err(Errno::INTR) => signals.check(),
                Err(Errno::PIPE | Errno::CONNRESET) => Err(Failure::OutputClosed),
                Err(error) => Err(Failure::system("standard output", error)),
            };
            if failed.is_err() {
                break failed;
            }
        };
        self.buffer.drain(..written);
        if self.buffer.capacity() > KEEP_BYTES_MAX && self.buffer.is_empty() {
            self.buffer = Vec::with_capacity(FIRST_BYTES);
        }
        done
    }

    /// After an interrupt: writes the rest of the buffer while its reader reads. The receiver has released these
    /// messages, so no other process delivers them. Ends after half a second without progress, and at the next
    /// signal. Returns how many bytes are lost.
    pub fn write_remaining(&mut self) -> usize {
        let mut written = 0;
        while !self.may_block && written < self.buffer.len() {
            match self.write_once(&self.buffer[written..]) {
                Ok(bytes) => written += bytes,
                Err(Errno::AGAIN) => {
                    let mut fds = [PollFd::new(self, PollFlags::OUT)];
                    if !matches!(poll(&mut fds, Some(&READER_TIMEOUT)), Ok(1..)) {
                        break;
                    }
                }
                Err(_) => break,
            }
        }
        let left = self.buffer.len() - written;
        self.buffer.clear();
        left
    }

    fn write_once(&self, bytes: &[u8]) -> rustix::io::Result<usize> {
        if self.is_socket {
            return rustix::net::send(self, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
        rustix::io::write(self, bytes)
    }
}

impl AsFd for Output {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.reopened.as_ref().map_or(rustix::stdio::stdout(), OwnedFd::as_fd)
    }
}
