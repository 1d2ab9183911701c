//! `pelton rm`: removes a channel in a directory, or a durable subscription of a broadcast there.

use crate::{channel::directory, failure::Failure};
use clap::Args;

/// Options of `pelton rm`.
#[derive(Args)]
pub struct RmArgs {
    /// The channel's directory, DIR or path:DIR
    directory: String,
    /// Remove only the durable subscription of this name: see `pelton sub --durable`
    #[arg(long, value_name = "NAME")]
    durable: Option<String>,
}

/// Runs `pelton rm`.
pub fn run(args: &RmArgs) -> Result<(), Failure> {
    let directory = directory(&args.directory);
    let Some(name) = &args.durable else { return Ok(pelton::inspect::remove(directory)?) };
    match pelton::inspect::remove_durable(directory, name)? {
        true => Ok(()),
        false => Err(Failure::Input(format!(
            "{} has no durable subscription {name:?}: `pelton info {0}` lists them",
            directory.display()
        ))),
    }
}
