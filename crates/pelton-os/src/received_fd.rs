//! Descriptors that a peer sent. The last close of a file that another user chose may block as long as that user likes:
//! at a socket that lingers, or a file server that does not reply. So a descriptor is closed by a thread that may
//! block, unless it is known to be harmless.

use crate::fork::{self, Owner};
use crate::mutex::locked;
use crate::thread::block_signals;
use std::collections::{BTreeMap, VecDeque};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::{Duration, Instant};

/// A descriptor of which only the sender's user is known. Another thread closes it when it is dropped.
#[derive(Debug)]
pub struct ReceivedFd {
    fd: ManuallyDrop<OwnedFd>,
    /// `None`: it comes from this process.
    uid: Option<u32>,
    owner: Owner,
}

impl ReceivedFd {
    /// One that a peer of that uid sent.
    pub fn of_peer(fd: OwnedFd, uid: u32) -> std::io::Result<ReceivedFd> {
        Ok(ReceivedFd { fd: ManuallyDrop::new(fd), uid: Some(uid), owner: Owner::current()? })
    }

    /// One from a thread of this process: its last close is as if that thread had closed it.
    pub fn of_thread(fd: OwnedFd) -> std::io::Result<ReceivedFd> {
        Ok(ReceivedFd { fd: ManuallyDrop::new(fd), uid: None, owner: Owner::current()? })
    }

    /// How many descriptors of that sender wait to be closed, if that takes too long.
    pub fn overdue(&self) -> Option<usize> {
        self.uid.and_then(overdue)
    }

    /// For a caller that has checked what it is, or accepts anything.
    pub fn into_owned(self) -> OwnedFd {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: taken once, here; `this` is not dropped, so nothing takes it again.
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

/// Descriptors of one uid that wait to be closed.
#[derive(Debug, Default)]
struct CloseQueue {
    waiting: VecDeque<OwnedFd>,
    /// Since when a thread has been closing one.
    since: Option<Instant>,
}

/// Of one process: a forked child has none of the threads, and perhaps a lock that is never released.
#[derive(Debug)]
struct CloseQueues {
    owner: Owner,
    by_uid: Mutex<BTreeMap<u32, CloseQueue>>,
}

/// If this number waits behind one whose close takes longer than [`LONG`], that uid gets no new connection.
const WAITING_MAX: usize = 64;
const LONG: Duration = Duration::from_secs(1);

static QUEUES: AtomicPtr<CloseQueues> = AtomicPtr::new(std::ptr::null_mut());

/// Those of this process, if it has needed any.
fn existing_queues() -> Option<&'static CloseQueues> {
    // SAFETY: null, or created by `queues` and never freed.
    unsafe { QUEUES.load(Ordering::Acquire).as_ref() }.filter(|queues| queues.owner.is_current())
}

fn queues() -> std::io::Result<&'static CloseQueues> {
    let found = QUEUES.load(Ordering::Acquire);
    if let Some(queues) = existing_queues() {
        return Ok(queues);
    }
    let made = Box::into_raw(Box::new(CloseQueues { owner: Owner::current()?, by_uid: Mutex::default() }));
    match QUEUES.compare_exchange(found, made, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: just created, and never freed from here on.
        Ok(_) => Ok(unsafe { &*made }),
        Err(other) => {
            // SAFETY: just created, and known to no other thread.
            drop(unsafe { Box::from_raw(made) });
            // SAFETY: another thread of this process created it, and it is never freed. No child was forked between the
            // load and here that runs this.
            Ok(unsafe { &*other })
        }
    }
}

/// Closes a descriptor that `uid` sent, in a thread for that uid. Does not wait.
pub(crate) fn close_elsewhere(fd: OwnedFd, uid: u32) {
    let Ok(queues) = queues() else { return drop(fd) };
    let mut by_uid = locked(&queues.by_uid);
    let queue = by_uid.entry(uid).or_default();
    queue.waiting.push_back(fd);
    if queue.since.is_none() {
        queue.since = Some(Instant::now());
        if !starts_thread(uid) {
            // Nothing may stay open. A caller without threads left has to wait.
            drop(by_uid);
            close_all_of(queues, uid);
        }
    }
}

/// Starts a thread that closes the descriptors of `uid`. By a system call: a thread of the standard library aborts the
/// process if it has no memory for its start, and resources may be missing just here.
fn starts_thread(uid: u32) -> bool {
    extern "C" fn run(uid: *mut libc::c_void) -> *mut libc::c_void {
        block_signals();
        // SAFETY: a name of less than 16 bytes that ends with 0.
        unsafe { libc::pthread_setname_np(libc::pthread_self(), c"pelton-close".as_ptr()) };
        if let Ok(queues) = queues() {
            close_all_of(queues, uid.addr() as u32);
        }
        std::ptr::null_mut()
    }
    let mut thread = MaybeUninit::uninit();
    // SAFETY: only the thread's handle is passed by pointer; the number is passed as an address that is never read. The
    // thread is detached once.
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

fn close_all_of(queues: &CloseQueues, uid: u32) {
    let mut by_uid = locked(&queues.by_uid);
    while let Some(queue) = by_uid.get_mut(&uid) {
        let Some(fd) = queue.waiting.pop_front() else {
            by_uid.remove(&uid);
            return;
        };
        queue.since = Some(Instant::now());
        drop(by_uid);
        let _ = fork::close_with_result(fd);
        by_uid = locked(&queues.by_uid);
    }
}

/// How many descriptors of `uid` wait to be closed, if the one before them takes so long that no more should come.
pub fn overdue(uid: u32) -> Option<usize> {
    let by_uid = locked(&existing_queues()?.by_uid);
    let queue = by_uid.get(&uid).filter(|queue| queue.waiting.len() >= WAITING_MAX)?;
    queue.since.is_some_and(|since| since.elapsed() > LONG).then_some(queue.waiting.len())
}
