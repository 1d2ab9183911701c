package kernel

import (
	"golang.org/x/sys/unix"
)

const membarrierGlobalExpedited = 1 << 1

// Membarrier has every running thread of the processes that are registered for it pass a barrier: 0.2 to 20 µs. False where it is
// refused. This process need not be registered: what it publishes is fenced.
func Membarrier() bool {
	_, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, membarrierGlobalExpedited, 0, 0)
	return errno == 0
}
