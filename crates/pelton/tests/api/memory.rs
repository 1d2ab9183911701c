//! The memory that a peer can make a side use: the limits that the sides exchange, and the budget of an endpoint with
//! many peers.

use crate::support::raw::*;
use crate::support::*;
use pelton::{Client, Error, Listener, Options, Outcome, Receiver, Responder, Sender, Service};
use std::time::{Duration, Instant};

#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    match role.get("role") {
        // As another user.
        "stranger" => {
            // SAFETY: no pointers.
            assert_eq!(unsafe { libc::setgid(65_532) | libc::setuid(65_532) }, 0);
            let options = Options::new().allow_uids(&[0]).connect_deadline(deadline());
            let sender = options.connect_sender(role.get("name")).unwrap();
            report(format!("{} {}", sender.capacity(), sender.message_bytes_max()));
            read_line_from_parent();
        }
        "receiver" => {
            let _receiver = Receiver::connect(role.get("name")).unwrap();
            report("connected");
            read_line_from_parent();
        }
        other => panic!("{other}"),
    }
}

/// A sender that connects with these options to a receiver that listens with those.
fn connected(dir: &TestDir, sender: &Options, receiver: &Options) -> (pelton::Result<Sender>, Option<Receiver>) {
    let listener = receiver.cast().listen(&dir.name()).unwrap();
    // A sender tries again after a hang-up.
    let sender = sender.clone().connect_deadline(deadline());
    std::thread::scope(|scope| {
        let connecting = scope.spawn(|| sender.cast().connect_sender(&dir.name()));
        let mut accepted = None;
        while !connecting.is_finished() {
            accepted = accepted.or(listener.accept_receiver_until(Instant::now() + Duration::from_millis(1)).unwrap());
        }
        (connecting.join().unwrap(), accepted)
    })
}

#[test]
fn a_lane_is_as_large_as_both_sides_allow() {
    let dir = TestDir::new("a_lane_is_as_large_as_both_sides_allow");
    const KIB: u64 = 1024;
    let of = |capacity: u64, message: u64| {
        let options = if capacity == 0 { Options::new() } else { Options::new().capacity(capacity) };
        if message == 0 { options } else { options.message_bytes_max(message) }
    };
    for (sender, receiver, wanted) in [
        (of(0, 0), of(0, 0), (64 << 20, (32 << 20) - 32)),
        (of(0, 0), of(128 * KIB, 0), (128 * KIB, 64 * KIB - 32)),
        (of(256 * KIB, 0), of(1 << 30, 0), (256 * KIB, 128 * KIB - 32)),
        (of(256 * KIB, 1000), of(1 << 30, 2000), (256 * KIB, 1000)),
        (of(256 * KIB, 0), of(0, 2000), (256 * KIB, 2000)),
        (of(0, 0), of(0, 0).memory(100_000), (64 * KIB, 32 * KIB - 32)),
        (of(0, 0), of(0, 0).memory(5000), (4096, 2016)),
    ] {
        let (connected, accepted) = connected(&dir, &sender, &receiver);
        let mut connected = connected.unwrap();
        assert_eq!((connected.capacity(), connected.message_bytes_max()), wanted, "{sender:?} {receiver:?}");
        let largest = vec![7; wanted.1 as usize];
        connected.send(&largest).unwrap();
        assert!(matches!(connected.send(&vec![7; largest.len() + 1]), Err(Error::TooLarge { .. })));
        assert_eq!(&*accepted.unwrap().receive().unwrap(), largest);
    }
}

#[test]
fn a_message_limit_above_the_peers_is_an_error_with_both_sizes() {
    let dir = TestDir::new("a_message_limit_above_the_peers");
    for receiver in [Options::new().message_bytes_max(1000), Options::new().capacity(1 << 16).message_bytes_max(1000)] {
        let (sender, accepted) = connected(&dir, &Options::new().message_bytes_max(5000), &receiver);
        let error = sender.unwrap_err();
        assert!(matches!(error, Error::Option { option: "message_bytes_max", found: 5000, .. }), "{error}");
        assert!(error.to_string().contains("at most 1000"), "{error}");
        assert!(accepted.is_none());
    }
}

#[test]
fn a_lane_larger_than_announced_is_refused_before_it_is_mapped() {
    let dir = TestDir::new("a_lane_larger_than_announced_is_refused_before_it_is_mapped");
    let listener = Options::new().capacity(1 << 16).message_bytes_max(100).listen(&dir.name()).unwrap();
    let producer = |capacity: u64, limit: u64| {
        let mut packet = producer_packet();
        packet[24..32].copy_from_slice(&capacity.to_le_bytes());
        packet[32..40].copy_from_slice(&limit.to_le_bytes());
        packet
    };
    for (capacity, limit, figures) in
        [(1 << 30, 100, ["1073741824 bytes", "takes 65536"]), (1 << 16, 101, ["messages of 101", "takes 100"])]
    {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let socket = raw_connect(&dir.socket());
                raw_send(&socket, &packet(HELLO, SENDER), &[]);
                let (hello, _) = raw_receive(&socket);
                let said = |at: usize| u64::from_le_bytes(hello[at..at + 8].try_into().unwrap());
                assert_eq!((said(24), said(32)), (1 << 16, 100));
                let (page, doorbell, data) = (good_page(), good_doorbell(), memfd(capacity, &[], size_seals()));
                let fds = [&page, &doorbell, &data].map(std::os::fd::AsFd::as_fd);
                raw_send(&socket, &producer(capacity, limit), &fds);
                let (refused, _) = raw_receive(&socket);
                let text = String::from_utf8_lossy(&refused[80..]).into_owned();
                assert!(kind_of(&refused) == REFUSED && figures.iter().all(|figure| text.contains(figure)), "{text}");
            });
            let soon = Instant::now() + Duration::from_millis(300);
            assert!(listener.accept_receiver_until(soon).unwrap().is_none());
        });
    }
}

#[test]
fn a_surviving_senders_lane_is_refused_if_it_exceeds_the_successors_limit() {
    let dir = TestDir::new("a_surviving_senders_lane_is_refused_if_it_exceeds_the_successors_limit");
    let listener = Listener::bind(&dir.name()).unwrap();
    let child = Child::start(Role::new(child, "receiver").with("name", dir.name()));
    let mut sender = listener.accept_sender_until(deadline()).unwrap().unwrap();
    sender.send(b"kept").unwrap();
    child.expect("connected");
    child.kill();
    eventually("the receiver's death is detected", || sender.try_send(b"x").is_err());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let error = Options::new().capacity(1 << 20).connect_receiver(&dir.name()).unwrap_err().to_string();
            assert!(error.contains("67108864 bytes") && error.contains("takes 1048576"), "{error}");
            let mut receiver = Options::new().connect_deadline(deadline()).connect_receiver(&dir.name()).unwrap();
            assert_eq!(&*receiver.receive().unwrap(), b"kept");
        });
        assert!(sender.resume_until(deadline()).unwrap());
    });
}

/// Receives until the other thread has finished its part.
fn receive_while<T: Send>(receiver: &mut Receiver, other: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let other = scope.spawn(other);
        while !other.is_finished() {
            _ = receiver.receive_until(Instant::now() + Duration::from_millis(1)).unwrap();
        }
        other.join().unwrap()
    })
}

#[test]
fn another_user_is_offered_less() {
    let dir = TestDir::new("another_user_is_offered_less");
    if !is_root() {
        eprintln!("SKIPPED: needs root to become another user");
        return;
    }
    for (options, wanted) in [
        (Options::new(), format!("{} {}", 64 << 20, 1 << 20)),
        (Options::new().capacity(128 << 20).message_bytes_max(10 << 20), format!("{} {}", 64 << 20, 10 << 20)),
    ] {
        let mut receiver = options.allow_uids(&[65_532]).gather_at(&dir.name()).unwrap();
        for path in [dir.path().to_owned(), dir.socket()] {
            use std::os::unix::fs::PermissionsExt as _;
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
        }
        let mut stranger = Child::start(Role::new(child, "stranger").with("name", dir.name()));
        let of_child = &mut stranger;
        receive_while(&mut receiver, move || of_child.expect(&wanted));
        stranger.write_line("end");
        receive_while(&mut receiver, move || stranger.wait_for_success());
    }
}

#[test]
fn senders_share_a_memory_budget_and_return_their_share_when_they_leave() {
    let dir = TestDir::new("senders_share_a_memory_budget_and_return_their_share_when_they_leave");
    const MEMORY: u64 = 4 << 20;
    let mut receiver = Options::new().memory(MEMORY).gather_at(&dir.name()).unwrap();
    let name = dir.name();
    for round in 0..3 {
        let connect = || {
            let mut senders = Vec::new();
            loop {
                match Options::new().connect_sender(&name) {
                    Ok(sender) => senders.push(sender),
                    Err(error) => return (senders, error),
                }
            }
        };
        let (mut senders, error) = receive_while(&mut receiver, connect);
        let text = error.to_string();
        assert!(matches!(error, Error::Refused(_)) && text.contains("of the 4194304 bytes of memory"), "{text}");
        let sizes: Vec<u64> = senders.iter().map(Sender::capacity).collect();
        assert_eq!(sizes[0], MEMORY / 16, "round {round}");
        assert!(sizes.is_sorted_by(|one, next| one >= next) && sizes.iter().all(|size| *size >= 1 << 16), "{sizes:?}");
        assert!(sizes.len() > 16 && sizes.iter().sum::<u64>() <= MEMORY, "{sizes:?}");
        // The members continue, and all memory is returned when they have left.
        senders.iter_mut().for_each(|sender| sender.send(b"x").unwrap());
        let mut left = senders.len();
        drop(senders);
        while left > 0 {
            left -= usize::from(receiver.receive_until(deadline()).unwrap().is_some());
        }
        _ = receiver.receive_until(Instant::now() + Duration::from_millis(100)).unwrap();
    }
}

/// Stops a service at the end of the test, even if it fails.
struct Stops(pelton::Stopper);

impl Drop for Stops {
    fn drop(&mut self) {
        self.0.stop();
    }
}

#[test]
fn a_budget_too_small_for_one_sender_is_an_error_at_once() {
    let dir = TestDir::new("a_budget_too_small_for_one_sender_is_an_error_at_once");
    let error = Options::new().memory((1 << 20) - 1).gather_at(&dir.name()).unwrap_err();
    assert!(matches!(error, Error::Option { option: "memory", found: 1_048_575, .. }), "{error}");
    let error = Service::listen_with(&dir.name(), &Options::new().memory((2 << 20) - 1)).unwrap_err();
    assert!(matches!(error, Error::Option { option: "memory", found: 2_097_151, .. }), "{error}");
}

/// A service on a thread of its own that replies with as many bytes as the request wants, or fails with the library's
/// error.
fn serving<T: Send>(options: &Options, dir: &TestDir, test: impl FnOnce(&mut Client) -> T + Send) -> (T, Vec<String>) {
    let mut service: Service = Service::listen_with(&dir.name(), &options.cast()).unwrap();
    let stopper = service.stopper();
    std::thread::scope(|scope| {
        let testing = scope.spawn(|| {
            let _stops = Stops(stopper);
            let mut client =
                Client::connect_with(&dir.name(), &Options::new().capacity(1 << 16).connect_deadline(deadline()))
                    .unwrap();
            test(&mut client)
        });
        let mut errors = Vec::new();
        while let Ok(request) = service.receive() {
            let bytes = request.len();
            let wanted = match bytes {
                8 => u64::from_le_bytes(request.as_ref().try_into().unwrap()) as usize,
                bytes => bytes,
            };
            if let Err(error) = request.into_responder().reply(&vec![7; wanted]) {
                errors.push(error.to_string());
            }
        }
        (testing.join().unwrap(), errors)
    })
}

#[test]
fn unread_replies_are_kept_up_to_the_limit_and_fail_beyond_it() {
    let dir = TestDir::new("unread_replies_are_kept_up_to_the_limit");
    let options = Options::new().capacity(1 << 16).memory(10 << 20);
    let (outcomes, errors) = serving(&options, &dir, |client| {
        // Each of a mebibyte; the client sends all requests before it reads a reply.
        let calls: Vec<_> = (0..60).map(|_| client.submit(&(1u64 << 20).to_le_bytes()).unwrap()).collect();
        let another = Client::connect_with(&dir.name(), &Options::new());
        let mut outcomes = Vec::new();
        for _ in &calls {
            let completion = client.completion_until(deadline()).unwrap().expect("it hangs");
            let text = String::from_utf8_lossy(completion.as_ref()).into_owned();
            outcomes.push((completion.outcome(), text.len(), text));
        }
        // A small one is answered as before, for that client and another.
        for client in [client, &mut another.unwrap()] {
            assert_eq!(client.call_until(&100u64.to_le_bytes(), deadline()).unwrap().unwrap().len(), 100);
        }
        outcomes
    });
    let (kept, failed): (Vec<_>, Vec<_>) = outcomes.iter().partition(|(outcome, ..)| *outcome == Outcome::Reply);
    assert!(kept.iter().all(|(_, bytes, _)| *bytes == 1 << 20));
    assert!(failed.iter().all(|(outcome, _, text)| {
        *outcome == Outcome::Failed(0xffff_0001) && text.contains("of the 10485760 bytes of memory")
    }));
    assert_eq!(errors.len(), failed.len());
}

/// Takes requests until the other thread has finished its part, and passes them to `keep`.
fn serve_while<T: Send>(
    service: &mut Service,
    mut keep: impl FnMut(Vec<u8>, Responder),
    other: impl FnOnce() -> T + Send,
) -> T {
    std::thread::scope(|scope| {
        let other = scope.spawn(other);
        while !other.is_finished() {
            if let Some(request) = service.receive_until(Instant::now() + Duration::from_millis(1)).unwrap() {
                let (bytes, responder) = request.into_parts();
                keep(bytes, responder);
            }
        }
        other.join().unwrap()
    })
}

#[test]
fn a_client_that_does_not_read_leaves_others_their_share_of_the_memory() {
    let dir = TestDir::new("a_client_that_does_not_read_leaves_others_their_share_of_the_memory");
    const MIB: usize = 1 << 20;
    const MEMORY: usize = 64 * MIB;
    const CALLS: usize = 70;
    // The memory of the clients' lanes and of their content.
    const SLACK: usize = 2 * MIB;
    let options = Options::new().capacity(1 << 16).memory(MEMORY as u64);
    let mut service = Service::listen_with(&dir.name(), &options).unwrap();
    let mut requested: [Vec<Responder>; 3] = Default::default();
    let keep = |bytes: Vec<u8>, responder| requested[usize::from(bytes[0])].push(responder);
    let clients = serve_while(&mut service, keep, || {
        [0u8, 1, 2].map(|number| {
            let options = Options::new().capacity(1 << 16).connect_deadline(deadline());
            let mut client = Client::connect_with(&dir.name(), &options).unwrap();
            (0..CALLS).for_each(|_| _ = client.submit(&[number]).unwrap());
            client
        })
    });
    while requested.iter().any(|of_one| of_one.len() < CALLS) {
        let (bytes, responder) = service.receive_until(deadline()).unwrap().expect("a request is missing").into_parts();
        requested[usize::from(bytes[0])].push(responder);
    }
    // No client reads. A further client with its full share leaves as much as it has.
    let mut reply_until_full = |number: usize, bytes: usize| {
        let mut kept = 0;
        loop {
            match requested[number].pop().expect("no reply failed").reply(&vec![7; bytes]) {
                Ok(()) => kept += bytes,
                Err(error @ Error::Memory { left, most, .. }) => {
                    let text = error.to_string();
                    assert!(left < bytes as u64 && most == MEMORY as u64, "{text}");
                    assert!(text.contains(&format!("{left} more of the {most} bytes of memory")), "{text}");
                    return kept;
                }
                Err(error) => panic!("{error}"),
            }
        }
    };
    let mut left = MEMORY;
    for number in 0..3 {
        let kept = reply_until_full(number, MIB);
        assert!((left / 2 - SLACK..=left / 2 + SLACK).contains(&kept), "client {number} of {left}: {kept}");
        left -= kept;
    }
    // All of it is returned when they read.
    drop(requested);
    let read = move || {
        clients.map(|mut client| {
            let next = |_| client.completion_until(deadline()).unwrap().expect("it hangs").outcome();
            let outcomes: Vec<Outcome> = (0..CALLS).map(next).collect();
            (client, outcomes.iter().filter(|outcome| **outcome == Outcome::Failed(0xffff_0001)).count())
        })
    };
    let clients = serve_while(&mut service, |_, _| panic!("no request is expected"), read);
    for (mut client, failed) in clients {
        assert_eq!(failed, 1);
        let again = |bytes: Vec<u8>, responder: Responder| responder.reply(&bytes).unwrap();
        let call = || client.call_until(&vec![7; MEMORY / 4], deadline()).unwrap().expect("it hangs").len();
        assert_eq!(serve_while(&mut service, again, call), MEMORY / 4);
    }
}

#[test]
fn requests_in_pieces_beyond_the_limit_fail_and_the_link_continues() {
    let dir = TestDir::new("requests_in_pieces_beyond_the_limit_fail_and_the_link_continues");
    let options = Options::new().capacity(1 << 16).memory(3 << 20).call_bytes_max(64 << 20);
    let ((), errors) = serving(&options, &dir, |client| {
        for _ in 0..3 {
            let completion = client.call_until(&vec![7; 5 << 20], deadline()).unwrap().expect("it hangs");
            let text = String::from_utf8_lossy(completion.as_ref()).into_owned();
            assert_eq!(completion.outcome(), Outcome::Failed(0xffff_0001));
            assert!(text.contains("of the 3145728 bytes of memory"), "{text}");
            drop(completion);
            assert_eq!(client.call_until(&vec![7; 1 << 20], deadline()).unwrap().unwrap().len(), 1 << 20);
        }
    });
    assert_eq!(errors, Vec::<String>::new());
}

#[test]
fn a_path_channel_beyond_the_receivers_limit_is_refused_unchanged() {
    let dir = TestDir::new("a_path_channel_beyond_the_receivers_limit_is_refused");
    let path = dir.path().join("channel");
    let mut sender = Options::new().capacity(1 << 20).lanes(4).create_sender(&path).unwrap();
    sender.send(b"kept").unwrap();
    for memory in [1 << 19, (4 << 20) - 1] {
        let error = Options::new().memory(memory).open_receiver(&path).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::NotAChannel { .. }) && text.contains("4 lanes of 1048576 bytes"), "{text}");
    }
    let mut receiver = Options::new().memory(4 << 20).open_receiver(&path).unwrap();
    assert_eq!(&*receiver.receive().unwrap(), b"kept");
}
