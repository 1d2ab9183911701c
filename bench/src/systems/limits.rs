//! limits.c, run beside the other systems: the limits of this machine.
//!
//! It has its own processes, clock and pinning. A process of ours starts it, and measures what it uses.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    compiled,
    measure::{CallCounter, Usage},
    parameters::{Job, Kind, Role},
    record::Run,
    run::{available_cpus, deadline},
    side::say,
    sides::{Interrupts, Sides, ends_with_this},
};

const SOURCE: &str = include_str!("../../limits/limits.c");

/// A fingerprint of the source: the program has no version of its own.
pub fn version() -> String {
    format!("limits.c {}", compiled::fingerprint(SOURCE))
}

/// The arguments of limits.c for `count` messages or rounds, or why it does not fit this job.
fn arguments(job: &Job, count: u64) -> Result<String> {
    let (fixed, size) = (job.sizes.is_fixed(), job.sizes.max);
    ensure!(i32::try_from(count).is_ok(), "limits.c counts up to {}, wanted {count}: give a smaller --count", i32::MAX);
    match (job.kind, job.workload.as_str()) {
        (Kind::Append, _) => {
            ensure!(
                fixed && size <= 4096,
                "limits.c appends messages of one size of up to 4096 bytes, wanted {}",
                job.sizes
            );
            Ok(format!("append {} {count} {size}", job.threads))
        }
        (Kind::FanIn, _) | (Kind::Processes, "stream") => {
            ensure!(fixed || job.sizes.min == 1, "limits.c has random sizes from 1 up only, wanted {}", job.sizes);
            let sign = if fixed { "" } else { "-" };
            // A window must hold several of the largest messages: 128 KiB would hardly hold those of up to 512 KiB.
            let window = if !fixed && size > 131_072 { 1_048_576 } else { window(job) };
            Ok(format!("stream {sign}{size} {count} {} {window}", job.capacity))
        }
        (Kind::Call, _) | (Kind::Processes, "roundtrip") => {
            ensure!(job.calls.one_by_one(), "limits.c has one message there and back at a time");
            ensure!(
                job.calls.rate.is_none() && !job.calls.one_cpu,
                "limits.c has two processes that never rest, each on a CPU of its own"
            );
            if job.delay_us > 0 {
                return Ok(format!("eventfd {count} {}", job.delay_us));
            }
            ensure!(fixed, "limits.c has round trips of one size only, wanted {}", job.sizes);
            // Its rings are of 1 MiB; a message above half of that would wait without end.
            ensure!(size <= 500_000, "limits.c has round trips of up to 500000 bytes, wanted {size}");
            Ok(format!("roundtrip {size} {count}"))
        }
        _ => bail!("limits.c has no {}", job.workload),
    }
}

/// How far its sender writes before it returns to the front, in bytes. The performance target is defined with 128 KiB.
/// `limits-window` has pelton's own (`WINDOW` of pelton-lane), because whether a window fits the second-level cache
/// decides more than the code of either.
fn window(job: &Job) -> u64 {
    if job.system == "limits-window" { PELTON_WINDOW } else { 131_072 }
}

const PELTON_WINDOW: u64 = 256 << 10;

/// Fails unless the two CPUs are available to which limits.c pins its processes.
pub fn check_cpus() -> Result<()> {
    let available = available_cpus()?;
    ensure!(
        available.starts_with(&[0, 1]),
        "limits.c pins its processes to the CPUs 0 and 1, found {available:?}: allow it those"
    );
    Ok(())
}

/// Compiles limits.c, unless that is done.
pub fn compile() -> Result<PathBuf> {
    compiled::compile("limits.c", SOURCE, &["-O3", "-march=native", "-pthread"], &[])
}

/// Starts the process that starts limits.c, which pins its own.
pub fn run(job: &Job, interrupts: &Interrupts) -> Result<Run> {
    arguments(job, 1)?;
    if job.cpus != [0, 1] {
        check_cpus()?;
    }
    compile()?;
    let mut sides = Sides::new(interrupts, deadline(job));
    sides.start(job, Role::Threads, 0)?;
    let run = sides.report(0)?;
    sides.end()?;
    Ok(run)
}

/// That process: runs limits.c, once for the clock and once for the system calls, and reports both.
///
/// CPU time and system calls are those of the whole program, with its start and end: less than a millisecond, and some
/// hundred calls.
pub fn part(job: &Job) -> Result<()> {
    let program = compile()?;
    let mut result = Run::default();
    for pass in &job.passes {
        let arguments = arguments(job, pass.count)?;
        if pass.warms_up {
            // Each of its runs has memory of its own.
            continue;
        }
        if pass.count_calls {
            let counter = CallCounter::start()?;
            print(&program, &arguments)?;
            let calls = counter.stop()? as f64 / job.messages(pass.count) as f64;
            result.figures.set("syscalls_per_message", Some(calls));
            continue;
        }
        let before = Usage::of_children();
        let text = print(&program, &arguments)?;
        let usage = Usage::of_children().since(before);
        let syscalls = result.figures.get("syscalls_per_message");
        result.figures =
            serde_json::from_str(&text).with_context(|| format!("reading what limits.c printed: `{}`", text.trim()))?;
        result.figures.set("cpu_seconds", Some(usage.cpu_seconds));
        result.figures.set("syscalls_per_message", syscalls);
    }
    say(&result)
}

/// Runs limits.c, and returns what it printed.
pub fn print(program: &Path, arguments: &str) -> Result<String> {
    let mut limits = Command::new(program);
    limits.args(arguments.split(' ')).stdin(Stdio::null()).stderr(Stdio::inherit());
    ends_with_this(&mut limits);
    let done = limits.output().with_context(|| format!("starting {}", program.display()))?;
    ensure!(done.status.success(), "limits.c ended with {}", done.status);
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{parameters::SizeRange, plan::tests::job_of};

    #[test]
    fn a_stream_has_the_window_of_the_target_or_pelton_s() {
        for (system, window) in [("limits", "131072"), ("limits-window", "262144")] {
            let (system, workload) = (system.to_string(), "stream".to_string());
            let roles = &[Role::Receiver, Role::Sender];
            let job = Job { system, workload, sizes: SizeRange::fixed(256), ..job_of(roles, Vec::new()) };
            let job = Job { capacity: 64 << 20, ..job };
            assert_eq!(arguments(&job, 5_000_000).unwrap(), format!("stream 256 5000000 67108864 {window}"));
        }
        // Read from pelton's source: this program does not depend on that crate.
        let layout = include_str!("../../../crates/pelton-lane/src/layout.rs");
        assert!(layout.contains("pub const WINDOW: u64 = 256 * 1024;"), "pelton's window has changed");
        assert_eq!(PELTON_WINDOW, 256 * 1024);
    }
}
