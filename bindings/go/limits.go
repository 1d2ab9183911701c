package pelton

import (
	"sync"

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

// takes is what this side takes of a peer. checkTakes has found the options possible.
func (o *Options) takes(isOwnUser bool) limits {
	takes := limitsOfAnotherUser
	if isOwnUser {
		takes = limitsOfTheFormat
	}
	if o.Capacity > 0 {
		takes.laneBytes = roundUp(uint64(o.Capacity), laneGranule)
	}
	if o.MessageBytesMax > 0 {
		takes.messageBytes = uint64(o.MessageBytesMax)
	}
	if o.Memory > 0 {
		takes.laneBytes = min(takes.laneBytes, max(laneWithin(uint64(o.Memory)), lane.CapacityMin))
	}
	return takes
}

// pathSizes is the capacity and the message limit of the lanes of a path channel that this side makes, within its Memory.
func (o *Options) pathSizes() (capacity, limit uint64, err error) {
	if err := o.checkMemory(0); err != nil {
		return 0, 0, err
	}
	if capacity, limit, err = o.sizes(); err != nil || o.Memory == 0 {
		return capacity, limit, err
	}
	capacity = min(capacity, max(laneWithin(uint64(o.Memory/max(o.Lanes, 1))), lane.CapacityMin))
	return capacity, min(limit, lane.MessageBytesLimit(capacity)), nil
}

// pathLaneMax is the largest lane of a path channel that a receiver takes. Its own Capacity is for a channel that it makes.
func (o *Options) pathLaneMax(isOwnUser bool) uint64 {
	switch {
	case o.Memory > 0:
		return uint64(o.Memory)
	case isOwnUser:
		return limitsOfTheFormat.laneBytes
	}
	return limitsOfAnotherUser.laneBytes
}

// checkTakes checks what a receiver says of what it takes of one peer.
func (o *Options) checkTakes() error {
	if o.Capacity != 0 && (o.Capacity < lane.CapacityMin || o.Capacity > lane.CapacityMax) {
		return failure(ErrOption, "Capacity is %d, wanted %d to %d bytes", o.Capacity, lane.CapacityMin, uint64(lane.CapacityMax))
	}
	if most := limitsOfTheFormat.messageBytes; o.MessageBytesMax < 0 || uint64(o.MessageBytesMax) > most {
		return failure(ErrOption, "MessageBytesMax is %d, wanted 0 to %d bytes", o.MessageBytesMax, most)
	}
	return o.checkMemory(0)
}

// checkMemory checks that the first peer has room in Memory, which all peers share, for so many lanes. With 0 lanes, Memory is one peer's, whose lane has
// at least [lane.CapacityMin] bytes whatever Memory says.
func (o *Options) checkMemory(lanes int) error {
	least := sharesOfMemory * laneGranule * lanes
	if o.Memory < 0 || o.Memory > 0 && o.Memory < least {
		return failure(ErrOption, "Memory is %d, wanted 0 (none) or at least %d bytes", o.Memory, max(least, 1))
	}
	return nil
}

// sizesWithin is the capacity and the message limit of a lane that the peer takes.
func (o *Options) sizesWithin(peer limits) (capacity, limit uint64, err error) {
	if capacity, limit, err = o.sizes(); err != nil {
		return 0, 0, err
	}
	capacity = min(capacity, laneWithin(peer.laneBytes))
	return capacity, min(limit, lane.MessageBytesLimit(capacity), peer.messageBytes), nil
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
