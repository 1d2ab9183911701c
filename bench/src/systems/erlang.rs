//! Erlang: pelton's application beside `file`, in a node of its own for each run. bench/erlang/file_bench.erl has the
//! measurement.

use std::{
    collections::BTreeMap,
    fs,
    io::{Read as _, Write as _},
    os::unix::net::UnixListener,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

use crate::compiled;

/// The systems in the program's output.
const KNOWN: [&str; 6] =
    ["pelton-erlang", "pelton-erlang-on-heap", "erlang-raw", "erlang-raw-off-heap", "erlang-file", "gen-tcp"];

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
        fs::write(&source, include_str!("../../erlang/file_bench.erl"))?;
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
        match part {
            "erlang-messages" => echo_messages(place)?,
            "erlang-call" => echo_calls(place)?,
            _ => {}
        }
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

/// Echoes messages, by pelton and by a stream socket, until the node ends.
fn echo_messages(place: &Path) -> Result<()> {
    let [there, back] = ["there", "back"].map(|name| format!("unix:{}", place.join(name).display()));
    let listener = pelton::Listener::bind(&there)?;
    thread::spawn(move || -> pelton::Result<()> {
        let mut receiver = listener.accept_receiver()?;
        let options = pelton::Options::new().connect_deadline(Instant::now() + Duration::from_secs(20));
        let mut sender = options.connect_sender(&back)?;
        loop {
            sender.send(&receiver.receive()?)?;
        }
    });
    echo_by_socket(place)
}

/// Replies to calls with their own bytes, by pelton and by a stream socket.
fn echo_calls(place: &Path) -> Result<()> {
    let mut service = pelton::Service::listen(&format!("unix:{}", place.join("service").display()))?;
    thread::spawn(move || -> pelton::Result<()> {
        loop {
            let (request, responder) = service.receive()?.into_parts();
            responder.reply(&request)?;
            // An empty request ends it: the next run listens anew.
            if request.is_empty() {
                return Ok(());
            }
        }
    });
    echo_by_socket(place)
}

/// An echo need not know the frames.
fn echo_by_socket(place: &Path) -> Result<()> {
    let path = place.join("socket");
    let _ = fs::remove_file(&path);
    let listener = UnixListener::bind(&path)?;
    thread::spawn(move || -> std::io::Result<()> {
        let (mut socket, _) = listener.accept()?;
        let mut bytes = vec![0; 1 << 16];
        loop {
            match socket.read(&mut bytes)? {
                0 => return Ok(()),
                count => socket.write_all(&bytes[..count])?,
            }
        }
    });
    Ok(())
}
