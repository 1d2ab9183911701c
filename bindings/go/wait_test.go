package pelton

import (
	"math"
	"testing"

	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
)

// Whatever a peer's page has, as the note of its last ring, a side waits, sleeps and is woken.
var hostileRings = []lane.LastRing{
	{}, {Processor: 1, AtNS: 1}, {Processor: math.MaxUint32, AtNS: math.MaxUint64}, {Processor: 1 << 31, AtNS: 1 << 63},
}

// ringsFrom calls waits in another goroutine, then wakes it by ring, and checks what the ring left in the peer's page.
func ringsFrom(t *testing.T, waits func() error, ring func() error, last func() lane.LastRing) {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- waits() }()
	if !parked("(*Own).Sleep") {
		t.Fatal("it does not sleep")
	}
	before := kernel.MonotonicNS()
	if err := ring(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	found, after := last(), kernel.MonotonicNS()
	if found.Processor == 0 || found.AtNS < before || found.AtNS > after {
		t.Fatalf("found %+v, wanted a processor, and a time from %d to %d", found, before, after)
	}
}

func TestARingOfASleepingReceiverIsNoted(t *testing.T) {
	sender, receiver := pair(t, nil)
	ctx := soon(t)
	for _, hostile := range hostileRings {
		sender.out.Lane.NoteRing(hostile)
		ringsFrom(t, func() error {
			message, err := receiver.Receive(ctx)
			if err != nil {
				return err
			}
			return message.Release()
		}, func() error { return sender.Send(ctx, []byte("hello")) }, receiver.lanes[0].Consumer.LastRing)
	}
}

func TestARingOfASenderThatWaitsForSpaceIsNoted(t *testing.T) {
	sender, receiver := pair(t, &Options{Capacity: 1 << 16})
	ctx, message := soon(t), payload(0, 1000)
	drain := func() error {
		for {
			received, ok, err := receiver.TryReceive()
			if err != nil || !ok {
				return err
			}
			if err := received.Release(); err != nil {
				return err
			}
		}
	}
	for _, hostile := range hostileRings {
		for must(sender.TrySend(message)) {
		}
		receiver.lanes[0].Consumer.NoteRing(hostile)
		ringsFrom(t, func() error { return sender.Send(ctx, message) }, drain, sender.out.Lane.LastRing)
		if err := drain(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestTheRingsOfACallAreNoted(t *testing.T) {
	name, ctx := place(t), soon(t)
	service, client := listening(t, name, nil), connected(t, name, nil)
	for _, hostile := range hostileRings {
		var request Request
		var call *Call
		ringsFrom(t, func() (err error) { request, err = service.Receive(ctx); return err },
			func() (err error) { call, err = client.Submit(ctx, []byte("hello")); return err },
			func() lane.LastRing { return service.receiver.lanes[0].Consumer.LastRing() })
		request.caller.out.Lane.NoteRing(hostile)
		ringsFrom(t, func() error { _, err := call.Await(ctx); return err },
			func() error { return request.Reply(request.Bytes()) }, client.links[0].in.Consumer.LastRing)
		client.links[0].out.Lane.NoteRing(hostile)
	}
}
