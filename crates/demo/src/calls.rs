//! Counts the system calls of a thread, for any user: a seccomp filter turns each call into a signal, SIGSYS, whose
//! handler counts the call and makes it. A call then takes about a microsecond longer, so timed runs do not count.
//!
//! The kernel's tracepoints and `perf_event_open` cost less, but commonly only root may use them; a tracer (`ptrace`)
//! costs five times as much, which changes how often a receiver finds several lines at once.

/// Counts the system calls of this thread from now until it ends. The thread may then start no other. Returns false if
/// that cannot be done here.
pub fn count() -> bool {
    imp::count()
}

/// The system calls so far.
pub fn counted() -> u64 {
    imp::COUNT.load(std::sync::atomic::Ordering::Relaxed)
}

#[cfg(target_arch = "x86_64")]
mod imp {
    use libc::{REG_R8, REG_R9, REG_R10, REG_RAX, REG_RDI, REG_RDX, REG_RSI, c_int, c_void};
    use std::sync::atomic::{AtomicU64, Ordering};

    // Relaxed: only one thread counts.
    pub static COUNT: AtomicU64 = AtomicU64::new(0);

    // Makes the system call whose number and six arguments are at `registers`. The filter allows calls that come from
    // here: the address after the instruction is `after_system_call`.
    std::arch::global_asm!(
        "system_call:",
        "mov rax, [rdi]",
        "mov rsi, [rdi + 16]",
        "mov rdx, [rdi + 24]",
        "mov r10, [rdi + 32]",
        "mov r8, [rdi + 40]",
        "mov r9, [rdi + 48]",
        "mov rdi, [rdi + 8]",
        "syscall",
        "after_system_call:",
        "ret",
    );
    unsafe extern "C" {
        fn system_call(registers: *const i64) -> i64;
        safe static after_system_call: u8;
    }

    extern "C" fn on_system_call(_signal: c_int, _info: *mut libc::siginfo_t, context: *mut c_void) {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the kernel passes a handler with SA_SIGINFO a ucontext_t, which the handler may change.
        let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
        let call = [REG_RAX, REG_RDI, REG_RSI, REG_RDX, REG_R10, REG_R8, REG_R9].map(|name| registers[name as usize]);
        // SAFETY: the thread was about to make this very call, and finds its result where it expects it.
        registers[REG_RAX as usize] = unsafe { system_call(call.as_ptr()) };
    }

    pub fn count() -> bool {
        let instruction = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
        let load = |offset| instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, offset);
        let jump = |equal, other, to| instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, equal, other, to);
        let end = |action| instruction(libc::BPF_RET | libc::BPF_K, 0, 0, action);
        let after = &raw const after_system_call as u64;
        // struct seccomp_data: the number at offset 0, the address after the instruction at 8.
        let mut program = [
            load(0),
            jump(4, 0, libc::SYS_rt_sigreturn as u32),
            load(8),
            jump(0, 3, after as u32),
            load(12),
            jump(0, 1, (after >> 32) as u32),
            end(libc::SECCOMP_RET_ALLOW),
            end(libc::SECCOMP_RET_TRAP),
        ];
        let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
        // SAFETY: zeros are a valid sigaction; its pointers and that of the filter are to live values, which the kernel
        // copies. The handler makes system calls by `system_call` only, which the filter allows.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_system_call as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            libc::sigaction(libc::SIGSYS, &action, std::ptr::null_mut()) == 0
                && libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &filter) == 0
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod imp {
    use std::sync::atomic::AtomicU64;

    pub static COUNT: AtomicU64 = AtomicU64::new(0);

    pub fn count() -> bool {
        false
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn each_system_call_of_the_thread_is_counted_and_returns_its_result() {
        let counting = std::thread::spawn(|| {
            assert!(count());
            let before = counted();
            for _ in 0..100 {
                let _ = rustix::process::getppid();
            }
            let after_hundred = counted();
            let error = std::fs::File::open("/nonexistent/file").unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
            (before, after_hundred, counted())
        });
        let (before, after_hundred, after_open) = counting.join().unwrap();
        assert_eq!((before, after_hundred, after_open), (0, 100, 101));
        // The others are not filtered.
        let _ = rustix::process::getppid();
        assert!(counted() < 200, "{}", counted());
    }
}
