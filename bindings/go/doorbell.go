package pelton

import (
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"pelton/internal/fail"
)

// Doorbells: what a sleeping side waits for, and what its peers ring. No peer can make the ring of another block, nor the sleep of the owner.
// spec/protocol.md, "Doorbells".

// bell is what one side sleeps on. It is also kicked from within this process, by setting a deadline that has passed: what no peer can take away, and costs
// peers nothing.
//
// It is an epoll of its own, registered with the runtime's poller. In it is an eventfd, which all peers of this user have, and an end of a socket pair for
// each peer of another user. The eventfd is never read: its peers write 0 to it, which adds nothing, and each write is an event for an epoll that
// waits for EPOLLIN | EPOLLOUT | EPOLLET, as one of the first two holds at every value. The runtime's own epoll would not do: whoever reads or fills the counter
// has it report EPOLLOUT or EPOLLIN alone, and a goroutine waits for one of them; and it forgets events from before a wait, which here are kept until they
// are harvested.
//
// Of a path channel it is a FIFO, open for reading and writing.
type bell struct {
	// nil until somebody sleeps, of a bell that is seldom slept on.
	polled atomic.Pointer[polled]
	// Whether the deadline may be set.
	isKicked atomic.Bool
	// Takes the rings that have come. False: none has.
	drain func(uintptr) bool

	eventfd int
	events  [4]unix.EpollEvent
	mutex   sync.Mutex
	// This side's ends of socket pairs, and the users at the other ends.
	sockets  map[int]int
	isClosed bool
}

// newBell makes the bell of a side.
func newBell() (*bell, error) {
	b, err := newSeldomBell()
	if err != nil {
		return nil, err
	}
	if _, err := b.open(); err != nil {
		b.close()
		return nil, err
	}
	// The kernel reports what has just been added; nobody has rung.
	b.drainNow()
	return b, nil
}

// newSeldomBell makes a bell that has one descriptor less until somebody sleeps: a service has one for each client.
func newSeldomBell() (*bell, error) {
	eventfd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fail.System("making an eventfd", err)
	}
	b := &bell{eventfd: eventfd, sockets: map[int]int{}}
	b.drain = b.harvest
	return b, nil
}

// open is the epoll, which is made if there is none. Its first event comes at once, so that no ring from before is lost.
func (b *bell) open() (*polled, error) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	if p := b.polled.Load(); p != nil {
		return p, nil
	}
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fail.System("making an epoll", err)
	}
	event := &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLOUT | unix.EPOLLET, Fd: int32(b.eventfd)}
	if err := unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, b.eventfd, event); err != nil {
		unix.Close(epoll)
		return nil, fail.System("waiting for an eventfd", err)
	}
	p, err := newPolled(epoll, "pelton bell")
	if err == nil {
		b.polled.Store(p)
	}
	return p, err
}

// ringsMost is how many rings of one socket or FIFO are taken at a time. A peer that rings faster than this side takes them has the bell ring on, which costs a
// turn of the waiting goroutine, and no more.
const ringsMost = 64

// harvest takes the events that have come.
func (b *bell) harvest(epoll uintptr) bool {
	for {
		// Past the scheduler, as it does not wait: no time is given, and the kernel takes no lock for it that a peer could hold.
		n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, epoll, uintptr(unsafe.Pointer(&b.events)), uintptr(len(b.events)), 0, 0, 0)
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 {
			return true
		}
		for _, event := range b.events[:n] {
			if int(event.Fd) != b.eventfd {
				b.drainSocket(int(event.Fd))
			}
		}
		return n > 0
	}
}

// drainNow takes the rings that have come, without waiting. False: none has.
func (b *bell) drainNow() bool {
	p := b.polled.Load()
	return p != nil && b.drain(uintptr(p.fd))
}

// pairs returns the number of socket pairs that it polls.
func (b *bell) pairs() int {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	return len(b.sockets)
}

// drainSocket takes what one peer has sent to its doorbell, and closes descriptors that are among it. At its end, as the peer has shut it down, closed it,
// or sent a packet of no bytes, this side stops listening to it.
func (b *bell) drainSocket(fd int) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	uid, isThere := b.sockets[fd]
	if !isThere {
		return
	}
	var ring [1]byte
	for range ringsMost {
		n, fds, _, err := tryReceive(fd, ring[:])
		if err == unix.EAGAIN {
			return
		}
		closer.descriptors(uid, fds)
		if err != nil || n == 0 || closer.blocked(uid) != "" {
			b.stopListening(fd)
			return
		}
	}
}

// stopListening is behind the mutex.
func (b *bell) stopListening(fd int) {
	if _, isThere := b.sockets[fd]; isThere && !b.isClosed {
		_ = unix.EpollCtl(b.polled.Load().fd, unix.EPOLL_CTL_DEL, fd, nil)
	}
	delete(b.sockets, fd)
}

// close ends it. The ends of socket pairs are closed with the links that they belong to, before or after this.
func (b *bell) close() {
	b.mutex.Lock()
	isAgain := b.isClosed
	b.isClosed = true
	b.mutex.Unlock()
	if isAgain {
		return
	}
	// Not under the mutex: it waits for a harvest.
	if p := b.polled.Load(); p != nil {
		_ = p.file.Close()
	}
	if b.eventfd >= 0 {
		unix.Close(b.eventfd)
	}
}

// socketDoorbell is one for a single peer of another user: this side's end, and the peer's until the hand-shake is over.
type socketDoorbell struct {
	bell       *bell
	own, peers int
	uid        int
}

func (b *bell) newSocketDoorbell(uid int) (socketDoorbell, error) {
	p, err := b.open()
	if err != nil {
		return socketDoorbell{}, err
	}
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return socketDoorbell{}, fail.System("making a socket pair", err)
	}
	// An error: of an older kernel, where descriptors are taken and closed.
	_ = permitDescriptors(ends[0], false)
	b.mutex.Lock()
	defer b.mutex.Unlock()
	if err := unix.EpollCtl(p.fd, unix.EPOLL_CTL_ADD, ends[0], &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(ends[0])}); err != nil {
		closeAll(ends[:])
		return socketDoorbell{}, fail.System("waiting for a socket pair", err)
	}
	b.sockets[ends[0]] = uid
	return socketDoorbell{b, ends[0], ends[1], uid}, nil
}

// close ends it, once the peer's end has been sent or closed. It does not wait, whatever the peer has queued.
func (d socketDoorbell) close() {
	d.bell.mutex.Lock()
	d.bell.stopListening(d.own)
	d.bell.mutex.Unlock()
	hangUp(d.own, d.uid)
}

// newFIFOBell is the bell of a path channel's end: a FIFO, open for reading and writing, so that it never hangs up. It takes the descriptor.
func newFIFOBell(fd int) (*bell, error) {
	p, err := newPolled(fd, "pelton bell")
	if err != nil {
		return nil, err
	}
	b := &bell{eventfd: -1}
	b.polled.Store(p)
	rings := make([]byte, 1024)
	b.drain = func(fd uintptr) bool {
		for drained := 0; drained < ringsMost; {
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

// kick ends the wait that is under way, or the next one. The caller has stored why before: see awake.
func (b *bell) kick() {
	if p := b.polled.Load(); p != nil {
		// In this order: otherwise awake could come between, and the deadline stay.
		_ = p.file.SetReadDeadline(longAgo)
		b.isKicked.Store(true)
	}
}

// awake forgets kicks. The waiting goroutine looks for their reasons after this, and before it sleeps: so none is missed.
func (b *bell) awake() {
	if !b.isKicked.Swap(false) {
		return
	}
	if p := b.polled.Load(); p != nil {
		_ = p.file.SetReadDeadline(time.Time{})
	}
}

// sleep waits until the bell is rung, and takes the rings; or until it is kicked, or, if it is only a nap, for a millisecond. Whatever ended it, the caller
// looks.
func (b *bell) sleep(isNap bool) {
	p := b.polled.Load()
	if p == nil {
		var err error
		if p, err = b.open(); err != nil {
			// For want of a descriptor: until there is one.
			time.Sleep(time.Millisecond)
			return
		}
		// A kick from before has found no deadline to set; the first event ends this sleep.
	}
	if isNap {
		b.isKicked.Store(true)
		_ = p.file.SetReadDeadline(time.Now().Add(time.Millisecond))
	}
	_ = p.raw.Read(b.drain)
}

// doorbell is a peer's, for this side to ring.
type doorbell struct {
	fd   int
	kind doorbellKind
}

type doorbellKind uint8

const (
	doorbellEventfd doorbellKind = iota
	doorbellSocket
	doorbellFIFO
)

// checkDoorbell is what came from a peer to be rung: an eventfd of this user's, or of anybody a socket on which a send without waiting does not wait. Anything
// else could block a ring, answer it with SIGPIPE, or be a file. It does not wait for the file system of whatever it is.
func checkDoorbell(fd int, isOwnUser bool) (doorbell, error) {
	var stat unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE, &stat); err != nil {
		return doorbell{}, fail.New(fail.ErrCorrupt, "the peer's doorbell cannot be used: %v", err)
	}
	switch kind := stat.Mode & unix.S_IFMT; {
	// An eventfd is of no file type.
	case kind == 0 && !isOwnUser:
		return doorbell{}, fail.New(fail.ErrCorrupt, "the peer's doorbell is an eventfd, wanted a socket, as the peer is another user")
	case kind == 0:
		if err := unix.SetNonblock(fd, true); err != nil {
			return doorbell{}, fail.New(fail.ErrCorrupt, "the peer's doorbell cannot be used: %v", err)
		}
		return doorbell{fd, doorbellEventfd}, nil
	case kind != unix.S_IFSOCK:
		return doorbell{}, fail.New(fail.ErrCorrupt, "the peer's doorbell is of file type %#o, wanted an eventfd or a socket", kind)
	}
	domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	is, failed := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	if err != nil || failed != nil || domain != unix.AF_UNIX || is != unix.SOCK_SEQPACKET {
		return doorbell{}, fail.New(fail.ErrCorrupt, "the peer's doorbell is a socket of domain %d and type %d, wanted %d and %d", domain, is, unix.AF_UNIX, unix.SOCK_SEQPACKET)
	}
	return doorbell{fd, doorbellSocket}, nil
}

var zero [8]byte

// ring wakes the peer if it sleeps. What cannot be written, as a socket or FIFO is full, has rung already.
func (d doorbell) ring() {
	for {
		var errno syscall.Errno
		// By way of the scheduler, which costs some 130 ns beside the 250 of the write: in an eventfd's counter at 2^64-1, which a peer can reach by the
		// kernel's help alone, a write of 0 blocks too. Only this goroutine waits then.
		switch d.kind {
		case doorbellEventfd:
			_, _, errno = unix.Syscall(unix.SYS_WRITE, uintptr(d.fd), uintptr(unsafe.Pointer(&zero)), 8)
		case doorbellSocket:
			_, _, errno = unix.Syscall6(unix.SYS_SENDTO, uintptr(d.fd), uintptr(unsafe.Pointer(&zero)), 1, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0)
		case doorbellFIFO:
			_, _, errno = unix.Syscall(unix.SYS_WRITE, uintptr(d.fd), uintptr(unsafe.Pointer(&zero)), 1)
		}
		if errno != unix.EINTR {
			return
		}
	}
}

// close gives it up. In a socket the peer may have queued what takes long to close.
func (d doorbell) close(uid int) {
	if d.kind == doorbellSocket {
		closer.later(uid, descriptor(d.fd))
		return
	}
	unix.Close(d.fd)
}
