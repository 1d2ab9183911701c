//! The crash test as a program. The unit tests of `ledger.rs` show that its accounts find faults; the controls in
//! `verify/` show it with real faults.

use pelton_testkit::{NewEntry, ProgramDirs, json};
use rustix::process::Signal;

fn test_dirs() -> ProgramDirs {
    ProgramDirs::new(env!("CARGO_BIN_EXE_pelton-crash-test"))
}

/// Sides of a crash test with its files in `dirs` that still run.
fn sides_of(dirs: &ProgramDirs) -> Vec<String> {
    let root = dirs.path("tmp");
    let root = root.to_str().unwrap();
    let processes = std::fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path().join("cmdline"));
    let lines = processes.filter_map(|path| std::fs::read_to_string(path).ok());
    lines.filter(|line| line.contains("pelton-crash-test\0side") && line.contains(root)).collect()
}

#[test]
fn a_short_crash_test_finds_no_fault_and_leaves_no_file() {
    let dirs = test_dirs();
    let ended = dirs.run(&["--kills", "48", "--seed", "5", "--json"]);
    ended.assert(0, &[]);
    let report = json(&ended);
    assert!(report["kills"].as_u64().unwrap() >= 48, "{report}");
    assert_eq!(report["seed"], 5);
    assert_eq!(report["faults"].as_array().unwrap().len(), 0, "{report}");
    assert!(report["messages"].as_u64().unwrap() > 0, "{report}");
    assert_eq!(sides_of(&dirs), [""; 0]);
    dirs.assert_nothing_left();
}

#[test]
fn the_report_is_a_table_and_one_scenario_can_be_repeated() {
    let dirs = test_dirs();
    let ended = dirs.run(&["--kills", "6", "--seed", "9", "--scenario", "2"]);
    ended.assert(0, &[]);
    let table = String::from_utf8(ended.stdout).unwrap();
    for words in ["kills in 1 scenarios of seed 9", "lost", "hangs", "left behind"] {
        assert!(table.contains(words), "`{words}` is missing in: {table}");
    }
}

#[test]
fn a_program_that_starts_no_sides_is_reported() {
    let dirs = test_dirs();
    dirs.run(&["--kills", "5", "--against", "echo none"]).assert(5, &["wanted a process's number"]);
    dirs.assert_nothing_left();
}

#[test]
fn an_interrupted_crash_test_leaves_no_file_and_no_process() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let dirs = test_dirs();
        let entry = NewEntry::watch(&dirs.path("tmp"));
        let crash_test = dirs.start(&["--minutes", "60"]);
        entry.wait();
        crash_test.signal(signal);
        let ended = crash_test.finish();
        ended.assert(code, &[]);
        assert_eq!(ended.stdout, b"");
        assert_eq!(sides_of(&dirs), [""; 0]);
        dirs.assert_nothing_left();
    }
}

#[test]
fn invalid_arguments_are_refused_with_2() {
    let dirs = test_dirs();
    let refused: [(&[&str], &str); 4] = [
        (&["--kills", "0"], "--kills"),
        (&["--kills", "5", "--minutes", "1"], "cannot be used with"),
        (&["--against", ""], "--against needs a program"),
        (&["--against", "no-such-program"], "`no-such-program` cannot be run"),
    ];
    for (arguments, words) in refused {
        dirs.run(arguments).assert(2, &[words]);
    }
    dirs.assert_nothing_left();
}
