//! A peer that finishes its handshake and then writes anything, rings continuously, sends unexpected packets, or
//! stops. Whatever it does, this side returns the right result, *corrupt*, or the peer's end, and others are served.
//! `handshake.rs` has violations of the handshake; `fuzz/` has random input for all of it.

use crate::support::raw::*;
use crate::support::*;
use pelton::{Error, Listener, Options, Receiver, Sender, Sent};
use rustix::net::{Shutdown, shutdown};
use rustix::process::Signal;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Offsets of words in the pages (spec/layout.md).
const HEAD: usize = 128;
const GENERATION_OF_PRODUCER: usize = 144;
const SLEEP_OF_PRODUCER: usize = 256;
const SLEEP_OF_RECEIVER: usize = 128;
const STATE_OF_PRODUCER: usize = 384;
const FENCED_OF_PRODUCER: u64 = 392;

/// A message of no bytes with one descriptor: the mark before it.
const WITH_A_DESCRIPTOR: u32 = 1 << 31 | 1 << 28 | 1;

/// Not a test: the entry point of a child process. Without a role it does nothing.
#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    let socket = std::path::PathBuf::from(role.get("name").trim_start_matches("unix:"));
    match role.get("role") {
        "send" => {
            let mut sender = sender(&role);
            report("connected");
            send_all(&mut sender, 0..role.number("count").unwrap(), Sizes::Every(300), How::Block).unwrap();
            sender.wait_released().unwrap();
            report("taken");
        }
        // Sends its hello, and no further packet.
        "say-hello-and-stop" => {
            let socket = raw_connect(&socket);
            raw_send(&socket, &packet(HELLO, SENDER), &[]);
            raw_receive(&socket);
            report("said hello");
            kill_self(Signal::STOP);
            read_line_from_parent();
        }
        // Finishes the handshake as a receiver, passes its socket to another process, and dies.
        "leave-the-socket" => {
            let peer = RawPeer::receiver(&socket);
            raw_send(&raw_connect(std::path::Path::new(role.get("collector"))), b"x", &[peer.socket.as_fd()]);
            read_line_from_parent();
            kill_self(Signal::KILL);
        }
        // As a user whose descriptors in flight are counted.
        "send-too-many" => {
            // SAFETY: no pointers.
            assert_eq!(unsafe { libc::setgid(65534) | libc::setuid(65534) }, 0);
            rustix::process::setrlimit(
                rustix::process::Resource::Nofile,
                rustix::process::Rlimit { current: Some(100), maximum: Some(100) },
            )
            .unwrap();
            let mut sender = Options::new().allow_uids(&[0]).connect_sender(role.get("name")).unwrap();
            // In flight elsewhere: the limit counts those of any process of this user.
            let doorbell = good_doorbell();
            let type_ = rustix::net::SocketType::SEQPACKET;
            let flags = rustix::net::SocketFlags::CLOEXEC;
            let pair = rustix::net::socketpair(rustix::net::AddressFamily::UNIX, type_, flags, None).unwrap();
            while raw_try_send(&pair.0, b"x", &[doorbell.as_fd(); 64]) {}
            let until = Instant::now() + Duration::from_millis(300);
            report(format!("{:?}", sender.send_with_descriptors_until(b"", &[doorbell.as_fd()], until)));
        }
        "try-doorbells" => try_doorbells(),
        "ring-a-full-doorbell" => ring_a_full_doorbell(),
        "receive-thousands" => receive_thousands(),
        "listen-with-little-memory" => {
            let most = Some(4 << 30);
            rustix::process::setrlimit(
                rustix::process::Resource::As,
                rustix::process::Rlimit { current: most, maximum: most },
            )
            .unwrap();
            let listener = Listener::bind(role.get("name")).unwrap();
            report("listening");
            let accepted = listener.accept_receiver_until(deadline());
            let received = accepted.and_then(|receiver| receiver.unwrap().receive().map(|message| message.to_vec()));
            report(format!("{received:?}"));
        }
        other => panic!("no role {other}"),
    }
}

fn kill_self(signal: Signal) {
    rustix::process::kill_process(rustix::process::getpid(), signal).unwrap();
}

/// A receiver that listened, and a handwritten sender.
fn with_raw_sender(dir: &TestDir) -> (Receiver, RawPeer) {
    let listener = Listener::bind(&dir.name()).unwrap();
    std::thread::scope(|scope| {
        let peer = scope.spawn(|| RawPeer::sender(&dir.socket()));
        (listener.accept_receiver_until(deadline()).unwrap().unwrap(), peer.join().unwrap())
    })
}

/// A sender that listened, and a handwritten receiver.
fn with_raw_receiver(dir: &TestDir) -> (Sender, RawPeer) {
    let listener = Options::new().capacity(CAPACITY).listen(&dir.name()).unwrap();
    std::thread::scope(|scope| {
        let peer = scope.spawn(|| RawPeer::receiver(&dir.socket()));
        (listener.accept_sender_until(deadline()).unwrap().unwrap(), peer.join().unwrap())
    })
}

/// Repeats an action while `work` runs: on three threads, so that the system hardly ever pauses all of them.
pub fn meanwhile<T>(again: impl Fn() + Sync, work: impl FnOnce() -> T) -> T {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    again();
                }
            });
        }
        // Also when the work fails, so that the scope does not wait for ever.
        struct Over<'a>(&'a AtomicBool);
        impl Drop for Over<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let _over = Over(&is_over);
        work()
    })
}

/// Replacements for a word: each of its bits flipped, and the bounds of ranges and values near them.
fn replacements(truth: u64) -> impl Iterator<Item = u64> {
    let ends = [0, 8, 1 << 31, 1 << 32, 1 << 63, CAPACITY, CAPACITY / 8, CAPACITY / 2 - 32, u32::MAX.into()];
    let concurrent = ends.into_iter().flat_map(|end| [end.wrapping_sub(1), end, end + 1]);
    (0..64).map(move |bit| truth ^ 1 << bit).chain(concurrent)
}

type State = (&'static str, fn(&RawPeer), &'static [usize]);

/// Lane states that a handwritten sender creates, and the positions of their headers.
const STATES: [State; 4] = [
    ("empty", |_| (), &[0]),
    ("full", |peer| (0..15).for_each(|i| peer.put(4096 * i, 1 + i as u32, 4088)), &[0, 4096, 4096 * 14]),
    // A message, then a jump to a position with the marks of a generation and of descriptors.
    (
        "at the wrap",
        |peer| {
            let marks = [(24, 2, 1 << 31 | 512), (32768, 2, 1 << 31 | 2 << 28 | 1), (32776, 2, WITH_A_DESCRIPTOR)];
            for (offset, seq, low) in marks.into_iter().chain([(32784, 2, 100), (32896, 3, 0)]) {
                peer.put(offset, seq, low);
            }
            peer.put(0, 1, 16);
        },
        &[0, 24, 32768, 32776, 32784],
    ),
    ("of headers alone", |peer| (0..1000).for_each(|i| peer.put(8 * i, 1 + i as u32, 0)), &[0, 8]),
];

#[test]
fn any_word_of_a_sender_in_any_state_of_the_lane_is_accepted_or_corrupt() {
    let dir = TestDir::new("any_word_of_a_sender_in_any_state_of_the_lane_is_accepted_or_corrupt");
    // All fields of its page, and some bytes between them.
    let fields = [0, 64, 72, 80, 128, 136, 144, 152, 200, 256, 264, STATE_OF_PRODUCER, 392];
    for (state, prepare, headers) in STATES {
        let of_page = fields.iter().map(|at| (0, *at, true));
        let of_data = headers.iter().flat_map(|at| [(1, *at, false), (1, *at, true)]);
        for (segment, offset, holding) in of_page.chain(of_data) {
            let mut truth = None;
            for i in 0.. {
                let (mut receiver, peer) = with_raw_sender(&dir);
                prepare(&peer);
                let word = peer.shown[segment].word(offset);
                let truth = *truth.get_or_insert_with(|| word.load(Ordering::Relaxed));
                let Some(replacement) = replacements(truth).nth(i) else { break };
                let what =
                    format!("{state}, word {offset} of segment {segment} is {replacement:#x}, holding: {holding}");
                let held = receiver.try_receive().unwrap().filter(|_| holding).map(|message| message.hold());
                word.store(replacement, Ordering::Release);
                use_receiver(&mut receiver, held, &what);
            }
        }
    }
}

#[test]
fn any_word_of_a_receiver_in_any_state_of_the_lane_is_accepted_or_corrupt() {
    let dir = TestDir::new("any_word_of_a_receiver_in_any_state_of_the_lane_is_accepted_or_corrupt");
    // In its own page the head and the words around it; in the page of all its lanes the sleep word.
    let fields = [(0, 0), (0, HEAD), (0, 136), (0, 176), (0, 256), (0, 264), (1, 0), (1, SLEEP_OF_RECEIVER), (2, 0)];
    // The number of messages sent before, and of those released.
    for (state, sent, released) in [("empty", 0, 0), ("full", 15, 0), ("at the wrap", 14, 13), ("released", 5, 5)] {
        for (segment, offset) in fields {
            let mut truth = None;
            for i in 0.. {
                let (mut sender, peer) = with_raw_receiver(&dir);
                for _ in 0..sent {
                    assert_eq!(sender.try_send(&[1; 4088]).unwrap(), Sent::Sent);
                }
                peer.shown[0].word(HEAD).store((1 + released) << 32 | (4096 * released / 8), Ordering::Release);
                let word = peer.shown[segment].word(offset);
                let truth = *truth.get_or_insert_with(|| word.load(Ordering::Relaxed));
                let Some(replacement) = replacements(truth).nth(i) else { break };
                word.store(replacement, Ordering::Release);
                use_sender(&mut sender, &format!("{state}, word {offset} of segment {segment} is {replacement:#x}"));
            }
        }
    }
}

// Descriptors.

/// In a separate process, whose descriptors no other test changes.
#[test]
fn a_doorbell_of_any_kind_is_refused_or_harmless_and_never_leaks() {
    Child::start(Role::new(child, "try-doorbells")).wait_for_success();
}

fn try_doorbells() {
    use rustix::event::{EventfdFlags, epoll, eventfd};
    use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};
    let dir = TestDir::new("a_doorbell_of_any_kind_is_refused_or_harmless_and_never_leaks");
    let directory = || OwnedFd::from(std::fs::File::open("/tmp").unwrap());
    let fifo = || {
        let path = dir.path().join("fifo");
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::from_raw_mode(0o600)).unwrap();
        let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        OwnedFd::from(file)
    };
    let this_process =
        || rustix::process::pidfd_open(rustix::process::getpid(), rustix::process::PidfdFlags::empty()).unwrap();
    let filled = || {
        let doorbell = good_doorbell();
        rustix::io::write(&doorbell, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        doorbell
    };
    type Make<'a> = &'a (dyn Fn() -> OwnedFd + Sync);
    let kinds: [(&str, Make<'_>, bool); 12] = [
        ("a directory", &directory, false),
        ("a FIFO", &fifo, false),
        ("a pipe", &a_pipe, false),
        ("a memfd", &good_data, false),
        ("a stream socket", &stream_socket, false),
        ("a socket of no pair", &seqpacket, true),
        ("an epoll", &|| epoll::create(epoll::CreateFlags::CLOEXEC).unwrap(), true),
        ("a timerfd", &|| timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC).unwrap(), true),
        ("a pidfd", &this_process, true),
        ("an eventfd that counts down", &|| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE).unwrap(), true),
        ("an eventfd that waits", &good_doorbell, true),
        ("an eventfd at its maximum", &filled, true),
    ];
    // Descriptors created once for the whole process.
    drop(with_raw_sender(&dir));
    let before = descriptors();
    for (what, make, taken) in kinds {
        let listener = Listener::bind(&dir.name()).unwrap();
        let (mut receiver, peer) = std::thread::scope(|scope| {
            let accepting =
                scope.spawn(|| listener.accept_receiver_until(deadline()).unwrap().expect("a good doorbell"));
            let peer = RawPeer::sender_with(&dir.socket(), make());
            assert_eq!(peer.is_some(), taken, "{what}");
            // The listener continues after one that it refused.
            let peer = peer.or_else(|| RawPeer::sender_with(&dir.socket(), good_doorbell()));
            (accepting.join().unwrap(), peer.expect("a good doorbell"))
        });
        // It announces a sleep until something is released.
        peer.shown[0].word(SLEEP_OF_PRODUCER).store(8 | 1, Ordering::Release);
        peer.put(0, 1, 0);
        assert_eq!(receiver.receive_until(deadline()).unwrap().unwrap().len(), 0, "{what}");
        drop(peer);
        assert!(matches!(receiver.receive_until(deadline()), Err(Error::PeerDied { .. })), "{what}");
        drop((receiver, listener));
        eventually_is(before, what, descriptors);
    }
}

/// In a separate process, which would wait for ever.
#[test]
fn a_full_blocking_doorbell_blocks_nobody() {
    Child::start(Role::new(child, "ring-a-full-doorbell")).wait_for_success();
}

fn ring_a_full_doorbell() {
    let dir = TestDir::new("a_full_blocking_doorbell_blocks_nobody");
    let _watchdog = Watchdog::new("the receiver waits in a ring");
    let mut receiver = Options::new().gather_at(&dir.name()).unwrap();
    std::thread::scope(|scope| {
        let connecting = scope.spawn(|| {
            let mut sender = Options::new().connect_deadline(deadline()).connect_sender(&dir.name()).unwrap();
            sender.send(b"served").unwrap();
            (sender, RawPeer::sender(&dir.socket()))
        });
        while !connecting.is_finished() {
            _ = receiver.receive_until(Instant::now() + Duration::from_millis(1)).unwrap();
        }
        let (mut sender, peer) = connecting.join().unwrap();
        // Like a write that finds the doorbell full.
        rustix::io::ioctl_fionbio(&peer.own_doorbell, false).unwrap();
        rustix::io::write(&peer.own_doorbell, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        peer.shown[0].word(SLEEP_OF_PRODUCER).store(8 | 1, Ordering::Release);
        for seq in 1..=100 {
            peer.put(8 * (seq - 1), seq as u32, 0);
            peer.ring();
            sender.send(b"served").unwrap();
            for _ in 0..2 {
                assert!(receiver.receive_until(deadline()).unwrap().is_some());
            }
            let epoch = (seq as u64 + 2) << 3;
            peer.shown[0].word(SLEEP_OF_PRODUCER).store(epoch | 1, Ordering::Release);
        }
    });
}

/// In a separate process, whose descriptors no other test changes.
#[test]
fn thousands_of_descriptors_fail_a_handshake_or_stay_unread_and_none_leaks() {
    Child::start(Role::new(child, "receive-thousands")).wait_for_success();
}

fn receive_thousands() {
    let dir = TestDir::new("thousands_of_descriptors_fail_a_handshake_or_stay_unread_and_none_leaks");
    drop(with_raw_sender(&dir));
    let before = descriptors();
    let doorbell = good_doorbell();
    let many = vec![doorbell.as_fd(); 64];
    let listener = Listener::bind(&dir.name()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let socket = raw_connect(&dir.socket());
            rustix::net::sockopt::set_socket_send_buffer_size(&socket, 1 << 20).unwrap();
            flood(&socket, &packet(HELLO, SENDER), &many);
            drop(socket);
        });
        let soon = Instant::now() + Duration::from_millis(300);
        assert!(listener.accept_receiver_until(soon).unwrap().is_none());
    });
    drop(listener);
    let (mut receiver, peer) = with_raw_sender(&dir);
    let sent = flood(&peer.socket, &packet(DESCRIPTORS, 0), &many);
    assert!(sent > 16, "{sent} packets of 64");
    peer.put(0, 1, 0);
    assert_eq!(receiver.receive().unwrap().descriptor_count(), 0);
    assert!(receiver.arm().unwrap().is_waiting(), "junk in the socket is no message");
    assert!(!is_readable(receiver.as_fd()));
    drop(peer);
    assert!(matches!(receiver.receive(), Err(Error::PeerDied { .. })));
    drop(receiver);
    drop(doorbell);
    eventually_is(before, "descriptors", descriptors);
}

/// Fills a socket; returns the number of packets.
fn flood(socket: &OwnedFd, bytes: &[u8], fds: &[std::os::fd::BorrowedFd<'_>]) -> usize {
    rustix::io::ioctl_fionbio(socket, true).unwrap();
    let sent = (0..).take_while(|_| raw_try_send(socket, bytes, fds)).count();
    rustix::io::ioctl_fionbio(socket, false).unwrap();
    sent
}

#[test]
fn missing_descriptors_cost_one_wait_and_not_one_for_each_message() {
    let dir = TestDir::new("missing_descriptors_cost_one_wait_and_not_one_for_each_message");
    let (mut receiver, peer) = with_raw_sender(&dir);
    // If each were waited for, the test would take an hour.
    for i in 0..3000 {
        peer.put(16 * i, 1 + i as u32, WITH_A_DESCRIPTOR);
        peer.put(16 * i + 8, 1 + i as u32, 0);
    }
    for _ in 0..1000 {
        assert_eq!(receiver.try_receive().unwrap().unwrap().descriptor_count(), 1);
    }
    for _ in 0..1000 {
        let error = receiver.try_receive().unwrap().unwrap().take_descriptors().unwrap_err();
        assert!(matches!(error, Error::Corrupt(_)), "{error}");
    }
    let mut batch = receiver.try_receive_batch().unwrap().unwrap();
    assert_eq!((0..1000).take_while(|_| batch.next().unwrap().is_some()).count(), 1000);
}

#[test]
fn endless_descriptors_of_old_messages_are_corrupt() {
    let dir = TestDir::new("endless_descriptors_of_old_messages_are_corrupt");
    let (mut receiver, peer) = with_raw_sender(&dir);
    peer.put(0, 1, WITH_A_DESCRIPTOR);
    peer.put(8, 1, 0);
    rustix::io::ioctl_fionbio(&peer.socket, true).unwrap();
    let mut old = packet(DESCRIPTORS, 0);
    old[72..76].copy_from_slice(&u32::MAX.to_le_bytes());
    flood(&peer.socket, &old, &[]);
    rustix::io::ioctl_fionbio(&peer.socket, true).unwrap();
    meanwhile(
        || {
            raw_try_send(&peer.socket, &old, &[]);
        },
        || {
            let error = receiver.receive().unwrap().take_descriptors().unwrap_err();
            assert!(matches!(error, Error::Corrupt(_)), "{error}");
        },
    );
}

#[test]
fn a_deadline_holds_with_too_many_descriptors_in_flight() {
    let dir = TestDir::new("a_deadline_holds_with_too_many_descriptors_in_flight");
    if !is_root() {
        eprintln!("SKIPPED: needs root to become a user of no others");
        return;
    }
    let listener = Options::new().allow_uids(&[65534]).listen(&dir.name()).unwrap();
    for path in [dir.path().to_owned(), dir.socket()] {
        use std::os::unix::fs::PermissionsExt as _;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
    }
    let child = Child::start(Role::new(child, "send-too-many").with("name", dir.name()));
    let _receiver = listener.accept_receiver_until(deadline()).unwrap().unwrap();
    child.expect("Ok(TimedOut)");
}

#[test]
fn an_inherited_socket_of_a_dead_receiver_does_not_block_sending_descriptors() {
    let dir = TestDir::new("an_inherited_socket_of_a_dead_receiver_does_not_block_sending_descriptors");
    let listener = Options::new().capacity(CAPACITY).listen(&dir.name()).unwrap();
    let collector_path = dir.path().join("collector");
    let collector = seqpacket();
    rustix::net::bind(&collector, &rustix::net::SocketAddrUnix::new(&collector_path).unwrap()).unwrap();
    rustix::net::listen(&collector, 1).unwrap();
    let role =
        Role::new(child, "leave-the-socket").with("name", dir.name()).with("collector", collector_path.display());
    let mut child = Child::start(role);
    let mut sender = listener.accept_sender_until(deadline()).unwrap().unwrap();
    let (_, inherited) = raw_receive(&rustix::net::accept(&collector).unwrap());
    assert_eq!(inherited.len(), 1);
    // As many as nearly fill the socket, and enough to make the sender check its peer.
    let doorbell = good_doorbell();
    for _ in 0..260 {
        sender.send_with_descriptors(b"", &[doorbell.as_fd()]).unwrap();
    }
    // Dead, and unreaped: only its pidfd proves the death.
    child.write_line("die");
    child.wait_for_state('Z');
    let error = (0..1000).find_map(|_| sender.send_with_descriptors(b"", &[doorbell.as_fd()]).err()).unwrap();
    assert!(matches!(error, Error::PeerDied { .. }), "{error}");
}

#[test]
fn a_segment_too_large_for_this_process_is_the_peers_fault() {
    let dir = TestDir::new("a_segment_too_large_for_this_process_is_the_peers_fault");
    let child = Child::start(Role::new(child, "listen-with-little-memory").with("name", dir.name()));
    child.expect("listening");
    let bytes: u64 = 16 << 30;
    let mut offer = producer_packet();
    offer[24..32].copy_from_slice(&bytes.to_le_bytes());
    let socket = raw_connect(&dir.socket());
    raw_send(&socket, &packet(HELLO, SENDER), &[]);
    raw_receive(&socket);
    let (page, doorbell, data) = (good_page(), good_doorbell(), memfd(bytes, &[], size_seals()));
    raw_send(&socket, &offer, &[page.as_fd(), doorbell.as_fd(), data.as_fd()]);
    let (answer, _) = raw_receive(&socket);
    assert!(String::from_utf8_lossy(&answer[80..]).contains("cannot be mapped"), "{answer:?}");
    let mut sender = Options::new().capacity(CAPACITY).connect_sender(&dir.name()).unwrap();
    sender.send(b"well").unwrap();
    child.expect(&format!("{:?}", pelton::Result::Ok(b"well".to_vec())));
}

// Doorbells.

#[test]
fn an_endless_doorbell_prevents_no_work_and_no_sleep_after_it_stops() {
    for how in [How::Block, How::Epoll, How::Poll] {
        let dir = TestDir::new("an_endless_doorbell_prevents_no_work_and_no_sleep_after_it_stops");
        let (mut receiver, peer) = with_raw_sender(&dir);
        rustix::io::ioctl_fionbio(&peer.doorbell, true).unwrap();
        let most = (u64::MAX - 1).to_ne_bytes();
        let ring = || {
            // To its maximum, and at once.
            let _ = rustix::io::write(&peer.doorbell, &most);
            peer.ring();
        };
        let event_loop = Loop::new(how, receiver.as_fd());
        let mut buffer = Vec::new();
        meanwhile(ring, || {
            for i in 0..200 {
                // No message: the receiver polls after each wake-up, until the deadline.
                let soon = Instant::now() + Duration::from_millis(1);
                assert_eq!(receiver.receive_into_until(&mut buffer, soon).unwrap(), None);
                peer.put(8 * i, 1 + i as u32, 0);
                if how == How::Block {
                    assert_eq!(receiver.receive_into_until(&mut buffer, deadline()).unwrap(), Some(0));
                    continue;
                }
                while receiver.try_receive_into(&mut buffer).unwrap().is_none() {
                    if receiver.arm().unwrap().is_waiting() {
                        event_loop.tick(receiver.as_fd());
                    }
                }
            }
        });
        // Quiet again: it sleeps, and wakes for a message.
        while !receiver.arm().unwrap().is_waiting() || is_readable(receiver.as_fd()) {}
        receiver.disarm();
        std::thread::scope(|scope| {
            let (thread, of_thread) = std::sync::mpsc::channel();
            let receiver = &mut receiver;
            scope.spawn(move || {
                thread.send(this_thread()).unwrap();
                assert_eq!(receiver.receive_until(deadline()).unwrap().unwrap().len(), 0);
            });
            wait_until_thread_polls(of_thread.recv().unwrap());
            peer.put(8 * 200, 201, 0);
            peer.ring();
        });
    }
}

#[test]
fn a_flooded_doorbell_of_a_path_channel_delays_no_other_sender() {
    let dir = TestDir::new("a_flooded_doorbell_of_a_path_channel_delays_no_other_sender");
    let directory = dir.path().join("c");
    let mut receiver = Options::new().capacity(CAPACITY).lanes(3).create_receiver(&directory).unwrap();
    let doorbell = std::fs::File::options().read(true).write(true).open(directory.join("receiver.bell")).unwrap();
    rustix::io::ioctl_fionbio(&doorbell, true).unwrap();
    // Space for more than one drain reads.
    rustix::pipe::fcntl_setpipe_size(&doorbell, 1 << 20).unwrap();
    let rings = vec![1; 1 << 16];
    let ring = || {
        let _ = rustix::io::write(&doorbell, &rings);
    };
    // There is no other sender: the receiver waits for one until its deadline, and no longer.
    meanwhile(ring, || assert!(!receiver.resume_until(Instant::now() + Duration::from_millis(50)).unwrap()));
    let name = format!("path:{}", directory.display());
    let children = [0, 1].map(|_| Child::start(Role::new(child, "send").with("name", &name).with("count", 2000)));
    meanwhile(ring, || {
        let mut received = 0;
        while received < 4000 {
            match receiver.receive_until(deadline()) {
                Ok(message) => received += message.map(|_| 1).expect("honest senders are served"),
                Err(error) => assert!(matches!(error, Error::Closed { .. } | Error::PeerDied { .. }), "{error}"),
            }
        }
    });
    for child in children {
        child.expect("connected");
        child.expect("taken");
    }
}

#[test]
fn a_generation_that_always_changes_blocks_nobody() {
    let dir = TestDir::new("a_generation_that_always_changes_blocks_nobody");
    let directory = dir.path().join("c");
    let options = Options::new().capacity(CAPACITY);
    let page_of = |name: &str| {
        Shown::of(std::fs::File::options().read(true).write(true).open(directory.join(name)).unwrap().into())
    };
    // A sender that holds its liveness handle, marks itself closed, and always changes its identity.
    let sender = options.create_sender(&directory).unwrap();
    let page = page_of("0.producer");
    let change = || {
        page.word(GENERATION_OF_PRODUCER).fetch_add(1, Ordering::Release);
        page.word(STATE_OF_PRODUCER).store(2, Ordering::Release);
    };
    meanwhile(change, || {
        let mut receiver = options.cast().open_receiver(&directory).unwrap();
        for _ in 0..100 {
            let _ = (allowed(receiver.arm(), "arm"), allowed(receiver.try_receive(), "try_receive"));
            let _ = allowed(receiver.receive_until(Instant::now() + Duration::from_millis(1)), "receive_until");
            let _ = allowed(receiver.resume_until(Instant::now()), "resume_until");
        }
    });
    drop((sender, page));
    // And a receiver.
    let receiver = options.cast().open_receiver(&directory).unwrap();
    let page = page_of("0.consumer");
    let change = || {
        page.word(176).fetch_add(1, Ordering::Release);
        page.word(256).store(2, Ordering::Release);
    };
    meanwhile(change, || {
        let mut sender = options.cast().open_sender(&directory).unwrap();
        for _ in 0..100 {
            let _ = (allowed(sender.arm(30_000), "arm"), allowed(sender.try_send(&[0; 30_000]), "try_send"));
            let _ =
                allowed(sender.wait_released_until(Instant::now() + Duration::from_millis(1)), "wait_released_until");
            let _ = allowed(sender.resume_until(Instant::now()), "resume_until");
        }
    });
    drop(receiver);
}

#[test]
fn any_word_of_a_path_channels_pages_is_used_or_refused_by_a_successor() {
    let dir = TestDir::new("any_word_of_a_path_channels_pages_is_used_or_refused_by_a_successor");
    let directory = dir.path().join("c");
    let options = Options::new().capacity(CAPACITY);
    // All fields of the pages in which successors continue.
    let producer = (0..65).map(|i| ("0.producer", 8 * i)).filter(|(_, at)| *at < 24 || *at >= 64 && *at < 400);
    let consumer = (0..34).map(|i| ("0.consumer", 8 * i)).filter(|(_, at)| *at < 24 || *at >= 128);
    let others = [("receiver", 0), ("receiver", SLEEP_OF_RECEIVER), ("channel", 64), ("channel", 80), ("channel", 128)];
    for (file, at) in producer.chain(consumer).chain(others) {
        for replacement in [0, 1, 7, u32::MAX.into(), 1 << 31, 1 << 63, u64::MAX - 7, u64::MAX - 1, u64::MAX] {
            let what = format!("word {at} of {file} is {replacement:#x}");
            let mut sender = options.create_sender(&directory).unwrap();
            sender.send(&[1; 100]).unwrap();
            drop(sender);
            let page = std::fs::File::options().read(true).write(true).open(directory.join(file)).unwrap();
            Shown::of(page.into()).word(at).store(replacement, Ordering::Release);
            let usable = |error: Error| match error {
                Error::Corrupt(_) | Error::NotAChannel { .. } | Error::Rebooted { .. } => {}
                error => panic!("{what}: {error}"),
            };
            let _ = pelton::inspect::info(&directory).map_err(usable);
            let _ = pelton::inspect::check(&directory, true).map_err(usable);
            let receiver = options.cast().open_receiver(&directory).map_err(usable);
            let sender = options.cast().open_sender(&directory).map_err(usable);
            let (mut receiver, mut sender) = (receiver.ok(), sender.ok());
            if let Some(sender) = &mut sender {
                use_sender(sender, &what);
            }
            if let Some(receiver) = &mut receiver {
                use_receiver(receiver, None, &what);
            }
            drop((receiver, sender));
            let _ = pelton::inspect::recover(&directory, false).map_err(usable);
            std::fs::remove_dir_all(&directory).unwrap();
        }
    }
}

// Others, and later ones.

#[test]
fn sleep_words_that_always_change_cost_only_rings() {
    let dir = TestDir::new("sleep_words_that_always_change_cost_only_rings");
    let (mut sender, peer) = with_raw_receiver(&dir);
    // Asleep in another epoch each time, or closed for a moment, or asking for fences; and it takes everything at
    // once.
    let epoch = std::sync::atomic::AtomicU64::new(8);
    let flags = [1, 3, 0, 2];
    meanwhile(
        || {
            let now = epoch.fetch_add(8, Ordering::Relaxed);
            peer.shown[1].word(SLEEP_OF_RECEIVER).store(now | flags[now as usize / 8 % 4], Ordering::Release);
        },
        || {
            while sender.try_send(&[0; 8]).unwrap() == Sent::Sent {}
            assert_eq!(sender.send_until(&[0; 8], Instant::now() + Duration::from_millis(10)).unwrap(), Sent::TimedOut);
        },
    );
    drop((sender, peer));
    // And a sender's, while messages are released one by one.
    let (mut receiver, peer) = with_raw_sender(&dir);
    let mut buffer = Vec::new();
    meanwhile(
        || {
            let now = epoch.fetch_add(8, Ordering::Relaxed);
            peer.shown[0].word(SLEEP_OF_PRODUCER).store(now | flags[now as usize / 8 % 4], Ordering::Release);
            peer.shown[0].word(SLEEP_OF_PRODUCER + 8).store(now, Ordering::Release);
        },
        || {
            for i in 0..4000 {
                peer.put(8 * i, 1 + i as u32, 0);
                assert_eq!(receiver.receive_into(&mut buffer).unwrap(), 0);
            }
        },
    );
}

#[test]
fn a_half_closed_socket_is_the_peers_end() {
    for how in [Shutdown::Read, Shutdown::Write, Shutdown::Both] {
        let dir = TestDir::new("a_half_closed_socket_is_the_peers_end");
        let (mut receiver, peer) = with_raw_sender(&dir);
        peer.put(0, 1, 0);
        shutdown(&peer.socket, how).unwrap();
        assert_eq!(receiver.receive_until(deadline()).unwrap().unwrap().len(), 0);
        // A peer that has shut down its reading side may still send.
        if how == Shutdown::Read {
            peer.put(8, 2, 0);
            assert_eq!(receiver.receive_until(deadline()).unwrap().unwrap().len(), 0);
            drop(peer);
        }
        let error = receiver.receive_until(deadline()).unwrap_err();
        assert!(matches!(error, Error::PeerDied { .. }), "{how:?}: {error}");
    }
}

#[test]
fn a_peer_stopped_during_its_handshake_does_not_block_the_next_one() {
    let dir = TestDir::new("a_peer_stopped_during_its_handshake_does_not_block_the_next_one");
    let listener = Listener::bind(&dir.name()).unwrap();
    std::thread::scope(|scope| {
        let accepting = scope.spawn(|| listener.accept_receiver_until(deadline()));
        let stopped = Child::start(Role::new(child, "say-hello-and-stop").with("name", dir.name()));
        stopped.expect("said hello");
        stopped.wait_for_state('T');
        let child = Child::start(Role::new(child, "send").with("name", dir.name()).with("count", 10));
        let mut receiver = accepting.join().unwrap().unwrap().unwrap();
        assert_eq!(receiver.peer().unwrap().pid, child.pid());
        assert_eq!(receive_all(&mut receiver, 0, 10, Sizes::Every(300), How::Block).0, 10);
        stopped.signal(Signal::CONT);
    });
}

#[test]
fn a_successor_that_leaves_before_it_is_ready_leaves_nothing_it_wrote() {
    // An impossible head, and one that claims that everything has been taken.
    for replacement in [u64::MAX, 11 << 32] {
        successor_writes_and_leaves(replacement);
    }
}

fn successor_writes_and_leaves(replacement: u64) {
    let dir = TestDir::new("a_successor_that_leaves_before_it_is_ready_leaves_nothing_it_wrote");
    let (mut sender, peer) = with_raw_receiver(&dir);
    for number in 0..10 {
        sender.send(&[number; 100]).unwrap();
    }
    drop(peer);
    assert!(matches!(sender.wait_released_until(deadline()), Err(Error::PeerDied { unreleased: 10 })));
    std::thread::scope(|scope| {
        // One that leaves, and then a valid one, the first that the sender accepts as a successor.
        let receiver = scope.spawn(|| {
            // It asks for fences; the sender complies when it reads the peer's page.
            let (peer, page) = RawPeer::receiver_but_for_ready(&dir.socket(), 2);
            let (mut fenced, until) = ([0; 4], deadline());
            while fenced == [0; 4] {
                rustix::io::pread(&page, &mut fenced, FENCED_OF_PRODUCER).unwrap();
                assert!(Instant::now() < until, "the sender does not poll");
            }
            peer.shown[0].word(HEAD).store(replacement, Ordering::Release);
            drop((peer, page));
            Options::new().connect_deadline(deadline()).connect_receiver(&dir.name())
        });
        assert!(sender.resume_until(deadline()).unwrap());
        let mut receiver = receiver.join().unwrap().unwrap();
        for number in 0..10 {
            let message = receiver.receive_until(deadline()).unwrap().unwrap();
            assert!(message.is_redelivered() && message[..] == [number; 100]);
        }
    });
}
