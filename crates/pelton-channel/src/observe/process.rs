//! What the kernel says of a process, from files of /proc that the process cannot delay: no command line and no
//! mappings, which the kernel reads from the process's memory or under its locks.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// What a process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Activity {
    /// It runs, or waits for something.
    Alive,
    /// It is stopped by a signal (SIGSTOP, SIGTSTP), or by a tracer.
    Stopped,
    /// It closed its side.
    Closed,
    /// It ended without closing.
    Died,
    /// No process had this role yet; or it is a durable subscription that no process uses.
    Absent,
    /// It cannot be determined: the process is of another user, or of another pid namespace.
    Unknown,
}

/// One side of a channel or lane: the process that has the role, or had it last.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Side {
    /// Its number in this pid namespace; that of its own namespace, if it cannot be seen from here; 0: none.
    pub pid: u32,
    /// Its name, as the kernel has it; empty if it is not known.
    pub command: String,
    /// What it does.
    pub activity: Activity,
    /// For a stopped process: since when, if the kernel reports that.
    pub stopped_for: Option<Duration>,
}

impl Side {
    pub(super) fn without_process(activity: Activity, pid: u32) -> Side {
        Side { pid, command: String::new(), activity, stopped_for: None }
    }
}

/// A process, by /proc/PID/status.
#[derive(Clone, Debug, Default)]
pub(super) struct Process {
    pub(super) pid: u32,
    pub(super) command: String,
    /// The first of its effective, real and saved users that is not root.
    pub(super) uid: u32,
    /// The group of the same kind.
    pub(super) gid: u32,
    /// Its number in its own pid namespace.
    pub(super) own_pid: u32,
    state: char,
    /// When it began, by the kernel's count: a later process may have its number.
    began: u64,
}

impl Process {
    /// `None` if there is no such process, or it has ended and its parent has not waited for it.
    pub(super) fn of(pid: u32) -> Option<Process> {
        let status = fs::read(format!("/proc/{pid}/status")).ok()?;
        let status = String::from_utf8_lossy(&status);
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(":\t"));
        let last = |text: &str| text.split_whitespace().next_back()?.parse().ok();
        let ids = |name: &str| -> Option<Vec<u32>> {
            field(name)?.split_whitespace().map(|number| number.parse().ok()).collect()
        };
        let (users, groups) = (ids("Uid")?, ids("Gid")?);
        // Real, effective, saved.
        let kind = [1, 0, 2].into_iter().find(|kind| users.get(*kind).is_some_and(|uid| *uid != 0)).unwrap_or(1);
        let state = field("State")?.chars().next()?;
        if matches!(state, 'Z' | 'X') {
            return None;
        }
        Some(Process {
            pid,
            command: field("Name")?.to_owned(),
            uid: *users.get(kind)?,
            gid: *groups.get(kind)?,
            own_pid: field("NSpid").and_then(last).unwrap_or(pid),
            state,
            began: stat(pid).map_or(0, |(_, began)| began),
        })
    }

    /// The same process now, for a third of the cost of [`Process::of`]: of a process, the users rarely change.
    pub(super) fn again(&self) -> Option<Process> {
        match stat(self.pid)? {
            (state, began) if began == self.began && !matches!(state, 'Z' | 'X') => {
                Some(Process { state, ..self.clone() })
            }
            _ => Process::of(self.pid),
        }
    }

    /// Whether the other one is this process, and not a later one with its number.
    pub(super) fn is_same(&self, other: &Process) -> bool {
        (self.pid, self.began) == (other.pid, other.began)
    }

    /// Whether it began before `moment`: so it is no later process with the number of one that ended.
    pub(super) fn is_older_than(&self, moment: SystemTime) -> bool {
        let since_boot = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let since_boot = Duration::new(since_boot.tv_sec.unsigned_abs(), since_boot.tv_nsec as u32);
        // The kernel counts in hundredths of a second.
        let age = since_boot.saturating_sub(Duration::from_millis(self.began.saturating_mul(10)));
        SystemTime::now().checked_sub(age).is_some_and(|began| began <= moment)
    }

    pub(super) fn side(&self) -> Side {
        let is_stopped = matches!(self.state, 'T' | 't');
        Side {
            pid: self.pid,
            command: self.command.clone(),
            activity: if is_stopped { Activity::Stopped } else { Activity::Alive },
            stopped_for: is_stopped.then(|| stopped_for(self.pid)).flatten(),
        }
    }
}

/// The state and the begin of a process, by /proc/PID/stat.
fn stat(pid: u32) -> Option<(char, u64)> {
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    // The name is in parentheses, and may have some itself.
    let after = stat.iter().rposition(|byte| *byte == b')')?;
    let mut fields = std::str::from_utf8(&stat[after + 1..]).ok()?.split_ascii_whitespace();
    Some((fields.next()?.chars().next()?, fields.nth(18)?.parse().ok()?))
}

/// How long a stopped process has not run: its threads' last time on a processor, where the kernel reports that. By the
/// scheduler's clock, whose time now is that of this thread, which runs.
fn stopped_for(pid: u32) -> Option<Duration> {
    let scheduled_ms = |path: &Path| -> Option<f64> {
        let scheduled = fs::read_to_string(path).ok()?;
        let line = scheduled.lines().find(|line| line.starts_with("se.exec_start"))?;
        line.rsplit(':').next()?.trim().parse().ok()
    };
    let mut last_ms: f64 = 0.0;
    for thread in fs::read_dir(format!("/proc/{pid}/task")).ok()? {
        last_ms = last_ms.max(scheduled_ms(&thread.ok()?.path().join("sched"))?);
    }
    let now_ms = scheduled_ms(Path::new("/proc/thread-self/sched"))?;
    Some(Duration::from_secs_f64((now_ms - last_ms).max(0.0) / 1e3))
}

/// The numbers of all processes that this one can see.
pub(super) fn all() -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}
