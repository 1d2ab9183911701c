//! Path channels: both sides come and go, die and are succeeded, in a directory that keeps the lane.

mod support;

use pelton::{Error, Options, Receiver, Sender, Sent, Wait};
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use support::*;

const SIZES: Sizes = Sizes::Random(7, 3000);

fn options(role: &Role) -> Options {
    let options = Options::new().capacity(role.number("capacity").unwrap_or(1 << 20));
    options.wait(How::parse(role.get("how")).wait()).lanes(role.number("lanes").unwrap_or(1) as u32)
}

/// Message `number` of lane `lane`: which lane and number, then the pattern.
fn numbered(lane: u64, number: u64, into: &mut Vec<u8>) {
    payload(number, SIZES.of(number) + 16, into);
    into[..8].copy_from_slice(&number.to_le_bytes());
    into[8..16].copy_from_slice(&lane.to_le_bytes());
}

/// What a receiver knows of each lane: the next number, and how often it saw one again.
#[derive(Default)]
struct Seen(BTreeMap<u64, (u64, u64)>);

impl Seen {
    /// Checks a message: in order, whole, and doubled only if it says so.
    fn note(&mut self, message: &pelton::Message<'_>) {
        let word = |at: usize| u64::from_le_bytes(message[at..at + 8].try_into().unwrap());
        let (number, lane) = (word(0), word(8));
        let mut wanted = Vec::new();
        numbered(lane, number, &mut wanted);
        assert_eq!(&message[..], &wanted[..], "message {number} of {lane} is damaged");
        let (next, again) = self.0.entry(lane).or_default();
        if number < *next {
            assert!(message.is_redelivered(), "message {number} of {lane} came twice");
            *again += 1;
        } else {
            assert_eq!(number, *next, "of lane {lane} one was lost");
            *next += 1;
        }
    }
}

/// Not a test: what a child does. Without a role it does nothing.
#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    let path = role.get("path").to_owned();
    match role.get("role") {
        // Sends the numbers from where its predecessor ended, up to the count or for ever.
        "send" => {
            let mut sender = options(&role).create_sender(&path).unwrap();
            let lane = role.number("lane").unwrap_or(0);
            let mut number = u64::from(sender.next_seq()) - 1;
            say("open");
            let mut bytes = Vec::new();
            while number < role.number("count").unwrap_or(u64::MAX) {
                numbered(lane, number, &mut bytes);
                match sender.send(&bytes) {
                    Ok(()) => number += 1,
                    // A receiver went; the lane is there for the next.
                    Err(Error::PeerDied { .. } | Error::Closed { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            say(format!("sent {number}"));
            if role.get("end") == "close" {
                sender.close().unwrap();
                say("closed");
            }
            hear();
        }
        // Receives so many, keeping the last so many, and says the numbers.
        "receive" => {
            let mut receiver = options(&role).create_receiver(&path).unwrap();
            say("open");
            let mut held = Vec::new();
            let mut numbers = Vec::new();
            for _ in 0..role.number("count").unwrap() {
                let message = receiver.receive().unwrap();
                numbers.push(u64::from_le_bytes(message[..8].try_into().unwrap()));
                if numbers.len() as u64 > role.number("count").unwrap() - role.number("hold").unwrap_or(0) {
                    held.push(message.hold());
                }
            }
            say(format!("{:?}", numbers.last()));
            hear();
        }
        // Receives for ever, telling each time it has more.
        "consume" => {
            let mut receiver = options(&role).create_receiver(&path).unwrap();
            say("open");
            loop {
                match receiver.receive() {
                    Ok(message) => drop(message),
                    Err(Error::PeerDied { .. } | Error::Closed { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        }
        "wait" => {
            let deadline = Instant::now() + DEADLINE;
            let options = options(&role).connect_deadline(deadline);
            let _ends = match role.get("end") {
                "sender" => (Some(options.open_sender(&path).unwrap()), None),
                _ => (None, Some(options.open_receiver(&path).unwrap())),
            };
            say("met");
            hear();
        }
        other => panic!("{other}"),
    }
}

struct Here {
    place: Place,
}

impl Here {
    fn new(claim: &'static str) -> Here {
        Here { place: Place::new(claim) }
    }

    fn path(&self) -> PathBuf {
        self.place.path().join("channel")
    }

    fn role(&self, role: &str) -> Role {
        Role::new(role).with("path", self.path().display())
    }
}

fn small() -> Options {
    Options::new().capacity(1 << 20)
}

/// Receives until the channel's senders are gone.
fn receive_to_end(receiver: &mut Receiver, seen: &mut Seen) -> Error {
    loop {
        match receiver.receive_until(deadline()) {
            Ok(Some(message)) => seen.note(&message),
            Ok(None) => panic!("neither a message nor an end came"),
            Err(error) => return error,
        }
    }
}

#[test]
fn a_sender_fills_the_lane_before_any_receiver_exists() {
    let here = Here::new("a sender fills the lane before any receiver exists");
    let mut sender = small().create_sender(here.path()).unwrap();
    assert_eq!(sender.peer(), None);
    let mut sent = 0u64;
    let mut bytes = Vec::new();
    loop {
        numbered(0, sent, &mut bytes);
        match sender.try_send(&bytes).unwrap() {
            Sent::Sent => sent += 1,
            Sent::Full => break,
            Sent::TimedOut => unreachable!(),
        }
    }
    assert!(sent > 500, "{sent} messages fill a MiB");
    sender.close().unwrap();
    let mut receiver = Options::new().open_receiver(here.path()).unwrap();
    let mut seen = Seen::default();
    for _ in 0..sent {
        seen.note(&receiver.try_receive().unwrap().expect("it was sent"));
    }
    // Nobody is there, and nobody went while this receiver was: that is no end.
    assert!(receiver.try_receive().unwrap().is_none());
    assert!(receiver.receive_until(Instant::now() + Duration::from_millis(5)).unwrap().is_none());
    assert_eq!(seen.0[&0], (sent, 0));
}

#[test]
fn a_receiver_waits_for_its_first_sender_and_is_told_of_its_close() {
    let here = Here::new("a receiver waits for its first sender and is told of its close");
    let mut receiver = small().create_receiver(here.path()).unwrap();
    let child = Child::start(here.role("send").with("count", 1000).with("end", "close"));
    let mut seen = Seen::default();
    let end = receive_to_end(&mut receiver, &mut seen);
    assert!(end.is_closed(), "{end}");
    assert_eq!(seen.0[&0], (1000, 0));
    // Told once; then there is nobody, and another may come.
    assert!(receiver.try_receive().unwrap().is_none());
    drop(child);
    let _child = Child::start(here.role("send").with("count", 1500).with("end", "close"));
    assert!(receive_to_end(&mut receiver, &mut seen).is_closed());
    assert_eq!(seen.0[&0], (1500, 0));
    assert_eq!(receiver.generation(), 2);
}

#[test]
fn either_waits_for_the_other_until_its_deadline() {
    let here = Here::new("either waits for the other until its deadline");
    let soon = || Options::new().capacity(1 << 20).connect_deadline(Instant::now() + Duration::from_millis(30));
    assert!(matches!(soon().open_sender(here.path()), Err(Error::NoChannel { .. })));
    assert!(matches!(soon().create_sender(here.path()), Err(Error::TimedOut(_))));
    assert!(matches!(soon().open_receiver(here.path()), Err(Error::TimedOut(_))));
    for (first, second) in [("sender", "receiver"), ("receiver", "sender")] {
        let one = Child::start(here.role("wait").with("end", first));
        one.wait_until_it_polls();
        let two = Child::start(here.role("wait").with("end", second));
        one.expect("met");
        two.expect("met");
    }
}

#[test]
fn what_a_killed_sender_committed_is_delivered_and_its_successor_goes_on_behind_it() {
    let here = Here::new("what a killed sender committed is delivered and its successor goes on behind it");
    let child = Child::start(here.role("send").with("count", 500));
    child.expect("open");
    child.expect("sent 500");
    let mut receiver = Options::new().open_receiver(here.path()).unwrap();
    let mut seen = Seen::default();
    seen.note(&receiver.receive().unwrap());
    assert_eq!(receiver.peer().unwrap().pid, child.pid());
    child.kill();
    let end = receive_to_end(&mut receiver, &mut seen);
    assert!(end.is_peer_died(), "{end}");
    assert_eq!(seen.0[&0], (500, 0));
    assert_eq!((receiver.peer(), receiver.generation()), (None, 1));
    let child = Child::start(here.role("send").with("count", 900).with("end", "close"));
    assert!(receive_to_end(&mut receiver, &mut seen).is_closed());
    assert_eq!((seen.0[&0], receiver.generation()), ((900, 0), 2));
    drop(child);
}

#[test]
fn the_successor_of_a_killed_receiver_begins_with_the_oldest_unreleased_message_and_says_so() {
    let here = Here::new("the successor of a killed receiver begins with the oldest unreleased message and says so");
    let mut sender = small().create_sender(here.path()).unwrap();
    let mut bytes = Vec::new();
    for number in 0..100 {
        numbered(0, number, &mut bytes);
        sender.send(&bytes).unwrap();
    }
    let child = Child::start(here.role("receive").with("count", 40).with("hold", 10));
    child.expect("open");
    child.expect("Some(39)");
    assert!(sender.resume_until(deadline()).unwrap());
    assert_eq!(sender.peer().unwrap().pid, child.pid());
    child.kill();
    let told = loop {
        match sender.drain_until(Instant::now() + Duration::from_millis(50)) {
            Ok(drained) => assert!(!drained),
            Err(error) => break error,
        }
    };
    // 30 were released; the ten it held, and the rest, were not.
    assert!(matches!(told, Error::PeerDied { unreleased: 70 }), "{told}");
    numbered(0, 100, &mut bytes);
    sender.send(&bytes).unwrap();
    let mut receiver = Options::new().open_receiver(here.path()).unwrap();
    numbered(0, 101, &mut bytes);
    sender.send(&bytes).unwrap();
    for number in 30..102u64 {
        let message = receiver.receive().unwrap();
        assert_eq!(&message[..8], &number.to_le_bytes());
        assert_eq!(message.is_redelivered(), number < 101, "{number}");
    }
    assert!(sender.drain_until(deadline()).unwrap());
}

#[test]
fn both_dead_nothing_committed_is_lost() {
    let here = Here::new("both dead, nothing committed is lost");
    let sender = Child::start(here.role("send"));
    sender.expect("open");
    let receiver = Child::start(here.role("receive").with("count", 500).with("hold", 5));
    receiver.expect("open");
    receiver.expect("Some(499)");
    sender.kill();
    receiver.kill();
    let mut last = Options::new().open_sender(here.path()).unwrap();
    let committed = u64::from(last.next_seq()) - 1;
    let mut bytes = Vec::new();
    numbered(0, committed, &mut bytes);
    assert_eq!(last.try_send(&bytes).unwrap(), Sent::Sent);
    last.close().unwrap();
    let mut receiver = Options::new().open_receiver(here.path()).unwrap();
    for number in 495..=committed {
        assert_eq!(&receiver.try_receive().unwrap().expect("committed")[..8], &number.to_le_bytes());
    }
    assert!(receiver.try_receive().unwrap().is_none());
}

#[test]
fn a_rolling_restart_of_the_sender_a_hundred_times_loses_nothing() {
    let here = Here::new("a rolling restart of the sender a hundred times loses nothing");
    let mut receiver = small().create_receiver(here.path()).unwrap();
    let mut seen = Seen::default();
    for round in 1..=100u64 {
        // By turns: closed, and killed when everything is sent.
        let child =
            Child::start(here.role("send").with("count", 200 * round).with("end", ["", "close"][round as usize % 2]));
        while seen.0.get(&0).is_none_or(|(next, _)| *next < 200 * round) {
            match receiver.receive_until(deadline()) {
                Ok(message) => seen.note(&message.expect("the child sends")),
                Err(error) => assert!(error.is_closed() || error.is_peer_died(), "{error}"),
            }
        }
        child.kill();
    }
    assert_eq!(seen.0[&0], (20_000, 0));
    assert_eq!(receiver.generation(), 100);
}

#[test]
fn a_rolling_restart_of_the_receiver_a_hundred_times_loses_nothing() {
    let here = Here::new("a rolling restart of the receiver a hundred times loses nothing");
    let child = Child::start(here.role("send").with("how", "Block"));
    child.expect("open");
    let mut seen = Seen::default();
    let mut random = Random::new(3);
    for _ in 0..100 {
        let mut receiver = small().wait(Wait::Block).open_receiver(here.path()).unwrap();
        for _ in 0..random.below(300) {
            seen.note(&receiver.receive().unwrap());
        }
        if random.below(2) == 0 {
            receiver.close().unwrap();
        } else {
            // What is held when the receiver goes is delivered again.
            let held = receiver.receive().unwrap().hold();
            drop(receiver);
            let number = u64::from_le_bytes(held[..8].try_into().unwrap());
            assert_eq!(number, seen.0.get(&0).map_or(0, |(next, _)| *next));
        }
    }
    let (next, _) = seen.0[&0];
    assert!(next > 5000, "{next}");
}

#[test]
fn random_kills_of_either_side_lose_nothing_and_double_only_what_says_so() {
    let here = Here::new("random kills of either side lose nothing and double only what says so");
    let seed = std::env::var("PELTON_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    eprintln!("PELTON_SEED={seed}");
    let mut random = Random::new(seed);
    let rounds = std::env::var("PELTON_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(60);
    for round in 0..rounds {
        let how = ["Block", "Spin"][random.below(2) as usize];
        let capacity = 1 << 17;
        let sender = Child::start(here.role("send").with("how", how).with("capacity", capacity));
        let receiver = Child::start(here.role("consume").with("how", how).with("capacity", capacity));
        sender.expect("open");
        receiver.expect("open");
        std::thread::sleep(Duration::from_micros(random.below(8000)));
        if random.below(2) == 0 {
            sender.kill();
            receiver.kill();
        } else {
            receiver.kill();
            sender.kill();
        }
        // Everything in the lane is whole, in order, and from where the dead one had released to.
        let mut receiver = Options::new().open_receiver(here.path()).unwrap();
        let mut last: Option<u64> = None;
        let mut bytes = Vec::new();
        while let Some(message) = receiver.try_receive().unwrap() {
            let number = u64::from_le_bytes(message[..8].try_into().unwrap());
            numbered(0, number, &mut bytes);
            assert_eq!(&message[..], &bytes[..], "round {round}: message {number} is damaged");
            assert!(last.is_none_or(|last| number == last + 1), "round {round}: {number} after {last:?}");
            assert!(message.is_redelivered());
            last = Some(number);
        }
        drop(receiver);
        let sender = Options::new().open_sender(here.path()).unwrap();
        if let Some(last) = last {
            assert_eq!(u64::from(sender.next_seq()) - 1, last + 1, "round {round}");
        }
    }
}

#[test]
fn many_senders_by_path_are_served_by_one_wait_and_a_dead_ones_lane_is_reused() {
    let here = Here::new("many senders by path are served by one wait, and a dead one's lane is reused");
    let mut receiver = small().lanes(4).create_receiver(here.path()).unwrap();
    let start = |lane: u64, count: u64| {
        Child::start(here.role("send").with("lane", lane).with("count", count).with("lanes", 4))
    };
    // One after the other, so that each knows its lane.
    let mut children = Vec::new();
    for lane in 0..4 {
        let child = start(lane, 2000);
        child.expect("open");
        children.push(child);
    }
    let refused = Options::new().open_sender(here.path()).unwrap_err();
    assert!(matches!(refused, Error::RoleTaken { .. }), "{refused}");
    let mut seen = Seen::default();
    let count = |seen: &Seen| seen.0.values().map(|(next, _)| next).sum::<u64>();
    while count(&seen) < 4 * 2000 {
        let message = receiver.receive_until(deadline()).unwrap().expect("four send");
        let lane = u64::from_le_bytes(message[8..16].try_into().unwrap());
        assert_eq!(u64::from(message.lane()), lane);
        seen.note(&message);
    }
    // One dies: its lane is the next one's.
    children.remove(2).kill();
    let child = start(2, 3000);
    child.expect("open");
    while count(&seen) < 4 * 2000 + 1000 {
        seen.note(&receiver.receive_until(deadline()).unwrap().expect("the successor sends"));
    }
    drop(child);
    drop(children);
    let end = receive_to_end(&mut receiver, &mut seen);
    assert!(end.is_peer_died(), "{end}");
    assert_eq!(seen.0[&2], (3000, 0));
}

#[test]
fn a_flooding_sender_does_not_keep_another_waiting() {
    let here = Here::new("a flooding sender does not keep another waiting");
    let mut receiver = small().lanes(2).create_receiver(here.path()).unwrap();
    let mut flood = Options::new().open_sender(here.path()).unwrap();
    let mut quiet = Options::new().open_sender(here.path()).unwrap();
    let fill = |flood: &mut Sender| while flood.try_send(b"flood").unwrap() == Sent::Sent {};
    for _ in 0..20 {
        fill(&mut flood);
        assert_eq!(quiet.try_send(b"quiet").unwrap(), Sent::Sent);
        let mut before = 0;
        while &*receiver.receive().unwrap() != b"quiet" {
            before += 1;
        }
        assert!(before <= 128, "{before} of the flood came before it");
    }
}

#[test]
fn a_descriptor_tells_what_happens_on_a_path_channel() {
    let here = Here::new("a descriptor tells what happens on a path channel");
    let mut receiver = small().create_receiver(here.path()).unwrap();
    assert!(receiver.arm().unwrap());
    assert!(!is_readable(receiver.as_fd()));
    let mut child = Child::start(here.role("send").with("count", 1));
    readable(receiver.as_fd());
    let mut seen = Seen::default();
    loop {
        if let Some(message) = receiver.try_receive().unwrap() {
            seen.note(&message);
            break;
        }
        if receiver.arm().unwrap() {
            readable(receiver.as_fd());
        }
    }
    child.expect("open");
    child.expect("sent 1");
    // Whatever rang before, nothing is there now.
    while !receiver.arm().unwrap() {}
    assert!(!is_readable(receiver.as_fd()));
    child.tell("end");
    child.kill();
    readable(receiver.as_fd());
    let told = loop {
        match receiver.arm() {
            Ok(_) => readable(receiver.as_fd()),
            Err(error) => break error,
        }
    };
    assert!(told.is_peer_died(), "{told}");
    // The descriptor is silent again: no loop turns for one that is gone.
    assert!(receiver.arm().unwrap());
    assert!(!is_readable(receiver.as_fd()));
}

#[test]
fn a_stopped_sender_is_not_a_dead_one() {
    let here = Here::new("a stopped sender is not a dead one");
    let mut receiver = small().create_receiver(here.path()).unwrap();
    let child = Child::start(here.role("send").with("count", 10));
    child.expect("open");
    child.expect("sent 10");
    child.signal(Signal::STOP);
    child.wait_for_state('T');
    let mut seen = Seen::default();
    (0..10).for_each(|_| seen.note(&receiver.receive().unwrap()));
    assert!(receiver.receive_until(Instant::now() + Duration::from_millis(30)).unwrap().is_none());
    assert!(matches!(Options::new().open_sender(here.path()), Err(Error::RoleTaken { .. })));
    child.signal(Signal::CONT);
    child.kill();
    assert!(receive_to_end(&mut receiver, &mut seen).is_peer_died());
}

#[test]
fn descriptors_are_refused_and_sync_is_for_paths_only() {
    let here = Here::new("descriptors are refused, and sync is for paths only");
    let mut sender = small().create_sender(here.path()).unwrap();
    let refused = sender.send_with_descriptors(b"x", &[std::io::stdin().as_fd()]).unwrap_err();
    assert!(matches!(refused, Error::Refused(_)), "{refused}");
    sender.send(b"kept").unwrap();
    sender.sync().unwrap();
    let mut receiver = Options::new().open_receiver(here.path()).unwrap();
    assert_eq!(&*receiver.receive().unwrap(), b"kept");
    receiver.sync().unwrap();
    let (mut sender, mut receiver) = small().threads().unwrap();
    assert!(matches!(sender.sync(), Err(Error::Refused(_))));
    assert!(matches!(receiver.sync(), Err(Error::Refused(_))));
}

#[test]
fn trimmed_memory_comes_back_before_it_is_written() {
    let here = Here::new("trimmed memory comes back before it is written");
    let mut sender = small().create_sender(here.path()).unwrap();
    let mut receiver = Options::new().open_receiver(here.path()).unwrap();
    let data = here.path().join("0.data");
    let blocks = || {
        use std::os::unix::fs::MetadataExt as _;
        std::fs::metadata(&data).unwrap().blocks() * 512
    };
    for _ in 0..3 {
        while sender.try_send(&[1; 5000]).unwrap() == Sent::Sent {}
        let full = blocks();
        assert!(full >= 1 << 20, "{full}");
        while receiver.try_receive().unwrap().is_some() {}
        sender.trim().unwrap();
        assert!(blocks() < full / 2, "{} of {full} were left", blocks());
    }
}

#[test]
fn a_thousand_times_opened_and_closed_nothing_is_left_but_the_channel() {
    let here = Here::new("a thousand times opened and closed, nothing is left but the channel");
    // Other tests of this process open and close as well: only what is ours counts.
    let ours = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let mappings = maps.lines().filter(|line| line.contains(here.path().to_str().unwrap())).count();
        let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        let open = links.filter_map(|fd| std::fs::read_link(fd.path()).ok()).filter(|to| to.starts_with(here.path()));
        (mappings, open.count())
    };
    for _ in 0..1000 {
        let mut sender = small().create_sender(here.path()).unwrap();
        let mut receiver = small().create_receiver(here.path()).unwrap();
        sender.send(b"x").unwrap();
        assert_eq!(&*receiver.receive().unwrap(), b"x");
        assert_ne!(ours(), (0, 0));
        drop((sender, receiver));
    }
    assert_eq!(ours(), (0, 0));
    assert_eq!(here.place.left(), [here.path()]);
}
