//! A channel between threads of one process: the operations of a sender and a receiver, and their cost.
#![allow(clippy::drop_non_drop, reason = "dropping is what a user does to abort")]

use crate::support::*;
use pelton::{Error, Held, Options, Receiver, Sender, Sent, Wait};
use std::os::fd::AsFd;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Not a test: work that must be alone in its process, because it counts the process's resources. Without a role it
/// does nothing.
#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    match role.get("role") {
        "many" => a_thousand_channels(),
        "resident" => a_reader_that_keeps_up(),
        "trim" => a_burst_and_a_trim(),
        "signals" => signals_while_waiting(),
        other => panic!("no role {other}"),
    }
    report("well");
}

fn alone(role: &str) {
    let child = Child::start(Role::new(child, role));
    child.expect("well");
    child.wait_for_success();
}

fn small() -> (Sender, Receiver) {
    Options::new().capacity(65536).threads().unwrap()
}

/// That many messages of 10,000 bytes fill a small lane.
fn fill(sender: &mut Sender) -> u64 {
    let mut sent = 0;
    while sender.try_send(&[sent as u8; 10_000]).unwrap() == Sent::Sent {
        sent += 1;
    }
    sent
}

#[test]
fn messages_keep_their_order_and_their_bytes() {
    let _hang = Watchdog::new("messages_keep_their_order_and_their_bytes");
    for (how, other) in
        [(How::Block, How::Block), (How::Spin, How::Spin), (How::Epoll, How::Poll), (How::Try, How::Block)]
    {
        let sizes = Sizes::Random(21, 20_000);
        let options = Options::new().capacity(65536);
        let (mut sender, mut receiver) = options.wait(how.wait()).threads().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                send_all(&mut sender, 0..3000, sizes, how).unwrap();
                sender.close().unwrap();
            });
            let (number, end) = receive_all(&mut receiver, 0, u64::MAX / 2, sizes, other);
            assert_eq!((number, word(&end.unwrap())), (3000, "Closed 0".to_owned()));
        });
    }
}

#[test]
fn a_batch_appears_all_at_once_or_not_at_all() {
    let (mut sender, mut receiver) = small();
    let mut batch = sender.try_reserve_batch([3, 3, 5]).unwrap().unwrap();
    assert!(batch.push(b"one") && batch.push(b"two"));
    drop(batch);
    assert!(receiver.try_receive().unwrap().is_none());
    let mut batch = sender.try_reserve_batch([3, 3, 5]).unwrap().unwrap();
    assert!(batch.push(b"one") && batch.push(b"two"));
    batch.reserve(5).unwrap().copy_from_slice(b"three");
    assert!(!batch.push(&[0; 1000]), "it has no free space for that");
    batch.commit().unwrap();
    let mut taken = receiver.try_receive_batch().unwrap().unwrap();
    for wanted in [&b"one"[..], b"two", b"three"] {
        assert_eq!(taken.next().unwrap().unwrap(), wanted);
    }
    assert!(taken.next().unwrap().is_none());
    drop(taken);
    assert_eq!(sender.unreleased(), 0);
}

#[test]
fn a_batch_releases_only_the_messages_it_returned() {
    let (mut sender, mut receiver) = small();
    for number in 0..5u8 {
        sender.send(&[number]).unwrap();
    }
    let mut taken = receiver.receive_batch().unwrap();
    taken.next().unwrap();
    taken.next().unwrap();
    drop(taken);
    assert_eq!(sender.unreleased(), 3);
    assert_eq!(*receiver.receive().unwrap(), [2]);
}

#[test]
fn messages_of_a_batch_are_counted_once_however_often_it_is_polled() {
    let (mut sender, mut receiver) = small();
    sender.send(b"one").unwrap();
    let mut taken = receiver.receive_batch().unwrap();
    for (wanted, next) in [(&b"one"[..], &b"two"[..]), (b"two", b"three"), (b"three", b"")] {
        assert_eq!(taken.next().unwrap().unwrap(), wanted);
        assert!(taken.next().unwrap().is_none() && taken.next().unwrap().is_none());
        sender.send(next).unwrap();
    }
    drop(taken);
    let counters = receiver.counters();
    assert_eq!((counters.messages, counters.bytes), (3, 11));
    assert_eq!(sender.unreleased(), 1);
}

#[test]
fn messages_of_a_forgotten_batch_are_not_lost() {
    let (mut sender, mut receiver) = small();
    for number in 0..3u8 {
        sender.send(&[number]).unwrap();
    }
    let mut taken = receiver.receive_batch().unwrap();
    assert_eq!(taken.next().unwrap().unwrap(), [0]);
    std::mem::forget(taken);
    let mut taken = receiver.receive_batch().unwrap();
    for number in 0..3u8 {
        assert_eq!(taken.next().unwrap().unwrap(), [number]);
    }
    drop(taken);
    assert_eq!((sender.unreleased(), receiver.counters().messages), (0, 3));
}

#[test]
fn a_batch_larger_than_any_message_is_too_large() {
    let (mut sender, _receiver) = small();
    assert!(matches!(sender.try_reserve_batch([30_000, 30_000]), Err(Error::TooLarge { .. })));
}

#[test]
fn an_aborted_reservation_is_never_seen() {
    let (mut sender, mut receiver) = small();
    let mut reservation = sender.try_reserve(100).unwrap().unwrap();
    reservation.fill(7);
    reservation.abort();
    let mut reservation = sender.reserve(100).unwrap();
    reservation.fill(8);
    drop(reservation);
    assert!(receiver.try_receive().unwrap().is_none());
    let mut reservation = sender.reserve_until(100, Instant::now()).unwrap().unwrap();
    reservation[..5].copy_from_slice(b"hello");
    reservation.commit_bytes(5).unwrap();
    assert_eq!(&*receiver.receive().unwrap(), b"hello");
}

#[test]
fn committing_more_than_was_reserved_is_too_large_and_sends_nothing() {
    let (mut sender, mut receiver) = small();
    match sender.reserve(10).unwrap().commit_bytes(11) {
        Err(Error::TooLarge { bytes, bytes_max }) => assert_eq!((bytes, bytes_max), (11, 10)),
        other => panic!("{other:?}"),
    }
    assert!(receiver.try_receive().unwrap().is_none());
    sender.send(b"next").unwrap();
    assert_eq!(&*receiver.receive().unwrap(), b"next");
}

#[test]
fn a_message_too_large_is_an_error_with_both_sizes_even_if_the_lane_is_full() {
    let (mut sender, _receiver) = Options::new().capacity(65536).message_bytes_max(20_000).threads().unwrap();
    for _ in 0..2 {
        let error = sender.try_send(&[0; 20_001]).unwrap_err();
        assert!(matches!(error, Error::TooLarge { bytes: 20_001, bytes_max: 20_000 }), "{error}");
        assert!(error.to_string().contains("20001") && error.to_string().contains("20000"), "{error}");
        assert!(matches!(sender.send(&[0; 30_000]), Err(Error::TooLarge { .. })));
        assert!(matches!(sender.arm(30_000), Ok(_) | Err(Error::TooLarge { .. })));
        fill(&mut sender);
    }
}

#[test]
fn the_largest_message_passes_and_one_byte_more_does_not() {
    let (mut sender, mut receiver) = small();
    let most = sender.message_bytes_max() as usize;
    assert_eq!(most, 65536 / 2 - 32);
    for _ in 0..10 {
        assert_eq!(sender.try_send(&vec![1; most]).unwrap(), Sent::Sent);
        assert_eq!(receiver.receive().unwrap().len(), most);
    }
    assert!(sender.try_send(&vec![1; most + 1]).is_err());
}

#[test]
fn held_messages_are_released_in_any_order_on_any_thread() {
    let _hang = Watchdog::new("held_messages_are_released_in_any_order_on_any_thread");
    let (mut sender, mut receiver) = small();
    let mut random = Random::new(5);
    for _ in 0..50 {
        let sent = fill(&mut sender);
        assert!(sent >= 5);
        let mut held: Vec<Held> = (0..sent).map(|_| receiver.receive().unwrap().hold()).collect();
        for (number, held) in held.iter().enumerate() {
            assert_eq!(**held, [number as u8; 10_000]);
        }
        std::thread::scope(|scope| {
            while !held.is_empty() {
                let one = held.swap_remove(random.below(held.len() as u64) as usize);
                scope.spawn(move || drop(one));
            }
        });
        assert!(receiver.try_receive().unwrap().is_none());
        assert!(sender.wait_released_until(deadline()).unwrap());
    }
}

/// The end of the channel may occur at any instant of the wait.
#[test]
fn a_drain_succeeds_if_the_receiver_closes_after_the_last_message() {
    let _hang = Watchdog::new("a_drain_succeeds_if_the_receiver_closes_after_the_last_message");
    for round in 0..2_000 {
        let (mut sender, mut receiver) = small();
        sender.send(b"last").unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                (0..round % 64 * 8).for_each(|_| std::hint::spin_loop());
                assert_eq!(&*receiver.receive().unwrap(), b"last");
            });
            sender.wait_released().unwrap();
        });
    }
}

#[test]
fn a_held_message_outlives_its_receiver() {
    let (mut sender, mut receiver) = small();
    sender.send(b"kept").unwrap();
    let held = receiver.receive().unwrap().hold();
    drop(receiver);
    drop(sender);
    assert_eq!(&*held, b"kept");
}

/// The sender waits for free space, the receiver sleeps, and all of the lane is held: dropping the held messages
/// wakes both.
#[test]
fn dropping_held_messages_wakes_the_sleeping_receiver_and_so_the_sender() {
    let _hang = Watchdog::new("dropping_held_messages_wakes_the_sleeping_receiver_and_so_the_sender");
    for order in [true, false] {
        let (mut sender, mut receiver) = small();
        let sent = fill(&mut sender);
        let mut held: Vec<Held> = (0..sent).map(|_| receiver.receive().unwrap().hold()).collect();
        let (signal_sender, signal_receiver) = mpsc::channel();
        std::thread::scope(|scope| {
            let tell_too = signal_sender.clone();
            scope.spawn(move || {
                signal_sender.send(this_thread()).unwrap();
                sender.send(&[99; 10_000]).unwrap();
                assert!(sender.wait_released_until(deadline()).unwrap());
            });
            scope.spawn(move || {
                tell_too.send(this_thread()).unwrap();
                assert_eq!(*receiver.receive().unwrap(), [99; 10_000]);
            });
            for thread in signal_receiver.iter().take(2) {
                wait_until_thread_polls(thread);
            }
            if order {
                held.reverse();
            }
            while held.pop().is_some() {}
        });
    }
}

#[test]
fn a_deadline_in_the_past_still_takes_a_waiting_message() {
    let _hang = Watchdog::new("a_deadline_in_the_past_still_takes_a_waiting_message");
    for wait in [Wait::Block, Wait::Spin] {
        let (mut sender, mut receiver) = Options::new().capacity(65536).wait(wait).threads().unwrap();
        let past = Instant::now();
        let mut buffer = Vec::new();
        assert!(receiver.receive_until(past).unwrap().is_none());
        assert!(receiver.receive_into_until(&mut buffer, past).unwrap().is_none());
        assert!(sender.wait_released_until(past).unwrap());
        assert_eq!(sender.send_until(b"x", past).unwrap(), Sent::Sent);
        assert!(!sender.wait_released_until(past).unwrap());
        assert_eq!(&*receiver.receive_until(past).unwrap().unwrap(), b"x");
        assert!(sender.wait_released_until(past).unwrap());
        fill(&mut sender);
        assert_eq!(sender.send_until(&[0; 10_000], past).unwrap(), Sent::TimedOut);
        assert!(sender.reserve_until(10_000, past).unwrap().is_none());
        assert!(sender.reserve_batch_until([5_000, 5_000], past).unwrap().is_none());
        assert_eq!(receiver.receive_into_until(&mut buffer, past).unwrap(), Some(10_000));
        let mut batch = receiver.receive_batch_until(past).unwrap().unwrap();
        while batch.next().unwrap().is_some() {}
        drop(batch);
        assert!(receiver.receive_batch_until(past).unwrap().is_none());
        assert!(sender.reserve_batch_until([5_000, 5_000], past).unwrap().is_some());
    }
}

#[test]
fn no_wait_ends_before_its_deadline_without_a_result() {
    let _hang = Watchdog::new("no_wait_ends_before_its_deadline_without_a_result");
    for wait in [Wait::Block, Wait::Spin] {
        let (mut sender, mut receiver) = Options::new().capacity(65536).wait(wait).threads().unwrap();
        let soon = || Instant::now() + Duration::from_millis(30);
        let until = soon();
        assert!(receiver.receive_until(until).unwrap().is_none());
        assert!(Instant::now() >= until);
        fill(&mut sender);
        let until = soon();
        assert_eq!(sender.send_until(&[0; 10_000], until).unwrap(), Sent::TimedOut);
        assert!(Instant::now() >= until);
        let until = soon();
        assert!(sender.reserve_batch_until([9_000, 900], until).unwrap().is_none());
        assert!(Instant::now() >= until);
        let until = soon();
        assert!(!sender.wait_released_until(until).unwrap());
        assert!(Instant::now() >= until);
    }
}

#[test]
fn dropping_one_endpoint_wakes_the_other_with_closed() {
    let _hang = Watchdog::new("dropping_one_endpoint_wakes_the_other_with_closed");
    for how in [How::Block, How::Spin, How::Epoll] {
        for sender_goes in [true, false] {
            let (mut sender, mut receiver) = Options::new().capacity(65536).wait(how.wait()).threads().unwrap();
            let (signal_sender, signal_receiver) = mpsc::channel();
            let waiting = std::thread::scope(|scope| {
                if sender_goes {
                    let waiting = scope.spawn(move || {
                        signal_sender.send(this_thread()).unwrap();
                        receive_all(&mut receiver, 0, 1, Sizes::Fixed(1), how).1.unwrap()
                    });
                    let thread = signal_receiver.recv().unwrap();
                    if how != How::Spin {
                        wait_until_thread_polls(thread);
                    }
                    drop(sender);
                    waiting.join().unwrap()
                } else {
                    let sent = fill(&mut sender);
                    let waiting = scope.spawn(move || {
                        signal_sender.send(this_thread()).unwrap();
                        let error = send_all(&mut sender, 0..1, Sizes::Fixed(10_000), how).unwrap_err().1;
                        assert!(matches!(error, Error::Closed { unreleased } if unreleased == sent - 1), "{error}");
                        error
                    });
                    let thread = signal_receiver.recv().unwrap();
                    drop(receiver.receive().unwrap());
                    drop(receiver);
                    let _ = thread;
                    waiting.join().unwrap()
                }
            });
            assert!(waiting.is_closed(), "{waiting}");
        }
    }
}

#[test]
fn the_descriptor_is_readable_exactly_while_a_message_waits() {
    let (mut sender, mut receiver) = small();
    assert!(receiver.arm().unwrap().is_waiting());
    assert!(!is_readable(receiver.as_fd()));
    sender.send(b"one").unwrap();
    sender.send(b"two").unwrap();
    assert!(is_readable(receiver.as_fd()));
    drop(receiver.try_receive().unwrap().unwrap());
    assert!(is_readable(receiver.as_fd()), "one is left");
    assert!(!receiver.arm().unwrap().is_waiting());
    assert!(is_readable(receiver.as_fd()));
    drop(receiver.try_receive().unwrap().unwrap());
    assert!(receiver.arm().unwrap().is_waiting());
    assert!(!is_readable(receiver.as_fd()));
    drop(sender);
    assert!(is_readable(receiver.as_fd()), "the end is an event");
    assert!(receiver.arm().unwrap_err().is_closed());
}

#[test]
fn the_senders_descriptor_is_readable_exactly_while_there_is_free_space() {
    let (mut sender, mut receiver) = small();
    assert!(!sender.arm(10_000).unwrap().is_waiting());
    assert!(is_readable(sender.as_fd()));
    let sent = fill(&mut sender);
    assert!(sender.arm(10_000).unwrap().is_waiting());
    assert!(!is_readable(sender.as_fd()));
    for _ in 0..sent {
        drop(receiver.receive().unwrap());
    }
    assert!(is_readable(sender.as_fd()));
    assert_eq!(sender.try_send(&[0; 10_000]).unwrap(), Sent::Sent);
}

#[test]
fn descriptors_pass_between_threads_too() {
    let (mut sender, mut receiver) = small();
    let (reading, writing) = rustix::pipe::pipe().unwrap();
    sender.send_with_descriptors(b"pipe", &[writing.as_fd()]).unwrap();
    drop(writing);
    let mut message = receiver.receive().unwrap();
    let taken = message.take_descriptors().unwrap();
    rustix::io::write(&taken[0], b"through").unwrap();
    let mut bytes = [0; 7];
    rustix::io::read(&reading, &mut bytes).unwrap();
    assert_eq!(&bytes, b"through");
}

#[test]
fn counters_report_every_event() {
    let _hang = Watchdog::new("counters_report_every_event");
    let (mut sender, mut receiver) = small();
    let sent = fill(&mut sender);
    let figures = sender.counters();
    assert_eq!((figures.messages, figures.bytes), (sent, sent * 10_000));
    assert_eq!(figures.depth_max, sent);
    assert_eq!((figures.sleeps, figures.wakes_sent), (0, 0));
    for _ in 0..sent {
        drop(receiver.receive().unwrap());
    }
    let figures = receiver.counters();
    assert_eq!((figures.messages, figures.bytes), (sent, sent * 10_000));
    assert_eq!((figures.waits, figures.sleeps, figures.wakes_sent, figures.depth_max), (0, 0, 0, 0));
    assert!(receiver.arm().unwrap().is_waiting());
    sender.send(b"wake").unwrap();
    sender.send(b"no second ring").unwrap();
    assert_eq!((receiver.counters().sleeps, sender.counters().wakes_sent), (1, 1));
    assert!(receiver.receive().is_ok() && receiver.receive().is_ok());
    assert!(receiver.receive_until(Instant::now()).unwrap().is_none());
    assert_eq!(receiver.counters().waits, 0, "a deadline that has passed is no wait");
    assert!(receiver.receive_until(Instant::now() + Duration::from_millis(1)).unwrap().is_none());
    assert_eq!(receiver.counters().waits, 1);
}

#[test]
fn options_out_of_range_are_errors_with_the_value_and_the_range() {
    for capacity in [0, 4095, (16 << 30) + 1, u64::MAX] {
        let error = Options::new().capacity(capacity).threads().unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::Option { option: "capacity", found, .. } if found == capacity), "{text}");
        assert!(text.contains(&capacity.to_string()) && text.contains("17179869184"), "{text}");
    }
    for bytes in [65536 / 2 - 31, u64::MAX] {
        let error = Options::new().capacity(65536).message_bytes_max(bytes).threads().unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::Option { option: "message_bytes_max", found, .. } if found == bytes), "{text}");
        assert!(text.contains("32736"), "{text}");
    }
    let name = "unix:/tmp/never-made-by-pelton-tests";
    assert!(matches!(Options::new().capacity(1).listen(name), Err(Error::Option { .. })));
    assert!(matches!(Options::new().capacity(1).connect_sender(name), Err(Error::Option { .. })));
    assert!(!std::path::Path::new(&name[5..]).exists());
    let (sender, _receiver) = Options::new().capacity(70_000).threads().unwrap();
    assert_eq!(sender.capacity(), 131_072);
}

#[test]
fn a_message_limit_of_zero_passes_empty_messages() {
    let (mut sender, mut receiver) = Options::new().capacity(65536).message_bytes_max(0).threads().unwrap();
    for _ in 0..20_000 {
        sender.send(b"").unwrap();
        assert!(receiver.receive().unwrap().is_empty());
    }
    assert!(matches!(sender.send(b"x"), Err(Error::TooLarge { bytes: 1, bytes_max: 0 })));
}

#[test]
fn resuming_a_channel_between_threads_is_refused() {
    let (mut sender, mut receiver) = small();
    assert!(matches!(sender.resume(), Err(Error::Refused(_))));
    assert!(matches!(receiver.resume(), Err(Error::Refused(_))));
    drop(sender);
    assert!(receiver.receive().is_err());
    assert!(matches!(receiver.resume(), Err(Error::Refused(_))));
}

// The resources of a process, each counted in a separate child.

#[test]
fn a_thousand_channels_leave_no_descriptor_and_no_mapping() {
    alone("many");
}

fn a_thousand_channels() {
    let one = |number: u64| {
        let (mut sender, mut receiver) = small();
        payload(number, 100, &mut Vec::new());
        sender.send(&number.to_le_bytes()).unwrap();
        let held = receiver.receive().unwrap().hold();
        let pipe = std::fs::File::open("/dev/null").unwrap();
        sender.send_with_descriptors(b"", &[pipe.as_fd()]).unwrap();
        // Alternately this one first, and the other.
        if number.is_multiple_of(2) {
            drop((sender, receiver, held));
        } else {
            drop((held, receiver, sender));
        }
    };
    (0..10).for_each(one);
    let before = (descriptors(), mappings());
    (0..1000).for_each(one);
    let after = (descriptors(), mappings());
    assert_eq!(before.0, after.0, "descriptors");
    // The allocator may take a mapping or give one back.
    assert!(after.1 <= before.1 + 3, "mappings: {} before, {} after", before.1, after.1);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains("memfd:pelton"), "{maps}");
}

/// Resident kilobytes of the lanes' data in this process.
fn resident_kb() -> u64 {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut ours, mut sum) = (false, 0);
    for line in smaps.lines() {
        let first = line.split(' ').next().unwrap();
        if !first.ends_with(':') {
            ours = line.contains("pelton-data");
        } else if ours && first == "Rss:" {
            sum += line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap();
        }
    }
    sum
}

#[test]
fn a_large_lane_whose_reader_keeps_up_takes_less_than_a_mebibyte() {
    alone("resident");
}

fn a_reader_that_keeps_up() {
    let mut random = Random::new(8);
    let bytes = [7; 8192];
    // The lane is empty again each time: not saturated below a gigabyte a second, which a burst after a pause of this
    // thread may not exceed either. Then it always has some messages, in the window and up to the limit.
    let slowly = |bytes: u64| Duration::from_nanos(2 * bytes);
    let fast = |_| Duration::ZERO;
    let cases: [(_, _, &dyn Fn(u64) -> Duration, _); 4] = [
        (1, None, &slowly, 1024),
        (1, None, &fast, 17 << 10),
        (8, Some(256 << 10), &fast, 1024),
        (8, None, &fast, 17 << 10),
    ];
    for (burst, limit, least_time, most_kb) in cases {
        let options = Options::new().capacity(64 << 20);
        let options = limit.map_or(options.clone(), |bytes| options.resident_max(bytes));
        let (mut sender, mut receiver) = options.threads().unwrap();
        for _ in 0..160_000 / burst {
            let (begun, mut sent) = (Instant::now(), 0);
            for _ in 0..burst {
                let message = &bytes[..random.below(8192) as usize];
                sender.send(message).unwrap();
                sent += message.len() as u64;
            }
            for _ in 0..burst {
                drop(receiver.receive().unwrap());
            }
            while begun.elapsed() < least_time(sent) {
                std::hint::spin_loop();
            }
        }
        let resident = resident_kb();
        assert!(resident > 0, "found no mapping of a lane");
        assert!(resident < most_kb, "bursts of {burst}, {limit:?}: {resident} kB resident");
    }
}

#[test]
fn trim_returns_a_bursts_memory_and_loses_nothing() {
    alone("trim");
}

fn a_burst_and_a_trim() {
    let (mut sender, mut receiver) = Options::new().capacity(64 << 20).threads().unwrap();
    let bytes = vec![9; 100_000];
    let mut sent = 0u64;
    while sender.try_send(&bytes).unwrap() == Sent::Sent {
        sent += 1;
    }
    assert!(resident_kb() > 60_000);
    for _ in 0..sent - 10 {
        assert_eq!(receiver.receive().unwrap().len(), 100_000);
    }
    sender.trim().unwrap();
    let resident = resident_kb();
    assert!(resident < 3000, "{resident} kB resident after trim");
    // In the middle of the rest, and after it.
    for round in 0..20u8 {
        sender.send(&[round; 5000]).unwrap();
        sender.trim().unwrap();
    }
    for _ in 0..10 {
        assert_eq!(*receiver.receive().unwrap(), bytes[..]);
    }
    for round in 0..20u8 {
        assert_eq!(*receiver.receive().unwrap(), [round; 5000]);
        sender.trim().unwrap();
    }
    assert!(receiver.try_receive().unwrap().is_none());
    // The trimmed lane continues like a new one.
    let mut again = 0;
    while sender.try_send(&bytes).unwrap() == Sent::Sent {
        again += 1;
    }
    assert!(again >= sent - 2, "{again} of {sent}");
    for _ in 0..again {
        assert_eq!(*receiver.receive().unwrap(), bytes[..]);
    }
    sender.trim().unwrap();
    assert!(resident_kb() < 1024);
}

#[test]
fn signals_neither_end_a_wait_nor_prolong_it() {
    alone("signals");
}

fn signals_while_waiting() {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: a handler that does nothing, without SA_RESTART; the struct lives across the call.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as *const () as usize;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()), 0);
    }
    let (mut sender, mut receiver) = small();
    let (signal_sender, signal_receiver) = mpsc::channel::<()>();
    // SAFETY: no pointers.
    let waiter = unsafe { libc::pthread_self() };
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // About 5,000 a second, until the channel closes.
            while signal_receiver.recv_timeout(Duration::from_micros(200)) == Err(mpsc::RecvTimeoutError::Timeout) {
                // SAFETY: the waiter is alive: it waits for this thread at the scope's end.
                unsafe { libc::pthread_kill(waiter, libc::SIGUSR1) };
            }
        });
        for wait in 0..3 {
            let until = Instant::now() + Duration::from_millis(150);
            match wait {
                0 => assert!(receiver.receive_until(until).unwrap().is_none()),
                1 => {
                    fill(&mut sender);
                    assert_eq!(sender.send_until(&[0; 10_000], until).unwrap(), Sent::TimedOut);
                }
                _ => assert!(!sender.wait_released_until(until).unwrap()),
            }
            assert!(Instant::now() >= until, "a signal ended wait {wait}");
        }
        // And a wait that succeeds under signals.
        while receiver.try_receive().unwrap().is_some() {}
        scope.spawn(move || {
            for number in 0..2000u64 {
                sender.send(&number.to_le_bytes()).unwrap();
                std::thread::yield_now();
            }
        });
        for number in 0..2000u64 {
            assert_eq!(*receiver.receive().unwrap(), number.to_le_bytes());
        }
        drop(signal_sender);
    });
}

#[test]
fn a_batch_waits_until_the_lane_has_space_for_all_of_it() {
    let _hang = Watchdog::new("a_batch_waits_until_the_lane_has_space_for_all_of_it");
    // The largest message, not a multiple of 8: a batch may take the space of that message, and no more.
    for wait in [Wait::Block, Wait::Spin] {
        let options = Options::new().capacity(65536).message_bytes_max(30_001).wait(wait);
        let (mut sender, mut receiver) = options.threads().unwrap();
        let filled = fill(&mut sender);
        std::thread::scope(|scope| {
            let sending = scope.spawn(move || {
                for round in 0..300_u32 {
                    let mut batch = sender.reserve_batch([14_000, 16_000]).unwrap();
                    assert!(batch.push(&[round as u8; 14_000]) && batch.push(&[round as u8; 16_000]));
                    batch.commit().unwrap();
                }
                assert!(matches!(sender.reserve_batch([14_000, 16_001]), Err(Error::TooLarge { .. })));
            });
            for _ in 0..filled {
                assert_eq!(receiver.receive_until(deadline()).unwrap().unwrap().len(), 10_000);
            }
            let mut bytes = Vec::new();
            while bytes.len() < 600 {
                let mut batch = receiver.receive_batch_until(deadline()).unwrap().expect("the sender waits for space");
                while let Some(message) = batch.next().unwrap() {
                    assert!(message.iter().all(|byte| *byte == message[0]));
                    bytes.push((message.len(), message[0]));
                }
            }
            let wanted = (0..600_u32).map(|at| ([14_000, 16_000][at as usize % 2], (at / 2) as u8));
            assert!(bytes.into_iter().eq(wanted));
            sending.join().unwrap();
        });
    }
}

#[test]
fn a_waiting_batch_detects_the_receivers_close() {
    let _hang = Watchdog::new("a_waiting_batch_detects_the_receivers_close");
    let (mut sender, receiver) = small();
    fill(&mut sender);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| sender.reserve_batch([9_000, 900]).map(drop));
        receiver.close().unwrap();
        assert!(waiting.join().unwrap().unwrap_err().is_closed());
    });
}

/// The bytes of these tests, as `Debug` would print them.
const SECRET: [&str; 2] = ["secret", "115, 101"];

#[test]
fn no_debug_output_has_payload() {
    let (mut sender, mut receiver) = small();
    let hides = |what: &dyn std::fmt::Debug| {
        let text = format!("{what:?} {what:#?}");
        assert!(text.contains('6') && !SECRET.iter().any(|secret| text.contains(secret)), "{text}");
        assert!(!text.contains("115,\n"), "{text}");
    };
    let mut reservation = sender.reserve(6).unwrap();
    reservation.copy_from_slice(b"secret");
    hides(&reservation);
    assert_eq!(reservation.as_ref(), b"secret");
    reservation.commit().unwrap();
    let message = receiver.receive().unwrap();
    hides(&message);
    assert_eq!(message.as_ref(), b"secret");
    let held = message.hold();
    hides(&held);
    assert_eq!(held.as_ref(), b"secret");
}

#[test]
fn a_batch_of_an_absurd_size_is_too_large() {
    let (mut sender, _receiver) = small();
    assert!(matches!(sender.try_reserve_batch([usize::MAX]), Err(Error::TooLarge { .. })));
    assert!(matches!(sender.try_reserve_batch([usize::MAX - 100, usize::MAX]), Err(Error::TooLarge { .. })));

    assert!(matches!(sender.try_send(&[]), Ok(Sent::Sent)));
}

#[test]
fn a_busy_poll_finds_messages_and_space_and_reports_the_end() {
    let (mut sender, mut receiver) = Options::new().capacity(1 << 16).threads().unwrap();
    assert!(!receiver.busy_poll().unwrap());
    assert!(sender.busy_poll(1000).unwrap());
    while sender.try_send(&[7; 1000]).unwrap() == Sent::Sent {}
    assert!(!sender.busy_poll(1000).unwrap());
    assert!(receiver.busy_poll().unwrap());
    while let Some(message) = receiver.try_receive().unwrap() {
        drop(message);
    }
    assert!(sender.busy_poll(1000).unwrap());
    assert_eq!(sender.try_send(&[7; 1000]).unwrap(), Sent::Sent);
    assert!(matches!(sender.busy_poll(1 << 16), Err(Error::TooLarge { .. })));

    // The last message comes before the end.
    drop(sender);
    assert!(receiver.busy_poll().unwrap());
    drop(receiver.try_receive().unwrap().unwrap());
    while !receiver.arm().is_err_and(|error| error.is_closed()) {}
    assert!(receiver.busy_poll().unwrap_err().is_closed());
    let (mut sender, receiver) = Options::new().threads().unwrap();
    drop(receiver);
    assert!(sender.busy_poll(8).unwrap_err().is_closed());
}

#[test]
fn a_loop_of_busy_polls_finds_every_message_of_another_thread() {
    let (mut sender, mut receiver) = Options::new().capacity(1 << 16).threads().unwrap();
    let sending = std::thread::spawn(move || {
        for number in 0..20_000u64 {
            while sender.try_send(&number.to_le_bytes()).unwrap() != Sent::Sent {
                let _ = sender.busy_poll(8).unwrap();
            }
        }
        sender.wait_released_until(deadline()).unwrap()
    });
    for number in 0..20_000u64 {
        while !receiver.busy_poll().unwrap() {
            std::thread::yield_now();
        }
        assert_eq!(*receiver.try_receive().unwrap().expect("the busy poll has found it"), number.to_le_bytes());
    }
    assert!(sending.join().unwrap());
}

/// A program sends a small message while its event loop waits for the space of a large one.
#[test]
fn a_send_does_not_take_the_wake_up_that_an_event_loop_waits_for() {
    for released_before in [5, usize::MAX] {
        let (mut sender, mut receiver) = Options::new().capacity(1 << 16).threads().unwrap();
        while sender.try_send(&[0; 1000]).unwrap() == Sent::Sent {}
        assert!(sender.arm(30_000).unwrap().is_waiting());
        // Fewer than half ring nobody.
        let mut receive = |most| (0..most).take_while(|_| receiver.try_receive().unwrap().is_some()).count();
        receive(released_before);
        assert_eq!(sender.try_send(b"small").unwrap(), Sent::Sent);
        receive(usize::MAX);
        let end = Instant::now() + Duration::from_secs(20);
        while {
            assert!(readable_until(sender.as_fd(), end), "with {released_before} released before");
            sender.arm(30_000).unwrap().is_waiting()
        } {}
    }
}
