//! Several processes, and threads: that have roles, end, are killed, make and remove at once, are of another user.

use super::*;
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

/// What a child process of a test does, when it is one: `PELTON_DIRECTORY_TEST` says it.
#[test]
fn a_child() {
    let Ok(task) = std::env::var("PELTON_DIRECTORY_TEST") else { return };
    let (task, path) = task.split_once(": ").unwrap();
    let path = Path::new(path);
    match task {
        "hold" => {
            let directory = open(path).unwrap().unwrap();
            let _roles = (directory.claim_receiver().unwrap(), directory.claim_sender().unwrap());
            let lane = directory.lane_for_receiver(0).unwrap();
            // SAFETY: a page that this process has the role for.
            unsafe { lane.consumer.base().cast::<ConsumerPage>().as_ref().begin(std::process::id()) };
            say("held");
            hear();
        }
        "hold beside children" => {
            let directory = open(path).unwrap().unwrap();
            let _roles = (directory.claim_receiver().unwrap(), directory.claim_sender().unwrap());
            #[allow(clippy::zombie_processes, reason = "it is to outlive this process")]
            let executed =
                Command::new("sleep").arg("1000").stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
            // SAFETY: the child does nothing but wait for its end.
            let forked = unsafe { libc::fork() };
            if forked == 0 {
                // SAFETY: as above; the other end of its standard output must not wait for it.
                unsafe {
                    libc::close(1);
                    loop {
                        libc::pause();
                    }
                }
            }
            say(&format!("{} {forked}", executed.id()));
            hear();
        }
        "create" => {
            let directory = create(path, 1).unwrap();
            say(&std::fs::metadata(directory.path().join(CHANNEL)).unwrap().ino().to_string());
        }
        "create and remove" => loop {
            create(path, 1).unwrap().remove().unwrap();
            say("again");
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
            say(if counts() == before { "as before" } else { "more" });
        }
        "umask" => {
            rustix::process::umask(Mode::from_raw_mode(0o777));
            let directory = Directory::create(path, &mode(0o770), CAPACITY, LIMIT, 2).unwrap();
            let _first = directory.claim_sender().unwrap();
            directory.claim_sender().unwrap();
            say("made");
        }
        "another user" => {
            let access = Access { uids: vec![0], mode: 0o755 };
            let directory = Directory::open(path, &access).unwrap().unwrap();
            directory.lane_to_look_at(0).unwrap();
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
            say("refused");
        }
        other => panic!("{other:?} is no task"),
    }
}

/// The line is the child's, among those of the test framework.
const MARK: &str = "@@ ";

fn say(text: &str) {
    // Not by `println`, whose lock a forked child could inherit.
    std::io::stdout().write_all(format!("{MARK}{text}\n").as_bytes()).unwrap();
    std::io::stdout().flush().unwrap();
}

/// Waits until the parent closes, or is gone.
fn hear() {
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// Killed when dropped.
pub struct Task {
    pub child: Child,
    out: BufReader<ChildStdout>,
    _in: ChildStdin,
}

impl Task {
    pub fn new(task: &str, path: &Path) -> Task {
        Task::with(task, path, |_| ())
    }

    pub fn with(task: &str, path: &Path, change: impl FnOnce(&mut Command)) -> Task {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "directory::tests::processes::a_child", "--nocapture"]);
        command.env("PELTON_DIRECTORY_TEST", format!("{task}: {}", path.display()));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        change(&mut command);
        let mut child = command.spawn().unwrap();
        let (out, input) = (BufReader::new(child.stdout.take().unwrap()), child.stdin.take().unwrap());
        Task { child, out, _in: input }
    }

    /// What it says next.
    fn said(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.out.read_line(&mut line).unwrap(), 0, "the child ended: see above");
            if let Some((_, said)) = line.trim_end().split_once(MARK) {
                return said.to_owned();
            }
        }
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn another_process_has_a_role_until_it_ends() {
    let (_root, path) = root();
    let directory = create(&path, 1).unwrap();
    let mut task = Task::new("hold", &path);
    assert_eq!(task.said(), "held");
    let error = directory.claim_receiver().unwrap_err();
    assert!(matches!(&error, Error::RoleTaken { pid, .. } if *pid == task.child.id()), "{error:?}");
    assert!(matches!(directory.claim_sender().unwrap_err(), Error::RoleTaken { .. }));
    assert!(directory.is_receiver_held().unwrap() && directory.is_sender_held(0).unwrap());
    let life = directory.watch_receiver().unwrap().unwrap();
    drop(task);
    let timeout = Timespec::try_from(PATIENCE).unwrap();
    assert_eq!(poll(&mut [PollFd::new(&life, PollFlags::empty())], Some(&timeout)).unwrap(), 1);
    use_all(&path, &mode(0o700)).unwrap();
}

#[test]
fn a_killed_process_has_no_role_though_its_children_live_on() {
    let (_root, path) = root();
    let directory = create(&path, 1).unwrap();
    let mut task = Task::new("hold beside children", &path);
    let children: Vec<i32> = task.said().split(' ').map(|pid| pid.parse().unwrap()).collect();
    let life = directory.watch_sender(0).unwrap().unwrap();
    assert!(directory.is_receiver_held().unwrap());
    drop(task);
    let timeout = Timespec::try_from(PATIENCE).unwrap();
    let told = poll(&mut [PollFd::new(&life, PollFlags::empty())], Some(&timeout)).unwrap() == 1;
    let used = use_all(&path, &mode(0o700));
    for pid in children {
        let pid = rustix::process::Pid::from_raw(pid).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("the child lives on");
    }
    assert!(told);
    used.unwrap();
}

#[test]
fn two_processes_that_create_at_once_have_the_same_channel() {
    let (root, path) = root();
    for round in 0..50 {
        let mut tasks = [Task::new("create", &path), Task::new("create", &path)];
        let [one, other] = [tasks[0].said(), tasks[1].said()];
        assert_eq!(one, other, "round {round}");
        for task in &mut tasks {
            assert!(task.child.wait().unwrap().success());
        }
        assert_eq!(files_of(root.path()), ["ch"], "round {round}");
        open(&path).unwrap().unwrap().remove().unwrap();
    }
}

#[test]
fn threads_that_create_and_remove_at_once_find_a_whole_channel_or_none() {
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
        soon(|| directory.claim_receiver()).unwrap();
        soon(|| remove(&path)).unwrap();
    }
    assert_eq!(files_of(root.path()), [""; 0]);
}

#[test]
fn a_maker_or_remover_that_is_killed_leaves_nothing_that_stays() {
    let (root, path) = root();
    for round in 0..30 {
        let mut task = Task::new("create and remove", &path);
        // Wherever it is by then.
        for _ in 0..=round {
            task.said();
        }
        drop(task);
        // What stands there is whole; the next creator clears what does not.
        match open(&path).unwrap() {
            Some(directory) => use_all(directory.path(), &mode(0o700)).unwrap(),
            None => drop(create(&path, 1).unwrap()),
        }
        soon(|| remove(&path)).unwrap();
        create(&path, 1).unwrap().remove().unwrap();
        assert_eq!(files_of(root.path()), [""; 0], "round {round}");
    }
}

#[test]
fn a_thousand_openings_leave_no_descriptor_and_no_mapping() {
    let (_root, path) = channel();
    assert_eq!(Task::new("cycles", &path).said(), "as before");
}

#[test]
fn the_umask_changes_nothing() {
    let (_root, path) = root();
    assert_eq!(Task::new("umask", &path).said(), "made");
    assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o7777, 0o770);
    for name in files_of(&path) {
        assert_eq!(std::fs::metadata(path.join(&name)).unwrap().mode() & 0o7777, 0o660, "{name}");
    }
    use_all(&path, &mode(0o770)).unwrap();
}

#[test]
fn who_may_only_read_looks_on_and_is_told_what_it_may_not() {
    if !is_root() {
        eprintln!("SKIPPED: needs root to be another user");
        return;
    }
    let (root, path) = root();
    std::fs::set_permissions(root.path(), PermissionsExt::from_mode(0o755)).unwrap();
    Directory::create(&path, &mode(0o755), CAPACITY, LIMIT, 1).unwrap();
    std::fs::create_dir(root.path().join("hidden")).unwrap();
    std::fs::set_permissions(root.path().join("hidden"), PermissionsExt::from_mode(0o700)).unwrap();
    for (name, bits, of) in [("closed", 0o700, "."), ("unreadable", 0o600, CHANNEL)] {
        let other = root.path().join(name);
        Directory::create(&other, &mode(0o755), CAPACITY, LIMIT, 1).unwrap();
        std::fs::set_permissions(other.join(of), PermissionsExt::from_mode(bits)).unwrap();
    }
    // A copy of this program where that user finds it. Not written by this process, whose other children could have the
    // descriptor, and the program could not be run then.
    let program = root.path().join("program");
    assert!(Command::new("cp").arg(std::env::current_exe().unwrap()).arg(&program).status().unwrap().success());
    let mut task = Task::with("another user", &path, |command| {
        let environment: Vec<_> = command.get_envs().map(|(k, v)| (k.to_owned(), v.unwrap().to_owned())).collect();
        let arguments: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
        *command = Command::new(&program);
        command.args(arguments).envs(environment).stdin(Stdio::piped()).stdout(Stdio::piped());
        command.uid(65534).gid(65534).current_dir("/");
    });
    assert_eq!(task.said(), "refused");
}
