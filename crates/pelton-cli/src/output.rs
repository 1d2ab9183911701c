//! Standard output, for what must not outlast a Ctrl-C when the reader of a pipe has stopped reading: a pipe or terminal is opened anew
//! without blocking (the flag on the one that was inherited would be everybody's).

use crate::{failure::Failure, signals::Signals};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{FileType, Mode, OFlags},
    io::Errno,
    net::SendFlags,
};
use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::atomic::{AtomicBool, Ordering},
};

/// Write when so much has gathered. Large enough that a write's cost vanishes, small enough to stay in the cache. A guess.
pub const WRITE_BYTES: usize = 256 * 1024;

/// What a buffer has room for at first: a write is due before it is full, unless messages are large.
const FIRST_BYTES: usize = 2 * WRITE_BYTES;

/// A buffer that is written and larger than this is released: messages of this size are rare, and one has needed it. Below it the cost of new pages
/// for each message would be felt. A guess.
const KEPT_BYTES: usize = 16 * 1024 * 1024;

/// How long an interrupted command waits for a reader of its output that has not read enough yet. A guess: it is busy, not gone.
const READER_PATIENCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 500_000_000 };

/// Whether this process was started without a standard output that can be written to.
static WAS_CLOSED: AtomicBool = AtomicBool::new(false);

/// Before `main`, since Rust opens /dev/null there, which takes everything, and nobody could tell it from one that was given.
#[used]
// SAFETY: the loader calls what is listed there once, before any thread is started; it makes one system call.
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = {
    extern "C" fn look() {
        let found = rustix::fs::fcntl_getfl(rustix::stdio::stdout());
        let is_writable = found.is_ok_and(|flags| flags & OFlags::RWMODE != OFlags::RDONLY);
        WAS_CLOSED.store(!is_writable, Ordering::Relaxed);
    }
    look
};

/// Fails if there is no standard output.
pub fn check() -> Result<(), Failure> {
    match WAS_CLOSED.load(Ordering::Relaxed) {
        false => Ok(()),
        true => Err(Failure::System(
            "standard output is closed, or only to be read: redirect it to a file, a pipe or /dev/null".to_owned(),
        )),
    }
}

/// Standard output, and what has gathered for it.
pub struct Output {
    /// What has gathered
    pub buffer: Vec<u8>,
    /// the pipe or terminal opened anew
    opened: Option<OwnedFd>,
    is_socket: bool,
    may_block: bool,
}

impl Output {
    /// Opens it anew, where it could keep this process waiting. Fails if it is closed.
    pub fn new() -> Result<Output, Failure> {
        check()?;
        let stdout = rustix::stdio::stdout();
        let file_type = rustix::fs::fstat(stdout).map(|stat| FileType::from_raw_mode(stat.st_mode));
        let opened = match file_type {
            // where this is not allowed, writing blocks, and a second Ctrl-C ends it
            Ok(FileType::Fifo | FileType::CharacterDevice) => rustix::fs::open(
                "/proc/self/fd/1",
                OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC,
                Mode::empty(),
            )
            .ok(),
            _ => None,
        };
        let is_socket = file_type == Ok(FileType::Socket);
        let may_block = opened.is_none() && !is_socket && file_type != Ok(FileType::RegularFile);
        Ok(Output { buffer: Vec::with_capacity(FIRST_BYTES), opened, is_socket, may_block })
    }

    /// Writes all that has gathered; after a failure the rest is still there.
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
        if self.buffer.capacity() > KEPT_BYTES && self.buffer.is_empty() {
            self.buffer = Vec::with_capacity(FIRST_BYTES);
        }
        done
    }

    /// After an interrupt: writes what is left as long as somebody reads it, since the messages of a socket's channel are released, and nobody else
    /// will deliver them. Gives up after [`READER_PATIENCE`] without progress, and at the next signal. Answers how many bytes are left out.
    pub fn write_what_goes(&mut self) -> usize {
        let mut written = 0;
        while !self.may_block && written < self.buffer.len() {
            match self.write_once(&self.buffer[written..]) {
                Ok(bytes) => written += bytes,
                Err(Errno::AGAIN) => {
                    let mut fds = [PollFd::new(self, PollFlags::OUT)];
                    if !matches!(poll(&mut fds, Some(&READER_PATIENCE)), Ok(1..)) {
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
        self.opened.as_ref().map_or(rustix::stdio::stdout(), OwnedFd::as_fd)
    }
}
