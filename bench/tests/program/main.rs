//! The program, from outside: its reports, its page, its ends, and the systems that are built for it.

mod command;
mod ends;
mod page;
mod reports;
mod rivals;
mod workloads;
