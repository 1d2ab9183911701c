//! Unix sockets: streams, packets with a connection, and packets without one.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use rustix::{
    io::Errno,
    net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt},
};

use super::{
    framed::{FramedReceiving, FramedSending},
    many::{Many, OneOfMany},
    wire::Wire,
};
use crate::{
    endpoints::{Receiving, Sending, Transport},
    parameters::{Job, Role, Wait},
};

/// One write per message.
pub type SockStream = Stream<false>;
/// 64 KiB of buffer on both sides.
pub type SockStreamBatched = Stream<true>;

/// A stream socket, one for both directions.
pub struct Stream<const BATCHED: bool>;

impl<const BATCHED: bool> Transport for Stream<BATCHED> {
    type Sending = FramedSending;
    type Receiving = FramedReceiving;

    fn both(job: &Job) -> Result<(FramedSending, FramedReceiving)> {
        let socket = connected(job, SocketType::STREAM)?;
        let outgoing = Wire::outgoing(socket.try_clone()?, job.wait)?;
        let receiving = FramedReceiving::new(Wire::incoming(socket, job.wait)?, BATCHED, job.sizes.max as usize);
        Ok((FramedSending::new(outgoing, BATCHED), receiving))
    }
}

impl SockStream {
    /// The receiver of many senders. Waits until all of them are connected.
    pub fn gathering(job: &Job) -> Result<Many<FramedReceiving>> {
        let end = |socket| Ok(FramedReceiving::new(Wire::incoming(socket, Wait::Spin)?, false, job.sizes.max as usize));
        Many::new(job.wait, accepted(job, SocketType::STREAM)?.into_iter().map(end).collect::<Result<_>>()?)
    }
}

/// A seqpacket socket: one call per message and side, no length needed.
pub struct SockSeqpacket;

impl SockSeqpacket {
    /// As a stream socket does.
    pub fn gathering(job: &Job) -> Result<Many<PacketReceiving>> {
        let end = |socket| PacketReceiving::new(socket, job, Wait::Spin);
        Many::new(job.wait, accepted(job, SocketType::SEQPACKET)?.into_iter().map(end).collect::<Result<_>>()?)
    }
}

impl Transport for SockSeqpacket {
    type Sending = PacketSending;
    type Receiving = PacketReceiving;

    fn both(job: &Job) -> Result<(PacketSending, PacketReceiving)> {
        let socket = packet_socket(job)?;
        let wire = Wire::outgoing(socket.try_clone()?, job.wait)?;
        Ok((PacketSending { wire }, PacketReceiving::new(socket, job, job.wait)?))
    }
}

/// A datagram socket: without a connection, so a receiver does not detect the death of its sender. One socket for each
/// process, bound to the name on which it receives, connected to the one on which it sends.
pub struct SockDgram;

impl Transport for SockDgram {
    type Sending = PacketSending;
    type Receiving = PacketReceiving;

    fn both(job: &Job) -> Result<(PacketSending, PacketReceiving)> {
        refuse_empty(job)?;
        let (to, from) = job.directions();
        let (socket, own) = named(job, from, SocketType::DGRAM)?;
        fit_packets(&socket, job)?;
        rustix::net::bind(&socket, &own).context("binding the socket")?;
        // A receiver of a stream sends nothing.
        if job.role != Role::Receiver {
            connect(&socket, &address(job, to)?)?;
        }
        let wire = Wire::outgoing(socket.try_clone()?, job.wait)?;
        Ok((PacketSending { wire }, PacketReceiving::new(socket, job, job.wait)?))
    }
}

/// A datagram socket for each receiver of a broadcast.
pub struct SockDgrams;

impl Transport for SockDgrams {
    type Sending = PacketsToAll;
    type Receiving = PacketReceiving;

    fn sending(job: &Job, _: &str) -> Result<PacketsToAll> {
        refuse_empty(job)?;
        let to = |index| {
            let (socket, _) = named(job, SOCKET, SocketType::DGRAM)?;
            fit_packets(&socket, job)?;
            connect(&socket, &address(job, &format!("{SOCKET}-{index}"))?)?;
            Ok(PacketSending { wire: Wire::outgoing(socket, job.wait)? })
        };
        Ok(PacketsToAll((0..job.receivers).map(to).collect::<Result<_>>()?))
    }

    fn receiving(job: &Job, _: &str) -> Result<PacketReceiving> {
        let (socket, own) = named(job, &format!("{SOCKET}-{}", job.index), SocketType::DGRAM)?;
        rustix::net::bind(&socket, &own).context("binding the socket")?;
        PacketReceiving::new(socket, job, job.wait)
    }
}

/// Sends each packet to all.
pub struct PacketsToAll(Vec<PacketSending>);

impl Sending for PacketsToAll {
    #[inline]
    fn send(&mut self, payload: &[u8]) -> Result<()> {
        self.0.iter_mut().try_for_each(|sending| sending.send(payload))
    }
}

/// The endpoint that sends packets.
pub struct PacketSending {
    wire: Wire,
}

impl Sending for PacketSending {
    #[inline]
    fn send(&mut self, payload: &[u8]) -> Result<()> {
        let sent =
            self.wire.retry(|fd| rustix::net::send(fd, payload, SendFlags::empty())).context("sending a packet")?;
        ensure!(sent == payload.len(), "the kernel took {sent} bytes of a packet of {}", payload.len());
        Ok(())
    }
}

/// The endpoint that receives packets.
pub struct PacketReceiving {
    wire: Wire,
    buffer: Vec<u8>,
}

impl PacketReceiving {
    fn new(socket: OwnedFd, job: &Job, wait: Wait) -> Result<PacketReceiving> {
        Ok(PacketReceiving { wire: Wire::incoming(socket, wait)?, buffer: vec![0; job.sizes.max as usize] })
    }

    #[inline]
    fn show<R>(&self, len: usize, inspect: impl FnOnce(&[u8]) -> R) -> Result<R> {
        ensure!(len > 0, "the sender is gone before its last message");
        ensure!(len <= self.buffer.len(), "a packet has {len} bytes, wanted at most {}", self.buffer.len());
        Ok(inspect(&self.buffer[..len]))
    }
}

impl AsFd for PacketReceiving {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wire.as_fd()
    }
}

impl OneOfMany for PacketReceiving {
    #[inline]
    fn fetch(&mut self) -> Result<Option<usize>> {
        let buffer = &mut self.buffer;
        let received = self.wire.try_once(|fd| rustix::net::recv(fd, &mut buffer[..], RecvFlags::TRUNC));
        Ok(received.context("receiving a packet")?.map(|(_, len)| len))
    }

    #[inline]
    fn take<R>(&mut self, len: usize, inspect: impl FnOnce(&[u8]) -> R) -> Result<R> {
        self.show(len, inspect)
    }
}

impl Receiving for PacketReceiving {
    #[inline]
    fn receive<R>(&mut self, inspect: impl FnOnce(&[u8]) -> R) -> Result<R> {
        let buffer = &mut self.buffer;
        // TRUNC: the call returns the packet's own length, even if the buffer is shorter.
        let (_, len) = self
            .wire
            .retry(|fd| rustix::net::recv(fd, &mut buffer[..], RecvFlags::TRUNC))
            .context("receiving a packet")?;
        self.show(len, inspect)
    }
}

/// A connected seqpacket socket that has room for the largest packets.
pub fn packet_socket(job: &Job) -> Result<OwnedFd> {
    refuse_empty(job)?;
    let socket = connected(job, SocketType::SEQPACKET)?;
    fit_packets(&socket, job)?;
    Ok(socket)
}

fn refuse_empty(job: &Job) -> Result<()> {
    ensure!(
        job.sizes.min > 0,
        "an empty packet is indistinguishable from the end of the connection: measure sizes from 1"
    );
    Ok(())
}

/// A packet must fit the send buffer as a whole, with some space for the kernel's own data: requests four of the
/// largest if the default could not hold two. The kernel doubles the requested size.
fn fit_packets(socket: &OwnedFd, job: &Job) -> Result<()> {
    let size_max = job.sizes.max as usize;
    if sockopt::socket_send_buffer_size(socket)? < 2 * size_max {
        let wanted = 2 * size_max + 4096;
        if sockopt::set_socket_send_buffer_size_force(socket, wanted).is_err() {
            sockopt::set_socket_send_buffer_size(socket, wanted)?;
        }
        let found = sockopt::socket_send_buffer_size(socket)?;
        ensure!(
            found >= size_max + 4096,
            "found a send buffer of at most {found} bytes, wanted {wanted} for packets of {size_max}: raise net.core.wmem_max or run as root"
        );
    }
    Ok(())
}

/// One endpoint of a connection; the other side has the other.
pub fn connected(job: &Job, kind: SocketType) -> Result<OwnedFd> {
    if job.role.listens() {
        return accepted(job, kind)?.pop().context("nobody is to be accepted");
    }
    let (socket, address) = named(job, SOCKET, kind)?;
    connect(&socket, &address)?;
    Ok(socket)
}

/// Connects, once the other side has bound the name. The program that started both ends this loop by its deadline.
fn connect(socket: &OwnedFd, address: &SocketAddrUnix) -> Result<()> {
    loop {
        match rustix::net::connect(socket, address) {
            Err(Errno::NOENT | Errno::CONNREFUSED | Errno::INTR) => std::thread::sleep(Duration::from_millis(1)),
            done => return done.context("connecting to the run's socket"),
        }
    }
}

/// The connections of all clients, in their order: one, except for a fan-in and for calls.
pub(super) fn accepted(job: &Job, kind: SocketType) -> Result<Vec<OwnedFd>> {
    let (socket, address) = named(job, SOCKET, kind)?;
    let all = job.senders + job.idle;
    rustix::net::bind(&socket, &address).context("binding the run's socket")?;
    rustix::net::listen(&socket, all as i32).context("listening")?;
    (0..all).map(|_| rustix::net::accept_with(&socket, SocketFlags::CLOEXEC).context("accepting")).collect()
}

/// The name of a connection for both directions.
const SOCKET: &str = "socket";

fn named(job: &Job, name: &str, kind: SocketType) -> Result<(OwnedFd, SocketAddrUnix)> {
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).context("making a socket")?;
    Ok((socket, address(job, name)?))
}

fn address(job: &Job, name: &str) -> Result<SocketAddrUnix> {
    let path = job.directory.join(name);
    SocketAddrUnix::new(&path)
        .with_context(|| format!("naming the socket {}: set TMPDIR to a shorter path", path.display()))
}
