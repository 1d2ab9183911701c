//! One sender of many receivers: pelton's publisher, and a pelton sender for each receiver. Many publishers of one
//! receiver: a set of subscribers.

use std::{
    marker::PhantomData,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use pelton::{Policy, Publisher, Subscriber, SubscriberEvent, SubscriberSet};

use super::pelton::{ByDirectory, BySocket, PeltonReceiving, lasting, options, wait};
use crate::{
    endpoints::{CONNECT, Receiving, Sending, THERE, Transport},
    parameters::{Job, Role, Wait},
    side::{passes, say},
    workloads::broadcast,
};

/// A broadcast, whose sides connect by `M`.
pub struct Broadcast<M>(PhantomData<M>);

/// How the two sides of a broadcast find each other.
pub trait Meeting {
    fn publisher(job: &Job) -> Result<Publisher>;
    /// Waits for the publisher, at most until the options' deadline.
    fn subscriber(job: &Job, policy: Policy) -> Result<Subscriber>;
}

impl Meeting for BySocket {
    fn publisher(job: &Job) -> Result<Publisher> {
        lasting(job).publish_at(&name(job)).context("publishing")
    }

    fn subscriber(job: &Job, policy: Policy) -> Result<Subscriber> {
        options(job).policy(policy).connect_subscriber(&name(job)).context("subscribing")
    }
}

impl Meeting for ByDirectory {
    fn publisher(job: &Job) -> Result<Publisher> {
        lasting(job).create_publisher(job.directory.join(THERE)).context("publishing")
    }

    fn subscriber(job: &Job, policy: Policy) -> Result<Subscriber> {
        options(job).policy(policy).open_subscriber(job.directory.join(THERE)).context("subscribing")
    }
}

fn name(job: &Job) -> String {
    format!("unix:{}", job.directory.join(THERE).display())
}

/// One side's part: that of a stream, or the subscribers that lag.
pub fn part<M: Meeting>(job: &Job) -> Result<()> {
    if job.role == Role::Idler { lag::<M>(job) } else { broadcast::part::<Broadcast<M>>(job) }
}

/// Subscribers that may be passed, and receive what they can, each on a thread. They connect once the publisher is
/// there, which waits for them.
fn lag<M: Meeting>(job: &Job) -> Result<()> {
    say(&"ready")?;
    std::thread::scope(|scope| {
        for _ in 0..job.idle {
            scope.spawn(|| -> Result<()> {
                let mut subscriber = M::subscriber(job, Policy::Lag)?;
                let mut passed_at = Instant::now();
                // The publisher's end ends it.
                while let Ok(message) = subscriber.receive() {
                    if message.missed() > 0 {
                        passed_at = Instant::now();
                    }
                    drop(message);
                    // After the publisher's last message nothing passes it, and it receives the rest without sleeping.
                    if job.delay_us > 0 && passed_at.elapsed() < Duration::from_secs(1) {
                        std::thread::sleep(Duration::from_micros(job.delay_us));
                    }
                }
                Ok(())
            });
        }
    });
    passes(&Job { passes: Vec::new(), ..job.clone() }, |_| unreachable!("there is no pass"))
}

impl<M: Meeting> Transport for Broadcast<M> {
    type Sending = Publishing;
    type Receiving = Subscribing;

    fn sending(job: &Job, _: &str) -> Result<Publishing> {
        blocks_or_spins(job)?;
        let mut publisher = M::publisher(job)?;
        let all = (job.receivers + job.idle) as usize;
        let are_there = publisher.wait_subscribers_until(all, std::time::Instant::now() + CONNECT)?;
        ensure!(are_there, "only {} of {all} subscribers came", publisher.subscriber_count());
        Ok(Publishing(publisher))
    }

    fn receiving(job: &Job, _: &str) -> Result<Subscribing> {
        blocks_or_spins(job)?;
        Ok(Subscribing(M::subscriber(job, Policy::Gate)?))
    }
}

fn blocks_or_spins(job: &Job) -> Result<()> {
    ensure!(matches!(job.wait, Wait::Spin | Wait::Block), "it is not measured with an event loop: write spin or block");
    Ok(())
}

pub struct Publishing(Publisher);

impl Sending for Publishing {
    #[inline(always)]
    fn send(&mut self, payload: &[u8]) -> Result<()> {
        Ok(self.0.send(payload)?)
    }
}

pub struct Subscribing(Subscriber);

impl Receiving for Subscribing {
    #[inline(always)]
    fn receive<R>(&mut self, inspect: impl FnOnce(&[u8]) -> R) -> Result<R> {
        Ok(inspect(&self.0.receive()?))
    }
}

/// A publisher of its own for each sender, and a set with a subscriber of each.
pub struct Topic;

impl Topic {
    fn name(job: &Job, index: u32) -> String {
        format!("unix:{}", job.directory.join(format!("{THERE}-{index}")).display())
    }

    /// The receiver of all senders.
    pub fn gathering(job: &Job) -> Result<Gathering> {
        blocks_or_spins(job)?;
        ensure!(job.idle == 0, "publishers that send nothing are not measured: leave --idle out");
        let mut set = SubscriberSet::new(wait(job))?;
        for index in 0..job.senders {
            set.add(options(job).connect_subscriber(&Topic::name(job, index)).context("subscribing")?)?;
        }
        Ok(Gathering(set))
    }
}

impl Transport for Topic {
    type Sending = Publishing;
    type Receiving = Gathering;

    fn sending(job: &Job, _: &str) -> Result<Publishing> {
        blocks_or_spins(job)?;
        let mut publisher = lasting(job).publish_at(&Topic::name(job, job.index)).context("publishing")?;
        ensure!(publisher.wait_subscribers_until(1, Instant::now() + CONNECT)?, "no subscriber came");
        Ok(Publishing(publisher))
    }
}

pub struct Gathering(SubscriberSet);

impl Receiving for Gathering {
    #[inline(always)]
    fn receive<R>(&mut self, inspect: impl FnOnce(&[u8]) -> R) -> Result<R> {
        match self.0.receive()? {
            Some(SubscriberEvent::Message { message, .. }) => Ok(inspect(&message)),
            other => bail!("a publisher has left: {other:?}"),
        }
    }
}

/// A channel to each receiver, into each of which the sender copies each message.
pub struct Copies;

impl Transport for Copies {
    type Sending = Copying;
    type Receiving = PeltonReceiving;

    fn sending(job: &Job, _: &str) -> Result<Copying> {
        blocks_or_spins(job)?;
        let listener = lasting(job).listen(&name(job)).context("listening")?;
        let until = std::time::Instant::now() + CONNECT;
        let accept = |_| listener.accept_sender_until(until)?.context("nobody connected");
        Ok(Copying((0..job.receivers).map(accept).collect::<Result<_>>()?))
    }

    fn receiving(job: &Job, _: &str) -> Result<PeltonReceiving> {
        PeltonReceiving::new(options(job).connect_receiver(&name(job)).context("connecting")?, job)
    }
}

pub struct Copying(Vec<pelton::Sender>);

impl Sending for Copying {
    #[inline(always)]
    fn send(&mut self, payload: &[u8]) -> Result<()> {
        for sender in &mut self.0 {
            sender.send(payload)?;
        }
        Ok(())
    }
}
