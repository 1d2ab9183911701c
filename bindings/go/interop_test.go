package pelton

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
)

// With the pelton command, which is Rust's.

var sizes = []int{0, 1, 7, 8, 9, 63, 64, 255, 256, 1000, 4095, 4096, 32767, 65536, 100000}

// readFrames reads what `pelton recv --frame len32` writes.
func readFrames(t *testing.T, from io.Reader, count, first int) {
	t.Helper()
	for n := first; n < first+count; n++ {
		var length uint32
		if err := binary.Read(from, binary.LittleEndian, &length); err != nil {
			t.Fatal(n, err)
		}
		bytes := make([]byte, length)
		if _, err := io.ReadFull(from, bytes); err != nil {
			t.Fatal(n, err)
		}
		if int(length) != sizes[n%len(sizes)] || !isPayload(bytes, n) {
			t.Fatalf("message %d has %d bytes", n, length)
		}
	}
}

func writeFrames(to io.Writer, count int) error {
	for n := range count {
		bytes := payload(n, sizes[n%len(sizes)])
		if _, err := to.Write(append(binary.LittleEndian.AppendUint32(nil, uint32(len(bytes))), bytes...)); err != nil {
			return err
		}
	}
	return nil
}

func TestGoSendsToRustMessagesOfAllSizes(t *testing.T) {
	for _, goListens := range []bool{false, true} {
		t.Run(fmt.Sprint(goListens), func(t *testing.T) {
			name, ctx := place(t), soon(t)
			options := &Options{Capacity: 1 << 18, Await: true}
			var sender *Sender
			var receives *process
			if goListens {
				listener := must(Listen(name, options))
				defer listener.Close()
				receives = tool(t, "recv", "--connect", "--frame", "len32", name)
				sender = must(listener.AcceptSender(ctx))
			} else {
				receives = tool(t, "recv", "--frame", "len32", name)
				sender = must(ConnectSender(ctx, name, options))
			}
			failed := make(chan error, 1)
			go func() {
				for n := range 3000 {
					if n%2 == 0 {
						failed <- sender.Send(ctx, payload(n, sizes[n%len(sizes)]))
						continue
					}
					room, err := sender.Reserve(ctx, sizes[n%len(sizes)])
					copy(room, payload(n, len(room)))
					failed <- errors.Join(err, sender.Commit(len(room)))
				}
				failed <- errors.Join(sender.WaitReleased(ctx), sender.Close())
			}()
			go func() {
				for range 3001 {
					if err := <-failed; err != nil {
						t.Error(err)
					}
				}
			}()
			readFrames(t, receives.output, 3000, 0)
			receives.exits(0)
		})
	}
}

func TestRustSendsToGoMessagesOfAllSizes(t *testing.T) {
	for _, goListens := range []bool{false, true} {
		t.Run(fmt.Sprint(goListens), func(t *testing.T) {
			name, ctx := place(t), soon(t)
			var receiver *Receiver
			var sends *process
			if goListens {
				listener := must(Listen(name, nil))
				defer listener.Close()
				sends = tool(t, "send", "--frame", "len32", "--capacity", "256K", name)
				receiver = must(listener.AcceptReceiver(ctx))
			} else {
				sends = tool(t, "send", "--listen", "--frame", "len32", "--capacity", "256K", name)
				receiver = must(ConnectReceiver(ctx, name, &Options{Await: true}))
			}
			go func() {
				if err := errors.Join(writeFrames(sends.input, 3000), sends.input.Close()); err != nil {
					t.Error(err)
				}
			}()
			n := 0
			for message, err := range receiver.Messages(ctx) {
				if err != nil || len(message.Bytes()) != sizes[n%len(sizes)] || !isPayload(message.Bytes(), n) {
					t.Fatal(n, err)
				}
				n++
			}
			if n != 3000 {
				t.Fatal(n)
			}
			sends.exits(0)
		})
	}
}

// Each message is awaited, so that each side sleeps for each, and the other language rings it.
func TestASleeperIsRungByTheOtherLanguage(t *testing.T) {
	name, back, ctx := place(t), place(t), soon(t)
	receives := tool(t, "recv", name)
	sender := must(ConnectSender(ctx, name, &Options{Await: true}))
	listener := must(Listen(back, nil))
	defer listener.Close()
	sends := tool(t, "send", back)
	receiver := must(listener.AcceptReceiver(ctx))
	for n := range 300 {
		line := fmt.Sprintf("line %d", n)
		if err := sender.Send(ctx, []byte(line)); err != nil {
			t.Fatal(err)
		}
		receives.says(line)
		if _, err := fmt.Fprintln(sends.input, line); err != nil {
			t.Fatal(err)
		}
		message := must(receiver.Receive(ctx))
		if string(message.Bytes()) != line {
			t.Fatalf("%q", message.Bytes())
		}
		message.Release()
		if n%50 == 0 {
			// Rust's receiver has stopped spinning.
			receives.reaches("S")
		}
	}
	sends.input.Close()
	if _, err := receiver.Receive(ctx); !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
	sends.exits(0)
	sender.Close()
	receives.exits(0)
}

func TestAKilledRustSenderIsReportedAndARustSuccessorContinues(t *testing.T) {
	name, ctx := place(t), soon(t)
	listener := must(Listen(name, nil))
	defer listener.Close()
	first := tool(t, "send", name)
	receiver := must(listener.AcceptReceiver(ctx))
	defer receiver.Close()
	fmt.Fprint(first.input, "one\ntwo\n")
	if message := must(receiver.Receive(ctx)); string(message.Bytes()) != "one" || message.Release() != nil {
		t.Fatal("not one")
	}
	kept := must(receiver.Receive(ctx))
	first.kill()
	if _, err := receiver.Receive(ctx); !errors.Is(err, ErrPeerDied) {
		t.Fatal(err)
	}
	for generation := uint32(2); generation < 4; generation++ {
		next := tool(t, "send", name)
		if err := receiver.Resume(ctx); err != nil {
			t.Fatal(err)
		}
		for n := range 1000 {
			fmt.Fprintf(next.input, "line %d\n", n)
		}
		for n := range 1000 {
			message := must(receiver.Receive(ctx))
			if string(message.Bytes()) != fmt.Sprintf("line %d", n) || message.Generation() != generation {
				t.Fatalf("%d: %q of %d", n, message.Bytes(), message.Generation())
			}
			message.Release()
		}
		next.kill()
		if _, err := receiver.Receive(ctx); !errors.Is(err, ErrPeerDied) {
			t.Fatal(err)
		}
	}
	if string(kept.Bytes()) != "two" || kept.Release() != nil {
		t.Fatal("what was kept has changed")
	}
}

func TestAKilledRustReceiverIsReportedAndARustSuccessorGetsTheRestAgain(t *testing.T) {
	name, ctx := place(t), soon(t)
	listener := must(Listen(name, &Options{Capacity: 1 << 18}))
	defer listener.Close()
	first := tool(t, "recv", "--connect", "--frame", "len32", name)
	sender := must(listener.AcceptSender(ctx))
	stop(t, first)
	n := 0
	for ; n < 30; n++ {
		sent, err := sender.TrySend(payload(n, sizes[n%len(sizes)]))
		if err != nil {
			t.Fatal(err)
		}
		if !sent {
			break
		}
	}
	first.kill()
	var died *EndError
	if err := sender.WaitReleased(ctx); !errors.As(err, &died) || died.Err != ErrPeerDied || died.Unreleased == 0 {
		t.Fatal(err)
	}
	next := tool(t, "recv", "--connect", "--frame", "len32", name)
	if err := sender.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	already := n
	go func() {
		for n := already; n < 2000; n++ {
			if err := sender.Send(ctx, payload(n, sizes[n%len(sizes)])); err != nil {
				t.Error(err)
				return
			}
		}
		sender.Close()
	}()
	again := int(died.Unreleased)
	readFrames(t, next.output, 2000-(n-again), n-again)
	next.exits(0)
}

func TestRustDetectsAKilledGoSender(t *testing.T) {
	name := place(t)
	receives := tool(t, "recv", "--frame", "len32", name)
	sends := child(t, "send", name, 0, 40, 300, "stay")
	sends.says("connected")
	sends.says("done 40")
	sends.kill()
	output := must(io.ReadAll(receives.output))
	receives.exits(1)
	if len(output) != 40*304 || !strings.Contains(receives.errors.String(), "died") {
		t.Fatalf("%d bytes; %s", len(output), receives.errors.String())
	}
}

func TestRustDetectsAKilledGoReceiver(t *testing.T) {
	name := place(t)
	sends := tool(t, "send", "--listen", name)
	fmt.Fprint(sends.input, strings.Repeat("line\n", 100))
	receives := child(t, "receive", name, 60, "stay")
	receives.says("connected")
	receives.says("done 60")
	receives.kill()
	sends.input.Close()
	sends.exits(1)
	if !strings.Contains(sends.errors.String(), "40") {
		t.Fatal(sends.errors.String())
	}
}

func TestAGoSurvivorIsSucceededAcrossLanguages(t *testing.T) {
	// A Go sender dies, Rust's receiver is not one to resume: so Go's receiver has a Go sender, then a Rust one, then
	// a Go one.
	name, ctx := place(t), soon(t)
	listener := must(Listen(name, nil))
	defer listener.Close()
	first := child(t, "send", name, 0, 10, 100, "stay")
	receiver := must(listener.AcceptReceiver(ctx))
	defer receiver.Close()
	first.says("connected")
	first.says("done 10")
	first.kill()
	for range 10 {
		must(receiver.Receive(ctx)).Release()
	}
	hasDied := func() {
		t.Helper()
		if _, err := receiver.Receive(ctx); !errors.Is(err, ErrPeerDied) {
			t.Fatal(err)
		}
	}
	hasDied()
	second := tool(t, "send", name)
	fmt.Fprint(second.input, "rust\n")
	if err := receiver.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	if message := must(receiver.Receive(ctx)); string(message.Bytes()) != "rust" || message.Generation() != 2 ||
		message.Release() != nil {
		t.Fatal("not rust")
	}
	second.kill()
	hasDied()
	child(t, "send", name, 5, 1, 100, "close")
	if err := receiver.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	if message := must(receiver.Receive(ctx)); !isPayload(message.Bytes(), 5) || message.Generation() != 3 ||
		message.Release() != nil {
		t.Fatal("not five")
	}
}

func TestManySendersOfBothLanguages(t *testing.T) {
	name, ctx := place(t), soon(t)
	receiver := must(Gather(name, nil))
	defer receiver.Close()
	const lines = 2000
	for range 3 {
		sends := tool(t, "send", name)
		go func() {
			for n := range lines {
				fmt.Fprintf(sends.input, "%d\n", n)
			}
			sends.input.Close()
		}()
		go func() {
			sender, err := ConnectSender(ctx, name, nil)
			for n := 0; n < lines && err == nil; n++ {
				err = sender.Send(ctx, []byte(fmt.Sprint(n)))
			}
			if err != nil {
				t.Error(err)
				return
			}
			sender.Close()
		}()
	}
	next := map[uint32]int{}
	for range 6 * lines {
		message := must(receiver.Receive(ctx))
		if string(message.Bytes()) != fmt.Sprint(next[message.Lane()]) {
			t.Fatalf("lane %d: %q, wanted %d", message.Lane(), message.Bytes(), next[message.Lane()])
		}
		next[message.Lane()]++
		message.Release()
	}
	// And Go's senders to Rust's receiver of many.
	other := place(t)
	follows := tool(t, "recv", "--follow", other)
	for range 3 {
		sender := must(ConnectSender(ctx, other, &Options{Await: true}))
		if err := errors.Join(sender.Send(ctx, []byte("hello")), sender.WaitReleased(ctx), sender.Close()); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 {
		follows.says("hello")
	}
	_ = follows.Process.Signal(os.Interrupt)
	follows.exits(130)
}

func TestDescriptorsTravelToRustAndBack(t *testing.T) {
	to, from, ctx := place(t), place(t), soon(t)
	sends, receives := must(Listen(to, nil)), must(Listen(from, nil))
	defer sends.Close()
	defer receives.Close()
	other := inC(t, "testdata/descriptors.c", to, from)
	sender := must(sends.AcceptSender(ctx))
	receiver := must(receives.AcceptReceiver(ctx))
	defer receiver.Close()
	for n := range 65 {
		var files []*os.File
		for i := range n {
			file := must(os.CreateTemp(t.TempDir(), ""))
			defer file.Close()
			must(fmt.Fprint(file, n, i))
			files = append(files, file)
		}
		if err := sender.SendFiles(ctx, payload(n, 100*n), files...); err != nil {
			t.Fatal(err)
		}
		message := must(receiver.Receive(ctx))
		back := message.TakeFiles()
		if len(message.Bytes()) != 100*n || !isPayload(message.Bytes(), n) || len(back) != n {
			t.Fatal(n, len(message.Bytes()), len(back))
		}
		for i, file := range back {
			text := must(io.ReadAll(io.NewSectionReader(file, 0, 100)))
			if string(text) != fmt.Sprint(n, i) || file.Close() != nil {
				t.Fatalf("%q is not descriptor %d of message %d", text, i, n)
			}
		}
		message.Release()
	}
	sender.Close()
	if _, err := receiver.Receive(ctx); !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
	other.exits(0)
}
