package pelton

import (
	"errors"
	"slices"

	"pelton/internal/fail"
	"pelton/internal/lane"
)

// What a client hears: answers, which are sorted by the call that they are of, and what a service says that drains or ends. Behind the
// client's lock.

// pump takes what has come, and writes what there is room for. Only who leads does, or anybody while nobody leads.
func (c *Client) pump(w *waiter) {
	c.looks++
	if len(c.lost) > 0 {
		c.bury()
	}
	if c.crowd != nil {
		c.attend(w)
	}
	for _, link := range c.links {
		if len(link.out.queue) == 0 || link.isLost {
			continue
		}
		if _, err := link.out.flush(); errors.Is(err, lane.ErrConsumerClosed) {
			link.hasLeft = true
			link.out.clear(nil)
		} else if err != nil {
			c.lose(link, ErrCorrupt, linkError(err))
			break
		}
	}
	for range len(c.links) {
		if len(c.links) == 0 {
			break
		}
		c.turn = (c.turn + 1) % len(c.links)
		link := c.links[c.turn]
		if loss, err := c.hear(link, w); loss != nil {
			c.lose(link, loss, err)
		}
	}
	if len(c.homeless) > 0 {
		c.house()
	}
	if len(c.rooms) > 0 {
		c.wakeRooms()
	}
}

// bury closes links that were lost.
func (c *Client) bury() {
	for _, link := range c.lost {
		link.close()
	}
	c.lost = nil
}

// hear takes the answers of one service. A loss: the link has ended, or is not to be used further.
func (c *Client) hear(link *clientLink, w *waiter) (loss error, why error) {
	consumer, taken := link.in.consumer, false
	link.isStuck = false
	defer func() {
		if taken && consumer.ReleaseTaken() == lane.Ring {
			link.in.link.ring()
		}
	}()
	for range looksMost {
		record, ok, err := consumer.Peek()
		if err == nil && !ok {
			if !link.in.link.isGone.Load() && !consumer.ProducerClosed() {
				return nil, nil
			}
			// What was committed before the end is visible now. [close]
			if record, ok, err = consumer.Peek(); err == nil && !ok {
				if consumer.ProducerClosed() || link.out.lane.ConsumerClosed() {
					return ErrClosed, nil
				}
				return ErrPeerDied, nil
			}
		}
		if err != nil {
			return ErrCorrupt, fail.Lane(err)
		}
		h, payload, rule := readRecord(consumer, record, false)
		if rule == "" && len(payload) > c.bytesMax {
			rule = "size"
		}
		var p *callPlace
		if rule == "" && h.kind.hasID() {
			if p = c.placeOf(h.id); p == nil || p.link != link {
				rule = "id"
			}
		}
		if rule == "" && p != nil {
			isAwaited := p.call != nil && p.call.waiter != nil && len(p.call.answers) == 0
			// The next one's own goroutine takes it best.
			if !isAwaited && p.call != nil && w != nil && w.what == anAnswer && len(w.call.answers) > 0 {
				return nil, nil
			}
			if h.kind == kindPart && p.call != nil && !isAwaited && c.partBytes > c.bytesMax {
				link.isStuck = true
				return nil, nil
			}
		}
		if rule == "" {
			rule = c.sort(link, h, payload, p)
		}
		if rule != "" {
			return ErrCorrupt, fail.New(fail.ErrCorrupt, "the service's message %d breaks the rule %q of calls", record.Seq, rule)
		}
		if record.Descriptors > 0 {
			err := link.in.receiveFiles(record)
			files, _ := link.in.takeFiles()
			link.in.link.discard(files)
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

// sort is what a record comes to, of the call at that place if it is of one; or the rule that it breaks, else "".
func (c *Client) sort(link *clientLink, h header, payload []byte, p *callPlace) string {
	switch h.kind {
	case kindDraining, kindDrained:
		if h.kind == kindDraining && link.isDraining {
			return "kind"
		}
		link.isDraining, link.isDrained = true, h.kind == kindDrained
		if c.crowd != nil {
			// Whoever listens now has perhaps come for it. Otherwise it is looked for when somebody asks.
			_ = c.lookAround(servicesMax)
		}
		return ""
	case kindReturned:
		if !link.isDraining || p.hasPart || link.assembly.header.kind != 0 && link.assembly.header.id == h.id {
			return "kind"
		}
		link.inFlight--
		c.loseCall(p, errReturned, nil)
		return ""
	}
	found, isOwn := answer{kind: h.kind, code: h.code, bytes: payload}, false
	if h.more || h.continued {
		if rule := link.assembly.add(h, payload, c.bytesMax, p.state == placeWaiting); rule != "" {
			return rule
		}
		if h.more {
			return ""
		}
		var first header
		first, found.bytes = link.assembly.take()
		found.code, isOwn = first.code, true
	}
	call := p.call
	if h.kind.isFinal() {
		link.inFlight--
		c.endPlace(p)
	} else {
		p.hasPart = true
	}
	if call != nil {
		c.deliver(call, found, isOwn)
	}
	return ""
}

// loseCall is of one whose service does not answer it.
func (c *Client) loseCall(p *callPlace, loss error, why error) {
	call := p.call
	if loss == errReturned && p.hasPart {
		// Who has given a part of it had begun it, whatever it says.
		loss = ErrCorrupt
	}
	if call != nil && c.crowd != nil && (loss == errReturned || p.isIdempotent && p.repeats < repeatsMax && !p.hasPart) {
		p.link, p.loss = nil, loss
		if loss != errReturned {
			p.repeats++
		}
		c.homeless = append(c.homeless, p.slot)
		return
	}
	c.endPlace(p)
	if call != nil {
		c.deliver(call, answer{kind: kindAbandoned, lost: c.lossError(loss, why)}, true)
	}
}

func (c *Client) lossError(loss error, why error) error {
	switch {
	case loss == ErrCorrupt && why != nil:
		return why
	case loss == ErrCorrupt:
		return fail.New(fail.ErrCorrupt, "the service broke the rules of calls")
	case loss == errReturned && c.crowd != nil:
		return c.nobody()
	case loss == errReturned:
		return fail.New(fail.ErrRefused, "the service drains, and has not begun the call: ask its successor")
	case loss == ErrClosed:
		return fail.New(fail.ErrClosed, "the service has closed: whether it had carried the call out nobody knows")
	}
	return fail.New(fail.ErrPeerDied, "the service died: whether it had carried the call out nobody knows")
}

// lose parts with a link. Who leads closes it.
func (c *Client) lose(link *clientLink, loss error, why error) {
	if link.isLost {
		return
	}
	link.isLost = true
	// Of what has come in pieces some was begun.
	if p := c.placeOf(link.assembly.header.id); p != nil && link.assembly.header.kind != 0 {
		p.hasPart = true
	}
	link.out.clear(nil)
	for slot := range c.places {
		if p := &c.places[slot]; p.state != placeFree && p.link == link {
			c.loseCall(p, loss, why)
		}
	}
	c.links = slices.DeleteFunc(c.links, func(other *clientLink) bool { return other == link })
	if c.lost = append(c.lost, link); c.leader == nil {
		c.bury()
	}
	// Who leads has it to close, perhaps its own call was lost, and others are to be submitted again.
	c.rouse()
	if c.crowd == nil {
		if loss == errReturned {
			loss = ErrClosed
		}
		c.fate = c.lossError(loss, why)
		return
	}
	// An error is told to who asks next, and finds nobody.
	_ = c.lookAround(servicesMax)
}

// house submits calls whose service is lost to another.
func (c *Client) house() {
	waiting := c.homeless
	c.homeless = nil
	full := -1
	for _, slot := range waiting {
		p := &c.places[slot]
		id := uint64(p.generation)<<32 | uint64(slot)
		if full >= 0 && len(p.request) >= full {
			c.homeless = append(c.homeless, slot)
			continue
		}
		link, err := c.writeToAny(header{id: id, kind: kindRequest, deadline: p.deadline}, p.request)
		switch {
		case link != nil:
			p.link = link
			link.inFlight++
		case err == nil:
			full = len(p.request)
			c.homeless = append(c.homeless, slot)
		case errors.Is(err, ErrTooLarge) && len(c.crowd.arriving) > 0:
			// Who is on the way may take it.
			c.homeless = append(c.homeless, slot)
		default:
			// Those who are there do not want this client, or take less, or cannot be reached.
			loss, call := p.loss, p.call
			c.endPlace(p)
			c.deliver(call, answer{kind: kindAbandoned, lost: c.lossError(loss, nil)}, true)
		}
	}
}
