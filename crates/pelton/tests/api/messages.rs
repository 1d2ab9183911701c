//! Copies that the caller owns: `receive_vec`, and the iterator over messages.

use crate::support::*;
use pelton::{Error, Options};

#[test]
fn the_iterator_returns_every_message_and_ends_when_the_sender_closes() {
    let (mut sender, mut receiver) = Options::new().capacity(1 << 16).threads().unwrap();
    let sending = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        for number in 0..5_000 {
            payload(number, (number % 700) as usize, &mut bytes);
            sender.send(&bytes).unwrap();
        }
    });
    let mut wanted = Vec::new();
    let mut count = 0;
    for (number, message) in (0..).zip(receiver.messages()) {
        payload(number, (number % 700) as usize, &mut wanted);
        assert_eq!(message.unwrap(), wanted);
        count += 1;
    }
    assert_eq!(count, 5_000);
    sending.join().unwrap();
    assert!(receiver.messages().next().is_none(), "it stays closed");
}

#[test]
fn an_iterator_that_is_dropped_early_has_taken_only_what_it_returned() {
    let (mut sender, mut receiver) = Options::new().threads().unwrap();
    for number in 0..10u8 {
        sender.send(&[number]).unwrap();
    }
    let first: Result<Vec<_>, Error> = receiver.messages().take(3).collect();
    assert_eq!(first.unwrap(), [[0], [1], [2]]);
    assert_eq!(receiver.receive_vec().unwrap(), [3]);
    assert_eq!(sender.unreleased(), 6);
}

#[test]
fn the_iterator_returns_another_error_once_and_then_ends() {
    let place = TestDir::new("messages of a dead sender");
    let path = place.path().join("c");
    let mut receiver = Options::new().create_receiver(&path).unwrap();
    let sender = Child::start(Role::new(child, "send").with("path", path.display()));
    sender.expect("sent");
    sender.kill();
    let mut messages = receiver.messages();
    assert_eq!(messages.next().unwrap().unwrap(), b"hello");
    assert!(matches!(messages.next(), Some(Err(Error::PeerDied { .. }))));
    assert!(messages.next().is_none());
    // The next sender.
    let mut sender = Options::new().open_sender(&path).unwrap();
    sender.send(b"again").unwrap();
    sender.close().unwrap();
    let messages: Result<Vec<_>, Error> = receiver.messages().collect();
    assert_eq!(messages.unwrap(), [b"again"]);
}

/// Not a test: what a child does. Without a role it does nothing.
#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    let mut sender = Options::new().open_sender(role.get("path")).unwrap();
    sender.send(b"hello").unwrap();
    report("sent");
    read_line_from_parent();
}
