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

	"golang.org/x/sys/unix"
	"pelton/internal/fail"
	"pelton/internal/kernel"
)

// clear removes a socket that nobody listens at; a live one is refused.
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
		return fail.New(fail.ErrInUse, "%s is in use by a listener that is busy: stop that one, or choose another name", n.text)
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

// Listeners numbers the sockets of this process in the directories of short names.
var Listeners atomic.Uint32

// Listen makes a socket under the name, replacing what dead listeners left behind; if it isShared, beside others that listen under a short
// one.
func (n Name) Listen(isShared bool) (*Listening, error) {
	if n.Path != "" {
		lock, err := lockDirectory(filepath.Dir(n.Path))
		if err != nil {
			return nil, n.Failed("opening", filepath.Dir(n.Path), err)
		}
		defer unix.Close(lock)
		if err := n.clear(n.Path); err != nil {
			return nil, err
		}
		return n.bind(n.Path)
	}
	for {
		if _, err := n.ownDirectory(n.base, true); err != nil {
			return nil, err
		}
		bound, err := n.listenInDirectory(isShared)
		// A listener that goes removes the directories after itself, perhaps just now: then make them again.
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
	// Of one that was made anew another may have the lock: a socket at which nobody listens yet looks like one left behind.
	if err := n.check(lock); err != nil {
		return nil, err
	}
	for _, path := range paths {
		if err := n.clear(path); err != nil && !(isShared && errors.Is(err, fail.ErrInUse)) {
			return nil, err
		}
	}
	path := filepath.Join(n.directory, fmt.Sprintf("%d.%d", os.Getpid(), Listeners.Add(1)-1))
	bound, err := n.bind(path)
	// As above. While a socket is in it, nobody removes it.
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

// check returns errDirectoryGone unless fd is the directory that stands there now. Where the system does not say so it fails with that: then
// trying again would not end.
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

func (n Name) bind(path string) (*Listening, error) {
	fd, err := kernel.ListenAt(path)
	if err != nil {
		return nil, n.Failed("listening at", path, err)
	}
	var stat unix.Stat_t
	if err := unix.Lstat(path, &stat); err != nil {
		unix.Close(fd)
		return nil, n.Failed("looking at", path, err)
	}
	b := &Listening{Path: path, device: uint64(stat.Dev), inode: stat.Ino}
	// The sockets that wait to be accepted inherit it, and closing this one closes them.
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
	// Nothing is queued in the sockets that wait to be accepted.
	closesQuickly bool
}

func (b *Listening) Close() {
	// From now on the kernel refuses connections.
	_ = b.Socket.Raw.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_RDWR) })
	b.Reserve.Close()
	if !b.closesQuickly {
		// Of those who wait the queues may hold anything. The socket itself cannot be closed elsewhere: whichever goroutine waits for it would.
		for b.Socket.RefuseOne(nil) {
		}
	}
	_ = b.Socket.File.Close()
	var stat unix.Stat_t
	// Only if it is still ours.
	if err := unix.Lstat(b.Path, &stat); err == nil && uint64(stat.Dev) == b.device && stat.Ino == b.inode {
		_ = os.Remove(b.Path)
	}
	for _, directory := range b.directories {
		// Refused while others are in it, which is right.
		_ = syscall.Rmdir(directory)
	}
}

// lockDirectory holds off other listeners of a directory, until what it answers is closed.
func lockDirectory(directory string) (int, error) {
	fd, err := unix.Open(directory, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	// Whoever can open the directory can hold the lock: not for ever.
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
