//! Runs of records: what a consumer takes at once, as the bytes they are, and a producer that has all of its lane taken so.

use crate::fixture::*;
use pelton_lane::*;

/// The messages of a run, by its bytes alone.
fn messages_of(consumer: &Consumer, run: &Chunk) -> Vec<(u32, Vec<u8>)> {
    // SAFETY: in the pages, and nobody writes meanwhile.
    let mut bytes = unsafe { consumer.chunk_bytes(run).as_ref() };
    assert_eq!(bytes.len() as u64, run.bytes);
    let mut messages = Vec::new();
    while let Some((header, rest)) = bytes.split_first_chunk::<8>() {
        let header = u64::from_le_bytes(*header);
        let len = header as u32 as usize;
        messages.push(((header >> 32) as u32, rest[..len].to_vec()));
        bytes = &rest[len.next_multiple_of(8)..];
    }
    assert_eq!((messages.len() as u32, messages[0].0), (run.messages, run.first_seq));
    messages
}

fn take(consumer: &mut Consumer, bytes: u64) -> Chunk {
    let first = consumer.peek().unwrap().expect("a message is there");
    consumer.take_chunk(&first, bytes)
}

#[test]
fn a_run_is_what_stands_together_and_is_released_whole() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    for number in 0..6 {
        assert!(send(&mut producer, &payload(number, number as usize * 5)));
    }
    assert!(!consumer.has_taken());
    // Until they are at least so long: 8, 16, 24.
    let mut run = take(&mut consumer, 25);
    assert_eq!((run.first_seq, run.messages, run.bytes), (1, 3, 48));
    assert!(consumer.has_taken());
    let next = take(&mut consumer, u64::MAX);
    assert_eq!((next.first_seq, next.messages), (4, 3));
    assert_eq!(consumer.peek(), Ok(None));
    assert_eq!(producer.refresh_head(), Ok(6), "taken is not released");
    assert!(!run.clone().join(&run.clone()), "what does not follow is no part of it");
    assert!(run.join(&next));
    let wanted: Vec<_> = (0..6).map(|number| (number as u32 + 1, payload(number, number as usize * 5))).collect();
    assert_eq!(messages_of(&consumer, &run), wanted);
    let _ = consumer.release_taken();
    assert!(!consumer.has_taken());
    assert_eq!(producer.refresh_head(), Ok(0));
    assert_eq!(consumer.taken(), 6);
}

#[test]
fn a_run_ends_before_a_mark_and_begins_behind_one() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    assert!(send(&mut producer, &payload(0, 9)));
    let space = producer.try_reserve_with_descriptors(3, 2).unwrap().expect("there is room");
    producer.copy_in(space, &payload(1, 3));
    let _ = producer.commit(space, 3);
    assert!(send(&mut producer, &payload(2, 9)));
    let run = take(&mut consumer, u64::MAX);
    assert_eq!(messages_of(&consumer, &run), [(1, payload(0, 9))]);
    let first = consumer.peek().unwrap().expect("the one with descriptors");
    assert_eq!(first.descriptors, 2);
    let mut before = run;
    let run = consumer.take_chunk(&first, u64::MAX);
    assert_eq!(messages_of(&consumer, &run), [(2, payload(1, 3)), (3, payload(2, 9))]);
    assert!(!before.join(&run), "the mark lies between");
}

#[test]
fn a_run_ends_as_soon_as_it_is_as_long_as_is_wanted() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    for number in 0..8 {
        assert!(send(&mut producer, &payload(number, 8)));
    }
    // 16 each, and wherever the run begins.
    for (wanted, messages) in [(32, 2), (33, 3), (16, 1), (0, 1)] {
        assert_eq!(take(&mut consumer, wanted).messages, messages, "of {wanted} bytes");
    }
}

#[test]
fn a_run_is_joined_across_the_numbers_turn() {
    for start in [u32::MAX - 1, u32::MAX - 2] {
        let pages = Pages::new(4096, Position { offset: 0, seq: start });
        let (mut producer, mut consumer) = pages.attach();
        for number in 0..4 {
            assert!(send(&mut producer, &payload(number, 8)));
        }
        let mut run = take(&mut consumer, 32);
        let next = take(&mut consumer, 32);
        assert!(run.join(&next), "{start}: 0 is no number");
        assert_eq!((run.first_seq, run.messages), (start, 4));
    }
}

#[test]
fn a_producer_that_waits_for_room_is_seen() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    while send(&mut producer, &payload(0, 100)) {}
    assert!(!consumer.is_producer_waiting());
    assert!(producer.arm(Some(100), || ()).unwrap(), "there is no room");
    assert!(consumer.is_producer_waiting());
    producer.disarm();
    assert!(!consumer.is_producer_waiting());
}

#[test]
fn the_window_is_left_by_the_first_message_that_ends_behind_it() {
    let pages = Pages::new(8192, Position::START);
    let (mut producer, _consumer) = pages.attach();
    producer.set_window(1024);
    // A record has a header of 8 bytes, and the next one's header stands behind it.
    assert!(!producer.is_past_window(1024 - 16));
    assert!(producer.is_past_window(1024 - 15));
    assert!(send(&mut producer, &payload(0, 200)));
    assert!(!producer.is_past_window(1024 - 16 - 208));
    assert!(producer.is_past_window(1024 - 15 - 208));
    // More than a message can have counts as the largest.
    assert!(producer.is_past_window(u64::MAX));
    producer.set_window(8192);
    assert!(!producer.is_past_window(u64::MAX));
}

#[test]
fn who_is_both_sides_goes_on_at_the_front_when_all_is_taken_and_has_the_whole_window_each_time() {
    for start in [1, u32::MAX - 40] {
        let pages = Pages::new(8192, Position { offset: 0, seq: start });
        let (mut producer, mut consumer) = pages.attach();
        producer.set_window(2048);
        let (mut number, mut next) = (0, 0);
        for _ in 0..50 {
            // Larger and larger, so that the laps' ends lie elsewhere.
            let size = |number: u64| (number * 7 % (20 + number / 100)) as usize;
            while !producer.is_past_window(size(number) as u64) {
                assert!(send(&mut producer, &payload(number, size(number))));
                number += 1;
                if number % 61 == 0 {
                    // Somebody else has flushed what is there so far.
                    let run = take(&mut consumer, u64::MAX);
                    next += u64::from(run.messages);
                    let _ = consumer.release_taken();
                }
            }
            if next < number {
                let first = consumer.peek().unwrap().expect("a message is there");
                let run = consumer.take_chunk_to(&first, producer.tail());
                let found = messages_of(&consumer, &run);
                let wanted = (next..number).map(|number| payload(number, size(number)));
                assert!(found.iter().map(|(_, message)| message.clone()).eq(wanted));
                assert!(found.windows(2).all(|pair| seq_after(pair[0].0) == pair[1].0));
                next = number;
                let _ = consumer.release_taken();
                assert_eq!(consumer.taken(), number);
            }
            assert_eq!(producer.refresh_head(), Ok(0));
            producer.rewind(&mut consumer);
            assert_eq!(
                (producer.tail(), consumer.head()),
                (Position { offset: 0, ..producer.tail() }, producer.tail())
            );
            assert_eq!(consumer.peek(), Ok(None), "nothing of the lap before");
        }
        let page = producer.producer_page();
        consumer.store_counters();
        assert_eq!(page.messages(), number);
    }
}

#[test]
fn nothing_is_rewound_while_something_is_there() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    assert!(send(&mut producer, &payload(0, 9)));
    let tail = producer.tail();
    producer.rewind(&mut consumer);
    assert_eq!(producer.tail(), tail, "one is not taken");
    let first = consumer.peek().unwrap().unwrap();
    let run = consumer.take_chunk(&first, 1);
    producer.rewind(&mut consumer);
    assert_eq!(producer.tail(), tail, "one is not released");
    assert_eq!(messages_of(&consumer, &run), [(1, payload(0, 9))]);
    let _ = consumer.release_taken();
    producer.rewind(&mut consumer);
    assert_eq!(producer.tail().offset, 0);
    assert!(send(&mut producer, &payload(1, 20)));
    let first = consumer.peek().unwrap().unwrap();
    let ticket = consumer.hold(&first);
    let tail = producer.tail();
    assert!(!consumer.has_taken(), "held is not taken");
    assert!(send(&mut producer, &payload(2, 20)));
    let first = consumer.peek().unwrap().unwrap();
    let _ = consumer.take_chunk(&first, 1);
    assert!(consumer.has_taken(), "also behind one that is held");
    let _ = consumer.release_taken();
    assert!(!consumer.has_taken());
    producer.rewind(&mut consumer);
    assert!(producer.tail().offset > tail.offset, "one is held");
    let _ = consumer.release_held(ticket);
    producer.rewind(&mut consumer);
    assert_eq!(producer.tail().offset, 0);
}
