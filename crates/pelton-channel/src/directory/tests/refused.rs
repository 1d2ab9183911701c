//! Refusals, their texts, and that nothing is changed: paths, files, headers, owners, permissions, other boots.

use super::*;
use crate::directory::pages::HEADER_BYTES;

#[test]
fn impossible_sizes_and_paths_are_refused() {
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
        let error = Directory::create(&path, &mode(bits), capacity, limit, lanes, false).unwrap_err().to_string();
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
fn a_path_of_something_else_is_refused_and_stays_unchanged() {
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
    let numbers: [(usize, &[u8], &str); 11] = [
        (0, b"pelton-P", "begins with \"pelton-P\", wanted \"pelton-D\""),
        (8, &1u32.to_le_bytes(), "is of wire version 1 with layout"),
        (16, &[7; 8], "with layout 0x0707070707070707, wanted 2 with"),
        (136, &(1u64 << 40).to_le_bytes(), "requires feature 40"),
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
    // The one required feature that this version knows: messages with a traceparent.
    let known = 8 * 136 + 1;
    for bit in (0..8 * RECOVERED_BYTES).chain(8 * 136..8 * HEADER_BYTES).filter(|bit| *bit != known) {
        flip(&path, CHANNEL, bit);
        let opened = open(&path);
        assert!(matches!(opened, Err(Error::NotAChannel { .. })), "bit {bit}: {opened:?}");
        flip(&path, CHANNEL, bit);
    }
    // No checksum covers the padding and the optional features, and nothing reads them.
    let padding = (8 * RECOVERED_BYTES..8 * LANES_AT).chain(8 * (LANES_AT + 4)..8 * 136);
    for bit in padding.chain(8 * HEADER_BYTES..8 * size_of::<ChannelPage>()) {
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
        // Restores the contents. Nothing here reads those of the data.
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

/// Restores the file from a new channel of the same boot.
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
        eprintln!("SKIPPED: needs root to change owners");
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
    // Accepts files of this user and of the directory's owner.
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
    let stranger = tempfile::TempDir::new().unwrap();
    chmod(stranger.path(), 0o755);
    assert_refused(open(stranger.path()), &["it is a directory of mode 755 without a channel: choose another path"]);
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
fn a_channel_of_another_boot_opens_only_by_open_any_boot() {
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
    // The lane's page has this boot, as after an interrupted recovery; or the channel's boot, as before a recovery; or
    // a third one, as when the power failed during a recovery.
    for boot in [None, Some(5), Some(6)] {
        if let Some(boot) = boot {
            patch(&path, "0.producer", 96, &[boot; 16]);
        }
        directory.lane_read_only(0).unwrap();
    }
    directory.remove().unwrap();
    assert!(!path.exists());
}

#[test]
fn a_lane_of_another_boot_than_its_channel_is_refused() {
    let (_root, path) = channel();
    patch(&path, "0.producer", 96, &[6; 16]);
    let directory = open(&path).unwrap().unwrap();
    assert_refused(directory.lane_read_only(0), &["0.producer is of boot 0606", "the channel of boot "]);
}
