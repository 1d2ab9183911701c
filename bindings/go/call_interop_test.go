package pelton

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Calls with the pelton command, which is Rust's, and with a program in C.

// inRust is a service that echoes.
func inRust(t *testing.T, name string) *process {
	t.Helper()
	return tool(t, "serve", "--co-process", "--exec", "cat", name)
}

func TestRustCallsAServiceInGo(t *testing.T) {
	name := place(t)
	served(t, name, &Options{Capacity: 1 << 16}, func(request Request) {
		// So that the replies come in another order.
		if len(request.Bytes())%2 == 1 {
			time.Sleep(100 * time.Microsecond)
		}
		echo(request)
	})
	calls := tool(t, "call", "--frame", "len32", name)
	go func() {
		if err := errors.Join(writeFrames(calls.input, 2000), calls.input.Close()); err != nil {
			t.Error(err)
		}
	}()
	readFrames(t, calls.output, 2000, 0)
	calls.exits(0)
}

func TestGoCallsAServiceInRust(t *testing.T) {
	name, ctx := place(t), soon(t)
	service := inRust(t, name)
	client := connected(t, name, &Options{Capacity: 1 << 16, Await: true})
	var all sync.WaitGroup
	for g := range 20 {
		all.Go(func() {
			for n := range 100 {
				size := sizes[(n+g)%len(sizes)] * 3
				if reply, err := client.Call(ctx, payload(n, size)); err != nil || len(reply) != size ||
					!isPayload(reply, n) {
					t.Error(g, n, len(reply), err)
					return
				}
			}
		})
	}
	all.Wait()
	if err := client.Notify(ctx, []byte("noted")); err != nil {
		t.Fatal(err)
	}
	_ = service.Process.Signal(os.Interrupt)
	service.exits(130)
	if _, err := client.Call(ctx, nil); !errors.Is(err, ErrClosed) && !errors.Is(err, ErrRefused) {
		t.Fatal(err)
	}
}

func TestRustGetsPartsFailuresAndNotificationsFromGo(t *testing.T) {
	name, ctx := place(t), soon(t)
	isNotification := make(chan string, 1)
	served(t, name, nil, func(request Request) {
		switch string(request.Bytes()) {
		case "parts":
			for n := range 1000 {
				if err := request.Part(ctx, fmt.Appendln(nil, n)); err != nil {
					t.Error(err)
				}
			}
			_ = request.End()
		case "fail":
			_ = request.Fail(9, []byte("as was asked"))
		case "note":
			isNotification <- fmt.Sprint(request.IsNotification())
		}
	})
	calls := tool(t, "call", name, "parts")
	for n := range 1000 {
		calls.says(fmt.Sprint(n))
	}
	calls.exits(0)
	calls = tool(t, "call", name, "fail")
	calls.exits(6)
	if said := calls.errors.String(); !strings.Contains(said, "9") || !strings.Contains(said, "as was asked") {
		t.Fatal(said)
	}
	tool(t, "call", "--notify", name, "note").exits(0)
	if <-isNotification != "true" {
		t.Fatal("it was a call")
	}
	// Without a reply.
	tool(t, "call", name, "note").exits(6)
}

func TestGoGetsFailuresFromRust(t *testing.T) {
	name, ctx := place(t), soon(t)
	tool(t, "serve", "--exec", "echo no >&2; exit 3", name)
	client := connected(t, name, &Options{Await: true})
	var failed *CallError
	if _, err := client.Call(ctx, nil); !errors.As(err, &failed) || failed.Code != 3 || string(failed.Bytes) != "no\n" {
		t.Fatal(err)
	}
}

func TestAKilledServiceIsDetectedAcrossLanguages(t *testing.T) {
	name, ctx := place(t), soon(t)
	// It passes the requests on to the test, and ends when its input does.
	requests := filepath.Join(t.TempDir(), "requests")
	if err := unix.Mkfifo(requests, 0o600); err != nil {
		t.Fatal(err)
	}
	service := tool(t, "serve", "--co-process", "--exec", "cat > "+requests, name)
	client := connected(t, name, &Options{Await: true})
	ended := make(chan error, 20)
	for range 20 {
		go func() { _, err := client.Call(ctx, nil); ended <- err }()
	}
	// The service has taken every call: of an empty request there are the 4 bytes of its length.
	taken := must(os.OpenFile(requests, os.O_RDWR|unix.O_NONBLOCK, 0))
	defer taken.Close()
	if err := taken.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(taken, make([]byte, 20*4)); err != nil {
		t.Fatal(err)
	}
	service.kill()
	for range 20 {
		if err := <-ended; !errors.Is(err, ErrPeerDied) {
			t.Fatal(err)
		}
	}
	name = place(t)
	service = child(t, "serve", name, "hold")
	service.says("listening")
	calls := tool(t, "call", name, "x")
	service.says("taken 1")
	service.kill()
	calls.exits(1)
	if said := calls.errors.String(); !strings.Contains(said, "died") {
		t.Fatal(said)
	}
}

// Services of one name in both languages, replaced under load by clients in both.
func TestServicesOfBothLanguagesAreReplacedUnderLoad(t *testing.T) {
	name, ctx := shortName(t), soon(t)
	begin := func(n int) *process {
		if n%2 == 0 {
			return inRust(t, name)
		}
		service := child(t, "serve", name, "echo")
		service.says("listening")
		return service
	}
	services := []*process{begin(0), begin(1)}
	client := connected(t, name, &Options{Await: true})
	allFound(t, client, 2)
	var calls atomic.Int64
	over := make(chan bool)
	var all sync.WaitGroup
	for g := range 8 {
		all.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-over:
					return
				default:
				}
				if reply, err := client.Call(ctx, payload(n, g*700)); err != nil || len(reply) != g*700 ||
					!isPayload(reply, n) {
					t.Error(g, n, err)
					return
				}
				calls.Add(1)
			}
		})
	}
	for n := range 6 {
		services = append(services, begin(n))
		allFound(t, client, 3)
		for at := calls.Load(); calls.Load() < at+100 && !t.Failed(); {
			time.Sleep(time.Millisecond)
		}
		old := services[0]
		if n%2 == 0 {
			_ = old.Process.Signal(os.Interrupt)
			old.exits(130)
		} else {
			old.input.Close()
			old.exits(0)
		}
		services = services[1:]
	}
	close(over)
	all.Wait()
}

// inC is a program in C on the library, which is Rust's. Its own first lines say what it does.
func inC(t *testing.T, source string, arguments ...string) *process {
	t.Helper()
	library := os.Getenv("PELTON_LIBRARY")
	if library == "" {
		t.Skip("PELTON_LIBRARY does not name libpelton_capi.so: ./run test-go does")
	}
	directory := t.TempDir()
	program := filepath.Join(directory, "program")
	// By the name that it says it has.
	if err := os.Symlink(library, filepath.Join(directory, "libpelton.so.0.2")); err != nil {
		t.Fatal(err)
	}
	compiled := exec.Command("cc", "-O1", "-I", "../../include", "-o", program, source, library,
		"-Wl,-rpath,"+directory)
	if said, err := compiled.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, said)
	}
	return start(t, "LANG=C", program, arguments...)
}

func TestGoAndCCallEachOther(t *testing.T) {
	name, ctx := place(t), soon(t)
	service := inC(t, "../c/examples/call.c", "serve", name)
	client := connected(t, name, &Options{Await: true})
	for n := range 2000 {
		size := sizes[n%len(sizes)]
		if reply, err := client.Call(ctx, payload(n, size)); err != nil || len(reply) != size || !isPayload(reply, n) {
			t.Fatal(n, len(reply), err)
		}
	}
	// This ends it.
	if err := client.Notify(ctx, nil); err != nil {
		t.Fatal(err)
	}
	service.exits(0)
	if _, err := client.Call(ctx, nil); !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
	name = place(t)
	served(t, name, nil, func(request Request) { _ = request.Reply([]byte(strings.ToUpper(string(request.Bytes())))) })
	asks := inC(t, "../c/examples/call.c", "ask", name, "hello", "again")
	asks.says("HELLO")
	asks.says("AGAIN")
	asks.exits(0)
}

// hostileRecords are what a hostile side writes: made of the input, often nearly right.
func hostileRecords(input []byte) (all [][]byte) {
	for len(input) >= 6 && len(all) < 200 {
		of := input[:6]
		input = input[6:]
		if of[0] > 250 {
			n := min(int(of[1]), len(input))
			all = append(all, append([]byte(nil), input[:n]...))
			input = input[n:]
			continue
		}
		word := uint64(of[0] % 26)
		if of[1] < 128 {
			word |= uint64(of[1]%4) << 8
		} else if of[1] > 250 {
			word |= uint64(of[1]) << 8
		}
		if of[5]&1 != 0 && of[5] > 200 {
			word |= uint64(of[5]) << 32
		}
		id := uint64(of[2]%5) | uint64(of[3]%4)<<32
		switch {
		case of[2] > 250:
			id += 1022
		case of[2] > 220:
			id = 0
		}
		record := binary.LittleEndian.AppendUint64(nil, id)
		record = binary.LittleEndian.AppendUint64(record, word)
		deadline := uint64(0)
		if of[5]&2 != 0 && of[5] > 200 {
			deadline = uint64(of[5])
		}
		record = binary.LittleEndian.AppendUint64(record, deadline)
		all = append(all, append(record, make([]byte, int(of[4])*20)...))
	}
	return all
}

func seeds(f *testing.F) {
	f.Add([]byte{16, 0, 0, 1, 3, 0, 17, 0, 1, 1, 2, 0, 18, 0, 1, 1, 0, 0})
	f.Add([]byte{17, 1, 0, 1, 3, 0, 17, 3, 0, 1, 9, 0, 17, 2, 0, 1, 9, 0, 21, 0, 225, 0, 0, 0, 22, 0, 1, 1, 0, 0, 23, 0,
		225, 0, 0, 0})
	f.Add([]byte{1, 1, 0, 1, 3, 0, 2, 0, 225, 1, 9, 0, 1, 2, 0, 1, 9, 0, 3, 0, 0, 1, 0, 0, 1, 0, 2, 1, 5, 203})
	// Many parts of a call that is not the first.
	f.Add([]byte("\x11\x01\x00\x01\x03\x00\xad\xad\xad\xad\xad\xad\xad\xad\xad\xad\xad\xad\xad\xad\xad\xad\xad" +
		"\x11\x03\x00\x10\x00\x00\x11\x02\x00\x01\t\x00\xff\x00\xe1\x00\x00\x16\x11\x02\x00\x01\t\x00\xff\x00\x01\x01\x00\x00"))
	f.Add([]byte{252, 10, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10})
}

var fuzzOptions = &Options{Capacity: 1 << 16, CallBytesMax: 4096}

func fuzzName(f *testing.F) string {
	directory := must(os.MkdirTemp("", "pelton-go"))
	f.Cleanup(func() { os.RemoveAll(directory) })
	return "unix:" + filepath.Join(directory, "socket")
}

// A service that writes anything into its lane of replies: either each call has valid replies, of which at most one
// is the last, or the link is corrupt and all calls have failed.
func FuzzAClientOfAHostileService(f *testing.F) {
	seeds(f)
	name := fuzzName(f)
	service := must(ListenService(name, fuzzOptions))
	f.Cleanup(func() { service.Close() })
	f.Fuzz(func(t *testing.T, input []byte) {
		ctx := soon(t)
		client := must(ConnectClient(ctx, name, fuzzOptions))
		defer client.Close()
		var calls []*Call
		for range 4 {
			calls = append(calls, must(client.Submit(ctx, []byte("call"))))
		}
		var hostile *session
		for range calls {
			hostile = must(service.Receive(ctx)).caller
		}
		for _, record := range hostileRecords(input) {
			if room, ok, err := hostile.out.Lane.TryReserve(uint64(len(record)), 0); err == nil && ok {
				copy(room, record)
				hostile.out.Lane.Commit(uint64(len(record)))
			}
		}
		hostile.mutex.Lock()
		hostile.out.Close()
		hostile.mutex.Unlock()
		// Each by its own goroutine, because unread parts of one call stop the others.
		var reading sync.WaitGroup
		for _, call := range calls {
			reading.Go(func() {
				isOver := false
				for part, err := range call.Parts(ctx) {
					if isOver || len(part) > 4096 || ctx.Err() != nil {
						t.Error(isOver, len(part), ctx.Err())
						return
					}
					isOver = err != nil
				}
			})
		}
		reading.Wait()
		if _, err := client.Submit(ctx, nil); !errors.Is(err, ErrClosed) && !errors.Is(err, ErrCorrupt) &&
			!errors.Is(err, ErrRefused) {
			t.Fatal(err)
		}
	})
}

// A client that writes anything into its lane of requests: each request has one reply, or the client is dropped, and
// another one gets its replies.
func FuzzAServiceOfAHostileClient(f *testing.F) {
	seeds(f)
	name := fuzzName(f)
	service := must(ListenService(name, fuzzOptions))
	f.Cleanup(func() { service.Close() })
	other := must(ConnectClient(context.Background(), name, fuzzOptions))
	f.Cleanup(func() { other.Close() })
	f.Fuzz(func(t *testing.T, input []byte) {
		ctx := soon(t)
		client := must(ConnectClient(ctx, name, fuzzOptions))
		defer client.Close()
		out := &client.links[0].out
		for _, record := range hostileRecords(input) {
			if room, ok, err := out.Lane.TryReserve(uint64(len(record)), 0); err == nil && ok {
				copy(room, record)
				out.Lane.Commit(uint64(len(record)))
			}
		}
		for n := 0; ; n++ {
			request, ok, err := tryRequest(service)
			if err != nil {
				t.Fatal(err)
			}
			if !ok {
				break
			}
			if len(request.Bytes()) > 4096 {
				t.Fatal(len(request.Bytes()))
			}
			switch n % 3 {
			case 0:
				_ = request.Reply(request.Bytes())
			case 1:
				_ = request.Abandon()
			default:
				_ = request.Context()
			}
		}
		call := must(other.Submit(ctx, []byte("other")))
		for {
			request := must(service.Receive(ctx))
			isOthers := string(request.Bytes()) == "other"
			_ = request.Reply([]byte("answer"))
			if isOthers {
				break
			}
		}
		if reply, err := call.Await(ctx); err != nil || string(reply) != "answer" {
			t.Fatal(err)
		}
	})
}
