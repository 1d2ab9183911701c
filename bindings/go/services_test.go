package pelton

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/names"
	"golang.org/x/sys/unix"
)

// Services that end, and several of one name.

// shortName is one of the test's own.
func shortName(t *testing.T) string {
	t.Helper()
	directory := must(os.MkdirTemp("", "pelton-go"))
	t.Cleanup(func() { os.RemoveAll(directory) })
	t.Setenv("XDG_RUNTIME_DIR", directory)
	return "service"
}

func TestAKilledServiceHasFailedItsCallsAtOnce(t *testing.T) {
	name, ctx := place(t), soon(t)
	service := child(t, "serve", name, "hold")
	service.says("listening")
	client := connected(t, name, nil)
	const count = 50
	ended := make(chan error, count)
	for range count / 2 {
		go func() { _, err := client.Call(ctx, []byte("x")); ended <- err }()
		call := must(client.Submit(ctx, []byte("y")))
		go func() {
			for _, err := range call.Parts(ctx) {
				ended <- err
			}
		}()
	}
	for n := range count {
		service.says(fmt.Sprint("taken ", n+1))
	}
	service.kill()
	for range count {
		if err := <-ended; !errors.Is(err, ErrPeerDied) {
			t.Fatal(err)
		}
	}
	if _, err := client.Call(ctx, nil); !errors.Is(err, ErrPeerDied) {
		t.Fatal(err)
	}
	if err := client.Notify(ctx, nil); !errors.Is(err, ErrPeerDied) {
		t.Fatal(err)
	}
}

func TestAKilledClientIsForgottenAndItsHandlersAreCancelled(t *testing.T) {
	name, ctx := place(t), soon(t)
	begun, replies := make(chan bool, 10), make(chan error, 10)
	service := served(t, name, nil, func(request Request) {
		if string(request.Bytes()) != "other" {
			begun <- true
			<-request.Context().Done()
			replies <- request.Reply(nil)
			return
		}
		echo(request)
	})
	client := child(t, "call", name, 10, 100, "hold")
	client.says("done 10")
	for range 10 {
		<-begun
	}
	other := connected(t, name, nil)
	if _, err := other.Call(ctx, []byte("other")); err != nil {
		t.Fatal(err)
	}
	client.kill()
	for range 10 {
		if err := <-replies; err != nil && !errors.Is(err, ErrPeerDied) && !errors.Is(err, ErrClosed) {
			t.Fatal(err)
		}
	}
	if _, err := other.Call(ctx, []byte("other")); err != nil || service.CorruptClients() != 0 {
		t.Fatal(err)
	}
}

// allFound waits until the client has found this number of services.
func allFound(t *testing.T, client *Client, count int) {
	t.Helper()
	for until := time.Now().Add(60 * time.Second); client.Services() != count; time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatal(client.Services(), "services, wanted", count)
		}
		// Not only while it is used.
		client.mutex.Lock()
		_ = client.discover(servicesMax)
		client.mutex.Unlock()
	}
}

func TestCallsAreSpreadOverTheServicesOfAName(t *testing.T) {
	name, ctx := shortName(t), soon(t)
	var services []*Service
	for range 3 {
		services = append(services, listening(t, name, nil))
	}
	client := connected(t, name, nil)
	allFound(t, client, 3)
	var calls []*Call
	for n := range 300 {
		calls = append(calls, must(client.Submit(ctx, payload(n, 10))))
	}
	// The least busy one gets the call.
	for range 100 {
		echo(must(services[1].Receive(ctx)))
	}
	// This takes the replies.
	allFound(t, client, 3)
	for n := range 100 {
		calls = append(calls, must(client.Submit(ctx, payload(300+n, 10))))
	}
	for _, service := range services {
		for range 100 {
			echo(must(service.Receive(ctx)))
		}
		if _, ok, err := tryRequest(service); ok || err != nil {
			t.Fatal(ok, err)
		}
	}
	for n, call := range calls {
		if reply, err := call.Await(ctx); err != nil || !isPayload(reply, n) {
			t.Fatal(err)
		}
	}
	// A closed service gets no more calls.
	services[0].Close()
	allFound(t, client, 2)
	for range 10 {
		must(client.Submit(ctx, nil))
	}
	for _, service := range services[1:] {
		for range 5 {
			_ = must(service.Receive(ctx)).End()
		}
	}
	if _, err := Gather(name, nil); !errors.Is(err, ErrInUse) {
		t.Fatal("a receiver beside services:", err)
	}
}

func TestIdempotentCallsOfADeadServiceGoToAnother(t *testing.T) {
	name, ctx := shortName(t), soon(t)
	dies := child(t, "serve", name, "hold")
	dies.says("listening")
	client := connected(t, name, nil)
	var calls []*Call
	for n := range 20 {
		calls = append(calls, must(client.Submit(ctx, payload(n, 100), []CallOption{Idempotent}[n%2:]...)))
	}
	for n := range 20 {
		dies.says(fmt.Sprint("taken ", n+1))
	}
	served(t, name, nil, echo)
	dies.kill()
	for n, call := range calls {
		reply, err := call.Await(ctx)
		if n%2 == 0 && (err != nil || !isPayload(reply, n) || len(reply) != 100) || n%2 == 1 &&
			!errors.Is(err, ErrPeerDied) {
			t.Fatal(n, err)
		}
	}
	if _, err := client.Call(ctx, []byte("goes on")); err != nil {
		t.Fatal(err)
	}
}

func TestACallThatEndsEachServiceIsLostInTheEnd(t *testing.T) {
	name, ctx := shortName(t), soon(t)
	var begun int
	service := listening(t, name, nil)
	client := connected(t, name, nil)
	call := must(client.Submit(ctx, []byte("x"), Idempotent))
	awaited := make(chan error, 1)
	go func() { _, err := call.Await(ctx); awaited <- err }()
	for range repeatsMax + 1 {
		must(service.Receive(ctx))
		begun++
		next := listening(t, name, nil)
		service.Close()
		service = next
	}
	if err := <-awaited; !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
	if _, ok, err := tryRequest(service); ok || err != nil {
		t.Fatal("it was asked again", err)
	}
}

func TestACallOfWhichAPartHasComeIsNotRepeated(t *testing.T) {
	name, ctx := shortName(t), soon(t)
	first := listening(t, name, nil)
	client := connected(t, name, nil)
	call := must(client.Submit(ctx, []byte("x"), Idempotent))
	request := must(first.Receive(ctx))
	second := listening(t, name, nil)
	if err := request.Part(ctx, []byte("a part")); err != nil {
		t.Fatal(err)
	}
	first.Close()
	parts := 0
	for part, err := range call.Parts(ctx) {
		if parts++; parts == 1 && string(part) != "a part" || parts == 2 && !errors.Is(err, ErrClosed) {
			t.Fatal(string(part), err)
		}
	}
	if _, ok, err := tryRequest(second); parts != 2 || ok || err != nil {
		t.Fatal(parts, ok, err)
	}
}

func TestWhatADrainingServiceHasNotBegunIsGivenBack(t *testing.T) {
	for _, isShort := range []bool{false, true} {
		t.Run(fmt.Sprint(isShort), func(t *testing.T) {
			name, ctx := place(t), soon(t)
			wanted := ErrRefused
			if isShort {
				name, wanted = shortName(t), ErrNoListener
			}
			service := listening(t, name, nil)
			client := connected(t, name, nil)
			begun := must(client.Submit(ctx, []byte("begun")))
			request := must(service.Receive(ctx))
			other := must(client.Submit(ctx, []byte("not begun")))
			service.Drain()
			if _, ok, err := tryRequest(service); ok || err != nil {
				t.Fatal(ok, err)
			}
			if _, err := other.Await(ctx); !errors.Is(err, wanted) {
				t.Fatal(err)
			}
			if _, err := client.Call(ctx, nil); !errors.Is(err, wanted) {
				t.Fatal(err)
			}
			echo(request)
			if _, err := service.Receive(ctx); !errors.Is(err, ErrClosed) {
				t.Fatal(err)
			}
			service.Close()
			if reply, err := begun.Await(ctx); err != nil || string(reply) != "begun" {
				t.Fatal(err)
			}
		})
	}
}

// Under load services are replaced one after the other: no call fails, none is carried out twice.
func TestServicesAreReplacedUnderLoad(t *testing.T) {
	name, ctx := shortName(t), soon(t)
	var counts [64 << 10]atomic.Int32
	start := func() (drain func()) {
		service := must(ListenService(name, &Options{Capacity: 1 << 16}))
		done := make(chan error, 1)
		go func() {
			done <- service.Serve(ctx, func(request Request) {
				counts[binary.LittleEndian.Uint32(request.Bytes())].Add(1)
				if len(request.Bytes())%3 == 0 {
					time.Sleep(50 * time.Microsecond)
				}
				echo(request)
			})
		}()
		return func() {
			service.Drain()
			if err := errors.Join(<-done, service.Close()); err != nil {
				t.Error(err)
			}
		}
	}
	drains := []func(){start(), start()}
	var asked atomic.Int64
	over := make(chan bool)
	var all sync.WaitGroup
	for range 2 {
		client := connected(t, name, &Options{Capacity: 1 << 16})
		for g := range 10 {
			all.Go(func() {
				for {
					select {
					case <-over:
						return
					default:
					}
					n := asked.Add(1)
					if n >= int64(len(counts)) {
						return
					}
					request := binary.LittleEndian.AppendUint32(nil, uint32(n))
					request = append(request, payload(int(n), g*1000)...)
					reply, err := client.Call(ctx, request)
					if err != nil || len(reply) != len(request) || binary.LittleEndian.Uint32(reply) != uint32(n) {
						t.Error(n, err)
						return
					}
				}
			})
		}
	}
	for range 15 {
		drains = append(drains, start())
		// Until some calls have been made.
		for at := asked.Load(); asked.Load() < at+100 && asked.Load() < int64(len(counts)) && !t.Failed(); {
			time.Sleep(time.Millisecond)
		}
		drains[0]()
		drains = drains[1:]
	}
	close(over)
	all.Wait()
	for _, drain := range drains {
		drain()
	}
	for n := range min(asked.Load(), int64(len(counts)-1)) {
		if found := counts[n+1].Load(); found != 1 {
			t.Fatal("call", n+1, "was carried out", found, "times")
		}
	}
	t.Log(asked.Load(), "calls")
}

// As above, and they are killed: calls fail or are repeated, and none hangs.
func TestServicesAreKilledUnderLoad(t *testing.T) {
	name, ctx := shortName(t), soon(t)
	begin := func() *process {
		service := child(t, "serve", name, "echo")
		service.says("listening")
		return service
	}
	services := []*process{begin(), begin()}
	client := connected(t, name, nil)
	over := make(chan bool)
	var calls, lost atomic.Int64
	var all sync.WaitGroup
	for g := range 20 {
		all.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-over:
					return
				default:
				}
				reply, err := client.Call(ctx, payload(n, g*500), []CallOption{Idempotent}[g%2:]...)
				switch calls.Add(1); {
				case err == nil && (len(reply) != g*500 || !isPayload(reply, n)):
					t.Error("a reply is wrong")
				case err != nil && (!errors.Is(err, ErrPeerDied) || g%2 == 0):
					t.Error(g, err)
				case err != nil:
					lost.Add(1)
				}
			}
		})
	}
	for range 6 {
		services = append(services, begin())
		for at := calls.Load(); calls.Load() < at+200 && !t.Failed(); {
			time.Sleep(time.Millisecond)
		}
		services[0].kill()
		services = services[1:]
	}
	close(over)
	all.Wait()
	t.Log(calls.Load(), "calls,", lost.Load(), "lost")
}

func TestAClientWaitsForAServiceIfItIsToAwaitOne(t *testing.T) {
	for _, name := range []string{place(t), shortName(t)} {
		if _, err := ConnectClient(soon(t), name, nil); !errors.Is(err, ErrNoListener) {
			t.Fatal(err)
		}
		short, cancel := context.WithTimeout(context.Background(), 30*time.Millisecond)
		if _, err := ConnectClient(short, name, &Options{Await: true}); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		cancel()
		go func() {
			// It has found no service, and waits before it tries again.
			if !parked("ConnectClient") {
				t.Error("the client does not wait")
			}
			served(t, name, nil, echo)
		}()
		client := must(ConnectClient(soon(t), name, &Options{Await: true}))
		if _, err := client.Call(soon(t), nil); err != nil {
			t.Fatal(err)
		}
		client.Close()
	}
}

func TestListenersThatComeAndGoDoNotHinderEachOther(t *testing.T) {
	shortName(t)
	// Two of one name, and two of others, in a directory that is empty now and then, and goes.
	var all sync.WaitGroup
	for _, text := range []string{"one", "one", "two", "three"} {
		all.Go(func() {
			name := must(names.Parse(text))
			for range 500 {
				bound, err := name.Listen(true, false)
				if err != nil {
					t.Errorf("listening under %s: %v", text, err)
					return
				}
				if fd, err := kernel.ConnectTo(bound.Path); err == nil {
					unix.Close(fd)
				} else {
					t.Errorf("nobody is at %s: %v", bound.Path, err)
				}
				bound.Close()
			}
		})
	}
	all.Wait()
}
