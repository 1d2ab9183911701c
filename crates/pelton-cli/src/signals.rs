//! SIGINT, SIGTERM and SIGHUP as a flag, to check while messages flow, and as a descriptor, to poll while none do.
//!
//! The library continues its waits after EINTR. So a command polls this descriptor too, or waits in slices and checks
//! the flag between them. A second signal ends the process immediately: two Ctrl-C end any hang.

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

/// Length of a wait without the descriptor, between two checks of the flag: no noticeable delay of a Ctrl-C, no
/// noticeable load.
pub const SLICE: Duration = Duration::from_millis(100);

/// The signals that end this process, caught from `install` on.
pub struct Signals {
    caught: Arc<AtomicUsize>,
    readable: UnixStream,
    /// Where nothing is caught: it keeps `readable` open.
    _writable: Option<UnixStream>,
}

impl Signals {
    /// Catches SIGINT and SIGTERM from now on, and SIGHUP unless it is ignored: then `nohup` or a shell keeps this
    /// process running.
    pub fn install() -> Result<Signals, Failure> {
        Signals::try_install(true).map_err(|error| Failure::system("cannot catch signals", error))
    }

    /// As [`Signals::install`], but the second signal does not exit: the caller handles it, after [`Signals::clear`].
    pub fn install_without_exit() -> Result<Signals, Failure> {
        Signals::try_install(false).map_err(|error| Failure::system("cannot catch signals", error))
    }

    /// Catches nothing: for a thread of a program that handles its signals elsewhere.
    pub fn none() -> Result<Signals, Failure> {
        let (readable, writable) = UnixStream::pair().map_err(|error| Failure::system("a pair of sockets", error))?;
        let is_nonblocking = readable.set_nonblocking(true);
        is_nonblocking.map_err(|error| Failure::system("a pair of sockets", error))?;
        Ok(Signals { caught: Arc::default(), readable, _writable: Some(writable) })
    }

    fn try_install(second_exits: bool) -> io::Result<Signals> {
        let caught = Arc::new(AtomicUsize::new(0));
        let (readable, writable) = UnixStream::pair()?;
        readable.set_nonblocking(true)?;
        for signal in [SIGINT, SIGTERM].into_iter().chain(catches_hangup().then_some(SIGHUP)) {
            if second_exits {
                let is_second = Arc::new(AtomicBool::new(false));
                // In this order: the first signal finds `is_second` unset and sets it; the second finds it set, and
                // exits.
                signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, is_second.clone())?;
                signal_hook::flag::register(signal, is_second)?;
            }
            signal_hook::flag::register_usize(signal, caught.clone(), signal as usize)?;
            // Last: a caller that the descriptor wakes finds the flag set.
            signal_hook::low_level::pipe::register(signal, writable.try_clone()?)?;
        }
        Ok(Signals { caught, readable, _writable: None })
    }

    /// Fails once a signal has arrived; costs one load.
    pub fn check(&self) -> Result<(), Failure> {
        // Relaxed: the flag publishes no other data.
        match self.caught.load(Ordering::Relaxed) {
            0 => Ok(()),
            signal => Err(Failure::Signal(signal as i32)),
        }
    }

    /// Clears the caught signal, so that the next one is reported.
    pub fn clear(&self) {
        let mut bytes = [0; 64];
        while matches!((&self.readable).read(&mut bytes), Ok(1..)) {}
        self.caught.store(0, Ordering::Relaxed);
    }

    /// Waits until a descriptor has one of its events, an error or a hang-up, and returns which are ready. Fails once a
    /// signal has arrived. `None` waits without limit; after a timeout, none is ready.
    pub fn poll<const N: usize>(
        &self,
        waits: [(BorrowedFd<'_>, PollFlags); N],
        timeout: Option<Duration>,
    ) -> Result<[bool; N], Failure> {
        let ready = self.poll_all(waits, timeout)?;
        Ok(std::array::from_fn(|i| ready[i]))
    }

    /// As [`Signals::poll`], for any number of descriptors.
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
            // EINTR may come from SIGCONT; each caller loops.
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Failure::system("poll", error)),
        }
        self.check()?;
        Ok(fds[1..].iter().map(|fd| !fd.revents().is_empty()).collect())
    }
}

/// Whether SIGHUP is not ignored. Without /proc, SIGHUP is not caught.
fn catches_hangup() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    ignored.is_some_and(|bits| u64::from_str_radix(bits.trim(), 16).is_ok_and(|bits| bits & (1 << (SIGHUP - 1)) == 0))
}
