package kernel

import (
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The main goroutine keeps the first thread, so no test pins that one: it stands for the process.
func init() { runtime.LockOSThread() }

func TestAPinnedThreadKnowsItsProcessor(t *testing.T) {
	// The thread ends with this goroutine, so its pin does too.
	runtime.LockOSThread()
	var all unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		t.Fatal(err)
	}
	for cpu := range len(all) * 64 {
		if !all.IsSet(cpu) {
			continue
		}
		var one unix.CPUSet
		one.Set(cpu)
		if err := unix.SchedSetaffinity(0, &one); err != nil {
			t.Fatal(err)
		}
		if found := Processor(); found != uint32(cpu)+1 {
			t.Errorf("processor %d is number %d plus 1", cpu, found)
		}
	}
}

func TestTheClockIsTheOneThatAllProcessesShare(t *testing.T) {
	read := func() uint64 {
		var now unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
			t.Fatal(err)
		}
		return uint64(now.Nano())
	}
	// The two clocks were compared once, with an error below this.
	const error = uint64(100 * time.Microsecond)
	before := read()
	found := MonotonicNS()
	if after := read(); found < before-error || found > after+error {
		t.Errorf("found %d between %d and %d", found, before, after)
	}
}

func BenchmarkProcessor(b *testing.B) {
	for b.Loop() {
		Processor()
	}
}
