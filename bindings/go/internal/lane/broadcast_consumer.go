package lane

// BroadcastConsumer is a receiving side of a broadcast lane.
type BroadcastConsumer struct {
	memory   BroadcastMemory
	page     []byte
	capacity uint64
	bytesMax uint64
	policy   Policy
	slot     uint32
	// By path: the table that the page is in.
	table Table

	// The place of the next message, unless the policy is [Latest], and its number.
	cursor uint64
	seq    uint32
	number uint64
	// Messages that it passes over, as it joined before those that it wants.
	skip uint64

	// Messages that it missed; with [Latest], that it skipped.
	missed, messages, bytes uint64

	sleeper Sleeper
	waker   waker
	fence   uint64
}

// NewBroadcastConsumer attaches where the producer has let this consumer join. The page has the policy. The message
// limit is the lane's, as checked when it was opened. Errors: [Corrupt].
func NewBroadcastConsumer(memory BroadcastMemory, page []byte, policy Policy, joined Joined, bytesMax uint64,
	canBarrier bool) (*BroadcastConsumer, error) {
	if most := skipMax(uint64(len(memory.Data))); joined.Skip > most {
		return nil, &Corrupt{"messages to pass over", joined.Skip, most}
	}
	c, err := broadcastConsumerAt(memory, page, policy, joined, bytesMax, canBarrier)
	if err == nil {
		store64(page, cursorNumber, c.number) // [release]
	}
	return c, err
}

// broadcastConsumerAt returns the consumer where it has joined.
func broadcastConsumerAt(memory BroadcastMemory, page []byte, policy Policy, joined Joined, bytesMax uint64,
	canBarrier bool) (*BroadcastConsumer, error) {
	capacity := uint64(len(memory.Data))
	if err := joined.Place.check("place of the first message", capacity); err != nil {
		return nil, err
	}
	switch {
	case joined.Slot >= CursorsMax:
		return nil, &Corrupt{"slot", uint64(joined.Slot), CursorsMax - 1}
	case joined.Number == 0 || joined.Number > numberMax || joined.Place.Seq != seqOf(joined.Number):
		return nil, &Corrupt{"number of the first message", joined.Number, uint64(joined.Place.Seq)}
	}
	return &BroadcastConsumer{
		memory: memory, page: page, capacity: capacity, bytesMax: bytesMax, policy: policy, slot: joined.Slot,
		cursor: joined.Place.Offset, seq: joined.Place.Seq, number: joined.Number, skip: joined.Skip,
		sleeper: newSleeper(word64(page, cursorSleep+cursorSleepBytes*uint64(joined.Slot)), canBarrier),
		waker:   newWaker(word64(memory.Producer, producerSleep), word32(page, cursorFenced)),
	}, nil
}

// ReadsInPlace reports whether the producer never passes this consumer. Otherwise it must copy.
func (c *BroadcastConsumer) ReadsInPlace() bool { return c.policy.Kind == Gate }

// Peek returns the next message, if there is one, of a consumer that reads in place. It returns the same until that is
// taken. Errors: [Corrupt].
func (c *BroadcastConsumer) Peek() (Record, bool, error) {
	word := load64(c.memory.Data, c.cursor) // [publish]
	bytes := word & 0xffffffff
	if uint32(word>>32) == c.seq && bytes <= c.bytesMax && c.cursor+RecordBytes(bytes)+8 <= c.capacity && c.skip == 0 {
		return Record{Offset: c.cursor, Bytes: bytes, Seq: c.seq}, true, nil
	}
	c.ShowCounters()
	if c.table != nil {
		// A producer that counts this consumer holds for it. One that has refused its files, or its cursor, does not.
		if held := load64(c.table, tableHeld); held > c.number {
			return Record{}, false, &Corrupt{"held, beyond a cursor that gates", held, c.number}
		}
	}
	for {
		record, ok, err := c.recordAt(Position{c.cursor, c.seq})
		if err != nil || !ok || c.skip == 0 {
			return record, ok, err
		}
		c.pass(record)
	}
}

func (c *BroadcastConsumer) recordAt(place Position) (Record, bool, error) {
	record, _, ok, err := recordAt(c.memory.Data, c.bytesMax, load64(c.memory.Data, place.Offset), place)
	return record, ok, err
}

// pass moves past a record that is not wanted.
func (c *BroadcastConsumer) pass(record Record) {
	c.advance(record)
	c.skip--
}

func (c *BroadcastConsumer) advance(record Record) {
	c.cursor = record.Offset + RecordBytes(record.Bytes)
	c.seq = SeqAfter(c.seq)
	c.number++
}

// Take moves past the record that Peek returned last. Release gives its space back.
func (c *BroadcastConsumer) Take(record Record) {
	c.advance(record)
	c.messages++
	c.bytes += record.Bytes
}

// Payload returns the message in place. It stays there until it is released; a producer that breaks the rules may
// change it.
func (c *BroadcastConsumer) Payload(record Record) []byte {
	return c.memory.Data[record.Offset+8:][:record.Bytes:record.Bytes]
}

// Copied is what Copy found.
type Copied int

const (
	// CopiedNothing: there is no message.
	CopiedNothing Copied = iota
	// CopiedMessage: the message is in the buffer.
	CopiedMessage
	// CopiedOver: the producer has passed this consumer. There may be a message: copy again.
	CopiedOver
)

// Copy copies the next message into the buffer, which it returns, and moves past it. After [CopiedOver] the buffer has
// no meaning. Errors: [Corrupt].
func (c *BroadcastConsumer) Copy(buffer []byte) ([]byte, Copied, error) {
	if c.policy.Kind == Latest {
		return c.copyLatest(buffer)
	}
	for {
		record, ok, err := c.recordAt(Position{c.cursor, c.seq})
		if err == nil && ok && c.skip == 0 {
			buffer = append(buffer[:0], c.Payload(record)...)
		}
		// Before the copy counts, and before "empty" and "corrupt" do: all may come from later messages.
		if c.keptAfterReading() > c.number {
			missed, err := c.rejoin()
			if err != nil {
				return buffer, CopiedNothing, err
			}
			if missed == 0 {
				continue
			}
			return buffer, CopiedOver, nil
		}
		if err != nil || !ok {
			c.ShowCounters()
			return buffer, CopiedNothing, err
		}
		if c.skip > 0 {
			c.pass(record)
			continue
		}
		c.Take(record)
		return buffer, CopiedMessage, nil
	}
}

// keptAfterReading returns kept, loaded after what was read before.
func (c *BroadcastConsumer) keptAfterReading() uint64 {
	fenceAfterReading(&c.fence)
	return load64(c.memory.Producer, broadcastKept) // [keep]
}

// rejoin continues with the oldest message that the lane still has. It returns how many messages were missed.
func (c *BroadcastConsumer) rejoin() (uint64, error) {
	kept, place, err := keptAndPlace(c.memory.Producer, c.capacity)
	if err != nil {
		return 0, err
	}
	// kept only grows.
	if kept <= c.number {
		return 0, &Corrupt{"kept", kept, c.number}
	}
	passed := kept - c.number
	// It did not want those that it would have passed over.
	missed := passed - min(passed, c.skip)
	c.skip -= min(passed, c.skip)
	c.cursor, c.seq, c.number = place.Offset, place.Seq, kept
	c.missed += missed
	c.ShowCounters()
	return missed, nil
}

func (c *BroadcastConsumer) copyLatest(buffer []byte) ([]byte, Copied, error) {
	word := load64(c.memory.Producer, broadcastLast) // [last]
	// 0: no message since the first consumer of this policy joined, and none before was still there.
	if word == 0 {
		return buffer, CopiedNothing, nil
	}
	last := Unpack(word)
	if err := last.check("last", c.capacity); err != nil {
		return buffer, CopiedNothing, err
	}
	kept, place, err := keptAndPlace(c.memory.Producer, c.capacity)
	if err != nil {
		return buffer, CopiedNothing, err
	}
	// kept is at most the number after the newest. A distance that no lane has is -1: the producer needed that message's
	// space. If this side was stopped between the loads, the distance may be that of a later lap of the seqs.
	ahead := last.Since(place)
	if load64(c.memory.Producer, broadcastLast) == word && ahead <= c.capacity/8 {
		number, next := kept+ahead, c.Number()
		if number < next {
			return buffer, CopiedNothing, nil
		}
		record, ok, err := c.recordAt(last)
		if err == nil && ok {
			buffer = append(buffer[:0], c.Payload(record)...)
		}
		if c.keptAfterReading() <= number {
			if err == nil && !ok {
				err = &Corrupt{"last", word, number}
			}
			if err != nil {
				return buffer, CopiedNothing, err
			}
			c.missed += number - next
			c.number, c.skip = number+1, 0
			c.messages++
			c.bytes += record.Bytes
			c.ShowCounters()
			return buffer, CopiedMessage, nil
		}
	}
	// A message that was overwritten is followed by another one, which last may show already.
	if load64(c.memory.Producer, broadcastLast) != word {
		return buffer, CopiedOver, nil
	}
	return buffer, CopiedNothing, nil
}

// MayBeReady reports whether a message may be there: a hint while spinning.
func (c *BroadcastConsumer) MayBeReady() bool {
	if c.policy.Kind != Latest {
		return load64(c.memory.Data, c.cursor) != 0
	}
	last := Unpack(load64(c.memory.Producer, broadcastLast))
	return last.Seq != 0 && SeqAfter(last.Seq) != seqOf(c.number)
}

// Release releases everything taken or copied.
func (c *BroadcastConsumer) Release() Wake {
	store64(c.page, cursorNumber, c.number) // [release]
	word, sleeps, _ := c.waker.poll()
	if !sleeps {
		return false
	}
	// If either is stale, the producer has not polled since it armed, and will see this release. [sleep]
	if load32(c.memory.Producer, broadcastHolder) != c.slot || c.number < load64(c.memory.Producer, producerRoomSeq) {
		return false
	}
	c.waker.noteRing(word)
	count(c.page, cursorWakesSent)
	return Ring
}

// HasPassed reports whether it has moved past messages since its last release. If there is no message then, release
// them: the producer may wait for this consumer.
func (c *BroadcastConsumer) HasPassed() bool { return load64(c.page, cursorNumber) != c.number }

// Arm announces a sleep. The caller then polls, and sleeps only if there is still no message. membarrier is as for
// [Sleeper.Arm].
func (c *BroadcastConsumer) Arm(membarrier func() bool) {
	c.sleeper.Arm(c.isProducerFencing, membarrier)
}

// Disarm announces that the consumer is awake.
func (c *BroadcastConsumer) Disarm() { c.sleeper.Disarm() }

func (c *BroadcastConsumer) isProducerFencing() bool {
	return load32(c.memory.Producer, producerFenced) == 1
}

// NeedsTimedWait reports whether a sleep must end after a millisecond, because the producer is not yet known to fence.
func (c *BroadcastConsumer) NeedsTimedWait() bool {
	return c.sleeper.NeedsFencedWakers() && !c.isProducerFencing()
}

// ProducerClosed reports whether the producer has closed. Poll once more after true: what it committed before is
// visible then. [close]
func (c *BroadcastConsumer) ProducerClosed() bool {
	return load32(c.memory.Producer, producerState) == stateClosed
}

// ShowCounters writes the counters to the page. Doing so for each message would cost time.
func (c *BroadcastConsumer) ShowCounters() {
	store64(c.page, cursorMessages, c.messages)
	store64(c.page, cursorBytes, c.bytes)
	store64(c.page, cursorMissed, c.missed)
}

// Counters returns what this consumer has counted.
func (c *BroadcastConsumer) Counters() Counters {
	return Counters{Messages: c.messages, Bytes: c.bytes, Waits: load64(c.page, cursorWaits),
		Sleeps: load64(c.page, cursorSleeps), WakesSent: load64(c.page, cursorWakesSent)}
}

// CountWait counts a receive that found nothing and is going to wait.
func (c *BroadcastConsumer) CountWait() { count(c.page, cursorWaits) }

// CountSleep counts a sleep.
func (c *BroadcastConsumer) CountSleep() { count(c.page, cursorSleeps) }

// NoteRing is to be called before a ring of the producer.
func (c *BroadcastConsumer) NoteRing(ring LastRing) { storeLastRing(c.page, cursorLastRing, ring) }

// LastRing returns the producer's last ring, as it says.
func (c *BroadcastConsumer) LastRing() LastRing {
	return loadLastRing(c.memory.Producer, producerLastRing)
}

// Missed returns how many messages it has missed so far.
func (c *BroadcastConsumer) Missed() uint64 { return c.missed }

// Number returns the number of the next message; with [Latest], the number after the newest one received.
func (c *BroadcastConsumer) Number() uint64 { return c.number + c.skip }

// Capacity returns the bytes of data.
func (c *BroadcastConsumer) Capacity() uint64 { return c.capacity }

// BytesMax returns the largest message in bytes.
func (c *BroadcastConsumer) BytesMax() uint64 { return c.bytesMax }

// Close leaves for good. Ring the producer afterwards.
func (c *BroadcastConsumer) Close() {
	c.ShowCounters()
	store32(c.page, cursorState, stateClosed) // [close]
	if c.table != nil {
		c.table.Detach(c.slot)
	}
	c.sleeper.Close()
}
