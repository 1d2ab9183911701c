package handshake

import (
	"math/bits"

	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/limits"
	"github.com/pelton-ipc/pelton/bindings/go/internal/packet"
)

// ExchangeHello sends and receives HELLO, and returns the peer's. A listener decides what it takes once it knows the
// peer. A traced side requires messages with a traceparent.
func (s *Handshake) ExchangeHello(own packet.Role, holds, listens, isTraced bool,
	takes func() (limits.Limits, error)) (packet.Packet, error) {
	var required uint64
	if isTraced {
		required = packet.TracedMessages
	}
	say := func() error {
		takes, err := takes()
		if err != nil {
			return err
		}
		hello := packet.NewHello(own, holds, takes)
		hello.Floor = required
		return s.send(hello)
	}
	if !listens {
		if err := say(); err != nil {
			return packet.Packet{}, err
		}
	}
	peer, _, err := s.Receive(packet.KindHello, 0)
	if err != nil {
		return packet.Packet{}, err
	}
	if err := s.checkHello(peer, own, holds, required); err != nil {
		return packet.Packet{}, err
	}
	// Of the process that accepted this side, which may not be the one that created the listening socket.
	if why := UserProblem(s.Peer.UID, s.Settings.UIDs); why != "" {
		return packet.Packet{}, s.Refuse("%s", why)
	}
	if listens {
		if err := say(); err != nil {
			return packet.Packet{}, err
		}
	}
	return peer, nil
}

func (s *Handshake) checkHello(peer packet.Packet, own packet.Role, holds bool, required uint64) error {
	version, problem := packet.ReadEntries(peer.Rest)
	if problem != "" {
		return s.Refuse("%s; the peer is %s", problem, version)
	}
	offers, requires := peer.Tail, peer.Floor
	if found := requires &^ offers; found != 0 {
		return s.Refuse("the peer, %s, requires feature %d and does not offer it", version, bits.TrailingZeros64(found))
	}
	if found := requires &^ packet.FeaturesOffered; found != 0 {
		return s.Refuse("the peer, %s, requires feature %d, which %s does not have: use the peer's version or a later one on both sides",
			version, bits.TrailingZeros64(found), packet.Version)
	}
	if found := required &^ offers; found != 0 {
		why, otherwise := "the lane that this receiver holds", ""
		if own == packet.RoleSender {
			why, otherwise = "the sender's option Traced", ", or leave that option out"
		}
		return s.Refuse("the peer, %s, has no feature %d, messages with a traceparent, which %s requires: use %s or later on both sides%s",
			version, bits.TrailingZeros64(found), why, packet.Version, otherwise)
	}
	switch {
	case peer.Role == own:
		return s.Refuse("both sides are the %v: one must be the other", own)
	case peer.Role != own.Other():
		return s.Refuse("one side is a %v, the other a %v: that one wants a %v", peer.Role, own, own.Other())
	case peer.Holds != 0 && holds:
		return s.Refuse("both sides hold a lane whose peer died: one of them must give its own up and make a new handle")
	case peer.Holds != 0 && own >= packet.RoleClient:
		return s.Refuse("the %v holds a lane, and only those of a sender and a receiver have successors", peer.Role)
	case peer.Role != packet.RoleSender && peer.Capacity < lane.CapacityMin:
		return s.Refuse("the peer, %s, takes lanes of at most %d bytes, the smallest has %d", version, peer.Capacity,
			lane.CapacityMin)
	}
	return nil
}

// noLane is the limit of a sender, which takes no fresh lane.
func noLane() (limits.Limits, error) { return limits.Limits{}, nil }
