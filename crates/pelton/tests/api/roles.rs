//! A role of a path channel that another process has: an opener with a deadline waits for it.

use crate::support::*;
use pelton::{Error, Options};
use rustix::process::Signal;
use std::path::{Path, PathBuf};

/// Not a test: what a child does. Without a role it does nothing.
#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    let path = role.get("path");
    match role.get("role") {
        "receiver" => {
            let _receiver = Options::new().open_receiver(path).unwrap();
            report("open");
            read_line_from_parent();
        }
        _ => {
            let _sender = Options::new().open_sender(path).unwrap();
            report("open");
            read_line_from_parent();
        }
    }
}

fn holder(of: &str, path: &Path) -> Child {
    let holder = Child::start(Role::new(child, of).with("path", path.display()));
    holder.expect("open");
    holder
}

/// Opens with a deadline, and exchanges a message with `path`'s other side.
fn successor(of: &str, path: PathBuf) -> std::thread::JoinHandle<pelton::Result<()>> {
    let options = <Options>::new().connect_deadline(deadline());
    let is_receiver = of == "receiver";
    std::thread::spawn(move || match is_receiver {
        true => options.cast().open_receiver(path)?.receive().map(drop),
        false => options.cast().open_sender(path)?.send(b"from the successor"),
    })
}

#[test]
fn an_opener_with_a_deadline_waits_until_the_roles_holder_ends() {
    for (of, how) in [("receiver", "exits"), ("receiver", "killed"), ("sender", "exits"), ("sender", "killed")] {
        let place = TestDir::new("a taken role");
        let path = place.path().join("c");
        // The other side stays, and a message waits for a receiver.
        let mut sender = Options::new().create_sender(&path).unwrap();
        sender.send(b"waits").unwrap();
        let mut receiver = None;
        if of == "sender" {
            drop(sender);
            receiver = Some(Options::new().open_receiver(&path).unwrap());
        }
        let mut holder = holder(of, &path);
        let waiting = successor(of, path.clone());
        // Without a deadline, an opener gives up after a while, which the other outlasts.
        let refused = match of {
            "receiver" => Options::new().open_receiver(&path).map(drop),
            _ => Options::new().open_sender(&path).map(drop),
        };
        assert!(matches!(refused, Err(Error::RoleTaken { .. })), "{refused:?}");
        assert!(!waiting.is_finished(), "{of} {how}: two have the role");
        match how {
            "exits" => holder.write_line("end"),
            _ => holder.kill(),
        }
        waiting.join().unwrap().unwrap();
        if let Some(receiver) = &mut receiver {
            assert_eq!(&*receiver.receive().unwrap(), b"waits");
        }
    }
}

#[test]
fn held_messages_keep_the_role_of_their_closed_receiver() {
    let place = TestDir::new("a role that held messages keep");
    let path = place.path().join("c");
    let mut sender = Options::new().create_sender(&path).unwrap();
    for _ in 0..2 {
        sender.send(b"held").unwrap();
    }
    let mut receiver = Options::new().open_receiver(&path).unwrap();
    let held = [receiver.receive().unwrap().hold(), receiver.receive().unwrap().hold()];
    assert!(sender.resume_until(deadline()).unwrap());
    receiver.close().unwrap();
    // The sender detects the close all the same.
    assert!(matches!(sender.wait_released_until(deadline()), Err(Error::Closed { unreleased: 2 })));
    let waiting = successor("receiver", path.clone());
    for message in held {
        let refused = Options::new().open_receiver(&path).map(drop);
        assert!(matches!(refused, Err(Error::RoleTaken { .. })), "{refused:?}");
        assert!(!waiting.is_finished());
        assert_eq!(*message, *b"held");
    }
    waiting.join().unwrap().unwrap();
}

#[test]
fn an_opener_whose_deadline_passes_reports_the_roles_holder() {
    let place = TestDir::new("a role that stays taken");
    let path = place.path().join("c");
    let _sender = Options::new().create_sender(&path).unwrap();
    let holder = holder("receiver", &path);
    let soon = std::time::Instant::now() + std::time::Duration::from_millis(300);
    match Options::new().connect_deadline(soon).open_receiver(&path) {
        Err(Error::RoleTaken { role, pid, .. }) => assert_eq!((&*role, pid), ("receiver", holder.pid())),
        other => panic!("{other:?}"),
    }
    assert!(std::time::Instant::now() >= soon);
}

#[test]
fn a_restart_right_after_a_kill_gets_the_role_without_a_deadline() {
    let place = TestDir::new("a restart after a kill");
    let path = place.path().join("c");
    let _sender = Options::new().create_sender(&path).unwrap();
    for _ in 0..20 {
        let holder = holder("receiver", &path);
        // Not reaped: the kernel may not have ended it yet.
        holder.signal(Signal::KILL);
        drop(Options::new().open_receiver(&path).unwrap());
        drop(holder);
    }
}
