//! Shared parts of the channel tests: payloads that reveal damage, loss and reordering, ways to wait, whole streams,
//! and endpoints by role.
#![allow(dead_code, unused_imports, reason = "each test binary uses its part of it")]

pub mod raw;
pub mod records;

use pelton::{Departure, Error, Event, Options, Receiver, Sender, Sent, Wait};
pub use pelton_testkit::{
    Child, DEADLINE, Mounted, Random, Role, TestDir, Watchdog, deadline, descriptors, eventually, eventually_is,
    is_readable, is_root, kernel, mappings, read_line_from_parent, readable, readable_until, report, seccomp,
    this_thread, wait_until_thread_polls,
};
use rustix::event::epoll::{self, EventData, EventFlags};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The kind of an event, without its borrowed data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Message,
    Joined,
    Left(Departure),
}

impl Kind {
    pub fn of(event: &Event<'_>) -> Kind {
        match event {
            Event::Message(_) => Kind::Message,
            Event::Joined(_) => Kind::Joined,
            Event::Left(_, departure) => Kind::Left(*departure),
        }
    }
}

/// The size of message `number`.
#[derive(Clone, Copy, Debug)]
pub enum Sizes {
    /// Every size from 0 up to below the bound, then from 0 again.
    Every(u64),
    /// Random, below the bound, from the seed.
    Random(u64, u64),
    Fixed(u64),
}

impl Sizes {
    pub fn of(self, number: u64) -> usize {
        (match self {
            Sizes::Every(bound) => number % bound,
            Sizes::Random(seed, bound) => {
                let mut random = Random::new(seed ^ (number + 1));
                random.word();
                random.word();
                random.below(bound)
            }
            Sizes::Fixed(bytes) => bytes,
        }) as usize
    }

    pub fn parse(text: &str) -> Sizes {
        let words: Vec<&str> = text.split(':').collect();
        match words[..] {
            ["every", bound] => Sizes::Every(bound.parse().unwrap()),
            ["random", seed, bound] => Sizes::Random(seed.parse().unwrap(), bound.parse().unwrap()),
            ["fixed", bytes] => Sizes::Fixed(bytes.parse().unwrap()),
            _ => panic!("{text}"),
        }
    }
}

impl std::fmt::Display for Sizes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Sizes::Every(bound) => write!(f, "every:{bound}"),
            Sizes::Random(seed, bound) => write!(f, "random:{seed}:{bound}"),
            Sizes::Fixed(bytes) => write!(f, "fixed:{bytes}"),
        }
    }
}

/// The bytes of message `number`: its number, if it fits, and a pattern that depends on it.
pub fn payload(number: u64, bytes: usize, into: &mut Vec<u8>) {
    into.clear();
    let mut word = number;
    while into.len() < bytes {
        let left = bytes - into.len();
        into.extend_from_slice(&word.to_le_bytes()[..left.min(8)]);
        word = word.wrapping_add(number ^ 0x9e37_79b9_7f4a_7c15).rotate_left(7);
    }
}

#[track_caller]
pub fn check(number: u64, sizes: Sizes, found: &[u8], wanted: &mut Vec<u8>) {
    payload(number, sizes.of(number), wanted);
    assert!(
        found == &wanted[..],
        "message {number}: {} bytes beginning {:02x?}, wanted {} beginning {:02x?}",
        found.len(),
        &found[..found.len().min(16)],
        wanted.len(),
        &wanted[..wanted.len().min(16)],
    );
}

/// How a side waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    Block,
    Spin,
    Poll,
    Epoll,
    /// Polls with the `try_` methods.
    Try,
}

impl How {
    pub fn parse(text: &str) -> How {
        match text {
            "" | "Block" => How::Block,
            "Spin" => How::Spin,
            "Poll" => How::Poll,
            "Epoll" => How::Epoll,
            "Try" => How::Try,
            _ => panic!("{text}"),
        }
    }

    pub fn wait(self) -> Wait {
        if self == How::Spin { Wait::Spin } else { Wait::Block }
    }
}

/// An event loop with one descriptor in it.
pub struct Loop {
    how: How,
    epoll: OwnedFd,
}

impl Loop {
    pub fn new(how: How, fd: BorrowedFd<'_>) -> Loop {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        epoll::add(&epoll, fd, EventData::new_u64(0), EventFlags::IN).unwrap();
        Loop { how, epoll }
    }

    pub fn tick(&self, fd: BorrowedFd<'_>) {
        match self.how {
            How::Try => std::thread::yield_now(),
            How::Epoll => readable(self.epoll.as_fd()),
            _ => readable(fd),
        }
    }
}

/// Sends one message.
pub fn send_one(sender: &mut Sender, bytes: &[u8], how: How, event_loop: &Loop) -> pelton::Result<()> {
    if matches!(how, How::Block | How::Spin) {
        return sender.send(bytes);
    }
    loop {
        match sender.try_send(bytes)? {
            Sent::Sent => return Ok(()),
            Sent::Full if how == How::Try => event_loop.tick(sender.as_fd()),
            Sent::Full => {
                if sender.arm(bytes.len())?.is_waiting() {
                    event_loop.tick(sender.as_fd());
                    sender.disarm();
                }
            }
            Sent::TimedOut => panic!("try_send waited"),
        }
    }
}

/// Sends messages `numbers`.
pub fn send_all(
    sender: &mut Sender,
    numbers: std::ops::Range<u64>,
    sizes: Sizes,
    how: How,
) -> Result<(), (u64, Error)> {
    let event_loop = Loop::new(how, sender.as_fd());
    let mut bytes = Vec::new();
    for number in numbers {
        payload(number, sizes.of(number), &mut bytes);
        send_one(sender, &bytes, how, &event_loop).map_err(|error| (number, error))?;
    }
    Ok(())
}

/// Receives messages from number `from` on, at most `count`, and checks each. Returns the number after the last, and
/// the error that ended it before `count`.
pub fn receive_all(receiver: &mut Receiver, from: u64, count: u64, sizes: Sizes, how: How) -> (u64, Option<Error>) {
    let event_loop = Loop::new(how, receiver.as_fd());
    let mut wanted = Vec::new();
    let mut number = from;
    while number < from + count {
        let polled = matches!(how, How::Poll | How::Epoll | How::Try);
        match if polled { receiver.try_receive() } else { receiver.receive().map(Some) } {
            Ok(Some(message)) => {
                check(number, sizes, &message, &mut wanted);
                number += 1;
                continue;
            }
            Ok(None) => {}
            Err(error) => return (number, Some(error)),
        };
        if how == How::Try {
            std::thread::yield_now();
            continue;
        }
        match receiver.arm() {
            Ok(pelton::Armed::Waiting) => event_loop.tick(receiver.as_fd()),
            Ok(pelton::Armed::Ready) => {}
            Err(error) => return (number, Some(error)),
        }
    }
    (number, None)
}

pub fn options<M>(role: &Role) -> Options<M> {
    let mut options = <Options>::new().wait(How::parse(role.get("how")).wait());
    if let Some(capacity) = role.number("capacity") {
        options = options.capacity(capacity);
    }
    if let Some(uid) = role.number("allow") {
        options = options.allow_uids(&[uid as u32]);
    }
    options.connect_deadline(deadline()).cast()
}

/// A sender under the role's name: it listens or connects by the role, or opens a directory. A listener reports
/// "listening" first.
pub fn sender(role: &Role) -> Sender {
    sender_at(&options(role), role.get("name"), role.get("listen") == "yes")
}

pub fn receiver(role: &Role) -> Receiver {
    receiver_at(&options(role), role.get("name"), role.get("listen") == "yes")
}

fn sender_at(options: &Options, name: &str, listens: bool) -> Sender {
    if let Some(directory) = name.strip_prefix("path:") {
        if listens {
            report("listening");
        }
        return options.cast().create_sender(directory).unwrap();
    }
    if listens {
        let listener = options.cast().listen(name).unwrap();
        report("listening");
        return listener.accept_sender_until(deadline()).unwrap().expect("no connection arrived");
    }
    options.cast().connect_sender(name).unwrap()
}

fn receiver_at(options: &Options, name: &str, listens: bool) -> Receiver {
    if let Some(directory) = name.strip_prefix("path:") {
        if listens {
            report("listening");
        }
        return options.cast().create_receiver(directory).unwrap();
    }
    if listens {
        let listener = options.cast().listen(name).unwrap();
        report("listening");
        return listener.accept_receiver_until(deadline()).unwrap().expect("no connection arrived");
    }
    options.cast().connect_receiver(name).unwrap()
}

/// An error's word in a child's report.
pub fn word(error: &Error) -> String {
    match error {
        Error::Closed { unreleased } => format!("Closed {unreleased}"),
        Error::PeerDied { unreleased } => format!("PeerDied {unreleased}"),
        Error::Refused(why) => format!("Refused {why}"),
        error => format!("{error:?}"),
    }
}
