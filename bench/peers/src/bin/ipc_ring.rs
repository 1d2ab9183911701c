//! ipc_ring: a ring in a file, one writer, one reader.
//!
//! As its README and its own benchmark recommend: the file in /dev/shm, in the run's own directory, of a power of two;
//! `try_push` first and `push` without a deadline when that finds the ring full, `pop` without a deadline (`--wait
//! block`, its best here, too: its own benchmark's loops). With `--wait spin` the loop polls `try_push` and `try_pop`.
//!
//! The writer creates the ring under a temporary name and renames it; the reader opens it. `RingReader::open` maps the
//! file's present size, which may be zero for an unfinished ring. Its next reads beyond that then end the process
//! (SIGSEGV: two threads of one program, one creating rings and the other opening them, end so within a second).
//!
//! It uses all of its ring in turn, which is of 16 MiB, the best of the tested sizes (messages of 256 bytes, one way,
//! on two busy processors, medians of 3 to 8 runs): 1 MiB 0.24 M/s, 4 MiB 0.30, 16 MiB 0.38, 64 MiB, as in its README,
//! 0.18.

use std::process::ExitCode;

use anyhow::{Result, anyhow, bail, ensure};
use ipc_ring::{IpcError, RingReader, RingWriter};
use pelton_bench::{
    endpoints::{Receiving, Sending, Transport},
    parameters::Job,
};
use pelton_bench_peers::{open_when_there, processes, ring_bytes, spins};

fn main() -> ExitCode {
    processes::<Ring>()
}

struct Ring;

/// Bytes of the ring, see above.
const RING: u64 = 16 << 20;

impl Transport for Ring {
    type Sending = Writer;
    type Receiving = Reader;

    fn sending(job: &Job, direction: &str) -> Result<Writer> {
        let capacity = usize::try_from(ring_bytes(job, RING))?;
        ensure!(capacity.is_power_of_two(), "found --capacity {capacity}, wanted a power of two");
        let place = job.directory.join(direction);
        let temporary = job.directory.join(format!("{direction}-temporary"));
        let writer = RingWriter::create(&temporary, capacity).map_err(|error| anyhow!("making the ring: {error}"))?;
        std::fs::rename(&temporary, &place)?;
        Ok(Writer { writer, spins: spins(job)?, size_max: job.sizes.max as usize })
    }

    fn receiving(job: &Job, direction: &str) -> Result<Reader> {
        ensure!(job.sizes.min > 0, "a message of no bytes is its mark for the end of the ring");
        let place = job.directory.join(direction);
        let reader = open_when_there("the ring", || RingReader::open(&place))?;
        Ok(Reader { reader, spins: spins(job)?, buffer: Vec::with_capacity(job.sizes.max as usize) })
    }
}

struct Writer {
    writer: RingWriter,
    spins: bool,
    size_max: usize,
}

impl Sending for Writer {
    #[inline]
    fn send(&mut self, payload: &[u8]) -> Result<()> {
        loop {
            match self.writer.try_push(payload) {
                Ok(()) => return Ok(()),
                Err(IpcError::Full) if self.spins => std::hint::spin_loop(),
                Err(IpcError::Full) => {
                    return self.writer.push(payload, None).map_err(|error| anyhow!("pushing: {error}"));
                }
                Err(error) => bail!("pushing up to {} bytes: {error}", self.size_max),
            }
        }
    }
}

struct Reader {
    reader: RingReader,
    spins: bool,
    buffer: Vec<u8>,
}

impl Receiving for Reader {
    #[inline]
    fn receive<R>(&mut self, look: impl FnOnce(&[u8]) -> R) -> Result<R> {
        if self.spins {
            while self.reader.try_pop(&mut self.buffer).map_err(|error| anyhow!("popping: {error}"))?.is_none() {
                std::hint::spin_loop();
            }
        } else {
            self.reader.pop(&mut self.buffer, None).map_err(|error| anyhow!("popping: {error}"))?;
        }
        Ok(look(&self.buffer))
    }
}
