//! The built program as a child process, with a deadline on whatever waits for it.
#![allow(dead_code, reason = "each test file uses its part of it")]

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::inotify,
    process::{Pid, Signal, kill_process},
};
use std::{
    io::{Read, Write as _},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    os::unix::fs::{FileTypeExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// Far above what anything takes on a loaded machine; only a hang reaches it.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// Directories of a test's own, for whatever the program leaves in the user's.
pub struct Place {
    root: TempDir,
}

impl Place {
    pub fn new() -> Place {
        let root = TempDir::new().unwrap();
        for name in ["run", "tmp", "cache", "work"] {
            std::fs::create_dir(root.path().join(name)).unwrap();
        }
        // as a runtime directory has to be
        std::fs::set_permissions(root.path().join("run"), std::fs::Permissions::from_mode(0o700)).unwrap();
        Place { root }
    }

    /// The program with `arguments`, living in this place.
    pub fn pelton(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pelton"));
        command.args(arguments).current_dir(self.path("work"));
        command.env("XDG_RUNTIME_DIR", self.path("run")).env("TMPDIR", self.path("tmp"));
        command.env("XDG_CACHE_HOME", self.path("cache"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    pub fn start(&self, arguments: &[&str]) -> Process {
        Process::start(self.pelton(arguments))
    }

    /// Runs to the end without input.
    pub fn run(&self, arguments: &[&str]) -> Ended {
        self.start(arguments).finish()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// A file in the working directory.
    pub fn file(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.path("work").join(name);
        std::fs::write(&path, content).unwrap();
        path
    }

    /// Fails if a socket, or anything in the temporary directory, is left.
    pub fn assert_nothing_left(&self) {
        fn visit(directory: &Path, left: &mut Vec<PathBuf>) {
            for entry in std::fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                let file_type = std::fs::symlink_metadata(&path).unwrap().file_type();
                if file_type.is_dir() {
                    visit(&path, left);
                } else if file_type.is_socket() {
                    left.push(path);
                }
            }
        }
        let mut left: Vec<PathBuf> =
            std::fs::read_dir(self.path("tmp")).unwrap().map(|entry| entry.unwrap().path()).collect();
        visit(self.root.path(), &mut left);
        assert!(left.is_empty(), "left behind: {left:?}");
    }
}

/// Tells when something appears in a directory.
pub struct Appearance(OwnedFd);

impl Appearance {
    pub fn watch(directory: &Path) -> Appearance {
        let inotify = inotify::init(inotify::CreateFlags::CLOEXEC).unwrap();
        let events = inotify::WatchFlags::CREATE | inotify::WatchFlags::MOVED_TO;
        inotify::add_watch(&inotify, directory, events).unwrap();
        Appearance(inotify)
    }

    pub fn wait(self) {
        readable(&[self.0.as_fd()], "nothing appeared in the directory");
    }
}

/// Waits until one is readable, and says which are.
pub fn readable(fds: &[BorrowedFd<'_>], otherwise: &str) -> Vec<bool> {
    let deadline = Instant::now() + DEADLINE;
    let mut polled: Vec<PollFd<'_>> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    loop {
        let left = deadline.checked_duration_since(Instant::now()).unwrap_or_else(|| panic!("{otherwise}"));
        match poll(&mut polled, Some(&Timespec::try_from(left).unwrap())) {
            Ok(0) => panic!("{otherwise}"),
            Ok(_) => return polled.iter().map(|fd| !fd.revents().is_empty()).collect(),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => panic!("poll: {error}"),
        }
    }
}

/// How a process ended.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub stdout: Vec<u8>,
    pub stderr: String,
}

impl Ended {
    /// Fails unless it ended so, and standard error holds `words`.
    #[track_caller]
    pub fn assert(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:?}");
        for word in words {
            assert!(self.stderr.contains(word), "`{word}` is missing in: {}", self.stderr);
        }
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// A running program; killed when dropped. Its output is read as it comes, unless taken away.
pub struct Process {
    child: Child,
    pidfd: OwnedFd,
    stdin: Option<ChildStdin>,
    stdout: Option<Stream>,
    stderr: Option<Stream>,
}

/// What a thread reads from a pipe.
struct Stream {
    chunks: Receiver<Vec<u8>>,
    /// read, and not asked for yet
    rest: Vec<u8>,
}

impl Stream {
    fn read(mut from: impl Read + Send + 'static) -> Stream {
        let (sender, chunks) = channel();
        std::thread::spawn(move || {
            let mut buffer = vec![0; 64 * 1024];
            while let Ok(bytes @ 1..) = from.read(&mut buffer) {
                if sender.send(buffer[..bytes].to_vec()).is_err() {
                    break;
                }
            }
        });
        Stream { chunks, rest: Vec::new() }
    }

    /// More, or false at the end.
    fn more(&mut self) -> bool {
        match self.chunks.recv_timeout(DEADLINE) {
            Ok(chunk) => self.rest.extend(chunk),
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => panic!("no output and no end of it"),
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => return false,
        }
        true
    }
}

impl Process {
    pub fn start(command: Command) -> Process {
        let mut process = Process::start_unread(command);
        let stdout = process.child.stdout.take().unwrap();
        process.stdout = Some(Stream::read(stdout));
        process
    }

    /// Leaves reading standard output to the caller: `take_stdout`.
    pub fn start_unread(mut command: Command) -> Process {
        let mut child = command.spawn().unwrap();
        let pidfd = rustix::process::pidfd_open(Pid::from_child(&child), rustix::process::PidfdFlags::empty()).unwrap();
        let (stdin, stderr) = (child.stdin.take(), child.stderr.take().unwrap());
        Process { child, pidfd, stdin, stdout: None, stderr: Some(Stream::read(stderr)) }
    }

    pub fn take_stdout(&mut self) -> ChildStdout {
        self.child.stdout.take().unwrap()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Readable when it has ended.
    pub fn end(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    pub fn write(&mut self, bytes: &[u8]) {
        self.stdin.as_mut().unwrap().write_all(bytes).unwrap();
    }

    pub fn close_input(&mut self) {
        self.stdin = None;
    }

    /// Writes all of it from a thread of its own and closes: neither side's pipe can hold the other up.
    pub fn write_all_and_close(&mut self, bytes: Vec<u8>) {
        let mut stdin = self.stdin.take().unwrap();
        // it may end before it has read everything
        std::thread::spawn(move || _ = stdin.write_all(&bytes));
    }

    /// The next line of output, without its newline.
    pub fn line(&mut self) -> String {
        let stream = self.stdout.as_mut().unwrap();
        loop {
            if let Some(at) = stream.rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = stream.rest.drain(..=at).collect();
                return String::from_utf8(line[..at].to_vec()).unwrap();
            }
            assert!(stream.more(), "the output ended before the line did");
        }
    }

    /// Whether the process is asleep in `poll` at this moment.
    pub fn polls(&self) -> bool {
        let call = std::fs::read_to_string(format!("/proc/{}/syscall", self.child.id())).unwrap_or_default();
        let number = call.split(' ').next().and_then(|number| number.parse().ok());
        number.is_some_and(|number: i64| {
            [libc::SYS_poll, libc::SYS_ppoll, libc::SYS_epoll_wait, libc::SYS_epoll_pwait].contains(&number)
        })
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Closes its input and waits for its end.
    pub fn finish(mut self) -> Ended {
        self.close_input();
        self.wait()
    }

    /// Waits for its end with its input left open.
    pub fn wait(mut self) -> Ended {
        let all = |stream: Option<Stream>| {
            let mut stream = stream?;
            while stream.more() {}
            Some(stream.rest)
        };
        let (stdout, stderr) = (all(self.stdout.take()), all(self.stderr.take()));
        readable(&[self.end()], "the process did not end");
        let code = self.child.wait().unwrap().code();
        let stderr = String::from_utf8(stderr.unwrap()).unwrap();
        Ended { code, stdout: stdout.unwrap_or_default(), stderr }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
