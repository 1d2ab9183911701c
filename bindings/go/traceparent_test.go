package pelton

import (
	"bytes"
	"errors"
	"strings"
	"testing"
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
