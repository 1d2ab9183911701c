//! Messages that are values of a Rust type, without a copy and without an encoding.
//!
//! A type qualifies if any bytes are a value of it and it has no padding: `#[repr(C)]` structs of integers and arrays,
//! which derive the traits of the crate `zerocopy`. The sender copies the value's bytes into the lane. The receiver
//! gets a reference into the lane.
//!
//! Both sides have to agree on the type and on its layout: the message carries neither a name nor a version. The byte
//! order is that of the machine.
//!
//! ```
//! # fn main() -> pelton::Result<()> {
//! use pelton::values::{SendValue as _, View as _};
//! use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};
//!
//! #[derive(FromBytes, Immutable, IntoBytes, KnownLayout, Debug, PartialEq)]
//! #[repr(C)]
//! struct Price {
//!     instrument: u64,
//!     bid: u32,
//!     ask: u32,
//! }
//!
//! let (mut sender, mut receiver) = pelton::Options::new().threads()?;
//! sender.send_value(&Price { instrument: 7, bid: 101, ask: 103 })?;
//! let message = receiver.receive()?;
//! let price: &Price = message.view()?;
//! assert_eq!((price.instrument, price.bid, price.ask), (7, 101, 103));
//! # Ok(())
//! # }
//! ```

use crate::{Deadline, Error, Result, Sender, Sent};
use std::any::type_name;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Sends the bytes of a value as a message.
pub trait SendValue {
    /// Sends a value. Waits for space, as [`Sender::send`] does.
    ///
    /// # Errors
    /// As [`Sender::send`].
    fn send_value<T: IntoBytes + Immutable + ?Sized>(&mut self, value: &T) -> Result<()>;

    /// As [`SendValue::send_value`], if there is space now. Never waits.
    ///
    /// # Errors
    /// As [`Sender::try_send`].
    fn try_send_value<T: IntoBytes + Immutable + ?Sized>(&mut self, value: &T) -> Result<Sent>;

    /// As [`SendValue::send_value`], until `deadline` on the monotonic clock.
    ///
    /// # Errors
    /// As [`Sender::send_until`].
    fn send_value_until<T: IntoBytes + Immutable + ?Sized>(
        &mut self,
        value: &T,
        deadline: impl Into<Deadline>,
    ) -> Result<Sent>;
}

impl SendValue for Sender {
    #[inline(always)]
    fn send_value<T: IntoBytes + Immutable + ?Sized>(&mut self, value: &T) -> Result<()> {
        self.send(value.as_bytes())
    }

    #[inline(always)]
    fn try_send_value<T: IntoBytes + Immutable + ?Sized>(&mut self, value: &T) -> Result<Sent> {
        self.try_send(value.as_bytes())
    }

    #[inline(always)]
    fn send_value_until<T: IntoBytes + Immutable + ?Sized>(
        &mut self,
        value: &T,
        deadline: impl Into<Deadline>,
    ) -> Result<Sent> {
        self.send_until(value.as_bytes(), deadline)
    }
}

/// Reads bytes as a value of a type, in place. For all that is a `[u8]`: a [`crate::Message`], a [`crate::Held`], the
/// messages of a [`crate::Batch`], requests and completions, and buffers.
pub trait View {
    /// The value that the bytes are, all of them. Does not wait, copies nothing and allocates nothing.
    ///
    /// A message, and a request or reply that came in one record, begins at a multiple of 8 bytes. So a type with an
    /// alignment of at most 8 always fits; one with a larger alignment fails for some messages. A buffer of one's own,
    /// as a `Vec<u8>`, may begin anywhere: [`View::read`] needs no alignment.
    ///
    /// The reference is into memory that the sender wrote: as with [`crate::Message`], this trusts the sender not to
    /// write after it has committed. Any bytes are a value of `T`, so such a sender could change its fields, and no
    /// more. For one that is not trusted, copy: [`View::read`], once, and check the copy.
    ///
    /// # Errors
    /// [`Error::Value`] with the size, or the address, found and wanted.
    fn view<T: FromBytes + KnownLayout + Immutable>(&self) -> Result<&T>;

    /// As [`View::view`], of a message that is any number of such values.
    ///
    /// # Errors
    /// As [`View::view`]: the size has to be a multiple of that of `T`.
    fn view_slice<T: FromBytes + Immutable>(&self) -> Result<&[T]>;

    /// A copy of the value that the bytes are. Needs no alignment. Does not wait.
    ///
    /// # Errors
    /// [`Error::Value`] with the size found and wanted.
    fn read<T: FromBytes>(&self) -> Result<T>;
}

impl View for [u8] {
    #[inline]
    fn view<T: FromBytes + KnownLayout + Immutable>(&self) -> Result<&T> {
        T::ref_from_bytes(self).map_err(|_| mismatch::<T>(self, size_of::<T>() == self.len()))
    }

    #[inline]
    fn view_slice<T: FromBytes + Immutable>(&self) -> Result<&[T]> {
        let is_whole = size_of::<T>() != 0 && self.len().is_multiple_of(size_of::<T>());
        match <[T]>::ref_from_bytes(self) {
            Ok(values) if is_whole => Ok(values),
            _ => Err(mismatch::<T>(self, is_whole)),
        }
    }

    #[inline]
    fn read<T: FromBytes>(&self) -> Result<T> {
        T::read_from_bytes(self).map_err(|_| mismatch::<T>(self, false))
    }
}

/// Why the bytes are no `T`: their address, if the size is right.
#[cold]
fn mismatch<T>(bytes: &[u8], is_size_right: bool) -> Error {
    let (size, align) = (size_of::<T>(), align_of::<T>());
    let problem = match is_size_right {
        true => {
            let at = 1 << bytes.as_ptr().addr().trailing_zeros().min(12);
            format!(
                "they begin at a multiple of {at}, wanted {align}: a message begins at a multiple of 8; copy with `read`"
            )
        }
        false => format!("they are {} bytes, wanted {size}: both sides need the same type", bytes.len()),
    };
    Error::Value { type_name: type_name::<T>(), problem }
}
