//! Each page and each number by itself. The other files test what two sides do with them.

use crate::fixture::*;
use pelton_lane::*;

#[test]
fn the_hash_is_fnv_1a() {
    // The test vectors of the hash's definition.
    for (text, hash) in [("", 0xcbf29ce484222325), ("a", 0xaf63dc4c8601ec8c), ("foobar", 0x85944171f73967e8u64)] {
        assert_eq!(fnv1a(text.as_bytes()), hash, "{text:?}");
    }
}

#[test]
fn sizes_and_limits_at_their_ends() {
    for (bytes, record) in [(0, 8), (1, 16), (8, 16), (9, 24), (0x7fff_fff0, 0x7fff_fff8)] {
        assert_eq!(record_bytes(bytes), record, "{bytes}");
    }
    for (capacity, limit) in [
        (0, 0),
        (64, 0),
        (CAPACITY_MIN, 2016),
        (1 << 32, 0x7fff_ffe0),
        ((1 << 32) + 64, 0x7fff_fff0),
        (CAPACITY_MAX, 0x7fff_fff0),
    ] {
        assert_eq!(message_bytes_limit(capacity), limit, "{capacity}");
    }
    for (capacity, valid) in [
        (0, false),
        (CAPACITY_MIN - 64, false),
        (CAPACITY_MIN, true),
        (CAPACITY_MIN + 8, false),
        (CAPACITY_MIN + 64, true),
        (CAPACITY_MAX, true),
        (CAPACITY_MAX + 64, false),
    ] {
        assert_eq!(capacity_is_valid(capacity), valid, "{capacity}");
    }
    assert_eq!((CAPACITY_MIN, CAPACITY_MAX, WINDOW), (4096, 17_179_869_184, 262_144));
}

#[test]
fn a_position_is_one_word() {
    for (position, word) in [
        (Position::START, 1 << 32),
        (Position { offset: 8, seq: 2 }, 2 << 32 | 1),
        (Position { offset: CAPACITY_MAX - 8, seq: u32::MAX }, 0xffff_ffff_7fff_ffff),
    ] {
        assert_eq!(position.pack(), word, "{position:?}");
        assert_eq!(Position::unpack(word), position);
    }
}

#[test]
fn a_page_reports_its_generation_process_and_synced_position() {
    let pages = Pages::new(4096, Position { offset: 64, seq: 9 });
    // SAFETY: the pages live as long as the test.
    let (producer, consumer) = unsafe { (pages.memory.producer.as_ref(), pages.memory.consumer.as_ref()) };
    assert_eq!((producer.generation(), producer.pid()), (1, 1));
    assert_eq!((consumer.generation(), consumer.pid()), (1, 2));
    assert_eq!(consumer.head(), Position { offset: 64, seq: 9 });
    for (successors, pid) in [(2, 70), (3, 71)] {
        let (mut first, mut second) = pages.attach();
        first.close();
        second.close();
        assert!(producer.is_closed() && consumer.is_closed());
        producer.start_generation(pid);
        assert!(!producer.is_closed() && consumer.is_closed(), "each side starts its own generation");
        consumer.start_generation(pid + 10);
        assert!(!consumer.is_closed());
        assert_eq!((producer.generation(), producer.pid()), (successors, pid));
        assert_eq!((consumer.generation(), consumer.pid()), (successors, pid + 10));
    }
    assert_eq!(producer.synced(), Position::START);
    let position = Position { offset: 128, seq: 11 };
    producer.set_synced(position);
    assert_eq!(producer.synced(), position);
}

#[test]
fn a_generation_has_28_bits_in_a_mark() {
    let pages = Pages::new(4096, Position::START);
    let generation = (3 << 28) + 5;
    let mut page = ProducerPage::new(4096, message_bytes_limit(4096), generation, 1);
    let memory = Memory { producer: std::ptr::NonNull::from(&mut page), ..pages.memory };
    // SAFETY: both sides are dropped before the page.
    let (mut producer, mut consumer) = unsafe {
        let producer = Producer::attach(memory, Position::START, Position::START, 0, true).unwrap();
        (producer, Consumer::attach(memory, message_bytes_limit(4096), true).unwrap())
    };
    assert_eq!(consumer.generation(), 5);
    assert!(send(&mut producer, b"x"));
    assert_eq!(pages.word(0).get(), 1 << 32 | 1 << 31 | 2 << 28 | 5);
    assert_eq!(receive(&mut consumer).unwrap(), b"x");
    assert_eq!(consumer.generation(), 5);
}
