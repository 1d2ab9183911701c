package pelton

import (
	"context"
	"errors"
	"sync"
	"testing"
)

// served is a service that answers by the handler until the test ends.
func served(t *testing.T, name string, options *Options, handler func(Request)) *Service {
	t.Helper()
	service := must(ListenService(name, options))
	done := make(chan error, 1)
	go func() { done <- service.Serve(context.Background(), handler) }()
	t.Cleanup(func() {
		service.Stop()
		if err := <-done; err != nil && !errors.Is(err, ErrClosedHandle) {
			t.Error(err)
		}
		service.Close()
	})
	return service
}

func connected(t *testing.T, name string, options *Options) *Client {
	t.Helper()
	client := must(ConnectClient(soon(t), name, options))
	t.Cleanup(func() { client.Close() })
	return client
}

func echo(request Request) { _ = request.Reply(request.Bytes()) }

func TestACallIsAnswered(t *testing.T) {
	name, ctx := place(t), soon(t)
	served(t, name, nil, echo)
	client := connected(t, name, nil)
	for n := range 1000 {
		reply, err := client.Call(ctx, payload(n, n))
		if err != nil || len(reply) != n || !isPayload(reply, n) {
			t.Fatal(n, len(reply), err)
		}
	}
}

func TestManyGoroutinesAskByOneClientInAnyOrderAndAnySize(t *testing.T) {
	name, ctx := place(t), soon(t)
	// Lanes that are smaller than the largest messages, so that those are cut, and room is waited for.
	options := &Options{Capacity: 1 << 16}
	served(t, name, options, echo)
	client := connected(t, name, options)
	var all sync.WaitGroup
	for g := range 50 {
		all.Go(func() {
			for n := range 60 {
				size := sizes[(n+g)%len(sizes)] * (1 + n%3)
				reply, err := client.Call(ctx, payload(n, size))
				if err != nil || len(reply) != size || !isPayload(reply, n) {
					t.Error(g, n, len(reply), size, err)
					return
				}
			}
		})
	}
	all.Wait()
}
