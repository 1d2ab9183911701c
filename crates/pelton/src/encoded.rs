//! Messages that are values of any type with serde, in the encoding of postcard: compact bytes without names of fields.
//!
//! Both sides have to agree on the type, also on `i32` or `u64`: the message carries neither a name nor a version.
//! For types that are their bytes, the module `values` (feature `zerocopy`) costs less.
//!
//! ```
//! # fn main() -> pelton::Result<()> {
//! use pelton::encoded::{Decode as _, SendEncoded as _};
//!
//! #[derive(serde::Serialize, serde::Deserialize, Debug, PartialEq)]
//! struct Order {
//!     customer: String,
//!     amounts: Vec<u32>,
//! }
//!
//! let order = Order { customer: "Ada".to_owned(), amounts: vec![3, 1] };
//! let (mut sender, mut receiver) = pelton::Options::new().threads()?;
//! sender.send_encoded(&order)?;
//! assert_eq!(receiver.receive()?.decode::<Order>()?, order);
//! # Ok(())
//! # }
//! ```
//!
//! Calls have the same:
//!
//! ```
//! # #[cfg(feature = "call")]
//! # fn main() -> pelton::Result<()> {
//! use pelton::encoded::{CallEncoded as _, Decode as _, ReplyEncoded as _};
//! let name = format!("unix:{}/encoded-doc-{}", std::env::temp_dir().display(), std::process::id());
//! let mut service = pelton::Service::listen(&name)?;
//! // Usually another process:
//! let asking = std::thread::spawn(move || -> pelton::Result<u64> {
//!     let mut client = pelton::Client::connect(&name)?;
//!     client.call_encoded(&("add", [40u64, 2]))?.ok()?.decode()
//! });
//! let request = service.receive()?;
//! let (verb, numbers): (String, [u64; 2]) = request.decode()?;
//! assert_eq!(verb, "add");
//! request.reply_encoded(&numbers.iter().sum::<u64>())?;
//! assert_eq!(asking.join().unwrap()?, 42);
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "call"))]
//! # fn main() {}
//! ```

use crate::{Deadline, Error, Result, Sender, Sent};
use postcard::ser_flavors::Size;
use serde::{Deserialize, Serialize};
use std::any::type_name;

#[cfg(feature = "call")]
use crate::{BorrowedResponder, Client, Completion, Request};
#[cfg(feature = "call")]
use std::cell::RefCell;

/// Encodes a value, and sends it as a message.
///
/// A first pass finds out the size, a second one writes into the lane: no buffer, no copy, no allocation.
pub trait SendEncoded {
    /// Sends a value. Waits for space, as [`Sender::send`] does.
    ///
    /// # Errors
    /// As [`Sender::send`]; [`Error::Value`] when the type's `Serialize` fails. Nothing is sent then.
    fn send_encoded<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<()>;

    /// As [`SendEncoded::send_encoded`], if there is space now. Never waits.
    ///
    /// # Errors
    /// As [`Sender::try_send`]; [`Error::Value`].
    fn try_send_encoded<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<Sent>;

    /// As [`SendEncoded::send_encoded`], until `deadline` on the monotonic clock.
    ///
    /// # Errors
    /// As [`Sender::send_until`]; [`Error::Value`].
    fn send_encoded_until<T: Serialize + ?Sized>(&mut self, value: &T, deadline: impl Into<Deadline>) -> Result<Sent>;
}

impl SendEncoded for Sender {
    fn send_encoded<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<()> {
        let mut space = self.reserve(encoded_bytes(value)?)?;
        let bytes = encode(value, &mut space)?;
        space.commit_bytes(bytes)
    }

    fn try_send_encoded<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<Sent> {
        let Some(mut space) = self.try_reserve(encoded_bytes(value)?)? else { return Ok(Sent::Full) };
        let bytes = encode(value, &mut space)?;
        space.commit_bytes(bytes).map(|()| Sent::Sent)
    }

    fn send_encoded_until<T: Serialize + ?Sized>(&mut self, value: &T, deadline: impl Into<Deadline>) -> Result<Sent> {
        let deadline = deadline.into();
        let Some(mut space) = self.reserve_until(encoded_bytes(value)?, deadline)? else {
            return Ok(if deadline == Deadline::Now { Sent::Full } else { Sent::TimedOut });
        };
        let bytes = encode(value, &mut space)?;
        space.commit_bytes(bytes).map(|()| Sent::Sent)
    }
}

/// Decodes bytes as a value of a type. For all that is a `[u8]`: a [`crate::Message`], a [`crate::Held`], the messages
/// of a [`crate::Batch`], requests and completions, and buffers.
pub trait Decode {
    /// The value that the bytes encode, all of them. Does not wait. The value may borrow from the bytes (`&str`).
    ///
    /// Decoding a [`crate::Message`] reads memory that the sender wrote, and trusts the sender not to write after it
    /// has committed: a text could change after it was checked to be UTF-8. For a sender that is not trusted, decode a
    /// copy: [`crate::Receiver::receive_into`]. The bytes themselves need not be trusted.
    ///
    /// # Errors
    /// [`Error::Value`]: the bytes encode no such value, or more than one.
    fn decode<'a, T: Deserialize<'a>>(&'a self) -> Result<T>;
}

impl Decode for [u8] {
    fn decode<'a, T: Deserialize<'a>>(&'a self) -> Result<T> {
        let failed = |problem: String| Error::Value { type_name: type_name::<T>(), problem };
        match postcard::take_from_bytes(self) {
            Ok((value, [])) => Ok(value),
            Ok((_, rest)) => Err(failed(format!(
                "{} of {} bytes are left over: both sides need the same type",
                rest.len(),
                self.len()
            ))),
            Err(error) => {
                Err(failed(format!("decoding {} bytes failed ({error}): both sides need the same type", self.len())))
            }
        }
    }
}

/// Encodes a value, and calls a service with it.
#[cfg(feature = "call")]
#[cfg_attr(docsrs, doc(cfg(feature = "call")))]
pub trait CallEncoded {
    /// Calls with a value, and waits for the completion, as [`Client::call`] does. [`Completion::ok`] returns the
    /// reply, and [`Decode::decode`] reads it. Encodes into a buffer that each thread keeps.
    ///
    /// # Errors
    /// As [`Client::call`]; [`Error::Value`] when the type's `Serialize` fails. Nothing is sent then.
    fn call_encoded<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<Completion<'_>>;
}

#[cfg(feature = "call")]
impl CallEncoded for Client {
    fn call_encoded<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<Completion<'_>> {
        thread_local! { static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) } }
        // Taken out: a type's `Serialize` may make a call of its own.
        let buffer = BUFFER.take();
        let buffer = postcard::to_extend(value, cleared(buffer)).map_err(|error| cannot_encode::<T>(error))?;
        let reply = self.call(&buffer);
        BUFFER.set(buffer);
        reply
    }
}

#[cfg(feature = "call")]
fn cleared(mut buffer: Vec<u8>) -> Vec<u8> {
    buffer.clear();
    buffer
}

/// Encodes a value, and replies with it: a [`Request`], or a [`crate::Responder`] on any thread.
#[cfg(feature = "call")]
#[cfg_attr(docsrs, doc(cfg(feature = "call")))]
pub trait ReplyEncoded {
    /// Replies with a value. Does not wait. Encodes straight into the client's lane where that has space, and else into
    /// a copy that waits for space.
    ///
    /// # Errors
    /// As [`crate::Responder::reply`]; [`Error::Value`] when the type's `Serialize` fails: the call is abandoned then.
    fn reply_encoded<T: Serialize + ?Sized>(self, value: &T) -> Result<()>;
}

#[cfg(feature = "call")]
impl ReplyEncoded for Request<'_> {
    fn reply_encoded<T: Serialize + ?Sized>(mut self, value: &T) -> Result<()> {
        match reply_in_place(self.split().1, value)? {
            true => Ok(()),
            false => self.reply(&postcard::to_stdvec(value).map_err(|error| cannot_encode::<T>(error))?),
        }
    }
}

#[cfg(feature = "call")]
impl ReplyEncoded for BorrowedResponder<'_> {
    fn reply_encoded<T: Serialize + ?Sized>(mut self, value: &T) -> Result<()> {
        match reply_in_place(&mut self, value)? {
            true => Ok(()),
            false => self.reply(&postcard::to_stdvec(value).map_err(|error| cannot_encode::<T>(error))?),
        }
    }
}

/// Returns whether there was space.
#[cfg(feature = "call")]
fn reply_in_place<T: Serialize + ?Sized>(responder: &mut BorrowedResponder<'_>, value: &T) -> Result<bool> {
    let bytes = encoded_bytes(value)?;
    let mut space = match responder.try_reserve(bytes) {
        Ok(Some(space)) => space,
        // The lane's largest message is smaller than the largest reply, which goes in pieces.
        Ok(None) | Err(Error::TooLarge { .. }) => return Ok(false),
        Err(error) => return Err(error),
    };
    let bytes = encode(value, &mut space)?;
    space.reply_bytes(bytes).map(|()| true)
}

/// The size of a value's encoding.
fn encoded_bytes<T: Serialize + ?Sized>(value: &T) -> Result<usize> {
    postcard::serialize_with_flavor(value, Size::default()).map_err(|error| cannot_encode::<T>(error))
}

/// Encodes a value into `space`; returns the number of bytes, which may be less than the size before only if its
/// `Serialize` is not the same twice.
fn encode<T: Serialize + ?Sized>(value: &T, space: &mut [u8]) -> Result<usize> {
    postcard::to_slice(value, space).map(|bytes| bytes.len()).map_err(|error| cannot_encode::<T>(error))
}

#[cold]
fn cannot_encode<T: ?Sized>(error: postcard::Error) -> Error {
    let problem = format!("encoding failed ({error}): see its `Serialize`");
    Error::Value { type_name: type_name::<T>(), problem }
}
