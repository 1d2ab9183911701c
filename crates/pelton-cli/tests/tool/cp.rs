//! `pelton cp`: the copy is whole, or what was there stays.

use crate::place::Place;
use pelton_testkit::deadline;
use rustix::process::Signal;
use std::os::unix::fs::PermissionsExt;
use std::time::Instant;

fn content(bytes: usize) -> Vec<u8> {
    (0..bytes as u64).map(|n| ((n * n) >> 7) as u8).collect()
}

#[test]
fn a_file_is_copied_whole_and_replaces_what_was_there() {
    let place = Place::new();
    for bytes in [0, 1, 20_000_001] {
        let source = place.file("source", &content(bytes));
        std::fs::set_permissions(&source, PermissionsExt::from_mode(0o740)).unwrap();
        place.file("copy", b"what was there");
        place.run(&["cp", "source", "copy", "--sync"]).assert(0, &[]);
        assert!(std::fs::read(place.path("work/copy")).unwrap() == content(bytes));
        assert_eq!(std::fs::metadata(place.path("work/copy")).unwrap().permissions().mode() & 0o700, 0o700);
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
    // Larger than any disk here copies before the signal comes, and sparse.
    std::fs::File::create(place.path("work/source")).unwrap().set_len(1 << 40).unwrap();
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
