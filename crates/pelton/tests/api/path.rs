//! Path channels: both sides join, leave, die and get successors, in a directory that keeps the lane.

use crate::support::*;
use pelton::{Error, Options, Receiver, Sender, Sent, Wait};
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

const SIZES: Sizes = Sizes::Random(7, 3000);

fn options<M>(role: &Role) -> Options<M> {
    let options = <Options>::new().capacity(role.number("capacity").unwrap_or(1 << 20));
    options.wait(How::parse(role.get("how")).wait()).lanes(role.number("lanes").unwrap_or(1) as u32).cast()
}

/// Message `number` of lane `lane`: lane and number, then the pattern.
fn numbered(lane: u64, number: u64, into: &mut Vec<u8>) {
    payload(number, SIZES.of(number) + 16, into);
    into[..8].copy_from_slice(&number.to_le_bytes());
    into[8..16].copy_from_slice(&lane.to_le_bytes());
}

/// A receiver's record of each lane: the next number, and the count of repeated ones.
#[derive(Default)]
struct Seen(BTreeMap<u64, (u64, u64)>);

impl Seen {
    /// Checks a message: in order, whole, and repeated only if marked so.
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

/// Not a test: the entry point of a child process. Without a role it does nothing.
#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    let path = role.get("path").to_owned();
    match role.get("role") {
        // Sends the numbers that follow its predecessor's, up to the count or for ever.
        "send" => {
            let mut sender = options(&role).create_sender(&path).unwrap();
            let lane = role.number("lane").unwrap_or(0);
            let mut number = u64::from(sender.next_seq()) - 1;
            report("open");
            let mut bytes = Vec::new();
            while number < role.number("count").unwrap_or(u64::MAX) {
                numbered(lane, number, &mut bytes);
                match sender.send(&bytes) {
                    Ok(()) => number += 1,
                    // A receiver left; the lane stays for the next.
                    Err(Error::PeerDied { .. } | Error::Closed { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            report(format!("sent {number}"));
            if role.get("end") == "close" {
                sender.close().unwrap();
                report("closed");
            }
            read_line_from_parent();
        }
        // Receives that many, keeps the last ones held, and reports the numbers.
        "receive" => {
            let mut receiver = options(&role).create_receiver(&path).unwrap();
            report("open");
            let mut held = Vec::new();
            let mut numbers = Vec::new();
            for _ in 0..role.number("count").unwrap() {
                let message = receiver.receive().unwrap();
                numbers.push(u64::from_le_bytes(message[..8].try_into().unwrap()));
                if numbers.len() as u64 > role.number("count").unwrap() - role.number("hold").unwrap_or(0) {
                    held.push(message.hold());
                }
            }
            report(format!("{:?}", numbers.last()));
            read_line_from_parent();
        }
        // Receives for ever, with a report after each message.
        "consume" => {
            let mut receiver = options(&role).create_receiver(&path).unwrap();
            report("open");
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
                _ => (None, Some(options.cast().open_receiver(&path).unwrap())),
            };
            report("met");
            read_line_from_parent();
        }
        // As another user, where the mode permits it.
        "stranger" => {
            let uid = role.number("uid").unwrap() as u32;
            let gid = role.number("gid").unwrap_or(uid.into()) as u32;
            // SAFETY: no pointers.
            assert_eq!(unsafe { libc::setgid(gid) | libc::setuid(uid) }, 0);
            let options = options(&role).mode(0o777).allow_uids(&[role.number("allow").unwrap_or(uid.into()) as u32]);
            let found = match role.get("end") {
                "sender" => options.open_sender(&path).and_then(|mut sender| sender.send(b"hello")),
                _ => options.cast().open_receiver(&path).and_then(|mut receiver| receiver.receive().map(|_| ())),
            };
            report(found.err().map_or("well".to_owned(), |error| format!("{error:?}")));
        }
        // Receives under a thousand signals a second, which interrupt each wait.
        "interrupted" => {
            extern "C" fn nothing(_: libc::c_int) {}
            // SAFETY: the handler does nothing; the pointers are to local values.
            unsafe {
                libc::signal(libc::SIGALRM, nothing as *const () as libc::sighandler_t);
                let every = libc::timeval { tv_sec: 0, tv_usec: 1000 };
                let timer = libc::itimerval { it_interval: every, it_value: every };
                assert_eq!(libc::setitimer(libc::ITIMER_REAL, &timer, std::ptr::null_mut()), 0);
            }
            let mut receiver = options(&role).create_receiver(&path).unwrap();
            report("open");
            for _ in 0..role.number("count").unwrap() {
                drop(receiver.receive().unwrap());
            }
            let before = Instant::now();
            assert!(receiver.receive_until(before + Duration::from_millis(20)).unwrap().is_none());
            assert!(before.elapsed() >= Duration::from_millis(20));
            report("received");
            read_line_from_parent();
        }
        other => panic!("{other}"),
    }
}

struct Here {
    dir: TestDir,
}

impl Here {
    fn new(claim: &'static str) -> Here {
        Here { dir: TestDir::new(claim) }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("channel")
    }

    fn role(&self, role: &str) -> Role {
        Role::new(child, role).with("path", self.path().display())
    }
}

fn small<M>() -> Options<M> {
    <Options>::new().capacity(1 << 20).cast()
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
    // Its sender had closed: reported once, after the last message. Then there is no sender, and one may attach.
    assert!(receiver.receive_until(deadline()).unwrap_err().is_closed());
    assert!(receiver.receive_until(Instant::now() + Duration::from_millis(5)).unwrap().is_none());
    assert_eq!(seen.0[&0], (sent, 0));
}

#[test]
fn a_receiver_waits_for_its_first_sender_and_detects_its_close() {
    let here = Here::new("a receiver waits for its first sender and detects its close");
    let mut receiver = small().create_receiver(here.path()).unwrap();
    let child = Child::start(here.role("send").with("count", 1000).with("end", "close"));
    let mut seen = Seen::default();
    let end = receive_to_end(&mut receiver, &mut seen);
    assert!(end.is_closed(), "{end}");
    assert_eq!(seen.0[&0], (1000, 0));
    // Reported once; then there is no sender, and another may attach.
    assert!(receiver.try_receive().unwrap().is_none());
    drop(child);
    let _child = Child::start(here.role("send").with("count", 1500).with("end", "close"));
    assert!(receive_to_end(&mut receiver, &mut seen).is_closed());
    assert_eq!(seen.0[&0], (1500, 0));
    assert_eq!(receiver.generation(), 2);
}

#[test]
fn each_endpoint_waits_for_the_other_until_its_deadline() {
    let here = Here::new("each endpoint waits for the other until its deadline");
    let soon = || <Options>::new().capacity(1 << 20).connect_deadline(Instant::now() + Duration::from_millis(30));
    assert!(matches!(soon().cast().open_sender(here.path()), Err(Error::NoChannel { .. })));
    assert!(matches!(soon().cast().create_sender(here.path()), Err(Error::TimedOut(_))));
    assert!(matches!(soon().cast().open_receiver(here.path()), Err(Error::TimedOut(_))));
    for (first, second) in [("sender", "receiver"), ("receiver", "sender")] {
        let one = Child::start(here.role("wait").with("end", first));
        one.wait_until_it_polls();
        let two = Child::start(here.role("wait").with("end", second));
        one.expect("met");
        two.expect("met");
    }
}

#[test]
fn messages_a_killed_sender_committed_precede_those_of_its_successor() {
    let here = Here::new("messages a killed sender committed precede those of its successor");
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
fn a_killed_receivers_successor_starts_at_the_oldest_unreleased_message() {
    let here = Here::new("a killed receivers successor starts at the oldest unreleased message");
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
    let reported = loop {
        match sender.wait_released_until(Instant::now() + Duration::from_millis(50)) {
            Ok(drained) => assert!(!drained),
            Err(error) => break error,
        }
    };
    // 30 were released; the ten held messages, and the rest, were not.
    assert!(matches!(reported, Error::PeerDied { unreleased: 70 }), "{reported}");
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
    assert!(sender.wait_released_until(deadline()).unwrap());
}

#[test]
fn the_death_of_both_endpoints_loses_nothing_committed() {
    let here = Here::new("both dead, nothing committed is lost");
    let sender = Child::start(here.role("send"));
    sender.expect("open");
    let receiver = Child::start(here.role("receive").with("count", 500).with("hold", 5));
    receiver.expect("open");
    receiver.expect("Some(499)");
    sender.kill();
    receiver.kill();
    let mut last = Options::new().open_sender(here.path()).unwrap();
    let mut committed = u64::from(last.next_seq()) - 1;
    let mut bytes = Vec::new();
    numbered(0, committed, &mut bytes);
    // The lane may be full.
    committed += u64::from(last.try_send(&bytes).unwrap() == Sent::Sent);
    last.close().unwrap();
    let mut receiver = Options::new().open_receiver(here.path()).unwrap();
    for number in 495..committed {
        assert_eq!(&receiver.try_receive().unwrap().expect("committed")[..8], &number.to_le_bytes());
    }
    assert!(receiver.receive_until(deadline()).unwrap_err().is_closed());
}

#[test]
fn a_hundred_rolling_restarts_of_the_sender_lose_nothing() {
    let here = Here::new("a hundred rolling restarts of the sender lose nothing");
    let mut receiver = small().create_receiver(here.path()).unwrap();
    let mut seen = Seen::default();
    for round in 1..=100u64 {
        // Alternately closed, and killed when everything is sent.
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
fn a_hundred_rolling_restarts_of_the_receiver_lose_nothing() {
    let here = Here::new("a hundred rolling restarts of the receiver lose nothing");
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
            // The next receiver gets the held messages again.
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
fn random_kills_lose_nothing_and_repeat_only_messages_marked_so() {
    let here = Here::new("random kills lose nothing and repeat only messages marked so");
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
        // Everything in the lane is whole, in order, and starts where the dead receiver's releases ended.
        let mut receiver = Options::new().open_receiver(here.path()).unwrap();
        let mut last: Option<u64> = None;
        let mut bytes = Vec::new();
        // An empty lane causes no report: its previous sender is irrelevant.
        let waits = pelton::inspect::info(here.path()).unwrap().lanes[0].depth > 0;
        if waits {
            loop {
                let message = match receiver.receive_until(deadline()) {
                    Ok(message) => message.expect("messages, or an end"),
                    Err(error) => {
                        assert!(error.is_peer_died(), "round {round}: {error}");
                        break;
                    }
                };
                let number = u64::from_le_bytes(message[..8].try_into().unwrap());
                numbered(0, number, &mut bytes);
                assert_eq!(&message[..], &bytes[..], "round {round}: message {number} is damaged");
                assert!(last.is_none_or(|last| number == last + 1), "round {round}: {number} after {last:?}");
                assert!(message.is_redelivered());
                last = Some(number);
            }
        }
        drop(receiver);
        let sender = Options::new().open_sender(here.path()).unwrap();
        if let Some(last) = last {
            assert_eq!(u64::from(sender.next_seq()) - 1, last + 1, "round {round}");
        }
    }
}

#[test]
fn one_wait_serves_many_senders_by_path_and_a_dead_ones_lane_is_reused() {
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
    // One dies: the next one takes its lane.
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
fn a_flooding_sender_does_not_delay_another() {
    let here = Here::new("a flooding sender does not delay another");
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
fn the_descriptor_of_a_path_channel_is_readable_for_every_event() {
    let here = Here::new("the descriptor of a path channel is readable for every event");
    let mut receiver = small().create_receiver(here.path()).unwrap();
    assert!(receiver.arm().unwrap().is_waiting());
    assert!(!is_readable(receiver.as_fd()));
    let child = Child::start(here.role("send").with("count", 1));
    readable(receiver.as_fd());
    let mut seen = Seen::default();
    loop {
        if let Some(message) = receiver.try_receive().unwrap() {
            seen.note(&message);
            break;
        }
        if receiver.arm().unwrap().is_waiting() {
            readable(receiver.as_fd());
        }
    }
    child.expect("open");
    child.expect("sent 1");
    // Whatever rang before, there is nothing now.
    while !receiver.arm().unwrap().is_waiting() {}
    assert!(!is_readable(receiver.as_fd()));
    child.kill();
    readable(receiver.as_fd());
    let reported = loop {
        match receiver.arm() {
            Ok(_) => readable(receiver.as_fd()),
            Err(error) => break error,
        }
    };
    assert!(reported.is_peer_died(), "{reported}");
    // The descriptor is silent again: an event loop does not spin for a dead peer.
    assert!(receiver.arm().unwrap().is_waiting());
    assert!(!is_readable(receiver.as_fd()));
}

#[test]
fn a_stopped_sender_is_not_reported_dead() {
    let here = Here::new("a stopped sender is not reported dead");
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
fn a_path_channel_refuses_descriptors_and_only_it_can_sync() {
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
fn trimmed_memory_is_allocated_again_before_it_is_written() {
    let here = Here::new("trimmed memory is allocated again before it is written");
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
fn a_thousand_opens_and_closes_leave_only_the_channel() {
    let here = Here::new("a thousand times opened and closed, nothing is left but the channel");
    // Other tests of this process open and close descriptors as well: only those of this test count.
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
    assert_eq!(here.dir.entries(), [here.path()]);
}

/// Rewrites words of a file, unnoticed by its users.
fn poke(path: &std::path::Path, offset: u64, bytes: &[u8]) {
    use std::os::unix::fs::FileExt as _;
    std::fs::OpenOptions::new().write(true).open(path).unwrap().write_all_at(bytes, offset).unwrap();
}

#[test]
fn info_reports_endpoints_and_waiting_messages_and_changes_nothing() {
    let here = Here::new("info reports endpoints and waiting messages and changes nothing");
    assert!(matches!(pelton::inspect::info(here.path()), Err(Error::NoChannel { .. })));
    let mut receiver = small().lanes(2).create_receiver(here.path()).unwrap();
    let child = Child::start(here.role("send").with("count", 100).with("lanes", 2));
    child.expect("open");
    child.expect("sent 100");
    drop(receiver.receive().unwrap());
    let info = pelton::inspect::info(here.path()).unwrap();
    assert_eq!((info.capacity, info.lanes_max, info.lanes.len(), info.mode), (1 << 20, 2, 1, 0o700));
    assert!(info.is_from_this_boot);
    let own = std::process::id();
    assert_eq!((info.receiver.is_alive, info.receiver.pid, info.receiver.generation), (true, own, 1));
    let lane = &info.lanes[0];
    assert_eq!((lane.sender.is_alive, lane.sender.pid, lane.sender.generation), (true, child.pid(), 1));
    assert_eq!((lane.depth, lane.head_seq, lane.tail_seq, lane.sent.messages), (99, 2, 101, 100));
    assert!(lane.allocated_bytes >= 256 << 10);
    child.kill();
    drop(receiver);
    let info = pelton::inspect::info(here.path()).unwrap();
    assert_eq!((info.receiver.is_alive, info.receiver.is_closed), (false, true));
    assert_eq!((info.lanes[0].sender.is_alive, info.lanes[0].sender.is_closed), (false, false));
    assert_eq!(info.lanes[0].depth, 99);
}

#[test]
fn recovery_drops_torn_records_and_reports_them() {
    let here = Here::new("recovery drops torn records and reports them");
    let mut sender = small().create_sender(here.path()).unwrap();
    for number in 0..10u64 {
        sender.send(&number.to_le_bytes()).unwrap();
    }
    assert!(matches!(pelton::inspect::recover(here.path(), false), Err(Error::RoleTaken { .. })));
    drop(sender);
    let whole = pelton::inspect::check(here.path(), false).unwrap();
    assert!(whole[0].is_whole() && whole[0].kept == 10, "{whole:?}");
    // The seventh header is damaged.
    poke(&here.path().join("0.data"), 6 * 16, &[0xff; 8]);
    let torn = Options::new().open_sender(here.path());
    // A successor of the sender walks from the stored tail, after the damage; the receiver's successor finds it.
    drop(torn);
    let mut receiver = Options::new().open_receiver(here.path()).unwrap();
    for _ in 0..6 {
        drop(receiver.receive().unwrap());
    }
    assert!(matches!(receiver.receive(), Err(Error::Corrupt(_))));
    drop(receiver);
    let found = pelton::inspect::check(here.path(), false).unwrap();
    assert_eq!((found[0].kept, found[0].dropped), (0, 4), "{found:?}");
    assert!(found[0].problem.as_ref().unwrap().contains("seq of a record"), "{found:?}");
    assert_eq!(pelton::inspect::recover(here.path(), false).unwrap(), found);
    assert!(pelton::inspect::check(here.path(), false).unwrap()[0].is_whole());
    let mut sender = Options::new().open_sender(here.path()).unwrap();
    sender.send(b"after").unwrap();
    let mut receiver = Options::new().open_receiver(here.path()).unwrap();
    assert_eq!(&*receiver.receive().unwrap(), b"after");
}

/// Makes the channel look as if it was created in another boot.
fn mark_as_other_boot(path: &std::path::Path) {
    let mut header = std::fs::read(path.join("channel")).unwrap();
    header[96..112].fill(7);
    let checksum = pelton_lane::fnv1a(&header[..112]);
    header[112..120].copy_from_slice(&checksum.to_le_bytes());
    poke(&path.join("channel"), 0, &header[..120]);
    poke(&path.join("0.producer"), 96, &[7; 16]);
}

#[test]
fn after_a_reboot_opening_is_refused_and_recovery_keeps_synced_messages() {
    let here = Here::new("after a reboot opening is refused, and recovery keeps what was synced");
    for keep_unsynced in [false, true] {
        let path = here.dir.path().join(format!("{keep_unsynced}"));
        let mut sender = small().create_sender(&path).unwrap();
        (0..5u64).for_each(|number| sender.send(&number.to_le_bytes()).unwrap());
        sender.sync().unwrap();
        (5..8u64).for_each(|number| sender.send(&number.to_le_bytes()).unwrap());
        drop(sender);
        mark_as_other_boot(&path);
        for refused in [small().create_sender(&path).err(), Options::new().open_receiver(&path).err()] {
            assert!(matches!(refused, Some(Error::Rebooted { .. })), "{refused:?}");
        }
        assert!(!pelton::inspect::info(&path).unwrap().is_from_this_boot);
        let done = pelton::inspect::recover(&path, keep_unsynced).unwrap();
        let kept = if keep_unsynced { 8 } else { 5 };
        assert_eq!((done[0].kept, done[0].dropped), (kept, 8 - kept), "{done:?}");
        let mut receiver = Options::new().open_receiver(&path).unwrap();
        for number in 0..kept {
            assert_eq!(&*receiver.try_receive().unwrap().unwrap(), &number.to_le_bytes());
        }
        assert!(receiver.receive_until(deadline()).unwrap_err().is_closed());
        let mut sender = Options::new().open_sender(&path).unwrap();
        sender.send(b"after").unwrap();
        assert_eq!(&*receiver.receive().unwrap(), b"after");
    }
}

#[test]
fn removing_is_refused_while_a_role_is_held() {
    let here = Here::new("removing is refused while a role is held");
    let sender = small().create_sender(here.path()).unwrap();
    assert!(matches!(pelton::inspect::remove(here.path()), Err(Error::RoleTaken { .. })));
    drop(sender);
    let receiver = small().open_receiver(here.path()).unwrap();
    assert!(matches!(pelton::inspect::remove(here.path()), Err(Error::RoleTaken { .. })));
    drop(receiver);
    pelton::inspect::remove(here.path()).unwrap();
    assert_eq!(here.dir.entries(), Vec::<PathBuf>::new());
    assert!(matches!(pelton::inspect::remove(here.path()), Err(Error::NoChannel { .. })));
}

#[test]
fn another_user_is_refused_unless_mode_and_lists_admit_it() {
    let here = Here::new("a stranger is refused by default, and let in where mode and lists say so");
    if !is_root() {
        eprintln!("SKIPPED: needs root to be another user");
        return;
    }
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(here.dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    const NOBODY: u32 = 65534;
    let stranger = |end: &str| here.role("stranger").with("uid", NOBODY).with("end", end);
    let private = small().create_receiver(here.path()).unwrap();
    let said = Child::start(stranger("sender").with("allow", 0)).line();
    assert!(said.contains("ermission") || said.contains("mode"), "{said}");
    drop(private);
    pelton::inspect::remove(here.path()).unwrap();
    let open = || small().mode(0o777).allow_uids(&[NOBODY]);
    let mut receiver = open().create_receiver(here.path()).unwrap();
    // Its mode admits everybody; the other user does not trust an arbitrary user's directory.
    let said = Child::start(stranger("sender")).line();
    assert!(said.contains("NotAChannel"), "{said}");
    Child::start(stranger("sender").with("allow", 0)).expect("well");
    assert_eq!(&*receiver.receive_until(deadline()).unwrap().unwrap(), b"hello");
    drop(receiver);
    let mut sender = open().cast().open_sender(here.path()).unwrap();
    sender.send(b"to a stranger").unwrap();
    Child::start(stranger("receiver").with("allow", 0)).expect("well");
}

#[test]
fn a_mode_admits_its_group_and_refuses_everybody_else() {
    let here = Here::new("a mode admits its group and refuses everybody else");
    if !is_root() {
        eprintln!("SKIPPED: needs root to be another user");
        return;
    }
    const NOBODY: u32 = 65534;
    const GROUP: u32 = 4242;
    use std::os::unix::fs::PermissionsExt as _;
    // New files in it belong to the group.
    std::os::unix::fs::chown(here.dir.path(), None, Some(GROUP)).unwrap();
    std::fs::set_permissions(here.dir.path(), std::fs::Permissions::from_mode(0o2755)).unwrap();
    let options = || small().mode(0o770).allow_uids(&[NOBODY]);
    let stranger = |end: &str| here.role("stranger").with("uid", NOBODY).with("end", end).with("allow", 0);
    let mut receiver = options().create_receiver(here.path()).unwrap();
    let said = Child::start(stranger("sender")).line();
    assert!(said.contains("its mode does not let this user read it"), "{said}");
    Child::start(stranger("sender").with("gid", GROUP)).expect("well");
    assert_eq!(&*receiver.receive_until(deadline()).unwrap().unwrap(), b"hello");
    drop(receiver);
    options().cast().open_sender(here.path()).unwrap().send(b"to a member").unwrap();
    Child::start(stranger("receiver").with("gid", GROUP)).expect("well");
}

#[test]
fn containers_that_share_only_the_directory_connect_and_detect_deaths() {
    let here = Here::new("containers that share only the directory connect and detect deaths");
    if !is_root() {
        eprintln!("SKIPPED: needs root to make namespaces");
        return;
    }
    let contained = |role: Role| {
        Child::start_as(role, |command| {
            let program = command.get_program().to_owned();
            let arguments: Vec<_> = command.get_args().map(|argument| argument.to_owned()).collect();
            let mut unshare = std::process::Command::new("unshare");
            unshare.args(["--pid", "--ipc", "--net", "--mount", "--fork", "--kill-child"]).arg(program).args(arguments);
            for (key, value) in command.get_envs() {
                unshare.env(key, value.unwrap());
            }
            unshare.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
            *command = unshare;
        })
    };
    let mut receiver = small().create_receiver(here.path()).unwrap();
    let child = contained(here.role("send").with("count", 300));
    child.expect("open");
    child.expect("sent 300");
    let mut seen = Seen::default();
    seen.note(&receiver.receive_until(deadline()).unwrap().unwrap());
    child.kill();
    assert!(receive_to_end(&mut receiver, &mut seen).is_peer_died());
    assert_eq!(seen.0[&0], (300, 0));
    drop(receiver);
    let mut sender = small().open_sender(here.path()).unwrap();
    let child = contained(here.role("receive").with("count", 2).with("hold", 2));
    child.expect("open");
    for number in 300..302 {
        let mut bytes = Vec::new();
        numbered(0, number, &mut bytes);
        // The previous one may be reported now: a child that another test starts holds its liveness handle a moment
        // longer.
        while let Err(error) = sender.send(&bytes) {
            assert!(error.is_closed() || error.is_peer_died(), "{error}");
        }
    }
    child.expect("Some(301)");
    assert!(sender.resume_until(deadline()).unwrap());
    child.kill();
    let reported = sender.wait_released_until(deadline()).unwrap_err();
    assert!(matches!(reported, Error::PeerDied { unreleased: 2 }), "{reported}");
}

#[test]
fn a_full_disk_is_an_error_of_the_sender_and_nothing_is_damaged() {
    let here = Here::new("a full disk is an error of the sender, and nothing is damaged");
    let Some(mounted) = Mounted::tmpfs(here.dir.path(), "size=3m") else { return };
    let mut sender = Options::new().capacity(64 << 20).create_sender(here.path()).unwrap();
    let mut receiver = Options::new().open_receiver(here.path()).unwrap();
    let mut sent = 0;
    let mut bytes = Vec::new();
    let mut seen = Seen::default();
    for _ in 0..3 {
        let error = loop {
            numbered(0, sent, &mut bytes);
            match sender.send(&bytes) {
                Ok(()) => sent += 1,
                Err(error) => break error,
            }
        };
        assert!(matches!(error, Error::NoSpace { .. }), "{error}");
        assert!(sent > 1000, "{sent} messages fill two MiB");
        while let Some(message) = receiver.try_receive().unwrap() {
            seen.note(&message);
        }
        assert_eq!(seen.0[&0], (sent, 0));
    }
    // With more space, it continues where it stopped.
    mounted.resize("8m");
    for _ in 0..2000 {
        numbered(0, sent, &mut bytes);
        sender.send(&bytes).unwrap();
        sent += 1;
    }
    while let Some(message) = receiver.try_receive().unwrap() {
        seen.note(&message);
    }
    assert_eq!(seen.0[&0], (sent, 0));
}

#[test]
fn a_lane_of_eight_gigabytes_works_beyond_the_fourth() {
    // In memory: all of it is allocated, which takes long on a disk.
    let dir = tempfile::Builder::new().prefix("pt").tempdir_in("/dev/shm");
    let has_space = |dir: &tempfile::TempDir| {
        let space = rustix::fs::statvfs(dir.path()).unwrap();
        let memory = std::fs::read_to_string("/proc/meminfo").unwrap();
        let free = memory.lines().find_map(|line| line.strip_prefix("MemAvailable:")).unwrap();
        let free: u64 = free.trim_end_matches(" kB").trim().parse().unwrap();
        space.f_bavail * space.f_frsize > 5 << 30 && free > 7 << 20
    };
    let Some(dir) = dir.ok().filter(has_space) else {
        eprintln!("SKIPPED: needs 7 GB of memory, and 5 of /dev/shm");
        return;
    };
    let path = dir.path().join("channel");
    let mut sender = Options::new().capacity(8 << 30).create_sender(&path).unwrap();
    let mut receiver = Options::new().open_receiver(&path).unwrap();
    let bytes = (sender.message_bytes_max() as usize).min(2000 << 20);
    // The third spans both sides of it.
    let sizes = [bytes, bytes, 300 << 20];
    for (number, bytes) in (0u64..).zip(sizes) {
        // Allocated, but not written: nothing reads the zeros between.
        let mut reservation = sender.reserve(bytes).unwrap();
        reservation[..8].copy_from_slice(&number.to_le_bytes());
        reservation[bytes - 8..].copy_from_slice(&number.to_le_bytes());
        reservation.commit().unwrap();
    }
    sender.send(b"behind them").unwrap();
    assert!(pelton::inspect::info(&path).unwrap().lanes[0].allocated_bytes > 4 << 30);
    drop(sender);
    let mut sender = Options::new().open_sender(&path).unwrap();
    sender.send(b"of a successor").unwrap();
    for (number, bytes) in (0u64..).zip(sizes) {
        let message = receiver.receive().unwrap();
        assert_eq!((&message[..8], &message[bytes - 8..]), (&number.to_le_bytes()[..], &number.to_le_bytes()[..]));
    }
    assert_eq!(&*receiver.receive().unwrap(), b"behind them");
    assert_eq!(&*receiver.receive().unwrap(), b"of a successor");
}

#[test]
fn signals_interrupt_nothing() {
    let here = Here::new("signals interrupt nothing");
    let child = Child::start(here.role("interrupted").with("count", 300));
    child.expect("open");
    let mut sender = small().open_sender(here.path()).unwrap();
    let mut random = Random::new(5);
    for number in 0..300u64 {
        sender.send(&number.to_le_bytes()).unwrap();
        std::thread::sleep(Duration::from_micros(random.below(2000)));
    }
    child.expect("received");
}

#[test]
fn a_death_is_detected_while_the_peer_spins_or_polls() {
    let here = Here::new("a death is detected while the peer spins or polls");
    for how in [Wait::Spin, Wait::Block] {
        let mut receiver = small().wait(how).create_receiver(here.path()).unwrap();
        let child = Child::start(here.role("send").with("count", 0));
        child.expect("open");
        child.expect("sent 0");
        child.kill();
        let reported = match how {
            Wait::Spin => receiver.receive().map(|_| ()).unwrap_err(),
            Wait::Block => loop {
                if let Err(error) = receiver.try_receive() {
                    break error;
                }
            },
        };
        assert!(reported.is_peer_died(), "{reported}");
    }
}

#[test]
fn a_receivers_successor_is_not_mistaken_for_it_by_a_late_sender() {
    let here = Here::new("a receivers successor is not mistaken for it by a late sender");
    for closes in [true, false] {
        let mut sender = small().create_sender(here.path()).unwrap();
        let mut bytes = Vec::new();
        numbered(0, u64::from(sender.next_seq()) - 1, &mut bytes);
        let first = Child::start(here.role("receive").with("count", 1));
        first.expect("open");
        assert!(sender.resume_until(deadline()).unwrap());
        if closes {
            drop(first);
            small().open_receiver(here.path()).unwrap().close().unwrap();
        } else {
            first.kill();
        }
        // The sender has not polled since.
        let second = Child::start(here.role("receive").with("count", 1).with("hold", 1));
        second.expect("open");
        let mut reported = 0;
        while let Err(error) = sender.send(&bytes) {
            assert!(error.is_closed() || error.is_peer_died(), "{error}");
            reported += 1;
        }
        assert!(reported <= 1, "{reported}");
        assert!(sender.resume_until(deadline()).unwrap());
        assert_eq!(sender.peer().unwrap().pid, second.pid());
        assert!(second.line().starts_with("Some"));
        second.kill();
        let error = sender.wait_released_until(deadline()).unwrap_err();
        assert!(error.is_peer_died(), "{error}");
        drop(sender);
        let mut receiver = small().open_receiver(here.path()).unwrap();
        while receiver.receive().is_ok() {}
    }
}

#[test]
fn a_sender_detects_a_close_at_its_next_message() {
    let here = Here::new("a sender detects a close at its next message");
    let receiver = small().create_receiver(here.path()).unwrap();
    let mut sender = small().open_sender(here.path()).unwrap();
    sender.send(b"one").unwrap();
    receiver.close().unwrap();
    // This call finds the word, and the next one reports it.
    sender.send(b"two").unwrap();
    assert!(matches!(sender.send(b"three"), Err(Error::Closed { unreleased: 2 })));
    // Reported once.
    sender.send(b"three").unwrap();
    let mut receiver = small().open_receiver(here.path()).unwrap();
    for wanted in [b"one".as_slice(), b"two", b"three"] {
        assert_eq!(&*receiver.receive().unwrap(), wanted);
    }
    receiver.close().unwrap();
    assert!(sender.resume_until(Instant::now()).is_ok_and(|here| !here));
}

#[test]
fn a_head_that_is_no_valid_position_cannot_be_repaired() {
    let here = Here::new("a head that is no valid position cannot be repaired");
    drop(small().create_sender(here.path()).unwrap());
    for head in [0u64, 0x0000_0001_ffff_ffff] {
        poke(&here.path().join("0.consumer"), 128, &head.to_le_bytes());
        for repair in [false, true] {
            let done = match repair {
                true => pelton::inspect::recover(here.path(), false),
                false => pelton::inspect::check(here.path(), false),
            };
            assert!(matches!(done, Err(Error::Corrupt(_))), "{done:?}");
        }
        assert!(matches!(small().open_receiver(here.path()), Err(Error::Corrupt(_))));
    }
    // After a reboot nothing beyond the synced messages is walked, and the head is no better position for a write.
    mark_as_other_boot(&here.path());
    let done = pelton::inspect::recover(here.path(), false);
    assert!(matches!(done, Err(Error::Corrupt(_))), "{done:?}");
}

#[test]
fn files_of_an_overlays_lower_layer_deliver_each_message_once() {
    let _hang = Watchdog::new("files of an overlays lower layer deliver each message once");
    for receiver_is_first in [true, false] {
        let here = Here::new("on an overlay");
        let Some(layers) = Mounted::tmpfs(&here.dir.path().join("layers"), "size=32m") else { return };
        let layer = |name: &str| {
            let path = layers.0.join(name);
            std::fs::create_dir(&path).unwrap();
            path
        };
        let (lower, upper, work) = (layer("lower"), layer("upper"), layer("work"));
        let options = Options::new().capacity(1 << 20);
        let mut sender = options.create_sender(lower.join("channel")).unwrap();
        for text in ["one", "two"] {
            assert_eq!(sender.try_send(text.as_bytes()).unwrap(), Sent::Sent);
        }
        drop(sender);
        let arguments = format!("lowerdir={},upperdir={},workdir={}", lower.display(), upper.display(), work.display());
        let point = here.dir.path().join("merged");
        let Some(merged) = Mounted::by(&point, &["-t", "overlay", "-o", &arguments, "overlay"]) else { return };
        let path = merged.0.join("channel");
        let (mut sender, mut receiver);
        if receiver_is_first {
            receiver = options.cast().open_receiver(&path).unwrap();
            sender = options.cast().open_sender(&path).unwrap();
        } else {
            sender = options.cast().open_sender(&path).unwrap();
            receiver = options.cast().open_receiver(&path).unwrap();
        }
        let next = |receiver: &mut Receiver| {
            let message = receiver.receive_until(deadline()).unwrap().expect("it is delivered");
            String::from_utf8(message.to_vec()).unwrap()
        };
        assert_eq!([next(&mut receiver), next(&mut receiver)], ["one", "two"]);
        // More than the lane holds, so that the sender sees the releases.
        for number in 0..3000 {
            let text = format!("{number}{}", " word".repeat(200));
            assert!(sender.send_until(text.as_bytes(), deadline()).unwrap() == Sent::Sent, "free space is detected");
            assert_eq!(next(&mut receiver), text);
        }
        assert_eq!(sender.try_send(b"last").unwrap(), Sent::Sent);
        drop((sender, receiver));
        // Released messages stay released.
        let mut receiver = options.cast().open_receiver(&path).unwrap();
        assert_eq!(next(&mut receiver), "last");
        drop(receiver);
        drop(merged);
        // The lower layer has none of it.
        let mut receiver = options.cast().open_receiver(lower.join("channel")).unwrap();
        assert_eq!([next(&mut receiver), next(&mut receiver)], ["one", "two"]);
    }
}
