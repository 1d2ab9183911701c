//! `pelton record`: as `pelton flush` into a record file, with the time at which each message arrived, for
//! `pelton replay`.

use crate::{
    channel::ReceiveArgs,
    commands::flush::{WriteArgs, flush_channel},
    failure::Failure,
};
use clap::Args;
use std::path::PathBuf;

/// Options of `pelton record`.
#[derive(Args)]
pub struct RecordArgs {
    #[command(flatten)]
    receive: ReceiveArgs,
    /// The record file, which is created or appended to; `pelton replay FILE NAME` sends it, `pelton cat` prints it
    file: PathBuf,
    #[command(flatten)]
    writes: WriteArgs,
}

/// Runs `pelton record`.
pub fn run(args: &RecordArgs) -> Result<(), Failure> {
    flush_channel("record", &args.receive, &args.writes, true, || args.writes.open(&args.file))
}
