//! The tool, from outside: what each command does, in directories of the test's own.

mod arguments;
mod call;
mod cat;
mod cp;
mod demo;
mod flush;
mod path;
mod place;
mod refused;
mod send_recv;
mod terminal;
mod torture;
