//! Many senders, one receiver: threads and processes that join and leave, served round-robin, each lane in order.

use crate::support::*;
use pelton::{Departure, Error, Event, Member, Options, Receiver, Sender, Sent};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A sender's numbered message: the sender's id, and the message's number.
fn numbered(id: u32, number: u32) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&id.to_le_bytes());
    bytes[4..].copy_from_slice(&number.to_le_bytes());
    bytes
}

fn read(message: &[u8]) -> (u32, u32) {
    let word = |at: usize| u32::from_le_bytes(message[at..at + 4].try_into().unwrap());
    (word(0), word(4))
}

/// The number of messages received from each sender, which must arrive in order.
#[derive(Default)]
struct Seen(BTreeMap<u32, u32>);

impl Seen {
    fn take(&mut self, message: &[u8]) {
        let (id, number) = read(message);
        let next = self.0.entry(id).or_default();
        assert_eq!(number, *next, "of sender {id}");
        *next += 1;
    }

    fn total(&self) -> u64 {
        self.0.values().map(|count| u64::from(*count)).sum()
    }
}

/// Receives until the end is reported.
fn receive_to_the_end(receiver: &mut Receiver) -> Seen {
    let mut seen = Seen::default();
    loop {
        match receiver.receive_until(deadline()) {
            Ok(message) => seen.take(&message.expect("nothing came")),
            Err(error) if error.is_closed() => return seen,
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    match role.get("role") {
        // Connects and sends messages, and then closes, or waits to be killed.
        "sender" => {
            let id = role.number("id").unwrap() as u32;
            let options = Options::new().capacity(1 << 16).connect_deadline(deadline());
            let mut sender = options.connect_sender(role.get("name")).unwrap();
            for number in 0..role.number("count").unwrap() as u32 {
                sender.send(&numbered(id, number)).unwrap();
            }
            if role.get("then") == "wait" {
                report("sent");
                read_line_from_parent();
            }
        }
        // Sends one message, then writes an invalid header at the next position.
        "violator" => {
            let mut sender = Sender::connect(role.get("name")).unwrap();
            sender.send(&numbered(9, 0)).unwrap();
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            let data = maps.lines().find(|line| line.contains("pelton-data")).expect("the lane's data is mapped");
            let start = usize::from_str_radix(data.split('-').next().unwrap(), 16).unwrap();
            // SAFETY: mapped writable as long as the sender lives; the first message takes 16 bytes.
            unsafe { ((start + 16) as *mut u64).write_volatile(0xdead_beef_dead_beef) };
            report("violated");
            read_line_from_parent();
            // The next send reports the error.
            while let Ok(()) = sender.send(&numbered(9, 1)) {}
            assert!(sender.send(&numbered(9, 1)).unwrap_err().is_closed());
        }
        // Marks messages as carrying descriptors that were never sent: one after another, continuously.
        "boaster" => {
            for _ in 0..role.number("count").unwrap() {
                let mut sender = Sender::connect(role.get("name")).unwrap();
                let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
                let data = maps.lines().find(|line| line.contains("pelton-data")).expect("the lane's data is mapped");
                let start = usize::from_str_radix(data.split('-').next().unwrap(), 16).unwrap();
                sender.send(&numbered(9, 0)).unwrap();
                // Two messages of 0 bytes after it, each after a mark.
                for (offset, word) in
                    [(40, 3 << 32), (32, 3 << 32 | 0x9000_0001), (24, 2 << 32), (16, 2 << 32 | 0x9000_0001_u64)]
                {
                    // SAFETY: mapped writable as long as the sender lives.
                    unsafe { ((start + offset) as *mut u64).write_volatile(word) };
                }
                read_line_from_parent();
            }
        }
        // Sends, as another user, on command.
        "stranger" => {
            // SAFETY: no pointers.
            assert_eq!(unsafe { libc::setgid(65_534) | libc::setuid(65_534) }, 0);
            let options = Options::new().allow_uids(&[0]).connect_deadline(deadline());
            let mut sender = options.connect_sender(role.get("name")).unwrap();
            report("connected");
            while read_line_from_parent() == "send" {
                for number in 0..role.number("count").unwrap_or(1) {
                    sender.send(&numbered(0, number as u32)).unwrap();
                }
                report("sent");
            }
        }
        // Sends as long as there is a receiver.
        "flooder" => {
            let mut sender = Options::new().connect_deadline(deadline()).connect_sender(role.get("name")).unwrap();
            report("flooding");
            while sender.send(&numbered(0, 0)).is_ok() {}
        }
        // Has no free descriptor when a sender connects, and has some again later.
        "crowded" => {
            let mut receiver = Options::new().gather_at(role.get("name")).unwrap();
            report("listening");
            if role.number("before").is_some() {
                assert_eq!(read(&receiver.receive_until(deadline()).unwrap().expect("no connection arrived")), (4, 0));
            }
            let wanted = rustix::process::Rlimit { current: Some(64), maximum: Some(64) };
            rustix::process::setrlimit(rustix::process::Resource::Nofile, wanted).unwrap();
            let mut full = Vec::new();
            while let Ok(fd) = rustix::io::dup(std::io::stdin()) {
                full.push(fd);
            }
            report("full");
            let relief = std::thread::spawn(|| {
                read_line_from_parent();
                drop(full);
                report("free");
            });
            let mut next = || {
                if role.get("how") == "loop" {
                    while receiver.arm().unwrap().is_waiting() {
                        let mut fds = [PollFd::new(&receiver, PollFlags::IN)];
                        assert_eq!(poll(&mut fds, Some(&Timespec { tv_sec: 60, tv_nsec: 0 })), Ok(1));
                    }
                }
                read(&receiver.receive_until(deadline()).unwrap().expect("no sender joined"))
            };
            if role.number("before").is_some() {
                assert_eq!(next(), (4, 1), "the previous member");
            }
            assert_eq!(next(), (5, 0));
            relief.join().unwrap();
        }
        // Receives that many, and then waits.
        "receiver" => {
            let mut receiver = Options::new().gather_at(role.get("name")).unwrap();
            report("listening");
            let count = role.number("count").unwrap();
            let mut found = Vec::new();
            while (found.len() as u64) < count {
                let message = receiver.receive_until(deadline()).unwrap().expect("nothing came");
                found.push(read(&message).1);
            }
            report(format_args!("received {} to {}", found[0], found[found.len() - 1] + 1));
            read_line_from_parent();
        }
        // Accepts many, round after round, and counts their remains.
        "host" => {
            let mut receiver = Options::new().membership_events(true).gather_at(role.get("name")).unwrap();
            let mut left = Vec::new();
            for round in 0..3 {
                accept_and_count_remains(&mut receiver, round);
                left.push((descriptors(), mappings()));
            }
            assert_eq!(left[1], left[2], "each lane has left");
        }
        // The parent of many senders, each a process.
        "many senders" => many_senders(&role),
        // Receives from as many as it accepts, refuses one more, and counts their remains.
        "crowded host" => host_of_many(&role),
        other => panic!("no role {other}"),
    }
}

/// Forks as many as it may. Each connects, sends, and stays until the command to exit.
fn many_senders(role: &Role) {
    let (wanted, count) = (role.number("senders").unwrap(), role.number("count").unwrap() as u32);
    // That many connect at a time; the end of the other pipe is the command to exit.
    let (tokens, token) = rustix::pipe::pipe().unwrap();
    let (go, going) = rustix::pipe::pipe().unwrap();
    rustix::io::write(&token, &[0; 16]).unwrap();
    let send_all = |id: u32| {
        let mut byte = [0];
        rustix::io::read(&tokens, &mut byte).unwrap();
        let options = Options::new().capacity(1 << 16).connect_deadline(deadline());
        let mut sender = loop {
            match options.connect_sender(role.get("name")) {
                // The receiver hangs up on a process that is late with its hello; that process connects again.
                Err(Error::HungUp) => {}
                connected => break connected.unwrap(),
            }
        };
        rustix::io::write(&token, &byte).unwrap();
        for number in 0..count {
            sender.send(&numbered(id, number)).unwrap();
        }
        assert_eq!(rustix::io::read(&go, &mut byte).unwrap(), 0);
    };
    let mut children = Vec::new();
    for id in 0..wanted as u32 {
        // SAFETY: the child continues with this thread only, allocates (which the C library supports), and exits
        // without unwinding.
        match unsafe { libc::fork() } {
            0 => {
                // SAFETY: no pointers. A child must outlive neither its parent nor a hang.
                unsafe {
                    libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                    libc::alarm(2 * DEADLINE.as_secs() as u32);
                    libc::close(std::os::fd::AsRawFd::as_raw_fd(&going));
                }
                let sent = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| send_all(id)));
                // SAFETY: ends this process.
                unsafe { libc::_exit(i32::from(sent.is_err())) };
            }
            // The system has reached its limit.
            -1 => break,
            child => children.push(child),
        }
    }
    report(children.len());
    assert_eq!(read_line_from_parent(), "go");
    drop(going);
    for child in children {
        let mut status = 0;
        // SAFETY: the child belongs to this process, and the kernel writes its status to a local integer.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0, "a sender failed");
    }
}

fn host_of_many(role: &Role) {
    let (wanted, count) = (role.number("senders").unwrap(), role.number("count").unwrap());
    let limits = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let raised = rustix::process::Rlimit { current: limits.maximum, ..limits };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).unwrap();
    let options = Options::new().membership_events(true).lanes(wanted as u32);
    let mut receiver = options.gather_at(role.get("name")).unwrap();
    let of_lanes = || std::fs::read_to_string("/proc/self/maps").unwrap().matches("pelton-").count();
    let before = (descriptors(), of_lanes());
    report("listening");
    let (mut seen, mut here) = (Seen::default(), BTreeMap::new());
    while (here.len() as u64) < wanted || seen.total() < wanted * count {
        match receiver.receive_event_until(deadline()).unwrap().expect("nothing came") {
            Event::Joined(member) => assert_eq!(here.insert(member.peer.unwrap().pid, member.lane), None),
            Event::Left(..) => panic!("a sender left"),
            Event::Message(message) => {
                assert_eq!(here.get(&message.peer().unwrap().pid), Some(&message.lane()), "of another's lane");
                seen.take(&message);
            }
        }
    }
    assert!((0..wanted as u32).eq(seen.0.keys().copied()) && seen.0.values().all(|got| u64::from(*got) == count));
    let name = role.get("name").to_owned();
    let one_more = std::thread::spawn(move || Sender::connect(&name).map(|_| ()));
    while !one_more.is_finished() {
        assert!(receiver.receive_until(Instant::now() + Duration::from_millis(1)).unwrap().is_none());
    }
    let error = one_more.join().unwrap().unwrap_err();
    assert!(matches!(&error, Error::Refused(why) if why.contains(&format!("{wanted} senders"))), "{error}");
    report("complete");
    while !here.is_empty() {
        let event = receiver.receive_event_until(deadline()).unwrap().expect("nothing came");
        let Event::Left(member, Departure::Closed) = event else { panic!("{event:?}") };
        assert!(here.remove(&member.peer.unwrap().pid).is_some());
    }
    assert!(receiver.try_receive().unwrap().is_none());
    eventually_is(before, "descriptors, and mappings of lanes", || (descriptors(), of_lanes()));
}

#[test]
fn one_receiver_accepts_a_thousand_processes_and_refuses_one_more() {
    let dir = TestDir::new("a thousand processes send to one");
    // The receiver needs three descriptors for each, and some for itself.
    let most = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum.unwrap_or(u64::MAX);
    let wanted = (most.saturating_sub(100) / 3).min(1024);
    let with = |role: &str| Role::new(child, role).with("name", dir.name()).with("count", 20);
    let mut many_senders = Child::start(with("many senders").with("senders", wanted));
    let senders = many_senders.line();
    if senders != "1024" {
        eprintln!("with {senders} processes: this system allows no more descriptors, or processes");
    }
    let host = Child::start(with("crowded host").with("senders", senders));
    host.expect("listening");
    host.expect("complete");
    many_senders.write_line("go");
    many_senders.wait_for_success();
    host.wait_for_success();
}

fn sending(dir: &TestDir, id: u32, count: u32) -> Role {
    Role::new(child, "sender").with("name", dir.name()).with("id", id).with("count", count)
}

#[test]
fn messages_of_many_threads_are_in_order_by_thread() {
    let (senders, mut receiver) = Options::new().capacity(1 << 16).gather().unwrap();
    let threads: Vec<_> = (0..8u32)
        .map(|id| {
            let senders = senders.clone();
            std::thread::spawn(move || {
                let mut sender = senders.sender().unwrap();
                (0..20_000).for_each(|number| sender.send(&numbered(id, number)).unwrap());
            })
        })
        .collect();
    drop(senders);
    let seen = receive_to_the_end(&mut receiver);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(seen.0, (0..8).map(|id| (id, 20_000)).collect());
    assert_eq!(receiver.counters().messages, 160_000, "also of lanes that have left");
    assert!(receiver.try_receive().unwrap_err().is_closed(), "reported again");
}

#[test]
fn threads_send_through_a_shared_handle() {
    let (senders, mut receiver) = Options::new().capacity(1 << 16).gather().unwrap();
    let sending = std::thread::spawn(move || {
        std::thread::scope(|scope| {
            for id in 0..4 {
                let senders = &senders;
                scope.spawn(move || {
                    (0..10_000).for_each(|number| senders.send(&numbered(id, number)).unwrap());
                });
            }
        });
    });
    let seen = receive_to_the_end(&mut receiver);
    sending.join().unwrap();
    assert_eq!(seen.total(), 40_000);
}

#[test]
fn a_thread_that_outlives_its_handles_does_not_keep_the_channel_open() {
    let (senders, mut receiver) = Options::new().capacity(1 << 16).gather().unwrap();
    // This thread's own sender still exists when its last handle is dropped.
    senders.send(&numbered(0, 0)).unwrap();
    drop(senders);
    assert_eq!(receive_to_the_end(&mut receiver).total(), 1);
}

#[test]
fn every_sender_detects_the_end_of_the_receiver() {
    let (senders, receiver) = Options::new().capacity(1 << 16).gather().unwrap();
    let mut taken_in = senders.sender().unwrap();
    let mut receiver = receiver;
    assert!(receiver.try_receive().unwrap().is_none());
    let mut just_made = senders.sender().unwrap();
    assert_eq!(just_made.try_send(b"left").unwrap(), Sent::Sent);
    drop(receiver);
    let ended = |sender: &mut Sender| loop {
        match sender.send(b"more") {
            Ok(()) => {}
            Err(error) => return error,
        }
    };
    assert!(ended(&mut taken_in).is_closed());
    assert!(ended(&mut just_made).is_closed());
    assert!(senders.sender().unwrap_err().is_closed());
}

/// Receives from four processes until all have exited.
fn accept_and_count_remains(receiver: &mut Receiver, round: u32) {
    report(format_args!("round {round}"));
    let (mut seen, mut here, mut left) = (Seen::default(), BTreeMap::new(), 0);
    while left < 4 {
        let event = receiver.receive_event_until(deadline()).unwrap().expect("nothing came");
        let Member { lane, peer, .. } = event.member();
        let pid = peer.unwrap().pid;
        match event {
            Event::Joined(_) => assert_eq!(here.insert(lane, pid), None, "it arrives once"),
            Event::Message(message) => {
                assert_eq!(here.get(&lane), Some(&pid), "it arrived before");
                seen.take(&message);
            }
            Event::Left(_, departure) => {
                assert_eq!((departure, here.remove(&lane)), (Departure::Closed, Some(pid)));
                left += 1;
            }
        }
    }
    assert_eq!(seen.0, (0..4).map(|id| (id, 5000)).collect(), "round {round}");
}

#[test]
fn processes_join_and_leave() {
    let dir = TestDir::new("processes join and leave");
    let host = Child::start(Role::new(child, "host").with("name", dir.name()));
    for round in 0..3 {
        host.expect(&format!("round {round}"));
        let children: Vec<_> = (0..4).map(|id| Child::start(sending(&dir, id, 5000))).collect();
        children.into_iter().for_each(Child::wait_for_success);
    }
    host.wait_for_success();
}

#[test]
fn a_death_is_reported_after_the_last_message_and_affects_no_other_sender() {
    let dir = TestDir::new("the death of one touches no other");
    let mut receiver = Options::new().membership_events(true).gather_at(&dir.name()).unwrap();
    let dies = Child::start(sending(&dir, 1, 1000).with("then", "wait"));
    let mut lives = Child::start(sending(&dir, 2, 1000).with("then", "wait"));
    let mut seen = Seen::default();
    let mut died = Vec::new();
    // Both have joined: their next messages fit into their lanes.
    while seen.0.len() < 2 {
        let event = receiver.receive_event_until(deadline()).unwrap().expect("nothing came");
        if let Event::Message(message) = event {
            seen.take(&message);
        }
    }
    dies.expect("sent");
    dies.kill();
    lives.expect("sent");
    while seen.total() < 2000 || died.is_empty() {
        match receiver.receive_event_until(deadline()).unwrap().expect("nothing came") {
            Event::Joined(_) => {}
            Event::Message(message) => seen.take(&message),
            Event::Left(_, Departure::PeerDied) => died.push(seen.0[&1]),
            event => panic!("{event:?}"),
        }
    }
    assert_eq!(died, [1000], "after its last message");
    lives.write_line("go");
    lives.wait_for_success();
    assert_eq!(
        Kind::of(&receiver.receive_event_until(deadline()).unwrap().expect("nothing came")),
        Kind::Left(Departure::Closed)
    );
}

#[test]
fn a_sender_that_violates_the_protocol_affects_no_other() {
    let dir = TestDir::new("a violation affects no other sender");
    let mut receiver = Options::new().membership_events(true).gather_at(&dir.name()).unwrap();
    let senders = receiver.senders().unwrap();
    let mut honest = senders.sender().unwrap();
    let mut violator = Child::start(Role::new(child, "violator").with("name", dir.name()));
    let mut of_violator = Vec::new();
    let mut of_honest = 0;
    while of_violator.last() != Some(&Kind::Left(Departure::Corrupt)) {
        honest.send(&numbered(0, of_honest)).unwrap();
        of_honest += 1;
        let mut seen = false;
        while !seen {
            match receiver.receive_event_until(deadline()).unwrap().expect("nothing came") {
                Event::Message(message) if read(&message) == (0, of_honest - 1) => seen = true,
                Event::Joined(member) if member.lane == 1 => {}
                event => of_violator.push(Kind::of(&event)),
            }
        }
    }
    assert_eq!(of_violator, [Kind::Joined, Kind::Message, Kind::Left(Departure::Corrupt)]);
    violator.expect("violated");
    violator.write_line("go");
    violator.wait_for_success();
    honest.send(&numbered(0, of_honest)).unwrap();
    assert_eq!(read(&receiver.receive_until(deadline()).unwrap().expect("nothing came")), (0, of_honest));
}

#[test]
fn a_batch_ends_where_its_sender_violates_the_protocol() {
    let dir = TestDir::new("a batch ends at a violation");
    let mut receiver = Options::new().gather_at(&dir.name()).unwrap();
    let mut violator = Child::start(Role::new(child, "violator").with("name", dir.name()));
    assert_eq!(read(receiver.receive_batch().unwrap().next().unwrap().unwrap()), (9, 0));
    violator.expect("violated");
    let mut honest = receiver.senders().unwrap().sender().unwrap();
    honest.send(&numbered(0, 0)).unwrap();
    loop {
        let mut batch = receiver.receive_batch().unwrap();
        if let Some(message) = batch.next().unwrap() {
            break assert_eq!(read(message), (0, 0));
        }
    }
    violator.write_line("go");
    violator.wait_for_success();
}

#[test]
fn a_sender_of_another_user_wakes_the_receiver_by_its_own_doorbell() {
    if !is_root() {
        return eprintln!("skipped: needs root, to be another user");
    }
    let dir = TestDir::new("another user's doorbell");
    open_to_all_users(dir.path());
    let mut receiver = Options::new().allow_uids(&[65_534]).gather_at(&dir.name()).unwrap();
    let (thread, has_thread) = std::sync::mpsc::channel();
    let receiving = std::thread::spawn(move || {
        thread.send(this_thread()).unwrap();
        for _ in 0..20 {
            assert!(receiver.receive_until(deadline()).unwrap().is_some(), "nothing came");
        }
        receiver
    });
    let thread = has_thread.recv().unwrap();
    let mut stranger = Child::start(Role::new(child, "stranger").with("name", dir.name()));
    stranger.expect("connected");
    for _ in 0..20 {
        wait_until_thread_polls(thread);
        stranger.write_line("send");
    }
    drop(receiving.join().unwrap());
    stranger.write_line("end");
    stranger.wait_for_success();
}

#[test]
fn a_flooding_sender_delays_others_by_a_bounded_number_of_quanta() {
    let dir = TestDir::new("a flooding sender starves nobody");
    let mut receiver = Options::new().gather_at(&dir.name()).unwrap();
    let flooder = Child::start(Role::new(child, "flooder").with("name", dir.name()));
    let senders = receiver.senders().unwrap();
    // Many idle senders, and one that sends occasionally.
    let _idle: Vec<_> = (0..200).map(|_| senders.sender().unwrap()).collect();
    let mut slow_sender = senders.sender().unwrap();
    while receiver.receive_until(deadline()).unwrap().expect("nothing came").peer().unwrap().pid != flooder.pid() {}
    for number in 0..200 {
        slow_sender.send(&numbered(1, number)).unwrap();
        let mut before = 0;
        loop {
            let message = receiver.receive_until(deadline()).unwrap().expect("nothing came");
            if message.peer().unwrap().pid != flooder.pid() {
                assert_eq!(read(&message), (1, number));
                break;
            }
            before += 1;
            // The flooder gets 64 messages per quantum. At first the acceptor is polled each 16 quanta, and 8 idle
            // lanes per quantum; then the sender is among the lanes that became idle last, which are polled at each
            // quantum, and so comes after the present one at the latest.
            let quanta = if number == 0 { 16 + 201_u32.div_ceil(8) + 2 } else { 1 };
            assert!(before <= 64 * quanta, "{before} messages of the flooder came first");
        }
    }
    flooder.kill();
}

#[test]
fn a_silent_connection_delays_nobody() {
    let dir = TestDir::new("a silent connection delays nobody");
    let mut receiver = Options::new().gather_at(&dir.name()).unwrap();
    let silent: Vec<_> = (0..100).map(|_| seqpacket(&dir)).collect();
    let child = Child::start(sending(&dir, 7, 100));
    let mut seen = Seen::default();
    while seen.total() < 100 {
        seen.take(&receiver.receive_until(deadline()).unwrap().expect("nothing came"));
    }
    child.wait_for_success();
    drop(silent);
}

/// A connection that never sends its hello.
fn seqpacket(dir: &TestDir) -> std::os::fd::OwnedFd {
    use rustix::net::*;
    let fd = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    connect(&fd, &SocketAddrUnix::new(dir.socket()).unwrap()).unwrap();
    fd
}

#[test]
fn a_sleeping_receiver_wakes_for_each_new_sender_and_each_message() {
    let dir = TestDir::new("a sleeping receiver is woken");
    let mut receiver = Options::new().gather_at(&dir.name()).unwrap();
    let senders = receiver.senders().unwrap();
    let (thread, has_thread) = std::sync::mpsc::channel();
    let receiving = std::thread::spawn(move || {
        thread.send(this_thread()).unwrap();
        for wanted in 0..50 {
            let message = receiver.receive_until(deadline()).unwrap().expect("nothing came");
            assert_eq!(read(&message), (0, wanted));
        }
        receiver
    });
    let thread = has_thread.recv().unwrap();
    for number in 0..50 {
        wait_until_thread_polls(thread);
        // A new sender each time: it joins, sends and leaves.
        match number % 2 {
            0 => senders.sender().unwrap().send(&numbered(0, number)).unwrap(),
            _ => Sender::connect(&dir.name()).unwrap().send(&numbered(0, number)).unwrap(),
        }
    }
    drop(receiving.join().unwrap());
}

#[test]
fn one_descriptor_is_readable_for_every_event() {
    let dir = TestDir::new("one descriptor is readable for every event");
    let mut receiver = Options::new().membership_events(true).gather_at(&dir.name()).unwrap();
    use std::os::fd::AsFd as _;
    assert!(receiver.arm().unwrap().is_waiting());
    assert!(!is_readable(receiver.as_fd()));
    let children: Vec<_> = (0..3).map(|id| Child::start(sending(&dir, id, 2000))).collect();
    let (mut seen, mut left) = (Seen::default(), 0);
    while left < 3 {
        readable(receiver.as_fd());
        while let Some(event) = receiver.try_receive_event().unwrap() {
            match event {
                Event::Message(message) => seen.take(&message),
                Event::Joined(_) => {}
                Event::Left(_, departure) => {
                    assert_eq!(departure, Departure::Closed);
                    left += 1;
                }
            }
        }
        receiver.arm().unwrap().is_waiting();
    }
    assert_eq!(seen.total(), 6000);
    assert!(receiver.arm().unwrap().is_waiting());
    assert!(!is_readable(receiver.as_fd()), "idle again");
    children.into_iter().for_each(Child::wait_for_success);
}

#[test]
fn senders_beyond_the_limit_are_refused_with_a_reason() {
    let dir = TestDir::new("more than it takes are refused");
    let mut receiver = Options::new().lanes(2).gather_at(&dir.name()).unwrap();
    let senders = receiver.senders().unwrap();
    let first = senders.sender().unwrap();
    let _second = senders.sender().unwrap();
    let error = senders.sender().unwrap_err();
    assert!(matches!(&error, Error::Refused(why) if why.contains("2 senders")), "{error}");
    let name = dir.name();
    let connecting = std::thread::spawn(move || Sender::connect(&name).map(|_| ()));
    while !connecting.is_finished() {
        let _ = receiver.receive_until(Instant::now() + Duration::from_millis(1)).unwrap();
    }
    let error = connecting.join().unwrap().unwrap_err();
    assert!(matches!(&error, Error::Refused(why) if why.contains("2 senders")), "{error}");
    drop(first);
    while receiver.try_receive().unwrap().is_some() {}
    let _third = senders.sender().unwrap();
}

#[test]
fn held_messages_outlive_their_senders() {
    let (senders, mut receiver) = Options::new().capacity(1 << 16).membership_events(true).gather().unwrap();
    let mut sender = senders.sender().unwrap();
    sender.send(b"kept").unwrap();
    drop(sender);
    let mut held = Vec::new();
    loop {
        match receiver.receive_event_until(deadline()).unwrap().expect("nothing came") {
            Event::Joined(_) => {}
            Event::Message(message) => held.push(message.hold()),
            Event::Left(..) => break,
        }
    }
    assert_eq!(&*held[0], b"kept");
    let mut next = senders.sender().unwrap();
    next.send(b"next").unwrap();
    drop(held);
    assert_eq!(Kind::of(&receiver.receive_event_until(deadline()).unwrap().unwrap()), Kind::Joined);
    assert_eq!(&*receiver.receive_until(deadline()).unwrap().unwrap(), b"next");
}

#[test]
fn threads_with_a_deadline_wait_for_space_in_their_own_lanes() {
    let _hang = Watchdog::new("threads_with_a_deadline_wait_for_space_in_their_own_lanes");
    let (senders, mut receiver) = Options::new().capacity(1 << 16).gather().unwrap();
    let mut sent = 0;
    while senders.send_until(&[7; 10_000], pelton::Deadline::Now).unwrap() == Sent::Sent {
        sent += 1;
    }
    let until = Instant::now() + Duration::from_millis(30);
    assert_eq!(senders.send_until(&[7; 10_000], until).unwrap(), Sent::TimedOut);
    assert!(sent > 0 && Instant::now() >= until);
    std::thread::scope(|scope| {
        // Another thread's lane has space.
        let other = scope.spawn(|| senders.send_until(&[8; 10_000], deadline()).unwrap());
        assert_eq!(other.join().unwrap(), Sent::Sent);
        scope.spawn(|| (0..=sent).for_each(|_| _ = receiver.receive_until(deadline()).unwrap().unwrap()));
        assert_eq!(senders.send_until(&[7; 10_000], deadline()).unwrap(), Sent::Sent);
    });
}

#[test]
fn copies_and_batches_skip_events() {
    let (senders, mut receiver) = Options::new().capacity(1 << 16).membership_events(true).gather().unwrap();
    let mut buffer = Vec::new();
    for number in 0..10u32 {
        let mut sender = senders.sender().unwrap();
        sender.send(&number.to_le_bytes()).unwrap();
        sender.send(&number.to_le_bytes()).unwrap();
        drop(sender);
        assert_eq!(receiver.receive_into(&mut buffer).unwrap(), 4);
        let mut batch = receiver.receive_batch().unwrap();
        assert_eq!(batch.next().unwrap().unwrap(), number.to_le_bytes());
        assert!(batch.next().unwrap().is_none());
    }
}

#[test]
fn a_stopped_sender_counts_as_alive() {
    let dir = TestDir::new("a stopped sender counts as alive");
    let mut receiver = Options::new().membership_events(true).gather_at(&dir.name()).unwrap();
    let mut child = Child::start(sending(&dir, 0, 100).with("then", "wait"));
    assert_eq!(
        Kind::of(&receiver.receive_event_until(deadline()).unwrap().expect("no connection arrived")),
        Kind::Joined
    );
    child.expect("sent");
    child.signal(Signal::STOP);
    child.wait_for_state('T');
    for number in 0..100 {
        assert_eq!(read(&receiver.receive_until(deadline()).unwrap().expect("nothing came")), (0, number));
    }
    assert!(receiver.receive_until(Instant::now() + Duration::from_millis(20)).unwrap().is_none());
    child.signal(Signal::CONT);
    child.write_line("go");
    child.wait_for_success();
    assert_eq!(
        Kind::of(&receiver.receive_event_until(deadline()).unwrap().expect("nothing came")),
        Kind::Left(Departure::Closed)
    );
}

#[test]
fn a_sender_that_survives_its_receiver_resumes_with_the_next() {
    let dir = TestDir::new("a sender survives its receiver");
    let receiver =
        |count: u32| Child::start(Role::new(child, "receiver").with("name", dir.name()).with("count", count));
    let first = receiver(50);
    first.expect("listening");
    let mut sender = Sender::connect(&dir.name()).unwrap();
    for number in 0..100 {
        sender.send(&numbered(0, number)).unwrap();
    }
    first.expect("received 0 to 50");
    first.kill();
    let error = sender.wait_released().unwrap_err();
    assert!(error.is_peer_died() && error.to_string().contains("50"), "{error}");
    let mut second = receiver(50);
    second.expect("listening");
    assert!(sender.resume_until(deadline()).unwrap());
    second.expect("received 50 to 100");
    second.write_line("");
    drop(sender);
    second.wait_for_success();
}

#[test]
fn each_sender_joins_before_its_first_message() {
    let (senders, mut receiver) = Options::new().capacity(1 << 16).membership_events(true).gather().unwrap();
    for id in 0..3 {
        senders.sender().unwrap().send(&numbered(id, 0)).unwrap();
    }
    let mut events = Vec::new();
    while events.len() < 9 {
        let event = receiver.receive_event_until(deadline()).unwrap().expect("nothing came");
        events.push((event.member().lane, Kind::of(&event)));
    }
    // Round-robin, but each lane in order.
    for lane in 1..=3 {
        let of_lane: Vec<_> = events.iter().filter(|(of, _)| *of == lane).map(|(_, kind)| *kind).collect();
        assert_eq!(of_lane, [Kind::Joined, Kind::Message, Kind::Left(Departure::Closed)], "{events:?}");
    }
}

#[test]
fn a_thread_sends_again_after_all_handles_were_dropped() {
    let (senders, mut receiver) = Options::new().capacity(1 << 16).gather().unwrap();
    // Keeps the channel open meanwhile.
    let kept = senders.sender().unwrap();
    senders.send(&numbered(0, 0)).unwrap();
    drop(senders);
    // Before the receiver has detected it, and after.
    receiver.senders().unwrap().send(&numbered(1, 0)).unwrap();
    let mut seen = Seen::default();
    while let Some(message) = receiver.try_receive().unwrap() {
        seen.take(&message);
    }
    assert_eq!(seen.total(), 2);
    receiver.senders().unwrap().send(&numbered(2, 0)).unwrap();
    drop(kept);
    assert_eq!(receive_to_the_end(&mut receiver).0, [(2, 1)].into());
}

#[test]
fn an_edge_triggered_loop_accepts_every_pending_connection() {
    use rustix::event::{Timespec, epoll};
    let dir = TestDir::new("an edge-triggered loop");
    let mut receiver = Options::new().gather_at(&dir.name()).unwrap();
    let edges = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    epoll::add(&edges, &receiver, epoll::EventData::new_u64(0), epoll::EventFlags::IN | epoll::EventFlags::ET).unwrap();
    // More than one call accepts; only the last of them sends its hello, which must be answered.
    let _silent: Vec<_> = (0..40).map(|_| seqpacket(&dir)).collect();
    let last = seqpacket(&dir);
    rustix::net::send(&last, b"?", rustix::net::SendFlags::NOSIGNAL).unwrap();
    let mut events = [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; 1];
    loop {
        assert!(receiver.try_receive().unwrap().is_none());
        assert!(receiver.arm().unwrap().is_waiting());
        if epoll::wait(&edges, &mut events, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 0 {
            break;
        }
    }
    use std::os::fd::AsFd as _;
    assert!(is_readable(last.as_fd()), "the last one waits to be let in");
    assert!(!is_readable(receiver.as_fd()), "nobody else does");
}

#[test]
fn without_descriptors_newcomers_are_refused_and_members_continue() {
    for (how, here_before) in [("block", false), ("loop", false), ("block", true), ("loop", true)] {
        let dir = TestDir::new("descriptors run out and become free");
        let host = Role::new(child, "crowded").with("name", dir.name()).with("how", how);
        let mut host = Child::start(if here_before { host.with("before", 1) } else { host });
        host.expect("listening");
        let mut before = here_before.then(|| Sender::connect(&dir.name()).unwrap());
        let mut send = |number| before.as_mut().map(|sender| sender.send(&numbered(4, number)).unwrap());
        send(0);
        host.expect("full");
        // Not before a second has passed, in which some might have become free.
        let refused = Options::new().connect_sender(&dir.name()).unwrap_err();
        let wanted = format!("process {} has no descriptor left for one more peer (RLIMIT_NOFILE is 64)", host.pid());
        assert!(matches!(&refused, Error::Refused(why) if why.contains(&wanted)), "{refused}");
        send(1);
        host.write_line("free them");
        host.expect("free");
        // No other event notifies the sleeping host of them.
        Sender::connect(&dir.name()).unwrap().send(&numbered(5, 0)).unwrap();
        host.wait_for_success();
    }
}

#[test]
fn a_send_from_an_ending_threads_destructor_fails_with_its_reason() {
    struct Last(pelton::Senders, std::sync::mpsc::Sender<Option<String>>);
    impl Drop for Last {
        fn drop(&mut self) {
            let sent = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.0.send(b"last")));
            let _ = self.1.send(sent.ok().map(|sent| sent.unwrap_err().to_string()));
        }
    }
    thread_local!(static LAST: std::cell::OnceCell<Last> = const { std::cell::OnceCell::new() });
    let (senders, mut receiver) = Options::new().capacity(1 << 16).gather().unwrap();
    let (error_sender, events) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        // Dropped before the values created after it.
        LAST.with(|last| _ = last.set(Last(senders.clone(), error_sender)));
        senders.send(b"first").unwrap();
    });
    let error = events.recv().unwrap().expect("it panicked");
    assert!(error.contains("ending"), "{error}");
    assert_eq!(&*receiver.receive_until(deadline()).unwrap().unwrap(), b"first");
    assert!(receiver.receive_until(deadline()).unwrap_err().is_closed());
}

#[test]
fn a_silent_connection_occupies_no_slot() {
    let dir = TestDir::new("a silent connection occupies no slot");
    let mut receiver = Options::new().lanes(2).gather_at(&dir.name()).unwrap();
    let _lane = receiver.senders().unwrap().sender().unwrap();
    let silent = seqpacket(&dir);
    assert!(receiver.arm().unwrap().is_waiting());
    let child = Child::start(sending(&dir, 7, 1));
    assert_eq!(read(&receiver.receive_until(deadline()).unwrap().expect("nothing came")), (7, 0));
    child.wait_for_success();
    drop(silent);
}

#[test]
fn no_sender_joins_after_the_end() {
    let (senders, mut receiver) = Options::new().gather().unwrap();
    drop(senders);
    assert!(receiver.receive().unwrap_err().is_closed());
    assert!(receiver.senders().unwrap_err().is_closed());
}

fn open_to_all_users(path: &std::path::Path) {
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
}

#[test]
fn the_descriptor_stays_readable_until_another_users_messages_are_received() {
    if !is_root() {
        return eprintln!("skipped: needs root, to be another user");
    }
    let dir = TestDir::new("another user's messages");
    open_to_all_users(dir.path());
    let mut receiver = Options::new().membership_events(true).allow_uids(&[65_534]).gather_at(&dir.name()).unwrap();
    let mut stranger = Child::start(Role::new(child, "stranger").with("name", dir.name()).with("count", 5000));
    assert_eq!(
        Kind::of(&receiver.receive_event_until(deadline()).unwrap().expect("no connection arrived")),
        Kind::Joined
    );
    stranger.expect("connected");
    assert!(receiver.arm().unwrap().is_waiting());
    stranger.write_line("send");
    stranger.expect("sent");
    // One message each time that the loop wakes, without arming in between.
    for number in 0..5000 {
        use std::os::fd::AsFd as _;
        assert!(is_readable(receiver.as_fd()), "before message {number}");
        assert_eq!(read(&receiver.try_receive().unwrap().expect("nothing came")), (0, number));
    }
    stranger.write_line("end");
    stranger.wait_for_success();
}

#[test]
fn the_descriptor_stays_readable_until_a_survivors_messages_are_received() {
    use std::os::fd::AsFd as _;
    let dir = TestDir::new("the descriptor reports a survivor's messages");
    let first = Child::start(Role::new(child, "receiver").with("name", dir.name()).with("count", 1));
    first.expect("listening");
    let mut sender = Sender::connect(&dir.name()).unwrap();
    for number in 0..5 {
        sender.send(&numbered(0, number)).unwrap();
    }
    first.expect("received 0 to 1");
    first.kill();
    assert!(sender.wait_released().unwrap_err().is_peer_died());
    let mut receiver = Options::new().membership_events(true).gather_at(&dir.name()).unwrap();
    assert!(receiver.arm().unwrap().is_waiting());
    let resuming = std::thread::spawn(move || {
        assert!(sender.resume_until(deadline()).unwrap());
        sender
    });
    loop {
        readable(receiver.as_fd());
        if let Some(event) = receiver.try_receive_event().unwrap() {
            break assert_eq!(Kind::of(&event), Kind::Joined);
        }
    }
    // Not armed meanwhile, so no doorbell rings for the earlier messages.
    let _sender = resuming.join().unwrap();
    for number in 1..5 {
        assert!(is_readable(receiver.as_fd()), "before message {number}");
        assert_eq!(read(&receiver.try_receive().unwrap().expect("nothing came")), (0, number));
    }
    assert!(receiver.arm().unwrap().is_waiting());
    assert!(!is_readable(receiver.as_fd()), "idle again");
}

/// Receives by `take`, which returns the number of messages taken of the first lane, or 0 for the message of the
/// second.
#[track_caller]
fn second_lane_gets_its_quantum(mut take: impl FnMut(&mut Receiver) -> u32) {
    let (senders, mut receiver) = Options::new().capacity(1 << 16).gather().unwrap();
    let [mut many, mut few] = std::array::from_fn(|_| senders.sender().unwrap());
    many.send(b"many").unwrap();
    assert_eq!(receiver.receive().unwrap().lane(), 1);
    few.send(b"few").unwrap();
    let mut taken = 0;
    loop {
        while many.try_send(b"many").unwrap() == Sent::Sent {}
        match take(&mut receiver) {
            0 => break,
            more => taken += more,
        }
        assert!(taken <= 128, "{taken} messages of one lane came first");
    }
}

#[test]
fn a_quantum_ends_though_messages_are_held() {
    second_lane_gets_its_quantum(|receiver| {
        let message = receiver.receive().unwrap();
        let lane = message.lane();
        drop(message.hold());
        u32::from(lane == 1)
    });
}

#[test]
fn a_quantum_ends_within_a_batch_of_a_binding() {
    second_lane_gets_its_quantum(|receiver| {
        let message = receiver.receive().unwrap();
        let lane = message.lane();
        std::mem::forget(message);
        let mut taken = 0;
        while taken < 1000 && receiver.take_for_batch(taken == 0, |_| ()).unwrap() {
            taken += 1;
        }
        receiver.release_batch();
        if lane == 1 { taken } else { 0 }
    });
}

#[test]
fn missing_descriptors_are_not_waited_for_and_violate_the_protocol() {
    let dir = TestDir::new("missing descriptors");
    let mut receiver = Options::new().membership_events(true).gather_at(&dir.name()).unwrap();
    let mut child = Child::start(Role::new(child, "boaster").with("name", dir.name()).with("count", 150));
    for round in 0..150 {
        let mut events = Vec::new();
        while events.last() != Some(&Kind::Left(Departure::Corrupt)) {
            // It does not ring.
            let soon = Instant::now() + Duration::from_millis(1);
            let Some(event) = receiver.receive_event_until(soon).unwrap() else { continue };
            events.push(Kind::of(&event));
            if let Event::Message(mut message) = event
                && message.descriptor_count() > 0
                && round % 2 == 0
            {
                assert!(matches!(message.take_descriptors(), Err(Error::Corrupt(_))));
            }
        }
        assert_eq!(events, [Kind::Joined, Kind::Message, Kind::Message, Kind::Left(Departure::Corrupt)]);
        child.write_line("continue");
    }
    child.wait_for_success();
}
