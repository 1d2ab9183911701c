//! The systems that a service is called by. A reply is the bytes of its request.

pub mod nginx;
mod pelton;
mod socket;

use anyhow::Result;

pub use self::{
    pelton::{Pelton, PeltonServing},
    socket::{Sock, SockServing, SockStreamService},
};
use crate::call::Tally;

/// A client.
pub trait Asking {
    /// One call, while no other is in flight: asks, and shows the reply, which is a copy in memory of the client's own.
    fn call<R>(&mut self, request: &[u8], look: impl FnOnce(&[u8]) -> R) -> Result<R>;

    /// Asks, if there is room; false otherwise, and then a call is in flight. Never waits.
    fn try_ask(&mut self, request: &[u8]) -> Result<bool>;

    /// Waits for the next reply, as the job says, and shows a copy of it. What was asked is on its way then.
    fn reply<R>(&mut self, look: impl FnOnce(&[u8]) -> R) -> Result<R>;

    /// All replies of a pass have come.
    fn end_pass(&mut self) -> Result<()> {
        Ok(())
    }
}

/// A service.
pub trait Serving {
    /// Answers until all clients that are measured have their replies to `count` calls.
    fn serve(&mut self, count: u64) -> Result<Tally>;

    /// Resident memory of the lanes, where this can be known.
    fn resident_bytes(&self) -> Result<Option<u64>> {
        Ok(None)
    }
}
