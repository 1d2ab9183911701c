//! Operations that wait for another party: pipes, FIFOs, files with a slow close; cancelling.

use super::*;

#[test]
fn a_cancelled_operation_completes_and_returns_its_memory() {
    everywhere("a cancelled operation completes", |case| {
        let mut engine = case.engine();
        let (read, mut write) = pipe("a pipe");
        // Not started; started; and beside it one that is not cancelled.
        submit(&mut engine, 1, Operation::read(&read, vec![1; 10]));
        assert!(engine.cancel(1).unwrap());
        let ended = done(&mut engine);
        assert_eq!((ended.token, failure(&ended), &*ended.buffer), (1, "ECANCELED", &[1; 10][..]));
        submit(&mut engine, 2, Operation::read(&read, vec![2; 10]));
        submit(&mut engine, 3, Operation::read(&read, vec![3; 10]));
        assert!(engine.arm().unwrap().is_waiting());
        assert!(engine.cancel(2).unwrap());
        readable(&engine);
        let ended = done(&mut engine);
        assert_eq!((ended.token, failure(&ended), &*ended.buffer), (2, "ECANCELED", &[2; 10][..]));
        write.write_all(b"three").unwrap();
        let ended = done(&mut engine);
        assert_eq!((ended.token, ended.bytes()), (3, &b"three"[..]));
        assert!(!engine.cancel(3).unwrap());
        // A `run` that ends at its deadline consumes nothing that arrives later.
        let soon = Instant::now() + Duration::from_millis(5);
        assert!(engine.run_until(Operation::read(&read, vec![0; 10]), soon).unwrap().is_none());
        while engine.cancel(9).unwrap() || !settled(&mut engine) {}
        write.write_all(b"later").unwrap();
        assert_eq!(ran(&mut engine, Operation::read(&read, vec![0; 10])).unwrap().bytes(), b"later");
    });
}

#[test]
fn a_busy_poll_begins_operations_and_finds_their_completions() {
    everywhere("a busy poll begins operations", |case| {
        let mut engine = case.engine();
        let (read, mut write) = pipe("a pipe");
        assert!(!engine.busy_poll().unwrap(), "nothing is in flight");
        submit(&mut engine, 1, Operation::read(&read, vec![1; 10]));
        assert!(!engine.busy_poll().unwrap());
        write.write_all(b"one").unwrap();
        let deadline = deadline();
        while !engine.busy_poll().unwrap() {
            assert!(Instant::now() < deadline, "no completion comes");
        }
        let ended = engine.try_completion().unwrap().expect("the busy poll has found it");
        assert_eq!((ended.token, ended.bytes()), (1, &b"one"[..]));
    });
}

#[test]
fn an_operation_cancelled_behind_busy_threads_completes_at_once() {
    everywhere("an operation cancelled behind busy threads completes at once", |case| {
        let mut engine = case.options.clone().threads(1).build().unwrap();
        let (slow, peer) = slow_to_close();
        let is_closing = closing(&slow);
        submit(&mut engine, 1, Operation::close(slow));
        engine.start().unwrap();
        is_closing();
        // The only thread is busy with that; this operation waits for it, alone and as the first of a chain.
        let foreign_memory = ForeignBuffers::new(1);
        let (_reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let writer = File::from_fd(writer, "a pipe").unwrap();
        submit(&mut engine, 2, Operation::write(&writer, foreign_memory.buffer(0)));
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
        assert_eq!(foreign_memory.times(), [1]);
        assert!(engine.try_completion().unwrap().is_none());
        // Nor do operations behind it, abandoned by a drop, wait for the thread.
        let foreign_memory = ForeignBuffers::new(1);
        submit(&mut engine, 4, Operation::write(&writer, foreign_memory.buffer(0)));
        engine.start().unwrap();
        drop(engine);
        assert_eq!(foreign_memory.times(), [1]);
        // A reset ends it.
        rustix::net::sockopt::set_socket_linger(&peer, Some(Duration::ZERO)).unwrap();
    });
}

/// A file that takes seconds to close, and its other end.
fn slow_to_close() -> (File, std::net::TcpStream) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut slow = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    slow.set_nonblocking(true).unwrap();
    while slow.write(&[0; 1 << 16]).is_ok() {}
    slow.set_nonblocking(false).unwrap();
    // Until the peer has taken everything, or for at most this time.
    rustix::net::sockopt::set_socket_linger(&slow, Some(2 * DEADLINE)).unwrap();
    (File::from_fd(slow.into(), "slow to close").unwrap(), peer)
}

/// Waits until its close is in progress: its number is free then. A child with a copy of it would also close it
/// slowly.
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
fn a_slow_close_of_a_file_blocks_nobody() {
    everywhere("a slow close of a file blocks nobody", |case| {
        let mut engine = case.engine();
        let (slow, peer) = slow_to_close();
        // The operation has the last handle: the loop does not close it, and does not block opening, closing and
        // forking elsewhere.
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
fn a_cancelled_write_to_a_full_pipe_counts_the_bytes_written() {
    everywhere("a cancelled write to a full pipe counts the bytes written", |case| {
        let mut engine = case.engine();
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let writer = File::from_fd(writer, "full").unwrap();
        submit(&mut engine, 1, Operation::write(&writer, vec![7; 300 << 10]));
        engine.start().unwrap();
        // Some bytes are written, and the pipe has no space for the rest.
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
fn each_of_two_readers_of_a_pipe_can_be_cancelled() {
    everywhere("each of two readers of a pipe can be cancelled", |case| {
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
fn submitted_operations_raise_no_sigpipe() {
    everywhere("submitted operations raise no SIGPIPE", |case| {
        // A separate thread, so that pending signals are only this test's. A blocked signal is pending even if the
        // process ignores it.
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
            let writer = File::from_fd(writer, "nothing reads it").unwrap();
            submit(&mut engine, 1, Operation::write(&writer, vec![0; bytes]));
            assert_eq!(failure(&done(&mut engine)), "EPIPE");
            assert!(!pending(), "a write of {bytes} bytes raised SIGPIPE");
        }
    });
}

fn fifo(case: &Case, name: &str) -> PathBuf {
    let path = case.path(name);
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, rustix::fs::Mode::from_raw_mode(0o600), 0)
        .unwrap();
    path
}

/// Threads that wait for another party.
fn threads_alone() -> Vec<i32> {
    kernel::threads_named(ALONE)
}

/// Opens these FIFOs until the threads that block in opening them are gone. It repeats, since a thread that blocks
/// later would otherwise block for ever.
fn release_blocked_threads(fifos: &[PathBuf]) {
    let deadline = deadline();
    while !threads_alone().is_empty() {
        for path in fifos {
            drop(std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap());
        }
        assert!(Instant::now() < deadline, "a thread waits that has nothing to wait for");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn an_operation_that_never_completes_delays_no_other() {
    let _hang = Watchdog::new("an operation that never completes delays no other");
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
            // Also one with a non-blocking descriptor, which the ring does not wait for.
            let pipes: Vec<_> = (0..32).map(|number| pipe(&format!("pipe {number}"))).collect();
            for (token, (read, _write)) in (32..).zip(&pipes) {
                if token % 2 == 0 {
                    rustix::fs::fcntl_setfl(read, rustix::fs::OFlags::NONBLOCK).unwrap();
                }
                submit(&mut engine, token, Operation::read(read, vec![0; 10]));
            }
            engine.start().unwrap();
            // All of them wait; others complete.
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
            // The awaited data arrives, for some of each.
            let partner = |token: u64| {
                if token < 32 {
                    // It has a separate thread, so that no opening blocks here for ever if that one has not begun.
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
            // A thread that opens a FIFO blocks until somebody opens the other end: it cannot be cancelled.
            release_blocked_threads(&fifos);
        }
    }
}

#[test]
fn operations_that_run_until_gives_up_count_towards_the_bound() {
    everywhere("operations that run_until gives up count", |case| {
        let mut engine = case.options.clone().in_flight_max(2).threads(64).build().unwrap();
        // Long enough for most to have begun; one that has not ends at once, and the test tries another.
        let soon = || Instant::now() + Duration::from_millis(30);
        // A close in progress cannot be cancelled; one that no thread has begun can. The former occupy all slots, and
        // the test waits for one more.
        let mut peers = Vec::new();
        while engine.try_completion().unwrap().is_none() && engine.has_free_slots(0) {
            let (slow, peer) = slow_to_close();
            // A child of another test that has a copy of it for a moment closes it instead: then the test tries
            // another.
            let _ = engine.run_until(Operation::close(slow), soon()).unwrap();
            peers.push(peer);
            if peers.len() > 60 {
                break;
            }
        }
        let is_bounded = peers.len() <= 60;
        let made = engine.run_until(Operation::make_directory(case.path("made"), 0o700), soon()).unwrap().is_some();
        let is_taken = engine.try_submit(1, Operation::stat(case.root.path())).unwrap().is_submitted();
        // A reset ends them, and slots are free again.
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
fn the_number_of_threads_blocked_at_fifos_is_bounded() {
    let _hang = Watchdog::new("the number of threads blocked at FIFOs is bounded");
    for way in ["ring", "threads"] {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        Child::start(Role::new(child, "left").with("path", dir.path().display()).with("way", way)).expect("left");
    }
}

pub(super) fn left(path: &Path, way: &str) {
    let way = if way == "ring" { "ring" } else { "threads" };
    let case = Case { way, options: options(way), root: tempfile::tempdir_in(path).unwrap() };
    let mut engine = case.engine();
    let path = fifo(&case, "fifo");
    // Opens one, and abandons it soon.
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
    assert!(threads_alone().len() <= 256);
    // When they have ended it continues. One may not have begun to wait when another wakes.
    let until_they_are_gone = || {
        while !threads_alone().is_empty() {
            drop(std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap());
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    until_they_are_gone();
    assert!(begin().is_ok());
    drop(engine);
    until_they_are_gone();
    report("left");
}

/// A varying delay: none, a yield, some instructions, some microseconds.
fn random_delay(random: &mut Random) {
    match random.below(8) {
        0..4 => {}
        4 => std::thread::yield_now(),
        5 | 6 => (0..random.below(3000)).for_each(|_| std::hint::spin_loop()),
        _ => std::thread::sleep(Duration::from_micros(random.below(200))),
    }
}

/// The target that the operations to be cancelled read or open.
struct Silent {
    /// With its own other end, and one with a non-blocking descriptor.
    fifos: [File; 2],
    idle: [(File, std::fs::File); 2],
    path: PathBuf,
}

impl Silent {
    fn new(paths: &[PathBuf; 3]) -> Silent {
        let [path, fifos @ ..] = paths;
        let fifos = fifos.each_ref().map(|path| {
            let both = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
            File::from_fd(both.into(), path).unwrap()
        });
        let idle = [pipe("idle"), pipe("asked")];
        for requested in [&fifos[1], &idle[1].0] {
            rustix::fs::fcntl_setfl(requested, rustix::fs::OFlags::NONBLOCK).unwrap();
        }
        Silent { fifos, idle, path: path.clone() }
    }

    fn operation(&self, random: &mut Random) -> Operation {
        let which = random.below(2) as usize;
        let bytes = [1, 100, 300_000][random.below(3) as usize];
        match random.below(9) {
            0..4 => Operation::read(&self.fifos[which], vec![0; bytes]),
            4..8 => Operation::read(&self.idle[which].0, vec![0; bytes]),
            _ => Operation::open(&self.path, Open::for_reading()),
        }
    }

    /// All readers wake, and one gets the data.
    fn provide_data(&self, random: &mut Random) {
        let which = random.below(2) as usize;
        let written = match random.below(2) {
            0 => rustix::io::write(&self.fifos[which], b"x"),
            _ => rustix::io::write(&self.idle[which].1, b"x"),
        };
        assert_eq!(written, Ok(1));
    }
}

#[test]
fn a_fifo_ends_when_its_writers_close_it() {
    everywhere("a FIFO ends when its writers close it", |case| {
        let path = fifo(case, "fifo");
        let mut engine = case.engine();
        submit(&mut engine, 1, Operation::open(&path, Open::for_reading()));
        engine.start().unwrap();
        let mut writer = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        let reader = done(&mut engine).into_file().unwrap();
        writer.write_all(b"last").unwrap();
        drop(writer);
        for wanted in [&b"last"[..], b"", b""] {
            submit(&mut engine, 2, Operation::read(&reader, vec![0; 300_000]));
            assert_eq!(done(&mut engine).bytes(), wanted);
        }
        // Also of one that waits for it when they end.
        let mut writer = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        for (said, wanted) in [(&b"more"[..], &b"more"[..]), (b"", b"")] {
            let others = threads_alone();
            submit(&mut engine, 3, Operation::read(&reader, vec![0; 300_000]));
            engine.start().unwrap();
            // With io_uring the kernel waits once `start` returns; a pool thread needs a moment.
            let started = |thread: &i32| !others.contains(thread) && kernel::thread_polls(*thread);
            eventually("the read waits", || engine.uses_io_uring() || threads_alone().iter().any(started));
            match said {
                b"" => drop(std::mem::replace(&mut writer, std::fs::File::open("/dev/null").unwrap())),
                _ => writer.write_all(said).unwrap(),
            }
            assert_eq!(done(&mut engine).bytes(), wanted);
        }
    });
}

#[test]
fn a_pump_does_not_block_at_a_fifo_and_can_be_cancelled_while_its_file_blocks() {
    use std::sync::{Arc, Mutex};
    everywhere("a pump does not block at a FIFO and can be cancelled", |case| {
        let mut engine = case.engine();
        let (sender, receiver) = pelton::Options::new().threads().unwrap();
        let (sender, receiver) = (Arc::new(Mutex::new(sender)), Arc::new(Mutex::new(receiver)));
        // A file without positions cannot be read or written at one, whether it has data or not.
        let path = fifo(case, "fifo");
        let mut ends = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let both = ran(&mut engine, Operation::open(&path, Open::for_both())).unwrap().into_file().unwrap();
        for _ in 0..2 {
            assert_eq!(errno(&ran(&mut engine, Operation::send(&both, 0, 9, &sender, 4)).unwrap_err()), "ESPIPE");
            sender.try_lock().unwrap().send(b"kept").unwrap();
            assert_eq!(errno(&ran(&mut engine, Operation::receive(&both, 0, 9, &receiver)).unwrap_err()), "ESPIPE");
            assert_eq!(&*receiver.try_lock().unwrap().receive().unwrap(), b"kept");
            ends.write_all(b"something").unwrap();
        }
        // The kernel's log can, and a reader at its end waits there.
        let Ok(log) = std::fs::File::open("/dev/kmsg") else {
            eprintln!("the kernel's log may not be read here: that a pump waits for its file is not tried");
            return;
        };
        let log = File::from_fd(log.into(), "the kernel's log").unwrap();
        let mut random = Random::new(std::process::id().into());
        for _ in 0..20 {
            rustix::fs::seek(&log, rustix::fs::SeekFrom::End(0)).unwrap();
            submit(&mut engine, 1, Operation::send(&log, 0, u64::MAX, &sender, 10_000));
            engine.start().unwrap();
            std::thread::sleep(Duration::from_micros(random.below(2000)));
            assert!(engine.cancel(1).unwrap());
            // A message may have been logged meanwhile.
            let ended = done(&mut engine);
            let error = ended.cut_short_by.as_deref().or(ended.outcome.as_ref().err()).unwrap();
            assert_eq!(errno(error), "ECANCELED");
        }
    });
}

#[test]
fn an_operation_cancelled_at_any_moment_completes() {
    let _hang = Watchdog::new("an operation cancelled at any moment completes");
    for way in ["ring", "threads"] {
        for waits_by_loop in [true, false] {
            let root = tempfile::tempdir_in("/var/tmp").unwrap();
            let case = Case { way, options: options(way).threads(2).in_flight_max(64), root };
            let paths = ["nobody's", "shared", "asked"].map(|name| fifo(&case, name));
            let mut random = Random::new(std::process::id().into());
            for _ in 0..30 {
                cancel_at_any_moment(&case, &Silent::new(&paths), waits_by_loop, &mut random);
            }
            release_blocked_threads(&paths[..1]);
        }
    }
}

/// Some ticks of a loop. In each some operations begin, some are cancelled, and data may arrive; in the end all are
/// cancelled.
fn cancel_at_any_moment(case: &Case, silent: &Silent, waits_by_loop: bool, random: &mut Random) {
    let mut engine = case.engine();
    let mut going: Vec<u64> = Vec::new();
    let mut next = 0;
    let ticks = random.below(30);
    let most = 1 + random.below(40);
    let mut act = |engine: &mut Engine, going: &mut Vec<u64>, random: &mut Random, is_last: bool| {
        for _ in 0..random.below(most) {
            random_delay(random);
            match random.below(8) {
                0..4 if !is_last => {
                    let submitted = engine.try_submit(next, silent.operation(random)).unwrap();
                    if submitted.is_submitted() {
                        going.push(next);
                        next += 1;
                    }
                }
                4..7 if !going.is_empty() => {
                    let at = random.below(going.len() as u64) as usize;
                    engine.cancel(going.swap_remove(at)).unwrap();
                }
                7 => silent.provide_data(random),
                _ => {}
            }
        }
        if is_last {
            going.drain(..).for_each(|token| _ = engine.cancel(token).unwrap());
        }
    };
    let take = |engine: &mut Engine, random: &mut Random| {
        let most = if random.below(4) == 0 { random.below(4) } else { u64::MAX };
        let mut taken = 0;
        while taken < most && engine.try_completion().unwrap().is_some() {
            taken += 1;
        }
        taken
    };
    for tick in 0..=ticks {
        let is_last = tick == ticks;
        let cancels_all = is_last && random.below(2) == 0;
        act(&mut engine, &mut going, random, cancels_all);
        if random.below(3) == 0 {
            take(&mut engine, random);
        }
        if waits_by_loop {
            let is_waiting = engine.arm().unwrap().is_waiting();
            random_delay(random);
            // From elsewhere in the loop: the descriptor reports operations that begin or are cancelled now.
            act(&mut engine, &mut going, random, is_last);
            if !is_last && is_waiting {
                let _ = poll(&mut [PollFd::new(&engine, PollFlags::IN)], Some(&Timespec::default())).unwrap();
            }
        } else if is_last {
            act(&mut engine, &mut going, random, true);
        } else if random.below(2) == 0 {
            engine.start().unwrap();
        }
    }
    while engine.in_flight() > 0 {
        if !waits_by_loop {
            done(&mut engine);
            continue;
        }
        readable(&engine);
        take(&mut engine, random);
        while !engine.arm().unwrap().is_waiting() {
            take(&mut engine, random);
        }
    }
    assert!(engine.try_completion().unwrap().is_none());
    if random.below(2) == 0 {
        engine.close().unwrap();
    }
}
