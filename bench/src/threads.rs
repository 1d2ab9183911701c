//! A stream between two threads of one process: the receiving one on the first CPU, the sending one on the second.
//!
//! The threads live as long as the process; both wait at a barrier before a pass and after it. Messages are checked as
//! between processes: number and size of each, every byte of the first ones and of the last.

use std::{panic, sync::Barrier, thread};

use anyhow::{Result, bail, ensure};

use crate::{
    measure::now_ns,
    parameters::{Job, Pass, SystemName},
    side::pin,
    systems::{
        Receiving, Sending,
        threads::{Batches, PeltonThreads},
    },
    workload::{PassReport, Payloads, Section, WARM_UP, all_came, expected, glance, number, passes, whole},
};

/// What carries messages between two threads.
pub trait InProcess {
    /// The end that sends.
    type Sending: Sending + Send;
    /// The end that receives.
    type Receiving: Receiving + Send;

    /// Both ends.
    fn pair(job: &Job) -> Result<(Self::Sending, Self::Receiving)>;
}

/// The same, for systems that take several messages at a time.
pub trait InBatches {
    /// The end that sends.
    type Sending: SendingBatches + Send;
    /// The end that receives.
    type Receiving: ReceivingBatches + Send;

    /// Both ends.
    fn pair(job: &Job) -> Result<(Self::Sending, Self::Receiving)>;
}

/// Messages that are sent together, where there is room: as many as shmem-ipc and rtrb are given at a time, too.
pub const BATCH: usize = 64;

/// The end that sends several.
pub trait SendingBatches {
    /// Sends up to `most` messages of the job's size, at least one, waiting for room; `write` is given the index of each among them and its
    /// bytes, which it writes. Answers how many there were.
    fn send_batch(&mut self, most: usize, write: impl FnMut(usize, &mut [u8])) -> Result<usize>;
}

/// The end that receives several.
pub trait ReceivingBatches {
    /// Shows `look` at least one message, waiting for it, and at most `most`. Answers how many there were.
    fn receive_batch(&mut self, most: usize, look: impl FnMut(&[u8])) -> Result<usize>;
}

/// Both threads' part.
pub fn side(job: &Job) -> Result<()> {
    match job.system {
        SystemName::Pelton => one_by_one::<PeltonThreads>(job),
        SystemName::PeltonBatches => batches::<Batches>(job),
        system => bail!("{system:?} is not between threads"),
    }
}

/// One message a call.
pub fn one_by_one<S: InProcess>(job: &Job) -> Result<()> {
    let size = job.sizes.max as usize;
    let (mut sending, mut receiving) = S::pair(job)?;
    let mut payloads = Payloads::new(size);
    let send = move |count: u64| {
        payloads.prepare(0);
        for n in 0..count {
            sending.send(payloads.prepared(n, size))?;
            payloads.prepare(n + 1);
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

/// Up to [`BATCH`] messages a call.
pub fn batches<S: InBatches>(job: &Job) -> Result<()> {
    let size = job.sizes.max as usize;
    ensure!(size >= 8, "found messages of {size} bytes, wanted 8 or more: each is given its number in place");
    let (mut sending, mut receiving) = S::pair(job)?;
    let pattern = crate::workload::buffers(size)[0].clone();
    let send = move |count: u64| {
        let mut n = 0;
        while n < count {
            let most = (count - n).min(BATCH as u64) as usize;
            n += sending.send_batch(most, |index, room| {
                room.copy_from_slice(&pattern);
                crate::workload::stamp(room, n + index as u64);
            })? as u64;
        }
        Ok(())
    };
    let receive = move |count: u64| {
        let mut n = 0;
        let mut right = true;
        while n < count {
            let most = (count - n).min(usize::MAX as u64) as usize;
            let mut at = n;
            n += receiving.receive_batch(most, |m| {
                let check = if at < WARM_UP || at + 1 == count { whole } else { glance };
                right &= m.len() == size && number(m) == at && check(m);
                at += 1;
            })? as u64;
            ensure!(right, "one of the messages {} to {n} is not the one that was sent", at.saturating_sub(1));
        }
        Ok(())
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
    // The passes are ordered by this thread, which does not take part: it sleeps.
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
                    // The other thread would wait for ever for what this one can no longer do.
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
        all_came(job, pass, bytes)?;
        Ok(PassReport { start_ns, end_ns, ..section.end(bytes)? })
    })
}
