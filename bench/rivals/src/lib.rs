//! What the programs of this package share. Each program is one system of `pelton-bench`, with the reasons for its settings at its head.

pub mod channels;
#[cfg(any(feature = "io-uring-stream", feature = "io-uring-seqpacket"))]
pub mod uring;

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow, bail};
use pelton_bench::{
    parameters::{Job, Wait, Workload},
    side,
    systems::System,
    workload,
};

/// The program of a system of two processes.
pub fn processes<S: System>() -> ExitCode {
    program(workload::part::<S>)
}

/// The program of a system whose part is this.
pub fn program(part: impl FnOnce(&Job) -> Result<()>) -> ExitCode {
    side::if_asked(part).unwrap_or_else(|| {
        eprintln!("this is a side of pelton-bench, which starts it: `./run bench WORKLOAD --systems pelton,…`");
        ExitCode::from(2)
    })
}

/// What `--capacity` is where nobody has said anything.
const CAPACITY: u64 = 64 << 20;

/// The bytes of a ring that goes round all of its memory: `best`, which each system's head gives the reason for, or what `--capacity` says. 64
/// MiB would be of no cache, and a short stream would meet each page for the first time. What is to hold a backlog is as large as pelton's lane.
pub fn ring_bytes(job: &Job, best: u64) -> u64 {
    let flows = matches!(job.workload, Workload::Stream | Workload::Roundtrip | Workload::Threads);
    if flows && job.capacity == CAPACITY {
        // Several of the largest messages, in any case.
        best.max((16 * u64::from(job.sizes.max)).next_power_of_two())
    } else {
        job.capacity
    }
}

/// Whether a side looks again and again; else it sleeps in its calls. It does not have an event loop of its own here.
pub fn spins(job: &Job) -> Result<bool> {
    match job.wait {
        Wait::Spin => Ok(true),
        Wait::Block => Ok(false),
        Wait::Epoll | Wait::Uv => bail!("it is not measured with an event loop of one's own here: write spin or block"),
    }
}

/// How long the sides wait for each other.
const MEET: Duration = Duration::from_secs(20);

/// Tries until it succeeds, as who opens what the other side is about to make has to.
pub fn until_there<T, E: std::fmt::Display>(what: &str, mut open: impl FnMut() -> Result<T, E>) -> Result<T> {
    let until = Instant::now() + MEET;
    loop {
        match open() {
            Ok(value) => return Ok(value),
            Err(error) if Instant::now() > until => return Err(anyhow!("opening {what}: {error}")),
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// Sizes that systems which carry values, not bytes, are compiled for: an array of that many bytes is the value, and `$part` is given its size first.
#[macro_export]
macro_rules! with_size {
    ($job:expr, $part:ident $(, $what:ty)?) => {
        match ($job.sizes.min, $job.sizes.max) {
            (16, 16) => $part::<16 $(, $what)?>($job),
            (64, 64) => $part::<64 $(, $what)?>($job),
            (256, 256) => $part::<256 $(, $what)?>($job),
            (1024, 1024) => $part::<1024 $(, $what)?>($job),
            (4096, 4096) => $part::<4096 $(, $what)?>($job),
            (65536, 65536) => $part::<65536 $(, $what)?>($job),
            _ => anyhow::bail!(
                "it carries values of one size, and was compiled for 16, 64, 256, 1024, 4096 and 65536 bytes, wanted {}",
                $job.sizes
            ),
        }
    };
}
