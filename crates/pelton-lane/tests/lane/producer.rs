//! What a producer reports, the limits of its placement of records, and how it detects the peer's state.

use crate::fixture::*;
use pelton_lane::*;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The sleeper of the pages' receiver.
fn sleeper_of(pages: &Pages) -> Sleeper {
    // SAFETY: the pages live as long as the test, and nothing else writes this one.
    unsafe { Sleeper::of_receiver(pages.memory.receiver, true) }
}

fn release_one(consumer: &mut Consumer) {
    assert!(receive(consumer).is_some());
}

#[test]
fn a_producer_reports_its_limits_and_counters() {
    let pages = Pages::with_limit(4096, 100, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    assert_eq!((producer.capacity(), producer.message_bytes_max(), producer.backed()), (4096, 100, 4096));
    assert!(!producer.may_be_ready());
    for message in [&b"one"[..], b"two, longer", b""] {
        assert!(send(&mut producer, message));
    }
    let mut batch = producer.try_begin_batch(record_bytes(7) + record_bytes(20)).unwrap().unwrap();
    for bytes in [7, 20] {
        assert!(producer.batch_message(&mut batch, bytes).is_some());
    }
    let _ = producer.commit_batch(batch);
    let page = producer.producer_page();
    assert_eq!((page.messages(), page.bytes(), page.depth_max()), (5, 3 + 11 + 7 + 20, 0));
    assert_eq!((producer.unreleased(), producer.refresh_head()), (5, Ok(5)));
    assert_eq!(producer.producer_page().depth_max(), 5);
    release_one(&mut consumer);
    assert!(producer.may_be_ready());
    assert_eq!((producer.unreleased(), producer.refresh_head()), (5, Ok(4)));
    assert!(!producer.may_be_ready());
    assert_eq!(producer.head(), consumer.head());
    assert_eq!(producer.producer_page().depth_max(), 5, "the maximum, not the last value");
    for count in 1..=3 {
        producer.count_wait();
        assert!(producer.arm(None, || ()).unwrap());
        producer.disarm();
        let page = producer.producer_page();
        assert_eq!((page.waits(), page.sleeps()), (count, count));
    }
}

#[test]
fn a_batch_takes_no_message_above_the_limit_though_its_record_would_fit() {
    let pages = Pages::with_limit(4096, 100, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    let too_large = producer.try_begin_batch(113).map(|_| ());
    assert_eq!(too_large, Err(LaneError::TooLarge { bytes: 113, bytes_max: 112 }));
    let mut batch = producer.try_begin_batch(112).unwrap().unwrap();
    // The records of 100 and 101 bytes have the same length.
    assert_eq!(record_bytes(101), 112);
    assert_eq!(producer.batch_message(&mut batch, 101), None);
    assert_eq!(producer.batch_message(&mut batch, u64::MAX), None);
    let space = producer.batch_message(&mut batch, 100).expect("the message fits");
    producer.copy_in(space, &payload(1, 100));
    assert_eq!(producer.batch_message(&mut batch, 0), None);
    let _ = producer.commit_batch(batch);
    assert_eq!(receive(&mut consumer), Some(payload(1, 100)));
}

#[test]
fn a_reservation_is_committed_once() {
    for descriptors in [0, 1] {
        let pages = Pages::new(4096, Position::START);
        let (mut producer, mut consumer) = pages.attach();
        let space = match descriptors {
            0 => producer.try_reserve(8),
            _ => producer.try_reserve_with_descriptors(8, descriptors),
        };
        let space = space.unwrap().unwrap();
        let _ = producer.commit(space, 8);
        let again = catch_unwind(AssertUnwindSafe(|| producer.commit(space, 8)));
        assert!(again.is_err(), "with {descriptors} descriptors");
        assert_eq!((producer.unreleased(), producer.producer_page().messages()), (1, 1));
        // Also if the next record begins at its end.
        assert!(send(&mut producer, b"another"));
        let again = catch_unwind(AssertUnwindSafe(|| producer.commit(space, 8)));
        assert!(again.is_err(), "with {descriptors} descriptors");
        release_one(&mut consumer);
        release_one(&mut consumer);
        assert_eq!(producer.refresh_head(), Ok(0));
    }
}

#[test]
fn nothing_is_reserved_past_the_backed_bytes() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    producer.set_backed(1 << 40);
    assert_eq!(producer.backed(), 4096, "at most the capacity");
    // A record of 56 bytes and the cleared header after it.
    producer.set_backed(56);
    assert_eq!(producer.backed(), 56);
    assert_eq!(producer.try_reserve(48), Err(LaneError::Unbacked { bytes: 64 }));
    producer.set_backed(64);
    assert!(send(&mut producer, &payload(1, 48)));
    assert_eq!(producer.try_reserve(0), Err(LaneError::Unbacked { bytes: 72 }));
    // The fast path ends there too, one word earlier.
    producer.set_backed(56 + 5 * 16 + 8);
    for number in 0..5 {
        assert!(send(&mut producer, &payload(number, 8)));
    }
    assert_eq!(producer.reserve_fast(0), None);
    assert_eq!(producer.try_reserve(0), Err(LaneError::Unbacked { bytes: 136 + 8 + 8 }));
    // The producer need not sleep, as the caller can allocate the memory.
    assert!(!producer.arm(Some(0), || ()).unwrap());
    assert_eq!(receive(&mut consumer), Some(payload(1, 48)));
    for number in 0..5 {
        assert_eq!(receive(&mut consumer), Some(payload(number, 8)));
    }
}

#[test]
fn a_bound_makes_a_lane_behave_like_a_smaller_one_until_it_is_lifted() {
    let pages = Pages::new(1 << 20, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    producer.set_window(1024);
    producer.set_bound(8192);
    let mut sent = 0;
    while send(&mut producer, &payload(sent, 100)) {
        sent += 1;
    }
    assert!((8192 - 2 * 112..8192).contains(&producer.tail().offset), "{:?}", producer.tail());
    // A sleep until there is space below the bound. Half of the messages provide it, at the front.
    assert!(producer.arm(Some(100), || ()).unwrap());
    (0..sent / 2).for_each(|_| release_one(&mut consumer));
    assert!(!producer.arm(Some(100), || ()).unwrap());
    while send(&mut producer, &payload(sent, 100)) {
        sent += 1;
    }
    assert!(producer.tail().offset < consumer.head().offset);
    // Lifted: the lane has its whole capacity, without another release.
    producer.set_bound(u64::MAX);
    let before = sent;
    while send(&mut producer, &payload(sent, 100)) {
        sent += 1;
    }
    assert!((sent - before) * 112 > (1 << 20) - 8192 - 1024, "{}", sent - before);
}

#[test]
fn a_producer_past_its_window_polls_the_head_once_per_16_kib() {
    let pages = Pages::new(1 << 20, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    producer.set_window(4096);
    // The consumer falls behind. It then releases so little at a time that a large message never fits at the front.
    for _ in 0..100 {
        assert!(send(&mut producer, b""));
    }
    let mut polls = Vec::new();
    while polls.len() < 4 {
        let before = producer.head();
        release_one(&mut consumer);
        let tail = producer.tail().offset;
        assert!(send(&mut producer, &[1; 1016]));
        if producer.head() != before {
            polls.push(tail);
        }
    }
    // Within the window the producer does not poll. Past it, one poll suffices for its own record and 16 KiB of others.
    assert!((4096 - 1032..=4096).contains(&polls[0]), "{polls:?}");
    for pair in polls.windows(2) {
        assert_eq!(pair[1] - pair[0], 17 * 1024, "{polls:?}");
    }
}

#[test]
fn idle_ranges_cover_all_but_the_records_and_the_cleared_header() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    assert_eq!(producer.idle(), [(0, 0), (8, 4088)]);
    for _ in 0..4 {
        assert!(send(&mut producer, &[1; 792]));
    }
    assert_eq!(producer.idle(), [(0, 0), (3208, 888)]);
    release_one(&mut consumer);
    release_one(&mut consumer);
    producer.refresh_head().unwrap();
    assert_eq!(producer.idle(), [(0, 1600), (3208, 888)]);
    // The next record goes to the front, where it fits; the jump to it is at 3200.
    assert!(send(&mut producer, &[1; 992]));
    assert_eq!(producer.tail().offset, 1000);
    assert_eq!(producer.idle(), [(1008, 592), (3208, 888)]);
    // The next one goes after the lap's end, at a multiple of 64: 3208 is 50 units and 8 bytes.
    assert!(send(&mut producer, &[1; 704]));
    assert_eq!(producer.tail().offset, 3264 + 712);
    assert_eq!(producer.producer_page().tail_and_floor(), (producer.tail(), 3264));
    assert_eq!(producer.idle(), [(0, 0), (3984, 112)], "the front is not free before the head has passed the floor");
    while receive(&mut consumer).is_some() {}
    producer.refresh_head().unwrap();
    assert_eq!(producer.idle(), [(0, 3976), (3984, 112)]);
}

#[test]
fn either_word_of_a_closing_receiver_closes_the_lane() {
    // Only the sleep word shows the close if the lane was created after it.
    let pages = Pages::new(4096, Position::START);
    let mut sleeper = sleeper_of(&pages);
    let (mut producer, _consumer) = pages.attach();
    sleeper.close();
    assert!(producer.has_consumer_closed() && !producer.has_unacknowledged_close());
    assert!(send(&mut producer, b"in flight"));
    assert_eq!(producer.try_reserve(1), Err(LaneError::Closed));

    let pages = Pages::new(4096, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    assert!(!producer.has_consumer_closed() && !producer.has_unacknowledged_close());
    consumer.close();
    assert!(producer.has_consumer_closed() && producer.has_unacknowledged_close());
    // If only the page shows the close, the producer detects it at its next poll: when the lane is full.
    let refused = loop {
        match producer.try_reserve(100) {
            Ok(Some(space)) if producer.unreleased() < 100 => assert_eq!(producer.commit(space, 100), Wake::None),
            refused => break refused,
        }
    };
    assert_eq!(refused, Err(LaneError::Closed));
}

#[test]
fn a_producer_without_consumer_reports_only_a_later_close() {
    let pages = Pages::new(4096, Position::START);
    let mut sleeper = sleeper_of(&pages);
    let (mut producer, mut consumer) = pages.attach();
    assert!(send(&mut producer, b"before"));
    consumer.close();
    sleeper.close();
    assert!(send(&mut producer, b"not polled yet"));
    assert_eq!(producer.try_reserve(1), Err(LaneError::Closed));
    producer.continue_without_consumer();
    assert!(producer.has_consumer_closed() && !producer.has_unacknowledged_close(), "the close is acknowledged");
    let mut sent = 2;
    while send(&mut producer, &[1; 100]) {
        sent += 1;
        assert!(sent < 100, "until the lane is full");
    }
    assert_eq!(producer.refresh_head(), Ok(sent));
    assert!(sent > 30, "until the lane is full");
    // The successor receives all of it. The producer reports the successor's close.
    let (mut page, mut receiver) = (ConsumerPage::new(consumer.head(), 2, 3), ReceiverPage::new());
    let (page, receiver) = (std::ptr::NonNull::from(&mut page), std::ptr::NonNull::from(&mut receiver));
    // SAFETY: both sides are dropped before the pages.
    let (again, mut successor, mut sleeper) = unsafe {
        let memory = Memory { consumer: page, receiver, ..pages.memory };
        let again = producer.attach_consumer(page, receiver, true).unwrap();
        let successor = Consumer::attach(memory, producer.message_bytes_max(), true).unwrap();
        (again, successor, Sleeper::of_receiver(receiver, true))
    };
    assert_eq!(again, sent);
    assert!(!producer.has_consumer_closed());
    for _ in 0..sent {
        release_one(&mut successor);
    }
    assert!(send(&mut producer, &[1; 2016]), "a poll of an open consumer");
    successor.close();
    sleeper.close();
    assert!(producer.has_unacknowledged_close());
    assert!(send(&mut producer, b""));
    assert_eq!(producer.try_reserve(1), Err(LaneError::Closed));
}

#[test]
fn a_producer_needs_timed_waits_until_the_consumer_fences() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    assert!(send(&mut producer, b"x") && send(&mut producer, b"y"));
    release_one(&mut consumer);
    assert!(!producer.needs_timed_wait() && !consumer.consumer_page().is_fenced(), "no request yet");
    producer.request_fencing();
    assert!(producer.needs_timed_wait());
    release_one(&mut consumer);
    assert!(consumer.consumer_page().is_fenced() && !producer.needs_timed_wait());
}

#[test]
fn a_wait_for_space_includes_two_marks() {
    // 4096 less three records of 1008 bytes leaves 1072, for a record, two marks and the cleared header.
    for (bytes, sleeps) in [(1040, false), (1041, true)] {
        let pages = Pages::new(4096, Position::START);
        let (mut producer, _consumer) = pages.attach();
        for _ in 0..3 {
            assert!(send(&mut producer, &[1; 1000]));
        }
        assert_eq!(producer.arm(Some(bytes), || ()), Ok(sleeps), "{bytes}");
        assert_eq!(producer.is_armed(), sleeps);
        producer.disarm();
        assert!(!producer.is_armed());
    }
    // A size above the limit counts as the limit, which fits an empty lane.
    let pages = Pages::new(4096, Position::START);
    let (mut producer, _consumer) = pages.attach();
    assert_eq!(producer.arm(Some(u64::MAX), || ()), Ok(false));
}

#[test]
fn a_position_outside_the_data_or_without_a_number_is_corrupt() {
    for (position, wanted) in [
        (Position { offset: 4088, seq: 7 }, None),
        (Position { offset: 4096, seq: 7 }, Some((4096, 4088))),
        (Position { offset: 64, seq: 0 }, Some((8, 1 << 32))),
    ] {
        let pages = Pages::new(4096, position);
        // SAFETY: the memory lives as long as `pages`, and the lane has no other side.
        let (consumer, producer) = unsafe {
            let consumer = Consumer::attach(pages.memory, 2016, true).map(|_| ());
            (consumer, Producer::attach(pages.memory, position, position, 0, true).map(|_| ()))
        };
        let corrupt = |what| match wanted {
            None => Ok(()),
            Some((found, wanted)) => Err(LaneError::Corrupt { what, found, wanted }),
        };
        assert_eq!(consumer, corrupt("head"), "{position:?}");
        assert_eq!(producer, corrupt("tail"), "{position:?}");
    }
}

#[test]
fn a_successor_continues_the_counters_of_its_page() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    for bytes in [100, 20, 3] {
        assert!(send(&mut producer, &payload(bytes, bytes as usize)));
    }
    assert_eq!(receive(&mut consumer), Some(payload(100, 100)));
    let (tail, head) = (producer.tail(), consumer.head());
    producer.close();
    consumer.close();
    // SAFETY: the pages outlive the successors, and the test uses their predecessors no more.
    let attach = |tail, head, floor| unsafe { Producer::attach(pages.memory, tail, head, floor, true) };
    let far = Position { seq: tail.seq + 512, ..tail };
    let too_many = LaneError::Corrupt { what: "records between head and tail", found: 512 + 2, wanted: 512 };
    assert_eq!(attach(far, head, 0).map(|_| ()), Err(too_many));
    assert!(
        attach(Position { seq: head.seq + 512, ..tail }, head, 0).is_ok(),
        "as many as fit of the smallest records"
    );
    // SAFETY: the pages outlive the successors, and the test uses their predecessors no more.
    let (mut producer, mut consumer) = unsafe {
        let consumer = Consumer::attach(pages.memory, 2016, true).unwrap();
        (attach(tail, head, tail.offset).unwrap(), consumer)
    };
    let page = producer.producer_page();
    assert!(!page.is_closed() && !consumer.consumer_page().is_closed());
    assert_eq!((page.tail_and_floor(), page.messages(), page.bytes()), ((tail, tail.offset), 3, 123));
    assert_eq!((consumer.taken(), consumer.consumer_page().bytes()), (1, 100));
    assert!(send(&mut producer, b"four"));
    for bytes in [20, 3] {
        assert_eq!(receive(&mut consumer), Some(payload(bytes, bytes as usize)));
    }
    assert_eq!(receive(&mut consumer).unwrap(), b"four");
    assert_eq!(consumer.peek(), Ok(None));
    assert_eq!((producer.producer_page().messages(), producer.producer_page().bytes()), (4, 127));
    let page = consumer.consumer_page();
    assert_eq!((consumer.taken(), page.messages(), page.bytes()), (4, 4, 127));
    // As after a crash between the floor and its jump.
    let tail = producer.tail();
    assert_eq!(attach(tail, tail, tail.offset + 64).unwrap().producer_page().tail_and_floor(), (tail, 0));
}

#[test]
fn a_successor_must_begin_at_the_head_that_the_producer_loaded() {
    let pages = Pages::new(4096, Position::START);
    let mut sleeper = sleeper_of(&pages);
    let (mut producer, mut consumer) = pages.attach();
    assert!(send(&mut producer, b"released") && send(&mut producer, b"not released"));
    release_one(&mut consumer);
    assert_eq!(producer.refresh_head(), Ok(1));
    sleeper.close();
    assert!(send(&mut producer, b"in flight"));
    assert_eq!(producer.try_reserve(1), Err(LaneError::Closed));
    let head = producer.head();
    let elsewhere = Position { seq: head.seq + 1, ..head };
    let corrupt = LaneError::Corrupt { what: "the successor's head", found: elsewhere.pack(), wanted: head.pack() };
    let mut receiver = ReceiverPage::new();
    let receiver = std::ptr::NonNull::from(&mut receiver);
    for (position, wanted) in [(elsewhere, Err(corrupt)), (head, Ok(2))] {
        let page = std::ptr::NonNull::from(Box::leak(Box::new(ConsumerPage::new(position, 2, 3))));
        // SAFETY: this page is never freed, and the receiver's lives as long as the test.
        assert_eq!(unsafe { producer.attach_consumer(page, receiver, true) }, wanted);
    }
    assert!(send(&mut producer, b"to the successor"), "the predecessor's close does not count");
}

#[test]
fn truncated_records_were_never_committed() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    for _ in 0..4 {
        assert!(send(&mut producer, &[1; 792]));
    }
    release_one(&mut consumer);
    release_one(&mut consumer);
    // The first goes to the front, the next after the lap's end at 3264: a floor.
    assert!(send(&mut producer, &[2; 992]) && send(&mut producer, &[3; 600]) && send(&mut producer, b"last"));
    let head = consumer.head();
    drop((producer, consumer));
    let limit = message_bytes_limit(4096);
    for (messages_max, end, floor) in [(4, 3264 + 608, 3264), (3, 1000, 0)] {
        let found = scan(&pages.memory.data, limit, head, messages_max);
        assert_eq!((found.end.offset, found.messages, found.floor, found.problem), (end, messages_max, floor, None));
        // SAFETY: the pages are mapped, and no side of the lane lives.
        unsafe { truncate(&pages.memory.data, pages.memory.producer.as_ref(), &found) };
        // SAFETY: the page lives as long as `pages`.
        assert_eq!(unsafe { pages.memory.producer.as_ref() }.tail_and_floor(), (found.end, floor));
        let all = scan(&pages.memory.data, limit, head, u64::MAX);
        assert_eq!((all.end, all.messages, all.problem), (found.end, messages_max, None));
    }
}

#[test]
fn every_short_size_is_copied_out_to_the_byte() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    for bytes in 0..200 {
        let message = payload(bytes, bytes as usize);
        assert!(send(&mut producer, &message));
        let record = consumer.peek().unwrap().unwrap();
        let mut copy = vec![0xa5; bytes as usize + 64];
        // SAFETY: the copy is longer than the message.
        unsafe { consumer.copy_out(&record, copy.as_mut_ptr().add(32)) };
        assert_eq!(copy[32..][..bytes as usize], message);
        assert!(
            copy[..32].iter().chain(&copy[32 + bytes as usize..]).all(|byte| *byte == 0xa5),
            "nothing outside the copy"
        );
        let _ = consumer.release(&record);
    }
}

#[test]
fn a_large_window_takes_the_slow_path_each_256_kib_and_reports_the_backlog() {
    let pages = Pages::new(4 << 20, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    producer.set_window(2 << 20);
    assert_eq!(producer.window(), 2 << 20);
    let (message, mut slow, mut sent) = ([5; 1000], Vec::new(), 0u64);
    while sent < 8 << 20 {
        if producer.reserve_fast(1000).is_none() {
            slow.push(sent);
        }
        let space = producer.try_reserve(1000).unwrap().unwrap();
        producer.copy_in(space, &message);
        let _ = producer.commit(space, 1000);
        sent += 1008;
        assert_eq!(producer.sent_bytes(), sent);
        // The consumer stays ten messages behind.
        if sent > 10 * 1008 {
            let token = consumer.peek().unwrap().unwrap();
            let _ = consumer.release(&token);
            producer.refresh_head().unwrap();
            assert!((10 * 1008..12 * 1008).contains(&producer.backlog_bytes()), "{}", producer.backlog_bytes());
        }
    }
    assert!(slow.windows(2).all(|pair| pair[1] - pair[0] <= (256 << 10) + 2016), "{slow:?}");
    assert!(slow.len() < 50, "{slow:?}");
}
