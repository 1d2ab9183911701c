//! The tool as a child process: what each command does, in directories of the test.

mod arguments;
mod call;
mod cat;
mod conform;
mod cp;
mod deploy;
mod flush;
mod metrics;
mod observed;
mod path;
mod ping;
mod pub_sub;
mod record;
mod refused;
mod roles;
mod run;
mod send_recv;
mod tail;
mod terminal;

/// The tool in directories of one test.
fn test_dirs() -> pelton_testkit::ProgramDirs {
    pelton_testkit::ProgramDirs::new(env!("CARGO_BIN_EXE_pelton"))
}
