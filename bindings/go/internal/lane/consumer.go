package lane

// Consumer is the receiving side of a lane.
//
// The cursor is where the next record is polled for, the head up to where everything is released. What lies between is taken
// and not yet released. cursor+8 never exceeds the capacity: a record is accepted only if the header behind it lies inside.
type Consumer struct {
	memory   Memory
	capacity uint64
	bytesMax uint64

	cursor   uint64
	seq      uint32
	messages uint64
	bytes    uint64
	// Of the producer whose message was polled at last.
	generation uint32

	// Records taken and not all released, oldest first: a ring of which count are in use from first on.
	held       []heldRecord
	first, num int
	// The ticket of the oldest.
	firstTicket uint64

	waker waker
}

type heldRecord struct {
	end        Position
	isReleased bool
}

// Record is a message at the cursor: what its header said when it was polled at.
type Record struct {
	Offset, Bytes uint64
	Seq           uint32
	// Descriptors travel with the message, over the socket.
	Descriptors uint32
}

// NewConsumer is the consumer of a lane whose oldest unreleased record is, or will be, at the head in its own page.
func NewConsumer(memory Memory, bytesMax uint64) (*Consumer, error) {
	capacity := uint64(len(memory.Data))
	page := memory.Consumer
	head := Unpack(load64(page, consumerHead))
	if err := head.check("head", capacity); err != nil {
		return nil, err
	}
	c := &Consumer{
		memory:     memory,
		capacity:   capacity,
		bytesMax:   bytesMax,
		cursor:     head.Offset,
		seq:        head.Seq,
		messages:   load64(page, consumerMessages),
		bytes:      load64(page, consumerBytes),
		generation: uint32(load64(memory.Producer, producerGeneration)) & valueMask,
		held:       make([]heldRecord, 16),
		waker:      newWaker(word64(memory.Producer, producerSleep), word32(page, consumerFenced)),
	}
	store32(page, consumerState, stateOpen)
	return c, nil
}

// TakeOverConsumer goes on in the page of the consumer before, of a path channel, whose role this process has. It answers how many messages
// that one may have seen.
func TakeOverConsumer(memory Memory, bytesMax uint64, pid uint32) (c *Consumer, seen uint64, err error) {
	if c, err = NewConsumer(memory, bytesMax); err != nil {
		return nil, 0, err
	}
	if load64(memory.Consumer, consumerGeneration) != 0 {
		// Everything that was committed before now. Not from the stored tail on, which is in no order with the messages while
		// the sender lives.
		if _, seen, err = c.EndOfCommitted(); err != nil {
			return nil, 0, err
		}
	}
	// Last: who failed to attach has seen nothing.
	begin(memory.Consumer, consumerPid, consumerState, consumerGeneration, pid)
	return c, seen, nil
}

// begin is another's time in a page that its predecessor used: who sees the new generation sees that it is open. [close]
func begin(page []byte, pidAt, stateAt, generationAt uint64, pid uint32) {
	store32(page, pidAt, pid)
	store32(page, stateAt, stateOpen)
	store64(page, generationAt, load64(page, generationAt)+1)
}

// Producer is what the producer's page says of its generation and its process. [close]
func (c *Consumer) Producer() (generation uint64, pid uint32) {
	return load64(c.memory.Producer, producerGeneration), load32(c.memory.Producer, producerPid)
}

// AttachProducer goes on with the page of a producer that succeeds the dead one.
func (c *Consumer) AttachProducer(page []byte) {
	c.memory.Producer = page
	c.waker = newWaker(word64(page, producerSleep), word32(c.memory.Consumer, consumerFenced))
}

// Peek is the next message, if it is there. Looking again before it is taken finds the same. Errors: [Corrupt].
func (c *Consumer) Peek() (Record, bool, error) {
	word := load64(c.memory.Data, c.cursor) // [publish]
	bytes := word & 0xffffffff
	// The common case by one comparison each: a mark is larger than any limit.
	if uint32(word>>32) == c.seq && bytes <= c.bytesMax && c.cursor+RecordBytes(bytes)+8 <= c.capacity {
		return Record{Offset: c.cursor, Bytes: bytes, Seq: c.seq}, true, nil
	}
	c.showCounters()
	found, generation, ok, err := recordAt(c.memory.Data, c.bytesMax, word, Position{c.cursor, c.seq})
	if ok && generation >= 0 {
		c.generation = uint32(generation)
	}
	return found, ok, err
}

// recordAt follows the marks from word, which stands at place, and checks each step as spec/protocol.md says ("What it checks of
// a record"). The generation is -1 where no mark says one.
func recordAt(data []byte, bytesMax, word uint64, place Position) (record Record, generation int64, ok bool, err error) {
	generation = -1
	capacity := uint64(len(data))
	offset, ranks := place.Offset, uint32(0)
	for {
		if word == 0 && ranks == 0 {
			return record, generation, false, nil
		}
		seq, low := uint32(word>>32), uint32(word)
		if seq != place.Seq {
			return record, generation, false, &Corrupt{"seq of a record", uint64(seq), uint64(place.Seq)}
		}
		if low&markBit == 0 {
			bytes := uint64(low)
			if bytes > bytesMax {
				return record, generation, false, &Corrupt{"length of a record", bytes, bytesMax}
			}
			if end := offset + RecordBytes(bytes); end+8 > capacity {
				return record, generation, false, &Corrupt{"end of a record", end, capacity - 8}
			}
			record.Offset, record.Bytes, record.Seq = offset, bytes, seq
			return record, generation, true, nil
		}
		kind, value := low>>28&7, low&valueMask
		// Each kind at most once, in order: nobody can lead the reader round in circles.
		if kind == markNone || ranks>>markRank[kind] != 0 {
			return record, generation, false, &Corrupt{"mark", uint64(low), markBit}
		}
		ranks |= 1 << markRank[kind]
		offset += 8
		switch kind {
		case markJump:
			offset = uint64(value) * 64
		case markDescriptors:
			record.Descriptors = value
		case markGeneration:
			generation = int64(value)
		}
		if offset+16 > capacity {
			return record, generation, false, &Corrupt{"place after a mark", offset, capacity - 16}
		}
		word = load64(data, offset) // [publish]
	}
}

// Payload is where the message is. It stays there until it is released; a producer that breaks the rules may change it.
func (c *Consumer) Payload(record Record) []byte {
	return c.memory.Data[record.Offset+8:][:record.Bytes:record.Bytes]
}

// Word is one of the first words of the message, loaded once; the message has it.
func (c *Consumer) Word(record Record, number uint64) uint64 {
	return load64(c.memory.Data, record.Offset+8+8*number)
}

// MayBeReady says whether something stands at the cursor: a hint for who spins, to be followed by Peek.
func (c *Consumer) MayBeReady() bool { return load64(c.memory.Data, c.cursor) != 0 }

// Take moves the cursor behind the record that Peek answered last, without releasing it.
func (c *Consumer) Take(record Record) {
	c.cursor = record.Offset + RecordBytes(record.Bytes)
	c.seq = SeqAfter(c.seq)
	c.messages++
	c.bytes += record.Bytes
}

// ReleaseTaken gives back the space of everything taken and not held.
func (c *Consumer) ReleaseTaken() Wake {
	end := Position{c.cursor, c.seq}
	if c.num == 0 {
		return c.moveHead(end)
	}
	if c.heldAt(c.num-1).end != end {
		c.push(heldRecord{end, true})
	}
	return false
}

// Hold takes the record that Peek answered last, and keeps its space until the ticket is given back, in any order.
func (c *Consumer) Hold(record Record) (ticket uint64) {
	c.Take(record)
	c.push(heldRecord{end: Position{c.cursor, c.seq}})
	return c.firstTicket + uint64(c.num) - 1
}

func (c *Consumer) heldAt(i int) *heldRecord { return &c.held[(c.first+i)&(len(c.held)-1)] }

func (c *Consumer) push(record heldRecord) {
	if c.num == len(c.held) {
		larger := make([]heldRecord, 2*len(c.held))
		for i := range c.num {
			larger[i] = *c.heldAt(i)
		}
		c.held, c.first = larger, 0
	}
	c.num++
	*c.heldAt(c.num - 1) = record
}

// ReleaseHeld releases a held record. The space comes back in order, with the oldest held one.
func (c *Consumer) ReleaseHeld(ticket uint64) Wake {
	place := ticket - c.firstTicket
	if place >= uint64(c.num) || c.heldAt(int(place)).isReleased {
		panic("lane: a ticket is given back once")
	}
	c.heldAt(int(place)).isReleased = true
	if place != 0 {
		return false
	}
	var end Position
	for c.num > 0 && c.heldAt(0).isReleased {
		end = c.heldAt(0).end
		c.first = (c.first + 1) & (len(c.held) - 1)
		c.num--
		c.firstTicket++
	}
	return c.moveHead(end)
}

// Unreleased is how many records are held and not given back.
func (c *Consumer) Unreleased() uint64 {
	held := uint64(0)
	for i := range c.num {
		if !c.heldAt(i).isReleased {
			held++
		}
	}
	return held
}

func (c *Consumer) moveHead(end Position) Wake {
	store64(c.memory.Consumer, consumerHead, end.Pack()) // [release]
	word, sleeps, _ := c.waker.poll()
	if !sleeps {
		return false
	}
	// If this is stale, the producer has not polled again yet, and will see this release. [sleep]
	target := uint32(load64(c.memory.Producer, producerRoomSeq))
	if int32(end.Seq-target) < 0 {
		return false
	}
	c.waker.noteRing(word)
	count(c.memory.Consumer, consumerWakesSent)
	return Ring
}

// showCounters writes the counters to the page, which for each message would be felt.
func (c *Consumer) showCounters() {
	*word64(c.memory.Consumer, consumerMessages) = c.messages
	*word64(c.memory.Consumer, consumerBytes) = c.bytes
}

// CountWait counts a receive that found nothing and is going to wait; CountSleep one that sleeps.
func (c *Consumer) CountWait() { count(c.memory.Consumer, consumerWaits) }

// CountSleep counts a sleep.
func (c *Consumer) CountSleep() { count(c.memory.Consumer, consumerSleeps) }

// IsProducerFencing says whether the producer fences, so that a sleeper's membarrier is not needed. [fenced]
func (c *Consumer) IsProducerFencing() bool { return load32(c.memory.Producer, producerFenced) == 1 }

// ProducerClosed says whether the producer has closed. Look once more after this says yes: what it committed before is visible
// then. [close]
func (c *Consumer) ProducerClosed() bool {
	return load32(c.memory.Producer, producerState) == stateClosed
}

// EndOfCommitted walks over everything committed from the cursor on: where a dead producer's successor goes on, and how many
// messages lie before it. Errors: [Corrupt].
func (c *Consumer) EndOfCommitted() (Position, uint64, error) {
	return walk(c.memory.Data, c.bytesMax, Position{c.cursor, c.seq})
}

func walk(data []byte, bytesMax uint64, end Position) (Position, uint64, error) {
	if err := end.check("start of a walk", uint64(len(data))); err != nil {
		return end, 0, err
	}
	for most, found := uint64(len(data))/8, uint64(0); ; found++ {
		record, _, ok, err := recordAt(data, bytesMax, load64(data, end.Offset), end)
		if err != nil || !ok {
			return end, found, err
		}
		if found == most {
			return end, found, &Corrupt{"records in the lane", found + 1, most}
		}
		end = Position{record.Offset + RecordBytes(record.Bytes), SeqAfter(end.Seq)}
	}
}

// DeadProducer is what a successor of the producer has to know of it, as its page says.
func (c *Consumer) DeadProducer() (floor, generation uint64) {
	return load64(c.memory.Producer, producerFloor), load64(c.memory.Producer, producerGeneration)
}

// Head is up to where everything is released.
func (c *Consumer) Head() Position { return Unpack(load64(c.memory.Consumer, consumerHead)) }

// Generation is which producer's message was polled at last, modulo 2^28.
func (c *Consumer) Generation() uint32 { return c.generation }

// Capacity is the bytes of data.
func (c *Consumer) Capacity() uint64 { return c.capacity }

// BytesMax is the largest message.
func (c *Consumer) BytesMax() uint64 { return c.bytesMax }

// Close says for good that nothing more will be read. The sender is to be rung afterwards.
func (c *Consumer) Close() {
	c.showCounters()
	store32(c.memory.Consumer, consumerState, stateClosed) // [close]
}
