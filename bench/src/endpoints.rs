//! The endpoints of the systems that carry messages: what a workload uses of a system, and nothing else.

use std::time::Duration;

use anyhow::{Context, Result};

use crate::parameters::{Job, Role};

/// How long the sides of a pelton channel wait for each other to connect.
pub const CONNECT: Duration = Duration::from_secs(20);

/// The channel of a stream, and of a round trip's way there.
pub const THERE: &str = "there";
/// The channel of a round trip's way back.
pub const BACK: &str = "back";

/// A transport between two processes that know the same directory. If its two directions share a connection, it has
/// `both` and nothing else; otherwise the other two.
pub trait Transport {
    /// The sending endpoint.
    type Sending: Sending;
    /// The receiving endpoint.
    type Receiving: Receiving;

    /// The sending endpoint of the channel of that name: [`THERE`], or of the way back. Waits for the other side.
    fn sending(job: &Job, _direction: &str) -> Result<Self::Sending> {
        Ok(Self::both(job)?.0)
    }

    /// The receiving endpoint. Waits for the other side.
    fn receiving(job: &Job, _direction: &str) -> Result<Self::Receiving> {
        Ok(Self::both(job)?.1)
    }

    /// There and back, both endpoints of `job.role`, asker or answerer. Waits for the other side.
    fn both(job: &Job) -> Result<(Self::Sending, Self::Receiving)> {
        // Opening may wait for the other side to open the same channel: both sides open them in the same order.
        if job.role == Role::Asker {
            let sending = Self::sending(job, THERE)?;
            Ok((sending, Self::receiving(job, BACK).context("for the way back")?))
        } else {
            let receiving = Self::receiving(job, THERE)?;
            Ok((Self::sending(job, BACK).context("for the way back")?, receiving))
        }
    }
}

/// The sending endpoint.
pub trait Sending {
    /// Copies the message in; waits for free space as the job says.
    fn send(&mut self, payload: &[u8]) -> Result<()>;

    /// Sends the messages that are still held back. A side that also receives may leave that to its next receive, as
    /// one system call can do both.
    fn flush(&mut self) -> Result<()> {
        Ok(())
    }

    /// After a last flush, with no receive after it: sends the messages that the flush left.
    fn settle(&mut self) -> Result<()> {
        self.flush()
    }
}

/// The receiving endpoint.
pub trait Receiving {
    /// Takes the next message, waiting for it as the job says, and passes it to `inspect`.
    ///
    /// The bytes are a copy in memory of the caller's own, which no sender can change. Exception: with messages of
    /// random sizes a system that can pass a message in place does so, as limits.c does.
    fn receive<R>(&mut self, inspect: impl FnOnce(&[u8]) -> R) -> Result<R>;

    /// Resident memory of the channel, where this can be known.
    fn resident_bytes(&self) -> Result<Option<u64>> {
        Ok(None)
    }
}
