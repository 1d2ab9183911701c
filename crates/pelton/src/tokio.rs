//! The ends of a channel, clients, and files, in a Tokio runtime: the descriptor in its reactor, no thread, no timer.
//!
//! Every future here may be dropped at any await: a message is taken or sent only in the turn that completes, never before;
//! of a file's operation see [`AsyncEngine`].
//!
//! ```
//! # fn main() -> pelton::Result<()> {
//! # ::tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap().block_on(async {
//! let (sender, receiver) = pelton::Options::new().threads()?;
//! let mut sender = pelton::tokio::AsyncSender::new(sender)?;
//! let mut receiver = pelton::tokio::AsyncReceiver::new(receiver)?;
//! sender.send(b"hello").await?;
//! assert_eq!(&*receiver.receive().await?, b"hello");
//! # Ok(())
//! # })
//! # }
//! ```

mod client;
mod engine;
mod service;
mod stream;

pub use client::{Answer, AsyncCall, AsyncClient};
pub use engine::AsyncEngine;
pub use service::{AsyncRequest, AsyncResponder, AsyncService};
pub use stream::{MessageSink, MessageStream};

use crate::{Error, Message, Receiver, Result, Sender, Sent};
use ::tokio::io::Interest;
use ::tokio::io::unix::AsyncFd;
use pelton_channel::raw::Side;

/// A [`Receiver`] in a Tokio runtime. One task at a time.
#[derive(Debug)]
pub struct AsyncReceiver(AsyncFd<Receiver>);

/// A [`Sender`] in a Tokio runtime. One task at a time.
#[derive(Debug)]
pub struct AsyncSender(AsyncFd<Sender>);

fn registered<T: std::os::fd::AsRawFd>(end: T) -> Result<AsyncFd<T>> {
    // SAFETY: both ends, and what has an engine, answer the same descriptor, which they own, from when they are made until they are
    // dropped; a successor of the peer does not change it.
    unsafe { AsyncFd::register_with_interest(end, Interest::READABLE) }
        .map_err(|error| Error::system("registering with the Tokio runtime")(error.into_parts().1))
}

impl AsyncReceiver {
    /// Registers a receiver with the runtime that this is called in.
    ///
    /// # Errors
    /// [`Error::System`] when the reactor does not take the descriptor.
    ///
    /// # Panics
    /// Outside a Tokio runtime with I/O enabled.
    pub fn new(receiver: Receiver) -> Result<AsyncReceiver> {
        registered(receiver).map(AsyncReceiver)
    }

    /// Waits until a message is there, and does not take it: follow with [`AsyncReceiver::try_receive`].
    ///
    /// # Errors
    /// As [`Receiver::receive`].
    pub async fn ready(&mut self) -> Result<()> {
        while !self.0.get_mut().poll()? && self.0.get_mut().arm()?.is_waiting() {
            let mut readable = self.0.readable_mut().await.map_err(Error::system("waiting in the Tokio runtime"))?;
            // The reactor hears of the next ring because `arm` silences the descriptor before it looks.
            readable.clear_ready();
        }
        self.0.get_mut().disarm();
        Ok(())
    }

    /// The next message, in place; waits for it.
    ///
    /// # Errors
    /// As [`Receiver::receive`].
    pub async fn receive(&mut self) -> Result<Message<'_>> {
        loop {
            self.ready().await?;
            // Looked at twice, since a borrow cannot be given back once it is returned; a hostile sender may take back
            // what `ready` saw, and then this waits on.
            if self.0.get_mut().poll()? {
                break;
            }
        }
        self.0.get_mut().receive()
    }

    /// The next message, if there is one now.
    ///
    /// # Errors
    /// As [`Receiver::try_receive`].
    pub fn try_receive(&mut self) -> Result<Option<Message<'_>>> {
        self.0.get_mut().try_receive()
    }

    /// The receiver, taken out of the runtime.
    pub fn into_inner(self) -> Receiver {
        self.0.into_inner()
    }
}

impl AsyncSender {
    /// Registers a sender with the runtime that this is called in.
    ///
    /// # Errors
    /// [`Error::System`] when the reactor does not take the descriptor.
    ///
    /// # Panics
    /// Outside a Tokio runtime with I/O enabled.
    pub fn new(sender: Sender) -> Result<AsyncSender> {
        registered(sender).map(AsyncSender)
    }

    /// Waits until there is room for a message of `bytes`: follow with [`AsyncSender::try_send`].
    ///
    /// # Errors
    /// As [`Sender::send`].
    pub async fn ready(&mut self, bytes: usize) -> Result<()> {
        while self.0.get_mut().arm(bytes)?.is_waiting() {
            let mut readable = self.0.readable_mut().await.map_err(Error::system("waiting in the Tokio runtime"))?;
            readable.clear_ready();
        }
        self.0.get_mut().disarm();
        Ok(())
    }

    /// Copies a message into the lane; waits for room. Dropped before it completes, it has sent nothing.
    ///
    /// # Errors
    /// As [`Sender::send`].
    pub async fn send(&mut self, payload: &[u8]) -> Result<()> {
        while self.0.get_mut().try_send(payload)? != Sent::Sent {
            self.ready(payload.len()).await?;
        }
        Ok(())
    }

    /// Copies a message into the lane, if there is room now.
    ///
    /// # Errors
    /// As [`Sender::try_send`].
    pub fn try_send(&mut self, payload: &[u8]) -> Result<Sent> {
        self.0.get_mut().try_send(payload)
    }

    /// The sender, taken out of the runtime.
    pub fn into_inner(self) -> Sender {
        self.0.into_inner()
    }
}
