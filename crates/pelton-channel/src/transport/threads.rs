//! The transport to another thread of this process. Its own handle reports its end, and descriptors travel in a queue.

use super::{Arrived, Transport};
use crate::error::{Error, Result};
use pelton_os::{ReceivedFd, locked};
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Descriptors in flight between threads, in the order of their messages.
#[derive(Clone, Debug, Default)]
pub(crate) struct Queue(Arc<Mutex<VecDeque<Arrived>>>);

impl Queue {
    pub(crate) fn send(&self, seq: u32, fds: &[BorrowedFd<'_>]) -> Result<bool> {
        let duplicates = fds.iter().map(|fd| ReceivedFd::of_thread(fd.try_clone_to_owned()?));
        let fds = duplicates.collect::<std::io::Result<Vec<_>>>().map_err(Error::system("duplicating descriptors"))?;
        locked(&self.0).push_back(Arrived { seq, fds, is_truncated: false });
        Ok(true)
    }

    fn next(&self) -> Option<Arrived> {
        locked(&self.0).pop_front()
    }
}

/// Either side of a lane between threads.
#[derive(Debug)]
pub(crate) struct ThreadTransport(pub(crate) Queue);

impl Transport for ThreadTransport {
    fn try_send_descriptors(&self, seq: u32, fds: &[BorrowedFd<'_>]) -> Result<bool> {
        self.0.send(seq, fds)
    }

    fn next_descriptors(&mut self, _deadline: Option<Instant>) -> Result<Option<Arrived>> {
        Ok(self.0.next())
    }
}
