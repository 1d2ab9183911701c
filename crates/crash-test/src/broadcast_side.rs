//! The sides of pelton in a scenario of a broadcast: a publisher, and a subscriber. A message has the number of its
//! publisher's process, and its own in the lane. A subscriber checks that each message follows the last one, or that
//! the messages between are counted as missed. Its journal has what the test compares with other processes.

use super::journal::{Journal, READY, Word};
use super::many_senders_side::{message_number, parse_number};
use super::message::{Pattern, Random, check};
use super::plan::{BroadcastPlan, Plan, Role, StartAt, SubscriberPolicy, Transport, WaitMode};
use super::side::{CONNECT_TIMEOUT, SLICE, connect_retrying, name, options, pause, record_death, wait_readable};
use pelton::options::maker;
use pelton::{Deadline, Error, Options, Policy, Publisher, Sent, StartFrom, Subscriber};
use std::time::{Duration, Instant};

/// The value of [`Word::Stop`] with which a subscriber leaves. A larger one is the number after the last message.
pub const LEAVE: u64 = 1;

pub fn run(plan: &Plan, part: &BroadcastPlan, journal: &Journal) -> pelton::Result<()> {
    match plan.role {
        Role::Send => publish(plan, part, journal),
        Role::Receive => SubscriberSide::open(plan, part, journal)?.run(),
    }
}

fn publish(plan: &Plan, part: &BroadcastPlan, journal: &Journal) -> pelton::Result<()> {
    let mut publisher: Publisher = match plan.transport {
        Transport::Connect => options::<maker::PublishAt>(plan).history(part.history).publish_at(&name(plan))?,
        Transport::Path => {
            let options = options::<maker::CreatePublisher>(plan).history(part.history);
            options.connect_deadline(Instant::now() + CONNECT_TIMEOUT).create_publisher(plan.directory.join("c"))?
        }
    };
    let (pattern, mut random) = (Pattern::new(plan.sizes.bytes_max), Random::new(plan.choices_seed));
    let (mut buffer, mut paused) = (Vec::new(), 0);
    let mut next = publisher.next_number();
    for word in [Word::Pending, Word::Done] {
        journal.set(word, next - 1);
    }
    journal.set(Word::First, next);
    journal.add(Word::Connections, 1);
    journal.set(Word::State, READY);
    while journal.get(Word::Stop) == 0 {
        let number = message_number(part.publisher, next);
        buffer.resize(plan.sizes.of(number), 0);
        pattern.write(number, &mut buffer);
        journal.set(Word::Pending, next);
        while publisher.try_send(&buffer)? != Sent::Sent {
            journal.set(Word::Waiting, 1);
            if plan.wait_mode != WaitMode::Poll {
                publisher.send(&buffer)?;
                break;
            }
            if publisher.arm(buffer.len())?.is_waiting() {
                wait_readable(&publisher);
            }
            if random.one_in(2) {
                publisher.disarm();
            }
        }
        journal.set(Word::Waiting, 0);
        journal.set(Word::Done, next);
        journal.add(Word::Messages, 1);
        next += 1;
        if publisher.next_number() != next {
            journal.add(Word::Garbage, 1);
            journal.explain(&format!("the publisher returns {} as the number, wanted {next}", publisher.next_number()));
        }
        pause(plan, &mut paused);
    }
    publisher.wait_released_until(Deadline::Never)?;
    publisher.close()
}

struct SubscriberSide<'a> {
    plan: &'a Plan,
    part: &'a BroadcastPlan,
    journal: &'a Journal,
    subscriber: Subscriber,
    /// The number that the next message has, if none is missed before it; 0: any.
    next: u64,
    /// The number of the last message's publisher.
    publisher: u64,
    /// Messages missed in earlier connections, and before the last message. `None`: not known, because a connection
    /// ended without a message.
    missed: Option<u64>,
    random: Random,
    paused: u64,
}

impl<'a> SubscriberSide<'a> {
    fn open(plan: &'a Plan, part: &'a BroadcastPlan, journal: &'a Journal) -> pelton::Result<SubscriberSide<'a>> {
        let mut options: Options<maker::OpenSubscriber> = options(plan);
        options = match part.policy {
            SubscriberPolicy::Gate => options.policy(Policy::Gate),
            SubscriberPolicy::GateUntil => options.policy(Policy::Gate).lag_after(Duration::from_millis(2)),
            SubscriberPolicy::Lag => options.policy(Policy::Lag),
            SubscriberPolicy::Latest => options.policy(Policy::Latest),
        };
        options = options.start_from(match part.start {
            StartAt::Now => StartFrom::Now,
            StartAt::Oldest => StartFrom::Oldest,
            StartAt::Last(messages) => StartFrom::Last(messages),
        });
        if let Some(name) = &part.durable {
            options = options.durable(name);
        }
        options = options.connect_deadline(Instant::now() + CONNECT_TIMEOUT);
        let subscriber = match plan.transport {
            Transport::Path => options.open_subscriber(plan.directory.join("c"))?,
            Transport::Connect => {
                connect_retrying(|| options.cast::<maker::Subscribe>().connect_subscriber(&name(plan)))?
            }
        };
        let random = Random::new(plan.choices_seed);
        let (next, publisher, missed, paused) = (0, 0, Some(0), 0);
        let side = SubscriberSide { plan, part, journal, subscriber, next, publisher, missed, random, paused };
        journal.add(Word::Connections, 1);
        journal.set(Word::State, READY);
        Ok(side)
    }

    fn run(mut self) -> pelton::Result<()> {
        loop {
            let error = match self.receive() {
                Ok(()) if self.journal.get(Word::Stop) == LEAVE => return self.subscriber.close(),
                Ok(()) => {
                    pause(self.plan, &mut self.paused);
                    continue;
                }
                Err(error) => error,
            };
            match error {
                Error::Closed { .. } | Error::PeerDied { .. } => {}
                error => return Err(error),
            }
            // All messages of the dead one, received or missed.
            record_death(self.journal, 0, self.subscriber.next_number() - 1);
            let all_missed = self.all_missed();
            loop {
                match self.journal.get(Word::Stop) {
                    0 => {}
                    LEAVE => return self.subscriber.close(),
                    end => {
                        self.check_end(end);
                        return self.subscriber.close();
                    }
                }
                if self.subscriber.resume_until(Instant::now() + SLICE)? {
                    break;
                }
            }
            if self.plan.transport == Transport::Connect {
                // The next publisher counts from 1.
                self.missed = all_missed;
                self.next = 0;
            }
            self.journal.add(Word::Connections, 1);
        }
    }

    /// Receives one message, which must be the next one, or follow those that it says are missed.
    fn receive(&mut self) -> pelton::Result<()> {
        let journal = self.journal;
        if self.plan.wait_mode == WaitMode::Poll {
            while !self.subscriber.has_message()? {
                if self.subscriber.arm()?.is_waiting() {
                    wait_readable(&self.subscriber);
                }
                if self.random.one_in(2) {
                    self.subscriber.disarm();
                }
            }
        }
        let delivery = self.subscriber.receive()?;
        let (number, missed) = (delivery.number(), delivery.missed());
        let start = number - missed;
        if journal.get(Word::First) == 0 {
            // Released by a predecessor, or never to be received.
            journal.set(Word::Pending, start - 1);
            journal.set(Word::Done, start - 1);
            journal.set(Word::First, start);
        } else if self.next != 0 && start != self.next {
            journal.jump(self.next, start);
        }
        if missed > 0 && self.part.policy == SubscriberPolicy::Gate {
            journal.add(Word::Garbage, 1);
            journal.explain(&format!("a gate missed {missed} messages before {number}"));
        }
        let found = parse_number(&delivery);
        match found.map(|(whole, publisher, index)| (index, publisher, check(&self.plan.sizes, whole, &delivery))) {
            Some((index, publisher, Ok(()))) if index == number && publisher >= self.publisher => {
                self.publisher = publisher;
            }
            found => {
                journal.add(Word::Garbage, 1);
                journal.explain(&format!(
                    "message {number}, after one of publisher {}, is {found:?} (number, publisher)",
                    self.publisher
                ));
            }
        }
        journal.set(Word::Peer, self.publisher);
        journal.set(Word::Taken, number);
        journal.add(Word::Messages, 1);
        journal.add(Word::Bytes, delivery.len() as u64);
        journal.add(Word::Missed, missed);
        self.missed = self.missed.map(|sum| sum + missed);
        journal.set(Word::Pending, number);
        drop(delivery);
        journal.set(Word::Done, number);
        self.next = number + 1;
        Ok(())
    }

    /// After the last message of the scenario: each from the first on was received, or is counted as missed.
    fn check_end(&self, end: u64) {
        let next = self.subscriber.next_number();
        if next != end {
            self.journal.jump(end, next);
        }
        let (found, wanted) = (self.subscriber.missed(), self.all_missed());
        if wanted.is_some_and(|wanted| wanted != found) {
            self.journal.add(Word::Garbage, 1);
            self.journal.explain(&format!("the subscriber counts {found} as missed, wanted {wanted:?}"));
        }
    }

    /// Messages missed so far, with those after the last message of this connection.
    fn all_missed(&self) -> Option<u64> {
        let last = if self.next == 0 { None } else { Some(self.subscriber.next_number() - self.next) };
        self.missed.zip(last).map(|(before, last)| before + last)
    }
}
