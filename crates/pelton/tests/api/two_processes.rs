//! Two processes exchange messages: every size, every way to wait, deaths, successors and restarts.

use crate::support::*;
use pelton::{Error, Options, Receiver, Sender};
use rustix::process::Signal;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// Not a test: the entry point of a child process. Without a role it does nothing.
#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    let how = How::parse(role.get("how"));
    let sizes = || Sizes::parse(role.get("sizes"));
    match role.get("role") {
        "send" => {
            let mut sender = sender(&role);
            send_until_error(&role, &mut sender, how);
        }
        // Sends, and continues with every receiver that follows one that died.
        "send-surviving" => {
            let mut sender = sender(&role);
            let mut bytes = Vec::new();
            let event_loop = Loop::new(how, sender.as_fd());
            for number in 0..role.number("count").unwrap() {
                payload(number, sizes().of(number), &mut bytes);
                while let Err(error) = send_one(&mut sender, &bytes, how, &event_loop) {
                    assert!(error.is_peer_died(), "{error}");
                    report(word(&error));
                    assert!(sender.resume_until(deadline()).unwrap(), "no successor came");
                }
            }
            loop {
                match sender.wait_released_until(deadline()) {
                    Ok(true) => break,
                    Ok(false) => panic!("not drained"),
                    Err(error) if error.is_peer_died() => assert!(sender.resume_until(deadline()).unwrap()),
                    Err(error) => panic!("{error}"),
                }
            }
            sender.close().unwrap();
            report("done");
        }
        "receive" => {
            let mut receiver = receiver(&role);
            report("connected");
            let count = role.number("count").unwrap_or(u64::MAX / 2);
            let from = role.number("from").unwrap_or(0);
            let (number, end) = receive_all(&mut receiver, from, count, sizes(), how);
            report(format!("{number} {}", end.as_ref().map_or("enough".to_owned(), word)));
            read_line_from_parent();
        }
        // Receives from the first number that arrives; reports the numbers, and the redelivered ones.
        "receive-succeeding" => {
            let mut receiver = receiver(&role);
            report("connected");
            let (mut first, mut next, mut again) = (None, 0, 0);
            let mut wanted = Vec::new();
            let most = role.number("count").unwrap_or(u64::MAX);
            let end = loop {
                if next - first.unwrap_or(0) >= most {
                    break "enough".to_owned();
                }
                match receiver.receive() {
                    Ok(message) => {
                        let number = u64::from_le_bytes(message[..8].try_into().unwrap());
                        if first.is_some() {
                            assert_eq!(number, next, "out of order");
                        }
                        first.get_or_insert(number);
                        check(number, sizes(), &message, &mut wanted);
                        if message.is_redelivered() {
                            assert_eq!(number, first.unwrap() + again, "redelivered after one that was not");
                            again += 1;
                        }
                        next = number + 1;
                    }
                    Err(error) => break word(&error),
                }
            };
            report(format!("{} {next} {again} {end}", first.unwrap_or(next)));
            read_line_from_parent();
        }
        "pipes" => {
            // Each message carries the reading end of a pipe with the message's number in it.
            let mut sender = sender(&role);
            for number in 0..role.number("count").unwrap() {
                let (reading, writing) = rustix::pipe::pipe().unwrap();
                rustix::io::write(&writing, &number.to_le_bytes()).unwrap();
                drop(writing);
                sender.send_with_descriptors(&number.to_le_bytes(), &[reading.as_fd()]).unwrap();
            }
            report("sent");
            read_line_from_parent();
            if role.get("end") == "close" {
                sender.close().unwrap();
            } else {
                std::process::exit(0);
            }
        }
        "take-pipes" => {
            let mut receiver = receiver(&role);
            if role.get("at") != "once" {
                report("connected");
            }
            let end = take_pipes(&mut receiver, role.number("from").unwrap_or(0), role.number("count").unwrap());
            report(end.map_or("enough".to_owned(), |error| word(&error)));
            read_line_from_parent();
        }
        "hold-pipes" => {
            let mut receiver = receiver(&role);
            let held: Vec<_> = (0..role.number("count").unwrap()).map(|_| receiver.receive().unwrap().hold()).collect();
            report("enough");
            read_line_from_parent();
            drop(held);
        }
        "receive-64" => {
            let mut receiver = receiver(&role);
            for _ in 0..2 {
                let mut message = receiver.receive().unwrap();
                let taken = message.take_descriptors().unwrap().len();
                report(format!("{}: {taken}", String::from_utf8_lossy(&message)));
            }
            read_line_from_parent();
        }
        "receive-counting" => {
            let mut receiver = receiver(&role);
            report("connected");
            let mut buffer = Vec::new();
            for number in 0..50 {
                // By each way to receive.
                match number % 3 {
                    0 => drop(receiver.receive().unwrap()),
                    1 => _ = receiver.receive_into(&mut buffer).unwrap(),
                    _ => _ = receiver.receive_batch().unwrap().next().unwrap().unwrap(),
                }
            }
            report("received 50");
            read_line_from_parent();
        }
        other => panic!("no role {other}"),
    }
}

/// Takes the pipe of each message from number `from` on and reads the message's number from it.
fn take_pipes(receiver: &mut Receiver, from: u64, count: u64) -> Option<Error> {
    for number in from..from + count {
        let mut message = match receiver.receive() {
            Ok(message) => message,
            Err(error) => return Some(error),
        };
        assert_eq!(*message, number.to_le_bytes());
        let pipes = match message.take_descriptors() {
            Ok(pipes) => pipes,
            Err(error) => return Some(error),
        };
        assert_eq!(pipes.len(), 1, "message {number}");
        let mut bytes = [0; 8];
        assert_eq!(rustix::io::read(&pipes[0], &mut bytes).unwrap(), 8);
        assert_eq!(u64::from_le_bytes(bytes), number, "a descriptor came with another message");
        assert!(message.take_descriptors().unwrap().is_empty(), "they arrive once");
    }
    None
}

fn piping(dir: &TestDir, count: u64) -> Role {
    Role::new(child, "pipes").with("name", dir.name()).with("count", count)
}

/// Sends the role's messages and then ends in the role's way.
fn send_until_error(role: &Role, sender: &mut Sender, how: How) {
    let from = role.number("from").unwrap_or(0);
    let numbers = from..from + role.number("count").unwrap();
    if role.get("arm") == "first" {
        assert!(!sender.arm(1).unwrap().is_waiting(), "an empty lane has free space");
    }
    match send_all(sender, numbers.clone(), Sizes::parse(role.get("sizes")), how) {
        Ok(()) => report(format!("sent {}", numbers.end)),
        Err((number, error)) => report(format!("{number} {}", word(&error))),
    }
    match role.get("end") {
        "drain" => report(format!("drained {:?}", sender.wait_released_until(deadline()))),
        "exit" => std::process::exit(0),
        "close" => {}
        _ => {
            read_line_from_parent();
        }
    }
}

fn sending(dir: &TestDir, count: u64, sizes: Sizes) -> Role {
    Role::new(child, "send").with("name", dir.name()).with("count", count).with("sizes", sizes)
}

fn receiving(dir: &TestDir, sizes: Sizes) -> Role {
    Role::new(child, "receive").with("name", dir.name()).with("sizes", sizes)
}

/// `count` messages from a child to a child.
fn exchange(dir: &TestDir, count: u64, sizes: Sizes, capacity: u64, ways: (How, How), sender_listens: bool) {
    let sender = sending(dir, count, sizes).with("capacity", capacity).with("end", "close");
    let sender = sender.with("how", format!("{:?}", ways.0));
    let receiver = receiving(dir, sizes).with("how", format!("{:?}", ways.1));
    let (sender, receiver) = if sender_listens {
        let sender = Child::start(sender.with("listen", "yes"));
        sender.expect("listening");
        (sender, Child::start(receiver))
    } else {
        // The sender's options determine the capacity, not the listener's.
        let receiver = Child::start(receiver.with("listen", "yes"));
        receiver.expect("listening");
        (Child::start(sender), receiver)
    };
    sender.expect(&format!("sent {count}"));
    receiver.expect("connected");
    receiver.expect(&format!("{count} Closed 0"));
    sender.wait_for_success();
    drop(receiver);
}

#[test]
fn every_size_up_to_the_limit_arrives_whole() {
    let dir = TestDir::new("every_size_up_to_the_limit_arrives_whole");
    // 64 KiB is the smallest capacity: the limit is 32736.
    exchange(&dir, 32737, Sizes::Every(32737), 65536, (How::Block, How::Block), false);
}

#[test]
fn random_sizes_arrive_whole_whichever_side_listens() {
    for listens in [false, true] {
        let dir = TestDir::new("random_sizes_arrive_whole_whichever_side_listens");
        exchange(&dir, 5_000, Sizes::Random(7, 32737), 1 << 20, (How::Block, How::Block), listens);
    }
}

#[test]
fn both_sides_spinning_lose_nothing() {
    let dir = TestDir::new("both_sides_spinning_lose_nothing");
    exchange(&dir, 20_000, Sizes::Random(1, 3000), 65536, (How::Spin, How::Spin), false);
}

#[test]
fn both_sides_in_event_loops_lose_nothing() {
    for ways in [(How::Epoll, How::Epoll), (How::Poll, How::Poll)] {
        let dir = TestDir::new("both_sides_in_event_loops_lose_nothing");
        exchange(&dir, 10_000, Sizes::Random(2, 8000), 65536, ways, true);
    }
}

#[test]
fn a_tiny_lane_makes_both_sides_sleep_and_loses_nothing() {
    for ways in [(How::Block, How::Block), (How::Epoll, How::Epoll)] {
        let dir = TestDir::new("a_tiny_lane_makes_both_sides_sleep_and_loses_nothing");
        exchange(&dir, 5_000, Sizes::Random(3, 32737), 65536, ways, false);
    }
}

#[test]
fn the_two_sides_may_wait_differently() {
    for ways in [(How::Block, How::Epoll), (How::Epoll, How::Block), (How::Spin, How::Block), (How::Try, How::Poll)] {
        let dir = TestDir::new("the_two_sides_may_wait_differently");
        exchange(&dir, 3_000, Sizes::Random(4, 20_000), 65536, ways, false);
    }
}

#[test]
fn a_short_name_is_found_in_the_runtime_directory_and_leaves_nothing() {
    let dir = TestDir::new("a_short_name_is_found_in_the_runtime_directory_and_leaves_nothing");
    let here = |command: &mut std::process::Command| {
        command.env("XDG_RUNTIME_DIR", dir.path());
    };
    let sizes = Sizes::Random(5, 500);
    let receiver = Child::start_as(receiving(&dir, sizes).with("name", "events").with("listen", "yes"), here);
    receiver.expect("listening");
    let sockets = std::fs::read_dir(dir.path().join("pelton/events")).unwrap().count();
    assert_eq!(sockets, 1);
    let sender = sending(&dir, 1000, sizes).with("name", "events").with("end", "close");
    let sender = Child::start_as(sender, here);
    receiver.expect("connected");
    receiver.expect("1000 Closed 0");
    sender.expect("sent 1000");
    sender.wait_for_success();
    let mut receiver = receiver;
    receiver.write_line("end");
    receiver.wait_for_success();
    assert_eq!(dir.entries(), Vec::<std::path::PathBuf>::new());
}

// Deaths.

/// A receiver that listens here, and a child of the role that connects.
fn receiver_of(dir: &TestDir, role: Role) -> (Receiver, Child) {
    let how = How::parse(role.get("receiver-how"));
    let listener = Options::new().wait(how.wait()).listen(&dir.name()).unwrap();
    let child = Child::start(role);
    (listener.accept_receiver_until(deadline()).unwrap().expect("no connection arrived"), child)
}

fn sender_of(dir: &TestDir, capacity: u64, how: How, role: Role) -> (Sender, Child) {
    let listener = Options::new().capacity(capacity).wait(how.wait()).listen(&dir.name()).unwrap();
    let child = Child::start(role);
    (listener.accept_sender_until(deadline()).unwrap().expect("no connection arrived"), child)
}

#[test]
fn a_killed_senders_committed_messages_arrive_before_its_death() {
    for how in [How::Block, How::Spin, How::Poll, How::Epoll, How::Try] {
        let dir = TestDir::new("a_killed_senders_committed_messages_arrive_before_its_death");
        let sizes = Sizes::Random(9, 1000);
        let role = sending(&dir, 500, sizes).with("receiver-how", format!("{how:?}"));
        let (mut receiver, child) = receiver_of(&dir, role);
        child.expect("sent 500");
        child.kill();
        let (number, end) = receive_all(&mut receiver, 0, u64::MAX / 2, sizes, how);
        assert_eq!((number, word(&end.unwrap())), (500, "PeerDied 0".to_owned()), "{how:?}");
        assert!(receiver.try_receive().unwrap_err().is_peer_died(), "and so each time");
    }
}

#[test]
fn a_sleeping_receiver_detects_the_senders_death() {
    for how in [How::Block, How::Poll, How::Epoll] {
        let dir = TestDir::new("a_sleeping_receiver_detects_the_senders_death");
        let listening = sending(&dir, 3, Sizes::Fixed(8)).with("listen", "yes");
        let sender = Child::start(listening);
        sender.expect("listening");
        let receiver = Child::start(receiving(&dir, Sizes::Fixed(8)).with("how", format!("{how:?}")));
        receiver.expect("connected");
        sender.expect("sent 3");
        receiver.wait_until_it_polls();
        sender.kill();
        receiver.expect("3 PeerDied 0");
    }
}

/// A child that receives ten messages and then waits to be killed.
fn tenth(dir: &TestDir) -> Role {
    receiving(dir, Sizes::Fixed(1000)).with("count", 10)
}

#[test]
fn a_sender_gets_the_exact_number_of_messages_a_killed_receiver_left() {
    for how in [How::Block, How::Spin, How::Poll, How::Epoll] {
        let dir = TestDir::new("a_sender_gets_the_exact_number_of_messages_a_killed_receiver_left");
        let (mut sender, child) = sender_of(&dir, 1 << 20, how, tenth(&dir));
        send_all(&mut sender, 0..100, Sizes::Fixed(1000), how).unwrap();
        child.expect("connected");
        child.expect("10 enough");
        child.kill();
        let sent = match send_all(&mut sender, 100..1_000_000, Sizes::Fixed(1000), how) {
            Err((number, Error::PeerDied { unreleased })) => {
                assert_eq!(unreleased, number - 10, "{how:?}");
                number
            }
            other => panic!("{how:?}: {other:?}"),
        };
        assert_eq!(sender.unreleased(), sent - 10);
        assert!(matches!(sender.wait_released(), Err(Error::PeerDied { unreleased }) if unreleased == sent - 10));
    }
}

/// The same, with the receiver killed while the sender certainly waits.
#[test]
fn a_sender_that_waits_for_space_detects_the_receivers_death() {
    for how in [How::Block, How::Poll, How::Epoll] {
        let dir = TestDir::new("a_sender_that_waits_for_space_detects_the_receivers_death");
        let role = sending(&dir, 1_000_000, Sizes::Fixed(1000)).with("capacity", 65536);
        let sender = Child::start(role.with("listen", "yes").with("how", format!("{how:?}")));
        sender.expect("listening");
        let receiver = Child::start(tenth(&dir));
        receiver.expect("connected");
        receiver.expect("10 enough");
        sender.wait_until_it_polls();
        receiver.kill();
        let said = sender.line();
        let words: Vec<&str> = said.split(' ').collect();
        let (number, unreleased): (u64, u64) = (words[0].parse().unwrap(), words[2].parse().unwrap());
        assert_eq!((words[1], unreleased), ("PeerDied", number - 10), "{how:?}: {said}");
    }
}

#[test]
fn close_is_closed_after_the_last_message_and_exit_is_a_death() {
    for (end, says) in [("close", "Closed 0"), ("exit", "PeerDied 0")] {
        let dir = TestDir::new("close_is_closed_after_the_last_message_and_exit_is_a_death");
        let (mut receiver, child) = receiver_of(&dir, sending(&dir, 50, Sizes::Fixed(9)).with("end", end));
        child.wait_for_success();
        let (number, error) = receive_all(&mut receiver, 0, 1000, Sizes::Fixed(9), How::Block);
        assert_eq!((number, word(&error.unwrap())), (50, says.to_owned()));
    }
}

#[test]
fn a_stopped_sender_is_not_reported_dead() {
    let dir = TestDir::new("a_stopped_sender_is_not_reported_dead");
    let sizes = Sizes::Random(11, 2000);
    let (mut receiver, child) =
        receiver_of(&dir, sending(&dir, 20_000, sizes).with("capacity", 65536).with("end", "close"));
    let mut number = 0;
    for _ in 0..5 {
        number = receive_all(&mut receiver, number, 1000, sizes, How::Block).0;
        child.signal(Signal::STOP);
        child.wait_for_state('T');
        // Its committed messages, and then nothing: no end.
        let mut wanted = Vec::new();
        while let Some(message) = receiver.receive_until(Instant::now() + Duration::from_millis(20)).unwrap() {
            check(number, sizes, &message, &mut wanted);
            number += 1;
        }
        child.signal(Signal::CONT);
    }
    let (number, error) = receive_all(&mut receiver, number, u64::MAX / 2, sizes, How::Block);
    assert_eq!((number, word(&error.unwrap())), (20_000, "Closed 0".to_owned()));
    child.wait_for_success();
}

#[test]
fn a_stopped_receiver_is_not_reported_dead() {
    let dir = TestDir::new("a_stopped_receiver_is_not_reported_dead");
    let sizes = Sizes::Random(12, 2000);
    let (mut sender, mut child) = sender_of(&dir, 65536, How::Block, receiving(&dir, sizes));
    child.expect("connected");
    let mut number = 0;
    for _ in 0..5 {
        send_all(&mut sender, number..number + 500, sizes, How::Block).unwrap();
        number += 500;
        child.signal(Signal::STOP);
        child.wait_for_state('T');
        let mut bytes = Vec::new();
        loop {
            payload(number, sizes.of(number), &mut bytes);
            let soon = Instant::now() + Duration::from_millis(20);
            match sender.send_until(&bytes, soon).unwrap() {
                pelton::Sent::Sent => number += 1,
                _ => break,
            }
        }
        child.signal(Signal::CONT);
    }
    assert!(sender.wait_released_until(deadline()).unwrap());
    sender.close().unwrap();
    child.expect(&format!("{number} Closed 0"));
    child.write_line("end");
    child.wait_for_success();
}

// Successors.

#[test]
fn a_surviving_receiver_resumes_with_a_successor_that_connects() {
    let dir = TestDir::new("a_surviving_receiver_resumes_with_a_successor_that_connects");
    let sizes = Sizes::Random(13, 3000);
    let (mut receiver, child) = receiver_of(&dir, sending(&dir, 300, sizes));
    child.expect("sent 300");
    child.kill();
    // Some are received, and the rest left for later.
    assert_eq!(receive_all(&mut receiver, 0, 100, sizes, How::Block).0, 100);
    assert_eq!(receiver.generation(), 1);
    let successor = Child::start(sending(&dir, 400, sizes).with("from", 300).with("end", "close"));
    assert!(receiver.resume_until(deadline()).unwrap());
    let (number, end) = receive_all(&mut receiver, 100, u64::MAX / 2, sizes, How::Block);
    assert_eq!((number, word(&end.unwrap())), (700, "Closed 0".to_owned()));
    assert_eq!(receiver.generation(), 2);
    successor.expect("sent 700");
    successor.wait_for_success();
}

#[test]
fn a_held_message_of_a_closed_receiver_stays_unchanged_while_its_successor_receives() {
    let dir = TestDir::new("a_held_message_of_a_closed_receiver_stays_unchanged_while_its_successor_receives");
    let listener = <Options>::new().capacity(65536).cast().listen(&dir.name()).unwrap();
    let name = dir.name();
    let connecting = std::thread::spawn(move || Options::new().capacity(65536).connect_sender(&name).unwrap());
    let mut receiver = listener.accept_receiver_until(deadline()).unwrap().unwrap();
    let mut sender = connecting.join().unwrap();
    // With and without a jump between the held messages and the tail.
    for filled in [3, 11] {
        let mut number = 0u8;
        let mut send = |sender: &mut Sender| {
            sender.send(&[number; 5000]).unwrap();
            number += 1;
        };
        (0..filled).for_each(|_| send(&mut sender));
        for number in 0..filled - 2 {
            assert!(*receiver.receive().unwrap() == [number; 5000]);
        }
        (0..3).for_each(|_| send(&mut sender));
        let held = receiver.receive().unwrap().hold();
        receiver.close().unwrap();
        assert!(matches!(sender.wait_released_until(deadline()), Err(Error::Closed { unreleased: 5 })));
        receiver = std::thread::scope(|scope| {
            let accepting = scope.spawn(|| listener.accept_receiver_until(deadline()).unwrap().unwrap());
            assert!(sender.resume_until(deadline()).unwrap());
            accepting.join().unwrap()
        });
        for wanted in filled - 2..50 {
            assert!(*receiver.receive_until(deadline()).unwrap().unwrap() == [wanted; 5000]);
            assert!(*held == [filled - 2; 5000], "overwritten at {wanted}");
            if wanted < 45 {
                send(&mut sender);
            }
        }
    }
}

#[test]
fn a_surviving_receiver_that_had_connected_reconnects_to_the_name() {
    let dir = TestDir::new("a_surviving_receiver_that_had_connected_reconnects_to_the_name");
    let sizes = Sizes::Random(14, 3000);
    let first = Child::start(sending(&dir, 300, sizes).with("listen", "yes"));
    first.expect("listening");
    let mut receiver = Receiver::connect(&dir.name()).unwrap();
    first.expect("sent 300");
    first.kill();
    let (number, end) = receive_all(&mut receiver, 0, u64::MAX / 2, sizes, How::Epoll);
    assert_eq!((number, word(&end.unwrap())), (300, "PeerDied 0".to_owned()));
    assert!(!receiver.resume_until(Instant::now()).unwrap(), "no peer is there yet");
    let successor = Child::start(sending(&dir, 5, sizes).with("from", 300).with("listen", "yes").with("end", "close"));
    successor.expect("listening");
    assert!(receiver.resume_until(deadline()).unwrap());
    let (number, end) = receive_all(&mut receiver, 300, u64::MAX / 2, sizes, How::Epoll);
    assert_eq!((number, word(&end.unwrap())), (305, "Closed 0".to_owned()));
    assert_eq!(receiver.generation(), 2);
}

#[test]
fn a_surviving_sender_repeats_all_unreleased_messages_and_reports_them() {
    let dir = TestDir::new("a_surviving_sender_repeats_all_unreleased_messages_and_reports_them");
    let sizes = Sizes::Fixed(100);
    let (mut sender, child) = sender_of(&dir, 1 << 20, How::Block, receiving(&dir, sizes).with("count", 30));
    child.expect("connected");
    send_all(&mut sender, 0..100, sizes, How::Block).unwrap();
    child.expect("30 enough");
    child.kill();
    let error = sender.wait_released().unwrap_err();
    assert_eq!(word(&error), "PeerDied 70");
    let role = Role::new(self::child, "receive-succeeding").with("name", dir.name()).with("sizes", sizes);
    let successor = Child::start(role);
    assert!(sender.resume_until(deadline()).unwrap());
    send_all(&mut sender, 100..150, sizes, How::Block).unwrap();
    sender.close().unwrap();
    successor.expect("connected");
    successor.expect("30 150 70 Closed 0");
}

#[test]
fn a_surviving_sender_that_had_connected_reconnects_to_the_name() {
    let dir = TestDir::new("a_surviving_sender_that_had_connected_reconnects_to_the_name");
    let sizes = Sizes::Fixed(100);
    let role = |role: &str| Role::new(child, role).with("name", dir.name()).with("sizes", sizes).with("listen", "yes");
    let first = Child::start(role("receive").with("count", 30));
    first.expect("listening");
    let mut sender = Sender::connect(&dir.name()).unwrap();
    send_all(&mut sender, 0..100, sizes, How::Poll).unwrap();
    first.expect("connected");
    first.expect("30 enough");
    first.kill();
    assert_eq!(word(&sender.wait_released().unwrap_err()), "PeerDied 70");
    let successor = Child::start(role("receive-succeeding"));
    successor.expect("listening");
    assert!(sender.resume_until(deadline()).unwrap());
    send_all(&mut sender, 100..150, sizes, How::Poll).unwrap();
    drop(sender);
    successor.expect("connected");
    successor.expect("30 150 70 Closed 0");
}

/// Twenty receivers, one after another, killed while messages flow; the sender survives them all.
fn chain_of_receivers(claim: &'static str, how: How, sender_listens: bool) {
    let dir = TestDir::new(claim);
    let sizes = Sizes::Fixed(600);
    let count = 40_000;
    let role = Role::new(child, "send-surviving").with("name", dir.name()).with("count", count).with("sizes", sizes);
    let role = role.with("how", format!("{how:?}")).with("capacity", 1 << 17);
    let succeeding = Role::new(child, "receive-succeeding").with("name", dir.name()).with("sizes", sizes);
    let listening = if sender_listens {
        (role.with("listen", "yes"), succeeding)
    } else {
        (role, succeeding.with("listen", "yes"))
    };
    let (role, succeeding) = listening;
    let mut random = Random::new(42);
    let mut sender = sender_listens.then(|| {
        let child = Child::start(role.clone());
        child.expect("listening");
        child
    });
    let mut next = 0;
    for _ in 0..20 {
        let some = 100 + random.below(1000);
        let receiver = Child::start(succeeding.clone().with("count", some));
        if !sender_listens {
            receiver.expect("listening");
            sender.get_or_insert_with(|| Child::start(role.clone()));
        }
        receiver.expect("connected");
        let said = receiver.line();
        let words: Vec<u64> = said.split(' ').take(3).map(|word| word.parse().unwrap()).collect();
        assert!(words[0] <= next, "lost: the next was {next}, this one began with {said}");
        next = words[1];
        receiver.kill();
        let died = sender.as_ref().unwrap().line();
        assert!(died.starts_with("PeerDied"), "{died}");
    }
    let last = Child::start(succeeding);
    if !sender_listens {
        last.expect("listening");
    }
    last.expect("connected");
    let said = last.line();
    let words: Vec<&str> = said.split(' ').collect();
    assert!(words[0].parse::<u64>().unwrap() <= next, "lost: the next was {next}, the last began with {said}");
    assert_eq!((words[1], words[3]), (count.to_string().as_str(), "Closed"), "{said}");
    sender.unwrap().wait_for_success();
}

#[test]
fn a_listening_sender_loses_nothing_when_twenty_receivers_die_under_load() {
    chain_of_receivers("a_listening_sender_loses_nothing_when_twenty_receivers_die_under_load", How::Block, true);
}

#[test]
fn a_connecting_sender_loses_nothing_when_twenty_receivers_die_under_load() {
    chain_of_receivers("a_connecting_sender_loses_nothing_when_twenty_receivers_die_under_load", How::Epoll, false);
}

/// Twenty senders, one after another, killed in mid-stream; each continues with the number after the last that
/// arrived.
fn chain_of_senders(claim: &'static str, how: How, receiver_listens: bool) {
    let dir = TestDir::new(claim);
    let sizes = Sizes::Random(99, 2000);
    let role = |from: u64| {
        let role = sending(&dir, 1 << 40, sizes).with("from", from).with("capacity", 1 << 17);
        if receiver_listens { role } else { role.with("listen", "yes") }
    };
    let mut child = Child::start(role(0));
    let mut receiver = if receiver_listens {
        let listener = Options::new().wait(how.wait()).listen(&dir.name()).unwrap();
        listener.accept_receiver_until(deadline()).unwrap().unwrap()
    } else {
        child.expect("listening");
        Options::new().wait(how.wait()).connect_receiver(&dir.name()).unwrap()
    };
    let mut random = Random::new(43);
    let mut number = 0;
    for generation in 1..=20 {
        number = receive_all(&mut receiver, number, 200 + random.below(2000), sizes, how).0;
        assert_eq!(receiver.generation(), generation);
        child.kill();
        let (next, end) = receive_all(&mut receiver, number, u64::MAX / 2, sizes, how);
        assert!(end.as_ref().unwrap().is_peer_died(), "{end:?}");
        number = next;
        child = Child::start(role(number));
        if !receiver_listens {
            child.expect("listening");
        }
        assert!(receiver.resume_until(deadline()).unwrap());
    }
    assert_eq!(receive_all(&mut receiver, number, 1000, sizes, how).0, number + 1000);
}

#[test]
fn a_listening_receiver_loses_nothing_when_twenty_senders_die_under_load() {
    chain_of_senders("a_listening_receiver_loses_nothing_when_twenty_senders_die_under_load", How::Block, true);
}

#[test]
fn a_connecting_receiver_loses_nothing_when_twenty_senders_die_under_load() {
    chain_of_senders("a_connecting_receiver_loses_nothing_when_twenty_senders_die_under_load", How::Epoll, false);
}

// Descriptors.

#[test]
fn descriptors_arrive_with_their_messages_in_order() {
    let dir = TestDir::new("descriptors_arrive_with_their_messages_in_order");
    let (mut receiver, child) = receiver_of(&dir, piping(&dir, 500).with("end", "close"));
    assert!(take_pipes(&mut receiver, 0, 500).is_none());
    child.expect("sent");
}

#[test]
fn a_message_carries_at_most_sixty_four_descriptors() {
    let dir = TestDir::new("a_message_carries_at_most_sixty_four_descriptors");
    let role = Role::new(child, "receive-64").with("name", dir.name());
    let (mut sender, child) = sender_of(&dir, 65536, How::Block, role);
    let pipe = rustix::pipe::pipe().unwrap().0;
    let many = vec![pipe.as_fd(); 65];
    match sender.send_with_descriptors(b"", &many) {
        Err(Error::TooManyDescriptors { found, wanted }) => assert_eq!((found, wanted), (65, 64)),
        other => panic!("{other:?}"),
    }
    sender.send_with_descriptors(b"64", &many[..64]).unwrap();
    sender.send_with_descriptors(b"none", &[]).unwrap();
    child.expect("64: 64");
    child.expect("none: 0");
}

#[test]
fn untaken_descriptors_are_closed() {
    let dir = TestDir::new("untaken_descriptors_are_closed");
    let role = Role::new(child, "receive-counting").with("name", dir.name());
    let (mut sender, child) = sender_of(&dir, 65536, How::Block, role);
    child.expect("connected");
    let before = kernel::descriptors_of(child.pid());
    let pipe = rustix::pipe::pipe().unwrap().0;
    for _ in 0..50 {
        sender.send_with_descriptors(b"take them or leave them", &[pipe.as_fd(), pipe.as_fd()]).unwrap();
    }
    child.expect("received 50");
    eventually_is(before, "the receiver's descriptors", || kernel::descriptors_of(child.pid()));
    assert!(sender.wait_released_until(deadline()).unwrap());
}

#[test]
fn descriptors_of_a_killed_sender_arrive_with_its_committed_messages() {
    let dir = TestDir::new("descriptors_of_a_killed_sender_arrive_with_its_committed_messages");
    let (mut receiver, child) = receiver_of(&dir, piping(&dir, 20));
    child.expect("sent");
    child.kill();
    assert!(take_pipes(&mut receiver, 0, 5).is_none());
    // No new receiver gets the rest: they are this side's, before and after the successor connects.
    let successor = Child::start(sending(&dir, 1, Sizes::Fixed(8)).with("from", 20));
    assert!(receiver.resume_until(deadline()).unwrap_or_else(|error| {
        // A sender whose receiver has not read to the end is not lost yet.
        panic!("{error}")
    }));
    assert!(take_pipes(&mut receiver, 5, 15).is_none());
    assert_eq!(receive_all(&mut receiver, 20, 1, Sizes::Fixed(8), How::Block).0, 21);
    successor.expect("sent 21");
}

#[test]
fn a_non_blocking_sender_detects_the_receivers_death_even_with_a_full_lane() {
    let dir = TestDir::new("a_non_blocking_sender_detects_the_receivers_death_even_with_a_full_lane");
    let (mut sender, child) = sender_of(&dir, 65536, How::Block, tenth(&dir));
    child.expect("connected");
    send_all(&mut sender, 0..10, Sizes::Fixed(1000), How::Block).unwrap();
    child.expect("10 enough");
    child.kill();
    let until = deadline();
    let (mut tries, bytes) = (0u64, [0; 1000]);
    let error = loop {
        match sender.try_send(&bytes) {
            Ok(_) => tries += 1,
            Err(error) => break error,
        }
        assert!(tries < 2_000_000 && Instant::now() < until, "Full for ever: the death is never detected");
    };
    assert!(error.is_peer_died(), "{error}");
}

#[test]
fn a_successor_that_arms_first_still_marks_its_first_message() {
    let dir = TestDir::new("a_successor_that_arms_first_still_marks_its_first_message");
    let sizes = Sizes::Fixed(8);
    let (mut receiver, child) = receiver_of(&dir, sending(&dir, 1, sizes));
    child.expect("sent 1");
    child.kill();
    let successor = Child::start(sending(&dir, 1, sizes).with("from", 1).with("arm", "first"));
    assert!(receiver.resume_until(deadline()).unwrap());
    assert_eq!(receive_all(&mut receiver, 0, 2, sizes, How::Block).0, 2);
    assert_eq!(receiver.generation(), 2);
    successor.expect("sent 2");
}

/// Runs `first` and then `second` on one processor, where `second` runs only while the process that `first` started
/// is idle.
fn last_on_one_processor<T>(first: impl FnOnce() -> T, second: impl FnOnce()) -> T {
    let policy = |policy| {
        let priority = libc::sched_param { sched_priority: 0 };
        // SAFETY: the struct lives across the call, which affects this thread only.
        assert_eq!(unsafe { libc::sched_setscheduler(0, policy, &priority) }, 0);
    };
    let everywhere = kernel::pin(0);
    let started = first();
    policy(libc::SCHED_IDLE);
    second();
    policy(libc::SCHED_OTHER);
    rustix::thread::sched_setaffinity(None, &everywhere).unwrap();
    started
}

/// `count` messages with a descriptor each, of which the first receiver takes `taken` before it is killed.
fn descriptors_again(claim: &'static str, count: u64, taken: u64) {
    let dir = TestDir::new(claim);
    let role = |count: u64| Role::new(child, "take-pipes").with("name", dir.name()).with("count", count);
    let (mut sender, child) = sender_of(&dir, 1 << 20, How::Block, role(taken));
    let send = |sender: &mut Sender, number: u64| {
        let (reading, writing) = rustix::pipe::pipe().unwrap();
        rustix::io::write(&writing, &number.to_le_bytes()).unwrap();
        sender.send_with_descriptors(&number.to_le_bytes(), &[reading.as_fd()])
    };
    for number in 0..count {
        send(&mut sender, number).unwrap();
    }
    child.expect("connected");
    child.expect("enough");
    child.kill();
    assert_eq!(word(&sender.wait_released().unwrap_err()), format!("PeerDied {}", count - taken));
    let rest = Role::new(self::child, "take-pipes")
        .with("name", dir.name())
        .with("from", taken)
        .with("count", count - taken + 1)
        .with("at", "once");
    // On one processor with it, the successor runs first whenever it can.
    let successor = last_on_one_processor(|| Child::start(rest), || assert!(sender.resume_until(deadline()).unwrap()));
    send(&mut sender, count).unwrap();
    successor.expect("enough");
}

#[test]
fn unreleased_descriptors_are_sent_again_to_a_successor() {
    descriptors_again("unreleased_descriptors_are_sent_again_to_a_successor", 20, 5);
}

#[test]
fn many_unreleased_descriptors_are_sent_again_to_a_successor() {
    // They race with the successor, which gets the messages at once.
    for _ in 0..10 {
        descriptors_again("many_unreleased_descriptors_are_sent_again_to_a_successor", 240, 5);
    }
}

#[test]
fn sending_descriptors_to_a_dead_receiver_detects_its_death() {
    // The system resets the socket, rather than just closing it, if it contains unread data.
    for unread in [0, 1] {
        let dir = TestDir::new("sending_descriptors_to_a_dead_receiver_detects_its_death");
        let role = Role::new(child, "take-pipes").with("name", dir.name()).with("count", 0);
        let (mut sender, child) = sender_of(&dir, 1 << 20, How::Block, role);
        let pipe = rustix::pipe::pipe().unwrap().0;
        for _ in 0..unread {
            sender.send_with_descriptors(b"", &[pipe.as_fd()]).unwrap();
        }
        child.expect("connected");
        child.kill();
        let error = sender.send_with_descriptors(b"", &[pipe.as_fd()]).unwrap_err();
        assert_eq!(word(&error), format!("PeerDied {unread}"));
    }
}

#[test]
fn the_next_call_detects_a_successor_that_died_before_it_got_the_descriptors() {
    let dir = TestDir::new("the_next_call_detects_a_successor_that_died_before_it_got_the_descriptors");
    // More than a socket takes at a time, so that sending them again blocks.
    let count = 400;
    let holding = Role::new(child, "hold-pipes").with("name", dir.name()).with("count", count);
    let (mut sender, child) = sender_of(&dir, 1 << 20, How::Block, holding);
    let pipe = rustix::pipe::pipe().unwrap().0;
    for _ in 0..count {
        sender.send_with_descriptors(b"", &[pipe.as_fd()]).unwrap();
    }
    child.expect("enough");
    child.kill();
    assert_eq!(word(&sender.wait_released().unwrap_err()), format!("PeerDied {count}"));
    let idle = Role::new(self::child, "take-pipes").with("name", dir.name()).with("count", 0).with("at", "once");
    let successor = Child::start(idle);
    let killing = std::thread::spawn(move || {
        successor.expect("enough");
        successor.kill();
    });
    assert!(sender.resume_until(deadline()).unwrap(), "it came");
    assert_eq!(word(&sender.send(b"").unwrap_err()), format!("PeerDied {count}"));
    killing.join().unwrap();
}
