//! Many publishers for one thread, which waits for all of them.

use crate::support::*;
use pelton::{Deadline, Error, Options, Policy, Publisher, Sent, SubscriberEvent, SubscriberSet, Wait};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

fn message(publisher: u64, number: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&publisher.to_le_bytes());
    bytes[8..].copy_from_slice(&number.to_le_bytes());
    bytes
}

fn send(publisher: &mut Publisher, of: u64, numbers: std::ops::RangeInclusive<u64>) {
    for number in numbers {
        assert_eq!(publisher.send_until(&message(of, number), deadline()).unwrap(), Sent::Sent);
    }
}

/// A message's publisher and number, or why its publisher left.
type Delivered = Result<(u64, u64), Error>;

/// The next event of the set, with its key.
fn next(set: &mut SubscriberSet) -> Option<(usize, Delivered)> {
    Some(match set.receive_until(deadline()).unwrap()? {
        SubscriberEvent::Message { key, message } => {
            let words: Vec<_> = message.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
            assert_eq!(message.number(), words[1]);
            (key, Ok((words[0], words[1])))
        }
        SubscriberEvent::Left { key, error, .. } => (key, Err(error)),
        other => panic!("{other:?}"),
    })
}

#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    let of = role.number("of").unwrap();
    let mut publisher = Options::new().capacity(1 << 16).publish_at(role.get("name")).unwrap();
    publisher.wait_subscribers_until(1, deadline()).unwrap();
    send(&mut publisher, of, 1..=role.number("count").unwrap());
    report("sent");
    read_line_from_parent();
}

fn publisher(name: &str, of: u64, count: u64) -> Child {
    Child::start(Role::new(child, "publisher").with("name", name).with("of", of).with("count", count))
}

/// Some sleep often, some are behind all the time.
#[test]
fn each_message_of_many_publishers_arrives_once_and_in_order() {
    const COUNT: u64 = 20_000;
    for wait in [Wait::Block, Wait::Spin] {
        let mut publishers: Vec<_> = (0..4).map(|_| Options::new().capacity(1 << 16).publisher().unwrap()).collect();
        let mut set = SubscriberSet::new(wait).unwrap();
        for (index, publisher) in publishers.iter_mut().enumerate() {
            assert_eq!(set.add(publisher.subscriber(&Options::new()).unwrap()).unwrap(), index);
        }
        std::thread::scope(|scope| {
            for (of, mut publisher) in publishers.into_iter().enumerate() {
                scope.spawn(move || {
                    for number in 1..=COUNT {
                        send(&mut publisher, of as u64, number..=number);
                        if of == 3 && number % 1000 == 0 {
                            assert!(publisher.wait_released_until(deadline()).unwrap());
                            std::thread::sleep(std::time::Duration::from_micros(200));
                        }
                    }
                });
            }
            let mut numbers = [0; 4];
            let mut ended = 0;
            while !set.is_empty() {
                match next(&mut set).expect("there is a message") {
                    (key, Ok((of, number))) => {
                        assert_eq!((of, number), (key as u64, numbers[key] + 1));
                        numbers[key] = number;
                    }
                    (key, Err(error)) => {
                        assert!(matches!(error, Error::Closed { unreleased: 0 }), "{error}");
                        assert_eq!(numbers[key], COUNT);
                        ended += 1;
                    }
                }
            }
            assert_eq!(ended, 4);
            assert!(set.receive().unwrap().is_none(), "an empty set does not wait");
        });
    }
}

#[test]
fn a_killed_publisher_leaves_the_set_and_its_subscriber_continues_with_a_successor() {
    let directories = [0, 1].map(|_| TestDir::new("publishers die and others take their places"));
    let names = directories.each_ref().map(TestDir::name);
    for wait in [Wait::Block, Wait::Spin] {
        let mut publishing = [publisher(&names[0], 10, 100), publisher(&names[1], 20, 100)];
        let mut set = SubscriberSet::new(wait).unwrap();
        for name in &names {
            set.add(Options::new().connect_deadline(deadline()).connect_subscriber(name).unwrap()).unwrap();
        }
        let mut numbers = [0; 2];
        for _ in 0..200 {
            let (key, found) = next(&mut set).unwrap();
            numbers[key] += 1;
            assert_eq!(found.unwrap(), (10 * (key as u64 + 1), numbers[key]));
        }
        publishing.iter().for_each(|child| child.expect("sent"));
        assert!(set.try_receive().unwrap().is_none());
        // It is asleep, or spins, when its publisher dies.
        let [first, second] = publishing;
        let mut left = std::thread::scope(|scope| {
            let left = scope.spawn(|| match set.receive_until(deadline()).unwrap() {
                Some(SubscriberEvent::Left { key: 0, subscriber, error: Error::PeerDied { unreleased: 0 } }) => {
                    subscriber
                }
                other => panic!("{other:?}"),
            });
            first.kill();
            left.join().unwrap()
        });
        assert_eq!(set.len(), 1);
        assert!(set.get(0).is_none() && set.get(1).is_some());
        publishing = [publisher(&names[0], 30, 50), second];
        assert!(left.resume_until(deadline()).unwrap());
        assert_eq!(set.add(left).unwrap(), 0, "the key is free again");
        for number in 1..=50 {
            assert_eq!(next(&mut set).unwrap().1.unwrap(), (30, number));
        }
        drop(publishing);
        let mut gone = [next(&mut set), next(&mut set)].map(|event| event.unwrap().0);
        gone.sort();
        assert_eq!(gone, [0, 1]);
        assert!(set.receive().unwrap().is_none());
    }
}

/// A set that always has messages never sleeps, and no wait finds the end.
#[test]
fn the_end_of_a_publisher_is_found_though_another_one_always_has_messages() {
    let directory = TestDir::new("publishers end beside a busy one");
    let name = directory.name();
    let mut busy = Options::new().capacity(1 << 16).publisher().unwrap();
    let mut set = SubscriberSet::new(Wait::Block).unwrap();
    set.add(busy.subscriber(&Options::new()).unwrap()).unwrap();
    let closes = |set: &mut SubscriberSet| {
        let mut other = Options::new().publisher().unwrap();
        set.add(other.subscriber(&Options::new()).unwrap()).unwrap();
        drop(other);
    };
    let dies = |set: &mut SubscriberSet| {
        let other = publisher(&name, 0, 0);
        set.add(Options::new().connect_deadline(deadline()).connect_subscriber(&name).unwrap()).unwrap();
        other.expect("sent");
        other.kill();
    };
    let mut number = 0;
    for end in [&closes as &dyn Fn(&mut SubscriberSet), &dies] {
        end(&mut set);
        assert_eq!(set.len(), 2);
        let limit = deadline();
        while set.len() == 2 {
            number += 1;
            send(&mut busy, 0, number..=number);
            let found = next(&mut set).unwrap();
            assert!(matches!(found, (0, Ok(_)) | (1, Err(Error::Closed { .. } | Error::PeerDied { .. }))), "{found:?}");
            assert!(std::time::Instant::now() < limit, "the end is not found");
        }
        set.receive_until(Deadline::Now).unwrap();
    }
}

#[test]
fn an_empty_set_waits_for_its_deadline() {
    let mut set = SubscriberSet::new(Wait::Block).unwrap();
    let end = std::time::Instant::now() + std::time::Duration::from_millis(20);
    assert!(set.receive_until(end).unwrap().is_none());
    assert!(std::time::Instant::now() >= end);
    assert!(set.receive().unwrap().is_none() && set.try_receive().unwrap().is_none());
}

#[test]
fn those_with_messages_take_turns() {
    let mut publishers = [0, 1].map(|_| Options::new().publisher().unwrap());
    let mut set = SubscriberSet::new(Wait::Block).unwrap();
    for (of, publisher) in publishers.iter_mut().enumerate() {
        set.add(publisher.subscriber(&Options::new()).unwrap()).unwrap();
        send(publisher, of as u64, 1..=200);
    }
    let keys: Vec<_> = (0..200).map(|_| next(&mut set).unwrap().0).collect();
    let turns: Vec<_> = keys.chunk_by(|a, b| a == b).map(|turn| (turn[0], turn.len())).collect();
    assert_eq!(turns, [(0, 64), (1, 64), (0, 64), (1, 8)]);
}

#[test]
fn a_member_may_lag_and_is_removed_with_its_place() {
    let mut publishers = [0, 1].map(|_| Options::new().capacity(1 << 16).publisher().unwrap());
    let mut set = SubscriberSet::new(Wait::Block).unwrap();
    let lag = publishers[0].subscriber(&Options::new().policy(Policy::Lag)).unwrap();
    let gate = publishers[1].subscriber(&Options::new()).unwrap();
    let (lag, gate) = (set.add(lag).unwrap(), set.add(gate).unwrap());
    send(&mut publishers[0], 0, 1..=100_000);
    send(&mut publishers[1], 1, 1..=10);
    let (mut received, mut missed) = (0, 0);
    while received + missed < 100_000 {
        match set.try_receive().unwrap().expect("there is a message") {
            SubscriberEvent::Message { key, message } if key == lag => {
                (received, missed) = (received + 1, missed + message.missed());
                assert_eq!(message.number(), received + missed);
            }
            SubscriberEvent::Message { message, .. } => assert_eq!(message.missed(), 0),
            other => panic!("{other:?}"),
        }
    }
    assert!(received > 0 && missed == set.get(lag).unwrap().missed(), "{received}, {missed}");
    send(&mut publishers[1], 1, 11..=12);
    // Also one whose message is found already.
    assert!(set.arm().unwrap() == pelton::Armed::Ready);
    let mut gate = set.remove(gate).unwrap();
    assert_eq!(gate.try_receive().unwrap().unwrap().number(), 11);
    assert!(set.try_receive().unwrap().is_none());
    assert!(set.remove(7).is_none());
}

/// The others are received, though nobody can wait for this one any more.
#[test]
fn a_member_whose_broadcast_is_damaged_leaves() {
    let root = TestDir::new("members are damaged");
    let mut good = Options::new().publisher().unwrap();
    let kinds = [Wait::Block, Wait::Spin].map(|wait| ["data", "publisher.life"].map(|file| (wait, file)));
    for (wait, damages) in kinds.into_iter().flatten() {
        let path = root.path().join(format!("{damages}-{wait:?}"));
        let mut publisher = Options::new().capacity(1 << 16).create_publisher(&path).unwrap();
        let subscriber = Options::new().open_subscriber(&path).unwrap();
        let mut set = SubscriberSet::new(wait).unwrap();
        set.add(subscriber).unwrap();
        set.add(good.subscriber(&Options::new()).unwrap()).unwrap();
        let write = |file: &str, at: u64, word: u64| {
            let file = std::fs::File::options().write(true).open(path.join(file)).unwrap();
            file.write_all_at(&word.to_le_bytes(), at).unwrap();
        };
        if damages == "data" {
            // The header of message 1, longer than the lane.
            write("data", 0, 1 << 32 | 1 << 20);
        } else {
            send(&mut publisher, 0, 1..=1);
            assert_eq!(next(&mut set).unwrap().1.unwrap(), (0, 1));
            std::fs::remove_file(path.join(damages)).unwrap();
            // The generation: of a publisher whose process is to be found.
            write("publisher", 144, 7);
            std::fs::write(path.join("0.bell"), [1]).unwrap();
        }
        let left = next(&mut set);
        assert!(matches!(left, Some((0, Err(Error::Corrupt(_) | Error::NotAChannel { .. })))), "{left:?}");
        let number = good.next_number();
        send(&mut good, 1, number..=number);
        let (key, found) = next(&mut set).unwrap();
        assert_eq!((key, found.unwrap()), (1, (1, number)));
    }
}

#[test]
fn its_descriptor_reports_messages_new_members_and_ends() {
    let mut publishers = [0, 1].map(|_| Options::new().capacity(1 << 16).publisher().unwrap());
    let mut set = SubscriberSet::new(Wait::Block).unwrap();
    let arm = |set: &mut SubscriberSet| {
        while !set.arm().unwrap().is_waiting() {
            assert!(set.try_receive().unwrap().is_none());
        }
        assert!(!is_readable(set.as_fd()));
    };
    arm(&mut set);
    for (key, publisher) in publishers.iter_mut().enumerate() {
        set.add(publisher.subscriber(&Options::new()).unwrap()).unwrap();
        readable(set.as_fd());
        arm(&mut set);
        send(publisher, 0, 1..=1);
        readable(set.as_fd());
        set.disarm();
        assert_eq!(next(&mut set).unwrap().0, key);
        assert!(set.try_receive().unwrap().is_none());
    }
    arm(&mut set);
    let [first, mut second] = publishers;
    drop(first);
    readable(set.as_fd());
    assert!(!set.arm().unwrap().is_waiting());
    readable(set.as_fd());
    assert!(matches!(next(&mut set), Some((0, Err(Error::Closed { .. })))));
    arm(&mut set);
    send(&mut second, 0, 2..=2);
    readable(set.as_fd());
    set.disarm();
    assert_eq!(next(&mut set).unwrap().1.unwrap(), (0, 2));
    assert!(set.receive_until(Deadline::Now).unwrap().is_none());
}
