//! Rounds at a rate, threads, memory, kills, and the systems of bench/peers: as a user runs them, in small runs.

use std::{
    env, fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Command, Output},
};

use crate::command::{bench, report};
use pelton_testkit::eventually;
use serde_json::Value;

#[test]
fn a_round_that_falls_due_behind_a_late_one_is_late_itself() {
    // A pipe makes no million rounds a second: the last one waits for all before it, and its time includes that.
    let count = 2000.0;
    let arguments = ["roundtrip", "--rate", "1000000", "--count", "2000", "--runs", "1", "--systems", "pipe,pelton"];
    for system in report(&arguments).0 {
        assert_eq!(system["skipped"], Value::Null, "{system}");
        assert_eq!(system["parameters"]["rate"], 1_000_000);
        let figure = |name: &str| system[name].as_f64().unwrap_or_else(|| panic!("no {name} in {system}"));
        assert!(figure("p50_ns") <= figure("p99_ns"), "{system}");
        assert_eq!(system["p9999_ns"], Value::Null, "a fifth of a round says nothing");
        let ladder = system["runs"][0]["latency"].as_array().unwrap();
        assert!(ladder.len() > 5 && ladder.windows(2).all(|pair| pair[0][1].as_u64() <= pair[1][1].as_u64()));
        assert_eq!(ladder.last().unwrap()[0], 1.0);
    }
    // Rounds timed from their sending fill the run, one after the other. Each of these, all late, lasts for most of
    // it.
    let pipe = &report(&["roundtrip", "--rate", "1000000", "--count", "2000", "--runs", "1", "--systems", "pipe"]).0[0];
    let together_ns = pipe["round_trip_ns"].as_f64().unwrap() * count;
    assert!(together_ns > 10.0 * 1e9 * pipe["seconds"].as_f64().unwrap(), "{pipe}");
    let seldom = report(&["roundtrip", "--rate", "1000", "--count", "20", "--runs", "1", "--systems", "pipe"]).0;
    // No message is sent ahead of time.
    assert!(seldom[0]["seconds"].as_f64().unwrap() >= 0.019, "{}", seldom[0]);
}

#[test]
fn every_burst_is_answered_once() {
    for (size, burst) in [("64", "1"), ("64", "500"), ("8..3000", "40")] {
        let arguments = ["burst", "--size", size, "--burst", burst, "--count", "60", "--runs", "2", "--wait", "block"];
        let systems = "pelton,pelton-path,pipe,sock-stream-batched,sock-seqpacket-batched,sock-dgram";
        for system in report(&[&arguments[..], &["--systems", systems]].concat()).0 {
            assert_eq!(system["skipped"], Value::Null, "{system}");
            assert_eq!(system["parameters"]["burst"], burst.parse::<u64>().unwrap());
            assert!(system["round_trip_ns"].as_f64().unwrap() > 0.0, "{system}");
            assert!(system["messages_per_second"].as_f64().unwrap() > 0.0, "{system}");
        }
    }
}

#[test]
fn threads_are_measured_with_single_messages_and_batches() {
    let arguments =
        ["threads", "--count", "5000", "--runs", "2", "--systems", "pelton,pelton-batches,pelton-path,limits"];
    for wait in ["block", "spin"] {
        let systems = report(&[&arguments[..], &["--wait", wait]].concat()).0;
        for system in &systems[..2] {
            assert_eq!(system["skipped"], Value::Null, "{system}");
            assert!(system["messages_per_second"].as_f64().unwrap() > 0.0);
            assert_eq!(system["runs"][1]["sides"].as_object().unwrap().keys().collect::<Vec<_>>(), ["threads"]);
        }
        for system in &systems[2..] {
            assert!(system["skipped"].is_string(), "{system}");
        }
    }
}

#[test]
fn batches_of_messages_are_measured_between_processes() {
    let of = |size: &str, system: &str| {
        let systems = format!("pipe:block,{system}");
        report(&["stream", "--size", size, "--count", "5000", "--runs", "1", "--systems", &systems]).0.remove(1)
    };
    // A size that is a constant in the program, and one that is not.
    for size in ["64", "100"] {
        let system = of(size, "pelton-batches");
        assert_eq!(system["skipped"], Value::Null, "{system}");
        assert!(system["messages_per_second"].as_f64().unwrap() > 0.0);
    }
    for (size, system, reason) in
        [("1..300", "pelton-batches", "one size"), ("64", "pelton-batches:block", "write spin")]
    {
        let system = of(size, system);
        assert!(system["skipped"].as_str().unwrap().contains(reason), "{system}");
    }
}

#[test]
fn calls_in_c_and_by_the_queue_are_measured_and_every_reply_is_compared() {
    let systems = "pelton-c:block,pelton-c:epoll,queue,pelton-c-go,queue-go";
    let has_go = Command::new("go").arg("version").output().is_ok();
    if !has_go {
        eprintln!("LEFT OUT: handlers and services in Go, for go is missing");
    }
    for (size, placement) in [("512", "free"), ("102400", "together"), ("8", "apart")] {
        let arguments = ["call", "--size", size, "--count", "200", "--runs", "2", "--placement", placement];
        let (reports, ratios) = report(&[&arguments[..], &["--wait", "block", "--systems", systems]].concat());
        for system in &reports {
            if !has_go && system["label"].as_str().unwrap().ends_with("-go") {
                assert!(system["skipped"].as_str().unwrap().contains("go"), "{system}");
                continue;
            }
            assert_eq!(system["skipped"], Value::Null, "{system}");
            assert!(system["round_trip_ns"].as_f64().unwrap() > 0.0, "{system}");
            let sides: Vec<&String> = system["runs"][1]["sides"].as_object().unwrap().keys().collect();
            let is_queue = system["system"].as_str().unwrap().starts_with("queue");
            assert_eq!(sides, if is_queue { vec!["both"] } else { vec!["client-1", "service"] });
            assert_eq!(system["wait"] == "epoll", is_queue || system["label"] == "pelton-c:epoll", "{system}");
        }
        assert_eq!(ratios["ratios"]["queue"]["runs"], 2);
    }
    // Both sides sleep in each call: each wake-up and each sleep is a system call.
    let queue = report(&["call", "--count", "500", "--runs", "1", "--systems", "queue"]).0.remove(0);
    if let Some(calls) = queue["syscalls_per_message"].as_f64() {
        assert!(calls >= 1.0, "{queue}");
    }
    let many = report(&["call", "--in-flight", "2", "--count", "20", "--runs", "1", "--systems", "pelton,queue"]).0;
    assert!(many[1]["skipped"].as_str().unwrap().contains("leave out"), "{}", many[1]);
    let elsewhere = report(&["stream", "--count", "20", "--runs", "1", "--systems", "pelton,queue"]).0;
    assert!(elsewhere[1]["skipped"].as_str().unwrap().contains("measure it with call"), "{}", elsewhere[1]);
}

#[test]
fn a_quota_limits_the_measured_processes_and_leaves_no_group() {
    // One side or the other computes all the time: without a quota they would take all of a processor.
    let program = Command::new(env!("CARGO_BIN_EXE_pelton-bench"))
        .args(["roundtrip", "--quota", "20", "--delay", "300", "--count", "400", "--runs", "1"])
        .args(["--systems", "pelton,pipe", "--json"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let group = format!("pelton-bench-{}", program.id());
    let output = program.wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for system in &lines[..2] {
        assert_eq!(system["parameters"]["quota"], 20, "{system}");
        if let Some(reason) = system["skipped"].as_str() {
            eprintln!("LEFT OUT: quotas: {reason}");
            assert!(reason.contains("--quota is not possible here") && output.status.code() == Some(1), "{reason}");
            continue;
        }
        let figure = |name: &str| system[name].as_f64().unwrap_or_else(|| panic!("no {name} in {system}"));
        // The share of a period can be used at once, at the beginning and at the end.
        assert!(figure("cpu_seconds") < 0.2 * figure("seconds") + 0.06, "{system}");
    }
    for mount in fs::read_to_string("/proc/mounts").unwrap().lines().filter(|line| line.contains(" cgroup")) {
        let place = Path::new(mount.split(' ').nth(1).unwrap()).join(&group);
        assert!(!place.exists(), "{} is left", place.display());
    }
}

#[test]
fn memory_grows_with_the_backlog_where_it_fits() {
    let systems =
        report(&["memory", "--count", "20000", "--runs", "1", "--systems", "pelton,pelton-path,sock-stream"]).0;
    let figure = |system: &Value, name: &str| system[name].as_f64().unwrap_or_else(|| panic!("no {name} in {system}"));
    for system in &systems[..2] {
        assert_eq!(figure(system, "backlog_messages"), 20_000.0);
        let payload = 20_000.0 * 256.0;
        let resident = figure(system, "backlog_resident_bytes");
        // The pages are both processes', or the sender's alone; nothing else here is as large.
        assert!(resident > 0.9 * payload && resident < 2.0 * payload + 1e6, "{resident} for {payload}: {system}");
    }
    // A socket does not hold all of them, and reports that.
    assert!(figure(&systems[2], "backlog_messages") < 20_000.0, "{}", systems[2]);
}

#[test]
fn a_survivor_detects_the_death_and_other_outcomes_have_names() {
    let systems = report(&["kill", "--runs", "2", "--systems", "pelton,pelton-path,pipe,sock-stream"]).0;
    for system in systems {
        assert_eq!(system["skipped"], Value::Null, "{system}");
        for run in system["runs"].as_array().unwrap() {
            for killed in ["receiver", "sender"] {
                let death = &run["deaths"][killed];
                assert_eq!(death["outcome"], "detected", "{killed} of {}: {death}", system["label"]);
                assert!(!death["words"].as_str().unwrap().is_empty());
                assert!(run[format!("{killed}_death_detected_ns")].as_f64().unwrap() > 0.0);
            }
            assert!(run["deaths"]["sender"]["messages"].as_u64().unwrap() > 0, "the stream ran: {run}");
        }
    }
}

/// A program in place of cargo: the bench calls it for a peer, and it fails to build one.
fn without_cargo(arguments: &[&str]) -> Output {
    let directory = tempfile::tempdir().unwrap();
    let cargo = directory.path().join("cargo");
    fs::write(&cargo, "#!/bin/sh\necho 'error: no network, no luck' >&2\nexit 101\n").unwrap();
    fs::set_permissions(&cargo, fs::Permissions::from_mode(0o755)).unwrap();
    Command::new(env!("CARGO_BIN_EXE_pelton-bench")).args(arguments).env("CARGO", &cargo).output().unwrap()
}

#[test]
fn a_peer_that_cannot_be_built_is_skipped_with_the_reason() {
    let output = without_cargo(&[
        "stream",
        "--count",
        "500",
        "--runs",
        "1",
        "--json",
        "--systems",
        "pelton:block,ipc_ring,rtrb",
    ]);
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(lines[0]["messages_per_second"].as_f64().unwrap() > 0.0);
    assert!(lines[1]["skipped"].as_str().unwrap().contains("no network, no luck"), "{}", lines[1]);
    assert!(lines[1]["version"].as_str().unwrap().starts_with("ipc_ring 0."), "{}", lines[1]);
    assert!(lines[2]["skipped"].as_str().unwrap().contains("measure it with threads"), "{}", lines[2]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("ipc_ring is skipped"));
}

#[test]
fn an_interrupt_during_a_build_starts_no_other_build() {
    let directory = tempfile::tempdir().unwrap();
    let [cargo, asked, go_on] = ["cargo", "asked", "go-on"].map(|name| directory.path().join(name));
    // The program announces its call, and waits for the signal, or the test has failed.
    let script = format!(
        "#!/bin/sh\necho \"$@\" >>'{}'\nn=0\nwhile [ ! -e '{}' ] && [ $n -lt 6000 ]; do n=$((n + 1)); sleep 0.01; done\nexit 101\n",
        asked.display(),
        go_on.display()
    );
    fs::write(&cargo, script).unwrap();
    fs::set_permissions(&cargo, fs::Permissions::from_mode(0o755)).unwrap();
    let program = Command::new(env!("CARGO_BIN_EXE_pelton-bench"))
        .args(["stream", "--count", "500", "--runs", "1", "--systems", "ipc_ring,ipmpsc,pipe"])
        .env("CARGO", &cargo)
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    eventually("something is built", || fs::read_to_string(&asked).is_ok_and(|text| text.ends_with('\n')));
    rustix::process::kill_process(rustix::process::Pid::from_child(&program), rustix::process::Signal::INT).unwrap();
    fs::write(&go_on, "").unwrap();
    let output = program.wait_with_output().unwrap();
    let asked = fs::read_to_string(&asked).unwrap();
    assert_eq!((asked.lines().count(), output.status.code()), (1, Some(130)), "{asked}{output:?}");
    assert!(!String::from_utf8_lossy(&output.stderr).contains("is skipped"), "{output:?}");
}

/// A peer without a build: Python's.
#[test]
fn a_program_in_another_language_is_measured_with_its_system_calls() {
    if Command::new("python3").arg("--version").output().is_err() {
        eprintln!("LEFT OUT: systems in Python, for python3 is missing");
        return;
    }
    let systems = "pipe,multiprocessing-pipe,multiprocessing-queue";
    for (workload, size) in [("stream", "256"), ("stream", "1..300"), ("roundtrip", "64"), ("stream", "3")] {
        let arguments =
            [workload, "--size", size, "--count", "300", "--runs", "1", "--wait", "block", "--systems", systems];
        let systems = report(&arguments).0;
        for system in &systems[1..] {
            assert_eq!(system["skipped"], Value::Null, "{system}");
            let figure = if workload == "stream" { "messages_per_second" } else { "round_trip_ns" };
            assert!(system[figure].as_f64().unwrap() > 0.0, "{system}");
            assert!(system["cpu_seconds"].as_f64().unwrap() > 0.0, "{system}");
            // If the pipe's calls could be counted, those of both its processes are.
            if systems[0]["syscalls_per_message"].is_number() {
                assert!(system["syscalls_per_message"].as_f64().unwrap() >= 2.0, "{system}");
            }
        }
    }
    let systems = report(&["stream", "--count", "10", "--runs", "1", "--systems", "pipe,multiprocessing-pipe:epoll"]).0;
    assert!(systems[1]["skipped"].as_str().unwrap().contains("write block"), "{}", systems[1]);
}

#[test]
fn results_and_their_page_are_written_and_an_interrupt_keeps_finished_parts() {
    let directory = tempfile::tempdir().unwrap();
    let [results, page] = ["r.jsonl", "p.html"].map(|name| directory.path().join(name));
    let output = Command::new(env!("CARGO_BIN_EXE_pelton-bench"))
        .args(["all", "--short", "--only", "threads --size 64", "--results"])
        .arg(&results)
        .arg("--report")
        .arg(&page)
        // Nothing is built for this: systems outside this program are skipped, with a reason.
        .env("CARGO", "/bin/false")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = fs::read_to_string(&results).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines[0]["machine"]["command"], "./run bench all --short");
    assert_eq!(lines[0]["machine"]["interrupted"], false);
    assert!(lines[1]["messages_per_second"].as_f64().unwrap() > 0.0, "{}", lines[1]);
    assert!(lines[3]["skipped"].as_str().unwrap().contains("failed"), "{}", lines[3]);
    assert!(fs::read_to_string(&page).unwrap().contains("pelton-batches"));

    let filled = directory.path().join("figures.md");
    fs::write(&filled, "<!-- bench threads -->\n<!-- /bench -->\n").unwrap();
    let [results, filled_text] = [&results, &filled].map(|place| place.to_str().unwrap());
    let refused = bench(&["figures", results, filled_text]);
    assert!(
        String::from_utf8_lossy(&refused.stderr).contains("use --draft"),
        "a short run has no figures: {refused:?}"
    );
    assert!(bench(&["figures", "--draft", results, filled_text]).status.success());
    assert!(fs::read_to_string(&filled).unwrap().contains("| pelton-batches |"));
}

#[test]
fn parts_finished_before_an_interrupt_are_in_the_results() {
    use std::time::{Duration, Instant};
    let directory = tempfile::tempdir().unwrap();
    let results = directory.path().join("r.jsonl");
    let mut program = Command::new(env!("CARGO_BIN_EXE_pelton-bench"))
        .args(["all", "--only", "lopsided", "--results"])
        .arg(&results)
        .stderr(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    // The file exists after the first part: the signal falls between the two, or at the start of the second.
    let until = Instant::now() + Duration::from_secs(300);
    while !results.exists() {
        assert!(Instant::now() < until && program.try_wait().unwrap().is_none());
        std::thread::yield_now();
    }
    rustix::process::kill_process(rustix::process::Pid::from_child(&program), rustix::process::Signal::INT).unwrap();
    let status = program.wait().unwrap();
    let text = fs::read_to_string(&results).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(status.code(), Some(130), "{status}");
    assert_eq!(lines[0]["machine"]["interrupted"], true);
    assert!(lines[1]["share_of_own_speed"].as_f64().unwrap() > 0.0, "{}", lines[1]);
}
