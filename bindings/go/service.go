package pelton

import (
	"context"
	"errors"
	"log"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"pelton/internal/calls"
	"pelton/internal/doorbell"
	"pelton/internal/fail"
	"pelton/internal/handshake"
	"pelton/internal/kernel"
	"pelton/internal/lane"
	"pelton/internal/limits"
	"pelton/internal/packet"
	"pelton/internal/wait"
)

// Service answers requests of all who connect under its name, up to 1,024 clients. [Service.Serve] has a goroutine for each request;
// [Service.Receive] is for a loop of the caller's own. Requests are answered by any goroutine, in any order.
type Service struct {
	receiver *Receiver
	bytesMax int
	handlers int
	// Whether there is something to see here besides requests.
	isNotified atomic.Bool
	mustStop   atomic.Bool
	mustDrain  atomic.Bool
	// Clients have been told to ask elsewhere.
	isDraining bool
	// Found by a look, for the call to take; none if nothing is asked.
	found Request
	// For what is kept of all clients, of which each has a share.
	memory *limits.Budget
	// Clients that broke the rules, and were sent away.
	corrupt atomic.Uint64
	// Requests of nobody's any more, to be used again.
	mutex sync.Mutex
	spare []*requestBody
	// Bytes of theirs.
	kept int
}

// keptMost is the memory that a service has for replies that wait and requests in pieces, unless its options say otherwise: a guess, four of the largest
// requests by default.
const keptMost = 256 << 20

// ListenService listens under a short name, or unix:PATH. It does not wait. Under a short name several services may listen, of one process or
// of several: clients spread their calls over them. Of the options, Capacity and MessageBytesMax (at least 1024) are of the lanes of
// replies, CallBytesMax is the largest request, SendersMax the most clients, and Handlers is for [Service.Serve].
//
// Errors: as [Listen].
func ListenService(name string, options *Options) (*Service, error) {
	s := &Service{}
	o := options.orDefault()
	settings, err := o.forCalls(2)
	if err != nil {
		return nil, err
	}
	if s.bytesMax, s.handlers = int(settings.CallBytes), o.Handlers; s.handlers == 0 {
		s.handlers = 1024
	}
	if s.memory = limits.NewBudget(o.Memory); s.memory == nil {
		s.memory = limits.NewBudget(max(keptMost, 4*s.bytesMax))
	}
	if _, err = gather(name, o, settings, s); err != nil {
		return nil, err
	}
	return s, nil
}

// accept is the hand-shake with a client.
func (s *Service) accept(shake *handshake.Handshake, to *handshake.ReceivingSide) (*inLane, error) {
	bell, err := doorbell.NewLazy()
	if err != nil {
		return nil, shake.Report(err)
	}
	c := &session{service: s, peer: shake.Peer, bell: bell, kept: limits.Client{Budget: s.memory}, spin: wait.Spin{IsBusy: s.receiver.options.Wait == Spin}}
	kick := func() {
		to.Bell.Wake()
		bell.Wake()
		c.forgetContexts()
	}
	lanes, err := shake.NewCallLink(to, bell, packet.RoleService, true, kick)
	if err != nil {
		bell.Close()
		return nil, err
	}
	c.out, c.bytesMax, c.link = calls.NewOutbox(lanes, s.receiver.options.ResidentMax), lanes.BytesMax, lanes.In.Link
	return &inLane{Incoming: *lanes.In, session: c}, nil
}

// notify has whoever looks for requests see what is to be seen besides.
func (s *Service) notify() {
	s.isNotified.Store(true)
	s.receiver.bell.Wake()
}

// Receive waits for the next request, of all clients by turns, until the context ends. Each is to be answered once, by Reply, Fail, End or
// Abandon. One goroutine at a time.
//
// Errors: the context's; [ErrClosed] once Stop was called, or everything is answered after Drain; [ErrClosedHandle]; [ErrSystem].
func (s *Service) Receive(ctx context.Context) (Request, error) {
	r := s.receiver
	if err := r.guard.Enter(); err != nil {
		return Request{}, err
	}
	defer r.leave()
	there, err := s.poll()
	if !there && err == nil {
		err = wait.For(ctx, (*serviceWait)(s), r.bell, &r.spin, &r.guard)
	}
	if err != nil {
		return Request{}, err
	}
	found := s.found
	s.found = Request{}
	return found, nil
}

func (s *Service) poll() (bool, error) {
	if s.found.body != nil {
		return true, nil
	}
	r := s.receiver
	if s.isNotified.Load() || s.isDraining {
		if err := s.checkEnd(); err != nil {
			return false, err
		}
	}
	for range calls.RecordsPerPoll {
		there, err := r.poll()
		if err != nil || !there {
			return false, err
		}
		in := r.lanes[r.current]
		if rule := s.handle(in, r.found); rule != "" {
			// That client's affair alone.
			s.corrupt.Add(1)
			r.dropLane(in)
			r.advance()
			continue
		}
		if s.found.body != nil {
			return true, nil
		}
	}
	return false, nil
}

// handle takes the next record; what is a request, and whole, is found. It answers the rule that is broken, else "".
func (s *Service) handle(in *inLane, record lane.Record) string {
	h, payload, rule := calls.ReadRecord(in.Consumer, record, true)
	if rule != "" {
		return rule
	}
	if len(payload) > s.bytesMax {
		return "size"
	}
	c, isGone := in.session, in.Link.IsGone.Load()
	isRequest := h.Kind == calls.KindRequest
	if isRequest && !h.Continued && !c.begin(h.Id) {
		return "id"
	}
	isPiece := h.More || h.Continued
	if isPiece {
		// Of what is given back nothing is kept.
		isKept := !(isRequest && s.isDraining) && c.assembly.HasMemory(&c.kept, len(payload))
		if rule := c.assembly.Add(h, payload, s.bytesMax, isKept); rule != "" {
			return rule
		}
	}
	switch {
	case h.More:
	case h.Kind == calls.KindCancel:
		c.cancel(h.Id)
	case isRequest && isGone:
		// Nobody awaits the answer.
		c.assembly.Drop(isPiece)
	case isRequest && s.isDraining:
		c.assembly.Drop(isPiece)
		_ = c.sendLast(calls.Header{Id: h.Id, Kind: calls.KindReturned}, nil)
	case isPiece && c.assembly.IsDiscarded:
		bytes := c.assembly.Count
		c.assembly.Forget()
		// Of a notification nobody is told.
		if isRequest {
			failed, text, _ := c.noMemory(h.Id, bytes)
			_ = c.sendLast(failed, text)
		}
	default:
		asked, deadline := s.newBody(), h.Deadline
		if isPiece {
			var first calls.Header
			first, asked.bytes = c.assembly.Take()
			deadline = first.Deadline
		} else {
			asked.bytes = append(asked.bytes[:0], payload...)
		}
		s.receiver.spin.RequestBytes = len(asked.bytes)
		s.found = Request{body: asked, use: asked.use.Load(), caller: c, id: h.Id, deadline: deadline}
	}
	if record.Descriptors > 0 {
		files, _ := in.takeFiles()
		in.Link.Discard(files)
	}
	in.Consumer.Take(record)
	s.receiver.count(in)
	if in.Consumer.ReleaseTaken() == lane.Ring {
		in.Link.Ring()
	}
	return ""
}

// checkEnd sees whether to stop, or to drain.
func (s *Service) checkEnd() error {
	s.isNotified.Store(false)
	isOver := s.mustStop.Load()
	if s.mustDrain.Load() {
		isOver = s.drain() || isOver
	}
	if !isOver {
		return nil
	}
	// To be seen again by the next call.
	s.isNotified.Store(true)
	return fail.New(fail.ErrClosed, "the service was told to end")
}

// drain tells clients to go elsewhere, and each when all its calls are answered. True: all have been told.
func (s *Service) drain() bool {
	r := s.receiver
	hasBegun := s.isDraining
	if s.isDraining = true; !hasBegun {
		r.registry.close(r)
	}
	areAll := true
	for _, in := range r.lanes {
		if !hasBegun {
			in.session.notify(calls.KindDraining)
		}
		// Of a request only some has come.
		isPart := in.session.assembly.Header.Kind == calls.KindRequest
		areAll = in.session.endDrain(isPart) && areAll
	}
	return areAll
}

// serviceWait is a service that waits for a request.
type serviceWait Service

func (w *serviceWait) Poll() (bool, error) { return (*Service)(w).poll() }

func (w *serviceWait) MayBeReady() bool { return w.isNotified.Load() || w.receiver.mayBeReady() }

func (w *serviceWait) Disarm() { w.receiver.sleeper.Disarm() }

func (w *serviceWait) NeedsTimedWait() bool { return (*receiveWait)(w.receiver).NeedsTimedWait() }

func (w *serviceWait) Arm() (bool, error) {
	s, r := (*Service)(w), w.receiver
	r.sleeper.Arm(r.areSendersFencing, kernel.Membarrier)
	if there, err := s.poll(); there || err != nil {
		r.sleeper.Disarm()
		return false, err
	}
	// What was found and was no request has ended the sleep as well.
	return r.sleeper.IsArmed(), nil
}

// Serve answers requests by the handler, each in a goroutine, as many at a time as [Options.Handlers] says; then more are not taken.
// It ends when Stop is called, or Drain and everything is answered, and the handlers at work are through. A request that the handler has not
// answered when it returns, or panics, is abandoned; a panic is logged.
//
// The goroutine that takes a request handles it, as to have another do so costs more than a short handler; after a millisecond or
// two another goroutine goes on taking requests, and further ones have goroutines of their own for some time.
//
// Errors: as Receive, but for [ErrClosed], which is how this ends: nil.
func (s *Service) Serve(ctx context.Context, handler func(request Request)) error {
	v := &serving{
		service: s, ctx: ctx, handler: handler, free: make(chan struct{}, s.handlers),
		wake: make(chan struct{}, 1), ended: make(chan error, 1), over: make(chan struct{}),
	}
	if s.handlers > 1 {
		v.at.Add(1)
		go v.watch()
	}
	v.at.Add(1)
	v.take()
	err := <-v.ended
	close(v.over)
	v.at.Wait()
	if errors.Is(err, ErrClosed) {
		return nil
	}
	return err
}

// serving is a Serve that is under way.
type serving struct {
	service *Service
	ctx     context.Context
	handler func(request Request)
	// The goroutines, and places for handlers.
	at   sync.WaitGroup
	free chan struct{}
	// Odd while who takes requests handles one, one more at each change: who takes that away from it goes on taking.
	turn atomic.Uint64
	// So many requests to come have a goroutine each.
	slow     atomic.Int64
	isAsleep atomic.Bool
	wake     chan struct{}
	// Why no more is taken; and that all is over.
	ended chan error
	over  chan struct{}
}

const (
	tick      = time.Millisecond
	slowTurns = 1024
)

func (v *serving) take() {
	defer v.at.Done()
	for {
		request, err := v.service.Receive(v.ctx)
		if err != nil {
			v.ended <- err
			return
		}
		request.isServed = true
		v.free <- struct{}{}
		if v.slow.Load() > 0 {
			v.slow.Add(-1)
			v.at.Add(1)
			go func() {
				defer v.at.Done()
				request.handle(v.handler)
				<-v.free
			}()
			continue
		}
		turn := v.turn.Add(1)
		if v.isAsleep.Load() && v.isAsleep.CompareAndSwap(true, false) {
			v.wake <- struct{}{}
		}
		request.handle(v.handler)
		<-v.free
		if !v.turn.CompareAndSwap(turn, turn+1) {
			return
		}
	}
}

// watch has another goroutine take requests when one that handles a request does not come back.
func (v *serving) watch() {
	defer v.at.Done()
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	for last := uint64(0); ; {
		select {
		case <-ticker.C:
		case <-v.over:
			return
		}
		turn := v.turn.Load()
		isSame := turn == last
		last = turn
		switch {
		case isSame && turn%2 == 1 && v.turn.CompareAndSwap(turn, turn+1):
			v.slow.Store(slowTurns)
			v.at.Add(1)
			go v.take()
		case isSame:
			// Nothing happens: until something does.
			ticker.Stop()
			if v.isAsleep.Store(true); v.turn.Load() != turn && v.isAsleep.CompareAndSwap(true, false) {
				ticker.Reset(tick)
				continue
			}
			select {
			case <-v.wake:
			case <-v.over:
				return
			}
			ticker.Reset(tick)
		}
	}
}

func (r Request) handle(handler func(request Request)) {
	defer func() {
		if what := recover(); what != nil {
			log.Printf("pelton: a handler panicked, and its call is abandoned: %v\n%s", what, debug.Stack())
		}
		if r.isOpen() {
			_ = r.Abandon()
		}
		r.putBack()
	}()
	handler(r)
}

// Stop has Receive say [ErrClosed] from now on, and Serve return. Clients are not told before Close; then all calls that were not answered have
// failed. Does not wait. To replace a service under a short name use Drain.
func (s *Service) Stop() {
	s.mustStop.Store(true)
	s.notify()
}

// Drain has the service answer what it has taken, and take no more: requests that come from now on are given back, and their clients ask
// another service of the name, without a call failing or being carried out twice. Start that one before. Notifications and
// cancels are taken as before, by Receive or Serve, which end once every client has been told that everything it had asked is
// answered; close the service then. Does not wait. A client that does not read its replies holds this up; Stop ends it all the same.
func (s *Service) Drain() {
	s.mustDrain.Store(true)
	s.notify()
}

// Close ends the service: all calls in flight fail with [ErrClosed] at their clients. It does not wait. A call of another goroutine ends with
// [ErrClosedHandle]. Closing twice does nothing.
func (s *Service) Close() error { return s.receiver.Close() }

// CorruptClients is how many clients broke the rules, and were sent away.
func (s *Service) CorruptClients() uint64 { return s.corrupt.Load() }

// Request is what a client asks, or tells. It is answered once, by any goroutine; copies of it are the same request.
type Request struct {
	body *requestBody
	// Which use of what is asked: the next request has another.
	use uint64
	// Here and not there, as who has a copy may use it at any time.
	caller   *session
	id       uint64
	deadline uint64
	// Serve has what is asked until the handler returns.
	isServed bool
}

// requestBody is a request's own, used again for another when it is answered.
type requestBody struct {
	bytes []byte
	// Odd while it waits for its answer.
	use atomic.Uint64
}

// Of a request's memory, what is kept for the next one; and of all that are kept. A large one that is made anew each time costs more than what is
// done with it: it is cleared, and the collector runs for it.
const (
	keptBytes      = 1 << 20
	keptBytesInAll = 8 << 20
)

func (s *Service) newBody() *requestBody {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if n := len(s.spare); n > 0 {
		a := s.spare[n-1]
		s.spare = s.spare[:n-1]
		s.kept -= cap(a.bytes)
		return a
	}
	a := &requestBody{}
	a.use.Store(1)
	return a
}

func (r Request) putBack() {
	s, a := r.caller.service, r.body
	a.use.Add(1)
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if cap(a.bytes) > keptBytes || s.kept+cap(a.bytes) > keptBytesInAll {
		a.bytes = nil
	}
	s.kept += cap(a.bytes)
	s.spare = append(s.spare, a)
}

func alreadyAnswered() error {
	return fail.New(fail.ErrRefused, "the request has been answered, or is a notification, which is not answered")
}

func (r Request) isOpen() bool { return r.body != nil && r.body.use.Load() == r.use }

// Bytes is what is asked: a copy, which no client can change. It is the caller's until the request is answered, in a handler of
// [Service.Serve] until that returns.
func (r Request) Bytes() []byte { return r.body.bytes }

// IsNotification says whether the client does not await an answer. To let go of it is to Abandon it, which a handler need not do.
func (r Request) IsNotification() bool { return r.id == 0 }

// Peer is who asked.
func (r Request) Peer() kernel.Peer { return r.caller.peer }

// Deadline is when the client will not await the answer any more; false if it has not said so. Nothing is dropped because of it.
func (r Request) Deadline() (time.Time, bool) { return calls.FromNS(r.deadline) }

// IsCancelled says whether nobody awaits the answer any more: the client has cancelled the call, or is gone. Answer all the same.
func (r Request) IsCancelled() bool {
	return !r.IsNotification() && r.caller.isCancelled(r.id)
}

// Context ends with the request's deadline, when the client cancels the call or goes, and when the request is answered. What the client says is
// heard as requests are taken: not while as many handlers are at work as may be.
func (r Request) Context() context.Context {
	if r.IsNotification() {
		return context.Background()
	}
	return r.caller.contextOf(r.id, r.deadline)
}

// Reply answers; after parts, this is the last of them. It does not wait: what the client has no room for is kept until it has.
//
// Errors: [ErrPeerDied] when the client has gone: the reply is dropped; [ErrTooLarge] for more than the client takes
// ([Options.CallBytesMax] there): answer otherwise; [ErrRefused] of a request that was answered, and of a notification; [ErrServiceMemory] when the reply
// would have to wait and the service has no memory left for it: the call has failed.
func (r Request) Reply(reply []byte) error { return r.last(calls.Header{Kind: calls.KindReply}, reply) }

// Fail fails the call with a code and bytes of the service's own meaning: a [CallError] at the client. Otherwise as Reply.
//
// Errors: also [ErrOption] for a code from 0xffff0000 on, which are the library's; the request is still to be answered.
func (r Request) Fail(code uint32, bytes []byte) error {
	if code >= failedLibrary {
		return fail.New(fail.ErrOption, "the code of a failure is %#x, wanted less than %#x: those from there on are the library's", code, uint32(failedLibrary))
	}
	return r.last(calls.Header{Kind: calls.KindFailed, Code: code}, bytes)
}

// End ends a reply that was given in parts, or has none. Otherwise as Reply.
func (r Request) End() error { return r.last(calls.Header{Kind: calls.KindEnd}, nil) }

// Abandon lets go of the request without an answer: [ErrAbandoned] at the client. Otherwise as Reply.
func (r Request) Abandon() error { return r.last(calls.Header{Kind: calls.KindAbandoned}, nil) }

func (r Request) last(h calls.Header, payload []byte) error {
	if !r.isOpen() {
		return alreadyAnswered()
	}
	c := r.caller
	isNotification := r.id == 0
	if err := checkSize(len(payload), c.bytesMax); err != nil {
		return err
	}
	h.Id = r.id
	if isNotification && h.Kind != calls.KindAbandoned || !r.body.use.CompareAndSwap(r.use, r.use+1) {
		return alreadyAnswered()
	}
	var err error
	if !isNotification {
		err = c.sendLast(h, payload)
	}
	if !r.isServed {
		r.putBack()
	}
	return err
}

// Part gives a part of the reply. It waits until the client has room for it, until the context ends; meanwhile no more of that client's
// requests are taken. One goroutine at a time, of a request.
//
// Errors: the context's, and as Reply. The call goes on after the context's, [ErrTooLarge] and [ErrRefused].
func (r Request) Part(ctx context.Context, part []byte) error {
	if !r.isOpen() || r.IsNotification() {
		return alreadyAnswered()
	}
	c := r.caller
	if err := checkSize(len(part), c.bytesMax); err != nil {
		return err
	}
	return c.sendPart(ctx, calls.Header{Id: r.id, Kind: calls.KindPart}, part)
}
