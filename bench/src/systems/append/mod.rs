//! The systems that threads of one process append messages to. Each makes records of them, one behind the other in a buffer of 1 MiB,
//! and hands full buffers to a [`Sink`].

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

/// What stands before a payload, as in pelton's lanes and in limits.c.
#[inline]
pub fn header(number: u32, len: usize) -> u64 {
    (number as u64) << 32 | len as u64
}

/// Bytes that a message of `len` bytes occupies: records begin at multiples of eight.
#[inline]
pub const fn record_bytes(len: usize) -> usize {
    HEADER + len.next_multiple_of(8)
}

/// Takes buffers away, one at a time; the space is the system's again afterwards. Systems have it as `dyn`, as they would a user's
/// callback.
pub trait Sink: Send + Sync {
    /// So many records, back to back.
    fn take(&self, records: &[u8], messages: u64);
}

/// What one thread appends by.
pub trait Appender: Send {
    /// Appends; waits when there is no room. `number` counts the thread's messages.
    fn append(&mut self, number: u32, payload: &[u8]) -> Result<()>;
}

/// Something to be done, in whatever thread.
pub type Task = Box<dyn FnOnce() -> Result<()> + Send>;

/// A system, ready.
pub struct Opened<A> {
    /// One for each thread, which drops it when it has appended all
    pub appenders: Vec<A>,
    /// For a thread beside the others; ends when everything was handed on
    pub consumer: Option<Task>,
    /// When all threads have ended: hands on what is left
    pub finish: Option<Task>,
    /// Where it all went to a file: gives what is there to the sink, and removes it. Not measured
    pub read_back: Option<Task>,
}

/// What threads append to.
pub trait AppendSystem {
    /// One thread's
    type Appender: Appender;

    /// Makes it, for `job.threads` threads that append `count` messages each.
    fn open(job: &Job, count: u64, sink: Arc<dyn Sink>) -> Result<Opened<Self::Appender>>;
}

/// For who waits for another thread: looks some times, and then lets others have the CPU, of which there may be fewer than threads.
#[derive(Default)]
struct Patience(u32);

impl Patience {
    fn wait(&mut self) {
        if self.0 < 64 {
            self.0 += 1;
            hint::spin_loop();
        } else {
            thread::yield_now();
        }
    }
}

/// Each in cache lines of its own, two of them because processors fetch pairs.
#[repr(align(128))]
#[derive(Default)]
struct Apart<T>(T);
