//! Files: every operation, by io_uring and by the threads alone, on tmpfs and on a disk; cancelling, dropping at every stage, chains, roots,
//! bounds, event loops, forks, full disks, errors; and random sequences against `std::fs`.
//!
//! `PELTON_ROUNDS` makes what counts descriptors and memory long (10000: of a million operations), `PROPTEST_CASES` the random sequences.

mod support;

use pelton::Error;
use pelton::file::{Buffer, Completion, Engine, EngineOptions, File, Kind, Open, Operation, Output, Submitted, Tail};
use proptest::prelude::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::Write as _;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};
use support::race::refuse;
use support::{Child, DEADLINE, Role, Watchdog, deadline, hear, say};

/// What a child of these tests does.
#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    match role.get("role") {
        "limited" => limited(Path::new(role.get("path")), role.get("way")),
        "limited sequences" => limited_sequences(Path::new(role.get("path")), role.get("way")),
        "full" => full(Path::new(role.get("path")), role.get("way")),
        "many" => many(Path::new(role.get("path")), role.get("way")),
        "left" => left(Path::new(role.get("path")), role.get("way")),
        other => panic!("no such role: {other}"),
    }
}

/// A file system to try it on, and how.
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
        let engine = self.options.open().unwrap();
        assert!(self.way != "threads" || !engine.uses_io_uring());
        engine
    }
}

fn options(way: &str) -> EngineOptions {
    if way == "threads" { EngineOptions::new().without_io_uring() } else { EngineOptions::new() }
}

/// Tries it on a disk (or what /var/tmp is) and on tmpfs, submitted to io_uring, submitted to the threads, and by `run`.
fn everywhere(claim: &'static str, test: impl Fn(&Case)) {
    let _hang = Watchdog::new(claim);
    for way in ["ring", "threads", "run"] {
        RUNS.set(way == "run");
        if way == "ring" && !Engine::new().unwrap().uses_io_uring() {
            eprintln!("no io_uring here: only the threads are tried");
            continue;
        }
        for place in ["/var/tmp", "/dev/shm"] {
            let root = tempfile::Builder::new().prefix("pelton-file").tempdir_in(place).unwrap();
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

/// One operation, in the way that is tried.
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

fn is_readable(engine: &Engine) -> bool {
    let mut fds = [PollFd::new(engine, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
}

fn poll_readable(engine: &Engine) {
    let mut fds = [PollFd::new(engine, PollFlags::IN)];
    let timeout = Timespec { tv_sec: DEADLINE.as_secs() as i64, tv_nsec: 0 };
    assert_eq!(poll(&mut fds, Some(&timeout)).unwrap(), 1, "the descriptor never became readable");
}

fn open(engine: &mut Engine, path: &Path) -> File {
    ran(engine, Operation::open(path, Open::for_both().create(0o640))).unwrap().into_file().unwrap()
}

fn pipe(name: &str) -> (File, std::fs::File) {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    (File::from_fd(read, name).unwrap(), write.into())
}

fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..bytes)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        })
        .collect()
}

#[test]
fn every_operation_does_what_its_system_call_does() {
    everywhere("every operation does what its system call does", |case| {
        let mut engine = case.engine();
        let path = case.path("a");
        let file = open(&mut engine, &path);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640 & !umask());

        // Positioned, larger than what is answered at once, and vectored.
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
        assert_eq!((read.count(), joined(&read.buffers) == text), (70_000, true));
        let many = pieces(&[3; 2500]);
        let read = ran(&mut engine, Operation::read_vectored_at(&file, many, 100)).unwrap();
        assert_eq!((read.count(), joined(&read.buffers) == text[..7500]), (7500, true), "more than IOV_MAX");

        // At the file's position, and at its end.
        ran(&mut engine, Operation::truncate(&file, 3)).unwrap();
        ran(&mut engine, Operation::write_at(&file, b"abc", 0)).unwrap();
        ran(&mut engine, Operation::append(&file, b"def")).unwrap();
        ran(&mut engine, Operation::append(&file, vec![b'x'; 400_000])).unwrap();
        assert_eq!(ran(&mut engine, Operation::read(&file, vec![0; 4])).unwrap().bytes(), b"abcd");
        assert_eq!(ran(&mut engine, Operation::read(&file, vec![0; 4])).unwrap().bytes(), b"efxx");
        ran(&mut engine, Operation::write(&file, "HERE")).unwrap();
        assert_eq!(ran(&mut engine, Operation::read_at(&file, vec![0; 5], 8)).unwrap().bytes(), b"HEREx");

        // To the end, and beyond.
        ran(&mut engine, Operation::truncate(&file, 10)).unwrap();
        assert_eq!(ran(&mut engine, Operation::read_at(&file, vec![0; 500_000], 4)).unwrap().count(), 6);
        assert_eq!(ran(&mut engine, Operation::read_at(&file, vec![0; 10], 10)).unwrap().count(), 0);
        assert_eq!(ran(&mut engine, Operation::read_at(&file, vec![0; 10], 99)).unwrap().count(), 0);
        ran(&mut engine, Operation::allocate(&file, 0, 65_536)).unwrap();
        ran(&mut engine, Operation::sync(&file)).unwrap();
        ran(&mut engine, Operation::sync_data(&file)).unwrap();

        // What is known of it.
        let now = SystemTime::UNIX_EPOCH + Duration::new(1_700_000_000, 5_000_000);
        let early = SystemTime::UNIX_EPOCH - Duration::new(3, 500_000_000);
        ran(&mut engine, Operation::set_times(&path, Some(early), Some(now))).unwrap();
        let wanted = std::fs::metadata(&path).unwrap();
        for asked in [Operation::stat(&path), Operation::stat_link(&path), Operation::stat_file(&file)] {
            let Ok(Output::Stat(found)) = ran(&mut engine, asked).unwrap().outcome else { panic!("no stat") };
            assert_eq!((found.kind, found.bytes, found.inode), (Kind::File, 65_536, wanted.ino()));
            assert_eq!((found.modified, found.accessed), (now, early));
            assert_eq!((found.mode, found.links, found.uid), (wanted.mode() & 0o7777, 1, wanted.uid()));
        }
        ran(&mut engine, Operation::set_times(&path, None, Some(early))).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().modified().unwrap(), early);

        // Names.
        let (b, c, link, dir) = (case.path("b"), case.path("c"), case.path("link"), case.path("dir"));
        ran(&mut engine, Operation::make_directory(&dir, 0o750)).unwrap();
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
        ran(&mut engine, Operation::remove_directory(&dir)).unwrap();
        assert_eq!(std::fs::read_dir(case.root.path()).unwrap().count(), 1);

        // Closing: refused while there is another handle.
        let other = file.clone();
        assert_eq!(errno(&ran(&mut engine, Operation::close(other)).unwrap_err()), "EBUSY");
        ran(&mut engine, Operation::close(file)).unwrap();
        engine.close().unwrap();
    });
}

fn joined(buffers: &[Buffer]) -> Vec<u8> {
    buffers.iter().flat_map(|buffer| buffer.iter().copied()).collect()
}

fn umask() -> u32 {
    let mask = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    rustix::process::umask(mask);
    mask.bits()
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
        // A file that is made up while it is read has no length.
        let made_up =
            ran(&mut engine, Operation::open("/proc/self/status", Open::for_reading())).unwrap().into_file().unwrap();
        let file = open(&mut engine, &case.path("status"));
        assert!(ran(&mut engine, Operation::copy(&made_up, 0, &file, 0, 1 << 20)).unwrap().count() > 100);
    });
}

/// Until the system answers so of a file that was just written, whose pages it may be at work on; false where it never does.
fn answers_without_waiting(path: &Path) -> bool {
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
fn what_the_page_cache_has_is_answered_in_the_submitting_call() {
    everywhere("what the page cache has is answered at once", |case| {
        let path = case.path("a");
        std::fs::write(&path, pattern(1, 8192)).unwrap();
        let mut engine = case.engine();
        let file = open(&mut engine, &path);
        if !answers_without_waiting(&path) && case.root.path().starts_with("/var/tmp") {
            eprintln!("this file system cannot be asked not to wait: nothing is answered at once");
            return;
        }
        // Whether it can be, each file is asked once.
        submit(&mut engine, 4, Operation::read_at(&file, vec![0; 4096], 0));
        assert_eq!(done(&mut engine).count(), 4096);
        // An answer after a deadline that has passed was there in the call, without anything having been begun.
        let past = Instant::now() - Duration::from_secs(1);
        let read = engine.run_until(Operation::read_at(&file, vec![0; 4096], 0), past).unwrap();
        let read = read.expect("what was just written is in the page cache");
        assert_eq!(read.bytes(), &pattern(1, 8192)[..4096]);
        // What has to be waited for is not.
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
fn many_are_in_flight_and_each_comes_back_with_its_token_and_its_memory() {
    everywhere("many are in flight", |case| {
        let path = case.path("a");
        let wanted = pattern(1, 600 * 4096);
        std::fs::write(&path, &wanted).unwrap();
        let mut engine = case.engine();
        // Past the page cache where the file system can: then all of them wait for the disk.
        let direct = ran(&mut engine, Operation::open(&path, Open::for_reading().direct()));
        let file = direct
            .or_else(|_| ran(&mut engine, Operation::open(&path, Open::for_reading())))
            .unwrap()
            .into_file()
            .unwrap();
        let mut places = Vec::new();
        for token in 0..600u64 {
            let buffer = Buffer::aligned(4096);
            places.push(buffer.as_ptr() as usize);
            submit(&mut engine, token, Operation::read_at(&file, buffer, token * 4096));
        }
        assert_eq!(engine.in_flight(), 600);
        let mut seen = vec![false; 600];
        while engine.in_flight() > 0 {
            let read = done(&mut engine);
            let token = read.token as usize;
            assert!(!std::mem::replace(&mut seen[token], true), "{token} twice");
            assert_eq!(read.buffer.as_ptr() as usize, places[token]);
            assert_eq!(read.bytes(), &wanted[token * 4096..][..4096]);
        }
        assert!(seen.iter().all(|seen| *seen));
    });
}

#[test]
fn what_is_beyond_the_bound_comes_back_undone() {
    everywhere("what is beyond the bound comes back undone", |case| {
        let mut engine = case.options.clone().in_flight_max(2).open().unwrap();
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
        assert!(engine.arm().unwrap());
        assert!(!is_readable(&engine));
        for round in 0..20 {
            // Nothing yet: the pipe is empty.
            submit(&mut engine, 1, Operation::read(&read, vec![0; 1]));
            assert!(engine.arm().unwrap() && !is_readable(&engine), "round {round}");
            write.write_all(b"x").unwrap();
            poll_readable(&engine);
            assert_eq!(engine.try_completion().unwrap().unwrap().bytes(), b"x");
            assert!(engine.try_completion().unwrap().is_none());
            assert!(engine.arm().unwrap() && !is_readable(&engine), "round {round}");
            // Submitted while armed: begun at once, or answered at once.
            submit(&mut engine, 2, Operation::sync_data(&file));
            poll_readable(&engine);
            assert_eq!(done(&mut engine).token, 2);
            assert!(engine.arm().unwrap() && !is_readable(&engine), "round {round}");
            submit(&mut engine, 3, Operation::read_at(&file, vec![0; 4], 0));
            poll_readable(&engine);
            // Two are there and one is taken: still readable, and arming says so.
            submit(&mut engine, 4, Operation::read_at(&file, vec![0; 4], 0));
            assert_eq!(done(&mut engine).bytes(), b"text");
            assert!(is_readable(&engine));
            assert!(!engine.arm().unwrap() && is_readable(&engine));
            assert_eq!(done(&mut engine).bytes(), b"text");
            assert!(engine.arm().unwrap() && !is_readable(&engine), "round {round}");
            engine.disarm();
        }
    });
}

#[test]
fn what_is_cancelled_completes_and_gives_its_memory_back() {
    everywhere("what is cancelled completes", |case| {
        let mut engine = case.engine();
        let (read, mut write) = pipe("a pipe");
        // Not begun; begun; and beside it one that is not cancelled.
        submit(&mut engine, 1, Operation::read(&read, vec![1; 10]));
        assert!(engine.cancel(1).unwrap());
        let ended = done(&mut engine);
        assert_eq!((ended.token, failure(&ended), &*ended.buffer), (1, "ECANCELED", &[1; 10][..]));
        submit(&mut engine, 2, Operation::read(&read, vec![2; 10]));
        submit(&mut engine, 3, Operation::read(&read, vec![3; 10]));
        assert!(engine.arm().unwrap());
        assert!(engine.cancel(2).unwrap());
        poll_readable(&engine);
        let ended = done(&mut engine);
        assert_eq!((ended.token, failure(&ended), &*ended.buffer), (2, "ECANCELED", &[2; 10][..]));
        write.write_all(b"three").unwrap();
        let ended = done(&mut engine);
        assert_eq!((ended.token, ended.bytes()), (3, &b"three"[..]));
        assert!(!engine.cancel(3).unwrap());
        // A run that is given up at its deadline takes nothing of what comes later.
        let soon = Instant::now() + Duration::from_millis(5);
        assert!(engine.run_until(Operation::read(&read, vec![0; 10]), soon).unwrap().is_none());
        while engine.cancel(9).unwrap() || !settled(&mut engine) {}
        write.write_all(b"later").unwrap();
        assert_eq!(ran(&mut engine, Operation::read(&read, vec![0; 10])).unwrap().bytes(), b"later");
    });
}

#[test]
fn what_is_cancelled_behind_busy_threads_completes_at_once() {
    everywhere("what is cancelled behind busy threads completes at once", |case| {
        let mut engine = case.options.clone().threads(1).open().unwrap();
        let (slow, peer) = slow_to_close();
        let is_closing = closing(&slow);
        submit(&mut engine, 1, Operation::close(slow));
        engine.start().unwrap();
        is_closing();
        // The one thread is at that; this waits for it, alone and as the first of a chain.
        let lent = Lent::new(1);
        let (_reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let writer = File::from_fd(writer, "a pipe").unwrap();
        submit(&mut engine, 2, Operation::write(&writer, lent.buffer(0)));
        let chain = [2, 3].map(|token| (token, Operation::read_link(case.root.path())));
        assert!(engine.try_submit_chain(chain).unwrap().is_submitted());
        engine.start().unwrap();
        assert!(engine.cancel(2).unwrap());
        let mut ended: Vec<Completion> =
            (0..3).map(|_| engine.try_completion().unwrap().expect("it has ended")).collect();
        ended.sort_by_key(|ended| ended.token);
        assert_eq!(ended.iter().map(|ended| ended.token).collect::<Vec<_>>(), [2, 2, 3]);
        assert!(ended.iter().all(|ended| failure(ended) == "ECANCELED"));
        drop(ended);
        assert_eq!(lent.times(), [1]);
        assert!(engine.try_completion().unwrap().is_none());
        // Nor does what is left behind it by a drop wait for the thread.
        let lent = Lent::new(1);
        submit(&mut engine, 4, Operation::write(&writer, lent.buffer(0)));
        engine.start().unwrap();
        drop(engine);
        assert_eq!(lent.times(), [1]);
        // A reset ends it.
        rustix::net::sockopt::set_socket_linger(&peer, Some(Duration::ZERO)).unwrap();
    });
}

/// Whether what was given up has ended: an engine has room for all again.
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
fn a_chain_goes_on_until_something_fails_and_the_rest_comes_back_undone() {
    everywhere("a chain goes on until something fails", |case| {
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

        // Cancelled in the middle: what is behind it is not done, what is before it is.
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
fn an_error_says_what_failed_where_and_by_which_name() {
    everywhere("an error says what failed", |case| {
        let mut engine = case.engine();
        let missing = case.path("missing/file");
        let error = ran(&mut engine, Operation::open(&missing, Open::for_reading())).unwrap_err();
        assert_eq!(errno(&error), "ENOENT");
        let text = error.to_string();
        assert!(text.starts_with("opening ") && text.contains(missing.to_str().unwrap()), "{text}");
        let Error::File { source, .. } = error else { panic!() };
        assert_eq!(source.raw_os_error(), Some(libc::ENOENT));

        let file = open(&mut engine, &case.path("a"));
        let dir = case.root.path();
        ran(&mut engine, Operation::write(&file, "some text")).unwrap();
        let reading =
            ran(&mut engine, Operation::open(case.path("a"), Open::for_reading())).unwrap().into_file().unwrap();
        let cases = [
            (Operation::open(case.path("a"), Open::for_both().create_new(0o600)), "EEXIST"),
            (Operation::open(case.path("a"), Open::for_reading().directory()), "ENOTDIR"),
            (Operation::open(dir, Open::for_writing()), "EISDIR"),
            (Operation::open("with\0zero", Open::for_reading()), "EINVAL"),
            (Operation::write_at(&reading, b"x", 0), "EBADF"),
            (Operation::write_at(&reading, vec![0; 1 << 20], 0), "EBADF"),
            (Operation::read_at(&file, vec![0; 1], u64::MAX >> 1), ""),
            (Operation::read_at(&file, vec![0; 1], u64::MAX), "EINVAL"),
            (Operation::write_at(&file, vec![0; 1], u64::MAX), "EINVAL"),
            (Operation::copy(&file, 0, &file, 1, 10), "EINVAL"),
            (Operation::stat(&missing), "ENOENT"),
            (Operation::unlink(dir), "EISDIR"),
            (Operation::remove_directory(case.path("a")), "ENOTDIR"),
            (Operation::make_directory(dir, 0o700), "EEXIST"),
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
        // The memory of what fails comes back with its completion.
        submit(&mut engine, 1, Operation::write_at(&reading, b"kept", 0));
        let ended = done(&mut engine);
        assert_eq!((failure(&ended), &*ended.buffer), ("EBADF", &b"kept"[..]));
    });
}

#[test]
fn a_read_or_write_that_the_device_fails_is_an_error_by_name() {
    everywhere("a read that the device fails is an error", |case| {
        let mut engine = case.engine();
        // Memory that nobody has mapped cannot be read or written: the kernel answers as a broken disk would.
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
fn a_rooted_engine_cannot_be_led_out() {
    everywhere("a rooted engine cannot be led out", |case| {
        let (inside, outside) = (case.path("inside"), case.path("outside"));
        std::fs::create_dir_all(inside.join("dir/sub")).unwrap();
        std::fs::create_dir(&outside).unwrap();
        std::fs::write(outside.join("secret"), b"secret").unwrap();
        std::fs::write(inside.join("dir/file"), b"file").unwrap();
        let link = |target: &str, name: &str| std::os::unix::fs::symlink(target, inside.join(name)).unwrap();
        link("../outside", "up");
        link(outside.to_str().unwrap(), "absolute");
        link("../outside/secret", "dir/../secret-link");
        link("dir", "good");
        link("/proc/self/root", "magic");
        let mut engine = case.options.clone().root(&inside).open().unwrap();
        let absolute = outside.join("secret");
        let ways = [
            "up/secret",
            "absolute/secret",
            "../outside/secret",
            "dir/../../outside/secret",
            "magic/etc/passwd",
            "good/../../outside/secret",
        ];
        for way in ways.iter().copied().chain([absolute.to_str().unwrap()]) {
            let attempts = [
                Operation::open(way, Open::for_reading()),
                Operation::open(way, Open::for_both().create(0o600)),
                Operation::open(format!("{way}-new"), Open::for_writing().create(0o600)),
                Operation::stat(way),
                Operation::stat_link(way),
                Operation::set_times(way, None, Some(SystemTime::UNIX_EPOCH)),
                Operation::unlink(way),
                Operation::remove_directory(way),
                Operation::rename(way, "taken"),
                Operation::rename("dir/file", way),
                Operation::link(way, "taken"),
                Operation::link("dir/file", format!("{way}-new")),
                Operation::symlink("dir", format!("{way}-new")),
                Operation::read_link(way),
                Operation::make_directory(format!("{way}-new"), 0o700),
            ];
            for attempt in attempts {
                let text = format!("{attempt:?}");
                let error = ran(&mut engine, attempt).expect_err(&text);
                assert!(["EXDEV", "ELOOP"].contains(&errno(&error)), "{text}: {error}");
            }
        }
        // What the last name itself leads to is not followed out either.
        for operation in [
            Operation::open("secret-link", Open::for_reading()),
            Operation::stat("secret-link"),
            Operation::stat("up/"),
            Operation::open("..", Open::for_reading()),
            Operation::stat("/"),
            Operation::stat(".."),
        ] {
            let text = format!("{operation:?}");
            assert_eq!(errno(&ran(&mut engine, operation).expect_err(&text)), "EXDEV", "{text}");
        }
        assert_eq!(std::fs::read(outside.join("secret")).unwrap(), b"secret");
        assert_ne!(std::fs::metadata(outside.join("secret")).unwrap().modified().unwrap(), SystemTime::UNIX_EPOCH);
        assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 1);
        assert_eq!(std::fs::read(inside.join("dir/file")).unwrap(), b"file");

        // Inside, everything works, links too.
        let file = ran(&mut engine, Operation::open("good/file", Open::for_both())).unwrap().into_file().unwrap();
        assert_eq!(ran(&mut engine, Operation::read_at(&file, vec![0; 9], 0)).unwrap().bytes(), b"file");
        let Ok(Output::Path(target)) = ran(&mut engine, Operation::read_link("absolute")).unwrap().outcome else {
            panic!()
        };
        assert_eq!(target, outside);
        ran(&mut engine, Operation::make_directory("dir/new/", 0o700)).unwrap();
        ran(&mut engine, Operation::rename("dir/file", "dir/new/file")).unwrap();
        ran(&mut engine, Operation::link("dir/new/file", "dir/../second")).unwrap();
        ran(&mut engine, Operation::symlink("second", "third")).unwrap();
        ran(&mut engine, Operation::set_times("third", None, Some(SystemTime::UNIX_EPOCH))).unwrap();
        let Ok(Output::Stat(found)) = ran(&mut engine, Operation::stat("./third")).unwrap().outcome else { panic!() };
        assert_eq!((found.links, found.modified), (2, SystemTime::UNIX_EPOCH));
        ran(&mut engine, Operation::unlink("up")).unwrap();
        assert!(outside.exists());
        // A link made inside can say anything, and leads nowhere.
        ran(&mut engine, Operation::symlink("/etc", "etc")).unwrap();
        assert_eq!(errno(&ran(&mut engine, Operation::open("etc/passwd", Open::for_reading())).unwrap_err()), "EXDEV");
    });
}

#[test]
fn the_rules_for_resolving_a_path_are_kept() {
    everywhere("the rules for resolving a path are kept", |case| {
        let mut engine = case.engine();
        std::fs::create_dir(case.path("dir")).unwrap();
        std::fs::write(case.path("dir/file"), b"").unwrap();
        std::os::unix::fs::symlink("dir", case.path("link")).unwrap();
        std::os::unix::fs::symlink("dir/file", case.path("file-link")).unwrap();
        let mut found = |path: PathBuf, how: Open| {
            ran(&mut engine, Operation::open(path, how)).map(drop).map_err(|error| errno(&error))
        };
        assert_eq!(found(case.path("link/file"), Open::for_reading()), Ok(()));
        assert_eq!(found(case.path("link/file"), Open::for_reading().no_symlinks()), Err("ELOOP"));
        assert_eq!(found(case.path("link/file"), Open::for_reading().no_follow()), Ok(()));
        assert_eq!(found(case.path("file-link"), Open::for_reading().no_follow()), Err("ELOOP"));
        assert_eq!(found("/proc/self/status".into(), Open::for_reading().one_mount()), Err("EXDEV"));
        let made = case.path("made");
        assert_eq!(found(made.clone(), Open::for_writing().create(0o600).no_symlinks()), Ok(()));
        std::fs::write(&made, b"1234").unwrap();
        assert_eq!(found(made.clone(), Open::for_writing().truncate()), Ok(()));
        assert_eq!(std::fs::metadata(&made).unwrap().len(), 0);
    });
}

#[test]
fn what_a_thread_began_that_has_ended_is_done_all_the_same() {
    everywhere("what a thread began that has ended is done", |case| {
        let mut engine = case.engine();
        let (read, mut write) = pipe("a pipe");
        let file = open(&mut engine, &case.path("a"));
        // The kernel cancels what a thread began when that ends: nobody is told so.
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
fn where_a_filter_refuses_io_uring_everything_works_all_the_same() {
    let _hang = Watchdog::new("where a filter refuses io_uring everything works");
    for call in [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register] {
        // A filter is a thread's, and of those that it makes.
        std::thread::spawn(move || {
            refuse(call);
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
fn signals_are_never_seen() {
    everywhere("signals are never seen", |case| {
        extern "C" fn nothing(_: libc::c_int) {}
        let handler = nothing as extern "C" fn(libc::c_int);
        // SAFETY: the handler does nothing; the structure lives as long as the call.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as usize;
            libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut());
        }
        let over = std::sync::atomic::AtomicBool::new(false);
        // SAFETY: it only asks which thread this is.
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
            for round in 0..200u64 {
                let wanted = pattern(round, 300_000);
                assert_eq!(ran(&mut engine, Operation::write_at(&file, wanted.clone(), 0)).unwrap().count(), 300_000);
                assert!(ran(&mut engine, Operation::read_at(&file, vec![0; 300_000], 0)).unwrap().bytes() == wanted);
                ran(&mut engine, Operation::stat(case.path("a"))).unwrap();
            }
            over.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    });
}

/// Until no thread of this process keeps what a dropped engine left to the kernel.
fn kernel_is_done() {
    let deadline = deadline();
    let keeps = || {
        (std::fs::read_dir("/proc/self/task").unwrap().flatten()).any(|task| {
            std::fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.starts_with("pelton-file-end"))
        })
    };
    while keeps() {
        assert!(Instant::now() < deadline, "the kernel never ended what a dropped engine had begun");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn an_engine_dropped_at_any_stage_frees_no_memory_that_the_kernel_may_write() {
    everywhere("an engine dropped at any stage", |case| {
        const BYTES: usize = 256 << 10;
        let path = case.path("a");
        std::fs::write(&path, vec![0xff; 16 * BYTES]).unwrap();
        for stage in 0..24 {
            let mut engine = case.engine();
            let how = Open::for_reading();
            let direct = ran(&mut engine, Operation::open(&path, how.direct()));
            let file = direct.or_else(|_| ran(&mut engine, Operation::open(&path, how))).unwrap().into_file().unwrap();
            let (read, mut write) = pipe("a pipe");
            submit(&mut engine, 100, Operation::read(&read, vec![0; BYTES]));
            for token in 0..16 {
                submit(&mut engine, token, Operation::read_at(&file, Buffer::aligned(BYTES), token * BYTES as u64));
            }
            let chain = (0..3).map(|token| (200 + token, Operation::read(&read, vec![0; BYTES])));
            assert!(engine.try_submit_chain(chain).unwrap().is_submitted());
            // Nothing begun; begun; so many taken; cancelled.
            if stage > 0 {
                engine.start().unwrap();
            }
            let mut kept = Vec::new();
            for _ in 2..stage.min(16) {
                kept.push(done(&mut engine));
            }
            if stage >= 16 {
                assert!(engine.cancel(100).unwrap());
            }
            if stage >= 20 {
                assert!(engine.cancel(201).unwrap());
                engine.start().unwrap();
            }
            drop(engine);
            // Whoever gets memory now, that the kernel was to write, would find it changed.
            let mine: Vec<(Vec<u8>, Buffer)> = (0..20).map(|_| (vec![0x11; BYTES], Buffer::aligned(BYTES))).collect();
            let _ = write.write_all(&[0xee; 5000]);
            kernel_is_done();
            for (vector, aligned) in &mine {
                assert!(vector.iter().all(|byte| *byte == 0x11), "stage {stage}");
                assert!(aligned.iter().all(|byte| *byte == 0), "stage {stage}");
            }
            assert!(
                kept.iter().filter(|read| read.token < 16).all(|read| read.bytes().iter().all(|byte| *byte == 0xff))
            );
        }
    });
}

#[test]
fn closing_waits_for_what_is_in_flight_or_until_its_deadline() {
    everywhere("closing waits for what is in flight", |case| {
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

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

#[test]
fn nothing_is_left_of_engines_files_and_operations() {
    // In a process of its own, where nobody else opens anything.
    let _hang = Watchdog::new("nothing is left");
    for way in ["ring", "threads"] {
        let place = tempfile::tempdir_in("/var/tmp").unwrap();
        let child = Child::start(Role::new("many").with("path", place.path().display()).with("way", way));
        child.expect("nothing left");
    }
}

fn many(path: &Path, way: &str) {
    let rounds: u64 = std::env::var("PELTON_ROUNDS").map_or(300, |text| text.parse().unwrap());
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let raised = rustix::process::Rlimit { current: limit.maximum, ..limit };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).unwrap();
    let round = |n: u64| {
        let mut engine = options(way).open().unwrap();
        let file = open(&mut engine, &path.join("a"));
        let (read, _write) = pipe("a pipe");
        submit(&mut engine, 1, Operation::write_at(&file, pattern(n, 10_000), 0));
        submit(&mut engine, 2, Operation::open(path.join("a"), Open::for_reading()));
        submit(&mut engine, 3, Operation::open(path.join("missing"), Open::for_reading()));
        submit(&mut engine, 4, Operation::read(&read, vec![0; 1]));
        if n.is_multiple_of(3) {
            assert!(engine.cancel(4).unwrap());
            engine.close().unwrap();
        } else if n % 3 == 1 {
            engine.start().unwrap();
        } else {
            engine.arm().unwrap();
            done(&mut engine);
        }
    };
    let settle = |wanted: (usize, usize)| {
        let deadline = deadline();
        loop {
            let found = (open_descriptors(), threads());
            if found == wanted {
                break;
            }
            assert!(Instant::now() < deadline, "found {found:?} descriptors and threads, wanted {wanted:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    // Threads end in their own time.
    let before = (open_descriptors(), threads());
    (0..rounds).for_each(round);
    settle(before);
    flat(path, way, 100 * rounds);
    settle(before);

    // As many open files as the system allows, up to 10,000.
    let wanted = 10_000.min(limit.maximum.unwrap_or(10_000).saturating_sub(100)) as usize;
    let mut engine = options(way).open().unwrap();
    let mut files = Vec::new();
    for n in 0..wanted {
        let to = path.join(format!("f{}", n % 100));
        let open = Operation::open(to, Open::for_both().create(0o600));
        if !engine.try_submit(n as u64, open).unwrap().is_submitted() {
            panic!("there was room");
        }
        if engine.in_flight() == 500 || n + 1 == wanted {
            while engine.in_flight() > 0 {
                files.push(done(&mut engine).into_file().unwrap());
            }
        }
    }
    assert_eq!(files.len(), wanted);
    for file in &files {
        assert_eq!(ran(&mut engine, Operation::write_at(file, b"x", 0)).unwrap().count(), 1);
    }
    // And one more than there may be is an error by name.
    let few = rustix::process::Rlimit { current: Some(open_descriptors() as u64 - 1), ..limit };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, few).unwrap();
    assert_eq!(errno(&ran(&mut engine, Operation::open(path.join("a"), Open::for_reading())).unwrap_err()), "EMFILE");
    rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).unwrap();
    for (token, file) in (0..).zip(files) {
        while let Submitted::Full(_) = engine.try_submit_chain([(token, Operation::close(file.clone()))]).unwrap() {
            done(&mut engine);
        }
    }
    engine.close().unwrap();
    settle(before);
    say("nothing left");
}

/// Operations of every kind, one engine: descriptors and memory stay as they are after the first of them.
fn flat(path: &Path, way: &str, operations: u64) {
    let mut engine = options(way).open().unwrap();
    let file = open(&mut engine, &path.join("flat"));
    let ((read, mut write), (idle, _nobody)) = (pipe("a pipe"), pipe("idle"));
    std::fs::write(path.join("small"), b"small").unwrap();
    let mut do_some = |operations: u64| {
        for n in 0..operations {
            let operation = match n % 10 {
                0 => Operation::write_at(&file, vec![n as u8; 5000], n % 64 * 5000),
                1 => Operation::read_vectored_at(&file, vec![vec![0; 700].into(), Buffer::aligned(5000)], n % 64),
                2 => Operation::open(path.join("small"), Open::for_reading()),
                3 => Operation::open(path.join("missing"), Open::for_reading()),
                4 => Operation::stat(path.join("small")),
                5 => {
                    if n % 30 == 5 {
                        let soon = Instant::now() + Duration::from_micros(50);
                        assert!(engine.run_until(Operation::read(&idle, vec![0; 1]), soon).unwrap().is_none());
                    }
                    Operation::set_times(path.join("small"), None, None)
                }
                6 => Operation::copy(&file, 0, &file, 1 << 20, 3000),
                7 => Operation::read_link(path.join("small")),
                8 => {
                    let opening = Operation::open(path.join("small"), Open::for_both());
                    Operation::sync_data(&engine.run(opening).unwrap().into_file().unwrap())
                }
                _ => Operation::read(&read, vec![0; 100]),
            };
            submit(&mut engine, n, operation);
            match n % 20 {
                9 => _ = engine.cancel(n).unwrap(),
                19 => write.write_all(b"x").unwrap(),
                _ => {}
            }
            let is_last = n + 1 == operations;
            while engine.in_flight() > 40 || (is_last && engine.in_flight() > 0) {
                if is_last {
                    // What was cancelled may have taken another's.
                    write.write_all(b"x").unwrap();
                }
                drop(done(&mut engine));
            }
        }
        // Until what was given up has ended, too.
        let mut found = (0, 0);
        let deadline = deadline();
        loop {
            while engine.cancel(u64::MAX).unwrap() || !settled(&mut engine) {}
            let now = (open_descriptors(), LIVE.load(std::sync::atomic::Ordering::Relaxed));
            if now == found || Instant::now() > deadline {
                return now;
            }
            found = now;
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    let first = do_some(2000);
    let last = do_some(operations);
    assert_eq!(last.0, first.0, "descriptors");
    assert!(
        last.1 < first.1 + (64 << 10),
        "{} bytes after 2,000 operations, {} after {operations} more",
        first.1,
        last.1
    );
}

/// Bytes that are allocated.
static LIVE: std::sync::atomic::AtomicI64 = std::sync::atomic::AtomicI64::new(0);

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: it is the system's.
unsafe impl std::alloc::GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: std::alloc::Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size() as i64, std::sync::atomic::Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { std::alloc::System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: std::alloc::Layout) {
        LIVE.fetch_sub(layout.size() as i64, std::sync::atomic::Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { std::alloc::System.dealloc(memory, layout) }
    }
}

#[test]
fn a_limit_of_file_sizes_is_an_error_and_no_signal() {
    let _hang = Watchdog::new("a limit of file sizes is an error");
    for (way, place) in [("ring", "/var/tmp"), ("threads", "/var/tmp"), ("ring", "/dev/shm"), ("threads", "/dev/shm")] {
        let place = tempfile::tempdir_in(place).unwrap();
        let child = Child::start(Role::new("limited").with("path", place.path().display()).with("way", way));
        child.expect("limited");
    }
}

fn limited(path: &Path, way: &str) {
    let file = open(&mut options(way).open().unwrap(), &path.join("a"));
    // Its buffers are a file's too, as the system counts.
    let appenders = pelton::Options::new().append(Tail::of(file.clone()).unwrap()).unwrap();
    appenders.append(b"x").and_then(|()| appenders.sync()).unwrap();
    let limit = rustix::process::Rlimit { current: Some(10_000), maximum: Some(10_000) };
    rustix::process::setrlimit(rustix::process::Resource::Fsize, limit).unwrap();
    let mut engine = options(way).open().unwrap();
    let cut = ran(&mut engine, Operation::write_at(&file, vec![1; 4096], 8000)).unwrap();
    assert_eq!((cut.count(), errno(cut.cut_short_by.as_ref().unwrap())), (2000, "EFBIG"));
    assert_eq!(errno(&ran(&mut engine, Operation::write_at(&file, vec![1; 4096], 10_000)).unwrap_err()), "EFBIG");
    assert_eq!(errno(&ran(&mut engine, Operation::append(&file, vec![1; 1])).unwrap_err()), "EFBIG");
    assert_eq!(errno(&ran(&mut engine, Operation::truncate(&file, 10_001)).unwrap_err()), "EFBIG");
    assert_eq!(errno(&ran(&mut engine, Operation::allocate(&file, 0, 10_001)).unwrap_err()), "EFBIG");
    let end = ran(&mut engine, Operation::read_at(&file, vec![0; 4096], 9000)).unwrap();
    assert_eq!((end.count(), end.cut_short_by.is_none()), (1000, true));
    // A copy that is cut short ends its chain: what was to be removed after it is kept.
    let source = path.join("source");
    std::fs::write(&source, vec![4; 9000]).unwrap();
    let (from, to) = (open(&mut engine, &source), open(&mut engine, &path.join("to")));
    let chain = [(1, Operation::copy(&from, 0, &to, 5000, 9000)), (2, Operation::unlink(&source))];
    assert!(engine.try_submit_chain(chain).unwrap().is_submitted());
    let cut = done(&mut engine);
    assert_eq!((cut.count(), errno(cut.cut_short_by.as_ref().unwrap())), (5000, "EFBIG"));
    assert_eq!(failure(&done(&mut engine)), "ECANCELED");
    assert!(source.exists());
    let refused = appenders.append(&[0; 10_001]).and_then(|()| appenders.sync()).unwrap_err();
    assert_eq!(errno(&refused), "EFBIG");
    say("limited");
}

#[test]
fn a_full_disk_is_an_error_and_what_was_written_is_counted() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("not root: a full disk is not tried");
        return;
    }
    let _hang = Watchdog::new("a full disk is an error");
    for way in ["ring", "threads"] {
        let place = tempfile::tempdir_in("/tmp").unwrap();
        let mut child =
            Child::start_as(Role::new("full").with("path", place.path().display()).with("way", way), |_| {});
        match child.line().as_str() {
            "full" => {}
            "no mount" => eprintln!("a file system cannot be mounted here: a full disk is not tried"),
            other => panic!("{other}"),
        }
        child.tell("end");
    }
}

fn full(path: &Path, way: &str) {
    // SAFETY: no pointers but to texts that live as long as the calls.
    let mounted = unsafe {
        let target = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        libc::unshare(libc::CLONE_NEWNS) == 0
            && libc::mount(
                c"none".as_ptr(),
                c"/".as_ptr(),
                std::ptr::null(),
                libc::MS_REC | libc::MS_PRIVATE,
                std::ptr::null(),
            ) == 0
            && libc::mount(c"tmpfs".as_ptr(), target.as_ptr(), c"tmpfs".as_ptr(), 0, c"size=1m".as_ptr().cast()) == 0
    };
    if !mounted {
        return say("no mount");
    }
    let mut engine = options(way).open().unwrap();
    let file = open(&mut engine, &path.join("a"));
    let cut = ran(&mut engine, Operation::write_at(&file, vec![1; 4 << 20], 0)).unwrap();
    assert_eq!((cut.count(), errno(cut.cut_short_by.as_ref().unwrap())), (1 << 20, "ENOSPC"));
    assert_eq!(errno(&ran(&mut engine, Operation::write_at(&file, vec![1; 10], 1 << 20)).unwrap_err()), "ENOSPC");
    assert_eq!(errno(&ran(&mut engine, Operation::allocate(&file, 0, 2 << 20)).unwrap_err()), "ENOSPC");
    let pieces = vec![vec![2; 10].into(), vec![2; 5 << 20].into()];
    assert_eq!(errno(&ran(&mut engine, Operation::write_vectored_at(&file, pieces, 1 << 20)).unwrap_err()), "ENOSPC");
    // A chain ends at a write that was cut short.
    ran(&mut engine, Operation::truncate(&file, 1 << 19)).unwrap();
    let chain =
        [(1, Operation::append(&file, vec![3; 1 << 20])), (2, Operation::rename(path.join("a"), path.join("b")))];
    assert!(engine.try_submit_chain(chain).unwrap().is_submitted());
    assert_eq!(done(&mut engine).count(), 1 << 19);
    assert_eq!(failure(&done(&mut engine)), "ECANCELED");
    assert!(path.join("a").exists());
    say("full");
    hear();
}

#[test]
fn many_threads_append_to_a_plain_file_and_each_ones_messages_are_whole_and_in_order() {
    let _hang = Watchdog::new("many threads append to a plain file");
    let root = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = root.path().join("log");
    std::fs::write(&path, b"before;").unwrap();
    let mut engine = Engine::new().unwrap();
    let tail = Tail::of(open(&mut engine, &path)).unwrap();
    let appenders = pelton::Options::new().flush_bytes(64 << 10).append(tail).unwrap();
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

/// What a random sequence is made of. Names are numbers below 6, handles below 3.
#[derive(Clone, Debug)]
enum Step {
    Open { handle: usize, name: usize, create: bool, truncate: bool, append: bool },
    Write { handle: usize, offset: u64, bytes: usize },
    WritePieces { handle: usize, offset: u64, pieces: Vec<usize> },
    Append { handle: usize, bytes: usize },
    Read { handle: usize, offset: u64, bytes: usize },
    Truncate { handle: usize, bytes: u64 },
    Sync { handle: usize },
    Stat { name: usize, follows: bool },
    Unlink { name: usize },
    Rename { from: usize, to: usize },
    Link { from: usize, to: usize },
    Symlink { target: usize, name: usize },
    ReadLink { name: usize },
    MakeDirectory { name: usize },
    RemoveDirectory { name: usize },
    Copy { from: usize, to: usize, from_offset: u64, to_offset: u64, bytes: u64 },
    Close { handle: usize },
}

fn any_step() -> impl Strategy<Value = Step> {
    let (name, handle) = (0..6usize, 0..3usize);
    let offset = prop_oneof![4 => 0..20_000u64, 1 => 0..1_000_000u64];
    let bytes = prop_oneof![4 => 0..9000usize, 1 => 250_000..300_000usize];
    prop_oneof![
        6 => (handle.clone(), name.clone(), any::<bool>(), any::<bool>(), any::<bool>())
            .prop_map(|(handle, name, create, truncate, append)| Step::Open { handle, name, create, truncate: truncate && create, append }),
        6 => (handle.clone(), offset.clone(), bytes.clone()).prop_map(|(handle, offset, bytes)| Step::Write { handle, offset, bytes }),
        2 => (handle.clone(), offset.clone(), prop::collection::vec(0..5000usize, 0..6))
            .prop_map(|(handle, offset, pieces)| Step::WritePieces { handle, offset, pieces }),
        3 => (handle.clone(), bytes.clone()).prop_map(|(handle, bytes)| Step::Append { handle, bytes }),
        6 => (handle.clone(), offset.clone(), bytes).prop_map(|(handle, offset, bytes)| Step::Read { handle, offset, bytes }),
        2 => (handle.clone(), offset.clone()).prop_map(|(handle, bytes)| Step::Truncate { handle, bytes }),
        1 => handle.clone().prop_map(|handle| Step::Sync { handle }),
        3 => (name.clone(), any::<bool>()).prop_map(|(name, follows)| Step::Stat { name, follows }),
        2 => name.clone().prop_map(|name| Step::Unlink { name }),
        2 => (name.clone(), name.clone()).prop_map(|(from, to)| Step::Rename { from, to }),
        1 => (name.clone(), name.clone()).prop_map(|(from, to)| Step::Link { from, to }),
        1 => (name.clone(), name.clone()).prop_map(|(target, name)| Step::Symlink { target, name }),
        1 => name.clone().prop_map(|name| Step::ReadLink { name }),
        1 => name.clone().prop_map(|name| Step::MakeDirectory { name }),
        1 => name.prop_map(|name| Step::RemoveDirectory { name }),
        1 => (handle.clone(), handle.clone(), offset.clone(), offset.clone(), offset)
            .prop_map(|(from, to, from_offset, to_offset, bytes)| Step::Copy { from, to, from_offset, to_offset, bytes }),
        1 => handle.prop_map(|handle| Step::Close { handle }),
    ]
}

/// What came of a step, as either side tells it.
#[derive(Debug, PartialEq)]
enum Told {
    Nothing,
    Count(usize),
    /// So many bytes, and what came then.
    Cut(usize, i32),
    Bytes(Vec<u8>),
    Is(Kind, u64, u64),
    Path(PathBuf),
    Errno(i32),
}

fn name(name: usize) -> String {
    // The last two are in a directory that may be there or not.
    if name < 4 { format!("n{name}") } else { format!("n3/m{name}") }
}

type Handles<T> = [Option<T>; 3];

/// The step as `std::fs` does it.
fn by_std(root: &Path, handles: &mut Handles<std::fs::File>, step: &Step, seed: u64) -> Option<Told> {
    let at = |number: &usize| root.join(name(*number));
    let nothing = |result: std::io::Result<()>| result.map(|()| Told::Nothing);
    let told = match step {
        Step::Open { handle, name, create, truncate, append } => {
            let mut how = std::fs::OpenOptions::new();
            how.read(true).write(true).create(*create).truncate(*truncate).mode(0o600);
            if *append {
                how.custom_flags(libc::O_APPEND);
            }
            how.open(at(name)).map(|file| {
                handles[*handle] = Some(file);
                Told::Nothing
            })
        }
        Step::Write { handle, offset, bytes } => put(handles[*handle].as_ref()?, &pattern(seed, *bytes), *offset),
        Step::WritePieces { handle, offset, pieces } => {
            put(handles[*handle].as_ref()?, &pattern(seed, pieces.iter().sum()), *offset)
        }
        Step::Append { handle, bytes } => {
            let file = handles[*handle].as_ref()?;
            file.metadata().and_then(|found| put(file, &pattern(seed, *bytes), found.len()))
        }
        Step::Read { handle, offset, bytes } => {
            let (file, mut buffer, mut done) = (handles[*handle].as_ref()?, vec![0; *bytes], 0);
            loop {
                match file.read_at(&mut buffer[done..], offset + done as u64) {
                    Ok(0) => break Ok(Told::Bytes(buffer[..done].to_vec())),
                    Ok(more) => done += more,
                    Err(error) => break Err(error),
                }
            }
        }
        Step::Truncate { handle, bytes } => nothing(handles[*handle].as_ref()?.set_len(*bytes)),
        Step::Sync { handle } => nothing(handles[*handle].as_ref()?.sync_all()),
        Step::Stat { name, follows } => {
            let found = if *follows { std::fs::metadata(at(name)) } else { std::fs::symlink_metadata(at(name)) };
            found.map(|found| {
                let kind = match found.file_type() {
                    kind if kind.is_dir() => Kind::Directory,
                    kind if kind.is_symlink() => Kind::Symlink,
                    _ => Kind::File,
                };
                Told::Is(kind, if kind == Kind::File { found.len() } else { 0 }, found.nlink())
            })
        }
        Step::Unlink { name } => nothing(std::fs::remove_file(at(name))),
        Step::Rename { from, to } => nothing(std::fs::rename(at(from), at(to))),
        Step::Link { from, to } => nothing(std::fs::hard_link(at(from), at(to))),
        Step::Symlink { target, name: link } => nothing(std::os::unix::fs::symlink(name(*target), at(link))),
        Step::ReadLink { name } => std::fs::read_link(at(name)).map(Told::Path),
        Step::MakeDirectory { name } => nothing(std::fs::create_dir(at(name))),
        Step::RemoveDirectory { name } => nothing(std::fs::remove_dir(at(name))),
        Step::Copy { from, to, from_offset, to_offset, bytes } => {
            let (from, to) = (handles[*from].as_ref()?, handles[*to].as_ref()?);
            if from.metadata().ok()?.ino() == to.metadata().ok()?.ino() || appends(to) {
                return None;
            }
            let mut buffer = vec![0; *bytes as usize];
            let mut done = 0;
            while let Ok(more @ 1..) = from.read_at(&mut buffer[done..], from_offset + done as u64) {
                done += more;
            }
            // Of nothing the kernel says that it is too far, and `std::fs` does not ask.
            let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
            if done == 0 && limit.is_some_and(|limit| *to_offset >= limit) {
                return None;
            }
            put(to, &buffer[..done], *to_offset)
        }
        Step::Close { handle } => handles[*handle].take().map(|_| Ok(Told::Nothing))?,
    };
    Some(told.unwrap_or_else(|error| Told::Errno(error.raw_os_error().expect("of the system"))))
}

/// As `write_all_at`, and counts what went before an error.
fn put(file: &std::fs::File, bytes: &[u8], offset: u64) -> std::io::Result<Told> {
    let mut done = 0;
    while done < bytes.len() {
        match file.write_at(&bytes[done..], offset + done as u64) {
            Ok(more) => done += more,
            Err(error) if done > 0 => return Ok(Told::Cut(done, error.raw_os_error().expect("of the system"))),
            Err(error) => return Err(error),
        }
    }
    Ok(Told::Count(done))
}

fn appends(file: &std::fs::File) -> bool {
    rustix::fs::fcntl_getfl(file).unwrap().contains(rustix::fs::OFlags::APPEND)
}

/// The same step as an engine's operation.
fn operation(root: &Path, handles: &mut Handles<File>, step: &Step, seed: u64) -> Operation {
    let at = |number: &usize| root.join(name(*number));
    let file = |handle: &usize| handles[*handle].clone().expect("as on the other side");
    match step {
        Step::Open { name, create, truncate, append, .. } => {
            let how = Open::for_both();
            let how = if *create { how.create(0o600) } else { how };
            let how = if *truncate { how.truncate() } else { how };
            Operation::open(at(name), if *append { how.append() } else { how })
        }
        Step::Write { handle, offset, bytes } => Operation::write_at(&file(handle), pattern(seed, *bytes), *offset),
        Step::WritePieces { handle, offset, pieces } => {
            let all = pattern(seed, pieces.iter().sum());
            let mut rest = &all[..];
            let pieces = pieces.iter().map(|bytes| rest.split_off(..*bytes).unwrap().into()).collect();
            Operation::write_vectored_at(&file(handle), pieces, *offset)
        }
        Step::Append { handle, bytes } => Operation::append(&file(handle), pattern(seed, *bytes)),
        Step::Read { handle, offset, bytes } => Operation::read_at(&file(handle), vec![0xaa; *bytes], *offset),
        Step::Truncate { handle, bytes } => Operation::truncate(&file(handle), *bytes),
        Step::Sync { handle } => Operation::sync(&file(handle)),
        Step::Stat { name, follows: true } => Operation::stat(at(name)),
        Step::Stat { name, follows: false } => Operation::stat_link(at(name)),
        Step::Unlink { name } => Operation::unlink(at(name)),
        Step::Rename { from, to } => Operation::rename(at(from), at(to)),
        Step::Link { from, to } => Operation::link(at(from), at(to)),
        Step::Symlink { target, name: link } => Operation::symlink(name(*target), at(link)),
        Step::ReadLink { name } => Operation::read_link(at(name)),
        Step::MakeDirectory { name } => Operation::make_directory(at(name), 0o777),
        Step::RemoveDirectory { name } => Operation::remove_directory(at(name)),
        Step::Copy { from, to, from_offset, to_offset, bytes } => {
            Operation::copy(&file(from), *from_offset, &file(to), *to_offset, *bytes)
        }
        Step::Close { handle } => Operation::close(handles[*handle].take().expect("as on the other side")),
    }
}

fn told(step: &Step, handles: &mut Handles<File>, completion: Completion) -> Told {
    let reads = matches!(step, Step::Read { .. }).then(|| completion.bytes().to_vec());
    if let Some(error) = &completion.cut_short_by {
        let Error::File { source, .. } = &**error else { panic!("{error}") };
        return Told::Cut(completion.count(), source.raw_os_error().unwrap());
    }
    match completion.outcome {
        Err(Error::File { source, .. }) => Told::Errno(source.raw_os_error().unwrap()),
        Err(other) => panic!("{other}"),
        Ok(Output::Count(count)) => reads.map_or(Told::Count(count), Told::Bytes),
        Ok(Output::Stat(found)) => {
            Told::Is(found.kind, if found.kind == Kind::File { found.bytes } else { 0 }, found.links)
        }
        Ok(Output::Path(path)) => Told::Path(path),
        Ok(Output::File(file)) => {
            let Step::Open { handle, .. } = step else { panic!("a file of {step:?}") };
            handles[*handle] = Some(file);
            Told::Nothing
        }
        Ok(_) => Told::Nothing,
    }
}

/// All names below a directory, and what is there.
fn tree(root: &Path) -> std::collections::BTreeMap<PathBuf, Vec<u8>> {
    let mut found = std::collections::BTreeMap::new();
    let mut left = vec![root.to_owned()];
    while let Some(directory) = left.pop() {
        for entry in std::fs::read_dir(&directory).unwrap().map(Result::unwrap) {
            let path = entry.path();
            let what = match entry.file_type().unwrap() {
                kind if kind.is_symlink() => std::fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes(),
                kind if kind.is_dir() => {
                    left.push(path.clone());
                    b"directory".to_vec()
                }
                _ => std::fs::read(&path).unwrap(),
            };
            found.insert(path.strip_prefix(root).unwrap().to_owned(), what);
        }
    }
    found
}

#[test]
fn what_goes_on_after_a_look_is_begun_before_the_loop_sleeps() {
    everywhere("what goes on after a look is begun before the loop sleeps", |case| {
        let mut engine = case.engine();
        let (idle, _nobody) = pipe("idle");
        let (unready, mut writer) = pipe("non-blocking");
        // The ring says of this one at once that it would wait, and it goes on at the threads.
        rustix::fs::fcntl_setfl(&unready, rustix::fs::OFlags::NONBLOCK).unwrap();
        submit(&mut engine, 1, Operation::read(&idle, vec![0; 1]));
        submit(&mut engine, 2, Operation::read(&unready, vec![0; 1]));
        assert!(engine.arm().unwrap());
        writer.write_all(b"x").unwrap();
        poll_readable(&engine);
        assert_eq!(engine.try_completion().unwrap().expect("it says so").token, 2);
    });
}

#[test]
fn an_operation_that_the_kernel_refuses_at_once_keeps_back_no_other() {
    everywhere("an operation that the kernel refuses at once keeps back no other", |case| {
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
            // Begun by this alone: nothing else is asked of the engine until it is done.
            engine.start().unwrap();
            let deadline = deadline();
            while !made.exists() {
                assert!(Instant::now() < deadline, "what is behind it has not begun");
                std::thread::yield_now();
            }
            let mut ended: Vec<u64> = (0..3).map(|_| done(&mut engine).token).collect();
            ended.sort_unstable();
            assert_eq!(ended, [1, 3, 4]);
        }
    });
}

/// A file that takes seconds to close, and the other end of it.
fn slow_to_close() -> (File, std::net::TcpStream) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut slow = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    slow.set_nonblocking(true).unwrap();
    while slow.write(&[0; 1 << 16]).is_ok() {}
    slow.set_nonblocking(false).unwrap();
    // Until the peer has taken all that, or for as long as this says.
    rustix::net::sockopt::set_socket_linger(&slow, Some(2 * DEADLINE)).unwrap();
    (File::from_fd(slow.into(), "slow to close").unwrap(), peer)
}

/// Waits until it is being closed: it has no number any more then. A child that had a copy of it would close it slowly, too.
fn closing(slow: &File) -> impl FnOnce() + use<> {
    let number = PathBuf::from(format!("/proc/self/fd/{}", slow.as_fd().as_raw_fd()));
    let socket = std::fs::read_link(&number).unwrap();
    move || {
        while std::fs::read_link(&number).is_ok_and(|found| found == socket) {
            std::thread::yield_now();
        }
    }
}

#[test]
fn while_a_file_is_closed_slowly_nobody_waits_for_it() {
    everywhere("while a file is closed slowly nobody waits for it", |case| {
        let mut engine = case.engine();
        let (slow, peer) = slow_to_close();
        // The operation has the last handle: the loop does not close it, nor keeps others from opening, closing and forking.
        submit(&mut engine, 1, Operation::stat_file(&slow));
        let is_closing = closing(&slow);
        drop(slow);
        assert!(done(&mut engine).outcome.is_ok());
        is_closing();
        let (slow, second) = slow_to_close();
        let is_closing = closing(&slow);
        let closer = std::thread::spawn(move || drop(slow));
        is_closing();
        let file = open(&mut engine, &case.path("a"));
        ran(&mut engine, Operation::close(file)).unwrap();
        assert!(std::process::Command::new("true").status().unwrap().success());
        drop(Engine::new().unwrap());
        assert!(!closer.is_finished(), "it was to be closed slowly");
        // A reset ends both.
        for peer in [&peer, &second] {
            rustix::net::sockopt::set_socket_linger(peer, Some(Duration::ZERO)).unwrap();
        }
        drop((peer, second));
        closer.join().unwrap();
    });
}

#[test]
fn a_write_to_a_full_pipe_is_cancelled_and_what_went_is_counted() {
    everywhere("a write to a full pipe is cancelled, and what went is counted", |case| {
        let mut engine = case.engine();
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let writer = File::from_fd(writer, "full").unwrap();
        submit(&mut engine, 1, Operation::write(&writer, vec![7; 300 << 10]));
        engine.start().unwrap();
        // Something has gone, and there is no room for the rest.
        let deadline = deadline();
        let went = || rustix::io::ioctl_fionread(&reader).unwrap();
        while went() == 0 || poll(&mut [PollFd::new(&writer, PollFlags::OUT)], Some(&Timespec::default())).unwrap() > 0
        {
            assert!(Instant::now() < deadline, "the pipe does not fill");
            std::thread::yield_now();
        }
        assert!(engine.cancel(1).unwrap());
        let cut = done(&mut engine);
        assert_eq!((cut.count() as u64, cut.buffer.len()), (went(), 300 << 10));
        engine.close().unwrap();
    });
}

#[test]
fn two_readers_of_a_pipe_leave_each_other_to_be_cancelled() {
    everywhere("two readers of a pipe leave each other to be cancelled", |case| {
        let mut engine = case.engine();
        let (reader, mut writer) = pipe("shared");
        for token in [1, 2] {
            submit(&mut engine, token, Operation::read(&reader, vec![0; 300 << 10]));
        }
        engine.start().unwrap();
        writer.write_all(b"x").unwrap();
        let first = done(&mut engine);
        assert_eq!(first.bytes(), b"x");
        assert!(engine.cancel(3 - first.token).unwrap());
        assert_eq!(failure(&done(&mut engine)), "ECANCELED");
    });
}

#[test]
fn what_is_submitted_raises_no_sigpipe() {
    everywhere("what is submitted raises no SIGPIPE", |case| {
        // Its own thread, so that what is pending there is of this alone. Blocked, a signal is pending even if the process ignores it.
        let pending = || {
            let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("SigPnd:")).unwrap().trim();
            u64::from_str_radix(line, 16).unwrap() & (1 << 12) != 0
        };
        // SAFETY: the set is filled before it is used, and lives as long as the calls.
        unsafe {
            let mut pipe: libc::sigset_t = std::mem::zeroed();
            libc::sigaddset(&raw mut pipe, libc::SIGPIPE);
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const pipe, std::ptr::null_mut());
        }
        let mut engine = case.engine();
        for bytes in [10, 300 << 10] {
            let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
            drop(reader);
            let writer = File::from_fd(writer, "nobody reads it").unwrap();
            submit(&mut engine, 1, Operation::write(&writer, vec![0; bytes]));
            assert_eq!(failure(&done(&mut engine)), "EPIPE");
            assert!(!pending(), "a write of {bytes} bytes raised SIGPIPE");
        }
    });
}

/// Memory that is not Rust's, and how often each was released.
struct Lent {
    memory: Vec<std::cell::UnsafeCell<[u8; 4096]>>,
    released: std::sync::Arc<Vec<std::sync::atomic::AtomicUsize>>,
}

impl Lent {
    fn new(count: usize) -> Lent {
        let memory = (0..count).map(|_| std::cell::UnsafeCell::new([0; 4096])).collect();
        Lent { memory, released: std::sync::Arc::new((0..count).map(|_| Default::default()).collect()) }
    }

    fn buffer(&self, number: usize) -> Buffer {
        unsafe extern "C" fn release(context: *mut std::ffi::c_void) {
            // SAFETY: it is what was made of a box below, and comes once.
            let (released, number) = *unsafe {
                Box::from_raw(context.cast::<(std::sync::Arc<Vec<std::sync::atomic::AtomicUsize>>, usize)>())
            };
            released[number].fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
        let context = Box::into_raw(Box::new((self.released.clone(), number)));
        // SAFETY: the memory is looked at when it has been released, and by nobody else, and outlives that.
        unsafe { Buffer::foreign(self.memory[number].get().cast(), 4096, Some(release), context.cast()) }
    }

    /// What is there. Only of what nobody else has.
    fn bytes(&self, number: usize) -> &[u8] {
        // SAFETY: as the caller says.
        unsafe { &*self.memory[number].get() }
    }

    fn times(&self) -> Vec<usize> {
        self.released.iter().map(|times| times.load(std::sync::atomic::Ordering::Relaxed)).collect()
    }
}

#[test]
fn memory_of_somebody_elses_is_released_once_whatever_becomes_of_its_operation() {
    everywhere("memory of somebody else's is released once", |case| {
        let lent = Lent::new(10);
        let path = case.path("a");
        std::fs::write(&path, [7; 4096]).unwrap();
        let mut engine = case.options.clone().in_flight_max(8).open().unwrap();
        let file = open(&mut engine, &path);
        let (idle, mut writer) = pipe("idle");
        // Done, and the memory is there as long as the completion.
        let done_ = ran(&mut engine, Operation::read_at(&file, lent.buffer(0), 0)).unwrap();
        assert_eq!((done_.bytes().as_ptr(), lent.times()[0]), (lent.bytes(0).as_ptr(), 0));
        drop(done_);
        assert_eq!((lent.times()[0], lent.bytes(0)), (1, &[7; 4096][..]));
        // Failed, by whom it is given back or not.
        let refused = Operation::write_at(&open_to_read(&mut engine, &path), lent.buffer(1), 0);
        assert_eq!(errno(&ran(&mut engine, refused).unwrap_err()), "EBADF");
        assert_eq!(lent.times()[1], 1);
        // Made a vector.
        assert_eq!(
            ran(&mut engine, Operation::read_at(&file, lent.buffer(2), 0)).unwrap().buffer.into_vec(),
            [7; 4096]
        );
        assert_eq!(lent.times()[2], 1);
        // Several pieces, cancelled before and after they have begun, undone in a chain, not taken, given up, and left in flight.
        for (token, number) in [(1, 3), (2, 4), (3, 5)] {
            submit(&mut engine, token, Operation::read(&idle, lent.buffer(number)));
        }
        assert!(engine.cancel(1).unwrap());
        assert_eq!(failure(&done(&mut engine)), "ECANCELED");
        assert_eq!(lent.times()[3], 1);
        engine.start().unwrap();
        assert!(engine.cancel(2).unwrap());
        assert_eq!(failure(&done(&mut engine)), "ECANCELED");
        assert_eq!(lent.times()[4], 1);
        let chain = [(4, Operation::unlink(case.path("missing"))), (5, Operation::write_at(&file, lent.buffer(6), 0))];
        assert!(engine.try_submit_chain(chain).unwrap().is_submitted());
        (0..2).for_each(|_| drop(done(&mut engine)));
        assert_eq!(lent.times()[6], 1);
        let soon = Instant::now() + Duration::from_millis(5);
        assert!(engine.run_until(Operation::read(&idle, lent.buffer(7)), soon).unwrap().is_none());
        let pieces = vec![lent.buffer(8), lent.buffer(9)];
        submit(&mut engine, 6, Operation::read_vectored_at(&file, pieces, 0));
        engine.start().unwrap();
        drop(engine);
        let deadline = deadline();
        while lent.times() != [1; 10] {
            assert!(Instant::now() < deadline, "released {:?}, wanted each once", lent.times());
            std::thread::yield_now();
        }
        // Nothing is read into what was released.
        let _ = writer.write_all(&[9; 5000]);
        kernel_is_done();
        assert!([5, 7].iter().all(|number| lent.bytes(*number).iter().all(|byte| *byte == 0)));
    });
}

fn open_to_read(engine: &mut Engine, path: &Path) -> File {
    ran(engine, Operation::open(path, Open::for_reading())).unwrap().into_file().unwrap()
}

fn fifo(case: &Case, name: &str) -> PathBuf {
    let path = case.path(name);
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, rustix::fs::Mode::from_raw_mode(0o600), 0)
        .unwrap();
    path
}

/// Threads that wait for somebody else.
fn threads_alone() -> usize {
    let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm"));
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    tasks.filter_map(|task| name(task).ok()).filter(|name| name.starts_with("pelton-file-own")).count()
}

/// Until the threads are gone that waited for FIFOs which nobody opened.
fn nobody_waits_alone() {
    let deadline = deadline();
    while threads_alone() > 0 {
        assert!(Instant::now() < deadline, "a thread waits that has nothing to wait for");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn what_waits_for_ever_keeps_nothing_else_waiting() {
    let _hang = Watchdog::new("what waits for ever keeps nothing else waiting");
    for way in ["ring", "threads"] {
        for ends_by_cancel in [true, false] {
            let root = tempfile::tempdir_in("/var/tmp").unwrap();
            let case = Case { way, options: options(way).threads(2), root };
            let mut engine = case.engine();
            let fifos: Vec<PathBuf> = (0..32).map(|number| fifo(&case, &format!("fifo {number}"))).collect();
            for (token, path) in (0..).zip(&fifos) {
                let how = if token % 2 == 0 { Open::for_reading() } else { Open::for_writing().create(0o600) };
                submit(&mut engine, token, Operation::open(path, how));
            }
            // Also one that says of itself that it would wait, which the ring does not wait for.
            let pipes: Vec<_> = (0..32).map(|number| pipe(&format!("pipe {number}"))).collect();
            for (token, (read, _write)) in (32..).zip(&pipes) {
                if token % 2 == 0 {
                    rustix::fs::fcntl_setfl(read, rustix::fs::OFlags::NONBLOCK).unwrap();
                }
                submit(&mut engine, token, Operation::read(read, vec![0; 10]));
            }
            engine.start().unwrap();
            // All of them wait; others go on.
            let file = open(&mut engine, &case.path("a"));
            for round in 0..20u64 {
                submit(&mut engine, 100, Operation::write_at(&file, vec![1; 300_000], round * 300_000));
                submit(&mut engine, 101, Operation::stat(case.path("a")));
                submit(&mut engine, 102, Operation::set_times(case.path("a"), None, Some(SystemTime::now())));
                for _ in 0..3 {
                    let ended = done(&mut engine);
                    assert!(ended.token >= 100 && ended.outcome.is_ok(), "{ended:?}");
                }
            }
            assert_eq!(engine.in_flight(), 64);
            // What they wait for comes, to some of each.
            let partner = |token: u64| {
                if token < 32 {
                    // It has a thread of its own, so that no opening waits here for ever if that one has not begun.
                    let path = fifos[token as usize].clone();
                    std::thread::spawn(move || {
                        std::fs::OpenOptions::new()
                            .read(token % 2 == 1)
                            .write(token.is_multiple_of(2))
                            .open(path)
                            .unwrap()
                    });
                } else {
                    (&pipes[token as usize - 32].1).write_all(b"bytes").unwrap();
                }
            };
            for token in [0, 1, 40, 41] {
                partner(token);
                let ended = done(&mut engine);
                assert_eq!(ended.token, token, "{ended:?}");
                assert!(ended.outcome.is_ok());
                assert!(token < 32 || ended.bytes() == b"bytes");
            }
            if ends_by_cancel {
                (0..64).for_each(|token| assert_eq!(engine.cancel(token).unwrap(), ![0, 1, 40, 41].contains(&token)));
                for _ in 0..60 {
                    assert_eq!(failure(&done(&mut engine)), "ECANCELED");
                }
                engine.close().unwrap();
            } else {
                assert!(!engine.close_until(Instant::now() + Duration::from_millis(5)).unwrap());
            }
            // Who waits for a FIFO does so until somebody opens it: that is not undone.
            for path in &fifos {
                drop(std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap());
            }
            nobody_waits_alone();
        }
    }
}

#[test]
fn what_run_until_gives_up_is_within_the_bound() {
    everywhere("what run_until gives up is within the bound", |case| {
        let mut engine = case.options.clone().in_flight_max(2).threads(64).open().unwrap();
        let soon = || Instant::now() + Duration::from_millis(10);
        // What a thread is at that closes a file is not to be stopped; what none has begun is. Of the former two have the places that there are, and one more is
        // waited for.
        let mut peers = Vec::new();
        while engine.run_until(Operation::stat(case.root.path()), soon()).unwrap().is_some() {
            let (slow, peer) = slow_to_close();
            assert!(engine.run_until(Operation::close(slow), soon()).unwrap().is_none());
            peers.push(peer);
            if peers.len() > 60 {
                break;
            }
        }
        let is_bounded = peers.len() <= 60;
        let made = engine.run_until(Operation::make_directory(case.path("made"), 0o700), soon()).unwrap().is_some();
        let is_taken = engine.try_submit(1, Operation::stat(case.root.path())).unwrap().is_submitted();
        // A reset ends them, and there is room again.
        for peer in peers {
            rustix::net::sockopt::set_socket_linger(&peer, Some(Duration::ZERO)).unwrap();
        }
        assert_eq!((is_bounded, made, is_taken), (true, false, false));
        assert!(engine.run_until(Operation::make_directory(case.path("made"), 0o700), deadline()).unwrap().is_some());
        let (idle, mut writer) = pipe("idle");
        for token in [1, 2] {
            while !engine.try_submit(token, Operation::read(&idle, vec![0; 1])).unwrap().is_submitted() {
                assert!(engine.try_completion().unwrap().is_none());
            }
        }
        assert!(engine.run_until(Operation::stat(case.root.path()), deadline()).unwrap().is_some());
        writer.write_all(b"ab").unwrap();
        (0..2).for_each(|_| assert_eq!(done(&mut engine).count(), 1));
        engine.close().unwrap();
    });
}

#[test]
fn a_name_with_a_slash_behind_it_is_a_directorys_also_below_a_root() {
    everywhere("a name with a slash behind it is a directory's", |case| {
        let inside = case.path("inside");
        let mut rooted = {
            std::fs::create_dir_all(inside.join("dir")).unwrap();
            std::fs::write(inside.join("file"), b"").unwrap();
            std::os::unix::fs::symlink("..", inside.join("out")).unwrap();
            std::os::unix::fs::symlink("dir", inside.join("in")).unwrap();
            case.options.clone().root(&inside).open().unwrap()
        };
        let mut plain = case.engine();
        let at = |name: &str, is_rooted: bool| if is_rooted { PathBuf::from(name) } else { inside.join(name) };
        for name in ["file/", "file//", "dir/", "in/", "missing/"] {
            let operations: [fn(PathBuf, PathBuf) -> Operation; 8] = [
                |name, _| Operation::unlink(name),
                |name, other| Operation::rename(name, other),
                |name, other| Operation::link(name, other),
                |name, other| Operation::link(other.with_file_name("file"), name),
                |name, _| Operation::symlink("x", name),
                |name, _| Operation::read_link(name),
                |name, _| Operation::stat_link(name),
                |name, _| Operation::open(name, Open::for_reading()),
            ];
            for (number, make) in operations.iter().enumerate() {
                let mut told = [true, false].map(|is_rooted| {
                    let engine = if is_rooted { &mut rooted } else { &mut plain };
                    let told = ran(engine, make(at(name, is_rooted), at("other", is_rooted)));
                    // As it was before.
                    if inside.join("other").exists() {
                        std::fs::rename(inside.join("other"), inside.join(name.trim_end_matches('/'))).unwrap();
                    }
                    told.map(drop).map_err(|error| errno(&error))
                });
                // Which of two that are true is said may differ.
                if told[0] == Err("EEXIST") && told[1] == Err("ENOENT") {
                    told[0] = told[1];
                }
                assert_eq!(told[0], told[1], "operation {number} of {name}: below a root, and without");
            }
        }
        // What leads out says nothing of what is there.
        for operation in [Operation::read_link("out/"), Operation::link("out/", "x")] {
            assert_eq!(errno(&ran(&mut rooted, operation).unwrap_err()), "EXDEV");
        }
        assert!(inside.join("file").exists() && inside.join("dir").exists());
    });
}

#[test]
fn no_more_is_answered_in_a_turn_than_keeps_a_loop_for_a_moment() {
    everywhere("no more is answered in a turn than keeps a loop for a moment", |case| {
        const EACH: usize = 16;
        let path = case.path("a");
        std::fs::write(&path, vec![7; 4096 * EACH]).unwrap();
        let mut engine = case.engine();
        let file = open_to_read(&mut engine, &path);
        if !answers_without_waiting(&path) && case.root.path().starts_with("/var/tmp") {
            eprintln!("this file system cannot be asked not to wait: nothing is answered at once");
            return;
        }
        let lent = Lent::new(40 * EACH);
        let submit_all = |engine: &mut Engine, first: usize| {
            for token in first..first + 20 {
                let pieces = (0..EACH).map(|piece| lent.buffer(token * EACH + piece)).collect();
                submit(engine, token as u64, Operation::read_vectored_at(&file, pieces, 0));
            }
            (first..first + 20).filter(|token| lent.bytes(token * EACH).iter().all(|byte| *byte == 7)).count()
        };
        // 64 KiB each, of 1 MiB: nothing was begun otherwise, so the rest of the memory is as it was.
        assert_eq!(submit_all(&mut engine, 0), 16);
        // The next turn begins when the loop goes back, or somebody waits.
        while engine.in_flight() > 0 {
            assert_eq!(done(&mut engine).count(), 4096 * EACH);
        }
        assert_eq!(submit_all(&mut engine, 20), 16);
        let chain = [(50, Operation::read_at(&file, vec![0; 100_000], 0)), (51, Operation::stat_file(&file))];
        assert!(engine.try_submit_chain(chain).unwrap().is_submitted());
        let mut seen = std::collections::BTreeSet::new();
        while engine.in_flight() > 0 {
            if engine.arm().unwrap() {
                poll_readable(&engine);
            }
            while let Some(ended) = engine.try_completion().unwrap() {
                assert!(ended.outcome.is_ok() && seen.insert(ended.token));
            }
        }
        assert_eq!(seen.len(), 22);
        assert_eq!(lent.times(), vec![1; 40 * EACH]);
    });
}

#[test]
fn where_a_filter_refuses_io_uring_later_everything_goes_on() {
    let _hang = Watchdog::new("where a filter refuses io_uring later everything goes on");
    if !Engine::new().unwrap().uses_io_uring() {
        eprintln!("no io_uring here: it cannot be refused later");
        return;
    }
    for is_armed in [false, true] {
        // A filter is a thread's, and of those that it makes.
        std::thread::spawn(move || {
            let root = tempfile::tempdir_in("/var/tmp").unwrap();
            let mut engine = Engine::new().unwrap();
            let file = open(&mut engine, &root.path().join("a"));
            let (idle, mut writer) = pipe("idle");
            submit(&mut engine, 1000, Operation::read(&idle, vec![0; 5]));
            engine.start().unwrap();
            // Begun before; not begun; given up; submitted after.
            submit(&mut engine, 1001, Operation::read(&idle, vec![0; 5]));
            for n in 0..300u64 {
                submit(&mut engine, n, Operation::write_at(&file, vec![n as u8; 100], n * 100));
            }
            refuse(libc::SYS_io_uring_enter);
            if is_armed {
                engine.arm().unwrap();
            }
            assert!(engine.cancel(1001).unwrap());
            for n in 300..600u64 {
                submit(&mut engine, n, Operation::write_at(&file, vec![n as u8; 100], n * 100));
            }
            let mut seen = std::collections::BTreeSet::new();
            while seen.len() < 601 {
                if is_armed && engine.arm().unwrap() {
                    poll_readable(&engine);
                }
                let ended = done(&mut engine);
                assert!(seen.insert(ended.token));
                match ended.token {
                    1001 => assert_eq!(failure(&ended), "ECANCELED"),
                    _ => assert_eq!(ended.count(), 100),
                }
            }
            assert!(!engine.uses_io_uring());
            // What the kernel had begun ends.
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
fn what_the_kernel_has_is_released_once_it_has_ended_also_where_io_uring_is_refused_by_then() {
    let _hang = Watchdog::new("what the kernel has is released once it has ended");
    if !Engine::new().unwrap().uses_io_uring() {
        eprintln!("no io_uring here: it cannot be refused later");
        return;
    }
    std::thread::spawn(|| {
        let lent = Lent::new(2);
        let mut engine = Engine::new().unwrap();
        let (idle, mut writer) = pipe("idle");
        submit(&mut engine, 1, Operation::read(&idle, lent.buffer(0)));
        engine.start().unwrap();
        submit(&mut engine, 2, Operation::read(&idle, lent.buffer(1)));
        refuse(libc::SYS_io_uring_enter);
        drop(engine);
        // The kernel may write to the one that it has.
        assert_eq!(lent.times(), [0, 1]);
        // Nor is it forgotten by whoever looks for its end before that comes.
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(lent.times(), [0, 1]);
        writer.write_all(b"bytes").unwrap();
        let deadline = deadline();
        while lent.times() != [1, 1] {
            assert!(Instant::now() < deadline, "it is never released");
            std::thread::yield_now();
        }
        assert_eq!(&lent.bytes(0)[..5], b"bytes");
    })
    .join()
    .unwrap();
}

#[test]
fn no_more_threads_are_left_at_fifos_than_a_bound() {
    let _hang = Watchdog::new("no more threads are left at FIFOs than a bound");
    for way in ["ring", "threads"] {
        let place = tempfile::tempdir_in("/var/tmp").unwrap();
        Child::start(Role::new("left").with("path", place.path().display()).with("way", way)).expect("left");
    }
}

fn left(path: &Path, way: &str) {
    let way = if way == "ring" { "ring" } else { "threads" };
    let case = Case { way, options: options(way), root: tempfile::tempdir_in(path).unwrap() };
    let mut engine = case.engine();
    let path = fifo(&case, "fifo");
    // Opens one, and gives it up soon.
    let mut begin = || {
        let soon = Instant::now() + Duration::from_millis(2);
        engine.run_until(Operation::open(&path, Open::for_reading()), soon)
    };
    let refused = loop {
        match begin() {
            Ok(given_up) => assert!(given_up.is_none()),
            Err(error) => break error,
        }
    };
    assert_eq!(errno(&refused), "EMFILE");
    assert!(threads_alone() <= 256);
    // When they have gone it goes on. One may not have begun to wait when another is woken.
    let until_they_are_gone = || {
        while threads_alone() > 0 {
            drop(std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap());
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    until_they_are_gone();
    assert!(begin().is_ok());
    drop(engine);
    until_they_are_gone();
    say("left");
}

#[test]
fn a_loop_hears_of_what_ends_while_somebody_waits_for_something_else() {
    everywhere("a loop hears of what ends while somebody waits for something else", |case| {
        let mut engine = case.engine();
        let (idle, _writer) = pipe("idle");
        for round in 0..200u64 {
            assert!(engine.arm().unwrap());
            for token in 0..6 {
                submit(&mut engine, token, Operation::read_link(case.root.path()));
            }
            // Answered, or given up.
            let wanted = if round % 8 == 0 {
                engine.run_until(Operation::read(&idle, vec![0; 1]), Instant::now()).unwrap().is_none()
            } else {
                matches!(engine.run_until(Operation::read_link(case.root.path()), deadline()), Err(Error::File { .. }))
            };
            assert!(wanted);
            for _ in 0..6 {
                poll_readable(&engine);
                while engine.try_completion().unwrap().is_none() {
                    // It may be readable for what was taken already; not silent for what was not.
                    if engine.arm().unwrap() {
                        poll_readable(&engine);
                    }
                }
            }
        }
    });
}

#[test]
fn a_file_goes_into_a_channel_and_out_of_one() {
    use std::sync::{Arc, Mutex};
    everywhere("a file goes into a channel and out of one", |case| {
        const BYTES: usize = 5_000_001;
        let wanted = pattern(5, BYTES);
        std::fs::write(case.path("from"), &wanted).unwrap();
        let mut engine = case.engine();
        let from = open_to_read(&mut engine, &case.path("from"));
        let to = open(&mut engine, &case.path("to"));
        let (sender, receiver) = pelton::Options::new().capacity(1 << 20).threads().unwrap();
        let (sender, receiver) = (Arc::new(Mutex::new(sender)), Arc::new(Mutex::new(receiver)));
        // Both ends at a time, each waits for the other.
        submit(&mut engine, 1, Operation::receive(&to, 7, BYTES as u64 - 1, &receiver));
        submit(&mut engine, 2, Operation::send(&from, 1, u64::MAX, &sender, 100_000));
        for _ in 0..2 {
            let ended = done(&mut engine);
            assert_eq!((ended.count(), ended.cut_short_by.is_none()), (BYTES - 1, true), "{ended:?}");
        }
        let found = std::fs::read(case.path("to")).unwrap();
        assert!(found[..7] == [0; 7] && found[7..] == wanted[1..]);

        // The channel goes on. What is too large for what is wanted stays in it; so does what cannot be written.
        let send = |bytes: &[u8]| sender.try_lock().unwrap().send(bytes).unwrap();
        ["one", "two", "three"].iter().for_each(|text| send(text.as_bytes()));
        let some = ran(&mut engine, Operation::receive(&to, 0, 10, &receiver)).unwrap();
        assert_eq!((some.count(), some.cut_short_by.is_none()), (6, true));
        assert_eq!(errno(&ran(&mut engine, Operation::receive(&from, 0, 10, &receiver)).unwrap_err()), "EBADF");
        assert_eq!(&*receiver.try_lock().unwrap().receive().unwrap(), b"three");
        assert_eq!(&std::fs::read(case.path("to")).unwrap()[..6], b"onetwo");
        // Nor is anything sent of what cannot be read.
        let to_write =
            ran(&mut engine, Operation::open(case.path("to"), Open::for_writing())).unwrap().into_file().unwrap();
        assert_eq!(errno(&ran(&mut engine, Operation::send(&to_write, 0, 9, &sender, 4)).unwrap_err()), "EBADF");
        assert!(receiver.try_lock().unwrap().try_receive().unwrap().is_none());

        // Messages of nothing would never be all.
        assert_eq!(errno(&ran(&mut engine, Operation::send(&from, 0, 9, &sender, 0)).unwrap_err()), "EINVAL");

        // Cancelled while it waits, after some bytes and before any; and while somebody else has it.
        submit(&mut engine, 3, Operation::send(&from, 0, u64::MAX, &sender, 100_000));
        engine.start().unwrap();
        let deadline_ = deadline();
        while sender.try_lock().is_ok() {
            assert!(Instant::now() < deadline_, "it never began");
            std::thread::yield_now();
        }
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
        let mut received = Vec::new();
        while let Some(message) = receiver.try_lock().unwrap().try_receive().unwrap() {
            received.extend_from_slice(&message);
        }
        assert!(received == wanted[..count]);
        submit(&mut engine, 4, Operation::receive(&to, 0, 10, &receiver));
        engine.start().unwrap();
        assert!(engine.cancel(4).unwrap());
        assert_eq!(failure(&done(&mut engine)), "ECANCELED");

        // The end of a channel: of the sender's all is written, of the receiver's it is told.
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
        // It may be told after some messages that nobody will read.
        let told = match ran(&mut engine, Operation::send(&from, 0, 1000, &sender, 4)) {
            Ok(sent) => *sent.cut_short_by.expect("nobody reads it"),
            Err(error) => error,
        };
        assert!(told.is_closed(), "{told}");
        // An engine that is dropped lets go of the channel.
        let (sender, receiver) = pelton::Options::new().threads().unwrap();
        let receiver = Arc::new(Mutex::new(receiver));
        submit(&mut engine, 6, Operation::receive(&to, 0, 10, &receiver));
        engine.start().unwrap();
        drop(engine);
        while Arc::strong_count(&receiver) > 1 {
            assert!(Instant::now() < deadline_, "a thread keeps the receiver");
            std::thread::yield_now();
        }
        drop(sender);
    });
}

#[test]
fn any_sequence_of_operations_does_what_std_fs_does() {
    everywhere("any sequence of operations does what std::fs does", |case| sequences(case, 24, &|| 0));
}

#[test]
fn any_sequence_does_what_std_fs_does_also_at_a_limit_of_file_sizes() {
    let _hang = Watchdog::new("any sequence does what std::fs does, also at a limit of file sizes");
    for way in ["ring", "threads", "run"] {
        for place in ["/var/tmp", "/dev/shm"] {
            let place = tempfile::Builder::new().prefix("pelton-file").tempdir_in(place).unwrap();
            let role = Role::new("limited sequences").with("path", place.path().display()).with("way", way);
            Child::start(role).expect("limited");
        }
    }
}

/// The signals of a passed limit that came.
static PASSED: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

fn limited_sequences(path: &Path, way: &str) {
    extern "C" fn passed(_: libc::c_int) {
        PASSED.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }
    let handler = passed as extern "C" fn(libc::c_int);
    // SAFETY: the handler only counts; the structure lives as long as the call.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as usize;
        libc::sigaction(libc::SIGXFSZ, &raw const action, std::ptr::null_mut());
    }
    let limit = rustix::process::Rlimit { current: Some(60_000), maximum: Some(60_000) };
    rustix::process::setrlimit(rustix::process::Resource::Fsize, limit).unwrap();
    RUNS.set(way == "run");
    let way = if way == "threads" { "threads" } else { "ring" };
    let case = Case { way, options: options(way), root: tempfile::tempdir_in(path).unwrap() };
    // `std::fs` raises it, the engine never does.
    sequences(&case, 12, &|| PASSED.load(std::sync::atomic::Ordering::Relaxed));
    assert!(PASSED.load(std::sync::atomic::Ordering::Relaxed) > 0, "no sequence has come to the limit");
    say("limited");
}

/// Random sequences, as many as `PROPTEST_CASES` says. During an operation the count of `signals` stays as it is.
fn sequences(case: &Case, cases: u32, signals: &dyn Fn() -> usize) {
    let cases = std::env::var("PROPTEST_CASES").map_or(cases, |text| text.parse().unwrap());
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(steps in prop::collection::vec((any_step(), 0..3u8), 1..60))| {
        let wanted_root = tempfile::tempdir_in(case.root.path()).unwrap();
        let found_root = tempfile::tempdir_in(case.root.path()).unwrap();
        let mut engine = case.engine();
        let (mut theirs, mut ours) = (Handles::default(), Handles::default());
        for (number, (step, way)) in steps.iter().enumerate() {
            let Some(wanted) = by_std(wanted_root.path(), &mut theirs, step, number as u64) else { continue };
            let operation = operation(found_root.path(), &mut ours, step, number as u64);
            let signals_before = signals();
            // Run; submitted and polled for; submitted and waited for; or in a chain with one before it.
            let completion = match way {
                1 if RUNS.get() => {
                    let found = match engine.run(operation) {
                        Ok(completion) => told(step, &mut ours, completion),
                        Err(Error::File { source, .. }) => Told::Errno(source.raw_os_error().unwrap()),
                        Err(other) => panic!("{other}"),
                    };
                    prop_assert_eq!(signals(), signals_before, "step {} {:?} raised a signal", number, step);
                    prop_assert!(found == wanted, "step {} {:?}: found {:.200}, wanted {:.200}", number, step, format!("{found:?}"), format!("{wanted:?}"));
                    continue;
                }
                0 => {
                    submit(&mut engine, number as u64, operation);
                    if engine.arm().unwrap() {
                        poll_readable(&engine);
                    }
                    engine.disarm();
                    done(&mut engine)
                }
                1 => {
                    submit(&mut engine, number as u64, operation);
                    done(&mut engine)
                }
                _ => {
                    let chain = [(u64::MAX, Operation::stat("/")), (number as u64, operation)];
                    prop_assert!(engine.try_submit_chain(chain).unwrap().is_submitted());
                    assert_eq!(done(&mut engine).token, u64::MAX);
                    done(&mut engine)
                }
            };
            prop_assert_eq!(completion.token, number as u64);
            prop_assert_eq!(signals(), signals_before, "step {} {:?} raised a signal", number, step);
            let found = told(step, &mut ours, completion);
            prop_assert!(found == wanted, "step {} {:?}: found {:.200}, wanted {:.200}", number, step, format!("{found:?}"), format!("{wanted:?}"));
        }
        prop_assert!(tree(found_root.path()) == tree(wanted_root.path()));
    });
}
