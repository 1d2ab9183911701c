package kernel

import (
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Two threads on one processor take it from each other.
func TestAPreemptedThreadIsCounted(t *testing.T) {
	var allowed unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		t.Fatal(err)
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2))
	var one unix.CPUSet
	for number := range len(allowed) * 64 {
		if allowed.IsSet(number) {
			one.Set(number)
			break
		}
	}
	var isOver atomic.Bool
	failed := make(chan error, 2)
	before := Preemptions()
	for range 2 {
		go func() {
			// Never unlocked: the runtime ends the thread, whose affinity has changed, with its goroutine.
			runtime.LockOSThread()
			if err := unix.SchedSetaffinity(0, &one); err != nil {
				failed <- err
				return
			}
			for !isOver.Load() {
			}
		}()
	}
	defer isOver.Store(true)
	for end := time.Now().Add(30 * time.Second); Preemptions() == before; time.Sleep(time.Millisecond) {
		if len(failed) > 0 {
			t.Fatal("binding a thread to a processor: ", <-failed)
		}
		if time.Now().After(end) {
			t.Fatal("no preemption was counted in 30 s")
		}
	}
}
