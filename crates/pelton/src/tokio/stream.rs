//! A receiver as a [`Stream`], a sender as a [`Sink`]: for code that is generic over the traits of `futures`.

use super::{AsyncReceiver, AsyncSender};
use crate::{Error, Result, Sent};
use ::tokio::io::unix::AsyncFd;
use ::tokio::task::coop::consume_budget;
use futures_core::{FusedStream, Stream};
use futures_sink::Sink;
use std::borrow::BorrowMut;
use std::future::poll_fn;
use std::os::fd::AsRawFd;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

/// Waits until the descriptor is readable. The caller has armed its endpoint, which drained the descriptor: the reactor
/// reports the next ring.
pub(super) fn poll_rung<T: AsRawFd>(endpoint: &mut AsyncFd<T>, context: &mut Context<'_>) -> Poll<Result<()>> {
    let readable = ready!(endpoint.poll_read_ready_mut(context));
    readable.map_err(Error::system("waiting in the Tokio runtime"))?.clear_ready();
    Poll::Ready(Ok(()))
}

/// The messages of an [`AsyncReceiver`] as a [`Stream`] of copies: see [`AsyncReceiver::into_stream`].
#[derive(Debug)]
pub struct MessageStream<R = AsyncReceiver> {
    receiver: R,
    is_over: bool,
}

impl AsyncReceiver {
    /// The messages as a [`Stream`] of owned copies, until the sender closes.
    ///
    /// An item is a `Vec<u8>`, because the items of a stream outlive the next poll and a message in place cannot.
    /// `bytes::Bytes::from` takes it without a second copy. For messages in place use [`AsyncReceiver::receive`].
    ///
    /// The stream ends (`None`) when the sender has closed. Any other error of [`AsyncReceiver::receive`] is an item,
    /// after which the stream ends as well. Then [`MessageStream::into_inner`] returns the receiver: a path channel
    /// continues with the next sender, and after [`Error::PeerDied`] [`crate::Receiver::resume`] waits for a successor.
    ///
    /// `poll_next` never blocks the thread. A poll that is pending has taken nothing, so the stream may be dropped, or
    /// raced in a `select!`, without losing a message. It yields to other tasks by Tokio's budget.
    ///
    /// ```
    /// # fn main() -> pelton::Result<()> {
    /// # ::tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap().block_on(async {
    /// use futures_util::{SinkExt as _, StreamExt as _};
    /// let (sender, receiver) = pelton::Options::new().threads()?;
    /// let mut sink = pelton::tokio::AsyncSender::new(sender)?.into_sink();
    /// let mut stream = pelton::tokio::AsyncReceiver::new(receiver)?.into_stream();
    /// sink.send("one").await?;
    /// sink.send("two").await?;
    /// sink.close().await?;
    /// assert_eq!(stream.next().await.unwrap()?, b"one");
    /// assert_eq!(stream.next().await.unwrap()?, b"two");
    /// assert!(stream.next().await.is_none());
    /// # Ok(())
    /// # })
    /// # }
    /// ```
    pub fn into_stream(self) -> MessageStream {
        MessageStream { receiver: self, is_over: false }
    }

    /// As [`AsyncReceiver::into_stream`], of a receiver that is borrowed: afterwards it can be used as before.
    pub fn stream(&mut self) -> MessageStream<&mut AsyncReceiver> {
        MessageStream { receiver: self, is_over: false }
    }

    /// Copies the next message into `buffer`, whose contents it replaces, and returns its length. Waits for a message.
    /// Safe against any peer, as [`crate::Receiver::receive_into`]. Cancel-safe: dropped before it completes, it has
    /// taken nothing.
    ///
    /// # Errors
    /// As [`crate::Receiver::receive`].
    pub async fn receive_into(&mut self, buffer: &mut Vec<u8>) -> Result<usize> {
        poll_fn(|context| self.poll_receive_into(context, buffer)).await
    }

    fn poll_receive_into(&mut self, context: &mut Context<'_>, buffer: &mut Vec<u8>) -> Poll<Result<usize>> {
        loop {
            if let Some(bytes) = self.0.get_mut().try_receive_into(buffer)? {
                self.0.get_mut().disarm();
                return Poll::Ready(Ok(bytes));
            }
            if self.0.get_mut().arm()?.is_waiting() {
                ready!(poll_rung(&mut self.0, context))?;
            }
        }
    }
}

impl<R: BorrowMut<AsyncReceiver>> MessageStream<R> {
    /// The receiver, with everything that the stream has not returned.
    pub fn into_inner(self) -> R {
        self.receiver
    }
}

impl<R: BorrowMut<AsyncReceiver> + Unpin> Stream for MessageStream<R> {
    type Item = Result<Vec<u8>>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Vec<u8>>>> {
        let this = self.get_mut();
        if this.is_over {
            return Poll::Ready(None);
        }
        // A sender that is always faster must not keep this task's thread from the others.
        ready!(pin!(consume_budget()).poll(context));
        let mut bytes = Vec::new();
        match ready!(this.receiver.borrow_mut().poll_receive_into(context, &mut bytes)) {
            Ok(_) => Poll::Ready(Some(Ok(bytes))),
            Err(error) => {
                this.is_over = true;
                Poll::Ready(if error.is_closed() { None } else { Some(Err(error)) })
            }
        }
    }
}

impl<R: BorrowMut<AsyncReceiver> + Unpin> FusedStream for MessageStream<R> {
    fn is_terminated(&self) -> bool {
        self.is_over
    }
}

/// An [`AsyncSender`] as a [`Sink`]: see [`AsyncSender::into_sink`].
#[derive(Debug)]
pub struct MessageSink {
    /// `None` once it is closed.
    sender: Option<AsyncSender>,
    /// A message that was accepted when the lane had no space for it. The buffer is kept.
    pending: Vec<u8>,
    is_pending: bool,
}

impl AsyncSender {
    /// A [`Sink`] of messages, of any type that is `AsRef<[u8]>`.
    ///
    /// - `poll_ready` waits while the lane has no space for the last accepted message: this is the backpressure.
    /// - `start_send` copies the message into the lane. A message for which the lane has no space waits in a buffer of
    ///   the sink, at most one: `poll_ready` did not know its size.
    /// - `poll_flush` waits until every accepted message is in the lane. The receiver may not have received it yet:
    ///   [`crate::Sender::wait_released`] waits for that.
    /// - `poll_close` flushes, and then closes the channel: the receiver receives everything, and then the end.
    ///
    /// None of them blocks the thread. Errors are those of [`AsyncSender::send`]; [`Error::Refused`] after a close, and
    /// from `start_send` without `poll_ready` before it. With an error from `start_send` the message was not accepted.
    /// A message that was accepted stays in the sink until it is in the lane, also after an error, and the next
    /// `poll_ready` or `poll_flush` tries it again: that succeeds on a path channel, whose next receiver gets it.
    /// [`MessageSink::into_inner`] returns it. Flush before dropping the sink.
    pub fn into_sink(self) -> MessageSink {
        MessageSink { sender: Some(self), pending: Vec::new(), is_pending: false }
    }
}

fn closed() -> Error {
    Error::Refused("the sink is closed: make a new channel to send more".to_owned())
}

impl MessageSink {
    /// The sender, `None` after a close, and the accepted message that is not in the lane yet.
    pub fn into_inner(self) -> (Option<AsyncSender>, Option<Vec<u8>>) {
        (self.sender, self.is_pending.then_some(self.pending))
    }

    /// As `poll_flush`, without the type of the messages that `SinkExt::flush` needs to know.
    ///
    /// # Errors
    /// As [`AsyncSender::send`].
    pub async fn flush(&mut self) -> Result<()> {
        poll_fn(|context| self.poll_written(context)).await
    }

    /// As `poll_close`, without the type of the messages that `SinkExt::close` needs to know.
    ///
    /// # Errors
    /// As [`AsyncSender::send`].
    pub async fn close(&mut self) -> Result<()> {
        poll_fn(|context| self.poll_closed(context)).await
    }

    fn poll_closed(&mut self, context: &mut Context<'_>) -> Poll<Result<()>> {
        if self.sender.is_some() {
            ready!(self.poll_written(context))?;
            if let Some(sender) = self.sender.take() {
                sender.into_inner().close()?;
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Waits until the pending message is in the lane.
    fn poll_written(&mut self, context: &mut Context<'_>) -> Poll<Result<()>> {
        let AsyncSender(endpoint) = self.sender.as_mut().ok_or_else(closed)?;
        while self.is_pending {
            if endpoint.get_mut().try_send(&self.pending)? == Sent::Sent {
                self.is_pending = false;
                endpoint.get_mut().disarm();
            } else if endpoint.get_mut().arm(self.pending.len())?.is_waiting() {
                ready!(poll_rung(endpoint, context))?;
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl<T: AsRef<[u8]>> Sink<T> for MessageSink {
    type Error = Error;

    fn poll_ready(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_written(context))?;
        // A receiver that is always fast enough must not keep this task's thread from the others.
        pin!(consume_budget()).poll(context).map(Ok)
    }

    fn start_send(self: Pin<&mut Self>, message: T) -> Result<()> {
        let this = self.get_mut();
        if this.is_pending {
            return Err(Error::Refused("the sink has no space: call poll_ready before start_send".to_owned()));
        }
        let message = message.as_ref();
        if this.sender.as_mut().ok_or_else(closed)?.try_send(message)? != Sent::Sent {
            this.pending.clear();
            this.pending.extend_from_slice(message);
            this.is_pending = true;
        }
        Ok(())
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        self.get_mut().poll_written(context)
    }

    fn poll_close(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        self.get_mut().poll_closed(context)
    }
}
