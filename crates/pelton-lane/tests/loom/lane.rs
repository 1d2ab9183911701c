//! The lane under loom: every interleaving, and every value that the memory model lets a load return.
//!
//!     RUSTFLAGS='--cfg loom' cargo test --release -p pelton-lane --test loom
//!
//! With PELTON_WEAKEN=NAME an edge or rule is left out (see src/edges.rs), and the model named after it must fail;
//! `./run test` does that for each.

use loom::sync::atomic::{Ordering::SeqCst, fence};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use pelton_lane::*;
use std::ptr::NonNull;

/// The pages and slots of one model run, freed at its end.
struct Pages {
    memory: Memory,
    slots: *mut [Slot],
}

// SAFETY: loom's atomics and cells, which it watches itself.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    fn new(capacity: u64, start: Position) -> Arc<Pages> {
        let slots = Box::into_raw((0..capacity / 8).map(|_| Slot::new()).collect::<Vec<_>>().into_boxed_slice());
        let memory = Memory {
            producer: NonNull::from(Box::leak(Box::new(ProducerPage::new(
                capacity,
                message_bytes_limit(capacity),
                1,
                1,
            )))),
            consumer: NonNull::from(Box::leak(Box::new(ConsumerPage::new(start, 1, 2)))),
            receiver: NonNull::from(Box::leak(Box::new(ReceiverPage::new()))),
            // SAFETY: freed in the drop below.
            data: unsafe { Data::new(NonNull::new(slots.cast()).unwrap(), capacity) },
        };
        Arc::new(Pages { memory, slots })
    }

    fn producer(&self, can_barrier: bool) -> Producer {
        // SAFETY: the test keeps the pages as long as the sides; one producer.
        unsafe {
            let start = self.memory.consumer.as_ref().head();
            Producer::attach(self.memory, start, start, 0, can_barrier).unwrap()
        }
    }

    fn consumer(&self, can_barrier: bool) -> Consumer {
        // SAFETY: as above; one consumer.
        unsafe { Consumer::attach(self.memory, message_bytes_limit(self.memory.data.capacity()), can_barrier).unwrap() }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: made by Box in `new`, freed once.
        unsafe {
            drop(Box::from_raw(self.memory.producer.as_ptr()));
            drop(Box::from_raw(self.memory.consumer.as_ptr()));
            drop(Box::from_raw(self.memory.receiver.as_ptr()));
            drop(Box::from_raw(self.slots));
        }
    }
}

/// What an eventfd is to the two sides: a ring that is remembered until it is drained.
struct Bell(Mutex<bool>, Condvar);

impl Bell {
    fn new() -> Arc<Bell> {
        Arc::new(Bell(Mutex::new(false), Condvar::new()))
    }
    fn ring(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_one();
    }
    /// Sleeps until rung; a ring that nobody sends is a deadlock, which loom reports.
    fn wait(&self) {
        let mut rung = self.0.lock().unwrap();
        while !*rung {
            rung = self.1.wait(rung).unwrap();
        }
        *rung = false;
    }
}

/// The sleeper's half of the barrier: `membarrier`, or a full fence where there is none. To loom both are a fence.
fn heavy() {
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

fn model(preemptions: usize, f: impl Fn() + Sync + Send + 'static) {
    model_membarrier(false);
    check(preemptions, f);
}

/// A model in which somebody sleeps: by membarrier if both sides have it, else the waker's own fence has to do.
fn sleep_model(preemptions: usize, membarrier: bool, f: impl Fn() + Sync + Send + 'static) {
    model_membarrier(membarrier);
    check(preemptions, f);
}

fn check(preemptions: usize, f: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(f);
}

/// [publish]: a message that is seen is seen whole, and nothing is taken for one that is not.
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

/// [publish]: the header after the last record is cleared, so that what a lap before left there is no record.
#[test]
fn clear_old_bytes_are_never_taken_for_a_record() {
    model(3, || {
        let pages = Pages::new(128, Position::START);
        let (mut producer, mut consumer) = (pages.producer(true), pages.consumer(true));
        // A first lap of records whose headers stand where the second lap's end will be.
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

/// [release]: the producer writes over a record only after its reader is done; across the early wrap too.
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

/// [publish]: the messages of a batch, and a wrap's jump together with the record that it leads to, appear at once.
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
        assert!(receive(&mut consumer, &[2; 24]).is_some(), "the second comes with the first");
        sender.join().unwrap();
    });
}

/// [sleep], receiver: whoever sleeps is rung for what was published, whichever side fences.
fn sleeping_receiver(producer_barrier: bool, consumer_barrier: bool, messages: u8) {
    sleep_model(3, producer_barrier && consumer_barrier, move || {
        let pages = Pages::new(128, Position::START);
        let (mut producer, mut consumer) = (pages.producer(producer_barrier), pages.consumer(consumer_barrier));
        // SAFETY: the pages live to the end of the model; this is the page's only writer.
        let mut sleeper = unsafe { Sleeper::of_receiver(pages.memory.receiver, consumer_barrier) };
        let bell = Bell::new();
        let sender = thread::spawn({
            let bell = bell.clone();
            move || {
                for n in 1..=messages {
                    if try_send(&mut producer, &[n; 4]).unwrap() {
                        bell.ring();
                    }
                }
            }
        });
        for n in 1..=messages {
            while receive(&mut consumer, &[n; 4]).is_none() {
                sleeper.arm(heavy);
                if consumer.peek().unwrap().is_none() {
                    bell.wait();
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
fn fence_a_sleeping_receiver_is_rung_when_the_sender_cannot_be_reached() {
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

/// [sleep], producer: one that waits for room is rung when a good part is free, or all of it.
fn sleeping_producer(producer_barrier: bool, consumer_barrier: bool) {
    // The numbers begin far from 0, which is what a stale look at room_seq would find: it must do no harm.
    sleep_model(2, producer_barrier && consumer_barrier, move || {
        let pages = Pages::new(128, Position { offset: 0, seq: 0x9000_0000 });
        let (mut producer, mut consumer) = (pages.producer(producer_barrier), pages.consumer(consumer_barrier));
        let bell = Bell::new();
        for n in 1..=3u8 {
            assert_eq!(try_send(&mut producer, &[n; 32]), Some(false));
        }
        let sender = thread::spawn({
            let bell = bell.clone();
            move || {
                while try_send(&mut producer, &[4; 32]).is_none() {
                    if producer.arm(Some(32), heavy).unwrap() {
                        bell.wait();
                    }
                    producer.disarm();
                }
            }
        });
        for n in 1..=3u8 {
            if receive(&mut consumer, &[n; 32]).unwrap() {
                bell.ring();
            }
        }
        sender.join().unwrap();
        assert!(receive(&mut consumer, &[4; 32]).is_some());
    });
}

#[test]
fn light_heavy_a_producer_that_waits_for_room_is_rung_with_membarrier() {
    sleeping_producer(true, true);
}

#[test]
fn fence_a_producer_that_waits_for_room_is_rung_when_the_receiver_cannot_be_reached() {
    sleeping_producer(true, false);
}

#[test]
fn fence_a_producer_without_membarrier_that_waits_for_room_is_rung() {
    sleeping_producer(false, true);
}

#[test]
fn fence_a_producer_that_waits_for_room_is_rung_when_neither_side_has_membarrier() {
    sleeping_producer(false, false);
}

/// [sleep], by choice: a sleeper that relies on the sender's fences is rung, also by one that has just stopped. No membarrier
/// is run in these models, and the light barrier is none: who cannot rely on fences does not sleep.
#[test]
fn fence_own_stop_a_receiver_that_relies_on_fences_by_choice_is_rung() {
    // By the message at which the sender stops, which nothing follows, and by the one after it.
    relying_receiver(3);
    relying_receiver(4);
}

fn relying_receiver(last: u8) {
    sleep_model(3, false, move || {
        let pages = Pages::new(128, Position::START);
        let (mut producer, mut consumer) = (pages.producer(true), pages.consumer(true));
        // SAFETY: the pages live to the end of the model; this is the page's only writer.
        let mut sleeper = unsafe { Sleeper::of_receiver(pages.memory.receiver, true) };
        // A ring, after which it fences, and a message that nobody waits for, so that it stops at the next such.
        sleeper.arm(|| ());
        assert_eq!(try_send(&mut producer, &[1; 4]), Some(true));
        sleeper.disarm();
        assert!(receive(&mut consumer, &[1; 4]).is_some());
        assert_eq!(try_send(&mut producer, &[2; 4]), Some(false));
        assert!(receive(&mut consumer, &[2; 4]).is_some());
        assert!(consumer.is_producer_fencing());
        let bell = Bell::new();
        let sender = thread::spawn({
            let bell = bell.clone();
            move || {
                for n in 3..=last {
                    if try_send(&mut producer, &[n; 4]).unwrap() {
                        bell.ring();
                    }
                }
            }
        });
        for n in 3..=last {
            while receive(&mut consumer, &[n; 4]).is_none() {
                let mut relies = false;
                sleeper.arm(|| relies = consumer.is_producer_fencing());
                if consumer.peek().unwrap().is_none() {
                    if relies { bell.wait() } else { thread::yield_now() }
                }
                sleeper.disarm();
            }
        }
        sender.join().unwrap();
    });
}

/// [sleep], by choice, the other way round: a producer that waits for room, and a consumer that stops fencing meanwhile.
#[test]
fn fence_own_stop_a_producer_that_relies_on_fences_by_choice_is_rung() {
    sleep_model(3, false, || {
        let pages = Pages::new(128, Position::START);
        let (mut producer, mut consumer) = (pages.producer(true), pages.consumer(true));
        assert_eq!(try_send(&mut producer, &[1; 32]), Some(false));
        // A ring, after which it fences, and a release that nobody waits for, so that it stops at the next such.
        assert!(producer.arm(None, || ()).unwrap());
        assert_eq!(receive(&mut consumer, &[1; 32]), Some(true));
        producer.disarm();
        assert_eq!(try_send(&mut producer, &[2; 32]), Some(false));
        assert_eq!(receive(&mut consumer, &[2; 32]), Some(false));
        assert!(consumer.consumer_page().is_fenced());
        let bell = Bell::new();
        for n in 3..=4u8 {
            assert_eq!(try_send(&mut producer, &[n; 32]), Some(false));
        }
        let sender = thread::spawn({
            let bell = bell.clone();
            move || {
                while producer.refresh_head().unwrap() != 0 {
                    let mut relies = true;
                    if producer.arm(None, || relies = false).unwrap() {
                        if relies { bell.wait() } else { thread::yield_now() }
                    }
                    producer.disarm();
                }
            }
        });
        for n in 3..=4u8 {
            if receive(&mut consumer, &[n; 32]).unwrap() {
                bell.ring();
            }
        }
        sender.join().unwrap();
    });
}

/// [fenced]: what was published before the sender began to fence is seen by a sleeper that relies on that.
#[test]
fn fenced_what_was_published_without_a_fence_is_seen_by_who_relies_on_fences() {
    sleep_model(4, false, || {
        let pages = Pages::new(128, Position::START);
        let (mut producer, mut consumer) = (pages.producer(true), pages.consumer(true));
        // SAFETY: the pages live to the end of the model; this is the page's only writer.
        let mut sleeper = unsafe { Sleeper::of_receiver(pages.memory.receiver, true) };
        sleeper.arm(|| ());
        let sender = thread::spawn(move || {
            try_send(&mut producer, &[1; 4]).unwrap();
        });
        // It has not slept, and announces its next sleep before it is rung for the first.
        sleeper.disarm();
        let mut relies = false;
        sleeper.arm(|| relies = consumer.is_producer_fencing());
        if relies {
            assert!(receive(&mut consumer, &[1; 4]).is_some(), "the sender fences, and its message is not there");
        }
        sender.join().unwrap();
    });
}

/// [close]: what was committed before closing is there once closing is seen.
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
        assert!(received, "closed, and the message is not there");
        sender.join().unwrap();
    });
}

/// [sleep]: closing wakes a receiver that is about to sleep, since closing always rings an armed side.
#[test]
fn close_a_receiver_about_to_sleep_learns_that_the_producer_closed() {
    model(4, || {
        let pages = Pages::new(128, Position::START);
        let (mut producer, mut consumer) = (pages.producer(true), pages.consumer(true));
        // SAFETY: the pages live to the end of the model; this is the page's only writer.
        let mut sleeper = unsafe { Sleeper::of_receiver(pages.memory.receiver, true) };
        let bell = Bell::new();
        let sender = thread::spawn({
            let bell = bell.clone();
            move || {
                producer.close();
                bell.ring();
            }
        });
        while !consumer.has_producer_closed() {
            sleeper.arm(heavy);
            if consumer.peek().unwrap().is_none() && !consumer.has_producer_closed() {
                bell.wait();
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
        // The one before closed; its successor begins in the same page while the other side looks.
        pages.producer(true).close();
        let other = pages.clone();
        let looking = loom::thread::spawn(move || {
            // SAFETY: the pages live to the end of the model.
            let page = unsafe { other.memory.producer.as_ref() };
            if page.generation() == 2 {
                assert!(!page.is_closed(), "a new generation was seen with its predecessor's state");
            }
        });
        // SAFETY: as above; this is the page's only writer.
        unsafe { pages.memory.producer.as_ref() }.start_generation(3);
        looking.join().unwrap();
    });
}

#[test]
fn close_what_was_released_is_seen_by_who_finds_the_word_alone() {
    model(4, || {
        let pages = Pages::new(128, Position::START);
        let mut producer = pages.producer(true);
        // SAFETY: the pages live to the end of the model; this is the page's only writer.
        let mut sleeper = unsafe { Sleeper::of_receiver(pages.memory.receiver, true) };
        let mut consumer = pages.consumer(true);
        try_send(&mut producer, b"x").unwrap();
        let closing = loom::thread::spawn(move || {
            receive(&mut consumer, b"x").unwrap();
            sleeper.close();
        });
        if producer.has_consumer_closed() {
            assert_eq!(producer.refresh_head().unwrap(), 0, "what was released before the close counts as unreleased");
        }
        closing.join().unwrap();
    });
}
