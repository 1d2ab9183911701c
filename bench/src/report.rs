//! A measurement's report, as JSON (one object a line) and as a table.

use std::{collections::BTreeMap, ffi::OsString, io::Write};

use anyhow::Result;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::{
    measure::Usage,
    parameters::{Calls, Choice, Slow, Wait, Workload, word},
};

/// The figures of one run, or their medians. A figure that does not apply or could not be measured is null.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Figures {
    /// From the first message's sending to the last one's arrival
    pub seconds: Option<f64>,
    /// Of calls, by all clients together
    pub calls_per_second: Option<f64>,
    /// Of a stream; of calls, requests and replies
    pub messages_per_second: Option<f64>,
    /// Payload of a stream; of calls, there and back
    pub bytes_per_second: Option<f64>,
    /// Mean of a run's round trips, without the delays
    pub round_trip_ns: Option<f64>,
    /// Median of a run's round trips
    pub p50_ns: Option<f64>,
    /// 90 % of a run's round trips took no longer
    pub p90_ns: Option<f64>,
    /// 99 %
    pub p99_ns: Option<f64>,
    /// 99.9 %
    pub p999_ns: Option<f64>,
    /// 99.99 %
    pub p9999_ns: Option<f64>,
    /// Both sides, user and system
    pub cpu_seconds: Option<f64>,
    /// Both sides' system calls
    pub syscalls_per_message: Option<f64>,
    /// Voluntary context switches per awaited message of a round trip, of the side that has fewer
    pub sleeps_per_wait: Option<f64>,
    /// Of an idle channel: context switches of both sides
    pub wakeups_per_second: Option<f64>,
    /// Resident memory of the channel, seen by the receiver
    pub resident_bytes: Option<f64>,
    /// Of a lopsided channel: its messages a second, as a part of the slower side's rate alone
    pub share_of_own_speed: Option<f64>,
    /// Of a lopsided channel: both sides' CPU time, as a multiple of their work alone
    pub cpu_to_own_work: Option<f64>,
    /// From opening as the successor of a killed receiver to the first message received
    pub reattach_receiver_ns: Option<f64>,
    /// From opening as the successor of a killed sender to the first message sent
    pub reattach_sender_ns: Option<f64>,
    /// Messages sent while no message was received: all, or as many as fit
    pub backlog_messages: Option<f64>,
    /// The growth of both sides' resident memory by them, with shared pages counted once
    pub backlog_resident_bytes: Option<f64>,
    /// The part of that growth left when all were received
    pub drained_resident_bytes: Option<f64>,
    /// From the receiver's death until the sender detected it; null if it did not
    pub receiver_death_detected_ns: Option<f64>,
    /// From the sender's death until the receiver detected it; null if it did not
    pub sender_death_detected_ns: Option<f64>,
}

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

/// The measurement's parameters.
#[derive(Clone, Debug, Serialize)]
pub struct Parameters {
    /// As on the command line: `256` or `1..32768`
    pub size: String,
    /// Messages, or rounds of a round trip: each system's own where `seconds` is given
    pub count: u64,
    /// How long they last about, if each system has a number of its own; null if all have the same number
    pub seconds: Option<f64>,
    /// Bytes of a pelton or limits lane
    pub capacity: u64,
    /// Of each side of a round trip
    pub delay_us: u64,
    /// Of the slow side of a lopsided channel, for each message; the other side works a tenth of it
    pub work_us: u64,
    /// The slow side; null elsewhere
    pub slow: Option<Slow>,
    /// Of each appending thread, for each message; null elsewhere
    pub work_ns: Option<u64>,
    /// Threads of an append; null elsewhere
    pub threads: Option<u32>,
    /// The directory of the file that they append to; null without one
    pub file: Option<String>,
    /// Messages of a round trip that are due in a second; null without a rate
    pub rate: Option<u32>,
    /// Processes that send in a fan-in; null elsewhere
    pub senders: Option<u32>,
    /// Connected senders of a fan-in that send nothing; null elsewhere
    pub idle: Option<u32>,
    /// The options of calls; null elsewhere
    pub calls: Option<Calls>,
    /// The number of runs
    pub runs: usize,
    /// The receiver's (asker's) and the sender's (answerer's); empty if the processes were not pinned
    pub cpus: Vec<usize>,
    /// Threads that computed meanwhile
    #[serde(default)]
    pub beside_load: u32,
    /// Percent of one processor that the measured processes together get; null without a limit
    #[serde(default)]
    pub quota: Option<u32>,
}

/// All runs of one system.
#[derive(Clone, Debug)]
pub struct SystemReport {
    /// Its word in the list of systems
    pub choice: Choice,
    /// How it waited
    pub wait: Wait,
    /// Of the library, the kernel or the program
    pub version: String,
    /// Its number of messages, or rounds
    pub count: u64,
    /// The program that is started for it; empty for this program itself
    pub program: Vec<OsString>,
    /// In order; after an interrupt one system may have one more than the next
    pub runs: Vec<Run>,
    /// The reason why it was not measured
    pub skipped: Option<String>,
}

/// The whole measurement.
pub struct Report {
    /// The workload
    pub workload: Workload,
    /// Its parameters
    pub parameters: Parameters,
    /// In the order of the list
    pub systems: Vec<SystemReport>,
}

/// The first system's figure by another's, run by run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Ratio {
    /// Of all runs
    pub median: f64,
    /// The smallest
    pub min: f64,
    /// The largest
    pub max: f64,
    /// The lower quartile
    pub low: f64,
    /// The upper quartile
    pub high: f64,
    /// The interval that has the true median in 19 of 20 cases, by a bootstrap over the pairs of runs
    pub interval: (f64, f64),
    /// How many pairs there were
    pub runs: usize,
}

#[derive(Serialize)]
struct SystemLine<'a> {
    workload: Workload,
    system: String,
    label: String,
    wait: Wait,
    version: &'a str,
    parameters: Parameters,
    skipped: &'a Option<String>,
    #[serde(flatten)]
    medians: Figures,
    runs: &'a [Run],
}

#[derive(Serialize)]
struct RatioLine {
    workload: Workload,
    first: Option<String>,
    figure: Option<&'static str>,
    ratios: BTreeMap<String, Ratio>,
}

impl Report {
    /// One object a line per system, and one of ratios.
    pub fn write_json(&self, out: &mut impl Write) -> Result<()> {
        for system in &self.systems {
            let line = SystemLine {
                workload: self.workload,
                system: word(system.choice.system),
                label: system.choice.to_string(),
                wait: system.wait,
                version: &system.version,
                parameters: Parameters { count: system.count, ..self.parameters.clone() },
                skipped: &system.skipped,
                medians: medians(&system.runs),
                runs: &system.runs,
            };
            writeln!(out, "{}", serde_json::to_string(&line)?)?;
        }
        let line = RatioLine {
            workload: self.workload,
            first: self.systems.first().map(|first| first.choice.to_string()),
            figure: self.primary().map(|(name, _)| name),
            ratios: self.ratios(),
        };
        writeln!(out, "{}", serde_json::to_string(&line)?)?;
        Ok(())
    }

    /// Of the first system to each other, for the workload's first figure.
    pub fn ratios(&self) -> BTreeMap<String, Ratio> {
        let (Some((_, figure)), Some((first, others))) = (self.primary(), self.systems.split_first()) else {
            return BTreeMap::new();
        };
        let values = |system: &SystemReport| system.runs.iter().map(|run| figure(&run.figures)).collect::<Vec<_>>();
        let of_first = values(first);
        let pair = |other: &SystemReport| Some((other.choice.to_string(), paired_ratio(&of_first, &values(other))?));
        others.iter().filter_map(pair).collect()
    }

    /// The workload's main figure, and its name.
    fn primary(&self) -> Option<(&'static str, Figure)> {
        match self.workload {
            Workload::Roundtrip => Some(("round_trip_ns", |figures| figures.round_trip_ns)),
            Workload::Reattach => Some(("reattach_receiver_ns", |figures| figures.reattach_receiver_ns)),
            Workload::Append if self.parameters.work_ns > Some(0) => {
                Some(("share_of_own_speed", |figures| figures.share_of_own_speed))
            }
            Workload::Lopsided => Some(("share_of_own_speed", |figures| figures.share_of_own_speed)),
            Workload::Memory => Some(("backlog_resident_bytes", |figures| figures.backlog_resident_bytes)),
            Workload::Stream | Workload::FanIn | Workload::Append | Workload::Threads => {
                Some(("messages_per_second", |figures| figures.messages_per_second))
            }
            Workload::Call if self.parameters.calls.is_some_and(|calls| calls.beside_flood) => {
                Some(("p99_ns", |figures| figures.p99_ns))
            }
            Workload::Call if self.parameters.calls.is_some_and(Calls::one_by_one) => {
                Some(("round_trip_ns", |figures| figures.round_trip_ns))
            }
            Workload::Call => Some(("messages_per_second", |figures| figures.messages_per_second)),
            Workload::Idle | Workload::Kill => None,
        }
    }

    /// As a table.
    pub fn write_table(&self, out: &mut impl Write) -> Result<()> {
        let Parameters {
            size,
            count,
            seconds,
            capacity,
            delay_us,
            work_us,
            slow,
            work_ns,
            threads,
            file,
            rate,
            senders,
            idle,
            calls,
            runs,
            cpus,
            beside_load,
            quota,
        } = &self.parameters;
        let calls = calls.unwrap_or_default();
        let count = match seconds {
            Some(seconds) => format!("{seconds} s of"),
            None => count.to_string(),
        };
        match self.workload {
            Workload::Stream => writeln!(out, "stream of {count} messages of {size} bytes, lanes of {capacity} bytes")?,
            Workload::Roundtrip => match rate {
                Some(rate) => writeln!(out, "{count} round trips of {size} bytes, {rate} due in a second")?,
                None => {
                    writeln!(out, "{count} round trips of {size} bytes, each side delays its reply by {delay_us} µs")?
                }
            },
            Workload::Threads => {
                writeln!(out, "{count} messages of {size} bytes between two threads, lanes of {capacity} bytes")?
            }
            Workload::Memory => writeln!(
                out,
                "{count} messages of {size} bytes, received only after all are sent, lanes of {capacity} bytes"
            )?,
            Workload::Kill => writeln!(
                out,
                "two streams of messages of {size} bytes: the receiver of one is killed, and the sender of the other"
            )?,
            Workload::Reattach => writeln!(
                out,
                "successors on a lane of {capacity} bytes with {count} unreleased messages of {size} bytes"
            )?,
            Workload::Lopsided => writeln!(
                out,
                "{count} messages of {size} bytes, lanes of {capacity} bytes, the {} working {work_us} µs for each and the other a tenth",
                slow.map(word).unwrap_or_default()
            )?,
            Workload::Idle => writeln!(out, "an open channel without messages, lanes of {capacity} bytes")?,
            Workload::FanIn => writeln!(
                out,
                "{count} messages of {size} bytes in total, lanes of {capacity} bytes, senders: {} that send and {} that do not",
                senders.unwrap_or_default(),
                idle.unwrap_or_default()
            )?,
            Workload::Call => writeln!(
                out,
                "{count} calls with requests and replies of {size} bytes, lanes of {capacity} bytes, {} in flight for each of {} clients{}{}",
                calls.in_flight,
                calls.clients,
                if *delay_us > 0 { format!(", each side delays its reply by {delay_us} µs") } else { String::new() },
                match calls {
                    Calls { rate: Some(rate), .. } => format!(", {rate} a second"),
                    Calls { beside_flood: true, .. } => ", beside one more flooding client".to_string(),
                    _ => String::new(),
                }
            )?,
            Workload::Append => writeln!(
                out,
                "{count} messages of {size} bytes by each of {} threads, each with {} ns of work{}",
                threads.unwrap_or_default(),
                work_ns.unwrap_or_default(),
                file.as_ref().map(|file| format!(", to a file in {file}")).unwrap_or_default()
            )?,
        }
        let pinned = match cpus[..] {
            [] => "not pinned".to_string(),
            [first, second] if first == second => format!("all on CPU {first}"),
            [first, second, ..] => format!("on CPUs {first} and {second}"),
            [first] => format!("on CPU {first}"),
        };
        let load = match beside_load {
            0 => String::new(),
            threads => format!(", beside {threads} computing threads"),
        };
        let quota = quota.map_or(String::new(), |percent| format!(", with a quota of {percent} % of a processor"));
        writeln!(out, "medians of {runs} runs, systems interleaved, {pinned}{load}{quota}\n")?;

        let ratios = self.ratios();
        let mut rows: Vec<Vec<String>> = vec![vec!["system".to_string(), "wait".to_string()]];
        rows[0].extend(COLUMNS.iter().map(|column| column.title.to_string()));
        // With different counts only the cost of one message is comparable.
        let each_has_its_own = seconds.is_some();
        if each_has_its_own {
            rows[0].iter_mut().filter(|title| *title == "CPU s").for_each(|title| *title = "CPU s/million".to_string());
            rows[0].push("count".to_string());
        }
        rows[0].push("spread".to_string());
        rows[0].push(format!(
            "{} to this (95 %)",
            self.systems.first().map(|first| first.choice.to_string()).unwrap_or_default()
        ));
        for system in &self.systems {
            let mut medians = medians(&system.runs);
            if each_has_its_own {
                medians.cpu_seconds = medians.cpu_seconds.map(|seconds| seconds / system.count as f64 * 1e6);
            }
            let mut row = vec![system.choice.to_string(), word(system.wait)];
            row.extend(
                COLUMNS.iter().map(|column| {
                    (column.figure)(&medians).map(|value| digits(value * column.scale)).unwrap_or_default()
                }),
            );
            if each_has_its_own {
                row.push(system.count.to_string());
            }
            let values = self
                .primary()
                .map(|(_, figure)| system.runs.iter().filter_map(|run| figure(&run.figures)).collect::<Vec<_>>())
                .unwrap_or_default();
            row.push(spread(&values).map(|spread| format!("{:.0} %", spread * 100.0)).unwrap_or_default());
            let ratio = ratios.get(&system.choice.to_string());
            row.push(
                ratio
                    .map(|r| format!("{:.3} ({:.3} to {:.3})", r.median, r.interval.0, r.interval.1))
                    .unwrap_or_default(),
            );
            if !system.runs.is_empty() {
                rows.push(row);
            }
        }
        write_aligned(out, &rows)?;
        for system in &self.systems {
            for (killed, outcomes) in outcomes(&system.runs) {
                writeln!(out, "{}, its {killed} killed: {outcomes}", system.choice)?;
            }
        }
        for system in &self.systems {
            if let Some(reason) = &system.skipped {
                writeln!(out, "skipped {}: {reason}", system.choice)?;
            }
        }
        Ok(())
    }
}

/// By the killed side, how often each outcome occurred: `detected 5`, or `detected 3, hangs 2`.
fn outcomes(runs: &[Run]) -> BTreeMap<&str, String> {
    let mut counts: BTreeMap<&str, BTreeMap<String, usize>> = BTreeMap::new();
    for (killed, death) in runs.iter().flat_map(|run| &run.deaths) {
        *counts.entry(killed).or_default().entry(word(death.outcome)).or_default() += 1;
    }
    let text = |of: BTreeMap<String, usize>| of.iter().map(|(what, n)| format!("{what} {n}")).collect::<Vec<_>>();
    counts.into_iter().map(|(killed, of)| (killed, text(of).join(", "))).collect()
}

/// One of the figures.
type Figure = fn(&Figures) -> Option<f64>;

struct Column {
    title: &'static str,
    scale: f64,
    figure: Figure,
}

const COLUMNS: [Column; 23] = [
    Column { title: "M calls/s", scale: 1e-6, figure: |f| f.calls_per_second },
    Column { title: "M messages/s", scale: 1e-6, figure: |f| f.messages_per_second },
    Column { title: "MB/s", scale: 1e-6, figure: |f| f.bytes_per_second },
    Column { title: "round trip ns", scale: 1.0, figure: |f| f.round_trip_ns },
    Column { title: "p50 ns", scale: 1.0, figure: |f| f.p50_ns },
    Column { title: "p90 ns", scale: 1.0, figure: |f| f.p90_ns },
    Column { title: "p99 ns", scale: 1.0, figure: |f| f.p99_ns },
    Column { title: "p99.9 ns", scale: 1.0, figure: |f| f.p999_ns },
    Column { title: "p99.99 ns", scale: 1.0, figure: |f| f.p9999_ns },
    Column { title: "of own speed", scale: 1.0, figure: |f| f.share_of_own_speed },
    Column { title: "CPU to own work", scale: 1.0, figure: |f| f.cpu_to_own_work },
    Column { title: "CPU s", scale: 1.0, figure: |f| f.cpu_seconds },
    Column { title: "calls/message", scale: 1.0, figure: |f| f.syscalls_per_message },
    Column { title: "sleeps/wait", scale: 1.0, figure: |f| f.sleeps_per_wait },
    Column { title: "wake-ups/s", scale: 1.0, figure: |f| f.wakeups_per_second },
    Column { title: "resident KiB", scale: 1.0 / 1024.0, figure: |f| f.resident_bytes },
    Column { title: "receiver reattach µs", scale: 1e-3, figure: |f| f.reattach_receiver_ns },
    Column { title: "sender reattach µs", scale: 1e-3, figure: |f| f.reattach_sender_ns },
    Column { title: "backlog", scale: 1.0, figure: |f| f.backlog_messages },
    Column { title: "its KiB", scale: 1.0 / 1024.0, figure: |f| f.backlog_resident_bytes },
    Column { title: "KiB after", scale: 1.0 / 1024.0, figure: |f| f.drained_resident_bytes },
    Column { title: "receiver's death µs", scale: 1e-3, figure: |f| f.receiver_death_detected_ns },
    Column { title: "sender's death µs", scale: 1e-3, figure: |f| f.sender_death_detected_ns },
];

/// Columns without any value are left out.
fn write_aligned(out: &mut impl Write, rows: &[Vec<String>]) -> Result<()> {
    let columns = rows[0].len();
    let width =
        |column: usize, rows: &[Vec<String>]| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let kept: Vec<usize> = (0..columns).filter(|column| width(*column, &rows[1..]) > 0).collect();
    if kept.is_empty() {
        return Ok(());
    }
    for row in rows {
        let cells: Vec<String> = kept
            .iter()
            .map(|&column| {
                let pad = " ".repeat(width(column, rows) - row[column].chars().count());
                // Words to the left, numbers to the right.
                if column < 2 { format!("{}{pad}", row[column]) } else { format!("{pad}{}", row[column]) }
            })
            .collect();
        writeln!(out, "{}", cells.join("  ").trim_end())?;
    }
    Ok(())
}

/// About four digits, without an exponent.
fn digits(value: f64) -> String {
    let size = value.abs();
    if size == 0.0 {
        "0".to_string()
    } else if size >= 1000.0 {
        format!("{value:.0}")
    } else if size >= 100.0 {
        format!("{value:.1}")
    } else if size >= 1.0 {
        format!("{value:.2}")
    } else if size >= 0.001 {
        format!("{value:.4}")
    } else {
        format!("{value:.7}")
    }
}

/// Of each figure by itself.
pub fn medians(runs: &[Run]) -> Figures {
    let of = |figure: Figure| median(runs.iter().filter_map(|run| figure(&run.figures)).collect());
    Figures {
        seconds: of(|f| f.seconds),
        calls_per_second: of(|f| f.calls_per_second),
        messages_per_second: of(|f| f.messages_per_second),
        bytes_per_second: of(|f| f.bytes_per_second),
        round_trip_ns: of(|f| f.round_trip_ns),
        p50_ns: of(|f| f.p50_ns),
        p90_ns: of(|f| f.p90_ns),
        p99_ns: of(|f| f.p99_ns),
        p999_ns: of(|f| f.p999_ns),
        p9999_ns: of(|f| f.p9999_ns),
        cpu_seconds: of(|f| f.cpu_seconds),
        syscalls_per_message: of(|f| f.syscalls_per_message),
        sleeps_per_wait: of(|f| f.sleeps_per_wait),
        wakeups_per_second: of(|f| f.wakeups_per_second),
        resident_bytes: of(|f| f.resident_bytes),
        share_of_own_speed: of(|f| f.share_of_own_speed),
        cpu_to_own_work: of(|f| f.cpu_to_own_work),
        reattach_receiver_ns: of(|f| f.reattach_receiver_ns),
        reattach_sender_ns: of(|f| f.reattach_sender_ns),
        backlog_messages: of(|f| f.backlog_messages),
        backlog_resident_bytes: of(|f| f.backlog_resident_bytes),
        drained_resident_bytes: of(|f| f.drained_resident_bytes),
        receiver_death_detected_ns: of(|f| f.receiver_death_detected_ns),
        sender_death_detected_ns: of(|f| f.sender_death_detected_ns),
    }
}

/// The middle one, or the mean of the two in the middle.
pub fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        n if n % 2 == 1 => Some(values[middle]),
        _ => Some((values[middle - 1] + values[middle]) / 2.0),
    }
}

/// The first's figure by the other's of the same run. Runs that lack one of the two, or divide by nothing, make no
/// pair.
pub fn paired_ratio(first: &[Option<f64>], other: &[Option<f64>]) -> Option<Ratio> {
    let ratios: Vec<f64> = first
        .iter()
        .zip(other)
        .filter_map(|(first, other)| Some((*first)? / (*other)?))
        .filter(|ratio| ratio.is_finite())
        .collect();
    let mut sorted = ratios.clone();
    sorted.sort_by(f64::total_cmp);
    Some(Ratio {
        median: median(ratios)?,
        min: *sorted.first()?,
        max: *sorted.last()?,
        low: quantile(&sorted, 0.25),
        high: quantile(&sorted, 0.75),
        interval: interval(&sorted)?,
        runs: sorted.len(),
    })
}

/// The resamples of an interval.
const RESAMPLES: usize = 2000;

/// 2.5 % of the medians of resampled values are below it, and 2.5 % above. The same values always have the same one.
fn interval(values: &[f64]) -> Option<(f64, f64)> {
    let mut state = 1u64;
    let mut draw = || {
        // A linear congruential generator; its upper bits are the good ones.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        values[(state >> 33) as usize % values.len()]
    };
    let resampled = (0..RESAMPLES).map(|_| median(values.iter().map(|_| draw()).collect()));
    let mut medians: Vec<f64> = resampled.collect::<Option<_>>()?;
    medians.sort_by(f64::total_cmp);
    let outside = RESAMPLES / 40;
    Some((medians[outside], medians[RESAMPLES - 1 - outside]))
}

/// Interpolated between the two nearest values, of at least one.
fn quantile(sorted: &[f64], quantile: f64) -> f64 {
    let at = quantile * (sorted.len() - 1) as f64;
    let (below, above) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    below + (above - below) * at.fract()
}

/// Maximum less minimum, as a part of the median.
pub fn spread(values: &[f64]) -> Option<f64> {
    if values.len() < 2 {
        return None;
    }
    let smallest = values.iter().copied().fold(f64::INFINITY, f64::min);
    let largest = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    Some((largest - smallest) / median(values.to_vec())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(vec![]), None);
        assert_eq!(median(vec![3.0]), Some(3.0));
        assert_eq!(median(vec![9.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![9.0, 1.0, 2.0, 4.0]), Some(3.0));
    }

    #[test]
    fn ratios_are_taken_run_by_run() {
        // The machine slows down; each pair still has the ratio 2, which the medians of each system alone would not
        // have.
        let first = [Some(8.0), Some(4.0), Some(2.0), Some(1.0)];
        let other = [Some(4.0), Some(2.0), Some(1.0)];
        let all_two = Ratio { median: 2.0, min: 2.0, max: 2.0, low: 2.0, high: 2.0, interval: (2.0, 2.0), runs: 3 };
        assert_eq!(paired_ratio(&first, &other), Some(all_two));
        let ones = [Some(1.0); 5];
        let spread = paired_ratio(&[1.0, 9.0, 2.0, 4.0, 3.0].map(Some), &ones).unwrap();
        assert!(spread.interval.0 <= 2.0 && spread.interval.1 >= 4.0, "{spread:?}");
        let mut agreed = [Some(2.0); 25];
        agreed[3] = Some(90.0);
        let narrow = paired_ratio(&agreed, &[Some(1.0); 25]).unwrap();
        assert_eq!((narrow.interval, narrow.max), ((2.0, 2.0), 90.0));
        assert_eq!((spread.min, spread.low, spread.median, spread.high, spread.max), (1.0, 2.0, 3.0, 4.0, 9.0));
    }

    #[test]
    fn without_pairs_there_is_no_ratio() {
        assert_eq!(paired_ratio(&[Some(1.0)], &[]), None);
        assert_eq!(paired_ratio(&[Some(1.0)], &[None]), None);
        assert_eq!(paired_ratio(&[Some(1.0), Some(3.0)], &[Some(0.0), Some(2.0)]).unwrap().median, 1.5);
    }

    #[test]
    fn the_spread_is_relative_to_the_median() {
        assert_eq!(spread(&[1.0]), None);
        assert_eq!(spread(&[9.0, 10.0, 11.0]), Some(0.2));
    }
}
