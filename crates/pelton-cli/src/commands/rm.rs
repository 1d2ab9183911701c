//! `pelton rm`: removes a channel in a directory.

use crate::{channel::directory, failure::Failure};
use clap::Args;

/// Options of `pelton rm`.
#[derive(Args)]
pub struct RmArgs {
    /// The channel's directory, DIR or path:DIR
    directory: String,
}

/// Runs `pelton rm`.
pub fn run(args: &RmArgs) -> Result<(), Failure> {
    Ok(pelton::inspect::remove(directory(&args.directory))?)
}
