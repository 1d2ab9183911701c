package pelton

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
)

func TestManySendersAreServedByTurnsEachInOrder(t *testing.T) {
	name, ctx := place(t), soon(t)
	receiver := must(Gather(name, nil))
	defer receiver.Close()
	const senders, messages = 12, 400
	var group sync.WaitGroup
	for range senders {
		group.Go(func() {
			sender, err := ConnectSender(ctx, name, &Options{Capacity: 1 << 16})
			if err != nil {
				t.Error(err)
				return
			}
			for n := range messages {
				if err := sender.Send(ctx, payload(n, n)); err != nil {
					t.Error(err)
				}
			}
			sender.Close()
		})
	}
	next := map[uint32]int{}
	for range senders * messages {
		message, err := receiver.Receive(ctx)
		if err != nil {
			t.Fatal(err)
		}
		n := next[message.Lane()]
		if !isPayload(message.Bytes(), n) || len(message.Bytes()) != n || message.Peer().PID != os.Getpid() {
			t.Fatalf("message %d of lane %d: %d bytes of %v", n, message.Lane(), len(message.Bytes()), message.Peer())
		}
		next[message.Lane()]++
		message.Release()
	}
	group.Wait()
	if len(next) != senders || next[0] != 0 {
		t.Fatalf("%d lanes", len(next))
	}
	// All have gone, and their lanes too.
	for len(receiver.lanes) > 0 {
		if _, ok, err := receiver.TryReceive(); ok || err != nil {
			t.Fatal(ok, err)
		}
	}
}

func TestABusySenderKeepsAnotherWaitingForNoMoreThanATurn(t *testing.T) {
	name, ctx := place(t), soon(t)
	receiver := must(Gather(name, nil))
	defer receiver.Close()
	busy, other := must(ConnectSender(ctx, name, nil)), must(ConnectSender(ctx, name, nil))
	defer busy.Close()
	defer other.Close()
	// Both have arrived.
	for _, sender := range []*Sender{busy, other} {
		if err := sender.Send(ctx, nil); err != nil {
			t.Fatal(err)
		}
		must(receiver.Receive(ctx)).Release()
	}
	for n := range 1000 {
		if err := busy.Send(ctx, payload(n, 8)); err != nil {
			t.Fatal(err)
		}
	}
	first := must(receiver.Receive(ctx))
	first.Release()
	if err := other.Send(ctx, nil); err != nil {
		t.Fatal(err)
	}
	// The promise: its message waits for at most 64 of the other.
	for range 64 {
		message := must(receiver.Receive(ctx))
		if message.Release(); message.Lane() != first.Lane() {
			return
		}
	}
	t.Fatal("it waits behind more than 64 messages")
}

func TestASenderThatDiesOrLiesAmongManyAffectsNoOther(t *testing.T) {
	name, ctx := place(t), soon(t)
	receiver := must(Gather(name, nil))
	defer receiver.Close()
	good, liar := must(ConnectSender(ctx, name, nil)), must(ConnectSender(ctx, name, nil))
	defer good.Close()
	defer liar.Close()
	dies := child(t, "send", name, 7, 20, 8, "stay")
	dies.says("connected")
	dies.says("done 20")
	dies.kill()
	if err := liar.Send(ctx, payload(1, 8)); err != nil {
		t.Fatal(err)
	}
	// The next header has an impossible number.
	liar.out.Memory.Data.Bytes[liar.out.Lane.Tail().Offset+4] = 99
	for n := range 3 {
		if err := good.Send(ctx, payload(n, 50)); err != nil {
			t.Fatal(err)
		}
	}
	counts := map[int]int{}
	for range 24 {
		message := must(receiver.Receive(ctx))
		counts[len(message.Bytes())]++
		message.Release()
	}
	if counts[8] != 21 || counts[50] != 3 {
		t.Fatal(counts)
	}
	for len(receiver.lanes) > 1 {
		if _, ok, err := receiver.TryReceive(); ok || err != nil {
			t.Fatal(ok, err)
		}
	}
	for liar.Send(ctx, nil) == nil {
		time.Sleep(time.Millisecond)
	}
	if err := liar.Send(ctx, nil); !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
	if err := good.Send(ctx, payload(9, 9)); err != nil {
		t.Fatal(err)
	}
	message := must(receiver.Receive(ctx))
	if !isPayload(message.Bytes(), 9) {
		t.Fatal(message.Bytes())
	}
	message.Release()
}

func TestOneSenderTooManyIsRefusedAndASilentPeerDelaysNoOther(t *testing.T) {
	name, ctx := place(t), soon(t)
	receiver := must(Gather(name, &Options{SendersMax: 1}))
	defer receiver.Close()
	mutes := make([]int, 100)
	for i := range mutes {
		mutes[i] = must(kernel.ConnectTo(strings.TrimPrefix(name, "unix:")))
	}
	defer kernel.CloseAll(mutes)
	sender := must(ConnectSender(ctx, name, &Options{Await: true}))
	if _, err := ConnectSender(ctx, name, nil); !errors.Is(err, ErrRefused) ||
		!strings.Contains(fmt.Sprint(err), "1 senders") {
		t.Fatal(err)
	}
	if err := sender.Send(ctx, []byte("one")); err != nil {
		t.Fatal(err)
	}
	must(receiver.Receive(ctx)).Release()
	sender.Close()
	waits := make(chan error, 1)
	go func() {
		for {
			next, err := ConnectSender(ctx, name, nil)
			if err == nil {
				waits <- errors.Join(next.Send(ctx, []byte("two")), next.Close())
				return
			}
			if !errors.Is(err, ErrRefused) {
				waits <- err
				return
			}
			time.Sleep(time.Millisecond)
		}
	}()
	must(receiver.Receive(ctx)).Release()
	if err := <-waits; err != nil {
		t.Fatal(err)
	}
}

// A message that is kept stays readable when its sender has left, and when the receiver is closed.
func TestAMessageOutlivesItsLane(t *testing.T) {
	name, ctx := place(t), soon(t)
	receiver := must(Gather(name, nil))
	sender := must(ConnectSender(ctx, name, nil))
	if err := errors.Join(sender.Send(ctx, payload(5, 5000)), sender.Close()); err != nil {
		t.Fatal(err)
	}
	kept := must(receiver.Receive(ctx))
	for len(receiver.lanes) > 0 {
		_, _, _ = receiver.TryReceive()
	}
	receiver.Close()
	if !isPayload(kept.Bytes(), 5) || kept.Release() != nil {
		t.Fatal("it has changed")
	}
}
