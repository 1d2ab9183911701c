//! Bounded channels between threads, for many of them: the crates crossbeam-channel, flume and kanal, without the async
//! parts of the latter two.
//!
//! They carry values, here arrays, and are used as their documentation recommends: `bounded`, `send` and `recv`, which
//! spin a little and then sleep (flume sleeps at once); or, with `--wait spin`, by polling the calls that never wait.

use std::{marker::PhantomData, process::ExitCode};

use anyhow::{Context, Result, anyhow, bail};
use pelton_bench::{
    endpoints::{Receiving, Sending},
    parameters::Job,
    workloads::threads::{InProcess, one_by_one},
};

use pelton_bench_peers::{HELD, program, ring_bytes, spins, with_size};

fn main() -> ExitCode {
    program(|job| match job.system.as_str() {
        "crossbeam-channel" => with_size!(job, part, Crossbeam),
        "flume" => with_size!(job, part, Flume),
        "kanal" => with_size!(job, part, Kanal),
        other => bail!("{other} is no channel"),
    })
}

/// A bounded channel of values.
trait Channel: 'static {
    /// The sending endpoint.
    type Sender<T: Send>: Send;
    /// The receiving endpoint.
    type Receiver<T: Send>: Send;

    /// Both endpoints of a channel for so many messages.
    fn bounded<T: Send>(messages: usize) -> (Self::Sender<T>, Self::Receiver<T>);

    /// Waits for free space.
    fn send<T: Send>(sender: &Self::Sender<T>, message: T) -> Result<()>;

    /// Returns the message if the channel is full.
    fn try_send<T: Send>(sender: &Self::Sender<T>, message: T) -> Result<Option<T>>;

    /// Waits for a message.
    fn receive<T: Send>(receiver: &Self::Receiver<T>) -> Result<T>;

    /// None if there is no message.
    fn try_receive<T: Send>(receiver: &Self::Receiver<T>) -> Result<Option<T>>;
}

fn part<const SIZE: usize, C: Channel>(job: &Job) -> Result<()> {
    one_by_one::<Endpoints<SIZE, C>>(job)
}

struct Endpoints<const SIZE: usize, C>(PhantomData<C>);

impl<const SIZE: usize, C: Channel> InProcess for Endpoints<SIZE, C> {
    type Sending = Outgoing<SIZE, C>;
    type Receiving = Incoming<SIZE, C>;

    fn pair(job: &Job) -> Result<(Outgoing<SIZE, C>, Incoming<SIZE, C>)> {
        let (sender, receiver) = C::bounded(ring_bytes(job, HELD) as usize / SIZE);
        let spins = spins(job)?;
        Ok((Outgoing { sender, spins }, Incoming { receiver, spins }))
    }
}

struct Outgoing<const SIZE: usize, C: Channel> {
    sender: C::Sender<[u8; SIZE]>,
    spins: bool,
}

impl<const SIZE: usize, C: Channel> Sending for Outgoing<SIZE, C> {
    #[inline(always)]
    fn send(&mut self, payload: &[u8]) -> Result<()> {
        let mut message: [u8; SIZE] = payload.try_into()?;
        if !self.spins {
            return C::send(&self.sender, message);
        }
        while let Some(back) = C::try_send(&self.sender, message)? {
            message = back;
            std::hint::spin_loop();
        }
        Ok(())
    }
}

struct Incoming<const SIZE: usize, C: Channel> {
    receiver: C::Receiver<[u8; SIZE]>,
    spins: bool,
}

impl<const SIZE: usize, C: Channel> Receiving for Incoming<SIZE, C> {
    #[inline(always)]
    fn receive<R>(&mut self, look: impl FnOnce(&[u8]) -> R) -> Result<R> {
        if !self.spins {
            return Ok(look(&C::receive(&self.receiver)?));
        }
        loop {
            if let Some(message) = C::try_receive(&self.receiver)? {
                return Ok(look(&message));
            }
            std::hint::spin_loop();
        }
    }
}

/// A crate's channel: by `bounded`, `send` and `recv` of these names, and by these calls that never wait.
macro_rules! channel {
    ($name:ident, $library:ident, |$sender:ident, $message:ident| $try_send:expr, |$receiver:ident| $try_receive:expr) => {
        struct $name;

        impl Channel for $name {
            type Sender<T: Send> = $library::Sender<T>;
            type Receiver<T: Send> = $library::Receiver<T>;

            fn bounded<T: Send>(messages: usize) -> (Self::Sender<T>, Self::Receiver<T>) {
                $library::bounded(messages)
            }

            fn send<T: Send>(sender: &Self::Sender<T>, message: T) -> Result<()> {
                sender.send(message).map_err(|_| anyhow!("the receiver is gone"))
            }

            fn try_send<T: Send>($sender: &Self::Sender<T>, $message: T) -> Result<Option<T>> {
                $try_send
            }

            fn receive<T: Send>(receiver: &Self::Receiver<T>) -> Result<T> {
                receiver.recv().context("the sender is gone")
            }

            fn try_receive<T: Send>($receiver: &Self::Receiver<T>) -> Result<Option<T>> {
                $try_receive
            }
        }
    };
}

/// The crates whose calls that never wait answer alike.
macro_rules! alike {
    ($name:ident, $library:ident) => {
        channel!(
            $name,
            $library,
            |sender, message| match sender.try_send(message) {
                Ok(()) => Ok(None),
                Err($library::TrySendError::Full(back)) => Ok(Some(back)),
                Err(_) => bail!("the receiver is gone"),
            },
            |receiver| match receiver.try_recv() {
                Ok(message) => Ok(Some(message)),
                Err($library::TryRecvError::Empty) => Ok(None),
                Err(gone) => Err(gone).context("the sender is gone"),
            }
        );
    };
}

alike!(Crossbeam, crossbeam_channel);
alike!(Flume, flume);
channel!(
    Kanal,
    kanal,
    |sender, message| {
        let mut message = Some(message);
        sender.try_send_option(&mut message).context("the receiver is gone")?;
        // A refused message is still there.
        Ok(message)
    },
    |receiver| receiver.try_recv().context("the sender is gone")
);
