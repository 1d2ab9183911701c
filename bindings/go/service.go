package pelton

import (
	"context"
	"errors"
	"log"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/calls"
	"github.com/pelton-ipc/pelton/bindings/go/internal/doorbell"
	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/handshake"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/limits"
	"github.com/pelton-ipc/pelton/bindings/go/internal/packet"
	"github.com/pelton-ipc/pelton/bindings/go/internal/wait"
)

// Service answers requests from all clients that connect under its name, up to 1,024. [Service.Serve] handles each
// request in a goroutine; [Service.Receive] is for a loop of the caller's own. Any goroutine may answer a request, in
// any order. One goroutine at a time takes requests; any may call the other methods at any time.
type Service struct {
	receiver *Receiver
	bytesMax int
	handlers int
	// Whether something besides requests is to be checked.
	isNotified atomic.Bool
	mustStop   atomic.Bool
	mustDrain  atomic.Bool
	// Clients were notified to use another service.
	isDraining bool
	// Found by a poll, for the call to take.
	found Request
	// For what is kept for all clients.
	memory *limits.Budget
	// Clients that broke the rules, and were dropped.
	corrupt atomic.Uint64
	// Bodies of earlier requests, to be used again, and the memory of large ones.
	mutex sync.Mutex
	spare []*requestBody
	large [][]byte
	// The bytes of both.
	kept int
}

// keptMost is the memory that a service has for replies that wait and requests in pieces, unless its options set it.
// A guess: four of the largest requests by default.
const keptMost = 256 << 20

// ListenService listens under a short name, or unix:PATH. It does not wait. Under a short name several services may
// listen, in one process or in several, and clients spread their calls over them. Capacity and MessageBytesMax (at
// least 1024) apply to the lanes of replies, CallBytesMax is the largest request, SendersMax the number of clients,
// and Handlers is for [Service.Serve].
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

// accept performs the handshake with a client.
func (s *Service) accept(shake *handshake.Handshake, to *handshake.ReceivingSide) (*inLane, error) {
	ownDoorbell, err := doorbell.NewLazy()
	if err != nil {
		return nil, shake.Report(err)
	}
	c := &session{service: s, peer: shake.Peer, doorbell: ownDoorbell, kept: limits.Client{Budget: s.memory},
		spin: wait.New(s.receiver.options.Wait == Spin)}
	wake := func() {
		to.Doorbell.Wake()
		ownDoorbell.Wake()
		c.forgetContexts()
	}
	lanes, err := shake.NewCallLink(to, ownDoorbell, packet.RoleService, true, wake)
	if err != nil {
		ownDoorbell.Close()
		return nil, err
	}
	c.out, c.bytesMax, c.link = calls.NewOutbox(lanes, s.receiver.options.ResidentMax), lanes.BytesMax, lanes.In.Link
	return &inLane{Incoming: *lanes.In, session: c}, nil
}

// notify makes the goroutine that takes requests check what else there is.
func (s *Service) notify() {
	s.isNotified.Store(true)
	s.receiver.doorbell.Wake()
}

// Receive waits for the next request, from all clients round-robin, until the context ends. Answer each once, by
// Reply, Fail, End or Abandon. One goroutine at a time.
//
// Errors: the context's; [ErrClosed] once Stop was called, or everything is answered after Drain; [ErrClosedHandle];
// [ErrConcurrentUse]; [ErrSystem].
func (s *Service) Receive(ctx context.Context) (Request, error) { return s.receive(ctx, false) }

// receive is Receive. startsNone: since the last request its goroutine has started no other one.
func (s *Service) receive(ctx context.Context, startsNone bool) (Request, error) {
	r := s.receiver
	if err := r.guard.Enter(); err != nil {
		return Request{}, err
	}
	defer r.leave()
	there, err := s.poll()
	if !there && err == nil {
		r.doorbell.YieldsRarely = startsNone
		err = wait.For(ctx, (*serviceWait)(s), r.doorbell, &r.spin, &r.guard)
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
			// This affects no other client.
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

// handle takes the next record. It sets found if that completes a request. It returns the name of the rule that the
// record breaks, or "".
func (s *Service) handle(in *inLane, record lane.Record) string {
	h, payload, rule := calls.ReadRecord(in.Consumer, record, true)
	if rule != "" {
		return rule
	}
	var traceparent calls.Traceparent
	payload = payload[copy(traceparent[:], payload[:h.Prefix()]):]
	if len(payload) > s.bytesMax {
		return "size"
	}
	c, isGone := in.session, in.Link.IsGone.Load()
	isRequest := h.Kind == calls.KindRequest
	if isRequest && !h.Continued && !c.begin(h.ID) {
		return "id"
	}
	if h.Traced {
		c.setTraceparent(h.ID, traceparent)
	}
	isPiece := h.More || h.Continued
	if isPiece {
		// A request that is returned is not kept.
		isKept := !(isRequest && s.isDraining)
		if isKept && !h.Continued {
			c.assembly.Reserve(&c.kept, s.takeMemory)
		}
		isKept = isKept && c.assembly.HasMemory(&c.kept, len(payload))
		if rule := c.assembly.Add(h, payload, s.bytesMax, isKept); rule != "" {
			return rule
		}
	}
	switch {
	case h.More:
	case h.Kind == calls.KindCancel:
		c.cancel(h.ID)
	case isRequest && isGone:
		// The client is gone.
		c.assembly.Drop(isPiece)
	case isRequest && s.isDraining:
		c.assembly.Drop(isPiece)
		_ = c.sendLast(calls.Header{ID: h.ID, Kind: calls.KindReturned}, nil)
	case isPiece && c.assembly.IsDiscarded:
		bytes := c.assembly.Count
		c.assembly.Forget()
		// A notification has no reply.
		if isRequest {
			failed, text, _ := c.noMemory(h.ID, bytes)
			_ = c.sendLast(failed, text)
		}
	default:
		asked, deadline := s.newBody(), h.Deadline
		if isPiece {
			var first calls.Header
			first, asked.bytes = c.assembly.Take()
			deadline = first.Deadline
		} else {
			if cap(asked.bytes) < len(payload) && len(payload) > smallBytes {
				asked.bytes = s.takeMemory(len(payload))
			}
			asked.bytes = append(asked.bytes[:0], payload...)
		}
		s.receiver.spin.Bytes = len(asked.bytes)
		s.found = Request{body: asked, use: asked.use.Load(), caller: c, id: h.ID, deadline: deadline}
	}
	if record.Descriptors > 0 {
		files, _ := in.takeFiles()
		in.Link.Discard(files)
	}
	in.Consumer.Take(record)
	s.receiver.count(in)
	if in.Consumer.ReleaseTaken() == lane.Ring {
		in.WakePeer()
	}
	return ""
}

// checkEnd checks whether to stop, or to drain.
func (s *Service) checkEnd() error {
	s.isNotified.Store(false)
	isOver := s.mustStop.Load()
	if s.mustDrain.Load() {
		isOver = s.drain() || isOver
	}
	if !isOver {
		return nil
	}
	// For the next call.
	s.isNotified.Store(true)
	return fail.New(fail.ErrClosed, "the service was stopped or has drained")
}

// drain notifies clients to use another service, and each, when all its calls are answered, of that. It returns true
// when all have been notified.
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
		// Of one request only some pieces have come.
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

func (w *serviceWait) PeerPID() int { return (*receiveWait)(w.receiver).PeerPID() }

func (w *serviceWait) LastRing() lane.LastRing { return (*receiveWait)(w.receiver).LastRing() }

func (w *serviceWait) Arm() (bool, error) {
	s, r := (*Service)(w), w.receiver
	r.sleeper.Arm(r.areSendersFencing, kernel.Membarrier)
	if there, err := s.poll(); there || err != nil {
		r.sleeper.Disarm()
		return false, err
	}
	// A record that was no request has ended the sleep as well.
	return r.sleeper.IsArmed(), nil
}

// Serve handles requests, each in a goroutine, as many at a time as [Options.Handlers] permits; then it takes no
// more. It returns after Stop, or when everything is answered after Drain, once all handlers have returned. A request
// that the handler has not answered when it returns or panics is abandoned; a panic is logged.
//
// The goroutine that takes a request also handles it, because a switch costs more than a short handler. After a
// millisecond or two another goroutine takes requests, and for some time later requests have goroutines of their own.
// They have none if the kernel has preempted a thread of this process meanwhile, and slow handlers are rare.
//
// Errors: as Receive, except [ErrClosed], for which it returns nil.
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

// serving is the state of one Serve.
type serving struct {
	service *Service
	ctx     context.Context
	handler func(request Request)
	// The goroutines, and the handlers that may run.
	at   sync.WaitGroup
	free chan struct{}
	// Odd while the goroutine that takes requests handles one; one more at each change. A goroutine that changes it
	// takes over.
	turn atomic.Uint64
	// This number of later requests have a goroutine each.
	slow     atomic.Int64
	isAsleep atomic.Bool
	wake     chan struct{}
	// Why no more is taken; and that Serve ends.
	ended chan error
	over  chan struct{}
}

const (
	tick      = time.Millisecond
	slowTurns = 1024
	// Two handlers that are slow within so many requests are no accident. A guess.
	slowWithin = 16
)

func (v *serving) take() {
	defer v.at.Done()
	for isInPlace := false; ; {
		request, err := v.service.receive(v.ctx, isInPlace)
		if err != nil {
			v.ended <- err
			return
		}
		request.isServed = true
		v.free <- struct{}{}
		isInPlace = v.slow.Load() <= 0
		if !isInPlace {
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

// watch lets another goroutine take requests when one handles a request for long.
func (v *serving) watch() {
	defer v.at.Done()
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	// The preemptions at the last tick that found another turn, and at the one before, when that turn had not begun.
	preemptions := kernel.Preemptions()
	before := preemptions
	lastSlow := uint64(0)
	for last := uint64(0); ; {
		select {
		case <-ticker.C:
		case <-v.over:
			return
		}
		turn := v.turn.Load()
		isSame := turn == last
		last = turn
		if !isSame {
			before, preemptions = preemptions, kernel.Preemptions()
		}
		switch {
		case isSame && turn%2 == 1 && v.turn.CompareAndSwap(turn, turn+1):
			// Beside other threads, of whatever process, a short handler may wait for a processor that long: once in a
			// time slice, so hardly twice within a few requests. Each has two turns.
			if kernel.Preemptions() == before || turn-lastSlow < 2*slowWithin {
				v.slow.Store(slowTurns)
			}
			lastSlow = turn
			v.at.Add(1)
			go v.take()
		case isSame:
			// Nothing happens: it sleeps until something does.
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

// Stop makes Receive return [ErrClosed] from now on, and Serve return. Clients learn of it when the service is
// closed: then all calls without a reply have failed. It does not wait. To replace a service under a short name, use
// Drain.
func (s *Service) Stop() {
	s.mustStop.Store(true)
	s.notify()
}

// Drain makes the service answer what it has taken, and take no more. Later requests are returned unprocessed, and
// their clients send them to another service of the name: no call fails, and none is carried out twice. Start that
// service before. Notifications and cancels are taken as before, by Receive or Serve, which end once every client has
// all its replies; then close the service. It does not wait. A client that does not read its replies delays the end;
// Stop ends it regardless.
func (s *Service) Drain() {
	s.mustDrain.Store(true)
	s.notify()
}

// Close closes the service: all calls in flight fail with [ErrClosed] at their clients. It does not wait. Another
// goroutine's call ends with [ErrClosedHandle]. Closing twice does nothing.
func (s *Service) Close() error { return s.receiver.Close() }

// CorruptClients returns the number of clients that broke the rules, and were dropped.
func (s *Service) CorruptClients() uint64 { return s.corrupt.Load() }

// Request is a client's request or notification. Any goroutine may use it, and answers it once. Its copies are the
// same request.
type Request struct {
	body *requestBody
	// A number for each use of the body.
	use uint64
	// Here and not in the body, because a copy may be used at any time.
	caller   *session
	id       uint64
	deadline uint64
	// Serve has the body until the handler returns.
	isServed bool
}

// requestBody is used for another request after the answer.
type requestBody struct {
	bytes []byte
	// Odd until the request is answered.
	use atomic.Uint64
}

// The memory of requests is kept for the next ones. To allocate a large one each time costs more than its use: the
// runtime clears it, and collects garbage for it. Small ones stay with their bodies. A large one is used for a request
// of half its size at least, because requests that are not answered for long keep theirs.
const (
	smallBytes = 64 << 10
	// In all.
	keptBytes = 8 << 20
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

// takeMemory returns memory for this number of bytes, that of an earlier request if one fits.
func (s *Service) takeMemory(bytes int) []byte {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	for at, memory := range slices.Backward(s.large) {
		if cap(memory) >= bytes && cap(memory) <= 2*bytes {
			s.large = slices.Delete(s.large, at, at+1)
			s.kept -= cap(memory)
			return memory
		}
	}
	return make([]byte, 0, bytes)
}

func (r Request) putBack() {
	s, a := r.caller.service, r.body
	a.use.Add(1)
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if cap(a.bytes) > keptBytes {
		a.bytes = nil
	}
	s.kept += cap(a.bytes)
	if cap(a.bytes) > smallBytes {
		s.large = append(s.large, a.bytes)
		a.bytes = nil
	}
	s.spare = append(s.spare, a)
	// The oldest first; small ones, of which there may be many, last.
	for s.kept > keptBytes && len(s.large) > 0 {
		s.kept -= cap(s.large[0])
		s.large = slices.Delete(s.large, 0, 1)
	}
	if s.kept > keptBytes {
		s.kept -= cap(a.bytes)
		a.bytes = nil
	}
}

func alreadyAnswered() error {
	return fail.New(fail.ErrRefused, "the request has been answered, or is a notification, which is not answered")
}

func (r Request) isOpen() bool { return r.body != nil && r.body.use.Load() == r.use }

// Bytes returns the request: a copy, which no client can change. It belongs to the caller until the request is
// answered, in a handler of [Service.Serve] until that returns.
func (r Request) Bytes() []byte { return r.body.bytes }

// IsNotification reports whether the client expects no reply. Abandon a notification when it is done with; a handler
// need not.
func (r Request) IsNotification() bool { return r.id == 0 }

// Peer returns the process that sent the request.
func (r Request) Peer() Peer { return r.caller.peer }

// Deadline returns when the client stops waiting; false if it did not say. The service drops nothing because of it.
func (r Request) Deadline() (time.Time, bool) { return calls.FromNS(r.deadline) }

// Traceparent returns the position in a distributed trace with which the request came ([Traceparent]): the text of the
// header, whose span is the parent of this service's spans. "" if it came without a valid one.
func (r Request) Traceparent() string {
	if r.IsNotification() {
		return ""
	}
	return r.caller.traceparentOf(r.id)
}

// IsCancelled reports whether no client waits for the reply any more: it cancelled the call, or is gone. Answer all
// the same.
func (r Request) IsCancelled() bool {
	return !r.IsNotification() && r.caller.isCancelled(r.id)
}

// Context returns a context that ends with the request's deadline, when the client cancels the call or is gone, and
// when the request is answered. A cancel takes effect when requests are taken: not while as many handlers run as may.
func (r Request) Context() context.Context {
	if r.IsNotification() {
		return context.Background()
	}
	return r.caller.contextOf(r.id, r.deadline)
}

// Reply answers the request; after parts, it is the last one. It does not wait: a reply without space at the client
// is kept until there is some.
//
// Errors: [ErrPeerDied] if the client is gone: the reply is dropped; [ErrTooLarge] for more than the client takes
// (its [Options.CallBytesMax]): the request is still to be answered; [ErrRefused] if the request was answered, or is
// a notification; [ErrServiceMemory] if the reply would have to wait and the service has no memory left for it: the
// call has failed.
func (r Request) Reply(reply []byte) error { return r.last(calls.Header{Kind: calls.KindReply}, reply) }

// Fail fails the call with a code and bytes that the service defines. The client gets a [CallError]. Otherwise as
// Reply.
//
// Errors: also [ErrOption] for a code from 0xffff0000, which are the library's: the request is still to be answered.
func (r Request) Fail(code uint32, bytes []byte) error {
	if code >= failedLibrary {
		return fail.New(fail.ErrOption,
			"the code of a failure is %#x, wanted less than %#x: those from there on are the library's", code, uint32(failedLibrary))
	}
	return r.last(calls.Header{Kind: calls.KindFailed, Code: code}, bytes)
}

// End ends a reply in parts, or an empty one. Otherwise as Reply.
func (r Request) End() error { return r.last(calls.Header{Kind: calls.KindEnd}, nil) }

// Abandon drops the request. The client gets [ErrAbandoned]. Otherwise as Reply.
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
	h.ID = r.id
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

// Part sends a part of the reply. It waits for space at the client until the context ends; meanwhile no more of that
// client's requests are taken. One goroutine at a time per request.
//
// Errors: the context's, and as Reply. After the context's, [ErrTooLarge] and [ErrRefused] the call continues.
func (r Request) Part(ctx context.Context, part []byte) error {
	if !r.isOpen() || r.IsNotification() {
		return alreadyAnswered()
	}
	c := r.caller
	if err := checkSize(len(part), c.bytesMax); err != nil {
		return err
	}
	return c.sendPart(ctx, calls.Header{ID: r.id, Kind: calls.KindPart}, part)
}
