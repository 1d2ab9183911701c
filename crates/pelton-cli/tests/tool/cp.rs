//! `pelton cp`: the destination is the complete copy, or unchanged.

use crate::test_dirs;
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
fn a_complete_copy_replaces_the_old_file() {
    let dirs = test_dirs();
    for bytes in [0, 1, 20_000_001] {
        dirs.file("source", &content(bytes));
        dirs.file("copy", b"old content");
        dirs.run(&["cp", "source", "copy", "--sync"]).assert(0, &[]);
        assert!(std::fs::read(dirs.path("work/copy")).unwrap() == content(bytes));
    }
    std::fs::create_dir(dirs.path("work/into")).unwrap();
    dirs.run(&["cp", "source", "into"]).assert(0, &[]);
    assert!(std::fs::read(dirs.path("work/into/source")).unwrap() == content(20_000_001));
    // The kernel generates this file at each read, without a length.
    dirs.run(&["cp", "/proc/self/limits", "limits"]).assert(0, &[]);
    assert!(std::fs::read_to_string(dirs.path("work/limits")).unwrap().contains("Max open files"));
    let mut left: Vec<_> = std::fs::read_dir(dirs.path("work")).unwrap().map(|e| e.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["copy", "into", "limits", "source"]);
}

#[test]
fn a_failed_copy_is_reported_and_keeps_the_old_file() {
    let dirs = test_dirs();
    dirs.file("copy", b"old content");
    dirs.run(&["cp", "missing", "copy"]).assert(5, &["missing", "ENOENT"]);
    dirs.run(&["cp", ".", "copy"]).assert(2, &["Directory", "wanted a regular file"]);
    dirs.file("source", b"text");
    dirs.run(&["cp", "source", "no/such/place"]).assert(5, &["ENOENT"]);
    assert_eq!(std::fs::read(dirs.path("work/copy")).unwrap(), b"old content");
}

#[test]
fn a_signal_ends_cp_and_no_temporary_file_is_left() {
    let dirs = test_dirs();
    dirs.file("copy", b"old content");
    // Enough pieces of data, with holes between them, that the copy takes longer than the signal.
    let source = std::fs::File::create(dirs.path("work/source")).unwrap();
    (0..20_000).for_each(|piece| source.write_all_at(b"data", piece << 16).unwrap());
    // The signal often arrives between the creation of the file and its completion.
    for _ in 0..25 {
        let cp = dirs.start(&["cp", "source", "copy"]);
        let has_begun = || std::fs::read_dir(dirs.path("work")).unwrap().any(|e| e.unwrap().file_name().len() > 8);
        let until = deadline();
        while !has_begun() {
            assert!(Instant::now() < until, "cp has not begun");
        }
        cp.signal(Signal::INT);
        cp.finish().assert(130, &[]);
        assert_eq!(std::fs::read(dirs.path("work/copy")).unwrap(), b"old content");
        assert_eq!(std::fs::read_dir(dirs.path("work")).unwrap().count(), 2);
    }
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn a_fifo_or_a_device_is_written_to_and_a_socket_is_refused() {
    let dirs = test_dirs();
    let all = content(3_000_001);
    dirs.file("source", &all);
    let fifo = dirs.path("work/fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let cp = dirs.start(&["cp", "source", "fifo", "--sync"]);
    let reader = std::thread::spawn({
        let fifo = fifo.clone();
        move || std::fs::read(fifo).unwrap()
    });
    cp.finish().assert(0, &[]);
    assert!(std::fs::symlink_metadata(&fifo).unwrap().file_type().is_fifo());
    assert!(reader.join().unwrap() == all);

    let socket = std::os::unix::net::UnixListener::bind(dirs.path("work/socket")).unwrap();
    dirs.run(&["cp", "source", "socket"]).assert(2, &["socket is a socket", "wanted a file"]);
    drop(socket);
    assert!(std::fs::symlink_metadata(dirs.path("work/socket")).unwrap().file_type().is_socket());

    // Devices of the test, so that those of /dev are not at risk.
    for (name, minor, code, words) in [("null", "3", 0, &[][..]), ("full", "7", 5, &["ENOSPC"][..])] {
        let device = dirs.path("work").join(name);
        let created = Command::new("mknod").arg(&device).args(["c", "1", minor]).output().unwrap();
        if !created.status.success() || std::fs::OpenOptions::new().write(true).open(&device).is_err() {
            return eprintln!("SKIPPED: no permission for devices");
        }
        dirs.run(&["cp", "source", name]).assert(code, words);
        assert!(std::fs::symlink_metadata(&device).unwrap().file_type().is_char_device());
    }
}

#[test]
fn a_replaced_file_keeps_mode_and_owner_and_a_new_one_gets_the_sources_mode() {
    let dirs = test_dirs();
    let source = dirs.file("source", b"text");
    std::fs::set_permissions(&source, PermissionsExt::from_mode(0o644)).unwrap();
    let copy = dirs.file("copy", b"old content");
    std::fs::set_permissions(&copy, PermissionsExt::from_mode(0o600)).unwrap();
    let has_other_owner = std::os::unix::fs::chown(&copy, Some(12345), Some(12345)).is_ok();
    dirs.run(&["cp", "source", "copy"]).assert(0, &[]);
    let metadata = std::fs::metadata(&copy).unwrap();
    assert_eq!((mode(&copy), std::fs::read(&copy).unwrap()), (0o600, b"text".to_vec()));
    assert!(!has_other_owner || (metadata.uid(), metadata.gid()) == (12345, 12345));
    std::fs::set_permissions(&source, PermissionsExt::from_mode(0o700)).unwrap();
    dirs.run(&["cp", "source", "new"]).assert(0, &[]);
    assert_eq!(mode(&dirs.path("work/new")), 0o700);
}

#[test]
fn holes_stay_holes() {
    let dirs = test_dirs();
    let source = std::fs::File::create(dirs.path("work/source")).unwrap();
    for at in [0, 40 << 20, (40 << 20) + 4096, 70 << 20] {
        source.write_all_at(&content(5000), at).unwrap();
    }
    source.set_len(100 << 20).unwrap();
    if source.metadata().unwrap().blocks() * 512 > 1 << 20 {
        return eprintln!("SKIPPED: a file system without holes");
    }
    dirs.run(&["cp", "source", "copy"]).assert(0, &[]);
    let copy = dirs.path("work/copy");
    assert!(std::fs::metadata(&copy).unwrap().blocks() * 512 < 1 << 20);
    assert!(std::fs::read(&copy).unwrap() == std::fs::read(dirs.path("work/source")).unwrap());
}

#[test]
fn the_copy_may_have_the_longest_file_name() {
    let dirs = test_dirs();
    dirs.file("source", b"text");
    let name = "n".repeat(255);
    for _ in 0..2 {
        dirs.run(&["cp", "source", &name]).assert(0, &[]);
        assert_eq!(std::fs::read(dirs.path("work").join(&name)).unwrap(), b"text");
    }
}

#[test]
fn the_target_of_a_symbolic_link_is_replaced_and_the_link_stays() {
    let dirs = test_dirs();
    dirs.file("source", b"text");
    dirs.file("target", b"old content");
    let link = dirs.path("work/link");
    std::os::unix::fs::symlink("target", &link).unwrap();
    dirs.run(&["cp", "source", "link"]).assert(0, &[]);
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(std::fs::read(dirs.path("work/target")).unwrap(), b"text");
    std::fs::remove_file(dirs.path("work/target")).unwrap();
    dirs.run(&["cp", "source", "link"]).assert(2, &["link", "without a target"]);
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
}
