//! Sleeping and waking: `race.rs` counts lost wake-ups, `fences.rs` runs without membarrier, and `sides.rs` has the
//! code of both sides. A small separate binary: `./run verify races` also runs it optimised, and `verify/mutants/run`
//! builds it for each seeded mistake.

mod fences;
mod race;
mod sides;
#[path = "../support/mod.rs"]
mod support;
