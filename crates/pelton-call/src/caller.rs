//! A client, as those have it who answer: its lane of replies behind a lock, and which of its calls are in flight.
//!
//! Its flags and the places of its calls are atomics of themselves alone, so all of that is Relaxed: what a thread did to the lane
//! before, the loop sees under the lock, or by an edge of `edges.rs`.

use super::edges::{Away, Stirred};
use super::frame::{Assembly, CALLS_MAX, Clock, FAILED_MEMORY, Header, Kind, Outgoing, generation_of, slot_of};
use super::outbox::Outbox;
use crate::outbox::FrameSender as _;
use pelton_channel::Receiver;
use pelton_channel::raw::Budget;
use pelton_channel::raw::Doorbells;
use pelton_channel::raw::ReplyLane;
use pelton_channel::raw::Settings;
use pelton_channel::raw::Share;
use pelton_channel::raw::SharedLiveness;
use pelton_channel::{Error, Result};
use pelton_lane::ReservedSpace;
use pelton_os::Peer;
use pelton_os::{Doorbell, LocalWake, Owner, locked, wait_on};
use std::cell::{Cell, UnsafeCell};
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, TryLockError};
use std::time::Duration;

/// What a service keeps of a client's lane: the client's session, and what has come of a large request.
#[derive(Debug)]
pub(super) struct Back {
    /// Freed by the last of this and those that are away.
    pub(super) caller: ManuallyDrop<Arc<Caller>>,
    pub(super) assembly: Option<Assembly>,
    /// The number of its lane of requests.
    lane: u32,
    /// Whether that lane is paused.
    is_paused: bool,
}

impl Drop for Back {
    fn drop(&mut self) {
        self.caller.leave();
        if self.caller.away.leave() {
            // SAFETY: nobody is away who would have it, nor can anybody go any more.
            unsafe { ManuallyDrop::drop(&mut self.caller) };
        }
    }
}

/// What a service keeps of its clients by default: a guess, four of the largest requests or replies by default.
const KEPT_MAX: u64 = 256 << 20;

/// What all clients of a service have in common.
#[derive(Debug)]
pub(crate) struct Desk {
    pub(crate) options: Settings,
    /// For what is kept of all clients; each has a share.
    pub(super) kept: Arc<Budget>,
    /// Of the clients' lanes, whose own doorbells are heard otherwise.
    pub(super) null_wake: Arc<LocalWake>,
    pub(super) local_wake: Arc<LocalWake>,
    pub(super) clock: Clock,
    /// Clients that are so since the service last looked; none any more when it is gone.
    pub(super) arrived: Mutex<Option<Vec<Arc<Caller>>>>,
    /// Whether there is anything for the service to see here.
    pub(super) stirred: Stirred,
    pub(super) is_stopped: AtomicBool,
    /// Takes no more requests.
    pub(super) is_draining: AtomicBool,
    pub(super) dropped: AtomicU64,
    pub(super) owner: Owner,
}

impl Desk {
    /// Has the service look at a client.
    pub(super) fn look_at(&self, caller: &Arc<Caller>) {
        if let Some(arrived) = &mut *locked(&self.arrived) {
            arrived.push(caller.clone());
        }
        self.stir();
    }

    pub(super) fn new(options: &Settings, requests: &Receiver, null_wake: Arc<LocalWake>) -> Result<Desk> {
        let kept_max = KEPT_MAX.max(options.call_bytes_max.saturating_mul(4));
        Ok(Desk {
            options: options.clone(),
            kept: requests.budget().unwrap_or_else(|| Budget::new(kept_max)),
            null_wake,
            local_wake: requests.doorbells().local_wake().clone(),
            clock: Clock::new(),
            arrived: Mutex::new(Some(Vec::new())),
            stirred: Stirred::new(),
            is_stopped: AtomicBool::new(false),
            is_draining: AtomicBool::new(false),
            dropped: AtomicU64::new(0),
            owner: Owner::current().map_err(Error::system("looking whose handle this is"))?,
        })
    }

    pub(super) fn stir(&self) {
        // In a forked child the descriptor is closed.
        if !self.owner.is_forked() {
            self.stirred.set();
            self.local_wake.ring();
        }
    }
}

/// The clients of a service, by the index that each lane of requests has.
#[derive(Debug, Default)]
pub(super) struct Backs {
    slots: Vec<Option<Back>>,
    free: Vec<usize>,
}

impl Backs {
    pub(super) fn iter(&self) -> impl Iterator<Item = &Back> {
        self.slots.iter().flatten()
    }

    #[inline(always)]
    pub(super) fn get(&mut self, index: usize) -> Option<&mut Back> {
        self.slots.get_mut(index)?.as_mut()
    }

    /// Takes a client in, whose requests come by the lane of that number.
    pub(super) fn add(&mut self, reply: ReplyLane, lane: u32, desk: &Arc<Desk>) -> usize {
        let index = self.free.pop().unwrap_or(self.slots.len());
        let caller = ManuallyDrop::new(Arc::new(Caller::new(reply, index, desk.clone())));
        let back = Some(Back { caller, assembly: None, lane, is_paused: false });
        match self.slots.get_mut(index) {
            Some(slot) => *slot = back,
            None => self.slots.push(back),
        }
        index
    }

    pub(super) fn remove(&mut self, index: usize) -> Option<Back> {
        let back = self.slots.get_mut(index)?.take()?;
        self.free.push(index);
        Some(back)
    }

    /// Pauses a client's lane of requests, or resumes it, as the client's state is now. Returns whether it is paused.
    pub(super) fn update_pause(&mut self, caller: &Arc<Caller>, requests: &mut Receiver) -> bool {
        // The client may have gone, and another may have its index.
        let Some(back) = self.get(caller.index).filter(|back| Arc::ptr_eq(&back.caller, caller)) else { return false };
        let is_paused = caller.is_stalled();
        if back.is_paused != is_paused {
            back.is_paused = is_paused;
            requests.set_paused(back.lane, is_paused);
        }
        is_paused
    }
}

/// A client, as those have it who answer.
#[derive(Debug)]
pub(super) struct Caller {
    /// Its index among the service's clients.
    index: usize,
    pub(super) desk: Arc<Desk>,
    /// For its answers that wait for room, and its requests of which some pieces have come.
    pub(super) kept: Arc<Share>,
    lock: Mutex<()>,
    /// What is behind the lock.
    pub(super) out: UnsafeCell<Out>,
    /// Who may be at it besides the service's loop.
    pub(super) away: Away,
    /// For who waits for room while another polls.
    pub(super) turn: Condvar,
    /// Why nothing is taken of its lane of requests: a sum of the flags below, 0 if there is no reason.
    stalls: AtomicU32,
    /// One more than the bytes of a part for which there was no room, of which the service's loop is to be told once; 0 if there is none.
    /// Requests are taken all the same: the loop is not to miss that the call is cancelled.
    wanted: AtomicUsize,
    /// Answers of threads that must not wait for the lock, for the service's loop to take up.
    later: Mutex<Vec<Outgoing>>,
    is_gone: AtomicBool,
    /// By slot, 0 or the call in it: its generation, and what is to be known of it.
    calls: Box<[AtomicU64; CALLS_MAX as usize]>,
    pub(super) doorbells: Doorbells,
    pub(super) life: Option<SharedLiveness>,
    pub(super) peer: Option<Peer>,
    /// The largest reply that the client takes.
    pub(super) bytes_max: u64,
    owner: Owner,
}

// SAFETY: of what is not Sync already, the cell is reached by who has the lock, or as [`Caller::unlocked`] says.
unsafe impl Sync for Caller {}

/// What is behind a client's lock, for who has that, or needs none.
#[derive(Debug)]
pub(super) struct Guard<'a> {
    out: &'a mut Out,
    /// Given back after it.
    lock: Option<MutexGuard<'a, ()>>,
}

impl<'a> Guard<'a> {
    /// The lock alone.
    pub(super) fn into_lock(self) -> Option<MutexGuard<'a, ()>> {
        self.lock
    }

    pub(super) fn is_locked(&self) -> bool {
        self.lock.is_some()
    }

    /// Leaves this to who has that room reserved from now on, until [`Out::take_lock`].
    #[inline(always)]
    pub(super) fn keep_for(self, space: ReservedSpace) {
        let Guard { out, lock } = self;
        out.space = Some(space);
        // SAFETY: only the time is another. The mutex is the client's, and so is this, and nothing is done to it when the client goes.
        let lock = lock.map(|lock| unsafe { std::mem::transmute::<MutexGuard<'a, ()>, MutexGuard<'static, ()>>(lock) });
        out.lock = RoomLock(ManuallyDrop::new(lock));
    }
}

impl Deref for Guard<'_> {
    type Target = Out;
    #[inline(always)]
    fn deref(&self) -> &Out {
        self.out
    }
}

impl DerefMut for Guard<'_> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Out {
        self.out
    }
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
    /// Somebody waits for room, and hears the doorbell.
    pub(super) is_polled: bool,
    /// Room was waited for when the lock was last given back: whoever finds some ends that, and is to say so.
    pub(super) is_awaited: bool,
    /// The room that is reserved for a reply. Here, so that what is given out is one pointer, as a request is.
    space: Option<ReservedSpace>,
    lock: RoomLock,
}

/// The lock of who has room reserved, if that needs one. It stays locked for ever if the room is forgotten.
#[derive(Debug)]
struct RoomLock(ManuallyDrop<Option<MutexGuard<'static, ()>>>);

// SAFETY: put in by who reserves, and taken out when the room is dropped, which stays on its thread. Nobody else looks at it.
unsafe impl Send for RoomLock {}

impl Out {
    fn new(outbox: Outbox) -> Out {
        Out { outbox, is_polled: false, is_awaited: false, space: None, lock: RoomLock(ManuallyDrop::new(None)) }
    }

    /// The room that is reserved.
    #[inline(always)]
    pub(super) fn space(&self) -> ReservedSpace {
        self.space.expect("it is reserved")
    }

    /// For who had room reserved: whether that was under the lock, or somebody waited for room before. Without the lock nobody else can have
    /// left anything here since it was reserved.
    #[inline(always)]
    pub(super) fn is_watched(&self) -> bool {
        self.lock.0.is_some() || self.is_awaited
    }

    /// For who had room reserved, and gives it back: its lock, to be dropped last.
    #[inline(always)]
    pub(super) fn take_lock(&mut self) -> Option<MutexGuard<'static, ()>> {
        self.lock.0.take()
    }
}

const TAKEN: u64 = 1;
const CANCELLED: u64 = 2;

impl Caller {
    fn new(reply: ReplyLane, index: usize, desk: Arc<Desk>) -> Caller {
        let ReplyLane { sender, bytes_max } = reply;
        Caller {
            index,
            life: sender.shared_liveness(),
            peer: sender.peer(),
            doorbells: sender.doorbells().clone(),
            owner: desk.owner,
            lock: Mutex::new(()),
            out: UnsafeCell::new(Out::new(Outbox::new(sender))),
            away: Away::new(),
            kept: Share::new(&desk.kept),
            desk,
            turn: Condvar::new(),
            stalls: AtomicU32::new(0),
            wanted: AtomicUsize::new(0),
            later: Mutex::default(),
            is_gone: AtomicBool::new(false),
            calls: Box::new([const { AtomicU64::new(0) }; CALLS_MAX as usize]),
            bytes_max,
        }
    }

    /// What the client rings when there is room.
    pub(crate) fn doorbell(&self) -> &Doorbell {
        self.doorbells.doorbell()
    }

    /// Whether nothing is to be taken of this client now.
    #[inline(always)]
    pub(crate) fn is_stalled(&self) -> bool {
        self.stalls.load(Relaxed) != 0
    }

    /// Whether replies wait for room.
    pub(super) fn is_clogged(&self) -> bool {
        self.stalls.load(Relaxed) & (CLOGGED | LATER) != 0
    }

    /// Whether the service's loop is to be told of room for a part.
    fn is_wanted(&self) -> bool {
        self.wanted.load(Relaxed) != 0 && !self.is_gone.load(Relaxed)
    }

    /// Whether the service's loop waits for room, for whatever reason.
    pub(super) fn is_awaited(&self) -> bool {
        self.is_clogged() || self.is_wanted()
    }

    /// There was no room for a part of so many bytes, and nobody waits for it: the service's loop is to be told.
    #[cold]
    pub(super) fn want_room(self: &Arc<Caller>, bytes: usize) {
        if self.wanted.swap(bytes.saturating_add(1), Relaxed) == 0 {
            self.desk.look_at(self);
        }
    }

    pub(super) fn has_later(&self) -> bool {
        self.stalls.load(Relaxed) & LATER != 0
    }

    /// The client has gone: what waits is nobody's.
    pub(super) fn leave(&self) {
        self.note_gone();
        // Who has the lock finds out.
        if let Ok(Some(mut out)) = self.try_lock() {
            let _ = self.clear(&mut out);
        }
        self.turn.notify_all();
    }

    /// Nobody reads any more what is written.
    pub(super) fn note_gone(&self) {
        self.is_gone.store(true, Relaxed);
    }

    /// Nothing waits any more. True: something did.
    fn clear(&self, out: &mut Out) -> bool {
        let _ = self.take_later();
        out.outbox.clear();
        self.stalls.fetch_and(!CLOGGED, Relaxed) & CLOGGED != 0
    }

    pub(super) fn is_forked(&self) -> bool {
        self.owner.is_forked()
    }

    /// The lock, if nobody has it. In a forked child a thread that it does not have may.
    #[inline(always)]
    pub(super) fn try_lock(&self) -> Result<Option<Guard<'_>>> {
        if self.owner.is_forked() {
            return Err(Error::Forked);
        }
        match self.lock.try_lock() {
            Ok(lock) => Ok(Some(self.guard(lock))),
            // A panic there, while room was being written, was in nothing that could be left half done.
            Err(TryLockError::Poisoned(lock)) => Ok(Some(self.guard(lock.into_inner()))),
            Err(TryLockError::WouldBlock) => Ok(None),
        }
    }

    pub(super) fn wait_for_lock(&self) -> Guard<'_> {
        self.guard(locked(&self.lock))
    }

    /// Gives the lock up until another has polled, or for as long as is left, or for nothing.
    pub(super) fn wait_for_turn<'a>(&'a self, lock: MutexGuard<'a, ()>, left: Option<Duration>) -> Guard<'a> {
        self.guard(wait_on(&self.turn, &self.lock, lock, left))
    }

    fn guard<'a>(&'a self, lock: MutexGuard<'a, ()>) -> Guard<'a> {
        // SAFETY: the lock is held as long as this; who is without one is alone, as it says.
        Guard { out: unsafe { &mut *self.out.get() }, lock: Some(lock) }
    }

    /// What is behind the lock, without it.
    ///
    /// # Safety
    /// The loop does nothing as long as this is there, but for who calls this, and [`Away::is_nobody`] has just been true.
    #[inline(always)]
    pub(super) unsafe fn unlocked(&self) -> Guard<'_> {
        // SAFETY: the caller's promise: nobody else can come to have it meanwhile. What those did who have come back is visible. [home]
        Guard { out: unsafe { &mut *self.out.get() }, lock: None }
    }

    /// The place of a call, whose id has been checked: the remainder is for the compiler.
    #[inline(always)]
    fn place(&self, id: u64) -> &AtomicU64 {
        &self.calls[(slot_of(id) % CALLS_MAX) as usize]
    }

    /// Takes a call in; false if that place is taken.
    #[inline(always)]
    pub(super) fn begin(&self, id: u64) -> bool {
        let place = self.place(id);
        // Relaxed: the client learnt by a reply that the place is free, and that came after the store, and before this request.
        if place.load(Relaxed) != 0 {
            return false;
        }
        place.store(u64::from(generation_of(id)) << 32 | TAKEN, Relaxed);
        true
    }

    /// It is answered, before the answer is published, which lets the client use the place again.
    #[inline(always)]
    pub(super) fn end(&self, id: u64) {
        self.place(id).store(0, Relaxed);
    }

    pub(super) fn cancel(&self, id: u64) {
        let place = self.place(id);
        let taken = u64::from(generation_of(id)) << 32 | TAKEN;
        // Otherwise it has been answered meanwhile.
        let _ = place.compare_exchange(taken, taken | CANCELLED, Relaxed, Relaxed);
    }

    pub(super) fn is_cancelled(&self, id: u64) -> bool {
        self.is_gone.load(Relaxed) || self.place(id).load(Relaxed) & CANCELLED != 0
    }

    #[inline(always)]
    pub(super) fn write_last(self: &Arc<Caller>, out: &mut Out, header: Header, payload: &[u8]) -> Result<()> {
        self.end(header.id);
        self.check_gone()?;
        if out.outbox.is_whole(payload.len())
            && out.outbox.try_write(header, payload).map_err(|error| self.went(error))?
        {
            self.pass_on(out);
            return Ok(());
        }
        let (message, kept) = self.to_wait(header, payload);
        out.outbox.push_all(message);
        self.flush(out).and(kept)
    }

    /// An answer that has to wait for room. If the service has no memory left for this client, its call fails instead, and so does who answers.
    fn to_wait(&self, header: Header, payload: &[u8]) -> (Outgoing, Result<()>) {
        if let Some(kept) = self.kept.take(payload.len() as u64) {
            return (Outgoing::new(header, payload.to_vec(), Some(kept)), Ok(()));
        }
        let error = self.no_memory(payload.len());
        let failed = Header { code: FAILED_MEMORY, ..Header::new(Kind::Failed, header.id) };
        (Outgoing::new(failed, self.cut(error.to_string()), None), Err(error))
    }

    /// A text as long as the client takes.
    fn cut(&self, text: String) -> Vec<u8> {
        let mut text = text.into_bytes();
        text.truncate(self.bytes_max.try_into().unwrap_or(usize::MAX));
        text
    }

    #[cold]
    pub(super) fn no_memory(&self, bytes: usize) -> Error {
        Error::Memory { bytes: bytes as u64, left: self.kept.left(), most: self.kept.most() }
    }

    /// For the service's loop: a request of so many bytes came in pieces that could not all be kept.
    #[cold]
    pub(super) fn fail_for_memory(self: &Arc<Caller>, id: u64, bytes: u64) {
        let failed = Header { code: FAILED_MEMORY, ..Header::new(Kind::Failed, id) };
        self.answer_from_loop(failed, &self.cut(self.no_memory(bytes as usize).to_string()));
    }

    /// A last answer was written, and the lock has been given back: a service that drains looks whether that was all.
    #[inline(always)]
    pub(super) fn note_last(self: &Arc<Caller>) {
        // Who set it before a look at this client found the call open has given the lock back to this thread.
        if self.desk.is_draining.load(Relaxed) {
            self.desk.look_at(self);
        }
    }

    /// A last answer that is not to wait for the lock.
    #[cold]
    pub(super) fn leave_to_the_loop(self: &Arc<Caller>, header: Header, payload: &[u8]) -> Result<()> {
        let (message, kept) = self.to_wait(header, payload);
        let mut later = locked(&self.later);
        // Under this lock, so that who looks for calls that are open finds one or the other.
        self.end(header.id);
        self.push_later(&mut later, message);
        drop(later);
        self.desk.look_at(self);
        kept
    }

    fn push_later(&self, later: &mut Vec<Outgoing>, message: Outgoing) {
        later.push(message);
        self.stalls.fetch_or(LATER, Relaxed);
    }

    fn take_later(&self) -> Vec<Outgoing> {
        if !self.has_later() {
            return Vec::new();
        }
        let mut later = locked(&self.later);
        self.stalls.fetch_and(!LATER, Relaxed);
        std::mem::take(&mut later)
    }

    /// For the service's loop: tells the client that requests are given back from now on.
    pub(super) fn begin_drain(&self) {
        self.push_later(&mut locked(&self.later), Outgoing::new(Header::new(Kind::Draining, 0), Vec::new(), None));
    }

    /// For the service's loop, which is not to wait for the lock: gives a request back that was just taken.
    #[cold]
    pub(super) fn give_back(self: &Arc<Caller>, id: u64) {
        self.answer_from_loop(Header::new(Kind::Returned, id), &[]);
    }

    /// For the service's loop, which is not to wait for the lock.
    fn answer_from_loop(self: &Arc<Caller>, header: Header, payload: &[u8]) {
        // An error is of the client's end, which its lane tells.
        let _ = match self.try_lock() {
            // After what has to come before it.
            Ok(Some(mut out)) => self.flush(&mut out).and_then(|()| self.write_last(&mut out, header, payload)),
            _ => self.leave_to_the_loop(header, payload),
        };
    }

    /// Whether nothing is taken of it any more, and it is told, or has been.
    pub(super) fn is_drained(&self) -> bool {
        self.stalls.load(Relaxed) & (DRAINED | CLOGGED | LATER) == DRAINED || self.is_gone.load(Relaxed)
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
            place.1.load(Relaxed) != 0 && open.is_none_or(|id| slot_of(id) as usize != place.0)
        };
        if !later.is_empty() || self.calls.iter().enumerate().any(|place| is_open(&place)) {
            return Some(false);
        }
        drop(later);
        if self.stalls.fetch_or(DRAINED, Relaxed) & DRAINED == 0 {
            out.outbox.push(Header::new(Kind::Drained, 0), &[]);
            let _ = self.flush(out);
        }
        Some(out.outbox.is_empty())
    }

    #[cold]
    pub(super) fn went(&self, error: Error) -> Error {
        self.desk.dropped.fetch_add(1, Relaxed);
        error
    }

    pub(super) fn check_gone(&self) -> Result<()> {
        match self.is_gone.load(Relaxed) {
            true => Err(self.went(Error::PeerDied { unreleased: 0 })),
            false => Ok(()),
        }
    }

    /// Writes what there is room for; notes whether anything is left.
    pub(super) fn flush(self: &Arc<Caller>, out: &mut Out) -> Result<()> {
        self.take_later().into_iter().for_each(|message| out.outbox.push_all(message));
        let flushed = out.outbox.flush();
        self.pass_on(out);
        if !matches!(flushed, Ok(false)) || self.is_gone.load(Relaxed) {
            if self.clear(out) {
                // Its requests may be taken again.
                self.desk.stir();
            }
            return flushed.map(|_| ());
        }
        if self.stalls.fetch_or(CLOGGED, Relaxed) & CLOGGED == 0 {
            self.desk.look_at(self);
        }
        Ok(())
    }

    /// To write is to be awake: who waits for room has to ask for it again. Both the service's loop and who polls hear the doorbell.
    #[inline(always)]
    pub(super) fn pass_on(&self, out: &mut Out) {
        if out.is_awaited && !out.outbox.sender.is_armed() {
            self.tell_room(out);
        }
    }

    #[cold]
    #[inline(never)]
    fn tell_room(&self, out: &mut Out) {
        out.is_awaited = false;
        self.doorbell().ring();
    }

    /// For the service's loop: writes what there is room for. False: no room is waited for any more.
    pub(super) fn tend(self: &Arc<Caller>) -> bool {
        if !self.is_clogged() {
            return self.is_wanted();
        }
        // Who has the lock is writing.
        let Ok(Some(mut out)) = self.try_lock() else { return true };
        out.is_awaited &= out.is_polled;
        // An error is of the client's end, which its lane tells.
        let _ = self.flush(&mut out);
        self.is_awaited()
    }

    /// For the service's loop, before it sleeps: has the client ring when there is room. False: there is some, or it is to be looked
    /// for again, since who has the lock is writing.
    pub(super) fn arm(&self) -> bool {
        if !self.is_awaited() {
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
        if !self.doorbells.doorbell().drain() {
            // As in `wait_for_room`.
            self.note_gone();
            return false;
        }
        let part = self.wanted.load(Relaxed).saturating_sub(1);
        let bytes = match out.outbox.is_empty() {
            true if out.outbox.is_whole(part) => part,
            _ => out.outbox.wanted(),
        };
        // As above.
        out.is_awaited = out.outbox.sender.arm_for_body(bytes).unwrap_or(true);
        if !out.is_awaited && out.outbox.is_empty() {
            // Told once: whoever still wants it tries again. A loop that has given its part up would never sleep.
            self.wanted.store(0, Relaxed);
        }
        out.is_awaited
    }

    pub(super) fn disarm(&self) {
        // Otherwise who writes does it.
        if self.is_awaited()
            && let Ok(Some(mut out)) = self.try_lock()
            && !out.is_polled
        {
            out.is_awaited = false;
            out.outbox.sender.disarm();
        }
    }

    pub(super) fn needs_timed_wait(&self) -> bool {
        self.is_awaited() && self.try_lock().is_ok_and(|out| out.is_none_or(|out| out.outbox.sender.needs_timed_wait()))
    }
}

impl Caller {
    /// A thread waits for room for a part from now on.
    pub(super) fn begin_wait(self: &Arc<Caller>) {
        if self.stalls.fetch_add(WAITED, Relaxed) == 0 {
            // The loop is to pause its requests.
            self.desk.look_at(self);
        }
    }

    pub(super) fn end_wait(&self) {
        if self.stalls.fetch_sub(WAITED, Relaxed) < 2 * WAITED {
            // Its requests may be taken again.
            self.desk.stir();
        }
    }
}

thread_local! {
    /// The client for a reply to which this thread has room reserved, and so its lock; and in which process.
    static ROOM_OF: Cell<Option<(usize, Owner)>> = const { Cell::new(None) };
}

/// Whether this thread has room reserved. A child that was forked meanwhile has not.
pub(super) fn has_room() -> bool {
    room_of().is_some()
}

/// For whom.
pub(super) fn room_of() -> Option<usize> {
    ROOM_OF.get().filter(|(_, owner)| !owner.is_forked()).map(|(caller, _)| caller)
}

impl Caller {
    /// This thread has room reserved for a reply to it, and so its lock.
    pub(super) fn note_room(&self) {
        ROOM_OF.set(Some((std::ptr::from_ref(self) as usize, self.owner)));
    }

    pub(super) fn is_room_noted(&self) -> bool {
        room_of() == Some(std::ptr::from_ref(self) as usize)
    }
}

/// It has none any more.
pub(super) fn forget_room() {
    ROOM_OF.set(None);
}

#[cold]
pub(super) fn room_is_held() -> Error {
    Error::Refused("this thread has room reserved for another reply: send that first".to_owned())
}
