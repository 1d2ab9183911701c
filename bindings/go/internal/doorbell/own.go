// Package doorbell has what a sleeping side waits for, and what its peers ring. No peer can block another's ring, or
// the owner's sleep. spec/protocol.md, "Doorbells".
package doorbell

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"golang.org/x/sys/unix"
)

// Own is what one side sleeps on. A local wake from this process sets a deadline that has passed, which no peer can
// prevent and which costs peers nothing.
//
// It is an epoll of its own, registered with the runtime's poller. The epoll contains an eventfd, which all peers of
// this user have, and an end of a socket pair for each peer of another user. Nothing reads the eventfd: its peers
// write 0 to it, which adds nothing, and each write is an event for an epoll that waits for EPOLLIN | EPOLLOUT |
// EPOLLET, as one of the first two holds at every value. The runtime's own epoll would not do. A peer that reads or
// fills the counter makes it report EPOLLOUT or EPOLLIN alone, while a goroutine waits for one of them; and it drops
// events from before a wait, which this epoll keeps.
//
// For a path channel it is a FIFO, open for reading and writing. That of a service is not in the runtime's poller, see
// NewBlocking.
type Own struct {
	// nil until a goroutine first sleeps, see NewLazy.
	Polled atomic.Pointer[kernel.Descriptor]
	// The eventfd of local wakes, which no peer has, if goroutines block in the kernel; otherwise -1.
	wake int
	// YieldsRarely limits the yields of the goroutine that sleeps: it starts no other one for each message.
	YieldsRarely bool
	// When it last yielded, and GOMAXPROCS then.
	yieldedNS uint64
	places    int
	// Whether the deadline may be set, or the eventfd of local wakes written.
	isWoken atomic.Bool
	// Takes the rings that have come. It returns false if there are none.
	drain func(uintptr) bool

	Eventfd int
	events  [4]unix.EpollEvent
	mutex   sync.Mutex
	// This side's ends of socket pairs, and the users at the other ends.
	pairUsers map[int]int
	isClosed  bool
}

// New creates the doorbell of one side.
func New() (*Own, error) {
	b, err := NewLazy()
	if err != nil {
		return nil, err
	}
	if _, err := b.Open(); err != nil {
		b.Close()
		return nil, err
	}
	// The kernel reports what was just added, although nothing rang.
	b.Poll()
	return b, nil
}

// NewLazy creates a doorbell that has one descriptor less until a goroutine first sleeps: a service has one for each
// client.
func NewLazy() (*Own, error) {
	eventfd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fail.System("making an eventfd", err)
	}
	b := &Own{Eventfd: eventfd, wake: -1, pairUsers: map[int]int{}}
	b.drain = func(epoll uintptr) bool { return b.harvest(epoll, 0) }
	return b, nil
}

// NewBlocking creates a doorbell whose sleeping goroutine blocks in the kernel, and holds a thread meanwhile. A parked
// goroutine costs more system calls for each sleep: the runtime's poller wakes a thread, which may wake another one
// that searches for work, and takes the ring by a second epoll_wait (docs/decisions/0040-go-service.md).
func NewBlocking() (*Own, error) {
	b, err := NewLazy()
	if err != nil {
		return nil, err
	}
	epoll, err := b.newEpoll()
	if err != nil {
		b.Close()
		return nil, err
	}
	b.Polled.Store(&kernel.Descriptor{FD: epoll})
	if b.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err == nil {
		err = unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, b.wake, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(b.wake)})
	}
	if err != nil {
		b.Close()
		return nil, fail.System("making an eventfd for local wakes", err)
	}
	b.Poll()
	return b, nil
}

// newEpoll creates an epoll that contains the eventfd.
func (b *Own) newEpoll() (int, error) {
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return -1, fail.System("making an epoll", err)
	}
	event := &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLOUT | unix.EPOLLET, Fd: int32(b.Eventfd)}
	if err := unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, b.Eventfd, event); err != nil {
		unix.Close(epoll)
		return -1, fail.System("waiting for an eventfd", err)
	}
	return epoll, nil
}

// Open returns the epoll, and creates it if there is none. It reports its first event immediately, so that no earlier
// ring is lost.
func (b *Own) Open() (*kernel.Descriptor, error) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	if p := b.Polled.Load(); p != nil {
		return p, nil
	}
	epoll, err := b.newEpoll()
	if err != nil {
		return nil, err
	}
	p, err := kernel.NewDescriptor(epoll, "pelton doorbell")
	if err == nil {
		b.Polled.Store(p)
	}
	return p, err
}

// ringsMax limits the rings that are taken at a time from one socket or FIFO. If a peer rings faster than this side
// takes them, the doorbell rings on, which costs an iteration of the waiting goroutine and no more.
const ringsMax = 64

// harvest takes the events that have come, or come within timeout milliseconds; -1: it waits without limit. It returns
// false if none of them is a ring.
func (b *Own) harvest(epoll uintptr, timeout int) (isRung bool) {
	for {
		var n uintptr
		var errno unix.Errno
		if timeout != 0 {
			n, _, errno = unix.Syscall6(unix.SYS_EPOLL_PWAIT, epoll, uintptr(unsafe.Pointer(&b.events)),
				uintptr(len(b.events)), uintptr(timeout), 0, 0)
		} else {
			// Without telling the scheduler, as the call does not wait: the kernel takes no lock for it that a peer
			// could hold.
			n, _, errno = unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, epoll, uintptr(unsafe.Pointer(&b.events)),
				uintptr(len(b.events)), 0, 0, 0)
		}
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 {
			return true
		}
		for _, event := range b.events[:n] {
			isRung = isRung || int(event.Fd) != b.wake
			if int(event.Fd) != b.Eventfd && int(event.Fd) != b.wake {
				b.drainSocket(int(event.Fd))
			}
		}
		return isRung
	}
}

// Poll takes the rings that have come, without waiting. It returns false if there are none.
func (b *Own) Poll() bool {
	p := b.Polled.Load()
	return p != nil && b.drain(uintptr(p.FD))
}

// Pairs returns the number of socket pairs that it polls.
func (b *Own) Pairs() int {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	return len(b.pairUsers)
}

// drainSocket takes what one peer sent to its doorbell, and closes descriptors in it. At its end, because the peer
// shut it down, closed it or sent a packet of no bytes, this side no longer polls it.
func (b *Own) drainSocket(fd int) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	uid, isThere := b.pairUsers[fd]
	if !isThere {
		return
	}
	var ring [1]byte
	for range ringsMax {
		n, fds, _, err := kernel.TryReceive(fd, ring[:])
		if err == unix.EAGAIN {
			return
		}
		kernel.Deferred.CloseAll(uid, fds)
		if err != nil || n == 0 || kernel.Deferred.Blocked(uid) != "" {
			b.removePair(fd)
			return
		}
	}
}

// removePair is called under the mutex.
func (b *Own) removePair(fd int) {
	if _, isThere := b.pairUsers[fd]; isThere && !b.isClosed {
		_ = unix.EpollCtl(b.Polled.Load().FD, unix.EPOLL_CTL_DEL, fd, nil)
	}
	delete(b.pairUsers, fd)
}

// Close closes the doorbell. Its ends of socket pairs are closed with their links, before or after this.
func (b *Own) Close() {
	b.mutex.Lock()
	isAgain := b.isClosed
	b.isClosed = true
	b.mutex.Unlock()
	if isAgain {
		return
	}
	// Without the mutex, because it waits for a harvest. Of a doorbell whose goroutine blocks in the kernel, that
	// goroutine's handle has made sure that none does.
	if p := b.Polled.Load(); p != nil && p.File != nil {
		_ = p.File.Close()
	} else if p != nil {
		unix.Close(p.FD)
	}
	for _, fd := range []int{b.Eventfd, b.wake} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

// Pair is a doorbell for a single peer of another user: this side's end, and the peer's until the handshake is over.
type Pair struct {
	Of         *Own
	own, Peers int
	uid        int
}

// NewPair creates a socket pair for one peer of another user, and polls this side's end.
func (b *Own) NewPair(uid int) (Pair, error) {
	p, err := b.Open()
	if err != nil {
		return Pair{}, err
	}
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return Pair{}, fail.System("making a socket pair", err)
	}
	// An error means an older kernel, where descriptors are received and closed.
	_ = kernel.PermitDescriptors(ends[0], false)
	b.mutex.Lock()
	defer b.mutex.Unlock()
	if err := unix.EpollCtl(p.FD, unix.EPOLL_CTL_ADD, ends[0],
		&unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(ends[0])}); err != nil {
		kernel.CloseAll(ends[:])
		return Pair{}, fail.System("waiting for a socket pair", err)
	}
	b.pairUsers[ends[0]] = uid
	return Pair{b, ends[0], ends[1], uid}, nil
}

// Close closes this side's end, once the peer's has been sent or closed. It does not wait, whatever the peer has
// queued.
func (d Pair) Close() {
	d.Of.mutex.Lock()
	d.Of.removePair(d.own)
	d.Of.mutex.Unlock()
	kernel.HangUp(d.own, d.uid)
}

// NewFIFO creates the doorbell of a path channel's endpoint: a FIFO, open for reading and writing, so that it never
// hangs up. It owns fd.
func NewFIFO(fd int) (*Own, error) {
	p, err := kernel.NewDescriptor(fd, "pelton doorbell")
	if err != nil {
		return nil, err
	}
	b := &Own{Eventfd: -1, wake: -1}
	b.Polled.Store(p)
	rings := make([]byte, 1024)
	b.drain = func(fd uintptr) bool {
		for drained := 0; drained < ringsMax; {
			n, err := unix.Read(int(fd), rings)
			if err == unix.EINTR {
				continue
			}
			if drained++; err != nil {
				return drained > 1 || err != unix.EAGAIN
			}
			// A short read has emptied it. A later write rings again.
			if n < len(rings) {
				break
			}
		}
		return true
	}
	return b, nil
}

// Wake ends the present sleep or the next one. The caller has stored the reason before: see ClearWake.
func (b *Own) Wake() {
	p := b.Polled.Load()
	if p == nil {
		return
	}
	// In this order: otherwise ClearWake could come between, and the deadline, or the count, would stay.
	if b.wake >= 0 {
		b.writeWake()
	} else {
		_ = p.File.SetReadDeadline(kernel.LongAgo)
	}
	b.isWoken.Store(true)
}

// writeWake adds 1 to the eventfd of local wakes. Only ClearWake takes from it, so it never waits.
func (b *Own) writeWake() {
	one := [8]byte{0: 1}
	b.mutex.Lock()
	defer b.mutex.Unlock()
	if !b.isClosed {
		_, _, _ = unix.RawSyscall(unix.SYS_WRITE, uintptr(b.wake), uintptr(unsafe.Pointer(&one)), 8)
	}
}

// ClearWake forgets local wakes. The waiting goroutine polls for their reasons after this and before it sleeps, so it
// misses none.
func (b *Own) ClearWake() {
	if !b.isWoken.Swap(false) {
		return
	}
	if b.wake >= 0 {
		var count [8]byte
		_, _, _ = unix.RawSyscall(unix.SYS_READ, uintptr(b.wake), uintptr(unsafe.Pointer(&count)), 8)
		return
	}
	if p := b.Polled.Load(); p != nil {
		_ = p.File.SetReadDeadline(time.Time{})
	}
}

// yieldEvery is the time between two yields of a goroutine that yields rarely. A guess: a tenth of the time after which
// the runtime preempts a goroutine.
const yieldEvery = uint64(time.Millisecond)

// Yield lets goroutines that are ready run before this one polls on, or blocks in the kernel: the runtime gives a
// blocked goroutine's place, one of GOMAXPROCS, to another after 20 µs to some 20 ms. But a yield also wakes a thread,
// if the runtime has a free place for it, and that thread takes this goroutine along, often to a processor that is not
// its client's.
func (b *Own) Yield() {
	if b.YieldsRarely {
		now := kernel.MonotonicNS()
		if b.places > 1 && now-b.yieldedNS < yieldEvery {
			return
		}
		b.yieldedNS, b.places = now, runtime.GOMAXPROCS(0)
	}
	runtime.Gosched()
}

// Sleep waits for a ring and takes it, for a local wake, or, if isTimed, for a millisecond at most. Whatever ended
// it, the caller polls. isRung: it was a ring, which no wait needs to know.
func (b *Own) Sleep(isTimed bool) (isRung bool) {
	p := b.Polled.Load()
	if p == nil {
		var err error
		if p, err = b.Open(); err != nil {
			// There is no free descriptor: the caller tries again.
			time.Sleep(time.Millisecond)
			return false
		}
		// An earlier wake found no deadline to set; the first event ends this sleep.
	}
	if b.wake >= 0 {
		timeout := -1
		if isTimed {
			timeout = 1
		}
		b.Yield()
		return b.harvest(uintptr(p.FD), timeout)
	}
	if isTimed {
		b.isWoken.Store(true)
		_ = p.File.SetReadDeadline(time.Now().Add(time.Millisecond))
	}
	return p.Raw.Read(b.drain) == nil
}
