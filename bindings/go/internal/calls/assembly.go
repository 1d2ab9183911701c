package calls

import (
	"slices"

	"github.com/pelton-ipc/pelton/bindings/go/internal/limits"
)

// Assembly is a message of which some pieces have come. It has begun if it has a kind.
type Assembly struct {
	Header Header
	bytes  []byte
	// The bytes that have come, including those that are not kept.
	Count int
	// The memory for its bytes, and how many it counts; isDiscarded if there was not enough, so that they are not kept.
	share       limits.Share
	counted     int
	IsDiscarded bool
	// The size of the message before: a guess for the next one.
	last int
}

// expectedMost limits the memory for a message of which one piece has come.
const expectedMost = 16 << 20

// Reserve gets memory for the message whose first piece is to be added, as much as the one before had, since otherwise
// many pieces move those before them. It counts as the client's, if of is not nil, and is not reserved if the client
// may not have four times as much.
func (a *Assembly) Reserve(of *limits.Client, memory func(bytes int) []byte) {
	expected := min(a.last, expectedMost)
	if expected > 0 && (of == nil || of.GrowIfAmple(&a.share, uint64(expected))) {
		a.bytes, a.counted = memory(expected)[:0], expected
	}
}

// HasMemory takes the memory for a piece from the client's. If that is too little, nothing of the message is kept
// from then on.
func (a *Assembly) HasMemory(of *limits.Client, bytes int) bool {
	more := max(0, a.Count+bytes-a.counted)
	a.counted += more
	if !a.IsDiscarded && !of.Grow(&a.share, uint64(more)) {
		a.IsDiscarded, a.bytes = true, nil
		a.share.ShrinkTo(0)
	}
	return !a.IsDiscarded
}

// Add adds a piece. It returns the name of the rule that the piece breaks, or "".
func (a *Assembly) Add(h Header, payload []byte, most int, isKept bool) string {
	hasBegun := a.Header.Kind != 0
	if h.Continued && (!hasBegun || a.Header.ID != h.ID || a.Header.Kind != h.Kind) || !h.Continued && hasBegun {
		return "piece"
	}
	if len(payload) > most-a.Count {
		return "size"
	}
	a.Count += len(payload)
	if !hasBegun {
		a.Header = h
	}
	// The bytes of an abandoned call are not kept, but its end must be detected.
	if isKept {
		a.bytes = append(a.bytes, payload...)
	}
	return ""
}

// Take returns the complete message, without much memory beyond it, and forgets it.
func (a *Assembly) Take() (Header, []byte) {
	whole := *a
	a.Forget()
	a.last = whole.Count
	if cap(whole.bytes)/2 > len(whole.bytes) {
		whole.bytes = slices.Clone(whole.bytes)
	}
	return whole.Header, whole.bytes
}

// Forget drops what has come.
func (a *Assembly) Forget() {
	a.share.ShrinkTo(0)
	*a = Assembly{last: a.last}
}

// Drop drops what has come of a message that no call waits for.
func (a *Assembly) Drop(isPiece bool) {
	if isPiece {
		a.Forget()
	}
}
