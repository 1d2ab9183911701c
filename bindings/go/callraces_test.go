package pelton

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/calls"
)

// Calls when goroutines, or the two sides, meet at the wrong moment.

// sleeps waits until the client's leader sleeps.
func sleeps(t *testing.T, client *Client) {
	t.Helper()
	for until := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		client.mutex.Lock()
		isLed := client.leader != nil && client.sleeper.IsArmed()
		client.mutex.Unlock()
		if isLed {
			return
		}
		if time.Now().After(until) {
			t.Fatal("nobody sleeps")
		}
	}
}

func TestCancellingEndsAnAwait(t *testing.T) {
	name, ctx := place(t), soon(t)
	// It sends no reply.
	_, client := listening(t, name, nil), connected(t, name, nil)
	call := must(client.Submit(ctx, nil))
	awaited := make(chan error, 1)
	go func() { _, err := call.Await(ctx); awaited <- err }()
	sleeps(t, client)
	call.Cancel()
	if err := <-awaited; !errors.Is(err, ErrRefused) {
		t.Fatal(err)
	}
}

func TestALinkThatAnotherGoroutineFoundCorruptFailsTheLeadersCall(t *testing.T) {
	name, ctx := place(t), soon(t)
	service, client := listening(t, name, nil), connected(t, name, &Options{Capacity: 1 << 16})
	call := must(client.Submit(ctx, nil))
	// The service takes the lane, and releases what never was.
	must(service.Receive(ctx))
	awaited := make(chan error, 1)
	go func() { _, err := call.Await(ctx); awaited <- err }()
	sleeps(t, client)
	const consumerHead = 128
	binary.LittleEndian.PutUint64(service.receiver.lanes[0].Memory.Consumer.Bytes[consumerHead:], 77<<32|8)
	for err := error(nil); err == nil; {
		if _, err = client.Submit(ctx, make([]byte, 2000)); err != nil && !errors.Is(err, ErrCorrupt) {
			t.Fatal(err)
		}
	}
	if err := <-awaited; !errors.Is(err, ErrCorrupt) {
		t.Fatal(err)
	}
	client.mutex.Lock()
	defer client.mutex.Unlock()
	if len(client.lost) > 0 {
		t.Fatal("the link is still there")
	}
}

// More than one poll takes, all of it there before the client sleeps.
func TestAFullLaneOfRepliesIsReadToItsEnd(t *testing.T) {
	name, ctx := place(t), soon(t)
	service, client := listening(t, name, nil), connected(t, name, nil)
	dropped, wanted := must(client.Submit(ctx, nil)), must(client.Submit(ctx, nil))
	first, second := must(service.Receive(ctx)), must(service.Receive(ctx))
	dropped.Cancel()
	for range 100 * calls.RecordsPerPoll {
		if err := first.Part(ctx, nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := second.Reply([]byte("behind them")); err != nil {
		t.Fatal(err)
	}
	if reply, err := wanted.Await(ctx); err != nil || string(reply) != "behind them" {
		t.Fatal(err)
	}
}

func TestManyStashedPartsAreTakenInLinearTime(t *testing.T) {
	name, ctx := place(t), soon(t)
	service, client := listening(t, name, nil), connected(t, name, nil)
	call, other := must(client.Submit(ctx, nil)), must(client.Submit(ctx, nil))
	request, last := must(service.Receive(ctx)), must(service.Receive(ctx))
	const count = 400_000
	for n := range count {
		if err := request.Part(ctx, binary.LittleEndian.AppendUint32(nil, uint32(n))); err != nil {
			t.Fatal(err)
		}
	}
	_ = request.End()
	_ = last.Reply(nil)
	// So all of them wait.
	must(other.Await(ctx))
	n := 0
	for part, err := range call.Parts(ctx) {
		if err != nil || binary.LittleEndian.Uint32(part) != uint32(n) {
			t.Fatal(n, err)
		}
		n++
	}
	if n != count {
		t.Fatal(n)
	}
}

func TestPartsThatAnAwaitTookComeAgain(t *testing.T) {
	name, ctx := place(t), soon(t)
	service, client := listening(t, name, nil), connected(t, name, nil)
	call := must(client.Submit(ctx, nil))
	request := must(service.Receive(ctx))
	if err := request.Part(ctx, []byte("first")); err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := call.Await(ended); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	_ = request.Reply([]byte("second"))
	var all []byte
	for part, err := range call.Parts(ctx) {
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, part...)
	}
	if string(all) != "firstsecond" {
		t.Fatal(string(all))
	}
}

// By goroutines that the handler does not wait for.
func TestARequestMayBeAnsweredWhileItsHandlerReturns(t *testing.T) {
	name, ctx := place(t), soon(t)
	const count = 5000
	var workers sync.WaitGroup
	workers.Add(8 * count * 2)
	served(t, name, nil, func(request Request) {
		id := bytes.Clone(request.Bytes())
		for range 2 {
			go func() {
				defer workers.Done()
				if err := request.Reply(id); err != nil && !errors.Is(err, ErrRefused) {
					t.Error(err)
				}
				_, _, _ = request.Peer(), request.IsCancelled(), request.IsNotification()
				<-request.Context().Done()
			}()
		}
		runtime.Gosched()
	})
	client := connected(t, name, nil)
	var all sync.WaitGroup
	for g := range 8 {
		all.Go(func() {
			for n := range count {
				request := payload(g*count+n, 8)
				reply, err := client.Call(ctx, request)
				if err != nil && !errors.Is(err, ErrAbandoned) || err == nil && !bytes.Equal(reply, request) {
					t.Error(reply, request, err)
					return
				}
			}
		})
	}
	if all.Wait(); !t.Failed() {
		workers.Wait()
	}
}

func TestAPartAfterTheLastReplyIsRefusedWithoutHarm(t *testing.T) {
	name, ctx := place(t), soon(t)
	service, client := listening(t, name, nil), connected(t, name, nil)
	for range 300 {
		call := must(client.Submit(ctx, nil))
		request := must(service.Receive(ctx))
		over := make(chan error, 1)
		go func() {
			for {
				if err := request.Part(ctx, nil); err != nil {
					over <- err
					return
				}
			}
		}()
		runtime.Gosched()
		if err := request.Reply(nil); err != nil {
			t.Fatal(err)
		}
		if _, err := call.Await(ctx); err != nil {
			t.Fatal(err)
		}
		if err := <-over; !errors.Is(err, ErrRefused) {
			t.Fatal(err)
		}
	}
	request := func() Request { must(client.Submit(ctx, nil)); return must(service.Receive(ctx)) }()
	_ = request.Reply(nil)
	// The same memory.
	must(client.Submit(ctx, nil))
	must(service.Receive(ctx))
	if <-request.Context().Done(); request.IsCancelled() || request.Peer().PID == 0 {
		t.Fatal("an answered request has become another one")
	}
}

func TestADeadlineBeyondAnyClockIsNone(t *testing.T) {
	name := place(t)
	served(t, name, nil, func(request Request) {
		if request.Context().Err() == nil {
			echo(request)
		}
	})
	client := connected(t, name, nil)
	ctx, cancel := context.WithTimeout(context.Background(), math.MaxInt64)
	defer cancel()
	if _, err := client.Call(ctx, nil); err != nil {
		t.Fatal(err)
	}
}

func TestAServiceThatRefusesIsNotTriedAgainAndAgain(t *testing.T) {
	name, ctx := shortName(t), soon(t)
	// It accepts no second client.
	served(t, name, &Options{SendersMax: 1}, echo)
	connected(t, name, nil)
	if _, err := ConnectClient(ctx, name, nil); !errors.Is(err, ErrRefused) {
		t.Fatal(err)
	}
	first := listening(t, name, nil)
	client := connected(t, name, nil)
	first.Close()
	short, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if _, err := client.Call(short, nil); !errors.Is(err, ErrRefused) && !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
	if _, err := client.Call(short, nil); !errors.Is(err, ErrRefused) {
		t.Fatal(err)
	}
}

func TestARequestForALargerServiceDoesNotWaitForSpaceAtASmallerOne(t *testing.T) {
	name := shortName(t)
	listening(t, name, &Options{CallBytesMax: 1000})
	listening(t, name, nil)
	client := connected(t, name, &Options{Capacity: 1 << 16})
	allFound(t, client, 2)
	client.mutex.Lock()
	for _, link := range client.links {
		if link.bytesMax == 1000 {
			continue
		}
		for done := true; done; {
			done = must(link.out.Put(calls.Header{Kind: calls.KindNotify}, make([]byte, 2000)))
		}
	}
	client.leader = client.enter(waiter{what: waitSpace, bytes: 2000})
	sleeps := client.armForSpace()
	client.withdraw()
	leader := client.leader
	client.leader = nil
	client.leave(leader)
	client.mutex.Unlock()
	if !sleeps {
		t.Fatal("it polls again and again where there is space for smaller ones")
	}
}

func TestAClientWhoseHandshakeEndsDuringADrainGetsDrained(t *testing.T) {
	name, ctx := place(t), soon(t)
	service := listening(t, name, nil)
	gate := service.receiver.registry
	var client *Client
	for client == nil {
		came := make(chan *Client, 1)
		go func() { came <- must(ConnectClient(ctx, name, nil)) }()
		// The handshake ends while this test holds the lock: its last step before that counts it as opening.
		for {
			gate.mutex.Lock()
			if gate.opening > 0 || len(gate.arrived) > 0 {
				break
			}
			gate.mutex.Unlock()
			runtime.Gosched()
		}
		isLate := len(gate.arrived) > 0
		if isLate {
			gate.mutex.Unlock()
		}
		client = <-came
		defer client.Close()
		if isLate {
			client.Close()
			client = nil
			for gate.mutex.Lock(); gate.present > 0; gate.mutex.Lock() {
				gate.mutex.Unlock()
				_, _, _ = tryRequest(service)
			}
			gate.mutex.Unlock()
		}
	}
	call := must(client.Submit(ctx, nil))
	// A drain does this first.
	gate.isClosed = true
	gate.mutex.Unlock()
	service.Drain()
	over := make(chan error, 1)
	go func() { _, err := service.Receive(ctx); over <- err }()
	if _, err := call.Await(ctx); !errors.Is(err, ErrRefused) {
		t.Fatal("the call was not given back:", err)
	}
	if err := <-over; !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
}

func TestPiecesOfAReplyThatIsNotAwaitedAreCounted(t *testing.T) {
	name, ctx := place(t), soon(t)
	service, client := listening(t, name, nil), connected(t, name, &Options{CallBytesMax: 4096})
	given, awaited := must(client.Submit(ctx, nil)), must(client.Submit(ctx, nil))
	must(service.Receive(ctx))
	must(service.Receive(ctx))
	given.Cancel()
	out := &service.receiver.lanes[0].session.out
	for n := range 5 {
		_ = must(out.Put(calls.Header{ID: given.id, Kind: calls.KindReply, More: true, Continued: n > 0},
			make([]byte, 1000)))
	}
	if _, err := awaited.Await(ctx); !errors.Is(err, ErrCorrupt) {
		t.Fatal(err)
	}
}

func TestNothingIsTakenFromADrainedClient(t *testing.T) {
	name, ctx := place(t), soon(t)
	service, client := listening(t, name, nil), connected(t, name, nil)
	busy := connected(t, name, nil)
	must(busy.Submit(ctx, nil))
	request := must(service.Receive(ctx))
	service.Drain()
	if _, ok, err := tryRequest(service); ok || err != nil {
		t.Fatal(ok, err)
	}
	// It has been sent DRAINED, and has not read it.
	if err := client.Notify(ctx, []byte("late")); err != nil {
		t.Fatal(err)
	}
	if late, ok, err := tryRequest(service); ok || err != nil {
		t.Fatal(ok, err, late)
	}
	_ = request.Reply(nil)
	if _, err := service.Receive(ctx); !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
}

func TestACallWithoutAContextBlocksNoOther(t *testing.T) {
	name, ctx := place(t), soon(t)
	served(t, name, nil, echo)
	client := connected(t, name, nil)
	func() {
		defer func() {
			if recover() == nil {
				t.Error("there was none, and nothing was said")
			}
		}()
		_, _ = client.Call(nil, nil)
	}()
	over := make(chan error, 1)
	go func() { _, err := client.Call(ctx, nil); over <- err }()
	select {
	case err := <-over:
		if err != nil {
			t.Fatal(err)
		}
	case <-ctx.Done():
		panic("the client's lock is held, so that it cannot be closed either")
	}
}
