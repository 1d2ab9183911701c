//! However the program ends, no process and no file of it remains. The tests find its processes by an environment
//! variable that only they have.

use std::{
    fs,
    os::unix::process::ExitStatusExt,
    process::{Child, Command, Stdio},
};

use pelton_testkit::{eventually, kernel};
use rustix::process::{Pid, Signal, kill_process};

/// A measurement long enough for the test to end it.
fn start(system: &str, directory: &str) -> Child {
    Command::new(env!("CARGO_BIN_EXE_pelton-bench"))
        .args(["stream", "--count", "2000000000", "--runs", "1", "--wait", "block", "--systems", system])
        .env("TMPDIR", directory)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

fn processes(directory: &str) -> usize {
    let mark = format!("TMPDIR={directory}\0");
    let processes =
        fs::read_dir("/proc").unwrap().filter_map(|entry| fs::read(entry.ok()?.path().join("environ")).ok());
    processes.filter(|environment| environment.windows(mark.len()).any(|window| window == mark.as_bytes())).count()
}

/// The program, and the two sides or the guard and its group.
fn runs(system: &str, directory: &str) -> bool {
    processes(directory) >= if system == "limits" { 4 } else { 3 }
}

#[test]
fn an_interrupt_ends_all_and_removes_the_directory() {
    for system in ["pipe", "limits"] {
        let temporary = tempfile::tempdir().unwrap();
        let directory = temporary.path().to_str().unwrap();
        let mut program = start(system, directory);
        eventually("all processes run", || runs(system, directory) || program_is_skipped(&program));
        kill_process(Pid::from_child(&program), Signal::INT).unwrap();
        let status = program.wait().unwrap();
        // If limits.c cannot run, the program has exited before, with nothing measured.
        assert!(status.code() == Some(130) || system == "limits", "{system}: {status}");
        eventually("no process is left", || processes(directory) == 0);
        assert_eq!(fs::read_dir(directory).unwrap().count(), 0, "{system}");
    }
}

#[test]
fn an_interrupted_append_leaves_no_file() {
    let temporary = tempfile::tempdir().unwrap();
    let directory = temporary.path().to_str().unwrap();
    // More messages than there is time for, and few at a time, or the file would be as large.
    let mut program = Command::new(env!("CARGO_BIN_EXE_pelton-bench"))
        .args(["append", "--file", directory, "--work", "1000000000", "--count", "1000000", "--runs", "1"])
        .env("TMPDIR", directory)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let has_file = |entry: fs::DirEntry| entry.path().join("records").exists();
    eventually("there is a file", || fs::read_dir(directory).unwrap().any(|entry| entry.is_ok_and(has_file)));
    kill_process(Pid::from_child(&program), Signal::INT).unwrap();
    assert_eq!(program.wait().unwrap().code(), Some(130));
    eventually("no process is left", || processes(directory) == 0);
    assert_eq!(fs::read_dir(directory).unwrap().count(), 0);
}

#[test]
fn the_processes_of_a_killed_program_end_too() {
    let python = Command::new("python3").arg("--version").output().is_ok();
    if !python {
        eprintln!("LEFT OUT: a system in Python, for python3 is missing");
    }
    for system in ["pipe", "limits", "multiprocessing-pipe"].into_iter().take(if python { 3 } else { 2 }) {
        let temporary = tempfile::tempdir().unwrap();
        let directory = temporary.path().to_str().unwrap();
        let mut program = start(system, directory);
        eventually("all processes run", || runs(system, directory) || program_is_skipped(&program));
        kill_process(Pid::from_child(&program), Signal::KILL).unwrap();
        let status = program.wait().unwrap();
        assert!(status.signal() == Some(9) || system == "limits", "{system}: {status}");
        eventually("no process is left", || processes(directory) == 0);
    }
}

#[test]
fn an_interrupted_flood_ends() {
    for system in ["pelton", "sock-stream"] {
        let temporary = tempfile::tempdir().unwrap();
        let directory = temporary.path().to_str().unwrap();
        let mut program = Command::new(env!("CARGO_BIN_EXE_pelton-bench"))
            .args(["call", "--beside-flood", "--count", "2000000000", "--runs", "1", "--systems", system])
            .env("TMPDIR", directory)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        eventually("all processes run", || processes(directory) >= 4);
        kill_process(Pid::from_child(&program), Signal::INT).unwrap();
        assert_eq!(program.wait().unwrap().code(), Some(130));
        eventually("no process is left", || processes(directory) == 0);
        assert_eq!(fs::read_dir(directory).unwrap().count(), 0, "{system}");
    }
}

/// Whether it has exited and waits for its parent. (Not by an empty environment: a starting process has one, too.)
fn program_is_skipped(program: &Child) -> bool {
    kernel::state_of(program.id()) == Some('Z')
}
