package pelton

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"strings"
	"unicode"

	"pelton/internal/lane"
)

// HELLO, the first packet of each side: its role, its features, what it takes, and which version of the library it is. spec/protocol.md, "Features".

// versionText is this library's name and version, for people.
const versionText = "pelton 0.2.0"

// featuresOffered has a bit for each feature of this version: none has been defined. It requires none either.
const featuresOffered uint64 = 0

const (
	entryVersion = 1
	// Types from here on must be known, others may be skipped.
	entryMustBeKnown = 0x8000
	// Bytes of a peer's version text that a refusal repeats: the rest of the refusal is to have room too.
	versionMost = 80
)

func helloPacket(own role, holds bool, takes limits) packet {
	p := newPacket(kindHello)
	p.role, p.capacity, p.bytesMax, p.tail = own, takes.laneBytes, takes.messageBytes, featuresOffered
	if holds {
		p.holds = 1
	}
	p.behind = entry(entryVersion, versionText)
	return p
}

func entry(kind uint16, value string) string {
	b := binary.LittleEndian.AppendUint16(nil, kind)
	b = append(binary.LittleEndian.AppendUint16(b, uint16(len(value))), value...)
	return string(b) + strings.Repeat("\x00", (4-len(b)%4)%4)
}

// readEntries is the peer's version text, and why the entries are refused, else "".
func readEntries(behind string) (version, problem string) {
	version = "of a version that it does not say"
	hasVersion := false
	for rest := []byte(behind); len(rest) > 0; {
		if len(rest) < 4 {
			return version, fmt.Sprintf("an entry of HELLO has %d bytes, wanted at least 4", len(rest))
		}
		kind, bytes := binary.LittleEndian.Uint16(rest), int(binary.LittleEndian.Uint16(rest[2:]))
		padded := 4 + (bytes+3)&^3
		if padded > len(rest) {
			return version, fmt.Sprintf("an entry of HELLO has %d bytes with its padding, %d are left in the packet", padded, len(rest))
		}
		switch {
		case kind == entryVersion && hasVersion:
			return version, fmt.Sprintf("an entry of HELLO, of type %d, comes twice", kind)
		case kind == entryVersion:
			hasVersion = true
			version = forPeople(string(rest[4 : 4+bytes]))
			version = strings.ToValidUTF8(version[:min(len(version), versionMost)], "")
		case kind >= entryMustBeKnown && problem == "":
			problem = fmt.Sprintf("an entry of HELLO has type %#x, which %s does not know", kind, versionText)
		}
		rest = rest[padded:]
	}
	return version, problem
}

// forPeople is somebody else's words, which may go to a terminal.
func forPeople(text string) string {
	return strings.Map(func(c rune) rune {
		if unicode.IsControl(c) {
			return -1
		}
		return c
	}, strings.ToValidUTF8(text, "\uFFFD"))
}

// greet has both sides say hello, and returns what the peer says. A listener decides what it takes once it knows who comes.
func (s *shake) greet(own role, holds, listens bool, takes func() (limits, error)) (packet, error) {
	say := func() error {
		takes, err := takes()
		if err != nil {
			return err
		}
		return s.send(helloPacket(own, holds, takes))
	}
	if !listens {
		if err := say(); err != nil {
			return packet{}, err
		}
	}
	peer, _, err := s.receive(kindHello, 0)
	if err != nil {
		return packet{}, err
	}
	if err := s.checkHello(peer, own, holds); err != nil {
		return packet{}, err
	}
	if listens {
		if err := say(); err != nil {
			return packet{}, err
		}
	}
	return peer, nil
}

func (s *shake) checkHello(peer packet, own role, holds bool) error {
	version, problem := readEntries(peer.behind)
	if problem != "" {
		return s.refuse("%s; the peer is %s", problem, version)
	}
	offers, requires := peer.tail, peer.floor
	if found := requires &^ offers; found != 0 {
		return s.refuse("the peer, %s, requires feature %d and does not offer it", version, bits.TrailingZeros64(found))
	}
	if found := requires &^ featuresOffered; found != 0 {
		return s.refuse("the peer, %s, requires feature %d, which %s does not have: use the peer's version or a later one on both sides",
			version, bits.TrailingZeros64(found), versionText)
	}
	switch {
	case peer.role == own:
		return s.refuse("both sides are the %v: one must be the other", own)
	case peer.role != own.other():
		return s.refuse("one side is a %v, the other a %v: that one wants a %v", peer.role, own, own.other())
	case peer.holds != 0 && holds:
		return s.refuse("both sides hold a lane whose peer died: one of them must give its own up and make a new handle")
	case peer.holds != 0 && own >= roleClient:
		return s.refuse("the %v holds a lane, and those of a link of calls have no successors", peer.role)
	case peer.role != roleSender && peer.capacity < lane.CapacityMin:
		return s.refuse("the peer, %s, takes lanes of at most %d bytes, the smallest has %d", version, peer.capacity, lane.CapacityMin)
	}
	return nil
}

// takes is what a receiver, a client or a service has said that it takes.
func (p *packet) takes() limits { return limits{p.capacity, p.bytesMax} }

// noLane is what a sender says: it takes no fresh lane.
func noLane() (limits, error) { return limits{}, nil }
