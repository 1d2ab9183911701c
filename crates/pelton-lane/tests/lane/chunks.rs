//! Chunks: a consumer takes consecutive records as bytes, and an owner of both sides takes its whole lane so.

use crate::fixture::*;
use pelton_lane::*;

/// The messages of a chunk, from its bytes alone.
fn messages_of(consumer: &Consumer, chunk: &Chunk) -> Vec<(u32, Vec<u8>)> {
    // SAFETY: the chunk is not released, so the producer does not write there.
    let mut bytes = unsafe { consumer.chunk_bytes(chunk).as_ref() };
    assert_eq!(bytes.len() as u64, chunk.bytes);
    let mut messages = Vec::new();
    while let Some((header, rest)) = bytes.split_first_chunk::<8>() {
        let header = u64::from_le_bytes(*header);
        let len = header as u32 as usize;
        messages.push(((header >> 32) as u32, rest[..len].to_vec()));
        bytes = &rest[len.next_multiple_of(8)..];
    }
    assert_eq!((messages.len() as u32, messages[0].0), (chunk.messages, chunk.first_seq));
    messages
}

fn take(consumer: &mut Consumer, bytes: u64) -> Chunk {
    let first = consumer.peek().unwrap().expect("the lane is not empty");
    consumer.take_chunk(&first, bytes)
}

#[test]
fn a_chunk_holds_consecutive_records_and_is_released_whole() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    for number in 0..6 {
        assert!(send(&mut producer, &payload(number, number as usize * 5)));
    }
    assert!(!consumer.has_taken());
    // The records have 8, 16 and 24 bytes: 25 need all three.
    let mut chunk = take(&mut consumer, 25);
    assert_eq!((chunk.first_seq, chunk.messages, chunk.bytes), (1, 3, 48));
    assert!(consumer.has_taken());
    let next = take(&mut consumer, u64::MAX);
    assert_eq!((next.first_seq, next.messages), (4, 3));
    assert_eq!(consumer.peek(), Ok(None));
    assert_eq!(producer.refresh_head(), Ok(6), "the records are taken, not released");
    assert!(!chunk.clone().join(&chunk.clone()), "a chunk joins only one that follows it");
    assert!(chunk.join(&next));
    let wanted: Vec<_> = (0..6).map(|number| (number as u32 + 1, payload(number, number as usize * 5))).collect();
    assert_eq!(messages_of(&consumer, &chunk), wanted);
    let _ = consumer.release_taken();
    assert!(!consumer.has_taken());
    assert_eq!(producer.refresh_head(), Ok(0));
    assert_eq!(consumer.taken(), 6);
}

#[test]
fn a_chunk_ends_before_a_mark_and_may_begin_after_one() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    assert!(send(&mut producer, &payload(0, 9)));
    let space = producer.try_reserve_with_descriptors(3, 2).unwrap().expect("the lane has space");
    producer.copy_in(space, &payload(1, 3));
    let _ = producer.commit(space, 3);
    assert!(send(&mut producer, &payload(2, 9)));
    let chunk = take(&mut consumer, u64::MAX);
    assert_eq!(messages_of(&consumer, &chunk), [(1, payload(0, 9))]);
    let first = consumer.peek().unwrap().expect("the message with descriptors");
    assert_eq!(first.descriptors, 2);
    let mut before = chunk;
    let chunk = consumer.take_chunk(&first, u64::MAX);
    assert_eq!(messages_of(&consumer, &chunk), [(2, payload(1, 3)), (3, payload(2, 9))]);
    assert!(!before.join(&chunk), "the mark separates them");
}

#[test]
fn a_chunk_ends_at_the_wanted_length() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    for number in 0..8 {
        assert!(send(&mut producer, &payload(number, 8)));
    }
    // Each record has 16 bytes. The length counts from the chunk's first record.
    for (wanted, messages) in [(32, 2), (33, 3), (16, 1), (0, 1)] {
        assert_eq!(take(&mut consumer, wanted).messages, messages, "{wanted} bytes wanted");
    }
}

#[test]
fn chunks_join_where_the_sequence_numbers_wrap() {
    for start in [u32::MAX - 1, u32::MAX - 2] {
        let pages = Pages::new(4096, Position { offset: 0, seq: start });
        let (mut producer, mut consumer) = pages.attach();
        for number in 0..4 {
            assert!(send(&mut producer, &payload(number, 8)));
        }
        let mut chunk = take(&mut consumer, 32);
        let next = take(&mut consumer, 32);
        assert!(chunk.join(&next), "{start}: no record has number 0");
        assert_eq!((chunk.first_seq, chunk.messages), (start, 4));
    }
}

#[test]
fn a_consumer_detects_a_producer_that_waits_for_space() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    while send(&mut producer, &payload(0, 100)) {}
    assert!(!consumer.is_producer_waiting());
    assert!(producer.arm(Some(100), || ()).unwrap(), "the lane is full");
    assert!(consumer.is_producer_waiting());
    producer.disarm();
    assert!(!consumer.is_producer_waiting());
}

#[test]
fn a_message_that_ends_after_the_window_is_past_it() {
    let pages = Pages::new(8192, Position::START);
    let (mut producer, _consumer) = pages.attach();
    producer.set_window(1024);
    // A record has a header of 8 bytes, and the next header follows it.
    assert!(!producer.is_past_window(1024 - 16));
    assert!(producer.is_past_window(1024 - 15));
    assert!(send(&mut producer, &payload(0, 200)));
    assert!(!producer.is_past_window(1024 - 16 - 208));
    assert!(producer.is_past_window(1024 - 15 - 208));
    // A size above the limit counts as the limit.
    assert!(producer.is_past_window(u64::MAX));
    producer.set_window(8192);
    assert!(!producer.is_past_window(u64::MAX));
}

#[test]
fn an_owner_of_both_sides_rewinds_an_empty_lane_and_reuses_its_whole_window() {
    for start in [1, u32::MAX - 40] {
        let pages = Pages::new(8192, Position { offset: 0, seq: start });
        let (mut producer, mut consumer) = pages.attach();
        producer.set_window(2048);
        let (mut number, mut next) = (0, 0);
        for _ in 0..50 {
            // The sizes grow, so each lap ends elsewhere.
            let size = |number: u64| (number * 7 % (20 + number / 100)) as usize;
            while !producer.is_past_window(size(number) as u64) {
                assert!(send(&mut producer, &payload(number, size(number))));
                number += 1;
                if number % 61 == 0 {
                    // As another thread flushes the records committed so far.
                    let chunk = take(&mut consumer, u64::MAX);
                    next += u64::from(chunk.messages);
                    let _ = consumer.release_taken();
                }
            }
            if next < number {
                let first = consumer.peek().unwrap().expect("the lane is not empty");
                let chunk = consumer.take_chunk_to(&first, producer.tail());
                let found = messages_of(&consumer, &chunk);
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
            assert_eq!(consumer.peek(), Ok(None), "no record of the previous lap");
        }
        let page = producer.producer_page();
        consumer.store_counters();
        assert_eq!(page.messages(), number);
    }
}

#[test]
fn a_lane_with_unreleased_records_is_not_rewound() {
    let pages = Pages::new(4096, Position::START);
    let (mut producer, mut consumer) = pages.attach();
    assert!(send(&mut producer, &payload(0, 9)));
    let tail = producer.tail();
    producer.rewind(&mut consumer);
    assert_eq!(producer.tail(), tail, "one record is not taken");
    let first = consumer.peek().unwrap().unwrap();
    let chunk = consumer.take_chunk(&first, 1);
    producer.rewind(&mut consumer);
    assert_eq!(producer.tail(), tail, "one record is not released");
    assert_eq!(messages_of(&consumer, &chunk), [(1, payload(0, 9))]);
    let _ = consumer.release_taken();
    producer.rewind(&mut consumer);
    assert_eq!(producer.tail().offset, 0);
    assert!(send(&mut producer, &payload(1, 20)));
    let first = consumer.peek().unwrap().unwrap();
    let ticket = consumer.hold(&first);
    let tail = producer.tail();
    assert!(!consumer.has_taken(), "a held record does not count as taken");
    assert!(send(&mut producer, &payload(2, 20)));
    let first = consumer.peek().unwrap().unwrap();
    let _ = consumer.take_chunk(&first, 1);
    assert!(consumer.has_taken(), "also after a held record");
    let _ = consumer.release_taken();
    assert!(!consumer.has_taken());
    producer.rewind(&mut consumer);
    assert!(producer.tail().offset > tail.offset, "one record is held");
    let _ = consumer.release_held(ticket);
    producer.rewind(&mut consumer);
    assert_eq!(producer.tail().offset, 0);
}
