// Package wait is the one loop in which an endpoint waits, its adaptive spin, and the guard that admits one goroutine
// at a time.
//
// The spin has the rules and the constants of the Rust library (crates/pelton-channel/src/wait.rs). These differ,
// because of Go's scheduler:
//   - A sleeping goroutine is parked in the runtime's poller. No thread waits in the kernel.
//   - A spin calls runtime.Gosched once, after yieldAfter, and a busy poll calls it in each round: other goroutines
//     may need this processor, and a goroutine that spins is preempted only after 10 ms.
//   - A large request makes the spin longer, see [Spin.RequestBytes]: a parked goroutine wakes up later than a thread
//     does, so a spin pays for longer.
//   - Whether there is one processor is asked once, of this process alone: runtime.NumCPU. Rust asks for those of
//     both processes.
package wait

import (
	"context"
	"runtime"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/doorbell"
	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"golang.org/x/sys/unix"
)

// Side is one side of a channel and the condition that it waits for.
type Side interface {
	// Poll reports whether the condition holds. An error ends the wait; the end of the channel is one.
	Poll() (bool, error)
	// MayBeReady reports whether the condition may hold: a cheap hint, by a load or two.
	MayBeReady() bool
	// Arm announces a sleep. It returns false if the condition may hold after all, and has withdrawn the announcement.
	Arm() (bool, error)
	// Disarm withdraws the announcement.
	Disarm()
	// NeedsTimedWait reports whether a sleep must end after a millisecond, because a wake-up may be missed.
	NeedsTimedWait() bool
}

const (
	// A sleep costs some microseconds, and a wake-up costs about as much. A longer spin cannot pay.
	spinMax = 10 * time.Microsecond
	// Loads between two checks of the clock, which costs as much as several loads.
	loadsPerClock = 32
	// Each failed spin halves the next ones, at most this many times: down to 1/16.
	shortest = 4
	// After this number of failed spins a wait polls only once, until the next long spin.
	noneAfter = 16
	// After these numbers of failed spins one long spin follows: long enough for a sleeping peer to wake up and
	// reply. Without it, two sides that wait for each other would never spin again after both have slept.
	firstLong, laterLong = 1, 256
	spinLong             = 50 * time.Microsecond
	// A spin that lasts longer lets other goroutines run, once. That wakes a thread for them, which takes longer than
	// most waits.
	yieldAfter = 5 * time.Microsecond
	// A large request lengthens the spin by a nanosecond for this number of bytes, at most to this many times
	// spinMax. At 100 KiB each side copies and checks for some 20 µs.
	bytesPerNanosecond = 4
	spinTimesMax       = 5

	// On one processor the peer runs only when this process yields. The kernel may give a yielded processor to an
	// unrelated thread for milliseconds: a yield that takes longer than yieldMax shows that. Then yieldRest waits do
	// not yield, twice as many after each further long yield, up to yieldDoublingsMax times.
	yieldMax          = 500 * time.Microsecond
	yieldRest         = 1024
	yieldDoublingsMax = 6
)

// Spin is the adaptive spin before a sleep: it is longer if spinning was useful lately.
type Spin struct {
	// IsBusy makes waits poll without ever sleeping.
	IsBusy bool
	// RequestBytes is the size of the last request, at a client or a service.
	RequestBytes int
	// Failed spins since the last useful or long one.
	failed uint
	// The waits left that do not yield, and the doublings of their number.
	rest, doublings uint
}

// With one processor a spin would keep the peer from running.
var oneProcessor = runtime.NumCPU() == 1

func (s *Spin) isLong() bool { return s.failed == firstLong || s.failed == laterLong }

func (s *Spin) longest() time.Duration {
	switch {
	case s.isLong():
		return spinLong
	case s.failed >= noneAfter:
		return 0
	}
	return min(spinMax+time.Duration(s.RequestBytes/bytesPerNanosecond), spinTimesMax*spinMax) >> min(s.failed,
		shortest)
}

func (s *Spin) hasPaid() {
	if s.isLong() {
		s.failed = 0
	} else {
		s.failed = max(min(s.failed, shortest), 1) - 1
	}
}

func (s *Spin) hasFailed() {
	if s.failed == laterLong {
		s.failed = shortest
	} else {
		s.failed++
	}
}

func (s *Spin) mayYield() bool {
	if s.rest > 0 {
		s.rest--
		return false
	}
	return true
}

func (s *Spin) hasYielded(took time.Duration) {
	if took > yieldMax {
		s.rest = yieldRest << s.doublings
		s.doublings = min(s.doublings+1, yieldDoublingsMax)
	} else {
		s.doublings = max(s.doublings, 1) - 1
	}
}

// For waits until the side's condition holds, the context ends, or the handle is closed.
func For(ctx context.Context, side Side, ownDoorbell *doorbell.Own, spin *Spin, guard *Guard) error {
	if spin.IsBusy || !oneProcessor {
		if ready, err := spinFor(ctx, side, spin, guard); ready || err != nil {
			return err
		}
	} else if spin.mayYield() {
		begun := time.Now()
		_, _, _ = unix.Syscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
		ready, err := side.Poll()
		if spin.hasYielded(time.Since(begun)); ready || err != nil {
			return err
		}
	}
	if ctx.Done() != nil {
		stop := context.AfterFunc(ctx, ownDoorbell.Wake)
		defer stop()
	}
	for {
		// In this order: a local wake after this ends the sleep; the polls below find the reason of an earlier one.
		ownDoorbell.ClearWake()
		armed, err := side.Arm()
		if err != nil {
			return err
		}
		if armed {
			if err := Interrupted(ctx, guard); err != nil {
				side.Disarm()
				return err
			}
			ownDoorbell.Sleep(side.NeedsTimedWait())
			side.Disarm()
		}
		if ready, err := side.Poll(); ready || err != nil {
			return err
		}
		if err := Interrupted(ctx, guard); err != nil {
			return err
		}
	}
}

// spinFor polls for as long as the spin lasts. A busy spin lasts until the condition holds.
func spinFor(ctx context.Context, side Side, spin *Spin, guard *Guard) (bool, error) {
	for hasYielded, begun := false, (time.Time{}); ; {
		for range loadsPerClock {
			if side.MayBeReady() {
				break
			}
		}
		if ready, err := side.Poll(); ready || err != nil {
			spin.hasPaid()
			return ready, err
		}
		if err := Interrupted(ctx, guard); err != nil {
			return false, err
		}
		if spin.IsBusy {
			runtime.Gosched()
			continue
		}
		// Reads the clock late: most waits end before.
		if begun.IsZero() {
			begun = time.Now()
			continue
		}
		took := time.Since(begun)
		if took > spin.longest() {
			spin.hasFailed()
			return false, nil
		}
		if !hasYielded && took > yieldAfter {
			hasYielded = true
			runtime.Gosched()
		}
	}
}

// Interrupted returns why a wait has to end: the handle was closed, or the context ended.
func Interrupted(ctx context.Context, guard *Guard) error {
	if guard.IsClosing() {
		return fail.New(fail.ErrClosedHandle, "the handle was closed during the call")
	}
	return ctx.Err()
}

// Until waits, on the doorbell alone, until isReady returns true. Whatever makes it true rings.
func Until(ctx context.Context, ownDoorbell *doorbell.Own, guard *Guard, isReady func() (bool, error)) error {
	if ctx.Done() != nil {
		stop := context.AfterFunc(ctx, ownDoorbell.Wake)
		defer stop()
	}
	for {
		ownDoorbell.ClearWake()
		if ready, err := isReady(); ready || err != nil {
			return err
		}
		if err := Interrupted(ctx, guard); err != nil {
			return err
		}
		ownDoorbell.Sleep(false)
	}
}
