package memory

import (
	"fmt"
	"os"
	"sync/atomic"

	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
)

// The names of the memfds are for observers: spec/protocol.md, "Names of memfds". A label is a name's part behind the
// kind of the segment.

// LaneLabel is the label of a page of the lane with that data, under the channel's name. The page of a consumer also
// has the inode of its receiver's page.
func LaneLabel(data, receiver *Segment, name string) string {
	if receiver == nil {
		return fmt.Sprintf("%d %s", data.Inode(), name)
	}
	return fmt.Sprintf("%d %d %s", data.Inode(), receiver.Inode(), name)
}

// NewProducerPage creates a producer's page.
func NewProducerPage(capacity, limit, generation uint64, label string) (*Segment, error) {
	return Create("pelton-producer "+label, ControlSeals, lane.SegmentBytes, func(page []byte) {
		lane.MakeProducerPage(page, capacity, limit, generation, uint32(os.Getpid()))
	})
}

// NewData creates the data of a lane.
func NewData(capacity uint64, label string) (*Segment, error) {
	return Create("pelton-data "+label, SizeSeals, capacity, func([]byte) {})
}

// NewConsumerPage creates a consumer's page.
func NewConsumerPage(head lane.Position, label string) (*Segment, error) {
	return Create("pelton-consumer "+label, ControlSeals, lane.SegmentBytes, func(page []byte) {
		lane.MakeConsumerPage(page, head, uint32(os.Getpid()))
	})
}

// NewReceiverPage creates a receiver's page.
func NewReceiverPage(label string) (*Segment, error) {
	return Create("pelton-receiver "+label, ControlSeals, lane.SegmentBytes, lane.MakeReceiverPage)
}

// NewBroadcast creates the page and the data of a broadcast lane, under the channel's name. No other process can ever
// write the data: a subscriber could forge messages for the others.
func NewBroadcast(capacity, limit uint64, name string) (page, data *Segment, err error) {
	data, err = Create("pelton-published "+name, ControlSeals, capacity, func([]byte) {})
	if err != nil {
		return nil, nil, err
	}
	page, err = Create("pelton-broadcast "+LaneLabel(data, nil, name), ControlSeals, lane.SegmentBytes,
		func(page []byte) { lane.MakeBroadcastPage(page, capacity, limit, uint32(os.Getpid())) })
	if err != nil {
		data.Close()
		return nil, nil, err
	}
	return page, data, nil
}

// NewCursorPage creates the page of a consumer of a broadcast lane.
func NewCursorPage(policy lane.Policy, label string) (*Segment, error) {
	return Create("pelton-cursor "+label, ControlSeals, lane.SegmentBytes, func(page []byte) {
		lane.MakeCursorPage(page, policy, uint32(os.Getpid()))
	})
}

// Lane is the segments of a lane. They stay mapped while a handle, a reservation or a received message uses them. So
// a handle may be closed at any time, and no slice that was returned ever points to nothing.
type Lane struct {
	Producer, Consumer, Receiver, Data *Segment
	// Set if the receiver's page belongs to several lanes.
	SharesReceiver bool
	// Called when the segments are unmapped; nil: nothing is.
	Unmapped func()
	users    atomic.Int32
}

// Segments returns the memory for package lane.
func (m *Lane) Segments() lane.Memory {
	return lane.Memory{Producer: m.Producer.Bytes, Consumer: m.Consumer.Bytes, Receiver: m.Receiver.Bytes,
		Data: m.Data.Bytes}
}

// Retain counts one more use.
func (m *Lane) Retain() { m.users.Add(1) }

// Release ends a use. The last one unmaps the segments.
func (m *Lane) Release() {
	if m.users.Add(-1) != 0 {
		return
	}
	for _, segment := range []*Segment{m.Producer, m.Consumer, m.Data} {
		segment.Close()
	}
	if !m.SharesReceiver {
		m.Receiver.Close()
	}
	if m.Unmapped != nil {
		m.Unmapped()
	}
}
