//! The processes of a storm, from outside: the two sides of a channel, and who starts them. None outlives its value.

use super::{
    PATIENCE_AGAINST,
    holdings::Holdings,
    journal::{Journal, READY, Word},
    side::{By, Plan},
};
use crate::failure::Failure;
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

/// A process that was started.
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

    /// Ready, and not without the other side by connect.
    pub fn is_met(&self) -> bool {
        self.is_ready() && (self.plan.by == By::Path || self.get(Word::Met) > self.get(Word::Told))
    }

    pub fn is_dead(&self, wait: Duration) -> bool {
        let wait = Timespec::try_from(wait).expect("it is short");
        poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&wait)).is_ok_and(|ready| ready > 0)
    }

    /// SIGKILL.
    pub fn kill(&self) {
        self.is_killed.set(true);
        // Gone already is as good.
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    pub fn await_death(&self) {
        while !self.is_dead(Duration::from_secs(1)) {}
    }

    /// For people: what it says of itself, and where it is.
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

    pub fn holdings(&self) -> Holdings {
        Holdings::of(self.pid, self.plan.role)
    }

    /// Files in the directories for temporary ones that it has open or mapped.
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
    /// In a process group of its own, so that Ctrl-C is the storm's alone, and all of it can be ended at once.
    pub fn start(command: &[String], place: &Path) -> Result<Host, Failure> {
        let failed = |error| Failure::Input(format!("`{}` cannot be run: {error}", command.join(" ")));
        let mut child = Command::new(&command[0])
            .args(&command[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Whatever it leaves there is found.
            .env("TMPDIR", place)
            .env("XDG_RUNTIME_DIR", place)
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        let answers = BufReader::new(child.stdout.take().expect("piped"));
        Ok(Host { requests: child.stdin.take(), answers, child })
    }

    pub fn side(&mut self, plan: Plan) -> Result<Side, Failure> {
        let failed = |text: String| Failure::System(format!("starting a side: {text}"));
        let journal = Journal::create(&plan.journal).map_err(|error| Failure::system("making a journal", error))?;
        let line = serde_json::to_string(&plan).expect("numbers and text");
        let requests = self.requests.as_mut().expect("until it is closed");
        match writeln!(requests, "{line}") {
            // One that has ended already may have said why.
            Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => return Err(failed(error.to_string())),
            _ => {}
        }
        let mut answer = String::new();
        self.answers.read_line(&mut answer).map_err(|error| failed(error.to_string()))?;
        let pid = answer.trim().parse().ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| failed(format!("the host answered {answer:?}, wanted a process's number")))?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(|error| failed(error.to_string()))?;
        Ok(Side { plan, journal, pid, pidfd, is_killed: Cell::new(false) })
    }

    /// Its input ends, and so does it, in order.
    pub fn close(mut self) {
        self.requests = None;
        let deadline = Instant::now() + PATIENCE_AGAINST;
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

/// Both sides of a channel as they are now.
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
