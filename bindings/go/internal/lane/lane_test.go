package lane

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"
)

func TestTheLayoutIsTheSpecifications(t *testing.T) {
	text, err := os.ReadFile("../../../../spec/layout.md")
	if errors.Is(err, os.ErrNotExist) {
		t.Skip("the module in a user's cache is without the specification")
	}
	if err != nil {
		t.Fatal(err)
	}
	_, line, _ := strings.Cut(string(text), "```text\n")
	line, _, _ = strings.Cut(line, "\n")
	hash := fnv.New64a()
	hash.Write([]byte(line))
	if hash.Sum64() != LayoutSignature {
		t.Fatalf("the layout's text has the hash %#x, this side speaks %#x", hash.Sum64(), uint64(LayoutSignature))
	}
	for name, offset := range map[string]int{
		"tail": producerTail, "floor": producerFloor, "depth_max": producerDepthMax, "synced": producerSynced,
		"sleep@256:u64,room_seq": producerSleep, "room_seq": producerRoomSeq, "fenced@392:u32;consumer:head": producerFenced,
		"state@384:u32,pid": producerState, "head": consumerHead, "state@256:u32,pid": consumerState,
		"fenced@264:u32;receiver:sleep": consumerFenced, "receiver:sleep": receiverSleep,
	} {
		name, rest, _ := strings.Cut(name, "@")
		wanted := fmt.Sprintf("%s@%d", name, offset)
		if rest != "" {
			wanted = name + "@" + rest
		}
		if !strings.Contains(line, wanted) {
			t.Errorf("%s is not at %d", name, offset)
		}
	}
	// The hints are not part of that text: an older peer has none.
	for _, row := range []string{
		fmt.Sprintf("| %d | u32 | ring_processor | a hint", producerLastRing),
		fmt.Sprintf("| %d | u64 | ring_ns | a hint", producerLastRing+8),
		fmt.Sprintf("| %d | u32 | ring_processor | as in the producer", consumerLastRing),
		fmt.Sprintf("| %d | u64 | ring_ns | likewise", consumerLastRing+8),
	} {
		if !bytes.Contains(text, []byte(row)) {
			t.Errorf("the specification has no row %q", row)
		}
	}
}

// A lane of random size and start against a queue.
func TestALaneGivesWhatAQueueGives(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	for range 60 {
		capacity := CapacityMin + random.Uint64N(64)*64
		if random.IntN(20) == 0 {
			capacity = 1 << 19
		}
		model(t, random, capacity)
	}
}

func model(t *testing.T, random *rand.Rand, capacity uint64) {
	start := Position{random.Uint64N(capacity/8) * 8, uint32(0) - random.Uint32N(2000)}
	if start.Seq == 0 {
		start.Seq = 1
	}
	limit := MessageBytesLimit(capacity)
	memory := fresh(capacity, limit, start)
	producer, err := NewProducer(memory, start, start, 0, true)
	if err != nil {
		t.Fatal(err)
	}
	producer.window = min(capacity, 64+random.Uint64N(capacity))
	consumer, err := NewConsumer(memory, limit)
	if err != nil {
		t.Fatal(err)
	}
	type message struct {
		seq   uint32
		bytes uint64
	}
	var queue []message
	var held []uint64
	seq, most := start.Seq, 1+random.Uint64N(limit)
	publish := func(bytes uint64) {
		queue = append(queue, message{seq, bytes})
		seq = SeqAfter(seq)
	}
	for range 2000 {
		switch random.IntN(10) {
		case 0, 1, 2:
			bytes := random.Uint64N(most + 1)
			space, ok, err := producer.TryReserve(bytes, random.Uint32N(2)*random.Uint32N(65))
			if err != nil {
				t.Fatal(err)
			}
			if !ok {
				if len(queue) == 0 && len(held) == 0 {
					t.Fatalf("an empty lane of %d is full for %d", capacity, bytes)
				}
				continue
			}
			used := random.Uint64N(bytes + 1)
			fill(space[:used], seq)
			if random.IntN(8) > 0 {
				producer.Commit(used)
				publish(used)
			}
		case 3:
			var lens []uint64
			room := uint64(0)
			for range random.IntN(5) {
				lens = append(lens, random.Uint64N(most/8+1))
				room += RecordBytes(lens[len(lens)-1])
			}
			if room > RecordBytes(limit) {
				continue
			}
			ok, err := producer.TryBeginBatch(room)
			if err != nil {
				t.Fatal(err)
			}
			if !ok {
				continue
			}
			for _, bytes := range lens {
				space, ok := producer.BatchMessage(bytes)
				if !ok {
					t.Fatal("no room in the batch")
				}
				fill(space, seq)
				publish(bytes)
			}
			producer.CommitBatch()
		case 4, 5, 6, 7:
			record, ok, err := consumer.Peek()
			if err != nil {
				t.Fatal(err)
			}
			if ok != (len(queue) > 0) {
				t.Fatalf("found %+v where %d wait", record, len(queue))
			}
			if !ok {
				continue
			}
			if record.Seq != queue[0].seq || record.Bytes != queue[0].bytes || !isFilled(consumer.Payload(record), record.Seq) {
				t.Fatalf("found %+v, wanted %+v", record, queue[0])
			}
			queue = queue[1:]
			held = append(held, consumer.Hold(record))
		case 8:
			for random.IntN(4) > 0 && len(held) > 0 {
				i := random.IntN(len(held))
				consumer.ReleaseHeld(held[i])
				held = append(held[:i], held[i+1:]...)
			}
			if len(held) > 40 {
				for _, ticket := range held {
					consumer.ReleaseHeld(ticket)
				}
				held = nil
			}
		case 9:
			if waiting, err := producer.PollHead(); err != nil || waiting < uint64(len(queue)+len(held)) {
				t.Fatalf("%d are unreleased, %d wait and %d are held: %v", waiting, len(queue), len(held), err)
			}
			if end, count, err := consumer.EndOfCommitted(); err != nil || end != producer.Tail() || count != uint64(len(queue)) {
				t.Fatalf("the walk ends at %+v after %d: %v", end, count, err)
			}
			for _, idle := range producer.Idle() {
				clear(memory.Data[idle[0]:][:idle[1]])
			}
		}
	}
}

func TestAReaderThatStopsAfterAnEarlyWrapLeavesTheWholeLane(t *testing.T) {
	capacity := uint64(4 << 20)
	memory := fresh(capacity, 1<<16, Start)
	producer, _ := NewProducer(memory, Start, Start, 0, true)
	consumer, _ := NewConsumer(memory, 1<<16)
	for producer.Tail().Offset >= producer.Head().Offset {
		if _, ok, err := producer.TryReserve(1000, 0); !ok || err != nil {
			t.Fatal(ok, err)
		}
		producer.Commit(1000)
		// The consumer keeps up, with some messages always unreleased.
		if producer.Unreleased() > 40 {
			record, _, _ := consumer.Peek()
			consumer.Take(record)
			consumer.ReleaseTaken()
		}
	}
	sent := uint64(0)
	for {
		_, ok, err := producer.TryReserve(1000, 0)
		if err != nil {
			t.Fatal(err)
		}
		if !ok {
			break
		}
		producer.Commit(1000)
		sent += RecordBytes(1000)
	}
	if sent < capacity*9/10 {
		t.Fatalf("%d of %d bytes could be used", sent, capacity)
	}
}

// Two goroutines over memory of Go's own, where the race detector sees every access: it checks that [publish] and
// [release] alone order the payloads.
func TestThePublishAndReleaseEdgesOrderThePayloads(t *testing.T) {
	const messages = 20000
	memory := fresh(8192, MessageBytesLimit(8192), Start)
	producer, err := NewProducer(memory, Start, Start, 0, true)
	if err != nil {
		t.Fatal(err)
	}
	consumer, err := NewConsumer(memory, MessageBytesLimit(8192))
	if err != nil {
		t.Fatal(err)
	}
	failed := make(chan error, 1)
	go func() {
		for seq := uint32(1); seq <= messages; {
			space, ok, err := producer.TryReserve(uint64(seq)%300, seq%7/6)
			if err != nil {
				failed <- err
				return
			}
			if !ok {
				runtime.Gosched()
				continue
			}
			fill(space, seq)
			producer.Commit(uint64(seq) % 300)
			seq++
		}
		failed <- nil
	}()
	for seq := uint32(1); seq <= messages; {
		record, ok, err := consumer.Peek()
		if err != nil {
			t.Fatal(err)
		}
		if !ok {
			runtime.Gosched()
			continue
		}
		if record.Seq != seq || !isFilled(consumer.Payload(record), seq) {
			t.Fatalf("found %+v, wanted %d", record, seq)
		}
		if seq%3 == 0 {
			consumer.ReleaseHeld(consumer.Hold(record))
		} else {
			consumer.Take(record)
			consumer.ReleaseTaken()
		}
		seq++
	}
	if err := <-failed; err != nil {
		t.Fatal(err)
	}
}

// The sleeper announces and polls, the waker publishes and polls: one of them sees the other, or the message waits
// for a sleeper for ever.
func TestNoSleeperMissesWhatIsPublished(t *testing.T) {
	const messages = 50000
	memory := fresh(CapacityMin, 64, Start)
	producer, _ := NewProducer(memory, Start, Start, 0, true)
	consumer, _ := NewConsumer(memory, 64)
	sleeper := NewReceiverSleeper(memory.Receiver, true)
	ownDoorbell, done := make(chan struct{}, 1), make(chan struct{})
	taken := make(chan struct{}, 1)
	go func() {
		defer close(done)
		for range messages {
			for {
				if record, ok, _ := consumer.Peek(); ok {
					consumer.Take(record)
					consumer.ReleaseTaken()
					break
				}
				sleeper.Arm(consumer.IsProducerFencing, func() bool { t.Error("a barrier, though the producer fences"); return true })
				if consumer.MayBeReady() {
					sleeper.Disarm()
					continue
				}
				<-ownDoorbell
				sleeper.Disarm()
			}
			taken <- struct{}{}
		}
	}()
	for range messages {
		if _, ok, err := producer.TryReserve(8, 0); !ok || err != nil {
			t.Fatal(ok, err)
		}
		if producer.Commit(8) == Ring {
			ownDoorbell <- struct{}{}
		}
		select {
		case <-taken:
		case <-time.After(30 * time.Second):
			t.Fatal("a message is there, and its reader sleeps")
		}
	}
	<-done
}

func TestASleeperThatLosesMembarrierWaitsBrieflyUntilItsWakerFences(t *testing.T) {
	memory := fresh(CapacityMin, 64, Start)
	producer, _ := NewProducer(memory, Start, Start, 0, true)
	if _, err := NewConsumer(memory, 64); err != nil {
		t.Fatal(err)
	}
	// A consumer of another implementation, that does not fence yet.
	store32(memory.Consumer, consumerFenced, 0)
	if _, _, err := producer.TryReserve(8, 0); err != nil {
		t.Fatal(err)
	}
	producer.Commit(8)
	asked := 0
	sleep, err := producer.Arm(0, true, func() bool { asked++; return false })
	if !sleep || err != nil || asked != 1 || !producer.NeedsTimedWait() {
		t.Fatalf("sleep %v, %v; asked for a barrier %d times; naps: %v", sleep, err, asked, producer.NeedsTimedWait())
	}
	if word := load64(memory.Producer, producerSleep); word != 16|armed|unbarriered {
		t.Fatalf("the sleep word is %#x", word)
	}
	store32(memory.Consumer, consumerFenced, 1)
	producer.Disarm()
	sleep, err = producer.Arm(0, true, func() bool { asked++; return false })
	if !sleep || err != nil || asked != 1 || producer.NeedsTimedWait() {
		t.Fatalf("sleep %v, %v; asked for a barrier %d times; naps: %v", sleep, err, asked, producer.NeedsTimedWait())
	}
}

// Memory of which the other side may have written anything: a value or corrupt, never a panic, never out of bounds,
// and an end.
func FuzzAConsumerOfHostileMemory(f *testing.F) {
	f.Add([]byte{}, uint64(1)<<32, uint16(0))
	f.Add(binary.LittleEndian.AppendUint64(nil, 1<<32|markBit|1), uint64(1)<<32, uint16(3))
	f.Add(bytes.Repeat(binary.LittleEndian.AppendUint64(nil, 1<<32|8), 40), uint64(1)<<32, uint16(9))
	f.Fuzz(func(t *testing.T, data []byte, head uint64, choice uint16) {
		capacity := uint64(CapacityMin) + uint64(choice%3)*64
		memory := fresh(capacity, MessageBytesLimit(capacity), Unpack(head))
		copy(memory.Data, data)
		if choice&8 != 0 {
			copy(memory.Producer, data)
		}
		if choice&16 != 0 {
			copy(memory.Data[capacity-min(capacity, uint64(len(data)))&^7:], data)
		}
		consumer, err := NewConsumer(memory, MessageBytesLimit(capacity))
		if err != nil {
			mustBeCorrupt(t, err)
			return
		}
		if _, _, err := consumer.EndOfCommitted(); err != nil {
			mustBeCorrupt(t, err)
		}
		for range capacity/8 + 2 {
			record, ok, err := consumer.Peek()
			if err != nil {
				mustBeCorrupt(t, err)
				return
			}
			if !ok {
				return
			}
			_ = bytes.Count(consumer.Payload(record), []byte{1})
			consumer.Take(record)
			consumer.ReleaseTaken()
			// What the other side does meanwhile.
			if len(data) > 8 {
				copy(memory.Data[consumer.cursor:], data[record.Bytes%uint64(len(data)):])
			}
		}
	})
}

func FuzzAProducerWhoseConsumerLies(f *testing.F) {
	f.Add([]byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18}, uint8(1))
	f.Add([]byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 9, 0, 0, 0, 0}, uint8(200))
	f.Fuzz(func(t *testing.T, lies []byte, size uint8) {
		const capacity = CapacityMin
		memory := fresh(capacity, MessageBytesLimit(capacity), Start)
		producer, err := NewProducer(memory, Start, Start, 0, true)
		if err != nil {
			t.Fatal(err)
		}
		for ; len(lies) >= 9; lies = lies[9:] {
			word := binary.LittleEndian.Uint64(lies[1:])
			switch lies[0] % 8 {
			case 0:
				store64(memory.Consumer, consumerHead, word)
			case 1, 2, 3: // near the truth
				head := producer.Head()
				store64(memory.Consumer, consumerHead, Position{(head.Offset + word%512*8) % capacity, head.Seq + uint32(word>>32)%4}.Pack())
			case 4:
				store64(memory.Receiver, receiverSleep, word)
			case 5:
				store64(memory.Consumer, consumerHead, producer.Tail().Pack())
			case 6:
				store32(memory.Consumer, consumerFenced, uint32(word))
			}
			for range 1 + lies[0]>>3 {
				space, ok, err := producer.TryReserve(uint64(size)*uint64(lies[0]>>4), uint32(word)%2)
				if err != nil {
					var tooLarge *TooLarge
					if errors.Is(err, ErrConsumerClosed) || errors.As(err, &tooLarge) {
						break
					}
					mustBeCorrupt(t, err)
					return
				}
				if !ok {
					if _, err := producer.Arm(uint64(size), lies[0]%2 == 0, yes); err != nil && !errors.Is(err, ErrConsumerClosed) {
						mustBeCorrupt(t, err)
						return
					}
					break
				}
				fill(space, 1)
				producer.Commit(uint64(len(space)))
			}
			for _, idle := range producer.Idle() {
				_ = memory.Data[idle[0]:][:idle[1]]
			}
		}
	})
}

func mustBeCorrupt(t *testing.T, err error) {
	t.Helper()
	var corrupt *Corrupt
	if !errors.As(err, &corrupt) {
		t.Fatalf("neither a value nor corrupt: %v", err)
	}
}
