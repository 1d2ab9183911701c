//! One run of both processes, as the demo starts, watches and ends them.

use crate::{
    input::Input,
    stage::{LISTENING, Measured, Plan, Role, System},
};
use pelton_cli::{
    failure::Failure,
    progress::{self, Progress},
    signals::Signals,
};
use rustix::{event::PollFlags, process::PidfdFlags};
use serde::Serialize;
use std::{
    fs::File,
    io::{IsTerminal as _, Read as _, Seek as _},
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::process::CommandExt as _,
    },
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    time::Duration,
};
use tempfile::TempDir;

/// The work of the receiving stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Job {
    /// Read and counted.
    Lines,
    /// Compressed and written.
    Zstd,
}

impl Job {
    /// Its name in the table.
    pub fn label(self) -> &'static str {
        match self {
            Job::Lines => "the lines alone",
            Job::Zstd => "to zstd",
        }
    }
}

/// The measurements of one run of both processes.
pub struct Run {
    pub seconds: f64,
    pub cpu_sender: f64,
    pub cpu_receiver: f64,
    pub system_calls: Option<u64>,
    pub digest: u64,
}

/// All runs of a demo.
pub struct Runs<'a> {
    pub input: &'a Input,
    pub directory: &'a TempDir,
    pub signals: &'a Signals,
    pub done: usize,
    pub total: usize,
}

impl Runs<'_> {
    /// Runs the pipeline once, with compression into `output` if there is one. The figures are from the connection to
    /// the end of the receiver. Counting slows every system call, so the timed runs do not count.
    pub fn run(&mut self, system: System, output: Option<&Path>, count_calls: bool) -> Result<Run, Failure> {
        let Runs { input, directory, signals, total, .. } = *self;
        self.done += 1;
        let number = self.done;
        let run_directory = TempDir::with_prefix_in("run-", directory)
            .map_err(|error| Failure::system("cannot create a temporary directory", error))?;
        let file = File::open(&input.path)
            .map_err(|error| Failure::system(format_args!("`{}`", input.path.display()), error))?;
        let plan = |role| Plan {
            role,
            system,
            directory: run_directory.path().to_path_buf(),
            output: output.map(Path::to_path_buf),
            count_calls,
        };
        let share = || file.try_clone().map_err(|error| Failure::system("cannot duplicate a descriptor", error));

        let mut receiver = Stage::start(plan(Role::Receive), Stdio::null())?;
        receiver.wait_until_listening(signals)?;
        // The sender reads from the same open file, so this process can read its file position.
        let mut sender = Stage::start(plan(Role::Send), share()?.into())?;
        let job = if output.is_some() { Job::Zstd } else { Job::Lines }.label();
        let mut progress = Progress::after(Duration::ZERO);
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
            let done = (&file).stream_position().unwrap_or_default();
            progress.update(|seconds| {
                let amount = progress::amount(done, Some(input.bytes), seconds);
                format!("run {number} of {total}, {job}, {}: {amount}", system.label())
            });
        }
        drop(progress);
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
    fn start(plan: Plan, stdin: Stdio) -> Result<Stage, Failure> {
        let what = plan.role.name();
        let failed = |error| Failure::system(format_args!("cannot start the {what} process"), error);
        let program = std::env::current_exe().map_err(failed)?;
        // A file, not a pipe, which would need a reader.
        let stderr_file = tempfile::tempfile_in(&plan.directory).map_err(failed)?;
        let mut command = Command::new(program);
        command.arg("--stage").arg(serde_json::to_string(&plan).map_err(|error| failed(error.into()))?);
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
                format!(
                    "the {} process: {}",
                    self.what,
                    stderr_text.strip_prefix("pelton-demo: ").unwrap_or(stderr_text)
                )
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
