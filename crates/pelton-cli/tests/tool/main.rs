//! The tool as a child process: what each command does, in directories of the test.

mod arguments;
mod call;
mod cat;
mod conform;
mod cp;
mod demo;
mod flush;
mod path;
mod refused;
mod roles;
mod send_recv;
mod terminal;
mod test_dirs;
mod torture;
