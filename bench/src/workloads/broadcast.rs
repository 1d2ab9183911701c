//! One process sends to many, each of which receives every message.
//!
//! The loops are those of a stream, of one sender and several receivers. At a rate, the sender reports when each
//! message was due, and each receiver when it came: the difference is that receiver's latency.

use std::collections::BTreeMap;

use anyhow::{Result, bail, ensure};
use clap::Args;

use super::stream;
use crate::{
    endpoints::{Sending, THERE, Transport},
    parameters::{Job, Kind, Placement, Role, word},
    payload::{Payloads, WARM_UP, glance, whole},
    plan::{Common, Defaults, ONE_WAY, Options, Passes, Plan},
    record::{Column, Figures, Run, SideFigures, set_percentiles},
    run::reports,
    side::{PassReport, Percentiles, Schedule, Section, histogram, passes},
    sides::Interrupts,
};

/// Messages of one process, each of which many others receive
///
/// Defaults: as a stream's. Systems that can read messages in place do so. With several receivers nothing is pinned,
/// unless by --placement together, and both sides block.
#[derive(Args)]
pub struct Broadcast {
    /// Processes that receive each message
    #[arg(long, value_name = "N", default_value_t = 2)]
    receivers: u32,

    /// Additional subscribers that may be passed, in one process; only pelton has such. `pelton-alone` has none
    #[arg(long, value_name = "K", default_value_t = 0)]
    lagging: u32,

    /// Each of those sleeps so many microseconds after each message; at 0 it receives as fast as it can
    #[arg(long, value_name = "US", default_value_t = 0, requires = "lagging")]
    lag_delay: u64,

    /// So many messages are due in a second: how late each receiver has them, from the due time on
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rate: Option<u32>,
}

/// The rate counts each message once for each receiver.
const RATES: &[Column] = &[
    ("messages_per_second", "M delivered/s", 1e-6),
    ("sender_ns", "sender CPU ns", 1.0),
    ("sender_calls_per_message", "sender calls", 1.0),
];
const LATENCY: &[Column] = &[
    ("p50_ns", "p50 ns", 1.0),
    ("p99_ns", "p99 ns", 1.0),
    ("fastest_p50_ns", "of the fastest", 1.0),
    ("slowest_p50_ns", "of the slowest", 1.0),
    ("sender_calls_per_message", "sender calls", 1.0),
];

impl Options for Broadcast {
    const NAME: &str = "broadcast";

    fn plan(&self, common: &Common) -> Result<Plan> {
        let Broadcast { receivers, lagging, lag_delay, rate } = *self;
        ensure!(
            receivers > 0 && u64::from(receivers) + u64::from(lagging) <= 64,
            "found --receivers {receivers} --lagging {lagging}, wanted 1 to 64 together, one that is not passed"
        );
        if rate.is_some() {
            common.no_seconds("a rate")?;
        }
        let defaults = Defaults {
            kind: Kind::Broadcast,
            sleeps: receivers + lagging > 1 || rate.is_some(),
            systems: if lagging > 0 { "pelton,pelton-alone" } else { "pelton,pelton-copies,sock-dgram" },
            ..ONE_WAY
        };
        let mut plan = common.plan::<Self>(defaults, |sizes| match rate {
            Some(rate) => u64::from(rate).min(2000),
            None => stream::count(sizes) / 5,
        })?;
        (plan.job.receivers, plan.job.idle, plan.job.calls.rate) = (receivers, lagging, rate);
        plan.job.messages_each = receivers;
        plan.job.delay_us = lag_delay;
        if receivers + lagging > 1 && plan.placement == Some(Placement::Apart) {
            plan.placement = Some(Placement::Free);
        }
        Ok(Plan {
            own: vec![("receivers", receivers.into()), ("lagging", lagging.into()), ("rate", rate.into())],
            figure: Some(if rate.is_some() { "p50_ns" } else { "messages_per_second" }),
            columns: vec![if rate.is_some() { LATENCY } else { RATES }],
            passes: if rate.is_some() { Passes::Timed } else { Passes::Warmed },
            run,
            ..plan
        })
    }
}

/// One side's part.
pub fn part<T: Transport>(job: &Job) -> Result<()> {
    if job.calls.rate.is_none() && job.role != Role::Idler {
        return stream::part::<T>(job);
    }
    let size = job.sizes.max as usize;
    match job.role {
        Role::Sender => {
            let (mut payloads, mut sending) = (Payloads::new(size), T::sending(job, THERE)?);
            for n in 0..WARM_UP {
                stream::send(&mut sending, &mut payloads, size, n)?;
            }
            sending.flush()?;
            passes(job, |pass| {
                payloads.begin(0);
                let mut times_ns = Vec::with_capacity(pass.count as usize);
                let section = Section::start(pass)?;
                let mut schedule = Schedule::of(job).expect("there is a rate");
                for n in 0..pass.count {
                    times_ns.push(schedule.wait_for(n));
                    stream::send(&mut sending, &mut payloads, size, n)?;
                    sending.flush()?;
                }
                let mut report = section.end(pass.count * size as u64)?;
                schedule.leave_out(&mut report);
                Ok(PassReport { times_ns, ..report })
            })
        }
        Role::Receiver => {
            let mut receiving = T::receiving(job, THERE)?;
            for n in 0..WARM_UP {
                stream::receive(&mut receiving, n, whole)?;
            }
            passes(job, |pass| {
                let (mut bytes, mut times_ns) = (0, Vec::with_capacity(pass.count as usize));
                let section = Section::start(pass)?;
                for n in 0..pass.count {
                    bytes += stream::receive(&mut receiving, n, glance)? as u64;
                    times_ns.push(crate::measure::now_ns());
                }
                Ok(PassReport { times_ns, ..section.end(bytes)? })
            })
        }
        role => bail!("the {} has no part in this", word(role)),
    }
}

fn run(job: &Job, interrupts: &Interrupts) -> Result<Run> {
    let (job, reports) = reports(job, interrupts)?;
    figures(&job, &reports)
}

/// The figures of a run: for each pass the reports of the receivers, and that of the sender.
fn figures(job: &Job, reports: &[Vec<PassReport>]) -> Result<Run> {
    let split = |pass: usize| reports[pass].split_last().expect("a run has a sender");
    let (sender, receivers) = split(0);
    let count = job.passes[0].count as f64;
    let end_ns = receivers.iter().map(|receiver| receiver.end_ns).max().unwrap_or_default();
    let seconds = end_ns.saturating_sub(sender.start_ns) as f64 * 1e-9;
    let rate = |amount: f64| (job.calls.rate.is_none() && seconds > 0.0).then(|| amount / seconds);
    let bytes: u64 = receivers.iter().map(|receiver| receiver.bytes).sum();
    let counted = job.passes.iter().position(|pass| pass.count_calls);
    let calls = |report: &PassReport| Some(report.calls? as f64 / job.passes[counted?].count as f64);
    let mut figures = Figures::from([
        ("seconds", Some(seconds)),
        ("messages_per_second", rate(count * receivers.len() as f64)),
        ("bytes_per_second", rate(bytes as f64)),
        ("sender_ns", Some(sender.usage.cpu_seconds * 1e9 / count)),
        ("sender_calls_per_message", counted.and_then(|pass| calls(split(pass).0))),
        ("cpu_seconds", Some(reports[0].iter().map(|report| report.usage.cpu_seconds).sum())),
    ]);
    let mut latency = Vec::new();
    if job.calls.rate.is_some() {
        let mut all = histogram()?;
        let mut medians = Vec::new();
        for receiver in receivers {
            let mut own = histogram()?;
            for (came, due) in receiver.times_ns.iter().zip(&sender.times_ns) {
                own.saturating_record(came.saturating_sub(*due));
            }
            medians.push(own.value_at_quantile(0.5) as f64);
            all.add(&own)?;
        }
        let percentiles = Percentiles::of(&all);
        set_percentiles(&mut figures, |name| percentiles.get(name));
        figures.set("fastest_p50_ns", medians.iter().copied().reduce(f64::min));
        figures.set("slowest_p50_ns", medians.iter().copied().reduce(f64::max));
        latency = percentiles.ladder;
    }
    let side = |report: &PassReport, at: usize| SideFigures {
        usage: report.usage,
        syscalls_per_message: counted.and_then(|pass| calls(&reports[pass][at])),
        sleeps_per_wait: job.calls.rate.map(|_| report.usage.voluntary_switches as f64 / count),
    };
    let name = |at: usize| match receivers.len() {
        all if at == all => word(Role::Sender),
        1 => word(Role::Receiver),
        _ => format!("{}-{at}", word(Role::Receiver)),
    };
    let sides = reports[0].iter().enumerate().map(|(at, report)| (name(at), side(report, at))).collect();
    Ok(Run { figures, sides, latency, deaths: BTreeMap::new() })
}
