package pelton

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/names"
	"golang.org/x/sys/unix"
)

func TestMessagesOfAllSizesComeInOrderWhicheverSideListens(t *testing.T) {
	for _, receiverListens := range []bool{true, false} {
		t.Run(fmt.Sprint(receiverListens), func(t *testing.T) {
			sender, receiver, _ := pairOf(t, &Options{Capacity: 1 << 18}, receiverListens)
			ctx := soon(t)
			sizes := []int{0, 1, 7, 8, 9, 255, 256, 4095, 4096, 65535, 100000, sender.MessageBytesMax()}
			failed := make(chan error, 1)
			go func() {
				for n := range 2000 {
					if err := sender.Send(ctx, payload(n, sizes[n%len(sizes)])); err != nil {
						failed <- err
						return
					}
				}
				failed <- sender.Close()
			}()
			n := 0
			for message, err := range receiver.Messages(ctx) {
				if err != nil {
					t.Fatal(err)
				}
				if len(message.Bytes()) != sizes[n%len(sizes)] || !isPayload(message.Bytes(), n) ||
					message.Seq() != uint32(n+1) {
					t.Fatalf("message %d of %d bytes and number %d", n, len(message.Bytes()), message.Seq())
				}
				n++
			}
			if err := <-failed; err != nil || n != 2000 {
				t.Fatal(n, err)
			}
			if _, err := receiver.Receive(ctx); !errors.Is(err, ErrClosed) {
				t.Fatalf("again: %v", err)
			}
		})
	}
}

func TestNothingIsAllocatedForAMessage(t *testing.T) {
	sender, receiver := pair(t, nil)
	ctx, message, buffer := context.Background(), payload(0, 256), make([]byte, 256)
	for name, what := range map[string]func(){
		"Send, Receive, Release": func() {
			if sender.Send(ctx, message) != nil || must(receiver.Receive(ctx)).Release() != nil {
				panic("it failed")
			}
		},
		"Reserve, Commit, TryReceive": func() {
			copy(must(sender.Reserve(ctx, 256)), message)
			if sender.Commit(256) != nil {
				panic("it failed")
			}
			message, ok, _ := receiver.TryReceive()
			if !ok || message.Release() != nil {
				panic("it failed")
			}
		},
		"TrySend, ReceiveInto": func() {
			if !must(sender.TrySend(message)) || must(receiver.ReceiveInto(ctx, buffer)) != 256 {
				panic("it failed")
			}
		},
	} {
		if allocated := testing.AllocsPerRun(1000, what); allocated != 0 {
			t.Errorf("%s: %v allocations", name, allocated)
		}
	}
}

func TestTwoSidesThatWaitForEachOtherAlwaysGoOn(t *testing.T) {
	for _, wait := range []Wait{Block, Spin} {
		options := &Options{Capacity: 1 << 16, Wait: wait}
		there, request := pair(t, options)
		back, reply := pair(t, options)
		ctx := soon(t)
		go func() {
			for message, err := range request.Messages(ctx) {
				if err != nil || back.Send(ctx, message.Bytes()) != nil {
					return
				}
			}
		}()
		for n := range 3000 {
			if err := there.Send(ctx, payload(n, n%100)); err != nil {
				t.Fatal(err)
			}
			message, err := reply.Receive(ctx)
			if err != nil || !isPayload(message.Bytes(), n) || len(message.Bytes()) != n%100 {
				t.Fatal(n, err)
			}
			message.Release()
		}
	}
}

// The reader is slower than the sender, which fills the lane and sleeps again and again.
func TestASenderThatFillsTheLaneSleepsAndIsWoken(t *testing.T) {
	sender, receiver := pair(t, &Options{Capacity: 1 << 16})
	ctx := soon(t)
	failed := make(chan error, 1)
	go func() {
		for n := range 5000 {
			if err := sender.Send(ctx, payload(n, 1000)); err != nil {
				failed <- err
				return
			}
		}
		failed <- sender.WaitReleased(ctx)
	}()
	for n := range 5000 {
		message, err := receiver.Receive(ctx)
		if err != nil || !isPayload(message.Bytes(), n) {
			t.Fatal(n, err)
		}
		// The lane has space for some 60 messages, so at least 60 more make the sender sleep.
		if n%100 == 0 && n < 4900 && !parked("(*Sender).Send") {
			t.Fatal("the sender does not sleep")
		}
		message.Release()
	}
	if err := <-failed; err != nil {
		t.Fatal(err)
	}
}

func TestAContextEndsAWait(t *testing.T) {
	sender, receiver := pair(t, &Options{Capacity: 1 << 16})
	for range 3 {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		if _, err := receiver.Receive(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		cancel()
	}
	for {
		sent, err := sender.TrySend(payload(0, 1000))
		if err != nil {
			t.Fatal(err)
		}
		if !sent {
			break
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		if !parked("(*Sender).Send") {
			t.Error("the sender does not sleep")
		}
		cancel()
	}()
	if err := sender.Send(ctx, payload(0, 1000)); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if err := sender.WaitReleased(ctx); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	// What was cancelled leaves nothing behind.
	message := must(receiver.Receive(soon(t)))
	message.Release()
	if err := sender.Send(soon(t), payload(1, 500)); err != nil {
		t.Fatal(err)
	}
}

func TestMessagesMayBeKeptAndReleasedByAnyGoroutineInAnyOrder(t *testing.T) {
	sender, receiver := pair(t, &Options{Capacity: 1 << 16})
	ctx := soon(t)
	const messages = 3000
	go func() {
		for n := range messages {
			if sender.Send(ctx, payload(n, 700)) != nil {
				return
			}
		}
		sender.Close()
	}()
	work := make(chan Message, 20)
	var workers sync.WaitGroup
	var bad sync.Map
	for range 4 {
		workers.Go(func() {
			for message := range work {
				if !isPayload(message.Bytes(), int(message.Seq()-1)) {
					bad.Store(message.Seq(), "payload")
				}
				if err := message.Release(); err != nil {
					bad.Store(message.Seq(), err)
				}
				if err := message.Release(); !errors.Is(err, ErrNotReceived) {
					bad.Store(message.Seq(), err)
				}
			}
		})
	}
	n := 0
	for {
		message, err := receiver.Receive(ctx)
		if errors.Is(err, ErrClosed) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		n++
		work <- message
	}
	close(work)
	workers.Wait()
	bad.Range(func(seq, what any) bool { t.Errorf("message %v: %v", seq, what); return true })
	if n != messages {
		t.Fatalf("%d messages", n)
	}
}

func TestAMessageThatLeaksIsReportedAndItsSpaceComesBack(t *testing.T) {
	leaks := make(chan uint32, 10)
	sender, receiver := pair(t, &Options{Capacity: 1 << 16, OnLeak: func(seq uint32) { leaks <- seq }})
	ctx := soon(t)
	if err := sender.Send(ctx, payload(1, 10)); err != nil {
		t.Fatal(err)
	}
	func() { _ = must(receiver.Receive(ctx)) }()
	for seq := uint32(0); seq == 0; {
		runtime.GC()
		select {
		case seq = <-leaks:
			if seq != 1 {
				t.Fatalf("message %d leaked", seq)
			}
		case <-time.After(5 * time.Millisecond):
			if ctx.Err() != nil {
				t.Fatal("nothing was reported")
			}
		}
	}
	if err := sender.WaitReleased(ctx); err != nil {
		t.Fatal(err)
	}
}

func TestCloseEndsACallAndLeavesMessagesReadable(t *testing.T) {
	sender, receiver := pair(t, &Options{Capacity: 1 << 16})
	ctx := soon(t)
	if err := errors.Join(sender.Send(ctx, payload(3, 100)), sender.Send(ctx, payload(4, 100))); err != nil {
		t.Fatal(err)
	}
	kept, next := must(receiver.Receive(ctx)), must(receiver.Receive(ctx))
	next.Release()
	go func() {
		if !parked("(*Receiver).Receive") {
			t.Error("the receiver does not sleep")
		}
		receiver.Close()
	}()
	if _, err := receiver.Receive(ctx); !errors.Is(err, ErrClosedHandle) || ctx.Err() != nil {
		t.Fatal(err, ctx.Err())
	}
	if _, err := receiver.Receive(ctx); !errors.Is(err, ErrClosedHandle) {
		t.Fatal(err)
	}
	var closed *EndError
	for {
		if err := sender.Send(ctx, nil); errors.As(err, &closed) {
			break
		}
	}
	if closed.Err != ErrClosed || closed.Unreleased < 2 {
		t.Fatalf("%v, unreleased %d", closed, closed.Unreleased)
	}
	if !isPayload(kept.Bytes(), 3) || kept.Release() != nil {
		t.Fatal("the message kept")
	}
	room := must(pairSender(t).Reserve(ctx, 100))
	room[99] = 1
}

// pairSender returns a sender that is closed during a reservation.
func pairSender(t *testing.T) *Sender {
	sender, _ := pair(t, nil)
	return sender
}

func TestReservedSpaceStaysWhenTheSenderIsClosed(t *testing.T) {
	sender, _ := pair(t, nil)
	room := must(sender.Reserve(soon(t), 5000))
	sender.Close()
	copy(room, payload(0, 5000))
	if err := sender.Commit(10); !errors.Is(err, ErrClosedHandle) {
		t.Fatal(err)
	}
	if err := sender.Commit(10); !errors.Is(err, ErrClosedHandle) {
		t.Fatal(err)
	}
}

func TestMistakesOfTheCallerAreErrors(t *testing.T) {
	sender, receiver := pair(t, &Options{Capacity: 1 << 16})
	ctx := soon(t)
	expect := func(err error, code error) {
		t.Helper()
		if !errors.Is(err, code) {
			t.Errorf("%v, wanted %v", err, code)
		}
	}
	expect(sender.Commit(0), ErrNotReserved)
	expect(sender.Abort(), ErrNotReserved)
	must(sender.Reserve(ctx, 10))
	expect(sender.Commit(11), ErrTooLarge)
	expect(sender.Send(ctx, nil), ErrReserved)
	if err := sender.Abort(); err != nil {
		t.Error(err)
	}
	expect(sender.Send(ctx, make([]byte, sender.MessageBytesMax()+1)), ErrTooLarge)
	expect(Message{}.Release(), ErrNotReceived)
	expect(sender.Resume(ctx), ErrRefused)
	expect(receiver.Resume(ctx), ErrRefused)
	if err := sender.Send(ctx, payload(1, 9)); err != nil {
		t.Fatal(err)
	}
	n, err := receiver.ReceiveInto(ctx, make([]byte, 8))
	if expect(err, ErrTooSmall); n != 9 {
		t.Error(n)
	}
	if n := must(receiver.ReceiveInto(ctx, make([]byte, 9))); n != 9 {
		t.Error(n)
	}
	waiting := make(chan error)
	go func() { _, err := receiver.Receive(ctx); waiting <- err }()
	for !receiver.guard.IsInUse() {
		runtime.Gosched()
	}
	_, _, err = receiver.TryReceive()
	expect(err, ErrConcurrentUse)
	receiver.Close()
	expect(<-waiting, ErrClosedHandle)
	for _, options := range []*Options{{Capacity: 1}, {Capacity: 1 << 40}, {MessageBytesMax: -1},
		{Capacity: 1 << 16, MessageBytesMax: 1 << 15}} {
		_, err = Listen("bad", options)
		expect(err, ErrOption)
	}
}

func TestABatchAppearsAtOnce(t *testing.T) {
	sender, receiver := pair(t, &Options{Capacity: 1 << 16})
	ctx := soon(t)
	go func() {
		for range 500 {
			if sender.SendBatch(ctx, payload(1, 100), nil, payload(2, 3000)) != nil {
				return
			}
		}
		sender.Close()
	}()
	total := 0
	for message, err := range receiver.Messages(ctx) {
		if err != nil {
			t.Fatal(err)
		}
		if want := []int{100, 0, 3000}[total%3]; len(message.Bytes()) != want {
			t.Fatal(total, len(message.Bytes()))
		}
		total++
	}
	if total != 1500 {
		t.Fatal(total)
	}
	if err := must(sender, nil).SendBatch(ctx); !errors.Is(err, ErrClosedHandle) {
		t.Fatal(err)
	}
}

func TestAReaderAndAWriterCarryAStream(t *testing.T) {
	sender, receiver := pair(t, &Options{Capacity: 1 << 16})
	ctx := soon(t)
	text := bytes.Repeat([]byte("a line of text, and another one\n"), 20000)
	go func() {
		_, _ = io.Copy(struct{ io.Writer }{sender.NewWriter(ctx)}, bytes.NewReader(text))
		sender.Close()
	}()
	found, err := io.ReadAll(receiver.NewReader(ctx))
	if err != nil || !bytes.Equal(found, text) {
		t.Fatal(len(found), err)
	}
}

func TestTrimGivesMemoryBack(t *testing.T) {
	sender, receiver := pair(t, &Options{Capacity: 8 << 20})
	ctx := soon(t)
	for n := range 5000 {
		if err := sender.Send(ctx, payload(n, 1000)); err != nil {
			t.Fatal(err)
		}
	}
	blocks := func() int64 {
		var stat unix.Stat_t
		if err := unix.Fstat(sender.out.Memory.Data.FD, &stat); err != nil {
			t.Fatal(err)
		}
		return stat.Blocks * 512
	}
	full := blocks()
	for range 4990 {
		must(receiver.Receive(ctx)).Release()
	}
	if err := sender.Trim(); err != nil {
		t.Fatal(err)
	}
	if trimmed := blocks(); full < 5_000_000 || trimmed > 100_000 {
		t.Fatal(full, trimmed)
	}
	for n := 4990; n < 5000; n++ {
		message := must(receiver.Receive(ctx))
		if !isPayload(message.Bytes(), n) {
			t.Fatal(n)
		}
		message.Release()
	}
}

func TestNamesAreThoseOfRust(t *testing.T) {
	for text, says := range map[string]string{
		"": "1 to 64", ".hidden": "not beginning with '.'", "a/b": "letters, digits", "tcp:1": "write unix:PATH", "unix:": "write unix:PATH",
		strings.Repeat("x", 65): "1 to 64", "path:/x": "CreateSender",
	} {
		if _, err := names.Parse(text); !errors.Is(err, ErrName) || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v", text, err)
		}
	}
	for _, text := range []string{"a", "log.events-2_x", "unix:relative", "unix:/tmp/x"} {
		if _, err := names.Parse(text); err != nil {
			t.Error(err)
		}
	}
	base := t.TempDir()
	t.Setenv("XDG_RUNTIME_DIR", base)
	listener := must(Listen("events", nil))
	if _, err := os.Stat(fmt.Sprintf("%s/pelton/events/%d.%d", base, os.Getpid(),
		names.Listeners.Load()-1)); err != nil {
		t.Error(err)
	}
	if _, err := Listen("events", nil); !errors.Is(err, ErrInUse) {
		t.Error(err)
	}
	listener.Close()
	if entries, _ := os.ReadDir(base); len(entries) != 0 {
		t.Errorf("left behind: %v", entries)
	}
	if _, err := ConnectSender(soon(t), "events", nil); !errors.Is(err, ErrNoListener) {
		t.Error(err)
	}
	if err := os.WriteFile(base+"/file", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen("unix:"+base+"/file", nil); !errors.Is(err, ErrName) {
		t.Error(err)
	}
	if err := os.Mkdir(base+"/pelton", 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen("events", nil); !errors.Is(err, ErrName) {
		t.Error(err)
	}
	if _, err := Listen("unix:"+base+"/"+strings.Repeat("x", 110), nil); !errors.Is(err, ErrName) {
		t.Error(err)
	}
}

func TestAStaleSocketIsReplaced(t *testing.T) {
	name := place(t)
	fd := must(kernel.ListenAt(strings.TrimPrefix(name, "unix:"), false))
	unix.Close(fd)
	if _, err := ConnectSender(soon(t), name, nil); !errors.Is(err, ErrNoListener) {
		t.Fatal(err)
	}
	must(Listen(name, nil)).Close()
	if _, err := os.Lstat(strings.TrimPrefix(name, "unix:")); !os.IsNotExist(err) {
		t.Fatal(err)
	}
}

func TestErrorsHaveTheirSentinelAndTheSystemsError(t *testing.T) {
	_, err := Listen("unix:/proc/nothing/socket", nil)
	if !errors.Is(err, ErrName) {
		t.Error(err)
	}
	err = fail.System("opening", unix.EACCES)
	var errno unix.Errno
	if !errors.Is(err, ErrSystem) || !errors.Is(err, os.ErrPermission) || !errors.As(err, &errno) ||
		errno != unix.EACCES {
		t.Error(err)
	}
	err = fmt.Errorf("at the end: %w", &EndError{ErrPeerDied, 3})
	var ended *EndError
	if !errors.Is(err, ErrPeerDied) || errors.Is(err, ErrClosed) || !errors.As(err, &ended) || ended.Unreleased != 3 {
		t.Error(err)
	}
}
