package pelton

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"
	"pelton/internal/fail"
	"pelton/internal/lane"
)

// The hand-shake of two processes that have a socket between them: each side makes its segments, shows them to the other, and
// checks the other's. spec/protocol.md has the packets and their order. What comes over the socket is copied once, checked, and
// only the copy is used.

// linkBytesMin is the least that the largest message of a call link's lane may be.
const linkBytesMin = 1024

const (
	packetBytesMax = 512
	packetBytes    = 80
)

const (
	kindHello       = 1
	kindProducer    = 2
	kindConsumer    = 3
	kindReady       = 4
	kindRefused     = 5
	kindDescriptors = 6
)

type role uint32

const (
	roleSender   role = 1
	roleReceiver role = 2
	// Of a link of calls, spec/call.md.
	roleClient  role = 3
	roleService role = 4
)

func (r role) String() string {
	switch r {
	case roleSender:
		return "sender"
	case roleReceiver:
		return "receiver"
	case roleClient:
		return "client"
	case roleService:
		return "service"
	}
	return fmt.Sprintf("peer of role %d", uint32(r))
}

func (r role) other() role {
	if r >= roleClient {
		return roleClient + roleService - r
	}
	return roleSender + roleReceiver - r
}

// packet is 80 bytes of fields, and what follows them. Fields that a kind does not use are 0. In HELLO capacity and bytesMax are what the side takes, tail
// the features that it offers, floor those that it requires.
type packet struct {
	kind, wireVersion uint32
	layoutSignature   uint64
	role              role
	holds             uint32
	capacity          uint64
	bytesMax          uint64
	generation        uint64
	head, tail        uint64
	floor             uint64
	seq               uint32
	// What follows the 80 bytes: the entries of HELLO, the text of REFUSED.
	behind string
}

func newPacket(kind uint32) packet {
	return packet{kind: kind, wireVersion: lane.WireVersion, layoutSignature: lane.LayoutSignature}
}

func lanePacket(kind uint32, capacity, bytesMax uint64, tail, head lane.Position) packet {
	p := newPacket(kind)
	p.capacity, p.bytesMax, p.tail, p.head = capacity, bytesMax, tail.Pack(), head.Pack()
	return p
}

func (p *packet) encode() []byte {
	le := binary.LittleEndian
	b := make([]byte, packetBytes)
	le.PutUint32(b[0:], p.kind)
	le.PutUint32(b[4:], p.wireVersion)
	le.PutUint64(b[8:], p.layoutSignature)
	le.PutUint32(b[16:], uint32(p.role))
	le.PutUint32(b[20:], p.holds)
	for i, word := range []uint64{p.capacity, p.bytesMax, p.generation, p.head, p.tail, p.floor} {
		le.PutUint64(b[24+8*i:], word)
	}
	le.PutUint32(b[72:], p.seq)
	b = append(b, p.behind...)
	return b[:min(len(b), packetBytesMax)]
}

func decodePacket(b []byte) (p packet, ok bool) {
	if len(b) < packetBytes {
		return p, false
	}
	le := binary.LittleEndian
	p.kind, p.wireVersion, p.layoutSignature = le.Uint32(b[0:]), le.Uint32(b[4:]), le.Uint64(b[8:])
	p.role, p.holds = role(le.Uint32(b[16:])), le.Uint32(b[20:])
	for i, word := range []*uint64{&p.capacity, &p.bytesMax, &p.generation, &p.head, &p.tail, &p.floor} {
		*word = le.Uint64(b[24+8*i:])
	}
	p.seq, p.behind = le.Uint32(b[72:]), string(b[packetBytes:])
	return p, true
}

// shake is a connection during the hand-shake.
type shake struct {
	ctx      context.Context
	socket   *polled
	peer     Peer
	settings settings
}

// newShake begins with a peer that this side wants to deal with. Nothing of the peer's is read before its user is known. It takes the
// descriptor, also when it fails.
func newShake(ctx context.Context, fd int, settings settings) (*shake, error) {
	peer, err := peerOf(fd)
	if err != nil {
		hangUp(fd, nobody)
		return nil, fail.System("asking who the peer is", err)
	}
	if why := userProblem(peer.UID, settings.uids); why != "" {
		defer hangUp(fd, peer.UID)
		return nil, refuseAt(fd, why)
	}
	socket, err := newPolled(fd, "pelton socket")
	if err != nil {
		return nil, err
	}
	// An error: of an older kernel, where descriptors were permitted all the time.
	_ = permitDescriptors(fd, true)
	return &shake{ctx, socket, peer, settings}, nil
}

// userProblem is why this side does not deal with a peer of that user; "" if it does.
func userProblem(uid int, allowed []int) string {
	if why := unmapped(uid); why != "" {
		return "the peer is " + why
	}
	if !isUser(uid, allowed) {
		return fmt.Sprintf("the peer is uid %d, this side takes uid %d and %v: allow the other's uid in the options of both sides",
			uid, os.Geteuid(), allowed)
	}
	return closer.blocked(uid)
}

func (s *shake) isOwnUser() bool { return s.peer.UID == os.Geteuid() }

// close hangs up, of a hand-shake that came to nothing.
func (s *shake) close() { s.socket.hangUp(s.peer.UID) }

// refuse says why not; the peer's next read finds it, even after this side has closed.
func (s *shake) refuse(format string, args ...any) error {
	return refuseAt(s.socket.fd, fmt.Sprintf(format, args...))
}

func refuseAt(socket int, why string) error {
	sayAt(socket, why)
	return fail.New(fail.ErrRefused, "refused: %s", why)
}

func sayAt(socket int, why string) {
	_ = trySend(socket, refusedPacket(why))
}

func refusedPacket(why string) []byte {
	p := newPacket(kindRefused)
	p.behind = why
	return p.encode()
}

// told tells the peer too why this side gives up.
func (s *shake) told(err error) error {
	switch {
	case isOutOfDescriptors(err):
		sayAt(s.socket.fd, shortageText())
	case err != nil:
		sayAt(s.socket.fd, err.Error())
	}
	return err
}

// refusal is what a packet says, if it says why not.
func refusal(b []byte) error {
	p, ok := decodePacket(b)
	if !ok || p.kind != kindRefused {
		return nil
	}
	return fail.New(fail.ErrRefused, "refused: %s", forPeople(p.behind))
}

func errHungUp() error {
	return fail.New(fail.ErrHungUp, "the peer hung up during the handshake: see what it says")
}

func (s *shake) send(p packet, fds ...int) error {
	err := trySend(s.socket.fd, p.encode(), fds...)
	switch {
	case errors.Is(err, unix.EPIPE), errors.Is(err, unix.ECONNRESET):
		// It may have refused before this side had said anything.
		b := make([]byte, packetBytesMax)
		if n, fds, _, err := tryReceive(s.socket.fd, b); err == nil {
			closer.descriptors(s.peer.UID, fds)
			if refused := refusal(b[:n]); refused != nil {
				return refused
			}
		}
		return errHungUp()
	case errors.Is(err, unix.EAGAIN):
		return fail.New(fail.ErrTimedOut, "timed out while greeting a peer that does not read")
	}
	return s.told(fail.System("greeting the peer", err))
}

// receive waits for the next packet, which must be of that kind, with so many descriptors.
func (s *shake) receive(kind uint32, count int) (packet, []int, error) {
	b := make([]byte, packetBytesMax)
	var n int
	var fds []int
	var isCut bool
	var failed error
	err := s.socket.until(s.ctx, func() bool {
		n, fds, isCut, failed = tryReceive(s.socket.fd, b)
		return !errors.Is(failed, unix.EAGAIN)
	})
	if err != nil {
		return packet{}, nil, err
	}
	if failed != nil {
		return packet{}, nil, fail.System("hearing from the peer", failed)
	}
	p, err := s.judge(b[:n], kind, count, len(fds), isCut)
	if err != nil {
		closer.descriptors(s.peer.UID, fds)
		return packet{}, nil, err
	}
	return p, fds, nil
}

// judge is what must hold of a packet by itself.
func (s *shake) judge(b []byte, kind uint32, wanted, found int, isCut bool) (packet, error) {
	if len(b) == 0 {
		return packet{}, errHungUp()
	}
	p, ok := decodePacket(b)
	if !ok {
		return p, s.refuse("a packet of %d bytes came, wanted at least %d", len(b), packetBytes)
	}
	if refused := refusal(b); refused != nil {
		return p, refused
	}
	if p.wireVersion != lane.WireVersion || p.layoutSignature != lane.LayoutSignature {
		return p, s.refuse("one side speaks wire version %d with layout %#x, the other, "+versionText+", %d with %#x: use the later version of pelton on both sides",
			p.wireVersion, p.layoutSignature, lane.WireVersion, uint64(lane.LayoutSignature))
	}
	if p.kind != kind {
		return p, s.refuse("packet of kind %d came, wanted %d", p.kind, kind)
	}
	if isCut && found < wanted {
		return p, s.told(fail.System("taking the peer's descriptors: raise this process's RLIMIT_NOFILE", unix.EMFILE))
	}
	if found != wanted {
		return p, s.refuse("%d descriptors came with packet %d, wanted %d", found, kind, wanted)
	}
	return p, nil
}

// ready ends the hand-shake. The last to say so decides: a survivor, lest a lane get two successors; else the listener.
func (s *shake) ready(last bool) error {
	if last {
		if _, _, err := s.receive(kindReady, 0); err != nil {
			return err
		}
	}
	if err := s.send(newPacket(kindReady)); err != nil || last {
		return err
	}
	_, _, err := s.receive(kindReady, 0)
	return err
}

// openControl takes a descriptor of the parts, and keeps none: nobody asks for that of the peer's page again.
func (s *shake) openControl(p *parts, fd int, what string, magic uint64) (*segment, error) {
	page, err := openSegment(fd, what, controlSeals, lane.SegmentBytes, false)
	if err != nil {
		return nil, s.told(err)
	}
	p.segments = append(p.segments, page)
	p.claim(fd)
	page.forgetDescriptor()
	if err := lane.CheckPreamble(page.bytes, magic); err != nil {
		return nil, s.refuse("the %s segment: %v", what, err)
	}
	return page, nil
}

// openData takes a descriptor of the parts. It checks the figures before it uses them for anything.
func (s *shake) openData(p *parts, fd int, from packet, writable bool) (*segment, error) {
	if !lane.CapacityIsValid(from.capacity) {
		return nil, s.refuse("the lane has a capacity of %d bytes, which cannot be", from.capacity)
	}
	if from.bytesMax > lane.MessageBytesLimit(from.capacity) {
		return nil, s.refuse("the lane has a message limit of %d bytes, more than its capacity of %d allows", from.bytesMax, from.capacity)
	}
	data, err := openSegment(fd, "data", sizeSeals, from.capacity, writable)
	if err != nil {
		return nil, s.told(err)
	}
	p.segments = append(p.segments, data)
	p.claim(fd)
	return data, nil
}

func (s *shake) openProducer(p *parts, fd int, from packet) (*segment, error) {
	page, err := s.openControl(p, fd, "producer", lane.MagicProducer)
	if err != nil {
		return nil, err
	}
	if capacity, bytesMax, cursors := lane.ProducerFigures(page.bytes); capacity != from.capacity || bytesMax != from.bytesMax || cursors != 1 {
		return nil, s.refuse("the producer's page says capacity %d, limit %d, %d cursors; its packet %d, %d, wanted 1",
			capacity, bytesMax, cursors, from.capacity, from.bytesMax)
	}
	return page, nil
}

// parts collects what a hand-shake makes and takes, so that all of it is given back unless it succeeds.
type parts struct {
	segments []*segment
	fds      []int
	// Those that the peer sent, and its user.
	received []int
	peer     int
	ofBudget part
	// What the peer, another user, is given to ring.
	given []socketDoorbell
}

func (p *parts) segment(s *segment, err error) (*segment, error) {
	if err == nil {
		p.segments = append(p.segments, s)
	}
	return s, err
}

// owns takes descriptors; each that is handed on is claimed before.
func (p *parts) owns(fds []int) { p.fds = append(p.fds, fds...) }

// takes takes what a peer sent.
func (p *parts) takes(fds []int, from Peer) {
	p.received, p.peer = append(p.received, fds...), from.UID
}

func (p *parts) claim(fd int) int {
	isIt := func(other int) bool { return other == fd }
	p.fds, p.received = slices.DeleteFunc(p.fds, isIt), slices.DeleteFunc(p.received, isIt)
	return fd
}

func (p *parts) giveBack() {
	for _, segment := range p.segments {
		segment.close()
	}
	closeAll(p.fds)
	closer.descriptors(p.peer, p.received)
	p.ofBudget.shrinkTo(0)
	for _, given := range p.given {
		unix.Close(given.peers)
		given.close()
	}
}

// keep has nothing given back: the hand-shake has succeeded. The doorbells that the peer was given are the link's from now on.
func (p *parts) keep() []socketDoorbell {
	given := p.given
	for _, doorbell := range given {
		unix.Close(doorbell.peers)
	}
	*p = parts{}
	return given
}

// giveDoorbell is what the peer is given to ring a bell of this side's. Another user has one of its own: whoever has an eventfd can have its ring block,
// and whoever shares a socket can take the rings of others.
func (s *shake) giveDoorbell(p *parts, b *bell) (int, error) {
	if s.isOwnUser() {
		return b.eventfd, nil
	}
	for _, given := range p.given {
		if given.bell == b {
			return given.peers, nil
		}
	}
	given, err := b.newSocketDoorbell(s.peer.UID)
	if err != nil {
		return -1, s.told(err)
	}
	p.given = append(p.given, given)
	return given.peers, nil
}

// consumerSide is what a sender has of its peer after the middle of the hand-shake.
type consumerSide struct {
	consumer, receiver *segment
	doorbell           doorbell
}

func (s *shake) openConsumerSide(p *parts, fds []int) (side consumerSide, err error) {
	if side.consumer, err = s.openControl(p, fds[0], "consumer", lane.MagicConsumer); err != nil {
		return side, err
	}
	if side.receiver, err = s.openControl(p, fds[1], "receiver", lane.MagicReceiver); err != nil {
		return side, err
	}
	side.doorbell, err = checkDoorbell(fds[2], s.isOwnUser())
	return side, s.told(err)
}

// newSender is the hand-shake of a new sender: with a fresh lane, or with the lane of a receiver that survived its sender.
func (s *shake) newSender(listens bool) (*outgoing, error) {
	var p parts
	defer p.giveBack()
	canBarrier := membarrier()
	own, err := newBell()
	if err != nil {
		return nil, s.told(err)
	}
	defer func() {
		if own != nil {
			own.close()
		}
	}()
	peer, err := s.greet(roleSender, false, listens, noLane)
	if err != nil {
		return nil, err
	}
	takesOver := peer.holds != 0
	capacity := s.settings.makes.laneBytes
	tail, head, floor := lane.Start, lane.Start, uint64(0)
	var page, data *segment
	var side consumerSide
	if takesOver {
		offer, fds, err := s.receive(kindConsumer, 4)
		if err != nil {
			return nil, err
		}
		p.takes(fds, s.peer)
		if data, err = s.openData(&p, fds[3], offer, true); err != nil {
			return nil, err
		}
		if offer.capacity > capacity {
			return nil, s.refuse("the lane to take over has %d bytes, this sender's capacity is %d: raise it to at least as much", offer.capacity, capacity)
		}
		if side, err = s.openConsumerSide(&p, fds); err != nil {
			return nil, err
		}
		// Above 1: this is not the lane's first producer, and marks its first message so.
		generation := max(offer.generation+1, 2)
		if page, err = p.segment(makeProducerPage(offer.capacity, offer.bytesMax, generation)); err != nil {
			return nil, s.told(err)
		}
		answer := offer
		answer.kind, answer.generation = kindProducer, generation
		doorbell, err := s.giveDoorbell(&p, own)
		if err != nil {
			return nil, err
		}
		if err := s.send(answer, page.fd, doorbell); err != nil {
			return nil, err
		}
		tail, head, floor = lane.Unpack(offer.tail), lane.Unpack(offer.head), offer.floor
	} else {
		// A link cuts what is larger into pieces; here the caller has asked for messages that cannot be sent.
		takes := peer.takes()
		most := min(lane.MessageBytesLimit(min(capacity, laneWithin(takes.laneBytes))), takes.messageBytes)
		if found := s.settings.messageBytes; found > most {
			return nil, s.told(fail.New(fail.ErrOption,
				"MessageBytesMax is %d, wanted at most %d: the receiver takes lanes of %d bytes and messages of %d. Lower it, or raise the receiver's Capacity, MessageBytesMax or Memory",
				found, most, takes.laneBytes, takes.messageBytes))
		}
		if page, data, side, err = s.giveLane(&p, own, takes); err != nil {
			return nil, err
		}
	}
	m := &memory{producer: page, consumer: side.consumer, receiver: side.receiver, data: data}
	producer, err := lane.NewProducer(m.lane(), tail, head, floor, canBarrier)
	if err != nil {
		return nil, s.told(fail.Lane(err))
	}
	process, err := s.watchPeer(&p)
	if err != nil {
		return nil, err
	}
	if err := s.ready(listens && !takesOver); err != nil {
		return nil, err
	}
	given := p.keep()
	out := &outgoing{producer, m, own, newLink(s.socket, process, side.doorbell, given, s.peer, own.kick)}
	own = nil
	return out, nil
}

// giveLane is the middle of a hand-shake at the side that makes a fresh lane to send by, no larger than the peer takes.
func (s *shake) giveLane(p *parts, bell *bell, within limits) (page, data *segment, side consumerSide, err error) {
	makes := s.settings.within(within)
	capacity, limit := makes.laneBytes, makes.messageBytes
	if page, err = p.segment(makeProducerPage(capacity, limit, 1)); err != nil {
		return nil, nil, side, s.told(err)
	}
	if data, err = p.segment(makeData(capacity)); err != nil {
		return nil, nil, side, s.told(err)
	}
	offer := lanePacket(kindProducer, capacity, limit, lane.Start, lane.Start)
	offer.generation = 1
	doorbell, err := s.giveDoorbell(p, bell)
	if err != nil {
		return nil, nil, side, err
	}
	if err := s.send(offer, page.fd, doorbell, data.fd); err != nil {
		return nil, nil, side, err
	}
	_, fds, err := s.receive(kindConsumer, 3)
	if err != nil {
		return nil, nil, side, err
	}
	p.takes(fds, s.peer)
	side, err = s.openConsumerSide(p, fds)
	return page, data, side, err
}

// survivingSender is the hand-shake of a sender whose receiver died: it offers its lane.
func (s *shake) survivingSender(out *outgoing, listens bool) error {
	var p parts
	defer p.giveBack()
	if _, err := s.greet(roleSender, true, listens, noLane); err != nil {
		return err
	}
	producer, m := out.lane, out.memory
	if _, err := producer.PollHead(); err != nil {
		return s.told(fail.Lane(err))
	}
	offer := lanePacket(kindProducer, producer.Capacity(), producer.BytesMax(), producer.Tail(), producer.Head())
	offer.generation = producer.Generation()
	doorbell, err := s.giveDoorbell(&p, out.bell)
	if err != nil {
		return err
	}
	if err := s.send(offer, m.producer.fd, doorbell, m.data.fd); err != nil {
		return err
	}
	_, fds, err := s.receive(kindConsumer, 3)
	if err != nil {
		return err
	}
	p.takes(fds, s.peer)
	side, err := s.openConsumerSide(&p, fds)
	if err != nil {
		return err
	}
	if err := producer.CheckSuccessor(side.consumer.bytes); err != nil {
		return s.told(fail.Lane(err))
	}
	process, err := s.watchPeer(&p)
	if err != nil {
		return err
	}
	// Nothing of this side's has changed before the last READY: a successor that goes is as if it had never been.
	if err := s.ready(true); err != nil {
		return err
	}
	given := p.keep()
	m.consumer.close()
	m.receiver.close()
	m.consumer, m.receiver = side.consumer, side.receiver
	producer.AttachConsumer(side.consumer.bytes, side.receiver.bytes)
	out.link.close()
	out.link = newLink(s.socket, process, side.doorbell, given, s.peer, out.bell.kick)
	return nil
}

// reception is what a lane is given of its receiver's.
type reception struct {
	page     *segment
	bell     *bell
	isShared bool
	// Of all lanes together; nil: no limit.
	budget *budget
}

// share is what one peer more is told that this side takes, of which one lane or two lie in this side's memory. The part of the budget for these is
// among the parts of the hand-shake.
func (s *shake) share(p *parts, to *reception, lanes uint64) (limits, error) {
	takes := s.settings.takes(s.isOwnUser())
	if to.budget == nil {
		return takes, nil
	}
	bytes, part := to.budget.share(lanes, takes.laneBytes)
	if bytes == 0 {
		return takes, s.refuse("%d of the %d bytes of memory that this side has for its peers are left, of which a %dth is less than %d: raise Memory there, or connect again later",
			to.budget.left(), to.budget.most, sharesOfMemory*lanes, laneGranule)
	}
	p.ofBudget, takes.laneBytes = part, bytes
	return takes, nil
}

// newReceiver is the hand-shake of a new receiver's lane: a fresh one, or that of a sender that survived its receiver.
func (s *shake) newReceiver(to *reception, listens bool) (*incoming, error) {
	var p parts
	defer p.giveBack()
	var takes limits
	peer, err := s.greet(roleReceiver, false, listens, func() (_ limits, err error) {
		takes, err = s.share(&p, to, 1)
		return takes, err
	})
	if err != nil {
		return nil, err
	}
	takesOver := peer.holds != 0
	in, peerBell, err := s.takeLane(&p, to, takes, 0)
	if err != nil {
		return nil, err
	}
	p.ofBudget.shrinkTo(in.consumer.Capacity())
	in.ofBudget = p.ofBudget
	process, err := s.watchPeer(&p)
	if err != nil {
		return nil, err
	}
	if err := s.ready(listens && !takesOver); err != nil {
		return nil, err
	}
	given := p.keep()
	in.memory.use()
	in.link = newLink(s.socket, process, peerBell, given, s.peer, to.bell.kick)
	return in, nil
}

// takeLane is the middle of a hand-shake at the side that receives by the other's lane, which is within what this side takes. Of a lane of a link least is
// the smallest largest message, and no message waits in it; of others it is 0.
func (s *shake) takeLane(p *parts, to *reception, within limits, least uint64) (in *incoming, peerBell doorbell, err error) {
	offer, fds, err := s.receive(kindProducer, 3)
	if err != nil {
		return nil, peerBell, err
	}
	p.takes(fds, s.peer)
	if offer.capacity > within.laneBytes {
		return nil, peerBell, s.refuse("the lane has %d bytes, this side takes %d: raise its Capacity or Memory, or lower the sender's Capacity",
			offer.capacity, within.laneBytes)
	}
	if offer.bytesMax > within.messageBytes {
		return nil, peerBell, s.refuse("the lane has messages of up to %d bytes, this side takes %d: raise its MessageBytesMax, or lower the sender's",
			offer.bytesMax, within.messageBytes)
	}
	data, err := s.openData(p, fds[2], offer, false)
	if err != nil {
		return nil, peerBell, err
	}
	page, err := s.openProducer(p, fds[0], offer)
	if err != nil {
		return nil, peerBell, err
	}
	if offer.bytesMax < least {
		return nil, peerBell, s.refuse("a lane has a largest message of %d bytes, wanted at least %d", offer.bytesMax, least)
	}
	if peerBell, err = checkDoorbell(fds[1], s.isOwnUser()); err != nil {
		return nil, peerBell, s.told(err)
	}
	head := lane.Unpack(offer.head)
	redelivered := lane.Unpack(offer.tail).Since(head)
	if redelivered > offer.capacity/8 {
		return nil, peerBell, s.refuse("%d messages are said to wait in a lane of %d bytes, wanted at most %d", redelivered, offer.capacity, offer.capacity/8)
	}
	if least > 0 && redelivered > 0 {
		return nil, peerBell, s.refuse("%d messages are said to wait in a lane of a new link, wanted none", redelivered)
	}
	consumerPage, err := p.segment(makeConsumerPage(head))
	if err != nil {
		return nil, peerBell, s.told(err)
	}
	m := &memory{producer: page, consumer: consumerPage, receiver: to.page, data: data, keepsReceiver: to.isShared}
	consumer, err := lane.NewConsumer(m.lane(), offer.bytesMax)
	if err != nil {
		return nil, peerBell, s.told(fail.Lane(err))
	}
	own, err := s.giveDoorbell(p, to.bell)
	if err != nil {
		return nil, peerBell, err
	}
	if err := s.send(newPacket(kindConsumer), consumerPage.fd, to.page.fd, own); err != nil {
		return nil, peerBell, err
	}
	return &incoming{consumer: consumer, memory: m, again: redelivered}, peerBell, nil
}

// watchPeer is what tells the end of the peer's process; -1: the socket's hang-up alone does.
func (s *shake) watchPeer(p *parts) (int, error) {
	process, err := processOf(s.socket.fd, s.peer)
	if err != nil {
		return -1, s.told(fail.System("watching the peer", err))
	}
	if process >= 0 {
		p.owns([]int{process})
	}
	return process, nil
}

// survivingReceiver is the hand-shake of a receiver whose sender died: it offers the lane, and says where that one's records end.
func (s *shake) survivingReceiver(in *incoming, bell *bell, listens bool) error {
	var p parts
	defer p.giveBack()
	if _, err := s.greet(roleReceiver, true, listens, func() (limits, error) { return s.settings.takes(s.isOwnUser()), nil }); err != nil {
		return err
	}
	consumer, m := in.consumer, in.memory
	tail, _, err := consumer.EndOfCommitted()
	if err != nil {
		return s.told(fail.Lane(err))
	}
	offer := lanePacket(kindConsumer, consumer.Capacity(), consumer.BytesMax(), tail, consumer.Head())
	offer.floor, offer.generation = consumer.DeadProducer()
	doorbell, err := s.giveDoorbell(&p, bell)
	if err != nil {
		return err
	}
	if err := s.send(offer, m.consumer.fd, m.receiver.fd, doorbell, m.data.fd); err != nil {
		return err
	}
	answer, fds, err := s.receive(kindProducer, 2)
	if err != nil {
		return err
	}
	p.takes(fds, s.peer)
	if answer.capacity != offer.capacity || answer.bytesMax != offer.bytesMax {
		return s.refuse("the successor speaks of %d bytes, the lane has %d", answer.capacity, offer.capacity)
	}
	page, err := s.openProducer(&p, fds[0], answer)
	if err != nil {
		return err
	}
	peerBell, err := checkDoorbell(fds[1], s.isOwnUser())
	if err != nil {
		return s.told(err)
	}
	process, err := s.watchPeer(&p)
	if err != nil {
		return err
	}
	// Only then is the successor's page complete: had it died before, the dead one's would still be needed.
	if err := s.ready(true); err != nil {
		return err
	}
	given := p.keep()
	m.producer.close()
	m.producer = page
	consumer.AttachProducer(page.bytes)
	next := newLink(s.socket, process, peerBell, given, s.peer, bell.kick)
	in.link.handOver(next, tail.Seq)
	in.link = next
	return nil
}

// linkLanes is what a hand-shake makes of a link: the lane to send by and the one to receive by.
type linkLanes struct {
	producer *lane.Producer
	memory   *memory
	// The other side's doorbell for room in this side's lane, and whether it is the link's, which closes it.
	doorbell   doorbell
	sharesBell bool
	in         *incoming
	// The largest message that the other side takes.
	bytesMax uint64
}

// newLinkLanes is the hand-shake of a link. The bell is rung for room in this side's lane, and besides to.bell is for messages.
func (s *shake) newLinkLanes(to *reception, bell *bell, own role, listens bool, kick func()) (*linkLanes, error) {
	var p parts
	defer p.giveBack()
	var takes limits
	peer, err := s.greet(own, false, listens, func() (_ limits, err error) {
		takes, err = s.share(&p, to, 2)
		// Of a whole request or reply, which is cut into pieces where a lane's messages are smaller.
		return limits{takes.laneBytes, s.settings.callBytes}, err
	})
	if err != nil {
		return nil, err
	}
	takes.messageBytes = limitsOfTheFormat.messageBytes
	gives := limits{peer.capacity, limitsOfTheFormat.messageBytes}
	if to.budget != nil {
		gives.laneBytes = min(gives.laneBytes, takes.laneBytes)
	}
	canBarrier := membarrier()
	var page, data *segment
	var side consumerSide
	var in *incoming
	var peerBell doorbell
	give := func() (err error) { page, data, side, err = s.giveLane(&p, bell, gives); return err }
	take := func() (err error) { in, peerBell, err = s.takeLane(&p, to, takes, linkBytesMin); return err }
	steps := []func() error{give, take}
	if own == roleService {
		steps = []func() error{take, give}
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return nil, err
		}
	}
	m := &memory{producer: page, consumer: side.consumer, receiver: side.receiver, data: data}
	producer, err := lane.NewProducer(m.lane(), lane.Start, lane.Start, 0, canBarrier)
	if err != nil {
		return nil, s.told(fail.Lane(err))
	}
	process, err := s.watchPeer(&p)
	if err != nil {
		return nil, err
	}
	if err := s.ready(listens); err != nil {
		return nil, err
	}
	p.ofBudget.shrinkTo(in.consumer.Capacity() + producer.Capacity())
	in.ofBudget = p.ofBudget
	given := p.keep()
	m.use()
	in.memory.use()
	// No successor will ask for them, and a thousand lanes are many descriptors.
	for _, segment := range []*segment{page, data, side.consumer, side.receiver, in.memory.producer, in.memory.consumer, in.memory.data} {
		segment.forgetDescriptor()
	}
	// Many peers have one bell for both lanes. The link, which ends after the outbox's last ring, keeps it.
	sharesBell := isSameFile(peerBell.fd, side.doorbell.fd)
	if sharesBell {
		side.doorbell.close(s.peer.UID)
		side.doorbell = peerBell
	}
	in.link = newLink(s.socket, process, peerBell, given, s.peer, kick)
	return &linkLanes{producer: producer, memory: m, doorbell: side.doorbell, sharesBell: sharesBell, in: in, bytesMax: peer.bytesMax}, nil
}
