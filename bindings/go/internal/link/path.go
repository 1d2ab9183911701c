package link

import (
	"sync/atomic"

	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
)

// PathPeer is the process at the other end of a path channel's lane, now or later. Two things report it: its liveness
// file, a FIFO that it holds open, and the generation in its page, which also shows processes that came and went
// unseen.
type PathPeer struct {
	// Opens the peer's liveness file. It returns -1 if no process holds it.
	OpenLiveness func() (int, error)
	UID          int
	Generation   func() (generation uint64, pid uint32)
	Wake         func()
	Liveness     *liveness
	// The generation of the present peer, and the last one that is known to be gone.
	known, gone uint64
}

type liveness struct {
	*kernel.Descriptor
	isGone atomic.Bool
}

// Found is what Find found.
type Found int

const (
	// No new peer: it is there already, or none has come.
	FoundNothing Found = iota
	// A new peer.
	FoundPeer
	// One has come and gone since the last poll.
	FoundPassed
)

// PassedMax limits the peers that one poll skips because they came and went: a hostile page could count for ever.
const PassedMax = 8

// Find checks for the peer, and watches it from then on. A peer opens its liveness file before it changes the
// generation: so a new generation without an open file belongs to a dead peer.
func (l *Link) Find() (Found, error) {
	p := l.Path
	generation, _ := p.Generation()
	if p.Liveness != nil && generation != p.known {
		// Its successor holds the file by now. The next call finds that one.
		p.Lose()
		return FoundPassed, nil
	}
	if p.Liveness != nil || generation == p.gone {
		return FoundNothing, nil
	}
	fd, err := p.OpenLiveness()
	if err != nil {
		return FoundNothing, err
	}
	if fd < 0 {
		p.gone = generation
		return FoundPassed, nil
	}
	polled, err := kernel.NewDescriptor(fd, "pelton life")
	if err != nil {
		return FoundNothing, err
	}
	watched := &liveness{Descriptor: polled}
	go func() {
		_ = polled.Raw.Read(func(fd uintptr) bool { return kernel.IsReady(int(fd), 0) })
		watched.isGone.Store(true)
		p.Wake()
	}()
	p.Liveness = watched
	// Another may have taken its place meanwhile.
	generation, pid := p.Generation()
	p.known = generation
	l.Peer = kernel.Peer{PID: int(pid), UID: p.UID}
	return FoundPeer, nil
}

// Lose forgets a peer that is gone. Another may come.
func (p *PathPeer) Lose() {
	if p.Liveness != nil {
		_ = p.Liveness.File.Close()
		p.Liveness, p.gone = nil, p.known
	}
}
