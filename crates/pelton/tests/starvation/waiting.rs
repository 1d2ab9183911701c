//! Obstacles that prolong a wait or end it early: full doorbells, signals, the wall clock.

use super::*;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

/// Duplicates of this process's eventfds, and of FIFOs with a doorbell's file name.
pub fn doorbells(root: &Path) -> Vec<OwnedFd> {
    let open = std::fs::read_dir("/proc/self/fd").unwrap().map(|fd| fd.unwrap());
    let ours = open.filter(|fd| {
        let Ok(to) = std::fs::read_link(fd.path()) else { return false };
        to.as_os_str() == "anon_inode:[eventfd]"
            || (to.starts_with(root) && to.extension().is_some_and(|kind| kind == "bell"))
    });
    let numbers: Vec<i32> = ours.map(|fd| fd.file_name().to_str().unwrap().parse().unwrap()).collect();
    // SAFETY: the descriptor belongs to this process, and no thread closes it meanwhile.
    numbers.iter().map(|number| unsafe { BorrowedFd::borrow_raw(*number) }.try_clone_to_owned().unwrap()).collect()
}

/// Rings it up to its maximum count.
fn fill_doorbell(doorbell: &OwnedFd) {
    // The maximum of an eventfd; a FIFO takes eight bytes.
    let most = (u64::MAX - 1).to_ne_bytes();
    while rustix::io::write(doorbell, &most).is_ok() {}
    let _ = rustix::io::write(doorbell, &1u64.to_ne_bytes());
}

pub fn full_doorbells(role: &Role) {
    let root = Path::new(role.get("at"));
    let (mut sender, mut receiver) = match role.get("how") {
        "threads" => Options::new().capacity(SMALL).threads().unwrap(),
        _ => {
            let sender = small_path().create_sender(path_of(role)).unwrap();
            (sender, small_path().open_receiver(path_of(role)).unwrap())
        }
    };
    let doorbells = doorbells(root);
    assert!(doorbells.len() >= 4, "{doorbells:?}");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let filling = scope.spawn(|| {
            while !stop.load(SeqCst) {
                doorbells.iter().for_each(fill_doorbell);
            }
        });
        // Both sides sleep repeatedly: the lane holds two of these messages.
        for round in 0..2 {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let mut bytes = Vec::new();
                    for number in 0..rounds(300) {
                        payload(number, 30_000, &mut bytes);
                        sender.send(&bytes).unwrap();
                    }
                    assert!(sender.wait_released_until(deadline()).unwrap());
                });
                let mut wanted = Vec::new();
                for number in 0..rounds(300) {
                    let message = receiver.receive_until(deadline()).unwrap().expect("a message is sent");
                    check(number, Sizes::Fixed(30_000), &message, &mut wanted);
                    if round == 1 && number % 8 == 0 {
                        std::thread::sleep(Duration::from_micros(300));
                    }
                }
            });
            // When nothing fills them, the doorbells ring for real events, and not early.
            stop.store(true, SeqCst);
        }
        filling.join().unwrap();
        doorbells.iter().for_each(fill_doorbell);
        let until = Instant::now() + Duration::from_millis(30);
        assert!(receiver.receive_until(until).unwrap().is_none());
        assert!(Instant::now() >= until);
    });
    report("well");
}

#[test]
fn full_doorbells_neither_block_nor_lose_a_wake_up() {
    for how in ["threads", "path"] {
        let dir = TestDir::new("full doorbells neither block nor lose a wake-up");
        alone(role_at("full doorbells", &dir).with("how", how));
    }
}

/// Interrupts each system call of this thread, a thousand times a second, until dropped.
pub struct SignalTimer(libc::timer_t);

impl SignalTimer {
    pub fn begin() -> SignalTimer {
        extern "C" fn nothing(_: libc::c_int) {}
        // SAFETY: the handler does nothing and has no SA_RESTART; the structs live across the calls.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = nothing as *const () as usize;
            assert_eq!(libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()), 0);
            let mut event: libc::sigevent = std::mem::zeroed();
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_signo = libc::SIGUSR1;
            event.sigev_notify_thread_id = this_thread();
            let mut timer = std::ptr::null_mut();
            assert_eq!(libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut timer), 0);
            let every = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 };
            let when = libc::itimerspec { it_interval: every, it_value: every };
            assert_eq!(libc::timer_settime(timer, 0, &when, std::ptr::null_mut()), 0);
            SignalTimer(timer)
        }
    }
}

impl Drop for SignalTimer {
    fn drop(&mut self) {
        // SAFETY: `begin` created the timer.
        unsafe { libc::timer_delete(self.0) };
    }
}

/// A wait that only its deadline ends.
#[track_caller]
fn times_out<T: std::fmt::Debug>(what: &str, wait: impl FnOnce(Instant) -> T, wanted: impl FnOnce(&T) -> bool) {
    let until = Instant::now() + Duration::from_millis(25);
    let found = wait(until);
    assert!(Instant::now() >= until, "{what} ended before its deadline: {found:?}");
    assert!(wanted(&found), "{what}: {found:?}");
}

/// Every call that waits, at both endpoints, under signals.
pub fn interrupted(role: &Role) {
    let _signals = SignalTimer::begin();
    let (name, path) = (name_of(role), path_of(role));
    let by_path = role.get("how") == "path";
    let count = rounds(300);
    let message = |number: u64| {
        let mut bytes = Vec::new();
        payload(number, 30_000, &mut bytes);
        bytes
    };
    let null = std::fs::File::open("/dev/null").unwrap();
    if role.get("end") == "receiver" {
        let mut receiver = match by_path {
            true => {
                let early = |until| small_path().connect_deadline(until).open_receiver(&path).map(|_| ());
                times_out("opening", early, |done| matches!(done, Err(Error::NoChannel { .. })));
                let early = |until| small_path().connect_deadline(until).create_receiver(&path).map(|_| ());
                times_out("waiting for a sender", early, |done| matches!(done, Err(Error::TimedOut(_))));
                report("listening");
                small().create_receiver(&path).unwrap()
            }
            false => {
                let listener = small().listen(&name).unwrap();
                let accept = |until| listener.accept_receiver_until(until).map(|found| found.is_none());
                times_out("accepting a sender", accept, |done| matches!(done, Ok(true)));
                let accept = |until| listener.accept_sender_until(until).map(|found| found.is_none());
                times_out("accepting a receiver", accept, |done| matches!(done, Ok(true)));
                report("listening");
                listener.accept_receiver_until(deadline()).unwrap().unwrap()
            }
        };
        report("open");
        let mut buffer = Vec::new();
        times_out("receiving", |until| receiver.receive_until(until).map(drop_some), |done| matches!(done, Ok(false)));
        times_out("copying", |until| receiver.receive_into_until(&mut buffer, until), |done| matches!(done, Ok(None)));
        report("waited");
        for number in 0..count {
            match number % 4 {
                0 => assert_eq!(*receiver.receive().unwrap(), message(number)),
                1 => assert_eq!(*receiver.receive_until(deadline()).unwrap().unwrap(), message(number)),
                2 => {
                    receiver.receive_into(&mut buffer).unwrap();
                    assert_eq!(buffer, message(number));
                }
                _ => assert_eq!(*receiver.receive_batch().unwrap().next().unwrap().unwrap(), message(number)),
            }
        }
        if !by_path {
            for _ in 0..count {
                assert_eq!(receiver.receive().unwrap().take_descriptors().unwrap().len(), 2);
            }
        }
        report("received");
        // The receiver reads nothing until the sender's waits for free space have ended.
        read_line_from_parent();
        while !matches!(&*receiver.receive().unwrap(), b"the last") {}
        assert!(receiver.receive().unwrap_err().is_peer_died());
        times_out("resuming", |until| receiver.resume_until(until), |done| matches!(done, Ok(false)));
        report("resuming");
        assert!(receiver.resume_until(deadline()).unwrap());
        assert_eq!(&*receiver.receive().unwrap(), b"of a successor");
        report("well");
    } else {
        let mut sender = match by_path {
            true => small().create_sender(&path).unwrap(),
            false => {
                if role.get("succeeds") != "yes" {
                    let early = |until| small().connect_deadline(until).connect_sender(&name).map(|_| ());
                    times_out("connecting", early, |done| matches!(done, Err(Error::TimedOut(_))));
                    report("early");
                    read_line_from_parent();
                }
                small().connect_sender(&name).unwrap()
            }
        };
        if role.get("succeeds") == "yes" {
            sender.send(b"of a successor").unwrap();
            let _ = sender.wait_released();
            return;
        }
        report("open");
        read_line_from_parent();
        for number in 0..count {
            match number % 3 {
                0 => sender.send(&message(number)).unwrap(),
                1 => assert_eq!(sender.send_until(&message(number), deadline()).unwrap(), Sent::Sent),
                _ => {
                    let mut space = sender.reserve(30_000).unwrap();
                    space.copy_from_slice(&message(number));
                    space.commit().unwrap();
                }
            }
        }
        assert!(sender.wait_released_until(deadline()).unwrap());
        if !by_path {
            for _ in 0..count {
                sender.send_with_descriptors(b"", &[null.as_fd(); 2]).unwrap();
            }
        }
        sender.wait_released().unwrap();
        read_line_from_parent();
        while sender.try_send(&message(0)).unwrap() == Sent::Sent {}
        let full = message(0);
        times_out("sending", |until| sender.send_until(&full, until), |done| matches!(done, Ok(Sent::TimedOut)));
        let reserve = |until| sender.reserve_until(full.len(), until).map(|space| space.is_none());
        times_out("reserving", reserve, |done| matches!(done, Ok(true)));
        if !by_path {
            let send = |until| sender.send_with_descriptors_until(&full, &[null.as_fd()], until);
            times_out("sending descriptors", send, |done| matches!(done, Ok(Sent::TimedOut)));
        }
        times_out("draining", |until| sender.wait_released_until(until), |done| matches!(done, Ok(false)));
        report("waited");
        sender.send(b"the last").unwrap();
        sender.wait_released().unwrap();
        report("sent");
        read_line_from_parent();
    }
}

#[test]
fn a_signal_each_millisecond_at_both_endpoints_ends_no_wait_and_loses_nothing() {
    for how in ["connect", "path"] {
        let dir = TestDir::new("a signal each millisecond at both endpoints ends no wait and loses nothing");
        let role = |end: &str| role_at("interrupted", &dir).with("how", how).with("end", end);
        let (mut sender, mut receiver);
        if how == "connect" {
            sender = Child::start(role("sender"));
            sender.expect("early");
            receiver = Child::start(role("receiver"));
            receiver.expect("listening");
            sender.write_line("go");
        } else {
            receiver = Child::start(role("receiver"));
            receiver.expect("listening");
            sender = Child::start(role("sender"));
        }
        sender.expect("open");
        receiver.expect("open");
        receiver.expect("waited");
        sender.write_line("go");
        receiver.expect("received");
        sender.write_line("go");
        sender.expect("waited");
        receiver.write_line("go");
        sender.expect("sent");
        sender.kill();
        receiver.expect("resuming");
        let successor = Child::start(role("sender").with("succeeds", "yes"));
        receiver.expect("well");
        receiver.wait_for_success();
        drop(successor);
    }
}

/// A message whose memory takes longer to allocate than the signal interval. Kernels at the time of pelton's first
/// version let a signal interrupt that; Linux 6.18 does not, so the test shows nothing there.
#[test]
fn a_message_of_half_a_gigabyte_is_sent_under_signals() {
    let dir = TestDir::new("a message of half a gigabyte is sent under signals");
    let Some(mounted) = Mounted::tmpfs(&dir.path().join("mounted"), "size=600m") else { return };
    let mut sender = Options::new().capacity(1 << 30).create_sender(mounted.0.join("channel")).unwrap();
    let signals = SignalTimer::begin();
    // The test does not write to it: the allocation alone takes the time.
    sender.reserve((1 << 29) - 100).unwrap().commit().unwrap();
    drop(signals);
    let allocated = inspect::info(mounted.0.join("channel")).unwrap().lanes[0].allocated_bytes;
    assert!(allocated >= (1 << 29) - 100, "{allocated}");
}

static WALL: AtomicU64 = AtomicU64::new(0);
static OTHER_CLOCKS: AtomicU64 = AtomicU64::new(0);

/// Replaces the C library's function for the whole program, including the standard library. It counts the reads of
/// each clock, and moves the wall clock by years in both directions.
#[unsafe(no_mangle)]
extern "C" fn clock_gettime(clock: libc::clockid_t, time: *mut libc::timespec) -> libc::c_int {
    let wall = [libc::CLOCK_REALTIME, libc::CLOCK_REALTIME_COARSE, libc::CLOCK_TAI].contains(&clock);
    let count = if wall { &WALL } else { &OTHER_CLOCKS }.fetch_add(1, SeqCst);
    // SAFETY: the caller guarantees its pointer.
    unsafe {
        let done = libc::syscall(libc::SYS_clock_gettime, clock, time) as libc::c_int;
        if wall && done == 0 {
            (*time).tv_sec += if count % 2 == 0 { 100_000_000 } else { -100_000_000 };
        }
        done
    }
}

/// Two more functions that read the clock; nothing calls them.
#[unsafe(no_mangle)]
extern "C" fn gettimeofday(_: *mut libc::timeval, _: *mut libc::c_void) -> libc::c_int {
    WALL.fetch_add(1, SeqCst);
    -1
}

#[unsafe(no_mangle)]
extern "C" fn time(_: *mut libc::time_t) -> libc::time_t {
    WALL.fetch_add(1, SeqCst) as libc::time_t
}

pub fn no_wall_clock(role: &Role) {
    let root = Path::new(role.get("at"));
    let _ = std::time::SystemTime::now();
    assert!(WALL.load(SeqCst) > 0, "the clock's interposer counts nothing");
    let before = (WALL.load(SeqCst), OTHER_CLOCKS.load(SeqCst));
    for (part, done) in all_of_it(root) {
        done.unwrap_or_else(|error| panic!("{part}: {error}"));
    }
    assert!(OTHER_CLOCKS.load(SeqCst) > before.1 + 50, "deadlines ask for the time");
    assert_eq!(WALL.load(SeqCst), before.0, "something read the wall clock");
    report("well");
}

/// A test must not set the wall clock of a shared machine, so this one shows that nothing reads it. The system calls
/// that wait get durations, which the system measures by the monotonic clock; a deadline is an `Instant` of the same
/// clock.
#[test]
fn no_wait_reads_the_wall_clock() {
    let dir = TestDir::new("no wait reads the wall clock");
    alone(role_at("no wall clock", &dir));
}
