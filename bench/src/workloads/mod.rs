//! The workloads. Each is a file: its options, its passes, its figures, and the loops of its sides. Those between two
//! processes are generic over the [`Transport`]; the other files also have the traits that a system implements for
//! them.

pub mod append;
pub mod batches;
pub mod broadcast;
pub mod burst;
pub mod call;
pub mod fan_in;
pub mod idle;
pub mod kill;
pub mod lopsided;
pub mod memory;
pub mod reattach;
pub mod roundtrip;
pub mod stream;
pub mod threads;

use anyhow::Result;

use crate::{
    endpoints::Transport,
    parameters::Job,
    plan::{Options, Workload, workload},
};

/// All of them, in the order of the help.
pub static WORKLOADS: &[Workload] = &[
    workload::<stream::Stream>(),
    workload::<roundtrip::Roundtrip>(),
    workload::<burst::Burst>(),
    workload::<lopsided::Lopsided>(),
    workload::<threads::Threads>(),
    workload::<fan_in::FanIn>(),
    workload::<broadcast::Broadcast>(),
    workload::<call::Call>(),
    workload::<append::Append>(),
    workload::<memory::Memory>(),
    workload::<kill::Kill>(),
    workload::<idle::Idle>(),
    workload::<reattach::Reattach>(),
];

/// One side's part in a workload between two processes. Those that are not here have the loops of a stream.
pub fn part<T: Transport>(job: &Job) -> Result<()> {
    match job.workload.as_str() {
        roundtrip::Roundtrip::NAME | burst::Burst::NAME => roundtrip::part::<T>(job),
        memory::Memory::NAME => memory::part::<T>(job),
        kill::Kill::NAME => kill::part::<T>(job),
        broadcast::Broadcast::NAME => broadcast::part::<T>(job),
        _ => stream::part::<T>(job),
    }
}
