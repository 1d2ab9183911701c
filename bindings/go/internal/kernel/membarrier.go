package kernel

import (
	"sync/atomic"

	"github.com/pelton-ipc/pelton/bindings/go/internal/logs"
	"golang.org/x/sys/unix"
)

const membarrierGlobalExpedited = 1 << 1

// No sync.Once: the log's handler may use an endpoint, and so come here again.
var hasLoggedFallback atomic.Bool

// Membarrier makes every running thread of the registered processes pass a barrier. It takes 0.2 to 20 µs, and
// returns false if the kernel refuses it. This process need not register: it fences what it publishes.
func Membarrier() bool {
	_, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, membarrierGlobalExpedited, 0, 0)
	if errno != 0 && !hasLoggedFallback.Swap(true) {
		logs.Warn("pelton: membarrier is refused: the peers of this process fence for each message, which is slower",
			"error", errno)
	}
	return errno == 0
}
