package pelton

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"pelton/internal/calls"
	"pelton/internal/doorbell"
	"pelton/internal/fail"
	"pelton/internal/kernel"
	"pelton/internal/limits"
	"pelton/internal/link"
	"pelton/internal/wait"
)

// session is a client, as those have it who answer: its lane of replies behind a lock, and which of its calls are open. What there is no room
// for waits in the outbox, in order, and a goroutine writes it as room comes; as long as anything waits nothing is taken of the
// client's lane of requests.
type session struct {
	service *Service
	link    *link.Link
	peer    kernel.Peer
	// The largest reply that the client takes.
	bytesMax uint64
	// What the client rings when there is room.
	bell *doorbell.Own
	// Of whoever looks for requests: what has come of a large one.
	assembly calls.Assembly
	// For replies that wait for room, and for that request.
	kept limits.Client
	// By slot, 0 or the call in it: its generation, and what is to be known of it.
	calls [calls.CallsMax]atomic.Uint64
	// Replies wait for room.
	isBackpressured atomic.Bool

	mutex sync.Mutex
	out   calls.Outbox
	isGone,
	// It has been told that nothing more is taken: by whoever looks for requests, who alone may ask without the lock.
	isDrained,
	// A goroutine writes what waits.
	isFlushing bool
	guard wait.Guard
	spin  wait.Spin
	// Open calls.
	open int
	// Of requests whose context was asked for.
	contexts map[uint64]requestContext
}

type requestContext struct {
	context context.Context
	cancel  context.CancelFunc
}

const (
	slotOpen      = 1
	slotCancelled = 2
)

func clientGone() error {
	return fail.New(fail.ErrPeerDied, "the client has gone: nobody is there to be answered")
}

// begin takes a call in; false if that place is taken.
func (c *session) begin(id uint64) bool {
	place := &c.calls[calls.SlotOf(id)]
	// The client learnt by an answer that the place is free, and that came after the store.
	if place.Load() != 0 {
		return false
	}
	c.mutex.Lock()
	c.open++
	place.Store(uint64(calls.GenerationOf(id))<<32 | slotOpen)
	c.mutex.Unlock()
	return true
}

func (c *session) cancel(id uint64) {
	taken := uint64(calls.GenerationOf(id))<<32 | slotOpen
	// Otherwise it has been answered meanwhile.
	if !c.calls[calls.SlotOf(id)].CompareAndSwap(taken, taken|slotCancelled) {
		return
	}
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.endContext(id)
}

func (c *session) isOpen(id uint64) bool {
	return c.calls[calls.SlotOf(id)].Load()>>32 == uint64(calls.GenerationOf(id))
}

func (c *session) isCancelled(id uint64) bool {
	return c.link.IsGone.Load() || c.calls[calls.SlotOf(id)].Load() == uint64(calls.GenerationOf(id))<<32|slotOpen|slotCancelled
}

func (c *session) contextOf(id, deadline uint64) context.Context {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if of, ok := c.contexts[id]; ok {
		return of.context
	}
	var of requestContext
	if until, ok := calls.FromNS(deadline); ok {
		of.context, of.cancel = context.WithDeadline(context.Background(), until)
	} else {
		of.context, of.cancel = context.WithCancel(context.Background())
	}
	if c.contexts == nil {
		c.contexts = map[uint64]requestContext{}
	}
	c.contexts[id] = of
	// Who cancels after this finds it.
	if c.isCancelled(id) || !c.isOpen(id) {
		c.endContext(id)
	}
	return of.context
}

func (c *session) endContext(id uint64) {
	if of, ok := c.contexts[id]; ok {
		of.cancel()
		delete(c.contexts, id)
	}
}

// forgetContexts is for when the client goes.
func (c *session) forgetContexts() {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	for id := range c.contexts {
		c.endContext(id)
	}
}

// sendLast writes the last of a call, or has it wait for room. Never waits.
func (c *session) sendLast(h calls.Header, payload []byte) error {
	c.mutex.Lock()
	c.calls[calls.SlotOf(h.Id)].Store(0)
	c.open--
	if len(c.contexts) > 0 {
		c.endContext(h.Id)
	}
	err := c.write(h, payload)
	c.mutex.Unlock()
	// Who set it before a look at this client found the call open has given the lock back to this goroutine.
	if c.service.mustDrain.Load() {
		c.service.notify()
	}
	return err
}

// write is behind the lock.
func (c *session) write(h calls.Header, payload []byte) error {
	if c.isGone {
		return clientGone()
	}
	written, err := c.tryWrite(h, payload)
	if err != nil || written {
		return err
	}
	var kept limits.Share
	// The text that says so does not count.
	if h.Code != failedMemory && !c.kept.Grow(&kept, uint64(len(payload))) {
		h, payload, err = c.noMemory(h.Id, len(payload))
	}
	c.out.Push(h, payload, kept)
	c.flush()
	return err
}

// tryWrite leaves the lane to the goroutine that flushes, if there is one.
func (c *session) tryWrite(h calls.Header, payload []byte) (bool, error) {
	if c.isFlushing {
		return false, nil
	}
	written, err := c.out.Write(h, payload)
	if err != nil {
		err = c.failed(err)
	}
	return written, err
}

// failed is of a write: its client is sent away by whoever takes its requests, who hears of it.
func (c *session) failed(err error) error {
	err = linkError(err)
	if errors.Is(err, ErrCorrupt) {
		c.link.IsGone.Store(true)
		c.service.receiver.bell.Wake()
	}
	return err
}

// flush has what waits written as room comes.
func (c *session) flush() {
	c.isBackpressured.Store(true)
	if !c.isFlushing {
		c.isFlushing = true
		go c.runFlush()
	}
}

func (c *session) runFlush() {
	err := wait.For(context.Background(), c, c.bell, &c.spin, &c.guard)
	c.mutex.Lock()
	c.isFlushing = false
	if err != nil {
		c.out.Clear(clientGone())
	}
	if c.isGone {
		c.tearDown()
	}
	// Between the last look and this, something may have come.
	if len(c.out.Queue) > 0 {
		c.flush()
	} else {
		c.isBackpressured.Store(false)
	}
	c.mutex.Unlock()
	// Its requests may be taken again.
	c.service.notify()
}

func (c *session) Poll() (bool, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.isGone || c.link.IsGone.Load() {
		return false, clientGone()
	}
	all, err := c.out.Flush()
	if err != nil {
		return false, c.failed(err)
	}
	return all, nil
}

// Nobody but the goroutine that flushes writes while something waits, so that this needs no lock.
func (c *session) MayBeReady() bool { return c.out.Lane.MayBeReady() }

func (c *session) Disarm() {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.out.Lane.Disarm()
}

func (c *session) NeedsTimedWait() bool {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	return c.out.Lane.NeedsTimedWait()
}

func (c *session) Arm() (bool, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.isGone || c.link.IsGone.Load() {
		return false, clientGone()
	}
	sleeps, err := c.out.Lane.Arm(c.out.Wanted(), false, kernel.Membarrier)
	if err != nil {
		return false, c.failed(err)
	}
	return sleeps, nil
}

// sendPart writes a part of a reply, waiting for room until the context ends.
func (c *session) sendPart(ctx context.Context, h calls.Header, payload []byte) error {
	c.mutex.Lock()
	if c.isGone || c.link.IsGone.Load() {
		c.mutex.Unlock()
		return clientGone()
	}
	// Behind the last answer, a part would be of no call.
	if !c.isOpen(h.Id) {
		c.mutex.Unlock()
		return alreadyAnswered()
	}
	written, err := c.tryWrite(h, payload)
	if err != nil || written {
		c.mutex.Unlock()
		return err
	}
	waiting := &calls.WaitingPart{Done: make(chan struct{})}
	c.out.Queue = append(c.out.Queue, calls.Queued{Header: h, Bytes: payload, Part: waiting})
	c.flush()
	c.mutex.Unlock()
	select {
	case <-waiting.Done:
		return waiting.Err
	case <-ctx.Done():
	}
	c.mutex.Lock()
	defer c.mutex.Unlock()
	place := slices.IndexFunc(c.out.Queue, func(out calls.Queued) bool { return out.Part == waiting })
	if place < 0 {
		return waiting.Err
	}
	if out := &c.out.Queue[place]; out.Written > 0 {
		// What has begun is to end: of a copy, as the bytes are the caller's.
		out.Part, out.Bytes = nil, slices.Clone(out.Bytes)
		// Kept in any case: a message in pieces cannot be taken back.
		_ = c.kept.Grow(&out.Share, uint64(len(out.Bytes)))
	} else {
		c.out.Queue = slices.Delete(c.out.Queue, place, place+1)
		// It may have been what was waited for.
		c.bell.Wake()
	}
	return ctx.Err()
}

// notify says something of the link, and not of a call.
func (c *session) notify(what calls.Kind) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	// An error is of the client's end, which its lane tells.
	_ = c.write(calls.Header{Kind: what}, nil)
}

// endDrain tells the client, once all its calls are answered, that this was all. Of one isPart only some pieces have come. True: everything is
// said.
func (c *session) endDrain(isPart bool) bool {
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
		_ = c.write(calls.Header{Kind: calls.KindDrained}, nil)
	}
	return len(c.out.Queue) == 0
}

// close ends it: the client has gone, or the service ends. What waits is nobody's.
func (c *session) close() {
	c.forgetContexts()
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.isGone {
		return
	}
	c.isGone = true
	c.out.Clear(clientGone())
	c.out.Close()
	c.isBackpressured.Store(false)
	_, _ = c.guard.Close()
	if c.isFlushing {
		// It does the rest.
		c.bell.Wake()
		return
	}
	c.tearDown()
}

func (c *session) tearDown() {
	c.out.Release()
	c.bell.Close()
}
