//! One process of a run: how it begins, whatever program it is.

use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::{parameters::Job, workload};

/// The first argument of such a process; the second is its [`Job`], as JSON.
pub const SIDE: &str = "side";

/// Does the job of this process with `part` if it was started as a side, and answers how it is to end.
pub fn if_asked(part: impl FnOnce(&Job) -> Result<()>) -> Option<ExitCode> {
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() != Some(SIDE) {
        return None;
    }
    // What it says of a failure is passed on, under its role, by the process that started it.
    Some(match begin(arguments.next().as_deref()).and_then(|job| part(&job)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    })
}

/// What this program itself knows.
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

/// Keeps the calling thread on that CPU.
pub fn pin(cpu: usize) -> Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).with_context(|| format!("pinning to CPU {cpu}"))
}
