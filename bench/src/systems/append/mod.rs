//! The systems that threads of one process append messages to. Each makes records of them, one behind the other in a
//! buffer of 1 MiB, and hands full buffers to a [`Sink`].

pub mod bump;
pub mod file;
pub mod mutex_vec;
pub mod pelton;
pub mod queues;

use std::{hint, thread};

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
