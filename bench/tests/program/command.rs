//! The program as a user runs it, and its report. Commands are single strings, split at spaces.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::Value;

pub const PROGRAM: &str = env!("CARGO_BIN_EXE_pelton-bench");

pub fn bench(command: &str) -> Output {
    Command::new(PROGRAM).args(command.split(' ')).output().unwrap()
}

/// The lines of systems, and that of ratios.
pub fn report(command: &str) -> (Vec<Value>, Value) {
    let output = bench(&format!("{command} --json"));
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    let mut lines = lines(&output.stdout);
    let ratios = lines.pop().unwrap();
    (lines, ratios)
}

/// JSON, one object a line.
pub fn lines(text: &[u8]) -> Vec<Value> {
    let text = std::str::from_utf8(text).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// As [`report`], if all systems were measured in every run: with these figures, all above zero, of which the first one
/// makes the ratios.
pub fn measured(command: &str, figures: &[&str]) -> Vec<Value> {
    let (systems, ratios) = report(command);
    let runs = systems[0]["runs"].as_array().unwrap().len();
    for system in &systems {
        assert_eq!(system["skipped"], Value::Null, "{command}: {system}");
        assert_eq!(system["runs"].as_array().unwrap().len(), runs, "{command}: {system}");
        assert!(system["version"].as_str().is_some_and(|version| !version.is_empty()), "{command}: {system}");
        figures.iter().for_each(|name| assert!(figure(system, name) > 0.0, "{command}: {name} in {system}"));
    }
    if let Some(first) = figures.first() {
        assert_eq!(ratios["figure"], *first, "{command}: {ratios}");
        let ratios = ratios["ratios"].as_object().unwrap();
        assert_eq!(ratios.len(), systems.len() - 1, "{command}: {ratios:?}");
        assert!(ratios.values().all(|ratio| ratio["runs"] == runs), "{command}: {ratios:?}");
    }
    systems
}

pub fn figure(system: &Value, name: &str) -> f64 {
    system[name].as_f64().unwrap_or_else(|| panic!("no {name} in {system}"))
}

/// That system could not be measured, for this reason.
pub fn is_skipped(system: &Value, reason: &str) {
    assert!(system["skipped"].as_str().is_some_and(|words| words.contains(reason)), "wanted `{reason}`: {system}");
}

/// Whether that program is there; otherwise prints what is left out.
pub fn has(program: &str, what: &str) -> bool {
    let found = Command::new(program).arg(if program == "go" { "version" } else { "--version" }).output().is_ok();
    if !found {
        eprintln!("LEFT OUT: {what}, for {program} is missing");
    }
    found
}

/// A program for a test, for instance in place of cargo, which the benchmark calls for a peer.
pub fn script(place: &Path, text: &str) -> PathBuf {
    fs::write(place, format!("#!/bin/sh\n{text}\n")).unwrap();
    fs::set_permissions(place, fs::Permissions::from_mode(0o755)).unwrap();
    place.to_path_buf()
}
