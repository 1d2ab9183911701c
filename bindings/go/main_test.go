package pelton

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// This test's own program as another process, one side of a channel: see child.
const childVariable = "PELTON_GO_TEST_SIDE"

func TestMain(m *testing.M) {
	if side, ok := os.LookupEnv(childVariable); ok {
		if err := runSide(strings.Fields(side)); err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// runSide is the child's side: "send NAME FROM COUNT SIZE END" or "receive NAME COUNT END" connects, with a lane of
// 64 KiB, and prints what it has done. END is close, or stay until killed.
func runSide(arguments []string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	options := &Options{Capacity: 1 << 16, Await: true}
	var from, count, size int
	end := arguments[len(arguments)-1]
	switch arguments[0] {
	case "send":
		if _, err := fmt.Sscan(strings.Join(arguments[2:5], " "), &from, &count, &size); err != nil {
			return err
		}
		sender, err := ConnectSender(ctx, arguments[1], options)
		if err != nil {
			return err
		}
		fmt.Println("connected")
		for n := from; n < from+count; n++ {
			if err := sender.Send(ctx, payload(n, size)); err != nil {
				return err
			}
		}
		fmt.Println("done", count)
		if end == "close" {
			return errors.Join(sender.WaitReleased(ctx), sender.Close())
		}
	case "receive":
		if _, err := fmt.Sscan(arguments[2], &count); err != nil {
			return err
		}
		receiver, err := ConnectReceiver(ctx, arguments[1], options)
		if err != nil {
			return err
		}
		fmt.Println("connected")
		for range count {
			message, err := receiver.Receive(ctx)
			if err != nil {
				return err
			}
			message.Release()
		}
		fmt.Println("done", count)
		if end == "close" {
			return receiver.Close()
		}
	case "serve":
		// "serve NAME END": echoes; or takes requests, prints how many, and holds them. It drains when its input
		// ends.
		service, err := ListenService(arguments[1], &Options{Capacity: 1 << 16})
		if err != nil {
			return err
		}
		fmt.Println("listening")
		go func() {
			_, _ = io.Copy(io.Discard, os.Stdin)
			service.Drain()
		}()
		var mutex sync.Mutex
		taken := 0
		err = service.Serve(ctx, func(request Request) {
			if end == "hold" {
				mutex.Lock()
				taken++
				fmt.Println("taken", taken)
				mutex.Unlock()
				<-ctx.Done()
			}
			_ = request.Reply(request.Bytes())
		})
		return errors.Join(err, service.Close())
	case "call":
		// "call NAME COUNT SIZE END": calls, and compares each reply; or holds its calls.
		client, err := ConnectClient(ctx, arguments[1], options)
		if err != nil {
			return err
		}
		if _, err := fmt.Sscan(strings.Join(arguments[2:4], " "), &count, &size); err != nil {
			return err
		}
		for n := range count {
			if end == "hold" {
				if _, err := client.Submit(ctx, payload(n, size)); err != nil {
					return err
				}
				continue
			}
			reply, err := client.Call(ctx, payload(n, size))
			if err != nil {
				return err
			}
			if len(reply) != size || !isPayload(reply, n) {
				return fmt.Errorf("reply %d is wrong", n)
			}
		}
		fmt.Println("done", count)
		if end == "close" {
			return client.Close()
		}
	case "publish":
		// "publish NAME SUBSCRIBERS COUNT END": see publishSide.
		if _, err := fmt.Sscan(strings.Join(arguments[2:4], " "), &size, &count); err != nil {
			return err
		}
		return publishSide(ctx, arguments[1], size, count, end)
	case "subscribe":
		// "subscribe NAME POLICY COUNT END": see subscribeSide.
		if _, err := fmt.Sscan(arguments[3], &count); err != nil {
			return err
		}
		return subscribeSide(ctx, arguments[1], arguments[2], count, end)
	case "path-publish":
		// Message n is payload(n, n%500), from the next one of its predecessor on.
		publisher, err := CreatePublisher(ctx, arguments[1], &Options{Capacity: 1 << 16, Await: true})
		for err == nil {
			number := int(publisher.lane.Number())
			err = publisher.Send(ctx, payload(number, number%500))
		}
		return err
	case "path-follow":
		// "path-follow DIRECTORY NAME POLICY": a durable subscriber of such messages. It prints each number, and how many
		// it has missed directly before.
		options := &Options{Durable: arguments[2], Await: true}
		if end == "lag" {
			options.Policy, options.Slack = Lag, 4096
		}
		subscriber, err := OpenSubscriber(ctx, arguments[1], options)
		if err != nil {
			return err
		}
		for {
			delivery, err := subscriber.Receive(ctx)
			switch {
			case errors.Is(err, ErrPeerDied):
				err = subscriber.Resume(ctx)
			case err == nil && !isNumbered(delivery):
				err = errors.New("a message is wrong")
			case err == nil:
				fmt.Println(delivery.Number, delivery.Missed)
			}
			if err != nil {
				return err
			}
		}
	case "serve-run":
		return serveUntilTerminated(ctx, arguments[1])
	case "short":
		return runShort(ctx, arguments[1], end)
	case "unmapped":
		return runUnmapped(ctx, arguments[1], end)
	case "silent-file":
		return serveSilentFile()
	case "path-send":
		// Numbers that continue from what is in the lane: the channel's own count.
		sender, err := OpenSender(ctx, arguments[1], nil)
		if err != nil {
			return err
		}
		for {
			message := binary.LittleEndian.AppendUint64(nil, uint64(sender.out.Lane.Tail().Seq))
			if err := sender.Send(ctx, append(message, payload(0, int(message[0])*5)...)); err != nil &&
				!errors.Is(err, ErrPeerDied) {
				return err
			}
		}
	case "full":
		return runFull(ctx, arguments[1], arguments[2])
	case "unsynced":
		return runUnsynced(arguments[1])
	case "append":
		// Appends and flushes without end, in one lane: message n is payload(n), of any size.
		file, err := OpenRecordFile(arguments[1], nil)
		if err != nil {
			return err
		}
		for n := 1; ; n++ {
			if err := file.Append(payload(n, n*7919%100_000)); err != nil {
				return err
			}
			if n%10 == 0 {
				if err := file.Flush(); err != nil {
					return err
				}
				fmt.Println(n)
			}
		}
	case "flush":
		// "flush CHANNEL FILE WRITES": it kills itself between that write, counted from 1, and the release; 0: it does not.
		if _, err := fmt.Sscan(arguments[3], &count); err != nil {
			return err
		}
		testHookWritten = func() {
			if count--; count == 0 {
				_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			}
		}
		receiver, err := OpenReceiver(ctx, arguments[1], &Options{Await: true})
		if err != nil {
			return err
		}
		file, err := OpenRecordFile(arguments[2], &RecordFileOptions{RotateBytes: 100_000, FlushBytes: 20_000,
			FlushInterval: time.Millisecond})
		if err != nil {
			return err
		}
		fmt.Println("open")
		for err == nil || errors.Is(err, ErrPeerDied) {
			err = receiver.FlushTo(ctx, file)
		}
		return err
	case "path-letters":
		// The messages of conformance/README.md, in the sizes given.
		sender, err := CreateSender(ctx, arguments[1], nil)
		if err != nil {
			return err
		}
		if _, err := fmt.Sscan(arguments[2], &count); err != nil {
			return err
		}
		for i := range count {
			if err := sender.Send(ctx, lettersOf(i, arguments[3])); err != nil {
				return err
			}
		}
		fmt.Println("done", count)
	case "path-hold", "path-await":
		receiver, err := OpenReceiver(ctx, arguments[1], &Options{Await: arguments[0] == "path-await"})
		if err != nil {
			return err
		}
		defer receiver.Close()
		fmt.Println("open")
	case "path-receive":
		receiver, err := OpenReceiver(ctx, arguments[1], nil)
		if err != nil {
			return err
		}
		for {
			message, err := receiver.Receive(ctx)
			if errors.Is(err, ErrPeerDied) {
				continue
			}
			if err != nil {
				return err
			}
			if bytes := message.Bytes(); binary.LittleEndian.Uint64(bytes) != uint64(message.Seq()) ||
				len(bytes) != 8+int(bytes[0])*5 || !isPayload(bytes[8:], 0) {
				fmt.Fprintln(os.Stderr, "a message is wrong")
				return errors.New("wrong")
			}
			message.Release()
		}
	}
	<-ctx.Done()
	return nil
}

// process is a child, ended with the test whatever happens.
type process struct {
	*exec.Cmd
	t      testing.TB
	output *bufio.Reader
	input  io.WriteCloser
	errors strings.Builder
	once   sync.Once
	ended  error
}

func start(t testing.TB, environment, program string, arguments ...string) *process {
	t.Helper()
	p := prepare(t, environment, program, arguments...)
	if err := p.begin(); err != nil {
		t.Fatal(err)
	}
	return p
}

// prepare returns a process that has not begun yet.
func prepare(t testing.TB, environment, program string, arguments ...string) *process {
	t.Helper()
	p := &process{Cmd: exec.Command(program, arguments...), t: t}
	p.Env = append(os.Environ(), environment)
	p.input = must(p.StdinPipe())
	p.output = bufio.NewReaderSize(must(p.StdoutPipe()), 1<<20)
	p.Stderr = &p.errors
	return p
}

func (p *process) begin() error {
	err := p.Start()
	if err == nil {
		p.t.Cleanup(func() { p.kill() })
	}
	return err
}

func child(t testing.TB, side ...any) *process {
	t.Helper()
	return start(t, childVariable+"="+fmt.Sprintln(side...), must(os.Executable()))
}

// tool is the pelton command, which ./run test-go builds and names.
func tool(t *testing.T, arguments ...string) *process {
	t.Helper()
	program := os.Getenv("PELTON_TOOL")
	if program == "" {
		t.Skip("PELTON_TOOL does not name the pelton command: ./run test-go does")
	}
	return start(t, "LANG=C", program, arguments...)
}

func (p *process) kill() { _ = p.Process.Kill(); _ = p.end() }

func (p *process) end() error {
	p.once.Do(func() { p.ended = p.Wait() })
	return p.ended
}

// says waits for a line.
func (p *process) says(line string) {
	p.t.Helper()
	found, err := p.output.ReadString('\n')
	if strings.TrimSpace(found) != line {
		p.t.Fatalf("found %q, wanted %q: %v %s", found, line, err, p.errors.String())
	}
}

// exits waits for the process's end, with that code.
func (p *process) exits(code int) {
	p.t.Helper()
	_, _ = io.Copy(io.Discard, p.output)
	_ = p.end()
	if found := p.ProcessState.ExitCode(); found != code {
		p.t.Fatalf("ended with %d, wanted %d: %s", found, code, p.errors.String())
	}
}
