//! crossbeam-channel: a bounded channel between threads, for many of them.
//!
//! As its documentation recommends: `bounded`, `send` and `recv`, which spin a little and then sleep (`--wait block`).
//! With `--wait spin` the loop polls `try_send` and `try_recv`. Its capacity: see `channels.rs`.

use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail};
use pelton_bench_peers::channels::{Channel, threads};

fn main() -> ExitCode {
    threads::<Crossbeam>()
}

struct Crossbeam;

impl Channel for Crossbeam {
    type Sender<T: Send> = crossbeam_channel::Sender<T>;
    type Receiver<T: Send> = crossbeam_channel::Receiver<T>;

    fn bounded<T: Send>(messages: usize) -> (Self::Sender<T>, Self::Receiver<T>) {
        crossbeam_channel::bounded(messages)
    }

    fn send<T: Send>(sender: &Self::Sender<T>, message: T) -> Result<()> {
        sender.send(message).map_err(|_| anyhow!("the receiver is gone"))
    }

    fn try_send<T: Send>(sender: &Self::Sender<T>, message: T) -> Result<Option<T>> {
        match sender.try_send(message) {
            Ok(()) => Ok(None),
            Err(crossbeam_channel::TrySendError::Full(back)) => Ok(Some(back)),
            Err(_) => bail!("the receiver is gone"),
        }
    }

    fn receive<T: Send>(receiver: &Self::Receiver<T>) -> Result<T> {
        receiver.recv().context("the sender is gone")
    }

    fn try_receive<T: Send>(receiver: &Self::Receiver<T>) -> Result<Option<T>> {
        match receiver.try_recv() {
            Ok(message) => Ok(Some(message)),
            Err(crossbeam_channel::TryRecvError::Empty) => Ok(None),
            Err(gone) => Err(gone).context("the sender is gone"),
        }
    }
}
