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
    record,
    run::{self, Progress},
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

/// A command, and about how many seconds a run of one of its systems takes.
struct Part(&'static str, f64);

const PARTS: &[Part] = &[
    // Throughput by size. As many messages as the slowest takes a second for.
    Part(
        "stream --size 16 --count 1000000 --runs 5 --systems pelton,limits,shmem-ipc,aeron,sock-stream-batched:block,io-uring-stream,io-uring-seqpacket,sock-seqpacket:block,pipe:block,zeromq-ipc,ipc_ring,ipmpsc,iceoryx2",
        0.7,
    ),
    Part(
        "stream --size 64 --count 1000000 --runs 5 --systems pelton,limits,shmem-ipc,aeron,sock-stream-batched:block,io-uring-stream,io-uring-seqpacket,sock-seqpacket:block,pipe:block,zeromq-ipc,ipc_ring,ipmpsc,iceoryx2",
        0.7,
    ),
    Part(
        "stream --size 256 --count 1000000 --runs 7 --systems pelton,limits,shmem-ipc,aeron,sock-stream-batched:block,iceoryx2,ipc_ring,pelton-path,sock-stream:block,io-uring-stream,io-uring-seqpacket,sock-seqpacket:block,pipe:block,zeromq-ipc,ipmpsc",
        0.7,
    ),
    Part(
        "stream --size 1024 --count 500000 --runs 5 --systems pelton,limits,shmem-ipc,aeron,sock-stream-batched:block,io-uring-stream,io-uring-seqpacket,sock-seqpacket:block,pipe:block,zeromq-ipc,ipc_ring,ipmpsc,iceoryx2",
        0.5,
    ),
    Part(
        "stream --size 4096 --count 300000 --runs 5 --systems pelton,limits,shmem-ipc,aeron,sock-stream-batched:block,io-uring-stream,io-uring-seqpacket,sock-seqpacket:block,pipe:block,zeromq-ipc,ipc_ring,ipmpsc,iceoryx2",
        0.5,
    ),
    Part(
        "stream --size 65536 --count 20000 --runs 5 --systems pelton,limits,shmem-ipc,sock-stream-batched:block,io-uring-stream,io-uring-seqpacket,sock-seqpacket:block,pipe:block,zeromq-ipc,ipc_ring,ipmpsc,iceoryx2",
        0.5,
    ),
    Part(
        "stream --size 256 --count 100000 --runs 3 --systems pelton:block,multiprocessing-pipe,multiprocessing-queue",
        1.0,
    ),
    Part(
        "stream --size 1..32768 --count 200000 --runs 5 --systems pelton,limits,sock-stream-batched:block,io-uring-stream,sock-seqpacket:block,io-uring-seqpacket",
        0.7,
    ),
    // Latency.
    Part(
        "roundtrip --size 64 --count 50000 --runs 5 --systems pelton,limits,iceoryx2,aeron,ipc_ring:spin,shmem-ipc:spin,sock-stream,sock-seqpacket,io-uring-stream,io-uring-seqpacket,pipe,zeromq-ipc,ipmpsc",
        1.2,
    ),
    Part(
        "roundtrip --size 64 --delay 20 --count 5000 --runs 5 --systems pelton,limits,sock-stream,sock-seqpacket,io-uring-seqpacket,pipe,shmem-ipc,zeromq-ipc,ipc_ring,multiprocessing-pipe",
        1.5,
    ),
    Part("roundtrip --size 64 --rate 1 --count 3 --runs 1 --systems pelton,sock-stream,io-uring-seqpacket", 6.5),
    Part(
        "roundtrip --size 64 --rate 100 --count 150 --runs 3 --systems pelton,sock-stream,sock-seqpacket,io-uring-seqpacket,zeromq-ipc",
        2.2,
    ),
    Part(
        "roundtrip --size 64 --rate 10000 --count 15000 --runs 3 --systems pelton,pelton:spin,sock-stream,sock-seqpacket,io-uring-seqpacket,zeromq-ipc,iceoryx2:spin",
        2.2,
    ),
    Part(
        "roundtrip --size 64 --rate 50000 --count 50000 --runs 3 --systems pelton,pelton:spin,sock-stream,sock-seqpacket,io-uring-seqpacket,zeromq-ipc,iceoryx2:spin",
        2.0,
    ),
    Part(
        "roundtrip --size 64 --rate 200000 --count 100000 --runs 3 --systems pelton,pelton:spin,sock-stream,sock-seqpacket,io-uring-seqpacket,iceoryx2:spin",
        2.0,
    ),
    Part(
        "roundtrip --size 64 --rate 1000000 --count 200000 --runs 3 --systems pelton,pelton:spin,sock-stream,iceoryx2:spin",
        2.0,
    ),
    // One process.
    Part("threads --size 64 --count 10000000 --runs 7", 0.7),
    // What it costs to have one, and to lose one.
    Part(
        "idle --runs 1 --systems pelton,pelton-path,pipe,sock-stream,ipc_ring,ipmpsc,iceoryx2,shmem-ipc,zeromq-ipc",
        2.4,
    ),
    Part(
        "memory --count 1000 --runs 1 --systems pelton,pelton-path,sock-stream,ipc_ring,ipmpsc,shmem-ipc,zeromq-ipc,iceoryx2",
        0.6,
    ),
    Part(
        "memory --count 10000 --runs 1 --systems pelton,pelton-path,sock-stream,ipc_ring,ipmpsc,shmem-ipc,zeromq-ipc,iceoryx2",
        0.6,
    ),
    Part(
        "memory --count 100000 --runs 1 --systems pelton,pelton-path,sock-stream,ipc_ring,ipmpsc,shmem-ipc,zeromq-ipc,iceoryx2",
        0.8,
    ),
    Part(
        "kill --runs 3 --systems pelton,pelton-path,pipe,sock-stream,sock-seqpacket,io-uring-seqpacket,ipc_ring,ipmpsc,iceoryx2,shmem-ipc,zeromq-ipc",
        2.5,
    ),
    // What else pelton does.
    Part("lopsided --slow receiver --count 2000 --runs 3", 1.5),
    Part("lopsided --slow sender --count 2000 --runs 3", 1.5),
    Part("fan-in --senders 2 --count 2000000 --runs 5", 1.0),
    Part("fan-in --senders 8 --count 2000000 --runs 5", 1.0),
    Part("append --threads 2 --count 5000000 --runs 3", 1.0),
    Part("call --size 64 --count 100000 --runs 5", 0.7),
    Part("call --size 64 --in-flight 1000 --wait block --count 500000 --runs 5", 0.8),
    Part("reattach --count 1000000 --runs 3", 0.5),
];

/// Does what the command line says behind `all`.
pub fn main(arguments: impl Iterator<Item = String>) -> ExitCode {
    let all = All::parse_from(std::iter::once("pelton-bench all".to_string()).chain(arguments));
    measure(&all).unwrap_or_else(|error| {
        eprintln!("pelton-bench: {error:#}");
        ExitCode::FAILURE
    })
}

fn words(part: &Part, short: bool) -> Vec<String> {
    let mut words: Vec<String> = part.0.split(' ').map(str::to_string).collect();
    if short {
        for at in 0..words.len() {
            match words[at].as_str() {
                "--runs" => words[at + 1] = "1".to_string(),
                // A few messages are no burden, and one at a time has to come to an end.
                "--count" => {
                    let count: u64 = words[at + 1].parse().unwrap_or(1);
                    words[at + 1] = (count / 20).max(count.min(1000)).to_string();
                }
                _ => {}
            }
        }
    }
    words
}

fn measure(all: &All) -> Result<ExitCode> {
    let default = (!all.short).then(|| {
        let date = record::date();
        let name = format!("{}-all.jsonl", date.split(' ').next().unwrap_or(&date));
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/record")).join(name)
    });
    let place = all.record.clone().or(default);
    let mut plans = Vec::new();
    let mut weight_all = 0.0;
    for part in PARTS.iter().filter(|part| all.only.as_ref().is_none_or(|only| part.0.contains(only.as_str()))) {
        let words = words(part, all.short);
        let parsed = Arguments::try_parse_from(std::iter::once("pelton-bench".to_string()).chain(words.clone()));
        let plan = parsed?.plan().map_err(|error| anyhow::anyhow!("{}: {error}", part.0))?;
        let weight = part.1 * if all.short { 0.3 } else { 1.0 };
        weight_all += weight * (plan.runs * plan.systems.len()) as f64;
        plans.push((format!("./run bench {}", words.join(" ")), plan, weight));
    }
    // In milliseconds of what is expected, so that the time left is of what is left, not of how many runs are.
    let bar = ProgressBar::new((weight_all * 1000.0) as u64);
    bar.set_style(ProgressStyle::with_template("{bar:30} {percent:>3} % {elapsed} gone, {eta} left  {msg}")?);
    let (mut lines, mut interrupted) = (Vec::new(), false);
    let command = if all.short { "./run bench all --short" } else { "./run bench all" };
    for (text, plan, weight) in &plans {
        let (report, ended) = run::measure(plan, &Progress { bar: bar.clone(), weight: (weight * 1000.0) as u64 })?;
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
                let words = words(part, short);
                let parsed = Arguments::try_parse_from(std::iter::once("pelton-bench".to_string()).chain(words));
                let plan = parsed.unwrap_or_else(|error| panic!("{}: {error}", part.0)).plan().unwrap();
                for choice in &plan.systems {
                    let belongs = choice.system.belongs(plan.workload, false);
                    assert!(belongs.is_ok(), "{}: {choice}: {belongs:?}", part.0);
                }
                if !short {
                    seconds += part.1 * (plan.runs * plan.systems.len()) as f64;
                }
            }
        }
        // A fifth is left for a slower machine.
        assert!(seconds < 20.0 * 60.0 * 0.8, "{seconds} s");
    }
}
