//! Publishers and subscribers in a Tokio runtime.

use super::{opened, registered};
use crate::{Delivery, Error, Opening, Options, Publisher, Result, Sent, Subscriber};
use ::tokio::io::unix::AsyncFd;

/// A [`Publisher`] in a Tokio runtime. One task at a time.
///
/// ```
/// # fn main() -> pelton::Result<()> {
/// # ::tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap().block_on(async {
/// use pelton::tokio::{AsyncPublisher, AsyncSubscriber};
/// let name = format!("unix:{}/async-publish-doc-{}", std::env::temp_dir().display(), std::process::id());
/// let mut publisher = AsyncPublisher::new(pelton::Options::new().publish_at(&name)?)?;
/// let connecting = ::tokio::spawn(async move { AsyncSubscriber::connect(&name).await });
/// // Elsewhere: beside the source of the messages, in `select!`.
/// while publisher.subscribers_changed().await? < 1 {}
/// let mut subscriber = connecting.await.unwrap()?;
/// publisher.send(b"hello").await?;
/// assert_eq!(&*subscriber.receive().await?, b"hello");
/// # Ok(())
/// # })
/// # }
/// ```
#[derive(Debug)]
pub struct AsyncPublisher(AsyncFd<Publisher>);

/// A [`Subscriber`] in a Tokio runtime. One task at a time.
#[derive(Debug)]
pub struct AsyncSubscriber(AsyncFd<Subscriber>);

impl AsyncPublisher {
    /// Registers a publisher with the runtime that this is called in.
    ///
    /// # Errors
    /// [`Error::System`] when the reactor does not take the descriptor.
    ///
    /// # Panics
    /// Outside a Tokio runtime with I/O enabled.
    pub fn new(publisher: Publisher) -> Result<AsyncPublisher> {
        registered(publisher).map(AsyncPublisher)
    }

    /// Copies a message into the lane; waits while a subscriber that gates holds it full. Cancel-safe: dropped before
    /// it completes, it has sent nothing.
    ///
    /// # Errors
    /// As [`Publisher::send`].
    pub async fn send(&mut self, payload: &[u8]) -> Result<()> {
        // Subscribers that are always faster must not keep this task's thread from the others.
        ::tokio::task::coop::consume_budget().await;
        while self.0.get_mut().try_send(payload)? != Sent::Sent {
            while self.0.get_mut().arm(payload.len())?.is_waiting() {
                self.wait().await?;
            }
            self.0.get_mut().disarm();
        }
        Ok(())
    }

    /// Copies a message into the lane, if there is space now.
    ///
    /// # Errors
    /// As [`Publisher::try_send`].
    pub fn try_send(&mut self, payload: &[u8]) -> Result<Sent> {
        self.0.get_mut().try_send(payload)
    }

    /// Admits subscribers and detects their ends, until their number has changed; returns it. A publisher that sends
    /// rarely waits for this beside its source of messages. Cancel-safe.
    ///
    /// # Errors
    /// As [`Publisher::admit`].
    pub async fn subscribers_changed(&mut self) -> Result<usize> {
        let before = self.0.get_ref().subscriber_count();
        loop {
            let now = self.0.get_mut().admit()?;
            if now != before {
                return Ok(now);
            }
            self.wait().await?;
        }
    }

    async fn wait(&mut self) -> Result<()> {
        let mut readable = self.0.readable_mut().await.map_err(Error::system("waiting in the Tokio runtime"))?;
        // The reactor gets an event for the next ring, because the next call drains the descriptor before it polls.
        readable.clear_ready();
        Ok(())
    }

    /// The publisher, taken out of the runtime.
    pub fn into_inner(self) -> Publisher {
        self.0.into_inner()
    }
}

impl AsyncSubscriber {
    /// Connects to a publisher that listens under `name` with default [`Options`], and registers the subscriber with
    /// the runtime that this is called in. Cancel-safe: dropped before it completes, it leaves nothing behind.
    ///
    /// # Errors
    /// As [`Options::connect_subscriber`].
    ///
    /// # Panics
    /// Outside a Tokio runtime with I/O enabled.
    pub async fn connect(name: &str) -> Result<AsyncSubscriber> {
        AsyncSubscriber::open(Options::new().start_connect_subscriber(name)?).await
    }

    /// As [`AsyncSubscriber::connect`], with options: of [`Options::start_connect_subscriber`].
    ///
    /// # Errors
    /// As [`Opening::try_finish`].
    ///
    /// # Panics
    /// As [`AsyncSubscriber::connect`].
    pub async fn open(opening: Opening<Subscriber>) -> Result<AsyncSubscriber> {
        AsyncSubscriber::new(opened(opening).await?)
    }

    /// Registers a subscriber with the runtime that this is called in.
    ///
    /// # Errors
    /// [`Error::System`] when the reactor does not take the descriptor.
    ///
    /// # Panics
    /// Outside a Tokio runtime with I/O enabled.
    pub fn new(subscriber: Subscriber) -> Result<AsyncSubscriber> {
        registered(subscriber).map(AsyncSubscriber)
    }

    /// The next message; waits for it. Cancel-safe: dropped before it completes, it has taken nothing.
    ///
    /// # Errors
    /// As [`Subscriber::receive`].
    pub async fn receive(&mut self) -> Result<Delivery<'_>> {
        // A publisher that is always faster must not keep this task's thread from the others.
        ::tokio::task::coop::consume_budget().await;
        while !self.0.get_mut().has_message()? {
            ::tokio::task::coop::consume_budget().await;
            if self.0.get_mut().arm()?.is_waiting() {
                let mut readable =
                    self.0.readable_mut().await.map_err(Error::system("waiting in the Tokio runtime"))?;
                // As in `AsyncPublisher`.
                readable.clear_ready();
            }
        }
        let subscriber = self.0.get_mut();
        subscriber.disarm();
        Ok(subscriber.try_receive()?.expect("it has a message"))
    }

    /// The next message, if there is one now.
    ///
    /// # Errors
    /// As [`Subscriber::try_receive`].
    pub fn try_receive(&mut self) -> Result<Option<Delivery<'_>>> {
        self.0.get_mut().try_receive()
    }

    /// The subscriber, taken out of the runtime.
    pub fn into_inner(self) -> Subscriber {
        self.0.into_inner()
    }
}
