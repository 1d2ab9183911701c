package calls

import (
	"time"

	"golang.org/x/sys/unix"
)

// Nanoseconds: 146 years, so that no sum overflows.
const clockMost = 1 << 62

// One moment on both clocks: deadlines between processes count on CLOCK_MONOTONIC.
var (
	clockTime = time.Now()
	clockNS   = func() uint64 {
		var now unix.Timespec
		_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now)
		return uint64(now.Nano())
	}()
)

// ToNS returns 0, which is no deadline, for a deadline too far away for the clock.
func ToNS(deadline time.Time) uint64 {
	left := int64(deadline.Sub(clockTime))
	if left > clockMost {
		return 0
	}
	return uint64(max(int64(clockNS)+left, 1))
}

// FromNS returns false for no deadline, and for one too far away for the clock.
func FromNS(ns uint64) (time.Time, bool) {
	if ns == 0 || ns > clockMost {
		return time.Time{}, false
	}
	return clockTime.Add(time.Duration(ns) - time.Duration(clockNS)), true
}
