package lane

import (
	"bytes"
	"encoding/binary"
	"sync/atomic"
)

// By path, consumers join a broadcast lane by themselves, whether there is a producer or not: spec/broadcast.md, "By
// path". All cursor pages are in one segment, the table, so that the producer finds a new consumer by loads alone.
//
//   - The caller has a lock for its slot, so nothing else writes that slot's entry and cursor page.
//   - kept may exceed the number of a consumer that joined while the producer moved it. So the producer also stores
//     held, from which on it overwrites nothing, and its successor begins there.
//   - [join]: a consumer stores its number and its join, and then loads kept. The producer stores kept, and then loads
//     all joins. At least one of them finds the other's store, as atomic operations are kept in order here. A Rust
//     process has a full fence between the two.
//   - [join], too: a consumer stores its policy and its join, and then loads hold_limit. A producer that begins stores
//     hold_limit, and then loads all joins and policies. At least one of them finds the other's store. So the consumer
//     gives up, or the producer does not begin.

const (
	// TableSignature is the hash of the table's layout in spec/broadcast.md.
	TableSignature = 0x2d77f34fd204f861
	MagicTable     = 0x542d6e6f746c6570
	// DurableBytesMax is the longest name of a durable consumer.
	DurableBytesMax = 64

	tableChanges   = 64
	tableHeld      = 128
	tableHeldPlace = 136
	tableHoldLimit = 144

	tableEntries = 8192
	entryBytes   = 128
	entryBegun   = 8
	entryName    = 64

	tableCursors = 16384
	// CursorBytes is the size of a cursor page.
	CursorBytes = 8192
	// TableBytes is the size of a table.
	TableBytes = tableCursors + CursorsMax*CursorBytes
	// TableEntriesBytes is the size of what is before the cursors.
	TableEntriesBytes = tableCursors

	// isCounted is bit 0 of a join: the producer counts this slot. The other bits count the joins.
	isCounted = 1
)

// Table is the table of a broadcast lane by path.
type Table []byte

// TableSlot is what a slot's entry says.
type TableSlot struct {
	// The producer counts it.
	IsCounted bool
	// The name of a durable consumer; "": none.
	Name string
}

// MakeTable initializes a table of zeros, before it is shared. Its first bytes suffice.
func MakeTable(table []byte) {
	writePreamble(table, MagicTable)
	store64(table, tableHeld, 1)
	store64(table, tableHeldPlace, Start.Pack())
}

func entryAt(slot uint32) uint64 { return tableEntries + entryBytes*uint64(slot) }

// CursorOffset returns where the cursor page of a slot begins.
func CursorOffset(slot uint32) uint64 { return tableCursors + CursorBytes*uint64(slot) }

// Cursor returns the cursor page of a slot.
func (t Table) Cursor(slot uint32) []byte {
	return t[CursorOffset(slot):][:CursorBytes:CursorBytes]
}

// Slot returns a slot as it is now: the process that has its lock may be changing it.
func (t Table) Slot(slot uint32) TableSlot {
	at := entryAt(slot)
	join, name := load64(t, at), make([]byte, 0, DurableBytesMax)
	for word := range uint64(DurableBytesMax / 8) {
		name = binary.LittleEndian.AppendUint64(name, load64(t, at+entryName+8*word))
	}
	name, _, _ = bytes.Cut(name, []byte{0})
	return TableSlot{join&isCounted != 0, string(name)}
}

// SetName names a slot that the producer does not count. The caller has the slot's lock. An empty name frees it.
func (t Table) SetName(slot uint32, name string) {
	var whole [DurableBytesMax]byte
	copy(whole[:], name)
	for i := range len(whole) / 8 {
		word := i
		// A name of which a part is written, or freed, begins with a zero.
		if name != "" {
			word = len(whole)/8 - 1 - i
		}
		store64(t, entryAt(slot)+entryName+8*uint64(word), binary.LittleEndian.Uint64(whole[8*word:]))
	}
}

// HasBegun reports whether a consumer of this slot, which has ended, had begun: its number is a place in the lane.
func (t Table) HasBegun(slot uint32) bool { return load64(t, entryAt(slot)+entryBegun) != 0 }

// ContinuedPolicy returns the policy of the consumer that a durable one of this slot would continue; false: it would
// begin anew. The caller has the slot's lock.
func (t Table) ContinuedPolicy(slot uint32) (policy Policy, continues bool) {
	policy, err := CursorPolicy(t.Cursor(slot))
	if err != nil {
		// One that is none is that of no consumer.
		policy = Policy{Kind: Lag}
	}
	return policy, t.Slot(slot).IsCounted && t.HasBegun(slot)
}

// HoldLimit returns the limit of the producer that began last, or died before it had begun.
func (t Table) HoldLimit() HoldLimit { return HoldLimit(load64(t, tableHoldLimit)) } // [join]

// SetHoldLimit stores the limit of a producer that begins, whose role the caller has. Then HoldsLonger finds each
// consumer that has not loaded it.
func (t Table) SetHoldLimit(limit HoldLimit) { store64(t, tableHoldLimit, uint64(limit)) } // [join]

// HoldsLonger reports whether a slot is counted, and its consumer may hold the producer up for longer than the limit.
func (t Table) HoldsLonger(slot uint32, limit HoldLimit) bool {
	if load64(t, entryAt(slot))&isCounted == 0 { // [join]
		return false
	}
	// A policy that is none is that of no consumer: it has never stored it.
	policy, err := CursorPolicy(t.Cursor(slot))
	return err == nil && !limit.Permits(policy)
}

// Detach makes the producer count this slot no more. The caller has its lock, and rings the producer afterwards, which
// may wait for this consumer.
func (t Table) Detach(slot uint32) {
	store64(t, entryAt(slot), load64(t, entryAt(slot))&^isCounted) // [join]
	atomic.AddUint64(word64(t, tableChanges), 1)
}

// count makes the producer count the slot from now on as that of another consumer. The caller has its lock.
func (t Table) count(slot uint32) {
	store64(t, entryAt(slot), (load64(t, entryAt(slot))&^isCounted+2)|isCounted) // [join]
	atomic.AddUint64(word64(t, tableChanges), 1)
}

func (t Table) heldAndPlace(capacity uint64) (uint64, Position, error) {
	return loadBound("held", t, tableHeld, tableHeldPlace, capacity)
}

// TakeOverBroadcastProducer continues in the page of the previous producer of a lane by path, whose role this process
// has: after the last message that it published. It walks through all messages that the lane holds. How much is
// allocated is unknown. Errors: [Corrupt].
func TakeOverBroadcastProducer(memory BroadcastMemory, table Table, bytesMax uint64, canBarrier bool,
	pid uint32) (*BroadcastProducer, error) {
	page, capacity := memory.Producer, uint64(len(memory.Data))
	held, head, err := table.heldAndPlace(capacity)
	if err != nil {
		return nil, err
	}
	kept, apart := load64(page, broadcastKept), waypointBytes(capacity)
	// The bytes count from the head until the walk is over.
	waypoints := []waypoint{{held, head, 0}}
	number, tail, sentBytes, newest := held, head, uint64(0), uint64(0)
	for {
		record, _, ok, err := recordAt(memory.Data, bytesMax, load64(memory.Data, tail.Offset), tail)
		if err != nil {
			return nil, err
		}
		if !ok {
			break
		}
		if number-held > capacity/8 {
			return nil, &Corrupt{"records in the lane", number - held, capacity / 8}
		}
		newest = Position{record.Offset, record.Seq}.Pack()
		tail = Position{record.Offset + RecordBytes(record.Bytes), SeqAfter(record.Seq)}
		number, sentBytes = number+1, sentBytes+8+record.Bytes
		if number == kept || sentBytes-waypoints[len(waypoints)-1].sentBytes >= apart {
			waypoints = append(waypoints, waypoint{number, tail, sentBytes})
		}
	}
	if kept < held || kept > number {
		return nil, &Corrupt{"kept", kept, number}
	}
	begin(page, producerPid, producerState, producerGeneration, pid)
	p, err := broadcastProducerAt(memory, number, tail, held, head, load64(page, producerFloor), canBarrier)
	if err != nil {
		return nil, err
	}
	p.inner.bytesMax = min(p.inner.bytesMax, bytesMax)
	p.inner.SetBacked(0)
	walkedFrom := p.inner.SentBytes() - sentBytes
	for i := range waypoints {
		waypoints[i].sentBytes += walkedFrom
	}
	p.waypoints, p.kept, p.newest = waypoints, kept, newest
	// For consumers of the newest message, which may join at any time.
	p.latest = 1
	p.storeLast()
	p.table, p.holdLimit, p.changes = table, table.HoldLimit(), word64(table, tableChanges)
	p.changesSeen = atomic.LoadUint64(p.changes) - 1
	p.discover()
	return p, nil
}

// discover counts consumers that have joined by themselves, and finds those that have left.
func (p *BroadcastProducer) discover() {
	if p.table == nil {
		return
	}
	changes := atomic.LoadUint64(p.changes) // [join]
	if changes == p.changesSeen {
		return
	}
	p.changesSeen, p.hasNews = changes, true
	for slot := range uint32(CursorsMax) {
		join := load64(p.table, entryAt(slot)) // [join]
		if join == p.tableJoins[slot] {
			continue
		}
		p.tableJoins[slot] = join
		for i := range p.slots {
			if s := &p.slots[i]; s.slot == slot && s.loss == nil {
				s.loss = ErrCursorClosed
			}
		}
		page := p.table.Cursor(slot)
		// A policy that is none is that of no consumer: it has never stored it.
		if policy, err := CursorPolicy(page); err == nil && join&isCounted != 0 {
			// One that holds it up for longer has not loaded the limit yet, or is hostile. [join]
			p.count(slot, page, p.holdLimit.within(policy), p.held)
		}
	}
}

// hasRejoined reports whether a slot's consumer has left, or another one has joined there, since the last discover.
func (p *BroadcastProducer) hasRejoined(slot uint32) bool {
	return p.table != nil && load64(p.table, entryAt(slot)) != p.tableJoins[slot]
}

// hold moves held to kept, or less far if a consumer has joined before that meanwhile. It returns the waypoint there.
func (p *BroadcastProducer) hold() waypoint {
	// A consumer that joins either loads the new kept, and joins there, or is found here. [join]
	changes := p.changesSeen
	p.discover()
	if changes != p.changesSeen {
		p.loadCursors()
	}
	oldest := p.kept
	for i := range p.slots {
		if s := &p.slots[i]; s.gates() {
			oldest = min(oldest, s.seen)
		}
	}
	w := p.waypointBefore(max(oldest, p.held))
	if w.number > p.held {
		storeBound(p.table, tableHeld, tableHeldPlace, w.number, w.place)
	}
	return w
}

// ByItself is a consumer of a lane by path, as the producer counts it.
type ByItself struct {
	Slot uint32
	// As [Joined.Join].
	Join   uint64
	Policy Policy
	// The join in the table, which changes with each consumer of the slot.
	Generation uint64
}

// Joined returns the consumers that are counted now, of a lane by path.
func (p *BroadcastProducer) Joined() []ByItself {
	found := make([]ByItself, 0, len(p.slots))
	for i := range p.slots {
		if s := &p.slots[i]; s.loss == nil {
			found = append(found, ByItself{s.slot, s.join, s.policy, p.tableJoins[s.slot]})
		}
	}
	return found
}

// HasNews reports whether a consumer may have joined by itself, closed, or broken the rules: see Lost and Joined.
func (p *BroadcastProducer) HasNews() bool {
	return p.hasNews || atomic.LoadUint64(p.changes) != p.changesSeen
}

// SetAway notes that no process uses this durable consumer now: its sleep word has no meaning. It still counts by its
// policy.
func (p *BroadcastProducer) SetAway(join uint64) {
	for i := range p.slots {
		if p.slots[i].join == join {
			p.sleepWords[i] = p.zero()
		}
	}
}

// JoinByPath is how a consumer joins by itself.
type JoinByPath struct {
	// Its slot, whose lock the caller has.
	Slot   uint32
	Policy Policy
	// Where it begins, if it does not continue.
	From From
	// It is durable: it continues where the last consumer of this slot was, if there was one. If that one could be
	// passed, this one must not gate: see [Table.ContinuedPolicy].
	IsDurable bool
	PID       uint32
}

// JoinBroadcast joins a lane by path, with or without a producer. It passes over the messages before the first one that
// it wants. Ring the producer afterwards, also after an error, so that it finds the end of this process. Errors:
// [Corrupt]; [HoldsTooLong]: it has left, or one that continues keeps its place.
func JoinBroadcast(memory BroadcastMemory, table Table, joining JoinByPath, bytesMax uint64,
	canBarrier bool) (*BroadcastConsumer, error) {
	capacity, slot, policy := uint64(len(memory.Data)), joining.Slot, joining.Policy
	cursor, begunAt := table.Cursor(slot), entryAt(slot)+entryBegun
	leftAt := load64(cursor, cursorNumber)
	// Otherwise the last consumer died before it had begun, and this one begins anew.
	former, continues := table.ContinuedPolicy(slot)
	continues = continues && joining.IsDurable
	if continues && policy.Kind == Gate {
		// Before any store: a cursor that gates by this page holds the producer up.
		held, _, err := table.heldAndPlace(capacity)
		if err == nil && (former.Kind != Gate || held > leftAt) {
			err = &Corrupt{"number of a durable cursor that gates", leftAt, held}
		}
		if err != nil {
			return nil, err
		}
	}
	if !continues {
		store64(table, begunAt, 0)
		// The producer must not take what follows for the former consumer's.
		table.Detach(slot)
	}
	beginCursor(cursor, policy, joining.PID)
	attach := func(joined Joined) (*BroadcastConsumer, error) {
		joined.Slot = slot
		c, err := broadcastConsumerAt(memory, cursor, policy, joined, bytesMax, canBarrier)
		if err == nil {
			c.table = table
		}
		return c, err
	}
	if continues {
		table.count(slot) // [join]
		testHookJoin()
		// A producer that begins has found one whose former policy could hold it up for as long. That one must not come
		// back: a producer without a limit may have passed the new one by now.
		if policy.HoldsNS() > former.HoldsNS() {
			if err := table.HoldLimit().Check(policy); err != nil { // [join]
				storePolicy(cursor, former)
				table.count(slot) // [join]
				return nil, err
			}
		}
		c, err := attach(Joined{Number: leftAt, Place: Position{Seq: seqOf(leftAt)}})
		if err == nil {
			_, err = c.seek(leftAt, false)
		}
		return c, err
	}
	c, err := joinAnew(memory, table, joining, attach)
	if err != nil {
		return nil, err
	}
	// So that its successor need not pass over them, if it is durable. One that lags may be passed meanwhile.
	isThere, err := c.seek(c.Number(), true)
	if err != nil {
		return nil, err
	}
	if isThere {
		c.skip = 0
		store64(cursor, cursorNumber, c.number) // [release]
	}
	store64(table, begunAt, load64(table, entryAt(slot)))
	return c, nil
}

// testHookJoin is called between the steps of a consumer that joins, testHookKeep before a producer stores kept.
var testHookJoin, testHookKeep = func() {}, func() {}

// joinAnew joins at kept.
func joinAnew(memory BroadcastMemory, table Table, joining JoinByPath,
	attach func(Joined) (*BroadcastConsumer, error)) (*BroadcastConsumer, error) {
	page, capacity := memory.Producer, uint64(len(memory.Data))
	for try := range keptTries {
		number, place, err := keptAndPlace(page, capacity)
		if err != nil {
			return nil, err
		}
		ahead := Unpack(load64(page, producerTail)).Since(place)
		// The tail may be of an earlier time, or a predecessor's that died before it stored it.
		if ahead > capacity/8 {
			ahead = 0
		}
		skip := ahead
		switch joining.From.Kind {
		case FromOldest:
			skip = 0
		case FromLast:
			skip -= min(skip, joining.From.Last)
		}
		store64(table.Cursor(joining.Slot), cursorNumber, number) // [release]
		testHookJoin()
		if try == 0 {
			table.count(joining.Slot)
		}
		testHookJoin()
		if err := table.HoldLimit().Check(joining.Policy); err != nil { // [join]
			table.Detach(joining.Slot)
			return nil, err
		}
		// kept only grows: if it is at most number, nothing that this side wants has been overwritten. [join]
		if load64(page, broadcastKept) <= number {
			return attach(Joined{Number: number, Place: place, Skip: skip})
		}
	}
	return nil, &Corrupt{"kept, which changes at each load", load64(page, broadcastKept), 0}
}

// bound returns the oldest message that the producer holds for this consumer, and its place.
func (c *BroadcastConsumer) bound() (uint64, Position, error) {
	if c.ReadsInPlace() {
		return c.table.heldAndPlace(c.capacity)
	}
	return keptAndPlace(c.memory.Producer, c.capacity)
}

// boundNow returns that number, loaded after what was read before.
func (c *BroadcastConsumer) boundNow() uint64 {
	kept := c.keptAfterReading()
	if c.ReadsInPlace() {
		return load64(c.table, tableHeld) // [keep]
	}
	return kept
}

// seek moves to a number. It returns false if the producer has passed that: this consumer lags, and finds out when it
// copies. One that begins moves to the end of the messages if that is before the number: the tail by which it has
// chosen it may be visible before the last messages are. Errors: [Corrupt].
func (c *BroadcastConsumer) seek(number uint64, begins bool) (bool, error) {
	passed := uint64(0)
	for range keptTries {
		at, place, err := c.bound()
		switch {
		case err != nil:
			return false, err
		case at > number && !c.ReadsInPlace():
			return false, nil
		// The bound only grows, so all these walks together pass over each message at most once.
		case at > number || number-at > c.capacity/8 || at < passed:
			return false, &Corrupt{"number of a durable cursor", number, at}
		}
		// As a consumer that lags: the producer may overwrite what this side passes over. [keep]
		for {
			record, ok, err := c.recordAt(place)
			oldest := c.boundNow()
			testHookJoin()
			if oldest > at {
				// Once more, from the new place.
				passed = oldest
				break
			}
			if err == nil && !ok && begins {
				number = at
			}
			if at == number {
				c.cursor, c.seq, c.number = place.Offset, place.Seq, number
				return true, nil
			}
			if err == nil && !ok {
				err = &Corrupt{"number of a durable cursor", number, at}
			}
			if err != nil {
				return false, err
			}
			place = Position{record.Offset + RecordBytes(record.Bytes), SeqAfter(record.Seq)}
			at++
		}
	}
	return false, &Corrupt{"the oldest message, which changes at each load", number, 0}
}

// Publisher returns the generation and the process of the last producer of a lane by path.
func (c *BroadcastConsumer) Publisher() (generation uint64, pid uint32) {
	return load64(c.memory.Producer, producerGeneration), load32(c.memory.Producer, producerPid) // [close]
}

// Pause leaves a durable subscription, which keeps its place: the producer need not ring it.
func (c *BroadcastConsumer) Pause() {
	c.ShowCounters()
	c.Disarm()
}
