package pelton

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/memory"
	"github.com/pelton-ipc/pelton/bindings/go/internal/packet"
	"golang.org/x/sys/unix"
)

// Both sides are Go's; interop_test.go has the same with Rust's.

func TestAKilledSenderIsReportedAfterItsLastMessageAndItsSuccessorContinues(t *testing.T) {
	name, ctx := place(t), soon(t)
	listener := must(Listen(name, nil))
	defer listener.Close()
	first := child(t, "send", name, 0, 50, 100, "stay")
	receiver := must(listener.AcceptReceiver(ctx))
	defer receiver.Close()
	first.says("connected")
	first.says("done 50")
	kept := must(receiver.Receive(ctx))
	first.kill()
	for n := 1; n < 50; n++ {
		message := must(receiver.Receive(ctx))
		if !isPayload(message.Bytes(), n) {
			t.Fatal(n)
		}
		message.Release()
	}
	var died *EndError
	if _, err := receiver.Receive(ctx); !errors.As(err, &died) || died.Err != ErrPeerDied || died.Unreleased != 1 {
		t.Fatal(err)
	}
	kept.Release()
	for generation := uint32(2); generation < 5; generation++ {
		next := child(t, "send", name, 1000, 300, 500, "stay")
		if err := receiver.Resume(ctx); err != nil {
			t.Fatal(err)
		}
		for n := 1000; n < 1300; n++ {
			message := must(receiver.Receive(ctx))
			if !isPayload(message.Bytes(), n) || message.Generation() != generation || message.Redelivered() {
				t.Fatal(n, message.Generation())
			}
			message.Release()
		}
		next.says("connected")
		next.says("done 300")
		next.kill()
		if _, err := receiver.Receive(ctx); !errors.Is(err, ErrPeerDied) {
			t.Fatal(err)
		}
	}
	last := child(t, "send", name, 0, 1, 10, "close")
	if err := receiver.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	must(receiver.Receive(ctx)).Release()
	if _, err := receiver.Receive(ctx); !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
	last.exits(0)
}

func TestAKilledReceiverIsReportedToASleepingSenderAndItsSuccessorGetsTheRestAgain(t *testing.T) {
	name, ctx := place(t), soon(t)
	listener := must(Listen(name, &Options{Capacity: 1 << 16}))
	defer listener.Close()
	first := child(t, "receive", name, 10, "stay")
	sender := must(listener.AcceptSender(ctx))
	defer sender.Close()
	first.says("connected")
	for n := range 10 {
		if err := sender.Send(ctx, payload(n, 1000)); err != nil {
			t.Fatal(err)
		}
	}
	first.says("done 10")
	// Once the lane is full the sender sleeps, and detects the death there.
	go func() {
		if !parked("(*Sender).Send") {
			t.Error("the sender does not sleep")
		}
		first.kill()
	}()
	n, died := 10, (*EndError)(nil)
	for ; ; n++ {
		if err := sender.Send(ctx, payload(n, 1000)); errors.As(err, &died) {
			break
		}
	}
	if died.Err != ErrPeerDied || died.Unreleased != uint64(n-10) {
		t.Fatalf("%v: %d of %d", died, died.Unreleased, n-10)
	}
	if err := sender.WaitReleased(ctx); !errors.Is(err, ErrPeerDied) {
		t.Fatal(err)
	}
	// One that is refused does not end the wait, and changes nothing.
	refused := make(chan error, 1)
	go func() { _, err := ConnectSender(ctx, name, nil); refused <- err }()
	received := make(chan int, 1)
	go func() {
		if err := <-refused; !errors.Is(err, ErrRefused) {
			t.Error(err)
		}
		receiver, err := ConnectReceiver(ctx, name, &Options{Await: true})
		if err != nil {
			t.Error(err)
			return
		}
		defer receiver.Close()
		at := 10
		for message, err := range receiver.Messages(ctx) {
			if err != nil || !isPayload(message.Bytes(), at) || message.Redelivered() != (at < n) {
				t.Error(at, err, message.Redelivered())
			}
			at++
		}
		received <- at
	}()
	if err := sender.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	for i := range 500 {
		if err := sender.Send(ctx, payload(n+i, 1000)); err != nil {
			t.Fatal(err)
		}
	}
	sender.Close()
	if at := <-received; at != n+500 {
		t.Fatalf("%d messages, wanted %d", at, n+500)
	}
}

func TestTheEndOfASideThatClosesIsNoDeath(t *testing.T) {
	sender, receiver := pair(t, nil)
	ctx := soon(t)
	if err := sender.Send(ctx, payload(1, 10)); err != nil {
		t.Fatal(err)
	}
	waits := make(chan error, 1)
	go func() { waits <- sender.WaitReleased(ctx) }()
	if !parked("(*Sender).WaitReleased") {
		t.Fatal("the sender does not wait")
	}
	receiver.Close()
	var closed *EndError
	if err := <-waits; !errors.As(err, &closed) || closed.Err != ErrClosed || closed.Unreleased != 1 ||
		ctx.Err() != nil {
		t.Fatal(err, ctx.Err())
	}
	if sent, err := sender.TrySend(nil); sent || !errors.Is(err, ErrClosed) {
		t.Fatal(sent, err)
	}
}

func TestAHeldMessageOfAClosedReceiverStaysUnchangedWhileItsSuccessorReceives(t *testing.T) {
	const bytes = 5000
	sender, receiver, listener := pairOf(t, &Options{Capacity: 1 << 16}, true)
	ctx := soon(t)
	// With and without a jump between the held messages and the tail.
	for _, filled := range []int{3, 11} {
		next := 0
		send := func() {
			if err := sender.Send(ctx, payload(next, bytes)); err != nil {
				t.Fatal(err)
			}
			next++
		}
		receive := func(n int) Message {
			message := must(receiver.Receive(ctx))
			if len(message.Bytes()) != bytes || !isPayload(message.Bytes(), n) {
				t.Fatal(n)
			}
			return message
		}
		for range filled {
			send()
		}
		for n := range filled - 2 {
			receive(n).Release()
		}
		for range 3 {
			send()
		}
		held := receive(filled - 2)
		receiver.Close()
		var ended *EndError
		if err := sender.WaitReleased(ctx); !errors.As(err, &ended) || ended.Err != ErrClosed || ended.Unreleased != 5 {
			t.Fatal(err)
		}
		// Each of two candidates hangs up after the offer. Both get the same data.
		shared := []*memory.Segment{sender.out.Memory.Data}
		for range 2 {
			shake, peer := socketPair(t, ctx)
			if err := kernel.TrySend(peer, hello(packet.RoleReceiver, 0)); err != nil {
				t.Fatal(err)
			}
			_ = unix.Shutdown(peer, unix.SHUT_WR)
			if err := shake.SurvivingSender(&sender.out, true); err == nil {
				t.Fatal("a candidate that hung up was accepted")
			}
			shared = append(shared, sender.out.Memory.Data)
		}
		if shared[1] == shared[0] || shared[2] != shared[1] {
			t.Fatal("the records were not moved once")
		}
		resumed := make(chan error, 1)
		go func() { resumed <- sender.Resume(ctx) }()
		receiver = must(listener.AcceptReceiver(ctx))
		if err := <-resumed; err != nil {
			t.Fatal(err)
		}
		for n := filled - 2; n < 50; n++ {
			receive(n).Release()
			if !isPayload(held.Bytes(), filled-2) {
				t.Fatalf("overwritten at %d", n)
			}
			if n < 45 {
				send()
			}
		}
		held.Release()
	}
	receiver.Close()
}

func TestAStoppedProcessIsNotADeadOne(t *testing.T) {
	name, ctx := place(t), soon(t)
	listener := must(Listen(name, nil))
	defer listener.Close()
	other := child(t, "send", name, 0, 1, 10, "stay")
	receiver := must(listener.AcceptReceiver(ctx))
	defer receiver.Close()
	must(receiver.Receive(ctx)).Release()
	stop(t, other)
	if _, ok, err := receiver.TryReceive(); ok || err != nil {
		t.Fatal(ok, err)
	}
	// It waits, with every check of the peer that a wait has, until its deadline.
	if _, err := receiver.Receive(ctx2(t, 20*time.Millisecond)); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	other.kill()
	if _, err := receiver.Receive(ctx); !errors.Is(err, ErrPeerDied) {
		t.Fatal(err)
	}
}

// rounds returns how many processes a test kills.
func rounds(t *testing.T) int {
	if text := os.Getenv("PELTON_ROUNDS"); text != "" {
		return must(strconv.Atoi(text))
	}
	return 12
}

func TestSendersKilledAtAnyMomentLeaveWholeMessagesInOrder(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 2))
	name, ctx := place(t), soon(t)
	listener := must(Listen(name, nil))
	defer listener.Close()
	var receiver *Receiver
	total := 0
	for round := range rounds(t) {
		size := random.IntN(3000)
		sender := child(t, "send", name, 0, 1<<30, size, "stay")
		if round == 0 {
			receiver = must(listener.AcceptReceiver(ctx))
			defer receiver.Close()
		} else if err := receiver.Resume(ctx); err != nil {
			t.Fatal(err)
		}
		time.AfterFunc(time.Duration(random.IntN(30000))*time.Microsecond, func() { _ = sender.Process.Kill() })
		for n := 0; ; n++ {
			message, err := receiver.Receive(ctx)
			if errors.Is(err, ErrPeerDied) {
				break
			}
			if err != nil || len(message.Bytes()) != size || !isPayload(message.Bytes(), n) ||
				message.Generation() != uint32(round+1) {
				t.Fatalf("round %d, message %d: %v", round, n, err)
			}
			message.Release()
			total++
		}
		sender.kill()
	}
	if t.Logf("%d messages", total); total == 0 {
		t.Fatal("nothing was received")
	}
}

func TestFilesTravelWithMessagesAndAgainToASuccessor(t *testing.T) {
	name, ctx := place(t), soon(t)
	listener := must(Listen(name, &Options{Capacity: 1 << 16}))
	defer listener.Close()
	first := child(t, "receive", name, 0, "stay")
	sender := must(listener.AcceptSender(ctx))
	defer sender.Close()
	file := must(os.CreateTemp(t.TempDir(), "sent"))
	for n := range 4 {
		if err := sender.SendFiles(ctx, payload(n, 100), slices.Repeat([]*os.File{file}, n)...); err != nil {
			t.Fatal(err)
		}
	}
	must(file.WriteString("a file"))
	// The sender has duplicates.
	file.Close()
	first.kill()
	for err := error(nil); !errors.Is(err, ErrPeerDied); {
		if _, err = sender.TrySend(nil); err != nil && !errors.Is(err, ErrPeerDied) {
			t.Fatal(err)
		}
	}
	connected := make(chan *Receiver, 1)
	go func() { connected <- must(ConnectReceiver(ctx, name, nil)) }()
	if err := sender.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	receiver := <-connected
	defer receiver.Close()
	for n := range 4 {
		message := must(receiver.Receive(ctx))
		files := message.TakeFiles()
		if !isPayload(message.Bytes(), n) || !message.Redelivered() || len(files) != n || message.TakeFiles() != nil {
			t.Fatal(n, message.Redelivered(), files)
		}
		for _, file := range files {
			text := make([]byte, 6)
			if must(file.ReadAt(text, 0)); string(text) != "a file" || file.Close() != nil {
				t.Fatalf("%q", text)
			}
		}
		message.Release()
	}
	if sender.Unreleased() > 0 || len(sender.sent) > 0 {
		// Of the messages that were sent until the death was detected.
		for range sender.Unreleased() {
			must(receiver.Receive(ctx)).Release()
		}
	}
	if sender.Unreleased() != 0 || len(sender.sent) != 0 {
		t.Fatal(sender.Unreleased(), sender.sent)
	}
}

func TestFilesWaitForSpaceInTheSocket(t *testing.T) {
	sender, receiver := pair(t, &Options{Capacity: 1 << 18})
	ctx, file := soon(t), must(os.Open(os.DevNull))
	defer file.Close()
	many := slices.Repeat([]*os.File{file}, lane.DescriptorsMax)
	const count = 3000
	done := make(chan error, 1)
	go func() {
		for n := range count {
			if err := sender.SendFiles(ctx, payload(n, 8), file); err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	if !parked("(*Descriptor).UntilWritable") {
		t.Fatal("it does not wait for space in the socket")
	}
	for n := range count {
		message := must(receiver.Receive(ctx))
		if !isPayload(message.Bytes(), n) || n%100 == 0 && message.TakeFiles()[0].Close() != nil ||
			message.Release() != nil {
			t.Fatal(n)
		}
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if err := sender.SendFiles(ctx, nil, many...); err != nil {
		t.Fatal(err)
	}
	if err := sender.SendFiles(ctx, nil, append(many, file)...); !errors.Is(err, ErrTooManyFiles) {
		t.Fatal(err)
	}
	if message := must(receiver.Receive(ctx)); len(message.TakeFiles()) != len(many) || message.Release() != nil {
		t.Fatal("other files")
	}
	// A full socket delays neither the end of the context nor Close.
	fill := func(ctx context.Context) (err error) {
		for err == nil {
			err = sender.SendFiles(ctx, nil, file)
		}
		return err
	}
	limited, cancel := context.WithCancel(ctx)
	go func() {
		if !parked("(*Descriptor).UntilWritable") {
			t.Error("it does not wait")
		}
		cancel()
	}()
	if err := fill(limited); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	go func() { done <- fill(ctx) }()
	if !parked("(*Descriptor).UntilWritable") || sender.Close() != nil {
		t.Fatal("it does not wait")
	}
	if err := <-done; !errors.Is(err, ErrClosedHandle) {
		t.Fatal(err)
	}
}

func TestFilesDoNotTravelThroughAPathChannel(t *testing.T) {
	sender := must(CreateSender(soon(t), channelPlace(t), small))
	defer sender.Close()
	if err := sender.SendFiles(soon(t), nil, os.Stdin); !errors.Is(err, ErrRefused) {
		t.Fatal(err)
	}
}

func TestReceiversKilledAtAnyMomentLeaveEverythingUnreleasedToTheNext(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 3))
	name, ctx := place(t), soon(t)
	listener := must(Listen(name, &Options{Capacity: 1 << 16}))
	defer listener.Close()
	var sender *Sender
	n, died := 0, (*EndError)(nil)
	for round := range rounds(t) {
		receiver := child(t, "receive", name, 1<<30, "stay")
		if round == 0 {
			sender = must(listener.AcceptSender(ctx))
			defer sender.Close()
		} else if err := sender.Resume(ctx); err != nil {
			t.Fatal(err)
		}
		time.AfterFunc(time.Duration(random.IntN(30000))*time.Microsecond, func() { _ = receiver.Process.Kill() })
		for ; ; n++ {
			if err := sender.Send(ctx, payload(n, n%2000)); errors.As(err, &died) && died.Err == ErrPeerDied {
				break
			} else if err != nil {
				t.Fatal(round, err)
			}
		}
		receiver.kill()
	}
	// The last one finds what they left: from the first unreleased message on, nothing is missing.
	go func() {
		if err := sender.Resume(ctx); err != nil {
			t.Error(err)
		}
	}()
	last := must(ConnectReceiver(ctx, name, &Options{Await: true}))
	defer last.Close()
	for at := n - int(died.Unreleased); at < n; at++ {
		message, err := last.Receive(ctx)
		if err != nil || len(message.Bytes()) != at%2000 || !isPayload(message.Bytes(), at) || !message.Redelivered() {
			t.Fatalf("message %d of %d: %v", at, n, err)
		}
		message.Release()
	}
	if _, ok, err := last.TryReceive(); ok || err != nil {
		t.Fatal(ok, err)
	}
	t.Logf("%d messages", n)
}

func TestDescriptorsComeWithTheirMessage(t *testing.T) {
	sender, receiver := pair(t, nil)
	ctx := soon(t)
	// As another language sends them: the packet first, then the message with its mark.
	send := func(message string, files ...*os.File) {
		p := packet.New(packet.KindDescriptors)
		p.Seq = sender.out.Lane.Tail().Seq
		var fds []int
		for _, file := range files {
			fds = append(fds, int(file.Fd()))
		}
		if err := kernel.TrySend(sender.out.Link.Socket.FD, p.Encode(), fds...); err != nil {
			t.Fatal(err)
		}
		room, ok, err := sender.out.Lane.TryReserve(uint64(len(message)), uint32(len(files)))
		if !ok || err != nil {
			t.Fatal(ok, err)
		}
		copy(room, message)
		sender.commit(len(message))
	}
	file := must(os.CreateTemp(t.TempDir(), ""))
	defer file.Close()
	if _, err := file.WriteString("a file"); err != nil {
		t.Fatal(err)
	}
	// Of this file alone: what other tests have left may be collected meanwhile.
	count := func() (descriptors int) {
		for _, fd := range must(os.ReadDir("/proc/self/fd")) {
			if at, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && at == file.Name() {
				descriptors++
			}
		}
		return descriptors
	}
	before := count()
	send("one", file)
	if err := sender.Send(ctx, []byte("none")); err != nil {
		t.Fatal(err)
	}
	send("two", file, file)
	send("copied", file)
	first := must(receiver.Receive(ctx))
	files := first.TakeFiles()
	text := make([]byte, 6)
	if len(files) != 1 || must(files[0].ReadAt(text, 0)) != 6 || string(text) != "a file" || first.TakeFiles() != nil {
		t.Fatal(files)
	}
	files[0].Close()
	if none := must(receiver.Receive(ctx)); string(none.Bytes()) != "none" || none.TakeFiles() != nil ||
		none.Release() != nil {
		t.Fatal("none")
	}
	// Not taken, so closed with the release.
	two := must(receiver.Receive(ctx))
	two.Release()
	if two.TakeFiles() != nil {
		t.Fatal("after the release")
	}
	if n := must(receiver.ReceiveInto(ctx, make([]byte, 10))); n != 6 {
		t.Fatal(n)
	}
	first.Release()
	closesEnd(t)
	if after := count(); after != before {
		t.Fatalf("%d descriptors before, %d after", before, after)
	}
	// Another count than the mark's is corrupt.
	p := packet.New(packet.KindDescriptors)
	p.Seq = sender.out.Lane.Tail().Seq
	if err := kernel.TrySend(sender.out.Link.Socket.FD, p.Encode(), int(file.Fd())); err != nil {
		t.Fatal(err)
	}
	if _, ok, err := sender.out.Lane.TryReserve(1, 2); !ok || err != nil {
		t.Fatal(ok, err)
	}
	sender.commit(1)
	if _, err := receiver.Receive(ctx); !errors.Is(err, ErrCorrupt) {
		t.Fatal(err)
	}
}

func TestNothingIsLeftOfChannelsThatEnded(t *testing.T) {
	count := func() (int, int) {
		maps := must(os.ReadFile("/proc/self/maps"))
		return len(must(os.ReadDir("/proc/self/fd"))), strings.Count(string(maps), "memfd:pelton")
	}
	round := func() {
		name, ctx := place(t), soon(t)
		listener := must(Listen(name, nil))
		ready := make(chan *Sender)
		go func() { ready <- must(ConnectSender(ctx, name, nil)) }()
		receiver, sender := must(listener.AcceptReceiver(ctx)), (*Sender)(nil)
		sender = <-ready
		if err := sender.Send(ctx, []byte("x")); err != nil {
			t.Fatal(err)
		}
		message := must(receiver.Receive(ctx))
		sender.Close()
		receiver.Close()
		listener.Close()
		message.Release()
		gathers := must(Gather(name, nil))
		sender = must(ConnectSender(ctx, name, nil))
		gathers.Close()
		sender.Close()
		publisher := must(Publish(name, nil))
		for _, subscriber := range []*Subscriber{must(ConnectSubscriber(ctx, name, nil)), must(publisher.NewSubscriber(nil))} {
			if err := publisher.Send(ctx, []byte("x")); err != nil {
				t.Fatal(err)
			}
			must(subscriber.Receive(ctx))
			// Otherwise its memory stays as long as the program may read the message.
			_ = subscriber.Release()
			subscriber.Close()
		}
		publisher.Close()
	}
	round()
	files, mappings := count()
	for range 20 {
		round()
	}
	if filesNow, mappingsNow := count(); filesNow > files || mappingsNow > mappings {
		t.Fatalf("%d descriptors and %d mappings before, %d and %d after", files, mappings, filesNow, mappingsNow)
	}
}
