package pelton

import (
	"context"
	"errors"
	"slices"

	"pelton/internal/fail"
	"pelton/internal/lane"
)

// How the goroutines of a client wait: one of them leads, and looks for all; it hands that on when it has what it wants. Behind the client's lock, but
// for what who leads calls while it waits: look, stirs, arm, disarm and mustNap.

// waiter is a goroutine that waits.
type waiter struct {
	what waitsFor
	call *Call
	// Of a request.
	bytes int
	// Whose messages are to be in the lane.
	link *clientLink
	// After how many looks it waits for another.
	looks          uint64
	wake           chan struct{}
	next, previous *waiter
}

type waitsFor int

const (
	anAnswer waitsFor = iota
	// And a place among the calls.
	roomForCall
	room
	allWritten
	aLook
)

func (w *waiter) rouse() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// wait waits until there is what is wanted, or the context ends.
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
			c.spin.asked = c.asked
			c.mutex.Unlock()
			err := await(ctx, (*clientWait)(c), c.bell, &c.spin, &c.guard)
			c.mutex.Lock()
			c.leader = nil
			c.bury()
			if c.isClosed() {
				return c.endWith(closedHandle())
			}
			if err != nil {
				return err
			}
			continue
		}
		if w.what != anAnswer {
			c.rooms = append(c.rooms, w)
		}
		if w.what != anAnswer || c.leaderIsStuck() {
			// For who leads this is something new to look for.
			c.bell.kick()
		}
		c.mutex.Unlock()
		var err error
		select {
		case <-w.wake:
		case <-ctx.Done():
			err = ctx.Err()
		case <-c.life.Done():
			err = closedHandle()
		}
		c.mutex.Lock()
		if c.heir == w {
			c.heir = nil
		}
		if w.what != anAnswer {
			c.rooms = slices.DeleteFunc(c.rooms, func(other *waiter) bool { return other == w })
		}
		if err != nil {
			if there, _ := c.check(w); there && ctx.Err() == nil {
				return nil
			}
			return err
		}
	}
}

func (c *Client) leaderIsStuck() bool {
	return slices.ContainsFunc(c.links, func(link *clientLink) bool { return link.isStuck })
}

// endWith is of who led when the client was closed.
func (c *Client) endWith(err error) error {
	c.mutex.Unlock()
	c.takeDown()
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
	if w.what == anAnswer {
		w.call.waiter = w
		if w.next = c.awaiting; w.next != nil {
			w.next.previous = w
		}
		c.awaiting = w
	}
	return w
}

func (c *Client) leave(w *waiter) {
	if w.what == anAnswer {
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

// passOn has another of those who wait lead, if nobody does.
func (c *Client) passOn() {
	if c.leader != nil || c.heir != nil {
		return
	}
	if c.heir = c.awaiting; c.heir == nil && len(c.rooms) > 0 {
		c.heir = c.rooms[0]
	}
	if c.heir != nil {
		c.heir.rouse()
	}
}

// check says whether there is what is wanted, or may be.
func (c *Client) check(w *waiter) (bool, error) {
	switch {
	case w.what == anAnswer && (len(w.call.answers) > 0 || w.call.isOver):
		if len(w.call.answers) == 0 {
			return false, fail.New(fail.ErrRefused, "the call was cancelled")
		}
		return true, nil
	case c.isClosed():
		return false, closedHandle()
	case w.what == anAnswer:
		return false, nil
	case w.what == allWritten:
		return w.link.isLost || len(w.link.out.queue) == 0, nil
	case w.what == aLook:
		return w.looks != c.looks, nil
	case c.fate != nil || c.drains():
		return true, nil
	}
	if w.what == roomForCall && (c.isSated() || !c.hasPlace()) {
		return c.isSated(), nil
	}
	isSomebody := false
	for _, link := range c.links {
		if !link.takes(w.bytes) {
			continue
		}
		isSomebody = true
		done, err := link.out.flush()
		if done && err == nil && link.out.isWhole(w.bytes) {
			_, done, err = link.out.lane.TryReserve(uint64(headerSize+w.bytes), 0)
		}
		if done || err != nil {
			// What is wrong is found by trying.
			return true, nil
		}
	}
	// When nobody is on the way either, trying tells.
	return !isSomebody && c.crowd != nil && len(c.crowd.arriving) == 0, nil
}

func (c *Client) hasPlace() bool { return len(c.free) > 0 || len(c.places) < callsMax }

// wakeRooms wakes those for whom there may be room.
func (c *Client) wakeRooms() {
	places := len(c.free) + callsMax - len(c.places)
	for _, w := range c.rooms {
		if there, err := c.check(w); !there && err == nil {
			continue
		}
		if w.what == roomForCall {
			if places == 0 {
				continue
			}
			places--
		}
		w.rouse()
	}
}

// clientWait is a client whose leader waits.
type clientWait Client

func (w *clientWait) Poll() (bool, error) {
	c := (*Client)(w)
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.pump(c.leader)
	c.watched = append(c.watched[:0], c.links...)
	return c.check(c.leader)
}

// stirs looks at lanes that nobody else takes from, of links that nobody else closes.
func (w *clientWait) MayBeReady() bool {
	c := (*Client)(w)
	if c.leader.what != anAnswer {
		return true
	}
	for _, link := range c.watched {
		if !link.isStuck && link.in.consumer.MayBeReady() {
			return true
		}
	}
	return false
}

func (w *clientWait) Arm() (bool, error) {
	c := (*Client)(w)
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.sleeper.Arm(c.areServicesFencing, membarrier)
	c.pump(c.leader)
	there, err := c.check(c.leader)
	if there = there || err != nil || c.hasMore() || !c.armForRoom(); there {
		c.takeBack()
		return false, err
	}
	return true, nil
}

// hasMore says whether more has come than one look takes: nobody rings for what was there before the sleep was announced.
func (c *Client) hasMore() bool {
	return slices.ContainsFunc(c.links, func(link *clientLink) bool { return !link.isStuck && link.in.consumer.MayBeReady() })
}

// armForRoom has services ring when there is room for what waits. False: there is some.
func (c *Client) armForRoom() bool {
	for _, link := range c.links {
		bytes := link.out.wanted()
		if bytes == 0 {
			bytes = c.wantedOf(link)
		}
		if bytes == 0 || link.hasLeft {
			continue
		}
		sleeps, err := link.out.lane.Arm(bytes, false, membarrier)
		if errors.Is(err, lane.ErrConsumerClosed) {
			// The lane of replies tells it, after what was answered.
			link.hasLeft = true
			link.out.clear(nil)
			continue
		}
		if err != nil || !sleeps {
			return false
		}
		link.isAwaited = true
	}
	return true
}

// wantedOf is the largest record that anybody waits for room for and that this service takes: for another's, room here is of no use.
func (c *Client) wantedOf(link *clientLink) (bytes uint64) {
	ask := func(w *waiter) {
		if (w.what == room || w.what == roomForCall && c.hasPlace()) && link.takes(w.bytes) {
			bytes = max(bytes, uint64(headerSize+w.bytes))
		}
	}
	ask(c.leader)
	for _, w := range c.rooms {
		ask(w)
	}
	return bytes
}

func (w *clientWait) Disarm() {
	c := (*Client)(w)
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.takeBack()
}

func (c *Client) takeBack() {
	c.sleeper.Disarm()
	for _, link := range c.links {
		if link.isAwaited {
			link.isAwaited = false
			link.out.lane.Disarm()
		}
	}
}

func (c *Client) areServicesFencing() bool {
	return !slices.ContainsFunc(c.links, func(link *clientLink) bool { return !link.in.consumer.IsProducerFencing() })
}

func (w *clientWait) NeedsTimedWait() bool {
	c := (*Client)(w)
	c.mutex.Lock()
	defer c.mutex.Unlock()
	return c.sleeper.NeedsFencedWakers() && !c.areServicesFencing() ||
		slices.ContainsFunc(c.links, func(link *clientLink) bool { return link.isAwaited && link.out.lane.NeedsTimedWait() })
}
