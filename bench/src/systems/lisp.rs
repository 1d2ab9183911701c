//! pelton by a program in SBCL, and its alternatives there: lisp/side.lisp, which replaces this process and reports as
//! any other side does. System calls are not counted there.

use std::{
    os::unix::process::CommandExt,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    compiled,
    parameters::{Job, Kind, Role, Wait, word},
    side::work,
    workloads::append::checked,
};

const SIDE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/lisp/side.lisp");

/// The output of `sbcl --version`.
pub fn version() -> String {
    let said = Command::new("sbcl").arg("--version").output();
    said.map_or("no sbcl".to_string(), |said| String::from_utf8_lossy(&said.stdout).trim().to_string())
}

/// This side's part, all of it: returns only if SBCL cannot start.
pub fn part(job: &Job) -> Result<()> {
    ensure!(job.sizes.is_fixed() && job.sizes.max >= 8, "a side in Lisp has messages of one size, of 8 bytes or more");
    ensure!(
        job.sizes.max.is_multiple_of(8),
        "a side in Lisp has messages of whole words, found {} bytes",
        job.sizes.max
    );
    let size = job.sizes.max.to_string();
    let wait = match job.wait {
        Wait::Spin => "spin",
        Wait::Block => "block",
        other => bail!("a side in Lisp does not wait by {}", word(other)),
    };
    let mut arguments = match (job.kind, job.role) {
        (Kind::Append, _) => vec![
            "append".to_string(),
            job.system.clone(),
            job.threads.to_string(),
            size,
            work_ns(job.work_steps()).to_string(),
            checked(job).to_string(),
        ],
        (Kind::Processes, Role::Sender | Role::Receiver) => {
            let role = if job.role == Role::Sender { "sender" } else { "receiver" };
            let name = format!("unix:{}", job.directory.join("there").display());
            vec![role.to_string(), name, wait.to_string(), job.capacity.to_string(), size]
        }
        _ => bail!("a side in Lisp appends, or has a stream"),
    };
    arguments.extend(job.passes.iter().map(|pass| format!("{}{}", if pass.alone { "alone:" } else { "" }, pass.count)));
    let library = compiled::directory()?.join("libpelton_capi.so");
    ensure!(
        library.exists(),
        "{} is not there: `cargo build -p pelton-capi`, in the profile of this program",
        library.display()
    );
    let mut sbcl = Command::new("sbcl");
    sbcl.arg("--script").arg(SIDE).args(arguments).env("PELTON_LIBRARY", library);
    // Other installed systems are ignored.
    sbcl.env("CL_SOURCE_REGISTRY", "(:source-registry :ignore-inherited-configuration)");
    let error = sbcl.exec();
    Err(error).context("starting `sbcl`: on Debian it is in the package sbcl")
}

/// How long that work takes, without the clock reads. This program's compiler makes fewer multiplications of its steps
/// than SBCL, which counts its own. No work is exactly 0: a message takes less than a clock read.
fn work_ns(steps: u64) -> u128 {
    let once = |steps| {
        let start = Instant::now();
        work(steps);
        start.elapsed()
    };
    // The least of many: other load only makes it longer.
    let least = |steps| (0..1000).map(|_| once(steps)).min().unwrap_or(Duration::ZERO);
    if steps == 0 { 0 } else { least(steps).saturating_sub(least(0)).as_nanos() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_work_takes_no_time_and_much_takes_some() {
        assert_eq!(work_ns(0), 0);
        assert!(work_ns(10_000) > 0);
    }
}
