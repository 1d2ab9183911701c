//! Each system call refused by seccomp, for a channel of each kind.

use super::*;

/// Uses a channel of each kind, with waits and deadlines; returns the result of each part.
pub fn all_of_it(root: &Path) -> Vec<(&'static str, pelton::Result<()>)> {
    // SAFETY: no other thread of this process reads its environment now.
    unsafe { std::env::set_var("XDG_RUNTIME_DIR", root) };
    let soon = || Instant::now() + Duration::from_millis(3);
    let use_both = |mut sender: Sender, mut receiver: Receiver| -> pelton::Result<()> {
        assert_eq!(receiver.receive_until(soon())?.map(|message| message.len()), None);
        std::thread::scope(|scope| {
            let sending = scope.spawn(move || -> pelton::Result<Sender> {
                let mut bytes = Vec::new();
                for number in 0..50 {
                    payload(number, 20_000, &mut bytes);
                    sender.send(&bytes)?;
                }
                sender.wait_released()?;
                Ok(sender)
            });
            let mut wanted = Vec::new();
            for number in 0..50 {
                let received = receiver.receive_until(deadline()).map(|message| {
                    check(number, Sizes::Fixed(20_000), &message.expect("it is sent"), &mut wanted);
                });
                if let Err(error) = received {
                    // Then the other endpoint does not wait for it.
                    drop(receiver);
                    let _ = sending.join().unwrap();
                    return Err(error);
                }
            }
            let mut sender = sending.join().unwrap()?;
            sender.trim()?;
            if receiver.arm()?.is_waiting() {
                assert!(!is_readable(receiver.as_fd()), "nothing waits, and the descriptor is readable");
                sender.send(b"rings")?;
                readable(receiver.as_fd());
            }
            assert_eq!(receiver.try_receive()?.map(|message| message.len()), Some(5));
            while sender.try_send(&[0; 20_000])? == Sent::Sent {}
            assert_eq!(sender.send_until(&[0; 20_000], soon())?, Sent::TimedOut);
            assert!(sender.arm(20_000)?.is_waiting() && !is_readable(sender.as_fd()));
            while receiver.try_receive()?.is_some() {}
            readable(sender.as_fd());
            sender.disarm();
            drop(sender);
            assert!(receiver.receive_until(deadline()).unwrap_err().is_closed());
            Ok(())
        })
    };
    let threads = || -> pelton::Result<()> {
        let (sender, receiver) = Options::new().capacity(SMALL).threads()?;
        use_both(sender, receiver)
    };
    let path = root.join("channel");
    let by_path = || -> pelton::Result<()> {
        let mut sender = small_path().create_sender(&path)?;
        let mut receiver = small_path().open_receiver(&path)?;
        sender.sync()?;
        receiver.sync()?;
        inspect::info(&path)?;
        use_both(sender, receiver)?;
        inspect::check(&path, false)?;
        inspect::remove(&path)
    };
    let connect = |name: &str| -> pelton::Result<()> {
        let listener = Options::new().capacity(SMALL).listen(name)?;
        let (sender, receiver) = std::thread::scope(|scope| {
            let connecting = scope.spawn(|| Options::new().capacity(SMALL).connect_sender(name));
            // A thread that fails at once needs no wait.
            for _ in (0..20).take_while(|_| !connecting.is_finished()) {
                std::thread::sleep(Duration::from_millis(1));
            }
            let mut found = Ok(None);
            while matches!(found, Ok(None)) && !connecting.is_finished() {
                found = listener.accept_receiver_until(Instant::now() + Duration::from_secs(1));
            }
            // The other endpoint does not wait longer.
            drop(listener);
            (connecting.join().unwrap(), found)
        });
        let (mut sender, mut receiver) = (sender?, receiver?.expect("a peer has connected"));
        let null = std::fs::File::open("/dev/null").unwrap();
        sender.send_with_descriptors(b"", &[null.as_fd()])?;
        assert_eq!(receiver.receive_until(deadline())?.expect("sent").take_descriptors()?.len(), 1);
        use_both(sender, receiver)
    };
    let name = format!("unix:{}/s", root.display());
    let done = vec![
        ("threads", threads()),
        ("path", by_path()),
        ("connect", connect(&name)),
        ("connect by a short name", connect("short")),
    ];
    use std::os::unix::fs::FileTypeExt as _;
    let is_socket = |path: &PathBuf| std::fs::symlink_metadata(path).unwrap().file_type().is_socket();
    assert_eq!(all_below(root).into_iter().filter(is_socket).collect::<Vec<_>>(), Vec::<PathBuf>::new());
    if done.iter().all(|(_, done)| done.is_ok()) {
        assert_eq!(all_below(root), Vec::<PathBuf>::new());
    }
    done
}

/// A filter's refusal: one call, always or only with some bits set in one argument.
pub struct Refused {
    pub name: &'static str,
    pub call: libc::c_long,
    /// The argument, and its bits.
    pub flags: Option<(u32, u32)>,
    /// The parts that still work; each other part is an error.
    pub works: &'static [&'static str],
}

const ALL: &[&str] = &["threads", "path", "connect", "connect by a short name"];
const BUT_PATH: &[&str] = &["threads", "connect", "connect by a short name"];
const BUT_CONNECT: &[&str] = &["threads", "path"];
const PATH: &[&str] = &["path"];
const BUT_SHORT: &[&str] = &["threads", "path", "connect"];
pub const NONE: &[&str] = &[];

/// Every system call of the library that some system may refuse, except those without which no program runs.
const REFUSED: &[Refused] = &{
    const fn call(name: &'static str, call: libc::c_long, works: &'static [&'static str]) -> Refused {
        Refused { name, call, flags: None, works }
    }
    const fn with(
        name: &'static str,
        call: libc::c_long,
        flags: (u32, u32),
        works: &'static [&'static str],
    ) -> Refused {
        Refused { name, call, flags: Some(flags), works }
    }
    [
        call("membarrier", libc::SYS_membarrier, ALL),
        call("pidfd_open", libc::SYS_pidfd_open, ALL),
        with("getsockopt(SO_PEERPIDFD)", libc::SYS_getsockopt, (2, 77), ALL),
        with("memfd_create(MFD_NOEXEC_SEAL)", libc::SYS_memfd_create, (1, libc::MFD_NOEXEC_SEAL), ALL),
        call("sched_getaffinity", libc::SYS_sched_getaffinity, ALL),
        call("sched_yield", libc::SYS_sched_yield, ALL),
        call("memfd_create", libc::SYS_memfd_create, PATH),
        call("eventfd2", libc::SYS_eventfd2, NONE),
        call("epoll_create1", libc::SYS_epoll_create1, NONE),
        call("epoll_ctl", libc::SYS_epoll_ctl, NONE),
        call("preadv2", libc::SYS_preadv2, ALL),
        call("madvise", libc::SYS_madvise, NONE),
        #[cfg(target_arch = "x86_64")]
        call("poll", libc::SYS_poll, ALL),
        call("ppoll", libc::SYS_ppoll, NONE),
        call("fallocate", libc::SYS_fallocate, NONE),
        call("renameat2", libc::SYS_renameat2, BUT_PATH),
        call("mknodat", libc::SYS_mknodat, BUT_PATH),
        call("fchmod", libc::SYS_fchmod, BUT_PATH),
        call("fdatasync", libc::SYS_fdatasync, BUT_PATH),
        call("fsync", libc::SYS_fsync, BUT_PATH),
        call("pwrite64", libc::SYS_pwrite64, BUT_PATH),
        call("pread64", libc::SYS_pread64, BUT_PATH),
        with("fcntl(F_OFD_SETLK)", libc::SYS_fcntl, (1, libc::F_OFD_SETLK as u32), BUT_PATH),
        with("fcntl(F_ADD_SEALS)", libc::SYS_fcntl, (1, libc::F_ADD_SEALS as u32), PATH),
        call("flock", libc::SYS_flock, BUT_CONNECT),
        call("socket", libc::SYS_socket, BUT_CONNECT),
        call("bind", libc::SYS_bind, BUT_CONNECT),
        call("listen", libc::SYS_listen, BUT_CONNECT),
        call("connect", libc::SYS_connect, BUT_CONNECT),
        call("accept4", libc::SYS_accept4, BUT_CONNECT),
        call("sendmsg", libc::SYS_sendmsg, BUT_CONNECT),
        call("recvmsg", libc::SYS_recvmsg, BUT_CONNECT),
        call("getsockopt", libc::SYS_getsockopt, BUT_CONNECT),
        call("fstatfs", libc::SYS_fstatfs, &["threads"]),
        call("ftruncate", libc::SYS_ftruncate, NONE),
        call("fstat", libc::SYS_fstat, &["threads"]),
        #[cfg(target_arch = "x86_64")]
        call("mkdir", libc::SYS_mkdir, BUT_SHORT),
    ]
};

/// Has the kernel refuse a call to this thread, and to the threads it creates, from now on.
pub fn refuse(refused: &Refused, errno: i32) {
    match refused.flags {
        None => seccomp::refuse(refused.call, errno),
        // The filter tests flags by mask, and compares numbers.
        Some((argument, flag)) if refused.call == libc::SYS_memfd_create => {
            seccomp::refuse_flags(refused.call, argument, flag, errno);
        }
        Some((argument, number)) => seccomp::refuse_where(refused.call, argument, number, errno),
    }
}

pub fn refused_calls(role: &Role) {
    let refused = REFUSED.iter().find(|refused| refused.name == role.get("call")).unwrap();
    refuse(refused, role.number("errno").unwrap() as i32);
    let log = pelton_testkit::log::Kept::start();
    for (part, done) in all_of_it(Path::new(role.get("at"))) {
        let works = refused.works.contains(&part);
        report(format!("{part}: {}", done.as_ref().err().map_or("well".to_owned(), |error| error.to_string())));
        match done {
            Ok(()) => assert!(works, "{part} works without {}", refused.name),
            Err(error) => assert!(!works, "{part} does not work without {}: {error:?}", refused.name),
        }
    }
    let fallbacks = log.lines().iter().filter(|line| line.starts_with("WARN membarrier is refused")).count();
    assert_eq!(fallbacks, usize::from(refused.name == "membarrier"), "{:?}", log.lines());
    report("end");
}

#[test]
fn each_refused_system_call_has_a_fallback_or_is_an_error() {
    for refused in REFUSED {
        for errno in [libc::EPERM, libc::ENOSYS, libc::EACCES] {
            let dir = TestDir::new("each refused system call has a fallback or is an error");
            let role = role_at("refused", &dir).with("call", refused.name).with("errno", errno);
            let child = Child::start(role);
            loop {
                let line = child.line();
                if line == "end" {
                    break;
                }
                if std::env::var_os("PELTON_SHOW").is_some() {
                    println!("{} ({errno}): {line}", refused.name);
                }
            }
            child.wait_for_success();
        }
    }
}
