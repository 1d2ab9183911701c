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

// Wake is what is to be done about the other side after publishing or releasing.
type Wake bool

// Ring: it sleeps and has not been rung for this sleep. Ring it once, now.
const Ring Wake = true

// Sleeper is the side that may sleep: the one writer of a sleep word.
type Sleeper struct {
	word  *uint64
	value uint64
}

// NewReceiverSleeper takes over the sleep word of a receiver's page. Without canBarrier wakers are asked to fence, for good.
func NewReceiverSleeper(page []byte, canBarrier bool) Sleeper {
	return newSleeper(word64(page, receiverSleep), canBarrier)
}

func newSleeper(word *uint64, canBarrier bool) Sleeper {
	s := Sleeper{word: word}
	// The next epoch, so that a ring already sent does not stand for one still due. What a predecessor asked of wakers stays.
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

// Arm announces a sleep, then has the wakers pass a barrier unless all of them fence, as areFenced says: it is asked behind
// the announcement, which as an atomic store is a full fence to what comes next. [sleep] [fenced]
// membarrier answers whether it could. The caller then looks again, and sleeps only if there still is nothing.
func (s *Sleeper) Arm(areFenced, membarrier func() bool) {
	s.set(s.value&^(flags&^(unbarriered|closed)) + epoch | armed)
	if !areFenced() && !membarrier() {
		s.LoseBarrier()
	}
}

// Disarm says that nobody sleeps any more.
func (s *Sleeper) Disarm() {
	if s.value&armed != 0 {
		s.set(s.value &^ armed)
	}
}

// IsArmed says whether wakers have been asked to ring.
func (s *Sleeper) IsArmed() bool { return s.value&armed != 0 }

// LoseBarrier asks wakers to fence from now on: membarrier has been refused.
func (s *Sleeper) LoseBarrier() { s.set(s.value | unbarriered) }

// NeedsFencedWakers says whether a sleep may last only a millisecond while a waker's page does not say that it fences.
func (s *Sleeper) NeedsFencedWakers() bool { return s.value&unbarriered != 0 }

// Close says for good that this side is gone. [close]
func (s *Sleeper) Close() { s.set(s.value&^armed | closed) }

// waker is the side that rings: the view of the other's sleep word.
type waker struct {
	word *uint64
	rung uint64
}

// newWaker begins to look at the other side's word, and says in this side's own that it fences: each store that somebody may
// sleep for is atomic, and so is a full fence to the look at the word. That is always sound, and never taken back. [fenced]
func newWaker(word *uint64, fenced *uint32) waker {
	atomic.StoreUint32(fenced, 1)
	return waker{word: word}
}

// look is made behind each store that the other side may be waiting for: the word, whether it sleeps in an epoch that has not
// been rung, and whether it has closed. [sleep] [close]
func (w *waker) poll() (word uint64, sleeps, isClosed bool) {
	word = atomic.LoadUint64(w.word)
	return word, word&armed != 0 && word&^flags != w.rung, word&closed != 0
}

// rang notes that the epoch of this word has been rung: once is enough.
func (w *waker) noteRing(word uint64) { w.rung = word &^ flags }
