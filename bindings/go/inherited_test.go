package pelton

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// Listening sockets that another process has created: `pelton run` does so.

// serveUntilTerminated is the child's side "serve-run NAME": it prints its process ID, echoes, and drains on SIGTERM.
func serveUntilTerminated(ctx context.Context, name string) error {
	ends := make(chan os.Signal, 1)
	signal.Notify(ends, syscall.SIGTERM)
	service, err := ListenService(name, nil)
	if err != nil {
		return err
	}
	fmt.Println(os.Getpid())
	go func() {
		<-ends
		service.Drain()
	}()
	err = service.Serve(ctx, func(request Request) { _ = request.Reply(request.Bytes()) })
	if err = errors.Join(err, service.Close()); err != nil {
		return err
	}
	// The socket is still there, and can be used again.
	again, err := ListenService(name, nil)
	if err == nil {
		_, err = ListenService(name, nil)
		if !errors.Is(err, ErrInUse) {
			return fmt.Errorf("listening twice: %v", err)
		}
		err = again.Close()
	}
	// Not before: a client that connects meanwhile is the second service's, which closes.
	fmt.Println("drained")
	os.Exit(map[bool]int{true: 0, false: 1}[err == nil])
	return err
}

// number reads a line that is one.
func (p *process) number() int {
	p.t.Helper()
	line, err := p.output.ReadString('\n')
	number, wrong := strconv.Atoi(strings.TrimSpace(line))
	if err != nil || wrong != nil {
		p.t.Fatalf("found %q, wanted a process ID: %v %s", line, err, p.errors.String())
	}
	return number
}

func TestAServiceIsStartedByPeltonRunReplacedAndStartedAgainAfterAKill(t *testing.T) {
	name, ctx := place(t), soon(t)
	program := os.Getenv("PELTON_TOOL")
	if program == "" {
		t.Skip("PELTON_TOOL does not name the pelton command: ./run test-go does")
	}
	runner := start(t, childVariable+"=serve-run "+name, program, "run", name, "--", must(os.Executable()))
	call := func() {
		t.Helper()
		client := must(ConnectClient(ctx, name, &Options{Await: true}))
		defer client.Close()
		if reply, err := client.Call(ctx, []byte("hello")); err != nil || string(reply) != "hello" {
			t.Fatal(string(reply), err)
		}
	}
	first := runner.number()
	call()
	if err := runner.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	second := runner.number()
	runner.says("drained")
	if first == second {
		t.Fatal("it is the same process")
	}
	call()
	if err := syscall.Kill(second, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	call()
	if third := runner.number(); third == second {
		t.Fatal("it is the same process")
	}
	if err := runner.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	runner.says("drained")
	runner.exits(128 + int(syscall.SIGTERM))
	if _, err := os.Stat(strings.TrimPrefix(name, "unix:")); !os.IsNotExist(err) {
		t.Fatal("the socket is left: ", err)
	}
}

func TestThePeerIsTheProcessThatAcceptsAndNotTheOneThatCreatedTheSocket(t *testing.T) {
	name, ctx := place(t), soon(t)
	program := os.Getenv("PELTON_TOOL")
	if program == "" {
		t.Skip("PELTON_TOOL does not name the pelton command: ./run test-go does")
	}
	runner := start(t, "LANG=C", program, "run", name, "--", "sh", "-c", `echo $$; exec "$0" recv --follow "$1"`, program, name)
	accepts := runner.number()
	sender := must(ConnectSender(ctx, name, &Options{Await: true}))
	defer sender.Close()
	if found := sender.Peer().PID; found != accepts {
		t.Fatalf("the peer is %d, wanted %d; the socket was created by %d", found, accepts, runner.Process.Pid)
	}
	// Its death is noticed; the process that created the socket lives.
	if err := exec.Command("kill", "-9", strconv.Itoa(accepts)).Run(); err != nil {
		t.Fatal(err)
	}
	for {
		if err := sender.Send(ctx, make([]byte, 1000)); err != nil {
			if !errors.Is(err, ErrPeerDied) {
				t.Fatal(err)
			}
			break
		}
	}
}

func TestVariablesOfAnotherProcessAreIgnoredAndWrongOnesOfThisOneAreNamed(t *testing.T) {
	name := place(t)
	t.Setenv("LISTEN_PID", strconv.Itoa(os.Getppid()))
	t.Setenv("LISTEN_FDS", "x")
	must(Listen(name, nil)).Close()
	t.Setenv("LISTEN_PID", strconv.Itoa(os.Getpid()))
	for _, wrong := range []string{"x", "", "-1", "1 ", "99999999999"} {
		t.Setenv("LISTEN_FDS", wrong)
		if _, err := Listen(name, nil); !errors.Is(err, ErrSystem) || !strings.Contains(err.Error(), "wanted a number") {
			t.Errorf("%q: %v", wrong, err)
		}
	}
	// Descriptors of other kinds are the program's own.
	t.Setenv("LISTEN_FDS", "20")
	must(Listen(name, nil)).Close()
}

// Root has created the socket, and connects; the peer is another user.
func TestAConnectingRootTakesOfAnotherUserNoMoreThanItsLimits(t *testing.T) {
	name, ctx := place(t), soon(t)
	program := os.Getenv("PELTON_TOOL")
	if program == "" || os.Geteuid() != 0 {
		t.Skip("PELTON_TOOL does not name the pelton command, or this is not root: ./run test-go is")
	}
	opensDirectory(t, name)
	// Where that user reaches it.
	tool := strings.TrimSuffix(strings.TrimPrefix(name, "unix:"), "socket") + "pelton"
	if err := os.WriteFile(tool, must(os.ReadFile(program)), 0o755); err != nil {
		t.Fatal(err)
	}
	start(t, "LANG=C", program, "run", name, "--uid", "0", "--", "setpriv", "--reuid", "12346", "--clear-groups",
		tool, "send", "--listen", "--capacity", "128M", name, "--uid", "0")
	receiver := must(ConnectReceiver(ctx, name, &Options{Await: true, UIDs: []int{12346}}))
	defer receiver.Close()
	if receiver.Peer().UID != 12346 || receiver.Capacity() != 64<<20 {
		t.Error(receiver.Peer(), receiver.Capacity())
	}
}
