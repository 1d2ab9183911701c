//! Streams whose endpoints send and receive several messages at a time. The sender writes up to 64 messages in place
//! and publishes them by one store; the receiver releases them together. Between threads the receiver reads them in
//! place. Between processes it copies each one out, as in streams of single messages.

use anyhow::{Result, bail, ensure};

use crate::{
    parameters::{Job, Role, word},
    payload::{WARM_UP, buffer, glance, number, stamp, whole},
    side::{Section, check_bytes, passes},
};

/// Messages that a sender publishes together, if they fit; between processes also the messages that a receiver
/// releases together.
pub const BATCH: usize = 64;

/// The sending endpoint.
pub trait SendingBatches {
    /// Sends up to `most` messages of the job's size, at least one, waiting for free space. `write` gets the index of
    /// each and its bytes, which it writes. Returns how many it sent.
    fn send_batch(&mut self, most: usize, write: impl FnMut(usize, &mut [u8])) -> Result<usize>;
}

/// The receiving endpoint.
pub trait ReceivingBatches {
    /// Passes at least one message, waiting for it, and at most `most` to `inspect`. Returns how many it received.
    fn receive_batch(&mut self, most: usize, inspect: impl FnMut(&[u8])) -> Result<usize>;
}

/// Calls a part with the messages' size as a constant, as in a program whose messages are of one type; 0 for other
/// sizes than these.
macro_rules! by_size {
    ($size:expr, $part:ident($($argument:expr),*)) => {
        match $size {
            16 => $part::<16, _, _>($($argument),*),
            64 => $part::<64, _, _>($($argument),*),
            256 => $part::<256, _, _>($($argument),*),
            1024 => $part::<1024, _, _>($($argument),*),
            4096 => $part::<4096, _, _>($($argument),*),
            _ => $part::<0, _, _>($($argument),*),
        }
    };
}
pub(crate) use by_size;

/// One process's part in a stream; `sending` and `receiving` connect the two processes, which know the same directory,
/// and wait for the other side.
pub fn part<S: SendingBatches, R: ReceivingBatches>(
    job: &Job,
    sending: impl FnOnce(&Job) -> Result<S>,
    receiving: impl FnOnce(&Job) -> Result<R>,
) -> Result<()> {
    // Before the two connect, or the other side would report only that this one is gone.
    of_one_size(job)?;
    by_size!(job.sizes.max, sized(job, sending, receiving))
}

fn of_one_size(job: &Job) -> Result<()> {
    ensure!(
        job.sizes.is_fixed() && job.sizes.min >= 8,
        "found messages of {} bytes, wanted one size of 8 or more: each is given its number in place",
        job.sizes
    );
    Ok(())
}

fn sized<const SIZE: usize, S: SendingBatches, R: ReceivingBatches>(
    job: &Job,
    sending: impl FnOnce(&Job) -> Result<S>,
    receiving: impl FnOnce(&Job) -> Result<R>,
) -> Result<()> {
    let size = job.sizes.max as usize;
    match job.role {
        Role::Sender => {
            let mut sending = sending(job)?;
            let mut send = all_sent::<SIZE, _>(job)?;
            send(&mut sending, WARM_UP)?;
            passes(job, |pass| {
                let section = Section::start(pass)?;
                send(&mut sending, pass.count)?;
                section.end(pass.count * size as u64)
            })
        }
        Role::Receiver => {
            let mut receiving = receiving(job)?;
            let mut copy = vec![0; size];
            let mut receive = |count: u64| {
                all_taken(&mut receiving, (count, BATCH), |message, n, last| {
                    message.len() == size && {
                        copy_sized::<SIZE>(&mut copy, message);
                        is_right(&copy, n, last)
                    }
                })
            };
            receive(WARM_UP)?;
            passes(job, |pass| {
                let section = Section::start(pass)?;
                receive(pass.count)?;
                let bytes = pass.count * size as u64;
                check_bytes(job, pass, bytes)?;
                section.end(bytes)
            })
        }
        role => bail!("the {} has no part in this", word(role)),
    }
}

/// Copies a message, whose size may be a constant.
#[inline(always)]
fn copy_sized<const SIZE: usize>(to: &mut [u8], from: &[u8]) {
    match (to.first_chunk_mut::<SIZE>(), from.first_chunk::<SIZE>()) {
        (Some(to), Some(from)) if SIZE > 0 => *to = *from,
        _ => to.copy_from_slice(from),
    }
}

/// Sends so many messages, numbered from 0.
pub fn all_sent<const SIZE: usize, S: SendingBatches>(
    job: &Job,
) -> Result<impl FnMut(&mut S, u64) -> Result<()> + Send + use<SIZE, S>> {
    of_one_size(job)?;
    let pattern = buffer(job.sizes.max as usize);
    Ok(move |sending: &mut S, count: u64| {
        let mut n = 0;
        while n < count {
            let most = (count - n).min(BATCH as u64) as usize;
            n += sending.send_batch(most, |index, room| {
                copy_sized::<SIZE>(room, &pattern);
                stamp(room, n + index as u64);
            })? as u64;
        }
        Ok(())
    })
}

/// Receives so many messages, `most` at a time; `inspect` gets each, its number, and whether it is the last, and
/// returns whether it is right.
#[inline(always)]
pub fn all_taken(
    receiving: &mut impl ReceivingBatches,
    (count, most): (u64, usize),
    mut inspect: impl FnMut(&[u8], u64, bool) -> bool,
) -> Result<()> {
    let (mut n, mut right) = (0, true);
    while n < count {
        let most = (count - n).min(most as u64) as usize;
        let mut at = n;
        n += receiving.receive_batch(most, |message| {
            right &= inspect(message, at, at + 1 == count);
            at += 1;
        })? as u64;
        ensure!(right, "one of the messages before the {n}th is not the one that was sent");
    }
    Ok(())
}

/// Whether these are the bytes of message `n`: compares all bytes of the first messages and of the last.
#[inline(always)]
pub fn is_right(message: &[u8], n: u64, last: bool) -> bool {
    let check = if n < WARM_UP || last { whole } else { glance };
    number(message) == n && check(message)
}
