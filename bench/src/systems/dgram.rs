//! A Unix datagram socket: one packet per message, as by a seqpacket socket, but without a connection. So a receiver
//! does not detect the death of its sender.

use std::{os::fd::OwnedFd, time::Duration};

use anyhow::{Context, Result, ensure};
use rustix::{
    io::Errno,
    net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, connect, socket_with},
};

use super::{socket::fit_packets, wire::Wire};
use crate::{
    endpoints::{Receiving, Sending, Transport},
    parameters::Job,
};

/// One socket for each process: bound to the name on which it receives, connected to the one on which it sends.
pub struct Dgram;

impl Transport for Dgram {
    type Sending = Outgoing;
    type Receiving = Incoming;

    fn sending(job: &Job, direction: &str) -> Result<Outgoing> {
        let socket = unbound()?;
        fit_packets(&socket, job)?;
        reach(&socket, &name(job, direction)?)?;
        Ok(Outgoing(Wire::outgoing(socket, job.wait)?))
    }

    fn receiving(job: &Job, direction: &str) -> Result<Incoming> {
        let socket = unbound()?;
        bind(&socket, &name(job, direction)?).context("binding the socket")?;
        Incoming::new(socket, job)
    }

    fn both(job: &Job) -> Result<(Outgoing, Incoming)> {
        let (to, from) = job.directions();
        let socket = unbound()?;
        fit_packets(&socket, job)?;
        bind(&socket, &name(job, from)?).context("binding the socket")?;
        reach(&socket, &name(job, to)?)?;
        let outgoing = Wire::outgoing(socket.try_clone()?, job.wait)?;
        Ok((Outgoing(outgoing), Incoming::new(socket, job)?))
    }
}

fn unbound() -> Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None).context("making a socket")
}

fn name(job: &Job, direction: &str) -> Result<SocketAddrUnix> {
    let path = job.directory.join(direction);
    SocketAddrUnix::new(&path)
        .with_context(|| format!("naming the socket {}: set TMPDIR to a shorter path", path.display()))
}

/// Connects, once the other side has bound the name. The program that started both ends this loop by its deadline.
fn reach(socket: &OwnedFd, name: &SocketAddrUnix) -> Result<()> {
    loop {
        match connect(socket, name) {
            Err(Errno::NOENT | Errno::CONNREFUSED | Errno::INTR) => std::thread::sleep(Duration::from_millis(1)),
            done => return done.context("connecting to the run's socket"),
        }
    }
}

pub struct Outgoing(Wire);

impl Sending for Outgoing {
    #[inline]
    fn send(&mut self, payload: &[u8]) -> Result<()> {
        let sent = self.0.retry(|fd| rustix::net::send(fd, payload, SendFlags::empty())).context("sending a packet")?;
        ensure!(sent == payload.len(), "the kernel took {sent} bytes of a packet of {}", payload.len());
        Ok(())
    }
}

pub struct Incoming {
    wire: Wire,
    buffer: Vec<u8>,
}

impl Incoming {
    fn new(socket: OwnedFd, job: &Job) -> Result<Incoming> {
        Ok(Incoming { wire: Wire::incoming(socket, job.wait)?, buffer: vec![0; job.sizes.max as usize] })
    }
}

impl Receiving for Incoming {
    #[inline]
    fn receive<R>(&mut self, inspect: impl FnOnce(&[u8]) -> R) -> Result<R> {
        let Incoming { wire, buffer } = self;
        // TRUNC: the call returns the packet's own length, even if the buffer is shorter.
        let (_, len) =
            wire.retry(|fd| rustix::net::recv(fd, &mut buffer[..], RecvFlags::TRUNC)).context("receiving a packet")?;
        ensure!(len <= buffer.len(), "a packet has {len} bytes, wanted at most {}", buffer.len());
        Ok(inspect(&buffer[..len]))
    }
}
