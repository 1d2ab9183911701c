//! One process of a run, in every program: how it starts, its passes on the program's orders, and its reports.
//!
//! A side connects, warms up with a few messages checked byte by byte, and then makes its passes. Before each it
//! reports `ready` and waits for `go`; the side that must be first reports `started`.

use std::{
    collections::BTreeMap,
    hint::black_box,
    io::{BufRead, Write},
    process::ExitCode,
};

use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::{
    measure::{CallCounter, Usage, now_ns},
    parameters::{Job, Pass},
};

/// The first argument of such a process; the second is its [`Job`], as JSON.
pub const SIDE: &str = "side";

/// If this process was started as a side, does its job with `part` and returns its exit code.
pub fn run_if_side(part: impl FnOnce(&Job) -> Result<()>) -> Option<ExitCode> {
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() != Some(SIDE) {
        return None;
    }
    // The process that started this one reports the text, under this side's role.
    Some(match begin(arguments.next().as_deref()).and_then(|job| part(&job)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    })
}

fn begin(job: Option<&str>) -> Result<Job> {
    let job: Job = serde_json::from_str(job.context("a side needs a job: it is started by pelton-bench itself")?)
        .context("reading the job")?;
    if let Some(cpu) = job.cpu {
        pin(cpu)?;
    }
    std::panic::set_hook(Box::new(|info| eprintln!("{info}")));
    Ok(job)
}

/// Pins the calling thread to that CPU.
pub fn pin(cpu: usize) -> Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).with_context(|| format!("pinning to CPU {cpu}"))
}

/// One side's report of a pass.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PassReport {
    /// Before the first message
    pub start_ns: u64,
    /// After the last
    pub end_ns: u64,
    /// Used between the two
    pub usage: Usage,
    /// System calls, in a pass that counts them
    pub calls: Option<u64>,
    /// Payload that was sent (sender, asker) or received
    pub bytes: u64,
    /// Of single rounds, in a pass that times them
    pub percentiles: Option<Percentiles>,
    /// Each round's nanoseconds, of a program in another language: [`PassReport::summed_up`] makes the percentiles
    #[serde(skip_serializing)]
    pub rounds_ns: Vec<u64>,
    /// When each message of a broadcast at a rate was due, or came
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub times_ns: Vec<u64>,
    /// Of the channel, seen by the side that receives
    pub resident_bytes: Option<u64>,
}

impl PassReport {
    /// With the percentiles of the rounds.
    pub fn summed_up(mut self) -> Result<PassReport> {
        if !self.rounds_ns.is_empty() {
            let mut histogram = histogram()?;
            self.rounds_ns.drain(..).for_each(|ns| histogram.saturating_record(ns));
            self.percentiles = Some(Percentiles::of(&histogram));
        }
        Ok(self)
    }
}

/// Round trips in nanoseconds, without the delays.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Percentiles {
    /// Of all
    pub mean_ns: f64,
    /// Quantiles and their values, as far as there are enough rounds
    pub ladder: Vec<(f64, u64)>,
    /// Those of [`NAMED`]; null, unless ten rounds and more took longer
    #[serde(flatten)]
    pub named: BTreeMap<String, Option<u64>>,
}

/// The percentiles that are figures.
pub const NAMED: [(&str, f64); 5] =
    [("p50_ns", 0.5), ("p90_ns", 0.9), ("p99_ns", 0.99), ("p999_ns", 0.999), ("p9999_ns", 0.9999)];

/// Quantiles for a plot, evenly spread over 1 / (1 - quantile).
const LADDER: [f64; 20] = [
    0.0, 0.1, 0.25, 0.5, 0.625, 0.75, 0.82, 0.9, 0.94, 0.97, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9998, 0.9999,
    0.99995, 0.99999,
];

/// The due times of round trips, or calls, at a rate.
pub struct Schedule {
    begin_ns: u64,
    rate: u64,
    /// How often it has slept: a system call each, and a context switch
    sleeps: u64,
}

/// How late a sleep may end. A sender wakes up so long before a message is due and polls the clock from then on, so
/// that no figure includes the kernel's timer.
const EARLY_NS: u64 = 200_000;

impl Schedule {
    /// None without a rate. The first message is due soon.
    pub fn of(job: &Job) -> Option<Schedule> {
        job.calls.rate.map(|rate| Schedule { begin_ns: now_ns() + EARLY_NS, rate: rate as u64, sleeps: 0 })
    }

    /// Subtracts the sleeps: to wait for the due time is no part of sending.
    pub fn leave_out(self, report: &mut PassReport) {
        report.calls = report.calls.map(|calls| calls.saturating_sub(self.sleeps));
        report.usage.voluntary_switches = report.usage.voluntary_switches.saturating_sub(self.sleeps);
    }

    fn due_ns(&self, n: u64) -> u64 {
        self.begin_ns + (n as u128 * 1_000_000_000 / self.rate as u128) as u64
    }

    /// Waits until message `n` is due and returns its due time.
    pub fn wait_for(&mut self, n: u64) -> u64 {
        let due = self.due_ns(n);
        let left = due.saturating_sub(now_ns());
        if left > EARLY_NS {
            std::thread::sleep(std::time::Duration::from_nanos(left - EARLY_NS));
            self.sleeps += 1;
        }
        while now_ns() < due {
            std::hint::spin_loop();
        }
        due
    }
}

/// Fails unless all bytes of a pass have arrived.
pub fn check_bytes(job: &Job, pass: &Pass, bytes: u64) -> Result<()> {
    let wanted: u64 = (0..job.senders).map(|index| job.sizes.total(job.share(index, pass.count))).sum();
    ensure!(bytes == wanted, "{bytes} bytes came, wanted {wanted}");
    Ok(())
}

/// From a nanosecond to a minute, three digits.
pub fn histogram() -> Result<Histogram<u64>> {
    Histogram::new_with_bounds(1, 60_000_000_000, 3).context("making a histogram")
}

impl Percentiles {
    /// The percentiles of a histogram.
    pub fn of(histogram: &Histogram<u64>) -> Percentiles {
        let beyond = |quantile: f64| (1.0 - quantile) * histogram.len() as f64;
        // Half a round more, because 1 - 0.9 is not exact.
        let named = |quantile| (beyond(quantile) > 9.5).then(|| histogram.value_at_quantile(quantile));
        Percentiles {
            mean_ns: histogram.mean(),
            named: NAMED.map(|(name, quantile)| (name.to_string(), named(quantile))).into(),
            ladder: LADDER
                .into_iter()
                .filter(|quantile| beyond(*quantile) >= 1.0)
                .map(|quantile| (quantile, histogram.value_at_quantile(quantile)))
                .chain([(1.0, histogram.max())])
                .collect(),
        }
    }

    /// The percentile of that name.
    pub fn get(&self, name: &str) -> Option<u64> {
        self.named.get(name).copied().flatten()
    }
}

/// Makes the passes on the program's orders, and then stays until it closes our input: a side that exits before the
/// other has read its last message would be a death in the measurement.
pub fn passes(job: &Job, mut pass_once: impl FnMut(&Pass) -> Result<PassReport>) -> Result<()> {
    let mut orders = std::io::stdin().lock();
    let mut order = String::new();
    for pass in &job.passes {
        say(&"ready")?;
        order.clear();
        orders.read_line(&mut order).context("reading an order")?;
        ensure!(order == "go\n", "found the order {order:?}, wanted \"go\"");
        if job.role.listens() {
            say(&"started")?;
        }
        say(&if pass.alone { work_alone(job, pass)? } else { pass_once(pass)? })?;
    }
    order.clear();
    orders.read_line(&mut order).context("waiting for the end")?;
    ensure!(order.is_empty(), "found the order {order:?}, wanted the end");
    Ok(())
}

/// The work of this side for so many messages, without the messages.
fn work_alone(job: &Job, pass: &Pass) -> Result<PassReport> {
    let section = Section::start(pass)?;
    for _ in 0..pass.count {
        work(job.work_steps());
    }
    section.end(0)
}

/// Calls `each` for each of `numbers`, with so much work for it. Two loops, since even the check for work would be
/// measurable in the one without.
#[inline(always)]
pub fn with_work(steps: u64, numbers: std::ops::Range<u64>, mut each: impl FnMut(u64) -> Result<()>) -> Result<()> {
    if steps == 0 {
        return numbers.into_iter().try_for_each(each);
    }
    for n in numbers {
        work(steps);
        each(n)?;
    }
    Ok(())
}

/// Works: each step waits for the one before, so that the time does not depend on the processor's other instructions.
#[inline]
pub fn work(steps: u64) {
    if steps > 0 {
        work_on(steps);
    }
}

#[inline(never)]
fn work_on(steps: u64) {
    let mut value = steps;
    for _ in 0..steps {
        value = value.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    }
    black_box(value);
}

/// Writes one line of JSON to the program.
pub fn say(value: &impl Serialize) -> Result<()> {
    let mut output = std::io::stdout().lock();
    serde_json::to_writer(&mut output, value)?;
    output.write_all(b"\n")?;
    output.flush()?;
    Ok(())
}

/// The measured part of a pass.
pub struct Section {
    usage: Usage,
    counter: Option<CallCounter>,
    start_ns: u64,
}

impl Section {
    /// Starts the measurement.
    pub fn start(pass: &Pass) -> Result<Section> {
        let usage = Usage::of_self();
        let counter = if pass.count_calls { Some(CallCounter::start()?) } else { None };
        Ok(Section { usage, counter, start_ns: now_ns() })
    }

    /// Ends the measurement.
    pub fn end(self, bytes: u64) -> Result<PassReport> {
        let end_ns = now_ns();
        let calls = self.counter.map(CallCounter::stop).transpose()?;
        let usage = Usage::of_self().since(self.usage);
        Ok(PassReport { start_ns: self.start_ns, end_ns, usage, calls, bytes, ..PassReport::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_due_time_of_a_round_depends_on_its_number_alone() {
        let mut schedule = Schedule { begin_ns: 500, rate: 3, sleeps: 0 };
        assert_eq!([0, 1, 2, 3].map(|n| schedule.due_ns(n)), [500, 333_333_833, 666_667_166, 1_000_000_500]);
        // Long past: it returns that time, not now.
        assert_eq!(schedule.wait_for(3), 1_000_000_500);
        assert_eq!(schedule.sleeps, 0);
        // A millisecond from now: it sleeps, and wakes up in time.
        schedule.begin_ns = now_ns() + 1_000_000;
        assert_eq!((schedule.wait_for(0), schedule.sleeps), (schedule.begin_ns, 1));
        assert!(now_ns() >= schedule.begin_ns);
    }

    #[test]
    fn rounds_of_a_program_in_another_language_make_its_percentiles() {
        let rounds: Vec<u64> = (1..=1000).rev().collect();
        let line = serde_json::json!({ "start_ns": 5, "rounds_ns": rounds }).to_string();
        let report = serde_json::from_str::<PassReport>(&line).unwrap().summed_up().unwrap();
        let percentiles = report.percentiles.unwrap();
        assert_eq!(["p50_ns", "p99_ns", "p999_ns"].map(|name| percentiles.get(name)), [Some(500), Some(990), None]);
        assert!(PassReport::default().summed_up().unwrap().percentiles.is_none());
    }

    #[test]
    fn percentiles_beyond_the_counted_rounds_are_null() {
        let mut histogram = histogram().unwrap();
        (1..=1000).for_each(|ns| histogram.record(ns).unwrap());
        let percentiles = Percentiles::of(&histogram);
        // One of a thousand says nothing.
        let named = NAMED.map(|(name, _)| percentiles.get(name));
        assert_eq!(named, [Some(500), Some(900), Some(990), None, None]);
        let last: Vec<f64> = percentiles.ladder.iter().rev().take(2).map(|(quantile, _)| *quantile).collect();
        assert_eq!(last, [1.0, 0.999]);
    }
}
