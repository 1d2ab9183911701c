//! Calls under loom: what threads that answer and the service's loop tell each other without a lock, in every order. `./run loom`
//! runs these models, and each again with an edge left out (`PELTON_WEAKEN`), when one must fail.
//!
//! Here and not beside the crate `pelton`, which has what loom knows nothing of: its `call/edges.rs` is taken as it is.

#[path = "../../../pelton/src/call/edges.rs"]
mod edges;

use edges::{Away, Stirred};
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use loom::sync::{Arc, Mutex};
use loom::thread;
use pelton_lane::sync::Edge;

/// Of the lanes, `pelton-lane/src/edges.rs`.
const PUBLISH: Edge = Edge::named("publish");

/// A client, as far as this goes: its lane is a number of answers, of which loom sees whoever has it while another has.
struct Client {
    away: Away,
    lock: Mutex<()>,
    lane: UnsafeCell<u32>,
    frees: UnsafeCell<u32>,
}

// What the models are to show.
unsafe impl Sync for Client {}
unsafe impl Send for Client {}

impl Client {
    fn new() -> Arc<Client> {
        let (away, lock) = (Away::new(), Mutex::new(()));
        Arc::new(Client { away, lock, lane: UnsafeCell::new(0), frees: UnsafeCell::new(0) })
    }

    fn answer(&self) {
        self.lane.with_mut(|lane| unsafe { *lane += 1 });
    }

    /// As who has taken a responder away.
    fn answer_and_come_back(&self) {
        let lock = self.lock.lock().unwrap();
        self.answer();
        drop(lock);
        if self.away.come_back() {
            self.free();
        }
    }

    /// As the loop, with a client that it has lent.
    fn answer_in_the_loop(&self) {
        if self.away.is_nobody() {
            self.answer();
        } else {
            let _lock = self.lock.lock().unwrap();
            self.answer();
        }
    }

    /// The memory of the lane goes.
    fn free(&self) {
        self.lane.with_mut(|_| ());
        self.frees.with_mut(|frees| unsafe { *frees += 1 });
    }
}

/// The loop leaves the lock out while nobody is away, and has all that those did who have come back.
#[test]
fn home_the_loop_answers_without_the_lock_only_alone() {
    loom::model(|| {
        let client = Client::new();
        client.away.go();
        let other = client.clone();
        let other = thread::spawn(move || other.answer_and_come_back());
        client.answer_in_the_loop();
        // A second request of the same client is taken away while the first may be.
        client.away.go();
        let third = client.clone();
        let third = thread::spawn(move || third.answer_and_come_back());
        client.answer_in_the_loop();
        other.join().unwrap();
        third.join().unwrap();
        assert!(client.away.is_nobody());
        client.lane.with(|lane| assert_eq!(unsafe { *lane }, 4));
    });
}

/// Whoever is the last to let go of a client frees it, once, with all others done.
#[test]
fn home_the_last_to_let_go_frees_the_client() {
    loom::model(|| {
        let client = Client::new();
        let others: Vec<_> = (0..2)
            .map(|_| {
                client.away.go();
                let other = client.clone();
                thread::spawn(move || other.answer_and_come_back())
            })
            .collect();
        client.answer_in_the_loop();
        if client.away.leave() {
            client.free();
        }
        others.into_iter().for_each(|other| other.join().unwrap());
        client.frees.with(|frees| assert_eq!(unsafe { *frees }, 1));
    });
}

/// Each of those who stir has said before why. Once nothing is stirred any more, the loop has seen all of it.
#[test]
fn stir_the_loop_sees_why_it_is_notified() {
    loom::model(|| {
        let desk = Arc::new((Stirred::new(), [AtomicU32::new(0), AtomicU32::new(0)]));
        let tell = |which: usize| {
            let desk = desk.clone();
            thread::spawn(move || {
                desk.1[which].store(1, Relaxed);
                desk.0.set();
            })
        };
        let others = [tell(0), tell(1)];
        let mut seen = [0, 0];
        for _ in 0..2 {
            if desk.0.take() {
                seen = [0, 1].map(|which| desk.1[which].load(Relaxed));
            }
        }
        others.into_iter().for_each(|other| other.join().unwrap());
        assert!(desk.0.is_set() || seen == [1, 1], "{seen:?} was seen, and nothing is stirred any more");
    });
}

/// A call's place is emptied by who answers, on whatever thread, before the answer is published; its next request is published by who has
/// read the answer. So the loop, which takes that one, finds the place empty, though nothing but the two lanes says so.
#[test]
fn publish_a_slot_is_empty_when_its_next_request_comes() {
    loom::model(|| {
        // The place, the lane of replies, the lane of requests.
        let link = Arc::new((AtomicU32::new(1), AtomicBool::new(false), AtomicBool::new(false)));
        let answering = link.clone();
        let answering = thread::spawn(move || {
            answering.0.store(0, Relaxed);
            answering.1.store(true, PUBLISH.store()); // [publish]
        });
        let asking = link.clone();
        let asking = thread::spawn(move || {
            // [publish]
            if asking.1.load(PUBLISH.load()) {
                asking.2.store(true, PUBLISH.store()); // [publish]
            }
        });
        // [publish]
        if link.2.load(PUBLISH.load()) {
            assert_eq!(link.0.load(Relaxed), 0, "a request comes to a place that is taken");
        }
        answering.join().unwrap();
        asking.join().unwrap();
    });
}
