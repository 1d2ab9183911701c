//! `pelton send` and `pelton recv` as they are used, misused, interrupted and killed.

use crate::place::{Place, json};
use pelton_testkit::{NewEntry, Process, eventually, wait_for_readable};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;
use std::{
    io::{Seek as _, Write as _},
    os::{fd::AsFd as _, unix::process::CommandExt as _},
    process::{ChildStdout, Command},
};

/// A name of each kind.
fn names(place: &Place) -> [String; 2] {
    ["short".to_string(), socket(place)]
}

fn socket(place: &Place) -> String {
    format!("unix:{}", place.path("run/socket").display())
}

/// A receiver and a sender that have met: a first line has gone through.
fn met(place: &Place, name: &str, recv: &[&str], send: &[&str]) -> (Process, Process) {
    let receiver = place.start(&[&["recv", name], recv].concat());
    let mut sender = place.start(&[&["send", name], send].concat());
    sender.write(b"hello\n");
    assert_eq!(receiver.line(), "hello");
    (receiver, sender)
}

/// `count` lines of many lengths.
fn lines(count: usize) -> Vec<u8> {
    (0..count).flat_map(|i| format!("{i}{}\n", " word".repeat(i * 7 % 200)).into_bytes()).collect()
}

#[test]
fn lines_arrive_as_they_were() {
    let place = Place::new();
    for name in names(&place) {
        for input in [lines(20_000), b"".to_vec(), b"\n\n".to_vec(), b"a\r\n\xff\xfe\0\n".to_vec()] {
            let receiver = place.start(&["recv", &name]);
            let mut sender = place.start(&["send", &name]);
            sender.write_all_and_close(input.clone());
            sender.wait().assert(0, &[]);
            let received = receiver.finish();
            received.assert(0, &[]);
            assert!(received.stdout == input, "{name}: {} bytes of {}", received.stdout.len(), input.len());
            assert_eq!(received.stderr, "");
        }
    }
    place.assert_nothing_left();
}

#[test]
fn one_receiver_takes_the_lines_of_every_sender_that_comes() {
    let place = Place::new();
    for name in names(&place) {
        let receiver = place.start(&["recv", &name, "--follow"]);
        let mut dies = place.start(&["send", &name]);
        dies.write(b"from one that dies\n");
        assert_eq!(receiver.line(), "from one that dies");
        dies.signal(Signal::KILL);
        assert_eq!(dies.wait().code(), None);
        let mut senders: Vec<_> = (0..4).map(|_| place.start(&["send", &name])).collect();
        for (who, sender) in senders.iter_mut().enumerate() {
            sender.write_all_and_close((0..5000).flat_map(|n| format!("{who} {n}\n").into_bytes()).collect());
        }
        // Each ends when all it sent was taken.
        senders.into_iter().for_each(|sender| sender.wait().assert(0, &[]));
        receiver.signal(Signal::INT);
        let received = receiver.finish();
        received.assert(130, &["a sender on", "died"]);
        let text = String::from_utf8(received.stdout).unwrap();
        for who in 0..4 {
            let prefix = format!("{who} ");
            let of_one: Vec<_> = text.lines().filter_map(|line| line.strip_prefix(&prefix)).collect();
            assert!(of_one.iter().enumerate().all(|(n, found)| *found == n.to_string()), "{name}: of sender {who}");
            assert_eq!(of_one.len(), 5000, "{name}: of sender {who}");
        }
    }
    place.assert_nothing_left();
}

#[test]
fn len32_carries_binary_and_empty_messages() {
    let place = Place::new();
    let mut input = Vec::new();
    for message in [&b""[..], b"\n", &[0; 5], b"", &[255; 70_000], b"end"] {
        input.extend((message.len() as u32).to_le_bytes());
        input.extend(message);
    }
    let receiver = place.start(&["recv", "binary", "--frame", "len32"]);
    let mut sender = place.start(&["send", "binary", "--frame", "len32"]);
    sender.write_all_and_close(input.clone());
    sender.wait().assert(0, &[]);
    let received = receiver.finish();
    received.assert(0, &[]);
    assert!(received.stdout == input);
}

#[test]
fn a_line_is_shown_at_once_while_the_input_stays_open() {
    let place = Place::new();
    let (receiver, mut sender) = met(&place, "chat", &[], &[]);
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
    let place = Place::new();
    for name in [socket(&place), format!("path:{}", place.path("channel").display())] {
        let (receiver, mut sender) = met(&place, &name, &[], &[]);
        let before = own_memory(receiver.pid());
        sender.write(&[vec![b'x'; LARGE], b"\n".to_vec()].concat());
        assert_eq!(receiver.line().len(), LARGE);
        // The receiver writes this one when the buffer of the large one is written and released.
        sender.write(b"small\n");
        assert_eq!(receiver.line(), "small");
        let grown = own_memory(receiver.pid()).saturating_sub(before);
        assert!(grown < LARGE as u64 / 2, "{name}: {grown} bytes more than before");
        sender.finish().assert(0, &[]);
        receiver.finish().assert(0, &[]);
    }
}

/// Bytes of a process's memory that it shares with nobody: without its lanes.
fn own_memory(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

#[test]
fn more_than_the_lane_holds_passes_in_either_way_of_waiting() {
    let place = Place::new();
    let input = lines(20_000);
    for wait in ["spin", "block"] {
        let receiver = place.start(&["recv", "small", "--wait", wait]);
        let mut sender = place.start(&["send", "small", "--wait", wait, "--capacity", "64K"]);
        sender.write_all_and_close(input.clone());
        sender.wait().assert(0, &[]);
        let received = receiver.finish();
        received.assert(0, &[]);
        assert!(received.stdout == input, "{wait}");
    }
}

#[test]
fn either_side_may_listen() {
    let place = Place::new();
    for name in names(&place) {
        let mut sender = place.start(&["send", &name, "--listen"]);
        let receiver = place.start(&["recv", &name, "--connect"]);
        sender.write(b"reversed\n");
        sender.finish().assert(0, &[]);
        let received = receiver.finish();
        received.assert(0, &[]);
        assert_eq!(received.stdout, b"reversed\n");
    }
    place.assert_nothing_left();
}

#[test]
fn json_reports_what_passed_and_how_it_ended() {
    let place = Place::new();
    let (receiver, mut sender) = met(&place, "report", &["--json"], &["--json"]);
    sender.write(b"more");
    let sent = sender.finish();
    sent.assert(0, &[]);
    let received = receiver.finish();
    received.assert(0, &[]);
    // recv's standard output is the messages
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
fn count_ends_the_receiver_and_the_sender_is_told() {
    let place = Place::new();
    let receiver = place.start(&["recv", "counted", "--count", "2"]);
    let mut sender = place.start(&["send", "counted"]);
    sender.write(b"1\n2\n3\n");
    let received = receiver.finish();
    received.assert(0, &[]);
    assert_eq!(received.stdout, b"1\n2\n");
    // its input is still open: it is told, not asked
    sender.wait().assert(1, &["closed", "messages were not released"]);
    place.assert_nothing_left();
}

#[test]
fn a_sender_whose_receiver_is_killed_says_so_and_exits_with_1() {
    let place = Place::new();
    let (receiver, sender) = met(&place, "killed", &[], &["--json"]);
    receiver.signal(Signal::KILL);
    assert_eq!(receiver.finish().code(), None);
    let sent = sender.wait();
    sent.assert(1, &["died", "0 of 1 messages were not released"]);
    assert_eq!(json(&sent)["ended"], "peer_died");
}

#[test]
fn a_sender_whose_receiver_is_killed_while_the_lane_is_full_counts_what_is_unreleased() {
    let place = Place::new();
    let (receiver, _stdout, sender) = stalled(&place);
    receiver.signal(Signal::KILL);
    sender.wait().assert(1, &["died", "messages were not released"]);
}

#[test]
fn a_receiver_whose_sender_is_killed_says_so_and_exits_with_1() {
    let place = Place::new();
    let (receiver, sender) = met(&place, "killed", &[], &[]);
    sender.signal(Signal::KILL);
    receiver.wait().assert(1, &["died after 1 messages"]);
    place.assert_nothing_left();
}

#[test]
fn an_interrupted_receiver_closes_and_the_sender_is_told() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let place = Place::new();
        let (receiver, sender) = met(&place, "interrupted", &[], &[]);
        receiver.signal(signal);
        let received = receiver.wait();
        received.assert(code, &[]);
        assert_eq!(received.stderr, "");
        sender.wait().assert(1, &["closed"]);
        place.assert_nothing_left();
    }
}

#[test]
fn an_interrupted_sender_closes_and_the_receiver_has_everything() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let place = Place::new();
        let (receiver, sender) = met(&place, "interrupted", &[], &[]);
        sender.signal(signal);
        sender.wait().assert(code, &[]);
        receiver.wait().assert(0, &[]);
        place.assert_nothing_left();
    }
}

#[test]
fn an_interrupt_ends_a_wait_for_room() {
    let place = Place::new();
    let (receiver, stdout, sender) = stalled(&place);
    sender.signal(Signal::INT);
    sender.wait().assert(130, &[]);
    drop(stdout);
    receiver.wait().assert(141, &[]);
    place.assert_nothing_left();
}

#[test]
fn an_interrupt_ends_a_wait_for_a_reader_that_does_not_read() {
    let place = Place::new();
    let (receiver, _stdout, sender) = stalled(&place);
    receiver.signal(Signal::INT);
    receiver.wait().assert(130, &[]);
    sender.wait().assert(1, &["closed", "messages were not released"]);
    place.assert_nothing_left();
}

/// A receiver whose output nobody reads and whose pipe is full, and a sender with far more than the lane holds.
fn stalled(place: &Place) -> (Process, ChildStdout, Process) {
    let mut receiver = Process::start_unread(place.pelton(&["recv", "stalled"]));
    // From a file, so that the sender waits for nothing but room.
    let mut input = tempfile::tempfile().unwrap();
    input.write_all(&lines(20_000)).unwrap();
    input.rewind().unwrap();
    let mut sending = place.pelton(&["send", "stalled", "--capacity", "64K"]);
    sending.stdin(input);
    let sender = Process::start(sending);
    let stdout = receiver.take_stdout();
    // A pipe counts as full somewhat before its 64 KiB. Both asleep then: the one waits for room in it, the other in the lane.
    let stalls = || rustix::io::ioctl_fionread(&stdout).unwrap() > 60_000 && receiver.polls() && sender.polls();
    eventually("the pipe is full", || stalls() && stalls());
    (receiver, stdout, sender)
}

#[test]
fn an_interrupt_ends_the_wait_for_the_other_side() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let place = Place::new();
        for arguments in [&["recv"][..], &["send", "--listen"]] {
            let entry = NewEntry::watch(&place.path("run"));
            let process = place.start(&[arguments, &[&socket(&place)]].concat());
            entry.wait();
            process.signal(signal);
            process.wait().assert(code, &[]);
            place.assert_nothing_left();
        }
    }
}

#[test]
fn a_reader_that_leaves_ends_the_receiver_quietly() {
    let place = Place::new();
    for busy in [false, true] {
        let mut receiver = Process::start_unread(place.pelton(&["recv", "head"]));
        let mut sender = place.start(&["send", "head"]);
        let mut stdout = receiver.take_stdout();
        sender.write(b"first\n");
        std::io::Read::read_exact(&mut stdout, &mut [0; 6]).unwrap();
        if busy {
            // more than the pipe takes
            sender.write_all_and_close(lines(5000));
        }
        drop(stdout);
        let received = receiver.wait();
        received.assert(141, &[]);
        assert_eq!(received.stderr, "");
        sender.wait().assert(1, &["closed"]);
    }
    place.assert_nothing_left();
}

#[test]
fn of_two_receivers_that_listen_on_one_path_one_is_refused() {
    let place = Place::new();
    let mut both = [place.start(&["recv", &socket(&place)]), place.start(&["recv", &socket(&place)])];
    let ended = wait_for_readable(&[both[0].end(), both[1].end()], "one of them is refused");
    if ended[1] {
        both.reverse();
    }
    let [refused, listening] = both;
    refused.finish().assert(3, &["socket"]);
    listening.signal(Signal::INT);
    listening.finish().assert(130, &[]);
    place.assert_nothing_left();
}

#[test]
fn a_name_that_is_none_is_refused_with_3() {
    let place = Place::new();
    for name in ["", "a/b", "..", "unix:", "unix:/no/such/place/socket"] {
        place.run(&["recv", name]).assert(3, &[]);
        place.run(&["send", name, "--listen"]).assert(3, &[]);
    }
}

#[test]
fn nobody_there_in_time_is_4() {
    let place = Place::new();
    for name in names(&place) {
        for arguments in [&["recv"][..], &["recv", "--connect"], &["send"], &["send", "--listen"]] {
            let ended = place.run(&[arguments, &[&name, "--timeout", "0.05"]].concat());
            ended.assert(4, &["appeared", "--timeout"]);
        }
    }
    place.assert_nothing_left();
}

#[test]
fn a_truncated_frame_is_2_and_the_whole_ones_arrive() {
    let place = Place::new();
    let receiver = place.start(&["recv", "cut", "--frame", "len32"]);
    let mut sender = place.start(&["send", "cut", "--frame", "len32"]);
    sender.write(b"\x02\0\0\0ok\x05\0\0\0cut");
    sender.finish().assert(2, &["inside the payload of frame 2 (at offset 6)", "3 of 5 bytes"]);
    let received = receiver.finish();
    received.assert(0, &[]);
    assert_eq!(received.stdout, b"\x02\0\0\0ok");
}

#[test]
fn a_line_above_the_limit_is_2_and_says_what_to_do() {
    let place = Place::new();
    let receiver = place.start(&["recv", "long"]);
    let mut sender = place.start(&["send", "long", "--capacity", "64K"]);
    sender.write_all_and_close([&b"fits\n"[..], &[b'x'; 40_000], b"\n"].concat());
    sender.wait().assert(2, &["line 2", "at most 32736", "--capacity"]);
    receiver.finish().assert(0, &[]);
}

/// With something done in the child before it is the program.
fn changed(mut command: Command, change: fn()) -> Process {
    // SAFETY: what is done there is a system call or two.
    unsafe {
        command.pre_exec(move || {
            change();
            Ok(())
        });
    }
    Process::start(command)
}

#[test]
fn where_the_hangup_is_ignored_it_ends_nothing() {
    let place = Place::new();
    let entry = NewEntry::watch(&place.path("run"));
    // As nohup does.
    let receiver = changed(place.pelton(&["recv", &socket(&place)]), || {
        // SAFETY: no handler, so nothing that could be called.
        unsafe { libc::signal(libc::SIGHUP, libc::SIG_IGN) };
    });
    entry.wait();
    receiver.signal(Signal::HUP);
    let mut sender = place.start(&["send", &socket(&place)]);
    sender.write_all_and_close(lines(10));
    sender.wait().assert(0, &[]);
    let ended = receiver.finish();
    ended.assert(0, &[]);
    assert_eq!(ended.stdout, lines(10));
    place.assert_nothing_left();
}

#[test]
fn without_a_standard_output_nothing_is_received_and_nothing_is_lost() {
    let place = Place::new();
    let channel = format!("path:{}", place.path("work/channel").display());
    let mut sender = place.start(&["send", &channel]);
    sender.write_all_and_close(lines(10));
    sender.wait().assert(0, &[]);
    let closed = || {
        // SAFETY: a descriptor that nothing else has.
        unsafe { libc::close(1) };
    };
    let socket = socket(&place);
    for arguments in [
        &["recv", &channel][..],
        &["recv", &socket],
        &["flush", &channel, "-"],
        &["call", "nobody", "asked"],
        &["info", &channel],
    ] {
        changed(place.pelton(arguments), closed).wait().assert(5, &["standard output is closed"]);
    }
    let mut unwritable = place.pelton(&["recv", &channel]);
    unwritable.stdout(std::fs::File::open("/dev/null").unwrap());
    Process::start(unwritable).wait().assert(5, &["or only to be read"]);
    let ended = place.run(&["recv", &channel]);
    ended.assert(0, &[]);
    assert_eq!(ended.stdout, lines(10));
    // One that is there and takes everything is no mistake.
    let mut null = place.pelton(&["info", &channel]);
    null.stdout(std::fs::OpenOptions::new().read(true).write(true).open("/dev/null").unwrap());
    Process::start(null).wait().assert(0, &[]);
    place.assert_nothing_left();
}

/// A slow side, as on a machine that is busy with other work: it is not connected to again and again, and the one connection is not given up.
#[test]
fn a_slow_handshake_is_not_given_up_to_check_for_signals() {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept, bind, listen, socket_with};
    let place = Place::new();
    let path = place.path("run/slow");
    let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    listen(&listener, 8).unwrap();
    for (command, signal) in [("send", Signal::INT), ("recv", Signal::TERM)] {
        let name = format!("unix:{}", path.display());
        let arguments: &[&str] = if command == "recv" { &["recv", "--connect", &name] } else { &["send", &name] };
        let process = place.start(arguments);
        let first = accept(&listener).unwrap();
        // It greets, and gets no answer; several times as long as signals were checked for.
        let mut hangs_up = [PollFd::new(&first, PollFlags::RDHUP)];
        let timeout = Timespec { tv_sec: 0, tv_nsec: 400_000_000 };
        assert_eq!(poll(&mut hangs_up, Some(&timeout)).unwrap(), 0, "{command} has hung up");
        process.signal(signal);
        drop(first);
        process.wait();
    }
}

/// A socket stays bound, and nobody accepts: neither `--timeout` nor a signal waits for the library's own limit of a handshake.
#[test]
fn a_listener_that_accepts_nobody_delays_neither_the_timeout_nor_a_signal() {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept, bind, listen, socket_with};
    let place = Place::new();
    for (number, arguments) in [&["send"][..], &["recv", "--connect"]].into_iter().enumerate() {
        let path = place.path(&format!("run/mute{number}"));
        let name = format!("unix:{}", path.display());
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&listener, 8).unwrap();
        for signal in [None, Some(Signal::INT)] {
            // Connected first, and with that limit.
            let connects = std::thread::spawn({
                let name = name.clone();
                move || pelton::Options::new().connect_sender(&name).map(drop)
            });
            let first = accept(&listener).unwrap();
            match signal {
                None => {
                    let ended = place.run(&[arguments, &[&name, "--timeout", "0.05"]].concat());
                    ended.assert(4, &["appeared", "--timeout"]);
                }
                Some(signal) => {
                    let process = place.start(&[arguments, &[&name]].concat());
                    wait_for_readable(&[listener.as_fd()], "it connects");
                    process.signal(signal);
                    process.wait().assert(130, &[]);
                }
            }
            assert!(!connects.is_finished(), "{arguments:?} {signal:?} has waited as long as the library does");
            drop(first);
            connects.join().unwrap().unwrap_err();
            // What the tool has left in the backlog.
            while pelton_testkit::is_readable(&listener) {
                drop(accept(&listener).unwrap());
            }
        }
        std::fs::remove_file(path).unwrap();
    }
}
