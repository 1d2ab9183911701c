//! Endpoints, clients, services and files in a Tokio runtime: a descriptor in its reactor, no thread, no timer.
//!
//! Receiving and sending are cancel-safe: dropped before it completes, such a future has taken or sent nothing.
//! Dropping a call cancels it, and its service may have executed it. A dropped `AsyncService::run` aborts its handlers.
//! So `tokio::time::timeout` limits each of these waits, and none has a deadline of its own. A call's deadline can also
//! go to the service: [`AsyncClient::submit_by`]. For file operations see [`AsyncEngine`].
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

mod broadcast;
mod client;
mod engine;
mod service;
mod stream;

pub use broadcast::{AsyncPublisher, AsyncSubscriber};
pub use client::{AsyncCall, AsyncClient, OwnedCompletion};
pub use engine::AsyncEngine;
pub use service::{AsyncRequest, AsyncResponder, AsyncService};
pub use stream::{MessageSink, MessageStream};

use crate::raw::Record;
use crate::{Deadline, Error, Message, Opening, Options, Receiver, Result, Sender, Sent, Traceparent};
use ::tokio::io::Interest;
use ::tokio::io::unix::AsyncFd;

/// A [`Receiver`] in a Tokio runtime. One task at a time.
#[derive(Debug)]
pub struct AsyncReceiver(AsyncFd<Receiver>);

/// A [`Sender`] in a Tokio runtime. One task at a time.
#[derive(Debug)]
pub struct AsyncSender(AsyncFd<Sender>);

fn registered<T: std::os::fd::AsRawFd>(end: T) -> Result<AsyncFd<T>> {
    // SAFETY: endpoints, clients, services, engines and openings own one descriptor each, and return the same one from
    // their creation until their drop; a successor of the peer does not change it.
    unsafe { AsyncFd::register_with_interest(end, Interest::READABLE) }
        .map_err(|error| Error::system("registering with the Tokio runtime")(error.into_parts().1))
}

/// Finishes an opening without blocking the runtime's thread.
async fn opened<T>(opening: Opening<T>) -> Result<T> {
    let mut opening = registered(opening)?;
    loop {
        if let Some(opened) = opening.get_mut().try_finish()? {
            return Ok(opened);
        }
        let mut readable = opening.readable_mut().await.map_err(Error::system("waiting in the Tokio runtime"))?;
        readable.clear_ready();
    }
}

impl AsyncReceiver {
    /// Connects to a sender that listens under `name` (a short name, or `unix:PATH`) with default [`Options`], and
    /// registers the receiver with the runtime that this is called in. Fails immediately when no sender listens. Waits
    /// at most some seconds for a listener to accept. Cancel-safe: dropped before it completes, it leaves nothing
    /// behind.
    ///
    /// # Errors
    /// As [`Options::connect_receiver`].
    ///
    /// # Panics
    /// Outside a Tokio runtime with I/O enabled.
    pub async fn connect(name: &str) -> Result<AsyncReceiver> {
        AsyncReceiver::open(Options::new().start_connect_receiver(name)?).await
    }

    /// As [`AsyncReceiver::connect`], with options, or of a path channel: of [`Options::start_connect_receiver`],
    /// [`Options::start_open_receiver`] or [`Options::start_create_receiver`].
    ///
    /// # Errors
    /// As [`Opening::try_finish`].
    ///
    /// # Panics
    /// As [`AsyncReceiver::connect`].
    pub async fn open(opening: Opening<Receiver>) -> Result<AsyncReceiver> {
        AsyncReceiver::new(opened(opening).await?)
    }

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
        self.record().await.map(drop)
    }

    /// Waits for the next record. Skips membership events.
    async fn record(&mut self) -> Result<Record> {
        // A sender that is always faster must not keep this task's thread from the others.
        ::tokio::task::coop::consume_budget().await;
        loop {
            if let Some(record) = self.0.get_mut().find_record(Deadline::Now)? {
                self.0.get_mut().disarm();
                return Ok(record);
            }
            if self.0.get_mut().arm()?.is_waiting() {
                let mut readable =
                    self.0.readable_mut().await.map_err(Error::system("waiting in the Tokio runtime"))?;
                // The reactor gets an event for the next ring, because `arm` drains the descriptor before it polls.
                readable.clear_ready();
            }
        }
    }

    /// The next message, in place; waits for it. Cancel-safe: dropped before it completes, it has taken nothing.
    ///
    /// # Errors
    /// As [`Receiver::receive`].
    pub async fn receive(&mut self) -> Result<Message<'_>> {
        let record = self.record().await?;
        Ok(self.0.get_mut().message(record))
    }

    /// The next message, if there is one now.
    ///
    /// # Errors
    /// As [`Receiver::try_receive`].
    pub fn try_receive(&mut self) -> Result<Option<Message<'_>>> {
        self.0.get_mut().try_receive()
    }

    /// The receiver itself, for what has no method here. For crates of this project: an armed receiver, or one whose
    /// descriptor was drained, delays [`AsyncReceiver::receive`].
    #[doc(hidden)]
    pub fn get_ref(&self) -> &Receiver {
        self.0.get_ref()
    }

    /// As [`AsyncReceiver::get_ref`].
    #[doc(hidden)]
    pub fn get_mut(&mut self) -> &mut Receiver {
        self.0.get_mut()
    }

    /// The receiver, taken out of the runtime.
    pub fn into_inner(self) -> Receiver {
        self.0.into_inner()
    }
}

impl AsyncSender {
    /// Connects to a receiver that listens under `name` (a short name, or `unix:PATH`) with default [`Options`], and
    /// registers the sender with the runtime that this is called in. Otherwise as [`AsyncReceiver::connect`].
    ///
    /// ```
    /// # fn main() -> pelton::Result<()> {
    /// # ::tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap().block_on(async {
    /// use std::time::Duration;
    /// let name = format!("unix:{}/async-connect-doc-{}", std::env::temp_dir().display(), std::process::id());
    /// let listener = pelton::Listener::bind(&name)?;
    /// let accepting = std::thread::spawn(move || listener.accept_receiver());
    /// let options = pelton::Options::new().connect_deadline(Duration::from_secs(10));
    /// let mut sender = pelton::tokio::AsyncSender::open(options.start_connect_sender(&name)?).await?;
    /// sender.send(b"hello").await?;
    /// assert_eq!(&*accepting.join().unwrap()?.receive()?, b"hello");
    /// # Ok(())
    /// # })
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Options::connect_sender`].
    ///
    /// # Panics
    /// Outside a Tokio runtime with I/O enabled.
    pub async fn connect(name: &str) -> Result<AsyncSender> {
        AsyncSender::open(Options::new().start_connect_sender(name)?).await
    }

    /// As [`AsyncSender::connect`], with options, or of a path channel: of [`Options::start_connect_sender`],
    /// [`Options::start_open_sender`] or [`Options::start_create_sender`].
    ///
    /// # Errors
    /// As [`Opening::try_finish`].
    ///
    /// # Panics
    /// As [`AsyncSender::connect`].
    pub async fn open(opening: Opening<Sender>) -> Result<AsyncSender> {
        AsyncSender::new(opened(opening).await?)
    }

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

    /// Waits until there is space for a message of `bytes`: follow with [`AsyncSender::try_send`].
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

    /// Copies a message into the lane; waits for space. Cancel-safe: dropped before it completes, it has sent nothing.
    ///
    /// # Errors
    /// As [`Sender::send`].
    pub async fn send(&mut self, payload: &[u8]) -> Result<()> {
        // A receiver that is always faster must not keep this task's thread from the others.
        ::tokio::task::coop::consume_budget().await;
        while self.0.get_mut().try_send(payload)? != Sent::Sent {
            self.ready(payload.len()).await?;
        }
        Ok(())
    }

    /// As [`AsyncSender::send`], for a receiver that reads [`Message::traceparent`]: see [`Sender::send_traced`]. On a
    /// channel without [`Options::traced`] the message goes without its traceparent.
    ///
    /// # Errors
    /// As [`Sender::send`].
    pub async fn send_traced(&mut self, payload: &[u8], traceparent: Traceparent) -> Result<()> {
        ::tokio::task::coop::consume_budget().await;
        while self.0.get_mut().send_traced(payload, traceparent, Deadline::Now)? != Sent::Sent {
            self.ready(payload.len()).await?;
        }
        Ok(())
    }

    /// Copies a message into the lane, if there is space now.
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
