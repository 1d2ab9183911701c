//! `pelton bridge`: executes `pelton-bridge`, which has NATS and TLS in it and is a package of its own.

use crate::failure::Failure;
use clap::Args;
use std::{env, ffi::OsString, os::unix::process::CommandExt as _, path::PathBuf, process::Command};

const PROGRAM: &str = "pelton-bridge";

/// Options of `pelton bridge`: those of `pelton-bridge`.
#[derive(Args)]
pub struct BridgeArgs {
    /// Arguments of pelton-bridge: `pelton bridge --help` lists them
    #[arg(value_name = "ARGUMENT", trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

/// Runs `pelton bridge`. Returns only if it fails.
pub fn run(args: &BridgeArgs) -> Result<(), Failure> {
    let program = find().ok_or_else(|| {
        Failure::System(format!(
            "there is no `{PROGRAM}` beside this program or on the PATH: install it, it is a package of its own"
        ))
    })?;
    let error = Command::new(&program).args(&args.arguments).exec();
    Err(Failure::system(format!("executing {}", program.display()), error))
}

/// The program beside this one, or else on the PATH.
fn find() -> Option<PathBuf> {
    let beside = env::current_exe().ok().and_then(|own| Some(own.parent()?.to_owned()));
    let path = env::var_os("PATH").unwrap_or_default();
    let directories = beside.into_iter().chain(env::split_paths(&path));
    directories.map(|directory| directory.join(PROGRAM)).find(|program| program.is_file())
}
