package link

import (
	"sync/atomic"

	"golang.org/x/sys/unix"
	"pelton/internal/doorbell"
	"pelton/internal/kernel"
	"pelton/internal/lane"
	"pelton/internal/limits"
	"pelton/internal/memory"
)

// Link is what ties a handle to one peer: whom to ring, and what tells its end. Two goroutines, parked in the poller, hear the
// hang-up of the socket and the end of the process.
type Link struct {
	Peer     kernel.Peer
	Doorbell doorbell.Peer
	// What the peer rings, if it is another user.
	pairs   []doorbell.Pair
	Socket  *kernel.Descriptor
	process *kernel.Descriptor
	IsGone  atomic.Bool
	Wake    func()
	// Descriptors received ahead of the message that they belong to.
	arrived     []arrivedDescriptors
	hasTimedOut bool
	// Of a path channel there is no socket, and the peer comes and goes.
	Path *PathPeer
}

// Outgoing is a lane of this side's as its producer, with the link to its receiver.
type Outgoing struct {
	Lane   *lane.Producer
	Memory *memory.Lane
	Bell   *doorbell.Own
	Link   *Link
}

// Incoming is a peer's lane as its consumer, with the link to its sender.
type Incoming struct {
	Consumer *lane.Consumer
	Memory   *memory.Lane
	Link     *Link
	// So many of the next messages may have been delivered to a predecessor.
	Redelivered uint64
	// What its lanes take of the receiver's budget.
	MemoryShare limits.Share
}

// New takes the descriptors. Nothing of it may fail: the peer has this side's READY.
func New(socket *kernel.Descriptor, process int, doorbell doorbell.Peer, given []doorbell.Pair, peer kernel.Peer, kick func()) *Link {
	l := &Link{Peer: peer, Doorbell: doorbell, pairs: given, Socket: socket, Wake: kick}
	// Of a socket packets may be there, which are the receiver's to read.
	go l.watch(socket, unix.POLLRDHUP)
	if process >= 0 {
		// A descriptor of a process that the poller does not take tells nothing; the hang-up does.
		if polled, err := kernel.NewDescriptor(process, "pelton peer"); err == nil {
			l.process = polled
			go l.watch(polled, unix.POLLIN)
		}
	}
	return l
}

func (l *Link) watch(p *kernel.Descriptor, events int16) {
	_ = p.Raw.Read(func(fd uintptr) bool { return kernel.IsReady(int(fd), events) })
	// Also when this side has closed it, which matters to nobody.
	l.IsGone.Store(true)
	l.Wake()
}

func (l *Link) Ring() { l.Doorbell.Ring() }

// IsPeerGone says whether the peer that was there is not any more, as far as has been heard.
func (l *Link) IsPeerGone() bool {
	if l.Path != nil {
		return l.Path.Liveness != nil && l.Path.Liveness.isGone.Load()
	}
	return l.IsGone.Load()
}

// Close hangs up, whoever else has the socket.
func (l *Link) Close() {
	if l.Path != nil {
		l.Path.Lose()
		l.Doorbell.Close(kernel.UnknownUser)
		return
	}
	l.forget()
}

func (l *Link) forget() {
	l.Socket.HangUp(l.Peer.UID)
	if l.process != nil {
		_ = l.process.File.Close()
	}
	l.Doorbell.Close(l.Peer.UID)
	for _, given := range l.pairs {
		given.Close()
	}
	for _, some := range l.arrived {
		l.Discard(some.fds)
	}
	l.arrived = nil
}

// Discard closes descriptors that the peer sent and nobody takes. It does not wait.
func (l *Link) Discard(fds []int) { kernel.Deferred.CloseAll(l.Peer.UID, fds) }
