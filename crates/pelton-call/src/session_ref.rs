//! References to a session: the loop's own, and one that goes with each request, borrowed or detached.
//!
//! The loop lends a reference with a request, and takes it back before it does anything else: nobody else uses the
//! service until then. While no reference is detached, the borrowed one is the only access to the session, so it writes
//! replies without the lock. A detached reference takes the lock.
//!
//! A reference is an uncounted pointer: to count it would cost two locked instructions for each request. The session is
//! freed by the last of its owner and the detached references ([`DetachedCount`](super::edges::DetachedCount));
//! borrowed ones end before. All of that is in this file; `docs/decisions/0016` has the benchmark that defends it.

use super::frame::Header;
use super::session::{ReplyGuard, Session, has_reservation, reservation_is_held};
use crate::body::Flag;
use crate::outbox::FrameSender as _;
use pelton_channel::{Deadline, Error, Result, Sent};
use pelton_os::{Pollable, Ready, poll_until};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The loop's reference to a session. Dropping it closes the session.
#[derive(Debug)]
pub(super) struct SessionOwner {
    /// One count for this and all references that are detached. The last of them drops it.
    session: ManuallyDrop<Arc<Session>>,
}

/// A reference to a session that goes with a request.
#[derive(Debug)]
pub(super) struct SessionRef<'a> {
    /// Valid until this is dropped: see [`SessionOwner::lend`] and [`SessionRef::detach`].
    session: *const Session,
    is_borrowed: Flag,
    of_loop: PhantomData<&'a Session>,
}

// SAFETY: it stands for an `Arc<Session>`, and `Session` is `Send` and `Sync`.
unsafe impl Send for SessionRef<'_> where Arc<Session>: Send {}
// SAFETY: as for `Send`.
unsafe impl Sync for SessionRef<'_> where Arc<Session>: Sync {}

impl SessionOwner {
    pub(super) fn new(session: Arc<Session>) -> SessionOwner {
        SessionOwner { session: ManuallyDrop::new(session) }
    }

    /// Lends a reference with a request that the loop has just taken.
    ///
    /// # Safety
    /// Until `'a` ends, the service is used for nothing else; in particular this owner is not dropped.
    #[inline(always)]
    pub(super) unsafe fn lend<'a>(&self) -> SessionRef<'a> {
        SessionRef { session: Arc::as_ptr(&self.session), is_borrowed: Flag::Yes, of_loop: PhantomData }
    }
}

impl Deref for SessionOwner {
    type Target = Arc<Session>;
    #[inline(always)]
    fn deref(&self) -> &Arc<Session> {
        &self.session
    }
}

impl Drop for SessionOwner {
    fn drop(&mut self) {
        self.session.close();
        if self.session.detached.release() {
            // SAFETY: no reference is detached, and only this owner detaches more, so nobody accesses the session any
            // more. [return]
            unsafe { ManuallyDrop::drop(&mut self.session) };
        }
    }
}

impl<'a> SessionRef<'a> {
    /// Detaches it from the loop: for a reply at a later time, or on another thread. The caller drops what remains of
    /// this one.
    pub(super) fn detach(&mut self) -> SessionRef<'static> {
        if self.is_borrowed.is_set() {
            self.detached.add();
        }
        // Of one that was detached before, the new one takes the count over.
        self.is_borrowed = Flag::Yes;
        SessionRef { session: self.session, is_borrowed: Flag::No, of_loop: PhantomData }
    }

    /// The way to the client without the lock, if this is the only reference.
    #[inline(always)]
    fn exclusive(&self) -> Option<ReplyGuard<'_>> {
        if self.is_forked() { None } else { self.exclusive_fast() }
    }

    /// As [`SessionRef::exclusive`], for a function that finds out by itself whether this is a forked child.
    #[inline(always)]
    fn exclusive_fast(&self) -> Option<ReplyGuard<'_>> {
        let is_exclusive = self.is_borrowed.is_set() && self.detached.is_zero();
        // SAFETY: `SessionOwner::lend` guarantees that the loop does nothing meanwhile. No other reference is detached,
        // and what earlier ones wrote is visible. [return]
        is_exclusive.then(|| unsafe { self.replies.unlocked() })
    }

    /// The way to the client, for a reply to that call. Waits while another thread replies to it, unless this thread
    /// has a reservation.
    pub(super) fn lock(&self, call: u64) -> Result<ReplyGuard<'_>> {
        match self.try_exclusive()? {
            Some(path) => Ok(path),
            None => self.wait_for_lock(call).ok_or_else(reservation_is_held),
        }
    }

    /// As [`SessionRef::lock`], if no other thread has the lock.
    #[inline(always)]
    fn try_exclusive(&self) -> Result<Option<ReplyGuard<'_>>> {
        match self.exclusive() {
            Some(path) => Ok(Some(path)),
            None => self.try_lock(),
        }
    }

    /// Reserves space for a reply in place: without the lock, with an empty queue, and with space at the tail. Returns
    /// false in any other case.
    #[inline(always)]
    pub(super) fn reserve_fast(&self, bytes: usize) -> bool {
        let Some(mut path) = self.exclusive_fast().filter(|path| path.outbox.is_empty()) else { return false };
        if self.has_deferred() {
            return false;
        }
        // Fails in a forked child.
        let space = path.outbox.sender.reserve_body_fast(bytes);
        space.map(|space| path.keep_for(space)).is_some()
    }

    /// Reserves space for a reply in place, if there is some now.
    #[cold]
    #[inline(never)]
    pub(super) fn reserve_slow(&self, call: u64, bytes: usize) -> Result<bool> {
        let mut path = match self.exclusive() {
            Some(path) => path,
            None => self.lock(call)?,
        };
        // A thread keeps at most one lock, so that one note of it is enough.
        if path.is_locked() && has_reservation() {
            return Err(reservation_is_held());
        }
        if !path.outbox.is_empty() || self.has_deferred() {
            self.flush(&mut path)?;
        }
        if !path.outbox.is_empty() {
            return Ok(false);
        }
        let reserved = path.outbox.sender.try_reserve_body(bytes).map_err(|error| self.count_dropped(error))?;
        let Some(space) = reserved else { return Ok(false) };
        if path.is_locked() {
            self.note_reservation(call);
        }
        path.keep_for(space);
        Ok(true)
    }

    /// Writes the final reply of a call, or queues it until there is space. Never waits.
    #[inline]
    pub(super) fn send_final(&self, header: Header, payload: &[u8]) -> Result<()> {
        let mut path = match self.try_exclusive()? {
            Some(path) => path,
            None => match self.wait_for_lock(header.id) {
                Some(path) => path,
                None => return self.defer(header, payload),
            },
        };
        let sent = self.write_final(&mut path, header, payload);
        drop(path);
        self.note_final();
        sent
    }

    /// Writes a part of a reply. Waits for space until the deadline.
    pub(super) fn send_part(&self, header: Header, payload: &[u8], deadline: Deadline) -> Result<Sent> {
        let mut path = self.lock(header.id)?;
        let mut waiting = None;
        loop {
            self.check_gone()?;
            self.flush(&mut path)?;
            if !path.outbox.is_whole(payload.len()) && path.outbox.is_empty() {
                let kept = self.memory.take(payload.len() as u64).ok_or_else(|| self.no_memory(payload.len()))?;
                let written = path.outbox.write_or_queue(header, payload, Some(kept));
                let flushed = self.flush(&mut path);
                written.and(flushed)?;
                return Ok(Sent::Sent);
            }
            if path.outbox.try_write(header, payload).map_err(|error| self.count_dropped(error))? {
                self.pass_on_space(&mut path);
                return Ok(Sent::Sent);
            }
            let Some(deadline) = deadline.until() else {
                // Under the lock, because `Session::arm` clears the wish that it has read.
                self.want_space(payload.len());
                drop(path);
                return Ok(Sent::Full);
            };
            let now = Instant::now();
            if deadline.is_some_and(|deadline| now >= deadline) {
                return Ok(Sent::TimedOut);
            }
            // A reservation keeps its lock, so other threads would wait as long as this one. This thread also releases
            // the session's lock while it waits, and might never get it again.
            if has_reservation() {
                return Err(reservation_is_held());
            }
            let waiting = match &waiting {
                Some(waiting) => waiting,
                None => waiting.insert(Waiting::new(self)),
            };
            path = match path.is_polled {
                true => self.wait_for_poll(path, deadline.map(|deadline| deadline - now)),
                false => self.wait_for_space(path, waiting, header.id, payload.len(), deadline)?,
            };
        }
    }

    /// Polls the doorbell without the lock, so that other threads reply meanwhile. Returns when there may be space. The
    /// doorbell only wakes: the lane says whether there is space ([release]), and the lock, which is taken again, makes
    /// visible what other threads did.
    fn wait_for_space<'b>(
        &'b self,
        mut path: ReplyGuard<'b>,
        waiting: &Waiting<'_>,
        call: u64,
        bytes: usize,
        deadline: Option<Instant>,
    ) -> Result<ReplyGuard<'b>> {
        if !self.doorbell().drain() {
            // The client has shut the doorbell's socket down: no ring would report space.
            self.note_gone();
            return Ok(path);
        }
        let bytes = if path.outbox.is_empty() { bytes } else { path.outbox.next_bytes() };
        if !path.outbox.sender.arm_for_body(bytes).map_err(|error| self.count_dropped(error))? {
            return Ok(path);
        }
        (path.is_polled, path.is_awaited) = (true, true);
        let is_bounded = path.outbox.sender.needs_timed_wait() || waiting.pollable.is_none();
        let bound = is_bounded.then(|| Instant::now() + Duration::from_millis(1));
        drop(path);
        let ready = waiting.sleep(deadline.into_iter().chain(bound).min());
        let mut path = self.lock(call)?;
        (path.is_polled, path.is_awaited) = (false, false);
        path.outbox.sender.disarm();
        self.poll_ended.notify_all();
        if self.is_space_awaited() {
            // The loop has left the doorbell to this thread.
            self.shared.notify();
        }
        if ready.map_err(Error::system("waiting for a client"))? == Ready::Gone {
            self.note_gone();
        }
        Ok(path)
    }
}

impl Deref for SessionRef<'_> {
    type Target = Session;
    #[inline(always)]
    fn deref(&self) -> &Session {
        // SAFETY: the owner, or this reference's part in `DetachedCount`, keeps the session until this is dropped.
        unsafe { &*self.session }
    }
}

impl Drop for SessionRef<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if !self.is_borrowed.is_set() {
            self.end_detached();
        }
    }
}

impl SessionRef<'_> {
    #[inline(never)]
    fn end_detached(&mut self) {
        if self.detached.remove() {
            // SAFETY: the pointer is of the owner's `Arc`, and the owner left its count to the last detached reference,
            // which is this one. What the others did is visible. [return]
            drop(unsafe { Arc::from_raw(self.session) });
        }
    }
}

/// A thread that waits for space for a part. Its client's requests are paused meanwhile, so that they make no more
/// threads wait.
struct Waiting<'a> {
    session: &'a Session,
    /// Its own, since the loop polls the same doorbell. `None`: no descriptor is left for it, and this thread polls the
    /// lane each millisecond instead.
    pollable: Option<Pollable>,
}

impl<'a> Waiting<'a> {
    fn new(session: &'a Session) -> Waiting<'a> {
        let null_wake = &session.shared.null_wake;
        let pollable = Pollable::of_one_wait(session.doorbell(), null_wake, liveness_of(session)).ok();
        session.begin_wait();
        Waiting { session, pollable }
    }

    fn sleep(&self, until: Option<Instant>) -> std::io::Result<Ready> {
        match &self.pollable {
            Some(pollable) => pollable.wait(until),
            // An eventfd that is never drained cannot report a second ring to `poll`.
            None => poll_until(&[], liveness_of(self.session), until),
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.session.end_wait();
    }
}

/// The descriptors that report the client's end.
fn liveness_of(session: &Session) -> [Option<BorrowedFd<'_>>; 2] {
    session.liveness.as_ref().map_or([None, None], |liveness| liveness.fds())
}
