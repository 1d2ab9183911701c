//! `./run bench all`: the results from which README and COMPARE.md take their figures, and their page.
//!
//! Every part is also a command. Together they take less than twenty minutes on two processors. `--short` makes one
//! run of a twentieth of the messages, as a smoke test.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result};
use clap::Args;

use pelton_bench::{
    commands::Measurement,
    results,
    run::{self, progress_bar},
    sides::Interrupts,
};

/// Measures all workloads, and writes the results and their page
#[derive(Args, Debug)]
pub struct Arguments {
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

/// A command, and its systems.
struct Part(&'static str, &'static str);

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

/// Sizes whose neighbours predict their results are left out, and so are rates with too few messages.
const PARTS: &[Part] = &[
    // Throughput by size.
    Part("stream --size 16 --seconds 0.3 --runs 5", STREAMING),
    Part("stream --size 256 --seconds 0.3 --runs 7", TABLED),
    Part("stream --size 1024 --seconds 0.3 --runs 3", STREAMING),
    Part("stream --size 4096 --seconds 0.3 --runs 3", STREAMING),
    Part("stream --size 65536 --seconds 0.3 --runs 3", STREAMING),
    Part(
        "stream --size 1..32768 --seconds 0.3 --runs 5",
        "pelton,limits,limits-window,sock-stream-batched:block,io-uring-stream,sock-seqpacket:block,io-uring-seqpacket",
    ),
    // Latency.
    Part("roundtrip --size 64 --seconds 0.5 --runs 5", SPINNING),
    Part("roundtrip --size 64 --wait block --seconds 0.5 --runs 5", BLOCKING),
    Part("roundtrip --size 64 --delay 20 --count 10000 --runs 3", ASLEEP),
    Part("roundtrip --size 64 --rate 100 --count 150 --runs 3", PACED),
    Part("roundtrip --size 64 --rate 10000 --count 15000 --runs 3", LOADED),
    Part("roundtrip --size 64 --rate 200000 --count 100000 --runs 3", LOADED),
    Part("roundtrip --size 64 --rate 1000000 --count 200000 --runs 3", "pelton,pelton:spin,sock-stream,iceoryx2:spin"),
    // One process.
    Part(
        "threads --size 64 --seconds 0.3 --runs 7",
        "pelton,pelton-batches,rtrb,rtrb-chunks,crossbeam-channel,flume,kanal",
    ),
    // The costs of an open channel, and of a lost one.
    Part("idle --runs 1", "pelton,pelton-path,pipe,sock-stream,ipc_ring,ipmpsc,iceoryx2,shmem-ipc,zeromq-ipc"),
    Part("memory --count 1000 --runs 1", KEEPING),
    Part("memory --count 10000 --runs 1", KEEPING),
    Part("memory --count 100000 --runs 1", KEEPING),
    Part(
        "kill --runs 2",
        "pelton,pelton-path,pipe,sock-stream,sock-seqpacket,io-uring-seqpacket,ipc_ring,ipmpsc,iceoryx2,shmem-ipc,zeromq-ipc",
    ),
    // More workloads of pelton.
    Part("lopsided --slow receiver --count 2000 --runs 3", "pelton,sock-stream,sock-seqpacket"),
    Part("lopsided --slow sender --count 2000 --runs 3", "pelton,sock-stream,sock-seqpacket"),
    Part(
        "fan-in --senders 8 --seconds 0.3 --runs 5",
        "pelton,pelton-stream,limits,limits-window,sock-stream:block,sock-seqpacket:block",
    ),
    Part("append --threads 2 --count 5000000 --runs 5", "pelton,limits,bump,mutex-vec,array-queue,seg-queue"),
    Part("call --size 64 --seconds 0.3 --runs 5", "pelton,limits,sock-stream"),
    Part(
        "call --size 64 --in-flight 1000 --wait block --seconds 0.3 --runs 5",
        "pelton,sock-stream,sock-stream-batched",
    ),
    Part("reattach --count 1000000 --runs 3", "pelton-path"),
    // Where the processes run.
    Part("stream --size 256 --wait block --placement apart --seconds 0.1 --runs 3", PLACED),
    Part("stream --size 256 --wait block --placement together --seconds 0.1 --runs 3", PLACED),
    Part("stream --size 256 --wait block --placement free --seconds 0.1 --runs 3", PLACED),
    Part("roundtrip --size 64 --wait block --placement apart --seconds 0.1 --runs 3", PLACED),
    Part("roundtrip --size 64 --wait block --placement together --seconds 0.1 --runs 3", PLACED),
    Part("roundtrip --size 64 --wait block --placement free --seconds 0.1 --runs 3", PLACED),
    Part("call --size 64 --wait block --placement apart --seconds 0.1 --runs 3", "pelton,sock-stream"),
    Part("call --size 64 --wait block --placement together --seconds 0.1 --runs 3", "pelton,sock-stream"),
    Part("call --size 64 --wait block --placement free --seconds 0.1 --runs 3", "pelton,sock-stream"),
];

/// The command line. A `+` before the systems adds them to the streaming ones.
fn command_words(part: &Part, short: bool) -> Vec<String> {
    let Part(command, systems) = part;
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

/// A command, as shown and as parsed.
fn planned(part: &Part, short: bool) -> Result<(String, Measurement)> {
    let command = command_words(part, short).join(" ");
    Ok((format!("./run bench {command}"), Measurement::parse(&command)?))
}

/// How long it takes, about: with `--seconds` the pass, its warm-up and its count of system calls, and some more runs
/// that find each system's number of messages; the other parts last two seconds on average. A Java virtual machine
/// starts slowly.
fn seconds(Measurement { plan, systems, .. }: &Measurement) -> f64 {
    let each = plan.seconds.map_or(2.0, |seconds| 0.2 + 2.0 * seconds);
    let slow = systems.iter().filter(|choice| choice.system.name == "aeron").count() as f64 * 2.0;
    let runs = plan.runs as f64 + if plan.seconds.is_some() { 1.0 } else { 0.0 };
    runs * (each * systems.len() as f64 + slow)
}

/// Measures them. 1 if nothing could be measured, 130 if interrupted.
pub fn measure(all: &Arguments) -> Result<ExitCode> {
    let default = (!all.short).then(|| {
        let date = results::date();
        let name = format!("{}-all.jsonl", date.split(' ').next().unwrap_or(&date));
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/results")).join(name)
    });
    let place = all.results.clone().or(default);
    let chosen = PARTS.iter().filter(|part| all.only.as_ref().is_none_or(|only| part.0.contains(only.as_str())));
    let plans = chosen.map(|part| planned(part, all.short)).collect::<Result<Vec<_>>>()?;
    anyhow::ensure!(
        !plans.is_empty(),
        "no command contains `{}`: without --only all of them are listed",
        all.only.as_deref().unwrap_or_default()
    );
    for (text, measurement) in plans.iter().filter(|_| !all.short) {
        let command = text.split(" --systems ").next().unwrap_or_default();
        eprintln!("{:4.0} s  {command}, {} systems", seconds(measurement), measurement.systems.len());
    }
    if !all.short {
        let minutes = plans.iter().map(|(_, measurement)| seconds(measurement)).sum::<f64>() / 60.0;
        eprintln!("{minutes:4.0} min in all, and the time to build the other libraries at their first use");
    }
    let bar = progress_bar(plans.iter().map(|(_, Measurement { plan, systems, .. })| plan.runs * systems.len()).sum())?;
    let (mut lines, mut interrupted) = (Vec::new(), false);
    let interrupts = Interrupts::new()?;
    let command = if all.short { "./run bench all --short" } else { "./run bench all" };
    for (text, Measurement { plan, systems, .. }) in &plans {
        let (report, ended) = run::measure(plan, systems, &interrupts, &bar)?;
        lines.extend(report.lines(text)?);
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

fn keep(all: &Arguments, place: Option<&Path>, command: &str, ended: bool, lines: &[serde_json::Value]) -> Result<()> {
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
        let mut all = 0.0;
        for part in PARTS {
            for short in [false, true] {
                let (_, measurement) = planned(part, short).unwrap();
                let job = &measurement.plan.job;
                for choice in &measurement.systems {
                    let found = choice.system.part(job.kind, &job.workload);
                    assert!(found.is_ok(), "{}: {choice}: {}", part.0, found.unwrap_err());
                }
                if !short {
                    all += seconds(&measurement);
                }
            }
        }
        // A twentieth remains for a slower machine.
        assert!(all < 20.0 * 60.0 * 0.95, "{all} s");
    }

    #[test]
    fn every_figure_of_the_pages_has_a_part() {
        let commands: Vec<String> = PARTS.iter().map(|part| pelton_bench::figures::key(part.0)).collect();
        for wanted in pelton_bench::figures::wanted() {
            assert!(commands.contains(&wanted), "no part measures `{wanted}`");
        }
    }
}
