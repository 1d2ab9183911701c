//! Many processes send to one receiver.
//!
//! A sender does the same as in a stream; its numbers begin with its own. By them the receiver identifies the sender
//! and compares each message with that sender's next. It checks all bytes of the warm-up and of each sender's last
//! message.

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use super::stream;
use crate::{
    endpoints::{Receiving, THERE, Transport},
    parameters::{Job, Kind, Launch, Role},
    payload::{NUMBER_BITS, WARM_UP, first_number, glance, number, whole},
    plan::{Common, Defaults, ONE_WAY, Options, Passes, Plan},
    record::RATES,
    run::exchange,
    side::{Section, check_bytes, passes, say},
};

/// A stream that many processes send to one receiver
///
/// Defaults: as a stream's; the messages are those of all senders together. `pelton-stream` is one sender, whatever
/// --senders says, and `pelton-alone` has no idle senders beside it.
#[derive(Args)]
pub struct FanIn {
    /// Processes that send
    #[arg(long, value_name = "K", default_value_t = 2)]
    senders: u32,

    /// Additional connected senders that send nothing, in one process
    #[arg(long, value_name = "N", default_value_t = 0)]
    idle: u32,
}

impl Options for FanIn {
    const NAME: &str = "fan-in";

    fn plan(&self, common: &Common) -> Result<Plan> {
        let FanIn { senders, idle, .. } = *self;
        ensure!(
            senders > 0 && u64::from(senders) + u64::from(idle) <= 1024,
            "found --senders {senders} --idle {idle}, wanted 1 to 1024 together, one that sends"
        );
        let defaults = Defaults {
            kind: Kind::FanIn,
            systems: if idle > 0 {
                "pelton,pelton-alone,pelton-stream,limits,sock-stream:block,sock-seqpacket:block"
            } else {
                "pelton,pelton-stream,limits,sock-stream:block,sock-seqpacket:block"
            },
            ..ONE_WAY
        };
        let mut plan = common.plan::<Self>(defaults, stream::count)?;
        let Plan { count, job: Job { sizes, .. }, .. } = plan;
        ensure!(
            sizes.min >= 8,
            "found --size {sizes} with fan-in, wanted 8 or more: a message begins with its sender's number"
        );
        ensure!(
            count >= u64::from(senders),
            "found --count {count}, wanted at least one for each of {senders} senders"
        );
        (plan.job.senders, plan.job.idle, plan.job.launch.numbered) = (senders, idle, true);
        Ok(Plan {
            own: vec![("senders", senders.into()), ("idle", idle.into())],
            figure: Some("messages_per_second"),
            columns: vec![RATES],
            run: exchange,
            ..plan
        })
    }
}

/// As many messages as the calls of that plan have, but one way, of as many senders.
pub fn instead_of_calls(plan: &mut Plan) {
    plan.count *= 2;
    plan.run = exchange;
    plan.passes = Passes::Warmed;
    plan.job = Job {
        system: "pelton".to_string(),
        workload: FanIn::NAME.to_string(),
        kind: Kind::FanIn,
        messages_each: 1,
        idle: 0,
        launch: Launch { roles: ONE_WAY.roles, ..plan.job.launch.clone() },
        ..plan.job.clone()
    };
}

/// One side's part; `gather` makes the receiver.
pub fn part<T: Transport, R: Receiving>(job: &Job, gather: impl FnOnce(&Job) -> Result<R>) -> Result<()> {
    match job.role {
        Role::Receiver => receive_all(job, gather(job)?),
        Role::Idler => idle::<T>(job),
        _ => stream::part::<T>(job),
    }
}

/// Connects, and sends nothing.
fn idle<T: Transport>(job: &Job) -> Result<()> {
    let connect = |n| T::sending(job, THERE).with_context(|| format!("connecting idle sender {n}"));
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
        let found = number(message);
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
    use crate::payload::buffer;

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
            let mut message = buffer(32);
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
