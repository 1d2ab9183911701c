package limits

import (
	"pelton/internal/lane"
)

// How much memory peers can make a handle use: the lanes that they make, and what a service keeps of its clients. A reader that reads a page which was
// never written allocates it in its own account, so each side says in HELLO what it takes. spec/protocol.md, "Limits".

// Limits are what a side takes: the largest lane, and the largest message in it.
type Limits struct{ LaneBytes, MessageBytes uint64 }

var (
	// The largest that the formats allow: for a peer of the same user.
	OfFormat = Limits{lane.CapacityMax, lane.MessageBytesLimit(lane.CapacityMax)}
	// For a peer of another user. A guess: enough for a user who did not think about it, and little beside a machine's memory.
	OfOtherUser = Limits{64 << 20, 1 << 20}
)

// LaneGranule is what capacities are multiples of, but for peers that take less.
const LaneGranule = 64 << 10

// LaneWithin is the largest lane to be made for a peer that takes so many bytes.
func LaneWithin(bytes uint64) uint64 {
	if bytes < LaneGranule {
		return bytes &^ (lane.CapacityMin - 1)
	}
	return bytes &^ (LaneGranule - 1)
}

// Settings are what one side's options come to, checked.
type Settings struct {
	// Users that may be the peer besides this process's own.
	Uids []int
	// The lane that this side makes, and its message limit if the options set one, else 0.
	Makes        Limits
	MessageBytes uint64
	// What this side takes of a peer of the same user, and of another user.
	TakesOfOwn, TakesOfOthers Limits
	// The largest request, reply or part that this side of calls takes.
	CallBytes uint64
}

func (s *Settings) Takes(isOwnUser bool) Limits {
	if isOwnUser {
		return s.TakesOfOwn
	}
	return s.TakesOfOthers
}

// Within is the lane to make for a peer that takes these.
func (s *Settings) Within(peer Limits) Limits {
	capacity := min(s.Makes.LaneBytes, LaneWithin(peer.LaneBytes))
	return Limits{capacity, min(s.Makes.MessageBytes, lane.MessageBytesLimit(capacity), peer.MessageBytes)}
}

func RoundUp(bytes, unit uint64) uint64 { return (bytes + unit - 1) / unit * unit }
