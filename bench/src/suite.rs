//! `./run bench all`: the results from which README and COMPARE.md take their figures, and their page.
//!
//! Every part is also a command. Together they take less than twenty minutes on two processors. `--short` makes one
//! run of a twentieth of the messages, as a smoke test.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};

use pelton_bench::{
    commands::Measurement,
    plan::Choice,
    results,
    run::{self, Progress},
    sides::Interrupts,
};

/// Measures all workloads, and writes the results and their page
#[derive(Parser, Debug)]
#[command(name = "pelton-bench all", max_term_width = 120)]
struct All {
    /// The page [default: none]
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,

    /// The results file [default: bench/results/DATE-all.jsonl in the project's tree; with --short, none]
    #[arg(long, value_name = "FILE.jsonl")]
    results: Option<PathBuf>,

    /// One run of a twentieth of the messages: a smoke test without useful figures
    #[arg(long)]
    short: bool,

    /// Only the commands that contain this
    #[arg(long, value_name = "WORDS")]
    only: Option<String>,
}

/// A command, its systems, and the seconds that a run of one of them takes, about.
struct Part(&'static str, &'static str, f64);

/// One way, in the order of the tables. Each uses its best wait; systems without a wait here have it in their source.
const STREAMING: &str = "pelton,pelton-batches,limits,limits-window,shmem-ipc,aeron,sock-stream-batched:block,io-uring-stream,\
sock-seqpacket-batched:block,io-uring-seqpacket,sock-seqpacket:block,pipe:block,zeromq-ipc,ipc_ring,ipmpsc,iceoryx2";
/// More systems, at the size of the tables.
const TABLED: &str = "+pelton-path,pelton:block,sock-stream:block,multiprocessing-pipe,multiprocessing-queue";
/// There and back: systems that busy-poll, as pelton does.
const SPINNING: &str = "pelton,limits,iceoryx2,aeron,ipc_ring,shmem-ipc,ipmpsc,zeromq-ipc,zeromq-ipc:block,sock-stream,sock-seqpacket,pipe";
/// There and back, all with blocking calls.
const BLOCKING: &str = "pelton,sock-stream:block,io-uring-stream,sock-seqpacket:block,io-uring-seqpacket";
const ASLEEP: &str = "pelton,limits,sock-stream,io-uring-stream,sock-seqpacket,io-uring-seqpacket,pipe,shmem-ipc,zeromq-ipc,ipc_ring,multiprocessing-pipe";
const PACED: &str = "pelton,sock-stream,sock-seqpacket,io-uring-seqpacket,zeromq-ipc";
const LOADED: &str = "pelton,pelton:spin,sock-stream,io-uring-seqpacket,zeromq-ipc,iceoryx2:spin";
const KEEPING: &str = "pelton,pelton-path,sock-stream,ipc_ring,ipmpsc,shmem-ipc,zeromq-ipc,iceoryx2";

/// With each placement: what programs have today, all asleep while they wait.
const PLACED: &str = "pelton,sock-stream,pipe";

/// A pass of `--seconds 0.3` with its warm-up, its count of system calls, and two processes' start; Aeron's takes some
/// more.
const SHORT: f64 = 0.75;
/// The same of round trips of half a second, with one more pass that times single rounds.
const ROUND: f64 = 1.3;

/// Sizes whose neighbours predict their results are left out, and so are rates with too few messages.
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
    Part("roundtrip --size 64 --rate 100 --count 150 --runs 3", PACED, 3.2),
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
    // The costs of an open channel, and of a lost one.
    Part("idle --runs 1", "pelton,pelton-path,pipe,sock-stream,ipc_ring,ipmpsc,iceoryx2,shmem-ipc,zeromq-ipc", 2.4),
    Part("memory --count 1000 --runs 1", KEEPING, 0.6),
    Part("memory --count 10000 --runs 1", KEEPING, 0.6),
    Part("memory --count 100000 --runs 1", KEEPING, 0.8),
    Part(
        "kill --runs 2",
        "pelton,pelton-path,pipe,sock-stream,sock-seqpacket,io-uring-seqpacket,ipc_ring,ipmpsc,iceoryx2,shmem-ipc,zeromq-ipc",
        2.5,
    ),
    // More workloads of pelton.
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
    // Where the processes run.
    Part("stream --size 256 --wait block --placement apart --seconds 0.1 --runs 3", PLACED, 0.4),
    Part("stream --size 256 --wait block --placement together --seconds 0.1 --runs 3", PLACED, 0.4),
    Part("stream --size 256 --wait block --placement free --seconds 0.1 --runs 3", PLACED, 0.4),
    Part("roundtrip --size 64 --wait block --placement apart --seconds 0.1 --runs 3", PLACED, 0.4),
    Part("roundtrip --size 64 --wait block --placement together --seconds 0.1 --runs 3", PLACED, 0.4),
    Part("roundtrip --size 64 --wait block --placement free --seconds 0.1 --runs 3", PLACED, 0.4),
    Part("call --size 64 --wait block --placement apart --seconds 0.1 --runs 3", "pelton,sock-stream", 0.4),
    Part("call --size 64 --wait block --placement together --seconds 0.1 --runs 3", "pelton,sock-stream", 0.4),
    Part("call --size 64 --wait block --placement free --seconds 0.1 --runs 3", "pelton,sock-stream", 0.4),
];

/// Runs the command line after `all`.
pub fn main(arguments: impl Iterator<Item = String>) -> ExitCode {
    let all = All::parse_from(std::iter::once("pelton-bench all".to_string()).chain(arguments));
    measure(&all).unwrap_or_else(|error| {
        eprintln!("pelton-bench: {error:#}");
        ExitCode::FAILURE
    })
}

/// The command line. A `+` before the systems adds them to the streaming ones.
fn command_words(part: &Part, short: bool) -> Vec<String> {
    let Part(command, systems, _) = part;
    let systems = match systems.strip_prefix('+') {
        Some(also) => format!("{STREAMING},{also}"),
        None => systems.to_string(),
    };
    let mut command_words: Vec<String> = command.split(' ').map(str::to_string).collect();
    if short {
        for at in 0..command_words.len() {
            match command_words[at].as_str() {
                "--runs" => command_words[at + 1] = "1".to_string(),
                "--seconds" => command_words[at + 1] = "0.02".to_string(),
                // A few messages cost little, and a single one must remain.
                "--count" => {
                    let count: u64 = command_words[at + 1].parse().unwrap_or(1);
                    command_words[at + 1] = (count / 20).max(count.min(1000)).to_string();
                }
                _ => {}
            }
        }
    }
    command_words.extend(["--systems".to_string(), systems]);
    command_words
}

/// A command, and the seconds that it takes, about.
struct Planned {
    text: String,
    measurement: Measurement,
    /// Seconds of one run of one system
    weight: f64,
}

impl Planned {
    fn of(part: &Part, short: bool) -> Result<Planned> {
        let command_words = command_words(part, short);
        let command = command_words.join(" ");
        let weight = part.2 * if short { 0.3 } else { 1.0 };
        Ok(Planned { measurement: Measurement::parse(&command)?, text: format!("./run bench {command}"), weight })
    }

    /// Some more runs find each system's number of messages; a Java virtual machine starts slowly.
    fn seconds(&self) -> f64 {
        let starts_slowly = |choice: &&Choice| choice.system.name == "aeron";
        let Measurement { plan, systems, .. } = &self.measurement;
        let slow = systems.iter().filter(starts_slowly).count() as f64 * 2.0;
        let runs = plan.runs as f64 + if plan.seconds.is_some() { 1.0 } else { 0.0 };
        runs * (self.weight * systems.len() as f64 + slow)
    }

    /// Runs of all its systems.
    fn runs(&self) -> usize {
        self.measurement.plan.runs * self.measurement.systems.len()
    }
}

fn measure(all: &All) -> Result<ExitCode> {
    let default = (!all.short).then(|| {
        let date = results::date();
        let name = format!("{}-all.jsonl", date.split(' ').next().unwrap_or(&date));
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/results")).join(name)
    });
    let place = all.results.clone().or(default);
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
        eprintln!("{:4.0} s  {command}, {} systems", planned.seconds(), planned.measurement.systems.len());
    }
    eprintln!("{:4.0} min in all, and the time to build the other libraries at their first use", expected / 60.0);
    // In milliseconds of the expected time, so that the time left does not depend on the number of runs.
    let weight_all: f64 = plans.iter().map(|planned| planned.weight * planned.runs() as f64).sum();
    let bar = ProgressBar::new((weight_all * 1000.0) as u64);
    bar.set_style(ProgressStyle::with_template("{bar:30} {percent:>3} % {elapsed} gone, {eta} left  {msg}")?);
    let (mut lines, mut interrupted) = (Vec::new(), false);
    let interrupts = Interrupts::new()?;
    let command = if all.short { "./run bench all --short" } else { "./run bench all" };
    for Planned { text, measurement: Measurement { plan, systems, .. }, weight } in &plans {
        let (report, ended) =
            run::measure(plan, systems, &interrupts, &Progress { bar: bar.clone(), weight: (weight * 1000.0) as u64 })?;
        lines.extend(results::lines(&report, text)?);
        interrupted = ended;
        // After each part: whatever ends the program, the finished parts are in the file.
        keep(all, place.as_deref(), command, ended, &lines)?;
        if ended {
            break;
        }
    }
    bar.finish_and_clear();
    for (what, place) in [("results", place.as_ref()), ("page", all.report.as_ref())] {
        if let Some(place) = place {
            println!("{what}: {}", place.display());
        }
    }
    if interrupted {
        eprintln!("pelton-bench: interrupted; the finished runs are kept");
        return Ok(ExitCode::from(130));
    }
    let measured = lines.iter().any(|line| line["runs"].as_array().is_some_and(|runs| !runs.is_empty()));
    Ok(if measured { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn keep(all: &All, place: Option<&Path>, command: &str, ended: bool, lines: &[serde_json::Value]) -> Result<()> {
    let results: Vec<_> = std::iter::once(results::machine(command, ended)).chain(lines.iter().cloned()).collect();
    if let Some(place) = place {
        results::write(place, &results).context("writing the results")?;
    }
    if let Some(page) = &all.report {
        results::write_page(page, &results).context("writing the page")?;
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
                let job = &planned.measurement.plan.job;
                for choice in &planned.measurement.systems {
                    let found = choice.system.part(job.kind, &job.workload);
                    assert!(found.is_ok(), "{}: {choice}: {}", part.0, found.unwrap_err());
                }
                if !short {
                    seconds += planned.seconds();
                }
            }
        }
        // A twentieth remains for a slower machine.
        assert!(seconds < 20.0 * 60.0 * 0.95, "{seconds} s");
    }

    #[test]
    fn every_figure_of_the_pages_has_a_part() {
        let commands: Vec<String> = PARTS.iter().map(|part| pelton_bench::figures::key(part.0)).collect();
        for wanted in pelton_bench::figures::WANTED {
            assert!(commands.iter().any(|command| command == wanted), "no part measures `{wanted}`");
        }
    }
}
