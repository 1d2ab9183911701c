package lane

import (
	"fmt"
	"math"
	"runtime"
	"sync/atomic"
	"time"
)

// A broadcast lane has one producer and up to CursorsMax consumers with a cursor each: spec/broadcast.md. Records,
// marks, jumps and the window are those of a plain lane, and a plain [Producer] places them. Its head is a word of this
// side: the [BroadcastProducer] moves it to the place of kept, the oldest message that it must not overwrite.
//
// What the specification asks for beside [publish], [release], [close] and [sleep]:
//
//   - [keep], at the producer: kept is stored before the first byte of a record below it is overwritten. The atomic
//     store of kept is a full fence on x86-64. On arm64 it is a release, and the atomic load behind it an acquire,
//     which are kept in order, and so is what follows the acquire.
//   - [keep], at a consumer that copies: the copy comes before the load of kept. See [fenceAfterReading].
//   - [last]: an atomic store and an atomic load.
//
// A copy may be torn within a word. The consumer drops such a copy, as the producer stored a later kept before it wrote
// there.

const (
	// BroadcastSignature is the hash of the layout's text in spec/broadcast.md.
	BroadcastSignature = 0x3836989f4c25b509
	MagicBroadcast     = 0x422d6e6f746c6570
	MagicCursor        = 0x532d6e6f746c6570

	// CursorsMax is the largest number of consumers of one lane.
	CursorsMax = 64
	// SlackDefault is the slack of a consumer that names none: the window.
	SlackDefault = Window

	// numberMax is the largest number of a message.
	numberMax = 1 << 62
	// keptTries limits how often a consumer loads kept and its place again, because the producer changed them meanwhile:
	// a hostile one could do so for ever. A guess.
	keptTries = 10_000
)

const (
	broadcastKept      = 512
	broadcastKeptPlace = 520
	broadcastHolder    = 528
	broadcastLast      = 640

	cursorPolicy     = 64
	cursorSlack      = 72
	cursorLagAfterNS = 80
	cursorNumber     = 128
	cursorMessages   = 136
	cursorBytes      = 144
	cursorWaits      = 152
	cursorSleeps     = 160
	cursorWakesSent  = 168
	cursorMissed     = 176
	cursorState      = 256
	cursorPid        = 260
	cursorFenced     = 264
	cursorLastRing   = 272
	cursorSleep      = 4096
	cursorSleepBytes = 64
)

// PolicyKind is what the producer does when a consumer falls behind.
type PolicyKind uint32

const (
	// Gate: the producer waits for this consumer, which may read in place.
	Gate PolicyKind = 1
	// Lag: the producer overwrites messages that are more than the slack old.
	Lag PolicyKind = 2
	// Latest: the consumer copies the newest message only.
	Latest PolicyKind = 3
	// GateUntil: as Gate until it has held the producer up for LagAfterNS, then as Lag until it has caught up.
	GateUntil PolicyKind = 4
)

// Policy is that of one consumer, which chooses it when it joins.
type Policy struct {
	Kind PolicyKind
	// Slack in bytes of the lane, of Lag and GateUntil.
	Slack uint64
	// LagAfterNS is how long a consumer with GateUntil may hold the producer up.
	LagAfterNS uint64
}

// HoldsNS returns how long the consumer may hold the producer up; the largest number: without a limit.
func (p Policy) HoldsNS() uint64 {
	switch p.Kind {
	case Gate:
		return 1<<64 - 1
	case GateUntil:
		return p.LagAfterNS
	}
	return 0
}

// HoldLimit is for how long one consumer may hold the producer up at one message: 1 + the nanoseconds. 0: no limit.
type HoldLimit uint64

// Permits reports whether a consumer of this policy may hold the producer up for at most that.
func (l HoldLimit) Permits(p Policy) bool { return l == 0 || p.HoldsNS() <= uint64(l-1) }

// Check returns a [HoldsTooLong] for a policy that the limit does not permit.
func (l HoldLimit) Check(p Policy) error {
	if l.Permits(p) {
		return nil
	}
	return &HoldsTooLong{p, l}
}

// within returns the policy by which the producer counts a consumer.
func (l HoldLimit) within(p Policy) Policy {
	switch {
	case l.Permits(p):
		return p
	case p.Kind == Gate:
		p.Slack = 0
	}
	return Policy{GateUntil, p.Slack, uint64(l - 1)}
}

// Duration returns the time of a limit.
func (l HoldLimit) Duration() time.Duration { return durationOf(uint64(l - 1)) }

// HoldsTooLong reports a consumer that may hold the producer up for longer than the limit permits.
type HoldsTooLong struct {
	Policy Policy
	Limit  HoldLimit
}

func (e *HoldsTooLong) Error() string {
	holds := "without a limit"
	if e.Policy.Kind != Gate {
		holds = "for " + durationOf(e.Policy.HoldsNS()).String()
	}
	most := e.Limit.Duration()
	return fmt.Sprintf("the subscriber may hold the publisher up %s, which takes at most %v of that: subscribe by Lag, or by Gate with a LagAfter of at most %v, or raise the publisher's HoldMax",
		holds, most, most)
}

func durationOf(ns uint64) time.Duration { return time.Duration(min(ns, math.MaxInt64)) }

// within returns the policy in a lane of this capacity, of which half is the most slack.
func (p Policy) within(capacity uint64) Policy {
	p.Slack = min(p.Slack, capacity/2)
	return p
}

// FromKind says where a consumer begins, as the field seq of its CONSUMER.
type FromKind uint32

// Where a consumer begins.
const (
	FromNow FromKind = iota
	FromOldest
	FromLast
)

// From is where a consumer begins: Last is the number of messages of FromLast.
type From struct {
	Kind FromKind
	Last uint64
}

// Joined is what a consumer needs to know to attach.
type Joined struct {
	// Which of the lane's consumers it is.
	Slot uint32
	// The number of this consumer, which no other has.
	Join uint64
	// The number of a message, where it is or will be, and how many messages from there on the consumer passes over.
	Number uint64
	Place  Position
	Skip   uint64
}

// BroadcastMemory is the producer's page and the data.
type BroadcastMemory struct{ Producer, Data []byte }

// seqOf returns the seq of a message: headers count modulo 2^32-1 from 1 on.
func seqOf(number uint64) uint32 { return uint32(1 + (number-1)%0xffffffff) }

// waypointBytes is the least distance of the waypoints of a lane.
func waypointBytes(capacity uint64) uint64 { return min(64<<10, capacity/256) }

// skipMax is the largest number of messages that a consumer passes over when it joins: those between two waypoints.
func skipMax(capacity uint64) uint64 { return capacity/256/8 + 1 }

// MakeBroadcastPage initializes the page of a broadcast producer, of zeros, before it is shared.
func MakeBroadcastPage(page []byte, capacity, bytesMax uint64, pid uint32) {
	MakeProducerPage(page, capacity, bytesMax, 1, pid)
	writePreamble(page, MagicBroadcast)
	store32(page, producerCursors, CursorsMax)
	store64(page, broadcastKept, 1)
	store64(page, broadcastKeptPlace, Start.Pack())
}

// MakeCursorPage initializes the page of a consumer.
func MakeCursorPage(page []byte, policy Policy, pid uint32) {
	writePreamble(page, MagicCursor)
	beginCursor(page, policy, pid)
}

// beginCursor makes a page that no producer counts ready for its next consumer.
func beginCursor(page []byte, policy Policy, pid uint32) {
	storePolicy(page, policy)
	for _, counter := range []uint64{cursorMessages, cursorBytes, cursorWaits, cursorSleeps, cursorWakesSent,
		cursorMissed} {
		store64(page, counter, 0)
	}
	store32(page, cursorPid, pid)
	store32(page, cursorState, stateOpen)
}

// storePolicy stores the kind last, and CursorPolicy loads it first: a producer that begins may load the policy of a
// consumer that joins.
func storePolicy(page []byte, policy Policy) {
	store64(page, cursorSlack, policy.Slack)
	store64(page, cursorLagAfterNS, policy.LagAfterNS)
	store32(page, cursorPolicy, uint32(policy.Kind)) // [join]
}

// CursorPolicy returns the policy in a consumer's page, which the caller keeps: a hostile consumer may change the page.
// Errors: [Corrupt].
func CursorPolicy(page []byte) (Policy, error) {
	kind := PolicyKind(load32(page, cursorPolicy)) // [join]
	if kind < Gate || kind > GateUntil {
		return Policy{}, &Corrupt{"policy of a cursor", uint64(kind), uint64(GateUntil)}
	}
	return Policy{kind, load64(page, cursorSlack), load64(page, cursorLagAfterNS)}, nil
}

// CursorFigures returns how many messages a consumer says to have received and to have missed.
func CursorFigures(page []byte) (messages, missed uint64) {
	return load64(page, cursorMessages), load64(page, cursorMissed)
}

// CursorPID returns a consumer's process, as it says.
func CursorPID(page []byte) uint32 { return load32(page, cursorPid) }

// CursorLastRing returns a consumer's last ring, as it says.
func CursorLastRing(page []byte) LastRing { return loadLastRing(page, cursorLastRing) }

// signatureOf returns the layout's signature in the preamble of a segment.
func signatureOf(magic uint64) uint64 {
	switch magic {
	case MagicBroadcast, MagicCursor:
		return BroadcastSignature
	case MagicTable:
		return TableSignature
	}
	return LayoutSignature
}

// storeBound stores a number that only grows, after its place and before the caller overwrites anything below.
func storeBound(segment []byte, numberAt, placeAt, number uint64, place Position) {
	store64(segment, placeAt, place.Pack()) // [keep]
	store64(segment, numberAt, number)      // [keep]
	// Nothing that is stored from here on is visible before. Above: why.
	load64(segment, numberAt)
}

// fenceAfterReading keeps what was read before it ahead of an atomic load behind it. x86-64 does so by itself. On
// arm64 the store is a release, and the atomic load an acquire, which are kept in order. [keep]
func fenceAfterReading(word *uint64) {
	if runtime.GOARCH != "amd64" {
		atomic.StoreUint64(word, 0)
	}
}

// keptAndPlace returns the number of the oldest message that the producer has not given up, and its place: also of a
// producer that has stopped, or died, while it stored them. Errors: [Corrupt].
func keptAndPlace(page []byte, capacity uint64) (uint64, Position, error) {
	return loadBound("kept", page, broadcastKept, broadcastKeptPlace, capacity)
}

// loadBound loads what storeBound stores.
func loadBound(what string, segment []byte, numberAt, placeAt, capacity uint64) (uint64, Position, error) {
	for range keptTries {
		number := load64(segment, numberAt)       // [keep]
		place := Unpack(load64(segment, placeAt)) // [keep]
		if again := load64(segment, numberAt); again != number {
			continue
		}
		if err := place.check("place of the oldest message", capacity); err != nil {
			return 0, place, err
		}
		// The place is that of this number, or of a later one that the producer has not stored yet.
		if number == 0 || number > numberMax {
			return 0, place, &Corrupt{what, number, numberMax}
		}
		ahead := place.Since(Position{Seq: seqOf(number)})
		if ahead > capacity/8 {
			return 0, place, &Corrupt{"messages from " + what + " to its place", ahead, capacity / 8}
		}
		return number + ahead, place, nil
	}
	return 0, Position{}, &Corrupt{what + ", which changes at each load", load64(segment, numberAt), 0}
}
