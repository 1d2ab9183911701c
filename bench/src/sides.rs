//! The processes of a run: the program starts them, orders them, polls them together, and ends them in every case.

use std::{
    env, fmt,
    fs::File,
    io::{Read, Seek, SeekFrom, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{net::UnixStream, process::CommandExt, process::ExitStatusExt},
    },
    process::{Child, ChildStdin, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{Pid, Signal, getppid, kill_process_group},
};

use crate::{
    measure::Usage,
    parameters::{Job, Role, Wait, word},
    side::{PassReport, SIDE},
};

/// The user interrupted the program.
#[derive(Debug)]
pub struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// The deadline for the sides to exit after both have reported.
pub(crate) const END: Duration = Duration::from_secs(10);

/// SIGINT, SIGTERM and SIGHUP as something to poll.
pub struct Interrupts(UnixStream);

impl Interrupts {
    /// Takes the signals from now on, to the program's end. One value serves the whole program, so that no signal
    /// falls between two.
    pub fn new() -> Result<Interrupts> {
        let (ours, theirs) = UnixStream::pair().context("creating a socket pair")?;
        for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
            signal_hook::low_level::pipe::register(signal.as_raw(), theirs.try_clone()?)
                .context("registering a signal handler")?;
        }
        Ok(Interrupts(ours))
    }

    /// Whether a signal has arrived. Does not wait.
    pub(crate) fn is_raised(&self) -> bool {
        matches!(poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&Timespec::default())), Ok(1..))
    }
}

/// One process of a run. It does not outlive this value.
pub struct Side {
    pub(crate) role: Role,
    pub(crate) child: Child,
    pub(crate) orders: Option<ChildStdin>,
    output: File,
    text: Vec<u8>,
    /// The side's standard error. No pipe: the program reads it at the end only, and a full pipe would stop the side.
    errors: File,
}

impl Side {
    pub(crate) fn start(job: &Job) -> Result<Side> {
        let program = match &job.launch.program[..] {
            [] => vec![env::current_exe().context("finding this program")?.into_os_string()],
            program => program.to_vec(),
        };
        let errors = tempfile::tempfile().context("creating a file for a side's standard error")?;
        let mut command = Command::new(&program[0]);
        command
            .args(&program[1..])
            .arg(SIDE)
            .arg(serde_json::to_string(job)?)
            // A group of its own: a terminal interrupt reaches this program only, and one signal ends all of a side's
            // processes.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors.try_clone().context("sharing that file")?);
        if let Some(cgroup) = &job.launch.cgroup {
            let place = cgroup.join("cgroup.procs");
            let group =
                File::options().write(true).open(&place).with_context(|| format!("opening {}", place.display()))?;
            // SAFETY: between fork and exec the closure makes one system call and allocates nothing. 0 is the writer.
            unsafe { command.pre_exec(move || (&group).write_all(b"0")) };
        }
        ends_with_this(&mut command);
        let mut child = command.spawn().with_context(|| format!("starting {}", program[0].display()))?;
        let orders = child.stdin.take();
        let output = File::from(OwnedFd::from(child.stdout.take().expect("it is piped")));
        Ok(Side { role: job.role, child, orders, output, text: Vec::new(), errors })
    }

    pub(crate) fn name(&self) -> String {
        word(self.role)
    }

    pub(crate) fn kill(&mut self) {
        if let Some(group) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            // It may have exited already.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }

    pub(crate) fn take_line(&mut self) -> Option<String> {
        let end = self.text.iter().position(|byte| *byte == b'\n')?;
        let line = String::from_utf8_lossy(&self.text[..end]).into_owned();
        self.text.drain(..=end);
        Some(line)
    }

    /// The end of the side's standard error, after its exit.
    fn error_text(&mut self) -> String {
        const MOST: u64 = 16 << 10;
        let mut bytes = Vec::new();
        let long = self.errors.metadata().map_or(0, |metadata| metadata.len());
        // An unreadable text is no reason to hide the failure.
        let _ = self
            .errors
            .seek(SeekFrom::Start(long.saturating_sub(MOST)))
            .and_then(|_| self.errors.read_to_end(&mut bytes));
        String::from_utf8_lossy(&bytes).split_whitespace().collect::<Vec<_>>().join(" ")
    }
}

/// The started process will end when this one does, also when this one is killed.
pub(crate) fn ends_with_this(command: &mut Command) {
    let parent = rustix::process::getpid();
    // SAFETY: between fork and exec the closure makes two system calls and allocates nothing.
    unsafe { command.pre_exec(move || die_with(parent)) };
}

/// Ends the calling process together with `parent`; fails if that is gone already.
fn die_with(parent: Pid) -> std::io::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    match getppid() {
        Some(found) if found == parent => Ok(()),
        _ => Err(Errno::SRCH.into()),
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        self.kill();
        let _ = self.child.wait();
    }
}

/// The processes of a run, polled together: the failure of any of them ends every wait.
pub struct Sides<'a> {
    pub(crate) sides: Vec<Side>,
    interrupts: &'a Interrupts,
    pub(crate) deadline: Instant,
}

/// The reason why a poll returned.
pub(crate) enum Event {
    /// A side has written something
    Text,
    /// A side has closed its output: it ends
    End(usize),
    /// The timeout has passed
    Time,
}

impl<'a> Sides<'a> {
    /// None yet.
    pub(crate) fn new(interrupts: &'a Interrupts, deadline: Instant) -> Sides<'a> {
        Sides { sides: Vec::new(), interrupts, deadline }
    }

    pub(crate) fn event(&mut self, until: Instant) -> Result<Event> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos() as i64 };
            let mut fds = vec![PollFd::new(&self.interrupts.0, PollFlags::IN)];
            fds.extend(self.sides.iter().map(|side| PollFd::from_borrowed_fd(side.output.as_fd(), PollFlags::IN)));
            match poll(&mut fds, Some(&left)) {
                Ok(0) => return Ok(Event::Time),
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error).context("waiting for the sides"),
            }
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            if ready[0] {
                return Err(Interrupted.into());
            }
            let index = ready[1..].iter().position(|ready| *ready).expect("poll reported a ready descriptor");
            let side = &mut self.sides[index];
            let mut bytes = [0; 4096];
            let done = side.output.read(&mut bytes).context("reading from a side")?;
            side.text.extend_from_slice(&bytes[..done]);
            return Ok(if done == 0 { Event::End(index) } else { Event::Text });
        }
    }

    pub(crate) fn line(&mut self, index: usize) -> Result<String> {
        loop {
            if let Some(line) = self.sides[index].take_line() {
                return Ok(line);
            }
            match self.event(self.deadline)? {
                Event::Text => {}
                Event::End(failed) => return Err(self.failure(failed)),
                Event::Time => return Err(self.deadline_passed()),
            }
        }
    }

    pub(crate) fn expect_word(&mut self, index: usize, word: &str) -> Result<()> {
        let line = self.line(index)?;
        ensure!(line == format!("\"{word}\""), "the {} wrote `{line}`, wanted \"{word}\"", self.sides[index].name());
        Ok(())
    }

    /// Starts one more side: `index` numbers the sides of one role.
    pub(crate) fn start(&mut self, job: &Job, role: Role, index: u32) -> Result<()> {
        // A program with threads of its own may use both CPUs.
        let pinned = !job.launch.process.is_unpinned;
        let cpu = job.cpus.get(role.cpu_index()).copied().filter(|_| pinned && role != Role::Threads);
        let mut job = Job { role, index, cpu, ..job.clone() };
        if job.launch.process.is_service_only {
            // The service's waits are its own.
            if role == Role::Service { job.wait = Wait::Block } else { job.launch.program.clear() }
        }
        self.sides.push(Side::start(&job)?);
        Ok(())
    }

    /// Starts a receiver and a sender, the sides 0 and 1, and waits until both are ready.
    pub(crate) fn start_both(&mut self, job: &Job) -> Result<()> {
        self.start(job, Role::Receiver, 0)?;
        self.start(job, Role::Sender, 0)?;
        self.expect_word(0, "ready")?;
        self.expect_word(1, "ready")
    }

    /// Orders a side that listens to go, and waits until it has started.
    pub(crate) fn order_start(&mut self, index: usize) -> Result<()> {
        self.order_go(index)?;
        self.expect_word(index, "started")
    }

    /// Starts one more side and lets it do its part.
    pub(crate) fn run_side(&mut self, job: &Job, role: Role) -> Result<PassReport> {
        let index = self.sides.len();
        self.start(job, role, 0)?;
        self.expect_word(index, "ready")?;
        if role.listens() {
            self.order_start(index)?
        } else {
            self.order_go(index)?
        }
        self.report(index)
    }

    /// A side's report of a pass, or of a run.
    pub(crate) fn report<R: serde::de::DeserializeOwned>(&mut self, index: usize) -> Result<R> {
        let line = self.line(index)?;
        serde_json::from_str(&line).with_context(|| format!("reading a report: `{line}`"))
    }

    pub(crate) fn order_go(&mut self, index: usize) -> Result<()> {
        let orders = self.sides[index].orders.as_mut().expect("orders stay open until the end");
        // A missing reply reports the end of a side, with its reason.
        match orders.write_all(b"go\n") {
            Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error).context("ordering a side to go"),
            _ => Ok(()),
        }
    }

    /// Waits; a message of a side is an error.
    pub(crate) fn expect_silence(&mut self, time: Duration) -> Result<()> {
        match self.event(Instant::now() + time)? {
            Event::Time => Ok(()),
            Event::End(failed) => Err(self.failure(failed)),
            Event::Text => {
                let said = self.sides.iter_mut().find_map(|side| Some((side.name(), side.take_line()?)));
                let (name, line) = said.unwrap_or(("side".to_string(), "a part of a line".to_string()));
                bail!("the {name} wrote {line}, wanted silence")
            }
        }
    }

    pub(crate) fn pids(&self) -> Vec<u32> {
        self.sides.iter().map(|side| side.child.id()).collect()
    }

    pub(crate) fn usages(&self) -> Result<[Usage; 2]> {
        Ok([Usage::of_process(self.sides[0].child.id())?, Usage::of_process(self.sides[1].child.id())?])
    }

    /// Lets both sides exit and checks their exit status.
    pub(crate) fn end(&mut self) -> Result<()> {
        for side in &mut self.sides {
            side.orders = None;
        }
        self.deadline = Instant::now() + END;
        let mut open = self.sides.len();
        while open > 0 {
            // A side that has ended leaves the list, or poll would report its hang-up again.
            match self.event(self.deadline)? {
                Event::Text => {}
                Event::Time => return Err(self.deadline_passed()),
                Event::End(index) => {
                    let mut side = self.sides.swap_remove(index);
                    let status = side.child.wait().context("waiting for a side")?;
                    ensure!(
                        status.success(),
                        "the {} failed at its end ({status}): {}",
                        side.name(),
                        side.error_text()
                    );
                    open -= 1;
                }
            }
        }
        Ok(())
    }

    fn deadline_passed(&mut self) -> anyhow::Error {
        let said = self.kill_all(None);
        anyhow!("the run passed its deadline and was ended{}{said}", if said.is_empty() { "" } else { ": " })
    }

    pub(crate) fn failure(&mut self, failed: usize) -> anyhow::Error {
        anyhow!("{}", self.kill_all(Some(failed)))
    }

    /// Ends all sides and collects their error texts.
    fn kill_all(&mut self, failed: Option<usize>) -> String {
        let mut said = Vec::new();
        for index in 0..self.sides.len() {
            let side = &mut self.sides[index];
            if failed == Some(index) {
                // It has closed its output, so it is about to exit with its own status.
                let until = Instant::now() + Duration::from_secs(1);
                while Instant::now() < until && matches!(side.child.try_wait(), Ok(None)) {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            side.kill();
            let status = side.child.wait();
            let words = side.error_text();
            let name = side.name();
            match status {
                _ if !words.is_empty() => said.push(format!("{name}: {words}")),
                Ok(status) if failed == Some(index) => match status.signal() {
                    Some(signal) => said.push(format!("{name}: ended by signal {signal}")),
                    None => said.push(format!("{name}: exited early with {status}")),
                },
                _ => {}
            }
        }
        said.join("; ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{parameters::Launch, plan::tests::job_of};

    /// A side that is this script.
    fn script(text: &str) -> Job {
        let program = ["sh", "-c", text].map(Into::into).to_vec();
        Job { launch: Launch { program, ..Launch::default() }, ..job_of(&[Role::Receiver], Vec::new()) }
    }

    fn minute() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn a_side_that_fills_its_standard_error_is_not_stopped() {
        let interrupts = Interrupts::new().unwrap();
        let mut sides = Sides::new(&interrupts, minute());
        let many =
            "yes an old warning | head -c 1000000 >&2; echo the final text >&2; echo '\"ready\"'; read order; exit 3";
        sides.start(&script(many), Role::Receiver, 0).unwrap();
        sides.expect_word(0, "ready").unwrap();
        let error = sides.end().unwrap_err().to_string();
        assert!(error.contains("the final text") && error.len() < 20_000, "{error}");
    }

    #[test]
    fn output_of_a_side_that_must_be_silent_is_an_error() {
        let interrupts = Interrupts::new().unwrap();
        let mut sides = Sides::new(&interrupts, minute());
        sides.start(&script("echo its own text; read order"), Role::Receiver, 0).unwrap();
        let error = sides.expect_silence(Duration::from_secs(60)).unwrap_err().to_string();
        assert!(error.contains("the receiver") && error.contains("its own text"), "{error}");
    }
}
