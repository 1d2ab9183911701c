package pelton

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"
	"unsafe"
)

// subscribers joins them, each with its options.
func subscribers(t *testing.T, publisher *Publisher, options ...*Options) (all []*Subscriber) {
	t.Helper()
	for _, o := range options {
		subscriber, err := publisher.NewSubscriber(o)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { subscriber.Close() })
		all = append(all, subscriber)
	}
	return all
}

func newTestPublisher(t *testing.T, options *Options) *Publisher {
	t.Helper()
	publisher, err := NewPublisher(options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { publisher.Close() })
	return publisher
}

func TestEachSubscriberReceivesEachMessageInOrder(t *testing.T) {
	ctx := soon(t)
	publisher := newTestPublisher(t, &Options{Capacity: 1 << 16})
	gate, until, far := &Options{}, &Options{LagAfter: time.Hour}, &Options{Wait: Spin}
	const count = 5_000
	failed := make(chan error)
	for _, subscriber := range subscribers(t, publisher, gate, gate, until, far) {
		go func() {
			failed <- func() error {
				n := 0
				for delivery, err := range subscriber.Messages(ctx) {
					if err != nil {
						return err
					}
					if delivery.Number != uint64(n+1) || delivery.Missed != 0 || len(delivery.Bytes) != n%3000 ||
						!isPayload(delivery.Bytes, n) {
						return fmt.Errorf("message %d is wrong: %d, %d missed", n, delivery.Number, delivery.Missed)
					}
					n++
				}
				if n != count {
					return fmt.Errorf("%d messages", n)
				}
				return nil
			}()
		}()
	}
	for n := range count {
		if err := publisher.Send(ctx, payload(n, n%3000)); err != nil {
			t.Fatal(err)
		}
	}
	if err := publisher.WaitReleased(ctx); err != nil {
		t.Fatal(err)
	}
	states, ok := publisher.Subscribers()
	if !ok || len(states) != 4 || states[3].Behind != 0 || states[2].LagAfter != time.Hour {
		t.Fatal(states)
	}
	publisher.Close()
	for range 4 {
		if err := <-failed; err != nil {
			t.Error(err)
		}
	}
}

// sendUntilFull sends messages of 1000 bytes while there is space, from payload 0 on, and returns how many.
func sendUntilFull(t *testing.T, publisher *Publisher) (sent int) {
	t.Helper()
	for {
		ok, err := publisher.TrySend(payload(sent, 1000))
		if err != nil {
			t.Fatal(err)
		}
		if !ok {
			return sent
		}
		sent++
	}
}

func TestNothingIsAllocatedForAMessageOfABroadcast(t *testing.T) {
	inBothWays(t, func(t *testing.T, name, _ string) {
		ctx, message := context.Background(), payload(0, 256)
		publisher := must(publishAt(ctx, name, small))
		defer publisher.Close()
		for _, options := range []*Options{{}, {Policy: Lag}, {Policy: Latest}} {
			subscriber := must(subscribeAt(ctx, name, options))
			if allocated := testing.AllocsPerRun(1000, func() {
				if err := publisher.Send(ctx, message); err != nil {
					panic(err)
				}
				must(subscriber.Receive(ctx))
			}); allocated != 0 {
				t.Errorf("%+v: %v allocations", options, allocated)
			}
			subscriber.Close()
		}
	})
}

func TestASubscriberThatLagsLearnsExactlyWhatItMissed(t *testing.T) {
	ctx := soon(t)
	publisher := newTestPublisher(t, &Options{Capacity: 1 << 16})
	lagging := subscribers(t, publisher, &Options{Policy: Lag, Slack: 4096})[0]
	const count = 100_000
	failed := make(chan error)
	go func() {
		failed <- func() error {
			next, received := uint64(1), 0
			for delivery, err := range lagging.Messages(ctx) {
				if err != nil {
					return err
				}
				if next += delivery.Missed; delivery.Number != next || !isPayload(delivery.Bytes, int(next-1)) ||
					len(delivery.Bytes) != int(next-1)%2000 {
					return fmt.Errorf("message %d came as %d of %d bytes", next, delivery.Number, len(delivery.Bytes))
				}
				next++
				if received++; received%100 == 0 {
					time.Sleep(time.Millisecond)
				}
			}
			// After the last one received, some may have been missed.
			if missed := lagging.Missed(); uint64(received)+missed != count || missed == 0 {
				return fmt.Errorf("%d received, %d missed", received, missed)
			}
			return nil
		}()
	}()
	for n := range count {
		if ok, err := publisher.TrySend(payload(n, n%2000)); err != nil || !ok {
			t.Fatal(n, ok, err)
		}
	}
	publisher.Close()
	if err := <-failed; err != nil {
		t.Error(err)
	}
}

func TestASubscriberOfTheNewestSkipsTheOthers(t *testing.T) {
	ctx := soon(t)
	publisher := newTestPublisher(t, &Options{Capacity: 1 << 16})
	latest := subscribers(t, publisher, &Options{Policy: Latest})[0]
	if _, ok, err := latest.TryReceive(); ok || err != nil {
		t.Fatal(ok, err)
	}
	for round := range 3 {
		for n := range 1000 {
			if err := publisher.Send(ctx, payload(n, 1000)); err != nil {
				t.Fatal(err)
			}
		}
		delivery, err := latest.Receive(ctx)
		if err != nil || !isPayload(delivery.Bytes, 999) || delivery.Missed != 999 ||
			delivery.Number != uint64(1000*(round+1)) {
			t.Fatal(delivery.Number, delivery.Missed, err)
		}
	}
	// One that joins from the oldest finds the newest.
	late := subscribers(t, publisher, &Options{Policy: Latest, StartFrom: FromOldest})[0]
	if delivery, err := late.Receive(ctx); err != nil || delivery.Number != 3000 {
		t.Fatal(delivery.Number, err)
	}
}

func TestASubscriberBeginsWhereItsOptionsSay(t *testing.T) {
	ctx := soon(t)
	publisher := newTestPublisher(t, &Options{Capacity: 1 << 20, History: 50})
	for n := range 1000 {
		if err := publisher.Send(ctx, payload(n, 500)); err != nil {
			t.Fatal(err)
		}
	}
	for from, first := range map[StartFrom]uint64{7: 994, 50: 951, FromNow: 0} {
		subscriber := subscribers(t, publisher, &Options{StartFrom: from})[0]
		if from == FromNow {
			if _, ok, err := subscriber.TryReceive(); ok || err != nil {
				t.Fatal(ok, err)
			}
			continue
		}
		if delivery, err := subscriber.Receive(ctx); err != nil || delivery.Number != first || delivery.Missed != 0 {
			t.Fatal(from, delivery.Number, err)
		}
	}
	oldest := subscribers(t, publisher, &Options{StartFrom: FromOldest})[0]
	if delivery, err := oldest.Receive(ctx); err != nil || delivery.Number > 951 {
		t.Fatal(delivery.Number, err)
	}
}

func states(t *testing.T, publisher *Publisher) []SubscriberState {
	t.Helper()
	states, ok := publisher.Subscribers()
	if !ok {
		t.Fatal("the publisher is in use")
	}
	return states
}

func TestAGateHoldsThePublisherUpAndIsNamed(t *testing.T) {
	publisher := newTestPublisher(t, &Options{Capacity: 1 << 16})
	subscriber := subscribers(t, publisher, nil)[0]
	sent := sendUntilFull(t, publisher)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	if err := publisher.Send(ctx, payload(sent, 1000)); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	found := states(t, publisher)
	if len(found) != 1 || found[0].Holds == 0 || found[0].Behind != uint64(sent) || found[0].Lags {
		t.Fatalf("%+v", found)
	}
	// The sleeping publisher is woken when it leaves.
	failed := waiting(t, "(*Publisher).Send", func() error { return publisher.Send(soon(t), payload(sent, 1000)) })
	subscriber.Close()
	if err := <-failed; err != nil {
		t.Fatal(err)
	}
	if found := states(t, publisher); len(found) != 0 {
		t.Fatalf("%+v", found)
	}
}

func TestAGateLagsAfterItsTime(t *testing.T) {
	ctx := soon(t)
	publisher := newTestPublisher(t, &Options{Capacity: 1 << 16})
	subscriber := subscribers(t, publisher, &Options{LagAfter: 20 * time.Millisecond, Slack: 4096})[0]
	for n := range 200 {
		if err := publisher.Send(ctx, payload(n, 1000)); err != nil {
			t.Fatal(err)
		}
	}
	if found := states(t, publisher); !found[0].Lags {
		t.Fatalf("%+v", found)
	}
	next := uint64(1)
	for {
		delivery, ok, err := subscriber.TryReceive()
		if err != nil {
			t.Fatal(err)
		}
		if !ok {
			break
		}
		if next += delivery.Missed; delivery.Number != next || !isPayload(delivery.Bytes, int(next-1)) {
			t.Fatal(delivery.Number, delivery.Missed)
		}
		next++
	}
	if next != 201 || subscriber.Missed() == 0 {
		t.Fatal(next, subscriber.Missed())
	}
	// It has caught up, and gates again.
	if found := states(t, publisher); found[0].Lags {
		t.Fatalf("%+v", found)
	}
	sendUntilFull(t, publisher)
	if found := states(t, publisher); found[0].Lags || found[0].Holds == 0 {
		t.Fatalf("%+v", found)
	}
}

func TestAPublisherRefusesSubscribersThatMayHoldIt(t *testing.T) {
	for _, limit := range []time.Duration{-1, time.Second} {
		publisher := newTestPublisher(t, &Options{Capacity: 1 << 16, HoldMax: limit})
		for _, o := range []*Options{{}, {LagAfter: time.Minute}} {
			if _, err := publisher.NewSubscriber(o); !errors.Is(err, ErrRefused) {
				t.Fatal(err)
			}
		}
		subscribers(t, publisher, &Options{Policy: Lag}, &Options{Policy: Latest})
		_, err := publisher.NewSubscriber(&Options{LagAfter: time.Second})
		if limit > 0 && err != nil || limit < 0 && !errors.Is(err, ErrRefused) {
			t.Fatal(limit, err)
		}
	}
}

func TestAPublisherHasAtMostSixtyFourSubscribers(t *testing.T) {
	publisher := newTestPublisher(t, &Options{Capacity: 1 << 16})
	var options [SubscribersMax]*Options
	all := subscribers(t, publisher, options[:]...)
	if _, err := publisher.NewSubscriber(nil); !errors.Is(err, ErrRefused) {
		t.Fatal(err)
	}
	all[17].Close()
	for until := time.Now().Add(30 * time.Second); len(states(t, publisher)) == SubscribersMax; {
		if time.Now().After(until) {
			t.Fatal("the publisher does not notice")
		}
	}
	subscribers(t, publisher, nil)
}

func TestASleepingSubscriberIsWoken(t *testing.T) {
	ctx, name := soon(t), place(t)
	publisher := must(Publish(name, nil))
	defer publisher.Close()
	for _, policy := range []Policy{Gate, Lag, Latest} {
		subscriber := must(ConnectSubscriber(ctx, name, &Options{Policy: policy}))
		for n := range 20 {
			received := waiting(t, "(*Subscriber).Receive", func() error {
				delivery, err := subscriber.Receive(ctx)
				if err == nil && !isPayload(delivery.Bytes, n) {
					err = errors.New("another message")
				}
				return err
			})
			if err := publisher.Send(ctx, payload(n, 100)); err != nil {
				t.Fatal(err)
			}
			if err := <-received; err != nil {
				t.Fatal(err)
			}
		}
		if policy == Latest {
			publisher.Close()
			if _, err := subscriber.Receive(ctx); !errors.Is(err, ErrClosed) {
				t.Fatal(err)
			}
		}
		subscriber.Close()
		if _, err := subscriber.Receive(ctx); !errors.Is(err, ErrClosedHandle) {
			t.Fatal(err)
		}
	}
}

func TestASubscriberReceivesEverythingBeforeTheEndAndResumes(t *testing.T) {
	ctx, name := soon(t), place(t)
	for _, policy := range []Policy{Gate, Lag} {
		publisher := must(Publish(name, nil))
		subscriber := must(ConnectSubscriber(ctx, name, &Options{Policy: policy}))
		if err := subscriber.Resume(ctx); !errors.Is(err, ErrRefused) {
			t.Fatal(err)
		}
		for round := range 3 {
			for n := range 10 {
				if err := publisher.Send(ctx, payload(n, 100)); err != nil {
					t.Fatal(err)
				}
			}
			publisher.Close()
			n := 0
			for delivery, err := range subscriber.Messages(ctx) {
				if err != nil || !isPayload(delivery.Bytes, n) || delivery.Number != uint64(n+1) {
					t.Fatal(round, n, err)
				}
				n++
			}
			if n != 10 {
				t.Fatal(round, n)
			}
			publisher = must(Publish(name, nil))
			if err := subscriber.Resume(ctx); err != nil {
				t.Fatal(err)
			}
			if err := publisher.WaitSubscribers(ctx, 1); err != nil {
				t.Fatal(err)
			}
		}
		publisher.Close()
		subscriber.Close()
	}
}

func TestClosingEndsAWait(t *testing.T) {
	publisher := newTestPublisher(t, &Options{Capacity: 1 << 16})
	subscriber := subscribers(t, publisher, nil)[0]
	failed := waiting(t, "(*Subscriber).Receive", func() error {
		_, err := subscriber.Receive(context.Background())
		return err
	})
	subscriber.Close()
	if err := <-failed; !errors.Is(err, ErrClosedHandle) {
		t.Fatal(err)
	}
	failed = waiting(t, "(*Publisher).WaitSubscribers",
		func() error { return publisher.WaitSubscribers(context.Background(), 2) })
	publisher.Close()
	if err := <-failed; !errors.Is(err, ErrClosedHandle) {
		t.Fatal(err)
	}
	if _, err := publisher.NewSubscriber(nil); !errors.Is(err, ErrClosedHandle) {
		t.Fatal(err)
	}
}

func TestClosingEndsAResume(t *testing.T) {
	name, ctx := place(t), soon(t)
	publisher := must(Publish(name, nil))
	subscriber := must(ConnectSubscriber(ctx, name, nil))
	publisher.Close()
	_, ended := subscriber.Receive(ctx)
	// One side has connected, the other accepts.
	connected, receiver, listener := pairOf(t, nil, true)
	_ = connected.Send(ctx, []byte("never released"))
	receiver.Close()
	listener.Close()
	sender, accepting, _ := pairOf(t, nil, true)
	sender.Close()
	_, acceptedEnd := accepting.Receive(ctx)
	for _, err := range []error{ended, connected.WaitReleased(ctx), acceptedEnd} {
		if !errors.Is(err, ErrClosed) {
			t.Fatal(err)
		}
	}
	for _, end := range []interface {
		Resume(context.Context) error
		Close() error
	}{subscriber, connected, accepting} {
		failed := waiting(t, "(*reconnect).resume", func() error { return end.Resume(ctx) })
		end.Close()
		if err := <-failed; !errors.Is(err, ErrClosedHandle) {
			t.Fatalf("%T: %v", end, err)
		}
	}
}

func TestACorruptSubscriberIsRemovedWhileEverySendSucceeds(t *testing.T) {
	publisher := newTestPublisher(t, &Options{Capacity: 1 << 16})
	lagging := subscribers(t, publisher, &Options{Policy: Lag}, &Options{Policy: Lag})
	const number = 128
	*(*uint64)(unsafe.Pointer(&lagging[0].sub.Cursor.Bytes[number])) = 1 << 40
	for n := range 1000 {
		if ok, err := publisher.TrySend(payload(n, 1000)); err != nil || !ok {
			t.Fatal(n, ok, err)
		}
	}
	if err := publisher.guard.Enter(); err != nil {
		t.Fatal(err)
	}
	defer publisher.leave()
	if publisher.count() != 1 || publisher.corrupt != 1 {
		t.Fatal(publisher.count(), publisher.corrupt)
	}
}

func TestAfterCloseANameIsFreeAndTheEndIsKnown(t *testing.T) {
	ctx, name := soon(t), place(t)
	for range 100 {
		p := must(Publish(name, &Options{Capacity: 1 << 16}))
		leaving, staying := must(ConnectSubscriber(ctx, name, nil)), must(ConnectSubscriber(ctx, name, nil))
		// The publisher attends to its end while it is closed.
		leaving.Close()
		p.Close()
		if !staying.sub.Consumer.ProducerClosed() {
			t.Fatal("Close returned before the lane was closed")
		}
		staying.Close()
	}
}
