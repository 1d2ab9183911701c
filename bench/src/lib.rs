//! The benchmark's library. The program is `main.rs`; the systems of `peers/` are separate programs that also link it.
//!
//! - `run.rs` makes the runs by the processes of `sides.rs`; `run_figures.rs` computes the figures from their reports.
//! - `side.rs` starts such a process, `workload.rs` has its part.
//! - `fan_in.rs`, `append.rs`, `threads.rs`, `batches.rs` and `call.rs` have the parts of other workloads.
//! - `quota.rs` limits their processor time by a control group.
//! - `memory.rs`, `kill.rs` and `reattach.rs` have runs of their own.
//! - `systems/` has the systems under measurement, `measure.rs` the clocks and counters, `report.rs` the output.

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
pub mod peers;
pub mod quota;
mod reattach;
pub mod report;
pub mod results;
pub mod run;
mod run_figures;
pub mod side;
pub mod sides;
pub mod systems;
pub mod threads;
pub mod workload;
