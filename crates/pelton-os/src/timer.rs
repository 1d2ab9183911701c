//! Timers as descriptors, like everything else that is waited for.

use crate::descriptor::Descriptor;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use rustix::time::{timerfd_create, timerfd_settime};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// Readable once its time has passed.
#[derive(Debug)]
pub struct Timer(Descriptor);

impl Timer {
    /// Not before it is [`set`](Timer::set).
    pub fn new() -> std::io::Result<Timer> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        Ok(Timer(Descriptor::opened(|| timerfd_create(TimerfdClockId::Monotonic, flags))??))
    }

    /// After this time.
    pub fn after(time: Duration) -> std::io::Result<Timer> {
        let timer = Timer::new()?;
        timer.set(time)?;
        Ok(timer)
    }

    /// Sets it anew, to this time from now.
    pub fn set(&self, time: Duration) -> std::io::Result<()> {
        let none = Timespec { tv_sec: 0, tv_nsec: 0 };
        let value = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
        timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &Itimerspec { it_interval: none, it_value: value })?;
        Ok(())
    }

    /// Whether its time has passed. Returns true once.
    pub fn has_passed(&self) -> bool {
        rustix::io::read(&self.0, &mut [0; 8]).is_ok()
    }
}

impl AsFd for Timer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Nanoseconds of CLOCK_MONOTONIC. By the C library: a direct use of the vDSO ends a program under valgrind, which
/// removes the vDSO.
pub fn monotonic_ns() -> u64 {
    nanoseconds(libc::CLOCK_MONOTONIC)
}

/// As [`monotonic_ns`], at the kernel's last tick: up to some 10 ms behind, and cheaper.
pub fn coarse_monotonic_ns() -> u64 {
    nanoseconds(libc::CLOCK_MONOTONIC_COARSE)
}

fn nanoseconds(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: fills a local struct; both clocks always exist.
    unsafe { libc::clock_gettime(clock, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
