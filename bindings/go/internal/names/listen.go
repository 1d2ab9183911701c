package names

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/logs"
	"golang.org/x/sys/unix"
)

// clear removes a socket where no process listens. It fails if one does.
func (n Name) clear(path string) error {
	found, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return n.Failed("looking at", path, err)
	case found.Mode()&fs.ModeSocket == 0:
		return n.notASocket(path)
	}
	fd, err := kernel.ConnectTo(path)
	switch {
	case err == nil:
		peer, _ := kernel.PeerOf(fd)
		kernel.HangUp(fd, peer.UID)
		return fail.New(fail.ErrInUse, "%s is in use by a listener in process %d: stop that one, or choose another name", n.text, peer.PID)
	case errors.Is(err, unix.EAGAIN):
		return fail.New(fail.ErrInUse, "%s is in use by a listener that is busy: stop that one, or choose another name",
			n.text)
	case errors.Is(err, unix.ENOENT):
		return nil
	case errors.Is(err, unix.ECONNREFUSED):
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return n.Failed("removing the stale socket", path, err)
		}
		return nil
	}
	return n.Failed("connecting to", path, err)
}

// Listeners numbers this process's sockets in the directories of short names.
var Listeners atomic.Uint32

// Listen creates a socket under the name, and removes those of dead listeners. With isShared, other processes may
// listen under a short name too. With permitsOthers, the mode of a socket at a path lets other users connect; the
// directory of a short name never does. A socket of that name that this process has inherited comes first; its mode is
// the business of the process that created it.
func (n Name) Listen(isShared, permitsOthers bool) (*Listening, error) {
	if bound, err := n.listenByInherited(); bound != nil || err != nil {
		return bound, err
	}
	if n.Path != "" {
		lock, err := lockDirectory(filepath.Dir(n.Path))
		if err != nil {
			return nil, n.Failed("opening", filepath.Dir(n.Path), err)
		}
		defer unix.Close(lock)
		if err := n.clear(n.Path); err != nil {
			return nil, err
		}
		return n.bind(n.Path, permitsOthers)
	}
	for {
		if _, err := n.ownDirectory(n.base, true); err != nil {
			return nil, err
		}
		bound, err := n.listenInDirectory(isShared)
		// A listener that closes removes the directories. Then they are created again.
		if !errors.Is(err, errDirectoryGone) {
			return bound, err
		}
	}
}

var errDirectoryGone = errors.New("the directory has gone")

func (n Name) listenInDirectory(isShared bool) (*Listening, error) {
	if _, err := n.ownDirectory(n.directory, true); err != nil {
		return nil, err
	}
	lock, err := lockDirectory(n.directory)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errDirectoryGone
	}
	if err != nil {
		return nil, n.Failed("opening", n.directory, err)
	}
	defer unix.Close(lock)
	paths, err := n.Sockets()
	if err != nil {
		return nil, err
	}
	// Another process may hold the lock of a new directory: its socket, before it listens, would be taken for a dead
	// one's.
	if err := n.check(lock); err != nil {
		return nil, err
	}
	for _, path := range paths {
		if err := n.clear(path); err != nil && !(isShared && errors.Is(err, fail.ErrInUse)) {
			return nil, err
		}
	}
	path := filepath.Join(n.directory, fmt.Sprintf("%d.%d", os.Getpid(), Listeners.Add(1)-1))
	bound, err := n.bind(path, false)
	// As above. While it contains a socket, no process removes it.
	if bound != nil || errors.Is(err, fail.ErrName) {
		if gone := n.check(lock); gone != nil {
			if bound != nil {
				bound.Close()
			}
			return nil, gone
		}
	}
	return bound, err
}

// check returns errDirectoryGone unless fd is the directory at the path now. If the system cannot say so, it returns
// another error: otherwise the caller would retry for ever.
func (n Name) check(fd int) error {
	var own, there unix.Stat_t
	err := unix.Fstat(fd, &own)
	if err == nil {
		err = unix.Lstat(n.directory, &there)
	}
	if err == unix.ENOENT || err == nil && (own.Dev != there.Dev || own.Ino != there.Ino) {
		return errDirectoryGone
	}
	if err != nil {
		return n.Failed("looking at", n.directory, err)
	}
	return nil
}

func (n Name) bind(path string, permitsOthers bool) (*Listening, error) {
	fd, err := kernel.ListenAt(path, permitsOthers)
	if err != nil {
		return nil, n.Failed("listening at", path, err)
	}
	var stat unix.Stat_t
	if err := unix.Lstat(path, &stat); err != nil {
		unix.Close(fd)
		return nil, n.Failed("looking at", path, err)
	}
	b := &Listening{Path: path, device: uint64(stat.Dev), inode: stat.Ino}
	// Accepted sockets inherit it, and closing this one closes those that wait to be accepted.
	b.closesQuickly = kernel.PermitDescriptors(fd, false) == nil
	if b.Reserve, err = kernel.NewReserve(); err != nil {
		unix.Close(fd)
		_ = os.Remove(path)
		return nil, err
	}
	if b.Socket, err = kernel.NewDescriptor(fd, "pelton listener"); err != nil {
		b.Reserve.Close()
		_ = os.Remove(path)
		return nil, err
	}
	if n.Path == "" {
		b.directories = []string{n.directory, n.base}
	}
	return b, nil
}

// Listening is a listening socket, and what to remove with it.
type Listening struct {
	Socket        *kernel.Descriptor
	Reserve       *kernel.Reserve
	Path          string
	device, inode uint64
	directories   []string
	// No queue of a socket that waits to be accepted contains descriptors.
	closesQuickly bool
	// The number of the inherited socket; 0: this process has created it.
	inherited int
}

// Close stops listening, and removes the socket, unless it is inherited.
func (b *Listening) Close() {
	logs.Refusals.End("pelton: a listener ends")
	if b.inherited != 0 {
		b.leave()
		return
	}
	// From now on the kernel refuses connections.
	_ = b.Socket.Raw.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_RDWR) })
	b.Reserve.Close()
	if !b.closesQuickly {
		// The queues of those that wait may contain anything. The socket itself must be closed here: otherwise the
		// goroutine that waits for it would close it.
		for b.Socket.RefuseOne(nil) {
		}
	}
	_ = b.Socket.File.Close()
	var stat unix.Stat_t
	// Only if it is still this listener's.
	if err := unix.Lstat(b.Path, &stat); err == nil && uint64(stat.Dev) == b.device && stat.Ino == b.inode {
		_ = os.Remove(b.Path)
	}
	for _, directory := range b.directories {
		// It fails while others are in it, as it should.
		_ = syscall.Rmdir(directory)
	}
}

// lockDirectory excludes other listeners from a directory until the returned descriptor is closed.
func lockDirectory(directory string) (int, error) {
	fd, err := unix.Open(directory, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	// Any process that can open the directory can hold the lock, so this wait has a limit.
	for range 200 {
		switch err = unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB); err {
		case nil:
			return fd, nil
		case unix.EWOULDBLOCK, unix.EINTR:
			time.Sleep(10 * time.Millisecond)
		default:
			unix.Close(fd)
			return -1, err
		}
	}
	unix.Close(fd)
	return -1, fmt.Errorf("another process has kept it locked for two seconds, see `lsof`, or choose another directory: %w", unix.EBUSY)
}
