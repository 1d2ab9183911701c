package pelton

import (
	"context"
	"errors"
	"math/bits"
	"sync/atomic"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/directory"
	"github.com/pelton-ipc/pelton/bindings/go/internal/doorbell"
	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/handshake"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/limits"
	"github.com/pelton-ipc/pelton/bindings/go/internal/link"
	"github.com/pelton-ipc/pelton/bindings/go/internal/memory"
	"github.com/pelton-ipc/pelton/bindings/go/internal/wait"
	"golang.org/x/sys/unix"
)

// SubscribersMax is the largest number of subscribers that a [Publisher] has at a time. In a directory, durable
// subscriptions that no process uses count too.
const SubscribersMax = lane.CursorsMax

// Publisher is the sending endpoint of a broadcast: one publisher, up to [SubscribersMax] subscribers. It copies each
// message into its lane once, whatever their number. Without subscribers, messages are overwritten by later ones.
//
// A subscriber with [Gate] holds the publisher up when it is behind by the whole capacity; Subscribers shows which one
// does. A killed subscriber holds nothing up, a stopped one does. [Options.HoldMax] refuses such subscribers.
//
// One goroutine at a time uses it; any may call NewSubscriber and Close at any time. Subscribers join and leave also
// while no goroutine is in a call.
//
// In a directory, subscribers join by themselves, and the publisher finds each within its next call: see
// [CreatePublisher].
type Publisher struct {
	guard    wait.Guard
	lane     *lane.BroadcastProducer
	side     handshake.PublisherSide
	settings limits.Settings
	spin     wait.Spin
	peers    acceptor
	closed   context.Context
	close    context.CancelFunc
	// In a directory; otherwise nil.
	path *directory.Publication
	// By their slots.
	subscriptions [SubscribersMax]*subscription
	// The subscriber that held the publisher up at its last check, until it is held up no more; 0: none.
	holder uint64
	// Subscribers that were removed because they broke the rules.
	corrupt uint64

	// A subscriber has joined or left, and the publisher has not noticed yet.
	hasNews atomic.Bool
	// Under the mutex of peers.
	arrived  []*handshake.Joining
	isClosed bool

	// The condition of a wait, and what ends a sleep when the holder has held the publisher up for long enough.
	wantedBytes   uint64
	untilReleased bool
	lagTimer      *time.Timer
	// In a directory, when it next tries to meet the subscribers that it could not.
	meetTimer *time.Timer
}

// subscription is a subscriber, as its publisher knows it.
type subscription struct {
	join   uint64
	slot   uint32
	policy lane.Policy
	link   *link.Link
	cursor []byte
	// The segment of the cursor; nil: it lies in the table of a directory.
	page *memory.Segment
	// Since when the publisher has waited for it, with its cursor then; zero: it does not.
	heldSince  time.Time
	heldNumber uint64
}

// SubscriberState is a subscriber, as [Publisher.Subscribers] shows it.
type SubscriberState struct {
	// Peer is its process. Its PID is 0 while no process uses a durable subscription.
	Peer Peer
	// Durable is the name of a durable subscription; "": it is none.
	Durable string
	// Policy and LagAfter are those that it has chosen.
	Policy   Policy
	LagAfter time.Duration
	// Lags reports whether it may be passed now: always with Lag and Latest, and with Gate while it has held the
	// publisher up for longer than LagAfter.
	Lags bool
	// Behind is the number of messages sent and not released by it.
	Behind uint64
	// Messages and Missed are how many it says to have received and to have missed.
	Messages, Missed uint64
	// Holds is how long it has been holding the publisher up, if it does: the lane is full, or the publisher waits until
	// everything is released, and it is the slowest.
	Holds time.Duration
}

// Publish returns a publisher to which other processes subscribe under a short name, or unix:PATH, by
// [ConnectSubscriber]. It does not wait.
//
// Errors: as [Listen].
func Publish(name string, options *Options) (*Publisher, error) {
	o := options.orDefault()
	settings, err := o.forPublisher()
	if err != nil {
		return nil, err
	}
	listener, err := listen(name, o, settings, false)
	if err != nil {
		return nil, err
	}
	p, err := newPublisher(o, listener.settings)
	if err != nil {
		_ = listener.Close()
		return nil, err
	}
	p.peers.run(listener, func(s *handshake.Handshake) error {
		return p.peers.opens(s, func() error { return p.subscribe(s) })
	})
	return p, nil
}

// NewPublisher returns a publisher for goroutines of this process, which subscribe by [Publisher.NewSubscriber]. It
// does not wait.
//
// Errors: [ErrOption], [ErrSystem].
func NewPublisher(options *Options) (*Publisher, error) {
	o := options.orDefault()
	settings, err := o.forPublisher()
	if err != nil {
		return nil, err
	}
	return newPublisher(o, settings)
}

func newPublisher(o Options, settings limits.Settings) (*Publisher, error) {
	canBarrier := kernel.Membarrier()
	page, data, err := memory.NewBroadcast(settings.Makes.LaneBytes, settings.Makes.MessageBytes, settings.Name)
	if err != nil {
		return nil, err
	}
	release := func() { page.Close(); data.Close() }
	ownDoorbell, err := doorbell.New()
	if err != nil {
		release()
		return nil, err
	}
	producer, err := lane.NewBroadcastProducer(lane.BroadcastMemory{Producer: page.Bytes, Data: data.Bytes}, canBarrier)
	if err != nil {
		ownDoorbell.Close()
		release()
		return nil, fail.Lane(err)
	}
	p := publisherOf(o, producer, handshake.PublisherSide{Page: page, Data: data, BytesMax: producer.BytesMax(),
		Doorbell: ownDoorbell, HoldLimit: o.holdLimit()})
	p.settings = settings
	return p, nil
}

func publisherOf(o Options, producer *lane.BroadcastProducer, side handshake.PublisherSide) *Publisher {
	producer.SetHistory(uint64(o.History))
	if o.ResidentMax > 0 {
		producer.SetWindow(min(lane.Window, uint64(o.ResidentMax)))
	}
	p := &Publisher{lane: producer, spin: wait.New(o.Wait == Spin), side: side}
	p.closed, p.close = context.WithCancel(context.Background())
	return p
}

// NewSubscriber returns a subscriber of this process, which has joined already. Any goroutine may call it at any time.
// It waits for a moment, while the goroutine in a call lets it join.
//
// Errors: [ErrRefused] if the publisher has [SubscribersMax] subscribers, does not take the policy, or is of a
// directory; [ErrTimedOut] if that one does not within 5 s; [ErrOption], [ErrClosedHandle], [ErrSystem].
func (p *Publisher) NewSubscriber(options *Options) (*Subscriber, error) {
	o := options.orDefault()
	settings, policy, from, err := o.forSubscriber()
	if err == nil {
		err = o.refuseDurable()
	}
	if err != nil {
		return nil, err
	}
	if p.path != nil {
		return nil, fail.New(fail.ErrRefused,
			"subscribers of a broadcast in a directory join by themselves: use OpenSubscriber")
	}
	ctx, cancel := context.WithTimeout(p.closed, handshakeTimeout)
	defer cancel()
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fail.System("making a socket pair", err)
	}
	theirs, err := handshake.New(ctx, ends[0], p.settings)
	if err != nil {
		unix.Close(ends[1])
		return nil, err
	}
	own, err := handshake.New(ctx, ends[1], settings)
	if err != nil {
		theirs.Close()
		return nil, err
	}
	if !p.begin(func() {
		if p.subscribe(theirs) != nil {
			theirs.Close()
		}
	}) {
		theirs.Close()
		own.Close()
		return nil, fail.New(fail.ErrClosedHandle, "the publisher is closed: make a new one")
	}
	s, err := newSubscriber(o, policy, from)
	if err == nil {
		err = s.join(own)
	}
	if err != nil {
		own.Close()
	}
	switch {
	case err == nil:
		return s, nil
	case p.closed.Err() != nil:
		err = fail.New(fail.ErrClosedHandle, "the publisher was closed during the call")
	case errors.Is(err, context.DeadlineExceeded):
		err = fail.New(fail.ErrTimedOut, "timed out while the publisher's goroutine is in a call: does it run?")
	}
	if s != nil {
		s.doorbell.Close()
	}
	return nil, err
}

// begin runs a handshake in a goroutine. It returns false if the publisher is closed.
func (p *Publisher) begin(do func()) bool {
	p.peers.mutex.Lock()
	defer p.peers.mutex.Unlock()
	if p.isClosed {
		return false
	}
	p.peers.done.Go(do)
	return true
}

// subscribe performs the handshake of one more subscriber, up to the place where the publisher lets it join.
func (p *Publisher) subscribe(s *handshake.Handshake) error {
	joining, err := s.NewSubscription(&p.side)
	if err != nil {
		return err
	}
	p.peers.mutex.Lock()
	p.arrived = append(p.arrived, joining)
	p.peers.mutex.Unlock()
	p.notice()
	return nil
}

// notice has the publisher attend to subscribers that have joined or left: the goroutine in a call, or, if there is
// none, this one.
func (p *Publisher) notice() {
	p.hasNews.Store(true)
	if p.guard.TryEnter() {
		_ = p.attend()
		p.leaveFrom(wait.InBrief)
		return
	}
	p.side.Doorbell.Wake()
}

func (p *Publisher) leave() { p.leaveFrom(wait.InUse) }

func (p *Publisher) leaveFrom(state uint32) {
	for {
		if p.guard.Leave(state) {
			p.tearDown()
			return
		}
		// A goroutine that noticed something during this call has noted it before, and relies on this check.
		if !p.hasNews.Load() || !p.guard.TryEnter() {
			return
		}
		state = wait.InBrief
		_ = p.attend()
	}
}

// attend removes subscribers that have ended, and admits others. It does not wait. After an error, the next call
// repeats what failed.
func (p *Publisher) attend() error {
	p.hasNews.Store(false)
	// Each slot at most twice: in a directory, others could join and leave for ever.
	for range 2 * SubscribersMax {
		join, why, ok := p.lane.Lost()
		if !ok {
			break
		}
		p.part(join, why)
	}
	for _, s := range p.subscriptions {
		if s != nil && s.link.IsPeerGone() {
			p.lose(s)
		}
	}
	p.peers.mutex.Lock()
	arrived := p.arrived
	p.arrived = nil
	p.peers.mutex.Unlock()
	for _, joining := range arrived {
		p.admit(joining)
	}
	return p.meetSubscribers()
}

func (p *Publisher) admit(joining *handshake.Joining) {
	joined, ok := p.lane.Join(joining.Cursor.Bytes, joining.Policy, joining.From)
	if !ok {
		joining.Refuse("the publisher has %d subscribers, as many as a lane takes: close one", SubscribersMax)
		return
	}
	admitted, err := joining.Admit(joined, p.notice)
	if err != nil {
		// It has gone.
		p.lane.Remove(joined.Join)
		joining.Drop()
		return
	}
	p.subscriptions[joined.Slot] = &subscription{join: joined.Join, slot: joined.Slot, policy: joining.Policy,
		link: admitted, cursor: joining.Cursor.Bytes, page: joining.Cursor}
}

// lose removes a subscriber whose process has gone, unless it keeps its place.
func (p *Publisher) lose(s *subscription) {
	if p.path != nil && p.path.KeepsPlace(s.slot) {
		p.lane.SetAway(s.join)
		s.link.Path.Lose()
		s.link.Peer.PID = 0
		return
	}
	p.part(s.join, lane.ErrCursorClosed)
}

// part removes a subscriber: it has closed, broken the rules, or died.
func (p *Publisher) part(join uint64, why error) {
	p.lane.Remove(join)
	for slot, s := range p.subscriptions {
		if s == nil || s.join != join {
			continue
		}
		p.subscriptions[slot] = nil
		if why != lane.ErrCursorClosed {
			p.corrupt++
			// It may be alive, and detects the hang-up.
			s.link.Ring()
		}
		s.close()
	}
}

func (s *subscription) close() {
	s.link.Close()
	if s.page != nil {
		s.page.Close()
	}
}

// Send copies a message into the lane. It waits while a subscriber that gates holds the lane full, until the context
// ends; if it need not wait, it ignores the context. It allocates nothing unless it waits. The end of a subscriber is
// no error.
//
// Errors: the context's; [ErrTooLarge]. In a directory also [ErrNoSpace] if the file system is full, and [ErrSystem]:
// nothing is damaged, try again. After any error, nothing was sent.
func (p *Publisher) Send(ctx context.Context, message []byte) error {
	if err := p.guard.Enter(); err != nil {
		return err
	}
	defer p.leave()
	for {
		space, ok, err := p.reserve(uint64(len(message)))
		if err != nil {
			return err
		}
		if ok {
			p.fill(space, message)
			return nil
		}
		p.lane.CountWait()
		p.wantedBytes, p.untilReleased = uint64(len(message)), false
		if err := wait.For(ctx, (*publishWait)(p), p.side.Doorbell, &p.spin, &p.guard); err != nil {
			return err
		}
	}
}

// TrySend copies a message into the lane if there is space now, else it returns false. It never waits. Errors as Send.
func (p *Publisher) TrySend(message []byte) (bool, error) {
	if err := p.guard.Enter(); err != nil {
		return false, err
	}
	defer p.leave()
	space, ok, err := p.reserve(uint64(len(message)))
	if err == nil && !ok {
		// The one that holds it up may have died.
		_ = p.attend()
		space, ok, err = p.reserve(uint64(len(message)))
	}
	if ok {
		p.fill(space, message)
	}
	return ok, err
}

// reserve reserves space, also by passing a subscriber that has held the publisher up for too long.
func (p *Publisher) reserve(bytes uint64) ([]byte, bool, error) {
	// An earlier reservation found that. Otherwise a publisher that always has space would keep it.
	if p.lane.HasNews() {
		_ = p.attend()
	}
	for {
		space, ok, err := p.lane.TryReserve(bytes)
		if ok {
			p.forgetHolder()
			return space, true, nil
		}
		unbacked, isUnbacked := errors.AsType[*lane.Unbacked](err)
		switch {
		case isUnbacked:
			if err := p.path.Role.Back(p.lane, p.side.Data, unbacked.Bytes); err != nil {
				return nil, false, err
			}
		case err != nil:
			return nil, false, fail.Lane(err)
		case !p.passHolder():
			return nil, false, nil
		}
	}
}

func (p *Publisher) forgetHolder() {
	if p.holder == 0 {
		return
	}
	p.holder = 0
	for _, s := range p.subscriptions {
		if s != nil {
			s.heldSince = time.Time{}
		}
	}
}

func (p *Publisher) subscription(join uint64) *subscription {
	for _, s := range p.subscriptions {
		if s != nil && s.join == join {
			return s
		}
	}
	return nil
}

// passHolder notes which subscriber holds the publisher up, and since when. If that is long enough, it lets that one
// lag, and returns true.
func (p *Publisher) passHolder() bool {
	holder, ok := p.lane.Holder()
	if !ok {
		return false
	}
	// The next reservation has to find that the lane is not full any more.
	p.lane.EndFastPath()
	s := p.subscription(holder.Join)
	if s == nil {
		// It has joined by itself, and this side meets it before it sleeps.
		return false
	}
	// All that it has to release may take longer than one message's space: one that goes on is waited for.
	if s.heldSince.IsZero() || p.untilReleased && s.heldNumber != holder.Number {
		s.heldSince, s.heldNumber = time.Now(), holder.Number
	}
	p.holder = holder.Join
	if left, ok := p.lagsIn(); !ok || left > 0 {
		return false
	}
	p.lane.LetLag(holder.Join)
	s.heldSince = time.Time{}
	return true
}

// lagsIn returns the time until the subscriber that holds the publisher up begins to lag; false: it never does.
func (p *Publisher) lagsIn() (time.Duration, bool) {
	s := p.subscription(p.holder)
	if s == nil || s.policy.Kind != lane.GateUntil || s.heldSince.IsZero() {
		return 0, false
	}
	return time.Duration(min(s.policy.LagAfterNS, 1<<62)) - time.Since(s.heldSince), true
}

// fill publishes a message, and rings sleeping subscribers.
func (p *Publisher) fill(space, message []byte) {
	copy(space, message)
	asleep := p.lane.Commit(uint64(len(message)))
	if asleep == 0 {
		return
	}
	p.lane.NoteRing(link.RingNow())
	for ; asleep != 0; asleep &= asleep - 1 {
		if s := p.subscriptions[bits.TrailingZeros64(asleep)]; s != nil {
			s.link.Ring()
		} else {
			// It has joined by itself: this rings it.
			_ = p.attend()
		}
	}
}

// WaitSubscribers waits until the publisher has at least this number of subscribers. A durable subscription counts also
// while no process uses it. Errors: the context's; in a directory also [ErrSystem], for instance when descriptors run
// out.
func (p *Publisher) WaitSubscribers(ctx context.Context, count int) error {
	if err := p.guard.Enter(); err != nil {
		return err
	}
	defer p.leave()
	return wait.Until(ctx, p.side.Doorbell, &p.guard, func() (bool, error) {
		err := p.attend()
		return p.count() >= count, err
	})
}

func (p *Publisher) count() (count int) {
	for _, s := range p.subscriptions {
		if s != nil {
			count++
		}
	}
	return count
}

// WaitReleased waits until every subscriber that gates has released every message. One with [Options.LagAfter] that
// releases nothing for so long lags from then on, and is not waited for. Errors: as WaitSubscribers.
func (p *Publisher) WaitReleased(ctx context.Context) error {
	if err := p.guard.Enter(); err != nil {
		return err
	}
	defer p.leave()
	_ = p.attend()
	p.untilReleased = true
	defer func() { p.untilReleased = false }()
	if ok, err := (*publishWait)(p).Poll(); ok || err != nil {
		return err
	}
	return wait.For(ctx, (*publishWait)(p), p.side.Doorbell, &p.spin, &p.guard)
}

// publishWait is a publisher that waits for space, or until all is released.
type publishWait Publisher

func (w *publishWait) Poll() (bool, error) {
	p := (*Publisher)(w)
	if p.hasNews.Load() || p.lane.HasNews() {
		_ = p.attend()
	}
	if !p.untilReleased {
		_, ok, err := p.reserve(p.wantedBytes)
		return ok, err
	}
	for {
		if p.lane.IsReleased() {
			p.forgetHolder()
			return true, nil
		}
		if !p.passHolder() {
			return false, nil
		}
	}
}

func (w *publishWait) MayBeReady() bool {
	return w.hasNews.Load() || w.lane.HasNews() || w.lane.MayBeReady()
}

func (w *publishWait) Arm() (bool, error) {
	p := (*Publisher)(w)
	if !p.lane.Arm(p.wantedBytes, p.untilReleased, kernel.Membarrier) {
		return false, nil
	}
	holder, _ := p.lane.Holder()
	// A subscriber that the lane counts no more would not ring.
	ok, err := w.Poll()
	now, isHeld := p.lane.Holder()
	switch {
	case ok || err != nil:
	case isHeld && p.subscription(now.Join) == nil:
		// The end of one that has joined by itself, and that this side has not met, would wake nobody.
		err = p.attend()
	case p.lane.IsArmed() && now.Join == holder.Join:
		if left, ok := p.lagsIn(); ok {
			p.lagTimer = time.AfterFunc(left, p.side.Doorbell.Wake)
		}
		return true, nil
	}
	// The poll ends the sleep when it lets the holder lag, or removes one, and may have loaded that another one is the
	// slowest by now: the next slowest would not ring. The caller arms again.
	p.lane.Disarm()
	return false, err
}

func (w *publishWait) Disarm() {
	w.lane.Disarm()
	if w.lagTimer != nil {
		w.lagTimer.Stop()
		w.lagTimer = nil
	}
}

func (w *publishWait) NeedsTimedWait() bool { return w.lane.NeedsTimedWait() }

func (w *publishWait) PeerPID() int {
	if s := (*Publisher)(w).holding(); s != nil {
		return s.link.Peer.PID
	}
	return 0
}

func (w *publishWait) LastRing() lane.LastRing {
	if s := (*Publisher)(w).holding(); s != nil {
		return lane.CursorLastRing(s.cursor)
	}
	return lane.LastRing{}
}

// holding returns the slowest subscriber that gates; nil: none has unreleased messages.
func (p *Publisher) holding() *subscription {
	holder, ok := p.lane.Holder()
	if !ok {
		return nil
	}
	return p.subscription(holder.Join)
}

// Subscribers returns all subscribers, with how far each is behind, and which one holds the publisher up. It does not
// wait. It returns false for a closed handle, and during a call of another goroutine: send with a context that ends,
// and ask then.
func (p *Publisher) Subscribers() (states []SubscriberState, ok bool) {
	if p.guard.Enter() != nil {
		return nil, false
	}
	defer p.leave()
	_ = p.attend()
	// It loads the cursors.
	p.lane.IsReleased()
	for _, s := range p.subscriptions {
		if s == nil {
			continue
		}
		state := SubscriberState{Peer: s.link.Peer}
		if p.path != nil {
			state.Durable = p.path.Durable(s.slot)
		}
		switch s.policy.Kind {
		case lane.Lag:
			state.Policy = Lag
		case lane.Latest:
			state.Policy = Latest
		case lane.GateUntil:
			state.LagAfter = time.Duration(min(s.policy.LagAfterNS, 1<<63-1))
		}
		var cursor uint64
		cursor, state.Lags = p.lane.Cursor(s.join)
		state.Behind = p.lane.Number() - cursor
		state.Messages, state.Missed = lane.CursorFigures(s.cursor)
		if p.holder == s.join && !s.heldSince.IsZero() {
			state.Holds = max(time.Since(s.heldSince), 1)
		}
		states = append(states, state)
	}
	return states, true
}

// CorruptSubscribers returns how many subscribers this publisher has removed so far because they broke the rules of the
// layout; in a directory also those whose files it does not accept. Each of them finds that the publisher has ended, or
// in a directory [ErrCorrupt] once it is passed. It does not wait. It returns 0 for a closed handle, and during a call
// of another goroutine.
func (p *Publisher) CorruptSubscribers() uint64 {
	if p.guard.Enter() != nil {
		return 0
	}
	defer p.leave()
	_ = p.attend()
	return p.corrupt
}

// Counters returns the statistics of this side. It does not wait. It returns false for a closed handle, and during a
// call of another goroutine.
func (p *Publisher) Counters() (Counters, bool) {
	if p.guard.Enter() != nil {
		return Counters{}, false
	}
	defer p.leave()
	return p.lane.Counters(), true
}

// Capacity returns the size of the lane in bytes.
func (p *Publisher) Capacity() int { return int(p.lane.Capacity()) }

// MessageBytesMax returns the largest message in bytes.
func (p *Publisher) MessageBytesMax() int { return int(p.lane.BytesMax()) }

// Close ends the broadcast: each subscriber receives all messages that the lane still has for it, and then [ErrClosed].
// It does not wait; see WaitReleased. Another goroutine's call ends with [ErrClosedHandle]. Closing twice does nothing.
func (p *Publisher) Close() error {
	p.guard.CloseHandle(p.tearDown, p.side.Doorbell.Wake)
	return nil
}

func (p *Publisher) tearDown() {
	p.peers.mutex.Lock()
	p.isClosed = true
	p.peers.mutex.Unlock()
	p.close()
	if p.peers.listener != nil {
		_ = p.peers.listener.Close()
	}
	p.peers.done.Wait()
	for _, joining := range p.arrived {
		joining.Refuse("the publisher is closed")
	}
	p.lane.Close()
	// The state first, then the rings, last the hang-ups: a subscriber that detects a later one finds the earlier ones.
	for _, s := range p.subscriptions {
		if s != nil {
			s.link.Ring()
			s.close()
		}
	}
	if p.path != nil {
		p.meetTimer.Stop()
		p.path.Close()
	}
	p.side.Doorbell.Close()
	p.side.Page.Close()
	p.side.Data.Close()
}
