//! The systems that threads of one process append messages to. Each makes records of them, one behind the other in a
//! buffer of 1 MiB, and hands full buffers to a [`Sink`].

mod bump;
mod file;
mod mutex_vec;
mod pelton;
mod queues;

use std::{hint, sync::Arc, thread};

use anyhow::Result;

pub use self::{
    bump::Bump,
    file::{PeltonFile, Write},
    mutex_vec::MutexVec,
    pelton::Pelton,
    queues::Queue,
};
use crate::parameters::Job;

/// Bytes of a buffer.
pub const BUFFER: usize = 1 << 20;

/// A header's bytes.
pub const HEADER: usize = 8;

/// The header before a payload, as in pelton's lanes and in limits.c.
#[inline]
pub fn header(number: u32, len: usize) -> u64 {
    (number as u64) << 32 | len as u64
}

/// Bytes of the record of a message of `len` bytes: records begin at multiples of eight.
#[inline]
pub const fn record_bytes(len: usize) -> usize {
    HEADER + len.next_multiple_of(8)
}

/// Consumes buffers, one at a time; afterwards the system may reuse the space. Systems call it as `dyn`, as they would
/// a user's callback.
pub trait Sink: Send + Sync {
    /// So many records, back to back.
    fn take(&self, records: &[u8], messages: u64);
}

/// One thread's endpoint.
pub trait Appender: Send {
    /// Appends; waits when there is no room. `number` counts the thread's messages.
    fn append(&mut self, number: u32, payload: &[u8]) -> Result<()>;
}

/// A task for any thread.
pub type Task = Box<dyn FnOnce() -> Result<()> + Send>;

/// An opened system.
pub struct Opened<A> {
    /// One for each thread, which drops it when it has appended all
    pub appenders: Vec<A>,
    /// For a thread beside the others; ends when it has passed all messages on
    pub consumer: Option<Task>,
    /// After the end of all threads: passes the rest on
    pub finish: Option<Task>,
    /// With a file: passes its content to the sink, and removes it. Not measured
    pub read_back: Option<Task>,
}

/// A system that threads append to.
pub trait AppendSystem {
    /// One thread's endpoint
    type Appender: Appender;

    /// Opens it, for `job.threads` threads that append `count` messages each.
    fn open(job: &Job, count: u64, sink: Arc<dyn Sink>) -> Result<Opened<Self::Appender>>;
}

/// Backoff of a thread that waits for another: it polls some times, and then yields the CPU, of which there may be
/// fewer than threads.
#[derive(Default)]
struct Backoff(u32);

impl Backoff {
    fn wait(&mut self) {
        if self.0 < 64 {
            self.0 += 1;
            hint::spin_loop();
        } else {
            thread::yield_now();
        }
    }
}

/// Aligned to two cache lines of its own, because processors prefetch pairs.
#[repr(align(128))]
#[derive(Default)]
struct Apart<T>(T);
