//! Going to sleep and being woken: no wake-up is lost, and the fast path of a message needs no fence.
//!
//! A sleep word is `epoch << 3 | closed: 4 | unbarriered: 2 | armed: 1`. Only the sleeper writes it. `unbarriered`: the
//! sleeper, or a predecessor, has no `membarrier`, so each waker must run a full fence.
//!
//! | sleeper | waker |
//! |---|---|
//! | drain the doorbell | store header (or head) |
//! | `arm`: store the word with the next epoch, armed | compiler fence, or a full fence if either side requires it |
//! | full fence; `membarrier`, unless every waker fences | load the word |
//! | poll once more; `disarm` if something is ready | armed, and this epoch not rung yet: ring the doorbell once |
//! | sleep; on waking `disarm` | |
//!
//! A waker that rings for nearly each message sets its word `fenced` and fences, so the sleeper saves a `membarrier`
//! per sleep. When its rings become rare, the waker clears `fenced` and loads the sleep word once more.

use crate::edges::{AtomicU32, AtomicU64, CLOSE, FENCED, failpoint, full_fence, light_barrier};
use crate::layout::ReceiverPage;
use crate::memory::field;
use core::ptr::NonNull;
use core::sync::atomic::Ordering::Relaxed;

pub(crate) const ARMED: u64 = 1;
pub(crate) const UNBARRIERED: u64 = 2;
pub(crate) const CLOSED: u64 = 4;
pub(crate) const FLAGS: u64 = ARMED | UNBARRIERED | CLOSED;
const EPOCH: u64 = 8;

/// The side that may sleep. Nothing else writes its sleep word.
#[derive(Debug)]
pub struct Sleeper {
    word: NonNull<AtomicU64>,
    value: u64,
}

// SAFETY: the pointer is to shared memory that outlives this (the caller of `attach` or `of_receiver` guarantees it).
// It is not tied to a thread, and no other sleeper writes the word.
unsafe impl Send for Sleeper {}

impl Sleeper {
    /// The sleeper of a receiver: the producers of all its lanes ring it. `can_barrier`: this process is registered for
    /// the global expedited `membarrier` and may call it, so [`Sleeper::arm`]'s `barrier` can use it. Without it, the
    /// sleeper requires its wakers to fence.
    ///
    /// # Safety
    /// The page stays mapped writable as long as this lives, and nothing else writes it.
    pub unsafe fn of_receiver(receiver: NonNull<ReceiverPage>, can_barrier: bool) -> Sleeper {
        // SAFETY: the caller guarantees that the page is mapped; `sleep` is a field of it.
        Sleeper::new(unsafe { field(receiver, |p| &raw mut (*p).sleep) }, can_barrier)
    }

    /// Takes over a word that stays mapped writable as long as this lives.
    pub(crate) fn new(word: NonNull<AtomicU64>, can_barrier: bool) -> Sleeper {
        let mut sleeper = Sleeper { word, value: 0 };
        let old = sleeper.word().load(Relaxed);
        // A new epoch: a waker that has rung the predecessor must still ring this sleeper.
        // The predecessor's request to fence stays: a waker that has acknowledged it must continue to fence.
        let unbarriered = if can_barrier { old & UNBARRIERED } else { UNBARRIERED };
        failpoint("sleep word: before");
        sleeper.set((old & !FLAGS).wrapping_add(EPOCH) | unbarriered);
        failpoint("sleep word: taken over");
        sleeper
    }

    #[inline(always)]
    fn word(&self) -> &AtomicU64 {
        // SAFETY: the caller of `attach` or `of_receiver` keeps the page mapped as long as this lives.
        unsafe { self.word.as_ref() }
    }

    fn set(&mut self, value: u64) {
        self.value = value;
        // Relaxed: `arm`'s barrier orders this store before the next poll. [sleep]
        self.word().store(value, Relaxed);
    }

    /// Announces a sleep and runs `barrier`. The caller then polls once more, and sleeps only if nothing is ready.
    /// `barrier` calls `membarrier(GLOBAL_EXPEDITED)`. It may do nothing if every waker fences
    /// ([`crate::Consumer::is_producer_fencing`]), as a full fence comes before it.
    pub fn arm(&mut self, barrier: impl FnOnce()) {
        let flags = self.value & (UNBARRIERED | CLOSED);
        failpoint("arm: before");
        self.set((self.value & !FLAGS).wrapping_add(EPOCH) | flags | ARMED);
        failpoint("arm: armed");
        // This fence precedes `barrier`, which checks which wakers fence. If a waker is about to stop, either `barrier`
        // loads its `fenced = 0`, or the waker loads this word after the store above.
        full_fence("own"); // [sleep]
        barrier(); // [sleep]
        failpoint("arm: barrier");
    }

    /// Ends the sleep: wakers need not ring.
    #[inline]
    pub fn disarm(&mut self) {
        if self.is_armed() {
            failpoint("disarm: before");
            self.set(self.value & !ARMED);
            failpoint("disarm: after");
        }
    }

    /// Whether wakers must ring.
    #[inline]
    pub fn is_armed(&self) -> bool {
        self.value & ARMED != 0
    }

    /// Whether wakers must fence because this side has no `membarrier`. Until a waker sets `fenced` in its page, a
    /// sleep must not last longer than a millisecond.
    pub fn needs_fenced_wakers(&self) -> bool {
        self.value & UNBARRIERED != 0
    }

    /// Requires wakers to fence from now on, because the kernel has refused `membarrier`. Until they set `fenced`,
    /// sleep no longer than a millisecond.
    pub fn request_fencing(&mut self) {
        self.set(self.value | UNBARRIERED);
    }

    /// Closes this side for good. Each waker detects it at its next publication.
    pub fn close(&mut self) {
        failpoint("sleep word: before closing");
        self.value = self.value & !ARMED | CLOSED;
        self.word().store(self.value, CLOSE.store()); // [close]
        failpoint("sleep word: closed");
    }
}

/// The side that rings: its view of the peer's sleep word.
#[derive(Debug)]
pub struct Waker {
    word: NonNull<AtomicU64>,
    fenced: NonNull<AtomicU32>,
    /// Flags that this side adds to each loaded sleep word: UNBARRIERED while this side fences and announces that in
    /// `fenced`.
    forced_flags: u64,
    registered: bool,
    /// The epoch of the last ring.
    rung_epoch: u64,
    /// The seq after the message that caused the last ring.
    rung_seq: u32,
    /// Consecutive rings, each close to the one before.
    near_rings: u32,
    /// Checks of the word since the last ring, while this side fences by its own choice.
    checks_since_ring: u32,
}

/// Two rings are close if their messages are at most this many apart. A membarrier costs the sleeper 2 to 20 µs, and
/// interrupts this side (docs/decisions/0009-fencing-by-choice.md); the fences of so many messages cost less than one
/// µs.
const NEAR_MESSAGES: u32 = 16;
/// This many consecutive close rings make a waker fence. A guess: high enough that an occasional wake-up does not
/// count.
const RINGS_TO_FENCE: u32 = if cfg!(loom) { 1 } else { 8 };
/// This many checks without a ring make a waker stop fencing. More than NEAR_MESSAGES, or it could stop between two
/// close rings. A stream pays at most this many fences.
const CHECKS_TO_STOP: u32 = if cfg!(loom) { 1 } else { 64 };

// SAFETY: both pointers are to shared memory that outlives this (the caller of `attach` guarantees it). They are not
// tied to a thread; the waker only reads `word`, and nothing else writes `fenced`.
unsafe impl Send for Waker {}

/// What the caller must do for the peer after it has published or released.
#[must_use = "a sleeping peer must be rung"]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// Nothing: the peer is awake.
    None,
    /// Ring the peer's doorbell now, once: the peer sleeps.
    Ring,
    /// Nothing: the peer was rung, and has not disarmed yet. It is waking up, or dead.
    Rung,
}

/// What the sleep word shows of the peer.
pub(crate) enum PeerState {
    /// It is awake.
    Awake,
    /// It sleeps in this epoch, and this side has not rung it.
    Asleep(u64),
    /// It sleeps, and this side has rung it.
    Rung,
    /// It has closed.
    Closed,
}

impl Waker {
    /// The view of `word`. `fenced` is this side's own word that announces fencing; both stay mapped as long as this
    /// lives. `registered`: this process is registered for `membarrier`, so the peer's barrier reaches it.
    pub(crate) fn new(word: NonNull<AtomicU64>, fenced: NonNull<AtomicU32>, registered: bool) -> Waker {
        // SAFETY: the caller of `attach` keeps both pages mapped as long as this lives.
        let (peer, fenced_before) = unsafe { (word.as_ref().load(Relaxed), fenced.as_ref().load(Relaxed)) };
        // A sleeper may already rely on `fenced = 1`, which a predecessor has set, or this side for an earlier peer.
        let fences = !registered || peer & UNBARRIERED != 0 || fenced_before == 1;
        let forced_flags = if fences { UNBARRIERED } else { 0 };
        let waker = Waker {
            word,
            fenced,
            forced_flags,
            registered,
            rung_epoch: 0,
            rung_seq: 0,
            near_rings: 0,
            checks_since_ring: 0,
        };
        waker.announce_fencing(fences);
        waker
    }

    #[inline(always)]
    fn word(&self) -> &AtomicU64 {
        // SAFETY: the caller of `attach` keeps the page mapped as long as this lives.
        unsafe { self.word.as_ref() }
    }

    fn announce_fencing(&self, fences: bool) {
        // SAFETY: the caller of `attach` keeps the page mapped as long as this lives.
        unsafe { self.fenced.as_ref() }.store(fences as u32, FENCED.store()); // [fenced]
        failpoint("fenced");
    }

    /// From now on, a full fence follows each publication or release.
    fn begin_fencing(&mut self) {
        if self.forced_flags == 0 {
            (self.forced_flags, self.checks_since_ring) = (UNBARRIERED, 0);
            self.announce_fencing(true);
        }
    }

    /// Stops fencing, then loads and returns the sleep word. A sleeper that relied on the fences has armed in that
    /// word. A sleeper that arms later loads `fenced = 0`.
    fn stop_fencing(&mut self) -> u64 {
        self.announce_fencing(false);
        full_fence("stop"); // [sleep]
        self.forced_flags = 0;
        self.near_rings = 0;
        // Relaxed: the fence orders it.
        let word = self.word().load(Relaxed);
        if word & UNBARRIERED != 0 {
            self.begin_fencing();
        }
        word
    }

    /// Call this after a store that the peer may be waiting for. Returns false if the peer is awake, the usual case:
    /// that costs one load. Otherwise call [`Waker::peer_state`].
    #[inline(always)]
    pub(crate) fn must_check(&self) -> bool {
        light_barrier(); // [sleep]
        // Relaxed: the barrier orders it.
        (self.word().load(Relaxed) | self.forced_flags) & FLAGS != 0
    }

    /// Whether the peer sleeps or has closed. It loads the peer's word again: the later load decides, and a peer that
    /// was found asleep and is now awake polls before its next sleep.
    #[cold]
    #[inline(never)]
    pub(crate) fn peer_state(&mut self) -> PeerState {
        light_barrier(); // [sleep]
        // Relaxed: the barrier orders it.
        let mut word = self.word().load(Relaxed);
        if (word | self.forced_flags) & UNBARRIERED != 0 {
            full_fence("fence"); // [sleep]
            self.begin_fencing();
            // Relaxed: the fence orders it.
            word = self.word().load(Relaxed);
            if self.registered && word & UNBARRIERED == 0 {
                self.checks_since_ring += 1;
                if self.checks_since_ring > CHECKS_TO_STOP {
                    word = self.stop_fencing();
                }
            }
        }
        if word & CLOSED != 0 && self.is_closed() {
            PeerState::Closed
        } else if word & ARMED == 0 {
            PeerState::Awake
        } else if word & !FLAGS == self.rung_epoch {
            PeerState::Rung
        } else {
            PeerState::Asleep(word & !FLAGS)
        }
    }

    /// Whether the peer's sleep word has the closed flag.
    pub(crate) fn is_closed(&self) -> bool {
        self.word().load(CLOSE.load()) & CLOSED != 0 // [close]
    }

    /// Records a ring for `epoch`, which needs no second one. `seq` is the number after the message that caused the
    /// ring.
    pub(crate) fn count_ring(&mut self, epoch: u64, seq: u32) {
        self.rung_epoch = epoch;
        self.near_rings = if seq.wrapping_sub(self.rung_seq) <= NEAR_MESSAGES { self.near_rings + 1 } else { 0 };
        (self.rung_seq, self.checks_since_ring) = (seq, 0);
        if self.near_rings >= RINGS_TO_FENCE {
            self.begin_fencing();
            self.near_rings = 0;
        }
    }
}
