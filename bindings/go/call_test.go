package pelton

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/calls"
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

func TestACallHasItsReply(t *testing.T) {
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

func TestManyGoroutinesCallByOneClientInAnyOrderAndAnySize(t *testing.T) {
	name, ctx := place(t), soon(t)
	// Lanes smaller than the largest messages, so that those travel in pieces and wait for space.
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

// listening returns a service whose requests the caller takes.
func listening(t *testing.T, name string, options *Options) *Service {
	t.Helper()
	service := must(ListenService(name, options))
	t.Cleanup(func() { service.Close() })
	return service
}

func TestRepliesComeInAnyOrder(t *testing.T) {
	name, ctx := place(t), soon(t)
	service, client := listening(t, name, nil), connected(t, name, nil)
	var inFlight []*Call
	for n := range 100 {
		inFlight = append(inFlight, must(client.Submit(ctx, payload(n, 300))))
	}
	var requests []Request
	for range 100 {
		requests = append(requests, must(service.Receive(ctx)))
	}
	for n := range requests {
		request := requests[len(requests)-1-n]
		if err := request.Reply(request.Bytes()); err != nil {
			t.Fatal(err)
		}
		if err := request.Reply(nil); !errors.Is(err, ErrRefused) {
			t.Fatal("answered twice:", err)
		}
	}
	for n := range inFlight {
		// In yet another order.
		n = n * 37 % len(inFlight)
		if reply, err := inFlight[n].Await(ctx); err != nil || !isPayload(reply, n) || len(reply) != 300 {
			t.Fatal(n, err)
		}
		if _, err := inFlight[n].Await(ctx); !errors.Is(err, ErrRefused) {
			t.Fatal("awaited twice:", err)
		}
	}
}

func TestAFailureHasItsCodeAndAHandlerThatForgetsOrPanicsAbandons(t *testing.T) {
	name, ctx := place(t), soon(t)
	served(t, name, nil, func(request Request) {
		switch string(request.Bytes()) {
		case "fail":
			_ = request.Fail(77, []byte("for this reason"))
		case "panic":
			panic("as the test wants")
		case "large":
			if err := request.Reply(make([]byte, 5000)); !errors.Is(err, ErrTooLarge) {
				t.Error(err)
			}
		}
	})
	client := connected(t, name, &Options{CallBytesMax: 4096})
	var failed *CallError
	if _, err := client.Call(ctx, []byte("fail")); !errors.As(err, &failed) || failed.Code != 77 ||
		string(failed.Bytes) != "for this reason" {
		t.Fatal(err)
	}
	log.SetOutput(io.Discard)
	defer log.SetOutput(os.Stderr)
	for _, what := range []string{"forget", "panic", "large"} {
		if _, err := client.Call(ctx, []byte(what)); !errors.Is(err, ErrAbandoned) {
			t.Fatal(what, err)
		}
	}
}

func TestARequestThatIsLargerThanTheServiceTakesIsRefusedHere(t *testing.T) {
	name, ctx := place(t), soon(t)
	served(t, name, &Options{CallBytesMax: 4096}, echo)
	client := connected(t, name, &Options{CallBytesMax: 3000})
	if _, err := client.Call(ctx, make([]byte, 4097)); !errors.Is(err, ErrTooLarge) {
		t.Fatal(err)
	}
	if _, err := client.Call(ctx, make([]byte, 4096)); !errors.Is(err, ErrAbandoned) {
		t.Fatal(err)
	}
	if reply, err := client.Call(ctx, make([]byte, 3000)); err != nil || len(reply) != 3000 {
		t.Fatal(err)
	}
}

func TestAReplyInPartsIsIteratedOver(t *testing.T) {
	name, ctx := place(t), soon(t)
	cancelled := make(chan error, 1)
	served(t, name, &Options{Capacity: 1 << 16}, func(request Request) {
		for n := 0; string(request.Bytes()) != "endless" && n < 500; n++ {
			if err := request.Part(ctx, payload(n, sizes[n%len(sizes)])); err != nil {
				t.Error(err)
			}
		}
		switch string(request.Bytes()) {
		case "end":
			_ = request.End()
		case "reply":
			_ = request.Reply([]byte("last"))
		case "fail":
			_ = request.Fail(3, nil)
		case "endless":
			for err := error(nil); err == nil; {
				err = request.Part(request.Context(), payload(0, 1000))
			}
			<-request.Context().Done()
			if !request.IsCancelled() {
				cancelled <- errors.New("it is not cancelled")
			}
			cancelled <- request.Reply(nil)
		}
	})
	client := connected(t, name, nil)
	for _, how := range []string{"end", "reply", "fail"} {
		call, n := must(client.Submit(ctx, []byte(how))), 0
		var last error
		for part, err := range call.Parts(ctx) {
			switch last = err; {
			case n < 500 && (err != nil || len(part) != sizes[n%len(sizes)] || !isPayload(part, n)):
				t.Fatal(how, n, err)
			case n == 500 && how == "reply" && string(part) != "last":
				t.Fatal(string(part))
			}
			n++
		}
		var failed *CallError
		if wanted := map[string]int{"end": 500, "reply": 501, "fail": 501}[how]; n != wanted ||
			(how == "fail") != errors.As(last, &failed) {
			t.Fatal(how, n, last)
		}
	}
	whole, err := client.Call(ctx, []byte("reply"))
	if err != nil || !bytes.HasSuffix(whole, []byte("last")) || len(whole) < 500*1000 {
		t.Fatal(len(whole), err)
	}
	// Leaving the loop cancels: the handler is notified, and the client can make other calls.
	n := 0
	for _, err := range must(client.Submit(ctx, []byte("endless"))).Parts(ctx) {
		if n++; err != nil || n == 100 {
			break
		}
	}
	if _, err := client.Call(ctx, []byte("end")); err != nil {
		t.Fatal(err)
	}
	if err := <-cancelled; err != nil {
		t.Fatal(err)
	}
}

func TestPartsThatAreNotTakenBlockNoMoreThanTheyMay(t *testing.T) {
	name, ctx := place(t), soon(t)
	const count = 300
	served(t, name, &Options{Capacity: 1 << 16}, func(request Request) {
		for n := 0; string(request.Bytes()) == "parts" && n < count; n++ {
			if err := request.Part(ctx, payload(n, 1000)); err != nil {
				t.Error(err)
			}
		}
		_ = request.End()
	})
	client := connected(t, name, &Options{CallBytesMax: 20_000})
	slow := must(client.Submit(ctx, []byte("parts")))
	// It waits behind parts that are not taken, until they are.
	short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	if _, err := client.Call(short, []byte("other")); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	client.mutex.Lock()
	if client.stashedPartBytes > 20_000+2000 {
		t.Error("kept:", client.stashedPartBytes)
	}
	client.mutex.Unlock()
	other := make(chan error, 1)
	go func() { _, err := client.Call(ctx, []byte("other")); other <- err }()
	n := 0
	for part, err := range slow.Parts(ctx) {
		if err != nil || !isPayload(part, n) {
			t.Fatal(n, err)
		}
		n++
	}
	if err := <-other; err != nil || n != count {
		t.Fatal(err, n)
	}
}

func TestNotificationsArrive(t *testing.T) {
	name, ctx := place(t), soon(t)
	received := make(chan int, 1000)
	served(t, name, &Options{Capacity: 1 << 16, Handlers: 1}, func(request Request) {
		if !request.IsNotification() {
			echo(request)
			return
		}
		if err := request.Reply(nil); !errors.Is(err, ErrRefused) {
			t.Error(err)
		}
		received <- len(request.Bytes())
	})
	client := connected(t, name, &Options{Capacity: 1 << 16})
	for n := range 300 {
		if err := client.Notify(ctx, payload(n, n*1000)); err != nil {
			t.Fatal(err)
		}
	}
	for n := range 300 {
		if found := <-received; found != n*1000 {
			t.Fatal(found, n)
		}
	}
}

func TestACancelledCallKeepsItsSlotUntilItsReply(t *testing.T) {
	name, ctx := place(t), soon(t)
	service, client := listening(t, name, nil), connected(t, name, nil)
	var requests []Request
	for range calls.CallsMax {
		short, cancel := context.WithTimeout(ctx, time.Microsecond)
		_, err := client.Call(short, []byte("x"))
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		request := must(service.Receive(ctx))
		if _, ok := request.Deadline(); !ok {
			t.Fatal("the service did not get the deadline")
		}
		requests = append(requests, request)
	}
	short, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
	defer cancel()
	if _, err := client.Submit(short, []byte("y")); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal("a place was used again:", err)
	}
	if _, ok, err := tryRequest(service); ok || err != nil {
		t.Fatal(ok, err)
	}
	waiting := make(chan error, 1)
	go func() {
		reply, err := client.Call(ctx, []byte("z"))
		if string(reply) != "z" {
			t.Error(string(reply))
		}
		waiting <- err
	}()
	for n, request := range requests {
		if !request.IsCancelled() {
			t.Fatal(n, "is not cancelled")
		}
		<-request.Context().Done()
		if err := request.Reply([]byte("late")); err != nil {
			t.Fatal(err)
		}
	}
	request := must(service.Receive(ctx))
	echo(request)
	if err := <-waiting; err != nil {
		t.Fatal(err)
	}
}

func tryRequest(service *Service) (Request, bool, error) {
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	request, err := service.Receive(ended)
	if errors.Is(err, context.Canceled) {
		return request, false, nil
	}
	return request, err == nil, err
}

func TestAClientThatDoesNotReadDelaysNoOther(t *testing.T) {
	name, ctx := place(t), soon(t)
	var handled atomic.Int64
	service := served(t, name, nil, func(request Request) {
		handled.Add(1)
		echo(request)
	})
	// Its requests all have space, their replies do not.
	silent, other := connected(t, name, &Options{Memory: 1 << 16}), connected(t, name, nil)
	var inFlight []*Call
	for n := range calls.CallsMax {
		inFlight = append(inFlight, must(silent.Submit(ctx, payload(n, 3000))))
	}
	for n := range 1000 {
		if reply, err := other.Call(ctx, payload(n, 3000)); err != nil || !isPayload(reply, n) {
			t.Fatal(err)
		}
	}
	// Its lane of replies takes some twenty. Then no more of its requests are taken.
	if of := handled.Load() - 1000; of > calls.CallsMax/4 {
		t.Fatal(of, "requests were taken of a client that reads nothing")
	}
	for n, call := range inFlight {
		if reply, err := call.Await(ctx); err != nil || !isPayload(reply, n) || len(reply) != 3000 {
			t.Fatal(n, err)
		}
	}
	if service.CorruptClients() != 0 {
		t.Fatal("somebody was sent away")
	}
}

func TestHandlersThatWaitForEachOtherAllRun(t *testing.T) {
	name, ctx := place(t), soon(t)
	const count = 100
	var at sync.WaitGroup
	at.Add(count)
	var most, now atomic.Int64
	served(t, name, &Options{Handlers: count}, func(request Request) {
		if n := now.Add(1); n > most.Load() {
			most.Store(n)
		}
		if request.Bytes()[0] == 1 {
			at.Done()
			at.Wait()
		} else {
			time.Sleep(100 * time.Microsecond)
		}
		now.Add(-1)
		echo(request)
	})
	client := connected(t, name, nil)
	for _, what := range []byte{1, 2, 2} {
		var all sync.WaitGroup
		for range count * int(what) {
			all.Go(func() {
				if _, err := client.Call(ctx, []byte{what}); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
	}
	if most.Load() > count {
		t.Fatal(most.Load(), "handlers at a time")
	}
}

func TestClosingEndsCalls(t *testing.T) {
	name, ctx := place(t), soon(t)
	service, client := listening(t, name, nil), connected(t, name, nil)
	ended := make(chan error, 20)
	for range 20 {
		go func() { _, err := client.Call(ctx, []byte("x")); ended <- err }()
	}
	for range 20 {
		must(service.Receive(ctx))
	}
	client.Close()
	for range 20 {
		if err := <-ended; !errors.Is(err, ErrClosedHandle) {
			t.Fatal(err)
		}
	}
	if _, err := client.Call(ctx, nil); !errors.Is(err, ErrClosedHandle) {
		t.Fatal(err)
	}
	// The service's side.
	client = connected(t, name, nil)
	for n := range 20 {
		go func() {
			reply, err := client.Call(ctx, []byte("x"))
			if err == nil && string(reply) != "answered" {
				t.Error(n, string(reply))
			}
			ended <- err
		}()
	}
	for n := range 20 {
		if request := must(service.Receive(ctx)); n < 10 {
			_ = request.Reply([]byte("answered"))
		}
	}
	service.Close()
	closed := 0
	for range 20 {
		if err := <-ended; errors.Is(err, ErrClosed) {
			closed++
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := client.Submit(ctx, nil); closed != 10 || !errors.Is(err, ErrClosed) {
		t.Fatal(closed, err)
	}
}

func TestStopEndsServingAndNotTheCalls(t *testing.T) {
	name, ctx := place(t), soon(t)
	service, client := listening(t, name, nil), connected(t, name, nil)
	begun, goOn := make(chan bool), make(chan bool)
	served := make(chan error)
	go func() {
		served <- service.Serve(ctx, func(request Request) {
			begun <- true
			<-goOn
			echo(request)
		})
	}()
	call := must(client.Submit(ctx, []byte("x")))
	<-begun
	service.Stop()
	close(goOn)
	if err := <-served; err != nil {
		t.Fatal(err)
	}
	if reply, err := call.Await(ctx); err != nil || string(reply) != "x" {
		t.Fatal(err)
	}
	short, cancel := context.WithCancel(ctx)
	cancel()
	if err := listening(t, place(t), nil).Serve(short, echo); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
}

func TestAPeerThatIsNoClientIsRefused(t *testing.T) {
	name, ctx := place(t), soon(t)
	served(t, name, nil, echo)
	if _, err := ConnectSender(ctx, name, nil); !errors.Is(err, ErrRefused) {
		t.Fatal(err)
	}
	other := place(t)
	receiver := must(Gather(other, nil))
	defer receiver.Close()
	if _, err := ConnectClient(ctx, other, nil); !errors.Is(err, ErrRefused) {
		t.Fatal(err)
	}
	if _, err := ConnectClient(ctx, place(t), nil); !errors.Is(err, ErrNoListener) {
		t.Fatal(err)
	}
	if _, err := ConnectClient(ctx, name, &Options{MessageBytesMax: 1000}); !errors.Is(err, ErrOption) {
		t.Fatal(err)
	}
}

func TestACallAllocatesNothingOfItsOwn(t *testing.T) {
	for _, size := range []int{256, 100_000} {
		name, ctx := place(t), soon(t)
		served(t, name, &Options{Wait: Spin}, echo)
		client := connected(t, name, &Options{Wait: Spin})
		request, reply := payload(0, size), make([]byte, 0, size)
		ask := func() {
			if _, err := client.CallInto(ctx, request, reply); err != nil {
				t.Fatal(err)
			}
		}
		for range 1000 {
			ask()
		}
		// Of this whole process, so of the service's side too; a collection may empty its pool of requests.
		if found := testing.AllocsPerRun(2000, ask); found > 0 {
			t.Fatal(found, "allocations per call of", size, "bytes")
		}
		if found := testing.AllocsPerRun(2000, func() {
			if _, err := client.Call(ctx, request); err != nil {
				t.Fatal(err)
			}
		}); found > 1 {
			t.Fatal(found, "allocations per call of", size, "bytes, wanted the reply's alone")
		}
	}
}

func TestWhatAServiceKeepsOfLargeRequestsIsBounded(t *testing.T) {
	name, ctx := place(t), soon(t)
	service := must(ListenService(name, nil))
	defer service.Close()
	client := connected(t, name, nil)
	var inFlight []*Call
	var requests []Request
	for n := range 24 {
		// The last ones are larger than those before.
		inFlight = append(inFlight, must(client.Submit(ctx, payload(n, 900_000+n/20*400_000))))
		requests = append(requests, must(service.Receive(ctx)))
	}
	for _, request := range requests {
		if err := request.Reply([]byte("answer")); err != nil {
			t.Fatal(err)
		}
	}
	for _, call := range inFlight {
		if reply, err := call.Await(ctx); err != nil || string(reply) != "answer" {
			t.Fatal(string(reply), err)
		}
	}
	check := func() {
		t.Helper()
		kept := 0
		for _, spare := range service.spare {
			kept += cap(spare.bytes)
		}
		for _, memory := range service.large {
			kept += cap(memory)
		}
		if kept != service.kept || kept > keptBytes || kept < keptBytes/2 {
			t.Fatal(kept, "bytes are kept, counted", service.kept)
		}
	}
	check()
	// A small request that is not answered keeps none of it; one that is too large to be kept takes no other's place.
	small := must(client.Submit(ctx, payload(0, 100)))
	held := must(service.Receive(ctx))
	for n, size := range []int{5_000_000, keptBytes + 1, 5_000_000} {
		call := must(client.Submit(ctx, payload(n, size)))
		request := must(service.Receive(ctx))
		if err := request.Reply(request.Bytes()); err != nil {
			t.Fatal(err)
		}
		if reply := must(call.Await(ctx)); !bytes.Equal(reply, payload(n, size)) {
			t.Fatal("the reply to", size, "bytes has", len(reply))
		}
		check()
	}
	if !bytes.Equal(held.Bytes(), payload(0, 100)) || cap(held.Bytes()) > smallBytes {
		t.Fatal("a request of 100 bytes has", cap(held.Bytes()))
	}
	if err := held.Reply(nil); err != nil {
		t.Fatal(err)
	}
	must(small.Await(ctx))
}

func TestMessagesInPiecesHaveLittleMoreMemoryThanBytes(t *testing.T) {
	name, ctx := place(t), soon(t)
	options := &Options{Capacity: 1 << 20}
	service := must(ListenService(name, options))
	defer service.Close()
	client := connected(t, name, options)
	// What is reserved for the second is used, and for the third is too much.
	for n, size := range []int{5_000_000, 5_000_000, 1_000_000} {
		replies := make(chan []byte, 1)
		go func() { replies <- must(client.Call(ctx, payload(n, size))) }()
		request := must(service.Receive(ctx))
		if !bytes.Equal(request.Bytes(), payload(n, size)) || cap(request.Bytes()) > 2*size {
			t.Fatal("request", n, "has", len(request.Bytes()), "bytes of", cap(request.Bytes()))
		}
		if err := request.Reply(request.Bytes()); err != nil {
			t.Fatal(err)
		}
		if reply := <-replies; !bytes.Equal(reply, payload(n, size)) || cap(reply) > 2*size {
			t.Fatal("reply", n, "has", len(reply), "bytes of", cap(reply))
		}
	}
}

func TestARequestInPiecesSharesNoMemoryWithOneThatCameBetween(t *testing.T) {
	name, ctx := place(t), soon(t)
	options := &Options{Capacity: 1 << 20}
	service := must(ListenService(name, options))
	defer service.Close()
	one, other := connected(t, name, options), connected(t, name, options)
	const size, least = 3_000_000, 1_000_000
	for round := range 4 {
		// The lane holds the first pieces alone: the rest comes while the service takes the other client's.
		large := make(chan error, 1)
		go func() {
			_, err := one.Call(ctx, payload(round, size+round*least))
			large <- err
		}()
		var between []Request
		var calls []*Call
		for n := range 3 {
			calls = append(calls, must(other.Submit(ctx, payload(100+n, 200_000))))
		}
		for len(between) < 4 {
			between = append(between, must(service.Receive(ctx)))
		}
		for _, request := range between {
			is := slices.ContainsFunc([][]byte{payload(round, size+round*least), payload(100, 200_000),
				payload(101, 200_000), payload(102, 200_000)},
				func(sent []byte) bool { return bytes.Equal(sent, request.Bytes()) })
			if !is {
				t.Fatal("a request of", len(request.Bytes()), "bytes has those of another one")
			}
		}
		for _, request := range between {
			if err := request.Reply(nil); err != nil {
				t.Fatal(err)
			}
		}
		for _, call := range calls {
			must(call.Await(ctx))
		}
		if err := <-large; err != nil {
			t.Fatal(err)
		}
	}
}

func TestNothingIsLeftOfWhatWasClosed(t *testing.T) {
	name, ctx := place(t), soon(t)
	descriptors := func() int {
		return len(must(os.ReadDir("/proc/self/fd"))) + bytes.Count(must(os.ReadFile("/proc/self/maps")),
			[]byte("memfd:pelton"))
	}
	round := func() {
		service := must(ListenService(name, &Options{Capacity: 1 << 16}))
		done := make(chan error, 1)
		go func() { done <- service.Serve(ctx, echo) }()
		for range 5 {
			client := must(ConnectClient(ctx, name, &Options{Capacity: 1 << 16}))
			for n := range 5 {
				if _, err := client.Call(ctx, payload(n, n*50_000)); err != nil {
					t.Fatal(err)
				}
			}
			// With a call in flight, and replies that are not taken.
			for range 100 {
				must(client.Submit(ctx, payload(0, 2000)))
			}
			client.Close()
		}
		service.Stop()
		if err := errors.Join(<-done, service.Close()); err != nil {
			t.Fatal(err)
		}
	}
	round()
	// A goroutine that watches a peer ends a moment after the close. Then nothing grows.
	before, goroutines := descriptors(), runtime.NumGoroutine()
	for range 10 {
		round()
	}
	for until := time.Now().Add(30 * time.Second); descriptors() > before ||
		runtime.NumGoroutine() > goroutines; time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatalf("%d descriptors and mappings, %d before; %d goroutines, %d before", descriptors(), before,
				runtime.NumGoroutine(), goroutines)
		}
	}
}
