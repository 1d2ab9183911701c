//! `pelton conform`: a driver that lies, hangs or lacks a command is reported as such.

use crate::test_dirs;
use pelton_testkit::{Ended, NewEntry, Process, ProgramDirs, eventually};
use rustix::process::Signal;
use serde_json::Value;
use std::os::unix::fs::PermissionsExt as _;

/// Creates a driver: `script` runs before Rust's own driver.
fn driver(dirs: &ProgramDirs, script: &str) -> String {
    let text = format!("#!/bin/sh\n{script}\nexec {} driver \"$@\"\n", env!("CARGO_BIN_EXE_pelton"));
    let path = dirs.file("driver.sh", text.as_bytes());
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    format!("other={}", path.display())
}

/// Runs it with Rust, and returns its checks too. Each driver waits that many seconds.
fn conform(dirs: &ProgramDirs, seconds: &str, arguments: &[&str]) -> (Ended, Vec<Value>) {
    let mut command = dirs.command(&["conform", "--json", "report"]);
    command.args(arguments).env("PELTON_SECONDS", seconds);
    let ended = Process::start(command).finish();
    let report = std::fs::read(dirs.path("work").join("report")).unwrap_or_else(|error| panic!("{error}: {ended:?}"));
    let mut report: Value = serde_json::from_slice(&report).unwrap();
    dirs.assert_nothing_left();
    (ended, std::mem::take(report["checks"].as_array_mut().unwrap()))
}

/// Which checks have that result, as `FROM TO CLAIM`.
fn with_result(checks: &[Value], result: &str) -> Vec<String> {
    let checks = checks.iter().filter(|check| check["result"] == result);
    let text = |check: &Value, field: &str| check[field].as_str().unwrap().to_owned();
    checks.map(|check| ["from", "to", "check"].map(|field| text(check, field)).join(" ")).collect()
}

#[test]
fn rust_with_itself_passes_everything() {
    let dirs = test_dirs();
    let (ended, checks) = conform(&dirs, "20", &["--table", "table"]);
    ended.assert(0, &["rust to rust: 19 passed, 0 failed, 0 unsupported"]);
    assert_eq!(with_result(&checks, "failed"), [""; 0]);
    // Rust replays the vectors of its own kind in `cargo test`.
    assert_eq!(
        with_result(&checks, "unsupported"),
        ["rust rust the command `vectors` alone", "rust rust its own replay"]
    );
    let count = |kind| checks.iter().filter(|check| check["check"].as_str().unwrap().starts_with(kind)).count();
    for kind in ["record file: ", "path: a ", "path: refused: "] {
        assert!(count(kind) > 5, "{kind}");
    }
    let table = std::fs::read_to_string(dirs.path("work").join("table")).unwrap();
    let row = format!("| rust      | mdrtMDRTcsf | {}      |\n", count("record file: ") + count("path: "));
    assert!(table.contains(&row), "{row}{table}");
}

#[test]
fn a_wrong_checksum_is_found() {
    let dirs = test_dirs();
    let script = format!(
        "[ \"$1-$#\" = recv-4 ] && {{ {} driver \"$@\" | sed 's/[0-9a-f]*$/00000000/'; exit; }}",
        env!("CARGO_BIN_EXE_pelton")
    );
    let (ended, checks) = conform(&dirs, "20", &["--short", &driver(&dirs, &script)]);
    ended.assert(1, &["FAILED: rust to other, messages: other", "checksum 00000000`; wanted `ok recv 5 messages"]);
    assert_eq!(with_result(&checks, "failed"), ["rust other messages", "other other messages"]);
    assert_eq!(with_result(&checks, "unsupported"), [""; 0]);
}

#[test]
fn a_driver_that_hangs_is_killed_and_reported() {
    let dirs = test_dirs();
    // Its child hangs too, with the driver's standard output.
    let other = driver(&dirs, "[ \"$1-$#\" = serve-4 ] && { sleep 81264 & sleep 81264; }");
    let (ended, checks) = conform(&dirs, "1", &["--short", &other]);
    ended.assert(1, &["FAILED: rust to other, calls: ", "was killed "]);
    let failed = with_result(&checks, "failed");
    // On a busy machine an honest driver may need more than its second too.
    for hanging in ["rust other calls", "other other calls"] {
        assert!(failed.contains(&hanging.to_owned()), "{failed:?}");
    }
    assert_none_sleeps("81264");
}

/// Fails unless every process with that argument has been killed. A killed process may still be ending.
fn assert_none_sleeps(argument: &str) {
    eventually("the driver's children are killed", || {
        let processes = std::fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path().join("cmdline"));
        !processes.filter_map(|path| std::fs::read_to_string(path).ok()).any(|line| line.contains(argument))
    });
}

#[test]
fn what_a_driver_lacks_is_counted_with_its_reason() {
    let dirs = test_dirs();
    let script = "
        [ \"$1\" = serve ] && { echo 'unsupported serve: it has no services'; exit 3; }
        [ \"$1-$5\" = recv-rest ] && { echo 'unsupported recv rest: it keeps no count'; exit 3; }
        case $1-$2 in send-path:*) echo 'unsupported send path: it has no directories'; exit 3 ;; esac";
    let (ended, checks) = conform(&dirs, "20", &[&driver(&dirs, script)]);
    ended.assert(0, &["other to other: 8 passed, 0 failed, 11 unsupported"]);
    let output = String::from_utf8(ended.stdout).unwrap();
    for line in [
        "| rust      | mdrtMDRTcsf | md-tMD-T-sf | ",
        "| other     | mdrt----csf | md-t-----sf | ",
        "| other    | `recv rest` | it keeps no count                |\n",
        "| other    | `send path` | it has no directories            |\n",
        "| other    | `serve`     | it has no services               |\n",
    ] {
        assert!(output.contains(line), "`{line}` is missing in: {output}");
    }
    let unsupported = with_result(&checks, "unsupported");
    assert!(unsupported.contains(&"rust other calls of all sizes".to_owned()), "{unsupported:?}");
}

#[test]
fn a_wrong_answer_ends_the_run_before_the_first_exchange() {
    let dirs = test_dirs();
    // Its last line of errors has the reason.
    let script = "[ \"$1\" = recv ] && { seq 1 99 >&2; exit 3; }";
    let (ended, checks) = conform(&dirs, "20", &["--short", &driver(&dirs, script)]);
    let wanted = "without a report; wanted exit code 2, or `unsupported` and exit code 3; its errors: 1";
    ended
        .assert(1, &[wanted, "\n    [...]\n    97\n    98\n    99", "1 answers are wrong, so no exchange was started"]);
    assert_eq!(with_result(&checks, "failed"), ["other other the command `recv` alone"]);
    assert_eq!(checks.len(), 8);
}

#[test]
fn a_driver_without_any_command_fails() {
    let dirs = test_dirs();
    let other = driver(&dirs, "echo \"unsupported $1: no library\"; exit 3");
    let wanted =
        "other has none of the commands call, recv, send, serve, so nothing is checked. It says of `call`: no library";
    dirs.run(&["conform", "--short", &other]).assert(1, &[wanted]);
    dirs.assert_nothing_left();
}

#[test]
fn a_driver_that_has_a_command_cannot_call_it_unsupported_later() {
    let dirs = test_dirs();
    let script = "[ \"$1-$#\" = serve-4 ] && { echo 'unsupported serve: an error'; exit 3; }";
    let (ended, checks) = conform(&dirs, "20", &["--short", &driver(&dirs, script)]);
    ended.assert(1, &["exit status: 3, and reported `unsupported serve: an error`; wanted `ok serve 5 messages"]);
    assert_eq!(with_result(&checks, "failed"), ["rust other calls", "other other calls"]);
}

#[test]
fn a_receiver_that_takes_a_killed_sender_for_a_closed_one_is_found() {
    let dirs = test_dirs();
    let script = format!(
        "[ \"$1-$5\" = recv-close ] && exec {} driver recv \"$2\" \"$3\" \"$4\" died",
        env!("CARGO_BIN_EXE_pelton")
    );
    let (ended, checks) = conform(&dirs, "20", &[&driver(&dirs, &script)]);
    ended.assert(1, &["and reported `ok recv 3 messages 10 bytes checksum 350c7441`; wanted an error and exit code 1"]);
    let failed = with_result(&checks, "failed");
    for how in ["a socket", "a path"] {
        let check = format!("rust other `recv close` fails after `send die`, by {how}");
        assert!(failed.contains(&check), "{failed:?}");
    }
}

#[test]
fn a_process_that_leaves_its_group_is_killed_at_the_end() {
    let dirs = test_dirs();
    let script = "[ $# = 1 ] || setsid sleep 81266 >/dev/null 2>&1 &";
    let (ended, _) = conform(&dirs, "20", &["--short", &driver(&dirs, script)]);
    ended.assert(0, &["killed `sleep`, pid "]);
    assert_none_sleeps("81266");
}

#[test]
fn endless_output_is_reported_in_short() {
    let dirs = test_dirs();
    let script = "[ \"$1\" = recv ] && exec tr '\\0' x </dev/zero";
    let (ended, _) = conform(&dirs, "20", &["--short", &driver(&dirs, script)]);
    ended.assert(1, &["wrote more than 65536 bytes to standard output, and reported `xxx"]);
    assert!(ended.stderr.len() < 2000, "{ended:?}");
}

#[test]
fn an_interrupted_run_leaves_no_file_and_no_process() {
    let dirs = test_dirs();
    let entry = NewEntry::watch(&dirs.path("tmp"));
    let run = dirs.start(&["conform", "--short", &driver(&dirs, "exec sleep 81265")]);
    entry.wait();
    run.signal(Signal::INT);
    run.finish().assert(130, &[]);
    assert_none_sleeps("81265");
    dirs.assert_nothing_left();
}

#[test]
fn wrong_drivers_are_refused() {
    let dirs = test_dirs();
    let other = driver(&dirs, "");
    dirs.run(&["conform", &other, &other]).assert(2, &["two drivers have the name `other`"]);
    dirs.run(&["conform", "c=/nowhere/driver"]).assert(2, &["want an executable file"]);
}

#[test]
fn the_driver_gathers_any_senders_and_has_the_exit_codes_of_the_contract() {
    let dirs = test_dirs();
    let gathering = dirs.start(&["driver", "gather", "many", "5", "4"]);
    dirs.run(&["driver", "send", "many", "3", "9,2"]).assert(0, &[]);
    dirs.run(&["driver", "send", "many", "2", "5"]).assert(0, &[]);
    let ended = gathering.finish();
    ended.assert(0, &[]);
    let output = String::from_utf8(ended.stdout).unwrap();
    let (lines, report) = output.trim_end().rsplit_once('\n').unwrap();
    assert_eq!(lines, "abcd\nbc\ncdef\nabcd\nbcde");
    assert!(report.starts_with("ok gather 5 messages 30 bytes checksum "), "{report}");

    let vectors = dirs.run(&["driver", "vectors"]);
    vectors.assert(3, &[]);
    assert!(vectors.stdout.starts_with(b"unsupported vectors: "));
    for usage in
        [&["driver", "send"][..], &["driver", "send", "n", "x", "1"], &["driver", "recv", "n", "1", "1", "later"]]
    {
        dirs.run(usage).assert(2, &["driver COMMAND NAME COUNT SIZES [THEN]"]);
    }
    dirs.assert_nothing_left();
}
