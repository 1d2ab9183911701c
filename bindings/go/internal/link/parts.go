package link

import (
	"slices"

	"github.com/pelton-ipc/pelton/bindings/go/internal/doorbell"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/limits"
	"github.com/pelton-ipc/pelton/bindings/go/internal/memory"
	"golang.org/x/sys/unix"
)

// Parts owns what the making of an endpoint creates and receives, and releases all of it unless it succeeds.
type Parts struct {
	Segments []*memory.Segment
	fds      []int
	// The descriptors that the peer sent, and its user.
	received    []int
	peer        int
	MemoryShare limits.Share
	// The doorbells that the peer, another user, gets.
	Pairs []doorbell.Pair
}

// Segment adds a segment, unless there is an error.
func (p *Parts) Segment(s *memory.Segment, err error) (*memory.Segment, error) {
	if err == nil {
		p.Segments = append(p.Segments, s)
	}
	return s, err
}

// Owns adds descriptors. Claim removes one that gets another owner.
func (p *Parts) Owns(fds []int) { p.fds = append(p.fds, fds...) }

// TakesFrom adds descriptors that a peer sent.
func (p *Parts) TakesFrom(fds []int, from kernel.Peer) {
	p.received, p.peer = append(p.received, fds...), from.UID
}

// Claim ends the ownership of a descriptor, and returns it.
func (p *Parts) Claim(fd int) int {
	isIt := func(other int) bool { return other == fd }
	p.fds, p.received = slices.DeleteFunc(p.fds, isIt), slices.DeleteFunc(p.received, isIt)
	return fd
}

// GiveBack releases everything that it still owns.
func (p *Parts) GiveBack() {
	for _, segment := range p.Segments {
		segment.Close()
	}
	kernel.CloseAll(p.fds)
	kernel.Deferred.CloseAll(p.peer, p.received)
	p.MemoryShare.ShrinkTo(0)
	for _, given := range p.Pairs {
		unix.Close(given.Peers)
		given.Close()
	}
}

// Keep ends the ownership after a success. The returned doorbells belong to the link.
func (p *Parts) Keep() []doorbell.Pair {
	given := p.Pairs
	for _, doorbell := range given {
		unix.Close(doorbell.Peers)
	}
	*p = Parts{}
	return given
}
