//! Messages one way, without a rate. Each message carries its number, which the receiver compares.

use anyhow::{Result, anyhow, bail, ensure};
use clap::Args;

use crate::{
    endpoints::{Receiving, Sending, THERE, Transport},
    parameters::{Job, Role, SizeRange, word},
    payload::{Payloads, WARM_UP, expected, first_number, glance, number, whole},
    plan::{Common, Defaults, ONE_WAY, Options, Plan},
    record::RATES,
    run::exchange,
    side::{Section, check_bytes, passes, with_work, work},
};

/// Messages one way, without a rate
///
/// Defaults: 256 bytes, lanes of 64 MiB, 5,000,000 messages of up to 1 KiB, 1,000,000 of up to 32 KiB, 100,000 larger.
#[derive(Args)]
pub struct Stream {}

impl Options for Stream {
    const NAME: &str = "stream";

    fn plan(&self, common: &Common) -> Result<Plan> {
        let defaults =
            Defaults { systems: "pelton,limits,pipe,sock-stream,sock-stream-batched,sock-seqpacket", ..ONE_WAY };
        let plan = common.plan::<Self>(defaults, count)?;
        Ok(Plan { figure: Some("messages_per_second"), columns: vec![RATES], run: exchange, ..plan })
    }
}

/// The default number of messages of such sizes.
pub fn count(sizes: SizeRange) -> u64 {
    match sizes.max {
        0..=1024 => 5_000_000,
        1025..=32_768 => 1_000_000,
        _ => 100_000,
    }
}

/// One side's part; also a sender's in a fan-in.
pub fn part<T: Transport>(job: &Job) -> Result<()> {
    let (steps, size_max) = (job.work_steps(), job.sizes.max as usize);
    match job.role {
        Role::Sender => {
            let mut payloads = Payloads::new(size_max);
            let mut sending = T::sending(job, THERE)?;
            // Each of several senders has numbers of its own.
            let first = first_number(job.index);
            payloads.begin(first);
            for n in first..first + WARM_UP {
                send(&mut sending, &mut payloads, size_max, n)?;
            }
            sending.flush()?;
            passes(job, |pass| {
                let mut sizes = job.sizes.sequence();
                payloads.begin(first);
                let mut bytes = 0;
                let section = Section::start(pass)?;
                with_work(steps, first..first + job.share(job.index, pass.count), |n| {
                    let size = sizes.next_size();
                    send(&mut sending, &mut payloads, size, n)?;
                    bytes += size as u64;
                    Ok(())
                })?;
                sending.flush()?;
                section.end(bytes)
            })
        }
        Role::Receiver => {
            let mut receiving = T::receiving(job, THERE)?;
            for n in 0..WARM_UP {
                receive(&mut receiving, n, whole)?;
            }
            passes(job, |pass| {
                let mut bytes = 0;
                let section = Section::start(pass)?;
                let mut sizes = job.sizes.sequence();
                with_work(steps, 0..pass.count - 1, |n| {
                    bytes += receive_sized(&mut receiving, n, sizes.next_size(), glance)? as u64;
                    Ok(())
                })?;
                bytes += receive_sized(&mut receiving, pass.count - 1, sizes.next_size(), whole)? as u64;
                work(steps);
                let mut report = section.end(bytes)?;
                check_bytes(job, pass, bytes)?;
                report.resident_bytes = receiving.resident_bytes()?;
                Ok(report)
            })
        }
        role => bail!("the {} has no part in this", word(role)),
    }
}

/// Sends message `n`.
#[inline(always)]
pub fn send(sending: &mut impl Sending, payloads: &mut Payloads, size: usize, n: u64) -> Result<()> {
    sending.send(payloads.prepared(n, size))?;
    payloads.sent(n);
    Ok(())
}

/// Receives message `n`, compares its number, and returns its size.
#[inline(always)]
pub fn receive(receiving: &mut impl Receiving, n: u64, check: impl FnOnce(&[u8]) -> bool) -> Result<usize> {
    let (size, found, right) = receiving.receive(|message| (message.len(), number(message), check(message)))?;
    if found != expected(n, size) || !right {
        return Err(wrong(n, found, size));
    }
    Ok(size)
}

/// As [`receive`], with a known size.
#[inline(always)]
fn receive_sized(
    receiving: &mut impl Receiving,
    n: u64,
    wanted: usize,
    check: impl FnOnce(&[u8]) -> bool,
) -> Result<usize> {
    let size = receive(receiving, n, check)?;
    ensure!(size == wanted, "message {n} has {size} bytes, wanted {wanted}");
    Ok(size)
}

/// Not inlined: it must not lengthen the path of right messages.
#[cold]
#[inline(never)]
fn wrong(n: u64, found: u64, size: usize) -> anyhow::Error {
    if found != expected(n, size) {
        anyhow!("message {n} has the number {found}: messages were lost, doubled or out of order")
    } else {
        anyhow!("message {n} has other bytes than were sent")
    }
}
