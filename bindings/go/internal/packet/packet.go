// Package packet has the packets of the handshake and their encoding, and HELLO: the role, the features, the limits
// and the version of a side. spec/protocol.md, "Packets" and "Features".
package packet

import (
	"encoding/binary"
	"fmt"

	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/limits"
)

// Takes returns what a receiver, a client or a service declared that it takes.
func (p *Packet) Takes() limits.Limits {
	return limits.Limits{LaneBytes: p.Capacity, MessageBytes: p.BytesMax}
}

const (
	// The size of a packet, and of its fields.
	BytesMax = 512
	BytesMin = 80
)

const (
	// The kinds of packets.
	KindHello       = 1
	KindProducer    = 2
	KindConsumer    = 3
	KindReady       = 4
	KindRefused     = 5
	KindDescriptors = 6
)

// Role is what a side of a channel is.
type Role uint32

const (
	// The roles of a channel.
	RoleSender   Role = 1
	RoleReceiver Role = 2
	// The roles of a link of calls: spec/call.md.
	RoleClient  Role = 3
	RoleService Role = 4
	// The roles of a broadcast: spec/broadcast.md.
	RolePublisher  Role = 5
	RoleSubscriber Role = 6
)

// String returns the name of the role.
func (r Role) String() string {
	switch r {
	case RoleSender:
		return "sender"
	case RoleReceiver:
		return "receiver"
	case RoleClient:
		return "client"
	case RoleService:
		return "service"
	case RolePublisher:
		return "publisher"
	case RoleSubscriber:
		return "subscriber"
	}
	return fmt.Sprintf("peer of role %d", uint32(r))
}

// Other returns the role of the other side.
func (r Role) Other() Role {
	if r >= RolePublisher {
		return RolePublisher + RoleSubscriber - r
	}
	if r >= RoleClient {
		return RoleClient + RoleService - r
	}
	return RoleSender + RoleReceiver - r
}

// Packet is 80 bytes of fields, and what follows them. Fields that a kind does not use are 0. In HELLO, Capacity and
// BytesMax are what the side takes, Tail the features that it offers, Floor those that it requires.
type Packet struct {
	Kind, WireVersion uint32
	LayoutSignature   uint64
	Role              Role
	Holds             uint32
	Capacity          uint64
	BytesMax          uint64
	Generation        uint64
	Head, Tail        uint64
	Floor             uint64
	Seq               uint32
	// What follows the 80 bytes: the entries of HELLO, the text of REFUSED.
	Rest string
}

// New returns a packet of a kind, with this library's versions.
func New(kind uint32) Packet {
	return Packet{Kind: kind, WireVersion: lane.WireVersion, LayoutSignature: lane.LayoutSignature}
}

// NewLane returns a packet that describes a lane.
func NewLane(kind uint32, capacity, bytesMax uint64, tail, head lane.Position) Packet {
	p := New(kind)
	p.Capacity, p.BytesMax, p.Tail, p.Head = capacity, bytesMax, tail.Pack(), head.Pack()
	return p
}

// Encode returns the packet's bytes, cut to BytesMax.
func (p *Packet) Encode() []byte {
	le := binary.LittleEndian
	b := make([]byte, BytesMin)
	le.PutUint32(b[0:], p.Kind)
	le.PutUint32(b[4:], p.WireVersion)
	le.PutUint64(b[8:], p.LayoutSignature)
	le.PutUint32(b[16:], uint32(p.Role))
	le.PutUint32(b[20:], p.Holds)
	for i, word := range []uint64{p.Capacity, p.BytesMax, p.Generation, p.Head, p.Tail, p.Floor} {
		le.PutUint64(b[24+8*i:], word)
	}
	le.PutUint32(b[72:], p.Seq)
	b = append(b, p.Rest...)
	return b[:min(len(b), BytesMax)]
}

// Decode reads a packet. It returns false if there are too few bytes.
func Decode(b []byte) (p Packet, ok bool) {
	if len(b) < BytesMin {
		return p, false
	}
	le := binary.LittleEndian
	p.Kind, p.WireVersion, p.LayoutSignature = le.Uint32(b[0:]), le.Uint32(b[4:]), le.Uint64(b[8:])
	p.Role, p.Holds = Role(le.Uint32(b[16:])), le.Uint32(b[20:])
	for i, word := range []*uint64{&p.Capacity, &p.BytesMax, &p.Generation, &p.Head, &p.Tail, &p.Floor} {
		*word = le.Uint64(b[24+8*i:])
	}
	p.Seq, p.Rest = le.Uint32(b[72:]), string(b[BytesMin:])
	return p, true
}

// NewRefused returns the bytes of REFUSED.
func NewRefused(why string) []byte {
	p := New(KindRefused)
	p.Rest = why
	return p.Encode()
}

// Refusal returns the reason of a REFUSED packet as an error; nil for other packets.
func Refusal(b []byte) error {
	p, ok := Decode(b)
	if !ok || p.Kind != KindRefused {
		return nil
	}
	return fail.New(fail.ErrRefused, "refused: %s", Printable(p.Rest))
}
