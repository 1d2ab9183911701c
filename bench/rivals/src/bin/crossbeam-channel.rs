//! crossbeam-channel: a bounded channel between threads, for many of them.
//!
//! As its documentation has it: `bounded`, `send` and `recv`, which spin a little and then sleep (`--wait block`); `try_send` and `try_recv` again and
//! again with `--wait spin`. How much it holds: see `channels.rs`.

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
    threads::<SIZE, Crossbeam>(job)
}

struct Crossbeam;

impl<const SIZE: usize> Channel<SIZE> for Crossbeam {
    type Sender = crossbeam_channel::Sender<[u8; SIZE]>;
    type Receiver = crossbeam_channel::Receiver<[u8; SIZE]>;

    fn bounded(messages: usize) -> (Self::Sender, Self::Receiver) {
        crossbeam_channel::bounded(messages)
    }

    fn send(sender: &Self::Sender, message: [u8; SIZE]) -> Result<()> {
        sender.send(message).context("the receiver is gone")
    }

    fn try_send(sender: &Self::Sender, message: [u8; SIZE]) -> Result<Option<[u8; SIZE]>> {
        match sender.try_send(message) {
            Ok(()) => Ok(None),
            Err(crossbeam_channel::TrySendError::Full(back)) => Ok(Some(back)),
            Err(gone) => Err(gone).context("the receiver is gone"),
        }
    }

    fn receive(receiver: &Self::Receiver) -> Result<[u8; SIZE]> {
        receiver.recv().context("the sender is gone")
    }

    fn try_receive(receiver: &Self::Receiver) -> Result<Option<[u8; SIZE]>> {
        match receiver.try_recv() {
            Ok(message) => Ok(Some(message)),
            Err(crossbeam_channel::TryRecvError::Empty) => Ok(None),
            Err(gone) => Err(gone).context("the sender is gone"),
        }
    }
}
