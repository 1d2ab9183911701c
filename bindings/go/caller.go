package pelton

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"pelton/internal/fail"
)

// caller is a client, as those have it who answer: its lane of replies behind a lock, and which of its calls are open. What there is no room
// for waits in the outbox, in order, and a goroutine writes it as room comes; as long as anything waits nothing is taken of the
// client's lane of requests.
type caller struct {
	service *Service
	link    *link
	peer    Peer
	// The largest reply that the client takes.
	bytesMax uint64
	// What the client rings when there is room.
	bell *bell
	// Of whoever looks for requests: what has come of a large one.
	assembly assembly
	// For replies that wait for room, and for that request.
	kept clientShare
	// By slot, 0 or the call in it: its generation, and what is to be known of it.
	calls [callsMax]atomic.Uint64
	// Replies wait for room.
	isStalled atomic.Bool

	mutex sync.Mutex
	out   outbox
	isGone,
	// It has been told that nothing more is taken: by whoever looks for requests, who alone may ask without the lock.
	isDrained,
	// A goroutine writes what waits.
	isFlushed bool
	guard guard
	spin  spin
	// Open calls.
	open int
	// Of requests whose context was asked for.
	contexts map[uint64]ofRequest
}

type ofRequest struct {
	context context.Context
	cancel  context.CancelFunc
}

const (
	callTaken     = 1
	callCancelled = 2
)

func gone() error {
	return fail.New(fail.ErrPeerDied, "the client has gone: nobody is there to be answered")
}

// begin takes a call in; false if that place is taken.
func (c *caller) begin(id uint64) bool {
	place := &c.calls[slotOf(id)]
	// The client learnt by an answer that the place is free, and that came after the store.
	if place.Load() != 0 {
		return false
	}
	c.mutex.Lock()
	c.open++
	place.Store(uint64(generationOf(id))<<32 | callTaken)
	c.mutex.Unlock()
	return true
}

func (c *caller) cancel(id uint64) {
	taken := uint64(generationOf(id))<<32 | callTaken
	// Otherwise it has been answered meanwhile.
	if !c.calls[slotOf(id)].CompareAndSwap(taken, taken|callCancelled) {
		return
	}
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.endContext(id)
}

func (c *caller) isOpen(id uint64) bool {
	return c.calls[slotOf(id)].Load()>>32 == uint64(generationOf(id))
}

func (c *caller) isCancelled(id uint64) bool {
	return c.link.isGone.Load() || c.calls[slotOf(id)].Load() == uint64(generationOf(id))<<32|callTaken|callCancelled
}

func (c *caller) contextOf(id, deadline uint64) context.Context {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if of, ok := c.contexts[id]; ok {
		return of.context
	}
	var of ofRequest
	if until, ok := timeOf(deadline); ok {
		of.context, of.cancel = context.WithDeadline(context.Background(), until)
	} else {
		of.context, of.cancel = context.WithCancel(context.Background())
	}
	if c.contexts == nil {
		c.contexts = map[uint64]ofRequest{}
	}
	c.contexts[id] = of
	// Who cancels after this finds it.
	if c.isCancelled(id) || !c.isOpen(id) {
		c.endContext(id)
	}
	return of.context
}

func (c *caller) endContext(id uint64) {
	if of, ok := c.contexts[id]; ok {
		of.cancel()
		delete(c.contexts, id)
	}
}

// forgetContexts is for when the client goes.
func (c *caller) forgetContexts() {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	for id := range c.contexts {
		c.endContext(id)
	}
}

// sendLast writes the last of a call, or has it wait for room. Never waits.
func (c *caller) sendLast(h header, payload []byte) error {
	c.mutex.Lock()
	c.calls[slotOf(h.id)].Store(0)
	c.open--
	if len(c.contexts) > 0 {
		c.endContext(h.id)
	}
	err := c.write(h, payload)
	c.mutex.Unlock()
	// Who set it before a look at this client found the call open has given the lock back to this goroutine.
	if c.service.mustDrain.Load() {
		c.service.stir()
	}
	return err
}

// write is behind the lock.
func (c *caller) write(h header, payload []byte) error {
	if c.isGone {
		return gone()
	}
	written, err := c.tryWrite(h, payload)
	if err != nil || written {
		return err
	}
	var kept part
	// The text that says so does not count.
	if h.code != failedMemory && !c.kept.grow(&kept, uint64(len(payload))) {
		h, payload, err = c.noMemory(h.id, len(payload))
	}
	c.out.push(h, payload, kept)
	c.flush()
	return err
}

// noMemory is the failure of a call of which so many bytes cannot be kept, as the client takes it, and the error that says so here.
func (c *caller) noMemory(id uint64, bytes int) (header, []byte, error) {
	err := c.kept.noMemory(bytes)
	text := []byte(err.Error())
	return header{id: id, kind: kindFailed, code: failedMemory}, text[:min(uint64(len(text)), c.bytesMax)], err
}

// tryWrite leaves the lane to the goroutine that flushes, if there is one.
func (c *caller) tryWrite(h header, payload []byte) (bool, error) {
	if c.isFlushed {
		return false, nil
	}
	written, err := c.out.write(h, payload)
	if err != nil {
		err = c.failed(err)
	}
	return written, err
}

// failed is of a write: its client is sent away by whoever takes its requests, who hears of it.
func (c *caller) failed(err error) error {
	err = linkError(err)
	if errors.Is(err, ErrCorrupt) {
		c.link.isGone.Store(true)
		c.service.receiver.bell.kick()
	}
	return err
}

// flush has what waits written as room comes.
func (c *caller) flush() {
	c.isStalled.Store(true)
	if !c.isFlushed {
		c.isFlushed = true
		go c.flushOn()
	}
}

func (c *caller) flushOn() {
	err := await(context.Background(), c, c.bell, &c.spin, &c.guard)
	c.mutex.Lock()
	c.isFlushed = false
	if err != nil {
		c.out.clear(gone())
	}
	if c.isGone {
		c.takeDown()
	}
	// Between the last look and this, something may have come.
	if len(c.out.queue) > 0 {
		c.flush()
	} else {
		c.isStalled.Store(false)
	}
	c.mutex.Unlock()
	// Its requests may be taken again.
	c.service.stir()
}

func (c *caller) Poll() (bool, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.isGone || c.link.isGone.Load() {
		return false, gone()
	}
	all, err := c.out.flush()
	if err != nil {
		return false, c.failed(err)
	}
	return all, nil
}

// Nobody but the goroutine that flushes writes while something waits, so that this needs no lock.
func (c *caller) MayBeReady() bool { return c.out.lane.MayBeReady() }

func (c *caller) Disarm() {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.out.lane.Disarm()
}

func (c *caller) NeedsTimedWait() bool {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	return c.out.lane.NeedsTimedWait()
}

func (c *caller) Arm() (bool, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.isGone || c.link.isGone.Load() {
		return false, gone()
	}
	sleeps, err := c.out.lane.Arm(c.out.wanted(), false, membarrier)
	if err != nil {
		return false, c.failed(err)
	}
	return sleeps, nil
}

// sendPart writes a part of a reply, waiting for room until the context ends.
func (c *caller) sendPart(ctx context.Context, h header, payload []byte) error {
	c.mutex.Lock()
	if c.isGone || c.link.isGone.Load() {
		c.mutex.Unlock()
		return gone()
	}
	// Behind the last answer, a part would be of no call.
	if !c.isOpen(h.id) {
		c.mutex.Unlock()
		return answered()
	}
	written, err := c.tryWrite(h, payload)
	if err != nil || written {
		c.mutex.Unlock()
		return err
	}
	waiting := &waitingPart{done: make(chan struct{})}
	c.out.queue = append(c.out.queue, queued{header: h, bytes: payload, part: waiting})
	c.flush()
	c.mutex.Unlock()
	select {
	case <-waiting.done:
		return waiting.err
	case <-ctx.Done():
	}
	c.mutex.Lock()
	defer c.mutex.Unlock()
	place := slices.IndexFunc(c.out.queue, func(out queued) bool { return out.part == waiting })
	if place < 0 {
		return waiting.err
	}
	if out := &c.out.queue[place]; out.written > 0 {
		// What has begun is to end: of a copy, as the bytes are the caller's.
		out.part, out.bytes = nil, slices.Clone(out.bytes)
		// Kept in any case: a message in pieces cannot be taken back.
		_ = c.kept.grow(&out.kept, uint64(len(out.bytes)))
	} else {
		c.out.queue = slices.Delete(c.out.queue, place, place+1)
		// It may have been what was waited for.
		c.bell.kick()
	}
	return ctx.Err()
}

// tell says something of the link, and not of a call.
func (c *caller) tell(what kind) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	// An error is of the client's end, which its lane tells.
	_ = c.write(header{kind: what}, nil)
}

// endDrain tells the client, once all its calls are answered, that this was all. Of one isPart only some pieces have come. True: everything is
// said.
func (c *caller) endDrain(isPart bool) bool {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	open := c.open
	if isPart {
		open--
	}
	if c.isGone {
		return true
	}
	if open > 0 {
		return false
	}
	if !c.isDrained {
		c.isDrained = true
		_ = c.write(header{kind: kindDrained}, nil)
	}
	return len(c.out.queue) == 0
}

// leave ends it: the client has gone, or the service ends. What waits is nobody's.
func (c *caller) leave() {
	c.forgetContexts()
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.isGone {
		return
	}
	c.isGone = true
	c.out.clear(gone())
	c.out.close()
	c.isStalled.Store(false)
	_, _ = c.guard.close()
	if c.isFlushed {
		// It does the rest.
		c.bell.kick()
		return
	}
	c.takeDown()
}

func (c *caller) takeDown() {
	c.out.takeDown()
	c.bell.close()
}
