//! Bounded channels between threads, for many of them: the crates crossbeam-channel, flume and kanal, without the async
//! parts of the latter two.
//!
//! They carry values, here arrays, and are used as their documentation recommends: `bounded`, `send` and `recv`, which
//! spin a little and then sleep (flume sleeps at once); or, with `--wait spin`, by polling the calls that never wait.

use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail};
use pelton_bench::{
    endpoints::{Receiving, Sending},
    parameters::Job,
    workloads::threads::one_by_one,
};
use pelton_bench_peers::{HELD, program, ring_bytes, spins, with_size};

fn main() -> ExitCode {
    program(|job| with_size!(job, part))
}

fn part<const SIZE: usize>(job: &Job) -> Result<()> {
    let messages = ring_bytes(job, HELD) as usize / SIZE;
    match job.system.as_str() {
        "crossbeam-channel" => measured(job, crossbeam_channel::bounded::<[u8; SIZE]>(messages)),
        "flume" => measured(job, flume::bounded::<[u8; SIZE]>(messages)),
        "kanal" => measured(job, kanal::bounded::<[u8; SIZE]>(messages)),
        other => bail!("{other} is no channel"),
    }
}

fn measured<S, R>(job: &Job, (sender, receiver): (S, R)) -> Result<()>
where
    Outgoing<S>: Sending + Send,
    Incoming<R>: Receiving + Send,
{
    let spins = spins(job)?;
    one_by_one(job, (Outgoing { sender, spins }, Incoming { receiver, spins }))
}

struct Outgoing<S> {
    sender: S,
    spins: bool,
}

struct Incoming<R> {
    receiver: R,
    spins: bool,
}

/// A crate's channel: by `send` and `recv` of these names, and by calls that never wait. The first results in the
/// message if the channel is full, the second in none if there is none.
macro_rules! channel {
    ($library:ident, |$sender:ident, $message:ident| $try_send:expr, |$receiver:ident| $try_receive:expr) => {
        impl<const SIZE: usize> Sending for Outgoing<$library::Sender<[u8; SIZE]>> {
            #[inline(always)]
            fn send(&mut self, payload: &[u8]) -> Result<()> {
                let ($sender, mut $message) = (&self.sender, payload.try_into()?);
                if !self.spins {
                    return $sender.send($message).map_err(|_| anyhow!("the receiver is gone"));
                }
                while let Some(back) = $try_send {
                    $message = back;
                    std::hint::spin_loop();
                }
                Ok(())
            }
        }

        impl<const SIZE: usize> Receiving for Incoming<$library::Receiver<[u8; SIZE]>> {
            #[inline(always)]
            fn receive<T>(&mut self, look: impl FnOnce(&[u8]) -> T) -> Result<T> {
                let $receiver = &self.receiver;
                if !self.spins {
                    return Ok(look(&$receiver.recv().context("the sender is gone")?));
                }
                loop {
                    if let Some(message) = $try_receive {
                        return Ok(look(&message));
                    }
                    std::hint::spin_loop();
                }
            }
        }
    };
}

/// The crates whose calls that never wait answer alike.
macro_rules! alike {
    ($library:ident) => {
        channel!(
            $library,
            |sender, message| match sender.try_send(message) {
                Ok(()) => None,
                Err($library::TrySendError::Full(back)) => Some(back),
                Err(_) => bail!("the receiver is gone"),
            },
            |receiver| match receiver.try_recv() {
                Ok(message) => Some(message),
                Err($library::TryRecvError::Empty) => None,
                Err(gone) => return Err(gone).context("the sender is gone"),
            }
        );
    };
}

alike!(crossbeam_channel);
alike!(flume);
channel!(
    kanal,
    |sender, message| {
        let mut message = Some(message);
        sender.try_send_option(&mut message).context("the receiver is gone")?;
        // A refused message is still there.
        message
    },
    |receiver| receiver.try_recv().context("the sender is gone")?
);
