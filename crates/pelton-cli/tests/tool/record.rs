//! `pelton record` writes a channel to a record file with times of arrival, and `pelton replay` sends the file.

use crate::test_dirs;
use pelton_testkit::{Process, ProgramDirs, eventually, json};
use rustix::process::Signal;
use std::{
    process::{Command, Stdio},
    time::{Duration, Instant},
};

fn lines(count: usize) -> String {
    (0..count).map(|number| format!("line {number}\n")).collect()
}

fn channel(dirs: &ProgramDirs, name: &str) -> String {
    format!("path:{}", dirs.path("work").join(name).display())
}

fn send(dirs: &ProgramDirs, channel: &str, input: String) {
    let mut send = dirs.start(&["send", channel]);
    send.write_all_and_close(input.into_bytes());
    send.wait().assert(0, &[]);
}

/// Records what the channel holds.
fn record(dirs: &ProgramDirs, channel: &str, file: &str) {
    dirs.run(&["record", channel, file]).assert(0, &[]);
}

/// What `replay` sends, with these options.
fn replayed(dirs: &ProgramDirs, options: &[&str]) -> String {
    let channel = channel(dirs, "copy");
    let ended = dirs.run(&[&["replay"], options, &[&channel]].concat());
    ended.assert(0, &[]);
    let received = dirs.run(&["recv", &channel, "--timeout", "0"]);
    String::from_utf8(received.stdout).unwrap()
}

/// The time of each message, in nanoseconds.
fn times(dirs: &ProgramDirs, file: &str) -> Vec<u64> {
    let ended = dirs.run(&["cat", "--json", file]);
    ended.assert(0, &[]);
    let objects = ended.stdout.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    objects
        .map(|line| serde_json::from_slice::<serde_json::Value>(line).unwrap()["written_ns"].as_u64().unwrap())
        .collect()
}

/// A recording of one message per entry, of which each arrives after the one before is in the file.
fn slow_recording(dirs: &ProgramDirs, messages: &[&str]) {
    let channel = channel(dirs, "slow");
    let mut send = dirs.start(&["send", &channel]);
    let record = dirs.start(&["record", &channel, "file", "--interval", "0"]);
    let size = || std::fs::metadata(dirs.path("work/file")).map_or(0, |file| file.len());
    for message in messages {
        let before = size();
        send.write(format!("{message}\n").as_bytes());
        eventually("the message is in the file", || size() > before.max(64));
    }
    send.finish().assert(0, &[]);
    record.wait().assert(0, &[]);
}

#[test]
fn a_replay_sends_what_was_recorded() {
    for (rotate, compress) in [("300K", &[][..]), ("30K", &["--compress", "zstd"])] {
        let dirs = test_dirs();
        let channel = channel(&dirs, "channel");
        send(&dirs, &channel, lines(50_000));
        let options = [&["record", &channel, "file", "--json", "--rotate", rotate, "--buffer", "64K"], compress];
        dirs.run(&options.concat()).assert(0, &["\"command\":\"record\"", "\"messages\":50000"]);
        let mut files: Vec<String> = std::fs::read_dir(dirs.path("work"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.starts_with("file"))
            .collect();
        files.sort_by_key(|name| (!name.contains('.'), name.clone()));
        assert!(files.len() > 2, "{files:?}");
        let files: Vec<&str> = files.iter().map(String::as_str).collect();
        assert!(replayed(&dirs, &[&["--fast"], &files[..]].concat()) == lines(50_000));
        let part = replayed(&dirs, &[&["--fast", "--skip", "30000", "--count", "2"], &files[..]].concat());
        assert_eq!(part, "line 30000\nline 30001\n");
        let twice = replayed(&dirs, &[&["--fast", "--repeat", "2", "--count", "3"], &files[..1]].concat());
        assert_eq!(twice, lines(3).repeat(2));
        dirs.run(&[&["cat", "--verify"], &files[..]].concat()).assert(0, &[]);
        dirs.assert_nothing_left();
    }
}

#[test]
fn messages_have_times_of_arrival_and_a_replay_keeps_their_distances() {
    let dirs = test_dirs();
    slow_recording(&dirs, &["one", "two", "three", "four"]);
    let times = times(&dirs, "file");
    assert!(times.len() == 4 && times.is_sorted_by(|a, b| a < b), "{times:?}");
    // The replay is never early, so it takes at least as long as the recording, by the speed.
    for (speed, factor) in [("1", 1.0), ("0.5", 2.0)] {
        let began = Instant::now();
        assert_eq!(replayed(&dirs, &["--speed", speed, "file"]), "one\ntwo\nthree\nfour\n");
        let least = Duration::from_nanos(times[3] - times[0]).mul_f64(factor);
        assert!(began.elapsed() >= least, "{:?} of at least {least:?}", began.elapsed());
    }
    let ended = dirs.run(&["replay", "--json", "--speed", "1000", "file", &channel(&dirs, "paced")]);
    let object: serde_json::Value = serde_json::from_slice(&ended.stdout).unwrap();
    assert_eq!((&object["command"], &object["messages"]), (&"replay".into(), &4.into()), "{object}");
    let late = &object["lateness_ns"];
    assert!(late["p50"].as_u64() <= late["max"].as_u64() && late["p99"].is_u64(), "{object}");
    let at = |time: u64| format!("@{}.{:09}", time / 1_000_000_000, time % 1_000_000_000);
    assert_eq!(replayed(&dirs, &["--fast", "--from", &at(times[1]), "--to", &at(times[3]), "file"]), "two\nthree\n");
    let after = at(times[2] - times[0]).replace('@', "");
    assert_eq!(replayed(&dirs, &["--fast", "--from", &after, "file"]), "three\nfour\n");
    assert_eq!(replayed(&dirs, &["--fast", "--to", "0", "file"]), "");
    dirs.assert_nothing_left();
}

#[test]
fn a_replay_begins_with_its_first_message_also_behind_damage() {
    let dirs = test_dirs();
    let channel = channel(&dirs, "channel");
    let mut ends = Vec::new();
    for part in ["one\n", "two\n", "three\n", "four\n"] {
        send(&dirs, &channel, part.to_owned());
        record(&dirs, &channel, "file");
        ends.push(std::fs::metadata(dirs.path("work/file")).unwrap().len() as usize);
    }
    let times = times(&dirs, "file");
    // The header of the second chunk.
    let mut bytes = std::fs::read(dirs.path("work/file")).unwrap();
    bytes[ends[0]..ends[0] + 16].fill(0xff);
    dirs.file("damaged", &bytes);
    let copy = format!("path:{}", dirs.path("work/copy").display());
    let from = format!("@{}.{:09}", times[3] / 1_000_000_000, times[3] % 1_000_000_000);
    for (options, wanted) in [(&["--from", &from][..], "four\n"), (&["--skip", "2"], "four\n")] {
        let ended = dirs.run(&[&["replay", "--fast", "damaged", &copy], options].concat());
        ended.assert(5, &["damaged"]);
        let received = dirs.run(&["recv", &copy, "--timeout", "0"]);
        assert_eq!(String::from_utf8(received.stdout).unwrap(), wanted, "{options:?}");
    }
    dirs.assert_nothing_left();
}

#[test]
fn a_killed_recorder_loses_nothing_and_repeats_nothing() {
    for (grows, compress) in [(200_000, &[][..]), (40_000, &["--compress", "zstd"])] {
        let dirs = test_dirs();
        let channel = channel(&dirs, "channel");
        let input = lines(400_000);
        let mut send = dirs.start(&["send", &channel, "--capacity", "256K"]);
        send.write_all_and_close(input.clone().into_bytes());
        let size = || std::fs::metadata(dirs.path("work/file")).map_or(0, |file| file.len());
        for round in 1..=8 {
            let record = dirs.start(&[&["record", &channel, "file", "--buffer", "32K"], compress].concat());
            eventually("the file grows", || size() > round * grows);
            record.kill();
        }
        // The last one appends chunks that are not compressed: a file may have both.
        let record = dirs.start(&["record", &channel, "file"]);
        send.wait().assert(0, &[]);
        record.finish().assert(0, &[]);
        dirs.run(&["cat", "--verify", "file"]).assert(0, &[]);
        assert!(replayed(&dirs, &["--fast", "file"]) == input, "lines are missing or duplicated");
        assert!(times(&dirs, "file").is_sorted());
    }
}

#[test]
fn a_full_disk_ends_the_recording_and_loses_nothing() {
    let dirs = test_dirs();
    let channel = channel(&dirs, "channel");
    send(&dirs, &channel, lines(100_000));
    let plain = dirs.command(&["record", &channel, "file", "--buffer", "64K"]);
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -f 1000 && exec \"$0\" \"$@\""]).arg(plain.get_program()).args(plain.get_args());
    limited.envs(plain.get_envs().filter_map(|(name, value)| Some((name, value?)))).current_dir(dirs.path("work"));
    limited.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Process::start(limited).finish().assert(5, &["file"]);
    let size = std::fs::metadata(dirs.path("work/file")).unwrap().len();
    assert!((400_000..=1_024_000).contains(&size), "{size}");
    dirs.run(&["cat", "--verify", "file"]).assert(0, &[]);
    record(&dirs, &channel, "file");
    assert!(replayed(&dirs, &["--fast", "file"]) == lines(100_000));
}

#[test]
fn an_old_file_is_rotated_at_the_next_write() {
    let dirs = test_dirs();
    let channel = channel(&dirs, "channel");
    let mut send = dirs.start(&["send", &channel]);
    let record = dirs.start(&["record", &channel, "file", "--interval", "0", "--rotate", "1s"]);
    let mut sent = String::new();
    eventually("a second file", || {
        send.write(b"a line\n");
        sent += "a line\n";
        dirs.path("work/file.000001").exists()
    });
    send.finish().assert(0, &[]);
    record.wait().assert(0, &[]);
    assert!(replayed(&dirs, &["--fast", "file.000001", "file"]) == sent);
}

#[test]
fn an_interrupt_ends_a_replay_in_a_pause() {
    let dirs = test_dirs();
    slow_recording(&dirs, &["one", "two"]);
    let recv = dirs.start(&["recv", "name", "--json"]);
    let replay = dirs.start(&["replay", "--speed", "0.000001", "file", "name", "--json"]);
    assert_eq!(recv.line(), "one");
    replay.signal(Signal::INT);
    let ended = replay.finish();
    ended.assert(130, &[]);
    assert_eq!(json(&ended)["ended"], "interrupted");
    recv.finish().assert(0, &["\"messages\":1"]);
    // The lateness of the only message that was sent.
    assert!(ended.stderr.contains("later than recorded: median "), "{}", ended.stderr);
    // A receiver that leaves ends it too.
    let recv = dirs.start(&["recv", "name", "--count", "1"]);
    let replay = dirs.start(&["replay", "--speed", "0.000001", "file", "name"]);
    recv.finish().assert(0, &[]);
    replay.finish().assert(1, &["closed"]);
    dirs.assert_nothing_left();
}

#[test]
fn a_torn_end_is_left_out_and_other_files_are_refused() {
    let dirs = test_dirs();
    let channel = channel(&dirs, "channel");
    send(&dirs, &channel, lines(10));
    record(&dirs, &channel, "file");
    let whole = std::fs::read(dirs.path("work/file")).unwrap();
    send(&dirs, &channel, lines(10));
    record(&dirs, &channel, "file");
    let both = std::fs::read(dirs.path("work/file")).unwrap();
    dirs.file("torn", &both[..both.len() - 8]);
    assert!(both.len() > whole.len());
    let copy = format!("path:{}", dirs.path("work/copy").display());
    dirs.run(&["replay", "torn", &copy]).assert(1, &["torn", "unfinished end"]);
    assert_eq!(dirs.run(&["recv", &copy]).stdout, lines(10).into_bytes());
    dirs.file("other", &[b'x'; 100]);
    dirs.run(&["replay", "other", &copy]).assert(2, &["other"]);
    dirs.run(&["replay", "missing", &copy]).assert(2, &["missing"]);
    dirs.run(&["replay", ".", &copy]).assert(2, &["regular file"]);
    dirs.run(&["record", &copy, "missing/file"]).assert(2, &["missing"]);
    dirs.run(&["replay", "--speed", "0", "torn", &copy]).assert(2, &["0.000001"]);
}
