//! Permission to connect, other files under a name, and the treatment of a peer that violates the protocol.

use crate::support::raw::*;
use crate::support::*;
use pelton::{Error, Listener, Options, Receiver, Sender};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{SocketAddrUnix, accept, bind, listen};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Not a test: the entry point of a child process. Without a role it does nothing.
#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    match role.get("role") {
        "listen" => {
            let _listener = Listener::bind(role.get("name")).unwrap();
            report("listening");
            read_line_from_parent();
        }
        "receive-one" => {
            let mut receiver = receiver(&role);
            report(format!("{}", receiver.receive().unwrap().len()));
            read_line_from_parent();
        }
        "send-one" => {
            let mut sender = sender(&role);
            sender.send(b"x").unwrap();
            report(format!("sent {}", std::process::id()));
            read_line_from_parent();
        }
        // As another user.
        "connect-sender" | "connect-receiver" => {
            let uid = role.number("uid").unwrap() as u32;
            let mut options = Options::new();
            if let Some(allowed) = role.number("allow") {
                options = options.allow_uids(&[allowed as u32]);
            }
            // SAFETY: no pointers.
            assert_eq!(unsafe { libc::setgid(uid) | libc::setuid(uid) }, 0);
            let name = role.get("name");
            let found = match role.get("role") {
                "connect-sender" => options.connect_sender(name).and_then(|mut sender| {
                    sender.send(b"hello")?;
                    sender.wait_released()
                }),
                _ => options.cast().connect_receiver(name).and_then(|mut receiver| receiver.receive().map(|_| ())),
            };
            report(found.err().map_or("well".to_owned(), |error| word(&error)));
        }
        // Leaves a lane that wrapped at its window, filled the front and continued after the earlier messages.
        "stretch" => {
            let mut sender = sender(&role);
            let mut bytes = Vec::new();
            for number in 0.. {
                payload(number, 4000, &mut bytes);
                if sender.try_send(&bytes).unwrap() == pelton::Sent::Full {
                    report(number);
                    break;
                }
                if number < 50 {
                    assert!(sender.wait_released_until(deadline()).unwrap());
                }
            }
            read_line_from_parent();
        }
        "send-from" => {
            let mut sender = sender(&role);
            let from = role.number("from").unwrap();
            send_all(&mut sender, from..from + 200, Sizes::Fixed(4000), How::Block).unwrap();
        }
        other => panic!("no role {other}"),
    }
}

// Names.

#[test]
fn a_socket_left_by_a_killed_listener_is_recognised_and_replaced() {
    let dir = TestDir::new("a_socket_left_by_a_killed_listener_is_recognised_and_replaced");
    let child = Child::start(Role::new(child, "listen").with("name", dir.name()));
    child.expect("listening");
    child.kill();
    assert!(dir.socket().exists());
    assert!(matches!(Sender::connect(&dir.name()), Err(Error::NoListener { .. })));
    let listener = Listener::bind(&dir.name()).unwrap();
    assert!(!is_readable(listener.as_fd()), "no connection is pending");
    drop(listener);
    assert_eq!(dir.entries(), Vec::<PathBuf>::new());
}

#[test]
fn a_live_listener_is_refused_with_its_pid() {
    let dir = TestDir::new("a_live_listener_is_refused_with_its_pid");
    let child = Child::start(Role::new(child, "listen").with("name", dir.name()));
    child.expect("listening");
    match Listener::bind(&dir.name()) {
        Err(Error::InUse { name, pid }) => assert_eq!((name, pid), (dir.name(), child.pid())),
        other => panic!("{other:?}"),
    }
}

#[test]
fn sockets_of_dead_listeners_under_a_short_name_are_removed_by_the_next() {
    let dir = TestDir::new("sockets_of_dead_listeners_under_a_short_name_are_removed_by_the_next");
    let start = || {
        let role = Role::new(child, "listen").with("name", "short");
        let child = Child::start_as(role, |command| {
            command.env("XDG_RUNTIME_DIR", dir.path());
        });
        child.expect("listening");
        child
    };
    start().kill();
    let directory = dir.path().join("pelton/short");
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 1);
    let mut second = start();
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 1, "the first one's is gone");
    second.write_line("end");
    second.wait_for_success();
    assert_eq!(dir.entries(), Vec::<PathBuf>::new());
}

#[test]
fn a_file_under_the_name_is_refused_and_left_alone() {
    let dir = TestDir::new("a_file_under_the_name_is_refused_and_left_alone");
    std::fs::write(dir.socket(), b"precious").unwrap();
    let error = Listener::bind(&dir.name()).unwrap_err();
    assert!(matches!(error, Error::Name { .. }) && error.to_string().contains("not a socket"), "{error}");
    assert!(Sender::connect(&dir.name()).is_err());
    assert_eq!(std::fs::read(dir.socket()).unwrap(), b"precious");
}

/// A short name in the test's own runtime directory. Only children have a changed environment.
#[track_caller]
fn refused_under_a_short_name(dir: &TestDir, says: &str) {
    let child = Child::start_as(Role::new(child, "listen").with("name", "short"), |command| {
        command.env("XDG_RUNTIME_DIR", dir.path()).stderr(std::process::Stdio::piped());
    });
    let ended = child.finish();
    let error = &ended.stderr;
    assert!(!ended.status.success() && error.contains("Name {") && error.contains(says), "{error}");
}

#[test]
fn a_runtime_directory_that_others_can_enter_is_refused() {
    let dir = TestDir::new("a_runtime_directory_that_others_can_enter_is_refused");
    let base = dir.path().join("pelton");
    std::fs::DirBuilder::new().mode(0o700).create(&base).unwrap();
    std::fs::set_permissions(&base, std::fs::Permissions::from_mode(0o750)).unwrap();
    refused_under_a_short_name(&dir, "mode 750");
    std::fs::set_permissions(&base, std::fs::Permissions::from_mode(0o700)).unwrap();
    std::fs::DirBuilder::new().mode(0o700).create(base.join("short")).unwrap();
    std::fs::set_permissions(base.join("short"), std::fs::Permissions::from_mode(0o777)).unwrap();
    refused_under_a_short_name(&dir, "mode 777");
}

#[test]
fn a_link_in_place_of_a_directory_is_refused() {
    let dir = TestDir::new("a_link_in_place_of_a_directory_is_refused");
    let elsewhere = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(elsewhere.path(), dir.path().join("pelton")).unwrap();
    refused_under_a_short_name(&dir, "something else");
    std::fs::remove_file(dir.path().join("pelton")).unwrap();
    std::fs::DirBuilder::new().mode(0o700).create(dir.path().join("pelton")).unwrap();
    std::os::unix::fs::symlink(elsewhere.path(), dir.path().join("pelton/short")).unwrap();
    refused_under_a_short_name(&dir, "something else");
    assert_eq!(std::fs::read_dir(elsewhere.path()).unwrap().count(), 0);
}

#[test]
fn a_dropped_listener_removes_only_its_own_socket() {
    let dir = TestDir::new("a_dropped_listener_removes_only_its_own_socket");
    let listener = Listener::bind(&dir.name()).unwrap();
    std::fs::remove_file(dir.socket()).unwrap();
    let second = Listener::bind(&dir.name()).unwrap();
    drop(listener);
    assert!(dir.socket().exists());
    drop(second);
    assert!(!dir.socket().exists());
}

#[test]
fn a_path_too_long_for_a_socket_is_refused_with_the_limit() {
    let dir = TestDir::new("a_path_too_long_for_a_socket_is_refused_with_the_limit");
    let name = format!("unix:{}/{}", dir.path().display(), "x".repeat(120));
    for error in [Listener::bind(&name).unwrap_err(), Sender::connect(&name).unwrap_err()] {
        assert!(error.to_string().contains("at most 107"), "{error}");
    }
}

// Roles and users.

#[test]
fn two_senders_refuse_each_other_and_the_connecting_one_gets_the_reason() {
    let dir = TestDir::new("two_senders_refuse_each_other_and_the_connecting_one_gets_the_reason");
    let listener = Listener::bind(&dir.name()).unwrap();
    std::thread::scope(|scope| {
        let accepting = scope.spawn(|| listener.accept_sender_until(deadline()));
        match Sender::connect(&dir.name()) {
            Err(Error::Refused(why)) => assert!(why.contains("both sides are the sender"), "{why}"),
            other => panic!("{other:?}"),
        }
        // And the listener continues.
        let mut receiver = Receiver::connect(&dir.name()).unwrap();
        let mut sender = accepting.join().unwrap().unwrap().unwrap();
        sender.send(b"well").unwrap();
        assert_eq!(&*receiver.receive().unwrap(), b"well");
    });
}

/// A listener that another user may reach, as far as the file system is concerned.
fn open_to_all(dir: &TestDir, options: &Options) -> Listener {
    let listener = options.cast().listen(&dir.name()).unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    std::fs::set_permissions(dir.socket(), std::fs::Permissions::from_mode(0o777)).unwrap();
    listener
}

#[test]
fn another_user_is_refused_unless_both_sides_allow_it() {
    if !is_root() {
        eprintln!("SKIPPED: needs root to become another user");
        return;
    }
    let dir = TestDir::new("another_user_is_refused_unless_both_sides_allow_it");
    for end in ["connect-sender", "connect-receiver"] {
        let stranger = |allow: bool| {
            let role = Role::new(child, end).with("name", dir.name()).with("uid", 65534);
            Child::start(if allow { role.with("allow", 0) } else { role })
        };
        // Refused by its own side, which does not accept root.
        let listener = open_to_all(&dir, &Options::new());
        let child = stranger(false);
        let said = report_of_refused_child(&dir, &listener, end, &child);
        assert!(said.starts_with("Refused") && said.contains("uid"), "{said}");
        drop(listener);
        // Allowed by both.
        let listener = open_to_all(&dir, &Options::new().allow_uids(&[65534]));
        let child = stranger(true);
        if end == "connect-sender" {
            let mut receiver = listener.accept_receiver_until(deadline()).unwrap().unwrap();
            assert_eq!(receiver.peer().unwrap().uid, 65534);
            assert_eq!(&*receiver.receive().unwrap(), b"hello");
        } else {
            let mut sender = listener.accept_sender_until(deadline()).unwrap().unwrap();
            assert_eq!(sender.peer().unwrap().uid, 65534);
            sender.send(b"hello").unwrap();
            assert!(sender.wait_released_until(deadline()).unwrap());
        }
        child.expect("well");
    }
}

/// The report of a child that connects to the listener. The listener accepts nobody until this process connects after
/// the child.
fn report_of_refused_child(dir: &TestDir, listener: &Listener, end: &str, child: &Child) -> String {
    let options = Options::new().connect_deadline(deadline());
    let (accepted, report) = std::thread::scope(|scope| match end {
        "connect-sender" => {
            let accepting = scope.spawn(|| listener.accept_receiver_until(deadline()).unwrap().unwrap().peer());
            let report = child.line();
            drop(options.connect_sender(&dir.name()).unwrap());
            (accepting.join().unwrap(), report)
        }
        _ => {
            let accepting = scope.spawn(|| listener.accept_sender_until(deadline()).unwrap().unwrap().peer());
            let report = child.line();
            drop(options.cast().connect_receiver(&dir.name()).unwrap());
            (accepting.join().unwrap(), report)
        }
    });
    assert_eq!(accepted.unwrap().pid, std::process::id());
    report
}

// Peers that violate the protocol.

/// A listener for a sender, which gets `hostile` first and a valid one next. The hostile peer returns the reason of
/// its refusal, if any.
#[track_caller]
fn survives(what: &str, hostile: impl FnOnce(OwnedFd) -> String) -> String {
    let dir = TestDir::new("a listener survives a hostile peer");
    let listener = Listener::bind(&dir.name()).unwrap();
    let socket = raw_connect(&dir.socket());
    std::thread::scope(|scope| {
        let accepting = scope.spawn(|| listener.accept_receiver_until(deadline()));
        let why = hostile(socket);
        let options = Options::new().capacity(65536).connect_deadline(Instant::now() + DEADLINE / 3);
        let sender = options.connect_sender(&dir.name());
        let accepted = accepting.join().unwrap();
        let mut receiver = match accepted {
            Ok(receiver) => receiver.unwrap(),
            Err(error) => panic!("{what} ended the listener's wait: {error}"),
        };
        sender.unwrap_or_else(|error| panic!("{what}: a good peer after it: {error}")).send(b"well").unwrap();
        assert_eq!(&*receiver.receive_until(deadline()).unwrap().unwrap(), b"well", "{what}");
        why
    })
}

/// The response to a hostile sender that sends a hello and one packet with descriptors.
fn after_hello(socket: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> String {
    raw_send(socket, &packet(HELLO, SENDER), &[]);
    let (hello, _) = raw_receive(socket);
    assert_eq!(kind_of(&hello), HELLO);
    raw_send(socket, bytes, fds);
    words(socket)
}

/// The reason of a refusal, or the packet received instead.
fn words(socket: &OwnedFd) -> String {
    let (bytes, _) = raw_receive(socket);
    match kind_of(&bytes) {
        REFUSED => String::from_utf8_lossy(&bytes[80..]).into_owned(),
        kind => format!("packet of kind {kind} and {} bytes", bytes.len()),
    }
}

#[test]
fn garbage_and_short_packets_are_refused_and_the_listener_continues() {
    for (what, bytes) in [("short", vec![1; 3]), ("a byte less", packet(HELLO, SENDER)[..79].to_vec())] {
        let why = survives(what, |socket| {
            raw_send(&socket, &bytes, &[]);
            words(&socket)
        });
        assert!(why.contains("wanted at least 80"), "{what}: {why}");
    }
    let mut random = Random::new(3);
    for round in 0..10 {
        let bytes: Vec<u8> = (0..80 + random.below(600)).map(|_| random.word() as u8).collect();
        survives(&format!("garbage {round}"), |socket| {
            raw_send(&socket, &bytes, &[]);
            words(&socket)
        });
    }
}

#[test]
fn another_version_or_layout_is_refused_with_both_versions() {
    for (at, what) in [(4, "version"), (8, "layout")] {
        let why = survives(what, |socket| {
            let mut hello = packet(HELLO, SENDER);
            hello[at] ^= 0x55;
            raw_send(&socket, &hello, &[]);
            words(&socket)
        });
        assert!(why.contains("speaks wire version") && why.contains(", 2 with 0x"), "{why}");
        assert!(why.contains("use the later version of pelton on both sides"), "{why}");
    }
}

#[test]
fn a_packet_out_of_order_or_without_a_role_is_refused() {
    for kind in [0, PRODUCER, CONSUMER, READY, 6, 7, u32::MAX] {
        let why = survives("kind", |socket| {
            raw_send(&socket, &packet(kind, SENDER), &[]);
            words(&socket)
        });
        assert!(why.contains("wanted 1"), "{kind}: {why}");
    }
    let why = survives("role", |socket| {
        raw_send(&socket, &packet(HELLO, RECEIVER), &[]);
        words(&socket)
    });
    assert!(why.contains("both sides are the receiver"), "{why}");
}

#[test]
fn too_few_or_too_many_descriptors_are_refused_and_closed() {
    let doorbell = good_doorbell();
    for count in [0, 1, 2, 4, 20, 64] {
        let fds = vec![doorbell.as_fd(); count];
        let why = survives("count", |socket| after_hello(&socket, &producer_packet(), &fds));
        assert!(why.contains(&format!("{count} descriptors came")), "{why}");
    }
}

#[test]
fn invalid_segments_are_refused() {
    let data = good_data;
    let cases: Vec<(&str, OwnedFd, OwnedFd, OwnedFd)> = vec![
        ("not a memfd", a_file(), good_doorbell(), data()),
        ("not a memfd", a_pipe(), good_doorbell(), data()),
        ("not a memfd", seqpacket(), good_doorbell(), data()),
        ("not a memfd", good_doorbell(), good_doorbell(), data()),
        ("not a memfd", an_o_path(), good_doorbell(), data()),
        ("wanted", memfd(65536, &producer_page(), SealFlags::empty()), good_doorbell(), data()),
        ("wanted", memfd(65536, &producer_page(), size_seals()), good_doorbell(), data()),
        ("wanted 65536", memfd(4096, &producer_page(), control_seals()), good_doorbell(), data()),
        ("wanted 65536", memfd(1 << 20, &producer_page(), control_seals()), good_doorbell(), data()),
        ("begins with", memfd(65536, &[], control_seals()), good_doorbell(), data()),
        ("not a memfd", good_page(), good_doorbell(), a_file()),
        ("not a memfd", good_page(), good_doorbell(), an_o_path()),
        ("wanted", good_page(), good_doorbell(), memfd(CAPACITY, &[], SealFlags::empty())),
        ("wanted 65536", good_page(), good_doorbell(), memfd(CAPACITY - 4096, &[], size_seals())),
        ("wanted 65536", good_page(), good_doorbell(), memfd(0, &[], size_seals())),
        ("doorbell", good_page(), a_file(), data()),
        ("doorbell", good_page(), a_pipe(), data()),
        ("doorbell", good_page(), stream_socket(), data()),
        ("doorbell", good_page(), an_o_path(), data()),
    ];
    for (i, (says, page, doorbell, data)) in cases.into_iter().enumerate() {
        let fds = [page.as_fd(), doorbell.as_fd(), data.as_fd()];
        let why = survives(&format!("case {i}"), |socket| after_hello(&socket, &producer_packet(), &fds));
        assert!(why.contains(says), "case {i}, {says}: {why}");
    }
}

#[test]
fn impossible_sizes_are_refused() {
    let cases = [(24, 100u64), (24, 65537), (24, u64::MAX), (32, u64::MAX), (32, CAPACITY), (40, u64::MAX)];
    for (at, value) in cases {
        let mut bytes = producer_packet();
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        let (page, doorbell, data) = (good_page(), good_doorbell(), good_data());
        survives(&format!("{value} at {at}"), |socket| {
            after_hello(&socket, &bytes, &[page.as_fd(), doorbell.as_fd(), data.as_fd()])
        });
    }
    for (at, value) in [(48, 0u64), (48, u64::MAX), (48, 1 << 32 | 1 << 20), (56, 0), (56, u64::MAX)] {
        let mut bytes = producer_packet();
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        let (page, doorbell, data) = (good_page(), good_doorbell(), good_data());
        survives(&format!("position {value:#x} at {at}"), |socket| {
            let what = after_hello(&socket, &bytes, &[page.as_fd(), doorbell.as_fd(), data.as_fd()]);
            // The listener may believe it or not; it gets no further.
            drop(socket);
            what
        });
    }
}

#[test]
fn a_silent_peer_does_not_block_the_listener_for_ever() {
    survives("silence", |socket| {
        // Kept open until the listener has refused it.
        words(&socket)
    });
    survives("silence after the hello", |socket| {
        raw_send(&socket, &packet(HELLO, SENDER), &[]);
        raw_receive(&socket);
        words(&socket)
    });
}

#[test]
fn a_peer_that_hangs_up_on_the_hello_does_not_end_the_listeners_wait() {
    survives("hang-up at once", |socket| {
        drop(socket);
        String::new()
    });
    survives("hang-up after the hello", |socket| {
        raw_send(&socket, &packet(HELLO, SENDER), &[]);
        raw_receive(&socket);
        drop(socket);
        String::new()
    });
}

/// The result of connecting to a hostile listener.
fn connecting(hostile: impl FnOnce(OwnedFd) + Send) -> Error {
    let dir = TestDir::new("connecting to a hostile listener");
    let listener = seqpacket();
    bind(&listener, &SocketAddrUnix::new(dir.socket()).unwrap()).unwrap();
    listen(&listener, 4).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            readable(listener.as_fd());
            hostile(accept(&listener).unwrap());
        });
        Receiver::connect(&dir.name()).unwrap_err()
    })
}

#[test]
fn a_connector_gets_a_clear_error_from_a_hostile_listener() {
    let error = connecting(|socket| {
        raw_receive(&socket);
        raw_send(&socket, b"?", &[]);
    });
    assert!(error.to_string().contains("a packet of 1 bytes came"), "{error}");
    let error = connecting(|socket| {
        raw_receive(&socket);
        let mut hello = packet(HELLO, SENDER);
        hello[4] = 99;
        raw_send(&socket, &hello, &[]);
    });
    assert!(error.to_string().contains("wire version 99"), "{error}");
    let error = connecting(|socket| {
        raw_receive(&socket);
        raw_send(&socket, &packet(HELLO, SENDER), &[]);
        raw_send(&socket, &producer_packet(), &[]);
        words(&socket);
    });
    assert!(error.to_string().contains("0 descriptors came"), "{error}");
    let error = connecting(|socket| {
        raw_receive(&socket);
        raw_send(&socket, &packet(HELLO, SENDER), &[]);
        let unsealed = memfd(65536, &producer_page(), SealFlags::empty());
        raw_send(&socket, &producer_packet(), &[unsealed.as_fd(), good_doorbell().as_fd(), good_data().as_fd()]);
        words(&socket);
    });
    assert!(matches!(error, Error::Corrupt(_)) && error.to_string().contains("seals"), "{error}");
    let error = connecting(|socket| {
        raw_receive(&socket);
    });
    assert!(matches!(error, Error::HungUp), "{error}");
    let error = connecting(|socket| {
        raw_receive(&socket);
        // Silent until the connector has given up.
        raw_receive(&socket);
    });
    assert!(matches!(error, Error::TimedOut(_)), "{error}");
}

// Seals.

/// The segments of this process and of a peer, from /proc.
fn segments_of(pid: u32) -> Vec<(String, PathBuf)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap() {
        let path = entry.unwrap().path();
        let Ok(target) = std::fs::read_link(&path) else { continue };
        let target = target.display().to_string();
        if let Some((_, rest)) = target.split_once("memfd:pelton-") {
            found.push((rest.split(' ').next().unwrap().to_owned(), path));
        }
    }
    found
}

#[test]
fn nobody_can_write_anothers_control_pages_or_resize_anything() {
    let dir = TestDir::new("nobody_can_write_anothers_control_pages_or_resize_anything");
    let listener = Options::new().capacity(65536).listen(&dir.name()).unwrap();
    let child = Child::start(Role::new(child, "send-one").with("name", dir.name()));
    let _receiver = listener.accept_receiver_until(deadline()).unwrap().unwrap();
    child.line();
    // Other tests of this binary have their own segments: the peer's all belong to one lane.
    let mut seen: Vec<String> = Vec::new();
    for (name, path) in segments_of(child.pid()) {
        let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
        for bytes in [0, 4096, 1 << 20] {
            assert!(file.set_len(bytes).is_err(), "{name} could be resized to {bytes}");
        }
        // SAFETY: the kernel chooses the address of the mapping, nothing uses it, and it is unmapped here.
        let mapped = unsafe {
            let flags = libc::PROT_READ | libc::PROT_WRITE;
            let at = libc::mmap(std::ptr::null_mut(), 4096, flags, libc::MAP_SHARED, file.as_raw_fd(), 0);
            if at != libc::MAP_FAILED {
                libc::munmap(at, 4096);
            }
            at != libc::MAP_FAILED
        };
        let written = rustix::io::pwrite(&file, b"x", 4000).is_ok();
        // SAFETY: the kernel chooses the address of the mapping, and nothing uses it; first read-only, then made
        // writable.
        let upgraded = unsafe {
            let at = libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0);
            assert_ne!(at, libc::MAP_FAILED);
            let done = libc::mprotect(at, 4096, libc::PROT_READ | libc::PROT_WRITE) == 0;
            libc::munmap(at, 4096);
            done
        };
        assert!(fcntl_add_seals(&file, SealFlags::WRITE).is_err(), "{name} could be sealed further");
        let data = name == "data";
        assert_eq!((mapped, written, upgraded), (data, data, data), "{name}");
        seen.push(name);
    }
    seen.sort();
    assert_eq!(seen, ["consumer", "data", "producer", "receiver"]);
}

/// A receiver whose sender died and left a lane that wraps at its window and continues: 50 messages of 4000 bytes are
/// received. Returned with the number of all sent messages.
fn enlarged(dir: &TestDir) -> (Listener, Receiver, u64) {
    let listener = Listener::bind(&dir.name()).unwrap();
    let child = Child::start(Role::new(child, "stretch").with("name", dir.name()).with("capacity", 1 << 20));
    let mut receiver = listener.accept_receiver_until(deadline()).unwrap().unwrap();
    assert_eq!(receive_all(&mut receiver, 0, 50, Sizes::Fixed(4000), How::Block).0, 50);
    let count: u64 = child.line().parse().unwrap();
    assert!(count > 280, "{count} messages fill the lane");
    child.kill();
    (listener, receiver, count)
}

/// A successor connects, and everything arrives: the remaining messages, and its own.
fn resumes_with_a_successor(dir: &TestDir, mut receiver: Receiver, count: u64) {
    let successor = Child::start(Role::new(child, "send-from").with("name", dir.name()).with("from", count));
    assert!(receiver.resume_until(deadline()).unwrap());
    // It now waits for free space, or has written outside its lane.
    successor.wait_until_it_polls();
    let (number, end) = receive_all(&mut receiver, 50, count + 150, Sizes::Fixed(4000), How::Block);
    assert_eq!(number, count + 200, "{end:?}");
}

#[test]
fn a_lane_that_its_sender_enlarged_is_taken_over_whole() {
    let dir = TestDir::new("a_lane_that_its_sender_enlarged_is_taken_over_whole");
    let (_listener, receiver, count) = enlarged(&dir);
    resumes_with_a_successor(&dir, receiver, count);
}

#[test]
fn a_capacity_of_zero_is_refused() {
    let mut bytes = producer_packet();
    bytes[24..32].fill(0);
    let (page, doorbell, data) = (good_page(), good_doorbell(), good_data());
    survives("capacity 0", |socket| after_hello(&socket, &bytes, &[page.as_fd(), doorbell.as_fd(), data.as_fd()]));
}

#[test]
fn peers_that_hang_up_after_their_hello_do_not_end_the_listeners_wait() {
    survives("hang-up before ready", |socket| {
        let (page, doorbell, data) = (good_page(), good_doorbell(), good_data());
        after_hello(&socket, &producer_packet(), &[page.as_fd(), doorbell.as_fd(), data.as_fd()])
    });
    // The listener's reply reaches a closed socket: EPIPE is the peer's fault, not a system failure.
    survives("hello, then a close", |socket| {
        raw_send(&socket, &packet(HELLO, SENDER), &[]);
        drop(socket);
        String::new()
    });
}

#[test]
fn a_data_segment_of_unavailable_huge_pages_is_the_peers_fault() {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
    let Ok(data) = memfd_create("hostile", flags) else {
        eprintln!("SKIPPED: no huge pages in this kernel");
        return;
    };
    ftruncate(&data, 1 << 30).unwrap();
    fcntl_add_seals(&data, size_seals()).unwrap();
    let mut bytes = producer_packet();
    bytes[24..32].copy_from_slice(&(1u64 << 30).to_le_bytes());
    let mut page = producer_page();
    page[64..72].copy_from_slice(&(1u64 << 30).to_le_bytes());
    let (page, doorbell) = (memfd(65536, &page, control_seals()), good_doorbell());
    survives("huge pages", |socket| after_hello(&socket, &bytes, &[page.as_fd(), doorbell.as_fd(), data.as_fd()]));
}

#[test]
fn a_connector_of_another_user_gets_the_reason_of_its_refusal() {
    if !is_root() {
        eprintln!("SKIPPED: needs root to become another user");
        return;
    }
    let dir = TestDir::new("a_connector_of_another_user_gets_the_reason_of_its_refusal");
    let listener = open_to_all(&dir, &Options::new());
    for end in ["connect-sender", "connect-receiver"] {
        let child = Child::start(Role::new(child, end).with("name", dir.name()).with("uid", 65534).with("allow", 0));
        // Its hello is unread when it is refused.
        child.wait_until_it_polls();
        let said = report_of_refused_child(&dir, &listener, end, &child);
        assert!(said.starts_with("Refused") && said.contains("uid 65534"), "{said}");
    }
}

/// The lane's layout must survive a successor that dies in the handshake.
#[test]
fn a_successor_that_dies_in_the_handshake_loses_nothing_of_the_lane() {
    let dir = TestDir::new("a_successor_that_dies_in_the_handshake_loses_nothing_of_the_lane");
    let (_listener, receiver, count) = enlarged(&dir);
    // A successor that dies after it has sent its page and before it has taken over.
    let socket = raw_connect(&dir.socket());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            raw_send(&socket, &packet(HELLO, SENDER), &[]);
            assert_eq!(kind_of(&raw_receive(&socket).0), HELLO);
            let (mut answer, _segments) = raw_receive(&socket);
            assert_eq!(kind_of(&answer), CONSUMER);
            answer[..4].copy_from_slice(&PRODUCER.to_le_bytes());
            answer[40..48].copy_from_slice(&2u64.to_le_bytes());
            let mut page = producer_page();
            page[64..80].copy_from_slice(&answer[24..40]);
            page[144..152].copy_from_slice(&2u64.to_le_bytes());
            let page = memfd(65536, &page, control_seals());
            raw_send(&socket, &answer, &[page.as_fd(), good_doorbell().as_fd()]);
            raw_receive(&socket);
            let _ = rustix::net::shutdown(&socket, rustix::net::Shutdown::Both);
        });
        // The dying one connected first, so the listener serves it first.
        resumes_with_a_successor(&dir, receiver, count);
    });
}

#[test]
fn a_peer_in_another_pid_namespace_is_served_and_its_death_detected() {
    let dir = TestDir::new("a_peer_in_another_pid_namespace_is_served_and_its_death_detected");
    if !is_root() {
        eprintln!("SKIPPED: needs root to make a pid namespace");
        return;
    }
    // The listener cannot see the process id of a peer: the kernel reports 0.
    let role = Role::new(child, "receive-one").with("name", dir.name()).with("listen", "yes");
    let child = Child::start_by(role, &["unshare", "--pid", "--fork", "--kill-child"]);
    child.expect("listening");
    let mut sender = Sender::connect(&dir.name()).unwrap();
    sender.send(b"hello").unwrap();
    child.expect("5");
    assert!(sender.wait_released_until(deadline()).unwrap());
    sender.send(b"not released").unwrap();
    child.kill();
    let error = sender.wait_released_until(deadline()).unwrap_err();
    assert!(matches!(error, Error::PeerDied { unreleased: 1 }), "{error}");
}

#[test]
fn a_duration_to_connect_counts_from_each_use_of_the_options() {
    let dir = TestDir::new("a duration to connect counts from each use of the options");
    let limit = Duration::from_millis(20);
    let options: Options = Options::new().capacity(1 << 16).connect_deadline(limit);
    let timed_out = |connect: &dyn Fn() -> pelton::Result<()>| {
        let start = Instant::now();
        assert!(matches!(connect(), Err(Error::TimedOut(_))));
        assert!(start.elapsed() >= limit, "{:?}", start.elapsed());
    };
    for _ in 0..2 {
        timed_out(&|| options.cast().connect_sender(&dir.name()).map(drop));
        timed_out(&|| pelton::Client::connect_with(&dir.name(), &options.cast()).map(drop));
        timed_out(&|| options.cast().create_sender(dir.path().join("channel")).map(drop));
    }
    // An instant is the same for each use: it is over after the first.
    let until = Instant::now();
    let options: Options = options.connect_deadline(until);
    for _ in 0..2 {
        assert!(matches!(options.cast().connect_sender(&dir.name()), Err(Error::TimedOut(_))));
    }
    let options: Options = options.connect_deadline(pelton::Deadline::Now);
    assert!(matches!(options.cast().connect_sender(&dir.name()), Err(Error::NoListener { .. })));
}
