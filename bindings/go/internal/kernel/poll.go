// Package kernel has one file for each facility of the kernel: descriptors in the runtime's poller, sockets that
// carry descriptors, users, membarrier, and closes that may block.
package kernel

import (
	"context"
	"errors"
	"os"
	"syscall"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"golang.org/x/sys/unix"
)

// Descriptor is a non-blocking descriptor, registered with the runtime's poller: a goroutine that waits for it is
// parked, and no thread waits.
type Descriptor struct {
	File *os.File
	Raw  syscall.RawConn
	FD   int
}

// NewDescriptor registers fd. It owns fd, also if it fails.
func NewDescriptor(fd int, name string) (*Descriptor, error) {
	// Before os.NewFile, which reads this flag.
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, fail.System("making "+name+" non-blocking", err)
	}
	file := os.NewFile(uintptr(fd), name)
	raw, err := file.SyscallConn()
	// A descriptor that the poller accepts has deadlines.
	if err == nil {
		err = file.SetReadDeadline(time.Time{})
	}
	if err != nil {
		// A socket's queue may contain anything.
		Deferred.Close(UnknownUser, file)
		return nil, fail.System("registering "+name+" with the poller", err)
	}
	return &Descriptor{file, raw, fd}, nil
}

// LongAgo is a deadline that has passed.
var LongAgo = time.Unix(1, 0)

// Until calls try at first, and whenever the descriptor has become readable, until it returns true or the context
// ends.
func (p *Descriptor) Until(ctx context.Context, try func() bool) error {
	stop := context.AfterFunc(ctx, func() { _ = p.File.SetReadDeadline(LongAgo) })
	defer stop()
	for {
		err := p.Raw.Read(func(uintptr) bool { return try() })
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
		_ = p.File.SetReadDeadline(time.Time{})
		// Otherwise the deadline was an earlier context's.
		if err := ctx.Err(); err != nil {
			return err
		}
	}
}

// UntilWritable calls try at first, and whenever the descriptor has become writable, until it returns true, the
// context ends, or InterruptWrite is called.
func (p *Descriptor) UntilWritable(ctx context.Context, try func() bool) error {
	stop := context.AfterFunc(ctx, p.InterruptWrite)
	defer stop()
	err := p.Raw.Write(func(uintptr) bool { return try() })
	if errors.Is(err, os.ErrDeadlineExceeded) {
		_ = p.File.SetWriteDeadline(time.Time{})
		return ctx.Err()
	}
	return err
}

// InterruptWrite ends the present UntilWritable or the next one.
func (p *Descriptor) InterruptWrite() { _ = p.File.SetWriteDeadline(LongAgo) }

// IsReady polls fd without waiting.
func IsReady(fd int, events int16) bool {
	fds := []unix.PollFd{{Fd: int32(fd), Events: events}}
	for {
		n, err := unix.Poll(fds, 0)
		if err != unix.EINTR {
			return n > 0 && err == nil && fds[0].Revents&(events|unix.POLLHUP|unix.POLLERR) != 0
		}
	}
}

// IsSameFile reports whether two descriptors refer to one open file. Before Linux 6.10 it returns false.
func IsSameFile(fd, other int) bool {
	const fDupfdQuery = 1027
	is, err := unix.FcntlInt(uintptr(fd), fDupfdQuery, other)
	return err == nil && is == 1
}
