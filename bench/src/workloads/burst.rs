//! Several messages there at a time, and one back when all have come: as a client that asks for a batch. The loops are
//! those of a round trip.

use anyhow::Result;
use clap::Args;

use crate::{
    parameters::Job,
    plan::{Common, Defaults, Options, Passes, Plan, THERE_AND_BACK},
    record::{LATENCY, RATES, Run, run_of_messages},
    run::reports,
    sides::Interrupts,
};

/// Several messages there at a time, and one back when all have come
///
/// Defaults: 64 bytes, lanes of 64 MiB, 20,000 bursts. The time is that of a burst.
#[derive(Args)]
pub struct Burst {
    /// Messages of a burst
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    burst: u64,
}

impl Options for Burst {
    const NAME: &str = "burst";

    fn plan(&self, common: &Common) -> Result<Plan> {
        let defaults =
            Defaults { systems: "pelton,pipe,sock-stream,sock-stream-batched,sock-seqpacket", ..THERE_AND_BACK };
        let mut plan = common.plan::<Self>(defaults, |_| 20_000)?;
        plan.job.options.insert(Self::NAME.to_string(), self.burst);
        plan.job.messages_each = self.burst as u32 + 1;
        Ok(Plan {
            passes: Passes::Timed,
            own: vec![(Self::NAME, self.burst.into())],
            figure: Some("round_trip_ns"),
            columns: vec![RATES, LATENCY],
            run,
            ..plan
        })
    }
}

fn run(job: &Job, interrupts: &Interrupts) -> Result<Run> {
    let (job, reports) = reports(job, interrupts)?;
    let mut run = run_of_messages(&job, &reports);
    let rate = run.figures.get("round_trip_ns").map(|ns| job.option(Burst::NAME) as f64 * 1e9 / ns);
    run.figures.set("messages_per_second", rate);
    Ok(run)
}
