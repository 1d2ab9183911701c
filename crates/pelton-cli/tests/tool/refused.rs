//! The tool in a sandbox: each command with one system call refused. The command works, or fails with the reason; it
//! never hangs.

use crate::test_dirs;
use pelton_testkit::{Process, ProgramDirs, seccomp};

/// A system call, or a call with one value of one argument.
type Call = (&'static str, libc::c_long, Option<(u32, u32)>);

/// Starts the program with `call` refused by the kernel. The filter belongs to a thread, and its child processes
/// inherit it.
fn start_without(dirs: &ProgramDirs, call: Call, errno: i32, arguments: &[&str]) -> Process {
    std::thread::scope(|scope| {
        let start = || {
            match call {
                (_, number, None) => seccomp::refuse(number, errno),
                (_, number, Some((argument, value))) => seccomp::refuse_where(number, argument, value, errno),
            }
            dirs.start(arguments)
        };
        scope.spawn(start).join().unwrap()
    })
}

#[test]
fn a_command_without_a_system_call_works_or_reports_the_reason() {
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
        // EACCES: the error of AppArmor and SELinux.
        for errno in [libc::EPERM, libc::ENOSYS, libc::EACCES] {
            let dirs = test_dirs();
            dirs.file("from", &[b'x'; 100_000]);
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
                    let mut sender = dirs.start(&["send", "path:there"]);
                    sender.write_all_and_close(b"1\n2\n".to_vec());
                    sender.wait().assert(0, &[]);
                }
                let ended = start_without(&dirs, *call, errno, arguments).finish();
                let shown = format!("{arguments:?} without {} ({errno}): {ended:?}", call.0);
                match ended.code() {
                    Some(0) if arguments[0] == "recv" => assert!(ended.stdout.ends_with(b"1\n2\n"), "{shown}"),
                    Some(0) if arguments[0] == "cp" => {
                        assert_eq!(std::fs::read(dirs.path("work/to")).unwrap(), [b'x'; 100_000], "{shown}");
                    }
                    Some(0) => {}
                    // EACCES of a file: bad input.
                    Some(2) if arguments[0] == "flush" => {
                        assert!(ended.stderr.contains("Permission denied"), "{shown}");
                    }
                    Some(3..=5) => assert!(ended.stderr.starts_with("pelton: "), "{shown}"),
                    _ => panic!("{shown}"),
                }
            }
        }
    }
}

#[test]
fn a_listener_that_may_not_stat_its_directory_fails() {
    for command in [&["recv", "it"][..], &["serve", "it", "--exec", "cat"]] {
        let dirs = test_dirs();
        let ended = start_without(&dirs, ("fstat", libc::SYS_fstat, None), libc::EPERM, command).wait();
        ended.assert(5, &["looking at", "Operation not permitted"]);
        dirs.assert_nothing_left();
    }
}

#[test]
fn a_receiver_that_may_not_read_peer_credentials_fails_and_refuses_the_peer() {
    let dirs = test_dirs();
    let call = ("getsockopt(SO_PEERCRED)", libc::SYS_getsockopt, Some((2, libc::SO_PEERCRED as u32)));
    let receiver = start_without(&dirs, call, libc::EPERM, &["recv", "it"]);
    dirs.run(&["send", "it"]).assert(3, &["asking who the peer is"]);
    receiver.wait().assert(5, &["asking who the peer is", "Operation not permitted"]);
}
