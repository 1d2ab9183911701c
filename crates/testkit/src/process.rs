//! Any program as a child process, and its output.

use crate::deadline::{DEADLINE, eventually, wait_for_readable};
use crate::kernel;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use std::cell::{OnceCell, RefCell};
use std::io::{Read, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::process::{ChildStdin, ChildStdout, Command, ExitStatus};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

/// A running program, killed when dropped. Threads read those of its outputs that are pipes, unless they are taken
/// away.
pub struct Process {
    child: std::process::Child,
    pidfd: OnceCell<OwnedFd>,
    stdin: Option<ChildStdin>,
    stdout: Option<Output>,
    stderr: Option<Output>,
}

impl Process {
    /// Starts it.
    pub fn start(command: Command) -> Process {
        let mut process = Process::start_unread(command);
        process.stdout = process.child.stdout.take().map(Output::read);
        process
    }

    /// Starts it, and does not read standard output: the caller takes it by [`Process::take_stdout`].
    pub fn start_unread(mut command: Command) -> Process {
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let (stdin, stderr) = (child.stdin.take(), child.stderr.take().map(Output::read));
        Process { child, pidfd: OnceCell::new(), stdin, stdout: None, stderr }
    }

    /// Standard output, which no thread reads yet.
    pub fn take_stdout(&mut self) -> ChildStdout {
        self.child.stdout.take().unwrap()
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// A descriptor that is readable once the process has ended.
    pub fn end(&self) -> BorrowedFd<'_> {
        let open = || pidfd_open(Pid::from_child(&self.child), PidfdFlags::empty()).unwrap();
        self.pidfd.get_or_init(open).as_fd()
    }

    /// Writes to its standard input.
    pub fn write(&mut self, bytes: &[u8]) {
        self.stdin.as_mut().unwrap().write_all(bytes).unwrap();
    }

    /// Closes its standard input.
    pub fn close_input(&mut self) {
        self.stdin = None;
    }

    /// Writes all of it from a thread of its own and closes: neither side's pipe can block the other.
    pub fn write_all_and_close(&mut self, bytes: Vec<u8>) {
        let mut stdin = self.stdin.take().unwrap();
        // The program may end before it has read everything.
        std::thread::spawn(move || _ = stdin.write_all(&bytes));
    }

    /// The next line of its standard output, without the newline.
    #[track_caller]
    pub fn line(&self) -> String {
        self.line_within(DEADLINE).expect("the output ended before the line did")
    }

    /// As [`Process::line`], with another time-out; `None` at the end.
    #[track_caller]
    pub fn line_within(&self, timeout: Duration) -> Option<String> {
        self.stdout.as_ref().unwrap().line(timeout)
    }

    /// Whether a thread of it is asleep in `poll` or epoll at this moment.
    pub fn polls(&self) -> bool {
        kernel::process_polls(self.pid())
    }

    /// Waits until the kernel reports this state: 'T' stopped, 'S' asleep, 'Z' ended. The kernel does not notify that.
    #[track_caller]
    pub fn wait_for_state(&self, state: char) {
        eventually(&format!("the process is in state {state}"), || kernel::state_of(self.pid()) == Some(state));
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Kills it; returns when it is dead.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Closes its input and waits for its end.
    #[track_caller]
    pub fn finish(mut self) -> Ended {
        self.close_input();
        self.wait()
    }

    /// Waits for its end, with its input left open.
    #[track_caller]
    pub fn wait(mut self) -> Ended {
        let all = |output: Option<Output>| output.map(Output::rest).unwrap_or_default();
        let (stdout, stderr) = (all(self.stdout.take()), all(self.stderr.take()));
        wait_for_readable(&[self.end()], "the process ends");
        Ended { status: self.status(), stdout, stderr: String::from_utf8(stderr).unwrap() }
    }

    /// Its exit status; waits for its end.
    pub(crate) fn status(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The output that a thread reads from a pipe.
struct Output {
    chunks: Receiver<Vec<u8>>,
    /// Read, and not taken yet.
    pending: RefCell<Vec<u8>>,
}

impl Output {
    fn read(mut pipe: impl Read + Send + 'static) -> Output {
        let (sender, chunks) = channel();
        std::thread::spawn(move || {
            let mut buffer = vec![0; 64 * 1024];
            while let Ok(bytes @ 1..) = pipe.read(&mut buffer) {
                if sender.send(buffer[..bytes].to_vec()).is_err() {
                    break;
                }
            }
        });
        Output { chunks, pending: RefCell::default() }
    }

    /// Waits for more; false at the end.
    #[track_caller]
    fn more(&self, timeout: Duration) -> bool {
        match self.chunks.recv_timeout(timeout) {
            Ok(chunk) => self.pending.borrow_mut().extend(chunk),
            Err(RecvTimeoutError::Timeout) => panic!("no output and no end of it within {timeout:?}"),
            Err(RecvTimeoutError::Disconnected) => return false,
        }
        true
    }

    /// `None` at the end, also if an incomplete line is left.
    #[track_caller]
    fn line(&self, timeout: Duration) -> Option<String> {
        // A long line is searched once, not with each chunk of it.
        let mut searched = 0;
        loop {
            let mut pending = self.pending.borrow_mut();
            if let Some(found) = pending[searched..].iter().position(|byte| *byte == b'\n') {
                let at = searched + found;
                let line: Vec<u8> = pending.drain(..=at).collect();
                return Some(String::from_utf8(line[..at].to_vec()).unwrap());
            }
            searched = pending.len();
            drop(pending);
            if !self.more(timeout) {
                return None;
            }
        }
    }

    #[track_caller]
    fn rest(self) -> Vec<u8> {
        while self.more(DEADLINE) {}
        self.pending.into_inner()
    }
}

/// How a process ended.
#[derive(Debug)]
pub struct Ended {
    /// By a code or a signal.
    pub status: ExitStatus,
    /// The rest of its standard output.
    pub stdout: Vec<u8>,
    /// Its standard error.
    pub stderr: String,
}

impl Ended {
    /// Its exit code; `None` if a signal ended it.
    pub fn code(&self) -> Option<i32> {
        self.status.code()
    }

    /// Fails unless it ended with this code, and standard error holds `words`.
    #[track_caller]
    pub fn assert(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code(), Some(code), "{self:?}");
        for word in words {
            assert!(self.stderr.contains(word), "`{word}` is missing in: {}", self.stderr);
        }
    }
}
