//! Several messages there at a time, and one back when all have come: as a client that asks for a batch.

use anyhow::{Result, bail, ensure};
use clap::Args;

use super::stream::{receive, send};
use crate::{
    endpoints::{Receiving, Sending, Transport},
    measure::now_ns,
    parameters::{Job, Kind, Role, SizeRange, SizeSequence},
    payload::{Payloads, WARM_UP, expected, glance, number, whole},
    plan::{Common, Defaults, Options, Passes, Plan, Setting},
    record::{LATENCY, RATES, Run, run_of_messages},
    run::reports,
    side::{Percentiles, Section, histogram, passes},
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

    fn plan(&self, common: &Common) -> Result<Plan, String> {
        let defaults = Defaults {
            workload: Self::NAME,
            kind: Kind::Processes,
            roles: &[Role::Asker, Role::Answerer],
            size: 64,
            capacity: 64 << 20,
            sleeps: false,
            systems: "pelton,pipe,sock-stream,sock-stream-batched,sock-seqpacket",
        };
        let mut plan = common.plan(&defaults, |_| 20_000)?;
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

fn run(job: &Job, setting: &Setting<'_>) -> Result<Run> {
    let (job, reports) = reports(job, setting)?;
    let mut run = run_of_messages(&job, &reports);
    let rate = run.figures.get("round_trip_ns").map(|ns| job.option(Burst::NAME) as f64 * 1e9 / ns);
    run.figures.set("messages_per_second", rate);
    Ok(run)
}

/// One side's part. The numbers of the messages go on from burst to burst, and from pass to pass.
pub fn part<T: Transport>(job: &Job) -> Result<()> {
    let burst = job.option(Burst::NAME);
    let (mut sending, mut receiving) = T::both(job)?;
    let mut next = 0;
    match job.role {
        Role::Asker => {
            let mut payloads = Payloads::new(job.sizes.max as usize);
            // Sends a burst, and waits for the answer, which is its last message.
            let mut ask = |sizes: &mut SizeSequence, check: fn(&[u8]) -> bool| -> Result<u64> {
                let (mut bytes, mut last) = (0, 0);
                for n in next..next + burst {
                    last = sizes.next_size();
                    send(&mut sending, &mut payloads, last, n)?;
                    bytes += last as u64;
                }
                sending.flush()?;
                next += burst;
                let came = receive(&mut receiving, next - 1, check)?;
                ensure!(came == last, "the answer has {came} bytes, wanted {last}");
                Ok(bytes)
            };
            let mut largest = SizeRange::fixed(job.sizes.max).sequence();
            (0..WARM_UP).try_for_each(|_| ask(&mut largest, whole).map(|_| ()))?;
            let mut histogram = histogram()?;
            passes(job, |pass| {
                histogram.reset();
                let (mut sizes, mut bytes) = (job.sizes.sequence(), 0);
                let section = Section::start(pass)?;
                for _ in 0..pass.count {
                    let start_ns = if pass.time_each { now_ns() } else { 0 };
                    bytes += ask(&mut sizes, glance)?;
                    if pass.time_each {
                        histogram.saturating_record(now_ns() - start_ns);
                    }
                }
                let mut report = section.end(bytes)?;
                report.percentiles = pass.time_each.then(|| Percentiles::of(&histogram));
                Ok(report)
            })
        }
        Role::Answerer => {
            let mut answer = |check: fn(&[u8]) -> bool, is_last: bool| -> Result<u64> {
                let (mut bytes, last) = (0, next + burst - 1);
                for n in next..last {
                    bytes += receive(&mut receiving, n, check)? as u64;
                }
                next += burst;
                let (size, right) = receiving.receive(|message| {
                    let right = number(message) == expected(last, message.len()) && check(message);
                    sending.send(message)?;
                    sending.flush()?;
                    anyhow::Ok((message.len(), right))
                })??;
                ensure!(right, "message {last} did not come as it was sent");
                // No receive follows that would send what the flush left.
                if is_last {
                    sending.settle()?;
                }
                Ok(bytes + size as u64)
            };
            (1..=WARM_UP).try_for_each(|n| answer(whole, n == WARM_UP).map(|_| ()))?;
            passes(job, |pass| {
                let section = Section::start(pass)?;
                let bytes = (1..=pass.count).map(|n| answer(glance, n == pass.count)).sum::<Result<u64>>()?;
                section.end(bytes)
            })
        }
        role => bail!("the {} has no part in this", role.name()),
    }
}
