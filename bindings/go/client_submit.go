package pelton

import (
	"context"
	"errors"
	"slices"

	"github.com/pelton-ipc/pelton/bindings/go/internal/calls"
	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/limits"
)

// What a client sends, and by which link; its stash of replies; cancelling. All of it under the client's lock.

// usable returns why no call can be sent.
func (c *Client) usable(bytes int) error {
	if c.isClosed() {
		return closedHandle()
	}
	if c.fate != nil {
		return c.fate
	}
	if c.drains() {
		return c.lossError(errReturned, nil)
	}
	most, isSomebody := uint64(0), false
	for _, link := range c.links {
		if c.discovery == nil || link.isOpen() {
			most, isSomebody = max(most, link.bytesMax), true
		}
	}
	if isSomebody {
		return checkSize(bytes, most)
	}
	return nil
}

// drains reports whether the only service drains.
func (c *Client) drains() bool {
	return c.discovery == nil && len(c.links) > 0 && c.links[0].isDraining
}

// isOverBudget reports whether so many last replies wait to be taken that no call may be sent. Parts block their lane
// instead.
func (c *Client) isOverBudget() bool {
	return c.stashedBytes-c.stashedPartBytes > c.bytesMax || c.stashedFinals >= calls.CallsMax
}

// submit sends a call. It waits for space and a slot.
func (c *Client) submit(ctx context.Context, call *Call, request []byte, options []CallOption) error {
	call.client = c
	h := calls.Header{Kind: calls.KindRequest}
	if deadline, ok := ctx.Deadline(); ok {
		h.Deadline = calls.ToNS(deadline)
	}
	// The payload: the traceparent, if there is one, then the request.
	payload, isIdempotent := request, false
	for _, option := range options {
		isIdempotent = isIdempotent || option.isIdempotent
		if option.traceparent == "" {
			continue
		}
		if traceparent, ok := calls.ParseTraceparent(option.traceparent); ok {
			h.Traced, payload = true, append(traceparent[:], request...)
		}
	}
	for {
		if err := c.usable(len(request)); err != nil {
			return err
		}
		if c.isOverBudget() {
			return fail.New(fail.ErrRefused, "%d answers of %d bytes in all wait: Await them before asking for more",
				c.stashedFinals, c.stashedBytes-c.stashedPartBytes)
		}
		if slot, ok := c.takeSlot(); ok {
			generation := c.slots[slot].generation + 1
			if generation == 0 {
				generation = 1
			}
			h.ID = uint64(generation)<<32 | uint64(slot)
			link, err := c.writeToAny(h, payload)
			if link == nil {
				c.free = append(c.free, slot)
			}
			if err != nil {
				return err
			}
			if link != nil {
				link.inFlight++
				p := &c.slots[slot]
				call.id = h.ID
				*p = callSlot{
					slot: slot, generation: generation, state: slotWaiting, link: link, call: call, deadline: h.Deadline, request: p.request[:0],
					isIdempotent: isIdempotent, isTraced: h.Traced,
				}
				if c.discovery != nil {
					p.request = append(p.request, payload...)
					c.countSubmission()
				}
				if err := c.waitUntilWritten(ctx, link, len(payload)); err != nil {
					c.abandon(call)
					return err
				}
				return nil
			}
		}
		// wait returns without a check of the context if the condition holds.
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := c.wait(ctx, waiter{what: waitSpaceForCall, bytes: len(request), prefix: h.Prefix()}); err != nil {
			return err
		}
	}
}

// takeSlot takes the slot that was used last: its memory is in the cache.
func (c *Client) takeSlot() (uint32, bool) {
	if n := len(c.free); n > 0 {
		slot := c.free[n-1]
		c.free = c.free[:n-1]
		return slot, true
	}
	if len(c.slots) == calls.CallsMax {
		return 0, false
	}
	c.slots = append(c.slots, callSlot{slot: uint32(len(c.slots))})
	return uint32(len(c.slots) - 1), true
}

func (c *Client) slotFor(id uint64) *callSlot {
	slot := calls.SlotOf(id)
	if int(slot) >= len(c.slots) || c.slots[slot].generation != calls.GenerationOf(id) ||
		c.slots[slot].state == slotFree {
		return nil
	}
	return &c.slots[slot]
}

// waitUntilWritten waits until all of a large request is in the lane.
func (c *Client) waitUntilWritten(ctx context.Context, link *clientLink, bytes int) error {
	if link.out.IsWhole(bytes) || len(link.out.Queue) == 0 {
		return nil
	}
	return c.wait(ctx, waiter{what: waitWritten, link: link})
}

// writeToAny writes to the least busy service that has space. It returns nil if none has.
func (c *Client) writeToAny(h calls.Header, payload []byte) (*clientLink, error) {
	for {
		best := c.leastBusy()
		if best < 0 {
			if c.discovery == nil {
				// The lane of replies reports why.
				return nil, nil
			}
			if isSomebody, err := c.findOpenLink(); err != nil || !isSomebody {
				return nil, err
			}
			continue
		}
		count, isAgain, takes := len(c.links), false, false
		for step := range count {
			link := c.links[(best+step)%count]
			if !link.takes(len(payload) - h.Prefix()) {
				continue
			}
			takes = true
			written, err := link.write(h, payload)
			c.noteWritten(link)
			if errors.Is(err, lane.ErrConsumerClosed) {
				link.isPeerClosed = true
				isAgain = true
				continue
			}
			if err != nil {
				c.loseLink(link, ErrCorrupt, linkError(err))
				isAgain = true
				break
			}
			if written {
				return link, nil
			}
		}
		if c.fate != nil {
			return nil, c.fate
		}
		if !isAgain {
			if !takes {
				return nil, c.usable(len(payload) - h.Prefix())
			}
			return nil, nil
		}
	}
}

// leastBusy returns the index of the link with the fewest calls in flight, round-robin among equals; -1 if there is
// none.
func (c *Client) leastBusy() int {
	best, count := -1, len(c.links)
	for step := range count {
		at := (c.nextOpen + step) % count
		if c.links[at].isOpen() && (best < 0 || c.links[at].inFlight < c.links[best].inFlight) {
			best = at
		}
	}
	c.nextOpen = best + 1
	return best
}

// write writes a message, or as many pieces of it as there is space for. It returns false if it has to wait. A service
// that takes no traceparent gets the request without.
func (l *clientLink) write(h calls.Header, payload []byte) (bool, error) {
	if h.Traced && !l.takesTraced {
		payload = payload[h.Prefix():]
		h.Traced = false
	}
	if len(l.out.Queue) > 0 {
		if done, err := l.out.Flush(); err != nil || !done {
			return false, err
		}
	}
	if l.out.IsWhole(len(payload)) {
		return l.out.Put(h, payload)
	}
	_, err := l.out.WriteOrPush(h, payload, limits.Share{})
	return true, err
}

// noteWritten wakes the leader: a write ends the announcement that this side sleeps, which the leader has to repeat.
func (c *Client) noteWritten(link *clientLink) {
	if link.isArmed && !link.out.Lane.IsArmed() || len(link.out.Queue) > 0 {
		link.isArmed = false
		c.wakeLeader()
	}
}

// wakeLeader makes the leader poll again.
func (c *Client) wakeLeader() {
	if c.leader != nil {
		c.doorbell.Wake()
	}
}

// collect returns the whole reply.
func (c *Client) collect(ctx context.Context, call *Call) ([]byte, error) {
	for isFirst := call.parts == nil; ; isFirst = false {
		answer, err := c.next(ctx, call)
		if err != nil {
			return nil, err
		}
		switch {
		case isFirst:
			call.parts = answer.bytes
		case len(answer.bytes) > c.bytesMax-len(call.parts):
			c.abandon(call)
			return nil, fail.New(fail.ErrTooLarge,
				"the parts of a reply come to more than %d bytes: take them by Parts, or raise CallBytesMax", c.bytesMax)
		default:
			call.parts = append(call.parts, answer.bytes...)
		}
		if answer.kind != calls.KindPart {
			return call.parts, nil
		}
		if call.parts == nil {
			call.parts = []byte{}
		}
	}
}

// next waits for the call's next reply, and takes it.
func (c *Client) next(ctx context.Context, call *Call) (answer, error) {
	if len(call.answers) == 0 {
		if call.isOver {
			return answer{}, fail.New(fail.ErrRefused,
				"the call is over: its last answer was taken, or it was cancelled")
		}
		if call.waiter != nil {
			return answer{}, fail.New(fail.ErrConcurrentUse, "another goroutine awaits this call: one at a time may")
		}
		if err := c.wait(ctx, waiter{what: waitAnswer, call: call}); err != nil {
			return answer{}, err
		}
	}
	call.into = nil
	found := call.answers[0]
	if call.answers[0] = (answer{}); len(call.answers) > 1 {
		call.answers = call.answers[1:]
	} else {
		call.answers = call.answers[:0]
	}
	c.unstash(found)
	if found.kind != calls.KindPart {
		call.isOver = true
	}
	switch {
	case found.lost != nil:
		return found, found.lost
	case found.kind == calls.KindFailed:
		return found, &CallError{found.code, slices.Clone(found.bytes)}
	case found.kind == calls.KindAbandoned:
		return found, ErrAbandoned
	}
	return found, nil
}

// unstash subtracts a reply that is taken.
func (c *Client) unstash(found answer) {
	if found.cost == 0 {
		return
	}
	c.stashedBytes -= found.cost
	if found.kind != calls.KindPart {
		c.stashedFinals--
		return
	}
	isStopped := c.stashedPartBytes > c.bytesMax
	if c.stashedPartBytes -= found.cost; isStopped && c.stashedPartBytes <= c.bytesMax {
		c.wakeLeader()
	}
}

// answerCost is what a stashed reply counts for besides its bytes.
const answerCost = 80

// deliver gives a reply to its call, whose goroutine waits for it or will.
func (c *Client) deliver(call *Call, found answer, isOwn bool) {
	if call.waiter != nil && len(call.answers) == 0 {
		if !isOwn {
			found.bytes = append(call.into[:0], found.bytes...)
		}
	} else {
		if !isOwn {
			found.bytes = slices.Clone(found.bytes)
		}
		found.cost = len(found.bytes) + answerCost
		c.stashedBytes += found.cost
		if found.kind == calls.KindPart {
			c.stashedPartBytes += found.cost
		} else {
			c.stashedFinals++
		}
	}
	call.answers = append(call.answers, found)
	if call.waiter != nil && call.waiter != c.leader {
		call.waiter.wakeUp()
	}
}

// abandon drops the call's replies and cancels it.
func (c *Client) abandon(call *Call) {
	for _, found := range call.answers {
		c.unstash(found)
	}
	call.answers, call.isOver = nil, true
	if call.waiter != nil && call.waiter == c.leader {
		c.wakeLeader()
	} else if call.waiter != nil {
		call.waiter.wakeUp()
	}
	slot := c.slotFor(call.id)
	if slot == nil || slot.call != call || c.isClosed() {
		return
	}
	if slot.link == nil {
		// No service has it.
		number := calls.SlotOf(call.id)
		c.unrouted = slices.DeleteFunc(c.unrouted, func(other uint32) bool { return other == number })
		c.freeSlot(slot)
		c.wakeSpaceWaiters()
		return
	}
	slot.state, slot.call = slotAbandoned, nil
	link := slot.link
	if link.isBackpressured {
		// The lane may be blocked by one of its parts.
		c.wakeLeader()
	}
	h := calls.Header{ID: call.id, Kind: calls.KindCancel}
	written, err := link.write(h, nil)
	switch {
	case errors.Is(err, lane.ErrConsumerClosed):
		// The service is gone, which the lane of replies reports.
	case err != nil:
		c.loseLink(link, ErrCorrupt, linkError(err))
	default:
		if !written {
			link.out.Push(h, nil, limits.Share{})
		}
		c.noteWritten(link)
	}
}

func (c *Client) freeSlot(p *callSlot) {
	p.state, p.call, p.link = slotFree, nil, nil
	if cap(p.request) > keptRequest {
		p.request = nil
	}
	c.free = append(c.free, p.slot)
}
