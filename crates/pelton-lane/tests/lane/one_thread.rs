//! The lane in one thread: against a model, at every offset, at the ends of its numbers, and with false values.

use crate::fixture::*;
use pelton_lane::*;
use proptest::prelude::*;
use std::collections::VecDeque;

#[derive(Clone, Debug)]
enum Step {
    SendWithin { len: usize, bound: u64 },
    Send(usize),
    SendFast(usize),
    Reserve { reserved: usize, committed: usize },
    Abort(usize),
    Batch(Vec<usize>),
    Receive,
    ReceiveFast,
    ReleaseFast,
    ReceiveAll,
    ReceiveBatch(usize),
    Hold,
    ReleaseHeld(usize),
}

fn step(max: usize) -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..=max).prop_map(Step::Send),
        4 => (0..=64usize).prop_map(Step::Send),
        4 => (0..=max).prop_map(Step::SendFast),
        3 => (0..=80usize).prop_map(Step::SendFast),
        3 => (0..=64usize, 64..4096u64).prop_map(|(len, bound)| Step::SendWithin { len, bound }),
        2 => (0..=max).prop_flat_map(|reserved| (Just(reserved), 0..=reserved))
            .prop_map(|(reserved, committed)| Step::Reserve { reserved, committed }),
        1 => (0..=max).prop_map(Step::Abort),
        2 => prop::collection::vec(0..=max / 4, 0..6).prop_map(Step::Batch),
        8 => Just(Step::Receive),
        4 => Just(Step::ReceiveFast),
        4 => Just(Step::ReleaseFast),
        1 => Just(Step::ReceiveAll),
        2 => (1..8usize).prop_map(Step::ReceiveBatch),
        2 => Just(Step::Hold),
        3 => (0..8usize).prop_map(Step::ReleaseHeld),
    ]
}

/// Runs the steps on a lane and on a queue, and compares the results.
fn run(capacity: u64, window: u64, first_seq: u32, steps: Vec<Step>) {
    let pages = Pages::new(capacity, Position { offset: 0, seq: first_seq });
    let (mut producer, mut consumer) = pages.attach();
    producer.set_window(window);
    let mut waiting: VecDeque<Vec<u8>> = VecDeque::new();
    let mut held: Vec<(Ticket, Record, Vec<u8>)> = Vec::new();
    let mut number = 0;
    let mut committed = 0u64;
    let mut taken = 0u64;
    for step in steps {
        match step {
            Step::Send(len) => {
                number += 1;
                let message = payload(number, len);
                if send(&mut producer, &message) {
                    waiting.push_back(message);
                    committed += 1;
                } else {
                    assert!(!waiting.is_empty() || !held.is_empty(), "an empty lane takes any message; {len} bytes");
                }
            }
            Step::SendFast(len) => {
                number += 1;
                let message = payload(number, len);
                if producer.send_fast(&message).is_some() || send(&mut producer, &message) {
                    waiting.push_back(message);
                    committed += 1;
                }
            }
            Step::SendWithin { len, bound } => {
                number += 1;
                let message = payload(number, len);
                let tail = producer.tail().offset;
                producer.set_bound(bound);
                let sent = send(&mut producer, &message);
                producer.set_bound(u64::MAX);
                if sent {
                    waiting.push_back(message);
                    committed += 1;
                } else {
                    let is_empty = waiting.is_empty() && held.is_empty();
                    let fits = tail <= bound && record_bytes(len as u64) + 8 <= bound / 4;
                    assert!(!is_empty || !fits, "an empty lane takes a small message at {tail}, bound {bound}");
                }
            }
            Step::Reserve { reserved, committed: bytes } => {
                number += 1;
                let message = payload(number, bytes);
                if let Some(space) = producer.try_reserve(reserved as u64).unwrap() {
                    producer.copy_in(space, &message);
                    if producer.publish_fast(space, bytes as u64).is_none() {
                        let _ = producer.commit(space, bytes as u64);
                    }
                    waiting.push_back(message);
                    committed += 1;
                }
            }
            Step::Abort(len) => {
                if let Some(space) = producer.try_reserve(len as u64).unwrap() {
                    producer.copy_in(space, &vec![0xee; len]);
                }
            }
            Step::Batch(lens) => {
                let records = lens.iter().map(|len| record_bytes(*len as u64)).sum::<u64>();
                if records <= record_bytes(producer.message_bytes_max())
                    && let Some(mut batch) = producer.try_begin_batch(records).unwrap()
                {
                    for len in lens {
                        number += 1;
                        let message = payload(number, len);
                        let space = producer.batch_message(&mut batch, len as u64).expect("the batch was sized for it");
                        producer.copy_in(space, &message);
                        waiting.push_back(message);
                        committed += 1;
                    }
                    assert_eq!(
                        producer.batch_message(&mut batch, 0),
                        None,
                        "a batch has no more space than it reserved"
                    );
                    let _ = producer.commit_batch(batch);
                }
            }
            Step::Receive => {
                assert_eq!(receive(&mut consumer), waiting.pop_front().inspect(|_| taken += 1));
            }
            Step::ReceiveFast => {
                let mut copy = Vec::new();
                // SAFETY: the vector has space for so many bytes.
                let received = unsafe {
                    consumer.receive_fast(|bytes| {
                        copy.resize(bytes as usize, 0);
                        std::ptr::NonNull::new(copy.as_mut_ptr())
                    })
                };
                if let Some((record, _)) = received {
                    assert_eq!(record.bytes, copy.len() as u64);
                    assert_eq!(Some(copy), waiting.pop_front());
                    taken += 1;
                    assert!(held.is_empty(), "the head does not pass a held message");
                }
            }
            Step::ReleaseFast => {
                if let Some(record) = consumer.peek().unwrap() {
                    assert_eq!(Some(bytes(&consumer, &record)), waiting.pop_front().as_deref());
                    let released = consumer.release_fast(&record).is_some();
                    assert!(held.is_empty() || !released, "the head does not pass a held message");
                    if !released {
                        let _ = consumer.release(&record);
                    }
                    taken += 1;
                }
            }
            Step::ReceiveAll => {
                while let Some(message) = receive(&mut consumer) {
                    assert_eq!(Some(message), waiting.pop_front());
                    taken += 1;
                }
                assert!(waiting.is_empty());
            }
            Step::ReceiveBatch(most) => {
                let (mut any, mut cursor, mut sum) = (false, consumer.cursor(), 0);
                for _ in 0..most {
                    let record = match consumer.take_at(&mut cursor) {
                        Some(record) => record,
                        // The message may have marks.
                        None => {
                            consumer.take_to(cursor, std::mem::take(&mut sum));
                            let Some(record) = consumer.peek().unwrap() else { break };
                            consumer.take(&record);
                            cursor = consumer.cursor();
                            assert_eq!(Some(bytes(&consumer, &record)), waiting.pop_front().as_deref());
                            taken += 1;
                            any = true;
                            continue;
                        }
                    };
                    assert_eq!(Some(bytes(&consumer, &record)), waiting.pop_front().as_deref());
                    sum += record.bytes;
                    taken += 1;
                    any = true;
                }
                consumer.take_to(cursor, sum);
                if any {
                    let _ = consumer.release_taken();
                }
            }
            Step::Hold => {
                if let Some(record) = consumer.peek().unwrap() {
                    let message = waiting.pop_front().unwrap();
                    held.push((consumer.hold(&record), record, message));
                    taken += 1;
                } else {
                    assert!(waiting.is_empty());
                }
            }
            Step::ReleaseHeld(which) => {
                if !held.is_empty() {
                    let (ticket, record, message) = held.swap_remove(which % held.len());
                    assert_eq!(bytes(&consumer, &record), message, "a held message stays as it was");
                    let _ = consumer.release_held(ticket);
                }
            }
        }
        for (_, record, message) in &held {
            assert_eq!(bytes(&consumer, record), *message, "a held message is not overwritten");
        }
        assert_eq!(consumer.end_of_committed().unwrap(), (producer.tail(), committed - taken));
        assert_eq!(consumer.taken(), taken);
        // A recovery, which has only the data and the head, finds the same end, and the same floor if it still applies.
        let (head, (_, floor)) = (consumer.head(), producer.producer_page().tail_and_floor());
        let found = scan(&pages.memory.data, producer.message_bytes_max(), head, u64::MAX);
        assert_eq!((found.end, found.problem), (producer.tail(), None));
        if head.offset < floor && floor <= found.end.offset {
            assert_eq!(found.floor, floor, "the front is not free before the head has passed it");
        }
    }
    for (ticket, ..) in held.drain(..) {
        let _ = consumer.release_held(ticket);
    }
    while let Some(message) = receive(&mut consumer) {
        assert_eq!(Some(message), waiting.pop_front());
    }
    assert!(waiting.is_empty());
    assert_eq!(producer.refresh_head().unwrap(), 0, "everything is released");
    let max = producer.message_bytes_max() as usize;
    assert!(send(&mut producer, &payload(1, max)), "a drained lane takes its largest message");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn every_message_arrives_whole_once_and_in_order(
        capacity in prop_oneof![Just(4096u64), Just(4160), Just(8192), Just(1 << 16)],
        window in prop_oneof![Just(256u64), Just(1024), Just(1 << 20)],
        first_seq in prop_oneof![Just(1u32), Just(u32::MAX - 3), any::<u32>().prop_map(|seq| seq.max(1))],
        steps in prop::collection::vec(step(2016), 1..300),
    ) {
        run(capacity, window, first_seq, steps);
    }

    #[test]
    fn a_lane_larger_than_its_window_wraps_early_and_loses_nothing(
        steps in prop::collection::vec(step(60_000), 1..200),
    ) {
        run(1 << 20, WINDOW, 1, steps);
    }
}

#[test]
fn every_size_passes_at_every_offset_of_a_draining_lane() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    let max = producer.message_bytes_max() as usize;
    assert_eq!(max, 4096 / 2 - 32);
    let mut offsets = std::collections::HashSet::new();
    for size in 0..=max {
        // Fillers move the tail, so that the sizes meet every offset.
        for filler in [0, 8, 24, 56, 248] {
            assert!(send(&mut producer, &payload(1, filler)), "filler of {filler} bytes into a drained lane");
            assert_eq!(receive(&mut consumer), Some(payload(1, filler)));
            offsets.insert(producer.tail().offset);
            assert!(send(&mut producer, &payload(2, size)), "{size} bytes at {}", producer.tail().offset);
            assert_eq!(receive(&mut consumer), Some(payload(2, size)));
            offsets.insert(producer.tail().offset);
        }
    }
    assert!(offsets.len() > 500, "nearly all of the 512 offsets: {}", offsets.len());
}

#[test]
fn a_message_above_the_limit_is_refused_with_both_sizes() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, _consumer) = pages.attach();
    let refused = LaneError::TooLarge { bytes: 2017, bytes_max: 2016 };
    assert_eq!(producer.try_reserve(2017), Err(refused));
    assert_eq!(refused.to_string(), "message of 2017 bytes is larger than this lane's limit of 2016");
    assert_eq!(producer.try_reserve(u64::MAX).unwrap_err(), LaneError::TooLarge { bytes: u64::MAX, bytes_max: 2016 });
}

#[test]
fn sequence_numbers_wrap_and_skip_zero() {
    let pages = Pages::new(4096, Position { offset: 0, seq: u32::MAX - 2 });
    let (mut producer, mut consumer) = pages.attach();
    let mut seqs = Vec::new();
    for _ in 0..6 {
        assert!(send(&mut producer, b"x"));
        seqs.push(consumer.peek().unwrap().unwrap().seq);
        receive(&mut consumer);
    }
    assert_eq!(seqs, [u32::MAX - 2, u32::MAX - 1, u32::MAX, 1, 2, 3]);
    let (before, after) = (Position { offset: 0, seq: u32::MAX - 1 }, Position { offset: 0, seq: 2 });
    assert_eq!(after.since(before), 3);
    assert_eq!(before.since(before), 0);
}

#[test]
fn a_consumer_that_stops_after_an_early_wrap_leaves_the_lane_to_the_producer() {
    let capacity = 8 << 20;
    let pages = Pages::new(capacity, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    let message = payload(3, 1000);
    // While the consumer keeps up, the lane stays within its window.
    for _ in 0..1000 {
        assert!(send(&mut producer, &message));
        assert!(receive(&mut consumer).is_some());
        assert!(producer.tail().offset <= WINDOW + 1016);
    }
    // The consumer stops just after the producer has wrapped.
    while producer.tail().offset > 4096 {
        assert!(send(&mut producer, &message));
        if producer.tail().offset > 4096 {
            receive(&mut consumer);
        }
    }
    let mut sent = producer.refresh_head().unwrap();
    while send(&mut producer, &message) {
        sent += 1;
    }
    assert!(sent * 1008 > capacity * 95 / 100, "{sent} messages of 1008 bytes in {capacity}");
    // Everything arrives in order, also across the jump. Then the producer returns to its window.
    let mut received = 0;
    while receive(&mut consumer).inspect(|m| assert_eq!(*m, message)).is_some() {
        received += 1;
    }
    assert_eq!(received, sent);
    for _ in 0..1000 {
        assert!(send(&mut producer, &message));
        assert!(receive(&mut consumer).is_some());
    }
    assert!(producer.tail().offset <= WINDOW + 1016, "the producer returns to its window");
}

#[test]
fn a_producer_for_each_message_uses_the_whole_lane_if_it_knows_where_the_lap_ended() {
    let capacity = 1 << 20;
    let pages = Pages::new(capacity, Position::START);
    let (_, mut consumer) = pages.attach();
    let message = payload(3, 1000);
    let mut lap_end = capacity;
    let mut send_by_another = |knows_lap_end: bool| {
        // SAFETY: the fixture's pages are mapped, and the last producer is gone.
        let (page, head) = unsafe { (pages.memory.producer.as_ref(), pages.memory.consumer.as_ref().head()) };
        let (tail, floor) = page.tail_and_floor();
        // SAFETY: as above.
        let mut producer = unsafe { Producer::attach(pages.memory, tail, head, floor, true) }.unwrap();
        if knows_lap_end {
            producer.set_lap_end(lap_end);
        }
        let is_sent = send(&mut producer, &message);
        if producer.tail().offset < tail.offset {
            lap_end = tail.offset;
        }
        is_sent.then(|| producer.tail().offset)
    };
    let mut sent = 0;
    // The consumer stops just after a producer has wrapped.
    while send_by_another(true).unwrap() >= 1016 || sent == 0 {
        sent += 1;
        receive(&mut consumer).unwrap();
    }
    let mut left = 1;
    assert!((0..capacity / 1008).any(|_| send_by_another(false).is_none_or(|_| {
        left += 1;
        false
    })));
    assert!(left * 1008 < WINDOW + 1016, "{left} messages before the head");
    while send_by_another(true).is_some() {
        left += 1;
    }
    assert!(left * 1008 > capacity * 95 / 100, "{left} messages of 1008 bytes in {capacity}");
    for _ in 0..left {
        assert_eq!(receive(&mut consumer).as_ref(), Some(&message));
    }
    assert_eq!(receive(&mut consumer), None);
}

#[test]
fn an_aborted_reservation_is_never_seen() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    let space = producer.try_reserve(100).unwrap().unwrap();
    producer.copy_in(space, &[7; 100]);
    assert_eq!(consumer.peek().unwrap(), None);
    assert!(send(&mut producer, b"after"));
    assert_eq!(receive(&mut consumer).unwrap(), b"after");
    assert_eq!(consumer.peek().unwrap(), None);
}

#[test]
fn a_batch_is_seen_whole_or_not_at_all() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    let mut batch = producer.try_begin_batch(3 * record_bytes(5)).unwrap().unwrap();
    for word in [b"one  ", b"two  ", b"three"] {
        let space = producer.batch_message(&mut batch, 5).unwrap();
        producer.copy_in(space, word);
        assert_eq!(consumer.peek().unwrap(), None);
    }
    let _ = producer.commit_batch(batch);
    for word in [b"one  ", b"two  ", b"three"] {
        assert_eq!(receive(&mut consumer).unwrap(), word);
    }
}

#[test]
fn space_is_reclaimed_in_order_whatever_the_order_of_release() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    for _ in 0..3 {
        assert!(send(&mut producer, &[1; 1000]));
    }
    let tickets: Vec<Ticket> = (0..3)
        .map(|_| {
            let record = consumer.peek().unwrap().unwrap();
            consumer.hold(&record)
        })
        .collect();
    assert_eq!(consumer.held(), 3);
    let _ = consumer.release_held(tickets[2]);
    let _ = consumer.release_held(tickets[1]);
    assert_eq!(producer.refresh_head().unwrap(), 3, "the oldest record is held, so no space is free");
    let _ = consumer.release_held(tickets[0]);
    assert_eq!(producer.refresh_head().unwrap(), 0);
}

#[test]
#[should_panic(expected = "already released")]
fn a_ticket_released_twice_panics() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    assert!(send(&mut producer, b"a") && send(&mut producer, b"b"));
    let record = consumer.peek().unwrap().unwrap();
    let first = consumer.hold(&record);
    let record = consumer.peek().unwrap().unwrap();
    consumer.hold(&record);
    let _ = consumer.release_held(first);
    let _ = consumer.release_held(first);
}

#[test]
fn a_fast_path_refuses_what_it_cannot_check() {
    let pages = Pages::new(4096, Position { offset: 0, seq: u32::MAX });
    let (mut producer, mut consumer) = pages.attach();
    assert!(producer.send_fast(b"first").is_none(), "the limit is not known yet");
    assert!(send(&mut producer, b"first") && producer.send_fast(b"second").is_some());
    let first = consumer.peek().unwrap().unwrap();
    // SAFETY: no bytes are copied.
    let refused = unsafe { consumer.receive_fast(|bytes| if bytes == 5 { None } else { panic!("{bytes} bytes") }) };
    assert!(refused.is_none(), "there is no place for it");
    let mut endless = first;
    endless.bytes = u64::MAX - 30;
    assert!(consumer.release_fast(&endless).is_none(), "an end that wraps around");
    assert!(consumer.release_fast(&first).is_some() && consumer.release_fast(&first).is_none(), "it is released");
    let second = consumer.peek().unwrap().unwrap();
    assert_eq!((second.seq, bytes(&consumer, &second)), (1, &b"second"[..]));
    let ticket = consumer.hold(&second);
    assert!(producer.send_fast(b"third").is_some());
    let third = consumer.peek().unwrap().unwrap();
    assert!(consumer.release_fast(&third).is_none(), "one before it is held");
    // SAFETY: no bytes are copied.
    assert!(unsafe { consumer.receive_fast(|_| panic!("one before it is held")) }.is_none());
    let _ = (consumer.release_held(ticket), consumer.release(&third));
    assert_eq!((consumer.taken(), producer.refresh_head().unwrap()), (3, 0));

    // So far into the lane that the largest message would end after it.
    let max = producer.message_bytes_max();
    assert!(send(&mut producer, &vec![0; max as usize]) && receive(&mut consumer).is_some());
    assert!(send(&mut producer, b"at the cursor") && producer.tail().offset + record_bytes(max) > 4096 - 8);
    let mut long = consumer.peek().unwrap().unwrap();
    long.bytes = max;
    assert!(consumer.release_fast(&long).is_none(), "an end outside of the data");
    assert!(receive(&mut consumer).is_some());
    let space = producer.try_reserve(100).unwrap().unwrap();
    for (bytes, reserved) in [(101, space.bytes), (u64::MAX - 30, u64::MAX), (max + 1, 4000), (max, max)] {
        let mut other = space;
        other.bytes = reserved;
        assert!(producer.publish_fast(other, bytes).is_none(), "{bytes} of {reserved} bytes");
    }
    assert!(producer.publish_fast(space, 100).is_some() && producer.publish_fast(space, 100).is_none());
    let marked = producer.try_reserve_with_descriptors(3, 4).unwrap().unwrap();
    assert!(producer.publish_fast(marked, 3).is_none(), "there are marks at the tail");
    let _ = producer.commit(marked, 3);
    assert_eq!(receive(&mut consumer).map(|message| message.len()), Some(100));
    // SAFETY: no bytes are copied.
    assert!(unsafe { consumer.receive_fast(|_| panic!("there are marks")) }.is_none());
    assert_eq!(consumer.peek().unwrap().unwrap().descriptors, 4);
}

#[test]
fn short_messages_of_every_size_are_copied_whole() {
    let pages = Pages::new(1 << 16, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    for len in 0..=300 {
        let message = payload(7, len);
        assert!(producer.send_fast(&message).is_some() || send(&mut producer, &message));
        let mut copy = vec![0xaa; len + 1];
        let target = std::ptr::NonNull::new(copy.as_mut_ptr());
        // SAFETY: the vector has space for the message, which has `len` bytes.
        assert!(unsafe { consumer.receive_fast(|_| target) }.is_some());
        assert_eq!((&copy[..len], copy[len]), (&message[..], 0xaa), "{len} bytes");
    }
}

#[test]
fn marks_travel_with_their_message() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    for _ in 0..100 {
        let space = producer.try_reserve_with_descriptors(3, 4).unwrap().unwrap();
        producer.copy_in(space, b"fds");
        assert_eq!(consumer.peek().unwrap(), None, "no part of it is visible before the commit");
        let _ = producer.commit(space, 3);
        let record = consumer.peek().unwrap().unwrap();
        assert_eq!((record.descriptors, bytes(&consumer, &record)), (4, &b"fds"[..]));
        let _ = consumer.release(&record);
        assert!(send(&mut producer, &[0; 77]));
        assert_eq!(consumer.peek().unwrap().unwrap().descriptors, 0);
        receive(&mut consumer);
    }
}

#[test]
fn a_successor_continues_after_the_last_commit_of_a_dead_producer() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    for number in 0..300 {
        assert!(send(&mut producer, &payload(number, 40)));
        let space = producer.try_reserve(100).unwrap().unwrap();
        producer.copy_in(space, &[9; 100]); // dies while writing
        let (tail, messages) = consumer.end_of_committed().unwrap();
        assert_eq!((tail, messages), (producer.tail(), 1));
        let floor = consumer.producer_page().tail_and_floor().1;
        // SAFETY: the pages live as long as the test, and it uses the predecessor no more.
        let mut successor = unsafe { Producer::attach(pages.memory, tail, consumer.head(), floor, true).unwrap() };
        assert_eq!(successor.unreleased(), 1);
        assert!(send(&mut successor, &payload(number, 41)));
        assert_eq!(receive(&mut consumer), Some(payload(number, 40)));
        assert_eq!(receive(&mut consumer), Some(payload(number, 41)));
        producer = successor;
    }
}

#[test]
fn a_new_generation_is_marked_at_its_first_message_even_the_largest() {
    for messages_before in 0..120 {
        let pages = Pages::new(4096, Position::START);
        let (mut producer, mut consumer) = pages.attach();
        for _ in 0..messages_before {
            assert!(send(&mut producer, &[1; 25]) && receive(&mut consumer).is_some());
        }
        let (tail, _) = consumer.end_of_committed().unwrap();
        let mut page = ProducerPage::new(4096, message_bytes_limit(4096), 2, 1);
        let memory = Memory { producer: std::ptr::NonNull::from(&mut page), ..pages.memory };
        // SAFETY: both sides are dropped before the page, at the end of this round.
        let mut successor = unsafe { Producer::attach(memory, tail, consumer.head(), 0, true).unwrap() };
        assert_eq!(successor.producer_page().tail_and_floor(), (tail, 0), "the page has both for the next successor");
        // SAFETY: both sides are dropped before the page, at the end of this round.
        unsafe { consumer.attach_producer(memory.producer, true) };
        let max = successor.message_bytes_max();
        let space =
            successor.try_reserve_with_descriptors(max, 1).unwrap().expect("the largest message fits with both marks");
        let _ = successor.commit(space, max);
        let record = consumer.peek().unwrap().unwrap();
        assert_eq!((record.bytes, record.descriptors, consumer.generation()), (max, 1, 2));
        successor.close();
        assert!(consumer.has_producer_closed(), "the successor's page shows it");
    }
}

#[test]
fn a_flipped_bit_in_any_header_yields_a_message_or_corrupt() {
    for messages in [1, 3] {
        for bit in 0..64 {
            for at in 0..messages {
                let pages = Pages::new(4096, Position::START);
                let (mut producer, mut consumer) = pages.attach();
                for _ in 0..messages {
                    assert!(send(&mut producer, &[5; 24]));
                }
                let word = pages.word(at * 32);
                word.set(word.get() ^ 1 << bit);
                for _ in 0..messages {
                    match consumer.peek() {
                        Ok(Some(record)) => {
                            assert!(bytes(&consumer, &record).len() as u64 <= producer.message_bytes_max());
                            let _ = consumer.release(&record);
                        }
                        Ok(None) => break,
                        Err(LaneError::Corrupt { .. }) => break,
                        Err(other) => panic!("{other}"),
                    }
                }
            }
        }
    }
}

#[test]
fn marks_that_break_the_rules_are_corrupt() {
    let mark = |kind: u64, value: u64| 1 << 32 | 1 << 31 | kind << 28 | value;
    for (words, what) in [
        (vec![(0, mark(0, 0))], "mark"),                      // a jump to itself
        (vec![(0, mark(0, 63)), (4032, mark(0, 0))], "mark"), // two jumps
        (vec![(0, mark(0, 64))], "place after a mark"),       // past the end
        (vec![(0, mark(0, 0x0fff_ffff))], "place after a mark"),
        (vec![(0, mark(3, 0))], "mark"),                  // unknown
        (vec![(0, mark(7, 1)), (8, mark(4, 1))], "mark"), // kinds to skip, out of order
        (vec![(0, mark(4, 1)), (8, mark(1, 1))], "mark"),
        (vec![(0, mark(1, 1)), (8, mark(2, 1))], "mark"), // out of order
        (vec![(0, mark(2, 1))], "seq of a record"),       // no record after it
        (vec![(0, mark(0, 1)), (64, 1 << 32 | 2017)], "length of a record"),
        (vec![(0, mark(0, 33)), (33 * 64, 1 << 32 | 2016)], "end of a record"),
        (vec![(0, 2 << 32 | 1)], "seq of a record"),
    ] {
        let pages = Pages::new(4096, Position::START);
        let (_producer, mut consumer) = pages.attach();
        for (offset, word) in &words {
            pages.word(*offset).set(*word);
        }
        let bound = match what {
            "mark" => 1 << 31,
            "place after a mark" => 4096 - 16,
            "length of a record" => 2016,
            "end of a record" => 4096 - 8,
            _ => 1,
        };
        match consumer.peek() {
            Err(LaneError::Corrupt { what: found, wanted, .. }) => {
                assert_eq!((found, wanted), (what, bound), "{words:x?}");
            }
            other => panic!("{words:x?}: {other:?}"),
        }
        assert!(consumer.end_of_committed().is_err());
    }
}

#[test]
fn the_last_word_of_the_data_takes_an_empty_message_after_a_mark() {
    let pages = Pages::new(4096, Position { offset: 4072, seq: 1 });
    let (_producer, mut consumer) = pages.attach();
    pages.word(4072).set(1 << 32 | 1 << 31 | 1 << 28 | 3);
    pages.word(4080).set(1 << 32);
    let record = consumer.peek().unwrap().unwrap();
    assert_eq!((record.bytes, record.descriptors), (0, 3));
    assert_eq!(consumer.end_of_committed(), Ok((Position { offset: 4088, seq: 2 }, 1)));
}

#[test]
fn a_false_head_is_corrupt_or_harms_only_its_writer() {
    for offset in [0u64, 8, 2048, 4088, 4096, 1 << 20, (u32::MAX as u64) << 3] {
        for seq in [0u32, 1, 2, 3, 4, 5, 6, 1000, u32::MAX] {
            let pages = Pages::new(4096, Position::START);
            let (mut producer, consumer) = pages.attach();
            for _ in 0..4 {
                assert!(send(&mut producer, &[5; 900]));
            }
            drop(consumer);
            // SAFETY: the test has one thread, and the layout has the head at this offset of the page.
            unsafe { *pages.memory.consumer.as_ptr().cast::<u64>().byte_add(128) = Position { offset, seq }.pack() };
            let plausible = offset + 8 <= 4096 && (1..=5).contains(&seq);
            match producer.try_reserve(2000) {
                Ok(Some(space)) => {
                    assert!(plausible);
                    producer.copy_in(space, &[6; 2000]);
                    let _ = producer.commit(space, 2000);
                }
                Ok(None) => assert!(plausible),
                Err(LaneError::Corrupt { .. }) => assert!(!plausible, "{offset} {seq}"),
                Err(other) => panic!("{other}"),
            }
        }
    }
}

#[test]
fn the_sleeping_side_is_rung_once_per_sleep() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    // SAFETY: the page lives as long as `pages`, and nothing else writes it.
    let mut sleeper = unsafe { Sleeper::of_receiver(pages.memory.receiver, true) };
    let mut rings = 0;
    for round in 0..3 {
        sleeper.arm(|| ());
        for _ in 0..5 {
            let space = producer.try_reserve(1).unwrap().unwrap();
            rings += u64::from(producer.commit(space, 1) == Wake::Ring);
        }
        assert_eq!(rings, round + 1);
        sleeper.disarm();
        while receive(&mut consumer).is_some() {}
    }
    let space = producer.try_reserve(1).unwrap().unwrap();
    assert_eq!(producer.commit(space, 1), Wake::None, "the receiver is awake");
    assert_eq!(producer.producer_page().wakes_sent(), 3);
}

#[test]
fn each_fast_path_reports_a_peer_that_must_be_checked() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    let mut sleeper = sleeper_of(&pages, true);
    assert!(send(&mut producer, b"sets the limit"));
    for is_asleep in [false, true] {
        if is_asleep {
            sleeper.arm(|| ());
        }
        assert_eq!(producer.send_fast(b"one"), Some(is_asleep));
        let space = producer.try_reserve(3).unwrap().unwrap();
        assert_eq!(producer.publish_fast(space, 3), Some(is_asleep));
        let space = producer.try_reserve(3).unwrap().unwrap();
        assert_eq!(producer.publish(space, 3), is_asleep);
    }
    assert_eq!((producer.check_peer(), producer.check_peer()), (Wake::Ring, Wake::Rung));
    sleeper.disarm();

    while send(&mut producer, &[1; 100]) {}
    let target = std::ptr::NonNull::from(&mut [0u8; 100]).cast();
    for is_asleep in [false, true] {
        if is_asleep {
            assert!(producer.arm(None, || ()).unwrap());
        }
        // SAFETY: no message has more than 100 bytes.
        let received = unsafe { consumer.receive_fast(|_| Some(target)) };
        assert_eq!(received.map(|(_, must_check)| must_check), Some(is_asleep));
        let record = consumer.peek().unwrap().unwrap();
        assert_eq!(consumer.release_fast(&record), Some(is_asleep));
    }
    assert_eq!(consumer.check_peer(), Wake::None, "the producer waits until the lane is empty");
    while let Some(record) = consumer.peek().unwrap() {
        assert!(consumer.release_fast(&record).is_some());
    }
    assert_eq!(consumer.check_peer(), Wake::Ring);
}

#[test]
fn a_producer_that_waits_for_space_is_rung_when_half_or_all_is_free() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    let mut sent = 0;
    while send(&mut producer, &[1; 100]) {
        sent += 1;
    }
    assert!(producer.arm(Some(100), || ()).unwrap(), "full: sleep");
    let mut released = 0;
    loop {
        let record = consumer.peek().unwrap().unwrap();
        released += 1;
        if consumer.release(&record) == Wake::Ring {
            break;
        }
    }
    assert_eq!(released, (sent + 1) / 2);
    assert!(!producer.arm(Some(100), || ()).unwrap(), "the lane has space: do not sleep");
    assert!(producer.arm(None, || ()).unwrap(), "not empty yet: sleep until it is");
    while let Some(record) = consumer.peek().unwrap() {
        released += 1;
        assert_eq!(consumer.release(&record) == Wake::Ring, released == sent);
    }
    assert!(!producer.arm(None, || ()).unwrap());
}

#[test]
fn closing_is_visible_to_the_peer() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    // SAFETY: the page lives as long as `pages`, and nothing else writes it.
    let mut sleeper = unsafe { Sleeper::of_receiver(pages.memory.receiver, true) };
    assert!(send(&mut producer, b"last"));
    assert!(!consumer.has_producer_closed());
    producer.close();
    assert!(consumer.has_producer_closed());
    assert_eq!(receive(&mut consumer).unwrap(), b"last");
    sleeper.close();
    consumer.close();
    let pages = Pages::new(4096, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    // SAFETY: the page lives as long as `pages`, and nothing else writes it.
    let mut sleeper = unsafe { Sleeper::of_receiver(pages.memory.receiver, true) };
    consumer.close();
    sleeper.close();
    assert!(send(&mut producer, b"in flight"));
    assert_eq!(producer.try_reserve(1), Err(LaneError::Closed), "the next reservation fails");
}

#[test]
fn idle_ranges_hold_no_record() {
    let pages = Pages::new(1 << 20, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    let mut queue = VecDeque::new();
    for number in 0..4000u64 {
        let message = payload(number, (number * 37 % 3000) as usize);
        while !send(&mut producer, &message) {
            assert!(!queue.is_empty(), "an empty lane takes any message");
            assert_eq!(receive(&mut consumer), queue.pop_front());
        }
        queue.push_back(message);
        if number % 97 == 0 {
            // Punch the idle ranges as `trim` does.
            for (offset, bytes) in producer.idle() {
                for at in (offset.next_multiple_of(8)..(offset + bytes) / 8 * 8).step_by(8) {
                    pages.word(at).set(0);
                }
            }
        }
        if number % 3 == 0 {
            assert_eq!(receive(&mut consumer), queue.pop_front());
        }
    }
    while let Some(message) = receive(&mut consumer) {
        assert_eq!(Some(message), queue.pop_front());
    }
    assert!(queue.is_empty());
}

#[test]
fn the_layout_signature_is_the_one_in_the_spec() {
    let spec = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../spec/layout.md")).unwrap();
    // The whole phrase, as the same line also contains the hash of an empty text.
    let signature = format!("Layout signature: **`{LAYOUT_SIGNATURE:#018x}`**");
    assert!(spec.contains(&signature), "spec/layout.md lacks {signature}");
    assert!(spec.contains(LAYOUT_TEXT), "spec/layout.md lacks the text of the signature:\n{LAYOUT_TEXT}");
}

/// The sleeper of the pages' receiver.
fn sleeper_of(pages: &Pages, can_barrier: bool) -> Sleeper {
    // SAFETY: the pages live as long as the test, and nothing else writes this one.
    unsafe { Sleeper::of_receiver(pages.memory.receiver, can_barrier) }
}

#[test]
fn a_side_is_armed_between_arm_and_disarm() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, _consumer) = pages.attach();
    let mut sleeper = sleeper_of(&pages, true);
    assert!(!sleeper.is_armed() && !producer.is_armed());
    sleeper.arm(|| {});
    assert!(send(&mut producer, b"x"));
    assert!(producer.arm(None, || {}).unwrap());
    assert!(sleeper.is_armed() && producer.is_armed());
    sleeper.disarm();
    producer.disarm();
    assert!(!sleeper.is_armed() && !producer.is_armed());
}

#[test]
fn a_waker_announces_fencing_only_after_a_request() {
    let pages = Pages::new(4096, Position::START);
    let mut sleeper = sleeper_of(&pages, true);
    let (mut producer, consumer) = pages.attach();
    sleeper.arm(|| {});
    assert!(send(&mut producer, b"x"));
    assert!(!producer.producer_page().is_fenced() && !consumer.needs_timed_wait(&sleeper));
    sleeper.disarm();
    // A second request changes nothing.
    sleeper.request_fencing();
    sleeper.request_fencing();
    assert!(sleeper.needs_fenced_wakers() && consumer.needs_timed_wait(&sleeper));
    assert!(send(&mut producer, b"x"));
    assert!(producer.producer_page().is_fenced() && !consumer.needs_timed_wait(&sleeper));
    // A successor keeps the request, with membarrier or without.
    assert!(sleeper_of(&pages, true).needs_fenced_wakers());
    assert!(!producer.has_consumer_closed(), "a request does not close");
}

/// Sends a message. Returns whether to ring the receiver.
fn rings(producer: &mut Producer) -> bool {
    let space = producer.try_reserve(1).unwrap().expect("the lane has space");
    producer.commit(space, 1) == Wake::Ring
}

/// The receiver announces a sleep, and the producer sends. Returns whether it rang, and whether the sleeper needed its
/// barrier.
fn wake(sleeper: &mut Sleeper, producer: &mut Producer, consumer: &mut Consumer) -> (bool, bool) {
    let mut barrier = false;
    sleeper.arm(|| barrier = !consumer.is_producer_fencing());
    let rang = rings(producer);
    sleeper.disarm();
    receive(consumer).unwrap();
    (rang, barrier)
}

#[test]
fn a_waker_that_rings_for_nearly_each_message_fences_until_it_no_longer_does() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    let mut sleeper = sleeper_of(&pages, true);
    for _ in 0..2 {
        let mut with_barrier = 0;
        while let (true, barrier) = wake(&mut sleeper, &mut producer, &mut consumer)
            && barrier
        {
            with_barrier += 1;
            assert!(with_barrier < 20, "the producer never begins to fence");
        }
        assert!(with_barrier > 2, "one or two wake-ups are not enough");
        // A few messages without a ring, between two rings, change nothing.
        for _ in 0..10 {
            for _ in 0..15 {
                assert!(!rings(&mut producer));
                receive(&mut consumer).unwrap();
            }
            assert_eq!(wake(&mut sleeper, &mut producer, &mut consumer), (true, false));
        }
        // In a stream the producer soon stops for good.
        let mut fenced = 0;
        for _ in 0..1000 {
            assert!(!rings(&mut producer));
            receive(&mut consumer).unwrap();
            fenced += u32::from(consumer.is_producer_fencing());
        }
        assert!((16..=100).contains(&fenced), "{fenced} fenced messages of a stream");
        // Rare rings do not make it fence.
        for _ in 0..50 {
            for _ in 0..50 {
                assert!(!rings(&mut producer));
                receive(&mut consumer).unwrap();
            }
            assert_eq!(wake(&mut sleeper, &mut producer, &mut consumer), (true, true));
        }
    }
}

#[test]
fn a_receiver_asleep_when_its_waker_stops_fencing_is_rung() {
    let mut stopped = 0;
    // At exactly one of these counts the producer stops fencing.
    for quiet in 0..100 {
        let pages = Pages::new(4096, Position::START);
        let (mut producer, mut consumer) = pages.attach();
        let mut sleeper = sleeper_of(&pages, true);
        while wake(&mut sleeper, &mut producer, &mut consumer).1 {}
        for _ in 0..quiet {
            assert!(!rings(&mut producer));
            receive(&mut consumer).unwrap();
        }
        let (rang, barrier) = wake(&mut sleeper, &mut producer, &mut consumer);
        assert!(rang);
        stopped += u32::from(!barrier && !consumer.is_producer_fencing());
    }
    assert_eq!(stopped, 1);
}

#[test]
fn a_producer_that_waits_for_space_omits_its_barrier_while_the_consumer_fences() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    let mut with_barrier = 0;
    for _ in 0..100 {
        send(&mut producer, b"x");
        let mut barrier = false;
        assert!(producer.arm(None, || barrier = true).unwrap());
        assert_eq!(barrier, !consumer.consumer_page().is_fenced());
        with_barrier += u32::from(barrier);
        let record = consumer.peek().unwrap().unwrap();
        assert_eq!(consumer.release(&record), Wake::Ring);
        producer.disarm();
    }
    assert!((3..20).contains(&with_barrier), "{with_barrier} barriers in a hundred sleeps");
}

#[test]
fn a_successor_inherits_fencing_and_stops_it_by_itself() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    let mut sleeper = sleeper_of(&pages, true);
    while wake(&mut sleeper, &mut producer, &mut consumer).1 {}
    let (tail, head) = (producer.tail(), consumer.head());
    // SAFETY: the pages live as long as the test, and it uses the predecessor no more.
    let mut producer = unsafe { Producer::attach(pages.memory, tail, head, 0, true) }.unwrap();
    assert!(consumer.is_producer_fencing(), "a sleeper may rely on it");
    assert_eq!(wake(&mut sleeper, &mut producer, &mut consumer), (true, false));
    for _ in 0..100 {
        assert!(!rings(&mut producer));
        receive(&mut consumer).unwrap();
    }
    assert!(!consumer.is_producer_fencing());
}

#[test]
fn a_waker_without_membarrier_or_with_a_request_never_stops_fencing() {
    for registered in [true, false] {
        let pages = Pages::new(4096, Position::START);
        let mut sleeper = sleeper_of(&pages, registered);
        // SAFETY: the pages live as long as the test, and the lane has one producer.
        let mut producer =
            unsafe { Producer::attach(pages.memory, Position::START, Position::START, 0, !registered) }.unwrap();
        // SAFETY: the pages live as long as the test, and the lane has one consumer.
        let mut consumer = unsafe { Consumer::attach(pages.memory, 4096, true) }.unwrap();
        for _ in 0..200 {
            assert!(!rings(&mut producer));
            receive(&mut consumer).unwrap();
            assert!(consumer.is_producer_fencing());
        }
        assert_eq!(wake(&mut sleeper, &mut producer, &mut consumer), (true, false));
    }
}

#[test]
fn only_closing_sets_the_closed_flag_of_a_sleep_word() {
    let pages = Pages::new(4096, Position::START);
    let mut sleeper = sleeper_of(&pages, true);
    let (mut producer, _consumer) = pages.attach();
    assert!(!producer.has_consumer_closed());
    sleeper.arm(|| {});
    assert!(send(&mut producer, b"x"));
    assert!(!producer.has_consumer_closed());
    sleeper.close();
    assert!(producer.has_consumer_closed());
}

#[test]
fn a_consumer_reports_its_limits_and_counters() {
    let pages = Pages::with_limit(4096, 100, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    assert_eq!((consumer.capacity(), consumer.message_bytes_max(), consumer.taken()), (4096, 100, 0));
    assert!(!consumer.may_be_ready());
    for message in [&b"one"[..], b"two, longer"] {
        assert!(send(&mut producer, message));
        assert!(consumer.may_be_ready());
        let record = consumer.peek().unwrap().unwrap();
        let mut copy = vec![0; message.len()];
        // SAFETY: the copy is as long as the message.
        unsafe { consumer.copy_out(&record, copy.as_mut_ptr()) };
        assert_eq!(copy, message);
        let _ = consumer.release(&record);
    }
    assert_eq!(consumer.taken(), 2);
    for count in 1..=3 {
        consumer.count_wait();
        consumer.count_sleep();
        assert_eq!((consumer.consumer_page().waits(), consumer.consumer_page().sleeps()), (count, count));
    }
}

#[test]
fn a_scan_stops_at_its_maximum_and_refuses_a_start_outside_the_data() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, _consumer) = pages.attach();
    for _ in 0..3 {
        assert!(send(&mut producer, b"x"));
    }
    let scan = |start, messages_max| scan(&pages.memory.data, message_bytes_limit(4096), start, messages_max);
    for messages_max in 0..=3 {
        assert_eq!(scan(Position::START, messages_max).messages, messages_max);
    }
    assert_eq!(scan(Position::START, 4).messages, 3);
    for messages_max in 0..2 {
        let outside = scan(Position { offset: 4096, seq: 1 }, messages_max);
        assert!(matches!(outside.problem, Some(LaneError::Corrupt { what: "start of a walk", found: 4096, .. })));
    }
}
