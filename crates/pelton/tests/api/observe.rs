//! Observation from outside: every kind of channel and state is found, also while its processes are stopped; nothing
//! changes; and files that only pretend to be pelton's do no harm.

use crate::foreign::file_of_a_silent_server;
use crate::support::*;
use pelton::observe::{Activity, Channel, Found, Kind, Observer, State};
use pelton::{Client, Options, Policy, Sent, Service};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

const CAPACITY: u64 = 1 << 16;

#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    let name = role.get("name");
    match role.get("role") {
        // Sends this number of messages of 8 bytes; with `fill`, until the lane is full, and then waits for space.
        "send" => {
            let mut sender =
                Options::new().capacity(CAPACITY).connect_deadline(deadline()).connect_sender(name).unwrap();
            for _ in 0..role.number("count").unwrap_or(0) {
                sender.send(b"8 bytes!").unwrap();
            }
            report("sent");
            if role.get("fill") == "yes" {
                while sender.send(b"8 bytes!").is_ok() {}
            }
            read_line_from_parent();
        }
        "receive" => {
            let mut receiver = Options::new().listen(name).unwrap().accept_receiver().unwrap();
            report("connected");
            while receiver.receive().is_ok() {}
        }
        "hold" => {
            let _receiver = Options::new().listen(name).unwrap().accept_receiver().unwrap();
            report("connected");
            read_line_from_parent();
        }
        "pretend" => pretend(),
        // Pages, as good as any, whose names say that they belong to a lane of another process.
        "take over" => {
            let (sender, receiver) = Options::new().capacity(CAPACITY).threads().unwrap();
            let _copies = copied_pages(name, "taken");
            drop((sender, receiver));
            report("taken");
            read_line_from_parent();
        }
        "silent server" => {
            let _file = file_of_a_silent_server(Path::new(name), "memfd:pelton-producer 1 silent");
            report("open");
            read_line_from_parent();
        }
        "stranger" => {
            // SAFETY: no pointers.
            assert_eq!(unsafe { libc::setgid(65_534) | libc::setuid(65_534) }, 0);
            // As any program has it that did not change its user.
            // SAFETY: no pointers.
            assert_eq!(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1) }, 0);
            let options = Options::new().capacity(CAPACITY).allow_uids(&[0]).connect_deadline(deadline());
            let mut sender = options.connect_sender(name).unwrap();
            sender.send(b"8 bytes!").unwrap();
            let found = Observer::new().channels();
            let channel = &named(&found, name)[0];
            assert_eq!(
                (channel.receiver.activity, channel.lanes[0].sender.activity),
                (Activity::Unknown, Activity::Alive)
            );
            assert_eq!(channel.waiting_messages(), 1);
            let of_receiver = format!("process {} ", channel.receiver.pid);
            let reason = found.unreadable.iter().find(|unreadable| unreadable.what.starts_with(&of_receiver)).unwrap();
            assert!(reason.reason.contains("it is of uid 0, this tool of uid 65534"), "{reason:?}");
            // Pages that say that they are another lane of the same receiver, whose page this process has.
            let numbers = numbers_of_consumer(std::process::id());
            let (_, of_receiver) = numbers.split_once(' ').unwrap();
            let _copies = copied_pages(&format!("7 {of_receiver}"), "added");
            report("observed");
            read_line_from_parent();
        }
        other => panic!("{other}"),
    }
}

/// Makes memfds that are not what their names say, and keeps them until the parent is done.
fn pretend() {
    let _files = [
        unsealed_memfd("pelton-producer 1 unsealed", 65536, b"pelton-P"),
        sealed_memfd("pelton-consumer 1 2 garbage", 65536, b"no page"),
        sealed_memfd("pelton-receiver connect short", 10, b"pelton-R"),
        sealed_memfd("pelton-producer 1 huge", 1 << 50, b"no page"),
        sealed_memfd("pelton-receiver connect \x1b[2J\nescape", 65536, b"no page"),
        sealed_memfd("pelton-nonsense", 65536, b""),
        sealed_memfd("pelton-producer 99999999999999999999999 x", 65536, b""),
    ];
    report("pretends");
    read_line_from_parent();
}

/// Copies of this process's pages, whose names say that they belong to the data and the receiver of these numbers.
fn copied_pages(numbers: &str, name: &str) -> Vec<File> {
    let (data, _) = numbers.split_once(' ').unwrap();
    let pages = memory_of([std::process::id(); 2]).into_values();
    let copies: Vec<File> = (pages)
        .filter_map(|(bytes, _)| {
            let name = match bytes.get(..8)? {
                b"pelton-P" => format!("pelton-producer {data} {name}"),
                b"pelton-C" => format!("pelton-consumer {numbers} {name}"),
                _ => return None,
            };
            Some(sealed_memfd(&name, bytes.len() as u64, &bytes))
        })
        .collect();
    assert_eq!(copies.len(), 2);
    copies
}

fn unsealed_memfd(name: &str, bytes: u64, content: &[u8]) -> File {
    let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&fd, bytes).unwrap();
    let file = File::from(fd);
    file.write_all_at(content, 0).unwrap();
    file
}

fn sealed_memfd(name: &str, bytes: u64, content: &[u8]) -> File {
    let file = unsealed_memfd(name, bytes, content);
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).unwrap();
    file
}

fn observe() -> Found {
    Observer::new().channels()
}

/// The channels of this name: other tests run beside this one.
fn named<'a>(found: &'a Found, name: &str) -> Vec<&'a Channel> {
    found.channels.iter().filter(|channel| channel.name == name).collect()
}

#[track_caller]
fn one<'a>(found: &'a Found, name: &str) -> &'a Channel {
    let [channel] = named(found, name)[..] else { panic!("{found:?}") };
    channel
}

fn start(name: &str, role: &str) -> Child {
    Child::start(Role::new(child, role).with("name", name))
}

#[test]
fn a_channel_is_observed_while_both_sides_are_stopped() {
    let dir = TestDir::new("a stopped channel is observed");
    let receiver = start(&dir.name(), "hold");
    let sender = Child::start(Role::new(child, "send").with("name", dir.name()).with("count", 1000));
    receiver.expect("connected");
    sender.expect("sent");
    for process in [&receiver, &sender] {
        process.signal(Signal::STOP);
        process.wait_for_state('T');
    }
    let found = observe();
    let channel = one(&found, &dir.name());
    assert_eq!((channel.kind, channel.state()), (Kind::Connect, State::ReceiverStopped));
    assert_eq!((channel.waiting_messages(), channel.waiting_bytes()), (1000, 16_000));
    assert_eq!((channel.messages(), channel.bytes(), channel.capacity()), (1000, 8000, CAPACITY));
    let [lane] = &channel.lanes[..] else { panic!("{channel:?}") };
    assert_eq!((channel.receiver.pid, lane.sender.pid), (receiver.pid(), sender.pid()));
    assert_eq!((channel.receiver.activity, lane.sender.activity), (Activity::Stopped, Activity::Stopped));
    assert!(channel.made.is_some() && lane.data().is_some());
    // The records, as a tap reads them.
    let mut record = [0; 16];
    lane.data().unwrap().read_exact_at(&mut record, lane.reading.head.offset).unwrap();
    assert_eq!(&record[8..], b"8 bytes!");
}

/// All bytes and allocated blocks of the memfds of these processes.
fn memory_of(pids: [u32; 2]) -> BTreeMap<u64, (Vec<u8>, u64)> {
    let links = |pid: u32| std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().map(|link| link.unwrap().path());
    let is_ours = |link: &PathBuf| {
        std::fs::read_link(link).is_ok_and(|link| link.to_string_lossy().starts_with("/memfd:pelton-"))
    };
    let mut memory = BTreeMap::new();
    for link in pids.into_iter().flat_map(links).filter(is_ours) {
        let file = File::open(&link).unwrap();
        let metadata = file.metadata().unwrap();
        let mut bytes = vec![0; metadata.len() as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        memory.insert(metadata.ino(), (bytes, metadata.blocks()));
    }
    memory
}

/// How often the threads of a process went to sleep by themselves: a wake-up would add one.
fn sleeps_of(pid: u32) -> u64 {
    let status =
        |task: std::io::Result<std::fs::DirEntry>| std::fs::read_to_string(task.unwrap().path().join("status"));
    let count = |status: String| -> u64 {
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).unwrap();
        line.trim().parse().unwrap()
    };
    std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().map(|task| count(status(task).unwrap())).sum()
}

#[test]
fn observing_changes_no_page_allocates_none_and_wakes_nobody() {
    let dir = TestDir::new("observing changes nothing");
    let receiver = start(&dir.name(), "receive");
    let sender = Child::start(Role::new(child, "send").with("name", dir.name()).with("count", 10));
    receiver.expect("connected");
    sender.expect("sent");
    receiver.wait_until_it_polls();
    // The sender waits in a read from its parent.
    sender.wait_for_state('S');
    let pids = [receiver.pid(), sender.pid()];
    // And not on the way there.
    let mut sleeps = pids.map(sleeps_of);
    eventually("both rest", || {
        std::thread::sleep(Duration::from_millis(50));
        let before = std::mem::replace(&mut sleeps, pids.map(sleeps_of));
        before == sleeps
    });
    let before = (memory_of(pids), pids.map(sleeps_of));
    assert!(before.0.len() >= 4, "{:?}", before.0.keys());
    let mut observer = Observer::new();
    for _ in 0..20 {
        let found = observer.channels();
        for lane in &one(&found, &dir.name()).lanes {
            lane.read().unwrap();
        }
    }
    assert_eq!(before.1, pids.map(sleeps_of), "somebody woke up");
    assert!(before.0 == memory_of(pids), "a page changed");
}

#[test]
fn a_killed_sender_a_full_lane_and_a_killed_receiver_are_each_found() {
    let dir = TestDir::new("states are found");
    let name = |number: u32| format!("{}{number}", dir.name());
    // A full lane.
    let receiver = start(&name(1), "hold");
    let sender = Child::start(Role::new(child, "send").with("name", name(1)).with("fill", "yes"));
    receiver.expect("connected");
    sender.expect("sent");
    eventually("the lane is full", || one(&observe(), &name(1)).state() == State::Full);
    // Its sender is killed.
    let pid = sender.pid();
    sender.kill();
    let found = observe();
    let channel = one(&found, &name(1));
    assert_eq!((channel.state(), channel.lanes[0].sender.pid), (State::SenderDied, pid));
    assert_eq!(channel.waiting_messages(), CAPACITY / 16 - 1);
    drop(receiver);
    // A killed receiver, whose sender has noticed nothing yet.
    let receiver = start(&name(2), "hold");
    let sender = Child::start(Role::new(child, "send").with("name", name(2)).with("count", 3));
    receiver.expect("connected");
    sender.expect("sent");
    receiver.kill();
    let found = observe();
    assert_eq!((one(&found, &name(2)).state(), one(&found, &name(2)).waiting_messages()), (State::ReceiverDied, 3));
    drop(sender);
    let found = observe();
    assert!(named(&found, &name(1)).is_empty() && named(&found, &name(2)).is_empty(), "{found:?}");
}

#[test]
fn gathers_services_listeners_and_threads_are_found() {
    let dir = TestDir::new("all kinds are found");
    let name = |number: u32| format!("{}{number}", dir.name());
    let mut gather = Options::new().gather_at(&name(1)).unwrap();
    let senders = [0; 3].map(|_| Child::start(Role::new(child, "send").with("name", name(1)).with("count", 2)));
    for _ in 0..6 {
        assert!(gather.receive_until(deadline()).unwrap().is_some());
    }
    senders.iter().for_each(|sender| sender.expect("sent"));
    let found = observe();
    let channel = one(&found, &name(1));
    assert_eq!((channel.kind, channel.state(), channel.lanes.len()), (Kind::Gather, State::Ok, 3));
    assert_eq!((channel.receiver.pid, channel.messages()), (std::process::id(), 6));
    let mut pids: Vec<u32> = channel.lanes.iter().map(|lane| lane.sender.pid).collect();
    let mut wanted: Vec<u32> = senders.iter().map(Child::pid).collect();
    pids.sort_unstable();
    wanted.sort_unstable();
    assert_eq!(pids, wanted);

    let mut service = Service::listen(&name(2)).unwrap();
    let (stopper, served) = (service.stopper(), name(2));
    std::thread::scope(|scope| {
        let serving = scope.spawn(move || service.run(1, |request| _ = request.reply(b"served")));
        let mut client = Client::connect(&served).unwrap();
        assert_eq!(&*client.call(b"hello").unwrap().ok().unwrap(), b"served");
        let found = observe();
        let kinds: Vec<Kind> = named(&found, &served).iter().map(|channel| channel.kind).collect();
        assert_eq!(kinds, [Kind::Service, Kind::Replies]);
        assert_eq!(named(&found, &served)[0].messages(), 1);
        drop(client);
        stopper.stop();
        serving.join().unwrap().unwrap();
    });

    let (mut sender, receiver) = Options::new().capacity(CAPACITY).threads().unwrap();
    sender.send(b"8 bytes!").unwrap();
    let found = observe();
    let own = |channel: &&Channel| channel.kind == Kind::Threads && channel.receiver.pid == std::process::id();
    assert!(found.channels.iter().filter(own).any(|channel| channel.waiting_messages() == 1), "{found:?}");
    drop(receiver);
}

/// Each subscription of a broadcast in a directory is found, also one that no process uses; and by which of them the
/// publisher is held up.
#[test]
fn a_broadcast_in_a_directory_is_found_with_each_subscription() {
    let dir = TestDir::new("a broadcast in a directory is found");
    let path = std::fs::canonicalize(dir.path()).unwrap().join("a/broadcast");
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let name = format!("path:{}", path.display());
    let mut publisher = Options::new().capacity(CAPACITY).create_publisher(&path).unwrap();
    // Without a subscriber.
    let found = observe();
    let alone = one(&found, &name);
    assert_eq!(
        (alone.kind, alone.state(), alone.lanes[0].sender.pid),
        (Kind::Broadcast, State::Idle, std::process::id())
    );
    assert_eq!((alone.receiver.activity, alone.lanes[0].reading.policy), (Activity::Absent, None));
    let mut gate = Options::new().open_subscriber(&path).unwrap();
    let lag = Options::new().policy(Policy::Lag).open_subscriber(&path).unwrap();
    let until = Options::new().lag_after(Duration::from_secs(60)).durable("until");
    drop(until.open_subscriber(&path).unwrap());
    drop(Options::new().durable("audit").open_subscriber(&path).unwrap());
    for _ in 0..3 {
        publisher.send(b"8 bytes!").unwrap();
    }
    drop(gate.receive().unwrap());
    let look = |policy: Policy, durable: Option<&str>| -> (u64, State, bool, Activity) {
        let found = observe();
        let all = named(&found, &name);
        assert_eq!(all.len(), 4, "{all:?}");
        let is_wanted = |channel: &&&Channel| {
            channel.durable.as_deref() == durable && channel.lanes[0].reading.policy == Some(policy)
        };
        let channel = all.iter().find(is_wanted).unwrap();
        (channel.waiting_messages(), channel.state(), channel.lanes[0].is_full(), channel.receiver.activity)
    };
    assert_eq!(look(Policy::Gate, None), (2, State::Ok, false, Activity::Alive));
    assert_eq!(look(Policy::Lag, None), (3, State::Ok, false, Activity::Alive));
    assert_eq!(look(Policy::Gate, Some("audit")), (3, State::NobodyReads, false, Activity::Absent));
    // The lane is full by those that gate, and the laggard holds nothing up.
    while publisher.try_send(&[0; 1000]).unwrap() == Sent::Sent {}
    assert!(publisher.arm(1000).unwrap().is_waiting());
    assert!(look(Policy::Gate, None).2 && look(Policy::Gate, Some("audit")).2 && look(Policy::Gate, Some("until")).2);
    let lagging = look(Policy::Lag, None);
    assert_eq!((lagging.1, lagging.2), (State::Ok, false));
    publisher.disarm();
    // By a root, once nobody has it open: the durable ones stay.
    drop((publisher, gate, lag));
    nobody_has_open(&name);
    let mut observer = Observer::new();
    observer.add_root(dir.path());
    let found = observer.channels();
    let names: Vec<_> = named(&found, &name).iter().map(|channel| channel.durable.clone()).collect();
    assert_eq!(names, [Some("audit".to_owned()), Some("until".to_owned())]);
    assert_eq!(named(&found, &name)[0].lanes[0].sender.activity, Activity::Closed);
}

/// A child that another test starts at this moment has all open files until it executes its program.
fn nobody_has_open(name: &str) {
    eventually("nobody has it open", || named(&observe(), name).is_empty());
}

#[test]
fn path_channels_are_found_below_a_root_by_directory_and_by_their_users() {
    let dir = TestDir::new("path channels are found");
    let path = std::fs::canonicalize(dir.path()).unwrap().join("a/b/channel");
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let name = format!("path:{}", path.display());
    let mut sender = Options::new().capacity(CAPACITY).create_sender(&path).unwrap();
    sender.send(b"8 bytes!").unwrap();
    // By the process that has it open.
    let found = observe();
    let channel = one(&found, &name);
    assert_eq!((channel.kind, channel.state(), channel.waiting_messages()), (Kind::Path, State::NobodyReads, 1));
    assert_eq!(channel.lanes[0].sender.pid, std::process::id());
    drop(sender);
    nobody_has_open(&name);
    let mut observer = Observer::new();
    observer.add_root(dir.path());
    observer.add_directory(&path);
    observer.add_directory(dir.path().join("none"));
    let found = observer.channels();
    let channel = one(&found, &name);
    assert_eq!((channel.state(), channel.lanes[0].sender.activity), (State::NobodyReads, Activity::Closed));
    let none = found.unreadable.iter().find(|unreadable| unreadable.what.ends_with("/none")).unwrap();
    assert!(none.reason.contains("no such directory"), "{none:?}");
}

#[test]
fn memfds_that_pretend_are_listed_with_the_reason_or_not_at_all() {
    let pretender = Child::start(Role::new(child, "pretend"));
    pretender.expect("pretends");
    let found = observe();
    assert!(found.channels.iter().all(|channel| channel.receiver.pid != pretender.pid()));
    let of_it = format!("/proc/{}/fd/", pretender.pid());
    let reasons: Vec<&str> = (found.unreadable.iter())
        .filter(|unreadable| unreadable.what.starts_with(&of_it))
        .map(|unreadable| unreadable.reason.as_str())
        .collect();
    assert_eq!(reasons.len(), 5, "{reasons:?}");
    assert_eq!(reasons.iter().filter(|reason| reason.contains("not sealed")).count(), 1, "{reasons:?}");
    assert_eq!(reasons.iter().filter(|reason| reason.contains("begins with \"no page")).count(), 3, "{reasons:?}");
}

/// The numbers that the names of a process's consumer pages say: the inodes of the data and of the receiver page.
fn numbers_of_consumer(pid: u32) -> String {
    let links = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let names = links.filter_map(|link| Some(std::fs::read_link(link.unwrap().path()).ok()?.display().to_string()));
    let of_consumer =
        names.filter_map(|name| Some(name.strip_prefix("/memfd:pelton-consumer ")?.to_owned())).next().unwrap();
    of_consumer.split(' ').take(2).collect::<Vec<_>>().join(" ")
}

#[test]
fn pages_that_name_another_process_s_lane_do_not_take_it_over() {
    let dir = TestDir::new("a lane is not taken over");
    let receiver = start(&dir.name(), "hold");
    let sender = Child::start(Role::new(child, "send").with("name", dir.name()).with("count", 3));
    receiver.expect("connected");
    sender.expect("sent");
    let taker = start(&numbers_of_consumer(sender.pid()), "take over");
    taker.expect("taken");
    let found = observe();
    let channel = one(&found, &dir.name());
    assert_eq!((channel.state(), channel.lanes.len(), channel.messages()), (State::Ok, 1, 3));
    assert_eq!((channel.receiver.pid, channel.lanes[0].sender.pid), (receiver.pid(), sender.pid()));
    // The pages of the other process are a lane of their own.
    assert_eq!(one(&found, "taken").lanes.len(), 1);
}

#[test]
fn a_file_whose_server_does_not_reply_is_not_even_opened() {
    if !is_root() {
        println!("skipped: mounting wants root");
        return;
    }
    // Of this process: the child is killed, and would leave it.
    let dir = TestDir::new("a silent file server delays an observer");
    let server = start(dir.path().to_str().unwrap(), "silent server");
    server.expect("open");
    let found = observe();
    let of_it = format!("/proc/{}/fd/", server.pid());
    let reason = found.unreadable.iter().find(|unreadable| unreadable.what.starts_with(&of_it)).expect("it is listed");
    assert!(reason.reason.contains("another file system than memfds"), "{reason:?}");
}

#[test]
fn root_observes_other_users_and_they_get_the_reason_why_they_cannot() {
    if !is_root() {
        println!("skipped: another user wants root");
        return;
    }
    let dir = TestDir::new("another user's process is listed with the reason");
    std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let listener = Options::new().allow_uids(&[65_534]).listen(&dir.name()).unwrap();
    let stranger = start(&dir.name(), "stranger");
    let receiver = listener.accept_receiver().unwrap();
    stranger.expect("observed");
    let found = observe();
    let channel = one(&found, &dir.name());
    assert_eq!((channel.receiver.activity, channel.lanes[0].sender.pid), (Activity::Alive, stranger.pid()));
    assert_eq!(channel.lanes.len(), 1, "a sender adds no lanes");
    assert_eq!(one(&found, "added").lanes.len(), 1);
    assert_eq!(channel.waiting_messages(), 1);
    drop(receiver);
}
