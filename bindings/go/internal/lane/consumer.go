package lane

// Consumer is the receiving side of a lane.
//
// The cursor is where the next record is expected. Everything before the head is released. What lies between is taken
// and not yet released. cursor+8 never exceeds the capacity: a record is accepted only if the header after it lies
// inside.
type Consumer struct {
	memory   Memory
	capacity uint64
	bytesMax uint64

	cursor   uint64
	seq      uint32
	messages uint64
	bytes    uint64
	// Of the producer of the last message.
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

// Record is a message at the cursor, as its header described it.
type Record struct {
	Offset, Bytes uint64
	Seq           uint32
	// Descriptors travel with the message, over the socket.
	Descriptors uint32
	// Where the message's position in a trace begins; 0 if it has none.
	trace uint64
}

// NewConsumer returns the consumer of a lane whose oldest unreleased record is, or will be, at the head in its own
// page.
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

// TakeOverConsumer continues in the page of the previous consumer of a path channel, whose role this process has. It
// returns how many messages that one may have seen.
func TakeOverConsumer(memory Memory, bytesMax uint64, pid uint32) (c *Consumer, seen uint64, err error) {
	if c, err = NewConsumer(memory, bytesMax); err != nil {
		return nil, 0, err
	}
	if load64(memory.Consumer, consumerGeneration) != 0 {
		// Everything that was committed before now, by a walk: the stored tail is not ordered with the messages while
		// the sender lives.
		if _, seen, err = c.EndOfCommitted(); err != nil {
			return nil, 0, err
		}
	}
	// Last: a process that fails to attach has seen nothing.
	begin(memory.Consumer, consumerPid, consumerState, consumerGeneration, pid)
	return c, seen, nil
}

// begin starts a new generation in a page that a predecessor used: whichever process reads the generation finds the
// page open. [close]
func begin(page []byte, pidAt, stateAt, generationAt uint64, pid uint32) {
	store32(page, pidAt, pid)
	store32(page, stateAt, stateOpen)
	store64(page, generationAt, load64(page, generationAt)+1)
}

// Producer returns the generation and the process in the producer's page. [close]
func (c *Consumer) Producer() (generation uint64, pid uint32) {
	return load64(c.memory.Producer, producerGeneration), load32(c.memory.Producer, producerPid)
}

// AttachProducer continues with the page of a dead producer's successor.
func (c *Consumer) AttachProducer(page []byte) {
	c.memory.Producer = page
	c.waker = newWaker(word64(page, producerSleep), word32(c.memory.Consumer, consumerFenced))
}

// Peek returns the next message, if there is one. It returns the same until that is taken. Errors: [Corrupt].
func (c *Consumer) Peek() (Record, bool, error) {
	if record, ok := c.peekFast(); ok {
		return record, true, nil
	}
	word := load64(c.memory.Data, c.cursor) // [publish]
	c.showCounters()
	found, generation, ok, err := recordAt(c.memory.Data, c.bytesMax, word, Position{c.cursor, c.seq})
	if ok && generation >= 0 {
		c.generation = uint32(generation)
	}
	return found, ok, err
}

// peekFast returns the next message if no mark precedes it.
func (c *Consumer) peekFast() (Record, bool) {
	word := load64(c.memory.Data, c.cursor) // [publish]
	bytes := word & 0xffffffff
	// By one comparison each: a mark is larger than any limit.
	if uint32(word>>32) == c.seq && bytes <= c.bytesMax && c.cursor+RecordBytes(bytes)+8 <= c.capacity {
		return Record{Offset: c.cursor, Bytes: bytes, Seq: c.seq}, true
	}
	return Record{}, false
}

// recordAt follows the marks from word, the header at place, and checks each step as spec/protocol.md requires ("What
// it checks of a record"). The generation is -1 if no mark has one.
func recordAt(data []byte, bytesMax, word uint64, place Position) (record Record, generation int64, ok bool,
	err error) {
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
		// Each kind at most once, in order: a producer cannot send the reader round in circles.
		if ranks>>markRank[kind] != 0 || kind == markTrace && value != TraceBytes {
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
		case markTrace:
			record.trace = offset
			offset += TraceBytes
		}
		if offset+16 > capacity {
			return record, generation, false, &Corrupt{"place after a mark", offset, capacity - 16}
		}
		word = load64(data, offset) // [publish]
	}
}

// Payload returns the message in place. It stays there until it is released; a producer that breaks the rules may
// change it.
func (c *Consumer) Payload(record Record) []byte {
	return c.memory.Data[record.Offset+8:][:record.Bytes:record.Bytes]
}

// CopyTrace copies the message's position in a trace, if it has one, before the message is released.
func (c *Consumer) CopyTrace(record Record) (trace [TraceBytes]byte, ok bool) {
	if record.trace == 0 {
		return trace, false
	}
	copy(trace[:], c.memory.Data[record.trace:])
	return trace, true
}

// Word returns one of the first words of the message, loaded once. The caller has checked the length.
func (c *Consumer) Word(record Record, number uint64) uint64 {
	return load64(c.memory.Data, record.Offset+8+8*number)
}

// MayBeReady reports whether a header is at the cursor: a hint while spinning, to be followed by Peek.
func (c *Consumer) MayBeReady() bool { return load64(c.memory.Data, c.cursor) != 0 }

// Take moves the cursor past the record that Peek returned last, without releasing it.
func (c *Consumer) Take(record Record) {
	c.cursor = record.Offset + RecordBytes(record.Bytes)
	c.seq = SeqAfter(c.seq)
	c.messages++
	c.bytes += record.Bytes
}

// TakeChunk takes the record that Peek returned last and those that follow it without a mark between, until they have
// this number of bytes. They lie one after the other. It returns their bytes and their number.
func (c *Consumer) TakeChunk(first Record, wanted uint64) (bytes uint64, messages uint32) {
	before := c.messages
	c.Take(first)
	for c.cursor-first.Offset < wanted {
		next, ok := c.peekFast()
		if !ok {
			break
		}
		c.Take(next)
	}
	return c.cursor - first.Offset, uint32(c.messages - before)
}

// Chunk returns the records of a chunk in place, until they are released.
func (c *Consumer) Chunk(offset, bytes uint64) []byte { return c.memory.Data[offset:][:bytes:bytes] }

// Cursor is what a consumer changes when it takes records.
type Cursor struct {
	place           Position
	messages, bytes uint64
}

// Cursor returns the place of the next record.
func (c *Consumer) Cursor() Cursor { return Cursor{Position{c.cursor, c.seq}, c.messages, c.bytes} }

// Rewind goes back to a cursor, behind which nothing is released or held. It returns how many records it gives back.
func (c *Consumer) Rewind(to Cursor) uint64 {
	back := c.messages - to.messages
	c.cursor, c.seq, c.messages, c.bytes = to.place.Offset, to.place.Seq, to.messages, to.bytes
	return back
}

// IsProducerWaiting reports whether the producer has announced a sleep until there is more space.
func (c *Consumer) IsProducerWaiting() bool {
	_, sleeps, _ := c.waker.poll()
	return sleeps
}

// ReleaseTaken releases the space of everything taken and not held.
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

// Hold takes the record that Peek returned last, and keeps its space until the ticket is released, in any order.
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

// ReleaseHeld releases a held record. The space becomes free in order, with the oldest held record.
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

// Unreleased returns the number of records that are held.
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

// showCounters writes the counters to the page. Doing so for each message would cost time.
func (c *Consumer) showCounters() {
	*word64(c.memory.Consumer, consumerMessages) = c.messages
	*word64(c.memory.Consumer, consumerBytes) = c.bytes
}

// Counters returns what this consumer and its predecessors in the lane have counted.
func (c *Consumer) Counters() Counters {
	page := c.memory.Consumer
	return Counters{
		Messages: c.messages, Bytes: c.bytes, Waits: load64(page, consumerWaits),
		Sleeps: load64(page, consumerSleeps), WakesSent: load64(page, consumerWakesSent),
	}
}

// NoteRing is to be called before a ring of the producer.
func (c *Consumer) NoteRing(ring LastRing) { storeLastRing(c.memory.Consumer, consumerLastRing, ring) }

// LastRing returns the producer's last ring, as it says.
func (c *Consumer) LastRing() LastRing { return loadLastRing(c.memory.Producer, producerLastRing) }

// CountWait counts a receive that found nothing and is going to wait.
func (c *Consumer) CountWait() { count(c.memory.Consumer, consumerWaits) }

// CountSleep counts a sleep.
func (c *Consumer) CountSleep() { count(c.memory.Consumer, consumerSleeps) }

// IsProducerFencing reports whether the producer fences, so that a sleeper's membarrier is not needed. [fenced]
func (c *Consumer) IsProducerFencing() bool { return load32(c.memory.Producer, producerFenced) == 1 }

// ProducerClosed reports whether the producer has closed. Peek once more after true: what it committed before is
// visible then. [close]
func (c *Consumer) ProducerClosed() bool {
	return load32(c.memory.Producer, producerState) == stateClosed
}

// EndOfCommitted walks over everything committed from the cursor on. It returns where a dead producer's successor
// continues, and how many messages lie before. Errors: [Corrupt].
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

// DeadProducer returns what a successor of the producer needs from its page.
func (c *Consumer) DeadProducer() (floor, generation uint64) {
	return load64(c.memory.Producer, producerFloor), load64(c.memory.Producer, producerGeneration)
}

// Head returns the position before which everything is released.
func (c *Consumer) Head() Position { return Unpack(load64(c.memory.Consumer, consumerHead)) }

// Generation returns the generation of the last message's producer, modulo 2^28.
func (c *Consumer) Generation() uint32 { return c.generation }

// Capacity returns the bytes of data.
func (c *Consumer) Capacity() uint64 { return c.capacity }

// BytesMax returns the largest message in bytes.
func (c *Consumer) BytesMax() uint64 { return c.bytesMax }

// Close marks the consumer closed for good. Ring the sender afterwards.
func (c *Consumer) Close() {
	c.showCounters()
	store32(c.memory.Consumer, consumerState, stateClosed) // [close]
}
