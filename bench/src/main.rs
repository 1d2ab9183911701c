//! The benchmark of pelton: workloads that measure it beside the machine's limits and the operating system's own
//! channels.
//!
//! This file begins the program; the library beside it does the rest.

mod limits_search;
mod regress;
mod suite;

use std::{io::Write, process::ExitCode};

use anyhow::Result;
use clap::{ArgMatches, Command, FromArgMatches, Subcommand, error::ErrorKind};

use pelton_bench::{
    commands::{self, Measurement},
    figures, file, results,
    run::{self, progress_bar},
    side,
    sides::Interrupts,
    systems,
};

/// The commands that measure no workload, or several.
#[derive(Subcommand)]
enum Other {
    File(file::Arguments),
    All(suite::Arguments),
    Figures(figures::Arguments),
    Regress(regress::Arguments),
    LimitsSearch(limits_search::Arguments),
    /// Lists the systems, and the workloads in which each has a part
    Systems,
}

fn command() -> Command {
    Other::augment_subcommands(commands::command())
        .version(env!("CARGO_PKG_VERSION"))
        .about("Measures pelton beside the machine's limits, pipes, sockets and other libraries")
        .long_about(
            "Measures pelton beside the machine's limits, pipes, sockets and other libraries\n\n\
             Each run starts fresh processes on the first two CPUs, and the systems take turns. Figures are medians over \
             the runs; ratios are of the first system to each other, run by run. A speedup above 1 means that the first \
             one is faster.",
        )
}

fn main() -> ExitCode {
    if let Some(ended) = side::run_if_side(systems::side) {
        return ended;
    }
    let matches = command().get_matches();
    let done = match Measurement::of(&matches) {
        None => other(&matches),
        Some(Ok(measurement)) => measure(&measurement),
        Some(Err(error)) => command().error(ErrorKind::ValueValidation, format!("{error:#}")).exit(),
    };
    done.unwrap_or_else(|error| {
        eprintln!("pelton-bench: {error:#}");
        // Of `regress`, 1 says that a path is slower.
        ExitCode::from(if matches.subcommand_name() == Some("regress") { 2 } else { 1 })
    })
}

fn other(matches: &ArgMatches) -> Result<ExitCode> {
    match Other::from_arg_matches(matches)? {
        Other::File(arguments) => file::measure(&arguments)?,
        Other::All(arguments) => return suite::measure(&arguments),
        Other::Figures(arguments) => figures::write_all(&arguments)?,
        Other::Regress(arguments) => return regress::compare(&arguments),
        Other::LimitsSearch(arguments) => limits_search::search(&arguments)?,
        Other::Systems => list()?,
    }
    Ok(ExitCode::SUCCESS)
}

fn list() -> Result<()> {
    let mut out = std::io::stdout().lock();
    for system in systems::all() {
        writeln!(out, "{}\n    {}\n    {}", system.name, system.about, system.elsewhere())?;
    }
    Ok(())
}

/// 0 when something was measured, 1 when nothing could be, 130 when interrupted. Bad arguments are 2, by clap.
fn measure(Measurement { plan, systems, output }: &Measurement) -> Result<ExitCode> {
    let bar = progress_bar(plan.runs * systems.len())?;
    let (report, interrupted) = run::measure(plan, systems, &Interrupts::new()?, &bar)?;
    bar.finish_and_clear();
    let command = std::iter::once("./run bench".to_string()).chain(std::env::args().skip(1));
    let command = command.collect::<Vec<_>>().join(" ");
    let mut lines = vec![results::machine(&command, interrupted)];
    lines.extend(report.lines(&command)?);
    if let Some(place) = &output.results {
        results::write(place, &lines)?;
    }
    if let Some(place) = &output.report {
        results::write_page(place, &lines)?;
    }
    let mut out = std::io::stdout().lock();
    if output.json {
        lines[1..].iter().try_for_each(|line| writeln!(out, "{line}"))?;
    } else {
        report.write_table(&mut out)?;
    }
    out.flush()?;
    if interrupted {
        eprintln!("pelton-bench: interrupted; the runs that were finished are above");
        return Ok(ExitCode::from(130));
    }
    let measured = report.systems.iter().any(|system| !system.runs.is_empty());
    Ok(if measured { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[cfg(test)]
mod tests {
    use pelton_bench::{parameters::Wait, plan::Plan};

    use super::*;

    fn parsed(words: &str) -> Result<Measurement> {
        let matches = command().try_get_matches_from(std::iter::once("pelton-bench").chain(words.split(' ')));
        Measurement::of(&matches?).unwrap()
    }

    fn plan(words: &str) -> (Plan, usize) {
        let Measurement { plan, systems, .. } = parsed(words).unwrap_or_else(|error| panic!("{words}: {error}"));
        (plan, systems.len())
    }

    #[test]
    fn the_command_line_is_sound() {
        command().debug_assert();
    }

    #[test]
    fn defaults_follow_the_workload() {
        for (words, size, count, wait, systems) in [
            ("stream", 256, 5_000_000, Wait::Spin, 6),
            ("roundtrip --delay 20", 64, 20_000, Wait::Block, 6),
            ("idle", 64, 1, Wait::Block, 4),
            ("roundtrip --rate 100", 64, 500, Wait::Block, 3),
            ("threads", 64, 10_000_000, Wait::Spin, 7),
            ("fan-in --senders 10 --idle 990", 256, 5_000_000, Wait::Spin, 6),
            ("call", 64, 200_000, Wait::Spin, 3),
            ("call --in-flight 1000 --size 5000000", 5_000_000, 50_000, Wait::Spin, 3),
            ("call --rate 1", 64, 5, Wait::Block, 2),
            ("append", 16, 25_600_000, Wait::Block, 6),
            ("append --file /", 256, 1_000_000, Wait::Block, 2),
            ("stream --placement together", 256, 5_000_000, Wait::Block, 6),
        ] {
            let (plan, number) = plan(words);
            assert_eq!((plan.job.sizes.max, plan.count, plan.wait, number), (size, count, wait, systems), "{words}");
        }
        assert_eq!(plan("kill").0.job.capacity, 1 << 20);
        assert_eq!(plan("call").0.job.capacity, 4 << 20);
        assert_eq!(plan("append").0.job.threads, 2);
    }

    #[test]
    fn bad_arguments_say_what_was_found_and_what_to_do() {
        for (words, wanted) in [
            ("gallop", "gallop"),
            ("stream --size 5..1", "write 1..5"),
            ("stream --size 1..1000000 --capacity 65536", "write --capacity 2097152"),
            ("stream --systems pelton,carrier", "`carrier`, wanted one of pelton"),
            ("stream --systems pipe,pipe", "`pipe` twice"),
            ("stream --delay 20", "--delay"),
            ("lopsided --work 0", "1..=1000000"),
            ("stream --count 0", "--count 0"),
            ("stream --runs 0", "--runs 0"),
            ("append --seconds 1", "found --seconds with append"),
            ("roundtrip --rate 5 --seconds 1", "at a rate"),
            ("stream --seconds 0", "wanted 0.001 to 600"),
            ("idle --count 5", "leave them out"),
            ("fan-in --senders 0", "found --senders 0"),
            ("fan-in --senders 10 --idle 1015", "wanted 1 to 1024 together"),
            ("fan-in --size 4", "wanted 8 or more"),
            ("fan-in --senders 8 --count 7", "wanted at least one for each"),
            ("append --file /dev/null", "found --file /dev/null, wanted a directory"),
            ("memory --size 1..2", "wanted one size"),
            ("call --in-flight 1025", "1..=1024"),
            ("call --clients 2 --size 7", "wanted 8 or more"),
            ("call --clients 5 --count 4", "at least one for each"),
            ("call --in-flight 2 --delay 20", "leave out --clients and --in-flight"),
            ("call --rate 5 --beside-flood", "cannot be used with"),
            ("append --size 1..16", "wanted one size"),
            ("append --count 5000000000", "32 bits"),
        ] {
            let error = parsed(words).err().unwrap_or_else(|| panic!("{words} is taken")).to_string();
            assert!(error.contains(wanted), "{words}: {error}");
        }
    }
}
