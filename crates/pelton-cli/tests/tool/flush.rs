//! `pelton flush`: a channel to a record file, and `pelton cat` of what is in it.

use crate::place::Place;
use pelton_testkit::{Process, eventually};
use rustix::process::Signal;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

fn lines(count: usize) -> String {
    (0..count).map(|number| format!("line {number}\n")).collect()
}

#[test]
fn what_is_flushed_is_what_cat_writes() {
    let place = Place::new();
    let input = lines(50_000);
    let channel = format!("path:{}", place.path("work/channel").display());
    let mut send = place.start(&["send", &channel]);
    let flush =
        place.start(&["flush", &channel, "file", "--json", "--rotate", "200K", "--buffer", "64K", "--timeout", "60"]);
    send.write_all_and_close(input.clone().into_bytes());
    send.wait().assert(0, &[]);
    let ended = flush.finish();
    ended.assert(0, &[]);
    let report: serde_json::Value = serde_json::from_str(ended.stderr.trim()).unwrap();
    assert_eq!((report["ended"].as_str(), report["messages"].as_u64()), (Some("closed"), Some(50_000)));
    let mut files: Vec<String> = std::fs::read_dir(place.path("work"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with("file"))
        .collect();
    assert!(files.len() > 2, "{files:?}");
    files.sort_by_key(|name| (!name.contains('.'), name.clone()));
    let mut cat = vec!["cat"];
    cat.extend(files.iter().map(String::as_str));
    let ended = place.run(&cat);
    ended.assert(0, &[]);
    assert!(ended.stdout == input.as_bytes());
    place.assert_nothing_left();
}

#[test]
fn killed_and_started_again_it_writes_each_line_once() {
    let place = Place::new();
    let channel = format!("path:{}", place.path("work/channel").display());
    let input = lines(400_000);
    let mut send = place.start(&["send", &channel, "--capacity", "256K"]);
    send.write_all_and_close(input.clone().into_bytes());
    let size = || std::fs::metadata(place.path("work/file")).map_or(0, |file| file.len());
    for round in 1..=8 {
        let flush = place.start(&["flush", &channel, "file", "--buffer", "32K"]);
        // Somewhere in the middle.
        eventually("the file grows", || size() > round * 200_000);
        flush.signal(Signal::KILL);
        assert_eq!(flush.finish().code(), None);
    }
    let flush = place.start(&["flush", &channel, "file"]);
    send.wait().assert(0, &[]);
    flush.finish().assert(0, &[]);
    let ended = place.run(&["cat", "file"]);
    ended.assert(0, &[]);
    assert!(ended.stdout == input.as_bytes(), "lines are missing, or there twice");
    place.run(&["cat", "--verify", "file"]).assert(0, &[]);
}

#[test]
fn everything_of_many_senders_is_in_the_file_when_it_is_interrupted() {
    let place = Place::new();
    let flush = place.start(&["flush", "--follow", "many", "file", "--json"]);
    eventually("somebody listens", || !matches!(place.run(&["send", "many"]).code(), Some(4)));
    let all: String = (0..3)
        .map(|who| {
            let input: String = (0..1000).map(|number| format!("{who} line {number}\n")).collect();
            let mut send = place.start(&["send", "many"]);
            send.write_all_and_close(input.clone().into_bytes());
            send.wait().assert(0, &[]);
            input
        })
        .collect();
    flush.signal(Signal::INT);
    flush.finish().assert(130, &["\"ended\":\"interrupted\"", "\"messages\":3000"]);
    let ended = place.run(&["cat", "file"]);
    ended.assert(0, &[]);
    assert_eq!(std::str::from_utf8(&ended.stdout).unwrap(), all);
    place.assert_nothing_left();
}

#[test]
fn a_file_that_cannot_be_written_to_is_refused_before_anybody_connects() {
    let place = Place::new();
    place.file("other", b"no record file at all, but something of somebody's");
    place.run(&["flush", "name", "other"]).assert(5, &["other"]);
    assert_eq!(std::fs::read(place.path("work/other")).unwrap(), b"no record file at all, but something of somebody's");
    place.run(&["flush", "name", "missing/file"]).assert(5, &["missing"]);
    let first = place.start(&["flush", "name", "file"]);
    eventually("the file is there", || place.path("work/file").exists());
    place.run(&["flush", "another", "file"]).assert(3, &["file"]);
    first.signal(Signal::TERM);
    first.finish().assert(143, &[]);
    place.run(&["flush", "--connect", "--follow", "name", "file"]).assert(2, &["--follow"]);
    place.assert_nothing_left();
}

#[test]
fn to_standard_output_it_writes_what_recv_would() {
    let place = Place::new();
    let input = lines(20_000);
    let channel = format!("path:{}", place.path("work/channel").display());
    let mut send = place.start(&["send", &channel]);
    send.write_all_and_close(input.clone().into_bytes());
    send.wait().assert(0, &[]);
    let ended = place.run(&["flush", &channel, "-", "--buffer", "64K"]);
    ended.assert(0, &[]);
    assert!(ended.stdout == input.as_bytes());
    place.run(&["flush", &channel, "-", "--sync", "0"]).assert(2, &["--sync", "standard output"]);
    place.run(&["flush", &channel, "file", "--frame", "lines"]).assert(2, &["--frame"]);
    // Its reader goes: nothing is released that was not written.
    let mut send = place.start(&["send", &channel]);
    send.write_all_and_close(input.clone().into_bytes());
    send.wait().assert(0, &[]);
    let mut flush = Process::start_unread(place.pelton(&["flush", &channel, "-"]));
    drop(flush.take_stdout());
    assert_eq!(flush.wait().code(), Some(141));
    let ended = place.run(&["flush", &channel, "-"]);
    assert!(ended.stdout == input.as_bytes());
    place.assert_nothing_left();
}

#[test]
fn a_log_that_is_renamed_again_and_again_while_it_is_written_has_each_line_once() {
    let place = Place::new();
    let channel = format!("path:{}", place.path("work/channel").display());
    let input = lines(400_000);
    let mut send = place.start(&["send", &channel, "--capacity", "256K"]);
    send.write_all_and_close(input.clone().into_bytes());
    let flush = place.start(&["flush", &channel, "log", "--buffer", "32K"]);
    let log = place.path("work/log");
    let mut files = vec!["cat".to_owned()];
    for round in 1..=10 {
        eventually("the log grows", || std::fs::metadata(&log).is_ok_and(|file| file.len() > 50_000));
        let renamed = format!("log.{round}");
        std::fs::rename(&log, log.with_file_name(&renamed)).unwrap();
        files.push(renamed);
        if round % 2 == 0 {
            // As logrotate's `create`, unless the writer was first.
            let _ = std::fs::File::create_new(&log);
        }
    }
    send.wait().assert(0, &[]);
    flush.finish().assert(0, &["log was renamed by another program"]);
    files.push("log".to_owned());
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    let ended = place.run(&files);
    ended.assert(0, &[]);
    assert!(ended.stdout == input.as_bytes(), "lines are missing, or there twice");
}

/// As `spec/record-file.md` configures it.
#[test]
fn logrotate_rotates_a_log_that_is_open_and_nothing_is_lost() {
    if Command::new("logrotate").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
        return eprintln!("SKIPPED: logrotate is not installed");
    }
    for how in ["nocreate", "create 0640", "copytruncate"] {
        let place = Place::new();
        let channel = format!("path:{}", place.path("work/channel").display());
        let log = place.path("work/log");
        let configuration = format!("{} {{\n rotate 5\n {how}\n nocompress\n}}\n", log.display());
        let configuration = place.file("configuration", configuration.as_bytes());
        std::fs::set_permissions(&configuration, PermissionsExt::from_mode(0o600)).unwrap();
        let mut send = place.start(&["send", &channel]);
        let flush = place.start(&["flush", &channel, "log"]);
        let mut input = String::new();
        for round in 0..3 {
            let some: String = (0..100).map(|number| format!("round {round} line {number}\n")).collect();
            send.write(some.as_bytes());
            input += &some;
            let is_written = || place.run(&["cat", "log"]).stdout.ends_with(some.as_bytes());
            eventually("they are in the log", is_written);
            if round < 2 {
                let mut logrotate = Command::new("logrotate");
                logrotate.arg("--force").arg("--state").arg(place.path("work/state")).arg(&configuration);
                let done = logrotate.output().unwrap();
                assert!(done.status.success(), "{done:?}");
            }
        }
        send.close_input();
        send.wait().assert(0, &[]);
        flush.finish().assert(0, &["by another program"]);
        let ended = place.run(&["cat", "--verify", "log.2", "log.1", "log"]);
        ended.assert(0, &[]);
        let ended = place.run(&["cat", "log.2", "log.1", "log"]);
        ended.assert(0, &[]);
        assert_eq!(String::from_utf8(ended.stdout).unwrap(), input, "{how}");
    }
}
