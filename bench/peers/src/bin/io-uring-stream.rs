//! A Unix stream socket by io_uring, beside `sock-stream-batched`, which does the same by plain system calls: a
//! message is its length in four bytes and its payload, and both sides have 64 KiB of buffer. The sender fills one
//! buffer while the kernel sends the other; the receiver has eight, into which one multishot request receives. See
//! `uring.rs`.

use std::{iter::once, process::ExitCode};

use anyhow::{Result, ensure};
use pelton_bench::{
    endpoints::{Receiving, Sending, Transport},
    parameters::Job,
    systems::socket::connected,
};
use pelton_bench_peers::{
    processes,
    uring::{Halves, Shared, open},
};
use rustix::net::SocketType;

fn main() -> ExitCode {
    processes::<Stream>()
}

struct Stream;

const BATCH_BYTES: usize = 64 << 10;
const PREFIX_BYTES: usize = 4;
const BUFFERS: u16 = 8;

impl Transport for Stream {
    type Sending = Writer;
    type Receiving = Reader;

    fn both(job: &Job) -> Result<(Writer, Reader)> {
        let socket = open(job, connected(job, SocketType::STREAM)?, BUFFERS, BATCH_BYTES)?;
        let size_max = job.sizes.max as usize;
        let reader = Reader { socket: socket.clone(), current: None, parts: Vec::new(), size_max };
        Ok((Writer(Halves::new(socket, BATCH_BYTES, job)), reader))
    }
}

struct Writer(Halves);

impl Sending for Writer {
    #[inline]
    fn send(&mut self, payload: &[u8]) -> Result<()> {
        let held = self.0.held().len();
        if held > 0 && held + PREFIX_BYTES + payload.len() > BATCH_BYTES {
            self.0.pass_on(once(held))?;
        }
        let held = self.0.held();
        held.extend_from_slice(&(payload.len() as u32).to_le_bytes());
        held.extend_from_slice(payload);
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        let held = self.0.held().len();
        self.0.flush(once(held))
    }

    fn settle(&mut self) -> Result<()> {
        self.0.settle()
    }
}

struct Reader {
    socket: Shared,
    /// The current buffer, its bytes, and how many of them have been read
    current: Option<(u16, usize, usize)>,
    /// A message that is split over several buffers
    parts: Vec<u8>,
    size_max: usize,
}

impl Reader {
    fn size(&self, prefix: &[u8]) -> Result<usize> {
        let size = u32::from_le_bytes(prefix[..PREFIX_BYTES].try_into()?) as usize;
        ensure!(size <= self.size_max, "a message says that it has {size} bytes, wanted at most {}", self.size_max);
        Ok(size)
    }
}

impl Receiving for Reader {
    #[inline]
    fn receive<R>(&mut self, look: impl FnOnce(&[u8]) -> R) -> Result<R> {
        self.parts.clear();
        loop {
            let (buffer, bytes, read) = match self.current {
                Some(current) => current,
                None => {
                    let (buffer, bytes) = self.socket.borrow_mut().receive()?;
                    (buffer, bytes, 0)
                }
            };
            let there = self.socket.borrow().bytes(buffer, bytes);
            // SAFETY: the code below gives the buffer back after this use; its memory is the socket's, which stays
            // alive.
            let there = &unsafe { &*there }[read..];
            if self.parts.is_empty() && there.len() >= PREFIX_BYTES {
                let end = PREFIX_BYTES + self.size(there)?;
                if there.len() >= end {
                    let answer = look(&there[PREFIX_BYTES..end]);
                    self.current = Some((buffer, bytes, read + end));
                    return Ok(answer);
                }
            }
            // The rest is in the buffers that follow.
            let whole =
                if self.parts.len() >= PREFIX_BYTES { PREFIX_BYTES + self.size(&self.parts)? } else { PREFIX_BYTES };
            let taken = there.len().min(whole.saturating_sub(self.parts.len()));
            self.parts.extend_from_slice(&there[..taken]);
            self.current = Some((buffer, bytes, read + taken));
            if read + taken == bytes {
                self.socket.borrow_mut().give_back(buffer);
                self.current = None;
            }
            if self.parts.len() >= PREFIX_BYTES && self.parts.len() == PREFIX_BYTES + self.size(&self.parts)? {
                return Ok(look(&self.parts[PREFIX_BYTES..]));
            }
        }
    }
}
