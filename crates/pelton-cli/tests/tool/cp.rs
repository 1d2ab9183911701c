//! `pelton cp`: the copy is whole, or what was there stays.

use crate::place::Place;
use pelton_testkit::deadline;
use rustix::process::Signal;
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, MetadataExt as _, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

fn content(bytes: usize) -> Vec<u8> {
    (0..bytes as u64).map(|n| ((n * n) >> 7) as u8).collect()
}

#[test]
fn a_file_is_copied_whole_and_replaces_what_was_there() {
    let place = Place::new();
    for bytes in [0, 1, 20_000_001] {
        place.file("source", &content(bytes));
        place.file("copy", b"what was there");
        place.run(&["cp", "source", "copy", "--sync"]).assert(0, &[]);
        assert!(std::fs::read(place.path("work/copy")).unwrap() == content(bytes));
    }
    std::fs::create_dir(place.path("work/into")).unwrap();
    place.run(&["cp", "source", "into"]).assert(0, &[]);
    assert!(std::fs::read(place.path("work/into/source")).unwrap() == content(20_000_001));
    // Made up while it is read, without a length.
    place.run(&["cp", "/proc/self/limits", "limits"]).assert(0, &[]);
    assert!(std::fs::read_to_string(place.path("work/limits")).unwrap().contains("Max open files"));
    let mut left: Vec<_> = std::fs::read_dir(place.path("work")).unwrap().map(|e| e.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["copy", "into", "limits", "source"]);
}

#[test]
fn what_cannot_be_copied_is_told_and_leaves_what_was_there() {
    let place = Place::new();
    place.file("copy", b"what was there");
    place.run(&["cp", "missing", "copy"]).assert(5, &["missing", "ENOENT"]);
    place.run(&["cp", ".", "copy"]).assert(2, &["Directory", "wanted a regular file"]);
    place.file("source", b"text");
    place.run(&["cp", "source", "no/such/place"]).assert(5, &["ENOENT"]);
    assert_eq!(std::fs::read(place.path("work/copy")).unwrap(), b"what was there");
}

#[test]
fn a_signal_ends_it_and_nothing_is_left_aside() {
    let place = Place::new();
    place.file("copy", b"what was there");
    // So many pieces of data, with holes between them, that none is done before the signal comes.
    let source = std::fs::File::create(place.path("work/source")).unwrap();
    (0..20_000).for_each(|piece| source.write_all_at(b"data", piece << 16).unwrap());
    // Often between the creation of the file and its completion.
    for _ in 0..25 {
        let cp = place.start(&["cp", "source", "copy"]);
        let begun = || std::fs::read_dir(place.path("work")).unwrap().any(|e| e.unwrap().file_name().len() > 8);
        let until = deadline();
        while !begun() {
            assert!(Instant::now() < until, "cp has not begun");
        }
        cp.signal(Signal::INT);
        cp.finish().assert(130, &[]);
        assert_eq!(std::fs::read(place.path("work/copy")).unwrap(), b"what was there");
        assert_eq!(std::fs::read_dir(place.path("work")).unwrap().count(), 2);
    }
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn a_fifo_or_a_device_is_written_to_and_a_socket_is_refused() {
    let place = Place::new();
    let all = content(3_000_001);
    place.file("source", &all);
    let fifo = place.path("work/fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let cp = place.start(&["cp", "source", "fifo", "--sync"]);
    let reader = std::thread::spawn({
        let fifo = fifo.clone();
        move || std::fs::read(fifo).unwrap()
    });
    cp.finish().assert(0, &[]);
    assert!(std::fs::symlink_metadata(&fifo).unwrap().file_type().is_fifo());
    assert!(reader.join().unwrap() == all);

    let socket = std::os::unix::net::UnixListener::bind(place.path("work/socket")).unwrap();
    place.run(&["cp", "source", "socket"]).assert(2, &["socket is a socket", "wanted a file"]);
    drop(socket);
    assert!(std::fs::symlink_metadata(place.path("work/socket")).unwrap().file_type().is_socket());

    // Devices of the test's own: those of /dev are not put at risk.
    for (name, minor, code, words) in [("null", "3", 0, &[][..]), ("full", "7", 5, &["ENOSPC"][..])] {
        let device = place.path("work").join(name);
        let made = Command::new("mknod").arg(&device).args(["c", "1", minor]).output().unwrap();
        if !made.status.success() || std::fs::OpenOptions::new().write(true).open(&device).is_err() {
            return eprintln!("SKIPPED: no permission for devices");
        }
        place.run(&["cp", "source", name]).assert(code, words);
        assert!(std::fs::symlink_metadata(&device).unwrap().file_type().is_char_device());
    }
}

#[test]
fn what_is_replaced_keeps_its_mode_and_its_owner_and_a_new_file_has_the_sources_mode() {
    let place = Place::new();
    let source = place.file("source", b"text");
    std::fs::set_permissions(&source, PermissionsExt::from_mode(0o644)).unwrap();
    let copy = place.file("copy", b"what was there");
    std::fs::set_permissions(&copy, PermissionsExt::from_mode(0o600)).unwrap();
    let is_changed = std::os::unix::fs::chown(&copy, Some(12345), Some(12345)).is_ok();
    place.run(&["cp", "source", "copy"]).assert(0, &[]);
    let found = std::fs::metadata(&copy).unwrap();
    assert_eq!((mode(&copy), std::fs::read(&copy).unwrap()), (0o600, b"text".to_vec()));
    assert!(!is_changed || (found.uid(), found.gid()) == (12345, 12345));
    std::fs::set_permissions(&source, PermissionsExt::from_mode(0o700)).unwrap();
    place.run(&["cp", "source", "new"]).assert(0, &[]);
    assert_eq!(mode(&place.path("work/new")), 0o700);
}

#[test]
fn holes_stay_holes() {
    let place = Place::new();
    let source = std::fs::File::create(place.path("work/source")).unwrap();
    for at in [0, 40 << 20, (40 << 20) + 4096, 70 << 20] {
        source.write_all_at(&content(5000), at).unwrap();
    }
    source.set_len(100 << 20).unwrap();
    if source.metadata().unwrap().blocks() * 512 > 1 << 20 {
        return eprintln!("SKIPPED: a file system without holes");
    }
    place.run(&["cp", "source", "copy"]).assert(0, &[]);
    let copy = place.path("work/copy");
    assert!(std::fs::metadata(&copy).unwrap().blocks() * 512 < 1 << 20);
    assert!(std::fs::read(&copy).unwrap() == std::fs::read(place.path("work/source")).unwrap());
}

#[test]
fn the_longest_name_can_be_the_copys() {
    let place = Place::new();
    place.file("source", b"text");
    let name = "n".repeat(255);
    for _ in 0..2 {
        place.run(&["cp", "source", &name]).assert(0, &[]);
        assert_eq!(std::fs::read(place.path("work").join(&name)).unwrap(), b"text");
    }
}

#[test]
fn what_a_symbolic_link_leads_to_is_replaced_and_not_the_link() {
    let place = Place::new();
    place.file("source", b"text");
    place.file("target", b"what was there");
    let link = place.path("work/link");
    std::os::unix::fs::symlink("target", &link).unwrap();
    place.run(&["cp", "source", "link"]).assert(0, &[]);
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(std::fs::read(place.path("work/target")).unwrap(), b"text");
    std::fs::remove_file(place.path("work/target")).unwrap();
    place.run(&["cp", "source", "link"]).assert(2, &["link", "leads nowhere"]);
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
}
