package wait

import (
	"context"
	"runtime"
	"sync/atomic"

	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
)

// Guard admits one goroutine at a time to a handle. Close waits for no call: whichever goroutine leaves last tears
// the handle down.
type Guard struct {
	state atomic.Uint32
	// Ends the context of the call under way; nil: it has none.
	cancel atomic.Pointer[context.CancelFunc]
}

// The states of a guard. 0: no goroutine is in a call.
const (
	// InUse: a goroutine is in a call.
	InUse   = 1
	closing = 2
	// InBrief: a goroutine releases something, without waiting. A call waits for that one.
	InBrief = 4
)

// Enter begins a call.
//
// Errors: [fail.ErrClosedHandle]; [fail.ErrConcurrentUse] while another goroutine is in a call.
func (g *Guard) Enter() error {
	for !g.state.CompareAndSwap(0, InUse) {
		state := g.state.Load()
		if state&closing != 0 {
			return fail.New(fail.ErrClosedHandle, "the handle is closed: make a new one")
		}
		if state&InUse != 0 {
			return fail.New(fail.ErrConcurrentUse,
				"another goroutine is in a call with this handle: one at a time may use it, but for Close and Release")
		}
		runtime.Gosched()
	}
	return nil
}

// TryEnter begins a call that does not wait. It returns false during another call and after Close.
func (g *Guard) TryEnter() bool { return g.state.CompareAndSwap(0, InBrief) }

// Leave ends a call that began from that state. If it returns true, the handle was closed during the call, and the
// caller tears it down.
func (g *Guard) Leave(from uint32) bool { return !g.state.CompareAndSwap(from, 0) }

// Close makes later calls fail, after one that began by TryEnter. isAlone: no goroutine is in a call, and the caller
// tears the handle down. isAgain: it was closed before.
func (g *Guard) Close() (isAlone, isAgain bool) {
	for {
		state := g.state.Load()
		if state&closing != 0 {
			return false, true
		}
		if state == InBrief {
			runtime.Gosched()
			continue
		}
		if g.state.CompareAndSwap(state, state|closing) {
			if cancel := g.cancel.Load(); cancel != nil {
				(*cancel)()
			}
			return state == 0, false
		}
	}
}

// CloseHandle closes: it tears the handle down, or interrupts the goroutine in a call, which then does that.
func (g *Guard) CloseHandle(tearDown, interrupt func()) {
	switch isAlone, isAgain := g.Close(); {
	case isAlone:
		tearDown()
	case !isAgain:
		interrupt()
	}
}

// Context returns a context that Close ends too, for a call that waits for other things than the handle's doorbell. The
// call ends it.
func (g *Guard) Context(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	g.cancel.Store(&cancel)
	// A Close that came before did not find it.
	if g.IsClosing() {
		cancel()
	}
	return ctx, func() {
		g.cancel.Store(nil)
		cancel()
	}
}

// IsClosing reports whether the handle is closed, or will be once the call under way ends.
func (g *Guard) IsClosing() bool { return g.state.Load()&closing != 0 }

// IsInUse reports whether a goroutine is in a call.
func (g *Guard) IsInUse() bool { return g.state.Load()&InUse != 0 }
