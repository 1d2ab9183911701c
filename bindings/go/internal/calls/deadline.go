package calls

import (
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
)

// Nanoseconds: 146 years, so that no sum overflows.
const clockMost = 1 << 62

// ToNS returns a deadline on CLOCK_MONOTONIC, the clock of deadlines between processes. It returns 0, which is no
// deadline, for a deadline too far away for the clock.
func ToNS(deadline time.Time) uint64 {
	left := int64(deadline.Sub(kernel.ClockTime))
	if left > clockMost {
		return 0
	}
	return uint64(max(int64(kernel.ClockNS)+left, 1))
}

// FromNS returns false for no deadline, and for one too far away for the clock.
func FromNS(ns uint64) (time.Time, bool) {
	if ns == 0 || ns > clockMost {
		return time.Time{}, false
	}
	return kernel.ClockTime.Add(time.Duration(ns) - time.Duration(kernel.ClockNS)), true
}
