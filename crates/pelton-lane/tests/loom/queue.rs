//! Python's queue under loom: the doorbell by which its processes wake each other, and the marks that `join` reads, in
//! every interleaving. `./run loom` runs these models, then again with each half of an edge left out
//! (`PELTON_WEAKEN`), when a model must fail.
//!
//! The models include `queue_edges.rs` of `bindings/python`. They are here because loom cannot run the rest of it.

#[path = "../../../../bindings/python/src/queue_edges.rs"]
#[allow(dead_code, reason = "a hint has no edge, so no model")]
mod edges;

use edges::{Doorbell, after_marks, before_mark};
use loom::sync::atomic::{AtomicU32, Ordering::Relaxed};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use pelton_lane::sync::Edge;

/// The lane's edges, as in `src/edges.rs`.
const PUBLISH: Edge = Edge::named("publish");
const RELEASE: Edge = Edge::named("release");

/// A queue, as a model: its lane is the number of items that were put, and of those that were taken.
struct Queue {
    put: AtomicU32,
    taken: AtomicU32,
    items: Doorbell,
    /// The kernel's side of the futex: it compares the word, and wakes, under one lock.
    futex: (Mutex<()>, Condvar),
}

impl Queue {
    fn new() -> Arc<Queue> {
        let futex = (Mutex::new(()), Condvar::new());
        Arc::new(Queue { put: AtomicU32::new(0), taken: AtomicU32::new(0), items: Doorbell::default(), futex })
    }

    /// As a producer, without the lock of its role.
    fn put(&self) {
        self.put.fetch_add(1, PUBLISH.store()); // [publish]
    }

    fn ring(&self) {
        if self.items.ring() {
            drop(self.futex.0.lock().unwrap());
            self.futex.1.notify_all();
        }
    }

    /// As a consumer: waits until so many items were put. Loom reports a missing ring as a deadlock.
    fn wait_for(&self, count: u32) {
        while self.put.load(PUBLISH.load()) < count {
            let announced = self.items.want();
            // [publish]
            if self.put.load(PUBLISH.load()) < count {
                let futex = self.futex.0.lock().unwrap();
                if self.items.word().load(Relaxed) == announced {
                    drop(self.futex.1.wait(futex).unwrap());
                }
            }
        }
    }
}

#[test]
fn want_ring_a_waiting_consumer_is_woken() {
    loom::model(|| {
        let queue = Queue::new();
        let producer = queue.clone();
        let producer = thread::spawn(move || {
            producer.put();
            producer.ring();
        });
        queue.wait_for(1);
        producer.join().unwrap();
    });
}

/// The consumer may announce its next sleep while the ring of the first item is on its way.
#[test]
fn want_ring_a_consumer_is_woken_again() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let queue = Queue::new();
        let producers = [queue.clone(), queue.clone()].map(|queue| {
            thread::spawn(move || {
                queue.put();
                queue.ring();
            })
        });
        queue.wait_for(1);
        queue.wait_for(2);
        producers.into_iter().for_each(|producer| producer.join().unwrap());
    });
}

const CLAIMED: u32 = 1;
const DONE: u32 = 2;

/// As `File::join_until`, once: whether no item is in the lane, and none is in work. `marks` has, for each of two
/// consumers, that of its item.
fn is_joined(queue: &Queue, marks: &[AtomicU32; 2]) -> bool {
    let head = || queue.taken.load(RELEASE.load()); // [release]
    // In this order, so that the tail is not before the head.
    let is_empty = || {
        let head = head();
        queue.put.load(PUBLISH.load()) == head // [publish]
    };
    let before = head();
    if !is_empty() || marks.iter().any(|mark| mark.load(Relaxed) == CLAIMED) {
        return false;
    }
    after_marks();
    is_empty() && head() == before
}

/// A consumer puts an item that follows from its own, and is done. Another one takes that item meanwhile.
#[test]
fn mark_marked_join_finds_the_item_that_followed() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let shared = Arc::new((Queue::new(), [AtomicU32::new(CLAIMED), AtomicU32::new(0)]));
        let (first, second) = (shared.clone(), shared.clone());
        let first = thread::spawn(move || {
            first.0.put();
            before_mark();
            first.1[0].store(DONE, Relaxed);
        });
        let second = thread::spawn(move || {
            // [publish]
            if second.0.put.load(PUBLISH.load()) == 1 {
                second.1[1].store(CLAIMED, Relaxed);
                second.0.taken.store(1, RELEASE.store()); // [release]
            }
        });
        // Nobody has done the item that followed.
        assert!(!is_joined(&shared.0, &shared.1), "join returns while an item is in work");
        first.join().unwrap();
        second.join().unwrap();
    });
}
