//! Replies to one call, copied or written in place.

use super::frame::{HEADER_BYTES, Header, Kind, check_size};
use super::leader;
use super::reply_lock::Contents;
use super::session::{ReplyPath, forget_reservation};
use super::session_ref::SessionRef;
use crate::body::Flag;
use crate::outbox::FrameSender as _;
use pelton_channel::{Deadline, Error, Result, Sent, Traceparent};
use pelton_os::Peer;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

/// Replies to one request. Dropped without a reply, it abandons the call, and the client's completion says so.
///
/// With its request ([`crate::Request::split`]) it is borrowed until the service is used again. It replies without a
/// lock as long as no [`Responder`], which borrows nothing, of the same client exists.
#[must_use = "dropping it abandons the call"]
pub struct BorrowedResponder<'a> {
    pub(super) session: SessionRef<'a>,
    pub(super) id: u64,
    pub(super) deadline: u64,
    pub(super) is_answered: Flag,
}

/// Replies to one request at any time, on any thread: a responder that borrows nothing.
pub type Responder = BorrowedResponder<'static>;

impl BorrowedResponder<'_> {
    /// Replies; after parts, with the last of them. Does not wait: a reply for which the client has no space is kept
    /// until it has.
    ///
    /// # Errors
    /// [`Error::PeerDied`] and [`Error::Closed`] when the client has left: the reply is dropped. [`Error::TooLarge`]
    /// for more than the client takes ([`Options::call_bytes_max`](pelton_channel::Options::call_bytes_max) there); the
    /// call is abandoned. [`Error::Refused`] for a notification; [`Error::Corrupt`], [`Error::Forked`].
    #[inline(always)]
    pub fn reply(mut self, reply: &[u8]) -> Result<()> {
        self.send_final(Header::new(Kind::Reply, self.id), reply)
    }

    /// Fails the call with a code and bytes of the service's own meaning. Does not wait.
    ///
    /// # Errors
    /// As [`Responder::reply`].
    pub fn fail(mut self, code: u32, bytes: &[u8]) -> Result<()> {
        self.send_final(Header { code, ..Header::new(Kind::Failed, self.id) }, bytes)
    }

    /// Ends a reply that was sent in parts, or has none. Does not wait.
    ///
    /// # Errors
    /// As [`Responder::reply`].
    pub fn end(mut self) -> Result<()> {
        self.send_final(Header::new(Kind::End, self.id), &[])
    }

    /// Sends a part of the reply. Waits until the client has space for it. Call it on a thread of its own: in the loop
    /// that takes requests, this wait stops the requests of all clients. On another thread it pauses the requests of
    /// this client alone. Each request that was taken before may make one more thread of [`crate::Service::run`] wait.
    ///
    /// # Errors
    /// As [`Responder::reply`]; the call stays open after [`Error::TooLarge`]. [`Error::Refused`] also instead of
    /// waiting while this thread has space reserved for another reply.
    pub fn part(&mut self, part: &[u8]) -> Result<()> {
        self.send_part(part, Deadline::Never).map(|_| ())
    }

    /// As [`Responder::part`], if there is space now. [`Sent::Full`] otherwise: [`crate::Service::arm`] then reports to
    /// the service's event loop when there is. Never waits.
    ///
    /// # Errors
    /// As [`Responder::part`].
    pub fn try_part(&mut self, part: &[u8]) -> Result<Sent> {
        self.send_part(part, Deadline::Now)
    }

    /// As [`Responder::part`], until `deadline`: [`Sent::TimedOut`] when it passes.
    ///
    /// # Errors
    /// As [`Responder::part`].
    pub fn part_until(&mut self, part: &[u8], deadline: impl Into<Deadline>) -> Result<Sent> {
        self.send_part(part, deadline.into())
    }

    /// Reserves space for a reply, or a part of it, of `bytes`, to be written in place; `None` when there is none now:
    /// reply with a copy then. Write it without delay: meanwhile every other reply to this client waits, and this
    /// thread can reserve no space for another reply. Never waits for the client. A reservation that is leaked
    /// (`mem::forget`) ends when its responder is next used, or dropped: do that on the same thread.
    ///
    /// # Errors
    /// As [`Responder::reply`]; [`Error::TooLarge`] also for more than the lane's largest message less 24 bytes;
    /// [`Error::Refused`] also while a [`Responder`] on this thread has space reserved for another reply.
    #[inline(always)]
    pub fn try_reserve(&mut self, bytes: usize) -> Result<Option<ReplyReservation<'_>>> {
        self.check(bytes)?;
        let is_reserved = self.session.reserve_fast(bytes) || self.session.reserve_slow(self.id, bytes)?;
        Ok(if is_reserved { Some(self.reservation()) } else { None })
    }

    /// The reservation that this has just made.
    #[inline(always)]
    pub(super) fn reservation(&mut self) -> ReplyReservation<'_> {
        ReplyReservation { responder: NonNull::from(self).cast(), borrow: PhantomData }
    }

    /// The client's process.
    pub fn peer(&self) -> Option<Peer> {
        self.session.peer
    }

    /// When the client stops awaiting the reply, if it has said so. The service decides what to do about it: nothing is
    /// dropped because of a deadline.
    pub fn deadline(&self) -> Option<Instant> {
        self.session.shared.clock.instant_of(self.deadline)
    }

    /// The position in a trace with which the client has submitted the request ([`crate::Client::submit_traced`]):
    /// the parent of this service's spans. `None` for a request without one, or with an invalid one, and for a
    /// notification.
    pub fn traceparent(&self) -> Option<Traceparent> {
        if self.id == 0 || self.session.is_forked() { None } else { self.session.traceparent(self.id) }
    }

    /// Whether nobody awaits the reply any more: the client has cancelled the call, or has left. The service detects
    /// that when it polls for requests: on another thread, or between two requests. In a handler of
    /// [`crate::Service::run`] this function polls, if all threads are in handlers. Reply all the same, in whatever way
    /// is cheapest: until then the client cannot reuse the call's slot.
    pub fn is_cancelled(&self) -> bool {
        let is_cancelled = || self.session.is_cancelled(self.id);
        self.id != 0 && (is_cancelled() || (leader::poll_ahead(&self.session.shared) && is_cancelled()))
    }

    /// Detaches it from its request.
    pub(super) fn detach(mut self) -> Responder {
        let is_answered = self.is_answered;
        // What remains abandons nothing.
        self.is_answered = Flag::Yes;
        BorrowedResponder { session: self.session.detach(), id: self.id, deadline: self.deadline, is_answered }
    }

    #[inline(always)]
    pub(super) fn check(&self, bytes: usize) -> Result<()> {
        if self.id == 0 {
            return Err(Error::Refused("a notification is not answered".to_owned()));
        }
        if self.is_answered.is_set() {
            return Err(Error::Refused("the call has been answered".to_owned()));
        }
        check_size(bytes, self.session.bytes_max)
    }

    #[inline(always)]
    pub(super) fn send_final(&mut self, header: Header, payload: &[u8]) -> Result<()> {
        self.check(payload.len())?;
        let sent = self.session.send_final(header, payload);
        // Also if the client has left.
        self.is_answered = Flag::Yes;
        sent
    }

    fn send_part(&mut self, part: &[u8], deadline: Deadline) -> Result<Sent> {
        self.check(part.len())?;
        self.session.send_part(Header::new(Kind::Part, self.id), part, deadline)
    }
}

impl std::fmt::Debug for BorrowedResponder<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Responder").field("peer", &self.peer()).finish_non_exhaustive()
    }
}

impl Drop for BorrowedResponder<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if !self.is_answered.is_set() {
            self.abandon();
        }
    }
}

impl BorrowedResponder<'_> {
    #[cold]
    #[inline(never)]
    fn abandon(&mut self) {
        // An error means that the client has left.
        let _ = self.session.send_final(Header::new(Kind::Abandoned, self.id), &[]);
    }
}

/// Reserved space for a reply, to be written in place; see [`Responder::try_reserve`]. Dropping it aborts: nothing is
/// sent. It stays on its thread.
#[must_use = "dropping it aborts: nothing is sent"]
pub struct ReplyReservation<'a> {
    /// Borrowed for `'a`, and by that the way to the client, which has the space. One pointer: `docs/decisions/0023`.
    responder: NonNull<BorrowedResponder<'static>>,
    borrow: PhantomData<&'a mut ()>,
}

impl ReplyReservation<'_> {
    #[inline(always)]
    fn responder(&self) -> &BorrowedResponder<'_> {
        // SAFETY: `BorrowedResponder::reservation` borrowed the responder uniquely for as long as this reservation
        // lives. The reference returned here ends earlier.
        unsafe { self.responder.as_ref() }
    }

    #[inline(always)]
    fn path(&self) -> &Contents<ReplyPath> {
        // SAFETY: `SessionRef::reserve_fast` or `reserve_slow` kept the guard, so this reservation alone accesses the
        // contents. It borrows this reservation.
        unsafe { &*self.responder().session.replies.kept() }
    }

    #[inline(always)]
    fn path_mut(&mut self) -> &mut Contents<ReplyPath> {
        // SAFETY: as in `path`, and this reservation is borrowed uniquely.
        unsafe { &mut *self.responder().session.replies.kept() }
    }

    /// Replies with all of the space, and ends the call. Does not wait.
    ///
    /// # Errors
    /// [`Error::Forked`]; nothing is sent then.
    pub fn reply(self) -> Result<()> {
        let bytes = self.len();
        self.reply_bytes(bytes)
    }

    /// Replies with the first `bytes` of the space, and ends the call. Does not wait.
    ///
    /// # Errors
    /// [`Error::TooLarge`] when `bytes` is more than was reserved, [`Error::Forked`]; nothing is sent then.
    #[inline(always)]
    pub fn reply_bytes(mut self, bytes: usize) -> Result<()> {
        self.publish(Kind::Reply, bytes)?;
        // SAFETY: as in `responder`, and this reservation has no other reference to it now.
        unsafe { self.responder.as_mut() }.is_answered = Flag::Yes;
        Ok(())
    }

    /// Sends all of the space as a part of the reply. Does not wait.
    ///
    /// # Errors
    /// As [`ReplyReservation::reply`].
    pub fn part(self) -> Result<()> {
        let bytes = self.len();
        self.part_bytes(bytes)
    }

    /// Sends the first `bytes` of the space as a part of the reply. Does not wait.
    ///
    /// # Errors
    /// As [`ReplyReservation::reply_bytes`].
    pub fn part_bytes(mut self, bytes: usize) -> Result<()> {
        self.publish(Kind::Part, bytes)
    }

    #[inline(always)]
    fn publish(&mut self, kind: Kind, bytes: usize) -> Result<()> {
        let id = self.responder().id;
        let space = self.path().reserved();
        if bytes > space.bytes as usize - HEADER_BYTES {
            let bytes_max = space.bytes - HEADER_BYTES as u64;
            return Err(Error::TooLarge { bytes: bytes as u64, bytes_max });
        }
        if kind.is_final() {
            self.responder().session.end(id);
        }
        self.path_mut().outbox.sender.publish_body(space, Header::new(kind, id).words(), bytes)
    }
}

impl std::ops::Deref for ReplyReservation<'_> {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        let path = self.path();
        path.outbox.sender.body(path.reserved())
    }
}

impl std::ops::DerefMut for ReplyReservation<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        let path = self.path_mut();
        let space = path.reserved();
        path.outbox.sender.body_mut(space)
    }
}

impl AsRef<[u8]> for ReplyReservation<'_> {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl std::fmt::Debug for ReplyReservation<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReplyReservation").field("bytes", &self.len()).finish_non_exhaustive()
    }
}

impl Drop for ReplyReservation<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        // Rarely anything is to be released or notified. A dropped reservation too has ended the announcement of a
        // sleep. In a forked child either this test is still correct, or `release` detects the fork.
        if self.path().is_watched() || self.responder().session.shared.is_draining.load(Relaxed) {
            self.release();
        }
    }
}

impl ReplyReservation<'_> {
    #[cold]
    #[inline(never)]
    fn release(&mut self) {
        let session = &self.responder().session;
        // SAFETY: as in `path_mut`; no other reference to the contents lives.
        let lock = unsafe { &mut *session.replies.kept() }.take_kept();
        // The others wait in the parent process. Here the doorbell is closed, and its number may be another
        // descriptor's.
        if session.is_forked() {
            return;
        }
        // SAFETY: as in `path_mut`: `lock`, or that there is no other reference, still excludes other threads.
        let path = unsafe { &mut *session.replies.kept() };
        if session.has_deferred() {
            // An error means that the client has left. The loop detects that by the client's lane.
            let _ = session.flush(path);
        }
        session.pass_on_space(path);
        if lock.is_some() {
            forget_reservation();
        }
        drop(lock);
        session.note_final();
    }
}
