//! `pelton torture` as it is run. That its accounts find what is wrong is shown beside them, in `ledger.rs`; what real faults look
//! like, by the controls in `verify/`.

use crate::place::{Place, json};
use pelton_testkit::NewEntry;
use rustix::process::Signal;

/// Processes that were started for a storm in this place and are still there.
fn sides_of(place: &Place) -> Vec<String> {
    let root = place.path("tmp");
    let root = root.to_str().unwrap();
    let processes = std::fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path().join("cmdline"));
    let lines = processes.filter_map(|path| std::fs::read_to_string(path).ok());
    lines.filter(|line| line.contains("torture-side") && line.contains(root)).collect()
}

#[test]
fn a_short_storm_finds_nothing_and_leaves_nothing() {
    let place = Place::new();
    let ended = place.run(&["torture", "--kills", "48", "--seed", "5", "--json"]);
    ended.assert(0, &[]);
    let report = json(&ended);
    assert!(report["kills"].as_u64().unwrap() >= 48, "{report}");
    assert_eq!(report["seed"], 5);
    assert_eq!(report["faults"].as_array().unwrap().len(), 0, "{report}");
    assert!(report["messages"].as_u64().unwrap() > 0, "{report}");
    assert_eq!(sides_of(&place), [""; 0]);
    place.assert_nothing_left();
}

#[test]
fn the_report_is_a_table_and_one_scenario_can_be_repeated() {
    let place = Place::new();
    let ended = place.run(&["torture", "--kills", "6", "--seed", "9", "--scenario", "2"]);
    ended.assert(0, &[]);
    let table = String::from_utf8(ended.stdout).unwrap();
    for words in ["kills in 1 scenarios of seed 9", "lost", "hangs", "left behind"] {
        assert!(table.contains(words), "`{words}` is missing in: {table}");
    }
}

#[test]
fn a_program_that_starts_no_sides_is_told_of() {
    let place = Place::new();
    place.run(&["torture", "--kills", "5", "--against", "echo none"]).assert(5, &["wanted a process's number"]);
    place.assert_nothing_left();
}

#[test]
fn an_interrupted_storm_leaves_nothing() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let place = Place::new();
        let entry = NewEntry::watch(&place.path("tmp"));
        let storm = place.start(&["torture", "--minutes", "60"]);
        entry.wait();
        storm.signal(signal);
        let ended = storm.finish();
        ended.assert(code, &[]);
        assert_eq!(ended.stdout, b"");
        assert_eq!(sides_of(&place), [""; 0]);
        place.assert_nothing_left();
    }
}
