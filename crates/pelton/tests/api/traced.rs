//! Messages with a traceparent: on channels of threads, of processes, of several senders and by path; at the limits,
//! at the second delivery, and without the option.

use crate::support::*;
use pelton::{Deadline, Error, Listener, Options, Receiver, Sender, Sent, Traceparent};

/// A traceparent of this number; none for every third.
fn traceparent(number: u64) -> Option<Traceparent> {
    let trace_id = (u128::from(number) << 64 | 0xabcdef).to_be_bytes();
    Traceparent::new(trace_id, (number + 1).to_be_bytes(), number as u8).filter(|_| !number.is_multiple_of(3))
}

fn send_one(sender: &mut Sender, payload: &[u8], traceparent: Option<Traceparent>, number: u64) {
    let deadline = Deadline::At(deadline());
    match (traceparent, number.is_multiple_of(2)) {
        (None, _) => sender.send(payload).unwrap(),
        (Some(traceparent), true) => {
            assert_eq!(sender.send_traced(payload, traceparent, deadline).unwrap(), Sent::Sent);
        }
        (Some(traceparent), false) => {
            let mut space = sender.reserve_traced(payload.len() + 5, traceparent, deadline).unwrap().unwrap();
            space[..payload.len()].copy_from_slice(payload);
            space.commit_bytes(payload.len()).unwrap();
        }
    }
}

/// Takes one message by one of the ways, and returns its traceparent.
fn receive_one(receiver: &mut Receiver, wanted: &[u8], number: u64) -> Option<Traceparent> {
    match number % 5 {
        0 => {
            let mut buffer = Vec::new();
            receiver.receive_into(&mut buffer).unwrap();
            assert_eq!(buffer, wanted);
            receiver.traceparent()
        }
        1 => {
            let held = receiver.receive().unwrap().hold();
            assert_eq!(&*held, wanted);
            held.traceparent()
        }
        2 => {
            let mut batch = receiver.receive_batch().unwrap();
            assert_eq!(batch.next().unwrap().unwrap(), wanted);
            batch.traceparent()
        }
        _ => {
            let message = receiver.receive().unwrap();
            assert_eq!(&*message, wanted);
            message.traceparent()
        }
    }
}

/// Sends messages of every size with and without traceparents, around the lane many times.
fn exchange(mut sender: Sender, mut receiver: Receiver) {
    const MESSAGES: u64 = 3000;
    let sizes = Sizes::Random(43, 20_000);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut bytes = Vec::new();
            for number in 0..MESSAGES {
                payload(number, sizes.of(number), &mut bytes);
                send_one(&mut sender, &bytes, traceparent(number), number);
            }
        });
        let mut bytes = Vec::new();
        for number in 0..MESSAGES {
            payload(number, sizes.of(number), &mut bytes);
            assert_eq!(receive_one(&mut receiver, &bytes, number), traceparent(number), "{number}");
        }
        assert!(receiver.receive().unwrap_err().is_closed());
    });
}

#[test]
fn a_message_comes_with_its_traceparent_on_every_kind_of_channel() {
    let _hang = Watchdog::new("a_message_comes_with_its_traceparent_on_every_kind_of_channel");
    let dirs = TestDir::new("traced");
    let (sender, receiver) = Options::new().capacity(65536).traced(true).threads().unwrap();
    exchange(sender, receiver);

    let (senders, receiver) = Options::new().capacity(65536).traced(true).gather().unwrap();
    let sender = senders.sender().unwrap();
    drop(senders);
    exchange(sender, receiver);

    // The sender's option decides: the receiver has none.
    let name = format!("unix:{}", dirs.path().join("traced").display());
    let listener = Options::new().listen(&name).unwrap();
    let sender = std::thread::scope(|scope| {
        let connecting = scope.spawn(|| Options::new().capacity(65536).traced(true).connect_sender(&name).unwrap());
        let receiver = listener.accept_receiver().unwrap();
        (connecting.join().unwrap(), receiver)
    });
    exchange(sender.0, sender.1);

    let path = dirs.path().join("channel");
    let sender = Options::new().capacity(65536).traced(true).create_sender(&path).unwrap();
    exchange(sender, Options::new().open_receiver(&path).unwrap());
    pelton::inspect::remove(&path).unwrap();
    // Created by the receiver: the sender that opens it needs no option.
    let receiver = Options::new().capacity(65536).traced(true).create_receiver(&path).unwrap();
    exchange(Options::new().open_sender(&path).unwrap(), receiver);
    pelton::inspect::remove(&path).unwrap();
}

#[test]
fn a_second_delivery_keeps_the_traceparent() {
    let dirs = TestDir::new("traced");
    let path = dirs.path().join("channel");
    let mut sender = Options::new().capacity(65536).traced(true).create_sender(&path).unwrap();
    for number in 0..7 {
        send_one(&mut sender, &[number as u8], traceparent(number), number);
    }
    let mut first = Options::new().open_receiver(&path).unwrap();
    let held: Vec<_> = (0..7).map(|_| first.receive().unwrap().hold()).collect();
    drop(first);
    drop(held);
    let mut receiver = Options::new().open_receiver(&path).unwrap();
    for number in 0..7u8 {
        let message = receiver.receive().unwrap();
        assert!(message.is_redelivered());
        assert_eq!((&*message, message.traceparent()), (&[number][..], traceparent(number.into())));
    }
    drop((sender, receiver));
    pelton::inspect::remove(&path).unwrap();
}

#[test]
fn without_the_option_a_message_goes_without_its_traceparent() {
    let dirs = TestDir::new("traced");
    let path = dirs.path().join("channel");
    let span = traceparent(1).unwrap();
    let (of_threads, receiver) = Options::new().capacity(65536).threads().unwrap();
    // The channel's creator has decided.
    let of_path = Options::new().capacity(65536).create_sender(&path).unwrap();
    drop(of_path);
    let of_path = Options::new().traced(true).create_sender(&path).unwrap();
    for (mut sender, mut receiver) in [(of_threads, receiver), (of_path, Options::new().open_receiver(&path).unwrap())]
    {
        let bytes = sender.counters().bytes;
        assert_eq!(sender.send_traced(b"one", span, Deadline::Now).unwrap(), Sent::Sent);
        assert_eq!(sender.counters().bytes, bytes + 3);
        let message = receiver.receive().unwrap();
        assert_eq!((&*message, message.traceparent()), (&b"one"[..], None));
    }
    pelton::inspect::remove(&path).unwrap();
}

#[test]
fn the_largest_message_with_a_traceparent_always_finds_space_in_an_empty_lane() {
    let _hang = Watchdog::new("the_largest_message_with_a_traceparent_always_finds_space_in_an_empty_lane");
    let span = traceparent(1).unwrap();
    let (mut sender, mut receiver) = Options::new().capacity(65536).traced(true).threads().unwrap();
    let most = 65536 / 2 - 72;
    assert_eq!(sender.message_bytes_max(), most);
    let error = Options::new().capacity(65536).message_bytes_max(most + 1).traced(true).threads().unwrap_err();
    assert!(matches!(error, Error::Option { option: "message_bytes_max", .. }), "{error}");
    let large = vec![7; most as usize];
    // The head moves to every place of the lane.
    for bytes in (0..4096).step_by(56) {
        sender.send(&vec![1; bytes]).unwrap();
        assert_eq!(receiver.receive().unwrap().len(), bytes);
        assert_eq!(sender.send_traced(&large, span, Deadline::Now).unwrap(), Sent::Sent, "{bytes}");
        let message = receiver.receive().unwrap();
        assert_eq!((message.len(), message.traceparent()), (large.len(), Some(span)));
    }
    let error = sender.send_traced(&vec![0; most as usize + 1], span, Deadline::Now).unwrap_err();
    assert!(matches!(error, Error::TooLarge { .. }), "{error}");
    // A full lane: now, at a deadline, and until there is space.
    while sender.send_traced(&[2; 1000], span, Deadline::Now).unwrap() == Sent::Sent {}
    let soon = std::time::Instant::now() + std::time::Duration::from_millis(2);
    assert_eq!(sender.send_traced(&[2; 1000], span, soon).unwrap(), Sent::TimedOut);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for _ in 0..1000 {
                assert_eq!(sender.send_traced(&[3; 1000], span, Deadline::Never).unwrap(), Sent::Sent);
            }
        });
        let mut last = 0;
        while let Ok(message) = receiver.receive() {
            assert_eq!(message.traceparent(), Some(span));
            last = message[0];
        }
        assert_eq!(last, 3);
    });
}

#[test]
fn the_next_sender_of_a_lane_requires_the_feature_too_since_messages_in_it_may_carry_a_traceparent() {
    let dirs = TestDir::new("traced");
    let name = format!("unix:{}", dirs.path().join("traced").display());
    let listener = Listener::bind(&name).unwrap();
    let connect = |traced: bool| {
        let name = name.clone();
        std::thread::spawn(move || Options::new().capacity(65536).traced(traced).connect_sender(&name).unwrap())
    };
    let first = connect(true);
    let mut receiver = listener.accept_receiver().unwrap();
    let mut first = first.join().unwrap();
    send_one(&mut first, b"first", traceparent(1), 1);
    drop(first);
    // Without the option.
    let second = connect(false);
    let message = receiver.receive().unwrap();
    assert_eq!((&*message, message.traceparent()), (&b"first"[..], traceparent(1)));
    drop(message);
    assert!(receiver.receive().unwrap_err().is_closed());
    receiver.resume().unwrap();
    let mut second = second.join().unwrap();
    send_one(&mut second, b"second", traceparent(2), 2);
    let message = receiver.receive().unwrap();
    assert_eq!((&*message, message.traceparent()), (&b"second"[..], traceparent(2)));
}
