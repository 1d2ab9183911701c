//! A receiver of many connections: epoll reports the readable ones, and the receiver serves them by round-robin.

use std::os::fd::AsFd;

use anyhow::Result;
use rustix::event::epoll::{Event, EventFlags};

use super::wire::Watch;
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
pub const EVENTS: usize = 64;

/// All connections of a receiver.
pub struct Many<E> {
    connections: Vec<E>,
    watch: Watch,
    /// Reported connections that are still to be served; the last of them is served now.
    ready: Vec<Event>,
    left: u32,
    spins: bool,
}

impl<E: OneOfMany> Many<E> {
    /// Of those connections.
    pub fn new(wait: Wait, connections: Vec<E>) -> Result<Many<E>> {
        let watch = Watch::new(&connections, EventFlags::IN)?;
        Ok(Many { connections, watch, ready: Vec::with_capacity(EVENTS), left: QUANTUM, spins: wait == Wait::Spin })
    }
}

impl<E: OneOfMany> Receiving for Many<E> {
    #[inline]
    fn receive<R>(&mut self, inspect: impl FnOnce(&[u8]) -> R) -> Result<R> {
        loop {
            let Some(ready) = self.ready.last() else {
                self.watch.poll(&mut self.ready, self.spins)?;
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
