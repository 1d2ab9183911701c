package pelton

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// Users of other user namespaces: those that are not mapped here all have one uid, which stands for no particular
// user.

// runUnmapped is the child's side: "unmapped SIDE NAME".
func runUnmapped(ctx context.Context, side, name string) error {
	// As 65534 or 0 of this namespace, whose other users are all 65534 here.
	options := &Options{UIDs: []int{0, 65534}, Mode: 0o777, Capacity: 1 << 16}
	switch side {
	case "gather":
		syscall.Umask(0)
		receiver, err := Gather(name, options)
		if err != nil {
			return err
		}
		fmt.Println("listening as", os.Geteuid())
		message, err := receiver.Receive(ctx)
		if err != nil {
			return err
		}
		fmt.Println("received", string(message.Bytes()))
		return nil
	case "connect":
		_, err := ConnectSender(ctx, name, options)
		return err
	default:
		_, err := OpenSender(ctx, name, options)
		return err
	}
}

// inNamespace starts a child as a user of a user namespace of its own, in which that user, of that number outside, is
// the only one.
func inNamespace(t *testing.T, inside, outside int, side ...any) *process {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can have a user namespace for another user: ./run test-go as root")
	}
	p := prepare(t, childVariable+"="+fmt.Sprintln(side...), "/proc/self/exe")
	p.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: inside, HostID: outside, Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: inside, HostID: outside, Size: 1}},
		Credential:  &syscall.Credential{Uid: uint32(inside), Gid: uint32(inside), NoSetGroups: true},
	}
	if err := p.begin(); errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOSPC) {
		t.Skip("the kernel forbids user namespaces")
	} else if err != nil {
		t.Fatal(err)
	}
	return p
}

const stands = "uid 65534, which stands for every user that the user namespace of process %d does not map"

func TestAnUnmappedUserIsRefused(t *testing.T) {
	name, ctx := place(t), soon(t)
	opens(t, name)
	listens := inNamespace(t, 65534, 2000, "unmapped", "gather", name)
	listens.says("listening as 65534")
	// Root is there as 65534, the listener's own uid, which its options permit as well.
	_, err := ConnectSender(ctx, name, &Options{UIDs: []int{2000}})
	if wanted := fmt.Sprintf(stands, listens.Process.Pid); !errors.Is(err, ErrRefused) ||
		!strings.Contains(err.Error(), wanted) {
		t.Fatal(err)
	}
	// So is the listener at the other side, in another namespace.
	connects := inNamespace(t, 0, 3000, "unmapped", "connect", name)
	found, _ := connects.output.ReadString('\n')
	if wanted := fmt.Sprintf(stands, connects.Process.Pid); !strings.Contains(found, wanted) {
		t.Fatal(found, connects.errors.String())
	}
}

func TestAPathOfAnUnmappedUserIsRefused(t *testing.T) {
	name, ctx := place(t), soon(t)
	opens(t, name)
	directory := strings.TrimSuffix(strings.TrimPrefix(name, "unix:"), "socket") + "channel"
	receiver := must(CreateReceiver(ctx, directory, &Options{Mode: 0o777, Capacity: 1 << 16}))
	defer receiver.Close()
	opener := inNamespace(t, 65534, 2000, "unmapped", "path", directory)
	found, _ := opener.output.ReadString('\n')
	if wanted := "it belongs to " + fmt.Sprintf(stands, opener.Process.Pid); !strings.Contains(found, wanted) {
		t.Fatal(found, opener.errors.String())
	}
}

// Where all are mapped that number is a user's like any other.
func TestTheOverflowUIDIsAUserWhereAllAreMapped(t *testing.T) {
	if ids := strings.Fields(string(must(os.ReadFile("/proc/self/uid_map")))); os.Geteuid() != 0 ||
		strings.Join(ids, " ") != "0 0 4294967295" {
		t.Skip("not all users are mapped here: ./run test-go as root of the initial namespace")
	}
	name, ctx := place(t), soon(t)
	opens(t, name)
	p := prepare(t, childVariable+"="+fmt.Sprintln("unmapped", "gather", name), "/proc/self/exe")
	p.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if err := p.begin(); err != nil {
		t.Fatal(err)
	}
	p.says("listening as 65534")
	sender := must(ConnectSender(ctx, name, &Options{UIDs: []int{65534}}))
	if err := sender.Send(ctx, []byte("hello")); err != nil {
		t.Fatal(err)
	}
	p.says("received hello")
	sender.Close()
}
