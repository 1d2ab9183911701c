package calls

import (
	"slices"

	"pelton/internal/doorbell"
	"pelton/internal/handshake"
	"pelton/internal/lane"
	"pelton/internal/limits"
	"pelton/internal/memory"
	"pelton/internal/window"
)

// Queued is a message on its way into a lane.
type Queued struct {
	Header  Header
	Bytes   []byte
	Written int
	// Who waits until it is written; nil: nobody, and the bytes are a copy.
	Part *WaitingPart
	// What a copy takes of the memory that a service has for its clients.
	Share limits.Share
}

// next is how many bytes of the payload go into the next record, in a lane whose largest message is so large.
func (o *Queued) next(bytesMax uint64) int {
	left, most := len(o.Bytes)-o.Written, int(bytesMax)-HeaderSize
	if left <= most && o.Written == 0 {
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

// Outbox is the way into one lane: in order, and what there is no room for waits in memory.
type Outbox struct {
	Lane   *lane.Producer
	memory *memory.Lane
	// The other side's doorbell, its user, and whether it is the link's, which closes it.
	Doorbell   doorbell.Peer
	uid        int
	sharesBell bool
	Queue      []Queued
	window     window.Window
}

// IsWhole says whether a message goes into the lane as one record.
func (o *Outbox) IsWhole(bytes int) bool { return uint64(bytes)+HeaderSize <= o.Lane.BytesMax() }

// Put writes one record, if there is room now.
func (o *Outbox) Put(h Header, payload []byte) (bool, error) {
	o.window.Follow(o.Lane, o.memory, nil)
	room, ok, err := o.Lane.TryReserve(uint64(HeaderSize+len(payload)), 0)
	if err != nil || !ok {
		return false, err
	}
	h.Write(room)
	copy(room[HeaderSize:], payload)
	if o.Lane.Commit(uint64(len(room))) == lane.Ring {
		o.Doorbell.Ring()
	}
	return true, nil
}

// Write writes a message that goes into one record, if there is room now and nothing waits before it.
func (o *Outbox) Write(h Header, payload []byte) (bool, error) {
	if len(o.Queue) > 0 || !o.IsWhole(len(payload)) {
		return false, nil
	}
	return o.Put(h, payload)
}

// Push puts a copy of a message behind those that wait; flush writes it.
func (o *Outbox) Push(h Header, payload []byte, kept limits.Share) {
	o.Queue = append(o.Queue, Queued{Header: h, Bytes: append([]byte(nil), payload...), Share: kept})
}

// Flush writes as much as there is room for. True: nothing waits any more.
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
		if h.Continued = out.Written > 0; h.Continued {
			h.Code, h.Deadline = 0, 0
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

// Wanted is the bytes of the record that waits for room.
func (o *Outbox) Wanted() uint64 {
	if len(o.Queue) == 0 {
		return 0
	}
	return uint64(HeaderSize + o.Queue[0].next(o.Lane.BytesMax()))
}

// Clear forgets what waits: nobody is there to read it any more.
func (o *Outbox) Clear(why error) {
	for _, out := range o.Queue {
		if out.Part != nil {
			out.Part.end(why)
		}
		out.Share.ShrinkTo(0)
	}
	o.Queue = nil
}

// Close says that no more will come. The ring follows the word; the caller hangs up last.
func (o *Outbox) Close() {
	o.window.Close()
	o.Lane.Close()
	o.Doorbell.Ring()
}

// Release is asked once nobody looks at the lane any more.
func (o *Outbox) Release() {
	if !o.sharesBell {
		o.Doorbell.Close(o.uid)
	}
	o.memory.Release()
}

// NewOutbox returns the way into the lane that this side of a call link sends by.
func NewOutbox(l *handshake.CallLink, residentMax int) Outbox {
	return Outbox{
		Lane: l.Producer, memory: l.Memory, Doorbell: l.Doorbell, uid: l.In.Link.Peer.UID, sharesBell: l.SharesBell,
		window: window.New(l.Producer, residentMax),
	}
}
