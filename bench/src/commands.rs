//! The command line of a measurement: a subcommand for each workload.

use std::sync::LazyLock;

use anyhow::{Context, Result};
use clap::{ArgMatches, Command};

use crate::{
    plan::{Choice, Output, Plan},
    systems,
    workloads::WORKLOADS,
};

/// What a command line requests.
pub struct Measurement {
    /// The workload and its options
    pub plan: Plan,
    /// The systems, in turn
    pub systems: Vec<Choice>,
    /// Where the results go
    pub output: Output,
}

impl Measurement {
    /// Reads the subcommand; None if it is no workload.
    pub fn of(matches: &ArgMatches) -> Option<Result<Measurement>> {
        let (name, matches) = matches.subcommand()?;
        let workload = WORKLOADS.iter().find(|workload| workload.name == name)?;
        Some((workload.plan)(matches).and_then(|(plan, output)| {
            let systems = systems::choices(&plan.systems)?;
            Ok(Measurement { plan, systems, output })
        }))
    }

    /// Reads a command without the program's name, as a shell would without quotes.
    pub fn parse(words: &str) -> Result<Measurement> {
        static COMMAND: LazyLock<Command> = LazyLock::new(command);
        let matches = COMMAND.clone().try_get_matches_from(std::iter::once("pelton-bench").chain(words.split(' ')))?;
        Measurement::of(&matches)
            .with_context(|| format!("`{words}` is no workload"))?
            .with_context(|| words.to_string())
    }
}

/// All workloads as subcommands.
pub fn command() -> Command {
    let workloads = WORKLOADS.iter().map(|workload| (workload.command)(Command::new(workload.name)));
    Command::new("pelton-bench").max_term_width(120).subcommand_required(true).subcommands(workloads)
}
