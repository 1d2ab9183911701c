//! Several processes and threads: they have roles, end, are killed, create and remove concurrently, or belong to
//! another user.

use super::*;
use pelton_testkit::{Child, Role, read_line_from_parent, report};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

/// Not a test: the child's program. It does nothing in a process without a role.
#[test]
fn a_child() {
    let Some(role) = Role::of_this_process() else { return };
    let path = Path::new(role.get("path"));
    match role.get("role") {
        "hold" => {
            let directory = open(path).unwrap().unwrap();
            let _roles = (directory.claim_receiver().unwrap(), directory.claim_sender().unwrap());
            let lane = directory.lane_for_receiver(0).unwrap();
            // SAFETY: the page is mapped writable, and this process has the role that may write it.
            unsafe { lane.consumer.base().cast::<ConsumerPage>().as_ref().start_generation(std::process::id()) };
            report("held");
            read_line_from_parent();
        }
        "hold beside children" => {
            let directory = open(path).unwrap().unwrap();
            let _roles = (directory.claim_receiver().unwrap(), directory.claim_sender().unwrap());
            #[allow(clippy::zombie_processes, reason = "it is to outlive this process")]
            let executed =
                Command::new("sleep").arg("1000").stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
            // SAFETY: the child only calls `close` and `pause`, which are async-signal-safe.
            let forked = unsafe { libc::fork() };
            if forked == 0 {
                // SAFETY: nothing in the child uses descriptor 1 after this. The parent's reader must not wait for it.
                unsafe {
                    libc::close(1);
                    loop {
                        libc::pause();
                    }
                }
            }
            report(format!("{} {forked}", executed.id()));
            read_line_from_parent();
        }
        "create" => {
            let directory = create(path, 1).unwrap();
            report(std::fs::metadata(directory.path().join(CHANNEL)).unwrap().ino().to_string());
        }
        "create and remove" => loop {
            create(path, 1).unwrap().remove().unwrap();
            report("again");
        },
        "cycles" => {
            let count = |what: &str| {
                std::fs::read_to_string(what)
                    .map_or_else(|_| std::fs::read_dir(what).unwrap().count(), |text| text.lines().count())
            };
            let counts = || (count("/proc/self/fd"), count("/proc/self/maps"));
            use_all(path, &mode(0o700)).unwrap();
            let before = counts();
            for _ in 0..1000 {
                use_all(path, &mode(0o700)).unwrap();
                assert!(matches!(create(path, 1).unwrap().watch_receiver(), Ok(None)));
            }
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            assert!(!maps.contains(path.to_str().unwrap()), "{maps}");
            report(if counts() == before { "as before" } else { "more" });
        }
        "umask" => {
            rustix::process::umask(Mode::from_raw_mode(0o777));
            let directory = Directory::create(path, &mode(0o770), CAPACITY, LIMIT, 2, false).unwrap();
            let _first = directory.claim_sender().unwrap();
            directory.claim_sender().unwrap();
            report("made");
        }
        "another user" => {
            let access = Access { uids: vec![0], mode: 0o755 };
            let directory = Directory::open(path, &access).unwrap().unwrap();
            directory.lane_read_only(0).unwrap();
            assert!(!directory.is_receiver_held().unwrap());
            let uid = rustix::process::geteuid().as_raw();
            for refused in [directory.claim_receiver().err(), directory.claim_sender().err(), directory.remove().err()]
            {
                let text = refused.unwrap().to_string();
                let says = format!("belongs to uid 0, gid 0, has mode 644, and does not let uid {uid} write it");
                assert!(text.contains(&says), "{text}");
            }
            let hidden = path.with_file_name("hidden").join("ch");
            assert_refused(Directory::open(&hidden, &access), &["a directory above it does not let uid 65534 through"]);
            let closed = path.with_file_name("closed");
            assert_refused(Directory::open(&closed, &access), &["its mode does not let this user read it: `chmod` it"]);
            let unreadable = Directory::open(&path.with_file_name("unreadable"), &access);
            let says =
                format!("its file channel belongs to uid 0, gid 0, has mode 600, and does not let uid {uid} read it");
            assert_refused(unreadable, &[&says]);
            report("refused");
        }
        other => panic!("{other:?} is no task"),
    }
}

/// Starts a child with this task on the channel at `path`.
fn task(name: &str, path: &Path) -> Child {
    Child::start(role(name, path))
}

fn role(name: &str, path: &Path) -> Role {
    Role::new(a_child, name).with("path", path.display())
}

#[test]
fn another_process_has_a_role_until_it_ends() {
    let (_root, path) = root();
    let directory = create(&path, 1).unwrap();
    let task = task("hold", &path);
    assert_eq!(task.line(), "held");
    let error = directory.claim_receiver().unwrap_err();
    assert!(matches!(&error, Error::RoleTaken { pid, .. } if *pid == task.pid()), "{error:?}");
    assert!(matches!(directory.claim_sender().unwrap_err(), Error::RoleTaken { .. }));
    assert!(directory.is_receiver_held().unwrap() && directory.is_sender_held(0).unwrap());
    let liveness = directory.watch_receiver().unwrap().unwrap();
    drop(task);
    let timeout = Timespec::try_from(DEADLINE).unwrap();
    assert_eq!(poll(&mut [PollFd::new(&liveness, PollFlags::empty())], Some(&timeout)).unwrap(), 1);
    use_all(&path, &mode(0o700)).unwrap();
}

#[test]
fn a_killed_process_has_no_role_though_its_children_live_on() {
    let (_root, path) = root();
    let directory = create(&path, 1).unwrap();
    let task = task("hold beside children", &path);
    let children: Vec<i32> = task.line().split(' ').map(|pid| pid.parse().unwrap()).collect();
    let liveness = directory.watch_sender(0).unwrap().unwrap();
    assert!(directory.is_receiver_held().unwrap());
    drop(task);
    let timeout = Timespec::try_from(DEADLINE).unwrap();
    let is_reported = poll(&mut [PollFd::new(&liveness, PollFlags::empty())], Some(&timeout)).unwrap() == 1;
    let used = use_all(&path, &mode(0o700));
    for pid in children {
        let pid = rustix::process::Pid::from_raw(pid).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("the child lives on");
    }
    assert!(is_reported);
    used.unwrap();
}

#[test]
fn two_processes_that_create_concurrently_have_the_same_channel() {
    let (root, path) = root();
    for round in 0..50 {
        let tasks = [task("create", &path), task("create", &path)];
        let [one, other] = [tasks[0].line(), tasks[1].line()];
        assert_eq!(one, other, "round {round}");
        tasks.into_iter().for_each(Child::wait_for_success);
        assert_eq!(files_of(root.path()), ["ch"], "round {round}");
        open(&path).unwrap().unwrap().remove().unwrap();
    }
}

#[test]
fn concurrent_creation_and_removal_leave_a_complete_channel_or_none() {
    let (root, path) = root();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    let directory = create(&path, 2).unwrap();
                    match directory.claim_sender() {
                        Ok(_) | Err(Error::RoleTaken { .. } | Error::NoChannel { .. }) => {}
                        Err(error) => panic!("{error}"),
                    }
                    match directory.remove() {
                        Ok(()) | Err(Error::RoleTaken { .. } | Error::NoChannel { .. }) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
    });
    if let Some(directory) = open(&path).unwrap() {
        retry_while_taken(|| directory.claim_receiver()).unwrap();
        retry_while_taken(|| remove(&path)).unwrap();
    }
    assert_eq!(files_of(root.path()), [""; 0]);
}

#[test]
fn leftovers_of_a_killed_creator_or_remover_are_removed_later() {
    let (root, path) = root();
    for round in 0..30 {
        let task = task("create and remove", &path);
        // Kills it at an arbitrary point.
        for _ in 0..=round {
            task.line();
        }
        drop(task);
        // A channel at the path is complete. The next creator removes leftovers under temporary names.
        match open(&path).unwrap() {
            Some(directory) => use_all(directory.path(), &mode(0o700)).unwrap(),
            None => drop(create(&path, 1).unwrap()),
        }
        retry_while_taken(|| remove(&path)).unwrap();
        create(&path, 1).unwrap().remove().unwrap();
        assert_eq!(files_of(root.path()), [""; 0], "round {round}");
    }
}

#[test]
fn a_thousand_openings_leave_no_descriptor_and_no_mapping() {
    let (_root, path) = channel();
    assert_eq!(task("cycles", &path).line(), "as before");
}

#[test]
fn the_umask_changes_nothing() {
    let (_root, path) = root();
    assert_eq!(task("umask", &path).line(), "made");
    assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o7777, 0o770);
    for name in files_of(&path) {
        assert_eq!(std::fs::metadata(path.join(&name)).unwrap().mode() & 0o7777, 0o660, "{name}");
    }
    use_all(&path, &mode(0o770)).unwrap();
}

#[test]
fn a_user_with_read_permission_can_inspect_but_claim_nothing() {
    if !is_root() {
        eprintln!("SKIPPED: needs root to be another user");
        return;
    }
    let (root, path) = root();
    std::fs::set_permissions(root.path(), PermissionsExt::from_mode(0o755)).unwrap();
    Directory::create(&path, &mode(0o755), CAPACITY, LIMIT, 1, false).unwrap();
    std::fs::create_dir(root.path().join("hidden")).unwrap();
    std::fs::set_permissions(root.path().join("hidden"), PermissionsExt::from_mode(0o700)).unwrap();
    for (name, bits, of) in [("closed", 0o700, "."), ("unreadable", 0o600, CHANNEL)] {
        let other = root.path().join(name);
        Directory::create(&other, &mode(0o755), CAPACITY, LIMIT, 1, false).unwrap();
        std::fs::set_permissions(other.join(of), PermissionsExt::from_mode(bits)).unwrap();
    }
    // A copy of this program that the other user can reach. `cp` writes it: if this process wrote it, a child forked
    // meanwhile could hold a writable descriptor, and then exec fails with ETXTBSY.
    let program = root.path().join("program");
    assert!(Command::new("cp").arg(std::env::current_exe().unwrap()).arg(&program).status().unwrap().success());
    let task = Child::start_as(role("another user", &path), |command| {
        let mut copied = Command::new(&program);
        copied.args(command.get_args()).envs(command.get_envs().map(|(key, value)| (key, value.unwrap())));
        copied.stdin(Stdio::piped()).stdout(Stdio::piped()).uid(65534).gid(65534).current_dir("/");
        *command = copied;
    });
    assert_eq!(task.line(), "refused");
}
