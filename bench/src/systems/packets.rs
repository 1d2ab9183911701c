//! A Unix seqpacket socket with up to 64 packets a system call: sendmmsg and recvmmsg. It is the baseline for the
//! system calls that io_uring saves, because one call per packet is not.

use std::{io, mem, os::fd::AsRawFd, ptr};

use anyhow::{Context, Result, ensure};
use rustix::io::Errno;

use super::{socket::packet_socket, wire::Wire};
use crate::{
    endpoints::{Receiving, Sending, Transport},
    parameters::Job,
};

/// As many as `io-uring-seqpacket` sends together.
const BATCH: usize = 64;
/// Of large packets fewer are received together: no more fit in the socket.
const RECEIVED_BYTES: usize = 16 << 20;

pub struct SockSeqpacketBatched;

impl Transport for SockSeqpacketBatched {
    type Sending = PacketsSending;
    type Receiving = PacketsReceiving;

    fn both(job: &Job) -> Result<(PacketsSending, PacketsReceiving)> {
        let socket = packet_socket(job)?;
        let outgoing = Wire::outgoing(socket.try_clone()?, job.wait)?;
        let incoming = Wire::incoming(socket, job.wait)?;
        Ok((PacketsSending::new(outgoing), PacketsReceiving::new(incoming, job.sizes.max as usize)))
    }
}

/// A packet for each of those bytes. The pointers must stay valid as long as the call.
fn headers(parts: &mut [libc::iovec], headers: &mut Vec<libc::mmsghdr>) {
    headers.clear();
    headers.extend(parts.iter_mut().map(|part| {
        // SAFETY: it is plain numbers and pointers, for which zero is a value.
        let mut header: libc::mmsghdr = unsafe { mem::zeroed() };
        (header.msg_hdr.msg_iov, header.msg_hdr.msg_iovlen) = (ptr::from_mut(part), 1);
        header
    }));
}

fn result_of(done: libc::c_int) -> rustix::io::Result<usize> {
    usize::try_from(done)
        .map_err(|_| Errno::from_io_error(&io::Error::last_os_error()).expect("a failed call has left its error"))
}

/// The sending endpoint: it gathers up to 64 packets.
pub struct PacketsSending {
    wire: Wire,
    held: Vec<u8>,
    sizes: Vec<usize>,
    parts: Vec<libc::iovec>,
    headers: Vec<libc::mmsghdr>,
}

impl PacketsSending {
    fn new(wire: Wire) -> PacketsSending {
        PacketsSending { wire, held: Vec::new(), sizes: Vec::new(), parts: Vec::new(), headers: Vec::new() }
    }
}

impl Sending for PacketsSending {
    #[inline]
    fn send(&mut self, payload: &[u8]) -> Result<()> {
        self.held.extend_from_slice(payload);
        self.sizes.push(payload.len());
        if self.sizes.len() == BATCH { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<()> {
        let PacketsSending { wire, held, sizes, parts, headers: packets } = self;
        let mut rest = &mut held[..];
        parts.clear();
        for size in sizes.drain(..) {
            let (part, behind) = rest.split_at_mut(size);
            parts.push(libc::iovec { iov_base: part.as_mut_ptr().cast(), iov_len: size });
            rest = behind;
        }
        headers(parts, packets);
        let mut done = 0;
        while done < packets.len() {
            let left = &mut packets[done..];
            let send = |fd: std::os::fd::BorrowedFd<'_>| {
                // SAFETY: the headers point to parts, and those to bytes, that stay valid until the call is over.
                result_of(unsafe { libc::sendmmsg(fd.as_raw_fd(), left.as_mut_ptr(), left.len() as u32, 0) })
            };
            done += wire.retry(send).context("sending packets")?;
        }
        for (packet, part) in packets.iter().zip(parts) {
            ensure!(packet.msg_len as usize == part.iov_len, "the kernel took a part of a packet only");
        }
        held.clear();
        Ok(())
    }
}

/// The receiving endpoint: as many packets as there are, up to 64, waiting for the first.
pub struct PacketsReceiving {
    wire: Wire,
    buffer: Vec<u8>,
    size_max: usize,
    parts: Vec<libc::iovec>,
    headers: Vec<libc::mmsghdr>,
    /// The next packet, of how many that arrived
    next: usize,
    received: usize,
}

impl PacketsReceiving {
    fn new(wire: Wire, size_max: usize) -> PacketsReceiving {
        let most = (RECEIVED_BYTES / size_max.max(1)).clamp(1, BATCH);
        let mut buffer = vec![0; most * size_max];
        let part = |bytes: &mut [u8]| libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        let mut parts: Vec<libc::iovec> = buffer.chunks_mut(size_max).map(part).collect();
        let mut packets = Vec::new();
        headers(&mut parts, &mut packets);
        PacketsReceiving { wire, buffer, size_max, parts, headers: packets, next: 0, received: 0 }
    }

    fn fetch(&mut self) -> Result<()> {
        let PacketsReceiving { wire, headers: packets, parts, .. } = self;
        headers(parts, packets);
        let receive = |fd: std::os::fd::BorrowedFd<'_>| {
            let (to, count) = (packets.as_mut_ptr(), packets.len() as u32);
            // SAFETY: the headers point to parts, and those to the buffer, which are this value's own.
            result_of(unsafe { libc::recvmmsg(fd.as_raw_fd(), to, count, libc::MSG_WAITFORONE, ptr::null_mut()) })
        };
        self.received = wire.retry(receive).context("receiving packets")?;
        self.next = 0;
        Ok(())
    }
}

impl Receiving for PacketsReceiving {
    #[inline]
    fn receive<R>(&mut self, inspect: impl FnOnce(&[u8]) -> R) -> Result<R> {
        while self.next == self.received {
            self.fetch()?;
        }
        let header = &self.headers[self.next];
        let len = header.msg_len as usize;
        ensure!(len > 0, "the sender is gone before its last message");
        ensure!(header.msg_hdr.msg_flags & libc::MSG_TRUNC == 0, "a packet has more than {} bytes", self.size_max);
        let packet = &self.buffer[self.next * self.size_max..][..len];
        self.next += 1;
        Ok(inspect(packet))
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;
    use crate::parameters::Wait;

    #[test]
    fn a_packet_that_is_larger_than_the_buffer_is_reported() {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::empty(), None).unwrap();
        let mut sending = PacketsSending::new(Wire::outgoing(theirs, Wait::Block).unwrap());
        sending.send(&[1; 11]).unwrap();
        sending.flush().unwrap();
        let mut receiving = PacketsReceiving::new(Wire::incoming(ours, Wait::Block).unwrap(), 10);
        assert!(receiving.receive(|_| ()).unwrap_err().to_string().contains("more than 10"));
    }
}
