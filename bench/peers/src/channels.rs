//! Channels between threads that carry values, used as their documentation recommends: by calls that wait, or, if the
//! job says to spin, by polling the calls that never wait.

use std::{marker::PhantomData, process::ExitCode};

use anyhow::Result;
use pelton_bench::{
    endpoints::{Receiving, Sending},
    parameters::Job,
    workloads::threads::{InProcess, one_by_one},
};

use crate::{program, ring_bytes, spins, with_size};

/// Bytes of messages that such a channel, or a ring between threads, holds at most: they fit the second-level cache.
pub const HELD: u64 = 128 << 10;

/// A bounded channel of values.
pub trait Channel: 'static {
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

/// The program of that channel: the part of both threads, with arrays as messages.
pub fn threads<C: Channel>() -> ExitCode {
    program(|job| with_size!(job, part, C))
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
