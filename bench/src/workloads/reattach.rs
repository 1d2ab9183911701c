//! The successors of a receiver, and then of a sender, killed on a lane full of messages.

use std::any::Any;

use anyhow::{Context, Result, ensure};
use clap::Args;
use pelton::Options as Channel;

use crate::{
    parameters::{Job, Kind, Role},
    payload::{Payloads, expected, number, whole},
    plan::{Common, Defaults, ONE_WAY, Options, Passes, Plan},
    record::{Column, Run},
    run::deadline,
    side::{PassReport, Section, passes},
    sides::{Interrupts, Sides},
};

/// The successors of a receiver, and then of a sender, killed on a lane full of messages
///
/// Defaults: 16 bytes, lanes of 64 MiB, 1,000,000 messages.
#[derive(Args)]
pub struct Reattach {}

const COLUMNS: &[Column] =
    &[("reattach_receiver_ns", "receiver reattach µs", 1e-3), ("reattach_sender_ns", "sender reattach µs", 1e-3)];

impl Options for Reattach {
    const NAME: &str = "reattach";

    fn plan(&self, common: &Common) -> Result<Plan> {
        common.no_seconds(Self::NAME)?;
        common.one_size(Self::NAME)?;
        let defaults = Defaults { kind: Kind::Successors, size: 16, sleeps: true, systems: "pelton-path", ..ONE_WAY };
        let plan = common.plan::<Self>(defaults, |_| 1_000_000)?;
        Ok(Plan { passes: Passes::One, figure: Some("reattach_receiver_ns"), columns: vec![COLUMNS], run, ..plan })
    }
}

/// Fills a lane, or opens it as the successor of a killed side. The time is from before the opening call to the first
/// message received, or sent. The side does not release that message, and keeps the channel open.
pub fn part(job: &Job, options: Channel) -> Result<()> {
    let (place, size) = (job.directory.join("there"), job.sizes.max as usize);
    let mut payloads = Payloads::new(size);
    let mut kept: Box<dyn Any> = Box::new(());
    passes(job, |pass| {
        let section = Section::start(pass)?;
        let (report, end): (PassReport, Box<dyn Any>) = match job.role {
            Role::Filler => {
                let mut sender = options.cast().create_sender(&place).context("making the channel")?;
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
fn run(job: &Job, interrupts: &Interrupts) -> Result<Run> {
    let mut sides = Sides::new(interrupts, deadline(job));
    sides.run_side(job, Role::Filler)?;
    sides.run_side(job, Role::Receiver)?;
    sides.sides.truncate(1); // dropped: killed, and gone
    let receiver = sides.run_side(job, Role::Receiver)?;
    sides.sides.remove(0);
    let sender = sides.run_side(job, Role::Sender)?;
    let ns = |report: &PassReport| Some(report.end_ns.saturating_sub(report.start_ns) as f64);
    let figures = [
        ("cpu_seconds", Some(receiver.usage.cpu_seconds + sender.usage.cpu_seconds)),
        ("reattach_receiver_ns", ns(&receiver)),
        ("reattach_sender_ns", ns(&sender)),
    ];
    Ok(Run::of(job, figures, [receiver.usage, sender.usage]))
}
