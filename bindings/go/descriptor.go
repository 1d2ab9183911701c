package pelton

import (
	"context"
	"errors"
	"os"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Descriptors in the runtime's poller: who waits for one is a goroutine that is parked, and no thread.

// polled is a descriptor that does not block, registered with the poller.
type polled struct {
	file *os.File
	raw  syscall.RawConn
	fd   int
}

// newPolled takes the descriptor, also when it fails.
func newPolled(fd int, name string) (*polled, error) {
	// Before os.NewFile, which asks whether it blocks.
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, system("making "+name+" non-blocking", err)
	}
	file := os.NewFile(uintptr(fd), name)
	raw, err := file.SyscallConn()
	// What the poller has taken has deadlines.
	if err == nil {
		err = file.SetReadDeadline(time.Time{})
	}
	if err != nil {
		// Of a socket the queue may hold anything.
		closer.later(nobody, file)
		return nil, system("registering "+name+" with the poller", err)
	}
	return &polled{file, raw, fd}, nil
}

var longAgo = time.Unix(1, 0)

// until tries, and tries again whenever the descriptor has become readable, until that says true or the context ends.
func (p *polled) until(ctx context.Context, try func() bool) error {
	stop := context.AfterFunc(ctx, func() { _ = p.file.SetReadDeadline(longAgo) })
	defer stop()
	for {
		err := p.raw.Read(func(uintptr) bool { return try() })
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
		_ = p.file.SetReadDeadline(time.Time{})
		// Else it was an earlier context's.
		if err := ctx.Err(); err != nil {
			return err
		}
	}
}

// isReady asks without waiting.
func isReady(fd int, events int16) bool {
	fds := []unix.PollFd{{Fd: int32(fd), Events: events}}
	for {
		n, err := unix.Poll(fds, 0)
		if err != unix.EINTR {
			return n > 0 && err == nil && fds[0].Revents&(events|unix.POLLHUP|unix.POLLERR) != 0
		}
	}
}

// bell is a side's own: an eventfd that its peers write to. It is also kicked from within this process, by setting a deadline that
// has passed: what no peer can take away, and costs peers nothing.
type bell struct {
	polled
	// Whether the deadline may be set.
	isKicked atomic.Bool
	drain    func(uintptr) bool
	count    [8]byte
	vector   unix.Iovec
}

// newFIFOBell is the bell of a path channel's end: a FIFO, open for reading and writing, so that it never hangs up. It takes the descriptor.
func newFIFOBell(fd int) (*bell, error) {
	p, err := newPolled(fd, "pelton bell")
	if err != nil {
		return nil, err
	}
	b := &bell{polled: *p}
	rings := make([]byte, 1024)
	b.drain = func(fd uintptr) bool {
		// Who rings faster than this drains has it ring on, which costs a turn of whoever waits, and no more.
		for drained := 0; drained < 64; {
			n, err := unix.Read(int(fd), rings)
			if err == unix.EINTR {
				continue
			}
			if drained++; err != nil {
				return drained > 1 || err != unix.EAGAIN
			}
			// A short read has emptied it. What came since rings anew.
			if n < len(rings) {
				break
			}
		}
		return true
	}
	return b, nil
}

func newBell() (*bell, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, system("making an eventfd", err)
	}
	p, err := newPolled(fd, "pelton bell")
	if err != nil {
		return nil, err
	}
	b := &bell{polled: *p}
	b.vector.Base = &b.count[0]
	b.vector.SetLen(len(b.count))
	// Never waits, whatever the peer did to the shared flags. The buffer has no reader.
	b.drain = func(fd uintptr) bool {
		const rwfNowait = 8
		for {
			_, _, errno := unix.RawSyscall6(unix.SYS_PREADV2, fd, uintptr(unsafe.Pointer(&b.vector)), 1, ^uintptr(0), ^uintptr(0), rwfNowait)
			if errno != unix.EINTR {
				return errno != unix.EAGAIN
			}
		}
	}
	return b, nil
}

// kick ends the wait that is under way, or the next one. Who kicks has said why before: see awake.
func (b *bell) kick() {
	// In this order: otherwise awake could come between, and the deadline stay.
	_ = b.file.SetReadDeadline(longAgo)
	b.isKicked.Store(true)
}

// awake forgets kicks. Who waits looks for their reasons after this, and before it sleeps: so none is missed.
func (b *bell) awake() {
	if b.isKicked.Swap(false) {
		_ = b.file.SetReadDeadline(time.Time{})
	}
}

// sleep waits until the bell is rung, and drains it; or until it is kicked, or, if it is only a nap, for a millisecond.
func (b *bell) sleep(isNap bool) {
	if isNap {
		b.isKicked.Store(true)
		_ = b.file.SetReadDeadline(time.Now().Add(time.Millisecond))
	}
	// Whatever ended it, who has slept looks.
	_ = b.raw.Read(b.drain)
}

// checkBell checks a bell that came from the peer: an eventfd is of no file type, and anything else could answer a ring with SIGPIPE, or be a
// file. It does not wait for the file system of whatever it is.
func checkBell(fd int) error {
	var stat unix.Statx_t
	err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE, &stat)
	if err == nil && stat.Mode&unix.S_IFMT != 0 {
		return failure(ErrCorrupt, "the peer's bell is of file type %#o, wanted an eventfd", stat.Mode&unix.S_IFMT)
	}
	if err == nil {
		err = unix.SetNonblock(fd, true)
	}
	if err != nil {
		return failure(ErrCorrupt, "the peer's bell cannot be used: %v", err)
	}
	return nil
}

// isSameFile says whether two descriptors are of one open file, as far as the kernel can say: from Linux 6.10 on.
func isSameFile(fd, other int) bool {
	const fDupfdQuery = 1027
	is, err := unix.FcntlInt(uintptr(fd), fDupfdQuery, other)
	return err == nil && is == 1
}

var one = [8]byte{1}

// ring wakes who polls the peer's bell, by 8 bytes of an eventfd, one of a FIFO. A counter at its maximum, or a full FIFO, is a bell that
// rings already.
func ring(fd, bytes int) {
	for {
		// A hostile peer can make this one block: it clears O_NONBLOCK, which is the eventfd's and not the descriptor's, and fills the counter.
		// So the scheduler is told, which costs some 130 ns beside the 250 of the write: only this goroutine waits then.
		_, _, errno := unix.Syscall(unix.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(&one)), uintptr(bytes))
		if errno != unix.EINTR {
			return
		}
	}
}
