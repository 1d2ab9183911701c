package pelton

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
	"pelton/internal/fail"
)

// The Unix sockets that connect two sides: SOCK_SEQPACKET, with descriptors and credentials.

// Peer is who is at the other end.
type Peer struct {
	// PID is its process when it connected; 0 if that is of another pid namespace.
	PID int
	// UID is its user, as the kernel vouches for.
	UID int
}

var errTooLong = errors.New("the path is too long for a socket")

func newSocket(path string) (int, *unix.SockaddrUnix, error) {
	if path[0] == '@' {
		// Which package unix would take for an abstract name.
		path = "./" + path
	}
	if len(path) > 107 {
		return -1, nil, errTooLong
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		_ = permitDescriptors(fd, false)
	}
	return fd, &unix.SockaddrUnix{Name: path}, err
}

// soPassRights is SO_PASSRIGHTS, of Linux 6.16. A test sets another number, to have the kernel behave like an older one.
var soPassRights = 83

// permitDescriptors says whether a peer may queue descriptors in the socket. None may before its user is known; an accepted socket inherits that
// from the one that listens. An error: this kernel does not know the option, and any peer may.
func permitDescriptors(fd int, isPermitted bool) error {
	value := 0
	if isPermitted {
		value = 1
	}
	return unix.SetsockoptInt(fd, unix.SOL_SOCKET, soPassRights, value)
}

// backlog is how many connections the kernel keeps until they are accepted.
const backlog = 128

// refuseOne hangs up on the first who waits to be accepted, with a packet that says why if there is one. False: it could not.
func (p *polled) refuseOne(packet []byte) bool {
	fd := -1
	_ = p.raw.Control(func(listener uintptr) {
		fd, _, _ = unix.Accept4(int(listener), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
	})
	if fd < 0 {
		return false
	}
	if packet != nil {
		_ = trySend(fd, packet)
	}
	hangUp(fd, userOf(fd))
	return true
}

// listenAt makes a listening socket at a path where nothing is.
func listenAt(path string) (int, error) {
	fd, address, err := newSocket(path)
	if err != nil {
		return -1, err
	}
	if err := unix.Bind(fd, address); err != nil {
		unix.Close(fd)
		return -1, err
	}
	if err := unix.Listen(fd, backlog); err != nil {
		unix.Close(fd)
		_ = unix.Unlink(path)
		return -1, err
	}
	return fd, nil
}

func connectTo(path string) (int, error) {
	fd, address, err := newSocket(path)
	if err != nil {
		return -1, err
	}
	if err := unix.Connect(fd, address); err != nil {
		// It has no queue that anybody could have filled.
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func peerOf(fd int) (Peer, error) {
	credentials, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return Peer{}, err
	}
	return Peer{PID: int(credentials.Pid), UID: int(credentials.Uid)}, nil
}

// userOf is for a connection that is not used: nobody if the kernel does not say.
func userOf(fd int) int {
	peer, err := peerOf(fd)
	if err != nil {
		return nobody
	}
	return peer.UID
}

// processOf is a descriptor that is readable once the peer's process has ended; -1 where the kernel or the pid namespace does not
// let us have one: the socket's own hang-up must do then.
func processOf(socket int, peer Peer) (int, error) {
	const soPeerPidfd = 77
	if fd, err := unix.GetsockoptInt(socket, unix.SOL_SOCKET, soPeerPidfd); err == nil && fd >= 0 {
		return fd, nil
	}
	// Before Linux 6.5: by number, which could have been given to another process; then the socket has hung up.
	if peer.PID <= 0 {
		return -1, nil
	}
	fd, err := unix.PidfdOpen(peer.PID, 0)
	switch err {
	case nil:
		return fd, nil
	case unix.ESRCH, unix.EINVAL, unix.EPERM, unix.ENOSYS:
		return -1, nil
	}
	return -1, err
}

// trySend sends one packet, with descriptors.
func trySend(socket int, packet []byte, fds ...int) error {
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	for {
		err := unix.Sendmsg(socket, packet, rights, nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
		if err != unix.EINTR {
			return err
		}
	}
}

// scmMaxFD is the most descriptors that the kernel lets go with a packet. With less room the kernel itself would close those that do not fit, in this
// call.
const scmMaxFD = 253

// tryReceive receives one packet: how many bytes, the descriptors, and whether some did not fit into this process. unix.EAGAIN:
// nothing there now. 0 bytes: the peer has gone.
func tryReceive(socket int, packet []byte) (bytes int, fds []int, isCut bool, err error) {
	rights := make([]byte, unix.CmsgSpace(4*scmMaxFD))
	for isReset := false; ; {
		n, oobn, flags, _, err := unix.Recvmsg(socket, packet, rights, unix.MSG_CMSG_CLOEXEC|unix.MSG_DONTWAIT)
		switch err {
		case nil:
			messages, err := unix.ParseSocketControlMessage(rights[:oobn])
			if err != nil {
				return 0, nil, false, err
			}
			for _, message := range messages {
				if some, err := unix.ParseUnixRights(&message); err == nil {
					fds = append(fds, some...)
				}
			}
			return n, fds, flags&unix.MSG_CTRUNC != 0, nil
		case unix.EINTR:
		case unix.ECONNRESET:
			// Said once, of a peer that closed with packets of ours unread; what it sent before is still there.
			if isReset {
				return 0, nil, false, nil
			}
			isReset = true
		default:
			return 0, nil, false, err
		}
	}
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// isShortage says whether the system had no descriptor, or no memory, to accept a connection.
func isShortage(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM) || errors.Is(err, unix.ENOBUFS)
}

// isOutOfDescriptors says whether it was a descriptor: one that this process cannot have, or one too many in flight.
func isOutOfDescriptors(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ETOOMANYREFS)
}

// shortageText is for the peer that cannot be served.
func shortageText() string {
	var limit unix.Rlimit
	_ = unix.Getrlimit(unix.RLIMIT_NOFILE, &limit)
	return fmt.Sprintf("process %d has no descriptor left for one more peer (RLIMIT_NOFILE is %d): raise it there, or connect again later",
		os.Getpid(), limit.Cur)
}

const (
	// Descriptors that a handshake with one more peer opens at most at a time: 5 with a sender, 10 with a client. Two more are for another user's
	// doorbell and for a kernel before Linux 6.10.
	handshakeDescriptors = 12
	// The check may open one descriptor, and meanwhile the listener may accept a connection that it has checked before.
	checkDescriptors = 2
	// An eighth of RLIMIT_NOFILE, and at most this number, is the program's own.
	programDescriptorsMax = 64
)

// reserve is a descriptor that is kept for refusing peers when there is no other one.
type reserve struct {
	mutex sync.Mutex
	fd    int
}

func newReserve() (*reserve, error) {
	r := &reserve{}
	return r, fail.System("making an eventfd", r.open())
}

func (r *reserve) open() (err error) {
	if r.fd, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		r.fd = -1
	}
	return err
}

// leavesProgramIts reports whether so many handshakes at a time leave the program its own descriptors.
func (r *reserve) leavesProgramIts(handshakes int) bool {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return true
	}
	open, ok := r.openDescriptors()
	needed := checkDescriptors + handshakes*handshakeDescriptors
	return ok && uint64(open+needed)+min(limit.Cur/8, programDescriptorsMax) <= limit.Cur
}

// openDescriptors is the number of open descriptors: the size of /proc/self/fd from Linux 6.2 on. Before, and without /proc, the lowest free number stands
// for it, which is less if a descriptor of a higher number is open. False: no number is free.
func (r *reserve) openDescriptors() (int, bool) {
	var stat unix.Stat_t
	if err := unix.Stat("/proc/self/fd", &stat); err == nil && stat.Size > 0 {
		return int(stat.Size), true
	}
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if r.fd == -1 {
		_ = r.open()
	}
	if r.fd < 0 {
		return 0, false
	}
	lowest, err := unix.FcntlInt(uintptr(r.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return 0, false
	}
	unix.Close(lowest)
	return lowest, true
}

// give gives the descriptor up during do, which needs one. Without one, as another goroutine was faster, it does nothing.
func (r *reserve) give(do func()) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if r.fd == closedReserve {
		return
	}
	if r.fd >= 0 {
		unix.Close(r.fd)
		do()
	}
	_ = r.open()
}

const closedReserve = -2

func (r *reserve) close() {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if r.fd >= 0 {
		unix.Close(r.fd)
	}
	r.fd = closedReserve
}
