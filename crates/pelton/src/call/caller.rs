//! A client, as those have it who answer: its lane of replies behind a lock, and which of its calls are in flight.

use super::frame::{Assembly, CALLS_MAX, Header, Kind, generation_of, slot_of};
use super::outbox::Outbox;
use super::service::Desk;
use crate::connect::Origin;
use crate::error::{Error, Result};
use crate::link::{Bells, Peer, SharedLife};
use crate::os::{Bell, Owner, Ready, locked, poll_until};
use crate::sender::{Sender, SenderParts, Sent};
use crate::wait::Patience;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// A request's lane has with it: whom to answer, and what of a large request has come.
#[derive(Debug)]
pub(crate) struct Back {
    pub(crate) caller: Arc<Caller>,
    pub(super) assembly: Option<Assembly>,
}

impl Back {
    pub(crate) fn new(caller: Caller) -> Back {
        Back { caller: Arc::new(caller), assembly: None }
    }
}

impl Drop for Back {
    fn drop(&mut self) {
        self.caller.leave();
    }
}

/// A client, as those have it who answer.
#[derive(Debug)]
pub(crate) struct Caller {
    pub(super) desk: Arc<Desk>,
    pub(super) out: Mutex<Out>,
    /// For who waits for room while another polls.
    turn: Condvar,
    /// Why nothing is taken of its lane of requests: a sum of the flags below, 0 if there is no reason.
    stalls: AtomicU32,
    /// Answers of threads that must not wait for the lock, for the service's loop to take up.
    later: Mutex<Vec<(Header, Vec<u8>)>>,
    is_gone: AtomicBool,
    /// By slot, 0 or the call in it: its generation, and what is to be known of it.
    pub(super) calls: Box<[AtomicU64]>,
    bells: Bells,
    life: Option<SharedLife>,
    pub(super) peer: Option<Peer>,
    /// The largest reply that the client takes.
    pub(super) bytes_max: u64,
    owner: Owner,
}

/// Replies wait for room.
const CLOGGED: u32 = 1;
/// There are answers in [`Caller::later`].
const LATER: u32 = 2;
/// It has been told that nothing more is taken.
const DRAINED: u32 = 4;
/// Once for each thread that waits for room for a part: another of this client's requests would only have one more wait.
const WAITED: u32 = 1 << 8;

/// What is behind the lock, which is held for as long as it takes to copy a reply.
#[derive(Debug)]
pub(super) struct Out {
    pub(super) outbox: Outbox,
    /// Somebody waits for room, and hears the bell.
    is_polled: bool,
    /// Room was waited for when the lock was last given back: whoever finds some ends that, and is to say so.
    is_awaited: bool,
}

const TAKEN: u64 = 1;
const CANCELLED: u64 = 2;

impl Caller {
    pub(crate) fn new(parts: SenderParts, desk: Arc<Desk>, bytes_max: u64) -> Result<Caller> {
        let (bells, owner) =
            (parts.bells.clone(), Owner::current().map_err(Error::system("looking whose handle this is"))?);
        let sender = Sender::new(parts, &desk.options, Origin::Threads)?;
        Ok(Caller {
            life: sender.shared_life(),
            peer: sender.peer(),
            out: Mutex::new(Out { outbox: Outbox::new(sender), is_polled: false, is_awaited: false }),
            desk,
            turn: Condvar::new(),
            stalls: AtomicU32::new(0),
            later: Mutex::default(),
            is_gone: AtomicBool::new(false),
            calls: (0..CALLS_MAX).map(|_| AtomicU64::new(0)).collect(),
            bells,
            bytes_max,
            owner,
        })
    }

    /// What the client rings when there is room.
    pub(crate) fn bell(&self) -> &Bell {
        self.bells.bell()
    }

    /// Whether nothing is to be taken of this client now.
    #[inline(always)]
    pub(crate) fn is_stalled(&self) -> bool {
        self.stalls.load(Ordering::Acquire) != 0
    }

    /// Whether replies wait for room.
    fn is_clogged(&self) -> bool {
        self.stalls.load(Ordering::Acquire) & (CLOGGED | LATER) != 0
    }

    pub(super) fn has_later(&self) -> bool {
        self.stalls.load(Ordering::Acquire) & LATER != 0
    }

    /// The client has gone: what waits is nobody's.
    pub(super) fn leave(&self) {
        self.is_gone.store(true, Ordering::Release);
        // Who has the lock finds out.
        if let Ok(Some(mut out)) = self.try_lock() {
            let _ = self.clear(&mut out);
        }
        self.turn.notify_all();
    }

    /// Nothing waits any more. True: something did.
    fn clear(&self, out: &mut Out) -> bool {
        let _ = self.take_later();
        out.outbox.clear();
        self.stalls.fetch_and(!CLOGGED, Ordering::AcqRel) & CLOGGED != 0
    }

    pub(super) fn is_forked(&self) -> bool {
        self.owner.is_forked()
    }

    pub(super) fn lock(&self) -> Result<MutexGuard<'_, Out>> {
        match self.try_lock()? {
            Some(out) => Ok(out),
            // Whoever has it may have room reserved as well, and wait for this thread's.
            None if has_room() => {
                Err(Error::Refused("this thread has room reserved for another reply: send that first".to_owned()))
            }
            None => Ok(locked(&self.out)),
        }
    }

    /// The lock, if nobody has it. In a forked child a thread that it does not have may.
    #[inline(always)]
    fn try_lock(&self) -> Result<Option<MutexGuard<'_, Out>>> {
        if self.owner.is_forked() {
            return Err(Error::Forked);
        }
        match self.out.try_lock() {
            Ok(out) => Ok(Some(out)),
            // A panic there, while room was being written, was in nothing that could be left half done.
            Err(TryLockError::Poisoned(out)) => Ok(Some(out.into_inner())),
            Err(TryLockError::WouldBlock) => Ok(None),
        }
    }

    /// Takes a call in; false if that place is taken.
    pub(super) fn begin(&self, id: u64) -> bool {
        let place = &self.calls[slot_of(id) as usize];
        // The client learnt by a reply that the place is free, and that reply came after the store.
        if place.load(Ordering::Acquire) != 0 {
            return false;
        }
        place.store(u64::from(generation_of(id)) << 32 | TAKEN, Ordering::Release);
        true
    }

    pub(super) fn cancel(&self, id: u64) {
        let place = &self.calls[slot_of(id) as usize];
        let taken = u64::from(generation_of(id)) << 32 | TAKEN;
        // Otherwise it has been answered meanwhile.
        let _ = place.compare_exchange(taken, taken | CANCELLED, Ordering::AcqRel, Ordering::Relaxed);
    }

    pub(super) fn is_cancelled(&self, id: u64) -> bool {
        self.is_gone.load(Ordering::Acquire)
            || self.calls[slot_of(id) as usize].load(Ordering::Acquire) & CANCELLED != 0
    }

    /// Writes the last of a call, or has it wait for room. Never waits.
    #[inline]
    pub(super) fn send_last(self: &Arc<Caller>, header: Header, payload: &[u8]) -> Result<()> {
        let mut out = match self.try_lock()? {
            Some(out) => out,
            None if has_room() => {
                self.leave_to_the_loop(header, payload);
                return Ok(());
            }
            None => self.lock()?,
        };
        let sent = self.write_last(&mut out, header, payload);
        drop(out);
        self.note_last();
        sent
    }

    #[inline(always)]
    fn write_last(self: &Arc<Caller>, out: &mut Out, header: Header, payload: &[u8]) -> Result<()> {
        self.calls[slot_of(header.id) as usize].store(0, Ordering::Release);
        self.check_gone()?;
        if out.outbox.is_whole(payload.len())
            && out.outbox.try_write(header, payload).map_err(|error| self.went(error))?
        {
            self.pass_on(out);
            return Ok(());
        }
        out.outbox.push(header, payload);
        self.flush(out)
    }

    /// A last answer was written, and the lock has been given back: a service that drains looks whether that was all.
    #[inline(always)]
    pub(super) fn note_last(self: &Arc<Caller>) {
        // Who set it before a look at this client found the call open has given the lock back to this thread.
        if self.desk.is_draining.load(Ordering::Relaxed) {
            self.desk.look_at(self);
        }
    }

    /// A last answer that is not to wait for the lock.
    #[cold]
    fn leave_to_the_loop(self: &Arc<Caller>, header: Header, payload: &[u8]) {
        let mut later = locked(&self.later);
        // Under this lock, so that who looks for calls that are open finds one or the other.
        self.calls[slot_of(header.id) as usize].store(0, Ordering::Release);
        self.push_later(&mut later, header, payload);
        drop(later);
        self.desk.look_at(self);
    }

    fn push_later(&self, later: &mut Vec<(Header, Vec<u8>)>, header: Header, payload: &[u8]) {
        later.push((header, payload.to_vec()));
        self.stalls.fetch_or(LATER, Ordering::AcqRel);
    }

    fn take_later(&self) -> Vec<(Header, Vec<u8>)> {
        if !self.has_later() {
            return Vec::new();
        }
        let mut later = locked(&self.later);
        self.stalls.fetch_and(!LATER, Ordering::AcqRel);
        std::mem::take(&mut later)
    }

    /// For the service's loop: tells the client that requests are given back from now on.
    pub(super) fn begin_drain(&self) {
        self.push_later(&mut locked(&self.later), Header::new(Kind::Draining, 0), &[]);
    }

    /// For the service's loop, which is not to wait for the lock: gives a request back that was just taken.
    #[cold]
    pub(super) fn give_back(self: &Arc<Caller>, id: u64) {
        let header = Header::new(Kind::Returned, id);
        match self.try_lock() {
            // An error is of the client's end, which its lane tells.
            Ok(Some(mut out)) => {
                // After what has to come before it.
                let _ = self.flush(&mut out).and_then(|()| self.write_last(&mut out, header, &[]));
            }
            _ => self.leave_to_the_loop(header, &[]),
        }
    }

    /// Whether nothing is taken of it any more, and it is told, or has been.
    pub(super) fn is_drained(&self) -> bool {
        self.stalls.load(Ordering::Acquire) & (DRAINED | CLOGGED | LATER) == DRAINED
            || self.is_gone.load(Ordering::Acquire)
    }

    /// For the service's loop when it drains: tells the client, once all its calls are answered, that this was all. `open` is
    /// the call of which only some pieces have come. `None`: not to be seen now; else whether everything is said.
    pub(super) fn end_drain(self: &Arc<Caller>, open: Option<u64>) -> Option<bool> {
        let Ok(mut out) = self.try_lock() else { return Some(true) };
        let out = out.as_mut()?;
        // An error is of the client's end, which its lane tells.
        let _ = self.flush(out);
        let later = locked(&self.later);
        let is_open = |place: &(usize, &AtomicU64)| {
            place.1.load(Ordering::Acquire) != 0 && open.is_none_or(|id| slot_of(id) as usize != place.0)
        };
        if !later.is_empty() || self.calls.iter().enumerate().any(|place| is_open(&place)) {
            return Some(false);
        }
        drop(later);
        if self.stalls.fetch_or(DRAINED, Ordering::AcqRel) & DRAINED == 0 {
            out.outbox.push(Header::new(Kind::Drained, 0), &[]);
            let _ = self.flush(out);
        }
        Some(out.outbox.is_empty())
    }

    #[cold]
    pub(super) fn went(&self, error: Error) -> Error {
        self.desk.dropped.fetch_add(1, Ordering::Relaxed);
        error
    }

    fn check_gone(&self) -> Result<()> {
        match self.is_gone.load(Ordering::Acquire) {
            true => Err(self.went(Error::PeerDied { unreleased: 0 })),
            false => Ok(()),
        }
    }

    /// Writes what there is room for; notes whether anything is left.
    pub(super) fn flush(self: &Arc<Caller>, out: &mut Out) -> Result<()> {
        for (header, payload) in self.take_later() {
            out.outbox.push(header, &payload);
        }
        let flushed = out.outbox.flush();
        self.pass_on(out);
        if !matches!(flushed, Ok(false)) || self.is_gone.load(Ordering::Acquire) {
            if self.clear(out) {
                // Its requests may be taken again.
                self.desk.stir();
            }
            return flushed.map(|_| ());
        }
        if self.stalls.fetch_or(CLOGGED, Ordering::AcqRel) & CLOGGED == 0 {
            self.desk.look_at(self);
        }
        Ok(())
    }

    /// To write is to be awake: who waits for room has to ask for it again. Both the service's loop and who polls hear the bell.
    #[inline(always)]
    pub(super) fn pass_on(&self, out: &mut Out) {
        if out.is_awaited && !out.outbox.sender.is_armed() {
            out.is_awaited = false;
            self.bell().ring();
        }
    }

    /// Writes a part of a reply, waiting for room for as long as `patience` says.
    pub(super) fn send_part(self: &Arc<Caller>, header: Header, payload: &[u8], patience: Patience) -> Result<Sent> {
        let mut out = self.lock()?;
        let mut waiting = None;
        loop {
            self.check_gone()?;
            self.flush(&mut out)?;
            if !out.outbox.is_whole(payload.len()) && out.outbox.is_empty() {
                out.outbox.push(header, payload);
                self.flush(&mut out)?;
                return Ok(Sent::Sent);
            }
            if out.outbox.try_write(header, payload).map_err(|error| self.went(error))? {
                self.pass_on(&mut out);
                return Ok(Sent::Sent);
            }
            let Some(deadline) = patience.deadline() else { return Ok(Sent::Full) };
            let now = Instant::now();
            if deadline.is_some_and(|deadline| now >= deadline) {
                return Ok(Sent::TimedOut);
            }
            waiting.get_or_insert_with(|| Waiting::new(self));
            out = match out.is_polled {
                true => self.wait_for_turn(out, deadline.map(|deadline| deadline - now)),
                false => self.wait_for_room(out, payload.len(), deadline)?,
            };
        }
    }

    fn wait_for_turn<'a>(&'a self, out: MutexGuard<'a, Out>, left: Option<Duration>) -> MutexGuard<'a, Out> {
        let out = match left {
            None => self.turn.wait(out).unwrap_or_else(PoisonError::into_inner),
            Some(left) => self.turn.wait_timeout(out, left).unwrap_or_else(PoisonError::into_inner).0,
        };
        if cfg!(thread_sanitizer) {
            // Taken again where it is seen: see `locked`.
            drop(out);
            locked(&self.out)
        } else {
            out
        }
    }

    /// Polls without the lock: the others answer meanwhile. Comes back when there may be room.
    fn wait_for_room<'a>(
        &'a self,
        mut out: MutexGuard<'a, Out>,
        bytes: usize,
        deadline: Option<Instant>,
    ) -> Result<MutexGuard<'a, Out>> {
        self.bells.drain();
        let bytes = if out.outbox.is_empty() { bytes } else { out.outbox.wanted() };
        if !out.outbox.sender.arm_for_room(bytes).map_err(|error| self.went(error))? {
            return Ok(out);
        }
        (out.is_polled, out.is_awaited) = (true, true);
        let nap = out.outbox.sender.must_nap().then(|| Instant::now() + Duration::from_millis(1));
        drop(out);
        let until = deadline.into_iter().chain(nap).min();
        let (socket, process) = self.life.as_ref().map_or((None, None), |(socket, process)| {
            (Some(socket.as_fd()), process.as_ref().map(|process| process.as_fd()))
        });
        let ready = poll_until(&[self.bell().as_fd(), self.desk.mute.as_fd()], [socket, process], until);
        let mut out = self.lock()?;
        (out.is_polled, out.is_awaited) = (false, false);
        out.outbox.sender.disarm();
        self.turn.notify_all();
        if self.is_clogged() {
            // The service has left it to this thread to hear the bell.
            self.desk.stir();
        }
        if ready.map_err(Error::system("waiting for a client"))? == Ready::Gone {
            self.is_gone.store(true, Ordering::Release);
        }
        Ok(out)
    }

    /// For the service's loop: writes what there is room for. False: it is not clogged any more.
    pub(super) fn tend(self: &Arc<Caller>) -> bool {
        if !self.is_clogged() {
            return false;
        }
        // Who has the lock is writing.
        let Ok(Some(mut out)) = self.try_lock() else { return true };
        out.is_awaited &= out.is_polled;
        // An error is of the client's end, which its lane tells.
        let _ = self.flush(&mut out);
        self.is_clogged()
    }

    /// For the service's loop, before it sleeps: has the client ring when there is room. False: there is some, or it is to be looked
    /// for again, since who has the lock is writing.
    pub(super) fn arm(&self) -> bool {
        if !self.is_clogged() {
            return false;
        }
        let Ok(Some(mut out)) = self.try_lock() else {
            // Whoever it is may want this processor.
            std::thread::yield_now();
            return false;
        };
        if self.has_later() {
            return false;
        }
        if out.is_polled {
            return true;
        }
        self.bells.bell().drain();
        let bytes = out.outbox.wanted();
        // As above.
        out.is_awaited = out.outbox.sender.arm_for_room(bytes).unwrap_or(true);
        out.is_awaited
    }

    pub(super) fn disarm(&self) {
        // Otherwise who writes does it.
        if self.is_clogged()
            && let Ok(Some(mut out)) = self.try_lock()
            && !out.is_polled
        {
            out.is_awaited = false;
            out.outbox.sender.disarm();
        }
    }

    pub(super) fn must_nap(&self) -> bool {
        self.is_clogged() && self.try_lock().is_ok_and(|out| out.is_none_or(|out| out.outbox.sender.must_nap()))
    }
}

/// A thread that waits for room for a part: nothing is taken of that client meanwhile, lest it wait for more threads.
struct Waiting<'a>(&'a Arc<Caller>);

impl<'a> Waiting<'a> {
    fn new(caller: &'a Arc<Caller>) -> Waiting<'a> {
        caller.stalls.fetch_add(WAITED, Ordering::AcqRel);
        Waiting(caller)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.0.stalls.fetch_sub(WAITED, Ordering::AcqRel) < 2 * WAITED {
            // Its requests may be taken again.
            self.0.desk.stir();
        }
    }
}

thread_local! {
    /// The caller for a reply to which this thread has room reserved, and so its lock.
    pub(super) static ROOM_OF: std::cell::Cell<Option<usize>> = const { std::cell::Cell::new(None) };
}

pub(super) fn has_room() -> bool {
    ROOM_OF.with(|of| of.get()).is_some()
}
