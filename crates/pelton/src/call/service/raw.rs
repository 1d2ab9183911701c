//! A service for bindings, whose languages know no borrows. No part of the documented interface.

use super::Service;
use crate::call::RawRequest;

impl Service {
    /// Gives the bytes back that [`Request::into_raw_parts`] took from their borrow. For bindings.
    ///
    /// # Safety
    /// They are this service's, of which no other request was taken since.
    #[doc(hidden)]
    pub unsafe fn release_raw(&mut self, raw: RawRequest) {
        // SAFETY: the caller's promise.
        drop(unsafe { raw.into_body(&mut self.requests) });
    }

    /// Whether this process is a fork of the one that made the handle. For bindings.
    #[doc(hidden)]
    pub fn is_forked(&self) -> bool {
        self.desk.owner.is_forked()
    }
}
