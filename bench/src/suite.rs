//! `./run bench all`: the record that README and COMPARE.md take their figures from, and its page.
//!
//! Every part is a command that can be given by itself. Together they take less than twenty minutes on two processors; `--short` makes one run of
//! a twentieth of the messages, to see that all works.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};

use pelton_bench::{
    parameters::{Choice, SystemName},
    record,
    run::{self, Progress},
    sides::Interrupts,
};

use crate::Arguments;

/// Measures everything, and writes a record and its page
#[derive(Parser, Debug)]
#[command(name = "pelton-bench all", max_term_width = 120)]
struct All {
    /// The page; without this none is written
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,

    /// The record [default: bench/record/DATE-all.jsonl in the project's tree; with --short, none]
    #[arg(long, value_name = "FILE.jsonl")]
    record: Option<PathBuf>,

    /// One run of a twentieth of the messages: to see that it works, not for figures
    #[arg(long)]
    short: bool,

    /// Only the commands that contain this
    #[arg(long, value_name = "WORDS")]
    only: Option<String>,
}

/// A command, its systems, and about how many seconds a run of one of them takes.
struct Part(&'static str, &'static str, f64);

/// One way, in the order of the tables. Each waits as it is at its best; those without a wait here say it in their source.
const STREAMING: &str = "pelton,pelton-batches,limits,limits-window,shmem-ipc,aeron,sock-stream-batched:block,io-uring-stream,\
sock-seqpacket-batched:block,io-uring-seqpacket,sock-seqpacket:block,pipe:block,zeromq-ipc,ipc_ring,ipmpsc,iceoryx2";
/// At the size that the tables are of these too.
const TABLED: &str = "+pelton-path,pelton:block,sock-stream:block,multiprocessing-pipe,multiprocessing-queue";
/// There and back: who can looks again and again, as pelton does.
const SPINNING: &str = "pelton,limits,iceoryx2,aeron,ipc_ring,shmem-ipc,ipmpsc,zeromq-ipc,zeromq-ipc:block,sock-stream,sock-seqpacket,pipe";
/// There and back, all waiting in their calls.
const BLOCKING: &str = "pelton,sock-stream:block,io-uring-stream,sock-seqpacket:block,io-uring-seqpacket";
const ASLEEP: &str = "pelton,limits,sock-stream,io-uring-stream,sock-seqpacket,io-uring-seqpacket,pipe,shmem-ipc,zeromq-ipc,ipc_ring,multiprocessing-pipe";
const RESTING: &str = "pelton,sock-stream,sock-seqpacket,io-uring-seqpacket,zeromq-ipc";
const LOADED: &str = "pelton,pelton:spin,sock-stream,io-uring-seqpacket,zeromq-ipc,iceoryx2:spin";
const KEEPING: &str = "pelton,pelton-path,sock-stream,ipc_ring,ipmpsc,shmem-ipc,zeromq-ipc,iceoryx2";

/// What a pass of `--seconds 0.3` takes with those that warm up and count system calls, and two processes' start; Aeron's takes some more.
const SHORT: f64 = 0.75;
/// The same of round trips of half a second, which are once more timed one by one.
const ROUND: f64 = 1.3;

/// No size of which the one before and the one behind say the same, and no rate at which there are too few to say anything.
const PARTS: &[Part] = &[
    // Throughput by size.
    Part("stream --size 16 --seconds 0.3 --runs 5", STREAMING, SHORT),
    Part("stream --size 256 --seconds 0.3 --runs 7", TABLED, SHORT),
    Part("stream --size 1024 --seconds 0.3 --runs 3", STREAMING, SHORT),
    Part("stream --size 4096 --seconds 0.3 --runs 3", STREAMING, SHORT),
    Part("stream --size 65536 --seconds 0.3 --runs 3", STREAMING, SHORT),
    Part(
        "stream --size 1..32768 --seconds 0.3 --runs 5",
        "pelton,limits,limits-window,sock-stream-batched:block,io-uring-stream,sock-seqpacket:block,io-uring-seqpacket",
        SHORT,
    ),
    // Latency.
    Part("roundtrip --size 64 --seconds 0.5 --runs 5", SPINNING, ROUND),
    Part("roundtrip --size 64 --wait block --seconds 0.5 --runs 5", BLOCKING, ROUND),
    Part("roundtrip --size 64 --delay 20 --count 10000 --runs 3", ASLEEP, 2.5),
    Part("roundtrip --size 64 --rate 100 --count 150 --runs 3", RESTING, 3.2),
    Part("roundtrip --size 64 --rate 10000 --count 15000 --runs 3", LOADED, 3.2),
    Part("roundtrip --size 64 --rate 200000 --count 100000 --runs 3", LOADED, 1.6),
    Part(
        "roundtrip --size 64 --rate 1000000 --count 200000 --runs 3",
        "pelton,pelton:spin,sock-stream,iceoryx2:spin",
        2.0,
    ),
    // One process.
    Part(
        "threads --size 64 --seconds 0.3 --runs 7",
        "pelton,pelton-batches,rtrb,rtrb-chunks,crossbeam-channel,flume,kanal",
        SHORT,
    ),
    // What it costs to have one, and to lose one.
    Part("idle --runs 1", "pelton,pelton-path,pipe,sock-stream,ipc_ring,ipmpsc,iceoryx2,shmem-ipc,zeromq-ipc", 2.4),
    Part("memory --count 1000 --runs 1", KEEPING, 0.6),
    Part("memory --count 10000 --runs 1", KEEPING, 0.6),
    Part("memory --count 100000 --runs 1", KEEPING, 0.8),
    Part(
        "kill --runs 2",
        "pelton,pelton-path,pipe,sock-stream,sock-seqpacket,io-uring-seqpacket,ipc_ring,ipmpsc,iceoryx2,shmem-ipc,zeromq-ipc",
        2.5,
    ),
    // What else pelton does.
    Part("lopsided --slow receiver --count 2000 --runs 3", "pelton,sock-stream,sock-seqpacket", 1.5),
    Part("lopsided --slow sender --count 2000 --runs 3", "pelton,sock-stream,sock-seqpacket", 1.5),
    Part(
        "fan-in --senders 8 --seconds 0.3 --runs 5",
        "pelton,pelton-stream,limits,limits-window,sock-stream:block,sock-seqpacket:block",
        0.8,
    ),
    Part("append --threads 2 --count 5000000 --runs 5", "pelton,limits,bump,mutex-vec,array-queue,seg-queue", 1.0),
    Part("call --size 64 --seconds 0.3 --runs 5", "pelton,limits,sock-stream", 1.0),
    Part(
        "call --size 64 --in-flight 1000 --wait block --seconds 0.3 --runs 5",
        "pelton,sock-stream,sock-stream-batched",
        1.0,
    ),
    Part("reattach --count 1000000 --runs 3", "pelton-path", 0.5),
];

/// Does what the command line says behind `all`.
pub fn main(arguments: impl Iterator<Item = String>) -> ExitCode {
    let all = All::parse_from(std::iter::once("pelton-bench all".to_string()).chain(arguments));
    measure(&all).unwrap_or_else(|error| {
        eprintln!("pelton-bench: {error:#}");
        ExitCode::FAILURE
    })
}

/// The command line. A `+` before the systems: those that stream, and these.
fn words(part: &Part, short: bool) -> Vec<String> {
    let Part(command, systems, _) = part;
    let systems = match systems.strip_prefix('+') {
        Some(also) => format!("{STREAMING},{also}"),
        None => systems.to_string(),
    };
    let mut words: Vec<String> = command.split(' ').map(str::to_string).collect();
    if short {
        for at in 0..words.len() {
            match words[at].as_str() {
                "--runs" => words[at + 1] = "1".to_string(),
                "--seconds" => words[at + 1] = "0.02".to_string(),
                // A few messages are no burden, and one at a time has to come to an end.
                "--count" => {
                    let count: u64 = words[at + 1].parse().unwrap_or(1);
                    words[at + 1] = (count / 20).max(count.min(1000)).to_string();
                }
                _ => {}
            }
        }
    }
    words.extend(["--systems".to_string(), systems]);
    words
}

/// What is measured, and about how many seconds it takes.
struct Planned {
    text: String,
    plan: run::Plan,
    /// Of one run of one system
    weight: f64,
}

impl Planned {
    fn of(part: &Part, short: bool) -> Result<Planned> {
        let words = words(part, short);
        let parsed = Arguments::try_parse_from(std::iter::once("pelton-bench".to_string()).chain(words.clone()));
        let plan = parsed?.plan().map_err(|error| anyhow::anyhow!("{}: {error}", part.0))?;
        let weight = part.2 * if short { 0.3 } else { 1.0 };
        Ok(Planned { text: format!("./run bench {}", words.join(" ")), plan, weight })
    }

    /// How many messages each is to have takes some runs more to find out; a virtual machine of Java's takes its time to start.
    fn seconds(&self) -> f64 {
        let slow_to_start = |choice: &&Choice| choice.system == SystemName::Aeron;
        let slow = self.plan.systems.iter().filter(slow_to_start).count() as f64 * 2.0;
        let runs = self.plan.runs as f64 + if self.plan.seconds.is_some() { 1.0 } else { 0.0 };
        runs * (self.weight * self.plan.systems.len() as f64 + slow)
    }
}

fn measure(all: &All) -> Result<ExitCode> {
    let default = (!all.short).then(|| {
        let date = record::date();
        let name = format!("{}-all.jsonl", date.split(' ').next().unwrap_or(&date));
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/record")).join(name)
    });
    let place = all.record.clone().or(default);
    let chosen = PARTS.iter().filter(|part| all.only.as_ref().is_none_or(|only| part.0.contains(only.as_str())));
    let plans: Vec<Planned> = chosen.map(|part| Planned::of(part, all.short)).collect::<Result<_>>()?;
    anyhow::ensure!(
        !plans.is_empty(),
        "no command contains `{}`: without --only all of them are listed",
        all.only.as_deref().unwrap_or_default()
    );
    let expected: f64 = plans.iter().map(Planned::seconds).sum();
    for planned in &plans {
        let command = planned.text.split(" --systems ").next().unwrap_or_default();
        eprintln!("{:4.0} s  {command}, {} systems", planned.seconds(), planned.plan.systems.len());
    }
    eprintln!("{:4.0} min in all, and what builds the other libraries when they are first needed", expected / 60.0);
    // In milliseconds of what is expected, so that the time left is of what is left, not of how many runs are.
    let weight_all: f64 = plans.iter().map(|p| p.weight * (p.plan.runs * p.plan.systems.len()) as f64).sum();
    let bar = ProgressBar::new((weight_all * 1000.0) as u64);
    bar.set_style(ProgressStyle::with_template("{bar:30} {percent:>3} % {elapsed} gone, {eta} left  {msg}")?);
    let (mut lines, mut interrupted) = (Vec::new(), false);
    let interrupts = Interrupts::new()?;
    let command = if all.short { "./run bench all --short" } else { "./run bench all" };
    for Planned { text, plan, weight } in &plans {
        let (report, ended) =
            run::measure(plan, &interrupts, &Progress { bar: bar.clone(), weight: (weight * 1000.0) as u64 })?;
        lines.extend(record::lines(&report, text)?);
        interrupted = ended;
        // After each part: whatever ends this, what was finished is there.
        keep(all, place.as_deref(), command, ended, &lines)?;
        if ended {
            break;
        }
    }
    bar.finish_and_clear();
    for (what, place) in [("record", place.as_ref()), ("page", all.report.as_ref())] {
        if let Some(place) = place {
            println!("{what}: {}", place.display());
        }
    }
    if interrupted {
        eprintln!("pelton-bench: interrupted; the runs that were finished are kept");
        return Ok(ExitCode::from(130));
    }
    let measured = lines.iter().any(|line| line["runs"].as_array().is_some_and(|runs| !runs.is_empty()));
    Ok(if measured { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn keep(all: &All, place: Option<&Path>, command: &str, ended: bool, lines: &[serde_json::Value]) -> Result<()> {
    let record: Vec<_> = std::iter::once(record::machine(command, ended)).chain(lines.iter().cloned()).collect();
    if let Some(place) = place {
        record::write(place, &record).context("keeping the record")?;
    }
    if let Some(page) = &all.report {
        record::write_page(page, &record).context("writing the page")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_is_a_command_and_all_take_less_than_twenty_minutes() {
        let mut seconds = 0.0;
        for part in PARTS {
            for short in [false, true] {
                let planned = Planned::of(part, short).unwrap();
                for choice in &planned.plan.systems {
                    let belongs = choice.system.belongs(planned.plan.workload, false);
                    assert!(belongs.is_ok(), "{}: {choice}: {belongs:?}", part.0);
                }
                if !short {
                    seconds += planned.seconds();
                }
            }
        }
        // A tenth is left for a slower machine.
        assert!(seconds < 20.0 * 60.0 * 0.9, "{seconds} s");
    }

    #[test]
    fn the_figures_of_the_pages_have_parts_that_they_are_of() {
        let commands: Vec<String> = PARTS.iter().map(|part| pelton_bench::figures::key(part.0)).collect();
        for wanted in pelton_bench::figures::WANTED {
            assert!(commands.iter().any(|command| command == wanted), "no part measures `{wanted}`");
        }
    }
}
