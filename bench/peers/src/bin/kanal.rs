//! kanal: a bounded channel between threads, for many of them, without its async part.
//!
//! As its documentation recommends: `bounded`, `send` and `recv`, which spin and then sleep (`--wait block`). With
//! `--wait spin` the loop polls the calls that never wait. Its capacity: see `channels.rs`.

use std::process::ExitCode;

use anyhow::{Context, Result, anyhow};
use pelton_bench_peers::channels::{Channel, threads};

fn main() -> ExitCode {
    threads::<Kanal>()
}

struct Kanal;

impl Channel for Kanal {
    type Sender<T: Send> = kanal::Sender<T>;
    type Receiver<T: Send> = kanal::Receiver<T>;

    fn bounded<T: Send>(messages: usize) -> (Self::Sender<T>, Self::Receiver<T>) {
        kanal::bounded(messages)
    }

    fn send<T: Send>(sender: &Self::Sender<T>, message: T) -> Result<()> {
        sender.send(message).map_err(|_| anyhow!("the receiver is gone"))
    }

    fn try_send<T: Send>(sender: &Self::Sender<T>, message: T) -> Result<Option<T>> {
        let mut message = Some(message);
        sender.try_send_option(&mut message).context("the receiver is gone")?;
        // A refused message is still there.
        Ok(message)
    }

    fn receive<T: Send>(receiver: &Self::Receiver<T>) -> Result<T> {
        receiver.recv().context("the sender is gone")
    }

    fn try_receive<T: Send>(receiver: &Self::Receiver<T>) -> Result<Option<T>> {
        receiver.try_recv().context("the sender is gone")
    }
}
