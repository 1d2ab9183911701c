//! Large numbers, and resource limits: descriptors, memory, file sizes, disks. `PELTON_ROUNDS` prolongs the tests
//! that count descriptors and memory (10000: of a million operations).

use super::*;

#[test]
fn dropped_engines_files_and_operations_leave_nothing() {
    // In a separate process, where no other test opens anything.
    let _hang = Watchdog::new("dropped engines leave nothing");
    for way in ["ring", "threads"] {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let child = Child::start(Role::new(child, "many").with("path", dir.path().display()).with("way", way));
        child.expect("nothing left");
    }
}

pub(super) fn many(path: &Path, way: &str) {
    let rounds: u64 = std::env::var("PELTON_ROUNDS").map_or(300, |text| text.parse().unwrap());
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let raised = rustix::process::Rlimit { current: limit.maximum, ..limit };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).unwrap();
    let round = |n: u64| {
        let mut engine = options(way).build().unwrap();
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
            engine.arm().unwrap().is_waiting();
            done(&mut engine);
        }
    };
    let found = || (kernel::descriptors(), kernel::threads());
    // Threads end asynchronously.
    let settle = |wanted| eventually_is(wanted, "descriptors and threads", found);
    let before = found();
    (0..rounds).for_each(round);
    settle(before);
    constant_resources(path, way, 100 * rounds);
    settle(before);

    // As many open files as the system allows, up to 10,000.
    let wanted = 10_000.min(limit.maximum.unwrap_or(10_000).saturating_sub(100)) as usize;
    let mut engine = options(way).build().unwrap();
    let mut files = Vec::new();
    for n in 0..wanted {
        let to = path.join(format!("f{}", n % 100));
        let open = Operation::open(to, Open::for_both().create(0o600));
        if !engine.try_submit(n as u64, open).unwrap().is_submitted() {
            panic!("the disk had free space");
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
    // One more than the limit is an error by name.
    let few = rustix::process::Rlimit { current: Some(kernel::descriptors() as u64), ..limit };
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
    report("nothing left");
}

/// Operations of every kind, one engine: descriptors and memory stay constant after the first round.
fn constant_resources(path: &Path, way: &str, operations: u64) {
    let mut engine = options(way).build().unwrap();
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
                    // The cancelled one may have consumed another's data.
                    write.write_all(b"x").unwrap();
                }
                drop(done(&mut engine));
            }
        }
        while engine.cancel(u64::MAX).unwrap() || !settled(&mut engine) {}
    };
    // Abandoned operations end asynchronously: their thread exits, and the others have nothing more to close.
    let is_idle = |thread| kernel::system_call_of(thread) == Some(libc::SYS_futex);
    let at_rest =
        || kernel::threads_named(ALONE).is_empty() && kernel::threads_named("pelton-file").into_iter().all(is_idle);
    let costs = || {
        eventually("all threads have nothing more to do", at_rest);
        (kernel::descriptors(), LIVE.load(std::sync::atomic::Ordering::Relaxed))
    };
    do_some(2000);
    let first = costs();
    do_some(operations);
    let last = costs();
    const SLACK: i64 = 64 << 10;
    assert!(
        last.0 <= first.0 && last.1 <= first.1 + SLACK,
        "descriptors and bytes: {first:?} after 2,000 operations, {last:?} after {operations} more"
    );
}

/// Bytes that are allocated.
static LIVE: std::sync::atomic::AtomicI64 = std::sync::atomic::AtomicI64::new(0);

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: the system's allocator has the same contract.
unsafe impl std::alloc::GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: std::alloc::Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size() as i64, std::sync::atomic::Ordering::Relaxed);
        // SAFETY: the caller guarantees the contract of `GlobalAlloc`.
        unsafe { std::alloc::System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: std::alloc::Layout) {
        LIVE.fetch_sub(layout.size() as i64, std::sync::atomic::Ordering::Relaxed);
        // SAFETY: the caller guarantees the contract of `GlobalAlloc`.
        unsafe { std::alloc::System.dealloc(memory, layout) }
    }
}

#[test]
fn a_file_size_limit_is_an_error_and_no_signal() {
    let _hang = Watchdog::new("a limit of file sizes is an error");
    for (way, dir) in [("ring", "/var/tmp"), ("threads", "/var/tmp"), ("ring", "/dev/shm"), ("threads", "/dev/shm")] {
        let dir = tempfile::tempdir_in(dir).unwrap();
        let child = Child::start(Role::new(child, "limited").with("path", dir.path().display()).with("way", way));
        child.expect("limited");
    }
}

pub(super) fn limited(path: &Path, way: &str) {
    let file = open(&mut options(way).build().unwrap(), &path.join("a"));
    // For the system its buffers are part of a file, too.
    let appenders = pelton::Appenders::new(&pelton::Options::new(), Tail::new(file.clone()).unwrap()).unwrap();
    appenders.append(b"x").and_then(|()| appenders.sync()).unwrap();
    let limit = rustix::process::Rlimit { current: Some(10_000), maximum: Some(10_000) };
    rustix::process::setrlimit(rustix::process::Resource::Fsize, limit).unwrap();
    let mut engine = options(way).build().unwrap();
    let cut = ran(&mut engine, Operation::write_at(&file, vec![1; 4096], 8000)).unwrap();
    assert_eq!((cut.count(), errno(cut.cut_short_by.as_ref().unwrap())), (2000, "EFBIG"));
    assert_eq!(errno(&ran(&mut engine, Operation::write_at(&file, vec![1; 4096], 10_000)).unwrap_err()), "EFBIG");
    assert_eq!(errno(&ran(&mut engine, Operation::append(&file, vec![1; 1])).unwrap_err()), "EFBIG");
    assert_eq!(errno(&ran(&mut engine, Operation::truncate(&file, 10_001)).unwrap_err()), "EFBIG");
    assert_eq!(errno(&ran(&mut engine, Operation::allocate(&file, 0, 10_001)).unwrap_err()), "EFBIG");
    let end = ran(&mut engine, Operation::read_at(&file, vec![0; 4096], 9000)).unwrap();
    assert_eq!((end.count(), end.cut_short_by.is_none()), (1000, true));
    // A truncated copy ends its chain: the later removal is not done.
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
    report("limited");
}

#[test]
fn a_full_disk_is_an_error_that_counts_the_bytes_written() {
    if !is_root() {
        eprintln!("not root: a full disk is not tried");
        return;
    }
    let _hang = Watchdog::new("a full disk is an error");
    for way in ["ring", "threads"] {
        let dir = tempfile::tempdir_in("/tmp").unwrap();
        let mut child =
            Child::start_as(Role::new(child, "full").with("path", dir.path().display()).with("way", way), |_| {});
        match child.line().as_str() {
            "full" => {}
            "no mount" => eprintln!("a file system cannot be mounted here: a full disk is not tried"),
            other => panic!("{other}"),
        }
        child.write_line("end");
    }
}

pub(super) fn full(path: &Path, way: &str) {
    // SAFETY: the only pointers are to strings that live as long as the calls.
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
        return report("no mount");
    }
    let mut engine = options(way).build().unwrap();
    let file = open(&mut engine, &path.join("a"));
    let cut = ran(&mut engine, Operation::write_at(&file, vec![1; 4 << 20], 0)).unwrap();
    assert_eq!((cut.count(), errno(cut.cut_short_by.as_ref().unwrap())), (1 << 20, "ENOSPC"));
    assert_eq!(errno(&ran(&mut engine, Operation::write_at(&file, vec![1; 10], 1 << 20)).unwrap_err()), "ENOSPC");
    assert_eq!(errno(&ran(&mut engine, Operation::allocate(&file, 0, 2 << 20)).unwrap_err()), "ENOSPC");
    let pieces = vec![vec![2; 10].into(), vec![2; 5 << 20].into()];
    assert_eq!(errno(&ran(&mut engine, Operation::write_vectored_at(&file, pieces, 1 << 20)).unwrap_err()), "ENOSPC");
    // A chain ends at a truncated write.
    ran(&mut engine, Operation::truncate(&file, 1 << 19)).unwrap();
    let chain =
        [(1, Operation::append(&file, vec![3; 1 << 20])), (2, Operation::rename(path.join("a"), path.join("b")))];
    assert!(engine.try_submit_chain(chain).unwrap().is_submitted());
    assert_eq!(done(&mut engine).count(), 1 << 19);
    assert_eq!(failure(&done(&mut engine)), "ECANCELED");
    assert!(path.join("a").exists());
    report("full");
    read_line_from_parent();
}
