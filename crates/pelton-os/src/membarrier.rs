//! The heavy half of the asymmetric barrier: a sleeper makes every running thread of registered processes pass a
//! barrier.

use crate::LOG_TARGET;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

const GLOBAL_EXPEDITED: libc::c_int = 1 << 1;
const REGISTER_GLOBAL_EXPEDITED: libc::c_int = 1 << 2;

fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: the call takes no pointers.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

/// Registers this process, once: from then on other processes' barriers reach its threads. Returns false where the
/// kernel or a seccomp filter refuses; then both sides fence.
pub fn register() -> bool {
    static PROCESS: AtomicU32 = AtomicU32::new(0);
    let process = std::process::id();
    // A forked child is another process, to be registered again.
    if PROCESS.load(Ordering::Relaxed) == process {
        return true;
    }
    let registered = membarrier(REGISTER_GLOBAL_EXPEDITED) && membarrier(GLOBAL_EXPEDITED);
    if registered {
        PROCESS.store(process, Ordering::Relaxed);
    } else {
        // No Once, in which others would wait for the logger. Relaxed: it publishes no other memory.
        static HAS_LOGGED: AtomicBool = AtomicBool::new(false);
        let error = std::io::Error::last_os_error();
        if !HAS_LOGGED.swap(true, Ordering::Relaxed) {
            log::warn!(
                target: LOG_TARGET,
                "membarrier is refused ({error}): the channels of this process fence for each message, which is slower; permit membarrier in its seccomp filter"
            );
        }
    }
    registered
}

/// The barrier itself: 0.2 to 2 µs. Where it is refused, this is a full fence of this thread only, and returns false.
pub fn barrier() -> bool {
    let everywhere = membarrier(GLOBAL_EXPEDITED);
    if !everywhere {
        std::sync::atomic::fence(Ordering::SeqCst);
    }
    everywhere
}
