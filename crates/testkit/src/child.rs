//! The test binary again, as a child process with a role.
//!
//! A test names its role function, which is a test itself and does nothing without a role:
//!
//! ```text
//! #[test]
//! fn child() {
//!     let Some(role) = Role::of_this_process() else { return };
//!     match role.get("role") {
//!         "send" => { … report("sent"); read_line_from_parent(); }
//!         …
//!     }
//! }
//!
//! #[test]
//! fn it_works() {
//!     let child = Child::start(Role::new(child, "send").with("name", name));
//!     child.expect("sent");
//! }
//! ```
//!
//! The lines that a child reports begin with `>`, as the test framework writes to the same pipe.

use crate::deadline::DEADLINE;
use crate::process::{Ended, Process};
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::io::{BufRead as _, Write as _};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

const ROLE: &str = "PELTON_CHILD";

/// The task of a child: words by name.
#[derive(Clone, Debug, Default)]
pub struct Role {
    /// The role function's path, as the test framework calls it.
    test: &'static str,
    words: BTreeMap<String, String>,
}

impl Role {
    /// The role of this name for `child`, a test function, in its own process.
    pub fn new<F: Fn()>(child: F, name: &str) -> Role {
        Role { test: path_of(&child), ..Role::default() }.with("role", name)
    }

    /// Adds a word.
    pub fn with(mut self, key: &str, value: impl ToString) -> Role {
        self.words.insert(key.to_owned(), value.to_string());
        self
    }

    /// The role of this process, if it is a child.
    pub fn of_this_process() -> Option<Role> {
        let text = std::env::var(ROLE).ok()?;
        // SAFETY: neither call takes a pointer. They end the child with its parent's thread, and if it hangs.
        unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            libc::alarm(2 * DEADLINE.as_secs() as u32);
        }
        let words =
            text.split('\t').filter_map(|word| word.split_once('=')).map(|(k, v)| (k.into(), v.into())).collect();
        Some(Role { test: "", words })
    }

    /// A word; empty if it was not given.
    pub fn get(&self, key: &str) -> &str {
        self.words.get(key).map_or("", String::as_str)
    }

    /// A word that is a number.
    pub fn number(&self, key: &str) -> Option<u64> {
        self.words.get(key).map(|text| text.parse().unwrap())
    }

    /// All words as text.
    pub fn text(&self) -> String {
        self.words.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>().join("\t")
    }

    /// The command of this test binary with the role.
    fn command(&self) -> Command {
        let mut command = this_program();
        command.args(["--exact", self.test, "--nocapture", "--test-threads=1"]).env(ROLE, self.text());
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        command
    }
}

/// The command of this test binary. PELTON_EMULATOR has the words that run a binary of another architecture.
pub fn this_program() -> Command {
    let own = std::env::current_exe().unwrap();
    let emulator = std::env::var("PELTON_EMULATOR").unwrap_or_default();
    let mut words = emulator.split_whitespace();
    let Some(program) = words.next() else { return Command::new(own) };
    let mut command = Command::new(program);
    command.args(words).arg(own);
    command
}

/// A function's path below its crate.
fn path_of<F>(_: &F) -> &'static str {
    let path = std::any::type_name::<F>();
    path.split_once("::").unwrap_or_else(|| panic!("{path} is no function of a test binary")).1
}

/// Writes a line to the parent.
pub fn report(text: impl std::fmt::Display) {
    let mut out = std::io::stdout().lock();
    write!(out, "\n>{text}\n").unwrap();
    out.flush().unwrap();
}

/// Waits for the parent's next line; ends this process when the parent is gone.
pub fn read_line_from_parent() -> String {
    let mut line = String::new();
    if std::io::stdin().lock().read_line(&mut line).unwrap() == 0 {
        std::process::exit(3);
    }
    line.trim_end().to_owned()
}

/// This test binary again, with a role; killed when dropped.
pub struct Child {
    process: Process,
    role: String,
}

impl Child {
    /// Starts it.
    pub fn start(role: Role) -> Child {
        Child::start_as(role, |_| {})
    }

    /// Starts it, with a change of its command.
    pub fn start_as(role: Role, change: impl FnOnce(&mut Command)) -> Child {
        let mut command = role.command();
        change(&mut command);
        Child { process: Process::start(command), role: role.text() }
    }

    /// Starts it by another program: the words of `wrapper`, then this binary and its arguments.
    pub fn start_by(role: Role, wrapper: &[&str]) -> Child {
        Child::start_as(role, |command| {
            let mut wrapped = Command::new(wrapper[0]);
            wrapped.args(&wrapper[1..]).arg(command.get_program()).args(command.get_args());
            wrapped.envs(command.get_envs().map(|(key, value)| (key, value.unwrap())));
            wrapped.stdin(Stdio::piped()).stdout(Stdio::piped());
            *command = wrapped;
        })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// The next line that it reports.
    #[track_caller]
    pub fn line(&self) -> String {
        self.line_within(DEADLINE)
    }

    /// As [`Child::line`], with another time-out, for a child that works for long and reports a hang itself.
    #[track_caller]
    pub fn line_within(&self, timeout: Duration) -> String {
        match self.line_or_end(timeout) {
            Some(line) => line,
            None => panic!("child {} of role {} ended", self.pid(), self.role),
        }
    }

    #[track_caller]
    fn line_or_end(&self, timeout: Duration) -> Option<String> {
        loop {
            let line = self.process.line_within(timeout)?;
            if let Some(reported) = line.strip_prefix('>') {
                return Some(reported.to_owned());
            }
            // Without this check, a child that runs no test would count as a success.
            assert!(line != "running 0 tests", "the role {} names no function with #[test]", self.role);
        }
    }

    /// Waits for the next line that it reports, which must be this.
    #[track_caller]
    pub fn expect(&self, wanted: &str) {
        assert_eq!(self.line(), wanted, "from the child of role {}", self.role);
    }

    /// Writes a line to it.
    pub fn write_line(&mut self, text: &str) {
        self.process.write(format!("{text}\n").as_bytes());
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// Kills it; returns when it is dead.
    pub fn kill(self) {
        self.process.kill();
    }

    /// Waits for its end, with its input left open.
    #[track_caller]
    pub fn wait(mut self) -> ExitStatus {
        // The end of its output comes first. A child that hangs is ended by its own alarm, after less time than this;
        // one that only works may take longer than a deadline on a loaded machine.
        while self.line_or_end(3 * DEADLINE).is_some() {}
        self.process.status()
    }

    /// Waits for its end, and fails unless it succeeded.
    #[track_caller]
    pub fn wait_for_success(self) {
        let role = self.role.clone();
        let status = self.wait();
        assert!(status.success(), "child of role {role}: {status}");
    }

    /// Closes its input and waits for its end; its standard error is there if the command pipes it.
    #[track_caller]
    pub fn finish(self) -> Ended {
        self.process.finish()
    }

    /// Waits until the kernel reports this state: 'T' stopped, 'S' asleep, 'Z' ended.
    #[track_caller]
    pub fn wait_for_state(&self, state: char) {
        self.process.wait_for_state(state);
    }

    /// Waits until a thread of it is asleep in `poll` or epoll.
    #[track_caller]
    pub fn wait_until_it_polls(&self) {
        crate::deadline::eventually("the child is asleep in poll", || self.process.polls());
    }
}
