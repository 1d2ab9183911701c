//! Broadcasts by connect: subscribers that join, receive and leave, and publishers that admit, pass a subscriber that
//! lags, wait for one that gates, and close.

use super::broadcast::{LARGE_BYTES, Publishing, SMALL_BYTES, Subscribing};
use super::*;
use pelton::options::maker;
use pelton::{Deadline, Policy, StartFrom};

impl Publishing {
    /// Waits for the socket of a dying process, which closes its descriptors one after the other.
    fn listen(run: &Run, bytes: u64) -> Publishing {
        let until = deadline();
        loop {
            match with_capacity(SMALL).publish_at(&run.name()) {
                Err(Error::InUse { .. }) if Instant::now() < until => std::thread::sleep(Duration::from_micros(50)),
                publisher => return Publishing::of(publisher.unwrap(), bytes),
            }
        }
    }

    /// More messages than the lane takes, each of which the other subscriber receives. A subscriber that is gone holds
    /// nobody up.
    #[track_caller]
    fn send_a_lap_to(&mut self, other: &mut Subscribing) {
        for _ in 0..SMALL / SMALL_BYTES + 1 {
            self.send(1);
            other.read_to(self.next());
        }
        assert_eq!(self.publisher.admit().unwrap(), 1, "subscribers of the publisher");
    }
}

fn subscribing(policy: Policy) -> Options<maker::Subscribe> {
    opened::<maker::Subscribe>().policy(policy).start_from(StartFrom::Oldest).connect_deadline(deadline())
}

/// A publisher, and a subscriber in its own process that gates, and notices nothing of the victim.
fn publisher_and_another(run: &Run) -> (Publishing, Subscribing) {
    let mut publishing = Publishing::listen(run, SMALL_BYTES);
    let other = publishing.publisher.subscriber(&subscribing(Policy::Gate)).unwrap();
    (publishing, Subscribing::of(other, SMALL_BYTES))
}

/// A subscriber that connects now receives what is sent, and nothing remains.
#[track_caller]
fn works(run: &Run, mut publishing: Publishing, mut other: Subscribing) {
    let mut opening = subscribing(Policy::Gate).start_connect_subscriber(&run.name()).unwrap();
    let until = deadline();
    let subscriber = loop {
        publishing.publisher.admit().unwrap();
        if let Some(subscriber) = opening.try_finish().unwrap() {
            break subscriber;
        }
        assert!(Instant::now() < until, "the publisher does not admit");
    };
    let mut next = Subscribing::of(subscriber, SMALL_BYTES);
    for _ in 0..3 {
        publishing.send(2);
        next.read_to(publishing.next());
        other.read_to(publishing.next());
    }
    assert_eq!(other.subscriber.missed(), 0);
    drop((next, other, opening, publishing));
    assert_eq!(run.left(), Vec::<String>::new());
}

/// A subscriber joins and receives. While it is stopped, the publisher passes a whole lane, unless that waits for it.
pub fn subscriber_joins(run: &Run, policy: Policy) {
    let (mut publishing, mut other) = publisher_and_another(run);
    publishing.send(30);
    other.read_to(publishing.next());
    let victim = fork(Last::Killed, |inside| {
        inside.count();
        let subscriber = subscribing(policy).connect_subscriber(&run.name()).unwrap();
        let mut subscribing = Subscribing::of(subscriber, SMALL_BYTES);
        subscribing.read(3);
        subscribing
    });
    let until = deadline();
    while victim.state() != 'Z' {
        publishing.publisher.admit().unwrap();
        victim.watch_once(&mut || {
            publishing.lap();
            other.read_to(publishing.next());
        });
        // For one that joins late, and wants three.
        publishing.one(Deadline::Now);
        other.read_to(publishing.next());
        assert!(Instant::now() < until, "the victim hangs");
        std::thread::sleep(Duration::from_micros(50));
    }
    run.finish(victim, || ());
    publishing.send_a_lap_to(&mut other);
    works(run, publishing, other);
}

pub fn subscriber_leaves(run: &Run, policy: Policy) {
    let (mut publishing, mut other) = publisher_and_another(run);
    let victim = fork(Last::Exit, |inside| {
        let subscriber = subscribing(policy).connect_subscriber(&run.name()).unwrap();
        let mut subscribing = Subscribing::of(subscriber, SMALL_BYTES);
        inside.synchronize();
        subscribing.read(2);
        inside.count();
        drop(subscribing);
    });
    assert!(publishing.publisher.wait_subscribers_until(2, deadline()).unwrap());
    victim.wait_for_child();
    publishing.send(5);
    victim.go();
    run.finish(victim, || publishing.send(1));
    other.read_to(publishing.next());
    publishing.send_a_lap_to(&mut other);
    works(run, publishing, other);
}

/// A publisher admits a subscriber and sends more than a lane takes; or, when it `closes`, only that counts. The
/// subscriber receives what the victim has committed, and goes on with its successor.
pub fn publisher_ends(run: &Run, policy: Policy, closes: bool) {
    const SENT: u64 = 6;
    let (gone, liveness_pipe) = liveness_pipe();
    let successor = successor(gone, &liveness_pipe, || {
        let mut publishing = Publishing::listen(run, LARGE_BYTES);
        assert!(publishing.publisher.wait_subscribers_until(1, deadline()).unwrap());
        // The victim's notes are checked by now.
        shared().first.store(1, SeqCst);
        publishing.send(3);
    });
    let victim = fork(if closes { Last::Exit } else { Last::Killed }, move |inside| {
        inside.count_if(!closes);
        let mut publishing = Publishing::listen(run, LARGE_BYTES);
        assert!(publishing.publisher.wait_subscribers_until(1, deadline()).unwrap());
        publishing.send(SENT);
        if closes {
            inside.count();
            drop(publishing);
            return None;
        }
        Some((publishing, liveness_pipe))
    });
    let waker = run.stops.then(|| continue_when_stopped(&victim));
    let mut subscribing = Subscribing::of(subscribing(policy).connect_subscriber(&run.name()).unwrap(), LARGE_BYTES);
    let until = deadline();
    loop {
        // Each publisher's messages count from 1.
        subscribing.next = 1;
        let end = loop {
            match subscribing.one(deadline()) {
                Ok(received) => assert!(received && Instant::now() < until, "nothing came after {}", subscribing.next),
                Err(end) => break end,
            }
        };
        assert!(is_end(&end), "{end}");
        if shared().first.load(SeqCst) == 1 {
            break;
        }
        let committed = shared().committed.load(SeqCst).max(1);
        assert!((committed..=committed + 1).contains(&subscribing.next), "{} of {committed}", subscribing.next);
        // A publisher that was only stopped has sent all.
        assert!(committed > SENT || !run.stops, "the end came after {committed}");
        assert!(subscribing.subscriber.resume_until(deadline()).unwrap());
    }
    assert_eq!(subscribing.next, 4);
    run.finish(victim, || ());
    successor.wait_for_success();
    if let Some(waker) = waker {
        waker.wait_for_success();
    }
    drop(subscribing);
    assert_eq!(run.left(), Vec::<String>::new());
}
