//! Every system of bench/peers in every workload of its own, by a few messages. Building them takes minutes, so this
//! is a suite of its own: `./run test-bench`. The table of systems says which part each belongs to.

use pelton_bench::{commands::Measurement, plan::System, systems};
use pelton_testkit::eventually;
use serde_json::Value;

use crate::command::report;

/// Programs that no crate registry has may be missing.
fn may_be_missing(system: &Value) -> bool {
    let reason = system["skipped"].as_str().unwrap_or_default();
    let missing = reason.contains("libzmq3-dev") || reason.contains("is it installed?");
    if missing {
        eprintln!("LEFT OUT: {}: {reason}", system["label"]);
    }
    missing
}

/// Runs the command with these systems: all of them are measured.
fn all_are_measured(command: &str, systems: &str) {
    for system in report(&format!("{command} --runs 1 --systems {systems}")).0 {
        assert!(system["skipped"].is_null() || may_be_missing(&system), "{command}: {system}");
        assert!(!system["runs"].as_array().unwrap().is_empty() || !system["skipped"].is_null(), "{system}");
        assert!(system["version"].as_str().unwrap().contains(['.', 'i']), "{system}");
    }
    // Another benchmark that runs meanwhile removes its directory, too.
    let left = std::fs::read_dir("/dev/shm").unwrap().filter_map(|entry| Some(entry.ok()?.path()));
    for place in left.filter(|place| place.to_string_lossy().contains("pelton-bench-")) {
        eventually(&format!("{} is removed", place.display()), || !place.exists());
    }
}

/// The same with pelton and all systems of that suite that have a part in it, but those.
fn suite_is_measured(suite: &str, commands: &[(&str, &[&str])]) {
    for (command, but) in commands {
        let job = Measurement::parse(command).unwrap().plan.job;
        let has_part = |system: &&System| system.part(job.kind, &job.workload).is_ok();
        let of_suite = systems::all().iter().filter(|system| system.suite == Some(suite) && has_part(system));
        let names: Vec<&str> = of_suite.map(|system| system.name).filter(|name| !but.contains(name)).collect();
        assert!(!names.is_empty(), "no system of {suite} has a part in {command}");
        all_are_measured(command, &format!("pelton,{}", names.join(",")));
    }
}

#[test]
#[ignore = "builds other libraries: ./run test-bench processes"]
fn peers_between_processes_are_measured_in_every_workload_of_their_own() {
    suite_is_measured(
        "processes",
        &[
            ("stream --size 256 --count 5000", &[]),
            // More than any of their buffers hold at once, and in pieces.
            ("stream --size 8..40000 --count 3000", &["shmem-ipc"]),
            ("stream --size 65536 --count 500", &[]),
            ("roundtrip --size 64 --count 500", &[]),
            ("roundtrip --size 8..40000 --count 200", &["shmem-ipc"]),
            ("roundtrip --size 64 --rate 1000 --count 50", &[]),
            ("lopsided --count 100", &[]),
            ("idle", &[]),
            ("memory --count 5000", &[]),
            ("kill", &[]),
            ("broadcast --receivers 3 --size 256 --count 5000", &[]),
            ("broadcast --receivers 3 --size 65536 --count 300", &[]),
        ],
    );
    let spinning = "pelton,ipc_ring:spin,ipmpsc:spin,iceoryx2:spin,shmem-ipc:spin,zeromq-ipc:spin,iceoryx2:block";
    all_are_measured("stream --size 64 --count 5000", spinning);
    all_are_measured("roundtrip --size 64 --count 300", spinning);
    all_are_measured("broadcast --receivers 3 --size 256 --count 5000", "pelton,iceoryx2:spin,iceoryx2:block");
}

#[test]
#[ignore = "fetches Aeron: ./run test-bench languages"]
fn peers_in_other_languages_are_measured() {
    let go = &["pelton-go", "go-sock-stream"];
    let all_but_aeron = &[
        "multiprocessing-queue",
        "multiprocessing-pipe",
        "pelton-python",
        "pelton-node",
        "node-child-process",
        "node-worker",
        "node-sock-stream",
        "pelton-java",
        "java-sock-stream",
        "chronicle-queue",
        "pelton-go",
        "go-sock-stream",
    ];
    suite_is_measured(
        "languages",
        &[
            ("stream --size 256 --count 5000", &[]),
            ("stream --size 8..40000 --count 3000", go),
            ("roundtrip --size 64 --count 500", &[]),
            ("roundtrip --size 8..40000 --count 200", &[]),
            // Larger than a fragment of Aeron's.
            ("stream --size 65536 --count 500", all_but_aeron),
            ("roundtrip --size 65536 --count 100", all_but_aeron),
            ("call --size 64 --count 2000", &[]),
            ("call --size 64 --in-flight 10 --count 2000", &[]),
            ("broadcast --receivers 2 --size 256 --count 5000", &[]),
        ],
    );
}

#[test]
#[ignore = "builds other libraries: ./run test-bench threads"]
fn peers_between_threads_are_measured() {
    suite_is_measured("threads", &[("threads --count 20000", &[]), ("threads --count 20000 --size 1024", &[])]);
    all_are_measured("threads --count 5000", "pelton,pelton-batches,crossbeam-channel:spin,flume:spin,kanal:spin");
}
