package kernel

import (
	"fmt"
	"io"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// A descriptor that a peer sent may be anything, and close(2) of some blocks as long as the peer wants: a TCP socket
// with SO_LINGER and unsent data, or a file whose FUSE server does not answer. The same holds for a socket with such
// a descriptor in its queue. So a goroutine for each user closes them: a close that blocks delays only this user's
// other closes.

const (
	// ClosingMax limits a user's descriptors that wait for a close that blocks. With more, the user is refused. A
	// guess.
	ClosingMax = 64
	// A close that takes longer blocks. Others take microseconds. A guess.
	closeBlocksAfter = 100 * time.Millisecond
	// UnknownUser stands for a user that the kernel did not report.
	UnknownUser = -1
)

// Deferred closes descriptors that came from peers.
var Deferred = deferredCloses{users: map[int]*userCloses{}}

type deferredCloses struct {
	mutex sync.Mutex
	users map[int]*userCloses
}

// userCloses are the pending closes of one user. It exists until all are done.
type userCloses struct {
	waiting []io.Closer
	// When the present close began.
	begun time.Time
}

// Close closes what the user sent. It does not wait.
func (c *deferredCloses) Close(uid int, what ...io.Closer) {
	if len(what) == 0 {
		return
	}
	c.mutex.Lock()
	defer c.mutex.Unlock()
	of := c.users[uid]
	if of == nil {
		of = &userCloses{begun: time.Now()}
		c.users[uid] = of
		go c.run(uid, of)
	}
	of.waiting = append(of.waiting, what...)
}

// CloseAll closes descriptors that the user sent. It does not wait.
func (c *deferredCloses) CloseAll(uid int, fds []int) {
	for _, fd := range fds {
		c.Close(uid, RawDescriptor(fd))
	}
}

func (c *deferredCloses) run(uid int, of *userCloses) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	for len(of.waiting) > 0 {
		next := of.waiting[0]
		of.waiting, of.begun = of.waiting[1:], time.Now()
		c.mutex.Unlock()
		_ = next.Close()
		c.mutex.Lock()
	}
	delete(c.users, uid)
}

// Blocked returns why to refuse a user: a close blocks, and too many descriptors wait for it. Otherwise "".
func (c *deferredCloses) Blocked(uid int) string {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	of := c.users[uid]
	if of == nil || len(of.waiting) <= ClosingMax || time.Since(of.begun) < closeBlocksAfter {
		return ""
	}
	return fmt.Sprintf("closing what uid %d sent takes too long: %d descriptors wait", uid, len(of.waiting))
}

// IsIdle reports whether all closes are done.
func (c *deferredCloses) IsIdle() bool {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	return len(c.users) == 0
}

// RawDescriptor is a descriptor as an io.Closer.
type RawDescriptor int

// Close closes the descriptor.
func (d RawDescriptor) Close() error { return unix.Close(int(d)) }

// HangUp ends a connection with a user, even if another process has the socket too. It does not wait.
func HangUp(fd, uid int) {
	if shutDown(fd) {
		unix.Close(fd)
	} else {
		Deferred.Close(uid, RawDescriptor(fd))
	}
}

// HangUp does the same for a registered socket. After the socket was closed it does nothing.
func (p *Descriptor) HangUp(uid int) {
	isQuick := false
	if err := p.Raw.Control(func(fd uintptr) { isQuick = shutDown(int(fd)) }); err != nil {
		return
	}
	if isQuick {
		_ = p.File.Close()
	} else {
		Deferred.Close(uid, p.File)
	}
}

// shutDown ends a connection, so that nothing more can be queued. It returns true if no descriptor is in the queue,
// so that a close does not block.
func shutDown(fd int) bool {
	_ = unix.Shutdown(fd, unix.SHUT_RDWR)
	// The option was never set, as for a refused user.
	if isPermitted, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, SoPassRights); err == nil && isPermitted == 0 {
		return true
	}
	// The sender's credentials are control data of each packet, so a packet of no bytes sets MSG_CTRUNC. The end of
	// the queue does not.
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PASSCRED, 1); err != nil {
		return false
	}
	for range 2 {
		// Without space for control data the kernel creates no descriptor.
		bytes, _, flags, _, err := unix.Recvmsg(fd, make([]byte, 1), nil, unix.MSG_PEEK|unix.MSG_DONTWAIT)
		if err != unix.ECONNRESET && err != unix.EINTR {
			return err == nil && bytes == 0 && flags&unix.MSG_CTRUNC == 0
		}
	}
	return false
}
