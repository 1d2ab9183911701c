package pelton

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/calls"
)

// What a service keeps for its clients: replies that wait for space, and requests of which some pieces have come.

// isBack waits until this much of the service's memory is free, while it takes requests.
func isBack(t *testing.T, service *Service, wanted uint64) {
	t.Helper()
	for until := time.Now().Add(20 * time.Second); service.memory.Left() != wanted; {
		if _, ok, err := tryRequest(service); ok || err != nil || time.Now().After(until) {
			t.Fatalf("%v %v: %d bytes of memory are left, wanted %d", ok, err, service.memory.Left(), wanted)
		}
	}
}

// hasNoMemory checks the error of a client's call.
func hasNoMemory(t *testing.T, err error, figures ...any) {
	t.Helper()
	var failed *CallError
	if !errors.Is(err, ErrServiceMemory) || !errors.As(err, &failed) || failed.Code != 0xffff0001 {
		t.Fatal(err)
	}
	for _, figure := range figures {
		if !strings.Contains(err.Error(), fmt.Sprint(figure)) {
			t.Fatalf("%v has no %v", err, figure)
		}
	}
}

func TestRepliesThatWaitHaveALimit(t *testing.T) {
	const memory, lanes, count, size = 2 << 20, 2 << 16, 100, 50_000
	name, ctx := place(t), soon(t)
	service := listening(t, name, &Options{Memory: memory})
	client := connected(t, name, nil)
	var calls []*Call
	var requests []Request
	for n := range count {
		calls = append(calls, must(client.Submit(ctx, payload(n, 10))))
		requests = append(requests, must(service.Receive(ctx)))
	}
	kept, isKept := 0, [count]bool{}
	for n, request := range requests {
		switch err := request.Reply(payload(n, size)); {
		case err == nil:
			kept++
			isKept[n] = true
		case !errors.Is(err, ErrServiceMemory) || !strings.Contains(err.Error(), fmt.Sprint(size)) ||
			!strings.Contains(err.Error(), fmt.Sprint(memory)):
			t.Fatal(err)
		}
		if err := request.Reply(nil); !errors.Is(err, ErrRefused) {
			t.Fatal("it is answered, but", err)
		}
	}
	// One client alone has half of what its lanes leave, and some replies are in its lane.
	if kept < (memory-lanes)/2/size || kept > (memory-lanes)/2/size+5 {
		t.Fatal(kept, "replies were kept")
	}
	for n, call := range calls {
		reply, err := call.Await(ctx)
		if isKept[n] {
			if err != nil || !isPayload(reply, n) || len(reply) != size {
				t.Fatal(n, err)
			}
			continue
		}
		hasNoMemory(t, err, size, memory)
	}
	isBack(t, service, memory-lanes)
}

func TestAClientThatDoesNotReadLeavesAsMuchToOthersAsItHasItself(t *testing.T) {
	const memory, size, count = 8 << 20, 100_000, 200
	name, ctx := place(t), soon(t)
	service := listening(t, name, &Options{Memory: memory})
	first, second, third := connected(t, name, nil), connected(t, name, nil), connected(t, name, nil)
	before := service.memory.Left()
	// Sends more requests than there is memory for, and returns which replies are kept. None is read.
	fill := func(client *Client) (calls []*Call, isKept []bool) {
		var requests []Request
		for n := range count {
			calls = append(calls, must(client.Submit(ctx, payload(n, 10))))
			requests = append(requests, must(service.Receive(ctx)))
		}
		for n, request := range requests {
			err := request.Reply(payload(n, size))
			if err != nil && !errors.Is(err, ErrServiceMemory) {
				t.Fatal(err)
			}
			isKept = append(isKept, err == nil)
		}
		return calls, isKept
	}
	read := func(calls []*Call, isKept []bool) {
		for n, call := range calls {
			reply, err := call.Await(ctx)
			if !isKept[n] {
				hasNoMemory(t, err, size, memory)
			} else if err != nil || !isPayload(reply, n) || len(reply) != size {
				t.Fatal(n, err)
			}
		}
	}
	large := func() {
		call := must(third.Submit(ctx, nil))
		request := must(service.Receive(ctx))
		if err := request.Reply(payload(1, 5*size)); err != nil {
			t.Fatal(err)
		}
		if reply, err := call.Await(ctx); err != nil || len(reply) != 5*size || !isPayload(reply, 1) {
			t.Fatal(err)
		}
	}
	calls, isKept := fill(first)
	left := service.memory.Left()
	if has := before - left; has > left || has+2*size <= left {
		t.Fatal("the first client has", has, "and leaves", left)
	}
	large()
	isBack(t, service, left)
	others, areKept := fill(second)
	if has := left - service.memory.Left(); has > service.memory.Left() || has+2*size <= service.memory.Left() {
		t.Fatal("the second client has", has, "and leaves", service.memory.Left())
	}
	large()
	read(calls, isKept)
	read(others, areKept)
	isBack(t, service, before)
}

func TestRequestsInPiecesHaveALimit(t *testing.T) {
	const memory, lanes, size = 3 << 20, 2 << 16, 3_000_000
	name, ctx := place(t), soon(t)
	service := served(t, name, &Options{Memory: memory},
		func(request Request) { _ = request.Reply(request.Bytes()[:10]) })
	client := connected(t, name, nil)
	for range 3 {
		_, err := client.Call(ctx, payload(1, size))
		hasNoMemory(t, err, size, memory)
		// The loss of a notification is not reported.
		if err := client.Notify(ctx, payload(1, size)); err != nil {
			t.Fatal(err)
		}
		if reply, err := client.Call(ctx, payload(2, 1_000_000)); err != nil || !isPayload(reply, 2) {
			t.Fatal(err)
		}
	}
	for until := time.Now().Add(20 * time.Second); service.memory.Left() != memory-lanes; runtime.Gosched() {
		if time.Now().After(until) {
			t.Fatal(service.memory.Left())
		}
	}
	if service.CorruptClients() != 0 {
		t.Fatal("somebody was sent away")
	}
}

func TestARequestThatIsNotKeptIsCheckedAllTheSame(t *testing.T) {
	name, ctx := place(t), soon(t)
	service := listening(t, name, &Options{Memory: 2 << 20, CallBytesMax: 4 << 20})
	client := connected(t, name, nil)
	_, err := client.Submit(ctx, payload(1, 4<<20+1))
	refusedWith(t, err, ErrTooLarge)
	client.mutex.Lock()
	// Like a client that ignores the service's limit.
	client.links[0].bytesMax = 1 << 30
	client.mutex.Unlock()
	submitted := make(chan error, 1)
	go func() { _, err := client.Submit(ctx, payload(1, 5<<20)); submitted <- err }()
	for service.CorruptClients() == 0 {
		if _, ok, err := tryRequest(service); ok || err != nil || ctx.Err() != nil {
			t.Fatal(ok, err)
		}
	}
	isBack(t, service, 2<<20)
	<-submitted
}

func TestWhatWasKeptForAClientBecomesFreeWhenItIsGone(t *testing.T) {
	const memory, lanes = 2 << 20, 2 << 16
	name, ctx := place(t), soon(t)
	service := listening(t, name, &Options{Memory: memory})
	client := connected(t, name, nil)
	must(client.Submit(ctx, nil))
	must(client.Submit(ctx, nil))
	first, second := must(service.Receive(ctx)), must(service.Receive(ctx))
	h := calls.Header{ID: 1<<32 | 77, Kind: calls.KindRequest, More: true}
	room := make([]byte, calls.HeaderSize+1000)
	h.Write(room)
	writeRaw(t, &client.links[0].out, room)
	isBack(t, service, memory-lanes-1000)
	if err := errors.Join(first.Reply(make([]byte, 30_000)), second.Reply(make([]byte, 300_000))); err != nil {
		t.Fatal(err)
	}
	if left := service.memory.Left(); left > memory-lanes-300_000 {
		t.Fatal(left)
	}
	client.Close()
	isBack(t, service, memory)
}

func TestAServiceHasMemoryForFourOfItsLargestRequestsByDefault(t *testing.T) {
	for bytes, wanted := range map[int]uint64{0: 256 << 20, 1000: 256 << 20, 1 << 30: 4 << 30} {
		if found := listening(t, place(t), &Options{CallBytesMax: bytes}).memory.Most; found != wanted {
			t.Error(bytes, found)
		}
	}
}

func TestTheLibrarysCodesAreNotAServicesOwn(t *testing.T) {
	name, ctx := place(t), soon(t)
	service, client := listening(t, name, nil), connected(t, name, nil)
	call := must(client.Submit(ctx, nil))
	request := must(service.Receive(ctx))
	refusedWith(t, request.Fail(0xffff0000, nil), ErrOption)
	refusedWith(t, request.Fail(0xffffffff, nil), ErrOption)
	if err := request.Fail(0xfffeffff, []byte("mine")); err != nil {
		t.Fatal(err)
	}
	_, err := call.Await(ctx)
	var failed *CallError
	if !errors.As(err, &failed) || failed.Code != 0xfffeffff || errors.Is(err, ErrServiceMemory) {
		t.Fatal(err)
	}
}
