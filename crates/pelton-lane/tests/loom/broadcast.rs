//! A broadcast lane under loom: a consumer that is passed, one that gates, one that leaves, and wake-ups.
//! `lane.rs` says how the models run.

use crate::lane::{Doorbell, heavy, model, sleep_model};
use loom::sync::Arc;
use loom::thread;
use pelton_lane::*;
use std::ptr::NonNull;

const CAPACITY: u64 = 128;
const LAG: Policy = Policy::Lag { slack: 0 };
const UNTIL: Policy = Policy::GateUntil { slack: 0, lag_after_ns: 1 };

/// The pages and words of one run of a model, freed at its end.
struct Lane {
    memory: BroadcastMemory,
    cursors: [NonNull<CursorPage>; 2],
    words: *mut [LoomWord],
}

// SAFETY: loom checks each access to its atomics and cells.
unsafe impl Send for Lane {}
// SAFETY: loom checks each access to its atomics and cells.
unsafe impl Sync for Lane {}

impl Lane {
    fn new(policies: [Policy; 2]) -> Arc<Lane> {
        let words = Box::into_raw((0..CAPACITY / 8).map(|_| LoomWord::new()).collect::<Vec<_>>().into_boxed_slice());
        let page = BroadcastPage::new(CAPACITY, message_bytes_limit(CAPACITY), 1, 1);
        let memory = BroadcastMemory {
            producer: NonNull::from(Box::leak(Box::new(page))),
            // SAFETY: the words live until the drop below.
            data: unsafe { Data::new(NonNull::new(words.cast()).unwrap(), CAPACITY) },
        };
        let cursors = policies.map(|policy| NonNull::from(Box::leak(Box::new(CursorPage::new(policy, 2)))));
        Arc::new(Lane { memory, cursors, words })
    }

    fn producer(&self, can_barrier: bool) -> BroadcastProducer {
        // SAFETY: the pages outlive the sides, and the lane has one producer.
        unsafe { BroadcastProducer::attach(self.memory, 1, can_barrier) }
    }

    fn join(&self, producer: &mut BroadcastProducer, cursor: usize, can_barrier: bool) -> BroadcastConsumer {
        // SAFETY: the pages outlive the sides, and each cursor has one consumer.
        unsafe {
            let page = self.cursors[cursor];
            let policy = page.as_ref().policy().unwrap();
            let joined = producer.join(page, policy, StartFrom::Now).unwrap();
            let bytes_max = message_bytes_limit(CAPACITY);
            BroadcastConsumer::attach(self.memory, page, policy, joined, bytes_max, can_barrier).unwrap()
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // SAFETY: `new` made each pointer from a box; only this frees them, once.
        unsafe {
            drop(Box::from_raw(self.memory.producer.as_ptr()));
            self.cursors.iter().for_each(|page| drop(Box::from_raw(page.as_ptr())));
            drop(Box::from_raw(self.words));
        }
    }
}

fn publish(producer: &mut BroadcastProducer, payload: &[u8]) -> Option<u64> {
    let space = producer.try_reserve(payload.len() as u64).unwrap()?;
    producer.copy_in(space, payload);
    Some(producer.commit(space, payload.len() as u64))
}

fn receive(consumer: &mut BroadcastConsumer, expected: &[u8]) -> Option<Wake> {
    let record = consumer.peek().unwrap()?;
    let mut payload = vec![0; record.bytes as usize];
    consumer.copy_out(&record, &mut payload);
    assert_eq!(payload, expected);
    consumer.take(&record);
    Some(consumer.release())
}

/// Receives what there is, at most `times` times: each message is whole and has its number, or is counted as missed.
/// The lane is not empty before the last of the `ready` ones that were published before.
fn copy(consumer: &mut BroadcastConsumer, times: usize, ready: u64) {
    let mut buffer = Vec::new();
    for _ in 0..times {
        let before = consumer.number();
        match consumer.copy(&mut buffer).unwrap() {
            Some(Copied::Message) => assert_eq!(buffer, [consumer.number() as u8 - 1; 24]),
            Some(Copied::Missed(missed)) => assert_eq!(consumer.number(), before + missed),
            None => assert!(consumer.number() > ready, "a message is there"),
        }
    }
}

/// [keep]: a consumer that is passed while it copies finds that out.
#[test]
fn lap_overrun_a_message_that_is_overwritten_is_not_delivered() {
    model(3, || {
        let lane = Lane::new([LAG; 2]);
        let mut producer = lane.producer(true);
        let mut consumer = lane.join(&mut producer, 0, true);
        for n in 1..=3u8 {
            assert_eq!(publish(&mut producer, &[n; 24]), Some(0));
        }
        let sender = thread::spawn(move || assert_eq!(publish(&mut producer, &[4; 24]), Some(0)));
        copy(&mut consumer, 2, 3);
        sender.join().unwrap();
    });
}

/// [keep]: a consumer that was passed finds, at the place where it goes on, no record of an earlier lap.
#[test]
fn keep_a_consumer_that_was_passed_goes_on_at_a_whole_place() {
    model(2, || {
        let lane = Lane::new([LAG; 2]);
        let mut producer = lane.producer(true);
        let mut consumer = lane.join(&mut producer, 0, true);
        for n in 1..=3u8 {
            assert_eq!(publish(&mut producer, &[n; 24]), Some(0));
        }
        // The sixth needs space again. So it moves `kept` to a place where the third message's header stood.
        let sender = thread::spawn(move || {
            for n in 4..=6u8 {
                assert_eq!(publish(&mut producer, &[n; 24]), Some(0));
            }
        });
        copy(&mut consumer, 3, 3);
        sender.join().unwrap();
    });
}

/// [last], [keep]: the newest message is whole, also while the next one overwrites it.
#[test]
fn last_lap_overrun_the_newest_message_is_whole() {
    model(2, || {
        let lane = Lane::new([Policy::Latest; 2]);
        let mut producer = lane.producer(true);
        let mut consumer = lane.join(&mut producer, 0, true);
        assert_eq!(publish(&mut producer, &[1; 24]), Some(0));
        let sender = thread::spawn(move || {
            for n in 2..=4u8 {
                assert_eq!(publish(&mut producer, &[n; 24]), Some(0));
            }
        });
        copy(&mut consumer, 2, 0);
        sender.join().unwrap();
        copy(&mut consumer, 1, 1);
        assert_eq!(consumer.number(), 5, "the last one arrives");
    });
}

/// [publish]: a visible message is complete.
#[test]
fn publish_a_consumer_that_gates_reads_whole_messages() {
    model(3, || {
        let lane = Lane::new([Policy::Gate; 2]);
        let mut producer = lane.producer(true);
        let mut consumer = lane.join(&mut producer, 0, true);
        let sender = thread::spawn(move || {
            for n in 1..=2u8 {
                assert_eq!(publish(&mut producer, &[n; 12]), Some(0));
            }
        });
        for n in 1..=2u8 {
            while receive(&mut consumer, &[n; 12]).is_none() {
                thread::yield_now();
            }
        }
        sender.join().unwrap();
    });
}

/// [release]: the producer overwrites a message only after each of two consumers has read it.
#[test]
fn release_the_slower_of_two_consumers_is_not_overwritten() {
    model(2, || {
        let lane = Lane::new([Policy::Gate; 2]);
        let mut producer = lane.producer(true);
        let consumers = [0, 1].map(|cursor| lane.join(&mut producer, cursor, true));
        for n in 1..=3u8 {
            assert_eq!(publish(&mut producer, &[n; 32]), Some(0));
        }
        let readers = consumers.map(|mut consumer| {
            thread::spawn(move || {
                for n in 1..=3u8 {
                    assert_eq!(receive(&mut consumer, &[n; 32]), Some(Wake::None));
                }
            })
        });
        while publish(&mut producer, &[4; 32]).is_none() {
            thread::yield_now();
        }
        readers.map(|reader| reader.join().unwrap());
    });
}

/// [close]: a consumer that leaves has finished reading, and the producer does not wait for it.
#[test]
fn close_a_consumer_that_leaves_has_finished_reading() {
    model(3, || {
        let lane = Lane::new([Policy::Gate; 2]);
        let mut producer = lane.producer(true);
        let mut leaving = lane.join(&mut producer, 0, true);
        for n in 1..=3u8 {
            assert_eq!(publish(&mut producer, &[n; 32]), Some(0));
        }
        let sender = thread::spawn(move || {
            while publish(&mut producer, &[4; 32]).is_none() {
                thread::yield_now();
            }
            let (join, loss) = producer.lost().unwrap();
            assert_eq!((join, loss), (1, CursorLoss::Closed));
            producer.remove(join);
        });
        let record = leaving.peek().unwrap().unwrap();
        let mut payload = [0; 32];
        leaving.copy_out(&record, &mut payload);
        assert_eq!(payload, [1; 32]);
        leaving.close();
        sender.join().unwrap();
    });
}

/// [sleep], consumers: each of two that sleep is rung.
fn sleeping_consumers(producer_barrier: bool, consumer_barrier: bool) {
    sleep_model(2, producer_barrier && consumer_barrier, move || {
        let lane = Lane::new([Policy::Gate; 2]);
        let mut producer = lane.producer(producer_barrier);
        let doorbells = [Doorbell::new(), Doorbell::new()];
        let consumers = [0, 1].map(|cursor| lane.join(&mut producer, cursor, consumer_barrier));
        // The words are taken over before the threads start, so that the models stay small.
        let sides = consumers.map(|consumer| {
            // SAFETY: the pages live to the end of the model.
            let sleeper = unsafe { consumer.sleeper(consumer_barrier) };
            (consumer, sleeper)
        });
        let threads: Vec<_> = sides
            .into_iter()
            .zip(doorbells.clone())
            .map(|((mut consumer, mut sleeper), doorbell)| {
                thread::spawn(move || {
                    while receive(&mut consumer, &[1; 4]).is_none() {
                        sleeper.arm(heavy);
                        if consumer.peek().unwrap().is_none() {
                            doorbell.wait();
                        }
                        sleeper.disarm();
                    }
                })
            })
            .collect();
        let asleep = publish(&mut producer, &[1; 4]).unwrap();
        (0..2).filter(|slot| asleep & 1 << slot != 0).for_each(|slot| doorbells[slot].ring());
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn light_heavy_sleeping_consumers_are_rung_with_membarrier() {
    sleeping_consumers(true, true);
}

#[test]
fn fence_sleeping_consumers_are_rung_when_no_membarrier_reaches_the_producer() {
    sleeping_consumers(false, true);
}

#[test]
fn fence_sleeping_consumers_without_membarrier_are_rung() {
    sleeping_consumers(true, false);
}

/// [sleep], producer: the slowest consumer rings it.
fn waiting_producer(producer_barrier: bool, consumer_barrier: bool) {
    sleep_model(2, producer_barrier && consumer_barrier, move || {
        let lane = Lane::new([Policy::Gate; 2]);
        let mut producer = lane.producer(producer_barrier);
        let doorbell = Doorbell::new();
        let mut consumers = [0, 1].map(|cursor| lane.join(&mut producer, cursor, consumer_barrier));
        for n in 1..=3u8 {
            assert!(publish(&mut producer, &[n; 32]).is_some());
        }
        // The other one is not the holder. Its releases come before, so that the model stays small.
        for n in 1..=3u8 {
            assert_eq!(receive(&mut consumers[1], &[n; 32]), Some(Wake::None));
        }
        let sender = thread::spawn({
            let doorbell = doorbell.clone();
            move || {
                while publish(&mut producer, &[4; 32]).is_none() {
                    if producer.arm(Some(32), heavy) {
                        doorbell.wait();
                    }
                    producer.disarm();
                }
            }
        });
        for n in 1..=3u8 {
            if receive(&mut consumers[0], &[n; 32]).unwrap() == Wake::Ring {
                doorbell.ring();
            }
        }
        sender.join().unwrap();
    });
}

#[test]
fn light_heavy_a_waiting_producer_is_rung_by_its_holder_with_membarrier() {
    waiting_producer(true, true);
}

#[test]
fn fence_a_waiting_producer_is_rung_by_its_holder_without_membarrier() {
    waiting_producer(false, true);
    waiting_producer(true, false);
}

/// [sleep], producer: a holder that never moves lags after the producer has armed. The next slowest rings.
#[test]
fn light_heavy_a_producer_whose_holder_begins_to_lag_is_rung_by_the_next_one() {
    sleep_model(2, true, move || {
        let lane = Lane::new([UNTIL, Policy::Gate]);
        let mut producer = lane.producer(true);
        let doorbell = Doorbell::new();
        let [stopped, mut consumer] = [0, 1].map(|cursor| lane.join(&mut producer, cursor, true));
        for n in 1..=3u8 {
            assert!(publish(&mut producer, &[n; 32]).is_some());
        }
        let sender = thread::spawn({
            let doorbell = doorbell.clone();
            move || {
                while publish(&mut producer, &[4; 32]).is_none() {
                    while producer.arm(Some(32), heavy) {
                        if !producer.lags(stopped.join()) {
                            producer.let_lag(stopped.join());
                        }
                        if producer.is_armed() {
                            doorbell.wait();
                            break;
                        }
                    }
                    producer.disarm();
                }
            }
        });
        for n in 1..=3u8 {
            if receive(&mut consumer, &[n; 32]).unwrap() == Wake::Ring {
                doorbell.ring();
            }
        }
        sender.join().unwrap();
    });
}

/// [fenced]: messages published before the producer began to fence are visible to a consumer that relies on its fences.
#[test]
fn fenced_an_unfenced_message_is_visible_to_a_consumer_that_relies_on_fences() {
    sleep_model(3, false, || {
        let lane = Lane::new([Policy::Gate; 2]);
        let mut producer = lane.producer(true);
        let [mut relying, other] = [(0, true), (1, false)].map(|(at, barrier)| lane.join(&mut producer, at, barrier));
        // SAFETY: the pages live to the end of the model.
        let (mut sleeper, _unbarriered) = unsafe { (relying.sleeper(true), other.sleeper(false)) };
        let sender = thread::spawn(move || publish(&mut producer, &[1; 4]).unwrap());
        let mut relies = false;
        sleeper.arm(|| relies = relying.is_producer_fencing());
        if relies {
            assert!(receive(&mut relying, &[1; 4]).is_some(), "the producer fences, but its message is not visible");
        }
        sender.join().unwrap();
    });
}

/// [sleep]: a consumer that relies on the producer's fences has one of its own.
#[test]
fn own_a_consumer_that_omits_its_barrier_is_rung() {
    sleep_model(2, false, || {
        let lane = Lane::new([Policy::Gate; 2]);
        let mut producer = lane.producer(false);
        let mut consumer = lane.join(&mut producer, 0, true);
        assert!(consumer.is_producer_fencing());
        // SAFETY: the pages live to the end of the model.
        let mut sleeper = unsafe { consumer.sleeper(true) };
        let doorbell = Doorbell::new();
        let sender = thread::spawn({
            let doorbell = doorbell.clone();
            move || {
                if publish(&mut producer, &[1; 4]).unwrap() != 0 {
                    doorbell.ring();
                }
            }
        });
        while receive(&mut consumer, &[1; 4]).is_none() {
            sleeper.arm(|| ());
            if consumer.peek().unwrap().is_none() {
                doorbell.wait();
            }
            sleeper.disarm();
        }
        sender.join().unwrap();
    });
}

/// A lane by path, with its table.
struct PathLane {
    lane: Arc<Lane>,
    table: NonNull<CursorTable>,
}

// SAFETY: loom checks each access to its atomics and cells.
unsafe impl Send for PathLane {}
// SAFETY: loom checks each access to its atomics and cells.
unsafe impl Sync for PathLane {}

impl PathLane {
    fn new() -> Arc<PathLane> {
        let table = NonNull::from(Box::leak(Box::new(CursorTable::new())));
        Arc::new(PathLane { lane: Lane::new([Policy::Gate; 2]), table })
    }

    fn table(&self) -> &CursorTable {
        // SAFETY: it lives as long as `self`.
        unsafe { self.table.as_ref() }
    }

    fn producer(&self) -> BroadcastProducer {
        // SAFETY: the pages outlive the sides, and the lane has one producer at a time.
        unsafe { BroadcastProducer::take_over(self.lane.memory, self.table, 1, true) }.unwrap()
    }

    fn join(&self, policy: Policy, from: StartFrom) -> BroadcastConsumer {
        self.try_join(policy, from, false).unwrap()
    }

    fn try_join(&self, policy: Policy, from: StartFrom, continues: bool) -> Result<BroadcastConsumer, LaneError> {
        let joining = JoinByPath { slot: 0, policy, from, continues, pid: 2 };
        // SAFETY: the pages outlive the sides, and the slot has one consumer.
        unsafe {
            let bytes_max = message_bytes_limit(CAPACITY);
            BroadcastConsumer::join_by_path(self.lane.memory, self.table, joining, bytes_max, true)
        }
    }
}

impl Drop for PathLane {
    fn drop(&mut self) {
        // SAFETY: `new` made it from a box; only this frees it, once.
        drop(unsafe { Box::from_raw(self.table.as_ptr()) });
    }
}

/// [join]: nothing is overwritten that a consumer which joins by itself begins with.
#[test]
fn joiner_admit_a_consumer_that_joins_by_itself_is_not_overwritten() {
    model(2, || {
        let lane = PathLane::new();
        let mut producer = lane.producer();
        for n in 1..=3u8 {
            assert_eq!(publish(&mut producer, &[n; 24]), Some(0));
        }
        // The fourth message needs the space of the first ones. If the consumer has joined, it is not sent.
        let sender = thread::spawn(move || {
            let _ = publish(&mut producer, &[4; 24]);
            producer
        });
        let mut consumer = lane.join(Policy::Gate, StartFrom::Oldest);
        let first = consumer.number();
        assert!((1..=4).contains(&first));
        // Loom finds a race of this read with the copy of the producer.
        if first < 4 {
            let _ = receive(&mut consumer, &[first as u8; 24]).expect("a message is there");
        }
        sender.join().unwrap();
    });
}

/// [join]: the producer that finds a consumer which has joined by itself finds its policy.
#[test]
fn join_the_policy_of_a_consumer_that_joins_by_itself_is_visible() {
    model(2, || {
        let lane = PathLane::new();
        let mut producer = lane.producer();
        let sender = thread::spawn(move || {
            let _ = producer.lost();
            let policies: Vec<_> = producer.joined().map(|(_, join, _)| producer.policy_of(join)).collect();
            assert!(policies.iter().all(|policy| *policy == Some(LAG)), "{policies:?}");
        });
        let _consumer = lane.join(LAG, StartFrom::Oldest);
        sender.join().unwrap();
    });
}

/// A consumer joins while a producer begins that admits none which holds it up. Returns the refusal, and whether the
/// producer begins.
fn join_beside_limit(lane: &Arc<PathLane>, policy: Policy, continues: bool) -> (Option<LaneError>, bool) {
    let limiting = thread::spawn({
        let lane = lane.clone();
        move || {
            lane.table().limit_holds(0);
            lane.table().longer_holders(0).next().is_none()
        }
    });
    let joined = lane.try_join(policy, StartFrom::Oldest, continues);
    let begins = limiting.join().unwrap();
    assert!(joined.is_err() || !begins, "both have succeeded");
    // One that gives up leaves nothing behind that holds the producer up.
    assert!(joined.is_ok() || lane.table().longer_holders(0).next().is_none());
    (joined.err(), begins)
}

/// [join]: a producer that begins with a limit, or a consumer beyond it which joins meanwhile, finds the other.
#[test]
fn joiner_limit_a_producer_that_begins_with_a_limit_has_no_consumer_beyond_it() {
    model(2, || {
        let lane = PathLane::new();
        let (refused, _) = join_beside_limit(&lane, Policy::Gate, false);
        assert!(refused.is_none_or(|error| error == LaneError::HoldTooLong { holds_ns: u64::MAX, hold_max_ns: 0 }));
    });
}

/// [join]: the same of a durable consumer that continues with another policy.
#[test]
fn joiner_limit_a_consumer_that_continues_beyond_a_limit_finds_it() {
    model(2, || {
        let lane = PathLane::new();
        lane.try_join(LAG, StartFrom::Oldest, true).unwrap();
        let (refused, _) = join_beside_limit(&lane, UNTIL, true);
        assert!(refused.is_none() || lane.table().continued_policy(0) == Ok(Some(LAG)));
    });
}

/// [join]: a producer does not begin that finds a gate, though this one continues with a time. The time is published
/// before the policy.
#[test]
fn join_a_consumer_that_continues_and_holds_the_producer_up_for_less_is_found() {
    model(2, || {
        let lane = PathLane::new();
        lane.try_join(Policy::Gate, StartFrom::Oldest, true).unwrap();
        assert_eq!(join_beside_limit(&lane, UNTIL, true), (None, false));
    });
}

/// A consumer that joins from now, while a message is published for which the first ones must go, receives that one or
/// the next as its first, and each later one.
#[test]
fn publish_a_consumer_that_joins_from_now_receives_each_later_message() {
    model(2, || {
        let lane = PathLane::new();
        let mut producer = lane.producer();
        for n in 1..=3u8 {
            assert_eq!(publish(&mut producer, &[n; 24]), Some(0));
        }
        let sender = thread::spawn(move || {
            let _ = publish(&mut producer, &[4; 24]);
            producer
        });
        let mut consumer = lane.join(Policy::Gate, StartFrom::Now);
        let first = consumer.number();
        let mut producer = sender.join().unwrap();
        assert!((4..=producer.number()).contains(&first), "{first}");
        // What it has passed over it does not hold up.
        while producer.number() < 6 {
            let n = producer.number() as u8;
            assert!(publish(&mut producer, &[n; 24]).is_some(), "{n}");
        }
        for n in first..6 {
            assert!(receive(&mut consumer, &[n as u8; 24]).is_some());
        }
        assert!(consumer.peek().unwrap().is_none());
    });
}

/// A successor of a producer that has died at any point continues at the end, and overwrites nothing that is wanted.
#[test]
fn publish_a_successor_finds_the_number_and_a_consumer_that_joined_before() {
    model(2, || {
        let lane = PathLane::new();
        let mut producer = lane.producer();
        for n in 1..=2u8 {
            assert_eq!(publish(&mut producer, &[n; 24]), Some(0));
        }
        let sender = thread::spawn(move || publish(&mut producer, &[3; 24]));
        let mut consumer = lane.join(Policy::Gate, StartFrom::Oldest);
        for n in 1..=2u8 {
            assert!(receive(&mut consumer, &[n; 24]).is_some());
        }
        let _ = sender.join().unwrap();
        let mut successor = lane.producer();
        assert_eq!(successor.number(), 4);
        assert!(publish(&mut successor, &[4; 24]).is_some());
        for n in 3..=4u8 {
            assert!(receive(&mut consumer, &[n; 24]).is_some());
        }
    });
}
