//! The tool in a sandbox: each command with one system call refused. The command works all the same, or fails and
//! reports why; it never waits for ever.

use crate::place::Place;
use pelton_testkit::{Process, seccomp};

/// A system call, or a call with one value of one argument.
type Call = (&'static str, libc::c_long, Option<(u32, u32)>);

/// Starts the program where the kernel refuses `call`. The filter is of a thread, whose processes inherit it.
fn start_without(place: &Place, call: Call, errno: i32, arguments: &[&str]) -> Process {
    std::thread::scope(|scope| {
        let start = || {
            match call {
                (_, number, None) => seccomp::refuse(number, errno),
                (_, number, Some((argument, value))) => seccomp::refuse_where(number, argument, value, errno),
            }
            place.start(arguments)
        };
        scope.spawn(start).join().unwrap()
    })
}

#[test]
fn a_command_for_which_a_call_is_refused_works_or_says_why_not() {
    const CALLS: &[Call] = &[
        ("fstat", libc::SYS_fstat, None),
        ("fstatfs", libc::SYS_fstatfs, None),
        ("statx", libc::SYS_statx, None),
        ("memfd_create", libc::SYS_memfd_create, None),
        ("eventfd2", libc::SYS_eventfd2, None),
        ("epoll_create1", libc::SYS_epoll_create1, None),
        ("epoll_ctl", libc::SYS_epoll_ctl, None),
        ("membarrier", libc::SYS_membarrier, None),
        ("madvise", libc::SYS_madvise, None),
        ("ftruncate", libc::SYS_ftruncate, None),
        ("fallocate", libc::SYS_fallocate, None),
        ("fchmod", libc::SYS_fchmod, None),
        ("renameat2", libc::SYS_renameat2, None),
        ("mknodat", libc::SYS_mknodat, None),
        ("unlinkat", libc::SYS_unlinkat, None),
        ("pwrite64", libc::SYS_pwrite64, None),
        ("socketpair", libc::SYS_socketpair, None),
        ("copy_file_range", libc::SYS_copy_file_range, None),
        ("io_uring_setup", libc::SYS_io_uring_setup, None),
        ("io_uring_enter", libc::SYS_io_uring_enter, None),
        ("fcntl(F_OFD_GETLK)", libc::SYS_fcntl, Some((1, libc::F_OFD_GETLK as u32))),
        ("fcntl(F_OFD_SETLK)", libc::SYS_fcntl, Some((1, libc::F_OFD_SETLK as u32))),
    ];
    for call in CALLS {
        // EACCES is what AppArmor and SELinux answer.
        for errno in [libc::EPERM, libc::ENOSYS, libc::EACCES] {
            let place = Place::new();
            place.file("from", &[b'x'; 100_000]);
            for arguments in [
                &["send", "path:new"][..],
                &["send", "path:there"],
                &["recv", "--timeout", "9", "path:there"],
                &["flush", "path:there", "records"],
                &["info", "./there"],
                &["recover", "./there"],
                &["rm", "./there"],
                &["cp", "from", "to"],
            ] {
                if arguments.iter().any(|argument| argument.contains("there")) {
                    let mut sender = place.start(&["send", "path:there"]);
                    sender.write_all_and_close(b"1\n2\n".to_vec());
                    sender.wait().assert(0, &[]);
                }
                let ended = start_without(&place, *call, errno, arguments).finish();
                let shown = format!("{arguments:?} without {} ({errno}): {ended:?}", call.0);
                match ended.code() {
                    Some(0) if arguments[0] == "recv" => assert!(ended.stdout.ends_with(b"1\n2\n"), "{shown}"),
                    Some(0) if arguments[0] == "cp" => {
                        assert_eq!(std::fs::read(place.path("work/to")).unwrap(), [b'x'; 100_000], "{shown}");
                    }
                    Some(0) => {}
                    Some(3..=5) => assert!(ended.stderr.starts_with("pelton: "), "{shown}"),
                    _ => panic!("{shown}"),
                }
            }
        }
    }
}

#[test]
fn a_listener_that_may_not_ask_for_its_directory_fails() {
    for command in [&["recv", "it"][..], &["serve", "it", "--exec", "cat"]] {
        let place = Place::new();
        let ended = start_without(&place, ("fstat", libc::SYS_fstat, None), libc::EPERM, command).wait();
        ended.assert(5, &["looking at", "Operation not permitted"]);
        place.assert_nothing_left();
    }
}

#[test]
fn a_receiver_that_may_not_ask_who_its_peer_is_fails_and_the_peer_is_refused() {
    let place = Place::new();
    let call = ("getsockopt(SO_PEERCRED)", libc::SYS_getsockopt, Some((2, libc::SO_PEERCRED as u32)));
    let receiver = start_without(&place, call, libc::EPERM, &["recv", "it"]);
    place.run(&["send", "it"]).assert(3, &["asking who the peer is"]);
    receiver.wait().assert(5, &["asking who the peer is", "Operation not permitted"]);
}
