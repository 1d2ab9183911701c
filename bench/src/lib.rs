//! The benchmark's library. The program is `main.rs`; the systems of `peers/` are separate programs that also link it.
//!
//! Each file uses only files named before it:
//! - `parameters.rs`, `measure.rs`, `compiled.rs`, `statistics.rs`, `quota.rs`: words and jobs, clocks and counters.
//! - `side.rs`, `payload.rs`, `endpoints.rs`: what every measured process has.
//! - `sides.rs` starts these processes, `record.rs` computes the figures of their reports.
//! - `plan.rs`: what workloads and systems consist of; `run.rs` makes the runs, `report.rs` and `results.rs` show them.
//! - `workloads/`, a file for each, and `systems/`, the table of systems and their code.
//! - `commands.rs`: the command line; `figures.rs`, `file.rs`: commands of their own.

pub mod commands;
pub mod compiled;
pub mod endpoints;
pub mod figures;
pub mod file;
pub mod measure;
pub mod parameters;
pub mod payload;
pub mod plan;
pub mod quota;
pub mod record;
pub mod report;
pub mod results;
pub mod run;
pub mod side;
pub mod sides;
pub mod statistics;
pub mod systems;
pub mod workloads;
