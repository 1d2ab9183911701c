//! What a run yields: figures by their names, the part of each side, and the columns that show them.

use std::collections::BTreeMap;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::{
    measure::Usage,
    parameters::{Job, Role, word},
    side::{NAMED, PassReport},
    statistics::median,
};

/// The figures of one run, or their medians, by name. One that does not apply or could not be measured is missing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Figures(BTreeMap<String, f64>);

impl Figures {
    /// Sets it, or removes it.
    pub fn set(&mut self, name: &str, value: Option<f64>) {
        match value {
            Some(value) => self.0.insert(name.to_string(), value),
            None => self.0.remove(name),
        };
    }

    /// The figure of that name.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.0.get(name).copied()
    }

    /// Each figure's median of these runs.
    pub fn medians(runs: &[Run]) -> Figures {
        let mut medians = Figures::default();
        for name in runs.iter().flat_map(|run| run.figures.0.keys()) {
            medians.set(name, median(runs.iter().filter_map(|run| run.figures.get(name)).collect()));
        }
        medians
    }
}

impl<const N: usize> From<[(&str, Option<f64>); N]> for Figures {
    fn from(all: [(&str, Option<f64>); N]) -> Figures {
        let mut figures = Figures::default();
        all.into_iter().for_each(|(name, value)| figures.set(name, value));
        figures
    }
}

/// A figure as a column of the table: its name, its title, and the factor of its unit.
pub type Column = (&'static str, &'static str, f64);

/// Of workloads that count messages.
pub const RATES: &[Column] = &[("messages_per_second", "M messages/s", 1e-6), ("bytes_per_second", "MB/s", 1e-6)];
/// Of workloads that time round trips.
pub const LATENCY: &[Column] = &[
    ("round_trip_ns", "round trip ns", 1.0),
    ("p50_ns", "p50 ns", 1.0),
    ("p90_ns", "p90 ns", 1.0),
    ("p99_ns", "p99 ns", 1.0),
    ("p999_ns", "p99.9 ns", 1.0),
    ("p9999_ns", "p99.99 ns", 1.0),
];
/// Of workloads whose sides work.
pub const SHARES: &[Column] =
    &[("share_of_own_speed", "of own speed", 1.0), ("cpu_to_own_work", "CPU to own work", 1.0)];
/// Of all.
pub const COSTS: &[Column] = &[
    ("cpu_seconds", "CPU s", 1.0),
    ("syscalls_per_message", "calls/message", 1.0),
    ("sleeps_per_wait", "sleeps/wait", 1.0),
    ("resident_bytes", "resident KiB", 1.0 / 1024.0),
];

/// One run: its figures and the part of each side.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// The figures
    #[serde(flatten)]
    pub figures: Figures,
    /// By role
    pub sides: BTreeMap<String, SideFigures>,
    /// Of round trips and calls that were timed one by one: a quantile, and its nanoseconds
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub latency: Vec<(f64, u64)>,
    /// Of kills: by the killed side
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub deaths: BTreeMap<String, Death>,
}

impl Run {
    /// A run of these figures, in which the sides used so much.
    pub fn of(job: &Job, figures: impl Into<Figures>, sides: impl IntoIterator<Item = Usage>) -> Run {
        let sides = sides.into_iter().map(|usage| SideFigures { usage, ..SideFigures::default() });
        Run { figures: figures.into(), sides: by_role(job, sides), ..Run::default() }
    }
}

/// The survivor's reaction to the other side's death.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Death {
    /// In one word
    pub outcome: Outcome,
    /// Messages that the survivor had sent, or received, by then
    pub messages: u64,
    /// Its error text
    pub words: String,
}

/// See [`Death`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// A call returned an error, or the end of the stream
    Detected,
    /// It waits without end
    Hangs,
    /// It continues to send to no receiver
    Continues,
    /// It received a message that was never sent, or not the next one
    Wrong,
    /// It died itself
    Crashed,
}

/// One side's part of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SideFigures {
    /// In the measured section
    #[serde(flatten)]
    pub usage: Usage,
    /// System calls per message that this side sends or receives, which is each of them
    pub syscalls_per_message: Option<f64>,
    /// Voluntary context switches per awaited message of a round trip
    pub sleeps_per_wait: Option<f64>,
}

/// Names the sides: senders of a fan-in have numbers, and so have clients.
fn by_role(job: &Job, sides: impl IntoIterator<Item = SideFigures>) -> BTreeMap<String, SideFigures> {
    let sides: Vec<SideFigures> = sides.into_iter().collect();
    // A program that starts the other side itself.
    let alone = sides.len() == 1;
    let name = |index: usize| match job.launch.roles {
        [_, _] if alone => "both".to_string(),
        [_, role] if job.launch.numbered && index > 0 => format!("{}-{index}", word(*role)),
        roles => word(roles[index]),
    };
    sides.into_iter().enumerate().map(|(index, side)| (name(index), side)).collect()
}

/// The percentiles of single rounds.
pub fn set_percentiles(figures: &mut Figures, percentile: impl Fn(&str) -> Option<u64>) {
    NAMED.iter().for_each(|(name, _)| figures.set(name, percentile(name).map(|ns| ns as f64)));
}

/// The figures of a run of messages: for each pass the reports of all sides, the one of the first CPU first.
pub fn run_of_messages(job: &Job, reports: &[Vec<PassReport>]) -> Run {
    let (first, others) = reports[0].split_first().expect("a run has a side");
    let roundtrip = job.launch.roles.first() == Some(&Role::Asker);
    let pass = &job.passes[0];
    // The start is that of the sender or the asker, the end the receiver's or the asker's: all processes share one
    // clock.
    let start_ns = match others.iter().map(|other| other.start_ns).min() {
        Some(start_ns) if !roundtrip => start_ns,
        _ => first.start_ns,
    };
    let elapsed_ns = first.end_ns.saturating_sub(start_ns) as f64;
    let seconds = elapsed_ns * 1e-9;
    let counted = job.passes.iter().zip(reports).find(|(pass, _)| pass.count_calls);
    // Calls of programs in other languages are counted from outside: the first report has all of them.
    let calls = counted.and_then(|(pass, reports)| {
        let calls: Vec<Option<u64>> = reports.iter().map(|report| report.calls).collect();
        calls[0]?;
        Some((calls, job.messages(pass.count) as f64))
    });
    let sleeps = |report: &PassReport| roundtrip.then(|| report.usage.voluntary_switches as f64 / pass.count as f64);
    let percentiles = reports.iter().find_map(|reports| reports[0].percentiles.as_ref());
    let latency = percentiles.map(|percentiles| percentiles.ladder.clone()).unwrap_or_default();
    let rate = |amount: f64| (!roundtrip && seconds > 0.0).then(|| amount / seconds);
    // All sides worked alone at the same time, too.
    let alone = job.passes.iter().zip(reports).find(|(pass, _)| pass.alone).map(|(_, reports)| reports);
    let alone_ns = |report: &PassReport| report.end_ns.saturating_sub(report.start_ns) as f64;
    let cpu_seconds = |reports: &[PassReport]| reports.iter().map(|report| report.usage.cpu_seconds).sum::<f64>();
    let round_trip_ns = match job.calls.rate {
        _ if !roundtrip => None,
        Some(_) => percentiles.map(|percentiles| percentiles.mean_ns),
        None => Some(elapsed_ns / pass.count as f64 - 2000.0 * job.delay_us as f64),
    };
    let mut figures = Figures::from([
        ("seconds", Some(seconds)),
        ("share_of_own_speed", alone.map(|alone| alone.iter().map(alone_ns).fold(0.0, f64::max) / elapsed_ns)),
        ("cpu_to_own_work", alone.map(|alone| cpu_seconds(&reports[0]) / cpu_seconds(alone))),
        ("messages_per_second", rate(job.messages(pass.count) as f64)),
        ("bytes_per_second", rate(first.bytes as f64)),
        ("round_trip_ns", round_trip_ns),
        ("cpu_seconds", Some(cpu_seconds(&reports[0]))),
        (
            "syscalls_per_message",
            calls.as_ref().map(|(calls, messages)| calls.iter().flatten().sum::<u64>() as f64 / messages),
        ),
        ("sleeps_per_wait", reports[0].iter().filter_map(sleeps).reduce(f64::min)),
        ("resident_bytes", first.resident_bytes.map(|bytes| bytes as f64)),
    ]);
    set_percentiles(&mut figures, |name| percentiles?.get(name));
    let sides = reports[0].iter().enumerate().map(|(index, report)| SideFigures {
        usage: report.usage,
        syscalls_per_message: calls.as_ref().and_then(|(calls, messages)| {
            let all_known = calls.iter().all(Option::is_some);
            calls[index].filter(|_| all_known).map(|calls| calls as f64 / messages)
        }),
        sleeps_per_wait: sleeps(report),
    });
    Run { figures, sides: by_role(job, sides), latency, ..Run::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{parameters::Pass, plan::tests::job_of};

    const ONE_WAY: &[Role] = &[Role::Receiver, Role::Sender];

    #[test]
    fn a_lopsided_channel_is_compared_with_the_slower_sides_work_and_the_cpu_time_of_both() {
        let passes =
            vec![Pass { count: 1000, ..Pass::default() }, Pass { count: 1000, alone: true, ..Pass::default() }];
        let job = job_of(ONE_WAY, passes);
        let part = |start_ns, end_ns, cpu_seconds| PassReport {
            start_ns,
            end_ns,
            usage: Usage { cpu_seconds, ..Usage::default() },
            ..PassReport::default()
        };
        let together = [part(900, 2000, 1.0), part(1000, 1950, 0.2)];
        let alone = [part(5000, 5900, 0.9), part(5000, 5090, 0.1)];
        let run = run_of_messages(&job, &[together.to_vec(), alone.to_vec()]);
        assert_eq!((run.figures.get("share_of_own_speed"), run.figures.get("cpu_to_own_work")), (Some(0.9), Some(1.2)));
        assert_eq!(run.figures.get("round_trip_ns"), None);
    }

    #[test]
    fn a_fan_in_lasts_from_the_first_that_sends_and_costs_what_all_cost() {
        let passes =
            vec![Pass { count: 10, ..Pass::default() }, Pass { count: 10, count_calls: true, ..Pass::default() }];
        let mut job = Job { senders: 3, ..job_of(ONE_WAY, passes) };
        job.launch.numbered = true;
        assert_eq!((0..3).map(|index| job.share(index, 10)).collect::<Vec<_>>(), [4, 3, 3]);
        let part = |start_ns, end_ns, calls| PassReport {
            start_ns,
            end_ns,
            calls,
            usage: Usage { cpu_seconds: 0.5, ..Usage::default() },
            ..PassReport::default()
        };
        let timed = vec![
            part(100, 1_000_001_000, None),
            part(1000, 1200, None),
            part(1100, 1300, None),
            part(1050, 1990, None),
        ];
        let counted = vec![part(0, 1, Some(5)), part(0, 1, Some(1)), part(0, 1, Some(3)), part(0, 1, Some(1))];
        let run = run_of_messages(&job, &[timed, counted]);
        assert_eq!((run.figures.get("seconds"), run.figures.get("messages_per_second")), (Some(1.0), Some(10.0)));
        assert_eq!((run.figures.get("cpu_seconds"), run.figures.get("syscalls_per_message")), (Some(2.0), Some(1.0)));
        assert_eq!(run.sides.keys().collect::<Vec<_>>(), ["receiver", "sender-1", "sender-2", "sender-3"]);
    }

    #[test]
    fn the_delays_are_subtracted() {
        let job = job_of(&[Role::Asker, Role::Answerer], vec![Pass { count: 10, time_each: true, ..Pass::default() }]);
        let usage = Usage { cpu_seconds: 0.25, voluntary_switches: 10, involuntary_switches: 0 };
        let asker = PassReport { start_ns: 1000, end_ns: 501_000, usage, ..PassReport::default() };
        let answerer = PassReport { usage: Usage { voluntary_switches: 9, ..usage }, ..PassReport::default() };
        let run = run_of_messages(&job, &[vec![asker, answerer]]);
        assert_eq!(run.figures.get("round_trip_ns"), Some(10_000.0));
        assert_eq!(run.figures.get("sleeps_per_wait"), Some(0.9));
        assert_eq!(run.figures.get("cpu_seconds"), Some(0.5));
        assert_eq!(run.figures.get("messages_per_second"), None);
        assert_eq!(run.sides["asker"].sleeps_per_wait, Some(1.0));
    }
}
