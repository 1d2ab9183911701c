//! ipmpsc: a ring in a file for many senders and one receiver, with a lock and a condition variable in it.
//!
//! As its README recommends for bandwidth and latency: `serde_bytes`, which copies the bytes in as they are, and
//! `zero_copy_context` at the receiver, which reads in place and then copies out as in every system here (except for
//! random sizes, which are read in place). The file is in /dev/shm, in the run's own directory; a ring's size has 32
//! bits. It always blocks: its calls sleep by the condition variable (`--wait block`). `--wait spin` polls `try_recv`,
//! and still sends by the only call there is.
//!
//! It uses all of its ring in turn, which is of 16 MiB, the best of the tested sizes (messages of 256 bytes, one way,
//! on two busy processors, medians of 3 to 8 runs): 512 KiB 0.8 M/s, 1 MiB 0.5, 4 MiB 1.0, 16 MiB 1.3, 64 MiB 0.8.

use std::process::ExitCode;

use anyhow::{Context, Result};
use ipmpsc::{Receiver, Sender, SharedRingBuffer};
use pelton_bench::{
    endpoints::{Receiving, Sending, Transport},
    parameters::Job,
};
use pelton_bench_peers::{open_when_there, processes, ring_bytes, spins};
use serde_bytes::Bytes;

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
        spins(job)?;
        let place = job.directory.join(direction);
        let path = place.to_str().context("a path that is not UTF-8")?;
        let ring = open_when_there("the ring", || SharedRingBuffer::open(path))?;
        Ok(Writer(Sender::new(ring)))
    }

    /// The receiver creates it under a temporary name, so that the sender never opens half of it.
    fn receiving(job: &Job, direction: &str) -> Result<Reader> {
        let bytes =
            u32::try_from(ring_bytes(job, RING)).context("its ring's size has 32 bits: give a smaller --capacity")?;
        let (place, temporary) = (job.directory.join(direction), job.directory.join(format!("{direction}-temporary")));
        let path = temporary.to_str().context("a path that is not UTF-8")?;
        let ring = SharedRingBuffer::create(path, bytes).context("making the ring")?;
        std::fs::rename(&temporary, &place)?;
        Ok(Reader {
            receiver: Receiver::new(ring),
            spins: spins(job)?,
            buffer: (!job.in_place()).then(|| Vec::with_capacity(job.sizes.max as usize)),
        })
    }
}

struct Writer(Sender);

impl Sending for Writer {
    #[inline]
    fn send(&mut self, payload: &[u8]) -> Result<()> {
        self.0.send(&Bytes::new(payload)).context("sending")
    }
}

struct Reader {
    receiver: Receiver,
    spins: bool,
    buffer: Option<Vec<u8>>,
}

impl Receiving for Reader {
    #[inline]
    fn receive<R>(&mut self, look: impl FnOnce(&[u8]) -> R) -> Result<R> {
        loop {
            let mut context = self.receiver.zero_copy_context();
            let message: Option<&Bytes> = if self.spins {
                context.try_recv().context("receiving")?
            } else {
                Some(context.recv().context("receiving")?)
            };
            let Some(message) = message else {
                std::hint::spin_loop();
                continue;
            };
            return Ok(match &mut self.buffer {
                Some(buffer) => {
                    buffer.clear();
                    buffer.extend_from_slice(message);
                    drop(context);
                    look(buffer)
                }
                None => look(message),
            });
        }
    }
}
