//! Record files that other programs rotate, truncate, delete and replace while they are open, and foreign files at
//! the temporary name.

use crate::support::records::*;
use crate::support::*;
use pelton::{Chunk, Error, FileChange, RecordFile, RecordFileOptions, RecordReader, Sink};
use pelton_testkit::kernel::system_call_of;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt};
use std::path::Path;

#[track_caller]
fn expect(path: &Path, wanted: &[(u64, u32, u32)]) {
    let (found, error) = read(path);
    assert!(error.is_none(), "{error:?}");
    assert_eq!(found, wanted);
}

fn names(dir: &TestDir) -> Vec<String> {
    let name = |path: std::path::PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
    let mut names: Vec<String> = dir.entries().into_iter().map(name).collect();
    names.sort();
    names
}

/// Each way in which a file is created at the temporary name: at the first opening, and by a rotation.
fn at_each_creation(prepare: impl Fn(&Path), check: impl Fn(&Path)) {
    for rotates in [false, true] {
        let (dir, path) = dir_and_path();
        let temporary = dir.path().join("log.pelton-next");
        let options = RecordFileOptions::new().rotate_bytes(1000);
        if rotates {
            let mut file = options.open(&path).unwrap();
            write(&mut file, &[run(1, 1, 5)]);
            prepare(&temporary);
            write(&mut file, &[run(1, 6, 5)]);
            expect(&path, &[(1, 6, 5)]);
        } else {
            prepare(&temporary);
            let mut file = options.open(&path).unwrap();
            assert_eq!(file.last_seq(lane(1)), None, "of a file that another has prepared");
            write(&mut file, &[run(1, 1, 5)]);
            expect(&path, &[(1, 1, 5)]);
        }
        assert!(!temporary.exists());
        check(dir.path());
    }
}

#[test]
fn a_symbolic_link_at_the_temporary_name_is_not_followed() {
    at_each_creation(
        |temporary| {
            std::fs::write(temporary.with_file_name("victim"), "a text").unwrap();
            std::os::unix::fs::symlink("victim", temporary).unwrap();
        },
        |directory| {
            assert_eq!(std::fs::read_to_string(directory.join("victim")).unwrap(), "a text");
            assert!(std::fs::symlink_metadata(directory.join("log")).unwrap().is_file());
        },
    );
}

#[test]
fn a_file_prepared_at_the_temporary_name_never_becomes_the_log() {
    let (_elsewhere, other) = dir_and_path();
    write(&mut RecordFile::open(&other).unwrap(), &[run(1, 1, 100)]);
    at_each_creation(
        |temporary| {
            // Whole, with last numbers that would prevent messages from being written, and owned by another user.
            std::fs::copy(&other, temporary).unwrap();
            std::fs::hard_link(temporary, temporary.with_file_name("prepared")).unwrap();
            std::fs::set_permissions(temporary, PermissionsExt::from_mode(0o666)).unwrap();
            if is_root() {
                std::os::unix::fs::chown(temporary, Some(12345), Some(12345)).unwrap();
            }
        },
        |directory| {
            let (log, prepared) = (directory.join("log"), directory.join("prepared"));
            assert_ne!(std::fs::metadata(&log).unwrap().ino(), std::fs::metadata(&prepared).unwrap().ino());
            assert_eq!(std::fs::metadata(&log).unwrap().permissions().mode() & 0o007, 0);
            expect(&prepared, &[(1, 1, 100)]);
        },
    );
}

#[test]
fn a_rotation_killed_between_its_renames_keeps_the_last_numbers() {
    let (dir, path) = dir_and_path();
    let mut file = RecordFile::open(&path).unwrap();
    write(&mut file, &[run(1, 1, 7), run(2, 1, 3)]);
    drop(file);
    std::fs::rename(&path, dir.path().join("log.000001")).unwrap();
    std::fs::write(dir.path().join("log.pelton-next"), [7; 100]).unwrap();
    let file = RecordFile::open(&path).unwrap();
    assert_eq!((file.last_seq(lane(1)), file.last_seq(lane(2))), (Some(7), Some(3)));
    assert_eq!(RecordReader::open(&path).unwrap().number(), 2);
    assert_eq!(names(&dir), ["log", "log.000001"]);
}

/// A file with some content, another program's action on it, and the later writes.
fn disturbed(disturb: impl Fn(&Path), change: Option<FileChange>, after: impl Fn(&TestDir, &Path)) {
    for options in
        [RecordFileOptions::new(), RecordFileOptions::new().sync_bytes(0), RecordFileOptions::new().sync_bytes(1)]
    {
        let (dir, path) = dir_and_path();
        let mut file = options.open(&path).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o604)).unwrap();
        write(&mut file, &[run(1, 1, 5), run(2, 1, 1)]);
        write(&mut file, &[run(1, 6, 2)]);
        assert_eq!(file.take_change(), None);
        disturb(&path);
        write(&mut file, &[run(1, 8, 3)]);
        assert_eq!((file.take_change(), file.take_change()), (change, None));
        write(&mut file, &[run(1, 11, 1)]);
        file.sync().unwrap();
        after(&dir, &path);
        // The written messages are known, wherever they are, also to the next writer.
        for reopened in [false, true] {
            if reopened {
                drop(file);
                file = options.open(&path).unwrap();
                assert_eq!(file.cut_bytes(), 0);
            }
            assert_eq!((file.last_seq(lane(1)), file.last_seq(lane(2))), (Some(11), Some(1)));
        }
        let _ = dir;
    }
}

#[test]
fn an_open_log_that_is_copied_and_truncated_starts_anew() {
    disturbed(
        |path| {
            std::fs::copy(path, path.with_extension("1")).unwrap();
            std::fs::File::options().write(true).open(path).unwrap().set_len(0).unwrap();
        },
        Some(FileChange::Truncated),
        |dir, path| {
            expect(&dir.path().join("log.1"), &[(1, 1, 5), (2, 1, 1), (1, 6, 2)]);
            expect(path, &[(1, 8, 3), (1, 11, 1)]);
            assert_eq!(RecordReader::open(path).unwrap().number(), 2);
        },
    );
}

#[test]
fn a_log_truncated_within_its_records_continues_after_the_last_whole_ones() {
    disturbed(
        |path| {
            let bytes = std::fs::metadata(path).unwrap().len();
            std::fs::File::options().write(true).open(path).unwrap().set_len(bytes - 1).unwrap();
        },
        Some(FileChange::Truncated),
        |_, path| expect(path, &[(1, 1, 5), (2, 1, 1), (1, 8, 3), (1, 11, 1)]),
    );
}

#[test]
fn an_open_log_that_is_deleted_is_created_again() {
    disturbed(
        |path| std::fs::remove_file(path).unwrap(),
        Some(FileChange::Deleted),
        |dir, path| {
            expect(path, &[(1, 8, 3), (1, 11, 1)]);
            assert_eq!(std::fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o604);
            assert_eq!(names(dir), ["log"]);
        },
    );
}

#[test]
fn an_open_log_that_is_renamed_is_created_again_with_its_mode() {
    disturbed(
        |path| std::fs::rename(path, path.with_extension("1")).unwrap(),
        Some(FileChange::Moved),
        |dir, path| {
            expect(&dir.path().join("log.1"), &[(1, 1, 5), (2, 1, 1), (1, 6, 2)]);
            expect(path, &[(1, 8, 3), (1, 11, 1)]);
            assert_eq!(std::fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o604);
        },
    );
}

#[test]
fn a_log_renamed_and_created_empty_continues_in_the_new_file() {
    disturbed(
        |path| {
            std::fs::rename(path, path.with_extension("1")).unwrap();
            std::fs::write(path, "").unwrap();
            std::fs::set_permissions(path, PermissionsExt::from_mode(0o600)).unwrap();
        },
        Some(FileChange::Moved),
        |dir, path| {
            expect(&dir.path().join("log.1"), &[(1, 1, 5), (2, 1, 1), (1, 6, 2)]);
            expect(path, &[(1, 8, 3), (1, 11, 1)]);
            assert_eq!(std::fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
        },
    );
}

#[test]
fn bytes_appended_by_another_program_are_cut() {
    disturbed(
        |path| {
            use std::io::Write as _;
            std::fs::File::options().append(true).open(path).unwrap().write_all(b"a line\n").unwrap();
        },
        Some(FileChange::Extended),
        |_, path| expect(path, &[(1, 1, 5), (2, 1, 1), (1, 6, 2), (1, 8, 3), (1, 11, 1)]),
    );
}

#[test]
fn a_log_continues_in_another_record_file_at_its_path_and_in_nothing_else() {
    let (dir, path) = dir_and_path();
    let mut file = RecordFileOptions::new().rotate_bytes(2000).open(&path).unwrap();
    write(&mut file, &[run(1, 1, 5)]);
    let other = dir.path().join("other");
    write(&mut RecordFile::open(&other).unwrap(), &[run(1, 1, 2), run(3, 1, 4)]);
    std::fs::rename(&path, dir.path().join("log.1")).unwrap();
    std::fs::rename(&other, &path).unwrap();
    write(&mut file, &[run(1, 6, 1)]);
    expect(&path, &[(1, 1, 2), (3, 1, 4), (1, 6, 1)]);
    assert_eq!((file.last_seq(lane(1)), file.last_seq(lane(3))), (Some(6), Some(4)));

    // Another user's file, which a rotation must not rename either.
    std::fs::rename(&path, dir.path().join("log.2")).unwrap();
    let text = "a diary, of more than sixty-four bytes, which nobody wants to lose at all\n".repeat(40);
    std::fs::write(&path, &text).unwrap();
    let runs = [run(1, 7, 1)];
    for _ in 0..2 {
        let error = file.write(&runs.iter().map(Owned::run).collect::<Vec<Chunk<'_>>>()).unwrap_err();
        assert!(matches!(error, Error::NotARecordFile { .. }), "{error:?}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        assert_eq!(names(&dir), ["log", "log.1", "log.2"]);
    }
    std::fs::remove_file(&path).unwrap();
    write(&mut file, &runs);
    expect(&path, &[(1, 7, 1)]);
    // Overwritten in place.
    std::fs::write(&path, &text).unwrap();
    let runs = [run(1, 8, 1)];
    let error = file.write(&[runs[0].run()]).unwrap_err();
    assert!(error.to_string().contains("overwritten"), "{error}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    std::fs::rename(&path, dir.path().join("diary")).unwrap();
    write(&mut file, &runs);
    expect(&path, &[(1, 8, 1)]);
}

#[test]
fn a_log_whose_directory_has_moved_continues_in_the_open_file() {
    let (dir, _) = dir_and_path();
    let (directory, elsewhere) = (dir.path().join("logs"), dir.path().join("elsewhere"));
    std::fs::create_dir(&directory).unwrap();
    let path = directory.join("log");
    let mut file = RecordFile::open(&path).unwrap();
    write(&mut file, &[run(1, 1, 5)]);
    std::fs::rename(&directory, &elsewhere).unwrap();
    write(&mut file, &[run(1, 6, 1)]);
    expect(&elsewhere.join("log"), &[(1, 1, 5), (1, 6, 1)]);
    // A file in its place is no directory either.
    std::fs::write(&directory, "a text").unwrap();
    write(&mut file, &[run(1, 7, 1)]);
    expect(&elsewhere.join("log"), &[(1, 1, 5), (1, 6, 1), (1, 7, 1)]);
    assert_eq!(file.take_change(), None);
    // With the directory back at its path, the file at the path is the log again.
    std::fs::remove_file(&directory).unwrap();
    std::fs::create_dir(&directory).unwrap();
    write(&mut file, &[run(1, 8, 1)]);
    assert_eq!(file.take_change(), Some(FileChange::Moved));
    expect(&path, &[(1, 8, 1)]);
}

#[test]
fn a_write_does_not_wait_for_another_writer_at_the_path() {
    let (dir, path) = dir_and_path();
    let mut file = RecordFile::open(&path).unwrap();
    write(&mut file, &[run(1, 1, 5)]);
    std::fs::rename(&path, dir.path().join("log.1")).unwrap();
    let other = RecordFile::open(&path).unwrap();
    let file = std::thread::spawn(move || {
        // The standard library panics if a sleep fails.
        seccomp::refuse(libc::SYS_clock_nanosleep, libc::EPERM);
        seccomp::refuse(libc::SYS_nanosleep, libc::EPERM);
        let error = file.write(&[run(1, 6, 1).run()]).unwrap_err();
        assert!(matches!(error, Error::RoleTaken { .. }), "{error:?}");
        file
    });
    let mut file = file.join().unwrap();
    drop(other);
    write(&mut file, &[run(1, 6, 1)]);
    expect(&path, &[(1, 6, 1)]);
}

#[test]
fn opening_waits_briefly_for_a_writer_that_is_closing() {
    let (_dir, path) = dir_and_path();
    let mut file = RecordFile::open(&path).unwrap();
    write(&mut file, &[run(1, 1, 5)]);
    let (thread_sender, thread_receiver) = std::sync::mpsc::channel();
    let opener = std::thread::spawn({
        let path = path.clone();
        move || {
            thread_sender.send(this_thread()).unwrap();
            RecordFile::open(path)
        }
    });
    let thread = thread_receiver.recv().unwrap();
    let nanosleep = [libc::SYS_nanosleep, libc::SYS_clock_nanosleep];
    eventually("it waits, or fails", || {
        opener.is_finished() || system_call_of(thread).is_some_and(|call| nanosleep.contains(&call))
    });
    drop(file);
    assert_eq!(opener.join().unwrap().unwrap().last_seq(lane(1)), Some(5));
}
