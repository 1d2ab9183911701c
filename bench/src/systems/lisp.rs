//! pelton by a program in SBCL, and its alternatives there: bindings/lisp/bench/side.lisp, which replaces this process
//! and reports as any other side does. System calls are not counted there.

use std::{os::unix::process::CommandExt, process::Command};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    compiled,
    parameters::{Job, Kind, Role, Wait, word},
    workloads::append::checked,
};

const SIDE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../bindings/lisp/bench/side.lisp");

/// The output of `sbcl --version`.
pub fn version() -> String {
    let said = Command::new("sbcl").arg("--version").output();
    said.map_or("no sbcl".to_string(), |said| String::from_utf8_lossy(&said.stdout).trim().to_string())
}

/// This side's part, all of it: returns only if SBCL cannot start.
pub fn part(job: &Job) -> Result<()> {
    ensure!(
        job.sizes.is_fixed() && job.sizes.max >= 8 && job.sizes.max.is_multiple_of(8),
        "a side in Lisp has messages of one size, of whole words of 8 bytes, found {}",
        job.sizes
    );
    let size = job.sizes.max.to_string();
    ensure!(matches!(job.wait, Wait::Spin | Wait::Block), "a side in Lisp does not wait by {}", word(job.wait));
    let mut arguments = match (job.kind, job.role) {
        (Kind::Append, _) => {
            vec!["append".to_string(), job.system.clone(), job.threads.to_string(), size, checked(job).to_string()]
        }
        (Kind::Processes, Role::Sender | Role::Receiver) => {
            let name = format!("unix:{}", job.directory.join("there").display());
            vec![word(job.role), name, word(job.wait), job.capacity.to_string(), size]
        }
        _ => bail!("a side in Lisp appends, or has a stream"),
    };
    arguments.extend(job.passes.iter().map(|pass| pass.count.to_string()));
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
