//! Broadcasts with false words: a subscriber that writes anything into its own page, and a directory in whose table and
//! page somebody writes anything, while both sides work. Nobody crashes, hangs or leaves its bounds.

use crate::hostile::meanwhile;
use crate::support::*;
use pelton::{Deadline, Error, Options, Policy, Publisher, Sent, StartFrom, Subscriber, inspect};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::RwLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Message `number`, of a size that depends on it.
fn message(number: u64) -> Vec<u8> {
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.resize(8 + (number * 37 % 500) as usize, number as u8);
    bytes
}

/// A value that a word may have, or not.
fn any_value(random: &mut Random) -> u64 {
    match random.below(4) {
        0 => random.word(),
        1 => random.below(5000),
        2 => 1 << random.below(64),
        _ => (1u64 << random.below(64)).wrapping_sub(1),
    }
}

#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    let mut random = Random::new(role.number("seed").unwrap());
    for life in 0..role.number("lives").unwrap() {
        let options = Options::new().policy([Policy::Lag, Policy::Latest, Policy::Gate][life as usize % 3]);
        let options = options.lag_after(Duration::from_millis(1)).connect_deadline(deadline());
        let mut subscriber = options.connect_subscriber(role.get("name")).unwrap();
        let words = own_cursor();
        for _ in 0..30 {
            for _ in 0..100 {
                // The fields, and the sleep words.
                let at = if random.below(4) == 0 { 512 + 8 * random.below(64) } else { 8 + random.below(28) } as usize;
                words[at].store(any_value(&mut random), Ordering::Relaxed);
            }
            // The publisher loads them.
            std::thread::sleep(Duration::from_micros(200));
            let _ = subscriber.try_receive();
        }
    }
    report("done");
}

/// The words of the cursor page of this process, which has one.
fn own_cursor() -> &'static [AtomicU64] {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| line.contains(" rw-s ") && line.contains("memfd:pelton-cursor"));
    let begin = usize::from_str_radix(line.unwrap().split('-').next().unwrap(), 16).unwrap();
    // SAFETY: the mapping is a page of 8192 bytes, and stays while the subscriber lives: the caller uses it no longer.
    unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(begin), 1024) }
}

/// Receives to the end: each message whole, and each number received or counted as missed.
fn to_the_end(mut subscriber: Subscriber) -> (u64, u64) {
    let (mut next, mut received) = (1, 0);
    loop {
        let error = match subscriber.receive_until(deadline()) {
            Ok(found) => {
                let found = found.expect("a message comes");
                assert!(found[..] == message(found.number())[..], "message {} is damaged", found.number());
                assert_eq!(found.number(), next + found.missed());
                (next, received) = (found.number() + 1, received + 1);
                continue;
            }
            Err(error) => error,
        };
        assert!(error.is_closed(), "{error}");
        return (received, subscriber.missed());
    }
}

#[test]
fn a_subscriber_that_writes_anything_into_its_page_harms_nobody_else() {
    let directory = TestDir::new("a subscriber writes anything");
    let (name, seed) = (directory.name(), u64::from(std::process::id()));
    println!("seed {seed}");
    let hold_max = Duration::from_millis(1);
    let mut publisher = Options::new().capacity(1 << 16).hold_max(hold_max).publish_at(&name).unwrap();
    let policies = [Options::new().policy(Policy::Lag), Options::new().lag_after(hold_max)];
    let subscribers = policies.map(|options| publisher.subscriber(&options).unwrap());
    let number = std::thread::scope(|scope| {
        let honest = subscribers.map(|subscriber| scope.spawn(|| to_the_end(subscriber)));
        let hostile = [1, 2].map(|more| {
            Child::start(Role::new(child, "hostile").with("name", &name).with("seed", seed + more).with("lives", 12))
        });
        let waiting = scope.spawn(move || {
            hostile.into_iter().for_each(|child| {
                child.expect("done");
                child.wait_for_success();
            });
        });
        while !waiting.is_finished() {
            let number = publisher.next_number();
            assert_eq!(publisher.send_until(&message(number), deadline()).unwrap(), Sent::Sent);
        }
        waiting.join().unwrap();
        let next = publisher.next_number();
        assert!(publisher.corrupt_subscribers() > 0, "none was found to be false");
        publisher.close().unwrap();
        for subscriber in honest {
            let (received, missed) = subscriber.join().unwrap();
            assert_eq!(received + missed, next - 1);
        }
        next - 1
    });
    println!("{number} messages");
}

/// What a side may report where words are false.
fn allowed<T>(found: Result<T, Error>) -> Option<T> {
    match found {
        Ok(found) => Some(found),
        Err(Error::Corrupt(_) | Error::NotAChannel { .. } | Error::Closed { .. } | Error::PeerDied { .. }) => None,
        Err(Error::Refused(_) | Error::RoleTaken { .. } | Error::TimedOut(_)) => None,
        Err(error) => panic!("{error:?}"),
    }
}

fn publisher_at(path: &Path) -> Result<Publisher, Error> {
    Options::new().capacity(1 << 16).history(10).create_publisher(path)
}

#[test]
fn each_call_returns_whatever_is_written_into_a_directory_meanwhile() {
    let root = TestDir::new("anything is written into a directory");
    let (path, seed) = (root.path().join("b"), u64::from(std::process::id()));
    println!("seed {seed}");
    let _watchdog = Watchdog::new("a call does not return");
    let files: RwLock<Option<[File; 2]>> = RwLock::new(None);
    let count = AtomicU64::new(seed);
    let write = || {
        let mut random = Random::new(count.fetch_add(1, Ordering::Relaxed));
        let opened = files.read().unwrap();
        let Some([table, page]) = &*opened else { return };
        let (file, word) = match random.below(4) {
            // The words of the table, the entries of its first slots, and their cursors.
            0 => (table, 8 + random.below(10)),
            1 => (table, 1024 + random.below(4 * 16)),
            2 => (table, 2048 + 1024 * random.below(4) + 8 + random.below(28)),
            _ => (page, 16 + random.below(80)),
        };
        file.write_all_at(&any_value(&mut random).to_le_bytes(), 8 * word).unwrap();
        drop(opened);
        std::thread::sleep(Duration::from_micros(random.below(200)));
    };
    let soon = || Instant::now() + Duration::from_micros(200);
    let mut received = 0;
    meanwhile(write, || {
        for round in 0..60 {
            let Some(mut publisher) = allowed(publisher_at(&path)) else {
                *files.write().unwrap() = None;
                std::fs::remove_dir_all(&path).unwrap();
                continue;
            };
            let open = |name: &str| File::options().write(true).open(path.join(name)).unwrap();
            files.write().unwrap().get_or_insert_with(|| [open("cursors"), open("publisher")]);
            let oldest = || Options::new().start_from(StartFrom::Oldest);
            let kinds =
                [oldest(), oldest().policy(Policy::Lag), oldest().durable("a"), Options::new().policy(Policy::Latest)];
            let mut subscribers: Vec<Subscriber> =
                kinds.iter().filter_map(|options| allowed(options.open_subscriber(&path))).collect();
            for _ in 0..50 {
                for _ in 0..4 {
                    let _ = allowed(publisher.send_until(&message(publisher.next_number()), Deadline::Now));
                }
                let _ = (allowed(publisher.admit()), allowed(publisher.arm(100)));
                publisher.disarm();
                for subscriber in &mut subscribers {
                    received += u64::from(matches!(allowed(subscriber.try_receive()), Some(Some(_))));
                    received += u64::from(matches!(allowed(subscriber.receive_until(soon())), Some(Some(_))));
                    let _ = allowed(subscriber.arm());
                    subscriber.disarm();
                }
            }
            let _ = (allowed(publisher.wait_released_until(soon())), publisher.subscribers());
            let _ = allowed(inspect::broadcast(&path));
            if round % 10 == 0 {
                let _ = pelton::observe::Observer::new().channels();
            }
        }
    });
    assert!(received > 0);
}
