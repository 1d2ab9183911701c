//! Erlang: pelton's application beside `file`, in a node of its own for each run.
//! bindings/erlang/bench/file_bench.erl has the measurement.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use crate::compiled;

/// The systems in the program's output.
const KNOWN: [&str; 5] = ["pelton-erlang", "pelton-erlang-on-heap", "erlang-raw", "erlang-raw-off-heap", "erlang-file"];

/// The compiled program, and the directory of pelton's application.
pub struct Erlang {
    compiled: tempfile::TempDir,
    application: PathBuf,
}

impl Erlang {
    /// Fails if Erlang is missing, or the application has not been built.
    pub fn new() -> Result<Erlang> {
        let application = compiled::target_directory()?.join("erlang/_build/default/lib/pelton/ebin");
        ensure!(
            application.join("pelton_nif.beam").exists(),
            "found no application in {}, wanted bindings/erlang built there: `./run bench` does it where rebar3 is",
            application.display()
        );
        let compiled = tempfile::Builder::new().prefix("pelton-bench-erlang").tempdir()?;
        let source = compiled.path().join("file_bench.erl");
        fs::write(&source, include_str!("../../../bindings/erlang/bench/file_bench.erl"))?;
        let done = Command::new("erlc").arg("-o").arg(compiled.path()).arg(&source).output();
        let done = done.context("starting `erlc`: install Erlang (on Debian erlang-base)")?;
        ensure!(done.status.success(), "erlc failed: {}", String::from_utf8_lossy(&done.stdout));
        Ok(Erlang { compiled, application })
    }

    /// One run of all systems. For each figure of the part, in the order of its units, that of each system.
    pub fn run(
        &self,
        part: &str,
        place: &Path,
        mailbox: usize,
        turn: usize,
        mib: usize,
    ) -> Result<Vec<BTreeMap<&'static str, f64>>> {
        let done = Command::new("erl")
            .args(["-noshell", "-pa"])
            .arg(self.compiled.path())
            .arg("-pa")
            .arg(&self.application)
            .args(["-run", "file_bench", "main", part])
            .arg(place)
            .args([mailbox, turn, mib].map(|number| number.to_string()))
            .output()
            .context("starting `erl`")?;
        let text = String::from_utf8_lossy(&done.stdout);
        ensure!(done.status.success(), "erl failed: {text}{}", String::from_utf8_lossy(&done.stderr));
        let mut figures: Vec<BTreeMap<&'static str, f64>> = Vec::new();
        for line in text.lines() {
            let (system, of_system) =
                line.split_once(' ').with_context(|| format!("found `{line}`, wanted a figure"))?;
            let system = KNOWN.into_iter().find(|known| *known == system).context("a system that is none")?;
            for (at, figure) in of_system.split(' ').enumerate() {
                if figures.len() == at {
                    figures.push(BTreeMap::new());
                }
                figures[at].insert(system, figure.parse()?);
            }
        }
        Ok(figures)
    }
}
