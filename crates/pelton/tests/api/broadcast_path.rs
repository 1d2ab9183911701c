//! A broadcast in a directory: subscribers that come later, durable ones that return, those of another user, and
//! successors of the publisher. The crash test kills and stops all of them at random.

use crate::openings::finish;
use crate::support::*;
use pelton::{
    Deadline, Error, Options, Policy, Publisher, Sent, StartFrom, Subscriber, SubscriberEvent, SubscriberSet, Wait,
    inspect,
};
use rustix::fs::{Mode, OFlags};
use std::fs::{File, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

const CAPACITY: u64 = 1 << 16;
const NOBODY: u32 = 65534;

/// Message `number`, of a size that depends on it.
fn message(number: u64) -> Vec<u8> {
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.resize(8 + (number * 37 % 500) as usize, number as u8);
    bytes
}

fn publisher(path: &Path) -> Publisher {
    Options::new().capacity(CAPACITY).create_publisher(path).unwrap()
}

fn send(publisher: &mut Publisher, messages: u64) {
    for _ in 0..messages {
        let number = publisher.next_number();
        assert_eq!(publisher.send_until(&message(number), deadline()).unwrap(), Sent::Sent, "message {number}");
    }
}

fn oldest() -> Options<pelton::options::maker::OpenSubscriber> {
    Options::new().start_from(StartFrom::Oldest)
}

/// Receives the messages of these numbers.
fn expect(subscriber: &mut Subscriber, numbers: std::ops::RangeInclusive<u64>) {
    for number in numbers {
        let found = subscriber.receive_until(deadline()).unwrap().expect("a message comes");
        assert_eq!((found.number(), found.missed()), (number, 0));
        assert_eq!(found[..], message(number)[..]);
    }
}

#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    let path = PathBuf::from(role.get("path"));
    match role.get("role") {
        // Subscribes as another user, and receives to the end.
        "stranger" => {
            // SAFETY: no pointers.
            assert_eq!(unsafe { libc::setgid(NOBODY) | libc::setuid(NOBODY) }, 0);
            let options = oldest().mode(0o777).allow_uids(&[role.number("allow").unwrap() as u32]);
            let mut subscriber = match options.durable("audit").open_subscriber(&path) {
                Ok(subscriber) => subscriber,
                Err(error) => return report(format!("{error:?}")),
            };
            report("open");
            loop {
                match subscriber.receive_until(deadline()) {
                    Ok(found) => report(found.expect("a message comes").number()),
                    Err(error) => return report(format!("{error:?}")),
                }
            }
        }
        "publisher" => {
            let mut publisher = publisher(&path);
            send(&mut publisher, 3);
            report("sent");
            read_line_from_parent();
        }
        // Gates until it is killed.
        "gate" => {
            let _subscriber = Options::new().open_subscriber(&path).unwrap();
            report("open");
            read_line_from_parent();
        }
        other => panic!("{other}"),
    }
}

#[test]
fn subscribers_come_later_and_a_publisher_continues_where_its_predecessor_was() {
    let root = TestDir::new("subscribers come later");
    let path = root.path().join("b");
    let mut first = publisher(&path);
    send(&mut first, 10);
    assert!(matches!(Options::new().create_publisher(&path), Err(Error::RoleTaken { .. })));
    drop(first);
    // Without a publisher.
    let mut late = oldest().open_subscriber(&path).unwrap();
    expect(&mut late, 1..=10);
    assert!(late.try_receive().unwrap().is_none(), "it waits for a first publisher");
    let mut now = Options::new().open_subscriber(&path).unwrap();
    let mut last = Options::new().start_from(StartFrom::Last(3)).open_subscriber(&path).unwrap();
    expect(&mut last, 8..=10);
    let mut newest = oldest().policy(Policy::Latest).open_subscriber(&path).unwrap();
    let found = newest.receive_until(deadline()).unwrap().expect("the newest message is there");
    assert_eq!((found.number(), found.missed()), (10, 9));
    drop(found);
    let mut second = publisher(&path);
    assert_eq!(second.subscriber_count(), 4);
    send(&mut second, 5);
    expect(&mut late, 11..=15);
    expect(&mut now, 11..=15);
    expect(&mut last, 11..=15);
    assert!(second.wait_released_until(deadline()).unwrap());
    drop(second);
    for subscriber in [&mut late, &mut now, &mut last] {
        assert!(matches!(subscriber.receive(), Err(Error::Closed { .. })));
        assert!(!subscriber.resume_until(Deadline::Now).unwrap());
    }
    let mut third = publisher(&path);
    for subscriber in [&mut late, &mut now, &mut last] {
        assert!(subscriber.resume_until(deadline()).unwrap());
    }
    send(&mut third, 200);
    // Whole laps, with three gates.
    for round in 0..20 {
        let from = 16 + 200 * round;
        expect(&mut late, from..=from + 199);
        expect(&mut now, from..=from + 199);
        expect(&mut last, from..=from + 199);
        send(&mut third, 200);
    }
    let info = inspect::broadcast(&path).unwrap();
    assert_eq!((info.next, info.subscriptions.len()), (16 + 200 * 21, 4));
    assert!(info.publisher.is_alive && info.publisher.generation == 3);
    assert!(matches!(inspect::remove(&path), Err(Error::RoleTaken { .. })));
    drop((late, now, last, newest, third));
    assert!(inspect::broadcast(&path).unwrap().subscriptions.is_empty());
    inspect::remove(&path).unwrap();
}

#[test]
fn a_durable_subscriber_continues_where_it_was_and_one_process_at_a_time_uses_its_name() {
    let root = TestDir::new("a durable subscriber continues");
    let path = root.path().join("b");
    let mut publisher = publisher(&path);
    let durable = || Options::new().durable("audit");
    let mut subscriber = durable().open_subscriber(&path).unwrap();
    send(&mut publisher, 10);
    expect(&mut subscriber, 1..=4);
    match durable().open_subscriber(&path) {
        Err(Error::RoleTaken { role, pid, .. }) => {
            assert_eq!(pid, std::process::id());
            assert!(role.contains("audit"), "{role}");
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(inspect::remove_durable(&path, "audit"), Err(Error::RoleTaken { .. })));
    // A message that it has and that it is not done with comes again.
    let held = subscriber.receive().unwrap();
    assert_eq!(held.number(), 5);
    std::mem::forget(held);
    drop(subscriber);
    // While it is away it gates.
    let mut sent = 10;
    while publisher.try_send(&message(publisher.next_number())).unwrap() == Sent::Sent {
        sent += 1;
    }
    assert!((100..1000).contains(&sent), "{sent}");
    let states = publisher.subscribers();
    assert_eq!((states.len(), states[0].peer.pid, states[0].behind), (1, 0, sent - 4));
    drop(publisher);
    let mut publisher = self::publisher(&path);
    assert_eq!(publisher.try_send(&message(sent + 1)).unwrap(), Sent::Full);
    let mut subscriber = durable().open_subscriber(&path).unwrap();
    expect(&mut subscriber, 5..=sent);
    // It returns with another policy, and is passed while it is away: it learns exactly what it missed.
    drop(subscriber);
    drop(durable().policy(Policy::Lag).open_subscriber(&path).unwrap());
    send(&mut publisher, 2000);
    let mut subscriber = durable().policy(Policy::Lag).open_subscriber(&path).unwrap();
    let found = subscriber.receive().unwrap();
    assert_eq!(found.number(), sent + 1 + found.missed());
    assert!(found.missed() > 0);
    let (after, missed) = (found.number() + 1, found.missed());
    drop(found);
    expect(&mut subscriber, after..=after + 1);
    assert_eq!(subscriber.missed(), missed);
    drop(subscriber);
    // It may have been passed, so it cannot gate any more: nothing changes, and it holds nobody up.
    send(&mut publisher, 2000);
    for options in [durable(), durable()] {
        match options.open_subscriber(&path) {
            Err(Error::Refused(text)) => assert!(text.contains("--durable audit"), "{text}"),
            other => panic!("{other:?}"),
        }
        send(&mut publisher, 2000);
    }
    drop(durable().lag_after(Duration::from_millis(1)).open_subscriber(&path).unwrap());
    assert!(matches!(durable().open_subscriber(&path), Err(Error::Refused(_))));
    drop(durable().policy(Policy::Lag).open_subscriber(&path).unwrap());
    send(&mut publisher, 1);
    // Another gate, which is removed while the publisher waits for it.
    drop(Options::new().durable("other").open_subscriber(&path).unwrap());
    while publisher.try_send(&message(publisher.next_number())).unwrap() == Sent::Sent {}
    let (thread, threads) = std::sync::mpsc::channel();
    let sending = std::thread::spawn(move || {
        thread.send(this_thread()).unwrap();
        send(&mut publisher, 1);
        publisher
    });
    wait_until_thread_polls(threads.recv().unwrap());
    assert!(inspect::remove_durable(&path, "other").unwrap());
    assert!(!inspect::remove_durable(&path, "other").unwrap());
    let mut publisher = sending.join().unwrap();
    publisher.admit().unwrap();
    let listed =
        |publisher: &mut Publisher| -> Vec<_> { publisher.subscribers().into_iter().map(|one| one.durable).collect() };
    assert_eq!(listed(&mut publisher), [Some("audit".to_owned())]);
    // Once the name has another process, what it was before is not listed.
    let again = durable().policy(Policy::Lag).open_subscriber(&path).unwrap();
    assert_eq!(listed(&mut publisher), []);
    publisher.admit().unwrap();
    assert_eq!(listed(&mut publisher), [Some("audit".to_owned())]);
    drop((again, publisher));
    let names: Vec<_> = inspect::broadcast(&path).unwrap().subscriptions.into_iter().map(|one| one.durable).collect();
    assert_eq!(names, [Some("audit".to_owned())]);
    assert!(matches!(Options::new().durable("a b").open_subscriber(&path), Err(Error::Name { .. })));
    inspect::remove(&path).unwrap();
}

#[test]
fn a_loop_opens_both_sides_and_each_learns_of_the_durable_subscription() {
    let root = TestDir::new("a loop opens both sides");
    let path = root.path().join("b");
    let wait = || Options::new().connect_deadline(deadline());
    // It waits for the directory.
    let mut early = wait().durable("audit").start_from(StartFrom::Oldest).start_open_subscriber(&path).unwrap();
    assert!(early.try_finish().unwrap().is_none());
    let mut first = finish(&mut Options::new().capacity(CAPACITY).start_create_publisher(&path).unwrap()).unwrap();
    send(&mut first, 3);
    let mut subscriber = finish(&mut early).unwrap();
    assert!(!subscriber.continues());
    expect(&mut subscriber, 1..=1);
    // Each waits for the other one of its role.
    let mut second = Options::new().connect_deadline(deadline()).start_create_publisher(&path).unwrap();
    let mut successor = wait().durable("audit").start_open_subscriber(&path).unwrap();
    assert!(second.try_finish().unwrap().is_none() && successor.try_finish().unwrap().is_none());
    assert_eq!(first.admit().unwrap(), 1);
    let state = &first.subscribers()[0];
    assert_eq!((state.durable.as_deref(), state.peer.pid), (Some("audit"), std::process::id()));
    drop((subscriber, first));
    let mut second = finish(&mut second).unwrap();
    let mut subscriber = finish(&mut successor).unwrap();
    assert!(subscriber.continues());
    expect(&mut subscriber, 2..=3);
    match subscriber.resume_until(Deadline::Now) {
        Err(Error::Refused(text)) => assert!(text.contains("alive"), "{text}"),
        other => panic!("{other:?}"),
    }
    let mut other = Options::new().open_subscriber(&path).unwrap();
    assert!(!other.continues());
    send(&mut second, 1);
    expect(&mut other, 4..=4);
    assert_eq!(second.admit().unwrap(), 2);
    let names: Vec<_> = second.subscribers().into_iter().map(|state| state.durable).collect();
    assert_eq!(names, [Some("audit".to_owned()), None]);
    drop((subscriber, other, second));
    inspect::remove(&path).unwrap();
}

/// One that was killed before it began, and a publisher that sleeps for nobody: each end of an opening.
#[test]
fn a_durable_subscription_that_has_not_begun_holds_nobody_up() {
    let root = TestDir::new("a durable subscription that has not begun");
    let path = root.path().join("b");
    drop(publisher(&path));
    drop(Options::new().durable("a").open_subscriber(&path).unwrap());
    // As a process leaves it that is killed before its last store.
    let table = File::options().write(true).open(path.join("cursors")).unwrap();
    table.write_all_at(&[0; 8], 8192 + 8).unwrap();
    let mut publisher = publisher(&path);
    send(&mut publisher, 2000);
    let mut subscriber = oldest().durable("a").open_subscriber(&path).unwrap();
    assert!(subscriber.receive_until(deadline()).unwrap().is_some());
}

/// The text of a refusal.
fn refusal<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    match result {
        Err(Error::Refused(text)) => text,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_publisher_that_limits_holds_admits_no_gate_beyond_that() {
    let root = TestDir::new("a publisher that limits holds");
    let path = root.path().join("b");
    let limit = Duration::from_millis(10);
    let limited = || Options::new().capacity(CAPACITY).hold_max(limit).create_publisher(&path);
    let mut publisher = Some(limited().unwrap());
    let admitted = || [Options::new().policy(Policy::Lag), Options::new().lag_after(limit)];
    let refused = || [Options::new(), Options::new().lag_after(limit + Duration::from_nanos(1))];
    drop(Options::new().policy(Policy::Lag).durable("lag").open_subscriber(&path).unwrap());
    // Then while there is no publisher: the limit of the last one stays.
    for _ in 0..2 {
        for options in refused() {
            let text = refusal(options.clone().open_subscriber(&path));
            assert!(text.contains("10ms") && text.contains("hold_max"), "{text}");
            // A name is not left behind, and one that keeps its place can return as it was.
            refusal(options.clone().durable("gate").open_subscriber(&path));
            refusal(options.durable("lag").open_subscriber(&path));
        }
        for options in admitted() {
            drop(options.open_subscriber(&path).unwrap());
        }
        if let Some(mut publisher) = publisher.take() {
            send(&mut publisher, 500);
            let mut subscriber = Options::new().lag_after(limit).durable("lag").open_subscriber(&path).unwrap();
            assert!(subscriber.receive().unwrap().missed() > 0);
            assert_eq!(publisher.admit().unwrap(), 1);
            assert_eq!(publisher.corrupt_subscribers(), 0);
        }
    }
    let names: Vec<_> = inspect::broadcast(&path).unwrap().subscriptions.into_iter().map(|one| one.durable).collect();
    assert_eq!(names, [Some("lag".to_owned())]);
    // The next publisher's own limit counts, here none.
    let second = self::publisher(&path);
    let gate = Options::new().open_subscriber(&path).unwrap();
    drop(second);
    let text = refusal(limited());
    assert!(text.contains(&format!("process {}", std::process::id())) && text.contains("10ms"), "{text}");
    // What was refused has changed nothing.
    drop(Options::new().durable("gate").open_subscriber(&path).unwrap());
    drop(gate);
    let text = refusal(limited());
    assert!(text.contains("--durable gate"), "{text}");
    assert!(inspect::remove_durable(&path, "gate").unwrap());
    // One that was killed holds nobody up. One that leaves soon is waited for.
    let killed = Child::start(Role::new(child, "gate").with("path", path.display()));
    killed.expect("open");
    killed.kill();
    drop(limited().unwrap());
    assert!(refused().map(|options| options.open_subscriber(&path).is_err()).iter().all(|is_refused| *is_refused));
    drop(self::publisher(&path));
    let gate = Options::new().open_subscriber(&path).unwrap();
    let waiting = Options::new().hold_max(Duration::ZERO).connect_deadline(deadline());
    assert!(inspect::remove_durable(&path, "lag").unwrap());
    let mut opening = waiting.start_create_publisher(&path).unwrap();
    assert!(opening.try_finish().unwrap().is_none());
    drop(gate);
    let mut publisher = finish(&mut opening).unwrap();
    refusal(Options::new().lag_after(Duration::from_nanos(1)).open_subscriber(&path));
    send(&mut publisher, 500);
    drop(publisher);
    inspect::remove(&path).unwrap();
}

/// A publisher that begins with a limit, and a gate that joins: one of them is refused.
#[test]
fn a_limit_and_a_gate_that_begin_together_are_never_both_accepted() {
    let root = TestDir::new("a limit and a gate");
    let path = root.path().join("b");
    let mut accepted = [0, 0];
    for round in 0..200 {
        drop(publisher(&path));
        let barrier = std::sync::Barrier::new(2);
        let begin = |options: Options<pelton::options::maker::OpenSubscriber>| {
            barrier.wait();
            options.open_subscriber(&path)
        };
        let (limited, gate) = std::thread::scope(|scope| {
            let options = if round % 2 == 0 { Options::new().durable("gate") } else { Options::new() };
            let gate = scope.spawn(|| begin(options));
            barrier.wait();
            let limited = Options::new().hold_max(Duration::ZERO).create_publisher(&path);
            (limited, gate.join().unwrap())
        });
        assert!(limited.is_err() || gate.is_err(), "both, in round {round}");
        accepted[0] += u32::from(limited.is_ok());
        accepted[1] += u32::from(gate.is_ok());
        drop((limited, gate));
        let _ = inspect::remove_durable(&path, "gate").unwrap();
    }
    println!("limits and gates accepted: {accepted:?}");
    inspect::remove(&path).unwrap();
}

/// A file of a slot that a side does not accept, as that of a user whom it does not permit, concerns that slot alone.
#[test]
fn a_slot_whose_files_are_refused_stops_nobody_else() {
    let root = TestDir::new("a slot whose files are refused");
    let path = root.path().join("b");
    let mut publisher = publisher(&path);
    let mut first = oldest().open_subscriber(&path).unwrap();
    let mut second = oldest().open_subscriber(&path).unwrap();
    std::fs::remove_file(path.join("0.life")).unwrap();
    std::fs::write(path.join("0.life"), "precious").unwrap();
    std::fs::set_permissions(path.join("0.life"), Permissions::from_mode(0o600)).unwrap();
    // It is not counted. The others are.
    send(&mut publisher, 50);
    expect(&mut second, 1..=50);
    assert_eq!((publisher.admit().unwrap(), publisher.corrupt_subscribers()), (1, 1));
    for round in 0..20 {
        send(&mut publisher, 100);
        expect(&mut second, 51 + 100 * round..=150 + 100 * round);
    }
    // It learns that it has been passed.
    let error = loop {
        match first.receive_until(deadline()) {
            Ok(found) => assert!(found.is_some()),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::Corrupt(_)), "{error}");
    drop(first);
    drop(publisher);
    let mut publisher = self::publisher(&path);
    let mut third = Options::new().open_subscriber(&path).unwrap();
    let number = publisher.next_number();
    send(&mut publisher, 5);
    expect(&mut third, number..=number + 4);
    // The foreign file is as it was.
    assert_eq!(std::fs::metadata(path.join("0.life")).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn a_successor_that_has_not_begun_is_not_taken_for_its_closed_predecessor() {
    let root = TestDir::new("a successor that has not begun");
    let path = root.path().join("b");
    drop(publisher(&path));
    // The successor claims its life before it walks through the lane.
    let life = rustix::fs::open(path.join("publisher.life"), OFlags::RDONLY | OFlags::NONBLOCK, Mode::empty()).unwrap();
    let mut subscriber = Options::new().open_subscriber(&path).unwrap();
    assert!(subscriber.try_receive().unwrap().is_none());
    assert!(subscriber.receive_until(Duration::from_millis(30)).unwrap().is_none());
    let mut second = publisher(&path);
    send(&mut second, 1);
    expect(&mut subscriber, 1..=1);
    drop((second, life));
    assert!(matches!(subscriber.receive(), Err(Error::Closed { .. })));
}

#[test]
fn the_death_of_a_publisher_that_began_and_died_between_two_checks_is_reported() {
    let root = TestDir::new("a publisher begins and dies between two checks");
    let path = root.path().join("b");
    drop(publisher(&path));
    let mut subscriber = Options::new().open_subscriber(&path).unwrap();
    let publish_and_die = || {
        let child = Child::start(Role::new(child, "publisher").with("path", path.display()));
        child.expect("sent");
        child.kill();
    };
    publish_and_die();
    for first in [1, 4] {
        expect(&mut subscriber, first..=first + 2);
        let end = subscriber.receive_until(deadline()).map(|found| found.map(|found| found.number()));
        assert!(matches!(end, Err(Error::PeerDied { unreleased: 0 })), "{end:?}");
        publish_and_die();
        assert!(subscriber.resume_until(deadline()).unwrap());
    }
    let mut set = SubscriberSet::new(Wait::Block).unwrap();
    set.add(subscriber).unwrap();
    for number in 7..=9 {
        let event = set.receive_until(deadline()).unwrap();
        assert!(matches!(&event, Some(SubscriberEvent::Message { message, .. }) if message.number() == number));
    }
    let end = set.receive_until(deadline()).unwrap();
    assert!(matches!(end, Some(SubscriberEvent::Left { error: Error::PeerDied { .. }, .. })), "{end:?}");
}

#[test]
fn a_removal_takes_only_the_files_of_the_kind_and_also_a_damaged_broadcast() {
    let root = TestDir::new("a removal takes only the files of the kind");
    let (one, other) = (root.path().join("channel"), root.path().join("broadcast"));
    drop(Options::new().create_sender(&one).unwrap());
    for (path, names) in [(&one, ["data", "cursors", "publisher.life"]), (&other, ["receiver", "7.data", "64.life"])] {
        if path == &other {
            drop(publisher(path));
        }
        for name in names {
            std::fs::write(path.join(name), "precious").unwrap();
            match inspect::remove(path) {
                Err(Error::NotAChannel { problem, .. }) => assert!(problem.contains(name), "{problem}"),
                removed => panic!("{name}: {removed:?}"),
            }
            assert_eq!(std::fs::read(path.join(name)).unwrap(), b"precious");
            std::fs::remove_file(path.join(name)).unwrap();
        }
    }
    inspect::remove(&one).unwrap();
    for is_missing in [false, true] {
        drop(publisher(&other));
        match is_missing {
            false => File::options().write(true).open(other.join("cursors")).unwrap().set_len(100).unwrap(),
            true => std::fs::remove_file(other.join("cursors")).unwrap(),
        }
        assert!(Options::new().open_subscriber(&other).is_err());
        inspect::remove(&other).unwrap();
        assert!(!other.exists());
    }
}

#[test]
fn a_channel_and_a_broadcast_in_a_directory_are_not_taken_for_each_other() {
    let root = TestDir::new("kinds");
    let (one, other) = (root.path().join("channel"), root.path().join("broadcast"));
    drop(Options::new().create_sender(&one).unwrap());
    drop(publisher(&other));
    let refused = |error: Error| assert!(matches!(error, Error::NotAChannel { .. }), "{error}");
    refused(Options::new().create_publisher(&one).unwrap_err());
    refused(Options::new().open_subscriber(&one).unwrap_err());
    refused(Options::new().create_sender(&other).unwrap_err());
    refused(Options::new().open_receiver(&other).unwrap_err());
    refused(inspect::broadcast(&one).unwrap_err());
    refused(inspect::info(&other).unwrap_err());
    let nothing = Options::new().open_subscriber(root.path().join("nothing"));
    assert!(matches!(nothing, Err(Error::NoChannel { .. })));
}

/// False words in each file: the broadcast is refused, or each side stays within its bounds.
#[test]
fn a_false_word_in_a_file_is_refused_or_within_bounds() {
    let root = TestDir::new("a false word in a file");
    let (path, seed) = (root.path().join("b"), u64::from(std::process::id()));
    println!("seed {seed}");
    let mut random = Random::new(seed);
    let mut refused = 0;
    for round in 0..300u64 {
        let mut publisher = publisher(&path);
        drop(Options::new().durable("a").open_subscriber(&path).unwrap());
        send(&mut publisher, 50);
        drop(publisher);
        let (file, words) = [("channel", 18), ("publisher", 96), ("cursors", 18), ("data", 200)][round as usize % 4];
        let file = File::options().write(true).open(path.join(file)).unwrap();
        let value = match random.below(3) {
            0 => random.word(),
            1 => random.below(200),
            _ => 1 << random.below(64),
        };
        let at = match round % 12 {
            // The entry and the cursor of the first slot.
            2 => 8192 + 8 * random.below(16),
            // The limit, among others.
            10 => 128 + 8 * random.below(3),
            6 => 16384 + 8 * (8 + random.below(30)),
            _ => 8 * random.below(words),
        };
        file.write_all_at(&value.to_le_bytes(), at).unwrap();
        for options in [oldest(), oldest().durable("a"), oldest().policy(Policy::Lag)] {
            match options.open_subscriber(&path) {
                Ok(mut subscriber) => {
                    for _ in 0..60 {
                        if !matches!(subscriber.try_receive(), Ok(Some(_))) {
                            break;
                        }
                    }
                }
                Err(_) => refused += 1,
            }
        }
        match Options::new().capacity(CAPACITY).create_publisher(&path) {
            Ok(mut publisher) => {
                for number in 0..50 {
                    let _ = publisher.try_send(&message(number));
                }
            }
            Err(_) => refused += 1,
        }
        std::fs::remove_dir_all(&path).unwrap();
    }
    assert!(refused > 100, "{refused} of 1200");
}

/// A subscriber of another user is refused unless both sides permit that; then it holds the publisher up, and its death
/// is proved, as those of a process of the same user.
#[test]
fn a_subscriber_of_another_user_is_refused_unless_both_sides_permit_it() {
    let root = TestDir::new("a subscriber of another user");
    if !is_root() {
        eprintln!("SKIPPED: needs root to be another user");
        return;
    }
    std::fs::set_permissions(root.path(), Permissions::from_mode(0o755)).unwrap();
    let path = root.path().join("b");
    let stranger = |allow: u32| {
        let role = Role::new(child, "stranger").with("path", path.display()).with("allow", allow);
        Child::start(role)
    };
    // By its mode.
    let private = publisher(&path);
    let said = stranger(0).line();
    assert!(said.contains("ermission") || said.contains("mode"), "{said}");
    drop(private);
    inspect::remove(&path).unwrap();
    // By either side's list.
    let create = |uids: &[u32]| {
        let options = Options::new().capacity(CAPACITY).mode(0o777).allow_uids(uids);
        options.create_publisher(&path).unwrap()
    };
    let mut publisher = create(&[]);
    send(&mut publisher, 5);
    let said = stranger(NOBODY).line();
    assert!(said.contains("NotAChannel"), "{said}");
    let refused = stranger(0);
    refused.expect("open");
    eventually("it is found", || publisher.admit().unwrap() == 0 && publisher.corrupt_subscribers() == 1);
    // The publisher does not wait for it, nor rings it: it reports that after the publisher's end.
    send(&mut publisher, CAPACITY / 100);
    drop(publisher);
    let mut last = refused.line();
    while last.parse::<u64>().is_ok() {
        last = refused.line();
    }
    assert!(last.contains("Corrupt"), "{last}");
    refused.wait_for_success();
    inspect::remove(&path).unwrap();
    // Both permit it.
    let mut publisher = create(&[NOBODY]);
    send(&mut publisher, 3);
    let killed = stranger(0);
    killed.expect("open");
    (1..=3).for_each(|number| killed.expect(&number.to_string()));
    killed.kill();
    eventually("its death is known", || publisher.admit().unwrap() == 1 && publisher.subscribers()[0].peer.pid == 0);
    send(&mut publisher, 2);
    let next = stranger(0);
    next.expect("open");
    // It may have been killed before its last release.
    let first = next.line();
    assert!(first == "4" || first == "3", "{first}");
    drop(publisher);
    let rest: Vec<String> = (0..if first == "3" { 3 } else { 2 }).map(|_| next.line()).collect();
    assert!(rest[rest.len() - 2] == "5" && rest[rest.len() - 1].contains("Closed"), "{rest:?}");
    next.wait_for_success();
}
