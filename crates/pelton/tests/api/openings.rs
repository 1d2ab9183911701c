//! Opening without waiting: one thread, its event loop, and a peer that comes late, never, or does not follow the
//! protocol.

use crate::support::raw::*;
use crate::support::*;
use pelton::{Client, Error, Listener, Opening, Options, Receiver, Result, Resuming, Sender, Service};
use rustix::net::{SocketAddrUnix, accept, bind, listen};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Not a test: the entry point of a child process. Without a role it does nothing.
#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    let path = role.get("path").to_owned();
    match role.get("role") {
        "half a handshake" => {
            let listener = raw_listen(Path::new(&path));
            report("listening");
            let _connection = after_half_a_handshake(&listener);
            report("silent");
            read_line_from_parent();
        }
        "receiver" => {
            let _receiver = Options::new().open_receiver(path).unwrap();
            report("open");
            read_line_from_parent();
        }
        "drops" => drop_in_the_middle(Path::new(&path)),
        "short name" => services_of_a_short_name(),
        other => panic!("no role {other}"),
    }
}

/// Continues an opening as an event loop does, until it ends.
pub fn finish<T>(opening: &mut Opening<T>) -> Result<T> {
    loop {
        readable(opening.as_fd());
        if let Some(opened) = opening.try_finish()? {
            return Ok(opened);
        }
    }
}

/// Continues it until it waits for its peer: its descriptor is silent then.
fn settle<T: std::fmt::Debug>(opening: &mut Opening<T>) {
    while is_readable(opening.as_fd()) {
        let early = opening.try_finish().unwrap();
        assert!(early.is_none(), "{early:?}");
    }
}

fn raw_listen(path: &Path) -> OwnedFd {
    let listener = seqpacket();
    bind(&listener, &SocketAddrUnix::new(path).unwrap()).unwrap();
    listen(&listener, 16).unwrap();
    listener
}

/// Accepts a sender, and sends a receiver's first packet, but no other.
fn after_half_a_handshake(listener: &OwnedFd) -> OwnedFd {
    readable(listener.as_fd());
    let connection = accept(listener).unwrap();
    assert_eq!(kind_of(&raw_receive(&connection).0), HELLO);
    raw_send(&connection, &packet(HELLO, RECEIVER), &[]);
    connection
}

fn soon() -> Instant {
    Instant::now() + Duration::from_millis(30)
}

fn exchange(sender: &mut Sender, receiver: &mut Receiver) {
    sender.send(b"hello").unwrap();
    assert_eq!(&*receiver.receive_until(deadline()).unwrap().unwrap(), b"hello");
}

#[test]
fn a_sender_and_a_receiver_connect_from_a_loop() {
    let dir = TestDir::new("a_sender_and_a_receiver_connect_from_a_loop");
    let listener = Listener::bind(&dir.name()).unwrap();
    let accepting = listener.clone();
    let accepted = std::thread::spawn(move || accepting.accept_receiver().unwrap());
    let mut sender = finish(&mut Options::new().start_connect_sender(&dir.name()).unwrap()).unwrap();
    exchange(&mut sender, &mut accepted.join().unwrap());
    let accepted = std::thread::spawn(move || listener.accept_sender().unwrap());
    let mut receiver = finish(&mut Options::new().start_connect_receiver(&dir.name()).unwrap()).unwrap();
    exchange(&mut accepted.join().unwrap(), &mut receiver);
}

#[test]
fn both_endpoints_of_one_thread_connect_and_accept() {
    let dir = TestDir::new("both_endpoints_of_one_thread_connect_and_accept");
    let listener = Listener::bind(&dir.name()).unwrap();
    let mut accepting = listener.start_accept_receiver().unwrap();
    settle(&mut accepting);
    let mut connecting = Options::new().start_connect_sender(&dir.name()).unwrap();
    let (mut sender, mut receiver) = alternate(&mut connecting, &mut accepting);
    exchange(&mut sender, &mut receiver);
    assert!(!is_readable(accepting.as_fd()), "what comes later is the receiver's");
    assert!(matches!(accepting.try_finish(), Err(Error::Refused(_))), "it has ended");
    let mut accepting = listener.start_accept_sender().unwrap();
    let mut connecting = Options::new().start_connect_receiver(&dir.name()).unwrap();
    let (mut receiver, mut sender) = alternate(&mut connecting, &mut accepting);
    exchange(&mut sender, &mut receiver);
}

/// Continues both by turns, until both have ended.
fn alternate<A, B>(first: &mut Opening<A>, second: &mut Opening<B>) -> (A, B) {
    let (mut of_first, mut of_second) = (None, None);
    loop {
        if of_first.is_none() {
            of_first = first.try_finish().unwrap();
        }
        if of_second.is_none() {
            of_second = second.try_finish().unwrap();
        }
        if of_first.is_some() && of_second.is_some() {
            return of_first.zip(of_second).unwrap();
        }
    }
}

#[test]
fn an_accept_in_a_loop_sleeps_beside_silent_peers_and_half_handshakes() {
    let dir = TestDir::new("an_accept_in_a_loop_sleeps_beside_silent_peers_and_half_handshakes");
    let listener = Listener::bind(&dir.name()).unwrap();
    let mut accepting = listener.start_accept_receiver().unwrap();
    let silent = raw_connect(&dir.socket());
    settle(&mut accepting);
    // One that has begun a handshake, and says no more: another one that has said something waits behind it.
    let half = raw_connect(&dir.socket());
    raw_send(&half, &packet(HELLO, SENDER), &[]);
    settle(&mut accepting);
    let mut connecting = Options::new().start_connect_sender(&dir.name()).unwrap();
    settle(&mut connecting);
    settle(&mut accepting);
    drop(half);
    let (mut sender, mut receiver) = alternate(&mut connecting, &mut accepting);
    exchange(&mut sender, &mut receiver);
    drop(silent);
}

#[test]
fn a_peer_that_came_before_an_accept_was_dropped_is_accepted_by_the_next_one() {
    let dir = TestDir::new("a_peer_that_came_before_an_accept_was_dropped_is_accepted_by_the_next_one");
    let listener = Listener::bind(&dir.name()).unwrap();
    let silent = raw_connect(&dir.socket());
    let mut accepting = listener.start_accept_receiver().unwrap();
    settle(&mut accepting);
    drop(accepting);
    // It has connected, and was accepted, and says something only now.
    raw_send(&silent, &packet(HELLO, RECEIVER), &[]);
    let mut accepting = listener.start_accept_sender().unwrap();
    settle(&mut accepting);
    let (bytes, _) = raw_receive(&silent);
    assert_eq!(kind_of(&bytes), HELLO, "its handshake goes on");
}

#[test]
fn a_peer_of_a_dropped_accept_is_accepted_by_a_thread_that_waits_already() {
    let dir = TestDir::new("a_peer_of_a_dropped_accept_is_accepted_by_a_thread_that_waits_already");
    let listener = Listener::bind(&dir.name()).unwrap();
    // On one processor, a thread of SCHED_BATCH that wakes interrupts no other: this one accepts first.
    let everywhere = pelton_testkit::kernel::pin(0);
    let waiting = listener.clone();
    let (thread_sender, of_thread) = std::sync::mpsc::channel();
    let accepted = std::thread::spawn(move || {
        thread_sender.send(this_thread()).unwrap();
        let priority = libc::sched_param { sched_priority: 0 };
        // SAFETY: the struct lives across the call, which affects this thread only.
        assert_eq!(unsafe { libc::sched_setscheduler(0, libc::SCHED_BATCH, &priority) }, 0);
        waiting.accept_sender().unwrap()
    });
    let thread = of_thread.recv().unwrap();
    for _ in 0..5 {
        wait_until_thread_polls(thread);
        let mut accepting = listener.start_accept_sender().unwrap();
        let peer = raw_connect(&dir.socket());
        assert!(accepting.try_finish().unwrap().is_none());
        drop(accepting);
        raw_send(&peer, &packet(HELLO, RECEIVER), &[]);
        assert_eq!(kind_of(&raw_receive(&peer).0), HELLO, "its handshake goes on");
    }
    let mut receiver = Receiver::connect(&dir.name()).unwrap();
    exchange(&mut accepted.join().unwrap(), &mut receiver);
    rustix::thread::sched_setaffinity(None, &everywhere).unwrap();
}

#[test]
fn an_opening_ends_once_and_its_sender_resumes_by_the_name() {
    let dir = TestDir::new("an_opening_ends_once_and_its_sender_resumes_by_the_name");
    let listener = Listener::bind(&dir.name()).unwrap();
    let accept = |listener: &Listener| {
        let listener = listener.clone();
        std::thread::spawn(move || listener.accept_receiver().unwrap())
    };
    let accepted = accept(&listener);
    let mut opening = Options::new().start_connect_sender(&dir.name()).unwrap();
    let mut sender = finish(&mut opening).unwrap();
    assert!(matches!(opening.try_finish(), Err(Error::Refused(_))), "it has ended");
    drop(accepted.join().unwrap());
    assert!(sender.arm(0).unwrap_err().is_closed());
    assert!(!is_readable(opening.as_fd()), "what comes later is the sender's");
    drop(opening);
    let accepted = accept(&listener);
    assert!(sender.resume_until(deadline()).unwrap());
    exchange(&mut sender, &mut accepted.join().unwrap());
}

/// Continues a wait for a successor as an event loop does, until it ends.
fn finish_resuming<T>(resuming: &mut Resuming<T>) -> Result<()> {
    loop {
        readable(resuming.as_fd());
        if resuming.try_finish()? {
            return Ok(());
        }
    }
}

/// Continues it while there is something to do. Nobody connects.
fn settle_resuming<T>(resuming: &mut Resuming<T>) {
    while is_readable(resuming.as_fd()) {
        assert!(!resuming.try_finish().unwrap());
    }
}

#[test]
fn a_sender_resumes_in_an_event_loop_and_is_as_before_after_a_cancel() {
    let dir = TestDir::new("a_sender_resumes_in_an_event_loop_and_is_as_before_after_a_cancel");
    let listener = Listener::bind(&dir.name()).unwrap();
    let connect = |name: String| std::thread::spawn(move || Receiver::connect(&name).unwrap());
    let first = connect(dir.name());
    let sender = listener.accept_sender().unwrap();
    let first = first.join().unwrap();
    let mut refused = sender.start_resume().unwrap();
    assert!(matches!(refused.try_finish(), Err(Error::Refused(_))), "the receiver is alive");
    let mut sender = refused.cancel();
    sender.send(b"unreleased").unwrap();
    drop(first);
    let mut resuming = sender.start_resume().unwrap();
    settle_resuming(&mut resuming);
    let mut sender = resuming.cancel();
    assert!(sender.try_send(b"nobody").unwrap_err().is_closed());
    // A candidate that says nothing, and one whose handshake the cancel ends.
    let silent = raw_connect(&dir.socket());
    let second = connect(dir.name());
    let mut resuming = sender.start_resume().unwrap();
    finish_resuming(&mut resuming).unwrap();
    assert!(matches!(resuming.try_finish(), Err(Error::Refused(_))), "it has ended");
    drop(silent);
    let (mut sender, mut second) = (resuming.cancel(), second.join().unwrap());
    assert_eq!(&*second.receive().unwrap(), b"unreleased");
    exchange(&mut sender, &mut second);
}

#[test]
fn a_receiver_resumes_by_its_name_in_an_event_loop() {
    let dir = TestDir::new("a_receiver_resumes_by_its_name_in_an_event_loop");
    let accept = |listener: Listener| std::thread::spawn(move || listener.accept_sender().unwrap());
    let accepted = accept(Listener::bind(&dir.name()).unwrap());
    let receiver = Receiver::connect(&dir.name()).unwrap();
    drop(accepted.join().unwrap());
    let mut resuming = receiver.start_resume().unwrap();
    // Nobody listens: it tries again at intervals.
    for _ in 0..2 {
        readable(resuming.as_fd());
        assert!(!resuming.try_finish().unwrap());
    }
    let accepted = accept(Listener::bind(&dir.name()).unwrap());
    finish_resuming(&mut resuming).unwrap();
    exchange(&mut accepted.join().unwrap(), &mut resuming.cancel());
}

#[test]
fn a_path_channels_sender_waits_for_a_receiver_in_an_event_loop() {
    let dir = TestDir::new("a_path_channels_sender_waits_for_a_receiver_in_an_event_loop");
    let path = dir.path().join("channel");
    let sender = Options::new().create_sender(&path).unwrap();
    let mut resuming = sender.start_resume().unwrap();
    settle_resuming(&mut resuming);
    let mut receiver = Options::new().open_receiver(&path).unwrap();
    finish_resuming(&mut resuming).unwrap();
    exchange(&mut resuming.cancel(), &mut receiver);
}

#[test]
fn an_event_loop_waits_until_every_message_is_released() {
    let (mut sender, mut receiver) = Options::new().threads().unwrap();
    assert!(!sender.arm_released().unwrap().is_waiting(), "nothing was sent");
    sender.send(b"one").unwrap();
    sender.send(b"two").unwrap();
    assert!(sender.arm_released().unwrap().is_waiting());
    drop(receiver.receive().unwrap());
    let last = receiver.receive().unwrap();
    // It may be readable: the receiver has released one.
    while is_readable(sender.as_fd()) {
        assert!(sender.arm_released().unwrap().is_waiting());
    }
    drop(last);
    readable(sender.as_fd());
    assert!(!sender.arm_released().unwrap().is_waiting());
    sender.send(b"three").unwrap();
    assert!(sender.arm_released().unwrap().is_waiting());
    drop(receiver);
    readable(sender.as_fd());
    assert!(matches!(sender.arm_released(), Err(Error::Closed { unreleased: 1 })));
}

#[test]
fn a_client_and_its_service_connect_in_one_thread() {
    let dir = TestDir::new("a_client_and_its_service_connect_in_one_thread");
    let mut service = Service::listen(&dir.name()).unwrap();
    let mut opening = Client::start_connect(&dir.name(), &Options::new()).unwrap();
    let mut client = loop {
        assert!(service.try_receive().unwrap().is_none());
        if let Some(client) = opening.try_finish().unwrap() {
            break client;
        }
    };
    let call = client.submit(b"question").unwrap();
    service.receive().unwrap().reply(b"answer").unwrap();
    assert_eq!(&*client.completion_of(call).unwrap(), b"answer");
}

#[test]
fn a_short_name_opens_with_its_first_service() {
    let dir = TestDir::new("a_short_name_opens_with_its_first_service");
    let role = Role::new(child, "short name");
    let child = Child::start_as(role, |command| {
        command.env("XDG_RUNTIME_DIR", dir.path());
    });
    child.wait_for_success();
}

fn services_of_a_short_name() {
    let no_deadline = Options::new();
    let error = finish(&mut Client::start_connect("short", &no_deadline).unwrap()).unwrap_err();
    assert!(matches!(error, Error::NoListener { .. }), "{error:?}");
    let mut late = Client::start_connect("short", &Options::new().connect_deadline(deadline())).unwrap();
    assert!(late.try_finish().unwrap().is_none());
    let mut services = [Service::listen("short").unwrap(), Service::listen("short").unwrap()];
    let mut client = loop {
        services.iter_mut().for_each(|service| assert!(service.try_receive().unwrap().is_none()));
        if let Some(client) = late.try_finish().unwrap() {
            break client;
        }
    };
    assert!(client.service_count() >= 1);
    let call = client.submit(b"question").unwrap();
    loop {
        for service in &mut services {
            if let Some(request) = service.try_receive().unwrap() {
                request.reply(b"answer").unwrap();
            }
        }
        if let Some(completion) = client.try_completion().unwrap() {
            assert_eq!((completion.call_id(), &*completion), (call, &b"answer"[..]));
            break;
        }
    }
    // A listener that answers no client: the name's directory contains its socket.
    drop((client, services));
    let mut path = std::path::PathBuf::from(std::env::var_os("XDG_RUNTIME_DIR").unwrap());
    path.extend(["pelton", "silent"]);
    std::fs::create_dir_all(&path).unwrap();
    for directory in [&path, path.parent().unwrap()] {
        use std::os::unix::fs::PermissionsExt as _;
        std::fs::set_permissions(directory, std::fs::Permissions::from_mode(0o700)).unwrap();
    }
    let _silent = raw_listen(&path.join("1.0"));
    let mut opening = Client::start_connect("silent", &Options::new().connect_deadline(soon())).unwrap();
    let error = finish(&mut opening).unwrap_err();
    assert!(matches!(error, Error::TimedOut(_)), "{error:?}");
}

#[test]
fn without_a_listener_an_opening_fails_at_once_or_at_its_deadline() {
    let dir = TestDir::new("without_a_listener_an_opening_fails_at_once_or_at_its_deadline");
    let name = dir.name();
    let error = Options::new().start_connect_sender(&name).unwrap().try_finish().unwrap_err();
    assert!(matches!(error, Error::NoListener { .. }), "{error:?}");
    let error = Options::new().start_connect_receiver(&name).unwrap().try_finish().unwrap_err();
    assert!(matches!(error, Error::NoListener { .. }), "{error:?}");
    let error = Client::start_connect(&name, &Options::new()).unwrap().try_finish().unwrap_err();
    assert!(matches!(error, Error::NoListener { .. }), "{error:?}");
    let error = Options::new().start_connect_sender("no:name").unwrap().try_finish().unwrap_err();
    assert!(matches!(error, Error::Name { .. }), "{error:?}");

    let until = soon();
    let error = finish(&mut Options::new().connect_deadline(until).start_connect_sender(&name).unwrap()).unwrap_err();
    assert!(matches!(error, Error::TimedOut(_)), "{error:?}");
    assert!(Instant::now() >= until);
}

#[test]
fn the_time_of_an_opening_counts_from_its_start() {
    let dir = TestDir::new("the_time_of_an_opening_counts_from_its_start");
    let time = Duration::from_millis(1);
    let options = <Options>::new().connect_deadline(time);
    let name = dir.name();
    let mut sender = options.clone().cast().start_connect_sender(&name).unwrap();
    let mut client = Client::start_connect(&name, &options.cast()).unwrap();
    let until = Instant::now() + time;
    while Instant::now() < until {
        std::thread::yield_now();
    }
    // The first use: it finds the deadline passed.
    assert!(matches!(sender.try_finish(), Err(Error::TimedOut(_))));
    assert!(matches!(client.try_finish(), Err(Error::TimedOut(_))));
}

#[test]
fn a_listener_that_comes_later_is_found() {
    let dir = TestDir::new("a_listener_that_comes_later_is_found");
    let mut opening = Options::new().connect_deadline(deadline()).start_connect_sender(&dir.name()).unwrap();
    for _ in 0..3 {
        readable(opening.as_fd());
        assert!(opening.try_finish().unwrap().is_none());
    }
    let listener = Listener::bind(&dir.name()).unwrap();
    let accepted = std::thread::spawn(move || listener.accept_receiver().unwrap());
    exchange(&mut finish(&mut opening).unwrap(), &mut accepted.join().unwrap());
}

#[test]
fn a_listener_that_does_not_answer_delays_nothing_until_the_deadline() {
    let dir = TestDir::new("a_listener_that_does_not_answer_delays_nothing_until_the_deadline");
    let path = dir.socket();
    let listener = raw_listen(&path);
    let start = |deadline| Options::new().connect_deadline(deadline).start_connect_sender(&dir.name()).unwrap();
    // It never accepts.
    let error = finish(&mut start(soon())).unwrap_err();
    assert!(matches!(error, Error::TimedOut(_)), "{error:?}");
    drop(accept(&listener).unwrap());
    // It answers half of the handshake.
    let mut opening = start(deadline());
    settle(&mut opening);
    let _connection = after_half_a_handshake(&listener);
    settle(&mut opening);
    let until = soon();
    let mut opening = start(until);
    // On a slow machine it has timed out in its first call.
    let error = match opening.try_finish() {
        Ok(None) => {
            let _connection = after_half_a_handshake(&listener);
            finish(&mut opening).unwrap_err()
        }
        ended => ended.unwrap_err(),
    };
    assert!(matches!(error, Error::TimedOut(_)), "{error:?}");
    assert!(Instant::now() >= until);
}

#[test]
fn a_refusal_has_the_peers_reason() {
    let dir = TestDir::new("a_refusal_has_the_peers_reason");
    let listener = Listener::bind(&dir.name()).unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    let over = is_over.clone();
    let accepting = std::thread::spawn(move || {
        while !over.load(Ordering::Relaxed) {
            assert!(listener.accept_sender_until(Duration::from_millis(10)).unwrap().is_none());
        }
    });
    let mut opening = Options::new().connect_deadline(deadline()).start_connect_sender(&dir.name()).unwrap();
    match finish(&mut opening) {
        Err(Error::Refused(why)) => assert!(why.contains("both sides are the sender"), "{why}"),
        other => panic!("{other:?}"),
    }
    is_over.store(true, Ordering::Relaxed);
    accepting.join().unwrap();
}

#[test]
fn a_peer_killed_in_the_handshake_is_replaced_by_its_successor() {
    let dir = TestDir::new("a_peer_killed_in_the_handshake_is_replaced_by_its_successor");
    let peer = Child::start(Role::new(child, "half a handshake").with("path", dir.socket().display()));
    peer.expect("listening");
    let mut patient = Options::new().connect_deadline(deadline()).start_connect_sender(&dir.name()).unwrap();
    settle(&mut patient);
    peer.expect("silent");
    settle(&mut patient);
    peer.kill();
    let listener = Listener::bind(&dir.name()).unwrap();
    let accepted = std::thread::spawn(move || listener.accept_receiver().unwrap());
    exchange(&mut finish(&mut patient).unwrap(), &mut accepted.join().unwrap());

    // Without a deadline it is an error.
    let raw = TestDir::new("a peer that hangs up");
    let listener = raw_listen(&raw.socket());
    let mut opening = Options::new().start_connect_sender(&raw.name()).unwrap();
    settle(&mut opening);
    drop(after_half_a_handshake(&listener));
    assert!(matches!(finish(&mut opening), Err(Error::HungUp)));
}

/// Programs that wait in slices, each with a deadline, continue after `TimedOut` alone. A service that begins to drain
/// hangs up on those that connect just then, also at the end of a slice.
#[test]
fn a_peer_that_hangs_up_at_the_deadline_is_a_timeout() {
    let raw = TestDir::new("a_peer_that_hangs_up_at_the_deadline_is_a_timeout");
    let listener = raw_listen(&raw.socket());
    let is_over = AtomicBool::new(false);
    let other = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                readable(listener.as_fd());
                drop(accept(&listener).unwrap());
            }
        });
        let connect = |round| {
            let now = Instant::now();
            match round % 2 {
                0 => Client::connect_with(&raw.name(), &Options::new().connect_deadline(now)).err().unwrap(),
                _ => Options::new().connect_deadline(now).connect_sender(&raw.name()).err().unwrap(),
            }
        };
        let other = (0..2000).map(connect).find(|error| !matches!(error, Error::TimedOut(_)));
        is_over.store(true, Ordering::Relaxed);
        connect(0);
        other
    });
    assert!(other.is_none(), "{other:?}");
}

#[test]
fn dropped_in_the_middle_it_leaves_no_descriptor() {
    let dir = TestDir::new("dropped_in_the_middle_it_leaves_no_descriptor");
    Child::start(Role::new(child, "drops").with("path", dir.path().display())).wait_for_success();
}

/// In a process of its own, as it counts descriptors.
fn drop_in_the_middle(directory: &Path) {
    let path = directory.join("socket");
    let name = format!("unix:{}", path.display());
    let listener = raw_listen(&path);
    let channel = directory.join("channel");
    drop(Options::new().create_sender(&channel).unwrap());
    let mut held = Some(Options::new().open_receiver(&channel).unwrap());
    let before = descriptors();
    for round in 0..4 {
        let options = <Options>::new().connect_deadline(deadline());
        drop(options.cast().start_connect_sender(&name).unwrap());
        let mut opening = options.cast().start_connect_sender(&name).unwrap();
        settle(&mut opening);
        let connection = after_half_a_handshake(&listener);
        // Now it has sent the descriptors of a lane.
        readable(opening.as_fd());
        settle(&mut opening);
        drop(opening);
        // The peer detects that.
        while !raw_receive(&connection).0.is_empty() {}
        drop(connection);
        let mut client = Client::start_connect(&name, &options.cast()).unwrap();
        settle(&mut client);
        drop((client, accept(&listener).unwrap()));
        // One that waits for the channel, for the role, and for the other side.
        let mut opening = options.cast().start_open_receiver(directory.join("none")).unwrap();
        assert!(opening.try_finish().unwrap().is_none());
        let mut role = options.cast().start_open_receiver(&channel).unwrap();
        assert!(role.try_finish().unwrap().is_none());
        drop((opening, role));
        assert_eq!(descriptors(), before, "round {round}");
    }
    held.take();
    let before = descriptors();
    let mut opening = Options::new().connect_deadline(deadline()).start_open_receiver(&channel).unwrap();
    assert!(opening.try_finish().unwrap().is_none());
    drop(opening);
    assert_eq!(descriptors(), before);
    // Its role is free.
    drop(Options::new().open_receiver(&channel).unwrap());
}

#[test]
fn hundreds_open_in_one_thread() {
    let dir = TestDir::new("hundreds_open_in_one_thread");
    let mut receiver = Options::new().gather_at(&dir.name()).unwrap();
    let options = <Options>::new().capacity(1 << 16).connect_deadline(deadline());
    let mut openings: Vec<_> = (0..300).map(|_| options.cast().start_connect_sender(&dir.name()).unwrap()).collect();
    let mut senders = Vec::new();
    while !openings.is_empty() {
        assert!(receiver.try_receive().unwrap().is_none());
        openings.retain_mut(|opening| match opening.try_finish() {
            Ok(opened) => {
                let is_pending = opened.is_none();
                senders.extend(opened);
                is_pending
            }
            // Those whose handshake the receiver ends, because too many are pending, connect again.
            Err(error) => panic!("{error}"),
        });
    }
    for (number, sender) in senders.iter_mut().enumerate() {
        sender.send(&number.to_le_bytes()).unwrap();
    }
    let mut found: Vec<usize> = (0..300)
        .map(|_| {
            let message = receiver.receive_until(deadline()).unwrap().unwrap();
            usize::from_le_bytes((*message).try_into().unwrap())
        })
        .collect();
    found.sort_unstable();
    assert!(found.into_iter().eq(0..300));
}

#[test]
fn a_path_is_opened_once_it_exists_and_has_a_sender() {
    let dir = TestDir::new("a_path_is_opened_once_it_exists_and_has_a_sender");
    let path = dir.path().join("c");
    let error = Options::new().start_open_receiver(&path).unwrap().try_finish().unwrap_err();
    assert!(matches!(error, Error::NoChannel { .. }), "{error:?}");

    let mut opening = Options::new().connect_deadline(deadline()).start_open_receiver(&path).unwrap();
    for _ in 0..3 {
        readable(opening.as_fd());
        assert!(opening.try_finish().unwrap().is_none());
    }
    // Both wait for each other, in one thread.
    let mut other = Options::new().connect_deadline(deadline()).start_create_sender(&path).unwrap();
    let (mut sender, mut receiver) = (None, None);
    while sender.is_none() || receiver.is_none() {
        if sender.is_none() {
            sender = other.try_finish().unwrap();
        }
        if receiver.is_none() {
            receiver = opening.try_finish().unwrap();
        }
    }
    exchange(&mut sender.unwrap(), &mut receiver.unwrap());
}

#[test]
fn a_sender_that_comes_and_leaves_while_its_receiver_opens_is_received() {
    let dir = TestDir::new("a_sender_that_comes_and_leaves_while_its_receiver_opens_is_received");
    let path = dir.path().join("c");
    let mut opening = Options::new().connect_deadline(deadline()).start_create_receiver(&path).unwrap();
    settle(&mut opening);
    // The first one sends nothing.
    drop(Options::new().open_sender(&path).unwrap());
    settle(&mut opening);
    Options::new().open_sender(&path).unwrap().send(b"hello").unwrap();
    let mut receiver = finish(&mut opening).unwrap();
    assert_eq!(&*receiver.try_receive().unwrap().unwrap(), b"hello");
    assert!(receiver.receive_until(deadline()).unwrap_err().is_closed());
}

#[test]
fn a_path_without_another_side_times_out() {
    let dir = TestDir::new("a_path_without_another_side_times_out");
    let path = dir.path().join("c");
    let options = || <Options>::new().connect_deadline(soon());
    let error = finish(&mut options().cast().start_create_receiver(&path).unwrap()).unwrap_err();
    assert!(matches!(&error, Error::TimedOut(_)), "{error:?}");
    let error = finish(&mut options().cast().start_open_sender(&path).unwrap()).unwrap_err();
    assert!(matches!(&error, Error::TimedOut(_)), "{error:?}");
    // Without a deadline it needs no other side.
    exchange(
        &mut finish(&mut Options::new().start_open_sender(&path).unwrap()).unwrap(),
        &mut finish(&mut Options::new().start_open_receiver(&path).unwrap()).unwrap(),
    );
}

#[test]
fn a_path_is_opened_once_its_role_is_free() {
    let dir = TestDir::new("a_path_is_opened_once_its_role_is_free");
    let path = dir.path().join("c");
    let mut sender = Options::new().create_sender(&path).unwrap();
    sender.send(b"waits").unwrap();
    let holder = Child::start(Role::new(child, "receiver").with("path", path.display()));
    holder.expect("open");
    let error = finish(&mut Options::new().start_open_receiver(&path).unwrap()).unwrap_err();
    assert!(matches!(error, Error::RoleTaken { .. }), "{error:?}");
    let mut opening = Options::new().connect_deadline(deadline()).start_open_receiver(&path).unwrap();
    for _ in 0..3 {
        readable(opening.as_fd());
        assert!(opening.try_finish().unwrap().is_none());
    }
    holder.kill();
    let mut receiver = finish(&mut opening).unwrap();
    assert_eq!(&*receiver.receive_until(deadline()).unwrap().unwrap(), b"waits");
}

/// The count of lanes grows under a lock, which a stopped process may hold.
#[test]
fn a_lane_is_added_once_the_lock_is_free() {
    let dir = TestDir::new("a_lane_is_added_once_the_lock_is_free");
    let path = dir.path().join("c");
    let _first = Options::new().lanes(2).create_sender(&path).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(path.join("channel")).unwrap();
    // SAFETY: plain integers, for which 0 is a value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    (lock.l_type, lock.l_len) = (libc::F_WRLCK as libc::c_short, 1);
    // SAFETY: the kernel reads one local `flock`.
    let locked = unsafe { libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(&file), libc::F_OFD_SETLK, &lock) };
    assert_eq!(locked, 0);
    let error = finish(&mut Options::new().connect_deadline(soon()).start_open_sender(&path).unwrap()).unwrap_err();
    assert!(matches!(&error, Error::TimedOut(why) if why.contains("adds a lane")), "{error:?}");
    // Without a deadline it waits some seconds.
    let error = finish(&mut Options::new().start_open_sender(&path).unwrap()).unwrap_err();
    assert!(matches!(&error, Error::TimedOut(why) if why.contains("adds a lane")), "{error:?}");
    let mut opening = Options::new().start_open_sender(&path).unwrap();
    for _ in 0..3 {
        readable(opening.as_fd());
        assert!(opening.try_finish().unwrap().is_none());
    }
    drop(file);
    finish(&mut opening).unwrap().send(b"in the second lane").unwrap();
}
