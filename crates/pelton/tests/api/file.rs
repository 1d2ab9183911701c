//! Files: every operation, by io_uring and by the threads alone, on tmpfs and on a disk; cancelling, dropping at
//! every stage, chains, roots, bounds, event loops, forks, full disks, errors; and random sequences compared with
//! `std::fs`. This file has the shared parts, operations, completions, chains, errors, channels, and refused
//! io_uring; `file/` has the rest by claim.

mod limits;
mod memory;
mod roots;
mod sequences;
mod waiting;

use crate::support::{
    Child, DEADLINE, Random, Role, Watchdog, deadline, eventually, eventually_is, is_readable, is_root, kernel,
    read_line_from_parent, readable, report, seccomp,
};
use memory::ForeignBuffers;
use pelton::Error;
use pelton::file::{Buffer, Completion, Engine, EngineOptions, File, Kind, Open, Operation, Output, Submitted, Tail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::Write as _;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// The entry point of a child of these tests.
#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    match role.get("role") {
        "limited" => limits::limited(Path::new(role.get("path")), role.get("way")),
        "limited sequences" => sequences::limited_sequences(Path::new(role.get("path")), role.get("way")),
        "full" => limits::full(Path::new(role.get("path")), role.get("way")),
        "many" => limits::many(Path::new(role.get("path")), role.get("way")),
        "left" => waiting::left(Path::new(role.get("path")), role.get("way")),
        other => panic!("no such role: {other}"),
    }
}

/// A file system under test, and the way to run operations.
struct Case {
    way: &'static str,
    options: EngineOptions,
    root: tempfile::TempDir,
}

impl Case {
    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn engine(&self) -> Engine {
        let engine = self.options.build().unwrap();
        assert!(self.way != "threads" || !engine.uses_io_uring());
        engine
    }
}

/// The name of the threads that wait for another party, each for one operation.
const ALONE: &str = "pelton-file-own";

fn options(way: &str) -> EngineOptions {
    if way == "threads" { EngineOptions::new().without_io_uring() } else { EngineOptions::new() }
}

/// Runs a test on a disk (or the file system of /var/tmp) and on tmpfs, with io_uring, with the threads, and by
/// `run`.
fn everywhere(claim: &'static str, test: impl Fn(&Case)) {
    let _hang = Watchdog::new(claim);
    for way in ["ring", "threads", "run"] {
        RUNS.set(way == "run");
        if way == "ring" && !Engine::new().unwrap().uses_io_uring() {
            eprintln!("no io_uring here: only the threads are tried");
            continue;
        }
        for dir in ["/var/tmp", "/dev/shm"] {
            let root = tempfile::Builder::new().prefix("pelton-file").tempdir_in(dir).unwrap();
            test(&Case { way, options: options(way), root });
        }
    }
}

fn submit(engine: &mut Engine, token: u64, operation: Operation) {
    assert!(engine.try_submit(token, operation).unwrap().is_submitted());
}

thread_local! {
    /// Whether this thread's tests wait for each operation by `run`.
    static RUNS: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// One operation, in the way under test.
fn ran(engine: &mut Engine, operation: Operation) -> pelton::Result<Completion> {
    if RUNS.get() {
        return engine.run(operation);
    }
    submit(engine, u64::MAX - 1, operation);
    let completion = done(engine);
    assert_eq!(completion.token, u64::MAX - 1);
    match completion.outcome {
        Err(error) => Err(error),
        _ => Ok(completion),
    }
}

fn done(engine: &mut Engine) -> Completion {
    engine.completion_until(deadline()).unwrap().expect("it completes")
}

fn errno(error: &Error) -> &'static str {
    match error {
        Error::File { errno, .. } => errno,
        other => panic!("found {other:?}, wanted an error of a file"),
    }
}

fn failure(completion: &Completion) -> &'static str {
    errno(completion.outcome.as_ref().unwrap_err())
}

fn open(engine: &mut Engine, path: &Path) -> File {
    ran(engine, Operation::open(path, Open::for_both().create(0o640))).unwrap().into_file().unwrap()
}

fn pipe(name: &str) -> (File, std::fs::File) {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    (File::from_fd(read, name).unwrap(), write.into())
}

fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    Random::new(seed).bytes(bytes)
}

#[test]
fn every_operation_does_what_its_system_call_does() {
    everywhere("every operation does what its system call does", |case| {
        let mut engine = case.engine();
        let path = case.path("a");
        let file = open(&mut engine, &path);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640 & !kernel::umask());

        // Positioned, larger than the limit for immediate completion, and vectored.
        for bytes in [0, 1, 4096, 100_000, 3_000_000] {
            let wanted = pattern(bytes as u64, bytes);
            assert_eq!(ran(&mut engine, Operation::write_at(&file, wanted.clone(), 7)).unwrap().count(), bytes);
            let read = ran(&mut engine, Operation::read_at(&file, vec![0; bytes], 7)).unwrap();
            assert_eq!((read.count(), read.bytes() == wanted), (bytes, true), "{bytes} bytes");
        }
        let pieces =
            |lengths: &[usize]| lengths.iter().map(|bytes| Buffer::from(vec![0xee; *bytes])).collect::<Vec<_>>();
        let text = pattern(9, 70_000);
        let split = vec![text[..10].into(), Buffer::default(), text[10..60_000].into(), text[60_000..].into()];
        let wrote = ran(&mut engine, Operation::write_vectored_at(&file, split, 100)).unwrap();
        assert_eq!((wrote.count(), wrote.buffers.len()), (70_000, 4));
        let read = ran(&mut engine, Operation::read_vectored_at(&file, pieces(&[1, 50_000, 0, 19_999]), 100)).unwrap();
        assert_eq!((read.count(), concatenated(&read.buffers) == text), (70_000, true));
        let many = pieces(&[3; 2500]);
        let read = ran(&mut engine, Operation::read_vectored_at(&file, many, 100)).unwrap();
        assert_eq!((read.count(), concatenated(&read.buffers) == text[..7500]), (7500, true), "more than IOV_MAX");

        // At the file's position, and at its end.
        ran(&mut engine, Operation::truncate(&file, 3)).unwrap();
        ran(&mut engine, Operation::write_at(&file, b"abc", 0)).unwrap();
        ran(&mut engine, Operation::append(&file, b"def")).unwrap();
        ran(&mut engine, Operation::append(&file, vec![b'x'; 400_000])).unwrap();
        assert_eq!(ran(&mut engine, Operation::read(&file, vec![0; 4])).unwrap().bytes(), b"abcd");
        assert_eq!(ran(&mut engine, Operation::read(&file, vec![0; 4])).unwrap().bytes(), b"efxx");
        ran(&mut engine, Operation::write(&file, "HERE")).unwrap();
        assert_eq!(ran(&mut engine, Operation::read_at(&file, vec![0; 5], 8)).unwrap().bytes(), b"HEREx");

        // Up to the end, and beyond.
        ran(&mut engine, Operation::truncate(&file, 10)).unwrap();
        assert_eq!(ran(&mut engine, Operation::read_at(&file, vec![0; 500_000], 4)).unwrap().count(), 6);
        assert_eq!(ran(&mut engine, Operation::read_at(&file, vec![0; 10], 10)).unwrap().count(), 0);
        assert_eq!(ran(&mut engine, Operation::read_at(&file, vec![0; 10], 99)).unwrap().count(), 0);
        ran(&mut engine, Operation::allocate(&file, 0, 65_536)).unwrap();
        ran(&mut engine, Operation::sync(&file)).unwrap();
        ran(&mut engine, Operation::sync_data(&file)).unwrap();

        // Metadata.
        let now = SystemTime::UNIX_EPOCH + Duration::new(1_700_000_000, 5_000_000);
        let early = SystemTime::UNIX_EPOCH - Duration::new(3, 500_000_000);
        ran(&mut engine, Operation::set_times(&path, Some(early), Some(now))).unwrap();
        let wanted = std::fs::metadata(&path).unwrap();
        for requested in [Operation::stat(&path), Operation::stat_link(&path), Operation::stat_file(&file)] {
            let Ok(Output::Stat(found)) = ran(&mut engine, requested).unwrap().outcome else { panic!("no stat") };
            assert_eq!((found.kind, found.bytes, found.inode), (Kind::File, 65_536, wanted.ino()));
            assert_eq!((found.modified, found.accessed), (now, early));
            assert_eq!((found.mode, found.links, found.uid), (wanted.mode() & 0o7777, 1, wanted.uid()));
        }
        ran(&mut engine, Operation::set_times(&path, None, Some(early))).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().modified().unwrap(), early);

        // Names.
        let (b, c, link, directory) = (case.path("b"), case.path("c"), case.path("link"), case.path("dir"));
        ran(&mut engine, Operation::make_directory(&directory, 0o750)).unwrap();
        ran(&mut engine, Operation::link(&path, &b)).unwrap();
        ran(&mut engine, Operation::symlink("b", &link)).unwrap();
        let Ok(Output::Path(target)) = ran(&mut engine, Operation::read_link(&link)).unwrap().outcome else {
            panic!("no path")
        };
        assert_eq!(target, Path::new("b"));
        let Ok(Output::Stat(found)) = ran(&mut engine, Operation::stat_link(&link)).unwrap().outcome else {
            panic!("no stat")
        };
        assert_eq!(found.kind, Kind::Symlink);
        let Ok(Output::Stat(found)) = ran(&mut engine, Operation::stat(&link)).unwrap().outcome else {
            panic!("no stat")
        };
        assert_eq!((found.kind, found.links), (Kind::File, 2));
        ran(&mut engine, Operation::rename(&b, &c)).unwrap();
        assert!(!b.exists() && c.exists());
        ran(&mut engine, Operation::unlink(&c)).unwrap();
        ran(&mut engine, Operation::unlink(&link)).unwrap();
        ran(&mut engine, Operation::remove_directory(&directory)).unwrap();
        assert_eq!(std::fs::read_dir(case.root.path()).unwrap().count(), 1);

        // Closing is refused while another handle exists.
        let other = file.clone();
        assert_eq!(errno(&ran(&mut engine, Operation::close(other)).unwrap_err()), "EBUSY");
        ran(&mut engine, Operation::close(file)).unwrap();
        engine.close().unwrap();
    });
}

fn concatenated(buffers: &[Buffer]) -> Vec<u8> {
    buffers.iter().flat_map(|buffer| buffer.iter().copied()).collect()
}

#[test]
fn a_directory_is_listed_in_batches_each_name_once() {
    everywhere("a directory is listed in batches", |case| {
        let names: std::collections::BTreeSet<String> = (0..1500).map(|n| format!("file-{n:060}")).collect();
        for name in &names {
            std::fs::write(case.path(name), b"").unwrap();
        }
        std::fs::create_dir(case.path("sub")).unwrap();
        let mut engine = case.engine();
        let open = Operation::open(case.root.path(), Open::for_reading().directory());
        let directory = ran(&mut engine, open).unwrap().into_file().unwrap();
        let (mut found, mut batches) = (Vec::new(), 0);
        loop {
            let Ok(Output::Entries(entries)) = ran(&mut engine, Operation::list(&directory)).unwrap().outcome else {
                panic!()
            };
            if entries.is_empty() {
                break;
            }
            batches += 1;
            found.extend(entries);
        }
        assert!(batches > 2, "{batches} batches");
        assert!(found.iter().any(|entry| entry.name == "sub" && matches!(entry.kind, Kind::Directory | Kind::Unknown)));
        let listed: Vec<String> =
            found.iter().filter(|e| e.name != "sub").map(|e| e.name.clone().into_string().unwrap()).collect();
        assert_eq!(listed.len(), names.len());
        assert_eq!(listed.into_iter().collect::<std::collections::BTreeSet<_>>(), names);
    });
}

#[test]
fn a_file_is_copied_to_another_also_between_file_systems() {
    everywhere("a file is copied to another", |case| {
        let mut engine = case.engine();
        let wanted = pattern(3, 9_000_001);
        std::fs::write(case.path("from"), &wanted).unwrap();
        let elsewhere = tempfile::tempdir_in("/dev/shm").unwrap();
        let from = open(&mut engine, &case.path("from"));
        for to in [case.path("to"), elsewhere.path().join("to")] {
            let file = open(&mut engine, &to);
            let copied = ran(&mut engine, Operation::copy(&from, 1, &file, 5, u64::MAX >> 1)).unwrap();
            assert_eq!(copied.count(), 9_000_000);
            let found = std::fs::read(&to).unwrap();
            assert!(found[..5] == [0; 5] && found[5..] == wanted[1..]);
        }
        // A file whose content is generated on reading has no length.
        let generated =
            ran(&mut engine, Operation::open("/proc/self/status", Open::for_reading())).unwrap().into_file().unwrap();
        let file = open(&mut engine, &case.path("status"));
        assert!(ran(&mut engine, Operation::copy(&generated, 0, &file, 0, 1 << 20)).unwrap().count() > 100);
    });
}

/// Waits until the system returns this of a file that was just written, whose pages may still be under writeback.
/// Returns false where it never does.
fn returns_without_waiting(path: &Path) -> bool {
    let (file, deadline) = (std::fs::File::open(path).unwrap(), deadline());
    file.sync_all().unwrap();
    let mut bytes = [0; 8192];
    loop {
        let mut slices = [std::io::IoSliceMut::new(&mut bytes)];
        match rustix::io::preadv2(&file, &mut slices, 0, rustix::io::ReadWriteFlags::NOWAIT) {
            Ok(8192) => return true,
            Err(rustix::io::Errno::OPNOTSUPP) => return false,
            _ => assert!(Instant::now() < deadline, "what was just written never came into the page cache"),
        }
    }
}

#[test]
fn reads_from_the_page_cache_complete_in_the_submitting_call() {
    everywhere("reads from the page cache complete at once", |case| {
        let path = case.path("a");
        std::fs::write(&path, pattern(1, 8192)).unwrap();
        let mut engine = case.engine();
        let file = open(&mut engine, &path);
        if !returns_without_waiting(&path) && case.root.path().starts_with("/var/tmp") {
            eprintln!("this file system has no non-blocking reads: nothing completes at once");
            return;
        }
        // Whether the kernel supports it is determined per file, once.
        submit(&mut engine, 4, Operation::read_at(&file, vec![0; 4096], 0));
        assert_eq!(done(&mut engine).count(), 4096);
        // A completion after an expired deadline was ready within the call: nothing was started.
        let past = Instant::now() - Duration::from_secs(1);
        let read = engine.run_until(Operation::read_at(&file, vec![0; 4096], 0), past).unwrap();
        let read = read.expect("what was just written is in the page cache");
        assert_eq!(read.bytes(), &pattern(1, 8192)[..4096]);
        // An operation that has to wait does not complete.
        let (nothing_yet, _write) = pipe("a pipe");
        assert!(engine.run_until(Operation::read(&nothing_yet, vec![0; 1]), past).unwrap().is_none());
        submit(&mut engine, 5, Operation::read_at(&file, vec![0; 4096], 4096));
        assert_eq!(engine.in_flight(), 1);
        let read = engine.try_completion().unwrap().expect("it was answered when it was submitted");
        assert_eq!((read.token, read.bytes() == &pattern(1, 8192)[4096..]), (5, true));
        assert_eq!(engine.in_flight(), 0);
    });
}

#[test]
fn each_of_many_operations_in_flight_returns_its_token_and_its_memory() {
    everywhere("many are in flight", |case| {
        let path = case.path("a");
        let wanted = pattern(1, 600 * 4096);
        std::fs::write(&path, &wanted).unwrap();
        let mut engine = case.engine();
        // Direct I/O, where the file system supports it: then every operation waits for the disk.
        let direct = ran(&mut engine, Operation::open(&path, Open::for_reading().direct()));
        let file = direct
            .or_else(|_| ran(&mut engine, Operation::open(&path, Open::for_reading())))
            .unwrap()
            .into_file()
            .unwrap();
        let mut addresses = Vec::new();
        for token in 0..600u64 {
            let buffer = Buffer::aligned(4096);
            addresses.push(buffer.as_ptr() as usize);
            submit(&mut engine, token, Operation::read_at(&file, buffer, token * 4096));
        }
        assert_eq!(engine.in_flight(), 600);
        let mut seen = vec![false; 600];
        while engine.in_flight() > 0 {
            let read = done(&mut engine);
            let token = read.token as usize;
            assert!(!std::mem::replace(&mut seen[token], true), "{token} twice");
            assert_eq!(read.buffer.as_ptr() as usize, addresses[token]);
            assert_eq!(read.bytes(), &wanted[token * 4096..][..4096]);
        }
        assert!(seen.iter().all(|seen| *seen));
    });
}

#[test]
fn an_operation_beyond_the_bound_returns_undone() {
    everywhere("an operation beyond the bound returns undone", |case| {
        let mut engine = case.options.clone().in_flight_max(2).build().unwrap();
        let (read, mut write) = pipe("a pipe");
        submit(&mut engine, 1, Operation::read(&read, vec![0; 1]));
        submit(&mut engine, 2, Operation::read(&read, vec![0; 1]));
        let Submitted::Full(back) = engine.try_submit(3, Operation::read(&read, vec![7; 9])).unwrap() else {
            panic!("taken")
        };
        assert_eq!(&*back.into_buffers()[0], &[7; 9]);
        let chain = [(4, Operation::stat(case.root.path()))];
        let Submitted::Full(back) = engine.try_submit_chain(chain).unwrap() else { panic!("taken") };
        assert_eq!(back.len(), 1);
        engine.start().unwrap();
        write.write_all(b"ab").unwrap();
        let first = done(&mut engine);
        assert_eq!(first.count(), 1);
        submit(&mut engine, 5, Operation::stat(case.root.path()));
        assert!(!engine.try_submit(6, Operation::stat(case.root.path())).unwrap().is_submitted());
        let rest: Vec<u64> = (0..2).map(|_| done(&mut engine).token).collect();
        assert!(rest.contains(&5) && rest.contains(&(3 - first.token)), "{rest:?}");
        let long = (0..3).map(|token| (token, Operation::stat(case.root.path())));
        assert!(matches!(engine.try_submit_chain(long), Err(Error::Refused(_))));
        assert!(matches!(engine.completion(), Err(Error::Refused(_))));
    });
}

#[test]
fn the_descriptor_is_readable_exactly_while_a_completion_waits() {
    everywhere("the descriptor is readable exactly while a completion waits", |case| {
        let mut engine = case.engine();
        std::fs::write(case.path("a"), b"text").unwrap();
        let file = open(&mut engine, &case.path("a"));
        let (read, mut write) = pipe("a pipe");
        assert!(engine.arm().unwrap().is_waiting());
        assert!(!is_readable(&engine));
        for round in 0..20 {
            // Nothing yet: the pipe is empty.
            submit(&mut engine, 1, Operation::read(&read, vec![0; 1]));
            assert!(engine.arm().unwrap().is_waiting() && !is_readable(&engine), "round {round}");
            write.write_all(b"x").unwrap();
            readable(&engine);
            assert_eq!(engine.try_completion().unwrap().unwrap().bytes(), b"x");
            assert!(engine.try_completion().unwrap().is_none());
            assert!(engine.arm().unwrap().is_waiting() && !is_readable(&engine), "round {round}");
            // Submitted while armed: it begins at once, or completes at once.
            submit(&mut engine, 2, Operation::sync_data(&file));
            readable(&engine);
            assert_eq!(done(&mut engine).token, 2);
            assert!(engine.arm().unwrap().is_waiting() && !is_readable(&engine), "round {round}");
            submit(&mut engine, 3, Operation::read_at(&file, vec![0; 4], 0));
            readable(&engine);
            // Two are complete and one is taken: the descriptor stays readable, and arming reports that.
            submit(&mut engine, 4, Operation::read_at(&file, vec![0; 4], 0));
            assert_eq!(done(&mut engine).bytes(), b"text");
            assert!(is_readable(&engine));
            assert!(!engine.arm().unwrap().is_waiting() && is_readable(&engine));
            assert_eq!(done(&mut engine).bytes(), b"text");
            assert!(engine.arm().unwrap().is_waiting() && !is_readable(&engine), "round {round}");
            engine.disarm();
        }
    });
}

/// Whether the abandoned operations have ended: the engine accepts a full set again.
fn settled(engine: &mut Engine) -> bool {
    assert!(engine.try_completion().unwrap().is_none());
    let chain = (0..1024).map(|token| (token, Operation::stat("/")));
    match engine.try_submit_chain(chain).unwrap() {
        Submitted::Full(_) => false,
        Submitted::Submitted => {
            assert!(engine.cancel(0).unwrap() | engine.cancel(1).unwrap());
            while engine.in_flight() > 0 {
                done(engine);
            }
            true
        }
    }
}

#[test]
fn a_chain_stops_at_a_failure_and_returns_the_rest_undone() {
    everywhere("a chain continues until a failure", |case| {
        let mut engine = case.engine();
        let file = open(&mut engine, &case.path("a"));
        let (to, missing) = (case.path("b"), case.path("missing"));
        let chain = [
            (1, Operation::write_at(&file, b"all of it", 0)),
            (2, Operation::sync_data(&file)),
            (3, Operation::rename(case.path("a"), &to)),
            (4, Operation::read_at(&file, vec![0; 9], 0)),
            (5, Operation::unlink(&missing)),
            (6, Operation::write_at(&file, vec![b'!'; 3], 0)),
            (7, Operation::unlink(&to)),
        ];
        assert!(engine.try_submit_chain(chain).unwrap().is_submitted());
        assert_eq!(engine.in_flight(), 7);
        let ended: Vec<Completion> = (0..7).map(|_| done(&mut engine)).collect();
        assert_eq!(ended.iter().map(|ended| ended.token).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6, 7]);
        assert!(ended[..4].iter().all(|ended| ended.outcome.is_ok()));
        assert_eq!(ended[3].bytes(), b"all of it");
        assert_eq!([failure(&ended[4]), failure(&ended[5]), failure(&ended[6])], ["ENOENT", "ECANCELED", "ECANCELED"]);
        assert_eq!(&*ended[5].buffer, b"!!!");
        assert_eq!(std::fs::read(&to).unwrap(), b"all of it");

        // Cancelled in the middle: the operations before it are done, those after it are not.
        let (read, mut write) = pipe("a pipe");
        let chain = [
            (1, Operation::read(&read, vec![0; 1])),
            (2, Operation::write_at(&file, b"A", 0)),
            (3, Operation::write_at(&file, b"B", 1)),
            (4, Operation::write_at(&file, b"C", 2)),
        ];
        assert!(engine.try_submit_chain(chain).unwrap().is_submitted());
        engine.start().unwrap();
        assert!(engine.cancel(3).unwrap());
        assert_eq!([done(&mut engine).token, done(&mut engine).token], [3, 4]);
        write.write_all(b"x").unwrap();
        assert_eq!([done(&mut engine).token, done(&mut engine).token], [1, 2]);
        assert_eq!(std::fs::read(&to).unwrap(), b"All of it");
        assert!(engine.try_submit_chain([]).unwrap().is_submitted());
        assert_eq!(engine.in_flight(), 0);
    });
}

#[test]
fn an_error_names_the_operation_the_file_and_the_code() {
    everywhere("an error names what failed", |case| {
        let mut engine = case.engine();
        let missing = case.path("missing/file");
        let error = ran(&mut engine, Operation::open(&missing, Open::for_reading())).unwrap_err();
        assert_eq!(errno(&error), "ENOENT");
        let text = error.to_string();
        assert!(text.starts_with("opening ") && text.contains(missing.to_str().unwrap()), "{text}");
        let Error::File { error: source, .. } = error else { panic!() };
        assert_eq!(source.raw_os_error(), Some(libc::ENOENT));

        let file = open(&mut engine, &case.path("a"));
        let directory = case.root.path();
        ran(&mut engine, Operation::write(&file, "some text")).unwrap();
        let reading =
            ran(&mut engine, Operation::open(case.path("a"), Open::for_reading())).unwrap().into_file().unwrap();
        let cases = [
            (Operation::open(case.path("a"), Open::for_both().create_new(0o600)), "EEXIST"),
            (Operation::open(case.path("a"), Open::for_reading().directory()), "ENOTDIR"),
            (Operation::open(directory, Open::for_writing()), "EISDIR"),
            (Operation::open("with\0zero", Open::for_reading()), "EINVAL"),
            (Operation::write_at(&reading, b"x", 0), "EBADF"),
            (Operation::write_at(&reading, vec![0; 1 << 20], 0), "EBADF"),
            (Operation::read_at(&file, vec![0; 1], u64::MAX >> 1), ""),
            (Operation::read_at(&file, vec![0; 1], u64::MAX), "EINVAL"),
            (Operation::write_at(&file, vec![0; 1], u64::MAX), "EINVAL"),
            (Operation::copy(&file, 0, &file, 1, 10), "EINVAL"),
            (Operation::stat(&missing), "ENOENT"),
            (Operation::unlink(directory), "EISDIR"),
            (Operation::remove_directory(case.path("a")), "ENOTDIR"),
            (Operation::make_directory(directory, 0o700), "EEXIST"),
            (Operation::rename(&missing, case.path("b")), "ENOENT"),
            (Operation::link(&missing, case.path("b")), "ENOENT"),
            (Operation::symlink("x", case.path("a")), "EEXIST"),
            (Operation::read_link(case.path("a")), "EINVAL"),
            (Operation::list(&file), "ENOTDIR"),
            (Operation::allocate(&file, 0, 0), "EINVAL"),
            (Operation::set_times(&missing, None, None), ""),
            (Operation::truncate(&reading, 0), "EINVAL"),
        ];
        for (operation, wanted) in cases {
            let text = format!("{operation:?}");
            match ran(&mut engine, operation) {
                Err(error) if !wanted.is_empty() => assert_eq!(errno(&error), wanted, "{text}"),
                Ok(_) if wanted.is_empty() => {}
                Err(error) if wanted.is_empty() => assert!(matches!(error, Error::File { .. }), "{error}"),
                other => panic!("{text}: found {other:?}, wanted {wanted}"),
            }
        }
        // The memory of a failed operation returns with its completion.
        submit(&mut engine, 1, Operation::write_at(&reading, b"kept", 0));
        let ended = done(&mut engine);
        assert_eq!((failure(&ended), &*ended.buffer), ("EBADF", &b"kept"[..]));
    });
}

#[test]
fn a_device_failure_is_an_error_by_name() {
    everywhere("a read that the device fails is an error", |case| {
        let mut engine = case.engine();
        // Unmapped memory cannot be read or written: the kernel returns the error of a broken disk.
        let broken =
            ran(&mut engine, Operation::open("/proc/self/mem", Open::for_both())).unwrap().into_file().unwrap();
        for bytes in [16, 1 << 20] {
            assert_eq!(errno(&ran(&mut engine, Operation::read_at(&broken, vec![0; bytes], 8)).unwrap_err()), "EIO");
            assert_eq!(errno(&ran(&mut engine, Operation::write_at(&broken, vec![0; bytes], 8)).unwrap_err()), "EIO");
            let pieces = vec![vec![0; bytes].into(), vec![0; bytes].into()];
            assert_eq!(errno(&ran(&mut engine, Operation::read_vectored_at(&broken, pieces, 8)).unwrap_err()), "EIO");
        }
        let full = ran(&mut engine, Operation::open("/dev/full", Open::for_writing())).unwrap().into_file().unwrap();
        assert_eq!(errno(&ran(&mut engine, Operation::write(&full, b"x")).unwrap_err()), "ENOSPC");
    });
}

#[test]
fn operations_of_a_thread_that_ended_complete() {
    everywhere("operations of an ended thread complete", |case| {
        let mut engine = case.engine();
        let (read, mut write) = pipe("a pipe");
        let file = open(&mut engine, &case.path("a"));
        // The kernel cancels the operations of a thread when the thread ends, without a report.
        let mut engine = std::thread::spawn(move || {
            submit(&mut engine, 1, Operation::read(&read, vec![0; 3]));
            submit(&mut engine, 2, Operation::write_at(&file, vec![b'w'; 5_000_000], 0));
            engine.start().unwrap();
            engine
        })
        .join()
        .unwrap();
        assert!(engine.completion_until(deadline()).unwrap().is_some_and(|ended| ended.count() == 5_000_000));
        write.write_all(b"abc").unwrap();
        assert_eq!(done(&mut engine).bytes(), b"abc");
        assert_eq!(std::fs::metadata(case.path("a")).unwrap().len(), 5_000_000);
    });
}

#[test]
fn everything_works_where_a_filter_refuses_io_uring() {
    let _hang = Watchdog::new("where a filter refuses io_uring everything works");
    for call in [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register] {
        // A filter applies to a thread, and to the threads that it creates.
        std::thread::spawn(move || {
            seccomp::refuse(call, libc::EPERM);
            let root = tempfile::tempdir_in("/var/tmp").unwrap();
            let mut engine = Engine::new().unwrap();
            assert!(!engine.uses_io_uring());
            let file = open(&mut engine, &root.path().join("a"));
            for n in 0..100u64 {
                submit(&mut engine, n, Operation::write_at(&file, vec![n as u8; 100], n * 100));
            }
            (0..100).for_each(|_| assert_eq!(done(&mut engine).count(), 100));
            let wanted: Vec<u8> = (0..10_000).map(|byte| (byte / 100) as u8).collect();
            assert_eq!(ran(&mut engine, Operation::read_at(&file, vec![0; 10_000], 0)).unwrap().bytes(), wanted);
            engine.close().unwrap();
        })
        .join()
        .unwrap();
    }
}

#[test]
fn signals_interrupt_no_operation() {
    everywhere("signals interrupt no operation", |case| {
        extern "C" fn nothing(_: libc::c_int) {}
        let handler = nothing as extern "C" fn(libc::c_int);
        // SAFETY: the handler does nothing; the structure lives as long as the call.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as usize;
            libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut());
        }
        let over = std::sync::atomic::AtomicBool::new(false);
        // SAFETY: the call only returns the thread's id.
        let me = unsafe { libc::pthread_self() };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(std::sync::atomic::Ordering::Relaxed) {
                    // SAFETY: the thread waits for this one before it ends.
                    unsafe { libc::pthread_kill(me, libc::SIGUSR1) };
                    std::thread::yield_now();
                }
            });
            let mut engine = case.engine();
            let file = open(&mut engine, &case.path("a"));
            // Signals arrive continuously, so a few rounds are enough: 200 took 60 s beside other tests.
            for round in 0..20u64 {
                let wanted = pattern(round, 300_000);
                assert_eq!(ran(&mut engine, Operation::write_at(&file, wanted.clone(), 0)).unwrap().count(), 300_000);
                assert!(ran(&mut engine, Operation::read_at(&file, vec![0; 300_000], 0)).unwrap().bytes() == wanted);
                ran(&mut engine, Operation::stat(case.path("a"))).unwrap();
            }
            over.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    });
}

#[test]
fn closing_waits_for_operations_in_flight_or_until_its_deadline() {
    everywhere("closing waits for operations in flight", |case| {
        let mut engine = case.engine();
        let file = open(&mut engine, &case.path("a"));
        for n in 0..20u64 {
            submit(&mut engine, n, Operation::write_at(&file, vec![n as u8 + 1; 300_000], n * 300_000));
        }
        engine.close().unwrap();
        let found = std::fs::read(case.path("a")).unwrap();
        assert_eq!(found.len(), 6_000_000);
        assert!(found.chunks(300_000).zip(1..).all(|(piece, n)| piece.iter().all(|byte| *byte == n)));

        let mut engine = case.engine();
        let (read, _write) = pipe("a pipe");
        submit(&mut engine, 1, Operation::read(&read, vec![0; 1]));
        assert!(!engine.close_until(Instant::now() + Duration::from_millis(5)).unwrap());
    });
}

#[test]
fn appending_to_a_truncated_file_continues_at_its_new_end() {
    let root = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = root.path().join("log");
    let mut engine = Engine::new().unwrap();
    let tail = Tail::new(open(&mut engine, &path)).unwrap();
    let appenders = pelton::Appenders::new(&pelton::Options::new(), tail).unwrap();
    for left in [None, Some(0), Some(2)] {
        appenders.append(b"some").unwrap();
        appenders.sync().unwrap();
        if let Some(left) = left {
            std::fs::File::options().write(true).open(&path).unwrap().set_len(left).unwrap();
            appenders.append(b" more").unwrap();
            appenders.sync().unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), [&b" m"[..left as usize], b" more"].concat());
        }
    }
}

#[test]
fn messages_of_many_appending_threads_are_whole_and_in_order_in_a_plain_file() {
    let _hang = Watchdog::new("many threads append to a plain file");
    let root = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = root.path().join("log");
    std::fs::write(&path, b"before;").unwrap();
    let mut engine = Engine::new().unwrap();
    let tail = Tail::new(open(&mut engine, &path)).unwrap();
    let appenders = pelton::Appenders::new(&pelton::Options::new().flush_bytes(64 << 10), tail).unwrap();
    let (threads, messages) = (8, 5_000);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let appenders = appenders.clone();
            scope.spawn(move || {
                for message in 0..messages {
                    appenders.append(format!("{thread}:{message:0100};").as_bytes()).unwrap();
                }
            });
        }
    });
    appenders.sync().unwrap();
    drop(appenders);
    let text = std::fs::read_to_string(&path).unwrap();
    let mut next = vec![0; threads];
    for message in text.strip_prefix("before;").unwrap().split_terminator(';') {
        let (thread, number) = message.split_once(':').unwrap();
        let (thread, number): (usize, usize) = (thread.parse().unwrap(), number.parse().unwrap());
        assert_eq!(std::mem::replace(&mut next[thread], number + 1), number);
    }
    assert_eq!(next, vec![messages; threads]);
}

#[test]
fn continuations_after_a_poll_begin_before_the_loop_sleeps() {
    everywhere("continuations after a poll begin before the loop sleeps", |case| {
        let mut engine = case.engine();
        let (idle, _nobody) = pipe("idle");
        let (unready, mut writer) = pipe("non-blocking");
        // The ring reports at once that this one would block, and it continues on the threads.
        rustix::fs::fcntl_setfl(&unready, rustix::fs::OFlags::NONBLOCK).unwrap();
        submit(&mut engine, 1, Operation::read(&idle, vec![0; 1]));
        submit(&mut engine, 2, Operation::read(&unready, vec![0; 1]));
        assert!(engine.arm().unwrap().is_waiting());
        writer.write_all(b"x").unwrap();
        readable(&engine);
        assert_eq!(engine.try_completion().unwrap().expect("it reports that").token, 2);
    });
}

#[test]
fn an_operation_that_the_kernel_refuses_at_once_delays_no_other() {
    everywhere("an operation that the kernel refuses at once delays no other", |case| {
        for (number, bad) in [PathBuf::from("x".repeat(5000)), PathBuf::new()].into_iter().enumerate() {
            let mut engine = case.engine();
            let made = case.path(&format!("made {number}"));
            let (idle, _nobody) = pipe("idle");
            for (token, operation) in [
                (1, Operation::open(&bad, Open::for_reading())),
                (2, Operation::read(&idle, vec![0; 1])),
                (3, Operation::open(&bad, Open::for_reading())),
                (4, Operation::make_directory(&made, 0o700)),
            ] {
                submit(&mut engine, token, operation);
            }
            // The wait alone starts it: the test calls nothing else on the engine until it is done.
            engine.start().unwrap();
            let deadline = deadline();
            while !made.exists() {
                assert!(Instant::now() < deadline, "the operation after it has not begun");
                std::thread::yield_now();
            }
            let mut ended: Vec<u64> = (0..3).map(|_| done(&mut engine).token).collect();
            ended.sort_unstable();
            assert_eq!(ended, [1, 3, 4]);
        }
    });
}

fn open_to_read(engine: &mut Engine, path: &Path) -> File {
    ran(engine, Operation::open(path, Open::for_reading())).unwrap().into_file().unwrap()
}

#[test]
fn one_tick_completes_a_bounded_number_of_operations() {
    everywhere("one tick completes a bounded number of operations", |case| {
        const EACH: usize = 16;
        let path = case.path("a");
        std::fs::write(&path, vec![7; 4096 * EACH]).unwrap();
        let mut engine = case.engine();
        let file = open_to_read(&mut engine, &path);
        if !returns_without_waiting(&path) && case.root.path().starts_with("/var/tmp") {
            eprintln!("this file system has no non-blocking reads: nothing completes at once");
            return;
        }
        let foreign_memory = ForeignBuffers::new(40 * EACH);
        let submit_all = |engine: &mut Engine, first: usize| {
            for token in first..first + 20 {
                let pieces = (0..EACH).map(|piece| foreign_memory.buffer(token * EACH + piece)).collect();
                submit(engine, token as u64, Operation::read_vectored_at(&file, pieces, 0));
            }
            (first..first + 20).filter(|token| foreign_memory.bytes(token * EACH).iter().all(|byte| *byte == 7)).count()
        };
        // 64 KiB each, of 1 MiB: nothing else was started, so the rest of the memory is unchanged.
        assert_eq!(submit_all(&mut engine, 0), 16);
        // The next tick begins when the loop returns to it, or a thread waits.
        while engine.in_flight() > 0 {
            assert_eq!(done(&mut engine).count(), 4096 * EACH);
        }
        assert_eq!(submit_all(&mut engine, 20), 16);
        let chain = [(50, Operation::read_at(&file, vec![0; 100_000], 0)), (51, Operation::stat_file(&file))];
        assert!(engine.try_submit_chain(chain).unwrap().is_submitted());
        let mut seen = std::collections::BTreeSet::new();
        while engine.in_flight() > 0 {
            if engine.arm().unwrap().is_waiting() {
                readable(&engine);
            }
            while let Some(ended) = engine.try_completion().unwrap() {
                assert!(ended.outcome.is_ok() && seen.insert(ended.token));
            }
        }
        assert_eq!(seen.len(), 22);
        assert_eq!(foreign_memory.times(), vec![1; 40 * EACH]);
    });
}

#[test]
fn after_an_error_of_the_system_each_operation_completes_once_with_its_own_token() {
    let _hang = Watchdog::new("after an error of the system each operation completes once with its own token");
    if !Engine::new().unwrap().uses_io_uring() {
        return eprintln!("SKIPPED: no io_uring");
    }
    let root = tempfile::tempdir_in("/var/tmp").unwrap();
    let mut engine = Engine::new().unwrap();
    let file = open(&mut engine, &root.path().join("a"));
    let synced = file.clone();
    // A thread for which the kernel has no memory to start an operation.
    let starved = std::thread::spawn(move || {
        seccomp::refuse(libc::SYS_io_uring_enter, libc::ENOMEM);
        let names_the_failure = |error: Error| error.to_string().contains("beginning operations");
        for token in 0..10 {
            submit(&mut engine, token, Operation::sync(&synced));
            assert!(names_the_failure(engine.try_completion().unwrap_err()));
            assert!(names_the_failure(engine.arm().unwrap_err()));
            assert!(is_readable(&engine), "a loop ticks again, and tries again");
        }
        let soon = Instant::now() + Duration::from_secs(60);
        assert!(names_the_failure(engine.run_until(Operation::stat_file(&synced), soon).unwrap_err()));
        assert!(engine.cancel(5).unwrap());
        assert_eq!(engine.in_flight(), 10);
        assert!(engine.uses_io_uring());
        engine
    });
    let mut engine = starved.join().unwrap();
    let ran = engine.run(Operation::write_at(&file, vec![1; 10], 0)).unwrap();
    assert_eq!((ran.count(), engine.in_flight()), (10, 10));
    let mut seen: Vec<u64> = (0..10).map(|_| done(&mut engine).token).collect();
    seen.sort_unstable();
    assert_eq!(seen, (0..10).collect::<Vec<u64>>());
    assert!(engine.try_completion().unwrap().is_none());
    engine.close().unwrap();
}

#[test]
fn everything_works_where_a_filter_refuses_io_uring_later() {
    let _hang = Watchdog::new("where a filter refuses io_uring later everything works");
    if !Engine::new().unwrap().uses_io_uring() {
        eprintln!("no io_uring here: it cannot be refused later");
        return;
    }
    for is_armed in [false, true] {
        // A filter applies to a thread, and to the threads that it creates.
        std::thread::spawn(move || {
            let root = tempfile::tempdir_in("/var/tmp").unwrap();
            let mut engine = Engine::new().unwrap();
            let file = open(&mut engine, &root.path().join("a"));
            let (idle, mut writer) = pipe("idle");
            submit(&mut engine, 1000, Operation::read(&idle, vec![0; 5]));
            engine.start().unwrap();
            // Started before; not started; abandoned; submitted after.
            submit(&mut engine, 1001, Operation::read(&idle, vec![0; 5]));
            for n in 0..300u64 {
                submit(&mut engine, n, Operation::write_at(&file, vec![n as u8; 100], n * 100));
            }
            seccomp::refuse(libc::SYS_io_uring_enter, libc::EPERM);
            if is_armed {
                engine.arm().unwrap().is_waiting();
            }
            assert!(engine.cancel(1001).unwrap());
            for n in 300..600u64 {
                submit(&mut engine, n, Operation::write_at(&file, vec![n as u8; 100], n * 100));
            }
            let mut seen = std::collections::BTreeSet::new();
            while seen.len() < 601 {
                if is_armed && engine.arm().unwrap().is_waiting() {
                    readable(&engine);
                }
                let ended = done(&mut engine);
                assert!(seen.insert(ended.token));
                match ended.token {
                    1001 => assert_eq!(failure(&ended), "ECANCELED"),
                    _ => assert_eq!(ended.count(), 100),
                }
            }
            assert!(!engine.uses_io_uring());
            // Operations already in the kernel complete.
            writer.write_all(b"bytes").unwrap();
            let ended = done(&mut engine);
            assert_eq!((ended.token, ended.bytes()), (1000, &b"bytes"[..]));
            let wanted: Vec<u8> = (0..60_000u32).map(|byte| (byte / 100) as u8).collect();
            assert!(ran(&mut engine, Operation::read_at(&file, vec![0; 60_000], 0)).unwrap().bytes() == wanted);
            engine.close().unwrap();
        })
        .join()
        .unwrap();
    }
}

#[test]
fn a_loop_wakes_for_a_completion_during_a_wait_for_another_operation() {
    everywhere("a loop wakes for a completion during a wait for another operation", |case| {
        let mut engine = case.engine();
        let (idle, _writer) = pipe("idle");
        for round in 0..200u64 {
            assert!(engine.arm().unwrap().is_waiting());
            for token in 0..6 {
                submit(&mut engine, token, Operation::read_link(case.root.path()));
            }
            // Completed, or abandoned.
            let wanted = if round % 8 == 0 {
                engine.run_until(Operation::read(&idle, vec![0; 1]), Instant::now()).unwrap().is_none()
            } else {
                matches!(engine.run_until(Operation::read_link(case.root.path()), deadline()), Err(Error::File { .. }))
            };
            assert!(wanted);
            for _ in 0..6 {
                readable(&engine);
                while engine.try_completion().unwrap().is_none() {
                    // The descriptor may be readable for a completion already taken; it must not be silent for one
                    // not taken.
                    if engine.arm().unwrap().is_waiting() {
                        readable(&engine);
                    }
                }
            }
        }
    });
}

#[test]
fn a_pump_moves_a_file_into_a_channel_and_out_of_one() {
    use std::sync::{Arc, Mutex};
    everywhere("a pump moves a file into a channel and out of one", |case| {
        const BYTES: usize = 5_000_001;
        let wanted = pattern(5, BYTES);
        std::fs::write(case.path("from"), &wanted).unwrap();
        let mut engine = case.engine();
        let from = open_to_read(&mut engine, &case.path("from"));
        let to = open(&mut engine, &case.path("to"));
        let (sender, receiver) = pelton::Options::new().capacity(1 << 20).threads().unwrap();
        let (sender, receiver) = (Arc::new(Mutex::new(sender)), Arc::new(Mutex::new(receiver)));
        // Both ends at a time; each waits for the other.
        submit(&mut engine, 1, Operation::receive(&to, 7, BYTES as u64 - 1, &receiver));
        // The last message has the remainder.
        submit(&mut engine, 2, Operation::send(&from, 1, u64::MAX, &sender, 99_999));
        for _ in 0..2 {
            let ended = done(&mut engine);
            assert_eq!((ended.count(), ended.cut_short_by.is_none()), (BYTES - 1, true), "{ended:?}");
        }
        let found = std::fs::read(case.path("to")).unwrap();
        assert!(found[..7] == [0; 7] && found[7..] == wanted[1..]);

        // The channel continues. A message too large for the remaining request stays in it; so does one that cannot
        // be written.
        let send = |bytes: &[u8]| sender.try_lock().unwrap().send(bytes).unwrap();
        ["one", "two", "three"].iter().for_each(|text| send(text.as_bytes()));
        let some = ran(&mut engine, Operation::receive(&to, 0, 10, &receiver)).unwrap();
        assert_eq!((some.count(), some.cut_short_by.is_none()), (6, true));
        assert_eq!(errno(&ran(&mut engine, Operation::receive(&from, 0, 10, &receiver)).unwrap_err()), "EBADF");
        assert_eq!(&*receiver.try_lock().unwrap().receive().unwrap(), b"three");
        assert_eq!(&std::fs::read(case.path("to")).unwrap()[..6], b"onetwo");
        // Nothing is sent of a file that cannot be read.
        let to_write =
            ran(&mut engine, Operation::open(case.path("to"), Open::for_writing())).unwrap().into_file().unwrap();
        assert_eq!(errno(&ran(&mut engine, Operation::send(&to_write, 0, 9, &sender, 4)).unwrap_err()), "EBADF");
        assert!(receiver.try_lock().unwrap().try_receive().unwrap().is_none());

        // Empty messages would never transfer everything.
        assert_eq!(errno(&ran(&mut engine, Operation::send(&from, 0, 9, &sender, 0)).unwrap_err()), "EINVAL");

        // Cancelled while it waits, after some bytes and before any, and while another thread has the sender.
        submit(&mut engine, 3, Operation::send(&from, 0, u64::MAX, &sender, 100_000));
        engine.start().unwrap();
        // Its first message shows that it has begun. Nothing polls the sender before: a poll would hold the sender,
        // and keep the operation from it.
        let mut received = receiver.try_lock().unwrap().receive_until(deadline()).unwrap().expect("it begins").to_vec();
        assert_eq!(errno(&ran(&mut engine, Operation::send(&from, 0, 9, &sender, 4)).unwrap_err()), "EBUSY");
        assert!(engine.cancel(3).unwrap());
        let cut = done(&mut engine);
        let count = match &cut.outcome {
            Ok(_) => cut.count(),
            Err(error) => {
                assert_eq!(errno(error), "ECANCELED");
                0
            }
        };
        assert!(count == 0 || errno(cut.cut_short_by.as_ref().unwrap()) == "ECANCELED");
        while let Some(message) = receiver.try_lock().unwrap().try_receive().unwrap() {
            received.extend_from_slice(&message);
        }
        assert!(received == wanted[..count]);
        submit(&mut engine, 4, Operation::receive(&to, 0, 10, &receiver));
        engine.start().unwrap();
        assert!(engine.cancel(4).unwrap());
        assert_eq!(failure(&done(&mut engine)), "ECANCELED");
        // The bytes written show that it has begun; it waits for more.
        send(b"first");
        submit(&mut engine, 4, Operation::receive(&to, 0, 10, &receiver));
        engine.start().unwrap();
        let until = deadline();
        while std::fs::read(case.path("to")).unwrap()[..5] != *b"first" {
            assert!(Instant::now() < until, "it does not begin");
            std::thread::yield_now();
        }
        assert!(engine.cancel(4).unwrap());
        let cut = done(&mut engine);
        assert_eq!((cut.count(), errno(cut.cut_short_by.as_ref().unwrap())), (5, "ECANCELED"));

        // The end of a channel: a closed sender's bytes are all written; a closed receiver is an error.
        send(b"last");
        let mut ended = Vec::new();
        submit(&mut engine, 5, Operation::receive(&to, 0, u64::MAX, &receiver));
        engine.start().unwrap();
        Arc::into_inner(sender).unwrap().into_inner().unwrap().close().unwrap();
        ended.push(done(&mut engine).count());
        assert_eq!(ended, [4]);
        let (sender, receiver) = pelton::Options::new().threads().unwrap();
        receiver.close().unwrap();
        let sender = Arc::new(Mutex::new(sender));
        // The error may come after some messages that nobody will read.
        let error = match ran(&mut engine, Operation::send(&from, 0, 1000, &sender, 4)) {
            Ok(sent) => *sent.cut_short_by.expect("nothing reads it"),
            Err(error) => error,
        };
        assert!(error.is_closed(), "{error}");
        // A dropped engine releases the channel.
        let (sender, receiver) = pelton::Options::new().threads().unwrap();
        let receiver = Arc::new(Mutex::new(receiver));
        submit(&mut engine, 6, Operation::receive(&to, 0, 10, &receiver));
        engine.start().unwrap();
        drop(engine);
        let until = deadline();
        while Arc::strong_count(&receiver) > 1 {
            assert!(Instant::now() < until, "a thread keeps the receiver");
            std::thread::yield_now();
        }
        drop(sender);
    });
}
