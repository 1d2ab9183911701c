package packet

import (
	"encoding/binary"
	"fmt"
	"strings"
	"unicode"

	"github.com/pelton-ipc/pelton/bindings/go/internal/limits"
)

// Version is this library's name and version, for messages.
const Version = "pelton 0.2.0"

// TracedRequests is the feature that a request may begin with a traceparent.
const TracedRequests uint64 = 1 << 0

// TracedMessages is the feature that a message of a channel may come with a traceparent. A sender with that option
// requires it.
const TracedMessages uint64 = 1 << 1

// BroadcastChannel is the feature of a directory that is a broadcast. No HELLO has it.
const BroadcastChannel uint64 = 1 << 2

// FeaturesOffered has a bit for each feature of this version.
const FeaturesOffered = TracedRequests | TracedMessages

const (
	entryVersion = 1
	// A side must know the types from here on, and may skip others.
	entryMustBeKnown = 0x8000
	// Bytes of a peer's version that a refusal repeats, so that the rest has space too.
	versionBytesMax = 80
)

// NewHello returns HELLO. holds: this side offers a lane whose peer died.
func NewHello(own Role, holds bool, takes limits.Limits) Packet {
	p := New(KindHello)
	p.Role, p.Capacity, p.BytesMax, p.Tail = own, takes.LaneBytes, takes.MessageBytes, FeaturesOffered
	if holds {
		p.Holds = 1
	}
	p.Rest = entry(entryVersion, Version)
	return p
}

func entry(kind uint16, value string) string {
	b := binary.LittleEndian.AppendUint16(nil, kind)
	b = append(binary.LittleEndian.AppendUint16(b, uint16(len(value))), value...)
	return string(b) + strings.Repeat("\x00", (4-len(b)%4)%4)
}

// ReadEntries returns the peer's version, and why its entries are refused, or "".
func ReadEntries(behind string) (version, problem string) {
	version = "of a version that it does not say"
	hasVersion := false
	for rest := []byte(behind); len(rest) > 0; {
		if len(rest) < 4 {
			return version, fmt.Sprintf("an entry of HELLO has %d bytes, wanted at least 4", len(rest))
		}
		kind, bytes := binary.LittleEndian.Uint16(rest), int(binary.LittleEndian.Uint16(rest[2:]))
		padded := 4 + (bytes+3)&^3
		if padded > len(rest) {
			return version, fmt.Sprintf("an entry of HELLO has %d bytes with its padding, %d are left in the packet",
				padded, len(rest))
		}
		switch {
		case kind == entryVersion && hasVersion:
			return version, fmt.Sprintf("an entry of HELLO, of type %d, comes twice", kind)
		case kind == entryVersion:
			hasVersion = true
			version = Printable(string(rest[4 : 4+bytes]))
			version = strings.ToValidUTF8(version[:min(len(version), versionBytesMax)], "")
		case kind >= entryMustBeKnown && problem == "":
			problem = fmt.Sprintf("an entry of HELLO has type %#x, which %s does not know", kind, Version)
		}
		rest = rest[padded:]
	}
	return version, problem
}

// Printable returns a peer's text without what a terminal would interpret.
func Printable(text string) string {
	return strings.Map(func(c rune) rune {
		if unicode.IsControl(c) {
			return -1
		}
		return c
	}, strings.ToValidUTF8(text, "\uFFFD"))
}
