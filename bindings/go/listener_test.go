package pelton

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/handshake"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/packet"
	"golang.org/x/sys/unix"
)

// A listener that accepts one peer at a time, and connections that send nothing.

func TestSilentConnectionsDelayNoOther(t *testing.T) {
	for _, isRefused := range []bool{true, false} {
		name, ctx := place(t), soon(t)
		opens(t, name)
		listener := must(Listen(name, nil))
		defer listener.Close()
		silent := make([]int, 100)
		connect := func() {
			for i := range silent {
				silent[i] = must(kernel.ConnectTo(strings.TrimPrefix(name, "unix:")))
			}
		}
		if isRefused {
			asUser(t, 12345, connect)
		} else {
			connect()
		}
		defer kernel.CloseAll(silent)
		connected := make(chan *Sender, 1)
		go func() {
			sender, err := ConnectSender(ctx, name, &Options{Await: true})
			if err != nil {
				t.Error(err)
			}
			connected <- sender
		}()
		begun := time.Now()
		receiver, err := listener.AcceptReceiver(ctx)
		if err != nil {
			t.Fatal(err)
		}
		// One after the other would be 50 seconds; 64 at a time one half.
		if took := time.Since(begun); took > 10*time.Second {
			t.Errorf("refused: %v: it took %v", isRefused, took)
		}
		(<-connected).Close()
		receiver.Close()
	}
}

func TestTheFirstPeerWithAPacketIsServedAndASilentOneKeepsItsTime(t *testing.T) {
	name, ctx := place(t), soon(t)
	listener := must(Listen(name, nil))
	defer listener.Close()
	slow := must(handshake.Connected(ctx, must(kernel.ConnectTo(strings.TrimPrefix(name, "unix:"))),
		must((&Options{}).forBoth(0))))
	sent := make(chan error, 2)
	go func() {
		sender, err := ConnectSender(ctx, name, nil)
		if err == nil {
			err = errors.Join(sender.Send(ctx, []byte("quick")), sender.Close())
		}
		sent <- err
	}()
	receive := func(wanted string) {
		t.Helper()
		receiver := must(listener.AcceptReceiver(ctx))
		defer receiver.Close()
		message := must(receiver.Receive(ctx))
		if string(message.Bytes()) != wanted {
			t.Fatal(string(message.Bytes()))
		}
		message.Release()
		if err := <-sent; err != nil {
			t.Fatal(err)
		}
	}
	receive("quick")
	go func() {
		sender, err := senderOf(slow, Options{}, false)
		if err == nil {
			err = errors.Join(sender.Send(ctx, []byte("slow")), sender.Close())
		}
		sent <- err
	}()
	receive("slow")
}

func TestNoPeerIsAcceptedAfterTheContext(t *testing.T) {
	name := place(t)
	listener := must(Listen(name, nil))
	defer listener.Close()
	ctx, cancel := context.WithCancel(soon(t))
	cancel()
	fd := must(kernel.ConnectTo(strings.TrimPrefix(name, "unix:")))
	defer unix.Close(fd)
	if _, err := listener.AcceptReceiver(ctx); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if !kernel.IsReady(listener.bound.Socket.FD, unix.POLLIN) {
		t.Fatal("a connection was accepted")
	}
}

func TestClosingAListenerHangsUpOnWaitingPeers(t *testing.T) {
	name := place(t)
	listener := must(Listen(name, nil))
	silent, speaks := must(kernel.ConnectTo(strings.TrimPrefix(name,
		"unix:"))), must(kernel.ConnectTo(strings.TrimPrefix(name, "unix:")))
	defer kernel.CloseAll([]int{silent, speaks})
	ctx, cancel := context.WithCancel(soon(t))
	go func() {
		// Both have been accepted once that one is refused.
		_ = kernel.TrySend(speaks, hello(packet.RoleReceiver, 0))
		isReadyWithin(t, speaks)
		cancel()
	}()
	if _, err := listener.AcceptReceiver(ctx); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	listener.Close()
	isReadyWithin(t, silent)
	if n, _, _, err := kernel.TryReceive(silent, make([]byte, packet.BytesMax)); n != 0 || err != nil {
		t.Fatal(n, err)
	}
}
