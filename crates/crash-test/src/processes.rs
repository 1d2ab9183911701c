//! The processes of a crash test, from outside: both sides of a channel, and their host. Dropping a value kills its
//! processes.

use super::{
    HANG_TIMEOUT_AGAINST,
    journal::{Journal, READY, Word},
    plan::{Plan, Transport},
    resources::Resources,
};
use pelton_cli::failure::Failure;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open, pidfd_send_signal},
};
use std::{
    cell::Cell,
    fs,
    io::{BufRead as _, BufReader, Write as _},
    os::{fd::OwnedFd, unix::process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

/// A started side.
pub struct Side {
    pub plan: Plan,
    pub journal: Journal,
    pub pid: Pid,
    pidfd: OwnedFd,
    pub is_killed: Cell<bool>,
}

impl Side {
    pub fn get(&self, word: Word) -> u64 {
        self.journal.get(word)
    }

    pub fn is_ready(&self) -> bool {
        self.get(Word::State) == READY
    }

    /// Ready and, by connect, connected.
    pub fn is_connected(&self) -> bool {
        self.is_ready()
            && (self.plan.transport == Transport::Path || self.get(Word::Connections) > self.get(Word::Detections))
    }

    pub fn is_dead(&self, wait: Duration) -> bool {
        let wait = Timespec::try_from(wait).expect("it is short");
        poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&wait)).is_ok_and(|ready| ready > 0)
    }

    /// Sends SIGKILL.
    pub fn kill(&self) {
        self.is_killed.set(true);
        self.signal(Signal::KILL);
    }

    pub fn signal(&self, signal: Signal) {
        // An error: it has ended already.
        let _ = pidfd_send_signal(&self.pidfd, signal);
    }

    pub fn await_death(&self) {
        while !self.is_dead(Duration::from_secs(1)) {}
    }

    /// A text about the process: its journal, and its state in the kernel.
    pub fn describe(&self) -> String {
        let proc = |name: &str| {
            let read = fs::read_to_string(format!("/proc/{}/{name}", self.pid.as_raw_nonzero()));
            read.unwrap_or_else(|error| error.to_string()).trim().replace('\n', "\n    ")
        };
        format!(
            "{:?}, process {}\n  journal: {}\n  text: {}\n  wchan: {}\n  syscall: {}\n  stack:\n    {}\n",
            self.plan.role,
            self.pid.as_raw_nonzero(),
            self.journal.words(),
            self.journal.text(),
            proc("wchan"),
            proc("syscall"),
            proc("stack"),
        )
    }

    pub fn resources(&self) -> Resources {
        Resources::of(self.pid)
    }

    /// Files in /dev/shm and /tmp that it has open or mapped.
    pub fn files(&self) -> Vec<PathBuf> {
        let pid = self.pid.as_raw_nonzero();
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        let mapped = maps.lines().filter_map(|line| line.find('/').map(|at| PathBuf::from(&line[at..])));
        let open = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let open = open.filter_map(|entry| fs::read_link(entry.path()).ok());
        mapped.chain(open).filter(|path| path.starts_with("/dev/shm") || path.starts_with("/tmp")).collect()
    }
}

/// The process that starts sides.
pub struct Host {
    child: Child,
    requests: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Host {
    /// In a process group of its own: Ctrl-C reaches only the test, and one kill ends the whole group.
    pub fn start(command: &[String], directory: &Path) -> Result<Host, Failure> {
        let failed = |error| Failure::Input(format!("`{}` cannot be run: {error}", command.join(" ")));
        let mut child = Command::new(&command[0])
            .args(&command[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // The test checks these directories for files left behind.
            .env("TMPDIR", directory)
            .env("XDG_RUNTIME_DIR", directory)
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        let answers = BufReader::new(child.stdout.take().expect("piped"));
        Ok(Host { requests: child.stdin.take(), answers, child })
    }

    pub fn side(&mut self, plan: Plan) -> Result<Side, Failure> {
        let failed = |text: String| Failure::System(format!("starting a side: {text}"));
        let journal = Journal::create(&plan.journal).map_err(|error| Failure::system("creating a journal", error))?;
        let line = serde_json::to_string(&plan).expect("numbers and text");
        let requests = self.requests.as_mut().expect("until it is closed");
        match writeln!(requests, "{line}") {
            // The read below reports a host that has ended.
            Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => return Err(failed(error.to_string())),
            _ => {}
        }
        let mut answer = String::new();
        self.answers.read_line(&mut answer).map_err(|error| failed(error.to_string()))?;
        let pid = answer.trim().parse().ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| failed(format!("the host wrote {answer:?}, wanted a process's number")))?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(|error| failed(error.to_string()))?;
        Ok(Side { plan, journal, pid, pidfd, is_killed: Cell::new(false) })
    }

    /// Closes the input of the host, which then ends in order.
    pub fn close(mut self) {
        self.requests = None;
        let deadline = Instant::now() + HANG_TIMEOUT_AGAINST;
        while Instant::now() < deadline && !matches!(self.child.try_wait(), Ok(Some(_))) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Some(group) = Pid::from_raw(self.child.id() as i32)
            && !matches!(self.child.try_wait(), Ok(Some(_)))
        {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.child.wait();
    }
}

/// The current sides of a channel.
pub struct Pair {
    pub sender: Side,
    pub receiver: Side,
}

impl Pair {
    pub fn sides(&self) -> [&Side; 2] {
        [&self.sender, &self.receiver]
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        for side in self.sides() {
            side.kill();
        }
        for side in self.sides() {
            side.await_death();
        }
    }
}
