package pelton

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// soon is the deadline of whatever waits in a test, so that nothing hangs for ever.
func soon(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// place is a name of the test's own.
func place(t *testing.T) string {
	t.Helper()
	directory, err := os.MkdirTemp("", "pelton-go")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(directory) })
	return "unix:" + filepath.Join(directory, "socket")
}

func must[T any](value T, err error) T {
	if err != nil {
		panic(fmt.Sprintf("%v", err))
	}
	return value
}

// pair is the two ends of a channel in this process: the sender has connected.
func pair(t *testing.T, options *Options) (*Sender, *Receiver) {
	t.Helper()
	sender, receiver, _ := pairOf(t, options, true)
	return sender, receiver
}

// pairOf has the receiver or the sender listen.
func pairOf(t *testing.T, options *Options, receiverListens bool) (*Sender, *Receiver, *Listener) {
	t.Helper()
	name, ctx := place(t), soon(t)
	listener, err := Listen(name, options)
	if err != nil {
		t.Fatal(err)
	}
	var sender *Sender
	var receiver *Receiver
	failed := make(chan error, 1)
	go func() {
		var err error
		if receiverListens {
			sender, err = ConnectSender(ctx, name, options)
		} else {
			receiver, err = ConnectReceiver(ctx, name, options)
		}
		failed <- err
	}()
	if receiverListens {
		receiver, err = listener.AcceptReceiver(ctx)
	} else {
		sender, err = listener.AcceptSender(ctx)
	}
	if other := <-failed; err != nil || other != nil {
		t.Fatal(err, other)
	}
	t.Cleanup(func() { sender.Close(); receiver.Close(); listener.Close() })
	return sender, receiver, listener
}

// payload is what message number n consists of.
func payload(n, bytes int) []byte {
	b := make([]byte, bytes)
	for i := range b {
		b[i] = byte(n*31 + i)
	}
	return b
}

func isPayload(b []byte, n int) bool {
	for i := range b {
		if b[i] != byte(n*31+i) {
			return false
		}
	}
	return true
}

func stop(t *testing.T, p *process) {
	t.Helper()
	if err := p.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
}
