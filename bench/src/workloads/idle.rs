//! An open channel whose receiver waits and receives nothing for two seconds; then one message, as a check that it
//! lives. The loops are those of a stream.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::Args;

use crate::{
    parameters::Job,
    plan::{Common, Defaults, ONE_WAY, Options, Passes, Plan},
    record::{Column, Run},
    run::deadline,
    side::PassReport,
    sides::{Interrupts, Sides},
};

/// An open channel whose receiver waits and receives nothing
#[derive(Args)]
pub struct Idle {}

const COLUMNS: &[Column] = &[("wakeups_per_second", "wake-ups/s", 1.0)];
/// How long the program observes the channel.
const WINDOW: Duration = Duration::from_secs(2);
/// How long the channel is idle before that, so that the receiver falls asleep.
const BEFORE: Duration = Duration::from_millis(200);

impl Options for Idle {
    const NAME: &str = "idle";

    fn plan(&self, common: &Common) -> Result<Plan> {
        common.no_seconds(Self::NAME)?;
        ensure!(
            common.size.is_none() && common.count.is_none(),
            "found --size or --count with idle, which sends nothing: leave them out"
        );
        let defaults = Defaults { size: 64, sleeps: true, systems: "pelton,pelton-path,pipe,sock-stream", ..ONE_WAY };
        let plan = common.plan::<Self>(defaults, |_| 1)?;
        Ok(Plan { passes: Passes::One, columns: vec![COLUMNS], run, ..plan })
    }
}

fn run(job: &Job, interrupts: &Interrupts) -> Result<Run> {
    let mut sides = Sides::new(interrupts, deadline(job));
    let (receiver, sender) = (0, 1);
    sides.start_both(job)?;
    sides.order_start(receiver)?;
    sides.expect_silence(BEFORE)?;
    let (before, start) = (sides.usages()?, Instant::now());
    sides.expect_silence(WINDOW)?;
    let (after, seconds) = (sides.usages()?, start.elapsed().as_secs_f64());
    sides.order_go(sender)?;
    let report: PassReport = sides.report(receiver)?;
    sides.report::<PassReport>(sender)?;
    sides.end()?;
    let used = [after[0].since(before[0]), after[1].since(before[1])];
    let switches: u64 = used.iter().map(|usage| usage.voluntary_switches + usage.involuntary_switches).sum();
    let figures = [
        ("seconds", Some(seconds)),
        ("cpu_seconds", Some(used[0].cpu_seconds + used[1].cpu_seconds)),
        ("wakeups_per_second", Some(switches as f64 / seconds)),
        ("resident_bytes", report.resident_bytes.map(|bytes| bytes as f64)),
    ];
    Ok(Run::of(job, figures, used))
}
