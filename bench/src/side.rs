//! One process of a run: how it starts, in every program.

use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::{parameters::Job, workload};

/// The first argument of such a process; the second is its [`Job`], as JSON.
pub const SIDE: &str = "side";

/// If this process was started as a side, does its job with `part` and returns its exit code.
pub fn run_if_side(part: impl FnOnce(&Job) -> Result<()>) -> Option<ExitCode> {
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() != Some(SIDE) {
        return None;
    }
    // The process that started this one reports the text, under this side's role.
    Some(match begin(arguments.next().as_deref()).and_then(|job| part(&job)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    })
}

/// The parts that this program itself has.
pub fn any(job: &Job) -> Result<()> {
    workload::side(job)
}

fn begin(job: Option<&str>) -> Result<Job> {
    let job: Job = serde_json::from_str(job.context("a side needs a job: it is started by pelton-bench itself")?)
        .context("reading the job")?;
    if let Some(cpu) = job.cpu {
        pin(cpu)?;
    }
    std::panic::set_hook(Box::new(|info| eprintln!("{info}")));
    Ok(job)
}

/// Pins the calling thread to that CPU.
pub fn pin(cpu: usize) -> Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).with_context(|| format!("pinning to CPU {cpu}"))
}
