// Package link connects a lane with its peer: the doorbell, what proves the peer's death, and the descriptors that
// travel beside messages.
package link

import (
	"sync/atomic"

	"github.com/pelton-ipc/pelton/bindings/go/internal/doorbell"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/limits"
	"github.com/pelton-ipc/pelton/bindings/go/internal/memory"
	"golang.org/x/sys/unix"
)

// Link connects a lane with its peer: the peer's doorbell, and what proves the peer's death. Two goroutines, parked
// in the poller, detect the hang-up of the socket and the end of the process.
type Link struct {
	Peer     kernel.Peer
	Doorbell doorbell.Peer
	// What the peer rings, if it is another user.
	pairs   []doorbell.Pair
	Socket  *kernel.Descriptor
	process *kernel.Descriptor
	IsGone  atomic.Bool
	Wake    func()
	// Descriptors received before their message.
	arrived     []arrivedDescriptors
	hasTimedOut bool
	// A path channel has no socket, and its peer comes and goes.
	Path *PathPeer
}

// Outgoing is a lane of this side as its producer, with the link to its receiver.
type Outgoing struct {
	Lane     *lane.Producer
	Memory   *memory.Lane
	Doorbell *doorbell.Own
	Link     *Link
	// Since the last receiver, the records were moved to data that no receiver has.
	IsMoved bool
}

// Move moves the records to the same offsets of new data, and continues there. The old data stays as it is. The name
// is the channel's.
func (o *Outgoing) Move(name string) error {
	data, err := memory.NewData(o.Lane.Capacity(), memory.LaneLabel(o.Memory.Data, nil, name))
	if err != nil {
		return err
	}
	idle, at := o.Lane.Idle(), uint64(0)
	for _, end := range [][2]uint64{idle[0], idle[1], {o.Lane.Capacity(), 0}} {
		if err := o.Memory.Data.CopyTo(data, at, end[0]); err != nil {
			data.Close()
			return err
		}
		at = end[0] + end[1]
	}
	o.Lane.MoveTo(data.Bytes)
	o.Memory.Data.Close()
	o.Memory.Data, o.IsMoved = data, true
	return nil
}

// Incoming is a peer's lane as its consumer, with the link to its sender.
type Incoming struct {
	Consumer *lane.Consumer
	Memory   *memory.Lane
	Link     *Link
	// This number of next messages may have been delivered to a predecessor.
	Redelivered uint64
	// A sender of the lane has required messages with a traceparent: its next sender, and that one's receivers, must
	// have the feature too.
	IsTraced bool
	// Identifies the lane among all that ever existed, also after a restart of either side; zeros: unknown.
	ID [2]uint64
	// What the lane takes of the receiver's budget.
	MemoryShare limits.Share
}

// Subscription is a publisher's lane as its consumer, with the link to the publisher.
type Subscription struct {
	Consumer   *lane.BroadcastConsumer
	Page, Data *memory.Segment
	// The consumer's page; by path the table that has it.
	Cursor *memory.Segment
	Link   *Link
}

// New owns the descriptors. It cannot fail: the peer has this side's READY.
func New(socket *kernel.Descriptor, process int, doorbell doorbell.Peer, given []doorbell.Pair, peer kernel.Peer,
	wake func()) *Link {
	l := &Link{Peer: peer, Doorbell: doorbell, pairs: given, Socket: socket, Wake: wake}
	// The socket may contain packets, which the receiver reads.
	go l.watch(socket, unix.POLLRDHUP)
	if process >= 0 {
		// If the poller refuses the process's descriptor, the hang-up alone proves the death.
		if polled, err := kernel.NewDescriptor(process, "pelton peer"); err == nil {
			l.process = polled
			go l.watch(polled, unix.POLLIN)
		}
	}
	return l
}

func (l *Link) watch(p *kernel.Descriptor, events int16) {
	_ = p.Raw.Read(func(fd uintptr) bool { return kernel.IsReady(int(fd), events) })
	// Also after this side has closed it, when nothing reads this any more.
	l.IsGone.Store(true)
	l.Wake()
}

// Ring wakes the peer if it sleeps.
func (l *Link) Ring() { l.Doorbell.Ring() }

// RingNow returns what a side notes before it rings.
func RingNow() lane.LastRing {
	return lane.LastRing{Processor: kernel.Processor(), AtNS: kernel.MonotonicNS()}
}

// WakePeer rings a receiver that sleeps.
func (o *Outgoing) WakePeer() {
	o.Lane.NoteRing(RingNow())
	o.Link.Ring()
}

// WakePeer rings a sender that sleeps.
func (i *Incoming) WakePeer() {
	i.Consumer.NoteRing(RingNow())
	i.Link.Ring()
}

// IsPeerGone reports whether the peer's end was detected.
func (l *Link) IsPeerGone() bool {
	if l.Path != nil {
		return l.Path.Liveness != nil && l.Path.Liveness.isGone.Load()
	}
	return l.IsGone.Load()
}

// Close hangs up, even if another process has the socket too.
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

// Discard closes descriptors from the peer that are not used. It does not wait.
func (l *Link) Discard(fds []int) { kernel.Deferred.CloseAll(l.Peer.UID, fds) }
