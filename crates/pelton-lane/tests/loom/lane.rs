//! The lane under loom: every interleaving, and every value that a load may return by the memory model.
//!
//!     RUSTFLAGS='--cfg loom' cargo test --release -p pelton-lane --test loom
//!
//! PELTON_WEAKEN=NAME leaves out an edge or a rule (see src/edges.rs), and a model whose name begins with NAME must
//! fail. `./run loom` does that for each name.

use loom::sync::atomic::{Ordering::SeqCst, fence};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use pelton_lane::*;
use std::ptr::NonNull;

/// The pages and words of one run of a model, freed at its end.
struct Pages {
    memory: Memory,
    words: *mut [LoomWord],
}

// SAFETY: loom checks each access to its atomics and cells.
unsafe impl Send for Pages {}
// SAFETY: loom checks each access to its atomics and cells.
unsafe impl Sync for Pages {}

impl Pages {
    fn new(capacity: u64, start: Position) -> Arc<Pages> {
        let words = Box::into_raw((0..capacity / 8).map(|_| LoomWord::new()).collect::<Vec<_>>().into_boxed_slice());
        let memory = Memory {
            producer: NonNull::from(Box::leak(Box::new(ProducerPage::new(
                capacity,
                message_bytes_limit(capacity),
                1,
                1,
            )))),
            consumer: NonNull::from(Box::leak(Box::new(ConsumerPage::new(start, 1, 2)))),
            receiver: NonNull::from(Box::leak(Box::new(ReceiverPage::new()))),
            // SAFETY: the words live until the drop below.
            data: unsafe { Data::new(NonNull::new(words.cast()).unwrap(), capacity) },
        };
        Arc::new(Pages { memory, words })
    }

    fn producer(&self, can_barrier: bool) -> Producer {
        // SAFETY: the pages outlive the sides, and the lane has one producer.
        unsafe {
            let start = self.memory.consumer.as_ref().head();
            Producer::attach(self.memory, start, start, 0, can_barrier).unwrap()
        }
    }

    fn consumer(&self, can_barrier: bool) -> Consumer {
        // SAFETY: the pages outlive the sides, and the lane has one consumer.
        unsafe { Consumer::attach(self.memory, message_bytes_limit(self.memory.data.capacity()), can_barrier).unwrap() }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: `new` made each pointer from a box; only this frees them, once.
        unsafe {
            drop(Box::from_raw(self.memory.producer.as_ptr()));
            drop(Box::from_raw(self.memory.consumer.as_ptr()));
            drop(Box::from_raw(self.memory.receiver.as_ptr()));
            drop(Box::from_raw(self.words));
        }
    }
}

/// A doorbell, as an eventfd is: it stores a ring until the sleeper drains it.
pub struct Doorbell(Mutex<bool>, Condvar);

impl Doorbell {
    pub fn new() -> Arc<Doorbell> {
        Arc::new(Doorbell(Mutex::new(false), Condvar::new()))
    }
    pub fn ring(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_one();
    }
    /// Sleeps until rung. Loom reports a missing ring as a deadlock.
    pub fn wait(&self) {
        let mut rung = self.0.lock().unwrap();
        while !*rung {
            rung = self.1.wait(rung).unwrap();
        }
        *rung = false;
    }
}

/// The sleeper's half of the barrier: `membarrier`, or a full fence without it. Under loom both are a fence.
pub fn heavy() {
    if std::env::var("PELTON_WEAKEN").as_deref() != Ok("heavy") {
        fence(SeqCst);
    }
}

fn try_send(producer: &mut Producer, payload: &[u8]) -> Option<bool> {
    let space = producer.try_reserve(payload.len() as u64).unwrap()?;
    producer.copy_in(space, payload);
    Some(producer.commit(space, payload.len() as u64) == Wake::Ring)
}

fn receive(consumer: &mut Consumer, expected: &[u8]) -> Option<bool> {
    let record = consumer.peek().unwrap()?;
    let mut payload = vec![0; record.bytes as usize];
    consumer.copy_out(&record, &mut payload);
    assert_eq!(payload, expected);
    Some(consumer.release(&record) == Wake::Ring)
}

pub fn model(preemptions: usize, f: impl Fn() + Sync + Send + 'static) {
    model_membarrier(false);
    check(preemptions, f);
}

/// A model with a sleeper. It uses `membarrier` if both sides have it; otherwise only the waker's own fence orders.
pub fn sleep_model(preemptions: usize, membarrier: bool, f: impl Fn() + Sync + Send + 'static) {
    model_membarrier(membarrier);
    check(preemptions, f);
}

fn check(preemptions: usize, f: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(f);
}

/// [publish]: a visible message is complete, and the consumer mistakes nothing else for a message.
#[test]
fn publish_a_message_is_seen_whole() {
    model(4, || {
        let pages = Pages::new(128, Position::START);
        let (mut producer, mut consumer) = (pages.producer(true), pages.consumer(true));
        let sender = thread::spawn(move || {
            for n in 1..=2u8 {
                assert_eq!(try_send(&mut producer, &[n; 12]), Some(false));
            }
        });
        for n in 1..=2u8 {
            while receive(&mut consumer, &[n; 12]).is_none() {
                thread::yield_now();
            }
        }
        sender.join().unwrap();
        assert_eq!(consumer.peek().unwrap(), None);
    });
}

/// [publish]: the header after the last record is cleared, so the bytes of an earlier lap are not a record.
#[test]
fn clear_old_bytes_are_never_taken_for_a_record() {
    model(3, || {
        let pages = Pages::new(128, Position::START);
        let (mut producer, mut consumer) = (pages.producer(true), pages.consumer(true));
        // The first lap has its headers where the second lap will end.
        for n in 1..=5u8 {
            assert_eq!(try_send(&mut producer, &[n; 16]), Some(false));
            assert!(receive(&mut consumer, &[n; 16]).is_some());
        }
        let sender = thread::spawn(move || {
            assert_eq!(try_send(&mut producer, &[9; 16]), Some(false));
        });
        while receive(&mut consumer, &[9; 16]).is_none() {
            thread::yield_now();
        }
        assert_eq!(consumer.peek(), Ok(None), "only what was sent");
        sender.join().unwrap();
    });
}

/// [release]: the producer overwrites a record only after the consumer has finished reading, also across an early wrap.
#[test]
fn release_space_is_not_written_over_while_it_is_read() {
    model(3, || {
        let pages = Pages::new(128, Position { offset: 40, seq: u32::MAX });
        let (mut producer, mut consumer) = (pages.producer(true), pages.consumer(true));
        let sender = thread::spawn(move || {
            for n in 1..=4u8 {
                while try_send(&mut producer, &[n; 32]).is_none() {
                    thread::yield_now();
                }
            }
        });
        for n in 1..=4u8 {
            while receive(&mut consumer, &[n; 32]).is_none() {
                thread::yield_now();
            }
        }
        sender.join().unwrap();
    });
}

/// [publish]: the messages of a batch become visible together, and so do a wrap's jump and the record at its target.
#[test]
fn publish_a_batch_across_the_wrap_is_seen_whole() {
    model(3, || {
        let pages = Pages::new(192, Position { offset: 120, seq: 7 });
        let (mut producer, mut consumer) = (pages.producer(true), pages.consumer(true));
        let sender = thread::spawn(move || {
            let mut batch = producer.try_begin_batch(2 * record_bytes(24)).unwrap().unwrap();
            for n in 1..=2u8 {
                let space = producer.batch_message(&mut batch, 24).unwrap();
                producer.copy_in(space, &[n; 24]);
            }
            assert_eq!(producer.commit_batch(batch), Wake::None);
        });
        while receive(&mut consumer, &[1; 24]).is_none() {
            thread::yield_now();
        }
        assert!(receive(&mut consumer, &[2; 24]).is_some(), "the second is visible with the first");
        sender.join().unwrap();
    });
}

/// [sleep], receiver: the producer rings a sleeping receiver after it publishes, whichever side fences.
fn sleeping_receiver(producer_barrier: bool, consumer_barrier: bool, messages: u8) {
    sleep_model(3, producer_barrier && consumer_barrier, move || {
        let pages = Pages::new(128, Position::START);
        let (mut producer, mut consumer) = (pages.producer(producer_barrier), pages.consumer(consumer_barrier));
        // SAFETY: the pages live to the end of the model, and nothing else writes this one.
        let mut sleeper = unsafe { Sleeper::of_receiver(pages.memory.receiver, consumer_barrier) };
        let doorbell = Doorbell::new();
        let sender = thread::spawn({
            let doorbell = doorbell.clone();
            move || {
                for n in 1..=messages {
                    if try_send(&mut producer, &[n; 4]).unwrap() {
                        doorbell.ring();
                    }
                }
            }
        });
        for n in 1..=messages {
            while receive(&mut consumer, &[n; 4]).is_none() {
                sleeper.arm(heavy);
                if consumer.peek().unwrap().is_none() {
                    doorbell.wait();
                }
                sleeper.disarm();
            }
        }
        sender.join().unwrap();
    });
}

#[test]
fn light_heavy_a_sleeping_receiver_is_rung_with_membarrier() {
    sleeping_receiver(true, true, 2);
}

#[test]
fn fence_a_sleeping_receiver_is_rung_when_no_membarrier_reaches_the_sender() {
    sleeping_receiver(false, true, 2);
}

#[test]
fn fence_a_sleeping_receiver_without_membarrier_is_rung() {
    sleeping_receiver(true, false, 2);
}

#[test]
fn fence_a_sleeping_receiver_is_rung_when_neither_side_has_membarrier() {
    sleeping_receiver(false, false, 2);
}

/// [sleep], producer: the consumer rings a producer that waits for space once half of the messages, or all, are
/// released.
fn sleeping_producer(producer_barrier: bool, consumer_barrier: bool) {
    // The numbers begin far from 0, the value that a stale load of room_seq returns. It must do no harm.
    sleep_model(2, producer_barrier && consumer_barrier, move || {
        let pages = Pages::new(128, Position { offset: 0, seq: 0x9000_0000 });
        let (mut producer, mut consumer) = (pages.producer(producer_barrier), pages.consumer(consumer_barrier));
        let doorbell = Doorbell::new();
        for n in 1..=3u8 {
            assert_eq!(try_send(&mut producer, &[n; 32]), Some(false));
        }
        let sender = thread::spawn({
            let doorbell = doorbell.clone();
            move || {
                while try_send(&mut producer, &[4; 32]).is_none() {
                    if producer.arm(Some(32), heavy).unwrap() {
                        doorbell.wait();
                    }
                    producer.disarm();
                }
            }
        });
        for n in 1..=3u8 {
            if receive(&mut consumer, &[n; 32]).unwrap() {
                doorbell.ring();
            }
        }
        sender.join().unwrap();
        assert!(receive(&mut consumer, &[4; 32]).is_some());
    });
}

#[test]
fn light_heavy_a_producer_that_waits_for_space_is_rung_with_membarrier() {
    sleeping_producer(true, true);
}

#[test]
fn fence_a_waiting_producer_is_rung_when_no_membarrier_reaches_the_receiver() {
    sleeping_producer(true, false);
}

#[test]
fn fence_a_waiting_producer_without_membarrier_is_rung() {
    sleeping_producer(false, true);
}

#[test]
fn fence_a_waiting_producer_is_rung_when_neither_side_has_membarrier() {
    sleeping_producer(false, false);
}

/// [sleep], by choice: the sender rings a sleeper that relies on its fences, also if it has just stopped fencing. These
/// models have no membarrier and an empty light barrier: a receiver that cannot rely on fences does not sleep.
#[test]
fn fence_own_stop_a_receiver_that_relies_on_fences_by_choice_is_rung() {
    // The last message is the one at which the sender stops fencing, or the one after it.
    relying_receiver(3);
    relying_receiver(4);
}

fn relying_receiver(last: u8) {
    sleep_model(3, false, move || {
        let pages = Pages::new(128, Position::START);
        let (mut producer, mut consumer) = (pages.producer(true), pages.consumer(true));
        // SAFETY: the pages live to the end of the model, and nothing else writes this one.
        let mut sleeper = unsafe { Sleeper::of_receiver(pages.memory.receiver, true) };
        // After this ring the sender fences. After this message without a ring, it stops at the next such message.
        sleeper.arm(|| ());
        assert_eq!(try_send(&mut producer, &[1; 4]), Some(true));
        sleeper.disarm();
        assert!(receive(&mut consumer, &[1; 4]).is_some());
        assert_eq!(try_send(&mut producer, &[2; 4]), Some(false));
        assert!(receive(&mut consumer, &[2; 4]).is_some());
        assert!(consumer.is_producer_fencing());
        let doorbell = Doorbell::new();
        let sender = thread::spawn({
            let doorbell = doorbell.clone();
            move || {
                for n in 3..=last {
                    if try_send(&mut producer, &[n; 4]).unwrap() {
                        doorbell.ring();
                    }
                }
            }
        });
        for n in 3..=last {
            while receive(&mut consumer, &[n; 4]).is_none() {
                let mut relies = false;
                sleeper.arm(|| relies = consumer.is_producer_fencing());
                if consumer.peek().unwrap().is_none() {
                    if relies { doorbell.wait() } else { thread::yield_now() }
                }
                sleeper.disarm();
            }
        }
        sender.join().unwrap();
    });
}

/// [sleep], by choice, the other way round: the consumer stops fencing while the producer waits for space.
#[test]
fn fence_own_stop_a_producer_that_relies_on_fences_by_choice_is_rung() {
    sleep_model(3, false, || {
        let pages = Pages::new(128, Position::START);
        let (mut producer, mut consumer) = (pages.producer(true), pages.consumer(true));
        assert_eq!(try_send(&mut producer, &[1; 32]), Some(false));
        // After this ring the consumer fences. After this release without a ring, it stops at the next such release.
        assert!(producer.arm(None, || ()).unwrap());
        assert_eq!(receive(&mut consumer, &[1; 32]), Some(true));
        producer.disarm();
        assert_eq!(try_send(&mut producer, &[2; 32]), Some(false));
        assert_eq!(receive(&mut consumer, &[2; 32]), Some(false));
        assert!(consumer.consumer_page().is_fenced());
        let doorbell = Doorbell::new();
        for n in 3..=4u8 {
            assert_eq!(try_send(&mut producer, &[n; 32]), Some(false));
        }
        let sender = thread::spawn({
            let doorbell = doorbell.clone();
            move || {
                while producer.refresh_head().unwrap() != 0 {
                    let mut relies = true;
                    if producer.arm(None, || relies = false).unwrap() {
                        if relies { doorbell.wait() } else { thread::yield_now() }
                    }
                    producer.disarm();
                }
            }
        });
        for n in 3..=4u8 {
            if receive(&mut consumer, &[n; 32]).unwrap() {
                doorbell.ring();
            }
        }
        sender.join().unwrap();
    });
}

/// [fenced]: messages published before the sender began to fence are visible to a sleeper that relies on its fences.
#[test]
fn fenced_an_unfenced_message_is_visible_to_a_sleeper_that_relies_on_fences() {
    sleep_model(4, false, || {
        let pages = Pages::new(128, Position::START);
        let (mut producer, mut consumer) = (pages.producer(true), pages.consumer(true));
        // SAFETY: the pages live to the end of the model, and nothing else writes this one.
        let mut sleeper = unsafe { Sleeper::of_receiver(pages.memory.receiver, true) };
        sleeper.arm(|| ());
        let sender = thread::spawn(move || {
            try_send(&mut producer, &[1; 4]).unwrap();
        });
        // The receiver does not sleep. It announces its next sleep before the sender rings for the first.
        sleeper.disarm();
        let mut relies = false;
        sleeper.arm(|| relies = consumer.is_producer_fencing());
        if relies {
            assert!(receive(&mut consumer, &[1; 4]).is_some(), "the sender fences, but its message is not visible");
        }
        sender.join().unwrap();
    });
}

/// [close]: once the close is visible, so is everything committed before it.
#[test]
fn close_the_last_message_is_seen_before_the_end() {
    model(4, || {
        let pages = Pages::new(128, Position::START);
        let (mut producer, mut consumer) = (pages.producer(true), pages.consumer(true));
        let sender = thread::spawn(move || {
            assert_eq!(try_send(&mut producer, &[1; 8]), Some(false));
            producer.close();
        });
        let mut received = false;
        loop {
            let closed = consumer.has_producer_closed();
            received |= receive(&mut consumer, &[1; 8]).is_some();
            if closed {
                break;
            }
            thread::yield_now();
        }
        assert!(received, "the lane is closed, but its last message is not visible");
        sender.join().unwrap();
    });
}

/// [sleep]: closing always rings, so it wakes a receiver that is about to sleep.
#[test]
fn close_a_receiver_about_to_sleep_detects_that_the_producer_closed() {
    model(4, || {
        let pages = Pages::new(128, Position::START);
        let (mut producer, mut consumer) = (pages.producer(true), pages.consumer(true));
        // SAFETY: the pages live to the end of the model, and nothing else writes this one.
        let mut sleeper = unsafe { Sleeper::of_receiver(pages.memory.receiver, true) };
        let doorbell = Doorbell::new();
        let sender = thread::spawn({
            let doorbell = doorbell.clone();
            move || {
                producer.close();
                doorbell.ring();
            }
        });
        while !consumer.has_producer_closed() {
            sleeper.arm(heavy);
            if consumer.peek().unwrap().is_none() && !consumer.has_producer_closed() {
                doorbell.wait();
            }
            sleeper.disarm();
        }
        sender.join().unwrap();
    });
}

#[test]
fn close_a_successor_is_not_taken_for_its_predecessor_that_closed() {
    model(4, || {
        let pages = Pages::new(64, Position::START);
        // The predecessor has closed. Its successor starts in the same page while the peer reads it.
        pages.producer(true).close();
        let other = pages.clone();
        let reader = loom::thread::spawn(move || {
            // SAFETY: `other` keeps the pages alive.
            let page = unsafe { other.memory.producer.as_ref() };
            if page.generation() == 2 {
                assert!(!page.is_closed(), "the new generation is visible with its predecessor's state");
            }
        });
        // SAFETY: the pages live to the end of the model, and nothing else writes this one.
        unsafe { pages.memory.producer.as_ref() }.start_generation(3);
        reader.join().unwrap();
    });
}

#[test]
fn close_a_closed_sleep_word_makes_the_last_releases_visible() {
    model(4, || {
        let pages = Pages::new(128, Position::START);
        let mut producer = pages.producer(true);
        // SAFETY: the pages live to the end of the model, and nothing else writes this one.
        let mut sleeper = unsafe { Sleeper::of_receiver(pages.memory.receiver, true) };
        let mut consumer = pages.consumer(true);
        try_send(&mut producer, b"x").unwrap();
        let closing = loom::thread::spawn(move || {
            receive(&mut consumer, b"x").unwrap();
            sleeper.close();
        });
        if producer.has_consumer_closed() {
            assert_eq!(producer.refresh_head().unwrap(), 0, "the close is visible, but the releases before it are not");
        }
        closing.join().unwrap();
    });
}
