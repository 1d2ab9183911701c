//! pelton between two threads of one process; and with several messages at a time, also between two processes.

use anyhow::{Context, Result, ensure};

use super::pelton::{BySocket, Rendezvous, lasting, options};
use crate::{
    endpoints::{Receiving, Sending, THERE},
    parameters::{Job, Wait},
    workloads::batches::{ReceivingBatches, SendingBatches},
};

/// One message a call, copied in and out.
pub fn pair(job: &Job) -> Result<(pelton::Sender, Copying)> {
    let (sender, receiver) = lasting(job).threads().context("making the channel")?;
    Ok((sender, Copying { receiver, buffer: Vec::with_capacity(job.sizes.max as usize) }))
}

impl Sending for pelton::Sender {
    #[inline(always)]
    fn send(&mut self, payload: &[u8]) -> Result<()> {
        Ok(pelton::Sender::send(self, payload)?)
    }
}

/// The endpoint that copies out.
pub struct Copying {
    receiver: pelton::Receiver,
    buffer: Vec<u8>,
}

impl Receiving for Copying {
    #[inline(always)]
    fn receive<R>(&mut self, inspect: impl FnOnce(&[u8]) -> R) -> Result<R> {
        self.receiver.receive_into(&mut self.buffer)?;
        Ok(inspect(&self.buffer))
    }
}

/// A sender, and the bytes of its messages: it writes several in place, by one reservation.
type Batches = (pelton::Sender, usize);

/// The same several at a time.
pub fn pair_of_batches(job: &Job) -> Result<(Batches, pelton::Receiver)> {
    let (sender, receiver) = lasting(job).threads().context("making the channel")?;
    Ok(((sender, job.sizes.max as usize), receiver))
}

/// The same between processes.
pub fn sending_batches(job: &Job) -> Result<Batches> {
    ensure!(
        job.wait == Wait::Spin,
        "a reservation for several messages never waits, it is asked for again: write spin"
    );
    Ok((BySocket::sender(&options(job), &job.directory.join(THERE), false)?, job.sizes.max as usize))
}

/// The other endpoint.
pub fn receiving_batches(job: &Job) -> Result<pelton::Receiver> {
    BySocket::receiver(&options(job), &job.directory.join(THERE), true)
}

impl SendingBatches for Batches {
    #[inline(always)]
    fn send_batch(&mut self, most: usize, mut write: impl FnMut(usize, &mut [u8])) -> Result<usize> {
        let (sender, size) = self;
        loop {
            if let Some(mut batch) = sender.try_reserve_batch(std::iter::repeat_n(*size, most))? {
                for index in 0..most {
                    write(index, batch.reserve(*size).context("a batch has room for what it was made for")?);
                }
                batch.commit()?;
                return Ok(most);
            }
            std::hint::spin_loop();
        }
    }
}

impl ReceivingBatches for pelton::Receiver {
    #[inline(always)]
    fn receive_batch(&mut self, most: usize, mut inspect: impl FnMut(&[u8])) -> Result<usize> {
        let mut batch = pelton::Receiver::receive_batch(self)?;
        let mut count = 0;
        while count < most
            && let Some(message) = batch.next()?
        {
            inspect(message);
            count += 1;
        }
        Ok(count)
    }
}
