//! Where membarrier is refused, by a seccomp filter, both sides fence instead, and no wake-up is lost.

mod support;

use support::race::{figure, ping_pong, run};
use support::*;

/// Has the kernel refuse membarrier to this thread from now on.
fn refuse_membarrier() {
    const fn op(code: u32, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
        libc::sock_filter { code: code as u16, jt, jf, k }
    }
    let refused = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    let mut program = [
        // The number of the system call is the first word.
        op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, libc::SYS_membarrier as u32),
        op(libc::BPF_RET | libc::BPF_K, 0, 0, refused),
        op(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the program lives across the calls, which copy it.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &filter), 0);
        assert_eq!(libc::syscall(libc::SYS_membarrier, 0, 0, 0), -1, "it is refused now");
    }
}

/// Not a test: what a child does. Without a role it does nothing.
#[test]
fn child() {
    let Some(role) = Role::of_this_process() else { return };
    match role.get("refuse") {
        "before" => {
            refuse_membarrier();
            ping_pong(&role, || {});
        }
        "after" => ping_pong(&role, refuse_membarrier),
        _ => ping_pong(&role, || {}),
    }
}

fn exchange(claim: &'static str, refused: [&str; 2]) {
    for how in [How::Block, How::Epoll] {
        let place = Place::new(claim);
        let role = Role::new("ping-pong").with("name", place.name()).with("how", format!("{how:?}"));
        let role = role.with("rounds", 20_000).with("seed", std::process::id());
        let [first, second] = refused.map(|when| role.clone().with("refuse", when));
        let said = run(first, second);
        assert!(said.iter().all(|line| figure(line, "sleeps") > 100), "they hardly slept: {said:?}");
    }
}

#[test]
fn no_wake_up_is_lost_when_the_listening_side_has_no_membarrier() {
    exchange("no_wake_up_is_lost_when_the_listening_side_has_no_membarrier", ["before", "no"]);
}

#[test]
fn no_wake_up_is_lost_when_the_connecting_side_has_no_membarrier() {
    exchange("no_wake_up_is_lost_when_the_connecting_side_has_no_membarrier", ["no", "before"]);
}

#[test]
fn no_wake_up_is_lost_when_neither_side_has_membarrier() {
    exchange("no_wake_up_is_lost_when_neither_side_has_membarrier", ["before", "before"]);
}

#[test]
fn no_wake_up_is_lost_when_membarrier_is_taken_away_later() {
    exchange("no_wake_up_is_lost_when_membarrier_is_taken_away_later", ["after", "no"]);
    exchange("no_wake_up_is_lost_when_membarrier_is_taken_away_later", ["no", "after"]);
    exchange("no_wake_up_is_lost_when_membarrier_is_taken_away_later", ["after", "before"]);
}
