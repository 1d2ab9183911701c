//! Going to sleep and being woken, without a lost wake-up and without a fence on the way of a message.
//!
//! A sleep word is `epoch << 3 | closed: 4 | unbarriered: 2 | armed: 1`; its one writer is the sleeper.
//!
//! | sleeper | waker |
//! |---|---|
//! | drain the descriptor | store header (or head) |
//! | `arm`: store the word with the next epoch, armed | barrier: light, or full when either side says so |
//! | full fence; `membarrier`, unless every waker says that it fences | load the word |
//! | look again; `disarm` if there is something | armed, and this epoch not rung yet: ring the descriptor, once |
//! | sleep; on waking `disarm` | |
//!
//! A waker that rings for nearly each message says so in its word `fenced` and fences, which spares the sleeper a
//! `membarrier` each time; one that no longer rings takes it back, and looks at the sleep word once more.

use crate::edges::{AtomicU32, AtomicU64, CLOSE, FENCED, failpoint, full_fence, light_barrier};
use core::ptr::NonNull;
use core::sync::atomic::Ordering::Relaxed;

const ARMED: u64 = 1;
const UNBARRIERED: u64 = 2;
const CLOSED: u64 = 4;
const FLAGS: u64 = ARMED | UNBARRIERED | CLOSED;
const EPOCH: u64 = 8;

/// The side that may sleep: the one writer of a sleep word.
#[derive(Debug)]
pub struct Sleeper {
    word: NonNull<AtomicU64>,
    value: u64,
}

// SAFETY: the pointer is to shared memory that outlives it (see `Data::new`), and this is its only writer.
unsafe impl Send for Sleeper {}

impl Sleeper {
    /// Takes over the word. `can_barrier`: this process is registered for `membarrier`'s global expedited command and
    /// may call it, so that [`Sleeper::arm`]'s `barrier` can be that; otherwise wakers are asked to fence.
    pub(crate) fn new(word: NonNull<AtomicU64>, can_barrier: bool) -> Sleeper {
        // SAFETY: the caller's memory lives as long as this (see `Data::new`).
        let old = unsafe { word.as_ref() }.load(Relaxed);
        let mut sleeper = Sleeper { word, value: 0 };
        // A successor starts a new epoch, so that a ring already sent does not stand for one still due. What its predecessor
        // asked wakers for stays asked: they have said that they fence, and must go on to.
        let unbarriered = if can_barrier { old & UNBARRIERED } else { UNBARRIERED };
        failpoint("sleep word: before");
        sleeper.set((old & !FLAGS).wrapping_add(EPOCH) | unbarriered);
        failpoint("sleep word: taken over");
        sleeper
    }

    fn set(&mut self, value: u64) {
        self.value = value;
        // Relaxed: the order between this store and looking again is the barrier's business. [sleep]
        // SAFETY: as in `new`.
        unsafe { self.word.as_ref() }.store(value, Relaxed);
    }

    /// Announces a sleep and runs `barrier`. The caller then looks again at what it waits for, and sleeps only if it
    /// still is not there. `barrier` is `membarrier(GLOBAL_EXPEDITED)`, as said at attach; or, behind the full fence that comes
    /// before it, nothing, if each waker says that it fences ([`crate::Consumer::is_producer_fencing`]).
    pub fn arm(&mut self, barrier: impl FnOnce()) {
        let flags = self.value & (UNBARRIERED | CLOSED);
        failpoint("arm: before");
        self.set((self.value & !FLAGS).wrapping_add(EPOCH) | flags | ARMED);
        failpoint("arm: armed");
        // Before `barrier` asks which wakers fence: one that is about to stop is seen to have, or sees this.
        full_fence("own"); // [sleep]
        barrier(); // [sleep]
        failpoint("arm: barrier");
    }

    /// Says that nobody sleeps any more: wakers need not ring.
    #[inline]
    pub fn disarm(&mut self) {
        if self.is_armed() {
            failpoint("disarm: before");
            self.set(self.value & !ARMED);
            failpoint("disarm: after");
        }
    }

    /// Whether wakers have been asked to ring.
    #[inline]
    pub fn is_armed(&self) -> bool {
        self.value & ARMED != 0
    }

    /// Whether wakers must fence because this side has no `membarrier`. Until a waker's page says that it does, a sleep
    /// must not last longer than a millisecond.
    pub fn needs_fenced_wakers(&self) -> bool {
        self.value & UNBARRIERED != 0
    }

    /// Asks wakers to fence from now on: `membarrier` has been refused after all. Sleep no longer than a millisecond
    /// until they say that they do.
    pub fn request_fencing(&mut self) {
        self.set(self.value | UNBARRIERED);
    }

    /// Says for good that this side is gone, so that wakers notice at their next publication.
    pub fn close(&mut self) {
        failpoint("sleep word: before closing");
        self.value = self.value & !ARMED | CLOSED;
        // SAFETY: as in `new`.
        unsafe { self.word.as_ref() }.store(self.value, CLOSE.store()); // [close]
        failpoint("sleep word: closed");
    }
}

/// The side that rings: the view of the other's sleep word.
#[derive(Debug)]
pub struct Waker {
    word: NonNull<AtomicU64>,
    fenced: NonNull<AtomicU32>,
    /// Bits that count as set in whatever the word says; UNBARRIERED while this side fences, which is what `fenced` says too.
    always: u64,
    registered: bool,
    rung: u64,
    /// The number of the message that was rung for last.
    rung_at: u32,
    /// Rings of late, each near the one before.
    rings: u32,
    /// Looks since the last ring, while this side fences of its own choice.
    quiet: u32,
}

/// Rings for messages of numbers no further apart count as near. A membarrier costs the sleeper 2 to 20 µs, and disturbs this
/// side (docs/decisions/0009-fencing-by-choice.md); the fences of so many messages less than one.
const NEAR: u32 = 16;
/// So many near rings one after the other make a waker fence. A guess: enough that a wake now and then is none of them.
const RINGS_TO_FENCE: u32 = if cfg!(loom) { 1 } else { 8 };
/// So many looks without a ring make it stop. More than NEAR, lest it stop between two near rings; a stream that has begun is
/// fenced no longer than that.
const LOOKS_TO_STOP: u32 = if cfg!(loom) { 1 } else { 64 };

// SAFETY: as for `Sleeper`; the word is only read, and `fenced` has this as its only writer.
unsafe impl Send for Waker {}

/// What is to be done about the other side after publishing or releasing.
#[must_use = "a sleeping side is to be rung"]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// Nothing: it is awake.
    None,
    /// It sleeps: ring it, once, now.
    Ring,
    /// It sleeps and has been rung, and has not said yet that it is awake: on its way, or dead.
    Rung,
}

/// What a waker found in a sleep word that wants attention.
pub(crate) enum Attention {
    /// Nobody sleeps.
    None,
    /// Somebody sleeps in this epoch and has not been rung.
    Sleeps(u64),
    /// Somebody sleeps and has been rung.
    Rung,
    /// The other side has closed.
    Closed,
}

impl Waker {
    /// The view of `word`. `fenced` is this side's own word that acknowledges fencing. `registered`: this process is
    /// registered for `membarrier`, so that the other's barrier reaches it.
    pub(crate) fn new(word: NonNull<AtomicU64>, fenced: NonNull<AtomicU32>, registered: bool) -> Waker {
        // SAFETY: the caller's memory lives as long as this (see `Data::new`).
        let (peer, said) = unsafe { (word.as_ref().load(Relaxed), fenced.as_ref().load(Relaxed)) };
        // What a predecessor said, or this side to another peer, may be relied on already.
        let fences = !registered || peer & UNBARRIERED != 0 || said == 1;
        let always = if fences { UNBARRIERED } else { 0 };
        let waker = Waker { word, fenced, always, registered, rung: 0, rung_at: 0, rings: 0, quiet: 0 };
        waker.say(fences);
        waker
    }

    fn say(&self, fences: bool) {
        // SAFETY: as in `new`.
        unsafe { self.fenced.as_ref() }.store(fences as u32, FENCED.store()); // [fenced]
        failpoint("fenced");
    }

    /// Each publication, or release, is followed by a full fence from now on.
    fn begin_fencing(&mut self) {
        if self.always == 0 {
            (self.always, self.quiet) = (UNBARRIERED, 0);
            self.say(true);
        }
    }

    /// Takes that back. Answers the word as it is then: who announced a sleep relying on it is in there, or will see that it
    /// cannot.
    fn stop_fencing(&mut self) -> u64 {
        self.say(false);
        full_fence("stop"); // [sleep]
        self.always = 0;
        self.rings = 0;
        // Relaxed: the fence orders it.
        // SAFETY: as in `new`.
        let word = unsafe { self.word.as_ref() }.load(Relaxed);
        if word & UNBARRIERED != 0 {
            self.begin_fencing();
        }
        word
    }

    /// After a store that the other side may be waiting for: whether something wants attention. The common answer, that
    /// the other side is awake, costs one load and one branch.
    #[inline(always)]
    pub(crate) fn attention(&mut self) -> Attention {
        light_barrier(); // [sleep]
        // Relaxed: the barrier orders it.
        // SAFETY: as in `new`.
        let word = unsafe { self.word.as_ref() }.load(Relaxed);
        if (word | self.always) & FLAGS == 0 { Attention::None } else { self.look(word) }
    }

    #[cold]
    #[inline(never)]
    fn look(&mut self, mut word: u64) -> Attention {
        if (word | self.always) & UNBARRIERED != 0 {
            full_fence("fence"); // [sleep]
            self.begin_fencing();
            // Relaxed: as above; now behind the fence.
            // SAFETY: as in `new`.
            word = unsafe { self.word.as_ref() }.load(Relaxed);
            if self.registered && word & UNBARRIERED == 0 {
                self.quiet += 1;
                if self.quiet > LOOKS_TO_STOP {
                    word = self.stop_fencing();
                }
            }
        }
        if word & CLOSED != 0 && self.is_closed() {
            Attention::Closed
        } else if word & ARMED == 0 {
            Attention::None
        } else if word & !FLAGS == self.rung {
            Attention::Rung
        } else {
            Attention::Sleeps(word & !FLAGS)
        }
    }

    /// Whether the other side's word says that it is gone.
    pub(crate) fn is_closed(&self) -> bool {
        // SAFETY: as in `new`.
        unsafe { self.word.as_ref() }.load(CLOSE.load()) & CLOSED != 0 // [close]
    }

    /// Notes that this epoch has been rung: once is enough. `seq` is the number of the message behind the one that it was
    /// rung for.
    pub(crate) fn rang(&mut self, epoch: u64, seq: u32) {
        self.rung = epoch;
        self.rings = if seq.wrapping_sub(self.rung_at) <= NEAR { self.rings + 1 } else { 0 };
        (self.rung_at, self.quiet) = (seq, 0);
        if self.rings >= RINGS_TO_FENCE {
            self.begin_fencing();
            self.rings = 0;
        }
    }
}
