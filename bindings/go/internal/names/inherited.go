package names

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"sync"

	"github.com/pelton-ipc/pelton/bindings/go/internal/fail"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"golang.org/x/sys/unix"
)

// Listening sockets that another process has created and left open for this one, as systemd and `pelton run` do:
// LISTEN_FDS descriptors from 3 on, for the process that LISTEN_PID names. The variables stay set: a child has another
// process ID, so it takes nothing, and the descriptors are closed by exec once they are taken.

const (
	firstInherited = 3
	inheritedMax   = 65536
)

// inherited are the sockets of LISTEN_FDS that listeners of this process use, by their numbers. They stay open, so that
// this process can listen again.
var inherited struct {
	mutex  sync.Mutex
	isUsed map[int]bool
}

// inheritedSocket is an inherited socket with a path.
type inheritedSocket struct {
	fd   int
	path string
}

// listenByInherited listens by the socket of this name that this process has inherited, or returns nil.
func (n Name) listenByInherited() (*Listening, error) {
	if os.Getenv("LISTEN_PID") != strconv.Itoa(os.Getpid()) {
		return nil, nil
	}
	count, err := strconv.Atoi(os.Getenv("LISTEN_FDS"))
	if err != nil || count < 0 || count > inheritedMax {
		return nil, fail.System("listening at "+n.text+" by an inherited socket", errors.New("LISTEN_PID names this process, and LISTEN_FDS is "+
			strconv.Quote(os.Getenv("LISTEN_FDS"))+": wanted a number of descriptors, or neither variable"))
	}
	for fd := firstInherited; fd < firstInherited+count; fd++ {
		// Other descriptors are for other parts of the program.
		domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
		if err != nil || domain != unix.AF_UNIX {
			continue
		}
		address, err := unix.Getsockname(fd)
		if bound, ok := address.(*unix.SockaddrUnix); err == nil && ok && n.isAt(bound.Name) {
			return n.take(inheritedSocket{fd, bound.Name})
		}
	}
	return nil, nil
}

// isAt reports whether a socket at the path is one of this name.
func (n Name) isAt(path string) bool {
	// An abstract name, or none.
	if path == "" || path[0] == '@' {
		return false
	}
	if n.Path != "" {
		return isSame(path, n.Path)
	}
	return isSame(filepath.Dir(path), n.directory)
}

// isSame reports whether two paths lead to the same file. Equal ones also do if it does not exist here.
func isSame(one, other string) bool {
	var a, b unix.Stat_t
	return one == other ||
		unix.Stat(one, &a) == nil && unix.Stat(other, &b) == nil && a.Dev == b.Dev && a.Ino == b.Ino
}

func (n Name) take(socket inheritedSocket) (*Listening, error) {
	failed := func(err error) (*Listening, error) {
		return nil, fail.System("listening at "+n.text+" by descriptor "+strconv.Itoa(socket.fd)+" of LISTEN_FDS", err)
	}
	kind, _ := unix.GetsockoptInt(socket.fd, unix.SOL_SOCKET, unix.SO_TYPE)
	if kind != unix.SOCK_SEQPACKET {
		return failed(errors.New("it is no seqpacket socket: write ListenSequentialPacket= in the socket unit"))
	}
	if listens, _ := unix.GetsockoptInt(socket.fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN); listens == 0 {
		return failed(errors.New("it does not listen"))
	}
	inherited.mutex.Lock()
	defer inherited.mutex.Unlock()
	if inherited.isUsed[socket.fd] {
		return nil, fail.New(fail.ErrInUse, "%s is in use by a listener in this process: close that one, or choose another name", n.text)
	}
	unix.CloseOnExec(socket.fd)
	_ = kernel.PermitDescriptors(socket.fd, false)
	fd, err := unix.FcntlInt(uintptr(socket.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return failed(err)
	}
	b := &Listening{Path: socket.path, inherited: socket.fd}
	if b.Reserve, err = kernel.NewReserve(); err != nil {
		unix.Close(fd)
		return nil, err
	}
	if b.Socket, err = kernel.NewDescriptor(fd, "pelton listener"); err != nil {
		b.Reserve.Close()
		return nil, err
	}
	if inherited.isUsed == nil {
		inherited.isUsed = map[int]bool{}
	}
	inherited.isUsed[socket.fd] = true
	return b, nil
}

// leave lets this process listen by the socket again. The process that created it removes it; connections that wait are
// for the next process that listens by it.
func (b *Listening) leave() {
	b.Reserve.Close()
	_ = b.Socket.File.Close()
	inherited.mutex.Lock()
	defer inherited.mutex.Unlock()
	delete(inherited.isUsed, b.inherited)
}
