//! Where a seccomp filter refuses membarrier, both sides use fences instead, and no wake-up is lost. The same holds
//! where a sender fences by its own choice, and its receiver works without membarrier.

use crate::sides::{Race, refuse_membarrier};
use crate::support::{Child, Role, TestDir, deadline, read_line_from_parent, receiver, report, sender};
use pelton::Sent;
use rustix::process::Signal;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Not a test: the entry point of a child process. Without a role it does nothing.
#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    match role.get("role") {
        "receive" => {
            let mut receiver = receiver(&role);
            report("here");
            for number in 0..role.number("count").unwrap() {
                if number == FIRST {
                    refuse_membarrier();
                }
                assert_eq!(receiver.receive().unwrap()[..8], number.to_le_bytes());
            }
            report("received");
            read_line_from_parent();
        }
        role => panic!("{role} is no role"),
    }
}

/// A word of a file in a path channel's directory.
struct Word(&'static AtomicU64);

impl Word {
    fn of(dir: &TestDir, file: &str, offset: usize) -> Word {
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        let file = std::fs::File::open(dir.path().join("c").join(file)).unwrap();
        // SAFETY: the mapping is new and never unmapped, the file is longer, and the offset is a multiple of 8.
        unsafe {
            let page = mmap(std::ptr::null_mut(), 4096, ProtFlags::READ, MapFlags::SHARED, &file, 0).unwrap();
            Word(&*page.byte_add(offset).cast())
        }
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

/// That many messages each find the receiver asleep before it loses membarrier.
const FIRST: u64 = 50;
const ARMED: u64 = 1;
const UNBARRIERED: u64 = 2;

#[test]
fn a_receiver_calls_membarrier_only_if_its_sender_does_not_always_ring() {
    let claim = "a_receiver_calls_membarrier_only_if_its_sender_does_not_always_ring";
    let dir = TestDir::new(claim);
    let role = Role::new(child, "receive").with("name", dir.path_name()).with("count", 500);
    let child = Child::start(role.clone());
    let mut sender = sender(&role);
    child.expect("here");
    let (sleep, fenced) = (Word::of(&dir, "receiver", 128), Word::of(&dir, "0.producer", 392));
    let until = deadline();
    let wait_for = |condition: &dyn Fn() -> bool, what: &str| {
        while !condition() {
            assert!(Instant::now() < until, "{what}: the sleep word is {:#x}", sleep.get());
            std::thread::yield_now();
        }
    };
    let mut number = 0u64;
    let mut last = 0;
    let mut send = || {
        assert_eq!(sender.try_send(&number.to_le_bytes()).unwrap(), Sent::Sent);
        number += 1;
        number
    };
    let mut send_to_a_sleeper = || {
        // In an epoch whose doorbell has not been rung.
        wait_for(&|| sleep.get() & ARMED != 0 && sleep.get() != last, "the receiver does not sleep");
        last = sleep.get();
        send()
    };
    while send_to_a_sleeper() < 4 * FIRST {}
    assert_eq!(fenced.get() as u32, 1, "the sender rings for each message, and does not fence");
    // After the first message it would have noticed the refusal, and asked for fences.
    assert_eq!(sleep.get() & UNBARRIERED, 0, "the receiver has called membarrier");
    // A stream ends it: the next sleeper calls membarrier, and reports the refusal.
    child.signal(Signal::STOP);
    child.wait_for_state('T');
    while fenced.get() as u32 == 1 {
        assert!(send() < 400, "the sender fences a stream");
    }
    child.signal(Signal::CONT);
    wait_for(&|| sleep.get() & UNBARRIERED != 0, "the receiver does not notice that membarrier is refused");
    while send() < 500 {}
    child.expect("received");
}

/// For the sender, which listens, and the receiver.
#[track_caller]
fn exchange(refused: [&'static str; 2]) {
    for wanted in ["message", "room"] {
        Race { processes: true, path: false, wanted, refused }.must_not_lose(4_000);
    }
}

#[test]
fn no_wake_up_is_lost_when_the_listening_side_has_no_membarrier() {
    exchange(["before", ""]);
}

#[test]
fn no_wake_up_is_lost_when_the_connecting_side_has_no_membarrier() {
    exchange(["", "before"]);
}

#[test]
fn no_wake_up_is_lost_when_neither_side_has_membarrier() {
    exchange(["before", "before"]);
}

#[test]
fn no_wake_up_is_lost_when_membarrier_becomes_unavailable_later() {
    exchange(["after", ""]);
    exchange(["", "after"]);
    exchange(["after", "before"]);
}
