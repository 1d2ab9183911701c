//! The demo: the main use on real input, checked and measured.
//!
//! One process streams a file line by line, another compresses the lines with zstd; the output must decompress to the
//! file. Then the same over a Unix socket, and for each transport the lines alone, without zstd, to measure the
//! transport. The transports take turns, in an order that rotates from round to round. Both processes are this program
//! (`stage`); this one starts and watches them (`run`) and compares them (`report`, `verdict`).

mod calls;
mod corpus;
mod input;
mod load;
mod output;
mod report;
mod run;
mod stage;
mod verdict;

use clap::Parser;
use input::Input;
use load::Load;
use output::OutputFile;
use pelton_cli::{
    failure::{self, Failure},
    signals::Signals,
};
use report::{Outcome, Report};
use run::{Job, Run, Runs};
use stage::{System, ZSTD_LEVEL};
use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};
use tempfile::{NamedTempFile, TempDir};

/// Rounds of the lines alone, of which each transport is first in a third. Nine ratios are the fewest whose interval
/// may leave out the lowest and the highest (`verdict`).
const ROUNDS_LINES: usize = 9;
/// Rounds with zstd, which take ten times as long. Six ratios are the fewest with an interval of 95 %.
const ROUNDS_ZSTD: usize = 6;
/// A file of fewer lines and fewer bytes takes a fast transport under 4 ms. Half a millisecond of that is the start of
/// two processes, and runs differ by a factor of two: such times say nothing about the transport.
const TIMED_LINES_MIN: u64 = 100_000;
const TIMED_BYTES_MIN: u64 = 16 << 20;

const EXIT_CODES: &str = "\
Exit codes:
    0  done
    1  the output differs from the input
    2  usage, or a file that cannot be streamed
    5  the system failed
  130  interrupted (SIGINT); 143: terminated (SIGTERM)";

/// Stream a file between two processes into zstd, check the output, and compare pelton with a Unix socket
#[derive(Parser)]
#[command(name = "pelton-demo", version, after_help = EXIT_CODES, max_term_width = 100)]
struct DemoArgs {
    /// The file to stream, line by line [default: 200 MiB of JSON lines, generated once into the cache directory]
    file: Option<PathBuf>,
    /// Keep the compressed lines here
    #[arg(long, value_name = "OUT")]
    output: Option<PathBuf>,
    /// The transports; the first is compared with each other, and OUT is its output
    #[arg(long, value_enum, value_delimiter = ',', default_value = "pelton,sock-stream,sock-stream-batched")]
    systems: Vec<System>,
    /// Report one JSON object
    #[arg(long)]
    json: bool,
    /// Be one of the two processes
    #[arg(long, value_name = "PLAN", hide = true)]
    stage: Option<String>,
}

fn main() -> ExitCode {
    let args = DemoArgs::parse();
    let done = match &args.stage {
        None => run(&args),
        Some(plan) => stage::run(plan),
    };
    failure::exit("pelton-demo", done)
}

fn run(args: &DemoArgs) -> Result<(), Failure> {
    let signals = Signals::install()?;
    let input = match &args.file {
        Some(path) => Input::open(path, &signals)?,
        None => input::default_input(&signals)?,
    };
    let directory = TempDir::with_prefix("pelton-demo-")
        .map_err(|error| Failure::system("cannot create a temporary directory", error))?;
    let mut output_file = args.output.as_deref().map(|path| OutputFile::create(path, &input)).transpose()?;

    let too_small_to_time = input.lines() < TIMED_LINES_MIN && input.bytes < TIMED_BYTES_MIN;
    let (rounds_lines, rounds_zstd) = if too_small_to_time { (1, 1) } else { (ROUNDS_LINES, ROUNDS_ZSTD) };
    let total = (rounds_lines + rounds_zstd + 1) * args.systems.len();
    let mut runs = Runs { input: &input, directory: &directory, signals: &signals, done: 0, total };
    let before = Load::now();
    let lines = rounds(&args.systems, rounds_lines, |system, _| {
        let run = runs.run(system, None, false)?;
        check_digest(&input, system, &run)?;
        Ok(run)
    })?;
    let mut output_bytes = 0;
    let zstd = rounds(&args.systems, rounds_zstd, |system, round| {
        let scratch = NamedTempFile::new_in(&directory)
            .map_err(|error| Failure::system("cannot create a temporary file", error))?;
        let kept = if system == args.systems[0] { output_file.take() } else { None };
        let output = kept.as_ref().map_or(scratch.path(), OutputFile::path);
        let run = runs.run(system, Some(output), false)?;
        if round == 0 {
            let size = output::verify(&input, output, system, &signals)?;
            if system == args.systems[0] {
                output_bytes = size;
            }
        }
        kept.map(OutputFile::rename).transpose()?;
        Ok(run)
    })?;
    let others_busy = before.zip(Load::now()).and_then(|(before, after)| after.of_others_since(&before));
    // The kernel counts in ticks of 10 ms.
    let others_busy = others_busy.filter(|_| !too_small_to_time);

    let mut results = Vec::new();
    for (&system, timed) in args.systems.iter().zip(&lines) {
        let system_calls = runs.run(system, None, true)?.system_calls;
        results.push(Outcome::of(system, Job::Lines, timed, system_calls, &input));
    }
    for (&system, timed) in args.systems.iter().zip(&zstd) {
        results.push(Outcome::of(system, Job::Zstd, timed, None, &input));
    }
    for of_job in results.chunks_mut(args.systems.len()) {
        let (first, others) = of_job.split_first_mut().expect("one transport at least");
        others.iter_mut().for_each(|other| other.compare(first));
    }

    let report = Report {
        command: "demo",
        file: input.path.to_string_lossy(),
        bytes: input.bytes,
        lines: input.lines(),
        longest_line_bytes: input.longest,
        zstd_level: ZSTD_LEVEL,
        output: args.output.as_deref().map(Path::to_string_lossy),
        output_bytes,
        verified: true,
        too_small_to_time,
        others_busy,
        results,
    };
    let text = if args.json { report.json() } else { report.table() };
    // Removed before the report is printed, so a reader of the report finds no directory.
    directory.close().map_err(|error| Failure::system("removing the temporary directory", error))?;
    pelton_cli::output::print(text)
}

/// Has each transport run once in each round, and a different one first from round to round. Returns the runs of each.
fn rounds(
    systems: &[System],
    count: usize,
    mut run: impl FnMut(System, usize) -> Result<Run, Failure>,
) -> Result<Vec<Vec<Run>>, Failure> {
    let mut runs: Vec<Vec<Run>> = systems.iter().map(|_| Vec::new()).collect();
    for round in 0..count {
        for turn in 0..systems.len() {
            let index = (round + turn) % systems.len();
            runs[index].push(run(systems[index], round)?);
        }
    }
    Ok(runs)
}

fn check_digest(input: &Input, system: System, run: &Run) -> Result<(), Failure> {
    if run.digest == input.digest.value() {
        return Ok(());
    }
    Err(Failure::Peer(format!("{}: the lines received are not the lines of the file", system.label())))
}
