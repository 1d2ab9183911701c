//! crossbeam-channel: a bounded channel between threads, for many of them.
//!
//! As its documentation has it: `bounded`, `send` and `recv`, which spin a little and then sleep (`--wait block`); `try_send` and `try_recv` again and
//! again with `--wait spin`. It holds 128 KiB of messages at most: a guess that favours it, for they fit the second-level cache.

use std::process::ExitCode;

use anyhow::{Context, Result};
use pelton_bench::{
    parameters::{Job, Wait},
    systems::{Receiving, Sending},
    threads::{InProcess, one_by_one},
};
use pelton_bench_rivals::{program, with_size};

fn main() -> ExitCode {
    program(|job| with_size!(job, run))
}

fn run<const SIZE: usize>(job: &Job) -> Result<()> {
    one_by_one::<Channel<SIZE>>(job)
}

struct Channel<const SIZE: usize>;

/// Bytes of the messages that it holds.
const HELD: u64 = 128 << 10;

impl<const SIZE: usize> InProcess for Channel<SIZE> {
    type Sending = Outgoing<SIZE>;
    type Receiving = Incoming<SIZE>;

    fn pair(job: &Job) -> Result<(Outgoing<SIZE>, Incoming<SIZE>)> {
        let (sender, receiver) = crossbeam_channel::bounded(job.capacity.min(HELD) as usize / SIZE);
        let spins = job.wait == Wait::Spin;
        Ok((Outgoing { sender, spins }, Incoming { receiver, spins }))
    }
}

struct Outgoing<const SIZE: usize> {
    sender: crossbeam_channel::Sender<[u8; SIZE]>,
    spins: bool,
}

impl<const SIZE: usize> Sending for Outgoing<SIZE> {
    #[inline(always)]
    fn send(&mut self, payload: &[u8]) -> Result<()> {
        let message: [u8; SIZE] = payload.try_into()?;
        if !self.spins {
            return self.sender.send(message).context("the receiver is gone");
        }
        let mut message = message;
        loop {
            match self.sender.try_send(message) {
                Ok(()) => return Ok(()),
                Err(crossbeam_channel::TrySendError::Full(back)) => message = back,
                Err(gone) => return Err(gone).context("the receiver is gone"),
            }
            std::hint::spin_loop();
        }
    }
}

struct Incoming<const SIZE: usize> {
    receiver: crossbeam_channel::Receiver<[u8; SIZE]>,
    spins: bool,
}

impl<const SIZE: usize> Receiving for Incoming<SIZE> {
    #[inline(always)]
    fn receive<R>(&mut self, look: impl FnOnce(&[u8]) -> R) -> Result<R> {
        if !self.spins {
            return Ok(look(&self.receiver.recv().context("the sender is gone")?));
        }
        loop {
            match self.receiver.try_recv() {
                Ok(message) => return Ok(look(&message)),
                Err(crossbeam_channel::TryRecvError::Empty) => std::hint::spin_loop(),
                Err(gone) => return Err(gone).context("the sender is gone"),
            }
        }
    }
}
