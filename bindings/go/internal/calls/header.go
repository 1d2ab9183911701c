// Package calls has the records of a link of calls: the header before each request and reply, every check of a
// peer's, messages in pieces, and the outbox before a lane. spec/call.md.
package calls

import (
	"encoding/binary"

	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
)

const (
	HeaderSize = 24
	// CallsMax is the number of calls that a client may have in flight.
	CallsMax = 1024
	// A large message travels in pieces, so that the other side reads one while this side writes the next.
	pieceBytes = 64 << 10
	// RecordsPerPoll limits the records of one poll, so that a peer that floods the lane does not keep the loop. The
	// next poll continues.
	RecordsPerPoll = 1024
)

// Kind is the kind of a record: spec/call.md.
type Kind uint8

const (
	// The kinds that a client sends.
	KindRequest Kind = 1
	KindNotify  Kind = 2
	KindCancel  Kind = 3
	// The kinds that a service sends.
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
	flagTraced    = 1 << 10
)

// IsFinal reports whether it is the last record of its call.
func (k Kind) IsFinal() bool {
	return k == KindReply || k == KindEnd || k == KindFailed || k == KindAbandoned || k == KindReturned
}

func (k Kind) isClients() bool { return k >= KindRequest && k <= KindCancel }

func (k Kind) isServices() bool { return k >= KindReply && k <= KindDrained }

func (k Kind) hasPayload() bool {
	return k == KindRequest || k == KindNotify || k == KindReply || k == KindPart || k == KindFailed
}

// HasID reports whether it belongs to a call, and not to the link.
func (k Kind) HasID() bool { return k != KindNotify && k != KindDraining && k != KindDrained }

// Header precedes the payload of a record.
type Header struct {
	ID              uint64
	Kind            Kind
	More, Continued bool
	// A traceparent is before the payload.
	Traced bool
	// The service's own code, of a failure.
	Code uint32
	// Nanoseconds of CLOCK_MONOTONIC, of a request; 0: none.
	Deadline uint64
}

// SlotOf returns the slot in a call's id.
func SlotOf(id uint64) uint32 { return uint32(id) }

// GenerationOf returns the generation in a call's id.
func GenerationOf(id uint64) uint32 { return uint32(id >> 32) }

func (h *Header) word() uint64 {
	word := uint64(h.Kind) | uint64(h.Code)<<32
	if h.More {
		word |= flagMore
	}
	if h.Continued {
		word |= flagContinued
	}
	if h.Traced {
		word |= flagTraced
	}
	return word
}

// Prefix returns the number of bytes between the header and the payload.
func (h *Header) Prefix() int {
	if h.Traced {
		return TraceparentBytes
	}
	return 0
}

// Write writes the header. The caller has checked that it fits.
func (h *Header) Write(room []byte) {
	binary.LittleEndian.PutUint64(room, h.ID)
	binary.LittleEndian.PutUint64(room[8:], h.word())
	binary.LittleEndian.PutUint64(room[16:], h.Deadline)
}

// ReadHeader checks a peer's header, before this number of bytes: a traceparent and a payload. It returns the name of
// the rule that it breaks, or "".
func ReadHeader(id, word, deadline, bytes uint64, byClient bool) (h Header, rule string) {
	h = Header{
		ID: id, Kind: Kind(word), More: word&flagMore != 0, Continued: word&flagContinued != 0,
		Traced: word&flagTraced != 0, Code: uint32(word >> 32), Deadline: deadline,
	}
	if byClient && !h.Kind.isClients() || !byClient && !h.Kind.isServices() {
		return h, "kind"
	}
	if word&0xffff_ff00&^(flagMore|flagContinued|flagTraced) != 0 || h.Traced && (h.Kind != KindRequest || h.Continued) {
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
	prefix := uint64(h.Prefix())
	if bytes < prefix {
		return h, "length"
	}
	payload := bytes - prefix
	// A piece that continues a message has bytes, so the message ends.
	isPiece := h.More || h.Continued
	if h.Kind.hasPayload() && payload == 0 && isPiece || !h.Kind.hasPayload() && (payload != 0 || isPiece) {
		return h, "length"
	}
	return h, ""
}

// ReadRecord reads the header of a record. payload is what follows it, in place; a traceparent is before that.
func ReadRecord(of *lane.Consumer, record lane.Record, byClient bool) (h Header, payload []byte, rule string) {
	if record.Bytes < HeaderSize {
		return h, nil, "length"
	}
	h, rule = ReadHeader(of.Word(record, 0), of.Word(record, 1), of.Word(record, 2), record.Bytes-HeaderSize, byClient)
	return h, of.Payload(record)[HeaderSize:], rule
}
