//! System calls that fail, as in a sandbox: a seccomp filter for the calling thread and those that it starts later. The
//! filter is permanent, so use it in a thread or a process that ends.

/// Makes this system call fail with `errno`.
pub fn refuse(call: libc::c_long, errno: i32) {
    filter(vec![load(0), jump(libc::BPF_JEQ, 0, 1, call as u32), fail(errno), allow()]);
}

/// Makes this system call fail with `errno` where argument `argument`, counted from 0, is `value`.
pub fn refuse_where(call: libc::c_long, argument: u32, value: u32, errno: i32) {
    refuse_by(libc::BPF_JEQ, call, argument, value, errno);
}

/// As [`refuse_where`], where the argument has one of the `flags`.
pub fn refuse_flags(call: libc::c_long, argument: u32, flags: u32, errno: i32) {
    refuse_by(libc::BPF_JSET, call, argument, flags, errno);
}

fn refuse_by(test: u32, call: libc::c_long, argument: u32, value: u32, errno: i32) {
    let is_this_call = jump(libc::BPF_JEQ, 0, 3, call as u32);
    // The arguments begin at byte 16; of each the low half, as the machine is little-endian.
    filter(vec![load(0), is_this_call, load(16 + 8 * argument), jump(test, 0, 1, value), fail(errno), allow()]);
}

fn load(offset: u32) -> libc::sock_filter {
    instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, offset)
}

fn jump(test: u32, if_true: u8, if_false: u8, value: u32) -> libc::sock_filter {
    instruction(libc::BPF_JMP | test | libc::BPF_K, if_true, if_false, value)
}

fn fail(errno: i32) -> libc::sock_filter {
    instruction(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | errno as u32)
}

fn allow() -> libc::sock_filter {
    instruction(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW)
}

fn instruction(code: u32, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt, jf, k }
}

fn filter(mut program: Vec<libc::sock_filter>) {
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: `program` outlives the calls, and the kernel copies it.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &filter), 0);
    }
}
