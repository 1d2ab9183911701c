//! A broadcast lane between threads, for the sanitizers and Miri: each consumer by its own policy.

use crate::broadcast::{Broadcast, publish, receive};
use crate::fixture::payload;
use pelton_lane::*;
use std::thread;

/// Several laps of a small lane, with a consumer that gates, one that is passed, and one of the newest message.
#[test]
fn threads_receive_by_their_policies_whole_and_counted() {
    let lane = Broadcast::new(4096);
    let mut producer = lane.producer_from(0xffff_ffff - 5, true);
    let mut gating = lane.join(&mut producer, Policy::Gate, StartFrom::Now);
    let lagging = lane.join(&mut producer, Policy::Lag { slack: 512 }, StartFrom::Now);
    let latest = lane.join(&mut producer, Policy::Latest, StartFrom::Now);
    let size = |number: u64| (number * 29 % 900) as usize;
    let count = if cfg!(miri) { 60 } else { 20_000 };
    thread::scope(|scope| {
        scope.spawn(move || {
            for number in 0..count {
                while publish(&mut producer, &payload(number, size(number))).is_none() {
                    thread::yield_now();
                }
            }
            producer.close();
        });
        for mut consumer in [lagging, latest] {
            scope.spawn(move || {
                let first = 0xffff_ffff - 5;
                let (mut buffer, mut messages, mut missed) = (Vec::new(), 0, 0);
                loop {
                    let closed = consumer.has_producer_closed();
                    match consumer.copy(&mut buffer).unwrap() {
                        Some(Copied::Message) => {
                            let number = consumer.number() - 1 - first;
                            assert!(buffer == payload(number, size(number)), "message {number}");
                            messages += 1;
                        }
                        Some(Copied::Missed(more)) => missed += more,
                        None if closed => break,
                        None => thread::yield_now(),
                    }
                    let _ = consumer.release();
                }
                assert_eq!(consumer.number(), first + count, "the last message arrives");
                if consumer.policy() != Policy::Latest {
                    assert_eq!(messages + missed, count, "each message is received or counted");
                }
            });
        }
        for number in 0..count {
            let message = loop {
                if let Some(message) = receive(&mut gating) {
                    break message;
                }
                thread::yield_now();
            };
            assert!(message == payload(number, size(number)));
        }
    });
}
