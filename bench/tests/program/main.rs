//! The program, from outside: its reports, its page, its interrupts, and the systems that are built for it.

mod command;
mod interrupts;
mod page;
mod peers;
mod reports;
