//! A receiver of many connections: epoll reports the readable ones, and the receiver serves them by round-robin.

use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, Result};
use rustix::{
    buffer::spare_capacity,
    event::{Timespec, epoll},
    io::Errno,
};

use crate::{endpoints::Receiving, parameters::Wait};

/// One connection, which never waits.
pub trait OneOfMany: AsFd {
    /// Fetches the next message; returns its length, or `None` when there is none yet.
    fn fetch(&mut self) -> Result<Option<usize>>;

    /// Passes the fetched message to `inspect`.
    fn take<R>(&mut self, len: usize, inspect: impl FnOnce(&[u8]) -> R) -> Result<R>;
}

/// The round-robin quantum: messages of a connection before the next one's, as in pelton. A call of epoll costs little
/// against so many.
const QUANTUM: u32 = 64;
/// Connections that one call of epoll reports.
const EVENTS: usize = 64;

/// All connections of a receiver.
pub struct Many<E> {
    connections: Vec<E>,
    epoll: OwnedFd,
    /// Reported connections that are still to be served; the last of them is served now.
    ready: Vec<epoll::Event>,
    left: u32,
    wait: Wait,
}

impl<E: OneOfMany> Many<E> {
    /// Of those connections.
    pub fn new(wait: Wait, connections: Vec<E>) -> Result<Many<E>> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).context("making an epoll instance")?;
        for (index, end) in connections.iter().enumerate() {
            epoll::add(&epoll, end, epoll::EventData::new_u64(index as u64), epoll::EventFlags::IN)
                .context("adding to the epoll instance")?;
        }
        Ok(Many { connections, epoll, ready: Vec::with_capacity(EVENTS), left: QUANTUM, wait })
    }

    /// Polls the connections, and waits for one as the job says.
    fn poll_connections(&mut self) -> Result<()> {
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let timeout = (self.wait == Wait::Spin).then_some(&at_once);
        match epoll::wait(&self.epoll, spare_capacity(&mut self.ready), timeout) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error).context("waiting in epoll"),
        }
    }
}

impl<E: OneOfMany> Receiving for Many<E> {
    #[inline]
    fn receive<R>(&mut self, inspect: impl FnOnce(&[u8]) -> R) -> Result<R> {
        loop {
            let Some(ready) = self.ready.last() else {
                self.poll_connections()?;
                continue;
            };
            let index = ready.data.u64() as usize;
            if self.left > 0
                && let Some(len) = self.connections[index].fetch()?
            {
                self.left -= 1;
                return self.connections[index].take(len, inspect);
            }
            self.ready.pop();
            self.left = QUANTUM;
        }
    }
}
