package pelton

import (
	"context"
	"errors"
	"iter"
	"slices"
	"sync"

	"github.com/pelton-ipc/pelton/bindings/go/internal/calls"
	"github.com/pelton-ipc/pelton/bindings/go/internal/doorbell"
	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/handshake"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/limits"
	"github.com/pelton-ipc/pelton/bindings/go/internal/memory"
	"github.com/pelton-ipc/pelton/bindings/go/internal/names"
	"github.com/pelton-ipc/pelton/bindings/go/internal/packet"
	"github.com/pelton-ipc/pelton/bindings/go/internal/wait"
)

// Client calls a [Service]. Any number of goroutines use it at a time. Up to 1,024 calls are in flight, and replies
// come in any order. One of the waiting goroutines receives the replies for all.
//
// Under unix:PATH there is one service. When that ends, every call in flight and every later one fails, with
// [ErrPeerDied], or [ErrClosed] if it closed: then connect again. Under a short name several processes may serve. The
// client sends each call to the service with the fewest of its calls in flight, and continues as long as it is used.
// If a service dies, its calls fail, except those that are [Idempotent], which are sent to another. Calls that a
// draining service had not begun ([Service.Drain]) are always sent to another. For that the client keeps a copy of
// each request until its reply has come.
type Client struct {
	options  Options
	settings limits.Settings
	bytesMax int
	name     names.Name
	page     *memory.Segment
	doorbell *doorbell.Own
	spin     wait.Spin
	guard    wait.Guard
	// Ends with the client, and with it all handshakes.
	context    context.Context
	end        context.CancelFunc
	handshakes sync.WaitGroup

	mutex   sync.Mutex
	sleeper lane.Sleeper
	links   []*clientLink
	// Lost links, which the leader closes, because it uses them.
	lost []*clientLink
	// Set for a short name.
	discovery *discovery
	// Why the only service is gone.
	fate  error
	slots []callSlot
	free  []uint32
	// Slots of calls that have no link, and wait for one.
	unrouted []uint32
	// The bytes of replies that no goroutine awaits yet, those of parts among them, and the number of last ones.
	stashedBytes, stashedPartBytes, stashedFinals int
	// The first link to try for the next request, and to poll.
	nextOpen, currentLink int

	// The leader polls for all waiting goroutines. No other takes replies from the lanes.
	leader *waiter
	// Has been woken to lead.
	nextLeader *waiter
	// Goroutines that await replies; and those that wait for something else, in turn.
	awaiting     *waiter
	spaceWaiters []*waiter
	polls        uint64
	idle         []*waiter
	// Finished calls, to be used again.
	spare []*Call
	// For the leader: the links at its last poll.
	watched []*clientLink
}

// callSlot is a slot for a call in flight.
type callSlot struct {
	slot       uint32
	generation uint32
	state      slotState
	// Another service may carry it out again.
	isIdempotent bool
	// Some of a reply in parts has come.
	hasPart bool
	// How often it was sent again although another service may have begun it.
	repeats int
	// The link that has it; nil if there is none, because of that loss.
	link *clientLink
	loss error
	// The request, in case it is sent again.
	deadline uint64
	isTraced bool
	request  []byte
	call     *Call
}

type slotState uint8

const (
	slotFree slotState = iota
	slotWaiting
	// No goroutine waits for it any more; the service still has it.
	slotAbandoned
)

const (
	// A request that ends each service which begins it must not end all of them.
	repeatsMax = 3
	// How much of a slot's memory for requests is kept.
	keptRequest = 4096
)

// errReturned: the service has returned the call unprocessed.
var errReturned = errors.New("returned")

// clientLink is a client's link to one service.
type clientLink struct {
	out      calls.Outbox
	in       *inLane
	assembly calls.Assembly
	// The path of its socket.
	path string
	// The largest request.
	bytesMax uint64
	// It takes requests with a traceparent.
	takesTraced bool
	// Calls that were sent by it and have no last reply yet.
	inFlight int
	// It returns requests unprocessed.
	isDraining bool
	// It has sent everything.
	isDrained bool
	// The service reads no more requests. The lane of replies reports its end, after the replies.
	isPeerClosed bool
	// The next record is a part, and as many parts wait as may be kept.
	isBackpressured bool
	// The service rings the leader when there is space.
	isArmed bool
	isLost  bool
}

// isOpen reports whether a request may be sent by it.
func (l *clientLink) isOpen() bool {
	return !l.isDraining && !l.isPeerClosed && !l.isLost && !l.in.Link.IsGone.Load() && !l.out.Lane.ConsumerClosed()
}

// takes reports whether a request with this payload may be sent by it.
func (l *clientLink) takes(bytes int) bool { return l.isOpen() && uint64(bytes) <= l.bytesMax }

// recordBytes returns the bytes that write needs, without the record's header, for a payload and what is before it.
func (l *clientLink) recordBytes(bytes, prefix int) int {
	if l.takesTraced {
		return bytes + prefix
	}
	return bytes
}

func (l *clientLink) close() {
	l.out.Close()
	l.in.close()
	l.out.Release()
}

// Call is a call in flight. One goroutine at a time awaits it.
type Call struct {
	client *Client
	id     uint64
	// Replies that have come, and were not taken.
	answers []answer
	// Where the waiting goroutine wants the next one.
	into   []byte
	waiter *waiter
	// The last reply was taken, or the call was cancelled.
	isOver bool
	// Parts that an Await took before its context ended.
	parts []byte
}

type answer struct {
	kind  calls.Kind
	code  uint32
	bytes []byte
	// The bytes that it counts for; 0 if a goroutine awaited it.
	cost int
	// Why the call was lost.
	lost error
}

// ConnectClient connects to the service that listens under a short name, or unix:PATH. It waits for the handshake, 5
// s at most unless [Options.Await] is set. Under a short name it connects to any service first, and to another if
// that does not answer; to the others while it is used. Capacity and MessageBytesMax (at least 1024) apply to the
// lane of requests, and CallBytesMax is the largest reply.
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
	ownDoorbell, err := doorbell.New()
	if err != nil {
		return nil, err
	}
	settings.Name = name
	page, err := memory.NewReceiverPage("replies " + name)
	if err != nil {
		ownDoorbell.Close()
		return nil, err
	}
	c := &Client{
		options: o, settings: settings, bytesMax: int(settings.CallBytes), name: parsed, page: page, doorbell: ownDoorbell, spin: wait.New(o.Wait == Spin),
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
	lanes, err := s.NewCallLink(&handshake.ReceivingSide{Page: c.page, Doorbell: c.doorbell, IsShared: true},
		c.doorbell, packet.RoleClient, false, c.doorbell.Wake)
	if err != nil {
		return nil, err
	}
	return &clientLink{out: calls.NewOutbox(lanes, c.options.ResidentMax), in: &inLane{Incoming: *lanes.In}, path: path,
		bytesMax: lanes.BytesMax, takesTraced: lanes.Features&packet.TracedRequests != 0}, nil
}

// CallOption is a property of one call.
type CallOption struct {
	isIdempotent bool
	traceparent  string
}

// Idempotent calls may be carried out more than once: if the service dies or closes before a reply has come, the call
// is sent to another service of the name, three times at most. Without effect under unix:PATH, where there is one
// service.
var Idempotent = CallOption{isIdempotent: true}

// Traceparent says of which span of a distributed trace a call is a part, by the text of the header traceparent of W3C
// Trace Context, which OpenTelemetry's propagator writes. The service gets it by [Request.Traceparent]. A text that is
// not valid is as none. A service of an earlier version gets the request without it.
func Traceparent(text string) CallOption { return CallOption{traceparent: text} }

// Call sends a request and waits for the reply, until the context ends; then the call is cancelled. Parts are joined,
// up to [Options.CallBytesMax]. The service gets the context's deadline.
//
// Errors: the context's. [*CallError] and [ErrAbandoned] come from the service. [ErrTooLarge] if the request is
// larger than the service takes. [ErrPeerDied] and [ErrClosed] if the service is gone: it may have carried the call
// out. [ErrNoListener] if no process serves the name. [ErrRefused] if the only service drains and did not begin the
// call, or if too many replies wait to be taken. [ErrCorrupt] if the service broke the rules. [ErrClosedHandle].
func (c *Client) Call(ctx context.Context, request []byte, options ...CallOption) ([]byte, error) {
	return c.CallInto(ctx, request, nil, options...)
}

// CallInto does the same as Call, and puts the reply into the buffer, from its start, or into a larger one. It
// returns the reply. If the buffer is large enough it allocates nothing, unless it sleeps.
func (c *Client) CallInto(ctx context.Context, request, buffer []byte, options ...CallOption) ([]byte, error) {
	c.mutex.Lock()
	// Deferred, so that a panic for want of a context leaves the lock free.
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

// Submit sends a request. [Call.Await] or [Call.Parts] returns the reply. It waits for space, and while 1,024 calls
// are in flight, until the context ends; a request larger than the lane's largest message, until all of it is in the
// lane. The service gets the context's deadline.
//
// Errors: as [Client.Call], except the service's.
func (c *Client) Submit(ctx context.Context, request []byte, options ...CallOption) (*Call, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	call := &Call{}
	if err := c.submit(ctx, call, request, options); err != nil {
		return nil, err
	}
	return call, nil
}

// Notify sends a notification, which has no reply. It waits for space until the context ends. If the service ends,
// notifications that it had not taken are lost without an error.
//
// Errors: as [Client.Submit]. With the context's, nothing was sent, unless the message is larger than the lane's
// largest.
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

// pollEnds checks whether a service drains or has ended: nothing would take the notification, and no reply would
// report that.
func (c *Client) pollEnds(ctx context.Context) error {
	if !slices.ContainsFunc(c.links, func(l *clientLink) bool {
		return !l.isBackpressured &&
			l.in.Consumer.MayBeReady()
	}) {
		return nil
	}
	if c.leader == nil {
		c.poll(nil)
		c.passOn()
		return nil
	}
	return c.wait(ctx, waiter{what: waitPoll, polls: c.polls})
}

// Await waits for the reply until the context ends; then the call stays in flight. Otherwise as [Client.Call].
func (call *Call) Await(ctx context.Context) ([]byte, error) {
	c := call.client
	c.mutex.Lock()
	defer c.mutex.Unlock()
	call.into = nil
	return c.collect(ctx, call)
}

// Parts iterates over the parts of the reply as they come. A whole reply is its only part; parts that an Await took
// before its context ended come first, as one. The bytes are valid until the end of the loop's body. An error comes
// last, without bytes. The call is cancelled when the loop is left early or the context ends.
//
// Parts that the loop does not take yet are kept in memory, up to [Options.CallBytesMax], and then in the lane, where
// they block other replies of this client.
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

// Cancel cancels the call: its replies are dropped, and a goroutine that awaits it gets [ErrRefused]. The service is
// notified, and may stop its work. It does not wait. For a finished call it does nothing.
func (call *Call) Cancel() {
	c := call.client
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if !call.isOver {
		c.abandon(call)
	}
}

// Services returns the number of services that this client uses at the moment, without those that drain.
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

// Close closes the client: the service drops its calls. Other goroutines' calls end with [ErrClosedHandle]. It does
// not wait for replies. Closing twice does nothing.
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
		// The leader does the rest.
		c.doorbell.Wake()
		return nil
	}
	c.tearDown()
	return nil
}

func (c *Client) isClosed() bool { return c.guard.IsClosing() }

func closedHandle() error {
	return fail.New(fail.ErrClosedHandle, "the client is closed: connect anew")
}

// tearDown is called once, when no goroutine uses the lanes any more.
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
	c.doorbell.Close()
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
