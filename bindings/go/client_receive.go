package pelton

import (
	"errors"
	"math"
	"slices"

	"github.com/pelton-ipc/pelton/bindings/go/internal/calls"
	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
)

// What a client receives: replies, by their calls, and the notices of a service that drains or ends. All of it under
// the client's lock.

// poll takes what has come, and writes what there is space for. Only the leader calls it, or any goroutine while
// there is no leader.
func (c *Client) poll(w *waiter) {
	c.polls++
	if len(c.lost) > 0 {
		c.closeLost()
	}
	if c.discovery != nil {
		c.discoverForWaiters(w)
	}
	for _, link := range c.links {
		if len(link.out.Queue) == 0 || link.isLost {
			continue
		}
		if _, err := link.out.Flush(); errors.Is(err, lane.ErrConsumerClosed) {
			link.isPeerClosed = true
			link.out.Clear(nil)
		} else if err != nil {
			c.loseLink(link, ErrCorrupt, linkError(err))
			break
		}
	}
	for range len(c.links) {
		if len(c.links) == 0 {
			break
		}
		c.currentLink = (c.currentLink + 1) % len(c.links)
		link := c.links[c.currentLink]
		if loss, err := c.receiveFrom(link, w); loss != nil {
			c.loseLink(link, loss, err)
		}
	}
	if len(c.unrouted) > 0 {
		c.reroute()
	}
	if len(c.spaceWaiters) > 0 {
		c.wakeSpaceWaiters()
	}
}

// closeLost closes lost links.
func (c *Client) closeLost() {
	for _, link := range c.lost {
		link.close()
	}
	c.lost = nil
}

// receiveFrom takes the replies of one service. A loss means that the link has ended, or is not usable.
func (c *Client) receiveFrom(link *clientLink, w *waiter) (loss error, why error) {
	consumer, taken := link.in.Consumer, false
	link.isBackpressured = false
	defer func() {
		if taken && consumer.ReleaseTaken() == lane.Ring {
			link.in.WakePeer()
		}
	}()
	for range calls.RecordsPerPoll {
		record, ok, err := consumer.Peek()
		if err == nil && !ok {
			if !link.in.Link.IsGone.Load() && !consumer.ProducerClosed() {
				return nil, nil
			}
			// What was committed before the end is visible now. [close]
			if record, ok, err = consumer.Peek(); err == nil && !ok {
				if consumer.ProducerClosed() || link.out.Lane.ConsumerClosed() {
					return ErrClosed, nil
				}
				return ErrPeerDied, nil
			}
		}
		if err != nil {
			return ErrCorrupt, fail.Lane(err)
		}
		h, payload, rule := calls.ReadRecord(consumer, record, false)
		if rule == "" && len(payload) > c.bytesMax {
			rule = "size"
		}
		var p *callSlot
		if rule == "" && h.Kind.HasID() {
			if p = c.slotFor(h.ID); p == nil || p.link != link {
				rule = "id"
			}
		}
		if rule == "" && p != nil {
			isAwaited := p.call != nil && p.call.waiter != nil && len(p.call.answers) == 0
			// The goroutine of the next call takes it, while this one has its own.
			if !isAwaited && p.call != nil && w != nil && w.what == waitAnswer && len(w.call.answers) > 0 {
				return nil, nil
			}
			if h.Kind == calls.KindPart && p.call != nil && !isAwaited && c.stashedPartBytes > c.bytesMax {
				link.isBackpressured = true
				return nil, nil
			}
		}
		if rule == "" {
			rule = c.handle(link, h, payload, p)
		}
		if rule != "" {
			return ErrCorrupt, fail.New(fail.ErrCorrupt, "the service's message %d breaks the rule %q of calls",
				record.Seq, rule)
		}
		if record.Descriptors > 0 {
			err := link.in.receiveFiles(record)
			files, _ := link.in.takeFiles()
			link.in.Link.Discard(files)
			if errors.Is(err, ErrCorrupt) {
				return ErrCorrupt, err
			}
		}
		consumer.Take(record)
		taken = true
		if link.isDrained {
			return errReturned, nil
		}
	}
	return nil, nil
}

// handle handles a record, of the call in that slot if it belongs to one. It returns the name of the rule that the
// record breaks, or "".
func (c *Client) handle(link *clientLink, h calls.Header, payload []byte, p *callSlot) string {
	switch h.Kind {
	case calls.KindDraining, calls.KindDrained:
		if h.Kind == calls.KindDraining && link.isDraining {
			return "kind"
		}
		link.isDraining, link.isDrained = true, h.Kind == calls.KindDrained
		if c.discovery != nil {
			// A service that listens now may be its successor. Otherwise the next request discovers it.
			_ = c.discover(servicesMax)
		}
		return ""
	case calls.KindReturned:
		if !link.isDraining || p.hasPart || link.assembly.Header.Kind != 0 && link.assembly.Header.ID == h.ID {
			return "kind"
		}
		link.inFlight--
		c.loseCall(p, errReturned, nil)
		return ""
	}
	found, isOwn := answer{kind: h.Kind, code: h.Code, bytes: payload}, false
	if h.More || h.Continued {
		if !h.Continued && p.state == slotWaiting {
			link.assembly.Reserve(nil, func(bytes int) []byte { return make([]byte, 0, bytes) })
		}
		if rule := link.assembly.Add(h, payload, c.bytesMax, p.state == slotWaiting); rule != "" {
			return rule
		}
		if h.More {
			return ""
		}
		var first calls.Header
		first, found.bytes = link.assembly.Take()
		found.code, isOwn = first.Code, true
	}
	call := p.call
	if h.Kind.IsFinal() {
		link.inFlight--
		c.freeSlot(p)
	} else {
		p.hasPart = true
	}
	if call != nil {
		c.deliver(call, found, isOwn)
	}
	return ""
}

// loseCall ends or reroutes a call that its service does not answer.
func (c *Client) loseCall(p *callSlot, loss error, why error) {
	call := p.call
	if loss == errReturned && p.hasPart {
		// A service that has sent a part had begun the call.
		loss = ErrCorrupt
	}
	if call != nil && c.discovery != nil && (loss == errReturned || p.isIdempotent && p.repeats < repeatsMax &&
		!p.hasPart) {
		p.link, p.loss = nil, loss
		if loss != errReturned {
			p.repeats++
		}
		c.unrouted = append(c.unrouted, p.slot)
		return
	}
	c.freeSlot(p)
	if call != nil {
		c.deliver(call, answer{kind: calls.KindAbandoned, lost: c.lossError(loss, why)}, true)
	}
}

func (c *Client) lossError(loss error, why error) error {
	switch {
	case loss == ErrCorrupt && why != nil:
		return why
	case loss == ErrCorrupt:
		return fail.New(fail.ErrCorrupt, "the service broke the rules of calls")
	case loss == errReturned && c.discovery != nil:
		return c.noListener()
	case loss == errReturned:
		return fail.New(fail.ErrRefused, "the service drains, and has not begun the call: ask its successor")
	case loss == ErrClosed:
		return fail.New(fail.ErrClosed, "the service has closed: whether it had carried the call out nobody knows")
	}
	return fail.New(fail.ErrPeerDied, "the service died: whether it had carried the call out nobody knows")
}

// loseLink removes a link. The leader closes it.
func (c *Client) loseLink(link *clientLink, loss error, why error) {
	if link.isLost {
		return
	}
	link.isLost = true
	// Some of a reply has come in pieces.
	if p := c.slotFor(link.assembly.Header.ID); p != nil && link.assembly.Header.Kind != 0 {
		p.hasPart = true
	}
	link.out.Clear(nil)
	for slot := range c.slots {
		if p := &c.slots[slot]; p.state != slotFree && p.link == link {
			c.loseCall(p, loss, why)
		}
	}
	c.links = slices.DeleteFunc(c.links, func(other *clientLink) bool { return other == link })
	if c.lost = append(c.lost, link); c.leader == nil {
		c.closeLost()
	}
	// The leader closes it, its own call may be lost, and calls are to be sent again.
	c.wakeLeader()
	if c.discovery == nil {
		if loss == errReturned {
			loss = ErrClosed
		}
		c.fate = c.lossError(loss, why)
		return
	}
	// The next request reports an error, if there is no service.
	_ = c.discover(servicesMax)
}

// reroute sends calls without a link to another service.
func (c *Client) reroute() {
	waiting := c.unrouted
	c.unrouted = nil
	// There is no space for a payload of this size, with or without a traceparent.
	full := math.MaxInt
	for _, slot := range waiting {
		p := &c.slots[slot]
		id := uint64(p.generation)<<32 | uint64(slot)
		h := calls.Header{ID: id, Kind: calls.KindRequest, Deadline: p.deadline, Traced: p.isTraced}
		if len(p.request)-h.Prefix() >= full {
			c.unrouted = append(c.unrouted, slot)
			continue
		}
		link, err := c.writeToAny(h, p.request)
		switch {
		case link != nil:
			p.link = link
			link.inFlight++
		case err == nil:
			full = min(full, len(p.request))
			c.unrouted = append(c.unrouted, slot)
		case errors.Is(err, ErrTooLarge) && len(c.discovery.connecting) > 0:
			// A service that is connecting may take it.
			c.unrouted = append(c.unrouted, slot)
		default:
			// The services refuse this client, take less, or cannot be reached.
			loss, call := p.loss, p.call
			c.freeSlot(p)
			c.deliver(call, answer{kind: calls.KindAbandoned, lost: c.lossError(loss, nil)}, true)
		}
	}
}
