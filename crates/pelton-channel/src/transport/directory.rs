//! The transport to a peer that opens the same path channel. Peers may change.

use super::{Found, Transport};
use crate::directory::Directory;
use crate::doorbells::Doorbells;
use crate::error::Result;
use pelton_os::{Descriptor, Event, Peer};
use rustix::event::epoll::EventFlags;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// The peer's role in the directory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PeerRole {
    Receiver,
    SenderOf(u32),
    /// Of a broadcast.
    Publisher,
    /// Of a broadcast; `number`: as the doorbells report its end.
    Subscriber {
        slot: u32,
        number: u32,
    },
}

#[derive(Debug)]
pub(crate) struct PathTransport {
    directory: Arc<Directory>,
    role: PeerRole,
    /// The peer's liveness handle, while there is a peer.
    liveness: Option<Descriptor>,
    /// The peer's generation.
    present: u64,
    /// The last generation whose process is known to have gone.
    gone: u64,
}

impl PathTransport {
    pub(crate) fn new(directory: Arc<Directory>, role: PeerRole) -> PathTransport {
        PathTransport { directory, role, liveness: None, present: 0, gone: 0 }
    }
}

impl Transport for PathTransport {
    fn liveness(&self) -> [Option<BorrowedFd<'_>>; 2] {
        [self.liveness.as_ref().map(|liveness| liveness.as_fd()), None]
    }

    fn try_send_descriptors(&self, _seq: u32, _fds: &[BorrowedFd<'_>]) -> Result<bool> {
        unreachable!("a path channel's sender has refused them")
    }

    fn has_peer(&self) -> bool {
        self.liveness.is_some()
    }

    /// Opens the liveness handle before it reads the generation. So a new generation without a live process means that
    /// the process has gone.
    fn find_peer(&mut self, doorbells: &Doorbells, stated: &dyn Fn() -> (u64, u32)) -> Result<Found> {
        let (generation, _) = stated();
        if self.liveness.is_some() && generation != self.present {
            // A successor has opened the liveness handle meanwhile, so the handle proves nothing. The next check finds
            // the successor.
            doorbells.forget_liveness(self.liveness());
            self.forget_peer();
            return Ok(Found::Passed);
        }
        if self.liveness.is_some() || generation == self.gone {
            return Ok(Found::Nothing);
        }
        let found = match self.role {
            PeerRole::Receiver => self.directory.watch_receiver()?,
            PeerRole::SenderOf(lane) => self.directory.watch_sender(lane)?,
            PeerRole::Publisher => self.directory.watch_publisher()?,
            PeerRole::Subscriber { slot, .. } => self.directory.watch_subscriber(slot)?,
        };
        let Some(found) = found else {
            self.gone = generation;
            return Ok(Found::Passed);
        };
        let lane = match self.role {
            PeerRole::SenderOf(lane) | PeerRole::Subscriber { number: lane, .. } => lane,
            PeerRole::Receiver | PeerRole::Publisher => 0,
        };
        doorbells.watch_liveness(found.as_fd(), EventFlags::empty(), Event::Gone(lane))?;
        self.liveness = Some(found);
        // Another process may have taken the role meanwhile.
        let (generation, pid) = stated();
        self.present = generation;
        Ok(Found::Peer(Peer { pid, uid: self.directory.owner() }))
    }

    fn forget_peer(&mut self) {
        if self.liveness.take().is_some() {
            self.gone = self.present;
        }
    }

    fn directory(&self) -> Option<&Directory> {
        Some(&self.directory)
    }
}
