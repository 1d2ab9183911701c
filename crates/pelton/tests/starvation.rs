//! Channels without resources: no descriptors, no address space, no disk space, a file size limit, a refused system
//! call, one processor, a signal each millisecond. The result is an error or lower speed, and never wrong: nothing is
//! lost, nothing hangs, nothing is left over, and a later attempt with the resource works.
//!
//! Each condition has its own process, so that it starves no other test. This file has the shared parts, one
//! processor, a container and repetition; `starvation/` has a file for each scarce resource.

#[path = "starvation/descriptors.rs"]
mod descriptors;
#[path = "starvation/disk.rs"]
mod disk;
#[path = "starvation/memory.rs"]
mod memory;
#[path = "starvation/refused.rs"]
mod refused;
mod support;
#[path = "starvation/waiting.rs"]
mod waiting;

use descriptors::*;
use disk::*;
use memory::*;
use pelton::{Error, Listener, Options, Receiver, Sender, Sent, SubscriberEvent, SubscriberSet, Wait, inspect};
use refused::*;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use support::*;
use waiting::*;

const SMALL: u64 = 64 << 10;

/// Not a test: the entry point of a child process. Without a role it does nothing.
#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    match role.get("role") {
        "few descriptors" => few_descriptors(&role),
        "few descriptors for parts" => few_descriptors_for_parts(&role),
        "few descriptors for a set" => few_descriptors_for_a_set(&role),
        "publish" => publish(&role),
        "few descriptors arrive" => few_descriptors_on_receive(&role),
        "little address space" => little_address_space(&role),
        "small files" => small_files(&role),
        "quota" => over_quota(&role),
        "nothing locked" => nothing_locked(&role),
        "full doorbells" => full_doorbells(&role),
        "interrupted" => interrupted(&role),
        "no wall clock" => no_wall_clock(&role),
        "refused" => refused_calls(&role),
        "cycles" => cycles(&role),
        "one message" => one_message(&role),
        "stream" => stream(&role),
        "contained" => contained(&role),
        "round trips" => round_trips(&role),
        other => panic!("{other}"),
    }
}

/// Runs one role until it reports success.
#[track_caller]
fn alone(role: Role) {
    let child = Child::start(role);
    child.expect("well");
    child.wait_for_success();
}

fn rounds(usual: u64) -> u64 {
    std::env::var("PELTON_ROUNDS").map_or(usual, |text| text.parse().unwrap())
}

/// The path of a channel below the role's directory.
fn path_of(role: &Role) -> PathBuf {
    Path::new(role.get("at")).join("channel")
}

fn name_of(role: &Role) -> String {
    format!("unix:{}", Path::new(role.get("at")).join("s").display())
}

fn role_at(role: &str, dir: &TestDir) -> Role {
    Role::new(child, role).with("at", dir.path().display())
}

fn small<M>() -> Options<M> {
    <Options>::new().capacity(SMALL).connect_deadline(deadline()).cast()
}

/// Options of a path channel, whose endpoint does not wait for the other one.
fn small_path<M>() -> Options<M> {
    <Options>::new().capacity(SMALL).cast()
}

/// The other endpoint: it takes, or sends, one message under the name, repeatedly, until it is killed.
fn one_message(role: &Role) {
    let (name, path) = (name_of(role), path_of(role));
    let listener = (role.get("how") == "listen").then(|| small().listen(&name).unwrap());
    report("there");
    loop {
        // The starved endpoint sometimes gives up during an operation, so this child ignores the resulting errors.
        if role.get("end") == "receiver" {
            let receiver = match role.get("how") {
                "listen" => listener.as_ref().unwrap().accept_receiver_until(deadline()).map(Option::unwrap),
                "connect" => small().connect_receiver(&name),
                _ => small_path().create_receiver(&path),
            };
            if let Ok(mut receiver) = receiver {
                while receiver.receive().is_ok() || role.get("how") == "path" {}
            }
        } else {
            let sender = match role.get("how") {
                "listen" => listener.as_ref().unwrap().accept_sender_until(deadline()).map(Option::unwrap),
                "connect" => small().connect_sender(&name),
                _ => small_path().create_sender(&path),
            };
            if let Ok(mut sender) = sender {
                while sender.send(b"one").is_ok() && sender.wait_released().is_ok() {}
            }
        }
    }
}

// One processor.

/// One endpoint of a stream, on the processor that both endpoints share.
fn stream(role: &Role) {
    kernel::pin(0);
    let (how, count, sizes) = (How::parse(role.get("how")), role.number("count").unwrap(), Sizes::Every(3000));
    if role.get("end") == "sender" {
        let mut sender = sender(role);
        send_all(&mut sender, 0..count, sizes, how).unwrap();
        assert!(sender.wait_released_until(deadline()).unwrap());
        report("well");
    } else {
        let mut receiver = receiver(role);
        let (number, end) = receive_all(&mut receiver, 0, count, sizes, how);
        assert!(end.is_none() && number == count, "{number}: {end:?}");
        assert!(receiver.receive_until(deadline()).unwrap_err().is_closed());
        report("well");
    }
}

#[test]
fn on_one_processor_streams_complete_with_every_way_to_wait() {
    for by_path in [false, true] {
        for how in [How::Block, How::Spin, How::Epoll, How::Try] {
            let dir = TestDir::new("on one processor streams that fill and empty the lane get through");
            let name = if by_path { dir.path_name() } else { dir.name() };
            let role =
                Role::new(child, "stream").with("name", name).with("capacity", SMALL).with("how", format!("{how:?}"));
            let role = role.with("count", rounds(2000));
            let receiver = Child::start(role.clone().with("end", "receiver").with("listen", "yes"));
            receiver.expect("listening");
            let sender = Child::start(role.with("end", "sender"));
            sender.expect("well");
            receiver.expect("well");
        }
    }
}

/// One channel each way, one message at a time.
fn round_trips(role: &Role) {
    kernel::pin(0);
    let (how, count, sizes) = (How::parse(role.get("how")), role.number("count").unwrap(), Sizes::Every(3000));
    let back = role.clone().with("name", format!("{}-back", role.get("name")));
    let is_client = role.get("end") == "sender";
    let (mut sender, mut receiver) = match is_client {
        true => (sender(role), receiver(&back)),
        false => {
            let receiver = receiver(role);
            (sender(&back), receiver)
        }
    };
    for number in 0..count {
        if is_client {
            send_all(&mut sender, number..number + 1, sizes, how).unwrap();
        }
        let (next, end) = receive_all(&mut receiver, number, 1, sizes, how);
        assert!(end.is_none() && next == number + 1, "{number}: {end:?}");
        if !is_client {
            send_all(&mut sender, number..number + 1, sizes, how).unwrap();
        }
    }
    // The client closes first; otherwise it would detect the service's exit as a death.
    if !is_client {
        assert!(sender.wait_released_until(deadline()).unwrap());
    }
}

#[test]
fn on_one_processor_round_trips_complete_with_every_way_to_wait() {
    for by_path in [false, true] {
        for how in [How::Block, How::Epoll] {
            let dir = TestDir::new("on one processor round trips complete with every way to wait");
            let name = if by_path { dir.path_name() } else { dir.name() };
            let role = Role::new(child, "round trips").with("name", name).with("how", format!("{how:?}"));
            let role = role.with("count", rounds(1000)).with("listen", "yes");
            let answers = Child::start(role.clone().with("end", "receiver"));
            answers.expect("listening");
            let is_client = Child::start(role.with("end", "sender").with("listen", ""));
            answers.expect("listening");
            is_client.wait_for_success();
            answers.wait_for_success();
        }
    }
}

// A container.

/// Runs in a read-only root, with 64 MiB of /dev/shm.
fn contained(_: &Role) {
    assert!(std::fs::write("/tmp/pelton-may-not-be-written", "").is_err(), "the root can be written");
    let shm = Path::new("/dev/shm");
    let space = rustix::fs::statvfs(shm).unwrap();
    assert_eq!(space.f_blocks * space.f_frsize, 64 << 20);
    // A full lane of 64 MiB uses nothing of /dev/shm.
    let name = "unix:/dev/shm/s";
    let listener = Listener::bind(name).unwrap();
    let (mut sender, mut receiver) = std::thread::scope(|scope| {
        let connecting = scope.spawn(|| Sender::connect(name).unwrap());
        let receiver = listener.accept_receiver_until(deadline()).unwrap().unwrap();
        (connecting.join().unwrap(), receiver)
    });
    let (mut sent, mut received) = (0, 0);
    assert!(send_until_full(&mut sender, &mut sent).is_none());
    assert!(sent > 20_000, "{sent} messages fill 64 MiB");
    receive_available(&mut receiver, &mut received);
    assert_eq!(sent, received);
    drop((sender, receiver, listener));
    assert_eq!(all_below(shm), Vec::<PathBuf>::new());
    // A path channel of the same size does not fit. It is full slightly earlier, with an error, and then continues.
    let path = shm.join("channel");
    let mut sender = Options::new().create_sender(&path).unwrap();
    let mut receiver = Options::new().open_receiver(&path).unwrap();
    (sent, received) = (0, 0);
    for _ in 0..2 {
        let error = send_until_full(&mut sender, &mut sent).expect("there is not so much space");
        assert!(error.to_string().contains("/dev/shm/channel: free some"), "{error}");
        no_space(Err::<(), _>(error));
        receive_available(&mut receiver, &mut received);
        assert_eq!(sent, received);
    }
    assert!(sent > 2 * 20_000, "{sent} messages fill it twice");
    // Another channel finds no space until this one returns some.
    no_space(Options::new().create_sender(shm.join("another")));
    sender.trim().unwrap();
    drop(Options::new().create_sender(shm.join("another")).unwrap());
    report("well");
}

#[test]
fn channels_work_in_a_container_with_64_mib_and_a_read_only_root() {
    let dir = TestDir::new("channels work in a container with 64 MiB and a read-only root");
    let with_user = ["--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"];
    let unshares = |arguments: &[&str]| {
        let done = Command::new("unshare").args(arguments).arg("true").stderr(std::process::Stdio::null()).status();
        done.is_ok_and(|status| status.success())
    };
    let Some(arguments) = [&with_user[..], &with_user[2..]].into_iter().find(|arguments| unshares(arguments)) else {
        eprintln!("SKIPPED: no permission to make namespaces");
        return;
    };
    let script = "mount -t tmpfs -o size=64m tmpfs /dev/shm && mount -o remount,bind,ro / && exec \"$0\" \"$@\"";
    let wrapper = [&["unshare"], arguments, &["sh", "-c", script]].concat();
    let child = Child::start_by(role_at("contained", &dir), &wrapper);
    child.expect("well");
    child.wait_for_success();
}

// Repetition.

fn cycles(role: &Role) {
    let (name, path, root) = (name_of(role), path_of(role), Path::new(role.get("at")));
    let count = role.number("count").unwrap();
    let by = role.get("how");
    let listener = (by == "connect").then(|| small().listen(&name).unwrap());
    let one = |number: u64| {
        let (mut sender, mut receiver) = match &listener {
            None if by == "threads" => Options::new().capacity(SMALL).threads().unwrap(),
            None => {
                let sender = small_path().create_sender(&path).unwrap();
                (sender, small_path().create_receiver(&path).unwrap())
            }
            // The two endpoints take turns at listening.
            Some(listener) => std::thread::scope(|scope| {
                if number.is_multiple_of(2) {
                    let connecting = scope.spawn(|| small().connect_sender(&name).unwrap());
                    let receiver = listener.accept_receiver_until(deadline()).unwrap().unwrap();
                    (connecting.join().unwrap(), receiver)
                } else {
                    let connecting = scope.spawn(|| small().connect_receiver(&name).unwrap());
                    let sender = listener.accept_sender_until(deadline()).unwrap().unwrap();
                    (sender, connecting.join().unwrap())
                }
            }),
        };
        sender.send(&number.to_le_bytes()).unwrap();
        assert_eq!(*receiver.receive_until(deadline()).unwrap().unwrap(), number.to_le_bytes());
        if number.is_multiple_of(3) {
            drop((sender, receiver));
        } else {
            drop((receiver, sender));
        }
        if number.is_multiple_of(500) {
            report("continues");
            // SAFETY: no pointers. The alarm ends a hang within a batch of 500; it does not bound the whole test.
            unsafe { libc::alarm(DEADLINE.as_secs() as u32) };
        }
    };
    (0..10).for_each(one);
    let before = (descriptors(), mappings());
    (0..count).for_each(one);
    eventually_is((before.0, 0), "descriptors, and mappings of lanes", || (descriptors(), mapped(root)));
    // The allocator may take a mapping or give one back.
    let after = mappings();
    assert!(after <= before.1 + 3, "mappings: {} before, {after} after", before.1);
    report("well");
}

#[test]
fn channels_opened_and_closed_repeatedly_leave_no_descriptor_and_no_mapping() {
    for (how, count) in [("threads", 3000), ("connect", 2000), ("path", 2000)] {
        let dir = TestDir::unwatched();
        let role = role_at("cycles", &dir).with("how", how).with("count", rounds(count));
        let child = Child::start(role);
        while child.line() == "continues" {}
        child.wait_for_success();
        let left = if how == "path" { 10 } else { 0 };
        assert_eq!(all_below(dir.path()).len(), left);
    }
}

/// The same repetition, with the other endpoint killed each time.
#[test]
fn peers_killed_repeatedly_leave_no_descriptor_and_no_mapping() {
    let dir = TestDir::unwatched();
    let listener = small().listen(&dir_name(&dir)).unwrap();
    let ours = || {
        let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        let open = links.filter_map(|fd| std::fs::read_link(fd.path()).ok()).filter(|to| to.starts_with(dir.path()));
        (mapped(dir.path()), open.count())
    };
    for number in 0..rounds(100) {
        let (how, end) = [("connect", "sender"), ("connect", "receiver"), ("path", "sender"), ("path", "receiver")]
            [number as usize % 4];
        let child = Child::start(role_at("one message", &dir).with("how", how).with("end", end));
        let path = dir.path().join("channel");
        let died = |error: Error| assert!(error.is_peer_died(), "{error}");
        if end == "sender" {
            let mut receiver = match how {
                "connect" => listener.accept_receiver_until(deadline()).unwrap().unwrap(),
                _ => small_path().create_receiver(&path).unwrap(),
            };
            assert_eq!(&*receiver.receive_until(deadline()).unwrap().unwrap(), b"one");
            child.kill();
            while receiver.receive_until(deadline()).map(drop_some).map_err(died).is_ok() {}
        } else {
            let mut sender = match how {
                "connect" => listener.accept_sender_until(deadline()).unwrap().unwrap(),
                _ => small_path().create_sender(&path).unwrap(),
            };
            sender.send(b"one").unwrap();
            assert!(sender.wait_released_until(deadline()).unwrap());
            assert!(how == "connect" || sender.resume_until(deadline()).unwrap());
            child.kill();
            sender.send(b"nobody takes this").map_err(died).unwrap_or_default();
            while sender.wait_released_until(deadline()).map_err(died).is_ok() {}
            if how == "path" {
                drop(sender);
                let mut receiver = small_path().open_receiver(&path).unwrap();
                while receiver.receive_until(deadline()).is_ok() {}
            }
        }
        assert_eq!(ours(), (0, 0), "after {number} of {how}, {end}");
    }
}
