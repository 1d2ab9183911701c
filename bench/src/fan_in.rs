//! Many processes send to one receiver.
//!
//! A sender does the same as in a stream; its numbers begin with its own. By them the receiver identifies the sender
//! and compares each message with that sender's next. It checks all bytes of the warm-up and of each sender's last
//! message.

use anyhow::{Context, Result, bail, ensure};

use crate::{
    parameters::{Job, Role, SystemName},
    systems::{BySocket, Pelton, Receiving, SockSeqpacket, SockStream, System},
    workload::{self, Section, WARM_UP, check_bytes, glance, passes, say, whole},
};

/// The bits of a number above these are its sender's; 2^40 messages of 1,024 senders fit.
pub const NUMBER_BITS: u32 = 48;

/// The first number of that sender.
pub fn first_number(index: u32) -> u64 {
    (index as u64) << NUMBER_BITS
}

/// Does one side's part.
pub fn side(job: &Job) -> Result<()> {
    match job.system {
        SystemName::Pelton | SystemName::PeltonAlone => part::<Pelton<BySocket>, _>(job, Pelton::gathering),
        SystemName::PeltonStream => part::<Pelton<BySocket>, _>(job, Pelton::<BySocket>::receiving),
        SystemName::SockStream => part::<SockStream, _>(job, SockStream::gathering),
        SystemName::SockSeqpacket => part::<SockSeqpacket, _>(job, SockSeqpacket::gathering),
        system => bail!("{system:?} has no receiver of many senders"),
    }
}

fn part<S: System, R: Receiving>(job: &Job, gather: impl FnOnce(&Job) -> Result<R>) -> Result<()> {
    match job.role {
        Role::Receiver => receive_all(job, gather(job)?),
        Role::Idler => idle::<S>(job),
        _ => workload::serve::<S>(job),
    }
}

/// Connects, and sends nothing.
fn idle<S: System>(job: &Job) -> Result<()> {
    let connect = |n| S::sending(job).with_context(|| format!("connecting idle sender {n}"));
    let connected = (1..=job.idle).map(connect).collect::<Result<Vec<_>>>()?;
    say(&"ready")?;
    passes(&Job { passes: Vec::new(), ..job.clone() }, |_| bail!("there is no pass"))?;
    drop(connected);
    Ok(())
}

/// The expected numbers of one sender: the next, and the last.
struct Due {
    next: u64,
    last: u64,
}

fn receive_all(job: &Job, mut receiving: impl Receiving) -> Result<()> {
    let due = |share: &dyn Fn(u32) -> u64| -> Vec<Due> {
        let of = |index| Due { next: first_number(index), last: first_number(index) + share(index) - 1 };
        (0..job.senders).map(of).collect()
    };
    let mut warm_up = due(&|_| WARM_UP);
    for _ in 0..WARM_UP * job.senders as u64 {
        receive(&mut receiving, &mut warm_up, whole)?;
    }
    passes(job, |pass| {
        let mut due = due(&|index| job.share(index, pass.count));
        let mut bytes = 0;
        let section = Section::start(pass)?;
        for _ in 0..pass.count {
            bytes += receive(&mut receiving, &mut due, glance)? as u64;
        }
        let mut report = section.end(bytes)?;
        check_bytes(job, pass, bytes)?;
        ensure!(due.iter().all(|due| due.next == due.last + 1), "some sender's messages came short of others'");
        report.resident_bytes = receiving.resident_bytes()?;
        Ok(report)
    })
}

/// Receives a message, compares its number with the expected one, and returns its size.
#[inline(always)]
fn receive(receiving: &mut impl Receiving, due: &mut [Due], check: impl FnOnce(&[u8]) -> bool) -> Result<usize> {
    let taken = receiving.receive(|message| {
        let found = workload::number(message);
        let Some(due) = due.get_mut((found >> NUMBER_BITS) as usize).filter(|due| due.next == found) else {
            return Err(found);
        };
        due.next += 1;
        let right = check(message) && (found != due.last || whole(message));
        if right { Ok(message.len()) } else { Err(found) }
    })?;
    taken.map_err(wrong)
}

/// Not inlined: it must not lengthen the path of right messages.
#[cold]
#[inline(never)]
fn wrong(found: u64) -> anyhow::Error {
    let (sender, number) = (found >> NUMBER_BITS, found & ((1 << NUMBER_BITS) - 1));
    anyhow::anyhow!("message {number} of sender {sender} has wrong bytes, or messages were lost, doubled or reordered")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Receives these messages, in this order.
    struct Given(std::vec::IntoIter<Vec<u8>>);

    impl Receiving for Given {
        fn receive<R>(&mut self, inspect: impl FnOnce(&[u8]) -> R) -> Result<R> {
            Ok(inspect(&self.0.next().context("there are no more")?))
        }
    }

    /// Of two senders with two messages each, in this order.
    fn check(order: &[u64], spoil: impl Fn(usize, &mut [u8])) -> Result<()> {
        let message = |(at, number): (usize, &u64)| {
            let mut message = workload::buffer(32);
            message[..8].copy_from_slice(&number.to_le_bytes());
            spoil(at, &mut message);
            message
        };
        let mut given = Given(order.iter().enumerate().map(message).collect::<Vec<_>>().into_iter());
        let of = |index| Due { next: first_number(index), last: first_number(index) + 1 };
        let mut due = [of(0), of(1)];
        order.iter().try_for_each(|_| receive(&mut given, &mut due, glance).map(|_| ()))
    }

    #[test]
    fn senders_may_interleave_in_any_order_but_their_messages_may_not() {
        let [a, b] = [first_number(0), first_number(1)];
        let nothing = |_: usize, _: &mut [u8]| ();
        check(&[a, b, b + 1, a + 1], nothing).unwrap();
        for order in [[a, b + 1, b, a + 1], [a, a, b, b + 1], [first_number(2), a, b, b + 1]] {
            check(&order, nothing).unwrap_err();
        }
        // All bytes of a sender's last message are compared.
        check(&[a, b, b + 1, a + 1], |at, message| message[31] ^= u8::from(at == 2)).unwrap_err();
        check(&[a, b, b + 1, a + 1], |at, message| message[31] ^= u8::from(at == 0)).unwrap();
    }
}
