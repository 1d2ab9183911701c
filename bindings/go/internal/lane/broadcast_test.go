package lane

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"regexp"
	"runtime"
	"strconv"
	"testing"

	"github.com/pelton-ipc/pelton/bindings/go/internal/vectors"
)

func freshBroadcast(capacity uint64) BroadcastMemory {
	m := BroadcastMemory{words(768), words(capacity)}
	MakeBroadcastPage(m.Producer, capacity, MessageBytesLimit(capacity), 1)
	return m
}

func mustJoin(t *testing.T, p *BroadcastProducer, m BroadcastMemory, policy Policy, from From) *BroadcastConsumer {
	t.Helper()
	page := words(8192)
	MakeCursorPage(page, policy, 1)
	joined, ok := p.Join(page, policy, from)
	if !ok {
		t.Fatal("the lane is full of consumers")
	}
	c, err := NewBroadcastConsumer(m, page, policy, joined, MessageBytesLimit(p.Capacity()), true)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func mustSend(t *testing.T, p *BroadcastProducer, bytes uint64) (sent bool) {
	t.Helper()
	space, ok, err := p.TryReserve(bytes)
	if err != nil {
		t.Fatal(err)
	}
	if ok {
		fill(space, uint32(p.Number()))
		p.Commit(bytes)
	}
	return ok
}

func TestTheBroadcastLayoutIsTheSpecifications(t *testing.T) {
	text := vectors.Specification(t, "broadcast.md")
	line := regexp.MustCompile(`plain=3704e993d4074093;[^\n]*`).Find(text)
	hash := uint64(0xcbf29ce484222325)
	for _, b := range line {
		hash = (hash ^ uint64(b)) * 0x100000001b3
	}
	if hash != BroadcastSignature {
		t.Fatalf("%#x", hash)
	}
	// The offsets in the line are those here.
	for field, at := range map[string]int{
		"kept": broadcastKept, "kept_place": broadcastKeptPlace, "holder": broadcastHolder, "last": broadcastLast,
		"policy": cursorPolicy, "slack": cursorSlack, "lag_after_ns": cursorLagAfterNS, "number": cursorNumber,
		"messages": cursorMessages, "bytes": cursorBytes, "waits": cursorWaits, "sleeps": cursorSleeps,
		"wakes_sent": cursorWakesSent, "missed": cursorMissed, "state": cursorState, "pid": cursorPid,
		"fenced": cursorFenced, "sleep": cursorSleep,
	} {
		found := regexp.MustCompile(`[:,]` + field + `@(\d+)`).FindSubmatch(line)
		if found == nil || string(found[1]) != strconv.Itoa(at) {
			t.Errorf("%s: %s, %d", field, found, at)
		}
	}
	for text, magic := range map[string]uint64{"pelton-B": MagicBroadcast, "pelton-S": MagicCursor} {
		if binary.LittleEndian.Uint64([]byte(text)) != magic {
			t.Error(text)
		}
	}
}

// reader is a consumer of the model, with what it must receive next.
type reader struct {
	*BroadcastConsumer
	policy Policy
	next   uint64
	buffer []byte
	missed uint64
}

// read receives one message, if there is one, and checks it.
func (r *reader) read(t *testing.T, last uint64, sizes map[uint64]uint64) (got bool) {
	t.Helper()
	var payload []byte
	if r.ReadsInPlace() {
		record, ok, err := r.Peek()
		if err != nil {
			t.Fatal(err)
		}
		if !ok {
			r.Release()
			if r.next != last+1 {
				t.Fatalf("no message %d of %d", r.next, last)
			}
			return false
		}
		payload = r.Payload(record)
		r.Take(record)
	} else {
		for {
			buffer, found, err := r.Copy(r.buffer)
			r.buffer = buffer
			if err != nil {
				t.Fatal(err)
			}
			if found == CopiedMessage {
				break
			}
			if found == CopiedNothing {
				r.Release()
				// A newest message whose space was needed is there no more.
				if r.next+r.Missed()-r.missed != last+1 && r.policy.Kind != Latest {
					t.Fatalf("no message %d of %d", r.next, last)
				}
				return false
			}
		}
		payload = r.buffer
	}
	r.next += r.Missed() - r.missed
	r.missed = r.Missed()
	if uint64(len(payload)) != sizes[r.next] || !isFilled(payload, uint32(r.next)) || r.Number() != r.next+1 {
		t.Fatalf("message %d of %d is wrong: %d bytes, then %d", r.next, last, len(payload), r.Number())
	}
	if r.policy.Kind == Latest && r.next != last {
		t.Fatalf("%d is not the newest, %d", r.next, last)
	}
	r.next++
	return true
}

// readSome receives up to fifty messages, and releases after some of them.
func (r *reader) readSome(t *testing.T, random *rand.Rand, last uint64, sizes map[uint64]uint64) {
	t.Helper()
	for n := random.IntN(50); n >= 0 && r.read(t, last, sizes); n-- {
		if random.IntN(3) == 0 {
			r.Release()
		}
	}
}

// sendOne sends a message of any size, or lets the slowest consumer lag.
func sendOne(t *testing.T, p *BroadcastProducer, random *rand.Rand, sizes map[uint64]uint64) {
	t.Helper()
	bytes := min(p.BytesMax(), random.Uint64N(1<<random.Uint64N(14)))
	if sizes[p.Number()] = bytes; mustSend(t, p, bytes) {
		return
	}
	holder, ok := p.Holder()
	if !ok {
		t.Fatal("the lane is full for no consumer")
	}
	p.LetLag(holder.Join)
}

// first returns the number of the first message of a consumer that joins before the message next.
func (f From) first(next, oldest uint64) uint64 {
	switch f.Kind {
	case FromOldest:
		return oldest
	case FromLast:
		return max(next-min(next, f.Last), oldest)
	}
	return next
}

func TestABroadcastGivesEachConsumerWhatItsPolicySays(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	for range 40 {
		broadcastModel(t, random)
	}
}

func broadcastModel(t *testing.T, random *rand.Rand) {
	capacity := uint64(CapacityMin) << random.Uint64N(6)
	memory := freshBroadcast(capacity)
	// Some near the end of the seqs, which skip 0.
	number := uint64(1)
	if random.IntN(2) == 0 {
		number = 1<<32 - 1 - random.Uint64N(300)
	}
	p, err := newBroadcastProducer(memory, number, true)
	if err != nil {
		t.Fatal(err)
	}
	p.SetHistory(random.Uint64N(3) * random.Uint64N(100))
	p.SetWindow(capacity >> random.Uint64N(3))
	sizes := map[uint64]uint64{}
	var readers []*reader
	for range 2000 {
		switch choice := random.IntN(20); {
		case choice == 0 && len(readers) < 6:
			policy := Policy{Kind: PolicyKind(1 + random.IntN(4)), Slack: random.Uint64N(capacity)}
			from := From{FromKind(random.IntN(3)), random.Uint64N(200)}
			oldest := p.kept
			c := mustJoin(t, p, memory, policy, from)
			next := from.first(p.Number(), oldest)
			if c.Number() != next {
				t.Fatalf("it begins at %d, wanted %d", c.Number(), next)
			}
			readers = append(readers, &reader{BroadcastConsumer: c, policy: policy, next: next})
		case choice == 1 && len(readers) > 0:
			i := random.IntN(len(readers))
			readers[i].Close()
			join, why, ok := p.Lost()
			if !ok || why != ErrCursorClosed {
				t.Fatal(why)
			}
			p.Remove(join)
			readers = append(readers[:i], readers[i+1:]...)
		case choice < 12:
			sendOne(t, p, random, sizes)
		case len(readers) > 0:
			readers[random.IntN(len(readers))].readSome(t, random, p.Number()-1, sizes)
		}
	}
	for _, r := range readers {
		for r.read(t, p.Number()-1, sizes) {
		}
	}
	if !p.IsReleased() {
		t.Fatal("not all is released")
	}
}

// Over Go's memory, where the race detector checks [publish] and [release]: a producer that overwrites what some
// consumer still reads is a race.
func TestConsumersThatGateReadWhatIsNotOverwritten(t *testing.T) {
	const capacity, count, consumers = CapacityMin, 3000, 3
	memory := freshBroadcast(capacity)
	p, err := NewBroadcastProducer(memory, true)
	if err != nil {
		t.Fatal(err)
	}
	failed := make(chan error)
	for range consumers {
		c := mustJoin(t, p, memory, Policy{Kind: Gate}, From{})
		go func() {
			failed <- func() error {
				for n := uint64(1); n <= count; {
					record, ok, err := c.Peek()
					if err != nil {
						return err
					}
					if !ok {
						// Otherwise the producer may wait for the space of what it holds.
						c.Release()
						runtime.Gosched()
						continue
					}
					if payload := c.Payload(record); uint64(len(payload)) != n%500 || !isFilled(payload, uint32(n)) {
						return fmt.Errorf("message %d is wrong", n)
					}
					c.Take(record)
					if n++; n%3 == 0 || n > count-3 {
						c.Release()
					}
				}
				return nil
			}()
		}()
	}
	for p.Number() <= count {
		if !mustSend(t, p, p.Number()%500) {
			runtime.Gosched()
		}
	}
	for range consumers {
		if err := <-failed; err != nil {
			t.Error(err)
		}
	}
}

func TestAFalseCursorLosesItsConsumerAlone(t *testing.T) {
	for _, number := range []uint64{1, 12, 1 << 40, 1<<64 - 1} {
		memory := freshBroadcast(CapacityMin)
		p, _ := NewBroadcastProducer(memory, true)
		honest := mustJoin(t, p, memory, Policy{Kind: Gate}, From{})
		liar := mustJoin(t, p, memory, Policy{Kind: Gate}, From{})
		for range 10 {
			mustSend(t, p, 8)
		}
		store64(liar.page, cursorNumber, 5)
		p.IsReleased()
		store64(liar.page, cursorNumber, number)
		p.IsReleased()
		join, why, ok := p.Lost()
		if !ok || join != 2 {
			t.Fatal(number, join, ok)
		}
		mustBeCorrupt(t, why)
		p.Remove(join)
		if holder, ok := p.Holder(); !ok || holder != (Holder{1, 1}) {
			t.Fatal(holder, ok)
		}
		if _, ok, err := honest.Peek(); !ok || err != nil {
			t.Fatal(ok, err)
		}
	}
}

func TestASleepingConsumerIsRungOncePerSleep(t *testing.T) {
	memory := freshBroadcast(CapacityMin)
	p, _ := NewBroadcastProducer(memory, true)
	mustJoin(t, p, memory, Policy{Kind: Gate}, From{})
	c := mustJoin(t, p, memory, Policy{Kind: Latest}, From{})
	for range 3 {
		c.Arm(yes)
		for want := uint64(2); ; want = 0 {
			if _, _, err := p.TryReserve(8); err != nil {
				t.Fatal(err)
			}
			if asleep := p.Commit(8); asleep != want {
				t.Fatalf("%b, wanted %b", asleep, want)
			}
			if want == 0 {
				break
			}
		}
		c.Disarm()
	}
}

// Of two that gate, only the slower one rings a producer that sleeps.
func TestOnlyTheHolderRingsASleepingProducer(t *testing.T) {
	memory := freshBroadcast(CapacityMin)
	p, _ := NewBroadcastProducer(memory, true)
	slow, fast := mustJoin(t, p, memory, Policy{Kind: Gate}, From{}), mustJoin(t, p, memory, Policy{Kind: Gate}, From{})
	for mustSend(t, p, 100) {
	}
	read := func(c *BroadcastConsumer) Wake {
		record, _, _ := c.Peek()
		c.Take(record)
		return c.Release()
	}
	read(fast)
	if !p.Arm(100, false, yes) {
		t.Fatal("it need not sleep")
	}
	for n := p.Number() - 2; n > 0; n-- {
		if read(fast) == Ring {
			t.Fatal("the faster one rings")
		}
	}
	rung := uint64(0)
	for read(slow) != Ring {
		rung++
	}
	if half := p.Number() / 2; rung+1 != half {
		t.Fatalf("rung after %d, wanted %d", rung+1, half)
	}
	if !mustSend(t, p, 100) {
		t.Fatal("there is no space")
	}
}

// Whatever a publisher writes, before and during the calls, a subscriber stays within its bounds, and its calls end.
func FuzzABroadcastConsumerOfHostileMemory(f *testing.F) {
	f.Add([]byte{}, []byte{}, uint16(0), uint64(0))
	f.Add(bytes.Repeat(binary.LittleEndian.AppendUint64(nil, 1<<32|8), 40), []byte{9, 0, 0, 0}, uint16(9), uint64(1))
	f.Add(binary.LittleEndian.AppendUint64(nil, 1<<32|markBit|1), bytes.Repeat([]byte{1}, 300), uint16(3), uint64(7))
	f.Fuzz(func(t *testing.T, data, page []byte, choice uint16, seed uint64) {
		random := rand.New(rand.NewPCG(seed, 0))
		capacity := uint64(CapacityMin) + uint64(choice%3)*64
		memory := freshBroadcast(capacity)
		copy(memory.Data, data)
		copy(memory.Producer[broadcastKept:], page)
		policy := Policy{Kind: PolicyKind(1 + choice/4%4)}
		joined := Joined{Slot: uint32(choice >> 10), Number: 1 + uint64(choice>>8&3), Place: Start, Skip: uint64(choice >> 6 & 3)}
		joined.Place.Seq = seqOf(joined.Number)
		if choice&16 != 0 {
			joined.Place = Unpack(random.Uint64())
		}
		cursor := words(8192)
		c, err := NewBroadcastConsumer(memory, cursor, policy, joined, MessageBytesLimit(capacity), true)
		if err != nil {
			mustBeCorrupt(t, err)
			return
		}
		var buffer []byte
		for range 300 {
			c.MayBeReady()
			if c.ReadsInPlace() {
				record, ok, err := c.Peek()
				if err != nil {
					mustBeCorrupt(t, err)
					return
				}
				if ok {
					_ = bytes.Count(c.Payload(record), []byte{1})
					c.Take(record)
				}
			} else if buffer, _, err = c.Copy(buffer); err != nil {
				mustBeCorrupt(t, err)
				return
			}
			c.Release()
			// What the other side does meanwhile: plausible words, and any.
			for range random.IntN(3) {
				at := 8 * random.Uint64N(capacity/8)
				store64(memory.Data, at, uint64(c.seq+random.Uint32N(2))<<32|random.Uint64N(200))
				store64(memory.Data, 8*random.Uint64N(capacity/8), random.Uint64())
			}
			switch random.IntN(6) {
			case 0:
				store64(memory.Producer, broadcastKept, c.number+random.Uint64N(20))
			case 1:
				store64(memory.Producer, broadcastKeptPlace, Position{8 * random.Uint64N(capacity/8+2),
					c.seq + random.Uint32N(20)}.Pack())
			case 2:
				store64(memory.Producer, broadcastLast, Position{8 * random.Uint64N(capacity/8+2),
					c.seq + random.Uint32N(20)}.Pack())
			case 3:
				store64(memory.Producer, 8*random.Uint64N(96), random.Uint64())
			}
		}
	})
}

// Whatever consumers write into their pages, the producer stays within its bounds and one honest consumer receives all.
func FuzzABroadcastProducerWhoseConsumersLie(f *testing.F) {
	f.Add(uint64(1), uint16(0))
	f.Add(uint64(2), uint16(77))
	f.Fuzz(func(t *testing.T, seed uint64, choice uint16) {
		random := rand.New(rand.NewPCG(seed, uint64(choice)))
		memory := freshBroadcast(CapacityMin)
		p, err := NewBroadcastProducer(memory, true)
		if err != nil {
			t.Fatal(err)
		}
		honest := &reader{BroadcastConsumer: mustJoin(t, p, memory, Policy{Kind: Gate}, From{}), next: 1}
		var liars []*BroadcastConsumer
		sizes := map[uint64]uint64{}
		for range 400 {
			if len(liars) < 5 && random.IntN(4) == 0 {
				policy := Policy{PolicyKind(1 + random.IntN(4)), random.Uint64() >> random.IntN(64), random.Uint64()}
				liars = append(liars, mustJoin(t, p, memory, policy, From{FromKind(random.IntN(3)), random.Uint64()}))
			}
			for _, liar := range liars {
				switch random.IntN(8) {
				case 0:
					store64(liar.page, cursorNumber, p.Number()-random.Uint64N(3))
				case 1:
					store64(liar.page, cursorNumber, random.Uint64()>>random.IntN(64))
				case 2:
					store64(liar.page, 8*random.Uint64N(1024), random.Uint64())
				}
			}
			if sizes[p.Number()] = random.Uint64N(600); !mustSend(t, p, sizes[p.Number()]) {
				p.Arm(100, random.IntN(2) == 0, yes)
				if holder, ok := p.Holder(); ok && holder.Join != 1 {
					p.Remove(holder.Join)
				}
			}
			for join, why, ok := p.Lost(); ok; join, why, ok = p.Lost() {
				if join == 1 {
					t.Fatal(why)
				}
				p.Remove(join)
			}
			if random.IntN(2) == 0 {
				honest.read(t, p.Number()-1, sizes)
				honest.Release()
			}
		}
		for honest.read(t, p.Number()-1, sizes) {
		}
	})
}
