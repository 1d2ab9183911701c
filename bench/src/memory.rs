//! What a channel's memory grows to when nobody takes what is sent.
//!
//! The sender sends as many messages as it is told to, or as many as there is room for; the receiver takes none of them meanwhile. Then, when
//! the program has looked at both processes' memory, it takes and checks them all, and the program looks again.

use std::{
    fs,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    parameters::{Job, Role},
    report::{Figures, Run, SideFigures},
    run_figures::by_role,
    sides::Sides,
    systems::{Receiving, Sending, System},
    workload::{PassReport, Payloads, Section, WARM_UP, all_came, expected, number, passes, say, whole},
};

/// A sender that has not got on for so long, and has not been kept from its processor, waits for room.
const STILL: Duration = Duration::from_millis(300);
/// One that looks again and again has used so much of its processor in vain.
const IN_VAIN_NS: u64 = 100_000_000;

/// One side's part: the sender says how many messages it got rid of before it had to wait, and then, as everywhere, reports.
pub fn part<S: System>(job: &Job) -> Result<()> {
    let size = job.sizes.max as usize;
    match job.role {
        Role::Sender => {
            let mut sending = S::sending(job)?;
            let mut payloads = Payloads::new(size);
            let mut send = |n: u64| -> Result<()> {
                let sent = sending.send(payloads.prepared(n, size));
                payloads.sent(n);
                // What a system holds back to send it with others would be no backlog of the channel's.
                sent.and_then(|()| sending.flush())
            };
            (0..WARM_UP).try_for_each(&mut send)?;
            passes(job, |pass| {
                let section = Section::start(pass)?;
                let (sent, done) = (&AtomicU64::new(0), &AtomicBool::new(false));
                thread::scope(|scope| {
                    let own = rustix::thread::gettid().as_raw_nonzero().get();
                    let watcher = scope.spawn(move || say(&count_until_still(sent, done, || Task::look(own))));
                    let all = (0..pass.count).try_for_each(|n| -> Result<()> {
                        send(WARM_UP + n)?;
                        sent.store(n + 1, Ordering::Relaxed); // a count, which nothing else hangs on
                        Ok(())
                    });
                    done.store(true, Ordering::Relaxed);
                    watcher.join().expect("the watcher only looks")?;
                    all
                })?;
                section.end(pass.count * size as u64)
            })
        }
        Role::Receiver => {
            let mut receiving = S::receiving(job)?;
            let mut receive = |n: u64| -> Result<()> {
                let right = receiving.receive(|m| m.len() == size && number(m) == expected(n, m.len()) && whole(m))?;
                ensure!(right, "message {n} is not the one that was sent");
                Ok(())
            };
            (0..WARM_UP).try_for_each(&mut receive)?;
            passes(job, |pass| {
                let section = Section::start(pass)?;
                (WARM_UP..WARM_UP + pass.count).try_for_each(&mut receive)?;
                let bytes = pass.count * size as u64;
                all_came(job, pass, bytes)?;
                section.end(bytes)
            })
        }
        role => bail!("the {} has no part in this", role.name()),
    }
}

/// What a thread is at.
#[derive(Clone, Copy)]
struct Task {
    sleeps: bool,
    on_cpu_ns: u64,
}

impl Task {
    /// At the thread of that number, of this process; None if it cannot be seen.
    fn look(task: i32) -> Option<Task> {
        let read = |name: &str| fs::read_to_string(format!("/proc/self/task/{task}/{name}")).ok();
        // Behind its name, which may have any bytes.
        let state = read("stat")?.rsplit_once(") ")?.1.chars().next()?;
        let on_cpu_ns = read("schedstat")?.split_whitespace().next()?.parse().ok()?;
        Some(Task { sleeps: state == 'S', on_cpu_ns })
    }
}

/// How many were sent when all were, or when no more were for a while, though the sender was not kept from its processor by others.
fn count_until_still(sent: &AtomicU64, done: &AtomicBool, look: impl Fn() -> Option<Task>) -> u64 {
    let now = || (Instant::now(), look().map_or(0, |task| task.on_cpu_ns));
    let (mut last, mut since) = (0, now());
    while !done.load(Ordering::Relaxed) {
        let count = sent.load(Ordering::Relaxed);
        if count != last {
            (last, since) = (count, now());
        } else if since.0.elapsed() > STILL {
            let waits = look().is_none_or(|task| task.sleeps || task.on_cpu_ns >= since.1 + IN_VAIN_NS);
            // It may have got on since.
            if waits && sent.load(Ordering::Relaxed) == count {
                return count;
            }
        }
        thread::sleep(Duration::from_millis(5));
    }
    sent.load(Ordering::Relaxed)
}

/// Resident memory of these processes, in bytes; a page that several of them have is counted once. Programs are not in it: who else runs the
/// same one, or what the kernel drops of it, would be in the figure.
pub fn resident_bytes(pids: &[u32]) -> Result<u64> {
    let one = |pid: &u32| {
        let place = format!("/proc/{pid}/smaps_rollup");
        let text = fs::read_to_string(&place).with_context(|| format!("reading {place}"))?;
        let kilobytes = |name: &str| -> Result<u64> {
            let found = text.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_suffix(" kB"));
            Ok(found.with_context(|| format!("no {name} in {place}"))?.trim().parse()?)
        };
        // Of its own, and in memory files: memfds, and what is in /dev/shm.
        Ok((kilobytes("Pss_Anon:")? + kilobytes("Pss_Shmem:")?) * 1024)
    };
    pids.iter().map(one).sum()
}

/// Memory with nothing sent, with as much as nobody took, and after all was taken.
pub fn run(job: &Job, cpus: &[usize], mut sides: Sides<'_>) -> Result<Run> {
    sides.start(job, Role::Receiver, 0, cpus)?;
    sides.start(job, Role::Sender, 0, cpus)?;
    let (receiver, sender) = (0, 1);
    sides.expect_word(receiver, "ready")?;
    sides.expect_word(sender, "ready")?;
    let resident = |sides: &Sides<'_>| resident_bytes(&sides.pids());
    let before = resident(&sides)?;
    sides.order_go(sender)?;
    let held: u64 = sides.line(sender)?.parse().context("reading how many messages were sent")?;
    let filled = resident(&sides)?;
    sides.order_go(receiver)?;
    sides.expect_word(receiver, "started")?;
    let mut reports = Vec::new();
    for side in [receiver, sender] {
        reports.push(serde_json::from_str::<PassReport>(&sides.line(side)?).context("reading a report")?);
    }
    let drained = resident(&sides)?;
    sides.end()?;
    let figures = Figures {
        backlog_messages: Some(held as f64),
        backlog_resident_bytes: Some(filled.saturating_sub(before) as f64),
        drained_resident_bytes: Some(drained.saturating_sub(before) as f64),
        ..Figures::default()
    };
    let side = |report: PassReport| SideFigures { usage: report.usage, ..SideFigures::default() };
    Ok(Run { figures, sides: by_role(job.workload, reports.into_iter().map(side)), ..Run::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sender_that_waits_for_room_is_noticed_and_one_that_is_done_too() {
        let (sent, done) = (AtomicU64::new(7), AtomicBool::new(false));
        let asleep = || Some(Task { sleeps: true, on_cpu_ns: 5 });
        assert_eq!(count_until_still(&sent, &done, asleep), 7);
        // One that spins gets its processor's time, and nowhere.
        let used = AtomicU64::new(0);
        let spins = || Some(Task { sleeps: false, on_cpu_ns: used.fetch_add(60_000_000, Ordering::Relaxed) });
        assert_eq!(count_until_still(&sent, &done, spins), 7);
        // One that is kept from it is waited for, however long: here until it is done.
        let looks = AtomicU64::new(0);
        let starved = || {
            if looks.fetch_add(1, Ordering::Relaxed) == 5 {
                sent.store(9, Ordering::Relaxed);
                done.store(true, Ordering::Relaxed);
            }
            Some(Task { sleeps: false, on_cpu_ns: 5 })
        };
        assert_eq!(count_until_still(&sent, &done, starved), 9);
        assert!(looks.load(Ordering::Relaxed) > 5, "it was looked at when it had not got on for long");
    }

    #[test]
    fn a_thread_is_seen_to_sleep_and_to_work() {
        let own = rustix::thread::gettid().as_raw_nonzero().get();
        let before = Task::look(own).unwrap();
        assert!(!before.sleeps, "it looks");
        let (there, is_there) = std::sync::mpsc::channel();
        let (end, ends) = std::sync::mpsc::channel::<()>();
        let sleeper = thread::spawn(move || {
            there.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
            ends.recv().unwrap_err();
        });
        let other = is_there.recv().unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        while !Task::look(other).unwrap().sleeps {
            assert!(Instant::now() < until, "it never sleeps");
            thread::yield_now();
        }
        drop(end);
        sleeper.join().unwrap();
        while Task::look(own).unwrap().on_cpu_ns == before.on_cpu_ns {
            assert!(Instant::now() < until, "its time stands still");
        }
    }

    #[test]
    fn memory_that_is_written_to_is_resident() {
        let own = [std::process::id()];
        let before = resident_bytes(&own).unwrap();
        let kept = std::hint::black_box(vec![1u8; 64 << 20]);
        let after = resident_bytes(&own).unwrap();
        // Other tests of this process may give some back meanwhile.
        assert!(after > before + (32 << 20), "{before} {after} {}", kept.len());
    }
}
