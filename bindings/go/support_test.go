package pelton

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
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

// ramp counts from 0 to 255 again and again. Payloads are slices of it: the race detector takes a copy or a
// comparison as one access, and a loop over bytes as one for each.
var ramp = func() []byte {
	b := make([]byte, rampBytes+256)
	for i := range b {
		b[i] = byte(i)
	}
	return b
}()

// A multiple of 256.
const rampBytes = 1 << 16

// payload is what message number n consists of: byte i is n*31+i.
func payload(n, bytes int) []byte {
	b := make([]byte, 0, bytes)
	for len(b) < bytes {
		b = append(b, ramp[byte(n*31):][:min(bytes-len(b), rampBytes)]...)
	}
	return b
}

func isPayload(b []byte, n int) bool {
	for len(b) > 0 {
		part := min(len(b), rampBytes)
		if !bytes.Equal(b[:part], ramp[byte(n*31):][:part]) {
			return false
		}
		b = b[part:]
	}
	return true
}

// parked waits until a goroutine that runs the function is parked, as a traceback states it: in the runtime's poller,
// at a channel, or, on a service's doorbell, in the kernel. The function is named as in a traceback, such as
// "(*Sender).WaitReleased". False: none is within 30 seconds.
func parked(function string) bool {
	call, stacks := "."+function+"(", make([]byte, 1<<20)
	for until := time.Now().Add(30 * time.Second); time.Now().Before(until); time.Sleep(100 * time.Microsecond) {
		for stack := range strings.SplitSeq(string(stacks[:runtime.Stack(stacks, true)]), "\n\n") {
			state, _, _ := strings.Cut(stack, "\n")
			isParked := strings.Contains(state, "[select") || strings.Contains(state, "[IO wait") ||
				strings.Contains(state, "[chan receive") ||
				strings.Contains(state, "[syscall") && strings.Contains(stack, ".(*Own).Sleep(")
			if isParked && strings.Contains(stack, call) {
				return true
			}
		}
	}
	return false
}

// waiting runs a call in a goroutine, and returns once it waits in the function, which is named as for parked. The
// channel gets the call's error.
func waiting(t *testing.T, function string, call func() error) (failed chan error) {
	t.Helper()
	failed = make(chan error, 1)
	go func() { failed <- call() }()
	if !parked(function) {
		t.Fatal("it does not wait in " + function)
	}
	return failed
}

// states are the kernel's states of a process's threads, a letter each: R runs or is ready to, S sleeps, T is stopped.
func (p *process) states() string {
	p.t.Helper()
	var states []byte
	for _, thread := range must(filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", p.Process.Pid))) {
		// A thread may have ended since.
		if stat, err := os.ReadFile(thread); err == nil {
			// The name before it, in parentheses, may have any bytes.
			states = append(states, stat[bytes.LastIndexByte(stat, ')')+2])
		}
	}
	return string(states)
}

// reaches waits until every thread of the process is in a state.
func (p *process) reaches(state string) {
	p.t.Helper()
	for until := time.Now().Add(30 * time.Second); strings.Trim(p.states(),
		state) != ""; time.Sleep(100 * time.Microsecond) {
		if time.Now().After(until) {
			p.t.Fatalf("threads are in states %s, expected all in %s", p.states(), state)
		}
	}
}

// stop stops the process; it has stopped when this returns.
func stop(t *testing.T, p *process) {
	t.Helper()
	if err := p.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	p.reaches("T")
}
