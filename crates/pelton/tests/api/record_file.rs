//! Record files: written messages are read back. The remains of a failed or killed writer, and damage, are detected,
//! reported and never read as records. `failpoints/record_file.rs` kills a writer at every step of creating, writing
//! and rotating.

use crate::support::records::*;
use crate::support::*;
use pelton::{Chunk, Error, Peer, RecordFile, RecordFileOptions, RecordReader, Sink};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Not a test: the entry point of a child process. Without a role it does nothing.
#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    let path = PathBuf::from(role.get("at"));
    match role.get("role") {
        "limited" => limited(&path),
        "forks" => forks(&path),
        "no io_uring" => {
            without_io_uring(&path, role.number("call").unwrap() as i64, role.number("errno").unwrap() as i32)
        }
        "no fdatasync" => sync_fails(&path),
        "writer" => {
            let mut file = RecordFile::open(&path).unwrap();
            write(&mut file, &[run(1, 1, 5)]);
            report("written");
            read_line_from_parent();
        }
        other => panic!("{other}"),
    }
}

#[track_caller]
fn expect(path: &Path, wanted: &[(u64, u32, u32)]) {
    let (found, error) = read(path);
    assert!(error.is_none(), "{error:?}");
    assert_eq!(found, wanted);
}

fn bytes_of(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().len()
}

fn names(dir: &TestDir) -> Vec<String> {
    let name = |path: PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
    let mut names: Vec<String> = dir.entries().into_iter().map(name).collect();
    names.sort();
    names
}

fn inverted(path: &Path, at: u64) {
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[!byte[0]], at).unwrap();
}

#[test]
fn a_reader_returns_everything_written() {
    let (_dir, path) = dir_and_path();
    let mut file = RecordFile::open(&path).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o137, 0, "0640 less the umask");
    let peer = Some(Peer { pid: 7, uid: u32::MAX - 1 });
    let before = std::time::SystemTime::now();
    write(&mut file, &[run(1, 1, 10), Owned { peer, ..run(2, 5, 1) }]);
    write(&mut file, &[]);
    write(&mut file, &[run(1, 11, 300)]);
    // More pieces than one call takes.
    let many: Vec<Owned> = (0..700).map(|i| run(3 + i, 1, 1)).collect();
    write(&mut file, &many);
    let mut wanted = vec![(1, 1, 10), (2, 5, 1), (1, 11, 300)];
    wanted.extend((0..700).map(|i| (3 + i, 1, 1)));
    expect(&path, &wanted);

    let mut reader = RecordReader::open(&path).unwrap();
    assert_eq!(reader.number(), 1);
    let first = reader.next_chunk().unwrap().unwrap();
    assert_eq!((first.peer(), first.offset(), first.last_seq()), (None, 64, 10));
    assert_eq!(first.bytes(), run(1, 1, 10).bytes);
    assert!(first.written_at() >= before && first.written_at() <= std::time::SystemTime::now());
    assert_eq!(reader.next_chunk().unwrap().unwrap().peer(), peer);
}

#[test]
fn a_reader_at_the_end_reads_later_writes() {
    let (_dir, path) = dir_and_path();
    let mut file = RecordFile::open(&path).unwrap();
    let mut reader = RecordReader::open(&path).unwrap();
    for seq in 1..100 {
        assert!(reader.next_chunk().unwrap().is_none());
        write(&mut file, &[run(1, seq, 1)]);
        assert_eq!(reader.next_chunk().unwrap().unwrap().first_seq(), seq);
    }
}

#[test]
fn a_reopened_file_continues_after_the_last_number_of_each_lane() {
    let (_dir, path) = dir_and_path();
    let mut file = RecordFile::open(&path).unwrap();
    // Numbers skip 0.
    write(&mut file, &[run(1, u32::MAX - 2, 5), run(2, 1, 1), run(3, u32::MAX, 1), run(4, 1, 7)]);
    write(&mut file, &[run(2, 2, 9)]);
    for reopened in [false, true] {
        if reopened {
            drop(file);
            file = RecordFile::open(&path).unwrap();
            assert_eq!(file.cut_bytes(), 0);
        }
        let found: Vec<Option<u32>> = (1..6).map(|number| file.last_seq(lane(number))).collect();
        assert_eq!(found, [Some(2), Some(10), Some(u32::MAX), Some(7), None], "{reopened}");
    }
    write(&mut file, &[run(1, 3, 4)]);
    expect(&path, &[(1, u32::MAX - 2, 5), (2, 1, 1), (3, u32::MAX, 1), (4, 1, 7), (2, 2, 9), (1, 3, 4)]);
}

#[test]
fn a_tail_torn_at_any_byte_is_reported_and_cut() {
    let (_dir, path) = dir_and_path();
    let mut file = RecordFile::open(&path).unwrap();
    write(&mut file, &[run(1, 1, 4), run(2, 1, 4)]);
    let whole = bytes_of(&path);
    write(&mut file, &[run(1, 5, 4)]);
    drop(file);
    let all = std::fs::read(&path).unwrap();
    for cut in whole as usize..all.len() {
        std::fs::write(&path, &all[..cut]).unwrap();
        let (found, error) = read(&path);
        assert_eq!(found, [(1, 1, 4), (2, 1, 4)], "{cut}");
        match error {
            None => assert_eq!(cut as u64, whole),
            Some(Error::Damaged { offset, next: None, .. }) => assert_eq!(offset, whole, "{cut}"),
            other => panic!("{cut}: {other:?}"),
        }
        let mut file = RecordFile::open(&path).unwrap();
        assert_eq!((file.cut_bytes(), bytes_of(&path)), (cut as u64 - whole, whole), "{cut}");
        assert_eq!((file.last_seq(lane(1)), file.last_seq(lane(2))), (Some(4), Some(4)));
        write(&mut file, &[run(1, 5, 2)]);
        expect(&path, &[(1, 1, 4), (2, 1, 4), (1, 5, 2)]);
    }
}

#[test]
fn the_last_chunk_with_any_byte_changed_is_cut() {
    let (_dir, path) = dir_and_path();
    let mut file = RecordFile::open(&path).unwrap();
    write(&mut file, &[run(1, 1, 4)]);
    let whole = bytes_of(&path);
    write(&mut file, &[run(1, 5, 4)]);
    drop(file);
    let all = std::fs::read(&path).unwrap();
    for at in whole..all.len() as u64 {
        std::fs::write(&path, &all).unwrap();
        inverted(&path, at);
        assert!(matches!(read(&path).1, Some(Error::Damaged { next: None, offset, .. }) if offset == whole), "{at}");
        let file = RecordFile::open(&path).unwrap();
        assert_eq!((file.cut_bytes(), bytes_of(&path)), (all.len() as u64 - whole, whole), "{at}");
        assert_eq!(file.last_seq(lane(1)), Some(4));
    }
}

#[test]
fn damage_with_whole_chunks_after_it_is_refused_and_never_cut() {
    let (_dir, path) = dir_and_path();
    let mut file = RecordFile::open(&path).unwrap();
    write(&mut file, &[run(1, 1, 4)]);
    let second = bytes_of(&path);
    write(&mut file, &[run(2, 5, 4)]);
    let third = bytes_of(&path);
    write(&mut file, &[run(3, 1, 4)]);
    drop(file);
    let all = std::fs::read(&path).unwrap();
    for at in second..third {
        std::fs::write(&path, &all).unwrap();
        inverted(&path, at);
        let changed = std::fs::read(&path).unwrap();
        let error = RecordFile::open(&path).unwrap_err();
        let Error::Damaged { offset, next, .. } = &error else { panic!("{error:?}") };
        assert_eq!((*offset, *next), (second, Some(third)), "{at}");
        assert!(error.to_string().contains("move the file away"), "{error}");
        assert!(std::fs::read(&path).unwrap() == changed, "it was changed");
        // Reading continues after it.
        let mut reader = RecordReader::open(&path).unwrap();
        assert_eq!(reader.next_chunk().unwrap().unwrap().lane(), lane(1));
        assert!(matches!(reader.next_chunk(), Err(Error::Damaged { .. })));
        assert_eq!(reader.next_chunk().unwrap().unwrap().lane(), lane(3));
        assert!(reader.next_chunk().unwrap().is_none());
    }
}

#[test]
fn bytes_of_a_payload_that_resemble_a_chunk_are_not_one() {
    let (_dir, path) = dir_and_path();
    let mut file = RecordFile::open(&path).unwrap();
    write(&mut file, &[run(1, 1, 4)]);
    let mut chunk = std::fs::read(&path).unwrap()[64..].to_vec();
    drop(file);
    // An attacker sends bytes that imitate a chunk, except for the number of this file.
    std::fs::remove_file(&path).unwrap();
    let mut file = RecordFile::open(&path).unwrap();
    chunk.splice(..0, ((1 << 32) | chunk.len() as u64).to_le_bytes());
    let sent = Owned { lane: lane(1), peer: None, first_seq: 1, messages: 1, bytes: chunk };
    write(&mut file, &[sent]);
    drop(file);
    inverted(&path, 64);
    let file = RecordFile::open(&path).unwrap();
    assert_eq!((file.cut_bytes() > 0, bytes_of(&path)), (true, 64));
}

#[test]
fn a_second_writer_is_refused() {
    let (dir, path) = dir_and_path();
    let file = RecordFile::open(&path).unwrap();
    let error = RecordFile::open(&path).unwrap_err();
    assert!(matches!(&error, Error::RoleTaken { role, .. } if role == "writer"), "{error:?}");
    assert!(error.to_string().contains("has a writer already"), "{error}");
    // Also under another name.
    std::os::unix::fs::symlink("log", dir.path().join("link")).unwrap();
    assert!(matches!(RecordFile::open(dir.path().join("link")), Err(Error::RoleTaken { .. })));
    drop(file);
    let child = Child::start(Role::new(child, "writer").with("at", path.display()));
    child.expect("written");
    assert!(matches!(RecordFile::open(&path), Err(Error::RoleTaken { .. })));
    child.kill();
    assert_eq!(RecordFile::open(&path).unwrap().last_seq(lane(1)), Some(5));
}

#[test]
fn another_kind_of_file_is_refused_and_left_alone() {
    let (dir, path) = dir_and_path();
    let refused = |path: &Path, words: &str| {
        for error in [RecordFile::open(path).err().unwrap(), RecordReader::open(path).err().unwrap()] {
            assert!(matches!(error, Error::NotARecordFile { .. }), "{error:?}");
            assert!(error.to_string().contains(words), "{error}");
        }
    };
    std::fs::write(&path, "a diary, of more than sixty-four bytes, which nobody wants to lose at all").unwrap();
    refused(&path, "it begins with \"a diary,\"");
    std::fs::write(&path, "short").unwrap();
    refused(&path, "it has 5 bytes");
    assert_eq!(std::fs::read(&path).unwrap(), b"short");
    let fifo = dir.path().join("fifo");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::from_raw_mode(0o600)).unwrap();
    refused(&fifo, "not a regular file");
    std::fs::remove_file(&path).unwrap();
    RecordFile::open(&path).unwrap();
    inverted(&path, 20);
    refused(&path, "checksum");
    assert!(matches!(RecordReader::open(dir.path().join("none")), Err(Error::System { .. })));
    assert!(matches!(RecordFileOptions::new().rotate_bytes(0).open(&path), Err(Error::Option { .. })));
    // An empty file, created by somebody for its mode, is a valid start.
    std::fs::write(&path, "").unwrap();
    write(&mut RecordFile::open(&path).unwrap(), &[run(1, 1, 1)]);
    expect(&path, &[(1, 1, 1)]);
}

#[test]
fn rotation_by_size_forgets_no_number() {
    let (dir, path) = dir_and_path();
    // One with foreign numbers, and a valid one.
    for name in ["log.1", "log.00000x", "log.000003"] {
        std::fs::write(dir.path().join(name), "").unwrap();
    }
    let rotating = RecordFileOptions::new().rotate_bytes(4000);
    let mut file = rotating.open(&path).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o604)).unwrap();
    write(&mut file, &[run(1, 1, 3)]);
    let mut seq = 1;
    while !dir.path().join("log.000005").exists() {
        write(&mut file, &[run(2, seq, 2)]);
        seq += 2;
        assert!(bytes_of(&path) <= 4000);
    }
    assert_eq!(names(&dir), ["log", "log.000003", "log.000004", "log.000005", "log.00000x", "log.1"]);
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o604);
    let mut found = Vec::new();
    for (name, number) in [("log.000004", 4), ("log.000005", 5), ("log", 6)] {
        let path = dir.path().join(name);
        assert_eq!(RecordReader::open(&path).unwrap().number(), number);
        let (chunks, error) = read(&path);
        assert!(error.is_none(), "{error:?}");
        found.extend(chunks);
    }
    assert_eq!(found[0], (1, 1, 3));
    let wanted: Vec<(u64, u32, u32)> = (1..seq).step_by(2).map(|seq| (2, seq, 2)).collect();
    assert_eq!(found[1..], wanted);
    // Larger than the maximum of a file: it gets a file of its own.
    write(&mut file, &[run(2, seq, 100)]);
    assert!(bytes_of(&path) > 4000);
    write(&mut file, &[run(3, 1, 1)]);
    drop(file);
    let file = rotating.open(&path).unwrap();
    // Neither has records in this file.
    assert_eq!((file.last_seq(lane(1)), file.last_seq(lane(2))), (Some(3), Some(seq + 99)));
    drop(file);
    // The remains of a killed rotation beside a file have no use.
    std::fs::copy(&path, dir.path().join("log.pelton-next")).unwrap();
    drop(rotating.open(&path).unwrap());
    assert!(!names(&dir).contains(&"log.pelton-next".to_owned()));
    // A file that replaces a removed one still has a number of its own.
    std::fs::remove_file(&path).unwrap();
    rotating.open(&path).unwrap();
    assert_eq!(RecordReader::open(&path).unwrap().number(), 8);
}

#[test]
fn an_incomplete_temporary_file_is_emptied_before_its_reuse() {
    let (dir, path) = dir_and_path();
    std::fs::write(dir.path().join("log.pelton-next"), [7; 1000]).unwrap();
    let file = RecordFile::open(&path).unwrap();
    assert_eq!(file.cut_bytes(), 0);
    // Like a new file.
    let other = RecordFile::open(dir.path().join("other")).unwrap();
    assert_eq!(bytes_of(&path), bytes_of(other.path()));
    assert_eq!(names(&dir).len(), 2);
}

#[test]
fn a_rotation_remembers_the_most_recent_of_very_many_lanes() {
    let (_dir, path) = dir_and_path();
    let mut file = RecordFileOptions::new().rotate_bytes(1 << 20).open(&path).unwrap();
    for number in 0..20_000 {
        write(&mut file, &[run(number, 1 + number as u32 % 7, 1)]);
    }
    drop(file);
    let file = RecordFile::open(&path).unwrap();
    assert!(RecordReader::open(&path).unwrap().number() > 1);
    for number in 20_000 - 4096..20_000 {
        assert_eq!(file.last_seq(lane(number)), Some(1 + number as u32 % 7), "{number}");
    }
}

#[test]
fn each_sync_option_works_with_and_without_io_uring() {
    let (_dir, path) = dir_and_path();
    let each = [
        RecordFileOptions::new().sync_bytes(0),
        RecordFileOptions::new().sync_bytes(1),
        RecordFileOptions::new().sync_bytes(10_000).rotate_bytes(40_000),
        RecordFileOptions::new().sync_interval(Duration::ZERO),
        RecordFileOptions::new().sync_interval(Duration::from_secs(3600)),
    ];
    let mut seq = 1;
    for options in each {
        let mut file = options.open(&path).unwrap();
        for _ in 0..100 {
            write(&mut file, &[run(1, seq, 5)]);
            seq += 5;
        }
        file.sync().unwrap();
        assert_eq!(file.due(), None);
        write(&mut file, &[run(1, seq, 5)]);
        seq += 5;
        if let Some(due) = file.due() {
            assert!(due > Instant::now() + Duration::from_secs(3000), "only of the last options");
        }
    }
    for call in [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter] {
        for errno in [libc::EPERM, libc::ENOSYS] {
            let role =
                Role::new(child, "no io_uring").with("at", path.display()).with("call", call).with("errno", errno);
            let child = Child::start(role);
            child.expect("well");
            child.wait_for_success();
        }
    }
    assert_eq!(RecordFile::open(&path).unwrap().last_seq(lane(9)), Some(400));
}

fn without_io_uring(path: &Path, call: i64, errno: i32) {
    seccomp::refuse(call, errno);
    let mut file = RecordFileOptions::new().sync_bytes(1000).open(path).unwrap();
    let first = file.last_seq(lane(9)).map_or(1, seq_after);
    for seq in first..first + 100 {
        write(&mut file, &[run(9, seq, 1)]);
    }
    file.sync().unwrap();
    report("well");
}

#[test]
fn the_write_that_promises_a_sync_returns_its_failure_once() {
    let (_dir, path) = dir_and_path();
    let child = Child::start(Role::new(child, "no fdatasync").with("at", path.display()));
    child.expect("well");
    child.wait_for_success();
    expect(&path, &[(1, 1, 1), (1, 2, 1), (1, 3, 1), (1, 4, 1)]);
}

fn sync_fails(path: &Path) {
    let is_eio = |done: pelton::Result<()>| match done.unwrap_err() {
        Error::System { what, error: source } => {
            assert!(what.contains(&path.display().to_string()), "{what}");
            source.raw_os_error() == Some(libc::EIO)
        }
        error => panic!("{error:?}"),
    };
    let mut each = RecordFileOptions::new().sync_bytes(0).open(path).unwrap();
    write(&mut each, &[run(1, 1, 1)]);
    let whole = bytes_of(path);
    // So that the call itself is made.
    seccomp::refuse(libc::SYS_io_uring_setup, libc::EPERM);
    seccomp::refuse(libc::SYS_fdatasync, libc::EIO);
    for _ in 0..2 {
        assert!(is_eio(each.write(&[run(1, 2, 1).run()])));
        assert_eq!((bytes_of(path), each.last_seq(lane(1))), (whole, Some(1)));
    }
    drop(each);
    let mut later = RecordFileOptions::new().sync_bytes(1).open(path).unwrap();
    write(&mut later, &[run(1, 2, 1)]);
    // The failure of the previous write.
    assert!(is_eio(later.write(&[run(1, 3, 1).run()])));
    assert_eq!(later.last_seq(lane(1)), Some(2));
    write(&mut later, &[run(1, 3, 1)]);
    assert!(is_eio(later.sync()));
    // Also where the file was moved, and the one now at the path is unusable.
    let moved = path.with_extension("1");
    std::fs::rename(path, &moved).unwrap();
    std::fs::write(path, [b'x'; 100]).unwrap();
    assert!(is_eio(later.write(&[run(1, 4, 1).run()])));
    std::fs::rename(&moved, path).unwrap();
    drop(later);
    write(&mut RecordFile::open(path).unwrap(), &[run(1, 4, 1)]);
    report("well");
}

#[test]
fn a_file_size_limit_is_an_error_and_nothing_of_the_write_counts() {
    let (_dir, path) = dir_and_path();
    let child = Child::start(Role::new(child, "limited").with("at", path.display()));
    child.expect("well");
    child.wait_for_success();
    expect(&path, &[(1, 1, 4), (1, 5, 1), (1, 6, 400)]);
}

fn limited(path: &Path) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let before = getrlimit(Resource::Fsize);
    let limit = |bytes| setrlimit(Resource::Fsize, Rlimit { current: Some(bytes), ..before }).unwrap();
    let mut file = RecordFile::open(path).unwrap();
    write(&mut file, &[run(1, 1, 4)]);
    let whole = bytes_of(path);
    let all = run(1, 5, 400);
    for more in [0, 1, 63, 64, 65, 10_000] {
        limit(whole + more);
        let error = file.write(&[all.run()]).unwrap_err();
        let Error::System { error: source, .. } = &error else { panic!("{error:?}") };
        assert_eq!(source.raw_os_error(), Some(libc::EFBIG));
        assert!(error.to_string().contains(&path.display().to_string()), "{error}");
        assert!(error.to_string().contains("RLIMIT_FSIZE"), "{error}");
        assert_eq!((bytes_of(path), file.last_seq(lane(1))), (whole, Some(4)));
    }
    write(&mut file, &[run(1, 5, 1)]);
    // A new file needs space too.
    limit(63);
    let other = path.with_extension("other");
    assert!(RecordFile::open(&other).is_err());
    assert!(!other.exists());
    limit(1 << 20);
    write(&mut file, &[run(1, 6, 400)]);
    report("well");
}

#[test]
fn a_beginning_without_space_leaves_an_empty_file_that_begins_with_the_last_numbers_later() {
    let dir = TestDir::unwatched();
    let Some(small) = Mounted::tmpfs(&dir.path().join("small"), "size=1m") else { return };
    let path = small.0.join("log");
    let mut file = RecordFile::open(&path).unwrap();
    let runs: Vec<Owned> = (0..1000).map(|of| run(of, 1, 1)).collect();
    file.write(&runs.iter().map(Owned::run).collect::<Vec<_>>()).unwrap();
    // Another program truncates the file, and there is space for a part of the beginning.
    std::fs::File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
    small.resize("4k");
    for _ in 0..2 {
        assert!(matches!(file.write(&[runs[0].run()]), Err(Error::NoSpace { .. })));
        assert_eq!(bytes_of(&path), 0);
    }
    small.resize("1m");
    file.write(&[runs[0].run()]).unwrap();
    drop(file);
    let file = RecordFile::open(&path).unwrap();
    assert!((0..1000).all(|of| file.last_seq(lane(of)) == Some(1)));
}

#[test]
fn a_full_disk_takes_nothing_of_a_write_and_all_of_it_once_space_is_free() {
    let dir = TestDir::unwatched();
    let Some(small) = Mounted::tmpfs(&dir.path().join("small"), "size=256k") else { return };
    let path = small.0.join("log");
    let mut file = RecordFileOptions::new().rotate_bytes(100_000).open(&path).unwrap();
    let mut wanted: Vec<(u64, u32, u32)> = Vec::new();
    let (mut seq, mut refused) = (1, 0);
    while refused < 3 {
        // Three chunks at once, the first of which would often fit alone.
        let runs: Vec<Owned> = (0..3).map(|i| run(i, seq, 40)).collect();
        let before = (bytes_of(&path), file.last_seq(lane(0)));
        match file.write(&runs.iter().map(Owned::run).collect::<Vec<_>>()) {
            Ok(()) => {
                wanted.extend((0..3).map(|i| (i, seq, 40)));
                seq += 40;
            }
            Err(error) => {
                assert!(matches!(&error, Error::NoSpace { path, .. } if path.contains("log")), "{error:?}");
                assert_eq!((bytes_of(&path), file.last_seq(lane(0))), before);
                refused += 1;
                if refused == 2 {
                    // The oldest may be dropped.
                    let oldest = small.0.join("log.000001");
                    wanted.drain(..read(&oldest).0.len());
                    std::fs::remove_file(oldest).unwrap();
                }
            }
        }
    }
    drop(file);
    assert_eq!(RecordFile::open(&path).unwrap().cut_bytes(), 0);
    let mut names: Vec<PathBuf> = std::fs::read_dir(&small.0).unwrap().map(|entry| entry.unwrap().path()).collect();
    names.sort();
    names.rotate_left(1);
    let found: Vec<(u64, u32, u32)> = names.iter().flat_map(|path| read(path).0).collect();
    assert_eq!(found, wanted);
}

#[test]
fn a_forked_child_cannot_use_the_file_and_its_exit_changes_nothing() {
    let (_dir, path) = dir_and_path();
    // In a separate process, so that the forked one does not hold descriptors of other tests.
    Child::start(Role::new(child, "forks").with("at", path.display())).wait_for_success();
    expect(&path, &[(1, 1, 5), (1, 6, 2)]);
}

fn forks(path: &Path) {
    let mut file = RecordFileOptions::new().sync_bytes(1).open(path).unwrap();
    write(&mut file, &[run(1, 1, 5)]);
    // SAFETY: the child does little, needs no other thread, and exits without unwinding.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let next = run(1, 6, 1);
        let refused =
            matches!(file.write(&[next.run()]), Err(Error::Forked)) && matches!(file.sync(), Err(Error::Forked));
        drop(file);
        // SAFETY: no pointers.
        unsafe { libc::_exit(i32::from(!refused)) };
    }
    let mut status = 0;
    // SAFETY: one word, which belongs to this process.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    assert_eq!(status, 0);
    assert!(matches!(RecordFile::open(path), Err(Error::RoleTaken { .. })), "the child gave the lock back");
    write(&mut file, &[run(1, 6, 2)]);
    file.sync().unwrap();
}

#[test]
fn a_concurrent_change_of_the_records_cannot_damage_the_file() {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
    let (_dir, path) = dir_and_path();
    let mut file = RecordFile::open(&path).unwrap();
    let bytes = run(1, 1, 2000).bytes;
    let shared: Vec<AtomicU64> =
        bytes.chunks(8).map(|word| AtomicU64::new(u64::from_ne_bytes(word.try_into().unwrap()))).collect();
    // SAFETY: the same memory. Another process can write the mapping, so the value read may be anything.
    let seen = unsafe { std::slice::from_raw_parts(shared.as_ptr().cast::<u8>(), bytes.len()) };
    let done = AtomicBool::new(false);
    let stranger = Some(Peer { pid: 7, uid: rustix::process::geteuid().as_raw() + 1 });
    const WRITES: u64 = 200;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Random::new(1);
            while !done.load(Relaxed) {
                shared[random.below(shared.len() as u64) as usize].store(random.word(), Relaxed);
            }
        });
        for _ in 0..WRITES {
            let mine = run(2, 1, 1);
            file.write(&[Chunk::new(lane(1), stranger, 1, 2000, seen), mine.run()]).unwrap();
        }
        done.store(true, Relaxed);
    });
    drop(file);
    // Their records are arbitrary, but every checksum is right, so that no other records are lost by it.
    assert_eq!(RecordFile::open(&path).unwrap().cut_bytes(), 0);
    let mut reader = RecordReader::open(&path).unwrap();
    let (mut mine, mut broken) = (0, 0);
    loop {
        match reader.next_chunk() {
            Ok(Some(chunk)) => mine += u64::from(chunk.lane() == lane(2)),
            Ok(None) => break,
            Err(Error::Damaged { found, next: Some(_), .. }) => {
                assert!(!found.contains("checksum"), "{found}");
                broken += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(mine, WRITES);
    assert!(broken > 0, "nothing was changed");
}

/// The bytes of a file of several lanes and chunks, after a rotation.
fn sample() -> Vec<u8> {
    let (_dir, path) = dir_and_path();
    let mut file = RecordFileOptions::new().rotate_bytes(1500).open(&path).unwrap();
    write(&mut file, &[run(1, 1, 7), run(2, u32::MAX - 1, 3)]);
    write(&mut file, &[run(1, 8, 1)]);
    while bytes_of(&path) > 600 || RecordReader::open(&path).unwrap().number() == 1 {
        write(&mut file, &[run(1, 9, 1)]);
    }
    write(&mut file, &[run(3, 1, 2), run(4, 1, 1)]);
    write(&mut file, &[run(3, 3, 1)]);
    std::fs::read(&path).unwrap()
}

/// A random change of a file.
#[derive(Clone, Debug)]
enum Change {
    Byte(usize, u8),
    Word(usize, u64),
    Cut(usize),
    Append(Vec<u8>),
    Move {
        from: usize,
        to: usize,
        bytes: usize,
    },
    /// The checksum of a header is corrected here; only a process that can read the file could do that.
    Sign(usize),
}

fn changes() -> impl proptest::strategy::Strategy<Value = Vec<Change>> {
    use proptest::prelude::*;
    let word = prop_oneof![Just(0), Just(u64::MAX), Just(1 << 31), Just(1 << 34), 0..4096u64, any::<u64>()];
    let change = prop_oneof![
        (any::<usize>(), any::<u8>()).prop_map(|(at, to)| Change::Byte(at, to)),
        (any::<usize>(), word).prop_map(|(at, to)| Change::Word(at, to)),
        any::<usize>().prop_map(Change::Cut),
        proptest::collection::vec(any::<u8>(), 0..200).prop_map(Change::Append),
        (any::<usize>(), any::<usize>(), 0..300usize).prop_map(|(from, to, bytes)| Change::Move { from, to, bytes }),
        any::<usize>().prop_map(Change::Sign),
    ];
    proptest::collection::vec(change, 1..12)
}

fn change(file: &mut Vec<u8>, change: &Change) {
    let len = file.len().max(1);
    match change {
        Change::Byte(at, to) if !file.is_empty() => file[at % len] = *to,
        Change::Word(at, to) if file.len() >= 8 => {
            let at = at % (len / 8) * 8;
            file[at..at + 8].copy_from_slice(&to.to_le_bytes());
        }
        Change::Cut(at) => file.truncate(at % len),
        Change::Append(bytes) => file.extend(bytes),
        Change::Move { from, to, bytes } => {
            let (from, to) = (from % len / 8 * 8, to % len / 8 * 8);
            let bytes = (*bytes).min(file.len() - from).min(file.len() - to);
            file.copy_within(from..from + bytes, to);
        }
        Change::Sign(which) => {
            let headers: Vec<usize> =
                (64..file.len().saturating_sub(64)).step_by(8).filter(|at| file[*at..].starts_with(b"pchk")).collect();
            if let Some(&at) = headers.get(which % headers.len().max(1)) {
                let signed = [&file[32..40], &file[at..at + 60]].concat();
                let checksum = crc32(&signed).to_le_bytes();
                file[at + 60..at + 64].copy_from_slice(&checksum);
            }
        }
        _ => {}
    }
}

/// Bit by bit, as the specification defines it.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| crc >> 1 ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 })
    })
}

proptest::proptest! {
    /// Never a panic, always an end; and the repaired file can be read as far as the writer reports.
    #[test]
    fn any_bytes_are_read_or_refused(changes in changes()) {
        let (_dir, path) = dir_and_path();
        let mut file = sample();
        changes.iter().for_each(|one| change(&mut file, one));
        std::fs::write(&path, &file).unwrap();
        let read_all = |path: &Path| {
            let mut reader = RecordReader::open(path).ok()?;
            let (mut chunks, mut at) = (0, 64);
            loop {
                match reader.next_chunk() {
                    Ok(Some(chunk)) => {
                        assert!(chunk.offset() >= at && chunk.records().count() == chunk.message_count() as usize);
                        (chunks, at) = (chunks + 1, chunk.offset() + 64);
                    }
                    Ok(None) => return Some((chunks, None)),
                    Err(Error::Damaged { offset, next: Some(next), .. }) => assert!(offset >= at && next > offset),
                    Err(error) => return Some((chunks, Some(error))),
                }
            }
        };
        let before = read_all(&path);
        match RecordFile::open(&path) {
            Ok(opened) => {
                let cut = opened.cut_bytes();
                drop(opened);
                let (chunks, error) = read_all(&path).unwrap();
                assert!(error.is_none(), "{error:?}");
                // An empty file is a valid start.
                if let Some((chunks_before, torn)) = before {
                    assert_eq!((chunks, bytes_of(&path)), (chunks_before, file.len() as u64 - cut));
                    assert_eq!(cut > 0, torn.is_some());
                } else {
                    assert!(file.is_empty());
                }
            }
            Err(Error::Damaged { next, .. }) => assert!(next.is_some()),
            Err(Error::NotARecordFile { .. }) => {}
            Err(error) => panic!("{error:?}"),
        }
    }
}
