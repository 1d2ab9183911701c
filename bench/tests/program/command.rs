//! The program as a user runs it, and its report.

use std::process::{Command, Output};

use serde_json::Value;

pub fn bench(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pelton-bench")).args(arguments).output().unwrap()
}

/// The lines of systems, and that of ratios.
pub fn report(arguments: &[&str]) -> (Vec<Value>, Value) {
    let output = bench(&[arguments, &["--json"]].concat());
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    let mut lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let ratios = lines.pop().unwrap();
    (lines, ratios)
}
