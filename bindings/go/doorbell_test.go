package pelton

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/pelton-ipc/pelton/bindings/go/internal/doorbell"
	"github.com/pelton-ipc/pelton/bindings/go/internal/kernel"
	"golang.org/x/sys/unix"
)

// Doorbells, and peers that misuse them.

// hasRung waits until a goroutine that sleeps on a doorbell has woken.
func hasRung(t *testing.T, woken chan struct{}) {
	t.Helper()
	select {
	case <-woken:
	case <-time.After(20 * time.Second):
		t.Fatal("nobody was woken")
	}
}

func sleepsOn(b *doorbell.Own) chan struct{} {
	woken := make(chan struct{})
	go func() { b.Sleep(false); close(woken) }()
	return woken
}

func TestARingWakesAtEveryValueOfTheCounter(t *testing.T) {
	for _, create := range []func() (*doorbell.Own, error){doorbell.New, doorbell.NewBlocking} {
		b := must(create())
		defer b.Close()
		ringsAtEveryValue(t, b)
	}
}

func ringsAtEveryValue(t *testing.T, b *doorbell.Own) {
	t.Helper()
	peers := doorbell.Peer{FD: must(unix.Dup(b.Eventfd)), Kind: doorbell.Eventfd}
	defer peers.Close(kernel.UnknownUser)
	if b.Poll() {
		t.Fatal("it rings, and is new")
	}
	for _, value := range []uint64{0, 1, 1<<64 - 2} {
		if value > 0 {
			must(unix.Write(peers.FD, binary.LittleEndian.AppendUint64(nil, value)))
		}
		b.Poll()
		if b.Poll() {
			t.Fatal("it rings though nobody has rung")
		}
		for range 3 {
			woken := sleepsOn(b)
			if !parked("(*Own).Sleep") {
				t.Fatal("it does not sleep")
			}
			peers.Ring()
			hasRung(t, woken)
		}
		// One from before the sleep ends it.
		peers.Ring()
		hasRung(t, sleepsOn(b))
		if value > 0 {
			must(unix.Read(peers.FD, make([]byte, 8)))
		}
	}
}

func TestADoorbellLosesNoRingAndNoWakeBeforeTheFirstSleep(t *testing.T) {
	for _, does := range []func(b *doorbell.Own){
		(*doorbell.Own).Wake,
		func(b *doorbell.Own) { doorbell.Peer{FD: b.Eventfd, Kind: doorbell.Eventfd}.Ring() },
	} {
		b := must(doorbell.NewLazy())
		if b.Polled.Load() != nil {
			t.Fatal("it has an epoll")
		}
		b.ClearWake()
		does(b)
		hasRung(t, sleepsOn(b))
		b.ClearWake()
		// The first event of an epoll comes without a ring.
		must(b.Open())
		b.Poll()
		woken := sleepsOn(b)
		if !parked("(*Own).Sleep") {
			t.Fatal("it does not sleep")
		}
		does(b)
		hasRung(t, woken)
		b.Close()
		b.Close()
	}
}

func TestALocalWakeEndsASleepInTheKernelOnceWhateverPeersWrite(t *testing.T) {
	b := must(doorbell.NewBlocking())
	defer b.Close()
	fills(t, b.Eventfd)
	b.Poll()
	for range 3 {
		woken := make(chan bool)
		go func() { woken <- b.Sleep(false) }()
		if !parked("(*Own).Sleep") {
			t.Fatal("it does not sleep")
		}
		b.Wake()
		if isRung := <-woken; isRung {
			t.Fatal("a local wake counts as a ring")
		}
		b.ClearWake()
	}
	// One from before the sleep ends it, until it is forgotten; and so does the end of a timed sleep.
	b.Wake()
	b.Wake()
	if b.Sleep(false) || b.Sleep(false) {
		t.Fatal("a local wake counts as a ring")
	}
	b.ClearWake()
	if b.Sleep(true) {
		t.Fatal("the end of a timed sleep counts as a ring")
	}
	woken := sleepsOn(b)
	if !parked("(*Own).Sleep") {
		t.Fatal("a forgotten wake ends a sleep")
	}
	b.Wake()
	hasRung(t, woken)
	b.Close()
	b.Wake()
}

// fills fills an eventfd, so that a write of 1 waits.
func fills(t *testing.T, fd int) {
	t.Helper()
	flags := must(unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0))
	_ = must(unix.FcntlInt(uintptr(fd), unix.F_SETFL, flags&^unix.O_NONBLOCK))
	must(unix.Write(fd, binary.LittleEndian.AppendUint64(nil, 1<<64-2)))
}

// fullAndAsleep fills the sender's lane, and waits until a goroutine sleeps in Send.
func fullAndAsleep(t *testing.T, sender *Sender) {
	t.Helper()
	for {
		if ok, err := sender.TrySend(make([]byte, 5000)); err != nil {
			t.Fatal(err)
		} else if !ok {
			break
		}
	}
	if sleeps, err := sender.out.Lane.Arm(5000, false, kernel.Membarrier); err != nil || !sleeps {
		t.Fatal(sleeps, err)
	}
}

func TestASenderWhoseDoorbellIsFullDelaysNoOther(t *testing.T) {
	name, ctx := place(t), soon(t)
	receiver := must(Gather(name, nil))
	t.Cleanup(func() { receiver.Close() })
	hostile := must(ConnectSender(ctx, name, &Options{Capacity: 1 << 16}))
	innocent := must(ConnectSender(ctx, name, nil))
	fills(t, hostile.out.Doorbell.Eventfd)
	fullAndAsleep(t, hostile)
	sent := hostile.Unreleased()
	received := make(chan error, 1)
	go func() {
		for range sent {
			message, err := receiver.Receive(ctx)
			if err != nil {
				received <- err
				return
			}
			message.Release()
		}
		received <- nil
	}()
	select {
	case err := <-received:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the receiver waits for its ring")
	}
	if hostile.out.Lane.IsArmed() && !hostile.out.Doorbell.Poll() {
		t.Fatal("nobody has rung")
	}
	serves(t, receiver, innocent)
}

func TestAReceiverWhoseDoorbellIsFullDoesNotDelayItsSender(t *testing.T) {
	sender, receiver := pair(t, nil)
	fills(t, receiver.doorbell.Eventfd)
	receiver.sleeper.Arm(receiver.areSendersFencing, kernel.Membarrier)
	sent := make(chan error, 1)
	go func() { sent <- sender.Send(context.Background(), []byte("x")) }()
	select {
	case err := <-sent:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the sender waits for its ring")
	}
	if !receiver.doorbell.Poll() {
		t.Fatal("nobody has rung")
	}
}

func TestADescriptorThatIsNoDoorbellIsRefused(t *testing.T) {
	pair := func(domain, kind int) int {
		if domain == unix.AF_UNIX {
			fds := must(unix.Socketpair(domain, kind|unix.SOCK_CLOEXEC, 0))
			unix.Close(fds[1])
			return fds[0]
		}
		return must(unix.Socket(domain, kind|unix.SOCK_CLOEXEC, 0))
	}
	path := strings.TrimPrefix(place(t), "unix:")
	listens := must(kernel.ListenAt(path, false))
	defer unix.Close(listens)
	eventfd := func() int { return must(unix.Eventfd(0, unix.EFD_CLOEXEC)) }
	type given struct {
		fd         int
		isOwnUser  bool
		isAccepted bool
	}
	all := map[string]given{
		"an eventfd of this user":            {eventfd(), true, true},
		"an eventfd of another user":         {eventfd(), false, false},
		"a seqpacket socket of this user":    {pair(unix.AF_UNIX, unix.SOCK_SEQPACKET), true, true},
		"a seqpacket socket of another user": {pair(unix.AF_UNIX, unix.SOCK_SEQPACKET), false, true},
		"a stream socket":                    {pair(unix.AF_UNIX, unix.SOCK_STREAM), true, false},
		"a datagram socket":                  {pair(unix.AF_UNIX, unix.SOCK_DGRAM), true, false},
		"a socket of the internet":           {pair(unix.AF_INET, unix.SOCK_STREAM), true, false},
		"a datagram socket of the internet":  {pair(unix.AF_INET, unix.SOCK_DGRAM), false, false},
		"a directory":                        {must(unix.Open("/", unix.O_RDONLY|unix.O_CLOEXEC, 0)), true, false},
		"a name of a socket":                 {must(unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)), false, false},
	}
	if fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0); err == nil {
		all["a seqpacket socket of a virtual machine"] = given{fd, true, false}
	}
	for what, c := range all {
		found, err := doorbell.Check(c.fd, c.isOwnUser)
		if (err == nil) != c.isAccepted || err == nil && found.FD != c.fd {
			t.Errorf("%s: %+v %v", what, found, err)
		}
		unix.Close(c.fd)
	}
}

// anotherUsers returns a sender to the receiver, connected by another user.
func anotherUsers(t *testing.T, ctx context.Context, name string) (sender *Sender) {
	t.Helper()
	asUser(t, 12345, func() {
		var err error
		if sender, err = ConnectSender(ctx, name, &Options{UIDs: []int{0}, Capacity: 1 << 16}); err != nil {
			t.Error(err)
		}
	})
	if sender == nil {
		t.FailNow()
	}
	t.Cleanup(func() { sender.Close() })
	return sender
}

func gathersOfAnotherUser(t *testing.T) (string, *Receiver) {
	t.Helper()
	name := place(t)
	opensDirectory(t, name)
	receiver := must(Gather(name, &Options{UIDs: []int{12345}}))
	t.Cleanup(func() { receiver.Close() })
	return name, receiver
}

func TestAnotherUserHasADoorbellOfItsOwn(t *testing.T) {
	ctx := soon(t)
	name, receiver := gathersOfAnotherUser(t)
	others := []*Sender{anotherUsers(t, ctx, name), anotherUsers(t, ctx, name)}
	own := must(ConnectSender(ctx, name, nil))
	defer own.Close()
	if own.out.Link.Doorbell.Kind != doorbell.Eventfd || receiver.doorbell.Pairs() != 2 {
		t.Fatal(own.out.Link.Doorbell, receiver.doorbell.Pairs())
	}
	received := make(chan Message)
	go func() {
		defer close(received)
		for message, err := range receiver.Messages(ctx) {
			if err != nil {
				return
			}
			received <- message
			message.Release()
		}
	}()
	for n, sender := range append(others, own) {
		if is := sender.out.Link.Doorbell.Kind; (is == doorbell.Socket) != (n < 2) {
			t.Fatal(n, is)
		}
		for range 20 {
			if !parked("(*Own).Sleep") {
				t.Fatal("the receiver does not sleep")
			}
			if err := sender.Send(ctx, []byte{byte(n)}); err != nil {
				t.Fatal(err)
			}
			if message := <-received; message.Bytes()[0] != byte(n) || (message.Peer().UID == 12345) != (n < 2) {
				t.Fatal(message)
			}
		}
		// It is woken when there is space.
		for k := range 200 {
			if err := sender.Send(ctx, payload(k, 5000)); err != nil {
				t.Fatal(err)
			}
			if k >= 5 {
				<-received
			}
		}
		for range 5 {
			<-received
		}
	}
	for _, sender := range others {
		sender.Close()
	}
	receiver.Close()
	for range received {
	}
	if found := receiver.doorbell.Pairs(); found != 0 {
		t.Fatal(found)
	}
}

func TestAClientOfAnotherUserIsServed(t *testing.T) {
	name, ctx := place(t), soon(t)
	opensDirectory(t, name)
	served(t, name, &Options{UIDs: []int{12345}}, echo)
	var client *Client
	asUser(t, 12345, func() {
		var err error
		if client, err = ConnectClient(ctx, name, &Options{UIDs: []int{0}, Memory: 1 << 16}); err != nil {
			t.Error(err)
		}
	})
	if client == nil {
		t.FailNow()
	}
	defer client.Close()
	if out := client.links[0].out; out.Doorbell.Kind != doorbell.Socket || client.doorbell.Pairs() != 1 {
		t.Fatal(out.Doorbell, client.doorbell.Pairs())
	}
	for n := range 50 {
		if n%10 == 0 && !parked("(*Own).Sleep") {
			t.Fatal("the service does not sleep")
		}
		// Also for what waits for space, either way.
		if reply, err := client.Call(ctx, payload(n, n*10_000)); err != nil || !isPayload(reply, n) ||
			len(reply) != n*10_000 {
			t.Fatal(err)
		}
	}
}

func TestAHostileUsersDoorbellHarmsThatUserAlone(t *testing.T) {
	ways := map[string]func(t *testing.T, fd int){
		"filled": func(t *testing.T, fd int) {
			for kernel.TrySend(fd, []byte("x")) == nil {
			}
		},
		"shut down": func(t *testing.T, fd int) { _ = unix.Shutdown(fd, unix.SHUT_RDWR) },
		"shut down to write, and full": func(t *testing.T, fd int) {
			for kernel.TrySend(fd, []byte("x")) == nil {
			}
			_ = unix.Shutdown(fd, unix.SHUT_WR)
		},
		"a packet of no bytes": func(t *testing.T, fd int) { _ = kernel.TrySend(fd, nil) },
		"a large packet":       func(t *testing.T, fd int) { _ = kernel.TrySend(fd, make([]byte, 10_000)) },
		"with descriptors": func(t *testing.T, fd int) {
			blocks := lingering(t)
			for {
				// Until it is full, or another kernel permits none.
				if err := kernel.TrySend(fd, []byte("x"), blocks, blocks); err != nil {
					break
				}
			}
			go unix.Close(blocks)
		},
	}
	for _, isOld := range []bool{false, true} {
		for way, does := range ways {
			t.Run(fmt.Sprintf("%s, old kernel: %v", way, isOld), func(t *testing.T) {
				if isOld {
					withoutPassRights(t)
				}
				ctx := soon(t)
				name, receiver := gathersOfAnotherUser(t)
				hostile, innocent := anotherUsers(t, ctx, name), must(ConnectSender(ctx, name, nil))
				other := anotherUsers(t, ctx, name)
				does(t, hostile.out.Link.Doorbell.FD)
				// Each poll takes some of what was queued, and then nothing rings: no busy loop.
				for rounds := 0; receiver.doorbell.Poll(); rounds++ {
					if rounds > 1000 {
						t.Fatal("it rings for ever")
					}
				}
				isEnd := strings.Contains(way, "shut") || strings.Contains(way, "no bytes")
				if is := receiver.doorbell.Pairs() == 1; is != isEnd {
					t.Fatal("its doorbell is listened to:", !is)
				}
				for _, sender := range []*Sender{other, innocent} {
					received := make(chan error, 1)
					go func() {
						message, err := receiver.Receive(ctx)
						if err == nil {
							err = message.Release()
						}
						received <- err
					}()
					if !parked("(*Own).Sleep") {
						t.Fatal("the receiver does not sleep")
					}
					if err := sender.Send(ctx, []byte("x")); err != nil {
						t.Fatal(err)
					}
					if err := <-received; err != nil {
						t.Fatal(err)
					}
				}
				// The receiver's rings to it do not wait either, whatever it does with its own end.
				fullAndAsleep(t, hostile)
				for hostile.Unreleased() > 0 {
					must(receiver.Receive(ctx)).Release()
				}
				serves(t, receiver, innocent)
			})
		}
	}
}

func TestARingIntoAFullSocketDoesNotWait(t *testing.T) {
	ends := must(unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0))
	defer unix.Close(ends[1])
	peers := must(doorbell.Check(ends[0], false))
	rung := make(chan struct{})
	go func() {
		defer close(rung)
		for range 100_000 {
			peers.Ring()
		}
		_ = unix.Shutdown(ends[1], unix.SHUT_RDWR)
		// No signal either.
		peers.Ring()
	}()
	hasRung(t, rung)
	peers.Close(kernel.UnknownUser)
	closesEnd(t)
}

func TestWhatAHostileUserQueuedDoesNotHoldUpTheEndOfItsDoorbell(t *testing.T) {
	withoutPassRights(t)
	ctx := soon(t)
	name, receiver := gathersOfAnotherUser(t)
	hostile, innocent := anotherUsers(t, ctx, name), must(ConnectSender(ctx, name, nil))
	must(0, innocent.Send(ctx, nil))
	must(receiver.Receive(ctx)).Release()
	sendsRights(hostile.out.Link.Doorbell.FD, []byte("x"), lingering(t))
	ended := make(chan struct{})
	go func() {
		receiver.Close()
		close(ended)
	}()
	hasRung(t, ended)
}

// toolOfAnotherUser is the pelton command, run by another user.
func toolOfAnotherUser(t *testing.T, arguments ...string) *process {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can start a process of another user: ./run test-go as root")
	}
	program := os.Getenv("PELTON_TOOL")
	if program == "" {
		t.Skip("PELTON_TOOL does not name the pelton command: ./run test-go does")
	}
	// By a descriptor: the directories that it is in may be closed to that user.
	file := must(os.Open(program))
	defer file.Close()
	p := prepare(t, "LANG=C", "/proc/self/fd/3", append(arguments, "--uid", "0")...)
	p.ExtraFiles = []*os.File{file}
	p.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 12345, Gid: 12345}}
	if err := p.begin(); err != nil {
		t.Fatal(err)
	}
	return p
}

func TestRustOfAnotherUserAndGoWakeEachOther(t *testing.T) {
	ctx := soon(t)
	name, receiver := gathersOfAnotherUser(t)
	sends := toolOfAnotherUser(t, "send", name)
	for n := range 20 {
		received := make(chan string, 1)
		go func() {
			message, err := receiver.Receive(ctx)
			if err != nil {
				t.Error(err)
			}
			received <- string(message.Bytes())
			_ = message.Release()
		}()
		if !parked("(*Own).Sleep") {
			t.Fatal("the receiver does not sleep")
		}
		must(fmt.Fprintln(sends.input, n))
		if found := <-received; found != fmt.Sprint(n) {
			t.Fatal(found, sends.errors.String())
		}
	}
	name = place(t)
	opensDirectory(t, name)
	// The other user creates its socket there.
	must(0, os.Chmod(filepath.Dir(strings.TrimPrefix(name, "unix:")), 0o777))
	receives := toolOfAnotherUser(t, "recv", name)
	sender := must(ConnectSender(ctx, name, &Options{UIDs: []int{12345}, Await: true}))
	defer sender.Close()
	if sender.out.Link.Doorbell.Kind != doorbell.Socket || sender.MessageBytesMax() != 1<<20 {
		t.Fatal(sender.out.Link.Doorbell, sender.MessageBytesMax())
	}
	for n := range 20 {
		if err := sender.Send(ctx, []byte(fmt.Sprint(n))); err != nil {
			t.Fatal(err)
		}
		receives.says(fmt.Sprint(n))
	}
}
