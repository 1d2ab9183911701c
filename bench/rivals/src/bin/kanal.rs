//! kanal: a bounded channel between threads, for many of them, without its part for async, which is not used here.
//!
//! As its documentation has it: `bounded`, `send` and `recv`, which spin and then sleep (`--wait block`); the calls that never wait again and again with
//! `--wait spin`. How much it holds: see `channels.rs`.

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
    threads::<SIZE, Kanal>(job)
}

struct Kanal;

impl<const SIZE: usize> Channel<SIZE> for Kanal {
    type Sender = kanal::Sender<[u8; SIZE]>;
    type Receiver = kanal::Receiver<[u8; SIZE]>;

    fn bounded(messages: usize) -> (Self::Sender, Self::Receiver) {
        kanal::bounded(messages)
    }

    fn send(sender: &Self::Sender, message: [u8; SIZE]) -> Result<()> {
        sender.send(message).context("the receiver is gone")
    }

    fn try_send(sender: &Self::Sender, message: [u8; SIZE]) -> Result<Option<[u8; SIZE]>> {
        let mut message = Some(message);
        sender.try_send_option(&mut message).context("the receiver is gone")?;
        // What it has not taken is still there.
        Ok(message)
    }

    fn receive(receiver: &Self::Receiver) -> Result<[u8; SIZE]> {
        receiver.recv().context("the sender is gone")
    }

    fn try_receive(receiver: &Self::Receiver) -> Result<Option<[u8; SIZE]>> {
        receiver.try_recv().context("the sender is gone")
    }
}
