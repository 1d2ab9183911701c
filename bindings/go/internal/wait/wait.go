// Package wait is the one loop in which an endpoint waits, and the guard that admits one goroutine at a time.
//
// The policy, in policy.go, is that of the Rust library (crates/pelton-channel/src/wait.rs), with the same constants.
// These differ, because of Go's scheduler:
//   - A sleeping goroutine is parked in the runtime's poller. Only a service's goroutine blocks in the kernel: see
//     doorbell.NewBlocking.
//   - A busy-poll calls runtime.Gosched once, after yieldAfter (that of a service more rarely, see doorbell.Own.Yield),
//     and a side that never sleeps calls it in each round: other goroutines may need this processor, and a goroutine
//     that polls is preempted only after 10 ms.
//   - The processor of a peer's last ring does not matter if the peer is a goroutine of this process: see nextTime.
package wait

import (
	"context"
	"runtime"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/doorbell"
	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
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
	// PeerPID returns the process that this side waits for, of several the latest to connect; 0 if unknown.
	PeerPID() int
	// LastRing returns the last ring of the peer that this side waits for; zeros if there is none, or several peers.
	LastRing() lane.LastRing
}

// For waits until the side's condition holds, the context ends, or the handle is closed.
func For(ctx context.Context, side Side, ownDoorbell *doorbell.Own, spin *Spin, guard *Guard) error {
	// Most waits end here, before any call that costs more than a message.
	if !spin.isPollUseless && mayBeReadySoon(side) {
		if ready, err := side.Poll(); ready || err != nil {
			return err
		}
	}
	spin.setPeer(side.PeerPID())
	if spin.isOwnProcess && ownDoorbell.YieldsRarely {
		// The peer's goroutine may be one that is ready.
		ownDoorbell.YieldsRarely = false
	}
	switch limit := spin.nextTime(side.LastRing(), kernel.Processor); {
	case spin.IsBusy || !spin.isPollUseless:
		if ready, err := busyPoll(ctx, side, ownDoorbell, spin, guard, limit); ready || err != nil {
			return err
		}
	case spin.isOneProcessor && spin.mayYield():
		begun := time.Now()
		yieldProcessor()
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

// mayBeReadySoon loads the hint loadsPerClock times, or until it is set.
func mayBeReadySoon(side Side) bool {
	for range loadsPerClock {
		if side.MayBeReady() {
			return true
		}
	}
	return false
}

// yieldProcessor lets another thread run, perhaps the peer's.
func yieldProcessor() { _, _, _ = unix.Syscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }

// busyPoll polls for that time, at least loadsPerClock times. A side that never sleeps polls until the condition holds.
func busyPoll(ctx context.Context, side Side, ownDoorbell *doorbell.Own, spin *Spin, guard *Guard, limit time.Duration) (
	bool, error,
) {
	for hasYielded, begun := false, (time.Time{}); ; {
		mayBeReadySoon(side)
		if ready, err := side.Poll(); ready || err != nil {
			spin.hasPaid()
			return ready, err
		}
		if err := Interrupted(ctx, guard); err != nil {
			if !begun.IsZero() {
				spin.hasFailed()
			}
			return false, err
		}
		if spin.IsBusy {
			if runtime.Gosched(); spin.isOneProcessor {
				yieldProcessor()
			}
			continue
		}
		// Reads the clock late: most waits end before.
		if begun.IsZero() {
			// The first polls alone say nothing.
			if limit == 0 {
				return false, nil
			}
			begun = time.Now()
			continue
		}
		took := time.Since(begun)
		if took >= limit {
			spin.hasFailed()
			return false, nil
		}
		if !hasYielded && took > yieldAfter {
			hasYielded = true
			ownDoorbell.Yield()
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
