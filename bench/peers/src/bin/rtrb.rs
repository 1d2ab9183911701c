//! rtrb: a wait-free ring between two threads; one message a call, or by chunks: 64 messages written in place by one
//! chunk, and as many as there are read in place by one.
//!
//! Its calls never wait: the loop polls `push` and `pop` while the ring is full or empty, as its documentation shows.
//! Messages are arrays, moved in and out. Chunks are its recommendation for the best throughput: `write_chunk_uninit`
//! and `read_chunk`, one store to the index for each. The ring is of 128 KiB, or of `--capacity`: see `HELD`.

use std::process::ExitCode;

use anyhow::Result;
use pelton_bench::{
    endpoints::{Receiving, Sending},
    parameters::Job,
    workloads::{
        batches::{ReceivingBatches, SendingBatches},
        threads::{batches, one_by_one},
    },
};
use pelton_bench_peers::{HELD, program, ring_bytes, with_size};

fn main() -> ExitCode {
    program(|job| with_size!(job, run))
}

fn run<const SIZE: usize>(job: &Job) -> Result<()> {
    let (producer, consumer) = rtrb::RingBuffer::<[u8; SIZE]>::new(ring_bytes(job, HELD) as usize / SIZE);
    let endpoints = (Producer(producer), Consumer(consumer));
    if job.system == "rtrb-chunks" { batches(job, endpoints) } else { one_by_one(job, endpoints) }
}

struct Producer<const SIZE: usize>(rtrb::Producer<[u8; SIZE]>);

impl<const SIZE: usize> Sending for Producer<SIZE> {
    #[inline(always)]
    fn send(&mut self, payload: &[u8]) -> Result<()> {
        let mut message: [u8; SIZE] = payload.try_into()?;
        while let Err(rtrb::PushError::Full(back)) = self.0.push(message) {
            message = back;
            std::hint::spin_loop();
        }
        Ok(())
    }
}

impl<const SIZE: usize> SendingBatches for Producer<SIZE> {
    #[inline(always)]
    fn send_batch(&mut self, most: usize, mut write: impl FnMut(usize, &mut [u8])) -> Result<usize> {
        loop {
            // A whole batch, if the ring can hold it; otherwise the ring's end would make all later chunks small.
            if let Ok(mut chunk) = self.0.write_chunk_uninit(most) {
                let (first, second) = chunk.as_mut_slices();
                for (index, slot) in first.iter_mut().chain(second).enumerate() {
                    // SAFETY: an array of bytes may have any bytes, and `write` writes all of them before they are
                    // read.
                    write(index, unsafe { &mut *slot.as_mut_ptr() });
                }
                // SAFETY: all of them have been written.
                unsafe { chunk.commit_all() };
                return Ok(most);
            }
            std::hint::spin_loop();
        }
    }
}

struct Consumer<const SIZE: usize>(rtrb::Consumer<[u8; SIZE]>);

impl<const SIZE: usize> Receiving for Consumer<SIZE> {
    #[inline(always)]
    fn receive<R>(&mut self, look: impl FnOnce(&[u8]) -> R) -> Result<R> {
        loop {
            if let Ok(message) = self.0.pop() {
                return Ok(look(&message));
            }
            std::hint::spin_loop();
        }
    }
}

impl<const SIZE: usize> ReceivingBatches for Consumer<SIZE> {
    #[inline(always)]
    fn receive_batch(&mut self, most: usize, mut look: impl FnMut(&[u8])) -> Result<usize> {
        loop {
            let there = self.0.slots().min(most);
            if there > 0 {
                let chunk = self.0.read_chunk(there)?;
                let (first, second) = chunk.as_slices();
                first.iter().chain(second).for_each(|message| look(message));
                chunk.commit_all();
                return Ok(there);
            }
            std::hint::spin_loop();
        }
    }
}
