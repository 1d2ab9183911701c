package lane

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/pelton-ipc/pelton/bindings/go/internal/vectors"
)

// pathLane is a lane by path, with the bytes that outlive its sides.
type pathLane struct {
	BroadcastMemory
	table Table
}

func freshPathLane(capacity uint64) pathLane {
	l := pathLane{freshBroadcast(capacity), words(TableBytes)}
	MakeUnused(l.Producer)
	MakeTable(l.table)
	return l
}

func (l pathLane) bytesMax() uint64 { return MessageBytesLimit(uint64(len(l.Data))) }

func (l pathLane) takeOver(t *testing.T) *BroadcastProducer {
	t.Helper()
	p, err := TakeOverBroadcastProducer(l.BroadcastMemory, l.table, l.bytesMax(), true, 1)
	if err != nil {
		t.Fatal(err)
	}
	p.SetBacked(p.Capacity())
	return p
}

func (l pathLane) mustJoin(t *testing.T, joining JoinByPath) *BroadcastConsumer {
	t.Helper()
	c, err := JoinBroadcast(l.BroadcastMemory, l.table, joining, l.bytesMax(), true)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestTheTablesLayoutIsTheSpecifications(t *testing.T) {
	line := regexp.MustCompile(`broadcast=3836989f4c25b509;[^\n]*`).Find(vectors.Specification(t, "broadcast.md"))
	hash := uint64(0xcbf29ce484222325)
	for _, b := range line {
		hash = (hash ^ uint64(b)) * 0x100000001b3
	}
	if hash != TableSignature {
		t.Fatalf("%#x", hash)
	}
	for field, at := range map[string]int{"changes": tableChanges, "held": tableHeld, "held_place": tableHeldPlace,
		"hold_limit": tableHoldLimit, "begun": entryBegun, "name": entryName, "entry": tableEntries, "cursor": tableCursors} {
		found := regexp.MustCompile(`[:,;]` + field + `@(\d+)`).FindSubmatch(line)
		if found == nil || string(found[1]) != strconv.Itoa(at) {
			t.Errorf("%s: %s, %d", field, found, at)
		}
	}
	if binary.LittleEndian.Uint64([]byte("pelton-T")) != MagicTable || TableBytes != 540672 {
		t.Error("the magic, or the size")
	}
}

func TestANameIsWrittenWholeAndFreed(t *testing.T) {
	table := Table(words(TableBytes))
	for _, name := range []string{"a", "eight888", strings.Repeat("n", DurableBytesMax), ""} {
		table.SetName(63, name)
		if found := table.Slot(63).Name; found != name {
			t.Errorf("%q, wanted %q", found, name)
		}
		table.SetName(63, "")
	}
}

// Producers that succeed each other at any time, and consumers that join, leave and return: each gets what its policy
// says, and the count of what it missed fits.
func TestALaneByPathGivesEachConsumerWhatItsPolicySays(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	for range 20 {
		pathModel(t, random)
	}
}

func pathModel(t *testing.T, random *rand.Rand) {
	capacity := uint64(CapacityMin) << random.Uint64N(6)
	l := freshPathLane(capacity)
	history := random.Uint64N(3) * random.Uint64N(100)
	begin := func() *BroadcastProducer {
		p := l.takeOver(t)
		p.SetHistory(history)
		p.SetWindow(capacity >> random.Uint64N(3))
		return p
	}
	p := begin()
	sizes := map[uint64]uint64{}
	var readers [8]*reader
	// Where a durable consumer that is away continues; it released everything before.
	var away [8]uint64
	join := func(slot uint32) {
		// The upper half is durable, by the same policy each time.
		isDurable := slot >= 4
		policy := Policy{Kind: PolicyKind(1 + random.IntN(4)), Slack: random.Uint64N(capacity)}
		if isDurable {
			policy.Kind = []PolicyKind{Gate, Lag, GateUntil, Gate}[slot-4]
		}
		from := From{FromKind(random.IntN(3)), random.Uint64N(200)}
		kept, next := load64(l.Producer, broadcastKept), p.Number()
		c := l.mustJoin(t, JoinByPath{slot, policy, from, isDurable, 1})
		if next = from.first(next, kept); isDurable && away[slot] != 0 {
			next = away[slot]
		}
		if c.Number() != next {
			t.Fatalf("slot %d begins at %d, wanted %d", slot, c.Number(), next)
		}
		readers[slot] = &reader{BroadcastConsumer: c, policy: policy, next: next}
	}
	for range 2000 {
		slot := uint32(random.IntN(len(readers)))
		r := readers[slot]
		switch choice := random.IntN(20); {
		case choice == 0 && r == nil:
			join(slot)
		case choice == 1 && r != nil:
			// It is killed, or leaves in order.
			if readers[slot] = nil; slot < 4 {
				r.Close()
			} else {
				away[slot] = load64(r.page, cursorNumber)
			}
		case choice == 2 && random.IntN(4) == 0:
			p = begin()
		case choice < 12:
			for join, _, ok := p.Lost(); ok; join, _, ok = p.Lost() {
				p.Remove(join)
			}
			sendOne(t, p, random, sizes)
		case r != nil:
			r.readSome(t, random, p.Number()-1, sizes)
		}
	}
	for slot := range readers {
		if readers[slot] == nil {
			join(uint32(slot))
		}
		for readers[slot].read(t, p.Number()-1, sizes) {
		}
	}
	p.Lost()
	if !p.IsReleased() {
		t.Fatal("not all is released")
	}
}

// A producer that publishes between any two steps of a consumer that joins, as much as it can: the consumer begins with
// a message that the lane still has, and receives everything from there on.
func TestAProducerMayMoveOnBetweenTheStepsOfAJoin(t *testing.T) {
	defer func() { testHookJoin = func() {} }()
	for at := range 40 {
		for kind := Gate; kind <= GateUntil; kind++ {
			for from := FromNow; from <= FromLast; from++ {
				l := freshPathLane(CapacityMin)
				p := l.takeOver(t)
				sizes := map[uint64]uint64{}
				send := func() {
					for range 50 {
						if sizes[p.Number()] = p.Number() % 300; !mustSend(t, p, sizes[p.Number()]) {
							break
						}
					}
					if _, why, ok := p.Lost(); ok {
						t.Fatal(why)
					}
				}
				send()
				steps := 0
				testHookJoin = func() {
					if steps == at || steps == at+1 {
						send()
					}
					steps++
				}
				c := l.mustJoin(t, JoinByPath{7, Policy{Kind: kind, Slack: 1000}, From{from, 9}, true, 1})
				r := &reader{BroadcastConsumer: c, policy: Policy{Kind: kind}, next: c.Number()}
				for r.read(t, p.Number()-1, sizes) {
					r.Release()
				}
				send()
				for r.read(t, p.Number()-1, sizes) {
					r.Release()
				}
			}
		}
	}
}

// The reverse: a consumer joins while a producer that has not found it moves kept past it.
func TestAConsumerMayJoinWhileTheProducerMovesKept(t *testing.T) {
	defer func() { testHookKeep = func() {} }()
	for at := range 10 {
		l := freshPathLane(CapacityMin)
		p := l.takeOver(t)
		var r *reader
		steps := 0
		testHookKeep = func() {
			if steps == at {
				c := l.mustJoin(t, JoinByPath{Slot: 3, Policy: Policy{Kind: Gate}, From: From{Kind: FromOldest}})
				r = &reader{BroadcastConsumer: c, policy: Policy{Kind: Gate}, next: c.Number()}
			}
			steps++
		}
		sizes := map[uint64]uint64{}
		for range 500 {
			if sizes[p.Number()] = p.Number() % 300; !mustSend(t, p, sizes[p.Number()]) {
				break
			}
		}
		if r == nil {
			t.Fatal("it has not joined")
		}
		for r.read(t, p.Number()-1, sizes) {
			r.Release()
		}
	}
}

// A consumer that joins and falls asleep between a reservation and its commit is rung.
func TestAConsumerThatHasJustJoinedIsRung(t *testing.T) {
	l := freshPathLane(CapacityMin)
	p := l.takeOver(t)
	if _, ok, err := p.TryReserve(8); !ok || err != nil {
		t.Fatal(ok, err)
	}
	c := l.mustJoin(t, JoinByPath{Slot: 9, Policy: Policy{Kind: Gate}})
	c.Arm(yes)
	if asleep := p.Commit(8); asleep != 1<<9 {
		t.Fatalf("%b", asleep)
	}
	if joined := p.Joined(); len(joined) != 1 || joined[0].Slot != 9 || !p.HasNews() {
		t.Fatal(joined)
	}
	// It leaves, and another one takes the slot before the producer finds that.
	c.Close()
	if l.table.Slot(9).IsCounted {
		t.Fatal("it is counted after its close")
	}
	l.mustJoin(t, JoinByPath{Slot: 9, Policy: Policy{Kind: Lag}})
	if join, why, ok := p.Lost(); !ok || why != ErrCursorClosed || join != 1 {
		t.Fatal(join, why, ok)
	}
	p.Remove(1)
	if joined := p.Joined(); len(joined) != 1 || joined[0].Join != 2 || joined[0].Policy.Kind != Lag {
		t.Fatal(joined)
	}
}

func TestAHoldLimitPermitsWhatItSays(t *testing.T) {
	const most = 1<<64 - 1
	until := func(ns uint64) Policy { return Policy{Kind: GateUntil, LagAfterNS: ns} }
	for _, c := range []struct {
		limit     HoldLimit
		policy    Policy
		isTooLong bool
	}{
		{0, Policy{Kind: Gate}, false}, {0, until(most), false},
		{1, Policy{Kind: Lag, LagAfterNS: most}, false}, {1, Policy{Kind: Latest}, false}, {1, until(0), false},
		{1, until(1), true}, {1, Policy{Kind: Gate}, true},
		{101, until(100), false}, {101, until(101), true},
		// The largest that a hostile table may say.
		{most, until(most - 1), false}, {most, until(most), true}, {most, Policy{Kind: Gate}, true},
	} {
		err := c.limit.Check(c.policy)
		if tooLong, ok := errors.AsType[*HoldsTooLong](err); ok != c.isTooLong || ok && tooLong.Error() == "" {
			t.Errorf("limit %d, %+v: %v", c.limit, c.policy, err)
		}
	}
}

func (l pathLane) mustNotJoin(t *testing.T, joining JoinByPath) {
	t.Helper()
	_, err := JoinBroadcast(l.BroadcastMemory, l.table, joining, l.bytesMax(), true)
	if _, ok := errors.AsType[*HoldsTooLong](err); !ok {
		t.Fatal(err)
	}
}

// The limit comes before a consumer has joined.
func TestAConsumerThatMayHoldTooLongGivesUp(t *testing.T) {
	defer func() { testHookJoin = func() {} }()
	for _, policy := range []Policy{{Kind: Gate}, {Kind: GateUntil, LagAfterNS: 101}} {
		l := freshPathLane(CapacityMin)
		p := l.takeOver(t)
		for at := range 2 {
			l.table.SetHoldLimit(0)
			steps := 0
			testHookJoin = func() {
				if steps == at {
					l.table.SetHoldLimit(101)
				}
				steps++
			}
			l.mustNotJoin(t, JoinByPath{Slot: 5, Policy: policy, IsDurable: true})
			if steps != 2 || l.table.Slot(5).IsCounted || l.table.HasBegun(5) {
				t.Fatal("it stays", steps)
			}
			p.Lost()
			if joined := p.Joined(); len(joined) != 0 {
				t.Fatal(joined)
			}
		}
	}
}

func TestADurableConsumerThatMayHoldTooLongKeepsItsPlace(t *testing.T) {
	defer func() { testHookJoin = func() {} }()
	l := freshPathLane(CapacityMin)
	p := l.takeOver(t)
	former := Policy{GateUntil, 1000, 100}
	longer := Policy{GateUntil, 2000, 101}
	l.mustJoin(t, JoinByPath{Slot: 5, Policy: former, IsDurable: true})
	sizes := map[uint64]uint64{}
	for range 9 {
		sizes[p.Number()] = 8
		mustSend(t, p, 8)
	}
	counted := load64(l.table, entryAt(5))
	testHookJoin = func() {
		if !l.table.HoldsLonger(5, 101) {
			t.Fatal("a producer that begins here does not find it")
		}
		l.table.SetHoldLimit(101)
	}
	l.mustNotJoin(t, JoinByPath{Slot: 5, Policy: longer, IsDurable: true})
	testHookJoin = func() {}
	if policy, continues := l.table.ContinuedPolicy(5); policy != former || !continues {
		t.Fatal(policy, continues)
	}
	// The producer may have counted it by its new policy, and does so anew by the former one.
	if load64(l.table, entryAt(5)) != counted+4 {
		t.Fatal("its join is not another one")
	}
	p.Lost()
	p.Remove(1)
	if joined := p.Joined(); len(joined) != 1 || joined[0].Policy != former {
		t.Fatal(joined)
	}
	c := l.mustJoin(t, JoinByPath{Slot: 5, Policy: former, IsDurable: true})
	r := &reader{BroadcastConsumer: c, policy: former, next: 1}
	for r.read(t, 9, sizes) {
	}
	if r.next != 10 {
		t.Fatal(r.next)
	}
	// A producer that begins has found it by its former policy.
	l.table.SetHoldLimit(1)
	l.mustJoin(t, JoinByPath{Slot: 5, Policy: Policy{GateUntil, 1000, 99}, IsDurable: true})
	// A policy that is none is not that of a consumer, which could hold the producer up.
	store32(l.table.Cursor(5), cursorPolicy, 9)
	l.mustNotJoin(t, JoinByPath{Slot: 5, Policy: former, IsDurable: true})
	if policy, continues := l.table.ContinuedPolicy(5); policy != (Policy{Kind: Lag}) || !continues {
		t.Fatal(policy, continues)
	}
}

// It is about to give up, or hostile.
func TestAProducerCountsAConsumerBeyondTheLimitByTheLimit(t *testing.T) {
	const most = 1<<64 - 1
	for _, c := range []struct {
		limit          HoldLimit
		policy, counts Policy
	}{
		{0, Policy{Gate, 9, 9}, Policy{Gate, 9, 9}}, {0, Policy{GateUntil, 9, most}, Policy{GateUntil, 9, most}},
		{101, Policy{Gate, 9, 9}, Policy{GateUntil, 0, 100}}, {most, Policy{Gate, 0, 0}, Policy{GateUntil, 0, most - 1}},
		{101, Policy{GateUntil, 9, 101}, Policy{GateUntil, 9, 100}},
		{101, Policy{GateUntil, 9, 100}, Policy{GateUntil, 9, 100}},
		{1, Policy{Lag, 9, 9}, Policy{Lag, 9, 9}}, {1, Policy{Kind: Latest}, Policy{Kind: Latest}},
	} {
		l := freshPathLane(CapacityMin)
		l.table.SetHoldLimit(c.limit)
		p := l.takeOver(t)
		// The producer has loaded it.
		l.table.SetHoldLimit(0)
		l.mustJoin(t, JoinByPath{Slot: 5, Policy: c.policy})
		p.Lost()
		if joined := p.Joined(); len(joined) != 1 || joined[0].Policy != c.counts {
			t.Errorf("limit %d: %+v, wanted %+v", c.limit, joined, c.counts)
		}
	}
}

// [join]: a producer that begins with a limit, and a consumer that may hold it up for longer. Both together never
// succeed.
func TestAProducerWithALimitNeverBeginsTogetherWithAGate(t *testing.T) {
	l := freshPathLane(CapacityMin)
	l.takeOver(t)
	within, gate := Policy{GateUntil, 0, 99}, Policy{GateUntil, 0, 101}
	l.mustJoin(t, JoinByPath{Slot: 1, Policy: within, IsDurable: true})
	const rounds = 10_000
	// How often each side has met the other one, before a round and after it. They spin, so that both begin within some
	// 100 ns.
	var producers, consumers atomic.Int64
	meet := func(own, other *atomic.Int64) {
		for n, round := 0, own.Add(1); other.Load() < round; n++ {
			if n > 1000 {
				runtime.Gosched()
			}
		}
	}
	var c *BroadcastConsumer
	go func() {
		for round := range rounds {
			// One that begins anew, and one that continues.
			slot := uint32(round % 2)
			meet(&consumers, &producers)
			c, _ = JoinBroadcast(l.BroadcastMemory, l.table, JoinByPath{Slot: slot, Policy: gate, IsDurable: slot == 1},
				l.bytesMax(), true)
			meet(&consumers, &producers)
		}
	}()
	defer func() { producers.Store(2 * rounds) }()
	var outcomes [2][2]int
	for round := range rounds {
		slot := uint32(round % 2)
		l.table.SetHoldLimit(0)
		meet(&producers, &consumers)
		for range round / 2 % 1000 {
			producers.Load()
		}
		l.table.SetHoldLimit(100)
		found := 0
		for other := range uint32(2) {
			if l.table.HoldsLonger(other, 100) {
				found = 1
			}
		}
		meet(&producers, &consumers)
		has := 0
		if c != nil {
			has = 1
		}
		outcomes[found][has]++
		if found == 0 && has == 1 {
			t.Fatal("both have begun, in round ", round)
		}
		switch l.table.SetHoldLimit(0); {
		case c != nil && slot == 0:
			c.Close()
		case c != nil:
			l.mustJoin(t, JoinByPath{Slot: 1, Policy: within, IsDurable: true})
		}
	}
	t.Log("found and joined:", outcomes)
}

// A producer that gives up more and more of the lane, and then less: the consumer that walks through it ends.
func TestABoundThatFallsDuringAWalkIsCorrupt(t *testing.T) {
	defer func() { testHookJoin = func() {} }()
	for _, kind := range []PolicyKind{Gate, Lag} {
		l := freshPathLane(CapacityMin)
		p := l.takeOver(t)
		var places []Position
		joining := JoinByPath{Slot: 5, Policy: Policy{Kind: kind}, IsDurable: true}
		c := l.mustJoin(t, joining)
		for range 20 {
			places = append(places, p.inner.Tail())
			mustSend(t, p, 8)
		}
		store64(l.table.Cursor(5), cursorNumber, 20)
		segment, numberAt, placeAt := []byte(l.table), uint64(tableHeld), uint64(tableHeldPlace)
		if !c.ReadsInPlace() {
			segment, numberAt, placeAt = l.Producer, broadcastKept, broadcastKeptPlace
		}
		steps := 0
		testHookJoin = func() {
			steps++
			// It passes over message 1, finds that 9 is the bound now, and then 5.
			if bound := map[int]uint64{2: 9, 3: 5}[steps]; bound != 0 {
				storeBound(segment, numberAt, placeAt, bound, places[bound-1])
			}
		}
		_, err := JoinBroadcast(l.BroadcastMemory, l.table, joining, l.bytesMax(), true)
		if steps != 3 {
			t.Fatal(steps, err)
		}
		mustBeCorrupt(t, err)
	}
}

// [join]: a producer that overwrites what a consumer has yet to read, which has just joined, loses a message. Not under
// the race detector: a consumer that joins loads headers that may be overwritten meanwhile, and then discards them.
func TestConsumersJoinWhileTheProducerPublishes(t *testing.T) {
	const capacity, joins, consumers = CapacityMin, 300, 3
	l := freshPathLane(capacity)
	p := l.takeOver(t)
	failed := make(chan error, consumers)
	// follow joins, receives some messages, and leaves.
	follow := func(slot uint32) error {
		c, err := JoinBroadcast(l.BroadcastMemory, l.table, JoinByPath{slot, Policy{Kind: Gate}, From{FromKind(slot % 3), 5},
			false, 1}, l.bytesMax(), true)
		if err != nil {
			return err
		}
		defer c.Close()
		for n := 0; n < 20; {
			record, ok, err := c.Peek()
			if err != nil {
				return err
			}
			if !ok {
				c.Release()
				runtime.Gosched()
				continue
			}
			if payload := c.Payload(record); uint64(len(payload)) != c.Number()%500 ||
				!isFilled(payload, uint32(c.Number())) {
				return fmt.Errorf("message %d is wrong", c.Number())
			}
			c.Take(record)
			n++
			c.Release()
		}
		return nil
	}
	for slot := range uint32(consumers) {
		go func() {
			var err error
			for n := 0; n < joins && err == nil; n++ {
				err = follow(slot)
			}
			failed <- err
		}()
	}
	for running := consumers; running > 0; {
		if !mustSend(t, p, p.Number()%500) {
			runtime.Gosched()
		}
		for join, why, ok := p.Lost(); ok; join, why, ok = p.Lost() {
			if p.Remove(join); why != ErrCursorClosed {
				t.Error(why)
			}
		}
		select {
		case err := <-failed:
			if running--; err != nil {
				t.Error(err)
			}
		default:
		}
	}
}

// Whatever is in the page, the table and the data, and whatever another process writes meanwhile: a producer that
// takes over, and consumers that join, stay within their bounds, and their calls end.
func FuzzTheSidesOfAHostileTable(f *testing.F) {
	f.Add(uint64(1), uint16(0))
	f.Add(uint64(2), uint16(0xffff))
	f.Fuzz(func(t *testing.T, seed uint64, choice uint16) {
		random := rand.New(rand.NewPCG(seed, uint64(choice)))
		l := freshPathLane(CapacityMin)
		var p *BroadcastProducer
		var consumers [5]*BroadcastConsumer
		damage := func() {
			near := Position{8 * random.Uint64N(CapacityMin/8+2), 1 + random.Uint32N(60)}.Pack()
			number, slot := random.Uint64N(60), random.Uint32N(uint32(len(consumers)))
			switch random.IntN(11) {
			case 10:
				store64(l.table, tableHoldLimit, random.Uint64()>>random.IntN(64))
			case 0:
				store64(l.Producer, broadcastKept, number)
			case 1:
				store64(l.Producer, broadcastKeptPlace, near)
			case 2:
				store64(l.table, tableHeld, number)
			case 3:
				store64(l.table, tableHeldPlace, near)
			case 4:
				store64(l.Producer, producerTail, near)
			case 5:
				store64(l.table, entryAt(slot), random.Uint64N(4))
				store64(l.table, tableChanges, random.Uint64N(99))
			case 6:
				store64(l.table.Cursor(slot), 8*random.Uint64N(40), random.Uint64()>>random.IntN(64))
			case 7:
				store64(l.Data, 8*random.Uint64N(CapacityMin/8), near&^0xffffffff|random.Uint64N(100))
			case 8:
				store64(l.Producer, 8*random.Uint64N(96), random.Uint64())
			case 9:
				store64(l.table, entryAt(slot)+8*random.Uint64N(16), random.Uint64N(3))
			}
		}
		var buffer []byte
		for range 300 {
			if random.IntN(5) == 0 {
				damage()
			}
			slot := random.Uint32N(uint32(len(consumers)))
			switch c := consumers[slot]; {
			case p == nil || random.IntN(40) == 0:
				var err error
				if p, err = TakeOverBroadcastProducer(l.BroadcastMemory, l.table, l.bytesMax(), true, 1); err != nil {
					mustBeCorrupt(t, err)
					l, p, consumers = freshPathLane(CapacityMin), nil, [5]*BroadcastConsumer{}
				} else {
					p.SetBacked(p.Capacity())
				}
			case c == nil:
				policy := Policy{PolicyKind(1 + random.IntN(4)), random.Uint64N(5000), random.Uint64() >> random.IntN(64)}
				joining := JoinByPath{slot, policy,
					From{FromKind(random.IntN(3)), random.Uint64N(50)}, random.IntN(2) == 0, 1}
				c, err := JoinBroadcast(l.BroadcastMemory, l.table, joining, l.bytesMax(), true)
				if consumers[slot] = c; err != nil {
					if _, ok := errors.AsType[*HoldsTooLong](err); !ok {
						mustBeCorrupt(t, err)
					}
					consumers[slot] = nil
				}
			case random.IntN(30) == 0:
				c.Close()
				consumers[slot] = nil
			case random.IntN(2) == 0:
				bytes := random.Uint64N(600)
				space, ok, err := p.TryReserve(bytes)
				if ok {
					fill(space, 1)
					p.Commit(bytes)
				} else if err == nil {
					p.Arm(bytes, random.IntN(2) == 0, yes)
				}
				for n := 0; n < 2*CursorsMax; n++ {
					if join, _, ok := p.Lost(); ok {
						p.Remove(join)
					}
				}
				p.Joined()
			default:
				var err error
				if c.ReadsInPlace() {
					var record Record
					var ok bool
					if record, ok, err = c.Peek(); ok {
						c.Take(record)
					}
				} else {
					buffer, _, err = c.Copy(buffer)
				}
				c.Release()
				if err != nil {
					mustBeCorrupt(t, err)
					consumers[slot] = nil
				}
			}
		}
	})
}
