//! Sending for bindings, whose languages know no borrows: what is reserved is kept beside the sender, as long as that is used for
//! nothing else. No part of the documented interface.

use super::{Reservation, Sender};
use pelton_lane::ReservedSpace;

/// A reservation without its borrow of the sender: see [`Reservation::into_raw`].
#[doc(hidden)]
#[derive(Debug)]
pub struct RawReservation(ReservedSpace);

impl Sender {
    /// Reserves in the common case: the handle is in use and there is room at the tail. For bindings.
    #[doc(hidden)]
    #[inline(always)]
    pub fn reserve_at_once(&mut self, bytes: usize) -> Option<Reservation<'_>> {
        if !self.owner.is_current() {
            return None;
        }
        let space = self.parts.lane.reserve_fast(bytes as u64)?;
        Some(Reservation { sender: self, space })
    }

    /// Publishes the first `bytes` of a reservation that [`Reservation::into_raw`] took from its borrow, from where it is kept;
    /// false when it has fewer, or the process is a fork. For bindings.
    ///
    /// # Safety
    /// As for [`Sender::reservation_from_raw`]; it is committed once.
    #[doc(hidden)]
    #[inline(always)]
    pub unsafe fn commit_raw(&mut self, raw: &RawReservation, bytes: usize) -> bool {
        let fits = bytes as u64 <= raw.0.bytes && !self.owner.is_forked();
        if fits {
            self.publish(raw.0, bytes);
        }
        fits
    }

    /// The reservation again that [`Reservation::into_raw`] took from its borrow. For bindings.
    ///
    /// # Safety
    /// It was this sender's, which was not used since.
    #[doc(hidden)]
    #[inline(always)]
    pub unsafe fn reservation_from_raw(&mut self, raw: RawReservation) -> Reservation<'_> {
        Reservation { sender: self, space: raw.0 }
    }

    /// Whether this process is a fork of the one that made the handle. For bindings.
    #[doc(hidden)]
    pub fn is_forked(&self) -> bool {
        self.owner.is_forked()
    }
}

impl Reservation<'_> {
    /// The reservation without its borrow: for bindings, whose languages know no borrows.
    /// [`Sender::reservation_from_raw`] takes it back.
    #[doc(hidden)]
    #[inline(always)]
    pub fn into_raw(self) -> RawReservation {
        RawReservation(self.space)
    }
}
