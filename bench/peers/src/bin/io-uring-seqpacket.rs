//! A Unix seqpacket socket by io_uring, beside `sock-seqpacket`, which makes a plain system call for each message. One
//! system call sends up to 64 messages, as linked requests in their order; one multishot request receives each in a
//! buffer of its own. See `uring.rs`.

use std::process::ExitCode;

use anyhow::Result;
use pelton_bench::{
    endpoints::{Receiving, Sending, Transport},
    parameters::Job,
    systems::socket::packet_socket,
};
use pelton_bench_peers::{
    processes,
    uring::{Halves, Shared, open},
};

fn main() -> ExitCode {
    processes::<Packets>()
}

struct Packets;

/// Messages that one system call sends.
const BATCH: usize = 64;
/// Receive buffers: fewer of large messages, because the socket holds no more of them.
const BUFFERS: u16 = 256;
const BUFFER_BYTES_ALL: usize = 16 << 20;

impl Transport for Packets {
    type Sending = Writer;
    type Receiving = Reader;

    fn both(job: &Job) -> Result<(Writer, Reader)> {
        let fd = packet_socket(job)?;
        let size = job.sizes.max as usize;
        let buffers = (BUFFER_BYTES_ALL / size).next_power_of_two().clamp(2, BUFFERS as usize) as u16;
        let socket = open(job, fd, buffers, size)?;
        let halves = Halves::new(socket.clone(), BATCH * size, job);
        Ok((Writer { halves, sizes: Vec::with_capacity(BATCH) }, Reader { socket }))
    }
}

struct Writer {
    halves: Halves,
    /// Sizes of the gathered messages
    sizes: Vec<usize>,
}

impl Sending for Writer {
    #[inline]
    fn send(&mut self, payload: &[u8]) -> Result<()> {
        self.halves.held().extend_from_slice(payload);
        self.sizes.push(payload.len());
        if self.sizes.len() == BATCH { self.halves.pass_on(self.sizes.drain(..)) } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<()> {
        self.halves.flush(self.sizes.drain(..))
    }

    fn settle(&mut self) -> Result<()> {
        self.halves.settle()
    }
}

struct Reader {
    socket: Shared,
}

impl Receiving for Reader {
    #[inline]
    fn receive<R>(&mut self, look: impl FnOnce(&[u8]) -> R) -> Result<R> {
        let (buffer, bytes) = self.socket.borrow_mut().receive()?;
        let packet = self.socket.borrow().bytes(buffer, bytes);
        // SAFETY: the buffer is given back after this; its memory is the socket's, which stays alive.
        let answer = look(unsafe { &*packet });
        self.socket.borrow_mut().give_back(buffer);
        Ok(answer)
    }
}
