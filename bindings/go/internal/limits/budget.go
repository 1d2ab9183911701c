package limits

import (
	"sync"

	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
)

// PeerFraction: a new peer may take one part in this number of the remaining budget. So the first peers get most of it,
// and many more still get some.
const PeerFraction = 16

// Budget is a number of bytes that goroutines take from and return to. nil has no limit.
type Budget struct {
	Most  uint64
	mutex sync.Mutex
	taken uint64
}

// NewBudget returns nil, which has no limit, for 0.
func NewBudget(bytes int) *Budget {
	if bytes <= 0 {
		return nil
	}
	return &Budget{Most: uint64(bytes)}
}

// Left returns how much is not taken.
func (b *Budget) Left() uint64 {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	return b.Most - b.taken
}

// TakeShare takes the share of one more peer, which has this number of lanes. It returns the bytes of each, at most
// most; 0 if less is left than a lane needs.
func (b *Budget) TakeShare(lanes, most uint64) (bytes uint64, p Share) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	bytes = min(most, (b.Most-b.taken)/PeerFraction/lanes) &^ (LaneGranule - 1)
	b.taken += bytes * lanes
	return bytes, Share{budget: b, bytes: bytes * lanes}
}

// Share is what was taken from a budget. The zero value is nothing.
type Share struct {
	budget *Budget
	bytes  uint64
	// Set if it is kept for a client.
	client *Client
}

// ShrinkTo returns what exceeds this number of bytes.
func (p *Share) ShrinkTo(bytes uint64) {
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

// Client is what a service keeps for one client. It grows only while the budget has at least as much left as the
// client then has. So one client alone has at most half, two that hold all they can have a third each, and one more
// finds as much as the largest has. The rule needs no option, and a client that is alone does not pay for a thousand
// that may connect.
type Client struct {
	Budget *Budget
	// Under the budget's lock.
	taken uint64
}

// left returns by how much the share may grow now.
func (c *Client) left() uint64 {
	c.Budget.mutex.Lock()
	defer c.Budget.mutex.Unlock()
	return c.mayTake()
}

// mayTake is called under the budget's lock.
func (c *Client) mayTake() uint64 {
	left := c.Budget.Most - c.Budget.taken
	// Lanes of new peers may have left less than the client has.
	return (left - min(left, c.taken)) / 2
}

// Grow adds this number of bytes to a share. It returns false if the client may not have so many.
func (c *Client) Grow(p *Share, bytes uint64) bool {
	b := c.Budget
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

// GrowIfAmple is Grow, but only if the client may have four times as many bytes.
func (c *Client) GrowIfAmple(p *Share, bytes uint64) bool {
	return bytes <= c.left()/4 && c.Grow(p, bytes)
}

// NoMemory returns the error for a reply or request of this number of bytes.
func (c *Client) NoMemory(bytes int) error {
	return fail.New(fail.ErrServiceMemory,
		"the service has no memory left for what it keeps of its clients: %d bytes are to be kept for a client, which may have %d more of the %d for all clients: let the client take its replies, ask for less, or raise Memory at the service",
		bytes, c.left(), c.Budget.Most)
}
