//! Channels between threads that carry values, used as their documentation has it: by calls that wait, or, where the job says to spin, by those that
//! never do, again and again.

use std::marker::PhantomData;

use anyhow::Result;
use pelton_bench::{
    parameters::{Job, Wait},
    systems::{Receiving, Sending},
    threads::{InProcess, one_by_one},
};

use crate::ring_bytes;

/// Bytes of the messages that such a channel, or a ring between threads, holds at most: they fit the second-level cache.
pub const HELD: u64 = 128 << 10;

/// A bounded channel of arrays.
pub trait Channel<const SIZE: usize> {
    /// The end that sends.
    type Sender: Send;
    /// The end that receives.
    type Receiver: Send;

    /// Both ends of one that holds so many messages.
    fn bounded(messages: usize) -> (Self::Sender, Self::Receiver);

    /// Waits for room.
    fn send(sender: &Self::Sender, message: [u8; SIZE]) -> Result<()>;

    /// Gives the message back where there is no room.
    fn try_send(sender: &Self::Sender, message: [u8; SIZE]) -> Result<Option<[u8; SIZE]>>;

    /// Waits for a message.
    fn receive(receiver: &Self::Receiver) -> Result<[u8; SIZE]>;

    /// None where there is none.
    fn try_receive(receiver: &Self::Receiver) -> Result<Option<[u8; SIZE]>>;
}

/// Both threads' part, over that channel.
pub fn threads<const SIZE: usize, C: Channel<SIZE>>(job: &Job) -> Result<()> {
    one_by_one::<Ends<SIZE, C>>(job)
}

struct Ends<const SIZE: usize, C>(PhantomData<C>);

impl<const SIZE: usize, C: Channel<SIZE>> InProcess for Ends<SIZE, C> {
    type Sending = Outgoing<SIZE, C>;
    type Receiving = Incoming<SIZE, C>;

    fn pair(job: &Job) -> Result<(Outgoing<SIZE, C>, Incoming<SIZE, C>)> {
        let (sender, receiver) = C::bounded(ring_bytes(job, HELD) as usize / SIZE);
        let spins = job.wait == Wait::Spin;
        Ok((Outgoing { sender, spins }, Incoming { receiver, spins }))
    }
}

struct Outgoing<const SIZE: usize, C: Channel<SIZE>> {
    sender: C::Sender,
    spins: bool,
}

impl<const SIZE: usize, C: Channel<SIZE>> Sending for Outgoing<SIZE, C> {
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

struct Incoming<const SIZE: usize, C: Channel<SIZE>> {
    receiver: C::Receiver,
    spins: bool,
}

impl<const SIZE: usize, C: Channel<SIZE>> Receiving for Incoming<SIZE, C> {
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
