package lane

import (
	"errors"
	"sync/atomic"
)

// ErrConsumerClosed reports that the consumer has closed: no process will read further.
var ErrConsumerClosed = errors.New("the consumer has closed")

// Producer is the sending side of a lane.
//
// Free space is what is neither unreleased nor needed for the cleared header after the last record; spec/protocol.md
// has a drawing. The header at the tail is always cleared. Marks and the records of a batch are written before the
// one store at the tail that publishes them all. The producer never reads the data.
type Producer struct {
	memory   Memory
	capacity uint64
	bytesMax uint64
	// That of the lane: PermitTraced may lower the former.
	laneBytesMax uint64
	window       uint64

	tail uint64
	seq  uint32
	// Up to here records fit at the tail without another load of the head.
	limit    uint64
	messages uint64
	bytes    uint64

	head  Position
	floor uint64
	// Where the previous lap ended, while the tail is behind the head.
	lapEnd        uint64
	generationDue uint32
	consumerGone  bool
	// The caller knows that the consumer has closed, and continues without one.
	alone bool
	// Bytes of the data, from its start, that are allocated.
	backed uint64

	// The present reservation: where its first header goes, its size, and what comes between it and the tail.
	at        uint64
	reserved  uint64
	jump      uint64
	jumps     bool
	marks     [2]uint32
	markCount uint64
	// The position in a trace, in a mark after those; nil: none.
	trace *[TraceBytes]byte
	// Such marks are permitted.
	isTraced bool
	batch    batch

	sleeper Sleeper
	waker   waker
}

type batch struct {
	end, limit uint64
	first      uint64
	nextSeq    uint32
	messages   uint32
	bytes      uint64
}

// NewProducer returns the producer of a lane whose records continue at tail, with everything before head released.
// The floor is 0 for a fresh lane, else the dead producer's. The first message gets a mark with the generation in the
// page, if that is above 1.
func NewProducer(memory Memory, tail, head Position, floor uint64, canBarrier bool) (*Producer, error) {
	capacity := uint64(len(memory.Data))
	if err := tail.check("tail", capacity); err != nil {
		return nil, err
	}
	if err := head.check("head", capacity); err != nil {
		return nil, err
	}
	if records := tail.Since(head); records > capacity/8 {
		return nil, &Corrupt{"records between head and tail", records, capacity / 8}
	}
	page := memory.Producer
	if floor > tail.Offset {
		// A floor belongs to a tail past it. A crash between the two stores leaves one that does not.
		floor = 0
	}
	p := &Producer{
		memory:   memory,
		capacity: capacity,
		bytesMax: load64(page, producerBytesMax), laneBytesMax: load64(page, producerBytesMax),
		window:   min(Window, capacity),
		tail:     tail.Offset,
		seq:      tail.Seq,
		messages: load64(page, producerMessages),
		bytes:    load64(page, producerBytes),
		head:     head,
		floor:    floor,
		lapEnd:   capacity,
		backed:   capacity,
		sleeper:  newSleeper(word64(page, producerSleep), canBarrier),
		waker:    newWaker(word64(memory.Receiver, receiverSleep), word32(page, producerFenced)),
	}
	if generation := load64(page, producerGeneration); generation > 1 {
		p.generationDue = markBit | markGeneration<<28 | uint32(generation)&valueMask
	}
	store64(page, producerFloor, floor)
	store64(page, producerTail, tail.Pack())
	store32(page, producerState, stateOpen)
	return p, nil
}

// TakeOverProducer continues in the page of the previous producer of a path channel, whose role this process has:
// after the last message that it committed. How much is allocated is unknown, and the last receiver may have closed.
func TakeOverProducer(memory Memory, bytesMax uint64, canBarrier bool, pid uint32) (*Producer, error) {
	page := memory.Producer
	tail, _, err := walk(memory.Data, bytesMax, Unpack(load64(page, producerTail)))
	if err != nil {
		return nil, err
	}
	begin(page, producerPid, producerState, producerGeneration, pid)
	head := Unpack(load64(memory.Consumer, consumerHead))
	p, err := NewProducer(memory, tail, head, load64(page, producerFloor), canBarrier)
	if err != nil {
		return nil, err
	}
	p.ContinueAlone()
	p.SetBacked(0)
	return p, nil
}

// ContinueAlone continues for the next consumer, even if the last has closed. Only a later close is
// [ErrConsumerClosed].
func (p *Producer) ContinueAlone() {
	p.consumerGone, p.alone, p.limit = false, p.ConsumerClosed(), 0
}

// Consumer returns the generation and the process in the consumer's page. [close]
func (p *Producer) Consumer() (generation uint64, pid uint32) {
	return load64(p.memory.Consumer, consumerGeneration), load32(p.memory.Consumer, consumerPid)
}

// NoteRing is to be called before a ring of the consumer.
func (p *Producer) NoteRing(ring LastRing) { storeLastRing(p.memory.Producer, producerLastRing, ring) }

// LastRing returns the consumer's last ring, as it says.
func (p *Producer) LastRing() LastRing { return loadLastRing(p.memory.Consumer, consumerLastRing) }

// Window returns how many bytes of the lane are used while the receiver keeps up. It is the producer's own choice.
func (p *Producer) Window() uint64 { return p.window }

// SetWindow sets the window.
func (p *Producer) SetWindow(bytes uint64) { p.window, p.limit = min(bytes, p.capacity), 0 }

// BacklogBytes returns the bytes from the head, as last loaded, to the tail.
func (p *Producer) BacklogBytes() uint64 {
	end := p.tail
	if p.tail < p.head.Offset {
		end += p.lapEnd
	}
	// The head is the consumer's word, checked only for being inside the lane.
	return end - min(end, p.head.Offset)
}

// SentBytes returns the committed bytes including headers. The count continues from the value in the page, which may
// be any number.
func (p *Producer) SentBytes() uint64 { return p.bytes + 8*p.messages }

// Backed returns how many bytes, from the start of the data, are allocated. A reservation that needs more returns
// [Unbacked].
func (p *Producer) Backed() uint64 { return p.backed }

// SetBacked sets the allocated bytes.
func (p *Producer) SetBacked(bytes uint64) { p.backed, p.limit = min(bytes, p.capacity), 0 }

// NoteSynced records in the page that everything before tail is on disk.
func (p *Producer) NoteSynced(tail Position) { store64(p.memory.Producer, producerSynced, tail.Pack()) }

// CheckSuccessor checks that a new consumer's page has the head of the dead one.
func (p *Producer) CheckSuccessor(consumer []byte) error {
	if head := Unpack(load64(consumer, consumerHead)); head != p.head {
		return &Corrupt{"the successor's head", head.Pack(), p.head.Pack()}
	}
	return nil
}

// AttachConsumer continues with the pages of a consumer that [Producer.CheckSuccessor] accepted.
func (p *Producer) AttachConsumer(consumer, receiver []byte) {
	p.memory.Consumer, p.memory.Receiver = consumer, receiver
	p.consumerGone, p.limit = false, 0
	p.waker = newWaker(word64(receiver, receiverSleep), word32(p.memory.Producer, producerFenced))
}

// MoveTo continues in other data, to which the caller has copied all but what is [Producer.Idle].
func (p *Producer) MoveTo(data []byte) { p.memory.Data = data }

// PermitTraced permits [Producer.TryReserveTraced]: the lane's consumers know the mark with a trace position. From now
// on the largest message has at most [TracedMessageBytesLimit], so that an empty lane has space for the mark.
func (p *Producer) PermitTraced() {
	p.isTraced = true
	p.bytesMax = min(p.bytesMax, TracedMessageBytesLimit(p.capacity))
}

// IsTraced reports whether [Producer.PermitTraced] was called.
func (p *Producer) IsTraced() bool { return p.isTraced }

// TryReserve reserves space for one message of this number of bytes, with a mark before it if descriptors travel with
// it. It returns false if the lane is full. The slice is written in place until Commit; what is not committed never
// existed.
//
// Errors: [TooLarge], [ErrConsumerClosed], [Corrupt], [Unbacked].
func (p *Producer) TryReserve(bytes uint64, descriptors uint32) ([]byte, bool, error) {
	// bytes is limited before it is added to anything.
	if bytes <= p.bytesMax && descriptors == 0 && p.tail+RecordBytes(bytes)+8 <= p.limit {
		p.at, p.reserved, p.jumps, p.markCount, p.batch.limit = p.tail, bytes, false, 0, 0
		return p.memory.Data[p.tail+8:][:bytes:bytes], true, nil
	}
	if bytes > p.bytesMax {
		return nil, false, &TooLarge{bytes, p.bytesMax}
	}
	return p.reserve(bytes, descriptors, nil)
}

// TryReserveTraced is as TryReserve, for a message with this position in a trace. Only after PermitTraced.
func (p *Producer) TryReserveTraced(bytes uint64, trace *[TraceBytes]byte) ([]byte, bool, error) {
	if !p.isTraced {
		panic("lane: a trace position in a lane that has none")
	}
	if bytes > p.bytesMax {
		return nil, false, &TooLarge{bytes, p.bytesMax}
	}
	return p.reserve(bytes, 0, trace)
}

func (p *Producer) reserve(bytes uint64, descriptors uint32, trace *[TraceBytes]byte) ([]byte, bool, error) {
	fits, err := p.makeRoom(RecordBytes(bytes), descriptors, trace)
	if err != nil || !fits {
		return nil, false, err
	}
	p.reserved = bytes
	return p.memory.Data[p.at+8:][:bytes:bytes], true, nil
}

// makeRoom sets where the next records go, and what comes before them. It returns false if there is no space.
func (p *Producer) makeRoom(records uint64, descriptors uint32, trace *[TraceBytes]byte) (bool, error) {
	if p.consumerGone {
		return false, ErrConsumerClosed
	}
	p.batch.limit = 0
	p.markCount = 0
	if p.generationDue != 0 {
		p.marks[0] = p.generationDue
		p.markCount = 1
	}
	if descriptors > 0 {
		p.marks[p.markCount] = markBit | markDescriptors<<28 | descriptors
		p.markCount++
	}
	p.trace = trace
	// The cleared header after the last record is also where the next jump goes.
	start, fits, err := p.place(p.marksBytes() + records + 8)
	if err != nil || !fits {
		return false, err
	}
	p.sleeper.Disarm()
	p.jumps, p.jump = start != p.tail, start
	p.at = start + p.marksBytes()
	return true, nil
}

// marksBytes returns the bytes of the reservation's marks, without a jump.
func (p *Producer) marksBytes() uint64 {
	if p.trace != nil {
		return 8*p.markCount + traceMarkBytes
	}
	return 8 * p.markCount
}

// place finds need contiguous bytes, and sets the limit for the records after them. The letters name the cases of
// "Where a record may go" in spec/protocol.md.
func (p *Producer) place(need uint64) (uint64, bool, error) {
	for polled := false; ; polled = true {
		tail, head := p.tail, p.head.Offset
		pastWindow := tail+need > p.window
		end := head
		if tail >= head {
			end = p.capacity
		}
		fits := tail+need <= end
		front := tail >= head && need <= head && head >= p.floor
		if front && (pastWindow || !fits) {
			p.limit = 0
			return p.backedFor(0, need) // B
		}
		if fits && !pastWindow {
			p.limit = p.allow(min(end, p.window, tail+need+fastPathBytesMax))
			return p.backedFor(tail, need) // A
		}
		if polled {
			if fits {
				p.limit = p.allow(min(end, tail+need+pollEvery))
				return p.backedFor(tail, need) // A, beyond the window
			}
			if behind := (p.lapEnd + 8 + 63) &^ 63; tail < head && behind+need <= p.capacity {
				p.limit = 0
				return p.backedFor(behind, need) // C
			}
			return 0, false, nil
		}
		if err := p.poll(); err != nil {
			return 0, false, err
		}
	}
}

// fitsInWindow reports whether a message of this number of bytes has a place at the tail, within the window, by the
// head as last loaded.
func (p *Producer) fitsInWindow(bytes uint64) bool {
	end := p.window
	if p.tail < p.head.Offset {
		end = min(end, p.head.Offset)
	}
	return p.tail+8+RecordBytes(bytes)+8 <= end
}

// hasSpace reports whether there is space for a message of this number of bytes with all possible marks. If that has to
// be allocated, the reservation finds out whether it can be.
func (p *Producer) hasSpace(bytes uint64) (bool, error) {
	marks := uint64(16)
	if p.isTraced {
		marks += traceMarkBytes
	}
	_, there, err := p.place(marks + RecordBytes(min(bytes, p.bytesMax)) + 8)
	var unbacked *Unbacked
	if errors.As(err, &unbacked) {
		return true, nil
	}
	return there, err
}

// shortenFastPath makes the fast path end at most this number of bytes after the tail.
func (p *Producer) shortenFastPath(bytes uint64) { p.limit = min(p.limit, p.tail+bytes) }

// backedFor returns the place if it is allocated.
func (p *Producer) backedFor(place, need uint64) (uint64, bool, error) {
	if place+need > p.backed {
		p.limit = 0
		return 0, false, &Unbacked{place + need}
	}
	p.limit = min(p.limit, p.backed)
	return place, true, nil
}

// allow returns up to where messages fit without another check: nowhere while the next one needs its generation's
// mark.
func (p *Producer) allow(limit uint64) uint64 {
	if p.generationDue != 0 {
		return 0
	}
	return limit
}

func (p *Producer) poll() error {
	if !p.alone && p.consumerStateClosed() {
		return ErrConsumerClosed
	}
	p.alone = p.alone && p.ConsumerClosed()
	_, err := p.PollHead()
	return err
}

// PollHead loads the consumer's head, even if that has closed, and returns the number of unreleased messages.
func (p *Producer) PollHead() (uint64, error) {
	head := Unpack(load64(p.memory.Consumer, consumerHead)) // [release]
	if head != p.head {
		if err := head.check("head", p.capacity); err != nil {
			return 0, err
		}
		if tail := p.Tail(); head.Since(p.head) > tail.Since(p.head) {
			return 0, &Corrupt{"seq at the head", uint64(head.Seq), uint64(tail.Seq)}
		}
		p.head = head
	}
	depth := p.Unreleased()
	if depth > load64(p.memory.Producer, producerDepthMax) {
		store64(p.memory.Producer, producerDepthMax, depth)
	}
	return depth, nil
}

// Commit publishes the reserved message, of which the first bytes are used.
func (p *Producer) Commit(bytes uint64) Wake {
	if bytes > p.reserved || p.batch.limit != 0 {
		panic("lane: commit of more than was reserved")
	}
	p.reserved = 0
	end := p.at + RecordBytes(bytes)
	*word64(p.memory.Data, end) = 0
	p.publish(uint64(p.seq)<<32 | bytes)
	return p.advance(end, SeqAfter(p.seq), 1, bytes)
}

// publish stores the header of the first record, and before it whatever comes between it and the tail.
func (p *Producer) publish(word uint64) {
	data := p.memory.Data
	if p.at == p.tail {
		store64(data, p.tail, word) // [publish]
		return
	}
	*word64(data, p.at) = word
	publishMark := func(offset uint64, low uint32) {
		mark := uint64(p.seq)<<32 | uint64(low)
		if offset == p.tail {
			store64(data, offset, mark) // [publish]
		} else {
			*word64(data, offset) = mark
		}
	}
	offset := p.at
	if p.trace != nil {
		offset -= traceMarkBytes
		copy(data[offset+8:], p.trace[:])
		publishMark(offset, markBit|markTrace<<28|TraceBytes)
	}
	for i := p.markCount; i > 0; i-- {
		offset -= 8
		publishMark(offset, p.marks[i-1])
	}
	if p.jumps {
		if p.jump > p.tail {
			// Before the jump: otherwise a successor would take the front for free.
			p.floor = p.jump
			store64(p.memory.Producer, producerFloor, p.floor)
		}
		store64(data, p.tail, uint64(p.seq)<<32|markBit|markJump<<28|p.jump/64) // [publish]
		if p.jump < p.tail {
			p.floor = 0
			store64(p.memory.Producer, producerFloor, 0)
			p.lapEnd = p.tail
		}
	}
	p.generationDue = 0
}

// advance moves the tail past what was just published, and checks whether to ring.
func (p *Producer) advance(end uint64, nextSeq, messages uint32, bytes uint64) Wake {
	p.tail, p.seq = end, nextSeq
	p.messages += uint64(messages)
	p.bytes += bytes
	page := p.memory.Producer
	// Plain stores: a successor reads the tail after it learned of the death by a system call, and walks on from
	// here. A consumer that joins a broadcast by itself reads it at any time, and takes it for one of an earlier time. The
	// others are statistics.
	*word64(page, producerTail) = Position{end, nextSeq}.Pack()
	*word64(page, producerMessages) = p.messages
	*word64(page, producerBytes) = p.bytes
	word, sleeps, isClosed := p.waker.poll()
	if !sleeps && !isClosed {
		return false
	}
	return p.attend(word, isClosed)
}

func (p *Producer) attend(word uint64, isClosed bool) Wake {
	if isClosed && p.alone {
		return false
	}
	if isClosed {
		// The next reservation reports it.
		p.limit, p.consumerGone = 0, true
		return false
	}
	p.waker.noteRing(word)
	count(p.memory.Producer, producerWakesSent)
	return Ring
}

// TryBeginBatch begins a batch of messages whose records take this number of bytes (the sum of [RecordBytes]). It
// returns false if there is no space. Errors as TryReserve.
func (p *Producer) TryBeginBatch(records uint64) (bool, error) {
	if most := RecordBytes(p.bytesMax); records > most {
		return false, &TooLarge{records, most}
	}
	fits, err := p.makeRoom(records, 0, nil)
	if err != nil || !fits {
		return false, err
	}
	p.batch = batch{end: p.at, limit: p.at + records, nextSeq: p.seq}
	return true, nil
}

// BatchMessage returns space for the next message of the batch, or false if it is used up.
func (p *Producer) BatchMessage(bytes uint64) ([]byte, bool) {
	b := &p.batch
	if bytes > p.bytesMax || b.end+RecordBytes(bytes) > b.limit {
		return nil, false
	}
	offset := b.end
	b.end += RecordBytes(bytes)
	if b.messages == 0 {
		b.first = bytes
	} else {
		// Not reachable before the batch's first header is published. [publish]
		*word64(p.memory.Data, offset) = uint64(b.nextSeq)<<32 | bytes
	}
	b.nextSeq = SeqAfter(b.nextSeq)
	b.messages++
	b.bytes += bytes
	return p.memory.Data[offset+8:][:bytes:bytes], true
}

// CommitBatch publishes the batch's messages by one store.
func (p *Producer) CommitBatch() Wake {
	b := p.batch
	p.batch = batch{}
	if b.messages == 0 {
		return false
	}
	*word64(p.memory.Data, b.end) = 0
	p.publish(uint64(p.seq)<<32 | b.first)
	return p.advance(b.end, b.nextSeq, b.messages, b.bytes)
}

// Arm announces a sleep until there is space for a message of this number of bytes with all possible marks, or, if
// empty, until everything is released. It returns true if the condition still does not hold: then sleep. membarrier
// is as for [Sleeper.Arm].
//
// Errors: [ErrConsumerClosed], [Corrupt]: do not sleep either.
func (p *Producer) Arm(bytes uint64, empty bool, membarrier func() bool) (bool, error) {
	if err := p.poll(); err != nil {
		return false, err
	}
	// Half of the unreleased messages: after the first one the producer would be woken for each, after the last it
	// would be late.
	wanted := p.Unreleased()
	if !empty {
		wanted = (wanted + 1) / 2
	}
	target := p.head.Seq + uint32(wanted)
	if target < p.head.Seq {
		target = SeqAfter(target) // the numbering skips 0
	}
	store64(p.memory.Producer, producerRoomSeq, uint64(target))
	p.sleeper.Arm(p.IsConsumerFencing, membarrier)
	err := p.poll()
	there := err != nil
	if err == nil && empty {
		there = p.Unreleased() == 0
	} else if err == nil {
		there, err = p.hasSpace(bytes)
		there = there || err != nil
	}
	if there {
		p.sleeper.Disarm()
		return false, err
	}
	count(p.memory.Producer, producerSleeps)
	return true, nil
}

// Disarm announces that the producer is awake.
func (p *Producer) Disarm() { p.sleeper.Disarm() }

// IsArmed reports whether the consumer is to ring.
func (p *Producer) IsArmed() bool { return p.sleeper.IsArmed() }

// LoseBarrier makes the consumer fence from now on: the kernel refused membarrier.
func (p *Producer) LoseBarrier() { p.sleeper.LoseBarrier() }

// IsConsumerFencing reports whether the consumer fences, so that a sleeper's membarrier is not needed. [fenced]
func (p *Producer) IsConsumerFencing() bool { return load32(p.memory.Consumer, consumerFenced) == 1 }

// NeedsTimedWait reports whether a sleep must end after a millisecond, because the consumer is not yet known to
// fence.
func (p *Producer) NeedsTimedWait() bool {
	return p.sleeper.NeedsFencedWakers() && !p.IsConsumerFencing()
}

// Counters returns what this producer and its predecessors in the lane have counted.
func (p *Producer) Counters() Counters {
	page := p.memory.Producer
	return Counters{
		Messages: p.messages, Bytes: p.bytes, Waits: load64(page, producerWaits),
		Sleeps: load64(page, producerSleeps), WakesSent: load64(page, producerWakesSent),
	}
}

// CountWait counts a send that found no space and is going to wait.
func (p *Producer) CountWait() { count(p.memory.Producer, producerWaits) }

// MayBeReady reports whether the head has moved since it was last loaded: a hint while spinning.
func (p *Producer) MayBeReady() bool {
	return load64(p.memory.Consumer, consumerHead) != p.head.Pack()
}

func (p *Producer) consumerStateClosed() bool {
	return load32(p.memory.Consumer, consumerState) == stateClosed // [close]
}

// HasNewlyClosed reports whether the consumer has closed without the caller's knowledge.
func (p *Producer) HasNewlyClosed() bool { return !p.alone && p.ConsumerClosed() }

// ConsumerClosed reports whether the consumer has closed, by its state or its sleep word.
func (p *Producer) ConsumerClosed() bool {
	return p.consumerStateClosed() || atomic.LoadUint64(p.waker.word)&closed != 0
}

// Tail returns the position of the next record.
func (p *Producer) Tail() Position { return Position{p.tail, p.seq} }

// Head returns the consumer's head, as last loaded.
func (p *Producer) Head() Position { return p.head }

// Unreleased returns the number of messages that were committed and not released, by the head as last loaded.
func (p *Producer) Unreleased() uint64 { return p.Tail().Since(p.head) }

// Capacity returns the bytes of data.
func (p *Producer) Capacity() uint64 { return p.capacity }

// LaneBytesMax returns the largest message of the lane, as its next consumer has to know it; BytesMax may be lower.
func (p *Producer) LaneBytesMax() uint64 { return p.laneBytesMax }

// BytesMax returns the largest message in bytes.
func (p *Producer) BytesMax() uint64 { return p.bytesMax }

// Generation returns this producer's generation.
func (p *Producer) Generation() uint64 { return load64(p.memory.Producer, producerGeneration) }

// Idle returns the part of the data that has no record and will not be written before the tail comes there again, as
// two ranges of offset and bytes. Either may be empty.
func (p *Producer) Idle() [2][2]uint64 {
	tail, head := p.tail+8, p.head.Offset
	if p.tail >= head {
		front := uint64(0)
		if head >= p.floor {
			front = head
		}
		return [2][2]uint64{{0, front}, {tail, p.capacity - tail}}
	}
	behind := min(p.lapEnd+8, p.capacity)
	gap := uint64(0)
	if head > tail {
		gap = head - tail
	}
	return [2][2]uint64{{tail, gap}, {behind, p.capacity - behind}}
}

// Close marks the producer closed for good. Ring the receiver afterwards.
func (p *Producer) Close() {
	store32(p.memory.Producer, producerState, stateClosed) // [close]
	p.sleeper.Close()
}
