//! A command that runs beside an event loop. Its input waits in memory, its output is read as it arrives, and nothing
//! here waits. The command leads a process group, which is killed with it. An unreaped process keeps its number, so the
//! kill cannot reach another group.

use crate::{
    descriptors,
    failure::{Failure, print_stderr},
};
use rustix::{
    event::PollFlags,
    fs::{OFlags, fcntl_getfl, fcntl_setfl},
    io::Errno,
    process::{
        Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitOptions, getpid, kill_process, kill_process_group,
        pidfd_open, set_child_subreaper, waitid, waitpid,
    },
};
use std::{
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::process::{CommandExt as _, ExitStatusExt as _},
    },
    process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, ExitStatus, Stdio},
};

/// Bytes per read.
const READ_BYTES: usize = 64 * 1024;
/// Bytes kept from the start of standard error.
const ERROR_BYTES: usize = 4096;

/// A running command.
pub struct Process {
    child: Child,
    /// Readable once the command has ended.
    pidfd: OwnedFd,
    stdin: Option<ChildStdin>,
    input: Vec<u8>,
    written: usize,
    closes: bool,
    stdout: Option<ChildStdout>,
    /// Standard output so far, until the caller takes it.
    pub output: Vec<u8>,
    stderr: Option<ChildStderr>,
    errors: Vec<u8>,
    is_reaped: bool,
}

impl Process {
    /// Starts `command` by the shell. With `keeps_errors`, keeps the start of its standard error; otherwise the command
    /// inherits that of this program.
    pub fn start(command: &str, keeps_errors: bool) -> Result<Process, Failure> {
        let failed = |error: std::io::Error| Failure::system(format_args!("starting `{command}`"), error);
        let mut child = Command::new("sh")
            .arg("-c")
            .arg(descriptors::with_original_limit(command).as_ref())
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(if keeps_errors { Stdio::piped() } else { Stdio::inherit() })
            .spawn()
            .map_err(failed)?;
        let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty());
        let pipes =
            [stdin.as_ref().map(AsFd::as_fd), stdout.as_ref().map(AsFd::as_fd), stderr.as_ref().map(AsFd::as_fd)];
        let unblocked =
            pipes.into_iter().flatten().try_for_each(|fd| fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK));
        let pidfd = pidfd.and_then(|pidfd| unblocked.map(|()| pidfd)).map_err(|error| {
            let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
            let _ = child.wait();
            failed(error.into())
        })?;
        Ok(Process {
            child,
            pidfd,
            stdin,
            input: Vec::new(),
            written: 0,
            closes: false,
            stdout,
            output: Vec::new(),
            stderr,
            errors: Vec::new(),
            is_reaped: false,
        })
    }

    /// Queues `bytes` for its standard input.
    pub fn write(&mut self, bytes: &[u8]) {
        self.input.extend_from_slice(bytes);
    }

    /// Closes its standard input once all queued bytes are written.
    pub fn close_input(&mut self) {
        self.closes = true;
        if self.input.is_empty() {
            self.stdin = None;
        }
    }

    /// The descriptors and events to poll.
    pub fn poll_events(&self) -> impl Iterator<Item = (BorrowedFd<'_>, PollFlags)> {
        let writes = self.stdin.as_ref().filter(|_| self.written < self.input.len());
        let reads = [self.stdout.as_ref().map(AsFd::as_fd), self.stderr.as_ref().map(AsFd::as_fd)];
        let ends = (self.pidfd.as_fd(), PollFlags::IN);
        let writes = writes.map(|stdin| (stdin.as_fd(), PollFlags::OUT));
        std::iter::once(ends).chain(writes).chain(reads.into_iter().flatten().map(|fd| (fd, PollFlags::IN)))
    }

    /// Writes and reads without waiting, up to `output_max` bytes of output. True: it has ended and its output is read,
    /// or its output exceeds that.
    pub fn step(&mut self, output_max: usize) -> Result<bool, Failure> {
        // First: then the output that it wrote before its end is readable.
        let has_ended = self.has_ended()?;
        self.write_queued()?;
        read_available(&mut self.stdout, &mut self.output, output_max)?;
        if self.stderr.is_some() {
            let mut errors = Vec::new();
            // A limit: a command can write faster than this reads.
            read_available(&mut self.stderr, &mut errors, READ_BYTES)?;
            let space = ERROR_BYTES - self.errors.len();
            self.errors.extend_from_slice(&errors[..errors.len().min(space)]);
        }
        Ok(has_ended)
    }

    fn has_ended(&self) -> Result<bool, Failure> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        match waitid(WaitId::Pid(Pid::from_child(&self.child)), options) {
            Ok(status) => Ok(status.is_some()),
            Err(Errno::INTR) => Ok(false),
            Err(error) => Err(Failure::system("waiting for a process", error)),
        }
    }

    fn write_queued(&mut self) -> Result<(), Failure> {
        while let Some(stdin) = self.stdin.as_ref().filter(|_| self.written < self.input.len()) {
            match rustix::io::write(stdin, &self.input[self.written..]) {
                Ok(bytes) => self.written += bytes,
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                // The command need not read its whole input.
                Err(Errno::PIPE) => self.stdin = None,
                Err(error) => return Err(Failure::system("writing to a process", error)),
            }
        }
        if self.written == self.input.len() {
            self.input.clear();
            self.written = 0;
            if self.closes {
                self.stdin = None;
            }
        }
        Ok(())
    }

    /// Kills the rest of its group. Returns its exit status and the start of its standard error.
    pub fn end(mut self) -> (ExitStatus, Vec<u8>) {
        let errors = std::mem::take(&mut self.errors);
        (self.reap(), errors)
    }

    fn reap(&mut self) -> ExitStatus {
        if !self.is_reaped {
            let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        }
        self.is_reaped = true;
        self.child.wait().unwrap_or_else(|_| ExitStatus::from_raw(0xff00))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.reap();
    }
}

/// A process that leaves its command's group becomes a child of this process once its parent has ended. Dropping this
/// kills all children that are left, and says which.
pub struct Orphans(());

impl Orphans {
    pub fn adopt() -> Result<Orphans, Failure> {
        set_child_subreaper(Some(getpid())).map_err(|error| Failure::system("adopting processes", error))?;
        Ok(Orphans(()))
    }
}

impl Drop for Orphans {
    fn drop(&mut self) {
        // A killed process's own children come after it. The limit ends a race with a process that always forks.
        for _ in 0..1000 {
            let children = std::fs::read_to_string("/proc/thread-self/children").unwrap_or_default();
            for child in children.split_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)) {
                if let Ok(None) = waitpid(Some(child), WaitOptions::NOHANG) {
                    let name = std::fs::read_to_string(format!("/proc/{child}/comm")).unwrap_or_default();
                    print_stderr(format_args!("killed `{}`, pid {child}, which a driver had left", name.trim()));
                    let _ = kill_process(child, Signal::KILL);
                    let _ = waitpid(Some(child), WaitOptions::empty());
                }
            }
            if children.is_empty() {
                return;
            }
        }
    }
}

/// Reads the available bytes until `into` has more than `most`. At the end of the file, sets `from` to `None`.
fn read_available(from: &mut Option<impl AsFd>, into: &mut Vec<u8>, most: usize) -> Result<(), Failure> {
    while let Some(fd) = from.as_ref().filter(|_| into.len() <= most) {
        into.reserve(READ_BYTES);
        match rustix::io::read(fd, rustix::buffer::spare_capacity(into)) {
            Ok(0) => *from = None,
            Ok(_) | Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => break,
            Err(error) => return Err(Failure::system("reading from a process", error)),
        }
    }
    Ok(())
}
