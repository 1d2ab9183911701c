package wait

import (
	"context"
	"runtime"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"pelton/internal/doorbell"
	"pelton/internal/fail"
)

// Guard lets one goroutine at a time into a handle, and closing wait for it.
type Guard struct{ State atomic.Uint32 }

const (
	InUse   = 1
	closing = 2
	// By somebody who gives something back, and waits for nothing: whose call it is waits for that one.
	InBrief = 4
)

// Enter begins a call.
func (g *Guard) Enter() error {
	for !g.State.CompareAndSwap(0, InUse) {
		state := g.State.Load()
		if state&closing != 0 {
			return fail.New(fail.ErrClosedHandle, "the handle is closed: make a new one")
		}
		if state&InUse != 0 {
			return fail.New(fail.ErrConcurrentUse, "another goroutine is in a call with this handle: one at a time may use it, but for Close and Release")
		}
		runtime.Gosched()
	}
	return nil
}

// TryEnter is for who waits for nothing. False: somebody is in, or the handle is closed.
func (g *Guard) TryEnter() bool { return g.State.CompareAndSwap(0, InBrief) }

// Leave ends either. True: the handle has been closed meanwhile, and it is the caller who takes it down.
func (g *Guard) Leave(from uint32) bool { return !g.State.CompareAndSwap(from, 0) }

// Close says so to later calls. True: nobody is in one, and the caller takes the handle down. again: it was closed before.
func (g *Guard) Close() (alone, again bool) {
	for {
		state := g.State.Load()
		if state&closing != 0 {
			return false, true
		}
		if g.State.CompareAndSwap(state, state|closing) {
			return state == 0, false
		}
	}
}

func (g *Guard) IsClosing() bool { return g.State.Load()&closing != 0 }

// side is one that waits.
type side interface {
	// Poll says whether it is there. An error, the end of the channel too, ends the wait.
	Poll() (bool, error)
	// MayBeReady says whether it may be there: a hint, by a load or two.
	MayBeReady() bool
	// Arm announces a sleep. False: it is there after all, or may be, and the announcement is taken back.
	Arm() (bool, error)
	Disarm()
	// NeedsTimedWait says whether a sleep may last only a millisecond.
	NeedsTimedWait() bool
}

const (
	// Sleeping costs some microseconds and a wake about as many; to spin for longer than that cannot pay.
	spinMax = 10 * time.Microsecond
	// Once, when spinning begins to fail, and seldom later, long enough for a peer that sleeps to be woken and to answer: two
	// sides that wait for each other would otherwise go on sleeping when once something has kept both.
	spinLong = 50 * time.Microsecond
	// A long spin lets other goroutines run, once: that wakes a thread for those who may be waiting to run, which takes longer than most of
	// these waits.
	yieldAfter = 5 * time.Microsecond
	// Loads between two looks at the clock, which costs as much as several of them.
	loadsPerClock = 32
	// What is large takes longer to be answered: a nanosecond for so many bytes that were asked last, and so many times as long at most. At 100 KiB
	// each side copies and looks for some 20 µs.
	bytesPerNanosecond = 4
	spinTimes          = 5
	// On one processor the other side runs only when this one lets it: so often, before sleeping. It saves both what it takes to be woken. What comes
	// only after so long has had others in between, who would be let run again and again.
	yieldsMax = 2
	yieldMax  = 200 * time.Microsecond
	// Failed spins make the next ones shorter: by halves, and after so many none at all, but for the long one.
	shortest = 4
	longAt   = 64
)

// Spin is how long to spin before sleeping, by what it brought lately.
type Spin struct {
	// Never sleeps.
	IsBusy bool
	failed uint
	// Bytes of the last request, of who makes or takes these.
	RequestBytes int
}

// oneProcessor: spinning would only keep the other side from running; it is let run.
var oneProcessor = runtime.NumCPU() == 1

func (s *Spin) longest() time.Duration {
	if s.failed == 1 || s.failed == longAt {
		return spinLong
	}
	if s.failed >= shortest {
		// Who spins while others want its processor is given it late when it has something to do.
		return 0
	}
	return min(spinMax+time.Duration(s.RequestBytes/bytesPerNanosecond), spinTimes*spinMax) >> s.failed
}

func (s *Spin) hasPaid() {
	if s.failed == 1 || s.failed == longAt {
		s.failed = 0
	} else {
		s.failed = max(min(s.failed, shortest), 1) - 1
	}
}

func (s *Spin) hasFailed() {
	if s.failed == longAt {
		s.failed = shortest
	} else {
		s.failed++
	}
}

// For waits until the side finds what it looks for, the context ends, or the handle is closed.
func For(ctx context.Context, on side, bell *doorbell.Own, spin *Spin, guard *Guard) error {
	for hasYielded, begin := false, (time.Time{}); spin.IsBusy || !oneProcessor; {
		for range loadsPerClock {
			if on.MayBeReady() {
				break
			}
		}
		if there, err := on.Poll(); there || err != nil {
			spin.hasPaid()
			return err
		}
		if err := interrupted(ctx, guard); err != nil {
			return err
		}
		if spin.IsBusy {
			runtime.Gosched()
			continue
		}
		// The clock comes late: most waits are over before.
		if begin.IsZero() {
			begin = time.Now()
			continue
		}
		took := time.Since(begin)
		if took > spin.longest() {
			spin.hasFailed()
			break
		}
		if !hasYielded && took > yieldAfter {
			hasYielded = true
			runtime.Gosched()
		}
	}
	if oneProcessor && !spin.IsBusy {
		if there, err := yieldFor(on, spin); there || err != nil {
			return err
		}
	}
	if ctx.Done() != nil {
		stop := context.AfterFunc(ctx, bell.Wake)
		defer stop()
	}
	for {
		// In this order: a kick that comes behind this ends the sleep, the reason of one before is found by the looks.
		bell.ClearWake()
		sleeps, err := on.Arm()
		if err != nil {
			return err
		}
		if sleeps {
			if err := interrupted(ctx, guard); err != nil {
				on.Disarm()
				return err
			}
			// Drains the bell first, behind the announcement: who finds a ring there does not sleep, and looks again.
			bell.Sleep(on.NeedsTimedWait())
			on.Disarm()
		}
		if there, err := on.Poll(); there || err != nil {
			return err
		}
		if err := interrupted(ctx, guard); err != nil {
			return err
		}
	}
}

// yieldFor lets other processes run, and looks again.
func yieldFor(on side, spin *Spin) (bool, error) {
	if spin.failed >= shortest && spin.failed != longAt {
		spin.hasFailed()
		return false, nil
	}
	begin := time.Now()
	for range yieldsMax {
		_, _, _ = unix.Syscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
		there, err := on.Poll()
		if time.Since(begin) > yieldMax {
			spin.hasFailed()
			return there, err
		}
		if there || err != nil {
			spin.hasPaid()
			return there, err
		}
	}
	spin.hasFailed()
	return false, nil
}

func interrupted(ctx context.Context, guard *Guard) error {
	if guard.IsClosing() {
		return fail.New(fail.ErrClosedHandle, "the handle was closed during the call")
	}
	return ctx.Err()
}

// Until waits, on the bell alone, until somebody is at the other end. Who comes rings.
func Until(ctx context.Context, bell *doorbell.Own, guard *Guard, isThere func() (bool, error)) error {
	if ctx.Done() != nil {
		stop := context.AfterFunc(ctx, bell.Wake)
		defer stop()
	}
	for {
		bell.ClearWake()
		if there, err := isThere(); there || err != nil {
			return err
		}
		if err := interrupted(ctx, guard); err != nil {
			return err
		}
		bell.Sleep(false)
	}
}
