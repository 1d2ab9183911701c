//! Other systems, which are programs of `bench/peers`: how this program builds each at its first use, and how it starts
//! them.
//!
//! This program starts them as it starts itself, with a [`Job`], and they report as a side does. Those in Rust link
//! this library, so that their loops and checks are the same. Those in Python, Node, Java and Go have loops of their
//! own, with the same checks.

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    compiled::{self, output},
    parameters::{Job, Kind, Process, Wait},
    plan::{SYSTEM, System, Waits, kernel},
};

/// The directory of their sources: they are built from this project's tree only.
const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/peers");
/// The module in Go, of which its benchmark is a part.
const MODULE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../bindings/go");
/// The sides in Python.
const PYTHON_SIDES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../bindings/python/bench/sides.py");
/// The Rust ones' dependencies, each in the tested version.
const LOCK: &str = include_str!("../../peers/Cargo.lock");

/// Two processes, Rust. One way they block as their documentation recommends, see the head of each source. There and
/// back they spin as pelton does, if they can.
pub const CARGO: System = System {
    sides: &[(Kind::Processes, elsewhere)],
    waits: Waits::Best(Wait::Block, Wait::Spin),
    suite: Some("processes"),
    version: |system| locked(system.name),
    build: |system, _, _| built(system.name),
    process: Process { in_shared_memory: true, ..SYSTEM.process },
    ..SYSTEM
};
/// Two threads, Rust.
pub const THREADS: System = System {
    sides: &[(Kind::Threads, elsewhere)],
    waits: Waits::Best(Wait::Block, Wait::Block),
    suite: Some("threads"),
    process: Process { is_both: true, ..CARGO.process },
    ..CARGO
};
/// Two processes of another language, which cannot count their own system calls.
pub const FOREIGN: System = System {
    waits: Waits::Best(Wait::Block, Wait::Block),
    suite: Some("languages"),
    process: Process { is_foreign: true, ..CARGO.process },
    ..CARGO
};
/// A process that starts the other, Python.
pub const PYTHON: System = System {
    only: &["stream", "roundtrip"],
    process: Process { is_both: true, ..FOREIGN.process },
    build: |system, _, _| python(system.name),
    version: |_| installed(Command::new("python3").arg("--version"), "Python"),
    ..FOREIGN
};
/// A process that starts the other, Node.
pub const NODE: System = System {
    only: &["stream", "roundtrip"],
    process: Process { is_both: true, is_unpinned: true, ..FOREIGN.process },
    build: |system, _, _| node(system.name),
    version: |_| installed(Command::new("node").arg("--version"), "Node").replace('v', "Node "),
    ..FOREIGN
};
/// Two processes, Java. Their virtual machines have threads of their own.
pub const JAVA: System = System {
    only: &["stream", "roundtrip"],
    process: Process { is_unpinned: true, ..FOREIGN.process },
    build: |system, _, _| java(system.name),
    version: |_| installed(Command::new(jdk("java")).arg("--version"), "Java"),
    ..FOREIGN
};
/// Two processes, Go.
pub const GO: System = System {
    only: &["stream"],
    process: Process { is_unpinned: true, ..FOREIGN.process },
    build: |system, _, _| go(system.name),
    version: |_| installed(Command::new("go").args(["env", "GOVERSION"]).env("GOTOOLCHAIN", "local"), "Go"),
    ..FOREIGN
};

/// The part of a program of its own, which is not this one.
pub fn elsewhere(job: &Job) -> Result<()> {
    bail!("the part of {} is a program of its own", job.system)
}

fn installed(version: &mut Command, name: &str) -> String {
    output(version).unwrap_or(name.to_string())
}

/// The version of the crate by which io_uring is used, and the kernel's.
pub fn io_uring() -> String {
    format!("{}, {}", locked("io-uring"), kernel())
}

/// Builds a program in Rust and returns the command that starts it.
pub fn built(name: &str) -> Result<Vec<OsString>> {
    ensure!(Path::new(SOURCES).is_dir(), "{SOURCES} is not there: peers are built from the project's tree");
    let target = build_directory()?;
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or("cargo".into()));
    cargo.args(["build", "--release", "--locked", "--quiet", "--bin", name, "--features", name]);
    cargo.arg("--manifest-path").arg(Path::new(SOURCES).join("Cargo.toml"));
    cargo.arg("--target-dir").arg(&target);
    output(&mut cargo)?;
    Ok(vec![target.join("release").join(name).into()])
}

/// The command that starts a system in Python: `what` is its name there. `./run bench` sets PELTON_PYTHON to an
/// interpreter that has pelton, if one of the systems needs it.
pub fn python(what: &str) -> Result<Vec<OsString>> {
    let interpreter = env::var_os("PELTON_PYTHON").unwrap_or("python3".into());
    let modules = if what == "pelton-python" { "pelton" } else { "multiprocessing, resource" };
    output(Command::new(&interpreter).args(["-c", &format!("import {modules}")]))?;
    Ok(vec![interpreter, PYTHON_SIDES.into(), what.into()])
}

/// The command that starts a system in Node: `what` is its name there. `./run bench` sets PELTON_NODE to a directory
/// whose packages it needs, if one of the systems does.
pub fn node(what: &str) -> Result<Vec<OsString>> {
    let modules = env::var_os("PELTON_NODE").unwrap_or_default();
    let side = concat!(env!("CARGO_MANIFEST_DIR"), "/../bindings/node/bench/sides.js");
    let package = match what {
        "node-undici" => "undici",
        "node-grpc" => "@grpc/grpc-js",
        _ if what.starts_with("pelton") => "pelton",
        _ => "node:net",
    };
    output(Command::new("node").env("NODE_PATH", &modules).args(["-e", &format!("require('{package}')")]))?;
    let mut path = OsString::from("NODE_PATH=");
    path.push(modules);
    Ok(vec!["env".into(), path, "node".into(), side.into(), what.into()])
}

/// Builds the program in Go; `what` is the system's name there.
pub fn go(what: &str) -> Result<Vec<OsString>> {
    let program = build_directory()?.join("go-sides");
    let mut go = Command::new("go");
    go.args(["build", "-o"]).arg(&program).arg("./bench").current_dir(MODULE);
    // Uses the installed Go; measures the library as its users have it, without cgo.
    go.envs([("GOTOOLCHAIN", "local"), ("GOFLAGS", "-buildvcs=false"), ("CGO_ENABLED", "0")]);
    output(&mut go)?;
    Ok(vec![program.into(), what.into()])
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
    output(&mut go).map(drop)
}

fn build_directory() -> Result<PathBuf> {
    // Beside the profile's directory, or a clean of that would remove it too.
    Ok(compiled::target_directory()?.join("peers"))
}

/// The crate, and its version in the lock file.
pub fn locked(package: &str) -> String {
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
pub fn aeron_version() -> &'static str {
    let pom = include_str!("../../../bindings/java/bench/aeron/pom.xml");
    let named = pom.split_once("<aeron.version>").and_then(|(_, rest)| rest.split_once("</aeron.version>"));
    named.map(|(version, _)| version).unwrap_or_default()
}

/// Fetches the jar by Maven, and compiles the side.
pub fn aeron() -> Result<Vec<OsString>> {
    let place = build_directory()?.join(format!("aeron-{}", aeron_version()));
    fs::create_dir_all(&place).with_context(|| format!("creating {}", place.display()))?;
    let jar = place.join("aeron-all.jar");
    let source = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../bindings/java/bench/aeron"));
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

/// A program of the JDK that JAVA_HOME names, which `./run bench` sets if a system needs it.
fn jdk(program: &str) -> PathBuf {
    env::var_os("JAVA_HOME").map_or(program.into(), |home| Path::new(&home).join("bin").join(program))
}

/// Compiles the binding and the sides in Java, after it has fetched what is measured beside pelton; `what` is the
/// system's name there.
fn java(what: &str) -> Result<Vec<OsString>> {
    let binding = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../bindings/java"));
    let place = build_directory()?.join("java");
    let (jars, classes) = (place.join("jars"), place.join("classes"));
    fs::create_dir_all(&classes).with_context(|| format!("creating {}", classes.display()))?;
    let maven = |pom: PathBuf, arguments: &[&str]| {
        let mut maven = Command::new("mvn");
        output(maven.args(["--batch-mode", "--quiet", "--file"]).arg(pom).args(arguments)).map(drop)
    };
    let pom = binding.join("bench/pom.xml");
    // The copy is of the pom.xml by which the jars came.
    let fetched = place.join("pom.xml");
    if fs::read(&fetched).ok() != fs::read(&pom).ok() {
        let to = format!("-DoutputDirectory={}", jars.display());
        maven(pom.clone(), &["dependency:copy-dependencies", &to])?;
        fs::copy(&pom, &fetched).context("noting what was fetched")?;
    }
    let build = format!("-Dpelton.build={}", place.join("binding").display());
    maven(binding.join("pom.xml"), &[&build, "compile"])?;
    let mut path = classes.clone().into_os_string();
    path.push(":");
    path.push(place.join("binding/classes"));
    path.push(":");
    path.push(jars.join("*"));
    let mut javac = Command::new(jdk("javac"));
    javac.args(["-proc:none", "--class-path"]).arg(&path).arg("-d").arg(&classes);
    output(javac.arg(binding.join("bench/Sides.java")))?;
    let mut library = OsString::from("-Dpelton.library=");
    library.push(compiled::target_directory()?.join("release/libpelton_capi.so"));
    let mut command: Vec<OsString> = vec![jdk("java").into(), library];
    // The serial collector adds no threads to two busy processors.
    command.extend(["-XX:+UseSerialGC", "-Xmx512m", "--enable-native-access=ALL-UNNAMED"].map(OsString::from));
    if what == "chronicle-queue" {
        // As its documentation lists them for this version of Java.
        let packages = ["lang", "lang.reflect", "lang.invoke", "io", "util", "nio"].map(|it| format!("java.{it}"));
        let inside = ["sun.nio.ch", "jdk.internal.misc", "jdk.internal.ref"].map(String::from);
        for package in packages.iter().chain(&inside) {
            command.push(format!("--add-opens=java.base/{package}=ALL-UNNAMED").into());
            command.push(format!("--add-exports=java.base/{package}=ALL-UNNAMED").into());
        }
        command.extend(["-Dchronicle.analytics.disable=true", "-Ddisable.thread.safety=true"].map(OsString::from));
    }
    command.extend(["--class-path".into(), path, "Sides".into(), what.into()]);
    Ok(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_crate_has_a_locked_version_and_aeron_too() {
        for package in ["ipc_ring", "ipmpsc", "iceoryx2", "shmem-ipc", "io-uring", "rtrb", "flume", "kanal"] {
            assert!(locked(package).split(' ').nth(1).is_some_and(|v| v.contains('.')), "{package}");
        }
        assert!(aeron_version().contains('.'));
    }
}
