//! flume: a bounded channel between threads, for many of them, without its part for async, which is not used here.
//!
//! As its documentation has it: `bounded`, `send` and `recv`, which sleep (`--wait block`); `try_send` and `try_recv` again and again with `--wait spin`.
//! How much it holds: see `channels.rs`.

use std::process::ExitCode;

use anyhow::{Context, Result};
use pelton_bench::parameters::Job;
use pelton_bench_rivals::{
    channels::{Channel, threads},
    program, with_size,
};

fn main() -> ExitCode {
    program(|job| with_size!(job, run))
}

fn run<const SIZE: usize>(job: &Job) -> Result<()> {
    threads::<SIZE, Flume>(job)
}

struct Flume;

impl<const SIZE: usize> Channel<SIZE> for Flume {
    type Sender = flume::Sender<[u8; SIZE]>;
    type Receiver = flume::Receiver<[u8; SIZE]>;

    fn bounded(messages: usize) -> (Self::Sender, Self::Receiver) {
        flume::bounded(messages)
    }

    fn send(sender: &Self::Sender, message: [u8; SIZE]) -> Result<()> {
        sender.send(message).context("the receiver is gone")
    }

    fn try_send(sender: &Self::Sender, message: [u8; SIZE]) -> Result<Option<[u8; SIZE]>> {
        match sender.try_send(message) {
            Ok(()) => Ok(None),
            Err(flume::TrySendError::Full(back)) => Ok(Some(back)),
            Err(gone) => Err(gone).context("the receiver is gone"),
        }
    }

    fn receive(receiver: &Self::Receiver) -> Result<[u8; SIZE]> {
        receiver.recv().context("the sender is gone")
    }

    fn try_receive(receiver: &Self::Receiver) -> Result<Option<[u8; SIZE]>> {
        match receiver.try_recv() {
            Ok(message) => Ok(Some(message)),
            Err(flume::TryRecvError::Empty) => Ok(None),
            Err(gone) => Err(gone).context("the sender is gone"),
        }
    }
}
