package pelton

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"pelton/internal/fail"
	"pelton/internal/lane"
)

// What is in the records of a link of calls: the header before each request and answer, every check of a peer's, messages that are cut into
// pieces, and the way into a lane. spec/call.md.

const (
	headerSize = 24
	// Calls that a client may have in flight.
	callsMax = 1024
	// What a large message is cut into: so many bytes are written while the other side still reads the ones before.
	pieceBytes = 64 << 10
	// Records that are taken in one look: who floods the lane is not to keep this side's loop. The next look goes on.
	looksMost = 1024
)

type kind uint8

const (
	kindRequest   kind = 1
	kindNotify    kind = 2
	kindCancel    kind = 3
	kindReply     kind = 16
	kindPart      kind = 17
	kindEnd       kind = 18
	kindFailed    kind = 19
	kindAbandoned kind = 20
	kindDraining  kind = 21
	kindReturned  kind = 22
	kindDrained   kind = 23
)

const (
	flagMore      = 1 << 8
	flagContinued = 1 << 9
)

// isFinal says whether nothing of its call comes after it.
func (k kind) isFinal() bool {
	return k == kindReply || k == kindEnd || k == kindFailed || k == kindAbandoned || k == kindReturned
}

func (k kind) isClients() bool { return k >= kindRequest && k <= kindCancel }

func (k kind) isServices() bool { return k >= kindReply && k <= kindDrained }

func (k kind) hasPayload() bool {
	return k == kindRequest || k == kindNotify || k == kindReply || k == kindPart || k == kindFailed
}

// hasID says whether it is of a call, and not of the link.
func (k kind) hasID() bool { return k != kindNotify && k != kindDraining && k != kindDrained }

type header struct {
	id              uint64
	kind            kind
	more, continued bool
	// The service's own, of a failure.
	code uint32
	// Nanoseconds of CLOCK_MONOTONIC, of a request; 0: none.
	deadline uint64
}

func slotOf(id uint64) uint32 { return uint32(id) }

func generationOf(id uint64) uint32 { return uint32(id >> 32) }

func (h *header) word() uint64 {
	word := uint64(h.kind) | uint64(h.code)<<32
	if h.more {
		word |= flagMore
	}
	if h.continued {
		word |= flagContinued
	}
	return word
}

// write is behind a check that the room is larger.
func (h *header) write(room []byte) {
	binary.LittleEndian.PutUint64(room, h.id)
	binary.LittleEndian.PutUint64(room[8:], h.word())
	binary.LittleEndian.PutUint64(room[16:], h.deadline)
}

// readHeader is a header of the peer's, before a payload of so many bytes; or which rule it breaks, else "".
func readHeader(id, word, deadline, payload uint64, byClient bool) (h header, rule string) {
	h = header{
		id: id, kind: kind(word), more: word&flagMore != 0, continued: word&flagContinued != 0, code: uint32(word >> 32), deadline: deadline,
	}
	if byClient && !h.kind.isClients() || !byClient && !h.kind.isServices() {
		return h, "kind"
	}
	if word&0xffff_ff00&^(flagMore|flagContinued) != 0 {
		return h, "flags"
	}
	if h.kind.hasID() && (slotOf(id) >= callsMax || generationOf(id) == 0) || !h.kind.hasID() && id != 0 {
		return h, "id"
	}
	if h.code != 0 && (h.kind != kindFailed || h.continued) {
		return h, "code"
	}
	if deadline != 0 && (h.kind != kindRequest || h.continued) {
		return h, "deadline"
	}
	// What goes on has something to go on with, and so ends.
	isPiece := h.more || h.continued
	if h.kind.hasPayload() && payload == 0 && isPiece || !h.kind.hasPayload() && (payload != 0 || isPiece) {
		return h, "length"
	}
	return h, ""
}

// readRecord reads the header of a record; payload is what follows it, in place.
func readRecord(of *lane.Consumer, record lane.Record, byClient bool) (h header, payload []byte, rule string) {
	if record.Bytes < headerSize {
		return h, nil, "length"
	}
	h, rule = readHeader(of.Word(record, 0), of.Word(record, 1), of.Word(record, 2), record.Bytes-headerSize, byClient)
	return h, of.Payload(record)[headerSize:], rule
}

// assembly is a message of which some has come. It has begun if it has a kind.
type assembly struct {
	header header
	bytes  []byte
	// How many have come, also of what is not kept.
	count int
	// What its bytes take of the memory that a service has for its clients; and that there was not enough, so that they are not kept.
	kept      part
	isDropped bool
}

// hasMemory takes the memory for a piece, of which the client's share may have too little: then nothing of the message is kept any more.
func (a *assembly) hasMemory(of *clientShare, bytes int) bool {
	if !a.isDropped && !of.grow(&a.kept, uint64(bytes)) {
		a.isDropped, a.bytes = true, nil
		a.kept.shrinkTo(0)
	}
	return !a.isDropped
}

// add takes a piece in; a rule that it breaks is named, else "".
func (a *assembly) add(h header, payload []byte, most int, isKept bool) string {
	hasBegun := a.header.kind != 0
	if h.continued && (!hasBegun || a.header.id != h.id || a.header.kind != h.kind) || !h.continued && hasBegun {
		return "piece"
	}
	if len(payload) > most-a.count {
		return "size"
	}
	a.count += len(payload)
	if !hasBegun {
		a.header = h
	}
	// What nobody waits for is not kept, but its end is to be known.
	if isKept {
		a.bytes = append(a.bytes, payload...)
	}
	return ""
}

// take is the message that has come, of which nothing is kept here.
func (a *assembly) take() (header, []byte) {
	whole := *a
	a.forget()
	return whole.header, whole.bytes
}

// forget forgets what has come.
func (a *assembly) forget() {
	a.kept.shrinkTo(0)
	*a = assembly{}
}

// queued is a message on its way into a lane.
type queued struct {
	header  header
	bytes   []byte
	written int
	// Who waits until it is written; nil: nobody, and the bytes are a copy.
	part *waitingPart
	// What a copy takes of the memory that a service has for its clients.
	kept part
}

// next is how many bytes of the payload go into the next record, in a lane whose largest message is so large.
func (o *queued) next(bytesMax uint64) int {
	left, most := len(o.bytes)-o.written, int(bytesMax)-headerSize
	if left <= most && o.written == 0 {
		return left
	}
	return min(left, most, pieceBytes)
}

// waitingPart is a part of a reply whose goroutine waits until it is written.
type waitingPart struct {
	done chan struct{}
	err  error
}

func (w *waitingPart) end(err error) {
	w.err = err
	close(w.done)
}

// outbox is the way into one lane: in order, and what there is no room for waits in memory.
type outbox struct {
	lane   *lane.Producer
	memory *memory
	// The other side's doorbell, its user, and whether it is the link's, which closes it.
	doorbell   doorbell
	uid        int
	sharesBell bool
	queue      []queued
	window     window
}

// isWhole says whether a message goes into the lane as one record.
func (o *outbox) isWhole(bytes int) bool { return uint64(bytes)+headerSize <= o.lane.BytesMax() }

// put writes one record, if there is room now.
func (o *outbox) put(h header, payload []byte) (bool, error) {
	o.window.follow(o.lane, o.memory, nil)
	room, ok, err := o.lane.TryReserve(uint64(headerSize+len(payload)), 0)
	if err != nil || !ok {
		return false, err
	}
	h.write(room)
	copy(room[headerSize:], payload)
	if o.lane.Commit(uint64(len(room))) == lane.Ring {
		o.doorbell.ring()
	}
	return true, nil
}

// write writes a message that goes into one record, if there is room now and nothing waits before it.
func (o *outbox) write(h header, payload []byte) (bool, error) {
	if len(o.queue) > 0 || !o.isWhole(len(payload)) {
		return false, nil
	}
	return o.put(h, payload)
}

// push puts a copy of a message behind those that wait; flush writes it.
func (o *outbox) push(h header, payload []byte, kept part) {
	o.queue = append(o.queue, queued{header: h, bytes: append([]byte(nil), payload...), kept: kept})
}

// flush writes as much as there is room for. True: nothing waits any more.
func (o *outbox) flush() (bool, error) {
	for done := 0; ; done++ {
		if done == len(o.queue) {
			o.queue = o.queue[:0]
			return true, nil
		}
		finished, err := o.writeOn(&o.queue[done])
		if !finished || err != nil {
			o.queue = slices.Delete(o.queue, 0, done)
			return false, err
		}
		if part := o.queue[done].part; part != nil {
			part.end(nil)
		}
		o.queue[done].kept.shrinkTo(0)
		o.queue[done] = queued{}
	}
}

func (o *outbox) writeOn(out *queued) (bool, error) {
	for {
		n := out.next(o.lane.BytesMax())
		h := out.header
		if h.continued = out.written > 0; h.continued {
			h.code, h.deadline = 0, 0
		}
		h.more = out.written+n < len(out.bytes)
		ok, err := o.put(h, out.bytes[out.written:out.written+n])
		if err != nil || !ok {
			return false, err
		}
		out.written += n
		if !h.more {
			return true, nil
		}
	}
}

// wanted is the bytes of the record that waits for room.
func (o *outbox) wanted() uint64 {
	if len(o.queue) == 0 {
		return 0
	}
	return uint64(headerSize + o.queue[0].next(o.lane.BytesMax()))
}

// clear forgets what waits: nobody is there to read it any more.
func (o *outbox) clear(why error) {
	for _, out := range o.queue {
		if out.part != nil {
			out.part.end(why)
		}
		out.kept.shrinkTo(0)
	}
	o.queue = nil
}

// close says that no more will come. The ring follows the word; the caller hangs up last.
func (o *outbox) close() {
	o.window.drop()
	o.lane.Close()
	o.doorbell.ring()
}

// takeDown is asked once nobody looks at the lane any more.
func (o *outbox) takeDown() {
	if !o.sharesBell {
		o.doorbell.close(o.uid)
	}
	o.memory.leave()
}

// linkError puts what a lane found into this package's words.
func linkError(err error) error {
	if errors.Is(err, lane.ErrConsumerClosed) {
		return &EndError{Err: ErrClosed}
	}
	return fail.Lane(err)
}

// checkSize checks a message against the most that its receiver takes.
func checkSize(bytes int, most uint64) error {
	if uint64(bytes) > most {
		return fail.New(fail.ErrTooLarge, "a message of %d bytes is larger than the %d that the other side takes: ask for less, or raise CallBytesMax there", bytes, most)
	}
	return nil
}

// Nanoseconds: 146 years, so that nothing that is added to it overflows.
const clockMost = 1 << 62

// A moment by both of its names: what deadlines say between processes, without asking the clock.
var (
	clockTime = time.Now()
	clockNS   = func() uint64 {
		var now unix.Timespec
		_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now)
		return uint64(now.Nano())
	}()
)

// nsOf is 0, which is no deadline, for one further away than a clock can say.
func nsOf(deadline time.Time) uint64 {
	left := int64(deadline.Sub(clockTime))
	if left > clockMost {
		return 0
	}
	return uint64(max(int64(clockNS)+left, 1))
}

// timeOf is false for none, and for one further away than a clock can say.
func timeOf(ns uint64) (time.Time, bool) {
	if ns == 0 || ns > clockMost {
		return time.Time{}, false
	}
	return clockTime.Add(time.Duration(ns) - time.Duration(clockNS)), true
}

const (
	// Codes of failures from here on are the library's.
	failedLibrary = 0xffff0000
	failedMemory  = 0xffff0001
)

// Failed is that the service failed a call, for a reason that its code and bytes say to those who know the service. errors.As finds it. Codes from 0xffff0000
// on are the library's, and their bytes a text: see [ErrServiceMemory].
type CallError struct {
	Code  uint32
	Bytes []byte
}

func (f *CallError) Error() string {
	if f.Code >= failedLibrary {
		return "pelton: the call failed: " + strings.TrimPrefix(forPeople(string(f.Bytes)), "pelton: ")
	}
	return fmt.Sprintf("pelton: the service failed the call with code %d: %.200q", f.Code, f.Bytes)
}

// Is says whether target is what the library's code stands for.
func (f *CallError) Is(target error) bool {
	return f.Code == failedMemory && target == ErrServiceMemory
}

// newOutbox returns the way into the lane that this side of a call link sends by.
func newOutbox(l *linkLanes, residentMax int) outbox {
	return outbox{
		lane: l.producer, memory: l.memory, doorbell: l.doorbell, uid: l.in.link.peer.UID, sharesBell: l.sharesBell,
		window: newWindow(l.producer, residentMax),
	}
}
