// Package handshake connects two processes over a socket: each side creates its segments, shows them to the other,
// and checks the other's. It copies what comes over the socket once, checks the copy, and uses only that.
// spec/protocol.md has the packets and their order.
package handshake

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/pelton-ipc/pelton/bindings/go/internal/doorbell"
	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/limits"
	"github.com/pelton-ipc/pelton/bindings/go/internal/link"
	"github.com/pelton-ipc/pelton/bindings/go/internal/logs"
	"github.com/pelton-ipc/pelton/bindings/go/internal/memory"
	"github.com/pelton-ipc/pelton/bindings/go/internal/packet"
	"golang.org/x/sys/unix"
)

// CallMessageMin is the smallest message limit of a call link's lane.
const CallMessageMin = 1024

// Handshake is a connection until both sides have sent READY.
type Handshake struct {
	Ctx    context.Context
	Socket *kernel.Descriptor
	// Until HELLO has come, a side that connected knows only the process that created the listening socket.
	Peer     kernel.Peer
	Settings limits.Settings
	// This side connected, and nothing has come yet.
	awaitsSender bool
}

// New begins the handshake with a peer that connected, and whose user the settings permit. It reads nothing from the
// peer before that check. It owns fd, also if it fails.
func New(ctx context.Context, fd int, settings limits.Settings) (*Handshake, error) {
	return begin(ctx, fd, settings, false)
}

// Connected begins the handshake over a connection of [kernel.ConnectTo]. A process of another user may have inherited
// the listening socket: if root has created that, HELLO decides.
func Connected(ctx context.Context, fd int, settings limits.Settings) (*Handshake, error) {
	return begin(ctx, fd, settings, true)
}

func begin(ctx context.Context, fd int, settings limits.Settings, hasConnected bool) (*Handshake, error) {
	peer, err := kernel.PeerOf(fd)
	if err != nil {
		kernel.HangUp(fd, kernel.UnknownUser)
		return nil, fail.System("reading the peer's credentials", err)
	}
	if why := UserProblem(peer.UID, settings.UIDs); why != "" && !(hasConnected && peer.UID == 0) {
		defer kernel.HangUp(fd, peer.UID)
		return nil, refuseAt(fd, why)
	}
	socket, err := kernel.NewDescriptor(fd, "pelton socket")
	if err != nil {
		return nil, err
	}
	// An error means an older kernel, where descriptors were permitted all the time.
	_ = kernel.PermitDescriptors(fd, true)
	return &Handshake{ctx, socket, peer, settings, hasConnected}, nil
}

// UserProblem returns why this side refuses peers of that user, or "".
func UserProblem(uid int, allowed []int) string {
	if why := kernel.Unmapped(uid); why != "" {
		return "the peer is " + why
	}
	if !kernel.IsAllowed(uid, allowed) {
		return fmt.Sprintf("the peer is uid %d, this side takes uid %d and %v: allow the other's uid in the options of both sides",
			uid, os.Geteuid(), allowed)
	}
	return kernel.Deferred.Blocked(uid)
}

func (s *Handshake) isOwnUser() bool { return s.Peer.UID == os.Geteuid() }

// takes returns what this side's HELLO may state. Until the peer's HELLO has come, a side that connected knows only
// the creator of the socket: root may have created it for another user.
func (s *Handshake) takes() limits.Limits {
	mayBeOther := s.awaitsSender && s.Peer.UID == 0 && len(s.Settings.UIDs) > 0
	return s.Settings.Takes(s.isOwnUser() && !mayBeOther)
}

// limited returns what this side takes from the peer, whose user HELLO has shown: no more than from another user, if
// it is one, also if this side's HELLO stated more.
func (s *Handshake) limited(stated limits.Limits) limits.Limits {
	if s.isOwnUser() {
		return stated
	}
	others := s.Settings.Takes(false)
	return limits.Limits{LaneBytes: min(stated.LaneBytes, others.LaneBytes),
		MessageBytes: min(stated.MessageBytes, others.MessageBytes)}
}

// Close ends a handshake that failed.
func (s *Handshake) Close() { s.Socket.HangUp(s.Peer.UID) }

// Refuse sends REFUSED with the reason, and returns that. The peer reads it even after this side has closed.
func (s *Handshake) Refuse(format string, args ...any) error {
	return refuseAt(s.Socket.FD, fmt.Sprintf(format, args...))
}

func refuseAt(socket int, why string) error {
	sendRefusal(socket, why)
	return fail.New(fail.ErrRefused, "refused: %s", why)
}

func sendRefusal(socket int, why string) {
	_ = kernel.TrySend(socket, packet.NewRefused(why))
	// After the packet: the peer need not wait for the log.
	if peer, err := kernel.PeerOf(socket); err == nil {
		logs.Refusals.Warn("pelton: refused the peer", "pid", peer.PID, "uid", peer.UID, "reason", why)
	}
}

// Report sends the peer the reason why this side fails, and returns err.
func (s *Handshake) Report(err error) error {
	switch {
	case kernel.IsOutOfDescriptors(err):
		sendRefusal(s.Socket.FD, kernel.ShortageText())
	case err != nil:
		sendRefusal(s.Socket.FD, err.Error())
	}
	return err
}

func hungUp() error {
	return fail.New(fail.ErrHungUp, "the peer hung up during the handshake: see what it says")
}

func (s *Handshake) send(p packet.Packet, fds ...int) error {
	err := kernel.TrySend(s.Socket.FD, p.Encode(), fds...)
	switch {
	case errors.Is(err, unix.EPIPE), errors.Is(err, unix.ECONNRESET):
		// The peer may have refused before this side sent anything.
		b := make([]byte, packet.BytesMax)
		if n, fds, _, err := kernel.TryReceive(s.Socket.FD, b); err == nil {
			kernel.Deferred.CloseAll(s.Peer.UID, fds)
			if refused := packet.Refusal(b[:n]); refused != nil {
				return refused
			}
		}
		return hungUp()
	case errors.Is(err, unix.EAGAIN):
		return fail.New(fail.ErrTimedOut, "timed out while sending to a peer that does not read")
	}
	return s.Report(fail.System("sending to the peer", err))
}

// Receive waits for the next packet, which must have that kind and this number of descriptors.
func (s *Handshake) Receive(kind uint32, count int) (packet.Packet, []int, error) {
	b := make([]byte, packet.BytesMax)
	var n int
	var fds []int
	var isCut bool
	var failed error
	var sender *kernel.Peer
	err := s.Socket.Until(s.Ctx, func() bool {
		n, fds, isCut, sender, failed = kernel.TryReceiveFrom(s.Socket.FD, b)
		return !errors.Is(failed, unix.EAGAIN)
	})
	if err != nil {
		return packet.Packet{}, nil, err
	}
	if s.awaitsSender && sender != nil {
		// Of the process that created the socket, the effective uid is known; these credentials have the real one.
		if sender.PID != s.Peer.PID || sender.PID == 0 {
			s.Peer = *sender
		}
		s.awaitsSender = false
		_ = unix.SetsockoptInt(s.Socket.FD, unix.SOL_SOCKET, unix.SO_PASSCRED, 0)
	}
	if failed != nil {
		return packet.Packet{}, nil, fail.System("receiving from the peer", failed)
	}
	p, err := s.check(b[:n], kind, count, len(fds), isCut)
	if err != nil {
		kernel.Deferred.CloseAll(s.Peer.UID, fds)
		return packet.Packet{}, nil, err
	}
	return p, fds, nil
}

// check checks what a packet must satisfy by itself.
func (s *Handshake) check(b []byte, kind uint32, wanted, found int, isCut bool) (packet.Packet, error) {
	if len(b) == 0 {
		return packet.Packet{}, hungUp()
	}
	p, ok := packet.Decode(b)
	if !ok {
		return p, s.Refuse("a packet of %d bytes came, wanted at least %d", len(b), packet.BytesMin)
	}
	if refused := packet.Refusal(b); refused != nil {
		return p, refused
	}
	if p.WireVersion != lane.WireVersion || p.LayoutSignature != lane.LayoutSignature {
		return p, s.Refuse("one side speaks wire version %d with layout %#x, the other, "+packet.Version+", %d with %#x: use the later version of pelton on both sides",
			p.WireVersion, p.LayoutSignature, lane.WireVersion, uint64(lane.LayoutSignature))
	}
	if p.Kind != kind {
		return p, s.Refuse("packet of kind %d came, wanted %d", p.Kind, kind)
	}
	if isCut && found < wanted {
		return p, s.Report(fail.System("taking the peer's descriptors: raise this process's RLIMIT_NOFILE",
			unix.EMFILE))
	}
	if found != wanted {
		return p, s.Refuse("%d descriptors came with packet %d, wanted %d", found, kind, wanted)
	}
	return p, nil
}

// ready ends the handshake. The side that sends READY last decides: a survivor, so that a lane never gets two
// successors; otherwise the listener.
func (s *Handshake) ready(last bool) error {
	if last {
		if _, _, err := s.Receive(packet.KindReady, 0); err != nil {
			return err
		}
	}
	if err := s.send(packet.New(packet.KindReady)); err != nil || last {
		return err
	}
	_, _, err := s.Receive(packet.KindReady, 0)
	return err
}

// openControl takes a descriptor from the parts, and closes it: the page's mapping is enough.
func (s *Handshake) openControl(p *link.Parts, fd int, what string, magic uint64) (*memory.Segment, error) {
	page, err := memory.Open(fd, what, memory.ControlSeals, lane.SegmentBytes, false)
	if err != nil {
		return nil, s.Report(err)
	}
	p.Segments = append(p.Segments, page)
	p.Claim(fd)
	page.ForgetDescriptor()
	if err := lane.CheckPreamble(page.Bytes, magic); err != nil {
		return nil, s.Refuse("the %s segment: %v", what, err)
	}
	return page, nil
}

// openData takes a descriptor from the parts. It checks the sizes before it uses them.
func (s *Handshake) openData(p *link.Parts, fd int, from packet.Packet, seals int, writable bool) (*memory.Segment,
	error) {
	if !lane.CapacityIsValid(from.Capacity) {
		return nil, s.Refuse("the lane has a capacity of %d bytes, which cannot be", from.Capacity)
	}
	if from.BytesMax > lane.MessageBytesLimit(from.Capacity) {
		return nil, s.Refuse("the lane has a message limit of %d bytes, more than its capacity of %d allows",
			from.BytesMax, from.Capacity)
	}
	data, err := memory.Open(fd, "data", seals, from.Capacity, writable)
	if err != nil {
		return nil, s.Report(err)
	}
	p.Segments = append(p.Segments, data)
	p.Claim(fd)
	return data, nil
}

func (s *Handshake) openProducer(p *link.Parts, fd int, from packet.Packet) (*memory.Segment, error) {
	return s.openProducerOf(p, fd, from, "producer", lane.MagicProducer, 1)
}

// openProducerOf opens the page of a lane with this number of cursors.
func (s *Handshake) openProducerOf(p *link.Parts, fd int, from packet.Packet, what string, magic uint64,
	wanted uint32) (*memory.Segment, error) {
	page, err := s.openControl(p, fd, what, magic)
	if err != nil {
		return nil, err
	}
	if capacity, bytesMax, cursors := lane.ProducerFigures(page.Bytes); capacity != from.Capacity ||
		bytesMax != from.BytesMax || cursors != wanted {
		return nil, s.Refuse("the producer's page says capacity %d, limit %d, %d cursors; its packet %d, %d, wanted %d",
			capacity, bytesMax, cursors, from.Capacity, from.BytesMax, wanted)
	}
	return page, nil
}

// giveDoorbell returns the descriptor that the peer will ring. Another user gets one of its own: a process that has
// an eventfd can make its rings block, and one that shares a socket can take the rings of others.
func (s *Handshake) giveDoorbell(p *link.Parts, b *doorbell.Own) (int, error) {
	if s.isOwnUser() {
		return b.Eventfd, nil
	}
	for _, given := range p.Pairs {
		if given.Of == b {
			return given.Peers, nil
		}
	}
	given, err := b.NewPair(s.Peer.UID)
	if err != nil {
		return -1, s.Report(err)
	}
	p.Pairs = append(p.Pairs, given)
	return given.Peers, nil
}

// consumerSide is what a sender gets from its peer.
type consumerSide struct {
	consumer, receiver *memory.Segment
	doorbell           doorbell.Peer
}

func (s *Handshake) openConsumerSide(p *link.Parts, fds []int) (side consumerSide, err error) {
	if side.consumer, err = s.openControl(p, fds[0], "consumer", lane.MagicConsumer); err != nil {
		return side, err
	}
	if side.receiver, err = s.openControl(p, fds[1], "receiver", lane.MagicReceiver); err != nil {
		return side, err
	}
	side.doorbell, err = doorbell.Check(fds[2], s.isOwnUser())
	return side, s.Report(err)
}

// NewSender performs the handshake of a new sender: with a fresh lane, or with the lane of a receiver that survived
// its sender.
func (s *Handshake) NewSender(listens bool) (*link.Outgoing, error) {
	var p link.Parts
	defer p.GiveBack()
	canBarrier := kernel.Membarrier()
	own, err := doorbell.New()
	if err != nil {
		return nil, s.Report(err)
	}
	defer func() {
		if own != nil {
			own.Close()
		}
	}()
	peer, err := s.ExchangeHello(packet.RoleSender, false, listens, s.Settings.Traced, noLane)
	if err != nil {
		return nil, err
	}
	takesOver := peer.Holds != 0
	capacity := s.Settings.Makes.LaneBytes
	tail, head, floor := lane.Start, lane.Start, uint64(0)
	var page, data *memory.Segment
	var side consumerSide
	if takesOver {
		offer, fds, err := s.Receive(packet.KindConsumer, 4)
		if err != nil {
			return nil, err
		}
		p.TakesFrom(fds, s.Peer)
		if data, err = s.openData(&p, fds[3], offer, memory.SizeSeals, true); err != nil {
			return nil, err
		}
		if offer.Capacity > capacity {
			return nil, s.Refuse("the lane to take over has %d bytes, this sender's capacity is %d: raise it to at least as much", offer.Capacity, capacity)
		}
		if side, err = s.openConsumerSide(&p, fds); err != nil {
			return nil, err
		}
		// Above 1: this is not the lane's first producer, and it marks its first message.
		generation := max(offer.Generation+1, 2)
		label := memory.LaneLabel(data, nil, s.Settings.Name)
		if page, err = p.Segment(memory.NewProducerPage(offer.Capacity, offer.BytesMax, generation, label)); err != nil {
			return nil, s.Report(err)
		}
		answer := offer
		answer.Kind, answer.Generation = packet.KindProducer, generation
		doorbell, err := s.giveDoorbell(&p, own)
		if err != nil {
			return nil, err
		}
		if err := s.send(answer, page.FD, doorbell); err != nil {
			return nil, err
		}
		tail, head, floor = lane.Unpack(offer.Tail), lane.Unpack(offer.Head), offer.Floor
	} else {
		// A call link sends larger messages in pieces. Here the caller asked for messages that could never be sent.
		takes := peer.Takes()
		most := min(s.Settings.MessageLimit(min(capacity, limits.LaneWithin(takes.LaneBytes))), takes.MessageBytes)
		if found := s.Settings.MessageBytes; found > most {
			return nil, s.Report(fail.New(fail.ErrOption,
				"MessageBytesMax is %d, wanted at most %d: the receiver takes lanes of %d bytes and messages of %d. Lower it, or raise the receiver's Capacity, MessageBytesMax or Memory",
				found, most, takes.LaneBytes, takes.MessageBytes))
		}
		if page, data, side, err = s.giveLane(&p, own, takes); err != nil {
			return nil, err
		}
	}
	m := &memory.Lane{Producer: page, Consumer: side.consumer, Receiver: side.receiver, Data: data}
	producer, err := lane.NewProducer(m.Segments(), tail, head, floor, canBarrier)
	if err != nil {
		return nil, s.Report(fail.Lane(err))
	}
	// Messages of a predecessor may carry a traceparent, and the next receiver must know that.
	if peer.Floor&packet.TracedMessages != 0 {
		producer.PermitTraced()
	}
	process, err := s.watchPeer(&p)
	if err != nil {
		return nil, err
	}
	if err := s.ready(listens && !takesOver); err != nil {
		return nil, err
	}
	given := p.Keep()
	out := &link.Outgoing{Lane: producer, Memory: m, Doorbell: own,
		Link: link.New(s.Socket, process, side.doorbell, given, s.Peer, own.Wake)}
	own = nil
	return out, nil
}

// giveLane is the part of the handshake in which this side creates the lane that it sends by, no larger than the peer
// takes.
func (s *Handshake) giveLane(p *link.Parts, ownDoorbell *doorbell.Own, within limits.Limits) (page,
	data *memory.Segment, side consumerSide, err error) {
	makes := s.Settings.Within(within)
	capacity, limit := makes.LaneBytes, makes.MessageBytes
	if data, err = p.Segment(memory.NewData(capacity, "0 "+s.Settings.Name)); err != nil {
		return nil, nil, side, s.Report(err)
	}
	label := memory.LaneLabel(data, nil, s.Settings.Name)
	if page, err = p.Segment(memory.NewProducerPage(capacity, limit, 1, label)); err != nil {
		return nil, nil, side, s.Report(err)
	}
	offer := packet.NewLane(packet.KindProducer, capacity, limit, lane.Start, lane.Start)
	offer.Generation = 1
	doorbell, err := s.giveDoorbell(p, ownDoorbell)
	if err != nil {
		return nil, nil, side, err
	}
	if err := s.send(offer, page.FD, doorbell, data.FD); err != nil {
		return nil, nil, side, err
	}
	_, fds, err := s.Receive(packet.KindConsumer, 3)
	if err != nil {
		return nil, nil, side, err
	}
	p.TakesFrom(fds, s.Peer)
	side, err = s.openConsumerSide(p, fds)
	return page, data, side, err
}

// SurvivingSender performs the handshake of a sender whose receiver died: it offers its lane.
func (s *Handshake) SurvivingSender(out *link.Outgoing, listens bool) error {
	var p link.Parts
	defer p.GiveBack()
	if _, err := s.ExchangeHello(packet.RoleSender, true, listens, out.Lane.IsTraced(), noLane); err != nil {
		return err
	}
	producer, m := out.Lane, out.Memory
	if _, err := producer.PollHead(); err != nil {
		return s.Report(fail.Lane(err))
	}
	offer := packet.NewLane(packet.KindProducer, producer.Capacity(), producer.LaneBytesMax(), producer.Tail(),
		producer.Head())
	offer.Generation = producer.Generation()
	// The process of a receiver that has closed may still read messages that it holds. A candidate whose handshake
	// fails holds none, so the next one gets the same data. Otherwise each candidate could keep a copy of all messages.
	if producer.ConsumerClosed() && producer.Unreleased() > 0 && !out.IsMoved {
		if err := out.Move(s.Settings.Name); err != nil {
			return s.Report(err)
		}
	}
	doorbell, err := s.giveDoorbell(&p, out.Doorbell)
	if err != nil {
		return err
	}
	if err := s.send(offer, m.Producer.FD, doorbell, m.Data.FD); err != nil {
		return err
	}
	_, fds, err := s.Receive(packet.KindConsumer, 3)
	if err != nil {
		return err
	}
	p.TakesFrom(fds, s.Peer)
	side, err := s.openConsumerSide(&p, fds)
	if err != nil {
		return err
	}
	if err := producer.CheckSuccessor(side.consumer.Bytes); err != nil {
		return s.Report(fail.Lane(err))
	}
	process, err := s.watchPeer(&p)
	if err != nil {
		return err
	}
	// The lane keeps its old consumer until the last READY. So a successor that fails earlier leaves no trace.
	if err := s.ready(true); err != nil {
		return err
	}
	out.IsMoved = false
	given := p.Keep()
	m.Consumer.Close()
	m.Receiver.Close()
	m.Consumer, m.Receiver = side.consumer, side.receiver
	producer.AttachConsumer(side.consumer.Bytes, side.receiver.Bytes)
	out.Link.Close()
	out.Link = link.New(s.Socket, process, side.doorbell, given, s.Peer, out.Doorbell.Wake)
	return nil
}

// ReceivingSide is the receiver's part of each lane.
type ReceivingSide struct {
	Page     *memory.Segment
	Doorbell *doorbell.Own
	IsShared bool
	// For all lanes together; nil: no limit.
	Budget *limits.Budget
}

// share returns what this side takes from one more peer, whose one or two lanes use this side's memory. Their share
// of the budget belongs to the parts.
func (s *Handshake) share(p *link.Parts, to *ReceivingSide, lanes uint64) (limits.Limits, error) {
	takes := s.takes()
	if to.Budget == nil {
		return takes, nil
	}
	bytes, part := to.Budget.TakeShare(lanes, takes.LaneBytes)
	if bytes == 0 {
		return takes, s.Refuse("%d of the %d bytes of memory that this side has for its peers are left, of which a %dth is less than %d: raise Memory there, or connect again later",
			to.Budget.Left(), to.Budget.Most, limits.PeerFraction*lanes, limits.LaneGranule)
	}
	p.MemoryShare, takes.LaneBytes = part, bytes
	return takes, nil
}

// NewReceiver performs the handshake of a new receiver's lane: a fresh one, or that of a sender that survived its
// receiver.
func (s *Handshake) NewReceiver(to *ReceivingSide, listens bool) (*link.Incoming, error) {
	var p link.Parts
	defer p.GiveBack()
	var takes limits.Limits
	peer, err := s.ExchangeHello(packet.RoleReceiver, false, listens, false, func() (_ limits.Limits, err error) {
		takes, err = s.share(&p, to, 1)
		return takes, err
	})
	if err != nil {
		return nil, err
	}
	takesOver := peer.Holds != 0
	in, peerDoorbell, err := s.takeLane(&p, to, s.limited(takes), 0)
	if err != nil {
		return nil, err
	}
	in.IsTraced = peer.Floor&packet.TracedMessages != 0
	p.MemoryShare.ShrinkTo(in.Consumer.Capacity())
	in.MemoryShare = p.MemoryShare
	process, err := s.watchPeer(&p)
	if err != nil {
		return nil, err
	}
	if err := s.ready(listens && !takesOver); err != nil {
		return nil, err
	}
	given := p.Keep()
	in.Memory.Retain()
	in.Link = link.New(s.Socket, process, peerDoorbell, given, s.Peer, to.Doorbell.Wake)
	return in, nil
}

// checkSize checks a lane that a peer of that role gives.
func (s *Handshake) checkSize(offer packet.Packet, within limits.Limits, role packet.Role) error {
	if offer.Capacity > within.LaneBytes {
		return s.Refuse("the lane has %d bytes, this side takes %d: raise its Capacity or Memory, or lower the %v's Capacity",
			offer.Capacity, within.LaneBytes, role)
	}
	if offer.BytesMax > within.MessageBytes {
		return s.Refuse("the lane has messages of up to %d bytes, this side takes %d: raise its MessageBytesMax, or lower the %v's",
			offer.BytesMax, within.MessageBytes, role)
	}
	return nil
}

// takeLane is the part of the handshake in which this side opens the peer's lane, which is within what this side
// takes. For a call link, least is the smallest permitted message limit, and no message waits in the lane; otherwise
// it is 0.
func (s *Handshake) takeLane(p *link.Parts, to *ReceivingSide, within limits.Limits, least uint64) (in *link.Incoming,
	peerDoorbell doorbell.Peer, err error) {
	offer, fds, err := s.Receive(packet.KindProducer, 3)
	if err != nil {
		return nil, peerDoorbell, err
	}
	p.TakesFrom(fds, s.Peer)
	if err := s.checkSize(offer, within, packet.RoleSender); err != nil {
		return nil, peerDoorbell, err
	}
	data, err := s.openData(p, fds[2], offer, memory.SizeSeals, false)
	if err != nil {
		return nil, peerDoorbell, err
	}
	page, err := s.openProducer(p, fds[0], offer)
	if err != nil {
		return nil, peerDoorbell, err
	}
	if offer.BytesMax < least {
		return nil, peerDoorbell, s.Refuse("a lane has a largest message of %d bytes, wanted at least %d",
			offer.BytesMax, least)
	}
	if peerDoorbell, err = doorbell.Check(fds[1], s.isOwnUser()); err != nil {
		return nil, peerDoorbell, s.Report(err)
	}
	head := lane.Unpack(offer.Head)
	redelivered := lane.Unpack(offer.Tail).Since(head)
	if redelivered > offer.Capacity/8 {
		return nil, peerDoorbell, s.Refuse("%d messages are said to wait in a lane of %d bytes, wanted at most %d",
			redelivered, offer.Capacity, offer.Capacity/8)
	}
	if least > 0 && redelivered > 0 {
		return nil, peerDoorbell, s.Refuse("%d messages are said to wait in a lane of a new link, wanted none",
			redelivered)
	}
	consumerPage, err := p.Segment(memory.NewConsumerPage(head, memory.LaneLabel(data, to.Page, s.Settings.Name)))
	if err != nil {
		return nil, peerDoorbell, s.Report(err)
	}
	m := &memory.Lane{Producer: page, Consumer: consumerPage, Receiver: to.Page, Data: data,
		SharesReceiver: to.IsShared}
	consumer, err := lane.NewConsumer(m.Segments(), offer.BytesMax)
	if err != nil {
		return nil, peerDoorbell, s.Report(fail.Lane(err))
	}
	own, err := s.giveDoorbell(p, to.Doorbell)
	if err != nil {
		return nil, peerDoorbell, err
	}
	if err := s.send(packet.New(packet.KindConsumer), consumerPage.FD, to.Page.FD, own); err != nil {
		return nil, peerDoorbell, err
	}
	return &link.Incoming{Consumer: consumer, Memory: m, Redelivered: redelivered, ID: m.Data.Identity()}, peerDoorbell, nil
}

// watchPeer returns a descriptor that reports the end of the peer's process; -1 if only the socket's hang-up does.
func (s *Handshake) watchPeer(p *link.Parts) (int, error) {
	process, err := kernel.ProcessOf(s.Socket.FD, s.Peer)
	if err != nil {
		return -1, s.Report(fail.System("watching the peer", err))
	}
	if process >= 0 {
		p.Owns([]int{process})
	}
	return process, nil
}

// SurvivingReceiver performs the handshake of a receiver whose sender died: it offers the lane, and the end of that
// sender's records.
func (s *Handshake) SurvivingReceiver(in *link.Incoming, ownDoorbell *doorbell.Own, listens bool) error {
	var p link.Parts
	defer p.GiveBack()
	successor, err := s.ExchangeHello(packet.RoleReceiver, true, listens, in.IsTraced,
		func() (limits.Limits, error) { return s.takes(), nil })
	if err != nil {
		return err
	}
	consumer, m := in.Consumer, in.Memory
	tail, _, err := consumer.EndOfCommitted()
	if err != nil {
		return s.Report(fail.Lane(err))
	}
	offer := packet.NewLane(packet.KindConsumer, consumer.Capacity(), consumer.BytesMax(), tail, consumer.Head())
	offer.Floor, offer.Generation = consumer.DeadProducer()
	ring, err := s.giveDoorbell(&p, ownDoorbell)
	if err != nil {
		return err
	}
	if err := s.send(offer, m.Consumer.FD, m.Receiver.FD, ring, m.Data.FD); err != nil {
		return err
	}
	answer, fds, err := s.Receive(packet.KindProducer, 2)
	if err != nil {
		return err
	}
	p.TakesFrom(fds, s.Peer)
	if answer.Capacity != offer.Capacity || answer.BytesMax != offer.BytesMax {
		return s.Refuse("the successor speaks of %d bytes, the lane has %d", answer.Capacity, offer.Capacity)
	}
	page, err := s.openProducer(&p, fds[0], answer)
	if err != nil {
		return err
	}
	peerDoorbell, err := doorbell.Check(fds[1], s.isOwnUser())
	if err != nil {
		return s.Report(err)
	}
	process, err := s.watchPeer(&p)
	if err != nil {
		return err
	}
	// Only READY completes the successor's page. If the successor dies before, the dead sender's page is still
	// needed.
	if err := s.ready(true); err != nil {
		return err
	}
	given := p.Keep()
	m.Producer.Close()
	m.Producer = page
	consumer.AttachProducer(page.Bytes)
	in.IsTraced = in.IsTraced || successor.Floor&packet.TracedMessages != 0
	next := link.New(s.Socket, process, peerDoorbell, given, s.Peer, ownDoorbell.Wake)
	in.Link.HandOver(next, tail.Seq)
	in.Link = next
	return nil
}

// CallLink is a link of calls: the lane to send by and the one to receive by.
type CallLink struct {
	Producer *lane.Producer
	Memory   *memory.Lane
	// The peer's doorbell for free space in this side's lane, and whether the link has the same one and closes it.
	Doorbell       doorbell.Peer
	SharesDoorbell bool
	In             *link.Incoming
	// The largest request or reply that the peer takes.
	BytesMax uint64
	// The features that the peer offers.
	Features uint64
}

// NewCallLink performs the handshake of a link of calls. The peer rings ownDoorbell for free space in this side's
// lane, and to.Doorbell for messages.
func (s *Handshake) NewCallLink(to *ReceivingSide, ownDoorbell *doorbell.Own, own packet.Role, listens bool,
	wake func()) (*CallLink, error) {
	var p link.Parts
	defer p.GiveBack()
	var takes limits.Limits
	peer, err := s.ExchangeHello(own, false, listens, false, func() (_ limits.Limits, err error) {
		takes, err = s.share(&p, to, 2)
		// For a whole request or reply, which travels in pieces if a lane's messages are smaller.
		return limits.Limits{LaneBytes: takes.LaneBytes, MessageBytes: s.Settings.CallBytes}, err
	})
	if err != nil {
		return nil, err
	}
	takes = s.limited(takes)
	takes.MessageBytes = limits.OfFormat.MessageBytes
	gives := limits.Limits{LaneBytes: peer.Capacity, MessageBytes: limits.OfFormat.MessageBytes}
	if to.Budget != nil {
		gives.LaneBytes = min(gives.LaneBytes, takes.LaneBytes)
	}
	canBarrier := kernel.Membarrier()
	var page, data *memory.Segment
	var side consumerSide
	var in *link.Incoming
	var peerDoorbell doorbell.Peer
	give := func() (err error) { page, data, side, err = s.giveLane(&p, ownDoorbell, gives); return err }
	take := func() (err error) { in, peerDoorbell, err = s.takeLane(&p, to, takes, CallMessageMin); return err }
	steps := []func() error{give, take}
	if own == packet.RoleService {
		steps = []func() error{take, give}
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return nil, err
		}
	}
	m := &memory.Lane{Producer: page, Consumer: side.consumer, Receiver: side.receiver, Data: data}
	producer, err := lane.NewProducer(m.Segments(), lane.Start, lane.Start, 0, canBarrier)
	if err != nil {
		return nil, s.Report(fail.Lane(err))
	}
	process, err := s.watchPeer(&p)
	if err != nil {
		return nil, err
	}
	if err := s.ready(listens); err != nil {
		return nil, err
	}
	p.MemoryShare.ShrinkTo(in.Consumer.Capacity() + producer.Capacity())
	in.MemoryShare = p.MemoryShare
	given := p.Keep()
	m.Retain()
	in.Memory.Retain()
	// No successor asks for them, and a thousand lanes would keep many descriptors.
	for _, segment := range []*memory.Segment{page, data, side.consumer, side.receiver, in.Memory.Producer,
		in.Memory.Consumer, in.Memory.Data} {
		segment.ForgetDescriptor()
	}
	// Many peers have one doorbell for both lanes. The link owns it then, as it ends after the last ring.
	sharesDoorbell := kernel.IsSameFile(peerDoorbell.FD, side.doorbell.FD)
	if sharesDoorbell {
		side.doorbell.Close(s.Peer.UID)
		side.doorbell = peerDoorbell
	}
	in.Link = link.New(s.Socket, process, peerDoorbell, given, s.Peer, wake)
	return &CallLink{Producer: producer, Memory: m, Doorbell: side.doorbell, SharesDoorbell: sharesDoorbell, In: in,
		BytesMax: peer.BytesMax, Features: peer.Tail}, nil
}
