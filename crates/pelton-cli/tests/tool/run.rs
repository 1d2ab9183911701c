//! `pelton run`, and listening sockets that another process has created (LISTEN_FDS): used, misused and killed.

use crate::test_dirs;
use pelton_testkit::{DEADLINE, Ended, Process, ProgramDirs, eventually, wait_for_readable};
use rustix::{
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with},
    process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open},
};
use std::{
    fs,
    os::{
        fd::{AsFd as _, OwnedFd},
        linux::net::SocketAddrExt as _,
        unix::{
            fs::PermissionsExt as _,
            net::{SocketAddr, UnixDatagram},
            process::CommandExt as _,
        },
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
};

/// Starts the command as systemd does, with one inherited socket.
const ONE: &str = "LISTEN_PID=$$ LISTEN_FDS=1; export LISTEN_PID LISTEN_FDS; exec \"$@\" 3<&0 </dev/null";

fn bound_at(path: &Path, kind: SocketType) -> OwnedFd {
    let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
    bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    socket
}

fn listening_at(path: &Path) -> OwnedFd {
    let socket = bound_at(path, SocketType::SEQPACKET);
    listen(&socket, 16).unwrap();
    socket
}

/// The tool, started by a shell script.
fn by_script(dirs: &ProgramDirs, script: &str, arguments: &[&str]) -> Command {
    let plain = dirs.command(arguments);
    let mut command = Command::new("sh");
    command.args(["-c", script, "sh"]).arg(plain.get_program()).args(plain.get_args());
    command.envs(plain.get_envs().filter_map(|(name, value)| Some((name, value?)))).current_dir(dirs.path("work"));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// The tool with an inherited socket.
fn with_socket(dirs: &ProgramDirs, script: &str, socket: &OwnedFd, arguments: &[&str]) -> Process {
    let mut command = by_script(dirs, script, arguments);
    command.stdin(Stdio::from(socket.try_clone().unwrap()));
    Process::start(command)
}

fn terminated(process: Process) -> Ended {
    process.signal(Signal::TERM);
    let ended = process.wait();
    ended.assert(143, &[]);
    ended
}

/// The name of a socket in the working directory.
fn name_of(dirs: &ProgramDirs) -> String {
    format!("unix:{}", dirs.path("work/socket").display())
}

fn called(dirs: &ProgramDirs, name: &str, request: &str, reply: &str) {
    let call = dirs.run(&["call", name, request, "--timeout", "20"]);
    call.assert(0, &[]);
    assert_eq!(String::from_utf8(call.stdout).unwrap(), reply);
}

/// Waits for lines in a file of the working directory, and returns them.
fn lines_of(dirs: &ProgramDirs, name: &str, count: usize) -> Vec<String> {
    let path = dirs.path("work").join(name);
    let mut lines = Vec::new();
    eventually(&format!("{count} lines are in {}", path.display()), || {
        let text = fs::read_to_string(&path).unwrap_or_default();
        lines = text.split_inclusive('\n').filter(|line| line.ends_with('\n')).map(|line| line.trim().into()).collect();
        lines.len() >= count
    });
    lines
}

fn pid_of(line: &str) -> Pid {
    Pid::from_raw(line.parse().unwrap()).unwrap()
}

/// A service manager's socket, and its path.
fn manager(dirs: &ProgramDirs) -> (PathBuf, UnixDatagram) {
    let path = dirs.path("work/notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(DEADLINE)).unwrap();
    (path, manager)
}

/// Waits for a notification.
#[track_caller]
fn notified(manager: &UnixDatagram, wanted: &str) {
    let mut bytes = [0; 64];
    let len = manager.recv(&mut bytes).unwrap();
    assert_eq!(std::str::from_utf8(&bytes[..len]).unwrap(), wanted);
}

/// A service by `pelton run`. Each of its processes writes its number to the file `pids`; `pelton serve` has the same
/// number.
fn run(dirs: &ProgramDirs, name: &str, serve: &str) -> Process {
    let script = format!("echo $$ >>pids; {serve}");
    dirs.start(&["run", name, "--", "sh", "-c", &script, env!("CARGO_BIN_EXE_pelton"), name])
}

const ECHO: &str = "exec \"$0\" serve \"$1\" --exec cat";

#[test]
fn a_service_listens_by_an_inherited_socket_and_leaves_it_for_the_next() {
    let dirs = test_dirs();
    let path = dirs.path("work/socket");
    let (name, socket) = (name_of(&dirs), listening_at(&path));
    // Before any service: it waits in the socket's queue.
    let early = dirs.start(&["call", &name, "early"]);
    wait_for_readable(&[socket.as_fd()], "it has connected");
    for _ in 0..2 {
        let service = with_socket(&dirs, ONE, &socket, &["serve", &name, "--exec", "cat"]);
        called(&dirs, &name, "hello", "hello");
        terminated(service);
        assert!(path.exists());
    }
    let early = early.finish();
    early.assert(0, &[]);
    assert_eq!(early.stdout, b"early");
    fs::remove_file(path).unwrap();
    dirs.assert_nothing_left();
}

#[test]
fn a_receiver_listens_by_an_inherited_socket_once_or_always() {
    let dirs = test_dirs();
    let path = dirs.path("work/socket");
    let (name, socket) = (name_of(&dirs), listening_at(&path));
    for (options, code) in [(&[][..], 0), (&["--follow"], 143)] {
        let receiver = with_socket(&dirs, ONE, &socket, &[&["recv", &name], options].concat());
        let mut sender = dirs.start(&["send", &name]);
        sender.write_all_and_close(b"one\ntwo\n".to_vec());
        assert_eq!([receiver.line(), receiver.line()], ["one", "two"]);
        sender.wait().assert(0, &[]);
        if code != 0 {
            receiver.signal(Signal::TERM);
        }
        receiver.wait().assert(code, &[]);
        assert!(path.exists());
    }
    fs::remove_file(path).unwrap();
}

#[test]
fn a_short_name_finds_the_socket_in_its_directory() {
    let dirs = test_dirs();
    let directory = dirs.path("run/pelton/it");
    fs::create_dir_all(&directory).unwrap();
    for path in [dirs.path("run/pelton"), directory.clone()] {
        fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    }
    let socket = listening_at(&directory.join("systemd"));
    let service = with_socket(&dirs, ONE, &socket, &["serve", "it", "--exec", "cat"]);
    called(&dirs, "it", "hello", "hello");
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 1, "the service has created a socket of its own");
    terminated(service);
    fs::remove_dir_all(dirs.path("run/pelton")).unwrap();
}

#[test]
fn each_of_two_sockets_is_taken_by_its_name_alone() {
    let dirs = test_dirs();
    let [first, second] = ["first", "second"].map(|name| dirs.path("work").join(name));
    let sockets = [listening_at(&first), listening_at(&second)];
    let script = "LISTEN_PID=$$ LISTEN_FDS=2 LISTEN_FDNAMES=a:b; export LISTEN_PID LISTEN_FDS LISTEN_FDNAMES; \
                  exec \"$@\" 3<&0 4<&1 </dev/null >/dev/null";
    let name = format!("unix:{}", second.display());
    let mut command = by_script(&dirs, script, &["serve", &name, "--exec", "cat"]);
    let [one, two] = sockets.each_ref().map(|socket| socket.try_clone().unwrap());
    command.stdin(Stdio::from(one)).stdout(Stdio::from(two));
    let service = Process::start(command);
    called(&dirs, &name, "hello", "hello");
    // Nobody accepts there.
    let other = format!("unix:{}", first.display());
    dirs.run(&["call", &other, "hello", "--timeout", "0.1"]).assert(4, &[]);
    terminated(service);
    // Another name than those of the sockets: the service creates its own.
    let third = format!("unix:{}", dirs.path("work/third").display());
    let service = with_socket(&dirs, ONE, &sockets[0], &["serve", &third, "--exec", "cat"]);
    called(&dirs, &third, "hello", "hello");
    terminated(service);
    assert!(!dirs.path("work/third").exists());
    fs::remove_file(first).unwrap();
    fs::remove_file(second).unwrap();
}

#[test]
fn sockets_that_cannot_serve_are_named_in_the_error() {
    let dirs = test_dirs();
    let path = dirs.path("work/socket");
    let name = name_of(&dirs);
    for (kind, problem) in [(SocketType::STREAM, "ListenSequentialPacket="), (SocketType::SEQPACKET, "does not listen")]
    {
        let socket = bound_at(&path, kind);
        let service = with_socket(&dirs, ONE, &socket, &["serve", &name, "--exec", "cat"]);
        service.wait().assert(5, &["descriptor 3 of LISTEN_FDS", problem]);
        fs::remove_file(&path).unwrap();
    }
    for count in ["", "x", "-1", "1 ", "99999999999"] {
        let script = format!("LISTEN_PID=$$ LISTEN_FDS='{count}'; export LISTEN_PID LISTEN_FDS; exec \"$@\"");
        let service = Process::start(by_script(&dirs, &script, &["serve", &name, "--exec", "cat"]));
        service.wait().assert(5, &["LISTEN_FDS is", "wanted a number"]);
    }
}

#[test]
fn descriptors_that_are_no_socket_of_the_name_and_variables_of_another_process_are_left_alone() {
    let dirs = test_dirs();
    let name = name_of(&dirs);
    for script in [
        "LISTEN_PID=1 LISTEN_FDS=1 exec \"$@\" 3</dev/null",
        "LISTEN_PID=x LISTEN_FDS=x exec \"$@\"",
        "LISTEN_PID=$$ LISTEN_FDS=9; export LISTEN_PID LISTEN_FDS; exec \"$@\" 3</dev/null 5</",
        "LISTEN_PID=$$ LISTEN_FDS=0; export LISTEN_PID LISTEN_FDS; exec \"$@\"",
        "LISTEN_FDS=1 exec \"$@\"",
    ] {
        let service = Process::start(by_script(&dirs, script, &["serve", &name, "--exec", "cat"]));
        called(&dirs, &name, "hello", "hello");
        terminated(service);
        dirs.assert_nothing_left();
    }
    // The process of those variables is the shell, which does not become the tool.
    let socket = listening_at(&dirs.path("work/socket"));
    let script = "LISTEN_PID=$$ LISTEN_FDS=1; export LISTEN_PID LISTEN_FDS; \"$@\" 3<&0 </dev/null; exit $?";
    let service = with_socket(&dirs, script, &socket, &["serve", &name, "--exec", "cat"]);
    service.wait().assert(3, &["in use"]);
    fs::remove_file(dirs.path("work/socket")).unwrap();
}

#[test]
fn commands_of_a_service_inherit_neither_the_socket_nor_its_name() {
    let dirs = test_dirs();
    let path = dirs.path("work/socket");
    let (name, socket) = (name_of(&dirs), listening_at(&path));
    let stat = rustix::fs::fstat(&socket).unwrap();
    let script = format!("TOOL=$1 NAME={name}; export TOOL NAME; {ONE}");
    // The tool, as such a command, may not listen there.
    let exec = "ls -l /proc/self/fd; exec \"$TOOL\" recv \"$NAME\"";
    let listing = "ls -l /proc/self/fd";
    for (exec, code, words) in [(exec, 6, "in use"), (listing, 0, "")] {
        let service = with_socket(&dirs, &script, &socket, &["serve", &name, "--exec", exec]);
        let call = dirs.run(&["call", &name]);
        call.assert(code, &[words]);
        let text = String::from_utf8(call.stdout).unwrap();
        assert!(code != 0 || text.contains("pipe:"), "{text}");
        assert!(!text.contains(&format!("socket:[{}]", stat.st_ino)), "{text}");
        terminated(service);
    }
    fs::remove_file(path).unwrap();
}

#[test]
fn a_service_manager_is_notified_at_a_path_and_at_an_abstract_name() {
    let dirs = test_dirs();
    let at_path = dirs.path("work/notify");
    let abstract_name = format!("pelton-notify-{}", std::process::id());
    let managers = [
        (at_path.display().to_string(), UnixDatagram::bind(&at_path).unwrap()),
        (
            format!("@{abstract_name}"),
            UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&abstract_name).unwrap()).unwrap(),
        ),
    ];
    for (address, manager) in managers {
        manager.set_read_timeout(Some(DEADLINE)).unwrap();
        let notified = |wanted| notified(&manager, wanted);
        for arguments in [
            &["serve", "it", "--exec", "cat"][..],
            &["recv", "--follow", "it"],
            &["recv", "it"],
            &["run", "it", "--", "sleep", "1000"],
        ] {
            let mut command = dirs.command(arguments);
            command.env("NOTIFY_SOCKET", &address);
            let process = Process::start(command);
            notified("READY=1");
            process.signal(Signal::TERM);
            if arguments[0] != "recv" {
                notified("STOPPING=1");
            }
            process.wait().assert(143, &[]);
        }
    }
    let mut command = dirs.command(&["serve", "it", "--exec", "cat"]);
    command.env("NOTIFY_SOCKET", dirs.path("work/nobody"));
    let service = Process::start(command);
    called(&dirs, "it", "hello", "hello");
    let ended = terminated(service);
    assert!(ended.stderr.contains("cannot send READY=1 to NOTIFY_SOCKET"), "{}", ended.stderr);
    fs::remove_file(at_path).unwrap();
}

#[test]
fn a_killed_service_is_started_again_and_clients_wait_for_it() {
    let dirs = test_dirs();
    let name = name_of(&dirs);
    // A request that is the word `kill` ends the service before it replies.
    let serve = "exec \"$0\" serve \"$1\" --exec 'read word; case $word in kill) kill -9 $PPID;; esac; echo $word'";
    let runner = run(&dirs, &name, serve);
    called(&dirs, &name, "first\n", "first\n");
    for round in 1..=3 {
        // In flight at the kill: it may have been carried out, so it fails.
        dirs.run(&["call", &name, "kill\n"]).assert(1, &["died"]);
        called(&dirs, &name, "after\n", "after\n");
        let pids = lines_of(&dirs, "pids", round + 1);
        assert_eq!(pids.len(), round + 1, "{pids:?}");
    }
    let ended = terminated(runner);
    assert!(
        ended.stderr.contains("was ended by signal 9") && ended.stderr.contains("starts again"),
        "{}",
        ended.stderr
    );
    dirs.assert_nothing_left();
}

#[test]
fn a_service_that_dies_at_once_is_started_ever_later_and_each_end_is_reported() {
    let dirs = test_dirs();
    let name = name_of(&dirs);
    let runner = run(&dirs, &name, "exit 7");
    lines_of(&dirs, "pids", 4);
    let ended = terminated(runner);
    for words in ["ended with exit status 7", "it starts again\n", "again in 0.1 s", "again in 0.2 s"] {
        assert!(ended.stderr.contains(words), "`{words}` is missing in: {}", ended.stderr);
    }
    let runner = dirs.start(&["run", &name, "--", "no-such-command"]);
    eventually("it listens", || dirs.path("work/socket").exists());
    let mut call = dirs.start(&["call", &name, "--timeout", "0.2", "hello"]);
    call.close_input();
    call.wait().assert(4, &[]);
    let ended = terminated(runner);
    assert!(ended.stderr.contains("could not be started"), "{}", ended.stderr);
    dirs.assert_nothing_left();
}

#[test]
fn a_reload_under_load_answers_each_call_or_returns_it_not_begun() {
    let dirs = test_dirs();
    let name = name_of(&dirs);
    let (notify, manager) = manager(&dirs);
    let notified = |wanted| notified(&manager, wanted);
    let fifo = dirs.path("work/fifo");
    make_fifo(&fifo);
    let serve = "NOTIFY_SOCKET=$PWD/notify; export NOTIFY_SOCKET; exec \"$0\" serve \"$1\" --parallel 8 --exec \
                 'read word; case $word in long) echo \"$$\" >long; read go <fifo;; esac; echo $word'";
    let runner = run(&dirs, &name, serve);
    notified("READY=1");
    let long = dirs.start(&["call", &name, "long\n"]);
    lines_of(&dirs, "long", 1);
    let (is_over, calls) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !is_over.load(Relaxed) {
                    let call = dirs.run(&["call", &name, "short\n", "--timeout", "20"]);
                    // By a process that drained just then, to which this client had connected.
                    if call.code() == Some(1) && call.stderr.contains("accepted no more calls: call again") {
                        continue;
                    }
                    call.assert(0, &[]);
                    assert_eq!(call.stdout, b"short\n");
                    calls.fetch_add(1, Relaxed);
                }
            });
        }
        // Also if an assertion fails.
        let _end = OnDrop(|| is_over.store(true, Relaxed));
        for _ in 0..2 {
            runner.signal(Signal::HUP);
            notified("READY=1");
            notified("STOPPING=1");
            let before = calls.load(Relaxed);
            eventually("calls reach the new process", || calls.load(Relaxed) >= before + 10);
        }
    });
    // The first process still has that call.
    fs::write(&fifo, "go\n").unwrap();
    let long = long.finish();
    long.assert(0, &[]);
    assert_eq!(long.stdout, b"long\n");
    assert_eq!(lines_of(&dirs, "pids", 3).len(), 3);
    let ended = terminated(runner);
    assert_eq!(ended.stderr, "");
    fs::remove_file(notify).unwrap();
    dirs.assert_nothing_left();
}

#[test]
fn a_client_of_a_short_name_goes_on_with_the_new_process() {
    let dirs = test_dirs();
    let (notify, manager) = manager(&dirs);
    let serve = "NOTIFY_SOCKET=$PWD/notify; export NOTIFY_SOCKET; exec \"$0\" serve \"$1\" --co-process --exec cat";
    let runner = run(&dirs, "it", serve);
    notified(&manager, "READY=1");
    let mut client = dirs.start(&["call", "it", "--frame", "lines"]);
    let mut number = 0;
    let mut call = || {
        number += 1;
        client.write(format!("{number}\n").as_bytes());
        assert_eq!(client.line(), number.to_string());
    };
    for _ in 0..2 {
        call();
        runner.signal(Signal::HUP);
        for wanted in ["READY=1", "STOPPING=1"] {
            // Calls all the time.
            manager.set_nonblocking(true).unwrap();
            let mut bytes = [0; 64];
            let len = loop {
                match manager.recv(&mut bytes) {
                    Ok(len) => break len,
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => call(),
                    Err(error) => panic!("{error}"),
                }
            };
            manager.set_nonblocking(false).unwrap();
            assert_eq!(std::str::from_utf8(&bytes[..len]).unwrap(), wanted);
        }
        (0..100).for_each(|_| call());
    }
    client.finish().assert(0, &[]);
    assert_eq!(lines_of(&dirs, "pids", 3).len(), 3);
    let ended = terminated(runner);
    assert_eq!(ended.stderr, "");
    fs::remove_file(notify).unwrap();
    dirs.assert_nothing_left();
}

struct OnDrop<F: Fn()>(F);

impl<F: Fn()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        self.0();
    }
}

fn make_fifo(path: &Path) {
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
}

#[test]
fn a_reload_whose_new_process_fails_keeps_the_old_one() {
    let dirs = test_dirs();
    let name = name_of(&dirs);
    let runner = run(&dirs, &name, &format!("[ ! -e broken ] || exit 9; {ECHO}"));
    called(&dirs, &name, "before", "before");
    fs::write(dirs.path("work/broken"), "").unwrap();
    runner.signal(Signal::HUP);
    lines_of(&dirs, "pids", 2);
    called(&dirs, &name, "after", "after");
    let first = pid_of(&lines_of(&dirs, "pids", 1)[0]);
    assert!(rustix::process::test_kill_process(first).is_ok(), "the old process has ended");
    let ended = terminated(runner);
    assert!(ended.stderr.contains("exit status 9") && ended.stderr.contains("the old process continues"));
}

#[test]
fn a_killed_supervisor_takes_its_service_with_it_and_its_successor_takes_the_socket() {
    let dirs = test_dirs();
    let name = name_of(&dirs);
    let runner = run(&dirs, &name, ECHO);
    called(&dirs, &name, "first", "first");
    let service = pid_of(&lines_of(&dirs, "pids", 1)[0]);
    let service = pidfd_open(service, PidfdFlags::empty()).unwrap();
    runner.kill();
    wait_for_readable(&[service.as_fd()], "the service ends");
    let runner = run(&dirs, &name, ECHO);
    called(&dirs, &name, "second", "second");
    terminated(runner);
    dirs.assert_nothing_left();
}

/// The peer of a client is the process that accepts it, whichever has created the socket.
#[test]
fn the_death_of_the_process_that_created_the_socket_ends_no_connection() {
    let dirs = test_dirs();
    let name = name_of(&dirs);
    // Its grandchild gets no signal when this program dies.
    let grandchild = "sh -c 'LISTEN_PID=$$ exec \"$0\" serve \"$1\" --exec cat' \"$0\" \"$1\" & echo $! >service; wait";
    let runner = run(&dirs, &name, grandchild);
    let mut client = dirs.start(&["call", &name, "--frame", "lines"]);
    client.write(b"before\n");
    assert_eq!(client.line(), "before");
    let creator = runner.pid();
    runner.kill();
    for word in ["after", "still"] {
        client.write(format!("{word}\n").as_bytes());
        assert_eq!(client.line(), word);
    }
    // The death of the process that accepted it does.
    let service = pid_of(&lines_of(&dirs, "service", 1)[0]);
    assert_ne!(service.as_raw_pid() as u32, creator);
    kill_process(service, Signal::KILL).unwrap();
    client.wait().assert(1, &["died"]);
    fs::remove_file(dirs.path("work/socket")).unwrap();
}

/// As with systemd: root creates the socket, the service has another user, the client a third one.
#[test]
fn the_user_of_a_service_counts_and_not_that_of_the_socket() {
    if !pelton_testkit::is_root() {
        return;
    }
    let (service, other) = (1, 2);
    let dirs = test_dirs();
    // Reachable by other users.
    let tool = dirs.path("work/pelton");
    fs::copy(env!("CARGO_BIN_EXE_pelton"), &tool).unwrap();
    for path in [dirs.path(""), dirs.path("work"), tool.clone()] {
        fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    }
    let (name, tool) = (name_of(&dirs), tool.to_str().unwrap());
    let runner = dirs.start(
        &[
            &["run", &name, "--uid", "2", "--", "setpriv", "--reuid", "1", "--clear-groups"][..],
            &[tool, "serve", &name, "--uid", "2", "--exec", "id -u"],
        ]
        .concat(),
    );
    eventually("other users may connect", || {
        fs::metadata(dirs.path("work/socket")).is_ok_and(|found| found.permissions().mode() & 0o777 == 0o666)
    });
    let call = |user: u32, options: &[&str]| {
        let mut command = Command::new(tool);
        command.args(["call", &name, "--timeout", "20"]).args(options).uid(user).current_dir("/");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Process::start(command).wait()
    };
    for (user, options) in [(other, &["--uid", "1"][..]), (service, &[])] {
        let done = call(user, options);
        done.assert(0, &[]);
        assert_eq!(done.stdout, b"1\n");
    }
    // The socket is root's, the service is not.
    call(other, &[]).assert(3, &["the peer is uid 1"]);
    call(other, &["--uid", "0"]).assert(3, &["the peer is uid 1"]);
    call(0, &["--uid", "1"]).assert(3, &["the peer is uid 0"]);
    terminated(runner);
    dirs.assert_nothing_left();
}

/// As above, but root itself connects: the socket's creator is of its user, its peer is not.
#[test]
fn a_connecting_root_takes_the_service_for_another_user() {
    if !pelton_testkit::is_root() {
        return;
    }
    let dirs = test_dirs();
    // Reachable by other users.
    let tool = dirs.path("work/pelton");
    fs::copy(env!("CARGO_BIN_EXE_pelton"), &tool).unwrap();
    for path in [dirs.path(""), dirs.path("work"), tool.clone()] {
        fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    }
    let (name, tool) = (name_of(&dirs), tool.to_str().unwrap());
    let by_user = ["setpriv", "--reuid", "1", "--clear-groups", tool];
    let started = |service: &[&str]| {
        let options = ["--uid", "0"];
        dirs.start(
            &[&["run", &name, "--uid", "0", "--"][..], &by_user, &service[..1], &[&name], &options, &service[1..]]
                .concat(),
        )
    };
    let runner = started(&["serve", "--exec", "id -u"]);
    let call = dirs.run(&["call", &name, "hello", "--uid", "1", "--timeout", "20"]);
    call.assert(0, &[]);
    assert_eq!(call.stdout, b"1\n");
    terminated(runner);
    let runner = started(&["recv", "--follow"]);
    let mut sender = dirs.start(&["send", &name, "--uid", "1"]);
    sender.write_all_and_close(b"one\n".to_vec());
    assert_eq!(runner.line(), "one");
    sender.wait().assert(0, &[]);
    terminated(runner);
    // The HELLO of root states the limits for another user: a sender of default options keeps them.
    let runner = started(&["send", "--listen"]);
    let mut receiver = dirs.start(&["recv", "--connect", &name, "--uid", "1", "--timeout", "20"]);
    receiver.close_input();
    receiver.wait().assert(0, &[]);
    terminated(runner);
    dirs.assert_nothing_left();
}

#[test]
fn a_stop_lets_the_calls_in_flight_end_and_a_second_one_kills() {
    let dirs = test_dirs();
    let name = name_of(&dirs);
    let serve = "exec \"$0\" serve \"$1\" --exec 'read word; echo \"$$\" >at.$word; read go <fifo; echo $word'";
    let fifo = dirs.path("work/fifo");
    make_fifo(&fifo);
    let (notify, manager) = manager(&dirs);
    for signals in 1..=2 {
        let script = format!("echo $$ >>pids; {serve}");
        let mut command = dirs.command(&["run", &name, "--", "sh", "-c", &script, env!("CARGO_BIN_EXE_pelton"), &name]);
        command.env("NOTIFY_SOCKET", &notify);
        let runner = Process::start(command);
        notified(&manager, "READY=1");
        let word = format!("call{signals}");
        let call = dirs.start(&["call", &name, &format!("{word}\n")]);
        lines_of(&dirs, &format!("at.{word}"), 1);
        runner.signal(Signal::TERM);
        notified(&manager, "STOPPING=1");
        if signals == 1 {
            fs::write(&fifo, "go\n").unwrap();
            let call = call.finish();
            call.assert(0, &[]);
            assert_eq!(call.stdout, format!("{word}\n").as_bytes());
        } else {
            runner.signal(Signal::TERM);
            call.finish().assert(1, &["died"]);
        }
        runner.wait().assert(143, &[]);
    }
    fs::remove_file(notify).unwrap();
    dirs.assert_nothing_left();
}

/// A process that was replaced has one SIGTERM: `pelton serve` ends its drain on a second one.
#[test]
fn a_stop_after_a_reload_lets_the_calls_of_the_old_process_end() {
    let dirs = test_dirs();
    let name = name_of(&dirs);
    let fifo = dirs.path("work/fifo");
    make_fifo(&fifo);
    let (notify, manager) = manager(&dirs);
    let serve = "NOTIFY_SOCKET=$PWD/notify; export NOTIFY_SOCKET; exec \"$0\" serve \"$1\" --exec \
                 'read word; echo \"$$\" >at; read go <fifo; echo $word'";
    let runner = run(&dirs, &name, serve);
    notified(&manager, "READY=1");
    let call = dirs.start(&["call", &name, "word\n"]);
    lines_of(&dirs, "at", 1);
    runner.signal(Signal::HUP);
    for wanted in ["READY=1", "STOPPING=1"] {
        notified(&manager, wanted);
    }
    runner.signal(Signal::TERM);
    // Of the new process.
    notified(&manager, "STOPPING=1");
    let second = pidfd_of(&lines_of(&dirs, "pids", 2)[1]);
    if let Some(second) = second {
        wait_for_readable(&[second.as_fd()], "the new process ends");
    }
    fs::write(&fifo, "go\n").unwrap();
    let call = call.finish();
    call.assert(0, &[]);
    assert_eq!(call.stdout, b"word\n");
    runner.wait().assert(143, &[]);
    fs::remove_file(notify).unwrap();
    dirs.assert_nothing_left();
}

/// `None`: it has ended.
fn pidfd_of(line: &str) -> Option<OwnedFd> {
    pidfd_open(pid_of(line), PidfdFlags::empty()).ok()
}
