//! How an endpoint reaches its peer: what proves the peer's death, and how descriptors travel. One file for each way.

mod directory;
mod socket;
mod threads;

pub(crate) use directory::{PathTransport, PeerRole};
pub use socket::SharedLiveness;
pub(crate) use socket::{PACKETS_MAX, SocketTransport};
pub(crate) use threads::{Queue, ThreadTransport};

use crate::directory::Directory;
use crate::doorbells::Doorbells;
use crate::error::Result;
use pelton_os::{Peer, ReceivedFd};
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::time::Instant;

/// Descriptors that arrived with message `seq`.
#[derive(Debug)]
pub(crate) struct Arrived {
    pub(crate) seq: u32,
    pub(crate) fds: Vec<ReceivedFd>,
    /// The kernel dropped some, because this process had no descriptors left.
    pub(crate) is_truncated: bool,
}

/// The result of a check for the peer of a path channel's endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// No new peer: the known one is still alive, or there is none.
    Nothing,
    /// A new peer is alive.
    Peer(Peer),
    /// A peer has opened the channel and left since the last check.
    Passed,
}

/// The connection to one peer.
pub(crate) trait Transport: Send {
    /// Descriptors that report the peer's end when they are polled: a socket, and a pidfd. None between threads, where
    /// the peer's own handle reports it.
    fn liveness(&self) -> [Option<BorrowedFd<'_>>; 2] {
        [None, None]
    }

    /// As [`Transport::liveness`], for a thread that waits while another one uses the link.
    fn shared_liveness(&self) -> Option<SharedLiveness> {
        None
    }

    /// Closes the connection from this side.
    fn shutdown(&self) {}

    /// Sends the descriptors of message `seq`. Returns false while there is no space for them.
    fn try_send_descriptors(&self, seq: u32, fds: &[BorrowedFd<'_>]) -> Result<bool>;

    /// Waits until descriptors may be sent again, or the peer is gone. Returns false at the deadline.
    fn wait_for_descriptor_space(&self, _deadline: Option<Instant>) -> Result<bool> {
        Ok(true)
    }

    /// Receives the next descriptors. Waits for them until `deadline`, if there is one.
    fn next_descriptors(&mut self, _deadline: Option<Instant>) -> Result<Option<Arrived>> {
        Ok(None)
    }

    /// Appends all descriptors that a dead sender has sent, because its successor does not send them again.
    fn drain_descriptors(&mut self, _arrived: &mut VecDeque<Arrived>) -> Result<()> {
        Ok(())
    }

    /// Whether there is a peer, as far as this side knows.
    fn has_peer(&self) -> bool {
        true
    }

    /// Checks for a new peer of a path channel's endpoint, and polls its liveness from then on. `stated` returns the
    /// generation and the pid in the peer's page.
    fn find_peer(&mut self, _doorbells: &Doorbells, _stated: &dyn Fn() -> (u64, u32)) -> Result<Found> {
        Ok(Found::Nothing)
    }

    /// Forgets the peer, after it has gone.
    fn forget_peer(&mut self) {}

    /// The directory of a path channel.
    fn directory(&self) -> Option<&Directory> {
        None
    }

    /// The number of the lane in a receiver of several senders in this process; otherwise 0.
    fn lane_number(&self) -> u32 {
        0
    }
}

// Not a supertrait: each implementation's, with those of all its fields, would be in every program.
impl std::fmt::Debug for dyn Transport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Transport")
    }
}

/// The transport of a lane that never has a peer.
#[derive(Debug)]
pub(crate) struct NoTransport;

impl Transport for NoTransport {
    fn try_send_descriptors(&self, _seq: u32, _fds: &[BorrowedFd<'_>]) -> Result<bool> {
        unreachable!("a lane without a sender sends nothing")
    }

    fn has_peer(&self) -> bool {
        false
    }
}
