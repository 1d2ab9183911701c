package link

import (
	"sync/atomic"

	"pelton/internal/kernel"
)

// PathPeer is whoever has, or will have, the other end of a lane. It is heard of by its life, a FIFO that it holds, and by the generation in
// its page, which tells also who has come and gone meanwhile.
type PathPeer struct {
	// Opens its life: -1 if nobody holds that.
	OpenLiveness func() (int, error)
	UID          int
	Generation   func() (generation uint64, pid uint32)
	Wake         func()
	Liveness     *liveness
	// The generation of who is there, and the one of which it is known that it has gone.
	known, gone uint64
}

type liveness struct {
	*kernel.Descriptor
	isGone atomic.Bool
}

type found int

const (
	// Nobody new: it is there already, or none has come.
	FoundNothing found = iota
	FoundPeer
	// One has come and gone since the last look.
	FoundPassed
)

// PassedMax is how many that have come and gone one look passes over: a page whose generation never stands still is not to keep anybody
// looking.
const PassedMax = 8

// Find looks for the peer, and watches it from then on. Life comes before generation: who sees a new one and finds nobody alive knows that
// it has gone.
func (l *Link) Find() (found, error) {
	p := l.Path
	generation, _ := p.Generation()
	if p.Liveness != nil && generation != p.known {
		// Its successor holds the life by now, which so tells nothing: the next look finds that one.
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

// Lose is of a peer that has gone: another may come.
func (p *PathPeer) Lose() {
	if p.Liveness != nil {
		_ = p.Liveness.File.Close()
		p.Liveness, p.gone = nil, p.known
	}
}
