//! The common part of both endpoints of a channel: the process that owns the handle, its doorbells, how it waits, how
//! the peer left, and how to reach the peer's successor.

use crate::doorbells::Doorbells;
use crate::error::{Error, Result};
use crate::role::RoleClaim;
use crate::wait::{Spin, Wait};
use pelton_os::{Owner, Peer};
use std::sync::Arc;

/// How a peer left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Departure {
    /// It closed.
    Closed,
    /// Its process died.
    PeerDied,
    /// It violated the layout. The receiver takes no more messages from it.
    Corrupt,
}

impl Departure {
    pub(crate) fn error(self, unreleased: u64) -> Error {
        match self {
            Departure::Closed => Error::Closed { unreleased },
            Departure::PeerDied => Error::PeerDied { unreleased },
            Departure::Corrupt => Error::Corrupt("the peer that sends broke the rules of the layout".to_owned()),
        }
    }
}

/// `R` is the trait by which this endpoint reaches a successor of its peer.
#[derive(Debug)]
pub(crate) struct Endpoint<R: ?Sized> {
    /// One word that the fast path checks: whether the handle is usable, and whether this process created it.
    pub(crate) owner: Owner,
    /// How the peer left; `None` again with a successor.
    pub(crate) departure: Option<Departure>,
    pub(crate) spin: Spin,
    pub(crate) doorbells: Doorbells,
    reconnect: Option<Arc<R>>,
    /// The role in the directory of a path channel.
    pub(crate) role: Option<RoleClaim>,
}

impl<R: ?Sized> Endpoint<R> {
    pub(crate) fn new(doorbells: Doorbells, wait: Wait, peer: Option<Peer>) -> Result<Endpoint<R>> {
        let owner = Owner::current().map_err(Error::system("reading the owner of the handle"))?;
        Ok(Endpoint { owner, departure: None, spin: Spin::new(wait, peer), doorbells, reconnect: None, role: None })
    }

    pub(crate) fn set_reconnect(&mut self, reconnect: Arc<R>) {
        self.reconnect = Some(reconnect);
    }

    /// Whether this is a path channel, whose peers may change.
    pub(crate) fn is_path(&self) -> bool {
        self.role.is_some()
    }

    /// Notes that the peer has left. The next call returns that as an error.
    pub(crate) fn leave(&mut self, departure: Departure) {
        self.departure = Some(departure);
        self.owner.retire();
    }

    /// Makes the handle usable again, with a successor of the peer, or while it waits for one.
    pub(crate) fn reinstate(&mut self) {
        self.departure = None;
        self.owner.reinstate();
    }

    /// Returns the reason why the handle is not usable. `unreleased` returns the number of unreleased messages.
    #[cold]
    pub(crate) fn error(&mut self, unreleased: impl FnOnce() -> u64) -> Error {
        if self.owner.is_forked() {
            return Error::Forked;
        }
        match self.departure {
            Some(departure) => departure.error(unreleased()),
            None => Error::Corrupt("the lane failed before".to_owned()),
        }
    }

    /// # Errors
    /// [`Error::Forked`].
    pub(crate) fn check_owner(&self) -> Result<()> {
        if self.owner.is_forked() { Err(Error::Forked) } else { Ok(()) }
    }

    /// How to reach the peer's successor.
    ///
    /// # Errors
    /// [`Error::Refused`] between threads.
    pub(crate) fn reconnect(&self) -> Result<Arc<R>> {
        let refused = || Error::Refused("a channel between threads has no successor: make a new one".to_owned());
        self.reconnect.clone().ok_or_else(refused)
    }

    /// The role in the directory, for an operation on its disk.
    ///
    /// # Errors
    /// [`Error::Forked`]; [`Error::Refused`] for a channel that is not a path's.
    pub(crate) fn role_to_sync(&self) -> Result<&RoleClaim> {
        self.check_owner()?;
        let refused = || Error::Refused("only a path channel has a disk under it: open one by path:DIR".to_owned());
        self.role.as_ref().ok_or_else(refused)
    }
}
