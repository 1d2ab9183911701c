//! The workloads as a user runs them, in small runs: the figures are there, however large they are.

use std::{
    env, fs,
    path::Path,
    process::{Command, Stdio},
    sync::Once,
};

use serde_json::Value;

use crate::command::{PROGRAM, bench, figure, has, is_skipped, lines, measured, report, script};

const KERNELS: &str = "sock-stream-batched,pipe,sock-stream,sock-seqpacket,sock-seqpacket-batched,sock-dgram";
/// The first figures of workloads that count messages.
const RATES: &[&str] = &["messages_per_second", "bytes_per_second"];

#[test]
fn a_stream_reports_every_system_and_its_ratios() {
    for (wait, size) in [("block", "256"), ("epoll", "1..100000"), ("block", "3")] {
        let command = format!("stream --size {size} --count 300 --runs 2 --wait {wait} --systems {KERNELS}");
        let systems = measured(&command, RATES);
        let names: Vec<&str> = systems.iter().map(|system| system["system"].as_str().unwrap()).collect();
        assert_eq!(names.join(","), KERNELS);
        for system in &systems {
            assert_eq!((&system["wait"], &system["workload"]), (&wait.into(), &"stream".into()));
            assert_eq!((&system["parameters"]["size"], &system["parameters"]["count"]), (&size.into(), &300.into()));
            assert!(system["runs"][1]["sides"]["receiver"]["cpu_seconds"].as_f64().unwrap() >= 0.0);
            assert_eq!((&system["round_trip_ns"], &system["resident_bytes"]), (&Value::Null, &Value::Null));
        }
    }
}

#[test]
fn a_round_trip_reports_every_system_and_its_percentiles() {
    for (wait, delay) in [("block", "0"), ("epoll", "5")] {
        let command = format!("roundtrip --count 200 --runs 1 --wait {wait} --delay {delay} --systems {KERNELS}");
        for system in measured(&command, &["round_trip_ns", "p50_ns"]) {
            assert!(figure(&system, "p50_ns") <= figure(&system, "p90_ns"));
            assert_eq!(system["p99_ns"], Value::Null, "two of two hundred say nothing");
            assert!(figure(&system, "sleeps_per_wait") >= 0.0);
            assert!(system["runs"][0]["sides"]["answerer"]["sleeps_per_wait"].is_number());
            assert_eq!(system["messages_per_second"], Value::Null);
        }
    }
}

#[test]
fn of_two_times_the_table_says_that_the_shorter_is_faster() {
    let output = bench("roundtrip --count 200 --runs 1 --wait block --systems pipe,sock-stream");
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(table.contains("speedup of pipe over this (95 %)"), "{table}");
    let cells = |system: &str| {
        let row = table.lines().find(|line| line.starts_with(system)).unwrap();
        row.split_whitespace().map(str::to_string).collect::<Vec<_>>()
    };
    let [pipe, socket] = [cells("pipe "), cells("sock-stream ")];
    let times = [&pipe, &socket].map(|row| row[2].parse::<f64>().unwrap());
    // The last cell is `1.234 (1.234 to 1.234)`.
    let speedup: f64 = socket[socket.len() - 4].parse().unwrap();
    assert!((speedup * times[0] / times[1] - 1.0).abs() < 0.02, "{table}");
    let output = bench("lopsided --count 2000 --runs 1 --systems pipe,sock-stream");
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(table.contains("pipe divided by this (95 %)"), "{table}");
}

#[test]
fn one_system_may_be_measured_with_two_waits() {
    let systems = measured("roundtrip --count 50 --runs 1 --systems pipe:block,pipe:epoll", &["round_trip_ns"]);
    assert_eq!((&systems[0]["label"], &systems[0]["wait"]), (&"pipe:block".into(), &"block".into()));
    assert_eq!((&systems[1]["label"], &systems[1]["system"]), (&"pipe:epoll".into(), &"pipe".into()));
}

#[test]
fn a_system_that_cannot_do_it_is_skipped_with_the_reason() {
    let (systems, ratios) = report("stream --size 0 --count 10 --runs 2 --wait block --systems sock-seqpacket,pipe");
    is_skipped(&systems[0], "empty packet");
    assert!(systems[0]["runs"].as_array().unwrap().is_empty());
    assert_eq!((&systems[0]["messages_per_second"], &systems[1]["skipped"]), (&Value::Null, &Value::Null));
    assert!(ratios["ratios"].as_object().unwrap().is_empty());
    for (workload, system, words) in [
        ("stream --count 10", "bump", "measure it with append"),
        ("stream --count 10", "pelton-alone", "measure it with broadcast"),
        ("append --count 10", "write", "measure it with append --file"),
        ("append --count 10", "sock-stream", "measure it with stream or any other"),
        ("fan-in --count 10", "pipe", "no part in fan-in"),
        ("broadcast --count 10", "pipe", "no part in broadcast"),
        ("idle", "limits", "skipped limits: it has no part in idle: measure it with stream or roundtrip"),
        ("kill", "pelton-c", "measure it with stream or roundtrip or lopsided or idle"),
        ("stream --count 10 --wait uv", "pelton", "only a side in C is in libuv's loop"),
        ("stream --count 10 --wait block", "eventfd-ring", "write --wait uv or uv-bulk"),
        ("reattach --count 10000 --capacity 65536", "pelton-path", "raise --capacity"),
    ] {
        let output = bench(&format!("{workload} --runs 1 --systems {system}"));
        assert_eq!(output.status.code(), Some(1), "nothing was measured: {workload} {system}");
        let text = String::from_utf8_lossy(&output.stdout);
        let needs_libuv = system == "eventfd-ring" && text.contains("libuv's header");
        assert!(text.contains(words) || needs_libuv, "{output:?}");
    }
}

#[test]
fn bad_arguments_exit_with_2_and_name_the_valid_ones() {
    let output = bench("stream --systems pipe,telepathy");
    assert_eq!((output.status.code(), output.stdout.is_empty()), (Some(2), true));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("found the system `telepathy`, wanted one of pelton, pelton-path,"), "{errors}");
}

#[test]
fn the_limits_are_measured_or_skipped_with_the_reason() {
    let (systems, _) = report("roundtrip --delay 5 --count 50 --runs 1 --systems pipe,limits");
    let limits = &systems[1];
    assert!(limits["version"].as_str().unwrap().starts_with("limits.c "));
    let set = rustix::thread::sched_getaffinity(None).unwrap();
    if set.is_set(0) && set.is_set(1) && can_c(false) {
        assert!(limits["round_trip_ns"].is_number(), "{limits}");
    } else {
        assert!(limits["skipped"].is_string(), "{limits}");
        eprintln!("LEFT OUT: limits.c, for the CPUs 0 and 1 or a C compiler are missing");
    }
}

#[test]
#[ignore = "takes minutes: ./run test-bench the_search"]
fn the_search_compares_pelton_with_a_ring_at_each_bound() {
    let set = rustix::thread::sched_getaffinity(None).unwrap();
    if !(set.is_set(0) && set.is_set(1) && can_c(false)) {
        return eprintln!("LEFT OUT: limits.c, for the CPUs 0 and 1 or a C compiler are missing");
    }
    let directory = tempfile::tempdir().unwrap();
    let results = directory.path().join("search.jsonl");
    let output = bench(&format!("limits-search --size 64 --short --results {}", results.display()));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = lines(&std::fs::read(results).unwrap());
    let bounds: Vec<_> = lines[1..].iter().map(|line| line["bound"].as_u64().unwrap() >> 10).collect();
    assert_eq!(bounds, [128, 1024, 2048, 8192, 16384, 65536, 16384], "KiB; the last publishes each message");
    assert!(lines[0]["machine"].is_object() && lines[7]["ring"]["batch"] == 0, "{lines:?}");
    for line in &lines[1..] {
        for rates in ["million_messages_per_second", "pelton", "pelton_batches", "memory_alone", "line_ns"] {
            let rates = line[rates].as_array().map_or_else(|| vec![line[rates].clone()], Clone::clone);
            assert!(!rates.is_empty() && rates.iter().all(|rate| rate.as_f64().unwrap() > 0.0), "{line}");
        }
        assert!(line["pelton_by_ring"]["median"].as_f64().unwrap() > 0.0, "{line}");
        assert!(line["ring"]["window"].as_u64() <= line["bound"].as_u64(), "{line}");
    }
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with("64 B messages, a line there and back in"), "{text}");
}

#[test]
fn each_system_may_have_as_many_messages_as_last_so_long() {
    for (workload, first) in [("stream", "messages_per_second"), ("roundtrip", "round_trip_ns")] {
        let command = format!("{workload} --seconds 0.02 --runs 2 --wait block --systems pelton,pipe,sock-stream");
        for system in measured(&command, &[first]) {
            assert_eq!(system["parameters"]["seconds"], 0.02);
            // The machine decides how long they take.
            assert!(system["parameters"]["count"].as_u64().unwrap() > 16, "{system}");
        }
    }
    let few = report("stream --seconds 10 --count 50 --runs 1 --wait block --systems pipe").0;
    assert_eq!(few[0]["parameters"]["count"], 50);
}

#[test]
fn channels_of_directories_are_measured_as_those_of_sockets() {
    let rest = "--count 300 --runs 1 --systems pelton-path:block,pelton-path:epoll,pelton:block";
    measured(&format!("stream {rest}"), &["messages_per_second", "resident_bytes"]);
    measured(&format!("roundtrip {rest}"), &["round_trip_ns"]);
}

/// Whether a C compiler is there, and libuv if `uv`; prints what is skipped without, which is nothing in CI. Builds
/// the library that C links with, which `cargo test` alone does not.
fn can_c(uv: bool) -> bool {
    static LIBRARY: Once = Once::new();
    LIBRARY.call_once(|| {
        let target = Path::new(PROGRAM).ancestors().nth(2).unwrap();
        let profile = if cfg!(debug_assertions) { "dev" } else { "release" };
        let mut cargo = Command::new(env!("CARGO"));
        // With the features of `./run test`: others would compile the crate pelton once more, for 20 s.
        cargo.args(["build", "--quiet", "--workspace", "--features", "pelton/tokio", "--lib", "--profile", profile]);
        cargo.arg("--target-dir").arg(target);
        assert!(cargo.status().unwrap().success());
    });
    let include = if uv { "#include <uv.h>" } else { "" };
    let mut cc = Command::new("sh");
    cc.args(["-c", &format!("echo '{include}' | cc -E -x c - >/dev/null 2>&1")]);
    let can = cc.status().unwrap().success();
    if !can {
        let missing = if uv { "in libuv's loop, for libuv's header" } else { "for a C compiler" };
        eprintln!("LEFT OUT: sides in C {missing} is missing");
        assert!(env::var_os("PELTON_CI").is_none(), "nothing is left out in CI");
    }
    can
}

#[test]
fn a_side_in_c_does_what_one_in_rust_does() {
    if !can_c(false) {
        return;
    }
    let uv = if can_c(true) { ",pelton-c:uv,pelton-c:uv-bulk" } else { "" };
    let systems = "pelton:block,pelton-c:block,pelton-c:epoll";
    // A lane that is full many times, also with messages half as large as it, and one that never is.
    for (size, capacity) in [("256", 65536), ("1..30000", 65536), ("0", 65536), ("3", 1 << 20), ("3..3000", 65536)] {
        let command =
            format!("stream --count 3000 --size {size} --capacity {capacity} --runs 1 --systems {systems}{uv}");
        for system in measured(&command, &RATES[..1]) {
            // Not libpelton.so's memory, which is no channel's.
            assert!((1.0..3e6).contains(&figure(&system, "resident_bytes")), "{system}");
        }
    }
    for size in ["3", "64", "3..3000", "1..30000", "32000"] {
        let command = format!("roundtrip --count 3000 --size {size} --capacity 65536 --runs 1 --systems {systems}");
        measured(&command, &["round_trip_ns", "p50_ns"]);
    }
    let (idle, _) = report(&format!("idle --runs 1 --capacity 65536 --systems pelton,pelton-c:block{uv}"));
    assert!(idle.iter().all(|system| system["wakeups_per_second"].is_number()), "{idle:?}");
    let (rated, _) = report("roundtrip --rate 1000 --count 20 --runs 1 --systems pelton,pelton-c");
    is_skipped(&rated[1], "know no rate");
}

#[test]
fn the_ring_in_c_has_the_same_messages() {
    if !can_c(true) {
        return;
    }
    for size in ["256", "1..30000", "0", "3", "32000"] {
        let systems = "pelton-c:uv,eventfd-ring:uv,eventfd-ring:uv-bulk";
        let command = format!("stream --runs 1 --capacity 65536 --size {size} --count 3000 --systems {systems}");
        measured(&command, &RATES[..1]);
    }
}

#[test]
fn lopsided_sides_are_compared_with_their_own_work() {
    let uv = if can_c(true) { ",pelton-c:uv,pelton-c:block" } else { "" };
    for slow in ["receiver", "sender"] {
        let command =
            format!("lopsided --slow {slow} --work 20 --count 400 --capacity 65536 --runs 2 --systems pelton,pipe{uv}");
        // Other costs only add to the work; but the clock and the machine are not that exact.
        for system in measured(&command, &["share_of_own_speed", "cpu_to_own_work", "messages_per_second"]) {
            assert_eq!((&system["parameters"]["slow"], &system["parameters"]["work_us"]), (&slow.into(), &20.into()));
        }
    }
}

#[test]
fn successors_are_timed_on_channels_that_can_have_any() {
    let (systems, _) = report("reattach --count 1000 --runs 2 --systems pelton-path,pelton,limits");
    assert_eq!(systems[0]["skipped"], Value::Null, "{}", systems[0]);
    for name in ["reattach_receiver_ns", "reattach_sender_ns"] {
        assert!(figure(&systems[0], name) > 0.0, "{}", systems[0]);
    }
    systems[1..].iter().for_each(|system| is_skipped(system, "no part in reattach"));
}

#[test]
fn many_senders_are_measured_beside_one_and_beside_idle_ones() {
    let systems =
        "pelton:block,pelton:epoll,pelton-alone:block,pelton-stream:block,sock-stream:block,sock-seqpacket:block";
    for (senders, idle, size, count) in
        [(3, 5, "256", 1000), (1, 0, "8", 10), (8, 0, "8..3000", 1000), (2, 40, "64", 2)]
    {
        let command = format!(
            "fan-in --senders {senders} --idle {idle} --size {size} --count {count} --runs 2 --capacity 65536 --systems {systems}"
        );
        for system in measured(&command, RATES) {
            let parameters = &system["parameters"];
            assert_eq!((&parameters["senders"], &parameters["idle"]), (&senders.into(), &idle.into()));
            // The receiver and each sender; of pelton-stream one sender, whatever --senders says.
            let sides = if system["system"] == "pelton-stream" { 2 } else { 1 + senders };
            let found = system["runs"][1]["sides"].as_object().unwrap();
            assert_eq!(found.len(), sides, "{system}");
            assert!(["receiver", "sender-1"].iter().all(|side| found[*side]["cpu_seconds"].is_number()));
        }
    }
}

#[test]
fn one_sender_of_many_receivers_is_measured_beside_copies() {
    let systems = "pelton:block,pelton-path:block,pelton-copies:block,sock-dgram:block";
    for (receivers, size, count) in [(1, "256", 300), (3, "8..3000", 1000), (9, "65536", 50)] {
        let command =
            format!("broadcast --receivers {receivers} --size {size} --count {count} --runs 2 --systems {systems}");
        for system in measured(&command, RATES) {
            assert_eq!(system["parameters"]["receivers"], receivers);
            assert!(figure(&system, "sender_ns") > 0.0, "{system}");
            let sides = system["runs"][1]["sides"].as_object().unwrap();
            assert_eq!(sides.len(), receivers + 1, "{system}");
            assert!(sides["sender"]["cpu_seconds"].is_number(), "{system}");
        }
    }
    // A subscriber that may be passed holds nobody up, and is no side of the run.
    let command =
        "broadcast --receivers 1 --lagging 2 --lag-delay 10 --count 2000 --runs 1 --systems pelton,pelton-alone";
    for system in measured(command, RATES) {
        assert_eq!(system["parameters"]["delay_us"], 10);
        assert_eq!(system["runs"][0]["sides"].as_object().unwrap().len(), 2, "{system}");
    }
    let (systems, _) = report("broadcast --lagging 1 --count 100 --runs 1 --systems pelton,sock-dgram");
    is_skipped(&systems[1], "the idler has no part");
}

#[test]
fn each_receiver_has_a_latency_at_a_rate() {
    let systems = "pelton,pelton-copies,sock-dgram";
    let command = format!("broadcast --receivers 3 --rate 500 --count 40 --runs 1 --systems {systems}");
    for system in measured(&command, &["p50_ns"]) {
        let [fastest, all, slowest] = ["fastest_p50_ns", "p50_ns", "slowest_p50_ns"].map(|name| figure(&system, name));
        assert!(0.0 < fastest && fastest <= slowest && all > 0.0, "{system}");
        assert!(system["messages_per_second"].is_null(), "{system}");
    }
}

#[test]
fn redis_is_measured_in_a_broadcast_only_and_its_server_ends() {
    if !has("redis-server", "Redis's publish-subscribe") {
        return;
    }
    for (receivers, size) in [(1, "256"), (3, "65536")] {
        let command = format!("broadcast --receivers {receivers} --size {size} --count 300 --runs 1 --systems redis");
        assert!(figure(&measured(&command, &[])[0], "messages_per_second") > 0.0);
    }
}

#[test]
fn calls_are_measured_one_by_one_and_many_at_a_time() {
    let systems = "pelton:block,pelton:epoll,sock-stream:block,sock-stream:epoll,sock-stream-batched:block";
    // Lanes that are full many times, and requests that are larger than a lane.
    for (size, in_flight, clients, count) in [
        ("64", 1, 1, 300),
        ("0", 1, 1, 20),
        ("3", 100, 1, 1000),
        ("0..100000", 1, 1, 100),
        ("1..3000", 1024, 1, 3000),
        ("100000", 20, 1, 100),
        ("8..3000", 1, 3, 1000),
        ("64", 1000, 3, 5000),
        ("3000", 300, 8, 4000),
    ] {
        let command = format!(
            "call --size {size} --count {count} --in-flight {in_flight} --clients {clients} --capacity 65536 --runs 2 --systems {systems}"
        );
        let one_by_one = in_flight == 1 && clients == 1;
        for system in measured(&command, &[if one_by_one { "round_trip_ns" } else { "messages_per_second" }]) {
            let calls = &system["parameters"]["calls"];
            assert_eq!((&calls["in_flight"], &calls["clients"]), (&in_flight.into(), &clients.into()));
            let messages = figure(&system, "messages_per_second") / figure(&system, "calls_per_second");
            assert!((messages / 2.0 - 1.0).abs() < 0.001, "{system}");
            assert!(figure(&system, "p50_ns") > 0.0 && system["p9999_ns"].is_null(), "{system}");
            assert_eq!(system["round_trip_ns"].is_number(), one_by_one, "{system}");
            assert_eq!(system["resident_bytes"].is_number(), system["system"] == "pelton", "{system}");
            let sides = system["runs"][1]["sides"].as_object().unwrap();
            assert_eq!(sides.len(), 1 + clients, "{system}");
            assert!(sides["service"]["cpu_seconds"].is_number() && sides["client-1"].is_object());
        }
    }
}

#[test]
fn calls_with_pauses_are_timed_one_by_one() {
    for option in ["--delay 5", "--rate 200", "--placement together"] {
        let is_together = option.starts_with("--placement");
        for system in
            measured(&format!("call --count 30 --runs 2 --systems pelton,sock-stream {option}"), &["round_trip_ns"])
        {
            assert_eq!(system["wait"], "block");
            assert!(system["sleeps_per_wait"].is_number(), "{system}");
            assert_eq!(system["calls_per_second"].is_number(), is_together, "{system}");
            let cpus = system["parameters"]["cpus"].as_array().unwrap();
            assert!(!is_together || cpus[0] == cpus[1], "{cpus:?}");
        }
    }
    let (systems, _) = report("call --rate 200 --count 30 --runs 1 --systems pelton,limits");
    is_skipped(&systems[1], "a CPU of its own");
}

#[test]
fn calls_are_measured_beside_a_flood_and_without_it_and_beside_messages_one_way() {
    let systems = measured("call --beside-flood --count 1000 --runs 2 --capacity 65536", &["p99_ns"]);
    let names: Vec<&str> = systems.iter().map(|system| system["system"].as_str().unwrap()).collect();
    assert_eq!(names, ["pelton", "pelton-alone", "sock-stream", "sock-stream-alone"]);
    // The flooding client is no side of the report.
    assert!(systems.iter().all(|system| system["runs"][1]["sides"].as_object().unwrap().len() == 2), "{systems:?}");

    let command = "call --clients 3 --in-flight 50 --count 900 --runs 2 --systems pelton,pelton-fan-in";
    let one_way = &measured(command, &["messages_per_second"])[1];
    assert!(one_way["runs"][1]["sides"]["sender-3"].is_object() && one_way["calls_per_second"].is_null(), "{one_way}");
}

#[test]
fn calls_in_c_and_by_the_queue_are_measured_and_every_reply_is_compared() {
    if !can_c(false) {
        return;
    }
    let go = if has("go", "handlers and services in Go") { ",pelton-c-go,queue-go" } else { "" };
    for (size, placement) in [("512", "free"), ("102400", "together"), ("8", "apart")] {
        let command = format!(
            "call --size {size} --count 200 --runs 2 --placement {placement} --wait block --systems pelton-c:block,pelton-c:epoll,queue{go}"
        );
        for system in measured(&command, &["round_trip_ns"]) {
            let sides: Vec<&String> = system["runs"][1]["sides"].as_object().unwrap().keys().collect();
            let is_queue = system["system"].as_str().unwrap().starts_with("queue");
            assert_eq!(sides, if is_queue { vec!["both"] } else { vec!["client-1", "service"] });
            assert_eq!(system["wait"] == "epoll", is_queue || system["label"] == "pelton-c:epoll", "{system}");
        }
    }
    // Both sides sleep in each call: each wake-up and each sleep is a system call.
    let queue = report("call --count 500 --runs 1 --systems queue").0.remove(0);
    assert!(queue["syscalls_per_message"].as_f64().is_none_or(|calls| calls >= 1.0), "{queue}");
    is_skipped(&report("call --in-flight 2 --count 20 --runs 1 --systems pelton,queue").0[1], "leave out");
}

#[test]
fn every_system_flushes_the_appended_messages() {
    // A buffer or two, and one that is never full.
    for (threads, count) in [(1, 60000), (3, 30000), (2, 1)] {
        let command = format!(
            "append --threads {threads} --count {count} --runs 2 --systems pelton,bump,mutex-vec,array-queue,seg-queue"
        );
        for system in measured(&command, RATES) {
            assert_eq!(system["parameters"]["threads"], threads);
            assert!(system["runs"][1]["sides"]["appender"]["cpu_seconds"].is_number());
        }
    }
    for size in ["8", "21", "65536"] {
        let rest = format!("append --size {size} --count 300 --capacity 262144 --runs 1 --systems pelton");
        measured(&format!("{rest},bump,mutex-vec"), RATES);
        is_skipped(&report(&format!("{rest},array-queue")).0[1], "messages are of 16 bytes");
    }
}

/// The side in Lisp compares every record of its first pass, and counts those of the others.
#[test]
fn every_system_in_lisp_flushes_each_message_once() {
    if !has("sbcl", "sides in Lisp") || !can_c(false) {
        return;
    }
    // Several buffers, and one that is never full.
    for (threads, count) in [(3, 100000), (2, 1)] {
        let systems = "pelton-sbcl,pelton-sbcl-reserved,sbcl-mutex,sbcl-compare-and-swap";
        measured(&format!("append --threads {threads} --count {count} --runs 1 --systems {systems}"), RATES);
    }
}

#[test]
fn appended_messages_are_in_a_file_which_is_removed() {
    let temporary = tempfile::tempdir().unwrap();
    let directory = temporary.path().to_str().unwrap();
    // Some buffers, one that is never full, and padding between the records.
    for (threads, count, size) in [(1, 30000, 256), (3, 10000, 256), (2, 1, 8), (2, 40000, 21)] {
        let command = format!("append --file {directory} --threads {threads} --count {count} --size {size} --runs 2");
        for system in measured(&format!("{command} --systems pelton,write"), RATES) {
            assert_eq!(system["parameters"]["file"], directory);
        }
        assert_eq!(fs::read_dir(directory).unwrap().count(), 0);
    }
}

#[test]
fn a_file_that_cannot_be_written_makes_no_figure_and_is_removed() {
    let temporary = tempfile::tempdir().unwrap();
    let directory = temporary.path().to_str().unwrap();
    for system in ["pelton", "write"] {
        // The limit is 8 MiB for a file (or 16, if the shell counts in KiB), and lanes are smaller. With SIGXFSZ
        // ignored the write fails instead.
        let output = Command::new("sh")
            .args(["-c", "trap '' XFSZ; ulimit -f 16384; exec \"$@\"", "sh", PROGRAM])
            .args(["append", "--file", directory, "--count", "60000", "--runs", "1", "--systems", system])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains(&format!("skipped {system}")) && text.contains("writing"), "{output:?}");
        assert_eq!(fs::read_dir(directory).unwrap().count(), 0);
    }
}

#[test]
fn a_round_that_falls_due_behind_a_late_one_is_late_itself() {
    // A pipe makes no million rounds a second: the last one waits for all before it, and its time includes that.
    let (count, command) = (2000.0, "roundtrip --rate 1000000 --count 2000 --runs 1 --systems pipe");
    for system in measured(&format!("{command},pelton"), &["round_trip_ns"]) {
        assert_eq!(system["parameters"]["rate"], 1_000_000);
        assert!(figure(&system, "p50_ns") <= figure(&system, "p99_ns"), "{system}");
        assert_eq!(system["p9999_ns"], Value::Null, "a fifth of a round says nothing");
        let ladder = system["runs"][0]["latency"].as_array().unwrap();
        assert!(ladder.len() > 5 && ladder.windows(2).all(|pair| pair[0][1].as_u64() <= pair[1][1].as_u64()));
        assert_eq!(ladder.last().unwrap()[0], 1.0);
    }
    // Rounds timed from their sending fill the run, one after the other. Each of these, all late, lasts for most of
    // it.
    let pipe = &report(command).0[0];
    assert!(figure(pipe, "round_trip_ns") * count > 10.0 * 1e9 * figure(pipe, "seconds"), "{pipe}");
    let seldom = report("roundtrip --rate 1000 --count 20 --runs 1 --systems pipe").0;
    // No message is sent ahead of time.
    assert!(figure(&seldom[0], "seconds") >= 0.019, "{}", seldom[0]);
}

#[test]
fn a_quota_limits_the_measured_processes_and_leaves_no_group() {
    // One side or the other computes all the time, so without a quota the CPU time would be all of a run's.
    let command = "roundtrip --quota 20 --delay 300 --count 400 --runs 1 --systems pelton,pipe --json";
    let mut program = Command::new(PROGRAM);
    program.args(command.split(' ')).stdout(Stdio::piped()).stderr(Stdio::piped());
    let program = program.spawn().unwrap();
    let group = format!("pelton-bench-{}", program.id());
    let output = program.wait_with_output().unwrap();
    for mount in fs::read_to_string("/proc/mounts").unwrap().lines().filter(|mount| mount.contains(" cgroup")) {
        let group = Path::new(mount.split(' ').nth(1).unwrap()).join(&group);
        assert!(!group.exists(), "{} is left", group.display());
    }
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(error.contains("--quota is not possible here"), "{error}");
        return eprintln!("LEFT OUT: quotas: {error}");
    }
    for system in &lines(&output.stdout)[..2] {
        assert_eq!((&system["parameters"]["quota"], &system["skipped"]), (&20.into(), &Value::Null), "{system}");
        // The quota of a period may be used at once, at the beginning and at the end.
        assert!(figure(system, "cpu_seconds") < 0.2 * figure(system, "seconds") + 0.06, "{system}");
    }
}

#[test]
fn every_burst_is_answered_once() {
    let systems = "pelton,pelton-path,pipe,sock-stream-batched,sock-seqpacket-batched,sock-dgram";
    for (size, burst) in [("64", 1), ("64", 500), ("8..3000", 40)] {
        let command =
            format!("burst --size {size} --burst {burst} --count 60 --runs 2 --wait block --systems {systems}");
        for system in measured(&command, &["round_trip_ns", "messages_per_second"]) {
            assert_eq!(system["parameters"]["burst"], burst);
        }
    }
}

#[test]
fn threads_are_measured_with_single_messages_and_batches() {
    for wait in ["block", "spin"] {
        let command = format!("threads --count 5000 --runs 2 --wait {wait} --systems pelton");
        for system in measured(&format!("{command},pelton-batches"), RATES) {
            assert_eq!(system["runs"][1]["sides"].as_object().unwrap().keys().collect::<Vec<_>>(), ["threads"]);
        }
    }
}

#[test]
fn batches_of_messages_are_measured_between_processes() {
    let command = |size: &str, system: &str| {
        format!("stream --size {size} --count 5000 --runs 1 --systems pipe:block,pelton-batches{system}")
    };
    // A size that is a constant in the program, and one that is not.
    for size in ["64", "100"] {
        measured(&command(size, ""), RATES);
    }
    is_skipped(&report(&command("1..300", "")).0[1], "one size");
    is_skipped(&report(&command("64", ":block")).0[1], "write spin");
}

#[test]
fn memory_grows_with_the_backlog_where_it_fits() {
    let systems = report("memory --count 20000 --runs 1 --systems pelton,pelton-path,sock-stream,sock-stream:spin").0;
    for system in &systems[..2] {
        assert_eq!(figure(system, "backlog_messages"), 20_000.0);
        let payload = 20_000.0 * 256.0;
        let resident = figure(system, "backlog_resident_bytes");
        // The pages are both processes', or the sender's alone; nothing else here is as large.
        assert!(resident > 0.9 * payload && resident < 2.0 * payload + 1e6, "{resident} for {payload}: {system}");
    }
    // A socket does not hold all of them, whose sender then sleeps or polls.
    systems[2..].iter().for_each(|system| assert!(figure(system, "backlog_messages") < 20_000.0, "{system}"));
}

#[test]
fn a_survivor_detects_the_death_and_other_outcomes_have_names() {
    for system in measured("kill --runs 2 --systems pelton,pelton-path,pipe,sock-stream,sock-seqpacket-batched", &[]) {
        for run in system["runs"].as_array().unwrap() {
            for killed in ["receiver", "sender"] {
                let death = &run["deaths"][killed];
                assert_eq!(death["outcome"], "detected", "{killed} of {}: {death}", system["label"]);
                assert!(!death["words"].as_str().unwrap().is_empty());
                assert!(figure(run, &format!("{killed}_death_detected_ns")) > 0.0);
            }
            assert!(run["deaths"]["sender"]["messages"].as_u64().unwrap() > 0, "the stream ran: {run}");
        }
    }
}

/// A peer without a build: Python's.
#[test]
fn a_program_in_another_language_is_measured_with_its_system_calls() {
    if !has("python3", "systems in Python") {
        return;
    }
    let systems = "pipe,multiprocessing-pipe,multiprocessing-queue";
    for (workload, first) in [
        ("stream --size 256", RATES[0]),
        ("stream --size 1..300", RATES[0]),
        ("roundtrip --size 64", "round_trip_ns"),
        ("stream --size 3", RATES[0]),
    ] {
        let command = format!("{workload} --count 300 --runs 1 --wait block --systems {systems}");
        let systems = measured(&command, &[first, "cpu_seconds"]);
        // If the pipe's calls could be counted, those of both its processes are.
        let counted = systems[0]["syscalls_per_message"].is_number();
        assert!(
            !counted || systems[1..].iter().all(|system| figure(system, "syscalls_per_message") >= 2.0),
            "{systems:?}"
        );
    }
    let (systems, _) = report("stream --count 10 --runs 1 --systems pipe,multiprocessing-pipe:epoll");
    is_skipped(&systems[1], "write block");
}

#[test]
fn results_and_their_page_are_written() {
    let directory = tempfile::tempdir().unwrap();
    let [results, page, filled] = ["r.jsonl", "p.html", "figures.md"].map(|name| directory.path().join(name));
    let output = Command::new(PROGRAM)
        .args(["all", "--short", "--only", "threads --size 64", "--results"])
        .arg(&results)
        .arg("--report")
        .arg(&page)
        // Nothing is built for this: systems outside this program are skipped, with a reason.
        .env("CARGO", "/bin/false")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = lines(&fs::read(&results).unwrap());
    assert_eq!(lines[0]["machine"]["command"], "./run bench all --short");
    assert_eq!(lines[0]["machine"]["interrupted"], false);
    assert!(figure(&lines[1], "messages_per_second") > 0.0, "{}", lines[1]);
    is_skipped(&lines[3], "failed");
    assert!(fs::read_to_string(&page).unwrap().contains("pelton-batches"));

    fs::write(&filled, "<!-- bench threads -->\n<!-- /bench -->\n").unwrap();
    let [results, text] = [&results, &filled].map(|place| place.to_str().unwrap());
    let refused = bench(&format!("figures {results} {text}"));
    let words = String::from_utf8_lossy(&refused.stderr);
    assert!(words.contains("use --draft"), "a short run has no figures: {refused:?}");
    assert!(bench(&format!("figures --draft {results} {text}")).status.success());
    assert!(fs::read_to_string(&filled).unwrap().contains("| pelton-batches |"));
}

#[test]
fn a_peer_that_cannot_be_built_is_skipped_with_the_reason() {
    let directory = tempfile::tempdir().unwrap();
    let cargo = script(&directory.path().join("cargo"), "echo 'error: no network, no luck' >&2\nexit 101");
    let command = "stream --count 500 --runs 1 --json --systems pelton:block,ipc_ring,rtrb";
    let output = Command::new(PROGRAM).args(command.split(' ')).env("CARGO", &cargo).output().unwrap();
    assert!(output.status.success());
    let lines = lines(&output.stdout);
    assert!(figure(&lines[0], "messages_per_second") > 0.0);
    is_skipped(&lines[1], "no network, no luck");
    assert!(lines[1]["version"].as_str().unwrap().starts_with("ipc_ring 0."), "{}", lines[1]);
    is_skipped(&lines[2], "measure it with threads");
    assert!(String::from_utf8_lossy(&output.stderr).contains("ipc_ring is skipped"));
}
