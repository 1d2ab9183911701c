//! `pelton send` and `pelton recv` by connect: used, misused, interrupted and killed.

use crate::test_dirs;
use pelton_testkit::{NewEntry, Process, ProgramDirs, eventually, json, wait_for_readable};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;
use std::{
    io::{Seek as _, Write as _},
    os::{fd::AsFd as _, unix::process::CommandExt as _},
    process::{ChildStdout, Command},
};

/// A name of each kind.
fn names(dirs: &ProgramDirs) -> [String; 2] {
    ["short".to_string(), socket(dirs)]
}

fn socket(dirs: &ProgramDirs) -> String {
    format!("unix:{}", dirs.path("run/socket").display())
}

/// A receiver and a sender that have passed a first line.
fn connected_pair(dirs: &ProgramDirs, name: &str, recv: &[&str], send: &[&str]) -> (Process, Process) {
    let receiver = dirs.start(&[&["recv", name], recv].concat());
    let mut sender = dirs.start(&[&["send", name], send].concat());
    sender.write(b"hello\n");
    assert_eq!(receiver.line(), "hello");
    (receiver, sender)
}

/// `count` lines of different lengths.
fn lines(count: usize) -> Vec<u8> {
    (0..count).flat_map(|i| format!("{i}{}\n", " word".repeat(i * 7 % 200)).into_bytes()).collect()
}

#[test]
fn lines_arrive_unchanged() {
    let dirs = test_dirs();
    for name in names(&dirs) {
        for input in [lines(20_000), b"".to_vec(), b"\n\n".to_vec(), b"a\r\n\xff\xfe\0\n".to_vec()] {
            let receiver = dirs.start(&["recv", &name]);
            let mut sender = dirs.start(&["send", &name]);
            sender.write_all_and_close(input.clone());
            sender.wait().assert(0, &[]);
            let received = receiver.finish();
            received.assert(0, &[]);
            assert!(received.stdout == input, "{name}: {} bytes of {}", received.stdout.len(), input.len());
            assert_eq!(received.stderr, "");
        }
    }
    dirs.assert_nothing_left();
}

#[test]
fn one_receiver_accepts_every_sender_with_follow() {
    let dirs = test_dirs();
    for name in names(&dirs) {
        let receiver = dirs.start(&["recv", &name, "--follow"]);
        let mut dies = dirs.start(&["send", &name]);
        dies.write(b"from one that dies\n");
        assert_eq!(receiver.line(), "from one that dies");
        dies.signal(Signal::KILL);
        assert_eq!(dies.wait().code(), None);
        let mut senders: Vec<_> = (0..4).map(|_| dirs.start(&["send", &name])).collect();
        for (sender_index, sender) in senders.iter_mut().enumerate() {
            sender.write_all_and_close((0..5000).flat_map(|n| format!("{sender_index} {n}\n").into_bytes()).collect());
        }
        // Each sender ends once its lines are released.
        senders.into_iter().for_each(|sender| sender.wait().assert(0, &[]));
        receiver.signal(Signal::INT);
        let received = receiver.finish();
        received.assert(130, &["a sender on", "died"]);
        let text = String::from_utf8(received.stdout).unwrap();
        for sender_index in 0..4 {
            let prefix = format!("{sender_index} ");
            let of_one: Vec<_> = text.lines().filter_map(|line| line.strip_prefix(&prefix)).collect();
            assert!(
                of_one.iter().enumerate().all(|(n, found)| *found == n.to_string()),
                "{name}: of sender {sender_index}"
            );
            assert_eq!(of_one.len(), 5000, "{name}: of sender {sender_index}");
        }
    }
    dirs.assert_nothing_left();
}

#[test]
fn len32_carries_binary_and_empty_messages() {
    let dirs = test_dirs();
    let mut input = Vec::new();
    for message in [&b""[..], b"\n", &[0; 5], b"", &[255; 70_000], b"end"] {
        input.extend((message.len() as u32).to_le_bytes());
        input.extend(message);
    }
    let receiver = dirs.start(&["recv", "binary", "--frame", "len32"]);
    let mut sender = dirs.start(&["send", "binary", "--frame", "len32"]);
    sender.write_all_and_close(input.clone());
    sender.wait().assert(0, &[]);
    let received = receiver.finish();
    received.assert(0, &[]);
    assert!(received.stdout == input);
}

#[test]
fn a_line_is_printed_immediately_while_the_input_stays_open() {
    let dirs = test_dirs();
    let (receiver, mut sender) = connected_pair(&dirs, "chat", &[], &[]);
    for line in ["one", "two", ""] {
        sender.write(format!("{line}\n").as_bytes());
        assert_eq!(receiver.line(), line);
    }
    sender.finish().assert(0, &[]);
    receiver.finish().assert(0, &[]);
}

#[test]
fn a_receiver_releases_the_memory_of_a_large_message() {
    const LARGE: usize = 20 << 20;
    let dirs = test_dirs();
    for name in [socket(&dirs), format!("path:{}", dirs.path("channel").display())] {
        let (receiver, mut sender) = connected_pair(&dirs, &name, &[], &[]);
        let before = own_memory(receiver.pid());
        sender.write(&[vec![b'x'; LARGE], b"\n".to_vec()].concat());
        assert_eq!(receiver.line().len(), LARGE);
        // The receiver prints this line after it has written and freed the large buffer.
        sender.write(b"small\n");
        assert_eq!(receiver.line(), "small");
        let grown = own_memory(receiver.pid()).saturating_sub(before);
        assert!(grown < LARGE as u64 / 2, "{name}: {grown} bytes more than before");
        sender.finish().assert(0, &[]);
        receiver.finish().assert(0, &[]);
    }
}

/// Bytes of memory that only this process maps: without its lanes.
fn own_memory(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

#[test]
fn more_lines_than_the_lane_holds_arrive_with_either_wait() {
    let dirs = test_dirs();
    let input = lines(20_000);
    for wait in ["spin", "block"] {
        let receiver = dirs.start(&["recv", "small", "--wait", wait]);
        let mut sender = dirs.start(&["send", "small", "--wait", wait, "--capacity", "64K"]);
        sender.write_all_and_close(input.clone());
        sender.wait().assert(0, &[]);
        let received = receiver.finish();
        received.assert(0, &[]);
        assert!(received.stdout == input, "{wait}");
    }
}

#[test]
fn either_side_may_listen() {
    let dirs = test_dirs();
    for name in names(&dirs) {
        let mut sender = dirs.start(&["send", &name, "--listen"]);
        let receiver = dirs.start(&["recv", &name, "--connect"]);
        sender.write(b"reversed\n");
        sender.finish().assert(0, &[]);
        let received = receiver.finish();
        received.assert(0, &[]);
        assert_eq!(received.stdout, b"reversed\n");
    }
    dirs.assert_nothing_left();
}

#[test]
fn json_reports_the_messages_and_the_reason_for_the_end() {
    let dirs = test_dirs();
    let (receiver, mut sender) = connected_pair(&dirs, "report", &["--json"], &["--json"]);
    sender.write(b"more");
    let sent = sender.finish();
    sent.assert(0, &[]);
    let received = receiver.finish();
    received.assert(0, &[]);
    // The standard output of recv is the messages.
    let reports = [json(&sent), serde_json::from_str(&received.stderr).unwrap()];
    for (report, command) in reports.iter().zip(["send", "recv"]) {
        assert_eq!(report["command"], command);
        assert_eq!(report["name"], "report");
        assert_eq!(report["messages"], 2);
        assert_eq!(report["bytes"], 9);
        assert_eq!(report["ended"], "closed");
        assert_eq!(report["unreleased"], 0);
        assert_eq!(report["counters"]["messages"], 2);
        assert!(report["seconds"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn count_ends_the_receiver_and_the_sender_detects_it() {
    let dirs = test_dirs();
    let receiver = dirs.start(&["recv", "counted", "--count", "2"]);
    let mut sender = dirs.start(&["send", "counted"]);
    sender.write(b"1\n2\n3\n");
    let received = receiver.finish();
    received.assert(0, &[]);
    assert_eq!(received.stdout, b"1\n2\n");
    // The input is still open: the sender detects the close without a send.
    sender.wait().assert(1, &["closed", "messages were not released"]);
    dirs.assert_nothing_left();
}

#[test]
fn a_sender_reports_its_receivers_death_and_exits_with_1() {
    let dirs = test_dirs();
    let (receiver, sender) = connected_pair(&dirs, "killed", &[], &["--json"]);
    receiver.signal(Signal::KILL);
    assert_eq!(receiver.finish().code(), None);
    let sent = sender.wait();
    sent.assert(1, &["died", "0 of 1 messages were not released"]);
    assert_eq!(json(&sent)["ended"], "peer_died");
}

#[test]
fn a_sender_with_a_full_lane_counts_the_unreleased_messages_of_a_dead_receiver() {
    let dirs = test_dirs();
    let (receiver, _stdout, sender) = stalled_pair(&dirs);
    receiver.signal(Signal::KILL);
    sender.wait().assert(1, &["died", "messages were not released"]);
}

#[test]
fn a_receiver_reports_its_senders_death_and_exits_with_1() {
    let dirs = test_dirs();
    let (receiver, sender) = connected_pair(&dirs, "killed", &[], &[]);
    sender.signal(Signal::KILL);
    receiver.wait().assert(1, &["died after 1 messages"]);
    dirs.assert_nothing_left();
}

#[test]
fn an_interrupted_receiver_closes_and_the_sender_detects_it() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let dirs = test_dirs();
        let (receiver, sender) = connected_pair(&dirs, "interrupted", &[], &[]);
        receiver.signal(signal);
        let received = receiver.wait();
        received.assert(code, &[]);
        assert_eq!(received.stderr, "");
        sender.wait().assert(1, &["closed"]);
        dirs.assert_nothing_left();
    }
}

#[test]
fn an_interrupted_sender_closes_and_the_receiver_has_everything() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let dirs = test_dirs();
        let (receiver, sender) = connected_pair(&dirs, "interrupted", &[], &[]);
        sender.signal(signal);
        sender.wait().assert(code, &[]);
        receiver.wait().assert(0, &[]);
        dirs.assert_nothing_left();
    }
}

#[test]
fn an_interrupt_ends_a_wait_for_free_space() {
    let dirs = test_dirs();
    let (receiver, stdout, sender) = stalled_pair(&dirs);
    sender.signal(Signal::INT);
    sender.wait().assert(130, &[]);
    drop(stdout);
    receiver.wait().assert(141, &[]);
    dirs.assert_nothing_left();
}

#[test]
fn an_interrupt_ends_a_wait_for_a_reader_that_does_not_read() {
    let dirs = test_dirs();
    let (receiver, _stdout, sender) = stalled_pair(&dirs);
    receiver.signal(Signal::INT);
    receiver.wait().assert(130, &[]);
    sender.wait().assert(1, &["closed", "messages were not released"]);
    dirs.assert_nothing_left();
}

/// A receiver with a full pipe as its output, and a sender with more input than the lane holds.
fn stalled_pair(dirs: &ProgramDirs) -> (Process, ChildStdout, Process) {
    let mut receiver = Process::start_unread(dirs.command(&["recv", "stalled"]));
    // From a file, so that the sender waits only for free space.
    let mut input = tempfile::tempfile().unwrap();
    input.write_all(&lines(20_000)).unwrap();
    input.rewind().unwrap();
    let mut sending = dirs.command(&["send", "stalled", "--capacity", "64K"]);
    sending.stdin(input);
    let sender = Process::start(sending);
    let stdout = receiver.take_stdout();
    // A pipe is full somewhat before its 64 KiB. Then both processes sleep: one waits for space in the pipe, the other
    // for space in the lane.
    let stalls = || rustix::io::ioctl_fionread(&stdout).unwrap() > 60_000 && receiver.polls() && sender.polls();
    eventually("the pipe is full", || stalls() && stalls());
    (receiver, stdout, sender)
}

#[test]
fn an_interrupt_ends_the_wait_for_the_other_side() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let dirs = test_dirs();
        for arguments in [&["recv"][..], &["send", "--listen"]] {
            let entry = NewEntry::watch(&dirs.path("run"));
            let process = dirs.start(&[arguments, &[&socket(&dirs)]].concat());
            entry.wait();
            process.signal(signal);
            process.wait().assert(code, &[]);
            dirs.assert_nothing_left();
        }
    }
}

#[test]
fn a_closed_standard_output_ends_recv_without_an_error_text() {
    let dirs = test_dirs();
    for busy in [false, true] {
        let mut receiver = Process::start_unread(dirs.command(&["recv", "head"]));
        let mut sender = dirs.start(&["send", "head"]);
        let mut stdout = receiver.take_stdout();
        sender.write(b"first\n");
        std::io::Read::read_exact(&mut stdout, &mut [0; 6]).unwrap();
        if busy {
            // More than the pipe holds.
            sender.write_all_and_close(lines(5000));
        }
        drop(stdout);
        let received = receiver.wait();
        received.assert(141, &[]);
        assert_eq!(received.stderr, "");
        sender.wait().assert(1, &["closed"]);
    }
    dirs.assert_nothing_left();
}

#[test]
fn one_of_two_receivers_on_a_path_is_refused() {
    let dirs = test_dirs();
    let mut both = [dirs.start(&["recv", &socket(&dirs)]), dirs.start(&["recv", &socket(&dirs)])];
    let ended = wait_for_readable(&[both[0].end(), both[1].end()], "a receiver is refused");
    if ended[1] {
        both.reverse();
    }
    let [refused, listening] = both;
    refused.finish().assert(3, &["socket"]);
    listening.signal(Signal::INT);
    listening.finish().assert(130, &[]);
    dirs.assert_nothing_left();
}

#[test]
fn an_invalid_name_is_refused_with_3() {
    let dirs = test_dirs();
    for name in ["", "a/b", "..", "unix:", "unix:/no/such/place/socket"] {
        dirs.run(&["recv", name]).assert(3, &[]);
        dirs.run(&["send", name, "--listen"]).assert(3, &[]);
    }
}

#[test]
fn a_timeout_without_the_other_side_is_4() {
    let dirs = test_dirs();
    for name in names(&dirs) {
        for arguments in [&["recv"][..], &["recv", "--connect"], &["send"], &["send", "--listen"]] {
            let ended = dirs.run(&[arguments, &[&name, "--timeout", "0.05"]].concat());
            ended.assert(4, &["appeared", "--timeout"]);
        }
    }
    dirs.assert_nothing_left();
}

#[test]
fn a_truncated_frame_is_2_and_complete_frames_arrive() {
    let dirs = test_dirs();
    let receiver = dirs.start(&["recv", "cut", "--frame", "len32"]);
    let mut sender = dirs.start(&["send", "cut", "--frame", "len32"]);
    sender.write(b"\x02\0\0\0ok\x05\0\0\0cut");
    sender.finish().assert(2, &["inside the payload of frame 2 (at offset 6)", "3 of 5 bytes"]);
    let received = receiver.finish();
    received.assert(0, &[]);
    assert_eq!(received.stdout, b"\x02\0\0\0ok");
}

#[test]
fn a_line_above_the_limit_is_2_with_advice() {
    let dirs = test_dirs();
    let receiver = dirs.start(&["recv", "long"]);
    let mut sender = dirs.start(&["send", "long", "--capacity", "64K"]);
    sender.write_all_and_close([&b"fits\n"[..], &[b'x'; 40_000], b"\n"].concat());
    sender.wait().assert(2, &["line 2", "at most 32736", "--capacity"]);
    receiver.finish().assert(0, &[]);
}

/// Starts a command after a change in the child process, before `exec`.
fn start_with(mut command: Command, change: fn()) -> Process {
    // SAFETY: each caller passes a function of one async-signal-safe system call.
    unsafe {
        command.pre_exec(move || {
            change();
            Ok(())
        });
    }
    Process::start(command)
}

#[test]
fn an_ignored_sighup_ends_no_command() {
    let dirs = test_dirs();
    let entry = NewEntry::watch(&dirs.path("run"));
    // As `nohup` does.
    let receiver = start_with(dirs.command(&["recv", &socket(&dirs)]), || {
        // SAFETY: SIG_IGN installs no handler function.
        unsafe { libc::signal(libc::SIGHUP, libc::SIG_IGN) };
    });
    entry.wait();
    receiver.signal(Signal::HUP);
    let mut sender = dirs.start(&["send", &socket(&dirs)]);
    sender.write_all_and_close(lines(10));
    sender.wait().assert(0, &[]);
    let ended = receiver.finish();
    ended.assert(0, &[]);
    assert_eq!(ended.stdout, lines(10));
    dirs.assert_nothing_left();
}

#[test]
fn without_standard_output_a_command_receives_and_loses_no_message() {
    let dirs = test_dirs();
    let channel = format!("path:{}", dirs.path("work/channel").display());
    let mut sender = dirs.start(&["send", &channel]);
    sender.write_all_and_close(lines(10));
    sender.wait().assert(0, &[]);
    let closed = || {
        // SAFETY: after the fork and before `exec`, no other code of this child uses descriptor 1.
        unsafe { libc::close(1) };
    };
    let socket = socket(&dirs);
    for arguments in [
        &["recv", &channel][..],
        &["recv", &socket],
        &["flush", &channel, "-"],
        &["call", "nobody", "asked"],
        &["info", &channel],
    ] {
        start_with(dirs.command(arguments), closed).wait().assert(5, &["standard output is closed"]);
    }
    let mut unwritable = dirs.command(&["recv", &channel]);
    unwritable.stdout(std::fs::File::open("/dev/null").unwrap());
    Process::start(unwritable).wait().assert(5, &["open for reading only"]);
    let ended = dirs.run(&["recv", &channel]);
    ended.assert(0, &[]);
    assert_eq!(ended.stdout, lines(10));
    // /dev/null as standard output is valid.
    let mut null = dirs.command(&["info", &channel]);
    null.stdout(std::fs::OpenOptions::new().read(true).write(true).open("/dev/null").unwrap());
    Process::start(null).wait().assert(0, &[]);
    dirs.assert_nothing_left();
}

/// A slow peer, as on a busy machine: the command connects once, and does not abandon that connection.
#[test]
fn a_signal_check_does_not_interrupt_a_slow_handshake() {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept, bind, listen, socket_with};
    let dirs = test_dirs();
    let path = dirs.path("run/slow");
    let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    listen(&listener, 8).unwrap();
    for (command, signal) in [("send", Signal::INT), ("recv", Signal::TERM)] {
        let name = format!("unix:{}", path.display());
        let arguments: &[&str] = if command == "recv" { &["recv", "--connect", &name] } else { &["send", &name] };
        let process = dirs.start(arguments);
        let first = accept(&listener).unwrap();
        // The command sends its greeting and gets no reply, for several times the interval of signal checks.
        let mut hangs_up = [PollFd::new(&first, PollFlags::RDHUP)];
        let timeout = Timespec { tv_sec: 0, tv_nsec: 400_000_000 };
        assert_eq!(poll(&mut hangs_up, Some(&timeout)).unwrap(), 0, "{command} has hung up");
        process.signal(signal);
        drop(first);
        process.wait();
    }
}

/// A socket stays bound, and no process accepts. Neither `--timeout` nor a signal waits for the handshake limit of the
/// library.
#[test]
fn a_listener_that_never_accepts_delays_neither_timeout_nor_signal() {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept, bind, listen, socket_with};
    let dirs = test_dirs();
    for (number, arguments) in [&["send"][..], &["recv", "--connect"]].into_iter().enumerate() {
        let path = dirs.path(&format!("run/silent{number}"));
        let name = format!("unix:{}", path.display());
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&listener, 8).unwrap();
        for signal in [None, Some(Signal::INT)] {
            // Connected first, with the limit of the library.
            let connects = std::thread::spawn({
                let name = name.clone();
                move || pelton::Options::new().connect_sender(&name).map(drop)
            });
            let first = accept(&listener).unwrap();
            match signal {
                None => {
                    let ended = dirs.run(&[arguments, &[&name, "--timeout", "0.05"]].concat());
                    ended.assert(4, &["appeared", "--timeout"]);
                }
                Some(signal) => {
                    let process = dirs.start(&[arguments, &[&name]].concat());
                    wait_for_readable(&[listener.as_fd()], "the command connects");
                    process.signal(signal);
                    process.wait().assert(130, &[]);
                }
            }
            assert!(!connects.is_finished(), "{arguments:?} {signal:?} has waited for the limit of the library");
            drop(first);
            connects.join().unwrap().unwrap_err();
            // Connections of the tool in the backlog.
            while pelton_testkit::is_readable(&listener) {
                drop(accept(&listener).unwrap());
            }
        }
        std::fs::remove_file(path).unwrap();
    }
}
