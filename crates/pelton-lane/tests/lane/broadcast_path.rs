//! A broadcast lane by path in one thread: producers and consumers that come and go at random, and false words.

use crate::broadcast::{Broadcast, publish, receive};
use pelton_lane::*;
use proptest::prelude::*;
use std::alloc::Layout;
use std::ptr::NonNull;

const CAPACITY: u64 = 8192;

/// A lane with its table.
pub struct PathLane {
    pub lane: Broadcast,
    pub table: NonNull<CursorTable>,
}

impl PathLane {
    pub fn new(capacity: u64) -> PathLane {
        let layout = Layout::new::<CursorTable>();
        // SAFETY: the layout is not empty. Zeros are a table, but for its first bytes.
        let table = unsafe {
            let table = NonNull::new(std::alloc::alloc_zeroed(layout)).unwrap();
            let first = CursorTable::first_bytes();
            table.as_ptr().copy_from_nonoverlapping(first.as_ptr(), first.len());
            table.cast()
        };
        // As in a new directory: the first producer has generation 1.
        PathLane { lane: Broadcast::of_generation(capacity, 0), table }
    }

    fn table(&self) -> &CursorTable {
        // SAFETY: it lives as long as `self`.
        unsafe { self.table.as_ref() }
    }

    pub fn producer(&self) -> Result<BroadcastProducer, LaneError> {
        // SAFETY: the memory lives as long as `self`; each test has one producer at a time.
        unsafe { BroadcastProducer::take_over(self.lane.memory, self.table, 1, true) }
    }

    pub fn join(
        &self,
        slot: u32,
        policy: Policy,
        from: StartFrom,
        continues: bool,
    ) -> Result<BroadcastConsumer, LaneError> {
        let joining = JoinByPath { slot, policy, from, continues, pid: 1 };
        let bytes_max = message_bytes_limit(self.lane.memory.data.capacity());
        // SAFETY: the memory lives as long as `self`; each slot has one consumer at a time.
        unsafe { BroadcastConsumer::join_by_path(self.lane.memory, self.table, joining, bytes_max, true) }
    }

    /// A word of the table, for tests with false ones.
    fn word(&self, offset: usize) -> *mut u64 {
        assert!(offset + 8 <= CursorTable::BYTES);
        // SAFETY: inside the table.
        unsafe { self.table.as_ptr().cast::<u8>().add(offset).cast() }
    }
}

impl Drop for PathLane {
    fn drop(&mut self) {
        // SAFETY: `new` allocated it with this layout.
        unsafe { std::alloc::dealloc(self.table.as_ptr().cast(), Layout::new::<CursorTable>()) };
    }
}

fn message(number: u64) -> Vec<u8> {
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.resize(8 + (number * 13 % 90) as usize, number as u8);
    bytes
}

#[test]
fn the_text_of_the_tables_signature_is_in_the_spec() {
    let spec = include_str!("../../../../spec/broadcast.md");
    assert!(spec.contains(TABLE_TEXT), "{TABLE_TEXT}");
    assert!(spec.contains(&format!("`{TABLE_SIGNATURE:#018x}`")), "{TABLE_SIGNATURE:#018x}");
}

/// A limit that a producer stores after a consumer has loaded it: here, before the consumer opens the lane at all.
#[test]
fn a_consumer_beyond_the_limit_is_refused_and_leaves_all_as_it_was() {
    const MILLISECOND: u64 = 1_000_000;
    let until = |lag_after_ns| Policy::GateUntil { slack: 0, lag_after_ns };
    let lane = PathLane::new(CAPACITY);
    let mut producer = lane.producer().unwrap();
    for (slot, policy) in [(0, Policy::Lag { slack: 0 }), (1, until(MILLISECOND))] {
        lane.join(slot, policy, StartFrom::Oldest, true).unwrap();
    }
    publish(&mut producer, &message(1)).unwrap();
    lane.table().limit_holds(MILLISECOND);
    let refused = |holds_ns| Some(LaneError::HoldTooLong { holds_ns, hold_max_ns: MILLISECOND });
    for slot in 0..3 {
        let joined = lane.join(slot, until(MILLISECOND + 1), StartFrom::Oldest, true);
        assert_eq!(joined.err(), refused(MILLISECOND + 1));
    }
    assert_eq!(lane.join(2, Policy::Gate, StartFrom::Now, false).err(), refused(u64::MAX));
    assert_eq!(lane.table().longer_holders(0).collect::<Vec<_>>(), [1]);
    assert_eq!(lane.table().longer_holders(MILLISECOND).next(), None);
    assert!(!lane.table().slot(2).is_counted && !lane.table().has_begun(2));
    while let Some((join, _)) = producer.lost() {
        producer.remove(join);
    }
    let mut counted: Vec<_> =
        producer.joined().map(|(slot, join, _)| (slot, producer.policy_of(join).unwrap())).collect();
    counted.sort_by_key(|(slot, _)| *slot);
    assert_eq!(counted, [(0, Policy::Lag { slack: 0 }), (1, until(MILLISECOND))]);
    for (slot, policy) in [(0, Policy::Lag { slack: 0 }), (1, until(MILLISECOND))] {
        assert_eq!(lane.table().continued_policy(slot).unwrap(), Some(policy));
        let mut consumer = lane.join(slot, policy, StartFrom::Now, true).unwrap();
        assert_eq!(consumer.number(), 1);
        let mut buffer = Vec::new();
        assert!(matches!(consumer.copy(&mut buffer), Ok(Some(Copied::Message))));
        assert_eq!(buffer, message(1));
    }
    lane.table().limit_holds(u64::MAX);
    assert_eq!(lane.table().hold_max_ns(), u64::MAX);
    lane.join(2, Policy::Gate, StartFrom::Now, false).unwrap();
    assert_eq!(lane.table().longer_holders(MILLISECOND).collect::<Vec<_>>(), [2]);
}

#[derive(Clone, Debug)]
enum Step {
    Publish(u8),
    Receive(usize, u8),
    /// The consumer's process ends; a durable one is away.
    End(usize),
    /// It comes, or comes back.
    Begin(usize),
    /// The producer is killed, and has a successor.
    Succeed,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (1..40u8).prop_map(Step::Publish),
        8 => (0..4usize, 1..60u8).prop_map(|(at, messages)| Step::Receive(at, messages)),
        1 => (0..4usize).prop_map(Step::End),
        3 => (0..4usize).prop_map(Step::Begin),
        1 => Just(Step::Succeed),
    ]
}

/// A consumer of the model: a durable gate, a durable laggard, and the same without a name.
struct Side {
    policy: Policy,
    is_durable: bool,
    consumer: Option<BroadcastConsumer>,
    /// Of the next message; 0: it has not joined.
    next: u64,
    /// Missed directly before that: they count with the next message, which is released.
    missed: u64,
}

impl Side {
    fn receive(&mut self, messages: u8) {
        let Some(consumer) = &mut self.consumer else { return };
        for _ in 0..messages {
            let mut buffer = Vec::new();
            if self.policy == Policy::Gate {
                let Some(found) = receive(consumer) else { return };
                buffer = found;
            } else {
                match consumer.copy(&mut buffer).unwrap() {
                    None => return,
                    Some(Copied::Missed(missed)) => {
                        self.missed += missed;
                        continue;
                    }
                    Some(Copied::Message) => _ = consumer.release(),
                }
            }
            self.next += std::mem::take(&mut self.missed);
            assert_eq!(buffer, message(self.next));
            self.next += 1;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 2 } else { 400 }, ..ProptestConfig::default() })]

    /// Each consumer receives each message once and in order, or its count, over ends of all sides.
    #[test]
    fn random_ends_and_successors_lose_nothing(steps in proptest::collection::vec(step(), 1..300)) {
        let lane = PathLane::new(CAPACITY);
        let mut producer = lane.producer().unwrap();
        let lag = Policy::Lag { slack: 512 };
        let side = |(policy, is_durable)| Side { policy, is_durable, consumer: None, next: 0, missed: 0 };
        let mut sides = [(Policy::Gate, true), (lag, true), (Policy::Gate, false), (lag, false)].map(side);
        let mut number = 1;
        for step in steps {
            match step {
                Step::Publish(messages) => {
                    for _ in 0..messages {
                        prop_assert_eq!(producer.number(), number);
                        if publish(&mut producer, &message(number)).is_none() {
                            let holder = producer.holder().expect("a gate holds it up");
                            let side = &sides[holder.slot as usize];
                            prop_assert!(side.policy == Policy::Gate && side.next == holder.number);
                            break;
                        }
                        number += 1;
                    }
                }
                Step::Receive(at, messages) => sides[at].receive(messages),
                Step::End(at) => {
                    let side = &mut sides[at];
                    side.missed = 0;
                    if let Some(mut consumer) = side.consumer.take()
                        && !side.is_durable
                    {
                        consumer.close();
                        while let Some((join, loss)) = producer.lost() {
                            prop_assert_eq!(loss, CursorLoss::Closed);
                            producer.remove(join);
                        }
                    }
                }
                Step::Begin(at) => {
                    let side = &mut sides[at];
                    if side.consumer.is_none() {
                        let consumer = lane.join(at as u32, side.policy, StartFrom::Now, side.is_durable).unwrap();
                        if side.next == 0 || !side.is_durable {
                            prop_assert_eq!(consumer.number(), number);
                            side.next = number;
                        }
                        prop_assert_eq!(consumer.number(), side.next);
                        side.consumer = Some(consumer);
                        while let Some((join, loss)) = producer.lost() {
                            prop_assert_eq!(loss, CursorLoss::Closed);
                            producer.remove(join);
                        }
                    }
                }
                Step::Succeed => {
                    drop(producer);
                    producer = lane.producer().unwrap();
                    prop_assert_eq!(producer.number(), number);
                }
            }
        }
        for side in &mut sides {
            side.receive(255);
            side.receive(255);
            if side.consumer.is_some() {
                prop_assert_eq!(side.next + side.missed, number);
            }
        }
    }

    /// Whatever the table says, each side stays within its bounds, and reports *corrupt* or goes on.
    #[test]
    fn a_false_word_of_the_table_is_within_bounds_or_corrupt(
        at in prop_oneof![
            Just(64usize), Just(128), Just(136),
            (0..3usize, 0..2usize).prop_map(|(slot, word)| 8192 + 128 * slot + 8 * word),
            (0..3usize, prop_oneof![8..24usize, 32..36usize]).prop_map(|(slot, word)| 16384 + 8192 * slot + 8 * word),
        ],
        value in prop_oneof![any::<u64>(), 0..200u64, (0..60u32).prop_map(|shift| 1u64 << shift)],
        succeeds in any::<bool>(),
    ) {
        let lane = PathLane::new(CAPACITY);
        let mut producer = lane.producer().unwrap();
        let mut gate = lane.join(0, Policy::Gate, StartFrom::Now, true).unwrap();
        let mut lags = lane.join(1, Policy::Lag { slack: 512 }, StartFrom::Now, true).unwrap();
        let mut number = 1;
        let mut send = |producer: &mut BroadcastProducer, gate: &mut BroadcastConsumer| for _ in 0..300 {
            if publish(producer, &message(number)).is_some() {
                number += 1;
            } else {
                while let Some((join, _)) = producer.lost() {
                    producer.remove(join);
                }
                // Nothing is in order any more, but all is within bounds.
                if let Ok(Some(record)) = gate.peek() {
                    gate.take(&record);
                    let _ = gate.release();
                }
            }
        };
        send(&mut producer, &mut gate);
        // SAFETY: inside the table, which this thread alone uses.
        unsafe { lane.word(at).write(value) };
        if succeeds {
            drop(producer);
            match lane.producer() {
                Ok(successor) => producer = successor,
                Err(LaneError::Corrupt { .. }) => return Ok(()),
                Err(other) => panic!("{other}"),
            }
        }
        send(&mut producer, &mut gate);
        let mut buffer = Vec::new();
        for _ in 0..600 {
            let _ = lags.copy(&mut buffer);
        }
        for (slot, policy) in [(0, Policy::Gate), (1, Policy::Lag { slack: 512 }), (2, Policy::Latest)] {
            let _ = lane.table().slot(slot);
            if let Ok(mut consumer) = lane.join(slot, policy, StartFrom::Last(value), true) {
                for _ in 0..600 {
                    let _ = consumer.copy(&mut buffer);
                }
            }
        }
    }
}

#[test]
fn a_durable_consumer_that_could_be_passed_is_not_continued_by_one_that_gates() {
    let lane = PathLane::new(CAPACITY);
    let mut producer = lane.producer().unwrap();
    let lag = Policy::Lag { slack: 512 };
    let _ = lane.join(0, lag, StartFrom::Oldest, true).unwrap();
    let mut number = 1;
    let mut send = |producer: &mut BroadcastProducer| {
        for _ in 0..300 {
            assert!(publish(producer, &message(number)).is_some(), "message {number}");
            number += 1;
        }
    };
    send(&mut producer);
    assert_eq!(lane.table().continued_policy(0), Ok(Some(lag)));
    assert!(matches!(lane.join(0, Policy::Gate, StartFrom::Oldest, true), Err(LaneError::Corrupt { .. })));
    assert_eq!(lane.table().continued_policy(0), Ok(Some(lag)));
    send(&mut producer);
    drop(producer);
    send(&mut lane.producer().unwrap());
}

/// The tail may be visible before the last messages are.
#[test]
fn a_consumer_that_joins_before_the_messages_of_the_tail_are_visible_begins_with_them() {
    let lane = PathLane::new(CAPACITY);
    let mut producer = lane.producer().unwrap();
    (1..=5).for_each(|number| assert!(publish(&mut producer, &message(number)).is_some()));
    let last = 5 << 32 | message(5).len() as u64;
    let word = (0..CAPACITY).step_by(8).map(|at| lane.lane.word(at)).find(|word| word.get() == last).unwrap();
    let header = word.replace(0);
    let consumers = [(0, StartFrom::Now, 5), (1, StartFrom::Last(2), 4)].map(|(slot, from, first)| {
        let consumer = lane.join(slot, Policy::Gate, from, false).unwrap();
        assert_eq!(consumer.number(), first);
        consumer
    });
    word.set(header);
    for mut consumer in consumers {
        (consumer.number()..=5).for_each(|number| assert_eq!(receive(&mut consumer).unwrap(), message(number)));
    }
}
