package pelton

import (
	"context"
	"iter"
	"runtime"

	"github.com/pelton-ipc/pelton/bindings/go/internal/doorbell"
	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/handshake"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/link"
	"github.com/pelton-ipc/pelton/bindings/go/internal/memory"
	"github.com/pelton-ipc/pelton/bindings/go/internal/names"
	"github.com/pelton-ipc/pelton/bindings/go/internal/wait"
)

// overtakenBytes is how many bytes of overwritten messages one call copies, plus 4096 for each, before it returns. A
// guess: one is rare.
const overtakenBytes = 16 << 20

// Subscriber is a receiving endpoint of a broadcast. It receives each message of the publisher from its first one on,
// in order, or learns how many it has missed. One goroutine at a time uses it; any may call Close at any time.
type Subscriber struct {
	guard     wait.Guard
	sub       *link.Subscription
	doorbell  *doorbell.Own
	spin      wait.Spin
	policy    lane.Policy
	from      lane.From
	reconnect *reconnect
	// In a directory; otherwise nil.
	path *subscriberPath
	// ErrClosed or ErrPeerDied once the publisher is gone and its messages are received, or an ErrCorrupt with details.
	broken error
	// The next message in place.
	found   lane.Record
	isFound bool
	// The next message, if the policy copies.
	buffer   []byte
	isCopied bool
	// The last copies found a message and lost it: the publisher was faster.
	isOvertaken bool
	// The last delivery lies in the lane, and its space is not released yet.
	isLent bool
	// Missed since the last delivery; missed of earlier publishers; missed of this one, as far as counted here.
	missedNow, missedBefore, counted uint64
}

// Delivery is a received message of a broadcast.
type Delivery struct {
	// Bytes are valid until the next call of Receive, TryReceive, Release, Resume or Close, also by another goroutine.
	// With Gate they lie in the lane, otherwise in a buffer of the subscriber.
	Bytes []byte
	// Number is the message's: each publisher counts its messages from 1. In a directory it continues its predecessor's
	// count.
	Number uint64
	// Missed is how many messages the subscriber has missed directly before this one.
	Missed uint64
}

// ConnectSubscriber subscribes to the publisher that listens under a short name, or unix:PATH. It waits for the
// handshake, 5 s at most unless [Options.Await] is set.
//
// Errors: as [ConnectSender]. [ErrRefused] if the publisher has [SubscribersMax] subscribers, or does not take the
// policy.
func ConnectSubscriber(ctx context.Context, name string, options *Options) (*Subscriber, error) {
	o := options.orDefault()
	settings, policy, from, err := o.forSubscriber()
	if err == nil {
		err = o.refuseDurable()
	}
	if err != nil {
		return nil, err
	}
	parsed, err := names.Parse(name)
	if err != nil {
		return nil, err
	}
	settings.Name = name
	s, err := newSubscriber(o, policy, from)
	if err != nil {
		return nil, err
	}
	err = connect(ctx, parsed, settings, o.Await, func(shake *handshake.Handshake, _ bool) error { return s.join(shake) })
	if err != nil {
		s.doorbell.Close()
		return nil, err
	}
	s.reconnect = &reconnect{name: parsed, settings: settings}
	return s, nil
}

// newSubscriber returns a subscriber that has not joined yet.
func newSubscriber(o Options, policy lane.Policy, from lane.From) (*Subscriber, error) {
	ownDoorbell, err := doorbell.New()
	if err != nil {
		return nil, err
	}
	return &Subscriber{doorbell: ownDoorbell, spin: wait.New(o.Wait == Spin), policy: policy, from: from}, nil
}

func (s *Subscriber) join(shake *handshake.Handshake) (err error) {
	s.sub, err = shake.NewSubscriber(s.policy, s.from, s.doorbell)
	return err
}

func (s *Subscriber) leave() {
	if s.guard.Leave(wait.InUse) {
		s.tearDown()
	}
}

// Receive waits for the next message until the context ends; if it need not wait, it ignores the context. It releases
// the one before. It allocates nothing unless it waits, or a message is larger than all before.
//
// Errors: the context's. After the last message an [EndError]: [ErrClosed] if the publisher closed, [ErrPeerDied] if it
// died; Resume waits for the next publisher. [ErrCorrupt]: close the subscriber. In a directory also [ErrSystem], for
// instance when descriptors run out: nothing is lost, try again.
func (s *Subscriber) Receive(ctx context.Context) (Delivery, error) {
	if err := s.guard.Enter(); err != nil {
		return Delivery{}, err
	}
	defer s.leave()
	s.release()
	ok, err := s.poll()
	for !ok && err == nil {
		s.sub.Consumer.CountWait()
		err = wait.For(ctx, (*subscribeWait)(s), s.doorbell, &s.spin, &s.guard)
		// Otherwise it was overtaken, and did not sleep.
		if ok = s.isFound || s.isCopied; !ok && err == nil {
			err = wait.Interrupted(ctx, &s.guard)
		}
	}
	if err != nil {
		return Delivery{}, err
	}
	return s.deliver(), nil
}

// TryReceive returns the next message if it is there now. It never waits. Otherwise as Receive.
func (s *Subscriber) TryReceive() (Delivery, bool, error) {
	if err := s.guard.Enter(); err != nil {
		return Delivery{}, false, err
	}
	defer s.leave()
	s.release()
	if ok, err := s.poll(); err != nil || !ok {
		return Delivery{}, false, err
	}
	return s.deliver(), true, nil
}

// Messages iterates over all messages, until the publisher closes or the context ends. It releases each after the
// loop's body. An error comes last, without a message; that the publisher closed is none.
func (s *Subscriber) Messages(ctx context.Context) iter.Seq2[Delivery, error] {
	return messages(ctx, s.Receive, func(Delivery) error { return s.Release() })
}

// Release releases the last message before the next call of Receive. With Gate it keeps its space until one of the two.
// It does not wait. Errors: [ErrClosedHandle], [ErrConcurrentUse].
func (s *Subscriber) Release() error {
	if err := s.guard.Enter(); err != nil {
		return err
	}
	defer s.leave()
	s.release()
	return nil
}

func (s *Subscriber) release() {
	if s.isLent {
		s.isLent = false
		s.giveBack()
	}
}

// giveBack releases everything that was taken, and rings a publisher that waits for it.
func (s *Subscriber) giveBack() {
	if s.sub.Consumer.Release() == lane.Ring {
		s.sub.Consumer.NoteRing(link.RingNow())
		s.sub.Link.Ring()
	}
}

// deliver returns the message that was found.
func (s *Subscriber) deliver() Delivery {
	delivery := Delivery{Missed: s.missedNow}
	s.missedNow = 0
	if s.isCopied {
		s.isCopied, s.isLent = false, s.isDurable()
		delivery.Bytes, delivery.Number = s.buffer[:len(s.buffer):len(s.buffer)], s.sub.Consumer.Number()-1
		return delivery
	}
	delivery.Bytes, delivery.Number = s.sub.Consumer.Payload(s.found), s.sub.Consumer.Number()
	s.sub.Consumer.Take(s.found)
	s.isFound, s.isLent = false, true
	return delivery
}

// poll finds the next message.
func (s *Subscriber) poll() (bool, error) {
	if s.isFound || s.isCopied {
		return true, nil
	}
	if s.broken != nil {
		return false, s.ended()
	}
	if ok, err := s.find(); ok || err != nil || s.isOvertaken {
		return ok, err
	}
	generation, _ := s.sub.Consumer.Publisher()
	// Loaded once: a successor may begin meanwhile.
	hasClosed, closed := s.hasClosed()
	if !hasClosed {
		if isGone, err := s.isPublisherGone(); err != nil || !isGone {
			return false, err
		}
		// If it closed before it died, it closed.
		hasClosed, closed = s.hasClosed()
	}
	// What was committed before the end is visible now. [close]
	if ok, err := s.find(); ok || err != nil || s.isOvertaken {
		return ok, err
	}
	s.broken = ErrPeerDied
	if hasClosed {
		s.broken, generation = ErrClosed, closed
	}
	if s.path != nil {
		s.path.past = generation
	}
	return false, s.ended()
}

func (s *Subscriber) isDurable() bool { return s.path != nil && s.path.isDurable }

func (s *Subscriber) ended() error {
	if isCorrupt(s.broken) {
		return s.broken
	}
	return &EndError{Err: s.broken}
}

// find finds the next message in the lane.
func (s *Subscriber) find() (ok bool, err error) {
	if s.sub.Consumer.ReadsInPlace() {
		s.found, s.isFound, err = s.sub.Consumer.Peek()
		ok = s.isFound
	} else {
		ok, err = s.copy()
	}
	if err != nil {
		s.isFound = false
		s.broken = fail.Lane(err)
		return false, s.broken
	}
	// The publisher may wait for the release of messages that this side has passed over, and sends none before.
	if !ok && s.sub.Consumer.HasPassed() {
		s.giveBack()
	}
	return ok, nil
}

// copy copies the next message into the buffer. A publisher that overtakes each copy does not keep it here: then it
// sets isOvertaken.
func (s *Subscriber) copy() (bool, error) {
	s.isOvertaken = false
	for bytes := 0; bytes < overtakenBytes; bytes += 4096 + len(s.buffer) {
		buffer, found, err := s.sub.Consumer.Copy(s.buffer)
		s.buffer = buffer
		s.missedNow += s.sub.Consumer.Missed() - s.counted
		s.counted = s.sub.Consumer.Missed()
		switch {
		case err != nil:
			return false, err
		case found == lane.CopiedMessage:
			s.isCopied = true
			// A durable one is released when the caller is done with it: a successor receives it otherwise.
			if !s.isDurable() {
				s.giveBack()
			}
			return true, nil
		case found == lane.CopiedNothing:
			return false, nil
		}
	}
	s.isOvertaken = true
	return false, nil
}

// subscribeWait is a subscriber that waits for a message.
type subscribeWait Subscriber

func (w *subscribeWait) Poll() (bool, error) {
	s := (*Subscriber)(w)
	ok, err := s.poll()
	// The caller polls again, and notices that it is interrupted.
	return ok || s.isOvertaken, err
}

func (w *subscribeWait) MayBeReady() bool { return w.sub.Consumer.MayBeReady() }

func (w *subscribeWait) Arm() (bool, error) {
	w.sub.Consumer.Arm(kernel.Membarrier)
	if ok, err := w.Poll(); ok || err != nil {
		w.Disarm()
		return false, err
	}
	w.sub.Consumer.CountSleep()
	return true, nil
}

func (w *subscribeWait) Disarm() { w.sub.Consumer.Disarm() }

func (w *subscribeWait) NeedsTimedWait() bool { return w.sub.Consumer.NeedsTimedWait() }

func (w *subscribeWait) PeerPID() int { return w.sub.Link.Peer.PID }

func (w *subscribeWait) LastRing() lane.LastRing { return w.sub.Consumer.LastRing() }

// Resume waits, after [ErrClosed] or [ErrPeerDied], for the next publisher under the name, and subscribes to it with
// the same options. That one counts its messages from 1. In a directory the subscription stays as it is, also while it
// has no publisher, and the next one continues the count.
//
// Errors: as [ConnectSubscriber] with [Options.Await]; [ErrRefused] if the publisher has not ended, or has no name.
// After an error it may be called again.
func (s *Subscriber) Resume(ctx context.Context) error {
	if err := s.guard.Enter(); err != nil {
		return err
	}
	defer s.leave()
	s.release()
	switch {
	case s.path == nil && s.reconnect == nil:
		return fail.New(fail.ErrRefused, "a publisher without a name has no successor")
	case s.broken == nil:
		return fail.New(fail.ErrRefused, "the publisher has not ended, or not all its messages were received")
	case isCorrupt(s.broken):
		return s.broken
	case s.path != nil:
		return s.resumeByPath(ctx)
	}
	former := s.sub
	err := s.reconnect.resume(ctx, &s.guard, func(shake *handshake.Handshake, _ bool) error { return s.join(shake) })
	if err != nil {
		s.sub = former
		return err
	}
	s.missedBefore += former.Consumer.Missed()
	s.counted, s.missedNow, s.broken = 0, 0, nil
	closeSubscription(former)
	unmapSubscription(former)
	return nil
}

// Missed returns how many messages this subscriber has missed so far because it fell behind; with Latest, those that it
// skipped. Messages that it missed at the very end of a broadcast are in this count alone. It returns 0 for a closed
// handle, and during a call of another goroutine.
func (s *Subscriber) Missed() uint64 {
	if s.guard.Enter() != nil {
		return 0
	}
	defer s.leave()
	return s.missedBefore + s.sub.Consumer.Missed()
}

// Continues reports whether it continues a durable subscription, and did not begin it: an earlier process has, under
// the same name.
func (s *Subscriber) Continues() bool { return s.path != nil && s.path.continues }

// Counters returns the statistics of this side, since it joined the present publisher. It does not wait. It returns
// false for a closed handle, and during a call of another goroutine.
func (s *Subscriber) Counters() (Counters, bool) {
	if s.guard.Enter() != nil {
		return Counters{}, false
	}
	defer s.leave()
	return s.sub.Consumer.Counters(), true
}

// Peer returns the process that publishes; in a directory the last one, of which the PID is 0 if there was none.
// It does not wait. It must not be called during a call of another goroutine.
func (s *Subscriber) Peer() Peer { return s.sub.Link.Peer }

// Close leaves the broadcast. It does not wait. Another goroutine's call ends with [ErrClosedHandle]. Closing twice
// does nothing. A durable subscription keeps its place, before the last message if that was not released.
func (s *Subscriber) Close() error {
	s.guard.CloseHandle(s.tearDown, s.doorbell.Wake)
	return nil
}

func (s *Subscriber) tearDown() {
	if s.isDurable() {
		s.sub.Consumer.Pause()
		s.sub.Link.Close()
	} else {
		closeSubscription(s.sub)
	}
	if s.path != nil {
		s.path.role.Close()
	}
	s.doorbell.Close()
	if s.isLent && s.sub.Consumer.ReadsInPlace() {
		// The program may hold the slice that lies in the lane: it must not point to nothing.
		runtime.AddCleanup(s, unmapSubscription, s.sub)
		return
	}
	unmapSubscription(s.sub)
}

// closeSubscription leaves a publisher. The state first, then the ring, last the hang-up: a publisher that detects a
// later one finds the earlier ones.
func closeSubscription(sub *link.Subscription) {
	sub.Consumer.Close()
	sub.Link.Ring()
	sub.Link.Close()
}

func unmapSubscription(sub *link.Subscription) {
	for _, segment := range []*memory.Segment{sub.Page, sub.Data, sub.Cursor} {
		segment.Close()
	}
}
