package pelton

import (
	"context"
	"errors"
	"slices"

	"github.com/pelton-ipc/pelton/bindings/go/internal/calls"
	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/wait"
)

// How the goroutines of a client wait. One of them leads and polls for all; it hands that on when its own condition
// holds. All of it under the client's lock, except the methods of clientWait, which take it.

// waiter is a waiting goroutine.
type waiter struct {
	what waitsFor
	call *Call
	// Of a request: its payload, which alone counts towards the largest request, and the traceparent before it.
	bytes, prefix int
	// Whose queue is to be empty.
	link *clientLink
	// It waits for another poll than this one.
	polls          uint64
	wake           chan struct{}
	next, previous *waiter
}

type waitsFor int

const (
	waitAnswer waitsFor = iota
	// And a slot.
	waitSpaceForCall
	waitSpace
	waitWritten
	waitPoll
)

func (w *waiter) wakeUp() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// wait waits until the condition holds or may hold, or the context ends.
func (c *Client) wait(ctx context.Context, want waiter) error {
	w := c.enter(want)
	defer c.leave(w)
	for {
		if there, err := c.check(w); there || err != nil {
			return err
		}
		if c.leader == nil {
			c.leader = w
			c.watched = append(c.watched[:0], c.links...)
			c.mutex.Unlock()
			err := wait.For(ctx, (*clientWait)(c), c.doorbell, &c.spin, &c.guard)
			c.mutex.Lock()
			c.leader = nil
			c.closeLost()
			if c.isClosed() {
				return c.endWith(closedHandle())
			}
			if err != nil {
				return err
			}
			continue
		}
		if w.what != waitAnswer {
			c.spaceWaiters = append(c.spaceWaiters, w)
		}
		if w.what != waitAnswer || c.isLeaderBackpressured() {
			// The leader has to wait for this too.
			c.doorbell.Wake()
		}
		c.mutex.Unlock()
		var err error
		select {
		case <-w.wake:
		case <-ctx.Done():
			err = ctx.Err()
		case <-c.context.Done():
			err = closedHandle()
		}
		c.mutex.Lock()
		if c.nextLeader == w {
			c.nextLeader = nil
		}
		if w.what != waitAnswer {
			c.spaceWaiters = slices.DeleteFunc(c.spaceWaiters, func(other *waiter) bool { return other == w })
		}
		if err != nil {
			if there, _ := c.check(w); there && ctx.Err() == nil {
				return nil
			}
			return err
		}
	}
}

func (c *Client) isLeaderBackpressured() bool {
	return slices.ContainsFunc(c.links, func(link *clientLink) bool { return link.isBackpressured })
}

// endWith tears the client down: it was closed while this goroutine led.
func (c *Client) endWith(err error) error {
	c.mutex.Unlock()
	c.tearDown()
	c.mutex.Lock()
	return err
}

func (c *Client) enter(want waiter) *waiter {
	var w *waiter
	if n := len(c.idle); n > 0 {
		w = c.idle[n-1]
		c.idle = c.idle[:n-1]
	} else {
		w = &waiter{wake: make(chan struct{}, 1)}
	}
	want.wake = w.wake
	*w = want
	if w.what == waitAnswer {
		w.call.waiter = w
		if w.next = c.awaiting; w.next != nil {
			w.next.previous = w
		}
		c.awaiting = w
	}
	return w
}

func (c *Client) leave(w *waiter) {
	if w.what == waitAnswer {
		w.call.waiter = nil
		if w.next != nil {
			w.next.previous = w.previous
		}
		if w.previous != nil {
			w.previous.next = w.next
		} else {
			c.awaiting = w.next
		}
	}
	select {
	case <-w.wake:
	default:
	}
	*w = waiter{wake: w.wake}
	c.idle = append(c.idle, w)
	c.passOn()
}

// passOn wakes a waiting goroutine to lead, if there is no leader.
func (c *Client) passOn() {
	if c.leader != nil || c.nextLeader != nil {
		return
	}
	if c.nextLeader = c.awaiting; c.nextLeader == nil && len(c.spaceWaiters) > 0 {
		c.nextLeader = c.spaceWaiters[0]
	}
	if c.nextLeader != nil {
		c.nextLeader.wakeUp()
	}
}

// check reports whether the condition holds or may hold.
func (c *Client) check(w *waiter) (bool, error) {
	switch {
	case w.what == waitAnswer && (len(w.call.answers) > 0 || w.call.isOver):
		if len(w.call.answers) == 0 {
			return false, fail.New(fail.ErrRefused, "the call was cancelled")
		}
		return true, nil
	case c.isClosed():
		return false, closedHandle()
	case w.what == waitAnswer:
		return false, nil
	case w.what == waitWritten:
		return w.link.isLost || len(w.link.out.Queue) == 0, nil
	case w.what == waitPoll:
		return w.polls != c.polls, nil
	case c.fate != nil || c.drains():
		return true, nil
	}
	if w.what == waitSpaceForCall && (c.isOverBudget() || !c.hasFreeSlot()) {
		return c.isOverBudget(), nil
	}
	isSomebody := false
	for _, link := range c.links {
		if !link.takes(w.bytes) {
			continue
		}
		isSomebody = true
		done, err := link.out.Flush()
		if bytes := link.recordBytes(w.bytes, w.prefix); done && err == nil && link.out.IsWhole(bytes) {
			_, done, err = link.out.Lane.TryReserve(uint64(calls.HeaderSize+bytes), 0)
		}
		if done || err != nil {
			// The next attempt finds the error.
			return true, nil
		}
	}
	// If no service is connecting either, the next attempt reports that.
	return !isSomebody && c.discovery != nil && len(c.discovery.connecting) == 0, nil
}

func (c *Client) hasFreeSlot() bool { return len(c.free) > 0 || len(c.slots) < calls.CallsMax }

// wakeSpaceWaiters wakes the goroutines for which there may be space.
func (c *Client) wakeSpaceWaiters() {
	places := len(c.free) + calls.CallsMax - len(c.slots)
	for _, w := range c.spaceWaiters {
		if there, err := c.check(w); !there && err == nil {
			continue
		}
		if w.what == waitSpaceForCall {
			if places == 0 {
				continue
			}
			places--
		}
		w.wakeUp()
	}
}

// clientWait is a client whose leader waits.
type clientWait Client

func (w *clientWait) Poll() (bool, error) {
	c := (*Client)(w)
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.poll(c.leader)
	c.watched = append(c.watched[:0], c.links...)
	return c.check(c.leader)
}

// It reads lanes that only the leader takes from, of links that only the leader closes.
func (w *clientWait) MayBeReady() bool {
	c := (*Client)(w)
	if c.leader.what != waitAnswer {
		return true
	}
	for _, link := range c.watched {
		if !link.isBackpressured && link.in.Consumer.MayBeReady() {
			return true
		}
	}
	return false
}

func (w *clientWait) PeerPID() int {
	if len(w.watched) == 0 {
		return 0
	}
	return w.watched[len(w.watched)-1].in.Link.Peer.PID
}

func (w *clientWait) LastRing() lane.LastRing {
	if len(w.watched) != 1 {
		return lane.LastRing{}
	}
	return w.watched[0].in.Consumer.LastRing()
}

func (w *clientWait) Arm() (bool, error) {
	c := (*Client)(w)
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.sleeper.Arm(c.areServicesFencing, kernel.Membarrier)
	c.poll(c.leader)
	there, err := c.check(c.leader)
	if there = there || err != nil || c.hasMore() || !c.armForSpace(); there {
		c.withdraw()
		return false, err
	}
	return true, nil
}

// hasMore reports whether there is more than one poll takes: no service rings for what came before the sleep was
// announced.
func (c *Client) hasMore() bool {
	return slices.ContainsFunc(c.links, func(link *clientLink) bool {
		return !link.isBackpressured &&
			link.in.Consumer.MayBeReady()
	})
}

// armForSpace makes services ring when there is space for what waits. It returns false if there is some.
func (c *Client) armForSpace() bool {
	for _, link := range c.links {
		bytes := link.out.Wanted()
		if bytes == 0 {
			bytes = c.wantedOf(link)
		}
		if bytes == 0 || link.isPeerClosed {
			continue
		}
		sleeps, err := link.out.Lane.Arm(bytes, false, kernel.Membarrier)
		if errors.Is(err, lane.ErrConsumerClosed) {
			// The lane of replies reports it, after the replies.
			link.isPeerClosed = true
			link.out.Clear(nil)
			continue
		}
		if err != nil || !sleeps {
			return false
		}
		link.isArmed = true
	}
	return true
}

// wantedOf returns the largest record that a goroutine waits for space for and that this service takes.
func (c *Client) wantedOf(link *clientLink) (bytes uint64) {
	ask := func(w *waiter) {
		if (w.what == waitSpace || w.what == waitSpaceForCall && c.hasFreeSlot()) && link.takes(w.bytes) {
			bytes = max(bytes, uint64(calls.HeaderSize+link.recordBytes(w.bytes, w.prefix)))
		}
	}
	ask(c.leader)
	for _, w := range c.spaceWaiters {
		ask(w)
	}
	return bytes
}

func (w *clientWait) Disarm() {
	c := (*Client)(w)
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.withdraw()
}

func (c *Client) withdraw() {
	c.sleeper.Disarm()
	for _, link := range c.links {
		if link.isArmed {
			link.isArmed = false
			link.out.Lane.Disarm()
		}
	}
}

func (c *Client) areServicesFencing() bool {
	return !slices.ContainsFunc(c.links, func(link *clientLink) bool { return !link.in.Consumer.IsProducerFencing() })
}

func (w *clientWait) NeedsTimedWait() bool {
	c := (*Client)(w)
	c.mutex.Lock()
	defer c.mutex.Unlock()
	return c.sleeper.NeedsFencedWakers() && !c.areServicesFencing() ||
		slices.ContainsFunc(c.links, func(link *clientLink) bool {
			return link.isArmed &&
				link.out.Lane.NeedsTimedWait()
		})
}
