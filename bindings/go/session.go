package pelton

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/pelton-ipc/pelton/bindings/go/internal/calls"
	"github.com/pelton-ipc/pelton/bindings/go/internal/doorbell"
	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/limits"
	"github.com/pelton-ipc/pelton/bindings/go/internal/link"
	"github.com/pelton-ipc/pelton/bindings/go/internal/wait"
)

// session is a client of a service: its lane of replies, and which of its calls are open. Replies without space wait
// in the outbox, in order, and a goroutine writes them as space becomes free. While any waits, no request is taken
// from the client.
type session struct {
	service *Service
	link    *link.Link
	peer    kernel.Peer
	// The largest reply that the client takes.
	bytesMax uint64
	// What the client rings when there is space.
	doorbell *doorbell.Own
	// A large request of which some has come. Only the goroutine that takes requests uses it.
	assembly calls.Assembly
	// For replies that wait for space, and for that request.
	kept limits.Client
	// By slot, 0 or the call in it: its generation and its state.
	calls [calls.CallsMax]atomic.Uint64
	// Replies wait for space.
	isBackpressured atomic.Bool

	mutex sync.Mutex
	out   calls.Outbox
	isGone,
	// The client was notified that nothing more is taken. Only the goroutine that takes requests sets it, and reads
	// it without the lock.
	isDrained,
	// A goroutine writes the queue.
	isFlushing bool
	guard wait.Guard
	spin  wait.Spin
	// The number of open calls.
	open int
	// By slot, the last call that came with a traceparent. It may have ended.
	traceparents map[uint32]tracedCall
	// The contexts of requests that were asked for theirs.
	contexts map[uint64]requestContext
}

type tracedCall struct {
	id          uint64
	traceparent calls.Traceparent
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

// begin opens a call. It returns false if the slot is in use.
func (c *session) begin(id uint64) bool {
	slot := &c.calls[calls.SlotOf(id)]
	// The client learns from the last reply that the slot is free, and that reply comes after the store.
	if slot.Load() != 0 {
		return false
	}
	c.mutex.Lock()
	c.open++
	slot.Store(uint64(calls.GenerationOf(id))<<32 | slotOpen)
	c.mutex.Unlock()
	return true
}

// setTraceparent keeps the traceparent of a call that has begun.
func (c *session) setTraceparent(id uint64, traceparent calls.Traceparent) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.traceparents == nil {
		c.traceparents = map[uint32]tracedCall{}
	}
	c.traceparents[calls.SlotOf(id)] = tracedCall{id, traceparent}
}

func (c *session) traceparentOf(id uint64) string {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if of, ok := c.traceparents[calls.SlotOf(id)]; ok && of.id == id && of.traceparent.IsValid() {
		return of.traceparent.String()
	}
	return ""
}

func (c *session) cancel(id uint64) {
	taken := uint64(calls.GenerationOf(id))<<32 | slotOpen
	// Otherwise it was answered meanwhile.
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
	// A later cancel finds it.
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

// forgetContexts ends all contexts when the client is gone.
func (c *session) forgetContexts() {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	for id := range c.contexts {
		c.endContext(id)
	}
}

// sendLast writes the last record of a call, or queues it. It does not wait.
func (c *session) sendLast(h calls.Header, payload []byte) error {
	c.mutex.Lock()
	c.calls[calls.SlotOf(h.ID)].Store(0)
	c.open--
	if len(c.contexts) > 0 {
		c.endContext(h.ID)
	}
	err := c.write(h, payload)
	c.mutex.Unlock()
	// If it was set before the drain saw this call open, this goroutine has got the lock after the drain.
	if c.service.mustDrain.Load() {
		c.service.notify()
	}
	return err
}

// write is called under the lock.
func (c *session) write(h calls.Header, payload []byte) error {
	if c.isGone {
		return clientGone()
	}
	written, err := c.tryWrite(h, payload)
	if err != nil || written {
		return err
	}
	var kept limits.Share
	// The text that reports this does not count.
	if h.Code != failedMemory && !c.kept.Grow(&kept, uint64(len(payload))) {
		h, payload, err = c.noMemory(h.ID, len(payload))
	} else if !c.isFlushing && !c.out.IsWhole(len(payload)) {
		// It must end once it has begun: so there is memory for all of it before.
		if written, err := c.out.WriteOrPush(h, payload, kept); err != nil {
			return c.failed(err)
		} else if written {
			return nil
		}
		c.flush()
		return nil
	}
	c.out.Push(h, payload, kept)
	c.flush()
	return err
}

// noMemory returns the record that fails a call of which this many bytes cannot be kept, and the error for this side.
func (c *session) noMemory(id uint64, bytes int) (calls.Header, []byte, error) {
	err := c.kept.NoMemory(bytes)
	text := []byte(err.Error())
	return calls.Header{ID: id, Kind: calls.KindFailed, Code: failedMemory}, text[:min(uint64(len(text)),
		c.bytesMax)], err
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

// failed handles the error of a write: the goroutine that takes requests closes the client's lanes.
func (c *session) failed(err error) error {
	err = linkError(err)
	if errors.Is(err, ErrCorrupt) {
		c.link.IsGone.Store(true)
		c.service.receiver.doorbell.Wake()
	}
	return err
}

// flush starts the goroutine that writes the queue.
func (c *session) flush() {
	c.isBackpressured.Store(true)
	if !c.isFlushing {
		c.isFlushing = true
		go c.runFlush()
	}
}

func (c *session) runFlush() {
	err := wait.For(context.Background(), c, c.doorbell, &c.spin, &c.guard)
	c.mutex.Lock()
	c.isFlushing = false
	if err != nil {
		c.out.Clear(clientGone())
	}
	if c.isGone {
		c.tearDown()
	}
	// Between the last poll and this, something may have come.
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

// Only the goroutine that flushes writes while anything waits, so this needs no lock.
func (c *session) MayBeReady() bool { return c.out.Lane.MayBeReady() }

func (c *session) PeerPID() int { return c.peer.PID }

func (c *session) LastRing() lane.LastRing { return c.out.Lane.LastRing() }

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

// sendPart writes a part of a reply. It waits for space until the context ends.
func (c *session) sendPart(ctx context.Context, h calls.Header, payload []byte) error {
	c.mutex.Lock()
	if c.isGone || c.link.IsGone.Load() {
		c.mutex.Unlock()
		return clientGone()
	}
	// A part after the last record would belong to no call.
	if !c.isOpen(h.ID) {
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
	index := slices.IndexFunc(c.out.Queue, func(out calls.Queued) bool { return out.Part == waiting })
	if index < 0 {
		return waiting.Err
	}
	if out := &c.out.Queue[index]; out.Written > 0 {
		// A message that has begun must end. From a copy, because the bytes are the caller's.
		out.Part, out.Bytes = nil, slices.Clone(out.Bytes)
		// Kept in any case: a message in pieces cannot be withdrawn.
		_ = c.kept.Grow(&out.Share, uint64(len(out.Bytes)))
	} else {
		c.out.Queue = slices.Delete(c.out.Queue, index, index+1)
		// The goroutine that flushes may wait for space for it.
		c.doorbell.Wake()
	}
	return ctx.Err()
}

// notify sends a record that belongs to the link, and to no call.
func (c *session) notify(what calls.Kind) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	// An error means that the client is gone, which its lane reports.
	_ = c.write(calls.Header{Kind: what}, nil)
}

// endDrain notifies the client, once all its calls are answered, that nothing more is taken. isPart: of one call only
// some pieces have come. It returns true when the client has been sent everything.
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

// close ends the session: the client is gone, or the service closes. The queue is dropped.
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
		// That goroutine does the rest.
		c.doorbell.Wake()
		return
	}
	c.tearDown()
}

func (c *session) tearDown() {
	c.out.Release()
	c.doorbell.Close()
}
