//! Who survives a SIGKILLed peer, and is told.
//!
//! A stream runs until one side is killed. What the other makes of that is seen from outside: its call answers, which it says with the
//! time; or it says nothing, and its count shows whether it hangs or goes on; or it is gone too.

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
use serde::{Deserialize, Serialize};

use crate::{
    measure::{Usage, now_ns},
    parameters::{Job, Role},
    report::{Death, Outcome, Run},
    run::{deadline, directory},
    sides::{END, Event, Interrupts, Sides},
    systems::{Receiving, Sending, System},
    workload::{Payloads, expected, number, say, whole},
};

/// What a side says by itself, or when it is asked how far it is.
#[derive(Debug, Serialize, Deserialize)]
pub enum Word {
    /// So many messages sent, or taken
    Far(u64),
    /// What it has just noticed
    End {
        /// Told or wrong
        outcome: Outcome,
        /// When
        at_ns: u64,
        /// So many messages sent, or taken
        messages: u64,
        /// By which words it was told
        words: String,
    },
}

/// The order to say how far a side is.
pub const HOW_FAR: &[u8] = b"how far\n";

/// One side's part. It ends when its input does.
pub fn part<S: System>(job: &Job) -> Result<()> {
    let size = job.sizes.max as usize;
    let far = Arc::new(AtomicU64::new(0));
    match job.role {
        Role::Sender => {
            let mut sending = S::sending(job)?;
            let mut payloads = Payloads::new(size);
            stream(job, &far, |n| {
                let sent = sending.send(payloads.prepared(n, size));
                payloads.sent(n);
                sent.map(|()| true)
            })
        }
        Role::Receiver => {
            let mut receiving = S::receiving(job)?;
            stream(job, &far, |n| {
                receiving.receive(|m| m.len() == size && number(m) == expected(n, m.len()) && whole(m))
            })
        }
        role => bail!("the {} has no part in this", role.name()),
    }
}

/// Sends or takes one message after the other until that fails. `each` answers whether the message was right.
fn stream(job: &Job, far: &Arc<AtomicU64>, mut each: impl FnMut(u64) -> Result<bool>) -> Result<()> {
    say(&"ready")?;
    let mut order = String::new();
    std::io::stdin().lock().read_line(&mut order).context("reading an order")?;
    ensure!(order == "go\n", "found the order {order:?}, wanted \"go\"");
    if job.role.listens() {
        say(&"started")?;
    }
    let asked = far.clone();
    let listener = thread::spawn(move || {
        // Each line asks. At the end of the input this process ends, whatever its other thread waits for.
        for _ in std::io::stdin().lock().lines() {
            let _ = say(&Word::Far(asked.load(Ordering::Relaxed)));
        }
        std::process::exit(0);
    });
    for n in 0.. {
        let (outcome, words) = match each(n) {
            Ok(true) => {
                far.store(n + 1, Ordering::Relaxed); // a count, which nothing else hangs on
                continue;
            }
            Ok(false) => (Outcome::Wrong, format!("message {n} is not the one that was sent")),
            Err(error) => (Outcome::Told, format!("{error:#}")),
        };
        say(&Word::End { outcome, at_ns: now_ns(), messages: n, words })?;
        break;
    }
    let _ = listener.join();
    Ok(())
}

/// How long a survivor may take to be told: ten times what any of those that are told takes here, and longer than `ipc_ring`'s own half second.
const TOLD_WITHIN: Duration = Duration::from_secs(2);
/// Of processor time, in seconds, is enough to be told in.
const ENOUGH: f64 = 0.2;
/// And so long at most, on a machine with very much else to do.
const AT_MOST: Duration = Duration::from_secs(60);
/// Messages after which a stream is under way.
const UNDER_WAY: u64 = 1000;
/// Two looks at how far a survivor is, so far apart.
const BETWEEN_LOOKS: Duration = Duration::from_millis(100);

/// Two streams: the receiver of one is killed, and the sender of the other.
pub fn run(job: &Job, cpus: &[usize], interrupts: &Interrupts) -> Result<Run> {
    let mut run = Run::default();
    for (killed, name) in [(0, "receiver"), (1, "sender")] {
        let directory = directory(job.system, &job.directory)?;
        let job = Job { directory: directory.path().to_path_buf(), ..job.clone() };
        let mut sides = Sides::new(interrupts, deadline(&job));
        sides.start(&job, Role::Receiver, 0, cpus)?;
        sides.start(&job, Role::Sender, 0, cpus)?;
        sides.expect_word(0, "ready")?;
        sides.expect_word(1, "ready")?;
        sides.order_go(0)?;
        sides.expect_word(0, "started")?;
        sides.order_go(1)?;
        // In the stream, however long its sides take to get there; somewhere, that is what the clock's last digits say.
        for side in [0, 1] {
            while sides.how_far(side)? < UNDER_WAY {
                sides.leave_alone(Duration::from_millis(1))?;
            }
        }
        sides.leave_alone(Duration::from_millis(20 + now_ns() % 60))?;
        let killed_ns = now_ns();
        let mut victim = sides.sides.remove(killed);
        victim.kill();
        let death = sides.outlive(killed_ns);
        drop(victim);
        let (death, told_ns) = death?;
        match name {
            "receiver" => run.figures.receiver_death_told_ns = told_ns,
            _ => run.figures.sender_death_told_ns = told_ns,
        }
        run.deaths.insert(name.to_string(), death);
        // What it makes of its own end is no part of this.
        sides.sides.clear();
    }
    Ok(run)
}

impl Sides<'_> {
    /// What the only side left makes of the other's death, and after how many nanoseconds it said so.
    fn outlive(&mut self, killed_ns: u64) -> Result<(Death, Option<f64>)> {
        let start = Instant::now();
        let (pid, mut until) = (self.sides[0].child.id(), start + TOLD_WITHIN);
        let used = |pid| Usage::of_process(pid).map_or(f64::INFINITY, |usage| usage.cpu_seconds);
        let before = used(pid);
        loop {
            if let Some(line) = self.sides[0].take_line() {
                let Word::End { outcome, at_ns, messages, words } = read_word(&line)? else {
                    bail!("the survivor said `{line}` without being asked");
                };
                let told = (outcome == Outcome::Told).then(|| at_ns.saturating_sub(killed_ns) as f64);
                return Ok((Death { outcome, messages, words }, told));
            }
            match self.event(until)? {
                Event::Text => {}
                Event::End(_) => {
                    let words = self.failure(0).to_string();
                    return Ok((Death { outcome: Outcome::Crashed, messages: 0, words }, None));
                }
                // One that is kept from its processor has not hung: it is given the time that it was not given.
                Event::Time if start.elapsed() < AT_MOST && used(pid) - before < ENOUGH && wants_to_run(pid) => {
                    until = Instant::now() + BETWEEN_LOOKS;
                }
                Event::Time => break,
            }
        }
        let first = self.how_far_or_end()?;
        // That it says something by itself at last is too late.
        let _ = self.event(Instant::now() + BETWEEN_LOOKS)?;
        let last = self.how_far_or_end()?;
        let outcome = if last > first { Outcome::GoesOn } else { Outcome::Hangs };
        let words = format!("nothing within {} s", TOLD_WITHIN.as_secs());
        Ok((Death { outcome, messages: last, words }, None))
    }

    /// How far a side of a stream is that nobody was killed in yet.
    fn how_far(&mut self, index: usize) -> Result<u64> {
        self.ask_how_far(index)?;
        match read_word(&self.line(index)?)? {
            Word::Far(messages) => Ok(messages),
            Word::End { words, .. } => bail!("the {} ended by itself: {words}", self.sides[index].name()),
        }
    }

    /// How far the survivor is; what it says by itself now is too late.
    fn how_far_or_end(&mut self) -> Result<u64> {
        self.ask_how_far(0)?;
        self.deadline = Instant::now() + END;
        loop {
            if let Word::Far(messages) = read_word(&self.line(0)?)? {
                return Ok(messages);
            }
        }
    }

    fn ask_how_far(&mut self, index: usize) -> Result<()> {
        let orders = self.sides[index].orders.as_mut().expect("orders stay open until the end");
        orders.write_all(HOW_FAR).with_context(|| format!("asking the {}", self.sides[index].name()))
    }
}

/// Whether one of its threads waits for nothing but a processor, or for memory.
fn wants_to_run(pid: u32) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let states = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok());
    states.into_iter().any(|stat| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['R', 'D'])))
}

fn read_word(line: &str) -> Result<Word> {
    serde_json::from_str(line).with_context(|| format!("reading what the survivor said: `{line}`"))
}
