package calls

import (
	"encoding/binary"

	"pelton/internal/lane"
)

// What is in the records of a link of calls: the header before each request and answer, every check of a peer's, messages that are cut into
// pieces, and the way into a lane. spec/call.md.

const (
	HeaderSize = 24
	// Calls that a client may have in flight.
	CallsMax = 1024
	// What a large message is cut into: so many bytes are written while the other side still reads the ones before.
	pieceBytes = 64 << 10
	// Records that are taken in one look: who floods the lane is not to keep this side's loop. The next look goes on.
	RecordsPerPoll = 1024
)

type Kind uint8

const (
	KindRequest   Kind = 1
	KindNotify    Kind = 2
	KindCancel    Kind = 3
	KindReply     Kind = 16
	KindPart      Kind = 17
	KindEnd       Kind = 18
	KindFailed    Kind = 19
	KindAbandoned Kind = 20
	KindDraining  Kind = 21
	KindReturned  Kind = 22
	KindDrained   Kind = 23
)

const (
	flagMore      = 1 << 8
	flagContinued = 1 << 9
)

// IsFinal says whether nothing of its call comes after it.
func (k Kind) IsFinal() bool {
	return k == KindReply || k == KindEnd || k == KindFailed || k == KindAbandoned || k == KindReturned
}

func (k Kind) isClients() bool { return k >= KindRequest && k <= KindCancel }

func (k Kind) isServices() bool { return k >= KindReply && k <= KindDrained }

func (k Kind) hasPayload() bool {
	return k == KindRequest || k == KindNotify || k == KindReply || k == KindPart || k == KindFailed
}

// HasID says whether it is of a call, and not of the link.
func (k Kind) HasID() bool { return k != KindNotify && k != KindDraining && k != KindDrained }

type Header struct {
	Id              uint64
	Kind            Kind
	More, Continued bool
	// The service's own, of a failure.
	Code uint32
	// Nanoseconds of CLOCK_MONOTONIC, of a request; 0: none.
	Deadline uint64
}

func SlotOf(id uint64) uint32 { return uint32(id) }

func GenerationOf(id uint64) uint32 { return uint32(id >> 32) }

func (h *Header) word() uint64 {
	word := uint64(h.Kind) | uint64(h.Code)<<32
	if h.More {
		word |= flagMore
	}
	if h.Continued {
		word |= flagContinued
	}
	return word
}

// Write is behind a check that the room is larger.
func (h *Header) Write(room []byte) {
	binary.LittleEndian.PutUint64(room, h.Id)
	binary.LittleEndian.PutUint64(room[8:], h.word())
	binary.LittleEndian.PutUint64(room[16:], h.Deadline)
}

// ReadHeader is a header of the peer's, before a payload of so many bytes; or which rule it breaks, else "".
func ReadHeader(id, word, deadline, payload uint64, byClient bool) (h Header, rule string) {
	h = Header{
		Id: id, Kind: Kind(word), More: word&flagMore != 0, Continued: word&flagContinued != 0, Code: uint32(word >> 32), Deadline: deadline,
	}
	if byClient && !h.Kind.isClients() || !byClient && !h.Kind.isServices() {
		return h, "kind"
	}
	if word&0xffff_ff00&^(flagMore|flagContinued) != 0 {
		return h, "flags"
	}
	if h.Kind.HasID() && (SlotOf(id) >= CallsMax || GenerationOf(id) == 0) || !h.Kind.HasID() && id != 0 {
		return h, "id"
	}
	if h.Code != 0 && (h.Kind != KindFailed || h.Continued) {
		return h, "code"
	}
	if deadline != 0 && (h.Kind != KindRequest || h.Continued) {
		return h, "deadline"
	}
	// What goes on has something to go on with, and so ends.
	isPiece := h.More || h.Continued
	if h.Kind.hasPayload() && payload == 0 && isPiece || !h.Kind.hasPayload() && (payload != 0 || isPiece) {
		return h, "length"
	}
	return h, ""
}

// ReadRecord reads the header of a record; payload is what follows it, in place.
func ReadRecord(of *lane.Consumer, record lane.Record, byClient bool) (h Header, payload []byte, rule string) {
	if record.Bytes < HeaderSize {
		return h, nil, "length"
	}
	h, rule = ReadHeader(of.Word(record, 0), of.Word(record, 1), of.Word(record, 2), record.Bytes-HeaderSize, byClient)
	return h, of.Payload(record)[HeaderSize:], rule
}
