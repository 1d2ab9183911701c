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
