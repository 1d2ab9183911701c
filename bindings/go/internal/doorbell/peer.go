package doorbell

import (
	"syscall"
	"unsafe"

	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"golang.org/x/sys/unix"
)

// Peer is a peer's doorbell, which this side rings.
type Peer struct {
	FD   int
	Kind Kind
}

// Kind says how a doorbell is rung.
type Kind uint8

// The kinds of a peer's doorbell.
const (
	Eventfd Kind = iota
	Socket
	FIFO
)

// Check checks a doorbell that came from a peer: an eventfd from the same user, or from any user a socket where a
// non-blocking send does not wait. Anything else could block a ring, answer it with SIGPIPE, or be a file. It does
// not wait for a file system.
func Check(fd int, isOwnUser bool) (Peer, error) {
	var stat unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE, &stat); err != nil {
		return Peer{}, fail.New(fail.ErrCorrupt, "the peer's doorbell cannot be used: %v", err)
	}
	switch kind := stat.Mode & unix.S_IFMT; {
	// An eventfd has no file type.
	case kind == 0 && !isOwnUser:
		return Peer{}, fail.New(fail.ErrCorrupt,
			"the peer's doorbell is an eventfd, wanted a socket, as the peer is another user")
	case kind == 0:
		if err := unix.SetNonblock(fd, true); err != nil {
			return Peer{}, fail.New(fail.ErrCorrupt, "the peer's doorbell cannot be used: %v", err)
		}
		return Peer{fd, Eventfd}, nil
	case kind != unix.S_IFSOCK:
		return Peer{}, fail.New(fail.ErrCorrupt,
			"the peer's doorbell is of file type %#o, wanted an eventfd or a socket", kind)
	}
	domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	is, failed := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	if err != nil || failed != nil || domain != unix.AF_UNIX || is != unix.SOCK_SEQPACKET {
		return Peer{}, fail.New(fail.ErrCorrupt,
			"the peer's doorbell is a socket of domain %d and type %d, wanted %d and %d", domain, is, unix.AF_UNIX, unix.SOCK_SEQPACKET)
	}
	return Peer{fd, Socket}, nil
}

var zero [8]byte

// Ring wakes the peer if it sleeps. If a socket or FIFO is full, it has rung already.
func (d Peer) Ring() {
	for {
		var errno syscall.Errno
		// Through the scheduler, which costs some 130 ns beside the 250 ns of the write: a write of 0 blocks too when
		// an eventfd's counter is at 2^64-1, which a peer can reach with the kernel's help. Then only this goroutine
		// waits.
		switch d.Kind {
		case Eventfd:
			_, _, errno = unix.Syscall(unix.SYS_WRITE, uintptr(d.FD), uintptr(unsafe.Pointer(&zero)), 8)
		case Socket:
			_, _, errno = unix.Syscall6(unix.SYS_SENDTO, uintptr(d.FD), uintptr(unsafe.Pointer(&zero)), 1,
				unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0)
		case FIFO:
			_, _, errno = unix.Syscall(unix.SYS_WRITE, uintptr(d.FD), uintptr(unsafe.Pointer(&zero)), 1)
		}
		if errno != unix.EINTR {
			return
		}
	}
}

// Close closes the doorbell. A close may block: the peer may have queued anything in a socket.
func (d Peer) Close(uid int) {
	if d.Kind == Socket {
		kernel.Deferred.Close(uid, kernel.RawDescriptor(d.FD))
		return
	}
	unix.Close(d.FD)
}
