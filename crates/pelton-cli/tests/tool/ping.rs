//! `pelton ping` measures round trips to a service.

use crate::test_dirs;
use pelton_testkit::{Process, ProgramDirs, eventually, json};
use rustix::process::Signal;

fn service(dirs: &ProgramDirs, options: &[&str]) -> Process {
    let service = dirs.start(&[&["serve", "it"], options].concat());
    eventually("the service listens", || dirs.run(&["info", "it"]).code() == Some(0));
    service
}

fn end(service: Process) {
    service.signal(Signal::INT);
    service.wait().assert(130, &[]);
}

#[test]
fn each_reply_has_a_line_and_the_summary_counts_them() {
    let dirs = test_dirs();
    let echo = service(&dirs, &["--echo"]);
    let ended = dirs.run(&["ping", "it", "-c", "3", "-i", "0.01", "--bytes", "1000"]);
    ended.assert(0, &[]);
    let text = String::from_utf8(ended.stdout).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 5, "{text}");
    for (line, call) in lines.iter().zip(1..=3) {
        assert!(line.starts_with(&format!("1000 bytes from it: call={call} time=")), "{line}");
    }
    assert!(lines[3].starts_with("--- it: 3 calls, 3 replies (0 of them failures), 0 timed out, 0 lost"), "{text}");
    assert!(lines[4].starts_with("round trip: min ") && lines[4].contains("median "), "{text}");
    end(echo);
    dirs.assert_nothing_left();
}

#[test]
fn a_flood_reports_its_percentiles_in_order() {
    let dirs = test_dirs();
    let echo = service(&dirs, &["--echo", "--json"]);
    let ended = dirs.run(&["ping", "it", "--flood", "-c", "500", "--json"]);
    ended.assert(0, &[]);
    let report: serde_json::Value = serde_json::from_slice(&ended.stdout).unwrap();
    assert_eq!((report["calls"].as_u64(), report["replies"].as_u64()), (Some(500), Some(500)));
    let times = ["min", "p50", "p90", "p99", "p999", "max"].map(|key| report["round_trip_ns"][key].as_u64().unwrap());
    assert!(times.is_sorted() && times[0] > 0, "{times:?}");
    echo.signal(Signal::INT);
    assert_eq!(json(&echo.wait())["calls"], 500);
    dirs.assert_nothing_left();
}

#[test]
fn no_round_trip_is_shorter_than_the_service_takes() {
    let dirs = test_dirs();
    let it = service(&dirs, &["--exec", "sleep 0.02"]);
    let ended = dirs.run(&["ping", "it", "-c", "5", "-i", "0", "--json"]);
    ended.assert(0, &[]);
    let times = &json(&ended)["round_trip_ns"];
    assert!(times["min"].as_u64() >= Some(19_900_000) && times["p50"].as_u64() >= times["min"].as_u64(), "{times}");
    end(it);
    dirs.assert_nothing_left();
}

#[test]
fn the_service_gets_the_request_of_data_and_its_failure_is_a_reply() {
    let dirs = test_dirs();
    let it = service(&dirs, &["--exec", "read -r word; test \"$word\" = right || { echo wrong >&2; exit 7; }"]);
    let ping = |data| dirs.run(&["ping", "it", "-c", "2", "-i", "0", "--data", data]);
    ping("right").assert(0, &[]);
    let ended = ping("other");
    ended.assert(6, &["2 replies (2 of them failures)"]);
    assert!(String::from_utf8(ended.stdout).unwrap().contains("failure 7 from it: call=1 time="));
    end(it);
    dirs.assert_nothing_left();
}

#[test]
fn an_interrupt_ends_with_the_summary() {
    let dirs = test_dirs();
    let echo = service(&dirs, &["--echo"]);
    let ping = dirs.start(&["ping", "it", "-i", "1000"]);
    assert!(ping.line().starts_with("64 bytes from it: call=1 "));
    ping.signal(Signal::INT);
    assert!(ping.line().starts_with("--- it: 1 calls, 1 replies"));
    ping.finish().assert(130, &[]);
    end(echo);
    dirs.assert_nothing_left();
}

#[test]
fn a_slow_service_times_out_and_a_killed_one_loses_the_call() {
    let dirs = test_dirs();
    dirs.run(&["ping", "nobody", "--timeout", "0"]).assert(4, &["nobody", "--timeout"]);
    let it = service(&dirs, &["--exec", "exec sleep 1000"]);
    dirs.run(&["ping", "it", "-c", "1", "--timeout", "0.5"]).assert(4, &["1 timed out"]);
    let ping = dirs.start(&["ping", "it", "-c", "2", "-i", "0", "--timeout", "0.5"]);
    assert!(ping.line().starts_with("no reply from it within 0.5 s: call=1"));
    it.kill();
    ping.finish().assert(1, &["0 replies", "1 lost"]);
    // The next call connects to the next service.
    let first = service(&dirs, &["--echo"]);
    let ping = dirs.start(&["ping", "it", "-c", "1000000", "-i", "0.01"]);
    ping.line();
    first.kill();
    while ping.line().starts_with("64 bytes") {}
    let second = service(&dirs, &["--echo"]);
    while !ping.line().starts_with("64 bytes") {}
    ping.signal(Signal::INT);
    ping.finish().assert(130, &[]);
    end(second);
}
