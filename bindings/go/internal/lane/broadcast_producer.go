package lane

import (
	"errors"
	"slices"
	"sort"
	"sync/atomic"
)

// armTries limits how often the producer arms again because another consumer has become the slowest meanwhile: those
// that overtake each other could keep it there. A guess.
const armTries = 8

// BroadcastProducer is the sending side of a broadcast lane.
//
//   - B1. It writes no byte of a record numbered kept or later.
//   - B2. kept only grows, and is stored before the first byte of a record below it is overwritten. [keep]
//   - B3. It takes no place from a consumer's page, only numbers.
//   - B4. It never passes a cursor that gates, while it is joined.
type BroadcastProducer struct {
	inner *Producer
	page  []byte
	// The page that inner takes for its consumer's: only this side writes the head there, and nothing sleeps there.
	own []byte
	// The number of the next message, and the place of the one before it; 0 before the first.
	number, newest uint64
	kept           uint64
	// From this number on it overwrites nothing; at most kept. By path, a consumer may have joined before kept while the
	// producer moved it. Otherwise it is kept.
	held uint64
	// Consumers that have joined so far.
	joins uint64
	slots []broadcastSlot
	// The sleep words of the consumers, in the order of slots.
	sleepWords []*uint64
	// A consumer may be lost, and not removed yet, or has joined by itself.
	hasNews bool
	// Consumers with the policy Latest.
	latest int
	// The last so many messages are kept for later consumers, as long as that costs no consumer space.
	history uint64
	// In the order of their numbers, from first on. The first is at held.
	waypoints []waypoint
	first     int
	apart     uint64

	// By path: consumers that join by themselves, and the join of each slot as last loaded.
	table      Table
	tableJoins [CursorsMax]uint64
	holdLimit  HoldLimit
	// How often consumers have joined or left by themselves; a zero if they cannot. [join]
	changes     *uint64
	changesSeen uint64
}

// waypoint is where a message is, or will be: known to this side alone.
type waypoint struct {
	number uint64
	place  Position
	// Committed bytes before it.
	sentBytes uint64
}

type broadcastSlot struct {
	slot   uint32
	join   uint64
	page   []byte
	policy Policy
	// Where it joined, or, by path, may join.
	joined uint64
	// Its cursor, as last loaded and checked.
	seen uint64
	// It held the producer up for too long when this was the next message, and lags until it has caught up; 0: not.
	lagsTo uint64
	// The epoch in which it was rung.
	rung uint64
	// Why it is no longer counted; nil: it is.
	loss error
}

// ErrCursorClosed is the loss of a consumer that has closed. Any other is a [Corrupt].
var ErrCursorClosed = errors.New("the consumer has closed")

func (s *broadcastSlot) gates() bool {
	return s.loss == nil && (s.policy.Kind == Gate || s.policy.Kind == GateUntil && s.lagsTo == 0)
}

// Holder is the consumer that holds the producer up: the slowest one that gates.
type Holder struct{ Join, Number uint64 }

// NewBroadcastProducer returns the producer of a new lane without consumers.
func NewBroadcastProducer(memory BroadcastMemory, canBarrier bool) (*BroadcastProducer, error) {
	return newBroadcastProducer(memory, 1, canBarrier)
}

// newBroadcastProducer: the first message has that number.
func newBroadcastProducer(memory BroadcastMemory, number uint64, canBarrier bool) (*BroadcastProducer, error) {
	start := Position{Seq: seqOf(number)}
	p, err := broadcastProducerAt(memory, number, start, number, start, 0, canBarrier)
	if err != nil {
		return nil, err
	}
	p.waypoints = append(p.waypoints, waypoint{number, start, p.inner.SentBytes()})
	storeBound(p.page, broadcastKept, broadcastKeptPlace, number, start)
	return p, nil
}

// broadcastProducerAt returns a producer without waypoints, whose next message has that number and goes to the tail.
// The caller adds a waypoint at held.
func broadcastProducerAt(memory BroadcastMemory, number uint64, tail Position, held uint64, head Position, floor uint64,
	canBarrier bool) (*BroadcastProducer, error) {
	own, receiver := make([]byte, 512), make([]byte, 512)
	store64(own, consumerHead, head.Pack())
	inner, err := NewProducer(Memory{Producer: memory.Producer, Consumer: own, Receiver: receiver, Data: memory.Data},
		tail, head, floor, canBarrier)
	if err != nil {
		return nil, err
	}
	p := &BroadcastProducer{inner: inner, page: memory.Producer, own: own, number: number, kept: held, held: held,
		apart: waypointBytes(inner.capacity)}
	p.changes = p.zero()
	return p, nil
}

// zero returns a word that is always 0: see own.
func (p *BroadcastProducer) zero() *uint64 { return word64(p.own, 0) }

// SetHistory keeps the last messages for consumers that join later, as long as they take no space that a message needs.
func (p *BroadcastProducer) SetHistory(messages uint64) { p.history = messages }

// Join lets a consumer join, whose policy the caller has loaded and accepted. It returns false if the lane has
// [CursorsMax] of them.
func (p *BroadcastProducer) Join(page []byte, policy Policy, from From) (Joined, bool) {
	var taken uint64
	for i := range p.slots {
		taken |= 1 << p.slots[i].slot
	}
	if len(p.slots) == CursorsMax {
		return Joined{}, false
	}
	slot := uint32(0)
	for taken>>slot&1 != 0 {
		slot++
	}
	joined := Joined{Slot: slot, Number: p.number, Place: p.inner.Tail()}
	oldest := p.waypoints[p.first]
	switch {
	case from.Kind == FromOldest:
		joined.Number, joined.Place = oldest.number, oldest.place
	case from.Kind == FromLast && from.Last > 0:
		first := max(p.number-min(p.number, from.Last), oldest.number)
		at := p.waypointBefore(first)
		joined.Number, joined.Place, joined.Skip = at.number, at.place, first-at.number
	}
	joined.Join = p.count(slot, page, policy, joined.Number)
	if policy.Kind == Latest {
		p.storeLast()
	}
	return joined, true
}

// count counts a consumer from now on.
func (p *BroadcastProducer) count(slot uint32, page []byte, policy Policy, number uint64) (join uint64) {
	p.joins++
	p.slots = append(p.slots, broadcastSlot{slot: slot, join: p.joins, page: page,
		policy: policy.within(p.inner.capacity), joined: number, seen: number})
	p.sleepWords = append(p.sleepWords, word64(page, cursorSleep+cursorSleepBytes*uint64(slot)))
	if policy.Kind == Latest {
		p.latest++
	}
	return p.joins
}

// storeLast stores the newest message for a consumer of that, if the lane still has it, and no older one, whose seq may
// have come round.
func (p *BroadcastProducer) storeLast() {
	newest := p.newest
	if p.kept == p.number {
		newest = 0
	}
	store64(p.page, broadcastLast, newest) // [last]
}

// Remove removes a consumer: from now on the producer does not wait for it. The caller may unmap its page afterwards.
// It ends an announced sleep, as this consumer may be the one that would have rung.
func (p *BroadcastProducer) Remove(join uint64) {
	for i := range p.slots {
		if p.slots[i].join != join {
			continue
		}
		p.inner.Disarm()
		if p.slots[i].policy.Kind == Latest {
			p.latest--
		}
		end := len(p.slots) - 1
		p.slots[i], p.sleepWords[i] = p.slots[end], p.sleepWords[end]
		p.slots[end], p.sleepWords[end] = broadcastSlot{}, nil
		p.slots, p.sleepWords = p.slots[:end], p.sleepWords[:end]
		return
	}
}

// Lost returns a consumer that the producer no longer counts, and why. The caller then removes it.
func (p *BroadcastProducer) Lost() (join uint64, why error, ok bool) {
	p.discover()
	for i := range p.slots {
		s := &p.slots[i]
		if s.loss == nil && s.isClosed() {
			s.loss = ErrCursorClosed
		}
		if s.loss != nil {
			return s.join, s.loss, true
		}
	}
	p.hasNews = false
	return 0, nil, false
}

func (s *broadcastSlot) isClosed() bool { return load32(s.page, cursorState) == stateClosed } // [close]

// Cursor returns a consumer's cursor, as last loaded, and whether it may be passed now.
func (p *BroadcastProducer) Cursor(join uint64) (number uint64, lags bool) {
	for i := range p.slots {
		if p.slots[i].join == join {
			return p.slots[i].seen, !p.slots[i].gates()
		}
	}
	return p.number, false
}

// Holder returns the slowest consumer that gates, by its cursor as last loaded, unless it has released everything.
func (p *BroadcastProducer) Holder() (Holder, bool) {
	if s := p.slowest(); s != nil {
		return Holder{s.join, s.seen}, true
	}
	return Holder{}, false
}

func (p *BroadcastProducer) slowest() (slowest *broadcastSlot) {
	for i := range p.slots {
		s := &p.slots[i]
		if s.gates() && s.seen < p.number && (slowest == nil || s.seen < slowest.seen) {
			slowest = s
		}
	}
	return slowest
}

// LetLag has a consumer with [GateUntil] lag until it has caught up, as it has held the producer up for too long. It
// ends an announced sleep: this consumer would have rung, and need not any more.
func (p *BroadcastProducer) LetLag(join uint64) {
	for i := range p.slots {
		if s := &p.slots[i]; s.join == join && s.policy.Kind == GateUntil {
			s.lagsTo = p.number
			p.inner.Disarm()
		}
	}
}

// TryReserve reserves space for one message of this number of bytes. It returns false if a consumer that gates holds
// the lane full. Errors: [TooLarge].
func (p *BroadcastProducer) TryReserve(bytes uint64) ([]byte, bool, error) {
	if bytes <= p.inner.bytesMax && p.inner.tail+RecordBytes(bytes)+8 <= p.inner.limit {
		return p.inner.TryReserve(bytes, 0)
	}
	if bytes > p.inner.bytesMax {
		return nil, false, &TooLarge{bytes, p.inner.bytesMax}
	}
	p.noteWaypoint()
	// While the message fits in the window, the producer needs no cursor.
	if !p.inner.fitsInWindow(bytes) {
		p.loadCursors()
		p.keepFor(true)
	}
	space, ok, err := p.inner.TryReserve(bytes, 0)
	if err == nil && !ok {
		// Only consumers that gate may hold the producer up.
		p.loadCursors()
		p.keepFor(false)
		space, ok, err = p.inner.TryReserve(bytes, 0)
	}
	// To where the next waypoint is due.
	since := p.inner.SentBytes() - p.waypoints[len(p.waypoints)-1].sentBytes
	p.inner.shortenFastPath(p.apart - min(p.apart, since))
	return space, ok, err
}

func (p *BroadcastProducer) noteWaypoint() {
	newest := p.waypoints[len(p.waypoints)-1]
	if sent := p.inner.SentBytes(); p.number > newest.number && sent-newest.sentBytes >= p.apart {
		p.addWaypoint(waypoint{p.number, p.inner.Tail(), sent})
	}
}

func (p *BroadcastProducer) addWaypoint(w waypoint) {
	if len(p.waypoints) == cap(p.waypoints) && p.first > len(p.waypoints)/2 {
		p.waypoints = p.waypoints[:copy(p.waypoints, p.waypoints[p.first:])]
		p.first = 0
	}
	p.waypoints = append(p.waypoints, w)
}

// waypointBefore returns the newest waypoint not after the number, which is not below held.
func (p *BroadcastProducer) waypointBefore(number uint64) waypoint {
	present := p.waypoints[p.first:]
	// Mostly the first or the second: the slowest consumer is near it.
	for i := 1; i < min(4, len(present)); i++ {
		if present[i].number > number {
			return present[i-1]
		}
	}
	return present[sort.Search(len(present), func(i int) bool { return present[i].number > number })-1]
}

// newerThan returns the oldest message that is at most slack bytes old, as far as waypoints show it.
func (p *BroadcastProducer) newerThan(slack uint64) uint64 {
	present, end := p.waypoints[p.first:], p.inner.SentBytes()
	after := sort.Search(len(present), func(i int) bool { return end-present[i].sentBytes <= slack })
	if after == len(present) {
		return p.number
	}
	return present[after].number
}

// behindBy returns the newest message before which a waypoint shows slack bytes or more to the end: that many are kept
// at least, and less than a waypoint's distance more.
func (p *BroadcastProducer) behindBy(slack uint64) uint64 {
	present, end := p.waypoints[p.first:], p.inner.SentBytes()
	after := sort.Search(len(present), func(i int) bool { return end-present[i].sentBytes < slack })
	return present[max(after-1, 0)].number
}

// keepFor moves kept to the oldest message that counts, by the cursors as last loaded. lenient: history and consumers
// that lag count too, within their slack.
func (p *BroadcastProducer) keepFor(lenient bool) {
	oldest, newest, half := p.number, p.number, p.number
	mayBePassed := func(s broadcastSlot) bool { return s.policy.Kind != Gate }
	if lenient = lenient && (p.history > 0 || slices.ContainsFunc(p.slots, mayBePassed)); lenient {
		half = p.newerThan(p.inner.capacity / 2)
		// A consumer of the newest message finds it until a later one needs its space.
		history := p.history
		if p.latest > 0 {
			history = max(history, 1)
		}
		oldest = min(max(p.number-min(p.number, history), half), p.number)
		// For consumers that lag too: otherwise a producer of messages larger than their slack passes them each time.
		newest = max(p.number-1, half)
	}
	for i := range p.slots {
		s := &p.slots[i]
		switch {
		case s.gates():
			oldest = min(oldest, s.seen)
		case s.loss == nil && lenient && s.policy.Kind != Latest:
			oldest = min(oldest, max(s.seen, min(max(p.behindBy(s.policy.Slack), half), newest)))
		}
	}
	p.keep(oldest)
}

// loadCursors loads and checks each cursor once.
func (p *BroadcastProducer) loadCursors() {
	p.discover()
	for i := range p.slots {
		s := &p.slots[i]
		if s.loss == nil && s.isClosed() {
			s.loss = ErrCursorClosed
		}
		if s.loss != nil {
			p.hasNews = true
			continue
		}
		number := load64(s.page, cursorNumber) // [release]
		// 0: it has not attached yet, and stands where it joined. By path, one that joins by itself stores numbers until
		// none is below kept.
		isJoining := number == 0 || p.table != nil && s.seen == s.joined && number < s.joined
		if !isJoining && (number < s.seen || number > p.number) {
			s.loss, p.hasNews = &Corrupt{"number of a cursor", number, p.number}, true
			if p.hasRejoined(s.slot) {
				// The number is its successor's.
				s.loss = ErrCursorClosed
			}
			continue
		}
		s.seen = max(s.seen, number)
		// Not by its slack alone: one that is stopped may be within it, and would hold the lane again.
		if s.lagsTo > 0 && s.seen >= max(s.lagsTo, p.kept, p.newerThan(s.policy.Slack)) {
			s.lagsTo = 0
		}
	}
}

// keep moves kept to oldest, or to the newest waypoint before it.
func (p *BroadcastProducer) keep(oldest uint64) {
	if oldest == p.number && p.waypoints[len(p.waypoints)-1].number < oldest {
		p.addWaypoint(waypoint{oldest, p.inner.Tail(), p.inner.SentBytes()})
	}
	w := p.waypointBefore(max(oldest, p.kept))
	if w.number > p.kept {
		testHookKeep()
		storeBound(p.page, broadcastKept, broadcastKeptPlace, w.number, w.place)
		p.kept = w.number
	}
	if p.table != nil {
		w = p.hold()
	}
	if w.number == p.held {
		return
	}
	p.held = w.number
	for p.waypoints[p.first].number < w.number {
		p.first++
	}
	store64(p.own, consumerHead, w.place.Pack())
}

// Commit publishes the reserved message, of which the first bytes are used. It returns the mask of the slots to ring.
func (p *BroadcastProducer) Commit(bytes uint64) (asleep uint64) {
	newest := Position{p.inner.at, p.inner.seq}
	// Nothing sleeps on the receiver's page of the plain producer.
	_ = p.inner.Commit(bytes)
	p.number++
	p.newest = newest.Pack()
	if p.latest > 0 {
		store64(p.page, broadcastLast, p.newest) // [last]
	}
	var found uint64
	for _, word := range p.sleepWords {
		found |= atomic.LoadUint64(word) // [sleep]
	}
	if found&armed == 0 && atomic.LoadUint64(p.changes) == p.changesSeen {
		return 0
	}
	return p.findSleepers()
}

func (p *BroadcastProducer) findSleepers() (asleep uint64) {
	// A consumer that joined by itself may sleep. [join] [sleep]
	p.discover()
	for i, at := range p.sleepWords {
		word := atomic.LoadUint64(at) // [sleep]
		s := &p.slots[i]
		if word&(armed|closed) == armed && word&^flags != s.rung {
			s.rung = word &^ flags
			asleep |= 1 << s.slot
			count(p.page, producerWakesSent)
		}
	}
	return asleep
}

// Arm announces a sleep until there is space for a message of this number of bytes, or, if released, until no consumer
// that gates has unreleased messages. It returns true if the condition does not hold: then sleep. False: it holds, or
// the consumers overtake each other so often that the caller has to try again. membarrier is as for [Sleeper.Arm].
func (p *BroadcastProducer) Arm(bytes uint64, released bool, membarrier func() bool) bool {
	for range armTries {
		if p.isReady(bytes, released) {
			break
		}
		holder := p.slowest()
		if holder == nil {
			break
		}
		// As in a plain lane: half of what it has to release. Only the slowest one rings, as the others' releases give no
		// space.
		join, wanted := holder.join, p.number-holder.seen
		if !released {
			wanted = (wanted + 1) / 2
		}
		store32(p.page, broadcastHolder, holder.slot)
		store64(p.page, producerRoomSeq, holder.seen+wanted)
		p.inner.sleeper.Arm(func() bool { return p.isFenced(holder) }, membarrier)
		if p.isReady(bytes, released) {
			break
		}
		// If another one is the slowest now, this one may never ring.
		if now := p.slowest(); now != nil && now.join == join {
			count(p.page, producerSleeps)
			return true
		}
	}
	p.inner.Disarm()
	return false
}

// isReady is as a reservation: history and consumers that lag lose nothing as long as there is space.
func (p *BroadcastProducer) isReady(bytes uint64, released bool) bool {
	if released {
		return p.IsReleased()
	}
	// The plain producer's consumer is this side, and never corrupt.
	hasSpace, _ := p.inner.hasSpace(bytes)
	for _, lenient := range []bool{true, false} {
		if !hasSpace {
			p.loadCursors()
			p.keepFor(lenient)
			hasSpace, _ = p.inner.hasSpace(bytes)
		}
	}
	p.EndFastPath()
	return hasSpace
}

// EndFastPath makes the next reservation note waypoints, and find space that consumers have released.
func (p *BroadcastProducer) EndFastPath() { p.inner.shortenFastPath(0) }

func (p *BroadcastProducer) isFenced(s *broadcastSlot) bool { return load32(s.page, cursorFenced) == 1 } // [fenced]

// Disarm announces that the producer is awake.
func (p *BroadcastProducer) Disarm() { p.inner.Disarm() }

// IsArmed reports whether a sleep is announced.
func (p *BroadcastProducer) IsArmed() bool { return p.inner.IsArmed() }

// NeedsTimedWait reports whether a sleep must end after a millisecond, because the consumer that should ring is not yet
// known to fence.
func (p *BroadcastProducer) NeedsTimedWait() bool {
	holder := p.slowest()
	return holder != nil && p.inner.sleeper.NeedsFencedWakers() && !p.isFenced(holder)
}

// MayBeReady reports whether a consumer that gates has released something since its cursor was loaded: a hint.
func (p *BroadcastProducer) MayBeReady() bool {
	for i := range p.slots {
		if s := &p.slots[i]; s.gates() && load64(s.page, cursorNumber) > s.seen {
			return true
		}
	}
	return false
}

// IsReleased reports whether no consumer that gates has unreleased messages. It loads all cursors.
func (p *BroadcastProducer) IsReleased() bool {
	p.loadCursors()
	return p.slowest() == nil
}

// NoteRing is to be called before rings of consumers.
func (p *BroadcastProducer) NoteRing(ring LastRing) { p.inner.NoteRing(ring) }

// CountWait counts a send that found no space and is going to wait.
func (p *BroadcastProducer) CountWait() { p.inner.CountWait() }

// Counters returns what this producer has counted.
func (p *BroadcastProducer) Counters() Counters { return p.inner.Counters() }

// Number returns the number of the next message.
func (p *BroadcastProducer) Number() uint64 { return p.number }

// Capacity returns the bytes of data.
func (p *BroadcastProducer) Capacity() uint64 { return p.inner.capacity }

// BytesMax returns the largest message in bytes.
func (p *BroadcastProducer) BytesMax() uint64 { return p.inner.bytesMax }

// Backed returns how many bytes, from the start of the data, are allocated: see [Producer.Backed].
func (p *BroadcastProducer) Backed() uint64 { return p.inner.Backed() }

// SetBacked sets the allocated bytes.
func (p *BroadcastProducer) SetBacked(bytes uint64) { p.inner.SetBacked(bytes) }

// SetWindow sets the window.
func (p *BroadcastProducer) SetWindow(bytes uint64) { p.inner.SetWindow(bytes) }

// Close marks the producer closed for good. Ring the consumers afterwards.
func (p *BroadcastProducer) Close() { p.inner.Close() }
