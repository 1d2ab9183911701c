//! Every system of bench/rivals in every workload that it has a part in, by a few messages. Building them takes minutes, so this is a suite of
//! its own: `./run test-bench`.

use std::process::Command;

use serde_json::Value;

/// The systems' lines.
fn report(arguments: &[&str]) -> Vec<Value> {
    let output = Command::new(env!("CARGO_BIN_EXE_pelton-bench")).args(arguments).arg("--json").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    let mut lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    lines.pop();
    lines
}

/// What is installed, not built from a registry of crates, may be missing.
fn may_be_missing(system: &Value) -> bool {
    let reason = system["skipped"].as_str().unwrap_or_default();
    let missing = reason.contains("libzmq.so.5") || reason.contains("is it installed?");
    if missing {
        eprintln!("LEFT OUT: {}: {reason}", system["label"]);
    }
    missing
}

const PROCESSES: &str = "ipc_ring,ipmpsc,iceoryx2,shmem-ipc,io-uring-stream,io-uring-seqpacket,zeromq-ipc";

#[test]
#[ignore = "builds other libraries: ./run test-bench"]
fn every_rival_is_measured_in_every_workload_of_its_own() {
    let all = format!("pelton,{PROCESSES},multiprocessing-queue,multiprocessing-pipe,aeron");
    let random = "pelton,ipc_ring,ipmpsc,iceoryx2,io-uring-stream,io-uring-seqpacket,zeromq-ipc,multiprocessing-queue,\
        multiprocessing-pipe,aeron";
    let spinning = "pelton,ipc_ring:spin,ipmpsc:spin,iceoryx2:spin,shmem-ipc:spin,zeromq-ipc:spin,iceoryx2:block";
    let processes = format!("pelton,{PROCESSES}");
    let threads = "pelton,pelton-batches,rtrb,rtrb-chunks,crossbeam-channel,flume,kanal";
    let thread_spins = "pelton,crossbeam-channel:spin,flume:spin,kanal:spin";
    for (command, systems) in [
        ("stream --size 256 --count 5000", &all[..]),
        // Beyond what any of their buffers hold at once, and in pieces.
        ("stream --size 8..40000 --count 3000", random),
        // Beyond a fragment of Aeron's.
        ("stream --size 65536 --count 500", &format!("{processes},aeron")),
        ("roundtrip --size 65536 --count 100", "pelton,aeron"),
        ("stream --size 64 --count 5000", spinning),
        ("roundtrip --size 64 --count 500", &all),
        ("roundtrip --size 8..40000 --count 200", random),
        ("roundtrip --size 64 --count 300", spinning),
        ("roundtrip --size 64 --rate 1000 --count 50", &processes),
        ("lopsided --count 100", &processes),
        ("idle", &processes),
        ("memory --count 5000", &processes),
        ("kill", &processes),
        ("stream --size 256 --count 5000", "pelton,pelton-go,go-sock-stream"),
        ("call --size 64 --count 2000", "pelton,pelton-go,net-rpc"),
        ("call --size 64 --in-flight 10 --count 2000", "pelton,pelton-go,net-rpc"),
        ("threads --count 20000", threads),
        ("threads --count 20000 --size 1024", threads),
        ("threads --count 5000", thread_spins),
    ] {
        let words: Vec<&str> = command.split(' ').chain(["--runs", "1", "--systems", systems]).collect();
        for system in report(&words) {
            assert!(system["skipped"].is_null() || may_be_missing(&system), "{command}: {system}");
            assert!(!system["runs"].as_array().unwrap().is_empty() || !system["skipped"].is_null(), "{system}");
            assert!(system["version"].as_str().unwrap().contains(['.', 'i']), "{system}");
        }
    }
    let left = std::fs::read_dir("/dev/shm").unwrap().filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let left: Vec<String> = left.filter(|name| name.contains("pelton-bench-")).collect();
    assert!(left.is_empty(), "left in /dev/shm: {left:?}");
}
