//! The successors of a receiver, and then of a sender, killed on a lane full of messages.

use std::{any::Any, time::Instant};

use anyhow::{Context, Result, ensure};

use crate::{
    parameters::{Job, Role, Workload},
    report::{Figures, Run, SideFigures},
    run_figures::by_role,
    sides::{Interrupts, Sides},
    systems::lasting,
    workload::{PassReport, Payloads, Section, expected, number, passes, whole},
};

/// Fills a lane, or opens it as the successor of a killed side. The time is from before the opening call to the first
/// message received, or sent. The side does not release that message, and keeps the channel open.
pub fn side(job: &Job) -> Result<()> {
    let (place, size) = (job.directory.join("there"), job.sizes.max as usize);
    let (options, mut payloads) = (lasting(job), Payloads::new(size));
    let mut kept: Box<dyn Any> = Box::new(());
    passes(job, |pass| {
        let section = Section::start(pass)?;
        let (report, end): (PassReport, Box<dyn Any>) = match job.role {
            Role::Filler => {
                let mut sender = options.create_sender(&place).context("making the channel")?;
                for n in 0..pass.count {
                    let sent = sender.try_send(payloads.prepared(n, size))?;
                    ensure!(
                        sent == pelton::Sent::Sent,
                        "the lane was full after {n} of {} messages: raise --capacity, or lower --count",
                        pass.count
                    );
                    payloads.sent(n);
                }
                (section.end(pass.count * size as u64)?, Box::new(sender))
            }
            Role::Sender => {
                let mut sender = options.cast().open_sender(&place).context("opening a sender")?;
                let sent = sender.try_send(payloads.prepared(0, size))?;
                let report = section.end(size as u64)?;
                ensure!(sent == pelton::Sent::Sent, "there was no room for one more message: raise --capacity");
                let left = sender.unreleased();
                ensure!(left == pass.count + 1, "{left} messages are unreleased, wanted {}", pass.count + 1);
                (report, Box::new(sender))
            }
            _ => {
                let mut receiver = options.cast().open_receiver(&place).context("opening a receiver")?;
                let message = receiver.try_receive()?.context("the lane was empty")?;
                let report = section.end(message.len() as u64)?;
                let right = message.len() == size && number(&message) == expected(0, size) && whole(&message);
                ensure!(right, "the first message is not the one that was sent first");
                let held = message.hold();
                (report, Box::new((receiver, held)))
            }
        };
        kept = end;
        Ok(report)
    })?;
    drop(kept);
    Ok(())
}

/// The program kills each endpoint on a lane full of messages, and a fresh process takes its place.
pub fn run(job: &Job, cpus: &[usize], interrupts: &Interrupts, deadline: Instant) -> Result<Run> {
    let mut sides = Sides::new(interrupts, deadline);
    sides.run_side(job, Role::Filler, cpus)?;
    sides.run_side(job, Role::Receiver, cpus)?;
    sides.sides.truncate(1); // dropped: killed, and gone
    let receiver = sides.run_side(job, Role::Receiver, cpus)?;
    sides.sides.remove(0);
    let sender = sides.run_side(job, Role::Sender, cpus)?;
    let ns = |report: &PassReport| Some(report.end_ns.saturating_sub(report.start_ns) as f64);
    let figures = Figures {
        cpu_seconds: Some(receiver.usage.cpu_seconds + sender.usage.cpu_seconds),
        reattach_receiver_ns: ns(&receiver),
        reattach_sender_ns: ns(&sender),
        ..Figures::default()
    };
    let side = |report: PassReport| SideFigures { usage: report.usage, ..SideFigures::default() };
    Ok(Run { figures, sides: by_role(Workload::Reattach, [receiver, sender].map(side)), ..Run::default() })
}
