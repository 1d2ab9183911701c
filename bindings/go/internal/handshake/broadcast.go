package handshake

import (
	"github.com/pelton-ipc/pelton/bindings/go/internal/doorbell"
	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/limits"
	"github.com/pelton-ipc/pelton/bindings/go/internal/link"
	"github.com/pelton-ipc/pelton/bindings/go/internal/memory"
	"github.com/pelton-ipc/pelton/bindings/go/internal/packet"
)

// PublisherSide is the publisher's part of each handshake.
type PublisherSide struct {
	Page, Data *memory.Segment
	BytesMax   uint64
	Doorbell   *doorbell.Own
	HoldLimit  lane.HoldLimit
}

// Joining is a subscriber that has sent its cursor, and that the publisher may let join. It owns its parts until
// [Joining.Admit] or [Joining.Drop].
type Joining struct {
	Cursor *memory.Segment
	Policy lane.Policy
	From   lane.From

	handshake *Handshake
	parts     link.Parts
	process   int
	doorbell  doorbell.Peer
}

// NewSubscription performs the publisher's part of a handshake up to the subscriber's cursor.
func (s *Handshake) NewSubscription(side *PublisherSide) (*Joining, error) {
	var p link.Parts
	defer func() { p.GiveBack() }()
	makes := limits.Limits{LaneBytes: uint64(len(side.Data.Bytes)), MessageBytes: side.BytesMax}
	if _, err := s.ExchangeHello(packet.RolePublisher, false, true, false,
		func() (limits.Limits, error) { return makes, nil }); err != nil {
		return nil, err
	}
	own, err := s.giveDoorbell(&p, side.Doorbell)
	if err != nil {
		return nil, err
	}
	offer := packet.NewLane(packet.KindProducer, makes.LaneBytes, makes.MessageBytes, lane.Start, lane.Start)
	offer.Generation = 1
	if err := s.send(offer, side.Page.FD, own, side.Data.FD); err != nil {
		return nil, err
	}
	answer, fds, err := s.Receive(packet.KindConsumer, 2)
	if err != nil {
		return nil, err
	}
	p.TakesFrom(fds, s.Peer)
	j := &Joining{handshake: s, From: lane.From{Kind: lane.FromKind(answer.Seq), Last: answer.Tail}}
	if j.Cursor, err = s.openControl(&p, fds[0], "cursor", lane.MagicCursor); err != nil {
		return nil, err
	}
	if j.doorbell, err = doorbell.Check(fds[1], s.isOwnUser()); err != nil {
		return nil, s.Report(err)
	}
	if j.Policy, err = lane.CursorPolicy(j.Cursor.Bytes); err != nil {
		return nil, s.Report(fail.Lane(err))
	}
	if err := side.HoldLimit.Check(j.Policy); err != nil {
		return nil, s.Refuse("%v", err)
	}
	if j.From.Kind > lane.FromLast {
		return nil, s.Refuse("the subscriber begins at %d, wanted 0 to %d", answer.Seq, lane.FromLast)
	}
	if j.process, err = s.watchPeer(&p); err != nil {
		return nil, err
	}
	j.parts, p = p, link.Parts{}
	return j, nil
}

// Admit sends the subscriber the place where it begins. The publisher counts it already, so that nothing there is
// overwritten. wake is as for [link.New]. After an error the caller drops it; otherwise the cursor is the caller's, and
// the rest the link's.
func (j *Joining) Admit(joined lane.Joined, wake func()) (*link.Link, error) {
	ready := packet.New(packet.KindReady)
	ready.Seq, ready.Generation, ready.Floor = joined.Slot, joined.Join, joined.Number
	ready.Head, ready.Tail = joined.Place.Pack(), joined.Skip
	if err := j.handshake.send(ready); err != nil {
		return nil, err
	}
	return link.New(j.handshake.Socket, j.process, j.doorbell, j.parts.Keep(), j.handshake.Peer, wake), nil
}

// Refuse sends the subscriber the reason, and drops it.
func (j *Joining) Refuse(format string, args ...any) {
	_ = j.handshake.Refuse(format, args...)
	j.Drop()
}

// Drop hangs up, and releases what came of the subscriber, with its cursor.
func (j *Joining) Drop() {
	j.parts.GiveBack()
	j.handshake.Close()
}

// NewSubscriber performs the subscriber's part of a handshake. A subscriber that had another publisher keeps its
// doorbell.
func (s *Handshake) NewSubscriber(policy lane.Policy, from lane.From, own *doorbell.Own) (*link.Subscription, error) {
	var p link.Parts
	defer p.GiveBack()
	canBarrier := kernel.Membarrier()
	takes := s.takes()
	if _, err := s.ExchangeHello(packet.RoleSubscriber, false, false, false,
		func() (limits.Limits, error) { return takes, nil }); err != nil {
		return nil, err
	}
	offer, fds, err := s.Receive(packet.KindProducer, 3)
	if err != nil {
		return nil, err
	}
	p.TakesFrom(fds, s.Peer)
	if err := s.checkSize(offer, s.limited(takes), packet.RolePublisher); err != nil {
		return nil, err
	}
	var sub link.Subscription
	if sub.Data, err = s.openData(&p, fds[2], offer, memory.ControlSeals, false); err != nil {
		return nil, err
	}
	if sub.Page, err = s.openProducerOf(&p, fds[0], offer, "broadcast", lane.MagicBroadcast,
		lane.CursorsMax); err != nil {
		return nil, err
	}
	peerDoorbell, err := doorbell.Check(fds[1], s.isOwnUser())
	if err != nil {
		return nil, s.Report(err)
	}
	if sub.Cursor, err = p.Segment(memory.NewCursorPage(policy, memory.LaneLabel(sub.Data, nil,
		s.Settings.Name))); err != nil {
		return nil, s.Report(err)
	}
	ring, err := s.giveDoorbell(&p, own)
	if err != nil {
		return nil, err
	}
	process, err := s.watchPeer(&p)
	if err != nil {
		return nil, err
	}
	answer := packet.New(packet.KindConsumer)
	answer.Seq, answer.Tail = uint32(from.Kind), from.Last
	if err := s.send(answer, sub.Cursor.FD, ring); err != nil {
		return nil, err
	}
	ready, _, err := s.Receive(packet.KindReady, 0)
	if err != nil {
		return nil, err
	}
	joined := lane.Joined{Slot: ready.Seq, Join: ready.Generation, Number: ready.Floor, Place: lane.Unpack(ready.Head),
		Skip: ready.Tail}
	sub.Consumer, err = lane.NewBroadcastConsumer(lane.BroadcastMemory{Producer: sub.Page.Bytes, Data: sub.Data.Bytes},
		sub.Cursor.Bytes, policy, joined, offer.BytesMax, canBarrier)
	if err != nil {
		return nil, fail.Lane(err)
	}
	sub.Link = link.New(s.Socket, process, peerDoorbell, p.Keep(), s.Peer, own.Wake)
	return &sub, nil
}
