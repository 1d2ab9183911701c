//! Other systems, which are programs of `bench/peers`: their workloads, how this program builds each at its first use,
//! and how it starts them.
//!
//! This program starts them as it starts itself, with a [`Job`](crate::parameters::Job), and they report as a side
//! does. Those in Rust link this library, so that their loops and checks are the same. Those in Python, Java and Go
//! have loops of their own with the same checks.

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

/// The directory of their sources: they are built from this project's tree only.
const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/peers");
/// The module in Go, of which its benchmark is a part.
const GO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../bindings/go");
/// The Rust ones' dependencies, each in the tested version.
const LOCK: &str = include_str!("../peers/Cargo.lock");

/// The kinds of peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// Two processes, Rust: a binary, and the crate that it uses
    Processes(&'static str, &'static str),
    /// Two threads, Rust
    Threads(&'static str, &'static str),
    /// A process that starts the other, Python: its name there
    Python(&'static str),
    /// Two processes, Java
    Aeron,
    /// Two processes, Go: its name there
    Go(&'static str),
}

impl Peer {
    /// The peer of that name.
    pub fn of(system: SystemName) -> Option<Peer> {
        Some(match system {
            SystemName::IpcRing => Peer::Processes("ipc_ring", "ipc_ring"),
            SystemName::Ipmpsc => Peer::Processes("ipmpsc", "ipmpsc"),
            SystemName::Iceoryx2 => Peer::Processes("iceoryx2", "iceoryx2"),
            SystemName::ShmemIpc => Peer::Processes("shmem-ipc", "shmem-ipc"),
            SystemName::IoUringStream => Peer::Processes("io-uring-stream", "io-uring"),
            SystemName::IoUringSeqpacket => Peer::Processes("io-uring-seqpacket", "io-uring"),
            SystemName::ZeromqIpc => Peer::Processes("zeromq-ipc", "libloading"),
            SystemName::Rtrb | SystemName::RtrbChunks => Peer::Threads("rtrb", "rtrb"),
            SystemName::CrossbeamChannel => Peer::Threads("crossbeam-channel", "crossbeam-channel"),
            SystemName::Flume => Peer::Threads("flume", "flume"),
            SystemName::Kanal => Peer::Threads("kanal", "kanal"),
            SystemName::MultiprocessingQueue => Peer::Python("multiprocessing.Queue"),
            SystemName::MultiprocessingPipe => Peer::Python("multiprocessing.Pipe"),
            SystemName::Aeron => Peer::Aeron,
            SystemName::PeltonGo => Peer::Go("pelton-go"),
            SystemName::GoSockStream => Peer::Go("go-sock-stream"),
            SystemName::NetRpc => Peer::Go("net-rpc"),
            _ => return None,
        })
    }

    /// Its workloads.
    pub fn workloads(self) -> &'static [Workload] {
        use Workload::*;
        match self {
            Peer::Processes(..) => &[Stream, Roundtrip, Lopsided, Idle, Memory, Kill],
            Peer::Threads(..) => &[Threads],
            Peer::Python(_) | Peer::Aeron => &[Stream, Roundtrip],
            Peer::Go("pelton-go") => &[Stream, Call],
            Peer::Go("net-rpc") => &[Call],
            Peer::Go(_) => &[Stream],
        }
    }

    /// The workloads that it belongs in, for an error text.
    pub fn elsewhere(self) -> &'static str {
        match self {
            Peer::Processes(..) => "measure it with stream, roundtrip, lopsided, idle, memory or kill",
            Peer::Threads(..) => "it is only between threads: measure it with threads",
            Peer::Python(_) | Peer::Aeron => "it has loops of stream and roundtrip only",
            Peer::Go("net-rpc") => "its Go program has the workload call only",
            Peer::Go("pelton-go") => "its Go program has the workloads stream and call only",
            Peer::Go(_) => "its Go program has the workload stream only",
        }
    }

    /// Whether one process is both sides, or starts the other itself.
    pub fn is_both_sides(self) -> bool {
        matches!(self, Peer::Threads(..) | Peer::Python(_))
    }

    /// Whether each of its processes is pinned to one CPU; not if they have threads beside the measured one.
    pub fn is_pinned(self) -> bool {
        !matches!(self, Peer::Processes("zeromq-ipc", _) | Peer::Aeron | Peer::Go(_))
    }

    /// Whether its processes cannot count their own system calls.
    pub fn is_foreign(self) -> bool {
        matches!(self, Peer::Python(_) | Peer::Aeron | Peer::Go(_))
    }

    /// How it waits where pelton spins. One way as its documentation recommends, see its source for the reason. There
    /// and back it spins as pelton does, if it can: otherwise the comparison would be of wake-ups with none.
    pub fn best_wait(self, workload: Workload) -> Wait {
        match self {
            Peer::Processes("iceoryx2", _) | Peer::Threads("rtrb", _) | Peer::Aeron => Wait::Spin,
            Peer::Processes("ipc_ring" | "ipmpsc" | "shmem-ipc" | "zeromq-ipc", _)
                if workload == Workload::Roundtrip =>
            {
                Wait::Spin
            }
            _ => Wait::Block,
        }
    }

    /// The version of its library.
    pub fn version(self) -> String {
        match self {
            // The library's own; the crate that loads it does not report it.
            Peer::Processes("zeromq-ipc", _) => "libzmq as installed".to_string(),
            Peer::Processes(name, package) if name.starts_with("io-uring") => {
                format!("{}, Linux {}", locked(package), rustix::system::uname().release().to_string_lossy())
            }
            Peer::Processes(_, package) | Peer::Threads(_, package) => locked(package),
            Peer::Python(_) => match output(Command::new("python3").arg("--version")) {
                Ok(output) => String::from_utf8_lossy(&output.stdout).trim().to_string(),
                Err(_) => "Python".to_string(),
            },
            Peer::Aeron => format!("Aeron {}", aeron_version()),
            Peer::Go(_) => match output(Command::new("go").args(["env", "GOVERSION"]).env("GOTOOLCHAIN", "local")) {
                Ok(output) => String::from_utf8_lossy(&output.stdout).trim().to_string(),
                Err(_) => "Go".to_string(),
            },
        }
    }

    /// Builds it, unless that is done, and returns the command that starts it.
    pub fn command(self) -> Result<Vec<OsString>> {
        ensure!(Path::new(SOURCES).is_dir(), "{SOURCES} is not there: peers are built from the project's tree");
        match self {
            Peer::Processes(name, _) | Peer::Threads(name, _) => {
                let target = build_directory()?;
                let mut cargo = Command::new(env::var_os("CARGO").unwrap_or("cargo".into()));
                cargo.args(["build", "--release", "--locked", "--quiet", "--bin", name, "--features", name]);
                cargo.arg("--manifest-path").arg(Path::new(SOURCES).join("Cargo.toml"));
                cargo.arg("--target-dir").arg(&target);
                output(&mut cargo)?;
                Ok(vec![target.join("release").join(name).into()])
            }
            Peer::Python(what) => {
                output(Command::new("python3").args(["-c", "import multiprocessing, resource"]))?;
                Ok(vec!["python3".into(), Path::new(SOURCES).join("python/sides.py").into(), what.into()])
            }
            Peer::Aeron => aeron(),
            Peer::Go(what) => {
                let program = build_directory()?.join("go-sides");
                let mut go = Command::new("go");
                go.args(["build", "-o"]).arg(&program).arg("./bench").current_dir(GO);
                // Uses the installed Go; measures the library as its users have it, without cgo.
                go.envs([("GOTOOLCHAIN", "local"), ("GOFLAGS", "-buildvcs=false"), ("CGO_ENABLED", "0")]);
                output(&mut go)?;
                Ok(vec![program.into(), what.into()])
            }
        }
    }
}

/// Where [`build_go_library`] puts its result.
pub fn go_library(name: &str) -> Result<PathBuf> {
    Ok(build_directory()?.join(format!("{name}-go.so")))
}

/// Builds a C library with Go's runtime in it from that directory, unless that is done.
pub fn build_go_library(name: &str, directory: &str) -> Result<()> {
    let library = go_library(name)?;
    let mut go = Command::new("go");
    go.args(["build", "-buildmode=c-shared", "-o"]).arg(&library).arg(".").current_dir(directory);
    go.envs([("GOTOOLCHAIN", "local"), ("GO111MODULE", "off"), ("GOFLAGS", "-buildvcs=false"), ("CGO_ENABLED", "1")]);
    output(&mut go).map(|_| ())
}

fn build_directory() -> Result<PathBuf> {
    // Beside the profile's directory, or a clean of that would remove it too.
    Ok(compiled::target_directory()?.join("peers"))
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
    let pom = include_str!("../peers/aeron/pom.xml");
    let named = pom.split_once("<aeron.version>").and_then(|(_, rest)| rest.split_once("</aeron.version>"));
    named.map(|(version, _)| version).unwrap_or_default()
}

/// Fetches the jar by Maven, and compiles the side.
fn aeron() -> Result<Vec<OsString>> {
    let place = build_directory()?.join(format!("aeron-{}", aeron_version()));
    fs::create_dir_all(&place).with_context(|| format!("creating {}", place.display()))?;
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
    // The exports are as in Aeron's documentation; the serial collector adds no threads to two busy processors.
    let flags = ["--add-opens=java.base/jdk.internal.misc=ALL-UNNAMED", "-XX:+UseSerialGC", "-Xmx256m"];
    let mut command: Vec<OsString> = vec!["java".into()];
    command.extend(flags.map(OsString::from));
    command.extend(["--class-path".into(), path, "AeronSide".into()]);
    Ok(command)
}

/// Runs it to its end; the error has its error output.
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
    fn every_peer_has_a_version_and_a_source() {
        for system in SystemName::value_variants() {
            match Peer::of(*system) {
                Some(Peer::Processes(name, package) | Peer::Threads(name, package)) => {
                    // One program may be several systems.
                    assert!(word(*system).starts_with(name), "{name}");
                    assert!(Path::new(SOURCES).join(format!("src/bin/{name}.rs")).exists(), "{name}");
                    assert!(locked(package).split(' ').nth(1).is_some_and(|v| v.contains('.')), "{package}");
                }
                Some(Peer::Aeron) => assert!(aeron_version().contains('.')),
                Some(Peer::Python(_) | Peer::Go(_)) | None => {}
            }
        }
    }

    #[test]
    fn round_trips_spin_where_they_can_and_streams_use_the_best_wait() {
        let ring = Peer::of(SystemName::Ipmpsc).unwrap();
        assert_eq!((ring.best_wait(Workload::Roundtrip), ring.best_wait(Workload::Stream)), (Wait::Spin, Wait::Block));
        // Its ring is in the kernel, which cannot spin.
        let uring = Peer::of(SystemName::IoUringStream).unwrap();
        assert_eq!(uring.best_wait(Workload::Roundtrip), Wait::Block);
    }

    #[test]
    fn a_failed_build_is_reported_with_its_error_output() {
        let error = output(Command::new("sh").args(["-c", "echo 'error: no luck' >&2; exit 3"])).unwrap_err();
        assert!(error.to_string().contains("no luck"), "{error}");
        let error = output(&mut Command::new("/nowhere/at-all")).unwrap_err();
        assert!(format!("{error:#}").contains("is it installed"), "{error:#}");
    }
}
