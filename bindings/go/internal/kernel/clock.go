package kernel

import (
	"time"

	"golang.org/x/sys/unix"
)

// One moment on Go's clock and on CLOCK_MONOTONIC, which all processes of a machine share. Go reads the latter without
// a system call, but returns it only as a difference.
var ClockTime, ClockNS = func() (moment time.Time, ns uint64) {
	// The quickest of several readings: a preemption between the two clocks makes a reading wrong by milliseconds.
	quickest := time.Duration(1<<63 - 1)
	for range 8 {
		var now unix.Timespec
		begun := time.Now()
		_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now)
		if took := time.Since(begun); took < quickest {
			moment, ns, quickest = begun.Add(took/2), uint64(now.Nano()), took
		}
	}
	return moment, ns
}()

// MonotonicNS returns the time on CLOCK_MONOTONIC.
func MonotonicNS() uint64 { return ClockNS + uint64(time.Since(ClockTime)) }
