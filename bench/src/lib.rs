//! What the benchmark is made of; the program is `main.rs`, and the systems of `rivals/` are programs of their own that use this too.
//!
//! `run.rs` makes the runs, by the processes of `sides.rs`, and `run_figures.rs` figures of what they say; `side.rs` is how such a process begins, `workload.rs`
//! what it does (`fan_in.rs` where there are many, `append.rs` and `threads.rs` where it is threads, `batches.rs` where messages go together, `call.rs` where they are answered, `memory.rs`, `kill.rs`
//! and `reattach.rs`, which have runs of their own), `systems/` what it does it with, `measure.rs` what it can say of itself, `report.rs` what comes out.

mod append;
pub mod batches;
mod call;
mod fan_in;
pub mod figures;
pub mod file;
pub mod kill;
mod mailbox;
pub mod measure;
mod memory;
pub mod parameters;
mod reattach;
pub mod record;
pub mod report;
pub mod rivals;
pub mod run;
mod run_figures;
pub mod side;
pub mod sides;
pub mod systems;
pub mod threads;
pub mod workload;
