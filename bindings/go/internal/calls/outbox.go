package calls

import (
	"slices"

	"github.com/pelton-ipc/pelton/bindings/go/internal/doorbell"
	"github.com/pelton-ipc/pelton/bindings/go/internal/handshake"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/limits"
	"github.com/pelton-ipc/pelton/bindings/go/internal/link"
	"github.com/pelton-ipc/pelton/bindings/go/internal/memory"
	"github.com/pelton-ipc/pelton/bindings/go/internal/window"
)

// Queued is a message that waits for space in a lane.
type Queued struct {
	Header  Header
	Bytes   []byte
	Written int
	// Bytes is the rest of a message that has begun.
	isRest bool
	// The part whose goroutine waits until it is written; nil: none does, and the bytes are a copy.
	Part *WaitingPart
	// The memory for a copy.
	Share limits.Share
}

// The first piece of a request has at least a byte after the traceparent, in the smallest lane too: else this is
// negative, which does not compile.
const _ uint = handshake.CallMessageMin - HeaderSize - TraceparentBytes - 1

func (o *Queued) hasBegun() bool { return o.isRest || o.Written > 0 }

// next returns how many bytes of the payload go into the next record.
func (o *Queued) next(bytesMax uint64) int {
	left, most := len(o.Bytes)-o.Written, int(bytesMax)-HeaderSize
	if left <= most && !o.hasBegun() {
		return left
	}
	return min(left, most, pieceBytes)
}

// WaitingPart is a part of a reply whose goroutine waits until it is written.
type WaitingPart struct {
	Done chan struct{}
	Err  error
}

func (w *WaitingPart) end(err error) {
	w.Err = err
	close(w.Done)
}

// Outbox writes messages to one lane in order. Those without space wait in memory.
type Outbox struct {
	Lane   *lane.Producer
	memory *memory.Lane
	// The peer's doorbell, its user, and whether the link has the same doorbell and closes it.
	Doorbell       doorbell.Peer
	uid            int
	sharesDoorbell bool
	Queue          []Queued
	window         window.Window
}

// IsWhole reports whether a message fits into one record.
func (o *Outbox) IsWhole(bytes int) bool { return uint64(bytes)+HeaderSize <= o.Lane.BytesMax() }

// Put writes one record, if there is space now.
func (o *Outbox) Put(h Header, payload []byte) (bool, error) {
	o.window.Follow(o.Lane, o.memory, nil)
	room, ok, err := o.Lane.TryReserve(uint64(HeaderSize+len(payload)), 0)
	if err != nil || !ok {
		return false, err
	}
	h.Write(room)
	copy(room[HeaderSize:], payload)
	if o.Lane.Commit(uint64(len(room))) == lane.Ring {
		o.Lane.NoteRing(link.RingNow())
		o.Doorbell.Ring()
	}
	return true, nil
}

// Write writes a message that fits into one record, if there is space now and no message waits before it.
func (o *Outbox) Write(h Header, payload []byte) (bool, error) {
	if len(o.Queue) > 0 || !o.IsWhole(len(payload)) {
		return false, nil
	}
	return o.Put(h, payload)
}

// Push queues a copy of a message. Flush writes it.
func (o *Outbox) Push(h Header, payload []byte, kept limits.Share) {
	o.Queue = append(o.Queue, Queued{Header: h, Bytes: slices.Clone(payload), Share: kept})
}

// WriteOrPush writes what there is space for of a message, if no other waits before it, and queues a copy of the rest.
// It returns true if nothing is left.
func (o *Outbox) WriteOrPush(h Header, payload []byte, kept limits.Share) (bool, error) {
	out := Queued{Header: h, Bytes: payload, Share: kept}
	if len(o.Queue) == 0 {
		if done, err := o.writeOn(&out); done || err != nil {
			out.Share.ShrinkTo(0)
			return done, err
		}
	}
	out.isRest = out.hasBegun()
	out.Bytes, out.Written = slices.Clone(payload[out.Written:]), 0
	o.Queue = append(o.Queue, out)
	return false, nil
}

// Flush writes as much as there is space for. It returns true if nothing waits any more.
func (o *Outbox) Flush() (bool, error) {
	for done := 0; ; done++ {
		if done == len(o.Queue) {
			o.Queue = o.Queue[:0]
			return true, nil
		}
		finished, err := o.writeOn(&o.Queue[done])
		if !finished || err != nil {
			o.Queue = slices.Delete(o.Queue, 0, done)
			return false, err
		}
		if part := o.Queue[done].Part; part != nil {
			part.end(nil)
		}
		o.Queue[done].Share.ShrinkTo(0)
		o.Queue[done] = Queued{}
	}
}

func (o *Outbox) writeOn(out *Queued) (bool, error) {
	for {
		n := out.next(o.Lane.BytesMax())
		h := out.Header
		if h.Continued = out.hasBegun(); h.Continued {
			h.Code, h.Deadline, h.Traced = 0, 0, false
		}
		h.More = out.Written+n < len(out.Bytes)
		ok, err := o.Put(h, out.Bytes[out.Written:out.Written+n])
		if err != nil || !ok {
			return false, err
		}
		out.Written += n
		if !h.More {
			return true, nil
		}
	}
}

// Wanted returns the bytes of the next record in the queue, or 0.
func (o *Outbox) Wanted() uint64 {
	if len(o.Queue) == 0 {
		return 0
	}
	return uint64(HeaderSize + o.Queue[0].next(o.Lane.BytesMax()))
}

// Clear drops the queue when the peer is gone.
func (o *Outbox) Clear(why error) {
	for _, out := range o.Queue {
		if out.Part != nil {
			out.Part.end(why)
		}
		out.Share.ShrinkTo(0)
	}
	o.Queue = nil
}

// Close closes the lane and rings. The caller hangs up afterwards.
func (o *Outbox) Close() {
	o.window.Close()
	o.Lane.Close()
	o.Doorbell.Ring()
}

// Release releases the memory. Call it once, when nothing uses the lane any more.
func (o *Outbox) Release() {
	if !o.sharesDoorbell {
		o.Doorbell.Close(o.uid)
	}
	o.memory.Release()
}

// NewOutbox returns the outbox for the lane that this side of a call link sends by.
func NewOutbox(l *handshake.CallLink, residentMax int) Outbox {
	return Outbox{
		Lane: l.Producer, memory: l.Memory, Doorbell: l.Doorbell, uid: l.In.Link.Peer.UID, sharesDoorbell: l.SharesDoorbell,
		window: window.New(l.Producer, residentMax),
	}
}
