//! The files of path channels: what is refused, what a crash leaves, who has which role.
//!
//! What needs another user, a device or a mount runs as root and says so where it does not.

use super::*;
use pelton_lane::{ChannelPage, ConsumerPage, WINDOW, fnv1a};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader, ErrorKind, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

const CAPACITY: u64 = 1 << 16;
const LIMIT: u64 = 1000;
/// Far above what anything takes on a loaded machine; only a hang reaches it.
const PATIENCE: Duration = Duration::from_secs(60);

fn mode(mode: u32) -> Access {
    Access { uids: Vec::new(), mode }
}

fn create(path: &Path, lanes_max: u32) -> Result<Directory> {
    Directory::create(path, &mode(0o700), CAPACITY, LIMIT, lanes_max)
}

fn open(path: &Path) -> Result<Option<Directory>> {
    Directory::open(path, &mode(0o700))
}

fn remove(path: &Path) -> Result<()> {
    open(path)?.expect("the channel").remove()
}

/// A directory of a test's own, removed with what is in it, and a path in it.
fn root() -> (tempfile::TempDir, PathBuf) {
    let root = tempfile::Builder::new().prefix("pelton-directory-").tempdir_in("/tmp").unwrap();
    let path = root.path().join("ch");
    (root, path)
}

/// A channel with two lanes, and nobody there.
fn channel() -> (tempfile::TempDir, PathBuf) {
    let (root, path) = root();
    let directory = create(&path, 2).unwrap();
    let _first = directory.claim_sender().unwrap();
    directory.claim_sender().unwrap();
    (root, path)
}

/// Everything that anybody does with a channel's files.
fn use_all(path: &Path, access: &Access) -> Result<()> {
    let directory = Directory::open(path, access)?.expect("the channel");
    directory.is_receiver_held()?;
    let _receiver = soon(|| directory.claim_receiver())?;
    assert!(directory.watch_receiver()?.is_some());
    let mut senders = Vec::new();
    for number in 0..directory.lanes()? {
        directory.lane_to_look_at(number)?;
        directory.lane_for_receiver(number)?;
        directory.is_sender_held(number)?;
        let sender = soon(|| directory.claim_sender())?;
        assert!(directory.watch_sender(sender.number)?.is_some());
        senders.push(sender);
    }
    Ok(())
}

/// What a role answers once it is free. A child that another test starts has this process's descriptors, and so its locks,
/// from when it is forked until it runs another program.
fn soon<T>(mut claim: impl FnMut() -> Result<T>) -> Result<T> {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        match claim() {
            Err(Error::RoleTaken { .. }) if Instant::now() < deadline => std::thread::yield_now(),
            other => return other,
        }
    }
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
        std::thread::yield_now();
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
    let root = rustix::process::geteuid().is_root();
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

/// Writes into a file; into `channel` with the checksum that fits.
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
    for place in ["/tmp", "/dev/shm"] {
        let root = tempfile::tempdir_in(place).unwrap();
        let path = root.path().join("channel");
        assert!(open(&path).unwrap().is_none());
        let directory = Directory::create(&path, &mode(0o750), 1 << 20, LIMIT, 2).unwrap();
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
        // SAFETY: a byte of this process's mappings of the same file, which nothing else uses.
        unsafe {
            sender.data.base().as_ptr().add(777_777).write_volatile(42);
            assert_eq!(lane.data.base().as_ptr().add(777_777).read_volatile(), 42);
        }
        let mut polled = [PollFd::new(&receiver.bell, PollFlags::IN)];
        sender.receiver_bell.ring();
        assert_eq!(poll(&mut polled, Some(&Timespec::default())).unwrap(), 1);
        drop((receiver, sender, lane));
        let directory = Directory::open(&path, &mode(0o750)).unwrap().unwrap();
        soon(|| Directory::open(&path, &mode(0o750))?.expect("the channel").remove()).unwrap();
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
        // One that was opened before the removal is told.
        for gone in [directory.claim_receiver().err(), directory.claim_sender().err(), directory.remove().err()] {
            assert!(matches!(gone, Some(Error::NoChannel { .. })), "{gone:?}");
        }
    }
}

#[test]
fn creating_what_is_there_opens_it_whatever_its_sizes() {
    let (_root, path) = channel();
    let directory = Directory::create(&path, &mode(0o700), 1 << 20, 1, 7).unwrap();
    assert_eq!((directory.capacity(), directory.message_bytes_max(), directory.lanes_max()), (CAPACITY, LIMIT, 2));
}

#[test]
fn sizes_and_paths_that_cannot_be_are_refused() {
    let (root, path) = root();
    for (capacity, limit, lanes, bits, option) in [
        (CAPACITY + 1, LIMIT, 1, 0o700, "capacity is 65537"),
        (1 << 35, LIMIT, 1, 0o700, "capacity is 34359738368"),
        (CAPACITY, CAPACITY, 1, 0o700, "message_bytes_max is 65536"),
        (CAPACITY, LIMIT, 0, 0o700, "lanes_max is 0"),
        (CAPACITY, LIMIT, 1025, 0o700, "lanes_max is 1025"),
        (CAPACITY, LIMIT, 1, 0o070, "mode is 56"),
        (CAPACITY, LIMIT, 1, 0o1700, "mode is 960"),
    ] {
        let error = Directory::create(&path, &mode(bits), capacity, limit, lanes).unwrap_err().to_string();
        assert!(error.contains(option), "{option}: {error}");
    }
    assert_refused(create(Path::new(""), 1), &["name a directory"]);
    assert_refused(create(&root.path().join(".."), 1), &["does not end in a name"]);
    assert_refused(create(&root.path().join("absent/ch"), 1), &["absent is not there: make it first"]);
    assert_refused(create(&root.path().join("x".repeat(250)), 1), &["250 bytes", "choose a shorter one"]);
    assert!(open(&root.path().join("absent/ch")).unwrap().is_none());
    assert!(files_of(root.path()).is_empty());
}

#[test]
fn a_path_that_is_something_else_is_refused_and_left_alone() {
    let (root, good) = channel();
    let at = |name: &str| root.path().join(name);
    std::fs::write(at("file"), "text").unwrap();
    symlink(&good, at("link")).unwrap();
    symlink("nowhere", at("dangling")).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, at("fifo"), Mode::from_raw_mode(0o600)).unwrap();
    std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
    for name in ["empty", "others"] {
        std::fs::create_dir(at(name)).unwrap();
        std::fs::set_permissions(at(name), PermissionsExt::from_mode(0o700)).unwrap();
    }
    std::fs::write(at("others/letter.txt"), "text").unwrap();
    let before = files_of(root.path());
    for (name, says) in [
        ("file", "it is a regular file, wanted a directory"),
        ("link", "it is a symbolic link, wanted a directory"),
        ("link/", "it is a symbolic link, wanted a directory"),
        ("dangling", "it is a symbolic link"),
        ("fifo", "it is a FIFO"),
        ("socket", "it is a socket"),
        ("empty", "it is an empty directory, wanted a channel's: remove it"),
        ("others", "it has no file channel but \"letter.txt\": choose another path"),
        ("file/below", "a directory above it is none"),
    ] {
        assert_refused(open(&at(name)), &[says]);
        assert_refused(create(&at(name), 1), &[says]);
    }
    assert_eq!(files_of(root.path()), before);
    assert_eq!(files_of(&at("others")), ["letter.txt"]);
    assert_eq!(std::fs::read_to_string(at("file")).unwrap(), "text");
}

#[test]
fn a_channel_of_another_version_or_of_impossible_numbers_is_refused() {
    let (_root, path) = channel();
    let whole = std::fs::read(path.join(CHANNEL)).unwrap();
    let numbers: [(usize, &[u8], &str); 10] = [
        (0, b"pelton-P", "begins with \"pelton-P\", wanted \"pelton-D\""),
        (8, &2u32.to_le_bytes(), "is of wire version 2 with layout"),
        (16, &[7; 8], "with layout 0x0707070707070707, wanted 1 with"),
        (12, &4096u32.to_le_bytes(), "says that it has 4096 bytes, wanted 65536"),
        (64, &100u64.to_le_bytes(), "says capacity 100, wanted a multiple of 64"),
        (72, &CAPACITY.to_le_bytes(), "says message_bytes_max 65536, wanted at most 32736"),
        (80, &0u32.to_le_bytes(), "says lanes_max 0, wanted 1 to 1024"),
        (80, &2000u32.to_le_bytes(), "says lanes_max 2000"),
        (84, &0o7700u32.to_le_bytes(), "says mode 4032"),
        (84, &0o770u32.to_le_bytes(), "it was made with mode 770, this side permits at most 700"),
    ];
    for (offset, bytes, says) in numbers {
        patch(&path, CHANNEL, offset, bytes);
        assert_refused(open(&path), &[says]);
        std::fs::write(path.join(CHANNEL), &whole).unwrap();
    }
    for lanes in [0u32, 3, u32::MAX] {
        patch(&path, CHANNEL, LANES_AT, &lanes.to_le_bytes());
        assert_refused(open(&path), &[&format!("counts {lanes} lanes, wanted 1 to 2")]);
    }
    std::fs::write(path.join(CHANNEL), &whole).unwrap();
    use_all(&path, &mode(0o700)).unwrap();
}

#[test]
fn each_flipped_bit_of_the_channels_header_is_refused() {
    let (_root, path) = channel();
    for bit in 0..8 * HEADER_BYTES {
        flip(&path, CHANNEL, bit);
        let opened = open(&path);
        assert!(matches!(opened, Err(Error::NotAChannel { .. })), "bit {bit}: {opened:?}");
        flip(&path, CHANNEL, bit);
    }
    // The padding behind it is covered by nothing, and nothing reads it; nor what is behind the count of lanes.
    for bit in (8 * HEADER_BYTES..8 * LANES_AT).chain(8 * (LANES_AT + 4)..8 * size_of::<ChannelPage>()) {
        flip(&path, CHANNEL, bit);
    }
    use_all(&path, &mode(0o700)).unwrap();
    // The count changes while the channel is used, so no checksum covers it. One lane too few is still harmless; more
    // than may exist, or none, are refused. Here 2 of 2 exist.
    for bit in 0..32 {
        flip(&path, CHANNEL, 8 * LANES_AT + bit);
        assert_refused(open(&path), &["lanes, wanted 1 to 2"]);
        flip(&path, CHANNEL, 8 * LANES_AT + bit);
    }
}

#[test]
fn damaged_pages_are_refused() {
    let (_root, path) = channel();
    let pages: [(&str, usize, &[u8], &str); 9] = [
        ("0.producer", 64, &(CAPACITY * 2).to_le_bytes(), "0.producer says capacity 131072, limit 1000, cursors 1"),
        ("1.producer", 72, &(LIMIT + 1).to_le_bytes(), "1.producer says capacity 65536, limit 1001, cursors 1"),
        ("0.producer", 80, &2u32.to_le_bytes(), "cursors 2, wanted 65536, 1000 and 1"),
        ("0.producer", 96, &[9; 16], "0.producer is of boot 09090909"),
        ("0.producer", 0, b"pelton-C", "0.producer begins with \"pelton-C\", wanted \"pelton-P\""),
        ("1.consumer", 0, &[0; 8], "1.consumer begins with"),
        ("1.consumer", 8, &9u32.to_le_bytes(), "1.consumer is of wire version 9"),
        ("receiver", 0, b"pelton-C", "receiver begins with \"pelton-C\", wanted \"pelton-R\""),
        ("receiver", 12, &1u32.to_le_bytes(), "receiver says that it has 1 bytes, wanted 65536"),
    ];
    for (name, offset, bytes, says) in pages {
        let whole = std::fs::read(path.join(name)).unwrap();
        patch(&path, name, offset, bytes);
        assert_refused(use_all(&path, &mode(0o700)), &[says]);
        std::fs::write(path.join(name), whole).unwrap();
    }
    use_all(&path, &mode(0o700)).unwrap();
    for name in ["0.producer", "1.consumer", "receiver"] {
        for bit in 0..8 * size_of::<Preamble>() {
            flip(&path, name, bit);
            assert_refused(use_all(&path, &mode(0o700)), &[name]);
            flip(&path, name, bit);
        }
    }
}

#[test]
fn files_that_are_missing_too_short_or_too_long_are_refused() {
    let (_root, path) = channel();
    for name in REGULAR {
        let file = std::fs::OpenOptions::new().write(true).open(path.join(name)).unwrap();
        let bytes = file.metadata().unwrap().len();
        for wrong in [0, 100, bytes - 1, bytes + 1, 2 * bytes] {
            file.set_len(wrong).unwrap();
            let says = format!("its file {name} has {wrong} bytes, wanted {bytes}: it is damaged");
            assert_refused(use_all(&path, &mode(0o700)), &[&says]);
        }
        // Its contents are gone, but for the data, which nothing here reads.
        if name != "0.data" {
            return_to(&path, name);
        } else {
            file.set_len(bytes).unwrap();
        }
        use_all(&path, &mode(0o700)).unwrap();
    }
    for name in REGULAR.iter().chain(&FIFOS).filter(|name| **name != CHANNEL) {
        std::fs::rename(path.join(name), path.join("away")).unwrap();
        assert_refused(use_all(&path, &mode(0o700)), &[&format!("it has no file {name}: it is damaged")]);
        std::fs::rename(path.join("away"), path.join(name)).unwrap();
    }
    std::fs::remove_file(path.join(CHANNEL)).unwrap();
    assert_refused(open(&path), &["it has no file channel but \"0.bell\", \"0.consumer\", ", " and 5 more"]);
}

/// The file as a fresh channel of the same boot has it.
fn return_to(path: &Path, name: &str) {
    let (_root, fresh) = channel();
    std::fs::write(path.join(name), std::fs::read(fresh.join(name)).unwrap()).unwrap();
}

#[test]
fn files_of_another_kind_are_refused() {
    let (_root, path) = channel();
    let away = path.with_file_name("away");
    for (name, is_fifo) in REGULAR.map(|name| (name, false)).into_iter().chain(FIFOS.map(|name| (name, true))) {
        let file = path.join(name);
        std::fs::rename(&file, &away).unwrap();
        let wanted = if is_fifo { "wanted a FIFO" } else { "wanted a regular file" };
        let refused = |found: &str| {
            assert_refused(use_all(&path, &mode(0o700)), &[&format!("its file {name} is {found}, {wanted}")]);
        };
        symlink(&away, &file).unwrap();
        refused("a symbolic link");
        std::fs::remove_file(&file).unwrap();
        std::fs::create_dir(&file).unwrap();
        refused("a directory");
        std::fs::remove_dir(&file).unwrap();
        drop(std::os::unix::net::UnixListener::bind(&file).unwrap());
        refused("a socket");
        std::fs::remove_file(&file).unwrap();
        if is_fifo {
            std::fs::write(&file, [0; 100]).unwrap();
            refused("a regular file");
        } else {
            rustix::fs::mkfifoat(rustix::fs::CWD, &file, Mode::from_raw_mode(0o600)).unwrap();
            refused("a FIFO");
        }
        std::fs::remove_file(&file).unwrap();
        if is_root() {
            use rustix::fs::{CWD, makedev, mknodat};
            // As /dev/null.
            let made = mknodat(CWD, &file, FileType::CharacterDevice, Mode::from_raw_mode(0o600), makedev(1, 3));
            if made.is_ok() {
                refused("a character device");
                std::fs::remove_file(&file).unwrap();
            } else {
                eprintln!("SKIPPED in part: no permission to make a device");
            }
        }
        std::fs::rename(&away, &file).unwrap();
    }
    use_all(&path, &mode(0o700)).unwrap();
}

#[test]
fn another_owner_is_refused_unless_allowed() {
    if !is_root() {
        eprintln!("SKIPPED: needs root to give files away");
        return;
    }
    let (_root, path) = channel();
    let own = rustix::process::geteuid().as_raw();
    let give = |path: &Path, uid| std::os::unix::fs::lchown(path, Some(uid), None).unwrap();
    let allowing = Access { uids: vec![54321, 12345], mode: 0o700 };
    for name in REGULAR.iter().chain(&FIFOS) {
        give(&path.join(name), 12345);
        let says = format!("its file {name} belongs to uid 12345, wanted uid {own}: allow that uid");
        assert_refused(use_all(&path, &mode(0o700)), &[&says]);
        use_all(&path, &allowing).unwrap();
        give(&path.join(name), own);
    }
    give(&path, 12345);
    assert_refused(open(&path), &["it belongs to uid 12345, wanted uid 0: allow that uid in the options"]);
    let other = Access { uids: vec![1], mode: 0o700 };
    assert_refused(Directory::open(&path, &other), &["it belongs to uid 12345, wanted uid 0 or 1"]);
    // The files of this user, and of the directory's.
    use_all(&path, &allowing).unwrap();
    give(&path.join("0.data"), 12345);
    use_all(&path, &allowing).unwrap();
}

#[test]
fn wider_permissions_are_refused_unless_allowed() {
    let (_root, path) = channel();
    let chmod = |path: &Path, bits| std::fs::set_permissions(path, PermissionsExt::from_mode(bits)).unwrap();
    for bits in [0o701, 0o720, 0o755, 0o1700, 0o2700] {
        chmod(&path, bits);
        let says = format!("its mode is {bits:o}, this side permits at most 700: `chmod 700 {}`", path.display());
        assert_refused(open(&path), &[&says]);
    }
    chmod(&path, 0o700);
    for name in REGULAR.iter().chain(&FIFOS) {
        for bits in [0o601, 0o620, 0o604, 0o700, 0o4600] {
            chmod(&path.join(name), bits);
            let says = format!("its file {name} has mode {bits:o}, the channel permits at most 600: `chmod 600 ");
            assert_refused(use_all(&path, &mode(0o700)), &[&says]);
            // The channel's mode counts, however much this side permits.
            assert_refused(use_all(&path, &mode(0o777)), &[&says]);
        }
        chmod(&path.join(name), 0o600);
    }
    use_all(&path, &mode(0o777)).unwrap();
}

#[test]
fn a_channel_of_another_boot_is_refused_but_to_who_asks_for_any() {
    let (_root, path) = channel();
    patch(&path, CHANNEL, 96, &[5; 16]);
    let opened = open(&path);
    assert!(matches!(&opened, Err(Error::Rebooted { .. })), "{opened:?}");
    let text = opened.unwrap_err().to_string();
    assert!(text.contains(&format!("`pelton recover --repair {}`", path.display())), "{text}");
    let created = create(&path, 2);
    assert!(matches!(&created, Err(Error::Rebooted { .. })), "{created:?}");
    let directory = Directory::open_any_boot(&path, &mode(0o700)).unwrap().unwrap();
    assert!(!directory.is_from_this_boot());
    // The lane's page says this boot, as after half a recovery; the other's, as before any; a third one's, as when the power
    // failed in the middle of a recovery.
    for boot in [None, Some(5), Some(6)] {
        if let Some(boot) = boot {
            patch(&path, "0.producer", 96, &[boot; 16]);
        }
        directory.lane_to_look_at(0).unwrap();
    }
    directory.remove().unwrap();
    assert!(!path.exists());
}

#[test]
fn a_lane_of_another_boot_than_its_channel_is_refused() {
    let (_root, path) = channel();
    patch(&path, "0.producer", 96, &[6; 16]);
    let directory = open(&path).unwrap().unwrap();
    assert_refused(directory.lane_to_look_at(0), &["0.producer is of boot 0606", "the channel of boot "]);
}

/// Holds a role's lock, as a dying process does whose life has ended already, for some milliseconds.
#[test]
fn a_role_whose_holder_is_passing_is_had_once_it_has_passed() {
    let (_root, path) = root();
    let directory = create(&path, 1).unwrap();
    for role in ["receiver", "sender"] {
        let other = open(&path).unwrap().unwrap();
        let (held, is_held) = std::sync::mpsc::channel();
        let file = if role == "receiver" { RECEIVER.to_owned() } else { of_lane(0, PRODUCER) };
        let passing = std::thread::spawn(move || {
            let lock = other.try_role(&file).unwrap().expect("nobody has it");
            held.send(()).unwrap();
            std::thread::sleep(Duration::from_millis(20));
            drop(lock);
        });
        is_held.recv().unwrap();
        match role {
            "receiver" => drop(directory.claim_receiver().unwrap()),
            _ => drop(directory.claim_sender().unwrap()),
        }
        passing.join().unwrap();
    }
}

#[test]
fn each_role_is_had_once() {
    let (_root, path) = root();
    let directory = create(&path, 1).unwrap();
    let other = open(&path).unwrap().unwrap();
    assert!(!other.is_receiver_held().unwrap() && !other.is_sender_held(0).unwrap());
    let receiver = directory.claim_receiver().unwrap();
    let lane = directory.lane_for_receiver(0).unwrap();
    let error = other.claim_receiver().unwrap_err();
    assert!(matches!(&error, Error::RoleTaken { role, pid: 0, .. } if role == "receiver"), "{error:?}");
    assert!(error.to_string().contains("whose number is not known"), "{error}");
    // SAFETY: writable mappings of pages that this test has for itself.
    unsafe { lane.consumer.base().cast::<ConsumerPage>().as_ref().begin(4711) };
    let error = other.claim_receiver().unwrap_err().to_string();
    let says = format!("{} has a receiver already, process 4711: stop that process, or wait", path.display());
    assert!(error.contains(&says), "{error}");
    let sender = directory.claim_sender().unwrap();
    // SAFETY: as above.
    unsafe { sender.page.base().cast::<ProducerPage>().as_ref().begin(4712) };
    let error = other.claim_sender().unwrap_err();
    assert!(matches!(&error, Error::RoleTaken { role, pid: 4712, .. } if role == "sender"), "{error:?}");
    assert!(other.is_receiver_held().unwrap() && other.is_sender_held(0).unwrap());
    // Looking has taken nothing, and needs no more than to read.
    assert!(other.is_receiver_held().unwrap() && directory.is_sender_held(0).unwrap());
    // The lock alone is the role: what is mapped does not keep it.
    let (ReceiverRole { lock, page, bell, life }, SenderRole { lock: sender_lock, page: sender_page, .. }) =
        (receiver, sender);
    drop((lock, sender_lock));
    soon(|| other.claim_receiver()).unwrap();
    soon(|| other.claim_sender()).unwrap();
    drop((page, bell, life, sender_page));
}

#[test]
fn lanes_are_added_up_to_the_limit_and_free_ones_used_first() {
    let (_root, path) = root();
    let directory = create(&path, 3).unwrap();
    let mut senders: Vec<SenderRole> = (0..3).map(|_| directory.claim_sender().unwrap()).collect();
    assert_eq!(senders.iter().map(|sender| sender.number).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(directory.lanes().unwrap(), 3);
    for (sender, pid) in senders.iter().zip([101, 102, 103]) {
        // SAFETY: a writable mapping of a page that this test has for itself.
        unsafe { sender.page.base().cast::<ProducerPage>().as_ref().begin(pid) };
    }
    let error = open(&path).unwrap().unwrap().claim_sender().unwrap_err();
    assert!(matches!(error, Error::RoleTaken { pid: 101, .. }), "{error:?}");
    assert!(error.to_string().contains("has a sender on all 3 lanes (processes 101, 102, 103) already"), "{error}");
    drop(senders.remove(1));
    assert_eq!(soon(|| directory.claim_sender()).unwrap().number, 1);
    assert_refused(directory.lane_for_receiver(3), &["it has 3 lanes, wanted number 3"]);
    assert_refused(directory.watch_sender(3), &["it has 3 lanes, wanted number 3"]);
}

#[test]
fn what_a_dead_sender_left_of_a_lane_is_made_anew() {
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
fn senders_that_come_at_once_get_a_lane_each() {
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
fn a_life_tells_every_watcher_of_its_end() {
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
    let is_over = |watcher: &Descriptor, patience: Duration| {
        let mut fds = [PollFd::new(watcher, PollFlags::empty())];
        let timeout = Timespec::try_from(patience).unwrap();
        poll(&mut fds, Some(&timeout)).unwrap() == 1 && fds[0].revents() == PollFlags::ERR
    };
    let tells = |epoll: &OwnedFd, patience: Duration| {
        let mut events = [epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; 4];
        let timeout = Timespec::try_from(patience).unwrap();
        let count = epoll::wait(epoll, &mut events[..], Some(&timeout)).unwrap();
        count == 1 && { events[0].flags } == EventFlags::ERR && { events[0].data }.u64() == 7
    };
    assert!(!watchers.iter().any(|watcher| is_over(watcher, Duration::ZERO)));
    assert!(!epolls.iter().any(|epoll| tells(epoll, Duration::ZERO)));
    drop(receiver);
    assert!(watchers.iter().all(|watcher| is_over(watcher, PATIENCE)));
    assert!(epolls.iter().all(|epoll| tells(epoll, PATIENCE)));
    eventually("nobody is there to watch", || directory.watch_receiver().unwrap().is_none());
    // A successor ends the telling: who has not polled in between learns of it from the page's generation only.
    let _successor = soon(|| directory.claim_receiver()).unwrap();
    assert!(!watchers.iter().any(|watcher| is_over(watcher, Duration::ZERO)));
    assert!(!epolls.iter().any(|epoll| tells(epoll, Duration::ZERO)));
}

#[test]
fn a_bell_in_the_file_system_rings_until_it_is_drained() {
    let (_root, path) = root();
    let directory = create(&path, 1).unwrap();
    let receiver = directory.claim_receiver().unwrap();
    let sender = directory.claim_sender().unwrap();
    let rings = || poll(&mut [PollFd::new(&receiver.bell, PollFlags::IN)], Some(&Timespec::default())).unwrap() == 1;
    // Also more often than the FIFO, or one read of it, takes; nobody waits.
    for count in [1, 2, 1024, 3000, 100_000] {
        assert!(!rings(), "{count}");
        (0..count).for_each(|_| sender.receiver_bell.ring());
        assert!(rings(), "{count}");
        receiver.bell.drain();
    }
    assert!(!rings());
    receiver.bell.drain();
    // What rings while nobody is there rings for the successor.
    drop(receiver);
    sender.receiver_bell.ring();
    let successor = soon(|| directory.claim_receiver()).unwrap();
    assert_eq!(poll(&mut [PollFd::new(&successor.bell, PollFlags::IN)], Some(&Timespec::default())).unwrap(), 1);
}

#[test]
fn a_dead_makers_leftovers_are_removed_and_a_living_ones_not() {
    let (root, path) = root();
    let at = |name: &str| root.path().join(name);
    // As far as the makers of 77 came: nothing, the first file, everything.
    std::fs::create_dir(at(".ch.pelton-77-0")).unwrap();
    std::fs::create_dir(at(".ch.pelton-77-1")).unwrap();
    std::fs::write(at(".ch.pelton-77-1/channel"), "").unwrap();
    create(&at("whole"), 1).unwrap();
    std::fs::rename(at("whole"), at(".ch.pelton-77-2")).unwrap();
    // One that is at work, and one that has come no further than its directory, which begins anew.
    create(&at("living"), 1).unwrap();
    std::fs::rename(at("living"), at(".ch.pelton-78-0")).unwrap();
    let lock = |aside: &str| {
        let channel = at(aside).join(CHANNEL);
        let mut lock = None;
        eventually("its maker has put the lock down", || {
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
    // What only looks like it.
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
    soon(|| remove(&path)).unwrap();
    eventually("what has no maker any more goes", || {
        create(&path, 1).unwrap().remove().unwrap();
        !at(".ch.pelton-78-0").exists()
    });
}

#[test]
fn what_is_put_into_place_while_it_is_swept_stays() {
    let (root, path) = channel();
    let parent = Parent::open(&path).unwrap();
    let opened = std::fs::File::open(&path).unwrap();
    // A sweeper that has opened the directory by its former name finds nothing by that name any more, or another.
    let aside = OsStr::new(".ch.pelton-1-1");
    eventually("no lock keeps it from looking", || parent.sweep_opened(aside, opened.as_fd()).is_err());
    std::fs::create_dir(root.path().join(aside)).unwrap();
    parent.sweep_opened(aside, opened.as_fd()).unwrap();
    assert_eq!(files_of(&path).len(), 14);
    use_all(&path, &mode(0o700)).unwrap();
}

#[test]
fn removing_is_refused_while_a_role_is_had_or_foreign_files_are_there() {
    let (root, path) = channel();
    let remove = || remove(&path);
    let before = files_of(&path);
    let directory = open(&path).unwrap().unwrap();
    let receiver = directory.claim_receiver().unwrap();
    let error = remove().unwrap_err();
    assert!(matches!(&error, Error::RoleTaken { role, .. } if role == "receiver"), "{error:?}");
    drop(receiver);
    let sender = soon(|| directory.claim_sender()).unwrap();
    let error = soon(|| match remove() {
        Err(Error::RoleTaken { role, .. }) if role == "sender" => Ok("sender"),
        other => other.map(|()| "removed"),
    });
    assert_eq!(error.unwrap(), "sender");
    drop(sender);
    for foreign in ["letter.txt", "00.data", "2.data.old", "3.data", "1024.data", "-1.data", "0.letter"] {
        std::fs::write(path.join(foreign), "text").unwrap();
        assert_refused(soon(remove), &[&format!("{foreign:?} in it is not of the channel: move that away first")]);
        assert_eq!(std::fs::read_to_string(path.join(foreign)).unwrap(), "text");
        std::fs::remove_file(path.join(foreign)).unwrap();
    }
    // One of the channel's names, and no file: it would be found only when the others are gone.
    std::fs::create_dir(path.join("2.data")).unwrap();
    assert_refused(soon(remove), &["\"2.data\" in it is not of the channel: move that away first"]);
    std::fs::remove_dir(path.join("2.data")).unwrap();
    assert_eq!(files_of(&path), before);
    use_all(&path, &mode(0o700)).unwrap();
    // What a sender that died adding a lane left is the channel's, and a damaged channel can be removed too.
    std::fs::write(path.join("2.data"), "half").unwrap();
    std::fs::remove_file(path.join("0.producer")).unwrap();
    soon(remove).unwrap();
    assert!(files_of(root.path()).is_empty());
}

#[test]
fn a_full_file_system_is_an_error_and_leaves_nothing() {
    let (root, _) = root();
    let Some(mounted) = Mounted::new(root.path(), "size=128k") else { return };
    let path = mounted.0.join("ch");
    let make = || Directory::create(&path, &mode(0o700), 1 << 20, LIMIT, 3);
    let error = make().unwrap_err();
    assert!(matches!(error, Error::NoSpace { bytes: WINDOW, .. }), "{error:?}");
    let says = format!("no space for 262144 bytes of {}/0.data: free some, or have it", path.display());
    assert!(error.to_string().contains(&says), "{error}");
    assert!(files_of(&mounted.0).is_empty());
    // The second lane fits, the third does not; then the others are as they were.
    mounted.resize("size=640k");
    let directory = make().unwrap();
    let first = directory.claim_sender().unwrap();
    let second = directory.claim_sender().unwrap();
    let before = files_of(&path);
    let error = directory.claim_sender().unwrap_err();
    assert!(matches!(&error, Error::NoSpace { bytes: WINDOW, path, .. } if path.ends_with("2.data")), "{error:?}");
    assert_eq!((files_of(&path), directory.lanes().unwrap()), (before, 2));
    let error = first.data.allocate(WINDOW, 1 << 20).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StorageFull);
    mounted.resize("size=2m");
    let third = directory.claim_sender().unwrap();
    assert_eq!((third.number, directory.lanes().unwrap()), (2, 3));
    drop((directory, first, second, third));
    // No names left: each file is one, or its directory.
    let (root, _) = self::root();
    for inodes in 2..11 {
        let Some(mounted) = Mounted::new(root.path(), &format!("size=2m,nr_inodes={inodes}")) else { return };
        let path = mounted.0.join("ch");
        let error = Directory::create(&path, &mode(0o700), 1 << 20, LIMIT, 3).unwrap_err();
        assert!(matches!(error, Error::NoSpace { .. }), "{inodes}: {error:?}");
        assert!(files_of(&mounted.0).is_empty(), "{inodes}");
    }
}

/// A file system of a test's own.
struct Mounted(PathBuf);

impl Mounted {
    fn new(root: &Path, options: &str) -> Option<Mounted> {
        let point = root.join("mounted");
        let _ = std::fs::create_dir(&point);
        if is_root() && mount(&["-t", "tmpfs", "-o", options, "tmpfs"], &point) {
            return Some(Mounted(point));
        }
        eprintln!("SKIPPED: no permission to mount a tmpfs");
        None
    }

    fn resize(&self, options: &str) {
        assert!(mount(&["-o", &format!("remount,{options}")], &self.0));
    }
}

fn mount(arguments: &[&str], point: &Path) -> bool {
    Command::new("mount").args(arguments).arg(point).status().is_ok_and(|status| status.success())
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Lazily: a mapping that a failed test leaves must not leave the mount.
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// What a child process of a test does, when it is one: `PELTON_DIRECTORY_TEST` says it.
#[test]
fn a_child() {
    let Ok(task) = std::env::var("PELTON_DIRECTORY_TEST") else { return };
    let (task, path) = task.split_once(": ").unwrap();
    let path = Path::new(path);
    match task {
        "hold" => {
            let directory = open(path).unwrap().unwrap();
            let _roles = (directory.claim_receiver().unwrap(), directory.claim_sender().unwrap());
            let lane = directory.lane_for_receiver(0).unwrap();
            // SAFETY: a page that this process has the role for.
            unsafe { lane.consumer.base().cast::<ConsumerPage>().as_ref().begin(std::process::id()) };
            say("held");
            hear();
        }
        "hold beside children" => {
            let directory = open(path).unwrap().unwrap();
            let _roles = (directory.claim_receiver().unwrap(), directory.claim_sender().unwrap());
            #[allow(clippy::zombie_processes, reason = "it is to outlive this process")]
            let executed =
                Command::new("sleep").arg("1000").stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
            // SAFETY: the child does nothing but wait for its end.
            let forked = unsafe { libc::fork() };
            if forked == 0 {
                // SAFETY: as above; the other end of its standard output must not wait for it.
                unsafe {
                    libc::close(1);
                    loop {
                        libc::pause();
                    }
                }
            }
            say(&format!("{} {forked}", executed.id()));
            hear();
        }
        "create" => {
            let directory = create(path, 1).unwrap();
            say(&std::fs::metadata(directory.path().join(CHANNEL)).unwrap().ino().to_string());
        }
        "create and remove" => loop {
            create(path, 1).unwrap().remove().unwrap();
            say("again");
        },
        "cycles" => {
            let count = |what: &str| {
                std::fs::read_to_string(what)
                    .map_or_else(|_| std::fs::read_dir(what).unwrap().count(), |text| text.lines().count())
            };
            let counts = || (count("/proc/self/fd"), count("/proc/self/maps"));
            use_all(path, &mode(0o700)).unwrap();
            let before = counts();
            for _ in 0..1000 {
                use_all(path, &mode(0o700)).unwrap();
                assert!(matches!(create(path, 1).unwrap().watch_receiver(), Ok(None)));
            }
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            assert!(!maps.contains(path.to_str().unwrap()), "{maps}");
            say(if counts() == before { "as before" } else { "more" });
        }
        "umask" => {
            rustix::process::umask(Mode::from_raw_mode(0o777));
            let directory = Directory::create(path, &mode(0o770), CAPACITY, LIMIT, 2).unwrap();
            let _first = directory.claim_sender().unwrap();
            directory.claim_sender().unwrap();
            say("made");
        }
        "another user" => {
            let access = Access { uids: vec![0], mode: 0o755 };
            let directory = Directory::open(path, &access).unwrap().unwrap();
            directory.lane_to_look_at(0).unwrap();
            assert!(!directory.is_receiver_held().unwrap());
            let uid = rustix::process::geteuid().as_raw();
            for refused in [directory.claim_receiver().err(), directory.claim_sender().err(), directory.remove().err()]
            {
                let text = refused.unwrap().to_string();
                let says = format!("belongs to uid 0, gid 0, has mode 644, and does not let uid {uid} write it");
                assert!(text.contains(&says), "{text}");
            }
            let hidden = path.with_file_name("hidden").join("ch");
            assert_refused(Directory::open(&hidden, &access), &["a directory above it does not let uid 65534 through"]);
            let closed = path.with_file_name("closed");
            assert_refused(Directory::open(&closed, &access), &["its mode does not let this user read it: `chmod` it"]);
            let unreadable = Directory::open(&path.with_file_name("unreadable"), &access);
            let says =
                format!("its file channel belongs to uid 0, gid 0, has mode 600, and does not let uid {uid} read it");
            assert_refused(unreadable, &[&says]);
            say("refused");
        }
        other => panic!("{other:?} is no task"),
    }
}

/// The line is the child's, among those of the test framework.
const MARK: &str = "@@ ";

fn say(text: &str) {
    // Not by `println`, whose lock a forked child could inherit.
    std::io::stdout().write_all(format!("{MARK}{text}\n").as_bytes()).unwrap();
    std::io::stdout().flush().unwrap();
}

/// Waits until the parent closes, or is gone.
fn hear() {
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// Killed when dropped.
struct Task {
    child: Child,
    out: BufReader<ChildStdout>,
    _in: ChildStdin,
}

impl Task {
    fn new(task: &str, path: &Path) -> Task {
        Task::with(task, path, |_| ())
    }

    fn with(task: &str, path: &Path, change: impl FnOnce(&mut Command)) -> Task {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "directory::tests::a_child", "--nocapture"]);
        command.env("PELTON_DIRECTORY_TEST", format!("{task}: {}", path.display()));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        change(&mut command);
        let mut child = command.spawn().unwrap();
        let (out, input) = (BufReader::new(child.stdout.take().unwrap()), child.stdin.take().unwrap());
        Task { child, out, _in: input }
    }

    /// What it says next.
    fn said(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.out.read_line(&mut line).unwrap(), 0, "the child ended: see above");
            if let Some((_, said)) = line.trim_end().split_once(MARK) {
                return said.to_owned();
            }
        }
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn another_process_has_a_role_until_it_ends() {
    let (_root, path) = root();
    let directory = create(&path, 1).unwrap();
    let mut task = Task::new("hold", &path);
    assert_eq!(task.said(), "held");
    let error = directory.claim_receiver().unwrap_err();
    assert!(matches!(&error, Error::RoleTaken { pid, .. } if *pid == task.child.id()), "{error:?}");
    assert!(matches!(directory.claim_sender().unwrap_err(), Error::RoleTaken { .. }));
    assert!(directory.is_receiver_held().unwrap() && directory.is_sender_held(0).unwrap());
    let life = directory.watch_receiver().unwrap().unwrap();
    drop(task);
    let timeout = Timespec::try_from(PATIENCE).unwrap();
    assert_eq!(poll(&mut [PollFd::new(&life, PollFlags::empty())], Some(&timeout)).unwrap(), 1);
    use_all(&path, &mode(0o700)).unwrap();
}

#[test]
fn a_killed_process_has_no_role_though_its_children_live_on() {
    let (_root, path) = root();
    let directory = create(&path, 1).unwrap();
    let mut task = Task::new("hold beside children", &path);
    let children: Vec<i32> = task.said().split(' ').map(|pid| pid.parse().unwrap()).collect();
    let life = directory.watch_sender(0).unwrap().unwrap();
    assert!(directory.is_receiver_held().unwrap());
    drop(task);
    let timeout = Timespec::try_from(PATIENCE).unwrap();
    let told = poll(&mut [PollFd::new(&life, PollFlags::empty())], Some(&timeout)).unwrap() == 1;
    let used = use_all(&path, &mode(0o700));
    for pid in children {
        let pid = rustix::process::Pid::from_raw(pid).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("the child lives on");
    }
    assert!(told);
    used.unwrap();
}

#[test]
fn two_processes_that_create_at_once_have_the_same_channel() {
    let (root, path) = root();
    for round in 0..50 {
        let mut tasks = [Task::new("create", &path), Task::new("create", &path)];
        let [one, other] = [tasks[0].said(), tasks[1].said()];
        assert_eq!(one, other, "round {round}");
        for task in &mut tasks {
            assert!(task.child.wait().unwrap().success());
        }
        assert_eq!(files_of(root.path()), ["ch"], "round {round}");
        open(&path).unwrap().unwrap().remove().unwrap();
    }
}

#[test]
fn threads_that_create_and_remove_at_once_find_a_whole_channel_or_none() {
    let (root, path) = root();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    let directory = create(&path, 2).unwrap();
                    match directory.claim_sender() {
                        Ok(_) | Err(Error::RoleTaken { .. } | Error::NoChannel { .. }) => {}
                        Err(error) => panic!("{error}"),
                    }
                    match directory.remove() {
                        Ok(()) | Err(Error::RoleTaken { .. } | Error::NoChannel { .. }) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
    });
    if let Some(directory) = open(&path).unwrap() {
        soon(|| directory.claim_receiver()).unwrap();
        soon(|| remove(&path)).unwrap();
    }
    assert_eq!(files_of(root.path()), [""; 0]);
}

#[test]
fn a_maker_or_remover_that_is_killed_leaves_nothing_that_stays() {
    let (root, path) = root();
    for round in 0..30 {
        let mut task = Task::new("create and remove", &path);
        // Wherever it is by then.
        for _ in 0..=round {
            task.said();
        }
        drop(task);
        // What stands there is whole; the next creator clears what does not.
        match open(&path).unwrap() {
            Some(directory) => use_all(directory.path(), &mode(0o700)).unwrap(),
            None => drop(create(&path, 1).unwrap()),
        }
        soon(|| remove(&path)).unwrap();
        create(&path, 1).unwrap().remove().unwrap();
        assert_eq!(files_of(root.path()), [""; 0], "round {round}");
    }
}

#[test]
fn a_thousand_openings_leave_no_descriptor_and_no_mapping() {
    let (_root, path) = channel();
    assert_eq!(Task::new("cycles", &path).said(), "as before");
}

#[test]
fn the_umask_changes_nothing() {
    let (_root, path) = root();
    assert_eq!(Task::new("umask", &path).said(), "made");
    assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o7777, 0o770);
    for name in files_of(&path) {
        assert_eq!(std::fs::metadata(path.join(&name)).unwrap().mode() & 0o7777, 0o660, "{name}");
    }
    use_all(&path, &mode(0o770)).unwrap();
}

#[test]
fn who_may_only_read_looks_on_and_is_told_what_it_may_not() {
    if !is_root() {
        eprintln!("SKIPPED: needs root to be another user");
        return;
    }
    let (root, path) = root();
    std::fs::set_permissions(root.path(), PermissionsExt::from_mode(0o755)).unwrap();
    Directory::create(&path, &mode(0o755), CAPACITY, LIMIT, 1).unwrap();
    std::fs::create_dir(root.path().join("hidden")).unwrap();
    std::fs::set_permissions(root.path().join("hidden"), PermissionsExt::from_mode(0o700)).unwrap();
    for (name, bits, of) in [("closed", 0o700, "."), ("unreadable", 0o600, CHANNEL)] {
        let other = root.path().join(name);
        Directory::create(&other, &mode(0o755), CAPACITY, LIMIT, 1).unwrap();
        std::fs::set_permissions(other.join(of), PermissionsExt::from_mode(bits)).unwrap();
    }
    // A copy of this program where that user finds it. Not written by this process, whose other children could have the
    // descriptor, and the program could not be run then.
    let program = root.path().join("program");
    assert!(Command::new("cp").arg(std::env::current_exe().unwrap()).arg(&program).status().unwrap().success());
    let mut task = Task::with("another user", &path, |command| {
        let environment: Vec<_> = command.get_envs().map(|(k, v)| (k.to_owned(), v.unwrap().to_owned())).collect();
        let arguments: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
        *command = Command::new(&program);
        command.args(arguments).envs(environment).stdin(Stdio::piped()).stdout(Stdio::piped());
        command.uid(65534).gid(65534).current_dir("/");
    });
    assert_eq!(task.said(), "refused");
}

#[test]
fn a_file_system_that_cannot_allocate_ahead_is_refused_and_nothing_is_left() {
    let (root, _) = root();
    let point = root.path().join("mounted");
    std::fs::create_dir(&point).unwrap();
    if !is_root() || !mount(&["-t", "ramfs", "-o", "mode=700", "ramfs"], &point) {
        eprintln!("SKIPPED: no permission to mount a ramfs");
        return;
    }
    let mounted = Mounted(point);
    assert_refused(create(&mounted.0.join("ch"), 1), &["cannot allocate space ahead: use tmpfs, ext4 or xfs"]);
    assert!(files_of(&mounted.0).is_empty());
}

#[test]
fn a_leftover_that_cannot_be_removed_is_said_and_the_other_lanes_stay() {
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
