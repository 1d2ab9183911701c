//! Syncs a file without waiting: fdatasync by io_uring, at most one at a time. Where io_uring is refused
//! (`kernel.io_uring_disabled`, seccomp, an old kernel, too little memory) the call itself is made, which waits.

use io_uring::{IoUring, opcode, types};
use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd};

/// From the start of a sync to its end, the kernel has its own reference to the file, and none to memory of this
/// process.
#[derive(Default)]
pub struct Syncer {
    ring: Ring,
    in_flight: bool,
}

#[derive(Default)]
enum Ring {
    #[default]
    NotYet,
    Made(Box<IoUring>),
    Refused,
}

impl Syncer {
    /// Whether a sync is under way.
    pub fn is_busy(&self) -> bool {
        self.in_flight
    }

    /// Starts a sync; there must be none under way. If it is not busy afterwards, everything is done.
    pub fn start(&mut self, file: impl AsFd) -> rustix::io::Result<()> {
        debug_assert!(!self.in_flight, "at most one at a time");
        if matches!(self.ring, Ring::NotYet) {
            self.ring = IoUring::new(1).map_or(Ring::Refused, |ring| Ring::Made(Box::new(ring)));
        }
        if let Ring::Made(ring) = &mut self.ring {
            let flags = types::FsyncFlags::DATASYNC;
            let entry = opcode::Fsync::new(types::Fd(file.as_fd().as_raw_fd())).flags(flags).build();
            // SAFETY: the entry refers to no memory, and to a descriptor that is open until `submit` has returned.
            let pushed = unsafe { ring.submission().push(&entry) };
            let submitted = loop {
                match ring.submit() {
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                    done => break done,
                }
            };
            if pushed.is_ok() && matches!(submitted, Ok(1)) {
                self.in_flight = true;
                return Ok(());
            }
            // An entry that may have been pushed must not be submitted later.
            self.give_up();
        }
        sync(file)
    }

    /// The result of the sync under way, if it has ended.
    pub fn ended(&mut self, file: impl AsFd) -> Option<rustix::io::Result<()>> {
        let Ring::Made(ring) = &mut self.ring else { return None };
        let result = ring.completion().next()?.result();
        self.in_flight = false;
        Some(match -result {
            ..=0 => Ok(()),
            // The kernel did not do it, for instance because the requesting thread has ended.
            libc::ECANCELED | libc::EINTR | libc::EAGAIN => sync(file),
            libc::EINVAL | libc::EOPNOTSUPP | libc::ENOSYS | libc::EPERM | libc::EACCES => {
                self.give_up();
                sync(file)
            }
            error => Err(Errno::from_raw_os_error(error)),
        })
    }

    /// Waits for the sync under way.
    pub fn wait(&mut self, file: impl AsFd) -> rustix::io::Result<()> {
        while self.in_flight {
            if let Some(ended) = self.ended(&file) {
                return ended;
            }
            let Ring::Made(ring) = &mut self.ring else { unreachable!("nothing else is in flight") };
            match ring.submit_and_wait(1) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => {
                    // Refused from now on; the result of the one under way is not needed.
                    self.give_up();
                    return sync(file);
                }
                Ok(_) => {}
            }
        }
        Ok(())
    }

    fn give_up(&mut self) {
        self.ring = Ring::Refused;
        self.in_flight = false;
    }
}

/// Waits until everything that was written to the file is on its disk.
pub fn sync(file: impl AsFd) -> rustix::io::Result<()> {
    rustix::io::retry_on_intr(|| rustix::fs::fdatasync(&file))
}

impl std::fmt::Debug for Syncer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Syncer").field("in_flight", &self.in_flight).finish_non_exhaustive()
    }
}
