//! pelton's interface to the operating system: memory, descriptors, sockets, locks, barriers, and state after a fork.
//!
//! All `unsafe` of system calls, mappings and the memory of kernel operations lives here. The rest of the crate uses
//! `unsafe` where:
//! - a lane gets its memory, or a control page is written or read: `sender.rs`, `lanes.rs`, `handshake.rs`,
//!   `inspect.rs`, `directory/pages.rs`;
//! - an endpoint lends or copies bytes of its lane: `sender/`, `receiver/`, `receiver.rs`;
//! - FFI uses messages and reservations without borrows: `raw.rs`, in several places;
//! - calls lend a client's session, reply without its lock, or extend a borrow: `call/`;
//! - Tokio registers a descriptor: `tokio.rs`.

mod bell;
mod buffer;
mod descriptor;
mod errno;
mod foreign;
mod fork;
pub(crate) mod lock;
pub(crate) mod membarrier;
mod ring;
mod segment;
pub(crate) mod socket;
mod syncer;
mod timer;
mod user;

#[cfg(not(thread_sanitizer))]
use std::sync::PoisonError;
#[cfg(thread_sanitizer)]
use std::sync::TryLockError;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

pub(crate) use bell::{Bell, Event, Nudge, Pollable, Ready, poll_until};
pub use buffer::Buffer;
pub(crate) use descriptor::Descriptor;
pub(crate) use errno::errno_name;
pub(crate) use foreign::{Foreign, overdue};
pub(crate) use fork::Owner;
pub(crate) use ring::Ring;
pub(crate) use segment::{Kind, PIECE, Segment, allocate, can_allocate, check_file_size, write_at};
pub(crate) use syncer::{Syncer, sync};
pub(crate) use timer::Timer;
pub(crate) use user::{anybodys_in_words, is_anybodys, own_uid};

/// Takes a lock, also one whose holder panicked: nothing that this crate keeps under a lock is left half done by that.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // ThreadSanitizer does not see what a thread waits for inside the standard library, which comes without it, and takes what is
    // done under the lock for a race. What is tried is compiled here, where it sees it.
    #[cfg(thread_sanitizer)]
    loop {
        match mutex.try_lock() {
            Ok(guard) => return guard,
            Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => std::thread::yield_now(),
        }
    }
    #[cfg(not(thread_sanitizer))]
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Gives a lock up until somebody has said that there may be something, or as much time has passed as is left, and takes it again; or for
/// nothing. What the others did meanwhile is seen by the lock alone, which they gave back: `said` only wakes, and says nothing of memory.
pub(crate) fn wait_on<'a, T>(
    said: &Condvar,
    mutex: &'a Mutex<T>,
    guard: MutexGuard<'a, T>,
    left: Option<Duration>,
) -> MutexGuard<'a, T> {
    // As above: that the lock was given up, and taken again, is seen only of what is compiled here.
    #[cfg(thread_sanitizer)]
    {
        let _ = said;
        drop(guard);
        std::thread::sleep(left.unwrap_or(Duration::MAX).min(Duration::from_millis(1)));
        locked(mutex)
    }
    #[cfg(not(thread_sanitizer))]
    {
        let _ = mutex;
        match left {
            None => said.wait(guard).unwrap_or_else(PoisonError::into_inner),
            Some(left) => said.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0,
        }
    }
}

/// Leaves all signals to the program's own threads, in one that is not.
pub(crate) fn block_signals() {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the set is filled before it is used, and lives as long as the calls.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), std::ptr::null_mut());
    }
}

/// Nanoseconds of CLOCK_MONOTONIC. By the C library: what asks the vDSO itself ends a program under valgrind, which has taken that away.
pub(crate) fn monotonic_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: fills a struct of ours; this clock is always there.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Asks the processor to let the other side go first, in a loop that spins.
#[inline(always)]
pub(crate) fn relax() {
    std::hint::spin_loop();
}

/// Whether this thread and the peer's process have more than one processor between them. On a single one, spinning only
/// keeps the other side from running. Each alone may well be pinned to one.
pub(crate) fn has_two_processors(peer_pid: u32) -> bool {
    use rustix::process::Pid;
    use rustix::thread::{CpuSet, sched_getaffinity};
    let own = sched_getaffinity(None);
    // On a path channel it is what the peer's page says: anything.
    let peer = i32::try_from(peer_pid).ok().and_then(Pid::from_raw).map(|pid| sched_getaffinity(Some(pid)));
    let allows = |set: &rustix::io::Result<CpuSet>, cpu| set.as_ref().is_ok_and(|set| set.is_set(cpu));
    let union = (0..CpuSet::MAX_CPU)
        .filter(|cpu| allows(&own, *cpu) || peer.as_ref().is_some_and(|peer| allows(peer, *cpu)))
        .count();
    union > 1
}

/// The lane's view of four segments.
pub(crate) fn lane_memory(
    page: &Segment,
    consumer: &Segment,
    receiver: &Segment,
    data: &Segment,
) -> pelton_lane::Memory {
    pelton_lane::Memory {
        producer: page.base().cast(),
        consumer: consumer.base().cast(),
        receiver: receiver.base().cast(),
        // SAFETY: the segment's mapping is as long as its size, page-aligned, and kept by whoever keeps the lane.
        data: unsafe { pelton_lane::Data::new(data.base(), data.bytes()) },
    }
}
