//! The calling thread: its signals, its processors, its spin loops.

/// In a thread of the library: leaves all signals to the program's own threads.
pub fn block_signals() {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the set is filled before it is used, and lives as long as the calls.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), std::ptr::null_mut());
    }
}

/// A hint to the processor, in a loop that spins.
#[inline(always)]
pub fn relax() {
    std::hint::spin_loop();
}

/// The number of the processor that this thread runs on, if it is known. Takes some nanoseconds, usually without a
/// system call.
pub fn processor() -> Option<u32> {
    // SAFETY: it takes no argument. Not rustix's, which makes a system call; the C library reads it from rseq.
    u32::try_from(unsafe { libc::sched_getcpu() }).ok()
}

/// Whether this thread and the peer's process have more than one processor between them. On a single one, spinning only
/// keeps the other side from running. Each alone may be pinned to one.
pub fn has_two_processors(peer_pid: u32) -> bool {
    use rustix::process::Pid;
    use rustix::thread::{CpuSet, sched_getaffinity};
    let own = sched_getaffinity(None);
    // On a path channel the peer's page states it: it may be anything.
    let peer = i32::try_from(peer_pid).ok().and_then(Pid::from_raw).map(|pid| sched_getaffinity(Some(pid)));
    let allows = |set: &rustix::io::Result<CpuSet>, cpu| set.as_ref().is_ok_and(|set| set.is_set(cpu));
    let union = (0..CpuSet::MAX_CPU)
        .filter(|cpu| allows(&own, *cpu) || peer.as_ref().is_some_and(|peer| allows(peer, *cpu)))
        .count();
    union > 1
}
