package kernel

import (
	"fmt"
	"io"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Closing what came from peers. Such a descriptor may be anything, and close(2) of some blocks as long as the peer wants: of a TCP socket with
// SO_LINGER and unsent data, or of a file whose FUSE server does not answer. The same holds for a socket in whose queue such a
// descriptor lies. So a goroutine closes these, one for each user: a close that blocks delays the closes of this user alone.

const (
	// How many of a user's descriptors may wait for a close that blocks. More: the user is refused. A guess.
	ClosingMax = 64
	// A close that takes longer blocks. All others take microseconds; a guess.
	closeBlocksAfter = 100 * time.Millisecond
	// The user of a descriptor whose user is unknown.
	UnknownUser = -1
)

var Deferred = deferredCloses{users: map[int]*userCloses{}}

type deferredCloses struct {
	mutex sync.Mutex
	users map[int]*userCloses
}

// userCloses are those of one user; there are none once all are done.
type userCloses struct {
	waiting []io.Closer
	// When the one under way began.
	begun time.Time
}

// Close closes what that user sent. It does not wait.
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

// Blocked is why not to deal with a user: "", unless a close of what that user sent blocks, and too many wait for it.
func (c *deferredCloses) Blocked(uid int) string {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	of := c.users[uid]
	if of == nil || len(of.waiting) <= ClosingMax || time.Since(of.begun) < closeBlocksAfter {
		return ""
	}
	return fmt.Sprintf("closing what uid %d sent takes too long: %d descriptors wait", uid, len(of.waiting))
}

// IsIdle says whether all closes are done.
func (c *deferredCloses) IsIdle() bool {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	return len(c.users) == 0
}

type RawDescriptor int

func (d RawDescriptor) Close() error { return unix.Close(int(d)) }

// HangUp ends a connection with a user, whichever other process has the socket. It does not wait.
func HangUp(fd, uid int) {
	if shutDown(fd) {
		unix.Close(fd)
	} else {
		Deferred.Close(uid, RawDescriptor(fd))
	}
}

// HangUp is the same of a socket in the poller. Once it is closed this does nothing.
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

// shutDown ends a connection, so that nothing can be queued any more. True: nothing that is queued has descriptors, so a close does not block.
func shutDown(fd int) bool {
	_ = unix.Shutdown(fd, unix.SHUT_RDWR)
	// It never permitted any: of a user who was refused, for instance.
	if isPermitted, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, SoPassRights); err == nil && isPermitted == 0 {
		return true
	}
	// The sender's credentials are control data of each packet, so a packet of no bytes sets MSG_CTRUNC. The end of the queue does not.
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PASSCRED, 1); err != nil {
		return false
	}
	for range 2 {
		// Without room for control data: no descriptor is made of what is there.
		bytes, _, flags, _, err := unix.Recvmsg(fd, make([]byte, 1), nil, unix.MSG_PEEK|unix.MSG_DONTWAIT)
		if err != unix.ECONNRESET && err != unix.EINTR {
			return err == nil && bytes == 0 && flags&unix.MSG_CTRUNC == 0
		}
	}
	return false
}
