//! Descriptors that a peer sent. Of a file that somebody else chose even the last close may wait as long as that one likes: at a socket that
//! lingers, or a file server that does not answer. So what is not known to be harmless is closed by a thread that may wait.

use crate::fork::{self, Owner};
use crate::mutex::locked;
use crate::thread::block_signals;
use std::collections::{BTreeMap, VecDeque};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::{Duration, Instant};

/// A descriptor of which nothing is known but who sent it. Dropped, it is closed by another thread.
#[derive(Debug)]
pub struct ReceivedFd {
    fd: ManuallyDrop<OwnedFd>,
    /// Nobody: it comes from this process.
    uid: Option<u32>,
    owner: Owner,
}

impl ReceivedFd {
    /// One that a peer of that uid sent.
    pub fn of_peer(fd: OwnedFd, uid: u32) -> std::io::Result<ReceivedFd> {
        Ok(ReceivedFd { fd: ManuallyDrop::new(fd), uid: Some(uid), owner: Owner::current()? })
    }

    /// One that came from a thread of this process: its last close is as if that thread had closed it.
    pub fn of_thread(fd: OwnedFd) -> std::io::Result<ReceivedFd> {
        Ok(ReceivedFd { fd: ManuallyDrop::new(fd), uid: None, owner: Owner::current()? })
    }

    /// How many of who sent it wait to be closed, if that takes too long.
    pub fn overdue(&self) -> Option<usize> {
        self.uid.and_then(overdue)
    }

    /// For who has found out what it is, or is told that it may be anything.
    pub fn into_owned(self) -> OwnedFd {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: taken once, here; what is not dropped any more does not take it again.
        unsafe { ManuallyDrop::take(&mut this.fd) }
    }
}

impl AsFd for ReceivedFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for ReceivedFd {
    fn drop(&mut self) {
        // SAFETY: taken once, here.
        let fd = unsafe { ManuallyDrop::take(&mut self.fd) };
        match self.uid {
            // A forked child's copy is not the last one.
            Some(uid) if self.owner.is_current() => close_elsewhere(fd, uid),
            _ => drop(fd),
        }
    }
}

/// What waits to be closed, of one uid.
#[derive(Debug, Default)]
struct Line {
    waiting: VecDeque<OwnedFd>,
    /// Since when a thread has been closing one.
    since: Option<Instant>,
}

/// Of one process: a forked child has none of the threads, and perhaps a lock that nobody gives back.
#[derive(Debug)]
struct Lines {
    owner: Owner,
    by_uid: Mutex<BTreeMap<u32, Line>>,
}

/// So many may wait behind one whose close takes longer than [`LONG`] before their uid is told to stay away.
const WAITING_MAX: usize = 64;
const LONG: Duration = Duration::from_secs(1);

static LINES: AtomicPtr<Lines> = AtomicPtr::new(std::ptr::null_mut());

/// This process's, if it has needed any.
fn present_lines() -> Option<&'static Lines> {
    // SAFETY: null, or made by `lines` and never freed.
    unsafe { LINES.load(Ordering::Acquire).as_ref() }.filter(|lines| lines.owner.is_current())
}

fn lines() -> std::io::Result<&'static Lines> {
    let found = LINES.load(Ordering::Acquire);
    if let Some(lines) = present_lines() {
        return Ok(lines);
    }
    let made = Box::into_raw(Box::new(Lines { owner: Owner::current()?, by_uid: Mutex::default() }));
    match LINES.compare_exchange(found, made, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: just made, and never freed from here on.
        Ok(_) => Ok(unsafe { &*made }),
        Err(other) => {
            // SAFETY: just made, and given to nobody.
            drop(unsafe { Box::from_raw(made) });
            // SAFETY: as above. No child was forked between the load and here that runs this.
            Ok(unsafe { &*other })
        }
    }
}

/// Closes what `uid` sent, in a thread of that uid's. Does not wait.
pub(crate) fn close_elsewhere(fd: OwnedFd, uid: u32) {
    let Ok(lines) = lines() else { return drop(fd) };
    let mut by_uid = locked(&lines.by_uid);
    let line = by_uid.entry(uid).or_default();
    line.waiting.push_back(fd);
    if line.since.is_none() {
        line.since = Some(Instant::now());
        if !starts_thread(uid) {
            // Nothing is to be left open. Who has brought this process to where it gets no thread need not do this, too.
            drop(by_uid);
            close_all_of(lines, uid);
        }
    }
}

/// Starts a thread that closes what `uid` sent. By the system's own call: a thread of the standard library ends the process where it finds no memory for
/// its beginnings, and this is done just when something is lacking.
fn starts_thread(uid: u32) -> bool {
    extern "C" fn run(uid: *mut libc::c_void) -> *mut libc::c_void {
        block_signals();
        // SAFETY: a name of less than 16 bytes that ends with 0.
        unsafe { libc::pthread_setname_np(libc::pthread_self(), c"pelton-close".as_ptr()) };
        if let Ok(lines) = lines() {
            close_all_of(lines, uid.addr() as u32);
        }
        std::ptr::null_mut()
    }
    let mut thread = MaybeUninit::uninit();
    // SAFETY: nothing is pointed to but the thread, the number going as an address that is never read. What was made is detached once.
    unsafe {
        let made = libc::pthread_create(
            thread.as_mut_ptr(),
            std::ptr::null(),
            run,
            std::ptr::without_provenance_mut(uid as usize),
        );
        made == 0 && libc::pthread_detach(thread.assume_init()) == 0
    }
}

fn close_all_of(lines: &Lines, uid: u32) {
    let mut by_uid = locked(&lines.by_uid);
    while let Some(line) = by_uid.get_mut(&uid) {
        let Some(fd) = line.waiting.pop_front() else {
            by_uid.remove(&uid);
            return;
        };
        line.since = Some(Instant::now());
        drop(by_uid);
        let _ = fork::close_and_tell(fd);
        by_uid = locked(&lines.by_uid);
    }
}

/// How many descriptors of `uid`'s wait to be closed, if the one before them takes so long that there should be no more.
pub fn overdue(uid: u32) -> Option<usize> {
    let by_uid = locked(&present_lines()?.by_uid);
    let line = by_uid.get(&uid).filter(|line| line.waiting.len() >= WAITING_MAX)?;
    line.since.is_some_and(|since| since.elapsed() > LONG).then_some(line.waiting.len())
}
