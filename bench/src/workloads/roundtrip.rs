//! One message there and back at a time, as fast as they go or at a rate.

use anyhow::{Result, bail, ensure};
use clap::Args;

use super::{
    burst::Burst,
    stream::{receive, send},
};
use crate::{
    endpoints::{Receiving, Sending, Transport},
    measure::{delay, now_ns},
    parameters::{Job, Role, SizeRange, SizeSequence, word},
    payload::{Payloads, WARM_UP, expected, glance, number, whole},
    plan::{Common, Defaults, Options, Passes, Plan, THERE_AND_BACK},
    record::LATENCY,
    run::exchange,
    side::{Percentiles, Schedule, Section, histogram, passes},
};

/// One message there and back at a time
///
/// Defaults: 64 bytes, lanes of 64 MiB, 200,000 rounds; 20,000 with a delay; with --rate as many as are due in five
/// seconds.
#[derive(Args)]
pub struct Roundtrip {
    #[command(flatten)]
    pace: Pace,
}

/// How calls and round trips follow each other.
#[derive(Args, Clone, Debug, Default)]
pub struct Pace {
    /// Each side delays each message by so many microseconds, so that the other side sleeps; the result is without the
    /// delays
    #[arg(long, value_name = "US", default_value_t = 0)]
    pub delay: u64,

    /// How many are due in a second [default: unlimited]
    ///
    /// The time of each counts from its due time, however late the answer before it was.
    #[arg(long, value_name = "PER_SECOND", conflicts_with = "delay")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub rate: Option<u32>,
}

impl Pace {
    /// Whether the sides rest between two messages.
    pub fn rests(&self) -> bool {
        self.delay > 0 || self.rate.is_some()
    }

    /// Checks them, also against `--seconds`.
    pub fn check(&self, common: &Common) -> Result<()> {
        // An hour: beyond it a sum of delays could overflow.
        ensure!(self.delay <= 3_600_000_000, "found --delay {}, wanted at most 3600000000 microseconds", self.delay);
        if self.rate.is_some() { common.no_seconds("messages at a rate") } else { Ok(()) }
    }

    /// The default number of rounds, if there are that many without rests.
    pub fn count(&self, most: u64) -> u64 {
        match self.rate {
            Some(rate) => 5 * u64::from(rate),
            None if self.delay > 0 => 20_000,
            None => most,
        }
    }
}

impl Options for Roundtrip {
    const NAME: &str = "roundtrip";

    fn plan(&self, common: &Common) -> Result<Plan> {
        self.pace.check(common)?;
        let defaults = Defaults {
            sleeps: self.pace.rests(),
            systems: match self.pace.rate {
                Some(_) => "pelton,sock-stream,sock-seqpacket",
                None => "pelton,limits,pipe,sock-stream,sock-stream-batched,sock-seqpacket",
            },
            ..THERE_AND_BACK
        };
        let mut plan = common.plan::<Self>(defaults, |_| self.pace.count(200_000))?;
        plan.job.delay_us = self.pace.delay;
        plan.job.calls.rate = self.pace.rate;
        plan.job.messages_each = 2;
        Ok(Plan {
            passes: Passes::Timed,
            own: vec![("rate", self.pace.rate.into())],
            figure: Some("round_trip_ns"),
            columns: vec![LATENCY],
            run: exchange,
            ..plan
        })
    }
}

/// One side's part. A round is a burst of messages there, and the last of them back. `ONE`: a burst of one, which the
/// compiler then knows, so that a round has no loop over its messages.
pub fn part<T: Transport>(job: &Job) -> Result<()> {
    match (job.role, job.option(Burst::NAME)) {
        (Role::Asker, 0) => ask::<T, true>(job, 1),
        (Role::Asker, burst) => ask::<T, false>(job, burst),
        (Role::Answerer, 0) => answer::<T, true>(job, 1),
        (Role::Answerer, burst) => answer::<T, false>(job, burst),
        (role, _) => bail!("the {} has no part in this", word(role)),
    }
}

fn ask<T: Transport, const ONE: bool>(job: &Job, burst: u64) -> Result<()> {
    let (mut payloads, delay_ns) = (Payloads::new(job.sizes.max as usize), job.delay_us * 1000);
    let mut ends = T::both(job)?;
    let mut largest = SizeRange::fixed(job.sizes.max).sequence();
    for round in 0..WARM_UP {
        ask_once::<_, _, _, ONE>(&mut ends, &mut payloads, &mut largest, (round, burst), 0, whole)?;
    }
    let mut histogram = histogram()?;
    passes(job, |pass| {
        histogram.reset();
        let (mut sizes, mut bytes) = (job.sizes.sequence(), 0);
        payloads.begin(0);
        let section = Section::start(pass)?;
        let mut schedule = Schedule::of(job);
        for round in 0..pass.count {
            // From its due time, not from its sending: a message that waits for a late reply is late itself.
            let start_ns = match &mut schedule {
                Some(schedule) => schedule.wait_for(round),
                None if pass.time_each => now_ns(),
                None => 0,
            };
            bytes += ask_once::<_, _, _, ONE>(&mut ends, &mut payloads, &mut sizes, (round, burst), delay_ns, glance)?;
            if pass.time_each {
                histogram.saturating_record((now_ns() - start_ns).saturating_sub(2 * delay_ns));
            }
        }
        let mut report = section.end(bytes)?;
        report.percentiles = pass.time_each.then(|| Percentiles::of(&histogram));
        if let Some(schedule) = schedule {
            schedule.leave_out(&mut report);
        }
        Ok(report)
    })
}

fn answer<T: Transport, const ONE: bool>(job: &Job, burst: u64) -> Result<()> {
    let mut ends = T::both(job)?;
    (0..WARM_UP).try_for_each(|round| answer_once::<_, _, _, ONE>(&mut ends, (round, burst), 0, whole).map(|_| ()))?;
    ends.0.settle()?;
    passes(job, |pass| {
        let mut bytes = 0;
        let section = Section::start(pass)?;
        for round in 0..pass.count {
            bytes += answer_once::<_, _, _, ONE>(&mut ends, (round, burst), job.delay_us * 1000, glance)?;
        }
        ends.0.settle()?;
        section.end(bytes)
    })
}

/// One round of the asker's. Returns the bytes there.
#[inline(always)]
fn ask_once<S: Sending, R: Receiving, C: Fn(&[u8]) -> bool, const ONE: bool>(
    (sending, receiving): &mut (S, R),
    payloads: &mut Payloads,
    sizes: &mut SizeSequence,
    (round, burst): (u64, u64),
    delay_ns: u64,
    check: C,
) -> Result<u64> {
    delay(delay_ns);
    let burst = if ONE { 1 } else { burst };
    let (mut bytes, mut size, end) = (0, 0, (round + 1) * burst);
    for n in round * burst..end {
        size = sizes.next_size();
        send(sending, payloads, size, n)?;
        bytes += size as u64;
    }
    sending.flush()?;
    let came = receive(receiving, end - 1, check)?;
    ensure!(came == size, "round {round} went out with {size} bytes and came back with {came}");
    Ok(bytes)
}

/// One round of the answerer's: sends back the copied bytes of the last message. Returns the bytes that came.
#[inline(always)]
fn answer_once<S: Sending, R: Receiving, C: Fn(&[u8]) -> bool, const ONE: bool>(
    (sending, receiving): &mut (S, R),
    (round, burst): (u64, u64),
    delay_ns: u64,
    check: C,
) -> Result<u64> {
    let burst = if ONE { 1 } else { burst };
    let (mut bytes, last) = (0, (round + 1) * burst - 1);
    for n in round * burst..last {
        bytes += receive(receiving, n, &check)? as u64;
    }
    let (size, right) = receiving.receive(|message| {
        let right = number(message) == expected(last, message.len()) && check(message);
        delay(delay_ns);
        sending.send(message)?;
        sending.flush()?;
        anyhow::Ok((message.len(), right))
    })??;
    ensure!(right, "round {round} did not come as it was sent");
    Ok(bytes + size as u64)
}
