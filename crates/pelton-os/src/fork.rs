//! The owner of a handle: a forked child inherits the memory of its parent's handles, but is not a second owner.
//!
//! A word in a page that the kernel wipes in a child (MADV_WIPEONFORK) identifies the process, even after a raw
//! `clone`. Each handle keeps the word's value from its creation. A child of `fork` also closes the descriptors that it
//! inherited. So its parent's peers detect the parent's death, and its listeners' sockets do not stay open.

use crate::mutex::locked;
use std::collections::BTreeSet;
use std::os::fd::{AsRawFd, IntoRawFd as _, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};

/// The process that made a handle, and whether the handle is still in use.
#[derive(Debug, Clone, Copy)]
pub struct Owner {
    word: &'static AtomicU32,
    /// The word's value in the process that made the handle.
    token: u32,
    /// The same while the handle is in use, else RETIRED.
    current: u32,
}

/// A token that the word never has.
const RETIRED: u32 = u32::MAX;

impl Owner {
    /// This process.
    pub fn current() -> std::io::Result<Owner> {
        let word = word()?;
        // A wiped word belongs to a child that makes its first handle: it gets a new value, different from those of all
        // its ancestors.
        if word.load(Ordering::Relaxed) == 0 {
            static LAST: AtomicU32 = AtomicU32::new(0);
            let _ = word.compare_exchange(
                0,
                LAST.fetch_add(1, Ordering::Relaxed) + 1,
                Ordering::Relaxed,
                Ordering::Relaxed,
            );
        }
        let token = word.load(Ordering::Relaxed);
        Ok(Owner { word, token, current: token })
    }

    /// Whether the handle is in the process that made it, and in use. Relaxed: a fork is no store of another thread.
    #[inline(always)]
    pub fn is_current(&self) -> bool {
        self.word.load(Ordering::Relaxed) == self.current
    }

    /// Whether this is a child of the process that made the handle.
    pub fn is_forked(&self) -> bool {
        self.word.load(Ordering::Relaxed) != self.token
    }

    /// Undoes [`Owner::retire`].
    pub fn reinstate(&mut self) {
        self.current = self.token;
    }

    /// From now on [`Owner::is_current`] returns false, so that the fast path checks nothing else.
    pub fn retire(&mut self) {
        self.current = RETIRED;
    }
}

fn word() -> std::io::Result<&'static AtomicU32> {
    static WORD: OnceLock<&'static AtomicU32> = OnceLock::new();
    static MAKING: Mutex<()> = Mutex::new(());
    if let Some(word) = WORD.get() {
        return Ok(word);
    }
    // One thread at a time, because handlers of pthread_atfork are never removed. A failure may be temporary: there may
    // be more memory later.
    let _making = locked(&MAKING);
    if let Some(word) = WORD.get() {
        return Ok(word);
    }
    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
    let (bytes, protection) = (rustix::param::page_size(), ProtFlags::READ | ProtFlags::WRITE);
    // SAFETY: a fresh private mapping. Once a reference to its first word was returned, it is never unmapped.
    unsafe {
        let page = mmap_anonymous(std::ptr::null_mut(), bytes, protection, MapFlags::PRIVATE)?;
        let wiped = madvise(page, bytes, Advice::LinuxWipeOnFork).map_err(std::io::Error::from);
        let made =
            wiped.and_then(|()| match libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) {
                0 => Ok(()),
                error => Err(std::io::Error::from_raw_os_error(error)),
            });
        if let Err(error) = made {
            let _ = munmap(page, bytes);
            return Err(error);
        }
        Ok(WORD.get_or_init(|| &*page.cast::<AtomicU32>()))
    }
}

/// Descriptors to close in a child.
static OPEN: Mutex<BTreeSet<RawFd>> = Mutex::new(BTreeSet::new());

thread_local! {
    /// The lock that the forking thread holds across the fork.
    static ACROSS: std::cell::Cell<Option<MutexGuard<'static, BTreeSet<RawFd>>>> = const { std::cell::Cell::new(None) };
}

fn open() -> MutexGuard<'static, BTreeSet<RawFd>> {
    locked(&OPEN)
}

/// Opens a descriptor, or an object with one, and registers it, with no fork in between: a child must not keep a copy
/// of a lock or of a liveness handle.
pub fn opening<T: AsRawFd, E>(opens: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    let mut fds = open();
    let fd = opens()?;
    fds.insert(fd.as_raw_fd());
    Ok(fd)
}

/// Closes a registered descriptor, with no fork in between. Its close must not block: other threads that open, close or
/// fork wait for it.
pub fn close<T: AsRawFd>(fd: T) {
    let mut fds = open();
    fds.remove(&fd.as_raw_fd());
    drop(fd);
}

/// A registered descriptor leaves this crate's ownership.
pub(crate) fn forget(fd: &OwnedFd) {
    open().remove(&fd.as_raw_fd());
}

/// Closes a registered file, and returns the result. That may take long, for instance at a file server; neither a fork
/// nor other threads that open or close wait for it.
///
/// Its number is unregistered while the file is still open, so no other file has that number yet: a child never closes
/// a later file of that number. A child that is forked in between has the file open until it executes a program, like
/// any file of another part of the program. That is why locks and liveness handles use [`close`].
pub(crate) fn close_with_result(fd: OwnedFd) -> rustix::io::Result<()> {
    open().remove(&fd.as_raw_fd());
    // SAFETY: it is owned, and given up here.
    unsafe { rustix::io::try_close(fd.into_raw_fd()) }
}

extern "C" fn before_fork() {
    ACROSS.set(Some(open()));
}

extern "C" fn in_parent() {
    ACROSS.set(None);
}

extern "C" fn in_child() {
    if let Some(mut fds) = ACROSS.take() {
        for fd in std::mem::take(&mut *fds) {
            // SAFETY: the numbers belong to this crate's descriptors, whose inherited handles do nothing any more.
            unsafe { libc::close(fd) };
        }
    }
}
