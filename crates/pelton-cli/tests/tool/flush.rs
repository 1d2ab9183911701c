//! `pelton flush` writes a channel to a record file, and `pelton cat` prints it.

use crate::test_dirs;
use pelton_testkit::{Process, eventually};
use rustix::process::Signal;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

fn lines(count: usize) -> String {
    (0..count).map(|number| format!("line {number}\n")).collect()
}

#[test]
fn cat_prints_each_flushed_message() {
    let dirs = test_dirs();
    let input = lines(50_000);
    let channel = format!("path:{}", dirs.path("work/channel").display());
    let mut send = dirs.start(&["send", &channel]);
    let flush =
        dirs.start(&["flush", &channel, "file", "--json", "--rotate", "200K", "--buffer", "64K", "--timeout", "60"]);
    send.write_all_and_close(input.clone().into_bytes());
    send.wait().assert(0, &[]);
    let ended = flush.finish();
    ended.assert(0, &[]);
    let report: serde_json::Value = serde_json::from_str(ended.stderr.trim()).unwrap();
    assert_eq!((report["ended"].as_str(), report["messages"].as_u64()), (Some("closed"), Some(50_000)));
    let mut files: Vec<String> = std::fs::read_dir(dirs.path("work"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with("file"))
        .collect();
    assert!(files.len() > 2, "{files:?}");
    files.sort_by_key(|name| (!name.contains('.'), name.clone()));
    let mut cat = vec!["cat"];
    cat.extend(files.iter().map(String::as_str));
    let ended = dirs.run(&cat);
    ended.assert(0, &[]);
    assert!(ended.stdout == input.as_bytes());
    dirs.assert_nothing_left();
}

#[test]
fn a_killed_and_restarted_flush_writes_each_line_once() {
    let dirs = test_dirs();
    let channel = format!("path:{}", dirs.path("work/channel").display());
    let input = lines(400_000);
    let mut send = dirs.start(&["send", &channel, "--capacity", "256K"]);
    send.write_all_and_close(input.clone().into_bytes());
    let size = || std::fs::metadata(dirs.path("work/file")).map_or(0, |file| file.len());
    for round in 1..=8 {
        let flush = dirs.start(&["flush", &channel, "file", "--buffer", "32K"]);
        // In the middle of the input.
        eventually("the file grows", || size() > round * 200_000);
        flush.signal(Signal::KILL);
        assert_eq!(flush.finish().code(), None);
    }
    let flush = dirs.start(&["flush", &channel, "file"]);
    send.wait().assert(0, &[]);
    flush.finish().assert(0, &[]);
    let ended = dirs.run(&["cat", "file"]);
    ended.assert(0, &[]);
    assert!(ended.stdout == input.as_bytes(), "lines are missing or duplicated");
    dirs.run(&["cat", "--verify", "file"]).assert(0, &[]);
}

#[test]
fn an_interrupted_flush_has_written_the_lines_of_every_sender() {
    let dirs = test_dirs();
    let flush = dirs.start(&["flush", "--follow", "many", "file", "--json"]);
    eventually("a receiver listens", || !matches!(dirs.run(&["send", "many"]).code(), Some(4)));
    let all: String = (0..3)
        .map(|sender| {
            let input: String = (0..1000).map(|number| format!("{sender} line {number}\n")).collect();
            let mut send = dirs.start(&["send", "many"]);
            send.write_all_and_close(input.clone().into_bytes());
            send.wait().assert(0, &[]);
            input
        })
        .collect();
    flush.signal(Signal::INT);
    flush.finish().assert(130, &["\"ended\":\"interrupted\"", "\"messages\":3000"]);
    let ended = dirs.run(&["cat", "file"]);
    ended.assert(0, &[]);
    assert_eq!(std::str::from_utf8(&ended.stdout).unwrap(), all);
    dirs.assert_nothing_left();
}

#[test]
fn an_unwritable_file_is_refused_before_a_sender_connects() {
    let dirs = test_dirs();
    dirs.file("other", b"another kind of file, with content to keep");
    dirs.run(&["flush", "name", "other"]).assert(2, &["other"]);
    assert_eq!(std::fs::read(dirs.path("work/other")).unwrap(), b"another kind of file, with content to keep");
    dirs.run(&["flush", "name", "missing/file"]).assert(2, &["missing"]);
    let first = dirs.start(&["flush", "name", "file"]);
    eventually("the file exists", || dirs.path("work/file").exists());
    dirs.run(&["flush", "another", "file"]).assert(3, &["file"]);
    first.signal(Signal::TERM);
    first.finish().assert(143, &[]);
    dirs.run(&["flush", "--connect", "--follow", "name", "file"]).assert(2, &["--follow"]);
    dirs.assert_nothing_left();
}

#[test]
fn flush_to_standard_output_writes_the_same_as_recv() {
    let dirs = test_dirs();
    let input = lines(20_000);
    let channel = format!("path:{}", dirs.path("work/channel").display());
    let mut send = dirs.start(&["send", &channel]);
    send.write_all_and_close(input.clone().into_bytes());
    send.wait().assert(0, &[]);
    let ended = dirs.run(&["flush", &channel, "-", "--buffer", "64K"]);
    ended.assert(0, &[]);
    assert!(ended.stdout == input.as_bytes());
    dirs.run(&["flush", &channel, "-", "--sync", "0"]).assert(2, &["--sync", "standard output"]);
    dirs.run(&["flush", &channel, "file", "--frame", "lines"]).assert(2, &["--frame"]);
    // The reader closes: unwritten messages are not released.
    let mut send = dirs.start(&["send", &channel]);
    send.write_all_and_close(input.clone().into_bytes());
    send.wait().assert(0, &[]);
    let mut flush = Process::start_unread(dirs.command(&["flush", &channel, "-"]));
    drop(flush.take_stdout());
    assert_eq!(flush.wait().code(), Some(141));
    let ended = dirs.run(&["flush", &channel, "-"]);
    assert!(ended.stdout == input.as_bytes());
    dirs.assert_nothing_left();
}

#[test]
fn a_repeatedly_renamed_log_has_each_line_once() {
    let dirs = test_dirs();
    let channel = format!("path:{}", dirs.path("work/channel").display());
    let input = lines(400_000);
    let mut send = dirs.start(&["send", &channel, "--capacity", "256K"]);
    send.write_all_and_close(input.clone().into_bytes());
    let flush = dirs.start(&["flush", &channel, "log", "--buffer", "32K"]);
    let log = dirs.path("work/log");
    let mut files = vec!["cat".to_owned()];
    for round in 1..=10 {
        eventually("the log grows", || std::fs::metadata(&log).is_ok_and(|file| file.len() > 50_000));
        let renamed = format!("log.{round}");
        std::fs::rename(&log, log.with_file_name(&renamed)).unwrap();
        files.push(renamed);
        if round % 2 == 0 {
            // As `create` of logrotate does, unless the writer creates it first.
            let _ = std::fs::File::create_new(&log);
        }
    }
    send.wait().assert(0, &[]);
    flush.finish().assert(0, &["log was renamed by another program"]);
    files.push("log".to_owned());
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    let ended = dirs.run(&files);
    ended.assert(0, &[]);
    assert!(ended.stdout == input.as_bytes(), "lines are missing or duplicated");
}

/// With the configuration of `spec/record-file.md`.
#[test]
fn logrotate_rotates_an_open_log_without_loss() {
    if Command::new("logrotate").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
        return eprintln!("SKIPPED: logrotate is not installed");
    }
    for how in ["nocreate", "create 0640", "copytruncate"] {
        let dirs = test_dirs();
        let channel = format!("path:{}", dirs.path("work/channel").display());
        let log = dirs.path("work/log");
        let configuration = format!("{} {{\n rotate 5\n {how}\n nocompress\n}}\n", log.display());
        let configuration = dirs.file("configuration", configuration.as_bytes());
        std::fs::set_permissions(&configuration, PermissionsExt::from_mode(0o600)).unwrap();
        let mut send = dirs.start(&["send", &channel]);
        let flush = dirs.start(&["flush", &channel, "log"]);
        let mut input = String::new();
        for round in 0..3 {
            let some: String = (0..100).map(|number| format!("round {round} line {number}\n")).collect();
            send.write(some.as_bytes());
            input += &some;
            let is_written = || dirs.run(&["cat", "log"]).stdout.ends_with(some.as_bytes());
            eventually("the lines are in the log", is_written);
            if round < 2 {
                let mut logrotate = Command::new("logrotate");
                logrotate.arg("--force").arg("--state").arg(dirs.path("work/state")).arg(&configuration);
                let done = logrotate.output().unwrap();
                assert!(done.status.success(), "{done:?}");
            }
        }
        send.close_input();
        send.wait().assert(0, &[]);
        flush.finish().assert(0, &["by another program"]);
        let ended = dirs.run(&["cat", "--verify", "log.2", "log.1", "log"]);
        ended.assert(0, &[]);
        let ended = dirs.run(&["cat", "log.2", "log.1", "log"]);
        ended.assert(0, &[]);
        assert_eq!(String::from_utf8(ended.stdout).unwrap(), input, "{how}");
    }
}
