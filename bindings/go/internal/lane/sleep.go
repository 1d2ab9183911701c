package lane

import "sync/atomic"

// The sleep word: epoch<<3 | closed | unbarriered | armed.
const (
	armed       = 1
	unbarriered = 2
	closed      = 4
	flags       = armed | unbarriered | closed
	epoch       = 8
)

// Wake is what to do about the other side after publishing or releasing.
type Wake bool

// Ring: the other side sleeps, and nothing has rung for this sleep. Ring once, now.
const Ring Wake = true

// LastRing is the note that a side makes of its last ring of the other: hints for how long the other busy-polls. A peer
// may have written anything.
type LastRing struct {
	// The number of the processor that it ran on, plus 1; 0: unknown.
	Processor uint32
	// The time on CLOCK_MONOTONIC.
	AtNS uint64
}

func storeLastRing(page []byte, at uint64, ring LastRing) {
	store32(page, at, ring.Processor)
	store64(page, at+8, ring.AtNS)
}

func loadLastRing(page []byte, at uint64) LastRing {
	return LastRing{load32(page, at), load64(page, at+8)}
}

// Sleeper is the side that may sleep, the only writer of a sleep word.
type Sleeper struct {
	word  *uint64
	value uint64
}

// NewReceiverSleeper takes over the sleep word of a receiver's page. Without canBarrier it makes the wakers fence,
// for good.
func NewReceiverSleeper(page []byte, canBarrier bool) Sleeper {
	return newSleeper(word64(page, receiverSleep), canBarrier)
}

func newSleeper(word *uint64, canBarrier bool) Sleeper {
	s := Sleeper{word: word}
	// The next epoch, so that an earlier ring does not count for a later one. The predecessor's demand on the wakers
	// stays.
	old := atomic.LoadUint64(word)
	asked := old & unbarriered
	if !canBarrier {
		asked = unbarriered
	}
	s.set(old&^flags + epoch | asked)
	return s
}

func (s *Sleeper) set(value uint64) {
	s.value = value
	atomic.StoreUint64(s.word, value) // [sleep]
}

// Arm announces a sleep. Then it makes the wakers pass a barrier, unless areFenced returns that all of them fence. It
// asks after the announcement, which as an atomic store is a full fence. [sleep] [fenced]
//
// membarrier returns whether the kernel permitted it. The caller then polls, and sleeps only if the condition still
// does not hold.
func (s *Sleeper) Arm(areFenced, membarrier func() bool) {
	s.set(s.value&^(flags&^(unbarriered|closed)) + epoch | armed)
	if !areFenced() && !membarrier() {
		s.LoseBarrier()
	}
}

// Disarm announces that this side is awake.
func (s *Sleeper) Disarm() {
	if s.value&armed != 0 {
		s.set(s.value &^ armed)
	}
}

// IsArmed reports whether the wakers are to ring.
func (s *Sleeper) IsArmed() bool { return s.value&armed != 0 }

// LoseBarrier makes the wakers fence from now on: the kernel refused membarrier.
func (s *Sleeper) LoseBarrier() { s.set(s.value | unbarriered) }

// NeedsFencedWakers reports whether a sleep must end after a millisecond while a waker's page does not say that it
// fences.
func (s *Sleeper) NeedsFencedWakers() bool { return s.value&unbarriered != 0 }

// Close marks this side closed for good. [close]
func (s *Sleeper) Close() { s.set(s.value&^armed | closed) }

// waker is the side that rings, with its view of the other's sleep word.
type waker struct {
	word *uint64
	rung uint64
}

// newWaker attaches to the other side's word, and declares in this side's own that it fences: each store that a
// sleeper may wait for is atomic, and so a full fence before the load of the word. That is always sound, and never
// withdrawn. [fenced]
func newWaker(word *uint64, fenced *uint32) waker {
	atomic.StoreUint32(fenced, 1)
	return waker{word: word}
}

// poll is called after each store that the other side may wait for. It returns the word, whether the other side
// sleeps in an epoch in which nothing rang, and whether it has closed. [sleep] [close]
func (w *waker) poll() (word uint64, sleeps, isClosed bool) {
	word = atomic.LoadUint64(w.word)
	return word, word&armed != 0 && word&^flags != w.rung, word&closed != 0
}

// noteRing records that this word's epoch was rung: once is enough.
func (w *waker) noteRing(word uint64) { w.rung = word &^ flags }
