package pelton

import (
	"errors"
	"testing"
	"time"
)

// Both sides are Go's; interop_test.go has the same with Rust's.

func TestAKilledSenderIsToldAfterItsLastMessageAndItsSuccessorGoesOn(t *testing.T) {
	name, ctx := place(t), soon(t)
	listener := must(Listen(name, nil))
	defer listener.Close()
	first := child(t, "send", name, 0, 50, 100, "stay")
	receiver := must(listener.AcceptReceiver(ctx))
	defer receiver.Close()
	first.says("connected")
	first.says("done 50")
	kept := must(receiver.Receive(ctx))
	first.kill()
	for n := 1; n < 50; n++ {
		message := must(receiver.Receive(ctx))
		if !isPayload(message.Bytes(), n) {
			t.Fatal(n)
		}
		message.Release()
	}
	var died *Error
	if _, err := receiver.Receive(ctx); !errors.As(err, &died) || died.Code != ErrPeerDied || died.Unreleased != 1 {
		t.Fatal(err)
	}
	kept.Release()
	for generation := uint32(2); generation < 5; generation++ {
		next := child(t, "send", name, 1000, 300, 500, "stay")
		if err := receiver.Resume(ctx); err != nil {
			t.Fatal(err)
		}
		for n := 1000; n < 1300; n++ {
			message := must(receiver.Receive(ctx))
			if !isPayload(message.Bytes(), n) || message.Generation() != generation || message.Redelivered() {
				t.Fatal(n, message.Generation())
			}
			message.Release()
		}
		next.says("connected")
		next.says("done 300")
		next.kill()
		if _, err := receiver.Receive(ctx); !errors.Is(err, ErrPeerDied) {
			t.Fatal(err)
		}
	}
	last := child(t, "send", name, 0, 1, 10, "close")
	if err := receiver.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	must(receiver.Receive(ctx)).Release()
	if _, err := receiver.Receive(ctx); !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
	last.exits(0)
}

func TestAKilledReceiverIsToldToASenderThatSleepsAndItsSuccessorGetsTheRestAgain(t *testing.T) {
	name, ctx := place(t), soon(t)
	listener := must(Listen(name, &Options{Capacity: 1 << 16}))
	defer listener.Close()
	first := child(t, "receive", name, 10, "stay")
	sender := must(listener.AcceptSender(ctx))
	defer sender.Close()
	first.says("connected")
	for n := range 10 {
		if err := sender.Send(ctx, payload(n, 1000)); err != nil {
			t.Fatal(err)
		}
	}
	first.says("done 10")
	// Until the lane is full; then it sleeps, and hears of the death there.
	go func() { time.Sleep(50 * time.Millisecond); first.kill() }()
	n, died := 10, (*Error)(nil)
	for ; ; n++ {
		if err := sender.Send(ctx, payload(n, 1000)); errors.As(err, &died) {
			break
		}
	}
	if died.Code != ErrPeerDied || died.Unreleased != uint64(n-10) {
		t.Fatalf("%v: %d of %d", died, died.Unreleased, n-10)
	}
	if err := sender.Drain(ctx); !errors.Is(err, ErrPeerDied) {
		t.Fatal(err)
	}
	// One that is refused on the way does not end the wait, and changes nothing.
	refused := make(chan error, 1)
	go func() { _, err := ConnectSender(ctx, name, nil); refused <- err }()
	received := make(chan int, 1)
	go func() {
		if err := <-refused; !errors.Is(err, ErrRefused) {
			t.Error(err)
		}
		receiver, err := ConnectReceiver(ctx, name, &Options{Await: true})
		if err != nil {
			t.Error(err)
			return
		}
		defer receiver.Close()
		at := 10
		for message, err := range receiver.Messages(ctx) {
			if err != nil || !isPayload(message.Bytes(), at) || message.Redelivered() != (at < n) {
				t.Error(at, err, message.Redelivered())
			}
			at++
		}
		received <- at
	}()
	if err := sender.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	for i := range 500 {
		if err := sender.Send(ctx, payload(n+i, 1000)); err != nil {
			t.Fatal(err)
		}
	}
	sender.Close()
	if at := <-received; at != n+500 {
		t.Fatalf("%d messages, wanted %d", at, n+500)
	}
}

func TestTheEndOfASideThatClosesIsNoDeath(t *testing.T) {
	sender, receiver := pair(t, nil)
	ctx := soon(t)
	if err := sender.Send(ctx, payload(1, 10)); err != nil {
		t.Fatal(err)
	}
	waits := make(chan error, 1)
	go func() { waits <- sender.Drain(ctx) }()
	time.Sleep(10 * time.Millisecond)
	receiver.Close()
	var closed *Error
	if err := <-waits; !errors.As(err, &closed) || closed.Code != ErrClosed || closed.Unreleased != 1 {
		t.Fatal(err)
	}
	if sent, err := sender.TrySend(nil); sent || !errors.Is(err, ErrClosed) {
		t.Fatal(sent, err)
	}
}

func TestAStoppedProcessIsNotADeadOne(t *testing.T) {
	name, ctx := place(t), soon(t)
	listener := must(Listen(name, nil))
	defer listener.Close()
	other := child(t, "send", name, 0, 1, 10, "stay")
	receiver := must(listener.AcceptReceiver(ctx))
	defer receiver.Close()
	must(receiver.Receive(ctx)).Release()
	stop(t, other)
	for range 20 {
		if _, ok, err := receiver.TryReceive(); ok || err != nil {
			t.Fatal(ok, err)
		}
		time.Sleep(time.Millisecond)
	}
	other.kill()
	if _, err := receiver.Receive(ctx); !errors.Is(err, ErrPeerDied) {
		t.Fatal(err)
	}
}
