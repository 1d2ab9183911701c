package link

import (
	"slices"

	"golang.org/x/sys/unix"
	"pelton/internal/doorbell"
	"pelton/internal/kernel"
	"pelton/internal/limits"
	"pelton/internal/memory"
)

// Parts collects what a hand-shake makes and takes, so that all of it is given back unless it succeeds.
type Parts struct {
	Segments []*memory.Segment
	fds      []int
	// Those that the peer sent, and its user.
	received    []int
	peer        int
	MemoryShare limits.Share
	// What the peer, another user, is given to ring.
	Pairs []doorbell.Pair
}

func (p *Parts) Segment(s *memory.Segment, err error) (*memory.Segment, error) {
	if err == nil {
		p.Segments = append(p.Segments, s)
	}
	return s, err
}

// Owns takes descriptors; each that is handed on is claimed before.
func (p *Parts) Owns(fds []int) { p.fds = append(p.fds, fds...) }

// Received_ takes what a peer sent.
func (p *Parts) Received_(fds []int, from kernel.Peer) {
	p.received, p.peer = append(p.received, fds...), from.UID
}

func (p *Parts) Claim(fd int) int {
	isIt := func(other int) bool { return other == fd }
	p.fds, p.received = slices.DeleteFunc(p.fds, isIt), slices.DeleteFunc(p.received, isIt)
	return fd
}

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

// Keep has nothing given back: the hand-shake has succeeded. The doorbells that the peer was given are the link's from now on.
func (p *Parts) Keep() []doorbell.Pair {
	given := p.Pairs
	for _, doorbell := range given {
		unix.Close(doorbell.Peers)
	}
	*p = Parts{}
	return given
}
