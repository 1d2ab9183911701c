// Package limits has how much memory peers can make a handle use: the lanes that they make, and what a service keeps
// for its clients. A reader that reads a page which was never written allocates it in its own account, so each side
// says in HELLO what it takes. spec/protocol.md, "Limits".
package limits

import (
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
)

// Limits are the largest lane, and the largest message in it, that a side takes.
type Limits struct{ LaneBytes, MessageBytes uint64 }

var (
	// OfFormat are the largest that the formats permit: for a peer of the same user.
	OfFormat = Limits{lane.CapacityMax, lane.MessageBytesLimit(lane.CapacityMax)}
	// OfOtherUser are for a peer of another user. A guess: enough for most, and little beside a machine's memory.
	OfOtherUser = Limits{64 << 20, 1 << 20}
)

// LaneGranule divides capacities, except those of peers that take less.
const LaneGranule = 64 << 10

// LaneWithin returns the largest lane for a peer that takes this number of bytes.
func LaneWithin(bytes uint64) uint64 {
	if bytes < LaneGranule {
		return bytes &^ (lane.CapacityMin - 1)
	}
	return bytes &^ (LaneGranule - 1)
}

// Settings are the checked options of one side.
type Settings struct {
	// The name of the channel.
	Name string
	// Users that may be the peer, besides this process's own.
	UIDs []int
	// The lane that this side makes, and its message limit if the options set one, else 0.
	Makes        Limits
	MessageBytes uint64
	// What this side takes from a peer of the same user, and of another user.
	TakesOfOwn, TakesOfOthers Limits
	// Messages that this side sends may carry a traceparent.
	Traced bool
	// The largest request, reply or part that this side of calls takes.
	CallBytes uint64
}

// Takes returns what this side takes from a peer.
func (s *Settings) Takes(isOwnUser bool) Limits {
	if isOwnUser {
		return s.TakesOfOwn
	}
	return s.TakesOfOthers
}

// MessageLimit returns the largest message of a lane that this side makes with this capacity.
func (s *Settings) MessageLimit(capacity uint64) uint64 {
	if s.Traced {
		return lane.TracedMessageBytesLimit(capacity)
	}
	return lane.MessageBytesLimit(capacity)
}

// Within returns the lane to make for a peer that takes these.
func (s *Settings) Within(peer Limits) Limits {
	capacity := min(s.Makes.LaneBytes, LaneWithin(peer.LaneBytes))
	return Limits{capacity, min(s.Makes.MessageBytes, s.MessageLimit(capacity), peer.MessageBytes)}
}

// RoundUp rounds up to a multiple of the unit.
func RoundUp(bytes, unit uint64) uint64 { return (bytes + unit - 1) / unit * unit }
