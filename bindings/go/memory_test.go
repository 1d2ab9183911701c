package pelton

import (
	"testing"

	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/window"
	"golang.org/x/sys/unix"
)

func TestAWindowThatShrinksGivesItsMemoryBack(t *testing.T) {
	sender, receiver := pair(t, &Options{Capacity: 32 << 20, Wait: Spin})
	ctx := soon(t)
	s := &sender.window
	blocks := func() int64 {
		var stat unix.Stat_t
		if err := unix.Fstat(sender.out.Memory.Data.FD, &stat); err != nil {
			t.Fatal(err)
		}
		return stat.Blocks * 512
	}
	message := make([]byte, 60_000)
	pass := func(bytes int) {
		for range bytes / len(message) {
			if err := sender.Send(ctx, message); err != nil {
				t.Fatal(err)
			}
			must(receiver.Receive(ctx)).Release()
		}
	}
	// The lane is never empty.
	if err := sender.Send(ctx, message); err != nil {
		t.Fatal(err)
	}
	// As in a trial that does not end.
	if !s.Use(16 << 20) {
		t.Fatal("the process's senders use too much")
	}
	s.BytesMin, s.BytesMax = s.Bytes, s.Bytes
	sender.out.Lane.SetWindow(s.Bytes)
	pass(20 << 20)
	if used := blocks(); used < 15<<20 {
		t.Fatal(used)
	}
	s.BytesMin, s.BytesMax = lane.Window, lane.Window
	s.Use(lane.Window)
	sender.out.Lane.SetWindow(s.Bytes)
	s.Excess = window.ExcessAfterPause
	pass(40 << 20)
	if used := blocks(); used > 1<<20 || s.Excess != 0 {
		t.Fatal(used, s.Excess)
	}
	if s.Taken != 0 {
		t.Fatal(s.Taken)
	}
	pass(1 << 20)
}
