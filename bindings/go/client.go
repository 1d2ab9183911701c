package pelton

import (
	"context"
	"errors"
	"iter"
	"slices"
	"sync"

	"pelton/internal/calls"
	"pelton/internal/doorbell"
	"pelton/internal/fail"
	"pelton/internal/handshake"
	"pelton/internal/kernel"
	"pelton/internal/lane"
	"pelton/internal/limits"
	"pelton/internal/memory"
	"pelton/internal/names"
	"pelton/internal/packet"
	"pelton/internal/wait"
)

// Client asks a [Service] and awaits its answers. Any number of goroutines use it at a time; up to 1,024 calls are in flight, and answers
// come in whatever order. One of the goroutines that wait looks for the answers of all of them.
//
// By unix:PATH it has one service. When that ends, every call in flight has failed, with [ErrPeerDied], or [ErrClosed] if it ended on
// purpose, and so do all later ones: connect anew then. Under a short name several processes may listen, each a service: the client asks
// the least busy, the one with the fewest of its calls in flight, and goes on as long as it is used. The calls of one that dies have failed, but for
// those that are [Idempotent], which are asked of another; those that a draining one had not begun ([Service.Drain]) are asked of
// another by themselves. A copy of each request is kept for that until its answer has come.
type Client struct {
	options  Options
	settings limits.Settings
	bytesMax int
	name     names.Name
	page     *memory.Segment
	bell     *doorbell.Own
	spin     wait.Spin
	guard    wait.Guard
	// Ends with the client; so do the hand-shakes under way, whose number is counted.
	context    context.Context
	end        context.CancelFunc
	handshakes sync.WaitGroup

	mutex   sync.Mutex
	sleeper lane.Sleeper
	links   []*clientLink
	// Lost, and to be closed by who leads, since that one looks at them.
	lost []*clientLink
	// Of a name of many services.
	discovery *discovery
	// Why the one service is no more.
	fate  error
	slots []callSlot
	free  []uint32
	// Slots of calls that are submitted by no link, and are to be.
	unrouted []uint32
	// What answers come to that nobody awaits, parts of them alone, and how many are last ones.
	stashedBytes, stashedPartBytes, stashedFinals int
	// Bytes of the last request.
	requestBytes int
	// The link to think of first for the next request, and to hear first.
	nextOpen, currentLink int

	// Who leads looks for what comes, for all who wait. Nobody else takes answers from the lanes.
	leader *waiter
	// Who has been woken to lead.
	nextLeader *waiter
	// Who awaits answers; and who waits for something else, by turns.
	awaiting     *waiter
	spaceWaiters []*waiter
	polls        uint64
	idle         []*waiter
	// Calls of nobody's any more, to be used again.
	spare []*Call
	// For who leads: the links as it saw them last.
	watched []*clientLink
}

// callSlot is one for a call in flight.
type callSlot struct {
	slot       uint32
	generation uint32
	state      slotState
	// Its service may carry it out though another has begun to.
	isIdempotent bool
	// Some of a streaming reply has come.
	hasPart bool
	// How often it was submitted again though another service may have begun it.
	repeats int
	// Which it was submitted by; nil while there is none, for that reason.
	link *clientLink
	loss error
	// What it says, in case that it is to be said again.
	deadline uint64
	request  []byte
	call     *Call
}

type slotState uint8

const (
	slotFree slotState = iota
	slotWaiting
	// Nobody waits for it any more; the service has not let go of it yet.
	slotCancelled_
)

const (
	// One request that ends each service which begins it is not to end them all, and their successors.
	repeatsMax = 3
	// Of a place's memory for requests, what is kept for the next call.
	keptRequest = 4096
)

// errReturned: the service has returned the call unprocessed.
var errReturned = errors.New("returned")

// clientLink is one service, as its client has it.
type clientLink struct {
	out      calls.Outbox
	in       *inLane
	assembly calls.Assembly
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
	isPeerClosed bool
	// Parts of which more wait than is to be kept stand first there.
	isBackpressured bool
	// Who leads is rung when there is room.
	isArmed bool
	isLost  bool
}

// isOpen says whether a request may be submitted by it.
func (l *clientLink) isOpen() bool {
	return !l.isDraining && !l.isPeerClosed && !l.isLost && !l.in.Link.IsGone.Load() && !l.out.Lane.ConsumerClosed()
}

func (l *clientLink) takes(bytes int) bool { return l.isOpen() && uint64(bytes) <= l.bytesMax }

func (l *clientLink) close() {
	l.out.Close()
	l.in.close()
	l.out.Release()
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
	kind  calls.Kind
	code  uint32
	bytes []byte
	// What it counts for; 0 of one that was awaited.
	cost int
	// That the call was lost.
	lost error
}

// ConnectClient connects to the service that listens under a short name, or unix:PATH. It waits for the hand-shake, 5 s at most unless
// [Options.Await] says otherwise. Under a short name it begins with any one of those who listen, and comes to another when that one does
// not answer; to the others it connects in the course of being used. Of the options, Capacity and MessageBytesMax (at least 1024) are of
// the lanes of requests, and CallBytesMax is the largest answer.
//
// Errors: as [ConnectSender].
func ConnectClient(ctx context.Context, name string, options *Options) (*Client, error) {
	o := options.orDefault()
	settings, err := o.forCalls(0)
	if err != nil {
		return nil, err
	}
	parsed, err := names.Parse(name)
	if err != nil {
		return nil, err
	}
	bell, err := doorbell.New()
	if err != nil {
		return nil, err
	}
	page, err := memory.NewReceiverPage()
	if err != nil {
		bell.Close()
		return nil, err
	}
	c := &Client{
		options: o, settings: settings, bytesMax: int(settings.CallBytes), name: parsed, page: page, bell: bell, spin: wait.Spin{IsBusy: o.Wait == Spin},
		sleeper: lane.NewReceiverSleeper(page.Bytes, kernel.Membarrier()),
	}
	c.context, c.end = context.WithCancel(context.Background())
	if parsed.Path == "" {
		c.discovery = newDiscovery()
		err = c.connectFirst(ctx)
	} else {
		err = connect(ctx, parsed, settings, o.Await, func(s *handshake.Handshake, _ bool) error {
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

func (c *Client) newLink(s *handshake.Handshake, path string) (*clientLink, error) {
	lanes, err := s.NewCallLink(&handshake.ReceivingSide{Page: c.page, Bell: c.bell, IsShared: true}, c.bell, packet.RoleClient, false, c.bell.Wake)
	if err != nil {
		return nil, err
	}
	return &clientLink{out: calls.NewOutbox(lanes, c.options.ResidentMax), in: &inLane{Incoming: *lanes.In}, path: path, bytesMax: lanes.BytesMax}, nil
}

// CallOption says something of one call.
type CallOption uint8

// Idempotent calls may be carried out more than once: if the service dies or closes before an answer has come, the call is asked of another
// service of the name, three times at most. Of no effect by unix:PATH, which has one service.
const Idempotent CallOption = 1

// Call asks and awaits the reply; of one in parts, all of them put together, at most [Options.CallBytesMax]. It waits until the context
// ends; then the call is cancelled. The service is told the context's deadline.
//
// Errors: the context's. [*CallError] and [ErrAbandoned] are the service's answers. [ErrTooLarge] of a request that is larger than the service
// takes. [ErrPeerDied], [ErrClosed] when the service has gone: whether it had carried the call out nobody knows. [ErrNoListener]: nobody serves
// the name. [ErrRefused]: the one service drains, and did not begin the call; or so many answers wait to be taken that no more are asked for.
// [ErrCorrupt]: the service broke the rules. [ErrClosedHandle].
func (c *Client) Call(ctx context.Context, request []byte, options ...CallOption) ([]byte, error) {
	return c.CallInto(ctx, request, nil, options...)
}

// CallInto is as Call, and puts the reply into the buffer, whose contents it replaces; into a larger one if need be. It answers the reply.
// With a buffer that is large enough it allocates nothing, unless it sleeps.
func (c *Client) CallInto(ctx context.Context, request, buffer []byte, options ...CallOption) ([]byte, error) {
	c.mutex.Lock()
	// Also of who recovers from asking without a context.
	defer c.mutex.Unlock()
	call := c.newCall()
	call.into = buffer
	err := c.submit(ctx, call, request, options)
	var reply []byte
	if err == nil {
		if reply, err = c.collect(ctx, call); !call.isOver {
			c.abandon(call)
		}
	}
	*call = Call{answers: call.answers[:0]}
	c.spare = append(c.spare, call)
	return reply, err
}

// Submit asks without awaiting the answer, which [Call.Await] or [Call.Parts] brings. It waits, until the context ends, for room and while 1,024 calls
// are in flight; of a request that is larger than the lane's largest message, until all of it is in the lane. The service is told the
// context's deadline.
//
// Errors: as [Client.Call], but for the answers.
func (c *Client) Submit(ctx context.Context, request []byte, options ...CallOption) (*Call, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	call := &Call{}
	if err := c.submit(ctx, call, request, options); err != nil {
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
	if c.discovery != nil && !c.isClosed() {
		if err := c.pollEnds(ctx); err != nil {
			return err
		}
	}
	for {
		if err := c.usable(len(message)); err != nil {
			return err
		}
		link, err := c.writeToAny(calls.Header{Kind: calls.KindNotify}, message)
		if err != nil {
			return err
		}
		if link != nil {
			c.countSubmission()
			return c.waitUntilWritten(ctx, link, len(message))
		}
		if err := c.wait(ctx, waiter{what: waitSpace, bytes: len(message)}); err != nil {
			return err
		}
	}
}

// pollEnds takes in what services have said, in case that one of them drains or has ended: what it is told nobody takes, and nothing
// comes back that would say so.
func (c *Client) pollEnds(ctx context.Context) error {
	if !slices.ContainsFunc(c.links, func(l *clientLink) bool { return !l.isBackpressured && l.in.Consumer.MayBeReady() }) {
		return nil
	}
	if c.leader == nil {
		c.poll(nil)
		c.passOn()
		return nil
	}
	return c.wait(ctx, waiter{what: waitPoll, polls: c.polls})
}

// Await waits for the reply until the context ends; the call stays in flight then. Otherwise as [Client.Call].
func (call *Call) Await(ctx context.Context) ([]byte, error) {
	c := call.client
	c.mutex.Lock()
	defer c.mutex.Unlock()
	call.into = nil
	return c.collect(ctx, call)
}

// Parts are the parts of a reply as they come, a whole one as the only part; those that an Await has taken whose context ended come first, as
// one. The bytes of one are the loop body's until its end. The error, if there is one, comes last, with no bytes. Who leaves the loop before,
// and whose context ends, has cancelled the call.
//
// Parts of which nobody asks for more wait in memory, up to [Options.CallBytesMax], then in the lane, before the other answers there. So
// ask for more, or leave the loop.
func (call *Call) Parts(ctx context.Context) iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) {
		defer call.Cancel()
		c := call.client
		var buffer []byte
		c.mutex.Lock()
		var taken []byte
		if !call.isOver {
			taken, call.parts = call.parts, nil
		}
		c.mutex.Unlock()
		if len(taken) > 0 && !yield(taken, nil) {
			return
		}
		for {
			c.mutex.Lock()
			call.into = buffer
			answer, err := c.next(ctx, call)
			c.mutex.Unlock()
			if err != nil {
				yield(nil, err)
				return
			}
			if answer.kind == calls.KindEnd {
				return
			}
			buffer = answer.bytes
			if !yield(answer.bytes, nil) || answer.kind == calls.KindReply {
				return
			}
		}
	}
}

// Cancel gives the call up: none of its answers is received any more, and who awaits one has [ErrRefused]. The service is told, and may leave
// its work. It does not wait. A call that is over is none to be cancelled.
func (call *Call) Cancel() {
	c := call.client
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if !call.isOver {
		c.abandon(call)
	}
}

// Services is how many services this client asks at the moment, as far as it has found them, without those that drain.
func (c *Client) Services() int {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.leader == nil && !c.isClosed() {
		c.poll(nil)
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
	_, again := c.guard.Close()
	isLed := c.leader != nil
	c.mutex.Unlock()
	if again {
		return nil
	}
	c.end()
	if isLed {
		// Who leads does the rest.
		c.bell.Wake()
		return nil
	}
	c.tearDown()
	return nil
}

func (c *Client) isClosed() bool { return c.guard.IsClosing() }

func closedHandle() error {
	return fail.New(fail.ErrClosedHandle, "the client is closed: connect anew")
}

// tearDown is asked once: nobody looks at the lanes any more, nor will.
func (c *Client) tearDown() {
	c.handshakes.Wait()
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.closeLost()
	c.takeConnected()
	for _, link := range c.links {
		link.close()
	}
	c.links = nil
	c.bell.Close()
	c.page.Close()
}

func (c *Client) newCall() *Call {
	if n := len(c.spare); n > 0 {
		call := c.spare[n-1]
		c.spare = c.spare[:n-1]
		return call
	}
	return &Call{}
}
