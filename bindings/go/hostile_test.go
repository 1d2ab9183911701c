package pelton

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/pelton-ipc/pelton/bindings/go/internal/doorbell"
	"github.com/pelton-ipc/pelton/bindings/go/internal/handshake"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"github.com/pelton-ipc/pelton/bindings/go/internal/lane"
	"github.com/pelton-ipc/pelton/bindings/go/internal/memory"
	"github.com/pelton-ipc/pelton/bindings/go/internal/packet"
	"golang.org/x/sys/unix"
)

// Peers that send descriptors whose close blocks, or whose file system does not answer: they may delay themselves,
// and no other.

// lingering returns a TCP socket whose last close blocks for an hour: it lingers, and has data that the other end
// does not read. At the end of the test the connection is reset, and a close that blocks returns.
func lingering(t *testing.T) int {
	t.Helper()
	listener := must(net.Listen("tcp", "127.0.0.1:0"))
	defer listener.Close()
	fd := must(unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0))
	address := &unix.SockaddrInet4{Port: listener.Addr().(*net.TCPAddr).Port, Addr: [4]byte{127, 0, 0, 1}}
	if err := errors.Join(unix.Connect(fd, address), unix.SetNonblock(fd, true),
		unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1, Linger: 3600})); err != nil {
		t.Fatal(err)
	}
	other := must(listener.Accept())
	t.Cleanup(func() {
		_ = other.(*net.TCPConn).SetLinger(0)
		other.Close()
		closesEnd(t)
	})
	for {
		if _, err := unix.Write(fd, make([]byte, 1<<20)); err == unix.EAGAIN {
			return fd
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

// closesEnd waits until all deferred closes are done.
func closesEnd(t *testing.T) {
	t.Helper()
	for until := time.Now().Add(30 * time.Second); !kernel.Deferred.IsIdle(); runtime.Gosched() {
		if time.Now().After(until) {
			t.Fatal("closes still block")
		}
	}
}

// asUser runs a function as another user, in a thread of its own.
func asUser(t *testing.T, uid int, do func()) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can be another user: ./run test-go as root")
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		// Not unlocked: the thread ends with the goroutine.
		runtime.LockOSThread()
		if _, _, err := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), uintptr(uid), ^uintptr(0)); err != 0 {
			t.Error(err)
			return
		}
		do()
	}()
	<-done
}

// withoutPassRights has the kernel behave as before Linux 6.16 during the test.
func withoutPassRights(t *testing.T) {
	kernel.SoPassRights = 9999
	t.Cleanup(func() { kernel.SoPassRights = 83 })
}

// sendsRights sends a packet with descriptors, once the other side permits some, and closes this side's: those in
// flight are the last ones, unless the other side is faster.
func sendsRights(socket int, packet []byte, fds ...int) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		for until := time.Now().Add(10 * time.Second); kernel.TrySend(socket, packet, fds...) == unix.EPERM &&
			time.Now().Before(until); {
			runtime.Gosched()
		}
		kernel.CloseAll(fds)
	}()
	select {
	case <-done:
	case <-time.After(time.Second):
		// It was faster, so this close blocks, until the test's end.
	}
}

// serves checks that the receiver delivers an innocent sender's message, and closes, although the close of a
// descriptor takes hours.
func serves(t *testing.T, receiver *Receiver, innocent *Sender) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		for n := range 3 {
			if err := innocent.Send(ctx, payload(n, 5)); err != nil {
				done <- err
				return
			}
			message, err := receiver.Receive(ctx)
			if err != nil {
				done <- err
				return
			}
			message.Release()
		}
		done <- errors.Join(innocent.Close(), receiver.Close())
	}()
	select {
	case err := <-done:
		if err != nil {
			t.Fatal(err)
		}
	case <-ctx.Done():
		t.Fatal("the receiver is held up")
	}
}

// hostileSend sends a message with a descriptor.
func hostileSend(t *testing.T, sender *Sender, fd int) {
	t.Helper()
	p := packet.New(packet.KindDescriptors)
	p.Seq = sender.out.Lane.Tail().Seq
	sendsRights(sender.out.Link.Socket.FD, p.Encode(), fd)
	room, ok, err := sender.out.Lane.TryReserve(1, 1)
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	room[0] = 1
	if sender.out.Lane.Commit(1) == lane.Ring {
		sender.out.Link.Ring()
	}
}

func TestADescriptorWhoseCloseBlocksDelaysNoOther(t *testing.T) {
	segments := func(t *testing.T, page, ownDoorbell, data int) []int {
		const capacity = 1 << 16
		if page < 0 {
			page = must(memory.NewProducerPage(capacity, lane.MessageBytesLimit(capacity), 1, "")).FD
		}
		if ownDoorbell < 0 {
			ownDoorbell = must(unix.Eventfd(0, unix.EFD_CLOEXEC))
		}
		if data < 0 {
			data = must(memory.NewData(capacity, "")).FD
		}
		return []int{page, ownDoorbell, data}
	}
	offers := func(at int) func(t *testing.T, fd, socket int) {
		return func(t *testing.T, fd, socket int) {
			_ = kernel.TrySend(socket, hello(packet.RoleSender, 0))
			// Its own hello comes once descriptors are permitted.
			isReadyWithin(t, socket)
			three := []int{-1, -1, -1}
			three[at] = fd
			fds := segments(t, three[0], three[1], three[2])
			offer := packet.NewLane(packet.KindProducer, 1<<16, lane.MessageBytesLimit(1<<16), lane.Start, lane.Start)
			offer.Generation = 1
			sendsRights(socket, offer.Encode(), fds...)
		}
	}
	ways := map[string]func(t *testing.T, fd, socket int){
		"with HELLO": func(t *testing.T, fd, socket int) { sendsRights(socket, hello(packet.RoleSender, 0), fd) },
		"as a page":  offers(0), "as a doorbell": offers(1), "as data": offers(2),
		"with another packet": func(t *testing.T, fd, socket int) { sendsRights(socket, []byte("?"), fd) },
		"behind a packet of no bytes": func(t *testing.T, fd, socket int) {
			_ = kernel.TrySend(socket, []byte("?"))
			_ = kernel.TrySend(socket, nil)
			sendsRights(socket, nil, fd)
		},
	}
	for _, isOld := range []bool{false, true} {
		for way, does := range ways {
			t.Run(fmt.Sprintf("%s, old kernel: %v", way, isOld), func(t *testing.T) {
				if isOld {
					withoutPassRights(t)
				}
				name, ctx := place(t), soon(t)
				receiver := must(Gather(name, nil))
				t.Cleanup(func() { receiver.Close() })
				fd := lingering(t)
				innocent := must(ConnectSender(ctx, name, nil))
				socket := must(kernel.ConnectTo(strings.TrimPrefix(name, "unix:")))
				_ = kernel.PermitDescriptors(socket, true)
				// A handshake does not pass its first packet while this is held.
				isOffer := strings.HasPrefix(way, "as ")
				if !isOffer {
					receiver.registry.mutex.Lock()
				}
				does(t, fd, socket)
				unix.Close(socket)
				if !isOffer {
					receiver.registry.mutex.Unlock()
				}
				serves(t, receiver, innocent)
			})
		}
	}
}

func isReadyWithin(t *testing.T, fd int) {
	t.Helper()
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	if n, err := unix.Poll(fds, 20000); n != 1 {
		t.Error("nothing came", err)
	}
}

func TestARefusedUserCannotDelayByADescriptor(t *testing.T) {
	for _, isOld := range []bool{false, true} {
		t.Run(fmt.Sprint("old kernel: ", isOld), func(t *testing.T) {
			if isOld {
				withoutPassRights(t)
			}
			name, ctx := place(t), soon(t)
			opens(t, name)
			listener := must(Listen(name, nil))
			t.Cleanup(func() { listener.Close() })
			fd := lingering(t)
			asUser(t, 12345, func() {
				socket := must(kernel.ConnectTo(strings.TrimPrefix(name, "unix:")))
				defer unix.Close(socket)
				// If the kernel can, it accepts none from this user.
				if err := kernel.TrySend(socket, []byte("?"), fd); !isOld && err != unix.EPERM || isOld && err != nil {
					t.Error(err)
				}
			})
			// It is in flight, or nowhere.
			go unix.Close(fd)
			if isOld {
				for isOpen := true; isOpen; {
					_, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
					isOpen = err == nil
				}
			}
			done := make(chan error, 1)
			go func() {
				sender, err := ConnectSender(ctx, name, nil)
				if err == nil {
					err = sender.Close()
				}
				done <- err
			}()
			go func() {
				receiver, err := listener.AcceptReceiver(ctx)
				if err == nil {
					err = receiver.Close()
				}
				done <- err
			}()
			for range 2 {
				select {
				case err := <-done:
					if err != nil {
						t.Fatal(err)
					}
				case <-time.After(10 * time.Second):
					t.Fatal("the listener is held up")
				}
			}
		})
	}
}

// opens lets every user connect, if there can be others, also to a listener that permits none of them.
func opens(t *testing.T, name string) {
	t.Helper()
	opensDirectory(t, name)
	if os.Geteuid() == 0 {
		must(0, os.Chmod(filepath.Dir(strings.TrimPrefix(name, "unix:")), 0o777))
	}
	old := syscall.Umask(0)
	t.Cleanup(func() { syscall.Umask(old) })
}

// opensDirectory lets every user reach the socket. The listener decides which of them may connect.
func opensDirectory(t *testing.T, name string) {
	t.Helper()
	if os.Geteuid() != 0 {
		return
	}
	directory := strings.TrimSuffix(strings.TrimPrefix(name, "unix:"), "/socket")
	if err := os.Chmod(directory, 0o755); err != nil {
		t.Fatal(err)
	}
	// The directory around it may be closed to others, such as one from run-tests.
	if found := must(os.Stat(os.TempDir())).Mode(); found&0o001 == 0 {
		if err := os.Chmod(os.TempDir(), found|0o011); err != nil {
			t.Fatal(err)
		}
	}
}

func TestADescriptorWithAMessageDelaysNoOther(t *testing.T) {
	uses := map[string]func(receiver *Receiver, ctx context.Context) error{
		"released": func(receiver *Receiver, ctx context.Context) error {
			message, err := receiver.Receive(ctx)
			return errors.Join(err, message.Release())
		},
		"copied": func(receiver *Receiver, ctx context.Context) error {
			_, err := receiver.ReceiveInto(ctx, make([]byte, 10))
			return err
		},
		"not received": func(receiver *Receiver, ctx context.Context) error { return nil },
	}
	for use, does := range uses {
		t.Run(use, func(t *testing.T) {
			name, ctx := place(t), soon(t)
			receiver := must(Gather(name, nil))
			t.Cleanup(func() { receiver.Close() })
			fd := lingering(t)
			hostile, innocent := must(ConnectSender(ctx, name, nil)), must(ConnectSender(ctx, name, nil))
			if use == "not received" {
				// No message has a mark for it: it stays in the socket.
				sendsRights(hostile.out.Link.Socket.FD, []byte("?"), fd)
			} else {
				hostileSend(t, hostile, fd)
			}
			done := make(chan error, 1)
			go func() { done <- does(receiver, ctx) }()
			select {
			case err := <-done:
				if err != nil {
					t.Fatal(err)
				}
			case <-time.After(10 * time.Second):
				t.Fatal("the receiver is held up")
			}
			hostile.Close()
			serves(t, receiver, innocent)
		})
	}
}

func TestMoreDescriptorsThanTheProtocolHasAreClosed(t *testing.T) {
	name, ctx := place(t), soon(t)
	receiver := must(Gather(name, nil))
	defer receiver.Close()
	hostile, innocent := must(ConnectSender(ctx, name, nil)), must(ConnectSender(ctx, name, nil))
	defer hostile.Close()
	if err := innocent.Send(ctx, payload(1, 1)); err != nil {
		t.Fatal(err)
	}
	must(receiver.Receive(ctx)).Release()
	before := len(must(os.ReadDir("/proc/self/fd")))
	p := packet.New(packet.KindDescriptors)
	p.Seq = hostile.out.Lane.Tail().Seq
	many := make([]int, kernel.ScmMaxFD)
	if err := kernel.TrySend(hostile.out.Link.Socket.FD, p.Encode(), many...); err != nil {
		t.Fatal(err)
	}
	if _, ok, err := hostile.out.Lane.TryReserve(1, lane.DescriptorsMax); err != nil || !ok {
		t.Fatal(ok, err)
	}
	if hostile.out.Lane.Commit(1) == lane.Ring {
		hostile.out.Link.Ring()
	}
	serves(t, receiver, innocent)
	closesEnd(t)
	if after := len(must(os.ReadDir("/proc/self/fd"))); after > before {
		t.Fatalf("%d descriptors before, %d after", before, after)
	}
}

type blocking struct{ until chan struct{} }

func (b blocking) Close() error { <-b.until; return nil }

func TestAUserWhoseDescriptorsCannotBeClosedIsRefused(t *testing.T) {
	name, ctx := place(t), soon(t)
	receiver := must(Gather(name, nil))
	defer receiver.Close()
	b := blocking{make(chan struct{})}
	unblock := sync.OnceFunc(func() { close(b.until) })
	defer unblock()
	for range kernel.ClosingMax + 2 {
		kernel.Deferred.Close(os.Geteuid(), b)
	}
	for {
		sender, err := ConnectSender(ctx, name, nil)
		if err == nil {
			// Until a close has taken so long.
			sender.Close()
			continue
		}
		if !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(),
			fmt.Sprintf("closing what uid %d sent takes too long: ", os.Geteuid())) {
			t.Fatal(err)
		}
		break
	}
	// Another user is not refused.
	if why := handshake.UserProblem(4711, []int{4711}); why != "" {
		t.Fatal(why)
	}
	unblock()
	closesEnd(t)
	must(ConnectSender(ctx, name, nil)).Close()
}

// serveSilentFile is the child's side of silentFile: a FUSE server, in a mount namespace of its own, whose file can
// be opened, and which answers nothing else.
func serveSilentFile() error {
	dev, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	file, err := os.CreateTemp("", "pelton-fuse")
	if err != nil {
		return err
	}
	defer os.Remove(file.Name())
	if err := unix.Mount("pelton", file.Name(), "fuse", 0,
		fmt.Sprintf("fd=%d,rootmode=100600,user_id=0,group_id=0", dev)); err != nil {
		return err
	}
	go func() {
		// struct fuse_in_header: length, opcode, unique; fuse_out_header: length, error, unique.
		for request := make([]byte, 1<<17); ; {
			n, err := unix.Read(dev, request)
			if err != nil || n < 40 {
				return
			}
			le := binary.LittleEndian
			var answer []byte
			switch le.Uint32(request[4:]) {
			case 26: // INIT: fuse_init_out, version 7.31.
				answer = make([]byte, 64)
				le.PutUint32(answer[0:], 7)
				le.PutUint32(answer[4:], 31)
				le.PutUint32(answer[20:], 4096)
			case 14: // OPEN
				answer = make([]byte, 16)
			default:
				continue
			}
			header := make([]byte, 16)
			le.PutUint32(header[0:], uint32(16+len(answer)))
			copy(header[8:], request[8:16])
			_, _ = unix.Write(dev, append(header, answer...))
		}
	}()
	fmt.Println(file.Name())
	// Until the test ends it. If the test cannot, because it waits for this process and so cannot even be killed, its
	// waits end with this process.
	ended := make(chan struct{})
	go func() {
		_, _ = os.Stdin.Read(make([]byte, 1))
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(40 * time.Second):
	}
	return errors.Join(unix.Unmount(file.Name(), unix.MNT_DETACH), os.Remove(file.Name()))
}

// silentFile is an open file whose FUSE server does not answer: every close of it blocks until the test ends. While
// it is open no process can be started, which would close it.
func silentFile(t *testing.T) int {
	t.Helper()
	p := prepare(t, childVariable+"=silent-file", "/proc/self/exe")
	p.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	if err := p.begin(); errors.Is(err, unix.EPERM) {
		t.Skip("the kernel forbids mount namespaces: ./run test-go as root")
	} else if err != nil {
		t.Fatal(err)
	}
	line, _ := p.output.ReadString('\n')
	switch file := strings.TrimSpace(line); file {
	case "error: operation not permitted", "error: no such file or directory", "error: no such device":
		t.Skip("no FUSE here: /dev/fuse, as root")
	default:
		fd, err := unix.Open(fmt.Sprintf("/proc/%d/root%s", p.Process.Pid, file),
			unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		if err != nil {
			t.Fatal(line, err, p.errors.String())
		}
		t.Cleanup(func() { os.Remove(file) })
		return fd
	}
	return -1
}

func TestAFileWhoseServerIsSilentDelaysNoOther(t *testing.T) {
	for _, at := range []string{"page", "doorbell", "data"} {
		t.Run("as "+at, func(t *testing.T) {
			name, ctx := place(t), soon(t)
			receiver := must(Gather(name, nil))
			t.Cleanup(func() { receiver.Close() })
			silent := silentFile(t)
			innocent := must(ConnectSender(ctx, name, nil))
			socket := must(kernel.ConnectTo(strings.TrimPrefix(name, "unix:")))
			_ = kernel.PermitDescriptors(socket, true)
			_ = kernel.TrySend(socket, hello(packet.RoleSender, 0))
			isReadyWithin(t, socket)
			const capacity = 1 << 16
			page, data := must(memory.NewProducerPage(capacity, lane.MessageBytesLimit(capacity),
				1, "")), must(memory.NewData(capacity, ""))
			ownDoorbell := must(unix.Eventfd(0, unix.EFD_CLOEXEC))
			fds := []int{page.FD, ownDoorbell, data.FD}
			fds[map[string]int{"page": 0, "doorbell": 1, "data": 2}[at]] = silent
			offer := packet.NewLane(packet.KindProducer, capacity, lane.MessageBytesLimit(capacity), lane.Start,
				lane.Start)
			offer.Generation = 1
			if err := kernel.TrySend(socket, offer.Encode(), fds...); err != nil {
				t.Fatal(err)
			}
			go unix.Close(silent)
			page.Close()
			data.Close()
			unix.Close(ownDoorbell)
			// It is refused.
			for b := make([]byte, packet.BytesMax); ; {
				isReadyWithin(t, socket)
				n, _, _, err := kernel.TryReceive(socket, b)
				if err != nil || n == 0 {
					t.Fatal("no reason was given", err)
				}
				if packet.Refusal(b[:n]) != nil {
					break
				}
			}
			unix.Close(socket)
			serves(t, receiver, innocent)
		})
	}
}

// completesTo has the kernel add 1 to an eventfd: a read of asynchronous I/O completes to it.
func completesTo(t *testing.T, eventfd int) {
	t.Helper()
	file := must(os.Open("/proc/self/exe"))
	defer file.Close()
	var queue uintptr
	if _, _, errno := unix.Syscall(unix.SYS_IO_SETUP, 1, uintptr(unsafe.Pointer(&queue)), 0); errno == unix.ENOSYS ||
		errno == unix.EPERM {
		t.Skip("no asynchronous I/O here")
	} else if errno != 0 {
		t.Fatal(errno)
	}
	defer unix.Syscall(unix.SYS_IO_DESTROY, queue, 0, 0)
	buffer := make([]byte, 1)
	// struct iocb: a pread of a byte, IOCB_FLAG_RESFD.
	block := &struct {
		data             uint64
		key, rwFlags     uint32
		opcode, priority uint16
		fd               uint32
		buffer           *byte
		bytes, offset    uint64
		reserved         uint64
		flags, resultFD  uint32
	}{opcode: 0, fd: uint32(file.Fd()), buffer: &buffer[0], bytes: 1, flags: 1, resultFD: uint32(eventfd)}
	if _, _, errno := unix.Syscall(unix.SYS_IO_SUBMIT, queue, 1, uintptr(unsafe.Pointer(&block))); errno != 0 {
		t.Fatal(errno)
	}
	var events [4]uint64
	if _, _, errno := unix.Syscall6(unix.SYS_IO_GETEVENTS, queue, 1, 1, uintptr(unsafe.Pointer(&events)), 0,
		0); errno != 0 {
		t.Fatal(errno)
	}
}

func TestARingThatBlocksLeavesTheSchedulerAlone(t *testing.T) {
	// What a peer can do to its own doorbell with the kernel's help: it blocks, and its counter is higher than any
	// write makes it.
	fd := must(unix.Eventfd(0, unix.EFD_CLOEXEC))
	defer unix.Close(fd)
	if _, err := unix.Write(fd, binary.LittleEndian.AppendUint64(nil, 1<<64-2)); err != nil {
		t.Fatal(err)
	}
	completesTo(t, fd)
	thread, rung, collected := make(chan int, 1), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(rung)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		thread <- unix.Gettid()
		doorbell.Peer{FD: fd, Kind: doorbell.Eventfd}.Ring()
	}()
	in := fmt.Sprintf("/proc/self/task/%d/syscall", <-thread)
	for until := time.Now().Add(10 * time.Second); !strings.HasPrefix(string(must(os.ReadFile(in))),
		fmt.Sprintf("%d %#x ", unix.SYS_WRITE, fd)); {
		if time.Now().After(until) {
			t.Fatal("it does not block")
		}
	}
	go func() {
		// Makes every processor of the scheduler take part.
		runtime.GC()
		close(collected)
	}()
	isHeldUp := false
	select {
	case <-collected:
	case <-time.After(10 * time.Second):
		isHeldUp = true
	}
	if _, err := unix.Read(fd, make([]byte, 8)); err != nil {
		t.Fatal(err)
	}
	<-rung
	<-collected
	if isHeldUp {
		t.Fatal("the collector waits for the ring")
	}
}
