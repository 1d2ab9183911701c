//! Locks that end with their holder, however it ends: open-file-description locks on a byte of a file, mostly the
//! first.
//!
//! Such a lock belongs to a file description, not to a process: two descriptions of one process exclude each other too,
//! and closing another descriptor of the file does not release the lock. What keeps the description keeps the lock, so
//! the lock must have a description of its own: a mapping keeps its description, and a forked child keeps the mapping.

use crate::descriptor::Descriptor;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

/// A lock that this process has.
#[derive(Debug)]
pub struct Lock(Descriptor, u32);

impl AsFd for Lock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Released explicitly, not by the close: a child before exec may have the description for a moment longer. A
        // forked child's copy is the same lock, which the child must not release.
        if self.0.is_own() {
            let _ = request(self.0.as_fd(), libc::F_OFD_SETLK, libc::F_UNLCK, self.1);
            pelton_lane::failpoint("lock: given back");
        }
    }
}

/// Takes the lock, with a description that was opened for it, for writing. `None`: it is taken.
pub fn try_lock(lock: Descriptor) -> std::io::Result<Option<Lock>> {
    try_lock_byte(lock, 0)
}

/// As [`try_lock`], of another byte of the file than the first. The bytes' locks are independent of each other.
pub fn try_lock_byte(lock: Descriptor, byte: u32) -> std::io::Result<Option<Lock>> {
    match request(lock.as_fd(), libc::F_OFD_SETLK, libc::F_WRLCK, byte) {
        Ok(_) => Ok(Some(Lock(lock, byte))),
        // Only EAGAIN says that it is taken: EACCES comes from a security module that permits no locks.
        Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => Ok(None),
        Err(error) => Err(error),
    }
}

/// As [`try_lock`], retried each millisecond until `deadline`: the kernel has no lock with a deadline.
pub fn lock_until(lock: Descriptor, deadline: Instant) -> std::io::Result<Option<Lock>> {
    loop {
        match request(lock.as_fd(), libc::F_OFD_SETLK, libc::F_WRLCK, 0) {
            Ok(_) => return Ok(Some(Lock(lock, 0))),
            Err(error) if error.raw_os_error() != Some(libc::EAGAIN) => return Err(error),
            Err(_) if Instant::now() >= deadline => return Ok(None),
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// As [`try_lock`], but waits for the lock.
pub fn lock(lock: Descriptor) -> std::io::Result<Lock> {
    loop {
        match request(lock.as_fd(), libc::F_OFD_SETLKW, libc::F_WRLCK, 0) {
            Ok(_) => return Ok(Lock(lock, 0)),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Whether another description has the lock. Takes nothing; a descriptor for reading is enough.
pub fn is_locked(fd: BorrowedFd<'_>) -> std::io::Result<bool> {
    is_byte_locked(fd, 0)
}

/// As [`is_locked`], of another byte.
pub fn is_byte_locked(fd: BorrowedFd<'_>, byte: u32) -> std::io::Result<bool> {
    Ok(request(fd, libc::F_OFD_GETLK, libc::F_WRLCK, byte)? != libc::F_UNLCK)
}

/// Requests a lock of a kind on a byte; returns the kind as the kernel left it.
fn request(fd: BorrowedFd<'_>, command: libc::c_int, kind: libc::c_int, byte: u32) -> std::io::Result<libc::c_int> {
    // SAFETY: plain integers, for which 0 is a value; l_pid must be 0 in a request of this kind.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = libc::off_t::from(byte);
    lock.l_len = 1;
    // SAFETY: the kernel reads and writes one `flock`, a local variable.
    let done = unsafe { libc::fcntl(fd.as_raw_fd(), command, &mut lock) };
    if done == -1 { Err(std::io::Error::last_os_error()) } else { Ok(libc::c_int::from(lock.l_type)) }
}
