//! A client in the hands of who answers: lent by the service's loop with a request, or taken away.
//!
//! What is lent goes back before the loop does anything else: nobody else uses the service until then. So while nobody has taken
//! anything away either, the client's lane is this one's alone, and is written without the lock. Whoever is away takes the lock.

use super::caller::{Caller, Guard, Out, has_room, room_is_held};
use super::frame::{Header, Outgoing};
use crate::body::Flag;
use crate::outbox::FrameSender as _;
use pelton_channel::Deadline;
use pelton_channel::Sent;
use pelton_channel::{Error, Result};
use pelton_os::{Pollable, Ready, poll_until};
use std::marker::PhantomData;
use std::mem::{ManuallyDrop, forget};
use std::ops::Deref;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Whom to answer.
#[derive(Debug)]
pub(super) struct Hold<'a> {
    /// The lane's own, which is not counted again: it is kept until this goes.
    caller: ManuallyDrop<Arc<Caller>>,
    is_lent: Flag,
    of_loop: PhantomData<&'a ()>,
}

impl<'a> Hold<'a> {
    /// For the loop, to answer a request that it has just taken.
    ///
    /// # Safety
    /// Until `'a` ends the client's lane is not given up, and the service is used for nothing.
    #[inline(always)]
    pub(super) unsafe fn lent(caller: &Arc<Caller>) -> Hold<'a> {
        // SAFETY: a copy that is never dropped, of what the lane keeps for so long.
        let caller = unsafe { std::ptr::read(caller) };
        Hold { caller: ManuallyDrop::new(caller), is_lent: Flag::Yes, of_loop: PhantomData }
    }

    /// For who wants to answer when the loop does something else, or on another thread.
    pub(super) fn away(self) -> Hold<'static> {
        if self.is_lent.is_set() {
            self.caller.away.go();
        }
        // SAFETY: a copy, of which the original is forgotten. It is kept until this comes back, as has just been said.
        let caller = unsafe { std::ptr::read(&*self.caller) };
        forget(self);
        Hold { caller: ManuallyDrop::new(caller), is_lent: Flag::No, of_loop: PhantomData }
    }

    /// The client's lane, if it is this one's alone.
    #[inline(always)]
    pub(super) fn alone(&self) -> Option<Guard<'_>> {
        if self.caller.is_forked() { None } else { self.alone_here() }
    }

    /// The same, of who finds out by itself whether this is a forked child.
    #[inline(always)]
    fn alone_here(&self) -> Option<Guard<'_>> {
        let is_alone = self.is_lent.is_set() && self.caller.away.is_nobody();
        // SAFETY: it is lent, so the loop does nothing, and nobody else is there.
        is_alone.then(|| unsafe { self.caller.unlocked() })
    }

    /// The client's lane; waits while another thread answers it.
    pub(super) fn lock(&self) -> Result<Guard<'_>> {
        match self.try_lock()? {
            Some(out) => Ok(out),
            // Whoever has it may have room reserved as well, and wait for this thread's.
            None if has_room() => Err(room_is_held()),
            None => Ok(self.caller.wait_for_lock()),
        }
    }

    /// The same, if nobody has it.
    #[inline(always)]
    fn try_lock(&self) -> Result<Option<Guard<'_>>> {
        match self.alone() {
            Some(out) => Ok(Some(out)),
            None => self.caller.try_lock(),
        }
    }

    /// Reserves room for a reply in place, in the common case: the lane is this one's alone, nothing waits before this, and there is room.
    #[inline(always)]
    pub(super) fn room_at_once(&self, bytes: usize) -> bool {
        let Some(mut out) = self.alone_here().filter(|out| out.outbox.is_empty()) else { return false };
        if self.has_later() {
            return false;
        }
        // None in a forked child.
        let space = out.outbox.sender.reserve_body_fast(bytes);
        space.map(|space| out.keep_for(space)).is_some()
    }

    /// Reserves room for a reply in place, if there is now.
    #[cold]
    #[inline(never)]
    pub(super) fn room_slowly(&self, bytes: usize) -> Result<bool> {
        let mut out = match self.alone() {
            Some(out) => out,
            None if has_room() => return Err(room_is_held()),
            None => self.lock()?,
        };
        if !out.outbox.is_empty() || self.has_later() {
            self.flush(&mut out)?;
        }
        if !out.outbox.is_empty() {
            return Ok(false);
        }
        let Some(space) = out.outbox.sender.try_reserve_body(bytes).map_err(|error| self.went(error))? else {
            return Ok(false);
        };
        if out.is_locked() {
            self.note_room();
        }
        out.keep_for(space);
        Ok(true)
    }

    /// What is behind the client's lock, of who has room reserved there.
    #[inline(always)]
    pub(super) fn reserved(&self) -> *mut Out {
        self.caller.out.get()
    }

    /// Writes the last of a call, or has it wait for room. Never waits.
    #[inline]
    pub(super) fn send_last(&self, header: Header, payload: &[u8]) -> Result<()> {
        let mut out = match self.try_lock()? {
            Some(out) => out,
            None if has_room() => return self.leave_to_the_loop(header, payload),
            None => self.lock()?,
        };
        let sent = self.write_last(&mut out, header, payload);
        drop(out);
        self.note_last();
        sent
    }

    /// Writes a part of a reply, waiting for room for as long as `deadline` says.
    pub(super) fn send_part(&self, header: Header, payload: &[u8], deadline: Deadline) -> Result<Sent> {
        let mut out = self.lock()?;
        let mut waiting = None;
        loop {
            self.check_gone()?;
            self.flush(&mut out)?;
            if !out.outbox.is_whole(payload.len()) && out.outbox.is_empty() {
                let kept = self.kept.take(payload.len() as u64).ok_or_else(|| self.no_memory(payload.len()))?;
                out.outbox.push_all(Outgoing::new(header, payload.to_vec(), Some(kept)));
                self.flush(&mut out)?;
                return Ok(Sent::Sent);
            }
            if out.outbox.try_write(header, payload).map_err(|error| self.went(error))? {
                self.pass_on(&mut out);
                return Ok(Sent::Sent);
            }
            let Some(deadline) = deadline.until() else {
                drop(out);
                self.want_room(payload.len());
                return Ok(Sent::Full);
            };
            let now = Instant::now();
            if deadline.is_some_and(|deadline| now >= deadline) {
                return Ok(Sent::TimedOut);
            }
            // Others wait for that as long as this waits; and the lock, which is given back meanwhile, need not be had again.
            if has_room() {
                return Err(room_is_held());
            }
            let waiting = match &waiting {
                Some(waiting) => waiting,
                None => waiting.insert(Waiting::new(self)),
            };
            out = match out.is_polled {
                true => self.wait_for_turn(out, deadline.map(|deadline| deadline - now)),
                false => self.wait_for_room(out, waiting, payload.len(), deadline)?,
            };
        }
    }

    /// Another polls.
    fn wait_for_turn<'b>(&'b self, out: Guard<'b>, left: Option<Duration>) -> Guard<'b> {
        // Who is the only one has nobody to wait for: it finds that there is nobody, and takes the turn.
        let Some(lock) = out.into_lock() else { return self.caller.wait_for_lock() };
        self.caller.wait_for_turn(lock, left)
    }

    /// Polls without the lock: the others answer meanwhile. Comes back when there may be room. The doorbell only wakes: that there is room
    /// the lane says ([release]), and what the others did is seen under the lock, which is taken again.
    fn wait_for_room<'b>(
        &'b self,
        mut out: Guard<'b>,
        waiting: &Waiting<'_>,
        bytes: usize,
        deadline: Option<Instant>,
    ) -> Result<Guard<'b>> {
        if !self.doorbell().drain() {
            // It has shut down what it is to ring: nobody would hear of room.
            self.note_gone();
            return Ok(out);
        }
        let bytes = if out.outbox.is_empty() { bytes } else { out.outbox.wanted() };
        if !out.outbox.sender.arm_for_body(bytes).map_err(|error| self.went(error))? {
            return Ok(out);
        }
        (out.is_polled, out.is_awaited) = (true, true);
        let must_nap = out.outbox.sender.needs_timed_wait() || waiting.ears.is_none();
        let nap = must_nap.then(|| Instant::now() + Duration::from_millis(1));
        drop(out);
        let until = deadline.into_iter().chain(nap).min();
        let ready = waiting.sleep(until);
        let mut out = self.lock()?;
        (out.is_polled, out.is_awaited) = (false, false);
        out.outbox.sender.disarm();
        self.turn.notify_all();
        if self.is_awaited() {
            // The service has left it to this thread to hear the doorbell.
            self.desk.stir();
        }
        if ready.map_err(Error::system("waiting for a client"))? == Ready::Gone {
            self.note_gone();
        }
        Ok(out)
    }
}

impl Deref for Hold<'_> {
    type Target = Arc<Caller>;
    #[inline(always)]
    fn deref(&self) -> &Arc<Caller> {
        &self.caller
    }
}

impl Drop for Hold<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if !self.is_lent.is_set() {
            self.come_back();
        }
    }
}

impl Hold<'_> {
    #[inline(never)]
    fn come_back(&mut self) {
        if self.caller.away.come_back() {
            // SAFETY: the lane has left its own to the last one, which is this.
            unsafe { ManuallyDrop::drop(&mut self.caller) };
        }
    }
}

/// A thread that waits for room for a part: nothing is taken of that client meanwhile, lest it wait for more threads.
struct Waiting<'a> {
    caller: &'a Arc<Caller>,
    /// Its own, as the service's loop hears the same doorbell. `None`: there is no descriptor left for it, and this polls the lane by the
    /// millisecond instead.
    ears: Option<Pollable>,
}

impl<'a> Waiting<'a> {
    fn new(caller: &'a Arc<Caller>) -> Waiting<'a> {
        let ears = Pollable::of_one_wait(caller.doorbell(), &caller.desk.null_wake, life_of(caller)).ok();
        caller.begin_wait();
        Waiting { caller, ears }
    }

    fn sleep(&self, until: Option<Instant>) -> std::io::Result<Ready> {
        match &self.ears {
            Some(ears) => ears.wait(until),
            // An eventfd that is never drained tells a poll of no ring.
            None => poll_until(&[], life_of(self.caller), until),
        }
    }
}

/// What tells the client's end.
fn life_of(caller: &Caller) -> [Option<BorrowedFd<'_>>; 2] {
    caller.life.as_ref().map_or([None, None], |liveness| liveness.fds())
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.caller.end_wait();
    }
}
