package pelton

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/memory"
	"github.com/pelton-ipc/pelton/bindings/go/internal/packet"
	"golang.org/x/sys/unix"
)

// What a side takes from a peer, and the memory that all peers have together.

// refusedWith checks that an error is of that kind and has these texts.
func refusedWith(t *testing.T, err error, code error, texts ...any) {
	t.Helper()
	if !errors.Is(err, code) {
		t.Fatalf("%v, wanted code %d", err, code)
	}
	for _, text := range texts {
		if !strings.Contains(err.Error(), fmt.Sprint(text)) {
			t.Fatalf("%v has no %v", err, text)
		}
	}
}

func TestALaneIsTheSmallerOfWhatBothSidesSay(t *testing.T) {
	for _, c := range []struct{ sends, takes, is Options }{
		{Options{}, Options{}, Options{Capacity: 64 << 20, MessageBytesMax: 32<<20 - 32}},
		{Options{}, Options{Capacity: 128 << 10}, Options{Capacity: 128 << 10, MessageBytesMax: 64<<10 - 32}},
		{Options{Capacity: 64 << 10}, Options{Capacity: 128 << 10},
			Options{Capacity: 64 << 10, MessageBytesMax: 32<<10 - 32}},
		{Options{Capacity: 128 << 20}, Options{}, Options{Capacity: 128 << 20, MessageBytesMax: 64<<20 - 32}},
		{Options{}, Options{MessageBytesMax: 100}, Options{Capacity: 64 << 20, MessageBytesMax: 100}},
		{Options{MessageBytesMax: 100}, Options{MessageBytesMax: 200},
			Options{Capacity: 64 << 20, MessageBytesMax: 100}},
		{Options{}, Options{MessageBytesMax: 1 << 30}, Options{Capacity: 64 << 20, MessageBytesMax: 32<<20 - 32}},
		{Options{Capacity: 1 << 20}, Options{Capacity: 1 << 20, Memory: 100_000},
			Options{Capacity: 64 << 10, MessageBytesMax: 32<<10 - 32}},
		{Options{}, Options{Memory: 5000}, Options{Capacity: 4096, MessageBytesMax: 2016}},
		{Options{}, Options{Memory: 1}, Options{Capacity: 4096, MessageBytesMax: 2016}},
	} {
		name, ctx := place(t), soon(t)
		// The receiver connects, so that a limit beyond the default capacity is valid.
		listener := must(Listen(name, &c.sends))
		received := make(chan *Receiver, 1)
		go func() { received <- must(ConnectReceiver(ctx, name, &c.takes)) }()
		sender := must(listener.AcceptSender(ctx))
		receiver := <-received
		if sender.Capacity() != c.is.Capacity || sender.MessageBytesMax() != c.is.MessageBytesMax {
			t.Errorf("%+v: %d, %d", c, sender.Capacity(), sender.MessageBytesMax())
		}
		for n := range 20 {
			if err := sender.Send(ctx, payload(n, min(sender.MessageBytesMax(), 5000))); err != nil {
				t.Fatal(err)
			}
			must(receiver.Receive(ctx)).Release()
		}
		sender.Close()
		receiver.Close()
		listener.Close()
	}
}

func TestASenderWithTooLargeMessagesGetsBothLimits(t *testing.T) {
	for _, takes := range []Options{{MessageBytesMax: 1000}, {Capacity: 64 << 10}, {Memory: 17 << 16}} {
		name, ctx := place(t), soon(t)
		receiver := must(Gather(name, &takes))
		_, err := ConnectSender(ctx, name, &Options{MessageBytesMax: 40_000})
		refusedWith(t, err, ErrOption, 40_000)
		most := lane.MessageBytesLimit(64 << 10)
		if takes.MessageBytesMax > 0 {
			most = 1000
		}
		refusedWith(t, err, ErrOption, fmt.Sprintf("at most %d", most))
		must(ConnectSender(ctx, name, &Options{MessageBytesMax: int(most)})).Close()
		receiver.Close()
	}
}

func TestAnotherUsersLaneIsSmallUnlessTheOptionsSayMore(t *testing.T) {
	name, ctx := place(t), soon(t)
	opensDirectory(t, name)
	receiver := must(Gather(name, &Options{UIDs: []int{12346}}))
	defer receiver.Close()
	large := &Options{Capacity: 128 << 20, UIDs: []int{0}}
	asUser(t, 12346, func() {
		sender, err := ConnectSender(ctx, name, large)
		if err != nil {
			t.Error(err)
			return
		}
		if sender.Capacity() != 64<<20 || sender.MessageBytesMax() != 1<<20 {
			t.Error(sender.Capacity(), sender.MessageBytesMax())
		}
		sender.Close()
	})
	own := must(ConnectSender(ctx, name, large))
	defer own.Close()
	if own.Capacity() != 128<<20 || own.MessageBytesMax() != 64<<20-32 {
		t.Error(own.Capacity(), own.MessageBytesMax())
	}
}

func TestALaneBeyondWhatTheReceiverSaidIsRefused(t *testing.T) {
	for _, c := range []struct{ capacity, bytesMax uint64 }{{128 << 10, 100}, {64 << 10, 1001}, {64 << 10, 1000}} {
		s, peer := socketPair(t, soon(t))
		s.Settings = must((&Options{Capacity: 64 << 10, MessageBytesMax: 1000}).forBoth(0))
		page, data, ownDoorbell := must(memory.NewProducerPage(c.capacity, c.bytesMax,
			1, "")), must(memory.NewData(c.capacity, "")), must(unix.Eventfd(0, unix.EFD_CLOEXEC))
		offer := packet.NewLane(packet.KindProducer, c.capacity, c.bytesMax, lane.Start, lane.Start)
		offer.Generation = 1
		ready := packet.New(packet.KindReady)
		if err := errors.Join(kernel.TrySend(peer, hello(packet.RoleSender, 0)),
			kernel.TrySend(peer, offer.Encode(), page.FD, ownDoorbell, data.FD), kernel.TrySend(peer,
				ready.Encode())); err != nil {
			t.Fatal(err)
		}
		r, err := receiverOfOne(s, Options{}, false)
		switch {
		case c.capacity > 64<<10:
			refusedWith(t, err, ErrRefused, c.capacity, 64<<10)
		case c.bytesMax > 1000:
			refusedWith(t, err, ErrRefused, c.bytesMax, 1000)
		case err != nil:
			t.Fatal(err)
		default:
			r.Close()
		}
		page.Close()
		data.Close()
		unix.Close(ownDoorbell)
	}
}

func TestASurvivingSenderIsNotSucceededByAReceiverThatTakesLess(t *testing.T) {
	name, ctx := place(t), soon(t)
	listener := must(Listen(name, &Options{Capacity: 1 << 20}))
	defer listener.Close()
	dies := child(t, "receive", name, 0, "stay")
	sender := must(listener.AcceptSender(ctx))
	defer sender.Close()
	if sender.Capacity() != 64<<10 {
		// As the child's options say.
		t.Fatal(sender.Capacity())
	}
	dies.kill()
	for sender.Send(ctx, nil) == nil {
	}
	resumed := make(chan error, 1)
	go func() { resumed <- sender.Resume(ctx) }()
	_, err := ConnectReceiver(ctx, name, &Options{Capacity: 64 << 10, MessageBytesMax: 1000})
	refusedWith(t, err, ErrRefused, 1000, sender.MessageBytesMax())
	must(ConnectReceiver(ctx, name, nil)).Close()
	if err := <-resumed; err != nil {
		t.Fatal(err)
	}
}

func TestPeersShareTheMemoryOfAReceiverOfMany(t *testing.T) {
	name, ctx := place(t), soon(t)
	receiver := must(Gather(name, &Options{Memory: 3 << 20}))
	defer receiver.Close()
	budget := receiver.registry.budget
	var senders []*Sender
	for _, wanted := range []int{3 << 16, 2 << 16, 2 << 16, 2 << 16, 2 << 16} {
		sender := must(ConnectSender(ctx, name, nil))
		if senders = append(senders, sender); sender.Capacity() != wanted {
			t.Fatal(sender.Capacity(), "wanted", wanted)
		}
	}
	// One that makes less takes less.
	small := must(ConnectSender(ctx, name, &Options{Capacity: 1 << 16}))
	if left := budget.Left(); left != 3<<20-(3+4*2+1)<<16 {
		t.Fatal(left)
	}
	// Handshakes that fail keep nothing.
	for range 20 {
		_, err := ConnectSender(ctx, name, &Options{MessageBytesMax: 1 << 20})
		refusedWith(t, err, ErrOption)
		for until := time.Now().Add(20 * time.Second); budget.Left() != 3<<20-(3+4*2+1)<<16; runtime.Gosched() {
			if time.Now().After(until) {
				t.Fatal(budget.Left())
			}
		}
	}
	var err error
	for err == nil {
		var sender *Sender
		if sender, err = ConnectSender(ctx, name, nil); err == nil {
			senders = append(senders, sender)
		}
	}
	refusedWith(t, err, ErrRefused, budget.Left(), 3<<20, "Memory")
	if left := budget.Left(); left >= 1<<20 {
		t.Fatal(left)
	}
	for _, sender := range append(senders, small) {
		sender.Close()
	}
	for until := time.Now().Add(20 * time.Second); budget.Left() != 3<<20; {
		if _, ok, err := receiver.TryReceive(); ok || err != nil || time.Now().After(until) {
			t.Fatal(ok, err, budget.Left())
		}
	}
	must(ConnectSender(ctx, name, nil)).Close()
}

func TestClientsShareTheMemoryOfAServiceByTwoLanesEach(t *testing.T) {
	name, ctx := place(t), soon(t)
	service := served(t, name, &Options{Memory: 2 << 20}, echo)
	budget := service.receiver.registry.budget
	client := connected(t, name, nil)
	for n := range 100 {
		if reply, err := client.Call(ctx, payload(n, 1000*n)); err != nil || !isPayload(reply, n) ||
			len(reply) != 1000*n {
			t.Fatal(err)
		}
	}
	if out, in := client.links[0].out.Lane.Capacity(), client.links[0].in.Consumer.Capacity(); out != 1<<16 ||
		in != 1<<16 {
		t.Fatal(out, in)
	}
	// What the last reply took becomes free soon after the client has it.
	for until := time.Now().Add(20 * time.Second); budget.Left() != 2<<20-2<<16; runtime.Gosched() {
		if time.Now().After(until) {
			t.Fatal(budget.Left())
		}
	}
	_, err := ConnectClient(ctx, name, nil)
	refusedWith(t, err, ErrRefused, budget.Left(), 2<<20, "Memory")
	client.Close()
	for {
		// The service notices.
		if client, err := ConnectClient(ctx, name, nil); err == nil {
			client.Close()
			return
		} else if !errors.Is(err, ErrRefused) {
			t.Fatal(err)
		}
	}
}

func TestMemoryTooSmallForAShareIsRefused(t *testing.T) {
	_, err := Gather(place(t), &Options{Memory: 1<<20 - 1})
	refusedWith(t, err, ErrOption, 1<<20)
	_, err = ListenService(place(t), &Options{Memory: 2<<20 - 1})
	refusedWith(t, err, ErrOption, 2<<20)
	for _, options := range []Options{{Memory: -1}, {Memory: -1, Capacity: 1 << 20}} {
		_, err = ConnectReceiver(soon(t), place(t), &options)
		refusedWith(t, err, ErrOption, "Memory is -1")
		_, err = OpenReceiver(soon(t), channelPlace(t), &options)
		refusedWith(t, err, ErrOption, "Memory is -1")
		_, err = CreateSender(soon(t), channelPlace(t), &options)
		refusedWith(t, err, ErrOption, "Memory is -1")
		_, err = Listen(place(t), &options)
		refusedWith(t, err, ErrOption, "Memory is -1")
	}
}

// No peer writes to a sender, so it takes anything, whatever Memory is.
func TestMemoryIsNoConcernOfASender(t *testing.T) {
	name, ctx := place(t), soon(t)
	receiver := must(Gather(name, nil))
	defer receiver.Close()
	must(ConnectSender(ctx, name, &Options{Memory: 1})).Close()
	path := channelPlace(t)
	must(CreateSender(ctx, path, &Options{Capacity: 1 << 20, Lanes: 4})).Close()
	for _, options := range []Options{{Memory: 1}, {Memory: 4<<20 - 1}} {
		must(OpenSender(ctx, path, &options)).Close()
		_, err := OpenReceiver(ctx, path, &options)
		refusedWith(t, err, ErrNotAChannel, "it has up to 4 lanes of 1048576 bytes",
			fmt.Sprintf("and %d in all", options.Memory))
	}
	must(OpenReceiver(ctx, path, &Options{Memory: 4 << 20})).Close()
	// All lanes of a channel that it creates are within it.
	path = channelPlace(t)
	sender := must(CreateSender(ctx, path, &Options{Memory: 1 << 20, Lanes: 4}))
	defer sender.Close()
	if sender.Capacity() != 1<<18 {
		t.Fatal(sender.Capacity())
	}
	must(OpenReceiver(ctx, path, &Options{Memory: 1 << 20})).Close()
}

func TestAChannelByPathIsCheckedAgainstWhatItsOpenerTakes(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	must(CreateSender(ctx, path, &Options{Capacity: 1 << 20, Mode: 0o755})).Close()
	_, err := OpenReceiver(ctx, path, &Options{Memory: 512 << 10, Mode: 0o755})
	refusedWith(t, err, ErrNotAChannel, 1<<20, 512<<10)
	for _, options := range []Options{{}, {Capacity: 512 << 10, MessageBytesMax: 1000}, {Memory: 1 << 20}} {
		options.Mode = 0o755
		must(OpenReceiver(ctx, path, &options)).Close()
	}
	if os.Geteuid() != 0 {
		t.Skip("only root can give a directory to another user: ./run test-go as root")
	}
	// Another user's, with default options.
	path = channelPlace(t)
	must(CreateSender(ctx, path, &Options{Capacity: 65 << 20, Mode: 0o755})).Close()
	if err := os.Chown(path, 12345, 12345); err != nil {
		t.Fatal(err)
	}
	_, err = OpenReceiver(ctx, path, &Options{Mode: 0o755, UIDs: []int{12345}})
	refusedWith(t, err, ErrNotAChannel, 65<<20, 64<<20)
	must(OpenReceiver(ctx, path, &Options{Mode: 0o755, UIDs: []int{12345}, Memory: 65 << 20})).Close()
}

func TestAChannelThatRequiresAnUnknownFeatureIsRefusedByItsNumber(t *testing.T) {
	path, ctx := channelPlace(t), soon(t)
	must(CreateSender(ctx, path, small)).Close()
	file := must(os.OpenFile(path+"/channel", os.O_RDWR, 0))
	defer file.Close()
	writes := func(required, optional uint64) {
		b := binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, required), optional)
		must(file.WriteAt(b, 136))
	}
	for feature := range 64 {
		if 1<<feature&(packet.TracedMessages|packet.BroadcastChannel) != 0 {
			continue
		}
		writes(1<<feature, 0)
		_, err := OpenReceiver(ctx, path, nil)
		refusedWith(t, err, ErrNotAChannel, fmt.Sprintf("feature %d,", feature))
		_, err = OpenSender(ctx, path, nil)
		refusedWith(t, err, ErrNotAChannel, fmt.Sprintf("feature %d,", feature))
	}
	writes(0, 1<<64-1)
	must(OpenReceiver(ctx, path, nil)).Close()
}
