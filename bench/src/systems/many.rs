//! A receiver of many connections: an epoll instance says which have something, and each of those has a turn.

use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, Result};
use rustix::{
    buffer::spare_capacity,
    event::{Timespec, epoll},
    io::Errno,
};

use super::Receiving;
use crate::parameters::Wait;

/// One connection, which never waits.
pub trait OneOfMany: AsFd {
    /// Fetches the next message; answers its length, or `None` when there is none yet.
    fn fetch(&mut self) -> Result<Option<usize>>;

    /// Shows the message that was fetched.
    fn take<R>(&mut self, len: usize, look: impl FnOnce(&[u8]) -> R) -> Result<R>;
}

/// Messages of a connection before the next one's turn, as pelton has it. A call of epoll is little against so many.
const TURN: u32 = 64;
/// Connections that one call of epoll tells of.
const EVENTS: usize = 64;

/// All connections of a receiver.
pub struct Many<E> {
    ends: Vec<E>,
    epoll: OwnedFd,
    /// Told of, and to have their turn; the last of them has it.
    ready: Vec<epoll::Event>,
    left: u32,
    wait: Wait,
}

impl<E: OneOfMany> Many<E> {
    /// Of those.
    pub fn new(wait: Wait, ends: Vec<E>) -> Result<Many<E>> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).context("making an epoll instance")?;
        for (index, end) in ends.iter().enumerate() {
            epoll::add(&epoll, end, epoll::EventData::new_u64(index as u64), epoll::EventFlags::IN)
                .context("adding to the epoll instance")?;
        }
        Ok(Many { ends, epoll, ready: Vec::with_capacity(EVENTS), left: TURN, wait })
    }

    /// Asks who has something, and waits for it as the job says.
    fn look_around(&mut self) -> Result<()> {
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
    fn receive<R>(&mut self, look: impl FnOnce(&[u8]) -> R) -> Result<R> {
        loop {
            let Some(ready) = self.ready.last() else {
                self.look_around()?;
                continue;
            };
            let index = ready.data.u64() as usize;
            if self.left > 0
                && let Some(len) = self.ends[index].fetch()?
            {
                self.left -= 1;
                return self.ends[index].take(len, look);
            }
            self.ready.pop();
            self.left = TURN;
        }
    }
}
