//! Two threads over one lane, for the sanitizers and Miri. Each of Miri's seeds has another interleaving, and other
//! values that a load may return. (`tests/loom` explores every interleaving of smaller models.)

use crate::fixture::*;
use pelton_lane::*;
use std::thread;

/// Several laps of a small lane: one thread reads each payload that the other has written, then the other reuses its
/// space.
#[test]
fn messages_pass_between_two_threads_whole_and_in_order() {
    let pages = Pages::new(4096, Position { offset: 0, seq: u32::MAX - 5 });
    let (mut producer, mut consumer) = pages.attach();
    let size = |number: u64| (number * 29 % 900) as usize;
    let count = if cfg!(miri) { 40 } else { 10_000 };
    thread::scope(|scope| {
        scope.spawn(move || {
            for number in 0..count {
                while !send(&mut producer, &payload(number, size(number))) {
                    thread::yield_now();
                }
            }
            producer.close();
        });
        for number in 0..count {
            let message = loop {
                if let Some(message) = receive(&mut consumer) {
                    break message;
                }
                thread::yield_now();
            };
            assert_eq!(message, payload(number, size(number)));
        }
        while !consumer.has_producer_closed() {
            thread::yield_now();
        }
        assert_eq!(receive(&mut consumer), None);
    });
}

/// With full fences on both sides, as these tools have no membarrier, the waker rings each sleep.
#[test]
fn a_sleeper_that_fences_is_rung() {
    let pages = Pages::new(4096, Position::START);
    // SAFETY: the pages live as long as the test, and nothing else writes this page.
    let mut sleeper = unsafe { Sleeper::of_receiver(pages.memory.receiver, false) };
    let (mut producer, mut consumer) = pages.attach_with(false, false);
    let count = if cfg!(miri) { 20 } else { 5_000 };
    let (ring, doorbell) = std::sync::mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            for number in 0..count {
                let space = loop {
                    if let Some(space) = producer.try_reserve(8).unwrap() {
                        break space;
                    }
                    thread::yield_now();
                };
                producer.copy_in(space, &payload(number, 8));
                if producer.commit(space, 8) == Wake::Ring {
                    ring.send(()).unwrap();
                }
            }
        });
        for number in 0..count {
            let message = loop {
                if let Some(message) = receive(&mut consumer) {
                    break message;
                }
                sleeper.arm(|| std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst));
                if consumer.peek().unwrap().is_none() {
                    // Without a ring this is a deadlock.
                    doorbell.recv().unwrap();
                }
                sleeper.disarm();
            };
            assert_eq!(message, payload(number, 8));
        }
    });
}
