//! rtrb: a ring between two threads, wait-free, one message a call.
//!
//! Its calls never wait: `push` and `pop` are called again while they answer that the ring is full or empty, as its documentation shows. Messages
//! are arrays, moved in and out. The ring is of 128 KiB, or of `--capacity`: see `channels.rs`.

use std::process::ExitCode;

use anyhow::Result;
use pelton_bench::{
    parameters::Job,
    systems::{Receiving, Sending},
    threads::{InProcess, one_by_one},
};
use pelton_bench_rivals::{channels::HELD, program, ring_bytes, with_size};

fn main() -> ExitCode {
    program(|job| with_size!(job, run))
}

fn run<const SIZE: usize>(job: &Job) -> Result<()> {
    one_by_one::<Rtrb<SIZE>>(job)
}

struct Rtrb<const SIZE: usize>;

impl<const SIZE: usize> InProcess for Rtrb<SIZE> {
    type Sending = Producer<SIZE>;
    type Receiving = Consumer<SIZE>;

    fn pair(job: &Job) -> Result<(Producer<SIZE>, Consumer<SIZE>)> {
        let (producer, consumer) = rtrb::RingBuffer::new(ring_bytes(job, HELD) as usize / SIZE);
        Ok((Producer(producer), Consumer(consumer)))
    }
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
