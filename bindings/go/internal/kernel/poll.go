package kernel

import (
	"context"
	"errors"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"pelton/internal/fail"
)

// Descriptors in the runtime's poller: who waits for one is a goroutine that is parked, and no thread.

// Descriptor is a descriptor that does not block, registered with the poller.
type Descriptor struct {
	File *os.File
	Raw  syscall.RawConn
	FD   int
}

// NewDescriptor takes the descriptor, also when it fails.
func NewDescriptor(fd int, name string) (*Descriptor, error) {
	// Before os.NewFile, which asks whether it blocks.
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, fail.System("making "+name+" non-blocking", err)
	}
	file := os.NewFile(uintptr(fd), name)
	raw, err := file.SyscallConn()
	// What the poller has taken has deadlines.
	if err == nil {
		err = file.SetReadDeadline(time.Time{})
	}
	if err != nil {
		// Of a socket the queue may hold anything.
		Deferred.Close(UnknownUser, file)
		return nil, fail.System("registering "+name+" with the poller", err)
	}
	return &Descriptor{file, raw, fd}, nil
}

var LongAgo = time.Unix(1, 0)

// Until tries, and tries again whenever the descriptor has become readable, until that says true or the context ends.
func (p *Descriptor) Until(ctx context.Context, try func() bool) error {
	stop := context.AfterFunc(ctx, func() { _ = p.File.SetReadDeadline(LongAgo) })
	defer stop()
	for {
		err := p.Raw.Read(func(uintptr) bool { return try() })
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
		_ = p.File.SetReadDeadline(time.Time{})
		// Else it was an earlier context's.
		if err := ctx.Err(); err != nil {
			return err
		}
	}
}

// IsReady asks without waiting.
func IsReady(fd int, events int16) bool {
	fds := []unix.PollFd{{Fd: int32(fd), Events: events}}
	for {
		n, err := unix.Poll(fds, 0)
		if err != unix.EINTR {
			return n > 0 && err == nil && fds[0].Revents&(events|unix.POLLHUP|unix.POLLERR) != 0
		}
	}
}

// IsSameFile says whether two descriptors are of one open file, as far as the kernel can say: from Linux 6.10 on.
func IsSameFile(fd, other int) bool {
	const fDupfdQuery = 1027
	is, err := unix.FcntlInt(uintptr(fd), fDupfdQuery, other)
	return err == nil && is == 1
}
