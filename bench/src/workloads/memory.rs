//! The resident memory of a channel whose receiver reads nothing.
//!
//! The sender sends as many messages as the job says, or as fit; the receiver receives none meanwhile. The program
//! reads both processes' memory. Then the receiver receives and checks all messages, and the program reads the memory
//! again.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use procfs::process::Process;

use crate::{
    endpoints::{Receiving, Sending, THERE, Transport},
    parameters::{Job, Role, word},
    payload::{Payloads, WARM_UP, expected, number, whole},
    plan::{Common, Defaults, ONE_WAY, Options, Passes, Plan},
    record::{Column, Run},
    run::deadline,
    side::{PassReport, Section, check_bytes, passes, say},
    sides::{Interrupts, Sides},
};

/// The resident memory of a channel whose receiver reads nothing while the sender sends
///
/// Defaults: 256 bytes, lanes of 64 MiB, 100,000 messages.
#[derive(Args)]
pub struct Memory {}

const COLUMNS: &[Column] = &[
    ("backlog_messages", "backlog", 1.0),
    ("backlog_resident_bytes", "its KiB", 1.0 / 1024.0),
    ("drained_resident_bytes", "KiB after", 1.0 / 1024.0),
];

impl Options for Memory {
    const NAME: &str = "memory";

    fn plan(&self, common: &Common) -> Result<Plan> {
        common.no_seconds(Self::NAME)?;
        common.one_size(Self::NAME)?;
        let defaults =
            Defaults { sleeps: true, systems: "pelton,pelton-path,pipe,sock-stream,sock-seqpacket", ..ONE_WAY };
        let plan = common.plan::<Self>(defaults, |_| 100_000)?;
        Ok(Plan { passes: Passes::One, figure: Some("backlog_resident_bytes"), columns: vec![COLUMNS], run, ..plan })
    }
}

/// A sender without progress for so long, though it had its processor, waits for free space.
const NO_PROGRESS_TIMEOUT: Duration = Duration::from_millis(300);
/// A busy-polling sender has used so much of its processor without progress.
const FUTILE_CPU_NS: u64 = 100_000_000;

/// One side's part: the sender reports how many messages it sent before it had to wait, and then its pass, as in every
/// workload.
pub fn part<T: Transport>(job: &Job) -> Result<()> {
    let size = job.sizes.max as usize;
    match job.role {
        Role::Sender => {
            let mut sending = T::sending(job, THERE)?;
            let mut payloads = Payloads::new(size);
            let mut send = |n: u64| -> Result<()> {
                let sent = sending.send(payloads.prepared(n, size));
                payloads.sent(n);
                // Messages that a system gathers in the sender are no backlog of the channel's.
                sent.and_then(|()| sending.flush())
            };
            (0..WARM_UP).try_for_each(&mut send)?;
            passes(job, |pass| {
                let section = Section::start(pass)?;
                let (sent, done) = (&AtomicU64::new(0), &AtomicBool::new(false));
                thread::scope(|scope| {
                    let own = rustix::thread::gettid().as_raw_nonzero().get();
                    let watcher = scope.spawn(move || say(&count_until_stopped(sent, done, || ThreadState::read(own))));
                    let all = (0..pass.count).try_for_each(|n| -> Result<()> {
                        send(WARM_UP + n)?;
                        sent.store(n + 1, Ordering::Relaxed); // Relaxed: a count that orders nothing else
                        Ok(())
                    });
                    done.store(true, Ordering::Relaxed);
                    watcher.join().expect("the watcher does not panic")?;
                    all
                })?;
                section.end(pass.count * size as u64)
            })
        }
        Role::Receiver => {
            let mut receiving = T::receiving(job, THERE)?;
            let mut receive = |n: u64| -> Result<()> {
                let right = receiving.receive(|m| m.len() == size && number(m) == expected(n, m.len()) && whole(m))?;
                ensure!(right, "message {n} has wrong bytes");
                Ok(())
            };
            (0..WARM_UP).try_for_each(&mut receive)?;
            passes(job, |pass| {
                let section = Section::start(pass)?;
                (WARM_UP..WARM_UP + pass.count).try_for_each(&mut receive)?;
                let bytes = pass.count * size as u64;
                check_bytes(job, pass, bytes)?;
                section.end(bytes)
            })
        }
        role => bail!("the {} has no part in this", word(role)),
    }
}

/// A thread's state.
#[derive(Clone, Copy)]
struct ThreadState {
    sleeps: bool,
    on_cpu_ns: u64,
}

impl ThreadState {
    /// Reads the state of this process's thread of that number; None if it cannot be read.
    fn read(task: i32) -> Option<ThreadState> {
        let task = Process::myself().ok()?.task_from_tid(task).ok()?;
        let on_cpu_ns = task.schedstat().ok()?.sum_exec_runtime;
        Some(ThreadState { sleeps: task.stat().ok()?.state == 'S', on_cpu_ns })
    }
}

/// Returns the count when all were sent, or after a time without progress, unless other processes kept the sender from
/// its processor.
fn count_until_stopped(sent: &AtomicU64, done: &AtomicBool, state: impl Fn() -> Option<ThreadState>) -> u64 {
    let now = || (Instant::now(), state().map_or(0, |task| task.on_cpu_ns));
    let (mut last, mut since) = (0, now());
    while !done.load(Ordering::Relaxed) {
        let count = sent.load(Ordering::Relaxed);
        if count != last {
            (last, since) = (count, now());
        } else if since.0.elapsed() > NO_PROGRESS_TIMEOUT {
            let waits = state().is_none_or(|task| task.sleeps || task.on_cpu_ns >= since.1 + FUTILE_CPU_NS);
            // The sender may have made progress since.
            if waits && sent.load(Ordering::Relaxed) == count {
                return count;
            }
        }
        thread::sleep(Duration::from_millis(5));
    }
    sent.load(Ordering::Relaxed)
}

/// Resident memory of these processes, in bytes; a page that several of them share counts once. Program text is left
/// out: other processes of the same program, or the kernel's eviction, would change the figure.
pub fn resident_bytes(pids: &[u32]) -> Result<u64> {
    let one = |pid: &u32| -> Result<u64> {
        let all = Process::new(*pid as i32)?.smaps_rollup()?.memory_map_rollup;
        // Anonymous memory and shared memory: memfds, and files in /dev/shm.
        let bytes = |name: &str| all.iter().find_map(|map| map.extension.map.get(name));
        let found = bytes("Pss_Anon").zip(bytes("Pss_Shmem"));
        found.map(|(own, shared)| own + shared).context("no Pss_Anon and Pss_Shmem in smaps_rollup: take Linux 5.4")
    };
    pids.iter().map(one).sum()
}

/// Memory without messages, with the backlog, and after all were received.
fn run(job: &Job, interrupts: &Interrupts) -> Result<Run> {
    let mut sides = Sides::new(interrupts, deadline(job));
    let (receiver, sender) = (0, 1);
    sides.start_both(job)?;
    let resident = |sides: &Sides<'_>| resident_bytes(&sides.pids());
    let before = resident(&sides)?;
    sides.order_go(sender)?;
    let held: u64 = sides.line(sender)?.parse().context("reading how many messages were sent")?;
    let filled = resident(&sides)?;
    sides.order_start(receiver)?;
    let reports: [PassReport; 2] = [sides.report(receiver)?, sides.report(sender)?];
    let drained = resident(&sides)?;
    sides.end()?;
    let figures = [
        ("backlog_messages", Some(held as f64)),
        ("backlog_resident_bytes", Some(filled.saturating_sub(before) as f64)),
        ("drained_resident_bytes", Some(drained.saturating_sub(before) as f64)),
    ];
    Ok(Run::of(job, figures, reports.map(|report| report.usage)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sender_that_waits_for_free_space_is_detected_and_one_that_is_done_too() {
        let (sent, done) = (AtomicU64::new(7), AtomicBool::new(false));
        let asleep = || Some(ThreadState { sleeps: true, on_cpu_ns: 5 });
        assert_eq!(count_until_stopped(&sent, &done, asleep), 7);
        // A spinning sender uses its processor without progress.
        let used = AtomicU64::new(0);
        let spins = || Some(ThreadState { sleeps: false, on_cpu_ns: used.fetch_add(60_000_000, Ordering::Relaxed) });
        assert_eq!(count_until_stopped(&sent, &done, spins), 7);
        // For a sender without a processor the function waits, however long: here until all is sent.
        let polls = AtomicU64::new(0);
        let starved = || {
            if polls.fetch_add(1, Ordering::Relaxed) == 5 {
                sent.store(9, Ordering::Relaxed);
                done.store(true, Ordering::Relaxed);
            }
            Some(ThreadState { sleeps: false, on_cpu_ns: 5 })
        };
        assert_eq!(count_until_stopped(&sent, &done, starved), 9);
        assert!(polls.load(Ordering::Relaxed) > 5, "it was polled while it made no progress");
    }
}
