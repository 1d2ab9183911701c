package pelton

import (
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"pelton/internal/fail"
	"pelton/internal/lane"
)

// link is what ties a handle to one peer: whom to ring, and what tells its end. Two goroutines, parked in the poller, hear the
// hang-up of the socket and the end of the process.
type link struct {
	peer     Peer
	doorbell doorbell
	// What the peer rings, if it is another user.
	given   []socketDoorbell
	socket  *polled
	process *polled
	isGone  atomic.Bool
	kick    func()
	// Descriptors received ahead of the message that they belong to.
	received []descriptors
	isSilent bool
	// Of a path channel there is no socket, and the peer comes and goes.
	path *pathPeer
}

// outgoing is a lane of this side's as its producer, with the link to its receiver.
type outgoing struct {
	lane   *lane.Producer
	memory *memory
	bell   *bell
	link   *link
}

// incoming is a peer's lane as its consumer, with the link to its sender.
type incoming struct {
	consumer *lane.Consumer
	memory   *memory
	link     *link
	// So many of the next messages may have been delivered to a predecessor.
	again uint64
	// What its lanes take of the receiver's budget.
	ofBudget part
}

type descriptors struct {
	seq   uint32
	fds   []int
	isCut bool
}

// newLink takes the descriptors. Nothing of it may fail: the peer has this side's READY.
func newLink(socket *polled, process int, doorbell doorbell, given []socketDoorbell, peer Peer, kick func()) *link {
	l := &link{peer: peer, doorbell: doorbell, given: given, socket: socket, kick: kick}
	// Of a socket packets may be there, which are the receiver's to read.
	go l.watch(socket, unix.POLLRDHUP)
	if process >= 0 {
		// A descriptor of a process that the poller does not take tells nothing; the hang-up does.
		if polled, err := newPolled(process, "pelton peer"); err == nil {
			l.process = polled
			go l.watch(polled, unix.POLLIN)
		}
	}
	return l
}

func (l *link) watch(p *polled, events int16) {
	_ = p.raw.Read(func(fd uintptr) bool { return isReady(int(fd), events) })
	// Also when this side has closed it, which matters to nobody.
	l.isGone.Store(true)
	l.kick()
}

func (l *link) ring() { l.doorbell.ring() }

// hasGone says whether the peer that was there is not any more, as far as has been heard.
func (l *link) hasGone() bool {
	if l.path != nil {
		return l.path.life != nil && l.path.life.isGone.Load()
	}
	return l.isGone.Load()
}

// close hangs up, whoever else has the socket.
func (l *link) close() {
	if l.path != nil {
		l.path.lose()
		l.doorbell.close(nobody)
		return
	}
	l.forget()
}

func (l *link) forget() {
	l.socket.hangUp(l.peer.UID)
	if l.process != nil {
		_ = l.process.file.Close()
	}
	l.doorbell.close(l.peer.UID)
	for _, given := range l.given {
		given.close()
	}
	for _, some := range l.received {
		l.discard(some.fds)
	}
	l.received = nil
}

// discard closes descriptors that the peer sent and nobody takes. It does not wait.
func (l *link) discard(fds []int) { closer.descriptors(l.peer.UID, fds) }

// handOver replaces the link to a sender that died, keeping the descriptors that came for messages that it committed: those before
// the end. The rest was for messages that never were.
func (l *link) handOver(next *link, end uint32) {
	l.takeIn()
	for _, some := range l.received {
		if int32(some.seq-end) < 0 {
			next.received = append(next.received, some)
		} else {
			l.discard(some.fds)
		}
	}
	l.received = nil
	l.forget()
}

// packetsMax is the most packets of descriptors that are for other messages than the one asked for: far above what a socket holds.
const packetsMax = 1024

// takeIn takes what a sender that died has sent along; its successor does not.
func (l *link) takeIn() {
	for len(l.received) < packetsMax {
		some, ok, err := l.nextPacket()
		if err != nil || !ok {
			return
		}
		l.received = append(l.received, some)
	}
}

func (l *link) nextPacket() (descriptors, bool, error) {
	if l.path != nil {
		return descriptors{}, false, nil
	}
	b := make([]byte, packetBytesMax)
	n, fds, isCut, err := tryReceive(l.socket.fd, b)
	if err == unix.EAGAIN || err == nil && n == 0 {
		l.discard(fds)
		return descriptors{}, false, nil
	}
	if err != nil {
		return descriptors{}, false, fail.System("receiving descriptors", err)
	}
	p, ok := decodePacket(b[:n])
	if !ok || p.kind != kindDescriptors {
		l.discard(fds)
		return descriptors{}, false, fail.New(fail.ErrCorrupt, "a packet of %d bytes came, wanted descriptors", n)
	}
	if len(fds) > lane.DescriptorsMax {
		l.discard(fds)
		return descriptors{}, false, fail.New(fail.ErrCorrupt, "a packet of %d descriptors came, wanted at most %d", len(fds), lane.DescriptorsMax)
	}
	// Of a peer whose descriptors cannot be closed no more are taken.
	if blocked := closer.blocked(l.peer.UID); blocked != "" {
		l.discard(fds)
		return descriptors{}, false, fail.New(fail.ErrCorrupt, "%s", blocked)
	}
	return descriptors{p.seq, fds, isCut}, true, nil
}

// receiveDescriptors answers those of message seq, which were sent before it was committed; or, if the message comes again, are
// being sent again by a sender that survived: waits for these, a second at most, and not again once that was in vain.
func (l *link) receiveDescriptors(seq, count uint32, comesAgain bool) ([]int, error) {
	patience := 0
	if comesAgain && !l.isSilent {
		patience = 1000
	}
	var found descriptors
	for passed := 0; ; {
		var some descriptors
		var ok bool
		var err error
		if len(l.received) > 0 {
			some, ok = l.received[0], true
			l.received = l.received[1:]
		} else if some, ok, err = l.nextPacket(); err != nil {
			return nil, err
		}
		if !ok {
			if patience > 0 && !l.isGone.Load() {
				patience--
				time.Sleep(time.Millisecond)
				continue
			}
			l.isSilent = l.isSilent || comesAgain
			break
		}
		if some.seq == seq {
			found, l.isSilent = some, false
			break
		}
		l.discard(some.fds)
		// Else of a message that was released, with its descriptors, by a predecessor.
		if passed++; int32(some.seq-seq) > 0 || passed > packetsMax {
			return nil, fail.New(fail.ErrCorrupt, "descriptors of message %d came before those of %d", some.seq, seq)
		}
	}
	if len(found.fds) != int(count) || count > lane.DescriptorsMax {
		l.discard(found.fds)
		if found.isCut {
			return nil, fail.New(fail.ErrDescriptorsLost, "%d descriptors came with message %d, %d could be received: raise this process's RLIMIT_NOFILE",
				count, seq, len(found.fds))
		}
		return nil, fail.New(fail.ErrCorrupt, "message %d came with %d descriptors, said %d", seq, len(found.fds), count)
	}
	return found.fds, nil
}
