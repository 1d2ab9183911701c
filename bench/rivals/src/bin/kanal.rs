//! kanal: a bounded channel between threads, for many of them, without its part for async, which is not used here.
//!
//! As its documentation has it: `bounded`, `send` and `recv`, which spin and then sleep (`--wait block`); the calls that never wait again and again with
//! `--wait spin`. It holds 128 KiB of messages at most: a guess that favours it, for they fit the second-level cache.

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
        let (sender, receiver) = kanal::bounded(job.capacity.min(HELD) as usize / SIZE);
        let spins = job.wait == Wait::Spin;
        Ok((Outgoing { sender, spins }, Incoming { receiver, spins }))
    }
}

struct Outgoing<const SIZE: usize> {
    sender: kanal::Sender<[u8; SIZE]>,
    spins: bool,
}

impl<const SIZE: usize> Sending for Outgoing<SIZE> {
    #[inline(always)]
    fn send(&mut self, payload: &[u8]) -> Result<()> {
        let message: [u8; SIZE] = payload.try_into()?;
        if !self.spins {
            return self.sender.send(message).context("the receiver is gone");
        }
        let mut message = Some(message);
        while !self.sender.try_send_option(&mut message).context("the receiver is gone")? {
            std::hint::spin_loop();
        }
        Ok(())
    }
}

struct Incoming<const SIZE: usize> {
    receiver: kanal::Receiver<[u8; SIZE]>,
    spins: bool,
}

impl<const SIZE: usize> Receiving for Incoming<SIZE> {
    #[inline(always)]
    fn receive<R>(&mut self, look: impl FnOnce(&[u8]) -> R) -> Result<R> {
        if !self.spins {
            return Ok(look(&self.receiver.recv().context("the sender is gone")?));
        }
        loop {
            if let Some(message) = self.receiver.try_recv().context("the sender is gone")? {
                return Ok(look(&message));
            }
            std::hint::spin_loop();
        }
    }
}
