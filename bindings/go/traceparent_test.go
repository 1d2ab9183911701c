package pelton

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/pelton-ipc/pelton/bindings/go/internal/calls"
)

const validTraceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

func TestARequestCarriesItsTraceparent(t *testing.T) {
	name, ctx := place(t), soon(t)
	options := &Options{Capacity: 1 << 16, CallBytesMax: 100000}
	service, client := listening(t, name, options), connected(t, name, options)
	for _, text := range []string{validTraceparent, "", strings.ToUpper(validTraceparent), validTraceparent[:54],
		"00-00000000000000000000000000000000-00f067aa0ba902b7-01", "01" + validTraceparent[2:] + "-more"} {
		wanted := ""
		if strings.HasPrefix(text, "01") || text == validTraceparent {
			wanted = validTraceparent
		}
		for _, takesTraced := range []bool{true, false} {
			client.links[0].takesTraced = takesTraced
			if !takesTraced {
				wanted = ""
			}
			for _, size := range []int{0, 5, 100000} {
				request := payload(size, size)
				done := make(chan error, 1)
				go func() {
					_, err := client.Call(ctx, request, Traceparent(text))
					done <- err
				}()
				found := must(service.Receive(ctx))
				if !bytes.Equal(found.Bytes(), request) || found.Traceparent() != wanted {
					t.Fatalf("%q: %d bytes, %q, wanted %d, %q", text, len(found.Bytes()), found.Traceparent(), size, wanted)
				}
				if err := errors.Join(found.Reply(nil), <-done); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	client.links[0].takesTraced = true
	if _, err := client.Call(ctx, make([]byte, 100001), Traceparent(validTraceparent)); !errors.Is(err, ErrTooLarge) {
		t.Fatal(err)
	}
}

func TestACallThatAnotherServiceCarriesOutKeepsItsTraceparent(t *testing.T) {
	name, ctx := shortName(t), soon(t)
	service := listening(t, name, nil)
	client := connected(t, name, nil)
	call := must(client.Submit(ctx, []byte("x"), Idempotent, Traceparent(validTraceparent)))
	awaited := make(chan error, 1)
	go func() { _, err := call.Await(ctx); awaited <- err }()
	for range 3 {
		if found := must(service.Receive(ctx)); found.Traceparent() != validTraceparent || string(found.Bytes()) != "x" {
			t.Fatalf("%q %q", found.Bytes(), found.Traceparent())
		}
		next := listening(t, name, nil)
		service.Close()
		service = next
	}
	if err := errors.Join(must(service.Receive(ctx)).Reply(nil), <-awaited); err != nil {
		t.Fatal(err)
	}
}

// The traceparent does not count towards the largest request, and not every service gets it.
func TestATracedRequestInAFullLaneSleepsUntilThereIsSpaceOrTheContextEnds(t *testing.T) {
	for about, test := range map[string]struct {
		name              func(*testing.T) string
		takesTraced       bool
		bytes, recordsMax int
	}{
		"the largest request of the only service": {place, true, 4096, 0},
		"the largest request of a short name":     {shortName, true, 4096, 0},
		// It is in one record without the traceparent, and would be in two with it.
		"the largest record without a traceparent": {place, false, 1000, 1024},
	} {
		t.Run(about, func(t *testing.T) {
			name, ctx := test.name(t), soon(t)
			service := listening(t, name, &Options{CallBytesMax: 4096})
			client := connected(t, name, &Options{Capacity: 1 << 16, MessageBytesMax: test.recordsMax})
			client.mutex.Lock()
			link := client.links[0]
			link.takesTraced = test.takesTraced
			for done := true; done; {
				done = must(link.out.Put(calls.Header{Kind: calls.KindNotify}, make([]byte, test.bytes)))
			}
			client.mutex.Unlock()
			request := payload(1, test.bytes)
			isAsleep := func(ctx context.Context) (bool, chan error) {
				done := make(chan error, 1)
				go func() { _, err := client.Call(ctx, request, Traceparent(validTraceparent)); done <- err }()
				return parked("(*Client).wait"), done
			}
			limited, cancel := context.WithCancel(ctx)
			slept, cancelled := isAsleep(limited)
			if cancel(); slept {
				if err := <-cancelled; !errors.Is(err, context.Canceled) {
					t.Fatal(err)
				}
			}
			sleptAgain, replied := isAsleep(ctx)
			for {
				found := must(service.Receive(ctx))
				if found.IsNotification() {
					_ = found.Abandon()
					continue
				}
				if !bytes.Equal(found.Bytes(), request) || found.Traceparent() != "" != test.takesTraced {
					t.Error(len(found.Bytes()), found.Traceparent())
				}
				if err := errors.Join(found.Reply(nil), <-replied); err != nil {
					t.Fatal(err)
				}
				break
			}
			if !slept || !sleptAgain {
				t.Fatal("it polls again and again")
			}
		})
	}
}

func TestAMessageComesWithItsTraceparent(t *testing.T) {
	ctx, traced := soon(t), &Options{Capacity: 1 << 16, Traced: true}
	path := channelPlace(t)
	exchange := func(sender *Sender, receiver *Receiver) {
		t.Helper()
		defer receiver.Close()
		// Larger than what the lane holds, so that the sender waits, and wraps.
		go func() {
			defer sender.Close()
			for n := range 300 {
				message, text := payload(n, n*101%20000), validTraceparent
				switch n % 4 {
				case 0:
					text = "not valid"
					fallthrough
				case 1:
					if err := sender.SendTraced(ctx, message, text); err != nil {
						t.Error(err)
					}
				case 2:
					copy(must(sender.ReserveTraced(ctx, len(message)+5, text)), message)
					must(0, sender.Commit(len(message)))
				default:
					must(0, sender.Send(ctx, message))
				}
			}
		}()
		buffer := make([]byte, 20000)
		for n := range 300 {
			wanted := ""
			if n%4 == 1 || n%4 == 2 {
				wanted = validTraceparent
			}
			if n%3 == 0 {
				size := must(receiver.ReceiveInto(ctx, buffer))
				if !bytes.Equal(buffer[:size], payload(n, n*101%20000)) || receiver.Traceparent() != wanted {
					t.Fatal(n, size, receiver.Traceparent())
				}
				continue
			}
			message := must(receiver.Receive(ctx))
			if !bytes.Equal(message.Bytes(), payload(n, n*101%20000)) || message.Traceparent() != wanted {
				t.Fatal(n, len(message.Bytes()), message.Traceparent())
			}
			must(0, message.Release())
			if message.Traceparent() != "" {
				t.Fatal("a released message has a traceparent")
			}
		}
	}
	sender := must(CreateSender(ctx, path, traced))
	exchange(sender, must(OpenReceiver(ctx, path, nil)))
	// The creator has decided; the largest message has space for the mark.
	sender = must(OpenSender(ctx, path, nil))
	if sender.MessageBytesMax() != 1<<15-72 {
		t.Fatal(sender.MessageBytesMax())
	}
	exchange(sender, must(CreateReceiver(ctx, path, nil)))

	name := place(t)
	listener := must(Listen(name, nil))
	defer listener.Close()
	connected := make(chan *Sender, 1)
	go func() { connected <- must(ConnectSender(ctx, name, traced)) }()
	receiver := must(listener.AcceptReceiver(ctx))
	sender = <-connected
	// The largest, at several places of the lane.
	for n := range 60 {
		must(0, sender.Send(ctx, payload(n, n*56)))
		must(0, must(receiver.Receive(ctx)).Release())
		must(0, sender.SendTraced(ctx, payload(n, 1<<15-72), validTraceparent))
		message := must(receiver.Receive(ctx))
		if message.Traceparent() != validTraceparent || len(message.Bytes()) != 1<<15-72 {
			t.Fatal(message.Traceparent(), len(message.Bytes()))
		}
		must(0, message.Release())
	}
	exchange(sender, receiver)

	// Without the option it goes without.
	go func() { connected <- must(ConnectSender(ctx, name, small)) }()
	receiver = must(listener.AcceptReceiver(ctx))
	sender = <-connected
	defer sender.Close()
	defer receiver.Close()
	must(0, sender.SendTraced(ctx, []byte("x"), validTraceparent))
	if message := must(receiver.Receive(ctx)); message.Traceparent() != "" || string(message.Bytes()) != "x" {
		t.Fatal(message.Traceparent())
	}
}
