package calls

import (
	"pelton/internal/limits"
)

// Assembly is a message of which some has come. It has begun if it has a kind.
type Assembly struct {
	Header Header
	bytes  []byte
	// How many have come, also of what is not kept.
	Count int
	// What its bytes take of the memory that a service has for its clients; and that there was not enough, so that they are not kept.
	share       limits.Share
	IsDiscarded bool
}

// HasMemory takes the memory for a piece, of which the client's share may have too little: then nothing of the message is kept any more.
func (a *Assembly) HasMemory(of *limits.Client, bytes int) bool {
	if !a.IsDiscarded && !of.Grow(&a.share, uint64(bytes)) {
		a.IsDiscarded, a.bytes = true, nil
		a.share.ShrinkTo(0)
	}
	return !a.IsDiscarded
}

// Add takes a piece in; a rule that it breaks is named, else "".
func (a *Assembly) Add(h Header, payload []byte, most int, isKept bool) string {
	hasBegun := a.Header.Kind != 0
	if h.Continued && (!hasBegun || a.Header.Id != h.Id || a.Header.Kind != h.Kind) || !h.Continued && hasBegun {
		return "piece"
	}
	if len(payload) > most-a.Count {
		return "size"
	}
	a.Count += len(payload)
	if !hasBegun {
		a.Header = h
	}
	// What nobody waits for is not kept, but its end is to be known.
	if isKept {
		a.bytes = append(a.bytes, payload...)
	}
	return ""
}

// Take is the message that has come, of which nothing is kept here.
func (a *Assembly) Take() (Header, []byte) {
	whole := *a
	a.Forget()
	return whole.Header, whole.bytes
}

// Forget forgets what has come.
func (a *Assembly) Forget() {
	a.share.ShrinkTo(0)
	*a = Assembly{}
}

// Drop forgets what has come of a message that nobody wants.
func (a *Assembly) Drop(isPiece bool) {
	if isPiece {
		a.Forget()
	}
}
