//! `./run bench call-table`: the speedup of calls over a stream socket, by size and by number of calls in flight.
//!
//! Every cell is also a command: `call --size … --in-flight …`.

use std::{
    io::{Write, stdout},
    process::ExitCode,
};

use anyhow::{Context, Result};
use clap::Parser;

use pelton_bench::{
    commands::Measurement,
    parameters::{Placement, Wait, word},
    run::{self, Progress},
    sides::Interrupts,
    statistics::paired_ratio,
};

/// Prints the speedup of calls over those by a stream socket: median, minimum and maximum of interleaved runs
#[derive(Parser, Debug)]
#[command(name = "pelton-bench call-table", max_term_width = 120)]
struct Table {
    /// Bytes of a request, and of its reply
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [0, 64, 4096, 65_536, 1 << 20])]
    sizes: Vec<u64>,

    /// Calls in flight at a time
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [1, 10, 100, 1000])]
    in_flight: Vec<u64>,

    /// Where both processes run
    #[arg(long, value_enum, default_value_t = Placement::Apart)]
    placement: Placement,

    /// How both processes wait
    #[arg(long, default_value = "block")]
    wait: Wait,

    /// Runs of each cell
    #[arg(long, value_name = "N", default_value_t = 3)]
    runs: usize,
}

/// Runs the command line after `call-table`.
pub fn main(arguments: impl Iterator<Item = String>) -> ExitCode {
    let table = Table::parse_from(std::iter::once("pelton-bench call-table".to_string()).chain(arguments));
    print(&table).map_or_else(
        |error| {
            eprintln!("pelton-bench: {error:#}");
            ExitCode::FAILURE
        },
        |()| ExitCode::SUCCESS,
    )
}

/// So many take the socket some 50 ms, at 5 µs a call and 4 GB/s; but the calls use each slot more than once.
fn count(size: u64, in_flight: u64) -> u64 {
    (50_000_000 / (5_000 + size / 2)).max(2 * in_flight)
}

fn print(table: &Table) -> Result<()> {
    let interrupts = Interrupts::new()?;
    let mut out = stdout().lock();
    write!(out, "{:>9}", "bytes")?;
    for in_flight in &table.in_flight {
        write!(out, "{:>26}", format!("{in_flight} in flight"))?;
    }
    writeln!(out)?;
    for size in &table.sizes {
        write!(out, "{size:>9}")?;
        for in_flight in &table.in_flight {
            write!(out, "{:>26}", cell(table, *size, *in_flight, &interrupts)?)?;
            out.flush()?;
        }
        writeln!(out)?;
    }
    Ok(())
}

fn cell(table: &Table, size: u64, in_flight: u64, interrupts: &Interrupts) -> Result<String> {
    let (count, runs, wait) = (count(size, in_flight), table.runs, word(table.wait));
    let command = format!(
        "call --size {size} --in-flight {in_flight} --count {count} --runs {runs} --wait {wait} --systems pelton,sock-stream --placement {}",
        word(table.placement)
    );
    let Measurement { plan, systems, .. } = Measurement::parse(&command)?;
    let progress = Progress::of(plan.runs * systems.len())?;
    let (report, interrupted) = run::measure(&plan, &systems, interrupts, &progress)?;
    progress.bar.finish_and_clear();
    anyhow::ensure!(!interrupted, "interrupted");
    let [pelton, socket] = [0, 1]
        .map(|at| report.systems[at].runs.iter().map(|run| run.figures.get("calls_per_second")).collect::<Vec<_>>());
    let ratio = paired_ratio(&pelton, &socket).with_context(|| format!("{command}: nothing was measured"))?;
    Ok(format!("{:.2} ({:.2} to {:.2})", ratio.median, ratio.min, ratio.max))
}
