//! A stream between two threads of one process: the receiving one on the first CPU, the sending one on the second.
//!
//! The threads live as long as the process; both wait at a barrier before a pass and after it. Messages are checked as
//! between processes: number and size of each, every byte of the first ones and of the last.

use std::{panic, sync::Barrier, thread};

use anyhow::{Result, ensure};
use clap::Args;

use super::batches::{ReceivingBatches, SendingBatches, all_sent, all_taken, by_size, is_right};
use crate::{
    endpoints::{Receiving, Sending},
    measure::now_ns,
    parameters::{Job, Kind, Pass, Role},
    payload::{Payloads, WARM_UP, expected, glance, number, whole},
    plan::{Common, Defaults, ONE_WAY, Options, Plan},
    record::RATES,
    run::exchange,
    side::{PassReport, Section, check_bytes, passes, pin},
};

/// A stream between two threads of one process
///
/// Defaults: 64 bytes, lanes of 64 MiB, 10,000,000 messages.
#[derive(Args)]
pub struct Threads {}

impl Options for Threads {
    const NAME: &str = "threads";

    fn plan(&self, common: &Common) -> Result<Plan> {
        common.one_size(Self::NAME)?;
        let defaults = Defaults {
            kind: Kind::Threads,
            roles: &[Role::Threads],
            size: 64,
            systems: "pelton,pelton-batches,rtrb,rtrb-chunks,crossbeam-channel,flume,kanal",
            ..ONE_WAY
        };
        let plan = common.plan::<Self>(defaults, |_| 10_000_000)?;
        Ok(Plan { figure: Some("messages_per_second"), columns: vec![RATES], run: exchange, ..plan })
    }
}

/// One message a call, by these endpoints.
pub fn one_by_one<S: Sending + Send, R: Receiving + Send>(
    job: &Job,
    (mut sending, mut receiving): (S, R),
) -> Result<()> {
    let size = job.sizes.max as usize;
    let mut payloads = Payloads::new(size);
    let send = move |count: u64| {
        payloads.begin(0);
        for n in 0..count {
            sending.send(payloads.prepared(n, size))?;
            payloads.sent(n);
        }
        sending.flush()
    };
    let receive = move |count: u64| {
        for n in 0..count {
            let check = if n < WARM_UP || n + 1 == count { whole } else { glance };
            let right = receiving.receive(|m| m.len() == size && number(m) == expected(n, size) && check(m))?;
            ensure!(right, "message {n} is not the one that was sent");
        }
        Ok(())
    };
    both(job, send, receive)
}

/// Up to [`BATCH`](super::batches::BATCH) messages a call, and one release for all that a call returns.
pub fn batches<S: SendingBatches + Send, R: ReceivingBatches + Send>(job: &Job, endpoints: (S, R)) -> Result<()> {
    by_size!(job.sizes.max, sized_batches(job, endpoints))
}

fn sized_batches<const SIZE: usize, S: SendingBatches + Send, R: ReceivingBatches + Send>(
    job: &Job,
    (mut sending, mut receiving): (S, R),
) -> Result<()> {
    let size = job.sizes.max as usize;
    let mut all = all_sent::<SIZE, _>(job)?;
    let send = move |count: u64| all(&mut sending, count);
    let receive = move |count: u64| {
        all_taken(&mut receiving, (count, usize::MAX), |m, n, last| m.len() == size && is_right(m, n, last))
    };
    both(job, send, receive)
}

/// Runs the two threads, pass by pass.
fn both(
    job: &Job,
    mut send: impl FnMut(u64) -> Result<()> + Send,
    mut receive: impl FnMut(u64) -> Result<()> + Send,
) -> Result<()> {
    let barrier = Barrier::new(2);
    // This thread starts the passes and takes no part: it sleeps.
    passes(job, |pass: &Pass| {
        let section = Section::start(pass)?;
        let (start_ns, end_ns) = thread::scope(|scope| {
            let part = |index: usize| {
                let cpu = job.cpus.get(index).copied();
                let barrier = &barrier;
                move |work: &mut (dyn FnMut(u64) -> Result<()> + Send), count: u64| -> (u64, u64) {
                    let done = cpu.map_or(Ok(()), pin).and_then(|()| {
                        barrier.wait();
                        let start_ns = now_ns();
                        work(count)?;
                        Ok((start_ns, now_ns()))
                    });
                    // Without this one the other thread would wait without end.
                    done.unwrap_or_else(|error| {
                        eprintln!("{error:#}");
                        std::process::exit(1)
                    })
                }
            };
            let (receiver, sender) = (part(0), part(1));
            let (receive, send) = (&mut receive, &mut send);
            let receiver = scope.spawn(move || receiver(receive, pass.count));
            let sender = scope.spawn(move || sender(send, pass.count));
            let join = |thread: thread::ScopedJoinHandle<'_, (u64, u64)>| {
                thread.join().unwrap_or_else(|panic| panic::resume_unwind(panic))
            };
            (join(sender).0, join(receiver).1)
        });
        let bytes = pass.count * job.sizes.max as u64;
        check_bytes(job, pass, bytes)?;
        Ok(PassReport { start_ns, end_ns, ..section.end(bytes)? })
    })
}
