//! Copies of messages that the caller owns: one at a time, or by an iterator.

use super::Receiver;
use crate::error::Result;
use std::iter::FusedIterator;

impl Receiver {
    /// Copies the next message into a new `Vec`, and releases it. Waits for a message. Safe against any peer, as
    /// [`Receiver::receive_into`], which uses one buffer again and again.
    ///
    /// ```
    /// # fn main() -> pelton::Result<()> {
    /// let (mut sender, mut receiver) = pelton::Options::new().threads()?;
    /// sender.send(b"hello")?;
    /// assert_eq!(receiver.receive_vec()?, b"hello");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Receiver::receive`].
    pub fn receive_vec(&mut self) -> Result<Vec<u8>> {
        let mut message = Vec::new();
        self.receive_into(&mut message)?;
        Ok(message)
    }

    /// An iterator over copies of the messages, until the sender closes. `next` waits for a message.
    ///
    /// Each item is a `Vec<u8>` of its own: an allocation and a copy for each message. An iterator cannot return a
    /// message in place, because its items may outlive the next call of `next`, and the message's space may not. To
    /// receive in place, call [`Receiver::receive`] in a loop.
    ///
    /// The iterator ends (`None`) when the sender has closed and every message was returned. Any other error of
    /// [`Receiver::receive`] is an item, after which the iterator ends as well; the receiver can be used again
    /// afterwards. On a path channel, call this again to continue with the next sender. An iterator that is dropped
    /// early has taken only what it returned.
    ///
    /// It is an iterator and not a `for_each` with a function: `?`, `break`, `take` and `collect` work with it.
    ///
    /// ```
    /// # fn main() -> pelton::Result<()> {
    /// let (mut sender, mut receiver) = pelton::Options::new().threads()?;
    /// sender.send(b"one")?;
    /// sender.send(b"two")?;
    /// sender.close()?;
    /// for message in receiver.messages() {
    ///     println!("{} bytes", message?.len());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn messages(&mut self) -> Messages<'_> {
        Messages { receiver: self, is_over: false }
    }
}

/// Copies of a receiver's messages: see [`Receiver::messages`].
#[derive(Debug)]
pub struct Messages<'a> {
    receiver: &'a mut Receiver,
    is_over: bool,
}

impl Iterator for Messages<'_> {
    type Item = Result<Vec<u8>>;

    fn next(&mut self) -> Option<Result<Vec<u8>>> {
        if self.is_over {
            return None;
        }
        match self.receiver.receive_vec() {
            Ok(message) => Some(Ok(message)),
            Err(error) => {
                self.is_over = true;
                if error.is_closed() { None } else { Some(Err(error)) }
            }
        }
    }
}

impl FusedIterator for Messages<'_> {}
