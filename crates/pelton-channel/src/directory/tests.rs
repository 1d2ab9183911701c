//! The files of path channels: refusals (`refused.rs`), vectors (`vectors.rs`), leftovers of a crash, roles within one
//! process and between several (`processes.rs`).
//!
//! A test that needs another user, a device or a mount runs as root; without root it prints that it is skipped.

mod processes;
mod refused;
mod vectors;

use super::*;
use pelton_lane::{ChannelPage, ConsumerPage, WINDOW, fnv1a};
use pelton_testkit::{DEADLINE, Mounted, eventually, kernel};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::ffi::OsStr;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::time::{Duration, Instant};

const CAPACITY: u64 = 1 << 16;
const LIMIT: u64 = 1000;

fn mode(mode: u32) -> Access {
    Access { uids: Vec::new(), mode }
}

fn create(path: &Path, lanes_max: u32) -> Result<Directory> {
    Directory::create(path, &mode(0o700), CAPACITY, LIMIT, lanes_max, false)
}

fn open(path: &Path) -> Result<Option<Directory>> {
    Directory::open(path, &mode(0o700))
}

fn remove(path: &Path) -> Result<()> {
    open(path)?.expect("the channel").remove()
}

/// A temporary directory for one test, and a path in it.
fn root() -> (tempfile::TempDir, PathBuf) {
    let root = tempfile::Builder::new().prefix("pelton-directory-").tempdir_in("/tmp").unwrap();
    let path = root.path().join("ch");
    (root, path)
}

/// A channel with two lanes, without a sender or a receiver.
fn channel() -> (tempfile::TempDir, PathBuf) {
    let (root, path) = root();
    let directory = create(&path, 2).unwrap();
    let _first = directory.claim_sender().unwrap();
    directory.claim_sender().unwrap();
    (root, path)
}

/// Uses all files of a channel, in every way.
fn use_all(path: &Path, access: &Access) -> Result<()> {
    let directory = Directory::open(path, access)?.expect("the channel");
    directory.is_receiver_held()?;
    let _receiver = retry_while_taken(|| directory.claim_receiver())?;
    assert!(directory.watch_receiver()?.is_some());
    let mut senders = Vec::new();
    for number in 0..directory.lanes()? {
        directory.lane_read_only(number)?;
        directory.lane_for_receiver(number)?;
        directory.is_sender_held(number)?;
        let sender = retry_while_taken(|| directory.claim_sender())?;
        assert!(directory.watch_sender(sender.number)?.is_some());
        senders.push(sender);
    }
    Ok(())
}

/// Repeats `claim` while the role is taken. A child that another test starts has copies of this process's descriptors,
/// and so its locks, between its fork and its exec.
fn retry_while_taken<T>(mut claim: impl FnMut() -> Result<T>) -> Result<T> {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        match claim() {
            Err(Error::RoleTaken { .. }) if Instant::now() < deadline => std::thread::yield_now(),
            other => return other,
        }
    }
}

#[track_caller]
fn assert_refused<T: std::fmt::Debug>(result: Result<T>, says: &[&str]) {
    let error = result.expect_err("wanted a refusal");
    assert!(matches!(error, Error::NotAChannel { .. }), "{error:?}");
    for says in says {
        assert!(error.to_string().contains(says), "{says:?} is not in: {error}");
    }
}

fn is_root() -> bool {
    let root = pelton_testkit::is_root();
    if !root {
        eprintln!("SKIPPED in part: this needs root");
    }
    root
}

fn files_of(path: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

const REGULAR: [&str; 5] = ["channel", "receiver", "0.producer", "1.consumer", "0.data"];
const FIFOS: [&str; 4] = ["receiver.bell", "receiver.life", "1.bell", "0.life"];

/// Writes into a file; for `channel` it also stores the new checksum.
fn patch(path: &Path, name: &str, offset: usize, bytes: &[u8]) {
    let file = path.join(name);
    let mut contents = std::fs::read(&file).unwrap();
    contents[offset..offset + bytes.len()].copy_from_slice(bytes);
    if name == CHANNEL {
        let checksum = fnv1a(&contents[..ChannelPage::CHECKED_BYTES]);
        contents[112..120].copy_from_slice(&checksum.to_le_bytes());
    }
    std::fs::write(&file, contents).unwrap();
}

fn flip(path: &Path, name: &str, bit: usize) {
    let file = path.join(name);
    let mut contents = std::fs::read(&file).unwrap();
    contents[bit / 8] ^= 1 << (bit % 8);
    std::fs::write(&file, contents).unwrap();
}

#[test]
fn a_channel_is_made_opened_used_and_removed() {
    for parent in ["/tmp", "/dev/shm"] {
        let root = tempfile::tempdir_in(parent).unwrap();
        let path = root.path().join("channel");
        assert!(open(&path).unwrap().is_none());
        let directory = Directory::create(&path, &mode(0o750), 1 << 20, LIMIT, 2, false).unwrap();
        let names = [
            "0.bell",
            "0.consumer",
            "0.data",
            "0.life",
            "0.producer",
            "channel",
            "receiver",
            "receiver.bell",
            "receiver.life",
        ];
        assert_eq!(files_of(&path), names);
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o7777, 0o750);
        for name in names {
            assert_eq!(std::fs::metadata(path.join(name)).unwrap().mode() & 0o7777, 0o640, "{name}");
        }
        let allocated = std::fs::metadata(path.join("0.data")).unwrap().blocks() * 512;
        assert!((WINDOW..2 * WINDOW).contains(&allocated), "{allocated}");
        drop(directory);

        let directory = Directory::open(&path, &mode(0o770)).unwrap().unwrap();
        assert_eq!(directory.path(), path);
        assert_eq!((directory.capacity(), directory.message_bytes_max()), (1 << 20, LIMIT));
        assert_eq!((directory.lanes().unwrap(), directory.lanes_max()), (1, 2));
        assert!(directory.is_from_this_boot());
        let receiver = directory.claim_receiver().unwrap();
        let sender = directory.claim_sender().unwrap();
        assert_eq!((sender.number, sender.data.bytes()), (0, 1 << 20));
        sender.data.allocate(WINDOW, 1 << 20).unwrap();
        assert_eq!(std::fs::metadata(path.join("0.data")).unwrap().len(), 1 << 20);
        sender.data.sync().unwrap();
        let lane = directory.lane_for_receiver(0).unwrap();
        // SAFETY: the byte lies within both mappings, and only this test uses the file.
        unsafe {
            sender.data.base().as_ptr().add(777_777).write_volatile(42);
            assert_eq!(lane.data.base().as_ptr().add(777_777).read_volatile(), 42);
        }
        let mut polled = [PollFd::new(&receiver.doorbell, PollFlags::IN)];
        sender.receiver_doorbell.ring();
        assert_eq!(poll(&mut polled, Some(&Timespec::default())).unwrap(), 1);
        drop((receiver, sender, lane));
        let directory = Directory::open(&path, &mode(0o750)).unwrap().unwrap();
        retry_while_taken(|| Directory::open(&path, &mode(0o750))?.expect("the channel").remove()).unwrap();
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
        // A handle that was opened before the removal reports it.
        for gone in [directory.claim_receiver().err(), directory.claim_sender().err(), directory.remove().err()] {
            assert!(matches!(gone, Some(Error::NoChannel { .. })), "{gone:?}");
        }
    }
}

#[test]
fn creating_an_existing_channel_opens_it_whatever_its_sizes() {
    let (_root, path) = channel();
    let directory = Directory::create(&path, &mode(0o700), 1 << 20, 1, 7, false).unwrap();
    assert_eq!((directory.capacity(), directory.message_bytes_max(), directory.lanes_max()), (CAPACITY, LIMIT, 2));
}

/// A thread holds a role's lock until the claim waits for it. So does a dying process whose liveness handle is closed.
#[test]
fn a_claim_waits_for_the_lock_of_a_dying_process() {
    let (_root, path) = root();
    let directory = create(&path, 1).unwrap();
    for role in ["receiver", "sender"] {
        let other = open(&path).unwrap().unwrap();
        let (held, is_held) = std::sync::mpsc::channel();
        let claiming = kernel::this_thread();
        let file = if role == "receiver" { RECEIVER.to_owned() } else { of_lane(0, PRODUCER) };
        let dying = std::thread::spawn(move || {
            let lock = other.try_role(&file).unwrap().expect("nobody has it");
            held.send(()).unwrap();
            eventually("the claim sleeps", || kernel::system_call_of(claiming) == Some(libc::SYS_clock_nanosleep));
            drop(lock);
        });
        is_held.recv().unwrap();
        match role {
            "receiver" => drop(directory.claim_receiver().unwrap()),
            _ => drop(directory.claim_sender().unwrap()),
        }
        dying.join().unwrap();
    }
}

/// A stopped process may have the lock of the durable names.
#[test]
fn neither_to_claim_nor_to_remove_a_durable_name_waits_without_a_limit() {
    let (_root, path) = root();
    let directory = Directory::create_broadcast(&path, &mode(0o700), CAPACITY, LIMIT).unwrap();
    let other = Directory::open_broadcast(&path, &mode(0o700)).unwrap().unwrap();
    let lock = other.try_role(CHANNEL).unwrap().expect("nobody has it");
    let (sender, results) = std::sync::mpsc::channel();
    let claiming = std::thread::spawn(move || {
        let claimed =
            in_call(directory.claim_subscriber_until(Some("audit"), pelton_lane::Policy::Gate, None, &Waiter::Thread));
        sender.send((claimed.unwrap_err(), directory.remove_durable("audit").unwrap_err())).unwrap();
        directory
    });
    let (claimed, removed) = results.recv_timeout(DEADLINE).expect("neither waits for the lock");
    for error in [claimed, removed] {
        assert!(matches!(&error, Error::TimedOut(why) if why.contains("durable subscription")), "{error:?}");
    }
    drop(lock);
    assert!(!claiming.join().unwrap().remove_durable("audit").unwrap());
}

/// A killed process holds the lock, and its liveness handle, until the kernel has ended it.
#[test]
fn a_claim_waits_for_a_killed_process_that_still_lives() {
    let (_root, path) = root();
    let directory = create(&path, 1).unwrap();
    for role in ["receiver", "sender"] {
        let other = open(&path).unwrap().unwrap();
        let (held, is_held) = std::sync::mpsc::channel();
        let (refuse, is_refused) = std::sync::mpsc::channel::<()>();
        let claiming = kernel::this_thread();
        let holder = std::thread::spawn(move || {
            let receiver = (role == "receiver").then(|| other.claim_receiver().unwrap());
            let sender = (role == "sender").then(|| other.claim_sender().unwrap());
            held.send(()).unwrap();
            eventually("the claim sleeps, or is refused", || {
                kernel::system_call_of(claiming) == Some(libc::SYS_clock_nanosleep) || is_refused.try_recv().is_ok()
            });
            drop((receiver, sender));
        });
        is_held.recv().unwrap();
        let claimed = match role {
            "receiver" => directory.claim_receiver().map(drop),
            _ => directory.claim_sender().map(drop),
        };
        let _ = refuse.send(());
        holder.join().unwrap();
        claimed.unwrap();
    }
}

#[test]
fn each_role_has_one_holder() {
    let (_root, path) = root();
    let directory = create(&path, 1).unwrap();
    let other = open(&path).unwrap().unwrap();
    assert!(!other.is_receiver_held().unwrap() && !other.is_sender_held(0).unwrap());
    let receiver = directory.claim_receiver().unwrap();
    let lane = directory.lane_for_receiver(0).unwrap();
    let error = other.claim_receiver().unwrap_err();
    assert!(matches!(&error, Error::RoleTaken { role, pid: 0, .. } if role == "receiver"), "{error:?}");
    assert!(error.to_string().contains("whose number is not known"), "{error}");
    // SAFETY: the page is mapped writable, and only this test writes it.
    unsafe { lane.consumer.base().cast::<ConsumerPage>().as_ref().start_generation(4711) };
    let error = other.claim_receiver().unwrap_err().to_string();
    let says = format!("{} has a receiver already, process 4711: stop that process, or wait", path.display());
    assert!(error.contains(&says), "{error}");
    let sender = directory.claim_sender().unwrap();
    // SAFETY: the page is mapped writable, and only this test writes it.
    unsafe { sender.page.base().cast::<ProducerPage>().as_ref().start_generation(4712) };
    let error = other.claim_sender().unwrap_err();
    assert!(matches!(&error, Error::RoleTaken { role, pid: 4712, .. } if role == "sender"), "{error:?}");
    assert!(other.is_receiver_held().unwrap() && other.is_sender_held(0).unwrap());
    // The check claims nothing, and needs only read permission.
    assert!(other.is_receiver_held().unwrap() && directory.is_sender_held(0).unwrap());
    // Only the lock is the role: the mappings do not keep it.
    let (ReceiverRole { lock, page, doorbell, liveness }, SenderRole { lock: sender_lock, page: sender_page, .. }) =
        (receiver, sender);
    drop((lock, sender_lock));
    retry_while_taken(|| other.claim_receiver()).unwrap();
    retry_while_taken(|| other.claim_sender()).unwrap();
    drop((page, doorbell, liveness, sender_page));
}

#[test]
fn a_sender_takes_a_free_lane_before_a_new_one_up_to_the_limit() {
    let (_root, path) = root();
    let directory = create(&path, 3).unwrap();
    let mut senders: Vec<SenderRole> = (0..3).map(|_| directory.claim_sender().unwrap()).collect();
    assert_eq!(senders.iter().map(|sender| sender.number).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(directory.lanes().unwrap(), 3);
    for (sender, pid) in senders.iter().zip([101, 102, 103]) {
        // SAFETY: the page is mapped writable, and only this test writes it.
        unsafe { sender.page.base().cast::<ProducerPage>().as_ref().start_generation(pid) };
    }
    let error = open(&path).unwrap().unwrap().claim_sender().unwrap_err();
    assert!(matches!(error, Error::RoleTaken { pid: 101, .. }), "{error:?}");
    assert!(error.to_string().contains("has a sender on all 3 lanes (processes 101, 102, 103) already"), "{error}");
    drop(senders.remove(1));
    assert_eq!(retry_while_taken(|| directory.claim_sender()).unwrap().number, 1);
    assert_refused(directory.lane_for_receiver(3), &["it has 3 lanes, wanted number 3"]);
    assert_refused(directory.watch_sender(3), &["it has 3 lanes, wanted number 3"]);
}

#[test]
fn leftovers_of_a_lane_that_a_dead_sender_began_are_replaced() {
    let (_root, path) = root();
    let directory = create(&path, 4).unwrap();
    let _first = directory.claim_sender().unwrap();
    for name in ["1.producer", "1.consumer", "1.data", "1.life"] {
        std::fs::write(path.join(name), "half").unwrap();
    }
    let second = directory.claim_sender().unwrap();
    assert_eq!((second.number, directory.lanes().unwrap()), (1, 2));
    drop((_first, second));
    use_all(&path, &mode(0o700)).unwrap();
}

#[test]
fn senders_that_open_at_the_same_time_get_a_lane_each() {
    const SENDERS: u32 = 16;
    let (_root, path) = root();
    create(&path, SENDERS).unwrap();
    let roles: Vec<SenderRole> = std::thread::scope(|scope| {
        let claim = || open(&path).unwrap().unwrap().claim_sender().unwrap();
        let threads: Vec<_> = (0..SENDERS).map(|_| scope.spawn(claim)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let mut numbers: Vec<u32> = roles.iter().map(|role| role.number).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, (0..SENDERS).collect::<Vec<_>>());
}

#[test]
fn a_liveness_handle_reports_its_end_to_every_watcher() {
    let (_root, path) = root();
    let directory = create(&path, 1).unwrap();
    assert!(directory.watch_receiver().unwrap().is_none());
    assert!(directory.watch_sender(0).unwrap().is_none());
    let receiver = directory.claim_receiver().unwrap();
    let watchers: Vec<Descriptor> = (0..3).map(|_| directory.watch_receiver().unwrap().unwrap()).collect();
    let epolls: Vec<OwnedFd> = watchers
        .iter()
        .map(|watcher| {
            let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
            epoll::add(&epoll, watcher, EventData::new_u64(7), EventFlags::empty()).unwrap();
            epoll
        })
        .collect();
    let is_over = |watcher: &Descriptor, deadline: Duration| {
        let mut fds = [PollFd::new(watcher, PollFlags::empty())];
        let timeout = Timespec::try_from(deadline).unwrap();
        poll(&mut fds, Some(&timeout)).unwrap() == 1 && fds[0].revents() == PollFlags::ERR
    };
    let reports = |epoll: &OwnedFd, deadline: Duration| {
        let mut events = [epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; 4];
        let timeout = Timespec::try_from(deadline).unwrap();
        let count = epoll::wait(epoll, &mut events[..], Some(&timeout)).unwrap();
        count == 1 && { events[0].flags } == EventFlags::ERR && { events[0].data }.u64() == 7
    };
    assert!(!watchers.iter().any(|watcher| is_over(watcher, Duration::ZERO)));
    assert!(!epolls.iter().any(|epoll| reports(epoll, Duration::ZERO)));
    drop(receiver);
    assert!(watchers.iter().all(|watcher| is_over(watcher, DEADLINE)));
    assert!(epolls.iter().all(|epoll| reports(epoll, DEADLINE)));
    eventually("there is no receiver to watch", || directory.watch_receiver().unwrap().is_none());
    // A successor ends the report: a watcher that has not polled before detects the end by the page's generation only.
    let _successor = retry_while_taken(|| directory.claim_receiver()).unwrap();
    assert!(!watchers.iter().any(|watcher| is_over(watcher, Duration::ZERO)));
    assert!(!epolls.iter().any(|epoll| reports(epoll, Duration::ZERO)));
}

#[test]
fn a_fifo_doorbell_rings_until_it_is_drained() {
    let (_root, path) = root();
    let directory = create(&path, 1).unwrap();
    let receiver = directory.claim_receiver().unwrap();
    let sender = directory.claim_sender().unwrap();
    let rings =
        || poll(&mut [PollFd::new(&receiver.doorbell, PollFlags::IN)], Some(&Timespec::default())).unwrap() == 1;
    // Also more often than the FIFO, or one read of it, has room for; no ring waits.
    for count in [1, 2, 1024, 3000, 100_000] {
        assert!(!rings(), "{count}");
        (0..count).for_each(|_| sender.receiver_doorbell.ring());
        assert!(rings(), "{count}");
        receiver.doorbell.drain();
    }
    assert!(!rings());
    receiver.doorbell.drain();
    // A ring without a receiver wakes the successor.
    drop(receiver);
    sender.receiver_doorbell.ring();
    let successor = retry_while_taken(|| directory.claim_receiver()).unwrap();
    assert_eq!(poll(&mut [PollFd::new(&successor.doorbell, PollFlags::IN)], Some(&Timespec::default())).unwrap(), 1);
}

#[test]
fn leftovers_of_a_dead_creator_are_removed_and_a_live_ones_stay() {
    let (root, path) = root();
    let at = |name: &str| root.path().join(name);
    // Process 77 died three times: before the first file, after it, and after the last file.
    std::fs::create_dir(at(".ch.pelton-77-0")).unwrap();
    std::fs::create_dir(at(".ch.pelton-77-1")).unwrap();
    std::fs::write(at(".ch.pelton-77-1/channel"), "").unwrap();
    create(&at("whole"), 1).unwrap();
    std::fs::rename(at("whole"), at(".ch.pelton-77-2")).unwrap();
    // A live creator that has made all files.
    create(&at("living"), 1).unwrap();
    std::fs::rename(at("living"), at(".ch.pelton-78-0")).unwrap();
    let lock = |temporary: &str| {
        let channel = at(temporary).join(CHANNEL);
        let mut lock = None;
        eventually("its creator has released the lock", || {
            lock = lock::try_lock(
                Descriptor::new(std::fs::File::options().write(true).open(&channel).unwrap().into()).unwrap(),
            )
            .unwrap();
            lock.is_some()
        });
        lock
    };
    drop(lock(".ch.pelton-77-2"));
    let living = lock(".ch.pelton-78-0");
    // Names that only resemble a temporary name, and temporary names of something else.
    for name in [".ch.pelton-77", ".ch.pelton-x-1", ".other.pelton-77-1", "ch.pelton-77-1", ".ch.pelton-80-0"] {
        std::fs::create_dir(at(name)).unwrap();
    }
    std::fs::write(at(".ch.pelton-80-0/letter.txt"), "text").unwrap();
    std::fs::write(at(".ch.pelton-81-0"), "text").unwrap();
    symlink(at("ch"), at(".ch.pelton-82-0")).unwrap();
    let mut left: Vec<String> = files_of(root.path());
    left.retain(|name| ![".ch.pelton-77-0", ".ch.pelton-77-1", ".ch.pelton-77-2"].contains(&name.as_str()));
    left.push("ch".to_owned());
    left.sort();
    create(&path, 1).unwrap();
    assert_eq!(files_of(root.path()), left);
    assert_eq!(files_of(&at(".ch.pelton-78-0")).len(), 9);
    use_all(&path, &mode(0o700)).unwrap();
    drop(living);
    retry_while_taken(|| remove(&path)).unwrap();
    eventually("the leftovers are removed after their creator has ended", || {
        create(&path, 1).unwrap().remove().unwrap();
        !at(".ch.pelton-78-0").exists()
    });
}

#[test]
fn a_channel_renamed_during_a_sweep_stays() {
    let (root, path) = channel();
    let parent = ParentDir::open(&path).unwrap();
    let opened = std::fs::File::open(&path).unwrap();
    // A sweeper has opened the directory by its temporary name. By now that name leads to nothing, or to another
    // directory.
    let temporary = OsStr::new(".ch.pelton-1-1");
    eventually("no lock ends the sweep early", || parent.sweep_opened(temporary, opened.as_fd()).is_err());
    std::fs::create_dir(root.path().join(temporary)).unwrap();
    parent.sweep_opened(temporary, opened.as_fd()).unwrap();
    assert_eq!(files_of(&path).len(), 14);
    use_all(&path, &mode(0o700)).unwrap();
}

#[test]
fn removal_is_refused_while_a_role_is_held_or_foreign_files_exist() {
    let (root, path) = channel();
    let remove = || remove(&path);
    let before = files_of(&path);
    let directory = open(&path).unwrap().unwrap();
    let receiver = directory.claim_receiver().unwrap();
    let error = remove().unwrap_err();
    assert!(matches!(&error, Error::RoleTaken { role, .. } if role == "receiver"), "{error:?}");
    drop(receiver);
    let sender = retry_while_taken(|| directory.claim_sender()).unwrap();
    let error = retry_while_taken(|| match remove() {
        Err(Error::RoleTaken { role, .. }) if role == "sender" => Ok("sender"),
        other => other.map(|()| "removed"),
    });
    assert_eq!(error.unwrap(), "sender");
    drop(sender);
    for foreign in ["letter.txt", "00.data", "2.data.old", "3.data", "1024.data", "-1.data", "0.letter"] {
        std::fs::write(path.join(foreign), "text").unwrap();
        assert_refused(
            retry_while_taken(remove),
            &[&format!("{foreign:?} in it is not of the channel: move that away first")],
        );
        assert_eq!(std::fs::read_to_string(path.join(foreign)).unwrap(), "text");
        std::fs::remove_file(path.join(foreign)).unwrap();
    }
    // A directory with a channel's name: without the check, only the removal itself would detect it.
    std::fs::create_dir(path.join("2.data")).unwrap();
    assert_refused(retry_while_taken(remove), &["\"2.data\" in it is not of the channel: move that away first"]);
    std::fs::remove_dir(path.join("2.data")).unwrap();
    assert_eq!(files_of(&path), before);
    use_all(&path, &mode(0o700)).unwrap();
    // Leftovers of a sender that died while it added a lane belong to the channel. A damaged channel can be removed
    // too.
    std::fs::write(path.join("2.data"), "half").unwrap();
    std::fs::remove_file(path.join("0.producer")).unwrap();
    retry_while_taken(remove).unwrap();
    assert!(files_of(root.path()).is_empty());
}

#[test]
fn a_full_file_system_is_an_error_and_leaves_nothing() {
    let (root, _) = root();
    let Some(mounted) = Mounted::tmpfs(&root.path().join("mounted"), "size=128k") else { return };
    let path = mounted.0.join("ch");
    let make = || Directory::create(&path, &mode(0o700), 1 << 20, LIMIT, 3, false);
    let error = make().unwrap_err();
    assert!(matches!(error, Error::NoSpace { bytes: WINDOW, .. }), "{error:?}");
    let says = format!("no space for 262144 bytes of {}/0.data: free some, or have it", path.display());
    assert!(error.to_string().contains(&says), "{error}");
    assert!(files_of(&mounted.0).is_empty());
    // The second lane fits, the third does not; the others stay unchanged.
    mounted.resize("640k");
    let directory = make().unwrap();
    let first = directory.claim_sender().unwrap();
    let second = directory.claim_sender().unwrap();
    let before = files_of(&path);
    let error = directory.claim_sender().unwrap_err();
    assert!(matches!(&error, Error::NoSpace { bytes: WINDOW, path, .. } if path.ends_with("2.data")), "{error:?}");
    assert_eq!((files_of(&path), directory.lanes().unwrap()), (before, 2));
    let error = first.data.allocate(WINDOW, 1 << 20).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StorageFull);
    mounted.resize("2m");
    let third = directory.claim_sender().unwrap();
    assert_eq!((third.number, directory.lanes().unwrap()), (2, 3));
    drop((directory, first, second, third));
    // Out of inodes: each file takes one, and so does the directory.
    let (root, _) = self::root();
    for inodes in 2..11 {
        let Some(mounted) = Mounted::tmpfs(&root.path().join("mounted"), &format!("size=2m,nr_inodes={inodes}")) else {
            return;
        };
        let path = mounted.0.join("ch");
        let error = Directory::create(&path, &mode(0o700), 1 << 20, LIMIT, 3, false).unwrap_err();
        assert!(matches!(error, Error::NoSpace { .. }), "{inodes}: {error:?}");
        assert!(files_of(&mounted.0).is_empty(), "{inodes}");
    }
}

#[test]
fn a_control_file_is_written_in_whole_memory_pages_of_any_size() {
    for page in [4 << 10, 16 << 10, 64 << 10] {
        for bytes in [size_of::<ChannelPage>(), size_of::<ProducerPage>(), size_of::<ConsumerPage>()] {
            let written = pages::page_bytes(bytes, page);
            assert!(written.is_multiple_of(page) && (bytes..bytes + page).contains(&written), "{bytes}: {written}");
            assert!(written as u64 <= SEGMENT_BYTES);
        }
    }
}

#[test]
fn a_file_system_that_cannot_allocate_ahead_is_refused_and_nothing_is_left() {
    let (root, _) = root();
    let point = root.path().join("mounted");
    let Some(mounted) = Mounted::by(&point, &["-t", "ramfs", "-o", "mode=700", "ramfs"]) else { return };
    assert_refused(create(&mounted.0.join("ch"), 1), &["cannot allocate space ahead: use tmpfs, ext4 or xfs"]);
    assert!(files_of(&mounted.0).is_empty());
}

#[test]
fn a_leftover_that_cannot_be_removed_is_reported_and_other_lanes_stay() {
    let (_root, path) = root();
    let directory = create(&path, 2).unwrap();
    let first = directory.claim_sender().unwrap();
    std::fs::create_dir(path.join("1.data")).unwrap();
    let error = directory.claim_sender().unwrap_err().to_string();
    assert!(error.contains("removing the leftover") && error.contains("1.data"), "{error}");
    assert_eq!((first.number, directory.lanes().unwrap()), (0, 1));
    std::fs::remove_dir(path.join("1.data")).unwrap();
    assert_eq!(directory.claim_sender().unwrap().number, 1);
}
