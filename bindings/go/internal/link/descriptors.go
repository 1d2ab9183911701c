package link

import (
	"context"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/packet"
	"golang.org/x/sys/unix"
)

type arrivedDescriptors struct {
	seq   uint32
	fds   []int
	isCut bool
}

// HandOver replaces the link to a dead sender. It keeps the descriptors of messages that this sender committed: those
// before the end. The others belong to messages that do not exist.
func (l *Link) HandOver(next *Link, end uint32) {
	l.receiveAll()
	for _, some := range l.arrived {
		if int32(some.seq-end) < 0 {
			next.arrived = append(next.arrived, some)
		} else {
			l.Discard(some.fds)
		}
	}
	l.arrived = nil
	l.forget()
}

// sendRetry is the pause before another attempt while this user has too many descriptors in flight, in all of its
// sockets.
const sendRetry = 10 * time.Millisecond

// SendDescriptors sends the descriptors of message seq, which is committed next. It waits for space in the socket. It
// returns false, perhaps without an error, if it did not send them: the context ended, the peer hung up,
// InterruptSend was called, or too many are in flight.
func (l *Link) SendDescriptors(ctx context.Context, seq uint32, fds []int) (bool, error) {
	p := packet.New(packet.KindDescriptors)
	p.Seq = seq
	err := kernel.TrySend(l.Socket.FD, p.Encode(), fds...)
	if err == unix.EAGAIN {
		waited := l.Socket.UntilWritable(ctx, func() bool {
			err = kernel.TrySend(l.Socket.FD, p.Encode(), fds...)
			return err != unix.EAGAIN
		})
		if err == unix.EAGAIN {
			return false, waited
		}
	}
	switch err {
	case nil:
		return true, nil
	case unix.EPIPE, unix.ECONNRESET:
		l.IsGone.Store(true)
		return false, nil
	case unix.ETOOMANYREFS:
		select {
		case <-ctx.Done():
		case <-time.After(sendRetry):
		}
		return false, ctx.Err()
	default:
		return false, fail.System("sending descriptors", err)
	}
}

// InterruptSend ends the present wait in SendDescriptors or the next one.
func (l *Link) InterruptSend() { l.Socket.InterruptWrite() }

// packetsMax limits the packets of descriptors for other messages than the requested one: far more than fit into a
// socket.
const packetsMax = 1024

// receiveAll receives what a dead sender had sent. Its successor does not send it again.
func (l *Link) receiveAll() {
	for len(l.arrived) < packetsMax {
		some, ok, err := l.nextArrived()
		if err != nil || !ok {
			return
		}
		l.arrived = append(l.arrived, some)
	}
}

func (l *Link) nextArrived() (arrivedDescriptors, bool, error) {
	if l.Path != nil {
		return arrivedDescriptors{}, false, nil
	}
	b := make([]byte, packet.BytesMax)
	n, fds, isCut, err := kernel.TryReceive(l.Socket.FD, b)
	if err == unix.EAGAIN || err == nil && n == 0 {
		l.Discard(fds)
		return arrivedDescriptors{}, false, nil
	}
	if err != nil {
		return arrivedDescriptors{}, false, fail.System("receiving descriptors", err)
	}
	p, ok := packet.Decode(b[:n])
	if !ok || p.Kind != packet.KindDescriptors {
		l.Discard(fds)
		return arrivedDescriptors{}, false, fail.New(fail.ErrCorrupt, "a packet of %d bytes came, wanted descriptors",
			n)
	}
	if len(fds) > lane.DescriptorsMax {
		l.Discard(fds)
		return arrivedDescriptors{}, false, fail.New(fail.ErrCorrupt,
			"a packet of %d descriptors came, wanted at most %d", len(fds), lane.DescriptorsMax)
	}
	// While descriptors of this peer cannot be closed, no more are received.
	if blocked := kernel.Deferred.Blocked(l.Peer.UID); blocked != "" {
		l.Discard(fds)
		return arrivedDescriptors{}, false, fail.New(fail.ErrCorrupt, "%s", blocked)
	}
	return arrivedDescriptors{p.Seq, fds, isCut}, true, nil
}

// TakeDescriptors returns the descriptors of message seq, which were sent before it was committed. A surviving sender
// sends those of a redelivered message again: for these it waits, a second at most, and not again after a time-out.
func (l *Link) TakeDescriptors(seq, count uint32, comesAgain bool) ([]int, error) {
	attempts := 0
	if comesAgain && !l.hasTimedOut {
		attempts = 1000
	}
	var found arrivedDescriptors
	for passed := 0; ; {
		var some arrivedDescriptors
		var ok bool
		var err error
		if len(l.arrived) > 0 {
			some, ok = l.arrived[0], true
			l.arrived = l.arrived[1:]
		} else if some, ok, err = l.nextArrived(); err != nil {
			return nil, err
		}
		if !ok {
			if attempts > 0 && !l.IsGone.Load() {
				attempts--
				time.Sleep(time.Millisecond)
				continue
			}
			l.hasTimedOut = l.hasTimedOut || comesAgain
			break
		}
		if some.seq == seq {
			found, l.hasTimedOut = some, false
			break
		}
		l.Discard(some.fds)
		// Otherwise a predecessor released the message with its descriptors.
		if passed++; int32(some.seq-seq) > 0 || passed > packetsMax {
			return nil, fail.New(fail.ErrCorrupt, "descriptors of message %d came before those of %d", some.seq, seq)
		}
	}
	if len(found.fds) != int(count) || count > lane.DescriptorsMax {
		l.Discard(found.fds)
		if found.isCut {
			return nil, fail.New(fail.ErrDescriptorsLost,
				"%d descriptors came with message %d, %d could be received: raise this process's RLIMIT_NOFILE",
				count, seq, len(found.fds))
		}
		return nil, fail.New(fail.ErrCorrupt, "message %d came with %d descriptors, said %d", seq, len(found.fds),
			count)
	}
	return found.fds, nil
}
