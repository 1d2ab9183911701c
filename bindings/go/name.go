package pelton

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"pelton/internal/fail"
)

// Names and the sockets behind them: a short name is a directory of sockets, unix:PATH is one socket.

type name struct {
	text string
	// Of a socket.
	path string
	// Of a short name: the directory of its sockets, and the one that has it.
	directory, base string
}

func parseName(text string) (name, error) {
	wrong := func(problem string) (name, error) { return name{}, fail.New(fail.ErrName, "%q %s", text, problem) }
	if path, ok := strings.CutPrefix(text, "unix:"); ok {
		if path == "" || strings.ContainsRune(path, 0) {
			return wrong("names no socket: write unix:PATH")
		}
		return name{text: text, path: path}, nil
	}
	if scheme, _, ok := strings.Cut(text, ":"); ok {
		if scheme == "path" {
			return wrong("is a channel in a directory, nobody's to listen at: either side opens it, by CreateSender, CreateReceiver, OpenSender or OpenReceiver")
		}
		return wrong(fmt.Sprintf("begins with %q: write unix:PATH, or a short name without a colon", scheme))
	}
	fits := func(c rune) bool {
		return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.ContainsRune("._-", c)
	}
	if text == "" || len(text) > 64 || text[0] == '.' || strings.ContainsFunc(text, func(c rune) bool { return !fits(c) }) {
		return wrong("is no short name: use 1 to 64 letters, digits, '.', '_' or '-', not beginning with '.', or unix:PATH")
	}
	base := os.Getenv("XDG_RUNTIME_DIR")
	if filepath.IsAbs(base) {
		base = filepath.Join(base, "pelton")
	} else {
		base = filepath.Join(os.TempDir(), fmt.Sprintf("pelton-%d", os.Geteuid()))
	}
	return name{text: text, base: base, directory: filepath.Join(base, text)}, nil
}

// place is the name, and where a short one is looked for: another user, or a service's environment, has another place.
func (n name) place() string {
	if n.path != "" {
		return n.text
	}
	return fmt.Sprintf("%s (a socket in %s)", n.text, n.directory)
}

func (n name) failed(what, path string, err error) error {
	switch {
	case errors.Is(err, unix.ENAMETOOLONG), errors.Is(err, errTooLong):
		return fail.New(fail.ErrName, "%q is a socket path of %d bytes, a Unix socket's has at most 107: choose a shorter one", n.text, len(path))
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR):
		return fail.New(fail.ErrName, "%q needs the directory of %s, which is not there: make it first", n.text, path)
	}
	return fail.System(what+" "+path, err)
}

func (n name) noSocket(path string) error {
	return fail.New(fail.ErrName, "%q is %s, which exists and is not a socket: choose another path", n.text, path)
}

// sockets is where somebody may listen, in the order of their names.
func (n name) sockets() ([]string, error) {
	if n.path != "" {
		return []string{n.path}, nil
	}
	if there, err := n.ownDirectory(n.base, false); err != nil || !there {
		return nil, err
	}
	entries, err := os.ReadDir(n.directory)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, nil
		}
		return nil, n.failed("reading", n.directory, err)
	}
	var paths []string
	for _, entry := range entries {
		if entry.Type()&fs.ModeSocket != 0 {
			paths = append(paths, filepath.Join(n.directory, entry.Name()))
		}
	}
	return paths, nil
}

// connect finds a live listener; -1 when there is none.
func (n name) connect() (int, error) {
	paths, err := n.sockets()
	if err != nil {
		return -1, err
	}
	for _, path := range paths {
		fd, err := connectTo(path)
		switch {
		case err == nil:
			return fd, nil
		case errors.Is(err, unix.ECONNREFUSED) && !isSocket(path):
			return -1, n.noSocket(path)
		case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.ENOENT), errors.Is(err, unix.EAGAIN):
			// Gone, never there, or left behind by a process that died; a full backlog is a listener without time.
		default:
			return -1, n.failed("connecting to", path, err)
		}
	}
	return -1, nil
}

// isSocket says whether there is one, or nothing any more.
func isSocket(path string) bool {
	found, err := os.Stat(path)
	return err != nil || found.Mode()&fs.ModeSocket != 0
}

// clear removes a socket that nobody listens at; a live one is refused.
func (n name) clear(path string) error {
	found, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return n.failed("looking at", path, err)
	case found.Mode()&fs.ModeSocket == 0:
		return n.noSocket(path)
	}
	fd, err := connectTo(path)
	switch {
	case err == nil:
		peer, _ := peerOf(fd)
		hangUp(fd, peer.UID)
		return fail.New(fail.ErrInUse, "%s is in use by a listener in process %d: stop that one, or choose another name", n.text, peer.PID)
	case errors.Is(err, unix.EAGAIN):
		return fail.New(fail.ErrInUse, "%s is in use by a listener that is busy: stop that one, or choose another name", n.text)
	case errors.Is(err, unix.ENOENT):
		return nil
	case errors.Is(err, unix.ECONNREFUSED):
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return n.failed("removing the stale socket", path, err)
		}
		return nil
	}
	return n.failed("connecting to", path, err)
}

// listeners numbers the sockets of this process in the directories of short names.
var listeners atomic.Uint32

// listen makes a socket under the name, replacing what dead listeners left behind; if it isShared, beside others that listen under a short
// one.
func (n name) listen(isShared bool) (*bound, error) {
	if n.path != "" {
		lock, err := lockDirectory(filepath.Dir(n.path))
		if err != nil {
			return nil, n.failed("opening", filepath.Dir(n.path), err)
		}
		defer unix.Close(lock)
		if err := n.clear(n.path); err != nil {
			return nil, err
		}
		return n.bind(n.path)
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

func (n name) listenInDirectory(isShared bool) (*bound, error) {
	if _, err := n.ownDirectory(n.directory, true); err != nil {
		return nil, err
	}
	lock, err := lockDirectory(n.directory)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errDirectoryGone
	}
	if err != nil {
		return nil, n.failed("opening", n.directory, err)
	}
	defer unix.Close(lock)
	paths, err := n.sockets()
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
	path := filepath.Join(n.directory, fmt.Sprintf("%d.%d", os.Getpid(), listeners.Add(1)-1))
	bound, err := n.bind(path)
	// As above. While a socket is in it, nobody removes it.
	if bound != nil || errors.Is(err, fail.ErrName) {
		if gone := n.check(lock); gone != nil {
			if bound != nil {
				bound.close()
			}
			return nil, gone
		}
	}
	return bound, err
}

// check returns errDirectoryGone unless fd is the directory that stands there now. Where the system does not say so it fails with that: then
// trying again would not end.
func (n name) check(fd int) error {
	var own, there unix.Stat_t
	err := unix.Fstat(fd, &own)
	if err == nil {
		err = unix.Lstat(n.directory, &there)
	}
	if err == unix.ENOENT || err == nil && (own.Dev != there.Dev || own.Ino != there.Ino) {
		return errDirectoryGone
	}
	if err != nil {
		return n.failed("looking at", n.directory, err)
	}
	return nil
}

func (n name) bind(path string) (*bound, error) {
	fd, err := listenAt(path)
	if err != nil {
		return nil, n.failed("listening at", path, err)
	}
	var stat unix.Stat_t
	if err := unix.Lstat(path, &stat); err != nil {
		unix.Close(fd)
		return nil, n.failed("looking at", path, err)
	}
	b := &bound{path: path, device: uint64(stat.Dev), inode: stat.Ino}
	// The sockets that wait to be accepted inherit it, and closing this one closes them.
	b.isQuick = permitDescriptors(fd, false) == nil
	if b.reserve, err = newReserve(); err != nil {
		unix.Close(fd)
		_ = os.Remove(path)
		return nil, err
	}
	if b.socket, err = newPolled(fd, "pelton listener"); err != nil {
		b.reserve.close()
		_ = os.Remove(path)
		return nil, err
	}
	if n.path == "" {
		b.directories = []string{n.directory, n.base}
	}
	return b, nil
}

// bound is a listening socket, and what to remove with it.
type bound struct {
	socket        *polled
	reserve       *reserve
	path          string
	device, inode uint64
	directories   []string
	// Nothing is queued in the sockets that wait to be accepted.
	isQuick bool
}

func (b *bound) close() {
	// From now on the kernel refuses connections.
	_ = b.socket.raw.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_RDWR) })
	b.reserve.close()
	if !b.isQuick {
		// Of those who wait the queues may hold anything. The socket itself cannot be closed elsewhere: whichever goroutine waits for it would.
		for b.socket.refuseOne(nil) {
		}
	}
	_ = b.socket.file.Close()
	var stat unix.Stat_t
	// Only if it is still ours.
	if err := unix.Lstat(b.path, &stat); err == nil && uint64(stat.Dev) == b.device && stat.Ino == b.inode {
		_ = os.Remove(b.path)
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

// ownDirectory says whether path is a directory that nobody else can enter; makes it when asked.
func (n name) ownDirectory(path string, make bool) (bool, error) {
	wrong := func(format string, args ...any) (bool, error) {
		return false, fail.New(fail.ErrName, "%q needs "+format, append([]any{n.text}, args...)...)
	}
	if make {
		err := os.Mkdir(path, 0o700)
		if path != n.base && errors.Is(err, fs.ErrNotExist) {
			return false, errDirectoryGone
		}
		if err != nil && !errors.Is(err, fs.ErrExist) {
			return wrong("the directory %s, which cannot be made: %v", path, err)
		}
	}
	var stat unix.Stat_t
	if err := unix.Lstat(path, &stat); err != nil {
		if err == unix.ENOENT {
			return false, nil
		}
		return wrong("the directory %s, which cannot be looked at: %v", path, err)
	}
	if why := unmapped(int(stat.Uid)); why != "" {
		return wrong("%s, which belongs to %s", path, why)
	}
	if stat.Mode&unix.S_IFMT != unix.S_IFDIR || int(stat.Uid) != os.Geteuid() || stat.Mode&0o077 != 0 {
		return wrong("%s to be a directory of uid %d with mode 700; found mode %o of uid %d: `chmod 700` it, or set XDG_RUNTIME_DIR",
			path, os.Geteuid(), stat.Mode, stat.Uid)
	}
	return true, nil
}
