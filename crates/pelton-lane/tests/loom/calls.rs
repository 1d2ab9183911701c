//! Calls under loom: the words that a service's threads and its loop share without a lock, in every interleaving.
//! `./run loom` runs these models, then again with each edge left out (`PELTON_WEAKEN`), when a model must fail.
//!
//! The models include `edges.rs` of the crate `pelton-call`. They are here because loom cannot run the rest of that
//! crate.

#[path = "../../../pelton-call/src/edges.rs"]
mod edges;

use edges::{DetachedCount, NotifyFlag};
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use loom::sync::{Arc, Mutex};
use loom::thread;
use pelton_lane::sync::Edge;

/// The lane's edge, as in `pelton-lane/src/edges.rs`.
const PUBLISH: Edge = Edge::named("publish");

/// A client, as a model: its lane is a count of replies. Loom detects two threads that access the lane at once.
struct Client {
    detached: DetachedCount,
    lock: Mutex<()>,
    lane: UnsafeCell<u32>,
    frees: UnsafeCell<u32>,
}

// SAFETY: loom checks each access to the cells; the models show that no two accesses race.
unsafe impl Sync for Client {}
// SAFETY: loom checks each access to the cells.
unsafe impl Send for Client {}

impl Client {
    fn new() -> Arc<Client> {
        let (detached, lock) = (DetachedCount::new(), Mutex::new(()));
        Arc::new(Client { detached, lock, lane: UnsafeCell::new(0), frees: UnsafeCell::new(0) })
    }

    fn reply(&self) {
        self.lane.with_mut(|lane| unsafe { *lane += 1 });
    }

    /// As a thread that has a detached responder.
    fn reply_and_return(&self) {
        let lock = self.lock.lock().unwrap();
        self.reply();
        drop(lock);
        if self.detached.remove() {
            self.free();
        }
    }

    /// As the loop, with a client that has detached references.
    fn reply_in_the_loop(&self) {
        if self.detached.is_zero() {
            self.reply();
        } else {
            let _lock = self.lock.lock().unwrap();
            self.reply();
        }
    }

    /// Frees the lane's memory.
    fn free(&self) {
        self.lane.with_mut(|_| ());
        self.frees.with_mut(|frees| unsafe { *frees += 1 });
    }
}

/// The loop omits the lock while no reference is detached, and then sees every reply of the returned ones.
#[test]
fn return_the_loop_replies_without_the_lock_only_if_nothing_is_detached() {
    loom::model(|| {
        let client = Client::new();
        client.detached.add();
        let other = client.clone();
        let other = thread::spawn(move || other.reply_and_return());
        client.reply_in_the_loop();
        // A second request of the same client is detached, perhaps before the first returns.
        client.detached.add();
        let third = client.clone();
        let third = thread::spawn(move || third.reply_and_return());
        client.reply_in_the_loop();
        other.join().unwrap();
        third.join().unwrap();
        assert!(client.detached.is_zero());
        client.lane.with(|lane| assert_eq!(unsafe { *lane }, 4));
    });
}

/// The last reference to a client frees it, once, after all others have finished.
#[test]
fn return_the_last_reference_frees_the_client() {
    loom::model(|| {
        let client = Client::new();
        let others: Vec<_> = (0..2)
            .map(|_| {
                client.detached.add();
                let other = client.clone();
                thread::spawn(move || other.reply_and_return())
            })
            .collect();
        client.reply_in_the_loop();
        if client.detached.release() {
            client.free();
        }
        others.into_iter().for_each(|other| other.join().unwrap());
        client.frees.with(|frees| assert_eq!(unsafe { *frees }, 1));
    });
}

/// A thread stores its reason before it notifies. Once no notification is pending, the loop has seen every reason.
#[test]
fn notify_the_loop_sees_why_it_is_notified() {
    loom::model(|| {
        let shared = Arc::new((NotifyFlag::new(), [AtomicU32::new(0), AtomicU32::new(0)]));
        let notify = |which: usize| {
            let shared = shared.clone();
            thread::spawn(move || {
                shared.1[which].store(1, Relaxed);
                shared.0.set();
            })
        };
        let others = [notify(0), notify(1)];
        let mut seen = [0, 0];
        for _ in 0..2 {
            if shared.0.take() {
                seen = [0, 1].map(|which| shared.1[which].load(Relaxed));
            }
        }
        others.into_iter().for_each(|other| other.join().unwrap());
        assert!(shared.0.is_set() || seen == [1, 1], "the loop saw {seen:?}, and no notification is pending");
    });
}

/// The replying thread empties a call's slot before it publishes the reply. The client publishes the next request after
/// it has read the reply. So the loop, which receives that request, finds the slot empty: the two lanes alone order
/// this.
#[test]
fn publish_a_slot_is_empty_when_its_next_request_comes() {
    loom::model(|| {
        // The slot, the lane of replies, the lane of requests.
        let link = Arc::new((AtomicU32::new(1), AtomicBool::new(false), AtomicBool::new(false)));
        let service = link.clone();
        let service = thread::spawn(move || {
            service.0.store(0, Relaxed);
            service.1.store(true, PUBLISH.store()); // [publish]
        });
        let client = link.clone();
        let client = thread::spawn(move || {
            // [publish]
            if client.1.load(PUBLISH.load()) {
                client.2.store(true, PUBLISH.store()); // [publish]
            }
        });
        // [publish]
        if link.2.load(PUBLISH.load()) {
            assert_eq!(link.0.load(Relaxed), 0, "a request arrives at an occupied slot");
        }
        service.join().unwrap();
        client.join().unwrap();
    });
}
