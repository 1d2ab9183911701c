package pelton

import (
	"context"
	"errors"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/directory"
	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/handshake"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/link"
	"github.com/pelton-ipc/pelton/bindings/go/internal/wait"
)

// A broadcast in a directory: subscribers join by themselves, days after a message or before the first one, and a
// durable one keeps its place while no process uses it. internal/directory has the files.

// CreatePublisher creates the broadcast at a directory, or opens an existing one with the sizes that it was created
// with, as its publisher. It continues after the last message of its predecessor, whose subscribers continue too. It
// needs no subscriber: without one, later messages overwrite earlier ones, but [Options.History] keeps the last ones.
//
// With [Options.HoldMax] it refuses subscribers that could hold it up for longer, also while it is away: the limit
// stays until the next publisher stores its own, or none.
//
// It waits while another publisher is alive, or a subscription is there that could hold it up for longer than HoldMax:
// for 200 ms, because a killed process keeps its role until the kernel has ended it, and with [Options.Await] until the
// context ends.
//
// Errors: after that wait, together with the context's if that ended, [ErrRoleTaken], and [ErrRefused] for such a
// subscription: end its process, or remove a durable one by [RemoveSubscription], or raise HoldMax. [ErrNotAChannel] if
// something else is there, or a check fails; [ErrNoSpace]; [ErrRebooted]: remove the broadcast, which cannot be
// recovered; [ErrCorrupt], [ErrOption], [ErrSystem].
func CreatePublisher(ctx context.Context, path string, options *Options) (*Publisher, error) {
	o := options.orDefault()
	if _, err := o.forPublisher(); err != nil {
		return nil, err
	}
	makes, err := o.pathMakes()
	if err != nil {
		return nil, err
	}
	for {
		d, err := directory.CreateBroadcast(path, o.access(), makes)
		if err != nil {
			return nil, err
		}
		of, err := d.OpenPublisher(ctx, o.Await, o.holdLimit())
		// Removed meanwhile: there may be another by now.
		if errors.Is(err, ErrNoChannel) {
			continue
		}
		if err != nil {
			return nil, err
		}
		p := publisherOf(o, of.Lane, handshake.PublisherSide{Page: of.Page, Data: of.Data, BytesMax: of.Lane.BytesMax(),
			Doorbell: of.Doorbell})
		p.path = of
		p.meetTimer = time.AfterFunc(meetAgain, p.notice)
		p.meetTimer.Stop()
		// It rings the subscribers of its predecessor. One may end meanwhile, which another goroutine notices.
		err = p.guard.Enter()
		if err == nil {
			err = p.attend()
			p.leave()
		}
		if err != nil {
			_ = p.Close()
			return nil, err
		}
		of.HasBegun = true
		return p, nil
	}
}

// meetAgain is when a publisher tries again to meet a subscriber, for instance after descriptors have run out. A guess.
const meetAgain = 20 * time.Millisecond

// meetSubscribers finds the processes of subscribers that have joined by themselves. It removes an unnamed one without
// a process, which is dead, and one whose files this side does not accept. After another failure it continues with the
// others.
func (p *Publisher) meetSubscribers() (failed error) {
	if p.path == nil {
		return nil
	}
	for _, joined := range p.lane.Joined() {
		if known := p.subscriptions[joined.Slot]; known != nil && known.join == joined.Join {
			continue
		}
		met, err := p.path.Meet(joined, p.notice)
		switch {
		case errors.Is(err, ErrNotAChannel):
			// It must not hold up the others, and finds that it is passed.
			p.lane.Remove(joined.Join)
			p.corrupt++
			continue
		case err != nil:
			// The subscriber may sleep, and is rung by nothing else.
			p.meetTimer.Reset(meetAgain)
			failed = err
			continue
		}
		s := &subscription{join: joined.Join, slot: joined.Slot, policy: joined.Policy, link: met,
			cursor: lane.Table(p.path.Table.Bytes).Cursor(joined.Slot)}
		p.subscriptions[joined.Slot] = s
		if met.Path.Liveness == nil {
			p.lose(s)
		}
	}
	return failed
}

// subscriberPath is a subscriber's part of a broadcast in a directory.
type subscriberPath struct {
	role *directory.Role
	// It keeps its place.
	isDurable bool
	// An earlier process has begun its durable subscription.
	continues bool
	// The generation of the last publisher whose end is no news; 0: none. It left before this side subscribed, or this
	// side has reported it.
	past uint64
	// A later publisher has gone.
	isGone bool
}

// OpenSubscriber subscribes to the broadcast at a directory, with or without a publisher. With [Options.Durable] it
// continues where the last subscriber of that name was.
//
// It waits, for 200 ms, for a durable name that another process uses, or while the broadcast has [SubscribersMax]
// subscribers; with [Options.Await] it waits for these, and for the broadcast to be created, until the context ends. It
// does not wait for a publisher.
//
// Errors: [ErrNoChannel]; after that wait, together with the context's if that ended, [ErrRoleTaken] for the name,
// [ErrRefused] for the number, and [ErrTimedOut] if another process has stopped while it opened or removed a durable
// subscription. [ErrRefused] too if it could hold a publisher up for longer than the [Options.HoldMax] of the present
// or last one: a durable subscription then keeps its place. And if a durable subscription that was not by [Gate] is
// continued by it, or is by [Latest]. [ErrName], [ErrCorrupt], [ErrOption], [ErrNotAChannel], [ErrNoSpace],
// [ErrRebooted], [ErrSystem]; the context's, while there is no broadcast.
func OpenSubscriber(ctx context.Context, path string, options *Options) (*Subscriber, error) {
	o := options.orDefault()
	_, policy, from, err := o.forSubscriber()
	if err == nil && o.Durable != "" {
		if err = directory.CheckDurable(o.Durable); err == nil && policy.Kind == lane.Latest {
			err = fail.New(ErrRefused,
				"a durable subscription keeps its place, and Latest has none: subscribe by Gate or Lag")
		}
	}
	if err != nil {
		return nil, err
	}
	for {
		d, err := awaitDirectory(ctx, path, &o, directory.OpenBroadcast)
		if err != nil {
			return nil, err
		}
		if err := d.CheckSize(o.pathTakes(d.IsOwnUser()), uint64(o.Memory)); err != nil {
			d.Close()
			return nil, err
		}
		sub, ownDoorbell, role, continues, err := d.OpenSubscriber(ctx, o.Await, o.Durable, policy, from)
		if errors.Is(err, ErrNoChannel) && o.Await {
			continue
		}
		if err != nil {
			return nil, err
		}
		past, _ := sub.Consumer.Publisher()
		s := &Subscriber{sub: sub, doorbell: ownDoorbell, spin: wait.New(o.Wait == Spin), policy: policy, from: from,
			path: &subscriberPath{role: role, isDurable: o.Durable != "", continues: continues, past: past}}
		if err := s.findPublisher(); err != nil {
			_ = s.Close()
			return nil, err
		}
		// So that it finds this process, and its end.
		s.sub.Link.Ring()
		return s, nil
	}
}

// RemoveSubscription removes the durable subscription of that name from the broadcast at a directory: it holds the
// publisher up no more. No process may use it. It waits, for 200 ms at most, while another process opens or removes a
// durable subscription there. Of the options it uses Mode and UIDs.
//
// Errors: [ErrRefused] if there is none of the name; [ErrRoleTaken] while a process uses it; [ErrTimedOut]: the other
// process has stopped; [ErrName], [ErrNoChannel], [ErrNotAChannel], [ErrRebooted], [ErrSystem].
func RemoveSubscription(path, durable string, options *Options) error {
	if err := directory.CheckDurable(durable); err != nil {
		return err
	}
	o := options.orDefault()
	o.Await = false
	d, err := awaitDirectory(context.Background(), path, &o, directory.OpenBroadcast)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.RemoveDurable(durable)
}

// findPublisher checks for a publisher in the directory: one may have come, or gone, since the last check.
func (s *Subscriber) findPublisher() error {
	for range link.PassedMax {
		generation, _ := s.sub.Consumer.Publisher()
		switch found, err := s.sub.Link.Find(); {
		case err != nil || found == link.FoundNothing:
			return err
		case found == link.FoundPassed:
			s.path.isGone = generation != s.path.past
		default:
			s.path.isGone = false
			// Otherwise it is a successor that has not begun, and the page is still its predecessor's.
			if !s.sub.Consumer.ProducerClosed() {
				s.path.past = 0
			}
			return nil
		}
	}
	return nil
}

// hasClosed reports whether the publisher has closed, and this side has not reported that; and its generation.
func (s *Subscriber) hasClosed() (hasClosed bool, generation uint64) {
	// The generation first: its page was open. The other way round, a successor that begins between the two loads would
	// count as closed. [close]
	generation, _ = s.sub.Consumer.Publisher()
	return s.sub.Consumer.ProducerClosed() && (s.path == nil || generation != s.path.past), generation
}

// isPublisherGone reports whether the publisher's process has ended, and this side has not reported that.
func (s *Subscriber) isPublisherGone() (bool, error) {
	if s.path == nil {
		return s.sub.Link.IsPeerGone(), nil
	}
	err := s.findPublisher()
	s.path.isGone = s.path.isGone || s.sub.Link.IsPeerGone()
	return s.path.isGone, err
}

// resumeByPath waits for the next publisher. The lane stays.
func (s *Subscriber) resumeByPath(ctx context.Context) error {
	s.sub.Link.Path.Lose()
	s.path.isGone = false
	return wait.Until(ctx, s.doorbell, &s.guard, func() (bool, error) {
		err := s.findPublisher()
		// A successor may have come, and left again, meanwhile: the next call reports that.
		hasClosed, _ := s.hasClosed()
		isThere := s.sub.Link.Path.Liveness != nil || hasClosed || s.path.isGone || s.sub.Consumer.MayBeReady()
		if isThere && err == nil {
			s.broken = nil
		}
		return isThere, err
	})
}
