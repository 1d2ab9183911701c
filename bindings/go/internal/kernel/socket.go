package kernel

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Peer identifies the process at the other end. Package pelton documents its fields.
type Peer = struct{ PID, UID int }

// ErrTooLong reports a path that no socket address can have.
var ErrTooLong = errors.New("the path is too long for a socket")

func newSocket(path string) (int, *unix.SockaddrUnix, error) {
	if path[0] == '@' {
		// Package unix would use an abstract name otherwise.
		path = "./" + path
	}
	if len(path) > 107 {
		return -1, nil, ErrTooLong
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		_ = PermitDescriptors(fd, false)
	}
	return fd, &unix.SockaddrUnix{Name: path}, err
}

// SoPassRights is SO_PASSRIGHTS, of Linux 6.16. A test sets another number, to have the kernel behave like an older
// one.
var SoPassRights = 83

// PermitDescriptors sets whether a peer may queue descriptors in the socket. None may before its user is known; an
// accepted socket inherits that from its listener. An error means that this kernel does not have the option, and any
// peer may.
func PermitDescriptors(fd int, isPermitted bool) error {
	value := 0
	if isPermitted {
		value = 1
	}
	return unix.SetsockoptInt(fd, unix.SOL_SOCKET, SoPassRights, value)
}

// backlog is the number of connections that the kernel keeps until they are accepted.
const backlog = 128

// RefuseOne accepts a connection and hangs up, after it has sent the packet if there is one. It returns false if it
// could not.
func (p *Descriptor) RefuseOne(packet []byte) bool {
	fd := -1
	_ = p.Raw.Control(func(listener uintptr) {
		fd, _, _ = unix.Accept4(int(listener), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
	})
	if fd < 0 {
		return false
	}
	if packet != nil {
		_ = TrySend(fd, packet)
	}
	HangUp(fd, UserOf(fd))
	return true
}

// ListenAt creates a listening socket at a free path. If it permitsOthers, every user whom the directory lets in can
// connect, whatever the umask, unless other users may write the directory. Otherwise the umask decides.
func ListenAt(path string, permitsOthers bool) (int, error) {
	fd, address, err := newSocket(path)
	if err != nil {
		return -1, err
	}
	if err := unix.Bind(fd, address); err != nil {
		unix.Close(fd)
		return -1, err
	}
	if permitsOthers {
		err = permitOthers(path)
	}
	if err == nil {
		err = unix.Listen(fd, backlog)
	}
	if err != nil {
		unix.Close(fd)
		_ = unix.Unlink(path)
		return -1, err
	}
	return fd, nil
}

// permitOthers lets every user connect to the socket at path, if only this user or root may write its directory: in any
// other, such as /tmp, another process may have replaced the socket, and everybody could reach it. What is no socket of
// this user stays as it is.
func permitOthers(path string) error {
	var directory, found unix.Stat_t
	if err := unix.Stat(filepath.Dir(path), &directory); err != nil {
		return err
	}
	own := uint32(os.Geteuid())
	if directory.Mode&0o022 != 0 || directory.Uid != own && directory.Uid != 0 {
		return nil
	}
	fd, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Fstat(fd, &found); err != nil {
		return err
	}
	if found.Mode&unix.S_IFMT != unix.S_IFSOCK || found.Uid != own {
		return nil
	}
	// fchmod takes no such descriptor, and before Linux 6.6 no chmod spares what a symbolic link leads to.
	if err := unix.Chmod(fmt.Sprintf("/proc/self/fd/%d", fd), 0o666); err != nil {
		return errors.New("letting other users connect, by /proc: " + err.Error())
	}
	return nil
}

// ConnectTo connects to the socket at a path, without waiting.
func ConnectTo(path string) (int, error) {
	fd, address, err := newSocket(path)
	if err != nil {
		return -1, err
	}
	if err := unix.Connect(fd, address); err != nil {
		// No peer could have filled its queue.
		unix.Close(fd)
		return -1, err
	}
	// The process that listens may have inherited the socket: then the kernel names the one that created it.
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PASSCRED, 1)
	return fd, nil
}

// PeerOf returns the process that connected to, or created, the other end of a connection.
func PeerOf(fd int) (Peer, error) {
	credentials, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return Peer{}, err
	}
	return Peer{PID: int(credentials.Pid), UID: int(credentials.Uid)}, nil
}

// UserOf returns the user of a connection that is not used further; UnknownUser if the kernel does not report it.
func UserOf(fd int) int {
	peer, err := PeerOf(fd)
	if err != nil {
		return UnknownUser
	}
	return peer.UID
}

// ProcessOf returns a descriptor that is readable once the peer's process has ended. It returns -1 where the kernel
// or the pid namespace does not permit one; then the socket's hang-up has to do.
func ProcessOf(socket int, peer Peer) (int, error) {
	const soPeerPidfd = 77
	if creator, err := PeerOf(socket); err == nil && creator == peer {
		if fd, err := unix.GetsockoptInt(socket, unix.SOL_SOCKET, soPeerPidfd); err == nil && fd >= 0 {
			return fd, nil
		}
	}
	// Before Linux 6.5, and for a process that inherited the listening socket, by number. If another process got that number meanwhile, the socket has hung up.
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

// TrySend sends one packet, with descriptors.
func TrySend(socket int, packet []byte, fds ...int) error {
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

// ScmMaxFD is the kernel's limit of descriptors in a packet. With less space the kernel would close those that do not
// fit, inside this call.
const ScmMaxFD = 253

// TryReceive receives one packet, and reports whether some descriptors did not fit into this process. unix.EAGAIN: no
// packet is there. 0 bytes: the peer is gone.
func TryReceive(socket int, packet []byte) (bytes int, fds []int, isCut bool, err error) {
	bytes, fds, isCut, _, err = TryReceiveFrom(socket, packet)
	return bytes, fds, isCut, err
}

// TryReceiveFrom does the same, and returns the process that sent the packet, if a socket of [ConnectTo] reports that.
func TryReceiveFrom(socket int, packet []byte) (bytes int, fds []int, isCut bool, sender *Peer, err error) {
	control := make([]byte, unix.CmsgSpace(4*ScmMaxFD)+unix.CmsgSpace(unix.SizeofUcred))
	for isReset := false; ; {
		n, oobn, flags, _, err := unix.Recvmsg(socket, packet, control, unix.MSG_CMSG_CLOEXEC|unix.MSG_DONTWAIT)
		switch err {
		case nil:
			messages, err := unix.ParseSocketControlMessage(control[:oobn])
			if err != nil {
				return 0, nil, false, nil, err
			}
			for _, message := range messages {
				if some, err := unix.ParseUnixRights(&message); err == nil {
					fds = append(fds, some...)
				} else if credentials, err := unix.ParseUnixCredentials(&message); err == nil {
					sender = &Peer{PID: int(credentials.Pid), UID: int(credentials.Uid)}
				}
			}
			return n, fds, flags&unix.MSG_CTRUNC != 0, sender, nil
		case unix.EINTR:
		case unix.ECONNRESET:
			// The kernel reports this once, if the peer closed without reading our packets. What it sent before is
			// still there.
			if isReset {
				return 0, nil, false, nil, nil
			}
			isReset = true
		default:
			return 0, nil, false, nil, err
		}
	}
}

// CloseAll closes this process's own descriptors.
func CloseAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}
