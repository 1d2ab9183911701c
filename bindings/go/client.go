package pelton

import (
	"context"
	"errors"
	"iter"
	"slices"
	"sync"
	"time"

	"pelton/internal/lane"
)

// Client asks a [Service] and awaits its answers. Any number of goroutines use it at a time; up to 1,024 calls are in flight, and answers
// come in whatever order. One of the goroutines that wait looks for the answers of all of them.
//
// By unix:PATH it has one service. When that ends, every call in flight has failed, with [ErrPeerDied], or [ErrClosed] if it ended on
// purpose, and so do all later ones: connect anew then. Under a short name several processes may listen, each a service: the client asks
// the least busy, the one with the fewest of its calls in flight, and goes on as long as it is used. The calls of one that dies have failed, but for
// those that [Call.MarkIdempotent] allows to be asked of another; those that a draining one had not begun ([Service.Drain]) are asked of
// another by themselves. A copy of each request is kept for that until its answer has come.
type Client struct {
	options  Options
	bytesMax int
	name     name
	page     *segment
	bell     *bell
	spin     spin
	guard    guard
	// Ends with the client; so do the hand-shakes under way, whose number is counted.
	life      context.Context
	end       context.CancelFunc
	greetings sync.WaitGroup

	mutex   sync.Mutex
	sleeper lane.Sleeper
	links   []*clientLink
	// Lost, and to be closed by who leads, since that one looks at them.
	lost []*clientLink
	// Of a name of many services.
	crowd *crowd
	// Why the one service is no more.
	fate   *Error
	places []callPlace
	free   []uint32
	// Slots of calls that are submitted by no link, and are to be.
	homeless []uint32
	// What answers come to that nobody awaits, parts of them alone, and how many are last ones.
	asideBytes, partBytes, asideLast int
	// The link to think of first for the next request, and to hear first.
	nextOpen, turn int

	// Who leads looks for what comes, for all who wait. Nobody else takes answers from the lanes.
	leader *waiter
	// Who has been woken to lead.
	heir *waiter
	// Who awaits answers; and who waits for something else, by turns.
	awaiting *waiter
	rooms    []*waiter
	looks    uint64
	idle     []*waiter
	// Calls of nobody's any more, to be used again.
	spare []*Call
	// For who leads: the links as it saw them last.
	watched []*clientLink
}

// callPlace is one for a call in flight.
type callPlace struct {
	slot       uint32
	generation uint32
	state      placeState
	// Its service may carry it out though another has begun to.
	isIdempotent bool
	// Some of a streaming reply has come.
	hasPart bool
	// How often it was submitted again though another service may have begun it.
	repeats int
	// Which it was submitted by; nil while there is none, for that reason.
	link *clientLink
	loss Code
	// What it says, in case that it is to be said again.
	deadline uint64
	request  []byte
	call     *Call
}

type placeState uint8

const (
	placeFree placeState = iota
	placeWaiting
	// Nobody waits for it any more; the service has not let go of it yet.
	placeGivenUp
)

const (
	// One request that ends each service which begins it is not to end them all, and their successors.
	repeatsMax = 3
	// Of a place's memory for requests, what is kept for the next call.
	keptRequest = 4096
	// The service has given the call back.
	lossReturned = ErrRefused
)

// clientLink is one service, as its client has it.
type clientLink struct {
	out      outbox
	in       *inLane
	assembly assembly
	// Where it listens, or did.
	path string
	// Most bytes of a request.
	bytesMax uint64
	// Calls submitted by it whose last answer has not come.
	inFlight int
	// It gives requests back.
	isDraining bool
	// It has said that it takes nothing more.
	isDrained bool
	// Nobody reads requests there any more. The lane of replies tells it, after what was answered.
	hasLeft bool
	// Parts of which more wait than is to be kept stand first there.
	isStuck bool
	// Who leads is rung when there is room.
	isAwaited bool
	isLost    bool
}

// isOpen says whether a request may be submitted by it.
func (l *clientLink) isOpen() bool {
	return !l.isDraining && !l.hasLeft && !l.isLost && !l.in.link.isGone.Load() && !l.out.lane.ConsumerClosed()
}

func (l *clientLink) takes(bytes int) bool { return l.isOpen() && uint64(bytes) <= l.bytesMax }

func (l *clientLink) close() {
	l.out.close()
	l.in.close()
	l.out.takeDown()
}

// Call is a call in flight, of which an answer is to come. One goroutine at a time awaits it.
type Call struct {
	client *Client
	id     uint64
	// Answers that have come, and nobody has taken.
	answers []answer
	// Where who awaits would have the next one.
	into   []byte
	waiter *waiter
	// The last answer was taken, or nobody wants it.
	isOver bool
	// Parts that were taken by an Await that came to no end.
	parts []byte
}

type answer struct {
	kind  kind
	code  uint32
	bytes []byte
	// What it counts for; 0 of one that was awaited.
	cost int
	// That the call was lost.
	lost error
}

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

// ConnectClient connects to the service that listens under a short name, or unix:PATH. It waits for the hand-shake, 5 s at most unless
// [Options.Await] says otherwise. Under a short name it begins with any one of those who listen, and comes to another when that one does
// not answer; to the others it connects in the course of being used. Of the options, Capacity and MessageBytesMax (at least 1024) are of
// the lanes of requests, and CallBytesMax is the largest answer.
//
// Errors: as [ConnectSender].
func ConnectClient(ctx context.Context, name string, options *Options) (*Client, error) {
	o := options.orDefault()
	bytesMax, _, err := o.ofCalls()
	if err != nil {
		return nil, err
	}
	parsed, err := parseName(name)
	if err != nil {
		return nil, err
	}
	bell, err := newBell()
	if err != nil {
		return nil, err
	}
	page, err := makeReceiverPage()
	if err != nil {
		_ = bell.file.Close()
		return nil, err
	}
	c := &Client{
		options: o, bytesMax: bytesMax, name: parsed, page: page, bell: bell, spin: spin{wait: o.Wait},
		sleeper: lane.NewReceiverSleeper(page.bytes, membarrier()),
	}
	c.life, c.end = context.WithCancel(context.Background())
	if parsed.path == "" {
		c.crowd = newCrowd()
		err = c.findFirst(ctx)
	} else {
		err = reach(ctx, parsed, o, func(s *shake, _ bool) error {
			link, err := c.newLink(s, "")
			if err == nil {
				c.links = append(c.links, link)
			}
			return err
		})
	}
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

func (c *Client) newLink(s *shake, path string) (*clientLink, error) {
	to, own, err := s.receptionAt(c.page, c.bell)
	if err != nil {
		return nil, err
	}
	bell := c.bell
	if own != nil {
		bell = own
	}
	lanes, err := s.newLinkLanes(to, bell, roleClient, false, c.bell.kick)
	if err != nil {
		if own != nil {
			_ = own.file.Close()
		}
		return nil, err
	}
	lanes.in.ownBell = own
	own.passOn(c.bell)
	return &clientLink{out: lanes.out, in: lanes.in, path: path, bytesMax: lanes.bytesMax}, nil
}

// Call asks and awaits the reply; of one in parts, all of them put together, at most [Options.CallBytesMax]. It waits until the context
// ends; then the call is cancelled. The service is told the context's deadline.
//
// Errors: the context's. [*Failed] and [ErrAbandoned] are the service's answers. [ErrTooLarge] of a request that is larger than the service
// takes. [ErrPeerDied], [ErrClosed] when the service has gone: whether it had carried the call out nobody knows. [ErrNoListener]: nobody serves
// the name. [ErrRefused]: the one service drains, and did not begin the call; or so many answers wait to be taken that no more are asked for.
// [ErrCorrupt]: the service broke the rules. [ErrClosedHandle].
func (c *Client) Call(ctx context.Context, request []byte) ([]byte, error) {
	return c.CallInto(ctx, request, nil)
}

// CallInto is as Call, and puts the reply into the buffer, whose contents it replaces; into a larger one if need be. It answers the reply.
// With a buffer that is large enough it allocates nothing, unless it sleeps.
func (c *Client) CallInto(ctx context.Context, request, buffer []byte) ([]byte, error) {
	c.mutex.Lock()
	call := c.newCall()
	call.into = buffer
	err := c.ask(ctx, call, request)
	var reply []byte
	if err == nil {
		if reply, err = c.collect(ctx, call); !call.isOver {
			c.giveUp(call)
		}
	}
	*call = Call{answers: call.answers[:0]}
	c.spare = append(c.spare, call)
	c.mutex.Unlock()
	return reply, err
}

// Submit asks without awaiting the answer, which [Call.Await] or [Call.Parts] brings. It waits, until the context ends, for room and while 1,024 calls
// are in flight; of a request that is larger than the lane's largest message, until all of it is in the lane. The service is told the
// context's deadline.
//
// Errors: as [Client.Call], but for the answers.
func (c *Client) Submit(ctx context.Context, request []byte) (*Call, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	call := &Call{}
	if err := c.ask(ctx, call, request); err != nil {
		return nil, err
	}
	return call, nil
}

// Notify tells the service something that it does not answer. It waits for room until the context ends. What a service had not taken when it ended is
// lost, and nothing says so: who must know, calls.
//
// Errors: as [Client.Submit]. With the context's, nothing was told, unless the message is larger than the lane's largest.
func (c *Client) Notify(ctx context.Context, message []byte) error {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.crowd != nil {
		if err := c.hearEnds(ctx); err != nil {
			return err
		}
	}
	for {
		if err := c.usable(len(message)); err != nil {
			return err
		}
		link, err := c.writeToAny(header{kind: kindNotify}, message)
		if err != nil {
			return err
		}
		if link != nil {
			c.countSubmission()
			return c.waitUntilWritten(ctx, link, len(message))
		}
		if err := c.wait(ctx, waiter{what: room, bytes: len(message)}); err != nil {
			return err
		}
	}
}

// hearEnds takes in what services have said, in case that one of them drains or has ended: what it is told nobody takes, and nothing
// comes back that would say so.
func (c *Client) hearEnds(ctx context.Context) error {
	if !slices.ContainsFunc(c.links, func(l *clientLink) bool { return !l.isStuck && l.in.consumer.Stirs() }) {
		return nil
	}
	if c.leader == nil {
		c.pump(nil)
		c.passOn()
		return nil
	}
	return c.wait(ctx, waiter{what: aLook, looks: c.looks})
}

// Await waits for the reply until the context ends; the call stays in flight then. Otherwise as [Client.Call].
func (call *Call) Await(ctx context.Context) ([]byte, error) {
	c := call.client
	c.mutex.Lock()
	defer c.mutex.Unlock()
	call.into = nil
	return c.collect(ctx, call)
}

// Parts are the parts of a reply as they come, a whole one as the only part. The bytes of one are the loop body's until its end. The error, if there
// is one, comes last, with no bytes. Who leaves the loop before, and whose context ends, has cancelled the call.
//
// Parts of which nobody asks for more wait in memory, up to [Options.CallBytesMax], then in the lane, before the other answers there. So
// ask for more, or leave the loop.
func (call *Call) Parts(ctx context.Context) iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) {
		defer call.Cancel()
		c := call.client
		var buffer []byte
		for {
			c.mutex.Lock()
			call.into = buffer
			answer, err := c.next(ctx, call)
			c.mutex.Unlock()
			if err != nil {
				yield(nil, err)
				return
			}
			if answer.kind == kindEnd {
				return
			}
			buffer = answer.bytes
			if !yield(answer.bytes, nil) || answer.kind == kindReply {
				return
			}
		}
	}
}

// Cancel gives the call up: none of its answers is received any more. The service is told, and may leave its work. It does not wait. A call that is
// over is none to be cancelled.
func (call *Call) Cancel() {
	c := call.client
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if !call.isOver {
		c.giveUp(call)
	}
}

// MarkIdempotent marks a call as one that may be carried out more than once: if its service dies or closes before an answer has come, it is
// asked of another service of the name, three times at most. It does not wait. Of no effect by unix:PATH, which has one service.
func (call *Call) MarkIdempotent() {
	c := call.client
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if place := c.placeOf(call.id); place != nil && place.call == call {
		place.isIdempotent = true
	}
}

// Services is how many services this client asks at the moment, as far as it has found them, without those that drain.
func (c *Client) Services() int {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.leader == nil && !c.isClosed() {
		c.pump(nil)
	}
	n := 0
	for _, link := range c.links {
		if link.isOpen() {
			n++
		}
	}
	return n
}

// Close ends the client: the service drops what this one has asked and nobody awaits any more. Calls of other goroutines end with
// [ErrClosedHandle]. Closing twice does nothing.
func (c *Client) Close() error {
	c.mutex.Lock()
	_, again := c.guard.close()
	isLed := c.leader != nil
	c.mutex.Unlock()
	if again {
		return nil
	}
	c.end()
	if isLed {
		// Who leads does the rest.
		c.bell.kick()
		return nil
	}
	c.takeDown()
	return nil
}

func (c *Client) isClosed() bool { return c.guard.isClosing() }

func closedHandle() error { return failure(ErrClosedHandle, "the client is closed: connect anew") }

// takeDown is asked once: nobody looks at the lanes any more, nor will.
func (c *Client) takeDown() {
	c.greetings.Wait()
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.bury()
	c.admit()
	for _, link := range c.links {
		link.close()
	}
	c.links = nil
	_ = c.bell.file.Close()
	c.page.close()
}

func (c *Client) newCall() *Call {
	if n := len(c.spare); n > 0 {
		call := c.spare[n-1]
		c.spare = c.spare[:n-1]
		return call
	}
	return &Call{}
}

// What follows is behind the lock.

// usable says why nothing can be asked.
func (c *Client) usable(bytes int) error {
	if c.isClosed() {
		return closedHandle()
	}
	if c.fate != nil {
		return c.fate
	}
	if c.drains() {
		return c.lossError(lossReturned, nil)
	}
	most, isSomebody := uint64(0), false
	for _, link := range c.links {
		if c.crowd == nil || link.isOpen() {
			most, isSomebody = max(most, link.bytesMax), true
		}
	}
	if isSomebody {
		return checkSize(bytes, most)
	}
	return nil
}

// drains says whether the one service does, so that there is nobody to be asked.
func (c *Client) drains() bool { return c.crowd == nil && len(c.links) > 0 && c.links[0].isDraining }

// isSated says whether so many last answers wait to be taken that no more are to be asked for. Parts hold up their lane instead.
func (c *Client) isSated() bool {
	return c.asideBytes-c.partBytes > c.bytesMax || c.asideLast >= callsMax
}

// ask submits a call, waiting for room and a place.
func (c *Client) ask(ctx context.Context, call *Call, request []byte) error {
	call.client = c
	h := header{kind: kindRequest}
	if deadline, ok := ctx.Deadline(); ok {
		h.deadline = nsOf(deadline)
	}
	for {
		if err := c.usable(len(request)); err != nil {
			return err
		}
		if c.isSated() {
			return failure(ErrRefused, "%d answers of %d bytes in all wait: Await them before asking for more", c.asideLast, c.asideBytes-c.partBytes)
		}
		if slot, ok := c.takeSlot(); ok {
			generation := c.places[slot].generation + 1
			if generation == 0 {
				generation = 1
			}
			h.id = uint64(generation)<<32 | uint64(slot)
			link, err := c.writeToAny(h, request)
			if link == nil {
				c.free = append(c.free, slot)
			}
			if err != nil {
				return err
			}
			if link != nil {
				link.inFlight++
				p := &c.places[slot]
				call.id = h.id
				*p = callPlace{slot: slot, generation: generation, state: placeWaiting, link: link, call: call, deadline: h.deadline, request: p.request[:0]}
				if c.crowd != nil {
					p.request = append(p.request, request...)
					c.countSubmission()
				}
				if err := c.waitUntilWritten(ctx, link, len(request)); err != nil {
					c.giveUp(call)
					return err
				}
				return nil
			}
		}
		if err := c.wait(ctx, waiter{what: roomForCall, bytes: len(request)}); err != nil {
			return err
		}
	}
}

// takeSlot is the slot used last: its memory is warm.
func (c *Client) takeSlot() (uint32, bool) {
	if n := len(c.free); n > 0 {
		slot := c.free[n-1]
		c.free = c.free[:n-1]
		return slot, true
	}
	if len(c.places) == callsMax {
		return 0, false
	}
	c.places = append(c.places, callPlace{slot: uint32(len(c.places))})
	return uint32(len(c.places) - 1), true
}

func (c *Client) placeOf(id uint64) *callPlace {
	slot := slotOf(id)
	if int(slot) >= len(c.places) || c.places[slot].generation != generationOf(id) || c.places[slot].state == placeFree {
		return nil
	}
	return &c.places[slot]
}

// waitUntilWritten waits, of what is large, until it is all in the lane.
func (c *Client) waitUntilWritten(ctx context.Context, link *clientLink, bytes int) error {
	if link.out.isWhole(bytes) || len(link.out.queue) == 0 {
		return nil
	}
	return c.wait(ctx, waiter{what: allWritten, link: link})
}

// writeToAny writes to the least busy service that has room; nil: there is none now.
func (c *Client) writeToAny(h header, payload []byte) (*clientLink, error) {
	for {
		best := c.leastBusy()
		if best < 0 {
			if c.crowd == nil {
				// The lane of replies tells why.
				return nil, nil
			}
			if isSomebody, err := c.findSomebody(); err != nil || !isSomebody {
				return nil, err
			}
			continue
		}
		count, isAgain, takes := len(c.links), false, false
		for step := range count {
			link := c.links[(best+step)%count]
			if !link.takes(len(payload)) {
				continue
			}
			takes = true
			written, err := link.write(h, payload)
			c.noteWritten(link)
			if errors.Is(err, lane.ErrConsumerClosed) {
				link.hasLeft = true
				isAgain = true
				continue
			}
			if err != nil {
				c.lose(link, ErrCorrupt, linkError(err))
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
				return nil, c.usable(len(payload))
			}
			return nil, nil
		}
	}
}

// leastBusy is the place of the link with the fewest calls in flight; of those the next. -1: there is none.
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

// write writes a message, or, of one that is cut into pieces, what there is room for; false if it has to wait for room.
func (l *clientLink) write(h header, payload []byte) (bool, error) {
	if len(l.out.queue) > 0 {
		if done, err := l.out.flush(); err != nil || !done {
			return false, err
		}
	}
	if l.out.isWhole(len(payload)) {
		return l.out.put(h, payload)
	}
	l.out.push(h, payload)
	_, err := l.out.flush()
	return true, err
}

// noteWritten: to write is to be awake, so who sleeps and waits for room there has to ask for it again.
func (c *Client) noteWritten(link *clientLink) {
	if link.isAwaited && !link.out.lane.IsArmed() || len(link.out.queue) > 0 {
		link.isAwaited = false
		c.rouse()
	}
}

// rouse has who leads look again.
func (c *Client) rouse() {
	if c.leader != nil {
		c.bell.kick()
	}
}

// collect is the whole reply.
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
			c.giveUp(call)
			return nil, failure(ErrTooLarge, "the parts of a reply come to more than %d bytes: take them by Parts, or raise CallBytesMax", c.bytesMax)
		default:
			call.parts = append(call.parts, answer.bytes...)
		}
		if answer.kind != kindPart {
			return call.parts, nil
		}
		if call.parts == nil {
			call.parts = []byte{}
		}
	}
}

// next waits for the call's next answer, and takes it. What is no reply is an error.
func (c *Client) next(ctx context.Context, call *Call) (answer, error) {
	if len(call.answers) == 0 {
		if call.isOver {
			return answer{}, failure(ErrRefused, "the call is over: its last answer was taken, or it was cancelled")
		}
		if call.waiter != nil {
			return answer{}, failure(ErrWrongThread, "another goroutine awaits this call: one at a time may")
		}
		if err := c.wait(ctx, waiter{what: anAnswer, call: call}); err != nil {
			return answer{}, err
		}
	}
	call.into = nil
	found := call.answers[0]
	call.answers = slices.Delete(call.answers, 0, 1)
	c.takeAside(found)
	if found.kind != kindPart {
		call.isOver = true
	}
	switch {
	case found.lost != nil:
		return found, found.lost
	case found.kind == kindFailed:
		return found, &Failed{found.code, slices.Clone(found.bytes)}
	case found.kind == kindAbandoned:
		return found, ErrAbandoned
	}
	return found, nil
}

// takeAside is of an answer that waits no more.
func (c *Client) takeAside(found answer) {
	if found.cost == 0 {
		return
	}
	c.asideBytes -= found.cost
	if found.kind != kindPart {
		c.asideLast--
		return
	}
	isStopped := c.partBytes > c.bytesMax
	if c.partBytes -= found.cost; isStopped && c.partBytes <= c.bytesMax {
		c.rouse()
	}
}

// answerCost is that of an answer's own.
const answerCost = 80

// deliver is of an answer to a call that somebody waits for, or will.
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
		c.asideBytes += found.cost
		if found.kind == kindPart {
			c.partBytes += found.cost
		} else {
			c.asideLast++
		}
	}
	call.answers = append(call.answers, found)
	if call.waiter != nil && call.waiter != c.leader {
		call.waiter.rouse()
	}
}

// giveUp has none of the call's answers received any more.
func (c *Client) giveUp(call *Call) {
	for _, found := range call.answers {
		c.takeAside(found)
	}
	call.answers, call.isOver = nil, true
	if call.waiter != nil {
		call.waiter.rouse()
	}
	place := c.placeOf(call.id)
	if place == nil || place.call != call || c.isClosed() {
		return
	}
	if place.link == nil {
		// No service has it.
		slot := slotOf(call.id)
		c.homeless = slices.DeleteFunc(c.homeless, func(other uint32) bool { return other == slot })
		c.endPlace(place)
		c.wakeRooms()
		return
	}
	place.state, place.call = placeGivenUp, nil
	link := place.link
	h := header{id: call.id, kind: kindCancel}
	written, err := link.write(h, nil)
	switch {
	case errors.Is(err, lane.ErrConsumerClosed):
		// Who has gone need not be told, and the lane of replies tells of it.
	case err != nil:
		c.lose(link, ErrCorrupt, linkError(err))
	default:
		if !written {
			link.out.push(h, nil)
		}
		c.noteWritten(link)
	}
}

func (c *Client) endPlace(p *callPlace) {
	p.state, p.call, p.link = placeFree, nil, nil
	if cap(p.request) > keptRequest {
		p.request = nil
	}
	c.free = append(c.free, p.slot)
}

// Waiting: one of those who wait leads, and looks for all; it hands that on when it has what it wants.

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
			c.mutex.Unlock()
			err := await(ctx, c, c.bell, &c.spin, &c.guard)
			c.mutex.Lock()
			c.leader = nil
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
			return false, failure(ErrRefused, "the call was cancelled")
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

func (c *Client) look() (bool, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.pump(c.leader)
	c.watched = append(c.watched[:0], c.links...)
	return c.check(c.leader)
}

// stirs looks at lanes that nobody else takes from, of links that nobody else closes.
func (c *Client) stirs() bool {
	if c.leader.what != anAnswer {
		return true
	}
	for _, link := range c.watched {
		if !link.isStuck && link.in.consumer.Stirs() {
			return true
		}
	}
	return false
}

func (c *Client) arm() (bool, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.sleeper.Arm(c.areServicesFencing, membarrier)
	c.pump(c.leader)
	there, err := c.check(c.leader)
	if there = there || err != nil || !c.armForRoom(); there {
		c.takeBack()
		return false, err
	}
	return true, nil
}

// armForRoom has services ring when there is room for what waits. False: there is some.
func (c *Client) armForRoom() bool {
	wanted := -1
	ask := func(w *waiter) {
		if w.what == room || w.what == roomForCall && c.hasPlace() {
			wanted = max(wanted, w.bytes)
		}
	}
	ask(c.leader)
	for _, w := range c.rooms {
		ask(w)
	}
	for _, link := range c.links {
		bytes := link.out.wanted()
		if bytes == 0 && wanted >= 0 && link.isOpen() {
			bytes = uint64(headerSize + wanted)
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

func (c *Client) disarm() {
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

func (c *Client) mustNap() bool {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	return c.sleeper.NeedsFencedWakers() && !c.areServicesFencing() ||
		slices.ContainsFunc(c.links, func(link *clientLink) bool { return link.isAwaited && link.out.lane.MustNap() })
}

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
		if loss, err := c.hear(link, w); loss != 0 {
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
func (c *Client) hear(link *clientLink, w *waiter) (loss Code, why error) {
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
				return 0, nil
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
			return ErrCorrupt, laneError(err)
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
				return 0, nil
			}
			if h.kind == kindPart && p.call != nil && !isAwaited && c.partBytes > c.bytesMax {
				link.isStuck = true
				return 0, nil
			}
		}
		if rule == "" {
			rule = c.sort(link, h, payload, p)
		}
		if rule != "" {
			return ErrCorrupt, failure(ErrCorrupt, "the service's message %d breaks the rule %q of calls", record.Seq, rule)
		}
		if record.Descriptors > 0 {
			err := link.in.receiveFiles(record)
			files, _ := link.in.takeFiles()
			(&loan{files: files}).closeFiles()
			if errors.Is(err, ErrCorrupt) {
				return ErrCorrupt, err
			}
		}
		consumer.Take(record)
		taken = true
		if link.isDrained {
			return lossReturned, nil
		}
	}
	return 0, nil
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
		c.loseCall(p, lossReturned, nil)
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
func (c *Client) loseCall(p *callPlace, loss Code, why error) {
	call := p.call
	if loss == lossReturned && p.hasPart {
		// Who has given a part of it had begun it, whatever it says.
		loss = ErrCorrupt
	}
	if call != nil && c.crowd != nil && (loss == lossReturned || p.isIdempotent && p.repeats < repeatsMax && !p.hasPart) {
		p.link, p.loss = nil, loss
		if loss != lossReturned {
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

func (c *Client) lossError(loss Code, why error) error {
	switch {
	case loss == ErrCorrupt && why != nil:
		return why
	case loss == ErrCorrupt:
		return failure(ErrCorrupt, "the service broke the rules of calls")
	case loss == lossReturned && c.crowd != nil:
		return c.nobody()
	case loss == lossReturned:
		return failure(ErrRefused, "the service drains, and has not begun the call: ask its successor")
	case loss == ErrClosed:
		return failure(ErrClosed, "the service has closed: whether it had carried the call out nobody knows")
	}
	return failure(ErrPeerDied, "the service died: whether it had carried the call out nobody knows")
}

// lose parts with a link. Who leads closes it.
func (c *Client) lose(link *clientLink, loss Code, why error) {
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
	if c.crowd == nil {
		if loss == lossReturned {
			loss = ErrClosed
		}
		errors.As(c.lossError(loss, why), &c.fate)
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

// lookAgain is the time between two looks while something waits for room, or for a first word.
const lookAgain = 100 * time.Millisecond
