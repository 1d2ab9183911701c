//! `pelton call` and `pelton serve`: used, misused, interrupted and killed.

use crate::test_dirs;
use pelton_testkit::{DEADLINE, Ended, NewEntry, Process, ProgramDirs, eventually, json, wait_for_readable};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};
use std::{
    fs,
    io::Read as _,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::fs::FileTypeExt as _,
    },
    process::{Command, Stdio},
    time::Instant,
};

fn serve(dirs: &ProgramDirs, command: &str, options: &[&str]) -> Process {
    dirs.start(&[&["serve", "it", "--exec", command], options].concat())
}

/// Starts a service with another limit of descriptors.
fn serve_limited(dirs: &ProgramDirs, limit: &str, command: &str) -> Process {
    let plain = dirs.command(&["serve", "it", "--exec", command]);
    let mut limited = Command::new("sh");
    limited
        .args(["-c", &format!("ulimit {limit} && exec \"$0\" \"$@\"")])
        .arg(plain.get_program())
        .args(plain.get_args());
    limited.envs(plain.get_envs().filter_map(|(name, value)| Some((name, value?)))).current_dir(dirs.path("work"));
    Process::start({
        limited.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        limited
    })
}

/// Interrupts an idle service, and waits for its end.
fn end(service: Process) -> Ended {
    service.signal(Signal::INT);
    let ended = service.wait();
    ended.assert(130, &[]);
    ended
}

/// The line that a process writes to the file `name` in the working directory; waits until it is complete.
fn line_of(dirs: &ProgramDirs, name: &str) -> String {
    let path = dirs.path("work").join(name);
    let mut text = String::new();
    eventually(&format!("a line is in {}", path.display()), || {
        text = fs::read_to_string(&path).unwrap_or_default();
        text.ends_with('\n')
    });
    text.trim_end().to_owned()
}

/// A pidfd of the process whose number is in the file `name`: readable once it has ended.
fn process_of(dirs: &ProgramDirs, name: &str) -> OwnedFd {
    let number = line_of(dirs, name).parse().unwrap();
    pidfd_open(Pid::from_raw(number).unwrap(), PidfdFlags::empty()).unwrap()
}

fn fifo(dirs: &ProgramDirs, name: &str) -> std::path::PathBuf {
    let path = dirs.path("work").join(name);
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    path
}

fn len32(messages: &[&[u8]]) -> Vec<u8> {
    messages.iter().flat_map(|message| [&(message.len() as u32).to_le_bytes(), *message].concat()).collect()
}

#[test]
fn a_process_answers_a_call() {
    let dirs = test_dirs();
    let service = serve(&dirs, "tr a-z A-Z", &[]);
    let reply = dirs.run(&["call", "it", "hello\n"]);
    reply.assert(0, &[]);
    assert_eq!((reply.stdout, &*reply.stderr), (b"HELLO\n".to_vec(), ""));
    assert_eq!(dirs.run(&["call", "it"]).stdout, b"");
    // More than a lane in both directions, read more slowly than written.
    let large: Vec<u8> =
        (0..9_000_000).map(|at: u32| b'a' + (at.wrapping_mul(2_654_435_761) >> 24) as u8 % 26).collect();
    let mut call = dirs.start(&["call", "it", "-"]);
    call.write_all_and_close(large.clone());
    let reply = call.wait();
    reply.assert(0, &[]);
    assert!(reply.stdout == large.to_ascii_uppercase(), "{} bytes", reply.stdout.len());
    end(service);
    dirs.assert_nothing_left();
}

#[test]
fn calls_of_many_clients_run_in_parallel_up_to_the_limit() {
    let dirs = test_dirs();
    // Each process counts the running ones.
    let service = serve(&dirs, "mkdir at.$$; ls -d at.* | wc -l; cat; rmdir at.$$", &["--parallel", "3"]);
    let calls: Vec<_> = (0..10).map(|n| (n, dirs.start(&["call", "it", &format!("number {n}")]))).collect();
    for (n, call) in calls {
        let reply = call.finish();
        reply.assert(0, &[]);
        let text = String::from_utf8(reply.stdout).unwrap();
        let (running, request) = text.split_once('\n').unwrap();
        assert!((1..=3).contains(&running.trim().parse::<u32>().unwrap()), "{text}");
        assert_eq!(request, format!("number {n}"));
    }
    end(service);
}

#[test]
fn a_failed_call_reports_its_code_and_its_standard_error() {
    let dirs = test_dirs();
    let service = serve(&dirs, "read what; echo lost; echo \"no $what\" >&2; eval \"$what\"", &[]);
    for (command, code) in [("exit 3", "code 3: no exit 3"), ("kill -9 $$", "code 137: no kill -9 $$")] {
        let failed = dirs.run(&["call", "it", &format!("{command}\n")]);
        failed.assert(6, &["the call failed with", code]);
        assert_eq!(failed.stdout, b"");
    }
    // Only the first bytes are kept; the process continues.
    let service_of_much = dirs.start(&["serve", "much", "--exec", "yes no | head -c 1000000 >&2; exit 1"]);
    let failed = dirs.run(&["call", "much", "--json"]);
    failed.assert(6, &["\"failed\":1", "\"ended\":\"failed\"", "\"calls\":1"]);
    // The first 4,096 bytes are in the report, and in the message, which indents each line.
    let lines = failed.stderr.matches("no\n").count() + failed.stderr.matches("no\\n").count();
    assert!((2 * 1360..2 * 1370).contains(&lines), "{lines}");
    end(service_of_much);
    end(service);
}

#[test]
fn a_service_raises_its_descriptor_limit_and_its_processes_keep_the_old_one() {
    let dirs = test_dirs();
    let service = serve_limited(&dirs, "-S -n 200", "ulimit -S -n");
    let reply = dirs.run(&["call", "it", ""]);
    assert_eq!((reply.stdout.as_slice(), reply.stderr.as_str()), (&b"200\n"[..], ""));
    let limits = fs::read_to_string(format!("/proc/{}/limits", service.pid())).unwrap();
    let of_files = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let [soft, hard] = [3, 4].map(|word| of_files.split_whitespace().nth(word).unwrap());
    assert_eq!(soft, hard, "{limits}");
    end(service);
}

#[test]
fn clients_above_the_descriptor_limit_are_refused_and_others_are_served() {
    let dirs = test_dirs();
    let service = serve_limited(&dirs, "-n 100", "rev");
    let reply_to = |client: &mut Process| {
        client.write(b"abc\n");
        client.line_within(DEADLINE)
    };
    let (mut served, mut refused) = (Vec::new(), 0);
    while refused < 3 {
        let mut client = dirs.start(&["call", "it", "--frame", "lines"]);
        match reply_to(&mut client) {
            Some(reply) => {
                assert_eq!(reply, "cba");
                served.push(client);
            }
            None => {
                let texts = ["has no descriptor left for one more peer (RLIMIT_NOFILE is 100)"];
                client.wait().assert(3, &texts);
                refused += 1;
            }
        }
    }
    assert!(served.len() >= 8, "{} are served", served.len());
    for client in &mut served {
        assert_eq!(reply_to(client).as_deref(), Some("cba"), "a served client");
    }
    // With free descriptors, the service accepts a client again.
    served.pop().unwrap().finish().assert(0, &[]);
    let mut next = dirs.start(&["call", "it", "--frame", "lines"]);
    assert_eq!(reply_to(&mut next).as_deref(), Some("cba"));
    next.finish().assert(0, &[]);
    served.into_iter().for_each(|client| client.finish().assert(0, &[]));
    service.signal(Signal::INT);
    service.wait().assert(130, &["at most about 0 clients at a time, as RLIMIT_NOFILE is 100"]);
}

#[test]
fn replies_to_frames_keep_the_order_of_the_input() {
    let dirs = test_dirs();
    fifo(&dirs, "gate");
    // The first call has no reply before the second is submitted.
    let command = "read n; case $n in 1) cat gate >/dev/null;; 2) echo > gate;; 4) exit 9;; esac; printf \"$n$n\"";
    let service = serve(&dirs, command, &["--parallel", "2"]);
    let mut calls = dirs.start(&["call", "it", "--frame", "len32", "--json"]);
    calls.write_all_and_close(len32(&[b"1\n", b"2\n", b"3\n", b"4\n", b"5\n"]));
    let replies = calls.wait();
    replies.assert(
        6,
        &["call 4 failed with code 9", "1 of 5 calls failed", "\"calls\":5,\"failed\":1,\"bytes_asked\":10"],
    );
    assert_eq!(replies.stdout, len32(&[b"11", b"22", b"33", b"", b"55"]));
    end(service);
}

#[test]
fn an_open_input_of_lines_gets_a_reply_per_line() {
    let dirs = test_dirs();
    let service = serve(&dirs, "rev", &[]);
    let mut calls = dirs.start(&["call", "it", "--frame", "lines"]);
    for (line, reply) in [("abc", "cba"), ("", ""), ("x y", "y x")] {
        calls.write(format!("{line}\n").as_bytes());
        assert_eq!(calls.line(), reply);
    }
    calls.finish().assert(0, &[]);
    end(service);
}

#[test]
fn a_cancelled_call_kills_its_process_and_the_children() {
    let dirs = test_dirs();
    let service = serve(&dirs, "read n; sleep 1000 & echo $! > sleep.$n; echo $$ > shell.$n; wait", &[]);
    // Interrupted, killed, and timed out.
    for (n, signal) in [(1, Some(Signal::INT)), (2, Some(Signal::KILL)), (3, None)] {
        let data = format!("{n}\n");
        let timeout = if signal.is_none() { "2" } else { "1000" };
        let call = dirs.start(&["call", "it", &data, "--timeout", timeout]);
        let processes = [process_of(&dirs, &format!("sleep.{n}")), process_of(&dirs, &format!("shell.{n}"))];
        if let Some(signal) = signal {
            call.signal(signal);
        }
        let ended = call.wait();
        match signal {
            Some(Signal::INT) => ended.assert(130, &[]),
            Some(_) => assert_eq!(ended.code(), None),
            None => ended.assert(4, &["no reply from `it` within 2 s"]),
        }
        for process in processes {
            wait_for_readable(&[process.as_fd()], "the process of a cancelled call ends");
        }
    }
    end(service);
    dirs.assert_nothing_left();
}

#[test]
fn an_interrupted_service_completes_running_calls() {
    let dirs = test_dirs();
    let gate = fifo(&dirs, "gate");
    let service = serve(&dirs, "echo $$ > runs; cat gate", &["--parallel", "1", "--json"]);
    let call = dirs.start(&["call", "it"]);
    let process = process_of(&dirs, "runs");
    service.signal(Signal::INT);
    fs::write(gate, "done").unwrap();
    let reply = call.wait();
    reply.assert(0, &[]);
    assert_eq!(reply.stdout, b"done");
    wait_for_readable(&[process.as_fd()], "the process ends");
    let ended = service.wait();
    ended.assert(130, &[]);
    assert_eq!((&json(&ended)["ended"], &json(&ended)["calls"]), (&"interrupted".into(), &1.into()));
    dirs.assert_nothing_left();
}

#[test]
fn clients_of_an_interrupted_service_call_another_of_its_name() {
    let dirs = test_dirs();
    let [first, second] =
        ["first", "second"].map(|name| serve(&dirs, &format!("tee -a all >> {name}; printf ok"), &[]));
    // Each service has a socket in the directory of the name.
    let sockets = || {
        let directory = fs::read_dir(dirs.path("run/pelton/it")).into_iter().flatten();
        directory.filter(|entry| entry.as_ref().unwrap().file_type().unwrap().is_socket()).count()
    };
    eventually("two services listen", || sockets() == 2);
    let mut calls = dirs.start(&["call", "it", "--frame", "lines"]);
    let mut answered = 0;
    let mut some = |calls: &mut Process| {
        for _ in 0..20 {
            calls.write(b"x\n");
            assert_eq!(calls.line(), "ok");
            answered += 1;
        }
    };
    some(&mut calls);
    end(first);
    some(&mut calls);
    calls.finish().assert(0, &[]);
    end(second);
    // Each call once, by either service.
    assert!(["first", "second"].iter().all(|name| dirs.path("work").join(name).exists()));
    assert_eq!(fs::read(dirs.path("work/all")).unwrap().len(), answered);
    dirs.assert_nothing_left();
}

#[test]
fn a_second_interrupt_kills_running_processes() {
    let dirs = test_dirs();
    // The trap makes the shell ignore other signals than SIGKILL.
    let service = serve(&dirs, "trap '' INT TERM; echo $$ > runs; while :; do sleep 1000; done", &[]);
    let call = dirs.start(&["call", "it"]);
    let process = process_of(&dirs, "runs");
    // The service may see two signals as one, so this sends more.
    let deadline = Instant::now() + DEADLINE;
    let pid = Pid::from_raw(service.pid() as i32).unwrap();
    let its_end = pidfd_open(pid, PidfdFlags::empty()).unwrap();
    loop {
        service.signal(Signal::TERM);
        let mut polled = [rustix::event::PollFd::new(&its_end, rustix::event::PollFlags::IN)];
        let slice = rustix::event::Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
        if rustix::event::poll(&mut polled, Some(&slice)).unwrap() > 0 {
            break;
        }
        assert!(Instant::now() < deadline, "the service did not end");
    }
    service.wait().assert(143, &[]);
    wait_for_readable(&[process.as_fd()], "the process ends");
    call.wait().assert(1, &["the call was lost: the service on `it`", "before it replied"]);
    dirs.assert_nothing_left();
}

#[test]
fn a_client_detects_a_killed_service_immediately() {
    let dirs = test_dirs();
    let service = serve(&dirs, "echo $$ > runs; exec cat gate", &[]);
    let gate = fifo(&dirs, "gate");
    let call = dirs.start(&["call", "it"]);
    let process = process_of(&dirs, "runs");
    service.signal(Signal::KILL);
    call.wait().assert(1, &["the call was lost: the service on `it`", "before it replied"]);
    // No process is left to kill the command, which waits for the gate.
    fs::write(gate, "").unwrap();
    wait_for_readable(&[process.as_fd()], "the process ends");
}

#[test]
fn a_service_that_closes_after_its_last_reply_is_no_failure() {
    let dirs = test_dirs();
    let name = format!("unix:{}", dirs.path("run/socket").display());
    // The close races with the end of the input, which the command reads last; 20 rounds cover both orders.
    for _ in 0..20 {
        let mut service = pelton::Service::listen(&name).unwrap();
        let mut calls = dirs.start(&["call", &name, "--frame", "lines"]);
        calls.write_all_and_close(b"one\ntwo\n".to_vec());
        for reply in ["one", "two"] {
            let request = service.receive_until(Instant::now() + DEADLINE).unwrap().expect("a request");
            assert_eq!(&request[..], reply.as_bytes());
            request.reply(reply.as_bytes()).unwrap();
        }
        drop(service);
        let replies = calls.wait();
        replies.assert(0, &[]);
        assert_eq!(replies.stdout, b"one\ntwo\n");
    }
}

#[test]
fn a_call_waits_for_its_service_up_to_the_timeout() {
    let dirs = test_dirs();
    dirs.run(&["call", "nobody", "--timeout", "0.1"]).assert(4, &["no service appeared on `nobody` within 0.1 s"]);
    let waits = dirs.start(&["call", "it", "early"]);
    let service = serve(&dirs, "cat", &[]);
    let reply = waits.wait();
    reply.assert(0, &[]);
    assert_eq!(reply.stdout, b"early");
    end(service);
    // A path is of one service; a short name may be of several.
    let name = format!("unix:{}", dirs.path("run/socket").display());
    let service = dirs.start(&["serve", &name, "--exec", "cat"]);
    assert_eq!(dirs.run(&["call", &name, "hello"]).stdout, b"hello");
    dirs.run(&["serve", &name, "--exec", "cat"]).assert(3, &["run/socket"]);
    // The only service is dead, so the call finds none.
    service.signal(Signal::KILL);
    assert_eq!(service.wait().code(), None);
    dirs.run(&["call", &name, "--timeout", "0.1"]).assert(4, &["no service appeared"]);
}

#[test]
fn a_notification_has_no_reply() {
    let dirs = test_dirs();
    let service = serve(&dirs, "cat > got.tmp && mv got.tmp got", &["--json"]);
    let ended = dirs.run(&["call", "it", "--notify", "news\n"]);
    ended.assert(0, &[]);
    assert_eq!(ended.stdout, b"");
    assert_eq!(line_of(&dirs, "got"), "news");
    let ended = end(service);
    assert_eq!((&json(&ended)["notifications"], &json(&ended)["calls"]), (&1.into(), &0.into()));
}

#[test]
fn a_co_process_answers_calls_in_order() {
    let dirs = test_dirs();
    let service = serve(&dirs, "echo $$ >> starts; exec cat", &["--co-process", "--json"]);
    let messages: Vec<Vec<u8>> = (0..3000).map(|n: usize| vec![n as u8; n * 37 % 5000]).collect();
    let input = len32(&messages.iter().map(Vec::as_slice).collect::<Vec<_>>());
    let mut calls = dirs.start(&["call", "it", "--frame", "len32"]);
    calls.write_all_and_close(input.clone());
    let replies = calls.wait();
    replies.assert(0, &[]);
    assert!(replies.stdout == input);
    assert_eq!(dirs.run(&["call", "it", "one more"]).stdout, b"one more");
    // The co-process reads its input to the end, and ends.
    let process = process_of(&dirs, "starts");
    let ended = end(service);
    wait_for_readable(&[process.as_fd()], "the co-process ends");
    assert_eq!((&json(&ended)["restarts"], &json(&ended)["calls"]), (&0.into(), &3001.into()));
}

#[test]
fn a_co_process_that_ends_fails_its_calls_and_is_restarted() {
    let dirs = test_dirs();
    // The first co-process reads one request of one byte and ends; the next one continues.
    let command = "if [ -e was ]; then exec cat; fi; head -c 5 >/dev/null; : > was; exit 7";
    let service = serve(&dirs, command, &["--co-process", "--json"]);
    dirs.run(&["call", "it", "x"]).assert(6, &["the call failed with code 7: the process ended before it replied"]);
    assert_eq!(dirs.run(&["call", "it", "again"]).stdout, b"again");
    let ended = end(service);
    assert!(ended.stderr.contains("1 calls failed"), "{}", ended.stderr);
    assert_eq!((&json(&ended)["restarts"], &json(&ended)["failed"]), (&1.into(), &1.into()));
}

#[test]
fn a_co_process_that_writes_invalid_frames_is_killed() {
    let dirs = test_dirs();
    // A reply without a request, and an invalid length.
    for (command, says) in [("yes", "reply"), ("printf '\\377\\377\\377\\377'; exec cat >/dev/null", "bytes")] {
        let service = serve(&dirs, command, &["--co-process"]);
        let failed = dirs.run(&["call", "it", "x"]);
        failed.assert(6, &["code 256", says]);
        end(service);
    }
}

#[test]
fn a_closed_standard_output_ends_call_without_an_error_text() {
    let dirs = test_dirs();
    let service = serve(&dirs, "cat", &["--co-process"]);
    let mut calls = Process::start_unread(dirs.command(&["call", "it", "--frame", "lines"]));
    calls.write(b"first\n");
    let mut stdout = calls.take_stdout();
    let mut first = [0; 6];
    stdout.read_exact(&mut first).unwrap();
    drop(stdout);
    let ended = calls.wait();
    ended.assert(141, &[]);
    assert_eq!(ended.stderr, "");
    end(service);
}

#[test]
fn conflicting_options_are_refused() {
    let dirs = test_dirs();
    dirs.run(&["call", "it", "x", "--frame", "lines"]).assert(2, &["cannot be used with"]);
    dirs.run(&["serve", "it"]).assert(2, &["--exec"]);
    dirs.run(&["serve", "it", "--exec", "cat", "--parallel", "0"]).assert(2, &["--parallel"]);
    let entry = NewEntry::watch(&dirs.path("run"));
    let service = serve(&dirs, "cat", &[]);
    entry.wait();
    let mut call = dirs.start(&["call", "it", "--frame", "len32"]);
    call.write(&[255, 255, 255, 255]);
    call.finish().assert(2, &["frame 1 has a length of 4294967295 bytes"]);
    end(service);
}

#[test]
fn the_text_of_a_failed_call_is_printed_without_control_characters() {
    let dirs = test_dirs();
    let says = r"printf '\033[2J\033]0;title\007red\000\233\nand more\r\n' >&2; exit 3";
    let service = serve(&dirs, says, &[]);
    for arguments in [&["call", "it", "asked", "--json"][..], &["call", "it", "--frame", "lines"]] {
        let mut call = dirs.start(arguments);
        call.write_all_and_close(b"asked\n".to_vec());
        let ended = call.wait();
        ended.assert(6, &["failed with code 3", "[2J", "red", "\n    and more"]);
        let is_shown = |character: char| character == '\n' || !character.is_control();
        assert!(ended.stderr.chars().all(is_shown), "{:?}", ended.stderr);
    }
    end(service);
    dirs.assert_nothing_left();
}
