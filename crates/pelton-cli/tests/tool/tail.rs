//! `pelton tail` prints what passes in a channel, and neither side notices it.

use crate::test_dirs;
use pelton_testkit::{Ended, Process, ProgramDirs, eventually};
use rustix::process::Signal;
use std::collections::BTreeMap;

fn path(dirs: &ProgramDirs) -> String {
    format!("path:{}", dirs.path("work/channel").display())
}

fn send(dirs: &ProgramDirs, channel: &str, input: impl Into<Vec<u8>>, options: &[&str]) {
    let mut send = dirs.start(&[&["send", channel], options].concat());
    send.write_all_and_close(input.into());
    send.wait().assert(0, &[]);
}

/// The lines, without the time of day.
fn lines(ended: &Ended) -> Vec<String> {
    let text = std::str::from_utf8(&ended.stdout).unwrap();
    text.lines().map(|line| line.split_once(' ').map_or(line, |(_, rest)| rest).to_owned()).collect()
}

/// The bytes of the channel's files.
fn files(dirs: &ProgramDirs) -> BTreeMap<String, Vec<u8>> {
    std::fs::read_dir(dirs.path("work/channel"))
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.file_type().unwrap().is_file())
        .map(|entry| (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap()))
        .collect()
}

#[test]
fn what_waits_in_the_lane_is_printed_and_nothing_changes() {
    let dirs = test_dirs();
    let channel = path(&dirs);
    send(&dirs, &channel, "one\ntwo\nthree\n", &["--capacity", "64K"]);
    let before = files(&dirs);
    let ended = dirs.run(&["tail", &channel, "--since-start", "-n", "2"]);
    ended.assert(0, &["2 messages printed, 0 of them not proven (?), 0 missed"]);
    assert_eq!(lines(&ended), ["0:1 one", "0:2 two"]);
    assert!(files(&dirs) == before, "the tail changed a file of the channel");
    assert_eq!(dirs.run(&["recv", &channel]).stdout, b"one\ntwo\nthree\n");
    dirs.assert_nothing_left();
}

#[test]
fn a_traceparent_is_shown_beside_the_payload_and_not_in_it() {
    let dirs = test_dirs();
    let channel = path(&dirs);
    std::fs::create_dir_all(dirs.path("work")).unwrap();
    let text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let span = pelton::Traceparent::parse(text).unwrap();
    let mut sender =
        pelton::Options::new().capacity(1 << 20).traced(true).create_sender(dirs.path("work/channel")).unwrap();
    // The second is larger than what one copy of the tail reads.
    for payload in ["one".to_owned(), "x".repeat(100_000)] {
        let sent = sender.send_traced(payload.as_bytes(), span, pelton::Deadline::Now);
        assert_eq!(sent.unwrap(), pelton::Sent::Sent);
    }
    sender.send(b"none").unwrap();
    let ended = dirs.run(&["tail", &channel, "--since-start", "-n", "3", "--json"]);
    ended.assert(0, &["3 messages printed, 0 of them not proven (?), 0 missed"]);
    let lines = std::str::from_utf8(&ended.stdout).unwrap().lines();
    let messages: Vec<serde_json::Value> = lines.map(|line| serde_json::from_str(line).unwrap()).collect();
    for message in &messages[..2] {
        assert_eq!(message["trace_id"], text[3..35], "{message}");
        assert_eq!(message["span_id"], text[36..52], "{message}");
    }
    let texts: Vec<_> = messages.iter().map(|message| message["text"].as_str().unwrap()).collect();
    assert_eq!((texts[0], texts[1].len(), texts[2]), ("one", 100_000, "none"));
    assert!(messages[2].get("trace_id").is_none());
    sender.close().unwrap();
    // A recording has the payloads.
    dirs.run(&["record", &channel, "file"]).assert(0, &[]);
    let recorded = dirs.run(&["cat", "file"]).stdout;
    assert_eq!(recorded, [b"one\n", "x".repeat(100_000).as_bytes(), b"\nnone\n"].concat());
    dirs.assert_nothing_left();
}

#[test]
fn messages_pass_while_their_receiver_gets_each_once() {
    let dirs = test_dirs();
    let recv = dirs.start(&["recv", "name"]);
    let mut send = dirs.start(&["send", "name"]);
    send.write(b"first\n");
    assert_eq!(recv.line(), "first");
    // The stopped receiver keeps the message, so the tail finds it whenever it begins.
    recv.signal(Signal::STOP);
    recv.wait_for_state('T');
    send.write(b"line 1\n");
    let tail = dirs.start(&["tail", "name", "--json", "--since-start", "--timeout", "60"]);
    let mut sent = String::new();
    for number in 1..=20 {
        if number == 2 {
            recv.signal(Signal::CONT);
        }
        if number > 1 {
            send.write(format!("line {number}\n").as_bytes());
        }
        let line: serde_json::Value = serde_json::from_str(&tail.line()).unwrap();
        assert_eq!(line["seq"].as_u64(), Some(number + 1), "{line}");
        assert_eq!(line["text"].as_str(), Some(format!("line {number}").as_str()));
        sent += &format!("line {number}\n");
    }
    tail.signal(Signal::INT);
    tail.finish().assert(130, &["0 missed"]);
    send.finish().assert(0, &[]);
    let received = recv.finish();
    received.assert(0, &[]);
    assert_eq!(String::from_utf8(received.stdout).unwrap(), sent);
    dirs.assert_nothing_left();
}

/// Reads texts until the wanted one. A receiver that was stopped or killed may not have released the one before.
fn expect(wanted: &str, next: impl Fn() -> String) {
    let before = next();
    assert!(before == wanted || next() == wanted, "found {before}, wanted {wanted}");
}

/// Both a sender and a receiver are killed, and have a successor. Only a stopped receiver keeps a message until the
/// tail has found the successor's files.
#[test]
fn a_tail_continues_with_the_successors_of_both_sides() {
    let dirs = test_dirs();
    for channel in ["followed".to_owned(), path(&dirs)] {
        let text = |tail: &Process| {
            let line: serde_json::Value = serde_json::from_str(&tail.line()).unwrap();
            line["text"].as_str().unwrap_or_else(|| panic!("{line}")).to_owned()
        };
        let stopped = |receiver: &Process| {
            receiver.signal(Signal::STOP);
            receiver.wait_for_state('T');
        };
        let continued = |receiver: &Process, wanted: &str| {
            receiver.signal(Signal::CONT);
            expect(wanted, || receiver.line());
        };
        let receiver = dirs.start(&["recv", "--follow", &channel]);
        let mut sender = dirs.start(&["send", &channel]);
        sender.write(b"one\n");
        assert_eq!(receiver.line(), "one");
        stopped(&receiver);
        sender.write(b"two\n");
        let tail = dirs.start(&["tail", &channel, "--json", "--since-start", "--timeout", "60"]);
        expect("two", || text(&tail));
        continued(&receiver, "two");
        sender.kill();
        // By a name, the receiver has to accept the successor before it stops.
        let mut sender = dirs.start(&["send", &channel]);
        sender.write(b"three\n");
        assert_eq!(receiver.line(), "three");
        stopped(&receiver);
        sender.write(b"four\n");
        expect("four", || text(&tail));
        if !channel.starts_with("path:") {
            // Without the receiver, a sender by a name ends.
            continued(&receiver, "four");
            receiver.signal(Signal::INT);
            receiver.wait().assert(130, &[]);
            sender.finish();
            tail.finish().assert(0, &["printed"]);
            continue;
        }
        receiver.kill();
        let receiver = dirs.start(&["recv", "--follow", &channel]);
        // A successor gets what was not released.
        expect("four", || receiver.line());
        sender.write(b"five\n");
        expect("five", || receiver.line());
        expect("five", || text(&tail));
        sender.finish().assert(0, &[]);
        receiver.signal(Signal::INT);
        receiver.wait().assert(130, &[]);
        tail.signal(Signal::INT);
        tail.finish().assert(130, &[" 0 missed"]);
    }
}

#[test]
fn killed_tails_of_a_busy_channel_change_nothing() {
    let dirs = test_dirs();
    let channel = path(&dirs);
    let input: String = (0..500_000).map(|number| format!("line {number}\n")).collect();
    let mut send = dirs.start(&["send", &channel, "--capacity", "256K"]);
    send.write(b"\n");
    let recv = dirs.start(&["recv", &channel]);
    eventually("the channel exists", || dirs.run(&["info", &channel]).code() == Some(0));
    let tails: Vec<Process> =
        (0..3).map(|_| dirs.start(&["tail", &channel, "--since-start", "--load", "50", "--filter", "9"])).collect();
    send.write_all_and_close(input.clone().into_bytes());
    for tail in tails {
        tail.line();
        tail.kill();
    }
    send.wait().assert(0, &[]);
    let ended = recv.finish();
    ended.assert(0, &[]);
    assert!(ended.stdout == format!("\n{input}").into_bytes(), "lines are missing, torn or duplicated");
    dirs.assert_nothing_left();
}

#[test]
fn printed_and_missed_messages_are_all_that_passed_and_each_is_whole() {
    let dirs = test_dirs();
    let channel = path(&dirs);
    let count = 200_000;
    let input: String = (1..=count).map(|number| format!("{number} {}\n", "x".repeat(number % 300))).collect();
    let mut sending = dirs.start(&["send", &channel, "--capacity", "64K"]);
    sending.write(input.lines().next().unwrap().as_bytes());
    sending.write(b"\n");
    let tail = dirs.start(&["tail", &channel, "--since-start", "--json", "--load", "30", "--timeout", "60"]);
    let first = tail.line();
    let recv = dirs.start(&["recv", &channel, "--json"]);
    let rest = input.split_once('\n').unwrap().1.to_owned();
    sending.write_all_and_close(rest.into_bytes());
    sending.wait().assert(0, &[]);
    recv.finish().assert(0, &[&format!("\"messages\":{count}")]);
    let (mut printed, mut missed, mut last, mut line) = (0, 0, 0, first);
    loop {
        let object: serde_json::Value = serde_json::from_str(&line).unwrap();
        if let Some(number) = object["missed"].as_u64() {
            missed += number;
            println!("{printed} printed, {missed} missed, the last is {last}");
        } else {
            let number = object["seq"].as_u64().unwrap();
            let wanted = format!("{number} {}", "x".repeat(number as usize % 300));
            // A copy that is not proven may be torn: see `pelton::observe::Tap`.
            assert!(object["is_proven"] == false || object["text"].as_str() == Some(wanted.as_str()), "{object}");
            assert!(number > last, "message {number} after {last}");
            last = number;
            printed += 1;
        }
        if printed + missed == count as u64 {
            break;
        }
        line = tail.line();
    }
    assert!(printed > 0);
    tail.signal(Signal::TERM);
    tail.finish().assert(143, &[&format!("{missed} missed")]);
}

#[test]
fn hostile_content_is_escaped_and_formats_and_filters_apply() {
    let dirs = test_dirs();
    let channel = path(&dirs);
    let input = b"\x1b]0;title\x07\n\xff\xfe\n{\"level\":\"error\",\"n\":[1]}\n{\"level\":\"info\"}\n";
    send(&dirs, &channel, input.to_vec(), &["--capacity", "64K"]);
    let tail = |options: &[&str]| {
        let ended = dirs.run(&[&["tail", &channel, "--since-start"], options].concat());
        ended.assert(0, &[]);
        lines(&ended)
    };
    let all = tail(&["-n", "4"]);
    assert_eq!(
        all,
        [r"0:1 \u{1b}]0;title\u{7}", r"0:2 \xff\xfe", r#"0:3 {"level":"error","n":[1]}"#, r#"0:4 {"level":"info"}"#]
    );
    assert_eq!(tail(&["-n", "1", "--filter", "info"]), all[3..]);
    assert_eq!(tail(&["-n", "1", "--filter", "jq:.level==error", "--filter", "jq:.n[0]==1"]), all[2..3]);
    assert_eq!(tail(&["-n", "1", "--filter", "re:\"level\":\"(info|debug)\""]), all[3..]);
    dirs.run(&["tail", &channel, "--filter", "re:["]).assert(2, &["unclosed character class"]);
    let ended = dirs.run(&["tail", &channel, "--since-start", "-n", "1", "--format", "hex"]);
    let text = String::from_utf8(ended.stdout).unwrap();
    assert!(text.contains("0:1 10 bytes\n    00000000  1b 5d 30 3b 74 69 74 6c 65 07"), "{text}");
    assert!(!text.contains('\x1b'), "{text}");
    let ended = dirs.run(&["tail", &channel, "--since-start", "-n", "1", "--format", "pretty", "--filter", "error"]);
    assert!(String::from_utf8(ended.stdout).unwrap().contains("\"level\": \"error\""));
    dirs.run(&["tail", &channel, "--filter", "jq:level"]).assert(2, &[".user.name"]);
}

#[test]
fn a_channel_that_is_not_there_is_reported_and_one_that_ends_ends_the_tail() {
    let dirs = test_dirs();
    for name in ["nobody", "./nobody", &path(&dirs)] {
        for (options, code) in [(&[][..], 3), (&["--timeout", "0.1"], 4)] {
            let ended = dirs.run(&[&["tail", name], options].concat());
            ended.assert(code, &["pelton ls"]);
            assert!(!ended.stderr.contains("printed"), "a summary of nothing: {}", ended.stderr);
        }
    }
    let channel = path(&dirs);
    send(&dirs, &channel, "one\n", &["--capacity", "64K"]);
    let tail = dirs.start(&["tail", &channel, "--since-start"]);
    assert!(tail.line().ends_with(" 0:1 one"));
    dirs.run(&["rm", &channel]).assert(0, &[]);
    tail.finish().assert(0, &["1 message printed"]);
}
