//! `pelton send` and `pelton recv` over a path channel: either side first, alone, killed, refused, and several senders.

use crate::test_dirs;
use pelton_testkit::{NewEntry, Process, ProgramDirs, eventually, json};
use rustix::process::Signal;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A path channel that does not exist yet.
struct Channel {
    dirs: ProgramDirs,
    parent: PathBuf,
    name: String,
}

impl Channel {
    fn new() -> Channel {
        let dirs = test_dirs();
        let parent = dirs.path("run");
        Channel::in_directory(dirs, parent)
    }

    fn in_directory(dirs: ProgramDirs, parent: PathBuf) -> Channel {
        let name = format!("path:{}", parent.join("channel").display());
        Channel { dirs, parent, name }
    }

    /// Starts `recv` or `send` on the channel.
    fn start(&self, command: &str, arguments: &[&str]) -> Process {
        self.dirs.start(&[&[command, &self.name], arguments].concat())
    }

    /// Sends `input` without a receiver.
    fn leave(&self, input: Vec<u8>) {
        let mut sender = self.start("send", &[]);
        sender.write_all_and_close(input);
        sender.wait().assert(0, &["messages wait in", "for a receiver"]);
    }

    /// Removes the channel; fails if another file is left.
    #[track_caller]
    fn remove(self) {
        let names = |directory: &Path| -> Vec<_> {
            std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name()).collect()
        };
        assert_eq!(names(&self.parent), ["channel"]);
        std::fs::remove_dir_all(self.parent.join("channel")).unwrap();
        self.dirs.assert_nothing_left();
    }
}

/// Lines that begin with their number.
fn numbered(count: usize) -> Vec<u8> {
    (0..count).flat_map(|i| format!("{i}{}\n", " word".repeat(i * 7 % 20)).into_bytes()).collect()
}

/// The numbers of the whole lines in `output`.
fn numbers(output: &[u8]) -> Vec<usize> {
    let whole = output.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    let lines = std::str::from_utf8(&output[..whole]).unwrap().lines();
    lines.map(|line| line.split(' ').next().unwrap().parse().unwrap()).collect()
}

/// Checks that two receivers, one after the other, received all of `count` in order. At most as many lines as fit a
/// lane arrived twice.
#[track_caller]
fn assert_taken_over(first: &[usize], second: &[usize], count: usize, capacity: usize) {
    assert!(first.iter().copied().eq(0..first.len()), "the first receiver's lines are out of order");
    let from = second.first().copied().unwrap_or(count);
    assert!(second.iter().copied().eq(from..count), "the second receiver's lines are out of order or incomplete");
    assert!(from <= first.len(), "lost: {} to {from}", first.len());
    // A message occupies at least 16 bytes.
    assert!(first.len() - from <= capacity / 16, "{} lines arrived twice", first.len() - from);
}

#[test]
fn either_side_may_start_first() {
    for first in ["recv", "send"] {
        for input in [numbered(20_000), b"\n\n".to_vec(), b"a\r\n\xff\xfe\0\n".to_vec()] {
            let channel = Channel::new();
            let entry = NewEntry::watch(&channel.parent);
            let early = channel.start(first, &[]);
            entry.wait();
            let (receiver, mut sender) = match first {
                "recv" => (early, channel.start("send", &["--drain"])),
                _ => (channel.start("recv", &[]), early),
            };
            sender.write_all_and_close(input.clone());
            sender.wait().assert(0, &[]);
            let received = receiver.finish();
            received.assert(0, &[]);
            assert!(received.stdout == input, "{first}: {} bytes of {}", received.stdout.len(), input.len());
            assert_eq!(received.stderr, "");
            channel.remove();
        }
    }
}

#[test]
fn a_receiver_gets_the_messages_of_a_sender_that_has_ended() {
    let channel = Channel::new();
    let input = numbered(50_000);
    channel.leave(input.clone());
    let received = channel.start("recv", &[]).finish();
    received.assert(0, &[]);
    assert!(received.stdout == input, "{} bytes of {}", received.stdout.len(), input.len());
    channel.remove();
}

#[test]
fn a_channel_in_dev_shm_creates_no_other_files() {
    let Ok(parent) = TempDir::new_in("/dev/shm") else { return eprintln!("skipped: /dev/shm cannot be written") };
    let channel = Channel::in_directory(test_dirs(), parent.path().to_path_buf());
    channel.leave(b"one\ntwo\n".to_vec());
    let received = channel.start("recv", &["--json"]).finish();
    assert_eq!((received.code(), &received.stdout[..]), (Some(0), &b"one\ntwo\n"[..]));
    let report: serde_json::Value = serde_json::from_str(&received.stderr).unwrap();
    assert_eq!((&report["messages"], &report["ended"]), (&2.into(), &"closed".into()));
    channel.remove();
}

#[test]
fn a_killed_receiver_and_its_successor_deliver_every_line() {
    let channel = Channel::new();
    let (count, capacity) = (200_000, 256 * 1024);
    let mut sender = channel.start("send", &["--capacity", "256K", "--drain"]);
    sender.write_all_and_close(numbered(count));
    let receiver = channel.start("recv", &["--capacity", "256K"]);
    let mut first: Vec<usize> =
        (0..20_000).map(|_| receiver.line().split(' ').next().unwrap().parse().unwrap()).collect();
    receiver.signal(Signal::KILL);
    let killed = receiver.finish();
    assert_eq!(killed.code(), None);
    first.extend(numbers(&killed.stdout));
    let received = channel.start("recv", &[]).finish();
    received.assert(0, &[]);
    sender.wait().assert(0, &["died", "wait for the next one"]);
    assert!(first.len() < count, "killed too late, after the last line");
    assert_taken_over(&first, &numbers(&received.stdout), count, capacity);
    channel.remove();
}

#[test]
fn a_senders_death_is_reported_after_its_last_line_and_a_successor_continues() {
    let channel = Channel::new();
    let receiver = channel.start("recv", &["--follow"]);
    for round in 0..3 {
        let mut sender = channel.start("send", &[]);
        sender.write(format!("{round}\n").as_bytes());
        assert_eq!(receiver.line(), round.to_string());
        sender.signal(Signal::KILL);
        assert_eq!(sender.wait().code(), None);
    }
    receiver.signal(Signal::INT);
    receiver.wait().assert(130, &["a sender on", "died"]);
    let receiver = channel.start("recv", &[]);
    let mut sender = channel.start("send", &[]);
    sender.write(b"last\n");
    assert_eq!(receiver.line(), "last");
    sender.signal(Signal::KILL);
    receiver.wait().assert(1, &["died after 1 messages"]);
    channel.remove();
}

#[test]
fn lines_that_a_receiver_did_not_write_go_to_the_next_one() {
    let (count, capacity) = (50_000, 64 << 20);
    for interrupted in [false, true] {
        let channel = Channel::new();
        channel.leave(numbered(count));
        let mut receiver = Process::start_unread(channel.dirs.command(&["recv", &channel.name]));
        let mut stdout = receiver.take_stdout();
        let mut first = vec![0; 2];
        std::io::Read::read_exact(&mut stdout, &mut first).unwrap();
        if interrupted {
            receiver.signal(Signal::INT);
            receiver.wait().assert(130, &[]);
            std::io::Read::read_to_end(&mut stdout, &mut first).unwrap();
        } else {
            drop(stdout);
            receiver.wait().assert(141, &[]);
        }
        let received = channel.start("recv", &[]).finish();
        received.assert(0, &[]);
        assert_taken_over(&numbers(&first), &numbers(&received.stdout), count, capacity);
        channel.remove();
    }
}

#[test]
fn count_leaves_the_rest_in_the_channel() {
    let channel = Channel::new();
    channel.leave(b"1\n2\n3\n4\n".to_vec());
    for (count, lines) in [("1", "1\n"), ("2", "2\n3\n"), ("9", "4\n")] {
        let received = channel.start("recv", &["--count", count]).finish();
        received.assert(0, &[]);
        assert_eq!(String::from_utf8(received.stdout).unwrap(), lines);
    }
    channel.remove();
}

#[test]
fn a_second_holder_of_a_role_is_refused_with_3_and_the_holders_process() {
    let channel = Channel::new();
    let receiver = channel.start("recv", &[]);
    let mut sender = channel.start("send", &[]);
    sender.write(b"hello\n");
    assert_eq!(receiver.line(), "hello");
    channel.start("recv", &[]).finish().assert(3, &["receiver", &format!("process {}", receiver.pid())]);
    channel.start("send", &[]).finish().assert(3, &["sender", &sender.pid().to_string()]);
    sender.finish().assert(0, &[]);
    receiver.finish().assert(0, &[]);
    channel.remove();
}

#[test]
fn two_senders_with_a_lane_each_lose_nothing_and_keep_their_order() {
    let channel = Channel::new();
    let count = 30_000;
    let options = ["--lanes", "2", "--capacity", "256K"];
    let receiver = channel.start("recv", &options);
    let mut senders = ["a", "b"].map(|name| (name, channel.start("send", &options)));
    for (name, sender) in &mut senders {
        sender.write(format!("{name} here\n").as_bytes());
        // Both have connected before either ends.
        assert_eq!(receiver.line(), format!("{name} here"));
    }
    for (name, sender) in &mut senders {
        sender.write_all_and_close((0..count).flat_map(|i| format!("{name} {i}\n").into_bytes()).collect());
    }
    for (_, sender) in senders {
        sender.wait().assert(0, &[]);
    }
    let received = receiver.finish();
    received.assert(0, &[]);
    let text = String::from_utf8(received.stdout).unwrap();
    for name in ["a ", "b "] {
        let of_one =
            text.lines().filter_map(|line| line.strip_prefix(name)).map(|number| number.parse::<usize>().unwrap());
        assert!(of_one.eq(0..count), "{name}: out of order or incomplete");
    }
    assert_eq!(text.lines().count(), 2 * count);
    channel.remove();
}

#[test]
fn a_timeout_without_the_other_side_is_4() {
    for command in ["recv", "send"] {
        let channel = Channel::new();
        let ended = channel.start(command, &["--timeout", "0.05"]).finish();
        ended.assert(4, &["appeared", "--timeout"]);
        channel.remove();
    }
}

#[test]
fn a_path_without_a_channel_is_refused_with_3_and_unchanged() {
    let dirs = test_dirs();
    let file = dirs.file("notes", b"mine");
    std::fs::create_dir(dirs.path("work/directory")).unwrap();
    for command in ["recv", "send"] {
        for name in ["path:", "path:notes", "path:directory", "path:no/such/parent"] {
            dirs.run(&[command, name]).assert(3, &[]);
        }
    }
    assert_eq!(std::fs::read(file).unwrap(), b"mine");
    assert_eq!(std::fs::read_dir(dirs.path("work/directory")).unwrap().count(), 0);
    dirs.assert_nothing_left();
}

#[test]
fn an_interrupt_ends_a_sender_that_has_no_receiver() {
    let channel = Channel::new();
    let entry = NewEntry::watch(&channel.parent);
    let mut sender = channel.start("send", &["--capacity", "64K", "--json"]);
    entry.wait();
    // More than the free space, so the sender cannot end.
    sender.write_all_and_close(numbered(20_000));
    sender.signal(Signal::INT);
    let ended = sender.wait();
    ended.assert(130, &[]);
    if json(&ended)["unreleased"] != 0 {
        let left = json(&ended)["unreleased"].as_u64().unwrap() as usize;
        let received = channel.start("recv", &[]).finish();
        received.assert(0, &[]);
        assert!(numbers(&received.stdout).into_iter().eq(0..left));
    }
    channel.remove();
}

#[test]
fn messages_in_a_removed_directory_are_reported_as_lost() {
    let channel = Channel::new();
    let directory = channel.parent.join("channel");
    let mut sender = channel.start("send", &[]);
    sender.write(b"1\n2\n");
    let info = || channel.dirs.run(&["info", directory.to_str().unwrap()]);
    eventually("both messages are in the channel", || {
        String::from_utf8_lossy(&info().stdout).contains("2 messages wait")
    });
    std::fs::remove_dir_all(&directory).unwrap();
    sender.finish().assert(5, &["2 messages are lost", "removed or replaced"]);
    channel.dirs.assert_nothing_left();
}
