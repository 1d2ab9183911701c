//! One message there and back at a time, as fast as they go or at a rate.

use anyhow::{Result, bail, ensure};
use clap::Args;

use super::stream::{receive, send};
use crate::{
    endpoints::{Receiving, Sending, Transport},
    measure::{delay, now_ns},
    parameters::{Job, Kind, Role},
    payload::{Payloads, WARM_UP, expected, glance, number, whole},
    plan::{Common, Defaults, Options, Passes, Plan},
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
    #[arg(long, value_name = "PER_SECOND", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub rate: Option<u32>,
}

impl Pace {
    /// Whether the sides rest between two messages.
    pub fn rests(&self) -> bool {
        self.delay > 0 || self.rate.is_some()
    }

    /// Checks the two against each other, and against `--seconds`.
    pub fn check(&self, common: &Common) -> Result<(), String> {
        // An hour: beyond it a sum of delays could overflow.
        if self.delay > 3_600_000_000 {
            return Err(format!("found --delay {}, wanted at most 3600000000 microseconds", self.delay));
        }
        if self.rate.is_some() && self.delay > 0 {
            return Err("found --rate with --delay: use one of them".to_string());
        }
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

    fn plan(&self, common: &Common) -> Result<Plan, String> {
        self.pace.check(common)?;
        let defaults = Defaults {
            workload: Self::NAME,
            kind: Kind::Processes,
            roles: &[Role::Asker, Role::Answerer],
            size: 64,
            capacity: 64 << 20,
            sleeps: self.pace.rests(),
            systems: match self.pace.rate {
                Some(_) => "pelton,sock-stream,sock-seqpacket",
                None => "pelton,limits,pipe,sock-stream,sock-stream-batched,sock-seqpacket",
            },
        };
        let mut plan = common.plan(&defaults, |_| self.pace.count(200_000))?;
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

/// One side's part.
pub fn part<T: Transport>(job: &Job) -> Result<()> {
    let delay_ns = job.delay_us * 1000;
    match job.role {
        Role::Asker => {
            let mut payloads = Payloads::new(job.sizes.max as usize);
            let (mut sending, mut receiving) = T::both(job)?;
            for n in 0..WARM_UP {
                ask(&mut sending, &mut receiving, (&mut payloads, job.sizes.max as usize), n, 0, whole)?;
            }
            let mut histogram = histogram()?;
            passes(job, |pass| {
                histogram.reset();
                let mut sizes = job.sizes.sequence();
                payloads.begin(0);
                let mut bytes = 0;
                let section = Section::start(pass)?;
                let mut schedule = Schedule::of(job);
                for n in 0..pass.count {
                    let size = sizes.next_size();
                    bytes += size as u64;
                    if let Some(schedule) = &mut schedule {
                        // From its due time, not from its sending: a message that waits for a late reply is late
                        // itself.
                        let due = schedule.wait_for(n);
                        ask(&mut sending, &mut receiving, (&mut payloads, size), n, 0, glance)?;
                        histogram.saturating_record(now_ns() - due);
                    } else if pass.time_each {
                        let start = now_ns();
                        ask(&mut sending, &mut receiving, (&mut payloads, size), n, delay_ns, glance)?;
                        histogram.saturating_record((now_ns() - start).saturating_sub(2 * delay_ns));
                    } else {
                        ask(&mut sending, &mut receiving, (&mut payloads, size), n, delay_ns, glance)?;
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
        Role::Answerer => {
            let (mut sending, mut receiving) = T::both(job)?;
            for n in 0..WARM_UP {
                answer(&mut sending, &mut receiving, n, 0, whole)?;
            }
            sending.settle()?;
            passes(job, |pass| {
                let mut bytes = 0;
                let section = Section::start(pass)?;
                for n in 0..pass.count {
                    bytes += answer(&mut sending, &mut receiving, n, delay_ns, glance)? as u64;
                }
                sending.settle()?;
                section.end(bytes)
            })
        }
        role => bail!("the {} has no part in this", role.name()),
    }
}

/// One round of the asker's.
#[inline(always)]
fn ask(
    sending: &mut impl Sending,
    receiving: &mut impl Receiving,
    (payloads, size): (&mut Payloads, usize),
    n: u64,
    delay_ns: u64,
    check: impl FnOnce(&[u8]) -> bool,
) -> Result<()> {
    delay(delay_ns);
    send(sending, payloads, size, n)?;
    sending.flush()?;
    let came = receive(receiving, n, check)?;
    ensure!(came == size, "round {n} went out with {size} bytes and came back with {came}");
    Ok(())
}

/// One round of the answerer's: sends back the copied bytes. Returns their number.
#[inline(always)]
fn answer(
    sending: &mut impl Sending,
    receiving: &mut impl Receiving,
    n: u64,
    delay_ns: u64,
    check: impl FnOnce(&[u8]) -> bool,
) -> Result<usize> {
    let (size, right) = receiving.receive(|message| {
        let right = number(message) == expected(n, message.len()) && check(message);
        delay(delay_ns);
        sending.send(message)?;
        sending.flush()?;
        anyhow::Ok((message.len(), right))
    })??;
    ensure!(right, "round {n} did not come as it was sent");
    Ok(size)
}
