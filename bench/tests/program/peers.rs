//! Every system of bench/peers in every workload of its own, by a few messages. Building them takes minutes, so this
//! is a suite of its own: `./run test-bench`.

use crate::command::report;
use serde_json::Value;

/// Programs that no crate registry has may be missing.
fn may_be_missing(system: &Value) -> bool {
    let reason = system["skipped"].as_str().unwrap_or_default();
    let missing = reason.contains("libzmq.so.5") || reason.contains("is it installed?");
    if missing {
        eprintln!("LEFT OUT: {}: {reason}", system["label"]);
    }
    missing
}

/// Runs each command with these systems: all of them are measured.
fn all_are_measured(commands: &[(&str, &str)]) {
    for (command, systems) in commands {
        let words: Vec<&str> = command.split(' ').chain(["--runs", "1", "--systems", systems]).collect();
        for system in report(&words).0 {
            assert!(system["skipped"].is_null() || may_be_missing(&system), "{command}: {system}");
            assert!(!system["runs"].as_array().unwrap().is_empty() || !system["skipped"].is_null(), "{system}");
            assert!(system["version"].as_str().unwrap().contains(['.', 'i']), "{system}");
        }
    }
    let left = std::fs::read_dir("/dev/shm").unwrap().filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let left: Vec<String> = left.filter(|name| name.contains("pelton-bench-")).collect();
    assert!(left.is_empty(), "left in /dev/shm: {left:?}");
}

#[test]
#[ignore = "builds other libraries: ./run test-bench processes"]
fn peers_between_processes_are_measured_in_every_workload_of_their_own() {
    let all = "pelton,pelton-batches,ipc_ring,ipmpsc,iceoryx2,shmem-ipc,io-uring-stream,io-uring-seqpacket,zeromq-ipc";
    let most = &all.replace("pelton-batches,", "");
    let random = &most.replace("shmem-ipc,", "");
    let spinning = "pelton,ipc_ring:spin,ipmpsc:spin,iceoryx2:spin,shmem-ipc:spin,zeromq-ipc:spin,iceoryx2:block";
    all_are_measured(&[
        ("stream --size 256 --count 5000", all),
        // More than any of their buffers hold at once, and in pieces.
        ("stream --size 8..40000 --count 3000", random),
        ("stream --size 65536 --count 500", all),
        ("stream --size 64 --count 5000", spinning),
        ("roundtrip --size 64 --count 500", most),
        ("roundtrip --size 8..40000 --count 200", random),
        ("roundtrip --size 64 --count 300", spinning),
        ("roundtrip --size 64 --rate 1000 --count 50", most),
        ("lopsided --count 100", most),
        ("idle", most),
        ("memory --count 5000", most),
        ("kill", most),
    ]);
}

#[test]
#[ignore = "fetches Aeron: ./run test-bench languages"]
fn peers_in_other_languages_are_measured() {
    let python_and_java = "pelton,multiprocessing-queue,multiprocessing-pipe,aeron";
    all_are_measured(&[
        ("stream --size 256 --count 5000", python_and_java),
        ("stream --size 8..40000 --count 3000", python_and_java),
        ("roundtrip --size 64 --count 500", python_and_java),
        ("roundtrip --size 8..40000 --count 200", python_and_java),
        // Larger than a fragment of Aeron's.
        ("stream --size 65536 --count 500", "pelton,aeron"),
        ("roundtrip --size 65536 --count 100", "pelton,aeron"),
        ("stream --size 256 --count 5000", "pelton,pelton-go,go-sock-stream"),
        ("call --size 64 --count 2000", "pelton,pelton-go,net-rpc"),
        ("call --size 64 --in-flight 10 --count 2000", "pelton,pelton-go,net-rpc"),
    ]);
}

#[test]
#[ignore = "builds other libraries: ./run test-bench threads"]
fn peers_between_threads_are_measured() {
    let all = "pelton,pelton-batches,rtrb,rtrb-chunks,crossbeam-channel,flume,kanal";
    all_are_measured(&[
        ("threads --count 20000", all),
        ("threads --count 20000 --size 1024", all),
        ("threads --count 5000", "pelton,crossbeam-channel:spin,flume:spin,kanal:spin"),
    ]);
}
