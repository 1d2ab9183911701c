//! A tap beside a sender and a receiver that run, stop and restart; and of lanes with arbitrary bytes.

use super::*;
use crate::observe::{Files, Lane, Observer};
use crate::{Options, Receiver, Sender};
use pelton_testkit::{Random, Watchdog};
use std::cell::{Cell, RefCell};
use std::path::Path;

/// The content of a message, which depends on its number: quick to write, so that a sender laps a tap's copy.
fn payload(seq: u32, bytes: usize) -> Vec<u8> {
    vec![(seq % 251) as u8; bytes]
}

thread_local! {
    /// What happens before the second part of a copy.
    static MEANWHILE: RefCell<Option<Box<dyn FnOnce()>>> = const { RefCell::new(None) };
    static PARTS: Cell<u32> = const { Cell::new(0) };
    /// What happens before each load of the tail.
    static BEFORE_TAIL: RefCell<Option<Box<dyn FnMut()>>> = const { RefCell::new(None) };
}

/// A tap calls this before it loads the tail.
pub(super) fn before_tail() {
    BEFORE_TAIL.with_borrow_mut(|action| action.iter_mut().for_each(|action| action()));
}

/// A tap calls this before it copies a part.
pub(super) fn before_part() {
    PARTS.set(PARTS.get() + 1);
    if PARTS.get() == 2
        && let Some(meanwhile) = MEANWHILE.take()
    {
        meanwhile();
    }
}

/// Does this in the middle of the next copy.
fn meanwhile(action: impl FnOnce() + 'static) {
    PARTS.set(0);
    MEANWHILE.set(Some(Box::new(action)));
}

fn lane(directory: &Path) -> Lane {
    let mut observer = Observer::new();
    observer.add_directory(directory);
    let mut found = observer.channels().channels;
    // It also finds the channels of the tests that run at the same time.
    let name = format!("path:{}", directory.canonicalize().unwrap().display());
    found.iter_mut().find(|channel| channel.name == name).expect("it was created").lanes.remove(0)
}

fn channel(directory: &Path, capacity: u64, message_bytes_max: u64) -> (Sender, Receiver) {
    let path = directory.join("channel");
    let options: Options = Options::new().capacity(capacity).message_bytes_max(message_bytes_max);
    (options.clone().cast().create_sender(&path).unwrap(), options.cast().create_receiver(&path).unwrap())
}

/// Polls up to a MiB, and returns the numbers and whether each is proven. Fails if a message is torn.
fn poll(tap: &mut Tap) -> Vec<(u32, bool)> {
    let mut found = Vec::new();
    let mut each = |Tapped { seq, payload: read, is_proven, .. }: Tapped<'_>| {
        assert!(read == payload(seq, read.len()), "message {seq} is torn, proven {is_proven}");
        found.push((seq, is_proven));
        Ok(())
    };
    let _ = (0..(1 << 20) / POLL_BYTES).all(|_| tap.poll(&mut each).unwrap());
    found
}

#[test]
fn unreleased_messages_are_proven_and_released_ones_are_not() {
    let directory = tempfile::tempdir().unwrap();
    let (mut sender, mut receiver) = channel(directory.path(), 1 << 20, 1000);
    let lane = lane(&directory.path().join("channel"));
    sender.send(&payload(1, 100)).unwrap();
    let (mut tap, mut from_start) = (lane.tap(false).unwrap(), lane.tap(true).unwrap());
    assert_eq!((poll(&mut tap), poll(&mut from_start)), (vec![], vec![(1, true)]));
    for seq in 2..=30 {
        sender.send(&payload(seq, 100)).unwrap();
    }
    let all: Vec<(u32, bool)> = (2..=30).map(|seq| (seq, true)).collect();
    assert_eq!((poll(&mut tap), poll(&mut from_start)), (all.clone(), all));
    assert_eq!((poll(&mut tap), tap.missed()), (vec![], 0));
    // Released before the tap polls.
    let mut late = lane.tap(true).unwrap();
    for _ in 1..=30 {
        drop(receiver.receive().unwrap());
    }
    let found = poll(&mut late);
    assert_eq!(found, (1..=30).map(|seq| (seq, false)).collect::<Vec<_>>());
    assert_eq!(late.missed(), 0);
}

#[test]
fn overwritten_messages_count_as_missed() {
    let directory = tempfile::tempdir().unwrap();
    let (mut sender, mut receiver) = channel(directory.path(), 1 << 16, 1000);
    let mut tap = lane(&directory.path().join("channel")).tap(false).unwrap();
    let mut seen = 0;
    for seq in 1..=1000 {
        sender.send(&payload(seq, 100)).unwrap();
        drop(receiver.receive().unwrap());
        if seq % 100 == 0 {
            seen += poll(&mut tap).len() as u64;
            assert_eq!(seen + tap.missed(), u64::from(seq));
        }
    }
    assert!(seen > 0 && tap.missed() > 0, "{seen} seen, {} missed", tap.missed());
}

#[test]
fn a_message_that_is_released_and_overwritten_during_the_copy_is_missed() {
    let directory = tempfile::tempdir().unwrap();
    let (mut sender, mut receiver) = channel(directory.path(), 1 << 16, 1000);
    let mut tap = lane(&directory.path().join("channel")).tap(true).unwrap();
    sender.send(&payload(1, 1000)).unwrap();
    meanwhile(move || {
        for seq in 2..=200 {
            drop(receiver.receive().unwrap());
            sender.send(&payload(seq, 1000)).unwrap();
        }
        std::mem::forget((sender, receiver));
    });
    let seen = poll(&mut tap);
    assert!(seen.iter().all(|(seq, _)| *seq > 1) && seen.last() == Some(&(200, true)), "{seen:?}");
    assert_eq!(seen.len() as u64 + tap.missed(), 200);
}

#[test]
fn a_released_message_that_is_overwritten_during_the_copy_is_missed() {
    let directory = tempfile::tempdir().unwrap();
    let (mut sender, mut receiver) = channel(directory.path(), 1 << 16, 1000);
    let mut tap = lane(&directory.path().join("channel")).tap(true).unwrap();
    for seq in 1..=3 {
        sender.send(&payload(seq, 1000)).unwrap();
        drop(receiver.receive().unwrap());
    }
    meanwhile(move || {
        for seq in 4..=200 {
            sender.send(&payload(seq, 1000)).unwrap();
            drop(receiver.receive().unwrap());
        }
        std::mem::forget((sender, receiver));
    });
    let mut seen = poll(&mut tap);
    seen.extend(poll(&mut tap));
    assert!(seen.iter().all(|(seq, _)| *seq > 3), "{seen:?}");
    assert_eq!(seen.len() as u64 + tap.missed(), 200);
}

#[test]
fn a_poll_beside_a_receiver_that_is_always_far_ahead_ends() {
    let _watchdog = Watchdog::new("the poll ends");
    let directory = tempfile::tempdir().unwrap();
    let (mut sender, mut receiver) = channel(directory.path(), 1 << 20, 1000);
    let mut tap = lane(&directory.path().join("channel")).tap(true).unwrap();
    let sent = std::rc::Rc::new(Cell::new(0));
    let counted = sent.clone();
    BEFORE_TAIL.set(Some(Box::new(move || {
        // The receiver releases all but one.
        let before = sent.get();
        for seq in before + 1..=before + 5000 {
            sender.send(&payload(seq, 1)).unwrap();
            if seq > 1 {
                drop(receiver.receive().unwrap());
            }
        }
        sent.set(before + 5000);
    })));
    let seen = poll(&mut tap).len() as u64;
    BEFORE_TAIL.set(None);
    assert!(seen + tap.missed() < u64::from(counted.get()), "{seen} seen, {} missed", tap.missed());
    assert!(counted.get() <= 1_000_000, "{} messages in one poll", counted.get());
}

#[test]
fn a_copy_beside_a_reservation_at_the_front_is_not_proven() {
    let directory = tempfile::tempdir().unwrap();
    let (mut sender, mut receiver) = channel(directory.path(), 1 << 16, 1500);
    let lane = lane(&directory.path().join("channel"));
    let mut tap = lane.tap(true).unwrap();
    // 1008 bytes each. The rest of the lane is too small for one more.
    let messages = lane.reading.capacity as u32 / 1008;
    for seq in 1..=messages {
        sender.send(&payload(seq, 1000)).unwrap();
        drop(receiver.receive().unwrap());
    }
    meanwhile(move || {
        // At the front; and aborted.
        sender.try_reserve(900).unwrap().unwrap().fill(255);
        std::mem::forget((sender, receiver));
    });
    let mut found = Vec::new();
    let polled = tap.poll(|Tapped { seq, payload: read, is_proven, .. }| {
        found.push((seq, is_proven, read == payload(seq, 1000)));
        Ok(())
    });
    polled.unwrap();
    assert_eq!(found[..2], [(1, false, false), (2, false, true)]);
    assert!(found[2..].iter().all(|(_, is_proven, is_whole)| !is_proven && *is_whole), "{found:?}");
}

#[test]
fn a_message_larger_than_a_copy_and_one_behind_a_jump_are_found() {
    let directory = tempfile::tempdir().unwrap();
    let (mut sender, mut receiver) = channel(directory.path(), 1 << 20, 400_000);
    let mut tap = lane(&directory.path().join("channel")).tap(false).unwrap();
    for (index, bytes) in [300_000, 10, 390_000, 200_000, 300_000, 0, 390_000].into_iter().enumerate() {
        let seq = index as u32 + 1;
        sender.send(&payload(seq, bytes)).unwrap();
        assert_eq!(poll(&mut tap), [(seq, true)], "{bytes} bytes");
        drop(receiver.receive().unwrap());
    }
    assert_eq!(tap.missed(), 0);
}

#[test]
fn messages_that_are_too_large_are_missed_and_the_lane_is_not_corrupt() {
    let directory = tempfile::tempdir().unwrap();
    let (mut sender, mut receiver) = channel(directory.path(), 2 << 20, 600_000);
    let mut tap = lane(&directory.path().join("channel")).tap(true).unwrap();
    for seq in 1..=STALLED_MAX + 10 {
        sender.send(&payload(seq, 600_000)).unwrap();
        assert_eq!((poll(&mut tap), tap.missed()), (vec![], u64::from(seq)));
        drop(receiver.receive().unwrap());
    }
    sender.send(&payload(STALLED_MAX + 11, 10)).unwrap();
    assert_eq!(poll(&mut tap), [(STALLED_MAX + 11, true)]);
}

#[test]
fn a_head_of_a_receiver_that_has_ended_or_closed_proves_nothing_and_a_new_tap_continues() {
    let directory = tempfile::tempdir().unwrap();
    let (mut sender, mut receiver) = channel(directory.path(), 1 << 16, 1000);
    let lane = lane(&directory.path().join("channel"));
    let tap = |pid| {
        let Files { producer, consumer, data, .. } = &*lane.files;
        Tap::new(producer.clone(), consumer.clone(), data.clone().unwrap(), Reader::of(pid), true).unwrap()
    };
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let (mut living, mut ending, mut unknown) = (tap(Some(std::process::id())), tap(Some(child.id())), tap(None));
    sender.send(&payload(1, 100)).unwrap();
    assert_eq!((poll(&mut living), poll(&mut ending)), (vec![(1, true)], vec![(1, true)]));
    assert_eq!(poll(&mut unknown), [(1, false)]);
    child.kill().unwrap();
    child.wait().unwrap();
    sender.send(&payload(2, 100)).unwrap();
    assert_eq!((poll(&mut living), poll(&mut ending)), (vec![(2, true)], vec![(2, false)]));
    // A page that a successor's has replaced: the sender goes on, laps it, and the lane is not damaged.
    for seq in 3..=2000 {
        drop(receiver.receive().unwrap());
        sender.send(&payload(seq, 1000)).unwrap();
    }
    let mut stale = tap(None);
    let path = directory.path().join("page");
    std::fs::write(&path, [[0; 128].as_slice(), &Position::START.pack().to_le_bytes(), &[0; 376]].concat()).unwrap();
    (stale.consumer, stale.next) = (File::open(&path).unwrap().into(), Position::START);
    for _ in 0..2 * STALLED_MAX {
        assert_eq!(poll(&mut stale), []);
    }
    let mut new = tap(Some(std::process::id()));
    new.continue_from(&stale);
    let seen = poll(&mut new);
    assert_eq!((seen.len() as u64 + new.missed(), seen.last()), (2000, Some(&(2000, true))));
    drop(receiver);
    sender.send(&payload(2001, 100)).unwrap();
    assert_eq!(poll(&mut living).last(), Some(&(2001, false)));
}

#[test]
fn a_tap_beside_a_running_channel_returns_whole_messages_and_counts_the_others() {
    const MESSAGES: u32 = 300_000;
    let _watchdog = Watchdog::new("the channel and its taps end");
    for (capacity, bytes_max) in [(64 << 10, 3000), (1 << 20, 200)] {
        let directory = tempfile::tempdir().unwrap();
        let (mut sender, mut receiver) = channel(directory.path(), capacity, bytes_max);
        let mut tap = lane(&directory.path().join("channel")).tap(true).unwrap();
        let sending = std::thread::spawn(move || {
            let mut random = Random::new(7);
            for seq in 1..=MESSAGES {
                sender.send(&payload(seq, random.below(bytes_max) as usize)).unwrap();
                // Pauses, in which a tap finds a tail that rests.
                if seq % 1000 == 0 {
                    std::thread::yield_now();
                }
            }
            sender
        });
        let receiving = std::thread::spawn(move || {
            for number in 0..MESSAGES {
                drop(receiver.receive().unwrap());
                if number % 777 == 0 {
                    std::thread::yield_now();
                }
            }
            receiver
        });
        let (mut seen, mut last) = (0, 0);
        loop {
            let has_ended = receiving.is_finished();
            let polled = tap.poll(|Tapped { seq, payload: read, is_proven, .. }| {
                assert!(!is_proven || read == payload(seq, read.len()), "message {seq} is torn");
                assert!(seq > last, "{seq} after {last}");
                (seen, last) = (seen + 1, seq);
                Ok(())
            });
            polled.unwrap();
            if has_ended && seen + tap.missed() == u64::from(MESSAGES) {
                break;
            }
        }
        println!("{capacity}: {seen} seen, {} missed", tap.missed());
        assert!(seen > 0);
        drop((sending.join().unwrap(), receiving.join().unwrap()));
    }
}

#[test]
fn a_tap_of_arbitrary_bytes_ends_with_an_error_or_without_messages() {
    let directory = tempfile::tempdir().unwrap();
    let mut random = Random::new(11);
    let file = |bytes: &[u8]| {
        let path = directory.path().join("file");
        std::fs::write(&path, bytes).unwrap();
        let file = Arc::new(File::open(&path).unwrap());
        std::fs::remove_file(&path).unwrap();
        file
    };
    for round in 0..3000 {
        let capacity = 4096u64;
        let (mut producer, mut consumer) = (vec![0; 512], vec![0; 512]);
        producer[64..72].copy_from_slice(&capacity.to_le_bytes());
        producer[72..80].copy_from_slice(&random.below(capacity).to_le_bytes());
        for page in [&mut producer, &mut consumer] {
            let position = Position { offset: random.below(520) * 8, seq: random.below(6) as u32 };
            page[128..136].copy_from_slice(&position.pack().to_le_bytes());
        }
        let mut data = random.bytes(4096);
        // Headers that are almost right.
        for word in data.chunks_exact_mut(8) {
            let low = if random.below(2) == 0 { random.below(300) } else { random.below(1 << 32) };
            word.copy_from_slice(&(random.below(6) << 32 | low).to_le_bytes());
        }
        data.truncate(if round % 10 == 0 { random.below(4096) as usize } else { 4096 });
        let Ok(mut tap) = Tap::new(file(&producer), file(&consumer), file(&data), Reader::Role, round % 2 == 0) else {
            continue;
        };
        for _ in 0..=STALLED_MAX {
            if tap.poll(|_| Ok(())).is_err() {
                break;
            }
        }
    }
}

#[test]
fn bounds_include_every_value_between_two_torn_reads() {
    assert_eq!(bounds(7, 7), [7, 7]);
    assert_eq!(bounds(0x10, 0x12), [0x10, 0x12]);
    assert_eq!(bounds(0x01ff, 0x0203), [0x0100, 0x02ff]);
    assert_eq!(bounds(0x0203, 0x01ff), [0x0100, 0x02ff]);
    assert_eq!(bounds(0x0001_0000, 0x0000_ffff), [0x0000_0000, 0x0001_ffff]);
}
