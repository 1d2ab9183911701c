//! Erlang: pelton's application beside `file`, in a node of its own for each run. What is measured is in bench/erlang/file_bench.erl.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

/// The program, compiled, and where it finds pelton's application.
pub struct Erlang {
    compiled: tempfile::TempDir,
    application: PathBuf,
}

impl Erlang {
    /// Fails where Erlang cannot be had, or the application has not been built.
    pub fn new() -> Result<Erlang> {
        let application =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../bindings/erlang/_build/default/lib/pelton/ebin");
        ensure!(
            application.join("pelton_nif.beam").exists(),
            "found no application in {}, wanted bindings/erlang built: `./run bench` does it where rebar3 is",
            application.display()
        );
        let compiled = tempfile::Builder::new().prefix("pelton-bench-erlang").tempdir()?;
        let source = compiled.path().join("file_bench.erl");
        fs::write(&source, include_str!("../../erlang/file_bench.erl"))?;
        let done = Command::new("erlc").arg("-o").arg(compiled.path()).arg(&source).output();
        let done = done.context("starting `erlc`: install Erlang (on Debian erlang-base)")?;
        ensure!(done.status.success(), "erlc failed: {}", String::from_utf8_lossy(&done.stdout));
        Ok(Erlang { compiled, application })
    }

    /// One run of all systems.
    pub fn run(&self, part: &str, place: &Path, mailbox: usize, turn: usize) -> Result<BTreeMap<&'static str, f64>> {
        let done = Command::new("erl")
            .args(["-noshell", "-pa"])
            .arg(self.compiled.path())
            .arg("-pa")
            .arg(&self.application)
            .args(["-run", "file_bench", "main", part])
            .arg(place)
            .args([mailbox.to_string(), turn.to_string()])
            .output()
            .context("starting `erl`")?;
        let text = String::from_utf8_lossy(&done.stdout);
        ensure!(done.status.success(), "erl failed: {text}{}", String::from_utf8_lossy(&done.stderr));
        let mut figures = BTreeMap::new();
        for line in text.lines() {
            let (system, figure) = line.split_once(' ').with_context(|| format!("found `{line}`, wanted a figure"))?;
            let known = ["pelton-erlang", "pelton-erlang-on-heap", "erlang-raw", "erlang-file"];
            let system = known.into_iter().find(|known| *known == system).context("a system that is none")?;
            figures.insert(system, figure.parse()?);
        }
        Ok(figures)
    }
}
