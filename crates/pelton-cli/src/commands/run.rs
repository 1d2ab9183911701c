//! `pelton run`: keeps a service running, in any language.
//!
//! This program creates the listening socket, and starts the command with it, as systemd does with its socket units
//! (LISTEN_FDS). While the command is started again after its end, clients wait in the socket's queue. During a
//! reload, two processes of the command have the socket. One poll waits for signals and the next time to act.

use crate::{
    failure::{Failure, print_stderr},
    notify::{self, notify},
};
use clap::Args;
use pelton::{Listener, Options, options::maker};
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
    process::{
        Pid, Signal, WaitOptions, WaitStatus, getpid, getppid, kill_process, kill_process_group,
        set_parent_process_death_signal, waitpid,
    },
    time::Timespec,
};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};
use std::{
    ffi::OsString,
    io::{self, Read as _},
    os::{
        fd::AsFd as _,
        unix::{net::UnixStream, process::CommandExt as _},
    },
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

/// Delays before a command that has just begun is started again: doubled each time, from the first to the last. The
/// last is the time that clients wait for a service to accept them.
const DELAY_MIN: Duration = Duration::from_millis(100);
const DELAY_MAX: Duration = Duration::from_secs(5);
/// A command that ran this long is started again at once. A guess.
const STEADY: Duration = Duration::from_secs(10);
/// On reload, the new process must run this long before the old one has to end: a wrong configuration ends most
/// programs sooner. A guess.
const SETTLED: Duration = Duration::from_secs(1);
/// The script that starts the command: the socket comes as standard input, and becomes descriptor 3. A process knows
/// its number only once it runs.
const START: &str = "LISTEN_PID=$$ LISTEN_FDS=1; export LISTEN_PID LISTEN_FDS; exec \"$@\" 3<&0 </dev/null";

/// Options of `pelton run`.
#[derive(Args)]
pub struct RunArgs {
    /// The service: a short name, or unix:PATH for a socket at PATH. COMMAND listens under the same name
    name: String,
    /// Another user whose processes may connect; repeatable. COMMAND needs the option too.
    #[arg(long = "uid", value_name = "UID")]
    uids: Vec<u32>,
    /// The program to keep running; it gets the listening socket as descriptor 3 (LISTEN_FDS)
    ///
    /// It is a program that uses pelton, or a script that ends with `exec` of one. SIGHUP starts a new process, and
    /// ends the old one by SIGTERM once the new one has run for a second. SIGTERM and SIGINT end COMMAND by SIGTERM,
    /// and then this program; a second one kills it.
    #[arg(required = true, last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Runs `pelton run`.
pub fn run(args: &RunArgs) -> Result<(), Failure> {
    let signals = Signals::install().map_err(|error| Failure::system("cannot catch signals", error))?;
    let options: Options<maker::Listen> = Options::new().allow_uids(&args.uids);
    // Not the plain listener: several services may listen under a short name.
    let listener = Listener::beside_others(&args.name, options.settings())?;
    let mut supervisor = Supervisor {
        args,
        listener,
        current: None,
        successor: None,
        ending: Vec::new(),
        start_at: None,
        delay: Duration::ZERO,
        stopped_by: None,
        signals,
    };
    supervisor.current = Some(supervisor.start()?);
    notify(notify::READY);
    supervisor.supervise()
}

struct Supervisor<'a> {
    args: &'a RunArgs,
    /// Clients connect to its socket. This program accepts none.
    listener: Listener,
    current: Option<Running>,
    /// On reload: it takes the place of the current one once it has run for a while.
    successor: Option<Running>,
    /// They drain.
    ending: Vec<Running>,
    /// When to start the command again, if it does not run.
    start_at: Option<Instant>,
    delay: Duration,
    stopped_by: Option<i32>,
    signals: Signals,
}

/// A process of the command.
struct Running {
    pid: Pid,
    since: Instant,
}

impl Running {
    fn terminate(&self) {
        // It has not been waited for, so the number is its own.
        let _ = kill_process(self.pid, Signal::TERM);
    }
}

impl Supervisor<'_> {
    fn supervise(&mut self) -> Result<(), Failure> {
        loop {
            self.signals.clear();
            self.handle_signals();
            self.reap()?;
            if let Some(signal) = self.stopped_by
                && self.all().next().is_none()
            {
                return Err(Failure::Signal(signal));
            }
            let now = Instant::now();
            if self.start_at.is_some_and(|at| at <= now) {
                self.start_at = None;
                match self.start() {
                    Ok(running) => self.current = Some(running),
                    Err(failure) => {
                        print_stderr(failure.text().unwrap_or_default());
                        self.start_later();
                    }
                }
            }
            if let Some(successor) = self.successor.take_if(|successor| successor.since + SETTLED <= now)
                && let Some(old) = self.current.replace(successor)
            {
                old.terminate();
                self.ending.push(old);
            }
            let settles = self.successor.as_ref().map(|successor| successor.since + SETTLED);
            self.signals.wait(self.start_at.into_iter().chain(settles).min())?;
        }
    }

    fn all(&self) -> impl Iterator<Item = &Running> {
        self.current.iter().chain(&self.successor).chain(&self.ending)
    }

    fn handle_signals(&mut self) {
        let stop = self.signals.stop.swap(0, Relaxed);
        let is_second = self.stopped_by.is_some();
        if stop != 0 && is_second {
            self.all().for_each(|running| _ = kill_process_group(running.pid, Signal::KILL));
        } else if stop != 0 {
            notify(notify::STOPPING);
            self.stopped_by = Some(stop as i32);
            self.start_at = None;
            // Those in `ending` drain already: a second SIGTERM ends the drain of `pelton serve`, and of others.
            self.current.iter().chain(&self.successor).for_each(Running::terminate);
        }
        if !self.signals.reload.swap(false, Relaxed) || self.stopped_by.is_some() {
            return;
        }
        if self.successor.is_some() {
            print_stderr("a reload is in progress; this one does nothing");
        } else if self.current.is_none() {
            self.start_at = Some(Instant::now());
        } else {
            match self.start() {
                Ok(successor) => self.successor = Some(successor),
                Err(failure) => print_stderr(failure.text().unwrap_or_default()),
            }
        }
    }

    /// Starts a process of the command.
    fn start(&self) -> Result<Running, Failure> {
        let failed = |error: io::Error| Failure::system(format_args!("starting `{}`", self.command()), error);
        let socket = self.listener.socket().try_clone_to_owned().map_err(failed)?;
        let own = getpid();
        let mut command = Command::new("sh");
        command.args(["-c", START, "sh"]).args(&self.args.command).stdin(Stdio::from(socket)).process_group(0);
        // Those that this program may have are not for the command.
        command.env_remove("LISTEN_FDNAMES").env_remove("NOTIFY_SOCKET");
        let before_exec = move || {
            set_parent_process_death_signal(Some(Signal::TERM))?;
            // It has ended already, so no signal comes.
            if getppid() == Some(own) { Ok(()) } else { Err(Errno::SRCH.into()) }
        };
        // SAFETY: in the child, it makes two system calls and allocates nothing.
        unsafe { command.pre_exec(before_exec) };
        let child = command.spawn().map_err(failed)?;
        Ok(Running { pid: Pid::from_child(&child), since: Instant::now() })
    }

    fn start_later(&mut self) {
        self.start_at = Some(Instant::now() + self.delay);
        self.delay = (self.delay * 2).clamp(DELAY_MIN, DELAY_MAX);
    }

    /// Waits for ended processes; also for others, which this one gets in a container.
    fn reap(&mut self) -> Result<(), Failure> {
        let failed = |error| Failure::system("waiting for a process", error);
        while let Some(pid) = ended().map_err(failed)? {
            if self.all().any(|running| running.pid == pid) {
                // Its group may have others. Before the wait: until then, the number is that of this group.
                let _ = kill_process_group(pid, Signal::KILL);
            }
            if let Some((_, status)) = waitpid(Some(pid), WaitOptions::NOHANG).map_err(|error| failed(error.into()))? {
                self.note_end(pid, status)?;
            }
        }
        Ok(())
    }

    fn note_end(&mut self, pid: Pid, status: WaitStatus) -> Result<(), Failure> {
        if self.ending.iter().any(|running| running.pid == pid) {
            self.ending.retain(|running| running.pid != pid);
            return Ok(());
        }
        if let Some(ended) = self.successor.take_if(|running| running.pid == pid) {
            if self.stopped_by.is_none() {
                let end = self.describe(&ended, status);
                print_stderr(format_args!("the new {end}: the old process continues"));
            }
            return Ok(());
        }
        let Some(ended) = self.current.take_if(|running| running.pid == pid) else { return Ok(()) };
        if self.stopped_by.is_some() {
            return Ok(());
        }
        let end = self.describe(&ended, status);
        if let Some(successor) = self.successor.take() {
            print_stderr(format_args!("{end}: the new process takes its place"));
            self.current = Some(successor);
            return Ok(());
        }
        if ended.since.elapsed() >= STEADY {
            self.delay = Duration::ZERO;
        }
        print_stderr(match self.delay {
            Duration::ZERO => format!("{end}: it starts again"),
            delay => format!("{end}: it starts again in {:.1} s", delay.as_secs_f64()),
        });
        self.start_later();
        Ok(())
    }

    fn command(&self) -> String {
        self.args.command.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
    }

    fn describe(&self, ended: &Running, status: WaitStatus) -> String {
        let how = match (status.exit_status(), status.terminating_signal()) {
            (Some(code @ (126 | 127)), _) => format!("could not be started: the shell's exit status is {code}"),
            (Some(code), _) => format!("ended with exit status {code}"),
            (None, signal) => format!("was ended by signal {}", signal.unwrap_or_default()),
        };
        format!("`{}` (pid {}) {how}, after {:.1} s", self.command(), ended.pid, ended.since.elapsed().as_secs_f64())
    }
}

impl Drop for Supervisor<'_> {
    /// After an error: no process is left.
    fn drop(&mut self) {
        for running in self.all() {
            let _ = kill_process_group(running.pid, Signal::KILL);
            let _ = waitpid(Some(running.pid), WaitOptions::empty());
        }
    }
}

/// A child that has ended, and is not waited for yet.
fn ended() -> io::Result<Option<Pid>> {
    // SAFETY: all zeros are a valid value, and waitid sets the number, to 0 if no child has ended.
    let pid = unsafe {
        let mut found: libc::siginfo_t = std::mem::zeroed();
        let how = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
        if libc::waitid(libc::P_ALL, 0, &mut found, how) != 0 {
            let error = io::Error::last_os_error();
            return if error.raw_os_error() == Some(libc::ECHILD) { Ok(None) } else { Err(error) };
        }
        found.si_pid()
    };
    Ok(Pid::from_raw(pid))
}

/// The signals of this command: `crate::signals` has no reload.
struct Signals {
    /// The last of SIGTERM and SIGINT.
    stop: Arc<AtomicUsize>,
    reload: Arc<AtomicBool>,
    readable: UnixStream,
}

impl Signals {
    fn install() -> io::Result<Signals> {
        let (stop, reload) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let (readable, writable) = UnixStream::pair()?;
        readable.set_nonblocking(true)?;
        for signal in [SIGTERM, SIGINT] {
            signal_hook::flag::register_usize(signal, stop.clone(), signal as usize)?;
        }
        signal_hook::flag::register(SIGHUP, reload.clone())?;
        // Last: a wait that the descriptor ends finds the flags set.
        for signal in [SIGTERM, SIGINT, SIGHUP, SIGCHLD] {
            signal_hook::low_level::pipe::register(signal, writable.try_clone()?)?;
        }
        Ok(Signals { stop, reload, readable })
    }

    fn clear(&self) {
        let mut bytes = [0; 64];
        while matches!((&self.readable).read(&mut bytes), Ok(1..)) {}
    }

    /// Waits for a signal, until a moment if there is one.
    fn wait(&self, until: Option<Instant>) -> Result<(), Failure> {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let timeout = left.map(|left| Timespec::try_from(left).expect("the delays are short"));
        match poll(&mut [PollFd::from_borrowed_fd(self.readable.as_fd(), PollFlags::IN)], timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(Failure::system("poll", error)),
        }
    }
}
