//! A hostile process changes the files of a broadcast between the steps of a subscriber that joins.

use crate::alone;
use crate::support::{TestDir, Watchdog};
use pelton::{Error, Options, Policy};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;

/// In the publisher's page and in the table; the place is behind each number (spec/broadcast.md).
const KEPT: (&str, u64) = ("publisher", 512);
const HELD: (&str, u64) = ("cursors", 128);

const MESSAGES: u64 = 50_000;

/// The step, the file, where to write in it, which number at the n-th time, and n.
type Hostile = (&'static str, File, u64, fn(u64) -> u64, u64);

static HOSTILE: Mutex<Option<Hostile>> = Mutex::new(None);

fn change(step: &'static str) {
    let mut hostile = HOSTILE.lock().unwrap();
    let Some((at_step, file, at, number, times)) = &mut *hostile else { return };
    if step == *at_step {
        *times += 1;
        let number = number(*times);
        // The place of that number: each message is a header of 8 bytes. Without messages, any place of that seq.
        let words = [number, (number << 32) | ((number - 1) % MESSAGES)].map(u64::to_le_bytes);
        file.write_all_at(words.as_flattened(), *at).unwrap();
    }
}

#[test]
fn a_hostile_process_that_changes_the_oldest_number_at_each_step_keeps_no_subscriber() {
    type Case = (&'static str, (&'static str, u64), Policy, fn(u64) -> u64, &'static str, u64);
    let grows = |times| 1 + 2 * times;
    let (changes, falls) = ("the oldest message, which changes at each load", "number of a durable cursor");
    let cases: [Case; 5] = [
        ("join: number", KEPT, Policy::Gate, grows, "kept, which changes at each load", 10_000),
        // Each walk passes over two messages.
        ("join: passes a message", HELD, Policy::Gate, grows, changes, 20_000),
        ("join: passes a message", KEPT, Policy::Lag, grows, changes, 20_000),
        ("join: passes a message", HELD, Policy::Gate, |times| 1 + 2 * (times % 2), falls, 2),
        ("join: passes a message", KEPT, Policy::Lag, |times| 1 + 2 * (times % 2), falls, 2),
    ];
    let _alone = alone();
    let _watchdog = Watchdog::new("a subscriber is kept");
    pelton::failpoints::set(change);
    for (step, (file, at), policy, number, problem, times) in cases {
        let directory = TestDir::new("a hostile process keeps no subscriber");
        let path = directory.path().join("b");
        let mut publisher = Options::new().capacity(1 << 20).history(MESSAGES).create_publisher(&path).unwrap();
        (0..MESSAGES).for_each(|_| publisher.send(b"").unwrap());
        drop(publisher);
        let file = File::options().write(true).open(path.join(file)).unwrap();
        *HOSTILE.lock().unwrap() = Some((step, file, at, number, 0));
        let joined = Options::new().policy(policy).open_subscriber(&path);
        let hostile = HOSTILE.lock().unwrap().take().unwrap();
        assert!(matches!(&joined, Err(Error::Corrupt(text)) if text.contains(problem)), "{joined:?}");
        assert_eq!(hostile.4, times, "{problem}");
    }
}
