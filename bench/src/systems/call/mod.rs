//! The systems that serve calls. A reply is the bytes of its request.

pub mod c;
pub mod nginx;
mod pelton;
pub mod queue;
mod socket;

use anyhow::Result;

pub use self::{
    pelton::{Pelton, PeltonServing},
    socket::{Sock, SockServing, SockStreamService},
};
use crate::call::Tally;

/// A client.
pub trait Asking {
    /// One call, while no other is in flight: sends the request, and passes a copy of the reply in memory of the
    /// client's own to `inspect`. Exceptions: the queue and a client in C pass it where the other side has written it.
    fn call<R>(&mut self, request: &[u8], inspect: impl FnOnce(&[u8]) -> R) -> Result<R>;

    /// Sends a request if there is free space; false otherwise, and then a call is in flight. Never waits.
    fn try_ask(&mut self, request: &[u8]) -> Result<bool>;

    /// Waits for the next reply, as the job says, and passes a copy of it to `inspect`. The requests have been sent by
    /// then.
    fn reply<R>(&mut self, inspect: impl FnOnce(&[u8]) -> R) -> Result<R>;

    /// All replies of a pass have arrived.
    fn end_pass(&mut self) -> Result<()> {
        Ok(())
    }
}

/// A service.
pub trait Serving {
    /// Serves until all measured clients have their replies to `count` calls.
    fn serve(&mut self, count: u64) -> Result<Tally>;

    /// Resident memory of the lanes, where this can be known.
    fn resident_bytes(&self) -> Result<Option<u64>> {
        Ok(None)
    }
}
