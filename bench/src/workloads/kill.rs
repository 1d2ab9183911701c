//! Does a survivor detect a SIGKILLed peer?
//!
//! A stream runs until the program kills one side. It observes the other from outside. The survivor's call may return
//! an error, which the side reports with the time. It may report nothing: then its count shows whether it hangs or
//! continues. Or it may be gone too.

use std::{
    io::{BufRead, Write},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use procfs::process::Process;
use serde::{Deserialize, Serialize};

use crate::{
    endpoints::{Receiving, Sending, THERE, Transport},
    measure::{Usage, now_ns},
    parameters::{Job, Role, word},
    payload::{Payloads, expected, number, whole},
    plan::{Common, Defaults, ONE_WAY, Options, Passes, Plan},
    record::{Column, Death, Outcome, Run},
    run::{deadline, directory},
    side::say,
    sides::{END, Event, Interrupts, Sides},
};

/// The program kills each side in the middle of a stream: does the other detect it?
///
/// Defaults: 256 bytes, lanes of 1 MiB: a survivor that reads all messages before it reports the death then has few of
/// them to read.
#[derive(Args)]
pub struct Kill {}

const COLUMNS: &[Column] = &[
    ("receiver_death_detected_ns", "receiver's death µs", 1e-3),
    ("sender_death_detected_ns", "sender's death µs", 1e-3),
];

impl Options for Kill {
    const NAME: &str = "kill";

    fn plan(&self, common: &Common) -> Result<Plan> {
        common.no_seconds(Self::NAME)?;
        common.one_size(Self::NAME)?;
        let defaults = Defaults {
            capacity: 1 << 20,
            sleeps: true,
            systems: "pelton,pelton-path,pipe,sock-stream,sock-seqpacket",
            ..ONE_WAY
        };
        let plan = common.plan::<Self>(defaults, |_| 1)?;
        Ok(Plan { passes: Passes::One, columns: vec![COLUMNS], run, ..plan })
    }
}

/// A side's report: of its end, or of its progress when the program asks.
#[derive(Debug, Serialize, Deserialize)]
enum Notice {
    /// So many messages sent, or received
    Progress(u64),
    /// The end of the stream
    End {
        /// Detected or wrong
        outcome: Outcome,
        /// When
        at_ns: u64,
        /// So many messages sent, or received
        messages: u64,
        /// The error's text
        words: String,
    },
}

/// The order to report the progress.
const PROGRESS_ORDER: &[u8] = b"progress\n";

/// One side's part. It exits when its input closes.
pub fn part<T: Transport>(job: &Job) -> Result<()> {
    let size = job.sizes.max as usize;
    let progress = Arc::new(AtomicU64::new(0));
    match job.role {
        Role::Sender => {
            let mut sending = T::sending(job, THERE)?;
            let mut payloads = Payloads::new(size);
            stream(job, &progress, |n| {
                let sent = sending.send(payloads.prepared(n, size));
                payloads.sent(n);
                sent.map(|()| true)
            })
        }
        Role::Receiver => {
            let mut receiving = T::receiving(job, THERE)?;
            stream(job, &progress, |n| {
                receiving.receive(|m| m.len() == size && number(m) == expected(n, m.len()) && whole(m))
            })
        }
        role => bail!("the {} has no part in this", word(role)),
    }
}

/// Sends or receives one message after the other until that fails. `each` returns whether the message was right.
fn stream(job: &Job, progress: &Arc<AtomicU64>, mut each: impl FnMut(u64) -> Result<bool>) -> Result<()> {
    say(&"ready")?;
    let mut order = String::new();
    std::io::stdin().lock().read_line(&mut order).context("reading an order")?;
    ensure!(order == "go\n", "found the order {order:?}, wanted \"go\"");
    if job.role.listens() {
        say(&"started")?;
    }
    let asked = progress.clone();
    let listener = thread::spawn(move || {
        // Each line is a question. At the end of the input this process exits, whatever its other thread waits for.
        for _ in std::io::stdin().lock().lines() {
            let _ = say(&Notice::Progress(asked.load(Ordering::Relaxed)));
        }
        std::process::exit(0);
    });
    for n in 0.. {
        let (outcome, words) = match each(n) {
            Ok(true) => {
                progress.store(n + 1, Ordering::Relaxed); // Relaxed: a count that orders nothing else
                continue;
            }
            Ok(false) => (Outcome::Wrong, format!("message {n} has wrong bytes")),
            Err(error) => (Outcome::Detected, format!("{error:#}")),
        };
        say(&Notice::End { outcome, at_ns: now_ns(), messages: n, words })?;
        break;
    }
    let _ = listener.join();
    Ok(())
}

/// The time limit of a survivor: ten times the slowest detection here, and longer than `ipc_ring`'s own half second.
const DETECTION_TIMEOUT: Duration = Duration::from_secs(2);
/// With so much processor time, in seconds, a survivor could have detected the death.
const CPU_SECONDS_ENOUGH: f64 = 0.2;
/// The limit on a busy machine, where a survivor may lack that processor time.
const DETECTION_TIMEOUT_MAX: Duration = Duration::from_secs(60);
/// Messages after which a stream is under way.
const UNDER_WAY: u64 = 1000;
/// The interval between two polls of a survivor's progress.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Two streams: the receiver of one is killed, and the sender of the other.
fn run(job: &Job, interrupts: &Interrupts) -> Result<Run> {
    let mut run = Run::default();
    for (killed, name) in [(0, "receiver"), (1, "sender")] {
        let directory = directory(job)?;
        let job = Job { directory: directory.path().to_path_buf(), ..job.clone() };
        let mut sides = Sides::new(interrupts, deadline(&job));
        sides.start_both(&job)?;
        sides.order_start(0)?;
        sides.order_go(1)?;
        // The sides may need long to get under way. The clock's last digits choose the moment of the kill.
        for side in [0, 1] {
            while sides.progress(side)? < UNDER_WAY {
                sides.expect_silence(Duration::from_millis(1))?;
            }
        }
        sides.expect_silence(Duration::from_millis(20 + now_ns() % 60))?;
        let killed_ns = now_ns();
        let mut victim = sides.sides.remove(killed);
        victim.kill();
        let death = sides.observe_survivor(killed_ns);
        drop(victim);
        let (death, detected_ns) = death?;
        run.figures.set(&format!("{name}_death_detected_ns"), detected_ns);
        run.deaths.insert(name.to_string(), death);
        // The survivor's own exit is no part of the measurement.
        sides.sides.clear();
    }
    Ok(run)
}

impl Sides<'_> {
    /// The survivor's reaction to the other's death, and the nanoseconds until its report.
    fn observe_survivor(&mut self, killed_ns: u64) -> Result<(Death, Option<f64>)> {
        let start = Instant::now();
        let (pid, mut until) = (self.sides[0].child.id(), start + DETECTION_TIMEOUT);
        let used = |pid| Usage::of_process(pid).map_or(f64::INFINITY, |usage| usage.cpu_seconds);
        let before = used(pid);
        loop {
            if let Some(line) = self.sides[0].take_line() {
                let Notice::End { outcome, at_ns, messages, words } = read_notice(&line)? else {
                    bail!("the survivor reported `{line}` unasked");
                };
                let detected = (outcome == Outcome::Detected).then(|| at_ns.saturating_sub(killed_ns) as f64);
                return Ok((Death { outcome, messages, words }, detected));
            }
            match self.event(until)? {
                Event::Text => {}
                Event::End(_) => {
                    let words = self.failure(0).to_string();
                    return Ok((Death { outcome: Outcome::Crashed, messages: 0, words }, None));
                }
                Event::Time
                    if start.elapsed() < DETECTION_TIMEOUT_MAX
                        && used(pid) - before < CPU_SECONDS_ENOUGH
                        && is_runnable(pid) =>
                {
                    until = Instant::now() + POLL_INTERVAL;
                }
                Event::Time => break,
            }
        }
        let first = self.final_progress()?;
        // A late report of its own is too late.
        let _ = self.event(Instant::now() + POLL_INTERVAL)?;
        let last = self.final_progress()?;
        let outcome = if last > first { Outcome::Continues } else { Outcome::Hangs };
        let words = format!("nothing within {} s", DETECTION_TIMEOUT.as_secs());
        Ok((Death { outcome, messages: last, words }, None))
    }

    /// The progress of a side before the kill.
    fn progress(&mut self, index: usize) -> Result<u64> {
        self.ask_progress(index)?;
        match read_notice(&self.line(index)?)? {
            Notice::Progress(messages) => Ok(messages),
            Notice::End { words, .. } => bail!("the {} ended early: {words}", self.sides[index].name()),
        }
    }

    /// The survivor's progress; a report of its end is too late now.
    fn final_progress(&mut self) -> Result<u64> {
        self.ask_progress(0)?;
        self.deadline = Instant::now() + END;
        loop {
            if let Notice::Progress(messages) = read_notice(&self.line(0)?)? {
                return Ok(messages);
            }
        }
    }

    fn ask_progress(&mut self, index: usize) -> Result<()> {
        let orders = self.sides[index].orders.as_mut().expect("orders stay open until the end");
        orders.write_all(PROGRESS_ORDER).with_context(|| format!("asking the {}", self.sides[index].name()))
    }
}

/// Whether one of its threads is runnable, or waits for memory.
fn is_runnable(pid: u32) -> bool {
    let tasks = Process::new(pid as i32).and_then(|process| process.tasks());
    let states = tasks.into_iter().flatten().flatten().filter_map(|task| task.stat().ok());
    states.into_iter().any(|stat| matches!(stat.state, 'R' | 'D'))
}

fn read_notice(line: &str) -> Result<Notice> {
    serde_json::from_str(line).with_context(|| format!("reading the survivor's report: `{line}`"))
}
