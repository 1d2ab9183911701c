package pelton

import (
	"sync"

	"pelton/internal/fail"
	"pelton/internal/lane"
)

// How much memory peers can make a handle use: the lanes that they make, and what a service keeps of its clients. A reader that reads a page which was
// never written allocates it in its own account, so each side says in HELLO what it takes. spec/protocol.md, "Limits".

// limits are what a side takes: the largest lane, and the largest message in it.
type limits struct{ laneBytes, messageBytes uint64 }

var (
	// The largest that the formats allow: for a peer of the same user.
	limitsOfTheFormat = limits{lane.CapacityMax, lane.MessageBytesLimit(lane.CapacityMax)}
	// For a peer of another user. A guess: enough for a user who did not think about it, and little beside a machine's memory.
	limitsOfAnotherUser = limits{64 << 20, 1 << 20}
)

// laneGranule is what capacities are multiples of, but for peers that take less.
const laneGranule = 64 << 10

// laneWithin is the largest lane to be made for a peer that takes so many bytes.
func laneWithin(bytes uint64) uint64 {
	if bytes < laneGranule {
		return bytes &^ (lane.CapacityMin - 1)
	}
	return bytes &^ (laneGranule - 1)
}

// settings are what one side's options come to, checked.
type settings struct {
	// Users that may be the peer besides this process's own.
	uids []int
	// The lane that this side makes, and its message limit if the options set one, else 0.
	makes        limits
	messageBytes uint64
	// What this side takes of a peer of the same user, and of another user.
	takesOfOwn, takesOfOthers limits
	// The largest request, reply or part that this side of calls takes.
	callBytes uint64
}

func (s *settings) takes(isOwnUser bool) limits {
	if isOwnUser {
		return s.takesOfOwn
	}
	return s.takesOfOthers
}

// within is the lane to make for a peer that takes these.
func (s *settings) within(peer limits) limits {
	capacity := min(s.makes.laneBytes, laneWithin(peer.laneBytes))
	return limits{capacity, min(s.makes.messageBytes, lane.MessageBytesLimit(capacity), peer.messageBytes)}
}

// sharesOfMemory: a new peer may have this part of what is left, so that the first ones get most, and some is left for very many.
const sharesOfMemory = 16

// budget is a number of bytes of which parts are taken and given back, by any goroutine. nil has no limit.
type budget struct {
	most  uint64
	mutex sync.Mutex
	taken uint64
}

// newBudget is nil, which has no limit, for 0.
func newBudget(bytes int) *budget {
	if bytes <= 0 {
		return nil
	}
	return &budget{most: uint64(bytes)}
}

func (b *budget) left() uint64 {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	return b.most - b.taken
}

// share takes the part of one peer more, which has so many lanes of at most so many bytes each. 0: less is left than any lane is to have.
func (b *budget) share(lanes, most uint64) (bytes uint64, p part) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	bytes = min(most, (b.most-b.taken)/sharesOfMemory/lanes) &^ (laneGranule - 1)
	b.taken += bytes * lanes
	return bytes, part{budget: b, bytes: bytes * lanes}
}

// part is what is taken of a budget. The zero value is nothing.
type part struct {
	budget *budget
	bytes  uint64
	// Of what is kept for a client.
	client *clientShare
}

// shrinkTo gives back what is beyond so many bytes.
func (p *part) shrinkTo(bytes uint64) {
	if p.bytes <= bytes {
		return
	}
	p.budget.mutex.Lock()
	p.budget.taken -= p.bytes - bytes
	if p.client != nil {
		p.client.taken -= p.bytes - bytes
	}
	p.budget.mutex.Unlock()
	p.bytes = bytes
}

// clientShare is what a service keeps for one client. It grows only while the budget has at least as much left as the share has then. So one client alone
// has at most half, two that hold all they can have a third each, and one more client finds as much as the largest share has. The rule needs no option, and a
// client that is alone does not pay for a thousand that may connect.
type clientShare struct {
	budget *budget
	// Behind the budget's lock.
	taken uint64
}

// left is by how much the share may grow now.
func (c *clientShare) left() uint64 {
	c.budget.mutex.Lock()
	defer c.budget.mutex.Unlock()
	return c.mayTake()
}

// mayTake is behind the budget's lock.
func (c *clientShare) mayTake() uint64 {
	left := c.budget.most - c.budget.taken
	// Lanes of new peers may have left less than the share has.
	return (left - min(left, c.taken)) / 2
}

// grow takes so many bytes more for a part; false if the share may not grow so far.
func (c *clientShare) grow(p *part, bytes uint64) bool {
	b := c.budget
	b.mutex.Lock()
	defer b.mutex.Unlock()
	if bytes > c.mayTake() {
		return false
	}
	b.taken += bytes
	c.taken += bytes
	p.budget, p.client, p.bytes = b, c, p.bytes+bytes
	return true
}

// NoMemory is the failure of a reply or request of so many bytes.
func (c *clientShare) noMemory(bytes int) error {
	return fail.New(fail.ErrServiceMemory, "the service has no memory left for what it keeps of its clients: %d bytes are to be kept for a client, which may have %d more of the %d for all clients: let the client take its replies, ask for less, or raise Memory at the service",
		bytes, c.left(), c.budget.most)
}
