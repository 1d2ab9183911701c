//! A session: what a service has of one client while any thread may reply to it. Its lane of replies is behind a lock;
//! its calls that are in flight are in a table of atomics.
//!
//! Each flag and each slot is an atomic that guards no other memory, so all of them are Relaxed. What a thread did to
//! the lane before, the loop sees under the lock, or by an edge of `edges.rs`.

use super::edges::{DetachedCount, NotifyFlag};
use super::frame::{CALLS_MAX, Clock, FAILED_MEMORY, Header, Kind, Outgoing, generation_of, slot_of};
use super::outbox::Outbox;
use super::reply_lock::{Contents, Guard, ReplyLock};
use crate::outbox::FrameSender as _;
use pelton_channel::raw::Settings;
use pelton_channel::raw::{Budget, Doorbells, ReplyLane, Share, SharedLiveness};
use pelton_channel::{Error, Receiver, Result, Traceparent};
use pelton_lane::ReservedSpace;
use pelton_os::{Doorbell, LocalWake, Owner, Peer, locked};
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::Duration;

/// Most bytes that a service keeps for its clients by default. A guess: four of the largest requests or replies by
/// default.
const KEPT_MAX: u64 = 256 << 20;

/// What all sessions of a service share.
#[derive(Debug)]
pub(crate) struct ServiceShared {
    pub(crate) options: Settings,
    /// Memory for what is kept of all clients; each has a share.
    memory: Arc<Budget>,
    /// The null doorbell of the lanes of replies: the loop polls their doorbells elsewhere.
    pub(super) null_wake: Arc<LocalWake>,
    pub(super) local_wake: Arc<LocalWake>,
    pub(super) clock: Clock,
    /// Sessions that need the loop since it last took them; `None` once the service is dropped.
    pub(super) attention: Mutex<Option<Vec<Arc<Session>>>>,
    /// Whether there is anything for the loop here.
    pub(super) notified: NotifyFlag,
    pub(super) is_stopped: AtomicBool,
    /// The service takes no more requests.
    pub(super) is_draining: AtomicBool,
    /// Replies to clients that had left.
    pub(super) dropped: AtomicU64,
    pub(super) owner: Owner,
}

impl ServiceShared {
    pub(super) fn new(options: &Settings, requests: &Receiver, null_wake: Arc<LocalWake>) -> Result<ServiceShared> {
        let kept_max = KEPT_MAX.max(options.call_bytes_max.saturating_mul(4));
        Ok(ServiceShared {
            options: options.clone(),
            memory: requests.budget().unwrap_or_else(|| Budget::new(kept_max)),
            null_wake,
            local_wake: requests.doorbells().local_wake().clone(),
            clock: Clock::new(),
            attention: Mutex::new(Some(Vec::new())),
            notified: NotifyFlag::new(),
            is_stopped: AtomicBool::new(false),
            is_draining: AtomicBool::new(false),
            dropped: AtomicU64::new(0),
            owner: Owner::current().map_err(Error::system("looking whose handle this is"))?,
        })
    }

    /// Wakes the loop, which then takes the reasons.
    pub(super) fn notify(&self) {
        // In a forked child the descriptor is closed.
        if !self.owner.is_forked() {
            self.notified.set();
            self.local_wake.ring();
        }
    }
}

/// One client of a service.
#[derive(Debug)]
pub(super) struct Session {
    /// This session, for the loop's attention.
    this: Weak<Session>,
    /// No other session of this process has it, not even one that is created later at this one's address.
    serial: u64,
    /// Its index in the service's table.
    pub(super) index: usize,
    pub(super) shared: Arc<ServiceShared>,
    /// This client's share of the service's memory: replies that wait for space, and incomplete requests.
    pub(super) memory: Arc<Share>,
    pub(super) replies: ReplyLock<ReplyPath>,
    /// References outside the service's loop.
    pub(super) detached: DetachedCount,
    /// Notified when the thread that polls for free space stops polling.
    pub(super) poll_ended: Condvar,
    /// Why its lane of requests is paused: a sum of the reasons below, or 0.
    pauses: AtomicU32,
    /// One more than the size of a part that found no space, to be reported once by the service's loop; or 0. Its lane
    /// of requests is not paused for this, so that the loop still receives a cancel of the call.
    part_wanted: AtomicUsize,
    /// Final replies of threads that must not wait for the lock. The loop writes them.
    deferred: Mutex<Vec<Outgoing>>,
    /// The client has left.
    is_gone: AtomicBool,
    /// By slot: 0, or the generation of the call there and its flags.
    calls: Box<[AtomicU64; CALLS_MAX as usize]>,
    /// By slot: the last call that came with a traceparent. Its call may have ended.
    traceparents: Mutex<HashMap<u32, (u64, Traceparent)>>,
    doorbells: Doorbells,
    pub(super) liveness: Option<SharedLiveness>,
    pub(super) peer: Option<Peer>,
    /// The largest reply that the client takes.
    pub(super) bytes_max: u64,
    owner: Owner,
}

/// The serial number of the next session.
static NEXT_SERIAL: AtomicU64 = AtomicU64::new(0);

/// Reasons to pause a lane of requests. Replies wait for space.
const BACKPRESSURED: u32 = 1;
/// [`Session::deferred`] is not empty.
const DEFERRED: u32 = 2;
/// DRAINED has been written: the service takes nothing more.
const DRAINED: u32 = 4;
/// The user takes no requests, and the next message of the lane is for it.
const FULL: u32 = 8;
/// Once for each thread that waits for space for a part: another request of this client could make one more thread
/// wait.
const WAITING: u32 = 1 << 8;

/// Flags of a slot.
const TAKEN: u64 = 1;
const CANCELLED: u64 = 2;

/// The way to one client: its lane of replies, and what waits for space there. A thread has the lock for as long as it
/// copies a reply.
#[derive(Debug)]
pub(super) struct ReplyPath {
    pub(super) outbox: Outbox,
    /// A thread waits for space, and polls the doorbell.
    pub(super) is_polled: bool,
    /// A thread or the loop waited for space when the lock was last released. The first writer that finds space resets
    /// this and rings the doorbell.
    pub(super) is_awaited: bool,
    /// The space of a reservation. Here, so that a reservation is one pointer, as a request is.
    reserved: Option<ReservedSpace>,
}

pub(super) type ReplyGuard<'a> = Guard<'a, ReplyPath>;

impl ReplyPath {
    /// The reserved space.
    #[inline(always)]
    pub(super) fn reserved(&self) -> ReservedSpace {
        self.reserved.expect("it is reserved")
    }
}

impl<'a> Guard<'a, ReplyPath> {
    /// Gives this access to a reservation of that space, until [`Contents::take_kept`].
    #[inline(always)]
    pub(super) fn keep_for(mut self, space: ReservedSpace) {
        self.reserved = Some(space);
        self.keep();
    }
}

impl Contents<ReplyPath> {
    /// For the end of a reservation: whether it had the lock, or somebody waited for space before. Without the lock no
    /// other thread can have changed anything since.
    #[inline(always)]
    pub(super) fn is_watched(&self) -> bool {
        self.is_kept() || self.is_awaited
    }
}

impl Session {
    pub(super) fn new(reply: ReplyLane, index: usize, shared: Arc<ServiceShared>) -> Arc<Session> {
        let ReplyLane { sender, bytes_max } = reply;
        Arc::new_cyclic(|this| Session {
            this: this.clone(),
            serial: NEXT_SERIAL.fetch_add(1, Relaxed),
            index,
            liveness: sender.shared_liveness(),
            peer: sender.peer(),
            doorbells: sender.doorbells().clone(),
            owner: shared.owner,
            replies: ReplyLock::new(ReplyPath {
                outbox: Outbox::new(sender),
                is_polled: false,
                is_awaited: false,
                reserved: None,
            }),
            detached: DetachedCount::new(),
            memory: Share::new(&shared.memory),
            shared,
            poll_ended: Condvar::new(),
            pauses: AtomicU32::new(0),
            part_wanted: AtomicUsize::new(0),
            deferred: Mutex::default(),
            is_gone: AtomicBool::new(false),
            calls: Box::new([const { AtomicU64::new(0) }; CALLS_MAX as usize]),
            traceparents: Mutex::default(),
            bytes_max,
        })
    }

    /// The doorbell that the client rings when there is space.
    pub(super) fn doorbell(&self) -> &Doorbell {
        self.doorbells.doorbell()
    }

    /// Has the loop check this session.
    #[cold]
    pub(super) fn request_attention(&self) {
        // None while the last reference frees it: then the loop has released it.
        if let Some(this) = self.this.upgrade()
            && let Some(attention) = &mut *locked(&self.shared.attention)
        {
            attention.push(this);
        }
        self.shared.notify();
    }

    /// Whether the loop should take none of its requests now.
    pub(super) fn is_paused(&self) -> bool {
        self.pauses.load(Relaxed) != 0
    }

    /// For the loop: the user takes no requests now, or takes them again.
    pub(super) fn set_full(&self, is_full: bool) {
        match is_full {
            true => self.pauses.fetch_or(FULL, Relaxed),
            false => self.pauses.fetch_and(!FULL, Relaxed),
        };
    }

    /// Whether replies wait for space, or for the loop.
    pub(super) fn is_backpressured(&self) -> bool {
        self.pauses.load(Relaxed) & (BACKPRESSURED | DEFERRED) != 0
    }

    /// Whether the loop should report space for a part.
    fn is_part_wanted(&self) -> bool {
        self.part_wanted.load(Relaxed) != 0 && !self.is_gone.load(Relaxed)
    }

    /// Whether the loop waits for space, for either reason.
    pub(super) fn is_space_awaited(&self) -> bool {
        self.is_backpressured() || self.is_part_wanted()
    }

    /// A part of this size found no space, and no thread waits for it: the loop reports when there is some.
    #[cold]
    pub(super) fn want_space(&self, bytes: usize) {
        if self.part_wanted.swap(bytes.saturating_add(1), Relaxed) == 0 {
            self.request_attention();
        }
    }

    pub(super) fn has_deferred(&self) -> bool {
        self.pauses.load(Relaxed) & DEFERRED != 0
    }

    /// For the loop: the client has left. Drops what waits for it.
    pub(super) fn close(&self) {
        self.note_gone();
        // A thread that has the lock detects it by itself.
        if let Ok(Some(mut path)) = self.try_lock() {
            let _ = self.clear(&mut path);
        }
        self.poll_ended.notify_all();
    }

    /// Nobody reads the lane of replies any more.
    pub(super) fn note_gone(&self) {
        self.is_gone.store(true, Relaxed);
    }

    /// Drops what waits for space. Returns whether anything did.
    fn clear(&self, path: &mut ReplyPath) -> bool {
        let _ = self.take_deferred();
        path.outbox.clear();
        self.end_backpressure()
    }

    /// Nothing waits for space any more. Returns whether anything did.
    fn end_backpressure(&self) -> bool {
        self.pauses.fetch_and(!BACKPRESSURED, Relaxed) & BACKPRESSURED != 0
    }

    pub(super) fn is_forked(&self) -> bool {
        self.owner.is_forked()
    }

    /// Takes the lock, if it is free. In a forked child, a thread that does not exist there may have it.
    #[inline(always)]
    pub(super) fn try_lock(&self) -> Result<Option<ReplyGuard<'_>>> {
        if self.owner.is_forked() {
            return Err(Error::Forked);
        }
        Ok(self.replies.try_lock())
    }

    /// Releases the lock until the polling thread has finished, or for as long as is left.
    pub(super) fn wait_for_poll<'a>(&'a self, path: ReplyGuard<'a>, left: Option<Duration>) -> ReplyGuard<'a> {
        self.replies.wait_on(&self.poll_ended, path, left)
    }

    /// The slot of a call whose id has been checked. The remainder omits the compiler's bounds check.
    #[inline(always)]
    fn slot(&self, id: u64) -> &AtomicU64 {
        &self.calls[(slot_of(id) % CALLS_MAX) as usize]
    }

    /// Begins a call. Returns false if its slot is taken.
    #[inline(always)]
    pub(super) fn begin(&self, id: u64) -> bool {
        let slot = self.slot(id);
        // Relaxed: the client learnt from a reply that the slot is free. The reply came after the store, and before
        // this request.
        if slot.load(Relaxed) != 0 {
            return false;
        }
        slot.store(u64::from(generation_of(id)) << 32 | TAKEN, Relaxed);
        true
    }

    /// Notes the traceparent of a call that has begun; `None` if that is not valid.
    #[cold]
    pub(super) fn set_traceparent(&self, id: u64, traceparent: Option<Traceparent>) {
        let mut traceparents = locked(&self.traceparents);
        match traceparent {
            Some(traceparent) => traceparents.insert(slot_of(id), (id, traceparent)),
            None => traceparents.remove(&slot_of(id)),
        };
    }

    /// The traceparent with which a call came.
    pub(super) fn traceparent(&self, id: u64) -> Option<Traceparent> {
        locked(&self.traceparents).get(&slot_of(id)).filter(|(of, _)| *of == id).map(|(_, traceparent)| *traceparent)
    }

    /// Ends a call, before its final reply is published: that lets the client use the slot again.
    #[inline(always)]
    pub(super) fn end(&self, id: u64) {
        self.slot(id).store(0, Relaxed);
    }

    /// Returns whether it has an effect: the call is in flight, and was not cancelled before.
    pub(super) fn cancel(&self, id: u64) -> bool {
        let taken = u64::from(generation_of(id)) << 32 | TAKEN;
        self.slot(id).compare_exchange(taken, taken | CANCELLED, Relaxed, Relaxed).is_ok()
    }

    pub(super) fn is_cancelled(&self, id: u64) -> bool {
        self.is_gone.load(Relaxed) || self.slot(id).load(Relaxed) & CANCELLED != 0
    }

    /// Writes the final reply of a call, or queues it until there is space.
    #[inline(always)]
    pub(super) fn write_final(&self, path: &mut ReplyPath, header: Header, payload: &[u8]) -> Result<()> {
        self.end(header.id);
        self.check_gone()?;
        if path.outbox.is_whole(payload.len())
            && path.outbox.try_write(header, payload).map_err(|error| self.count_dropped(error))?
        {
            self.pass_on_space(path);
            return Ok(());
        }
        // In pieces, it must end once it has begun: so there is memory for all of it before.
        let written = match self.memory.take(payload.len() as u64) {
            Some(kept) => path.outbox.write_or_queue(header, payload, Some(kept)),
            None => {
                let (failed, error) = self.failed_for_memory(header.id, payload.len());
                path.outbox.push_all(failed);
                Err(error)
            }
        };
        let flushed = self.flush(path);
        written.and(flushed)
    }

    /// A final reply that waits for space. Without memory for it, the call fails instead, and so does the replying
    /// function.
    fn queued(&self, header: Header, payload: &[u8]) -> (Outgoing, Result<()>) {
        if let Some(kept) = self.memory.take(payload.len() as u64) {
            return (Outgoing::new(header, payload.to_vec(), Some(kept)), Ok(()));
        }
        let (failed, error) = self.failed_for_memory(header.id, payload.len());
        (failed, Err(error))
    }

    /// What fails a call of which so many bytes cannot be kept, and the error for the replying function.
    fn failed_for_memory(&self, id: u64, bytes: usize) -> (Outgoing, Error) {
        let error = self.no_memory(bytes);
        let failed = Header { code: FAILED_MEMORY, ..Header::new(Kind::Failed, id) };
        (Outgoing::new(failed, self.cut(error.to_string()), None), error)
    }

    /// A text, at most as long as the client takes.
    fn cut(&self, text: String) -> Vec<u8> {
        let mut text = text.into_bytes();
        text.truncate(self.bytes_max.try_into().unwrap_or(usize::MAX));
        text
    }

    #[cold]
    pub(super) fn no_memory(&self, bytes: usize) -> Error {
        Error::Memory { bytes: bytes as u64, left: self.memory.left(), most: self.memory.most() }
    }

    /// For the loop: fails the call of a request in pieces that the memory could not hold.
    #[cold]
    pub(super) fn fail_for_memory(&self, id: u64, bytes: u64) {
        let failed = Header { code: FAILED_MEMORY, ..Header::new(Kind::Failed, id) };
        self.reply_from_loop(failed, &self.cut(self.no_memory(bytes as usize).to_string()));
    }

    /// A final reply was written, and the lock released: a draining service checks whether it was the last one.
    #[inline(always)]
    pub(super) fn note_final(&self) {
        // A loop that found the call open has read the flag before that. It has then released the lock to this thread:
        // so this thread sees the flag.
        if self.shared.is_draining.load(Relaxed) {
            self.request_attention();
        }
    }

    /// Leaves a final reply to the loop, on a thread that must not wait for the lock.
    #[cold]
    pub(super) fn defer(&self, header: Header, payload: &[u8]) -> Result<()> {
        let (message, kept) = self.queued(header, payload);
        let mut deferred = locked(&self.deferred);
        // Under this lock, so that `end_drain` finds either the open call or the reply.
        self.end(header.id);
        self.push_deferred(&mut deferred, message);
        drop(deferred);
        self.request_attention();
        kept
    }

    fn push_deferred(&self, deferred: &mut Vec<Outgoing>, message: Outgoing) {
        deferred.push(message);
        self.pauses.fetch_or(DEFERRED, Relaxed);
    }

    fn take_deferred(&self) -> Vec<Outgoing> {
        if !self.has_deferred() {
            return Vec::new();
        }
        let mut deferred = locked(&self.deferred);
        self.pauses.fetch_and(!DEFERRED, Relaxed);
        std::mem::take(&mut deferred)
    }

    /// For the loop: reports to the client that requests are returned from now on.
    pub(super) fn begin_drain(&self) {
        self.push_deferred(
            &mut locked(&self.deferred),
            Outgoing::new(Header::new(Kind::Draining, 0), Vec::new(), None),
        );
    }

    /// For the loop: returns a request that it has just taken.
    #[cold]
    pub(super) fn return_request(&self, id: u64) {
        self.reply_from_loop(Header::new(Kind::Returned, id), &[]);
    }

    /// Replies from the loop, which must not wait for the lock.
    fn reply_from_loop(&self, header: Header, payload: &[u8]) {
        // An error means that the client has left. The loop detects that by the client's lane.
        let _ = match self.try_lock() {
            // After what is queued before it.
            Ok(Some(mut path)) => self.flush(&mut path).and_then(|()| self.write_final(&mut path, header, payload)),
            _ => self.defer(header, payload),
        };
    }

    /// Whether DRAINED is in the lane of replies, or the client has left.
    pub(super) fn is_drained(&self) -> bool {
        self.pauses.load(Relaxed) & (DRAINED | BACKPRESSURED | DEFERRED) == DRAINED || self.is_gone.load(Relaxed)
    }

    /// For the loop of a draining service: once all calls of this client have ended, writes DRAINED. `incomplete` is
    /// the call of a request of which only some pieces have come. Returns whether DRAINED is in the lane; `None` if
    /// another thread has the lock.
    pub(super) fn end_drain(&self, incomplete: Option<u64>) -> Option<bool> {
        let Ok(mut path) = self.try_lock() else { return Some(true) };
        let path = path.as_mut()?;
        // An error means that the client has left. The loop detects that by the client's lane.
        let _ = self.flush(path);
        let deferred = locked(&self.deferred);
        let is_open = |(slot, call): (usize, &AtomicU64)| {
            call.load(Relaxed) != 0 && incomplete.is_none_or(|id| slot_of(id) as usize != slot)
        };
        if !deferred.is_empty() || self.calls.iter().enumerate().any(is_open) {
            return Some(false);
        }
        drop(deferred);
        if self.pauses.fetch_or(DRAINED, Relaxed) & DRAINED == 0 {
            path.outbox.push(Header::new(Kind::Drained, 0), &[]);
            let _ = self.flush(path);
        }
        Some(path.outbox.is_empty())
    }

    /// Counts a reply to a client that has left.
    #[cold]
    pub(super) fn count_dropped(&self, error: Error) -> Error {
        self.shared.dropped.fetch_add(1, Relaxed);
        error
    }

    pub(super) fn check_gone(&self) -> Result<()> {
        match self.is_gone.load(Relaxed) {
            true => Err(self.count_dropped(Error::PeerDied { unreleased: 0 })),
            false => Ok(()),
        }
    }

    /// Writes as much of the queue as there is space for, and notes whether anything is left.
    pub(super) fn flush(&self, path: &mut ReplyPath) -> Result<()> {
        self.take_deferred().into_iter().for_each(|message| path.outbox.push_all(message));
        let flushed = path.outbox.flush();
        self.pass_on_space(path);
        // After a shortage of the system, what has begun must still end.
        let is_short = matches!(flushed, Err(Error::System { .. }));
        let is_over = flushed.is_err() && !is_short || self.is_gone.load(Relaxed);
        if is_over || path.outbox.is_empty() {
            // What another thread has deferred meanwhile stays: the loop finds it.
            let has_ended = if is_over { self.clear(path) } else { self.end_backpressure() };
            if has_ended {
                // The loop may resume its requests.
                self.shared.notify();
            }
            return flushed.map(|_| ());
        }
        if self.pauses.fetch_or(BACKPRESSURED, Relaxed) & BACKPRESSURED == 0 {
            self.request_attention();
        }
        Ok(())
    }

    /// A write ends the announcement of a sleep, so the waiting thread announces it again. The loop or a polling thread
    /// may be that waiter: both have the doorbell.
    #[inline(always)]
    pub(super) fn pass_on_space(&self, path: &mut ReplyPath) {
        if path.is_awaited && !path.outbox.sender.is_armed() {
            self.ring_for_space(path);
        }
    }

    #[cold]
    #[inline(never)]
    fn ring_for_space(&self, path: &mut ReplyPath) {
        path.is_awaited = false;
        self.doorbell().ring();
    }

    /// For the loop: writes what there is space for. Returns whether the loop still waits for space.
    pub(super) fn poll(&self) -> bool {
        if !self.is_backpressured() {
            return self.is_part_wanted();
        }
        // A thread that has the lock is writing, or has leaked a reservation: that one ends with the client.
        let Ok(Some(mut path)) = self.try_lock() else { return !self.is_gone.load(Relaxed) };
        path.is_awaited &= path.is_polled;
        // An error means that the client has left. The loop detects that by the client's lane.
        let _ = self.flush(&mut path);
        self.is_space_awaited()
    }

    /// For the loop, before it sleeps: announces that the client is to ring when there is space. Returns false if there
    /// is some, or if another thread writes, so that the loop polls again.
    pub(super) fn arm(&self) -> bool {
        if !self.is_space_awaited() {
            return false;
        }
        let Ok(Some(mut path)) = self.try_lock() else {
            // The thread that has the lock may need this processor.
            std::thread::yield_now();
            return self.is_gone.load(Relaxed);
        };
        if self.has_deferred() {
            return false;
        }
        if path.is_polled {
            return true;
        }
        if !self.doorbell().drain() {
            // The client has shut the doorbell's socket down, as in `SessionRef::wait_for_space`.
            self.note_gone();
            return false;
        }
        let part = self.part_wanted.load(Relaxed).saturating_sub(1);
        let bytes = match path.outbox.is_empty() {
            true if path.outbox.is_whole(part) => part,
            _ => path.outbox.next_bytes(),
        };
        // An error means that the client has left. The loop detects that by the client's lane.
        path.is_awaited = path.outbox.sender.arm_for_body(bytes).unwrap_or(true);
        if !path.is_awaited && path.outbox.is_empty() {
            // Reported once: the user tries the part again, and so asks again. A loop that dropped its part would never
            // sleep.
            self.part_wanted.store(0, Relaxed);
        }
        path.is_awaited
    }

    pub(super) fn disarm(&self) {
        // If another thread has the lock, its write ends the announcement.
        if self.is_space_awaited()
            && let Ok(Some(mut path)) = self.try_lock()
            && !path.is_polled
        {
            path.is_awaited = false;
            path.outbox.sender.disarm();
        }
    }

    pub(super) fn needs_timed_wait(&self) -> bool {
        self.is_space_awaited()
            && self.try_lock().is_ok_and(|path| path.is_none_or(|path| path.outbox.sender.needs_timed_wait()))
    }

    /// A thread begins to wait for space for a part.
    pub(super) fn begin_wait(&self) {
        if self.pauses.fetch_add(WAITING, Relaxed) == 0 {
            // The loop pauses its requests.
            self.request_attention();
        }
    }

    pub(super) fn end_wait(&self) {
        if self.pauses.fetch_sub(WAITING, Relaxed) < 2 * WAITING {
            // The loop may resume its requests.
            self.shared.notify();
        }
    }
}

/// A reservation under a session's lock.
#[derive(Clone, Copy)]
struct Reserved {
    /// The session's serial number.
    session: u64,
    call: u64,
    /// The process of the reservation: a child that was forked meanwhile has none.
    owner: Owner,
}

thread_local! {
    /// The one reservation that this thread may have under a lock.
    static RESERVED: Cell<Option<Reserved>> = const { Cell::new(None) };
}

fn reserved() -> Option<Reserved> {
    RESERVED.get().filter(|reserved| !reserved.owner.is_forked())
}

/// Whether this thread has a reservation under a session's lock.
pub(super) fn has_reservation() -> bool {
    reserved().is_some()
}

/// This thread's reservation has ended.
pub(super) fn forget_reservation() {
    RESERVED.set(None);
}

impl Session {
    /// This thread has a reservation under this session's lock from now on.
    pub(super) fn note_reservation(&self, call: u64) {
        RESERVED.set(Some(Reserved { session: self.serial, call, owner: self.owner }));
    }

    pub(super) fn is_reserved_here(&self) -> bool {
        reserved().is_some_and(|reserved| reserved.session == self.serial)
    }

    /// Waits for the lock, for a reply to that call. Returns `None` if this thread has a reservation of another call.
    /// The lock's holder may itself wait for the lock that this reservation keeps, so to wait could be a deadlock.
    #[cold]
    #[inline(never)]
    pub(super) fn wait_for_lock(&self, call: u64) -> Option<ReplyGuard<'_>> {
        if reserved().is_some_and(|reserved| (reserved.session, reserved.call) == (self.serial, call)) {
            self.end_leaked_reservation();
        }
        if has_reservation() { None } else { Some(self.replies.lock()) }
    }

    /// Ends this thread's reservation of a call whose responder is in use again. The reservation borrowed the
    /// responder, so the program has leaked it (`mem::forget`).
    fn end_leaked_reservation(&self) {
        forget_reservation();
        // SAFETY: this thread has kept the guard, and the reservation that alone used the contents is leaked.
        let lock = unsafe { &mut *self.replies.kept() }.take_kept();
        drop(lock);
    }
}

#[cold]
pub(super) fn reservation_is_held() -> Error {
    Error::Refused("this thread has room reserved for another reply: send that first".to_owned())
}
