package kernel

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"golang.org/x/sys/unix"
)

// IsShortage reports whether the system had no descriptor, or no memory, to accept a connection.
func IsShortage(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM) ||
		errors.Is(err, unix.ENOBUFS)
}

// IsOutOfDescriptors reports whether this process has no free descriptor, or too many in flight.
func IsOutOfDescriptors(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ETOOMANYREFS)
}

// ShortageText is the refusal of a peer: this process has no descriptor for it.
func ShortageText() string {
	var limit unix.Rlimit
	_ = unix.Getrlimit(unix.RLIMIT_NOFILE, &limit)
	return fmt.Sprintf("process %d has no descriptor left for one more peer (RLIMIT_NOFILE is %d): raise it there, or connect again later",
		os.Getpid(), limit.Cur)
}

const (
	// Descriptors that a handshake with one more peer opens at most at a time: 5 with a sender, 10 with a client. Two
	// more are for another user's doorbell and for a kernel before Linux 6.10.
	handshakeDescriptors = 12
	// The check may open one descriptor, and meanwhile the listener may accept a connection that it has checked
	// before.
	checkDescriptors = 2
	// An eighth of RLIMIT_NOFILE, and at most this number, is the program's own.
	programDescriptorsMax = 64
)

// Reserve is a descriptor kept for refusing peers when no other is free.
type Reserve struct {
	mutex sync.Mutex
	fd    int
}

// NewReserve opens the descriptor.
func NewReserve() (*Reserve, error) {
	r := &Reserve{}
	return r, fail.System("making an eventfd", r.open())
}

func (r *Reserve) open() (err error) {
	if r.fd, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		r.fd = -1
	}
	return err
}

// LeavesEnough reports whether this number of concurrent handshakes leaves the program its own descriptors.
func (r *Reserve) LeavesEnough(handshakes int) bool {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return true
	}
	open, ok := r.openDescriptors()
	needed := checkDescriptors + handshakes*handshakeDescriptors
	return ok && uint64(open+needed)+min(limit.Cur/8, programDescriptorsMax) <= limit.Cur
}

// openDescriptors returns the number of open descriptors: the size of /proc/self/fd from Linux 6.2 on. Otherwise the
// lowest free number stands for it, which is less if a higher one is in use. It returns false if no number is free.
func (r *Reserve) openDescriptors() (int, bool) {
	var stat unix.Stat_t
	if err := unix.Stat("/proc/self/fd", &stat); err == nil && stat.Size > 0 {
		return int(stat.Size), true
	}
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if r.fd == -1 {
		_ = r.open()
	}
	if r.fd < 0 {
		return 0, false
	}
	lowest, err := unix.FcntlInt(uintptr(r.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return 0, false
	}
	unix.Close(lowest)
	return lowest, true
}

// Lend closes the descriptor during do, which needs one. It does nothing if another goroutine took the number
// meanwhile.
func (r *Reserve) Lend(do func()) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if r.fd == closedReserve {
		return
	}
	if r.fd >= 0 {
		unix.Close(r.fd)
		do()
	}
	_ = r.open()
}

const closedReserve = -2

// Close closes the descriptor for good.
func (r *Reserve) Close() {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if r.fd >= 0 {
		unix.Close(r.fd)
	}
	r.fd = closedReserve
}
