//! Systems that are programs of `bench/rivals`: what each can do, how it is made when it is first needed, and how it is started.
//!
//! Such a program is started as this one starts itself, with a [`Job`](crate::parameters::Job), and speaks as a side does. Those in Rust
//! use this library, so that their loops and checks are the same; those in Python and Java have loops of their own, which check the same.

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    parameters::{SystemName, Wait, Workload},
    systems::compiled,
};

/// Where their sources are: they are built from this project's tree only.
const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/rivals");
/// The module in Go, of which its benchmark is a part.
const GO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../bindings/go");
/// The Rust ones' dependencies, each in the version that was tried.
const LOCK: &str = include_str!("../rivals/Cargo.lock");

/// What a rival is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rival {
    /// Two processes, Rust: a binary, and the crate that it shows
    Processes(&'static str, &'static str),
    /// Two threads, Rust
    Threads(&'static str, &'static str),
    /// A process that starts the other, Python: what it is called there
    Python(&'static str),
    /// Two processes, Java
    Aeron,
    /// Two processes, Go: what it is called there
    Go(&'static str),
}

impl Rival {
    /// The rival of that name.
    pub fn of(system: SystemName) -> Option<Rival> {
        Some(match system {
            SystemName::IpcRing => Rival::Processes("ipc_ring", "ipc_ring"),
            SystemName::Ipmpsc => Rival::Processes("ipmpsc", "ipmpsc"),
            SystemName::Iceoryx2 => Rival::Processes("iceoryx2", "iceoryx2"),
            SystemName::ShmemIpc => Rival::Processes("shmem-ipc", "shmem-ipc"),
            SystemName::IoUringStream => Rival::Processes("io-uring-stream", "io-uring"),
            SystemName::IoUringSeqpacket => Rival::Processes("io-uring-seqpacket", "io-uring"),
            SystemName::ZeromqIpc => Rival::Processes("zeromq-ipc", "libloading"),
            SystemName::Rtrb | SystemName::RtrbChunks => Rival::Threads("rtrb", "rtrb"),
            SystemName::CrossbeamChannel => Rival::Threads("crossbeam-channel", "crossbeam-channel"),
            SystemName::Flume => Rival::Threads("flume", "flume"),
            SystemName::Kanal => Rival::Threads("kanal", "kanal"),
            SystemName::MultiprocessingQueue => Rival::Python("multiprocessing.Queue"),
            SystemName::MultiprocessingPipe => Rival::Python("multiprocessing.Pipe"),
            SystemName::Aeron => Rival::Aeron,
            SystemName::PeltonGo => Rival::Go("pelton-go"),
            SystemName::GoSockStream => Rival::Go("go-sock-stream"),
            SystemName::NetRpc => Rival::Go("net-rpc"),
            _ => return None,
        })
    }

    /// What it has a part in.
    pub fn workloads(self) -> &'static [Workload] {
        use Workload::*;
        match self {
            Rival::Processes(..) => &[Stream, Roundtrip, Lopsided, Idle, Memory, Kill],
            Rival::Threads(..) => &[Threads],
            Rival::Python(_) | Rival::Aeron => &[Stream, Roundtrip],
            Rival::Go("pelton-go") => &[Stream, Call],
            Rival::Go("net-rpc") => &[Call],
            Rival::Go(_) => &[Stream],
        }
    }

    /// Where it belongs.
    pub fn elsewhere(self) -> &'static str {
        match self {
            Rival::Processes(..) => "measure it with stream, roundtrip, lopsided, idle, memory or kill",
            Rival::Threads(..) => "it is between threads only: measure it with threads",
            Rival::Python(_) | Rival::Aeron => "its loops are its own, of stream and roundtrip only",
            Rival::Go("net-rpc") => "its loops are Go's, of call only",
            Rival::Go("pelton-go") => "its loops are Go's, of stream and call only",
            Rival::Go(_) => "its loops are Go's, of stream only",
        }
    }

    /// Whether one process is both sides, or starts the other itself.
    pub fn is_both_sides(self) -> bool {
        matches!(self, Rival::Threads(..) | Rival::Python(_))
    }

    /// Whether each of its processes is kept on one CPU; those with threads of their own beside the one that is measured are not.
    pub fn is_pinned(self) -> bool {
        !matches!(self, Rival::Processes("zeromq-ipc", _) | Rival::Aeron | Rival::Go(_))
    }

    /// Whether its processes cannot count their own system calls.
    pub fn is_foreign(self) -> bool {
        matches!(self, Rival::Python(_) | Rival::Aeron | Rival::Go(_))
    }

    /// How it waits where pelton spins. One way as its documentation would have it, see its source for the reason; there and back as pelton does,
    /// if it can, or its wake-ups would be compared with no wake-ups.
    pub fn best_wait(self, workload: Workload) -> Wait {
        match self {
            Rival::Processes("iceoryx2", _) | Rival::Threads("rtrb", _) | Rival::Aeron => Wait::Spin,
            Rival::Processes("ipc_ring" | "ipmpsc" | "shmem-ipc" | "zeromq-ipc", _)
                if workload == Workload::Roundtrip =>
            {
                Wait::Spin
            }
            _ => Wait::Block,
        }
    }

    /// Of what it shows.
    pub fn version(self) -> String {
        match self {
            // The library's own; the crate that loads it says nothing of it.
            Rival::Processes("zeromq-ipc", _) => "libzmq as installed".to_string(),
            Rival::Processes(name, package) if name.starts_with("io-uring") => {
                format!("{}, Linux {}", locked(package), rustix::system::uname().release().to_string_lossy())
            }
            Rival::Processes(_, package) | Rival::Threads(_, package) => locked(package),
            Rival::Python(_) => match output(Command::new("python3").arg("--version")) {
                Ok(output) => String::from_utf8_lossy(&output.stdout).trim().to_string(),
                Err(_) => "Python".to_string(),
            },
            Rival::Aeron => format!("Aeron {}", aeron_version()),
            Rival::Go(_) => match output(Command::new("go").args(["env", "GOVERSION"]).env("GOTOOLCHAIN", "local")) {
                Ok(output) => String::from_utf8_lossy(&output.stdout).trim().to_string(),
                Err(_) => "Go".to_string(),
            },
        }
    }

    /// Makes it, unless that has been done, and answers the command that starts it.
    pub fn command(self) -> Result<Vec<OsString>> {
        ensure!(Path::new(SOURCES).is_dir(), "{SOURCES} is not there: rivals are built from the project's tree");
        match self {
            Rival::Processes(name, _) | Rival::Threads(name, _) => {
                let target = places()?;
                let mut cargo = Command::new(env::var_os("CARGO").unwrap_or("cargo".into()));
                cargo.args(["build", "--release", "--locked", "--quiet", "--bin", name, "--features", name]);
                cargo.arg("--manifest-path").arg(Path::new(SOURCES).join("Cargo.toml"));
                cargo.arg("--target-dir").arg(&target);
                output(&mut cargo)?;
                Ok(vec![target.join("release").join(name).into()])
            }
            Rival::Python(what) => {
                output(Command::new("python3").args(["-c", "import multiprocessing, resource"]))?;
                Ok(vec!["python3".into(), Path::new(SOURCES).join("python/sides.py").into(), what.into()])
            }
            Rival::Aeron => aeron(),
            Rival::Go(what) => {
                let program = places()?.join("go-sides");
                let mut go = Command::new("go");
                go.args(["build", "-o"]).arg(&program).arg("./bench").current_dir(GO);
                // What is installed is used, and what is measured is what users have: no cgo.
                go.envs([("GOTOOLCHAIN", "local"), ("GOFLAGS", "-buildvcs=false"), ("CGO_ENABLED", "0")]);
                output(&mut go)?;
                Ok(vec![program.into(), what.into()])
            }
        }
    }
}

fn places() -> Result<PathBuf> {
    // Beside the profile's directory, or a clean of that would take it along.
    let own = compiled::directory()?;
    Ok(own.parent().unwrap_or(&own).join("rivals"))
}

fn locked(package: &str) -> String {
    let version = LOCK.split("[[package]]").find_map(|entry| {
        let field = |name: &str| {
            entry.lines().find_map(|line| line.strip_prefix(name)?.trim_matches([' ', '=', '"']).to_string().into())
        };
        let named: Option<String> = field("name");
        if named.as_deref() == Some(package) { field("version") } else { None }
    });
    format!("{package} {}", version.unwrap_or_default())
}

/// The version that pom.xml names.
fn aeron_version() -> &'static str {
    let pom = include_str!("../rivals/aeron/pom.xml");
    let named = pom.split_once("<aeron.version>").and_then(|(_, rest)| rest.split_once("</aeron.version>"));
    named.map(|(version, _)| version).unwrap_or_default()
}

/// Fetches the jar by Maven, and compiles the side.
fn aeron() -> Result<Vec<OsString>> {
    let place = places()?.join(format!("aeron-{}", aeron_version()));
    fs::create_dir_all(&place).with_context(|| format!("making {}", place.display()))?;
    let jar = place.join("aeron-all.jar");
    let source = Path::new(SOURCES).join("aeron");
    if !jar.exists() {
        let mut maven = Command::new("mvn");
        maven.args(["--batch-mode", "--quiet", "dependency:copy-dependencies", "-Dmdep.stripVersion=true"]);
        maven.arg("--file").arg(source.join("pom.xml")).arg(format!("-DoutputDirectory={}", place.display()));
        output(&mut maven)?;
    }
    let mut javac = Command::new("javac");
    javac.arg("--class-path").arg(&jar).arg("-d").arg(&place).arg(source.join("AeronSide.java"));
    output(&mut javac)?;
    let mut path = OsString::from(&place);
    path.push(":");
    path.push(&jar);
    // The exports are what Aeron's documentation asks for; the collector is the one that makes no threads beside two busy processors.
    let flags = ["--add-opens=java.base/jdk.internal.misc=ALL-UNNAMED", "-XX:+UseSerialGC", "-Xmx256m"];
    let mut command: Vec<OsString> = vec!["java".into()];
    command.extend(flags.map(OsString::from));
    command.extend(["--class-path".into(), path, "AeronSide".into()]);
    Ok(command)
}

/// Runs it to its end; what it says of its failure is the reason.
fn output(command: &mut Command) -> Result<Output> {
    let name = Path::new(command.get_program()).display().to_string();
    let done = command.stdin(Stdio::null()).output().with_context(|| format!("starting `{name}`: is it installed?"))?;
    if !done.status.success() {
        let said = [&done.stdout[..], &done.stderr[..]].concat();
        let said = String::from_utf8_lossy(&said);
        let lines: Vec<&str> = said.lines().filter(|line| line.to_lowercase().contains("error")).take(3).collect();
        let said = if lines.is_empty() { said.trim().to_string() } else { lines.join("; ") };
        bail!("`{name}` failed ({}): {}", done.status, said.chars().take(600).collect::<String>());
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parameters::word;
    use clap::ValueEnum;

    #[test]
    fn every_rival_has_a_version_and_a_source() {
        for system in SystemName::value_variants() {
            match Rival::of(*system) {
                Some(Rival::Processes(name, package) | Rival::Threads(name, package)) => {
                    // One program may be several systems.
                    assert!(word(*system).starts_with(name), "{name}");
                    assert!(Path::new(SOURCES).join(format!("src/bin/{name}.rs")).exists(), "{name}");
                    assert!(locked(package).split(' ').nth(1).is_some_and(|v| v.contains('.')), "{package}");
                }
                Some(Rival::Aeron) => assert!(aeron_version().contains('.')),
                Some(Rival::Python(_) | Rival::Go(_)) | None => {}
            }
        }
    }

    #[test]
    fn round_trips_spin_where_they_can_and_streams_wait_as_is_best() {
        let ring = Rival::of(SystemName::Ipmpsc).unwrap();
        assert_eq!((ring.best_wait(Workload::Roundtrip), ring.best_wait(Workload::Stream)), (Wait::Spin, Wait::Block));
        // Its ring is in the kernel, which cannot spin.
        let uring = Rival::of(SystemName::IoUringStream).unwrap();
        assert_eq!(uring.best_wait(Workload::Roundtrip), Wait::Block);
    }

    #[test]
    fn what_a_failed_build_says_is_the_reason() {
        let error = output(Command::new("sh").args(["-c", "echo 'error: no luck' >&2; exit 3"])).unwrap_err();
        assert!(error.to_string().contains("no luck"), "{error}");
        let error = output(&mut Command::new("/nowhere/at-all")).unwrap_err();
        assert!(format!("{error:#}").contains("is it installed"), "{error:#}");
    }
}
