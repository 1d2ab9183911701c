// Package lane is the algorithm of spec/layout.md and spec/protocol.md over memory that its user owns: a
// producer, a consumer, and the words by which they sleep and wake each other. It makes no system call and never
// waits.
//
// # Synchronisation
//
// Go's atomics are sequentially consistent. Of what the specification asks for, that gives:
//
//   - [publish], [release], [close], [fenced]: an atomic store and an atomic load, which are stronger than the
//     release and the acquire asked for.
//   - [sleep], at the waker: the atomic store of the header (or the head) and the atomic load of the sleep word that
//     follows it are never exchanged (x86-64: the store is an XCHG, which is a full fence; arm64: STLR and LDAR are
//     kept in order). So a lane's side in Go always fences, says so in the word fenced from attach on, and never
//     takes it back.
//   - [sleep], at the sleeper: the same, between the store of the sleep word and the load that follows. It calls
//     membarrier besides, unless the other side declares that it fences: see [Sleeper.Arm].
//
// What the specification calls plain is an ordinary store of one aligned word, if the other side loads it only after
// one of these edges or not at all while this side lives. Otherwise it is atomic.
//
// Words of the other side are loaded once, checked, and only the copy is used. All access to memory is by slices,
// which Go checks: what a check of the specification would miss is a panic, and never an access out of bounds.
package lane

import (
	"encoding/binary"
	"fmt"
	"sync/atomic"
	"unsafe"
)

const (
	// WireVersion counts the protocol; two sides refuse each other when it differs.
	WireVersion = 2
	// LayoutSignature is the hash of the layout's text in spec/layout.md.
	LayoutSignature = 0x3704e993d4074093
	// SegmentBytes is the size of a control segment.
	SegmentBytes = 65536

	// The limits of a lane's data, in bytes.
	CapacityMin = 4096
	CapacityMax = 1 << 34

	// Window is how far a lane whose receiver keeps up extends before it wraps, unless its owner sets another window.
	Window = 256 << 10
	// pollEvery is how many bytes a producer outside the window reserves without loading the head: its cache line is
	// the consumer's, and fetching that costs as much as a message.
	pollEvery = 16 << 10
	// fastPathBytesMax is how many bytes the fast path reserves within the window before it takes the slow path
	// again, where the owner of the producer measures the throughput.
	fastPathBytesMax = Window

	// DescriptorsMax is the number of descriptors that can travel with one message.
	DescriptorsMax = 64
)

// The first words of the control segments: "pelton-P" and so on in memory order.
const (
	MagicProducer = 0x502d6e6f746c6570
	MagicConsumer = 0x432d6e6f746c6570
	MagicReceiver = 0x522d6e6f746c6570
	MagicChannel  = 0x442d6e6f746c6570
)

// Offsets in the pages, as spec/layout.md has them.
// Counters are the statistics of one side of a lane.
type Counters struct {
	// Messages and Bytes were sent, or released; Bytes are those of the payloads.
	Messages, Bytes uint64
	// Waits found no space, or no message; in Sleeps of them the side slept.
	Waits, Sleeps uint64
	// WakesSent are the times that it woke the other side.
	WakesSent uint64
}

// Add adds those of another lane.
func (c *Counters) Add(other Counters) {
	c.Messages += other.Messages
	c.Bytes += other.Bytes
	c.Waits += other.Waits
	c.Sleeps += other.Sleeps
	c.WakesSent += other.WakesSent
}

const (
	producerCapacity   = 64
	producerBytesMax   = 72
	producerCursors    = 80
	producerBootID     = 96
	producerTail       = 128
	producerFloor      = 136
	producerGeneration = 144
	producerMessages   = 152
	producerBytes      = 160
	producerWaits      = 168
	producerSleeps     = 176
	producerWakesSent  = 184
	producerDepthMax   = 192
	producerSynced     = 200
	producerSleep      = 256
	producerRoomSeq    = 264
	producerState      = 384
	producerPid        = 388
	producerFenced     = 392
	producerLastRing   = 400

	consumerHead       = 128
	consumerMessages   = 136
	consumerBytes      = 144
	consumerWaits      = 152
	consumerSleeps     = 160
	consumerWakesSent  = 168
	consumerGeneration = 176
	consumerState      = 256
	consumerPid        = 260
	consumerFenced     = 264
	consumerLastRing   = 272

	receiverSleep = 128
)

const (
	stateOpen   = 1
	stateClosed = 2
)

// Kinds of marks. This version skips kinds above markTrace, which carry information for later versions.
const (
	markBit         = 1 << 31
	markJump        = 0
	markDescriptors = 1
	markGeneration  = 2
	markTrace       = 3
	valueMask       = 0x0fffffff
)

// markRank is the order of marks before one message, by their kind.
var markRank = [8]uint32{markJump: 0, markGeneration: 1, markDescriptors: 2, markTrace: 3, 4: 4, 5: 5, 6: 6, 7: 7}

// TraceBytes is the size of a position in a distributed trace, which is behind a mark. This package does not interpret
// it.
const TraceBytes = 32

// traceMarkBytes is what a mark with such a position takes.
const traceMarkBytes = 8 + TraceBytes

// CapacityIsValid reports whether a lane can have this number of bytes.
func CapacityIsValid(capacity uint64) bool {
	return capacity%64 == 0 && capacity >= CapacityMin && capacity <= CapacityMax
}

// MessageBytesLimit returns the largest message that a lane of a valid capacity may permit.
func MessageBytesLimit(capacity uint64) uint64 {
	return min(capacity/2-32, 1<<31-16)
}

// TracedMessageBytesLimit is as [MessageBytesLimit], with space for a mark with a trace position before the message.
func TracedMessageBytesLimit(capacity uint64) uint64 {
	return min(capacity/2-32-traceMarkBytes, 1<<31-16)
}

// RecordBytes returns the bytes of a message with its header and padding.
func RecordBytes(bytes uint64) uint64 { return (bytes + 15) &^ 7 }

// SeqAfter returns the number after seq, which skips 0.
func SeqAfter(seq uint32) uint32 {
	if seq++; seq == 0 {
		return 1
	}
	return seq
}

// Position is a place in the data, and the number of the record there.
type Position struct {
	Offset uint64
	Seq    uint32
}

// Start is the position of a fresh lane's first record.
var Start = Position{Offset: 0, Seq: 1}

// Unpack returns the position in a word.
func Unpack(word uint64) Position {
	return Position{Offset: (word & 0xffffffff) * 8, Seq: uint32(word >> 32)}
}

// Pack returns the word of a position.
func (p Position) Pack() uint64 { return uint64(p.Seq)<<32 | p.Offset/8 }

// Since returns the number of records between an earlier position and this one.
func (p Position) Since(earlier Position) uint64 {
	steps := p.Seq - earlier.Seq
	if p.Seq < earlier.Seq {
		steps-- // the numbering skips 0
	}
	return uint64(steps)
}

func (p Position) check(what string, capacity uint64) error {
	if p.Offset+8 > capacity {
		return &Corrupt{what, p.Offset, capacity - 8}
	}
	if p.Seq == 0 {
		return &Corrupt{what, p.Pack(), 1 << 32}
	}
	return nil
}

// Corrupt reports the rule that the other side broke.
type Corrupt struct {
	What          string
	Found, Wanted uint64
}

func (e *Corrupt) Error() string {
	return fmt.Sprintf("%s is %#x, wanted %#x or what the lane allows", e.What, e.Found, e.Wanted)
}

// TooLarge reports a message above the lane's limit.
type TooLarge struct{ Bytes, BytesMax uint64 }

func (e *TooLarge) Error() string {
	return fmt.Sprintf("a message of %d bytes is larger than this lane's limit of %d", e.Bytes, e.BytesMax)
}

// Unbacked reports that this number of bytes, from the start of the data, must be allocated first.
type Unbacked struct{ Bytes uint64 }

func (e *Unbacked) Error() string {
	return fmt.Sprintf("%d bytes of the lane are not allocated yet", e.Bytes)
}

// Memory is the four segments of a lane: the pages at least as long as their fields, all of them aligned to 8.
type Memory struct {
	Producer, Consumer, Receiver, Data []byte
}

// word64 returns a word of a segment. Go checks the index; a segment's length and the offset are multiples of 8.
func word64(segment []byte, offset uint64) *uint64 {
	return (*uint64)(unsafe.Pointer(&segment[offset]))
}

func word32(segment []byte, offset uint64) *uint32 {
	return (*uint32)(unsafe.Pointer(&segment[offset]))
}

func load64(segment []byte, offset uint64) uint64 { return atomic.LoadUint64(word64(segment, offset)) }
func load32(segment []byte, offset uint64) uint32 { return atomic.LoadUint32(word32(segment, offset)) }
func store64(segment []byte, offset, value uint64) {
	atomic.StoreUint64(word64(segment, offset), value)
}
func store32(segment []byte, offset uint64, value uint32) {
	atomic.StoreUint32(word32(segment, offset), value)
}

// count adds one to a statistic, on which nothing acts.
func count(segment []byte, offset uint64) { store64(segment, offset, load64(segment, offset)+1) }

// SetBootID writes the boot id to a path lane's producer page.
func SetBootID(page []byte, id [16]byte) { copy(page[producerBootID:], id[:]) }

// BootID returns the boot id in the page.
func BootID(page []byte) (id [16]byte) {
	copy(id[:], page[producerBootID:])
	return id
}

// MakeUnused resets a page from MakeProducerPage or MakeConsumerPage to one that no process has used yet, as the
// creator of a path channel leaves it.
func MakeUnused(page []byte) {
	generation, pid := uint64(producerGeneration), uint64(producerPid)
	if load64(page, 0) == MagicConsumer {
		generation, pid = consumerGeneration, consumerPid
	}
	store64(page, generation, 0)
	store32(page, pid, 0)
}

// WritePreamble writes the first words of a control segment.
func WritePreamble(page []byte, magic uint64) { writePreamble(page, magic) }

// BytesOf returns the size of a control segment.
func BytesOf(magic uint64) uint32 {
	if magic == MagicTable {
		return TableBytes
	}
	return SegmentBytes
}

func writePreamble(page []byte, magic uint64) {
	binary.LittleEndian.PutUint64(page, magic)
	binary.LittleEndian.PutUint32(page[8:], WireVersion)
	binary.LittleEndian.PutUint32(page[12:], BytesOf(magic))
	binary.LittleEndian.PutUint64(page[16:], signatureOf(magic))
}

// CheckPreamble checks the first words of another side's control segment.
func CheckPreamble(page []byte, magic uint64) error {
	var own [24]byte
	writePreamble(own[:], magic)
	for offset := uint64(0); offset < 24; offset += 8 {
		found, wanted := load64(page, offset), binary.LittleEndian.Uint64(own[offset:])
		if found != wanted {
			return &Corrupt{fmt.Sprintf("word %d of a segment", offset), found, wanted}
		}
	}
	return nil
}

// MakeProducerPage initializes a producer's page of zeros, before it is shared.
func MakeProducerPage(page []byte, capacity, bytesMax, generation uint64, pid uint32) {
	writePreamble(page, MagicProducer)
	store64(page, producerCapacity, capacity)
	store64(page, producerBytesMax, bytesMax)
	store32(page, producerCursors, 1)
	store64(page, producerTail, Start.Pack())
	store64(page, producerSynced, Start.Pack())
	store64(page, producerGeneration, generation)
	store32(page, producerState, stateOpen)
	store32(page, producerPid, pid)
}

// MakeConsumerPage initializes a consumer's page.
func MakeConsumerPage(page []byte, head Position, pid uint32) {
	writePreamble(page, MagicConsumer)
	store64(page, consumerHead, head.Pack())
	store64(page, consumerGeneration, 1)
	store32(page, consumerState, stateOpen)
	store32(page, consumerPid, pid)
}

// MakeReceiverPage initializes a receiver's page.
func MakeReceiverPage(page []byte) { writePreamble(page, MagicReceiver) }

// ProducerFigures returns the capacity, the message limit and the number of cursors in a producer's page.
func ProducerFigures(page []byte) (capacity, bytesMax uint64, cursors uint32) {
	return load64(page, producerCapacity), load64(page, producerBytesMax), load32(page, producerCursors)
}
