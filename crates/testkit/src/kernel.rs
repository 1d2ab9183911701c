//! The kernel's view of a process or a thread, and the processor of a thread.

use crate::deadline::eventually;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::path::PathBuf;

/// Open descriptors of this process, but for the one that reads the directory.
pub fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count() - 1
}

/// Open descriptors of another process.
pub fn descriptors_of(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

/// Mappings of this process.
pub fn mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

/// Threads of this process.
pub fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// The threads of this process whose name has this prefix.
pub fn threads_named(prefix: &str) -> Vec<i32> {
    tasks(std::process::id())
        .filter(|task| std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name.starts_with(prefix)))
        .map(|task| task.file_name().unwrap().to_str().unwrap().parse().unwrap())
        .collect()
}

/// The calling thread's id.
pub fn this_thread() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}

/// Whether the effective user is root.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The mode bits that this process takes from new files. Read, not changed: a process has one for all its threads.
pub fn umask() -> u32 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("Umask:")).expect("the kernel reports the umask");
    u32::from_str_radix(mask.trim(), 8).unwrap()
}

/// A process's state: 'R' runs, 'S' sleeps, 'T' is stopped, 'Z' has ended and was not waited for. `None` if there is no
/// such process.
pub fn state_of(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(") ").next()?.chars().next()
}

/// Whether a thread of this process is asleep in `poll` or epoll.
pub fn thread_polls(thread: i32) -> bool {
    is_polling(system_call(PathBuf::from(format!("/proc/self/task/{thread}"))))
}

/// Waits until a thread of this process is asleep in `poll` or epoll.
#[track_caller]
pub fn wait_until_thread_polls(thread: i32) {
    eventually("the thread is asleep in poll", || thread_polls(thread));
}

/// Whether some thread of a process is asleep in `poll` or epoll.
pub fn process_polls(pid: u32) -> bool {
    tasks(pid).any(|task| is_polling(system_call(task)))
}

/// The system call that a thread of this process is asleep in; `None` while it runs.
pub fn system_call_of(thread: i32) -> Option<libc::c_long> {
    system_call(PathBuf::from(format!("/proc/self/task/{thread}")))
}

/// How often a thread of this process has gone to sleep so far.
pub fn sleeps_of(thread: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/self/task/{thread}/status")).unwrap();
    let sleeps = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    sleeps.expect("the kernel counts them").trim().parse().unwrap()
}

fn tasks(pid: u32) -> impl Iterator<Item = PathBuf> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten();
    tasks.filter_map(|task| Some(task.ok()?.path()))
}

fn system_call(task: PathBuf) -> Option<libc::c_long> {
    // "running" while it runs; unreadable once it has ended.
    std::fs::read_to_string(task.join("syscall")).ok()?.split_whitespace().next()?.parse().ok()
}

fn is_polling(call: Option<libc::c_long>) -> bool {
    // Later architectures have only the calls with a signal mask.
    #[cfg(target_arch = "x86_64")]
    let polls = [libc::SYS_poll, libc::SYS_ppoll, libc::SYS_epoll_wait, libc::SYS_epoll_pwait, libc::SYS_epoll_pwait2];
    #[cfg(not(target_arch = "x86_64"))]
    let polls = [libc::SYS_ppoll, libc::SYS_epoll_pwait, libc::SYS_epoll_pwait2];
    call.is_some_and(|call| polls.contains(&call))
}

/// Has the calling thread, and those that it starts, run on one processor: of those that it may use the one of this
/// number, modulo their count. Returns the processors that it could use before, for `sched_setaffinity`.
pub fn pin(number: usize) -> CpuSet {
    let allowed = sched_getaffinity(None).unwrap();
    let all: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect();
    let mut one = CpuSet::new();
    one.set(all[number % all.len()]);
    sched_setaffinity(None, &one).unwrap();
    allowed
}
