//! Waits that end in a failure instead of a hang.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Far longer than any operation takes on a loaded machine; only a hang reaches it.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// [`DEADLINE`] from now.
pub fn deadline() -> Instant {
    Instant::now() + DEADLINE
}

/// Polls a condition that the kernel does not notify, until it holds; panics with what was `expected` after
/// [`DEADLINE`].
#[track_caller]
pub fn eventually(expected: &str, mut condition: impl FnMut() -> bool) {
    let until = deadline();
    // Short conditions hold at once or after a few polls; a long one must not take the processor from what it waits
    // for.
    let mut polls = 0u32;
    while !condition() {
        assert!(Instant::now() < until, "not within {DEADLINE:?}: {expected}");
        polls += 1;
        if polls < 100 { std::thread::yield_now() } else { std::thread::sleep(Duration::from_millis(1)) }
    }
}

/// As [`eventually`], for a value that comes to be `wanted`: one that does not is in the panic's text.
#[track_caller]
pub fn eventually_is<T: PartialEq + std::fmt::Debug>(wanted: T, what: &str, mut current: impl FnMut() -> T) {
    let mut found = current();
    let until = deadline();
    while found != wanted {
        assert!(Instant::now() < until, "{what}: {found:?} after {DEADLINE:?}, wanted {wanted:?}");
        std::thread::sleep(Duration::from_millis(1));
        found = current();
    }
}

/// Aborts the process, with a test's claim, when the test still runs after twice the [`DEADLINE`]: for calls that have
/// no deadline.
pub struct Watchdog {
    alive: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Watches until it is dropped.
    pub fn new(claim: impl Into<String>) -> Watchdog {
        let claim = claim.into();
        let (alive, dropped) = mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            if dropped.recv_timeout(2 * DEADLINE) == Err(mpsc::RecvTimeoutError::Timeout) {
                eprintln!("HANG: {claim}");
                std::process::abort();
            }
        });
        Watchdog { alive: Some(alive), thread: Some(thread) }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.alive = None;
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Waits until the descriptor is readable.
#[track_caller]
pub fn readable(fd: impl AsFd) {
    wait_for_readable(&[fd.as_fd()], "the descriptor becomes readable");
}

/// Waits until one of the descriptors is readable, and returns of each whether it is. Panics with what was `expected`
/// after [`DEADLINE`].
#[track_caller]
pub fn wait_for_readable(fds: &[BorrowedFd<'_>], expected: &str) -> Vec<bool> {
    let found = poll_until(fds, deadline());
    assert!(found.contains(&true), "not within {DEADLINE:?}: {expected}");
    found
}

/// Waits until the descriptor is readable; false at the deadline.
pub fn readable_until(fd: BorrowedFd<'_>, deadline: Instant) -> bool {
    poll_until(&[fd], deadline)[0]
}

/// Whether the descriptor is readable now.
pub fn is_readable(fd: impl AsFd) -> bool {
    readable_until(fd.as_fd(), Instant::now())
}

/// Which are readable, or have hung up; none at the deadline.
fn poll_until(fds: &[BorrowedFd<'_>], deadline: Instant) -> Vec<bool> {
    let mut polled: Vec<PollFd<'_>> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    loop {
        let left = Timespec::try_from(deadline.saturating_duration_since(Instant::now())).unwrap();
        match poll(&mut polled, Some(&left)) {
            Ok(_) => return polled.iter().map(|fd| !fd.revents().is_empty()).collect(),
            Err(Errno::INTR) => {}
            Err(error) => panic!("poll: {error}"),
        }
    }
}
