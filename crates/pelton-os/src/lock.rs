//! Locks that end with their holder, however it ends: open-file-description locks on the first byte of a file.
//!
//! Such a lock belongs to a file description, not to a process: two of one process exclude each other too, and closing
//! some other descriptor of the file does not give it back. What keeps the description keeps the lock, so it must be one
//! of the lock's own: a mapping keeps its description, and a forked child keeps the mapping.

use crate::descriptor::Descriptor;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

/// A lock that this process has.
#[derive(Debug)]
pub struct Lock(Descriptor);

impl AsFd for Lock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Said, not left to the closing: a child on its way to exec may have the description for a moment longer. A forked
        // child's copy is the same lock, and not its to give back.
        if self.0.is_own() {
            let _ = request(self.0.as_fd(), libc::F_OFD_SETLK, libc::F_UNLCK);
            pelton_lane::failpoint("lock: given back");
        }
    }
}

/// Takes the lock with a description opened for it, for writing. `None`: somebody has it.
pub fn try_lock(lock: Descriptor) -> std::io::Result<Option<Lock>> {
    match request(lock.as_fd(), libc::F_OFD_SETLK, libc::F_WRLCK) {
        Ok(_) => Ok(Some(Lock(lock))),
        Err(error) if is_held(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether another description has the lock. Linux reports that by EAGAIN alone; EACCES is a security module's that permits no locks.
fn is_held(error: &std::io::Error) -> bool {
    error.raw_os_error() == Some(libc::EAGAIN)
}

/// As [`try_lock`], tried again each millisecond until `deadline`: the kernel has no lock with a deadline.
pub fn lock_until(lock: Descriptor, deadline: Instant) -> std::io::Result<Option<Lock>> {
    loop {
        match request(lock.as_fd(), libc::F_OFD_SETLK, libc::F_WRLCK) {
            Ok(_) => return Ok(Some(Lock(lock))),
            Err(error) if !is_held(&error) => return Err(error),
            Err(_) if Instant::now() >= deadline => return Ok(None),
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// As [`try_lock`], after waiting until nobody has it.
pub fn lock(lock: Descriptor) -> std::io::Result<Lock> {
    loop {
        match request(lock.as_fd(), libc::F_OFD_SETLKW, libc::F_WRLCK) {
            Ok(_) => return Ok(Lock(lock)),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Whether somebody has the lock, but for who holds this very description. Takes nothing; reading is enough.
pub fn is_locked(fd: BorrowedFd<'_>) -> std::io::Result<bool> {
    Ok(request(fd, libc::F_OFD_GETLK, libc::F_WRLCK)? != libc::F_UNLCK)
}

/// Asks for a lock of a kind on the first byte; answers the kind as the kernel left it.
fn request(fd: BorrowedFd<'_>, command: libc::c_int, kind: libc::c_int) -> std::io::Result<libc::c_int> {
    // SAFETY: plain integers, for which 0 is a value; l_pid must be 0 in a request of this kind.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_len = 1;
    // SAFETY: the kernel reads and writes one `flock`, which is ours.
    let done = unsafe { libc::fcntl(fd.as_raw_fd(), command, &mut lock) };
    if done == -1 { Err(std::io::Error::last_os_error()) } else { Ok(libc::c_int::from(lock.l_type)) }
}
