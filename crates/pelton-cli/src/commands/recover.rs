//! `pelton recover`: checks a channel in a directory, and repairs it.

use crate::{
    channel::directory,
    failure::Failure,
    output::{json, print},
};
use clap::Args;
use pelton::inspect::{self, RecoveredLane};

/// Options of `pelton recover`.
#[derive(Args)]
pub struct RecoverArgs {
    /// The channel's directory, DIR or path:DIR
    directory: String,
    /// Repair it; without this option, check it and change nothing
    #[arg(long)]
    repair: bool,
    /// After a reboot: keep also intact messages that were never synced to disk
    #[arg(long)]
    keep_unsynced: bool,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Runs `pelton recover`.
pub fn run(args: &RecoverArgs) -> Result<(), Failure> {
    let path = directory(&args.directory);
    let lanes = match args.repair {
        true => inspect::recover(path, args.keep_unsynced)?,
        false => inspect::check(path, args.keep_unsynced)?,
    };
    let is_whole = lanes.iter().all(RecoveredLane::is_whole);
    if args.json {
        print(json(&recovery(args.repair, &lanes)))?;
    } else {
        let (kept, dropped) = if args.repair { ("kept", "dropped") } else { ("whole", "cannot be kept") };
        for lane in &lanes {
            let problem = lane.problem.as_ref().map(|problem| format!(": {problem}")).unwrap_or_default();
            print(format!(
                "lane {}: {} messages {kept}, {} {dropped}{problem}\n",
                lane.number, lane.kept, lane.dropped
            ))?;
        }
    }
    if is_whole || args.repair {
        return Ok(());
    }
    Err(Failure::System(format!(
        "{} is damaged: `pelton recover --repair {}` repairs it",
        path.display(),
        args.directory
    )))
}

fn recovery(repaired: bool, lanes: &[RecoveredLane]) -> serde_json::Value {
    let each = lanes.iter().map(|lane| {
        let (number, kept, dropped, problem) = (lane.number, lane.kept, lane.dropped, &lane.problem);
        serde_json::json!({ "number": number, "kept": kept, "dropped": dropped, "problem": problem })
    });
    serde_json::json!({ "repaired": repaired, "lanes": each.collect::<Vec<_>>() })
}
