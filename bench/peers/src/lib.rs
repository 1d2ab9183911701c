//! The common part of the programs of this package. Each program is a system of `pelton-bench`, or some that are used
//! alike, with the reasons for its settings at its head.

#[cfg(any(feature = "io-uring-stream", feature = "io-uring-seqpacket"))]
pub mod uring;

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow, bail};
use pelton_bench::{
    endpoints::Transport,
    parameters::{Job, Wait},
    side, workloads,
};

/// The program of a system of two processes.
pub fn processes<T: Transport>() -> ExitCode {
    program(workloads::part::<T>)
}

/// The program of a system with this part.
pub fn program(part: impl FnOnce(&Job) -> Result<()>) -> ExitCode {
    side::run_if_side(part).unwrap_or_else(|| {
        eprintln!("this is a side of pelton-bench, which starts it: `./run bench WORKLOAD --systems pelton,…`");
        ExitCode::from(2)
    })
}

/// Bytes of messages that a channel or a ring between threads holds at most: they fit the second-level cache.
pub const HELD: u64 = 128 << 10;

/// The default of `--capacity`.
const CAPACITY: u64 = 64 << 20;

/// The bytes of a ring that uses all of its memory in turn: `best`, explained at the head of each system, or the value
/// of `--capacity`. 64 MiB fit in no cache, and a short stream would touch each page for the first time. A ring that
/// must hold a backlog is as large as pelton's lane.
pub fn ring_bytes(job: &Job, best: u64) -> u64 {
    let flows = matches!(job.workload.as_str(), "stream" | "roundtrip" | "threads");
    if flows && job.capacity == CAPACITY {
        // In any case several of the largest messages.
        best.max((16 * u64::from(job.sizes.max)).next_power_of_two())
    } else {
        job.capacity
    }
}

/// Whether a side busy-polls; else it sleeps in its calls. It has no event loop of its own here.
pub fn spins(job: &Job) -> Result<bool> {
    match job.wait {
        Wait::Spin => Ok(true),
        Wait::Block => Ok(false),
        Wait::Epoll | Wait::Uv | Wait::UvBulk => {
            bail!("it is not measured with an event loop of one's own here: write spin or block")
        }
    }
}

/// How long the sides wait for each other.
const RENDEZVOUS_TIMEOUT: Duration = Duration::from_secs(20);

/// Repeats `open` until the other side has created the file, or the deadline passes.
pub fn open_when_there<T, E: std::fmt::Display>(what: &str, mut open: impl FnMut() -> Result<T, E>) -> Result<T> {
    let until = Instant::now() + RENDEZVOUS_TIMEOUT;
    loop {
        match open() {
            Ok(value) => return Ok(value),
            Err(error) if Instant::now() > until => return Err(anyhow!("opening {what}: {error}")),
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// Compiles systems that carry values, not bytes, for these sizes: the value is an array of so many bytes, and `$part`
/// gets its size first.
#[macro_export]
macro_rules! with_size {
    ($job:expr, $part:ident) => {
        match ($job.sizes.min, $job.sizes.max) {
            (16, 16) => $part::<16>($job),
            (64, 64) => $part::<64>($job),
            (256, 256) => $part::<256>($job),
            (1024, 1024) => $part::<1024>($job),
            (4096, 4096) => $part::<4096>($job),
            (65536, 65536) => $part::<65536>($job),
            _ => anyhow::bail!(
                "it carries values of one size, compiled for 16, 64, 256, 1024, 4096 and 65536 bytes, wanted {}",
                $job.sizes
            ),
        }
    };
}
