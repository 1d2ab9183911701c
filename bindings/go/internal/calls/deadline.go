package calls

import (
	"time"

	"golang.org/x/sys/unix"
)

// Nanoseconds: 146 years, so that nothing that is added to it overflows.
const clockMost = 1 << 62

// A moment by both of its names: what deadlines say between processes, without asking the clock.
var (
	clockTime = time.Now()
	clockNS   = func() uint64 {
		var now unix.Timespec
		_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now)
		return uint64(now.Nano())
	}()
)

// ToNS is 0, which is no deadline, for one further away than a clock can say.
func ToNS(deadline time.Time) uint64 {
	left := int64(deadline.Sub(clockTime))
	if left > clockMost {
		return 0
	}
	return uint64(max(int64(clockNS)+left, 1))
}

// FromNS is false for none, and for one further away than a clock can say.
func FromNS(ns uint64) (time.Time, bool) {
	if ns == 0 || ns > clockMost {
		return time.Time{}, false
	}
	return clockTime.Add(time.Duration(ns) - time.Duration(clockNS)), true
}
