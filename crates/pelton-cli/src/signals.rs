//! SIGINT, SIGTERM and SIGHUP as a flag to look at while messages flow, and as a descriptor to poll while nothing does.
//!
//! The library's waiting calls go on after EINTR, so whoever waits here either polls this descriptor as well, or waits in slices
//! and looks at the flag between them. A second signal ends the process at once: whatever hangs, two Ctrl-C are enough.

use crate::failure::Failure;
use rustix::event::{PollFd, PollFlags, poll};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::{
    io::{self, Read as _},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

/// How long a wait that cannot poll the signals' descriptor lasts before the flag is looked at again: no noticeable delay to a
/// Ctrl-C, no noticeable load.
pub const SLICE: Duration = Duration::from_millis(100);

/// The signals that ask this process to end. They are caught from `install` to the end of the process.
pub struct Signals {
    caught: Arc<AtomicUsize>,
    readable: UnixStream,
}

impl Signals {
    /// Catches SIGINT and SIGTERM from now on, and SIGHUP, unless it is ignored: then `nohup`, or a shell, wants this process to stay.
    pub fn install() -> Result<Signals, Failure> {
        Signals::try_install(true).map_err(|error| Failure::system("cannot catch signals", error))
    }

    /// As [`Signals::install`], for who looks after a second signal by itself: see [`Signals::forget`].
    pub fn install_patiently() -> Result<Signals, Failure> {
        Signals::try_install(false).map_err(|error| Failure::system("cannot catch signals", error))
    }

    fn try_install(second_ends: bool) -> io::Result<Signals> {
        let caught = Arc::new(AtomicUsize::new(0));
        let (readable, writable) = UnixStream::pair()?;
        readable.set_nonblocking(true)?;
        for signal in [SIGINT, SIGTERM].into_iter().chain(hears_hangup().then_some(SIGHUP)) {
            if second_ends {
                let again = Arc::new(AtomicBool::new(false));
                // in this order: the first signal finds `again` unset and sets it, the second finds it set
                signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, again.clone())?;
                signal_hook::flag::register(signal, again)?;
            }
            signal_hook::flag::register_usize(signal, caught.clone(), signal as usize)?;
            // last, so that whoever is woken by the descriptor finds the flag set
            signal_hook::low_level::pipe::register(signal, writable.try_clone()?)?;
        }
        Ok(Signals { caught, readable })
    }

    /// Fails once a signal has come; costs one load.
    pub fn check(&self) -> Result<(), Failure> {
        // Relaxed: nothing else is published by it
        match self.caught.load(Ordering::Relaxed) {
            0 => Ok(()),
            signal => Err(Failure::Signal(signal as i32)),
        }
    }

    /// What has come is seen to: the next signal is the one to be noticed.
    pub fn forget(&self) {
        let mut bytes = [0; 64];
        while matches!((&self.readable).read(&mut bytes), Ok(1..)) {}
        self.caught.store(0, Ordering::Relaxed);
    }

    /// Waits until one of the descriptors has the events asked for (or an error, or has hung up), and fails once a signal has
    /// come. Answers which are ready. `None` waits for ever; a timeout that passes leaves all `false`.
    pub fn poll<const N: usize>(
        &self,
        waits: [(BorrowedFd<'_>, PollFlags); N],
        timeout: Option<Duration>,
    ) -> Result<[bool; N], Failure> {
        let ready = self.poll_all(waits, timeout)?;
        Ok(std::array::from_fn(|i| ready[i]))
    }

    /// As [`Signals::poll`], of any number.
    pub fn poll_all<'a>(
        &self,
        waits: impl IntoIterator<Item = (BorrowedFd<'a>, PollFlags)>,
        timeout: Option<Duration>,
    ) -> Result<Vec<bool>, Failure> {
        let mut fds: Vec<PollFd<'_>> = Vec::new();
        fds.push(PollFd::from_borrowed_fd(self.readable.as_fd(), PollFlags::IN));
        fds.extend(waits.into_iter().map(|(fd, events)| PollFd::from_borrowed_fd(fd, events)));
        let timeout = timeout.map(|time| rustix::time::Timespec::try_from(time).expect("timeouts here are short"));
        self.check()?;
        match poll(&mut fds, timeout.as_ref()) {
            // EINTR may be SIGCONT or the like: the caller loops anyway
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Failure::system("poll", error)),
        }
        self.check()?;
        Ok(fds[1..].iter().map(|fd| !fd.revents().is_empty()).collect())
    }
}

/// Whether SIGHUP is not ignored. Where the kernel does not say, it stays as it is.
fn hears_hangup() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    ignored.is_some_and(|bits| u64::from_str_radix(bits.trim(), 16).is_ok_and(|bits| bits & (1 << (SIGHUP - 1)) == 0))
}
